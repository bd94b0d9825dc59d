// Softmax emission: rows of V logits -> log-probabilities of the arcs, and cotangents of the arcs -> gradient of the
// logits. D durations may follow the V logits. They have a softmax of their own, which every lane computes by itself. A
// Bernoulli blank is left out of the sum.
//
// Each pass is bound by memory: forward reads every logit inside the lengths once, backward reads it once and writes
// its gradient once, over the same memory if asked to. Rows outside the lengths are not read; backward writes zeros
// there. A row belongs to a group of kLanes threads: 8 for rows of up to 512 bytes, so that every lane of a warp has
// work; a warp up to 16 KiB; a block above. Accesses are 16 bytes wide for any V and any alignment of the row, with two
// or four in flight per thread.
//
// Forward keeps a running maximum and a running sum per lane, rescaled once per 16 bytes, so it needs no second read.
// Backward handles the few vectors that hold the class of an arc separately. A pass takes one exp2 per element: on an
// H200 the special-function units need a quarter of the time of the memory for float32, half for 16-bit types.
//
// Offsets have 64 bits from the beginning, 32 bits inside the rows of a sequence (T * U1 < 2^31) and inside a row.
#include "xla_kernels/cuda/softmax_emission.h"

#include <algorithm>

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_EMISSION_THREADS
#define JAX_RNNT_EMISSION_THREADS 256
#endif
constexpr int kThreads = JAX_RNNT_EMISSION_THREADS;
constexpr int kShortRow = 512, kLongRow = 16384;  // bytes; see above
// 16-byte accesses per thread at a time. With four, the eight elements of each in 16-bit types, or the exp2 of float64,
// would take too many registers.
template <class T>
constexpr int kInFlight = sizeof(T) == 4 ? 4 : 2;
// Fewest blocks per multiprocessor. They leave 64 to 128 registers per thread, and 16 to 64 KiB in flight.
template <class T>
constexpr int kBlocks = sizeof(T) == 8   ? 2
                        : sizeof(T) == 4 ? 4
                                         : 3;
constexpr unsigned kMaxGridY = 65535;

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

// EmissionShape with the blanks by value, since a kernel cannot read host memory.
struct Shape {
  explicit Shape(const EmissionShape& shape)
      : batch(int(shape.batch)),
        frames(int(shape.frames)),
        columns(int(shape.columns)),
        classes(int(shape.classes)),
        durations(int(shape.durations)),
        by_columns(uint32_t(shape.columns)),
        one_label_row(shape.label_frames == 1),
        normalize(shape.normalize),
        bernoulli(shape.bernoulli),
        num_blanks(shape.num_blanks),
        anchor(shape.bernoulli ? int(shape.blanks[0] == 0) : int(shape.blanks[0])) {
    std::copy(shape.blanks, shape.blanks + shape.num_blanks, blanks);
  }
  __device__ __forceinline__ int row_size() const { return classes + durations; }

  int batch, frames, columns, classes, durations;
  Divider by_columns;
  bool one_label_row, normalize, bernoulli;
  int num_blanks;
  int anchor;  // the class of shape.h; equals `classes` if the only class is a Bernoulli blank
  int blanks[kMaxBlanks];
};

// The row of a group of threads.
struct Row {
  int64_t index;  // in [0, B T U1)
  int label;      // kOutside: never read
};

__device__ __forceinline__ Row FindRow(const Shape& shape, const int32_t* labels, const int32_t* num_frames, int b,
                                       int row) {
  const int t = int(shape.by_columns(uint32_t(row))), u = row - t * shape.columns;
  const int64_t label_row = shape.one_label_row ? b : int64_t(b) * shape.frames + t;
  return {int64_t(b) * shape.frames * shape.columns + row,
          t < num_frames[b] ? labels[label_row * shape.columns + u] : kOutside};
}

