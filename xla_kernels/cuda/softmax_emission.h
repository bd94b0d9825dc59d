// Softmax emission on the GPU; common/shape.h defines arguments and results.
#pragma once

#include <cstdint>

#include "xla_kernels/common/shape.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// Nodes of a sequence and sequences are counted in int32.
constexpr int64_t kMaxEmissionNodes = INT32_MAX, kMaxEmissionSequences = INT32_MAX;

// Enqueue the work on the stream and return the error of the launch.
cudaError_t EmissionForward(DType dtype, const EmissionForwardArgs& args, cudaStream_t stream);
cudaError_t EmissionBackward(DType dtype, const EmissionBackwardArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
