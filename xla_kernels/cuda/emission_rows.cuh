// Rows of logits: which threads take which rows, and how they read them. For softmax_emission.cu alone, whose head
// explains the scheme.
#pragma once

#include <algorithm>
#include <type_traits>

#include "xla_kernels/cuda/elements.cuh"
#include "xla_kernels/cuda/memory.cuh"
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
  const uint32_t number = team.first + unsigned(team.group * shape.passes + team.in_warp);
  Row row = {int64_t(b) * shape.rows() + number, team.in_warp < shape.passes && number < shape.rows(), kOutside};
  // All lanes read, those without a row as the last one, and at once: not behind the number of frames.
  const uint32_t valid = min(number, shape.rows() - 1);
  const int t = int(shape.by_columns(valid)), u = int(valid) - t * shape.columns;
  const int label = Settled(labels[int64_t(b) * (shape.one_label_row ? shape.columns : shape.rows()) +
                                   (shape.one_label_row ? unsigned(u) : valid)]);
  if (row.exists && t < num_frames[b]) row.label = label;
  return row;
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

}  // namespace
}  // namespace jax_rnnt::cuda
