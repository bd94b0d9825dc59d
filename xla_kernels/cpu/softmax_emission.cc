// Softmax emission: rows of V logits -> log-probabilities of the arcs, and the arcs' cotangents -> gradient of the
// logits.
//
// Each pass reads every logit once, and computes one exp for it. The forward pass does not look for the maximum first:
// it subtracts the logit of the first blank, which makes the sum of the exponentials at least 1 and a blank's
// probability near 1 as exact as the maximum would. A row whose sum then is above 2^30 or NaN is summed again with its
// maximum. All that is per row (log, the arcs' own classes, the choice of special values) is done for a group of kWidth
// rows at once, one row per lane. Nothing depends on how the rows are grouped, so a range of rows may be split anywhere
// without changing a bit.
//
// Measured on one core of a Zen 4 at 3.6 GHz, GCC 12, AVX-512, float32, in ns per row, forward + backward in place,
// minima; beside it a flat loop that reads twice and writes once and knows no rows, with a polynomial alone for exp:
//       V       32    500   1024   4096
//    here       14    127    241    992
//    loop        8    135    276   1144
// AVX2 takes 1.2 times as long, SSE2 4 times. At V = 32 what surrounds the two vectors of a row is still a third: rows
// of up to four vectors take their arcs' gradients in registers (14% less than correcting them afterwards, as long rows
// do), and any function that is not inlined there costs 2 ns. Five durations cost 7 ns + 7 ns a row, and as much again
// where they make it end at odd addresses; a Bernoulli blank 19 ns + 5 ns at V = 500, for its comparison.
//
// Long rows of zeros (padding) are streamed past the caches, not read first: value and gradient of ragged batches, 52%
// to 61% of whose nodes are valid, then take 2% to 16% less (minima of two runs at V = 500, 1024 and 4096; bfloat16:
// 1%).
//
// Tried and left out:
//   the maximum of each row, or of its blocks, first         forward +13% at V = 500, +19% at V = 1024
//   the arcs' own classes of a group before its rows         forward +37%: 16 streams defeat the hardware's prefetching
//   no prefetching in software                               forward +60%, backward +35% at V = 500
//   prefetching rows of up to four vectors                   +2% to +14%
//   one memset for each run of rows of zeros                 backward of padded batches +80% at V = 32, none at V = 500
//   the durations of a group before its rows                 backward +20% at V = 64, for the same reason as above
//   the loop over a group inside the choice of a row's size  backward +8% at V = 32: GCC spills
#include "xla_kernels/cpu/softmax_emission.h"

#include "xla_kernels/cpu/simd.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
constexpr A kInfinity = A(__builtin_inf());
template <class A>
constexpr A kLargest = A(0x1.fffffep127f);
template <class A>
constexpr A kNaN = A(__builtin_nan(""));

// Elements summed at a time. Where the maximum is needed they are few enough to be still in the L1 cache, and the sum
// is scaled to the new maximum from block to block.
constexpr int64_t kBlock = 1024;

