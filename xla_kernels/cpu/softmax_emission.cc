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
// Measured on one core of a Zen 4 at 3.6 GHz, GCC 12, AVX-512, float32, in ns per row, forward + backward in place;
// beside it a flat loop that reads twice and writes once and knows no rows, with a polynomial alone for exp:
//       V       32    500   1024   4096
//    here       23    214    407   1581
//    loop       12    195    399   1586
// AVX2 takes 1.2 times as long, SSE2 4 times. At V = 32 more than half of the time is what surrounds the two vectors of
// a row: about a sixth of the backward pass is the gradients of the arcs' own classes.
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
#include "xla_kernels/cpu/softmax_emission.h"

#include "xla_kernels/cpu/simd.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
constexpr A kInfinity = A(__builtin_inf());
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
// taken as -inf.
template <class T>
class RowReader {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  static constexpr int kWidth = Simd<A>::kWidth;

  explicit RowReader(int64_t n)
      : n_(n), whole_((n - 1) / kWidth * kWidth), own_(LanesBetween<A>(whole_ + kWidth - n, kWidth)) {}

  int64_t whole() const { return whole_; }  // elements before the last vector
  F Last(const T* x) const { return own_ ? Load(x + n_ - kWidth) : Broadcast(-kInfinity<A>); }

 private:
  const int64_t n_, whole_;
  const typename Simd<A>::I own_;
};

// Maximum, lane by lane, of n elements and `max`; sum of exp(x - shift) of n elements and `sum`.
template <class T, class F>
inline F RowMax(const T* x, int64_t n, F max) {
  for (int64_t i = 0; i < n; i += Width<F>()) max = Max(max, Load(x + i));
  return max;
}

template <class T, class F>
inline F RowSumExp(const T* x, int64_t n, F shift, F sum) {
  for (int64_t i = 0; i < n; i += Width<F>()) sum += Exp(Load(x + i) - shift);
  return sum;
}

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
template <class T>
[[gnu::noinline]] MaxSum<Accumulator<T>> SafeSumExp(const RowReader<T>& reader, const T* x) {
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  F max = Broadcast(-kInfinity<A>), total = {};
  for (int64_t i = 0; i <= reader.whole(); i += kBlock) {
    const bool last = reader.whole() - i < kBlock;
    const int64_t size = last ? reader.whole() - i : kBlock;
    const F tail = last ? reader.Last(x) : max;
    const F new_max = Broadcast(MaxOfLanes(Max(RowMax(x + i, size, max), tail)));
    const F shift = Shift(new_max);
    const F block = RowSumExp(x + i, size, shift, last ? Exp(tail - shift) : F{});
    total = i > 0 ? total * Exp(max - shift) + block : block;
    max = new_max;
  }
  return {max[0], SumOfLanes(total)};
}

// Sum of exp(x - shift) of a row, in lanes. Rows of up to four vectors have no loop; long ones are summed in blocks, so
// that no single element is added to the sum of very many.
template <int kWhole, class T, class F>
inline F ShortSumExp(const RowReader<T>& reader, const T* x, F shift) {
  F sum = ExpOfAny(reader.Last(x) - shift);
  for (int i = 0; i < kWhole; ++i) sum += ExpOfAny(Load(x + i * Width<F>()) - shift);
  return sum;
}

template <class T, class F>
inline F LongSumExp(const RowReader<T>& reader, const T* x, F shift, int64_t ahead) {
  constexpr int kWidth = Width<F>();
  F total = ExpOfAny(reader.Last(x) - shift);
  for (int64_t i = 0; i < reader.whole();) {
    const int64_t end = reader.whole() - i < kBlock ? reader.whole() : i + kBlock;
    F even = {}, odd = {};
    for (; i + kWidth < end; i += 2 * kWidth) {
      __builtin_prefetch(x + i + ahead);
      __builtin_prefetch(x + i + kWidth + ahead);
      even += ExpOfAny(Load(x + i) - shift);
      odd += ExpOfAny(Load(x + i + kWidth) - shift);
    }
    if (i < end) even += ExpOfAny(Load(x + i) - shift), i += kWidth;
    total += even + odd;
  }
  return total;
}

