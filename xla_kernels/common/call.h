// A custom call of XLA: buffers one after another, attributes by name.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#include "xla/ffi/api/ffi.h"
#include "xla_kernels/common/shape.h"

namespace jax_rnnt {

namespace ffi = xla::ffi;

inline ffi::Error Invalid(const std::string& message) { return ffi::Error::InvalidArgument("jax_rnnt: " + message); }

// The product of sizes; -1 where 64 bits do not hold it, which no buffer has.
inline int64_t Product(std::initializer_list<int64_t> sizes) {
  int64_t product = 1;
  for (int64_t size : sizes)
    if (__builtin_mul_overflow(product, size, &product)) return -1;
  return product;
}

// Reads of buffers check their types and numbers of elements, those of attributes that they are there. `fit` says
// whether all did, and nothing is left.
class Call {
 public:
  Call(const ffi::RemainingArgs& arguments, const ffi::RemainingRets& results, const ffi::Dictionary& attributes)
      : arguments_(arguments), results_(results), attributes_(attributes) {}

  // The next argument; null if it does not fit.
  const void* In(ffi::DataType type, int64_t elements) {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(in_++);
    fits_ = fits_ && buffer.has_value() && Holds(*buffer, type, elements);
    return fits_ ? buffer->untyped_data() : nullptr;
  }
  template <class T>
  const T* In(int64_t elements) {
    return static_cast<const T*>(In(kType<T>, elements));
  }
  // Arguments whose memory results take.
  void Skip(size_t arguments) { in_ += arguments; }
  // The next result; with `or_more`, one that may be larger.
  void* Out(ffi::DataType type, int64_t elements, bool or_more = false) {
    auto buffer = results_.get<ffi::AnyBuffer>(out_++);  // const has no * in jaxlib 0.6
    if (buffer.has_value() && or_more) elements = std::max(elements, int64_t((*buffer)->element_count()));
    fits_ = fits_ && buffer.has_value() && Holds(**buffer, type, elements);
    return fits_ ? (*buffer)->untyped_data() : nullptr;
  }
  template <class T>
  T* Out(int64_t elements) {
    return static_cast<T*>(Out(kType<T>, elements));
  }

  size_t arguments() const { return arguments_.size(); }
  size_t results() const { return results_.size(); }
  ffi::DataType Type(size_t argument) const {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(argument);
    return buffer.has_value() ? buffer->element_type() : ffi::DataType::INVALID;
  }
  int64_t Elements(size_t argument) const {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(argument);
    return buffer.has_value() ? int64_t(buffer->element_count()) : 0;
  }
  size_t Rank(size_t argument) const {
    const auto buffer = arguments_.get<ffi::AnyBuffer>(argument);
    return buffer.has_value() ? buffer->dimensions().size() : 0;
  }
  // A dimension, counted from the last one, which is 0; 0 if there is none.
  int64_t Dimension(size_t argument, size_t from_end) {
    const size_t rank = Rank(argument);
    fits_ = fits_ && from_end < rank;
    return from_end < rank ? arguments_.get<ffi::AnyBuffer>(argument)->dimensions()[rank - 1 - from_end] : 0;
  }

  int64_t Number(std::string_view name) { return Attribute<int64_t>(name); }
  ffi::Span<const int64_t> Numbers(std::string_view name) { return Attribute<ffi::Span<const int64_t>>(name); }

  bool fit() const {
    return fits_ && in_ == arguments_.size() && out_ == results_.size() && attributes_read_ == attributes_.size();
  }

 private:
  template <class T>
  static constexpr ffi::DataType kType = std::is_same_v<T, float>  ? ffi::DataType::F32
                                         : std::is_same_v<T, bool> ? ffi::DataType::PRED
                                                                   : ffi::DataType::S32;
  // Whether a kernel that expects this type and number of elements stays inside the buffer.
  static bool Holds(const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t elements) {
    return buffer.element_type() == type && static_cast<int64_t>(buffer.element_count()) == elements;
  }
  template <class T>
  T Attribute(std::string_view name) {
    auto value = attributes_.get<T>(name);
    ++attributes_read_;
    fits_ = fits_ && value.has_value();
    return value.has_value() ? *value : T{};
  }

  ffi::RemainingArgs arguments_;
  ffi::RemainingRets results_;
  ffi::Dictionary attributes_;
  size_t in_ = 0, out_ = 0, attributes_read_ = 0;
  bool fits_ = true;
};

// How XLA calls a handler. Context: the device's stream or thread pool.
template <class Context>
auto BindAll() {
  return ffi::Ffi::Bind().Ctx<Context>().RemainingArgs().RemainingRets().Attrs();
}

}  // namespace jax_rnnt
