// In place of XLA: buffers, attributes, threads and the call frame of a handler. Each buffer is an allocation
// of its own of the exact size, for AddressSanitizer.
#ifndef JAX_RNNT_TOOLS_FUZZ_CALLS_H_
#define JAX_RNNT_TOOLS_FUZZ_CALLS_H_

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "xla/ffi/api/c_api.h"
#include "xla_kernels/common/registration.h"

struct XLA_FFI_Error {
  std::string message;
};

namespace jax_rnnt::fuzz {

inline int workers = 0;  // that XLA's pool would have; set before the first call

// ------------------------------------------------------------------------------------------------ in place of XLA

inline const XLA_FFI_Api& Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api table = {};
    table.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    table.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    table.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) { return new XLA_FFI_Error{args->message}; };
    table.XLA_FFI_Error_GetMessage = [](XLA_FFI_Error_GetMessage_Args* args) {
      args->message = args->error->message.c_str();
    };
    table.XLA_FFI_Error_Destroy = [](XLA_FFI_Error_Destroy_Args* args) { delete args->error; };
    table.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) -> XLA_FFI_Error* {
      *args->num_threads = workers;
      return nullptr;
    };
    table.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) -> XLA_FFI_Error* {
      std::thread(args->task, args->data).detach();  // a task owns what it uses: it may begin after the call's end
      return nullptr;
    };
    return table;
  }();
  return api;
}

// ------------------------------------------------------------------------------------------------------- the call

inline size_t Width(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_S64:
      return 8;
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
      return 4;
    default:
      return 2;
  }
}

constexpr int64_t kMostBytes = 1 << 22;  // of a buffer

struct Buffer {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  int alias = -1;  // a result in the memory of this operand
  std::unique_ptr<char[]> memory = nullptr;
  char* data = nullptr;

  // -1: no buffer of XLA has these dimensions.
  int64_t Elements() const {
    int64_t product = 1, without_zeros = 1;
    for (int64_t dim : dims) {
      if (dim < 0 || dim > (int64_t{1} << 40)) return -1;
      if (dim > 0 && without_zeros > (int64_t{1} << 60) / dim) return -1;
      without_zeros *= dim > 0 ? dim : 1;
      product *= dim;
    }
    return product;
  }
};

struct Attribute {
  const char* name;
  bool is_array;
  std::vector<int64_t> values;
};

struct Call {
  const char* target;
  std::vector<Buffer> args, rets;
  std::vector<Attribute> attributes;  // in the order of their names, as XLA sorts them
  bool changed = false;
};

// --------------------------------------------------------------------------------------------------------- running

inline void Show(const Call& call, const char* title) {
  fprintf(stderr, "%s: %s\n", title, call.target);
  for (const auto* buffers : {&call.args, &call.rets}) {
    for (const Buffer& buffer : *buffers) {
      fprintf(stderr, "  type %d [", int(buffer.type));
      for (int64_t dim : buffer.dims) fprintf(stderr, " %lld", static_cast<long long>(dim));
      fprintf(stderr, " ]\n");
    }
  }
  for (const Attribute& attribute : call.attributes) {
    fprintf(stderr, "  %s", attribute.name);
    for (int64_t value : attribute.values) fprintf(stderr, " %lld", static_cast<long long>(value));
    fprintf(stderr, "\n");
  }
}

[[noreturn]] inline void Fail(const Call& call, const std::string& reason) {
  Show(call, ("FAILED: " + reason).c_str());
  abort();
}

// What the handler says; nullptr: it took the call.
inline XLA_FFI_Error* Execute(Call* call) {
  static const std::vector<Registration> handlers = Registrations();
  const auto handler = std::find_if(handlers.begin(), handlers.end(),
                                    [&](const Registration& r) { return strcmp(r.target, call->target) == 0; });
  std::vector<XLA_FFI_Buffer> buffers;
  std::vector<XLA_FFI_Array> arrays;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan> names;
  std::vector<void*> pointers, attr_pointers;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<XLA_FFI_AttrType> attr_types;
  std::vector<XLA_FFI_ArgType> arg_types(call->args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(call->rets.size(), XLA_FFI_RetType_BUFFER);
  for (auto* list : {&call->args, &call->rets})
    for (Buffer& b : *list)
      buffers.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, b.type, b.data, int64_t(b.dims.size()), b.dims.data()});
  for (XLA_FFI_Buffer& buffer : buffers) pointers.push_back(&buffer);
  for (Attribute& a : call->attributes) {
    names.push_back({a.name, strlen(a.name)});
    arrays.push_back({XLA_FFI_DataType_S64, a.values.size(), a.values.data()});
    scalars.push_back({XLA_FFI_DataType_S64, a.values.data()});
  }
  for (size_t i = 0; i < call->attributes.size(); ++i) {
    const bool is_array = call->attributes[i].is_array;
    attr_types.push_back(is_array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR);
    name_pointers.push_back(&names[i]);
    attr_pointers.push_back(is_array ? static_cast<void*>(&arrays[i]) : &scalars[i]);
  }
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &Api();
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, int64_t(arg_types.size()), arg_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, int64_t(ret_types.size()), ret_types.data(),
                pointers.data() + arg_types.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,  nullptr,
                 int64_t(attr_types.size()), attr_types.data(),
                 name_pointers.data(),       attr_pointers.data()};
  return reinterpret_cast<XLA_FFI_Handler*>(handler->execute)(&frame);
}

}  // namespace jax_rnnt::fuzz

#endif  // JAX_RNNT_TOOLS_FUZZ_CALLS_H_
