// Lattice with arcs that skip frames: any table of arcs (multi-blank, token and duration). Alpha, beta, and minus the
// arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Nodes are taken by diagonals n = t + u: every arc leads to a later one. There are four launches. As in lattice.cu, no
// block waits for another and nothing is atomic:
//
//   Skew   all of the GPU: each arc's log-probabilities into diagonal order, node (t, u) to row n mod T of a plane
//   Sweep  two blocks per sequence, one for beta and one for alpha (which the loss alone does not need), with one
//          barrier per diagonal
//   Loss   a block per sequence: the loss from beta, or wide mode (lattice_values.cuh) if the sequence needs it
//   Skew   all of the GPU: posteriors from alpha, the arc and beta, and back into frame order
//
// The longest arc may span many diagonals, so their values lie in shared memory and not in registers. Of the arcs of a
// node, at most two lead to the next diagonal, for all topologies of the library. The sum over the others is known a
// diagonal earlier: other warps compute it, a pair of arcs each, beside probabilities and copies (see SweepInShared).
// This takes up to 16 arcs (10 in float64), 256 columns, and shared memory for all of it. Other tables and sizes read
// earlier diagonals from memory, that is from the L1 cache, and take a few thousand cycles per diagonal.
//
// docs/notes/lattice.md has the attempts that led here, with their cycles.
//
// With K arcs, P planes and E pairs of an arc and one of its planes (K, or 2 K if every arc is a sum of two), a node
// moves 4 E + 4 K bytes in the first Skew, 8 K + 16 in the sweeps and 12 E + 12 P in the last Skew, in float32; beyond
// the limits above 24 K + 16 in the sweeps, often from a cache. The logits move 3 V * 4.
#include <algorithm>

#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/lattice_values.cuh"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_SKIP_THREADS
#define JAX_RNNT_SKIP_THREADS 256
#endif
constexpr int kMaxThreads = JAX_RNNT_SKIP_THREADS;

template <class A>
struct Arguments {
  explicit Arguments(const LatticeArgs& args)
      : batch(int(args.batch)),
        frames(int(args.frames)),
        columns(int(args.columns)),
        num_arcs(args.topology.num_arcs),
        num_planes(args.topology.num_planes),
        by_frames(uint32_t(std::max<int64_t>(1, args.frames))),
        num_frames(args.num_frames),
        num_labels(args.num_labels),
        workspace(static_cast<A*>(args.workspace)),
        stride(LatticeWorkspace(args, true)),
        loss(static_cast<A*>(args.loss)) {
    for (int k = 0; k < num_arcs; ++k) {
      dt[k] = int(std::min<int64_t>(args.topology.dt[k], args.frames + 1));  // no path takes a longer one
      du[k] = int(args.topology.du[k]);
      may_end[k] = args.topology.may_end[k] != 0;
      plane[k] = int(args.topology.plane[k]);
      other[k] = int(args.topology.other[k]);
      back[k] = unsigned((dt[k] + du[k]) % std::max(1, frames) * columns + du[k]);
      span = std::max(span, dt[k] + du[k]);
      near += dt[k] + du[k] == 1;
      order[k] = k;
    }
    std::stable_sort(order, order + num_arcs, [&](int i, int j) { return dt[i] + du[i] < dt[j] + du[j]; });
    for (int p = 0; p < num_planes; ++p) {
      log_plane[p] = static_cast<const A*>(args.log_plane[p]);
      grad_plane[p] = args.grad_plane != nullptr ? static_cast<A*>(args.grad_plane[p]) : nullptr;
    }
  }

  int batch, frames, columns, num_arcs, num_planes;
  Divider by_frames;  // diagonals to rows
  const int32_t *num_frames, *num_labels;
  A* workspace;
  int64_t stride;  // of the workspace, from a sequence to the next
  A* loss;
  const A* log_plane[kMaxArcs];
  A* grad_plane[kMaxArcs];
  int dt[kMaxArcs], du[kMaxArcs], plane[kMaxArcs], other[kMaxArcs];
  unsigned back[kMaxArcs];  // from the end of an arc to its beginning, in a plane
  bool may_end[kMaxArcs];
  int order[kMaxArcs];  // arcs, those first that span few diagonals
  int span = 1;         // diagonals that the longest arc spans
  int near = 0;         // arcs that lead to the next diagonal
};

