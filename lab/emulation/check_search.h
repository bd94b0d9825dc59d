// Problems for the kernels of searches: against plain loops over integers, and against double precision.
//
// Scores are multiples of a quarter, so sums along a path are exact in every type and many are equal. Sums over paths
// round: a problem whose choice depends on such a rounding is drawn anew.
#pragma once

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "lab/emulation/check_common.h"
#include "xla_kernels/cuda/search.h"

namespace jax_rnnt::cuda {

// Labels may be -1, and log-probabilities -inf.
inline float Quarters(Random* random, int low = -12) {
  return random->Below(12) == 0 ? -float(kInfinity) : float(low + random->Below(1 - low)) / 4;
}

// ------------------------------------------------------------------------------------------------------------ walk

inline void CheckWalk(const char* name, int batch, int window, int room, bool token_first, bool reach, bool in_place,
                      uint64_t seed) {
  Random random(seed);
  Problem problem;
  const int64_t nodes = int64_t(batch) * window, table = int64_t(batch) * room;
  Buffer<float> score(nodes), log_prob(nodes), total(batch), log_probs(table), total_after(batch),
      log_probs_after(table);
  Buffer<int32_t> reads(nodes), needs(nodes), label(nodes), frame(batch), here(batch), counts(batch), reached(batch),
      labels(table), frames(table), durations(table), lengths(batch), first(batch), frame_after(batch),
      here_after(batch), counts_after(batch), reached_after(batch), labels_after(table), frames_after(table),
      durations_after(table), written(batch);
  Buffer<bool> going(1);
  for (int64_t i = 0; i < nodes; ++i) {
    score[i] = Quarters(&random);
    log_prob[i] = Quarters(&random);
    label[i] = std::max(random.Below(8) - 4, -1);
    reads[i] = label[i] < 0 ? 1 + random.Below(2) : random.Below(3);
    needs[i] = 1 + random.Below(4);
  }
  for (int64_t b = 0; b < batch; ++b) {
    frame[b] = random.Below(12);
    here[b] = random.Below(3);
    counts[b] = random.Below(room + 1);
    reached[b] = random.Below(9);
    total[b] = Quarters(&random);
    lengths[b] = random.Below(14);
    first[b] = random.Below(9);
  }
  for (int64_t i = 0; i < table; ++i) {
    labels[i] = random.Below(9);
    frames[i] = random.Below(9);
    durations[i] = random.Below(3);
    log_probs[i] = Quarters(&random);
  }

  struct Truth {
    int32_t frame, here, counts, reached, written;
    float total;
    std::vector<int32_t> labels, frames, durations;
    std::vector<float> log_probs;
  };
  std::vector<Truth> truth;
  bool any = false;
  for (int64_t b = 0; b < batch; ++b) {
    const auto row = [&](const auto& x) { return std::vector(x.host() + b * room, x.host() + (b + 1) * room); };
    Truth t = {frame[b], here[b],     counts[b],   reached[b],     -1,
               total[b], row(labels), row(frames), row(durations), row(log_probs)};
    int k = 0;
    const int32_t begin = frame[b];
    bool moved = false;
    while (k < window && begin + k < lengths[b] && t.written < 0) {
      const int64_t i = b * window + k;
      if (reach) t.reached = begin + k + needs[i];
      t.total += score[i];
      t.frame = begin + k + reads[i];
      if (label[i] >= 0) {
        t.written = label[i];
        const int32_t before = k == 0 ? here[b] : 0;
        t.here = reads[i] == 0 ? before + 1 : 0;
        if (t.counts < room) {
          t.labels[size_t(t.counts)] = label[i];
          t.frames[size_t(t.counts)] = first[b] + begin + k;
          t.durations[size_t(t.counts)] = reads[i];
          t.log_probs[size_t(t.counts)] = log_prob[i];
        }
        ++t.counts;
      } else {
        t.here = 0;
      }
      moved = true;
      k += reads[i];
    }
    if (!moved && begin < lengths[b]) t.here = 0;
    if (token_first && t.here >= 2) ++t.frame, t.here = 0;
    any |= t.frame < lengths[b];
    truth.push_back(t);
  }

  const auto into = [&](auto& before, auto& after) { return in_place ? before.data() : after.data(); };
  const WalkArgs args = {batch,
                         window,
                         room,
                         2,
                         token_first,
                         reach,
                         score.data(),
                         reads.data(),
                         needs.data(),
                         label.data(),
                         log_prob.data(),
                         frame.data(),
                         here.data(),
                         counts.data(),
                         reached.data(),
                         total.data(),
                         labels.data(),
                         frames.data(),
                         durations.data(),
                         log_probs.data(),
                         lengths.data(),
                         first.data(),
                         into(frame, frame_after),
                         into(here, here_after),
                         into(counts, counts_after),
                         into(reached, reached_after),
                         into(total, total_after),
                         into(labels, labels_after),
                         into(frames, frames_after),
                         into(durations, durations_after),
                         into(log_probs, log_probs_after),
                         written.data(),
                         going.data()};
  problem.Succeeded(OnDevice([&] { return Walk(args, nullptr); }));
  if (going[0] != any) problem.Say("whether an utterance goes on");
  const auto after = [&](auto& x, auto& y) -> auto& { return in_place ? x : y; };
  for (int64_t b = 0; b < batch; ++b) {
    const Truth& t = truth[size_t(b)];
    const auto same = [&](const char* what, double is, double should) {
      problem.Compare(what, b, is, should, 0, false);
    };
    same("frame", after(frame, frame_after)[b], t.frame);
    same("labels of the frame", after(here, here_after)[b], t.here);
    same("count", after(counts, counts_after)[b], t.counts);
    same("frames needed", after(reached, reached_after)[b], t.reached);
    same("score", double(after(total, total_after)[b]), double(t.total));
    same("label", written[b], t.written);
    for (int i = 0; i < room; ++i) {
      same("written label", after(labels, labels_after)[b * room + i], t.labels[size_t(i)]);
      same("written frame", after(frames, frames_after)[b * room + i], t.frames[size_t(i)]);
      same("written duration", after(durations, durations_after)[b * room + i], t.durations[size_t(i)]);
      same("written log-probability", double(after(log_probs, log_probs_after)[b * room + i]),
           double(t.log_probs[size_t(i)]));
    }
  }
  Sum(after(total, total_after)), Sum(after(labels, labels_after)), Sum(after(frame, frame_after)), Sum(written);
  Count(name, problem.text);
}

// ------------------------------------------------------------------------------------------------ rows of the joint

struct JointRowsOptions {
  int rows = 24, classes = 300, durations = 0, blanks = 1, parts = 1;
  bool bias = false, token_first = false, faults = false;
};

// Logits of rows, and their log-probabilities in double precision.
class JointRowsProblem {
 public:
  JointRowsProblem(const char* name, const JointRowsOptions& o, uint64_t seed)
      : name_(name),
        o_(o),
        outputs_(o.classes + o.durations),
        random_(seed),
        logits_(int64_t(o.parts) * o.rows * outputs_),
        bias_(outputs_) {
    joint_ = {o.rows, o.classes, o.durations, o.blanks, {}, o.parts, nullptr, nullptr};
    for (int i = 0; i < o.blanks; ++i) joint_.blank[i] = (i * 7 + o.classes - 1) % o.classes;
    for (int64_t i = 0; i < logits_.size(); ++i) logits_[i] = float(random_.Below(80) - 40) / 8;
    for (int i = 0; i < outputs_; ++i) bias_[i] = float(random_.Below(16) - 8) / 8;
    for (int r = 0; r < o.rows; ++r) {  // blanks are about as probable as the best label
      for (int i = 0; i < o.blanks; ++i) logits_[int64_t(r) * outputs_ + joint_.blank[i]] += float(random_.Below(6));
    }
    if (o.faults) {
      logits_[3] = float(kNaN);
      logits_[outputs_ + 1] = float(kInfinity);
      logits_[2 * outputs_ + outputs_ - 1] = float(kNaN);  // of a duration, if there is one
      for (int i = 0; i < o.classes; ++i) logits_[3 * outputs_ + i] = -float(kInfinity);
      logits_[4 * outputs_ + outputs_ - 1] = float(kInfinity);
    }
    joint_.logits = logits_.data();
    joint_.bias = o.bias ? bias_.data() : nullptr;
  }

