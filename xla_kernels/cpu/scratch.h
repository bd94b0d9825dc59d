#pragma once

#include <cstddef>

namespace jax_rnnt::cpu {

// At least `bytes` bytes, aligned to 64, for the calling thread. They are valid until its next call; the memory is kept
// until the thread ends.
void* ThreadScratch(size_t bytes);

}  // namespace jax_rnnt::cpu
