// Lattice of unit steps: alpha, beta, and minus the arc posteriors, as numbers m * 2^e (common/extended.h).
//
// Nodes are taken by diagonals n = t + u (monotonic: n = t): every arc leads to the next diagonal, in the same column
// or in the next one. Four launches, the boundary between two being the only synchronisation between blocks; no block
// waits for another, nothing is atomic, so results are the same bits every time and the launches can be captured.
//
//   Skew     all of the GPU: log-probabilities into diagonal order, node (t, u) to row n mod T of the workspace, so
//            that 32 neighbouring columns of a diagonal are one access
//   Sweep 1  two blocks per sequence: alpha over the first half of the diagonals, beta over the second, both kept
//   Sweep 2  the same blocks go on through the other halves, where the other's values lie ready, and write posteriors
//            over the log-probabilities in the workspace
//   Skew     posteriors back into frame order; zeros outside the lengths
//
// The loss alone needs Skew, Sweep 1 and the sum over the arcs between the halves: half of the steps.
//
// A sweep: a warp takes 32 columns, a lane one. What a lane's label arc hands to the next column moves by a shuffle;
// from warp to warp by shared memory, a chunk of kChunk diagonals at a time: each warp is one chunk behind its
// neighbour, and the block meets once per chunk, not once per diagonal. Loads of a chunk are issued before the chunk
// before it is computed. Where there are more tiles of 32 columns than warps, a warp takes several in turn and keeps
// their running values in the workspace, so U is not bounded by the size of a block.
//
// On the critical path of a step are a shuffle, a multiply-add and an addition of exponents; exp is taken of arcs, off
// the path. Counted from the instructions: about 60 cycles per diagonal. Memory traffic: 72 bytes per node in float32,
// of which the two skewing passes are 32 and run at the speed of the memory; reading frame order directly would cost
// 32 sectors per access on the path instead of 4.
#include "xla_kernels/cuda/lattice.h"

#include <algorithm>

#include "xla_kernels/common/extended.h"

namespace jax_rnnt::cuda {
namespace {

#ifndef JAX_RNNT_LATTICE_WARPS
#define JAX_RNNT_LATTICE_WARPS 8
#endif
// Four warps keep the four schedulers of a multiprocessor busy; more than eight would leave too few registers.
constexpr int kMaxWarps = JAX_RNNT_LATTICE_WARPS;
constexpr unsigned kMaxGridY = 65535;
constexpr unsigned kAll = 0xffffffffu;

// The lane of a thread, for common/extended.h.
template <class A>
struct Scalar;
template <>
struct Scalar<float> {
  using F = float;
  using I = int32_t;
  static constexpr int kMantissaBits = 23, kExponentBias = 127;
  static constexpr I kZero = -700'000'000;
  static constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
  static __device__ __forceinline__ I Max(I a, I b) { return a > b ? a : b; }
  static __device__ __forceinline__ F AsFloat(I x) { return cuda::AsFloat(x); }
  static __device__ __forceinline__ I AsInt(F x) { return cuda::AsInt(x); }
};
template <>
struct Scalar<double> {
  using F = double;
  using I = int64_t;
  static constexpr int kMantissaBits = 52, kExponentBias = 1023;
  static constexpr I kZero = -700'000'000'000'000;
  static constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
  static __device__ __forceinline__ I Max(I a, I b) { return a > b ? a : b; }
  static __device__ __forceinline__ F AsFloat(I x) { return cuda::AsFloat(x); }
  static __device__ __forceinline__ I AsInt(F x) { return cuda::AsInt(x); }
};
template <class A>
using Value = Extended<Scalar<A>>;

template <class A>
constexpr A kInfinity = A(__builtin_huge_val());
// Arcs below -kLimit have probability zero, arcs above kLimit count as +inf.
template <class A>
constexpr A kLimit = A(1 << 21);
// Diagonals of a chunk: as many as registers hold twice, once being computed and once being loaded.
template <class A>
constexpr int kChunk = sizeof(A) == 4 ? 8 : 4;

template <class A>
__device__ __forceinline__ Value<A> One() {
  return {A(1), 0};
}

// exp(x), of which adding `round` leaves the nearest exponent in the low bits of a float.
template <class A>
__device__ __forceinline__ Value<A> Probability(A x) {
  using S = Scalar<A>;
  if (!(x > -kLimit<A> && x < kLimit<A>)) return Zero<S>();
  constexpr A kLog2E = A(1.4426950408889634074), kRound = A(3ll << (S::kMantissaBits - 1));
  const A rounded = x * kLog2E + kRound, n = rounded - kRound;
  const A r = (x - n * S::kLn2High) - n * S::kLn2Low;
  return {Exp2(r * kLog2E), S::AsInt(rounded) - S::AsInt(kRound)};
}

template <class A>
__device__ __forceinline__ Value<A> ShuffleUp(Value<A> v) {
  return {__shfl_up_sync(kAll, v.m, 1), __shfl_up_sync(kAll, v.e, 1)};
}
template <class A>
__device__ __forceinline__ Value<A> ShuffleDown(Value<A> v) {
  return {__shfl_down_sync(kAll, v.m, 1), __shfl_down_sync(kAll, v.e, 1)};
}

// Values as two planes of A: mantissas, and the bits of exponents.
template <class A>
struct ValuePlanes {
  using S = Scalar<A>;
  A *m, *e;
  __device__ __forceinline__ Value<A> Get(int64_t i) const { return {m[i], S::AsInt(e[i])}; }
  __device__ __forceinline__ void Set(int64_t i, Value<A> v) const { m[i] = v.m, e[i] = S::AsFloat(v.e); }
};

template <class A>
struct Arguments {
  explicit Arguments(const LatticeArgs& args)
      : batch(int(args.batch)),
        frames(int(args.frames)),
        columns(int(args.columns)),
        skew(args.topology == Topology::kStandard),
        num_frames(args.num_frames),
        num_labels(args.num_labels),
        arcs{static_cast<const A*>(args.log_blank), static_cast<const A*>(args.log_label)},
        grads{static_cast<A*>(args.grad_blank), static_cast<A*>(args.grad_label)},
        workspace(static_cast<A*>(args.workspace)),
        stride(LatticeWorkspace(args.frames, args.columns)),
        loss(static_cast<A*>(args.loss)) {}

