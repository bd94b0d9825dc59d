// Rows of encoder and predictor, and activations of their sums.
#pragma once

#include "xla_kernels/cuda/elements.cuh"
#include "xla_kernels/cuda/joint.h"

namespace jax_rnnt::cuda {

struct Two {
  float x, y;
};

// x / y within 2 ulp; 0 where y is above 2^126.
__device__ __forceinline__ float Divide(float x, float y) {
#if defined(__CUDA_ARCH__)
  return __fdividef(x, y);
#else
  return x / y;
#endif
}

// 1 / (1 + e^-x).
__device__ __forceinline__ float Sigmoid(float x) { return Divide(1, 1 + Exp2(-1.44269504f * x)); }

// tanh(x), with the relative precision of float32 where that matters: near 0.
__device__ __forceinline__ float Tanh(float x) {
  const float y = x * x;
  const float near = x * Fma(y, Fma(y, Fma(y, -0.0539682540f, 0.1333333333f), -0.3333333333f), 1.f);
  const float size = 1 - Divide(2, 1 + Exp2(2.88539008f * Abs(x)));
  return Abs(x) < 0.25f ? near : x < 0 ? -size : size;
}

// Value and derivative of each.
template <Activation kind>
struct Activated {
  static __device__ __forceinline__ float Value(float x) {
    if constexpr (kind == Activation::kTanh) return Tanh(x);
    if constexpr (kind == Activation::kRelu) return x > 0 || x != x ? x : 0;
    if constexpr (kind == Activation::kSilu) return x * Sigmoid(x);
    if constexpr (kind == Activation::kGelu) return 0.5f * x * (1 + Tanh(Inner(x)));
    if constexpr (kind == Activation::kExactGelu) return x * Normal(x);
  }
  static __device__ __forceinline__ float Derivative(float x) {
    if constexpr (kind == Activation::kTanh) {
      const float y = Tanh(x);
      return 1 - y * y;
    }
    if constexpr (kind == Activation::kRelu) return x > 0 ? 1 : 0;
    if constexpr (kind == Activation::kSilu) {
      const float y = Sigmoid(x);
      return y * (1 + x * (1 - y));
    }
    if constexpr (kind == Activation::kGelu) {
      const float y = Tanh(Inner(x));
      return 0.5f * (1 + y) + 0.5f * x * (1 - y * y) * (0.7978845608f * (1 + 0.134145f * x * x));
    }
    if constexpr (kind == Activation::kExactGelu) return Normal(x) + x * 0.3989422804f * Exp2(-0.7213475204f * x * x);
  }

 private:
  static __device__ __forceinline__ float Inner(float x) { return 0.7978845608f * (x + 0.044715f * x * x * x); }
  static __device__ __forceinline__ float Normal(float x) { return 0.5f * erfcf(-0.7071067812f * x); }
};

// Rows that are loaded before an activation takes them. Only the activation is compiled for each kind, not the loads: a
// wheel holds the kernels for several architectures.
constexpr int kAtOnce = 4;

// f(activation) of the kind.
template <class F>
__device__ __forceinline__ void ForActivation(Activation kind, const F& f) {
  switch (kind) {
    case Activation::kTanh:
      return f(Activated<Activation::kTanh>());
    case Activation::kRelu:
      return f(Activated<Activation::kRelu>());
    case Activation::kSilu:
      return f(Activated<Activation::kSilu>());
    case Activation::kGelu:
      return f(Activated<Activation::kGelu>());
    default:
      return f(Activated<Activation::kExactGelu>());
  }
}

// The parts of `JointShape` and `JointInputs` that kernels read.
struct JointTable {
  JointTable(const JointShape& shape, const JointInputs& inputs)
      : inputs(inputs),
        copies(int(shape.copies)),
        frames(int(shape.frames)),
        columns(int(shape.columns)),
        units(int(shape.units)),
        frames_of_block(int(shape.rows / kJointColumns)),
        frame_bits(int(shape.frame_bits)),
        copy_bits(int(shape.copy_bits)),
        column_bits(int(shape.column_bits)),
        activation(shape.activation),
        nodes(shape.encoders * shape.copies * shape.frames * shape.columns) {}

  JointInputs inputs;
  int copies, frames, columns, units, frames_of_block, frame_bits, copy_bits, column_bits;
  Activation activation;
  int64_t nodes;
};

// A block of the list, and its rows inside the lengths.
struct JointBlock {
  __device__ __forceinline__ JointBlock(const JointTable& table, uint32_t code) {
    const int column_block = int(code & ((1u << table.column_bits) - 1));
    code >>= table.column_bits;
    const int copy = int(code & ((1u << table.copy_bits) - 1));
    code >>= table.copy_bits;
    frame = int(code & ((1u << table.frame_bits) - 1)) * table.frames_of_block;
    encoder = int(code >> table.frame_bits);
    sequence = encoder * table.copies + copy;
    column = column_block * kJointColumns;
    frames = min(table.inputs.num_frames[sequence], table.frames);
    columns = min(table.inputs.num_labels[sequence] + 1, table.columns);
  }
  __device__ __forceinline__ bool Inside(int t, int u) const { return t < frames && u < columns; }
  // The place of a node in a plane.
  __device__ __forceinline__ int64_t Node(const JointTable& table, int t, int u) const {
    return (int64_t(sequence) * table.frames + t) * table.columns + u;
  }

  int encoder, sequence;
  int frame, column;    // the first of the block
  int frames, columns;  // of the sequence
};

// Rows of encoder and predictor: two units of a row, 0 outside the lengths and beyond H.
struct JointRows {
  __device__ __forceinline__ JointRows(const JointTable& table, const JointBlock& block)
      : table(table),
        block(block),
        encoder(int64_t(block.encoder) * table.frames * table.units),
        predictor(int64_t(block.sequence) * table.columns * table.units) {}
  __device__ __forceinline__ Two Encoder(int t, int unit) const {
    return Pair(table.inputs.encoder, encoder + int64_t(t) * table.units + unit, t < block.frames, unit);
  }
  __device__ __forceinline__ Two Predictor(int u, int unit) const {
    return Pair(table.inputs.predictor, predictor + int64_t(u) * table.units + unit, u < block.columns, unit);
  }

  const JointTable& table;
  const JointBlock& block;
  int64_t encoder, predictor;

 private:
  __device__ __forceinline__ Two Pair(const void* rows, int64_t place, bool inside, int unit) const {
    return {inside && unit < table.units ? At(rows, place) : 0.f,
            inside && unit + 1 < table.units ? At(rows, place + 1) : 0.f};
  }
  // The type is the same for all: no warp diverges.
  __device__ __forceinline__ float At(const void* rows, int64_t i) const {
    if (table.inputs.rows == DType::kF32) return static_cast<const float*>(rows)[i];
    const uint16_t bits = static_cast<const uint16_t*>(rows)[i];
    return table.inputs.rows == DType::kBF16 ? Widen(BFloat16{bits}) : Widen(Half{bits});
  }
};

}  // namespace jax_rnnt::cuda
