// Softmax emission: rows of V logits -> log-probabilities of the arcs, and the arcs' cotangents -> gradient of the
// logits.
//
// Each pass reads every logit from memory once, and computes one exp for it. The forward pass takes the maximum of a
// block first, which brings the block into the L1 cache, and then the exponentials. All that is per row (log, the arcs'
// own classes, the choice of special values) is done for a group of kWidth rows at once, one row per lane. Nothing
// depends on how the rows are grouped, so a range of rows may be split anywhere without changing a bit.
//
// Measured on one core of a Zen 4 at 3.6 GHz, GCC 12, AVX-512, float32, in ns per row, forward + backward in place;
// beside it a flat loop with the same exp that reads twice and writes once and knows no rows:
//       V       32    500   1024   4096
//    here       29    254    490   1825
//    loop       12    193    394   1579
// AVX2 takes 1.3 times as long, SSE2 3 to 5 times. At V = 32 more than half of the time is what surrounds the two
// vectors of a row.
//
// Tried and left out, as changes of the forward pass:
//   maxima of 2 ... 8 blocks before their exponentials      +11% at V = 500: the loads come in bursts
//   four running maxima instead of one                      -2% to -5% at V >= 500, +3% at V = 32
//   rows of V <= 1024 in groups, as those of V <= 256       +11% at V = 500 and 1024
#include "xla_kernels/cpu/softmax_emission.h"

#include "xla_kernels/cpu/simd.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
constexpr A kInfinity = A(__builtin_inf());
template <class A>
constexpr A kNaN = A(__builtin_nan(""));

// Elements whose maximum is taken before their exponentials: few enough to be still in the L1 cache. Longer rows are
// scaled to the new maximum from block to block.
constexpr int64_t kBlock = 1024;

// Walks over the rows in order.
class RowCursor {
 public:
  RowCursor(const EmissionShape& shape, const int32_t* label, const int32_t* num_frames, int64_t row)
      : shape_(shape),
        label_(label),
        num_frames_(num_frames),
        u_(row % shape.columns),
        t_(row / shape.columns % shape.frames),
        b_(row / shape.columns / shape.frames) {}

  int64_t sequence() const { return b_; }
  int32_t label() const {
    if (t_ >= num_frames_[b_]) return kOutside;
    return label_[(shape_.label_frames == 1 ? b_ : b_ * shape_.frames + t_) * shape_.columns + u_];
  }
  void Advance() {
    if (++u_ < shape_.columns) return;
    u_ = 0;
    if (++t_ < shape_.frames) return;
    t_ = 0;
    ++b_;
  }

 private:
  const EmissionShape& shape_;
  const int32_t* const label_;
  const int32_t* const num_frames_;
  int64_t u_, t_, b_;
};

// One value per row of a group of up to kWidth rows.

template <class A>
inline typename Simd<A>::F LoadLanes(const A* x, int count) {
  if (count == Simd<A>::kWidth) return Load(x);
  A padded[Simd<A>::kWidth] = {};
  for (int lane = 0; lane < count; ++lane) padded[lane] = x[lane];
  return Load(padded);
}

template <class A>
inline void StoreLanes(typename Simd<A>::F v, A* x, int count) {
  if (count == Simd<A>::kWidth) return Store(v, x);
  for (int lane = 0; lane < count; ++lane) x[lane] = v[lane];
}

// The elements [(n - 1) / kWidth * kWidth, n) of a row of n >= kWidth elements, behind lanes of -inf.
template <class T>
inline auto LoadLast(const T* x, int64_t n) {
  using A = Accumulator<T>;
  constexpr int kWidth = Simd<A>::kWidth;
  return LanesBetween<A>((kWidth - n % kWidth) % kWidth, kWidth) ? Load(x + n - kWidth) : Broadcast(-kInfinity<A>);
}

// Maximum, lane by lane, of n elements and `max`; sum of exp(x - shift) of n elements and `sum`.
template <class T, class F>
inline F RowMax(const T* x, int64_t n, F max) {
  for (int64_t i = 0; i < n; i += Width<F>()) max = Max(max, Load(x + i));
  return max;
}

