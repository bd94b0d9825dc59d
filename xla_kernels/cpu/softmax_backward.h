// Cotangents of the arcs -> gradient of the logits, a group of rows at a time; softmax_emission.cc explains it.
#pragma once

#include "xla_kernels/cpu/softmax_rows.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

// A row of n >= kWidth elements in registers. The last vector ends with the row and may overlap the one before.
constexpr int kShortRow = 4;  // vectors, at most

template <class T, int kVectors>
class ShortRow {
 public:
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;

  [[gnu::always_inline]] ShortRow(const T* x, int64_t n) : n_(n) {
    for (int i = 0; i < kVectors; ++i) v_[i] = Load(x + Begin(i));
  }
  template <class Function>
  [[gnu::always_inline]] void Map(Function f) {
    for (int i = 0; i < kVectors; ++i) v_[i] = f(v_[i]);
  }
  [[gnu::always_inline]] void Add(int64_t k, A x) {  // to element k, if there is one
    for (int i = 0; i < kVectors; ++i) v_[i] += IsLane<A>(k - Begin(i)) ? Broadcast(x) : F{};
  }
  [[gnu::always_inline]] void Set(int64_t k, A x) {
    for (int i = 0; i < kVectors; ++i) v_[i] = IsLane<A>(k - Begin(i)) ? Broadcast(x) : v_[i];
  }
  [[gnu::always_inline]] void StoreTo(T* dx) const {
    for (int i = 0; i < kVectors; ++i) Store(v_[i], dx + Begin(i));
  }

 private:
  int64_t Begin(int i) const { return i + 1 < kVectors ? i * Simd<A>::kWidth : n_ - Simd<A>::kWidth; }

  const int64_t n_;
  F v_[kVectors];
};

template <class T, class Function>
[[gnu::always_inline]] inline void WithShortRow(const T* x, int64_t n, Function f) {
  switch ((n - 1) / Simd<Accumulator<T>>::kWidth) {
    case 0:
      return f(ShortRow<T, 1>(x, n));
    case 1:
      return f(ShortRow<T, 2>(x, n));
    case 2:
      return f(ShortRow<T, 3>(x, n));
  }
  f(ShortRow<T, kShortRow>(x, n));
}

// dx[k] = f(x[k]) for the n >= kWidth elements of a row; dx may be x. The last vector ends with the row and may overlap
// the one before, so each is read before the one before it is written. The second begins where dx is aligned.
template <class T, class Function>
inline void MapLongRow(const T* x, int64_t n, T* dx, int64_t ahead, Function f) {
  constexpr int kWidth = Simd<Accumulator<T>>::kWidth;
  constexpr int64_t kBytes = kWidth * sizeof(T);
  const int64_t head = n < 8 * kWidth ? kWidth : kWidth - int64_t(reinterpret_cast<uintptr_t>(dx) % kBytes / sizeof(T));
  int64_t at = 0;
  auto v = Load(x);
  for (int64_t next = head; next < n; next += kWidth) {
    if (next > n - kWidth) next = n - kWidth;
    __builtin_prefetch(x + next + ahead);
    const auto next_v = Load(x + next);
    Store(f(v), dx + at);
    v = next_v;
    at = next;
  }
  Store(f(v), dx + at);
}

template <class T, class F>
inline void FillRow(F value, int64_t n, T* dx) {
  for (int64_t i = 0; i < n - Width<F>(); i += Width<F>()) Store(value, dx + i);
  Store(value, dx + n - Width<F>());
}

// The clipped and scaled gradient. 0 stays 0 at any scale.
template <class F>
[[gnu::always_inline]] inline F Scaled(F v, F limit, F scale) {
  using A = std::decay_t<decltype(v[0])>;
  v = Max(-limit, Min(limit, v));
  return v == A(0) ? F{} : v * scale;
}

// Whether rows of zeros bypass the caches.
template <class T>
inline bool IsStreamed(int64_t row_size) {
  return row_size * int64_t(sizeof(T)) >= kStreamedBytes;
}

