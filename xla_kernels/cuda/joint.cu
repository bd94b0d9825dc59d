// The kernels of a joint network: joint.h has what they compute, joint_product.cuh how they multiply.
#include "xla_kernels/cuda/joint.h"

#include "xla_kernels/cuda/joint_product.cuh"

namespace jax_rnnt::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------- forward

template <class T, bool kExact, int kRows>
__global__ __launch_bounds__(kJointThreads, 1) void JointForwardKernel(JointTable table, JointWeight w, float* planes) {
  JAX_RNNT_AT_MOST(kJointThreads);
  JAX_RNNT_DYNAMIC_SHARED(unsigned char, shared);
  using Tile = JointTile<kRows>;
  if (int(blockIdx.x) >= *table.inputs.count) return;
  const JointBlock block(table, uint32_t(table.inputs.list[blockIdx.x]));
  float* const numbers = reinterpret_cast<float*>(shared + kStages * kStageBytes);
  unsigned char* const hidden = shared + kStages * kStageBytes + kRows * kNumbers * 4;

  const JointNodes<kRows> nodes(table, block);
  RowTotal parts[Tile::kOwn];
#pragma unroll
  for (int i = 0; i < Tile::kOwn; ++i) parts[i] = {-INFINITY, 0};

  const auto use = [&](int chunk, Tile& tile) {
    const int first = chunk * kJointClasses + Tile::Class();
    tile.AddBias(w.bias + first);
    const auto store = [&](int plane, int slot) {
#pragma unroll
      for (int i = 0; i < Tile::kOwn; ++i) {
        if (nodes.Inside(i)) planes[nodes.At(plane, i)] = tile.Get(i, slot);
      }
    };
    const bool of_others = chunk * kJointClasses < w.start;
    if (chunk * kJointClasses <= w.start) {
      const int end = of_others ? w.others : w.start + w.kept, to = of_others ? 0 : w.others - w.start;
#pragma unroll 1
      for (int s = 0; s < 8 && first + Tile::Offset(s) < end; ++s) store(to + first + Tile::Offset(s), s);
    }
    if (of_others) return;
    const int slot = Tile::Slot(nodes.label - first);
    if (slot >= 0) store(w.others + w.kept + 2, slot);
#pragma unroll
    for (int i = 0; i < Tile::kOwn; ++i) {
      float peak = parts[i].peak;
#pragma unroll
      for (int s = 0; s < 8; ++s) peak = Max(peak, tile.At(i, s));
      const float base = RowTotal::Base(peak);
      float total = parts[i].total * RowTotal::Exp(parts[i].peak - base);
#pragma unroll
      for (int s = 0; s < 8; ++s) total += RowTotal::Exp(tile.At(i, s) - base);
      parts[i] = {peak, total};
    }
  };
  ForEachChunk<T, kExact, kRows>(
      w, hidden, shared, [&] { MakeHidden<T, kExact, kRows>(table, block, w.row_bytes, hidden); }, use);

  const RowTotal row = Combine<kRows>(parts, numbers);
  const int t = block.frame + int(threadIdx.x) / kJointColumns,
            column = block.column + int(threadIdx.x) % kJointColumns;
  if (int(threadIdx.x) < kRows && block.Inside(t, column)) {
    const int64_t node = block.Node(table, t, column);
    planes[(w.others + w.kept) * table.nodes + node] = row.peak;
    planes[(w.others + w.kept + 1) * table.nodes + node] = row.total;
  }
}

// --------------------------------------------------------------------------------------------------------- gradient

// What the kernel reads and writes beside `JointTable` and `JointWeight`.
struct GradientTable {
  const float *numbers, *bound;
  const int32_t* slab;
  int blanks;
  bool normalize, bernoulli;
  unsigned char *hidden, *gradient;
  float* of_bias;
  int32_t* here;
};

__device__ __forceinline__ void Clear(unsigned char* to, size_t bytes) {
  for (size_t i = threadIdx.x * 16; i < bytes; i += kJointThreads * 16) Store16(to + i, Words{});
}

