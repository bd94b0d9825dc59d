// Lattice of one sequence: alpha, beta, and minus the arc posteriors, as numbers m * 2^e (common/extended.h).
//
// A sweep crosses a strip of kWidth frames as a wavefront: at step s, lane i is at node (t + i, s - i). A blank arc
// moves a value to the next lane. A label arc leaves it in its lane for the next step (monotonic: moves it to the next
// lane, for the step after the next). So a step is two shuffles and a multiply-add on the critical path. Transposing
// square blocks in registers, 8 shuffles per step with AVX-512, brings log-probabilities into that skewed order and
// posteriors out of it. The values that leave the last lane are the row that enters the next strip.
//
// No plane of alphas is stored. The first sweep keeps in the workspace the rows that enter every eighth frame, or every
// strip if strips are longer. Then the strips are taken from the last to the first: alpha is computed again and kept in
// thread-local scratch with the arcs' probabilities, then beta with the posteriors. A log-probability is read before
// its gradient is written, so the gradients may overwrite them.
//
// lab/notes/cpu.md has times, and what was tried.
#include "xla_kernels/cpu/lattice.h"

#include "xla_kernels/cpu/lattice_planes.h"
#include "xla_kernels/cpu/scratch.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class A, bool kStandard>
class UnitLatticeOfSequence : SequencePlanes<A> {
  using Base = SequencePlanes<A>;
  using S = typename Base::S;
  using F = typename Base::F;
  using Exponent = typename Base::Exponent;
  using Value = typename Base::Value;
  using Row = typename Base::Row;  // here with a margin of kWidth zeros on either side
  using Base::args_, Base::frames_, Base::kInfinity, Base::kWidth, Base::labels_, Base::sequence_;

  // Strips from one checkpoint to the next.
  static constexpr int kStrips = kWidth < kKeptFrames ? kKeptFrames / kWidth : 1;

  struct Node {
    Value alpha, blank, label;  // alpha, and the probabilities of the arcs that leave
  };

 public:
  UnitLatticeOfSequence(const LatticeArgs& args, int64_t sequence)
      : Base(args, sequence),
        steps_(labels_ + kWidth),
        log_blank_(Base::LogPlane(0)),
        log_label_(Base::LogPlane(1)),
        row_size_((labels_ + 4 * kWidth) / kWidth * kWidth) {
    const size_t kept_bytes = kStrips * steps_ * sizeof(Node);
    char* const memory = static_cast<char*>(ThreadScratch(kept_bytes + 4 * row_size_ * sizeof(A)));
    kept_ = reinterpret_cast<Node*>(memory);
    A* const rows = reinterpret_cast<A*>(memory + kept_bytes) + kWidth;
    alpha_row_ = {rows, reinterpret_cast<Exponent*>(rows + row_size_)};
    beta_row_ = {rows + 2 * row_size_, reinterpret_cast<Exponent*>(rows + 3 * row_size_)};
  }

  void Run() {
    const bool gradient = args_.grad_plane != nullptr;
    const int64_t strips = (frames_ + kWidth - 1) / kWidth;
    Start(alpha_row_, 0, 1, 0);
    for (int64_t strip = 0; strip < strips; ++strip) {
      if (gradient && strip % kStrips == 0) Checkpoint(strip / kStrips, true);
      SweepAlpha<false>(strip);
    }

    const A z = alpha_row_.m[labels_];
    const Exponent z_exponent = alpha_row_.e[labels_];
    if (!Base::StoreLoss(z, z_exponent)) return;
    // The recursion of beta is linear: started from -1 / z, it yields minus the posteriors.
    Start(beta_row_, labels_, -1 / z, -z_exponent);
    for (int64_t end = strips; end > 0;) {
      const int64_t begin = (end - 1) / kStrips * kStrips;
      Checkpoint(begin / kStrips, false);
      for (int64_t strip = begin; strip < end; ++strip) SweepAlpha<true>(strip);
      while (end > begin) SweepBeta(--end);
    }
    Base::FinishGradient(true);
  }

 private:
  // Sets a row to zero except for one column.
  void Start(const Row& row, int64_t u, A m, Exponent e) {
    for (int64_t i = -kWidth; i < row_size_ - kWidth; ++i) row.m[i] = 0, row.e[i] = S::kZero;
    row.m[u] = m, row.e[u] = e;
  }

  void NormalizeRow(const Row& row) {
    for (int64_t u = 0; u <= labels_; u += kWidth) row.Set(u, Normalize(row.Get(u)));
  }

  // Keeps the row of alphas in the workspace, or reads it back.
  void Checkpoint(int64_t number, bool keep) {
    const int64_t plane = kUnitWorkspace.Elements(args_.frames, args_.columns) / 2;
    A* const m = static_cast<A*>(args_.workspace) + sequence_ * 2 * plane + number * args_.columns;
    void* const e = m + plane;
    const size_t bytes = (labels_ + 1) * sizeof(A);
    keep ? memcpy(m, alpha_row_.m, bytes) : memcpy(alpha_row_.m, m, bytes);
    keep ? memcpy(e, alpha_row_.e, bytes) : memcpy(alpha_row_.e, e, bytes);
  }

