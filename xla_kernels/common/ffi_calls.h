// Shared by the XLA handlers of all devices: bindings, checks of ranks and types, conversion to the structs of shape.h.
//
// All leading dimensions are batch. Handlers never fail on data: an error on one of several devices would stall the
// all-reduce of the others, and XLA calls handlers on padding rows too. The checks here catch mistakes of the caller in
// jax_rnnt/_xla, not of the user.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_kernels/common/registration.h"
#include "xla_kernels/common/shape.h"

namespace jax_rnnt {

namespace ffi = xla::ffi;

inline ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("jax_rnnt: " + message); }

inline bool ToDType(ffi::DataType from, DType* to) {
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

// Limits of the data structures of all kernels; Python checks them before it lowers to a kernel.
inline std::vector<Limit> CommonLimits() {
  return {{"blanks", kMaxBlanks},
          {"durations", kMaxDurations},
          {"row", kMaxRow},
          {"arcs", kMaxArcs},
          {"arc_labels", kMaxArcLabels}};
}

inline ffi::Error OutOfRange(const char* name, int64_t low, int64_t high) {
  return Invalid(std::string(name) + " must be between " + std::to_string(low) + " and " + std::to_string(high));
}

// The product of sizes; -1 where 64 bits do not hold it, which no buffer has.
inline int64_t Product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(product, size, &product)) return -1;
  return product;
}

// Whether a kernel that expects this type and number of elements stays inside the buffer.
inline bool Holds(const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t elements) {
  return buffer.element_type() == type && static_cast<int64_t>(buffer.element_count()) == elements;
}

// The type A of planes and of numbers for each sequence.
inline ffi::DataType Accumulation(bool is_double) { return is_double ? ffi::DataType::F64 : ffi::DataType::F32; }

// The attributes of an emission.
struct EmissionKind {
  ffi::Span<const int64_t> blanks;
  int64_t normalize, durations, bernoulli;
};

// logits [..., T, U1, V + D], label [..., 1 or T, U1], num_frames [...]
inline ffi::Error ReadShape(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& label, const ffi::AnyBuffer& num_frames,
                            const EmissionKind& kind, DType* dtype, EmissionShape* shape) {
  const auto blanks = kind.blanks;
  const auto x = logits.dimensions(), y = label.dimensions();
  if (x.size() < 3 || y.size() + 1 != x.size())
    return Invalid("logits must be [..., T, U1, V + D], label [..., T|1, U1]");
  if (!ToDType(logits.element_type(), dtype)) return Invalid("logits must be float16, bfloat16, float32 or float64");
  if (label.element_type() != ffi::DataType::S32 || num_frames.element_type() != ffi::DataType::S32)
    return Invalid("label and num_frames must be int32");
  const size_t n = x.size();
  if (kind.durations < 0 || kind.durations > kMaxDurations) return OutOfRange("durations", 0, kMaxDurations);
  *shape = {static_cast<int64_t>(num_frames.element_count()),
            x[n - 3],
            x[n - 2],
            x[n - 1] - kind.durations,
            kind.durations,
            y[n - 3],
            kind.normalize != 0,
            kind.bernoulli != 0,
            static_cast<int>(blanks.size()),
            blanks.begin()};
  if (y[n - 2] != shape->columns || (shape->label_frames != 1 && shape->label_frames != shape->frames))
    return Invalid("label must be [..., T|1, U1]");
  if (Product({shape->batch, shape->frames, shape->columns, x[n - 1]}) != int64_t(logits.element_count()) ||
      Product({shape->batch, shape->label_frames, shape->columns}) != int64_t(label.element_count()))
    return Invalid("logits, label and num_frames must have the same batch dimensions");
  if (blanks.size() < 1 || blanks.size() > kMaxBlanks) return OutOfRange("blank classes", 1, kMaxBlanks);
  if (x[n - 1] > kMaxRow) return OutOfRange("logits of a row", 0, kMaxRow);
  if (shape->bernoulli && (blanks.size() != 1 || !shape->normalize))
    return Invalid("a Bernoulli blank is the only one, of logits");
  for (int64_t blank : blanks)
    if (blank < 0 || blank >= shape->classes) return Invalid("blank must lie in [0, V)");
  return ffi::Error::Success();
}

struct EmissionForwardCall {
  DType dtype;
  EmissionForwardArgs args{};
  std::vector<void*> planes;  // args.log_blank points into it
};