// One sequence, as all kernels see it. Its workspace has alpha, beta and the arcs, all in diagonal order, and a flag
// per arc and tile. SkipLoss stores in the first flag whether the sequence needs wide mode. That mode keeps a LogWeight
// per node in the place of alpha and beta, and replaces arcs by minus their posteriors.
template <class A>
struct Sequence {
  __device__ __forceinline__ Sequence(const Arguments<A>& args, int b)
      : frames(max(0, min(args.num_frames[b], args.frames))),
        labels(max(0, min(args.num_labels[b], args.columns - 1))),
        plane(int64_t(args.frames) * args.columns),
        alpha(reinterpret_cast<Value<A>*>(args.workspace + b * args.stride)),
        beta(alpha + plane),
        arcs(args.workspace + b * args.stride + 4 * plane),
        flags(arcs + args.num_arcs * plane) {}

  __device__ __forceinline__ bool Inside(int t, int u) const { return 0 <= t && t < frames && 0 <= u && u <= labels; }
  __device__ __forceinline__ static int Position(const Arguments<A>& args, int n, int u) {
    return (n - int(args.by_frames(uint32_t(n))) * args.frames) * args.columns + u;
  }
  // Beta of the node to which arc k of node (t, u) leads, zero if there is none.
  __device__ __forceinline__ Value<A> Beyond(const Arguments<A>& args, int k, int t, int u) const {
    const int to_t = t + args.dt[k], to_u = u + args.du[k];
    if (Inside(to_t, to_u)) return beta[Position(args, to_t + to_u, to_u)];
    return to_t == frames && to_u == labels && args.may_end[k] ? One<A>() : Zero<Scalar<A>>();
  }

  int frames, labels;  // T_b, U_b
  int64_t plane;
  Value<A>*alpha, *beta;
  A *arcs, *flags;
};

