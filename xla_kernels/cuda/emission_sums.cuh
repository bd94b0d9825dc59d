// The softmax of a row: a maximum and a sum, which lanes, warps or blocks find apart and join.
//
// Part p of a row has a reference m_p and the sum s_p = sum of exp(z - m_p) over its logits. For any m,
//   s = sum_p s_p exp(m_p - m),   lse = m + log(s),   softmax = exp(z - m) / s
// since exp(z - m_p) exp(m_p - m) = exp(z - m). With m = max_p m_p no factor exceeds 1, and the part that has the
// maximum keeps its sum of at least 1: nothing overflows, and what underflows is below 2^-126 of s. Devices that share
// a vocabulary join their parts by the same equation, in the emissions of the package; there the parts are their lse.
// A rescaled sum is rounded once more, so parts join in an order that depends on the row's length alone.
#pragma once

#include "xla_kernels/cuda/emission_rows.cuh"

namespace jax_rnnt::cuda {
namespace {

// The sum of exp(x[i]) as sum * exp(max).
template <class A>
struct LogSumExp {
  A max = kLowest<A>, sum = 0;  // max is finite, so that -inf - max is not NaN

  // The factor of a sum that refers to the old maximum.
  __device__ __forceinline__ A Advance(A new_max) {
    const A factor = Exp(max - new_max);
    max = new_max;
    return factor;
  }
  __device__ __forceinline__ void Rescale(A new_max) { sum = RoundedProduct(sum, Advance(new_max)); }
  __device__ __forceinline__ void Add(A x) {
    const A factor = Advance(Max(max, x));
    sum = Fma(sum, factor, Exp(x - max));
  }
};

// x * log2(e), and how much the exact product is larger. Rounded, since the difference of two products that are equal
// must be 0: fused with the other, one of x = 1e4 would multiply a sum by 1 + 2e-4 in each step.
template <class A>
__device__ __forceinline__ A Binary(A x) {
  return RoundedProduct(x, kLog2E<A>);
}
template <class A>
__device__ __forceinline__ A BinaryError(A x) {
  return Fma(x, kLog2E<A>, -Binary(x));
}

// The same as sum * 2^Binary(max), in one instruction less per element: exp(x - max) takes a difference and a product,
// 2^(x * log2(e) - Binary(max)) a multiply-add, which does not round the product. That Binary(max) is rounded changes
// what the sum refers to, by the same factor for all elements; Natural corrects it, once for a row. If max is so large
// that the factor is no number, or all elements are below the first max, the sum is not Valid, and SumSlowly must find
// it. So it must if there is -inf alone, +inf or NaN.
template <class A>
struct BinarySum {
  static constexpr A kFirst = kLowest<A> / 2;
  A max = kFirst, sum = 0;

  // As those of LogSumExp. Where a sum is rescaled is written as a multiply-add, or rounded: left to the compiler, one
  // would be fused for aligned rows and not for others, or in one lane and not in its neighbour, and bits of a row
  // would depend on its address and its lane.
  __device__ __forceinline__ A Advance(A new_max) {
    const A factor = Exp2(Binary(max) - Binary(new_max));
    max = new_max;
    return factor;
  }
  __device__ __forceinline__ void Rescale(A new_max) { sum = RoundedProduct(sum, Advance(new_max)); }
  __device__ __forceinline__ A Term(A x) const { return Exp2(Fma(x, kLog2E<A>, -Binary(max))); }
  __device__ __forceinline__ bool Valid() const { return sum > 0 && sum < kInfinity<A>; }
  __device__ __forceinline__ LogSumExp<A> Natural() const {
    return {max, RoundedProduct(sum, Exp2(-BinaryError(max)))};
  }
};

// A row as the lanes of a group read it.
template <class T>
struct RowOfLogits {
  __device__ __forceinline__ RowOfLogits(const T* x, int n, int skip)
      : x(x), n(unsigned(n)), count(unsigned(n) / kElements<T>), skip(unsigned(skip)), misaligned(Misaligned(x)) {}

