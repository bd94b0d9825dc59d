// Memory and calls of check.cc. Emulated kernels use the memory of the host. Under nvcc every allocation has a
// counterpart on the GPU: it is copied there before a call of the kernels, and back afterwards.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "xla_kernels/cuda/runtime.cuh"

namespace jax_rnnt::cuda {

#if defined(__CUDACC__)

inline void Must(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "FAILED: %s\n", cudaGetErrorString(error));
  exit(2);
}

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes), host_(malloc(bytes)) {
    memset(host_, 0xff, bytes);
    Must(cudaMalloc(&device_, bytes > 0 ? bytes : 1));
    All().insert(this);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    All().erase(this);
    cudaFree(device_);
    free(host_);
  }
  void* host() const { return host_; }
  void* device() const { return device_; }

  static void ToDevice() {
    for (const Memory* m : All()) Must(cudaMemcpy(m->device_, m->host_, m->bytes_, cudaMemcpyHostToDevice));
  }
  static void ToHost() {
    for (const Memory* m : All()) Must(cudaMemcpy(m->host_, m->device_, m->bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  static std::set<const Memory*>& All() {
    static std::set<const Memory*> all;
    return all;
  }
  size_t bytes_;
  void *host_, *device_;
};

// Returns the error of the launches; ends the program if the work fails.
template <class Call>
cudaError_t OnDevice(const Call& call) {
  Memory::ToDevice();
  const cudaError_t error = call();
  if (error != cudaSuccess) return error;
  Must(cudaDeviceSynchronize());
  Memory::ToHost();
  return cudaSuccess;
}

// LoadKernels loads where there is a context.
inline void MakeContext() { Must(cudaFree(nullptr)); }

#else

inline void MakeContext() {}

class Memory {
 public:
  explicit Memory(size_t bytes) : data_(malloc(bytes)) { memset(data_, 0xff, bytes); }
  Memory(const Memory&) = delete;
  ~Memory() { free(data_); }
  void* host() const { return data_; }
  void* device() const { return data_; }

 private:
  void* data_;
};

template <class Call>
cudaError_t OnDevice(const Call& call) {
  return call();
}

#endif

}  // namespace jax_rnnt::cuda
