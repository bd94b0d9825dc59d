// Vectors as wide as the target's registers, and the few operations that the kernels need on them.
//
// The code uses vector extensions of GCC and Clang, so that one source serves SSE2, AVX2, AVX-512 and NEON. Intrinsics
// are for what the extensions cannot express, such as float16. Every file that includes this one is compiled once per
// target, and all its code, this header included, is in a namespace with the target's name: no inline function of one
// target can be linked into another.
#pragma once

#ifndef JAX_RNNT_TARGET
#error "JAX_RNNT_TARGET must be the target's name: portable, avx2 or avx512"
#endif

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Element types that C++17 does not have, as their bits.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// ---- comparisons: Max and Min return a NaN in b, but not a NaN in a ----

template <class V>
inline V Max(V a, V b) {
  return a > b ? a : b;
}

template <class V>
inline V Min(V a, V b) {
  return a < b ? a : b;
}

// Simd<A>: F is a vector of A, I a vector of signed integers of the same size, Int32s a vector of int32. All have
// kWidth lanes.
template <class A>
struct Simd;

template <>
struct Simd<float> {
  using Exponent = int32_t;
  typedef float F __attribute__((vector_size(kVectorBytes)));
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));
  typedef I Int32s;
  typedef uint16_t Bits16 __attribute__((vector_size(kVectorBytes / 2)));
  static constexpr int kWidth = kVectorBytes / sizeof(float);
  static constexpr int kMantissaBits = 23;
  static constexpr int kExponentBias = 127;
  static constexpr Exponent kZero = -700'000'000;
  // ln 2 in two parts; the product of the first with an integer below 2^15 is exact.
  static constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  // exp(r) = 1 + r + r^2 * (c0 + c1 r + ...) on |r| <= ln(2) / 2, relative error 3e-9.
  static constexpr float kExp[] = {0.49999993442154368f, 0.16666520547899476f, 0.041668389031667860f,
                                   0.0083687270508803457f, 0.0013814577579428481f};
  static F AsFloat(I x) { return (F)x; }
  static I AsInt(F x) { return (I)x; }
  static I Max(I a, I b) { return JAX_RNNT_TARGET::Max(a, b); }
};

template <>
struct Simd<double> {
  using Exponent = int64_t;
  typedef double F __attribute__((vector_size(kVectorBytes)));
  typedef int64_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Unsigned __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int32s __attribute__((vector_size(kVectorBytes / 2)));
  static constexpr int kWidth = kVectorBytes / sizeof(double);
  static constexpr int kMantissaBits = 52;
  static constexpr int kExponentBias = 1023;
  static constexpr Exponent kZero = -700'000'000'000'000;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  // Relative error 4e-18.
  static constexpr double kExp[] = {0.50000000000000106421,    0.16666666666666412158,    0.041666666666530003549,
                                    0.0083333333334946472937,  0.0013888888943676896394,  0.00019841269506185288357,
                                    2.4801493045117860706e-05, 2.7557586528698073589e-06, 2.7630269236390500297e-07,
                                    2.5000046214697808094e-08};
  static F AsFloat(I x) { return (F)x; }
  static I AsInt(F x) { return (I)x; }
  static I Max(I a, I b) { return JAX_RNNT_TARGET::Max(a, b); }
};

template <class A>
inline typename Simd<A>::F Broadcast(A x) {
  return x - typename Simd<A>::F{};  // x + 0 would turn -0 into 0, so it would cost an instruction
}

// ---- lanes ----

template <class A, int... lane>
inline typename Simd<A>::I LaneNumbers(std::integer_sequence<int, lane...>) {
  return typename Simd<A>::I{lane...};
}

// Lane i is true where begin <= i < end.
template <class A>
inline auto LanesBetween(int64_t begin, int64_t end) {
  using Lane = typename Simd<A>::Exponent;
  const auto lane = LaneNumbers<A>(std::make_integer_sequence<int, Simd<A>::kWidth>{});
  return (lane >= Lane(begin)) & (lane < Lane(end));
}

// Lane `number`, if it exists, is true.
template <class A>
inline auto IsLane(int64_t number) {
  using Lane = typename Simd<A>::Exponent;
  return LaneNumbers<A>(std::make_integer_sequence<int, Simd<A>::kWidth>{}) == Lane(number);
}

template <class V>
constexpr int Width() {
  return sizeof(V) / sizeof(V{}[0]);
}

template <class V, class Index, int... lane>
inline V Permute(V a, V b, Index index, std::integer_sequence<int, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, index(lane)...);
#else
  using Lane = std::conditional_t<sizeof(a[0]) == 4, int32_t, int64_t>;
  typedef Lane Mask __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Mask{index(lane)...});
#endif
}