template <class T, class F>
inline F QuickSumExp(const RowReader<T>& reader, const T* x, F shift, int64_t ahead) {
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
  // Up to here a logit less the shift is rounded no more than one less the row's maximum usually is.
  constexpr A kTrusted = A(1 << 30);
  const EmissionShape& shape = args.shape;
  const int64_t n = shape.classes < kWidth ? kWidth : shape.classes;
  const int64_t ahead = n * kWidth <= 4 * kBlock ? kWidth * n : 2 * kBlock;
  const RowReader<T> reader(n);

  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    typename S::Exponent labels[kWidth];
    cursor.template Next<A>(count, labels, [](int64_t, int, int) {});
    const auto label = Load(labels);
    const T* x = static_cast<const T*>(args.logits) + r * shape.classes;
    T padded[kWidth * kWidth];
    if (shape.classes < kWidth) {
      PadRows(x, shape.classes, labels, padded);
      x = padded;
    }

    // log-sum-exp of each row is shift + log(sum); the largest logit is -inf where the sum is 0. Outside rows: 0, 0.
    F shift = {}, sum = {}, max = {};
    if (!shape.normalize) {
      sum = label == kOutside ? F{} : Broadcast(A(1));
    } else {
      A shifts[kWidth] = {}, sums[kWidth];
      F part[kWidth];
      for (int lane = 0; lane < kWidth; ++lane) {
        const T* const row = x + lane * n;
        part[lane] = F{};
        if (labels[lane] == kOutside) continue;
        const F row_shift = LoadAll(row + shape.blanks[0]);
        shifts[lane] = row_shift[0];
        part[lane] = QuickSumExp(reader, row, row_shift, ahead);
      }
      shift = Load(shifts);
      sum = ReduceRows(part, [](F a, F b) { return a + b; });
      const auto redo = !(sum <= kTrusted);
      if (MaxOfLanes(redo ? Broadcast(A(1)) : F{}) > 0) {
        A maxima[kWidth];
        Store(sum, sums);
        Store(shift, maxima);
        for (int lane = 0; lane < kWidth; ++lane) {
          if (sums[lane] <= kTrusted) continue;
          const auto safe = SafeSumExp(reader, x + lane * n);
          maxima[lane] = safe.max;
          sums[lane] = safe.sum;
        }
        sum = Load(sums);
        max = Load(maxima);
        shift = Shift(max);
      }
    }

    const auto log_sum = Log(sum);
    const auto dead = sum == A(0);
    const auto log_prob = [&](F x) {
      const F y = x - shift - log_sum.high - log_sum.low;
      const F capped = shape.normalize ? Min(Broadcast(A(0)), y) : y == kInfinity<A> ? Broadcast(kNaN<A>) : y;
      return (dead & (x == x)) ? Broadcast(-kInfinity<A>) : capped;
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
    StoreLanes(dead ? max : Sum(shift, log_sum), static_cast<A*>(args.lse) + r, count);
  }
}

// dx[k] = f(x[k]) for the n >= kWidth elements of a row; dx may be x. The last vector ends with the row and may overlap
// the one before, so each is read before the one before it is written. In long rows the second vector begins where dx
// is aligned; rows of up to four vectors have no loop.
template <int kVectors, class T, class Function>
inline void MapShortRow(const T* x, int64_t n, T* dx, Function f) {
  constexpr int kWidth = Simd<Accumulator<T>>::kWidth;
  const auto begin = [n](int i) { return i + 1 < kVectors ? i * kWidth : n - kWidth; };
  typename Simd<Accumulator<T>>::F v[kVectors];
  for (int i = 0; i < kVectors; ++i) v[i] = f(Load(x + begin(i)));
  for (int i = 0; i < kVectors; ++i) Store(v[i], dx + begin(i));
}

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

