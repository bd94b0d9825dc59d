// Rows of logits so short that a lane takes one alone. For softmax_emission.cu, whose head explains the scheme.
//
// A lane that read its row from global memory would touch cache lines of its own, up to 32 in an access of the warp. So
// the 32 rows of a warp, which lie side by side, come through shared memory: whole lines are copied there, and the lane
// reads its row.
#pragma once

#include "xla_kernels/cuda/emission_sums.cuh"

namespace jax_rnnt::cuda {
namespace {

// Rows that are whole vectors of 16 bytes, a power of two of them, lie 16 bytes apart in shared memory, since they
// would begin in the same banks. All other rows lie there as they do in global memory, with the same place within 16
// bytes.
struct TinyShape : PlainShape {
  TinyShape(const EmissionShape& shape, int64_t row_bytes)
      : PlainShape(shape, 1), by_classes(uint32_t(shape.classes)), whole(row_bytes % 16 == 0) {
    const unsigned count = unsigned(row_bytes / 16);
    if (whole && (count & (count - 1)) == 0) {
      for (gap = 0; count >> gap > 1;) ++gap;
    }
    stride = unsigned(row_bytes) + (gap < 31 ? 16 : 0);
    vectors = 2 * stride + 3;  // the rows begin within the first one, and reads of the last row end 18 bytes behind it
  }
  // Whether rows of these bytes at this address may be tiny: rows of whole vectors must begin at one.
  static bool Fits(int64_t row_bytes, const void* rows) {
    return row_bytes % 16 != 0 || reinterpret_cast<uintptr_t>(rows) % 16 == 0;
  }
  // The place in shared memory of the k-th vector.
  __device__ __forceinline__ unsigned Place(unsigned k) const { return k + (k >> gap); }

  int first_sequence = 0;  // of this launch
  Divider by_classes;
  bool whole;         // rows are whole vectors
  unsigned gap = 31;  // there is one vector between rows of 2^gap vectors
  unsigned stride;    // bytes from a row to the next, in shared memory
  unsigned vectors;   // of shared memory for a warp
};

// The rows of a warp in shared memory. Elements are counted from the 16-byte boundary at or before the first row.
template <class T, bool kWhole>
class TinyRows {
  static constexpr unsigned kSize = kElements<T>;

 public:
  // `rows`: in global memory, the first row of the warp; `n`: elements of all its rows.
  __device__ __forceinline__ TinyRows(const TinyShape& shape, Words* shared, const T* rows, unsigned n, unsigned lane)
      : shape_(shape),
        shared_(shared),
        begin_(kWhole ? 0 : unsigned(Misaligned(rows))),
        end_(begin_ + n),
        lane_(lane) {}

  // The row of this lane.
  __device__ __forceinline__ T* Mine() const {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(shared_) + lane_ * shape_.stride) + begin_;
  }

  // Copies the rows of `wanted`, a mask, and what else lies in their vectors.
  __device__ __forceinline__ void Read(const T* rows, unsigned wanted) const {
    const T* const from = rows - begin_;
    const auto has = [&](unsigned i, unsigned n) {  // a row of `wanted` has one of the elements i, i + 1 ... i + n - 1
      const unsigned first = shape_.by_classes(i - begin_), last = min(31u, shape_.by_classes(i - begin_ + n - 1));
      return (wanted >> first & ((2u << (last - first)) - 1)) != 0;
    };
    unsigned k = First();
    const Words* source = reinterpret_cast<const Words*>(from) + k;
    SharedAddress<Words> to(shared_ + shape_.Place(k));
    const int step = int(shape_.Place(32));
    const auto copy = [&](const auto& condition) {
#pragma unroll 1
      for (; k < End(); k += 128, source += 128, to = to + 4 * step) {
        CopyAsyncIf<4>([&](int i) { return condition(k + 32 * i); }, to, step, source, 32);
      }
    };
    if (wanted == kAll) {
      copy([&](unsigned k) { return k < End(); });
    } else {
      copy([&](unsigned k) { return k < End() && has(k * kSize, kSize); });
    }
    CommitCopies();
    Edges([&](unsigned i) {
      if (has(i, 1)) reinterpret_cast<T*>(shared_)[i] = from[i];
    });
    WaitForCopies<0>();
    __syncwarp();
  }

  // Copies all rows back.
  __device__ __forceinline__ void Write(T* rows) const {
    __syncwarp();
    T* const to = rows - begin_;
    unsigned k = First();
    const Words* from = shared_ + shape_.Place(k);
    Words* target = reinterpret_cast<Words*>(to) + k;
    const unsigned step = shape_.Place(32);
#pragma unroll 4
    for (; k < End(); k += 32, from += step, target += 32) Store16(target, *from);
    Edges([&](unsigned i) { to[i] = reinterpret_cast<const T*>(shared_)[i]; });
  }

 private:
  // The vectors of this lane that lie in the rows: First(), First() + 32 ... below End().
  __device__ __forceinline__ unsigned First() const { return (begin_ + kSize - 1) / kSize + lane_; }
  __device__ __forceinline__ unsigned End() const { return end_ / kSize; }
  // Calls f for the elements before and behind all vectors, 2 * (kSize - 1) at most. If there are any, rows have no
  // gaps.
  template <class F>
  __device__ __forceinline__ void Edges(const F& f) const {
    if (kWhole || (begin_ | end_) % kSize == 0) return;
    const unsigned first = min(end_, (begin_ + kSize - 1) / kSize * kSize), last = max(first, end_ / kSize * kSize);
    const unsigned i = begin_ + lane_;
    if (i < end_ - (last - first)) f(i < first ? i : i + last - first);
  }

