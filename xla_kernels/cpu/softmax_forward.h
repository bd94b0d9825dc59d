// Logits -> log-probabilities of the arcs, a group of rows at a time; softmax_emission.cc explains it.
#pragma once

#include "xla_kernels/cpu/softmax_rows.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

// shift + log_sum, rounded once.
template <class F>
inline F Sum(F shift, SplitLog<F> log_sum) {
  const F sum = shift + log_sum.high, part = sum - shift;
  return sum + (((shift - (sum - part)) + (log_sum.high - part)) + log_sum.low);
}

// norm of common/shape.h, for rows whose log-sum-exp is shift + log(sum).
template <class F>
inline F Norm(F anchor, F shift, F sum) {
  using A = std::decay_t<decltype(anchor[0])>;
  constexpr A tiny = kTiny<A>;
  const F reach = shift - anchor, lse = Sum(shift, Log(sum));
  const F apart = ((lse < tiny) & (lse > -tiny)) ? Broadcast(-tiny) : lse;
  const auto none = sum == A(0);
  return (~none & (reach <= kReach<A>)) ? sum * ExpOfAny(reach) * kSumScale<A> : none ? F{} : apart;
}

// Sum of exp(x - shift) of a row, in lanes. Rows of up to four vectors need no loop. Long rows are summed in blocks, so
// that no element is added to a sum of very many.
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
    while (i + kWidth < end) {
      for (const int64_t stop = reader.EndWithout(i, end); i + kWidth < stop; i += 2 * kWidth) {
        __builtin_prefetch(x + i + ahead);
        __builtin_prefetch(x + i + kWidth + ahead);
        even += ExpOfAny(Load(x + i) - shift);
        odd += ExpOfAny(Load(x + i + kWidth) - shift);
      }
      if (!kSkip || i + kWidth >= end) break;
      even += ExpOfAny(reader.At(x, i) - shift);
      odd += ExpOfAny(reader.At(x, i + kWidth) - shift);
      i += 2 * kWidth;
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

template <class T, bool kBernoulli>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  constexpr int kWidth = S::kWidth;
  // Up to this sum, subtracting the shift rounds logits no more than subtracting the maximum usually does.
  constexpr A kTrusted = A(1 << 30);
  const EmissionShape& shape = args.shape;
  const bool padding = shape.classes < kWidth;
  const int64_t n = padding ? kWidth : shape.classes, row_size = shape.row_size();
  const int64_t stride = padding ? kWidth : row_size;  // between the rows that are summed
  const int64_t ahead = n * kWidth <= 4 * kBlock ? kWidth * n : 2 * kBlock;
  const int64_t blank = shape.blanks[0], anchor = Anchor(shape);  // the class that is the shift
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

    // The log-sum-exp of a row is shift + log(sum). Rows outside the lengths have 0 for both.
    F shift = {}, sum = {}, first = {}, norm = {};
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
      norm = sum * kSumScale<A>;
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
        shift = Shift(Load(maxima));
        norm = outside ? F{} : Norm(first, shift, sum);
      }
    }

    // A NaN in one head makes both NaN.
    F poison = sum - sum;
    const auto log_prob = [&](F x, F shift, F sum, SplitLog<F> log_sum) {
      const F y = x - shift - log_sum.high - log_sum.low;
      const F capped = shape.normalize ? Min(Broadcast(A(0)), y) : y == kInfinity<A> ? Broadcast(kNaN<A>) : y;
      return (((sum == A(0)) & (x == x)) ? Broadcast(-kInfinity<A>) : capped) + poison;
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
    const auto of_class = [&](I k) {  // the logit of class k, 0 if there is none
      const auto known = ~outside & (k >= 0) & (k < Exponent(shape.classes));
      using Unsigned = typename S::Unsigned;  // a label of any size may wrap
      const I place = (I)((Unsigned)(lane_number * Exponent(row_size)) + (Unsigned)k);
      return known ? Pick(logits, known ? place : I{}) : F{};
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
    StoreLanes(norm, static_cast<A*>(args.norm) + r, count);
  }
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