template <class T, class Function>
inline void MapRow(const T* x, int64_t n, T* dx, int64_t ahead, Function f) {
  switch ((n - 1) / Simd<Accumulator<T>>::kWidth) {
    case 0:
      return MapShortRow<1>(x, n, dx, f);
    case 1:
      return MapShortRow<2>(x, n, dx, f);
    case 2:
      return MapShortRow<3>(x, n, dx, f);
    case 3:
      return MapShortRow<4>(x, n, dx, f);
  }
  return MapLongRow(x, n, dx, ahead, f);
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
  const bool stream = n * int64_t(sizeof(T)) >= kStreamedBytes;

  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    typename S::Exponent labels[kWidth];
    A scales[kWidth] = {}, limits[kWidth] = {};
    cursor.template Next<A>(count, labels, [&](int64_t sequence, int first, int last) {
      const A scale = static_cast<const A*>(args.scale)[sequence];
      const A clamp = static_cast<const A*>(args.clamp)[sequence];
      for (int lane = first; lane < last; ++lane) {
        scales[lane] = scale;
        limits[lane] = clamp > 0 ? clamp : kInfinity<A>;
      }
    });
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

    A lses[kWidth], minus_sums[kWidth], factors[kWidth];
    Store(lse, lses);
    Store(-sum, minus_sums);
    Store(-sum * scale, factors);
    T arc_dx[kMaxBlanks + 1][kWidth];  // logits of the classes with arcs, before they are overwritten; then gradients
    for (int arc = 0; arc <= num_blanks; ++arc) Store(F{}, arc_dx[arc]);
    for (int lane = 0; lane < count; ++lane) {
      const T* const row = x + lane * n;
      T* const row_dx = dx + lane * n;
      if (labels[lane] == kOutside) {
        if (!stream) {
          FillRow(F{}, n, row_dx);
          continue;
        }
        int last = lane;
        while (last + 1 < count && labels[last + 1] == kOutside) ++last;
        StreamZeros(row_dx, (last + 1 - lane) * n);
        lane = last;
        continue;
      }
      for (int arc = 0; arc < num_blanks; ++arc) arc_dx[arc][lane] = row[shape.blanks[arc]];
      if (0 <= labels[lane] && labels[lane] < shape.classes) arc_dx[num_blanks][lane] = row[labels[lane]];
      const F row_lse = Broadcast(lses[lane]), minus_sum = Broadcast(minus_sums[lane]), scale = Broadcast(scales[lane]);
      const F limit = Broadcast(limits[lane]), factor = Broadcast(factors[lane]);
      if (!shape.normalize) {
        FillRow(clip(minus_sum == minus_sum ? F{} : minus_sum, limit) * scale, n, row_dx);
      } else if (limits[lane] == kInfinity<A>) {
        MapRow(row, n, row_dx, ahead, [&](F v) { return Exp(v - row_lse) * factor; });
      } else {
        MapRow(row, n, row_dx, ahead, [&](F v) { return clip(Exp(v - row_lse) * minus_sum, limit) * scale; });
      }
    }

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
      // Of any: lanes without this arc hold no logit of their row.
      const F softmax = shape.normalize ? ExpOfAny(Load(arc_dx[arc]) - lse) : F{};
      Store(clip(arc_ct - softmax * sum, limit) * scale, arc_dx[arc]);
      if (arc == num_blanks) break;
      for (int lane = 0; lane < count; ++lane) {
        if (labels[lane] != kOutside) dx[lane * n + shape.blanks[arc]] = arc_dx[arc][lane];
      }
    }
    for (int lane = 0; lane < count; ++lane) {
      if (0 <= labels[lane] && labels[lane] < shape.classes) dx[lane * n + labels[lane]] = arc_dx[num_blanks][lane];
    }
    if (shape.classes < kWidth) {
      T* const to = static_cast<T*>(args.dlogits) + r * shape.classes;
      for (int lane = 0; lane < count; ++lane) {
        for (int64_t k = 0; k < shape.classes; ++k) to[lane * shape.classes + k] = padded[lane * kWidth + k];
      }
    }
  }
  if (stream) Fence();
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