// Grid: (tiles of 32 frames x 32 columns, sequences, arcs or, back, planes); block (32, 8). Forth: arcs that do not
// exist become -inf, and a flag gets the bits of the tile's arcs. Back: minus the sum of the posteriors of a plane's
// arcs, with zeros outside the lengths and if there is no path, NaN if the loss is NaN.
template <class A, bool kBack>
__global__ void __launch_bounds__(kTile* kSkewRows, 4) SkipSkew(const __grid_constant__ Arguments<A> args) {
  using S = Scalar<A>;
  JAX_RNNT_SHARED_ARRAY(A, tile, kTile * (kTile + 1));
  const int tiles_of_columns = int(Tiles(args.columns)), k = int(blockIdx.z), lane = int(threadIdx.x);
  const int first_t = int(blockIdx.x) / tiles_of_columns * kTile, first_u = int(blockIdx.x) % tiles_of_columns * kTile;
  const int u = first_u + lane;
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    const bool empty = first_t >= sequence.frames || first_u > sequence.labels;
    if (!kBack && empty) continue;
    const auto arc = [&](int k) { return sequence.arcs + k * sequence.plane; };
    const A loss = kBack ? args.loss[b] : A(0);
    const bool finite = loss < kInfinity<A>;
    const auto slot = [&](int t) { return (t - first_t) * (kTile + 1) + lane; };

    const auto by_frames = [&](auto visit) {
      for (int t = first_t + int(threadIdx.y); t < min(first_t + kTile, args.frames); t += kSkewRows) {
        if (u < args.columns) visit(t, int64_t(b) * sequence.plane + int64_t(t) * args.columns + u);
      }
    };
    const auto by_diagonals = [&](auto visit) {
      for (int d = int(threadIdx.y); d < 2 * kTile - 1; d += kSkewRows) {
        const int t = first_t + d - lane;
        if (t < first_t || t >= first_t + kTile || !sequence.Inside(t, u)) continue;
        visit(t, Sequence<A>::Position(args, t + u, u));
      }
    };

    if (kBack) {
      if (!empty && finite) {
        const bool wide = sequence.flags[0] != 0;
        Value<A> minus_inverse = sequence.beta[0];
        minus_inverse = {A(-1) / minus_inverse.m, -minus_inverse.e};
        by_diagonals([&](int t, int i) {
          const Value<A> alpha = wide ? Zero<S>() : sequence.alpha[i];
          A sum = 0;
          for (int j = 0; j < args.num_arcs; ++j) {
            if (args.plane[j] != k && args.other[j] != k) continue;
            if (wide) {
              sum += arc(j)[i];
              continue;
            }
            const Value<A> through = Probability(arc(j)[i]) * sequence.Beyond(args, j, t, u);
            const auto exponent = S::Max(through.e, S::kZero) + (alpha.e + minus_inverse.e);
            sum += through.m * (alpha.m * minus_inverse.m) * PowerOfTwo<S>(exponent);
          }
          tile[slot(t)] = sum;
        });
      }
      __syncthreads();
      by_frames([&](int t, int64_t i) {
        const bool used = sequence.Inside(t, u);
        args.grad_plane[k][i] = used && finite ? tile[slot(t)] : used && loss != loss ? loss : A(0);
      });
      __syncthreads();
    } else {
      const Limits<A> limits(sequence.frames, sequence.labels);
      int bits = 0;
      by_frames([&](int t, int64_t i) {
        if (!sequence.Inside(t, u)) return;
        A x = -kInfinity<A>;
        const bool ends = t + args.dt[k] == sequence.frames && u + args.du[k] == sequence.labels;
        if (u + args.du[k] <= sequence.labels && (!ends || args.may_end[k])) {
          x = args.log_plane[args.plane[k]][i];
          if (args.other[k] >= 0) x += args.log_plane[args.other[k]][i];
        }
        bits |= limits.Bits(x);
        tile[slot(t)] = x;
      });
      bits = OrBits(bits);
      by_diagonals([&](int t, int i) { arc(k)[i] = tile[slot(t)]; });
      if (threadIdx.x == 0 && threadIdx.y == 0) sequence.flags[k * gridDim.x + blockIdx.x] = A(bits);
      __syncthreads();
    }
  }
}

// Values of earlier diagonals, probabilities and arcs in shared memory, for up to kMostInShared arcs. Arcs are taken in
// pairs, in `order`; only the first pair may have arcs to the next diagonal, so all others are known a diagonal early.
// A block has groups of one thread per column, with one barrier per diagonal:
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
    const bool is = i < args.num_arcs;
    const int k = is ? args.order[i] : 0, dt = args.dt[k], du = args.du[k];
    exists = Settled(unsigned(is & (u <= sequence.labels) & (!up | (u >= du))));
    back = Settled(up ? args.back[k] : 0u);
    // Without an arc, away from the diagonal that others write.
    reach = Settled(is ? (up ? -du : du) - (dt + du) * pitch : -2 * pitch);
    log = Settled(sequence.arcs + k * sequence.plane);
  }

  unsigned exists, back;
  int reach;  // from the node to its neighbour, in the ring
  const A* log;
};

