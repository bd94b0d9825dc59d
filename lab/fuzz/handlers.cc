// Calls the CPU kernels' handlers as XLA does, with random shapes, types, lengths, labels, attributes and numbers. A
// handler must take a call or refuse it; it must stay inside its buffers and write every element of its results.
//
// A call fits together at first, and then has up to four changes: a dimension, a type, a buffer too many or too few, an
// attribute. A call without a change must be taken.
//
//   handlers SECONDS SEED THREADS
//
// fuzz.py builds it under sanitizers. Several threads call at once, and each task of a call has a thread of its own.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "lab/fuzz/calls.h"
#include "xla_kernels/common/shape.h"
#include "xla_kernels/common/workspace.h"
#include "xla_kernels/cpu/dispatch.h"

namespace jax_rnnt::fuzz {
namespace {

// ---------------------------------------------------------------------------------------------------- random numbers

struct Random {
  std::mt19937 engine;

  int64_t Below(int64_t n) { return int64_t(engine() % uint64_t(n)); }
  bool Bit() { return engine() & 1; }
  // A size, length, label or attribute that a caller gets wrong.
  int64_t Odd() {
    static constexpr int64_t kOdd[] = {0,         1,         2,         -1,        -2,           -3,        7,
                                       63,        64,        65,        1 << 20,   1 << 26,      INT32_MAX, INT32_MIN,
                                       INT64_MAX, INT64_MIN, 1ll << 32, 1ll << 62, (1 << 26) + 1};
    constexpr int64_t kCount = sizeof kOdd / sizeof kOdd[0];
    const int64_t i = Below(kCount + 2);
    return i < kCount ? kOdd[i] : i == kCount ? Below(256) : int64_t(uint64_t(engine()) << 32 | engine());
  }
};

// ------------------------------------------------------------------------------------------------------- the call

using Dims = std::vector<int64_t>;

Dims Join(Dims a, const Dims& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

struct Sizes {
  Dims batch;
  int64_t frames, columns;
};

// Most calls are of a few nodes: what is refused, and where loops begin and end, shows there, and a call of hundreds of
// nodes takes as long as twenty of them.
Sizes MakeSizes(Random& in, bool large) {
  Sizes sizes;
  const bool tiny = !large && in.Below(16) != 0;
  for (int64_t i = in.Below(3); i > 0; --i) sizes.batch.push_back(large ? 2 + in.Below(6) : in.Below(3));
  sizes.frames = large ? 100 + in.Below(300) : tiny ? in.Below(6) : in.Below(20);
  sizes.columns = large ? 20 + in.Below(60) : tiny ? in.Below(6) : in.Below(36);
  return sizes;
}

constexpr XLA_FFI_DataType kFloats[] = {XLA_FFI_DataType_F32, XLA_FFI_DataType_F64, XLA_FFI_DataType_F16,
                                        XLA_FFI_DataType_BF16};

Call MakeEmission(Random& in, bool backward, bool large) {
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
    for (const Dims& dims : {nodes, sizes.batch, sizes.batch}) call.args.push_back({plane, dims});
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

Call MakeLattice(Random& in, bool gradient, bool large) {
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
    for (auto* list : {&dt, &du, &may_end, &plane, &other}) list->resize(arcs);
    for (int64_t k = 0; k < arcs; ++k) {
      du[k] = in.Bit(), may_end[k] = in.Bit();
      dt[k] = in.Below(8) + (du[k] == 0);
      plane[k] = in.Below(planes), other[k] = in.Below(planes + 1) - 1;
      if (other[k] == plane[k]) other[k] = -1;
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
void Change(Random& in, Call* call) {
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

// One in a few numbers is odd. `scale` 0: all are 0.
void FillFloats(Random& in, Buffer* buffer, int64_t elements) {
  static constexpr float kScales[] = {1, 0, 0.01f, 10, 100, 1e4f, 1e9f, 1e30f};
  static const float kOdd[] = {-INFINITY, INFINITY, NAN, -1e9f, -3.4e38f, 3.4e38f, 1e-40f, -0.0f, -1e4f, 2e6f, -2.2e6f};
  const float scale = kScales[in.Below(8)];
  const int64_t rate = in.Bit() ? 0 : in.Below(256), same = in.Bit() ? in.Below(11) : -1;
  const size_t width = Width(buffer->type);
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t random = in.engine();
    const float odd = kOdd[same < 0 ? random % 11 : same];
    const float x = random >> 24 < rate ? odd : scale * (float(random & 0xffff) / 32768 - 1);
    const double wide = std::abs(x) > 3e38f && std::isfinite(x) ? std::copysign(1e308, x) : x;
    // Any bits are a number of 16 bits: those of float32's upper half are that of bfloat16, and others for float16.
    const char* from =
        width == 8 ? reinterpret_cast<const char*>(&wide) : reinterpret_cast<const char*>(&x) + 4 - width;
    memcpy(buffer->data + i * width, from, width);
  }
}

void FillIntegers(Random& in, Buffer* buffer, int64_t elements, int64_t most) {
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

void Fill(Random& in, Call* call) {
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
      FillFloats(in, &buffer, elements);
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

// A call, and some more with other lengths, labels and numbers, since a call's allocations take as long as several.
void One(Random& in, bool several_threads) {
  const int64_t kind = in.Below(4);
  const bool large = several_threads && in.Below(4) == 0;  // for the workers
  Call call = kind < 2 ? MakeEmission(in, kind == 1, large) : MakeLattice(in, kind == 3, large);
  for (int64_t changes = in.Bit() ? 0 : in.Below(5); changes > 0; --changes) Change(in, &call);
  if (!Allocate(&call)) return;
  for (int again = 0; again < 8; ++again) {
    Fill(in, &call);
    Run(&call);
  }
}

}  // namespace
}  // namespace jax_rnnt::fuzz

int main(int argc, char** argv) {
  using namespace jax_rnnt;
  if (argc != 4) return 2;
  const double seconds = atof(argv[1]);
  const int seed = atoi(argv[2]), count = atoi(argv[3]);
  const auto start = std::chrono::steady_clock::now();
  int targets = 0;
  while (cpu::Targets()[targets] != nullptr) ++targets;
  fuzz::workers = count > 1 ? 4 : 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([=] {
      fuzz::Random random{std::mt19937(seed * 1000 + i)};
      do {
        if (random.Below(64) == 0) cpu::UseTarget(cpu::Targets()[random.Below(targets)]);  // while others call
        fuzz::One(random, count > 1);
      } while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds);
    });
  }
  for (std::thread& thread : threads) thread.join();
  printf("%lld calls taken, %lld refused, by %d threads in %.0f s\n", static_cast<long long>(fuzz::taken),
         static_cast<long long>(fuzz::refused), count, seconds);
}
