// Rows of logits: which threads take which rows, and the softmax of a row. For softmax_emission.cu alone, whose head
// explains the scheme.
#pragma once

#include <algorithm>
#include <type_traits>

#include "xla_kernels/cuda/softmax_emission.h"

namespace jax_rnnt::cuda {
namespace {

// ---- constants to tune ----

#ifndef JAX_RNNT_EMISSION_THREADS
#define JAX_RNNT_EMISSION_THREADS 256
#endif
// Lanes per short row, and the longest rows in bytes: tiny forward and backward, short, medium; a block takes all
// longer rows.
#ifndef JAX_RNNT_EMISSION_SHORT_LANES
#define JAX_RNNT_EMISSION_SHORT_LANES 4
#endif
#ifndef JAX_RNNT_EMISSION_TINY_FORWARD
#define JAX_RNNT_EMISSION_TINY_FORWARD 288
#endif
#ifndef JAX_RNNT_EMISSION_TINY_BACKWARD
#define JAX_RNNT_EMISSION_TINY_BACKWARD 128
#endif
#ifndef JAX_RNNT_EMISSION_SHORT_ROW
#define JAX_RNNT_EMISSION_SHORT_ROW 1024
#endif
#ifndef JAX_RNNT_EMISSION_MEDIUM_ROW
#define JAX_RNNT_EMISSION_MEDIUM_ROW 65536
#endif
// 16-byte accesses that a thread issues at a time.
#ifndef JAX_RNNT_EMISSION_IN_FLIGHT
#define JAX_RNNT_EMISSION_IN_FLIGHT 4
#endif
// Threads per multiprocessor, at least; half for float64. Bounds the registers per thread to 64 (float64: 128).
#ifndef JAX_RNNT_EMISSION_RESIDENT
#define JAX_RNNT_EMISSION_RESIDENT 1024
#endif
// A team takes at most so many bytes of rows, and fewer if there would be fewer teams than this.
#ifndef JAX_RNNT_EMISSION_TEAM_BYTES
#define JAX_RNNT_EMISSION_TEAM_BYTES 65536
#endif
#ifndef JAX_RNNT_EMISSION_TEAMS
#define JAX_RNNT_EMISSION_TEAMS 8192
#endif

constexpr int kThreads = JAX_RNNT_EMISSION_THREADS;
constexpr int kShortLanes = JAX_RNNT_EMISSION_SHORT_LANES;
constexpr int kTinyForward = JAX_RNNT_EMISSION_TINY_FORWARD, kTinyBackward = JAX_RNNT_EMISSION_TINY_BACKWARD;
constexpr int kShortRow = JAX_RNNT_EMISSION_SHORT_ROW, kMediumRow = JAX_RNNT_EMISSION_MEDIUM_ROW;
constexpr int64_t kTeamBytes = JAX_RNNT_EMISSION_TEAM_BYTES, kTeams = JAX_RNNT_EMISSION_TEAMS;
// Half for float64, whose exp2 needs many registers, and for 16-bit types on sm_75, which spills with four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class T>
constexpr unsigned kInFlight = JAX_RNNT_EMISSION_IN_FLIGHT / (sizeof(T) == 4 ? 1 : 2);
#else
template <class T>
constexpr unsigned kInFlight = JAX_RNNT_EMISSION_IN_FLIGHT / (sizeof(T) == 8 ? 2 : 1);
#endif
// Threads of a block, and how many blocks a multiprocessor must hold: the registers of a thread follow.
// float16 takes a quarter more: with 64, a few bytes are spilled.
template <int kLanes>
constexpr int kBlock = kLanes == 1 ? kThreads / 2 : kThreads;
template <class T>
constexpr int kResident = JAX_RNNT_EMISSION_RESIDENT * (std::is_same_v<T, Half> ? 3 : 4) / (sizeof(T) == 8 ? 8 : 4);
template <class T, int kLanes>
constexpr int kBlocks = std::max(1, kResident<T> / kBlock<kLanes>);

// ---- numbers ----

template <class T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::Type;

template <class A>
constexpr A kInfinity = A(__builtin_huge_val());
template <class A>
constexpr A kLowest = sizeof(A) == 8 ? A(-1.7976931348623157e308) : A(-3.4028234663852886e38);
template <class A>
constexpr A kLog2E = A(1.4426950408889634074);

template <class A>
__device__ __forceinline__ A NaN() {
  return kInfinity<A> - kInfinity<A>;
}
template <class A>
__device__ __forceinline__ A Exp(A x) {
  return Exp2(x * kLog2E<A>);
}

// ---- shapes and threads ----

// EmissionShape with the blanks by value, since a kernel cannot read host memory.
struct Shape {
  Shape(const EmissionShape& shape, int passes)
      : batch(int(shape.batch)),
        frames(int(shape.frames)),
        columns(int(shape.columns)),
        classes(int(shape.classes)),
        durations(int(shape.durations)),
        passes(passes),
        by_columns(uint32_t(shape.columns)),
        one_label_row(shape.label_frames == 1),
        normalize(shape.normalize),
        bernoulli(shape.bernoulli),
        num_blanks(shape.num_blanks),
        anchor(shape.bernoulli ? int(shape.blanks[0] == 0) : int(shape.blanks[0])) {
    std::copy(shape.blanks, shape.blanks + shape.num_blanks, blanks);
  }
  __device__ __forceinline__ int row_size() const { return classes + durations; }
  __device__ __forceinline__ uint32_t rows() const { return uint32_t(frames) * uint32_t(columns); }

