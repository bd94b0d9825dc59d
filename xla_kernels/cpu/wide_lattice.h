// The lattice of a sequence with arcs too far apart for the kernels' numbers, in plain loops.
#pragma once

#include "xla_kernels/common/shape.h"

namespace jax_rnnt::cpu {

// Arcs below -kLimit count as impossible in the kernels' sweeps; arcs above kLimit overflow their exponents.
constexpr int64_t kLimit = 1 << 21;

// Paths through an arc below -kLimit are negligible if the likelihood is at least 2^kFaintLikelihood and no arc exceeds
// MostOfAnArc: then the arcs of a path add less than 2^20.
constexpr int64_t kFaintLikelihood = -(1 << 20);
inline double MostOfAnArc(int64_t frames, int64_t labels) { return double(1 << 20) / double(frames + labels + 1); }

// Whether the result of the fast sweep of a sequence is valid.
enum class Verdict {
  kExact,  // valid: the paths left out are below rounding
  kBad,    // the loss is NaN: an arc is NaN or +inf
  kWide,   // not valid: finite arcs are so large that WideLattice must run
};
// `exponent` is the likelihood's; `zero` says whether that is 0. It reads all arcs, so call it only if an arc is NaN or
// above MostOfAnArc, or the likelihood is below 2^kFaintLikelihood.
Verdict Judge(bool is_double, const LatticeArgs& args, int64_t sequence, bool zero, int64_t exponent);

// Loss and gradient of one sequence, for any finite arcs. Gradients may overwrite the log-probabilities of the arcs. If
// the loss is +inf, returns false and writes no gradient.
bool WideLattice(bool is_double, const LatticeArgs& args, int64_t sequence);

}  // namespace jax_rnnt::cpu
