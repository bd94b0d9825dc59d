// The warp that takes the last column alone: SweepAlone of lattice.cu.
#pragma once

#include "xla_kernels/cuda/lattice_sweep.cuh"

namespace jax_rnnt::cuda {

// No label arc leaves the last column, so its steps are short. All lanes take them together. Lane j finds the
// probability of step j before, and what is stored of it afterwards. The arithmetic is that of Sweeper, bit for bit.
template <class A, int kSweep, bool kUp, int kColumns>
struct LastColumn {
  using Sweep = Sweeper<A, kSweep, kUp, kColumns, true>;
  using S = Scalar<A>;
  static constexpr int C = Sweep::C, V = Sweep::V;

  __device__ __forceinline__ explicit LastColumn(const Sweep& sweep)
      : sweep(sweep),
        last(sweep.tiles - 1),
        step(sweep.lane % C),
        of_lane(Settled(
            unsigned((last * 32 + Sweep::Element(step) / V * sweep.args.columns) * V + Sweep::Element(step) % V))),
        to_second(Settled(2 * V * sweep.columns)),
        exchanged(kUp ? sweep.crossings + last * 2 * C : sweep.zeros),
        exchanged_by_lane(exchanged + step),
        exchanged_vectors(exchanged),
        crossing(sweep.CrossingOf(last)),
        now(sweep.ChunkAt(0, last)) {
    now.t[0] = __shfl_sync(kAll, now.t[0], 0);
    const Value<A> first = sweep.Initial(last).self[0];
    self = {__shfl_sync(kAll, first.m, 0), __shfl_sync(kAll, first.e, 0)};
    ReadArc();
    if (kSweep == 2) ReadOther();
  }

  // Reads only what is there: beyond the ends of its columns a chunk stands for memory that the other block writes.
  __device__ __forceinline__ void ReadArc() {
    if (sweep.HasArcs(now.t[0])) log = (&sweep.arcs->of[0])[now.group * V + of_lane];
  }
  __device__ __forceinline__ void ReadOther() {
    if (!sweep.HasValues(now.t[0])) return;
    const A* const from = &sweep.Values(now)->of[0];
    const unsigned at = now.group * V + of_lane;
    other[0] = from[at];
    other[1] = from[at + to_second];
  }

  __device__ __forceinline__ void Compute(int chunk) {
    const typename Sweep::Chunk here = now;
    const int t = here.t[0];
    const Value<A> p = Probability(log, sweep.HasArcs(t) ? kLimit<A> : A(-1));
    if (sweep.lane < C) Store(exchanged_by_lane, p);
    now = sweep.After(chunk + 1, here);
    ReadArc();
    __syncwarp();
    const int half = (chunk & 1) * kVectors;
    const SharedAddress<Vector<A>> from = crossing.from + half, to_leave = crossing.to + half;
    Vector<A> enter[kVectors], blank[kVectors], before, leave;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      blank[v] = Load(exchanged_vectors + v);
      if (kUp) enter[v] = Load(from + v);
    }
    const Value<A> enters = kUp ? Load(SharedAddress<Value<A>>(from) + step) : Zero<S>();
    const bool stores = sweep.lane == 0;
#pragma unroll
    for (int j = 0; j < C; ++j) {
      PutIf(stores, exchanged_vectors + kVectors, j, self, before);
      self = Times(self, Get(blank, j));
      if (kUp) self = Plus(self, Get(enter, j));
      Sweep::Rescale(j, self);
      if (!kUp) PutIf(stores, to_leave, j, self, leave);
    }
    __syncwarp();
    StoreResults(here, p, enters);
  }

  // Results of this lane's step: its value, or posteriors. That of the entering label arc lies in the column before.
  __device__ __forceinline__ void StoreResults(const typename Sweep::Chunk& here, Value<A> p, Value<A> enters) {
    const int t = here.t[0];
    Value<A> value = Load(exchanged_by_lane + C);
    A first = value.m, second = S::AsFloat(value.e);
    bool stores = sweep.HasArcs(t);
    bool stores_second = kUp & sweep.HasValues(t) & sweep.HasArcs(t + sweep.args.skew);
    if (kSweep == 1) {
      stores = stores_second = sweep.HasValues(t) & (sweep.args.grad_blank != nullptr);
    } else {
      value = Times(value, p);
      first = value.m, second = A(0);
      if (kUp) {
        const Sum<A> sum(value, enters);
        first = sum.a, second = sum.b, value.e = sum.e;
      }
      const A scale = other[0] * BiasedPower<S>(value.e + S::AsInt(other[1]));
      first *= scale, second *= scale;
      ReadOther();
    }
    A* const to = &(kSweep == 1 ? sweep.Values(here) : sweep.arcs)->of[0];
    const unsigned at = here.group * V + of_lane;
    if ((sweep.lane < C) & stores) to[at] = first;
    if ((sweep.lane < C) & stores_second) {
      to[at + to_second + (kSweep == 2 ? unsigned(sweep.odd - 1) * V : 0)] = second;
    }
  }

  __device__ __forceinline__ void Run() {
    const int begins = -sweep.ChunkOf(0, last);
    Sweep::Meet(begins);
#pragma unroll 1
    for (int chunk = 0; chunk < sweep.chunks; ++chunk) {
      SyncWarps();
      Compute(chunk);
    }
    Sweep::Meet(sweep.rounds - begins - sweep.chunks);
    typename Sweep::State state;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state.self[c] = self, state.in[c] = Zero<S>();
    if (kSweep == 1) sweep.Keep(last, state);
  }

  const Sweep& sweep;
  const int last, step;  // the tile; the step whose probability and results this lane has
  // The place of a lane's first number, from that of the group, in elements, and from there to the second number.
  const unsigned of_lane, to_second;
  // Lanes exchange probabilities, and values before each step. They lie where the last tile has no neighbour.
  const SharedAddress<Value<A>> exchanged, exchanged_by_lane;
  const SharedAddress<Vector<A>> exchanged_vectors;
  const typename Sweep::Crossing crossing;
  typename Sweep::Chunk now;
  Value<A> self;
  A log = 0, other[2] = {0, 0};
};

}  // namespace jax_rnnt::cuda
