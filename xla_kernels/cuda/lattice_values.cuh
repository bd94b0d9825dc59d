// Shared by both lattice kernels: numbers m * 2^e, probabilities of arcs, the loss; tiles of 32 by 32 nodes.
//
// Fast mode multiplies numbers m * 2^e; an arc outside [-kLimit, kLimit] has probability zero there. Wide mode adds
// logarithms in float64. A sequence needs wide mode if arcs of such a size may decide its result: see NeedsWide.
#pragma once

#include <type_traits>

#include "xla_kernels/common/extended.h"
#include "xla_kernels/cuda/memory.cuh"

namespace jax_rnnt::cuda {

#ifndef JAX_RNNT_GRID_Y
#define JAX_RNNT_GRID_Y 65535
#endif
constexpr unsigned kMaxGridY = JAX_RNNT_GRID_Y;

// Blocks of (32, 8) threads reorder planes, a tile of 32 frames x 32 columns at a time.
constexpr int kTile = 32, kSkewRows = 8;
constexpr int64_t Tiles(int64_t n) { return (n + kTile - 1) / kTile; }

// The tile of a block, and the column of a thread in it.
struct Tile {
  __device__ __forceinline__ explicit Tile(int columns)
      : first_t(int(blockIdx.x) / int(Tiles(columns)) * kTile),
        first_u(int(blockIdx.x) % int(Tiles(columns)) * kTile),
        lane(int(threadIdx.x)),
        u(first_u + lane) {}

  // Whether no node of the sequence lies in it.
  template <class Sequence>
  __device__ __forceinline__ bool Outside(const Sequence& sequence) const {
    return first_t >= sequence.frames || first_u > sequence.labels;
  }
  // Calls visit(t, place in a plane) for the nodes of column u of sequence b.
  template <class Arguments, class Sequence, class Visit>
  __device__ __forceinline__ void ByFrames(const Arguments& args, const Sequence& sequence, int b,
                                           const Visit& visit) const {
    for (int t = first_t + int(threadIdx.y); t < min(first_t + kTile, args.frames); t += kSkewRows) {
      if (u < args.columns) visit(t, int64_t(b) * sequence.plane + t * args.columns + u);
    }
  }

  int first_t, first_u, lane, u;
};

template <class A>
using Value = Extended<Scalar<A>>;

template <class A>
constexpr A kInfinity = A(__builtin_huge_val());
template <class A>
constexpr A kLimit = A(1 << 21);
template <class A>
__device__ __forceinline__ Value<A> One() {
  return {A(1), 0};
}

// A number whose Probability is zero, as it comes out of the arithmetic there: the product is rounded so that the
// fraction is very negative, and the exponent is so low that no value times zero outweighs a value.
template <class A>
constexpr A kNever = sizeof(A) == 4 ? A(-0x1p126) : A(-0x1p1022);

// exp(x); zero if |x| > limit or x is NaN. A negative limit stands for arcs that do not exist: it costs no operation.
// Adding kRound leaves the nearest exponent in the low bits.
template <class A>
__device__ __forceinline__ Value<A> Probability(A x, A limit = kLimit<A>) {
  using S = Scalar<A>;
  // log2(e) in two parts.
  constexpr A kLog2E = A(1.4426950408889634074), kLow = sizeof(A) == 4 ? A(1.925963033e-8) : A(2.0355273740931033e-17);
  constexpr A kRound = A(3ll << (S::kMantissaBits - 1));
  x = Abs(x) <= limit ? x : kNever<A>;
  const A rounded = Fma(x, kLog2E, kRound), n = rounded - kRound;
  const A fraction = Fma(x, kLow, Fma(x, kLog2E, -n));  // the inner product is exact
  return {Exp2(fraction), S::AsInt(rounded) - S::AsInt(kRound)};
}

// a * p and a + b, with exponents of at least kZero. Shorter than the operators, since a sum relies on that bound.
template <class A>
__device__ __forceinline__ Value<A> Times(Value<A> a, Value<A> p) {
  using S = Scalar<A>;
  return {a.m * p.m, S::Max(WrappingSum<S>(a.e, p.e), S::kZero)};
}
template <class A>
struct Sum {
  __device__ __forceinline__ Sum(Value<A> x, Value<A> y) : e(Scalar<A>::Max(x.e, y.e)) {
    const auto shift = Scalar<A>::kExponentBias - e;
    a = x.m * BiasedPower<Scalar<A>>(x.e + shift), b = y.m * BiasedPower<Scalar<A>>(y.e + shift);
  }
  A a, b;  // its terms: (a + b) 2^e
  typename Scalar<A>::I e;
};
template <class A>
__device__ __forceinline__ Value<A> Plus(Value<A> a, Value<A> b) {
  const Sum<A> sum(a, b);
  return {sum.a + sum.b, sum.e};
}

// 1 as 2^-k * 2^k, where 2^k is about x: the product of a number with it has a mantissa near 1. Shorter than Normalize:
// no exception is made for zero, whose exponent falls a little below kZero.
template <class A>
__device__ __forceinline__ Value<A> Scale(A x) {
  using S = Scalar<A>;
  constexpr auto kOne = decltype(S::kZero){S::kExponentBias} << S::kMantissaBits;
  const auto power = S::AsInt(x) & (2 * kOne + (decltype(S::kZero){1} << S::kMantissaBits));
  return {S::AsFloat(2 * kOne - power), (power >> S::kMantissaBits) - S::kExponentBias};
}

// ---- Arcs of any size ----

// Bits of the flag of a tile: which kinds of arcs it has.
constexpr int kBad = 1;    // NaN or +inf: the loss is NaN
constexpr int kFaint = 2;  // finite, below -low
constexpr int kHigh = 4;   // finite, above high
constexpr int kHuge = 8;   // finite, above low: exponents of fast mode may wrap around, so its values are not used

// Bounds for paths of at most n = T + U arcs, in nats:
//
// * Arcs within [-low, low] make at most 2^28 of a path, and 2^28 / ln 2 < 7e8: no exponent saturates at kZero.
// * Arcs of at most `high` add at most 2^20 to a path. If none is higher, a path that fast mode loses, since it has an
//   arc below -kLimit = -2^21 or an exponent below kZero, is at most exp(2^20 - 2^21) = exp(-2^20).
// * So if the likelihood is at least 2^(-2^20) > exp(-0.7 * 2^20), such a path is less than exp(-2^18) of it. That is
//   the condition of NeedsWide.
template <class A>
struct Limits {
  __device__ __forceinline__ Limits(int frames, int labels)
      : low(min(kLimit<A>, A(1 << 28) / (A(frames) + A(labels) + A(1)))),
        high(A(1 << 20) / (A(frames) + A(labels) + A(1))) {}
  __device__ __forceinline__ int Bits(A x) const {
    if ((x >= -low && x <= high) || x == -kInfinity<A>) return 0;
    if (!(x < kInfinity<A>)) return kBad;
    return (x < -low ? kFaint : kHigh) | (x > low ? kHuge : 0);
  }