// Lane i of the result is lane index(i) of the 2 * Width lanes of a followed by b.
template <class V, class Index>
inline V Permute(V a, V b, Index index) {
  return Permute(a, b, index, std::make_integer_sequence<int, Width<V>()>{});
}

// Lane i - 1 of v moves to lane i; the last lane of `in` becomes lane 0.
template <class V>
inline V ShiftUp(V v, V in) {
  return Permute(in, v, [](int lane) { return lane + Width<V>() - 1; });
}

// Lane i + 1 of v moves to lane i; lane 0 of `in` becomes the last lane.
template <class V>
inline V ShiftDown(V v, V in) {
  return Permute(v, in, [](int lane) { return lane + 1; });
}

// Shifts by kBy lanes, up or down. `in`, the same in all lanes, fills the others.
template <int kBy, bool kDown, class V>
inline V ShiftBy(V v, V in) {
  return Permute(v, in, [](int lane) {
    const int from = kDown ? lane + kBy : lane - kBy;
    return 0 <= from && from < Width<V>() ? from : Width<V>() + lane;
  });
}

template <int kStride, class V, class Combine>
inline auto Reduce(V v, Combine combine) {
  if constexpr (kStride == 0) {
    return v[0];
  } else {
    return Reduce<kStride / 2>(combine(v, Permute(v, v, [](int lane) { return lane ^ kStride; })), combine);
  }
}

template <class V>
inline auto MaxOfLanes(V v) {
  return Reduce<Width<V>() / 2>(v, [](V a, V b) { return Max(a, b); });
}

template <class V>
inline auto SumOfLanes(V v) {
  return Reduce<Width<V>() / 2>(v, [](V a, V b) { return a + b; });
}

// Whether any lane of a comparison is true.
template <class I>
inline bool Any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#else
  bool any = false;
  for (int lane = 0; lane < Width<I>(); ++lane) any |= mask[lane] != 0;
  return any;
#endif
}

// One step of a transposition: exchanges the lanes of a that have kBit in their number with the lanes of b that do not.
template <int kBit, class V>
inline V Low(V a, V b) {
  return Permute(a, b, [](int lane) { return lane & kBit ? Width<V>() + lane - kBit : lane; });
}
template <int kBit, class V>
inline V High(V a, V b) {
  return Permute(a, b, [](int lane) { return lane & kBit ? Width<V>() + lane : lane + kBit; });
}

// Transposes the square matrix with the rows v[0 .. Width), one bit of the row and lane numbers after the other.
template <int kBit = 1, class V>
inline void Transpose(V* v) {
  if constexpr (kBit < Width<V>()) {
    for (int row = 0; row < Width<V>(); ++row) {
      if (row & kBit) continue;
      const V a = v[row], b = v[row + kBit];
      v[row] = Low<kBit>(a, b);
      v[row + kBit] = High<kBit>(a, b);
    }
    Transpose<2 * kBit>(v);
  }
}

// Lane i of the result combines all lanes of v[i]. Overwrites v.
template <int kBit = 1, class V, class Combine>
inline V ReduceRows(V* v, Combine combine) {
  if constexpr (kBit < Width<V>()) {
    for (int row = 0; row < Width<V>(); row += 2 * kBit) {
      v[row] = combine(Low<kBit>(v[row], v[row + kBit]), High<kBit>(v[row], v[row + kBit]));
    }
    return ReduceRows<2 * kBit>(v, combine);
  }
  return v[0];
}

// ---- memory: any alignment ----

