// Lattice of unit steps: alpha, beta, and minus the arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Nodes are taken by diagonals n = t + u (monotonic: n = t): every arc leads to the next diagonal, in the same column
// or in the next one. There are four launches. Blocks synchronise only at the boundaries between launches: no block
// waits for another, and nothing is atomic. So results have the same bits every time, and launches can be captured.
//
//   Skew     all of the GPU: log-probabilities into diagonal order in the workspace, so that what a column needs of 8
//            diagonals is four accesses of 16 bytes, and those of neighbouring columns lie side by side
//   Sweep 1  two blocks per sequence: alpha over the first half of the diagonals, beta over the second, both kept
//   Sweep 2  the same blocks continue through the other halves, where the other block left its values, and write
//            posteriors over the log-probabilities in the workspace; or wide mode, if a sequence needs it
//   Skew     posteriors back into frame order; zeros outside the lengths
//
// The loss alone needs Skew, Sweep 1 and the sum over the arcs between the halves: half of the steps.
//
// One block runs wide mode (lattice_values.cuh), a diagonal at a time. It is simple and slow. Only sequences in which
// arcs of extreme size may decide take it, and other sequences do not wait for it.
//
// In a sweep, a warp takes 32 columns, a lane one. In float32, beyond 128 columns, a lane takes two neighbours: a
// second warp on a scheduler would wait where the first one waits. Even columns then lie in front of odd ones in
// memory, so the lanes of an access lie side by side. Values move along label arcs to the next lane by a shuffle, and
// to the next warp through shared memory, a chunk of kChunk diagonals at a time. Each warp is one chunk behind its
// neighbour, so the block needs one barrier per chunk, not per diagonal. What a chunk reads, other warps copy into
// shared memory (cp.async), three chunks ahead: the copies of a chunk are 4 to 16 accesses, which nobody waits for
// there. Probabilities are found half a chunk ahead, in registers, beside the steps. A chunk has no branches: a node
// that does not exist has arcs of probability zero, and stores have predicates. All chunks are full and begin at a
// multiple of kChunk: Skew stores arcs that do not exist as -inf, and the terminal node keeps its value after the last
// diagonal. If there are more tiles than warps, a warp takes several in turn, copies for itself and keeps their running
// values in the workspace, so the size of a block does not bound U; then other warps hide its waits for copies.
//
// If kNarrow full tiles have one more column (U = 128, or 256 at two columns a lane), the last column does not get a
// tile: a scheduler would have a second one, or every lane a second column. No label arc leaves that column, so one
// more warp takes its steps with all lanes alike, and the lanes share what is beside the steps, a diagonal each
// (SweepAlone).
//
// The critical path of a step is a shuffle (23 cycles) and the choice of what enters the lane (4), the larger exponent,
// two differences and a shift (13), or beside it the multiply-add (4) and a product (4): 36 to 40 cycles. The exp of
// the arcs is off the path. Memory traffic is 72 bytes per node in float32. The two skewing passes have 32 of them, at
// the speed of the memory; without them, reading frame order would cost 32 sectors per access on the critical path
// instead of 4.
//
// Tried; cycles of a diagonal at U = 127, by `make cuda-model`, for alpha and beta of the first and of the second
// sweep. Accesses of 4 and 8 bytes, one diagonal after the other:
//   probabilities in the step that needs them, a step of the copies in the middle of a chunk     140 143   160 145
//   positions of a chunk side by side, not one from the other; copies after the first two steps  113 124   138 139
//   copies in three groups, each waited for when it is needed                                    119 102   157 134
//   probabilities a step ahead in the source: the compiler delays them again                     119 105   156 125
//   probabilities of a chunk at its end                                                          115 113   142 140
//   probabilities and copies of the next chunk within the steps                                  115 114   193 151
//   two warps for a tile, one for the steps, the other for probabilities and copies              138 141   155 146
//   probabilities at the end, copies that have a condition in place of a branch                  113 113   146 142
// Accesses of 16 bytes, a column's part of a chunk side by side:
//   the same                                                                                     123 118   137 135
//   one condition for all arcs of a chunk, without an operation per arc                          113 110   135 145
//   a bit per vector that is stored: with equal conditions, the compiler makes branches; copies
//   and probabilities of the next chunk within the steps                                         107 103   124 131
//   the same, a copy per step: each needs a fence of three accesses after a store                104 102   127 129
//   the same, the factor that scales values computed a step early: overflows, since the values of
//   two steps may have exponents of their own
//   the values of the other direction read before the barrier                                    107 101   116 119
// Cycles between barriers, at T = 64, where half of the columns have no node. By `make cuda-model`, which counts what
// longer sequences add, the last of these took 95 88, 112 112, and at U = 255 146 132, 176 184.
//   an arc without probability as a number whose exp is zero, not as a choice of results         95 94   111 107
//   posteriors from the terms of a node's sum; probabilities from the second step on             96 90   106 104
//   loops of barriers before and after a warp's chunks, not a condition per round                92 95   98 97
//   probabilities half a chunk ahead, copies after the second step                               85 86   100 98
// The same at U = 255:
//   a column a lane, 8 warps (by `make cuda-model` 168 162, 191 203)                             153 153   176 179
//   two columns a lane, 4 warps                                                                  149 138   160 156
//   posteriors from the terms of a node's sum                                                    150 141   158 159
//   loops of barriers before and after a warp's chunks                                           133 129   154 160
//   probabilities half a chunk ahead                                                             142 128   159 153
//   copies in two groups, in the first and third step                                            132 127   158 152
//   copies after the second step                                                                 130 126   152 152
//   probabilities a step earlier                                                                 128 133   158 148
// By `make cuda-model`, at U = 127 and 255:
//   copies after the second step                                              91 90   111 111   147 141   169 179
//   a loop of sequences for each direction                                    95 88   112 112   146 132   176 184
//   exponents bounded in place of a choice per arc, log2(e) in one part; then
//   every sequence with a high arc needs wide mode                            86 83   103 103   144 123   178 185
//   a lane's two columns side by side, not 32 apart: half of the shuffles     87 92   112 110   140 135   177 193
//   copies two by two beside four of the steps: the compiler joins them       88 88   114 114   131 131   186 192
//   both, and warps that copy, one for two tiles, three stages                84 87    97 103   135 133   172 189
//   the same, one for a tile, which keeps the places of its copies            81 86    96  94   121 124   161 163
//   addresses from a column's first, not a column's from a row's              83 81    91  91   120 117   158 167
//   reads of a chunk held apart by __syncwarp: what is here                   84 79    91  90   125 118   155 153
#include "xla_kernels/cuda/lattice.h"

