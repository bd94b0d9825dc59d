// Shapes and arguments of the two stages: plain structs of raw pointers, free of any framework header.
//
// Legend: B sequences, T frames, U1 = (labels + 1) columns, V classes, K blank classes, D durations. Node (t, u): t
// frames read, u labels written. Every plane is row-major [B, T, U1]; "A" is the accumulation type, double for float64
// logits and float for all others.
#pragma once

#include <cstdint>

#include "xla_kernels/common/rounding.h"  // here, since all kernels include this file

namespace jax_rnnt {

// Values of the label map, beside the classes 0 <= label < V.
constexpr int32_t kNoLabel = -1;  // no label arc leaves this node (the last column of a sequence)
constexpr int32_t kOutside = -2;  // the node lies outside the sequence; its row of logits is never read

constexpr int kMaxBlanks = 63;        // most blank classes of one emission
constexpr int kMaxDurations = 63;     // most durations of one emission
constexpr int64_t kMaxRow = 1 << 26;  // most logits of one row

enum class DType { kF16, kBF16, kF32, kF64 };

// f of a value of that type.
template <class Half, class BFloat16, class Function>
auto ForType(DType dtype, Function f) {
  switch (dtype) {
    case DType::kF16:
      return f(Half{});
    case DType::kBF16:
      return f(BFloat16{});
    case DType::kF32:
      return f(float{});
    default:
      return f(double{});
  }
}

// A row of logits has one or two heads: V classes, and behind them D durations with a softmax of their own.
struct EmissionShape {
  int64_t batch, frames, columns, classes;  // B, T, U1, V
  int64_t durations;                        // D, 0 <= D <= kMaxDurations
  int64_t label_frames;                     // extent of the label map's frame axis: 1 (same labels in all frames) or T
  bool normalize;                           // log-softmax of each head; false: the input already is log-probabilities
  bool bernoulli;                           // the only blank has a sigmoid of its own, outside the softmax; see below
  int num_blanks;                           // K, 1 <= K <= kMaxBlanks; 1 where bernoulli
  const int64_t* blanks;                    // [K], 0 <= blank < V

