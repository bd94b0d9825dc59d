// Lattice of unit steps on the GPU: common/shape.h has the arguments and says what is computed.
#pragma once

#include "xla_kernels/common/shape.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// Elements of A per sequence that LatticeArgs::workspace must have; here the loss alone needs it too.
int64_t LatticeWorkspace(int64_t frames, int64_t columns);

// Enqueue the work on the stream; the error is that of the launch.
cudaError_t LatticeLoss(bool is_double, const LatticeArgs& args, cudaStream_t stream);
cudaError_t LatticeGradient(bool is_double, const LatticeArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
