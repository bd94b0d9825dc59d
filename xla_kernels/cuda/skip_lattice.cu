// Lattice with arcs that skip frames: any table of arcs (multi-blank, token and duration). Alpha, beta, and minus the
// arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Nodes are taken by diagonals n = t + u: every arc leads to a later one. There are four launches. As in lattice.cu, no
// block waits for another and nothing is atomic:
//
//   SkewIn    all of the GPU: each arc's log-probabilities into diagonal order, node (t, u) to row n mod T of a plane
//   Sweep     two blocks per sequence, one for beta and one for alpha (which the loss alone does not need), with one
//             barrier per diagonal
//   Loss      a block per sequence: the loss from beta, or wide mode (lattice_values.cuh) if the sequence needs it
//   SkewBack  all of the GPU: posteriors from alpha, the arc and beta, and back into frame order
//
// The longest arc may span many diagonals, so their values lie in shared memory and not in registers. Of the arcs of a
// node, at most two lead to the next diagonal, for all topologies of the library. The sum over the others is known a
// diagonal earlier: other warps compute it, a pair of arcs each, beside probabilities and copies (see SharedSweep).
// This takes up to 16 arcs (10 in float64), 256 columns, and shared memory for all of it. Other tables and sizes read
// earlier diagonals from memory, that is from the L1 cache, and take a few thousand cycles per diagonal.
//
// lab/notes/lattice.md has the attempts that led here, with their cycles.
//
// With K arcs, P planes and E pairs of an arc and one of its planes (K, or 2 K if every arc is a sum of two), a node
// moves 4 E + 4 K bytes in SkewIn, 8 K + 16 in the sweeps and 12 E + 12 P in SkewBack, in float32; beyond
// the limits above 24 K + 16 in the sweeps, often from a cache. The logits move 3 V * 4.
#include "xla_kernels/cuda/skip_shared.cuh"
#include "xla_kernels/cuda/skip_wide.cuh"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_SKIP_THREADS
#define JAX_RNNT_SKIP_THREADS 256
#endif
constexpr int kMaxThreads = JAX_RNNT_SKIP_THREADS;

// A tile, and its nodes in shared memory.
template <class A>
struct SkipTile : Tile {
  static constexpr int kPitch = kTile + 1;

  __device__ __forceinline__ SkipTile(const Arguments<A>& args, A* nodes) : Tile(args.columns), nodes(nodes) {}

  __device__ __forceinline__ A& Node(int t) const { return nodes[(t - first_t) * kPitch + lane]; }
  // Calls visit(t, place in diagonal order) for the nodes of the sequence.
  template <class Visit>
  __device__ __forceinline__ void ByDiagonals(const Arguments<A>& args, const Sequence<A>& sequence,
                                              Visit visit) const {
    for (int d = int(threadIdx.y); d < 2 * kTile - 1; d += kSkewRows) {
      const int t = first_t + d - lane;
      if (t < first_t || t >= first_t + kTile || !sequence.Inside(t, u)) continue;
      visit(t, Sequence<A>::Position(args, t + u, u));
    }
  }

  A* nodes;
};

// Grid: (tiles, sequences, arcs). Arcs that do not exist become -inf, and a flag gets the bits of the tile's arcs.
template <class A>
__global__ void __launch_bounds__(kTile* kSkewRows, 4) SkewIn(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(kTile * kSkewRows);
  JAX_RNNT_SHARED_ARRAY(A, nodes, kTile * SkipTile<A>::kPitch);
  const SkipTile<A> tile(args, nodes);
  const int k = int(blockIdx.z);
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    if (tile.Outside(sequence)) continue;
    const Limits<A> limits(sequence.frames, sequence.labels);
    int bits = 0;
    tile.ByFrames(args, sequence, b, [&](int t, int64_t i) {
      if (!sequence.Inside(t, tile.u)) return;
      A x = -kInfinity<A>;
      const bool ends = t + args.dt[k] == sequence.frames && tile.u + args.du[k] == sequence.labels;
      if (tile.u + args.du[k] <= sequence.labels && (!ends || args.may_end[k])) {
        x = args.log_plane[args.plane[k]][i];
        if (args.other[k] >= 0) x += args.log_plane[args.other[k]][i];
      }
      bits |= limits.Bits(x);
      tile.Node(t) = x;
    });
    bits = OrBits(bits);
    A* const arc = sequence.Arc(k);
    tile.ByDiagonals(args, sequence, [&](int t, int i) { arc[i] = tile.Node(t); });
    if (threadIdx.x == 0 && threadIdx.y == 0) sequence.flags[k * gridDim.x + blockIdx.x] = A(bits);
    __syncthreads();
  }
}