#include <algorithm>

#include "xla_kernels/cuda/lattice_values.cuh"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_LATTICE_WARPS
#define JAX_RNNT_LATTICE_WARPS 16
#endif
// In float64, more than 8 would leave too few registers.
template <class A>
constexpr int kMaxWarps = sizeof(A) == 4 || JAX_RNNT_LATTICE_WARPS < 8 ? JAX_RNNT_LATTICE_WARPS : 8;
// Up to so many tiles of 32 columns, a lane takes one column, and two in longer rows of float32.
#ifndef JAX_RNNT_LATTICE_NARROW
#define JAX_RNNT_LATTICE_NARROW 4
#endif
constexpr int kNarrow = JAX_RNNT_LATTICE_NARROW;
// Most warps of a sweep that have tiles of kColumns columns a lane, and warps that copy for them.
template <class A, int kColumns>
constexpr int kSweepWarps =
    sizeof(A) == 4 && kColumns == 1 ? std::max(1, std::min(kMaxWarps<A>, JAX_RNNT_LATTICE_NARROW))
                                    : (kMaxWarps<A> + kColumns - 1) / kColumns;
#ifndef JAX_RNNT_LATTICE_COPIERS
#define JAX_RNNT_LATTICE_COPIERS 4
#endif
constexpr int kMaxCopiers = JAX_RNNT_LATTICE_COPIERS;
template <class A, int kColumns>
constexpr int kTilesOfCopier = (kSweepWarps<A, kColumns> + kMaxCopiers - 1) / kMaxCopiers;
template <class A, int kColumns>
constexpr int kSweepThreads = 32 * (kSweepWarps<A, kColumns> + std::min(kMaxCopiers, kSweepWarps<A, kColumns>));
// With a warp for a last column alone, the scheduler that has it has no warp that copies.
constexpr int kAloneCopiers = std::max(1, std::min(kMaxCopiers, kNarrow) - 1);
constexpr int kAloneThreads = 32 * (kNarrow + kAloneCopiers + 1);
constexpr unsigned kAll = 0xffffffffu;

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
// Chunks of a tile that are being copied or wait in shared memory.
constexpr int kStages = 3;
// Step of a chunk whose values are scaled, so that no mantissa leaves the range of A. The factor must come from the
// value itself: that of a step before may have another exponent.
constexpr int kScaleStep = 1;
// The number of this warp. By the shuffle, the compiler sees that it is the same in all lanes: no branch that depends
// on it needs care for diverging lanes.
__device__ __forceinline__ int Warp() { return __shfl_sync(kAll, int(threadIdx.x) / 32, 0); }

template <class A>
__device__ __forceinline__ Value<A> ShuffleUp(Value<A> v) {
  return {__shfl_up_sync(kAll, v.m, 1), __shfl_up_sync(kAll, v.e, 1)};
}
template <class A>
__device__ __forceinline__ Value<A> ShuffleDown(Value<A> v) {
  return {__shfl_down_sync(kAll, v.m, 1), __shfl_down_sync(kAll, v.e, 1)};
}

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

// ---- Frame order <-> diagonal order
// ----------------------------------------------------------------------------------

