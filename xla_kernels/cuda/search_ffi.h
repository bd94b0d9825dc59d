// XLA custom-call handlers of the searches. All sizes are those of the buffers.
#pragma once

#include <string>
#include <vector>

#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/cuda/search.h"

namespace jax_rnnt {

// Buffers one after another, each checked for its type and number of elements.
class Buffers {
 public:
  Buffers(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results)
      : arguments_(arguments), results_(results) {}

  template <class T>
  const T* In(int64_t elements) {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(in_++);
    return buffer.has_value() && Check<T>(*buffer, elements) ? static_cast<const T*>(buffer->untyped_data()) : nullptr;
  }
  template <class T>
  T* Out(int64_t elements) {
    auto buffer = results_.get<ffi::AnyBuffer>(out_++);  // const has no * in jaxlib 0.6
    return buffer.has_value() && Check<T>(**buffer, elements) ? static_cast<T*>((*buffer)->untyped_data()) : nullptr;
  }
  // The dimension of an argument from the end, 0 if there is none.
  int64_t Dimension(size_t argument, size_t from_end) {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(argument);
    if (!buffer.has_value()) return fits_ = false;
    const auto dimensions = buffer->dimensions();
    return dimensions.size() <= from_end ? (fits_ = false) : dimensions[dimensions.size() - 1 - from_end];
  }
  bool more() const { return in_ < arguments_.size(); }
  bool fit() const { return fits_ && in_ == arguments_.size() && out_ == results_.size(); }

 private:
  template <class T>
  static constexpr ffi::DataType kType = std::is_same_v<T, float>  ? ffi::DataType::F32
                                         : std::is_same_v<T, bool> ? ffi::DataType::PRED
                                                                   : ffi::DataType::S32;
  template <class T>
  bool Check(const ffi::AnyBuffer& buffer, int64_t elements) {
    const bool fits = Holds(buffer, kType<T>, elements);
    fits_ = fits_ && fits;
    return fits;
  }

