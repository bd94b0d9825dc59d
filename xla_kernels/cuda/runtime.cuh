// The one CUDA include of kernel sources: the CUDA toolkit under nvcc, its emulation on the CPU under other compilers,
// and functions beyond the common subset of the two. Only this file has inline PTX; each piece has a host body.
//
// One source runs on both if it follows three rules: the macros below declare shared memory, Launch starts kernels, and
// no block waits for another.
#pragma once

#include <stddef.h>
#include <stdint.h>

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
#else
#include <math.h>
#include <string.h>

#include "lab/emulation/cuda_emulation.h"

#define JAX_RNNT_SHARED_ARRAY(T, name, n) T* const name = ::jax_rnnt::emulation::SharedArray<T, (n)>([] {})
#define JAX_RNNT_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::jax_rnnt::emulation::DynamicShared())
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

#if defined(__CUDACC__)
__device__ __forceinline__ int32_t AsInt(float x) { return __float_as_int(x); }
__device__ __forceinline__ float AsFloat(int32_t x) { return __int_as_float(x); }
__device__ __forceinline__ int64_t AsInt(double x) { return __double_as_longlong(x); }
__device__ __forceinline__ double AsFloat(int64_t x) { return __longlong_as_double(x); }
#else
template <class To, class From>
inline To Bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline int32_t AsInt(float x) { return Bits<int32_t>(x); }
inline float AsFloat(int32_t x) { return Bits<float>(x); }
inline int64_t AsInt(double x) { return Bits<int64_t>(x); }
inline double AsFloat(int64_t x) { return Bits<double>(x); }
#endif

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

// ---- element types ----

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

__device__ __forceinline__ double Widen(double x) { return x; }
__device__ __forceinline__ float Widen(float x) { return x; }
__device__ __forceinline__ float Widen(BFloat16 x) { return AsFloat(int32_t(uint32_t(x.bits) << 16)); }
__device__ __forceinline__ float Widen(Half x) {
#if defined(__CUDACC__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return AsFloat(int32_t(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13));
  // Read as a float, the same fields give a value too small by 2^(127 - 15), subnormals included.
  return AsFloat(int32_t(sign | magnitude << 13)) * 0x1p112f;
#endif
}

// Rounds to the nearest, ties to even; overflow gives infinity, NaN stays NaN.
template <class T, class A>
__device__ __forceinline__ T Narrow(A x) {
  static_assert(sizeof(T) == sizeof(A), "float and double are not narrowed; 16-bit types are narrowed from float");
  return x;
}
template <>
__device__ __forceinline__ BFloat16 Narrow<BFloat16, float>(float x) {
  BFloat16 y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t bits = uint32_t(AsInt(x));
  y.bits = x != x ? 0x7fff : uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
  return y;
}
template <>
__device__ __forceinline__ Half Narrow<Half, float>(float x) {
  Half y;
#if defined(__CUDACC__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t bits = uint32_t(AsInt(x)), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (x != x) {
    y.bits = 0x7fff;
    return y;
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded, in the low bits
    result = uint32_t(AsInt(AsFloat(int32_t(magnitude)) + 0.5f)) - 0x3f000000u;
  } else {
    result = (magnitude + 0xfffu + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  }
  y.bits = uint16_t(sign | result);
#endif
  return y;
}