  A low, high;
};

// Returns the bits of all threads of the block to all of them. Contains a barrier.
__device__ __forceinline__ int OrBits(int bits) {
  int all = 0;
  if (__syncthreads_or(bits) == 0) return all;
#pragma unroll 1
  for (int bit = kBad; bit <= kHuge; bit *= 2) all |= __syncthreads_or(bits & bit) != 0 ? bit : 0;
  return all;
}

// Whether fast mode may be wrong: see Limits.
template <class A>
__device__ __forceinline__ bool NeedsWide(int bits, Value<A> likelihood) {
  if ((bits & kBad) != 0) return false;
  const bool small = likelihood.m == 0 || likelihood.e < -(1 << 20);
  return (bits & kHuge) != 0 || ((bits & kFaint) != 0 && ((bits & kHigh) != 0 || small));
}

// exp(kCoarseUnit * coarse + fine). `coarse` sums the arcs above kCoarse in size and `fine` all others, so equal masks
// on all paths cancel at any size. The unit keeps sums of float64 arcs finite.
constexpr double kCoarse = 1 << 20, kCoarseUnit = 0x1p32;
struct LogWeight {
  double coarse, fine;
  __device__ __forceinline__ bool Possible() const { return fine > -kInfinity<double>; }
};
__device__ __forceinline__ LogWeight Impossible() { return {0, -kInfinity<double>}; }

// Times the probability of an arc; its log-probability x is finite or -inf.
__device__ __forceinline__ LogWeight operator*(LogWeight w, double x) {
  const bool coarse = Abs(x) > kCoarse && x > -kInfinity<double>;
  return {coarse ? w.coarse + x / kCoarseUnit : w.coarse, coarse ? w.fine : w.fine + x};
}
// log(a / b); b must be possible.
__device__ __forceinline__ double LogRatio(LogWeight a, LogWeight b) {
  return a.Possible() ? (a.coarse - b.coarse) * kCoarseUnit + (a.fine - b.fine) : -kInfinity<double>;
}
// a + b; *share is the share of a in it.
__device__ __forceinline__ LogWeight Add(LogWeight a, LogWeight b, double* share) {
  *share = b.Possible() ? 0 : 1;
  if (!a.Possible() || !b.Possible()) return a.Possible() ? a : b;
  const double ratio = LogRatio(a, b), less = exp(-Abs(ratio));
  LogWeight sum = ratio > 0 ? a : b;
  *share = (ratio > 0 ? 1 : less) / (1 + less);
  sum.fine += log1p(less);
  return sum;
}

// +inf if the loss is beyond the largest A, as if there were no path.
template <class A>
__device__ __forceinline__ A LossOf(LogWeight likelihood) {
  constexpr double kMax = sizeof(A) == 4 ? 3.4028234663852886e38 : 1.7976931348623157e308;
  const double loss = 0 - (likelihood.coarse * kCoarseUnit + likelihood.fine);
  return loss > kMax ? kInfinity<A> : A(loss);
}

// ---- Losses of fast mode ----

template <class A>
__device__ __forceinline__ A LossOf(bool bad, Value<A> likelihood) {
  if (bad) return kInfinity<A> - kInfinity<A>;
  if (likelihood.m == 0) return kInfinity<A>;
  // One rounding, so that the kernels with and without a gradient give the same bits.
  return A(0 - Fma(double(likelihood.e), 0.69314718055994530942, Log(double(likelihood.m))));
}

// Without frames there is only the empty path, which has no label.
template <class A>
__device__ __forceinline__ A LossOfNoFrames(int labels) {
  return labels == 0 ? A(0) : kInfinity<A>;
}

}  // namespace jax_rnnt::cuda