template <class A, bool kUp, int kPairs, int kMine>
__device__ __forceinline__ void SweepInShared(const Arguments<A>& args, const Sequence<A>& sequence, Value<A>* shared) {
  using S = Scalar<A>;
  constexpr int kGroups = 1 + kPairs / kMine, kParts = kPairs - 1;
  const int W = int(blockDim.x) / kGroups, R = args.span + 1, pitch = W + 1, last = sequence.frames + sequence.labels;
  const int group = __shfl_sync(0xffffffffu, int(threadIdx.x) / W, 0), u = int(threadIdx.x) - group * W;
  Value<A>* const ring = shared;
  for (int i = int(threadIdx.x); i < 2 * R * pitch; i += int(blockDim.x)) ring[i] = Zero<S>();
  Value<A>* const in_raw = shared + 2 * R * pitch + 4 * W + 2 * kParts * W;
  const A never = -kInfinity<A>;
  for (int i = int(threadIdx.x); i < 4 * kPairs * W; i += int(blockDim.x)) in_raw[i] = {never, S::AsInt(never)};
  __syncthreads();
  const int column = u + (kUp ? 1 : 0);  // of this node in the ring
  if (!kUp && group == 0 && u == sequence.labels) ring[(R - 1) * pitch + u] = ring[(2 * R - 1) * pitch + u] = One<A>();
  __syncthreads();

  const unsigned plane = unsigned(sequence.plane), columns = unsigned(args.columns);
  const unsigned begin_at = unsigned(Sequence<A>::Position(args, kUp ? 0 : last - 1, 0)) + unsigned(u);
  const auto advance = [&](unsigned& at) {
    at = kUp ? min(at + columns, at + columns - plane) : min(at - columns, at - columns + plane);
  };
  A* const values = Settled(&(kUp ? sequence.alpha : sequence.beta)->m);
  const bool in_column = u <= sequence.labels;
  // Places in shared memory; those of a diagonal in the ring lie `reached` further.
  const SharedAddress<Value<A>> base(shared);
  const unsigned lap = Settled(unsigned(R * pitch));
  const SharedAddress<Value<A>> below = base + column, here = below + R * pitch;
  const SharedAddress<Value<A>> first = base + (2 * R * pitch + u * 2), parts = base + (2 * R * pitch + 4 * W + u);
  const SharedAddress<Value<A>> raw = base + (2 * R * pitch + 4 * W + 2 * kParts * W + u);
  const SharedAddress<Value<A>> firsts[2] = {first, first + 2 * W}, in_parts[2] = {parts, parts + kParts * W};
  unsigned reached = unsigned((R - 4 % R) % R * pitch);
  // Calls visit(step, quarter) for all diagonals and four before the first. Four at a time, so that places in the
  // buffers are constants; those after the last have no node.
  const auto every_diagonal = [&](auto visit) {
#pragma unroll 1
    for (int begin = -4; begin < last; begin += 4) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        visit(begin + quarter, quarter);
        reached += unsigned(pitch);
        reached = min(reached, reached - lap);
        SyncWarps();
      }
    }
  };
  const auto frame = [&](int step) { return (kUp ? step : last - 1 - step) - u; };

  if (group == 0) {
    const ColumnArc<A> arcs[2] = {{args, sequence, kUp, 0, u, pitch}, {args, sequence, kUp, 1, u, pitch}};
    const SharedAddress<Value<A>> from[2] = {here + arcs[0].reach, here + arcs[1].reach};
    unsigned at = begin_at;
    every_diagonal([&](int step, int quarter) {
      if (step < 0) return;
      Value<A> terms[2 + kParts];
#pragma unroll
      for (int i = 0; i < 2; ++i) terms[i] = Times(Load(from[i] + int(reached)), Load(firsts[quarter & 1] + i));
#pragma unroll
      for (int i = 0; i < kParts; ++i) terms[2 + i] = Load(in_parts[quarter & 1] + i * W);
      // As trees, which are less deep than chains.
      constexpr int kTerms = 2 + kParts;
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
      Value<A> value = {sums[0], e[0]};
      if (kUp && step == 0 && u == 0) value = One<A>();
      if (quarter == 3) value = Normalize(value);
      const bool node = in_column & (unsigned(frame(step)) < unsigned(sequence.frames));
      value = {node ? value.m : A(0), node ? value.e : S::kZero};
      Store(here + int(reached), value);
      Store(below + int(reached), value);
      StoreIf(node, values + size_t(at) * 2, value.m, S::AsFloat(value.e));
      advance(at);
    });
    return;
  }

  // Where there is no node, arcs of others are copied, or memory that nobody wrote. They do not count: upwards, the
  // value of the node that they leave is zero, and downwards, that of this node becomes zero. What is computed before
  // the first diagonal is not used.
  const auto prepare = [&](auto is_first) {
    const int mine = kMine == 1 ? group - 1 : 0;
    const ColumnArc<A> own[2] = {{args, sequence, kUp, mine * 2, u, pitch},
                                 {args, sequence, kUp, mine * 2 + 1, u, pitch}};
    // Places of the arcs that are copied. Upwards, they lie further back; with all pairs, too many to keep.
    const auto before = [&](unsigned at, unsigned back) { return min(at - back, at - back + plane); };
    constexpr bool kKept = kUp && kMine == 1;
    unsigned at = begin_at, places[2] = {before(begin_at, own[0].back), before(begin_at, own[1].back)};
    const SharedAddress<Value<A>> own_raw = raw + mine * W;
    const SharedAddress<Value<A>> slots[4] = {own_raw, own_raw + kPairs * W, own_raw + 2 * kPairs * W,
                                              own_raw + 3 * kPairs * W};
    every_diagonal([&](int, int quarter) {
      WaitForCopies<2>();
      const int now = quarter + 1, later = quarter + 4;
#pragma unroll(kMine < 8 ? kMine : 1)  // what all 16 arcs need would not fit into registers
      for (int m = 0; m < kMine; ++m) {
        // The first pair has no sum.
        const bool sums = kMine == 1 ? !decltype(is_first)::value : m > 0;
        const auto arc = [&](int i) {
          return kMine == 1 ? own[i] : ColumnArc<A>(args, sequence, kUp, m * 2 + i, u, pitch);
        };
        const ColumnArc<A> arcs[2] = {arc(0), arc(1)};
        // All reads first, then copies, whose addresses are found while the reads are under way.
        const Value<A> x = Load(slots[now & 3] + m * W);
        const A logarithms[2] = {x.m, S::AsFloat(x.e)};
        Value<A> from[2], p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          from[i] = sums ? Load((here + (pitch + arcs[i].reach)) + int(reached)) : Zero<S>();
        }
        const SharedAddress<A> to(slots[later & 3] + m * W);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned place = kKept ? places[i] : kUp ? before(at, arcs[i].back) : at;
          CopyAsyncIf(arcs[i].exists, to + i, arcs[i].log + place);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) p[i] = Probability(logarithms[i]);
        if (sums) {
          Store(in_parts[now & 1] + (mine + m - 1) * W, Plus(Times(from[0], p[0]), Times(from[1], p[1])));
        } else {
          Store(firsts[now & 1], p[0]);
          Store(firsts[now & 1] + 1, p[1]);
        }
      }
      if (kKept) {
        advance(places[0]);
        advance(places[1]);
      } else {
        advance(at);
      }
      CommitCopies();
    });
    WaitForCopies<0>();  // neither the block's end nor its next sequence may meet them
  };
  if (kMine == 1 && group == 1) {
    prepare(std::true_type());
  } else {
    prepare(std::false_type());
  }
}

