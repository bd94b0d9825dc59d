// Lattices on the GPU; common/shape.h defines arguments and results.
#pragma once

#include <cstdint>

#include "xla_kernels/common/shape.h"
#include "xla_kernels/common/workspace.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// Nodes, diagonals and sequences are counted in int32, with room to step beyond the last.
constexpr int64_t kMaxNodes = INT32_MAX / 2, kMaxDiagonals = INT32_MAX / 4, kMaxSequences = INT32_MAX;
// Most columns of the kernel for unit steps: values that cross between tiles must fit into the shared memory that a
// block may have. A device of capability 7.5 has 64 KiB; all others have the 99 KiB of 8.6, or more.
constexpr int64_t kSharedBytes = 99 << 10;
int64_t MaxUnitColumns(int64_t shared_bytes = kSharedBytes);
inline bool Countable(const LatticeArgs& args) {
  return args.frames * args.columns <= kMaxNodes && args.frames + args.columns <= kMaxDiagonals &&
         args.batch <= kMaxSequences;
}

// LatticeArgs::workspace.
Workspace LatticeWorkspace(bool unit_steps, int64_t num_arcs);
inline int64_t LatticeWorkspace(const LatticeArgs& args, bool) {
  return LatticeWorkspace(IsUnitStep(args.topology), args.topology.num_arcs).Elements(args.frames, args.columns);
}

// Enqueues the work on the stream, with the gradient if args.grad_plane is not null. Returns the error of the launches.
cudaError_t Lattice(bool is_double, const LatticeArgs& args, cudaStream_t stream);

// The same for arcs that skip frames; Lattice calls it.
cudaError_t SkipLattice(bool is_double, const LatticeArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