// Grid: (tiles, sequences, planes). Minus the sum of the posteriors of a plane's arcs, with zeros outside the lengths
// and if there is no path, NaN if the loss is NaN.
template <class A>
__global__ void __launch_bounds__(kTile* kSkewRows, 4) SkewBack(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(kTile * kSkewRows);
  using S = Scalar<A>;
  JAX_RNNT_SHARED_ARRAY(A, nodes, kTile * SkipTile<A>::kPitch);
  const SkipTile<A> tile(args, nodes);
  const int first_arc = args.first_arc[blockIdx.z], end = args.first_arc[blockIdx.z + 1];
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    const A loss = args.loss[b];
    const bool finite = loss < kInfinity<A>;
    if (finite && !tile.Outside(sequence)) {
      const bool wide = sequence.flags[0] != 0;
      Value<A> minus_inverse = sequence.beta[0];
      minus_inverse = {A(-1) / minus_inverse.m, -minus_inverse.e};
      tile.ByDiagonals(args, sequence, [&](int t, int i) {
        const Value<A> alpha = wide ? Zero<S>() : sequence.alpha[i];
        A sum = 0;
        for (int j = first_arc; j < end; ++j) {
          const int k = args.arc_of_plane[j];
          const A arc = sequence.Arc(k)[i];
          if (wide) {
            sum += arc;
            continue;
          }
          const Value<A> through = Probability(arc) * sequence.Beyond(args, k, t, tile.u);
          const auto exponent = S::Max(through.e, S::kZero) + (alpha.e + minus_inverse.e);
          sum += through.m * (alpha.m * minus_inverse.m) * PowerOfTwo<S>(exponent);
        }
        tile.Node(t) = sum;
      });
    }
    __syncthreads();
    tile.ByFrames(args, sequence, b, [&](int t, int64_t i) {
      const bool used = sequence.Inside(t, tile.u);
      args.grad_plane[blockIdx.z][i] = used && finite ? tile.Node(t) : used && loss != loss ? loss : A(0);
    });
    __syncthreads();
  }
}

// Threads of a block: with a group per pair of arcs, or one for all pairs. Bounds the registers to 80 or 128.
template <class A, bool kSpread>
constexpr int kThreadsInShared = kSpread ? kMaxThreads * 3 / (sizeof(A) / 4) : 2 * kMaxThreads;

// Grid: (beta and, for a gradient, alpha; sequences).
template <class A, int kPairs, int kMine>
__global__ void __launch_bounds__(kThreadsInShared<A, kMine == 1>, 1)
    SkipSweepInShared(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST((kThreadsInShared<A, kMine == 1>));
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    if (sequence.frames == 0) continue;
    if (blockIdx.x == 0) {
      SharedSweep<A, false, kPairs, kMine>(args, sequence, shared).Run();
    } else {
      SharedSweep<A, true, kPairs, kMine>(args, sequence, shared).Run();
    }
    __syncthreads();  // the next sequence overwrites what copies of this one have written
  }
}

// Grid: (beta and, for a gradient, alpha; sequences).
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1) SkipSweep(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(kMaxThreads);
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

// Grid: sequences.
template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1) SkipLoss(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(kMaxThreads);
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
  if (args.frames > 0) then(&SkewIn<A>, forth, skew_block);
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
  if (gradient && args.frames > 0) then(&SkewBack<A>, back, skew_block);
  return error;
}

}  // namespace

cudaError_t SkipLattice(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  return is_double ? Run<double>(args, stream) : Run<float>(args, stream);
}

}  // namespace jax_rnnt::cuda
