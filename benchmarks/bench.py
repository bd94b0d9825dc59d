"""Times the RNN-T loss of logits and its gradient, by shape: this library, its rivals, and the floor of the machine.

All contestants of a case take turns in one run; every repetition works on a fresh copy of the logits, made outside the
timed region. See README.md beside this file.
"""

import ctypes
import dataclasses
import functools
import os
import subprocess
import time

import numpy as np

import jax_rnnt as rnnt
import measure
import plain_jax
import problems
from problems import cases


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
        measured.append(start("ours, all valid", rnnt.RNNTLoss(), dataclasses.replace(case, shortest=1.0), donate=True))
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
    return [
        measure.aim(f"{case}: {a} / {b}", by_name[a], by_name[b], limit)
        for a, b, limit in limits
        if a in by_name and b in by_name
    ]


def main(argv=None, peers=None):
    """`peers` starts a worker with so many threads, whose contestants join in."""
    args = measure.options(__doc__, [case.name for case in cases.LARGE]).parse_args(argv)
    budget = measure.settle(args)
    worker = peers(args.threads) if peers else None
    results, checks = {}, []
    for case in (cases.CASES[name] for name in args.only):
        measured = results[case.name] = contestants(case, args, worker)
        measure.take_turns(measured, budget, args.repeat)
        moved = 3 * 4 * np.prod(case.shape) * case.valid
        title = f"{case.name}: B={case.B} T={case.T} U={case.U} V={case.V}, {case.valid:.0%} of the nodes valid"
        speed = {"GB/s": lambda c, moved=moved: f"{moved / c.median / 1e9:.1f}"}
        measure.report(title, measured, ("floor", "ours"), **speed)
        checks += aims(case.name, {c.name: c for c in measured})
    measure.report_aims(checks)
    measure.save(args, "", checks, results, versions=worker.versions if worker else {})


if __name__ == "__main__":
    main()
