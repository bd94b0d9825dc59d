#include "xla_kernels/cpu/lattice.h"

#include <math.h>
#include <string.h>

#include "xla_kernels/common/extended.h"
#include "xla_kernels/cpu/scratch.h"
#include "xla_kernels/cpu/simd.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

inline int64_t Clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// The lattice of one sequence.
template <class A, Topology kTopology>
class Lattice {
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  using Value = Extended<S>;

  static constexpr int kWidth = S::kWidth;                     // frames of a strip, one per lane
  static constexpr int kStrips = kWidth < 8 ? 8 / kWidth : 1;  // strips of a group
  static constexpr int kFrames = kStrips * kWidth;             // frames of a group: from one checkpoint to the next
  static constexpr A kInfinity = A(__builtin_inf()), kNaN = A(__builtin_nan(""));
  // Arcs below -kLimit have probability zero, arcs above kLimit count as +inf.
  static constexpr A kLimit = A(1 << 21);

  // Values of one frame, by column, with margins of zeros.
  struct Row {
    A* m;
    Exponent* e;
    Value Get(int64_t u) const { return {Load(m + u), Load(e + u)}; }  // columns u, u + 1, ...
    void Set(int64_t u, Value v, int lane) const { m[u] = v.m[lane], e[u] = v.e[lane]; }
  };

 public:
  Lattice(const LatticeArgs& args, int64_t sequence)
      : args_(args),
        sequence_(sequence),
        frames_(Clamp(args.num_frames[sequence], 0, args.frames)),
        labels_(Clamp(args.num_labels[sequence], 0, args.columns - 1)),
        steps_((labels_ + 2 * kWidth - 1) / kWidth * kWidth),
        stride_(steps_ + 2 * kWidth) {
    A* memory = static_cast<A*>(ThreadScratch((2 * kFrames + 4 + 2 * kFrames) * stride_ * sizeof(A)));
    const auto take = [&](int64_t rows) { return memory += rows * stride_, memory - rows * stride_; };
    blank_ = take(kFrames) + kWidth;
    label_ = take(kFrames) + kWidth;
    alpha_row_ = {take(1) + kWidth, reinterpret_cast<Exponent*>(take(1)) + kWidth};
    beta_row_ = {take(1) + kWidth, reinterpret_cast<Exponent*>(take(1)) + kWidth};
    alpha_ = reinterpret_cast<Value*>(take(2 * kFrames));
  }

  void Run(bool gradient) {
    const int64_t groups = (frames_ + kFrames - 1) / kFrames;
    Start(alpha_row_, 0, {1, 0});
    for (int64_t group = 0; group < groups; ++group) {
      if (gradient) Checkpoint(group, true);
      Read(group);
      for (int strip = 0; strip < kStrips; ++strip) SweepAlpha<false>(strip);
    }

    const A z = alpha_row_.m[labels_];
    const Exponent z_exponent = alpha_row_.e[labels_];
    bool bad = false;
    for (int lane = 0; lane < kWidth; ++lane) bad |= bad_[lane] != 0;
    static_cast<A*>(args_.loss)[sequence_] =
        bad      ? kNaN
        : z == 0 ? kInfinity
                 : A(0 - (log(double(z)) + double(z_exponent) * 0.69314718055994530942));
    if (!gradient) return;

    if (bad || z == 0) {
      Fill(bad ? kNaN : A(0));
      return;
    }
    // The recursion is linear: started from -1 / z, it yields minus the posteriors.
    Start(beta_row_, labels_, {-1 / z, -z_exponent});
    for (int64_t group = groups; group-- > 0;) {
      Checkpoint(group, false);
      Read(group);
      for (int strip = 0; strip < kStrips; ++strip) SweepAlpha<true>(strip);
      for (int strip = kStrips; strip-- > 0;) SweepBeta(strip);
      Write(group);
    }
    ZeroRows(frames_);
  }

 private:
  struct Scalar {
    A m;
    Exponent e;
  };

  // All zero but one column.
  void Start(const Row& row, int64_t u, Scalar value) {
    for (int64_t i = -kWidth; i < stride_ - kWidth; ++i) row.m[i] = 0, row.e[i] = S::kZero;
    row.m[u] = value.m, row.e[u] = value.e;
  }