// Elements since the last 16-byte boundary.
template <class T>
__device__ __forceinline__ int Misaligned(const T* x) {
  return int(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
}

// Position and number of the 16-byte accesses that read a row of n elements at x and write it at `other`. There are
// none if the two are not aligned alike.
template <class T>
struct Vectors {
  static constexpr int kElements = 16 / sizeof(T);
  __device__ __forceinline__ Vectors(const T* x, int n, const T* other) : head(0), count(0), rest(n) {
    if (Misaligned(x) != Misaligned(other)) return;
    head = (kElements - Misaligned(x)) % kElements;
    if (head > n) head = n;
    count = (n - head) / kElements;
    rest = n - count * kElements;
  }
  // Position of the i-th element outside the vectors.
  __device__ __forceinline__ int Rest(int i) const { return i < head ? i : i + count * kElements; }

  int head, count, rest;
};

// The sum of exp(x[i]) as sum * exp(max).
template <class A>
struct LogSumExp {
  A max = kLowest<A>, sum = 0;  // max is finite, so that -inf - max is not NaN

  template <int kCount>
  __device__ __forceinline__ void Add(const A (&x)[kCount]) {
    A new_max = max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) new_max = x[i] > new_max ? x[i] : new_max;
    sum *= Exp2((max - new_max) * kLog2E<A>);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += Exp2((x[i] - new_max) * kLog2E<A>);
    max = new_max;
  }
  __device__ __forceinline__ void Merge(A other_max, A other_sum) {
    const A new_max = other_max > max ? other_max : max;
    sum = sum * Exp2((max - new_max) * kLog2E<A>) + other_sum * Exp2((other_max - new_max) * kLog2E<A>);
    max = new_max;
  }
};

// Elements i ... i + kElements - 1 of a row of n. If the row is not aligned, they are cut out of two aligned vectors;
// the second is the first of the next lane and comes from the L1 cache. Elements are read one by one if these vectors
// would reach outside the row.
template <class T>
__device__ __forceinline__ Vector16<T> LoadPart(const T* x, int n, int misaligned, int i) {
  constexpr int kElements = Vectors<T>::kElements;
  if (misaligned == 0) return Load16(x + i);
  const int first = i - misaligned;
  if (first >= 0 && first + 2 * kElements <= n) {
    return Window(Load16(x + first), Load16(x + first + kElements), misaligned);
  }
  Vector16<T> v;
#pragma unroll
  for (int e = 0; e < kElements; ++e) v.x[e] = x[i + e];
  return v;
}

// This lane's sum of the row without element `skip`. The assignment of elements to lanes does not depend on the
// address, so the same row gives the same bits in any batch and padding.
template <class T, int kLanes>
__device__ __forceinline__ LogSumExp<Accumulator<T>> SumRow(const T* x, int n, int skip, int lane) {
  using A = Accumulator<T>;
  constexpr int kElements = Vectors<T>::kElements;
  const int misaligned = Misaligned(x), count = n / kElements;
  LogSumExp<A> total;
  for (int i = lane; i < count; i += kInFlight<T> * kLanes) {
    Vector16<T> v[kInFlight<T>];
#pragma unroll
    for (int j = 0; j < kInFlight<T>; ++j) {
      const int k = i + j * kLanes;
      if (k < count) v[j] = LoadPart(x, n, misaligned, k * kElements);
    }
#pragma unroll
    for (int j = 0; j < kInFlight<T>; ++j) {
      if (i + j * kLanes >= count) break;
      A wide[kElements];
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        wide[e] = (i + j * kLanes) * kElements + e == skip ? -kInfinity<A> : Widen(v[j].x[e]);
      }
      total.Add(wide);
    }
  }
  for (int i = count * kElements + lane; i < n; i += kLanes) {
    const A one[1] = {i == skip ? -kInfinity<A> : Widen(x[i])};
    total.Add(one);
  }
  return total;
}

// Returns the total of a group of threads to all of them. `mask`: lanes of the warp that belong to the group.
template <int kLanes, class A>
__device__ __forceinline__ LogSumExp<A> SumGroup(LogSumExp<A> total, unsigned mask) {
  constexpr int kInWarp = kLanes < 32 ? kLanes : 32;
#pragma unroll
  for (int step = kInWarp / 2; step > 0; step /= 2) {
    const A max = __shfl_xor_sync(mask, total.max, step), sum = __shfl_xor_sync(mask, total.sum, step);
    total.Merge(max, sum);
  }
  if (kLanes > 32) {
    JAX_RNNT_SHARED_ARRAY(LogSumExp<A>, parts, kThreads / 32);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
    __syncthreads();
    total = parts[0];
#pragma unroll
    for (int i = 1; i < kThreads / 32; ++i) total.Merge(parts[i].max, parts[i].sum);
    __syncthreads();
  }
  return total;
}

