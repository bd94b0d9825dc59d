// Gradients of the rows of encoder and predictor, and of the bias, from those of a slab: joint.h describes the results.
#pragma once

#include "xla_kernels/cuda/joint_rows.cuh"

namespace jax_rnnt::cuda {

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

// The sum of the bias over the blocks of the slab that count; a warp adds a part of the rows of 32 classes.
__device__ __forceinline__ void SumBias(const SumsTable& s, int class_block, int live, float* sums) {
  const int k = class_block * 32 + int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
  const int part = (2 * live + kSumThreads / 32 - 1) / (kSumThreads / 32);
  float sum = 0;
#pragma unroll 8
  for (int i = part * warp; i < min(part * (warp + 1), 2 * live); ++i) sum += s.of_bias[int64_t(i) * s.classes + k];
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp > 0) return;
  for (int i = 1; i < kSumThreads / 32; ++i) sum += sums[32 * i + threadIdx.x];
  s.bias[k] += sum;
}

// The gradient of the rows of the encoder in the frames of block `mine`, or of the predictor in its columns, summed
// over all blocks of the slab that have the same: with dx = of_hidden activation'(encoder + predictor),
//   d encoder[t] = sum of dx over the columns u of frame t,  d predictor[u] = sum of dx over the frames t of column u.
template <class T>
struct JointSumOfRows {
  // Marks the blocks with the same frames, or columns, and tells whether `mine` is the first of them, which adds all.
  __device__ __forceinline__ bool Mark() const {
    for (int i = int(threadIdx.x); i < (live + 31) / 32 * 32; i += kSumThreads) {
      const uint32_t word =
          __ballot_sync(0xffffffffu, i < live && ((uint32_t(list[i < live ? i : 0]) ^ code) & mask) == 0);
      if (threadIdx.x % 32 == 0) same[i / 32] = word;
    }
    __syncthreads();
    for (int i = 0; i <= mine / 32; ++i) {
      const uint32_t before = i < mine / 32 ? 0xffffffffu : (1u << mine % 32) - 1;
      if (same[i] & before) return false;
    }
    return true;
  }

  // f(position) of the blocks in their order.
  template <class F>
  __device__ __forceinline__ void Each(const F& f) const {
    for (int i = mine / 32; i < (live + 31) / 32; ++i) {
      for (uint32_t word = same[i]; word != 0; word &= word - 1) f(i * 32 + __ffs(int(word)) - 1);
    }
  }

  __device__ __forceinline__ Two OfHidden(int position, int row) const {
    const T* const from =
        static_cast<const T*>(s.of_hidden) + (int64_t(position) * s.rows + row) * s.padded_units + unit;
    if constexpr (sizeof(T) == 2) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(from);
      return {Widen(Half16<T>(both, 0)), Widen(Half16<T>(both, 1))};
    } else {
      return {from[0], from[1]};
    }
  }

  // For frames whose blocks another slab has, too, the sum goes from slab to slab in `s.carry`.
  __device__ __forceinline__ bool HasFrames(int64_t position) const {
    return position >= 0 && position < count && ((uint32_t(table.inputs.list[position]) ^ code) & mask) == 0;
  }
  __device__ __forceinline__ void WriteFrame(int row, int64_t place, const Two& sum) const {
    const int64_t begin = int64_t(slab) * s.blocks;
    const bool begun = mine == 0 && HasFrames(begin - 1), unfinished = HasFrames(begin + live);
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
  }
  __device__ __forceinline__ void AddColumn(int64_t place, const Two& sum) const {
    if (unit < table.units) s.predictor[place + unit] += sum.x;
    if (unit + 1 < table.units) s.predictor[place + unit + 1] += sum.y;
  }

  // A warp takes a row of the block at a time.
  template <bool kFrames>
  __device__ __forceinline__ void Add() const {
    const int end = kFrames ? table.frames_of_block : kJointColumns;
    const int others = kFrames ? kJointColumns : table.frames_of_block;
    for (int i = int(threadIdx.x / 32); i < end; i += kSumThreads / 32) {
      Two sum = {0, 0};
      int at = 0;
      int64_t place = 0;
      Each([&](int position) {
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
            g[j] = OfHidden(position, kFrames ? i * kJointColumns + k : k * kJointColumns + i);
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
        WriteFrame(i, place * table.units, sum);
      } else {
        AddColumn(place * table.units, sum);
      }
    }
  }

  const JointTable& table;
  const SumsTable& s;
  const int32_t* list;  // of the slab
  uint32_t* same;       // shared memory: a bit for each block of the slab
  int slab, count, live, mine;
  uint32_t code, mask;  // of `mine`; the bits that blocks with the same frames, or columns, share
  int unit;             // the first of this lane
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
    return SumBias(s, index - 2 * s.blocks * parts, live, reinterpret_cast<float*>(same));
  }
  const bool of_encoder = index < s.blocks * parts;
  index -= of_encoder ? 0 : s.blocks * parts;
  const int mine = index / parts;
  if (mine >= live) return;
  const int of_block = table.copy_bits + table.column_bits;
  const uint32_t frame_mask = ((1u << table.frame_bits) - 1) << of_block;
  const uint32_t mask = of_encoder ? ~((1u << of_block) - 1) : ~frame_mask;
  JointSumOfRows<T> sum = {table, s, list, same, slab, count, live, mine, uint32_t(list[mine]), mask, 0};
  if (!sum.Mark()) return;
  sum.unit = index % parts * kSumUnits + int(threadIdx.x % 32) * 2;
  if (sum.unit >= s.padded_units) return;
  if (of_encoder) {
    sum.template Add<true>();
  } else {
    sum.template Add<false>();
  }
}

}  // namespace jax_rnnt::cuda
