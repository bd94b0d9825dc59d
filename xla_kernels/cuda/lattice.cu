// Lattice of unit steps: alpha, beta, and minus the arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Nodes are taken by diagonals n = t + u (monotonic: n = t): every arc leads to the next diagonal, in the same column
// or in the next one. There are four launches. Blocks synchronise only at the boundaries between launches: no block
// waits for another, and nothing is atomic. So results have the same bits every time, and launches can be captured.
//
//   Skew     all of the GPU: log-probabilities into diagonal order in the workspace (lattice_skew.cuh)
//   Sweep 1  two blocks per sequence: alpha over the first half of the diagonals, beta over the second, both kept
//   Sweep 2  the same blocks continue through the other halves, where the other block left its values, and write
//            posteriors over the log-probabilities in the workspace (lattice_sweep.cuh); or wide mode, if a sequence
//            needs it (lattice_wide.cuh)
//   Skew     posteriors back into frame order; zeros outside the lengths
//
// The loss alone needs Skew, Sweep 1 and the sum over the arcs between the halves: half of the steps.
//
// A lane takes one column, or, in float32 beyond 128 columns, two: a second warp on a scheduler would wait where the
// first one waits. If kNarrow full tiles have one more column (U = 128, or 256 at two columns a lane), the last column
// does not get a tile, which would give a scheduler a second warp, or every lane a second column: one more warp takes
// its steps (lattice_alone.cuh).
//
// Memory traffic is 72 bytes per node in float32. The two skewing passes have 32 of them, at the speed of the memory;
// without them, reading frame order would cost 32 sectors per access on the critical path instead of 4.
// lab/notes/lattice.md has the attempts that led here, with their cycles.
#include "xla_kernels/cuda/lattice.h"

#include <algorithm>

#include "xla_kernels/cuda/lattice_alone.cuh"