  int64_t row_size() const { return classes + durations; }
};

// Logits -> log-probabilities of the arcs that leave each node. With lse the log-sum-exp of the classes,
//   log_blank_i = x[blank_i] - lse      log_label = x[label] - lse      log_duration_i = x[V + i] - lse of durations
// With a Bernoulli blank, lse leaves out its logit z = x[blank], and
//   log_blank = log sigmoid(z)          log_label = log sigmoid(-z) + x[label] - lse, or log_blank if label == blank
//
// The backward pass computes the softmax again from norm. A rounded lse is off by 5e-4 at 1e4. So norm is the sum over
// the classes of exp(x - x[anchor]), times 2^-124 (double: 2^-400): an offset common to all logits cancels. The anchor
// is the first blank (Bernoulli: class 0, or 1 if the blank is 0). If it is more than 45 below the largest logit, norm
// is lse: 0 where that is -inf, and -2^-32 (double: -2^-200) where it is smaller in size. Scaled sums are positive and
// below that limit, so a reader can tell the two apart. norm is NaN where the planes are NaN.
template <class A>
constexpr A kReach = A(45);  // the sum of 2^26 exponentials relative to such an anchor is below 2^92
template <class A>
constexpr A kSumScale = sizeof(A) == 4 ? A(0x1p-124) : A(0x1p-400);
template <class A>
constexpr A kTiny = sizeof(A) == 4 ? A(0x1p-32) : A(0x1p-200);

struct EmissionForwardArgs {
  EmissionShape shape;
  const void* logits;         // [B, T, U1, V + D]
  const int32_t* label;       // [B, label_frames, U1]
  const int32_t* num_frames;  // [B]; rows t >= num_frames[b] are outside
  void* const* log_blank;     // K planes of A
  void* log_label;            // plane of A
  void* const* log_duration;  // D planes of A
  void* norm;                 // plane of A; 0 outside the lengths and where normalize is false
};

// Cotangents c of the planes -> gradient of the logits. Arc a of a row has the class k_a, the log-probability
// l_a = z[k_a] - lse(z), and the cotangent c_a = dL/dl_a. Since lse has the derivative softmax_k by z_k,
//   dL/dz_k = sum_a c_a ([k == k_a] - softmax_k) = (sum over a with k_a == k of c_a) - softmax_k * (sum of all c_a)
// The lattice gives c_a = -gamma_a, minus the posterior of the arc: this is the gradient of docs/gradient.md. So a
// class without an arc costs one exp and one product, and no array of log-probabilities exists. FastEmit's 1 + lambda,
// and the penalties' derivatives, are factors of c that the caller has multiplied in.
//
// dL/dz is of each sequence's own loss; `clamp` limits it there. `scale` comes after: it is the cotangent of that loss,
// with the weight of the reduction, so neither the batch nor what follows the loss moves the limit.
//
//   unit_k       = c_blank_i [k == blank_i] (summed over i) + c_label [k == label] - softmax_k * (sum of these c's)
//   unit_(V + i) = c_duration_i - duration_softmax_i * (sum of the c_duration's)
//   dlogits      = scale[b] * clip(unit, -clamp[b], clamp[b])          (clamp[b] <= 0: no clipping; 0 stays 0)
// If normalize is false, the softmax terms are missing. With a Bernoulli blank, softmax_k multiplies c_label alone (0
// if label == blank), and
//   unit_blank   = c_blank sigmoid(-z) - c_label sigmoid(z), or (c_blank + c_label) sigmoid(-z) if label == blank
//
// Where a row is split over devices, its softmax is a share of all classes' softmax. Then `total` is that share times
// the sum of all cotangents of the node: softmax_k multiplies it in place of the sum of these c's, and the softmax of
// the durations is missing. Not with a Bernoulli blank.
struct EmissionBackwardArgs {
  EmissionShape shape;
  const void* logits;              // [B, T, U1, V + D]; may be the same memory as dlogits
  const int32_t* label;            // [B, label_frames, U1]
  const int32_t* num_frames;       // [B]
  const void* norm;                // plane of A
  const void* const* ct_blank;     // K planes of A
  const void* ct_label;            // plane of A
  const void* const* ct_duration;  // D planes of A
  const void* scale;               // [B] of A
  const void* clamp;               // [B] of A
  void* dlogits;                   // [B, T, U1, V + D]
  const void* total = nullptr;     // plane of A, or none
};

// The arcs that leave a node (t, u): arc k leads to (t + dt[k], u + du[k]). Every arc moves; du is 0 or 1. Its
// log-probability is the entry of one plane, or the sum of two.
constexpr int kMaxArcs = 64;          // most arcs, and most planes
constexpr int64_t kMaxArcLabels = 1;  // most labels that an arc writes
struct Topology {
  int num_arcs, num_planes;
  const int64_t *dt, *du;
  const int64_t* may_end;        // whether the arc may enter the terminal node (T_b, U_b)
  const int64_t *plane, *other;  // other[k] < 0: none
};

// Whether the kernels for unit steps apply: two arcs, blank (1, 0) and label (0, 1) or, monotonic, (1, 1).
inline bool IsUnitStep(const Topology& topology) {
  const auto is = [&](int k, int64_t dt, int64_t du) {
    return topology.dt[k] == dt && topology.du[k] == du && topology.may_end[k] != 0 && topology.plane[k] == k &&
           topology.other[k] < 0;
  };
  return topology.num_arcs == 2 && topology.num_planes == 2 && is(0, 1, 0) && (is(1, 0, 1) || is(1, 1, 1));
}
inline bool IsMonotonic(const Topology& topology) { return topology.dt[1] == 1; }

// Arc log-probabilities -> loss and its gradient: minus the sum of the posteriors of a plane's arcs.
struct LatticeArgs {
  Topology topology;
  int64_t batch, frames, columns;  // B, T, U1
  const void* const* log_plane;    // planes of A
  const int32_t* num_frames;       // [B], clamped to [0, T] by the kernel
  const int32_t* num_labels;       // [B], clamped to [0, U1 - 1] by the kernel
  void* loss;                      // [B] of A
  void* const* grad_plane;         // planes of A; may be the same memory as log_plane. Null: no gradient
  void* workspace;                 // [B, Workspace::Elements(...)] of A
};

}  // namespace jax_rnnt
