// The kernels of a joint network: joint.h explains what they compute, joint_product.cuh how they multiply.
#include "xla_kernels/cuda/joint.h"

#include "xla_kernels/cuda/joint_gradient.cuh"
#include "xla_kernels/cuda/joint_product.cuh"
#include "xla_kernels/cuda/joint_sums.cuh"

namespace jax_rnnt::cuda {
namespace {

// ---------------------------------------------------------------------------------------------------------- forward

template <class T, bool kExact, int kRows>
__global__ __launch_bounds__(kJointThreads, 1) void JointForwardKernel(JointTable table, JointWeight w, float* planes) {
  JAX_RNNT_AT_MOST(kJointThreads);
  JAX_RNNT_DYNAMIC_SHARED(unsigned char, shared);
  using Tile = JointTile<kRows>;
  if (int(blockIdx.x) >= *table.inputs.count) return;
  const JointBlock block(table, uint32_t(table.inputs.list[blockIdx.x]));
  float* const numbers = reinterpret_cast<float*>(shared + kStages * kStageBytes);
  unsigned char* const hidden = shared + kStages * kStageBytes + kRows * kNumbers * 4;

  const JointNodes<kRows> nodes(table, block);
  RowTotal parts[Tile::kOwn];
#pragma unroll
  for (int i = 0; i < Tile::kOwn; ++i) parts[i] = {-INFINITY, 0};

  const auto use = [&](int chunk, Tile& tile) {
    const int first = chunk * kJointClasses + Tile::Class();
    tile.AddBias(w.bias + first);
    const auto store = [&](int plane, int slot) {
#pragma unroll
      for (int i = 0; i < Tile::kOwn; ++i) {
        if (nodes.Inside(i)) planes[nodes.At(plane, i)] = tile.Get(i, slot);
      }
    };
    const bool of_others = chunk * kJointClasses < w.start;
    if (chunk * kJointClasses <= w.start) {
      const int end = of_others ? w.others : w.start + w.kept, to = of_others ? 0 : w.others - w.start;
#pragma unroll 1
      for (int s = 0; s < 8 && first + Tile::Offset(s) < end; ++s) store(to + first + Tile::Offset(s), s);
    }
    if (of_others) return;
    const int slot = Tile::Slot(nodes.label - first);
    if (slot >= 0) store(w.others + w.kept + 2, slot);
#pragma unroll
    for (int i = 0; i < Tile::kOwn; ++i) {
      float peak = parts[i].peak;
#pragma unroll
      for (int s = 0; s < 8; ++s) peak = Max(peak, tile.At(i, s));
      const float base = RowTotal::Base(peak);
      float total = parts[i].total * RowTotal::Exp(parts[i].peak - base);
#pragma unroll
      for (int s = 0; s < 8; ++s) total += RowTotal::Exp(tile.At(i, s) - base);
      parts[i] = {peak, total};
    }
  };
  ForEachChunk<T, kExact, kRows>(
      w, hidden, shared, [&] { MakeHidden<T, kExact, kRows>(table, block, w.row_bytes, hidden); }, use);

  const RowTotal row = Combine<kRows>(parts, numbers);
  const int t = block.frame + int(threadIdx.x) / kJointColumns,
            column = block.column + int(threadIdx.x) % kJointColumns;
  if (int(threadIdx.x) < kRows && block.Inside(t, column)) {
    const int64_t node = block.Node(table, t, column);
    planes[(w.others + w.kept) * table.nodes + node] = row.peak;
    planes[(w.others + w.kept + 1) * table.nodes + node] = row.total;
  }
}

// -------------------------------------------------------------------------------------------------------------- host

template <int n>
struct Number {
  static constexpr int value = n;
};

// Whether the current device has the instructions.
bool HasTensorCores() {
  int device = 0, major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= kJointCapability;
}

// f(T, exact, rows as types) of the kernel for the problem.
template <class F>
cudaError_t ForKernel(DType dtype, const JointShape& shape, const F& f) {
  const auto of_rows = [&](auto t, auto exact) {
    if (shape.rows == 64) return f(t, exact, Number<64>());
    if (shape.rows == 32) return f(t, exact, Number<32>());
    if constexpr (sizeof t == 2) {
      if (shape.rows == 128) return f(t, exact, Number<128>());
    }
    return cudaErrorInvalidValue;
  };
  if (dtype == DType::kF16) return of_rows(Half{}, Number<0>());
  if (dtype == DType::kBF16) return of_rows(BFloat16{}, Number<0>());
  if (dtype != DType::kF32) return cudaErrorInvalidValue;
  return shape.exact ? of_rows(0.f, Number<1>()) : of_rows(0.f, Number<0>());
}

int Size(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

}  // namespace

size_t JointSharedBytes(int64_t rows, int64_t row_bytes) {
  return size_t(kStages * kStageBytes + rows * (kNumbers * 4 + row_bytes + 16));
}

cudaError_t JointForward(const JointForwardArgs& args, cudaStream_t stream) {
  const JointShape& shape = args.shape;
  const DType dtype = args.inputs.dtype;
  if (shape.blocks == 0) return cudaSuccess;
  if (!HasTensorCores()) return Loading::active ? cudaSuccess : cudaErrorNotSupported;
  const JointTable table(shape, args.inputs);
  const JointWeight weight(shape, args.weight, args.bias, Size(dtype));
  const size_t shared_bytes = JointSharedBytes(shape.rows, weight.row_bytes);
  return ForKernel(dtype, shape, [&](auto t, auto exact, auto rows) {
    constexpr auto kKernel = &JointForwardKernel<decltype(t), decltype(exact)::value != 0, decltype(rows)::value>;
    return Launch(kKernel, dim3(unsigned(shape.blocks)), dim3(kJointThreads), shared_bytes, stream, table, weight,
                  args.planes);
  });
}

cudaError_t JointGradient(const JointGradientArgs& args, cudaStream_t stream) {
  const JointShape& shape = args.shape;
  const DType dtype = args.inputs.dtype;
  if (shape.slab == 0) return cudaSuccess;
  if (!HasTensorCores()) return Loading::active ? cudaSuccess : cudaErrorNotSupported;
  const JointTable table(shape, args.inputs);
  const JointWeight weight(shape, args.weight, args.bias, Size(dtype));
  const size_t shared_bytes = JointSharedBytes(shape.rows, weight.row_bytes);
  const GradientTable gradient = {args.numbers,
                                  args.bound,
                                  args.slab,
                                  int(args.added_blanks),
                                  shape.normalize,
                                  shape.bernoulli,
                                  static_cast<unsigned char*>(args.hidden),
                                  static_cast<unsigned char*>(args.gradient),
                                  args.of_bias,
                                  args.here};
  return ForKernel(dtype, shape, [&](auto t, auto exact, auto rows) {
    constexpr auto kKernel = &JointGradientKernel<decltype(t), decltype(exact)::value != 0, decltype(rows)::value>;
    return Launch(kKernel, dim3(unsigned(shape.slab)), dim3(kJointThreads), shared_bytes, stream, table, weight,
                  gradient);
  });
}

cudaError_t JointSums(const JointSumsArgs& args, cudaStream_t stream) {
  const JointShape& shape = args.shape;
  if (!HasTensorCores()) return Loading::active ? cudaSuccess : cudaErrorNotSupported;
  const JointTable table(shape, args.inputs);
  const SumsTable sums = {args.slab,
                          int(shape.slab),
                          int(shape.rows),
                          int(shape.padded_units),
                          int(shape.classes),
                          args.of_hidden,
                          args.of_bias,
                          args.encoder_gradient,
                          args.predictor_gradient,
                          args.bias_gradient,
                          args.carry,
                          args.next,
                          args.more};
  const int64_t parts = (shape.units + kSumUnits - 1) / kSumUnits;
  const dim3 grid(unsigned(2 * shape.slab * parts + shape.classes / 32));
  const size_t shared_bytes = max(size_t(shape.slab + 31) / 32, size_t(kSumThreads)) * 4;
  const auto launch = [&](auto t) {
    return Launch(&JointSumsKernel<decltype(t)>, grid, dim3(kSumThreads), shared_bytes, stream, table, sums);
  };
  if (args.inputs.dtype == DType::kF16) return launch(Half{});
  if (args.inputs.dtype == DType::kBF16) return launch(BFloat16{});
  return launch(0.f);
}

}  // namespace jax_rnnt::cuda
