// Checks the emulation itself: its functions give right results, every kind of misuse is reported, and the launch after
// a report works. Prints the failures and "N passed, M failed".
#include "lab/emulation/cuda_emulation.h"

#include <cstdio>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "xla_kernels/cuda/elements.cuh"
#include "xla_kernels/cuda/matrix.cuh"
#include "xla_kernels/cuda/memory.cuh"

namespace jax_rnnt::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;
int num_passed = 0, num_failed = 0;

void Expect(bool condition, const char* what) {
  ++(condition ? num_passed : num_failed);
  if (!condition) fprintf(stderr, "FAILED: %s\n", what);
}

// ---- right use ----

__global__ void ShufflesAndVotes(int* errors) {
  const int lane = int(threadIdx.x) % 32;
  const auto check = [&](bool right) { errors[threadIdx.x] += !right; };
  check(__shfl_sync(kAll, lane, 5) == 5);
  check(__shfl_up_sync(kAll, double(lane), 1) == (lane == 0 ? 0 : lane - 1));
  check(__shfl_down_sync(kAll, int64_t(lane) << 40, 3) == int64_t(lane < 29 ? lane + 3 : lane) << 40);
  check(__shfl_xor_sync(kAll, float(lane), 16) == float(lane ^ 16));
  check(__ballot_sync(kAll, lane % 3 == 0) == 0x49249249u);
  check(__any_sync(kAll, lane == 31) == 1 && __any_sync(kAll, 0) == 0);
  const unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u;  // the halves of a warp diverge
  for (int i = 0; i < (lane < 16 ? 2 : 5); ++i) check(__shfl_xor_sync(half, lane + i, 1) == (lane ^ 1) + i);
  __syncwarp();
}

__global__ void TwoDimensions(int* sums) {
  JAX_RNNT_SHARED_ARRAY(int, tile, 32 * 8);
  JAX_RNNT_DYNAMIC_SHARED(double, extra);
  tile[threadIdx.x * 8 + threadIdx.y] = int(threadIdx.y * 32 + threadIdx.x);
  if (threadIdx.x == 0) extra[threadIdx.y] = threadIdx.y;
  const int any = __syncthreads_or(threadIdx.x == 7);
  const int i = int(threadIdx.y * 32 + threadIdx.x), other = tile[i];
  const bool right = other == i % 8 * 32 + i / 8 && extra[7 - threadIdx.y] == 7 - int(threadIdx.y) && any == 1;
  sums[(blockIdx.y * gridDim.x + blockIdx.x) * 256 + i] = right;
}

__global__ void Poisoned(int* nan) {
  JAX_RNNT_SHARED_ARRAY(float, fixed, 4);
  JAX_RNNT_DYNAMIC_SHARED(double, dynamic);
  *nan = fixed[3] != fixed[3] && dynamic[1] != dynamic[1];
  fixed[3] = 0;
  dynamic[1] = 0;
}

// a[16, 8 words] times b[8, 8 words]: element k of a row of a is row + 16 k, of b column - k; as small integers, exact.
template <class T>
__global__ void MatrixProduct(int* errors) {
  constexpr int n = 32 / int(sizeof(T));
  JAX_RNNT_SHARED_ARRAY(T, rows, 24 * n);  // of a, then of b
  for (int i = int(threadIdx.x); i < 24 * n; i += 32)
    rows[i] = Narrow<T>(float(i < 16 * n ? i / n + 16 * (i % n) : i / n - 16 - i % n));
  __syncwarp();
  const int lane = int(threadIdx.x);
  const auto at = [&](int row, int byte) {
    return SharedAddress<unsigned char>(reinterpret_cast<unsigned char*>(rows + row * n) + byte);
  };
  uint32_t a[4], words[4];
  LoadMatrices(a, at(lane % 16, lane / 16 * 16));
  LoadMatrices(words, at(16 + lane % 8, lane / 8 % 2 * 16));
  const uint32_t b[2] = {words[0], words[1]};
  float sums[4] = {1, 2, 3, 4};
  MultiplyAdd<T>(sums, a, b);
  for (int e = 0; e < 4; ++e) {  // where PTX has them
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    float sum = float(e + 1);
    for (int k = 0; k < n; ++k) sum += float((row + 16 * k) * (column - k));
    errors[lane] += sums[e] != sum;
  }
}

