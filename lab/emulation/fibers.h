// Fibers: the threads of a block, each with a stack of its own, and what they wait for; with annotations for
// sanitizers. Included by cuda_emulation.cc alone.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "lab/emulation/cuda_emulation.h"

#if defined(__has_feature)
#define JAX_RNNT_HAS_FEATURE(x) __has_feature(x)
#else
#define JAX_RNNT_HAS_FEATURE(x) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || JAX_RNNT_HAS_FEATURE(address_sanitizer)
#define JAX_RNNT_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__) || JAX_RNNT_HAS_FEATURE(thread_sanitizer)
#define JAX_RNNT_TSAN 1
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
// The scheduler runs on all fibers, so ThreadSanitizer must not check its own state.
#define JAX_RNNT_SCHEDULER __attribute__((no_sanitize("thread")))
#else
#define JAX_RNNT_SCHEDULER
#endif
#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulation switches stacks in the assembly of x86-64, on Linux"
#endif

namespace jax_rnnt::emulation {

uint3 thread_index, block_index;
dim3 block_size, grid_size;

namespace {

constexpr unsigned kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32, kMaxGroups = 8;
constexpr size_t kStackBytes = 256 << 10;    // only touched pages take memory
constexpr size_t kStaticLimit = 48 << 10;    // without the opt-in
constexpr unsigned kSanitizedThreads = 240;  // ThreadSanitizer's runtime distinguishes 255 threads
constexpr unsigned kFibers = kMaxThreads;

enum class State : uint8_t { kReady, kAtBarrier, kInCollective, kExited };

struct Fiber {
  char* stack = nullptr;
  unsigned linear = 0;
  uint3 index = {};
  State state = State::kExited;
  const char* operation = "";  // where it waits, unless it is ready
  Caller caller = {"", 0};
  Copies copies;
  void* stack_pointer = nullptr;
#if JAX_RNNT_ASAN
  void* fake_stack = nullptr;
#endif
#if JAX_RNNT_TSAN
  void* tsan = nullptr;
#endif
};

// The lanes of one mask. Collectives alternate between two slots, since a fast lane may enter the next collective
// before a slow one has read its result.
struct Group {
  uint32_t mask, arrived;
  uint32_t entered[32];  // collectives that each lane has entered
  uint64_t value[2][32];
  Operation operation[2];
  Caller caller[2];
};
struct Warp {
  uint32_t alive;
  unsigned num_groups;
  Group groups[kMaxGroups];
};
struct BlockBarrier {
  unsigned arrived, generation;
  int sum[2];
  const char* name;
  Caller caller;
};

enum class Order { kForward, kReverse, kRandom };

struct Machine {
  std::mutex mutex;  // one launch at a time
  Fiber host;        // the launching thread
  Fiber fibers[kFibers];
  unsigned first_fiber = 0;  // see StartBlock
  Fiber* current = &host;
  void (*thread)(const void*) = nullptr;
  const void* context = nullptr;
  unsigned num_threads = 0, num_alive = 0;
  unsigned round[kMaxThreads];  // threads in the order in which this round runs them
  unsigned round_position = 0, round_ran = 0;
  Warp warps[kMaxWarps];
  BlockBarrier barrier;
  uint64_t block = 0;  // counts all blocks ever run
  char* shared = nullptr;
  size_t shared_used = 0, dynamic_bytes = 0, static_bytes = 0;
  Order order = Order::kForward;
  uint64_t random = 0;
  bool failed = false;
  char message[512];
#if JAX_RNNT_ASAN
  Fiber* previous = nullptr;
  const void* host_stack = nullptr;
  size_t host_stack_bytes = 0;
#endif
};
Machine& machine = *new Machine;  // never destroyed: other threads may still launch while the process exits

thread_local char last_message[sizeof Machine::message] = "unspecified launch failure";

// ---- the order of memory accesses, for ThreadSanitizer ----

#if JAX_RNNT_TSAN
// Each address stands for a point that orders accesses. Every block has its own, since reuse would order blocks.
struct Tokens {
  uint64_t start, barrier[2], warp[kMaxWarps][kMaxGroups][2];
};
Tokens* tokens;
uint64_t launches;  // orders launches, and the blocks of a launch before later work of the host
void Release(void* token) { __tsan_release(token); }
void Acquire(void* token) { __tsan_acquire(token); }

// Replaces memory by new memory, which has no history of accesses.
template <class T>
T* Renew(T* old, size_t bytes) {
  AnnotateIgnoreWritesBegin("", 0);
  free(old);
  T* const memory = static_cast<T*>(malloc(bytes));
  AnnotateIgnoreWritesEnd("", 0);
  return memory;
}
#define JAX_RNNT_ORDER(call) call
#else
#define JAX_RNNT_ORDER(call) static_cast<void>(0)
#endif

// ---- switching ----

// Saves the callee-saved registers and the stack pointer, and loads those of the other stack.
extern "C" void JaxRnntEmulationSwitch(void** save, void* load);
asm(R"(.text
.weak JaxRnntEmulationSwitch
.hidden JaxRnntEmulationSwitch
.type JaxRnntEmulationSwitch, @function
JaxRnntEmulationSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size JaxRnntEmulationSwitch, . - JaxRnntEmulationSwitch
)");

// Runs after a switch, on the new stack.
JAX_RNNT_SCHEDULER void Arrived(Fiber* self) {
#if JAX_RNNT_ASAN
  const void* stack;
  size_t bytes;
  __sanitizer_finish_switch_fiber(self->fake_stack, &stack, &bytes);
  if (machine.previous == &machine.host) machine.host_stack = stack, machine.host_stack_bytes = bytes;
#else
  static_cast<void>(self);
#endif
}

JAX_RNNT_SCHEDULER void SwitchTo(Fiber* to, bool exits = false) {
  Fiber* const from = machine.current;
  machine.current = to;
  thread_index = to->index;
#if JAX_RNNT_ASAN
  machine.previous = from;
  const bool host = to == &machine.host;
  __sanitizer_start_switch_fiber(exits ? nullptr : &from->fake_stack, host ? machine.host_stack : to->stack,
                                 host ? machine.host_stack_bytes : kStackBytes);
#else
  static_cast<void>(exits);
#endif
#if JAX_RNNT_TSAN
  __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  JaxRnntEmulationSwitch(&from->stack_pointer, to->stack_pointer);
  Arrived(from);
}

JAX_RNNT_SCHEDULER Fiber* FiberOf(unsigned thread) { return &machine.fibers[machine.first_fiber + thread]; }

// The next thread of this round, or the launching thread if there is none.
JAX_RNNT_SCHEDULER void SwitchAway(bool exits = false) {
  while (!machine.failed && machine.round_position < machine.num_threads) {
    Fiber* const fiber = FiberOf(machine.round[machine.round_position++]);
    if (fiber->state == State::kReady) {
      ++machine.round_ran;
      return SwitchTo(fiber, exits);
    }
  }
  SwitchTo(&machine.host, exits);
}

JAX_RNNT_SCHEDULER void Wait(State state, const char* operation, Caller caller) {
  Fiber* const self = machine.current;
  self->state = state;
  self->operation = operation;
  self->caller = caller;
  SwitchAway();
}

JAX_RNNT_SCHEDULER const char* BaseName(const char* path) {
  const char* name = path;
  for (; *path != 0; ++path)
    if (*path == '/') name = path + 1;
  return name;
}

// ---- errors ----

__attribute__((format(printf, 1, 2))) JAX_RNNT_SCHEDULER void Append(const char* format, ...) {
  const size_t used = strlen(machine.message);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(machine.message + used, sizeof machine.message - used, format, arguments);
  va_end(arguments);
}

// Ends the launch; the calling CUDA thread never continues.
[[noreturn]] JAX_RNNT_SCHEDULER void Fail(const char* operation, Caller caller, const char* problem) {
  Append("%s at %s:%d: %s [block (%u, %u, %u), thread (%u, %u, %u)]", operation, BaseName(caller.file), caller.line,
         problem, block_index.x, block_index.y, block_index.z, thread_index.x, thread_index.y, thread_index.z);
  machine.failed = true;
  SwitchTo(&machine.host);
  abort();  // nobody switches back to a thread of a failed launch
}

// No thread can continue: reports where threads wait.
JAX_RNNT_SCHEDULER void FailDeadlocked() {
  Append("deadlock in block (%u, %u, %u):", block_index.x, block_index.y, block_index.z);
  bool told[kMaxThreads] = {};
  unsigned exited = 0;
  for (unsigned i = 0; i < machine.num_threads; ++i) {
    const Fiber* const fiber = FiberOf(i);
    if (fiber->state == State::kExited) ++exited;
    if (told[i] || fiber->state == State::kExited) continue;
    unsigned count = 0;
    for (unsigned j = i; j < machine.num_threads; ++j) {
      const Fiber* const other = FiberOf(j);
      if (other->state != fiber->state || other->caller.line != fiber->caller.line ||
          other->operation != fiber->operation)
        continue;
      told[j] = true;
      ++count;
    }
    Append(" %u threads wait in %s at %s:%d;", count, fiber->operation, BaseName(fiber->caller.file),
           fiber->caller.line);
  }
  Append(" %u have exited", exited);
  machine.failed = true;
}

// ---- threads ----

JAX_RNNT_SCHEDULER void ThreadMain() {
  Arrived(machine.current);
  JAX_RNNT_ORDER(Acquire(&tokens->start));
  machine.current->copies = {};  // by the thread itself, so that ThreadSanitizer sees one owner
  machine.thread(machine.context);
  if (!machine.current->copies.started.empty()) Fail("a copy", {"the kernel", 0}, "in flight where its thread ends");
  JAX_RNNT_ORDER(Release(&launches));
  Fiber* const self = machine.current;
  machine.warps[self->linear / 32].alive &= ~(1u << self->linear % 32);
  --machine.num_alive;
  self->state = State::kExited;
  SwitchAway(true);
  abort();  // an exited thread is never switched to
}

// A stack above a guard page.
char* NewStack() {
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, kStackBytes + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) return nullptr;
  return static_cast<char*>(memory) + page;
}

JAX_RNNT_SCHEDULER bool StartThread(Fiber* fiber, unsigned linear) {
  if (fiber->stack == nullptr) fiber->stack = NewStack();
  if (fiber->stack == nullptr) return false;
#if JAX_RNNT_ASAN
  ASAN_UNPOISON_MEMORY_REGION(fiber->stack, kStackBytes);  // a failed launch leaves frames behind
  fiber->fake_stack = nullptr;
#endif
#if JAX_RNNT_TSAN
  if (fiber->tsan == nullptr) fiber->tsan = __tsan_create_fiber(0);
#endif
  fiber->linear = linear;
  fiber->index = {linear % block_size.x, linear / block_size.x % block_size.y, linear / (block_size.x * block_size.y)};
  fiber->state = State::kReady;
  // JaxRnntEmulationSwitch pops six registers, then ThreadMain, which must find the stack as after a call.
  void** top = reinterpret_cast<void**>(fiber->stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&ThreadMain);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
  return true;
}

}  // namespace
}  // namespace jax_rnnt::emulation
