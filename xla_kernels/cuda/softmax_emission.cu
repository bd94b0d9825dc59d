// Softmax emission: rows of V logits -> log-probabilities of the arcs, and cotangents of the arcs -> gradient of the
// logits. D durations may follow the V logits. They have a softmax of their own. A Bernoulli blank is left out of the
// sum.
//
// Forward reads every logit inside the lengths once, backward reads it once and writes its gradient once, over the same
// memory if asked to. Rows outside the lengths are not read, but for 16 bytes beside a row; backward writes zeros
// there. So memory should bound both passes, and does if a row takes few instructions: an H200 copies 4 bytes in the
// time in which a warp issues one. All of the scheme serves this (emission_rows.cuh has the threads and the sums):
//
// * A lane takes a row of up to 288 bytes forward and 128 backward, if it has one blank and no durations. Such rows
//   come through shared memory, since a lane that reads a row of its own would touch a cache line of its own
//   (tiny_rows.cuh).
// * A group of lanes takes any other row: 4 up to 1 KiB, a warp up to 64 KiB, a block above. Groups of a warp take
//   several rows each, one after the other.
// * Work that does not need a group is done for 32 rows side by side, one by each lane: lengths, label, cotangents and
//   norm before the rows, logarithms and planes after them.
// * Accesses are 16 bytes wide for any V and any alignment, all of a step issued before the first is used. Forward cuts
//   the vectors of misaligned rows out of three aligned accesses of 8 bytes, since the assignment of elements to lanes
//   must not depend on the address. Backward has no sums, so it begins at the first boundary.
// * Forward keeps a running maximum and a running sum per lane, rescaled once per step, so it needs no second read. See
//   BinarySum.
// * Backward treats all classes alike. Then it corrects those of the arcs, whose gradients were found before any logit
//   was overwritten. docs/notes/emission.md has what was tried.
//
// Offsets have 64 bits from the beginning, 32 bits inside the rows of a sequence (T * U1 < 2^31) and inside a row.
#include "xla_kernels/cuda/softmax_emission.h"

#include "xla_kernels/cuda/emission_rows.cuh"
#include "xla_kernels/cuda/tiny_rows.cuh"