namespace jax_rnnt::cuda {
namespace {

template <class A, int kColumns>
constexpr int kSweepThreads = 32 * (kSweepWarps<A, kColumns> + std::min(kMaxCopiers, kSweepWarps<A, kColumns>));

template <class A, int kSweep, bool kUp, int kColumns, bool kAlone>
__device__ __forceinline__ void SweepSequence(const Arguments<A>& args, int b, Value<A>* shared) {
  const Sequence<A> sequence(args, b);
  if (sequence.frames == 0) {
    if (kSweep == 2 && kUp && threadIdx.x == 0) args.loss[b] = LossOfNoFrames<A>(sequence.labels);
    return;
  }
  Sweeper<A, kSweep, kUp, kColumns, kAlone> sweep(args, sequence, b, shared);
  // The second sweep divides its running values by minus the likelihood, so their products with those of the other
  // direction are minus posteriors.
  if (kSweep == 2) {
    const Middle<A> middle = AtMiddle(args, sequence, shared);
    if (!kUp && middle.wide) return;
    const A loss = middle.wide ? Wide(args, sequence, b) : middle.loss;
    if (kUp && threadIdx.x == 0) args.loss[b] = loss;
    if (middle.wide || !(loss < kInfinity<A>)) return;
    sweep.minus_inverse = {A(-1) / middle.likelihood.m, Scalar<A>::kExponentBias - middle.likelihood.e};
  }
  if (sweep.lane < 2 * kChunk<A> && sweep.warp == 0) sweep.zeros[sweep.lane] = Zero<Scalar<A>>();
  if constexpr (kAlone) {
    if (sweep.warp == sweep.all_warps) {
      if (sweep.alone) {
        LastColumn<A, kSweep, kUp, kColumns>(sweep).Run();
      } else {
        sweep.Meet(sweep.rounds);
      }
      return;
    }
  }
  sweep.Run();
}

// Grid: (upwards and downwards, sequences); a block of up to kSweepWarps<A, kColumns> warps.
//
// Each direction has a loop of its own: on one loop around both, the ptxas of CUDA 12.1 to 12.4 fails for sm_90, if a
// lane takes two columns.
template <class A, int kSweep, int kColumns, bool kAlone>
__device__ __forceinline__ void SweepBlock(const Arguments<A>& args) {
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  const auto every_sequence = [&](auto up) {
    for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
      SweepSequence<A, kSweep, decltype(up)::value, kColumns, kAlone>(args, b, shared);
      __syncthreads();
    }
  };
  if (blockIdx.x == 0) {
    every_sequence(std::true_type());
  } else {
    every_sequence(std::false_type());
  }
}
template <class A, int kSweep, int kColumns>
__global__ void __launch_bounds__(kSweepThreads<A, kColumns>, 1) Sweep(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST((kSweepThreads<A, kColumns>));
  SweepBlock<A, kSweep, kColumns, false>(args);
}
// The same with one more warp, for the last column of kNarrow full tiles and one column.
template <class A, int kSweep, int kColumns>
__global__ void __launch_bounds__(kAloneThreads, 1) SweepAlone(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(kAloneThreads);
  SweepBlock<A, kSweep, kColumns, true>(args);
}

// The loss after Sweep 1, if no gradient is asked for. Grid: sequences.
template <class A>
__global__ void __launch_bounds__(32 * kMaxWarps<A>, 1) Total(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(32 * kMaxWarps<A>);
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  for (int b = int(blockIdx.x); b < args.batch; b += int(gridDim.x)) {
    const Sequence<A> sequence(args, b);
    A loss = LossOfNoFrames<A>(sequence.labels);
    if (sequence.frames > 0) {
      const Middle<A> middle = AtMiddle(args, sequence, shared);
      loss = middle.wide ? Wide(args, sequence, b) : middle.loss;
    }
    if (threadIdx.x == 0) args.loss[b] = loss;
  }
}

// Tiles that fit beside one warp.
template <class A>
int64_t MaxTiles(int64_t shared_bytes) {
  constexpr int64_t kFixed = SharedBytes<A, 2, 1>(0, 1), kEach = SharedBytes<A, 2, 1>(1, 1) - kFixed;
  return std::max<int64_t>((shared_bytes - kFixed) / kEach, 0);
}

template <class A, int kColumns>
cudaError_t RunSweeps(const LatticeArgs& args, cudaStream_t stream) {
  const Arguments<A> arguments(args, kColumns);
  const bool gradient = args.grad_plane != nullptr;
  const int tiles = int(Tiles(args.columns)), sweep_tiles = (tiles + kColumns - 1) / kColumns;
  const size_t shared = SharedMemoryOfBlock();
  // In float32, the last column of kNarrow full tiles and one column has a warp that does nothing else.
  constexpr bool kCanBeAlone = sizeof(A) == 4 && kNarrow <= kSweepWarps<A, kColumns>;
  const bool alone = kCanBeAlone && args.columns == kNarrow * 32 * kColumns + 1 &&
                     SharedBytes<A, 2, kColumns>(sweep_tiles, kNarrow) <= shared;
  int warps = alone ? kNarrow : std::min(sweep_tiles, kSweepWarps<A, kColumns>);
  while (warps > 1 && SharedBytes<A, 2, kColumns>(sweep_tiles, warps) > shared) --warps;
  const unsigned sequences = unsigned(std::min<int64_t>(args.batch, kMaxGridY));
  const dim3 skew_grid(unsigned(Tiles(args.frames) * tiles), sequences), skew_block(kTile, kSkewRows);
  const dim3 grid(2, sequences), block(alone ? kAloneThreads : 32 * (warps + std::min(kMaxCopiers, warps)));

  cudaError_t error = cudaSuccess;
  const auto then = [&](auto kernel, dim3 grid, dim3 block, size_t shared) {
    if (error == cudaSuccess) error = Launch(kernel, grid, block, shared, stream, arguments);
  };
  if (args.frames > 0) then(&Skew<A, false>, skew_grid, skew_block, 0);
  const auto sweep = [&](auto which) {
    constexpr int kSweep = decltype(which)::value;
    // The sums of the tiles of 32 columns lie in the same memory as the values that cross, at least as many.
    const size_t bytes = SharedBytes<A, kSweep, kColumns>(sweep_tiles, warps);
    if (Loading::active || !alone) then(&Sweep<A, kSweep, kColumns>, grid, block, bytes);
    if constexpr (kCanBeAlone) {
      if (Loading::active || alone) then(&SweepAlone<A, kSweep, kColumns>, grid, block, bytes);
    }
  };
  sweep(std::integral_constant<int, 1>());
  if (gradient) {
    sweep(std::integral_constant<int, 2>());
    if (args.frames > 0) then(&Skew<A, true>, skew_grid, skew_block, 0);
  } else {
    const dim3 threads(32 * std::min(tiles, kMaxWarps<A>));
    then(&Total<A>, dim3(sequences), threads, tiles * sizeof(Value<A>));
  }
  return error;
}

template <class A>
cudaError_t Run(const LatticeArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  if (!Countable(args)) return cudaErrorInvalidValue;
  if constexpr (sizeof(A) == 4) {
    if (Tiles(args.columns - 1) > kNarrow) return RunSweeps<A, 2>(args, stream);
  }
  return RunSweeps<A, 1>(args, stream);
}

}  // namespace

int64_t MaxUnitColumns(int64_t shared_bytes) {
  return std::min(MaxTiles<float>(shared_bytes), MaxTiles<double>(shared_bytes)) * kTile;
}

// Arcs that skip frames: all arcs, mantissas and exponents of alpha and beta, a flag per tile of each arc.
Workspace LatticeWorkspace(bool unit_steps, int64_t num_arcs) {
  if (unit_steps) return {{{kArcs, kFrames, 1}, {kPerColumn, 0, 1}, {1, kTile, kTile}}};
  return {{{4 + num_arcs, 1, 1}, {num_arcs, kTile, kTile}}};
}

cudaError_t Lattice(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  if (!IsUnitStep(args.topology)) return SkipLattice(is_double, args, stream);
  return is_double ? Run<double>(args, stream) : Run<float>(args, stream);
}

}  // namespace jax_rnnt::cuda
