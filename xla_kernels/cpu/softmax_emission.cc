#include "xla_kernels/cpu/softmax_emission.h"

#include <math.h>
#include <string.h>

#include "xla_kernels/cpu/simd.h"

namespace jax_rnnt::cpu::JAX_RNNT_TARGET {

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class A>
constexpr A kInfinity = A(__builtin_inf());

// Elements whose maximum is taken before their exponentials: 4 KiB of float, so that they are still in the L1 cache.
constexpr int64_t kBlock = 1024;

// ---- scalars in terms of vectors, so that an element has the same bits wherever it is computed ----

template <class T>
inline Accumulator<T> LoadOne(const T* x) {
  using A = Accumulator<T>;
  if constexpr (std::is_same_v<T, A>) return *x;
  T padded[Simd<A>::kWidth] = {*x};
  return Load(padded)[0];
}

// ---- rows ----

// Calls row(r, b, label) for the rows r in [begin, end); the label of a row behind the frames is kOutside.
template <class Row>
inline void ForEachRow(const EmissionShape& shape, const int32_t* labels, const int32_t* num_frames, int64_t begin,
                       int64_t end, Row row) {
  if (begin >= end) return;
  int64_t u = begin % shape.columns, t = begin / shape.columns % shape.frames;
  int64_t b = begin / shape.columns / shape.frames;
  for (int64_t r = begin; r < end; ++b, t = 0) {
    for (; t < shape.frames && r < end; ++t, u = 0) {
      const int32_t* label = labels + (shape.label_frames == 1 ? b : b * shape.frames + t) * shape.columns;
      const bool inside = t < num_frames[b];
      for (; u < shape.columns && r < end; ++u, ++r) row(r, b, inside ? label[u] : kOutside);
    }
  }
}

template <class A>
struct LogSum {
  A max, sum;  // sum of exp(x - max)
};

// For n >= Width elements.
template <class T>
inline LogSum<Accumulator<T>> SumExp(const T* x, int64_t n) {
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  constexpr int kWidth = Simd<A>::kWidth;

  // The last vector overlaps the one before; what it repeats is blanked out.
  F last = Load(x + n - kWidth);
  if (n % kWidth != 0) {
    for (int lane = 0; lane < kWidth - n % kWidth; ++lane) last[lane] = -kInfinity<A>;
  }
  const int64_t end = n - 1 - (n - 1) % kWidth;  // where the last vector begins

  LogSum<A> total = {-kInfinity<A>, 0};
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const bool final = n - begin <= kBlock;
    const int64_t block_end = final ? end : begin + kBlock;
    F max = final ? last : Broadcast(-kInfinity<A>);
    for (int64_t i = begin; i < block_end; i += kWidth) max = Max(max, Load(x + i));

    const A block_max = MaxOfLanes(max);
    A new_max = total.max > block_max ? total.max : block_max;
    if (new_max == -kInfinity<A>) new_max = 0;  // nothing but zeros so far: keep exp(-inf - max) from being NaN
    const F shift = Broadcast(new_max);
    F sum = final ? Exp(last - shift) : Broadcast(A(0));
    for (int64_t i = begin; i < block_end; i += kWidth) {
      __builtin_prefetch(x + i + 2 * kBlock);
      sum += Exp(Load(x + i) - shift);
    }
    if (begin > 0) total.sum *= Exp(Broadcast(total.max - new_max))[0];
    total = {new_max, total.sum + SumOfLanes(sum)};
  }
  return total;
}

template <class T>
void Forward(const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  constexpr int kWidth = Simd<A>::kWidth;
  constexpr A kNaN = A(__builtin_nan(""));
  const EmissionShape& shape = args.shape;
  const int64_t n = shape.classes;
  A* log_label = static_cast<A*>(args.log_label);
  A* lse = static_cast<A*>(args.lse);

  ForEachRow(shape, args.label, args.num_frames, begin, end, [&](int64_t r, int64_t, int32_t label) {
    const T* x = static_cast<const T*>(args.logits) + r * n;
    bool dead = label == kOutside;
    A shift = 0, log_sum = 0;  // the log of the denominator is their sum
    if (!dead && shape.normalize) {
      LogSum<A> total;
      if (n >= kWidth) {
        total = SumExp(x, n);
      } else {
        T padded[kWidth];
        Store(Broadcast(-kInfinity<A>), padded);
        for (int64_t k = 0; k < n; ++k) padded[k] = x[k];
        total = SumExp(padded, kWidth);
      }
      dead = total.sum == 0;
      shift = total.max;
      log_sum = std::is_same_v<A, double> ? log(total.sum) : logf(total.sum);
    }
    const auto log_prob = [&](int64_t k) {
      if (dead) return -kInfinity<A>;
      const A value = LoadOne(x + k) - shift - log_sum;
      return value == kInfinity<A> ? kNaN : value;
    };
    for (int i = 0; i < shape.num_blanks; ++i) static_cast<A*>(args.log_blank[i])[r] = log_prob(shape.blanks[i]);
    log_label[r] = label < 0 ? -kInfinity<A> : log_prob(label);
    if (label < kOutside || label >= n) log_label[r] = kNaN;
    lse[r] = label == kOutside ? 0 : dead ? -kInfinity<A> : shift + log_sum;
  });
}