// Gradients of the durations of rows r ... r + count - 1, zero where the label is kOutside. `ends` as for DurationHead.
template <class T, class F = typename DurationHead<T>::F>
[[gnu::always_inline]] inline void BackwardDurations(const EmissionBackwardArgs& args, int64_t r, int count,
                                                     const typename Simd<Accumulator<T>>::Exponent* labels, F* ends,
                                                     F limit, F scale) {
  using A = Accumulator<T>;
  constexpr int kWidth = Width<F>();
  const EmissionShape& shape = args.shape;
  const int64_t row_size = shape.row_size();
  const int n = shape.durations;
  const auto ct = [&](int i) { return LoadLanes(static_cast<const A*>(args.ct_duration[i]) + r, count); };
  const auto outside = Load(labels) == kOutside;
  const DurationHead<T> head(static_cast<const T*>(args.logits) + r * row_size, row_size, labels, ends, n,
                             shape.normalize);
  F total = {}, gradients[kMaxDurations];
  for (int i = 0; i < n && args.total == nullptr; ++i) total += ct(i);
  total = head.sum() == A(0) ? F{} : total / head.sum();
  for (int i = 0; i < n; ++i) {
    const F gradient = Scaled(ct(i) - head.exp(i) * total, limit, scale);
    gradients[i] = outside ? F{} : gradient;
  }
  const auto each_row = [&](auto write) {
    for (int lane = 0; lane < count; ++lane) {
      if (IsStreamed<T>(row_size) && labels[lane] == kOutside) continue;  // already written
      write(lane, static_cast<T*>(args.dlogits) + (r + lane + 1) * row_size);
    }
  };
  if (DurationHead<T>::IsShort(row_size, n)) {
    F rows[kWidth] = {};
    for (int i = 0; i < n; ++i) rows[kWidth - n + i] = gradients[i];
    Transpose(rows);
    each_row([&](int lane, T* end) { StoreLast(rows[lane], n, end); });
    return;
  }
  for (int i = 0; i < n; ++i) {
    T lanes[kWidth];
    Store(gradients[i], lanes);
    each_row([&](int lane, T* end) { end[i - n] = lanes[lane]; });
  }
}

// What a backward pass keeps of a group of rows in memory: see RowBuffers.
template <class T>
struct BackwardBuffers : RowBuffers<T> {
  using A = Accumulator<T>;
  static constexpr int kWidth = Simd<A>::kWidth;
  A scales[kWidth], limits[kWidth];  // limit: kInfinity for none
  A bases[kWidth], minus_sums[kWidth], factors[kWidth];
  A of_blank[kWidth];                // gradient of a Bernoulli blank
  T arc_dx[kMaxBlanks + 1][kWidth];  // logits of classes with arcs, saved from being overwritten; then gradients
};

// A backward pass over rows of a call. Run takes one group after the other through the steps, which are inlined: what
// one of them leaves to the next stays in registers.
//
// common/shape.h derives the gradient. Here C is the sum of a row's cotangents, or args.total, and softmax_k = exp(z_k
// - base) / total with any base: a row is exp(z_k - base) * minus_sum, minus_sum = -C / total, and then its few classes
// with arcs are corrected by their cotangents. Without a limit, minus_sum and `scale` are one factor.
template <class T, bool kBernoulli>
class BackwardPass {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  static constexpr int kWidth = S::kWidth;

 public:
  [[gnu::always_inline]] BackwardPass(const EmissionBackwardArgs& args, BackwardBuffers<T>& buffers)
      : args_(args),
        shape_(args.shape),
        group_(args.shape, buffers),
        buffers_(buffers),
        num_blanks_(args.shape.num_blanks),
        is_short_(group_.n <= kShortRow * kWidth),
        is_streamed_(IsStreamed<T>(group_.row_size)),
        ahead_(group_.n <= kBlock ? kWidth * group_.n : 2 * kBlock) {}

