// Shapes and arguments of the two stages: plain structs of raw pointers, free of any framework header.
//
// Legend: B sequences, T frames, U1 = (labels + 1) columns, V classes, K blank classes. Node (t, u): t frames read, u
// labels written. Every plane is row-major [B, T, U1]; "A" is the accumulation type, double for float64 logits and
// float for all others.
#pragma once

#include <cstdint>

namespace jax_rnnt {

// Values of the label map, beside the classes 0 <= label < V.
constexpr int32_t kNoLabel = -1;  // no label arc leaves this node (the last column of a sequence)
constexpr int32_t kOutside = -2;  // the node lies outside the sequence: its row of logits is never read

constexpr int kMaxBlanks = 63;  // most blank classes of one emission

enum class DType { kF16, kBF16, kF32, kF64 };

struct EmissionShape {
  int64_t batch, frames, columns, classes;  // B, T, U1, V
  int64_t label_frames;                     // extent of the label map's frame axis: 1 (same labels in all frames) or T
  bool normalize;                           // log-softmax over V; false: the input already is log-probabilities
  int num_blanks;                           // K, 1 <= K <= kMaxBlanks
  const int64_t* blanks;                    // [K], 0 <= blank < V
};

// logits -> log-probability of the arcs that leave each node.
struct EmissionForwardArgs {
  EmissionShape shape;
  const void* logits;         // [B, T, U1, V]
  const int32_t* label;       // [B, label_frames, U1]
  const int32_t* num_frames;  // [B]; rows t >= num_frames[b] are outside
  void* const* log_blank;     // K planes of A
  void* log_label;            // plane of A
  void* lse;                  // plane of A: log-sum-exp of the row (0 where normalize is false)
};

// Cotangents of the arcs -> gradient of the logits:
//   unit  = c_k [k == blank_i] (summed over i) + c_label [k == label] - softmax_k * (sum of the c's)
//   dlogits = scale[b] * clip(unit, -clamp[b], clamp[b])          (clamp[b] <= 0: no clipping)
// without the softmax term where normalize is false.
struct EmissionBackwardArgs {
  EmissionShape shape;
  const void* logits;           // [B, T, U1, V]; may be the same memory as dlogits
  const int32_t* label;         // [B, label_frames, U1]
  const int32_t* num_frames;    // [B]
  const void* lse;              // plane of A
  const void* const* ct_blank;  // K planes of A
  const void* ct_label;         // plane of A
  const void* scale;            // [B] of A
  const void* clamp;            // [B] of A
  void* dlogits;                // [B, T, U1, V]
};

enum class Topology { kStandard, kMonotonic };  // label arc (0, 1) | label arc (1, 1)

// Arc log-probabilities -> loss and its gradient (minus the arc posteriors).
struct LatticeArgs {
  Topology topology;
  int64_t batch, frames, columns;  // B, T, U1
  const void* log_blank;           // plane of A
  const void* log_label;           // plane of A
  const int32_t* num_frames;       // [B], clamped to [0, T] by the kernel
  const int32_t* num_labels;       // [B], clamped to [0, U1 - 1] by the kernel
  void* loss;                      // [B] of A
  void* grad_blank;                // plane of A; may be the same memory as log_blank. Null: loss only
  void* grad_label;                // plane of A; may be the same memory as log_label. Null: loss only
  void* workspace;                 // [B, LatticeWorkspace(...)] of A; null for loss only
};

}  // namespace jax_rnnt
