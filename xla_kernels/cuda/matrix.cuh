// Products of small matrices on tensor cores, of factors with 16 bits or of float32.
//
// A step multiplies 16 rows by 32 bytes with 8 columns by 32 bytes: 16 elements of 16 bits, or 8 of float32. Registers
// are words of 4 bytes, and a lane holds the same words of either: row or column lane / 4, word lane % 4 of 16 bytes.
#pragma once

#include "xla_kernels/cuda/elements.cuh"
#include "xla_kernels/cuda/memory.cuh"

namespace jax_rnnt::cuda {

// The nearest number of TF32, which has 10 bits behind the point; the larger one of two.
__device__ __forceinline__ float RoundToTF32(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return AsFloat(int32_t(y));
#else
  const uint32_t bits = uint32_t(AsInt(x));
  return (bits & 0x7f800000u) == 0x7f800000u ? x : AsFloat(int32_t((bits + 0x1000u) & ~0x1fffu));
#endif
}

// Words of four matrices of 8 rows by 16 bytes in shared memory. Lane 8 i + j names row j of matrix i.
__device__ __forceinline__ void LoadMatrices(uint32_t (&words)[4], SharedAddress<unsigned char> row) {
#if defined(__CUDACC__)
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row.Get()));
#endif
#else
  const int lane = emulation::Lane();
  emulation::WithAllLanes("ldmatrix", row.Get(), [&](const auto& rows) {
    for (int i = 0; i < 4; ++i) memcpy(&words[i], rows(8 * i + lane / 4) + 4 * (lane % 4), 4);
  });
#endif
}

#if !defined(__CUDACC__)
// sums += a b, as a tensor core does it; f(word, i) is the i-th element of a word, of n.
template <int n, class F>
void MultiplyByLanes(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const F& f) {
  struct Words {
    const uint32_t *a, *b;
  };
  const Words mine = {a, b};
  const int lane = emulation::Lane();
  float results[4];
  emulation::WithAllLanes("mma", &mine, [&](const auto& lanes) {
    for (int e = 0; e < 4; ++e) {
      const int row = lane / 4, column = 2 * (lane % 4) + e % 2;
      double sum = sums[e];
      for (int k = 0; k < 2; ++k)
        for (int j = 0; j < 4; ++j)
          for (int i = 0; i < n; ++i)
            sum += double(f(lanes(4 * row + j)->a[2 * k + e / 2], i)) * f(lanes(4 * column + j)->b[k], i);
      results[e] = float(sum);
    }
  });
  for (int e = 0; e < 4; ++e) sums[e] = results[e];
}
#endif

// sums += a b for a[16, 32 bytes] and b[8, 32 bytes]. Words of a: rows 0-7 and 8-15 of the first 16 bytes, then of the
// others; of b: the first 16 bytes, then the others. Sums: columns 2 (lane % 4) and the next of row lane / 4, then of
// row lane / 4 + 8. Elements of float32 are cut to TF32.
template <class T>
__device__ __forceinline__ void MultiplyAdd(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#if defined(__CUDACC__)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define JAX_RNNT_MMA(shape, types)
#else
#define JAX_RNNT_MMA(shape, types)                                          \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types              \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "        \
               "{%0, %1, %2, %3};"                                          \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
#endif
template <>
__device__ __forceinline__ void MultiplyAdd<BFloat16>(float (&sums)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[2]) {
  JAX_RNNT_MMA("m16n8k16", "bf16.bf16");
}
template <>
__device__ __forceinline__ void MultiplyAdd<Half>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JAX_RNNT_MMA("m16n8k16", "f16.f16");
}
template <>
__device__ __forceinline__ void MultiplyAdd<float>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  JAX_RNNT_MMA("m16n8k8", "tf32.tf32");
}
#undef JAX_RNNT_MMA
#else
template <class T>
inline void MultiplyAdd(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MultiplyByLanes<2>(sums, a, b, [](uint32_t word, int i) { return Widen(Half16<T>(word, i)); });
}
template <>
inline void MultiplyAdd<float>(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MultiplyByLanes<1>(sums, a, b, [](uint32_t word, int) { return AsFloat(int32_t(word & ~0x1fffu)); });
}
#endif

// float32 as the sum of two numbers of TF32; the second is cut where it is used.
template <int n>
__device__ __forceinline__ void Split(const uint32_t (&x)[n], uint32_t (&high)[n], uint32_t (&low)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float value = AsFloat(int32_t(x[i])), rounded = RoundToTF32(value);
    high[i] = uint32_t(AsInt(rounded)), low[i] = uint32_t(AsInt(value - rounded));
  }
}

}  // namespace jax_rnnt::cuda
