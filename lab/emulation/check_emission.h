// Problems for the emission: both passes against double precision.
#pragma once

#include <algorithm>
#include <vector>

#include "lab/emulation/check_common.h"
#include "xla_kernels/cuda/elements.cuh"
#include "xla_kernels/cuda/softmax_emission.h"

namespace jax_rnnt::cuda {

enum class Fault { kNone, kMinusInfinity, kDeadRow, kNaN, kInfinity, kInfiniteBlank, kBadLabel, kFarAnchor };

struct Options {
  int batch = 2, frames = 5, labels = 3, classes = 7;
  bool in_place = true, normalize = true, label_per_frame = false, bernoulli = false;
  int num_blanks = 1, durations = 0, offset = 0;
  int gradient_offset = 0;                  // more than that of the logits
  double clamp = 0, spread = 4, shift = 0;  // logits: shift + [-spread, spread], a Bernoulli blank without shift
  double scale = 0;                         // scale of the first sequence, if not 0
  bool total = false;                       // cotangents have a total of their own
  Fault fault = Fault::kNone;
};

template <class T, class Accumulator, DType dtype, int bits>
struct TraitsOf {
  using A = Accumulator;
  static constexpr DType kDType = dtype;
  static constexpr double kEpsilon = 1.0 / double(int64_t{1} << bits);
};
template <class T>
struct Traits;
template <>
struct Traits<Half> : TraitsOf<Half, float, DType::kF16, 11> {};
template <>
struct Traits<BFloat16> : TraitsOf<BFloat16, float, DType::kBF16, 8> {};
template <>
struct Traits<float> : TraitsOf<float, float, DType::kF32, 24> {};
template <>
struct Traits<double> : TraitsOf<double, double, DType::kF64, 53> {};

template <class T>
class EmissionProblem {
  using A = typename Traits<T>::A;

 public:
  EmissionProblem(const char* name, const Options& options, uint64_t seed)
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
        scale_(B),
        clamp_(B),
        arcs_(options.num_blanks + 1, Buffer<A>(nodes_)),
        durations_(options.durations, Buffer<A>(nodes_)),
        cotangents_(options.num_blanks + 1 + options.durations + options.total, Buffer<A>(nodes_)) {
    Random random(seed);
    for (int i = 0; i < options.num_blanks; ++i) blanks_.push_back((i * 3 + random.Below(V)) % V);
    for (int b = 0; b < B; ++b) {
      num_frames_[b] = b == 0 ? frames_ : random.Below(frames_ + 1);
      const int num_labels = b == 0 ? columns_ - 1 : random.Below(columns_);
      for (int64_t i = 0; i < label_frames_ * columns_; ++i) {
        const int u = int(i % columns_);
        label_[b * label_frames_ * columns_ + i] = u < num_labels    ? random.Below(V)
                                                   : u == num_labels ? kNoLabel
                                                                     : kOutside;
      }
      scale_[b] = A(b == 0 && options.scale != 0 ? options.scale : random.Uniform(-2, 2));
      clamp_[b] = A(options.clamp);
    }
    Fill(random);
  }

  // Sequence b of another problem alone, without padding.
  EmissionProblem(const EmissionProblem& whole, int b) : EmissionProblem(whole.name_, Cut(whole, b), 1) {
    blanks_ = whole.blanks_;
    scale_[0] = whole.scale_[b];
    clamp_[0] = whole.clamp_[b];
    for (int u = 0; u < columns_; ++u) label_[u] = whole.label_[b * whole.columns_ + u];
    for (int64_t row = 0; row < nodes_; ++row) {
      const int64_t from = whole.RowOf(b, *this, row);
      for (int64_t k = 0; k < R; ++k) logits_[row * R + k] = whole.logits_[from * R + k];
      for (size_t i = 0; i < cotangents_.size(); ++i) cotangents_[i][row] = whole.cotangents_[i][from];
    }
  }

  // `alone`: also compares the bits with those of each sequence on its own.
  void Check(bool alone) {
    CheckForward();
    FillCotangents();
    CheckBackward();
    for (int b = 0; alone && b < B && problem_.Empty(); ++b) {
      if (num_frames_[b] == 0) continue;
      EmissionProblem other(*this, b);
      other.CheckForward();
      other.CheckBackward();
      if (!other.problem_.Empty()) problem_.Say("alone: " + other.problem_.text);
      for (int64_t row = 0; row < other.nodes_; ++row) {
        const int64_t here = RowOf(b, other, row);
        CompareBits("norm of a sequence alone", other.norm_[row], norm_[here]);
        for (size_t i = 0; i < arcs_.size(); ++i) {
          CompareBits("arc of a sequence alone", other.arcs_[i][row], arcs_[i][here]);
        }
        for (int64_t k = 0; k < R; ++k) {
          CompareBits("dlogits of a sequence alone", Widen(other.dlogits_[row * R + k]), Widen(dlogits_[here * R + k]));
        }
      }
    }
    Count(name_, problem_.text);
  }

