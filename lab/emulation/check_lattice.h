// Problems for the lattice: any table of arcs, unit steps included, and arcs of extreme size.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "lab/emulation/check_common.h"
#include "xla_kernels/cuda/lattice.h"

namespace jax_rnnt::cuda {

struct Arc {
  int64_t dt, du, may_end, plane, other = -1;
};
struct Table {
  Table(std::initializer_list<Arc> arcs) {
    for (const Arc& arc : arcs) {
      dt.push_back(arc.dt), du.push_back(arc.du), may_end.push_back(arc.may_end);
      plane.push_back(arc.plane), other.push_back(arc.other);
    }
  }
  std::vector<int64_t> dt, du, may_end, plane, other;
  size_t Arcs() const { return dt.size(); }
  bool Uses(size_t k, int64_t p) const { return plane[k] == p || other[k] == p; }
};

// Arcs of extreme size; there are at most two sizes.
struct Masks {
  double size[2] = {0, 0};
  double shift = 0;                                   // of all arcs that are not masked
  std::function<int(int plane, int t, int u)> where;  // 0 or 1: masked by that size; below 0: not masked
};

struct LatticeOptions {
  int batch, frames, labels;
  bool in_place = true;
  double forbidden = 0.1;  // share of arcs of -inf
  Masks masks = {};
  std::vector<int> num_frames = {}, num_labels = {};  // if not empty: instead of random lengths
  double fault = 0;                                   // if not 0: an arc in the middle of the first sequence
  bool stale = false;                                 // the workspace holds 15, a flag of all bits, and not NaN
};

// A log weight as the counts of the masks and the rest: exact if masks cancel, at any size.
struct Weight {
  int count[2] = {0, 0};
  double rest = -kInfinity;

  bool Possible() const { return rest > -kInfinity; }
  friend Weight operator*(const Weight& a, const Weight& b) {
    return {{a.count[0] + b.count[0], a.count[1] + b.count[1]}, a.rest + b.rest};
  }
};

// Padding and the label arcs of the last column hold NaN.
template <class A>
class LatticeProblem {
 public:
  LatticeProblem(const char* name, const Table& table, const LatticeOptions& options)
      : name_(name),
        table_(table),
        options_(options),
        B(options.batch),
        T(options.frames),
        U1(options.labels + 1),
        num_frames_(B),
        num_labels_(B) {
    Random random(uint64_t(B * 1000 + T));
    for (int b = 0; b < B; ++b) {
      num_frames_[b] = b == 0 ? int(T) : int(random.Uniform(0, double(T) + 1));
      num_labels_[b] = b == 0 ? int(U1) - 1 : int(random.Uniform(0, double(U1)));
      if (!options.num_frames.empty()) num_frames_[b] = options.num_frames[size_t(b)];
      if (!options.num_labels.empty()) num_labels_[b] = options.num_labels[size_t(b)];
    }
    int64_t planes = 0;
    for (size_t k = 0; k < table.Arcs(); ++k) planes = std::max({planes, table.plane[k] + 1, table.other[k] + 1});
    for (int64_t p = 0; p < planes; ++p) planes_.push_back(Plane(p, random));
    if (options.fault != 0) planes_[0][Row(0, T / 2, U1 / 2)] = A(options.fault);
    for (int64_t p = 0; p < planes; ++p) grads_.emplace_back(B * T * U1);
  }

  // Sequence b of another problem alone, without padding.
  LatticeProblem(const LatticeProblem& whole, int b)
      : LatticeProblem(whole.name_, whole.table_,
                       {1, whole.Frames(b), whole.Labels(b), !whole.options_.in_place, 0, whole.options_.masks}) {
    for (size_t p = 0; p < planes_.size(); ++p) {
      for (int64_t i = 0; i < T * U1; ++i) planes_[p][i] = whole.planes_[p][whole.Row(b, i / U1, i % U1)];
    }
  }

