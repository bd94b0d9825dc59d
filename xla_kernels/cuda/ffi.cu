// XLA custom-call handlers of the CUDA kernels. common/ffi_calls.h reads the buffers; launches go to XLA's stream.
//
// No handler waits, allocates or reads device memory, so XLA may capture it into a command buffer. In the emulation
// (runtime.cuh) the handlers belong to the CPU platform, which has no stream.
//
// Before that, when XLA instantiates a handler, all kernels are loaded, or else at the first execution.
#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/common/registration.h"
#include "xla_kernels/cuda/devices.h"
#include "xla_kernels/cuda/joint_calls.h"
#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/search_ffi.h"
#include "xla_kernels/cuda/softmax_emission.h"

namespace jax_rnnt {
namespace cuda {
namespace {

#if defined(__CUDACC__)
using Context = ffi::PlatformStream<cudaStream_t>;
using Stream = cudaStream_t;
cudaStream_t CudaStream(Stream stream) { return stream; }
#else
using Context = ffi::ThreadPool;
using Stream = ffi::ThreadPool;
cudaStream_t CudaStream(const Stream&) { return nullptr; }
#endif
// Also in the emulation, whose handlers are those of CUDA where a program is compiled for a GPU and not run.
#define JAX_RNNT_TRAITS {ffi::Traits::kCmdBufferCompatible}

ffi::Error Status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_rnnt: ") + what + ": " + cudaGetErrorString(error));
}

struct Cuda {
  using Stream = cuda::Stream;

  static int64_t WorkspaceOf(const LatticeArgs& args, bool gradient) { return LatticeWorkspace(args, gradient); }
  static ffi::Error Run(const Stream& stream, const EmissionForwardCall& call) {
    LoadKernelsHere();
    return Status(EmissionForward(call.dtype, call.args, CudaStream(stream)), "emission forward");
  }
  static ffi::Error Run(const Stream& stream, const EmissionBackwardCall& call) {
    LoadKernelsHere();
    return Status(EmissionBackward(call.dtype, call.args, CudaStream(stream)), "emission backward");
  }
  static ffi::Error Run(const Stream& stream, const LatticeCall& call) {
    LoadKernelsHere();
    return Status(Lattice(call.is_double, call.args, CudaStream(stream)), "lattice");
  }
  static ffi::Error Run(const Stream& stream, const JointForwardArgs& args) {
    LoadKernelsHere();
    return Status(JointForward(args, CudaStream(stream)), "joint network forward");
  }
  static ffi::Error Run(const Stream& stream, const JointGradientArgs& args) {
    LoadKernelsHere();
    return Status(JointGradient(args, CudaStream(stream)), "gradient of a joint network");
  }
  static ffi::Error Run(const Stream& stream, const JointSumsArgs& args) {
    LoadKernelsHere();
    return Status(JointSums(args, CudaStream(stream)), "sums of a joint network");
  }
};

ffi::Error WalkHandler(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                       int64_t labels_per_frame, int64_t token_first, int64_t reach) {
  WalkArgs args{};
  if (auto error = Read(arguments, results, labels_per_frame, token_first, reach, &args); error.failure()) return error;
  LoadKernelsHere();
  return Status(Walk(args, CudaStream(stream)), "step of a greedy search");
}

ffi::Error ChoiceHandler(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results, int64_t window,
                         int64_t merge, int64_t blanks, ffi::Span<const int64_t> frames,
                         ffi::Span<const int64_t> may_end) {
  ChoiceArgs args{};
  if (auto error = Read(arguments, results, {window, merge, blanks, frames, may_end}, &args); error.failure())
    return error;
  LoadKernelsHere();
  return Status(Choose(args, CudaStream(stream)), "step of a beam search");
}

ffi::Error RowsHandler(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                       ffi::Span<const int64_t> blanks, int64_t durations, int64_t best) {
  RowsArgs args{};
  if (auto error = Read(arguments, results, blanks, durations, best, &args); error.failure()) return error;
  LoadKernelsHere();
  return Status(Rows(args, CudaStream(stream)), "rows of a search");
}

ffi::Error MovesHandler(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                        ffi::Span<const int64_t> blanks, int64_t durations, ffi::Span<const int64_t> tokens,
                        ffi::Span<const int64_t> of_durations, ffi::Span<const int64_t> frames,
                        ffi::Span<const int64_t> may_end, int64_t window, int64_t labels_per_frame, int64_t max_labels,
                        int64_t token_first) {
  MovesArgs args{};
  const MovesKind kind = {blanks,  durations, tokens,           of_durations, frames,
                          may_end, window,    labels_per_frame, max_labels,   token_first};
  if (auto error = Read(arguments, results, kind, &args); error.failure()) return error;
  LoadKernelsHere();
  return Status(Moves(args, CudaStream(stream)), "moves of a greedy search");
}

// Some versions of XLA pass operands and results to this stage, some do not.
ffi::Error InstantiateHandler(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  LoadKernels();
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateHandler,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());
using On = Handlers<Cuda>;
XLA_FFI_DEFINE_HANDLER(kEmissionForward, On::EmissionForward, BindEmissionForward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kEmissionBackward, On::EmissionBackward, BindEmissionBackward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kLatticeLoss, On::Lattice<false>, BindLattice<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kLatticeGradient, On::Lattice<true>, BindLattice<Context>(), JAX_RNNT_TRAITS);
using OnJoint = JointHandlers<Cuda>;
XLA_FFI_DEFINE_HANDLER(kJointForward, OnJoint::Forward, BindJointForward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kJointGradient, OnJoint::Gradient, BindJointGradient<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kJointSums, OnJoint::Sums, BindJointSums<Context>(), JAX_RNNT_TRAITS);

XLA_FFI_DEFINE_HANDLER(kChoice, ChoiceHandler, BindChoice<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kMoves, MovesHandler, BindMoves<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kRows, RowsHandler, BindRows<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kWalk, WalkHandler, BindWalk<Context>(), JAX_RNNT_TRAITS);

}  // namespace
}  // namespace cuda

