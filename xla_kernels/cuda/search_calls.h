// Custom calls of the searches, read into the structs of search.h. All sizes are those of the buffers.
#pragma once

#include "xla_kernels/common/call.h"
#include "xla_kernels/cuda/search.h"

namespace jax_rnnt::cuda {

inline ffi::Error Read(Call* call, WalkArgs* args) {
  const int64_t batch = call->Dimension(0, 1), window = call->Dimension(0, 0), labels = call->Dimension(10, 0);
  const int64_t nodes = Product({batch, window}), table = Product({batch, labels});
  if (window < 1) return Invalid("a window must have frames");
  args->batch = batch;
  args->window = window;
  args->max_labels = labels;
  args->labels_per_frame = call->Number("labels_per_frame");
  args->token_first = call->Number("token_first") != 0;
  args->reach = call->Number("reach") != 0;
  args->score = call->In<float>(nodes);
  args->reads = call->In<int32_t>(nodes);
  args->needs = call->In<int32_t>(nodes);
  args->label = call->In<int32_t>(nodes);
  args->log_prob = call->In<float>(nodes);
  args->frame = call->In<int32_t>(batch);
  args->count_here = call->In<int32_t>(batch);
  args->counts = call->In<int32_t>(batch);
  args->reached = call->In<int32_t>(batch);
  args->total = call->In<float>(batch);
  args->labels = call->In<int32_t>(table);
  args->frames = call->In<int32_t>(table);
  args->durations = call->In<int32_t>(table);
  args->log_probs = call->In<float>(table);
  args->lengths = call->In<int32_t>(batch);
  args->first = call->In<int32_t>(batch);
  args->frame_after = call->Out<int32_t>(batch);
  args->count_here_after = call->Out<int32_t>(batch);
  args->counts_after = call->Out<int32_t>(batch);
  args->reached_after = call->Out<int32_t>(batch);
  args->total_after = call->Out<float>(batch);
  args->labels_after = call->Out<int32_t>(table);
  args->frames_after = call->Out<int32_t>(table);
  args->durations_after = call->Out<int32_t>(table);
  args->log_probs_after = call->Out<float>(table);
  args->written = call->Out<int32_t>(batch);
  args->going = call->Out<bool>(1);
  return call->fit() ? ffi::Error::Success() : Invalid("arguments and results of a walk do not fit each other");
}

inline ffi::Error Read(Call* call, ChoiceArgs* args) {
  const auto frames = call->Numbers("frames"), may_end = call->Numbers("may_end");
  const int64_t window = call->Number("window"), blanks = call->Number("blanks"), moves = frames.size();
  const int64_t batch = call->Dimension(0, 2), width = call->Dimension(0, 1), room = call->Dimension(2, 0) - 1;
  const int64_t best = call->Dimension(4, 0), nodes = width * window;
  if (window < 1 || window > kMaxBeamNodes || width < 1 || width > kMaxWidth || nodes > kMaxBeamNodes || room < 1 ||
      best < 1)
    return Invalid("a beam has a wrong size");
  if (moves > kMaxMoves || may_end.size() != frames.size() || blanks < 1 || blanks >= moves)
    return Invalid("a beam has wrong moves");
  args->batch = batch;
  args->width = int32_t(width);
  args->window = int32_t(window);
  args->best_labels = int32_t(best);
  args->room = int32_t(room);
  args->blanks = int32_t(blanks);
  args->labels = int32_t(moves - blanks);
  args->merge = call->Number("merge") != 0;
  for (int64_t i = 0; i < moves; ++i) {
    if (frames[i] < (i < blanks) || frames[i] > INT32_MAX) return Invalid("a move has a wrong number of frames");
    args->moves[i] = {int32_t(frames[i]), int32_t(may_end[i])};
  }
  const int64_t of_each = Product({batch, width}), all = Product({batch, nodes}), table = of_each * 4 * (room + 1);
  args->floats = call->In<float>(of_each * kBeamFloats);
  args->ints = call->In<int32_t>(of_each * kBeamInts);
  args->written = call->In<int32_t>(table);
  args->gains = call->In<float>(all * (moves + 1));
  args->best = call->In<float>(all * best);
  args->places = call->In<int32_t>(all * best);
  args->sure = call->In<float>(all * best);
  args->lengths = call->In<int32_t>(batch);
  args->first = call->In<int32_t>(batch);
  args->threshold = call->In<float>(batch);
  args->floats_after = call->Out<float>(of_each * kBeamFloats);
  args->ints_after = call->Out<int32_t>(of_each * kBeamInts);
  args->written_after = call->Out<int32_t>(table);
  if (args->candidates() > kMaxCandidates) return Invalid("a beam has too many candidates");
  return call->fit() ? ffi::Error::Success() : Invalid("arguments and results of a choice do not fit each other");
}

// Parts [S, R, V + D] of logits, the first argument, as far as attributes tell: false if they have a wrong size.
inline bool ReadRows(Call* call, JointRows* joint) {
  const auto blanks = call->Numbers("blanks");
  const int64_t durations = call->Number("durations");
  const int64_t rows = call->Dimension(0, 1), outputs = call->Dimension(0, 0), classes = outputs - durations;
  const int64_t heads = int64_t(blanks.size()) + durations, parts = call->Dimension(0, 2);
  if (parts < 1 || durations < 0 || classes < 1 || outputs > INT32_MAX || heads > kMaxHeads || rows > INT32_MAX)
    return false;
  joint->rows = rows;
  joint->parts = parts;
  joint->classes = int32_t(classes);
  joint->durations = int32_t(durations);
  joint->blanks = int32_t(blanks.size());
  for (size_t i = 0; i < blanks.size(); ++i) {
    if (blanks[i] < 0 || blanks[i] >= classes) return false;
    joint->blank[i] = int32_t(blanks[i]);
  }
  joint->logits = call->In<float>(Product({parts, rows, outputs}));
  return true;
}

// The bias is the last argument, and may be missing.
inline void ReadBias(Call* call, JointRows* joint) {
  joint->bias = call->more() ? call->In<float>(joint->classes + joint->durations) : nullptr;
}

inline ffi::Error Read(Call* call, RowsArgs* args) {
  const int64_t best = call->Number("best");
  if (!ReadRows(call, &args->joint) || best < 1 || best > args->joint.classes)
    return Invalid("rows of a joint network have wrong sizes");
  ReadBias(call, &args->joint);
  const int64_t rows = args->joint.rows;
  args->best_labels = int32_t(best);
  args->heads = call->Out<float>(rows * (args->joint.blanks + args->joint.durations));
  args->best = call->Out<float>(rows * best);
  args->places = call->Out<int32_t>(rows * best);
  args->bad = call->Out<bool>(rows);
  return call->fit() ? ffi::Error::Success() : Invalid("arguments and results of rows do not fit each other");
}

// Attributes have one number of each move: `GreedyMove`.
inline ffi::Error Read(Call* call, MovesArgs* args) {
  const auto tokens = call->Numbers("tokens"), durations = call->Numbers("of_durations");
  const auto frames = call->Numbers("frames"), may_end = call->Numbers("may_end");
  const int64_t window = call->Number("window");
  const size_t moves = frames.size();
  if (!ReadRows(call, &args->joint) || window < 1 || args->joint.rows % window != 0)
    return Invalid("rows of a joint network have wrong sizes");
  if (moves < 1 || moves > size_t(kMaxMoves) || tokens.size() != moves || durations.size() != moves ||
      may_end.size() != moves)
    return Invalid("greedy search has wrong moves");
  for (size_t i = 0; i < moves; ++i) {
    if (tokens[i] < -1 || tokens[i] >= args->joint.blanks || durations[i] < -1 ||
        durations[i] >= args->joint.durations || frames[i] < 0 || frames[i] > INT32_MAX)
      return Invalid("greedy search has a wrong move");
    args->move[i] = {int32_t(tokens[i]), int32_t(durations[i]), int32_t(frames[i]), int32_t(may_end[i])};
  }
  const int64_t rows = args->joint.rows, batch = rows / window;
  args->batch = batch;
  args->window = window;
  args->labels_per_frame = call->Number("labels_per_frame");
  args->max_labels = call->Number("max_labels");
  args->moves = int32_t(moves);
  args->token_first = call->Number("token_first") != 0;
  args->frame = call->In<int32_t>(batch);
  args->count_here = call->In<int32_t>(batch);
  args->counts = call->In<int32_t>(batch);
  args->lengths = call->In<int32_t>(batch);
  args->ends = call->In<int32_t>(batch);
  ReadBias(call, &args->joint);
  args->score = call->Out<float>(rows);
  args->reads = call->Out<int32_t>(rows);
  args->needs = call->Out<int32_t>(rows);
  args->label = call->Out<int32_t>(rows);
  args->log_prob = call->Out<float>(rows);
  return call->fit() ? ffi::Error::Success() : Invalid("arguments and results of moves do not fit each other");
}

}  // namespace jax_rnnt::cuda