// Two 16-bit elements in a word, the first one in the low half.
template <class T>
__device__ __forceinline__ T Half16(uint32_t pair, int i) {
  return T{uint16_t(i == 0 ? pair : pair >> 16)};
}
template <class T>
__device__ __forceinline__ uint32_t NarrowPair(float x, float y) {
  return Narrow<T>(x).bits | uint32_t(Narrow<T>(y).bits) << 16;
}
// The larger elements; if one is NaN, the other.
template <class T>
__device__ __forceinline__ uint32_t MaxPair(uint32_t x, uint32_t y) {
  return NarrowPair<T>(Max(Widen(Half16<T>(x, 0)), Widen(Half16<T>(y, 0))),
                       Max(Widen(Half16<T>(x, 1)), Widen(Half16<T>(y, 1))));
}
#if JAX_RNNT_SM80
template <>
__device__ __forceinline__ uint32_t NarrowPair<BFloat16>(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t NarrowPair<Half>(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t MaxPair<BFloat16>(uint32_t x, uint32_t y) {
  uint32_t pair;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}
template <>
__device__ __forceinline__ uint32_t MaxPair<Half>(uint32_t x, uint32_t y) {
  uint32_t pair;
  asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(x), "r"(y));
  return pair;
}
#endif

// ---- 16-byte accesses ----

// 16 bytes as one access moves them. They stay 32-bit words until they are used: the compiler takes 16-bit elements
// apart as soon as they are there, and so waits for an access before it issues the next one.
struct alignas(16) [[gnu::may_alias]] Words {
  uint32_t w[4];
};

// One access each. `from` and `to` must be aligned to 16 bytes. Plain loads, not __ldg, since a gradient may overwrite
// the logits.
#if defined(__CUDACC__)
__device__ __forceinline__ Words Load16(const void* from) {
  const uint4 v = *static_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void Store16(void* to, const Words& v) {
  *static_cast<uint4*>(to) = make_uint4(v.w[0], v.w[1], v.w[2], v.w[3]);
}
#else
inline Words Load16(const void* from) { return *static_cast<const Words*>(from); }
inline void Store16(void* to, const Words& v) { *static_cast<Words*>(to) = v; }
#endif

// 16 bytes that begin at any element, cut out of the aligned words that hold them, in three accesses of 8 bytes: two of
// 16 bytes would need six choices between words more.
template <class T>
struct Window {
  // `from`: the last boundary of 8 bytes.
  __device__ __forceinline__ void Load(const void* from) {
#pragma unroll
    for (unsigned i = 0; i < (sizeof(T) == 8 ? 2 : 3); ++i) {
#if defined(__CUDACC__)
      const uint2 v = static_cast<const uint2*>(from)[i];
      w[2 * i] = v.x, w[2 * i + 1] = v.y;
#else
      memcpy(w + 2 * i, static_cast<const char*>(from) + 8 * i, 8);
#endif
    }
  }
  // `offset`: elements since any boundary of 16 bytes.
  __device__ __forceinline__ Words Get(int offset) {
    const int bytes = offset * int(sizeof(T));
    if (sizeof(T) <= 4) {
#pragma unroll
      for (unsigned i = 0; i < 5; ++i) w[i] = bytes & 4 ? w[i + 1] : w[i];
    }
    if (sizeof(T) <= 2) {
#pragma unroll
      for (unsigned i = 0; i < 4; ++i) w[i] = uint32_t((uint64_t(w[i + 1]) << 32 | w[i]) >> (bytes & 2) * 8);
    }
    return {{w[0], w[1], w[2], w[3]}};
  }

 private:
  uint32_t w[6];
};

// ---- global memory ----

// p, without its history: the address of p[i] then is one multiply-add, not a sum of all offsets.
template <class T>
__device__ __forceinline__ T* Settled(T* p) {
#if defined(__CUDACC__)
  asm("" : "+l"(p));
#endif
  return p;
}

// The same for a number: it is kept in a register, not computed anew where it is used.
__device__ __forceinline__ int Settled(int x) {
#if defined(__CUDACC__)
  asm("" : "+r"(x));
#endif
  return x;
}
__device__ __forceinline__ unsigned Settled(unsigned x) { return unsigned(Settled(int(x))); }

// Stores x and y side by side, if `condition` is not zero. Unlike an if, never a branch, so the compiler
// schedules across it. Reads of the same kernel do not see it before a barrier.
__device__ __forceinline__ void StoreIf(unsigned condition, float* to, float x, float y) {
#if defined(__CUDACC__)
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.f32 [%1], {%2, %3};}" ::"r"(condition), "l"(to),
               "f"(x), "f"(y));
#else
  if (condition != 0) to[0] = x, to[1] = y;
#endif
}
__device__ __forceinline__ void StoreIf(unsigned condition, double* to, double x, double y) {
#if defined(__CUDACC__)
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v2.f64 [%1], {%2, %3};}" ::"r"(condition), "l"(to),
               "d"(x), "d"(y));
#else
  if (condition != 0) to[0] = x, to[1] = y;
#endif
}

// Stores 16 bytes.
template <class V>
__device__ __forceinline__ void StoreIf(unsigned condition, V* to, const V& x) {
  static_assert(sizeof(V) == 16 && alignof(V) == 16, "one access");
#if defined(__CUDACC__)
  const Words w = reinterpret_cast<const Words&>(x);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(condition),
               "l"(to), "r"(w.w[0]), "r"(w.w[1]), "r"(w.w[2]), "r"(w.w[3]));
#else
  if (condition != 0) *to = x;
#endif
}

// ---- barriers ----

// A barrier of the block at which warps may arrive from different places in the code; the lanes of a warp may not.
__device__ __forceinline__ void SyncWarps() {
#if defined(__CUDACC__)
  asm volatile("bar.sync 0;" ::: "memory");
#else
  __syncthreads();
#endif
}

// ---- copies from global to shared memory in the background ----

// Where copies go: an address in shared memory of 32 bits, which the compiler does not derive anew for each copy.
template <class T>
class SharedAddress {
 public:
#if defined(__CUDACC__)
  __device__ __forceinline__ explicit SharedAddress(T* to) : to_(unsigned(__cvta_generic_to_shared(to))) {
    asm("" : "+r"(to_));
  }
  // The same place, seen as another type.
  template <class Other>
  __device__ __forceinline__ explicit SharedAddress(SharedAddress<Other> to) : to_(to.Get()) {}
  __device__ __forceinline__ SharedAddress operator+(int i) const {
    return SharedAddress(to_ + unsigned(i) * sizeof(T));
  }
  __device__ __forceinline__ unsigned Get() const { return to_; }

