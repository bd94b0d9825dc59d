// Steps of the searches on a GPU; jax_rnnt/decode/search/_kernels.py has them in plain JAX, and defines them.
#pragma once

#include <cstdint>

#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

// Greedy search: the best moves of each frame of a window [B, K], up to the first label or out of the window.
struct WalkArgs {
  int64_t batch, window, max_labels, labels_per_frame;
  bool token_first, reach;
  // [B, K]: of the best move
  const float* score;
  const int32_t *reads, *needs, *label;
  const float* log_prob;
  // [B]: the search before the step, and [B, L] its labels
  const int32_t *frame, *count_here, *counts, *reached;
  const float* total;
  const int32_t *labels, *frames, *durations;
  const float* log_probs;
  const int32_t *lengths, *first;
  // after it
  int32_t *frame_after, *count_here_after, *counts_after, *reached_after;
  float* total_after;
  int32_t *labels_after, *frames_after, *durations_after;
  float* log_probs_after;
  int32_t* written;  // [B]: the label of this step, or -1
  bool* going;       // []: whether an utterance goes on
};

cudaError_t Walk(const WalkArgs& args, cudaStream_t stream);

// Of the arrays of a beam [B, W, ...]: score and score of the best path; the others as in Python.
constexpr int kBeamFloats = 2;
enum BeamInt {
  kFrame,
  kCounts,
  kCountHere,
  kUnread,
  kSlot,
  kKey,
  kOtherKey,
  kBad,
  kActive,
  kRead,
  kTarget,
  kSteps,
  kReached,
  kFirst,
  kBeamInts
};
constexpr int kMaxWidth = 32, kMaxBeamNodes = 512, kMaxCandidates = 1024, kMaxMoves = 32, kWritten = 4;

// A move of a node.
struct BeamMove {
  int32_t frames, may_end;
};

// Beam search: the best of all moves of the hypotheses of an utterance, merged. N = W K nodes; B, M moves, k labels.
struct ChoiceArgs {
  int64_t batch;
  int32_t width, window, best_labels, room, blanks, labels;
  bool merge;
  BeamMove moves[kMaxMoves];
  const float* floats;     // [B, W, 2]
  const int32_t* ints;     // [B, W, 14]
  const int32_t* written;  // [B, W, 4, room + 1]
  const float* gains;      // [B, N, M + 1]: last, not 0 where a row is bad
  const float* best;       // [B, N, k]: descending
  const int32_t* places;   // [B, N, k]: their labels
  const float* sure;       // [B, N, k]: in the model alone
  const int32_t *lengths, *first;
  const float* threshold;  // [B]
  float* floats_after;     // these may be the arrays before
  int32_t *ints_after, *written_after;

  __host__ __device__ int32_t longest() const {
    int32_t most = 1;
    for (int32_t i = 0; i < blanks; ++i) most = moves[i].frames > most ? moves[i].frames : most;
    return most;
  }
  // Whether a move asks for more than the frame on which it begins.
  __host__ __device__ bool reaches() const {
    for (int32_t i = 0; i < blanks + labels; ++i)
      if (moves[i].frames + (moves[i].may_end == 0) > 1) return true;
    return false;
  }
  // Candidates of each hypothesis: it waits, or takes a blank, or an arc with a label.
  __host__ __device__ int32_t blank_kinds() const { return window == 1 ? blanks : longest(); }
  __host__ __device__ int32_t nodes_of_each() const { return window == 1 ? 1 : window + longest(); }
  __host__ __device__ int32_t candidates() const { return width * (1 + blank_kinds() + labels); }
};

// Rows of logits of the joint network: softmax over V classes with some blanks, softmax over D durations.
constexpr int kMaxHeads = 64;
struct JointRows {
  int64_t rows;
  int32_t classes, durations, blanks;  // V, D
  int32_t blank[kMaxHeads];
  int64_t parts;        // S
  const float* logits;  // [S, R, V + D], whose sum the logits are
  const float* bias;    // [V + D], to be added; or null
};

// Beam search: log-probabilities of blanks and durations, and the best labels in order.
struct RowsArgs {
  JointRows joint;
  int32_t best_labels;  // k
  float* heads;         // [R, blanks + D]; NaN where one of their logits is NaN or +inf
  float* best;          // [R, k]
  int32_t* places;      // [R, k]
  bool* bad;            // [R]: where a logit is NaN or +inf
};

cudaError_t Rows(const RowsArgs& args, cudaStream_t stream);

// A move of greedy search: which of the blanks, or -1 for a label, and which duration, or -1.
struct GreedyMove {
  int32_t blank, duration, frames, may_end;
};

// Greedy search: the best move out of each row, R = B K rows of windows of K frames. Blanks come first.
struct MovesArgs {
  JointRows joint;
  int64_t batch, window, labels_per_frame, max_labels;
  int32_t moves;
  bool token_first;
  GreedyMove move[kMaxMoves];
  const int32_t *frame, *count_here, *counts, *lengths, *ends;  // [B]; ends: not 0 where the utterance ends here
  float* score;                                                 // [B, K], as those of `WalkArgs`
  int32_t *reads, *needs, *label;
  float* log_prob;
};

cudaError_t Moves(const MovesArgs& args, cudaStream_t stream);

cudaError_t Choose(const ChoiceArgs& args, cudaStream_t stream);

}  // namespace jax_rnnt::cuda