  int batch, frames, columns;
  int skew;  // diagonal of node (t, u): t + skew * u
  const int32_t *num_frames, *num_labels;
  const A* arcs[2];  // log-probabilities of blank and label, in frame order
  A* grads[2];       // between the sweeps: alpha or beta in diagonal order. At last: minus posteriors, in frame order
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
        tiles(labels / 32 + 1),
        plane(int64_t(args.frames) * args.columns),
        arcs{args.workspace + b * args.stride, args.workspace + b * args.stride + plane},
        values{nullptr, nullptr} {
    if (args.grads[0] != nullptr) values = {args.grads[0] + b * plane, args.grads[1] + b * plane};
  }
  // Behind the two planes in the workspace: running values, [2 sweeps][3][columns], then two flags.
  //   0, 1: alpha times the probability of the arc, of the blank and the label arcs that leave the diagonal reached
  //   2:    beta of the diagonal reached
  __device__ __forceinline__ ValuePlanes<A> Running(const Arguments<A>& args, int sweep, int which) const {
    A* const m = arcs[0] + 2 * plane + int64_t(sweep * 3 + which) * 2 * args.columns;
    return {m, m + args.columns};
  }
  __device__ __forceinline__ A* Flags(const Arguments<A>& args) const {
    return arcs[0] + 2 * plane + int64_t(12) * args.columns;
  }