// Grid: (tiles of 32 frames x 32 columns, sequences); block (32, 8).
//
// Forth: arcs that do not exist become -inf, also those after the last frame in a chunk that has nodes of the column;
// before the first frame, they leave nodes of value zero or lead from nodes that nobody reads. A flag gets the bits of
// the tile's arcs. The terminal node has a blank arc of probability one, to itself. Back: from the workspace to the
// gradients, with zeros outside the lengths and if there is no path, NaN if the loss is NaN.
template <class A, bool kBack>
__global__ void __launch_bounds__(kTile* kSkewRows, 4) Skew(const __grid_constant__ Arguments<A> args) {
  constexpr int C = kChunk<A>, V = kVector<A>;
  constexpr int kPitch = kTile + (sizeof(A) == 4 ? 5 : 3);  // without bank conflicts in either order
  JAX_RNNT_SHARED_ARRAY(Arcs<A>, tile, kTile * kPitch);
  const int tiles_of_columns = int(Tiles(args.columns));
  const int first_t = int(blockIdx.x) / tiles_of_columns * kTile, first_u = int(blockIdx.x) % tiles_of_columns * kTile;
  const int lane = int(threadIdx.x), u = first_u + lane;
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    const bool empty = first_t >= sequence.frames || first_u > sequence.labels;
    if (!kBack && empty) {
      if (threadIdx.x == 0 && threadIdx.y == 0) sequence.flags[blockIdx.x] = 0;  // all flags of a row are read
      continue;
    }
    const A loss = kBack ? args.loss[b] : A(0);
    const bool dead = loss == kInfinity<A>;
    const auto slot = [&](int t) { return (t - first_t) * kPitch + lane; };
    const auto used = [&](int t) { return t < sequence.frames && u <= sequence.labels; };

    const auto by_frames = [&](auto visit) {
      for (int t = first_t + int(threadIdx.y); t < min(first_t + kTile, args.frames); t += kSkewRows) {
        if (u < args.columns) visit(t, int64_t(b) * sequence.plane + t * args.columns + u);
      }
    };
    // A warp takes one vector of 32 / V columns. visit(t, column, slot, place in blanks and labels).
    const int first_n = first_t + args.skew * first_u;
    A *const blanks = &sequence.arcs->of[0], *const labels = blanks + 2 * V * args.columns;
    const auto by_diagonals = [&](auto visit) {
      for (int i = int(threadIdx.y); i < (kTile + args.skew * kTile) / C * 2 * V; i += kSkewRows) {
        const int column = i % V * (kTile / V) + lane / V, half = i / V % 2, n = first_n + i / (2 * V) * C;
        const int t = n + half * V + lane % V - args.skew * (first_u + column);
        const int row = Sequence<A>::Group(args, n) * kVectors + half;
        if (first_u + column > sequence.labels) continue;
        visit(t, first_u + column, (t - first_t) * kPitch + column,
              unsigned(row * args.columns + Sequence<A>::Place(args, first_u + column)) * V + unsigned(lane % V));
      }
    };

    if (kBack) {
      if (!empty && !dead) {
        by_diagonals([&](int t, int, int slot, unsigned i) {
          if (t < first_t || t >= min(first_t + kTile, sequence.frames)) return;
          tile[slot] = {blanks[i], labels[i]};
        });
      }
      __syncthreads();
      by_frames([&](int t, int64_t i) {
        const bool zero = !used(t) || dead;
        args.grad_blank[i] = zero ? A(0) : loss != loss ? loss : tile[slot(t)].blank;
        args.grad_label[i] = zero ? A(0) : loss != loss ? loss : u == sequence.labels ? A(0) : tile[slot(t)].label;
      });
      __syncthreads();
    } else {
      const Limits<A> limits(sequence.frames, sequence.labels);
      int bits = 0;
      const auto check = [&](A x) {
        bits |= limits.Bits(x);
        return x;
      };
      by_frames([&](int t, int64_t i) {
        if (!used(t)) return;
        const A blank = check(args.log_blank[i]);
        const A label = u < sequence.labels ? check(args.log_label[i]) : -kInfinity<A>;
        const bool leads = t + 1 < sequence.frames;
        tile[slot(t)].blank = leads || u == sequence.labels ? blank : -kInfinity<A>;
        tile[slot(t)].label = leads || args.skew == 1 || u + 1 == sequence.labels ? label : -kInfinity<A>;
      });
      bits = OrBits(bits);
      by_diagonals([&](int t, int u, int slot, unsigned i) {
        const int last = sequence.frames - 1, n = t + args.skew * u;
        Arcs<A> x = {-kInfinity<A>, -kInfinity<A>};
        if (t > last) {
          if (first_t + kTile <= last || n / C != (last + args.skew * u) / C) return;
          if (u == sequence.labels) x.blank = 0;
        } else {
          if (t < first_t || t >= first_t + kTile) return;
          x = tile[slot];
        }
        blanks[i] = x.blank;
        labels[i] = x.label;
      });
      if (threadIdx.x == 0 && threadIdx.y == 0) sequence.flags[blockIdx.x] = A(bits);
      __syncthreads();
    }
  }
}

// ---- Sweeps
// ----------------------------------------------------------------------------------------------------------

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

// What a chunk needs of a lane's column, in shared memory: arcs and, in the second sweep, values of the other
// direction: alpha or, upwards, beta of the next diagonal.
template <class A, int kSweep, int kColumns>
struct Stage {
  Vector<A> vectors[kSweep == 2 ? 2 * kVectors : kVectors][kColumns][32];
};

// Shared memory of a sweep: for each tile, the values that cross to its neighbour in the last two chunks; zeros, which
// enter the first tile; kStages stages of each tile. AtMiddle uses it first, for the sums of the tiles.
template <class A, int kSweep, int kColumns>
constexpr size_t SharedBytes(int tiles, int warps) {
  return (size_t(tiles) + 1) * 2 * kChunk<A> * sizeof(Value<A>) + warps * kStages * sizeof(Stage<A, kSweep, kColumns>);
}

