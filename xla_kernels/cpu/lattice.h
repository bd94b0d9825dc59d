// Lattices on the CPU. The function takes one sequence, so that the caller decides about threads.
#pragma once

#include "xla_kernels/common/shape.h"
#include "xla_kernels/common/workspace.h"

namespace jax_rnnt::cpu {

// LatticeArgs::workspace: rows of mantissas and exponents of alpha. With unit steps, the gradient keeps the row of
// every kKeptFrames-th frame, where alpha is restarted, and the loss alone keeps none. With arcs that skip frames, all
// rows are kept, with margins for whole vectors.
constexpr int kKeptFrames = 8;
constexpr Workspace kUnitWorkspace{{{2, kKeptFrames, 1}}};
constexpr int64_t kSkipMargin = 16;  // on either side of a row
constexpr Workspace kSkipWorkspace{{{2, 1, 1}, {4 * kSkipMargin, 1, 0}}};

constexpr Workspace LatticeWorkspace(bool unit_steps, bool gradient) {
  return !unit_steps ? kSkipWorkspace : gradient ? kUnitWorkspace : Workspace{};
}
inline int64_t LatticeWorkspace(const LatticeArgs& args, bool gradient) {
  return LatticeWorkspace(IsUnitStep(args.topology), gradient).Elements(args.frames, args.columns);
}

// The lattice of one sequence, with its gradient if args.grad_plane is not null. `is_double`: A is double.
void Lattice(bool is_double, const LatticeArgs& args, int64_t sequence);

}  // namespace jax_rnnt::cpu
