// Custom calls of the emission and the lattice, read into the structs of shape.h for the kernels of all devices.
//
// All leading dimensions are batch. Handlers never fail on data: an error on one of several devices would stall the
// all-reduce of the others, and XLA calls handlers on padding rows too. The checks here catch mistakes of the caller in
// jax_rnnt/_xla, not of the user.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xla_kernels/common/call.h"
#include "xla_kernels/common/registration.h"
#include "xla_kernels/common/shape.h"

namespace jax_rnnt {

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

// The type A of planes and of numbers for each sequence.
inline ffi::DataType Accumulation(bool is_double) { return is_double ? ffi::DataType::F64 : ffi::DataType::F32; }

// logits [..., T, U1, V + D] of float16, bfloat16, float32 or float64, label int32 [..., 1 or T, U1], num_frames int32
// [...]; the attributes blanks, normalize, durations, bernoulli.
inline ffi::Error ReadShape(Call* call, DType* dtype, EmissionShape* shape) {
  const size_t n = call->Rank(0);
  if (n < 3 || call->Rank(1) + 1 != n) return Invalid("logits must be [..., T, U1, V + D], label [..., T|1, U1]");
  if (!ToDType(call->Type(0), dtype)) return Invalid("logits must be float16, bfloat16, float32 or float64");
  if (call->Type(1) != ffi::DataType::S32 || call->Type(2) != ffi::DataType::S32)
    return Invalid("label and num_frames must be int32");
  const auto blanks = call->Numbers("blanks");
  const int64_t durations = call->Number("durations"), row = call->Dimension(0, 0);
  if (durations < 0 || durations > kMaxDurations) return OutOfRange("durations", 0, kMaxDurations);
  *shape = {call->Elements(2),
            call->Dimension(0, 2),
            call->Dimension(0, 1),
            row - durations,
            durations,
            call->Dimension(1, 1),
            call->Number("normalize") != 0,
            call->Number("bernoulli") != 0,
            static_cast<int>(blanks.size()),
            blanks.begin()};
  if (call->Dimension(1, 0) != shape->columns || (shape->label_frames != 1 && shape->label_frames != shape->frames))
    return Invalid("label must be [..., T|1, U1]");
  if (Product({shape->batch, shape->frames, shape->columns, row}) != call->Elements(0) ||
      Product({shape->batch, shape->label_frames, shape->columns}) != call->Elements(1))
    return Invalid("logits, label and num_frames must have the same batch dimensions");
  if (blanks.size() < 1 || blanks.size() > kMaxBlanks) return OutOfRange("blank classes", 1, kMaxBlanks);
  if (row > kMaxRow) return OutOfRange("logits of a row", 0, kMaxRow);
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

// Results: log_blank of each blank, log_label, log_duration of each duration, norm, all [..., T, U1].
inline ffi::Error Read(Call* call, EmissionForwardCall* work) {
  EmissionForwardArgs& args = work->args;
  if (auto error = ReadShape(call, &work->dtype, &args.shape); error.failure()) return error;
  const EmissionShape& s = args.shape;
  if (call->results() != size_t(s.num_blanks + s.durations + 2))
    return Invalid("emission forward gives a plane per blank, log_label, a plane per duration, and norm");
  const ffi::DataType type = Accumulation(work->dtype == DType::kF64);
  args.logits = call->In(call->Type(0), call->Elements(0));
  args.label = call->In<int32_t>(call->Elements(1));
  args.num_frames = call->In<int32_t>(s.batch);
  for (size_t i = 0; i < call->results(); ++i)
    work->planes.push_back(call->Out(type, Product({s.batch, s.frames, s.columns})));
  args.log_blank = work->planes.data();
  args.log_label = work->planes[s.num_blanks];
  args.log_duration = work->planes.data() + s.num_blanks + 1;
  args.norm = work->planes.back();
  return call->fit() ? ffi::Error::Success()
                     : Invalid("planes must be [..., T, U1], float64 for float64, else float32");
}

struct EmissionBackwardCall {
  DType dtype;
  EmissionBackwardArgs args{};
  std::vector<const void*> planes;  // args.ct_blank points into it
};

// Further arguments: norm [..., T, U1], scale [...], clamp [...], cotangents of the planes of the forward pass but
// norm, and the total or none. Result: dlogits, as logits.
inline ffi::Error Read(Call* call, EmissionBackwardCall* work) {
  EmissionBackwardArgs& args = work->args;
  if (auto error = ReadShape(call, &work->dtype, &args.shape); error.failure()) return error;
  const EmissionShape& s = args.shape;
  const size_t arcs = s.num_blanks + s.durations + 1, planes = call->arguments() - 6;
  const bool has_total = planes == arcs + 1 && !s.bernoulli;
  if (call->arguments() < 6 || (planes != arcs && !has_total))
    return Invalid(
        "emission backward takes a plane per blank, one of labels, a plane per duration, and, without a Bernoulli "
        "blank, one plane more or none: the total");
  const ffi::DataType type = Accumulation(work->dtype == DType::kF64);
  const int64_t nodes = Product({s.batch, s.frames, s.columns});
  args.logits = call->In(call->Type(0), call->Elements(0));
  args.label = call->In<int32_t>(call->Elements(1));
  args.num_frames = call->In<int32_t>(s.batch);
  args.norm = call->In(type, nodes);
  args.scale = call->In(type, s.batch);
  args.clamp = call->In(type, s.batch);
  for (size_t i = 0; i < planes; ++i) work->planes.push_back(call->In(type, nodes));
  args.ct_blank = work->planes.data();
  args.ct_label = work->planes[s.num_blanks];
  args.ct_duration = work->planes.data() + s.num_blanks + 1;
  if (has_total) args.total = work->planes.back();
  args.dlogits = call->Out(call->Type(0), call->Elements(0));
  return call->fit() ? ffi::Error::Success()
                     : Invalid(
                           "planes must be [..., T, U1], scale and clamp [...], float64 for float64, else float32, "
                           "dlogits like logits");
}

struct LatticeCall {
  bool is_double;
  LatticeArgs args{};
  std::vector<const void*> log_planes;  // args.log_plane points into it
  std::vector<void*> grad_planes;       // args.grad_plane points into it
};

// Arguments: the first plane of log-probabilities [..., T, U1] of float32 or float64, num_frames and num_labels int32
// [...], the other planes; the attributes dt, du, may_end, plane and other, of each arc. Results: the loss [...]; with
// `gradient` that of each plane; the workspace, if `elements` says that a sequence needs some.
inline ffi::Error Read(Call* call, bool gradient, int64_t (*elements)(const LatticeArgs&, bool), LatticeCall* work) {
  LatticeArgs& args = work->args;
  work->is_double = call->Type(0) == ffi::DataType::F64;
  if (call->Rank(0) < 2 || call->Dimension(0, 0) < 1) return Invalid("arcs must be [..., T, U1], U1 >= 1");
  if (!work->is_double && call->Type(0) != ffi::DataType::F32) return Invalid("arcs must be float32 or float64");
  if (call->Type(1) != ffi::DataType::S32 || call->Type(2) != ffi::DataType::S32)
    return Invalid("lengths must be int32");
  const auto dt = call->Numbers("dt"), du = call->Numbers("du"), may_end = call->Numbers("may_end");
  const auto plane = call->Numbers("plane"), other = call->Numbers("other");
  const size_t n = dt.size(), planes = call->arguments() - 2;
  if (du.size() != n || may_end.size() != n || plane.size() != n || other.size() != n || n < 1)
    return Invalid("the attributes dt, du, may_end, plane and other must have an entry for each arc");
  if (n > kMaxArcs || planes > kMaxArcs) return OutOfRange("arcs and planes", 1, kMaxArcs);
  for (size_t k = 0; k < n; ++k) {
    if (dt[k] < 0 || dt[k] > INT32_MAX || du[k] < 0 || du[k] > kMaxArcLabels || (dt[k] == 0 && du[k] == 0))
      return Invalid("every arc must move, by at most one label");
    if (plane[k] < 0 || plane[k] >= int64_t(planes) || other[k] >= int64_t(planes) || other[k] == plane[k])
      return Invalid("there is no such plane");
  }
  args.topology = {static_cast<int>(n), static_cast<int>(planes), dt.begin(),
                   du.begin(),          may_end.begin(),          plane.begin(),
                   other.begin()};
  args.batch = call->Elements(1);
  args.frames = call->Dimension(0, 1);
  args.columns = call->Dimension(0, 0);
  // Without sequences, frames and columns may be any numbers; the workspace of a node is at most 66 elements.
  if (Product({66, args.frames, args.columns}) < 0 ||
      Product({args.batch, args.frames, args.columns}) != call->Elements(0) || call->Elements(2) != args.batch)
    return Invalid("arcs and lengths must have the same batch dimensions");
  const ffi::DataType type = call->Type(0);
  const int64_t nodes = call->Elements(0), room = elements(args, gradient);
  work->log_planes.push_back(call->In(type, nodes));
  args.num_frames = call->In<int32_t>(args.batch);
  args.num_labels = call->In<int32_t>(args.batch);
  for (size_t k = 1; k < planes; ++k) work->log_planes.push_back(call->In(type, nodes));
  args.log_plane = work->log_planes.data();
  args.loss = call->Out(type, args.batch);
  for (size_t k = 0; gradient && k < planes; ++k) work->grad_planes.push_back(call->Out(type, nodes));
  if (gradient) args.grad_plane = work->grad_planes.data();
  if (room > 0) args.workspace = call->Out(type, args.batch * room, true);
  return room >= 0 && call->fit() ? ffi::Error::Success()
                                  : Invalid(
                                        "arcs must have one shape and type, the loss [...] their type, gradients both, "
                                        "and a workspace room");
}

}  // namespace jax_rnnt
