#include "xla_kernels/cpu/dispatch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "xla_kernels/cpu/lattice.h"
#include "xla_kernels/cpu/scratch.h"
#include "xla_kernels/cpu/softmax_emission.h"

namespace jax_rnnt::cpu {
namespace {

struct Target {
  const char* name;
  bool (*supported)();
  decltype(&EmissionForward) emission_forward;
  decltype(&EmissionBackward) emission_backward;
  decltype(&Lattice) unit_lattice;
  decltype(&Lattice) skip_lattice;
};

}  // namespace

// The per-target files define the kernels' functions in a namespace with the target's name.
#define JAX_RNNT_DECLARE_TARGET(target)                                                             \
  namespace target {                                                                                \
  void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end);   \
  void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end); \
  void UnitLattice(bool is_double, const LatticeArgs& args, int64_t sequence);                      \
  void SkipLattice(bool is_double, const LatticeArgs& args, int64_t sequence);                      \
  }
#define JAX_RNNT_TARGET_ENTRY(target, supported) \
  {#target,                                      \
   [] { return bool(supported); },               \
   &target::EmissionForward,                     \
   &target::EmissionBackward,                    \
   &target::UnitLattice,                         \
   &target::SkipLattice}

JAX_RNNT_DECLARE_TARGET(avx512)
JAX_RNNT_DECLARE_TARGET(avx2)
JAX_RNNT_DECLARE_TARGET(portable)

namespace {

const Target kTargets[] = {
// best first; CMake says which were compiled, of which the portable one runs everywhere
#ifdef JAX_RNNT_HAS_avx512
    JAX_RNNT_TARGET_ENTRY(avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")),
#endif
#ifdef JAX_RNNT_HAS_avx2
    // Every processor with AVX2 has F16C.
    JAX_RNNT_TARGET_ENTRY(avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")),
#endif
#ifdef JAX_RNNT_HAS_portable
    JAX_RNNT_TARGET_ENTRY(portable, true),
#endif
};

const Target* Find(const char* name) {  // null: find the best
  for (const Target& target : kTargets) {
    if (target.supported() && (name == nullptr || std::strcmp(name, target.name) == 0)) return &target;
  }
  return nullptr;
}

std::atomic<const Target*>& Current() {
  static std::atomic<const Target*> current{[] {
    const Target* best = Find(nullptr);
    if (best == nullptr) {  // only where CMake's JAX_RNNT_ONLY left the portable one out
      std::fprintf(stderr, "jax_rnnt was built for %s alone, which this processor lacks\n", kTargets[0].name);
      std::abort();
    }
    return best;
  }()};
  return current;
}

}  // namespace

std::vector<std::string> Targets() {
  std::vector<std::string> names;
  for (const Target& target : kTargets) {
    if (target.supported()) names.emplace_back(target.name);
  }
  return names;
}

std::string CurrentTarget() { return Current().load()->name; }

bool UseTarget(const std::string& name) {
  const Target* target = Find(name.c_str());
  if (target != nullptr) Current().store(target);
  return target != nullptr;
}

void EmissionForward(DType dtype, const EmissionForwardArgs& args, int64_t begin, int64_t end) {
  Current().load()->emission_forward(dtype, args, begin, end);
}

void EmissionBackward(DType dtype, const EmissionBackwardArgs& args, int64_t begin, int64_t end) {
  Current().load()->emission_backward(dtype, args, begin, end);
}

void Lattice(bool is_double, const LatticeArgs& args, int64_t sequence) {
  const Target& target = *Current().load();
  (IsUnitStep(args.topology) ? target.unit_lattice : target.skip_lattice)(is_double, args, sequence);
}

void* ThreadScratch(size_t bytes) {
  static constexpr std::align_val_t kAlignment{64};
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() { operator delete(data, kAlignment); }
  };
  thread_local Buffer buffer;
  if (buffer.size < bytes) {
    operator delete(buffer.data, kAlignment);
    buffer.data = nullptr, buffer.size = 0;  // should the next line throw
    buffer.data = operator new(bytes, kAlignment);
    buffer.size = bytes;
  }
  return buffer.data;
}

}  // namespace jax_rnnt::cpu