  [[gnu::always_inline]] void Run(int64_t begin, int64_t end) {
    if (begin >= end) return;  // there may be no columns
    RowCursor cursor(shape_, args_.label, args_.num_frames, begin);
    for (int64_t r = begin; r < end; r += kWidth) {
      group_.r = r;
      group_.count = end - r < kWidth ? end - r : kWidth;
      ReadLabels(cursor);
      ReadCotangents();
      group_.template Begin<false>(args_.logits, 0);
      dlogits_ = static_cast<T*>(args_.dlogits) + r * group_.row_size;
      dx_ = group_.is_padded ? buffers_.padded : dlogits_;
      if (Any(outside_)) WriteZeros();
      if (Any(~outside_)) WriteRows();
      if (group_.is_padded) CopyPaddedRows();
      if (shape_.durations > 0) {
        BackwardDurations<T>(args_, r, group_.count, buffers_.labels, buffers_.ends, limit_, scale_);
      }
    }
    if (is_streamed_) Fence();
  }

 private:
  [[gnu::always_inline]] F LoadPlane(const void* plane) const {
    return LoadLanes(static_cast<const A*>(plane) + group_.r, group_.count);
  }
  [[gnu::always_inline]] F Cotangent(int arc) const {
    return LoadPlane(arc < num_blanks_ ? args_.ct_blank[arc] : args_.ct_label);
  }
  // exp(logit - base). Only a Bernoulli blank can be above the base by more than Exp takes; its result is not used.
  [[gnu::always_inline]] static F Power(F x) { return kBernoulli ? ExpOfAny(x) : Exp(x); }

  [[gnu::always_inline]] void ReadLabels(RowCursor& cursor) {
    for (int lane = 0; lane < kWidth; ++lane) buffers_.scales[lane] = buffers_.limits[lane] = 0;
    cursor.template Next<A>(group_.count, buffers_.labels, [&](int64_t sequence, int first, int last) {
      const A scale = static_cast<const A*>(args_.scale)[sequence];
      const A clamp = static_cast<const A*>(args_.clamp)[sequence];
      for (int lane = first; lane < last; ++lane) {
        buffers_.scales[lane] = scale;
        // No limit: kInfinity chooses the path without Scaled, where 0 times an infinite scale would give NaN.
        buffers_.limits[lane] = clamp > 0 ? clamp : scale - scale == 0 ? kInfinity<A> : kLargest<A>;
      }
    });
    label_ = Load(buffers_.labels);
    scale_ = Load(buffers_.scales);
    limit_ = Load(buffers_.limits);
  }

  // Rows without cotangents, as those of nodes that no path visits, have a gradient of zero. They count as outside from
  // here on: they are not read.
  [[gnu::always_inline]] void ReadCotangents() {
    sum_ = F{};
    I is_zero = ~I{};
    for (int arc = 0; arc <= num_blanks_; ++arc) {
      sum_ += Cotangent(arc);
      is_zero &= (I)(Cotangent(arc) == A(0));
    }
    for (int i = 0; i < shape_.durations; ++i) is_zero &= (I)(LoadPlane(args_.ct_duration[i]) == A(0));
    if (args_.total != nullptr) {
      sum_ = LoadPlane(args_.total);
      is_zero &= (I)(sum_ == A(0));
    }
    const I label = is_zero ? I{} + kOutside : label_;
    outside_ = (I)(label == kOutside);
    Store(label, buffers_.labels);
  }

  // The gradients of Bernoulli blanks. What the softmax multiplies is the cotangent of the label alone.
  [[gnu::always_inline]] void FindBlanks() {
    const Exponent blank = shape_.blanks[0];
    const I lane_number = LaneNumbers<A>(std::make_integer_sequence<int, kWidth>{});
    const auto same = label_ == blank;
    const F z = Pick(group_.logits, outside_ ? I{} : lane_number * Exponent(group_.row_size) + blank);
    const F ct_other = same ? Cotangent(1) - Cotangent(1) : Cotangent(1), ct_blank = same ? sum_ : Cotangent(0);
    const auto [yes, no] = Sigmoids(z);
    sum_ = ct_other;
    Store(Scaled(ct_blank * no - ct_other * yes, limit_, scale_), buffers_.of_blank);
  }

  // The softmax is exp(x - base) / total. Usually the base is the anchor, and norm the total. If norm is lse, which is
  // rare, the row is summed once more, since a large lse is rounded too much.
  [[gnu::always_inline]] void FindSoftmax() {
    const F norm = LoadPlane(args_.norm);
    anchored_ = (I)((norm > A(0)) & (norm < kTiny<A>));
    F total = anchored_ ? norm * (1 / kSumScale<A>) : Broadcast(A(1));
    for (int lane = 0; lane < kWidth; ++lane) buffers_.bases[lane] = 0;
    if (shape_.normalize && Any(~anchored_ & ~outside_)) total = SumAgain(total);
    sum_ /= total;
    Store(F{} - sum_, buffers_.minus_sums);  // no -0
    Store((F{} - sum_) * scale_, buffers_.factors);
  }