// ---- misuse ----

struct Misuse {
  const char* name;
  void (*kernel)(int*);
  const char* message;
  unsigned threads = 64;
};

// clang-format off: a table
const Misuse kMisuse[] = {
    {"barrier of some", [](int*) { if (threadIdx.x < 40) __syncthreads(); }, "__syncthreads at"},
    {"barrier after an exit", [](int*) {
       if (threadIdx.x == 3) return;
       __syncwarp(threadIdx.x < 32 ? ~8u : kAll);
       __syncthreads();
     }, "a thread of the block has exited"},
    {"barriers of two places", [](int*) {
       if (threadIdx.x < 32) __syncthreads();
       if (threadIdx.x >= 32) __syncthreads();
     }, "meets another place or kind, __syncthreads at"},
    {"barriers of two kinds", [](int*) { threadIdx.x < 32 ? __syncthreads() : void(__syncthreads_or(1)); },
     "meets another place or kind"},
    {"shuffle of some", [](int*) { if (threadIdx.x % 2 == 0) __shfl_xor_sync(kAll, 1, 2); }, "__shfl_xor_sync at"},
    {"shuffle against barrier", [](int*) {
       if (threadIdx.x == 0) __syncthreads();
       __shfl_sync(kAll, 1, 0);
     }, "deadlock"},
    {"shuffles of two kinds", [](int*) { threadIdx.x % 2 ? __shfl_up_sync(kAll, 1, 1) : __shfl_down_sync(kAll, 1, 1); },
     "meets another place or kind"},
    {"mask of exited", [](int*) { if (threadIdx.x < 30) __shfl_xor_sync(kAll, 1, 1); }, "__shfl_xor_sync at"},
    {"mask of absent", [](int*) { __shfl_xor_sync(kAll, 1, 1); }, "lane that has exited or does not exist", 48},
    {"exit while awaited", [](int*) { if (threadIdx.x != 31) __ballot_sync(kAll, 1); }, "__ballot_sync at"},
    {"outside its own mask", [](int*) { __shfl_sync(0x0000ffffu, 1, 0); }, "the caller's lane is not in its mask"},
    {"matrices of some", [](int*) {
       uint32_t words[4];
       JAX_RNNT_SHARED_ARRAY(unsigned char, rows, 16);
       if (threadIdx.x != 5) LoadMatrices(words, SharedAddress<unsigned char>(rows));
     }, "ldmatrix at"},
    {"source outside the mask", [](int*) { if (threadIdx.x < 16) __shfl_xor_sync(0x0000ffffu, 1, 16); },
     "reads from a lane outside the mask"},
    {"too much static", [](int*) {
       JAX_RNNT_SHARED_ARRAY(double, big, 48 * 128 + 1);
       big[0] = 1;
     }, "more shared memory than a block can have"},
    {"a large block", [](int*) { JAX_RNNT_AT_MOST(32); }, "a larger block than", 48},
};
// clang-format on

// The last group is not waited for, or belongs to no group.
template <int kGroups, bool kCommitted>
__global__ void ExitWithCopies(int* from) {
  JAX_RNNT_SHARED_ARRAY(int, to, 64);
  CopyAsync(SharedAddress<int>(to + threadIdx.x), from + threadIdx.x);
  if (kCommitted) CommitCopies();
  WaitForCopies<kGroups>();
}

