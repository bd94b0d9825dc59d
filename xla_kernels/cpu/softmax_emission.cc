// Softmax emission: rows of V logits -> log-probabilities of the arcs, and cotangents of the arcs -> gradient of the
// logits.
//
// Each pass reads every logit once, and computes one exp for it. The forward pass does not look for the maximum first:
// it subtracts the logit of the first blank. Then the sum of the exponentials is at least 1, and a blank probability
// near 1 is as exact as with the maximum. If the sum is above 2^30 or NaN, the row is summed again with its maximum.
// Work per row (log, classes of the arcs, special values) is done for a group of kWidth rows at once, one row per lane.
// The result does not depend on the grouping, so a range of rows may be split anywhere without changing a bit.
//
// Long rows of zeros (padding) bypass the caches, so they are not read first. lab/notes/cpu.md has times, and what was
// tried.
#include "xla_kernels/cpu/softmax_emission.h"

#include "xla_kernels/cpu/softmax_backward.h"
#include "xla_kernels/cpu/softmax_forward.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  ForType<Half, BFloat16>(dtype, [&](auto x) {
    using T = decltype(x);
    (args.shape.bernoulli ? Forward<T, true> : Forward<T, false>)(args, begin, end);
  });
}

void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  ForType<Half, BFloat16>(dtype, [&](auto x) {
    using T = decltype(x);
    (args.shape.bernoulli ? Backward<T, true> : Backward<T, false>)(args, begin, end);
  });
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