template <class V>
inline V LoadAs(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

inline Simd<float>::F Load(const float* p) { return LoadAs<Simd<float>::F>(p); }
inline Simd<double>::F Load(const double* p) { return LoadAs<Simd<double>::F>(p); }
inline Simd<float>::I Load(const int32_t* p) { return LoadAs<Simd<float>::I>(p); }
inline Simd<double>::I Load(const int64_t* p) { return LoadAs<Simd<double>::I>(p); }

template <class T, class V>
inline void StoreAs(V v, T* p) {
  static_assert(sizeof(V) == Width<V>() * sizeof(T));
  __builtin_memcpy(p, &v, sizeof(V));
}

inline void Store(Simd<float>::F v, float* p) { StoreAs(v, p); }
inline void Store(Simd<double>::F v, double* p) { StoreAs(v, p); }
inline void Store(Simd<float>::I v, int32_t* p) { StoreAs(v, p); }
inline void Store(Simd<double>::I v, int64_t* p) { StoreAs(v, p); }

inline Simd<float>::F Load(const BFloat16* p) {
  using S = Simd<float>;
#if defined(__aarch64__)  // one instruction; GCC 12 makes twelve of the other
  return (S::F)vshll_n_u16(LoadAs<uint16x4_t>(p), 16);
#else
  return (S::F)(__builtin_convertvector(LoadAs<S::Bits16>(p), S::I) << 16);
#endif
}

inline void Store(Simd<float>::F v, BFloat16* p) {  // to nearest, ties to even; a NaN stays one
  using S = Simd<float>;
  const S::I bits = (S::I)v;
  const S::I rounded = bits + 0x7fff + ((bits >> 16) & 1);
  const S::I result = v == v ? rounded : bits | 0x400000;
  StoreAs(__builtin_convertvector(result >> 16, S::Bits16), p);
}

#if defined(__AVX512F__)  // the masks only keep GCC 12 from warnings about its own headers
inline Simd<float>::F Load(const Half* p) { return _mm512_maskz_cvtph_ps(-1, LoadAs<__m256i>(p)); }
inline void Store(Simd<float>::F v, Half* p) { StoreAs((Simd<float>::Bits16)_mm512_maskz_cvtps_ph(-1, v, 0), p); }
#elif defined(__F16C__)
inline Simd<float>::F Load(const Half* p) { return _mm256_cvtph_ps(LoadAs<__m128i>(p)); }
inline void Store(Simd<float>::F v, Half* p) { StoreAs((Simd<float>::Bits16)_mm256_cvtps_ph(v, 0), p); }
#elif defined(__aarch64__)
inline Simd<float>::F Load(const Half* p) { return (Simd<float>::F)vcvt_f32_f16(LoadAs<float16x4_t>(p)); }
inline void Store(Simd<float>::F v, Half* p) { StoreAs((Simd<float>::Bits16)vcvt_f16_f32((float32x4_t)v), p); }
#else
inline Simd<float>::F Load(const Half* p) {
  using S = Simd<float>;
  const S::I bits = __builtin_convertvector(LoadAs<S::Bits16>(p), S::I);
  const S::I magnitude = (bits & 0x7fff) << 13;
  // The biases of the exponents differ by 112. Subnormals are a difference of normal floats: float subnormals may be
  // flushed.
  const S::I subnormal = (S::I)((S::F)(magnitude + (113 << 23)) - 0x1p-14f);
  const S::I finite = magnitude < (1 << 23) ? subnormal : magnitude + (112 << 23);
  const S::I wide = magnitude >= (0x7c00 << 13) ? magnitude | 0x7f800000 : finite;
  return (S::F)(wide | (bits & 0x8000) << 16);
}

inline void Store(Simd<float>::F v, Half* p) {  // to nearest, ties to even
  using S = Simd<float>;
  const S::I bits = (S::I)v, magnitude = bits & 0x7fffffff;
  // Below 2^-14 the result is subnormal: adding 0.5 leaves its rounded bits at the bottom.
  const S::I subnormal = (S::I)((S::F)magnitude + 0.5f) - 0x3f000000;
  const S::I normal = (magnitude - (112 << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  S::I half = magnitude < (113 << 23) ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? S::I{} + 0x7c00 : half;  // rounds to 2^16 or more
  half = magnitude > 0x7f800000 ? S::I{} + 0x7e00 : half;   // NaN
  StoreAs(__builtin_convertvector(half | ((bits >> 16) & 0x8000), S::Bits16), p);
}
#endif

// Stores the last n lanes of v to the n elements before `end`.
template <class V, class T>
inline void StoreLast(V v, int n, T* end) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    return _mm512_mask_storeu_ps(end - 16, __mmask16(0xffffu << (16 - n)), (__m512)v);
  }
#endif
  T lanes[Width<V>()];
  Store(v, lanes);
  for (int i = 0; i < n; ++i) end[i - n] = lanes[Width<V>() - n + i];
}

// Writes n zeros. Whole cache lines bypass the caches, so they are not read first. Fence() makes them visible to other
// threads.
template <class T>
inline void StreamZeros(T* p, int64_t n) {
  char* at = reinterpret_cast<char*>(p);
  char* const end = at + n * sizeof(T);
#if defined(__SSE2__)
  char* const first = at + (-reinterpret_cast<uintptr_t>(at) & 63);
  if (end - first >= 64) {
    __builtin_memset(at, 0, first - at);
    for (at = first; end - at >= 64; at += 64) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(at), _mm512_setzero_si512());
#elif defined(__AVX2__)
      for (int i = 0; i < 64; i += 32) _mm256_stream_si256(reinterpret_cast<__m256i*>(at + i), _mm256_setzero_si256());
#else
      for (int i = 0; i < 64; i += 16) _mm_stream_si128(reinterpret_cast<__m128i*>(at + i), _mm_setzero_si128());
#endif
    }
  }
#endif
  __builtin_memset(at, 0, end - at);
}

inline void Fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