  void CheckRows(int best) {
    Buffer<float> heads(int64_t(o_.rows) * (o_.blanks + o_.durations)), scores(int64_t(o_.rows) * best);
    Buffer<int32_t> places(int64_t(o_.rows) * best);
    Buffer<bool> bad(o_.rows);
    const RowsArgs args = {joint_, best, heads.data(), scores.data(), places.data(), bad.data()};
    problem_.Succeeded(OnDevice([&] { return Rows(args, nullptr); }));
    for (int r = 0; r < o_.rows; ++r) {
      Read(r);
      if (bad[r] != (bad_ || wrong_)) problem_.Say("whether a logit is bad");
      float* const head = heads.host() + int64_t(r) * (o_.blanks + o_.durations);
      for (int i = 0; i < o_.blanks; ++i) Near("blank", r, head[i], bad_ ? kNaN : log_probs_[size_t(joint_.blank[i])]);
      for (int i = 0; i < o_.durations; ++i) Near("duration", r, head[o_.blanks + i], durations_[size_t(i)]);
      std::vector<bool> taken(size_t(o_.classes), false);
      for (int k = 0; k < best; ++k) {
        const int32_t place = places[int64_t(r) * best + k], should = bad_ ? place : BestLabel(taken);
        if (place < 0 || place >= o_.classes) problem_.Say("a label out of range");
        if (place != should) problem_.Wrong("label", r * best + k, place, should);
        Near("label's score", r, scores[int64_t(r) * best + k], bad_ ? -kInfinity : OfLabel(should));
        taken[size_t(should)] = true;
      }
    }
    Sum(heads), Sum(scores), Sum(places);
    Count(name_, problem_.text);
  }