template <class T, bool kExact, int kRows>
__global__ __launch_bounds__(kJointThreads, 1) void JointGradientKernel(JointTable table, JointWeight w,
                                                                        GradientTable g) {
  JAX_RNNT_AT_MOST(kJointThreads);
  JAX_RNNT_DYNAMIC_SHARED(unsigned char, shared);
  using Tile = JointTile<kRows>;
  constexpr int kOwn = Tile::kOwn;
  const int classes = w.chunks * kJointClasses;
  const int64_t place = int64_t(*g.slab) * gridDim.x + blockIdx.x;
  if (blockIdx.x == 0 && threadIdx.x == 0) *g.here = *g.slab;
  unsigned char* const to_hidden = g.hidden + size_t(blockIdx.x) * kRows * w.row_bytes;
  T* const to = reinterpret_cast<T*>(g.gradient) + size_t(blockIdx.x) * kRows * classes;
  float* const of_bias = g.of_bias + size_t(blockIdx.x) * 2 * classes;
  if (place >= *table.inputs.count) {
    Clear(to_hidden, size_t(kRows) * w.row_bytes);
    Clear(reinterpret_cast<unsigned char*>(to), size_t(kRows) * classes * sizeof(T));
    Clear(reinterpret_cast<unsigned char*>(of_bias), size_t(2) * classes * sizeof(float));
    return;
  }
  const JointBlock block(table, uint32_t(table.inputs.list[place]));
  float* const numbers = reinterpret_cast<float*>(shared + kStages * kStageBytes);
  float* const of_rows = numbers + 2 * kClassWarps * kRows;               // [2, R]
  float *const base = of_rows + 2 * kRows, *const factor = base + kRows;  // [R]: registers are few
  unsigned char* const hidden = shared + kStages * kStageBytes + kRows * kNumbers * 4;

  const JointNodes<kRows> nodes(table, block);
  // Number k of row i; 0 outside.
  const auto number = [&](int k, int i) { return nodes.Inside(i) ? g.numbers[nodes.At(k, i)] : 0.f; };
  const int of_label = w.others + g.blanks;
  const float bound = g.bound[block.sequence];
  if (int(threadIdx.x) < kRows) {
    const int t = block.frame + int(threadIdx.x) / kJointColumns;
    const int column = block.column + int(threadIdx.x) % kJointColumns;
    const bool inside = block.Inside(t, column);
    const float* const of_node = g.numbers + (inside ? block.Node(table, t, column) : 0);
    factor[threadIdx.x] = inside ? of_node[(of_label + 1) * table.nodes] : 0;
    base[threadIdx.x] = inside ? of_node[(of_label + 2) * table.nodes] : INFINITY;
  }

  // The gradient of other heads in place of their logits.
  const auto other_heads = [&](Tile& tile, int first) {
    if (g.bernoulli) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float z = tile.At(i, 0);
        const float gradient = number(0, i) * Sigmoid(-z) - number(of_label, i) * Sigmoid(z);
#pragma unroll
        for (int s = 0; s < 8; ++s) tile.At(i, s) = s == 0 && first == 0 ? gradient : 0;
      }
      return;
    }
    if (g.normalize) {
      RowTotal parts[kOwn];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float peak = -INFINITY, total = 0;
#pragma unroll
        for (int s = 0; s < 8; ++s) peak = first + Tile::Offset(s) < w.others ? Max(peak, tile.At(i, s)) : peak;
#pragma unroll
        for (int s = 0; s < 8; ++s) {
          const float part = RowTotal::Exp(tile.At(i, s) - RowTotal::Base(peak));
          total += first + Tile::Offset(s) < w.others ? part : 0;
        }
        parts[i] = {peak, total};
      }
      const RowTotal row = Combine<kRows>(parts, numbers);
      if (int(threadIdx.x) < kRows) {
        const int t = block.frame + int(threadIdx.x) / kJointColumns;
        const int column = block.column + int(threadIdx.x) % kJointColumns;
        float sum = 0;
        if (block.Inside(t, column)) {
          for (int k = 0; k < w.others; ++k) sum += g.numbers[k * table.nodes + block.Node(table, t, column)];
        }
        of_rows[threadIdx.x] = RowTotal::Base(row.peak);
        of_rows[kRows + threadIdx.x] = row.total == 0 ? 0 : sum / row.total;
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int s = 0; s < 8; ++s) {
      const int k = first + Tile::Offset(s);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float gradient = 0;
        if (k < w.others) {
          gradient = number(k, i);
          const int row = Tile::Row(i);
          if (g.normalize) gradient -= RowTotal::Exp(tile.Get(i, s) - of_rows[row]) * of_rows[kRows + row];
        }
        tile.Set(i, s, gradient);
      }
    }
  };

  const auto use = [&](int chunk, Tile& tile) {
    const int first = chunk * kJointClasses + Tile::Class();
    tile.AddBias(w.bias + first);
    if (chunk * kJointClasses < w.start) {
      other_heads(tile, first);
    } else {
      if (chunk * kJointClasses == w.start) {  // the anchor is its first class
        if (first == w.start) {
#pragma unroll
          for (int i = 0; i < kOwn; ++i) {
            float& row = base[Tile::Row(i)];
            row = row == -INFINITY ? tile.At(i, 0) : row;
          }
        }
        __syncthreads();
      }
      const auto add = [&](int k, int slot) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) tile.Set(i, slot, tile.Get(i, slot) + number(k, i));
      };
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float from = base[Tile::Row(i)], times = factor[Tile::Row(i)];
#pragma unroll
        for (int s = 0; s < 8; ++s) tile.At(i, s) = RowTotal::Exp(tile.At(i, s) - from) * times;
      }
      const int slot = Tile::Slot(nodes.label - first);
      if (slot >= 0) add(of_label, slot);
      if (chunk * kJointClasses == w.start) {
        const int end = w.start + g.blanks;
#pragma unroll 1
        for (int s = 0; s < 8 && first + Tile::Offset(s) < end; ++s)
          add(w.others + first + Tile::Offset(s) - w.start, s);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float sums[2] = {};
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float x = Clip(tile.At(i, 2 * n), bound), y = Clip(tile.At(i, 2 * n + 1), bound);
        sums[0] += x, sums[1] += y;
        T* const pair = to + size_t(Tile::Row(i)) * classes + first + 8 * n;
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<uint32_t*>(pair) = NarrowPair<T>(x, y);
        } else {
          pair[0] = x, pair[1] = y;
        }
      }
