// Steps of the searches: what XLA would split into kernels that take longer to launch than to run.
//
// Sums and comparisons are those of the plain programs, in their order, so results are the same to the bit.
#include "xla_kernels/cuda/search.h"

namespace jax_rnnt::cuda {
namespace {

constexpr int kWalkThreads = 256;

template <class T>
__device__ __forceinline__ void CopyRow(const T* from, T* to, int64_t size) {
  if (from == to) return;
  for (int64_t i = 0; i < size; ++i) to[i] = from[i];
}

// A thread walks for an utterance. One block has them all, so that it knows whether any goes on.
__global__ void __launch_bounds__(kWalkThreads, 1) WalkKernel(const __grid_constant__ WalkArgs args) {
  JAX_RNNT_AT_MOST(kWalkThreads);
  bool any = false;
  for (int64_t b = threadIdx.x; b < args.batch; b += blockDim.x) {
    const int32_t begin = args.frame[b], length = args.lengths[b];
    const float* log_prob = args.log_prob + b * args.window;
    int32_t ahead = 0, at = 0, reads = 0, label = -1, reached = args.reached[b];
    float total = args.total[b], sure = log_prob[0];
    for (int32_t k = 0; k < args.window; ++k) {
      if (ahead != k || label >= 0 || begin + k >= length) continue;
      const int64_t i = b * args.window + k;
      if (args.reach) reached = begin + k + args.needs[i];
      total = total + args.score[i];
      label = args.label[i];
      sure = log_prob[k];
      at = k;
      reads = args.reads[i];
      ahead = k + reads;
    }
    const bool writes = label >= 0, going = begin < length;
    const int32_t before = at == 0 ? args.count_here[b] : 0;
    int32_t frame = begin + ahead, here = writes && reads == 0 ? before + 1 : going ? 0 : args.count_here[b];
    if (args.token_first && here >= args.labels_per_frame) {
      ++frame;
      here = 0;
    }
    const int64_t row = b * args.max_labels;
    const int32_t count = args.counts[b];
    CopyRow(args.labels + row, args.labels_after + row, args.max_labels);
    CopyRow(args.frames + row, args.frames_after + row, args.max_labels);
    CopyRow(args.durations + row, args.durations_after + row, args.max_labels);
    CopyRow(args.log_probs + row, args.log_probs_after + row, args.max_labels);
    if (writes && count >= 0 && count < args.max_labels) {
      args.labels_after[row + count] = label;
      args.frames_after[row + count] = args.first[b] + begin + at;
      args.durations_after[row + count] = reads;
      args.log_probs_after[row + count] = sure;
    }
    args.frame_after[b] = frame;
    args.count_here_after[b] = here;
    args.counts_after[b] = count + writes;
    args.reached_after[b] = reached;
    args.total_after[b] = total;
    args.written[b] = label;
    any |= frame < length;
  }
  const bool going = __syncthreads_or(any) != 0;
  if (threadIdx.x == 0) *args.going = going;
}

// ---- rows of a joint network ----

constexpr int kRowThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;

// The maximum over the block. `parts` has a float for each warp.
__device__ float BlockMax(float x, float* parts) {
  for (int step = 16; step > 0; step /= 2) x = Max(x, __shfl_xor_sync(kAllLanes, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < kRowThreads / 32; ++i) x = Max(x, parts[i]);
  return x;
}
__device__ float BlockSum(float x, float* parts) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[0];
  for (int i = 1; i < kRowThreads / 32; ++i) x += parts[i];
  return x;
}

__device__ __forceinline__ bool Above(float x, int32_t i, float y, int32_t j) { return x > y || (x == y && i < j); }

// What all threads of a block know of its row.
struct Row {
  const float *x, *bias;
  int64_t parts, size;  // from part to part
  float peak, log_total;
  bool bad, dead;  // a logit of a class is NaN or +inf; all are -inf

