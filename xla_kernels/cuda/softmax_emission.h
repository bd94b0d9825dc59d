// Softmax emission on the GPU: common/shape.h has the arguments and says what is computed.
#pragma once

#include "xla_kernels/common/shape.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// Enqueue the work on the stream; the error is that of the launch.
cudaError_t EmissionForward(DType dtype, const EmissionForwardArgs& args, cudaStream_t stream);
cudaError_t EmissionBackward(DType dtype, const EmissionBackwardArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