#pragma unroll
      for (int mask = 4; mask <= 16; mask *= 2) {
        sums[0] += __shfl_xor_sync(0xffffffffu, sums[0], mask);
        sums[1] += __shfl_xor_sync(0xffffffffu, sums[1], mask);
      }
      if (Tile::Lane() < 4) {
        float* const half = of_bias + Tile::RowWarp() * classes + first + 8 * n;
        half[0] = sums[0], half[1] = sums[1];
        if (kRowWarps == 1) half[classes] = half[classes + 1] = 0;
      }
    }
  };
  const auto make_hidden = [&] {
    MakeHidden<T, kExact, kRows>(table, block, w.row_bytes, hidden);
    __syncthreads();
    const int units = w.row_bytes / 16;
    for (int i = int(threadIdx.x); i < kRows * units; i += kJointThreads) {
      const int row = i / units, unit = i % units;
      Store16(to_hidden + size_t(row) * w.row_bytes + unit * 16, Load16(hidden + row * (w.row_bytes + 16) + unit * 16));
    }
  };
  ForEachChunk<T, kExact, kRows>(w, hidden, shared, make_hidden, use);
}

// ------------------------------------------------------------------------------------------------------------- sums

template <int n>
struct Number {
  static constexpr int value = n;
};

constexpr int kSumThreads = 256, kSumUnits = 64;  // units of a thread block: a lane takes two, a warp a row

struct SumsTable {
  const int32_t* slab;
  int blocks, rows, padded_units, classes;  // blocks of a slab
  const void* of_hidden;
  const float* of_bias;
  void* encoder;
  float *predictor, *bias, *carry;
  int32_t* next;
  bool* more;
};

