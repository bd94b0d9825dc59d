// exp and log of vectors.
#pragma once

#include "xla_kernels/cpu/simd.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

// a b + c, rounded once where there is an FMA. Operators would leave the choice to the compiler: GCC makes FMAs of them
// at -O2 and above alone, clang by its version, none with -ffp-contract=off. The bits of an element would depend on it,
// and where a product does not fit into the mantissa, the result.
template <class V>
inline V MultiplyAdd(V a, V b, V c) {
  [[maybe_unused]] constexpr bool kFloat = sizeof(c[0]) == 4;
#if defined(__AVX512F__)
  if constexpr (kFloat) {
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  } else {
    return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
  }
#elif defined(__AVX2__) && defined(__FMA__)
  if constexpr (kFloat) {
    return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  } else {
    return (V)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
  }
#elif defined(__FMA__)
  if constexpr (kFloat) {
    return (V)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
  } else {
    return (V)_mm_fmadd_pd((__m128d)a, (__m128d)b, (__m128d)c);
  }
#elif defined(__aarch64__)
  if constexpr (kFloat) {
    return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
  } else {
    return (V)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
  }
#else
  return a * b + c;
#endif
}
template <class V, class A>
inline V MultiplyAdd(V a, A b, A c) {
  return MultiplyAdd(a, Broadcast(b), Broadcast(c));
}
// c - a b
template <class V>
inline V SubtractProduct(V c, V a, V b) {
  return MultiplyAdd(-a, b, c);
}

// exp(x) = m * 2^e with m in [0.70, 1.42]. Far: for |x| <= 2^21 (2^20 x ln 2 for double without FMA); else for results
// within the range of A.
template <class A, bool far>
struct SplitExp {
  using S = Simd<A>;
  typename S::F m;
  typename S::I biased;  // e in the low bits, plus the bits of kRound

  // Adding kRound leaves the nearest integer, plus the exponent's bias, in the low bits of the sum.
  static constexpr A kRound = A(3ll << (S::kMantissaBits - 1)) + S::kExponentBias;

  explicit SplitExp(typename S::F x) {
    const typename S::F rounded = MultiplyAdd(x, A(1.44269504088896340736), kRound), n = rounded - kRound;
    const typename S::F r = Remainder(x, n), one = Broadcast(A(1));
    int i = sizeof(S::kExp) / sizeof(A) - 1;
    typename S::F poly = Broadcast(S::kExp[i]);
    while (i-- > 0) poly = MultiplyAdd(poly, r, Broadcast(S::kExp[i]));
    m = MultiplyAdd(MultiplyAdd(poly, r, one), r, one);
    biased = (typename S::I)rounded;
  }
  // x - n ln 2. Without FMA a product of n above 2^15 rounds, by up to 0.1 at x = -2^21: a double holds it.
  static typename S::F Remainder(typename S::F x, typename S::F n) {
#if !defined(__FMA__) && !defined(__aarch64__)
    if constexpr (far && sizeof(A) == 4) {
      typedef double Wide __attribute__((vector_size(2 * kVectorBytes)));
      const Wide r = __builtin_convertvector(x, Wide) - __builtin_convertvector(n, Wide) * 0.69314718055994530942;
      return __builtin_convertvector(r, typename S::F);
    }
#endif
    return SubtractProduct(SubtractProduct(x, n, Broadcast(S::kLn2High)), n, Broadcast(S::kLn2Low));
  }

  // Subtracts without sign, as the exponent of a number out of range overflows; it is not used.
  typename S::I Exponent() const {
    using Unsigned = typename S::Unsigned;
    return (typename S::I)((Unsigned)biased - (Unsigned)Broadcast(kRound));
  }
  typename S::F PowerOfTwo() const { return (typename S::F)(biased << S::kMantissaBits); }  // for e >= -bias
};

#if defined(__AVX512F__)
inline Simd<float>::F Lookup(Simd<float>::F table, Simd<float>::I index) {
  return (Simd<float>::F)_mm512_maskz_permutexvar_ps(-1, (__m512i)index, (__m512)table);
}
#elif defined(__AVX2__)
inline Simd<float>::F Lookup(Simd<float>::F table, Simd<float>::I index) {
  return (Simd<float>::F)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
}
#endif

// Keeps a constant in a register. GCC 12 would load it at every use, and take two instructions for a maximum with it.
template <class V>
inline V InRegister(V constant) {
#if defined(__GNUC__) && !defined(__clang__) && defined(__SSE2__)
  __asm__("" : "+v"(constant));
#endif
  return constant;
}

