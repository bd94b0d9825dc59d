// Problems for the three stages of a loss of unit steps: emission, lattice, gradient of the emission.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "tools/emulation/check_common.h"
#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/softmax_emission.h"

namespace jax_rnnt::cuda {

enum class Fault { kNone, kMinusInfinity, kDeadRow, kNaN, kInfinity, kInfiniteBlank, kBadLabel, kNoPath, kFarAnchor };

struct Options {
  int batch = 2, frames = 5, labels = 3, classes = 7;
  bool monotonic = false;
  bool ragged = true, in_place = true, normalize = true, label_per_frame = false;
  bool stale = false;  // the workspace holds 15, a flag of all bits, and not NaN
  bool bernoulli = false;
  int num_blanks = 1, durations = 0, offset = 0;
  int gradient_offset = 0;                  // more than that of the logits
  double clamp = 0, spread = 4, shift = 0;  // logits: shift + [-spread, spread], a Bernoulli blank without shift
  double scale = 0;                         // scale of the first sequence, if not 0
  Fault fault = Fault::kNone;
  std::vector<int> num_frames, num_labels;  // if not empty: instead of random lengths
};

template <class T>
struct Traits;
template <>
struct Traits<Half> {
  using A = float;
  static constexpr DType kDType = DType::kF16;
  static constexpr double kEpsilon = 0x1p-11;
};
template <>
struct Traits<BFloat16> {
  using A = float;
  static constexpr DType kDType = DType::kBF16;
  static constexpr double kEpsilon = 0x1p-8;
};
template <>
struct Traits<float> {
  using A = float;
  static constexpr DType kDType = DType::kF32;
  static constexpr double kEpsilon = 0x1p-24;
};
template <>
struct Traits<double> {
  using A = double;
  static constexpr DType kDType = DType::kF64;
  static constexpr double kEpsilon = 0x1p-53;
};

// The log-likelihood, and log alpha and log beta of each node, the terminal node included.
struct PathSums {
  PathSums(bool monotonic, int frames, int labels, const std::function<double(int, int, int)>& arc)
      : frames(frames), labels(labels), alpha(size_t(frames + 1) * (labels + 1), -kInfinity), beta(alpha) {
    const int step = monotonic ? 1 : 0;  // frames that a label arc takes
    const auto allowed = [&](int t, int u) { return u <= labels && (t < frames || (t == frames && u == labels)); };
    At(alpha, 0, 0) = At(beta, frames, labels) = 0;
    for (int t = 0; t < frames; ++t) {
      for (int u = 0; u <= labels; ++u) {
        const double here = At(alpha, t, u);
        if (allowed(t + 1, u)) Add(At(alpha, t + 1, u), here + arc(0, t, u));
        if (allowed(t + step, u + 1)) Add(At(alpha, t + step, u + 1), here + arc(1, t, u));
      }
    }
    for (int t = frames - 1; t >= 0; --t) {
      for (int u = labels; u >= 0; --u) {
        for (int which = 0; which < 2; ++which) {
          if (!Ends(which, step, t, u)) continue;
          Add(At(beta, t, u), arc(which, t, u) + At(beta, t + (which == 0 ? 1 : step), u + which));
        }
      }
    }
    log_likelihood = At(alpha, frames, labels);
    posterior = [this, arc, step](int which, int t, int u) {
      if (!Ends(which, step, t, u)) return 0.0;
      const double after = At(beta, t + (which == 0 ? 1 : step), u + which);
      return std::exp(At(alpha, t, u) + arc(which, t, u) + after - log_likelihood);
    };
  }
  bool Ends(int which, int step, int t, int u) const {  // whether the arc ends at a node
    const int to_t = t + (which == 0 ? 1 : step), to_u = u + which;
    return to_u <= labels && (to_t < frames || to_u == labels);
  }
  double& At(std::vector<double>& plane, int t, int u) const { return plane[size_t(t) * (labels + 1) + u]; }
  double At(const std::vector<double>& plane, int t, int u) const { return plane[size_t(t) * (labels + 1) + u]; }
  static void Add(double& sum, double term) { sum = LogAdd(sum, term); }

