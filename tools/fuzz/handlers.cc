// Calls the CPU kernels' handlers as XLA does, with shapes, types, lengths, labels, attributes and numbers made from
// bytes. A handler must take a call or refuse it; it must stay inside its buffers and write every element of its
// results.
//
// The bytes describe a call that fits together, and then up to four changes to it: a dimension, a type, a buffer too
// many or too few, an attribute. A call without a change must be taken.
//
// fuzz.py builds it for libFuzzer, or with threads of its own (JAX_RNNT_FUZZ_THREADS) for ThreadSanitizer: all threads
// call at once and share the workers that stand for XLA's pool.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tools/fuzz/calls.h"
#include "xla_kernels/common/shape.h"
#include "xla_kernels/common/workspace.h"
#include "xla_kernels/cpu/dispatch.h"

namespace jax_rnnt::fuzz {
namespace {

// ------------------------------------------------------------------------------------------------------ the bytes

struct Bytes {
  const uint8_t* next;
  const uint8_t* end;

  int Byte() { return next < end ? *next++ : 0; }
  int64_t Below(int64_t n) { return (n > 256 ? Byte() * 256 + Byte() : Byte()) % n; }
  bool Bit() { return Byte() & 1; }
  uint64_t Word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | uint64_t(Byte());
    return word;
  }
  // A size, length, label or attribute that a caller gets wrong.
  int64_t Odd() {
    static constexpr int64_t kOdd[] = {0,         1,         2,         -1,        -2,           -3,        7,
                                       63,        64,        65,        1 << 20,   1 << 26,      INT32_MAX, INT32_MIN,
                                       INT64_MAX, INT64_MIN, 1ll << 32, 1ll << 62, (1 << 26) + 1};
    constexpr int64_t kCount = sizeof kOdd / sizeof kOdd[0];
    const int64_t i = Below(kCount + 2);
    return i < kCount ? kOdd[i] : i == kCount ? Byte() : int64_t(Word());
  }
};

// ------------------------------------------------------------------------------------------------------- the call

using Dims = std::vector<int64_t>;

Dims Join(Dims a, const Dims& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Dimensions of a batch, and B, T, U1.
struct Sizes {
  Dims batch;
  int64_t frames, columns;
};

// Most calls are of a few nodes: what is refused, and where loops begin and end, shows there, and a call of hundreds of
// nodes takes as long as twenty of them.
Sizes MakeSizes(Bytes& in, bool large) {
  Sizes sizes;
  const bool tiny = !large && in.Below(16) != 0;
  for (int64_t i = in.Below(3); i > 0; --i) sizes.batch.push_back(large ? 2 + in.Below(6) : in.Below(3));
  sizes.frames = large ? 100 + in.Below(300) : tiny ? in.Below(6) : in.Below(20);
  sizes.columns = large ? 20 + in.Below(60) : tiny ? in.Below(6) : in.Below(36);
  return sizes;
}

constexpr XLA_FFI_DataType kFloats[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_F16,
                                        XLA_FFI_DataType_BF16};

Call MakeEmission(Bytes& in, bool backward, bool large) {
  const Sizes sizes = MakeSizes(in, large);
  int64_t nodes_of_all = sizes.frames * sizes.columns;
  for (int64_t size : sizes.batch) nodes_of_all *= size;
  // Small calls are many calls: longer rows where there are few.
  const int64_t most = std::clamp<int64_t>((large ? 1 << 20 : 1 << 11) / (nodes_of_all + 1), 1, 300);
  const int64_t classes = 1 + in.Below(in.Below(8) != 0 ? std::min<int64_t>(most, 8) : most);
  const bool bernoulli = in.Below(4) == 0;
  const int64_t blanks = bernoulli ? 1 : 1 + (in.Bit() ? 0 : in.Below(5)), durations = in.Bit() ? 0 : in.Below(5);
  const XLA_FFI_DataType type = kFloats[in.Below(4)], plane = type == kFloats[1] ? kFloats[1] : kFloats[0];
  const Dims nodes = Join(sizes.batch, {sizes.frames, sizes.columns}), rows = Join(nodes, {classes + durations});
  Call call;
  call.target = backward ? "jax_rnnt_softmax_emission_bwd" : "jax_rnnt_softmax_emission_fwd";
  call.args.push_back({type, rows});
  call.args.push_back({XLA_FFI_DataType_S32, Join(sizes.batch, {in.Bit() ? sizes.frames : 1, sizes.columns})});
  call.args.push_back({XLA_FFI_DataType_S32, sizes.batch});
  if (backward) {
    call.args.push_back({plane, nodes});
    call.args.push_back({plane, sizes.batch});
    call.args.push_back({plane, sizes.batch});
    for (int64_t i = 0; i < blanks + durations + 1; ++i) call.args.push_back({plane, nodes});
    call.rets.push_back({type, rows, in.Bit() ? 0 : -1});
  } else {
    for (int64_t i = 0; i < blanks + durations + 2; ++i) call.rets.push_back({plane, nodes});
  }
  std::vector<int64_t> classes_of_blanks;
  for (int64_t i = 0; i < blanks; ++i) classes_of_blanks.push_back(in.Below(classes));
  call.attributes = {{"bernoulli", false, {bernoulli}},
                     {"blanks", true, classes_of_blanks},
                     {"durations", false, {durations}},
                     {"normalize", false, {bernoulli || in.Below(4) != 0}}};
  return call;
}

Call MakeLattice(Bytes& in, bool gradient, bool large) {
  Sizes sizes = MakeSizes(in, large);
  sizes.columns = std::max<int64_t>(1, sizes.columns);  // a lattice of no columns has no first node
  const XLA_FFI_DataType type = kFloats[in.Below(2)];
  const Dims nodes = Join(sizes.batch, {sizes.frames, sizes.columns});
  std::vector<int64_t> dt = {1, 0}, du = {0, 1}, may_end = {1, 1}, plane = {0, 1}, other = {-1, -1};
  int64_t planes = 2;
  const int64_t kind = in.Below(4);
  if (kind == 1) dt[1] = 1;
  if (kind >= 2) {
    planes = 1 + in.Below(5);
    const int64_t arcs = 1 + in.Below(6);
    dt.clear(), du.clear(), may_end.clear(), plane.clear(), other.clear();
    for (int64_t k = 0; k < arcs; ++k) {
      du.push_back(in.Bit());
      dt.push_back(in.Below(8) + (du.back() == 0));
      may_end.push_back(in.Bit());
      plane.push_back(in.Below(planes));
      other.push_back(in.Below(planes + 1) - 1);
      if (other.back() == plane.back()) other.back() = -1;
    }
  }
  const Topology topology = {int(dt.size()), int(planes),  dt.data(),   du.data(),
                             may_end.data(), plane.data(), other.data()};
  const int64_t workspace =
      WorkspaceOfLattice(IsUnitStep(topology), dt.size(), gradient).Elements(sizes.frames, sizes.columns);
  Call call;
  call.target = gradient ? "jax_rnnt_lattice_grad" : "jax_rnnt_lattice_loss";
  call.args.push_back({type, nodes});
  call.args.push_back({XLA_FFI_DataType_S32, sizes.batch});
  call.args.push_back({XLA_FFI_DataType_S32, sizes.batch});
  for (int64_t k = 1; k < planes; ++k) call.args.push_back({type, nodes});
  call.rets.push_back({type, sizes.batch});
  const bool in_place = in.Bit();
  for (int64_t k = 0; gradient && k < planes; ++k)
    call.rets.push_back({type, nodes, in_place ? (k == 0 ? 0 : int(k) + 2) : -1});
  if (workspace > 0) call.rets.push_back({type, Join(sizes.batch, {workspace})});
  call.attributes = {
      {"dt", true, dt}, {"du", true, du}, {"may_end", true, may_end}, {"other", true, other}, {"plane", true, plane}};
  return call;
}

// Changes one thing, so that the call may no longer fit together.
void Change(Bytes& in, Call* call) {
  auto& buffers = in.Bit() ? call->rets : call->args;
  const int64_t kind = in.Below(8);
  if (kind < 5 && buffers.empty()) return;
  Buffer* buffer = buffers.empty() ? nullptr : &buffers[in.Below(buffers.size())];
  call->changed = true;
  if (kind == 0 && !buffer->dims.empty()) {
    int64_t& dim = buffer->dims[in.Below(buffer->dims.size())];
    dim = in.Bit() ? in.Odd() : in.Bit() ? dim / 2 : dim > 50 ? 0 : dim + 1;
  } else if (kind == 1) {
    in.Bit() && !buffer->dims.empty() ? buffer->dims.pop_back() : buffer->dims.push_back(in.Below(4));
  } else if (kind == 2) {
    static constexpr XLA_FFI_DataType kTypes[] = {XLA_FFI_DataType_F32,  XLA_FFI_DataType_F64, XLA_FFI_DataType_F16,
                                                  XLA_FFI_DataType_BF16, XLA_FFI_DataType_S32, XLA_FFI_DataType_S64};
    buffer->type = kTypes[in.Below(6)];
  } else if (kind == 3) {
    buffers.pop_back();
  } else if (kind == 4) {
    buffers.push_back({buffer->type, buffer->dims});
  } else if (Attribute& attribute = call->attributes[in.Below(call->attributes.size())]; kind == 5) {
    if (!attribute.values.empty()) attribute.values[in.Below(attribute.values.size())] = in.Odd();
  } else if (attribute.is_array) {
    if (kind == 6) {
      attribute.values.push_back(in.Odd());
    } else if (!attribute.values.empty()) {
      attribute.values.pop_back();
    }
  }
}

// --------------------------------------------------------------------------------------------------------- numbers

// The same number in each type, from the bits of a float32.
void StoreFloat(XLA_FFI_DataType type, float x, char* to) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (type == XLA_FFI_DataType_F64) {
    const double wide = std::abs(x) > 3e38f && std::isfinite(x) ? std::copysign(1e308, x) : x;
    memcpy(to, &wide, 8);
  } else if (type == XLA_FFI_DataType_F32) {
    memcpy(to, &x, 4);
  } else if (type == XLA_FFI_DataType_BF16) {
    const uint16_t half = bits >> 16;
    memcpy(to, &half, 2);
  } else {  // truncated, large numbers to the largest
    const int exponent = int(bits >> 23 & 255) - 112;
    uint16_t half = (bits >> 16 & 0x8000) | (bits >> 13 & 0x3ff);
    if (std::isnan(x) || std::isinf(x))
      half |= 0x7c00;
    else if (exponent > 30)
      half = (half & 0x8000) | 0x7bff;
    else
      half = exponent <= 0 ? half & 0x8000 : half | exponent << 10;
    memcpy(to, &half, 2);
  }
}

// One in a few numbers is odd. `scale` 0: all are 0.
void FillFloats(Bytes& in, Buffer* buffer, int64_t elements, uint32_t* state) {
  static constexpr float kScales[] = {1, 0, 0.01f, 10, 100, 1e4f, 1e9f, 1e30f};
  static const float kOdd[] = {-INFINITY, INFINITY, NAN, -1e9f, -3.4e38f, 3.4e38f, 1e-40f, -0.0f, -1e4f, 2e6f, -2.2e6f};
  const float scale = kScales[in.Below(8)];
  const uint32_t rate = in.Bit() ? 0 : in.Byte(), odd = in.Byte();
  const size_t width = Width(buffer->type);
  for (int64_t i = 0; i < elements; ++i) {
    *state = *state * 1664525 + 1013904223;
    const uint32_t random = *state >> 8;
    float x = scale * (float(random & 0xffff) / 32768 - 1);
    if ((random >> 16) < rate) x = kOdd[odd < 128 ? odd % 11 : random % 11];
    StoreFloat(buffer->type, x, buffer->data + i * width);
  }
}

void FillIntegers(Bytes& in, Buffer* buffer, int64_t elements, int64_t most) {
  const bool odd = in.Below(4) == 0;
  for (int64_t i = 0; i < elements; ++i) {
    const int64_t x = odd && in.Below(4) == 0 ? in.Odd() : in.Below(most + 1);
    const int32_t value = int32_t(uint64_t(x));
    memcpy(buffer->data + i * Width(buffer->type), &value, std::min<size_t>(4, Width(buffer->type)));
  }
}

constexpr char kFresh = char(0xff);  // in every byte of a result before the call: a NaN that no kernel writes

// False: XLA would not make such buffers.
bool Allocate(Call* call) {
  for (auto* buffers : {&call->args, &call->rets}) {
    for (Buffer& buffer : *buffers) {
      const int64_t elements = buffer.Elements();
      if (elements < 0 || elements > kMostBytes / int64_t(Width(buffer.type))) return false;
      // Not from new char[0], which AddressSanitizer makes a byte.
      buffer.memory.reset(new char[elements * Width(buffer.type)]);
      buffer.data = buffer.memory.get();
      if (buffer.alias < 0 || buffer.alias >= int(call->args.size())) continue;
      const Buffer& operand = call->args[buffer.alias];
      if (operand.Elements() == elements && operand.type == buffer.type) buffer.data = operand.data;
    }
  }
  return true;
}

void Fill(Bytes& in, Call* call) {
  uint32_t state = in.Byte() * 257;
  const bool emission = strstr(call->target, "emission") != nullptr;
  const Dims& first = call->args.empty() ? Dims{} : call->args[0].dims;
  for (size_t i = 0; i < call->args.size(); ++i) {
    Buffer& buffer = call->args[i];
    const int64_t elements = buffer.Elements();
    if (buffer.type == XLA_FFI_DataType_S32 || buffer.type == XLA_FFI_DataType_S64) {
      const bool label = emission && i == 1;
      // label: class, lengths: T or U
      const size_t axis = label ? 1 : emission ? 3 : i == 1 ? 2 : 1;
      const int64_t most = first.size() >= axis ? std::clamp<int64_t>(first[first.size() - axis], 0, 60000) : 1;
      FillIntegers(in, &buffer, elements, i == 2 && !emission ? std::max<int64_t>(0, most - 1) : most);
    } else {
      FillFloats(in, &buffer, elements, &state);
    }
  }
  for (Buffer& buffer : call->rets) memset(buffer.memory.get(), kFresh, buffer.Elements() * Width(buffer.type));
}

// Does any element of a fresh result still hold what was there before the call?
bool Untouched(const Buffer& buffer) {
  const size_t width = Width(buffer.type);
  const auto is_fresh = [](char byte) { return byte == kFresh; };
  for (int64_t i = 0, n = buffer.Elements(); i < n; ++i)
    if (std::all_of(buffer.data + i * width, buffer.data + (i + 1) * width, is_fresh)) return true;
  return false;
}

// --------------------------------------------------------------------------------------------------------- running

std::atomic<int64_t> taken{0}, refused{0};

void Run(Call* call) {
  XLA_FFI_Error* error = Execute(call);
  (error ? refused : taken).fetch_add(1, std::memory_order_relaxed);
  if (error != nullptr) {
    const std::string message = error->message;
    delete error;
    if (!call->changed) Fail(*call, "refused a call that fits together: " + message);
    return;
  }
  const bool lattice = strstr(call->target, "lattice") != nullptr, gradient = strstr(call->target, "grad") != nullptr;
  // The last result of a lattice may be its workspace.
  const size_t last = !lattice ? call->rets.size() : gradient ? call->args.size() - 1 : 1;
  for (size_t i = 0; i < std::min(last, call->rets.size()); ++i) {
    const Buffer& result = call->rets[i];
    if (result.data == result.memory.get() && Untouched(result))
      Fail(*call, "result " + std::to_string(i) + " was not written");
  }
}

// A call, and `again` more with other lengths, labels and numbers.
template <class Random>
void One(const uint8_t* data, size_t size, Random& random, int again) {
  Bytes in{data, data + size};
  const int64_t kind = in.Below(4), target = in.Below(4);
  const bool large = kThreads > 0 && in.Below(4) == 0;  // for several threads
  if (target < 3 && kThreads == 0) {
    const char* const* names = cpu::Targets();
    int count = 0;
    while (names[count] != nullptr) ++count;
    cpu::UseTarget(names[target % count]);
  }
  Call call = kind < 2 ? MakeEmission(in, kind == 1, large) : MakeLattice(in, kind == 3, large);
  for (int64_t changes = in.Bit() ? 0 : in.Below(5); changes > 0; --changes) Change(in, &call);
  static const bool show = std::getenv("JAX_RNNT_FUZZ_SHOW") != nullptr;
  if (show) Show(call, call.changed ? "changed" : "call");
  if (!Allocate(&call)) return;
  Fill(in, &call);
  Run(&call);
  for (; again > 0; --again) {
    uint8_t bytes[64];
    for (uint8_t& byte : bytes) byte = random() >> 8;
    Bytes others{bytes, bytes + sizeof bytes};
    Fill(others, &call);
    Run(&call);
  }
}

}  // namespace
}  // namespace jax_rnnt::fuzz

