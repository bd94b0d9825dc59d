// Elements of 16 bits: to float and back, one or two at a time.
#pragma once

#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

__host__ __device__ __forceinline__ double Widen(double x) { return x; }
__host__ __device__ __forceinline__ float Widen(float x) { return x; }
__host__ __device__ __forceinline__ float Widen(BFloat16 x) { return AsFloat(int32_t(uint32_t(x.bits) << 16)); }
__host__ __device__ __forceinline__ float Widen(Half x) {
#if defined(__CUDA_ARCH__)
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
__host__ __device__ __forceinline__ T Narrow(A x) {
  static_assert(sizeof(T) == sizeof(A), "float and double are not narrowed; 16-bit types are narrowed from float");
  return x;
}
template <>
__host__ __device__ __forceinline__ BFloat16 Narrow<BFloat16, float>(float x) {
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
__host__ __device__ __forceinline__ Half Narrow<Half, float>(float x) {
  Half y;
#if defined(__CUDA_ARCH__)
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

}  // namespace jax_rnnt::cuda