  void CheckMoves(int window, const std::vector<GreedyMove>& moves) {
    const int batch = o_.rows / window;
    Buffer<int32_t> frame(batch), here(batch), counts(batch), lengths(batch), ends(batch), reads(o_.rows),
        needs(o_.rows), label(o_.rows);
    Buffer<float> score(o_.rows), log_prob(o_.rows);
    for (int b = 0; b < batch; ++b) {
      frame[b] = random_.Below(9);
      here[b] = random_.Below(3);
      counts[b] = random_.Below(8);
      lengths[b] = frame[b] + random_.Below(5);
      ends[b] = random_.Below(2);
    }
    MovesArgs args = {};
    args.joint = joint_;
    args.batch = batch, args.window = window, args.labels_per_frame = 2, args.max_labels = 6;
    args.moves = int32_t(moves.size()), args.token_first = o_.token_first;
    std::copy(moves.begin(), moves.end(), args.move);
    args.frame = frame.data(), args.count_here = here.data(), args.counts = counts.data();
    args.lengths = lengths.data(), args.ends = ends.data();
    args.score = score.data(), args.reads = reads.data(), args.needs = needs.data(), args.label = label.data();
    args.log_prob = log_prob.data();
    problem_.Succeeded(OnDevice([&] { return Moves(args, nullptr); }));
    for (int r = 0; r < o_.rows; ++r) {
      Read(r);
      const int b = r / window, k = r % window;
      const int32_t best = bad_ ? 0 : BestLabel(std::vector<bool>(size_t(o_.classes), false));
      const bool writes = (k == 0 ? here[b] : 0) < 2 && counts[b] < 6;
      const int64_t longest = std::max_element(durations_.begin(), durations_.end()) - durations_.begin();
      std::vector<double> of_moves;
      bool nan = false;
      for (const GreedyMove& move : moves) {
        double x = bad_ ? kNaN : move.blank < 0 ? OfLabel(best) : log_probs_[size_t(joint_.blank[move.blank])];
        if (move.duration >= 0)
          x += o_.token_first && move.duration != longest ? -kInfinity : durations_[size_t(move.duration)];
        const int32_t after = frame[b] + k + move.frames;
        const bool inside = !ends[b] || after < lengths[b] || (after == lengths[b] && move.may_end);
        of_moves.push_back(inside && (move.blank >= 0 || writes) ? x : -kInfinity);
        nan |= of_moves.back() != of_moves.back();
      }
      const double top = nan ? kNaN : *std::max_element(of_moves.begin(), of_moves.end());
      Near("score of the move", r, score[r], top);
      if (!bad_) Near("label's log-probability", r, log_prob[r], OfLabel(best));
      bool known = nan || top == -kInfinity;  // else one of the best, up to rounding
      for (size_t i = 0; i < moves.size() && !known; ++i) {
        const int32_t need = std::max(moves[i].frames + !moves[i].may_end, 1);
        known = of_moves[i] > top - 1e-5 && reads[r] == moves[i].frames && needs[r] == need &&
                label[r] == (moves[i].blank < 0 ? best : -1);
      }
      if (!known) problem_.Wrong("move, of which the frames", r, reads[r], -1);
    }
    Sum(score), Sum(reads), Sum(needs), Sum(label), Sum(log_prob);
    Count(name_, problem_.text);
  }

