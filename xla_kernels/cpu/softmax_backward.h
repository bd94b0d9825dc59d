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
  for (int i = 0; i < n; ++i) total += ct(i);
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

template <class T, bool kBernoulli>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using S = Simd<A>;
  using F = typename S::F;
  using I = typename S::I;
  using Exponent = typename S::Exponent;
  constexpr int kWidth = S::kWidth;
  const EmissionShape& shape = args.shape;
  const bool padding = shape.classes < kWidth;
  const int64_t n = padding ? kWidth : shape.classes, row_size = shape.row_size();
  const int64_t stride = padding ? kWidth : row_size;
  const int64_t ahead = n <= kBlock ? kWidth * n : 2 * kBlock;
  const int num_blanks = shape.num_blanks;
  const bool is_short = n <= kShortRow * kWidth, stream = IsStreamed<T>(row_size);
  const Exponent blank = shape.blanks[0];
  const int64_t anchor = Anchor(shape);
  const I lane_number = LaneNumbers<A>(std::make_integer_sequence<int, kWidth>{});
  // exp(logit - base). Only a Bernoulli blank can be above the base by more than Exp takes; its result is not used.
  const auto exp = [](F x) __attribute__((always_inline)) { return kBernoulli ? ExpOfAny(x) : Exp(x); };

  const bool has_ends = shape.durations > 0 && DurationHead<T>::IsShort(row_size, shape.durations);
  if (begin >= end) return;
  RowCursor cursor(shape, args.label, args.num_frames, begin);
  for (int64_t r = begin; r < end; r += kWidth) {
    const int count = end - r < kWidth ? end - r : kWidth;
    Exponent labels[kWidth];
    A scales[kWidth] = {}, limits[kWidth] = {};
    cursor.template Next<A>(count, labels, [&](int64_t sequence, int first, int last) {
      const A scale = static_cast<const A*>(args.scale)[sequence];
      const A clamp = static_cast<const A*>(args.clamp)[sequence];
      for (int lane = first; lane < last; ++lane) {
        scales[lane] = scale;
        // No limit: kInfinity chooses the path without Scaled, where 0 times an infinite scale would give NaN.
        limits[lane] = clamp > 0 ? clamp : scale - scale == 0 ? kInfinity<A> : kLargest<A>;
      }
    });
    const I label = Load(labels);
    const F scale = Load(scales), limit = Load(limits);

    const auto ct = [&](int arc) {
      return LoadLanes(static_cast<const A*>(arc < num_blanks ? args.ct_blank[arc] : args.ct_label) + r, count);
    };
    const auto ct_duration = [&](int i) { return LoadLanes(static_cast<const A*>(args.ct_duration[i]) + r, count); };
    F sum = {};
    auto zero = sum == sum;
    for (int arc = 0; arc <= num_blanks; ++arc) {
      sum += ct(arc);
      zero &= ct(arc) == A(0);
    }
    for (int i = 0; i < shape.durations; ++i) zero &= ct_duration(i) == A(0);
    // From here on, rows without cotangents count as outside: they are not read.
    const I used_label = zero ? I{} + kOutside : label;
    const auto outside = used_label == kOutside;
    Store(used_label, labels);
    const T* const logits = static_cast<const T*>(args.logits) + r * row_size;
    T* const dlogits = static_cast<T*>(args.dlogits) + r * row_size;

    A of_blank[kWidth];  // gradient of a Bernoulli blank
    if constexpr (kBernoulli) {
      const auto same = label == blank;
      const F z = Pick(logits, outside ? I{} : lane_number * Exponent(row_size) + blank);
      const F ct_other = same ? ct(1) - ct(1) : ct(1), ct_blank = same ? sum : ct(0);
      const auto [yes, no] = Sigmoids(z);
      sum = ct_other;
      Store(Scaled(ct_blank * no - ct_other * yes, limit, scale), of_blank);
    }
    const T* x = logits;
    T* dx = dlogits;
    T padded[kWidth * kWidth];
    if (padding) {
      PadRows<false>(x, shape.classes, row_size, 0, labels, padded);
      x = dx = padded;
    }
    // The softmax is exp(x - base) / total. Usually the base is the anchor, and norm the total. If norm is lse, which
    // is rare, the row is summed once more, since a large lse is rounded too much.
    const F norm = LoadLanes(static_cast<const A*>(args.norm) + r, count);
    const auto anchored = (norm > A(0)) & (norm < kTiny<A>);
    F total = anchored ? norm * (1 / kSumScale<A>) : Broadcast(A(1));
    A bases[kWidth] = {}, minus_sums[kWidth], factors[kWidth];
    if (shape.normalize && Any(~anchored & ~outside)) {
      const RowReader<T, kBernoulli> reader(n, shape.blanks[0]);
      A totals[kWidth];
      Store(total, totals);
      for (int lane = 0; lane < count; ++lane) {
        if (anchored[lane] || labels[lane] == kOutside) continue;
        const auto safe = SafeSumExp(reader, x + lane * stride);
        bases[lane] = safe.sum == 0 ? 0 : safe.max;
        totals[lane] = safe.sum == 0 ? 1 : safe.sum;
      }
      total = Load(totals);
    }
    sum /= total;
    Store(F{} - sum, minus_sums);  // no -0
    Store((F{} - sum) * scale, factors);
    T arc_dx[kMaxBlanks + 1][kWidth];  // logits of classes with arcs, saved from being overwritten; then gradients
    for (int arc = 0; !is_short && arc <= num_blanks; ++arc) Store(F{}, arc_dx[arc]);
    F ends[kWidth];
    for (int lane = 0; has_ends && lane < kWidth; ++lane) ends[lane] = F{};
    for (int lane = 0; lane < count; ++lane) {
      const T* const row = x + lane * stride;
      T* const row_dx = dx + lane * stride;
      if (labels[lane] == kOutside) {
        if (!stream) {
          FillRow(F{}, n, row_dx);
          continue;
        }
        int last = lane;
        while (last + 1 < count && labels[last + 1] == kOutside) ++last;
        StreamZeros(row_dx, (last + 1 - lane) * row_size);
        lane = last;
        continue;
      }
      if (has_ends) ends[lane] = DurationHead<T>::End(logits + lane * row_size, row_size);
      if (anchored[lane]) bases[lane] = LoadAll(row + anchor)[0];
      const F base = Broadcast(bases[lane]), minus_sum = Broadcast(minus_sums[lane]), scale = Broadcast(scales[lane]);
      const F limit = Broadcast(limits[lane]), factor = Broadcast(factors[lane]);
      const F others = minus_sum == minus_sum ? F{} : minus_sum;  // without a softmax: 0, or NaN
      if (is_short) {
        WithShortRow(row, n, [&](auto g) __attribute__((always_inline)) {
          g.Map([&](F v) { return shape.normalize ? exp(v - base) * minus_sum : others; });
          g.Add(labels[lane], static_cast<const A*>(args.ct_label)[r + lane]);
          for (int arc = 0; !kBernoulli && arc < num_blanks; ++arc) {
            g.Add(shape.blanks[arc], static_cast<const A*>(args.ct_blank[arc])[r + lane]);
          }
          if (limits[lane] == kInfinity<A>) {
            g.Map([&](F v) { return v * scale; });
          } else {
            g.Map([&](F v) { return Scaled(v, limit, scale); });
          }
          if (kBernoulli) g.Set(blank, of_blank[lane]);
          g.StoreTo(row_dx);
        });
        continue;
      }
      for (int arc = 0; arc < num_blanks; ++arc) arc_dx[arc][lane] = row[shape.blanks[arc]];
      if (0 <= labels[lane] && labels[lane] < shape.classes) arc_dx[num_blanks][lane] = row[labels[lane]];
      if (!shape.normalize) {
        FillRow(Scaled(others, limit, scale), n, row_dx);
      } else if (limits[lane] == kInfinity<A>) {
        MapLongRow(row, n, row_dx, ahead, [&](F v) { return exp(v - base) * factor; });
      } else {
        MapLongRow(row, n, row_dx, ahead, [&](F v) { return Scaled(exp(v - base) * minus_sum, limit, scale); });
      }
    }

    for (int arc = 0; !is_short && arc <= num_blanks; ++arc) {
      F arc_ct = {};
      for (int other = 0; other <= num_blanks; ++other) {
        if (arc < num_blanks && other < num_blanks) {
          if (shape.blanks[arc] == shape.blanks[other]) arc_ct += ct(other);
        } else if (arc == other) {
          arc_ct += ct(other);
        } else {
          const Exponent blank = shape.blanks[arc < num_blanks ? arc : other];
          arc_ct += label == blank ? ct(other) : F{};
        }
      }
      // ExpOfAny, since lanes without this arc do not hold a logit of their row.
      const F softmax = shape.normalize ? ExpOfAny(Load(arc_dx[arc]) - Load(bases)) : F{};
      F gradient = Scaled(arc_ct - softmax * sum, limit, scale);
      if constexpr (kBernoulli) gradient = arc == 0 || label == blank ? Load(of_blank) : gradient;
      Store(gradient, arc_dx[arc]);
      for (int lane = 0; lane < count; ++lane) {
        const int64_t k = labels[lane] == kOutside ? -1 : arc < num_blanks ? shape.blanks[arc] : labels[lane];
        if (0 <= k && k < shape.classes) dx[lane * stride + k] = arc_dx[arc][lane];
      }
    }
    for (int lane = 0; padding && lane < count; ++lane) {
      for (int64_t k = 0; k < shape.classes; ++k) dlogits[lane * row_size + k] = padded[lane * kWidth + k];
    }
    if (shape.durations > 0) BackwardDurations<T>(args, r, count, labels, ends, limit, scale);
  }
  if (stream) Fence();
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