 private:
  void Fill(Random& random) {
    const auto shift = [&](int64_t k) { return options_.bernoulli && k == blanks_[0] ? 0 : options_.shift; };
    const auto set = [&](int64_t i, int64_t k, double x) { logits_[i * R + k] = Narrow<T>(A(x)); };
    for (int64_t i = 0; i < nodes_; ++i) {
      if (LabelAt(i) == kOutside) continue;
      for (int64_t k = 0; k < R; ++k) {
        const double x = random.Uniform(-options_.spread, options_.spread);
        set(i, k, shift(k) + (options_.normalize ? x : -std::fabs(x)));
      }
      const double share = random.Uniform(0, 1);
      if (options_.fault == Fault::kMinusInfinity && share < 0.5) set(i, random.Below(int(R)), -kInfinity);
      const int64_t dead = share < 0.1 ? 0 : share < 0.3 ? V : R;  // a row, its durations alone, or nothing
      for (int64_t k = dead; options_.fault == Fault::kDeadRow && k < R; ++k) set(i, k, -kInfinity);
      if (options_.fault == Fault::kFarAnchor && share < 0.7) {
        const double below[] = {50, 70, 5000, kInfinity};
        set(i, Anchor(), options_.shift - below[random.Below(4)]);
      }
    }
    const int64_t odd = options_.durations > 0 ? V : V / 2;  // in the first sequence only
    if (options_.fault == Fault::kNaN) set(1, odd, kNaN);
    if (options_.fault == Fault::kInfinity) set(1, odd, kInfinity);
    if (options_.fault == Fault::kInfiniteBlank) set(1, blanks_[0], kInfinity);
    if (options_.fault == Fault::kBadLabel) label_[0] = int(V), label_[label_.size() > columns_ ? columns_ : 0] = V + 5;
  }

  // As a lattice gives them: 0 in the padding, for arcs of -inf and in some rows, NaN in a sequence that has a NaN.
  void FillCotangents() {
    Random random(99);
    std::vector<bool> bad(size_t(B), false);
    for (int64_t i = 0; i < nodes_; ++i) {
      for (const auto& arc : arcs_) {
        if (arc[i] != arc[i] && LabelAt(i) != kOutside) bad[size_t(i / (frames_ * columns_))] = true;
      }
    }
    for (int64_t i = 0; i < nodes_; ++i) {
      const int label = LabelAt(i);
      const bool none = label == kOutside || random.Uniform(0, 1) < 0.1;
      for (size_t k = 0; k < cotangents_.size(); ++k) {
        const double x = -random.Uniform(k == 0 || k == blanks_.size() ? 0 : -1, 1);
        const bool is_total = k >= arcs_.size() + durations_.size();
        const Buffer<A>& value = is_total ? norm_ : k < arcs_.size() ? arcs_[k] : durations_[k - arcs_.size()];
        const bool zero = none || value[i] == A(-kInfinity);
        cotangents_[k][i] = A(label != kOutside && bad[size_t(i / (frames_ * columns_))] ? kNaN : zero ? 0 : x);
      }
    }
  }

  static Options Cut(const EmissionProblem& whole, int b) {
    Options options = whole.options_;
    options.batch = 1;
    options.frames = whole.num_frames_[b];
    options.labels = int(
        std::find(&whole.label_[b * whole.columns_], &whole.label_[(b + 1) * whole.columns_ - 1], int32_t{kNoLabel}) -
        &whole.label_[b * whole.columns_]);
    return options;
  }
  // The row of sequence b in this problem that corresponds to row `row` of that sequence alone.
  int64_t RowOf(int b, const EmissionProblem& alone, int64_t row) const {
    return (b * frames_ + row / alone.columns_) * columns_ + row % alone.columns_;
  }
  template <class Element>
  void CompareBits(const char* what, Element is, Element should) {
    if (memcmp(&is, &should, sizeof is) != 0) problem_.Wrong(what, 0, double(is), double(should));
  }
  void Compare(const char* what, int64_t where, double is, double should, double tolerance) {
    problem_.Compare(what, where, is, should, tolerance, sizeof(T) > 2);
  }

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
  static std::vector<void*> Pointers(Buffer<A>* planes, size_t n) {
    std::vector<void*> pointers;
    for (size_t i = 0; i < n; ++i) pointers.push_back(planes[i].data());
    return pointers;
  }

