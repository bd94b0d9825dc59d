// Wide mode of skip_lattice.cu, for sequences whose arcs of extreme size may decide.
#pragma once

#include "xla_kernels/cuda/skip_sequence.cuh"

namespace jax_rnnt::cuda {
namespace {

// The loss, and posteriors over the arcs. The weight of a node is the sum over the arcs that enter it. The
// occupancy of the terminal node, 1, flows back: the arcs that enter a node share its occupancy in proportion to their
// weights. So occupancy is conserved at any size of the arcs.
template <class A>
__device__ __forceinline__ A Wide(const Arguments<A>& args, const Sequence<A>& sequence) {
  const int diagonals = sequence.frames + sequence.labels;
  LogWeight* const weights = reinterpret_cast<LogWeight*>(sequence.alpha);
  const auto exists = [&](int k, int to_t, int to_u) {
    const bool end = to_t == sequence.frames && to_u == sequence.labels && args.may_end[k];
    return sequence.Inside(to_t, to_u) || end;
  };
  const auto on_diagonal = [&](int n, auto visit) {
    for (int u = int(threadIdx.x); u <= sequence.labels; u += int(blockDim.x)) {
      if (sequence.Inside(n - u, u)) visit(n - u, u, Sequence<A>::Position(args, n, u));
    }
    __syncthreads();
  };
  // Calls visit(arc, weight) for all arcs that enter node (t, u), the arc by reference.
  const auto entering = [&](int t, int u, auto visit) {
    for (int k = 0; k < args.num_arcs; ++k) {
      const int from_t = t - args.dt[k], from_u = u - args.du[k];
      if (!sequence.Inside(from_t, from_u) || !exists(k, t, u)) continue;
      const int from = Sequence<A>::Position(args, from_t + from_u, from_u);
      visit(sequence.Arc(k)[from], weights[from] * double(sequence.Arc(k)[from]));
    }
  };
  const auto sum = [&](int t, int u) {
    LogWeight total = Impossible();
    double share;
    entering(t, u, [&](A&, LogWeight weight) { total = Add(total, weight, &share); });
    return total;
  };
  const auto share_out = [&](int t, int u, LogWeight total, double occupancy) {
    double parts = 0;
    if (total.Possible()) entering(t, u, [&](A&, LogWeight weight) { parts += exp(LogRatio(weight, total)); });
    entering(t, u, [&](A& x, LogWeight weight) {
      x = total.Possible() ? A(0 - occupancy * (exp(LogRatio(weight, total)) / parts)) : A(0);
    });
  };

  for (int n = 0; n < diagonals; ++n) {
    on_diagonal(n, [&](int t, int u, int at) { weights[at] = n == 0 ? LogWeight{0, 0} : sum(t, u); });
  }
  const LogWeight likelihood = sum(sequence.frames, sequence.labels);
  const A loss = LossOf<A>(likelihood);
  __syncthreads();  // all have read the last arcs
  if (args.grad_plane[0] == nullptr || loss == kInfinity<A>) return loss;
  if (threadIdx.x == 0) share_out(sequence.frames, sequence.labels, likelihood, 1);
  __syncthreads();
  for (int n = diagonals - 1; n >= 0; --n) {
    on_diagonal(n, [&](int t, int u, int at) {
      double occupancy = 0;
      for (int k = 0; k < args.num_arcs; ++k) {
        if (!exists(k, t + args.dt[k], u + args.du[k])) sequence.Arc(k)[at] = 0;
        occupancy -= double(sequence.Arc(k)[at]);
      }
      share_out(t, u, weights[at], occupancy);
    });
  }
  return loss;
}

}  // namespace
}  // namespace jax_rnnt::cuda
