// The GPUs of this process, and the loading of kernels before XLA captures launches.
//
// LoadKernels calls the host entry points with problems of every kind, while Launch only loads (runtime.cuh). So it
// finds the kernels that they would choose, and there is no list of kernels to keep. The emulation refuses to run a
// kernel that was not found so.
#include "xla_kernels/cuda/devices.h"

#include <algorithm>
#include <mutex>
#include <set>

#include "xla_kernels/cuda/joint.h"
#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/softmax_emission.h"
#if defined(__CUDACC__)
#include <cuda.h>
#endif

namespace jax_rnnt::cuda {
namespace {

// No host function reads what these pointers name, but arrays of planes and blanks.
void* const kNone[kMaxArcs] = {};
constexpr int64_t kBlanks[kMaxBlanks] = {};

void LoadEmission(DType dtype, const EmissionShape& shape) {
  EmissionForwardArgs forward = {};
  forward.shape = shape;
  forward.log_blank = kNone;
  forward.log_duration = kNone;
  (void)EmissionForward(dtype, forward, nullptr);
  for (const bool in_place : {false, true}) {
    alignas(16) static char memory[2][16];  // distinct addresses
    EmissionBackwardArgs backward = {};
    backward.shape = shape;
    backward.logits = memory[0];
    backward.dlogits = memory[in_place ? 0 : 1];
    backward.ct_blank = kNone;
    backward.ct_duration = kNone;
    (void)EmissionBackward(dtype, backward, nullptr);
  }
}

// Rows of every size, whole vectors and not.
void LoadEmission() {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    for (int64_t classes = 1; classes <= 1 << 20; classes *= 2) {
      for (const int64_t more : {0, 1}) {
        for (const int64_t durations : {0, 4}) {
          for (const int kind : {0, 1, 2}) {  // log-probabilities, logits, logits with a Bernoulli blank
            for (const int num_blanks : {1, 3}) {
              if (num_blanks > 1 && (kind == 2 || classes + more < num_blanks)) continue;
              LoadEmission(dtype, {1, 2, 2, classes + more, durations, 1, kind > 0, kind == 2, num_blanks, kBlanks});
            }
          }
        }
      }
    }
  }
}

void LoadLattice() {
  constexpr int64_t kOne[] = {1, 1, 1}, kLabel[] = {0, 1, 0}, kBig[] = {1, 1, 2};
  constexpr int64_t kStandard[] = {1, 0, 1}, kPlane[] = {0, 1, 0}, kNoOther[] = {-1, -1, -1};
  const Topology topologies[] = {{2, 2, kStandard, kLabel, kOne, kPlane, kNoOther},
                                 {2, 2, kOne, kLabel, kOne, kPlane, kNoOther},
                                 {3, 2, kBig, kLabel, kOne, kPlane, kNoOther}};
  for (const Topology& topology : topologies) {
    for (int64_t columns = 1; columns <= 4096; columns *= 2) {
      for (const bool is_double : {false, true}) {
        for (const bool gradient : {false, true}) {
          LatticeArgs args = {};
          args.topology = topology;
          args.batch = 1;
          args.frames = 2;
          args.columns = columns;
          args.log_plane = kNone;
          args.grad_plane = gradient ? kNone : nullptr;
          (void)Lattice(is_double, args, nullptr);
        }
      }
    }
  }
}

void LoadJoint() {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    for (const int64_t rows : {32, 64, 128}) {
      for (const bool exact : {false, true}) {
        JointShape shape = {};
        shape.encoders = shape.copies = shape.frames = shape.columns = shape.units = shape.blocks = shape.slab = 1;
        shape.classes = kJointClasses, shape.padded_units = kJointBytes / 2, shape.rows = rows, shape.exact = exact;
        JointInputs inputs = {};
        inputs.dtype = dtype;
        JointForwardArgs forward = {};
        JointGradientArgs gradient = {};
        JointSumsArgs sums = {};
        forward.shape = gradient.shape = sums.shape = shape;
        forward.inputs = gradient.inputs = sums.inputs = inputs;
        (void)JointForward(forward, nullptr);
        (void)JointGradient(gradient, nullptr);
        (void)JointSums(sums, nullptr);
      }
    }
  }
}

void LoadOnThisDevice() {
  const Loading loading;
  LoadEmission();
  LoadLattice();
  LoadJoint();
}

// Devices whose kernels are loaded. It is never destroyed: threads of XLA may run on while the process ends.
std::set<int>& done = *new std::set<int>;
std::mutex mutex;

#if defined(__CUDACC__)
// A function of the driver, which is not linked. `version`: the CUDA that brought it.
template <class Function>
Function* OfDriver(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult status;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &status);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &status);
  (void)version;
#endif
  return error == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function)
                                                                       : nullptr;
}
#endif

}  // namespace

#if defined(__CUDACC__)

std::vector<Device> Devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  std::vector<Device> devices;
  for (int i = 0; i < count; ++i) {
    const auto attribute = [&](cudaDeviceAttr name) {
      int value = 0;
      return cudaDeviceGetAttribute(&value, name, i) == cudaSuccess ? value : 0;
    };
    devices.push_back({attribute(cudaDevAttrComputeCapabilityMajor), attribute(cudaDevAttrComputeCapabilityMinor),
                       attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)});
  }
  (void)cudaGetLastError();
  return devices;
}

int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

int RuntimeVersion() { return CUDART_VERSION; }

void LoadKernels() {
  const std::lock_guard<std::mutex> lock(mutex);
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  const auto state = OfDriver<CUresult(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState", 7000);
  const auto get_context = OfDriver<CUresult(CUcontext*)>("cuCtxGetCurrent", 4000);
  const auto set_context = OfDriver<CUresult(CUcontext)>("cuCtxSetCurrent", 4000);
  CUcontext context = nullptr;
  if (state == nullptr || set_context == nullptr || get_context == nullptr || get_context(&context) != CUDA_SUCCESS)
    count = 0;
  for (int i = 0; i < count; ++i) {
    unsigned flags = 0;
    int active = 0;
    if (done.count(i) != 0 || state(i, &flags, &active) != CUDA_SUCCESS || active == 0) continue;
    if (cudaSetDevice(i) == cudaSuccess) LoadOnThisDevice();
    done.insert(i);
  }
  if (count > 0) (void)set_context(context);
  (void)cudaGetLastError();
}

void LoadKernelsHere() {
  static thread_local int here = -1;  // most threads serve one device
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device == here) return;
  const std::lock_guard<std::mutex> lock(mutex);
  if (done.insert(device).second) {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    LoadOnThisDevice();
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    (void)cudaGetLastError();
  }
  here = device;
}

#else

std::vector<Device> Devices() { return {}; }
int DriverVersion() { return 0; }
int RuntimeVersion() { return 0; }
void LoadKernels() { LoadKernelsHere(); }
void LoadKernelsHere() {
  const std::lock_guard<std::mutex> lock(mutex);
  if (done.insert(0).second) LoadOnThisDevice();
}

#endif

}  // namespace jax_rnnt::cuda