 private:
  __device__ __forceinline__ explicit SharedAddress(unsigned to) : to_(to) {}
  unsigned to_;
#else
  explicit SharedAddress(T* to) : to_(to) {}
  template <class Other>
  explicit SharedAddress(SharedAddress<Other> to) : to_(reinterpret_cast<T*>(to.Get())) {}
  SharedAddress operator+(int i) const { return SharedAddress(to_ + i); }
  T* Get() const { return to_; }

 private:
  T* to_;
#endif
};

// Stores 16 bytes in shared memory, if `condition` is not zero. As StoreIf above; reads of this thread do not see it
// before a barrier either, so they may move across.
template <class V>
__device__ __forceinline__ void StoreIf(unsigned condition, SharedAddress<V> to, const V& x) {
  static_assert(sizeof(V) == 16 && alignof(V) == 16, "one access");
#if defined(__CUDACC__)
  const Words w = reinterpret_cast<const Words&>(x);
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p st.shared.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"(condition),
               "r"(to.Get()), "r"(w.w[0]), "r"(w.w[1]), "r"(w.w[2]), "r"(w.w[3]));
#else
  if (condition != 0) *to.Get() = x;
#endif
}

// 8 or 16 bytes of shared memory, in one access.
template <class V>
__device__ __forceinline__ V Load(SharedAddress<V> from) {
  static_assert(sizeof(V) == 8 || sizeof(V) == 16, "one access");
#if defined(__CUDACC__)
  Words w;
  if constexpr (sizeof(V) == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w.w[0]), "=r"(w.w[1]) : "r"(from.Get()));
    return reinterpret_cast<const V&>(w);
  }
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w.w[0]), "=r"(w.w[1]), "=r"(w.w[2]), "=r"(w.w[3])
               : "r"(from.Get()));
  return reinterpret_cast<const V&>(w);
#else
  return *from.Get();
#endif
}

template <class V>
__device__ __forceinline__ void Store(SharedAddress<V> to, const V& x) {
  static_assert(sizeof(V) == 8 || sizeof(V) == 16, "one access");
#if defined(__CUDACC__)
  const uint32_t* const w = reinterpret_cast<const uint32_t*>(&x);
  if constexpr (sizeof(V) == 8) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to.Get()), "r"(w[0]), "r"(w[1]));
  } else {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to.Get()), "r"(w[0]), "r"(w[1]), "r"(w[2]),
                 "r"(w[3]));
  }
#else
  *to.Get() = x;
#endif
}

// Starts a copy of *from. Neither place may be used before WaitForCopies. The size of T is 4, 8 or 16 bytes. No memory
// clobber: loads and stores may move across the start of a copy, not across the wait.
template <class T>
__device__ __forceinline__ void CopyAsync(SharedAddress<T> to, const T* from) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "copies have 4, 8 or 16 bytes");
#if !defined(__CUDACC__)
  emulation::CopyAsync(to.Get(), from, sizeof(T));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to.Get()), "l"(from), "n"(sizeof(T)));
#else
  *static_cast<T*>(__cvta_shared_to_generic(to.Get())) = *from;
#endif
}

// The same if `condition` is not zero; never a branch.
template <class T>
__device__ __forceinline__ void CopyAsyncIf(unsigned condition, SharedAddress<T> to, const T* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("{.reg .pred p; setp.ne.s32 p, %0, 0; @p cp.async.ca.shared.global [%1], [%2], %3;}" ::"r"(condition),
               "r"(to.Get()), "l"(from), "n"(sizeof(T)));
#else
  if (condition != 0) CopyAsync(to, from);
#endif
}

// The same for n places, `to_step` and `from_step` apart, if condition(i). Where a copy is a load and a store, all
// loads come first.
template <int n, class T, class Condition>
__device__ __forceinline__ void CopyAsyncIf(const Condition& condition, SharedAddress<T> to, int to_step, const T* from,
                                            int from_step) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  T x[n];
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (condition(i)) x[i] = from[i * from_step];
  }
#pragma unroll
  for (int i = 0; i < n; ++i) {
    if (condition(i)) Store(to + i * to_step, x[i]);
  }
#else
#pragma unroll
  for (int i = 0; i < n; ++i) CopyAsyncIf(condition(i), to + i * to_step, from + i * from_step);
#endif
}

// Makes a group of the copies that this thread started since the last group.
__device__ __forceinline__ void CommitCopies() {
#if !defined(__CUDACC__)
  emulation::CommitCopies();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}

// Waits for the groups of this thread except the last kGroups. Other threads see them after a barrier.
template <int kGroups>
__device__ __forceinline__ void WaitForCopies() {
#if !defined(__CUDACC__)
  emulation::WaitForCopies(kGroups);
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

}  // namespace jax_rnnt::cuda
