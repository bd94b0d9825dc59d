// Times the kernels beside a copy in the same run. tune.py builds it with other constants and compares the runs.
//
//   tune PART REPEAT NAME B T U V [NAME B T U V ...]      PART: emission, lattice, skip or all
//
// A line for each kernel: stage, shape, dtype, median milliseconds, bytes that it must move, those bytes over time and
// over the bandwidth of the copy. All lengths are full. REPEAT 0: every kernel runs once and nothing is timed (for
// ncu).
//
// CUDA events around `REPEAT` calls in a row give the time of one; the median is over seven such rows. Planes of the
// lattice rotate, so that none is in the L2 cache when its turn comes; logits are larger than any cache. Under other
// compilers than nvcc the emulation runs the kernels, and times mean nothing.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "xla_kernels/cuda/devices.h"
#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/softmax_emission.h"

namespace jax_rnnt::cuda {
namespace {

void Must(cudaError_t error) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "FAILED: %s\n", cudaGetErrorString(error));
  exit(2);
}

class Memory {
 public:
  explicit Memory(int64_t bytes) {
#if defined(__CUDACC__)
    Must(cudaMalloc(&data_, size_t(bytes)));
#else
    data_ = calloc(size_t(bytes), 1);
#endif
  }
  Memory(const Memory&) = delete;
  ~Memory() {
#if defined(__CUDACC__)
    cudaFree(data_);
#else
    free(data_);
#endif
  }
  template <class T = void>
  T* As() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

__device__ __forceinline__ uint32_t Hash(uint64_t i) {
  uint32_t x = uint32_t(i) * 0x9e3779b9u + uint32_t(i >> 32) * 0x85ebca6bu;
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

constexpr int kThreads = 256, kBlocks = 1024;

// Uniform numbers in [low, high).
template <class T>
__global__ void Fill(T* x, int64_t n, float low, float high) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    x[i] = Narrow<T>(low + (high - low) * (float(Hash(uint64_t(i)) >> 8) * 0x1p-24f));
}

// Labels below `classes`, none in the last column.
__global__ void FillLabels(int32_t* x, int64_t n, int columns, int classes) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    x[i] = int(i % columns) == columns - 1 ? kNoLabel : int32_t(Hash(uint64_t(i)) % uint32_t(classes));
}

__global__ void FillInteger(int32_t* x, int64_t n, int value) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    x[i] = value;
}

struct alignas(16) Words16 {
  float of[4];
};

__global__ void Copy(const Words16* from, Words16* to, int64_t n) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    to[i] = from[i];
}

// Reads the same 4 KiB again and again, 512 bytes in an access of a warp: four cache lines, or, if every lane has a row
// of 128 bytes, 32.
template <bool kRows>
__global__ void ReadFromL1(const Words16* from, Words16* to, int64_t turns) {
  const unsigned lane = threadIdx.x % 32;
  float sum = 0;
  for (int64_t i = 0; i < turns; ++i) {
#pragma unroll
    for (unsigned j = 0; j < 8; ++j) {
      const Words16 v = from[i % 2 * 256 + (kRows ? lane * 8 + j : lane + j * 32)];
      sum += v.of[0] + v.of[1] + v.of[2] + v.of[3];
    }
  }
  if (sum == 1e30f) to[lane].of[0] = sum;  // never, but the loads are needed for it
}

template <class Kernel, class... A>
void Start(Kernel kernel, A... args) {
#if defined(__CUDACC__)
  const unsigned blocks = kBlocks * 8;
#else
  const unsigned blocks = 1;
#endif
  const auto launch = [&] { Must(Launch(kernel, dim3(blocks), dim3(kThreads), 0, nullptr, args...)); };
#if !defined(__CUDACC__)
  {
    const Loading loading;  // the emulation runs no kernel that was not loaded
    launch();
  }
#endif
  launch();
}

struct Problem {
  std::string name;
  int64_t batch, frames, labels, classes;
  int64_t columns() const { return labels + 1; }
  int64_t nodes() const { return batch * frames * columns(); }
};

int repeat = 0;
double copy_bandwidth = 0;  // bytes per second

// Median seconds of a call.
double Seconds(const std::function<void(int)>& call) {
  call(0);  // also warms up
  if (repeat == 0) return 0;
  std::vector<double> samples;
  for (int sample = 0; sample < 7; ++sample) {
#if defined(__CUDACC__)
    cudaEvent_t begin, end;
    Must(cudaEventCreate(&begin));
    Must(cudaEventCreate(&end));
    Must(cudaEventRecord(begin));
    for (int i = 0; i < repeat; ++i) call(i);
    Must(cudaEventRecord(end));
    Must(cudaEventSynchronize(end));
    float ms = 0;
    Must(cudaEventElapsedTime(&ms, begin, end));
    Must(cudaEventDestroy(begin));
    Must(cudaEventDestroy(end));
    samples.push_back(ms * 1e-3 / repeat);
#else
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < repeat; ++i) call(i);
    samples.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / repeat);