  int frames, labels;
  std::vector<double> alpha, beta;
  double log_likelihood;
  std::function<double(int, int, int)> posterior;  // (arc, t, u)
};

template <class T>
class Problem {
  using A = typename Traits<T>::A;

 public:
  Problem(const char* name, const Options& options, uint64_t seed)
      : name_(name),
        options_(options),
        B(options.batch),
        frames_(options.frames),
        columns_(options.labels + 1),
        V(options.classes),
        R(options.classes + options.durations),
        nodes_(int64_t(B) * frames_ * columns_),
        label_frames_(options.label_per_frame ? frames_ : 1),
        logits_(nodes_ * R, options.offset),
        label_(int64_t(B) * label_frames_ * columns_),
        num_frames_(B),
        num_labels_(B),
        scale_(B),
        clamp_(B) {
    Random random(seed);
    for (int i = 0; i < options.num_blanks; ++i) blanks_.push_back((i * 3 + random.Below(V)) % V);
    for (int b = 0; b < B; ++b) {
      const bool whole = !options.ragged || b == 0;
      num_frames_[b] = !options.num_frames.empty() ? options.num_frames[b]
                       : whole                     ? frames_
                                                   : random.Below(frames_ + 1);
      num_labels_[b] = !options.num_labels.empty() ? options.num_labels[b]
                       : whole                     ? columns_ - 1
                                                   : random.Below(columns_);
      scale_[b] = A(random.Uniform(-2, 2));
      if (b == 0 && options.scale != 0) scale_[b] = A(options.scale);
      clamp_[b] = A(options.clamp);
    }
    for (int64_t i = 0; i < label_.size(); ++i) {
      const int b = int(i / (label_frames_ * columns_)), u = int(i % columns_);
      label_[i] = u < num_labels_[b] ? random.Below(V) : u == num_labels_[b] ? kNoLabel : kOutside;
    }
    const auto shift = [&](int k) { return options.bernoulli && k == blanks_[0] ? 0 : options.shift; };
    for (int64_t i = 0; i < nodes_; ++i) {
      for (int k = 0; k < R; ++k) {
        const double x = random.Uniform(-options.spread, options.spread);
        if (LabelAt(i) != kOutside)
          logits_[i * R + k] = NarrowLogit(shift(k) + (options.normalize ? x : -std::fabs(x)));
      }
    }
    const auto inside = [&](double share) { return num_frames_[0] > 0 ? random.Uniform(0, 1) < share : false; };
    for (int64_t i = 0; i < nodes_; ++i) {
      if (LabelAt(i) == kOutside) continue;
      const auto fill = [&](double x) {
        for (int k = 0; k < R; ++k) logits_[i * R + k] = NarrowLogit(x);
      };
      if (options.fault == Fault::kMinusInfinity && inside(0.5))
        logits_[i * R + random.Below(R)] = NarrowLogit(-kInfinity);
      if (options.fault == Fault::kDeadRow && inside(0.1)) fill(-kInfinity);
      if (options.fault == Fault::kFarAnchor && inside(0.7)) {
        const double below[] = {50, 70, 5000, kInfinity};
        logits_[i * R + Anchor()] = NarrowLogit(options.shift - below[random.Below(4)]);
      }
    }
    const int64_t odd = R + (options.durations > 0 ? V : V / 2);  // in the first sequence only
    if (options.fault == Fault::kNaN) logits_[odd] = NarrowLogit(kNaN);
    if (options.fault == Fault::kInfinity) logits_[odd] = NarrowLogit(kInfinity);
    if (options.fault == Fault::kInfiniteBlank) logits_[R + blanks_[0]] = NarrowLogit(kInfinity);
    if (options.fault == Fault::kBadLabel) label_[0] = V, label_[label_.size() > columns_ ? columns_ : 0] = V + 5;
    if (options.fault == Fault::kNoPath) {
      for (int k = 0; k < R; ++k) logits_[k] = NarrowLogit(-kInfinity);
    }
  }

