// Diagonal order, in which the sweeps of lattice.cu read arcs, and the kernel that brings planes into it and back.
#pragma once

#include "xla_kernels/cuda/lattice.h"
#include "xla_kernels/cuda/lattice_values.cuh"

namespace jax_rnnt::cuda {

// 16 bytes, as one access moves them.
template <class A>
constexpr int kVector = 16 / sizeof(A);
template <class A>
struct alignas(16) Vector {
  A of[kVector<A>];
};
// Diagonals of a chunk. One is computed while the next is copied.
template <class A>
constexpr int kChunk = 2 * kVector<A>;
// Vectors of a column in a chunk: two of each of two numbers.
constexpr int kVectors = 4;
// Log-probabilities of the arcs that leave a node, or minus their posteriors, in one access.
template <class A>
struct alignas(2 * sizeof(A)) Arcs {
  A blank, label;
};

// Diagonal order: diagonal n lies in group n / kChunk mod groups, so that a column's part of a chunk is four vectors:
//
//   [groups][2 numbers][2 halves of the chunk][columns][kVector diagonals]
//
// The numbers are the logarithms of a node's two arcs, or mantissa and exponent of alpha or beta. A column has nodes on
// `frames` diagonals. With the one before, they lie in groups that differ, so a chunk may be stored as a whole.
//
// Alpha and beta lie in the memory of the results: groups 0 ... in_plane - 1 in that of blanks, as many in that of
// labels, and the rest, up to kSpare, in the workspace.
//
// Parts of a sequence's workspace: arcs, spare groups, running values of the sweeps, a flag per tile of Skew.
//
// Running values, [2 sweeps][3][columns]; the second sweep only uses its own if a warp has several tiles:
//   0: alpha of the diagonal reached, that is the first one beyond
//   1, 2: beta of the diagonal reached, in the column and in the next one
// Wide mode keeps a diagonal in those of the second sweep.
// The sizes are plain numbers, since device code cannot call member functions of host constants.
constexpr int64_t kFrames = 8, kArcs = 2 * kFrames;  // elements per column of so many frames
constexpr int64_t kSpare = 4, kRunning = 12;
// Elements per column beside those: a group of arcs, spare groups, running values; enough to begin on 16 bytes.
constexpr int64_t kPerColumn = (1 + kSpare) * kArcs + kRunning + 4;

template <class A>
struct Arguments {
  Arguments(const LatticeArgs& args, int columns_of_lane)
      : batch(int(args.batch)),
        frames(int(args.frames)),
        columns(int(args.columns)),
        skew(IsMonotonic(args.topology) ? 0 : 1),
        odd(columns_of_lane == 1 ? 0 : (columns + 1) / 2),
        by_frames(uint32_t(std::max<int64_t>(1, args.frames))),
        groups((frames + kChunk<A> - 1) / kChunk<A> + 1),
        in_plane(args.grad_plane == nullptr ? 0
                                            : std::max(0, (frames * columns - kVector<A>) / (2 * kChunk<A> * columns))),
        by_groups(uint32_t(groups)),
        num_frames(args.num_frames),
        num_labels(args.num_labels),
        log_blank(static_cast<const A*>(args.log_plane[0])),
        log_label(static_cast<const A*>(args.log_plane[1])),
        grad_blank(args.grad_plane != nullptr ? static_cast<A*>(args.grad_plane[0]) : nullptr),
        grad_label(args.grad_plane != nullptr ? static_cast<A*>(args.grad_plane[1]) : nullptr),
        workspace(static_cast<A*>(args.workspace)),
        stride(LatticeWorkspace(args, true)),
        loss(static_cast<A*>(args.loss)) {}

  int batch, frames, columns;
  int skew;           // diagonal of node (t, u): t + skew * u
  int odd;            // two columns a lane: the place of column 1, behind those of all even columns; otherwise 0
  Divider by_frames;  // diagonals to rows
  int groups, in_plane;
  Divider by_groups;
  const int32_t *num_frames, *num_labels;
  const A *log_blank, *log_label;  // in frame order
  // Between the sweeps: mantissas and exponents of alpha or beta. At the end: the results, in frame order.
  A *grad_blank, *grad_label;
  A* workspace;
  int64_t stride;  // of the workspace, from a sequence to the next
  A* loss;
};

template <class T>
__device__ __forceinline__ T* Aligned16(T* p) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(p) + 15) & ~uintptr_t{15});
}