  int batch, frames, columns, classes, durations;
  int passes;  // rows that a group of lanes takes, one after the other
  Divider by_columns;
  bool one_label_row, normalize, bernoulli;
  int num_blanks;
  int anchor;  // the class of shape.h; equals `classes` if the only class is a Bernoulli blank
  int blanks[kMaxBlanks];
};

// A shape of one blank and nothing else that a row may have, as the compiler sees it.
struct PlainShape : Shape {
  using Shape::Shape;
  __device__ __forceinline__ int row_size() const { return classes; }

  static constexpr int durations = 0, passes = 1, num_blanks = 1;
  static constexpr bool normalize = true, bernoulli = false;
};

#ifndef JAX_RNNT_GRID_Y
#define JAX_RNNT_GRID_Y 65535
#endif
constexpr unsigned kMaxGridY = JAX_RNNT_GRID_Y;
constexpr unsigned kAll = 0xffffffffu;

// A row belongs to a group of kLanes threads. Groups of a warp (kLanes > 32: the one group of a block) are a team;
// group g of a team takes the rows g * passes ... g * passes + passes - 1 of the team, one in each pass. Beside that, a
// lane of the warp owns one of the team's rows, for the work that does not need a group.
template <int kLanes>
struct Team {
  static constexpr int kInWarp = kLanes < 32 ? kLanes : 32, kGroups = 32 / kInWarp;
  static constexpr int kTeamsPerBlock = kBlock<kLanes> / (kLanes < 32 ? 32 : kLanes);

  __device__ __forceinline__ explicit Team(int passes)
      : lane(int(threadIdx.x % kLanes)),
        in_warp(int(threadIdx.x % kInWarp)),
        group(int(threadIdx.x % 32 / kInWarp)),
        first((blockIdx.x * kTeamsPerBlock + threadIdx.x / (kLanes < 32 ? 32 : kLanes)) * unsigned(kGroups * passes)) {}
  __device__ __forceinline__ bool Owns(int pass) const { return in_warp == pass; }
  // The lane that owns the row of this group.
  __device__ __forceinline__ int Owner(int pass) const { return group * kInWarp + pass; }
  // The lanes that own the rows of all groups.
  static __device__ __forceinline__ unsigned Owners(int pass) {
    constexpr unsigned kFirst = kInWarp == 32 ? 1u : kAll / ((1u << kInWarp % 32) - 1);  // bits 0, kInWarp, ...
    return kFirst << pass;
  }
  // Whether this thread writes for the rows that its lane owns: warps of a block own the same rows.
  __device__ __forceinline__ bool writes() const { return kLanes <= 32 || threadIdx.x < 32; }

  int lane, in_warp, group;
  uint32_t first;  // row of the team, in a sequence
};

// After it, threads of the team see what the others have written, and may overwrite what they have read.
template <int kLanes>
__device__ __forceinline__ void SyncTeam() {
  if (kLanes > 32) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}

// A row that a lane owns.
struct Row {
  int64_t index;  // in [0, B T U1)
  bool exists;
  int label;  // kOutside: never read
};

template <int kLanes, class ShapeType>
__device__ __forceinline__ Row OwnRow(const Team<kLanes>& team, const ShapeType& shape, const int32_t* labels,
                                      const int32_t* num_frames, int b) {
  const uint32_t row = team.first + unsigned(team.group * shape.passes + team.in_warp);
  Row own = {int64_t(b) * shape.rows() + row, team.in_warp < shape.passes && row < shape.rows(), kOutside};
  // All lanes read, those without a row as the last one, and at once: not behind the number of frames.
  const uint32_t valid = min(row, shape.rows() - 1);
  const int t = int(shape.by_columns(valid)), u = int(valid) - t * shape.columns;
  const int label = Settled(labels[int64_t(b) * (shape.one_label_row ? shape.columns : shape.rows()) +
                                   (shape.one_label_row ? unsigned(u) : valid)]);
  if (own.exists && t < num_frames[b]) own.label = label;
  return own;
}

// ---- elements of 16 bytes ----

template <class T>
constexpr int kElements = 16 / sizeof(T);

template <class T>
__device__ __forceinline__ Accumulator<T> Element(const Words& v, int i) {
  if constexpr (sizeof(T) == 8) {
    return AsFloat(int64_t(uint64_t(v.w[2 * i + 1]) << 32 | v.w[2 * i]));
  } else if constexpr (sizeof(T) == 4) {
    return AsFloat(int32_t(v.w[i]));
  } else {
    return Widen(Half16<T>(v.w[i / 2], i % 2));
  }
}
template <class T>
__device__ __forceinline__ Words Pack(const Accumulator<T> (&x)[kElements<T>]) {
  Words v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 8) {
      v.w[i] = uint32_t(uint64_t(AsInt(x[i / 2])) >> i % 2 * 32);
    } else if constexpr (sizeof(T) == 4) {
      v.w[i] = uint32_t(AsInt(x[i]));
    } else {
      v.w[i] = NarrowPair<T>(x[2 * i], x[2 * i + 1]);
    }
  }
  return v;
}
template <class T>
__device__ __forceinline__ Words Fill(Accumulator<T> x) {
  Accumulator<T> all[kElements<T>];
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) all[i] = x;
  return Pack<T>(all);
}