namespace jax_rnnt::cuda {
namespace {

// ---- forward ----

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
__device__ __forceinline__ void WriteRow(const ShapeType& shape, const ForwardPointers<A>& args, const Row& own,
                                         const T* x, const LogSumExp<A>& total, A logit_blank, A logit_label) {
  LogSumExp<A> of_durations;
  of_durations.max = 0;
  of_durations.sum = 1;
  if (shape.durations > 0 && shape.normalize) of_durations = SumDurations(x + shape.classes, shape.durations);
  A poison = total.sum - total.sum;  // one NaN makes all NaN
  if (shape.durations > 0) poison += of_durations.sum - of_durations.sum;
  A log_blank = 0, log_not_blank = 0;  // of a Bernoulli blank
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
  args.log_arc[0][own.index] = of_class(shape.blanks[0], logit_blank);
  for (int i = 1; i < shape.num_blanks; ++i) {
    args.log_arc[i][own.index] = of_class(shape.blanks[i], Widen(x[shape.blanks[i]]));
  }
  args.log_arc[shape.num_blanks][own.index] = unsigned(own.label) < unsigned(shape.classes)
                                                  ? of_class(own.label, logit_label)
                                                  : (own.label == kNoLabel ? -kInfinity<A> : NaN<A>()) + poison;
  if (shape.durations > 0) {
    const A log_duration_sum = LogOfSum(of_durations);
    for (int i = 0; i < shape.durations; ++i) {
      const A logit = Widen(x[shape.classes + i]);
      args.log_duration[i][own.index] = log_probability(logit, of_durations, log_duration_sum) + poison;
    }
  }
  A norm = 0;
  if (shape.normalize) {
    A anchor = logit_blank;
    if (shape.bernoulli) anchor = shape.anchor < shape.classes ? Widen(x[shape.anchor]) : -kInfinity<A>;
    norm = Normalizer(total, anchor, log_sum);
  }
  args.norm[own.index] = norm;
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
  using A = Accumulator<T>;
  const Team<kLanes> team(shape.passes);
  if (team.first >= shape.rows()) return;
  const T* const logits = static_cast<const T*>(args.logits);
  const int row_size = shape.row_size();
  for (int b = int(blockIdx.y); b < shape.batch; b += int(gridDim.y)) {
    const Row own = OwnRow(team, shape, args.label, args.num_frames, b);
    const T* const team_x = Pinned(logits + (int64_t(b) * shape.rows() + team.first) * row_size);
    const T* const own_x = team_x + unsigned(team.group * shape.passes + team.in_warp) * unsigned(row_size);
    const unsigned inside = __ballot_sync(kAll, own.label != kOutside);
    const int64_t last = int64_t(shape.batch) * shape.rows() - 1;
    const bool at_edge = __any_sync(kAll, own.index == last || (own.index == 0 && Misaligned(logits) != 0));
    // Loaded now, for WriteRow.
    A logit_blank = 0, logit_label = 0;
    if (own.label != kOutside) {
      logit_blank = Widen(own_x[shape.blanks[0]]);
      if (unsigned(own.label) < unsigned(shape.classes)) logit_label = Widen(own_x[own.label]);
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
      const unsigned again = __ballot_sync(kAll, own.label != kOutside && !sums.Valid());
      for (int pass = 0; again != 0 && pass < shape.passes; ++pass) {
        if ((again & team.Owners(pass)) == 0) continue;
        const int n = (again >> team.Owner(pass) & 1) != 0 ? shape.classes : 0;
        const T* const x = team_x + (team.group * shape.passes + pass) * row_size;
        const LogSumExp<A> sum = SumSlowly<T, kLanes>(x, n, skip, team.lane);
        if (team.Owns(pass) && n != 0) total = sum;
      }
    }
    if (!own.exists || !team.writes()) continue;
    if (own.label == kOutside) {
      WriteOutside(shape, args, own.index);
    } else {
      WriteRow<T>(shape, args, own, own_x, total, logit_blank, logit_label);
    }
  }
}

// The same for tiny rows, one to a lane.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kBlock<1>, kBlocks<T, 1>)
    TinyForwardKernel(const __grid_constant__ TinyShape shape,
                      const __grid_constant__ ForwardPointers<Accumulator<T>> args) {
  using A = Accumulator<T>;
  JAX_RNNT_DYNAMIC_SHARED(Words, shared);
  const Team<1> team(1);
  if (team.first >= shape.rows()) return;
  const unsigned lane = threadIdx.x % 32, n = unsigned(shape.classes);
  const int b = shape.first_sequence + int(blockIdx.y);
  const Row own = OwnRow(team, shape, args.label, args.num_frames, b);
  const unsigned inside = __ballot_sync(kAll, own.label != kOutside);
  const T* const x =
      Pinned(static_cast<const T*>(args.logits) + (int64_t(b) * shape.rows() + team.first) * shape.classes);
  const TinyRows<T, kWhole> rows(shape, shared + threadIdx.x / 32 * shape.vectors, x,
                                 min(32u, shape.rows() - team.first) * n, lane);
  rows.Read(x, inside);
  if (own.label == kOutside) {
    if (own.exists) WriteOutside(shape, args, own.index);
    return;
  }
  const T* const mine = rows.Mine();
  const BinarySum<A> sum = SumTinyRow<kWhole>(mine, n);
  const LogSumExp<A> total = sum.Valid() ? sum.Natural() : SumSlowly<T, 1>(mine, int(n), -1, 0);
  const A logit_blank = Widen(mine[shape.blanks[0]]);
  const A logit_label = Widen(mine[unsigned(own.label) < n ? own.label : 0]);
  WriteRow<T>(shape, args, own, mine, total, logit_blank, logit_label);
}

// ---- backward ----

template <class A>
struct BackwardPointers {
  const void* logits;
  void* dlogits;
  const int32_t *label, *num_frames;
  const A* ct_arc[kMaxBlanks + 1];  // K blanks, then the label
  const A* ct_duration[kMaxDurations];
  const A *norm, *scale, *clamp;
};

template <class A>
__device__ __forceinline__ A Sigmoid(A x) {
  const A e = Exp(x > 0 ? -x : x);
  return (x > 0 ? A(1) : e) / (1 + e);
}

// From a gradient per unit of loss to the one that is written. 0 stays 0 at any scale.
template <class A>
struct Finish {
  __device__ __forceinline__ A operator()(A v) const {
    v = Clip(v, limit);
    return v == 0 ? v : v * scale;
  }
  A scale, limit;
};

// The softmax of a row, times minus the sum of its cotangents: exp(x - anchor) * factor. A row that is not used, or not
// normalised, is not read: it has anchor 0, and 0 in place of its logits.
template <class A>
struct Softmax {
  __device__ __forceinline__ A operator()(A x) const { return Exp(x - anchor) * factor; }
  A anchor = 0, factor = 0;
};

// finish(softmax(x)) in fewer instructions: scale and clamp in one factor and one limit, and the exponential as in
// BinarySum. Works() tells whether the anchor and the factor allow it: 0 times an infinite scale would be NaN.
template <class A>
struct QuickGradient {
  __device__ __forceinline__ QuickGradient(const Softmax<A>& softmax, const Finish<A>& finish)
      : anchor(softmax.anchor),
        factor(softmax.factor * Exp2(-BinaryError(anchor)) * finish.scale),
        limit(finish.limit < kInfinity<A> ? finish.limit * Abs(finish.scale) : kInfinity<A>) {}
  __device__ __forceinline__ bool Works() const { return Abs(anchor) < A(1 << 20) && Abs(factor) < kInfinity<A>; }
  __device__ __forceinline__ A operator()(A x) const {
    return Clip(Exp2(Fma(x, kLog2E<A>, -Binary(anchor))) * factor, limit);
  }
  A anchor, factor, limit;
};

// What a lane knows about the row that it owns.
template <class A>
struct BackwardRow {
  bool used = false;   // whether a cotangent is not 0
  bool summed = true;  // whether norm held the sum
  Softmax<A> softmax;  // factor: not divided by the sum yet, unless `summed`
};

// If norm is lse, which is rare, the row will be summed once more, since a large lse is rounded too much.
template <class T, class A>
__device__ __forceinline__ BackwardRow<A> ReadRow(const Shape& shape, const BackwardPointers<A>& args, const Row& own,
                                                  const T* x) {
  BackwardRow<A> row;
  if (own.label == kOutside) return row;
  const A norm = args.norm[own.index];
  A sum = 0, last = 0;
  for (int arc = 0; arc <= shape.num_blanks; ++arc) {
    last = args.ct_arc[arc][own.index];
    sum += last;
    row.used |= last != 0;
  }
  for (int i = 0; i < shape.durations; ++i) row.used |= args.ct_duration[i][own.index] != 0;
  if (!row.used) return row;
  if (shape.bernoulli) sum = own.label == shape.blanks[0] ? last - last : last;  // 0, but NaN stays
  if (shape.normalize || sum != sum) row.softmax.factor = A(0) - sum;            // no -0
  if (!shape.normalize) return row;
  row.summed = norm > 0 && norm < kTiny<A>;
  if (!row.summed) return row;
  row.softmax.anchor = Widen(x[shape.anchor]);
  row.softmax.factor /= norm * (1 / kSumScale<A>);
  return row;
}

// Writes the gradient of the durations of a row.
template <class T, class A>
__device__ __forceinline__ void WriteDurations(const Shape& shape, const BackwardPointers<A>& args, int64_t index,
                                               bool used, const T* x, T* dx, const Finish<A>& finish) {
  x += shape.classes;
  dx += shape.classes;
  LogSumExp<A> total;
  A factor = 0;
  if (used && shape.normalize) {
    total = SumDurations(x, shape.durations);
    for (int i = 0; i < shape.durations; ++i) factor -= args.ct_duration[i][index];
    factor = total.sum == 0 ? A(0) : factor / total.sum;
  }
  for (int i = 0; i < shape.durations; ++i) {
    A v = 0;
    if (used) v = args.ct_duration[i][index];
    if (factor != 0) v += Exp(Widen(x[i]) - total.max) * factor;
    dx[i] = Narrow<T>(finish(v));
  }
}

// Arcs that a lane of a group may have to correct. A warp can correct the most arcs of an emission.
template <int kLanes>
constexpr int kArcsPerLane = kLanes > kMaxBlanks ? 1 : 2;

// The gradients of the classes that arcs have. Lanes of the group take one arc each, or two. They read the logits
// before any lane overwrites them, and write when all other gradients of the row are written.
template <class T, int kLanes>
class ArcGradients {
  using A = Accumulator<T>;

