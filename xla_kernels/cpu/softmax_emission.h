// Softmax emission on the CPU. The functions take a range of rows, so that the caller decides about threads.
#pragma once

#include "xla_kernels/common/shape.h"

namespace jax_rnnt::cpu {

// Rows [begin, end) of the B * T * U1 rows. Any split gives the same bits.
void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end);
void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end);

}  // namespace jax_rnnt::cpu