  __device__ float Logit(int32_t i) const {
    float sum = x[i];
    for (int64_t k = 1; k < parts; ++k) sum += x[k * size + i];
    return bias != nullptr ? sum + bias[i] : sum;
  }
  __device__ float LogProbability(float logit) const { return dead ? -INFINITY : logit - peak - log_total; }
};

// A block reads its row.
__device__ Row ReadRow(const JointRows& joint, float* parts) {
  const int64_t outputs = joint.classes + joint.durations;
  Row row{
      joint.logits + blockIdx.x * outputs, joint.bias, joint.parts, joint.rows * outputs, -INFINITY, 0, false, false};
  for (int32_t i = threadIdx.x; i < joint.classes; i += kRowThreads) {
    const float logit = row.Logit(i);
    row.bad |= !(logit < INFINITY);
    row.peak = Max(row.peak, logit);
  }
  row.bad = __syncthreads_or(row.bad) != 0;
  row.peak = BlockMax(row.peak, parts);
  row.dead = row.peak == -INFINITY;
  float total = 0;
  for (int32_t i = threadIdx.x; i < joint.classes && !row.dead && !row.bad; i += kRowThreads) {
    total += expf(row.Logit(i) - row.peak);
  }
  total = BlockSum(total, parts);
  row.log_total = row.dead ? 0.f : logf(total);
  return row;
}

// Log-probabilities of the durations of a row; returns whether one of their logits is NaN or +inf.
__device__ bool ReadDurations(const JointRows& joint, const Row& row, float* log_probs) {
  float most = -INFINITY, sum = 0;
  bool wrong = false;
  for (int32_t i = 0; i < joint.durations; ++i) {
    log_probs[i] = row.Logit(joint.classes + i);
    wrong |= !(log_probs[i] < INFINITY);
    most = Max(most, log_probs[i]);
  }
  const bool none = most == -INFINITY;
  for (int32_t i = 0; i < joint.durations && !none && !wrong; ++i) sum += expf(log_probs[i] - most);
  for (int32_t i = 0; i < joint.durations; ++i) {
    log_probs[i] = wrong ? NAN : none ? -INFINITY : log_probs[i] - most - logf(sum);
  }
  return wrong;
}

__device__ __forceinline__ bool IsBlank(const JointRows& joint, int32_t i) {
  bool blank = false;
  for (int32_t j = 0; j < joint.blanks; ++j) blank |= joint.blank[j] == i;
  return blank;
}

// The best of the pairs of all threads, of equal ones the first.
__device__ void BlockBest(float* y, int32_t* place, float* parts, int32_t* places) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, *y, step);
    const int32_t other_place = __shfl_xor_sync(kAllLanes, *place, step);
    if (Above(other, other_place, *y, *place)) {
      *y = other;
      *place = other_place;
    }
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    parts[threadIdx.x / 32] = *y;
    places[threadIdx.x / 32] = *place;
  }
  __syncthreads();
  *y = parts[0];
  *place = places[0];
  for (int i = 1; i < kRowThreads / 32; ++i) {
    if (Above(parts[i], places[i], *y, *place)) {
      *y = parts[i];
      *place = places[i];
    }
  }
}

// A block takes a row.
__global__ void __launch_bounds__(kRowThreads, 2) RowsKernel(const __grid_constant__ RowsArgs args) {
  JAX_RNNT_AT_MOST(kRowThreads);
  JAX_RNNT_SHARED_ARRAY(float, parts, kRowThreads / 32);
  JAX_RNNT_SHARED_ARRAY(int32_t, places, kRowThreads / 32);
  const JointRows& joint = args.joint;
  const int64_t number = blockIdx.x;
  const Row row = ReadRow(joint, parts);
  if (threadIdx.x == 0) {
    float* const heads = args.heads + number * (joint.blanks + joint.durations);
    for (int32_t i = 0; i < joint.blanks; ++i) {
      heads[i] = row.bad ? NAN : row.LogProbability(row.Logit(joint.blank[i]));
    }
    args.bad[number] = ReadDurations(joint, row, heads + joint.blanks) || row.bad;
  }

  const auto score = [&](int32_t i) {
    return row.bad || IsBlank(joint, i) ? -INFINITY : row.LogProbability(row.Logit(i));
  };
  // The best of this thread's labels behind the last one that was chosen.
  float last = INFINITY, mine = -INFINITY;
  int32_t last_place = -1, my_place = INT32_MAX;
  const auto find = [&] {
    mine = -INFINITY;
    my_place = INT32_MAX;
    for (int32_t i = threadIdx.x; i < joint.classes; i += kRowThreads) {
      const float y = score(i);
      if (Above(last, last_place, y, i) && Above(y, i, mine, my_place)) {
        mine = y;
        my_place = i;
      }
    }
  };
  find();
  for (int32_t k = 0; k < args.best_labels; ++k) {
    last = mine;
    last_place = my_place;
    BlockBest(&last, &last_place, parts, places);
    if (threadIdx.x == 0) {
      args.best[number * args.best_labels + k] = last;
      args.places[number * args.best_labels + k] = last_place;
    }
    if (my_place == last_place) find();
  }
}