  int frames, labels;     // T_b, U_b
  int diagonals, middle;  // nodes lie on diagonals 0 ... diagonals - 1; the sweeps meet behind `middle`
  int tiles;
  int64_t plane;
  A* arcs[2];             // in diagonal order: log-probabilities, then minus posteriors
  ValuePlanes<A> values;  // in diagonal order: alpha up to the middle, beta behind it
};

// ---- Frame order <-> diagonal order
// ----------------------------------------------------------------------------------

constexpr int kTile = 32, kSkewRows = 8;

// Grid: (tiles of 32 frames x 32 columns, sequences); block (32, 8). kBack: from the workspace to the gradients, with
// zeros outside the lengths and where there is no path, NaN where the loss is NaN.
template <class A, bool kBack>
__global__ void __launch_bounds__(kTile* kSkewRows) Skew(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_SHARED_ARRAY(A, tile, 2 * kTile * (kTile + 1));
  const int tiles_of_columns = (args.columns + kTile - 1) / kTile;
  const int first_t = int(blockIdx.x) / tiles_of_columns * kTile, first_u = int(blockIdx.x) % tiles_of_columns * kTile;
  const int lane = int(threadIdx.x), u = first_u + lane;
  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    const bool empty = first_t >= sequence.frames || first_u > sequence.labels;
    if (!kBack && empty) continue;
    const A loss = kBack ? args.loss[b] : A(0);
    const bool dead = loss == kInfinity<A>;
    const auto slot = [&](int arc, int t) { return (arc * kTile + t - first_t) * (kTile + 1) + lane; };
    const auto used = [&](int t) { return t < sequence.frames && u <= sequence.labels; };

    const auto by_frames = [&](auto visit) {
      for (int t = first_t + int(threadIdx.y); t < min(first_t + kTile, args.frames); t += kSkewRows) {
        if (u < args.columns) visit(t, int64_t(b) * sequence.plane + int64_t(t) * args.columns + u);
      }
    };
    const auto by_diagonals = [&](auto visit) {
      for (int d = int(threadIdx.y); d < kTile + args.skew * (kTile - 1); d += kSkewRows) {
        const int t = first_t + d - args.skew * lane;
        const int row = (first_t + d + args.skew * first_u) % args.frames;
        if (t >= first_t && t < first_t + kTile && used(t)) visit(t, int64_t(row) * args.columns + u);
      }
    };

    if (kBack) {
      if (!empty && !dead) {
        by_diagonals([&](int t, int64_t i) {
          for (int arc = 0; arc < 2; ++arc) tile[slot(arc, t)] = sequence.arcs[arc][i];
        });
      }
      __syncthreads();
      by_frames([&](int t, int64_t i) {
        for (int arc = 0; arc < 2; ++arc) {
          args.grads[arc][i] = !used(t) || dead ? A(0) : loss != loss ? loss : tile[slot(arc, t)];
        }
      });
    } else {
      by_frames([&](int t, int64_t i) {
        for (int arc = 0; arc < 2; ++arc) tile[slot(arc, t)] = args.arcs[arc][i];
      });
      __syncthreads();
      by_diagonals([&](int t, int64_t i) {
        for (int arc = 0; arc < 2; ++arc) sequence.arcs[arc][i] = tile[slot(arc, t)];
      });
    }
    __syncthreads();
  }
}

// ---- Sweeps
// ----------------------------------------------------------------------------------------------------------

// Shared memory of a sweep: for each tile, what crosses to its neighbour in the last two chunks, and what has crossed
// from it when a phase begins. First used for the sum over the tiles.
template <class A>
struct Crossings {
  Value<A>* values;
  __device__ __forceinline__ Value<A>& At(int tile, int chunk, int step) const {
    return values[(tile * 2 + (chunk & 1)) * kChunk<A> + step];
  }
};
template <class A>
size_t SharedBytes(int tiles) {
  return size_t(tiles) * (2 * kChunk<A> + 1) * sizeof(Value<A>);
}

// Likelihood, from the arcs that lead from the middle diagonal to the next. A tile's sum does not depend on the number
// of warps, and tiles are added in order, so neither padding nor batch change a bit. `sums`: shared, one per tile.
template <class A>
__device__ __forceinline__ Value<A> Likelihood(const Arguments<A>& args, const Sequence<A>& sequence, Value<A>* sums) {
  using S = Scalar<A>;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  const auto blank = sequence.Running(args, 0, 0), label = sequence.Running(args, 0, 1);
  const auto beta = sequence.Running(args, 0, 2);
  for (int tile = warp; tile < sequence.tiles; tile += warps) {
    const int u = tile * 32 + lane;
    Value<A> sum = Zero<S>();
    if (u <= sequence.labels) sum = Normalize(blank.Get(u) * beta.Get(u));
    if (u < sequence.labels) sum = Normalize(sum + label.Get(u) * beta.Get(u + 1));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const Value<A> other = {__shfl_xor_sync(kAll, sum.m, step), __shfl_xor_sync(kAll, sum.e, step)};
      sum = Normalize(sum + other);
    }
    if (lane == 0) sums[tile] = sum;
  }
  __syncthreads();
  Value<A> total = sums[0];
  for (int tile = 1; tile < sequence.tiles; ++tile) total = Normalize(total + sums[tile]);
  __syncthreads();
  return total;
}

