// Logits -> log-probabilities of the arcs: the kernels of softmax_emission.cu.
#pragma once

#include "xla_kernels/cuda/tiny_rows.cuh"

namespace jax_rnnt::cuda {
namespace {

template <class A>
struct ForwardPointers {
  const void* logits;
  const int32_t *label, *num_frames;
  A* log_arc[kMaxBlanks + 1];  // K blanks, then the label
  A* log_duration[kMaxDurations];
  A* norm;
};

// norm of shape.h. `anchor`: the logit of the anchor, -inf if there is none.
template <class A>
__device__ __forceinline__ A Normalizer(const LogSumExp<A>& total, A anchor, A log_sum) {
  if (total.sum != total.sum) return total.sum;
  const A below = total.max - anchor;
  if (below <= kReach<A>) return total.sum * Exp(below) * kSumScale<A>;
  const A lse = total.max + log_sum;
  return total.sum == 0 ? A(0) : Abs(lse) < kTiny<A> ? -kTiny<A> : lse;
}

// NaN for x = +inf and NaN.
template <class A>
__device__ __forceinline__ A LogSigmoid(A x) {
  const A e = Exp(x > 0 ? -x : x), w = 1 + e;
  const A log1p = Log(w) - ((w - 1) - e) / w;  // corrects the rounding of w
  return x == kInfinity<A> ? NaN<A>() : (x > 0 ? A(0) : x) - log1p;
}

// log(total.sum); 0 for a sum of 0: all logits are -inf then, and stay so below.
template <class A>
__device__ __forceinline__ A LogOfSum(const LogSumExp<A>& total) {
  return Log(total.sum == 0 ? A(1) : total.sum);
}

// Log-probabilities of classes. Rounding must not make a probability exceed 1; +inf that is not normalised is NaN.
template <class A>
struct LogProbability {
  __device__ __forceinline__ explicit LogProbability(bool normalize)
      : most(normalize ? A(0) : -kLowest<A>), instead(normalize ? A(0) : NaN<A>()) {}
  __device__ __forceinline__ A operator()(A logit, const LogSumExp<A>& total, A log_sum) const {
    const A y = logit - total.max - log_sum;
    return y > most ? instead : y;
  }
  A most, instead;
};

// Writes the planes at a row inside the lengths. logit_blank, logit_label: of the first blank and of the label.
template <class T, class ShapeType, class A>
__device__ __forceinline__ void WriteRow(const ShapeType& shape, const ForwardPointers<A>& args, const Row& row,
                                         const T* x, const LogSumExp<A>& total, A logit_blank, A logit_label) {
  LogSumExp<A> of_durations;
  of_durations.max = 0;
  of_durations.sum = 1;
  if (shape.durations > 0 && shape.normalize) of_durations = SumDurations(x + shape.classes, shape.durations);
  A poison = total.sum - total.sum;  // one NaN makes all NaN
  if (shape.durations > 0) poison += of_durations.sum - of_durations.sum;
  A log_blank = 0, log_not_blank = 0;  // those of a Bernoulli blank
  if (shape.bernoulli) {
    poison += logit_blank < kInfinity<A> ? A(0) : NaN<A>();
    log_blank = LogSigmoid(logit_blank);
    if (logit_blank != -kInfinity<A>) log_not_blank = LogSigmoid(-logit_blank);
  }
  const A log_sum = LogOfSum(total);
  const LogProbability<A> log_probability(shape.normalize);
  const auto of_class = [&](int k, A logit) {
    if (shape.bernoulli && k == shape.blanks[0]) return log_blank + poison;
    const A y = log_probability(logit, total, log_sum);
    return (shape.bernoulli ? y + log_not_blank : y) + poison;
  };
  args.log_arc[0][row.index] = of_class(shape.blanks[0], logit_blank);
  for (int i = 1; i < shape.num_blanks; ++i) {
    args.log_arc[i][row.index] = of_class(shape.blanks[i], Widen(x[shape.blanks[i]]));
  }
  args.log_arc[shape.num_blanks][row.index] = unsigned(row.label) < unsigned(shape.classes)
                                                  ? of_class(row.label, logit_label)
                                                  : (row.label == kNoLabel ? -kInfinity<A> : NaN<A>()) + poison;
  if (shape.durations > 0) {
    const A log_duration_sum = LogOfSum(of_durations);
    for (int i = 0; i < shape.durations; ++i) {
      const A logit = Widen(x[shape.classes + i]);
      args.log_duration[i][row.index] = log_probability(logit, of_durations, log_duration_sum) + poison;
    }
  }
  A norm = 0;
  if (shape.normalize) {
    A anchor = logit_blank;
    if (shape.bernoulli) anchor = shape.anchor < shape.classes ? Widen(x[shape.anchor]) : -kInfinity<A>;
    norm = Normalizer(total, anchor, log_sum);
  }
  args.norm[row.index] = norm;
}

template <class ShapeType, class A>
__device__ __forceinline__ void WriteOutside(const ShapeType& shape, const ForwardPointers<A>& args, int64_t index) {
  for (int arc = 0; arc <= shape.num_blanks; ++arc) args.log_arc[arc][index] = -kInfinity<A>;
  for (int i = 0; i < shape.durations; ++i) args.log_duration[i][index] = -kInfinity<A>;
  args.norm[index] = 0;
}

// Grid: (teams of a sequence, sequences).
template <class T, int kLanes>
__global__ void __launch_bounds__(kBlock<kLanes>, kBlocks<T, kLanes>)
    ForwardKernel(const __grid_constant__ Shape shape, const __grid_constant__ ForwardPointers<Accumulator<T>> args) {
  JAX_RNNT_AT_MOST(kBlock<kLanes>);
  using A = Accumulator<T>;
  const Team<kLanes> team(shape.passes);
  if (team.first >= shape.rows()) return;
  const T* const logits = static_cast<const T*>(args.logits);
  const int row_size = shape.row_size();
  for (int b = int(blockIdx.y); b < shape.batch; b += int(gridDim.y)) {
    const Row row = OwnRow(team, shape, args.label, args.num_frames, b);
    const T* const team_x = Pinned(logits + (int64_t(b) * shape.rows() + team.first) * row_size);
    const T* const row_x = team_x + unsigned(team.group * shape.passes + team.in_warp) * unsigned(row_size);
    const unsigned inside = __ballot_sync(kAll, row.label != kOutside);
    const int64_t last = int64_t(shape.batch) * shape.rows() - 1;
    const bool at_edge = __any_sync(kAll, row.index == last || (row.index == 0 && Misaligned(logits) != 0));
    // Loaded now, for WriteRow.
    A logit_blank = 0, logit_label = 0;
    if (row.label != kOutside) {
      logit_blank = Widen(row_x[shape.blanks[0]]);
      if (unsigned(row.label) < unsigned(shape.classes)) logit_label = Widen(row_x[row.label]);
    }
    LogSumExp<A> total;
    total.max = 0;
    total.sum = 1;
    if (shape.normalize && inside != 0) {
      const int skip = shape.bernoulli ? shape.blanks[0] : -1;
      const unsigned mine = inside >> team.Owner(0);
      // From the first row of the team, less than kTeamBytes or 0: of this group's rows; of a row inside the lengths,
      // which a group reads in place of a row outside, without traffic.
      int at = team.group * shape.passes * row_size;
      const int first = __ffs(int(inside)) - 1;
      const int other = (first / team.kInWarp * shape.passes + first % team.kInWarp) * row_size;
      BinarySum<A> sums;
      for (int pass = 0; pass < shape.passes; ++pass, at += row_size) {
        const T* const x = Pinned(team_x + ((mine >> pass & 1) != 0 ? at : other));
        const BinarySum<A> sum = SumRow<T, kLanes>(x, shape.classes, at_edge, skip, team.lane);
        if (team.Owns(pass)) sums = sum;
      }
      total = sums.Natural();
      const unsigned again = __ballot_sync(kAll, row.label != kOutside && !sums.Valid());
      for (int pass = 0; again != 0 && pass < shape.passes; ++pass) {
        if ((again & team.Owners(pass)) == 0) continue;
        const int n = (again >> team.Owner(pass) & 1) != 0 ? shape.classes : 0;
        const T* const x = team_x + (team.group * shape.passes + pass) * row_size;
        const LogSumExp<A> sum = SumSlowly<T, kLanes>(x, n, skip, team.lane);
        if (team.Owns(pass) && n != 0) total = sum;
      }
    }
    if (!row.exists || !team.writes()) continue;
    if (row.label == kOutside) {
      WriteOutside(shape, args, row.index);
    } else {
      WriteRow<T>(shape, args, row, row_x, total, logit_blank, logit_label);
    }
  }
}

// The same for tiny rows, one to a lane.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kBlock<1>, kBlocks<T, 1>)
    TinyForwardKernel(const __grid_constant__ TinyShape shape,
                      const __grid_constant__ ForwardPointers<Accumulator<T>> args) {
  JAX_RNNT_AT_MOST(kBlock<1>);
  using A = Accumulator<T>;
  JAX_RNNT_DYNAMIC_SHARED(Words, shared);
  const Team<1> team(1);
  if (team.first >= shape.rows()) return;
  const unsigned lane = threadIdx.x % 32, n = unsigned(shape.classes);
  const int b = shape.first_sequence + int(blockIdx.y);
  const Row row = OwnRow(team, shape, args.label, args.num_frames, b);
  const unsigned inside = __ballot_sync(kAll, row.label != kOutside);
  const T* const x =
      Pinned(static_cast<const T*>(args.logits) + (int64_t(b) * shape.rows() + team.first) * shape.classes);
  const TinyRows<T, kWhole> rows(shape, shared + threadIdx.x / 32 * shape.vectors, x,
                                 min(32u, shape.rows() - team.first) * n, lane);
  rows.Read(x, inside);
  if (row.label == kOutside) {
    if (row.exists) WriteOutside(shape, args, row.index);
    return;
  }
  const T* const mine = rows.Mine();
  const BinarySum<A> sum = SumTinyRow<kWhole>(mine, n);
  const LogSumExp<A> total = sum.Valid() ? sum.Natural() : SumSlowly<T, 1>(mine, int(n), -1, 0);
  const A logit_blank = Widen(mine[shape.blanks[0]]);
  const A logit_label = Widen(mine[unsigned(row.label) < n ? row.label : 0]);
  WriteRow<T>(shape, args, row, mine, total, logit_blank, logit_label);
}

}  // namespace
}  // namespace jax_rnnt::cuda