template <class T, class F>
inline F RowSumExp(const T* x, int64_t n, F shift, F sum, int64_t ahead) {
  for (int64_t i = 0; i < n; i += Width<F>()) {
    __builtin_prefetch(x + i + ahead);
    sum += Exp(Load(x + i) - shift);
  }
  return sum;
}

// What is subtracted from a row before exp: its maximum, or 0 to keep exp(-inf - max) from being NaN.
template <class F>
inline F Shift(F max) {
  using A = std::decay_t<decltype(max[0])>;
  return max == -kInfinity<A> ? Broadcast(A(0)) : max;
}

// A group of rows of n < kWidth elements as rows of kWidth elements. `inside`: != kOutside where the row may be read.
template <class T, class Label>
inline void PadRows(const T* x, int64_t n, const Label* inside, T* padded) {
  using A = Accumulator<T>;
  constexpr int kWidth = Simd<A>::kWidth;
  for (int row = 0; row < kWidth; ++row) {
    Store(Broadcast(-kInfinity<A>), padded + row * kWidth);
    for (int64_t k = 0; inside[row] != kOutside && k < n; ++k) padded[row * kWidth + k] = x[row * n + k];
  }
}

template <class T>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  constexpr int kWidth = S::kWidth;
  const EmissionShape& shape = args.shape;
  const int64_t n = shape.classes < kWidth ? kWidth : shape.classes, n_whole = (n - 1) / kWidth * kWidth;
  const int64_t ahead = n * kWidth <= 4 * kBlock ? kWidth * n : 2 * kBlock;

  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    typename S::Exponent labels[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
      labels[lane] = kOutside;
      if (lane >= count) continue;
      labels[lane] = cursor.label();
      cursor.Advance();
    }
    const auto label = Load(labels);
    const T* x = static_cast<const T*>(args.logits) + r * shape.classes;
    T padded[kWidth * kWidth];
    if (shape.classes < kWidth) {
      PadRows(x, shape.classes, labels, padded);
      x = padded;
    }

    // Maximum and sum of exp(x - maximum) of each row. Outside rows: 0 and 0.
    F max = {}, sum = {};
    if (!shape.normalize) {
      sum = label == kOutside ? F{} : Broadcast(A(1));
    } else if (n * kWidth <= 4 * kBlock) {
      F part[kWidth];
      A shift[kWidth];
      for (int lane = 0; lane < kWidth; ++lane) {
        const T* const row = x + lane * n;
        part[lane] = labels[lane] == kOutside ? F{} : Max(RowMax(row, n_whole, F{} - kInfinity<A>), LoadLast(row, n));
      }
      max = ReduceRows(part, [](F a, F b) { return Max(a, b); });
      Store(Shift(max), shift);
      for (int lane = 0; lane < kWidth; ++lane) {
        const T* const row = x + lane * n;
        const F s = Broadcast(shift[lane]);
        __builtin_prefetch(row + n - 1 + ahead);
        part[lane] = labels[lane] == kOutside ? F{} : RowSumExp(row, n_whole, s, Exp(LoadLast(row, n) - s), ahead);
      }
      sum = ReduceRows(part, [](F a, F b) { return a + b; });
    } else {
      A row_max[kWidth] = {}, row_sum[kWidth] = {};
      for (int lane = 0; lane < kWidth; ++lane) {
        if (labels[lane] == kOutside) continue;
        const T* const row = x + lane * n;
        F m = Broadcast(-kInfinity<A>), total = {};
        for (int64_t i = 0; i < n; i += kBlock) {
          const bool last = n - i <= kBlock;
          const int64_t size = last ? n_whole - i : kBlock;
          const F whole_max = RowMax(row + i, size, m), tail = last ? LoadLast(row, n) : m;
          const F new_max = Broadcast(MaxOfLanes(Max(whole_max, tail)));
          const F shift = Shift(new_max);
          const F block = RowSumExp(row + i, size, shift, last ? Exp(tail - shift) : F{}, ahead);
          total = i > 0 ? total * Exp(m - shift) + block : block;
          m = new_max;
        }
        row_max[lane] = m[0];
        row_sum[lane] = SumOfLanes(total);
      }
      max = Load(row_max);
      sum = Load(row_sum);
    }

    const F shift = Shift(max), log_sum = Log(sum);
    const auto dead = sum == A(0);
    const auto log_prob = [&](F x) {
      const F y = x - shift - log_sum;
      return (dead & (x == x)) ? Broadcast(-kInfinity<A>) : y == kInfinity<A> ? Broadcast(kNaN<A>) : y;
    };
    T picked[kWidth] = {};
    for (int i = 0; i < shape.num_blanks; ++i) {
      for (int lane = 0; lane < kWidth; ++lane) {
        if (labels[lane] != kOutside) picked[lane] = x[lane * n + shape.blanks[i]];
      }
      StoreLanes(log_prob(Load(picked)), static_cast<A*>(args.log_blank[i]) + r, count);
    }
    for (int lane = 0; lane < kWidth; ++lane) {
      if (0 <= labels[lane] && labels[lane] < shape.classes) picked[lane] = x[lane * n + labels[lane]];
    }
    const auto invalid = (label < kOutside) | (label >= typename S::Exponent(shape.classes));
    const F picked_label = label == kNoLabel ? Broadcast(-kInfinity<A>) : Load(picked);
    StoreLanes(log_prob(invalid ? Broadcast(kNaN<A>) : picked_label), static_cast<A*>(args.log_label) + r, count);
    StoreLanes(dead ? max : shift + log_sum, static_cast<A*>(args.lse) + r, count);
  }
}