 private:
  double Logit(int r, int i) const {
    double x = o_.bias ? double(bias_[i]) : 0;
    for (int k = 0; k < o_.parts; ++k) x += double(logits_[(int64_t(k) * o_.rows + r) * outputs_ + i]);
    return x;
  }
  static double LogSum(const std::vector<double>& x) {
    double peak = -kInfinity, total = 0;
    for (const double y : x) peak = std::fmax(peak, y);
    for (const double y : x) total += peak > -kInfinity ? std::exp(y - peak) : 0;
    return peak > -kInfinity ? peak + std::log(total) : 0;
  }
  void Read(int r) {
    log_probs_.clear(), durations_.clear(), bad_ = wrong_ = false;
    for (int i = 0; i < o_.classes; ++i) log_probs_.push_back(Logit(r, i)), bad_ |= !(log_probs_.back() < kInfinity);
    for (int i = 0; i < o_.durations; ++i) {
      durations_.push_back(Logit(r, o_.classes + i)), wrong_ |= !(durations_.back() < kInfinity);
    }
    const double sum = bad_ ? 0 : LogSum(log_probs_), sum_of_durations = wrong_ ? 0 : LogSum(durations_);
    for (double& x : log_probs_) x -= sum;
    for (double& x : durations_) x = wrong_ ? kNaN : x - sum_of_durations;
  }
  bool IsBlank(int i) const { return std::find(joint_.blank, joint_.blank + o_.blanks, i) != joint_.blank + o_.blanks; }
  double OfLabel(int i) const { return IsBlank(i) ? -kInfinity : log_probs_[size_t(i)]; }
  // The first of the best ones that are left.
  int32_t BestLabel(const std::vector<bool>& taken) const {
    int32_t best = -1;
    for (int i = 0; i < o_.classes; ++i) {
      if (!taken[size_t(i)] && (best < 0 || OfLabel(i) > OfLabel(best))) best = i;
    }
    return best;
  }
  void Near(const char* what, int r, double is, double should) {
    problem_.Compare(what, r, is, should, 4e-6 + 3e-7 * std::fabs(should), true);
  }

  const char* name_;
  JointRowsOptions o_;
  int outputs_;
  Random random_;
  Buffer<float> logits_, bias_;
  JointRows joint_;
  std::vector<double> log_probs_, durations_;
  bool bad_ = false, wrong_ = false;
  Problem problem_;
};

// ------------------------------------------------------------------------------------------------ choice of a beam

struct ChoiceOptions {
  int batch = 60, width = 4, window = 1, best = 3, room = 5;
  bool merge = true;
  std::vector<BeamMove> blanks = {{1, 1}}, labels = {{0, 1}};
};

class ChoiceProblem {
 public:
  ChoiceProblem(const char* name, const ChoiceOptions& o, uint64_t seed)
      : name_(name),
        o_(o),
        random_(seed),
        nodes_(o.width * o.window),
        moves_(int(o.blanks.size() + o.labels.size())),
        row_(kWritten * (o.room + 1)),
        floats_(int64_t(o.batch) * o.width * kBeamFloats),
        ints_(int64_t(o.batch) * o.width * kBeamInts),
        written_(int64_t(o.batch) * o.width * row_),
        gains_(int64_t(o.batch) * nodes_ * (moves_ + 1)),
        best_(int64_t(o.batch) * nodes_ * o.best),
        sure_(best_.size()),
        places_(best_.size()),
        lengths_(o.batch),
        first_(o.batch),
        threshold_(o.batch) {
    for (int b = 0; b < o.batch; ++b) Draw(b);
  }

  void Check() {
    const Buffer<float> floats(floats_);
    const Buffer<int32_t> ints(ints_), written(written_);
    ChoiceArgs args = {};
    args.batch = o_.batch, args.width = o_.width, args.window = o_.window, args.best_labels = o_.best;
    args.room = o_.room, args.blanks = int32_t(o_.blanks.size()), args.labels = int32_t(o_.labels.size());
    args.merge = o_.merge;
    std::copy(o_.blanks.begin(), o_.blanks.end(), args.moves);
    std::copy(o_.labels.begin(), o_.labels.end(), args.moves + o_.blanks.size());
    args.floats = floats_.data(), args.ints = ints_.data(), args.written = written_.data();
    args.gains = gains_.data(), args.best = best_.data(), args.places = places_.data(), args.sure = sure_.data();
    args.lengths = lengths_.data(), args.first = first_.data(), args.threshold = threshold_.data();
    args.floats_after = floats_.data(), args.ints_after = ints_.data(), args.written_after = written_.data();
    problem_.Succeeded(OnDevice([&] { return Choose(args, nullptr); }));
    int unclear = 0;
    for (int b = 0; b < o_.batch; ++b) unclear += !CheckUtterance(b, floats, ints, written);
    if (4 * unclear > 3 * o_.batch) problem_.Say("too few clear problems");
    Sum(floats_), Sum(ints_), Sum(written_);
    Count(name_, problem_.text);
  }

