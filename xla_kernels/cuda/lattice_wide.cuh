// Between the sweeps of lattice.cu: the likelihood, and wide mode for sequences whose arcs of extreme size may decide.
#pragma once

#include "xla_kernels/cuda/lattice_skew.cuh"

namespace jax_rnnt::cuda {

constexpr unsigned kAll = 0xffffffffu;

// The number of this warp. By the shuffle, the compiler sees that it is the same in all lanes: no branch that depends
// on it needs care for diverging lanes.
__device__ __forceinline__ int Warp() { return __shfl_sync(kAll, int(threadIdx.x) / 32, 0); }

// The middle of the lattice, after the first sweep.
template <class A>
struct Middle {
  Value<A> likelihood;
  A loss;
  bool wide;  // wide mode must find the loss
};

// The likelihood is the sum over the arcs that lead from the middle diagonal to the next. The sum of a tile does not
// depend on the number of warps, and tiles are added in order, so neither padding nor batch changes a bit. `sums` is
// shared memory, one per tile.
template <class A>
__device__ __forceinline__ Middle<A> AtMiddle(const Arguments<A>& args, const Sequence<A>& sequence, Value<A>* sums) {
  using S = Scalar<A>;
  const int lane = int(threadIdx.x) % 32, warp = Warp(), warps = int(blockDim.x) / 32;
  const Value<A>* const alpha = sequence.Running(args, 0, 0);
  const Value<A>* const beta = sequence.Running(args, 0, 1);
  for (int tile = warp; tile < sequence.tiles; tile += warps) {
    const int u = tile * kTile + lane;
    Value<A> sum = Zero<S>();
    if (u <= sequence.labels) sum = Normalize(alpha[u] * beta[u]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const Value<A> other = {__shfl_xor_sync(kAll, sum.m, step), __shfl_xor_sync(kAll, sum.e, step)};
      sum = Normalize(sum + other);
    }
    if (lane == 0) sums[tile] = sum;
  }
  int bits = 0;
  const int flags = int(Tiles(sequence.frames) * Tiles(args.columns));
#pragma unroll 8
  for (int i = int(threadIdx.x); i < flags; i += int(blockDim.x)) bits |= int(sequence.flags[i]);
  bits = OrBits(bits);
  Value<A> likelihood = sums[0];
  for (int tile = 1; tile < sequence.tiles; ++tile) likelihood = Normalize(likelihood + sums[tile]);
  __syncthreads();
  return {likelihood, LossOf((bits & kBad) != 0, likelihood), NeedsWide<A>(bits, likelihood)};
}

// Wide mode: the loss and, if there is a gradient, posteriors over the arcs in the workspace. A thread takes the
// columns u, u + blockDim, ...
//
// Posteriors need no beta. The two arcs that enter a node have shares of its weight, and the occupancy of the terminal
// node, 1, flows back through the shares: it is conserved at any size of the arcs. grad_blank keeps the shares of
// blanks, in diagonal order. The current diagonal lies in the running values of the second sweep, since the other block
// of this sequence may still read those of the first.
template <class A>
__device__ __forceinline__ A Wide(const Arguments<A>& args, const Sequence<A>& sequence, int b) {
  const int last = sequence.diagonals, labels = sequence.labels, threads = int(blockDim.x);
  A* const shares = args.grad_blank != nullptr ? args.grad_blank + int64_t(b) * sequence.plane : nullptr;
  const auto inside = [&](int n, int u) { return unsigned(n - args.skew * u) < unsigned(sequence.frames); };
  const auto position = [&](int n, int u) {
    return (n - int(args.by_frames(uint32_t(n))) * args.frames) * args.columns + u;
  };

  LogWeight* const weights = reinterpret_cast<LogWeight*>(sequence.Running(args, 1, 0));
  const auto enter = [&](int n, int u, double* share) {
    LogWeight blank = Impossible(), label = Impossible();
    if (inside(n - 1, u)) blank = weights[u] * double(sequence.template Arc<0>(args, n - 1, u));
    if (u > 0 && inside(n - 1, u - 1)) label = weights[u - 1] * double(sequence.template Arc<1>(args, n - 1, u - 1));
    return Add(blank, label, share);
  };
  for (int u = int(threadIdx.x); u <= labels; u += threads) weights[u] = u == 0 ? LogWeight{0, 0} : Impossible();
  __syncthreads();
  for (int n = 1; n < last; ++n) {
    // From the last column to the first, since weights are replaced in place.
    for (int first = labels / threads * threads; first >= 0; first -= threads) {
      const int u = first + int(threadIdx.x);
      const bool node = u <= labels && inside(n, u);
      LogWeight weight = Impossible();
      double share = 0;
      if (node) weight = enter(n, u, &share);
      __syncthreads();
      if (node) weights[u] = weight;
      if (node && shares != nullptr) shares[position(n, u)] = A(share);
    }
    __syncthreads();
  }
  double last_share = 0;
  const A loss = LossOf<A>(enter(last, labels, &last_share));
  __syncthreads();
  if (shares == nullptr || loss == kInfinity<A>) return loss;

  double* const occupancies = reinterpret_cast<double*>(weights);
  for (int n = last - 1; n >= 0; --n) {
    double *const here = occupancies + n % 2 * args.columns, *const next = occupancies + (n + 1) % 2 * args.columns;
    // Occupancy of the blank or the label arc that leads to column u of the next diagonal.
    const auto flow = [&](int u, bool blank) {
      const bool end = n + 1 == last;
      if (end ? u != labels : u > labels || !inside(n + 1, u)) return 0.0;
      const double share = end ? last_share : double(shares[position(n + 1, u)]);
      // Padding decides which kernel runs, and bits must not: none may fuse the sum of two flows.
      return RoundedProduct(end ? 1.0 : next[u], blank ? share : 1 - share);
    };
    for (int u = int(threadIdx.x); u <= labels; u += threads) {
      if (!inside(n, u)) continue;
      const double blank = flow(u, true), label = flow(u + 1, false);
      here[u] = blank + label;
      sequence.template Arc<0>(args, n, u) = A(0 - blank);
      sequence.template Arc<1>(args, n, u) = A(0 - label);
    }
    __syncthreads();
  }
  return loss;
}

}  // namespace jax_rnnt::cuda
