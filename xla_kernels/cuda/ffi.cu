// XLA custom-call handlers of the CUDA kernels: common/ffi_calls.h reads the buffers; launches go to XLA's stream.
//
// No handler waits, allocates or reads device memory, so XLA may capture it into a command buffer. In the emulation
// (runtime.cuh) they are handlers of the CPU platform, which has no stream.
#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/common/registration.h"
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
                                  ffi::RemainingRets planes, ffi::Span<const int64_t> blanks, int64_t normalize) {
  EmissionForwardCall call;
  if (auto error = Read(logits, label, num_frames, planes, blanks, normalize, &call); error.failure()) return error;
  return Status(EmissionForward(call.dtype, call.args, CudaStream(stream)), "emission forward");
}

ffi::Error EmissionBackwardHandler(Stream stream, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                   ffi::AnyBuffer num_frames, ffi::AnyBuffer lse, ffi::AnyBuffer scale,
                                   ffi::AnyBuffer clamp, ffi::RemainingArgs cotangents,
                                   ffi::Result<ffi::AnyBuffer> dlogits, ffi::Span<const int64_t> blanks,
                                   int64_t normalize) {
  EmissionBackwardCall call;
  if (auto error = Read(logits, label, num_frames, lse, scale, clamp, cotangents, dlogits, blanks, normalize, &call);
      error.failure())
    return error;
  return Status(EmissionBackward(call.dtype, call.args, CudaStream(stream)), "emission backward");
}

ffi::Error LatticeLossHandler(Stream stream, ffi::AnyBuffer log_blank, ffi::AnyBuffer log_label,
                              ffi::AnyBuffer num_frames, ffi::AnyBuffer num_labels, ffi::Result<ffi::AnyBuffer> loss,
                              ffi::RemainingRets workspace, int64_t topology) {
  LatticeCall call;
  if (auto error = Read(log_blank, log_label, num_frames, num_labels, topology, &call); error.failure()) return error;
  const int64_t elements = LatticeWorkspace(call.args.frames, call.args.columns);
  if (auto error = ReadWorkspace(workspace, elements, &call); error.failure()) return error;
  call.args.loss = loss->untyped_data();
  return Status(LatticeLoss(call.is_double, call.args, CudaStream(stream)), "lattice");
}

ffi::Error LatticeGradientHandler(Stream stream, ffi::AnyBuffer log_blank, ffi::AnyBuffer log_label,
                                  ffi::AnyBuffer num_frames, ffi::AnyBuffer num_labels,
                                  ffi::Result<ffi::AnyBuffer> loss, ffi::Result<ffi::AnyBuffer> grad_blank,
                                  ffi::Result<ffi::AnyBuffer> grad_label, ffi::RemainingRets workspace,
                                  int64_t topology) {
  LatticeCall call;
  if (auto error = Read(log_blank, log_label, num_frames, num_labels, topology, &call); error.failure()) return error;
  const int64_t elements = LatticeWorkspace(call.args.frames, call.args.columns);
  if (auto error = ReadWorkspace(workspace, elements, &call); error.failure()) return error;
  call.args.loss = loss->untyped_data();
  call.args.grad_blank = grad_blank->untyped_data();
  call.args.grad_label = grad_label->untyped_data();
  return Status(LatticeGradient(call.is_double, call.args, CudaStream(stream)), "lattice");
}

XLA_FFI_DEFINE_HANDLER(kEmissionForward, EmissionForwardHandler, BindEmissionForward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kEmissionBackward, EmissionBackwardHandler, BindEmissionBackward<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kLatticeLoss, LatticeLossHandler, BindLatticeLoss<Context>(), JAX_RNNT_TRAITS);
XLA_FFI_DEFINE_HANDLER(kLatticeGradient, LatticeGradientHandler, BindLatticeGradient<Context>(), JAX_RNNT_TRAITS);

}  // namespace
}  // namespace cuda

std::vector<Registration> Registrations() {
  return {
      {"jax_rnnt_softmax_emission_fwd", reinterpret_cast<void*>(+cuda::kEmissionForward)},
      {"jax_rnnt_softmax_emission_bwd", reinterpret_cast<void*>(+cuda::kEmissionBackward)},
      {"jax_rnnt_lattice_loss", reinterpret_cast<void*>(+cuda::kLatticeLoss)},
      {"jax_rnnt_lattice_grad", reinterpret_cast<void*>(+cuda::kLatticeGradient)},
  };
}

std::pair<int, int> ApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jax_rnnt
