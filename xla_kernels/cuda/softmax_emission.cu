// Softmax emission: rows of V logits -> log-probabilities of the arcs, and cotangents of the arcs -> gradient of the
// logits. D durations may follow the V logits. They have a softmax of their own. A Bernoulli blank is left out of the
// sum.
//
// Forward reads every logit inside the lengths once, backward reads it once and writes its gradient once, over the same
// memory if asked to. Rows outside the lengths are not read, but for 16 bytes beside a row; backward writes zeros
// there. So memory should bound both passes, and does if a row takes few instructions: an H200 copies 4 bytes in the
// time in which a warp issues one. All of the scheme serves this (emission_rows.cuh has the threads and the sums):
//
// * A lane takes a row of up to 288 bytes forward and 128 backward, if it has one blank and no durations. Such rows
//   come through shared memory, since a lane that reads a row of its own would touch a cache line of its own
//   (tiny_rows.cuh).
// * A group of lanes takes any other row: 4 up to 1 KiB, a warp up to 64 KiB, a block above. Groups of a warp take
//   several rows each, one after the other.
// * Work that does not need a group is done for 32 rows side by side, one by each lane: lengths, label, cotangents and
//   norm before the rows, logarithms and planes after them.
// * Accesses are 16 bytes wide for any V and any alignment, all of a step issued before the first is used. Forward cuts
//   the vectors of misaligned rows out of three aligned accesses of 8 bytes, since the assignment of elements to lanes
//   must not depend on the address. Backward has no sums, so it begins at the first boundary.
// * Forward keeps a running maximum and a running sum per lane, rescaled once per step, so it needs no second read. See
//   BinarySum.
// * Backward treats all classes alike. Then it corrects those of the arcs, whose gradients were found before any logit
//   was overwritten. lab/notes/emission.md has what was tried.
//
// Offsets have 64 bits from the beginning, 32 bits inside the rows of a sequence (T * U1 < 2^31) and inside a row.
#include "xla_kernels/cuda/softmax_emission.h"

#include "xla_kernels/cuda/emission_backward.cuh"
#include "xla_kernels/cuda/emission_forward.cuh"

