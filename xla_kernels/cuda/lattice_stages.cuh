// The resources of a sweep of lattice.cu: warps, and shared memory for the chunks of its tiles and for the values that
// cross between them.
#pragma once

#include "xla_kernels/cuda/lattice_wide.cuh"

namespace jax_rnnt::cuda {

#ifndef JAX_RNNT_LATTICE_WARPS
#define JAX_RNNT_LATTICE_WARPS 16
#endif
// In float64, more than 8 would leave too few registers.
template <class A>
constexpr int kMaxWarps = sizeof(A) == 4 || JAX_RNNT_LATTICE_WARPS < 8 ? JAX_RNNT_LATTICE_WARPS : 8;
// Up to so many tiles of 32 columns, a lane takes one column, and two in longer rows of float32.
#ifndef JAX_RNNT_LATTICE_NARROW
#define JAX_RNNT_LATTICE_NARROW 4
#endif
constexpr int kNarrow = JAX_RNNT_LATTICE_NARROW;
// Most warps of a sweep that have tiles of kColumns columns a lane, and warps that copy for them.
template <class A, int kColumns>
constexpr int kSweepWarps = sizeof(A) == 4 && kColumns == 1 ? std::max(1, std::min(kMaxWarps<A>, kNarrow))
                                                            : (kMaxWarps<A> + kColumns - 1) / kColumns;
#ifndef JAX_RNNT_LATTICE_COPIERS
#define JAX_RNNT_LATTICE_COPIERS 4
#endif
constexpr int kMaxCopiers = JAX_RNNT_LATTICE_COPIERS;
// With a warp for a last column alone, the scheduler that has it has no warp that copies.
constexpr int kAloneCopiers = std::max(1, std::min(kMaxCopiers, kNarrow) - 1);
constexpr int kAloneThreads = 32 * (kNarrow + kAloneCopiers + 1);

// Chunks of a tile that are being copied or wait in shared memory.
constexpr int kStages = 3;
// Step of a chunk whose values are scaled, so that no mantissa leaves the range of A. The factor must come from the
// value itself: that of a step before may have another exponent.
constexpr int kScaleStep = 1;

template <class A>
__device__ __forceinline__ Value<A> ShuffleUp(Value<A> v) {
  return {__shfl_up_sync(kAll, v.m, 1), __shfl_up_sync(kAll, v.e, 1)};
}
template <class A>
__device__ __forceinline__ Value<A> ShuffleDown(Value<A> v) {
  return {__shfl_down_sync(kAll, v.m, 1), __shfl_down_sync(kAll, v.e, 1)};
}

// Number j of a chunk of values, as mantissas and exponents side by side.
template <class A>
__device__ __forceinline__ Value<A> Get(const Vector<A>* x, int j) {
  constexpr int V = kVector<A>;
  return {x[2 * j / V].of[2 * j % V], Scalar<A>::AsInt(x[2 * j / V].of[2 * j % V + 1])};
}
// The other way round, if `condition`; `x` gathers a vector.
template <class A>
__device__ __forceinline__ void PutIf(unsigned condition, SharedAddress<Vector<A>> to, int j, const Value<A>& value,
                                      Vector<A>& x) {
  constexpr int V = kVector<A>;
  x.of[2 * j % V] = value.m, x.of[2 * j % V + 1] = Scalar<A>::AsFloat(value.e);
  if ((j + 1) % (V / 2) == 0) StoreIf(condition, to + 2 * j / V, x);
}

// A chunk's inputs from a lane's column, in shared memory: arcs and, in the second sweep, values of the other
// direction: alpha or, upwards, beta of the next diagonal.
template <class A, int kSweep, int kColumns>
struct Stage {
  Vector<A> vectors[kSweep == 2 ? 2 * kVectors : kVectors][kColumns][32];
};

// Shared memory of a sweep: for each tile, the values that cross to its neighbour in the last two chunks; zeros, which
// enter the first tile; kStages stages of each tile. AtMiddle uses it first, for the sums of the tiles.
template <class A, int kSweep, int kColumns>
constexpr size_t SharedBytes(int tiles, int warps) {
  return (size_t(tiles) + 1) * 2 * kChunk<A> * sizeof(Value<A>) + warps * kStages * sizeof(Stage<A, kSweep, kColumns>);
}

}  // namespace jax_rnnt::cuda