// kSweep 1: alpha over the chunks before `meeting` (kUp), or beta over the others, from the last. kSweep 2: the other
// chunks, and posteriors. After the last diagonal, the terminal node keeps its value.
template <class A, int kSweep, bool kUp, int kColumns, bool kAlone>
__device__ __forceinline__ void SweepSequence(const Arguments<A>& args, int b, Value<A>* shared) {
  using S = Scalar<A>;
  constexpr int C = kChunk<A>, V = kVector<A>, kStep = kUp ? 1 : -1, kWidth = kColumns * 32;
  // Lanes and their columns where values cross from and to the next tiles.
  constexpr int kEntry = kUp ? 0 : 31, kExit = 31 - kEntry, kFirst = kUp ? 0 : kColumns - 1,
                kLast = kColumns - 1 - kFirst;
  const int lane = int(threadIdx.x) % 32, all_warps = int(blockDim.x) / 32 - (kAlone ? 1 : 0);
  // The warp for a last column alone is the first one of the block, and counts as the last.
  const int warp = !kAlone ? Warp() : Warp() == 0 ? all_warps : Warp() - 1;
  const int copiers = kAlone ? kAloneCopiers : min(kMaxCopiers, all_warps / 2), warps = all_warps - copiers;
  const Sequence<A> sequence(args, b);
  const int tiles = sequence.labels / kWidth + 1;
  const bool alone = kAlone && sequence.labels == kNarrow * kWidth;
  const int of_warps = tiles - (alone ? 1 : 0);  // tiles that a warp takes
  if (sequence.frames == 0) {
    if (kSweep == 2 && kUp && threadIdx.x == 0) args.loss[b] = LossOfNoFrames<A>(sequence.labels);
    return;
  }

  // The second sweep divides its running values by minus the likelihood, so their products with those of the other
  // direction are minus posteriors; their exponents have the bias of BiasedPower.
  Value<A> minus_inverse = {A(1), 0};
  if (kSweep == 2) {
    const Middle<A> middle = AtMiddle(args, sequence, shared);
    if (!kUp && middle.wide) return;
    const A loss = middle.wide ? Wide(args, sequence, b) : middle.loss;
    if (kUp && threadIdx.x == 0) args.loss[b] = loss;
    if (middle.wide || !(loss < kInfinity<A>)) return;
    minus_inverse = {A(-1) / middle.likelihood.m, S::kExponentBias - middle.likelihood.e};
  }

  // Values of a lane's columns at the diagonal reached: `self` in the column and, downwards, `in` in the next one.
  struct State {
    Value<A> self[kColumns], in[kColumns];
  };
  Value<A>* const selves = sequence.Running(args, kSweep - 1, kUp ? 0 : 1);
  Value<A>* const ins = sequence.Running(args, kSweep - 1, 2);
  Value<A>* const crossings = shared;
  Value<A>* const zeros = crossings + tiles * 2 * C;
  const int edge = kUp ? 0 : sequence.labels;  // the column of the initial value
  const auto column = [&](int tile, int c) { return tile * kWidth + kColumns * lane + c; };
  const int odd = Settled(args.odd);
  const auto place = [&](int tile, int c) { return unsigned(tile * 32 + lane + (c == 0 ? 0 : odd)); };
  const auto initial = [&](int tile) {
    State state;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = column(tile, c);
      Value<A>&self = state.self[c], &in = state.in[c];
      self = in = Zero<S>();
      if (kSweep == 1) {
        if (u == edge) self = One<A>();
        if (!kUp && u == edge - 1) in = One<A>();  // a monotonic label arc may enter the terminal node
        continue;
      }
      const auto reached = [&](Value<A> v) {
        Value<A> x = v * minus_inverse;
        x.e = S::Max(x.e, S::kZero);
        return x;
      };
      if (u <= sequence.labels) {
        self = reached(sequence.Running(args, 0, kUp ? 0 : 1)[u]);
        if (!kUp) in = reached(sequence.Running(args, 0, 2)[u]);
      }
    }
    return state;
  };
  const auto store = [&](int tile, const State& state) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = column(tile, c);
      if (u > sequence.labels) continue;
      selves[u] = state.self[c];
      if (!kUp) ins[u] = state.in[c];
    }
  };

  // Chunks are counted from 0 here, and from the first diagonal there.
  const int all = (sequence.diagonals + C - 1) / C;
  const int chunks = kUp == (kSweep == 1) ? sequence.meeting : all - sequence.meeting;
  const int begin = kSweep == 2 ? sequence.meeting - (kUp ? 0 : 1) : kUp ? 0 : all - 1;
  const auto chunk_of = [&](int round, int tile) { return round - (kUp ? tile : tiles - 1 - tile); };

  // A lane's part of a chunk: the frames of its first diagonal, far away for a column or a chunk that is not there, and
  // the place of its group.
  struct Chunk {
    int t[kColumns];
    unsigned group;
  };
  struct Probabilities {
    Value<A> blank[kColumns][C], label[kColumns][C];
  };
  constexpr int kFar = -(1 << 30);
  const unsigned with_arcs = Settled(unsigned(sequence.frames + (C - 1)));
  const auto has_arcs = [&](int t) { return unsigned(t + (C - 1)) < with_arcs; };
  const auto has_values = [&](int t) { return unsigned(t + C) < with_arcs + 1; };  // that of the diagonal before, too
  // Places of vectors: from a column's first in a group to the next, from a group to the next.
  const unsigned columns = Settled(unsigned(args.columns)), of_group = Settled(kVectors * columns);
  const unsigned last_group = Settled((unsigned(args.groups) - 1) * of_group);
  const unsigned in_plane = Settled(unsigned(args.in_plane) * of_group);
  const auto chunk_at = [&](int chunk, int tile) {
    const int from = begin + chunk * kStep;
    Chunk x;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = column(tile, c);
      x.t[c] = u <= sequence.labels && chunk < chunks ? from * C - args.skew * u : kFar;
    }
    x.group = unsigned(Sequence<A>::Group(args, max(from, 0) * C)) * of_group;
    return x;
  };
  const auto after = [&](int chunk, const Chunk& before) {
    Chunk x;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x.t[c] = chunk < chunks ? before.t[c] + kStep * C : kFar;
    const unsigned group = kUp ? before.group + of_group : before.group - of_group;
    x.group = kUp ? (group > last_group ? 0 : group) : min(group, last_group);
    return x;
  };
  Vector<A>* const arcs = Settled(sequence.arcs);  // posteriors, once a node is done
  // Groups 0 ... in_plane - 1 lie in the first memory, as many in the second, the others in the third.
  const auto memory = [&](A* plane, unsigned groups) {
    const uintptr_t from = reinterpret_cast<uintptr_t>(Aligned16(plane));
    return Settled(reinterpret_cast<Vector<A>*>(from - uintptr_t{groups} * sizeof(Vector<A>)));
  };
  Vector<A>* const of_blanks = memory(args.grad_blank + int64_t(b) * sequence.plane, 0);
  Vector<A>* const of_labels = memory(args.grad_label + int64_t(b) * sequence.plane, in_plane);
  Vector<A>* const of_spare = memory(&sequence.spare->of[0], 2 * in_plane);
  const auto values = [&](const Chunk& x) {
    return x.group < in_plane ? of_blanks : x.group < 2 * in_plane ? of_labels : of_spare;
  };

  using Staged = Stage<A, kSweep, kColumns>;
  // Stages of the first of a warp's tiles; those of a copier are the tiles warp - warps, and so on.
  Staged* const stages = reinterpret_cast<Staged*>(zeros + 2 * C) + (warp < warps ? warp : warp - warps) * kStages;
  const SharedAddress<Vector<A>> to_stages(&stages[0].vectors[0][0][lane]);
  const auto stage_at = [&](int stage) { return to_stages + stage * int(sizeof(Staged) / sizeof(Vector<A>)); };
  const auto in_stage = [&](unsigned v, int c) { return int(kWidth * v) + 32 * c; };
  const auto start_copies = [&](int tile, const Chunk& next, int stage) {
    const SharedAddress<Vector<A>> to = stage_at(stage);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const Vector<A>* const of_arcs = Settled(arcs + place(tile, c));
      const Vector<A>* const of_values = Settled(values(next) + place(tile, c));
#pragma unroll
      for (unsigned v = 0; v < kVectors; ++v) {
        const unsigned from = next.group + v * columns;
        CopyAsyncIf(has_arcs(next.t[c]), to + in_stage(v, c), of_arcs + from);
        if (kSweep == 2) CopyAsyncIf(has_values(next.t[c]), to + in_stage(kVectors + v, c), of_values + from);
      }
    }
  };
  // A column's numbers of a chunk are read by halves, that is by steps: from vectors h and 2 + h.
  const auto element = [&](int j) { return kUp ? j : C - 1 - j; };
  const auto read = [&](int stage, int half, unsigned first, Vector<A>(&to)[kColumns][kVectors]) {
    const SharedAddress<Vector<A>> from = stage_at(stage);
    const unsigned h = unsigned(kUp ? half : 1 - half);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      to[c][h] = Load(from + in_stage(first + h, c));
      to[c][2 + h] = Load(from + in_stage(first + 2 + h, c));
    }
  };
  // Logarithms of a chunk's arcs, and values of the other direction for the second sweep.
  struct Read {
    Vector<A> arcs[kColumns][kVectors], other[kColumns][kVectors];
  };
  const auto read_arcs = [&](int stage, int half, Read& x) { read(stage, half, 0, x.arcs); };
  const auto read_others = [&](int stage, int half, Read& x) {
    if (kSweep == 2) read(stage, half, kVectors, x.other);
  };
  const auto probability = [&](const Read& x, const Chunk& chunk, int j, Probabilities& p) {
    const int i = element(j);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const A limit = has_arcs(chunk.t[c]) ? kLimit<A> : A(-1);
      p.blank[c][j] = Probability(x.arcs[c][i / V].of[i % V], limit);
      p.label[c][j] = Probability(x.arcs[c][2 + i / V].of[i % V], limit);
    }
  };

  // Where a tile's values come from and go to; those of chunk i lie C places further if i is odd.
  struct Crossing {
    SharedAddress<Vector<A>> from;
    SharedAddress<Vector<A>> to;
  };
  const auto crossing_of = [&](int tile) {
    const bool enters = kUp ? tile > 0 : tile < tiles - 1;
    Value<A>* const from = enters ? crossings + (tile - kStep) * 2 * C : zeros;
    const auto address = [](Value<A>* x) { return SharedAddress<Vector<A>>(reinterpret_cast<Vector<A>*>(x)); };
    return Crossing{address(from), address(crossings + tile * 2 * C)};
  };

  // beside(j) is what the single warp of a tile does beside step j: nothing that the step needs.
  const auto compute = [&](int chunk, int tile, const Crossing& crossing, const Chunk& now, const Probabilities& p,
                           const Read& x, State& state, auto beside) {
    const SharedAddress<Vector<A>> to_leave = crossing.to + (chunk & 1) * kVectors;
    Vector<A> leave;
    Vector<A> enter[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) enter[v] = Load(crossing.from + ((chunk & 1) * kVectors + v));
    const unsigned exits = lane == kExit;
    // What is stored: mantissas and exponents, or posteriors of blanks and labels. Upwards, a lane stores the posterior
    // of the label arc that enters its column: it has both values. `stored` has a bit per vector: with equal
    // conditions, the compiler makes a branch of two stores.
    Vector<A> out[kColumns][kVectors];
    Vector<A>* to[kColumns];
    unsigned stored = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      to[c] = Settled((kSweep == 1 ? values(now) : arcs) + place(tile, c));
      const int t = now.t[c];
      unsigned bits;
      if (kSweep == 1) {
        bits = has_values(t) & (args.grad_blank != nullptr) ? 15 : 0;
      } else {
        const bool label = kUp ? (column(tile, c) > 0) & has_values(t) & has_arcs(t + args.skew) : has_arcs(t);
        bits = (has_arcs(t) ? 3 : 0) | (label ? 12 : 0);
      }
      stored |= bits << kVectors * c;
    }
    stored = Settled(stored);
    const auto exit = [&](int j, const Value<A>& x) {
      leave.of[2 * j % V] = x.m, leave.of[2 * j % V + 1] = S::AsFloat(x.e);
      if ((j + 1) % (V / 2) == 0) StoreIf(exits, to_leave + 2 * j / V, leave);
    };
    const auto store_vector = [&](unsigned v, int c) {
      const bool before = kSweep == 2 && kUp && v >= 2;  // of the column before
      Vector<A>* const of = !before ? to[c] : c > 0 ? to[c - 1] : to[kColumns - 1] - 1;
      StoreIf(stored & 1u << (v + kVectors * c), of + (now.group + v * columns), out[c][v]);
    };
