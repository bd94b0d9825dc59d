// The sweep of skip_lattice.cu over one sequence, in one direction, in shared memory.
#pragma once

#include "xla_kernels/cuda/skip_sequence.cuh"

namespace jax_rnnt::cuda {
namespace {

// Values of earlier diagonals, probabilities and arcs in shared memory, for up to 2 kPairs arcs. They are taken in
// pairs, as Arguments sorts them. Only the first pair may have arcs to the next diagonal, so all others are known a
// diagonal early. A block has groups of one thread per column, with one barrier per diagonal:
//
// * The other groups, a pair of arcs each or all pairs: probabilities of the next diagonal, and for all pairs but the
//   first the sum of their two terms. They start copies (cp.async) of the arcs of three diagonals after that.
// * The first group sums the first pair and the sums of the others.
//
//   ring   [2 R][W + 1], the last R diagonals, each twice, so that no index wraps; with a column of zeros
//   first  [2][W][2], probabilities of the first pair
//   parts  [2][kPairs - 1][W], sums of the other pairs
//   raw    [4][kPairs][W], logarithms of the arcs that enter (alpha) or leave (beta) a node, two in place of a value
//          and -inf, for ever, where an arc has no column
template <class A>
size_t SharedBytes(int pairs, int columns, int span) {
  return (size_t(2) * (span + 1) * (columns + 1) + size_t(6 * pairs + 2) * columns) * sizeof(Value<A>);
}

// An arc as a thread of a column sees it.
template <class A>
struct ColumnArc {
  template <class Sequence>
  __device__ __forceinline__ ColumnArc(const Arguments<A>& args, const Sequence& sequence, bool up, int i, int u,
                                       int pitch) {
    const int dt = args.dt[i], du = args.du[i];
    exists = Settled(unsigned((i < args.num_arcs) & (u <= sequence.labels) & (!up | (u >= du))));
    back = Settled(up ? args.back[i] : 0u);
    // Of no arc, dt is 2: away from the diagonal that others write.
    reach = Settled((up ? -du : du) - (dt + du) * pitch);
    log = Settled(sequence.Arc(i));
  }

  unsigned exists, back;
  int reach;  // from the node to its neighbour, in the ring
  const A* log;
};

// One direction, by all threads of the block. Combine is what the first group does, Prepare what the others do.
template <class A, bool kUp, int kPairs, int kMine>
struct SharedSweep {
  using S = Scalar<A>;
  static constexpr int kGroups = 1 + kPairs / kMine, kParts = kPairs - 1, kTerms = 2 + kParts;

  __device__ __forceinline__ SharedSweep(const Arguments<A>& args, const Sequence<A>& sequence, Value<A>* shared)
      : args(args),
        sequence(sequence),
        shared(shared),
        W(int(blockDim.x) / kGroups),
        R(args.span + 1),
        pitch(W + 1),
        last(sequence.frames + sequence.labels),
        group(__shfl_sync(0xffffffffu, int(threadIdx.x) / W, 0)),
        u(int(threadIdx.x) - group * W) {}

  __device__ __forceinline__ void Run() const {
    Clear();
    const Places at(*this);
    if (group == 0) {
      Combine(at);
    } else if (kMine == 1 && group == 1) {
      Prepare<true>(at);
    } else {
      Prepare<false>(at);
    }
  }

  // The places of a column in shared memory; those of a diagonal in the ring lie `reached` further. Passed by value:
  // nvcc computes more of them anew, on every diagonal, behind a reference.
  struct Places {
    __device__ __forceinline__ explicit Places(const SharedSweep& sweep)
        : base(sweep.shared),
          lap(Settled(unsigned(sweep.R * sweep.pitch))),
          begin(unsigned((sweep.R - 4 % sweep.R) % sweep.R * sweep.pitch)),
          below(base + (sweep.u + (kUp ? 1 : 0))),
          here(below + sweep.R * sweep.pitch),
          first(base + (2 * sweep.R * sweep.pitch + sweep.u * 2)),
          parts(base + (2 * sweep.R * sweep.pitch + 4 * sweep.W + sweep.u)),
          raw(base + (2 * sweep.R * sweep.pitch + 4 * sweep.W + 2 * kParts * sweep.W + sweep.u)),
          firsts{first, first + 2 * sweep.W},
          in_parts{parts, parts + kParts * sweep.W},
          values(Settled(&(kUp ? sweep.sequence.alpha : sweep.sequence.beta)->m)) {}

