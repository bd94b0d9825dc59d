// XLA custom-call handlers of the CUDA kernels. common/ffi_calls.h reads the buffers; launches go to XLA's stream.
//
// No handler waits, allocates or reads device memory, so XLA may capture it into a command buffer. In the emulation
// (runtime.cuh) the handlers belong to the CPU platform, which has no stream.
//
// Before that, when XLA instantiates a handler, all kernels are loaded: CUDA may not load them during a capture.
#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/common/registration.h"
#include "xla_kernels/cuda/devices.h"
#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/softmax_emission.h"

namespace jax_rnnt {
namespace cuda {
namespace {

#if defined(__CUDACC__)
using Context = ffi::PlatformStream<cudaStream_t>;
using Stream = cudaStream_t;
cudaStream_t CudaStream(Stream stream) { return stream; }
#define JAX_RNNT_TRAITS {ffi::Traits::kCmdBufferCompatible}
#else
using Context = ffi::ThreadPool;
using Stream = ffi::ThreadPool;
cudaStream_t CudaStream(const Stream&) { return nullptr; }
#define JAX_RNNT_TRAITS \
  {                     \
  }
#endif

ffi::Error Status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("jax_rnnt: ") + what + ": " + cudaGetErrorString(error));
}

ffi::Error EmissionForwardHandler(Stream stream, ffi::AnyBuffer logits, ffi::AnyBuffer label, ffi::AnyBuffer num_frames,
                                  ffi::RemainingRets planes, ffi::Span<const int64_t> blanks, int64_t normalize,
                                  int64_t durations, int64_t bernoulli) {
  EmissionForwardCall call;
  if (auto error = Read(logits, label, num_frames, planes, {blanks, normalize, durations, bernoulli}, &call);
      error.failure())
    return error;
  return Status(EmissionForward(call.dtype, call.args, CudaStream(stream)), "emission forward");
}

ffi::Error EmissionBackwardHandler(Stream stream, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                   ffi::AnyBuffer num_frames, ffi::AnyBuffer norm, ffi::AnyBuffer scale,
                                   ffi::AnyBuffer clamp, ffi::RemainingArgs cotangents,
                                   ffi::Result<ffi::AnyBuffer> dlogits, ffi::Span<const int64_t> blanks,
                                   int64_t normalize, int64_t durations, int64_t bernoulli) {
  EmissionBackwardCall call;
  if (auto error = Read(logits, label, num_frames, norm, scale, clamp, cotangents, dlogits,
                        {blanks, normalize, durations, bernoulli}, &call);
      error.failure())
    return error;
  return Status(EmissionBackward(call.dtype, call.args, CudaStream(stream)), "emission backward");
}

ffi::Error LatticeHandler(const Stream& stream, bool gradient, const ffi::AnyBuffer& first_plane,
                          const ffi::AnyBuffer& num_frames, const ffi::AnyBuffer& num_labels,
                          const ffi::RemainingArgs& other_planes, ffi::Result<ffi::AnyBuffer>& loss,
                          const ffi::RemainingRets& others, const Arcs& arcs) {
  LatticeCall call;
  if (auto error = Read(first_plane, num_frames, num_labels, other_planes, arcs, &call); error.failure()) return error;
  const int64_t elements = LatticeWorkspace(call.args, gradient);
  if (auto error = ReadResults(loss, others, gradient, elements, &call); error.failure()) return error;
  return Status(Lattice(call.is_double, call.args, CudaStream(stream)), "lattice");
}

ffi::Error LatticeLossHandler(Stream stream, ffi::AnyBuffer first_plane, ffi::AnyBuffer num_frames,
                              ffi::AnyBuffer num_labels, ffi::RemainingArgs other_planes,
                              ffi::Result<ffi::AnyBuffer> loss, ffi::RemainingRets others, ffi::Span<const int64_t> dt,
                              ffi::Span<const int64_t> du, ffi::Span<const int64_t> may_end,
                              ffi::Span<const int64_t> plane, ffi::Span<const int64_t> other) {
  return LatticeHandler(stream, false, first_plane, num_frames, num_labels, other_planes, loss, others,
                        {dt, du, may_end, plane, other});
}

ffi::Error LatticeGradientHandler(Stream stream, ffi::AnyBuffer first_plane, ffi::AnyBuffer num_frames,
                                  ffi::AnyBuffer num_labels, ffi::RemainingArgs other_planes,
                                  ffi::Result<ffi::AnyBuffer> loss, ffi::RemainingRets others,
                                  ffi::Span<const int64_t> dt, ffi::Span<const int64_t> du,
                                  ffi::Span<const int64_t> may_end, ffi::Span<const int64_t> plane,
                                  ffi::Span<const int64_t> other) {
  return LatticeHandler(stream, true, first_plane, num_frames, num_labels, other_planes, loss, others,
                        {dt, du, may_end, plane, other});
}

// Some versions of XLA pass operands and results to this stage, some do not.
ffi::Error InstantiateHandler(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary) {
  LoadKernels();
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, InstantiateHandler,
                       ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kEmissionForward, EmissionForwardHandler, BindEmissionForward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kEmissionBackward, EmissionBackwardHandler, BindEmissionBackward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kLatticeLoss, LatticeLossHandler, BindLattice<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kLatticeGradient, LatticeGradientHandler, BindLattice<Context>(), JAX_RNNT_TRAITS);

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