template <class T>
void Backward(const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  using A = Accumulator<T>;
  using F = typename Simd<A>::F;
  constexpr int kWidth = Simd<A>::kWidth;
  const EmissionShape& shape = args.shape;
  const int64_t n = shape.classes;

  ForEachRow(shape, args.label, args.num_frames, begin, end, [&](int64_t r, int64_t b, int32_t label) {
    const T* x = static_cast<const T*>(args.logits) + r * n;
    T* dx = static_cast<T*>(args.dlogits) + r * n;

    // The arcs' classes and cotangents; classes that occur twice are added up.
    int64_t arc_class[kMaxBlanks + 1];
    A arc_ct[kMaxBlanks + 1], sum = 0;
    int arcs = 0;
    bool zero = true;
    const auto add_arc = [&](int64_t k, A ct) {
      sum += ct;
      zero = zero && ct == 0;
      int arc = 0;
      while (arc < arcs && arc_class[arc] != k) ++arc;
      if (arc == arcs) arc_class[arcs++] = k, arc_ct[arc] = 0;
      arc_ct[arc] += ct;
    };
    if (label != kOutside) {
      for (int i = 0; i < shape.num_blanks; ++i) {
        add_arc(shape.blanks[i], static_cast<const A*>(args.ct_blank[i])[r]);
      }
      const A ct_label = static_cast<const A*>(args.ct_label)[r];
      if (label >= 0 && label < n) {
        add_arc(label, ct_label);
      } else {
        sum += ct_label;
        zero = zero && ct_label == 0;
      }
    }
    if (zero) {
      memset(static_cast<void*>(dx), 0, n * sizeof(T));
      return;
    }

    const A clamp = static_cast<const A*>(args.clamp)[b];
    const F limit = Broadcast(clamp > 0 ? clamp : kInfinity<A>),
            scale = Broadcast(static_cast<const A*>(args.scale)[b]);
    const A row_lse = static_cast<const A*>(args.lse)[r];
    const F lse = Broadcast(row_lse == -kInfinity<A> ? A(0) : row_lse);
    const F minus_sum = Broadcast(-sum);
    const auto softmax_term = [&](F v) {
      return shape.normalize ? Exp(v - lse) * minus_sum : sum == sum ? Broadcast(A(0)) : Broadcast(sum);
    };
    const auto finish = [&](F unit) { return Max(-limit, Min(limit, unit)) * scale; };

    T arc_dx[kMaxBlanks + 1];
    for (int arc = 0; arc < arcs; ++arc) {
      T padded[kWidth];
      Store(finish(Broadcast(arc_ct[arc]) + softmax_term(Broadcast(LoadOne(x + arc_class[arc])))), padded);
      arc_dx[arc] = padded[0];
    }
    if (n < kWidth) {
      T padded[kWidth] = {};
      for (int64_t k = 0; k < n; ++k) padded[k] = x[k];
      Store(finish(softmax_term(Load(padded))), padded);
      for (int64_t k = 0; k < n; ++k) dx[k] = padded[k];
    } else {
      const F last = finish(softmax_term(Load(x + n - kWidth)));  // overlaps: before its elements are overwritten
      for (int64_t i = 0; i + kWidth <= n; i += kWidth) Store(finish(softmax_term(Load(x + i))), dx + i);
      Store(last, dx + n - kWidth);
    }
    for (int arc = 0; arc < arcs; ++arc) dx[arc_class[arc]] = arc_dx[arc];
  });
}

void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kF16:
      return Forward<Half>(args, begin, end);
    case DType::kBF16:
      return Forward<BFloat16>(args, begin, end);
    case DType::kF32:
      return Forward<float>(args, begin, end);
    case DType::kF64:
      return Forward<double>(args, begin, end);
  }
}

void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  switch (dtype) {
    case DType::kF16:
      return Backward<Half>(args, begin, end);
    case DType::kBF16:
      return Backward<BFloat16>(args, begin, end);
    case DType::kF32:
      return Backward<float>(args, begin, end);
    case DType::kF64:
      return Backward<double>(args, begin, end);
  }
}

}  // namespace jax_rnnt::cpu::JAX_RNNT_TARGET