  const ffi::RemainingArgs& arguments_;
  const ffi::RemainingRets& results_;
  size_t in_ = 0, out_ = 0;
  bool fits_ = true;
};

inline ffi::Error Read(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results, int64_t labels_per_frame,
                       int64_t token_first, int64_t reach, cuda::WalkArgs* args) {
  Buffers buffers(arguments, results);
  const int64_t batch = buffers.Dimension(0, 1), window = buffers.Dimension(0, 0), labels = buffers.Dimension(10, 0);
  const int64_t nodes = Product({batch, window}), table = Product({batch, labels});
  if (window < 1) return Invalid("a window must have frames");
  args->batch = batch;
  args->window = window;
  args->max_labels = labels;
  args->labels_per_frame = labels_per_frame;
  args->token_first = token_first != 0;
  args->reach = reach != 0;
  args->score = buffers.In<float>(nodes);
  args->reads = buffers.In<int32_t>(nodes);
  args->needs = buffers.In<int32_t>(nodes);
  args->label = buffers.In<int32_t>(nodes);
  args->log_prob = buffers.In<float>(nodes);
  args->frame = buffers.In<int32_t>(batch);
  args->count_here = buffers.In<int32_t>(batch);
  args->counts = buffers.In<int32_t>(batch);
  args->reached = buffers.In<int32_t>(batch);
  args->total = buffers.In<float>(batch);
  args->labels = buffers.In<int32_t>(table);
  args->frames = buffers.In<int32_t>(table);
  args->durations = buffers.In<int32_t>(table);
  args->log_probs = buffers.In<float>(table);
  args->lengths = buffers.In<int32_t>(batch);
  args->first = buffers.In<int32_t>(batch);
  args->frame_after = buffers.Out<int32_t>(batch);
  args->count_here_after = buffers.Out<int32_t>(batch);
  args->counts_after = buffers.Out<int32_t>(batch);
  args->reached_after = buffers.Out<int32_t>(batch);
  args->total_after = buffers.Out<float>(batch);
  args->labels_after = buffers.Out<int32_t>(table);
  args->frames_after = buffers.Out<int32_t>(table);
  args->durations_after = buffers.Out<int32_t>(table);
  args->log_probs_after = buffers.Out<float>(table);
  args->written = buffers.Out<int32_t>(batch);
  args->going = buffers.Out<bool>(1);
  return buffers.fit() ? ffi::Error::Success() : Invalid("arguments and results of a walk do not fit each other");
}

// The attributes of a choice: frames of moves and whether an utterance may end with them, blanks first.
struct ChoiceKind {
  int64_t window, merge, blanks;
  ffi::Span<const int64_t> frames, may_end;
};

inline ffi::Error Read(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results, const ChoiceKind& kind,
                       cuda::ChoiceArgs* args) {
  Buffers buffers(arguments, results);
  const int64_t batch = buffers.Dimension(0, 2), width = buffers.Dimension(0, 1), room = buffers.Dimension(2, 0) - 1;
  const int64_t best = buffers.Dimension(4, 0), moves = kind.frames.size(), nodes = width * kind.window;
  if (kind.window < 1 || width < 1 || width > cuda::kMaxWidth || nodes > cuda::kMaxBeamNodes || room < 1 || best < 1)
    return Invalid("a beam has a wrong size");
  if (moves > cuda::kMaxMoves || kind.may_end.size() != kind.frames.size() || kind.blanks < 1 || kind.blanks >= moves)
    return Invalid("a beam has wrong moves");
  args->batch = batch;
  args->width = int32_t(width);
  args->window = int32_t(kind.window);
  args->best_labels = int32_t(best);
  args->room = int32_t(room);
  args->blanks = int32_t(kind.blanks);
  args->labels = int32_t(moves - kind.blanks);
  args->merge = kind.merge != 0;
  for (int64_t i = 0; i < moves; ++i) {
    const int64_t frames = kind.frames.begin()[i];
    if (frames < (i < kind.blanks) || frames > INT32_MAX) return Invalid("a move has a wrong number of frames");
    args->moves[i] = {int32_t(frames), int32_t(kind.may_end.begin()[i])};
  }
  const int64_t of_each = Product({batch, width}), all = Product({batch, nodes}), table = of_each * 4 * (room + 1);
  args->floats = buffers.In<float>(of_each * cuda::kBeamFloats);
  args->ints = buffers.In<int32_t>(of_each * cuda::kBeamInts);
  args->written = buffers.In<int32_t>(table);
  args->gains = buffers.In<float>(all * (moves + 1));
  args->best = buffers.In<float>(all * best);
  args->places = buffers.In<int32_t>(all * best);
  args->sure = buffers.In<float>(all * best);
  args->lengths = buffers.In<int32_t>(batch);
  args->first = buffers.In<int32_t>(batch);
  args->threshold = buffers.In<float>(batch);
  args->floats_after = buffers.Out<float>(of_each * cuda::kBeamFloats);
  args->ints_after = buffers.Out<int32_t>(of_each * cuda::kBeamInts);
  args->written_after = buffers.Out<int32_t>(table);
  if (args->candidates() > cuda::kMaxCandidates) return Invalid("a beam has too many candidates");
  return buffers.fit() ? ffi::Error::Success() : Invalid("arguments and results of a choice do not fit each other");
}

// Parts [S, R, V + D] of logits, the first argument, as far as attributes tell: false if they have a wrong size.
inline bool ReadRows(Buffers* buffers, ffi::Span<const int64_t> blanks, int64_t durations, cuda::JointRows* joint) {
  const int64_t rows = buffers->Dimension(0, 1), outputs = buffers->Dimension(0, 0), classes = outputs - durations;
  const int64_t heads = int64_t(blanks.size()) + durations, parts = buffers->Dimension(0, 2);
  if (parts < 1 || durations < 0 || classes < 1 || outputs > INT32_MAX || heads > cuda::kMaxHeads || rows > INT32_MAX)
    return false;
  joint->rows = rows;
  joint->parts = parts;
  joint->classes = int32_t(classes);
  joint->durations = int32_t(durations);
  joint->blanks = int32_t(blanks.size());
  for (size_t i = 0; i < blanks.size(); ++i) {
    if (blanks.begin()[i] < 0 || blanks.begin()[i] >= classes) return false;
    joint->blank[i] = int32_t(blanks.begin()[i]);
  }
  joint->logits = buffers->In<float>(Product({parts, rows, outputs}));
  return true;
}

// The bias is the last argument, and may be missing.
inline void ReadBias(Buffers* buffers, cuda::JointRows* joint) {
  joint->bias = buffers->more() ? buffers->In<float>(joint->classes + joint->durations) : nullptr;
}

inline ffi::Error Read(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results,
                       ffi::Span<const int64_t> blanks, int64_t durations, int64_t best, cuda::RowsArgs* args) {
  Buffers buffers(arguments, results);
  const bool right = ReadRows(&buffers, blanks, durations, &args->joint);
  if (!right || best < 1 || best > args->joint.classes) return Invalid("rows of a joint network have wrong sizes");
  ReadBias(&buffers, &args->joint);
  const int64_t rows = args->joint.rows;
  args->best_labels = int32_t(best);
  args->heads = buffers.Out<float>(rows * (args->joint.blanks + durations));
  args->best = buffers.Out<float>(rows * best);
  args->places = buffers.Out<int32_t>(rows * best);
  args->bad = buffers.Out<bool>(rows);
  return buffers.fit() ? ffi::Error::Success() : Invalid("arguments and results of rows do not fit each other");
}

// The attributes of the moves of greedy search, one number of each move: `cuda::GreedyMove`.
struct MovesKind {
  ffi::Span<const int64_t> blanks;
  int64_t durations;
  ffi::Span<const int64_t> tokens, of_durations, frames, may_end;
  int64_t window, labels_per_frame, max_labels, token_first;
};

inline ffi::Error Read(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results, const MovesKind& kind,
                       cuda::MovesArgs* args) {
  Buffers buffers(arguments, results);
  const size_t moves = kind.frames.size();
  if (!ReadRows(&buffers, kind.blanks, kind.durations, &args->joint) || kind.window < 1 ||
      args->joint.rows % kind.window != 0)
    return Invalid("rows of a joint network have wrong sizes");
  if (moves < 1 || moves > size_t(cuda::kMaxMoves) || kind.tokens.size() != moves ||
      kind.of_durations.size() != moves || kind.may_end.size() != moves)
    return Invalid("greedy search has wrong moves");
  for (size_t i = 0; i < moves; ++i) {
    const int64_t blank = kind.tokens.begin()[i], duration = kind.of_durations.begin()[i];
    const int64_t frames = kind.frames.begin()[i];
    if (blank < -1 || blank >= args->joint.blanks || duration < -1 || duration >= kind.durations || frames < 0 ||
        frames > INT32_MAX)
      return Invalid("greedy search has a wrong move");
    args->move[i] = {int32_t(blank), int32_t(duration), int32_t(frames), int32_t(kind.may_end.begin()[i])};
  }
  const int64_t rows = args->joint.rows, batch = rows / kind.window;
  args->batch = batch;
  args->window = kind.window;
  args->labels_per_frame = kind.labels_per_frame;
  args->max_labels = kind.max_labels;
  args->moves = int32_t(moves);
  args->token_first = kind.token_first != 0;
  args->frame = buffers.In<int32_t>(batch);
  args->count_here = buffers.In<int32_t>(batch);
  args->counts = buffers.In<int32_t>(batch);
  args->lengths = buffers.In<int32_t>(batch);
  args->ends = buffers.In<int32_t>(batch);
  ReadBias(&buffers, &args->joint);
  args->score = buffers.Out<float>(rows);
  args->reads = buffers.Out<int32_t>(rows);
  args->needs = buffers.Out<int32_t>(rows);
  args->label = buffers.Out<int32_t>(rows);
  args->log_prob = buffers.Out<float>(rows);
  return buffers.fit() ? ffi::Error::Success() : Invalid("arguments and results of moves do not fit each other");
}

template <class Context>
auto BindMoves() {
  using Numbers = ffi::Span<const int64_t>;
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<Numbers>("blanks")
      .template Attr<int64_t>("durations")
      .template Attr<Numbers>("tokens")
      .template Attr<Numbers>("of_durations")
      .template Attr<Numbers>("frames")
      .template Attr<Numbers>("may_end")
      .template Attr<int64_t>("window")
      .template Attr<int64_t>("labels_per_frame")
      .template Attr<int64_t>("max_labels")
      .template Attr<int64_t>("token_first");
}

template <class Context>
auto BindRows() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<ffi::Span<const int64_t>>("blanks")
      .template Attr<int64_t>("durations")
      .template Attr<int64_t>("best");
}

template <class Context>
auto BindChoice() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("window")
      .template Attr<int64_t>("merge")
      .template Attr<int64_t>("blanks")
      .template Attr<ffi::Span<const int64_t>>("frames")
      .template Attr<ffi::Span<const int64_t>>("may_end");
}

template <class Context>
auto BindWalk() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("labels_per_frame")
      .template Attr<int64_t>("token_first")
      .template Attr<int64_t>("reach");
}

}  // namespace jax_rnnt
