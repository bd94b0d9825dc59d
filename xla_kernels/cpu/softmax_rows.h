// Groups of rows of logits, one row per lane: their positions and labels, and the additional heads of TDT and HAT.
#pragma once

#include "xla_kernels/common/shape.h"
#include "xla_kernels/cpu/exp_log.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
constexpr A kInfinity = A(__builtin_inf());
template <class A>
constexpr A kLargest = A(0x1.fffffep127f);
template <class A>
constexpr A kNaN = A(__builtin_nan(""));

// Elements summed at a time. If the maximum is needed, a block is read twice, so it must fit in the L1 cache; the sum
// is scaled to the new maximum from block to block.
constexpr int64_t kBlock = 1024;

// Rows of zeros of this size or more bypass the caches.
constexpr int64_t kStreamedBytes = 1024;

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

  // Stores the labels of the next `count` rows, and kOutside for the others up to kWidth. Calls
  // visit(sequence, first, last) for the rows [first, last) of each frame.
  template <class A, class Visit>
  [[gnu::always_inline]] void Next(int count, typename Simd<A>::Exponent* labels, Visit visit) {
    constexpr int kWidth = Simd<A>::kWidth;
    for (int lane = 0; lane < count;) {
      const int64_t left = shape_.columns - u_;
      const int last = left < count - lane ? lane + int(left) : count;
      const bool inside = t_ < num_frames_[b_];
      const int32_t* const from =
          label_ + (shape_.label_frames == 1 ? b_ : b_ * shape_.frames + t_) * shape_.columns + u_ - lane;
      visit(b_, lane, last);
      u_ += last - lane;
      if (!inside) {
        for (; lane < last; ++lane) labels[lane] = kOutside;
      } else if (last - lane == kWidth) {
        Store(__builtin_convertvector(LoadAs<typename Simd<A>::Int32s>(from), typename Simd<A>::I), labels);
        lane = last;
      } else {
        for (; lane < last; ++lane) labels[lane] = from[lane];
      }
      if (u_ == shape_.columns) NextFrame();
    }
    for (int lane = count; lane < kWidth; ++lane) labels[lane] = kOutside;
  }

 private:
  void NextFrame() {
    u_ = 0;
    if (++t_ < shape_.frames) return;
    t_ = 0;
    ++b_;
  }

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

// *x in all lanes.
template <class T>
inline auto LoadAll(const T* x) {
  T lanes[Simd<Accumulator<T>>::kWidth];
  for (T& lane : lanes) lane = *x;
  return Load(lanes);
}

// Subtracted from a row before exp: its maximum, or 0 if that is -inf, since -inf - -inf is NaN.
template <class F>
inline F Shift(F max) {
  using A = std::decay_t<decltype(max[0])>;
  return max == -kInfinity<A> ? Broadcast(A(0)) : max;
}

// A row of n >= kWidth elements in vectors. The last one ends with the row and may overlap the one before; lanes in
// both read as -inf in the last. If kSkip, element `skip` also reads as -inf.
template <class T, bool kSkip>
class RowReader {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  static constexpr int kWidth = Simd<A>::kWidth;

  RowReader(int64_t n, int64_t skip)
      : n_(n), whole_((n - 1) / kWidth * kWidth), skip_(skip), last_(LanesBetween<A>(whole_ + kWidth - n, kWidth)) {}

  int64_t whole() const { return whole_; }  // elements before the last vector
  // The end of the pairs of vectors from element i on, up to `end`, that do not hold element `skip`.
  int64_t EndWithout(int64_t i, int64_t end) const {
    return kSkip && i <= skip_ && skip_ < end ? i + (skip_ - i) / (2 * kWidth) * (2 * kWidth) : end;
  }
  F At(const T* x, int64_t i) const {
    const F v = Load(x + i);
    if constexpr (kSkip) return IsLane<A>(skip_ - i) ? Broadcast(-kInfinity<A>) : v;
    return v;
  }
  F Last(const T* x) const { return last_ ? At(x, n_ - kWidth) : Broadcast(-kInfinity<A>); }

 private:
  const int64_t n_, whole_, skip_;
  const typename Simd<A>::I last_;  // lanes of the last vector that the one before does not have
};

