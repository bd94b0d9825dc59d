// Runs CUDA kernel sources on the CPU, for tests: no GPU, no toolkit. Link with cuda_emulation.cc.
//
// The threads of a block are fibers, each with its own stack. They switch where CUDA threads may wait for each other
// (at barriers and warp collectives) and where they end. So the real control flow of a kernel runs, with divergence,
// early exits and partial masks. Misuse is reported and never hangs:
//   * barriers that not all threads reach; barriers and collectives of different places or kinds that meet;
//   * masks that name lanes which have exited or do not call; callers outside their mask; reads from lanes outside it;
//   * shared memory read before it is written: it is filled with NaN for every block;
//   * with AddressSanitizer and UndefinedBehaviorSanitizer: accesses out of bounds, of shared memory too; alignment;
//   * asynchronous copies that are not waited for, or overwrite what is in use: they run as late or as early as may be;
//   * dynamic shared memory above 48 KiB for a kernel whose limit was not raised, and a limit that is lowered, or set
//     once the kernel has run;
//   * threads that end with copies in flight;
//   * blocks of more threads than __launch_bounds__ promise;
//   * with ThreadSanitizer: races between CUDA threads, within a block or between blocks. Only barriers, __syncwarp and
//     the end of a kernel order memory accesses; shuffles and votes do not.
// Blocks run one after the other, so a block must not wait for another. The environment variable
// JAX_RNNT_EMULATION_ORDER sets the order of blocks and threads: forward (default), reverse or random:SEED.
//
// Not modelled: time, weak memory order, the approximations of the GPU's own exp2 and log2, flushed subnormals.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <vector>

// ---- language ----

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  unsigned x, y, z;
};

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
};

// The part of the runtime that loads kernels. One device, of compute capability 9.0.
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int maxDynamicSharedSizeBytes;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
// Loads the kernel. Static shared memory is not known before a launch: 0.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
// For cudaErrorLaunchFailure: the problem in the last failed launch of the calling thread.
const char* cudaGetErrorString(cudaError_t error);

using std::max;
using std::min;