#pragma unroll
    for (int j = 0; j < C; ++j) {
      const int i = element(j), h = i / V, k = i % V;
      const auto put = [&](int c, A x, A y) { out[c][h].of[k] = x, out[c][2 + h].of[k] = y; };
      // The sum over the two arcs of a node. Their shares of it, times the value of the other direction, are
      // posteriors.
      const auto add = [&](int c, Value<A> blank, Value<A> label) {
        const Sum<A> sum(blank, label);
        if (kSweep == 2) {
          const A scale = x.other[c][h].of[k] * BiasedPower<A>(sum.e + S::AsInt(x.other[c][2 + h].of[k]));
          put(c, sum.a * scale, sum.b * scale);
        }
        state.self[c] = {sum.a + sum.b, sum.e};
      };
      Value<A> leaving[kColumns];  // upwards through the label arc
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        Value<A>& self = state.self[c];
        if (kSweep == 1) put(c, self.m, S::AsFloat(self.e));  // downwards, that of the next diagonal
        if (kUp) {
          leaving[c] = Times(self, p.label[c][j]);
          self = Times(self, p.blank[c][j]);
        } else {
          add(c, Times(self, p.blank[c][j]), Times(state.in[c], p.label[c][j]));
          if (j == kScaleStep) self = self * Scale(self.m);
          leaving[c] = self;
        }
      }
      exit(j, leaving[kLast]);
      // Each lane gets the value of the next one, the last one that of the first lane beyond.
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c != kFirst) state.in[c] = leaving[c - kStep];
      }
      state.in[kFirst] = kUp ? ShuffleUp(leaving[kLast]) : ShuffleDown(leaving[kLast]);
      if (lane == kEntry) {
        const Vector<A>& from = enter[j * 2 / V];
        state.in[kFirst] = {from.of[j * 2 % V], S::AsInt(from.of[j * 2 % V + 1])};
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (kUp) {
          add(c, state.self[c], state.in[c]);
          if (j == kScaleStep) state.self[c] = state.self[c] * Scale(state.self[c].m);
        }
        if (j % V == V - 1) {
          store_vector(unsigned(h), c);
          store_vector(unsigned(2 + h), c);
        }
      }
      beside(j);
    }
  };

  const int rounds = chunks == 0 ? 0 : chunks + tiles - 1;
  if (lane < 2 * C && warp == 0) zeros[lane] = Zero<S>();
  // Before and after its chunks, a warp only meets the others at their barriers.
  const auto meet = [&](int times) {
#pragma unroll 1
    for (int i = 0; i < times; ++i) SyncWarps();
  };
  if constexpr (kAlone) {
    if (warp == all_warps) {
      // The last column alone: no label arc leaves it, so its steps are short. All lanes take them together. Lane j
      // finds the probability of step j before, and what is stored of it afterwards. The arithmetic is that of compute,
      // bit for bit.
      struct Alone {
        Chunk now;
        Value<A> self;
        A log, other[2];
      };
      const int last = tiles - 1, step_of_lane = lane % C;
      // The place of a lane's first number, from that of the group, in elements, and from there to the second number.
      const unsigned of_lane =
          Settled(unsigned((last * 32 + element(step_of_lane) / V * args.columns) * V + element(step_of_lane) % V));
      const unsigned to_second = Settled(2 * V * columns);
      // Only what is there: beyond the ends of its columns a chunk stands for memory that the other block writes.
      const auto read_log = [&](Alone& x) {
        if (has_arcs(x.now.t[0])) x.log = (&arcs->of[0])[x.now.group * V + of_lane];
      };
      const auto read_other = [&](Alone& x) {
        if (!has_values(x.now.t[0])) return;
        const A* const from = &values(x.now)->of[0];
        const unsigned at = x.now.group * V + of_lane;
        x.other[0] = from[at];
        x.other[1] = from[at + to_second];
      };
      const auto begin_alone = [&] {
        Alone x = {};
        x.now = chunk_at(0, last);
        x.now.t[0] = __shfl_sync(kAll, x.now.t[0], 0);
        const Value<A> self = initial(last).self[0];
        x.self = {__shfl_sync(kAll, self.m, 0), __shfl_sync(kAll, self.e, 0)};
        read_log(x);
        if (kSweep == 2) read_other(x);
        return x;
      };
      // What lanes exchange: probabilities, and values before each step. It lies where the last tile has no neighbour.
      const SharedAddress<Value<A>> exchanged(kUp ? crossings + last * 2 * C : zeros);
      const SharedAddress<Value<A>> exchanged_by_lane = exchanged + step_of_lane;
      const SharedAddress<Vector<A>> exchanged_vectors(exchanged);
      const Crossing crossing_alone = crossing_of(last);
      const auto compute_alone = [&](int chunk, Alone& x) {
        const Chunk now = x.now;
        const int t = now.t[0];
        const Value<A> p = Probability(x.log, has_arcs(t) ? kLimit<A> : A(-1));
        if (lane < C) Store(exchanged_by_lane, p);
        x.now = after(chunk + 1, now);
        read_log(x);
        __syncwarp();
        const int half = (chunk & 1) * kVectors;
        const SharedAddress<Vector<A>> from = crossing_alone.from + half, to_leave = crossing_alone.to + half;
        Vector<A> enter[kVectors], blank[kVectors], before, leave;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          blank[v] = Load(exchanged_vectors + v);
          if (kUp) enter[v] = Load(from + v);
        }
        const Value<A> enters = kUp ? Load(SharedAddress<Value<A>>(from) + step_of_lane) : Zero<S>();
        const auto of = [&](const Vector<A>* x, int j) {
          return Value<A>{x[2 * j / V].of[2 * j % V], S::AsInt(x[2 * j / V].of[2 * j % V + 1])};
        };
        const auto put = [&](SharedAddress<Vector<A>> to, int j, const Value<A>& value, Vector<A>& x) {
          x.of[2 * j % V] = value.m, x.of[2 * j % V + 1] = S::AsFloat(value.e);
          if ((j + 1) % (V / 2) == 0) StoreIf(lane == 0, to + 2 * j / V, x);
        };
        Value<A>& self = x.self;
#pragma unroll
        for (int j = 0; j < C; ++j) {
          put(exchanged_vectors + kVectors, j, self, before);
          self = Times(self, of(blank, j));
          if (kUp) self = Plus(self, of(enter, j));
          if (j == kScaleStep) self = self * Scale(self.m);
          if (!kUp) put(to_leave, j, self, leave);
        }
        __syncwarp();
        Value<A> value = Load(exchanged_by_lane + C);
        A first = value.m, second = S::AsFloat(value.e);
        bool stores = has_arcs(t), stores_second = kUp & has_values(t) & has_arcs(t + args.skew);
        if (kSweep == 1) {
          stores = stores_second = has_values(t) & (args.grad_blank != nullptr);
        } else {
          value = Times(value, p);
          first = value.m, second = A(0);
          if (kUp) {
            const Sum<A> sum(value, enters);
            first = sum.a, second = sum.b, value.e = sum.e;
          }
          const A scale = x.other[0] * BiasedPower<A>(value.e + S::AsInt(x.other[1]));
          first *= scale, second *= scale;
          read_other(x);
        }
        // The posterior of the label arc that enters lies in the column before.
        A* const to = &(kSweep == 1 ? values(now) : arcs)->of[0];
        const unsigned at = now.group * V + of_lane;
        if ((lane < C) & stores) to[at] = first;
        if ((lane < C) & stores_second) to[at + to_second + (kSweep == 2 ? unsigned(odd - 1) * V : 0)] = second;
      };

      const int begins = alone ? -chunk_of(0, last) : rounds;
      Alone x;
      if (alone) x = begin_alone();
      meet(begins);
      if (!alone) return;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        SyncWarps();
        compute_alone(chunk, x);
      }
      meet(rounds - begins - chunks);
      State state;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) state.self[c] = x.self, state.in[c] = Zero<S>();
      if (kSweep == 1) store(last, state);
      return;
    }
  }
  if ((kAlone || tiles <= warps) && warp >= warps) {
    // A copier has tiles of its own. A tile's chunk is copied three chunks ahead, and is there when its warp reaches
    // the chunk before.
    const auto tile_of = [&](int i) {
      const int tile = warp - warps + i * copiers;
      return kAlone && tile >= of_warps ? tiles : tile;
    };
    constexpr int kTiles = kAlone ? (kNarrow + kAloneCopiers - 1) / kAloneCopiers : kTilesOfCopier<A, kColumns>;
    Chunk next[kTiles];
    int stage[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) next[i] = chunk_at(1, tile_of(i)), stage[i] = i * copiers * kStages + 1;
    const auto copy = [&](int i, int chunk) {
      start_copies(tile_of(i), next[i], stage[i]);
      next[i] = after(chunk + 1, next[i]);
      stage[i] += stage[i] == i * copiers * kStages + kStages - 1 ? 1 - kStages : 1;
    };
#pragma unroll
    for (int chunk = 1; chunk < 3; ++chunk) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) copy(i, chunk);
      CommitCopies();
    }
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      WaitForCopies<1>();
      SyncWarps();
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const int chunk = chunk_of(round, tile_of(i));
        if (tile_of(i) < tiles && chunk >= 0) copy(i, chunk + 3);
      }
      CommitCopies();
    }
    WaitForCopies<0>();
    return;
  }
  if (kAlone || tiles <= warps) {
    State state = initial(warp);
    const Crossing crossing = crossing_of(warp < of_warps ? warp : 0);
    Chunk now = chunk_at(0, warp);
    start_copies(warp, now, 0);
    CommitCopies();
    WaitForCopies<0>();
    Read x;
    Probabilities p;
    // What a warp reads of a chunk, it reads in the steps of the chunk before; probabilities are ready half a chunk
    // ahead.
    read_arcs(0, 0, x);
    read_arcs(0, 1, x);
    read_others(0, 0, x);
    read_others(0, 1, x);
#pragma unroll
    for (int j = 0; j < C / 2; ++j) probability(x, now, j, p);
    const int before = Settled(warp < of_warps ? -chunk_of(0, warp) : rounds);
    meet(before);
    int stage = 1;
#pragma unroll 1
    for (int chunk = 0; chunk < (warp < of_warps ? chunks : 0); ++chunk) {
      SyncWarps();
      const Chunk next = after(chunk + 1, now);
      // Without __syncwarp, the compiler moves all reads behind the last step: 12 of 4 cycles each, of all warps at
      // once.
      compute(chunk, warp, crossing, now, p, x, state, [&](int j) {
        if (j < C / 2) probability(x, now, C / 2 + j, p);
        if (j == C / 2 - 1) read_arcs(stage, 0, x);
        if (j >= C / 2) probability(x, next, j - C / 2, p);
        if (j == C / 2) read_others(stage, 0, x), __syncwarp();
        if (j == C / 4 * 3) read_arcs(stage, 1, x), __syncwarp();
        if (j == C - 1) read_others(stage, 1, x);
      });
      now = next;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    meet(warp < of_warps ? rounds - before - chunks : 0);
    if (kSweep == 1 && warp < of_warps) store(warp, state);
    return;
  }

  const int first_tile = warp < warps ? warp : tiles;  // copiers have none
  for (int tile = first_tile; tile < tiles; tile += warps) store(tile, initial(tile));
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();
    for (int tile = first_tile; tile < tiles; tile += warps) {
      const int chunk = chunk_of(round, tile);
      if (chunk < 0 || chunk >= chunks) continue;
      const Chunk now = chunk_at(chunk, tile);
      start_copies(tile, now, 0);
      CommitCopies();
      State state;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int u = column(tile, c);
        state.self[c] = u <= sequence.labels ? selves[u] : Zero<S>();
        state.in[c] = !kUp && u <= sequence.labels ? ins[u] : Zero<S>();
      }
      WaitForCopies<0>();
      __syncwarp();  // compute replaces arcs that the neighbouring lane has copied
      Read x;
      Probabilities p;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        read_arcs(0, half, x);
        read_others(0, half, x);
      }
