// Lattices on the GPU: common/shape.h has the arguments and says what is computed.
#pragma once

#include "xla_kernels/common/shape.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// Elements of A per sequence that LatticeArgs::workspace must have.
int64_t LatticeWorkspace(const LatticeArgs& args, bool gradient);

// Enqueues the work on the stream, with a gradient where args.grad_plane is not null; the error is that of the
// launches.
cudaError_t Lattice(bool is_double, const LatticeArgs& args, cudaStream_t stream);

// The same for arcs that skip frames; called by the two above.
int64_t SkipLatticeWorkspace(const LatticeArgs& args);
cudaError_t SkipLattice(bool is_double, const LatticeArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