// Thread blocks in three parts: for each block of the slab and some of the units, the rows of its frames; the same with
// its columns; sums of the bias.
template <class T>
__global__ __launch_bounds__(kSumThreads, 3) void JointSumsKernel(JointTable table, SumsTable s) {
  JAX_RNNT_AT_MOST(kSumThreads);
  JAX_RNNT_DYNAMIC_SHARED(uint32_t, same);
  const int slab = *s.slab, count = *table.inputs.count;
  const int live = min(max(count - slab * s.blocks, 0), s.blocks);
  const int32_t* const list = table.inputs.list + int64_t(slab) * s.blocks;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *s.next = slab + 1;
    *s.more = int64_t(slab + 1) * s.blocks < count;
  }
  const int parts = (table.units + kSumUnits - 1) / kSumUnits;
  int index = int(blockIdx.x);
  if (index >= 2 * s.blocks * parts) {
    // Each warp adds a part of the rows of 32 classes.
    const int k = (index - 2 * s.blocks * parts) * 32 + int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    const int part = (2 * live + kSumThreads / 32 - 1) / (kSumThreads / 32);
    float sum = 0;
#pragma unroll 8
    for (int i = part * warp; i < min(part * (warp + 1), 2 * live); ++i) sum += s.of_bias[int64_t(i) * s.classes + k];
    float* const sums = reinterpret_cast<float*>(same);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0) return;
    for (int i = 1; i < kSumThreads / 32; ++i) sum += sums[32 * i + threadIdx.x];
    s.bias[k] += sum;
    return;
  }
  const bool of_encoder = index < s.blocks * parts;
  index -= of_encoder ? 0 : s.blocks * parts;
  const int mine = index / parts;
  if (mine >= live) return;
  // Those of the slab with the same frames, or the same columns: the first of them adds all.
  const uint32_t code = uint32_t(list[mine]);
  const int of_block = table.copy_bits + table.column_bits;
  const uint32_t frame_mask = ((1u << table.frame_bits) - 1) << of_block;
  const uint32_t mask = of_encoder ? ~((1u << of_block) - 1) : ~frame_mask;
  for (int i = int(threadIdx.x); i < (live + 31) / 32 * 32; i += kSumThreads) {
    const uint32_t word =
        __ballot_sync(0xffffffffu, i < live && ((uint32_t(list[i < live ? i : 0]) ^ code) & mask) == 0);
    if (threadIdx.x % 32 == 0) same[i / 32] = word;
  }
  __syncthreads();
  for (int i = 0; i <= mine / 32; ++i) {
    const uint32_t before = i < mine / 32 ? 0xffffffffu : (1u << mine % 32) - 1;
    if (same[i] & before) return;
  }
  const int unit = index % parts * kSumUnits + int(threadIdx.x % 32) * 2, warp = int(threadIdx.x / 32);
  const T* const of_hidden = static_cast<const T*>(s.of_hidden);
  const auto each = [&](const auto& f) {  // of the blocks in their order
    for (int i = mine / 32; i < (live + 31) / 32; ++i) {
      for (uint32_t word = same[i]; word != 0; word &= word - 1) f(i * 32 + __ffs(int(word)) - 1);
    }
  };
  const auto of_row = [&](int position, int row) {
    const T* const from = of_hidden + (int64_t(position) * s.rows + row) * s.padded_units + unit;
    if constexpr (sizeof(T) == 2) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(from);
      return Two{Widen(Half16<T>(both, 0)), Widen(Half16<T>(both, 1))};
    } else {
      return Two{from[0], from[1]};
    }
  };
  // Of frames whose blocks another slab has, too, the sum goes from slab to slab in `s.carry`.
  const auto same_frames = [&](int64_t position) {
    return position >= 0 && position < count && ((uint32_t(table.inputs.list[position]) ^ code) & mask) == 0;
  };
  const auto of_frames = [&](int row, int64_t place, const Two& sum) {
    const int64_t begin = int64_t(slab) * s.blocks;
    const bool begun = mine == 0 && same_frames(begin - 1), unfinished = same_frames(begin + live);
    const auto carry = [&](int k) { return s.carry + (int64_t(k % 2) * table.frames_of_block + row) * table.units; };
#pragma unroll 1
    for (int k = unit; k < min(unit + 2, table.units); ++k) {
      const float x = (k == unit ? sum.x : sum.y) + (begun ? carry(slab)[k] : 0);
      if (unfinished) {
        carry(slab + 1)[k] = x;
      } else if (table.inputs.rows == DType::kF32) {
        static_cast<float*>(s.encoder)[place + k] = x;
      } else if (table.inputs.rows == DType::kBF16) {
        static_cast<BFloat16*>(s.encoder)[place + k] = Narrow<BFloat16>(x);
      } else {
        static_cast<Half*>(s.encoder)[place + k] = Narrow<Half>(x);
      }
    }
  };
  const auto of_columns = [&](int64_t place, const Two& sum) {
    if (unit < table.units) s.predictor[place + unit] += sum.x;
    if (unit + 1 < table.units) s.predictor[place + unit + 1] += sum.y;
  };
  if (unit >= s.padded_units) return;
  // Of rows of the encoder, or of the predictor: a warp takes a row of the block at a time.
  const auto add_rows = [&](auto frames) {
    constexpr bool kFrames = decltype(frames)::value != 0;
    const int end = kFrames ? table.frames_of_block : kJointColumns;
    const int others = kFrames ? kJointColumns : table.frames_of_block;
    for (int i = warp; i < end; i += kSumThreads / 32) {
      Two sum = {0, 0};
      int at = 0;
      int64_t place = 0;
      each([&](int position) {
        const JointBlock block(table, uint32_t(list[position]));
        at = (kFrames ? block.frame : block.column) + i;
        place = kFrames ? int64_t(block.encoder) * table.frames + at : int64_t(block.sequence) * table.columns + at;
        if (at >= (kFrames ? block.frames : block.columns)) return;
        const JointRows rows(table, block);
        const Two x = kFrames ? rows.Encoder(at, unit) : rows.Predictor(at, unit);
#pragma unroll 1
        for (int first = 0; first < others; first += kAtOnce) {  // the gradient of rows outside the lengths is 0
          Two y[kAtOnce], g[kAtOnce];
#pragma unroll
          for (int j = 0; j < kAtOnce; ++j) {
            const int k = first + j;
            y[j] = kFrames ? rows.Predictor(block.column + k, unit) : rows.Encoder(block.frame + k, unit);
            g[j] = of_row(position, kFrames ? i * kJointColumns + k : k * kJointColumns + i);
          }
          ForActivation(table.activation, [&](const auto& activation) {
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
              sum.x += g[j].x * activation.Derivative(x.x + y[j].x);
              sum.y += g[j].y * activation.Derivative(x.y + y[j].y);
            }
          });
        }
      });
      if (at >= (kFrames ? table.frames : table.columns)) continue;
      if constexpr (kFrames) {
        of_frames(i, place * table.units, sum);
      } else {
        of_columns(place * table.units, sum);
      }
    }
  };
  if (of_encoder) {
    add_rows(Number<1>());
  } else {
    add_rows(Number<0>());
  }
}