 public:
  __device__ __forceinline__ ArcGradients(const Shape& shape, const BackwardPointers<A>& args, int64_t index, int label,
                                          const T* x, const Softmax<A>& softmax, const Finish<A>& finish, int lane) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      class_[i] = -1;
      const int arc = lane + i * kLanes;
      if (arc > shape.num_blanks || label == kOutside) continue;
      const int k = arc < shape.num_blanks ? shape.blanks[arc] : label;
      if (unsigned(k) >= unsigned(shape.classes)) continue;
      class_[i] = k;
      const A v = Widen(x[k]), ct_label = args.ct_arc[shape.num_blanks][index];
      A ct = k == label ? ct_label : A(0);
      for (int j = 0; j < shape.num_blanks; ++j) {
        if (k != shape.blanks[j]) continue;
        ct += args.ct_arc[j][index];
        if (j < arc) class_[i] = -1;  // another lane has this class
      }
      if (shape.bernoulli && k == shape.blanks[0]) {
        ct = ct * Sigmoid(-v) - (k == label ? ct_label - ct_label : ct_label) * Sigmoid(v);
      } else {
        ct += softmax(shape.normalize ? v : A(0));
      }
      gradient_[i] = Narrow<T>(finish(ct));
    }
  }
  __device__ __forceinline__ void Write(T* dx) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (class_[i] >= 0) dx[class_[i]] = gradient_[i];
    }
  }

 private:
  static constexpr int kHeld = kArcsPerLane<kLanes>;
  int class_[kHeld];
  T gradient_[kHeld];
};

