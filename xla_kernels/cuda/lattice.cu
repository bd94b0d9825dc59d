// Lattice of unit steps: alpha, beta, and minus the arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Nodes are taken by diagonals n = t + u (monotonic: n = t): every arc leads to the next diagonal, in the same column
// or in the next one. There are four launches. Blocks synchronise only at the boundaries between launches: no block
// waits for another, and nothing is atomic. So results have the same bits every time, and launches can be captured.
//
//   Skew     all of the GPU: log-probabilities into diagonal order, node (t, u) to row n mod T of the workspace, so
//            that 32 neighbouring columns of a diagonal are one access
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
// In a sweep, a warp takes 32 columns, a lane one. Values move along label arcs to the next lane by a shuffle, and to
// the next warp through shared memory, a chunk of kChunk diagonals at a time. Each warp is one chunk behind its
// neighbour, so the block needs one barrier per chunk, not per diagonal. What a chunk reads is copied into shared
// memory (cp.async) two chunks ahead. Between chunks, the probabilities of the next one are computed, eight steps side
// by side, and stay in registers. A chunk has no branches: a node that does not exist has arcs of probability zero, and
// stores have predicates. All chunks are full: the first sweep begins with diagonals without nodes, the second ends
// with such. If there are more tiles of 32 columns than warps, a warp takes several in turn and keeps their running
// values in the workspace, so the size of a block does not bound U; then other warps hide its waits for copies.
//
// The critical path of a step is a shuffle (23 cycles) and the choice of what enters the lane (4), the larger exponent,
// two differences and a shift (13), or beside it the multiply-add (4) and a product (4): 36 to 40 cycles. The exp of
// the arcs is off the path. Memory traffic is 72 bytes per node in float32. The two skewing passes have 32 of them, at
// the speed of the memory; without them, reading frame order would cost 32 sectors per access on the critical path
// instead of 4.
//
// Tried; cycles of a diagonal at U = 127 in the steady state of a block, by the replay of `make cuda-model`, for alpha
// and beta of the first and of the second sweep:
//   probabilities in the step that needs them, a step of the copies in the middle of a chunk     140 143   160 145
//   positions of a chunk side by side, not one from the other; copies after the first two steps  113 124   138 139
//   copies in three groups, each waited for when it is needed                                    119 102   157 134
//   the same, reads of shared memory free to pass the wait                                       121 104   160 131
//   the same, probabilities a step ahead in the source: the compiler delays them again           119 105   156 125
//   probabilities of a chunk at its end                                                          115 113   142 140
//   the same, copies of arcs within the steps                                                    120 112   162 152
//   probabilities and copies of the next chunk within the steps, where their waits would hide    115 114   193 151
//   the label posterior stored a step later                                                      142 139
//   copies that have a condition in place of a branch: what is here                              113 113   146 142
//   two warps for a tile, one for the steps, the other for probabilities and copies              138 141   155 146
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
constexpr unsigned kAll = 0xffffffffu;

// Diagonals of a chunk. One is computed while the next is copied.
template <class A>
constexpr int kChunk = sizeof(A) == 4 ? 8 : 4;
// Step of a chunk whose values are scaled, so that no mantissa leaves the range of A.
constexpr int kScaleStep = 1;
// Steps from the read of a value in shared memory to its use.
#ifndef JAX_RNNT_LATTICE_AHEAD
#define JAX_RNNT_LATTICE_AHEAD 2
#endif
constexpr int kAhead = JAX_RNNT_LATTICE_AHEAD;

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

// Parts of a sequence's workspace: arcs in diagonal order, running values of the sweeps, a flag per tile of Skew.
//
// Running values, [2 sweeps][4][columns]; the second sweep only uses its own if a warp has several tiles:
//   0, 1: alpha times the probability of the arcs from the diagonal reached that enter the column by blank, by label
//   2, 3: beta of the diagonal reached, in the column and in the next one
// Wide mode keeps a diagonal in those of the second sweep.
// The sizes are plain numbers, since device code cannot call member functions of host constants.
constexpr int64_t kArcs = 2, kRunning = 16;  // elements per node, per column
constexpr int64_t RunningOffset(int64_t frames, int64_t columns) { return kArcs * frames * columns; }
constexpr int64_t FlagsOffset(int64_t frames, int64_t columns) {
  return RunningOffset(frames, columns) + kRunning * columns;
}