namespace jax_rnnt::cuda {
namespace {

// Chooses the number of threads per row, and launches Kernel<T, kLanes>, or TinyKernel if rows have at most `most_tiny`
// bytes and are plain. Rows of many arcs need many lanes.
template <class T, template <class, int> class Kernel, template <class, bool> class TinyKernel, class Pointers>
cudaError_t LaunchRows(const EmissionShape& shape, const Pointers& pointers, int64_t most_tiny, cudaStream_t stream) {
  const int64_t rows = shape.frames * shape.columns, bytes = shape.row_size() * int64_t(sizeof(T));
  if (shape.batch * rows == 0) return cudaSuccess;
  if (rows > kMaxEmissionNodes || shape.batch > kMaxEmissionSequences) return cudaErrorInvalidValue;
  if (bytes <= most_tiny && shape.normalize && !shape.bernoulli && shape.durations == 0 && shape.num_blanks == 1 &&
      TinyShape::Fits(bytes, pointers.logits)) {
    constexpr int kRows = kBlock<1>;
    cudaError_t error = cudaSuccess;
    TinyShape tiny(shape, bytes);
    for (int64_t b = 0; b < shape.batch && error == cudaSuccess; b += kMaxGridY) {
      tiny.first_sequence = int(b);
      const dim3 grid(unsigned((rows + kRows - 1) / kRows), unsigned(std::min<int64_t>(shape.batch - b, kMaxGridY)));
      error = Launch(tiny.whole ? TinyKernel<T, true>::function : TinyKernel<T, false>::function, grid, dim3(kRows),
                     kRows / 32 * tiny.vectors * sizeof(Words), stream, tiny, pointers);
    }
    return error;
  }
  const auto launch = [&](auto lanes) {
    using RowTeam = Team<decltype(lanes)::value>;
    const int64_t passes = std::min({int64_t(RowTeam::kInWarp), kTeamBytes / (bytes * RowTeam::kGroups),
                                     shape.batch * rows / (kTeams * RowTeam::kGroups)});
    const int64_t per_block = RowTeam::kTeamsPerBlock * RowTeam::kGroups * std::max<int64_t>(1, passes);
    const dim3 grid(unsigned((rows + per_block - 1) / per_block), unsigned(std::min<int64_t>(shape.batch, kMaxGridY)));
    return Launch(Kernel<T, decltype(lanes)::value>::function, grid, dim3(kBlock<decltype(lanes)::value>), 0, stream,
                  Shape(shape, int(std::max<int64_t>(1, passes))), pointers);
  };
  if (bytes <= kShortRow && shape.num_blanks + 1 <= kArcsPerLane<kShortLanes> * kShortLanes) {
    return launch(std::integral_constant<int, kShortLanes>());
  }
  if (bytes <= kMediumRow) return launch(std::integral_constant<int, 32>());
  return launch(std::integral_constant<int, kThreads>());
}

template <class T, int kLanes>
struct ForwardFunction {
  static constexpr auto function = &ForwardKernel<T, kLanes>;
};
template <class T, int kLanes>
struct BackwardFunction {
  static constexpr auto function = &BackwardKernel<T, kLanes>;
};
template <class T, bool kWhole>
struct TinyForwardFunction {
  static constexpr auto function = &TinyForwardKernel<T, kWhole>;
};
template <class T, bool kWhole>
struct TinyBackwardFunction {
  static constexpr auto function = &TinyBackwardKernel<T, kWhole>;
};

template <class T>
cudaError_t Forward(const EmissionForwardArgs& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  ForwardPointers<A> pointers{args.logits, args.label, args.num_frames, {}, {}, static_cast<A*>(args.norm)};
  for (int i = 0; i < args.shape.num_blanks; ++i) pointers.log_arc[i] = static_cast<A*>(args.log_blank[i]);
  pointers.log_arc[args.shape.num_blanks] = static_cast<A*>(args.log_label);
  for (int i = 0; i < args.shape.durations; ++i) pointers.log_duration[i] = static_cast<A*>(args.log_duration[i]);
  return LaunchRows<T, ForwardFunction, TinyForwardFunction>(args.shape, pointers, kTinyForward, stream);
}

template <class T>
cudaError_t Backward(const EmissionBackwardArgs& args, cudaStream_t stream) {
  using A = Accumulator<T>;
  BackwardPointers<A> pointers{args.logits,
                               args.dlogits,
                               args.label,
                               args.num_frames,
                               {},
                               {},
                               static_cast<const A*>(args.norm),
                               static_cast<const A*>(args.scale),
                               static_cast<const A*>(args.clamp),
                               static_cast<const A*>(args.total)};
  for (int i = 0; i < args.shape.num_blanks; ++i) pointers.ct_arc[i] = static_cast<const A*>(args.ct_blank[i]);
  pointers.ct_arc[args.shape.num_blanks] = static_cast<const A*>(args.ct_label);
  for (int i = 0; i < args.shape.durations; ++i) pointers.ct_duration[i] = static_cast<const A*>(args.ct_duration[i]);
  const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16; };
  const bool tiny = misaligned(args.logits) == misaligned(args.dlogits) && args.total == nullptr;
  return LaunchRows<T, BackwardFunction, TinyBackwardFunction>(args.shape, pointers, tiny ? kTinyBackward : 0, stream);
}

}  // namespace

cudaError_t EmissionForward(DType dtype, const EmissionForwardArgs& args, cudaStream_t stream) {
  return ForType<Half, BFloat16>(dtype, [&](auto x) { return Forward<decltype(x)>(args, stream); });
}

cudaError_t EmissionBackward(DType dtype, const EmissionBackwardArgs& args, cudaStream_t stream) {
  return ForType<Half, BFloat16>(dtype, [&](auto x) { return Backward<decltype(x)>(args, stream); });
}

}  // namespace jax_rnnt::cuda
