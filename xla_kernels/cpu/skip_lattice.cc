// Lattice of one sequence with arcs that skip frames: any table of arcs (multi-blank, token and duration). Alpha, beta,
// and minus the arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Frames are taken one by one. First the arcs from earlier frames are added, a vector of columns at a time, since they
// do not depend on the frame itself. Then a scan over the columns adds arcs that stay in the frame (0, 1); each vector
// takes log2(width) steps. The workspace keeps all alphas; thread-local scratch keeps betas of as many frames as the
// longest arc spans. A log-probability is read for the last time before its gradient is written, so the gradients may
// overwrite them.
//
// Why not the unit-step kernel's wavefront: it keeps one frame per lane. Here each lane would also need the values of
// as many earlier frames as the longest arc spans. lab/notes/cpu.md has times.
#include "xla_kernels/cpu/lattice.h"
#include "xla_kernels/cpu/lattice_planes.h"
#include "xla_kernels/cpu/scratch.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class A>
class SkipLatticeOfSequence : SequencePlanes<A> {
  using Base = SequencePlanes<A>;
  using S = typename Base::S;
  using F = typename Base::F;
  using I = typename Base::I;
  using Exponent = typename Base::Exponent;
  using Value = typename Base::Value;
  using Row = typename Base::Row;
  using One = Extended<Scalar<A>>;  // the value of one column
  using Base::args_, Base::frames_, Base::kWidth, Base::labels_, Base::sequence_;

  // Zeros on either side of a row, since vectors may begin a column early and end late.
  static constexpr int64_t kMargin = kSkipMargin;
  static_assert(kWidth <= kMargin);

 public:
  SkipLatticeOfSequence(const LatticeArgs& args, int64_t sequence)
      : Base(args, sequence), topology_(args.topology), row_size_(args.columns + 2 * kMargin) {
    for (int k = 0; k < topology_.num_arcs; ++k) {
      const int64_t dt = Clamp(topology_.dt[k], 0, frames_);  // no path takes a longer one
      if (dt > longest_) longest_ = dt;
      stays_ |= topology_.dt[k] == 0;
    }
    const int64_t rows = longest_ + 3;  // betas of frames t ... t + longest_, end_, within_
    betas_ = static_cast<A*>(ThreadScratch((2 * rows + topology_.num_planes) * row_size_ * sizeof(A)));
    grads_ = betas_ + 2 * rows * row_size_;
    end_ = RowAt(betas_, longest_ + 1);
    within_ = RowAt(betas_, longest_ + 2);
    Clear(within_);
  }

  void Run() {
    for (int64_t t = 0; t < frames_; ++t) AlphaOfFrame(t);
    One z = Likelihood();
    if (!Base::StoreLoss(z.m, z.e)) return;
    // The recursion of beta is linear: started from -1 / z, it yields minus the posteriors.
    Clear(end_);
    end_.m[labels_] = -1 / z.m;
    end_.e[labels_] = -z.e;
    for (int64_t t = frames_; t-- > 0;) BetaOfFrame(t);
    Base::FinishGradient(true);
  }

 private:
  Row RowAt(A* rows, int64_t number) const {
    A* const m = rows + number * 2 * row_size_ + kMargin;
    return {m, reinterpret_cast<Exponent*>(m + row_size_)};
  }
  Row Alpha(int64_t t) const {
    return RowAt(static_cast<A*>(args_.workspace) + sequence_ * kSkipWorkspace.Elements(args_.frames, args_.columns),
                 t);
  }
  A* GradRow(int64_t plane) const { return grads_ + plane * row_size_; }
  Row Beta(int64_t t) const { return RowAt(betas_, t % (longest_ + 1)); }

  void Clear(const Row& row) const {
    for (int64_t u = -kMargin; u < row_size_ - kMargin; ++u) row.m[u] = 0, row.e[u] = S::kZero;
  }
  // Clears the margins that vectors of the row do not write.
  void ClearMargins(const Row& row) const {
    for (int64_t u = -kMargin; u < 0; ++u) row.m[u] = 0, row.e[u] = S::kZero;
    for (int64_t u = (labels_ / kWidth + 1) * kWidth; u < row_size_ - kMargin; ++u) row.m[u] = 0, row.e[u] = S::kZero;
  }

  // Log-probabilities of arc k from nodes (t, u), (t, u + 1), ...; -inf where it would lead beyond the last column.
  F LogArcs(int k, int64_t t, int64_t u) const {
    const int64_t n = labels_ + 1 - topology_.du[k];
    const F x = Base::LoadColumns(Base::LogPlane(topology_.plane[k]), t, u, n);
    return topology_.other[k] < 0 ? x : x + Base::LoadColumns(Base::LogPlane(topology_.other[k]), t, u, n);
  }

  static One Get(const Row& row, int64_t u) { return {row.m[u], row.e[u]}; }

  // y[i] = x[i] + arc[i] y[i - 1], or from the last lane down y[i] = x[i] + arc[i] y[i + 1]. All lanes of *before hold
  // the y before the first lane; Scan replaces it with the one before the next vector.
  template <bool kDown>
  static Value Scan(Value x, Value arc, Value* before) {
    ScanSteps<1, kDown>(&x, &arc);
    const Value y = Normalize(x + arc * *before);
    constexpr int kLast = kDown ? 0 : kWidth - 1;
    *before = {Broadcast(y.m[kLast]), I{} + y.e[kLast]};
    return y;
  }
  // x: sums over paths of the last kBy lanes; arc: products over as many arcs.
  template <int kBy, bool kDown>
  static void ScanSteps(Value* x, Value* arc) {
    if constexpr (kBy < kWidth) {
      const auto shift = [](Value v, Value in) {
        return Value{ShiftBy<kBy, kDown>(v.m, in.m), ShiftBy<kBy, kDown>(v.e, in.e)};
      };
      *x = *x + *arc * shift(*x, Zero<S>());
      *arc = *arc * shift(*arc, {Broadcast(A(1)), I{}});
      arc->e = S::Max(arc->e, I{} + S::kZero);  // else exponents of products of zeros overflow
      ScanSteps<2 * kBy, kDown>(x, arc);
    }
  }