#ifdef JAX_RNNT_FUZZ_THREADS
// SECONDS SEED
int main(int argc, char** argv) {
  using namespace jax_rnnt::fuzz;
  const double seconds = argc > 1 ? atof(argv[1]) : 10;
  const int seed = argc > 2 ? atoi(argv[2]) : 0;
  const auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([=] {
      std::mt19937 random(seed * 1000 + i);
      std::vector<uint8_t> bytes(512);
      do {
        for (uint8_t& byte : bytes) byte = random();
        One(bytes.data(), bytes.size(), random, 0);
        if (random() % 64 == 0) jax_rnnt::cpu::UseTarget(jax_rnnt::cpu::Targets()[random() % 2]);  // while others call
      } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
    });
  }
  for (std::thread& thread : threads) thread.join();
  printf("%lld calls taken, %lld refused, by %d threads in %.0f s\n", static_cast<long long>(taken),
         static_cast<long long>(refused), kThreads, seconds);
}
#else
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int printed = std::atexit([] {
    printf("%lld calls taken, %lld refused\n", static_cast<long long>(jax_rnnt::fuzz::taken),
           static_cast<long long>(jax_rnnt::fuzz::refused));
  });
  (void)printed;
  // Neighbours of this call: libFuzzer's own work for an input takes as long as dozens of calls, and a call's
  // allocations as long as several.
  constexpr int kNeighbours = 15, kAgain = 7;
  std::minstd_rand random(std::hash<std::string>()(std::string(reinterpret_cast<const char*>(data), size)));
  jax_rnnt::fuzz::One(data, size, random, kAgain);
  std::vector<uint8_t> bytes;
  for (int i = 0; i < kNeighbours && size > 0; ++i) {
    bytes.assign(data, data + size);
    for (int changes = 1 + random() % 4; changes > 0; --changes) bytes[random() % size] = random() >> 8;
    jax_rnnt::fuzz::One(bytes.data(), size, random, kAgain);
  }
  return 0;
}
#endif