inline ffi::Error Read(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& label, const ffi::AnyBuffer& num_frames,
                       const ffi::RemainingRets& planes, const EmissionKind& kind, EmissionForwardCall* call) {
  EmissionForwardArgs& args = call->args;
  if (auto error = ReadShape(logits, label, num_frames, kind, &call->dtype, &args.shape); error.failure()) return error;
  const size_t blanks = kind.blanks.size(), durations = kind.durations;
  if (planes.size() != blanks + durations + 2)
    return Invalid("emission forward gives a plane per blank, log_label, a plane per duration, and norm");
  const ffi::DataType type = Accumulation(call->dtype == DType::kF64);
  const int64_t nodes = Product({args.shape.batch, args.shape.frames, args.shape.columns});
  for (size_t i = 0; i < planes.size(); ++i) {
    ffi::Result<ffi::AnyBuffer> plane = *planes.get<ffi::AnyBuffer>(i);
    if (!Holds(*plane, type, nodes)) return Invalid("planes must be [..., T, U1], float64 for float64, else float32");
    call->planes.push_back(plane->untyped_data());
  }
  args.logits = logits.untyped_data();
  args.label = static_cast<const int32_t*>(label.untyped_data());
  args.num_frames = static_cast<const int32_t*>(num_frames.untyped_data());
  args.log_blank = call->planes.data();
  args.log_label = call->planes[blanks];
  args.log_duration = call->planes.data() + blanks + 1;
  args.norm = call->planes.back();
  return ffi::Error::Success();
}

struct EmissionBackwardCall {
  DType dtype;
  EmissionBackwardArgs args{};
  std::vector<const void*> planes;  // args.ct_blank points into it
};

inline ffi::Error Read(const ffi::AnyBuffer& logits, const ffi::AnyBuffer& label, const ffi::AnyBuffer& num_frames,
                       const ffi::AnyBuffer& norm, const ffi::AnyBuffer& scale, const ffi::AnyBuffer& clamp,
                       const ffi::RemainingArgs& cotangents, ffi::Result<ffi::AnyBuffer>& dlogits,
                       const EmissionKind& kind, EmissionBackwardCall* call) {
  EmissionBackwardArgs& args = call->args;
  if (auto error = ReadShape(logits, label, num_frames, kind, &call->dtype, &args.shape); error.failure()) return error;
  const size_t blanks = kind.blanks.size(), arcs = blanks + kind.durations + 1;
  const bool has_total = cotangents.size() == arcs + 1 && kind.bernoulli == 0;
  if (cotangents.size() != arcs && !has_total)
    return Invalid(
        "emission backward takes a plane per blank, one of labels, a plane per duration, and, without a Bernoulli "
        "blank, one plane more or none: the total");
  const ffi::DataType type = Accumulation(call->dtype == DType::kF64);
  const int64_t nodes = Product({args.shape.batch, args.shape.frames, args.shape.columns});
  bool fit = Holds(norm, type, nodes) && Holds(scale, type, args.shape.batch) && Holds(clamp, type, args.shape.batch) &&
             Holds(*dlogits, logits.element_type(), logits.element_count());
  for (size_t i = 0; i < cotangents.size(); ++i) {
    const ffi::AnyBuffer plane = *cotangents.get<ffi::AnyBuffer>(i);
    fit = fit && Holds(plane, type, nodes);
    call->planes.push_back(plane.untyped_data());
  }
  if (!fit)
    return Invalid(
        "planes must be [..., T, U1], scale and clamp [...], float64 for float64, else float32, dlogits like logits");
  args.logits = logits.untyped_data();
  args.label = static_cast<const int32_t*>(label.untyped_data());
  args.num_frames = static_cast<const int32_t*>(num_frames.untyped_data());
  args.norm = norm.untyped_data();
  args.ct_blank = call->planes.data();
  args.ct_label = call->planes[blanks];
  args.ct_duration = call->planes.data() + blanks + 1;
  if (has_total) args.total = call->planes.back();
  args.scale = scale.untyped_data();
  args.clamp = clamp.untyped_data();
  args.dlogits = dlogits->untyped_data();
  return ffi::Error::Success();
}

struct LatticeCall {
  bool is_double;
  LatticeArgs args{};
  std::vector<const void*> log_planes;  // args.log_plane points into it
  std::vector<void*> grad_planes;       // args.grad_plane points into it
};

// The attributes of a topology.
struct Arcs {
  ffi::Span<const int64_t> dt, du, may_end, plane, other;
};

