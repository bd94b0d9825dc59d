// Logits of a block, 128 classes at a time, in registers.
//
// Hidden units of all rows lie in shared memory, and three stages of the weight, each 128 classes by 128 bytes of
// units. A row of either has 16 bytes more than its units, so that eight rows meet all banks. Of 4 N warps, four take
// 32 classes each, and N take a part of the rows each.
#pragma once

#include "xla_kernels/cuda/joint_rows.cuh"
#include "xla_kernels/cuda/matrix.cuh"

namespace jax_rnnt::cuda {

#ifndef JAX_RNNT_JOINT_ROW_WARPS
#define JAX_RNNT_JOINT_ROW_WARPS 2
#endif
constexpr int kRowWarps = JAX_RNNT_JOINT_ROW_WARPS, kClassWarps = 4, kJointThreads = 32 * kRowWarps * kClassWarps;
constexpr int kStages = 3, kPitch = kJointBytes + 16, kStageBytes = kJointClasses * kPitch;

// The arguments of all kernels with a product.
struct JointWeight {
  JointWeight(const JointShape& shape, const void* weight, const float* bias, int size)
      : weight(static_cast<const unsigned char*>(weight)),
        bias(bias),
        row_bytes(int(shape.padded_units) * size),
        chunks(int(shape.classes / kJointClasses)),
        others(int(shape.others)),
        kept(int(shape.blanks)),
        start(shape.others > 0 ? kJointClasses : 0) {}

  const unsigned char* weight;
  const float* bias;
  int row_bytes, chunks;
  int others, kept;  // classes of other heads, classes of the softmax whose logits are kept
  int start;         // the first class of the softmax
};

// Shared memory of a block holds stages, numbers of rows, hidden units, one after the other (`JointSharedBytes`).
constexpr int kNumbers = 2 * kClassWarps + 4;  // numbers of a row

// One lane's part of a chunk.
template <int kRows>
struct JointTile {
  static constexpr int kTiles = kRows / (16 * kRowWarps), kOwn = 2 * kTiles;  // tiles of 16 rows; rows of a lane

  // Row i of kOwn.
  static __device__ __forceinline__ int Row(int i) { return RowWarp() * (kRows / kRowWarps) + Lane() / 4 + 8 * i; }
  // The number of the first class; the others are n * 8 + e further.
  static __device__ __forceinline__ int Class() { return ClassWarp() * 32 + Lane() % 4 * 2; }
  static __device__ __forceinline__ int Lane() { return int(threadIdx.x % 32); }
  static __device__ __forceinline__ int RowWarp() { return int(threadIdx.x / 32) / kClassWarps; }
  static __device__ __forceinline__ int ClassWarp() { return int(threadIdx.x / 32) % kClassWarps; }

  // The number of the class in slot s of 8, relative to the first; and back, -1 for that of another lane.
  static __device__ __forceinline__ int Offset(int s) { return s / 2 * 8 + s % 2; }
  static __device__ __forceinline__ int Slot(int offset) {
    return unsigned(offset) < 32 && offset % 8 < 2 ? offset / 8 * 2 + offset % 8 : -1;
  }

  // The logit of row i and slot s, numbers that are known when compiled: they name a register.
  __device__ __forceinline__ float& At(int i, int s) { return sums[i / 2][s / 2][i % 2 * 2 + s % 2]; }
  // The same for any slot.
  __device__ __forceinline__ float Get(int i, int slot) {
    float x = 0;
#pragma unroll
    for (int s = 0; s < 8; ++s) x = s == slot ? At(i, s) : x;
    return x;
  }
  __device__ __forceinline__ void Set(int i, int slot, float x) {
#pragma unroll
    for (int s = 0; s < 8; ++s) At(i, s) = s == slot ? x : At(i, s);
  }
  __device__ __forceinline__ void AddBias(const float* bias) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      const float x = bias[Offset(s)];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) At(i, s) += x;
    }
  }

  float sums[kTiles][4][4];
};