namespace jax_rnnt::emulation {

// The place where a kernel calls a barrier or a collective.
struct Caller {
  static constexpr Caller Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  const char* file;
  int line;
};

// The operation of a collective, apart from the values; lanes that meet must agree on it.
struct Operation {
  const char* name;
  int argument;
};

extern uint3 thread_index, block_index;
extern dim3 block_size, grid_size;

cudaError_t Run(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, void (*thread)(const void*),
                const void* context);

// Runs thread() once per thread of every block of `kernel`. If any kernel was loaded, this one must be.
template <class Thread>
cudaError_t Run(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, const Thread& thread) {
  return Run(
      kernel, grid, block, shared_bytes, [](const void* context) { (*static_cast<const Thread*>(context))(); },
      &thread);
}

constexpr size_t kSharedLimit = 227 << 10;  // bytes of a block, of compute capability 9.0 with the opt-in

void* DynamicShared();

struct SharedSlot {
  uint64_t block;  // the block for which `data` was allocated
  void* data;
};
void* SharedArray(SharedSlot* slot, size_t bytes, Caller caller);

// `Place` is the type of a lambda expression, so each place in the source has its own array.
template <class T, size_t n, class Place>
T* SharedArray(Place, Caller caller = Caller::Here()) {
  static SharedSlot slot = {};
  return static_cast<T*>(SharedArray(&slot, n * sizeof(T), caller));
}

// Waits for all threads of the block; returns the sum of their values.
int Barrier(int value, const char* name, Caller caller);
// Waits for the lanes of `mask`; returns the mask of those whose value is true.
uint32_t Vote(uint32_t mask, bool value, const char* name, Caller caller);
void SyncWarp(uint32_t mask, Caller caller);
// Waits for all lanes of the warp, whose accesses to memory it orders; returns the values of all.
const uint64_t* Gather(uint64_t value, const char* name, Caller caller);
// Waits for the lanes of `mask`; returns the value of lane `source`, or the caller's own if that is outside the warp.
uint64_t Shuffle(uint32_t mask, uint64_t value, int source, Operation operation, Caller caller);

int Lane();
// Fails in a block of more threads.
void AtMost(unsigned threads, Caller caller = Caller::Here());

// f(lanes), where lanes(i) is the pointer of lane i; no lane continues before all have read what pointers name.
template <class T, class F>
void WithAllLanes(const char* name, T* mine, const F& f, Caller caller = Caller::Here()) {
  const uint64_t* const all = Gather(reinterpret_cast<uintptr_t>(mine), name, caller);
  f([&](int lane) { return reinterpret_cast<T*>(uintptr_t(all[lane])); });
  Gather(0, name, caller);
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  unsigned group;
};
struct Copies {
  std::vector<Copy> started;
  unsigned groups = 0;  // committed
};
// The copies that the calling thread has started and not waited for.
Copies& ThreadCopies();
// A copy may run at any time until it is waited for: at once in reverse order, as late as possible in the others.
bool CopiesRunAtOnce();
inline void CopyAsync(void* to, const void* from, size_t bytes) {
  if (CopiesRunAtOnce()) {
    memcpy(to, from, bytes);
    bytes = 0;  // nothing is left, but the thread must wait for it
  }
  ThreadCopies().started.push_back({to, from, bytes, ThreadCopies().groups});
}
inline void CommitCopies() { ++ThreadCopies().groups; }
// Runs the copies of all committed groups but the last `groups`.
inline void WaitForCopies(unsigned groups) {
  Copies& copies = ThreadCopies();
  size_t done = 0;
  while (done < copies.started.size() && copies.started[done].group + groups < copies.groups) {
    memcpy(copies.started[done].to, copies.started[done].from, copies.started[done].bytes);
    ++done;
  }
  copies.started.erase(copies.started.begin(), copies.started.begin() + std::ptrdiff_t(done));
}

template <class T>
T Shuffle(uint32_t mask, T value, int source, Operation operation, Caller caller) {
  static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 4 || sizeof(T) == 8), "CUDA shuffles 4 or 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = Shuffle(mask, bits, source, operation, caller);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace jax_rnnt::emulation

// ---- what kernels call ----

#define JAX_RNNT_CALLER ::jax_rnnt::emulation::Caller caller = ::jax_rnnt::emulation::Caller::Here()
#define threadIdx (::jax_rnnt::emulation::thread_index)
#define blockIdx (::jax_rnnt::emulation::block_index)
#define blockDim (::jax_rnnt::emulation::block_size)
#define gridDim (::jax_rnnt::emulation::grid_size)

// 1 + the position of the lowest bit that is set, or 0 if none is.
inline int __ffs(int x) { return __builtin_ffs(x); }

inline void __syncthreads(JAX_RNNT_CALLER) { jax_rnnt::emulation::Barrier(0, "__syncthreads", caller); }
inline int __syncthreads_or(int value, JAX_RNNT_CALLER) {
  return jax_rnnt::emulation::Barrier(value != 0, "__syncthreads_or", caller) != 0;
}

inline void __syncwarp(uint32_t mask = 0xffffffffu, JAX_RNNT_CALLER) { jax_rnnt::emulation::SyncWarp(mask, caller); }
inline uint32_t __ballot_sync(uint32_t mask, int value, JAX_RNNT_CALLER) {
  return jax_rnnt::emulation::Vote(mask, value != 0, "__ballot_sync", caller);
}
inline int __any_sync(uint32_t mask, int value, JAX_RNNT_CALLER) {
  return jax_rnnt::emulation::Vote(mask, value != 0, "__any_sync", caller) != 0;
}

// Over whole warps only.
template <class T>
T __shfl_sync(uint32_t mask, T value, int lane, JAX_RNNT_CALLER) {
  return jax_rnnt::emulation::Shuffle(mask, value, lane & 31, {"__shfl_sync", 0}, caller);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, JAX_RNNT_CALLER) {
  const int source = jax_rnnt::emulation::Lane() - int(delta);
  return jax_rnnt::emulation::Shuffle(mask, value, source, {"__shfl_up_sync", int(delta)}, caller);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, JAX_RNNT_CALLER) {
  const int source = jax_rnnt::emulation::Lane() + int(delta);
  return jax_rnnt::emulation::Shuffle(mask, value, source, {"__shfl_down_sync", int(delta)}, caller);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask, JAX_RNNT_CALLER) {
  const int source = jax_rnnt::emulation::Lane() ^ lane_mask;
  return jax_rnnt::emulation::Shuffle(mask, value, source, {"__shfl_xor_sync", lane_mask}, caller);
}