  void CheckForward() {
    const std::vector<void*> arcs = Pointers(arcs_.data(), arcs_.size());
    const std::vector<void*> durations = Pointers(durations_.data(), durations_.size());
    const Buffer<T> before = logits_;
    const EmissionForwardArgs args = {Shape(),     logits_.data(), label_.data(),    num_frames_.data(),
                                      arcs.data(), arcs.back(),    durations.data(), norm_.data()};
    problem_.Succeeded(OnDevice([&] { return EmissionForward(Traits<T>::kDType, args, nullptr); }));
    if (!logits_.SameBits(before)) problem_.Say("EmissionForward has written to the logits");
    for (int64_t i = 0; i < nodes_ && problem_.Empty(); ++i) CheckForwardRow(i);
    Sum(norm_);
    for (const auto* planes : {&arcs_, &durations_}) {
      for (const auto& plane : *planes) Sum(plane);
    }
  }

  void CheckForwardRow(int64_t i) {
    const int label = LabelAt(i);
    const bool outside = label == kOutside;
    const Softmax softmax = SoftmaxOf(i, 0, V), of_durations = SoftmaxOf(i, V, R);
    const double z = options_.bernoulli ? Logit(i, blanks_[0]) : 0;
    const bool bad = softmax.sum != softmax.sum || of_durations.sum != of_durations.sum || !(z < kInfinity);
    const auto log_prob = [&](int64_t k, const Softmax& softmax) {
      const double x = Logit(i, k);
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
      if (k == kNoLabel && !bad) value = -kInfinity;
      if (0 <= k && k < V && !bad) {
        value = options_.bernoulli && k == blanks_[0] ? LogSigmoid(z)
                : options_.bernoulli                  ? log_prob(k, softmax) + LogSigmoid(-z)
                                                      : log_prob(k, softmax);
      }
      compare("log_arc", arcs_[arc][i], value);
    }
    for (int d = 0; d < options_.durations; ++d) {
      compare("log_duration", durations_[d][i], outside ? 0 : bad ? kNaN : log_prob(V + d, of_durations));
    }
  }

  double Logit(int64_t row, int64_t k) const { return double(Widen(logits_[row * R + k])); }
  static double LogSigmoid(double x) { return x < 0 ? x - std::log1p(std::exp(x)) : -std::log1p(std::exp(-x)); }

  struct Softmax {
    double Log(double x) const { return sum == 0 ? -kInfinity : x - max - std::log(sum); }
    double max, sum;  // sum of exp(x - max)
  };
  // Softmax of the logits [begin, end) of a row, without a Bernoulli blank.
  Softmax SoftmaxOf(int64_t row, int64_t begin, int64_t end) const {
    if (LabelAt(row) == kOutside || !options_.normalize) return {0, 1};
    double max = -kInfinity, sum = 0;
    const auto counts = [&](int64_t k) { return !options_.bernoulli || k != blanks_[0]; };
    for (int64_t k = begin; k < end; ++k) {
      const double x = Logit(row, k);
      if (counts(k) && (x != x || x == kInfinity)) return {0, kNaN};
      if (counts(k)) max = std::fmax(max, x);
    }
    if (max == -kInfinity) return {0, 0};
    for (int64_t k = begin; k < end; ++k) sum += counts(k) ? std::exp(Logit(row, k) - max) : 0;
    return {max, sum};
  }

  // The class of the anchor, as in shape.h.
  int64_t Anchor() const { return options_.bernoulli ? blanks_[0] == 0 : blanks_[0]; }
  void CheckNorm(int64_t row, const Softmax& softmax) {
    const A norm = norm_[row];
    const double below = Anchor() < V ? softmax.max - Logit(row, Anchor()) : kInfinity;
    if (LabelAt(row) == kOutside || !options_.normalize || softmax.sum != softmax.sum) {
      Compare("norm", row, norm, softmax.sum != softmax.sum ? kNaN : 0, 0);
    } else if (softmax.sum > 0 && below <= kReach<A>) {
      const double should = softmax.sum * std::exp(below) * kSumScale<A>;
      Compare("anchored norm", row, norm, should, should * (tolerance_ + kRounding * below));
    } else {
      if (norm > 0 && norm < kTiny<A>) problem_.Wrong("norm that is lse", row, norm, 0);
      const double should = -softmax.Log(0);
      Compare("lse", row, norm, softmax.sum > 0 ? should : 0, tolerance_ * (1 + std::fabs(should)));
    }
  }