  // Sequence b of another problem alone, without padding.
  Problem(const Problem& whole, int b)
      : Problem(whole.name_, Cut(whole.options_, whole.num_frames_[b], whole.num_labels_[b]), 1) {
    blanks_ = whole.blanks_;
    scale_[0] = whole.scale_[b];
    clamp_[0] = whole.clamp_[b];
    for (int u = 0; u < columns_; ++u) label_[u] = whole.label_[b * whole.columns_ + u];
    for (int64_t i = 0; i < nodes_ * R; ++i) logits_[i] = whole.logits_[whole.RowOf(b, *this, i / R) * R + i % R];
  }

  // Runs the three stages and compares each with double precision on that stage's own inputs. `alone`: also compares
  // the bits with those of each sequence on its own.
  void Check(bool alone) {
    Run();
    for (int b = 0; alone && b < B && problem_.empty(); ++b) {
      if (num_frames_[b] == 0) continue;
      Problem other(*this, b);
      other.Run();
      if (!other.problem_.empty()) problem_ = "alone: " + other.problem_;
      CompareBits("loss of a sequence alone", other.loss_[0], loss_[b]);
      for (int64_t row = 0; row < other.nodes_; ++row) {
        const int64_t here = RowOf(b, other, row);
        CompareBits("norm of a sequence alone", other.norm_[row], norm_[here]);
        for (int which = 0; which < 2; ++which)
          CompareBits("arc's gradient of a sequence alone", other.grads_[which][row], grads_[which][here]);
        for (int k = 0; k < R; ++k) {
          CompareBits("dlogits of a sequence alone", Widen(other.dlogits_[row * R + k]), Widen(dlogits_[here * R + k]));
        }
      }
    }
    Count(name_, problem_);
  }

 private:
  void Run() {
    CheckForward();
    CheckLattice();
    CheckBackward();
  }

  static Options Cut(Options options, int frames, int labels) {
    options.batch = 1;
    options.frames = frames;
    options.labels = labels;
    options.ragged = false;
    return options;
  }
  // The row of sequence b in this problem that corresponds to row `row` of that sequence alone.
  int64_t RowOf(int b, const Problem& alone, int64_t row) const {
    return (b * frames_ + row / alone.columns_) * columns_ + row % alone.columns_;
  }
  template <class Element>
  void CompareBits(const char* what, Element is, Element should) {
    if (memcmp(&is, &should, sizeof is) != 0) Wrong(what, 0, double(is), double(should));
  }

  static T NarrowLogit(double x) { return Narrow<T>(A(x)); }

  int LabelAt(int64_t row) const {
    const int b = int(row / (frames_ * columns_)), t = int(row / columns_ % frames_), u = int(row % columns_);
    return t < num_frames_[b] ? label_[(int64_t(b) * label_frames_ + (label_frames_ > 1 ? t : 0)) * columns_ + u]
                              : kOutside;
  }

  EmissionShape Shape() {
    return {B,
            frames_,
            columns_,
            V,
            options_.durations,
            label_frames_,
            options_.normalize,
            options_.bernoulli,
            int(blanks_.size()),
            blanks_.data()};
  }