  void AlphaOfFrame(int64_t t) {
    const Row alpha = Alpha(t);
    ClearMargins(alpha);
    for (int64_t u = 0; u <= labels_; u += kWidth) {
      Value sum = Zero<S>(), within = Zero<S>();
      if (t == 0 && u == 0) sum.m[0] = 1, sum.e[0] = 0;
      for (int k = 0; k < topology_.num_arcs; ++k) {
        const int64_t dt = topology_.dt[k], du = topology_.du[k];
        if (t + dt >= frames_ || dt == 0) {
          const F log_arcs = LogArcs(k, t, u);
          Base::Check(log_arcs);
          if (dt == 0) within = within + Base::Probability(log_arcs);
        }
        if (dt == 0 || dt > t) continue;
        const F log_arcs = LogArcs(k, t - dt, u - du);
        Base::Check(log_arcs);
        sum = sum + Alpha(t - dt).Get(u - du) * Base::Probability(log_arcs);
      }
      alpha.Set(u, Normalize(sum));
      within_.Set(u, Normalize(within));
    }
    if (!stays_) return;
    Value last = Zero<S>();  // last column of the vector before
    for (int64_t u = 0; u <= labels_; u += kWidth) alpha.Set(u, Scan<false>(alpha.Get(u), within_.Get(u - 1), &last));
  }

  One Likelihood() const {
    One z = Zero<Scalar<A>>();
    for (int k = 0; k < topology_.num_arcs; ++k) {
      const int64_t t = frames_ - topology_.dt[k], u = labels_ - topology_.du[k];
      if (!topology_.may_end[k] || t < 0 || t == frames_ || u < 0) continue;
      const Value arc = Base::Probability(LogArcs(k, t, u));
      z = Normalize(z + Get(Alpha(t), u) * One{arc.m[0], arc.e[0]});
    }
    return z;
  }

  void BetaOfFrame(int64_t t) {
    const Row alpha = Alpha(t), beta = Beta(t);
    ClearMargins(beta);
    for (int p = 0; p < topology_.num_planes; ++p) {
      for (int64_t u = 0; u <= labels_; u += kWidth) Store(F{}, GradRow(p) + u);
    }
    const auto add_posterior = [&](int k, int64_t u, Value through) {
      const Value a = alpha.Get(u);
      const F minus_posterior = a.m * through.m * PowerOfTwo<S>(a.e + through.e);
      for (const int64_t p : {topology_.plane[k], topology_.other[k]}) {
        if (p >= 0) Store(Load(GradRow(p) + u) + minus_posterior, GradRow(p) + u);
      }
    };
    for (int64_t u = 0; u <= labels_; u += kWidth) {
      Value sum = Zero<S>(), within = Zero<S>();
      for (int k = 0; k < topology_.num_arcs; ++k) {
        const int64_t dt = topology_.dt[k], to = t + dt;
        if (dt == 0) {
          within = within + Base::Probability(LogArcs(k, t, u));
        } else if (to < frames_ || (to == frames_ && topology_.may_end[k])) {
          const Row& next = to == frames_ ? end_ : Beta(to);
          const Value through = Base::Probability(LogArcs(k, t, u)) * next.Get(u + topology_.du[k]);
          add_posterior(k, u, through);
          sum = sum + through;
        }
      }
      beta.Set(u, Normalize(sum));
      within_.Set(u, Normalize(within));
    }
    Value next = Zero<S>();
    for (int64_t u = labels_ / kWidth * kWidth; stays_ && u >= 0; u -= kWidth) {
      beta.Set(u, Scan<true>(beta.Get(u), within_.Get(u), &next));
    }
    for (int k = 0; k < topology_.num_arcs; ++k) {
      for (int64_t u = 0; topology_.dt[k] == 0 && u <= labels_; u += kWidth) {
        add_posterior(k, u, Base::Probability(LogArcs(k, t, u)) * beta.Get(u + 1));
      }
    }
    for (int p = 0; p < topology_.num_planes; ++p) {
      for (int64_t u = 0; u <= labels_; u += kWidth) Base::StoreColumns(Load(GradRow(p) + u), Base::GradPlane(p), t, u);
    }
  }

  const Topology& topology_;
  const int64_t row_size_;
  int64_t longest_ = 0;  // frames that the longest arc spans
  bool stays_ = false;   // whether any arc stays in its frame
  A* betas_;             // betas of longest_ + 1 frames, frame t in row t mod (longest_ + 1)
  A* grads_;             // gradient of one frame, a row for each plane
  Row end_;              // beta of the terminal node
  Row within_;           // probability of the arcs to the next column within the frame
};

template <class A>
void SkipLatticeOf(const LatticeArgs& args, int64_t sequence) {
  if (!SequencePlanes<A>::StoreNoFrames(args, sequence)) SkipLatticeOfSequence<A>(args, sequence).Run();
}

void SkipLattice(bool is_double, const LatticeArgs& args, int64_t sequence) {
  is_double ? SkipLatticeOf<double>(args, sequence) : SkipLatticeOf<float>(args, sequence);
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
