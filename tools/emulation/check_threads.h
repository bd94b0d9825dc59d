// Two threads that launch on one device.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "tools/emulation/check_common.h"
#include "xla_kernels/cuda/lattice.h"

namespace jax_rnnt::cuda {

// A lattice of unit steps, its gradient included.
struct ThreadProblem {
  explicit ThreadProblem(int labels) : columns(labels + 1) {
    Random random{uint64_t(labels)};
    for (Buffer<float>& plane : in) {
      for (int64_t i = 0; i < plane.size(); ++i) plane[i] = float(random.Uniform(-4, -1));
    }
    for (int b = 0; b < kBatch; ++b) num_frames[b] = kFrames - b, num_labels[b] = labels - b;
    for (int i = 0; i < 2; ++i) log_arc[i] = in[i].data(), grad_arc[i] = out[i].data();
    args = {{2, 2, kDt, kDu, kEnd, kDu, kOther},
            kBatch,
            kFrames,
            columns,
            log_arc,
            num_frames.data(),
            num_labels.data(),
            loss.data(),
            grad_arc,
            nullptr};
    workspace.reset(new Buffer<float>(kBatch * LatticeWorkspace(args, true)));
    args.workspace = workspace->data();
  }
  cudaError_t Run(cudaStream_t stream) { return Lattice(false, args, stream); }
  bool SameBits(const ThreadProblem& other) const {
    return loss.SameBits(other.loss) && out[0].SameBits(other.out[0]) && out[1].SameBits(other.out[1]);
  }

  static constexpr int kBatch = 2, kFrames = 24;
  static constexpr int64_t kDt[2] = {1, 0}, kDu[2] = {0, 1}, kEnd[2] = {1, 1}, kOther[2] = {-1, -1};
  const int64_t columns, nodes = kBatch * kFrames * columns;
  Buffer<float> in[2] = {Buffer<float>(nodes), Buffer<float>(nodes)};
  Buffer<float> out[2] = {Buffer<float>(nodes), Buffer<float>(nodes)};
  Buffer<float> loss{kBatch};
  Buffer<int32_t> num_frames{kBatch}, num_labels{kBatch};
  const void* log_arc[2];
  void* grad_arc[2];
  std::unique_ptr<Buffer<float>> workspace;
  LatticeArgs args;
};

// Lattices whose sweeps take other amounts of shared memory, both above 48 KiB: results have the same bits as alone.
inline void CheckThreads() {
  constexpr int kLabels[] = {200, 300};
  std::string problem;
  const auto succeeded = [&](cudaError_t error) {
    if (error != cudaSuccess && problem.empty()) problem = cudaGetErrorString(error);
  };
  ThreadProblem alone[] = {ThreadProblem(kLabels[0]), ThreadProblem(kLabels[1])};
  for (ThreadProblem& p : alone) succeeded(OnDevice([&] { return p.Run(nullptr); }));
  ThreadProblem both[] = {ThreadProblem(kLabels[0]), ThreadProblem(kLabels[1])};
  cudaError_t errors[2] = {cudaSuccess, cudaSuccess};
  succeeded(OnDevice([&] {
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const Stream stream;
        for (int k = 0; k < 8 && errors[i] == cudaSuccess; ++k) errors[i] = both[i].Run(stream.Get());
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors[0] != cudaSuccess ? errors[0] : errors[1];
  }));
  for (int i = 0; i < 2; ++i) {
    if (problem.empty() && !both[i].SameBits(alone[i])) problem = "results are not those of a thread alone";
    Sum(alone[i].loss);
    Sum(alone[i].out[0]);
  }
  Count("two threads, U = 200 and 300", problem);
}

}  // namespace jax_rnnt::cuda