void ExpectWorks() {
  std::vector<int> sums(6 * 256, 0);
  const cudaError_t error = Launch(&TwoDimensions, dim3(3, 2), dim3(32, 8), 64, nullptr, sums.data());
  bool right = error == cudaSuccess;
  for (int sum : sums) right = right && sum == 1;
  Expect(right, "blocks of 32 x 8 threads with barriers, static and dynamic shared memory");
}

void ExpectReport(const Misuse& misuse) {
  std::vector<int> out(1024, 0);
  const cudaError_t error = Launch(misuse.kernel, dim3(2, 2), dim3(misuse.threads), 0, nullptr, out.data());
  Expect(error == cudaErrorLaunchFailure, misuse.name);
  Expect(strstr(cudaGetErrorString(error), misuse.message) != nullptr, misuse.message);
  ExpectWorks();
}

void RightUse() {
  std::vector<int> errors(64, 0);
  Expect(Launch(&ShufflesAndVotes, dim3(1), dim3(64), 0, nullptr, errors.data()) == cudaSuccess, "shuffles run");
  bool right = true;
  for (int count : errors) right = right && count == 0;
  Expect(right, "shuffles and votes give the right values");
  for (const auto product : {&MatrixProduct<BFloat16>, &MatrixProduct<Half>, &MatrixProduct<float>}) {
    errors.assign(64, 0);
    right = Launch(product, dim3(1), dim3(32), 0, nullptr, errors.data()) == cudaSuccess;
    for (int count : errors) right = right && count == 0;
    Expect(right, "products of small matrices");
  }
  Expect(RoundToTF32(1 + 0x1p-11f) == 1 + 0x1p-10f && RoundToTF32(-1 - 0x1.fp-12f) == -1, "rounding to TF32");
  int nan = 0;
  for (int i = 0; i < 2; ++i) {  // the first launch leaves values in shared memory
    Launch(&Poisoned, dim3(1), dim3(1), 16, nullptr, &nan);
    Expect(nan == 1, "fresh shared memory is NaN");
  }
  std::vector<int> from(64, 1);
  const cudaError_t waited = Launch(&ExitWithCopies<0, true>, dim3(1), dim3(64), 0, nullptr, from.data());
  Expect(waited == cudaSuccess, "copies that are waited for");
  ExpectWorks();
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([] {
      std::vector<int> sums(256, 0);
      for (int k = 0; k < 20; ++k) Launch(&TwoDimensions, dim3(1), dim3(32, 8), 64, nullptr, sums.data());
    });
  }
  for (std::thread& thread : threads) thread.join();
  ExpectWorks();
}

void CheckMisuse() {
  fprintf(stderr, "Reports of misuse are expected from here on.\n");
  for (const Misuse& misuse : kMisuse) ExpectReport(misuse);
  ExpectReport({"a group not waited for", &ExitWithCopies<1, true>, "in flight where its thread ends"});
  ExpectReport({"a copy of no group", &ExitWithCopies<0, false>, "in flight where its thread ends"});
  int out;
  const auto launch = [&](dim3 grid, unsigned threads, size_t shared) {
    return Launch(kMisuse[0].kernel, grid, dim3(threads), shared, nullptr, &out);
  };
  Expect(launch(dim3(1), 1025, 0) == cudaErrorInvalidConfiguration, "threads");
  Expect(launch(dim3(1, 65536), 32, 0) == cudaErrorInvalidConfiguration, "grid");
  Expect(launch(dim3(1), 32, 228 << 10) == cudaErrorInvalidValue, "shared bytes");
  ExpectWorks();
}

// ---- the limit of dynamic shared memory ----

template <int>  // each a kernel of its own
__global__ void Nothing(int*) {}