#endif
  }
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

void Report(const char* stage, const Problem& p, const char* dtype, double bytes, double seconds) {
  if (repeat == 0) return;
  printf("%s\t%s\t%s\t%.4f\t%.0f\t%.3f\n", stage, p.name.c_str(), dtype, seconds * 1e3, bytes,
         bytes / seconds / copy_bandwidth);
  fflush(stdout);
}

// What an access costs that is spread over many cache lines: two times the other if L1 moves 128 bytes a cycle, eight
// times if it looks up one line a cycle.
void MeasureL1() {
  const int64_t turns = repeat == 0 ? 1 : 64;
  Memory from(8192), to(512);
  Start(&Fill<float>, from.As<float>(), int64_t(2048), -1.f, 1.f);
#if defined(__CUDACC__)
  const double bytes = double(kBlocks) * 8 * kThreads * double(turns) * 128;
#else
  const double bytes = kThreads * double(turns) * 128;
#endif
  const auto read = [&](auto kernel) {
    return Seconds([&](int) { Start(kernel, from.As<const Words16>(), to.As<Words16>(), turns); });
  };
  const Problem p = {"4 KiB", 1, 1, 0, 1};
  Report("L1, whole lines", p, "float32", bytes, read(&ReadFromL1<false>));
  Report("L1, a row a lane", p, "float32", bytes, read(&ReadFromL1<true>));
}

void MeasureCopy() {
#if defined(__CUDACC__)
  const int64_t bytes = int64_t(1) << 30;
#else
  const int64_t bytes = 1 << 16;
#endif
  Memory from(bytes), to(bytes);
  Start(&Fill<float>, from.As<float>(), bytes / 4, -1.f, 1.f);
  const auto ours = [&](int) { Start(&Copy, from.As<const Words16>(), to.As<Words16>(), bytes / 16); };
  const auto library = [&](int) {
#if defined(__CUDACC__)
    Must(cudaMemcpyAsync(to.As(), from.As(), size_t(bytes), cudaMemcpyDeviceToDevice));
#else
    memcpy(to.As(), from.As(), size_t(bytes));
#endif
  };
  const double seconds = std::min(Seconds(ours), Seconds(library));
  if (repeat == 0) return;
  copy_bandwidth = 2.0 * double(bytes) / seconds;
  Report("copy", {"1 GiB", 0, 0, 0, 0}, "float32", 2.0 * double(bytes), seconds);
}

template <class T>
void MeasureEmission(const Problem& p, DType dtype, const char* name) {
  const int64_t nodes = p.nodes(), elements = nodes * p.classes, row = p.classes * int64_t(sizeof(T));
  Memory logits(elements * int64_t(sizeof(T))), gradient(elements * int64_t(sizeof(T)));
  Memory label(p.batch * p.columns() * 4), frames(p.batch * 4), planes(3 * nodes * 4), cotangents(2 * nodes * 4);
  Memory numbers(2 * p.batch * 4);
  Start(&Fill<T>, logits.As<T>(), elements, -2.f, 2.f);
  Start(&FillLabels, label.As<int32_t>(), p.batch * p.columns(), int(p.columns()), int(p.classes - 1));
  Start(&FillInteger, frames.As<int32_t>(), p.batch, int(p.frames));
  Start(&Fill<float>, cotangents.As<float>(), 2 * nodes, -1.f, -0.5f);
  Start(&Fill<float>, numbers.As<float>(), p.batch, 1.f, 1.f);
  Start(&Fill<float>, numbers.As<float>() + p.batch, p.batch, -1.f, -1.f);
  const int64_t blank = p.classes - 1;
  const EmissionShape shape = {p.batch, p.frames, p.columns(), p.classes, 0, 1, true, false, 1, &blank};

  void* const log_blank[] = {planes.As<float>()};
  EmissionForwardArgs forward = {};
  forward.shape = shape;
  forward.logits = logits.As();
  forward.label = label.As<int32_t>();
  forward.num_frames = frames.As<int32_t>();
  forward.log_blank = log_blank;
  forward.log_label = planes.As<float>() + nodes;
  forward.norm = planes.As<float>() + 2 * nodes;
  double seconds = Seconds([&](int) { Must(EmissionForward(dtype, forward, nullptr)); });
  Report("forward", p, name, double(nodes * (row + 12)), seconds);

  const void* const ct_blank[] = {cotangents.As<float>()};
  EmissionBackwardArgs backward = {};
  backward.shape = shape;
  backward.logits = logits.As();
  backward.label = label.As<int32_t>();
  backward.num_frames = frames.As<int32_t>();
  backward.norm = planes.As<float>() + 2 * nodes;
  backward.ct_blank = ct_blank;
  backward.ct_label = cotangents.As<float>() + nodes;
  backward.scale = numbers.As<float>();
  backward.clamp = numbers.As<float>() + p.batch;
  backward.dlogits = gradient.As();
  seconds = Seconds([&](int) { Must(EmissionBackward(dtype, backward, nullptr)); });
  Report("backward", p, name, double(nodes * (2 * row + 12)), seconds);
}

