// Bindings of the custom calls of a joint network, and their buffers as the structs of joint.h. As common/ffi_calls.h,
// but there is no batch dimension: jax_rnnt/_xla/grouped.py gives each device its part.
#pragma once

#include "xla_kernels/common/ffi_calls.h"
#include "xla_kernels/cuda/joint.h"

namespace jax_rnnt::cuda {

// The attribute `shape`: the fields of JointShape in order, then `added_blanks`.
inline ffi::Error ReadJointShape(ffi::Span<const int64_t> x, JointShape* shape, int64_t* added_blanks) {
  if (x.size() != 20) return Invalid("the shape of a joint network has 20 numbers");
  *shape = {x[0],       x[1],       x[2],      x[3],  x[4],  x[5],  x[6],  x[7],
            x[8],       x[9],       x[10],     x[11], x[12], x[13], x[14], Activation(x[15]),
            x[16] != 0, x[17] != 0, x[18] != 0};
  *added_blanks = x[19];
  const bool fits = shape->classes % kJointClasses == 0 && shape->classes < INT32_MAX &&
                    shape->padded_units < 1 << 24 && shape->units <= shape->padded_units && shape->slab >= 1 &&
                    shape->blocks < INT32_MAX && shape->frame_bits + shape->copy_bits + shape->column_bits < 31 &&
                    x[15] >= 0 && x[15] <= 4 && shape->others >= 0 && shape->others <= kJointClasses &&
                    shape->blanks >= 1 && *added_blanks >= 0 && *added_blanks <= shape->blanks &&
                    shape->blanks <= kJointClasses && 2 * shape->slab * shape->padded_units / 32 < INT32_MAX;
  return fits ? ffi::Error::Success() : Invalid("no kernel has such a joint network");
}

inline ffi::Error ReadJointInputs(const JointShape& s, ffi::DataType factor, const ffi::AnyBuffer& list,
                                  const ffi::AnyBuffer& count, const ffi::AnyBuffer& num_frames,
                                  const ffi::AnyBuffer& num_labels, const ffi::AnyBuffer& label,
                                  const ffi::AnyBuffer& encoder, const ffi::AnyBuffer& predictor, JointInputs* inputs) {
  const auto s32 = ffi::DataType::S32;
  if (!ToDType(factor, &inputs->dtype) || !ToDType(encoder.element_type(), &inputs->rows) ||
      inputs->dtype == DType::kF64 || inputs->rows == DType::kF64)
    return Invalid("factors and rows of a joint network must be float16, bfloat16 or float32");
  const int64_t sequences = Product({s.encoders, s.copies});
  if (int64_t(list.element_count()) < s.blocks || list.element_type() != s32 || !Holds(count, s32, 1) ||
      !Holds(num_frames, s32, sequences) || !Holds(num_labels, s32, sequences) ||
      !Holds(label, s32, Product({sequences, s.columns})) ||
      !Holds(encoder, encoder.element_type(), Product({s.encoders, s.frames, s.units})) ||
      !Holds(predictor, encoder.element_type(), Product({sequences, s.columns, s.units})))
    return Invalid("the rows of a joint network have another shape");
  const int64_t row_bytes = s.padded_units * (inputs->dtype == DType::kF32 ? 4 : 2);
  if (row_bytes % kJointBytes != 0) return Invalid("units must be padded to 128 bytes");
  const auto ints = [](const ffi::AnyBuffer& x) { return static_cast<const int32_t*>(x.untyped_data()); };
  inputs->list = ints(list), inputs->count = ints(count);
  inputs->num_frames = ints(num_frames), inputs->num_labels = ints(num_labels), inputs->label = ints(label);
  inputs->encoder = encoder.untyped_data(), inputs->predictor = predictor.untyped_data();
  return ffi::Error::Success();
}

// The first operands of all three calls.
template <class Binding>
auto WithJointInputs(Binding binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()   // list        [blocks or more]  s32
      .template Arg<ffi::AnyBuffer>()   // count       []                s32
      .template Arg<ffi::AnyBuffer>()   // num_frames  [B N]             s32
      .template Arg<ffi::AnyBuffer>()   // num_labels  [B N]             s32
      .template Arg<ffi::AnyBuffer>()   // label       [B N, U1]         s32
      .template Arg<ffi::AnyBuffer>()   // encoder     [B, T, H]         f16 | bf16 | f32
      .template Arg<ffi::AnyBuffer>();  // predictor   [B N, U1, H]      as encoder
}

template <class Context>
auto BindJointForward() {
  return WithJointInputs(ffi::Ffi::Bind().Ctx<Context>())
      .template Arg<ffi::AnyBuffer>()  // weight  [V', H']  f16 | bf16 | f32
      .template Arg<ffi::AnyBuffer>()  // bias    [V']      f32
      .template Ret<ffi::AnyBuffer>()  // planes  [others + blanks + 3, B N, T, U1]  f32
      .template Attr<ffi::Span<const int64_t>>("shape");
}

template <class Context>
auto BindJointGradient() {
  return WithJointInputs(ffi::Ffi::Bind().Ctx<Context>())
      .template Arg<ffi::AnyBuffer>()  // weight    [V', H']
      .template Arg<ffi::AnyBuffer>()  // bias      [V']
      .template Arg<ffi::AnyBuffer>()  // numbers   [others + added blanks + 3, B N, T, U1]  f32
      .template Arg<ffi::AnyBuffer>()  // bound     [B N]  f32
      .template Arg<ffi::AnyBuffer>()  // slab      []     s32
      .template Ret<ffi::AnyBuffer>()  // hidden    [slab R, H']   as weight
      .template Ret<ffi::AnyBuffer>()  // gradient  [slab R, V']   as weight
      .template Ret<ffi::AnyBuffer>()  // of_bias   [slab, 2, V']  f32
      .template Ret<ffi::AnyBuffer>()  // here      []             s32
      .template Attr<ffi::Span<const int64_t>>("shape");
}

template <class Context>
auto BindJointSums() {
  return WithJointInputs(ffi::Ffi::Bind().Ctx<Context>())
      .template Arg<ffi::AnyBuffer>()  // here       []             s32
      .template Arg<ffi::AnyBuffer>()  // of_hidden  [slab R, H']   as weight
      .template Arg<ffi::AnyBuffer>()  // of_bias    [slab, 2, V']  f32
      .template Arg<ffi::AnyBuffer>()  // gradients of encoder [B, T, H], as encoder, predictor [B N, U1, H] and bias
                                       // [V'],
      .template Arg<ffi::AnyBuffer>()  // carry [2, R / 8, H]: f32, and slab [], whose memory the results but the last
                                       // take
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()
      .template Ret<ffi::AnyBuffer>()  // next  []  s32
      .template Ret<ffi::AnyBuffer>()  // more  []  pred
      .template Attr<ffi::Span<const int64_t>>("shape");
}

// The handlers; `Platform` as in common/ffi_calls.h.
template <class Platform>
struct JointHandlers {
  using Stream = typename Platform::Stream;
  using Buffer = ffi::AnyBuffer;
  using Result = ffi::Result<ffi::AnyBuffer>;

