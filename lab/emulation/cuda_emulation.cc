// The scheduler of the emulation: fibers, barriers, collectives, shared memory, and annotations for the sanitizers.
//
// Launches run one at a time, on the calling thread. A fiber that waits or ends switches directly to the next one that
// can run; control returns to the stack of the launching thread only after a round over all threads of the block. If a
// round runs no thread, none can ever run: this is reported, with the places where threads wait. After an error the
// fibers are abandoned, and the next launch starts them afresh; kernels own nothing that would leak.
#include "lab/emulation/fibers.h"

namespace jax_rnnt::emulation {
namespace {

// ---- blocks ----

// splitmix64
JAX_RNNT_SCHEDULER uint64_t Random(uint64_t below) {
  uint64_t z = machine.random += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return (z ^ z >> 31) % below;
}

// Shared memory of the block, filled with NaN and followed by a gap. It is aligned to 16 bytes and not more, as CUDA
// promises.
JAX_RNNT_SCHEDULER void* AllocateShared(size_t bytes) {
  char* const data = machine.shared + 16 + machine.shared_used;
  machine.shared_used += (bytes + 31) / 16 * 16;
#if JAX_RNNT_ASAN
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
#endif
  for (size_t i = 0; i < bytes; ++i) static_cast<volatile char*>(data)[i] = char(0xff);
  return data;
}

constexpr size_t kSharedBytes = kSharedLimit + kStaticLimit + (64 << 10);  // with room for gaps

JAX_RNNT_SCHEDULER bool StartBlock() {
  ++machine.block;
#if JAX_RNNT_TSAN
  // Consecutive blocks run on different fibers, as far as ThreadSanitizer can distinguish so many: accesses of one
  // fiber are ordered, but blocks are not.
  const unsigned sets = std::max(1u, kSanitizedThreads / machine.num_threads);
  machine.first_fiber = unsigned(machine.block % sets) * machine.num_threads;
  tokens = Renew(tokens, sizeof(Tokens));
  machine.shared = Renew(machine.shared, kSharedBytes);
#else
  if (machine.shared == nullptr) machine.shared = static_cast<char*>(aligned_alloc(64, kSharedBytes));
#endif
  if (machine.shared == nullptr) return false;
#if JAX_RNNT_ASAN
  ASAN_POISON_MEMORY_REGION(machine.shared, kSharedBytes);
#endif
  machine.shared_used = machine.static_bytes = 0;
  AllocateShared(machine.dynamic_bytes);
  machine.barrier = {};
  for (unsigned i = 0; i < kMaxWarps; ++i) machine.warps[i].alive = machine.warps[i].num_groups = 0;
  machine.num_alive = machine.num_threads;
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    if (!StartThread(FiberOf(i), i)) return false;
    machine.warps[i / 32].alive |= 1u << i % 32;
    machine.round[i] = machine.order == Order::kReverse ? machine.num_threads - 1 - i : i;
  }
  JAX_RNNT_ORDER(Release(&tokens->start));
  return true;
}

JAX_RNNT_SCHEDULER void RunBlock() {
  if (!StartBlock()) {
    Append("out of memory");
    machine.failed = true;
  }
  while (!machine.failed && machine.num_alive > 0) {
    if (machine.order == Order::kRandom) {
      for (unsigned i = machine.num_threads; i > 1; --i) std::swap(machine.round[i - 1], machine.round[Random(i)]);
    }
    machine.round_position = machine.round_ran = 0;
    SwitchAway();
    if (!machine.failed && machine.round_ran == 0) FailDeadlocked();
  }
}

JAX_RNNT_SCHEDULER bool ReadOrder() {
  const char* const order = getenv("JAX_RNNT_EMULATION_ORDER");
  char* end = nullptr;
  if (order == nullptr || *order == 0 || strcmp(order, "forward") == 0) {
    machine.order = Order::kForward;
  } else if (strcmp(order, "reverse") == 0) {
    machine.order = Order::kReverse;
  } else if (strncmp(order, "random:", 7) == 0 && (machine.random = strtoull(order + 7, &end, 10), *end == 0)) {
    machine.order = Order::kRandom;
  } else {
    return false;
  }
  return true;
}

JAX_RNNT_SCHEDULER void RunGrid() {
  const uint64_t blocks = uint64_t(grid_size.x) * grid_size.y * grid_size.z;
  std::vector<uint64_t> shuffled(machine.order == Order::kRandom ? blocks : 0);
  for (uint64_t i = 0; i < shuffled.size(); ++i) {
    const uint64_t j = Random(i + 1);
    shuffled[i] = shuffled[j];
    shuffled[j] = i;
  }
  for (uint64_t i = 0; i < blocks && !machine.failed; ++i) {
    const uint64_t block = machine.order == Order::kRandom    ? shuffled[i]
                           : machine.order == Order::kReverse ? blocks - 1 - i
                                                              : i;
    block_index = {unsigned(block % grid_size.x), unsigned(block / grid_size.x % grid_size.y),
                   unsigned(block / grid_size.x / grid_size.y)};
    RunBlock();
  }
}

// ---- collectives ----

JAX_RNNT_SCHEDULER bool Same(Operation a, Operation b) { return a.name == b.name && a.argument == b.argument; }

// Reports where the other lanes are.
[[noreturn]] JAX_RNNT_SCHEDULER void FailDifferent(const char* name, Caller caller, const char* other, Caller where) {
  char problem[160];
  snprintf(problem, sizeof problem, "meets another place or kind, %s at %s:%d", other, BaseName(where.file),
           where.line);
  Fail(name, caller, problem);
}

// Gives `value` to the lanes of `mask` and waits for theirs. Returns the values of all lanes.
JAX_RNNT_SCHEDULER const uint64_t* Meet(uint32_t mask, uint64_t value, Operation operation, Caller caller,
                                        bool orders) {
  Fiber* const self = machine.current;
  const unsigned lane = self->linear % 32;
  Warp& warp = machine.warps[self->linear / 32];
  if ((mask >> lane & 1) == 0) Fail(operation.name, caller, "the caller's lane is not in its mask");
  if ((mask & ~warp.alive) != 0)
    Fail(operation.name, caller, "the mask names a lane that has exited or does not exist");
  unsigned index = 0;
  while (index < warp.num_groups && warp.groups[index].mask != mask) ++index;
  if (index == kMaxGroups) Fail(operation.name, caller, "more different masks in a warp than the emulation keeps");
  Group& group = warp.groups[index];
  if (index == warp.num_groups) {
    ++warp.num_groups;
    group.mask = mask;
    group.arrived = 0;
    for (uint32_t& entered : group.entered) entered = 0;
  }
  const unsigned slot = group.entered[lane]++ % 2;
  if (group.arrived == 0) {
    group.operation[slot] = operation;
    group.caller[slot] = caller;
  } else if (!Same(group.operation[slot], operation) || group.caller[slot].line != caller.line) {
    FailDifferent(operation.name, caller, group.operation[slot].name, group.caller[slot]);
  }
  group.value[slot][lane] = value;
  group.arrived |= 1u << lane;
  if (orders) JAX_RNNT_ORDER(Release(&tokens->warp[self->linear / 32][index][slot]));
  if (group.arrived == mask) {
    group.arrived = 0;
    const unsigned first = self->linear / 32 * 32;
    for (unsigned i = 0; i < 32; ++i) {
      if ((mask >> i & 1) == 0) continue;
      Fiber* const other = FiberOf(first + i);
      if (other != self) other->state = State::kReady;  // its lane has arrived, so it waits for this group
    }
  } else {
    Wait(State::kInCollective, operation.name, caller);
  }
  if (orders) JAX_RNNT_ORDER(Acquire(&tokens->warp[self->linear / 32][index][slot]));
  return group.value[slot];
}

}  // namespace