  void Wrong(const char* what, int64_t where, double is, double should) {
    if (!problem_.empty()) return;  // the first problem says most
    char text[200];
    snprintf(text, sizeof text, "%s [%lld] is %.9g, should be %.9g", what, static_cast<long long>(where), is, should);
    problem_ = text;
  }
  void Compare(const char* what, int64_t where, double is, double should, double tolerance) {
    if (is != is && should != should) return;
    const double error = std::fabs(is - should);
    if (is == should || error <= tolerance) {  // false for NaN and for infinities of different signs
      if (is != should && sizeof(T) > 2) worst = std::fmax(worst, error / tolerance);
      return;
    }
    Wrong(what, where, is, should);
  }
  bool Succeeded(const char* what, cudaError_t error) {
    if (error != cudaSuccess && problem_.empty()) problem_ = std::string(what) + ": " + cudaGetErrorString(error);
    return error == cudaSuccess;
  }
  void CheckForward() {
    for (size_t i = 0; i <= blanks_.size(); ++i) arcs_.emplace_back(nodes_);
    std::vector<void*> log_blank;
    for (size_t i = 0; i < blanks_.size(); ++i) log_blank.push_back(arcs_[i].data());
    std::vector<void*> log_duration;
    for (int i = 0; i < options_.durations; ++i) durations_.emplace_back(nodes_);
    for (auto& plane : durations_) log_duration.push_back(plane.data());
    const Buffer<T> before = logits_;
    const EmissionForwardArgs args = {Shape(),          logits_.data(),      label_.data(),       num_frames_.data(),
                                      log_blank.data(), arcs_.back().data(), log_duration.data(), norm_.data()};
    if (!Succeeded("EmissionForward", OnDevice([&] { return EmissionForward(Traits<T>::kDType, args, nullptr); })))
      return;
    if (!logits_.SameBits(before)) problem_ = "EmissionForward has written to the logits";
    for (int64_t i = 0; i < nodes_; ++i) {
      const int label = LabelAt(i);
      const bool outside = label == kOutside;
      const Softmax softmax = SoftmaxOf(i, 0, V), of_durations = SoftmaxOf(i, V, R);
      const double z = options_.bernoulli ? Logit(i, int(blanks_[0])) : 0;
      const bool bad = softmax.sum != softmax.sum || of_durations.sum != of_durations.sum || !(z < kInfinity);
      const auto log_prob = [&](int64_t k, const Softmax& softmax) {
        const double x = Logit(i, int(k));
        return !options_.normalize && x == kInfinity ? kNaN : softmax.Log(x);
      };
      const auto compare = [&](const char* what, double is, double should) {
        if (outside) should = -kInfinity;
        Compare(what, i, is, should, tolerance_ * (1 + std::fabs(should)));
      };
      CheckNorm(i, softmax);
      for (size_t arc = 0; arc < arcs_.size(); ++arc) {
        const int64_t k = arc < blanks_.size() ? blanks_[arc] : label;
        double value = kNaN;  // for labels out of range
        if (k == kNoLabel) {
          value = bad ? kNaN : -kInfinity;
        } else if (0 <= k && k < V) {
          value = bad                                     ? kNaN
                  : options_.bernoulli && k == blanks_[0] ? LogSigmoid(z)
                  : options_.bernoulli                    ? log_prob(k, softmax) + LogSigmoid(-z)
                                                          : log_prob(k, softmax);
        }
        compare("log_arc", arcs_[arc][i], value);
      }
      for (int d = 0; d < options_.durations; ++d) {
        compare("log_duration", durations_[d][i], outside ? 0 : bad ? kNaN : log_prob(V + d, of_durations));
      }
    }
    Sum(norm_);
    for (const auto& arc : arcs_) Sum(arc);
    for (const auto& plane : durations_) Sum(plane);
  }

  double Logit(int64_t row, int k) const { return double(Widen(logits_[row * R + k])); }
  static double LogSigmoid(double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); }