// Vectors first + lane, first + kLanes + lane ... of `count` of a row: kVectors at a time, then less.
template <unsigned kVectors, unsigned kLanes, bool kRead, class T, class Gradient>
__device__ __forceinline__ void MapVectors(const T* x, T* dx, unsigned first, unsigned count, unsigned lane,
                                           const Gradient& gradient) {
  constexpr unsigned kSize = kElements<T>;
  for (; first + (kVectors - 1) * kLanes < count; first += kVectors * kLanes) {
    const unsigned begin = (first + lane) * kSize;
    const bool last = first + (kVectors - 1) * kLanes + lane < count;  // whether this lane has a last vector
    Words v[kVectors] = {};
#pragma unroll
    for (unsigned j = 0; j < kVectors; ++j) {
      if (kRead && (j + 1 < kVectors || last)) v[j] = Load16(x + begin + j * kLanes * kSize);
    }
#pragma unroll
    for (unsigned j = 0; j < kVectors; ++j) {
      Accumulator<T> values[kSize];
#pragma unroll
      for (unsigned e = 0; e < kSize; ++e) values[e] = gradient(Element<T>(v[j], e));
      if (j + 1 < kVectors || last) Store16(dx + begin + j * kLanes * kSize, Pack<T>(values));
    }
  }
  if constexpr (kVectors > 1) MapVectors<kVectors / 2, kLanes, kRead>(x, dx, first, count, lane, gradient);
}

