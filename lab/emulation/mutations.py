"""Puts typical CUDA bugs into copies of the kernels, one at a time; the checks of the emulation must find each.

Prints a table with the finding of each run: EMU is a report of the emulation, ASAN, UBSAN or RACE one of a sanitizer,
NaN or value a wrong result, "-" nothing. Stops at the first run that finds the bug, unless --all is given. The exit
code is 1 if a bug is not found, or if a run reports anything for the unchanged sources. Other arguments select the bugs
whose names contain one of them.
"""

import concurrent.futures
import pathlib
import sys
import tempfile
import time

import checks

FOLDER = "xla_kernels/cuda/"
LATTICE, EMISSION, SKIP, DEVICES = checks.KERNELS[1], checks.KERNELS[0], *checks.KERNELS[2:]
SKEW, STAGES, SWEEP, ALONE, WIDE, VALUES = (
    f"{FOLDER}lattice_{name}.cuh" for name in ("skew", "stages", "sweep", "alone", "wide", "values")
)
SKIP_SEQUENCE, SKIP_SHARED, SKIP_WIDE = (f"{FOLDER}skip_{name}.cuh" for name in ("sequence", "shared", "wide"))
ROWS, SUMS, FORWARD, BACKWARD = (f"{FOLDER}emission_{name}.cuh" for name in ("rows", "sums", "forward", "backward"))
TINY, MEMORY = (f"{FOLDER}{name}.cuh" for name in ("tiny_rows", "memory"))
ROUNDING = "xla_kernels/common/rounding.h"
# The sources that a mutated header concerns.
HEADERS = {
    **{header: [LATTICE] for header in (SKEW, STAGES, SWEEP, ALONE, WIDE)},
    **{header: [SKIP] for header in (SKIP_SEQUENCE, SKIP_SHARED, SKIP_WIDE)},
    **{header: [EMISSION] for header in (ROWS, SUMS, FORWARD, BACKWARD, TINY, MEMORY, ROUNDING)},
    VALUES: [LATTICE, SKIP],
}
RUNS = (  # the quick ones first
    ("plain", "forward"),
    ("plain", "reverse"),
    ("plain", "random:1"),
    ("fused", "forward"),
    ("asan", "forward"),
    ("tsan", "forward"),
)
# By file: name of the bug; text in the file; its replacement, at every occurrence.
MUTATIONS = {
    SKEW: (
        ("missing __syncthreads: transposed tile", "bits = OrBits(bits);\n", "bits = 0;\n"),
        ("groups: one too few", "(frames + kChunk<A> - 1) / kChunk<A> + 1)", "(frames + kChunk<A> - 1) / kChunk<A>)"),
        ("groups: more than a plane holds", "/ (2 * kChunk<A> * columns)", "/ (kChunk<A> * columns)"),
        ("groups: begin anywhere", "(p) + 15) & ~uintptr_t{15}", "(p)) & ~uintptr_t{0}"),
        ("flags of empty tiles: not written", "sequence.flags[blockIdx.x] = 0;", ";"),
        ("label arcs of the last column", "u == sequence.labels ? A(0) : Node(t).label", "Node(t).label"),
        ("terminal node: does not keep its value", "if (u == sequence.labels) x.blank = 0;", ""),
    ),
    STAGES: (
        ("copies into the stage not yet read", "constexpr int kStages = 3;", "constexpr int kStages = 2;"),
        ("wrong neighbour lane", "__shfl_up_sync(kAll, v.m, 1)", "__shfl_up_sync(kAll, v.m, 2)"),
        ("too little shared memory", "(size_t(tiles) + 1) * 2 * kChunk<A>", "size_t(tiles) * 2 * kChunk<A>"),
    ),
    SWEEP: (
        ("missing barrier: hand-over between warps", "SyncWarps();", ";"),
        ("barriers of a warp after its chunks", "rounds - before - chunks : 0", "0 : 0"),
        ("two columns a lane: stores of the other", ": arcs) + Place(tile, c)", ": arcs) + Place(tile, kLast)"),
        ("two columns a lane: labels of the same column", "c > 0 ? out.to[c - 1]", "c > 0 ? out.to[c]"),
        ("copies not waited for", "WaitForCopies<1>();\n      SyncWarps();", "SyncWarps();"),
        ("copies not waited for: first chunk", "WaitForCopies<0>();\n    Read x;", "Read x;"),
        ("copies in flight at the end", "    WaitForCopies<0>();\n  }", "  }"),
        ("last column alone: for any length", "alone(kAlone && sequence.labels == kNarrow * kWidth)", "alone(kAlone)"),
        ("copies not waited for: several tiles", "      WaitForCopies<0>();\n", ""),
        ("missing __syncwarp: arcs replaced in place", "        __syncwarp();  // Compute replaces", "        // "),
        ("copies of the wrong chunk", "next[i] = ChunkAt(1, tile_of(i))", "next[i] = ChunkAt(0, tile_of(i))"),
        ("copies before a tile's turn", "if (tile_of(i) < tiles && chunk >= 0)", "if (tile_of(i) < tiles)"),
        ("tiles of warps that copy", "warp < warps ? warp : tiles;", "warp;"),
        ("beta: of the node, not of the next diagonal", "ng[c] = self;", "ng[c] = self, out.of[c][h].of[k] = self.m;"),
        ("groups: wrap too early", "group > last_group ? 0", "group >= last_group ? 0"),
        ("values: not of the diagonal before", "unsigned(t + C) < with_arcs + 1", "unsigned(t + C - 1) < with_arcs"),
        ("values: read from the wrong stage", "ReadOthers(stage, 0, x)", "ReadOthers((stage + 1) % kStages, 0, x)"),
        ("probabilities of the wrong stage", "ReadArcs(stage, 0, x)", "ReadArcs((stage + 1) % kStages, 0, x)"),
        ("probabilities of another chunk's frames", "FindProbability(x, next, j", "FindProbability(x, now, j"),
        ("forgotten scaling: beta", "if (j == kScaleStep) self =", "if (false) self ="),
        ("no value enters the next tile", "if (lane == kEntry) state.in", "if (false) state.in"),
        ("label posterior of the wrong node", "HasArcs(t + args.skew)", "HasArcs(t)"),
        ("initial value: no label arc to the end", "if (!kUp && u == edge - 1) in = One<A>();", ""),
        ("one buffer instead of two", "(chunk & 1) * kVectors", "0 * kVectors"),
        ("race between blocks: running values", "nning(args, kSweep - 1, kUp ? 0 : 1)", "nning(args, 0, kUp ? 0 : 1)"),
        ("columns: one too many", ".t[c] = u <= sequence.labels && chunk", ".t[c] = u <= sequence.labels + 1 && chunk"),
        ("barriers without chunks", "rounds(chunks + tiles - 1)", "rounds(chunks == 0 ? 0 : chunks + tiles - 1)"),
    ),
    ALONE: (
        ("last column alone: missing __syncwarp", "    __syncwarp();\n    StoreResults", "    StoreResults"),
        ("last column alone: values of another step", "Load(exchanged_by_lane + C)", "Load(exchanged_by_lane)"),
        ("last column alone: label posterior of its own", "unsigned(sweep.odd - 1) * V : 0", "0 : 0"),
    ),
    WIDE: (
        ("shared memory read before it is written", "if (lane == 0) sums", "if (lane == 0 && tile < warps) sums"),
        ("wide: missing __syncthreads before columns are replaced", "__syncthreads();\n      if (node) ", "if (node) "),
        (
            "wide: columns in the wrong order",
            "labels / threads * threads; first >= 0; first -",
            "0; first <= labels; first +",
        ),
        ("wide: share of the other arc", "blank ? share : 1 - share", "blank ? 1 - share : share"),
    ),
    LATTICE: (
        ("last column alone: not loaded", "if (Loading::active || alone) then", "if (alone) then"),
        ("wide: taken by both blocks", "if (!kUp && middle.wide) return;", ""),
        ("wide: not for the loss alone", "      loss = middle.wide ? Wide(args, sequence, b) :", "      loss ="),
    ),
    VALUES: (
        ("probability: not zero for no arc", "A(-0x1p126)", "A(-0x1.2ced32p+127)"),
        ("scaling: without the exponent", "(power >> S::kMantissaBits) - S::kExponentBias}", "0}"),
        ("wide: not where arcs are high", "((bits & kHigh) != 0 || small)", "small"),
        ("wide: not where the likelihood is small", "|| likelihood.e < -(1 << 20)", ""),
        ("wide: the length does not matter", "low(min(kLimit<A>, ", "low(max(kLimit<A>, "),
        ("wide: all bits of the flags alike", "__syncthreads_or(bits & bit)", "__syncthreads_or(bits)"),
        ("wide: one sum for masks and all else", "Abs(x) > kCoarse", "Abs(x) > 1e308"),
        ("wide: sums of masks overflow", "kCoarseUnit = 0x1p32", "kCoarseUnit = 1"),
    ),
    SKIP_SEQUENCE: (("skipping arcs: bound of labels", "0 <= u && u <= labels", "0 <= u && u <= labels + 1"),),
    SKIP_SHARED: (
        ("forgotten scaling: skipping arcs", "if (quarter == 3) value = Normalize(value);", ""),
        ("skipping arcs: missing barrier in shared memory", "SyncWarps();", ";"),
        ("skipping arcs: copies not waited for", "WaitForCopies<2>()", "WaitForCopies<3>()"),
        ("skipping arcs: copies in flight at the end", "    WaitForCopies<0>();  // neither", "    // neither"),
        ("skipping arcs: too short a ring", "R(args.span + 1)", "R(args.span)"),
        ("skipping arcs: a missing arc reads what others write", ": -2 * pitch)", ": -pitch)"),
        ("skipping arcs: sums of the wrong diagonal", "at.in_parts[now & 1]", "at.in_parts[(now & 1) ^ 1]"),
        ("skipping arcs: probabilities where there is no column", "never = -kInfinity<A>", "never = 0"),
        ("skipping arcs: a sum without one of its terms", "i) sums[i] += sums[n - 1 - i]", "i) sums[i] += sums[n - 1]"),
        ("skipping arcs: not the largest exponent", "e[i] = S::Max(e[i], e[n - 1 - i])", "e[i] = e[n - 1 - i]"),
        ("skipping arcs: no terminal node", " * R - 1) * pitch + u] = One<A>()", " * R - 1) * pitch + u] = Zero<S>()"),
    ),
    SKIP_WIDE: (
        ("wide: missing __syncthreads between diagonals", ", n, u));\n    }\n    __syncthreads();", ", n, u));\n    }"),
        ("wide: last arcs shared out twice", "if (threadIdx.x == 0) share_out", "share_out"),
        ("wide: last arcs replaced too early", "  __syncthreads();  // all have read the last arcs\n", ""),
        ("wide: arcs that do not exist", "arc(k)[at] = 0;", "continue;"),
    ),
    SKIP: (
        ("missing __syncthreads: diagonals", "malize(sum);\n      }\n      __syncthreads();", "malize(sum);\n      }"),
        ("skipping arcs: forgotten arcs that may not end", "(!ends || args.may_end[k])", "true"),
        ("skipping arcs: many arcs to the next diagonal", "arguments.near <= 2", "true"),
        ("wide: flags read as they are replaced", "      __syncthreads();  // all have read flags and beta\n", ""),
    ),
    ROWS: (
        ("anchor: a Bernoulli blank", "int(shape.blanks[0] == 0)", "int(shape.blanks[0])"),
        ("missing bound of rows", "in_warp < shape.passes && number < shape.rows()", "in_warp < shape.passes"),
    ),
    SUMS: (
        ("sum: of a rounded reference", "RoundedProduct(sum, Exp2(-BinaryError(max)))", "sum"),
        ("missing __syncthreads: block reduction", "dx.x / 32] = total;\n    __syncthreads();", "dx.x / 32] = total;"),
        ("window beyond the tensor", "if (!at_edge) return", "if (true) return"),
        ("last element counted twice", "k < row.n && k != row.skip ?", "k != row.skip ?"),
        ("rounding: the maximum as a plain product", "RoundedProduct(x, kLog2E<A>)", "x * kLog2E<A>"),
        ("Bernoulli blank: another vector", "i == row.skip / kSize", "i == row.skip / kSize + 1"),
    ),
    TINY: (
        ("tiny rows: read before they are there", "    WaitForCopies<0>();\n    __syncwarp();\n", ""),
        ("tiny rows: written back too early", " Write(T* rows) const {\n    __syncwarp();", " Write(T* rows) const {"),
        ("tiny rows: only the first row of a vector", "((2u << (last - first)) - 1)", "1u"),
        ("tiny rows: no gap between rows", "return k + (k >> gap);", "return k;"),
        ("tiny rows: elements at the edges", "if (i < end_ - (last - first)) f(", "if (i < first) f("),
        ("tiny rows: another half of a word", ">> bytes * 8)", ">> (2 - bytes) * 8)"),
    ),
    FORWARD: (
        ("total of a row: of the last pass", "if (team.Owns(pass)) sums = sum;", "sums = sum;"),
        ("anchor: no class", "shape.anchor < shape.classes ?", "true ?"),
        ("anchor: too far below", "below <= kReach<A>", "below <= 10 * kReach<A>"),
        ("sum: not repeated", "row.label != kOutside && !sums.Valid()", "false"),
        ("log of an empty sum", "Log(total.sum == 0 ? A(1) : total.sum)", "Log(total.sum)"),
        ("log-probability: +inf that is not normalised", "return y > most ? instead : y", "return y"),
        ("Bernoulli blank in the softmax", "t int skip = shape.bernoulli ? shape.blanks[0] : -1;", "t int skip = -1;"),
    ),
    BACKWARD: (
        ("missing barrier: anchor, arcs and durations in place", "eam.lane);\n      SyncTeam<kLanes>();", "eam.lane);"),
        ("missing barrier: arcs after their row", "  SyncTeam<kLanes>();\n      arcs.Write(dx);", "  arcs.Write(dx);"),
        ("arcs: not corrected", "      arcs.Write(dx);\n", ""),
        ("arcs: a class of two arcs", "ct += args.ct_arc[j][index];", "ct = args.ct_arc[j][index];"),
        ("arcs: a class written by two lanes", "if (j < arc) class_[i] = -1;", ""),
        ("tiny rows: a class of two arcs", "(same ? ct_label : A(0))", "A(0)"),
        ("sum: not scaled", "norm * (1 / kSumScale<A>)", "norm"),
        ("gradient: of a rounded anchor", "softmax.factor * Exp2(-BinaryError(anchor))", "softmax.factor"),
        ("gradient: an anchor of any size", "Abs(anchor) < A(1 << 20) && ", ""),
        ("gradient: 0 times an infinite scale", " && Abs(factor) < kInfinity<A>;", ";"),
        ("durations: a sum for its maximum", "Widen(x[i]) - total.max", "Widen(x[i])"),
        ("0 times an infinite scale", "return v == 0 ? v : v * scale;", "return v * scale;"),
        ("missing bound of a vector", "if (kRead && (j + 1 < kVectors || last)) v[j]", "if (kRead) v[j]"),
        ("misaligned 16-byte access", "head = min(n, (kSize - Misaligned(x)) % kSize);", "head = 0;"),
    ),
    EMISSION: (("tiny rows: places that differ", "alike ? kTinyBackward : 0", "kTinyBackward"),),
    MEMORY: (("window: another cut", "bytes & 4 ? w[i + 1] : w[i]", "bytes & 4 ? w[i] : w[i + 1]"),),
    ROUNDING: (("rounding: products that may be fused", "A product = x * y;", "return x * y;\n  A product;"),),
    DEVICES: (
        ("not loaded before a capture: long rows", "classes <= 1 << 20", "classes <= 1 << 8"),
        ("not loaded before a capture: the loss alone", "gradient : {false, true}", "gradient : {true}"),
    ),
}
SIGNS = (
    ("jax_rnnt emulation:", "EMU"),
    ("ERROR: AddressSanitizer", "ASAN"),
    ("runtime error:", "UBSAN"),
    ("ThreadSanitizer: data race", "RACE"),
    ("is nan", "NaN"),
    ("is -nan", "NaN"),
    ("FAILED:", "value"),
)