  struct Softmax {
    double Log(double x) const { return sum == 0 ? -kInfinity : x - max - std::log(sum); }
    double max, sum;  // sum of exp(x - max)
  };
  // Softmax of the logits [begin, end) of a row, without a Bernoulli blank.
  Softmax SoftmaxOf(int64_t row, int begin, int end) const {
    if (LabelAt(row) == kOutside || !options_.normalize) return {0, 1};
    double max = -kInfinity, sum = 0;
    const auto counts = [&](int k) { return !options_.bernoulli || k != blanks_[0]; };
    for (int k = begin; k < end; ++k) {
      const double x = Logit(row, k);
      if (counts(k) && (x != x || x == kInfinity)) return {0, kNaN};
      if (counts(k)) max = std::fmax(max, x);
    }
    if (max == -kInfinity) return {0, 0};
    for (int k = begin; k < end; ++k) sum += counts(k) ? std::exp(Logit(row, k) - max) : 0;
    return {max, sum};
  }

  // The class of the anchor, as in shape.h.
  int Anchor() const { return options_.bernoulli ? blanks_[0] == 0 : int(blanks_[0]); }
  static bool IsLse(A norm) { return norm <= 0 || norm >= kTiny<A>; }
  void CheckNorm(int64_t row, const Softmax& softmax) {
    const A norm = norm_[row];
    const double below = Anchor() < V ? softmax.max - Logit(row, Anchor()) : kInfinity;
    if (LabelAt(row) == kOutside || !options_.normalize || softmax.sum != softmax.sum) {
      Compare("norm", row, norm, softmax.sum != softmax.sum ? kNaN : 0, 0);
    } else if (softmax.sum > 0 && below <= kReach<A>) {
      const double should = softmax.sum * std::exp(below) * kSumScale<A>;
      Compare("anchored norm", row, norm, should, should * (tolerance_ + kRounding * below));
    } else {
      if (!IsLse(norm)) Wrong("norm that is lse", row, norm, 0);
      const double should = -softmax.Log(0);
      Compare("lse", row, norm, softmax.sum > 0 ? should : 0, tolerance_ * (1 + std::fabs(should)));
    }
  }

  void CheckLattice() {
    const Buffer<A>&blank = arcs_.front(), &label = arcs_.back();
    const int64_t dt[2] = {1, options_.monotonic ? 1 : 0}, du[2] = {0, 1}, may_end[2] = {1, 1};
    const int64_t plane[2] = {0, 1}, other[2] = {-1, -1};
    Buffer<A> in[2] = {blank, label}, in_again[2] = {blank, label};
    const void* log_arc[2] = {in[0].data(), in[1].data()};
    void* grad_arc[2] = {(options_.in_place ? in[0] : grads_[0]).data(),
                         (options_.in_place ? in[1] : grads_[1]).data()};
    LatticeArgs args = {{2, 2, dt, du, may_end, plane, other},
                        B,
                        frames_,
                        columns_,
                        log_arc,
                        num_frames_.data(),
                        num_labels_.data(),
                        loss_.data(),
                        grad_arc,
                        nullptr};
    const int64_t size = B * LatticeWorkspace(args, true);
    Buffer<A> loss_only(B), workspace(size), other_workspace(size);
    for (int64_t i = 0; options_.stale && i < size; ++i) workspace[i] = other_workspace[i] = A(15);
    args.workspace = workspace.data();
    const bool is_double = sizeof(A) == 8;
    if (!Succeeded("Lattice with gradient", OnDevice([&] { return Lattice(is_double, args, nullptr); }))) return;
    if (options_.in_place) {
      for (int arc = 0; arc < 2; ++arc) memcpy(grads_[arc].host(), in[arc].host(), size_t(nodes_) * sizeof(A));
    } else if (!in[0].SameBits(blank) || !in[1].SameBits(label)) {
      problem_ = "Lattice with gradient has written to its arcs";
    }
    log_arc[0] = in_again[0].data();
    log_arc[1] = in_again[1].data();
    args.loss = loss_only.data();
    args.grad_plane = nullptr;
    args.workspace = other_workspace.data();
    if (!Succeeded("Lattice", OnDevice([&] { return Lattice(is_double, args, nullptr); }))) return;

    for (int b = 0; b < B; ++b) {
      const int T_b = std::max(0, std::min(int(num_frames_[b]), int(frames_)));
      const int U_b = std::max(0, std::min(int(num_labels_[b]), int(columns_) - 1));
      const auto row = [&](int t, int u) { return (int64_t(b) * frames_ + t) * columns_ + u; };
      const auto arc = [&](int which, int t, int u) {
        return which == 1 && u == U_b ? -kInfinity : double((which == 0 ? blank : label)[row(t, u)]);
      };
      bool bad = false;
      for (int t = 0; t < T_b; ++t) {
        for (int u = 0; u <= U_b; ++u) bad |= !(arc(0, t, u) < kInfinity) || !(arc(1, t, u) < kInfinity);
      }
      const PathSums lattice(options_.monotonic, T_b, U_b, arc);
      const double should = bad ? kNaN : -lattice.log_likelihood;
      // The reference subtracts logarithms of the size of the loss.
      const double reference_error = std::isfinite(should) ? 8e-16 * (T_b + U_b + std::fabs(should)) : 0;
      Compare("loss", b, loss_[b], should, 4 * tolerance_ * (1 + std::fabs(should)));
      if (memcmp(&loss_[b], &loss_only[b], sizeof(A)) != 0 && loss_[b] == loss_[b])
        Wrong("loss without gradient", b, loss_only[b], loss_[b]);
      for (int which = 0; which < 2; ++which) {
        for (int t = 0; t < frames_; ++t) {
          for (int u = 0; u < columns_; ++u) {
            const bool used = t < T_b && u <= U_b;
            const double posterior = !used || should == kInfinity ? 0 : bad ? kNaN : -lattice.posterior(which, t, u);
            Compare(which == 0 ? "grad_blank" : "grad_label", row(t, u), grads_[which][row(t, u)], posterior,
                    10 * tolerance_ + reference_error);
            if (posterior == 0 && !used && grads_[which][row(t, u)] != 0)
              Wrong("gradient of padding", row(t, u), grads_[which][row(t, u)], 0);
          }
        }
      }
    }
    Sum(loss_);
    Sum(grads_[0]);
    Sum(grads_[1]);
  }