template <class A>
__device__ __forceinline__ A LossOf(const Arguments<A>& args, const Sequence<A>& sequence, Value<A> likelihood) {
  const A* const flags = sequence.Flags(args);
  if (flags[0] != 0 || flags[1] != 0) return kInfinity<A> - kInfinity<A>;
  if (likelihood.m == 0) return kInfinity<A>;
  return A(0 - (Log(double(likelihood.m)) + double(likelihood.e) * 0.69314718055994530942));
}

// No frame: the empty path, if there is no label.
template <class A>
__device__ __forceinline__ A LossOfNoFrames(const Sequence<A>& sequence) {
  return sequence.labels == 0 ? A(0) : kInfinity<A>;
}

// What a lane loads for a chunk: its column of kChunk diagonals.
template <class A>
struct Loads {
  A blank[kChunk<A>], label[kChunk<A>];
  Value<A> other[kChunk<A>];  // second sweep: of the other direction, alpha of the node or beta of the next diagonal
  Value<A> beyond;            // second sweep upwards, lanes below kChunk: that beta right of the tile, a step per lane
};

// Grid: (upwards and downwards, sequences); a block of up to kMaxWarps warps. kSweep 1: alpha over diagonals 0 ...
// middle or beta over diagonals - 1 ... middle + 1. kSweep 2: the rest, and posteriors.
template <class A, int kSweep>
__global__ void __launch_bounds__(32 * kMaxWarps) Sweep(const __grid_constant__ Arguments<A> args) {
  using S = Scalar<A>;
  constexpr int C = kChunk<A>;
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  const bool up = blockIdx.x == 0;
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32, warps = int(blockDim.x) / 32;
  const int entry = up ? 0 : 31, exit = 31 - entry;  // lanes at which values cross from and to the neighbouring tiles

  for (int b = int(blockIdx.y); b < args.batch; b += int(gridDim.y)) {
    const Sequence<A> sequence(args, b);
    const int last = sequence.diagonals, tiles = sequence.tiles, columns = args.columns;
    if (sequence.frames == 0) {
      if (kSweep == 2 && up && threadIdx.x == 0) args.loss[b] = LossOfNoFrames(sequence);
      continue;
    }
    const auto inside = [&](int n, int u) {
      const int t = n - args.skew * u;
      return u <= sequence.labels && 0 <= t && t < sequence.frames;
    };
    const auto terminal = [&](int n, int u) { return n == last && u == sequence.labels; };

    Value<A> minus_inverse = Zero<S>();
    if (kSweep == 2) {
      const Value<A> likelihood = Likelihood(args, sequence, shared);
      const A loss = LossOf(args, sequence, likelihood);
      if (up && threadIdx.x == 0) args.loss[b] = loss;
      if (!(loss < kInfinity<A>)) continue;
      minus_inverse = {A(-1) / likelihood.m, -likelihood.e};
    }

    // Running values of all columns, as this sweep finds them.
    const ValuePlanes<A> blanks = sequence.Running(args, kSweep - 1, 0), labels = sequence.Running(args, kSweep - 1, 1);
    const ValuePlanes<A> betas = sequence.Running(args, kSweep - 1, 2);
    const Crossings<A> crossings = {shared};
    Value<A>* const carries = shared + tiles * 2 * C;
    for (int tile = warp; tile < tiles; tile += warps) {
      const int u = tile * 32 + lane;
      if (u > sequence.labels) continue;
      const auto first = [&](int which, int v) {
        if (kSweep == 2) return sequence.Running(args, 0, which).Get(v);
        return which == 2 && v == sequence.labels ? One<A>() : Zero<S>();
      };
      if (up) {
        blanks.Set(u, first(0, u));
        labels.Set(u, first(1, u));
        if (lane == entry && u > 0) carries[tile] = first(1, u - 1);
      } else {
        betas.Set(u, first(2, u));
        if (lane == entry && u < sequence.labels) carries[tile] = first(2, u + 1);
      }
    }

    const int begin = up ? (kSweep == 1 ? 0 : sequence.middle + 1) : (kSweep == 1 ? last - 1 : sequence.middle);
    const int end = up ? (kSweep == 1 ? sequence.middle + 1 : last) : (kSweep == 1 ? sequence.middle : -1);
    const int length = up ? end - begin : begin - end, chunks = (length + C - 1) / C;
    const bool several = tiles > warps;  // tiles per warp
    const auto chunk_of = [&](int round, int tile) { return round - (up ? tile : tiles - 1 - tile); };

    const auto load = [&](int round, int tile) {
      Loads<A> loads;
      const int chunk = chunk_of(round, tile), u = tile * 32 + lane;
      const int first = up ? begin + chunk * C : begin - chunk * C;
      const bool any = tile < tiles && chunk >= 0 && chunk < chunks;
      const int next = any ? (first + (up && kSweep == 2)) % args.frames : 0;  // row of `other`
      int row = any ? first % args.frames : 0, other_row = next;
#pragma unroll
      for (int j = 0; j < C; ++j) {
        const int n = up ? first + j : first - j;
        const bool own = any && (up ? n < end : n > end) && inside(n, u);
        loads.blank[j] = own ? sequence.arcs[0][row * columns + u] : -kInfinity<A>;
        loads.label[j] = own && u < sequence.labels ? sequence.arcs[1][row * columns + u] : -kInfinity<A>;
        if (kSweep == 2) {
          const int m = n + (up ? 1 : 0);
          loads.other[j] = up && terminal(m, u)  ? One<A>()
                           : any && inside(m, u) ? sequence.values.Get(other_row * columns + u)
                                                 : Zero<S>();
          other_row = up ? (other_row + 1 == args.frames ? 0 : other_row + 1)
                         : (other_row == 0 ? args.frames - 1 : other_row - 1);
        }
        row = up ? (row + 1 == args.frames ? 0 : row + 1) : (row == 0 ? args.frames - 1 : row - 1);
      }
      if (kSweep == 2) {
        const int m = first + lane + 1, v = tile * 32 + 32;
        loads.beyond = Zero<S>();
        if (up && any && lane < C) {
          if (terminal(m, v))
            loads.beyond = One<A>();
          else if (inside(m, v))
            loads.beyond = sequence.values.Get(m % args.frames * columns + v);
        }
      }
      return loads;
    };

    Loads<A> loads = load(0, warp);
    Value<A> self = Zero<S>(), out = Zero<S>(), carry = Zero<S>();
    bool bad = false;
    for (int round = 0; round < chunks + tiles - 1; ++round) {
      __syncthreads();
      for (int tile = warp; tile < tiles; tile += warps) {
        const Loads<A> now = loads;
        const bool last_tile = tile + warps >= tiles;
        loads = load(last_tile ? round + 1 : round, last_tile ? warp : tile + warps);
        const int chunk = chunk_of(round, tile), u = tile * 32 + lane;
        if (chunk < 0 || chunk >= chunks) continue;

        const bool mine = u <= sequence.labels;
        const bool enters = up ? tile > 0 : tile < tiles - 1, leaves = up ? tile < tiles - 1 : tile > 0;
        if (several || chunk == 0) {
          self = out = carry = Zero<S>();
          if (mine) self = up ? blanks.Get(u) : betas.Get(u);
          if (mine && up) out = labels.Get(u);
          if (lane == entry && enters) carry = carries[tile];
        }
        int row = (up ? begin + chunk * C : begin - chunk * C) % args.frames;
#pragma unroll
        for (int j = 0; j < C; ++j) {
          const int n = up ? begin + chunk * C + j : begin - chunk * C - j;
          if (up ? n >= end : n <= end) break;
          const bool own = inside(n, u);
          const Value<A> p_blank = Probability(now.blank[j]), p_label = Probability(now.label[j]);
          Value<A> in = up ? ShuffleUp(out) : ShuffleDown(self), blank, label;
          if (lane == entry) in = carry;
          if (up) {
            Value<A> alpha = self + in;
            if (kSweep == 1 && n == 0 && u == 0) alpha = One<A>();
            if (!own) alpha = Zero<S>();
            self = blank = alpha * p_blank;
            out = label = alpha * p_label;
            if (kSweep == 1 && own && sequence.values.m != nullptr) sequence.values.Set(row * columns + u, alpha);
          } else {
            blank = self * p_blank;
            label = in * p_label;
            self = own ? blank + label : Zero<S>();
            if (kSweep == 1 && own && sequence.values.m != nullptr) sequence.values.Set(row * columns + u, self);
          }
          if (kSweep == 1) {
            bad |= own && (!(now.blank[j] < kLimit<A>) || (u < sequence.labels && !(now.label[j] < kLimit<A>)));
          } else {
            const Value<A> x = now.other[j];
            Value<A> y = x;
            if (up) {
              y = ShuffleDown(x);
              const Value<A> beyond = {__shfl_sync(kAll, now.beyond.m, j), __shfl_sync(kAll, now.beyond.e, j)};
              if (lane == 31) y = beyond;
            }
            const auto posterior = [&](Value<A> v, Value<A> other) {
              const auto e = S::Max(v.e, S::kZero) + (other.e + minus_inverse.e);
              return v.m * (other.m * minus_inverse.m) * PowerOfTwo<S>(e);
            };
            if (own) {
              sequence.arcs[0][row * columns + u] = posterior(blank, x);
              sequence.arcs[1][row * columns + u] = posterior(label, y);
            }
          }
          if (lane == entry && enters) carry = crossings.At(up ? tile - 1 : tile + 1, chunk, j);
          if (lane == exit && leaves) crossings.At(tile, chunk, j) = up ? out : self;
          row = up ? (row + 1 == args.frames ? 0 : row + 1) : (row == 0 ? args.frames - 1 : row - 1);
        }
        self = Normalize(self);
        out = Normalize(out);
        if (several || (kSweep == 1 && chunk == chunks - 1)) {
          if (mine) (up ? blanks : betas).Set(u, self);
          if (mine && up) labels.Set(u, out);
          if (lane == entry && enters) carries[tile] = carry;
        }
      }
    }
    const int flag = __syncthreads_or(bad);
    if (kSweep == 1 && threadIdx.x == 0) sequence.Flags(args)[up ? 0 : 1] = A(flag);
  }
}