  const T* x;
  unsigned n, count, skip;  // elements, vectors, an element to leave out
  int misaligned;
};

// Adds vectors; without `with_last`, the last one counts for the maximum alone.
template <class T, unsigned kVectors>
__device__ __forceinline__ void AddWords(BinarySum<Accumulator<T>>& total, const Words (&v)[kVectors], bool with_last) {
  Words max = v[0];
#pragma unroll
  for (unsigned j = 1; j < kVectors; ++j) max = MaxWords<T>(max, v[j]);
  const Accumulator<T> factor = total.Advance(Max(total.max, MaxElement<T>(max)));
#pragma unroll
  for (unsigned j = 0; j < kVectors; ++j) {
    Accumulator<T> sum = total.Term(Element<T>(v[j], 0));
#pragma unroll
    for (unsigned e = 1; e < kElements<T>; ++e) sum += total.Term(Element<T>(v[j], e));
    const bool counts = j + 1 < kVectors || with_last;
    if (j == 0) {
      total.sum = Fma(total.sum, factor, counts ? sum : Accumulator<T>(0));
    } else if (counts) {
      total.sum += sum;
    }
  }
}

// Adds the vectors first + lane, first + kLanes + lane ... of a row, kVectors for each lane. A lane for which there is
// no last vector repeats that of another lane, and leaves it out of the sum.
template <unsigned kVectors, unsigned kLanes, Access kAccess, class T>
__device__ __forceinline__ void AddVectors(BinarySum<Accumulator<T>>& total, const RowOfLogits<T>& row, const T* x,
                                           unsigned first, unsigned lane) {
  constexpr unsigned kSize = kElements<T>, kStep = kVectors * kLanes;
  const unsigned last = first + kStep - kLanes + lane, in_row = min(last, row.count - 1);
  Words v[kVectors];
  Loaded<T, kAccess> loaded[kVectors];
#pragma unroll
  for (unsigned j = 0; j + 1 < kVectors; ++j) loaded[j].Load(x + (first + lane) * kSize + j * kLanes * kSize);
  loaded[kVectors - 1].Load(x + in_row * kSize);
#pragma unroll
  for (unsigned j = 0; j < kVectors; ++j) v[j] = loaded[j].Get(row.misaligned);
  if (row.skip - first * kSize < kStep * kSize) {  // false for no element, which is the largest number
#pragma unroll
    for (unsigned j = 0; j < kVectors; ++j) {
      const unsigned i = j + 1 < kVectors ? first + j * kLanes + lane : in_row;
      if (i == row.skip / kSize) v[j] = Without<T>(v[j], row.skip % kSize);
    }
  }
  AddWords<T>(total, v, last < row.count);
}

// Adds all vectors from `first` on: kVectors at a time, then less.
template <unsigned kVectors, unsigned kLanes, Access kAccess, class T>
__device__ __forceinline__ void AddAllVectors(BinarySum<Accumulator<T>>& total, const RowOfLogits<T>& row, const T* x,
                                              unsigned first, unsigned lane) {
  for (; first + (kVectors - 1) * kLanes < row.count; first += kVectors * kLanes) {
    AddVectors<kVectors, kLanes, kAccess>(total, row, x, first, lane);
  }
  if constexpr (kVectors > 1) AddAllVectors<kVectors / 2, kLanes, kAccess>(total, row, x, first, lane);
}

// This lane's sum of the row without an element. The assignment of elements to lanes does not depend on the address, so
// the same row gives the same bits in any batch and padding.
template <unsigned kLanes, Access kAccess, class T>
__device__ __forceinline__ BinarySum<Accumulator<T>> SumLane(const RowOfLogits<T>& row, unsigned lane) {
  using A = Accumulator<T>;
  constexpr unsigned kTail = (kElements<T> - 2 + kLanes) / kLanes;  // elements per lane behind the last vector
  const unsigned behind = row.count * kElements<T>;
  T tail[kTail] = {};
  if (behind < row.n) {
#pragma unroll
    for (unsigned i = 0; i < kTail; ++i) tail[i] = row.x[min(behind + i * kLanes + lane, row.n - 1)];
  }
  BinarySum<A> total;
  const T* const x = Pinned(kAccess == Access::kWindow ? LastBoundary(row.x) : row.x);
  AddAllVectors<kInFlight<T>, kLanes, kAccess>(total, row, x, 0, lane);
  if (behind == row.n) return total;
  A value[kTail], max = total.max;
#pragma unroll
  for (unsigned i = 0; i < kTail; ++i) {
    const unsigned k = behind + i * kLanes + lane;
    value[i] = k < row.n && k != row.skip ? Widen(tail[i]) : -kInfinity<A>;
    max = Max(max, value[i]);
  }
  const A factor = total.Advance(max);
  total.sum = Fma(total.sum, factor, total.Term(value[0]));
#pragma unroll
  for (unsigned i = 1; i < kTail; ++i) total.sum += total.Term(value[i]);
  return total;
}

// The total of a group, for all its lanes. All threads of the team call it.
template <int kLanes, template <class> class Sum, class A>
__device__ __forceinline__ Sum<A> SumGroup(Sum<A> total) {
  constexpr int kInWarp = Team<kLanes>::kInWarp;
  A max = total.max;
#pragma unroll
  for (int step = kInWarp / 2; step > 0; step /= 2) max = Max(max, __shfl_xor_sync(kAll, max, step));
  total.Rescale(max);
#pragma unroll
  for (int step = kInWarp / 2; step > 0; step /= 2) total.sum += __shfl_xor_sync(kAll, total.sum, step);
  if constexpr (kLanes > 32) {
    JAX_RNNT_SHARED_ARRAY(Sum<A>, parts, kThreads / 32);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
    __syncthreads();
    total = parts[0];
#pragma unroll
    for (int i = 1; i < kThreads / 32; ++i) {
      Sum<A> other = parts[i];
      max = Max(total.max, other.max);
      total.Rescale(max);
      other.Rescale(max);
      total.sum += other.sum;
    }
    __syncthreads();
  }
  return total;
}

// The sum of the row of a group without element `skip`. `at_edge`: a row of the team is the first or the last one of
// the tensor, so no access may reach beyond it. All threads of the team call it.
template <class T, int kLanes>
__device__ __forceinline__ BinarySum<Accumulator<T>> SumRow(const T* x, int n, bool at_edge, int skip, int lane) {
  const RowOfLogits<T> row(x, n, skip);
  if (!__any_sync(kAll, row.misaligned != 0)) return SumGroup<kLanes>(SumLane<kLanes, Access::kAligned>(row, lane));
  if (!at_edge) return SumGroup<kLanes>(SumLane<kLanes, Access::kWindow>(row, lane));
  return SumGroup<kLanes>(SumLane<kLanes, Access::kElements>(row, lane));
}

// The same for any logits, one element at a time to need few registers.
template <class T, int kLanes>
__device__ __forceinline__ LogSumExp<Accumulator<T>> SumSlowly(const T* x, int n, int skip, int lane) {
  LogSumExp<Accumulator<T>> total;
#pragma unroll 1
  for (int k = lane; k < n; k += kLanes) {
    if (k != skip) total.Add(Widen(x[k]));
  }
  return SumGroup<kLanes>(total);
}

// The sum of a head of few logits, by one lane.
template <class T>
__device__ __forceinline__ LogSumExp<Accumulator<T>> SumDurations(const T* x, int n) {
  LogSumExp<Accumulator<T>> total;
  for (int i = 0; i < n; ++i) total.Add(Widen(x[i]));
  return total;
}

}  // namespace
}  // namespace jax_rnnt::cuda
