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
[[gnu::always_inline]] inline F ShortSumExp(const RowReader<T, kSkip>& reader, const T* x, F shift) {
  F sum = ExpOfAny(reader.Last(x) - shift);
  for (int i = 0; i < kWhole; ++i) sum += ExpOfAny(reader.At(x, i * Width<F>()) - shift);
  return sum;
}

template <class T, bool kSkip, class F>
[[gnu::always_inline]] inline F LongSumExp(const RowReader<T, kSkip>& reader, const T* x, F shift, int64_t ahead) {
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
[[gnu::always_inline]] inline F QuickSumExp(const RowReader<T, kSkip>& reader, const T* x, F shift, int64_t ahead) {
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

// A forward pass over rows of a call. The functions below Run take one group after the other through its steps; they
// are inlined, so that what one of them leaves to the next stays in registers.
template <class T, bool kBernoulli>
class ForwardPass {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  static constexpr int kWidth = S::kWidth;
  // Up to this sum, subtracting the shift rounds logits no more than subtracting the maximum usually does.
  static constexpr A kTrusted = A(1 << 30);

 public:
  [[gnu::always_inline]] ForwardPass(const EmissionForwardArgs& args, RowBuffers<T>& buffers)
      : args_(args),
        shape_(args.shape),
        group_(args.shape, buffers),
        reader_(group_.n, group_.is_padded ? -1 : shape_.blanks[0]),
        ahead_(group_.n * kWidth <= 4 * kBlock ? kWidth * group_.n : 2 * kBlock) {}

  [[gnu::always_inline]] void Run(int64_t begin, int64_t end) {
    if (begin >= end) return;  // there may be no columns
    RowCursor cursor(shape_, args_.label, args_.num_frames, begin);
    for (int64_t r = begin; r < end; r += kWidth) {
      group_.r = r;
      group_.count = end - r < kWidth ? end - r : kWidth;
      cursor.template Next<A>(group_.count, group_.buffers.labels, [](int64_t, int, int) {});
      label_ = Load(group_.buffers.labels);
      outside_ = (I)(label_ == kOutside);
      group_.template Begin<kBernoulli>(args_.logits, shape_.blanks[0]);
      shape_.normalize ? SumRows() : LeaveRows();
      WriteDurations();
      WriteArcs();
    }
  }

 private:
  // Log-probabilities are taken as they are: their log-sum-exp is 0.
  [[gnu::always_inline]] void LeaveRows() {
    anchor_ = shift_ = norm_ = F{};
    sum_ = outside_ ? F{} : Broadcast(A(1));
    for (int lane = 0; group_.has_ends && lane < kWidth; ++lane) {
      if (!group_.IsOutside(lane)) group_.ReadEnd(lane);
    }
  }

  // The log-sum-exp of a row is shift + log(sum). Rows outside the lengths have 0 for both.
  [[gnu::always_inline]] void SumRows() {
    A shifts[kWidth] = {};
    F part[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
      const T* const row = group_.x + lane * group_.stride;
      part[lane] = F{};
      if (group_.IsOutside(lane)) continue;
      const F row_shift = LoadAll(row + group_.anchor);
      shifts[lane] = row_shift[0];
      part[lane] = QuickSumExp(reader_, row, row_shift, ahead_);
      group_.ReadEnd(lane);
    }
    anchor_ = shift_ = Load(shifts);
    sum_ = ReduceRows(part, [](F a, F b) { return a + b; });
    norm_ = sum_ * kSumScale<A>;
    if (Any(~(sum_ <= kTrusted))) SumAgain();
  }

  // Sums the rows whose sum is not to be trusted, with their maximum as the shift.
  [[gnu::always_inline]] void SumAgain() {
    const RowReader<T, kBernoulli> reader = reader_;  // whose address may leave this function, unlike that of the pass
    A maxima[kWidth], sums[kWidth];
    Store(sum_, sums);
    Store(shift_, maxima);
    for (int lane = 0; lane < kWidth; ++lane) {
      if (sums[lane] <= kTrusted) continue;
      const auto safe = SafeSumExp(reader, group_.x + lane * group_.stride);
      maxima[lane] = safe.max;
      sums[lane] = safe.sum;
    }
    sum_ = Load(sums);
    shift_ = Shift(Load(maxima));
    norm_ = outside_ ? F{} : Norm(anchor_, shift_, sum_);
  }

  [[gnu::always_inline]] F LogProbability(F logit, F shift, F sum, SplitLog<F> log_sum) const {
    const F y = logit - shift - log_sum.high - log_sum.low;
    const F capped = shape_.normalize ? Min(Broadcast(A(0)), y) : y == kInfinity<A> ? Broadcast(kNaN<A>) : y;
    return (((sum == A(0)) & (logit == logit)) ? Broadcast(-kInfinity<A>) : capped) + poison_;
  }

  [[gnu::always_inline]] void StorePlane(F v, void* plane) const {
    StoreLanes(v, static_cast<A*>(plane) + group_.r, group_.count);
  }

  [[gnu::always_inline]] void WriteDurations() {
    poison_ = sum_ - sum_;  // a NaN in one head makes both NaN
    const int n = shape_.durations;
    if (n == 0) return;
    const DurationHead<T> head(group_.logits, group_.row_size, group_.buffers.labels, group_.buffers.ends, n,
                               shape_.normalize);
    const SplitLog<F> log_sum = Log(head.sum());
    poison_ += outside_ ? F{} : head.sum() - head.sum();
    for (int i = 0; i < n; ++i) {
      const F y = LogProbability(head.logit(i), head.shift(), head.sum(), log_sum);
      StorePlane(outside_ ? Broadcast(-kInfinity<A>) : y, args_.log_duration[i]);
    }
  }

  // The logits of classes k, 0 where there is none.
  [[gnu::always_inline]] F LogitOf(I k) const {
    using Unsigned = typename S::Unsigned;  // a label of any size may wrap
    const auto known = ~outside_ & (k >= 0) & (k < Exponent(shape_.classes));
    const I lane_number = LaneNumbers<A>(std::make_integer_sequence<int, kWidth>{});
    const I place = (I)((Unsigned)(lane_number * Exponent(group_.row_size)) + (Unsigned)k);
    return known ? Pick(group_.logits, known ? place : I{}) : F{};
  }

  [[gnu::always_inline]] void WriteArcs() {
    const Exponent blank = shape_.blanks[0];
    const SplitLog<F> log_sum = Log(sum_);
    const auto invalid = (label_ < kOutside) | (label_ >= Exponent(shape_.classes));
    const F picked = LogitOf(label_);
    const F logit = label_ == kNoLabel ? Broadcast(-kInfinity<A>) : invalid ? Broadcast(kNaN<A>) : picked;
    F log_label = LogProbability(logit, shift_, sum_, log_sum);
    if constexpr (kBernoulli) {
      const F z = LogitOf(I{} + blank), log_blank = outside_ ? Broadcast(-kInfinity<A>) : LogSigmoid(z);
      poison_ += outside_ ? F{} : log_blank == -kInfinity<A> ? F{} : log_blank - log_blank;
      const F other = z == -kInfinity<A> ? F{} : LogSigmoid(-z);
      log_label = (label_ == blank ? log_blank : log_label + other) + poison_;
      StorePlane(log_blank + poison_, args_.log_blank[0]);
    } else {
      for (int i = 0; i < shape_.num_blanks; ++i) {
        const bool is_anchor = shape_.normalize && shape_.blanks[i] == blank;
        const F z = is_anchor ? anchor_ : LogitOf(I{} + Exponent(shape_.blanks[i]));
        StorePlane(LogProbability(z, shift_, sum_, log_sum), args_.log_blank[i]);
      }
    }
    StorePlane(log_label, args_.log_label);
    StorePlane(norm_, args_.norm);
  }

  const EmissionForwardArgs& args_;
  const EmissionShape& shape_;
  RowGroup<T> group_;
  const RowReader<T, kBernoulli> reader_;
  const int64_t ahead_;  // elements from those that are read to those that are prefetched

  // Numbers of the rows of the group.
  I label_, outside_;
  F shift_, sum_, anchor_, norm_;  // anchor: the logit of that class
  F poison_;                       // 0, or NaN
};

template <class T, bool kBernoulli>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  RowBuffers<T> buffers;
  ForwardPass<T, kBernoulli>(args, buffers).Run(begin, end);
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
