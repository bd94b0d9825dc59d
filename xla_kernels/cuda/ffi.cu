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
cudaError_t Launch(const EmissionForwardCall& call, cudaStream_t stream) {
  return EmissionForward(call.dtype, call.args, stream);
}
cudaError_t Launch(const EmissionBackwardCall& call, cudaStream_t stream) {
  return EmissionBackward(call.dtype, call.args, stream);
}
template <bool kGradient>
struct LatticeOf : LatticeCall {};
template <bool kGradient>
ffi::Error Read(Call* call, LatticeOf<kGradient>* work) {
  return Read(call, kGradient, LatticeWorkspace, work);
}
cudaError_t Launch(const LatticeCall& call, cudaStream_t stream) { return Lattice(call.is_double, call.args, stream); }
cudaError_t Launch(const JointForwardArgs& args, cudaStream_t stream) { return JointForward(args, stream); }
cudaError_t Launch(const JointGradientArgs& args, cudaStream_t stream) { return JointGradient(args, stream); }
cudaError_t Launch(const JointSumsArgs& args, cudaStream_t stream) { return JointSums(args, stream); }

// Reads a call as `Work`, and launches its kernels.
template <class Work>
ffi::Error Handle(const char* what, const Stream& stream, Call call) {
  Work work{};
  if (auto error = Read(&call, &work); error.failure()) return error;
  LoadKernelsHere();
  const cudaError_t error = Launch(work, CudaStream(stream));
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_rnnt: ") + what + ": " + cudaGetErrorString(error));
}

// Command buffers also in the emulation, whose handlers are those of CUDA where a program is compiled for a GPU and not
// run.
#define JAX_RNNT_HANDLER(name, Work, what)                                                          \
  ffi::Error name##Handler(Stream stream, ffi::RemainingArgs arguments, ffi::RemainingRets results, \
                           ffi::Dictionary attributes) {                                            \
    return Handle<Work>(what, stream, {arguments, results, attributes});                            \
  }                                                                                                 \
  XLA_FFI_DEFINE_HANDLER(name, name##Handler, BindAll<Context>(), {ffi::Traits::kCmdBufferCompatible})
JAX_RNNT_HANDLER(kEmissionForward, EmissionForwardCall, "emission forward");
JAX_RNNT_HANDLER(kEmissionBackward, EmissionBackwardCall, "emission backward");
JAX_RNNT_HANDLER(kLatticeLoss, LatticeOf<false>, "lattice");
JAX_RNNT_HANDLER(kLatticeGradient, LatticeOf<true>, "lattice");
JAX_RNNT_HANDLER(kJointForward, JointForwardArgs, "joint network forward");
JAX_RNNT_HANDLER(kJointGradient, JointGradientArgs, "gradient of a joint network");
JAX_RNNT_HANDLER(kJointSums, JointSumsArgs, "sums of a joint network");

// Some versions of XLA pass operands and results to this stage, some do not.
ffi::Error InstantiateHandler(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  LoadKernels();
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateHandler,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());
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
