// Shared by both lattice kernels: the lengths of a sequence, access to its planes by vectors, and the loss.
#pragma once

#include <math.h>
#include <string.h>

#include "xla_kernels/common/extended.h"
#include "xla_kernels/common/shape.h"
#include "xla_kernels/cpu/exp_log.h"
#include "xla_kernels/cpu/wide_lattice.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

inline int64_t Clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

template <class A>
class SequencePlanes {
 public:
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  using Value = Extended<S>;

  static constexpr int kWidth = S::kWidth;
  static constexpr A kInfinity = A(__builtin_inf()), kNaN = A(__builtin_nan(""));

  // Values of one frame, by column.
  struct Row {
    A* m;
    Exponent* e;
    Value Get(int64_t u) const { return {Load(m + u), Load(e + u)}; }  // columns u ... u + kWidth - 1
    void Set(int64_t u, Value v) const { Store(v.m, m + u), Store(v.e, e + u); }
    void Set(int64_t u, Value v, int lane) const { m[u] = v.m[lane], e[u] = v.e[lane]; }
  };

  SequencePlanes(const LatticeArgs& args, int64_t sequence)
      : args_(args),
        sequence_(sequence),
        frames_(Clamp(args.num_frames[sequence], 0, args.frames)),
        labels_(Clamp(args.num_labels[sequence], 0, args.columns - 1)),
        size_(args.frames * args.columns),
        most_(A(MostOfAnArc(frames_, labels_))) {}

  // Writes the results of a sequence without frames, whose only path has no arc. Returns whether it is one. The kernels
  // do not see it, since their scratch grows with the columns: without frames, arrays of no bytes may have any number.
  static bool StoreNoFrames(const LatticeArgs& args, int64_t sequence) {
    const SequencePlanes planes(args, sequence);
    if (planes.frames_ > 0) return false;
    static_cast<A*>(args.loss)[sequence] = planes.labels_ == 0 ? A(0) : kInfinity;
    if (args.grad_plane != nullptr) planes.FinishGradient(true);
    return true;
  }

 protected:
  const A* LogPlane(int k) const { return static_cast<const A*>(args_.log_plane[k]) + sequence_ * size_; }
  A* GradPlane(int k) const { return static_cast<A*>(args_.grad_plane[k]) + sequence_ * size_; }

  static Value Probability(F x) {
    const SplitExp<A, true> split(x);
    const auto positive = x >= -A(kLimit);
    return {positive ? split.m : F{}, positive ? split.Exponent() : I{} + S::kZero};
  }

  // Columns u ... u + kWidth - 1 of frame t; -inf outside [0, n).
  F LoadColumns(const A* plane, int64_t t, int64_t u, int64_t n) const {
    const int64_t at = t * args_.columns + u;
    if (u >= 0 && u + kWidth <= n) return Load(plane + at);
    const auto within = LanesBetween<A>(-u, n - u);
    if (at >= 0 && at + kWidth <= size_) return within ? Load(plane + at) : Broadcast(-kInfinity);
    A padded[kWidth] = {};
    for (int lane = 0; lane < kWidth; ++lane) {
      if (0 <= u + lane && u + lane < n) padded[lane] = plane[at + lane];
    }
    return within ? Load(padded) : Broadcast(-kInfinity);
  }

  void StoreColumns(F v, A* plane, int64_t t, int64_t u) const {
    const int64_t at = t * args_.columns + u;
    if (u >= 0 && u + kWidth <= labels_ + 1) return Store(v, plane + at);
    if (at >= 0 && at + kWidth <= size_) {
      return Store(LanesBetween<A>(-u, labels_ + 1 - u) ? v : Load(plane + at), plane + at);
    }
    for (int lane = 0; lane < kWidth; ++lane) {
      if (0 <= u + lane && u + lane <= labels_) plane[at + lane] = v[lane];
    }
  }

  // Records whether an arc is too large for the sweeps, NaN or +inf.
  void Check(F log_arcs) { over_ |= ~(log_arcs < most_); }

  // Stores the loss, from the likelihood m * 2^e that the sweep over alpha found. Returns whether a sweep over beta
  // must compute the gradient; otherwise the gradient, if asked for, is already written.
  bool StoreLoss(A m, Exponent e) const {
    constexpr bool kDouble = sizeof(A) == 8;
    Verdict verdict = Verdict::kExact;
    if (Any(over_) || m == 0 || e < kFaintLikelihood) verdict = Judge(kDouble, args_, sequence_, m == 0, e);
    const bool gradient = args_.grad_plane != nullptr;
    if (verdict == Verdict::kWide) {
      const bool alive = WideLattice(kDouble, args_, sequence_);
      if (gradient) FinishGradient(alive);
      return false;
    }
    const bool bad = verdict == Verdict::kBad, alive = !bad && m != 0;
    static_cast<A*>(args_.loss)[sequence_] = bad     ? kNaN
                                             : alive ? A(0 - (log(double(m)) + double(e) * 0.69314718055994530942))
                                                     : kInfinity;
    if (gradient && !alive) FinishGradient(false, bad ? kNaN : 0);
    return gradient && alive;
  }

  // Writes zeros outside the lengths and, unless gradients are `written` there, `value` inside.
  void FinishGradient(bool written, A value = 0) const {
    for (int k = 0; k < args_.topology.num_planes; ++k) {
      A* const grad = GradPlane(k);
      for (int64_t t = 0; t < frames_; ++t) {
        A* const row = grad + t * args_.columns;
        for (int64_t u = 0; !written && u <= labels_; ++u) row[u] = value;
        for (int64_t u = labels_ + 1; u < args_.columns; ++u) row[u] = 0;
      }
      memset(grad + frames_ * args_.columns, 0, (size_ - frames_ * args_.columns) * sizeof(A));
    }
  }

  const LatticeArgs& args_;
  const int64_t sequence_;
  const int64_t frames_, labels_;  // T_b, U_b
  const int64_t size_;             // nodes of a sequence's plane

 private:
  const A most_;
  I over_ = {};  // nonzero in lanes that read an arc of most_ or more, or NaN
};

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