std::vector<Registration> Registrations() {
  const auto stages = [](const char* target, XLA_FFI_Handler* execute) {
    return Registration{target, reinterpret_cast<void*>(execute),
                        reinterpret_cast<void*>(static_cast<XLA_FFI_Handler*>(cuda::kInstantiate))};
  };
  return {
      stages("jax_rnnt_softmax_emission_fwd", cuda::kEmissionForward),
      stages("jax_rnnt_softmax_emission_bwd", cuda::kEmissionBackward),
      stages("jax_rnnt_lattice_loss", cuda::kLatticeLoss),
      stages("jax_rnnt_lattice_grad", cuda::kLatticeGradient),
      stages("jax_rnnt_joint_fwd", cuda::kJointForward),
      stages("jax_rnnt_joint_bwd", cuda::kJointGradient),
      stages("jax_rnnt_joint_sums", cuda::kJointSums),
      stages("jax_rnnt_search_choice", cuda::kChoice),
      stages("jax_rnnt_search_moves", cuda::kMoves),
      stages("jax_rnnt_search_rows", cuda::kRows),
      stages("jax_rnnt_search_walk", cuda::kWalk),
  };
}

std::vector<Limit> Limits() {
  static_assert(cuda::kMaxSequences == cuda::kMaxEmissionSequences);
  std::vector<Limit> limits = CommonLimits();
  limits.insert(limits.end(), {{"emission_nodes", cuda::kMaxEmissionNodes},
                               {"lattice_nodes", cuda::kMaxNodes},
                               {"diagonals", cuda::kMaxDiagonals},
                               {"sequences", cuda::kMaxSequences},
                               {"unit_columns", cuda::MaxUnitColumns()}});
  return limits;
}

Workspace WorkspaceOfLattice(bool unit_steps, int64_t num_arcs, bool) {
  return cuda::LatticeWorkspace(unit_steps, num_arcs);
}

std::pair<int, int> ApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jax_rnnt
