// A joint network activation(encoder + predictor) W + bias and the numbers of rows that losses are made of, without
// logits in memory; its gradient, slab by slab. jax_rnnt/tiles/joint/_gpu.py has the rest: lists, planes, products.
//
// B encoders with N sequences each, T frames, U1 columns, H units. Nodes are cut into blocks of R / 8 frames by 8
// columns, R rows. Classes have an order of their own (`Classes` in jax_rnnt/tiles/joint/_classes.py): those of other
// heads in the first 128, if there are any, then blanks, then all others, V' in all, a multiple of 128.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_kernels/common/shape.h"
#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

constexpr int kJointColumns = 8;    // columns of a block
constexpr int kJointClasses = 128;  // classes that a thread block multiplies at once
constexpr int kJointBytes = 128;    // bytes of the units of a class in a stage
// The module exports these numbers, and Python asks for them before it makes a call.
constexpr int kJointCapability = 8;           // the least compute capability
constexpr int64_t kMaxJointBlocks = 1 << 24;  // most blocks of a list

enum class Activation { kTanh, kRelu, kSilu, kGelu, kExactGelu };
constexpr const char* kActivations[] = {"tanh", "relu", "silu", "gelu", "exact_gelu"};
constexpr int kNumActivations = int(sizeof(kActivations) / sizeof(*kActivations));
static_assert(kNumActivations == int(Activation::kExactGelu) + 1);

// The numbers of rows that a block may have, for factors of so many bytes; the most first.
inline std::vector<int64_t> JointBlockRows(int size) {
  if (size == 2) return {128, 64, 32};
  return {64, 32};
}

struct JointShape {
  int64_t encoders, copies, frames, columns, units;  // B, N, T, U1, H
  int64_t classes;                                   // V'
  int64_t padded_units;                              // H': a class of W has a multiple of 128 bytes
  int64_t others, blanks;                            // classes of other heads; blanks of the softmax, or 1 to keep
  int64_t rows;                                      // R: 32, 64 or 128
  int64_t frame_bits, copy_bits, column_bits;        // bits of an entry of the list
  int64_t blocks;                                    // blocks of the list, at most
  int64_t slab;                                      // blocks of a slab
  Activation activation;
  bool exact;      // float32 as three products of TF32
  bool normalize;  // other heads have a softmax
  bool bernoulli;  // or the one is the logit of a blank
};

// The inputs of all kernels. `dtype` is the type of W; rows of encoder and predictor have theirs.
struct JointInputs {
  DType dtype, rows;
  const int32_t* list;        // [blocks]: encoder, block of frames, copy, block of columns, from the high bits down
  const int32_t* count;       // []: blocks of the list that count
  const int32_t* num_frames;  // [B N]
  const int32_t* num_labels;  // [B N]
  const int32_t* label;       // [B N, U1]: its class in this order; -1: none
  const void* encoder;        // [B, T, H]; frames from the sequence's number on are not read
  const void* predictor;      // [B N, U1, H]; columns after its number of labels are not read
};

// Planes [B N, T, U1]: logits of other heads, then of the first `blanks` classes of the softmax, its largest logit, the
// sum of exponentials relative to that, the logit of the label. Nodes outside the lengths are not written, nor those of
// blocks that are not listed; nor the last plane where there is no label.
struct JointForwardArgs {
  JointShape shape;
  JointInputs inputs;
  const void* weight;  // [V', H']
  const float* bias;   // [V']
  float* planes;       // [others + blanks + 3, B N, T, U1]
};

// Hidden units and gradient of logits of a slab, 0 in rows that do not count, and sums of the gradient over halves of
// the rows of a block. Numbers of a row: one for each other head; those to add at each blank, and at the label; the
// factor of exp(logit - base); base, -inf for the logit of the first class of the softmax.
struct JointGradientArgs {
  JointShape shape;
  JointInputs inputs;
  const void* weight;
  const float* bias;
  const float* numbers;  // [others + blanks' + 3, B N, T, U1]; blanks': those of `added_blanks`
  const float* bound;    // [B N]: limits the gradient of a logit
  const int32_t* slab;   // []: its number
  int64_t added_blanks;  // blanks of the softmax, which may be none where a class is kept
  void* hidden;          // [slab R, H']
  void* gradient;        // [slab R, V']
  float* of_bias;        // [slab, 2, V']
  int32_t* here;         // []: the number of the slab, for `JointSums`
};

// of_hidden, multiplied by the derivative of the activation, summed to the gradients of rows, and of_bias to that of
// the bias. Blocks with the same frames follow each other in the list, so a row of the encoder is written once, in the
// type of the rows, by the slab with its last block; `carry` has the sum of those before.
struct JointSumsArgs {
  JointShape shape;
  JointInputs inputs;
  const int32_t* slab;        // []
  const void* of_hidden;      // [slab R, H']
  const float* of_bias;       // [slab, 2, V']
  void* encoder_gradient;     // [B, T, H], as encoder; frames of no block are left as they are
  float* predictor_gradient;  // [B N, U1, H], added to
  float* bias_gradient;       // [V'], added to
  float* carry;               // [2, R / 8, H]: read by an even slab, and by an odd one
  int32_t* next;              // []: the number of the next slab; not the memory of `slab`
  bool* more;                 // []: whether there is one
};

// Bytes of shared memory of a thread block with so many rows of hidden units, each of so many bytes.
size_t JointSharedBytes(int64_t rows, int64_t row_bytes);

// Enqueue the work on the stream and return the error of the launch. Nothing runs on devices before compute capability
// `kJointCapability`.
cudaError_t JointForward(const JointForwardArgs& args, cudaStream_t stream);
cudaError_t JointGradient(const JointGradientArgs& args, cudaStream_t stream);
cudaError_t JointSums(const JointSumsArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
