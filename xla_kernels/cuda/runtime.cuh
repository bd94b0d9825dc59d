// The one CUDA include of kernel sources: the CUDA toolkit under nvcc, its emulation on the CPU under other compilers,
// and functions beyond the common subset of the two. Only this file, elements.cuh, memory.cuh and
// matrix.cuh have inline PTX; each piece has a host body.
//
// One source runs on both if it follows three rules: the macros below declare shared memory, Launch starts kernels, and
// no block waits for another.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

// A static shared array, T* name. It is declared as bytes, since a shared variable must not need a constructor, and
// default member initialisers of T are one.
#define JAX_RNNT_SHARED_ARRAY(T, name, n)                                     \
  __shared__ __align__(16) unsigned char jax_rnnt_##name##_[sizeof(T) * (n)]; \
  T* const name = reinterpret_cast<T*>(jax_rnnt_##name##_)
// The dynamic shared memory of the launch, T* name.
#define JAX_RNNT_DYNAMIC_SHARED(T, name)                             \
  extern __shared__ __align__(16) unsigned char jax_rnnt_dynamic_[]; \
  T* const name = reinterpret_cast<T*>(jax_rnnt_dynamic_)
// A kernel begins with the threads of its __launch_bounds__, which the emulation cannot read: larger blocks fail.
#define JAX_RNNT_AT_MOST(threads)
#else
#include <math.h>

#include "lab/emulation/cuda_emulation.h"

#define JAX_RNNT_SHARED_ARRAY(T, name, n) T* const name = ::jax_rnnt::emulation::SharedArray<T, (n)>([] {})
#define JAX_RNNT_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::jax_rnnt::emulation::DynamicShared())
#define JAX_RNNT_AT_MOST(threads) ::jax_rnnt::emulation::AtMost(threads)
#endif

#include "xla_kernels/common/rounding.h"

// Instructions on two 16-bit elements at a time, and minima that keep NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define JAX_RNNT_SM80 1
#else
#define JAX_RNNT_SM80 0
#endif

namespace jax_rnnt::cuda {

// Bytes of shared memory that a block may have on the current device.
inline size_t SharedMemoryOfBlock() {
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess) {
    return 48 << 10;
  }
  return size_t(bytes);
}

// While an object lives, Launch loads kernels onto the current device and starts none, in this thread. See LoadKernels.
class Loading {
 public:
  Loading() { active = true; }
  ~Loading() { active = false; }
  static inline thread_local bool active = false;
};

// Loads a kernel onto the current device. One that uses dynamic shared memory may have all there is from then on: the
// limit belongs to the kernel and not to a launch, so a launch that set its own size would fail the larger launches of
// other threads and of graphs.
inline cudaError_t Load(const void* kernel, bool dynamic) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || !dynamic) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              int(SharedMemoryOfBlock() - attributes.sharedSizeBytes));
}

// Starts kernel(args...). Returns the error of this launch only; the stream reports work that fails later.
template <class... P, class... A>
cudaError_t Launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream, A... args) {
  if (Loading::active) return Load(reinterpret_cast<const void*>(kernel), shared_bytes > 0);
#if defined(__CUDACC__)
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, P(args)...);
#else
  (void)stream;
  return emulation::Run(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, [&] { kernel(P(args)...); });
#endif
}

// ---- bits ----

// Of the host too: there, a function that is __device__ alone ends the program without a word, if a template calls it.
template <class To, class From>
__host__ __device__ __forceinline__ To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
__host__ __device__ __forceinline__ int32_t AsInt(float x) { return Bits<int32_t>(x); }
__host__ __device__ __forceinline__ float AsFloat(int32_t x) { return Bits<float>(x); }
__host__ __device__ __forceinline__ int64_t AsInt(double x) { return Bits<int64_t>(x); }
__host__ __device__ __forceinline__ double AsFloat(int64_t x) { return Bits<double>(x); }

// ---- addresses ----

// The same pointer to device memory, computed once: without this, the compiler derives each address from base and index
// anew, with 64-bit products in the innermost loop.
template <class T>
__device__ __forceinline__ T* Pinned(T* x) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(x));
  __builtin_assume(__isGlobal(x));
#endif
  return x;
}

// ---- functions ----

#if defined(__CUDA_ARCH__)
// nvcc --use_fast_math is no macro. It flushes subnormals, as --ftz=true does, and makes divisions approximate. The
// branch is gone in other builds; in such a one ptxas refuses the name.
extern "C" __device__ int __nvvm_reflect(const char*);
__device__ __forceinline__ void RefuseFastMath() {
  if (__nvvm_reflect("__CUDA_FTZ") != 0) asm volatile("jax_rnnt_is_not_built_with_use_fast_math;");
}
#endif

// 2^x. In float within 2 ulp, and subnormal results are 0.
__device__ __forceinline__ float Exp2(float x) {
#if defined(__CUDA_ARCH__)
  RefuseFastMath();
#endif
#if defined(__CUDACC__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}
__device__ __forceinline__ double Exp2(double x) { return exp2(x); }

// x * y + z, rounded once.
__device__ __forceinline__ float Fma(float x, float y, float z) { return fmaf(x, y, z); }
__device__ __forceinline__ double Fma(double x, double y, double z) { return fma(x, y, z); }
__device__ __forceinline__ float Abs(float x) { return fabsf(x); }
__device__ __forceinline__ double Abs(double x) { return fabs(x); }

// The larger of two numbers; if one is NaN, the other.
__device__ __forceinline__ float Max(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ double Max(double x, double y) { return fmax(x, y); }

// x within [-limit, limit]; NaN stays NaN.
__device__ __forceinline__ float Clip(float x, float limit) {
#if JAX_RNNT_SM80
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(limit));
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(-limit));
  return y;
#else
  return x > limit ? limit : x < -limit ? -limit : x;
#endif
}
__device__ __forceinline__ double Clip(double x, double limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// Accurate natural logarithm, for use once per row.
__device__ __forceinline__ float Log(float x) { return logf(x); }
__device__ __forceinline__ double Log(double x) { return log(x); }

// n / divisor for 0 <= n < 2^31 by a multiplication and a shift (Granlund and Montgomery, 1994).
class Divider {
 public:
  explicit Divider(uint32_t divisor) {
    while ((uint64_t{1} << shift_) < divisor) ++shift_;
    factor_ = uint32_t((((uint64_t{1} << shift_) - divisor) << 32) / divisor + 1);
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const {
    return uint32_t(((uint64_t(n) * factor_) >> 32) + n) >> shift_;
  }

 private:
  uint32_t factor_ = 0, shift_ = 0;
};

}  // namespace jax_rnnt::cuda
