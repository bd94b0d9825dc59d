// XLA custom-call handlers of the CPU kernels: unpack buffers, check ranks and types, split the work over threads.
//
// All leading dimensions are batch. Handlers never fail on data: an error on one device of several would stall the
// others' all-reduce, and XLA calls handlers on padding rows too. What is checked here are mistakes of the caller in
// jax_rnnt/_ffi.py, not of the user.
#include "xla_kernels/cpu/ffi.h"

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_kernels/cpu/lattice.h"
#include "xla_kernels/cpu/parallel_for.h"
#include "xla_kernels/cpu/softmax_emission.h"

namespace jax_rnnt::cpu {
namespace {

namespace ffi = xla::ffi;

// Below this much memory traffic or this many lattice nodes (each 50 ... 100 us of work) a second thread costs more
// than it saves.
constexpr int64_t kSerialBytes = 1 << 19;
constexpr int64_t kSerialNodes = 1 << 15;
// Work of one claim: large enough to hide an atomic increment, small enough to balance ragged batches.
constexpr int64_t kChunkBytes = 1 << 18;
// Fresh pages of a large result cost as much time as the kernel; huge pages make that 1.4 times faster.
constexpr int64_t kHugeBytes = 1 << 22;

ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("jax_rnnt: " + message); }

int64_t BytesPerElement(DType dtype) { return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2; }

bool ToDType(ffi::DataType from, DType* to) {
  switch (from) {
    case ffi::DataType::F16:
      *to = DType::kF16;
      return true;
    case ffi::DataType::BF16:
      *to = DType::kBF16;
      return true;
    case ffi::DataType::F32:
      *to = DType::kF32;
      return true;
    case ffi::DataType::F64:
      *to = DType::kF64;
      return true;
    default:
      return false;
  }
}

void AdviseHugePages(void* data, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  if (bytes < kHugeBytes) return;
  const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(page - 1);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: an error changes nothing
#endif
}

// logits [..., T, U1, V], label [..., 1 or T, U1], num_frames [...]
ffi::Error ReadShape(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& label, const ffi::AnyBuffer& num_frames,
                     ffi::Span<const int64_t> blanks, int64_t normalize, DType* dtype, EmissionShape* shape) {
  const auto x = logits.dimensions(), y = label.dimensions();
  if (x.size() < 3 || y.size() + 1 != x.size()) return Invalid("logits must be [..., T, U1, V], label [..., T|1, U1]");
  if (!ToDType(logits.element_type(), dtype)) return Invalid("logits must be float16, bfloat16, float32 or float64");
  if (label.element_type() != ffi::DataType::S32 || num_frames.element_type() != ffi::DataType::S32)
    return Invalid("label and num_frames must be int32");
  const size_t n = x.size();
  *shape = {static_cast<int64_t>(num_frames.element_count()),
            x[n - 3],
            x[n - 2],
            x[n - 1],
            y[n - 3],
            normalize != 0,
            static_cast<int>(blanks.size()),
            blanks.begin()};
  if (y[n - 2] != shape->columns || (shape->label_frames != 1 && shape->label_frames != shape->frames))
    return Invalid("label must be [..., T|1, U1]");
  if (shape->batch * shape->frames * shape->columns * shape->classes != static_cast<int64_t>(logits.element_count()))
    return Invalid("logits and num_frames must have the same batch dimensions");
  if (blanks.size() < 1 || blanks.size() > kMaxBlanks) return Invalid("there must be 1 to 63 blank classes");
  for (int64_t blank : blanks)
    if (blank < 0 || blank >= shape->classes) return Invalid("blank must lie in [0, V)");
  return ffi::Error::Success();
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
  DType dtype;
  EmissionForwardArgs args{};
  if (auto error = ReadShape(logits, label, num_frames, blanks, normalize, &dtype, &args.shape); error.failure())
    return error;
  if (planes.size() != blanks.size() + 2) return Invalid("emission forward gives a plane per blank, log_label and lse");
  std::vector<void*> out;
  for (size_t i = 0; i < planes.size(); ++i) out.push_back((*planes.get<ffi::AnyBuffer>(i))->untyped_data());
  args.logits = logits.untyped_data();
  args.label = static_cast<const int32_t*>(label.untyped_data());
  args.num_frames = static_cast<const int32_t*>(num_frames.untyped_data());
  args.log_blank = out.data();
  args.log_label = out[blanks.size()];
  args.lse = out[blanks.size() + 1];
  ForRows(pool, args.shape, dtype, [&](int64_t begin, int64_t end) { EmissionForward(dtype, args, begin, end); });
  return ffi::Error::Success();
}

ffi::Error EmissionBackwardHandler(ffi::ThreadPool pool, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                   ffi::AnyBuffer num_frames, ffi::AnyBuffer lse, ffi::AnyBuffer scale,
                                   ffi::AnyBuffer clamp, ffi::RemainingArgs cotangents,
                                   ffi::Result<ffi::AnyBuffer> dlogits, ffi::Span<const int64_t> blanks,
                                   int64_t normalize) {
  DType dtype;
  EmissionBackwardArgs args{};
  if (auto error = ReadShape(logits, label, num_frames, blanks, normalize, &dtype, &args.shape); error.failure())
    return error;
  if (cotangents.size() != blanks.size() + 1)
    return Invalid("emission backward takes a plane per blank and one of labels");
  std::vector<const void*> in;
  for (size_t i = 0; i < cotangents.size(); ++i) in.push_back(cotangents.get<ffi::AnyBuffer>(i)->untyped_data());
  args.logits = logits.untyped_data();
  args.label = static_cast<const int32_t*>(label.untyped_data());
  args.num_frames = static_cast<const int32_t*>(num_frames.untyped_data());
  args.lse = lse.untyped_data();
  args.ct_blank = in.data();
  args.ct_label = in[blanks.size()];
  args.scale = scale.untyped_data();
  args.clamp = clamp.untyped_data();
  args.dlogits = dlogits->untyped_data();
  if (args.dlogits != args.logits) AdviseHugePages(args.dlogits, dlogits->size_bytes());
  ForRows(pool, args.shape, dtype, [&](int64_t begin, int64_t end) { EmissionBackward(dtype, args, begin, end); });
  return ffi::Error::Success();
}

// log_blank, log_label [..., T, U1], num_frames, num_labels [...]
ffi::Error ReadLattice(const ffi::AnyBuffer& log_blank, const ffi::AnyBuffer& log_label,
                       const ffi::AnyBuffer& num_frames, const ffi::AnyBuffer& num_labels, int64_t topology,
                       bool* is_double, LatticeArgs* args) {
  const auto x = log_blank.dimensions();
  *is_double = log_blank.element_type() == ffi::DataType::F64;
  if (x.size() < 2 || log_label.element_count() != log_blank.element_count())
    return Invalid("log_blank and log_label must both be [..., T, U1]");
  if (!*is_double && log_blank.element_type() != ffi::DataType::F32) return Invalid("arcs must be float32 or float64");
  if (num_frames.element_type() != ffi::DataType::S32 || num_labels.element_type() != ffi::DataType::S32)
    return Invalid("lengths must be int32");
  if (topology != 0 && topology != 1) return Invalid("topology must be 0 (standard) or 1 (monotonic)");
  *args = {};
  args->topology = static_cast<Topology>(topology);
  args->batch = num_frames.element_count();
  args->frames = x[x.size() - 2];
  args->columns = x[x.size() - 1];
  args->log_blank = log_blank.untyped_data();
  args->log_label = log_label.untyped_data();
  args->num_frames = static_cast<const int32_t*>(num_frames.untyped_data());
  args->num_labels = static_cast<const int32_t*>(num_labels.untyped_data());
  if (args->batch * args->frames * args->columns != static_cast<int64_t>(log_blank.element_count()))
    return Invalid("arcs and lengths must have the same batch dimensions");
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
                              int64_t topology) {
  bool is_double;
  LatticeArgs args;
  if (auto error = ReadLattice(log_blank, log_label, num_frames, num_labels, topology, &is_double, &args);
      error.failure())
    return error;
  args.loss = loss->untyped_data();
  ForSequences(pool, args, [&](int64_t b) { LatticeLoss(is_double, args, b); });
  return ffi::Error::Success();
}

ffi::Error LatticeGradientHandler(ffi::ThreadPool pool, ffi::AnyBuffer log_blank, ffi::AnyBuffer log_label,
                                  ffi::AnyBuffer num_frames, ffi::AnyBuffer num_labels,
                                  ffi::Result<ffi::AnyBuffer> loss, ffi::Result<ffi::AnyBuffer> grad_blank,
                                  ffi::Result<ffi::AnyBuffer> grad_label, ffi::Result<ffi::AnyBuffer> workspace,
                                  int64_t topology) {
  bool is_double;
  LatticeArgs args;
  if (auto error = ReadLattice(log_blank, log_label, num_frames, num_labels, topology, &is_double, &args);
      error.failure())
    return error;
  if (static_cast<int64_t>(workspace->element_count()) < args.batch * LatticeWorkspace(args.frames, args.columns))
    return Invalid("workspace is too small");
  args.loss = loss->untyped_data();
  args.grad_blank = grad_blank->untyped_data();
  args.grad_label = grad_label->untyped_data();
  args.workspace = workspace->untyped_data();
  ForSequences(pool, args, [&](int64_t b) { LatticeGradient(is_double, args, b); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kEmissionForward, EmissionForwardHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // logits      [..., T, U1, V]  f16 | bf16 | f32 | f64
                           .Arg<ffi::AnyBuffer>()  // label       [..., T|1, U1]   s32
                           .Arg<ffi::AnyBuffer>()  // num_frames  [...]            s32
                           .RemainingRets()        // log_blank x K, log_label, lse  [..., T, U1]  f32 (f64 for f64)
                           .Attr<ffi::Span<const int64_t>>("blanks")
                           .Attr<int64_t>("normalize"));

XLA_FFI_DEFINE_HANDLER(kEmissionBackward, EmissionBackwardHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // logits      [..., T, U1, V]
                           .Arg<ffi::AnyBuffer>()  // label       [..., T|1, U1]
                           .Arg<ffi::AnyBuffer>()  // num_frames  [...]
                           .Arg<ffi::AnyBuffer>()  // lse         [..., T, U1]
                           .Arg<ffi::AnyBuffer>()  // scale       [...]
                           .Arg<ffi::AnyBuffer>()  // clamp       [...]
                           .RemainingArgs()        // cotangents of log_blank x K, log_label  [..., T, U1]
                           .Ret<ffi::AnyBuffer>()  // dlogits     [..., T, U1, V]
                           .Attr<ffi::Span<const int64_t>>("blanks")
                           .Attr<int64_t>("normalize"));

XLA_FFI_DEFINE_HANDLER(kLatticeLoss, LatticeLossHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // log_blank   [..., T, U1]  f32 | f64
                           .Arg<ffi::AnyBuffer>()  // log_label   [..., T, U1]
                           .Arg<ffi::AnyBuffer>()  // num_frames  [...]         s32
                           .Arg<ffi::AnyBuffer>()  // num_labels  [...]         s32
                           .Ret<ffi::AnyBuffer>()  // loss        [...]
                           .Attr<int64_t>("topology"));

XLA_FFI_DEFINE_HANDLER(kLatticeGradient, LatticeGradientHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // log_blank   [..., T, U1]  f32 | f64
                           .Arg<ffi::AnyBuffer>()  // log_label   [..., T, U1]
                           .Arg<ffi::AnyBuffer>()  // num_frames  [...]         s32
                           .Arg<ffi::AnyBuffer>()  // num_labels  [...]         s32
                           .Ret<ffi::AnyBuffer>()  // loss        [...]
                           .Ret<ffi::AnyBuffer>()  // grad_blank  [..., T, U1]
                           .Ret<ffi::AnyBuffer>()  // grad_label  [..., T, U1]
                           .Ret<ffi::AnyBuffer>()  // workspace   [..., LatticeWorkspace]
                           .Attr<int64_t>("topology"));

}  // namespace

std::vector<Registration> Registrations() {
  return {
      {"jax_rnnt_softmax_emission_fwd", reinterpret_cast<void*>(+kEmissionForward)},
      {"jax_rnnt_softmax_emission_bwd", reinterpret_cast<void*>(+kEmissionBackward)},
      {"jax_rnnt_lattice_loss", reinterpret_cast<void*>(+kLatticeLoss)},
      {"jax_rnnt_lattice_grad", reinterpret_cast<void*>(+kLatticeGradient)},
  };
}

std::pair<int, int> ApiVersion() { return {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR}; }

}  // namespace jax_rnnt::cpu
