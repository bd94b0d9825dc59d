// The lattice of a sequence whose arcs are too far apart for the kernels' numbers, in plain loops.
#pragma once

#include "xla_kernels/common/shape.h"

namespace jax_rnnt::cpu {

// Arcs below -kLimit count as impossible in the kernels' sweeps; arcs above kLimit overflow their exponents.
constexpr int64_t kLimit = 1 << 21;

// Paths through an arc below -kLimit are negligible where the likelihood is at least 2^kFaintLikelihood and no arc
// exceeds MostOfAnArc: all arcs of a path then add less than 2^20.
constexpr int64_t kFaintLikelihood = -(1 << 20);
inline double MostOfAnArc(int64_t frames, int64_t labels) { return double(1 << 20) / double(frames + labels + 1); }

// Whether the result of the fast sweep of a sequence stands.
enum class Verdict {
  kExact,  // paths left out are below rounding
  kBad,    // an arc is NaN or +inf
  kWide,   // finite arcs are so large that it has to be done again
};
// From the exponent of the likelihood, `zero` where it is none. Reads all arcs, so only to be asked where one is above
// MostOfAnArc or NaN, or the likelihood below 2^kFaintLikelihood.
Verdict Judge(bool is_double, const LatticeArgs& args, int64_t sequence, bool zero, int64_t exponent);

// Loss and gradient of one sequence, whatever its arcs are. Gradients may lie over the arcs' log-probabilities. Returns
// false, and writes no gradient, where the loss is +inf.
bool WideLattice(bool is_double, const LatticeArgs& args, int64_t sequence);

}  // namespace jax_rnnt::cpu