#if defined(__AVX2__)
// 2^(i / kWidth), less i / kWidth in the bits of the exponent, where Exp adds it back.
template <int... lane>
inline Simd<float>::I RootsOfTwo(std::integer_sequence<int, lane...>) {
  constexpr int kWidth = Simd<float>::kWidth;
  constexpr int32_t kRoots[] = {0x3f800000, 0x3f85aac3, 0x3f8b95c2, 0x3f91c3d3, 0x3f9837f0, 0x3f9ef532,
                                0x3fa5fed7, 0x3fad583f, 0x3fb504f3, 0x3fbd08a4, 0x3fc5672a, 0x3fce248c,
                                0x3fd744fd, 0x3fe0ccdf, 0x3feac0c7, 0x3ff5257d};
  return Simd<float>::I{kRoots[lane * (16 / kWidth)] - lane * ((1 << 23) / kWidth)...};
}
#endif

// exp(x) within 2 ulp, for results below 2^bias / 2: exp(0) is exactly 1, results below 2^-bias are exactly 0, exp(NaN)
// is NaN. Inlining is forced, since GCC would call it in large functions and save all registers.
template <class V>
[[gnu::always_inline]] inline V Exp(V x) {
  using A = std::decay_t<decltype(x[0])>;
  constexpr A kLowest = Simd<A>::kExponentBias * A(-0.6931471805599453);
  x = Max(InRegister(Broadcast(kLowest)), x);
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
    // exp(x) = 2^(n / kWidth) * exp(r). A register holds the roots of two; r is small enough for a cubic.
    using S = Simd<A>;
    constexpr int kWidth = S::kWidth;
    constexpr A kRound = A(3 << (S::kMantissaBits - 1)) / kWidth;
    constexpr A kReach = A(0.34657359) / kWidth;  // |r| at most
    const V rounded = MultiplyAdd(x, A(1.44269504088896340736), kRound), n = rounded - kRound;
    const V r = SubtractProduct(SubtractProduct(x, n, Broadcast(S::kLn2High)), n, Broadcast(S::kLn2Low));
    const typename S::I roots = RootsOfTwo(std::make_integer_sequence<int, kWidth>{});
    using Unsigned = typename S::Unsigned;  // lanes that nobody reads may wrap
    const V power =
        (V)((Unsigned)Lookup((V)roots, (typename S::I)rounded) + ((Unsigned)rounded << (kWidth == 16 ? 19 : 20)));
    const V series = MultiplyAdd(MultiplyAdd(r, A(1. / 6), A(0.5) + A(0.0345) * kReach * kReach), r, Broadcast(A(1)));
    return MultiplyAdd(series, power * r, power);
  }
#endif
  const SplitExp<A, false> split(x);
  return split.m * split.PowerOfTwo();
}

// exp(x) as above, for any x. A result of 2^bias / 2 or more may be any such number (NaN for infinity).
template <class V>
[[gnu::always_inline]] inline V ExpOfAny(V x) {
  using A = std::decay_t<decltype(x[0])>;
  constexpr A kHighest = (Simd<A>::kExponentBias - 1) * A(0.6931471805599453);
  return Exp(Min(InRegister(Broadcast(kHighest)), x));
}

// log(x) in two parts: `high` is exact, a multiple of ln 2 rounded to few bits, and |low| < 0.36.
template <class V>
struct SplitLog {
  V high, low;
};

// log(x) for normal x > 0; high + low is within 2 ulp. log(1) is exactly 0, log(NaN) is NaN.
template <class V>
inline SplitLog<V> Log(V x) {
  using A = std::decay_t<decltype(x[0])>;
  using S = Simd<A>;
  using I = typename S::I;
  constexpr int kTerms = sizeof(A) == 4 ? 5 : 12;
  // x = m * 2^e with m in [1, 2) * sqrt(1/2), and log(m) = 2 artanh(s).
  const I half = (I)Broadcast(A(0.70710678118654752440));
  const I e = ((I)x - half) >> S::kMantissaBits;
  const V m = (V)((I)x - (e << S::kMantissaBits)), n = __builtin_convertvector(e, V);
  const V s = (m - A(1)) / (m + A(1)), s2 = s * s;
  V series = Broadcast(A(0));
  for (int i = kTerms; i > 0; --i) series = (series + A(2) / A(2 * i + 1)) * s2;
  return {n * S::kLn2High, (n * S::kLn2Low + (s * series + (s + s))) + (x - x)};
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