  // Not const, which has no * in jaxlib 0.6.
  static bool Is(Result x, ffi::DataType type, int64_t elements) { return Holds(*x, type, elements); }

  static ffi::Error Forward(Stream stream, Buffer list, Buffer count, Buffer num_frames, Buffer num_labels,
                            Buffer label, Buffer encoder, Buffer predictor, Buffer weight, Buffer bias, Result planes,
                            ffi::Span<const int64_t> sizes) {
    JointForwardArgs args = {};
    int64_t blanks;
    JointShape& s = args.shape;
    if (auto error = ReadJointShape(sizes, &s, &blanks); error.failure()) return error;
    if (auto error = ReadJointInputs(s, weight.element_type(), list, count, num_frames, num_labels, label, encoder,
                                     predictor, &args.inputs);
        error.failure())
      return error;
    if (!Holds(weight, weight.element_type(), s.classes * s.padded_units) ||
        !Holds(bias, ffi::DataType::F32, s.classes) ||
        !Is(planes, ffi::DataType::F32, Product({s.others + s.blanks + 3, s.encoders, s.copies, s.frames, s.columns})))
      return Invalid("weight, bias or planes of a joint network have another shape");
    args.weight = weight.untyped_data();
    args.bias = static_cast<const float*>(bias.untyped_data());
    args.planes = static_cast<float*>(planes->untyped_data());
    return Platform::Run(stream, args);
  }