 private:
  struct Node {
    double score = -kInfinity, path = -kInfinity;
    bool exact = true;
  };
  struct Candidate {
    double score, path;
    bool exact;
    int from, frame, counts, here, kind, reads, needs, label;
    float sure;
    uint32_t key, other_key;
    auto identity() const { return std::make_tuple(frame, here, key, other_key); }
  };

  int32_t End(int b, int frame) const {
    if (o_.window == 1) return frame + 1;
    return std::min(frame + o_.window - (first_[b] + frame) % o_.window, int(lengths_[b]));
  }

  void Draw(int b) {
    const int width = o_.width;
    lengths_[b] = 4 + random_.Below(8);
    first_[b] = random_.Below(7);
    threshold_[b] = random_.Below(2) ? float(kInfinity) : 2.f;
    const auto at = [&](int w, int i) -> int32_t& { return ints_[(int64_t(b) * width + w) * kBeamInts + i]; };
    std::vector<int> slots;
    for (int i = 0; i < 2 * width; ++i) slots.insert(slots.begin() + random_.Below(i + 1), i);
    std::sort(slots.begin() + width, slots.end());  // free ones
    int32_t begin = INT32_MAX;
    const int steps = random_.Below(o_.room), reached = random_.Below(9);
    for (int w = 0; w < width; ++w) {
      float* const x = floats_.host() + (int64_t(b) * width + w) * kBeamFloats;
      x[0] = Quarters(&random_);
      x[1] = x[0] - float(random_.Below(9)) / 4;
      at(w, kFrame) = 2 + random_.Below(4 + o_.window);
      at(w, kCounts) = 1 + random_.Below(5);
      at(w, kCountHere) = random_.Below(2);
      at(w, kUnread) = std::max(random_.Below(8) - 4, -1);
      at(w, kSlot) = slots[size_t(w)];
      at(w, kKey) = random_.Below(2);
      at(w, kOtherKey) = 5 * at(w, kKey) + 1;
      at(w, kBad) = 0;
      at(w, kSteps) = steps;
      at(w, kReached) = reached;
      if (x[0] > -kInfinity) begin = std::min(begin, at(w, kFrame));
      for (int i = 0; i < row_; ++i) written_[(int64_t(b) * width + w) * row_ + i] = random_.Below(9);
    }
    for (int w = 0; w < width; ++w) {
      const bool alive = floats_[(int64_t(b) * width + w) * kBeamFloats] > -kInfinity;
      at(w, kFirst) = begin;
      at(w, kActive) = alive && begin < lengths_[b] && at(w, kFrame) < End(b, begin);
      at(w, kRead) = at(w, kActive) ? at(w, kUnread) : -1;
      at(w, kTarget) = at(w, kRead) >= 0 ? slots[size_t(width + w)] : 2 * width;
      for (int k = 0; k < o_.window; ++k) {
        const int64_t node = int64_t(b) * nodes_ + w * o_.window + k;
        const bool there = at(w, kActive) && at(w, kFrame) + k < End(b, begin);
        for (int i = 0; i < moves_; ++i) {
          gains_[node * (moves_ + 1) + i] = there ? Quarters(&random_) : -float(kInfinity);
        }
        gains_[node * (moves_ + 1) + moves_] = float(random_.Below(200) == 0);
        float last = 0;
        for (int i = 0; i < o_.best; ++i) {
          last = random_.Below(20) == 0 ? -float(kInfinity) : last - float(random_.Below(6)) / 4;
          best_[node * o_.best + i] = last;
          sure_[node * o_.best + i] = Quarters(&random_);
          places_[node * o_.best + i] = (i * 3 + random_.Below(3)) % (3 * o_.best);
        }
      }
    }
  }