def verdict(code: int | None, output: str) -> str:
    if code == 0:
        return "-"
    if code is None:
        return "timeout"
    return next((name for sign, name in SIGNS if sign in output), f"exit {code}")


def try_mutation(mutation, objects, every_run) -> list[str]:
    """Verdicts of the runs on the mutated kernels: of all, or up to the first that finds the bug."""
    source, (_, old, new) = mutation
    text = (checks.ROOT / source).read_text()
    if old not in text:
        raise LookupError(f"{source} has changed, and this bug with it: no {old!r}")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutation-", dir=checks.BUILD) as folder:
        root = pathlib.Path(folder)
        (root / source).parent.mkdir(parents=True)
        (root / source).write_text(text.replace(old, new))
        programs = {}
        for mode_name, order in RUNS:
            if mode_name not in programs:
                mode = next(mode for mode in checks.MODES if mode.name == mode_name)
                mutated = {
                    s: checks.compile_object(s, mode, root, root, warnings=["-w"])
                    for s in HEADERS.get(source, [source])
                }
                programs[mode.name] = checks.link(objects[mode.name] | mutated, mode, root)
            verdicts.append(verdict(*checks.run(programs[mode_name], order, "--first")))
            if verdicts[-1] != "-" and not every_run:
                break
    return verdicts