template <class A>
struct MaxSum {
  A max, sum;
};

// Maximum of a row and sum of exp(x - maximum).
template <class T, bool kSkip>
[[gnu::noinline]] MaxSum<Accumulator<T>> SafeSumExp(const RowReader<T, kSkip>& reader, const T* x) {
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  constexpr int kWidth = Simd<A>::kWidth;
  F max = Broadcast(-kInfinity<A>), total = {};
  for (int64_t begin = 0; begin <= reader.whole(); begin += kBlock) {
    const bool last = reader.whole() - begin < kBlock;
    const int64_t end = last ? reader.whole() : begin + kBlock;
    const F tail = last ? reader.Last(x) : max;
    F new_max = Max(max, tail);
    for (int64_t i = begin; i < end; i += kWidth) new_max = Max(new_max, reader.At(x, i));
    new_max = Broadcast(MaxOfLanes(new_max));
    const F shift = Shift(new_max);
    F block = last ? Exp(tail - shift) : F{};
    for (int64_t i = begin; i < end; i += kWidth) block += Exp(reader.At(x, i) - shift);
    total = begin > 0 ? total * Exp(max - shift) + block : block;
    max = new_max;
  }
  return {max[0], SumOfLanes(total)};
}

// Copies a group of rows of n < kWidth elements into rows of kWidth elements, filled with -inf. If kSkip, element
// `skip` is also -inf. `inside`: rows with kOutside are not read.
template <bool kSkip, class T, class Label>
[[gnu::always_inline]] inline void PadRows(const T* x, int64_t n, int64_t row_size, int64_t skip, const Label* inside,
                                           T* padded) {
  using A = Accumulator<T>;
  constexpr int kWidth = Simd<A>::kWidth;
  for (int row = 0; row < kWidth; ++row) {
    Store(Broadcast(-kInfinity<A>), padded + row * kWidth);
    for (int64_t k = 0; inside[row] != kOutside && k < n; ++k) {
      if (!kSkip || k != skip) padded[row * kWidth + k] = x[row * row_size + k];
    }
  }
}

// x[at], lane by lane.
template <class T, class I>
inline auto Pick(const T* x, I at) {
  constexpr int kWidth = Width<I>();
  typename Simd<Accumulator<T>>::Exponent index[kWidth];
  T picked[kWidth];
  Store(at, index);
  for (int lane = 0; lane < kWidth; ++lane) picked[lane] = x[index[lane]];
  return Load(picked);
}

// The durations: the last `count` logits of each row of a group, a head of their own. One row per lane.
template <class T>
class DurationHead {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  using I = typename Simd<A>::I;
  static constexpr int kWidth = Simd<A>::kWidth;

  // Whether the head of a row fits into one vector at the end of the row.
  static bool IsShort(int64_t row_size, int count) { return count <= kWidth && kWidth <= row_size; }

  // The end of a row as a vector. Read it together with the rest of the row: the hardware can prefetch one row after
  // the other.
  static F End(const T* row, int64_t row_size) { return Load(row + row_size - kWidth); }

  // `ends`: End of each row, if IsShort. Rows with the label kOutside are not read; their logits are arbitrary.
  [[gnu::always_inline]] DurationHead(const T* x, int64_t row_size, const typename Simd<A>::Exponent* labels, F* ends,
                                      int count, bool normalize)
      : normalize_(normalize) {
    F max = Broadcast(-kInfinity<A>);
    if (IsShort(row_size, count)) {
      Transpose(ends);
      for (int i = 0; i < count; ++i) logits_[i] = ends[kWidth - count + i];
    } else {
      const I at = LaneNumbers<A>(std::make_integer_sequence<int, kWidth>{}) * int(row_size) + int(row_size - count);
      const I readable = Load(labels) == kOutside ? I{} : at;
      for (int i = 0; i < count; ++i) logits_[i] = Pick(x, readable + i);
    }
    if (!normalize) {
      sum_ = Broadcast(A(1));
      return;
    }
    for (int i = 0; i < count; ++i) max = Max(max, logits_[i]);
    shift_ = Shift(max);
    for (int i = 0; i < count; ++i) sum_ += exps_[i] = Exp(logits_[i] - shift_);
  }
  F logit(int i) const { return logits_[i]; }
  F shift() const { return shift_; }
  F sum() const { return sum_; }
  // exp(logit - shift) of logit i, or 0 if the input already is log-probabilities. The softmax is exp(i) / sum().
  F exp(int i) const { return normalize_ ? exps_[i] : F{}; }