// activation(encoder + predictor) of all rows of the block, rounded to factors of products.
template <class T, bool kExact, int kRows>
__device__ __forceinline__ void MakeHidden(const JointTable& table, const JointBlock& block, int row_bytes,
                                           unsigned char* hidden) {
  const int pairs = row_bytes / int(2 * sizeof(T));
  const JointRows rows(table, block);
  int i = 0, pair = int(threadIdx.x);
  while (true) {
    while (pair >= pairs) pair -= pairs, ++i;
    if (i >= kRows / kJointColumns) return;
    const Two x = rows.Encoder(block.frame + i, 2 * pair);
#pragma unroll 1
    for (int first = 0; first < kJointColumns; first += kAtOnce) {
      Two values[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const Two y = rows.Predictor(block.column + first + c, 2 * pair);
        values[c] = {x.x + y.x, x.y + y.y};
      }
      ForActivation(table.activation, [&](const auto& activation) {
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c) values[c] = {activation.Value(values[c].x), activation.Value(values[c].y)};
      });
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const float a = values[c].x, b = values[c].y;
        const int row = i * kJointColumns + first + c;
        unsigned char* const place = hidden + row * (row_bytes + 16) + pair * int(2 * sizeof(T));
        if constexpr (sizeof(T) == 2) {
          *reinterpret_cast<uint32_t*>(place) = NarrowPair<T>(a, b);
        } else {
          reinterpret_cast<float*>(place)[0] = kExact ? a : RoundToTF32(a);
          reinterpret_cast<float*>(place)[1] = kExact ? b : RoundToTF32(b);
        }
      }
    }
    pair += kJointThreads;
  }
}

// Starts the copies of a stage, and makes them a group; an empty one past the last stage.
__device__ __forceinline__ void StartStage(const JointWeight& w, int stage, int steps, unsigned char* stages) {
  if (stage < w.chunks * steps) {
    const unsigned char* const from =
        w.weight + size_t(stage / steps) * kJointClasses * w.row_bytes + stage % steps * kJointBytes;
    unsigned char* const to = stages + stage % kStages * kStageBytes;
    constexpr int kUnits = kJointBytes / 16;
#pragma unroll
    for (int k = 0; k < kJointClasses * kUnits / kJointThreads; ++k) {
      const int unit = int(threadIdx.x) + k * kJointThreads, row = unit / kUnits, byte = unit % kUnits * 16;
      CopyAsync(SharedAddress<Words>(reinterpret_cast<Words*>(to + row * kPitch + byte)),
                reinterpret_cast<const Words*>(from + size_t(row) * w.row_bytes + byte));
    }
  }
  CommitCopies();
}

// Adds the products of a stage.
template <class T, bool kExact, int kRows>
__device__ __forceinline__ void MultiplyStage(JointTile<kRows>& tile, SharedAddress<unsigned char> hidden,
                                              int hidden_pitch, SharedAddress<unsigned char> stage) {
  using Tile = JointTile<kRows>;
  const int lane = Tile::Lane();
  const auto of_rows = hidden + ((Tile::RowWarp() * (kRows / kRowWarps) + lane % 16) * hidden_pitch + lane / 16 * 16);
  const auto of_classes = stage + ((Tile::ClassWarp() * 32 + lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16);
#pragma unroll
  for (int k = 0; k < kJointBytes; k += 32) {
    uint32_t b[4][2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t words[4];
      LoadMatrices(words, of_classes + (n * 16 * kPitch + k));
      b[2 * n][0] = words[0], b[2 * n][1] = words[1], b[2 * n + 1][0] = words[2], b[2 * n + 1][1] = words[3];
    }
#pragma unroll
    for (int m = 0; m < Tile::kTiles; ++m) {
      uint32_t a[4];
      LoadMatrices(a, of_rows + (m * 16 * hidden_pitch + k));
      if constexpr (kExact) {
        uint32_t high[4], low[4];
        Split(a, high, low);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t b_high[2], b_low[2];
          Split(b[n], b_high, b_low);
          MultiplyAdd<T>(tile.sums[m][n], low, b_high);
          MultiplyAdd<T>(tile.sums[m][n], high, b_low);
          MultiplyAdd<T>(tile.sums[m][n], high, b_high);
        }
      } else {
#pragma unroll
        for (int n = 0; n < 4; ++n) MultiplyAdd<T>(tile.sums[m][n], a, b[n]);
      }
    }
  }
}