  void CheckBackward() {
    if (!problem_.Empty()) return;
    const std::vector<void*> pointers = Pointers(cotangents_.data(), cotangents_.size());
    const std::vector<const void*> ct(pointers.begin(), pointers.end());
    Buffer<T> x = logits_, apart(nodes_ * R, options_.offset + options_.gradient_offset);
    Buffer<T>& dx = options_.in_place ? x : apart;
    const size_t K = blanks_.size();
    const EmissionBackwardArgs args = {
        Shape(),       x.data(),      label_.data(), num_frames_.data(),
        norm_.data(),  ct.data(),     ct.at(K),      ct.data() + K + 1,
        scale_.data(), clamp_.data(), dx.data(),     options_.total ? ct.back() : nullptr};
    problem_.Succeeded(OnDevice([&] { return EmissionBackward(Traits<T>::kDType, args, nullptr); }));
    if (!options_.in_place && !x.SameBits(logits_)) problem_.Say("EmissionBackward has written to the logits");
    for (int64_t i = 0; i < nodes_ && problem_.Empty(); ++i) CheckBackwardRow(i, dx);
    Sum(dx);
    memcpy(static_cast<void*>(dlogits_.host()), dx.host(), size_t(nodes_ * R) * sizeof(T));
  }

  void CheckBackwardRow(int64_t i, const Buffer<T>& dx) {
    const int label = LabelAt(i);
    const int64_t b = i / (frames_ * columns_), K = int64_t(blanks_.size());
    const double scale = scale_[b], clamp = clamp_[b];
    const auto ct = [&](int64_t k) { return double(cotangents_[size_t(k)][i]); };
    double sum = 0, duration_sum = 0, size = 0;
    for (int64_t k = 0; k < int64_t(cotangents_.size()); ++k) {
      (k <= K ? sum : duration_sum) += ct(k);
      size += std::fabs(ct(k));
    }
    if (options_.total) sum = ct(int64_t(cotangents_.size()) - 1), duration_sum = 0;
    const bool used = label != kOutside && size != 0;
    const Softmax softmax = SoftmaxOf(i, 0, V), of_durations = SoftmaxOf(i, V, R);
    // A tiny cotangent may become subnormal when it is divided by an anchored norm.
    const double subnormal = sizeof(A) == 8 ? 0 : 0x1p-149 * std::exp(45.0);
    const bool same = options_.bernoulli && label == blanks_[0];
    const double ct_label = same && sum == sum ? 0 : ct(K), ct_blank = same ? sum : ct(0);
    const auto unit_of = [&](int64_t k) {
      const double x = Logit(i, k);
      if (sum != sum) return kNaN;
      double unit = 0;
      for (int64_t arc = 0; arc <= K; ++arc) unit += k == (arc < K ? blanks_[size_t(arc)] : label) ? ct(arc) : 0;
      if (k >= V) {
        unit = ct(K + 1 + k - V);
        if (options_.normalize && duration_sum != 0) unit -= std::exp(of_durations.Log(x)) * duration_sum;
      } else if (options_.bernoulli) {
        unit = k == blanks_[0] ? ct_blank / (1 + std::exp(x)) - ct_label / (1 + std::exp(-x))
                               : unit - std::exp(softmax.Log(x)) * ct_label;
      } else if (options_.normalize) {
        unit -= std::exp(softmax.Log(x)) * sum;
      }
      return clamp > 0 ? std::min(std::max(unit, -clamp), clamp) : unit;
    };
    for (int64_t k = 0; k < R; ++k) {
      const double unit = used ? unit_of(k) : 0, should = unit == 0 ? 0 : unit * scale;
      const double is = double(Widen(dx[i * R + k]));
      const double smallest = Traits<T>::kDType == DType::kF16 ? 0x1p-25 : 0;
      Compare("dlogits", i * R + k, is, should,
              1.01 * Traits<T>::kEpsilon * std::fabs(should) + (4 * tolerance_ * size + subnormal) * std::fabs(scale) +
                  smallest);
      if (!used && is != 0) problem_.Wrong("dlogits of a row without cotangent", i * R + k, is, 0);
    }
  }

  const char* name_;
  const Options options_;
  const int64_t B, frames_, columns_, V, R, nodes_, label_frames_;  // R: logits of a row
  static constexpr double kRounding = sizeof(A) == 8 ? 0x1p-51 : 0x1p-22;
  const double tolerance_ = sizeof(A) == 8 ? 1e-14 : 2e-6;
  std::vector<int64_t> blanks_;
  Buffer<T> logits_;
  Buffer<int32_t> label_, num_frames_;
  Buffer<A> scale_, clamp_;
  std::vector<Buffer<A>> arcs_, durations_, cotangents_;  // arcs: K blanks, then the label; cotangents: also durations
  Buffer<A> norm_{nodes_};
  Buffer<T> dlogits_{nodes_ * R};
  Problem problem_;
};

template <class T, class Change>
void Check(const char* name, const Change& change, bool alone = false) {
  static uint64_t seed = 0;
  Options options;
  change(options);
  if (int64_t(options.batch) * options.frames * (options.labels + 1) * options.classes > most_numbers) return;
  EmissionProblem<T>(name, options, ++seed).Check(alone);
}

}  // namespace jax_rnnt::cuda