// Threads of a block: with a group per pair of arcs, or one for all pairs. Bounds the registers to 80 or 128.
template <class A, bool kSpread>
constexpr int kThreadsInShared = kSpread ? kMaxThreads * 3 / (sizeof(A) / 4) : 2 * kMaxThreads;

// Grid: (beta and, for a gradient, alpha; sequences).
template <class A, int kPairs, int kMine>
__global__ void __launch_bounds__(kThreadsInShared<A, kMine == 1>, 1)
    SkipSweepInShared(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    if (sequence.frames == 0) continue;
    if (blockIdx.x == 0) {
      SweepInShared<A, false, kPairs, kMine>(args, sequence, shared);
    } else {
      SweepInShared<A, true, kPairs, kMine>(args, sequence, shared);
    }
    __syncthreads();  // the next sequence overwrites what copies of this one have written
  }
}

// Grid: (beta and, for a gradient, alpha; sequences).
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1) SkipSweep(const __grid_constant__ Arguments<A> args) {
  using S = Scalar<A>;
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    if (sequence.frames == 0) continue;
    const int diagonals = sequence.frames + sequence.labels;
    for (int step = 0; step < diagonals; ++step) {
      const int n = blockIdx.x == 0 ? diagonals - 1 - step : step;
      for (int u = int(threadIdx.x); u <= sequence.labels; u += int(blockDim.x)) {
        const int t = n - u;
        if (!sequence.Inside(t, u)) continue;
        const int at = Sequence<A>::Position(args, n, u);
        Value<A> sum = blockIdx.x != 0 && n == 0 ? One<A>() : Zero<S>();
        const A* arc = sequence.arcs;
        for (int k = 0; k < args.num_arcs; ++k, arc += sequence.plane) {
          if (blockIdx.x == 0) {
            sum = sum + Probability(arc[at]) * sequence.Beyond(args, k, t, u);
          } else if (sequence.Inside(t - args.dt[k], u - args.du[k])) {
            const int from = Sequence<A>::Position(args, n - args.dt[k] - args.du[k], u - args.du[k]);
            sum = sum + Probability(arc[from]) * sequence.alpha[from];
          }
        }
        (blockIdx.x == 0 ? sequence.beta : sequence.alpha)[at] = Normalize(sum);
      }
      __syncthreads();
    }
  }
}