// Rows of zeros of this size are written past the caches.
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

  // Stores the labels of the next `count` rows, and kOutside up to kWidth. Calls visit(sequence, first, last) for each
  // run of rows [first, last) of one frame.
  template <class A, class Visit>
  void Next(int count, typename Simd<A>::Exponent* labels, Visit visit) {
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

// A row of n >= kWidth elements in vectors: the last one overlaps the one before, and its lanes that belong to both are
// taken as -inf. With kSkip so is element `skip` of the row.
template <class T, bool kSkip>
class RowReader {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  static constexpr int kWidth = Simd<A>::kWidth;

  RowReader(int64_t n, int64_t skip)
      : n_(n), whole_((n - 1) / kWidth * kWidth), skip_(skip), own_(LanesBetween<A>(whole_ + kWidth - n, kWidth)) {}

  int64_t whole() const { return whole_; }  // elements before the last vector
  F At(const T* x, int64_t i) const {
    const F v = Load(x + i);
    if constexpr (kSkip) return IsLane<A>(skip_ - i) ? Broadcast(-kInfinity<A>) : v;
    return v;
  }
  F Last(const T* x) const { return own_ ? At(x, n_ - kWidth) : Broadcast(-kInfinity<A>); }

 private:
  const int64_t n_, whole_, skip_;
  const typename Simd<A>::I own_;
};

// What is subtracted from a row before exp: its maximum, or 0 to keep exp(-inf - max) from being NaN.
template <class F>
inline F Shift(F max) {
  using A = std::decay_t<decltype(max[0])>;
  return max == -kInfinity<A> ? Broadcast(A(0)) : max;
}

// shift + log_sum, rounded once.
template <class F>
inline F Sum(F shift, SplitLog<F> log_sum) {
  const F sum = shift + log_sum.high, part = sum - shift;
  return sum + (((shift - (sum - part)) + (log_sum.high - part)) + log_sum.low);
}

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

// Sum of exp(x - shift) of a row, in lanes. Rows of up to four vectors have no loop; long ones are summed in blocks, so
// that no single element is added to the sum of very many.
template <int kWhole, class T, bool kSkip, class F>
inline F ShortSumExp(const RowReader<T, kSkip>& reader, const T* x, F shift) {
  F sum = ExpOfAny(reader.Last(x) - shift);
  for (int i = 0; i < kWhole; ++i) sum += ExpOfAny(reader.At(x, i * Width<F>()) - shift);
  return sum;
}

template <class T, bool kSkip, class F>
inline F LongSumExp(const RowReader<T, kSkip>& reader, const T* x, F shift, int64_t ahead) {
  constexpr int kWidth = Width<F>();
  F total = ExpOfAny(reader.Last(x) - shift);
  for (int64_t i = 0; i < reader.whole();) {
    const int64_t end = reader.whole() - i < kBlock ? reader.whole() : i + kBlock;
    F even = {}, odd = {};
    for (; i + kWidth < end; i += 2 * kWidth) {
      __builtin_prefetch(x + i + ahead);
      __builtin_prefetch(x + i + kWidth + ahead);
      even += ExpOfAny(reader.At(x, i) - shift);
      odd += ExpOfAny(reader.At(x, i + kWidth) - shift);
    }
    if (i < end) even += ExpOfAny(reader.At(x, i) - shift), i += kWidth;
    total += even + odd;
  }
  return total;
}

template <class T, bool kSkip, class F>
inline F QuickSumExp(const RowReader<T, kSkip>& reader, const T* x, F shift, int64_t ahead) {
  switch (reader.whole() / Width<F>()) {
    case 0:
      return ShortSumExp<0>(reader, x, shift);
    case 1:
      return ShortSumExp<1>(reader, x, shift);
    case 2:
      return ShortSumExp<2>(reader, x, shift);
    case 3:
      return ShortSumExp<3>(reader, x, shift);
  }
  return LongSumExp(reader, x, shift, ahead);
}

// The first n < kWidth elements of a group of rows as rows of kWidth elements; with kSkip -inf is in place of `skip`.
// `inside`: != kOutside where the row may be read.
template <bool kSkip, class T, class Label>
inline void PadRows(const T* x, int64_t n, int64_t row_size, int64_t skip, const Label* inside, T* padded) {
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

// The last `count` logits of each row of a group, a head of its own: one row per lane.
template <class T>
class DurationHead {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  using I = typename Simd<A>::I;
  static constexpr int kWidth = Simd<A>::kWidth;

  // Whether the head is read and written as the end of a vector of each row.
  static bool IsShort(int64_t row_size, int count) { return count <= kWidth && kWidth <= row_size; }

  // The end of a row as a vector: to be read while the rest of the row is, since one row after the other is what the
  // hardware can prefetch.
  static F End(const T* row, int64_t row_size) { return Load(row + row_size - kWidth); }

  // `ends`: End of each row, where IsShort. Rows whose label is kOutside are not read; their logits are anything.
  DurationHead(const T* x, int64_t row_size, const typename Simd<A>::Exponent* labels, F* ends, int count,
               bool normalize)
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
  // exp(logit - shift) of logit i, unless the input already is log-probabilities: the softmax is this / sum().
  F exp(int i) const { return normalize_ ? exps_[i] : F{}; }

 private:
  const bool normalize_;
  F logits_[kMaxDurations], exps_[kMaxDurations], shift_ = {}, sum_ = {};
};

// log sigmoid(x), and the sigmoids of x and -x; for x = +inf and NaN: NaN.
template <class F>
inline F LogSigmoid(F x) {
  using A = std::decay_t<decltype(x[0])>;
  const F e = Exp(Min(x, -x)), w = e + A(1);
  const SplitLog<F> log = Log(w);
  const F log1p = log.high + (log.low - ((w - A(1)) - e) / w);  // what w lost of e
  return x == kInfinity<A> ? Broadcast(kNaN<A>) : Min(Broadcast(A(0)), x) - log1p;
}
template <class F>
inline std::pair<F, F> Sigmoids(F x) {
  using A = std::decay_t<decltype(x[0])>;
  const F e = Exp(Min(x, -x)), large = A(1) / (e + A(1)), small = e * large;
  return {x > A(0) ? large : small, x > A(0) ? small : large};
}

template <class T, bool kBernoulli>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  constexpr int kWidth = S::kWidth;
  // Up to here a logit less the shift is rounded no more than one less the row's maximum usually is.
  constexpr A kTrusted = A(1 << 30);
  const EmissionShape& shape = args.shape;
  const bool padding = shape.classes < kWidth;
  const int64_t n = padding ? kWidth : shape.classes, row_size = shape.row_size();
  const int64_t stride = padding ? kWidth : row_size;  // of the rows that are summed
  const int64_t ahead = n * kWidth <= 4 * kBlock ? kWidth * n : 2 * kBlock;
  const int64_t blank = shape.blanks[0], anchor = !kBernoulli ? blank : blank == 0;  // the class that is the shift
  const RowReader<T, kBernoulli> reader(n, padding ? -1 : blank);
  const I lane_number = LaneNumbers<A>(std::make_integer_sequence<int, kWidth>{});

  const bool has_ends = shape.durations > 0 && DurationHead<T>::IsShort(row_size, shape.durations);
  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    Exponent labels[kWidth];
    cursor.template Next<A>(count, labels, [](int64_t, int, int) {});
    const I label = Load(labels);
    const auto outside = label == kOutside;
    const T* const logits = static_cast<const T*>(args.logits) + r * row_size;
    const T* x = logits;
    T padded[kWidth * kWidth];
    if (padding) {
      PadRows<kBernoulli>(x, shape.classes, row_size, blank, labels, padded);
      x = padded;
    }

    // log-sum-exp of each row is shift + log(sum); the largest logit is -inf where the sum is 0. Outside rows: 0, 0.
    F shift = {}, sum = {}, max = {}, first = {};
    F ends[kWidth];
    for (int lane = 0; has_ends && lane < kWidth; ++lane) ends[lane] = F{};
    if (!shape.normalize) {
      sum = outside ? F{} : Broadcast(A(1));
      for (int lane = 0; has_ends && lane < kWidth; ++lane) {
        if (labels[lane] != kOutside) ends[lane] = DurationHead<T>::End(logits + lane * row_size, row_size);
      }
    } else {
      A shifts[kWidth] = {}, sums[kWidth];
      F part[kWidth];
      for (int lane = 0; lane < kWidth; ++lane) {
        const T* const row = x + lane * stride;
        part[lane] = F{};
        if (labels[lane] == kOutside) continue;
        const F row_shift = LoadAll(row + anchor);
        shifts[lane] = row_shift[0];
        part[lane] = QuickSumExp(reader, row, row_shift, ahead);
        if (has_ends) ends[lane] = DurationHead<T>::End(logits + lane * row_size, row_size);
      }
      first = shift = Load(shifts);
      sum = ReduceRows(part, [](F a, F b) { return a + b; });
      if (Any(~(sum <= kTrusted))) {
        A maxima[kWidth];
        Store(sum, sums);
        Store(shift, maxima);
        for (int lane = 0; lane < kWidth; ++lane) {
          if (sums[lane] <= kTrusted) continue;
          const auto safe = SafeSumExp(reader, x + lane * stride);
          maxima[lane] = safe.max;
          sums[lane] = safe.sum;
        }
        sum = Load(sums);
        max = Load(maxima);
        shift = Shift(max);
      }
    }

    // A NaN of one head is one of both.
    F poison = sum - sum;
    const auto log_prob = [&](F x, F shift, F sum, SplitLog<F> log_sum) {
      const F y = x - shift - log_sum.high - log_sum.low;
      const F capped = shape.normalize ? Min(Broadcast(A(0)), y) : y == kInfinity<A> ? Broadcast(kNaN<A>) : y;
      return ((sum == A(0)) & (x == x) ? Broadcast(-kInfinity<A>) : capped) + poison;
    };
    if (shape.durations > 0) {
      const DurationHead<T> head(logits, row_size, labels, ends, shape.durations, shape.normalize);
      const SplitLog<F> log_sum = Log(head.sum());
      poison += outside ? F{} : head.sum() - head.sum();
      for (int i = 0; i < shape.durations; ++i) {
        const F y = outside ? Broadcast(-kInfinity<A>) : log_prob(head.logit(i), head.shift(), head.sum(), log_sum);
        StoreLanes(y, static_cast<A*>(args.log_duration[i]) + r, count);
      }
    }
    const SplitLog<F> log_sum = Log(sum);
    const auto of_class = [&](I k) {  // its logit
      const auto known = ~outside & (k >= 0) & (k < Exponent(shape.classes));
      return known ? Pick(logits, known ? lane_number * Exponent(row_size) + k : I{}) : F{};
    };
    const auto invalid = (label < kOutside) | (label >= Exponent(shape.classes));
    F picked = of_class(label);
    picked = label == kNoLabel ? Broadcast(-kInfinity<A>) : invalid ? Broadcast(kNaN<A>) : picked;
    F log_label = log_prob(picked, shift, sum, log_sum);
    if constexpr (kBernoulli) {
      const F z = of_class(I{} + Exponent(blank)), log_blank = (outside ? Broadcast(-kInfinity<A>) : LogSigmoid(z));
      poison += outside ? F{} : log_blank == -kInfinity<A> ? F{} : log_blank - log_blank;
      const F other = z == -kInfinity<A> ? F{} : LogSigmoid(-z);
      log_label = (label == Exponent(blank) ? log_blank : log_label + other) + poison;
      StoreLanes(log_blank + poison, static_cast<A*>(args.log_blank[0]) + r, count);
    } else {
      for (int i = 0; i < shape.num_blanks; ++i) {
        const bool same = shape.normalize && shape.blanks[i] == anchor;
        const F picked = same ? first : of_class(I{} + Exponent(shape.blanks[i]));
        StoreLanes(log_prob(picked, shift, sum, log_sum), static_cast<A*>(args.log_blank[i]) + r, count);
      }
    }
    StoreLanes(log_label, static_cast<A*>(args.log_label) + r, count);
    StoreLanes(sum == A(0) ? max : Sum(shift, log_sum), static_cast<A*>(args.lse) + r, count);
  }
}