    SharedAddress<Value<A>> base;
    unsigned lap, begin;  // of the ring; four diagonals before the first
    SharedAddress<Value<A>> below, here, first, parts, raw, firsts[2], in_parts[2];
    A* values;  // the plane of the workspace
  };

  __device__ __forceinline__ void Clear() const {
    const int in_ring = 2 * R * pitch;
    Value<A>* const ring = shared;
    for (int i = int(threadIdx.x); i < in_ring; i += int(blockDim.x)) ring[i] = Zero<S>();
    Value<A>* const raw = shared + in_ring + 4 * W + 2 * kParts * W;
    const A never = -kInfinity<A>;
    for (int i = int(threadIdx.x); i < 4 * kPairs * W; i += int(blockDim.x)) raw[i] = {never, S::AsInt(never)};
    __syncthreads();
    if (!kUp && group == 0 && u == sequence.labels) {
      ring[(R - 1) * pitch + u] = ring[(2 * R - 1) * pitch + u] = One<A>();
    }
    __syncthreads();
  }

  // Calls visit(step, quarter) for all diagonals and four before the first, with `reached` of each. Four at a time, so
  // that places in the buffers are constants; those after the last have no node.
  template <class Visit>
  __device__ __forceinline__ void EveryDiagonal(const Places at, unsigned& reached, const Visit& visit) const {
    reached = at.begin;
#pragma unroll 1
    for (int begin = -4; begin < last; begin += 4) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        visit(begin + quarter, quarter);
        reached += unsigned(pitch);
        reached = min(reached, reached - at.lap);
        SyncWarps();
      }
    }
  }

  // The place of this column's node in a plane of the workspace, on the first diagonal, and on the next one.
  __device__ __forceinline__ unsigned Begin() const {
    return unsigned(Sequence<A>::Position(args, kUp ? 0 : last - 1, 0)) + unsigned(u);
  }
  __device__ __forceinline__ void Advance(unsigned& at) const {
    const unsigned columns = unsigned(args.columns), plane = unsigned(sequence.plane);
    at = kUp ? min(at + columns, at + columns - plane) : min(at - columns, at - columns + plane);
  }
  // That of the node `back` before it.
  __device__ __forceinline__ unsigned Before(unsigned at, unsigned back) const {
    return min(at - back, at - back + unsigned(sequence.plane));
  }