  void CheckBackward() {
    if (!problem_.empty()) return;
    std::vector<Buffer<A>> ct;
    Random random(99);
    for (size_t i = 0; i < blanks_.size(); ++i) {
      ct.push_back(grads_[0]);
      if (i == 0) continue;
      for (int64_t row = 0; row < nodes_; ++row) ct[i][row] *= A(random.Uniform(-1, 1));
    }
    ct.push_back(grads_[1]);
    std::vector<Buffer<A>> ct_durations(options_.durations, grads_[0]);
    for (int i = 0; i < options_.durations; ++i) {  // the same for a sequence alone
      for (int64_t row = 0; row < nodes_; ++row) ct_durations[i][row] *= A((i % 2 ? 0.5 : -1) / (i + 1));
    }
    std::vector<const void*> ct_blank, ct_duration;
    for (const auto& plane : ct_durations) ct_duration.push_back(plane.data());
    for (size_t i = 0; i < blanks_.size(); ++i) ct_blank.push_back(ct[i].data());
    Buffer<T> x = logits_, apart(nodes_ * R, options_.offset + options_.gradient_offset);
    Buffer<T>& dx = options_.in_place ? x : apart;
    const EmissionBackwardArgs args = {Shape(),       x.data(),        label_.data(),    num_frames_.data(),
                                       norm_.data(),  ct_blank.data(), ct.back().data(), ct_duration.data(),
                                       scale_.data(), clamp_.data(),   dx.data()};
    if (!Succeeded("EmissionBackward", OnDevice([&] { return EmissionBackward(Traits<T>::kDType, args, nullptr); })))
      return;
    if (!options_.in_place && !x.SameBits(logits_)) problem_ = "EmissionBackward has written to the logits";
    for (int64_t i = 0; i < nodes_; ++i) {
      const int label = LabelAt(i);
      const double scale = scale_[i / (frames_ * columns_)], clamp = clamp_[i / (frames_ * columns_)];
      double sum = 0, duration_sum = 0, size = 0;
      bool used = false;
      for (const auto* planes : {&ct, &ct_durations}) {
        for (const auto& plane : *planes) {
          (planes == &ct ? sum : duration_sum) += double(plane[i]);
          size += std::fabs(double(plane[i]));
          used |= plane[i] != 0;
        }
      }
      used &= label != kOutside;
      const Softmax softmax = SoftmaxOf(i, 0, V), of_durations = SoftmaxOf(i, V, R);
      // A tiny cotangent may become subnormal when it is divided by an anchored norm.
      const double subnormal = sizeof(A) == 8 ? 0 : 0x1p-149 * std::exp(45.0);
      const bool same = options_.bernoulli && label == blanks_[0];
      const double ct_label = same && sum == sum ? 0 : double(ct.back()[i]), ct_blank = same ? sum : double(ct[0][i]);
      for (int k = 0; k < R; ++k) {
        double unit = 0;
        if (used) {
          for (size_t arc = 0; arc < ct.size(); ++arc) {
            if (k == (arc < blanks_.size() ? blanks_[arc] : label)) unit += double(ct[arc][i]);
          }
          const double x = Logit(i, k);
          if (k >= V) {
            unit = double(ct_durations[k - V][i]);
            if (options_.normalize && duration_sum != 0) unit -= std::exp(of_durations.Log(x)) * duration_sum;
          } else if (options_.bernoulli) {
            unit = k == blanks_[0] ? ct_blank / (1 + std::exp(x)) - ct_label / (1 + std::exp(-x))
                                   : unit - std::exp(softmax.Log(x)) * ct_label;
          } else if (options_.normalize) {
            unit -= std::exp(softmax.Log(x)) * sum;
          }
          if (sum != sum) unit = kNaN;
          if (clamp > 0) unit = unit > clamp ? clamp : unit < -clamp ? -clamp : unit;
        }
        const double should = unit == 0 ? 0 : unit * scale, is = double(Widen(dx[i * R + k]));
        const double smallest = sizeof(T) == 2 && Traits<T>::kEpsilon < 0x1p-9 ? 0x1p-25 : 0;
        Compare("dlogits", i * R + k, is, should,
                1.01 * Traits<T>::kEpsilon * std::fabs(should) +
                    (4 * tolerance_ * size + subnormal) * std::fabs(scale) + smallest);
        if (!used && is != 0) Wrong("dlogits of a row without cotangent", i * R + k, is, 0);
      }
    }
    Sum(dx);
    memcpy(static_cast<void*>(dlogits_.host()), dx.host(), size_t(nodes_ * R) * sizeof(T));
  }

  const char* name_;
  const Options options_;
  const int64_t B, frames_, columns_, V, R, nodes_, label_frames_;  // R: logits of a row
  static constexpr double kRounding = sizeof(A) == 8 ? 0x1p-51 : 0x1p-22;
  const double tolerance_ = sizeof(A) == 8 ? 1e-14 : 2e-6;
  std::vector<int64_t> blanks_;
  Buffer<T> logits_;
  Buffer<int32_t> label_, num_frames_, num_labels_;
  Buffer<A> scale_, clamp_;
  std::vector<Buffer<A>> arcs_;  // K blanks, then the label
  std::vector<Buffer<A>> durations_;
  Buffer<A> norm_{nodes_};
  Buffer<A> loss_{B};
  Buffer<A> grads_[2] = {Buffer<A>(nodes_), Buffer<A>(nodes_)};
  Buffer<T> dlogits_{nodes_ * R};
  std::string problem_;
};

template <class T>
void Check(const char* name, const Options& options, bool alone = false) {
  static uint64_t seed = 0;
  Problem<T>(name, options, ++seed).Check(alone);
}

}  // namespace jax_rnnt::cuda