// ---- interface ----

JAX_RNNT_SCHEDULER int Lane() { return int(machine.current->linear % 32); }
JAX_RNNT_SCHEDULER void AtMost(unsigned threads, Caller caller) {
  if (machine.num_threads > threads) Fail("JAX_RNNT_AT_MOST", caller, "a larger block than __launch_bounds__ promise");
}
JAX_RNNT_SCHEDULER bool CopiesRunAtOnce() { return machine.order == Order::kReverse; }
JAX_RNNT_SCHEDULER Copies& ThreadCopies() { return machine.current->copies; }

JAX_RNNT_SCHEDULER int Barrier(int value, const char* name, Caller caller) {
  BlockBarrier& barrier = machine.barrier;
  if (machine.num_alive != machine.num_threads) Fail(name, caller, "a thread of the block has exited");
  const unsigned slot = barrier.generation % 2;
  if (barrier.arrived == 0) {
    barrier.name = name;
    barrier.caller = caller;
    barrier.sum[slot] = 0;
  } else if (barrier.name != name || barrier.caller.line != caller.line) {
    FailDifferent(name, caller, barrier.name, barrier.caller);
  }
  barrier.sum[slot] += value;
  JAX_RNNT_ORDER(Release(&tokens->barrier[slot]));
  if (++barrier.arrived == machine.num_threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    for (unsigned i = 0; i < machine.num_threads; ++i) FiberOf(i)->state = State::kReady;
  } else {
    Wait(State::kAtBarrier, name, caller);
  }
  JAX_RNNT_ORDER(Acquire(&tokens->barrier[slot]));
  return barrier.sum[slot];
}

JAX_RNNT_SCHEDULER uint32_t Vote(uint32_t mask, bool value, const char* name, Caller caller) {
  const uint64_t* const values = Meet(mask, value, {name, 0}, caller, false);
  uint32_t votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= uint32_t((mask >> lane & 1) != 0 && values[lane] != 0) << lane;
  return votes;
}

JAX_RNNT_SCHEDULER void SyncWarp(uint32_t mask, Caller caller) { Meet(mask, 0, {"__syncwarp", 0}, caller, true); }