  // The loss alone, the gradient, the bits of each sequence alone.
  void Check() {
    Run();
    for (int b = 0; b < B && problem_.Empty(); ++b) CheckSequence(b);
    for (int b = 0; B > 1 && b < B && problem_.Empty(); ++b) {
      if (Frames(b) == 0) continue;
      LatticeProblem alone(*this, b);
      alone.Run();
      bool same = alone.problem_.Empty() && SameBits(alone.loss_[0], loss_[b]);
      for (size_t p = 0; p < grads_.size(); ++p) {
        for (int64_t i = 0; i < alone.T * alone.U1; ++i) {
          same = same && SameBits(alone.grads_[p][i], grads_[p][Row(b, i / alone.U1, i % alone.U1)]);
        }
      }
      if (!same) problem_.Wrong("loss or gradient of a sequence alone", b, alone.loss_[0], loss_[b]);
    }
    Count(name_, problem_.text);
  }

  // A faint mask must give the same bits as -inf.
  void CheckFaint() {
    LatticeProblem forbidden(*this);
    for (auto& plane : forbidden.planes_) {
      for (int64_t i = 0; i < plane.size(); ++i) {
        if (plane[i] == A(options_.masks.size[0])) plane[i] = A(-kInfinity);
      }
    }
    Run();
    forbidden.Run();
    if (!SameResults(forbidden)) problem_.Wrong("loss or gradient with a faint mask", 0, loss_[0], forbidden.loss_[0]);
    Count(name_, problem_.text);
  }