// dx = finish(softmax(x)) for a row of n elements; without kRead, x is not read and its place in the function is 0.
template <class T, int kLanes, bool kRead>
__device__ __forceinline__ void MapRow(const T* x, T* dx, unsigned n, unsigned lane,
                                       const Softmax<Accumulator<T>>& softmax, const Finish<Accumulator<T>>& finish) {
  using A = Accumulator<T>;
  constexpr unsigned kSize = kElements<T>;
  const QuickGradient<A> quick(softmax, finish);
  const bool works = quick.Works();
  // 16-byte accesses between the first and the last boundary; none if the rows are not aligned alike.
  unsigned head = 0, count = 0;
  if (works && Misaligned(x) == Misaligned(dx)) {
    head = min(n, (kSize - Misaligned(x)) % kSize);
    count = (n - head) / kSize;
  }
  MapVectors<kInFlight<T>, kLanes, kRead>(Pinned(x + head), Pinned(dx + head), 0, count, lane, quick);
  const auto rest = [&](auto gradient) {
#pragma unroll 1
    for (unsigned i = lane; i < n - count * kSize; i += kLanes) {
      const unsigned k = i < head ? i : i + count * kSize;
      dx[k] = Narrow<T>(gradient(kRead ? Widen(x[k]) : A(0)));
    }
  };
  if (works) {
    rest(quick);
  } else {
    rest([&](A v) { return finish(softmax(v)); });
  }
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kBlock<kLanes>, kBlocks<T, kLanes>)
    BackwardKernel(const __grid_constant__ Shape shape, const __grid_constant__ BackwardPointers<Accumulator<T>> args) {
  using A = Accumulator<T>;
  const Team<kLanes> team(shape.passes);
  if (team.first >= shape.rows()) return;
  const T* const logits = static_cast<const T*>(args.logits);
  T* const dlogits = static_cast<T*>(args.dlogits);
  const int row_size = shape.row_size();
  for (int b = int(blockIdx.y); b < shape.batch; b += int(gridDim.y)) {
    const Row own = OwnRow(team, shape, args.label, args.num_frames, b);
    const A clamp = args.clamp[b];
    const Finish<A> finish = {args.scale[b], clamp > 0 ? clamp : kInfinity<A>};
    const BackwardRow<A> row = ReadRow(shape, args, own, logits + own.index * row_size);
    const unsigned exist = __ballot_sync(kAll, own.exists), used = __ballot_sync(kAll, row.used);
    const unsigned unsummed = __ballot_sync(kAll, !row.summed);
    if (shape.durations > 0 && own.exists && team.writes()) {
      WriteDurations(shape, args, own.index, row.used, logits + own.index * row_size, dlogits + own.index * row_size,
                     finish);
    }
    int64_t index = int64_t(b) * shape.rows() + team.first + team.group * shape.passes;
    for (int pass = 0; pass < shape.passes; ++pass, ++index) {
      const int owner = team.Owner(pass);
      const bool is_used = (used >> owner & 1) != 0;
      const T* const x = Pinned(logits + index * row_size);
      T* const dx = Pinned(dlogits + index * row_size);
      Softmax<A> softmax;
      softmax.anchor = __shfl_sync(kAll, row.softmax.anchor, owner);
      softmax.factor = __shfl_sync(kAll, row.softmax.factor, owner);
      const int label = __shfl_sync(kAll, own.label, owner);
      if ((unsummed & team.Owners(pass)) != 0) {
        const bool sum = (unsummed >> owner & 1) != 0;
        const auto total =
            SumSlowly<T, kLanes>(x, sum ? shape.classes : 0, shape.bernoulli ? shape.blanks[0] : -1, team.lane);
        if (sum) {
          softmax.anchor = total.sum == 0 ? A(0) : total.max;
          softmax.factor /= total.sum == 0 ? A(1) : total.sum;
        }
      }
      ArcGradients<T, kLanes> arcs(shape, args, index, is_used ? label : kOutside, x, softmax, finish, team.lane);
      SyncTeam<kLanes>();
      if (is_used && shape.normalize) {
        MapRow<T, kLanes, true>(x, dx, shape.classes, team.lane, softmax, finish);
      } else if ((exist >> owner & 1) != 0) {
        MapRow<T, kLanes, false>(x, dx, shape.classes, team.lane, softmax, finish);
      }
      SyncTeam<kLanes>();
      arcs.Write(dx);
    }
  }
}

