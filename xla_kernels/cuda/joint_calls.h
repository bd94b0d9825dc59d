// Custom calls of a joint network, read into the structs of joint.h. There is no batch dimension:
// jax_rnnt/_xla/grouped.py gives each device its part.
#pragma once

#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/cuda/joint.h"

namespace jax_rnnt::cuda {

// The attribute `shape`: the fields of JointShape in order, then `added_blanks`. Then the arguments that all three
// calls have first; argument `factor` has the type of the weight.
inline ffi::Error ReadJoint(Call* call, size_t factor, JointShape* shape, JointInputs* inputs, int64_t* added_blanks) {
  const auto x = call->Numbers("shape");
  if (x.size() != 20) return Invalid("the shape of a joint network has 20 numbers");
  *shape = {x[0],       x[1],       x[2],      x[3],  x[4],  x[5],  x[6],  x[7],
            x[8],       x[9],       x[10],     x[11], x[12], x[13], x[14], Activation(x[15]),
            x[16] != 0, x[17] != 0, x[18] != 0};
  *added_blanks = x[19];
  const JointShape& s = *shape;
  const bool fits = s.classes > 0 && s.classes % kJointClasses == 0 && s.classes < INT32_MAX &&
                    s.padded_units < 1 << 24 && s.units >= 0 && s.units <= s.padded_units && s.slab >= 1 &&
                    s.blocks <= kMaxJointBlocks && s.frame_bits + s.copy_bits + s.column_bits < 31 && x[15] >= 0 &&
                    x[15] < kNumActivations && s.others >= 0 && s.others <= kJointClasses && s.blanks >= 1 &&
                    *added_blanks >= 0 && *added_blanks <= s.blanks && s.blanks <= kJointClasses &&
                    2 * s.slab * s.padded_units / 32 < INT32_MAX;
  if (!fits) return Invalid("no kernel has such a joint network");
  const ffi::DataType rows = call->Type(5);
  if (!ToDType(call->Type(factor), &inputs->dtype) || !ToDType(rows, &inputs->rows) || inputs->dtype == DType::kF64 ||
      inputs->rows == DType::kF64)
    return Invalid("factors and rows of a joint network must be float16, bfloat16 or float32");
  if (s.padded_units * (inputs->dtype == DType::kF32 ? 4 : 2) % kJointBytes != 0)
    return Invalid("units must be padded to 128 bytes");
  const int64_t sequences = Product({s.encoders, s.copies});
  inputs->list = call->In<int32_t>(std::max(s.blocks, call->Elements(0)));  // it may be longer
  inputs->count = call->In<int32_t>(1);
  inputs->num_frames = call->In<int32_t>(sequences);
  inputs->num_labels = call->In<int32_t>(sequences);
  inputs->label = call->In<int32_t>(Product({sequences, s.columns}));
  inputs->encoder = call->In(rows, Product({s.encoders, s.frames, s.units}));
  inputs->predictor = call->In(rows, Product({sequences, s.columns, s.units}));
  return ffi::Error::Success();
}

inline ffi::Error Fits(const Call& call) {
  return call.fit() ? ffi::Error::Success() : Invalid("buffers of a joint network have another shape");
}

inline ffi::Error Read(Call* call, JointForwardArgs* args) {
  const JointShape& s = args->shape;
  int64_t blanks;
  if (auto error = ReadJoint(call, 7, &args->shape, &args->inputs, &blanks); error.failure()) return error;
  args->weight = call->In(call->Type(7), s.classes * s.padded_units);
  args->bias = call->In<float>(s.classes);
  args->planes = call->Out<float>(Product({s.others + s.blanks + 3, s.encoders, s.copies, s.frames, s.columns}));
  return Fits(*call);
}

inline ffi::Error Read(Call* call, JointGradientArgs* args) {
  const JointShape& s = args->shape;
  if (auto error = ReadJoint(call, 7, &args->shape, &args->inputs, &args->added_blanks); error.failure()) return error;
  const ffi::DataType type = call->Type(7);
  const int64_t rows = Product({s.slab, s.rows}), planes = s.others + args->added_blanks + 3;
  args->weight = call->In(type, s.classes * s.padded_units);
  args->bias = call->In<float>(s.classes);
  args->numbers = call->In<float>(Product({planes, s.encoders, s.copies, s.frames, s.columns}));
  args->bound = call->In<float>(s.encoders * s.copies);
  args->slab = call->In<int32_t>(1);
  args->hidden = call->Out(type, Product({rows, s.padded_units}));
  args->gradient = call->Out(type, Product({rows, s.classes}));
  args->of_bias = call->Out<float>(Product({s.slab, 2, s.classes}));
  args->here = call->Out<int32_t>(1);
  return Fits(*call);
}

inline ffi::Error Read(Call* call, JointSumsArgs* args) {
  const JointShape& s = args->shape;
  int64_t blanks;
  if (auto error = ReadJoint(call, 8, &args->shape, &args->inputs, &blanks); error.failure()) return error;
  args->slab = call->In<int32_t>(1);
  args->of_hidden = call->In(call->Type(8), Product({s.slab, s.rows, s.padded_units}));
  args->of_bias = call->In<float>(Product({s.slab, 2, s.classes}));
  call->Skip(5);  // gradients of encoder, predictor and bias, carry, the number of the slab: the results but the last
  args->encoder_gradient = call->Out(call->Type(5), Product({s.encoders, s.frames, s.units}));
  args->predictor_gradient = call->Out<float>(Product({s.encoders, s.copies, s.columns, s.units}));
  args->bias_gradient = call->Out<float>(s.classes);
  args->carry = call->Out<float>(Product({2, s.rows / kJointColumns, s.units}));
  args->next = call->Out<int32_t>(1);
  args->more = call->Out<bool>(1);
  return Fits(*call);
}

}  // namespace jax_rnnt::cuda
