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
// neighbour, so the block needs one barrier per chunk, not per diagonal. Loads of a chunk are issued before the chunk
// before it is computed. If there are more tiles of 32 columns than warps, a warp takes several in turn and keeps
// their running values in the workspace, so the size of a block does not bound U.
//
// The critical path of a step is a shuffle, a multiply-add and an addition of exponents; the exp of the arcs is off the
// path. By count of instructions, a diagonal takes about 60 cycles. Memory traffic is 72 bytes per node in float32. The
// two skewing passes have 32 of them, at the speed of the memory; without them, reading frame order would cost 32
// sectors per access on the critical path instead of 4.
#include "xla_kernels/cuda/lattice.h"

#include <algorithm>

#include "xla_kernels/cuda/lattice_values.cuh"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_LATTICE_WARPS
#define JAX_RNNT_LATTICE_WARPS 8
#endif
// Four warps keep the four schedulers of a multiprocessor busy; more than eight would leave too few registers.
constexpr int kMaxWarps = JAX_RNNT_LATTICE_WARPS;
constexpr unsigned kAll = 0xffffffffu;

// Diagonals of a chunk. Registers must hold two chunks: one is computed while the next is loaded.
template <class A>
constexpr int kChunk = sizeof(A) == 4 ? 8 : 4;

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
// Running values, [2 sweeps][3][columns]; the second sweep only uses its own if a warp has several tiles:
//   0, 1: alpha times the probability of the blank and of the label arcs that leave the diagonal reached
//   2:    beta of the diagonal reached
// Wide mode keeps a diagonal in those of the second sweep.
// The sizes are plain numbers, since device code cannot call member functions of host constants.
constexpr int64_t kArcs = 2, kRunning = 12;  // elements per node, per column
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
  Divider by_frames;  // diagonals to rows
  const int32_t *num_frames, *num_labels;
  const A *log_blank, *log_label;  // in frame order
  // Between the sweeps: mantissas and exponents of alpha or beta, in diagonal order. At the end: the results, in frame
  // order.
  A *grad_blank, *grad_label;
  A* workspace;
  int64_t stride;  // of the workspace, from a sequence to the next
  A* loss;
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
    return running + (sweep * 3 + which) * args.columns;
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
    if (!kBack && empty) continue;
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
        args.grad_label[i] = zero ? A(0) : loss != loss ? loss : tile[slot(t)].label;
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
        tile[slot(t)].blank = check(args.log_blank[i]);
        tile[slot(t)].label = u < sequence.labels ? check(args.log_label[i]) : -kInfinity<A>;
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

// Shared memory of a sweep: for each tile, the values that cross to its neighbour in the last two chunks, and the value
// that entered the tile before them. AtMiddle uses it first, for the sums of the tiles.
template <class A>
constexpr size_t SharedBytes(int tiles) {
  return size_t(tiles) * (2 * kChunk<A> + 1) * sizeof(Value<A>);
}

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
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  const Value<A>* const blank = sequence.Running(args, 0, 0);
  const Value<A>* const label = sequence.Running(args, 0, 1);
  const Value<A>* const beta = sequence.Running(args, 0, 2);
  for (int tile = warp; tile < sequence.tiles; tile += warps) {
    const int u = tile * kTile + lane;
    Value<A> sum = Zero<S>();
    if (u <= sequence.labels) sum = Normalize(blank[u] * beta[u]);
    if (u < sequence.labels) sum = Normalize(sum + label[u] * beta[u + 1]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const Value<A> other = {__shfl_xor_sync(kAll, sum.m, step), __shfl_xor_sync(kAll, sum.e, step)};
      sum = Normalize(sum + other);
    }
    if (lane == 0) sums[tile] = sum;
  }
  int bits = 0;
  const int tiles_of_columns = int(Tiles(args.columns));
  for (int row = warp; row < int(Tiles(sequence.frames)); row += warps) {
    for (int tile = lane; tile < sequence.tiles; tile += 32) bits |= int(sequence.flags[row * tiles_of_columns + tile]);
  }
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