#pragma unroll
      for (int j = 0; j < C; ++j) probability(x, now, j, p);
      compute(chunk, tile, crossing_of(tile), now, p, x, state, [](int) {});
      store(tile, state);
    }
  }
}

// Grid: (upwards and downwards, sequences); a block of up to kSweepWarps<A, kColumns> warps.
//
// Each direction has a loop of its own: on one loop around both, the ptxas of CUDA 12.1 to 12.4 fails for sm_90, if a
// lane takes two columns.
template <class A, int kSweep, int kColumns, bool kAlone>
__device__ __forceinline__ void SweepBlock(const Arguments<A>& args) {
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  const auto every_sequence = [&](auto up) {
    for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
      SweepSequence<A, kSweep, decltype(up)::value, kColumns, kAlone>(args, b, shared);
      __syncthreads();
    }
  };
  if (blockIdx.x == 0) {
    every_sequence(std::true_type());
  } else {
    every_sequence(std::false_type());
  }
}
template <class A, int kSweep, int kColumns>
__global__ void __launch_bounds__(kSweepThreads<A, kColumns>, 1) Sweep(const __grid_constant__ Arguments<A> args) {
  SweepBlock<A, kSweep, kColumns, false>(args);
}
// The same with one more warp, for the last column of kNarrow full tiles and one column.
template <class A, int kSweep, int kColumns>
__global__ void __launch_bounds__(kAloneThreads, 1) SweepAlone(const __grid_constant__ Arguments<A> args) {
  SweepBlock<A, kSweep, kColumns, true>(args);
}