// Wide mode: the loss, and posteriors over the arcs. The weight of a node is the sum over the arcs that enter it. The
// occupancy of the terminal node, 1, flows back: the arcs that enter a node share its occupancy in proportion to their
// weights. So occupancy is conserved at any size of the arcs.
template <class A>
__device__ __forceinline__ A Wide(const Arguments<A>& args, const Sequence<A>& sequence) {
  const int diagonals = sequence.frames + sequence.labels;
  LogWeight* const weights = reinterpret_cast<LogWeight*>(sequence.alpha);
  const auto arc = [&](int k) { return sequence.arcs + k * sequence.plane; };
  const auto exists = [&](int k, int to_t, int to_u) {
    const bool end = to_t == sequence.frames && to_u == sequence.labels && args.may_end[k];
    return sequence.Inside(to_t, to_u) || end;
  };
  const auto on_diagonal = [&](int n, auto visit) {
    for (int u = int(threadIdx.x); u <= sequence.labels; u += int(blockDim.x)) {
      if (sequence.Inside(n - u, u)) visit(n - u, u, Sequence<A>::Position(args, n, u));
    }
    __syncthreads();
  };
  // Calls visit(arc, weight) for all arcs that enter node (t, u), the arc by reference.
  const auto entering = [&](int t, int u, auto visit) {
    for (int k = 0; k < args.num_arcs; ++k) {
      const int from_t = t - args.dt[k], from_u = u - args.du[k];
      if (!sequence.Inside(from_t, from_u) || !exists(k, t, u)) continue;
      const int from = Sequence<A>::Position(args, from_t + from_u, from_u);
      visit(arc(k)[from], weights[from] * double(arc(k)[from]));
    }
  };
  const auto sum = [&](int t, int u) {
    LogWeight total = Impossible();
    double share;
    entering(t, u, [&](A&, LogWeight weight) { total = Add(total, weight, &share); });
    return total;
  };
  const auto share_out = [&](int t, int u, LogWeight total, double occupancy) {
    double parts = 0;
    if (total.Possible()) entering(t, u, [&](A&, LogWeight weight) { parts += exp(LogRatio(weight, total)); });
    entering(t, u, [&](A& x, LogWeight weight) {
      x = total.Possible() ? A(0 - occupancy * (exp(LogRatio(weight, total)) / parts)) : A(0);
    });
  };

  for (int n = 0; n < diagonals; ++n) {
    on_diagonal(n, [&](int t, int u, int at) { weights[at] = n == 0 ? LogWeight{0, 0} : sum(t, u); });
  }
  const LogWeight likelihood = sum(sequence.frames, sequence.labels);
  const A loss = LossOf<A>(likelihood);
  __syncthreads();  // all have read the last arcs
  if (args.grad_plane[0] == nullptr || loss == kInfinity<A>) return loss;
  if (threadIdx.x == 0) share_out(sequence.frames, sequence.labels, likelihood, 1);
  __syncthreads();
  for (int n = diagonals - 1; n >= 0; --n) {
    on_diagonal(n, [&](int t, int u, int at) {
      double occupancy = 0;
      for (int k = 0; k < args.num_arcs; ++k) {
        if (!exists(k, t + args.dt[k], u + args.du[k])) arc(k)[at] = 0;
        occupancy -= double(arc(k)[at]);
      }
      share_out(t, u, weights[at], occupancy);
    });
  }
  return loss;
}