// Loads of a lane for a chunk: its column of kChunk diagonals.
template <class A, int kSweep>
struct Loads {
  Arcs<A> arcs[kChunk<A>];
  // Second sweep: values of the other direction, alpha of the node or, upwards, beta of the next diagonal.
  Value<A> other[kSweep == 2 ? kChunk<A> : 1];
  Value<A> beyond;  // second sweep upwards: that beta in the column right of the tile, of step j in lane j
};

// kSweep 1: alpha over diagonals 0 ... middle (kUp), or beta over diagonals - 1 ... middle + 1. kSweep 2: the other
// diagonals, and posteriors.
template <class A, int kSweep, bool kUp>
__device__ __forceinline__ void SweepSequence(const Arguments<A>& args, int b, Value<A>* shared) {
  using S = Scalar<A>;
  constexpr int C = kChunk<A>, kStep = kUp ? 1 : -1;
  constexpr int kEntry = kUp ? 0 : 31, kExit = 31 - kEntry;  // lanes where values cross from and to the next tiles
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  const Sequence<A> sequence(args, b);
  const int last = sequence.diagonals, tiles = sequence.tiles;
  if (sequence.frames == 0) {
    if (kSweep == 2 && kUp && threadIdx.x == 0) args.loss[b] = LossOfNoFrames<A>(sequence.labels);
    return;
  }
  A *const m = args.grad_blank + int64_t(b) * sequence.plane, *const e = args.grad_label + int64_t(b) * sequence.plane;
  const bool keep = args.grad_blank != nullptr;

  Value<A> minus_inverse = Zero<S>();
  if (kSweep == 2) {
    const Middle<A> middle = AtMiddle(args, sequence, shared);
    if (!kUp && middle.wide) return;
    const A loss = middle.wide ? Wide(args, sequence, b) : middle.loss;
    if (kUp && threadIdx.x == 0) args.loss[b] = loss;
    if (middle.wide || !(loss < kInfinity<A>)) return;
    minus_inverse = {A(-1) / middle.likelihood.m, -middle.likelihood.e};
  }

  // Initial running values of all columns. Upwards, a blank arc of probability 1 leads to node (0, 0).
  Value<A>* const blanks = sequence.Running(args, kSweep - 1, 0);
  Value<A>* const labels = sequence.Running(args, kSweep - 1, 1);
  Value<A>* const betas = sequence.Running(args, kSweep - 1, 2);
  Value<A>* const carries = shared + tiles * 2 * C;
  const auto crossing = [&](int tile, int chunk, int j) -> Value<A>& {
    return shared[(tile * 2 + (chunk & 1)) * C + j];
  };
  for (int tile = warp; tile < tiles; tile += warps) {
    const int u = tile * kTile + lane;
    if (u > sequence.labels) continue;
    const auto first = [&](int which, int v) {
      if (kSweep == 2) return sequence.Running(args, 0, which)[v];
      return v == (which == 2 ? sequence.labels : 0) && which != 1 ? One<A>() : Zero<S>();
    };
    if (kUp) {
      blanks[u] = first(0, u);
      labels[u] = first(1, u);
      if (lane == kEntry && u > 0) carries[tile] = first(1, u - 1);
    } else {
      betas[u] = first(2, u);
      if (lane == kEntry && u < sequence.labels) carries[tile] = first(2, u + 1);
    }
  }

  const int begin = kUp ? (kSweep == 1 ? 0 : sequence.middle + 1) : (kSweep == 1 ? last - 1 : sequence.middle);
  const int end = kUp ? (kSweep == 1 ? sequence.middle + 1 : last) : (kSweep == 1 ? sequence.middle : -1);
  const int length = (end - begin) * kStep, chunks = (length + C - 1) / C;
  const bool several = tiles > warps;  // tiles per warp
  const auto chunk_of = [&](int round, int tile) { return round - (kUp ? tile : tiles - 1 - tile); };
  // Position in a plane of the node in column u on diagonal n, and of the one on the next diagonal of the sweep.
  // Unsigned, since an address then takes one instruction.
  const unsigned plane = unsigned(sequence.plane), columns = unsigned(args.columns);
  const auto position = [&](int n, int u) {
    return (unsigned(n) - args.by_frames(unsigned(n)) * unsigned(args.frames)) * columns + unsigned(u);
  };
  const auto next = [&](unsigned at) {
    if (kUp) return at + columns >= plane ? at + columns - plane : at + columns;
    return at < columns ? at + plane - columns : at - columns;
  };
  const auto inside = [&](int t) { return unsigned(t) < unsigned(sequence.frames); };
  const auto frame = [&](int n, int u) { return u <= sequence.labels ? n - args.skew * u : -(1 << 30); };

  const auto load = [&](int round, int tile) {
    Loads<A, kSweep> loads;
    const int chunk = chunk_of(round, tile), u = tile * kTile + lane, n = begin + chunk * C * kStep;
    const bool any = tile < tiles && chunk >= 0 && chunk < chunks;
    const int steps = any ? min(C, length - chunk * C) : 0, t = frame(n, u);
    unsigned at = any ? position(n, u) : 0;
#pragma unroll
    for (int j = 0; j < C; ++j) {
      loads.arcs[j] = {-kInfinity<A>, -kInfinity<A>};
      if (j < steps && inside(t + j * kStep)) loads.arcs[j] = sequence.arcs[at];
      if (kSweep == 2 && kUp) at = next(at);
      if (kSweep == 2) {
        const int t_other = t + j * kStep + (kUp ? 1 : 0);
        loads.other[j] = Zero<S>();
        if (j < steps && inside(t_other)) loads.other[j] = {m[at], S::AsInt(e[at])};
        if (kUp && t_other == sequence.frames && u == sequence.labels) loads.other[j] = One<A>();
      }
      if (!(kSweep == 2 && kUp)) at = next(at);
    }
    if (kSweep == 2 && kUp) {
      const int v = (tile + 1) * kTile, t_beyond = frame(n + lane + 1, v);
      loads.beyond = Zero<S>();
      if (lane < steps && v <= sequence.labels) {
        const unsigned i = position(n + lane + 1, v);
        if (inside(t_beyond)) loads.beyond = {m[i], S::AsInt(e[i])};
        if (t_beyond == sequence.frames && v == sequence.labels) loads.beyond = One<A>();
      }
    }
    return loads;
  };

  Loads<A, kSweep> loads = load(0, warp);
  Value<A> self = Zero<S>(), out = Zero<S>(), carry = Zero<S>();
  for (int round = 0; round < chunks + tiles - 1; ++round) {
    __syncthreads();
    for (int tile = warp; tile < tiles; tile += warps) {
      const Loads<A, kSweep> now = loads;
      const bool last_tile = tile + warps >= tiles;
      loads = load(last_tile ? round + 1 : round, last_tile ? warp : tile + warps);
      const int chunk = chunk_of(round, tile), u = tile * kTile + lane;
      if (chunk < 0 || chunk >= chunks) continue;

      const bool mine = u <= sequence.labels;
      const bool enters = kUp ? tile > 0 : tile < tiles - 1, leaves = kUp ? tile < tiles - 1 : tile > 0;
      if (several || chunk == 0) {
        self = out = carry = Zero<S>();
        if (mine) self = kUp ? blanks[u] : betas[u];
        if (mine && kUp) out = labels[u];
        if (lane == kEntry && enters) carry = carries[tile];
      }
      const int n = begin + chunk * C * kStep, steps = min(C, length - chunk * C), t = frame(n, u);
      unsigned at = position(n, u);
#pragma unroll
      for (int j = 0; j < C; ++j) {
        if (j >= steps) break;
        const bool own = inside(t + j * kStep);
        const Value<A> p_blank = Probability(now.arcs[j].blank), p_label = Probability(now.arcs[j].label);
        Value<A> in = kUp ? ShuffleUp(out) : ShuffleDown(self), blank, label;
        if (lane == kEntry) in = carry;
        if (kUp) {
          const Value<A> sum = self + in, alpha = own ? sum : Zero<S>();
          self = blank = alpha * p_blank;
          out = label = alpha * p_label;
          if (kSweep == 1 && keep && own) m[at] = alpha.m, e[at] = S::AsFloat(alpha.e);
        } else {
          blank = self * p_blank;
          label = in * p_label;
          const Value<A> sum = blank + label;
          self = own ? sum : Zero<S>();
          if (kSweep == 1 && keep && own) m[at] = self.m, e[at] = S::AsFloat(self.e);
        }
        if (kSweep == 2) {
          const Value<A> x = now.other[j];
          Value<A> y = x;
          if (kUp) {
            y = ShuffleDown(x);
            if (leaves) {
              const Value<A> beyond = {__shfl_sync(kAll, now.beyond.m, j), __shfl_sync(kAll, now.beyond.e, j)};
              if (lane == 31) y = beyond;
            }
          }
          const auto posterior = [&](Value<A> v, Value<A> other) {
            const auto exponent = S::Max(v.e, S::kZero) + (other.e + minus_inverse.e);
            return v.m * (other.m * minus_inverse.m) * PowerOfTwo<S>(exponent);
          };
          if (own) sequence.arcs[at] = {posterior(blank, x), posterior(label, y)};
        }
        if (enters && lane == kEntry) carry = crossing(tile - kStep, chunk, j);
        if (leaves && lane == kExit) crossing(tile, chunk, j) = kUp ? out : self;
        at = next(at);
      }
      self = Normalize(self);
      out = Normalize(out);
      if (several || (kSweep == 1 && chunk == chunks - 1)) {
        if (mine) (kUp ? blanks : betas)[u] = self;
        if (mine && kUp) labels[u] = out;
        if (lane == kEntry && enters) carries[tile] = carry;
      }
    }
  }
}

