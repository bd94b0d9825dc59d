// Lattices on the CPU: the entry point for one sequence, so that the caller decides about threads.
#pragma once

#include "xla_kernels/common/shape.h"

namespace jax_rnnt::cpu {

// Elements of A per sequence that LatticeArgs::workspace must have; 0: none.
int64_t LatticeWorkspace(const LatticeArgs& args, bool gradient);
int64_t UnitLatticeWorkspace(int64_t frames, int64_t columns);
int64_t SkipLatticeWorkspace(int64_t frames, int64_t columns);

// One sequence; with a gradient where args.grad_plane is not null. `is_double`: A is double.
void Lattice(bool is_double, const LatticeArgs& args, int64_t sequence);

}  // namespace jax_rnnt::cpu