// The same for tiny rows, one to a lane. Logits and gradient lie alike with respect to 16 bytes.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kBlock<1>, kBlocks<T, 1>)
    TinyBackwardKernel(const __grid_constant__ TinyShape shape,
                       const __grid_constant__ BackwardPointers<Accumulator<T>> args) {
  using A = Accumulator<T>;
  JAX_RNNT_DYNAMIC_SHARED(Words, shared);
  const Team<1> team(1);
  if (team.first >= shape.rows()) return;
  const unsigned lane = threadIdx.x % 32, n = unsigned(shape.classes);
  const int b = shape.first_sequence + int(blockIdx.y);
  const A clamp = args.clamp[b];
  const Finish<A> finish = {args.scale[b], clamp > 0 ? clamp : kInfinity<A>};
  const Row own = OwnRow(team, shape, args.label, args.num_frames, b);
  A norm = 0, ct_blank = 0, ct_label = 0;
  if (own.exists) {  // at once, not behind the label
    norm = args.norm[own.index];
    ct_blank = args.ct_arc[0][own.index];
    ct_label = args.ct_arc[1][own.index];
  }
  const bool is_used = own.label != kOutside && (ct_blank != 0 || ct_label != 0);
  const int64_t first = (int64_t(b) * shape.rows() + team.first) * shape.classes;
  const T* const x = Pinned(static_cast<const T*>(args.logits) + first);
  const TinyRows<T, kWhole> rows(shape, shared + threadIdx.x / 32 * shape.vectors, x,
                                 min(32u, shape.rows() - team.first) * n, lane);
  rows.Read(x, __ballot_sync(kAll, is_used));
  if (own.exists) {
    T* const mine = rows.Mine();
    const unsigned blank = unsigned(shape.blanks[0]), label = unsigned(own.label);
    Softmax<A> softmax;
    A logit_blank = 0, logit_label = 0;
    if (is_used) {
      logit_blank = Widen(mine[blank]);
      logit_label = Widen(mine[label < n ? label : 0]);
      softmax.factor = A(0) - (ct_blank + ct_label);
      if (norm > 0 && norm < kTiny<A>) {
        softmax.anchor = logit_blank;
        softmax.factor /= norm * (1 / kSumScale<A>);
      } else {
        const LogSumExp<A> total = SumSlowly<T, 1>(mine, int(n), -1, 0);
        softmax.anchor = total.sum == 0 ? A(0) : total.max;
        softmax.factor /= total.sum == 0 ? A(1) : total.sum;
      }
    } else {
      for (unsigned i = 0; i < n; ++i) mine[i] = T{};
    }
    const QuickGradient<A> quick(softmax, finish);
    if (quick.Works()) {
      MapTinyRow<kWhole>(mine, n, quick);
    } else {
#pragma unroll 1
      for (unsigned i = 0; i < n; ++i) mine[i] = Narrow<T>(finish(softmax(Widen(mine[i]))));
    }
    if (is_used) {
      const bool same = blank == label;
      mine[blank] = Narrow<T>(finish(ct_blank + (same ? ct_label : A(0)) + softmax(logit_blank)));
      if (label < n && !same) mine[label] = Narrow<T>(finish(ct_label + softmax(logit_label)));
    }
  }
  rows.Write(static_cast<T*>(args.dlogits) + first);
}

// ---- launches ----

// Chooses the number of threads per row, and launches Kernel<T, kLanes>, or TinyKernel if rows have at most `most_tiny`
// bytes and are plain. Rows of many arcs need many lanes.
template <class T, template <class, int> class Kernel, template <class, bool> class TinyKernel, class Pointers>
cudaError_t LaunchRows(const EmissionShape& shape, const Pointers& pointers, int64_t most_tiny, cudaStream_t stream) {
  const int64_t rows = shape.frames * shape.columns, bytes = shape.row_size() * int64_t(sizeof(T));
  if (shape.batch * rows == 0) return cudaSuccess;
  if (rows > kMaxEmissionNodes || shape.batch > kMaxEmissionSequences) return cudaErrorInvalidValue;
  if (bytes <= most_tiny && shape.normalize && !shape.bernoulli && shape.durations == 0 && shape.num_blanks == 1 &&
      TinyShape::Fits(bytes, pointers.logits)) {
    constexpr int kRows = kBlock<1>;
    cudaError_t error = cudaSuccess;
    TinyShape tiny(shape, bytes);
    for (int64_t b = 0; b < shape.batch && error == cudaSuccess; b += kMaxGridY) {
      tiny.first_sequence = int(b);
      const dim3 grid(unsigned((rows + kRows - 1) / kRows), unsigned(std::min<int64_t>(shape.batch - b, kMaxGridY)));
      error = Launch(tiny.whole ? TinyKernel<T, true>::function : TinyKernel<T, false>::function, grid, dim3(kRows),
                     kRows / 32 * tiny.vectors * sizeof(Words), stream, tiny, pointers);
    }
    return error;
  }
  const auto launch = [&](auto lanes) {
    using RowTeam = Team<decltype(lanes)::value>;
    const int64_t passes = std::min({int64_t(RowTeam::kInWarp), kTeamBytes / (bytes * RowTeam::kGroups),
                                     shape.batch * rows / (kTeams * RowTeam::kGroups)});
    const int64_t per_block = RowTeam::kTeamsPerBlock * RowTeam::kGroups * std::max<int64_t>(1, passes);
    const dim3 grid(unsigned((rows + per_block - 1) / per_block), unsigned(std::min<int64_t>(shape.batch, kMaxGridY)));
    return Launch(Kernel<T, decltype(lanes)::value>::function, grid, dim3(kBlock<decltype(lanes)::value>), 0, stream,
                  Shape(shape, int(std::max<int64_t>(1, passes))), pointers);
  };
  if (bytes <= kShortRow && shape.num_blanks + 1 <= kArcsPerLane<kShortLanes> * kShortLanes) {
    return launch(std::integral_constant<int, kShortLanes>());
  }
  if (bytes <= kMediumRow) return launch(std::integral_constant<int, 32>());
  return launch(std::integral_constant<int, kThreads>());
}

