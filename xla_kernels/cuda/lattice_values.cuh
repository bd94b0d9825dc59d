// What both lattice kernels compute with: numbers m * 2^e, probabilities of arcs, the loss; tiles of 32 by 32 nodes.
#pragma once

#include "xla_kernels/common/extended.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

constexpr unsigned kMaxGridY = 65535;

// Blocks of (32, 8) threads reorder planes, a tile at a time.
constexpr int kTile = 32, kSkewRows = 8;
constexpr int64_t Tiles(int64_t n) { return (n + kTile - 1) / kTile; }

template <class A>
using Value = Extended<Scalar<A>>;

template <class A>
constexpr A kInfinity = A(__builtin_huge_val());
// Arcs below -kLimit have probability zero, arcs above kLimit count as +inf.
template <class A>
constexpr A kLimit = A(1 << 21);
template <class A>
__device__ __forceinline__ Value<A> One() {
  return {A(1), 0};
}

// exp(x), x < kLimit. Adding kRound leaves the nearest exponent in the low bits.
template <class A>
__device__ __forceinline__ Value<A> Probability(A x) {
  using S = Scalar<A>;
  // ln 2 in two parts.
  constexpr A kLn2High = sizeof(A) == 4 ? A(0.693145752f) : A(0.693147180369123816490);
  constexpr A kLn2Low = sizeof(A) == 4 ? A(1.42860677e-6f) : A(1.90821492927058770002e-10);
  constexpr A kLog2E = A(1.4426950408889634074), kRound = A(3ll << (S::kMantissaBits - 1));
  const A rounded = x * kLog2E + kRound, n = rounded - kRound;
  const A r = (x - n * kLn2High) - n * kLn2Low;
  const bool possible = x > -kLimit<A>;
  return {possible ? Exp2(r * kLog2E) : A(0), possible ? S::AsInt(rounded) - S::AsInt(kRound) : S::kZero};
}

// An arc that cannot be taken, or that makes its sequence's loss NaN, as -inf.
template <class A>
__device__ __forceinline__ A Checked(A x) {
  return x > -kLimit<A> && x < kLimit<A> ? x : -kInfinity<A>;
}

template <class A>
__device__ __forceinline__ A LossOf(bool bad, Value<A> likelihood) {
  if (bad) return kInfinity<A> - kInfinity<A>;
  if (likelihood.m == 0) return kInfinity<A>;
  return A(0 - (Log(double(likelihood.m)) + double(likelihood.e) * 0.69314718055994530942));
}

// No frame: the empty path, if there is no label.
template <class A>
__device__ __forceinline__ A LossOfNoFrames(int labels) {
  return labels == 0 ? A(0) : kInfinity<A>;
}

}  // namespace jax_rnnt::cuda
