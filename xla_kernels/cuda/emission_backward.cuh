// Cotangents of the arcs -> gradient of the logits: the kernels of softmax_emission.cu.
#pragma once

#include "xla_kernels/cuda/tiny_rows.cuh"

namespace jax_rnnt::cuda {
namespace {

template <class A>
struct BackwardPointers {
  const void* logits;
  void* dlogits;
  const int32_t *label, *num_frames;
  const A* ct_arc[kMaxBlanks + 1];  // K blanks, then the label
  const A* ct_duration[kMaxDurations];
  const A *norm, *scale, *clamp;
  const A* total;  // or null
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

// A lane's numbers of the row that it owns.
template <class A>
struct BackwardRow {
  bool used = false;   // whether a cotangent is not 0
  bool summed = true;  // whether norm held the sum
  Softmax<A> softmax;  // factor: not divided by the sum yet, unless `summed`
};

// If norm is lse, which is rare, the row will be summed once more, since a large lse is rounded too much.
template <class T, class A>
__device__ __forceinline__ BackwardRow<A> ReadRow(const Shape& shape, const BackwardPointers<A>& args, const Row& row,
                                                  const T* x) {
  BackwardRow<A> state;
  if (row.label == kOutside) return state;
  const A norm = args.norm[row.index];
  A sum = 0, last = 0;
  for (int arc = 0; arc <= shape.num_blanks; ++arc) {
    last = args.ct_arc[arc][row.index];
    sum += last;
    state.used |= last != 0;
  }
  for (int i = 0; i < shape.durations; ++i) state.used |= args.ct_duration[i][row.index] != 0;
  if (args.total != nullptr) {
    sum = args.total[row.index];
    state.used |= sum != 0;
  }
  if (!state.used) return state;
  if (shape.bernoulli) sum = row.label == shape.blanks[0] ? last - last : last;  // 0, but NaN stays
  if (shape.normalize || sum != sum) state.softmax.factor = A(0) - sum;          // no -0
  if (!shape.normalize) return state;
  state.summed = norm > 0 && norm < kTiny<A>;
  if (!state.summed) return state;
  state.softmax.anchor = Widen(x[shape.anchor]);
  state.softmax.factor /= norm * (1 / kSumScale<A>);
  return state;
}

// Writes the gradient of the durations of a row.
template <class T, class A>
__device__ __forceinline__ void WriteDurations(const Shape& shape, const BackwardPointers<A>& args, int64_t index,
                                               bool used, const T* x, T* dx, const Finish<A>& finish) {
  x += shape.classes;
  dx += shape.classes;
  LogSumExp<A> total;
  A factor = 0;
  if (used && shape.normalize && args.total == nullptr) {
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
  const auto map_edges = [&](auto gradient) {
#pragma unroll 1
    for (unsigned i = lane; i < n - count * kSize; i += kLanes) {
      const unsigned k = i < head ? i : i + count * kSize;
      dx[k] = Narrow<T>(gradient(kRead ? Widen(x[k]) : A(0)));
    }
  };
  if (works) {
    map_edges(quick);
  } else {
    map_edges([&](A v) { return finish(softmax(v)); });
  }
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kBlock<kLanes>, kBlocks<T, kLanes>)
    BackwardKernel(const __grid_constant__ Shape shape, const __grid_constant__ BackwardPointers<Accumulator<T>> args) {
  JAX_RNNT_AT_MOST(kBlock<kLanes>);
  using A = Accumulator<T>;
  const Team<kLanes> team(shape.passes);
  if (team.first >= shape.rows()) return;
  const T* const logits = static_cast<const T*>(args.logits);
  T* const dlogits = static_cast<T*>(args.dlogits);
  const int row_size = shape.row_size();
  for (int b = int(blockIdx.y); b < shape.batch; b += int(gridDim.y)) {
    const Row row = OwnRow(team, shape, args.label, args.num_frames, b);
    const A clamp = args.clamp[b];
    const Finish<A> finish = {args.scale[b], clamp > 0 ? clamp : kInfinity<A>};
    const BackwardRow<A> state = ReadRow(shape, args, row, logits + row.index * row_size);
    const unsigned exist = __ballot_sync(kAll, row.exists), used = __ballot_sync(kAll, state.used);
    const unsigned unsummed = __ballot_sync(kAll, !state.summed);
    if (shape.durations > 0 && row.exists && team.writes()) {
      WriteDurations(shape, args, row.index, state.used, logits + row.index * row_size, dlogits + row.index * row_size,
                     finish);
    }
    int64_t index = int64_t(b) * shape.rows() + team.first + team.group * shape.passes;
    for (int pass = 0; pass < shape.passes; ++pass, ++index) {
      const int owner = team.Owner(pass);
      const bool is_used = (used >> owner & 1) != 0;
      const T* const x = Pinned(logits + index * row_size);
      T* const dx = Pinned(dlogits + index * row_size);
      Softmax<A> softmax;
      softmax.anchor = __shfl_sync(kAll, state.softmax.anchor, owner);
      softmax.factor = __shfl_sync(kAll, state.softmax.factor, owner);
      const int label = __shfl_sync(kAll, row.label, owner);
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

// The same for tiny rows without a total, one to a lane. Logits and gradient lie alike with respect to 16 bytes.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kBlock<1>, kBlocks<T, 1>)
    TinyBackwardKernel(const __grid_constant__ TinyShape shape,
                       const __grid_constant__ BackwardPointers<Accumulator<T>> args) {
  JAX_RNNT_AT_MOST(kBlock<1>);
  using A = Accumulator<T>;
  JAX_RNNT_DYNAMIC_SHARED(Words, shared);
  const Team<1> team(1);
  if (team.first >= shape.rows()) return;
  const unsigned lane = threadIdx.x % 32, n = unsigned(shape.classes);
  const int b = shape.first_sequence + int(blockIdx.y);
  const A clamp = args.clamp[b];
  const Finish<A> finish = {args.scale[b], clamp > 0 ? clamp : kInfinity<A>};
  const Row row = OwnRow(team, shape, args.label, args.num_frames, b);
  A norm = 0, ct_blank = 0, ct_label = 0;
  if (row.exists) {  // at once, not behind the label
    norm = args.norm[row.index];
    ct_blank = args.ct_arc[0][row.index];
    ct_label = args.ct_arc[1][row.index];
  }
  const bool is_used = row.label != kOutside && (ct_blank != 0 || ct_label != 0);
  const int64_t first = (int64_t(b) * shape.rows() + team.first) * shape.classes;
  const T* const x = Pinned(static_cast<const T*>(args.logits) + first);
  const TinyRows<T, kWhole> rows(shape, shared + threadIdx.x / 32 * shape.vectors, x,
                                 min(32u, shape.rows() - team.first) * n, lane);
  rows.Read(x, __ballot_sync(kAll, is_used));
  if (row.exists) {
    T* const mine = rows.Mine();
    const unsigned blank = unsigned(shape.blanks[0]), label = unsigned(row.label);
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

}  // namespace
}  // namespace jax_rnnt::cuda