  // The sum of all terms, as trees, which are less deep than chains.
  __device__ __forceinline__ static Value<A> Total(const Value<A> (&terms)[kTerms]) {
    typename S::I e[kTerms];
    A sums[kTerms];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) e[i] = terms[i].e;
#pragma unroll
    for (int n = kTerms; n > 1; n = (n + 1) / 2) {
#pragma unroll
      for (int i = 0; i < n / 2; ++i) e[i] = S::Max(e[i], e[n - 1 - i]);
    }
    const auto shift = S::kExponentBias - e[0];
#pragma unroll
    for (int i = 0; i < kTerms; ++i) sums[i] = terms[i].m * BiasedPower<S>(terms[i].e + shift);
#pragma unroll
    for (int n = kTerms; n > 1; n = (n + 1) / 2) {
#pragma unroll
      for (int i = 0; i < n / 2; ++i) sums[i] += sums[n - 1 - i];
    }
    return {sums[0], e[0]};
  }

  __device__ __forceinline__ void Combine(const Places at) const {
    const ColumnArc<A> arcs[2] = {{args, sequence, kUp, 0, u, pitch}, {args, sequence, kUp, 1, u, pitch}};
    const SharedAddress<Value<A>> from[2] = {at.here + arcs[0].reach, at.here + arcs[1].reach};
    const bool in_column = u <= sequence.labels;
    unsigned place = Begin();
    unsigned reached;
    EveryDiagonal(at, reached, [&](int step, int quarter) {
      if (step < 0) return;
      Value<A> terms[kTerms];
#pragma unroll
      for (int i = 0; i < 2; ++i) terms[i] = Times(Load(from[i] + int(reached)), Load(at.firsts[quarter & 1] + i));
#pragma unroll
      for (int i = 0; i < kParts; ++i) terms[2 + i] = Load(at.in_parts[quarter & 1] + i * W);
      Value<A> value = Total(terms);
      if (kUp && step == 0 && u == 0) value = One<A>();
      if (quarter == 3) value = Normalize(value);
      const int frame = (kUp ? step : last - 1 - step) - u;
      const bool node = in_column & (unsigned(frame) < unsigned(sequence.frames));
      value = {node ? value.m : A(0), node ? value.e : S::kZero};
      Store(at.here + int(reached), value);
      Store(at.below + int(reached), value);
      StoreIf(node, at.values + size_t(place) * 2, value.m, S::AsFloat(value.e));
      Advance(place);
    });
  }

  // Where there is no node, arcs of others are copied, or memory that nobody wrote. They do not count: upwards, the
  // value of the node that they leave is zero, and downwards, that of this node becomes zero. What is computed before
  // the first diagonal is not used. kFirst: the first pair, which has no sum.
  template <bool kFirst>
  __device__ __forceinline__ void Prepare(const Places at) const {
    const int pair = kMine == 1 ? group - 1 : 0;  // the first one of this group
    const ColumnArc<A> of_pair[2] = {{args, sequence, kUp, pair * 2, u, pitch},
                                     {args, sequence, kUp, pair * 2 + 1, u, pitch}};
    // Places of the arcs that are copied. Upwards, they lie further back; with all pairs, too many to keep.
    constexpr bool kKept = kUp && kMine == 1;
    unsigned place = Begin(), places[2] = {Before(place, of_pair[0].back), Before(place, of_pair[1].back)};
    const SharedAddress<Value<A>> raw = at.raw + pair * W;
    const SharedAddress<Value<A>> slots[4] = {raw, raw + kPairs * W, raw + 2 * kPairs * W, raw + 3 * kPairs * W};
    unsigned reached;
    EveryDiagonal(at, reached, [&](int, int quarter) {
      WaitForCopies<2>();
      const int now = quarter + 1, later = quarter + 4;
#pragma unroll(kMine < 8 ? kMine : 1)  // what all 16 arcs need would not fit into registers
      for (int m = 0; m < kMine; ++m) {
        const bool sums = kMine == 1 ? !kFirst : m > 0;
        const auto arc = [&](int i) {
          return kMine == 1 ? of_pair[i] : ColumnArc<A>(args, sequence, kUp, m * 2 + i, u, pitch);
        };
        const ColumnArc<A> arcs[2] = {arc(0), arc(1)};
        // All reads first, then copies, whose addresses are found while the reads are under way.
        const Value<A> x = Load(slots[now & 3] + m * W);
        const A logarithms[2] = {x.m, S::AsFloat(x.e)};
        Value<A> from[2], p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          from[i] = sums ? Load((at.here + (pitch + arcs[i].reach)) + int(reached)) : Zero<S>();
        }
        const SharedAddress<A> to(slots[later & 3] + m * W);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned copied = kKept ? places[i] : kUp ? Before(place, arcs[i].back) : place;
          CopyAsyncIf(arcs[i].exists, to + i, arcs[i].log + copied);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) p[i] = Probability(logarithms[i]);
        if (sums) {
          Store(at.in_parts[now & 1] + (pair + m - 1) * W, Plus(Times(from[0], p[0]), Times(from[1], p[1])));
        } else {
          Store(at.firsts[now & 1], p[0]);
          Store(at.firsts[now & 1] + 1, p[1]);
        }
      }
      if (kKept) {
        Advance(places[0]);
        Advance(places[1]);
      } else {
        Advance(place);
      }
      CommitCopies();
    });
    WaitForCopies<0>();  // neither the block's end nor its next sequence may meet them
  }

  const Arguments<A>& args;
  const Sequence<A>& sequence;
  Value<A>* const shared;
  const int W, R, pitch;  // columns, diagonals in the ring, from one of them to the next
  const int last;         // diagonals
  const int group, u;     // of this thread; u: its column
};

}  // namespace
}  // namespace jax_rnnt::cuda