template <class A>
struct Arguments {
  explicit Arguments(const LatticeArgs& args)
      : batch(int(args.batch)),
        frames(int(args.frames)),
        columns(int(args.columns)),
        skew(IsMonotonic(args.topology) ? 0 : 1),
        by_frames(uint32_t(std::max<int64_t>(1, args.frames))),
        lift((kChunk<A> + std::max(1, frames) - 1) / std::max(1, frames) * std::max(1, frames)),
        num_frames(args.num_frames),
        num_labels(args.num_labels),
        log_blank(static_cast<const A*>(args.log_plane[0])),
        log_label(static_cast<const A*>(args.log_plane[1])),
        grad_blank(args.grad_plane != nullptr ? static_cast<A*>(args.grad_plane[0]) : nullptr),
        grad_label(args.grad_plane != nullptr ? static_cast<A*>(args.grad_plane[1]) : nullptr),
        workspace(static_cast<A*>(args.workspace)),
        stride(LatticeWorkspace(args, true)),
        loss(static_cast<A*>(args.loss)) {
    for (int j = 0; j <= kChunk<A>; ++j) steps[j] = unsigned(j % std::max(1, frames) * columns);
  }

  int batch, frames, columns;
  int skew;           // diagonal of node (t, u): t + skew * u
  Divider by_frames;  // diagonals to rows
  int lift;           // a multiple of `frames`, at least a chunk
  const int32_t *num_frames, *num_labels;
  const A *log_blank, *log_label;  // in frame order
  // Between the sweeps: mantissas and exponents of alpha or beta, in diagonal order. At the end: the results, in frame
  // order.
  A *grad_blank, *grad_label;
  A* workspace;
  int64_t stride;  // of the workspace, from a sequence to the next
  A* loss;
  unsigned steps[kChunk<A> + 1];  // from a row of a plane to that of the j-th diagonal after it
};

// One sequence, as all kernels see it.
template <class A>
struct Sequence {
  __device__ __forceinline__ Sequence(const Arguments<A>& args, int b)
      : frames(max(0, min(args.num_frames[b], args.frames))),
        labels(max(0, min(args.num_labels[b], args.columns - 1))),
        diagonals(frames + args.skew * labels),
        middle(diagonals / 2),
        tiles(labels / kTile + 1),
        plane(args.frames * args.columns),
        arcs(reinterpret_cast<Arcs<A>*>(args.workspace + b * args.stride)),
        running(
            reinterpret_cast<Value<A>*>(args.workspace + b * args.stride + RunningOffset(args.frames, args.columns))),
        flags(args.workspace + b * args.stride + FlagsOffset(args.frames, args.columns)) {}

  __device__ __forceinline__ Value<A>* Running(const Arguments<A>& args, int sweep, int which) const {
    return running + (sweep * 4 + which) * args.columns;
  }

  int frames, labels;     // T_b, U_b
  int diagonals, middle;  // nodes lie on diagonals 0 ... diagonals - 1; the sweeps meet after `middle`
  int tiles, plane;
  Arcs<A>* arcs;
  Value<A>* running;
  A* flags;
};

// ---- Frame order <-> diagonal order
// ----------------------------------------------------------------------------------