JAX_RNNT_SCHEDULER const uint64_t* Gather(uint64_t value, const char* name, Caller caller) {
  return Meet(0xffffffffu, value, {name, 0}, caller, true);
}

JAX_RNNT_SCHEDULER uint64_t Shuffle(uint32_t mask, uint64_t value, int source, Operation operation, Caller caller) {
  const uint64_t* const values = Meet(mask, value, operation, caller, false);
  if (source < 0 || source > 31) return value;
  if ((mask >> source & 1) == 0) Fail(operation.name, caller, "reads from a lane outside the mask");
  return values[source];
}

JAX_RNNT_SCHEDULER void* DynamicShared() { return machine.shared + 16; }

JAX_RNNT_SCHEDULER void* SharedArray(SharedSlot* slot, size_t bytes, Caller caller) {
  if (slot->block != machine.block) {
    machine.static_bytes += (bytes + 15) / 16 * 16;
    if (machine.static_bytes > kStaticLimit || machine.static_bytes + machine.dynamic_bytes > kSharedLimit)
      Fail("JAX_RNNT_SHARED_ARRAY", caller, "more shared memory than a block can have");
    slot->block = machine.block;
    slot->data = AllocateShared(bytes);
  }
  return slot->data;
}

namespace {
// What the runtime knows of a kernel.
struct Kernel {
  bool loaded = false, has_run = false;
  size_t dynamic_limit = kStaticLimit;
};
std::mutex kernels_mutex;
std::map<const void*, Kernel>& Kernels() {
  static std::map<const void*, Kernel>* const kernels = new std::map<const void*, Kernel>;
  return *kernels;
}

// Whether a launch of the kernel may begin.
cudaError_t Begin(const void* kernel, size_t shared_bytes) {
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  const auto loaded = [](const auto& entry) { return entry.second.loaded; };
  const bool any = std::any_of(Kernels().begin(), Kernels().end(), loaded);
  Kernel& found = Kernels()[kernel];
  if (any && !found.loaded) return cudaErrorInvalidDeviceFunction;
  if (shared_bytes > found.dynamic_limit) return cudaErrorInvalidValue;
  found.has_run = true;
  return cudaSuccess;
}
}  // namespace

JAX_RNNT_SCHEDULER cudaError_t Run(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                                   void (*thread)(const void*), const void* context) {
  if (const cudaError_t error = Begin(kernel, shared_bytes); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(machine.mutex);
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffff || grid.y == 0 ||
      grid.y > 65535 || grid.z == 0 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  machine.message[0] = 0;
  machine.failed = false;
  machine.current = &machine.host;
  machine.thread = thread;
  machine.context = context;
  machine.num_threads = unsigned(threads);
  machine.dynamic_bytes = shared_bytes;
  grid_size = grid;
  block_size = block;
  if (!ReadOrder()) {
    Append("JAX_RNNT_EMULATION_ORDER must be forward, reverse or random:SEED");
    machine.failed = true;
  }
#if JAX_RNNT_TSAN
  machine.host.tsan = __tsan_get_current_fiber();
#endif
  JAX_RNNT_ORDER(Acquire(&launches));
  if (!machine.failed) RunGrid();
  JAX_RNNT_ORDER(Acquire(&launches));
  if (!machine.failed) return cudaSuccess;

#if JAX_RNNT_TSAN
  for (Fiber& fiber : machine.fibers) {  // fibers stopped inside a kernel; orders their accesses before later ones
    if (fiber.tsan == nullptr) continue;
    __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
    Release(&launches);
    __tsan_switch_to_fiber(machine.host.tsan, __tsan_switch_to_fiber_no_sync);
    __tsan_destroy_fiber(fiber.tsan);
    fiber.tsan = nullptr;
  }
  Acquire(&launches);
#endif
  fprintf(stderr, "jax_rnnt emulation: %s\n", machine.message);
  for (size_t i = 0; i < sizeof last_message; ++i) last_message[i] = machine.message[i];
  return cudaErrorLaunchFailure;
}

}  // namespace jax_rnnt::emulation

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9 : int(jax_rnnt::emulation::kSharedLimit);
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  using namespace jax_rnnt::emulation;
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  Kernels()[kernel].loaded = true;
  *attributes = {0, int(Kernels()[kernel].dynamic_limit)};
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  using namespace jax_rnnt::emulation;
  const std::lock_guard<std::mutex> lock(kernels_mutex);
  Kernel& found = Kernels()[kernel];
  const bool same = size_t(value) == found.dynamic_limit;  // kernels are loaded again for every handler
  if (value < 0 || size_t(value) > kSharedLimit || (found.has_run && !same) || size_t(value) < found.dynamic_limit) {
    return cudaErrorInvalidValue;
  }
  found.dynamic_limit = size_t(value);
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDeviceFunction:
      return "a kernel that LoadKernels did not load";
    case cudaErrorNotSupported:
      return "operation not supported";
    case cudaErrorLaunchFailure:
      return jax_rnnt::emulation::last_message;
  }
  return "unrecognized error code";
}