// The loss after Sweep 1, if no gradient is asked for. Grid: sequences.
template <class A>
__global__ void __launch_bounds__(32 * kMaxWarps<A>, 1) Total(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  for (int b = int(blockIdx.x); b < args.batch; b += int(gridDim.x)) {
    const Sequence<A> sequence(args, b);
    A loss = LossOfNoFrames<A>(sequence.labels);
    if (sequence.frames > 0) {
      const Middle<A> middle = AtMiddle(args, sequence, shared);
      loss = middle.wide ? Wide(args, sequence, b) : middle.loss;
    }
    if (threadIdx.x == 0) args.loss[b] = loss;
  }
}

// Tiles that fit beside one warp.
template <class A>
int64_t MaxTiles(int64_t shared_bytes) {
  constexpr int64_t kFixed = SharedBytes<A, 2, 1>(0, 1), kEach = SharedBytes<A, 2, 1>(1, 1) - kFixed;
  return std::max<int64_t>((shared_bytes - kFixed) / kEach, 0);
}

template <class A, int kColumns>
cudaError_t RunSweeps(const LatticeArgs& args, cudaStream_t stream) {
  const Arguments<A> arguments(args, kColumns);
  const bool gradient = args.grad_plane != nullptr;
  const int tiles = int(Tiles(args.columns)), sweep_tiles = (tiles + kColumns - 1) / kColumns;
  const size_t shared = SharedMemoryOfBlock();
  // In float32, the last column of kNarrow full tiles and one column has a warp that does nothing else.
  constexpr bool kCanBeAlone = sizeof(A) == 4 && kNarrow <= kSweepWarps<A, kColumns>;
  const bool alone = kCanBeAlone && args.columns == kNarrow * 32 * kColumns + 1 &&
                     SharedBytes<A, 2, kColumns>(sweep_tiles, kNarrow) <= shared;
  int warps = alone ? kNarrow : std::min(sweep_tiles, kSweepWarps<A, kColumns>);
  while (warps > 1 && SharedBytes<A, 2, kColumns>(sweep_tiles, warps) > shared) --warps;
  const unsigned sequences = unsigned(std::min<int64_t>(args.batch, kMaxGridY));
  const dim3 skew_grid(unsigned(Tiles(args.frames) * tiles), sequences), skew_block(kTile, kSkewRows);
  const dim3 grid(2, sequences), block(alone ? kAloneThreads : 32 * (warps + std::min(kMaxCopiers, warps)));

  cudaError_t error = cudaSuccess;
  const auto then = [&](auto kernel, dim3 grid, dim3 block, size_t shared) {
    if (error == cudaSuccess) error = Launch(kernel, grid, block, shared, stream, arguments);
  };
  if (args.frames > 0) then(&Skew<A, false>, skew_grid, skew_block, 0);
  const auto sweep = [&](auto which) {
    constexpr int kSweep = decltype(which)::value;
    // The sums of the tiles of 32 columns lie in the same memory as the values that cross, at least as many.
    const size_t bytes = SharedBytes<A, kSweep, kColumns>(sweep_tiles, warps);
    if (Loading::active || !alone) then(&Sweep<A, kSweep, kColumns>, grid, block, bytes);
    if constexpr (kCanBeAlone) {
      if (Loading::active || alone) then(&SweepAlone<A, kSweep, kColumns>, grid, block, bytes);
    }
  };
  sweep(std::integral_constant<int, 1>());
  if (gradient) {
    sweep(std::integral_constant<int, 2>());
    if (args.frames > 0) then(&Skew<A, true>, skew_grid, skew_block, 0);
  } else {
    then(&Total<A>, dim3(sequences), block, tiles * sizeof(Value<A>));
  }
  return error;
}

template <class A>
cudaError_t Run(const LatticeArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  if (!Countable(args)) return cudaErrorInvalidValue;
  if constexpr (sizeof(A) == 4) {
    if (Tiles(args.columns - 1) > kNarrow) return RunSweeps<A, 2>(args, stream);
  }
  return RunSweeps<A, 1>(args, stream);
}

}  // namespace

int64_t MaxUnitColumns(int64_t shared_bytes) {
  return std::min(MaxTiles<float>(shared_bytes), MaxTiles<double>(shared_bytes)) * kTile;
}

// Arcs that skip frames: all arcs, mantissas and exponents of alpha and beta, a flag per tile of each arc.
Workspace LatticeWorkspace(bool unit_steps, int64_t num_arcs) {
  if (unit_steps) return {{{kArcs, kFrames, 1}, {kPerColumn, 0, 1}, {1, kTile, kTile}}};
  return {{{4 + num_arcs, 1, 1}, {num_arcs, kTile, kTile}}};
}

cudaError_t Lattice(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  if (!IsUnitStep(args.topology)) return SkipLattice(is_double, args, stream);
  return is_double ? Run<double>(args, stream) : Run<float>(args, stream);
}

}  // namespace jax_rnnt::cuda