  [[gnu::always_inline]] F SumAgain(F total) {
    const RowReader<T, kBernoulli> reader(group_.n, shape_.blanks[0]);
    A totals[kWidth];
    Store(total, totals);
    for (int lane = 0; lane < group_.count; ++lane) {
      if (anchored_[lane] || group_.IsOutside(lane)) continue;
      const auto safe = SafeSumExp(reader, group_.x + lane * group_.stride);
      buffers_.bases[lane] = safe.sum == 0 ? 0 : safe.max;
      totals[lane] = safe.sum == 0 ? 1 : safe.sum;
    }
    return Load(totals);
  }

  // Zeros for the rows outside; neighbouring long ones in one piece.
  [[gnu::always_inline]] void WriteZeros() {
    for (int lane = 0, next; lane < group_.count; lane = next) {
      next = lane + 1;
      if (!group_.IsOutside(lane)) continue;
      T* const row_dx = dx_ + lane * group_.stride;
      if (!is_streamed_) {
        FillRow(F{}, group_.n, row_dx);
        continue;
      }
      while (next < group_.count && group_.IsOutside(next)) ++next;
      StreamZeros(row_dx, (next - lane) * group_.row_size);
    }
  }

  [[gnu::always_inline]] void WriteRows() {
    if constexpr (kBernoulli) FindBlanks();
    FindSoftmax();
    if (is_short_) {
      WriteShortRows();
    } else {
      WriteLongRows();
      CorrectArcs();
    }
  }

  // Calls write(lane, row, its gradient, base) for the rows that are not outside.
  template <class Write>
  [[gnu::always_inline]] void ForRows(Write write) {
    for (int lane = 0; lane < group_.count; ++lane) {
      if (group_.IsOutside(lane)) continue;
      group_.ReadEnd(lane);
      const T* const row = group_.x + lane * group_.stride;
      if (anchored_[lane]) buffers_.bases[lane] = LoadAll(row + group_.anchor)[0];
      write(lane, row, dx_ + lane * group_.stride, Broadcast(buffers_.bases[lane]));
    }
  }
  // The gradient of all classes without an arc where there is no softmax: 0, or NaN.
  [[gnu::always_inline]] static F WithoutSoftmax(F minus_sum) { return minus_sum == minus_sum ? F{} : minus_sum; }

  [[gnu::always_inline]] void WriteShortRows() {
    ForRows([&](int lane, const T* row, T* row_dx, F base) __attribute__((always_inline)) {
      const F minus_sum = Broadcast(buffers_.minus_sums[lane]), scale = Broadcast(buffers_.scales[lane]);
      const F limit = Broadcast(buffers_.limits[lane]), others = WithoutSoftmax(minus_sum);
      WithShortRow(row, group_.n, [&](auto g) __attribute__((always_inline)) {
        g.Map([&](F v) { return shape_.normalize ? Power(v - base) * minus_sum : others; });
        g.Add(buffers_.labels[lane], static_cast<const A*>(args_.ct_label)[group_.r + lane]);
        for (int arc = 0; !kBernoulli && arc < num_blanks_; ++arc) {
          g.Add(shape_.blanks[arc], static_cast<const A*>(args_.ct_blank[arc])[group_.r + lane]);
        }
        if (buffers_.limits[lane] == kInfinity<A>) {
          g.Map([&](F v) { return v * scale; });
        } else {
          g.Map([&](F v) { return Scaled(v, limit, scale); });
        }
        if (kBernoulli) g.Set(shape_.blanks[0], buffers_.of_blank[lane]);
        g.StoreTo(row_dx);
      });
    });
  }

