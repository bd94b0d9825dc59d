// A CUDA runtime that launches nothing, for cuda_model.py: it tells a listener which kernel the host code would start,
// with which grid, block and arguments. Linked with the kernels' own objects into a library. A function of the runtime
// that the host code calls and this file lacks is an undefined symbol when the library is loaded: add it here.
#include <cuda_runtime_api.h>

#include <map>
#include <string>

#include "xla_kernels/common/shape.h"
#include "xla_kernels/common/workspace.h"

// As in softmax_emission.h and lattice.h, which need a CUDA compiler.
namespace jax_rnnt::cuda {
cudaError_t EmissionForward(DType dtype, const EmissionForwardArgs& args, cudaStream_t stream);
cudaError_t EmissionBackward(DType dtype, const EmissionBackwardArgs& args, cudaStream_t stream);
Workspace LatticeWorkspace(bool unit_steps, int64_t num_arcs);
cudaError_t Lattice(bool is_double, const LatticeArgs& args, cudaStream_t stream);
}  // namespace jax_rnnt::cuda

namespace {

using Listener = void (*)(const char* kernel, const unsigned* grid, const unsigned* block, size_t shared, void** args);
Listener listener = nullptr;

std::map<const void*, std::string>& Names() {
  static std::map<const void*, std::string> names;
  return names;
}

cudaError_t Tell(const void* function, dim3 grid, dim3 block, size_t shared, void** args) {
  const unsigned grid_size[] = {grid.x, grid.y, grid.z}, block_size[] = {block.x, block.y, block.z};
  listener(Names().at(function).c_str(), grid_size, block_size, shared, args);
  return cudaSuccess;
}

}  // namespace

extern "C" {

// ---- the part of the runtime that the kernels' host code calls ----

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Names()[function] = name;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t) {
  return Tell(reinterpret_cast<const void*>(kernel), grid, block, shared, args);
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) { return 1; }
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorInvalidConfiguration; }
#if CUDART_VERSION < 13000  // later, stubs call another one
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorInvalidConfiguration;
}
#endif
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** args) {
  return Tell(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, args);
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the model"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = 227 << 10;  // of an H200
  return attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? cudaSuccess : cudaErrorInvalidValue;
}

// ---- calls of cuda_model.py ----

void model_listen(Listener to) { listener = to; }

// One blank, the last class; no durations. sizes: B, T, U1, V.
int model_emission_forward(int dtype, const int64_t* sizes, const void* logits, const int32_t* label,
                           const int32_t* num_frames, void* log_blank, void* log_label, void* norm) {
  using namespace jax_rnnt;
  const int64_t blank = sizes[3] - 1;
  const EmissionShape shape = {sizes[0], sizes[1], sizes[2], sizes[3], 0, 1, true, false, 1, &blank};
  return cuda::EmissionForward(DType(dtype), {shape, logits, label, num_frames, &log_blank, log_label, nullptr, norm},
                               nullptr);
}

// In place.
int model_emission_backward(int dtype, const int64_t* sizes, void* logits, const int32_t* label,
                            const int32_t* num_frames, const void* ct_blank, const void* ct_label, const void* norm,
                            const void* scale, const void* clamp) {
  using namespace jax_rnnt;
  const int64_t blank = sizes[3] - 1;
  const EmissionShape shape = {sizes[0], sizes[1], sizes[2], sizes[3], 0, 1, true, false, 1, &blank};
  return cuda::EmissionBackward(
      DType(dtype), {shape, logits, label, num_frames, norm, &ct_blank, ct_label, nullptr, scale, clamp, logits},
      nullptr);
}

// sizes: B, T, U1, arcs, planes; table: dt, du, may_end, plane, other of all arcs. Returns the elements of the
// workspace if there is none.
int64_t model_lattice(const int64_t* sizes, const int64_t* table, const void* const* log_plane,
                      const int32_t* num_frames, const int32_t* num_labels, void* loss, void* const* grad_plane,
                      void* workspace) {
  using namespace jax_rnnt;
  const int64_t n = sizes[3];
  const Topology topology = {int(n), int(sizes[4]), table, table + n, table + 2 * n, table + 3 * n, table + 4 * n};
  const LatticeArgs args = {topology,   sizes[0],   sizes[1], sizes[2],   log_plane,
                            num_frames, num_labels, loss,     grad_plane, workspace};
  if (workspace == nullptr) {
    return sizes[0] * cuda::LatticeWorkspace(IsUnitStep(args.topology), n).Elements(sizes[1], sizes[2]);
  }
  return cuda::Lattice(false, args, nullptr);
}
}