// -------------------------------------------------------------------------------------------------------------- host

// Whether the current device has the instructions.
bool HasTensorCores() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= kJointCapability;
}

// f(T, exact, rows as types) of the kernel for the problem.
template <class F>
cudaError_t ForKernel(DType dtype, const JointShape& shape, const F& f) {
  const auto of_rows = [&](auto t, auto exact) {
    if (shape.rows == 64) return f(t, exact, Number<64>());
    if (shape.rows == 32) return f(t, exact, Number<32>());
    if constexpr (sizeof t == 2) {
      if (shape.rows == 128) return f(t, exact, Number<128>());
    }
    return cudaErrorInvalidValue;
  };
  if (dtype == DType::kF16) return of_rows(Half{}, Number<0>());
  if (dtype == DType::kBF16) return of_rows(BFloat16{}, Number<0>());
  if (dtype != DType::kF32) return cudaErrorInvalidValue;
  return shape.exact ? of_rows(0.f, Number<1>()) : of_rows(0.f, Number<0>());
}

int Size(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

}  // namespace

size_t JointSharedBytes(int64_t rows, int64_t row_bytes) {
  return size_t(kStages * kStageBytes + rows * (kNumbers * 4 + row_bytes + 16));
}

cudaError_t JointForward(const JointForwardArgs& args, cudaStream_t stream) {
  const JointShape& shape = args.shape;
  const DType dtype = args.inputs.dtype;
  if (shape.blocks == 0) return cudaSuccess;
  if (!HasTensorCores()) return Loading::active ? cudaSuccess : cudaErrorNotSupported;
  const JointTable table(shape, args.inputs);
  const JointWeight weight(shape, args.weight, args.bias, Size(dtype));
  const size_t shared_bytes = JointSharedBytes(shape.rows, weight.row_bytes);
  return ForKernel(dtype, shape, [&](auto t, auto exact, auto rows) {
    constexpr auto kKernel = &JointForwardKernel<decltype(t), decltype(exact)::value != 0, decltype(rows)::value>;
    return Launch(kKernel, dim3(unsigned(shape.blocks)), dim3(kJointThreads), shared_bytes, stream,
                  table, weight, args.planes);
  });
}