  // As if no class had an arc: CorrectArcs follows.
  [[gnu::always_inline]] void WriteLongRows() {
    for (int arc = 0; arc <= num_blanks_; ++arc) Store(F{}, buffers_.arc_dx[arc]);
    ForRows([&](int lane, const T* row, T* row_dx, F base) __attribute__((always_inline)) {
      const F minus_sum = Broadcast(buffers_.minus_sums[lane]), factor = Broadcast(buffers_.factors[lane]);
      const F limit = Broadcast(buffers_.limits[lane]), scale = Broadcast(buffers_.scales[lane]);
      const Exponent label = buffers_.labels[lane];
      for (int arc = 0; arc < num_blanks_; ++arc) buffers_.arc_dx[arc][lane] = row[shape_.blanks[arc]];
      if (0 <= label && label < shape_.classes) buffers_.arc_dx[num_blanks_][lane] = row[label];
      if (!shape_.normalize) {
        FillRow(Scaled(WithoutSoftmax(minus_sum), limit, scale), group_.n, row_dx);
      } else if (buffers_.limits[lane] == kInfinity<A>) {
        MapLongRow(row, group_.n, row_dx, ahead_, [&](F v) { return Power(v - base) * factor; });
      } else {
        MapLongRow(row, group_.n, row_dx, ahead_,
                   [&](F v) { return Scaled(Power(v - base) * minus_sum, limit, scale); });
      }
    });
  }

  // The sum of the cotangents of all arcs that have the class of `arc`.
  [[gnu::always_inline]] F CotangentOfClass(int arc) const {
    F sum = {};
    for (int other = 0; other <= num_blanks_; ++other) {
      if (arc < num_blanks_ && other < num_blanks_) {
        if (shape_.blanks[arc] == shape_.blanks[other]) sum += Cotangent(other);
      } else if (arc == other) {
        sum += Cotangent(other);
      } else {
        const Exponent blank = shape_.blanks[arc < num_blanks_ ? arc : other];
        sum += label_ == blank ? Cotangent(other) : F{};
      }
    }
    return sum;
  }

  // Writes the gradients of the classes that have arcs, from the logits that WriteLongRows saved.
  [[gnu::always_inline]] void CorrectArcs() {
    for (int arc = 0; arc <= num_blanks_; ++arc) {
      T* const arc_dx = buffers_.arc_dx[arc];
      // ExpOfAny, since lanes without this arc do not hold a logit of their row.
      const F softmax = shape_.normalize ? ExpOfAny(Load(arc_dx) - Load(buffers_.bases)) : F{};
      F gradient = Scaled(CotangentOfClass(arc) - softmax * sum_, limit_, scale_);
      if constexpr (kBernoulli) {
        gradient = arc == 0 || label_ == Exponent(shape_.blanks[0]) ? Load(buffers_.of_blank) : gradient;
      }
      Store(gradient, arc_dx);
      for (int lane = 0; lane < group_.count; ++lane) {
        if (group_.IsOutside(lane)) continue;
        const int64_t k = arc < num_blanks_ ? shape_.blanks[arc] : buffers_.labels[lane];
        if (0 <= k && k < shape_.classes) dx_[lane * group_.stride + k] = arc_dx[lane];
      }
    }
  }

  [[gnu::always_inline]] void CopyPaddedRows() {
    for (int lane = 0; lane < group_.count; ++lane) {
      for (int64_t k = 0; k < shape_.classes; ++k) {
        dlogits_[lane * group_.row_size + k] = buffers_.padded[lane * kWidth + k];
      }
    }
  }

  const EmissionBackwardArgs& args_;
  const EmissionShape& shape_;
  RowGroup<T> group_;
  BackwardBuffers<T>& buffers_;
  const int num_blanks_;
  const bool is_short_, is_streamed_;
  const int64_t ahead_;  // elements from those that are read to those that are prefetched

  // Numbers of the rows of the group.
  I label_ = {}, outside_ = {}, anchored_ = {};
  F sum_ = {}, scale_ = {}, limit_ = {};  // sum: that of cotangents, later over the total of the softmax
  T *dlogits_ = nullptr, *dx_ = nullptr;  // the first gradient as it lies in memory, and as it is written
};

template <class T, bool kBernoulli>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  BackwardBuffers<T> buffers;
  BackwardPass<T, kBernoulli>(args, buffers).Run(begin, end);
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
