// Numbers m * 2^e with their own integer exponent: the values of the lattice recursions, alpha and beta.
//
// Why not logarithms: a float32 log alpha of a few thousand has an error of 1e-4 to 1e-3, and a posterior
// gamma = alpha e^l beta / alpha(T, U) is the exp of such values, added and subtracted. Here every operation has the
// relative error of a float product, whatever the size of the likelihood, and the critical path of the recursion
// contains neither exp nor log:
//   (m 2^e) (m' 2^e') = (m m') 2^(e + e')                              one rounding, of m m'
//   m 2^e + m' 2^e'   = (m + m' 2^(e' - e)) 2^e   with e >= e'         one rounding: powers of two are exact
// All terms are positive, so relative errors do not grow where they add: n steps have at most 2 n 2^-24 in float32.
//
// S describes the lanes: S::F (mantissas), S::I (signed exponents), S::Unsigned (of their size), S::kMantissaBits,
// S::kExponentBias, S::kZero, S::Max, and the casts S::AsFloat and S::AsInt between F and I.
//
// Products and sums do not normalize: a step changes the mantissa by a factor of 2.9 at most, in either direction, as a
// probability has a mantissa in [0.70, 1.42] and a sum has two terms. Call Normalize at least every 16 steps: 2.9^16 is
// below 2^25, so neither a mantissa nor a product of two leaves the float range.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define JAX_RNNT_HOST_DEVICE __host__ __device__
#else
#define JAX_RNNT_HOST_DEVICE
#endif

namespace jax_rnnt {

// Zero is m = 0, e = S::kZero. No sum of three exponents between S::kZero and -S::kZero overflows.
template <class S>
struct Extended {
  typename S::F m;
  typename S::I e;
};

template <class S>
JAX_RNNT_HOST_DEVICE inline Extended<S> Zero() {
  return {typename S::F{}, typename S::I{} + S::kZero};
}

// Sums and differences of exponents wrap around: those of arcs above 2^21 leave the range of S::I. Such sequences are
// computed once more, in wide mode.
template <class S>
JAX_RNNT_HOST_DEVICE inline typename S::I WrappingSum(typename S::I a, typename S::I b) {
  return (typename S::I)((typename S::Unsigned)a + (typename S::Unsigned)b);
}
template <class S>
JAX_RNNT_HOST_DEVICE inline typename S::I WrappingDifference(typename S::I a, typename S::I b) {
  return (typename S::I)((typename S::Unsigned)a - (typename S::Unsigned)b);
}

// 2^(e - kExponentBias), or 0 for a negative e, which must not be above the range of F.
template <class S>
JAX_RNNT_HOST_DEVICE inline typename S::F BiasedPower(typename S::I e) {
  return S::AsFloat((typename S::I)((typename S::Unsigned)S::Max(e, typename S::I{}) << S::kMantissaBits));
}
// 2^e, or 0 for an e below the range of F. e must not be above it.
template <class S>
JAX_RNNT_HOST_DEVICE inline typename S::F PowerOfTwo(typename S::I e) {
  return S::AsFloat((S::Max(e, typename S::I{} - S::kExponentBias) + S::kExponentBias) << S::kMantissaBits);
}

template <class S>
JAX_RNNT_HOST_DEVICE inline Extended<S> operator*(Extended<S> a, Extended<S> b) {
  return {a.m * b.m, WrappingSum<S>(a.e, b.e)};
}

template <class S>
JAX_RNNT_HOST_DEVICE inline Extended<S> operator+(Extended<S> a, Extended<S> b) {
  const typename S::I e = S::Max(S::Max(a.e, b.e), typename S::I{} + S::kZero);
  const typename S::I unbiased = WrappingDifference<S>(e, typename S::I{} + S::kExponentBias);
  const auto scaled = [&](Extended<S> x) {  // x.m * 2^(x.e - e): one operation less than PowerOfTwo, as e is shared
    return x.m * BiasedPower<S>(WrappingDifference<S>(x.e, unbiased));
  };
  return {scaled(a) + scaled(b), e};
}

// The same number with a mantissa in [1, 2), or exact zero.
template <class S>
JAX_RNNT_HOST_DEVICE inline Extended<S> Normalize(Extended<S> a) {
  using I = typename S::I;
  constexpr auto kOne = decltype(S::kZero){S::kExponentBias} << S::kMantissaBits;
  constexpr auto kExponentMask = 2 * kOne + (decltype(S::kZero){1} << S::kMantissaBits);
  const I bits = S::AsInt(a.m), exponent = bits & kExponentMask;
  const Extended<S> normal = {S::AsFloat((bits ^ exponent) | kOne),
                              WrappingSum<S>(a.e, (exponent >> S::kMantissaBits) - S::kExponentBias)};
  return {exponent == 0 ? typename S::F{} : normal.m, exponent == 0 ? I{} + S::kZero : normal.e};
}

// A single lane.
template <class A>
struct Scalar;

namespace internal {
template <class To, class From>
JAX_RNNT_HOST_DEVICE inline To Bits(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace internal

template <>
struct Scalar<float> {
  using F = float;
  using I = int32_t;
  using Unsigned = uint32_t;
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  static constexpr I kZero = -700'000'000;
  static JAX_RNNT_HOST_DEVICE I Max(I a, I b) { return a > b ? a : b; }
  static JAX_RNNT_HOST_DEVICE F AsFloat(I x) { return internal::Bits<F>(x); }
  static JAX_RNNT_HOST_DEVICE I AsInt(F x) { return internal::Bits<I>(x); }
};
template <>
struct Scalar<double> {
  using F = double;
  using I = int64_t;
  using Unsigned = uint64_t;
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
  static constexpr I kZero = -700'000'000'000'000;
  static JAX_RNNT_HOST_DEVICE I Max(I a, I b) { return a > b ? a : b; }
  static JAX_RNNT_HOST_DEVICE F AsFloat(I x) { return internal::Bits<F>(x); }
  static JAX_RNNT_HOST_DEVICE I AsInt(F x) { return internal::Bits<I>(x); }
};

}  // namespace jax_rnnt