  void NormalizeRow(const Row& row) {
    for (int64_t u = 0; u < steps_; u += kWidth) {
      const Value v = Normalize(row.Get(u));
      Store(v.m, row.m + u);
      Store(v.e, row.e + u);
    }
  }

  // Keeps the row in the workspace, or fetches it.
  void Checkpoint(int64_t group, bool keep) {
    const int64_t plane = (args_.frames + 7) / 8 * args_.columns;
    A* const m = static_cast<A*>(args_.workspace) + sequence_ * 2 * plane + group * args_.columns;
    A* const e = m + plane;
    const size_t bytes = (labels_ + 1) * sizeof(A);
    memcpy(keep ? m : alpha_row_.m, keep ? alpha_row_.m : m, bytes);
    memcpy(keep ? static_cast<void*>(e) : alpha_row_.e, keep ? alpha_row_.e : static_cast<void*>(e), bytes);
  }

  int64_t Plane(int64_t t) const { return (sequence_ * args_.frames + t) * args_.columns; }

  // Log-probabilities of a group's frames, with margins of -inf. Frames behind the last pass everything on: the blank
  // arc has probability 1.
  void Read(int64_t group) {
    for (int64_t i = 0; i < kFrames; ++i) {
      const int64_t t = group * kFrames + i;
      A* const blank = blank_ + i * stride_;
      A* const label = label_ + i * stride_;
      for (int64_t u = -kWidth; u < steps_ + kWidth; u += kWidth) {
        Store(Broadcast(-kInfinity), blank + u);
        Store(Broadcast(-kInfinity), label + u);
      }
      if (t < frames_) {
        Copy(static_cast<const A*>(args_.log_blank) + Plane(t), labels_ + 1, blank);
        Copy(static_cast<const A*>(args_.log_label) + Plane(t), labels_, label);
      } else {
        for (int64_t u = 0; u <= labels_; ++u) blank[u] = 0;
      }
    }
  }