// Grid: (tiles of 32 frames x 32 columns, sequences); block (32, 8).
//
// Forth: label arcs that do not exist become -inf, and a flag gets the bits of the tile's arcs. Back: from the
// workspace to the gradients, with zeros outside the lengths and if there is no path, NaN if the loss is NaN.
template <class A, bool kBack>
__global__ void __launch_bounds__(kTile* kSkewRows, 4) Skew(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_SHARED_ARRAY(Arcs<A>, tile, kTile * (kTile + 1));
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
    const auto slot = [&](int t) { return (t - first_t) * (kTile + 1) + lane; };
    const auto used = [&](int t) { return t < sequence.frames && u <= sequence.labels; };

    const auto by_frames = [&](auto visit) {
      for (int t = first_t + int(threadIdx.y); t < min(first_t + kTile, args.frames); t += kSkewRows) {
        if (u < args.columns) visit(t, int64_t(b) * sequence.plane + t * args.columns + u);
      }
    };
    const auto by_diagonals = [&](auto visit) {
      for (int d = int(threadIdx.y); d < kTile + args.skew * (kTile - 1); d += kSkewRows) {
        const int t = first_t + d - args.skew * lane, n = first_t + d + args.skew * first_u;
        const int row = n - int(args.by_frames(uint32_t(n))) * args.frames;
        if (t >= first_t && t < first_t + kTile && used(t)) visit(t, row * args.columns + u);
      }
    };

    if (kBack) {
      if (!empty && !dead) by_diagonals([&](int t, int i) { tile[slot(t)] = sequence.arcs[i]; });
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
      by_diagonals([&](int t, int i) { sequence.arcs[i] = tile[slot(t)]; });
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
  const Value<A>* const blank = sequence.Running(args, 0, 0);
  const Value<A>* const in = sequence.Running(args, 0, 1);
  const Value<A>* const beta = sequence.Running(args, 0, 2);
  for (int tile = warp; tile < sequence.tiles; tile += warps) {
    const int u = tile * kTile + lane;
    Value<A> sum = Zero<S>();
    if (u <= sequence.labels) sum = Normalize((blank[u] + in[u]) * beta[u]);
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
    if (inside(n - 1, u)) blank = weights[u] * double(sequence.arcs[position(n - 1, u)].blank);
    if (u > 0 && inside(n - 1, u - 1)) label = weights[u - 1] * double(sequence.arcs[position(n - 1, u - 1)].label);
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
      return (end ? 1.0 : next[u]) * (blank ? share : 1 - share);
    };
    for (int u = int(threadIdx.x); u <= labels; u += threads) {
      if (!inside(n, u)) continue;
      const double blank = flow(u, true), label = flow(u + 1, false);
      here[u] = blank + label;
      sequence.arcs[position(n, u)] = {A(0 - blank), A(0 - label)};
    }
    __syncthreads();
  }
  return loss;
}

// Nodes of a lane in the next chunk, and what it needs of them, in shared memory.
template <class A, int kSweep>
struct Stage {
  Arcs<A> arcs[kChunk<A>][32];
  // Second sweep: values of the other direction, alpha of the node or, upwards, beta of the next diagonal.
  Value<A> other[kSweep == 2 ? kChunk<A> : 1][32];
};

// Shared memory of a sweep: for each tile, the values that cross to its neighbour in the last two chunks; zeros, which
// enter the first tile; two stages of each warp. AtMiddle uses it first, for the sums of the tiles.
template <class A, int kSweep>
constexpr size_t SharedBytes(int tiles, int warps) {
  return (size_t(tiles) * 2 + 1) * kChunk<A> * sizeof(Value<A>) + warps * 2 * sizeof(Stage<A, kSweep>);
}

// Steps j = 0, 1, ... of a chunk in which node t + j * kStep exists, as bits; one step more than the chunk has.
template <int kSteps, int kStep>
__device__ __forceinline__ unsigned Existing(int t, int frames) {
  const auto clamp = [](int x) { return min(max(x, 0), kSteps + 1); };
  if (kStep > 0) return (1u << clamp(frames - t)) - (1u << clamp(-t));
  return (1u << clamp(t + 1)) - (1u << clamp(t + 1 - frames));
}

