// A sweep of lattice.cu over one sequence, in one direction: alpha or beta over half of the diagonals, chunk by chunk.
//
// A warp takes a tile of 32 columns, a lane one of them, or 64 and two neighbours. Values move along label arcs to the
// next lane by a shuffle, and to the next tile through shared memory, a chunk at a time: each tile is one chunk behind
// its neighbour, so the block needs one barrier per chunk. Other warps copy what a chunk reads into shared memory
// (cp.async), three chunks ahead. Probabilities are found half a chunk ahead, in registers, beside the steps.
//
// A chunk has no branches: a node that does not exist has arcs of probability zero, and stores have predicates. All
// chunks are full and begin at a multiple of kChunk. The terminal node keeps its value after the last diagonal.
//
// The critical path of a step is a shuffle (23 cycles) and the choice of what enters the lane (4), the larger exponent,
// two differences and a shift (13), or beside it the multiply-add (4) and a product (4): 36 to 40 cycles.
#pragma once

#include "xla_kernels/cuda/lattice_stages.cuh"

namespace jax_rnnt::cuda {

// kSweep 1: alpha over the chunks before `meeting` (kUp), or beta over the others, from the last. kSweep 2: the other
// chunks, and posteriors. kAlone: the block has a warp for a last column, see lattice_alone.cuh.
template <class A, int kSweep, bool kUp, int kColumns, bool kAlone>
struct Sweeper {
  using S = Scalar<A>;
  static constexpr int C = kChunk<A>, V = kVector<A>, kStep = kUp ? 1 : -1, kWidth = kColumns * 32;
  // Lanes and their columns where values cross from and to the next tiles.
  static constexpr int kEntry = kUp ? 0 : 31, kExit = 31 - kEntry, kFirst = kUp ? 0 : kColumns - 1,
                       kLast = kColumns - 1 - kFirst;
  static constexpr int kFar = -(1 << 30);  // the frame of a column or of a chunk that is not there
  using Staged = Stage<A, kSweep, kColumns>;

  // Values of a lane's columns at the diagonal reached: `self` in the column and, downwards, `in` in the next one.
  struct State {
    Value<A> self[kColumns], in[kColumns];
  };
  // A lane's part of a chunk: the frames of its first diagonal, and the place of its group.
  struct Chunk {
    int t[kColumns];
    unsigned group;
  };
  struct Probabilities {
    Value<A> blank[kColumns][C], label[kColumns][C];
  };
  // Logarithms of a chunk's arcs, and values of the other direction for the second sweep.
  struct Read {
    Vector<A> arcs[kColumns][kVectors], other[kColumns][kVectors];
  };
  // Where a tile's values come from and go to; those of chunk i lie C places further if i is odd.
  struct Crossing {
    SharedAddress<Vector<A>> from, to;
  };
  // The outputs of a chunk: mantissas and exponents, or posteriors of blanks and labels. `stored` has a bit per vector:
  // with equal conditions, the compiler makes a branch of two stores.
  struct Output {
    Vector<A> of[kColumns][kVectors];
    Vector<A>* to[kColumns];
    unsigned stored;
  };

  __device__ __forceinline__ Sweeper(const Arguments<A>& args, const Sequence<A>& sequence, int b, Value<A>* shared)
      : args(args),
        sequence(sequence),
        lane(int(threadIdx.x) % 32),
        all_warps(int(blockDim.x) / 32 - (kAlone ? 1 : 0)),
        warp(!kAlone       ? Warp()
             : Warp() == 0 ? all_warps
                           : Warp() - 1),
        copiers(kAlone ? kAloneCopiers : min(kMaxCopiers, all_warps / 2)),
        warps(all_warps - copiers),
        tiles(sequence.labels / kWidth + 1),
        alone(kAlone && sequence.labels == kNarrow * kWidth),
        of_warps(tiles - (alone ? 1 : 0)),
        all((sequence.diagonals + C - 1) / C),
        chunks(kUp == (kSweep == 1) ? sequence.meeting : all - sequence.meeting),
        begin(kSweep == 2 ? sequence.meeting - (kUp ? 0 : 1)
              : kUp       ? 0
                          : all - 1),
        rounds(chunks + tiles - 1),
        selves(sequence.Running(args, kSweep - 1, kUp ? 0 : 1)),
        ins(sequence.Running(args, kSweep - 1, 2)),
        crossings(shared),
        zeros(crossings + tiles * 2 * C),
        odd(Settled(args.odd)),
        with_arcs(Settled(unsigned(sequence.frames + (C - 1)))),
        columns(Settled(unsigned(args.columns))),
        of_group(Settled(kVectors * columns)),
        last_group(Settled((unsigned(args.groups) - 1) * of_group)),
        in_plane(Settled(unsigned(args.in_plane) * of_group)),
        arcs(Settled(sequence.arcs)),
        of_blanks(Plane(args.grad_blank + int64_t(b) * sequence.plane, 0)),
        of_labels(Plane(args.grad_label + int64_t(b) * sequence.plane, in_plane)),
        of_spare(Plane(&sequence.spare->of[0], 2 * in_plane)),
        stages(reinterpret_cast<Staged*>(zeros + 2 * C) + (warp < warps ? warp : warp - warps) * kStages),
        to_stages(&stages[0].vectors[0][0][lane]) {}

