// One sequence as the kernels of skip_lattice.cu see it, and their arguments.
#pragma once

#include <algorithm>
#include <numeric>

#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/lattice_values.cuh"

namespace jax_rnnt::cuda {
namespace {

template <class A>
struct Arguments {
  explicit Arguments(const LatticeArgs& args)
      : batch(int(args.batch)),
        frames(int(args.frames)),
        columns(int(args.columns)),
        num_arcs(args.topology.num_arcs),
        num_planes(args.topology.num_planes),
        by_frames(uint32_t(std::max<int64_t>(1, args.frames))),
        num_frames(args.num_frames),
        num_labels(args.num_labels),
        workspace(static_cast<A*>(args.workspace)),
        stride(LatticeWorkspace(args, true)),
        loss(static_cast<A*>(args.loss)) {
    // Sorted here, so that no kernel looks an arc up behind its place: reads of constants that wait for each other.
    const auto frames_of = [&](int i) { return int(std::min<int64_t>(args.topology.dt[i], args.frames + 1)); };
    const auto span_of = [&](int i) { return frames_of(i) + int(args.topology.du[i]); };
    int order[kMaxArcs];
    std::iota(order, order + num_arcs, 0);
    std::stable_sort(order, order + num_arcs, [&](int i, int j) { return span_of(i) < span_of(j); });
    std::fill(dt + num_arcs, dt + kMaxArcs, 2);  // for ColumnArc
    for (int k = 0; k < num_arcs; ++k) {
      const int i = order[k];
      dt[k] = frames_of(i);  // no path takes a longer one
      du[k] = int(args.topology.du[i]);
      may_end[k] = args.topology.may_end[i] != 0;
      plane[k] = int(args.topology.plane[i]);
      other[k] = int(args.topology.other[i]);
      back[k] = unsigned(span_of(i) % std::max(1, frames) * columns + du[k]);
      span = std::max(span, span_of(i));
      near += span_of(i) == 1;
    }
    for (int p = 0, n = 0; p < num_planes; ++p) {
      for (int k = 0; k < num_arcs; ++k) {
        if (plane[k] == p || other[k] == p) arc_of_plane[n++] = k;
      }
      first_arc[p + 1] = n;
      log_plane[p] = static_cast<const A*>(args.log_plane[p]);
      grad_plane[p] = args.grad_plane != nullptr ? static_cast<A*>(args.grad_plane[p]) : nullptr;
    }
  }

  int batch, frames, columns, num_arcs, num_planes;
  Divider by_frames;  // diagonals to rows
  const int32_t *num_frames, *num_labels;
  A* workspace;
  int64_t stride;  // of the workspace, from a sequence to the next
  A* loss;
  const A* log_plane[kMaxArcs];
  A* grad_plane[kMaxArcs];
  int dt[kMaxArcs], du[kMaxArcs] = {};  // arcs, those first that span few diagonals
  int plane[kMaxArcs], other[kMaxArcs];
  int arc_of_plane[2 * kMaxArcs];  // those of plane p: from first_arc[p] to first_arc[p + 1]
  int first_arc[kMaxArcs + 1] = {};
  unsigned back[kMaxArcs] = {};  // from the end of an arc to its beginning, in a plane
  bool may_end[kMaxArcs];
  int span = 1;  // diagonals that the longest arc spans
  int near = 0;  // arcs that lead to the next diagonal
};

// One sequence, as all kernels see it. Its workspace has alpha, beta and the arcs, all in diagonal order, and a flag
// per arc and tile. SkipLoss stores in the first flag whether the sequence needs wide mode. That mode keeps a LogWeight
// per node in the place of alpha and beta, and replaces arcs by minus their posteriors.
template <class A>
struct Sequence {
  __device__ __forceinline__ Sequence(const Arguments<A>& args, int b)
      : frames(max(0, min(args.num_frames[b], args.frames))),
        labels(max(0, min(args.num_labels[b], args.columns - 1))),
        plane(int64_t(args.frames) * args.columns),
        alpha(reinterpret_cast<Value<A>*>(args.workspace + b * args.stride)),
        beta(alpha + plane),
        arcs(args.workspace + b * args.stride + 4 * plane),
        flags(arcs + args.num_arcs * plane) {}

  __device__ __forceinline__ bool Inside(int t, int u) const { return 0 <= t && t < frames && 0 <= u && u <= labels; }
  __device__ __forceinline__ static int Position(const Arguments<A>& args, int n, int u) {
    return (n - int(args.by_frames(uint32_t(n))) * args.frames) * args.columns + u;
  }
  __device__ __forceinline__ A* Arc(int k) const { return arcs + k * plane; }
  // Beta of the node to which arc k of node (t, u) leads, zero if there is none.
  __device__ __forceinline__ Value<A> Beyond(const Arguments<A>& args, int k, int t, int u) const {
    const int to_t = t + args.dt[k], to_u = u + args.du[k];
    if (Inside(to_t, to_u)) return beta[Position(args, to_t + to_u, to_u)];
    return to_t == frames && to_u == labels && args.may_end[k] ? One<A>() : Zero<Scalar<A>>();
  }

  int frames, labels;  // T_b, U_b
  int64_t plane;
  Value<A>*alpha, *beta;
  A *arcs, *flags;
};

}  // namespace
}  // namespace jax_rnnt::cuda