// kSweep 1: alpha over diagonals 0 ... middle (kUp), or beta over diagonals - 1 ... middle + 1. kSweep 2: the other
// diagonals, and posteriors. All chunks are full: the first sweep begins with diagonals that have no node, in which the
// initial value stays as it is; the second one ends with such.
template <class A, int kSweep, bool kUp>
__device__ __forceinline__ void SweepSequence(const Arguments<A>& args, int b, Value<A>* shared) {
  using S = Scalar<A>;
  constexpr int C = kChunk<A>, kStep = kUp ? 1 : -1;
  constexpr int kEntry = kUp ? 0 : 31, kExit = 31 - kEntry;  // lanes where values cross from and to the next tiles
  const int lane = int(threadIdx.x) % 32, warp = Warp(), warps = int(blockDim.x) / 32;
  const Sequence<A> sequence(args, b);
  const int last = sequence.diagonals, tiles = sequence.tiles;
  if (sequence.frames == 0) {
    if (kSweep == 2 && kUp && threadIdx.x == 0) args.loss[b] = LossOfNoFrames<A>(sequence.labels);
    return;
  }
  A* const m = Settled(args.grad_blank + int64_t(b) * sequence.plane);
  A* const e = Settled(args.grad_label + int64_t(b) * sequence.plane);
  Arcs<A>* const arcs = Settled(sequence.arcs);  // posteriors, once a node is done
  const unsigned keep = kSweep == 2 || args.grad_blank != nullptr ? ~0u : 0;

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

  // Values of a lane: `self` has left the last diagonal in the lane's column, `in` enters the next one from another.
  struct State {
    Value<A> self, in;
  };
  Value<A>* const selves = sequence.Running(args, kSweep - 1, kUp ? 0 : 2);
  Value<A>* const ins = sequence.Running(args, kSweep - 1, kUp ? 1 : 3);
  Value<A>* const crossings = shared;
  Value<A>* const zeros = crossings + tiles * 2 * C;
  const int edge = kUp ? 0 : sequence.labels;  // the column of the initial value
  const auto initial = [&](int tile) {
    const int u = tile * kTile + lane;
    State state = {Zero<S>(), Zero<S>()};
    if (kSweep == 1) {
      if (u == edge) state.self = One<A>();
      if (!kUp && u == edge - 1) state.in = One<A>();  // a monotonic label arc may enter the terminal node
      return state;
    }
    const auto reached = [&](const Value<A>& v) {
      Value<A> x = Normalize(v * minus_inverse);
      x.e = S::Max(x.e, S::kZero);
      return x;
    };
    if (u <= sequence.labels) {
      state = {reached(sequence.Running(args, 0, kUp ? 0 : 2)[u]), reached(sequence.Running(args, 0, kUp ? 1 : 3)[u])};
    }
    return state;
  };
  const auto store = [&](int tile, const State& state) {
    const int u = tile * kTile + lane;
    if (u <= sequence.labels) selves[u] = state.self, ins[u] = state.in;
  };

  const int length = kUp == (kSweep == 1) ? sequence.middle + 1 : last - 1 - sequence.middle;
  const int chunks = (length + C - 1) / C, empty = kSweep == 1 ? chunks * C - length : 0;
  const int begin = kSweep == 1 ? (kUp ? -empty : last - 1 + empty) : kUp ? sequence.middle + 1 : sequence.middle;
  // Second sweep upwards: step of the last chunk whose next diagonal, `last`, has only the terminal node.
  const int terminal = length - 1 - (chunks - 1) * C;
  const auto chunk_of = [&](int round, int tile) { return round - (kUp ? tile : tiles - 1 - tile); };
  // Positions in a plane: of the node in column u on diagonal n, and of the one j diagonals further on, which is the
  // smaller of two unsigned numbers, one of which has wrapped around.
  const unsigned plane = unsigned(sequence.plane), columns = unsigned(args.columns);
  const auto position = [&](int n, int u) {
    const unsigned row = unsigned(n + args.lift);
    return (row - args.by_frames(row) * unsigned(args.frames)) * columns + unsigned(u);
  };
  const auto after = [&](unsigned first, int j) {
    const unsigned at = kUp ? first + args.steps[j] : first - args.steps[j];
    return kUp ? min(at, at - plane) : min(at, at + plane);
  };
  // Steps of a chunk, and what is known of it before: its nodes that exist, the position of its first step, and the
  // probabilities of its arcs.
  struct Chunk {
    unsigned here, first;
  };
  struct Probabilities {
    Value<A> blank[C], label[C];
  };
  const auto chunk_at = [&](int chunk, int tile) {
    const int n = begin + chunk * C * kStep, u = tile * kTile + lane;
    const unsigned here = Existing<C, kStep>(u <= sequence.labels ? n - args.skew * u : -(1 << 30), sequence.frames);
    return Chunk{0 <= chunk && chunk < chunks ? here : 0, position(n, u)};
  };
  Stage<A, kSweep>* const stages = reinterpret_cast<Stage<A, kSweep>*>(zeros + C) + warp * 2;
  constexpr int kApart = sizeof(Stage<A, kSweep>) / sizeof(Arcs<A>);
  const SharedAddress<Arcs<A>> to_arcs(&stages[0].arcs[0][lane]);
  const SharedAddress<A> to_other(&stages[0].other[0][lane].m);
  const auto start_copies = [&](int chunk, int tile, const Chunk& next, int stage) {
#pragma unroll
    for (int j = 0; j < C; ++j) {
      const unsigned at = after(next.first, j), of_other = kUp ? after(next.first, j + 1) : at;
      CopyAsyncIf(next.here & 1u << j, to_arcs + (stage * kApart + 32 * j), arcs + at);
      if (kSweep == 2) {
        const unsigned exists = next.here & 1u << (kUp ? j + 1 : j);
        CopyAsyncIf(exists, to_other + (2 * stage * kApart + 64 * j), m + of_other);
        CopyAsyncIf(exists, to_other + (2 * stage * kApart + 64 * j + 1), e + of_other);
      }
    }
    CommitCopies();
    if (kSweep == 2 && kUp && chunk == chunks - 1 && tile * kTile + lane == sequence.labels) {
      stages[stage].other[terminal][lane] = One<A>();
    }
  };
  // The first sweep begins before the first diagonal: there, arcs keep the initial value.
  const auto probabilities = [&](int chunk, int tile, unsigned here, int stage) {
    Probabilities p;
    const bool before = kSweep == 1 && chunk == 0 && tile * kTile + lane == edge;
#pragma unroll
    for (int j = 0; j < C; ++j) {
      const Arcs<A> x = stages[stage].arcs[j][lane];
      p.blank[j] = Probability(x.blank, Bit(here, j));
      p.label[j] = Probability(x.label, Bit(here, j));
      if (before && j < empty) p.blank[j] = One<A>();
    }
    return p;
  };

  const auto compute = [&](int chunk, int tile, const Chunk& now, int stage, const Probabilities& p, State& state) {
    const unsigned stored = now.here & keep, exits = lane == kExit;
    // Upwards, a lane stores the posterior of the label arc that enters its column: it has both values. Nodes whose
    // arc that is:
    const unsigned before = tile * kTile + lane > 0 ? now.here >> args.skew : 0;
    const bool enters = kUp ? tile > 0 : tile < tiles - 1;
    const Value<A>* const entering = enters ? crossings + ((tile - kStep) * 2 + (chunk & 1)) * C : zeros;
    const SharedAddress<A> leaving(&crossings[(tile * 2 + (chunk & 1)) * C].m);
    Value<A> enter[C], others[C];
#pragma unroll
    for (int j = 0; j < C; ++j) enter[j] = entering[j];
    const auto read = [&](int j) {
      if (kSweep == 2 && j < C) others[j] = stages[stage].other[j][lane];
    };
#pragma unroll
    for (int j = 0; j < kAhead; ++j) read(j);
#pragma unroll
    for (int j = 0; j < C; ++j) {
      read(j + kAhead);
      const unsigned own = stored & 1u << j, at = after(now.first, j);
      const auto posterior = [&](Value<A> v) { return v.m * others[j].m * BiasedPower<A>(v.e + others[j].e); };
      if (kUp) {
        Value<A> alpha = Plus(state.self, state.in);
        if (j == kScaleStep) alpha = alpha * Scale(alpha.m);
        const Value<A> label = Times(alpha, p.label[j]);
        state.self = Times(alpha, p.blank[j]);
        state.in = ShuffleUp(label);
        StoreIf(exits, leaving + 2 * j, label.m, label.e);
        if (kSweep == 1) StoreIf(own, m + at, alpha.m, e + at, S::AsFloat(alpha.e));
      } else {
        const Value<A> blank = Times(state.self, p.blank[j]), label = Times(state.in, p.label[j]);
        state.self = Plus(blank, label);
        if (j == kScaleStep) state.self = state.self * Scale(state.self.m);
        state.in = ShuffleDown(state.self);
        StoreIf(exits, leaving + 2 * j, state.self.m, state.self.e);
        if (kSweep == 1) StoreIf(own, m + at, state.self.m, e + at, S::AsFloat(state.self.e));
        if (kSweep == 2) StoreIf(own, &arcs[at].blank, posterior(blank), posterior(label));
      }
      if (lane == kEntry) state.in = enter[j];
      if (kSweep == 2 && kUp) {
        StoreIf(own, &arcs[at].blank, posterior(state.self));
        StoreIf(before & 1u << j, &arcs[at].blank - 1, posterior(state.in));
      }
    }
  };

  const int rounds = chunks == 0 ? 0 : chunks + tiles - 1;
  if (lane < C && warp == 0) zeros[lane] = Zero<S>();
  for (int j = 0; kSweep == 2 && kUp && j < C; ++j) {  // no NaN where no copy arrives
    stages[0].other[j][lane] = stages[1].other[j][lane] = Zero<S>();
  }
  if (tiles <= warps) {
    // Probabilities are ready a chunk ahead, copies start two chunks ahead.
    State state = initial(warp);
    const int first_round = warp < tiles ? -chunk_of(0, warp) : rounds;
    Chunk now = chunk_at(0, warp), next = chunk_at(1, warp);
    start_copies(0, warp, now, 0);
    start_copies(1, warp, next, 1);
    WaitForCopies<1>();
    Probabilities p = probabilities(0, warp, now.here, 0);
    for (int round = 0; round < rounds; ++round) {
      __syncthreads();
      const int chunk = round - first_round, stage = chunk & 1;
      if (chunk < 0 || chunk >= chunks) continue;
      compute(chunk, warp, now, stage, p, state);
      const Chunk later = {chunk_at(chunk + 2, warp).here, after(next.first, C)};
      start_copies(chunk + 2, warp, later, stage);
      WaitForCopies<1>();
      p = probabilities(chunk + 1, warp, next.here, stage ^ 1);
      now = next;
      next = later;
    }
    if (kSweep == 1 && warp < tiles) store(warp, state);
    return;
  }

  for (int tile = warp; tile < tiles; tile += warps) store(tile, initial(tile));
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();
    for (int tile = warp; tile < tiles; tile += warps) {
      const int chunk = chunk_of(round, tile);
      if (chunk < 0 || chunk >= chunks) continue;
      const Chunk now = chunk_at(chunk, tile);
      start_copies(chunk, tile, now, 0);
      const int u = tile * kTile + lane;
      State state = {Zero<S>(), Zero<S>()};
      if (u <= sequence.labels) state = {selves[u], ins[u]};
      WaitForCopies<0>();
      __syncwarp();  // compute replaces arcs that the neighbouring lane has copied
      compute(chunk, tile, now, 0, probabilities(chunk, tile, now.here, 0), state);
      store(tile, state);
    }
  }
}