  // Element j, lane i: column step + j - i of frame t + i. Blank arcs of frames after the last one keep values.
  // Prefetches the frames `next` later, since a strip has more rows than the hardware follows as streams.
  void Skew(const A* plane, int64_t t, int64_t step, int64_t n, A behind, int64_t next, F* skewed) {
    for (int i = 0; i < kWidth; ++i) {
      const int64_t u = step - i;
      if (t + i < frames_) {
        // An integer, since the address may lie outside the plane.
        const uintptr_t ahead = reinterpret_cast<uintptr_t>(plane) + ((t + i + next) * args_.columns + u) * sizeof(A);
        __builtin_prefetch(reinterpret_cast<const void*>(ahead));
        skewed[i] = Base::LoadColumns(plane, t + i, u, n);
        Base::Check(skewed[i]);
      } else {
        skewed[i] = LanesBetween<A>(-u, n - u) ? Broadcast(behind) : Broadcast(-kInfinity);
      }
    }
    Transpose(skewed);
  }

  void Unskew(F* skewed, A* plane, int64_t t, int64_t step) const {
    Transpose(skewed);
    for (int i = 0; i < kWidth && t + i < frames_; ++i) Base::StoreColumns(skewed[i], plane, t + i, step - i);
  }

  template <bool kKeep>
  void SweepAlpha(int64_t strip) {
    Node* const kept = kept_ + strip % kStrips * steps_;
    const auto up = [](Value v, Value in) { return Value{ShiftUp(v.m, in.m), ShiftUp(v.e, in.e)}; };
    Value alpha = up(Zero<S>(), alpha_row_.Get(1 - kWidth)), last_label = Zero<S>();
    for (int64_t block = 0; block < steps_; block += kWidth) {
      F log_blank[kWidth], log_label[kWidth];
      constexpr int64_t kNext = kKeep ? -kWidth : kWidth;
      Skew(log_blank_, strip * kWidth, block, labels_ + 1, 0, kNext, log_blank);
      Skew(log_label_, strip * kWidth, block, labels_, -kInfinity, kNext, log_label);
      alpha = Normalize(alpha);
      for (int64_t step = block; step < Clamp(block + kWidth, 0, steps_); ++step) {
        const Value p_blank = Base::Probability(log_blank[step - block]);
        const Value p_label = Base::Probability(log_label[step - block]);
        if (kKeep) kept[step] = {alpha, p_blank, p_label};
        const Value blank = alpha * p_blank, label = alpha * p_label;
        const Value down = kStandard ? blank : blank + last_label;
        const Value in = up(down, alpha_row_.Get(step + 2 - kWidth));
        alpha = kStandard ? in + label : in;
        last_label = label;
        alpha_row_.Set(step + 1 - kWidth, down, kWidth - 1);
      }
    }
    NormalizeRow(alpha_row_);
  }

  void SweepBeta(int64_t strip) {
    const Node* const kept = kept_ + strip % kStrips * steps_;
    Value beta = Zero<S>(), last_below = Zero<S>();
    for (int64_t block = (steps_ - 1) / kWidth * kWidth; block >= 0; block -= kWidth) {
      F grad_blank[kWidth], grad_label[kWidth];
      beta = Normalize(beta);
      int64_t step = block + kWidth;
      for (; step > steps_; --step) grad_blank[step - 1 - block] = grad_label[step - 1 - block] = F{};
      while (step-- > block) {
        const Node& node = kept[step];
        const Value in = beta_row_.Get(step + 1 - kWidth);
        const Value below = {ShiftDown(beta.m, in.m), ShiftDown(beta.e, in.e)};
        const Value blank = node.blank * below, label = node.label * (kStandard ? beta : last_below);
        const auto posterior = [&](Value v) { return node.alpha.m * v.m * PowerOfTwo<S>(node.alpha.e + v.e); };
        grad_blank[step - block] = posterior(blank);
        grad_label[step - block] = posterior(label);
        beta = blank + label;
        last_below = below;
        beta_row_.Set(step, beta, 0);
      }
      Unskew(grad_blank, Base::GradPlane(0), strip * kWidth, block);
      Unskew(grad_label, Base::GradPlane(1), strip * kWidth, block);
    }
    NormalizeRow(beta_row_);
  }

  const int64_t steps_;  // steps of a sweep over a strip
  const A *const log_blank_, *const log_label_;
  const int64_t row_size_;
  Row alpha_row_, beta_row_;  // alpha that enters the strip from the frame before; beta of the frame after it
  Node* kept_;                // [kStrips, steps_] skewed nodes from one checkpoint to the next
};

template <class A>
void Run(const LatticeArgs& args, int64_t sequence) {
  if (SequencePlanes<A>::StoreNoFrames(args, sequence)) return;
  IsMonotonic(args.topology) ? UnitLatticeOfSequence<A, false>(args, sequence).Run()
                             : UnitLatticeOfSequence<A, true>(args, sequence).Run();
}

void UnitLattice(bool is_double, const LatticeArgs& args, int64_t sequence) {
  is_double ? Run<double>(args, sequence) : Run<float>(args, sequence);
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