  static ffi::Error Gradient(Stream stream, Buffer list, Buffer count, Buffer num_frames, Buffer num_labels,
                             Buffer label, Buffer encoder, Buffer predictor, Buffer weight, Buffer bias, Buffer numbers,
                             Buffer bound, Buffer slab, Result hidden, Result gradient, Result of_bias, Result here,
                             ffi::Span<const int64_t> sizes) {
    JointGradientArgs args = {};
    JointShape& s = args.shape;
    if (auto error = ReadJointShape(sizes, &s, &args.added_blanks); error.failure()) return error;
    const auto type = weight.element_type(), f32 = ffi::DataType::F32;
    if (auto error =
            ReadJointInputs(s, type, list, count, num_frames, num_labels, label, encoder, predictor, &args.inputs);
        error.failure())
      return error;
    const int64_t rows = Product({s.slab, s.rows});
    if (!Holds(weight, type, s.classes * s.padded_units) || !Holds(bias, f32, s.classes) ||
        !Holds(numbers, f32, Product({s.others + args.added_blanks + 3, s.encoders, s.copies, s.frames, s.columns})) ||
        !Holds(bound, f32, s.encoders * s.copies) || !Holds(slab, ffi::DataType::S32, 1) ||
        !Is(hidden, type, Product({rows, s.padded_units})) || !Is(gradient, type, Product({rows, s.classes})) ||
        !Is(of_bias, f32, Product({s.slab, 2, s.classes})) || !Is(here, ffi::DataType::S32, 1))
      return Invalid("operands of a joint network's gradient have another shape");
    args.weight = weight.untyped_data();
    args.bias = static_cast<const float*>(bias.untyped_data());
    args.numbers = static_cast<const float*>(numbers.untyped_data());
    args.bound = static_cast<const float*>(bound.untyped_data());
    args.slab = static_cast<const int32_t*>(slab.untyped_data());
    args.hidden = hidden->untyped_data();
    args.gradient = gradient->untyped_data();
    args.of_bias = static_cast<float*>(of_bias->untyped_data());
    args.here = static_cast<int32_t*>(here->untyped_data());
    return Platform::Run(stream, args);
  }

  static ffi::Error Sums(Stream stream, Buffer list, Buffer count, Buffer num_frames, Buffer num_labels, Buffer label,
                         Buffer encoder, Buffer predictor, Buffer here, Buffer of_hidden, Buffer of_bias, Buffer,
                         Buffer, Buffer, Buffer, Buffer, Result of_encoder, Result of_predictor, Result of_bias_sum,
                         Result carry, Result next, Result more, ffi::Span<const int64_t> sizes) {
    JointSumsArgs args = {};
    JointShape& s = args.shape;
    int64_t blanks;
    if (auto error = ReadJointShape(sizes, &s, &blanks); error.failure()) return error;
    const auto type = of_hidden.element_type(), f32 = ffi::DataType::F32;
    if (auto error =
            ReadJointInputs(s, type, list, count, num_frames, num_labels, label, encoder, predictor, &args.inputs);
        error.failure())
      return error;
    if (!Holds(here, ffi::DataType::S32, 1) || !Holds(of_hidden, type, Product({s.slab, s.rows, s.padded_units})) ||
        !Holds(of_bias, f32, Product({s.slab, 2, s.classes})) ||
        !Is(of_encoder, encoder.element_type(), Product({s.encoders, s.frames, s.units})) ||
        !Is(of_predictor, f32, Product({s.encoders, s.copies, s.columns, s.units})) ||
        !Is(of_bias_sum, f32, s.classes) || !Is(carry, f32, Product({2, s.rows / kJointColumns, s.units})) ||
        !Is(next, ffi::DataType::S32, 1) || !Is(more, ffi::DataType::PRED, 1))
      return Invalid("operands of a joint network's sums have another shape");
    args.slab = static_cast<const int32_t*>(here.untyped_data());
    args.of_hidden = of_hidden.untyped_data();
    args.of_bias = static_cast<const float*>(of_bias.untyped_data());
    args.encoder_gradient = of_encoder->untyped_data();
    args.predictor_gradient = static_cast<float*>(of_predictor->untyped_data());
    args.bias_gradient = static_cast<float*>(of_bias_sum->untyped_data());
    args.carry = static_cast<float*>(carry->untyped_data());
    args.next = static_cast<int32_t*>(next->untyped_data());
    args.more = static_cast<bool*>(more->untyped_data());
    return Platform::Run(stream, args);
  }
};

}  // namespace jax_rnnt::cuda
