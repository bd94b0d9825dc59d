"""Times a loss of logits and its gradient: this library, its rivals, and the floor of the machine.

    python benchmarks/bench.py            # the RNN-T loss, by shape
    python benchmarks/bench.py --family   # every other loss and layout of logits, beside it

All contestants of a case take turns in one run; every repetition works on a fresh copy of the logits, made outside the
timed region. See README.md beside this file.
"""

import ctypes
import functools
import itertools
import os
import subprocess
import time

import numpy as np

import jax_rnnt as rnnt
import measure
import plain_jax
import problems
from problems import cases

WIDTHS = 5, 10, 20  # of bands
FAMILY = "subwords", "characters"
DURATIONS, BIG_BLANKS = (0, 1, 2, 3, 4), (2, 3, 4)
LOSSES = {
    "rnnt": rnnt.RNNTLoss,
    "monotonic": rnnt.MonotonicRNNTLoss,
    "constrained": rnnt.ConstrainedRNNTLoss,
    "hat": rnnt.HATLoss,
    "multiblank": functools.partial(rnnt.MultiblankRNNTLoss, BIG_BLANKS),
    "tdt": functools.partial(rnnt.TDTLoss, DURATIONS),
}


@functools.cache
def floor_library():
    target = measure.ROOT / "build" / "floor.so"
    target.parent.mkdir(exist_ok=True)
    flags = ("-O3", "-march=native", "-fopenmp-simd", "-pthread", "-shared", "-fPIC")
    source = str(measure.HERE / "floor.c")
    subprocess.run([os.environ.get("CC", "cc"), *flags, source, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def floor(name, case, seed, threads, passes):
    """The floor on the rows inside the lengths. Small work runs on one thread, since starting another takes longer."""
    frame = (case.U + 1) * case.V
    begin, end = [], []
    for b, (frames, labels) in enumerate(zip(*case.lengths)):
        step = max(1, (1 << 16) // frame) if labels == case.U else 1  # full frames are contiguous
        first = (b * case.T + np.arange(0, frames, step)) * frame
        begin.append(first)
        end.append(np.minimum(first + (step - 1) * frame + (labels + 1) * case.V, (b * case.T + frames) * frame))
    begin, end = np.concatenate(begin, dtype=np.int64), np.concatenate(end, dtype=np.int64)
    threads = threads if (end - begin).sum() > 1 << 18 else 1
    ((values,), _) = problems.logits(case, seed)
    room = np.empty(values.size + 16, np.float32)
    logits = room[-room.ctypes.data % 64 // values.itemsize :][: values.size].reshape(case.shape)  # aligned as in XLA
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (logits, begin, end)]
    library = floor_library()

    def run():
        np.copyto(logits, values)
        start = time.perf_counter()
        library.floor_run(*pointers, ctypes.c_int64(begin.size), passes, threads)
        return time.perf_counter() - start

    run()
    return measure.Contestant(name, run)


def contestants(case, args, worker):
    """The RNN-T loss. All compute the same mean loss; the last class is the blank."""

    def start(name, loss, case=case, **options):
        sources, batch = problems.logits(case, args.seed)
        return measure.program(name, loss, (*sources, *batch), **options)

    measured = [
        start("ours, reference", rnnt.RNNTLoss(implementation="reference"), donate=True),
        start("ours", rnnt.RNNTLoss(), donate=True),
        start("ours, not in place", rnnt.RNNTLoss(inplace=False)),
        start("plain JAX", plain_jax.plain),
        start("plain JAX, donated", plain_jax.plain, donate=True),
    ]
    for peer in ("torchaudio", "warp-transducer"):
        if worker and peer in worker.names:
            measured.append(worker.contestant(peer, "logits", case.name, args.seed))
    # Gradients from float32 logs of up to T + U nats are off by up to 1e-3.
    measure.agree(measured[0], measured[1:], gradient=2e-3 / case.B)
    if case.valid < 1:  # the same logits with full lengths, measured in the same turns, to judge the padding
        measured.append(start("ours, all valid", rnnt.RNNTLoss(), case.full(), donate=True))
    measured.append(start("ours, the loss alone", rnnt.RNNTLoss(), gradient=None))
    floors = [floor(f"floor{more}", case, args.seed, args.threads, n) for more, n in (("", 2), (", one pass", 1))]
    return floors + measured


def aims(case, by_name):
    limits = [("ours, reference", "ours", ">= 1")]
    if case == "subwords":
        limits += [("ours", "floor", "<= 1.4"), ("torchaudio", "ours", ">= 50"), ("plain JAX", "ours", ">= 6")]
        limits += [("warp-transducer", "ours", ">= 4")]
    limits += [("ours", "floor", "<= 2")] * (case == "lattice_bound")
    limits += [("ours", "ours, all valid", "<= 0.55")] * (case == "subwords_ragged")
    return judged(case, by_name, limits)


def judged(case, by_name, limits):
    return [
        measure.aim(f"{case}: {a} / {b}", by_name[a], by_name[b], limit)
        for a, b, limit in limits
        if a in by_name and b in by_name
    ]


# ----------------------------------------------------------------------------------------------------------- family


def family(case, args):
    """`rnnt` and every other loss and layout of the same B, T, U, V."""

    def start(name, loss, kind="dense", size=0, case=case):
        sources, batch = problems.logits(case, args.seed, kind, size)
        heads = sources if len(sources) > 1 else sources[0]
        return measure.program(name, loss, (heads, *batch), donate=True)

    def wide(name):
        return ("wide", len(DURATIONS)) if name == "tdt" else ()

    short, loss = case.ragged(), rnnt.RNNTLoss()
    measured = [floor("floor", case, args.seed, args.threads, passes=2)]
    measured += [start(name, make(), *wide(name)) for name, make in LOSSES.items()]
    for name in ("multiblank", "tdt"):
        measured.append(start(f"{name}, reference", LOSSES[name](implementation="reference"), *wide(name)))
    measured.append(start("simple", lambda heads, *batch: loss(rnnt.AdditiveLogits(*heads), *batch), "heads"))
    for n in WIDTHS:
        measured.append(
            start(f"pruned {n}", lambda x, first, *batch: loss(rnnt.BandLogits(x, first), *batch), "band", n)
        )
    measured.append(start("rnnt, ragged", loss, case=short))
    measured.append(
        start("packed, ragged", lambda x, *batch: loss(rnnt.PackedLogits(x, case.T), *batch), "packed", case=short)
    )
    check_family(case, {c.name: c for c in measured if c.check})
    return measured


def check_family(case, by_name):
    """Fails if two contestants for the same loss disagree by more than the error of float32 logs of T + U nats."""
    assert np.isfinite([c.check[0] for c in by_name.values()]).all()
    np.testing.assert_allclose(by_name["packed, ragged"].check[0], by_name["rnnt, ragged"].check[0], rtol=1e-6)
    for name, contestant in by_name.items():
        same = name.removesuffix(", reference")
        if same != name:
            measure.agree(by_name[same], [contestant], gradient=2e-3 / case.B)


def family_aims(case, by_name):
    limits = [("multiblank", "rnnt", "<= 1.3"), ("tdt", "rnnt", "<= 1.3"), ("packed, ragged", "rnnt, ragged", "<= 1")]
    # The time must be proportional to the width of the band.
    limits += [(f"pruned {b}", f"pruned {a}", f"<= {1.1 * b / a:.3g}") for a, b in itertools.pairwise(WIDTHS)]
    return judged(case, by_name, limits)


def parse(argv):
    parser = measure.options(__doc__, [case.name for case in cases.LARGE])
    parser.set_defaults(only=None)
    parser.add_argument("--family", action="store_true", help=f"every loss, on {', '.join(FAMILY)}")
    args = parser.parse_args(argv)
    args.only = args.only or (FAMILY if args.family else [case.name for case in cases.LARGE])
    return args


def main(argv=None, peers=None):
    """`peers` starts a worker with so many threads, whose contestants join in."""
    args = parse(argv)
    budget = measure.settle(args)
    worker = peers(args.threads) if peers and not args.family else None
    results, checks = {}, []
    for case in (cases.CASES[name] for name in args.only):
        bases, judge = (("rnnt", "rnnt, ragged"), family_aims) if args.family else (("floor", "ours"), aims)
        measured = results[case.name] = family(case, args) if args.family else contestants(case, args, worker)
        measure.take_turns(measured, budget, args.repeat)
        moved = 3 * 4 * np.prod(case.shape) * case.valid
        title = f"{case.name}: B={case.B} T={case.T} U={case.U} V={case.V}, {case.valid:.0%} of the nodes valid"
        measure.report(title, measured, bases, **{"GB/s": lambda c, moved=moved: f"{moved / c.median / 1e9:.1f}"})
        checks += judge(case.name, {c.name: c for c in measured})
    measure.report_aims(checks)
    name = "-family" if args.family else ""
    measure.save(args, name, checks, results, versions=worker.versions if worker else {})


if __name__ == "__main__":
    main()
