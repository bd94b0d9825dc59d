// XLA custom-call handlers of the CPU kernels: common/ffi_calls.h reads the buffers; the work is split over threads
// here.
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>

#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/common/registration.h"
#include "xla_kernels/cpu/lattice.h"
#include "xla_kernels/cpu/parallel_for.h"
#include "xla_kernels/cpu/softmax_emission.h"

namespace jax_rnnt {
namespace cpu {
namespace {

// Below this much memory traffic or this many lattice nodes (each 50 ... 100 us of work) a second thread costs more
// than it saves.
constexpr int64_t kSerialBytes = 1 << 19;
constexpr int64_t kSerialNodes = 1 << 15;
// Work of one claim: large enough to hide an atomic increment, small enough to balance ragged batches.
constexpr int64_t kChunkBytes = 1 << 18;
// Fresh pages of a large result cost as much time as the kernel; huge pages make that 1.4 times faster.
constexpr int64_t kHugeBytes = 1 << 22;

int64_t BytesPerElement(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

void AdviseHugePages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kHugeBytes) return;
  const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: an error changes nothing
#endif
}

// Runs rows(begin, end) over all rows: in one piece where that is cheap, else on the pool.
template <typename Rows>
void ForRows(ffi::ThreadPool& pool, const EmissionShape& shape, DType dtype, Rows rows) {
  const int64_t n = shape.batch * shape.frames * shape.columns;
  const int64_t row_bytes = std::max<int64_t>(1, shape.classes * BytesPerElement(dtype));
  if (n * row_bytes <= kSerialBytes) return rows(0, n);
  const int64_t chunk = std::max<int64_t>(1, kChunkBytes / row_bytes);
  ParallelFor(pool, (n + chunk - 1) / chunk, [=](int64_t i) { rows(i * chunk, std::min(n, (i + 1) * chunk)); });
}

ffi::Error EmissionForwardHandler(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                  ffi::AnyBuffer num_frames, ffi::RemainingRets planes, ffi::Span<const int64_t> blanks,
                                  int64_t normalize) {
  EmissionForwardCall call;
  if (auto error = Read(logits, label, num_frames, planes, blanks, normalize, &call); error.failure()) return error;
  ForRows(pool, call.args.shape, call.dtype,
          [&](int64_t begin, int64_t end) { EmissionForward(call.dtype, call.args, begin, end); });
  return ffi::Error::Success();
}

ffi::Error EmissionBackwardHandler(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                   ffi::AnyBuffer num_frames, ffi::AnyBuffer lse, ffi::AnyBuffer scale,
                                   ffi::AnyBuffer clamp, ffi::RemainingArgs cotangents,
                                   ffi::Result<ffi::AnyBuffer> dlogits, ffi::Span<const int64_t> blanks,
                                   int64_t normalize) {
  EmissionBackwardCall call;
  if (auto error = Read(logits, label, num_frames, lse, scale, clamp, cotangents, dlogits, blanks, normalize, &call);
      error.failure())
    return error;
  if (call.args.dlogits != call.args.logits) AdviseHugePages(call.args.dlogits, dlogits->size_bytes());
  ForRows(pool, call.args.shape, call.dtype,
          [&](int64_t begin, int64_t end) { EmissionBackward(call.dtype, call.args, begin, end); });
  return ffi::Error::Success();
}

template <typename Sequence>
void ForSequences(ffi::ThreadPool& pool, const LatticeArgs& args, Sequence sequence) {
  if (args.batch * args.frames * args.columns <= kSerialNodes) {
    for (int64_t b = 0; b < args.batch; ++b) sequence(b);
  } else {
    ParallelFor(pool, args.batch, sequence);
  }
}

ffi::Error LatticeLossHandler(ffi::ThreadPool pool, ffi::AnyBuffer log_blank, ffi::AnyBuffer log_label,
                              ffi::AnyBuffer num_frames, ffi::AnyBuffer num_labels, ffi::Result<ffi::AnyBuffer> loss,
                              ffi::RemainingRets, int64_t topology) {
  LatticeCall call;
  if (auto error = Read(log_blank, log_label, num_frames, num_labels, topology, &call); error.failure()) return error;
  call.args.loss = loss->untyped_data();
  ForSequences(pool, call.args, [&](int64_t b) { LatticeLoss(call.is_double, call.args, b); });
  return ffi::Error::Success();
}

ffi::Error LatticeGradientHandler(ffi::ThreadPool pool, ffi::AnyBuffer log_blank, ffi::AnyBuffer log_label,
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
  ForSequences(pool, call.args, [&](int64_t b) { LatticeGradient(call.is_double, call.args, b); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kEmissionForward, EmissionForwardHandler, BindEmissionForward<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(kEmissionBackward, EmissionBackwardHandler, BindEmissionBackward<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(kLatticeLoss, LatticeLossHandler, BindLatticeLoss<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(kLatticeGradient, LatticeGradientHandler, BindLatticeGradient<ffi::ThreadPool>());

}  // namespace
}  // namespace cpu

std::vector<Registration> Registrations() {
  return {
      {"jax_rnnt_softmax_emission_fwd", reinterpret_cast<void*>(+cpu::kEmissionForward)},
      {"jax_rnnt_softmax_emission_bwd", reinterpret_cast<void*>(+cpu::kEmissionBackward)},
      {"jax_rnnt_lattice_loss", reinterpret_cast<void*>(+cpu::kLatticeLoss)},
      {"jax_rnnt_lattice_grad", reinterpret_cast<void*>(+cpu::kLatticeGradient)},
  };
}

std::pair<int, int> ApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jax_rnnt