// One sequence, as all kernels see it.
template <class A>
struct Sequence {
  __device__ __forceinline__ Sequence(const Arguments<A>& args, int b)
      : frames(max(0, min(args.num_frames[b], args.frames))),
        labels(max(0, min(args.num_labels[b], args.columns - 1))),
        diagonals(frames + args.skew * labels),
        meeting((diagonals / 2 + kVector<A>) / kChunk<A>),
        tiles(labels / kTile + 1),
        plane(args.frames * args.columns),
        arcs(reinterpret_cast<Vector<A>*>(Aligned16(args.workspace + b * args.stride))),
        spare(arcs + int64_t(args.groups) * kVectors * args.columns),
        running(reinterpret_cast<Value<A>*>(spare + kSpare * kVectors * args.columns)),
        flags(&running->m + kRunning * args.columns) {}

  __device__ __forceinline__ Value<A>* Running(const Arguments<A>& args, int sweep, int which) const {
    return running + (sweep * 3 + which) * args.columns;
  }
  __device__ __forceinline__ static int Group(const Arguments<A>& args, int n) {
    const unsigned group = unsigned(n) / kChunk<A>;
    return int(group - args.by_groups(group) * unsigned(args.groups));
  }
  __device__ __forceinline__ static int Place(const Arguments<A>& args, int u) {
    return args.odd == 0 ? u : u / 2 + (u % 2 == 0 ? 0 : args.odd);
  }
  // The log-probability of an arc of the node in column u on diagonal n; kLabel: 0 blank, 1 label.
  template <int kLabel>
  __device__ __forceinline__ A& Arc(const Arguments<A>& args, int n, int u) const {
    const int row = (Group(args, n) * 2 + kLabel) * 2 + n % kChunk<A> / kVector<A>;
    return arcs[row * args.columns + Place(args, u)].of[n % kVector<A>];
  }

  int frames, labels;  // T_b, U_b
  int diagonals;       // nodes lie on diagonals 0 ... diagonals - 1
  int meeting;         // the chunk before which the sweeps meet
  int tiles, plane;
  Vector<A>*arcs, *spare;
  Value<A>* running;
  A* flags;
};

// A tile of a sequence, and its nodes in either order.
template <class A>
struct SkewTile : Tile {
  static constexpr int C = kChunk<A>, V = kVector<A>;
  static constexpr int kPitch = kTile + (sizeof(A) == 4 ? 5 : 3);  // without bank conflicts in either order

  __device__ __forceinline__ SkewTile(const Arguments<A>& args, const Sequence<A>& sequence, int b, Arcs<A>* nodes)
      : Tile(args.columns),
        args(args),
        sequence(sequence),
        b(b),
        nodes(nodes),
        blanks(&sequence.arcs->of[0]),
        labels(blanks + 2 * V * args.columns) {}

  __device__ __forceinline__ bool Used(int t) const { return t < sequence.frames && u <= sequence.labels; }
  __device__ __forceinline__ Arcs<A>& Node(int t) const { return nodes[(t - first_t) * kPitch + lane]; }

  // Calls visit(t, column, node, place in blanks and labels). A warp takes one vector of 32 / V columns in every chunk,
  // or in every second one. An H100 is bound by instructions here, so what all rounds share comes first.
  template <class Visit>
  __device__ __forceinline__ void ByDiagonals(const Visit& visit) const {
    static_assert(kSkewRows % (2 * V) == 0, "a warp must keep its columns and its half of a chunk");
    constexpr int kStep = kSkewRows / (2 * V);  // chunks
    const int y = int(threadIdx.y), column = y % V * (kTile / V) + lane / V, half = y / V % 2;
    if (first_u + column > sequence.labels) return;
    const int first_n = first_t + args.skew * first_u + y / (2 * V) * C;
    int group = Sequence<A>::Group(args, first_n), t = first_n + half * V + lane % V - args.skew * (first_u + column);
    int node = (t - first_t) * kPitch + column;
    const unsigned place =
        unsigned(half * args.columns + Sequence<A>::Place(args, first_u + column)) * V + unsigned(lane % V);
    const unsigned of_group = unsigned(kVectors * args.columns) * V;
#pragma unroll 4
    for (int chunk = y / (2 * V); chunk < (kTile + args.skew * kTile) / C; chunk += kStep) {
      visit(t, first_u + column, node, place + unsigned(group) * of_group);
      t += kStep * C;
      node += kStep * C * kPitch;
      group += kStep;
      if (group >= args.groups) group -= args.groups;
    }
  }