// A block takes the move out of a node. Blanks come first among equal moves.
__global__ void __launch_bounds__(kRowThreads, 2) MovesKernel(const __grid_constant__ MovesArgs args) {
  JAX_RNNT_AT_MOST(kRowThreads);
  JAX_RNNT_SHARED_ARRAY(float, parts, kRowThreads / 32);
  JAX_RNNT_SHARED_ARRAY(int32_t, places, kRowThreads / 32);
  JAX_RNNT_SHARED_ARRAY(float, durations, kMaxHeads);  // of one thread, which would have them in local memory
  const JointRows& joint = args.joint;
  const Row row = ReadRow(joint, parts);
  float logit = -INFINITY;
  int32_t label = INT32_MAX;
  for (int32_t i = threadIdx.x; i < joint.classes && !row.bad; i += kRowThreads) {
    const float x = IsBlank(joint, i) ? -INFINITY : row.Logit(i);
    if (Above(x, i, logit, label)) {
      logit = x;
      label = i;
    }
  }
  BlockBest(&logit, &label, parts, places);
  if (threadIdx.x != 0) return;

  ReadDurations(joint, row, durations);
  if (args.token_first) {  // the best duration alone
    int32_t best = 0;
    for (int32_t i = 1; i < joint.durations; ++i) best = durations[i] > durations[best] ? i : best;
    for (int32_t i = 0; i < joint.durations; ++i) durations[i] = i == best ? durations[i] : -INFINITY;
  }
  const int64_t number = blockIdx.x, b = number / args.window, k = number % args.window;
  const int32_t frame = args.frame[b] + int32_t(k), length = args.lengths[b];
  const int64_t here = k == 0 ? args.count_here[b] : 0;
  const bool may_write = here < args.labels_per_frame && args.counts[b] < args.max_labels;
  const float of_label = row.bad ? NAN : row.LogProbability(logit);
  float best = -INFINITY;
  int32_t chosen = 0;
  for (int32_t i = 0; i < args.moves; ++i) {
    const GreedyMove move = args.move[i];
    const bool writes = move.blank < 0;
    float score = of_label;
    if (!writes) score = row.bad ? NAN : row.LogProbability(row.Logit(joint.blank[move.blank]));
    if (move.duration >= 0) score = writes ? durations[move.duration] + score : score + durations[move.duration];
    const int32_t after = frame + move.frames;
    const bool inside = args.ends[b] == 0 || after < length || (after == length && move.may_end != 0);
    if (!inside || (writes && !may_write)) score = -INFINITY;
    if (best != best) continue;
    if (score > best || score != score) {
      best = score;
      chosen = i;
    }
  }
  const GreedyMove move = args.move[chosen];
  const int32_t needs = move.frames + (move.may_end == 0);
  args.score[number] = best;
  args.reads[number] = move.frames;
  args.needs[number] = needs < 1 ? 1 : needs;
  args.label[number] = move.blank < 0 ? label : -1;
  args.log_prob[number] = of_label;
}

// ---- the choice of a beam ----

constexpr int kChoiceThreads = 128;
constexpr int32_t kNever = INT32_MAX;

__device__ __forceinline__ float Dead() { return -INFINITY; }