  static Node Total(const std::vector<Node>& terms) {
    Node sum;
    double total = 0;
    int alive = 0;
    for (const Node& x : terms) {
      sum.score = std::fmax(sum.score, x.score), sum.path = std::fmax(sum.path, x.path);
      alive += x.score > -kInfinity;
      sum.exact = x.score > -kInfinity ? sum.exact && x.exact : sum.exact;
    }
    if (alive < 2) return sum;
    for (const Node& x : terms) total += std::exp(x.score - sum.score);
    return {sum.score + std::log(total), sum.path, false};
  }

  // Places of the best ones, the first of equal ones first; false where rounding may decide.
  template <class Score>
  static bool Best(int count, size_t most, const Score& score, std::vector<int>* places) {
    places->clear();
    for (int i = 0; i < count; ++i) places->push_back(i);
    std::stable_sort(places->begin(), places->end(), [&](int i, int j) { return score(i).score > score(j).score; });
    bool clear = true;
    for (size_t i = 0; i + 1 < places->size() && i < most; ++i) {
      const Node x = score((*places)[i]), y = score((*places)[i + 1]);
      clear = clear && !(x.score - y.score < 1e-4 && y.score > -kInfinity && !(x.exact && y.exact));
    }
    if (places->size() > most) places->resize(most);
    return clear;
  }

  static uint32_t Append(uint32_t key, int label, uint32_t factor) {  // as _hashing.py
    uint32_t x = key ^ uint32_t(label + 1) * factor;
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
  }