// dx[k] = f(x[k]) for the n >= kWidth elements of a row; dx may be x. The second vector begins where dx is aligned, the
// last one ends with the row: both may overlap the one before, so each is read before the one before it is written.
template <class T, class Function>
inline void MapRow(const T* x, int64_t n, T* dx, int64_t ahead, Function f) {
  constexpr int kWidth = Simd<Accumulator<T>>::kWidth;
  constexpr int64_t kBytes = kWidth * sizeof(T);
  const int64_t head = n < 8 * kWidth ? kWidth : kWidth - int64_t(reinterpret_cast<uintptr_t>(dx) % kBytes / sizeof(T));
  int64_t at = 0;
  auto v = Load(x);
  for (int64_t next = head; next < n; next += kWidth) {
    if (next > n - kWidth) next = n - kWidth;
    __builtin_prefetch(x + next + ahead);
    const auto next_v = Load(x + next);
    Store(f(v), dx + at);
    v = next_v;
    at = next;
  }
  Store(f(v), dx + at);
}

template <class T, class F>
inline void FillRow(F value, int64_t n, T* dx) {
  for (int64_t i = 0; i < n - Width<F>(); i += Width<F>()) Store(value, dx + i);
  Store(value, dx + n - Width<F>());
}

template <class T>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  constexpr int kWidth = S::kWidth;
  const EmissionShape& shape = args.shape;
  const int64_t n = shape.classes < kWidth ? kWidth : shape.classes;
  const int64_t ahead = n <= kBlock ? kWidth * n : 2 * kBlock;
  const int num_blanks = shape.num_blanks;

  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    typename S::Exponent labels[kWidth];
    A scales[kWidth] = {}, limits[kWidth] = {};
    for (int lane = 0; lane < kWidth; ++lane) {
      labels[lane] = kOutside;
      if (lane >= count) continue;
      const A clamp = static_cast<const A*>(args.clamp)[cursor.sequence()];
      labels[lane] = cursor.label();
      limits[lane] = clamp > 0 ? clamp : kInfinity<A>;
      scales[lane] = static_cast<const A*>(args.scale)[cursor.sequence()];
      cursor.Advance();
    }
    const auto label = Load(labels);
    const F scale = Load(scales), limit = Load(limits);

    const auto ct = [&](int arc) {
      return LoadLanes(static_cast<const A*>(arc < num_blanks ? args.ct_blank[arc] : args.ct_label) + r, count);
    };
    F sum = {};
    auto zero = sum == sum;
    for (int arc = 0; arc <= num_blanks; ++arc) {
      sum += ct(arc);
      zero &= ct(arc) == A(0);
    }
    // From here on rows of zeros count as outside: they are not read.
    Store(zero ? decltype(label){} + kOutside : label, labels);
    const T* x = static_cast<const T*>(args.logits) + r * shape.classes;
    T* dx = static_cast<T*>(args.dlogits) + r * shape.classes;
    T padded[kWidth * kWidth];
    if (shape.classes < kWidth) {
      PadRows(x, shape.classes, labels, padded);
      x = dx = padded;
    }
    const F row_lse = LoadLanes(static_cast<const A*>(args.lse) + r, count), lse = Shift(row_lse);

    const auto clip = [](F v, F limit) { return Max(-limit, Min(limit, v)); };

    // Classes with arcs, before their logits are overwritten.
    T arc_dx[kMaxBlanks + 1][kWidth];
    for (int arc = 0; arc <= num_blanks; ++arc) {
      F arc_ct = {};
      for (int other = 0; other <= num_blanks; ++other) {
        if (arc < num_blanks && other < num_blanks) {
          if (shape.blanks[arc] == shape.blanks[other]) arc_ct += ct(other);
        } else if (arc == other) {
          arc_ct += ct(other);
        } else {
          const auto blank = typename S::Exponent(shape.blanks[arc < num_blanks ? arc : other]);
          arc_ct += label == blank ? ct(other) : F{};
        }
      }
      for (int lane = 0; lane < kWidth; ++lane) {
        const int64_t k = arc < num_blanks ? shape.blanks[arc] : labels[lane];
        arc_dx[arc][lane] = labels[lane] != kOutside && 0 <= k && k < shape.classes ? x[lane * n + k] : T{};
      }
      const F softmax = shape.normalize ? Exp(Load(arc_dx[arc]) - lse) : F{};
      Store(clip(arc_ct - softmax * sum, limit) * scale, arc_dx[arc]);
    }

    A lses[kWidth], minus_sums[kWidth], factors[kWidth];
    Store(lse, lses);
    Store(-sum, minus_sums);
    Store(-sum * scale, factors);
    for (int lane = 0; lane < count; ++lane) {
      const T* const row = x + lane * n;
      T* const row_dx = dx + lane * n;
      if (labels[lane] == kOutside) {
        FillRow(F{}, n, row_dx);
        continue;
      }
      const F row_lse = Broadcast(lses[lane]), minus_sum = Broadcast(minus_sums[lane]), scale = Broadcast(scales[lane]);
      const F limit = Broadcast(limits[lane]), factor = Broadcast(factors[lane]);
      if (!shape.normalize) {
        FillRow(clip(minus_sum == minus_sum ? F{} : minus_sum, limit) * scale, n, row_dx);
      } else if (limits[lane] == kInfinity<A>) {
        MapRow(row, n, row_dx, ahead, [&](F v) { return Exp(v - row_lse) * factor; });
      } else {
        MapRow(row, n, row_dx, ahead, [&](F v) { return clip(Exp(v - row_lse) * minus_sum, limit) * scale; });
      }
      for (int arc = 0; arc < num_blanks; ++arc) row_dx[shape.blanks[arc]] = arc_dx[arc][lane];
      if (0 <= labels[lane] && labels[lane] < shape.classes) row_dx[labels[lane]] = arc_dx[num_blanks][lane];
    }
    if (shape.classes < kWidth) {
      T* const to = static_cast<T*>(args.dlogits) + r * shape.classes;
      for (int lane = 0; lane < count; ++lane) {
        for (int64_t k = 0; k < shape.classes; ++k) to[lane * shape.classes + k] = padded[lane * kWidth + k];
      }
    }
  }
}

void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kF16:
      return Forward<Half>(args, begin, end);
    case DType::kBF16:
      return Forward<BFloat16>(args, begin, end);
    case DType::kF32:
      return Forward<float>(args, begin, end);
    case DType::kF64:
      return Forward<double>(args, begin, end);
  }
}

void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kF16:
      return Backward<Half>(args, begin, end);
    case DType::kBF16:
      return Backward<BFloat16>(args, begin, end);
    case DType::kF32:
      return Backward<float>(args, begin, end);
    case DType::kF64:
      return Backward<double>(args, begin, end);
  }
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