  // Arcs that do not exist become -inf, also those after the last frame in a chunk that has nodes of the column; before
  // the first frame, they leave nodes of value zero or lead from nodes that nobody reads. A flag gets the bits of the
  // tile's arcs. The terminal node has a blank arc of probability one, to itself.
  __device__ __forceinline__ void Forth() const {
    const Limits<A> limits(sequence.frames, sequence.labels);
    int bits = 0;
    const auto check = [&](A x) {
      bits |= limits.Bits(x);
      return x;
    };
    ByFrames(args, sequence, b, [&](int t, int64_t i) {
      if (!Used(t)) return;
      const A blank = check(args.log_blank[i]);
      const A label = u < sequence.labels ? check(args.log_label[i]) : -kInfinity<A>;
      const bool leads = t + 1 < sequence.frames;
      Node(t).blank = leads || u == sequence.labels ? blank : -kInfinity<A>;
      Node(t).label = leads || args.skew == 1 || u + 1 == sequence.labels ? label : -kInfinity<A>;
    });
    bits = OrBits(bits);
    ByDiagonals([&](int t, int u, int node, unsigned i) {
      const int last = sequence.frames - 1, n = t + args.skew * u;
      Arcs<A> x = {-kInfinity<A>, -kInfinity<A>};
      if (t > last) {
        if (first_t + kTile <= last || n / C != (last + args.skew * u) / C) return;
        if (u == sequence.labels) x.blank = 0;
      } else {
        if (t < first_t || t >= first_t + kTile) return;
        x = nodes[node];
      }
      blanks[i] = x.blank;
      labels[i] = x.label;
    });
    if (threadIdx.x == 0 && threadIdx.y == 0) sequence.flags[blockIdx.x] = A(bits);
    __syncthreads();
  }

  // From the workspace to the gradients, with zeros outside the lengths and if there is no path, NaN if the loss is
  // NaN.
  __device__ __forceinline__ void Back() const {
    const A loss = args.loss[b];
    const bool dead = loss == kInfinity<A>;
    if (!Outside(sequence) && !dead) {
      ByDiagonals([&](int t, int, int node, unsigned i) {
        if (t < first_t || t >= min(first_t + kTile, sequence.frames)) return;
        nodes[node] = {blanks[i], labels[i]};
      });
    }
    __syncthreads();
    ByFrames(args, sequence, b, [&](int t, int64_t i) {
      const bool zero = !Used(t) || dead;
      args.grad_blank[i] = zero ? A(0) : loss != loss ? loss : Node(t).blank;
      args.grad_label[i] = zero ? A(0) : loss != loss ? loss : u == sequence.labels ? A(0) : Node(t).label;
    });
    __syncthreads();
  }

  const Arguments<A>& args;
  const Sequence<A>& sequence;
  const int b;
  Arcs<A>* const nodes;            // in shared memory
  A *const blanks, *const labels;  // in the workspace
};

// Grid: (tiles, sequences).
template <class A, bool kBack>
__global__ void __launch_bounds__(kTile* kSkewRows, 4) Skew(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_AT_MOST(kTile * kSkewRows);
  JAX_RNNT_SHARED_ARRAY(Arcs<A>, nodes, kTile * SkewTile<A>::kPitch);
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    const SkewTile<A> tile(args, sequence, b, nodes);
    if (kBack) {
      tile.Back();
    } else if (!tile.Outside(sequence)) {
      tile.Forth();
    } else if (threadIdx.x == 0 && threadIdx.y == 0) {
      sequence.flags[blockIdx.x] = 0;  // all flags of a row are read
    }
  }
}

}  // namespace jax_rnnt::cuda
