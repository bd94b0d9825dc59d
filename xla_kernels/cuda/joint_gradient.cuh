// The gradient of the logits of a slab of blocks, and their hidden units: joint.h describes the results.
#pragma once

#include "xla_kernels/cuda/joint_product.cuh"

namespace jax_rnnt::cuda {

// The kernel's inputs and outputs besides `JointTable` and `JointWeight`.
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

// The gradient g = dL/dz of the logits of a block, from the numbers of its rows. jax_rnnt/tiles/joint/_planes.py
// derives it: with the cotangent c[k] of the plane of blank k or of the label, and C their sum,
//   g[v] = sum of c[k] over k = v - C exp(z[v] - lse),
// and for the softmax of other heads the same over their classes. XLA has made `factor` and `base` of -C and lse, so
// that the kernel takes factor exp(z[v] - base). A Bernoulli blank has g = c[blank] sigmoid(-z) - c[label] sigmoid(z).
template <int kRows>
struct JointGradientRows {
  using Tile = JointTile<kRows>;
  static constexpr int kOwn = Tile::kOwn;

  // Number k of row i; 0 outside.
  __device__ __forceinline__ float Number(int k, int i) const {
    return nodes.Inside(i) ? g.numbers[nodes.At(k, i)] : 0.f;
  }

  // f(frame, column) of the row of this thread, if there is one.
  template <class F>
  __device__ __forceinline__ void ForOwnRow(const F& f) const {
    if (int(threadIdx.x) < kRows)
      f(block.frame + int(threadIdx.x) / kJointColumns, block.column + int(threadIdx.x) % kJointColumns);
  }

  // Puts `factor` and `base` of all rows where the block reads them.
  __device__ __forceinline__ void Prepare() {
    ForOwnRow([&](int t, int column) {
      const bool inside = block.Inside(t, column);
      const float* const of_node = g.numbers + (inside ? block.Node(table, t, column) : 0);
      factor[threadIdx.x] = inside ? of_node[(of_label + 1) * table.nodes] : 0;
      base[threadIdx.x] = inside ? of_node[(of_label + 2) * table.nodes] : INFINITY;
    });
  }

  // The gradient of a Bernoulli blank, the first class, in place of its logit.
  __device__ __forceinline__ void OfBernoulli(Tile& tile, int first) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float z = tile.At(i, 0);
      const float gradient = Number(0, i) * Sigmoid(-z) - Number(of_label, i) * Sigmoid(z);
#pragma unroll
      for (int s = 0; s < 8; ++s) tile.At(i, s) = s == 0 && first == 0 ? gradient : 0;
    }
  }

  // Puts the numbers for the softmax of other heads into `of_rows`: a base, and the sum of cotangents by that of
  // exponentials.
  __device__ __forceinline__ void NormalizeOthers(Tile& tile, int first) const {
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
    ForOwnRow([&](int t, int column) {
      float sum = 0;
      if (block.Inside(t, column)) {
        for (int k = 0; k < w.others; ++k) sum += g.numbers[k * table.nodes + block.Node(table, t, column)];
      }
      of_rows[threadIdx.x] = RowTotal::Base(row.peak);
      of_rows[kRows + threadIdx.x] = row.total == 0 ? 0 : sum / row.total;
    });
    __syncthreads();
  }

  // The gradient of other heads in place of their logits.
  __device__ __forceinline__ void OfOthers(Tile& tile, int first) const {
    if (g.bernoulli) return OfBernoulli(tile, first);
    if (g.normalize) NormalizeOthers(tile, first);
#pragma unroll 1
    for (int s = 0; s < 8; ++s) {
      const int k = first + Tile::Offset(s);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float gradient = 0;
        if (k < w.others) {
          gradient = Number(k, i);
          const int row = Tile::Row(i);
          if (g.normalize) gradient -= RowTotal::Exp(tile.Get(i, s) - of_rows[row]) * of_rows[kRows + row];
        }
        tile.Set(i, s, gradient);
      }
    }
  }

  // The same for the softmax. Its first class is the anchor: a base of -inf stands for the logit of that class.
  __device__ __forceinline__ void OfSoftmax(Tile& tile, int chunk, int first) const {
    const bool has_anchor = chunk * kJointClasses == w.start;
    if (has_anchor) {
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
      for (int i = 0; i < kOwn; ++i) tile.Set(i, slot, tile.Get(i, slot) + Number(k, i));
    };
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float from = base[Tile::Row(i)], times = factor[Tile::Row(i)];
#pragma unroll
      for (int s = 0; s < 8; ++s) tile.At(i, s) = RowTotal::Exp(tile.At(i, s) - from) * times;
    }
    const int slot = Tile::Slot(nodes.label - first);
    if (slot >= 0) add(of_label, slot);
    if (has_anchor) {
      const int end = w.start + g.blanks;
#pragma unroll 1
      for (int s = 0; s < 8 && first + Tile::Offset(s) < end; ++s) add(w.others + first + Tile::Offset(s) - w.start, s);
    }
  }

  const JointTable& table;
  const JointWeight& w;
  const GradientTable& g;
  const JointBlock& block;
  const JointNodes<kRows>& nodes;
  float *numbers, *of_rows, *base, *factor;  // shared memory: [2, 4, R], [2, R], [R], [R], as registers are few
  int of_label;                              // the number that is added at the label
};

// Writes the clipped gradient of a chunk, and its sums over the rows of this warp.
template <class T, int kRows>
__device__ __forceinline__ void StoreGradient(JointTile<kRows>& tile, float bound, int classes, int first, T* to,
                                              float* of_bias) {
  using Tile = JointTile<kRows>;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < Tile::kOwn; ++i) {
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
}

template <class T, bool kExact, int kRows>
__global__ __launch_bounds__(kJointThreads, 1) void JointGradientKernel(JointTable table, JointWeight w,
                                                                        GradientTable g) {
  JAX_RNNT_AT_MOST(kJointThreads);
  JAX_RNNT_DYNAMIC_SHARED(unsigned char, shared);
  using Tile = JointTile<kRows>;
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
  float* const of_rows = numbers + 2 * kClassWarps * kRows;
  float* const base = of_rows + 2 * kRows;
  unsigned char* const hidden = shared + kStages * kStageBytes + kRows * kNumbers * 4;
  const JointNodes<kRows> nodes(table, block);
  JointGradientRows<kRows> rows = {table,   w,       g,    block,        nodes,
                                   numbers, of_rows, base, base + kRows, w.others + g.blanks};
  const float bound = g.bound[block.sequence];
  rows.Prepare();

  const auto use = [&](int chunk, Tile& tile) {
    const int first = chunk * kJointClasses + Tile::Class();
    tile.AddBias(w.bias + first);
    if (chunk * kJointClasses < w.start) {
      rows.OfOthers(tile, first);
    } else {
      rows.OfSoftmax(tile, chunk, first);
    }
    StoreGradient<T, kRows>(tile, bound, classes, first, to, of_bias);
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

}  // namespace jax_rnnt::cuda