  // Returns false where the problem has no clear answer.
  bool CheckUtterance(int b, const Buffer<float>& floats, const Buffer<int32_t>& ints, const Buffer<int32_t>& written) {
    const int width = o_.width, window = o_.window;
    const auto at = [&](int w, int i) { return ints[(int64_t(b) * width + w) * kBeamInts + i]; };
    const auto gain = [&](int node, int i) { return double(gains_[(int64_t(b) * nodes_ + node) * (moves_ + 1) + i]); };
    const int begin = at(0, kFirst), length = lengths_[b], end = End(b, begin < length ? begin : 0);
    int longest = 1, open = 0;
    bool bad = false, reaches = false;
    for (const BeamMove& x : o_.blanks) longest = std::max(longest, int(x.frames)), open |= !x.may_end;
    for (const auto* kind : {&o_.blanks, &o_.labels}) {
      for (const BeamMove& x : *kind) reaches |= x.frames + !x.may_end > 1;
    }
    for (int i = 0; i < nodes_; ++i) bad |= gain(i, moves_) != 0;

    std::vector<std::vector<Candidate>> kinds(1 + (window == 1 ? o_.blanks.size() : size_t(longest)));
    std::vector<Node> nodes;
    for (int w = 0; w < width; ++w) {
      const double score = floats[(int64_t(b) * width + w) * 2], path = floats[(int64_t(b) * width + w) * 2 + 1];
      const auto keep = [&](int kind, Node x, int frame, int here, int reads, int needs) {
        kinds[size_t(kind)].push_back({x.score, x.path, x.exact, w, frame, at(w, kCounts), here, kind, reads, needs, -1,
                                       0, uint32_t(at(w, kKey)), uint32_t(at(w, kOtherKey))});
      };
      if (!at(w, kActive)) keep(0, {score, path}, at(w, kFrame), at(w, kCountHere), 0, 0);
      std::vector<std::vector<Node>> terms(size_t(window + longest) + 1);
      terms[0] = {{score, path}};
      const int left = end - at(w, kFrame);
      for (int k = 0; k < window; ++k) {
        const Node x = Total(terms[size_t(k)]);
        nodes.push_back(x);
        for (size_t i = 0; i < o_.blanks.size() && at(w, kActive); ++i) {
          const BeamMove move = o_.blanks[i];
          const Node after = {x.score + gain(w * window + k, int(i)), x.path + gain(w * window + k, int(i)), x.exact};
          if (window > 1) {
            if (after.score > -kInfinity) terms[size_t(k + move.frames)].push_back(after);
          } else {
            keep(1 + int(i), after, at(w, kFrame) + move.frames, 0, move.frames,
                 std::max(move.frames + !move.may_end, 1));
          }
        }
      }
      for (int r = 1; window > 1 && r <= longest && at(w, kActive); ++r) {
        const size_t k = size_t(left + r - 1);
        keep(r, k < terms.size() ? Total(terms[k]) : Node{}, end - 1 + r, 0, r, r + open);
      }
    }
    std::vector<Candidate> all;
    for (const auto& kind : kinds) all.insert(all.end(), kind.begin(), kind.end());
    bool clear = true;
    std::vector<int> places;
    for (size_t arc = 0; arc < o_.labels.size(); ++arc) {
      const BeamMove move = o_.labels[arc];
      const auto after = [&](int i) {
        const int node = i / o_.best;
        const double more = gain(node, int(o_.blanks.size() + arc)) + best_[int64_t(b) * nodes_ * o_.best + i];
        return Node{nodes[size_t(node)].score + more, nodes[size_t(node)].path + more, nodes[size_t(node)].exact};
      };
      clear = Best(nodes_ * o_.best, size_t(width), after, &places) && clear;
      for (const int i : places) {
        const int node = i / o_.best, w = node / window, ahead = node % window;
        const int label = places_[int64_t(b) * nodes_ * o_.best + i];
        const int here = move.frames > 0 ? 0 : (ahead == 0 ? at(w, kCountHere) : 0) + 1;
        const Node x = after(i);
        all.push_back({x.score, x.path, x.exact, w, at(w, kFrame) + ahead + move.frames, at(w, kCounts) + 1, here, 99,
                       move.frames, std::max(move.frames + !move.may_end, 1), label,
                       sure_[int64_t(b) * nodes_ * o_.best + i], Append(uint32_t(at(w, kKey)), label, 0x9e3779b1u),
                       Append(uint32_t(at(w, kOtherKey)), label, 0x27d4eb2fu)});
      }
    }
    // Of equal ones the one with the best path has the sum.
    std::vector<Node> totals;
    std::vector<int> needed;
    for (size_t i = 0; i < all.size(); ++i) {
      std::vector<Node> terms;
      bool beaten = false;
      int most = all[i].needs > 0 ? all[i].frame - all[i].reads + all[i].needs : 0;
      for (size_t j = 0; j < all.size(); ++j) {
        const bool same = (o_.merge || i == j) && all[i].identity() == all[j].identity() && all[j].score > -kInfinity;
        if (!same) continue;
        terms.push_back({all[j].score, all[j].path, all[j].exact});
        beaten |= all[j].path > all[i].path || (all[j].path == all[i].path && j < i);
        if (o_.merge && all[j].needs > std::max(all[j].reads, 1)) most = std::max(most, all[i].frame + 1);
      }
      totals.push_back(beaten || !(all[i].score > -kInfinity) ? Node{} : Total(terms));
      needed.push_back(most);
    }
    clear = Best(int(all.size()), size_t(width), [&](int i) { return totals[size_t(i)]; }, &places) && clear;
    const double worst = places.empty() ? 0 : totals[size_t(places[0])].score - double(threshold_[b]);
    for (const int i : places)
      clear = clear && !(std::fabs(totals[size_t(i)].score - worst) < 1e-4 && !totals[size_t(i)].exact);
    if (!clear) return false;

    int reached = at(0, kReached), next = INT32_MAX;
    std::vector<int> kept;
    for (const int i : places) {
      if (!(totals[size_t(i)].score > -kInfinity) || totals[size_t(i)].score < worst) continue;
      kept.push_back(i);
      if (reaches) reached = std::max(reached, needed[size_t(i)]);
      next = std::min(next, all[size_t(i)].frame);
    }
    const auto same = [&](const char* what, int64_t is, int64_t should) {
      if (is != should) problem_.Wrong(what, b, double(is), double(should));
    };
    const auto now = [&](int w, int i) { return ints_[(int64_t(b) * width + w) * kBeamInts + i]; };
    std::vector<int> used, targets;
    for (int w = 0; w < width; ++w) {
      const float score = floats_[(int64_t(b) * width + w) * 2];
      used.push_back(now(w, kSlot));
      if (now(w, kRead) >= 0) targets.push_back(now(w, kTarget));
      same("steps", now(w, kSteps), at(w, kSteps) + (begin < length));
      same("frames needed", now(w, kReached), reached);
      same("first frame", now(w, kFirst), next);
      same("bad", now(w, kBad), bad);
      if (size_t(w) >= kept.size()) {
        if (score > -kInfinity || now(w, kActive) || now(w, kRead) >= 0) problem_.Say("a dead hypothesis lives");
        continue;
      }
      const Candidate& c = all[size_t(kept[size_t(w)])];
      const Node& total = totals[size_t(kept[size_t(w)])];
      const bool read = at(c.from, kRead) >= 0, writes = c.label >= 0;
      problem_.Compare("score", b, double(score), total.score, 1e-5, true);
      problem_.Compare("score of the path", b, double(floats_[(int64_t(b) * width + w) * 2 + 1]), c.path, 0, false);
      same("frame", now(w, kFrame), c.frame);
      same("labels", now(w, kCounts), c.counts);
      same("labels of the frame", now(w, kCountHere), c.here);
      const int unread = writes ? c.label : read ? -1 : at(c.from, kUnread);
      same("label to read", now(w, kUnread), unread);
      same("slot", now(w, kSlot), read ? at(c.from, kTarget) : at(c.from, kSlot));
      same("key", now(w, kKey), int32_t(c.key));
      same("other key", now(w, kOtherKey), int32_t(c.other_key));
      const bool active = next < length && c.frame < End(b, next);
      same("active", now(w, kActive), active);
      same("read", now(w, kRead), active ? unread : -1);
      for (int i = 0; i < row_; ++i) {
        const int field = i / (o_.room + 1), place = i % (o_.room + 1);
        int32_t should = written[(int64_t(b) * width + c.from) * row_ + i];
        if (writes && place == (c.counts - 1) % o_.room) {
          const int32_t fields[] = {c.label, first_[b] + c.frame - c.reads, c.reads, AsInt(c.sure)};
          should = fields[field];
        }
        same("written", written_[(int64_t(b) * width + w) * row_ + i], should);
      }
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      const bool twice = std::count(targets.begin(), targets.end(), targets[i]) > 1;
      if (twice || std::count(used.begin(), used.end(), targets[i]) > 0 || targets[i] >= 2 * width) {
        problem_.Say("a slot is not free");
      }
    }
    return true;
  }