// make_hidden(), then use(chunk, tile) of all chunks of classes in order; logits are without bias. All threads meet
// between two calls of `use`.
template <class T, bool kExact, int kRows, class Make, class Use>
__device__ __forceinline__ void ForEachChunk(const JointWeight& w, unsigned char* hidden, unsigned char* stages,
                                             const Make& make_hidden, const Use& use) {
  const int steps = w.row_bytes / kJointBytes, pitch = w.row_bytes + 16;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) StartStage(w, stage, steps, stages);
  make_hidden();
  int stage = 0;
  for (int chunk = 0; chunk < w.chunks; ++chunk) {
    JointTile<kRows> tile = {};
    for (int step = 0; step < steps; ++step, ++stage) {
      WaitForCopies<kStages - 2>();
      __syncthreads();
      StartStage(w, stage + kStages - 1, steps, stages);
      MultiplyStage<T, kExact>(tile, SharedAddress<unsigned char>(hidden + step * kJointBytes), pitch,
                               SharedAddress<unsigned char>(stages + stage % kStages * kStageBytes));
    }
    use(chunk, tile);
  }
  WaitForCopies<0>();
}

// The rows of a lane as nodes of the lattice: one column, frames that follow each other.
template <int kRows>
struct JointNodes {
  __device__ __forceinline__ JointNodes(const JointTable& table, const JointBlock& block)
      : step(table.columns), nodes(table.nodes), column(block.column + JointTile<kRows>::Lane() / 4) {
    const int frame = block.frame + JointTile<kRows>::Row(0) / kJointColumns;
    inside = column < block.columns ? block.frames - frame : 0;
    first = block.Node(table, frame, column);
    label = column < block.columns ? table.inputs.label[int64_t(block.sequence) * table.columns + column] : -1;
  }
  __device__ __forceinline__ bool Inside(int i) const { return i < inside; }
  // The place of row i in a plane.
  __device__ __forceinline__ int64_t At(int plane, int i) const { return plane * nodes + first + int64_t(i) * step; }

  int step;
  int64_t nodes, first;
  int column, inside, label;
};

// Largest logits of rows and sums of exponentials relative to them, in parts.
struct RowTotal {
  float peak, total;

  __device__ __forceinline__ static float Base(float peak) { return peak == -INFINITY ? 0 : peak; }
  __device__ __forceinline__ static float Exp(float x) { return Exp2(1.44269504f * x); }
  __device__ __forceinline__ void Add(const RowTotal& other) {
    const float either = Max(peak, other.peak), base = Base(either);
    total = total * Exp(peak - base) + other.total * Exp(other.peak - base);
    peak = either;
  }
};

// That of row threadIdx.x, if there is one, from the parts that lanes have of their rows; of four lanes with the same
// rows the first one's sum counts. `numbers`: [2, 4, R] in shared memory.
template <int kRows>
__device__ __forceinline__ RowTotal Combine(RowTotal (&parts)[JointTile<kRows>::kOwn], float* numbers) {
  using Tile = JointTile<kRows>;
#pragma unroll
  for (int i = 0; i < Tile::kOwn; ++i) {
#pragma unroll
    for (int mask = 1; mask <= 2; mask *= 2) {
      const float peak = __shfl_xor_sync(0xffffffffu, parts[i].peak, mask);
      const float total = __shfl_xor_sync(0xffffffffu, parts[i].total, mask);
      parts[i].Add({peak, total});
    }
    if (Tile::Lane() % 4 == 0) {
      numbers[Tile::ClassWarp() * kRows + Tile::Row(i)] = parts[i].peak;
      numbers[(kClassWarps + Tile::ClassWarp()) * kRows + Tile::Row(i)] = parts[i].total;
    }
  }
  __syncthreads();
  RowTotal row = {-INFINITY, 0};
  if (int(threadIdx.x) < kRows) {
#pragma unroll
    for (int k = 0; k < kClassWarps; ++k)
      row.Add({numbers[k * kRows + threadIdx.x], numbers[(kClassWarps + k) * kRows + threadIdx.x]});
  }
  return row;
}

}  // namespace jax_rnnt::cuda