cudaError_t JointGradient(const JointGradientArgs& args, cudaStream_t stream) {
  const JointShape& shape = args.shape;
  const DType dtype = args.inputs.dtype;
  if (shape.slab == 0) return cudaSuccess;
  if (!HasTensorCores()) return Loading::active ? cudaSuccess : cudaErrorNotSupported;
  const JointTable table(shape, args.inputs);
  const JointWeight weight(shape, args.weight, args.bias, Size(dtype));
  const size_t shared_bytes = JointSharedBytes(shape.rows, weight.row_bytes);
  const GradientTable gradient = {args.numbers,
                                  args.bound,
                                  args.slab,
                                  int(args.added_blanks),
                                  shape.normalize,
                                  shape.bernoulli,
                                  static_cast<unsigned char*>(args.hidden),
                                  static_cast<unsigned char*>(args.gradient),
                                  args.of_bias,
                                  args.here};
  return ForKernel(dtype, shape, [&](auto t, auto exact, auto rows) {
    constexpr auto kKernel = &JointGradientKernel<decltype(t), decltype(exact)::value != 0, decltype(rows)::value>;
    return Launch(kKernel, dim3(unsigned(shape.slab)), dim3(kJointThreads), shared_bytes, stream,
                  table, weight, gradient);
  });
}

cudaError_t JointSums(const JointSumsArgs& args, cudaStream_t stream) {
  const JointShape& shape = args.shape;
  if (!HasTensorCores()) return Loading::active ? cudaSuccess : cudaErrorNotSupported;
  const JointTable table(shape, args.inputs);
  const SumsTable sums = {args.slab,
                          int(shape.slab),
                          int(shape.rows),
                          int(shape.padded_units),
                          int(shape.classes),
                          args.of_hidden,
                          args.of_bias,
                          args.encoder_gradient,
                          args.predictor_gradient,
                          args.bias_gradient,
                          args.carry,
                          args.next,
                          args.more};
  const int64_t parts = (shape.units + kSumUnits - 1) / kSumUnits;
  const dim3 grid(unsigned(2 * shape.slab * parts + shape.classes / 32));
  const size_t shared_bytes = max(size_t(shape.slab + 31) / 32, size_t(kSumThreads)) * 4;
  const auto launch = [&](auto t) {
    return Launch(&JointSumsKernel<decltype(t)>, grid, dim3(kSumThreads), shared_bytes, stream, table, sums);
  };
  if (args.inputs.dtype == DType::kF16) return launch(Half{});
  if (args.inputs.dtype == DType::kBF16) return launch(BFloat16{});
  return launch(0.f);
}

}  // namespace jax_rnnt::cuda
