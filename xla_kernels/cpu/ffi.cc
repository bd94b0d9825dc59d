// XLA custom-call handlers of the CPU kernels. common/ffi_calls.h reads the buffers; this file splits the work over
// threads.
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <new>

#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/common/registration.h"
#include "xla_kernels/cpu/lattice.h"
#include "xla_kernels/cpu/parallel_for.h"
#include "xla_kernels/cpu/softmax_emission.h"

namespace jax_rnnt {
namespace cpu {
namespace {

// Up to these sizes (50 to 100 us of work each) a second thread costs more than it saves.
constexpr int64_t kSerialBytes = 1 << 19;
constexpr int64_t kSerialNodes = 1 << 15;
// Work that a thread claims at once: large enough to hide an atomic increment, small enough to balance ragged batches.
constexpr int64_t kChunkBytes = 1 << 18;
// Fresh pages of a large result cost as much time as the kernel; huge pages make this 1.4 times faster.
constexpr int64_t kHugeBytes = 1 << 21;

int64_t BytesPerElement(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

void AdviseHugePages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kHugeBytes) return;
  const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // only advice: errors do not matter
#endif
}

// The same for planes of `bytes` each. XLA puts them side by side.
void AdviseHugePages(const std::vector<void*>& planes, int64_t bytes) {
  const auto [first, last] = std::minmax_element(planes.begin(), planes.end());
  const int64_t span = static_cast<char*>(*last) - static_cast<char*>(*first) + bytes;
  if (span <= 2 * int64_t(planes.size()) * bytes) AdviseHugePages(*first, span);
}

// Runs rows(begin, end) over all rows: in one piece if they are few, else on the pool.
template <typename Rows>
void ForRows(ffi::ThreadPool& pool, const EmissionShape& shape, DType dtype, Rows rows) {
  const int64_t n = shape.batch * shape.frames * shape.columns;
  const int64_t row_bytes = std::max<int64_t>(1, shape.row_size() * BytesPerElement(dtype));
  if (n * row_bytes <= kSerialBytes) return rows(0, n);
  const int64_t chunk = std::max<int64_t>(1, kChunkBytes / row_bytes);
  ParallelFor(pool, (n + chunk - 1) / chunk, [=](int64_t i) { rows(i * chunk, std::min(n, (i + 1) * chunk)); });
}

void Compute(ffi::ThreadPool& pool, const EmissionForwardCall& call) {
  const EmissionShape& shape = call.args.shape;
  AdviseHugePages(call.planes, shape.batch * shape.frames * shape.columns * (call.dtype == DType::kF64 ? 8 : 4));
  ForRows(pool, shape, call.dtype,
          [&](int64_t begin, int64_t end) { EmissionForward(call.dtype, call.args, begin, end); });
}

void Compute(ffi::ThreadPool& pool, const EmissionBackwardCall& call) {
  const EmissionShape& shape = call.args.shape;
  const int64_t elements = shape.batch * shape.frames * shape.columns * shape.row_size();
  if (call.args.dlogits != call.args.logits) {
    AdviseHugePages(call.args.dlogits, elements * BytesPerElement(call.dtype));
  }
  ForRows(pool, shape, call.dtype,
          [&](int64_t begin, int64_t end) { EmissionBackward(call.dtype, call.args, begin, end); });
}

void Compute(ffi::ThreadPool& pool, const LatticeCall& call) {
  const LatticeArgs& args = call.args;
  const auto sequence = [&](int64_t b) { Lattice(call.is_double, args, b); };
  if (args.batch * args.frames * args.columns <= kSerialNodes) {
    for (int64_t b = 0; b < args.batch; ++b) sequence(b);
  } else {
    ParallelFor(pool, args.batch, sequence);
  }
}

template <bool kGradient>
struct LatticeOf : LatticeCall {};
template <bool kGradient>
ffi::Error Read(Call* call, LatticeOf<kGradient>* work) {
  return Read(call, kGradient, LatticeWorkspace, work);
}

// Reads a call as `Work`, and computes it. Without memory for its scratch a kernel fails as XLA does without memory for
// its buffers: XLA is compiled without exceptions, so one that left a handler would end the process.
template <class Work>
ffi::Error Handle(ffi::ThreadPool pool, ffi::RemainingArgs arguments, ffi::RemainingRets results,
                  ffi::Dictionary attributes) {
  try {
    Call call(arguments, results, attributes);
    Work work{};
    if (auto error = Read(&call, &work); error.failure()) return error;
    Compute(pool, work);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_rnnt: out of memory");
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kEmissionForward, Handle<EmissionForwardCall>, BindAll<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(kEmissionBackward, Handle<EmissionBackwardCall>, BindAll<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(kLatticeLoss, Handle<LatticeOf<false>>, BindAll<ffi::ThreadPool>());
XLA_FFI_DEFINE_HANDLER(kLatticeGradient, Handle<LatticeOf<true>>, BindAll<ffi::ThreadPool>());

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

std::vector<Limit> Limits() { return CommonLimits(); }

Workspace WorkspaceOfLattice(bool unit_steps, int64_t, bool gradient) {
  return cpu::LatticeWorkspace(unit_steps, gradient);
}

std::pair<int, int> ApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jax_rnnt