// Grid: (upwards and downwards, sequences); a block of up to kMaxWarps<A> warps.
template <class A, int kSweep>
__global__ void __launch_bounds__(32 * kMaxWarps<A>, 1) Sweep(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    if (blockIdx.x == 0) {
      SweepSequence<A, kSweep, true>(args, b, shared);
    } else {
      SweepSequence<A, kSweep, false>(args, b, shared);
    }
    __syncthreads();
  }
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
  constexpr int64_t kFixed = SharedBytes<A, 2>(0, 1), kEach = SharedBytes<A, 2>(1, 1) - kFixed;
  return std::max<int64_t>((shared_bytes - kFixed) / kEach, 0);
}

template <class A>
cudaError_t Run(const LatticeArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  if (!Countable(args)) return cudaErrorInvalidValue;
  const Arguments<A> arguments(args);
  const bool gradient = args.grad_plane != nullptr;
  const int tiles = int(Tiles(args.columns));
  const size_t shared = SharedMemoryOfBlock();
  int warps = std::min(tiles, kMaxWarps<A>);
  while (warps > 1 && SharedBytes<A, 2>(tiles, warps) > shared) --warps;
  const unsigned sequences = unsigned(std::min<int64_t>(args.batch, kMaxGridY));
  const dim3 skew_grid(unsigned(Tiles(args.frames) * tiles), sequences), skew_block(kTile, kSkewRows);
  const dim3 grid(2, sequences), block(32 * warps);

  cudaError_t error = cudaSuccess;
  const auto then = [&](auto kernel, dim3 grid, dim3 block, size_t shared) {
    if (error == cudaSuccess) error = Launch(kernel, grid, block, shared, stream, arguments);
  };
  if (args.frames > 0) then(&Skew<A, false>, skew_grid, skew_block, 0);
  then(&Sweep<A, 1>, grid, block, SharedBytes<A, 1>(tiles, warps));
  if (gradient) {
    then(&Sweep<A, 2>, grid, block, SharedBytes<A, 2>(tiles, warps));
    if (args.frames > 0) then(&Skew<A, true>, skew_grid, skew_block, 0);
  } else {
    then(&Total<A>, dim3(sequences), block, tiles * sizeof(Value<A>));
  }
  return error;
}

}  // namespace

int64_t MaxUnitColumns(int64_t shared_bytes) {
  return std::min(MaxTiles<float>(shared_bytes), MaxTiles<double>(shared_bytes)) * kTile;
}

// Arcs that skip frames: all arcs, mantissas and exponents of alpha and beta, a flag per tile of each arc.
Workspace LatticeWorkspace(bool unit_steps, int64_t num_arcs) {
  if (unit_steps) return {{{kArcs, 1, 1}, {kRunning, 0, 1}, {1, kTile, kTile}}};
  return {{{4 + num_arcs, 1, 1}, {num_arcs, kTile, kTile}}};
}

cudaError_t Lattice(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  if (!IsUnitStep(args.topology)) return SkipLattice(is_double, args, stream);
  return is_double ? Run<double>(args, stream) : Run<float>(args, stream);
}

}  // namespace jax_rnnt::cuda
