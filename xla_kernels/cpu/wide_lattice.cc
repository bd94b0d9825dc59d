// The lattice of one sequence in the log domain, for finite arcs of any size, such as masks of -1e9 or of the lowest
// float on every path. It is rarely needed, so it is plain loops in double precision, with 24 bytes per node.
//
// A log weight is a pair 2^32 h + l: h sums the arcs of 2^20 or more in size, l all others. Paths through the same
// masks have the same h, which cancels exactly; then l decides between them as if there were no masks. Posteriors need
// no beta: each arc that enters a node has a share of the node's weight, and the occupancy of the terminal node, 1,
// flows back through the shares. So posteriors are finite and add up, whatever cancels.
#include "xla_kernels/cpu/wide_lattice.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace jax_rnnt::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct LogWeight {
  static constexpr double kUnit = 0x1p32;  // keeps sums of the lowest doubles finite, so that h - h is not NaN

  double h = 0, l = -kInfinity;

  LogWeight Times(double arc) const {
    return std::abs(arc) < double(1 << 20) || std::isinf(arc) ? LogWeight{h, l + arc} : LogWeight{h + arc / kUnit, l};
  }
  // log(this / other).
  double Over(const LogWeight& other) const {
    return l == -kInfinity ? -kInfinity : (h - other.h) * kUnit + (l - other.l);
  }
  double Log() const { return h * kUnit + l; }
  void Add(const LogWeight& other) {
    if (other.l == -kInfinity) return;
    const double d = l == -kInfinity ? -kInfinity : Over(other);
    const double more = std::log1p(std::exp(-std::abs(d)));
    if (d < 0) *this = other;
    l += more;
  }
};

template <class A>
class Sequence {
 public:
  Sequence(const LatticeArgs& args, int64_t sequence)
      : args_(args),
        topology_(args.topology),
        sequence_(sequence),
        frames_(std::clamp<int64_t>(args.num_frames[sequence], 0, args.frames)),
        labels_(std::clamp<int64_t>(args.num_labels[sequence], 0, args.columns - 1)) {}

  Verdict Judge(bool zero, int64_t exponent) const {
    const double faint = std::min(double(kLimit), double(1 << 28) / double(frames_ + labels_ + 1));
    const double most = MostOfAnArc(frames_, labels_);
    bool bad = false, is_faint = false, high = false, huge = false;
    for (int64_t t = 0; t < frames_; ++t) {
      for (int64_t u = 0; u <= labels_; ++u) {
        for (int k = 0; k < topology_.num_arcs; ++k) {
          if (u + topology_.du[k] > labels_) continue;
          const A x = LogArc(k, t, u);
          bad |= !(x < A(kInfinity));
          is_faint |= x < -faint && x > A(-kInfinity);
          high |= x > most;
          huge |= x > faint;
        }
      }
    }
    if (bad) return Verdict::kBad;
    return huge || (is_faint && (high || zero || exponent < kFaintLikelihood)) ? Verdict::kWide : Verdict::kExact;
  }

  bool Run() {
    const int64_t columns = labels_ + 1;
    std::vector<LogWeight> alpha(frames_ * columns);
    LogWeight end;
    alpha[0] = {0, 0};
    const auto is_end = [&](int k, int64_t t, int64_t u) {
      return t == frames_ && u == labels_ && topology_.may_end[k];
    };
    for (int64_t t = 0; t < frames_; ++t) {
      for (int64_t u = 0; u <= labels_; ++u) {
        for (int k = 0; k < topology_.num_arcs; ++k) {
          const int64_t to_t = t + topology_.dt[k], to_u = u + topology_.du[k];
          if (to_u > labels_ || !(to_t < frames_ || is_end(k, to_t, to_u))) continue;
          (to_t < frames_ ? alpha[to_t * columns + to_u] : end).Add(alpha[t * columns + u].Times(LogArc(k, t, u)));
        }
      }
    }
    const A loss = A(-end.Log());
    static_cast<A*>(args_.loss)[sequence_] = loss;
    if (!(loss < A(kInfinity)) || args_.grad_plane == nullptr) return loss < A(kInfinity);

    std::vector<double> occupancy(frames_ * columns);
    for (int64_t t = frames_; t-- > 0;) {
      for (int64_t u = labels_; u >= 0; --u) {
        double posteriors[kMaxArcs] = {}, sum = 0;
        for (int k = 0; k < topology_.num_arcs; ++k) {
          const int64_t to_t = t + topology_.dt[k], to_u = u + topology_.du[k];
          if (to_u > labels_ || !(to_t < frames_ || is_end(k, to_t, to_u))) continue;
          const int64_t to = to_t * columns + to_u;
          const LogWeight through = alpha[t * columns + u].Times(LogArc(k, t, u));
          const double share = std::exp(through.Over(to_t < frames_ ? alpha[to] : end));
          const double reached = to_t < frames_ ? occupancy[to] : 1;
          posteriors[k] = reached > 0 ? reached * share : 0;
          sum += posteriors[k];
        }
        occupancy[t * columns + u] = sum;
        for (int p = 0; p < topology_.num_planes; ++p) {
          double gradient = 0;
          for (int k = 0; k < topology_.num_arcs; ++k) {
            if (topology_.plane[k] == p || topology_.other[k] == p) gradient -= posteriors[k];
          }
          static_cast<A*>(args_.grad_plane[p])[At(t, u)] = A(gradient);
        }
      }
    }
    return true;
  }

 private:
  int64_t At(int64_t t, int64_t u) const { return (sequence_ * args_.frames + t) * args_.columns + u; }
  A LogArc(int k, int64_t t, int64_t u) const {
    const A x = static_cast<const A*>(args_.log_plane[topology_.plane[k]])[At(t, u)];
    return topology_.other[k] < 0 ? x : x + static_cast<const A*>(args_.log_plane[topology_.other[k]])[At(t, u)];
  }

  const LatticeArgs& args_;
  const Topology& topology_;
  const int64_t sequence_, frames_, labels_;
};

}  // namespace

Verdict Judge(bool is_double, const LatticeArgs& args, int64_t sequence, bool zero, int64_t exponent) {
  return is_double ? Sequence<double>(args, sequence).Judge(zero, exponent)
                   : Sequence<float>(args, sequence).Judge(zero, exponent);
}

bool WideLattice(bool is_double, const LatticeArgs& args, int64_t sequence) {
  return is_double ? Sequence<double>(args, sequence).Run() : Sequence<float>(args, sequence).Run();
}

}  // namespace jax_rnnt::cpu