 private:
  const bool normalize_;
  F logits_[kMaxDurations], exps_[kMaxDurations], shift_ = {}, sum_ = {};
};

// The numbers of a group of rows that are kept in memory. They are a class of their own, since the compiler keeps no
// member of a class in a register that has an array indexed by a variable.
template <class T>
struct RowBuffers {
  typename Simd<Accumulator<T>>::Exponent labels[Simd<Accumulator<T>>::kWidth];
  typename Simd<Accumulator<T>>::F ends[Simd<Accumulator<T>>::kWidth];
  T padded[Simd<Accumulator<T>>::kWidth * Simd<Accumulator<T>>::kWidth];
};

// A group of up to kWidth rows, one per lane, and how rows of this shape are read.
template <class T>
struct RowGroup {
  using F = typename Simd<Accumulator<T>>::F;
  static constexpr int kWidth = Width<F>();

  [[gnu::always_inline]] RowGroup(const EmissionShape& shape, RowBuffers<T>& buffers)
      : classes(shape.classes),
        row_size(shape.row_size()),
        is_padded(classes < kWidth),
        n(is_padded ? kWidth : classes),
        stride(is_padded ? kWidth : row_size),
        anchor(shape.bernoulli ? shape.blanks[0] == 0 : shape.blanks[0]),
        has_ends(shape.durations > 0 && DurationHead<T>::IsShort(row_size, shape.durations)),
        buffers(buffers) {}

  // Begins to read the rows r ... r + count - 1 of `all`, whose labels are set. Rows shorter than a vector are read
  // from a copy, filled with -inf; if kSkip, class `skip` also reads as -inf there.
  template <bool kSkip>
  [[gnu::always_inline]] void Begin(const void* all, int64_t skip) {
    logits = x = static_cast<const T*>(all) + r * row_size;
    if (is_padded) {
      PadRows<kSkip>(logits, classes, row_size, skip, buffers.labels, buffers.padded);
      x = buffers.padded;
    }
    for (int lane = 0; has_ends && lane < kWidth; ++lane) buffers.ends[lane] = F{};
  }
  // Reads the ends together with the rest of the row: see DurationHead.
  [[gnu::always_inline]] void ReadEnd(int lane) {
    if (has_ends) buffers.ends[lane] = DurationHead<T>::End(logits + lane * row_size, row_size);
  }
  [[gnu::always_inline]] bool IsOutside(int lane) const { return buffers.labels[lane] == kOutside; }

  const int64_t classes, row_size;
  const bool is_padded;
  const int64_t n, stride;  // elements of a row as it is read, and from a row to the next
  const int64_t anchor;     // the class of the anchor (common/shape.h)
  const bool has_ends;      // whether the durations are read as a vector at the end of each row
  RowBuffers<T>& buffers;

  int64_t r = 0;                            // the first row
  int count = 0;                            // number of rows
  const T *logits = nullptr, *x = nullptr;  // the first row as it lies in memory, and as it is read
};

// log sigmoid(x), and the sigmoids of x and -x. LogSigmoid is NaN for x = +inf and NaN.
template <class F>
inline F LogSigmoid(F x) {
  using A = std::decay_t<decltype(x[0])>;
  const F e = Exp(Min(x, -x)), w = e + A(1);
  const SplitLog<F> log = Log(w);
  const F log1p = log.high + (log.low - ((w - A(1)) - e) / w);  // corrects the rounding of w
  return x == kInfinity<A> ? Broadcast(kNaN<A>) : Min(Broadcast(A(0)), x) - log1p;
}
template <class F>
inline std::pair<F, F> Sigmoids(F x) {
  using A = std::decay_t<decltype(x[0])>;
  const F e = Exp(Min(x, -x)), large = A(1) / (e + A(1)), small = e * large;
  return {x > A(0) ? large : small, x > A(0) ? small : large};
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