// The sum of a head of few logits; every lane reads all of them.
template <class T>
__device__ __forceinline__ LogSumExp<Accumulator<T>> SumDurations(const T* x, int n) {
  LogSumExp<Accumulator<T>> total;
  for (int i = 0; i < n; ++i) {
    const Accumulator<T> one[1] = {Widen(x[i])};
    total.Add(one);
  }
  return total;
}

// norm of shape.h. `anchor`: the logit of the anchor, -inf if there is none.
template <class A>
__device__ __forceinline__ A Normalizer(const LogSumExp<A>& total, A anchor) {
  if (total.sum != total.sum) return total.sum;
  const A below = total.max - anchor;
  if (below <= kReach<A>) return total.sum * Exp2(below * kLog2E<A>) * kSumScale<A>;
  const A lse = total.max + Log(total.sum);
  return total.sum == 0 || Abs(lse) < kTiny<A> ? A(0) : lse;
}

// NaN for x = +inf and NaN.
template <class A>
__device__ __forceinline__ A LogSigmoid(A x) {
  const A e = Exp2((x > 0 ? -x : x) * kLog2E<A>), w = 1 + e;
  const A log1p = Log(w) - ((w - 1) - e) / w;  // corrects the rounding of w
  return x == kInfinity<A> ? NaN<A>() : (x > 0 ? A(0) : x) - log1p;
}
template <class A>
__device__ __forceinline__ A Sigmoid(A x) {
  const A e = Exp2((x > 0 ? -x : x) * kLog2E<A>);
  return (x > 0 ? A(1) : e) / (1 + e);
}

template <int kLanes>
__device__ __forceinline__ unsigned GroupMask() {
  return kLanes >= 32 ? 0xffffffffu : ((1u << (kLanes % 32)) - 1) << (threadIdx.x % 32 / kLanes * kLanes);
}

// After it, a lane may overwrite logits that other lanes of the group have read.
template <int kLanes>
__device__ __forceinline__ void SyncGroup() {
  if (kLanes > 32) {
    __syncthreads();
  } else {
    __syncwarp(GroupMask<kLanes>());
  }
}

template <class A>
struct ForwardPointers {
  const void* logits;
  const int32_t *label, *num_frames;
  A* log_arc[kMaxBlanks + 1];  // K blanks, then the label
  A* log_duration[kMaxDurations];
  A* norm;
};

// Grid: (groups of rows of a sequence, sequences).
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    ForwardKernel(const __grid_constant__ Shape shape, const __grid_constant__ ForwardPointers<Accumulator<T>> args) {
  using A = Accumulator<T>;
  const int lane = int(threadIdx.x) % kLanes, num_blanks = shape.num_blanks;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= int64_t(shape.frames) * shape.columns) return;
  for (int b = int(blockIdx.y); b < shape.batch; b += int(gridDim.y)) {
    const Row at = FindRow(shape, args.label, args.num_frames, b, int(row));
    if (at.label == kOutside) {
      for (int arc = lane; arc <= num_blanks; arc += kLanes) args.log_arc[arc][at.index] = -kInfinity<A>;
      for (int i = lane; i < shape.durations; i += kLanes) args.log_duration[i][at.index] = -kInfinity<A>;
      if (lane == 0) args.norm[at.index] = 0;
      continue;
    }
    const T* const x = static_cast<const T*>(args.logits) + at.index * shape.row_size();
    LogSumExp<A> total;
    total.max = 0;
    total.sum = 1;
    LogSumExp<A> of_durations = total;
    if (shape.normalize) {
      const int skip = shape.bernoulli ? shape.blanks[0] : -1;
      total = SumGroup<kLanes>(SumRow<T, kLanes>(x, shape.classes, skip, lane), GroupMask<kLanes>());
      if (shape.durations > 0) of_durations = SumDurations(x + shape.classes, shape.durations);
    }
    // Rounding must not make a probability exceed 1.
    const auto log_prob = [&](A logit, const LogSumExp<A>& total, A log_sum) {
      const A y = logit - total.max - log_sum;
      if (total.sum == 0 && logit == logit) return -kInfinity<A>;
      return shape.normalize ? (y > 0 ? A(0) : y) : y == kInfinity<A> ? NaN<A>() : y;
    };
    A z = 0, poison = (total.sum - total.sum) + (of_durations.sum - of_durations.sum);  // one NaN makes all NaN
    if (shape.bernoulli) {
      z = Widen(x[shape.blanks[0]]);
      poison += z < kInfinity<A> ? A(0) : NaN<A>();
    }
    const A log_sum = Log(total.sum);
    for (int arc = lane; arc <= num_blanks; arc += kLanes) {
      const int k = arc < num_blanks ? shape.blanks[arc] : at.label;
      A value;
      if (shape.bernoulli && k == shape.blanks[0]) {
        value = LogSigmoid(z);
      } else if (unsigned(k) < unsigned(shape.classes)) {
        value = log_prob(Widen(x[k]), total, log_sum);
        if (shape.bernoulli && z != -kInfinity<A>) value += LogSigmoid(-z);
      } else {
        value = k == kNoLabel ? -kInfinity<A> : NaN<A>();
      }
      args.log_arc[arc][at.index] = value + poison;
    }
    const A log_duration_sum = Log(of_durations.sum);
    for (int i = lane; i < shape.durations; i += kLanes) {
      args.log_duration[i][at.index] = log_prob(Widen(x[shape.classes + i]), of_durations, log_duration_sum) + poison;
    }
    if (lane == 0) {
      const A anchor = shape.anchor < shape.classes ? Widen(x[shape.anchor]) : -kInfinity<A>;
      args.norm[at.index] = shape.normalize ? Normalizer(total, anchor) : A(0);
    }
  }
}