  const TinyShape& shape_;
  Words* shared_;
  unsigned begin_, end_;  // of the rows
  unsigned lane_;
};

struct [[gnu::may_alias]] Word {
  uint32_t w;
};

// Vectors first, first + 1 ... of a row in shared memory.
template <unsigned kVectors, bool kWhole, class T>
__device__ __forceinline__ void ReadVectors(const T* x, unsigned first, Words (&v)[kVectors]) {
  x += first * kElements<T>;
  if constexpr (kWhole) {
#pragma unroll
    for (unsigned j = 0; j < kVectors; ++j) v[j] = reinterpret_cast<const Words*>(x)[j];
  } else if constexpr (sizeof(T) == 8) {
#pragma unroll
    for (unsigned i = 0; i < 2 * kVectors; ++i) {
      const uint64_t bits = uint64_t(AsInt(x[i]));
      v[i / 2].w[i % 2 * 2] = uint32_t(bits), v[i / 2].w[i % 2 * 2 + 1] = uint32_t(bits >> 32);
    }
  } else {
    const unsigned bytes = unsigned(reinterpret_cast<uintptr_t>(x) & 2);
    const Word* const from = reinterpret_cast<const Word*>(reinterpret_cast<const char*>(x) - bytes);
    uint32_t w[4 * kVectors + 1];
#pragma unroll
    for (unsigned i = 0; i < 4 * kVectors + (sizeof(T) == 2 ? 1 : 0); ++i) w[i] = from[i].w;
#pragma unroll
    for (unsigned i = 0; i < 4 * kVectors; ++i) {
      v[i / 4].w[i % 4] = sizeof(T) == 4 ? w[i] : uint32_t((uint64_t(w[i + 1]) << 32 | w[i]) >> bytes * 8);
    }
  }
}

template <unsigned kVectors, bool kWhole, class T>
__device__ __forceinline__ void AddTinyVectors(BinarySum<Accumulator<T>>& total, const T* x, unsigned first,
                                               unsigned count) {
#pragma unroll 1
  for (; first + kVectors <= count; first += kVectors) {
    Words v[kVectors];
    ReadVectors<kVectors, kWhole>(x, first, v);
    AddWords<T>(total, v, true);
  }
  if constexpr (kVectors > 1) AddTinyVectors<kVectors / 2, kWhole>(total, x, first, count);
}

// The sum of a row of n elements in shared memory, in the same order at any place.
template <bool kWhole, class T>
__device__ __forceinline__ BinarySum<Accumulator<T>> SumTinyRow(const T* x, unsigned n) {
  using A = Accumulator<T>;
  BinarySum<A> total;
  const unsigned count = n / kElements<T>, behind = n % kElements<T>;
  AddTinyVectors<kInFlight<T>, kWhole>(total, x, 0, count);
  if (kWhole || behind == 0) return total;
  Words v[1];
  ReadVectors<1, kWhole>(x, count, v);
  A value[kElements<T>], max = total.max;
#pragma unroll
  for (unsigned e = 0; e < kElements<T>; ++e) {
    value[e] = e < behind ? Element<T>(v[0], int(e)) : -kInfinity<A>;
    max = Max(max, value[e]);
  }
  const A factor = total.Advance(max);
  total.sum = Fma(total.sum, factor, total.Term(value[0]));
#pragma unroll
  for (unsigned e = 1; e < kElements<T>; ++e) total.sum += total.Term(value[e]);
  return total;
}

// Replaces the elements of a row of n elements in shared memory by map(element).
template <bool kWhole, class T, class Map>
__device__ __forceinline__ void MapTinyRow(T* x, unsigned n, const Map& map) {
  constexpr unsigned kSize = kElements<T>;
  if constexpr (kWhole) {
#pragma unroll 2
    for (unsigned k = 0; k < n / kSize; ++k) {
      Words& vector = reinterpret_cast<Words*>(x)[k];
      const Words v = vector;
      Accumulator<T> values[kSize];
#pragma unroll
      for (unsigned e = 0; e < kSize; ++e) values[e] = map(Element<T>(v, int(e)));
      vector = Pack<T>(values);
    }
  } else {
    const auto one = [&](unsigned i) { x[i] = Narrow<T>(map(Widen(x[i]))); };
    if constexpr (sizeof(T) == 2) {  // words, which another row may share at the ends
      const unsigned first = unsigned(reinterpret_cast<uintptr_t>(x) & 2) / 2;
      if (first != 0) one(0);
      if ((n - first) % 2 != 0) one(n - 1);
      Word* const words = reinterpret_cast<Word*>(x + first);
#pragma unroll 4
      for (unsigned k = 0; k < (n - first) / 2; ++k) {
        const uint32_t pair = words[k].w;
        words[k].w = NarrowPair<T>(map(Widen(Half16<T>(pair, 0))), map(Widen(Half16<T>(pair, 1))));
      }
    } else {
#pragma unroll 4
      for (unsigned i = 0; i < n; ++i) one(i);
    }
  }
}

}  // namespace
}  // namespace jax_rnnt::cuda