inline ffi::Error Read(const ffi::AnyBuffer& first_plane, const ffi::AnyBuffer& num_frames,
                       const ffi::AnyBuffer& num_labels, const ffi::RemainingArgs& other_planes, const Arcs& arcs,
                       LatticeCall* call) {
  LatticeArgs& args = call->args;
  const auto x = first_plane.dimensions();
  call->is_double = first_plane.element_type() == ffi::DataType::F64;
  if (x.size() < 2 || x[x.size() - 1] < 1) return Invalid("arcs must be [..., T, U1], U1 >= 1");
  if (!call->is_double && first_plane.element_type() != ffi::DataType::F32)
    return Invalid("arcs must be float32 or float64");
  if (num_frames.element_type() != ffi::DataType::S32 || num_labels.element_type() != ffi::DataType::S32)
    return Invalid("lengths must be int32");
  const size_t n = arcs.dt.size(), planes = other_planes.size() + 1;
  if (arcs.du.size() != n || arcs.may_end.size() != n || arcs.plane.size() != n || arcs.other.size() != n || n < 1)
    return Invalid("there must be an entry of dt, du, may_end, plane and other for each arc");
  if (n > kMaxArcs || planes > kMaxArcs) return OutOfRange("arcs and planes", 1, kMaxArcs);
  for (size_t k = 0; k < n; ++k) {
    const int64_t dt = arcs.dt.begin()[k], du = arcs.du.begin()[k];
    if (dt < 0 || dt > INT32_MAX || du < 0 || du > kMaxArcLabels || (dt == 0 && du == 0))
      return Invalid("every arc must move, by at most one label");
    const int64_t plane = arcs.plane.begin()[k], other = arcs.other.begin()[k];
    if (plane < 0 || plane >= int64_t(planes) || other >= int64_t(planes) || other == plane)
      return Invalid("there is no such plane");
  }
  call->log_planes.push_back(first_plane.untyped_data());
  for (size_t k = 0; k + 1 < planes; ++k) {
    const ffi::AnyBuffer plane = *other_planes.get<ffi::AnyBuffer>(k);
    if (plane.element_count() != first_plane.element_count() || plane.element_type() != first_plane.element_type())
      return Invalid("arcs must have one shape and type");
    call->log_planes.push_back(plane.untyped_data());
  }
  args.topology = {static_cast<int>(n),  static_cast<int>(planes), arcs.dt.begin(),   arcs.du.begin(),
                   arcs.may_end.begin(), arcs.plane.begin(),       arcs.other.begin()};
  args.batch = num_frames.element_count();
  args.frames = x[x.size() - 2];
  args.columns = x[x.size() - 1];
  args.log_plane = call->log_planes.data();
  args.num_frames = static_cast<const int32_t*>(num_frames.untyped_data());
  args.num_labels = static_cast<const int32_t*>(num_labels.untyped_data());
  // Without sequences, frames and columns may be any numbers; the workspace of a node is at most 66 elements.
  if (Product({66, args.frames, args.columns}) < 0 ||
      Product({args.batch, args.frames, args.columns}) != static_cast<int64_t>(first_plane.element_count()) ||
      static_cast<int64_t>(num_labels.element_count()) != args.batch)
    return Invalid("arcs and lengths must have the same batch dimensions");
  return ffi::Error::Success();
}

// Results: the loss; if `gradient`, the gradient of each plane; if `elements` > 0, the workspace, with so many elements
// per sequence.
inline ffi::Error ReadResults(ffi::Result<ffi::AnyBuffer>& loss, const ffi::RemainingRets& others, bool gradient,
                              int64_t elements, LatticeCall* call) {
  LatticeArgs& args = call->args;
  const size_t grads = gradient ? args.topology.num_planes : 0;
  if (others.size() != grads + (elements > 0)) return Invalid("the lattice has a wrong number of results");
  const ffi::DataType type = Accumulation(call->is_double);
  if (!Holds(*loss, type, args.batch)) return Invalid("the loss must be [...], of the type of the arcs");
  args.loss = loss->untyped_data();
  for (size_t k = 0; k < grads; ++k) {
    ffi::Result<ffi::AnyBuffer> plane = *others.get<ffi::AnyBuffer>(k);
    if (!Holds(*plane, type, args.batch * args.frames * args.columns))
      return Invalid("gradients must have the shape and type of the arcs");
    call->grad_planes.push_back(plane->untyped_data());
  }
  if (gradient) args.grad_plane = call->grad_planes.data();
  if (elements > 0) {
    ffi::Result<ffi::AnyBuffer> workspace = *others.get<ffi::AnyBuffer>(grads);
    if (workspace->element_type() != type || elements < 0 ||
        static_cast<int64_t>(workspace->element_count()) < args.batch * elements)
      return Invalid("workspace is too small");
    args.workspace = workspace->untyped_data();
  }
  return ffi::Error::Success();
}

// Operands, results and attributes of the custom calls. Context: the device's stream or thread pool.