// Grid: (upwards and downwards, sequences); a block of up to kMaxWarps warps.
template <class A, int kSweep>
__global__ void __launch_bounds__(32 * kMaxWarps, 1) Sweep(const __grid_constant__ Arguments<A> args) {
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
__global__ void __launch_bounds__(32 * kMaxWarps, 1) Total(const __grid_constant__ Arguments<A> args) {
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

template <class A>
cudaError_t Run(const LatticeArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  if (!Countable(args)) return cudaErrorInvalidValue;
  const Arguments<A> arguments(args);
  const bool gradient = args.grad_plane != nullptr;
  const int tiles = int(Tiles(args.columns)), warps = std::min(tiles, kMaxWarps);
  const unsigned sequences = unsigned(std::min<int64_t>(args.batch, kMaxGridY));
  const dim3 skew_grid(unsigned(Tiles(args.frames) * tiles), sequences), skew_block(kTile, kSkewRows);
  const dim3 grid(2, sequences), block(32 * warps);
  const size_t bytes = SharedBytes<A>(tiles);

  cudaError_t error = cudaSuccess;
  const auto then = [&](auto kernel, dim3 grid, dim3 block, size_t shared) {
    if (error == cudaSuccess) error = Launch(kernel, grid, block, shared, stream, arguments);
  };
  if (args.frames > 0) then(&Skew<A, false>, skew_grid, skew_block, 0);
  then(&Sweep<A, 1>, grid, block, bytes);
  if (gradient) {
    then(&Sweep<A, 2>, grid, block, bytes);
    if (args.frames > 0) then(&Skew<A, true>, skew_grid, skew_block, 0);
  } else {
    then(&Total<A>, dim3(sequences), block, bytes);
  }
  return error;
}

}  // namespace

int64_t MaxUnitColumns(int64_t shared_bytes) {
  return shared_bytes / int64_t(std::max(SharedBytes<float>(1), SharedBytes<double>(1))) * kTile;
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
