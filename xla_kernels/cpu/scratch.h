#pragma once

#include <cstddef>

namespace jax_rnnt::cpu {

// At least `bytes` bytes, aligned to 64, that belong to the calling thread: valid until its next call, kept until its
// end.
void* ThreadScratch(size_t bytes);

}  // namespace jax_rnnt::cpu