// A row of n >= kWidth elements in few registers. The last vector ends with the row and may overlap the one before.
constexpr int kShortRow = 4;  // vectors, at most

template <class T, int kVectors>
class ShortRow {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;

  [[gnu::always_inline]] ShortRow(const T* x, int64_t n) : n_(n) {
    for (int i = 0; i < kVectors; ++i) v_[i] = Load(x + Begin(i));
  }
  template <class Function>
  [[gnu::always_inline]] void Map(Function f) {
    for (int i = 0; i < kVectors; ++i) v_[i] = f(v_[i]);
  }
  [[gnu::always_inline]] void Add(int64_t k, A x) {  // to element k, if there is one
    for (int i = 0; i < kVectors; ++i) v_[i] += IsLane<A>(k - Begin(i)) ? Broadcast(x) : F{};
  }
  [[gnu::always_inline]] void Set(int64_t k, A x) {
    for (int i = 0; i < kVectors; ++i) v_[i] = IsLane<A>(k - Begin(i)) ? Broadcast(x) : v_[i];
  }
  [[gnu::always_inline]] void StoreTo(T* dx) const {
    for (int i = 0; i < kVectors; ++i) Store(v_[i], dx + Begin(i));
  }

 private:
  int64_t Begin(int i) const { return i + 1 < kVectors ? i * Simd<A>::kWidth : n_ - Simd<A>::kWidth; }