  const char* name_;
  ChoiceOptions o_;
  Random random_;
  int nodes_, moves_, row_;
  Buffer<float> floats_;
  Buffer<int32_t> ints_, written_;
  Buffer<float> gains_, best_, sure_;
  Buffer<int32_t> places_, lengths_, first_;
  Buffer<float> threshold_;
  Problem problem_;
};

inline void CheckSearches() {
  uint64_t seed = 0;
  for (const bool in_place : {false, true}) {
    CheckWalk("walk", 300, 4, 5, false, in_place, in_place, ++seed);
    CheckWalk("walk, token first", 40, 1, 3, true, true, in_place, ++seed);
  }
  const std::vector<GreedyMove> unit = {{0, -1, 1, 1}, {-1, -1, 0, 1}};
  const std::vector<GreedyMove> durations = {{0, 1, 1, 1},  {0, 2, 2, 1},  {1, 0, 1, 1},
                                             {-1, 0, 0, 0}, {-1, 1, 1, 0}, {-1, 2, 2, 0}};
  const auto rows = [&](const char* name, JointRowsOptions o, const std::vector<GreedyMove>& moves) {
    JointRowsProblem(name, o, ++seed).CheckRows(std::min(o.classes, 5));
    JointRowsProblem(name, o, ++seed).CheckMoves(3, moves);
  };
  rows("rows", {}, unit);
  rows("rows, few classes", {60, 5}, unit);
  rows("rows, a bias and parts", {24, 300, 0, 1, 4, true}, unit);
  rows("rows, faults", {24, 40, 0, 1, 1, false, false, true}, unit);
  rows("rows, durations", {60, 1100, 3, 2, 2, true}, durations);
  rows("rows, token first, faults", {120, 33, 3, 2, 1, true, true, true}, durations);
  rows("no rows", {0}, unit);
  const auto choice = [&](const char* name, const ChoiceOptions& o) { ChoiceProblem(name, o, ++seed).Check(); };
  ChoiceOptions o;
  choice("choice", o);
  o.width = 16, o.best = 5, o.batch = 12;
  choice("choice, 16 hypotheses", o);
  o = {}, o.merge = false;
  choice("choice, apart", o);
  o = {}, o.blanks = {{1, 1}, {2, 1}}, o.labels = {{0, 0}, {1, 0}, {2, 0}};
  choice("choice, durations", o);
  o.window = 3, o.width = 3;
  choice("choice, durations in a window", o);
  o = {}, o.window = 4, o.width = 2;
  choice("choice, a window", o);
  o = {}, o.window = 2, o.blanks = {{1, 0}, {3, 1}}, o.width = 5;
  choice("choice, open ends in a window", o);
  o = {}, o.batch = 0;
  choice("choice of nothing", o);
  o = {}, o.blanks = {{1, 1}, {1, 0}}, o.labels = {{0, 0}};
  choice("choice, a blank that may not end", o);
}

}  // namespace jax_rnnt::cuda
