// Softmax emission: rows of V logits -> log-probabilities of the arcs, and cotangents of the arcs -> gradient of the
// logits.
//
// Each pass reads every logit once, and computes one exp for it. The forward pass does not look for the maximum first:
// it subtracts the logit of the first blank. Then the sum of the exponentials is at least 1, and a blank probability
// near 1 is as exact as with the maximum. If the sum is above 2^30 or NaN, the row is summed again with its maximum.
// Work per row (log, classes of the arcs, special values) is done for a group of kWidth rows at once, one row per lane.
// The result does not depend on the grouping, so a range of rows may be split anywhere without changing a bit.
//
// Measured on one core of a Zen 4 at 3.6 GHz, GCC 12, AVX-512, float32, in ns per row, forward + backward in place,
// minima. The loop to compare with reads twice, writes once, knows no rows, and uses a polynomial alone for exp:
//       V       32    500   1024   4096
//    here       14    127    241    992
//    loop        8    135    276   1144
// AVX2 takes 1.2 times as long, SSE2 4 times. At V = 32 the work around the two vectors of a row is still a third of
// the time. Rows of up to four vectors get the gradients of their arcs in registers (14% less than the correction
// afterwards that long rows use); each function that is not inlined there costs 2 ns. Five durations cost 7 ns + 7 ns a
// row, and as much again if they make rows end at odd addresses; a Bernoulli blank costs 6 ns + 5 ns at V = 500.
//
// Long rows of zeros (padding) bypass the caches, so they are not read first. Value and gradient of ragged batches with
// 52% to 61% valid nodes then take 2% to 16% less (minima of two runs at V = 500, 1024 and 4096; bfloat16: 1%).
//
// Tried and left out:
//   the maximum of each row, or of its blocks, first         forward +13% at V = 500, +19% at V = 1024
//   the arcs' own classes of a group before its rows         forward +37%: 16 streams defeat the hardware's prefetching
//   no prefetching in software                               forward +60%, backward +35% at V = 500
//   prefetching rows of up to four vectors                   +2% to +14%
//   one memset for each run of rows of zeros                 backward of padded batches +80% at V = 32, none at V = 500
//   the durations of a group before its rows                 backward +20% at V = 64, for the same reason as above
//   the loop over a group inside the choice of a row's size  backward +8% at V = 32: GCC spills
#include "xla_kernels/cpu/softmax_emission.h"

#include "xla_kernels/cpu/softmax_backward.h"
#include "xla_kernels/cpu/softmax_forward.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class T>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  (args.shape.bernoulli ? Forward<T, true> : Forward<T, false>)(args, begin, end);
}

template <class T>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  (args.shape.bernoulli ? Backward<T, true> : Backward<T, false>)(args, begin, end);
}

void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kF16:
      return Forward<Half>(args, begin, end);
    case DType::kBF16:
      return Forward<BFloat16>(args, begin, end);
    case DType::kF32:
      return Forward<float>(args, begin, end);
    case DType::kF64:
      return Forward<double>(args, begin, end);
  }
}

void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kF16:
      return Backward<Half>(args, begin, end);
    case DType::kBF16:
      return Backward<BFloat16>(args, begin, end);
    case DType::kF32:
      return Backward<float>(args, begin, end);
    case DType::kF64:
      return Backward<double>(args, begin, end);
  }
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