  const int64_t n_;
  F v_[kVectors];
};

template <class T, class Function>
[[gnu::always_inline]] inline void WithShortRow(const T* x, int64_t n, Function f) {
  switch ((n - 1) / Simd<Accumulator<T>>::kWidth) {
    case 0:
      return f(ShortRow<T, 1>(x, n));
    case 1:
      return f(ShortRow<T, 2>(x, n));
    case 2:
      return f(ShortRow<T, 3>(x, n));
  }
  f(ShortRow<T, kShortRow>(x, n));
}

// dx[k] = f(x[k]) for the n >= kWidth elements of a row; dx may be x. The last vector ends with the row and may overlap
// the one before, so each is read before the one before it is written. The second begins where dx is aligned.
template <class T, class Function>
inline void MapLongRow(const T* x, int64_t n, T* dx, int64_t ahead, Function f) {
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

template <class T, bool kBernoulli>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  constexpr int kWidth = S::kWidth;
  const EmissionShape& shape = args.shape;
  const bool padding = shape.classes < kWidth;
  const int64_t n = padding ? kWidth : shape.classes, row_size = shape.row_size();
  const int64_t stride = padding ? kWidth : row_size;
  const int64_t ahead = n <= kBlock ? kWidth * n : 2 * kBlock;
  const int num_blanks = shape.num_blanks;
  const bool is_short = n <= kShortRow * kWidth, stream = row_size * int64_t(sizeof(T)) >= kStreamedBytes;
  const Exponent blank = shape.blanks[0];
  const I lane_number = LaneNumbers<A>(std::make_integer_sequence<int, kWidth>{});
  // 0 stays 0 whatever the scale.
  const auto scaled = [](F v, F limit, F scale) {
    v = Max(-limit, Min(limit, v));
    return v == A(0) ? F{} : v * scale;
  };
  // Of a logit less lse: only a Bernoulli blank, whose result is not used, can be above 0.
  const auto exp = [](F x) [[gnu::always_inline]] { return kBernoulli ? ExpOfAny(x) : Exp(x); };

  const bool has_ends = shape.durations > 0 && DurationHead<T>::IsShort(row_size, shape.durations);
  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    Exponent labels[kWidth];
    A scales[kWidth] = {}, limits[kWidth] = {};
    cursor.template Next<A>(count, labels, [&](int64_t sequence, int first, int last) {
      const A scale = static_cast<const A*>(args.scale)[sequence];
      const A clamp = static_cast<const A*>(args.clamp)[sequence];
      for (int lane = first; lane < last; ++lane) {
        scales[lane] = scale;
        // What is left to do where there is no limit would make NaN of 0 times infinity.
        limits[lane] = clamp > 0 ? clamp : scale - scale == 0 ? kInfinity<A> : kLargest<A>;
      }
    });
    const I label = Load(labels);
    const F scale = Load(scales), limit = Load(limits);

    const auto ct = [&](int arc) {
      return LoadLanes(static_cast<const A*>(arc < num_blanks ? args.ct_blank[arc] : args.ct_label) + r, count);
    };
    const auto ct_duration = [&](int i) { return LoadLanes(static_cast<const A*>(args.ct_duration[i]) + r, count); };
    F sum = {};
    auto zero = sum == sum;
    for (int arc = 0; arc <= num_blanks; ++arc) {
      sum += ct(arc);
      zero &= ct(arc) == A(0);
    }
    for (int i = 0; i < shape.durations; ++i) zero &= ct_duration(i) == A(0);
    // From here on rows of zeros count as outside: they are not read.
    const I used_label = zero ? I{} + kOutside : label;
    const auto outside = used_label == kOutside;
    Store(used_label, labels);
    const T* const logits = static_cast<const T*>(args.logits) + r * row_size;
    T* const dlogits = static_cast<T*>(args.dlogits) + r * row_size;

    A of_blank[kWidth];  // gradient of a Bernoulli blank
    if constexpr (kBernoulli) {
      const auto same = label == blank;
      const F z = Pick(logits, outside ? I{} : lane_number * Exponent(row_size) + blank);
      const F ct_other = same ? ct(1) - ct(1) : ct(1), ct_blank = same ? sum : ct(0);
      const auto [yes, no] = Sigmoids(z);
      sum = ct_other;
      Store(scaled(ct_blank * no - ct_other * yes, limit, scale), of_blank);
    }
    const T* x = logits;
    T* dx = dlogits;
    T padded[kWidth * kWidth];
    if (padding) {
      PadRows<false>(x, shape.classes, row_size, 0, labels, padded);
      x = dx = padded;
    }
    const F row_lse = LoadLanes(static_cast<const A*>(args.lse) + r, count), lse = Shift(row_lse);
    A lses[kWidth], minus_sums[kWidth], factors[kWidth];
    Store(lse, lses);
    Store(F{} - sum, minus_sums);  // no -0
    Store((F{} - sum) * scale, factors);
    T arc_dx[kMaxBlanks + 1][kWidth];  // logits of the classes with arcs, before they are overwritten; then gradients
    for (int arc = 0; !is_short && arc <= num_blanks; ++arc) Store(F{}, arc_dx[arc]);
    F ends[kWidth];
    for (int lane = 0; has_ends && lane < kWidth; ++lane) ends[lane] = F{};
    for (int lane = 0; lane < count; ++lane) {
      const T* const row = x + lane * stride;
      T* const row_dx = dx + lane * stride;
      if (labels[lane] == kOutside) {
        if (!stream) {
          FillRow(F{}, n, row_dx);
          continue;
        }
        int last = lane;
        while (last + 1 < count && labels[last + 1] == kOutside) ++last;
        StreamZeros(row_dx, (last + 1 - lane) * row_size);
        lane = last;
        continue;
      }
      if (has_ends) ends[lane] = DurationHead<T>::End(logits + lane * row_size, row_size);
      const F row_lse = Broadcast(lses[lane]), minus_sum = Broadcast(minus_sums[lane]), scale = Broadcast(scales[lane]);
      const F limit = Broadcast(limits[lane]), factor = Broadcast(factors[lane]);
      const F others = minus_sum == minus_sum ? F{} : minus_sum;  // where there is no softmax
      if (is_short) {
        WithShortRow(row, n, [&](auto g) [[gnu::always_inline]] {
          g.Map([&](F v) { return shape.normalize ? exp(v - row_lse) * minus_sum : others; });
          g.Add(labels[lane], static_cast<const A*>(args.ct_label)[r + lane]);
          for (int arc = 0; !kBernoulli && arc < num_blanks; ++arc) {
            g.Add(shape.blanks[arc], static_cast<const A*>(args.ct_blank[arc])[r + lane]);
          }
          if (limits[lane] == kInfinity<A>) {
            g.Map([&](F v) { return v * scale; });
          } else {
            g.Map([&](F v) { return scaled(v, limit, scale); });
          }
          if (kBernoulli) g.Set(blank, of_blank[lane]);
          g.StoreTo(row_dx);
        });
        continue;
      }
      for (int arc = 0; arc < num_blanks; ++arc) arc_dx[arc][lane] = row[shape.blanks[arc]];
      if (0 <= labels[lane] && labels[lane] < shape.classes) arc_dx[num_blanks][lane] = row[labels[lane]];
      if (!shape.normalize) {
        FillRow(scaled(others, limit, scale), n, row_dx);
      } else if (limits[lane] == kInfinity<A>) {
        MapLongRow(row, n, row_dx, ahead, [&](F v) { return exp(v - row_lse) * factor; });
      } else {
        MapLongRow(row, n, row_dx, ahead, [&](F v) { return scaled(exp(v - row_lse) * minus_sum, limit, scale); });
      }
    }

    for (int arc = 0; !is_short && arc <= num_blanks; ++arc) {
      F arc_ct = {};
      for (int other = 0; other <= num_blanks; ++other) {
        if (arc < num_blanks && other < num_blanks) {
          if (shape.blanks[arc] == shape.blanks[other]) arc_ct += ct(other);
        } else if (arc == other) {
          arc_ct += ct(other);
        } else {
          const Exponent blank = shape.blanks[arc < num_blanks ? arc : other];
          arc_ct += label == blank ? ct(other) : F{};
        }
      }
      // Of any: lanes without this arc hold no logit of their row.
      const F softmax = shape.normalize ? ExpOfAny(Load(arc_dx[arc]) - lse) : F{};
      F gradient = scaled(arc_ct - softmax * sum, limit, scale);
      if constexpr (kBernoulli) gradient = arc == 0 || label == blank ? Load(of_blank) : gradient;
      Store(gradient, arc_dx[arc]);
      for (int lane = 0; lane < count; ++lane) {
        const int64_t k = labels[lane] == kOutside ? -1 : arc < num_blanks ? shape.blanks[arc] : labels[lane];
        if (0 <= k && k < shape.classes) dx[lane * stride + k] = arc_dx[arc][lane];
      }
    }
    for (int lane = 0; padding && lane < count; ++lane) {
      for (int64_t k = 0; k < shape.classes; ++k) dlogits[lane * row_size + k] = padded[lane * kWidth + k];
    }
    if (shape.durations > 0) {
      F durations[kMaxDurations];  // their gradients
      const DurationHead<T> head(logits, row_size, labels, ends, shape.durations, shape.normalize);
      F total = {};
      for (int i = 0; i < shape.durations; ++i) total += ct_duration(i);
      total = head.sum() == A(0) ? F{} : total / head.sum();
      for (int i = 0; i < shape.durations; ++i) {
        const F gradient = scaled(ct_duration(i) - head.exp(i) * total, limit, scale);
        durations[i] = outside ? F{} : gradient;
      }
      const auto each_row = [&](auto write) {
        for (int lane = 0; lane < count; ++lane) {
          if (!stream || labels[lane] != kOutside) write(lane, dlogits + (lane + 1) * row_size);
        }
      };
      const int last = shape.durations;
      if (has_ends) {
        F rows[kWidth] = {};
        for (int i = 0; i < last; ++i) rows[kWidth - last + i] = durations[i];
        Transpose(rows);
        each_row([&](int lane, T* end) { StoreLast(rows[lane], last, end); });
      } else {
        for (int i = 0; i < last; ++i) {
          T lanes[kWidth];
          Store(durations[i], lanes);
          each_row([&](int lane, T* end) { end[i - last] = lanes[lane]; });
        }
      }
    }
  }
  if (stream) Fence();
}

template <class T>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  (args.shape.bernoulli ? Forward<T, true> : Forward<T, false>)(args, begin, end);
}

template <class T>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  (args.shape.bernoulli ? Backward<T, true> : Backward<T, false>)(args, begin, end);
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