// Grid: sequences.
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1) SkipLoss(const __grid_constant__ Arguments<A> args) {
  for (int b = int(blockIdx.x); b < args.batch; b += int(gridDim.x)) {
    const Sequence<A> sequence(args, b);
    A loss = LossOfNoFrames<A>(sequence.labels);
    if (sequence.frames > 0) {
      int bits = 0;
      const int tiles_of_columns = int(Tiles(args.columns)), tiles = int(Tiles(args.frames)) * tiles_of_columns;
      for (int tile = int(threadIdx.x); tile < tiles; tile += int(blockDim.x)) {
        if (tile / tiles_of_columns * kTile >= sequence.frames) break;
        if (tile % tiles_of_columns * kTile > sequence.labels) continue;
        for (int k = 0; k < args.num_arcs; ++k) bits |= int(sequence.flags[k * tiles + tile]);
      }
      bits = OrBits(bits);
      const Value<A> likelihood = sequence.beta[0];
      const bool wide = NeedsWide<A>(bits, likelihood);
      __syncthreads();  // all have read flags and beta
      if (threadIdx.x == 0) sequence.flags[0] = A(wide);
      loss = wide ? Wide(args, sequence) : LossOf((bits & kBad) != 0, likelihood);
    }
    if (threadIdx.x == 0) args.loss[b] = loss;
  }
}

template <class A>
cudaError_t Run(const LatticeArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  if (!Countable(args) || args.topology.num_arcs > kMaxArcs || args.topology.num_planes > kMaxArcs)
    return cudaErrorInvalidValue;
  const Arguments<A> arguments(args);
  const bool gradient = args.grad_plane != nullptr;
  const unsigned sequences = unsigned(std::min<int64_t>(args.batch, kMaxGridY));
  const unsigned tiles = unsigned(Tiles(args.frames) * Tiles(args.columns));
  const dim3 forth(tiles, sequences, unsigned(arguments.num_arcs)),
      back(tiles, sequences, unsigned(arguments.num_planes));
  const dim3 skew_block(kTile, kSkewRows);
  const int threads = int(std::min<int64_t>(kMaxThreads, Tiles(args.columns) * 32));
  cudaError_t error = cudaSuccess;
  const auto then = [&](auto kernel, dim3 grid, dim3 block, size_t bytes = 0) {
    if (error == cudaSuccess) error = Launch(kernel, grid, block, bytes, stream, arguments);
  };
  if (args.frames > 0) then(&SkipSkew<A, false>, forth, skew_block);
  if (args.frames > 0) {
    const dim3 grid(gradient ? 2 : 1, sequences);
    bool done = false;
    const auto in_shared = [&](auto pairs, auto mine) {
      constexpr int kPairs = decltype(pairs)::value, kMine = decltype(mine)::value, kGroups = 1 + kPairs / kMine;
      const size_t bytes = SharedBytes<A>(kPairs, threads, arguments.span);
      const bool fits = 2 * kPairs >= arguments.num_arcs && arguments.near <= 2 && args.columns <= threads &&
                        threads * kGroups <= kThreadsInShared<A, kMine == 1> && bytes <= SharedMemoryOfBlock();
      if (Loading::active || (fits && !done)) {
        then(&SkipSweepInShared<A, kPairs, kMine>, grid, dim3(threads * kGroups), bytes);
        done = true;
      }
    };
    const auto of_pairs = [&](auto pairs) {
      in_shared(pairs, std::integral_constant<int, 1>());
      in_shared(pairs, pairs);
    };
    of_pairs(std::integral_constant<int, 2>());
    of_pairs(std::integral_constant<int, 3>());
    of_pairs(std::integral_constant<int, 5>());
    if constexpr (sizeof(A) == 4) of_pairs(std::integral_constant<int, 8>());
    if (Loading::active || !done) then(&SkipSweep<A>, grid, dim3(threads));
  }
  then(&SkipLoss<A>, dim3(sequences), dim3(threads));
  if (gradient && args.frames > 0) then(&SkipSkew<A, true>, back, skew_block);
  return error;
}

}  // namespace

cudaError_t SkipLattice(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  return is_double ? Run<double>(args, stream) : Run<float>(args, stream);
}

}  // namespace jax_rnnt::cuda