void MeasureLattice(const char* stage, const Problem& p, const Topology& topology) {
  const int64_t nodes = p.nodes(), planes = topology.num_planes;
#if defined(__CUDACC__)
  const int64_t sets = std::max<int64_t>(2, std::min<int64_t>(32, 240000000 / (planes * 4 * nodes) + 1));
#else
  const int64_t sets = 2;
#endif
  LatticeArgs args = {};
  args.topology = topology;
  args.batch = p.batch;
  args.frames = p.frames;
  args.columns = p.columns();
  const int64_t elements = LatticeWorkspace(args, true);
  Memory scores(sets * planes * nodes * 4), gradients(sets * planes * nodes * 4), loss(p.batch * 4);
  Memory lengths(2 * p.batch * 4), workspace(p.batch * elements * 4);
  Start(&Fill<float>, scores.As<float>(), sets * planes * nodes, -4.f, -1.f);
  Start(&FillInteger, lengths.As<int32_t>(), p.batch, int(p.frames));
  Start(&FillInteger, lengths.As<int32_t>() + p.batch, p.batch, int(p.labels));
  args.num_frames = lengths.As<int32_t>();
  args.num_labels = lengths.As<int32_t>() + p.batch;
  args.loss = loss.As();
  args.workspace = workspace.As();
  const auto call = [&](int i) {
    std::vector<const void*> from;
    std::vector<void*> to;
    for (int64_t k = 0; k < planes; ++k) {
      const int64_t offset = (i % sets * planes + k) * nodes;
      from.push_back(scores.As<float>() + offset);
      to.push_back(gradients.As<float>() + offset);
    }
    args.log_plane = from.data();
    args.grad_plane = to.data();
    Must(Lattice(false, args, nullptr));
  };
  Report(stage, p, "float32", double(8 * planes * nodes), Seconds(call));
}

void Measure(const std::string& part, const Problem& p) {
  const bool all = part == "all";
  if (all || part == "emission") {
    MeasureEmission<float>(p, DType::kF32, "float32");
    MeasureEmission<BFloat16>(p, DType::kBF16, "bfloat16");
  }
  constexpr int64_t kTwo[] = {1, 0}, kStep[] = {0, 1}, kTrue[] = {1, 1, 1, 1, 1, 1, 1, 1, 1}, kNone[] = {-1, -1};
  if (all || part == "lattice") MeasureLattice("lattice", p, {2, 2, kTwo, kStep, kTrue, kStep, kNone});
  // TDT with the durations 0 to 4: four arcs of the blank, five of labels; planes: blank, label, durations.
  constexpr int64_t kFrames[] = {1, 2, 3, 4, 0, 1, 2, 3, 4}, kLabels[] = {0, 0, 0, 0, 1, 1, 1, 1, 1};
  constexpr int64_t kDuration[] = {3, 4, 5, 6, 2, 3, 4, 5, 6};
  if (all || part == "skip") MeasureLattice("skip lattice", p, {9, 7, kFrames, kLabels, kTrue, kLabels, kDuration});
}

}  // namespace
}  // namespace jax_rnnt::cuda

int main(int argc, char** argv) {
  using namespace jax_rnnt::cuda;
  if (argc < 3 || (argc - 3) % 5 != 0) {
    fprintf(stderr, "tune PART REPEAT NAME B T U V [NAME B T U V ...]\n");
    return 2;
  }
  repeat = atoi(argv[2]);
#if defined(__CUDACC__)
  Must(cudaFree(nullptr));  // a context, which LoadKernels needs
#endif
  LoadKernels();
  MeasureCopy();
  if (strcmp(argv[1], "all") == 0) MeasureL1();
  for (int i = 3; i < argc; i += 5)
    Measure(argv[1], {argv[i], atoll(argv[i + 1]), atoll(argv[i + 2]), atoll(argv[i + 3]), atoll(argv[i + 4])});
#if defined(__CUDACC__)
  Must(cudaDeviceSynchronize());
#endif
  return 0;
}