// The last step of MurmurHash3, as in _hashing.py.
__device__ __forceinline__ uint32_t Scramble(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

// The arrays of a block in dynamic shared memory.
struct Room {
  char* next;
  template <class T>
  __device__ T* Take(int64_t size) {
    T* begin = reinterpret_cast<T*>(next);
    next += size * sizeof(T);
    return begin;
  }
};

inline int64_t SharedWords(const ChoiceArgs& a) {
  const int64_t nodes = int64_t(a.width) * a.window, every = int64_t(a.width) * a.nodes_of_each();
  return a.width * (kBeamFloats + kBeamInts + kWritten * (int64_t(a.room) + 1)) + 2 * every +
         int64_t(a.labels) * nodes * (1 + a.best_labels) + int64_t(a.labels) * a.width + 11 * int64_t(a.candidates()) +
         3 * a.width + 4;
}

// Behind the window of this first frame.
__device__ __forceinline__ int32_t WindowEnd(const ChoiceArgs& args, int64_t b, int32_t frame) {
  if (args.window == 1) return frame + 1;
  const int32_t end = frame + args.window - (args.first[b] + frame) % args.window;
  return end < args.lengths[b] ? end : args.lengths[b];
}

// Scores of the nodes of a hypothesis: of those in the window, then of those behind it.
__device__ void RunBlanks(const ChoiceArgs& args, const float* gains, int32_t left, float score, float path,
                          float* scores, float* paths) {
  const int32_t window = args.window, longest = args.longest(), moves = args.blanks + args.labels + 1;
  // Node k of the run; nodes from `left` on lie behind the window and begin nothing.
  for (int32_t place = 0; place < window + longest; ++place) {
    const bool behind = place >= window;
    const int32_t k = behind ? left + place - window : place;
    float peak = Dead(), best = Dead(), total = 0;
    int32_t terms = 0;
    if (k == 0 && !behind) {
      peak = score;
      best = path;
      terms = 1;
    } else {
      for (int32_t i = 0; i < args.blanks; ++i) {
        const int32_t from = k - args.moves[i].frames;
        if (from < 0 || from >= window) continue;
        ++terms;
        const float gain = gains[int64_t(from) * moves + i];
        peak = Max(peak, scores[from] + gain);
        best = Max(best, paths[from] + gain);
      }
      if (terms > 1) {
        const float finite = peak == Dead() ? 0.f : peak;
        for (int32_t i = 0; i < args.blanks; ++i) {
          const int32_t from = k - args.moves[i].frames;
          if (from < 0 || from >= window) continue;
          total += expf(scores[from] + gains[int64_t(from) * moves + i] - finite);
        }
        if (total > 1) peak = peak + logf(total);
      }
    }
    scores[place] = peak;
    paths[place] = best;
  }
}

// A block chooses the beam of an utterance.
__global__ void __launch_bounds__(kChoiceThreads, 1) ChoiceKernel(const __grid_constant__ ChoiceArgs args) {
  JAX_RNNT_AT_MOST(kChoiceThreads);
  JAX_RNNT_DYNAMIC_SHARED(int32_t, memory);
  const int64_t b = blockIdx.x;
  const int32_t width = args.width, window = args.window, nodes = width * window, of_each = args.nodes_of_each();
  const int32_t best_labels = args.best_labels, moves = args.blanks + args.labels, row = kWritten * (args.room + 1);
  const int32_t blank_kinds = args.blank_kinds(), candidates = args.candidates(), length = args.lengths[b];
  Room room{reinterpret_cast<char*>(memory)};
  float* floats = room.Take<float>(width * kBeamFloats);
  int32_t* ints = room.Take<int32_t>(width * kBeamInts);
  int32_t* written = room.Take<int32_t>(int64_t(width) * row);
  float* node_score = room.Take<float>(width * of_each);
  float* node_path = room.Take<float>(width * of_each);
  float* base = room.Take<float>(args.labels * nodes);
  float* sums = room.Take<float>(int64_t(args.labels) * nodes * best_labels);
  int32_t* picked = room.Take<int32_t>(args.labels * width);
  float* score = room.Take<float>(candidates);
  float* path = room.Take<float>(candidates);
  float* total = room.Take<float>(candidates);
  int32_t* parent = room.Take<int32_t>(candidates);
  int32_t* label = room.Take<int32_t>(candidates);
  float* sure = room.Take<float>(candidates);
  int32_t* frame = room.Take<int32_t>(candidates);
  int32_t* counts = room.Take<int32_t>(candidates);
  int32_t* here = room.Take<int32_t>(candidates);
  int32_t* key = room.Take<int32_t>(candidates);
  int32_t* other_key = room.Take<int32_t>(candidates);
  int32_t* chosen = room.Take<int32_t>(width);
  float* kept = room.Take<float>(width);
  int32_t* needed = room.Take<int32_t>(width);

  const int thread = int(threadIdx.x), threads = int(blockDim.x);
  for (int i = thread; i < width * kBeamFloats; i += threads) floats[i] = args.floats[b * width * kBeamFloats + i];
  for (int i = thread; i < width * kBeamInts; i += threads) ints[i] = args.ints[b * width * kBeamInts + i];
  for (int i = thread; i < width * row; i += threads) written[i] = args.written[b * width * row + i];
  const float* gains = args.gains + b * nodes * (moves + 1);
  bool bad = false;
  for (int i = thread; i < nodes; i += threads) bad |= gains[int64_t(i) * (moves + 1) + moves] != 0;
  bad = __syncthreads_or(bad) != 0;
  const auto at = [&](int w, BeamInt i) { return ints[w * kBeamInts + i]; };
  const int32_t begin = at(0, kFirst), end = WindowEnd(args, b, begin < length ? begin : 0);

  // Scores of nodes.
  for (int w = thread; w < width; w += threads) {
    if (window == 1) {
      node_score[w] = floats[w * kBeamFloats];
      node_path[w] = floats[w * kBeamFloats + 1];
    } else {
      const int32_t more = end - at(w, kFrame), left = more < 1 || more > window ? 1 : more;
      RunBlanks(args, gains + int64_t(w) * window * (moves + 1), left, floats[w * kBeamFloats],
                floats[w * kBeamFloats + 1], node_score + w * of_each, node_path + w * of_each);
    }
  }
  __syncthreads();

  // The best labels of each arc: ranks among all, of equal ones the first is the best.
  for (int i = thread; i < args.labels * nodes; i += threads) {
    const int arc = i / nodes, n = i % nodes;
    base[i] = node_score[n / window * of_each + n % window] + gains[int64_t(n) * (moves + 1) + args.blanks + arc];
  }
  __syncthreads();
  const int32_t all = nodes * best_labels;
  for (int i = thread; i < args.labels * all; i += threads) {
    sums[i] = base[i / all * nodes + i % all / best_labels] + args.best[b * all + i % all];
  }
  __syncthreads();
  for (int i = thread; i < args.labels * all; i += threads) {
    const float* of_arc = sums + i / all * all;
    const float mine = sums[i];
    const int32_t place = i % all;
    int32_t rank = 0;
    for (int32_t j = 0; j < all && rank < width; ++j) rank += of_arc[j] > mine || (of_arc[j] == mine && j < place);
    if (rank < width) picked[i / all * width + rank] = place;
  }
  __syncthreads();

  // All candidates.
  for (int c = thread; c < candidates; c += threads) {
    const int kind = c / width, w = c % width;
    int32_t node = w * of_each, reads = 0, written_label = -1;
    float gain, model = 0;
    if (kind == 0) {
      gain = at(w, kActive) != 0 ? Dead() : 0.f;
    } else if (kind <= blank_kinds) {
      if (window == 1) {
        gain = gains[int64_t(w) * (moves + 1) + kind - 1];
        reads = args.moves[kind - 1].frames;
      } else {
        gain = at(w, kActive) != 0 ? 0.f : Dead();
        node += window + kind - 1;
        reads = kind;
      }
    } else {
      const int arc = kind - 1 - blank_kinds;
      const int32_t place = picked[arc * width + w], n = place / best_labels;
      const int64_t i = b * all + place;
      node = n / window * of_each + n % window;
      reads = args.moves[args.blanks + arc].frames;
      gain = gains[int64_t(n) * (moves + 1) + args.blanks + arc] + args.best[i];
      written_label = args.places[i];
      model = args.sure[i];
    }
    const int from = node / of_each, ahead = node % of_each;
    const bool writes = written_label >= 0;
    score[c] = node_score[node] + gain;
    path[c] = node_path[node] + gain;
    parent[c] = node;
    label[c] = written_label;
    sure[c] = model;
    frame[c] = (ahead < window ? at(from, kFrame) + ahead : end - 1) + reads;
    counts[c] = at(from, kCounts) + writes;
    here[c] = reads == 0 ? (ahead == 0 ? at(from, kCountHere) : 0) + writes : 0;
    const uint32_t plus = uint32_t(written_label + 1);
    const uint32_t keys[] = {uint32_t(at(from, kKey)), uint32_t(at(from, kOtherKey))};
    key[c] = int32_t(writes ? Scramble(keys[0] ^ plus * 0x9E3779B1u) : keys[0]);
    other_key[c] = int32_t(writes ? Scramble(keys[1] ^ plus * 0x27D4EB2Fu) : keys[1]);
  }
  __syncthreads();

  // Of equal ones the one with the best path has the sum.
  const auto equal = [&](int i, int j) {
    return frame[i] == frame[j] && here[i] == here[j] && key[i] == key[j] && other_key[i] == other_key[j];
  };
  for (int i = thread; i < candidates; i += threads) {
    total[i] = score[i];
    if (!args.merge) continue;
    float peak = Dead(), sum = 0;
    for (int j = 0; j < candidates; ++j) {
      if (equal(i, j)) peak = Max(peak, score[j]);
    }
    const float finite = peak == Dead() ? 0.f : peak, mine = score[i] > Dead() ? path[i] : Dead();
    bool rivals = false;
    for (int j = 0; j < candidates; ++j) {
      if (!equal(i, j)) continue;
      sum += expf(score[j] - finite);
      const float rival = score[j] > Dead() ? path[j] : Dead();
      rivals |= rival > mine || (rival == mine && j < i);
    }
    total[i] = score[i] > Dead() && !rivals ? (sum > 1 ? finite + logf(sum) : finite) : Dead();
  }
  __syncthreads();

  // The best ones.
  for (int i = thread; i < candidates; i += threads) {
    int32_t rank = 0;
    for (int j = 0; j < candidates && rank < width; ++j) rank += total[j] > total[i] || (total[j] == total[i] && j < i);
    if (rank < width) chosen[rank] = i;
  }
  __syncthreads();
  for (int w = thread; w < width; w += threads) {
    const int c = chosen[w], kind = c / width;
    const float worst = total[chosen[0]] - args.threshold[b];
    kept[w] = total[c] >= worst ? total[c] : Dead();
    // Frames that an exact end needs.
    const auto needs_of = [&](int of_kind, int32_t* reads) {
      if (of_kind == 0) return *reads = 0;
      if (window > 1 && of_kind <= blank_kinds) {
        int32_t more = 0;
        for (int i = 0; i < args.blanks; ++i) more |= args.moves[i].may_end == 0;
        *reads = of_kind;
        return of_kind + more;
      }
      const BeamMove move = args.moves[of_kind <= blank_kinds ? of_kind - 1 : args.blanks + of_kind - 1 - blank_kinds];
      *reads = move.frames;
      const int32_t needs = move.frames + (move.may_end == 0);
      return needs < 1 ? 1 : needs;
    };
    int32_t reads, needs = needs_of(kind, &reads);
    int32_t most = needs > 0 ? frame[c] - reads + needs : 0;
    if (args.merge) {
      for (int j = 0; j < candidates; ++j) {
        int32_t other_reads, other = needs_of(j / width, &other_reads);
        if (other > (other_reads < 1 ? 1 : other_reads) && score[j] > Dead() && equal(c, j) && most < frame[c] + 1) {
          most = frame[c] + 1;
        }
      }
    }
    needed[w] = kept[w] > Dead() && args.reaches() ? most : 0;
  }
  __syncthreads();

  // The next beam, in the memory of this one, all of which is in shared memory.
  int32_t reached = at(0, kReached), next = kNever;
  for (int w = 0; w < width; ++w) {
    reached = needed[w] > reached ? needed[w] : reached;
    if (kept[w] > Dead() && frame[chosen[w]] < next) next = frame[chosen[w]];
  }
  const int32_t next_end = WindowEnd(args, b, next < length ? next : 0);
  uint64_t taken = 0;
  for (int w = 0; w < width; ++w) {
    const int from = parent[chosen[w]] / of_each;
    taken |= uint64_t{1} << (at(from, kRead) >= 0 ? at(from, kTarget) : at(from, kSlot));
  }
  for (int w = thread; w < width; w += threads) {
    const int c = chosen[w], from = parent[c] / of_each;
    const bool writes = label[c] >= 0, alive = kept[w] > Dead(), stepped = at(from, kRead) >= 0;
    float* to_floats = args.floats_after + (b * width + w) * kBeamFloats;
    int32_t* to = args.ints_after + (b * width + w) * kBeamInts;
    to_floats[0] = kept[w];
    to_floats[1] = args.merge && !(score[c] > Dead()) ? Dead() : path[c];
    const int32_t unread = writes ? label[c] : stepped ? -1 : at(from, kUnread);
    const bool near = window == 1 ? frame[c] == next : frame[c] < next_end;
    const bool active = alive && next < length && near;
    const int32_t read = active ? unread : -1;
    int32_t slot = 0;
    for (int free = -1;; ++slot) {
      free += (taken >> slot & 1) == 0;
      if (free == w) break;
    }
    to[kFrame] = frame[c];
    to[kCounts] = counts[c];
    to[kCountHere] = here[c];
    to[kUnread] = unread;
    to[kSlot] = stepped ? at(from, kTarget) : at(from, kSlot);
    to[kKey] = key[c];
    to[kOtherKey] = other_key[c];
    to[kBad] = bad;
    to[kActive] = active;
    to[kRead] = read;
    to[kTarget] = read >= 0 ? slot : 2 * width;
    to[kSteps] = at(w, kSteps) + (begin < length);
    to[kReached] = reached;
    to[kFirst] = next;
  }
  const int32_t places = args.room + 1;
  for (int i = thread; i < width * row; i += threads) {
    const int w = i / row, field = i % row / places, place = i % places, c = chosen[w];
    const int32_t reads = (c / width <= blank_kinds) ? 0 : args.moves[args.blanks + c / width - 1 - blank_kinds].frames;
    int32_t value = written[parent[c] / of_each * row + i % row];
    if (label[c] >= 0 && place == (counts[c] - 1) % args.room) {
      const int32_t fields[] = {label[c], args.first[b] + frame[c] - reads, reads, AsInt(sure[c])};
      value = fields[field];
    }
    args.written_after[b * width * row + i] = value;
  }
}

}  // namespace

cudaError_t Choose(const ChoiceArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  return Launch(ChoiceKernel, dim3(unsigned(args.batch)), dim3(kChoiceThreads), size_t(SharedWords(args)) * 4, stream,
                args);
}

cudaError_t Rows(const RowsArgs& args, cudaStream_t stream) {
  if (args.joint.rows == 0) return cudaSuccess;
  return Launch(RowsKernel, dim3(unsigned(args.joint.rows)), dim3(kRowThreads), 0, stream, args);
}

cudaError_t Moves(const MovesArgs& args, cudaStream_t stream) {
  if (args.joint.rows == 0) return cudaSuccess;
  return Launch(MovesKernel, dim3(unsigned(args.joint.rows)), dim3(kRowThreads), 0, stream, args);
}

cudaError_t Walk(const WalkArgs& args, cudaStream_t stream) {
  return Launch(WalkKernel, dim3(1), dim3(kWalkThreads), 0, stream, args);
}

}  // namespace jax_rnnt::cuda