void DynamicLimit() {
  int out;
  const auto launch = [&](auto kernel, size_t kib) {
    return Launch(kernel, dim3(1), dim3(32), kib << 10, nullptr, &out);
  };
  const auto set = [](void (*kernel)(int*), size_t kib) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(kib << 10));
  };
  Expect(launch(&Nothing<0>, 48) == cudaSuccess, "48 KiB need no limit");
  Expect(launch(&Nothing<1>, 49) == cudaErrorInvalidValue, "more than 48 KiB before the limit is raised");
  Expect(set(&Nothing<2>, 100) == cudaSuccess && set(&Nothing<2>, 99) == cudaErrorInvalidValue, "a lower limit");
  Expect(launch(&Nothing<2>, 100) == cudaSuccess && launch(&Nothing<2>, 101) == cudaErrorInvalidValue, "the limit");
  Expect(set(&Nothing<2>, 200) == cudaErrorInvalidValue, "a limit after a launch");
  Expect(set(&Nothing<3>, 228) == cudaErrorInvalidValue, "a limit above that of the device");
  {
    const Loading loading;
    for (int i = 0; i < 2; ++i) Expect(launch(&Nothing<4>, 49) == cudaSuccess, "loading");
  }
  for (const size_t kib : {200, 100, 227}) Expect(launch(&Nothing<4>, kib) == cudaSuccess, "any size once loaded");
  Expect(launch(&Nothing<5>, 1) == cudaErrorInvalidDeviceFunction, "a kernel that was not loaded");
}

// ---- 16-bit types ----

// Every value survives a round trip, and ties go to the even neighbour. `exact`: beyond it, halves are exact.
template <class T>
bool Converts(int infinity, int exact) {
  bool right = true;
  for (int i = 0; i < 1 << 16; ++i) {
    const int size = i & 0x7fff;
    const float x = Widen(T{uint16_t(i)});
    right &= size > infinity ? x != x : Narrow<T>(x).bits == i;
    if (size <= exact || size >= infinity - 1) continue;
    const float next = Widen(T{uint16_t(i + 1)}), middle = x / 2 + next / 2;
    right &= Narrow<T>(middle).bits == i + (i & 1);
    right &= Narrow<T>(nextafterf(middle, x)).bits == i && Narrow<T>(nextafterf(middle, next)).bits == i + 1;
  }
  return right && Narrow<T>(std::numeric_limits<float>::quiet_NaN()).bits == 0x7fff;
}

void Conversions() {
  bool half = Converts<Half>(0x7c00, -1);
  half &= Narrow<Half>(65519.996f).bits == 0x7bff && Narrow<Half>(65520.f).bits == 0x7c00;
  half &= Narrow<Half>(-1e30f).bits == 0xfc00 && Narrow<Half>(1e-30f).bits == 0 && Narrow<Half>(-0.f).bits == 0x8000;
  half &= Widen(Half{1}) == 0x1p-24f && Widen(Half{0x3c00}) == 1 && Widen(Half{0xc500}) == -5;
  Expect(half, "float16 conversions");
  Expect(Converts<BFloat16>(0x7f80, 0x100) && Narrow<BFloat16>(3.4e38f).bits == 0x7f80, "bfloat16 conversions");
  Expect(Narrow<float>(0.1f) == 0.1f && Narrow<double>(0.1) == 0.1, "wide types stay");
}

// ---- rounding ----

// In the build "fused", differences of operators are multiply-adds, and these would be the errors of the products.
template <class A>
void Rounding(A x, A y) {
  const volatile A a = x, b = y;  // read anew for each product
  const A product = RoundedProduct<A>(a, b);
  Expect(Fma(A(a), A(b), -product) != 0, "a product that rounds");
  Expect(product - RoundedProduct<A>(a, b) == 0, "RoundedProduct");
  Expect(RoundedProduct<A>(a, b) + RoundedProduct<A>(-a, b) == 0, "RoundedProduct, sum");
}

}  // namespace
}  // namespace jax_rnnt::cuda

int main() {
  using namespace jax_rnnt::cuda;
  RightUse();
  Conversions();
  Rounding(1.1f, 1.3f);
  Rounding(1.1, 1.3);
  CheckMisuse();
  DynamicLimit();  // the last, since it loads kernels
  printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed != 0;
}