template <class T, int kLanes>
struct ForwardFunction {
  static constexpr auto function = &ForwardKernel<T, kLanes>;
};
template <class T, int kLanes>
struct BackwardFunction {
  static constexpr auto function = &BackwardKernel<T, kLanes>;
};
template <class T, bool kWhole>
struct TinyForwardFunction {
  static constexpr auto function = &TinyForwardKernel<T, kWhole>;
};
template <class T, bool kWhole>
struct TinyBackwardFunction {
  static constexpr auto function = &TinyBackwardKernel<T, kWhole>;
};

template <class T>
cudaError_t Forward(const EmissionForwardArgs& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  ForwardPointers<A> pointers{args.logits, args.label, args.num_frames, {}, {}, static_cast<A*>(args.norm)};
  for (int i = 0; i < args.shape.num_blanks; ++i) pointers.log_arc[i] = static_cast<A*>(args.log_blank[i]);
  pointers.log_arc[args.shape.num_blanks] = static_cast<A*>(args.log_label);
  for (int i = 0; i < args.shape.durations; ++i) pointers.log_duration[i] = static_cast<A*>(args.log_duration[i]);
  return LaunchRows<T, ForwardFunction, TinyForwardFunction>(args.shape, pointers, kTinyForward, stream);
}

template <class T>
cudaError_t Backward(const EmissionBackwardArgs& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  BackwardPointers<A> pointers{args.logits,
                               args.dlogits,
                               args.label,
                               args.num_frames,
                               {},
                               {},
                               static_cast<const A*>(args.norm),
                               static_cast<const A*>(args.scale),
                               static_cast<const A*>(args.clamp)};
  for (int i = 0; i < args.shape.num_blanks; ++i) pointers.ct_arc[i] = static_cast<const A*>(args.ct_blank[i]);
  pointers.ct_arc[args.shape.num_blanks] = static_cast<const A*>(args.ct_label);
  for (int i = 0; i < args.shape.durations; ++i) pointers.ct_duration[i] = static_cast<const A*>(args.ct_duration[i]);
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  const bool alike = misaligned(args.logits) == misaligned(args.dlogits);
  return LaunchRows<T, BackwardFunction, TinyBackwardFunction>(args.shape, pointers, alike ? kTinyBackward : 0, stream);
}

}  // namespace

cudaError_t EmissionForward(DType dtype, const EmissionForwardArgs& args, cudaStream_t stream) {
  return ForType<Half, BFloat16>(dtype, [&](auto x) { return Forward<decltype(x)>(args, stream); });
}

cudaError_t EmissionBackward(DType dtype, const EmissionBackwardArgs& args, cudaStream_t stream) {
  return ForType<Half, BFloat16>(dtype, [&](auto x) { return Backward<decltype(x)>(args, stream); });
}

}  // namespace jax_rnnt::cuda