  // ---- columns and their values between chunks ----

  __device__ __forceinline__ int Column(int tile, int c) const { return tile * kWidth + kColumns * lane + c; }
  __device__ __forceinline__ unsigned Place(int tile, int c) const {
    return unsigned(tile * 32 + lane + (c == 0 ? 0 : odd));
  }
  __device__ __forceinline__ Value<A> Reached(Value<A> v) const {
    Value<A> x = v * minus_inverse;
    x.e = S::Max(x.e, S::kZero);
    return x;
  }
  __device__ __forceinline__ State Initial(int tile) const {
    const int edge = kUp ? 0 : sequence.labels;  // the column of the initial value
    State state;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = Column(tile, c);
      Value<A>&self = state.self[c], &in = state.in[c];
      self = in = Zero<S>();
      if (kSweep == 1) {
        if (u == edge) self = One<A>();
        if (!kUp && u == edge - 1) in = One<A>();  // a monotonic label arc may enter the terminal node
      } else if (u <= sequence.labels) {
        self = Reached(sequence.Running(args, 0, kUp ? 0 : 1)[u]);
        if (!kUp) in = Reached(sequence.Running(args, 0, 2)[u]);
      }
    }
    return state;
  }
  __device__ __forceinline__ void Keep(int tile, const State& state) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = Column(tile, c);
      if (u > sequence.labels) continue;
      selves[u] = state.self[c];
      if (!kUp) ins[u] = state.in[c];
    }
  }
  __device__ __forceinline__ State Kept(int tile) const {
    State state;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = Column(tile, c);
      state.self[c] = u <= sequence.labels ? selves[u] : Zero<S>();
      state.in[c] = !kUp && u <= sequence.labels ? ins[u] : Zero<S>();
    }
    return state;
  }

  // ---- chunks: counted from 0 here, and from the first diagonal in `begin` ----

  __device__ __forceinline__ int ChunkOf(int round, int tile) const { return round - (kUp ? tile : tiles - 1 - tile); }
  __device__ __forceinline__ bool HasArcs(int t) const { return unsigned(t + (C - 1)) < with_arcs; }
  // Whether there are values, those of the diagonal before included.
  __device__ __forceinline__ bool HasValues(int t) const { return unsigned(t + C) < with_arcs + 1; }
  __device__ __forceinline__ Chunk ChunkAt(int chunk, int tile) const {
    const int from = begin + chunk * kStep;
    Chunk x;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int u = Column(tile, c);
      x.t[c] = u <= sequence.labels && chunk < chunks ? from * C - args.skew * u : kFar;
    }
    x.group = unsigned(Sequence<A>::Group(args, max(from, 0) * C)) * of_group;
    return x;
  }
  __device__ __forceinline__ Chunk After(int chunk, const Chunk& before) const {
    Chunk x;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x.t[c] = chunk < chunks ? before.t[c] + kStep * C : kFar;
    const unsigned group = kUp ? before.group + of_group : before.group - of_group;
    x.group = kUp ? (group > last_group ? 0 : group) : min(group, last_group);
    return x;
  }

  // ---- memory ----

  // Where a group that lies in `plane` would lie if all groups did; so many groups lie in other planes.
  __device__ __forceinline__ static Vector<A>* Plane(A* plane, unsigned groups) {
    const uintptr_t from = reinterpret_cast<uintptr_t>(Aligned16(plane));
    return Settled(reinterpret_cast<Vector<A>*>(from - uintptr_t{groups} * sizeof(Vector<A>)));
  }
  __device__ __forceinline__ Vector<A>* Values(const Chunk& x) const {
    return x.group < in_plane ? of_blanks : x.group < 2 * in_plane ? of_labels : of_spare;
  }
  __device__ __forceinline__ SharedAddress<Vector<A>> StageAt(int stage) const {
    return to_stages + stage * int(sizeof(Staged) / sizeof(Vector<A>));
  }
  __device__ __forceinline__ static int InStage(unsigned v, int c) { return int(kWidth * v) + 32 * c; }
  __device__ __forceinline__ void StartCopies(int tile, const Chunk& next, int stage) const {
    const SharedAddress<Vector<A>> to = StageAt(stage);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const Vector<A>* const of_arcs = Settled(arcs + Place(tile, c));
      const Vector<A>* const of_values = Settled(Values(next) + Place(tile, c));
#pragma unroll
      for (unsigned v = 0; v < kVectors; ++v) {
        const unsigned from = next.group + v * columns;
        CopyAsyncIf(HasArcs(next.t[c]), to + InStage(v, c), of_arcs + from);
        if (kSweep == 2) CopyAsyncIf(HasValues(next.t[c]), to + InStage(kVectors + v, c), of_values + from);
      }
    }
  }
  // A column's numbers of a chunk are read by halves, that is by steps: from vectors h and 2 + h.
  __device__ __forceinline__ void ReadHalf(int stage, int half, unsigned first,
                                           Vector<A> (&to)[kColumns][kVectors]) const {
    const SharedAddress<Vector<A>> from = StageAt(stage);
    const unsigned h = unsigned(kUp ? half : 1 - half);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      to[c][h] = Load(from + InStage(first + h, c));
      to[c][2 + h] = Load(from + InStage(first + 2 + h, c));
    }
  }
  __device__ __forceinline__ void ReadArcs(int stage, int half, Read& x) const { ReadHalf(stage, half, 0, x.arcs); }
  __device__ __forceinline__ void ReadOthers(int stage, int half, Read& x) const {
    if (kSweep == 2) ReadHalf(stage, half, kVectors, x.other);
  }
  __device__ __forceinline__ Crossing CrossingOf(int tile) const {
    const bool enters = kUp ? tile > 0 : tile < tiles - 1;
    Value<A>* const from = enters ? crossings + (tile - kStep) * 2 * C : zeros;
    const auto address = [](Value<A>* x) { return SharedAddress<Vector<A>>(reinterpret_cast<Vector<A>*>(x)); };
    return Crossing{address(from), address(crossings + tile * 2 * C)};
  }

  // ---- the steps of a chunk ----

  // The diagonal of step j within its chunk.
  __device__ __forceinline__ static int Element(int j) { return kUp ? j : C - 1 - j; }
  __device__ __forceinline__ void FindProbability(const Read& x, const Chunk& chunk, int j, Probabilities& p) const {
    const int i = Element(j);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const A limit = HasArcs(chunk.t[c]) ? kLimit<A> : A(-1);
      p.blank[c][j] = Probability(x.arcs[c][i / V].of[i % V], limit);
      p.label[c][j] = Probability(x.arcs[c][2 + i / V].of[i % V], limit);
    }
  }
  __device__ __forceinline__ void Aim(int tile, const Chunk& now, Output& out) const {
    unsigned stored = 0;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      out.to[c] = Settled((kSweep == 1 ? Values(now) : arcs) + Place(tile, c));
      const int t = now.t[c];
      unsigned bits;
      if (kSweep == 1) {
        bits = HasValues(t) & (args.grad_blank != nullptr) ? 15 : 0;
      } else {
        const bool label = kUp ? (Column(tile, c) > 0) & HasValues(t) & HasArcs(t + args.skew) : HasArcs(t);
        bits = (HasArcs(t) ? 3 : 0) | (label ? 12 : 0);
      }
      stored |= bits << kVectors * c;
    }
    out.stored = Settled(stored);
  }
  // Upwards, a lane stores the posterior of the label arc that enters its column, to the column before: it has both
  // values.
  __device__ __forceinline__ void StoreVector(const Output& out, const Chunk& now, unsigned v, int c) const {
    const bool before = kSweep == 2 && kUp && v >= 2;
    Vector<A>* const to = !before ? out.to[c] : c > 0 ? out.to[c - 1] : out.to[kColumns - 1] - 1;
    StoreIf(out.stored & 1u << (v + kVectors * c), to + (now.group + v * columns), out.of[c][v]);
  }
  // A node's value from its two arcs. Their shares of it, times the value of the other direction, are posteriors.
  __device__ __forceinline__ void AddArcs(int c, int i, Value<A> blank, Value<A> label, const Read& x, State& state,
                                          Output& out) const {
    const Sum<A> sum(blank, label);
    if (kSweep == 2) {
      const int h = i / V, k = i % V;
      const A scale = x.other[c][h].of[k] * BiasedPower<S>(sum.e + S::AsInt(x.other[c][2 + h].of[k]));
      out.of[c][h].of[k] = sum.a * scale, out.of[c][2 + h].of[k] = sum.b * scale;
    }
    state.self[c] = {sum.a + sum.b, sum.e};
  }
  __device__ __forceinline__ static void Rescale(int j, Value<A>& self) {
    if (j == kScaleStep) self = self * Scale(self.m);
  }
  // beside(j) is what the single warp of a tile does beside step j: nothing that the step needs.
  template <class Beside>
  __device__ __forceinline__ void Compute(int chunk, int tile, const Crossing& crossing, const Chunk& now,
                                          const Probabilities& p, const Read& x, State& state,
                                          const Beside& beside) const {
    const SharedAddress<Vector<A>> to_leave = crossing.to + (chunk & 1) * kVectors;
    Vector<A> leave, enter[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) enter[v] = Load(crossing.from + ((chunk & 1) * kVectors + v));
    const unsigned exits = lane == kExit;
    Output out;
    Aim(tile, now, out);
#pragma unroll
    for (int j = 0; j < C; ++j) {
      const int i = Element(j), h = i / V, k = i % V;
      Value<A> leaving[kColumns];  // upwards through the label arc
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        Value<A>& self = state.self[c];
        // Downwards, it is that of the next diagonal.
        if (kSweep == 1) out.of[c][h].of[k] = self.m, out.of[c][2 + h].of[k] = S::AsFloat(self.e);
        if (kUp) {
          leaving[c] = Times(self, p.label[c][j]);
          self = Times(self, p.blank[c][j]);
        } else {
          AddArcs(c, i, Times(self, p.blank[c][j]), Times(state.in[c], p.label[c][j]), x, state, out);
          Rescale(j, self);
          leaving[c] = self;
        }
      }
      PutIf(exits, to_leave, j, leaving[kLast], leave);
      // Each lane gets the value of the next one, the last one that of the first lane beyond.
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c != kFirst) state.in[c] = leaving[c - kStep];
      }
      state.in[kFirst] = kUp ? ShuffleUp(leaving[kLast]) : ShuffleDown(leaving[kLast]);
      if (lane == kEntry) state.in[kFirst] = Get(enter, j);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (kUp) {
          AddArcs(c, i, state.self[c], state.in[c], x, state, out);
          Rescale(j, state.self[c]);
        }
        if (j % V == V - 1) {
          StoreVector(out, now, unsigned(h), c);
          StoreVector(out, now, unsigned(2 + h), c);
        }
      }
      beside(j);
    }
  }

  // ---- warps ----

  // Before and after its chunks, a warp only meets the others at their barriers.
  __device__ __forceinline__ static void Meet(int times) {
#pragma unroll 1
    for (int i = 0; i < times; ++i) SyncWarps();
  }

  // A warp that copies for tiles of its own. A tile's chunk is copied three chunks ahead, and is there when its warp
  // reaches the chunk before.
  __device__ __forceinline__ void RunCopier() const {
    constexpr int kCopiers = kAlone ? kAloneCopiers : kMaxCopiers;
    constexpr int kTiles = ((kAlone ? kNarrow : kSweepWarps<A, kColumns>)+kCopiers - 1) / kCopiers;
    const auto tile_of = [&](int i) {
      const int tile = warp - warps + i * copiers;
      return kAlone && tile >= of_warps ? tiles : tile;
    };
    Chunk next[kTiles];
    int stage[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) next[i] = ChunkAt(1, tile_of(i)), stage[i] = i * copiers * kStages + 1;
    const auto copy = [&](int i, int chunk) {
      StartCopies(tile_of(i), next[i], stage[i]);
      next[i] = After(chunk + 1, next[i]);
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
        const int chunk = ChunkOf(round, tile_of(i));
        if (tile_of(i) < tiles && chunk >= 0) copy(i, chunk + 3);
      }
      CommitCopies();
    }
    WaitForCopies<0>();
  }

  // The warp of a tile. What it reads of a chunk, it reads in the steps of the chunk before; probabilities are ready
  // half a chunk ahead.
  __device__ __forceinline__ void RunTile() const {
    const bool works = warp < of_warps;
    State state = Initial(warp);
    const Crossing crossing = CrossingOf(works ? warp : 0);
    Chunk now = ChunkAt(0, warp);
    StartCopies(warp, now, 0);
    CommitCopies();
    WaitForCopies<0>();
    Read x;
    Probabilities p;
    ReadArcs(0, 0, x);
    ReadArcs(0, 1, x);
    ReadOthers(0, 0, x);
    ReadOthers(0, 1, x);
#pragma unroll
    for (int j = 0; j < C / 2; ++j) FindProbability(x, now, j, p);
    const int before = Settled(works ? -ChunkOf(0, warp) : rounds);
    Meet(before);
    int stage = 1;
#pragma unroll 1
    for (int chunk = 0; chunk < (works ? chunks : 0); ++chunk) {
      SyncWarps();
      const Chunk next = After(chunk + 1, now);
      // Without __syncwarp, the compiler moves all reads behind the last step: 12 of 4 cycles each, of all warps at
      // once.
      Compute(chunk, warp, crossing, now, p, x, state, [&](int j) {
        if (j < C / 2) FindProbability(x, now, C / 2 + j, p);
        if (j == C / 2 - 1) ReadArcs(stage, 0, x);
        if (j >= C / 2) FindProbability(x, next, j - C / 2, p);
        if (j == C / 2) ReadOthers(stage, 0, x), __syncwarp();
        if (j == C / 4 * 3) ReadArcs(stage, 1, x), __syncwarp();
        if (j == C - 1) ReadOthers(stage, 1, x);
      });
      now = next;
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    Meet(works ? rounds - before - chunks : 0);
    if (kSweep == 1 && works) Keep(warp, state);
  }

  // With more tiles than warps, a warp takes several in turn, copies for itself and keeps their running values in the
  // workspace, so the size of a block does not bound U; then other warps hide its waits for copies.
  __device__ __forceinline__ void RunTiles() const {
    const int first_tile = warp < warps ? warp : tiles;  // copiers have none
    for (int tile = first_tile; tile < tiles; tile += warps) Keep(tile, Initial(tile));
    for (int round = 0; round < rounds; ++round) {
      __syncthreads();
      for (int tile = first_tile; tile < tiles; tile += warps) {
        const int chunk = ChunkOf(round, tile);
        if (chunk < 0 || chunk >= chunks) continue;
        const Chunk now = ChunkAt(chunk, tile);
        StartCopies(tile, now, 0);
        CommitCopies();
        State state = Kept(tile);
        WaitForCopies<0>();
        __syncwarp();  // Compute replaces arcs that the neighbouring lane has copied
        Read x;
        Probabilities p;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ReadArcs(0, half, x);
          ReadOthers(0, half, x);
        }
#pragma unroll
        for (int j = 0; j < C; ++j) FindProbability(x, now, j, p);
        Compute(chunk, tile, CrossingOf(tile), now, p, x, state, [](int) {});
        Keep(tile, state);
      }
    }
  }

  __device__ __forceinline__ void Run() const {
    const bool a_tile_each = kAlone || tiles <= warps;
    if (a_tile_each && warp >= warps) {
      RunCopier();
    } else if (a_tile_each) {
      RunTile();
    } else {
      RunTiles();
    }
  }

  const Arguments<A>& args;
  const Sequence<A>& sequence;
  // Of the second sweep: 1 over minus the likelihood, whose exponent has the bias of BiasedPower.
  Value<A> minus_inverse = {A(1), 0};
  // The warp for a last column alone is the first one of the block, and counts as the last. of_warps: tiles of others.
  const int lane, all_warps, warp, copiers, warps, tiles;
  const bool alone;
  const int of_warps;
  const int all, chunks, begin, rounds;  // chunks: of this sweep; begin: its first one among all
  Value<A>*const selves, *const ins;     // running values of this sweep, in the workspace
  Value<A>*const crossings, *const zeros;
  const int odd;
  const unsigned with_arcs;
  // Places of vectors: from a column's first in a group to the next, from a group to the next.
  const unsigned columns, of_group, last_group, in_plane;
  Vector<A>* const arcs;  // posteriors, once a node is done
  // Groups 0 ... in_plane - 1 lie in the first memory, as many in the second, the others in the third.
  Vector<A>*const of_blanks, *const of_labels, *const of_spare;
  // Stages of the first of a warp's tiles; those of a copier are the tiles warp - warps, and so on.
  Staged* const stages;
  const SharedAddress<Vector<A>> to_stages;
};

}  // namespace jax_rnnt::cuda