template <class Context>
auto BindEmissionForward() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // logits      [..., T, U1, V + D]  f16 | bf16 | f32 | f64
      .template Arg<ffi::AnyBuffer>()  // label       [..., T|1, U1]   s32
      .template Arg<ffi::AnyBuffer>()  // num_frames  [...]            s32
      .RemainingRets()  // log_blank x K, log_label, log_duration x D, norm  [..., T, U1]  f32 (f64 for f64)
      .template Attr<ffi::Span<const int64_t>>("blanks")
      .template Attr<int64_t>("normalize")
      .template Attr<int64_t>("durations")
      .template Attr<int64_t>("bernoulli");
}

template <class Context>
auto BindEmissionBackward() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // logits      [..., T, U1, V + D]
      .template Arg<ffi::AnyBuffer>()  // label       [..., T|1, U1]
      .template Arg<ffi::AnyBuffer>()  // num_frames  [...]
      .template Arg<ffi::AnyBuffer>()  // norm        [..., T, U1]
      .template Arg<ffi::AnyBuffer>()  // scale       [...]
      .template Arg<ffi::AnyBuffer>()  // clamp       [...]
      .RemainingArgs()  // cotangents of log_blank x K, log_label, log_duration x D; the total, or none  [..., T, U1]
      .template Ret<ffi::AnyBuffer>()  // dlogits     [..., T, U1, V + D]
      .template Attr<ffi::Span<const int64_t>>("blanks")
      .template Attr<int64_t>("normalize")
      .template Attr<int64_t>("durations")
      .template Attr<int64_t>("bernoulli");
}

// Loss and gradient have the same operands and attributes.
template <class Context>
auto BindLattice() {
  return ffi::Ffi::Bind()
      .Ctx<Context>()
      .template Arg<ffi::AnyBuffer>()  // log-probabilities, the first plane  [..., T, U1]  f32 | f64
      .template Arg<ffi::AnyBuffer>()  // num_frames  [...]  s32
      .template Arg<ffi::AnyBuffer>()  // num_labels  [...]  s32
      .RemainingArgs()                 // the other planes  [..., T, U1]
      .template Ret<ffi::AnyBuffer>()  // loss        [...]
      .RemainingRets()                 // gradient: of each plane [..., T, U1]; workspace [..., elements], or none
      .template Attr<ffi::Span<const int64_t>>("dt")
      .template Attr<ffi::Span<const int64_t>>("du")
      .template Attr<ffi::Span<const int64_t>>("may_end")
      .template Attr<ffi::Span<const int64_t>>("plane")
      .template Attr<ffi::Span<const int64_t>>("other");
}

// The handlers of a platform: `Stream` is what it gets from XLA, `Run` does what a call says.
template <class Platform>
struct Handlers {
  using Stream = typename Platform::Stream;

  static ffi::Error EmissionForward(Stream stream, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                    ffi::AnyBuffer num_frames, ffi::RemainingRets planes,
                                    ffi::Span<const int64_t> blanks, int64_t normalize, int64_t durations,
                                    int64_t bernoulli) {
    EmissionForwardCall call;
    auto error = Read(logits, label, num_frames, planes, {blanks, normalize, durations, bernoulli}, &call);
    return error.failure() ? error : Platform::Run(stream, call);
  }

  static ffi::Error EmissionBackward(Stream stream, ffi::AnyBuffer logits, ffi::AnyBuffer label,
                                     ffi::AnyBuffer num_frames, ffi::AnyBuffer norm, ffi::AnyBuffer scale,
                                     ffi::AnyBuffer clamp, ffi::RemainingArgs cotangents,
                                     ffi::Result<ffi::AnyBuffer> dlogits, ffi::Span<const int64_t> blanks,
                                     int64_t normalize, int64_t durations, int64_t bernoulli) {
    EmissionBackwardCall call;
    auto error = Read(logits, label, num_frames, norm, scale, clamp, cotangents, dlogits,
                      {blanks, normalize, durations, bernoulli}, &call);
    return error.failure() ? error : Platform::Run(stream, call);
  }

  template <bool kGradient>
  static ffi::Error Lattice(Stream stream, ffi::AnyBuffer first_plane, ffi::AnyBuffer num_frames,
                            ffi::AnyBuffer num_labels, ffi::RemainingArgs other_planes,
                            ffi::Result<ffi::AnyBuffer> loss, ffi::RemainingRets others, ffi::Span<const int64_t> dt,
                            ffi::Span<const int64_t> du, ffi::Span<const int64_t> may_end,
                            ffi::Span<const int64_t> plane, ffi::Span<const int64_t> other) {
    LatticeCall call;
    auto error = Read(first_plane, num_frames, num_labels, other_planes, {dt, du, may_end, plane, other}, &call);
    if (error.failure()) return error;
    const int64_t elements = Platform::WorkspaceOf(call.args, kGradient);
    error = ReadResults(loss, others, kGradient, elements, &call);
    return error.failure() ? error : Platform::Run(stream, call);
  }
};

}  // namespace jax_rnnt