// After Sweep 1, where only the loss is asked for. Grid: sequences.
template <class A>
__global__ void __launch_bounds__(32 * kMaxWarps) Total(const __grid_constant__ Arguments<A> args) {
  JAX_RNNT_DYNAMIC_SHARED(Value<A>, shared);
  for (int b = int(blockIdx.x); b < args.batch; b += int(gridDim.x)) {
    const Sequence<A> sequence(args, b);
    A loss = LossOfNoFrames(sequence);
    if (sequence.frames > 0) loss = LossOf(args, sequence, Likelihood(args, sequence, shared));
    if (threadIdx.x == 0) args.loss[b] = loss;
  }
}

template <class A>
cudaError_t Run(const LatticeArgs& args, cudaStream_t stream) {
  if (args.batch == 0) return cudaSuccess;
  if (args.frames * args.columns > INT32_MAX || args.frames + args.columns > INT32_MAX / 2 || args.batch > INT32_MAX)
    return cudaErrorInvalidValue;
  const Arguments<A> arguments(args);
  const bool gradient = args.grad_blank != nullptr;
  const int tiles = int((args.columns + 31) / 32), warps = std::min(tiles, kMaxWarps);
  const unsigned sequences = unsigned(std::min<int64_t>(args.batch, kMaxGridY));
  const dim3 skew_grid(unsigned((args.frames + kTile - 1) / kTile) * unsigned(tiles), sequences);
  const dim3 skew_block(kTile, kSkewRows), grid(2, sequences), block(32 * warps);
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

int64_t LatticeWorkspace(int64_t frames, int64_t columns) { return 2 * frames * columns + 12 * columns + 2; }

cudaError_t LatticeLoss(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  LatticeArgs loss_only = args;
  loss_only.grad_blank = loss_only.grad_label = nullptr;
  return is_double ? Run<double>(loss_only, stream) : Run<float>(loss_only, stream);
}

cudaError_t LatticeGradient(bool is_double, const LatticeArgs& args, cudaStream_t stream) {
  return is_double ? Run<double>(args, stream) : Run<float>(args, stream);
}

}  // namespace jax_rnnt::cuda