// `v` with -inf as element i.
template <class T>
__device__ __forceinline__ Words Without(const Words& v, int i) {
  Accumulator<T> x[kElements<T>];
#pragma unroll
  for (int e = 0; e < kElements<T>; ++e) x[e] = e == i ? -kInfinity<Accumulator<T>> : Element<T>(v, e);
  return Pack<T>(x);
}

// Maxima of two vectors, element by element, and of one vector.
template <class T>
__device__ __forceinline__ Words MaxWords(const Words& a, const Words& b) {
  if constexpr (sizeof(T) == 2) {
    Words v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = MaxPair<T>(a.w[i], b.w[i]);
    return v;
  } else {
    Accumulator<T> x[kElements<T>];
#pragma unroll
    for (int i = 0; i < kElements<T>; ++i) x[i] = Max(Element<T>(a, i), Element<T>(b, i));
    return Pack<T>(x);
  }
}
template <class T>
__device__ __forceinline__ Accumulator<T> MaxElement(const Words& v) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t pair = MaxPair<T>(MaxPair<T>(v.w[0], v.w[1]), MaxPair<T>(v.w[2], v.w[3]));
    return Max(Widen(Half16<T>(pair, 0)), Widen(Half16<T>(pair, 1)));
  } else {
    Accumulator<T> max = Element<T>(v, 0);
#pragma unroll
    for (int i = 1; i < kElements<T>; ++i) max = Max(max, Element<T>(v, i));
    return max;
  }
}

// Elements since the last 16-byte boundary.
template <class T>
__device__ __forceinline__ int Misaligned(const T* x) {
  return int(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
}

// The last boundary of 8 bytes.
template <class T>
__device__ __forceinline__ const T* LastBoundary(const T* x) {
  return reinterpret_cast<const T*>(reinterpret_cast<uintptr_t>(x) & ~uintptr_t(7));
}

// How to read the vectors of a row, all from their first element on.
enum class Access {
  kAligned,
  kWindow,    // cut out of aligned words, which may reach into the neighbouring rows
  kElements,  // element by element
};

// A vector as loaded. Taking it apart waits for the loads, so all loads come first.
template <class T, Access kAccess>
struct Loaded {
  // x: the vector; for windows, the last boundary that Window wants.
  __device__ __forceinline__ void Load(const T* x) {
    if constexpr (kAccess == Access::kElements) {
      Accumulator<T> v[kElements<T>];
#pragma unroll
      for (int i = 0; i < kElements<T>; ++i) v[i] = Widen(x[i]);
      words = Pack<T>(v);
    } else if constexpr (kAccess == Access::kWindow) {
      window.Load(x);
    } else {
      words = Load16(x);
    }
  }
  __device__ __forceinline__ Words Get(int misaligned) {
    if constexpr (kAccess != Access::kWindow) return words;
    return window.Get(misaligned);
  }
  Words words;
  Window<T> window;
};

// ---- softmax of a row ----

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
  constexpr unsigned kRest = (kElements<T> - 2 + kLanes) / kLanes;  // elements per lane behind the last vector
  const unsigned behind = row.count * kElements<T>;
  T rest[kRest] = {};
  if (behind < row.n) {
#pragma unroll
    for (unsigned i = 0; i < kRest; ++i) rest[i] = row.x[min(behind + i * kLanes + lane, row.n - 1)];
  }
  BinarySum<A> total;
  const T* const x = Pinned(kAccess == Access::kWindow ? LastBoundary(row.x) : row.x);
  AddAllVectors<kInFlight<T>, kLanes, kAccess>(total, row, x, 0, lane);
  if (behind == row.n) return total;
  A value[kRest], max = total.max;
#pragma unroll
  for (unsigned i = 0; i < kRest; ++i) {
    const unsigned k = behind + i * kLanes + lane;
    value[i] = k < row.n && k != row.skip ? Widen(rest[i]) : -kInfinity<A>;
    max = Max(max, value[i]);
  }
  const A factor = total.Advance(max);
  total.sum = Fma(total.sum, factor, total.Term(value[0]));
#pragma unroll
  for (unsigned i = 1; i < kRest; ++i) total.sum += total.Term(value[i]);
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
