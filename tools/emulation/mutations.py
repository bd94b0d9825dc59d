"""Puts typical CUDA bugs into copies of the kernels, one at a time; the checks of the emulation must find each.

Prints a table with the finding of each run: EMU is a report of the emulation, ASAN, UBSAN or RACE one of a sanitizer,
NaN or value a wrong result, "-" nothing. Stops at the first run that finds the bug, unless --all is given. The exit
code is 1 if a bug is not found, or if a run reports anything for the unchanged sources. Other arguments select the bugs
whose names contain them.
"""

import concurrent.futures
import pathlib
import shutil
import sys
import tempfile
import time

import checks

LATTICE, EMISSION, SKIP = (f"xla_kernels/cuda/{name}.cu" for name in ("lattice", "softmax_emission", "skip_lattice"))
DEVICES = "xla_kernels/cuda/devices.cu"
TINY = "xla_kernels/cuda/tiny_rows.cuh"
VALUES, ROWS, RUNTIME = (f"xla_kernels/cuda/{name}.cuh" for name in ("lattice_values", "emission_rows", "runtime"))
ROUNDING = "xla_kernels/common/rounding.h"
# The sources that a mutated header concerns.
HEADERS = {VALUES: [LATTICE, SKIP], ROWS: [EMISSION], TINY: [EMISSION], RUNTIME: [EMISSION], ROUNDING: [EMISSION]}
RUNS = (
    ("plain", "forward"),
    ("plain", "reverse"),
    ("plain", "random:1"),
    ("asan", "forward"),
    ("tsan", "forward"),
    ("fused", "forward"),
)
# Name of the bug; file; text in the file; its replacement, at every occurrence.
MUTATIONS = (
    (
        "missing __syncthreads: block reduction",
        ROWS,
        "parts[threadIdx.x / 32] = total;\n    __syncthreads();",
        "parts[threadIdx.x / 32] = total;",
    ),
    ("missing __syncthreads: transposed tile", LATTICE, "bits = OrBits(bits);\n      by_diagonals", "by_diagonals"),
    ("missing barrier: hand-over between warps", LATTICE, "SyncWarps();", ";"),
    (
        "divergent barrier",
        LATTICE,
        "++chunk) {\n      SyncWarps();",
        "++chunk) {\n      if (chunk >= warp) SyncWarps();",
    ),
    ("barriers of a warp after its chunks", LATTICE, "rounds - before - chunks : 0", "0 : 0"),
    (
        "shuffle in a divergent branch",
        LATTICE,
        "state.in[kFirst] = kUp ? ShuffleUp",
        "if (has_arcs(now.t[0])) state.in[kFirst] = kUp ? ShuffleUp",
    ),
    ("two columns a lane: wrong neighbour", LATTICE, "leaving[c - kStep];", "leaving[c];"),
    (
        "two columns a lane: no value enters the second",
        LATTICE,
        "if (c != kFirst) state.in[c] =",
        "if (false) state.in[c] =",
    ),
    ("two columns a lane: stores of the other", LATTICE, ": arcs) + place(tile, c)", ": arcs) + place(tile, kLast)"),
    ("two columns a lane: odd ones among the even", LATTICE, "(columns + 1) / 2)", "columns / 2)"),
    ("two columns a lane: labels of the same column", LATTICE, "c > 0 ? to[c - 1]", "c > 0 ? to[c]"),
    (
        "shuffle reads beyond the group",
        ROWS,
        "__shfl_xor_sync(kAll, total.sum, step)",
        "__shfl_xor_sync(kAll, total.sum, step * 2)",
    ),
    (
        "missing barrier: anchor, arcs and durations in place",
        EMISSION,
        "softmax, finish, team.lane);\n      SyncTeam<kLanes>();",
        "softmax, finish, team.lane);",
    ),
    (
        "missing barrier: arcs after their row",
        EMISSION,
        "      SyncTeam<kLanes>();\n      arcs.Write(dx);",
        "      arcs.Write(dx);",
    ),
    ("arcs: not corrected", EMISSION, "      arcs.Write(dx);\n", ""),
    ("arcs: a class of two arcs", EMISSION, "ct += args.ct_arc[j][index];", "ct = args.ct_arc[j][index];"),
    ("arcs: a class written by two lanes", EMISSION, "if (j < arc) class_[i] = -1;", ""),
    ("head of a row: from another lane", EMISSION, "row.softmax.anchor, owner)", "row.softmax.anchor, owner ^ 1)"),
    ("total of a row: of the last pass", EMISSION, "if (team.Owns(pass)) sums = sum;", "sums = sum;"),
    ("window: another cut", RUNTIME, "bytes & 4 ? w[i + 1] : w[i]", "bytes & 4 ? w[i] : w[i + 1]"),
    ("window: half a word", RUNTIME, "(bytes & 2) * 8", "(bytes & 2) * 4"),
    ("window beyond the tensor", ROWS, "if (!at_edge) return", "if (true) return"),
    ("last vector counted twice", ROWS, "if (j + 1 < kVectors || with_last) total.sum", "total.sum"),
    ("tiny rows: read before they are there", TINY, "    WaitForCopies<0>();\n    __syncwarp();\n", ""),
    (
        "tiny rows: written back too early",
        TINY,
        "void Write(T* rows) const {\n    __syncwarp();",
        "void Write(T* rows) const {",
    ),
    ("tiny rows: only the first row of a vector", TINY, "((2u << (last - first)) - 1)", "1u"),
    ("tiny rows: no gap between rows", TINY, "return k + (k >> gap);", "return k;"),
    ("tiny rows: elements at the edges", TINY, "if (i < end_ - (last - first)) f(", "if (i < first) f("),
    ("tiny rows: another half of a word", TINY, ">> bytes * 8)", ">> (2 - bytes) * 8)"),
    ("tiny rows: a class of two arcs", EMISSION, "(same ? ct_label : A(0))", "A(0)"),
    ("tiny rows: places that differ", EMISSION, "alike ? kTinyBackward : 0", "kTinyBackward"),
    ("last element counted twice", ROWS, "k < row.n && k != row.skip ?", "k != row.skip ?"),
    ("anchor: a Bernoulli blank", ROWS, "int(shape.blanks[0] == 0)", "int(shape.blanks[0])"),
    ("anchor: no class", EMISSION, "shape.anchor < shape.classes ?", "true ?"),
    ("anchor: too far below", EMISSION, "below <= kReach<A>", "below <= 10 * kReach<A>"),
    ("sum: not scaled", EMISSION, "norm * (1 / kSumScale<A>)", "norm"),
    ("sum: of a rounded reference", ROWS, "sum * Exp2(-BinaryError(max))", "sum"),
    ("sum: not repeated", EMISSION, "own.label != kOutside && !sums.Valid()", "false"),
    ("gradient: of a rounded anchor", EMISSION, "softmax.factor * Exp2(-BinaryError(anchor))", "softmax.factor"),
    ("rounding: products that may be fused", ROUNDING, "A product = x * y;", "return x * y;\n  A product;"),
    ("rounding: the maximum as a plain product", ROWS, "RoundedProduct(x, kLog2E<A>)", "x * kLog2E<A>"),
    ("gradient: limit without scale", EMISSION, "finish.limit * Abs(finish.scale)", "finish.limit"),
    ("gradient: an anchor of any size", EMISSION, "Abs(anchor) < A(1 << 20) && ", ""),
    ("gradient: 0 times an infinite scale", EMISSION, " && Abs(factor) < kInfinity<A>;", ";"),
    ("a rounded lse for all rows", EMISSION, "below <= kReach<A>", "below < 0"),
    ("log of an empty sum", EMISSION, "Log(total.sum == 0 ? A(1) : total.sum)", "Log(total.sum)"),
    ("log-probability: +inf that is not normalised", EMISSION, "return y > most ? instead : y", "return y"),
    ("durations: a sum for its maximum", EMISSION, "Widen(x[i]) - total.max", "Widen(x[i])"),
    (
        "Bernoulli blank in the softmax",
        EMISSION,
        "const int skip = shape.bernoulli ? shape.blanks[0] : -1;",
        "const int skip = -1;",
    ),
    ("Bernoulli blank: another vector", ROWS, "i == row.skip / kSize", "i == row.skip / kSize + 1"),
    ("0 times an infinite scale", EMISSION, "return v == 0 ? v : v * scale;", "return v * scale;"),
    ("durations: a head too early", EMISSION, "x + shape.classes, shape.durations", "x, shape.durations"),
    ("copies not waited for", LATTICE, "WaitForCopies<1>();\n      SyncWarps();", "SyncWarps();"),
    (
        "copies waited for a chunk too late",
        LATTICE,
        "WaitForCopies<1>();\n      SyncWarps();",
        "WaitForCopies<2>();\n      SyncWarps();",
    ),
    (
        "copies waited for after the barrier",
        LATTICE,
        "WaitForCopies<1>();\n      SyncWarps();",
        "SyncWarps();\n      WaitForCopies<1>();",
    ),
    ("copies not waited for: first chunk", LATTICE, "WaitForCopies<0>();\n    Read x;", "Read x;"),
    ("copies in flight at the end", LATTICE, "    WaitForCopies<0>();\n    return;", "    return;"),
    ("last column alone: missing __syncwarp", LATTICE, "    __syncwarp();\n    Value<A> value", "    Value<A> value"),
    ("last column alone: values of another step", LATTICE, "Load(exchanged_by_lane + C)", "Load(exchanged_by_lane)"),
    ("last column alone: label posterior of its own", LATTICE, "unsigned(odd - 1) * V : 0", "0 : 0"),
    ("last column alone: for any length", LATTICE, "kAlone && sequence.labels == kNarrow * kWidth", "kAlone"),
    ("last column alone: not loaded", LATTICE, "if (Loading::active || alone) then", "if (alone) then"),
    ("copies not waited for: several tiles", LATTICE, "      WaitForCopies<0>();\n", ""),
    ("missing __syncwarp: arcs replaced in place", LATTICE, "      __syncwarp();  // compute replaces", "      // "),
    ("copies of the wrong chunk", LATTICE, "next[i] = chunk_at(1, tile_of(i))", "next[i] = chunk_at(0, tile_of(i))"),
    ("copies of the wrong tile", LATTICE, "warp - warps + i * copiers", "warp - warps + i"),
    ("copies before a tile's turn", LATTICE, "if (tile_of(i) < tiles && chunk >= 0)", "if (tile_of(i) < tiles)"),
    ("copies into the stage not yet read", LATTICE, "constexpr int kStages = 3;", "constexpr int kStages = 2;"),
    ("tiles of warps that copy", LATTICE, "warp < warps ? warp : tiles;", "warp;"),
    (
        "beta: of the node, not of the next diagonal",
        LATTICE,
        "          leaving[c] = self;\n",
        "          leaving[c] = self;\n          if (kSweep == 1) put(c, self.m, S::AsFloat(self.e));\n",
    ),
    ("groups: wrap too early", LATTICE, "group > last_group ? 0", "group >= last_group ? 0"),
    (
        "groups: one too few",
        LATTICE,
        "(frames + kChunk<A> - 1) / kChunk<A> + 1)",
        "(frames + kChunk<A> - 1) / kChunk<A>)",
    ),
    ("groups: more than a plane holds", LATTICE, "/ (2 * kChunk<A> * columns)", "/ (kChunk<A> * columns)"),
    ("groups: begin anywhere", LATTICE, "(p) + 15) & ~uintptr_t{15}", "(p)) & ~uintptr_t{0}"),
    (
        "values: not of the diagonal before",
        LATTICE,
        "unsigned(t + C) < with_arcs + 1",
        "unsigned(t + C - 1) < with_arcs",
    ),
    (
        "values: read from the wrong stage",
        LATTICE,
        "read_others(stage, 0, x)",
        "read_others((stage + 1) % kStages, 0, x)",
    ),
    (
        "probabilities of the wrong stage",
        LATTICE,
        "read_arcs(stage, 0, x)",
        "read_arcs((stage + 1) % kStages, 0, x)",
    ),
    ("probabilities of the wrong half", LATTICE, "read_arcs(stage, 1, x)", "read_arcs(stage, 0, x)"),
    ("probabilities: one too few", LATTICE, "if (j < C / 2) probability", "if (j < C / 2 - 1) probability"),
    ("probabilities of another chunk's frames", LATTICE, "probability(x, next, j", "probability(x, now, j"),
    ("probability: not zero for no arc", VALUES, "A(-0x1p126)", "A(-0x1.2ced32p+127)"),
    ("scaling: without the exponent", VALUES, "(power >> S::kMantissaBits) - S::kExponentBias}", "0}"),
    ("forgotten scaling: alpha", LATTICE, "if (j == kScaleStep) state.self[c] =", "if (false) state.self[c] ="),
    ("forgotten scaling: beta", LATTICE, "if (j == kScaleStep) self =", "if (false) self ="),
    ("forgotten scaling: skipping arcs", SKIP, "if (quarter == 3) value = Normalize(value);", ""),
    ("flags of empty tiles: not written", LATTICE, "sequence.flags[blockIdx.x] = 0;", ";"),
    ("values from the wrong neighbour", LATTICE, "(tile - kStep) * 2", "(tile - 2 * kStep) * 2"),
    ("no value enters the next tile", LATTICE, "state.in[kFirst] = {from", "if (false) state.in[kFirst] = {from"),
    ("label posterior of the wrong node", LATTICE, "has_arcs(t + args.skew)", "has_arcs(t)"),
    ("label posterior of no column", LATTICE, "(column(tile, c) > 0) & has_values", "has_values"),
    (
        "label arcs of the last column",
        LATTICE,
        "u == sequence.labels ? A(0) : tile[slot(t)].label",
        "tile[slot(t)].label",
    ),
    ("terminal node: does not keep its value", LATTICE, "if (u == sequence.labels) x.blank = 0;", ""),
    ("initial value: no label arc to the end", LATTICE, "if (!kUp && u == edge - 1) in = One<A>();", ""),
    ("wrong neighbour lane", LATTICE, "__shfl_up_sync(kAll, v.m, 1)", "__shfl_up_sync(kAll, v.m, 2)"),
    (
        "wrong slot of a double buffer",
        LATTICE,
        "crossing.from + ((chunk & 1) * kVectors",
        "crossing.from + ((chunk & 1 ^ 1) * kVectors",
    ),
    (
        "one buffer instead of two",
        LATTICE,
        "(chunk & 1) * kVectors",
        "0 * kVectors",
    ),
    (
        "too little shared memory",
        LATTICE,
        "(size_t(tiles) + 1) * 2 * kChunk<A>",
        "size_t(tiles) * 2 * kChunk<A>",
    ),
    ("shared memory read before it is written", LATTICE, "if (lane == 0) sums", "if (lane == 0 && tile < warps) sums"),
    ("missing bound of rows", ROWS, "team.in_warp < shape.passes && row < shape.rows()", "team.in_warp < shape.passes"),
    ("missing bound of a vector", EMISSION, "if (kRead && (j + 1 < kVectors || last)) v[j]", "if (kRead) v[j]"),
    ("misaligned 16-byte access", EMISSION, "head = min(n, (kSize - Misaligned(x)) % kSize);", "head = 0;"),
    (
        "race between blocks: running values",
        LATTICE,
        "sequence.Running(args, kSweep - 1, kUp ? 0 : 1)",
        "sequence.Running(args, 0, kUp ? 0 : 1)",
    ),
    (
        "diagonals: one too few",
        LATTICE,
        "const int all = (sequence.diagonals + C - 1) / C;",
        "const int all = sequence.diagonals / C;",
    ),
    (
        "columns: one too many",
        LATTICE,
        "x.t[c] = u <= sequence.labels && chunk",
        "x.t[c] = u <= sequence.labels + 1 && chunk",
    ),
    (
        "missing __syncthreads: diagonals",
        SKIP,
        "= Normalize(sum);\n      }\n      __syncthreads();",
        "= Normalize(sum);\n      }",
    ),
    ("skipping arcs: missing barrier in shared memory", SKIP, "SyncWarps();", ";"),
    ("skipping arcs: copies not waited for", SKIP, "WaitForCopies<2>()", "WaitForCopies<3>()"),
    ("skipping arcs: copies in flight at the end", SKIP, "    WaitForCopies<0>();  // neither", "    // neither"),
    ("skipping arcs: too short a ring", SKIP, "R = args.span + 1, pitch", "R = args.span, pitch"),
    ("skipping arcs: a missing arc reads what others write", SKIP, ": -2 * pitch)", ": -pitch)"),
    ("skipping arcs: wrong neighbour in the ring", SKIP, "(up ? -du : du)", "du"),
    ("skipping arcs: probabilities of the wrong diagonal", SKIP, "firsts[now & 1]", "firsts[(now & 1) ^ 1]"),
    ("skipping arcs: copies a diagonal too late", SKIP, "later = quarter + 4;", "later = quarter + 5;"),
    ("skipping arcs: forgotten arcs that may not end", SKIP, "(!ends || args.may_end[k])", "true"),
    ("skipping arcs: sums of the wrong diagonal", SKIP, "in_parts[now & 1]", "in_parts[(now & 1) ^ 1]"),
    (
        "skipping arcs: values where there is no node",
        SKIP,
        "{node ? value.m : A(0), node ? value.e : S::kZero}",
        "{value.m, value.e}",
    ),
    ("skipping arcs: probabilities where there is no column", SKIP, "never = -kInfinity<A>", "never = 0"),
    (
        "skipping arcs: a sum without one of its terms",
        SKIP,
        "++i) sums[i] += sums[n - 1 - i]",
        "++i) sums[i] += sums[n - 1]",
    ),
    ("skipping arcs: not the largest exponent", SKIP, "e[i] = S::Max(e[i], e[n - 1 - i])", "e[i] = e[n - 1 - i]"),
    ("skipping arcs: sums of one pair", SKIP, "(mine + m - 1) * W", "(mine + m - 1) / 2 * W"),
    ("skipping arcs: long arcs first", SKIP, "dt[i] + du[i] < dt[j] + du[j]", "dt[i] + du[i] > dt[j] + du[j]"),
    ("skipping arcs: many arcs to the next diagonal", SKIP, "arguments.near <= 2", "true"),
    (
        "skipping arcs: no terminal node",
        SKIP,
        "ring[(2 * R - 1) * pitch + u] = One<A>()",
        "ring[(2 * R - 1) * pitch + u] = Zero<S>()",
    ),
    ("skipping arcs: wrong row", SKIP, "n - args.dt[k] - args.du[k], u", "n - args.dt[k], u"),
    ("skipping arcs: bound of labels", SKIP, "0 <= u && u <= labels", "0 <= u && u <= labels + 1"),
    (
        "wide: race for the running values",
        LATTICE,
        "reinterpret_cast<LogWeight*>(sequence.Running(args, 1, 0))",
        "reinterpret_cast<LogWeight*>(sequence.Running(args, 0, 0))",
    ),
    ("wide: taken by both blocks", LATTICE, "if (!kUp && middle.wide) return;", ""),
    (
        "wide: missing __syncthreads before columns are replaced",
        LATTICE,
        "      __syncthreads();\n      if (node) weights[u]",
        "      if (node) weights[u]",
    ),
    (
        "wide: columns in the wrong order",
        LATTICE,
        "first = labels / threads * threads; first >= 0; first -= threads",
        "first = 0; first <= labels; first += threads",
    ),
    ("wide: share of the other arc", LATTICE, "(blank ? share : 1 - share)", "(blank ? 1 - share : share)"),
    ("wide: not for the loss alone", LATTICE, "      loss = middle.wide ? Wide(args, sequence, b) :", "      loss ="),
    (
        "wide: missing __syncthreads between diagonals",
        SKIP,
        "Sequence<A>::Position(args, n, u));\n    }\n    __syncthreads();",
        "Sequence<A>::Position(args, n, u));\n    }",
    ),
    ("wide: last arcs shared out twice", SKIP, "if (threadIdx.x == 0) share_out", "share_out"),
    ("wide: last arcs replaced too early", SKIP, "  __syncthreads();  // all have read the last arcs\n", ""),
    ("wide: arcs that do not exist", SKIP, "arc(k)[at] = 0;", "continue;"),
    ("wide: flags read as they are replaced", SKIP, "      __syncthreads();  // all have read flags and beta\n", ""),
    ("wide: not where arcs are high", VALUES, "((bits & kHigh) != 0 || small)", "small"),
    ("wide: not where the likelihood is small", VALUES, "|| likelihood.e < -(1 << 20)", ""),
    ("wide: the length does not matter", VALUES, "low(min(kLimit<A>, ", "low(max(kLimit<A>, "),
    (
        "wide: for every faint arc",
        VALUES,
        "((bits & kFaint) != 0 && ((bits & kHigh) != 0 || small))",
        "(bits & kFaint) != 0",
    ),
    ("not loaded before a capture: long rows", DEVICES, "classes <= 1 << 20", "classes <= 1 << 8"),
    ("not loaded before a capture: the loss alone", DEVICES, "gradient : {false, true}", "gradient : {true}"),
    ("wide: all bits of the flags alike", VALUES, "__syncthreads_or(bits & bit)", "__syncthreads_or(bits)"),
    ("wide: one sum for masks and all else", VALUES, "Abs(x) > kCoarse", "Abs(x) > 1e308"),
    ("wide: -inf among the masks", VALUES, "Abs(x) > kCoarse && x > -kInfinity<double>", "Abs(x) > kCoarse"),
    ("wide: sums of masks overflow", VALUES, "kCoarseUnit = 0x1p32", "kCoarseUnit = 1"),
)
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
    _, source, old, new = mutation
    text = (checks.ROOT / source).read_text()
    if old not in text:
        raise LookupError(f"{source} has changed, and this bug with it: no {old!r}")
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutation-", dir=checks.BUILD) as folder:
        root = pathlib.Path(folder)
        (root / source).parent.mkdir(parents=True)
        (root / source).write_text(text.replace(old, new))
        sources = HEADERS.get(source, [source])
        for other in sources:
            (root / other).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(checks.ROOT / other, root / other) if other != source else None
        programs = {}
        for mode_name, order in RUNS:
            if mode_name not in programs:
                mode = next(mode for mode in checks.MODES if mode.name == mode_name)
                mutated = [checks.compile_object(s, mode, root, root, warnings=["-w"]) for s in sources]
                others = [objects[mode.name][s] for s in (*checks.KERNELS, *checks.OTHERS) if s not in sources]
                programs[mode.name] = checks.link([*mutated, *others], mode, root / mode.name / "check")
            verdicts.append(verdict(*checks.run(programs[mode_name], order, "--first")))
            if verdicts[-1] != "-" and not every_run:
                break
        shutil.rmtree(root / "xla_kernels")
    return verdicts


def main() -> int:
    start = time.monotonic()
    every_run, words = "--all" in sys.argv, [word for word in sys.argv[1:] if word != "--all"]
    mutations = [mutation for mutation in MUTATIONS if all(word in mutation[0] for word in words)]
    width = max(len(name) for name, *_ in MUTATIONS)

    def row(name, cells):
        print(f"{name:{width}}  " + "  ".join(f"{cell:14}" for cell in cells), flush=True)

    row("", [f"{mode} {order}" for mode, order in RUNS])
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(checks.WORKERS) as pool:
        objects = checks.build_all(pool)
        clean = []
        for mode in checks.MODES:
            parts = [objects[mode.name][source] for source in (*checks.KERNELS, *checks.OTHERS)]
            checks.link(parts, mode, checks.BUILD / mode.name / "check")
        for job in [pool.submit(checks.run, checks.BUILD / mode / "check", order) for mode, order in RUNS]:
            clean.append(verdict(*job.result()))
        row("(none)", clean)
        jobs = [pool.submit(try_mutation, mutation, objects, every_run) for mutation in mutations]
        for (name, *_), job in zip(mutations, jobs, strict=True):
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