 private:
  Buffer<A> NewWorkspace() const {
    const LatticeArgs args = {ArcsOf(), B, T, U1, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    Buffer<A> workspace(B * LatticeWorkspace(args, true));
    for (int64_t i = 0; options_.stale && i < workspace.size(); ++i) workspace[i] = A(15);
    return workspace;
  }
  bool SameResults(const LatticeProblem& other) const {
    bool same = loss_.SameBits(other.loss_);
    for (size_t p = 0; p < grads_.size(); ++p) same = same && grads_[p].SameBits(other.grads_[p]);
    return same;
  }
  static bool SameBits(A x, A y) { return memcmp(&x, &y, sizeof(A)) == 0; }
  int64_t Row(int64_t b, int64_t t, int64_t u) const { return (b * T + t) * U1 + u; }
  int Frames(int b) const { return std::max(0, std::min(int(num_frames_[b]), int(T))); }
  int Labels(int b) const { return std::max(0, std::min(int(num_labels_[b]), int(U1) - 1)); }
  int Mask(int64_t p, int64_t t, int64_t u) const {
    return options_.masks.where ? options_.masks.where(int(p), int(t), int(u)) : -1;
  }
  Buffer<A> Plane(int64_t p, Random& random) const {
    bool labels_only = true;  // if so, the last column has none of these arcs
    for (size_t k = 0; k < table_.Arcs(); ++k) labels_only &= !table_.Uses(k, p) || table_.du[k] > 0;
    Buffer<A> plane(B * T * U1);
    for (int64_t i = 0; i < plane.size(); ++i) {
      const int b = int(i / (T * U1)), t = int(i / U1 % T), u = int(i % U1), mask = Mask(p, t, u);
      const bool used = t < Frames(b) && u + labels_only <= Labels(b);
      plane[i] = !used                                       ? A(kNaN)
                 : mask >= 0                                 ? A(options_.masks.size[mask])
                 : random.Uniform(0, 1) < options_.forbidden ? A(-kInfinity)
                                                             : A(options_.masks.shift + random.Uniform(-4, 0));
    }
    return plane;
  }

  Topology ArcsOf() const {
    return {int(table_.Arcs()),    int(planes_.size()), table_.dt.data(),   table_.du.data(),
            table_.may_end.data(), table_.plane.data(), table_.other.data()};
  }
  cudaError_t Launch(std::vector<Buffer<A>>& in, std::vector<Buffer<A>>* out, Buffer<A>& loss, Buffer<A>& workspace) {
    std::vector<const void*> log_plane;
    std::vector<void*> grad_plane;
    for (auto& plane : in) log_plane.push_back(plane.data());
    for (size_t p = 0; out != nullptr && p < out->size(); ++p) grad_plane.push_back((*out)[p].data());
    const LatticeArgs args = {ArcsOf(),
                              B,
                              T,
                              U1,
                              log_plane.data(),
                              num_frames_.data(),
                              num_labels_.data(),
                              loss.data(),
                              out != nullptr ? grad_plane.data() : nullptr,
                              workspace.data()};
    return Lattice(sizeof(A) == 8, args, nullptr);
  }
  void Run() {
    std::vector<Buffer<A>> in(planes_);
    Buffer<A> loss_only(B), workspace = NewWorkspace(), other_workspace = NewWorkspace();
    problem_.Succeeded(OnDevice([&] { return Launch(in, nullptr, loss_only, workspace); }));
    std::vector<Buffer<A>>& out = options_.in_place ? in : grads_;
    problem_.Succeeded(OnDevice([&] { return Launch(in, &out, loss_, other_workspace); }));
    for (int b = 0; b < B; ++b) {
      if (loss_[b] == loss_[b] && !SameBits(loss_[b], loss_only[b])) {
        problem_.Wrong("loss without gradient", b, loss_only[b], loss_[b]);
      }
    }
    for (size_t p = 0; p < in.size(); ++p) {
      if (options_.in_place) {
        memcpy(grads_[p].host(), in[p].host(), size_t(in[p].size()) * sizeof(A));
      } else if (!in[p].SameBits(planes_[p])) {
        problem_.Say("the lattice has written to its arcs");
      }
    }
    Sum(loss_);
    for (const auto& plane : grads_) Sum(plane);
  }

  // log(a / b).
  double Ratio(const Weight& a, const Weight& b) const {
    long double sum = (long double)a.rest - b.rest;
    for (int i = 0; i < 2; ++i) sum += (long double)(a.count[i] - b.count[i]) * A(options_.masks.size[i]);
    return double(sum);
  }
  void Add(Weight& sum, const Weight& term) const {
    if (!sum.Possible() || !term.Possible()) {
      if (term.Possible()) sum = term;
      return;
    }
    const double ratio = Ratio(term, sum);
    if (ratio > 0) sum = term;
    sum.rest += std::log1p(std::exp(-std::fabs(ratio)));
  }
  // Rounded like the sum of the planes.
  Weight WeightOf(size_t k, int b, int t, int u) const {
    Weight weight;
    A sum = 0;
    long double masked = 0;
    for (const int64_t p : {table_.plane[k], table_.other[k]}) {
      if (p < 0) continue;
      const int mask = Mask(p, t, u);
      sum += planes_[size_t(p)][Row(b, t, u)];
      if (mask >= 0) ++weight.count[mask], masked += A(options_.masks.size[mask]);
    }
    weight.rest = double(sum - masked);
    return weight;
  }

  void CheckSequence(int b) {
    const int frames = Frames(b), labels = Labels(b);
    const auto node = [&](int t, int u) { return size_t(t) * (labels + 1) + u; };
    std::vector<Weight> alpha(size_t(frames + 1) * (labels + 1)), beta(alpha);
    int v, w;  // where an arc ends
    const auto exists = [&](size_t k, int t, int u) {
      v = t + int(table_.dt[k]), w = u + int(table_.du[k]);
      return w <= labels && (v < frames || (v == frames && w == labels && table_.may_end[k] != 0));
    };
    alpha[node(0, 0)].rest = beta[node(frames, labels)].rest = 0;
    if (frames == 0 && labels > 0) beta[node(0, 0)].rest = -kInfinity;
    bool bad = false;
    for (int i = 0; i < frames * (labels + 1); ++i) {
      const int t = i / (labels + 1), u = i % (labels + 1);
      for (size_t k = 0; k < table_.Arcs(); ++k) {
        if (u + table_.du[k] <= labels) bad |= !(WeightOf(k, b, t, u).rest < kInfinity);
        if (exists(k, t, u)) Add(alpha[node(v, w)], alpha[node(t, u)] * WeightOf(k, b, t, u));
      }
    }
    for (int i = frames * (labels + 1) - 1; i >= 0; --i) {
      const int t = i / (labels + 1), u = i % (labels + 1);
      for (size_t k = 0; k < table_.Arcs(); ++k) {
        if (exists(k, t, u)) Add(beta[node(t, u)], beta[node(v, w)] * WeightOf(k, b, t, u));
      }
    }
    const Weight z = beta[node(0, 0)];
    Weight one;
    one.rest = 0;
    double loss = bad ? kNaN : z.Possible() ? Ratio(one, z) : kInfinity;
    if (loss > double(std::numeric_limits<A>::max())) loss = kInfinity;
    // Wide mode and the sums here round logarithms of paths.
    const double size = (1 + std::fabs(options_.masks.shift)) * (frames + labels) + std::fabs(loss);
    const double rounding = std::isfinite(size) ? 0x1p-49 * size : 0;
    const double tolerance = (sizeof(A) == 8 ? 1e-12 : 1e-5) + rounding;
    problem_.Compare("loss", b, double(loss_[b]), loss, tolerance * (1 + std::fabs(loss)), true);
    for (size_t p = 0; p < grads_.size(); ++p) {
      for (int i = 0; i < T * U1; ++i) {
        const int t = i / int(U1), u = i % int(U1);
        const bool inside = t < frames && u <= labels;
        double posterior = 0;
        for (size_t k = 0; inside && loss < kInfinity && k < table_.Arcs(); ++k) {
          if (!table_.Uses(k, int64_t(p)) || !exists(k, t, u)) continue;
          const Weight through = alpha[node(t, u)] * WeightOf(k, b, t, u) * beta[node(v, w)];
          if (through.Possible()) posterior += std::exp(Ratio(through, z));
        }
        if (inside && bad) posterior = kNaN;
        problem_.Compare("gradient", Row(b, t, u), double(grads_[p][Row(b, t, u)]), -posterior, inside ? tolerance : 0,
                         true);
      }
    }
  }

  const char* name_;
  const Table table_;
  const LatticeOptions options_;
  const int64_t B, T, U1;
  Buffer<int32_t> num_frames_, num_labels_;
  std::vector<Buffer<A>> planes_, grads_;
  Buffer<A> loss_{B};
  Problem problem_;
};

template <class A>
void CheckLattice(const char* name, const Table& table, const LatticeOptions& options) {
  if (int64_t(options.batch) * options.frames * (options.labels + 1) > most_numbers) return;
  LatticeProblem<A>(name, table, options).Check();
}

// Masks of every size on arcs of every kind, with and without another path.
template <class A>
void CheckMasks(const char* name, const Table& table, int batch, int frames, int labels) {
  const double largest = double(std::numeric_limits<A>::max());
  const auto is_label = [&table](int plane) {
    for (size_t k = 0; k < table.Arcs(); ++k) {
      if (table.Uses(k, plane) && table.du[k] > 0) return true;
    }
    return false;
  };
  const struct {
    const char* name;
    std::function<bool(int plane, int t, int u)> where;
  } patterns[] = {
      {"one arc", [=](int p, int t, int u) { return p == 1 && t == frames / 2 && u == labels / 2; }},
      {"labels of a frame", [=](int p, int t, int) { return is_label(p) && t == frames / 2; }},
      {"blanks of a frame", [=](int p, int t, int) { return !is_label(p) && t == frames / 2; }},
      {"many frames", [=](int, int t, int) { return t > frames / 4 && t < frames * 3 / 4; }},
      {"labels of a column", [=](int p, int, int u) { return is_label(p) && u == labels / 2; }},
      {"blanks of a column", [=](int p, int, int u) { return !is_label(p) && u == labels / 2; }},
      {"all labels", [=](int p, int, int) { return is_label(p); }},
      {"all arcs", [=](int, int, int) { return true; }},
  };
  for (const double size : {-1e5, -1e9, -1e15, -1e30, -largest, 1e7, 1e30}) {
    for (const auto& pattern : patterns) {
      Masks masks;
      masks.size[0] = size;
      masks.where = [&](int p, int t, int u) { return pattern.where(p, t, u) ? 0 : -1; };
      char text[100];
      snprintf(text, sizeof text, "%s, %g on %s", name, size, pattern.name);
      CheckLattice<A>(text, table, {batch, frames, labels, size < 0, 0, masks});
    }
  }
}

}  // namespace jax_rnnt::cuda