def main() -> int:
    start = time.monotonic()
    every_run, words = "--all" in sys.argv, [word for word in sys.argv[1:] if word != "--all"]
    mutations = [(source, mutation) for source, found in MUTATIONS.items() for mutation in found]
    width = max(len(name) for _, (name, *_) in mutations)
    mutations = [m for m in mutations if not words or any(word in m[1][0] for word in words)]

    def row(name, cells):
        print(f"{name:{width}}  " + "  ".join(f"{cell:14}" for cell in cells), flush=True)

    row("", [f"{mode} {order}" for mode, order in RUNS])
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(checks.WORKERS) as pool:
        objects = checks.build_all(pool)
        clean = []
        for mode in checks.MODES:
            checks.link(objects[mode.name], mode, checks.BUILD)
        for job in [pool.submit(checks.run, checks.BUILD / mode / "check", order) for mode, order in RUNS]:
            clean.append(verdict(*job.result()))
        row("(none)", clean)
        jobs = [pool.submit(try_mutation, mutation, objects, every_run) for mutation in mutations]
        for (_, (name, *_)), job in zip(mutations, jobs, strict=True):
            verdicts = job.result()
            row(name, verdicts)
            if set(verdicts) == {"-"}:
                survivors.append(name)
    false_alarm = set(clean) != {"-"}
    if false_alarm:
        print("there are objections to the sources as they are")
    for name in survivors:
        print(f"not found: {name}")
    print(f"{len(mutations) - len(survivors)} of {len(mutations)} found in {time.monotonic() - start:.0f} s")
    return int(false_alarm or bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
