// Size of the lattice's workspace as a table of numbers, since Python reads it too, where dimensions may be symbolic.
#pragma once

#include <cstdint>

namespace jax_rnnt {

// `elements` for each block of `frames` by `columns` nodes. 0: the block spans that axis.
struct WorkspaceTerm {
  int64_t elements, frames, columns;

  constexpr int64_t Size(int64_t all_frames, int64_t all_columns) const {
    return elements * Blocks(all_frames, frames) * Blocks(all_columns, columns);
  }
  static constexpr int64_t Blocks(int64_t n, int64_t extent) { return extent == 0 ? 1 : (n + extent - 1) / extent; }
};

// The terms add up to the elements of A per sequence, rounded up to an even number to align pairs in every sequence.
struct Workspace {
  WorkspaceTerm terms[3];

  constexpr int64_t Elements(int64_t frames, int64_t columns) const {
    int64_t sum = 0;
    for (const WorkspaceTerm& term : terms) sum += term.Size(frames, columns);
    return (sum + 1) / 2 * 2;
  }
};

}  // namespace jax_rnnt