template <class A>
struct BackwardPointers {
  const void* logits;
  void* dlogits;
  const int32_t *label, *num_frames;
  const A* ct_arc[kMaxBlanks + 1];  // K blanks, then the label
  const A* ct_duration[kMaxDurations];
  const A *norm, *scale, *clamp;
};

template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads, kBlocks<T>)
    BackwardKernel(const __grid_constant__ Shape shape, const __grid_constant__ BackwardPointers<Accumulator<T>> args) {
  using A = Accumulator<T>;
  constexpr int kElements = Vectors<T>::kElements;
  const int lane = int(threadIdx.x) % kLanes, num_blanks = shape.num_blanks;
  const int64_t row = int64_t(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (row >= int64_t(shape.frames) * shape.columns) return;
  for (int b = int(blockIdx.y); b < shape.batch; b += int(gridDim.y)) {
    const Row at = FindRow(shape, args.label, args.num_frames, b, int(row));
    const T* const x = static_cast<const T*>(args.logits) + at.index * shape.row_size();
    T* const dx = static_cast<T*>(args.dlogits) + at.index * shape.row_size();

    A sum = 0, duration_sum = 0;
    bool used = false;
    if (at.label != kOutside) {
      for (int arc = 0; arc <= num_blanks; ++arc) {
        const A ct = args.ct_arc[arc][at.index];
        sum += ct;
        used |= ct != 0;
      }
      for (int i = 0; i < shape.durations; ++i) {
        const A ct = args.ct_duration[i][at.index];
        duration_sum += ct;
        used |= ct != 0;
      }
    }
    if (!used) {
      const Vectors<T> vectors(x, shape.row_size(), dx);
      Vector16<T> zeros;
#pragma unroll
      for (int e = 0; e < kElements; ++e) zeros.x[e] = Narrow<T>(A(0));
      for (int i = lane; i < vectors.count; i += kLanes) Store16(dx + vectors.head + i * kElements, zeros);
      for (int i = lane; i < vectors.rest; i += kLanes) dx[vectors.Rest(i)] = Narrow<T>(A(0));
      continue;
    }

    const int bernoulli = shape.bernoulli ? shape.blanks[0] : -1;
    // The softmax is exp(x - anchor) / total. If norm is lse, which is rare, the row is summed once more, since a large
    // lse is rounded too much. All lanes of the group read the anchor and the durations before a lane overwrites them.
    A anchor = 0, total = args.norm[at.index] * (1 / kSumScale<A>);
    if (args.norm[at.index] > 0 && args.norm[at.index] < kTiny<A>) {
      anchor = Widen(x[shape.anchor]);
    } else if (shape.normalize) {
      LogSumExp<A> row_sum;
#pragma unroll 1
      for (int k = lane; k < shape.classes; k += kLanes) {  // one by one, to need few registers
        const A one[1] = {k == bernoulli ? -kInfinity<A> : Widen(x[k])};
        row_sum.Add(one);
      }
      row_sum = SumGroup<kLanes>(row_sum, GroupMask<kLanes>());
      anchor = row_sum.sum == 0 ? A(0) : row_sum.max;
      total = row_sum.sum == 0 ? A(1) : row_sum.sum;
    }
    const A scale = args.scale[b], clamp = args.clamp[b], limit = clamp > 0 ? clamp : kInfinity<A>;
    A ct_blank = 0, ct_label = 0;  // cotangents of a Bernoulli blank, and of labels beside it
    if (bernoulli >= 0) {
      ct_label = args.ct_arc[1][at.index];
      if (at.label == bernoulli) ct_label -= ct_label;  // 0, but NaN stays
      ct_blank = at.label == bernoulli ? sum : args.ct_arc[0][at.index];
      sum = ct_label;
    }
    LogSumExp<A> of_durations;
    if (shape.durations > 0) of_durations = SumDurations(x + shape.classes, shape.durations);
    SyncGroup<kLanes>();
    A factor = shape.normalize || sum != sum ? A(0) - sum : A(0);  // no -0
    if (shape.normalize) factor /= total;
    // NaN stays, since comparisons with it are false. 0 stays 0 at any scale.
    const auto clip = [&](A v) {
      v = v > limit ? limit : v < -limit ? -limit : v;
      return v == 0 ? v : v * scale;
    };
    const auto others = [&](A v) { return shape.normalize ? Exp2((v - anchor) * kLog2E<A>) * factor : factor; };
    const auto own = [&](int k) {  // cotangents of the arcs whose class is k
      A ct = k == at.label ? args.ct_arc[num_blanks][at.index] : A(0);
      for (int i = 0; i < num_blanks; ++i) ct += k == shape.blanks[i] ? args.ct_arc[i][at.index] : A(0);
      return ct;
    };
    const auto gradient = [&](int k) {
      const A v = Widen(x[k]);
      return clip(k == bernoulli ? ct_blank * Sigmoid(-v) - ct_label * Sigmoid(v) : own(k) + others(v));
    };
    if (shape.durations > 0) {
      const bool normalize = shape.normalize && of_durations.sum != 0;
      const A duration_factor = normalize ? -duration_sum / of_durations.sum : A(0);
      for (int i = lane; i < shape.durations; i += kLanes) {
        const A v = Widen(x[shape.classes + i]) - of_durations.max;
        const A softmax = duration_factor == 0 ? A(0) : Exp2(v * kLog2E<A>) * duration_factor;
        dx[shape.classes + i] = Narrow<T>(clip(args.ct_duration[i][at.index] + softmax));
      }
    }
    const Vectors<T> vectors(x, shape.classes, dx);

    // Vectors that hold the class of an arc come last, so that all others need no comparisons. Bit s: this lane's
    // vector number s, s + 32, ... may be such a vector.
    uint32_t with_arc = 0;
    for (int arc = 0; arc <= num_blanks; ++arc) {
      const int k = (arc < num_blanks ? shape.blanks[arc] : at.label) - vectors.head, vector = k / kElements;
      if (k >= 0 && vector < vectors.count && vector % kLanes == lane) with_arc |= 1u << (vector / kLanes % 32);
    }
    int number = 0;
    for (int i = lane; i < vectors.count; i += kInFlight<T> * kLanes, number += kInFlight<T>) {
      Vector16<T> v[kInFlight<T>];
#pragma unroll
      for (int j = 0; j < kInFlight<T>; ++j) {
        const int k = i + j * kLanes;
        if (k < vectors.count) v[j] = Load16(x + vectors.head + k * kElements);
      }
#pragma unroll
      for (int j = 0; j < kInFlight<T>; ++j) {
        const int k = i + j * kLanes;
        if (k >= vectors.count || (with_arc >> ((number + j) % 32) & 1) != 0) continue;
#pragma unroll
        for (int e = 0; e < kElements; ++e) v[j].x[e] = Narrow<T>(clip(others(Widen(v[j].x[e]))));
        Store16(dx + vectors.head + k * kElements, v[j]);
      }
    }
    for (; with_arc != 0; with_arc &= with_arc - 1) {
      for (int i = (__ffs(int(with_arc)) - 1) * kLanes + lane; i < vectors.count; i += 32 * kLanes) {
        const int first = vectors.head + i * kElements;
        // Not unrolled: the comparisons would take more registers than all other code.
#pragma unroll 1
        for (int k = first; k < first + kElements; ++k) dx[k] = Narrow<T>(gradient(k));
      }
    }
    for (int i = lane; i < vectors.rest; i += kLanes) {
      const int k = vectors.Rest(i);
      dx[k] = Narrow<T>(gradient(k));
    }
  }
}

// Chooses the number of threads per row, and launches Kernel<T, kLanes>.
template <class T, template <class, int> class Kernel, class Pointers>
cudaError_t LaunchRows(const EmissionShape& shape, const Pointers& pointers, cudaStream_t stream) {
  const int64_t rows = shape.frames * shape.columns, bytes = shape.row_size() * int64_t(sizeof(T));
  if (shape.batch * rows == 0) return cudaSuccess;
  if (rows > kMaxEmissionNodes || shape.batch > kMaxEmissionSequences) return cudaErrorInvalidValue;
  const auto launch = [&](auto kernel, int lanes) {
    const int rows_per_block = kThreads / lanes;
    const dim3 grid(unsigned((rows + rows_per_block - 1) / rows_per_block),
                    unsigned(std::min<int64_t>(shape.batch, kMaxGridY)));
    return Launch(kernel, grid, dim3(kThreads), 0, stream, Shape(shape), pointers);
  };
  if (bytes <= kShortRow) return launch(Kernel<T, 8>::function, 8);
  if (bytes <= kLongRow) return launch(Kernel<T, 32>::function, 32);
  return launch(Kernel<T, kThreads>::function, kThreads);
}

template <class T, int kLanes>
struct ForwardFunction {
  static constexpr auto function = &ForwardKernel<T, kLanes>;
};
template <class T, int kLanes>
struct BackwardFunction {
  static constexpr auto function = &BackwardKernel<T, kLanes>;
};

template <class T>
cudaError_t Forward(const EmissionForwardArgs& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  ForwardPointers<A> pointers{args.logits, args.label, args.num_frames, {}, {}, static_cast<A*>(args.norm)};
  for (int i = 0; i < args.shape.num_blanks; ++i) pointers.log_arc[i] = static_cast<A*>(args.log_blank[i]);
  pointers.log_arc[args.shape.num_blanks] = static_cast<A*>(args.log_label);
  for (int i = 0; i < args.shape.durations; ++i) pointers.log_duration[i] = static_cast<A*>(args.log_duration[i]);
  return LaunchRows<T, ForwardFunction>(args.shape, pointers, stream);
}

template <class T>
cudaError_t Backward(const EmissionBackwardArgs& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  BackwardPointers<A> pointers{args.logits,
                               args.dlogits,
                               args.label,
                               args.num_frames,
                               {},
                               {},
                               static_cast<const A*>(args.norm),
                               static_cast<const A*>(args.scale),
                               static_cast<const A*>(args.clamp)};
  for (int i = 0; i < args.shape.num_blanks; ++i) pointers.ct_arc[i] = static_cast<const A*>(args.ct_blank[i]);
  pointers.ct_arc[args.shape.num_blanks] = static_cast<const A*>(args.ct_label);
  for (int i = 0; i < args.shape.durations; ++i) pointers.ct_duration[i] = static_cast<const A*>(args.ct_duration[i]);
  return LaunchRows<T, BackwardFunction>(args.shape, pointers, stream);
}

}  // namespace

cudaError_t EmissionForward(DType dtype, const EmissionForwardArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case DType::kF16:
      return Forward<Half>(args, stream);
    case DType::kBF16:
      return Forward<BFloat16>(args, stream);
    case DType::kF32:
      return Forward<float>(args, stream);
    case DType::kF64:
      return Forward<double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t EmissionBackward(DType dtype, const EmissionBackwardArgs& args, cudaStream_t stream) {
  switch (dtype) {
    case DType::kF16:
      return Backward<Half>(args, stream);
    case DType::kBF16:
      return Backward<BFloat16>(args, stream);
    case DType::kF32:
      return Backward<float>(args, stream);
    case DType::kF64:
      return Backward<double>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_rnnt::cuda
