// Unit-step lattices on the CPU: entry points for one sequence, so that the caller decides about threads.
#pragma once

#include "xla_kernels/common/shape.h"

namespace jax_rnnt::cpu {

// Elements of A that LatticeGradient needs per sequence in LatticeArgs::workspace.
int64_t LatticeWorkspace(int64_t frames, int64_t columns);

// One sequence. `is_double`: A is double.
void LatticeLoss(bool is_double, const LatticeArgs& args, int64_t sequence);
void LatticeGradient(bool is_double, const LatticeArgs& args, int64_t sequence);

}  // namespace jax_rnnt::cpu