  void Copy(const A* from, int64_t n, A* to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const F x = Load(from + i);
      bad_ |= ~(x < kLimit);
      Store(x, to + i);
    }
    for (; i < n; ++i) {
      bad_[0] |= !(from[i] < kLimit);
      to[i] = from[i];
    }
  }

  void Write(int64_t group) {
    for (int64_t i = 0; i < kFrames; ++i) {
      const int64_t t = group * kFrames + i;
      if (t >= frames_) break;
      for (A* plane : {static_cast<A*>(args_.grad_blank), static_cast<A*>(args_.grad_label)}) {
        const A* from = plane == args_.grad_blank ? blank_ : label_;
        memcpy(plane + Plane(t), from + i * stride_, (labels_ + 1) * sizeof(A));
        memset(plane + Plane(t) + labels_ + 1, 0, (args_.columns - labels_ - 1) * sizeof(A));
      }
    }
  }

  void Fill(A value) {
    for (A* plane : {static_cast<A*>(args_.grad_blank), static_cast<A*>(args_.grad_label)}) {
      for (int64_t t = 0; t < frames_; ++t) {
        for (int64_t u = 0; u < args_.columns; ++u) plane[Plane(t) + u] = u <= labels_ ? value : 0;
      }
    }
    ZeroRows(frames_);
  }

  void ZeroRows(int64_t t) {
    const size_t bytes = (Plane(args_.frames) - Plane(t)) * sizeof(A);
    memset(static_cast<A*>(args_.grad_blank) + Plane(t), 0, bytes);
    memset(static_cast<A*>(args_.grad_label) + Plane(t), 0, bytes);
  }

  static Value Probability(F x) {
    const SplitExp<A> split(x);
    const auto positive = x > -kLimit;
    return {positive ? split.m : F{}, positive ? split.Exponent() : I{} + S::kZero};
  }

  // Element j, lane i: column step + j - i of row i.
  void Skew(const A* rows, int64_t step, F* skewed) const {
    for (int i = 0; i < kWidth; ++i) skewed[i] = Load(rows + i * stride_ + step - i);
    Transpose(skewed);
  }

  void Unskew(F* skewed, int64_t step, A* rows) const {
    Transpose(skewed);
    for (int i = 0; i < kWidth; ++i) Store(skewed[i], rows + i * stride_ + step - i);
  }

  template <bool kKeep>
  void SweepAlpha(int strip) {
    const A* const blank_rows = blank_ + strip * kWidth * stride_;
    const A* const label_rows = label_ + strip * kWidth * stride_;
    Value* const kept = alpha_ + strip * steps_;
    const auto up = [](Value v, Value in) { return Value{ShiftUp(v.m, in.m), ShiftUp(v.e, in.e)}; };
    Value alpha = up(Zero<S>(), alpha_row_.Get(1 - kWidth)), last_label = Zero<S>();
    for (int64_t block = 0; block < steps_; block += kWidth) {
      F log_blank[kWidth], log_label[kWidth];
      Skew(blank_rows, block, log_blank);
      Skew(label_rows, block, log_label);
      alpha = Normalize(alpha);
      for (int j = 0; j < kWidth; ++j) {
        const int64_t step = block + j;
        if (kKeep) kept[step] = alpha;
        const Value blank = alpha * Probability(log_blank[j]), label = alpha * Probability(log_label[j]);
        const Value down = kTopology == Topology::kStandard ? blank : blank + last_label;
        const Value in = up(down, alpha_row_.Get(step + 2 - kWidth));
        alpha = kTopology == Topology::kStandard ? in + label : in;
        last_label = label;
        alpha_row_.Set(step + 1 - kWidth, down, kWidth - 1);
      }
    }
    NormalizeRow(alpha_row_);
  }

  void SweepBeta(int strip) {
    A* const blank_rows = blank_ + strip * kWidth * stride_;
    A* const label_rows = label_ + strip * kWidth * stride_;
    const Value* const kept = alpha_ + strip * steps_;
    Value beta = Zero<S>(), last_below = Zero<S>();
    for (int64_t block = steps_ - kWidth; block >= 0; block -= kWidth) {
      F log_blank[kWidth], log_label[kWidth];
      Skew(blank_rows, block, log_blank);
      Skew(label_rows, block, log_label);
      beta = Normalize(beta);
      for (int j = kWidth; j-- > 0;) {
        const int64_t step = block + j;
        const Value in = beta_row_.Get(step + 1 - kWidth);
        const Value below = {ShiftDown(beta.m, in.m), ShiftDown(beta.e, in.e)};
        const Value blank = Probability(log_blank[j]) * below;
        const Value label = Probability(log_label[j]) * (kTopology == Topology::kStandard ? beta : last_below);
        const auto posterior = [&](Value v) { return kept[step].m * v.m * PowerOfTwo<S>(kept[step].e + v.e); };
        log_blank[j] = posterior(blank);
        log_label[j] = posterior(label);
        beta = blank + label;
        last_below = below;
        beta_row_.Set(step, beta, 0);
      }
      Unskew(log_blank, block, blank_rows);
      Unskew(log_label, block, label_rows);
    }
    NormalizeRow(beta_row_);
  }

  const LatticeArgs& args_;
  const int64_t sequence_;
  const int64_t frames_, labels_;  // T_b, U_b
  const int64_t steps_, stride_;   // steps of a sweep over a strip, a multiple of kWidth; elements of a padded row
  A* blank_;  // [kFrames, stride_] log-probabilities of the group at hand; then minus the posteriors
  A* label_;
  Row alpha_row_, beta_row_;  // what enters the strip from the frame above it; beta of the frame below it
  Value* alpha_;              // [kStrips, steps_] skewed alphas of the group
  I bad_ = {};                // nonzero: a NaN or +inf was read
};

template <class A>
void RunLattice(const LatticeArgs& args, int64_t sequence, bool gradient) {
  switch (args.topology) {
    case Topology::kStandard:
      return Lattice<A, Topology::kStandard>(args, sequence).Run(gradient);
    case Topology::kMonotonic:
      return Lattice<A, Topology::kMonotonic>(args, sequence).Run(gradient);
  }
}

void LatticeLoss(bool is_double, const LatticeArgs& args, int64_t sequence) {
  is_double ? RunLattice<double>(args, sequence, false) : RunLattice<float>(args, sequence, false);
}

void LatticeGradient(bool is_double, const LatticeArgs& args, int64_t sequence) {
  is_double ? RunLattice<double>(args, sequence, true) : RunLattice<float>(args, sequence, true);
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
