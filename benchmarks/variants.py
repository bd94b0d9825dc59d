"""Times every loss of the family and its gradient, beside `rnnt_loss` with the same frames, labels and classes.

All contestants of a case take turns in one run; see README.md beside this file.
"""

import dataclasses
import functools
import itertools
import os
from pathlib import Path

import bench
import jax
import jax.numpy as jnp
import numpy as np
from problems import cases, make

import jax_rnnt

DURATIONS = 0, 1, 2, 3, 4
WIDE = f"wide {len(DURATIONS)}"
WIDTHS = 5, 10, 20
SHAPES = "subwords", "characters"
NEMO_SHAPE = "tiny"  # its losses are loops over frames and labels
LOGITS = {
    "rnnt": jax_rnnt.rnnt_loss,
    "monotonic": jax_rnnt.monotonic_rnnt_loss,
    "constrained": jax_rnnt.constrained_rnnt_loss,
    "multiblank": functools.partial(jax_rnnt.multiblank_rnnt_loss, big_blank_durations=(2, 3, 4)),
    "hat": jax_rnnt.hat_loss,
}
tdt_loss = functools.partial(jax_rnnt.tdt_loss, durations=DURATIONS)


def simple_loss(heads, *rest):
    return jax_rnnt.simple_rnnt_loss(*heads, *rest)


def contestants(case, args, torch):
    """The floor, then `rnnt_loss` and every other loss of the same B, T, U, V: the mean over the batch, blank last."""

    def compete(name, loss, problem, case=case):
        first, rest = problem
        return bench.jax_contestant(name, case, (first, *rest), loss, donate=True)

    logits = jax.tree.map(jnp.asarray, make("logits", case, args.seed))  # one copy for all
    inputs = cases.make_inputs(case, seed=args.seed)
    found = [bench.floor_contestant("floor", case, inputs, args.threads, passes=2)]
    found += [compete(name, loss, logits) for name, loss in LOGITS.items()]
    wide = make(WIDE, case, args.seed)
    found.append(compete("tdt", tdt_loss, wide))
    for name, loss, problem in (("multiblank", LOGITS["multiblank"], logits), ("tdt", tdt_loss, wide)):
        reference = functools.partial(loss, implementation="reference")
        found.append(compete(f"{name}, reference", reference, problem))
    found.append(compete("simple", simple_loss, make("heads", case, args.seed)))
    for width in WIDTHS:
        found.append(compete(f"pruned {width}", jax_rnnt.pruned_rnnt_loss, make(f"band {width}", case, args.seed)))
    short = case.ragged()
    found.append(compete("rnnt, ragged", jax_rnnt.rnnt_loss, make("logits", short, args.seed), short))
    packed = functools.partial(jax_rnnt.rnnt_loss_packed, max_frames=case.T)
    found.append(compete("packed, ragged", packed, make("packed", short, args.seed), short))
    if torch and "fast_rnnt pruned" in torch.peers:
        found.append(torch.contestant("fast_rnnt simple", case, args.seed, "heads"))
        found += [torch.contestant("fast_rnnt pruned", case, args.seed, f"band {width}") for width in WIDTHS]
    verify(case, {c.name: c.check for c in found if c.check})
    return found


def beside_nemo(case, args, torch):
    """Our losses and NeMo's on the same logits."""
    found = []
    for name, loss, problem in (("multiblank", LOGITS["multiblank"], "logits"), ("tdt", tdt_loss, WIDE)):
        first, rest = make(problem, case, args.seed)
        found.append(bench.jax_contestant(name, case, (first, *rest), loss, donate=True))
        peer = torch.contestant(f"NeMo {name}", case, args.seed, problem)
        found.append(dataclasses.replace(peer, name=f"NeMo {name}"))
        (value, gradient), (expected_value, expected) = peer.check, found[-2].check
        np.testing.assert_allclose(value, expected_value, rtol=1e-5, err_msg=peer.name)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5, err_msg=peer.name)
    return found


def report_nemo(case, found):
    by_name = {c.name: c for c in found}
    print(f"### NeMo, {case.name}: B={case.B} T={case.T} U={case.U} V={case.V}\n")
    rows = []
    for c in found:
        ratio = c.median / by_name[c.name.removeprefix("NeMo ")].median
        rows.append((c.name, f"{c.median * 1e3:.3g}", f"{c.best * 1e3:.3g}", f"{ratio:.3g}", str(len(c.seconds))))
    bench.table(("", "ms", "min", "x ours", "runs"), rows)


def verify(case, checks):
    """Fails if two contestants for the same loss disagree by more than the error of float32 logs of T + U nats."""
    assert np.isfinite([loss for loss, _ in checks.values()]).all(), checks
    np.testing.assert_allclose(checks["packed, ragged"][0], checks["rnnt, ragged"][0], rtol=1e-6)
    for name, (loss, gradient) in checks.items():
        same = name.removeprefix("fast_rnnt ").removesuffix(", reference")
        if same != name:
            expected_loss, expected_gradient = checks[same]
            np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, err_msg=name)
            np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=2e-3 / case.B, err_msg=name)


def report(case, found):
    """Ratios of ragged contestants refer to the ragged `rnnt_loss`."""
    by_name = {c.name: c for c in found}
    title = f"### {case.name}: B={case.B} T={case.T} U={case.U} V={case.V}"
    print(f"{title}; ragged: {case.ragged().valid:.0%} of the nodes valid\n")
    rows = []
    for c in found:
        base = by_name["rnnt, ragged" if "ragged" in c.name else "rnnt"]
        ratios = c.median / base.median, c.best / base.best
        memory = "" if c.temporaries is None else f"{c.temporaries / 1e6:.1f}"
        times = (f"{x * 1e3:.3g}" for x in (c.median, c.best))
        rows.append((c.name, *times, *(f"{r:.2f}" for r in ratios), memory, str(len(c.seconds))))
    bench.table(("", "ms", "min", "x rnnt", "x rnnt, minima", "temporaries, MB", "runs"), rows)


def targets(results):
    rows = []
    for case, by_name in results.items():
        limits = [
            ("multiblank", "rnnt", "<= 1.3"),
            ("tdt", "rnnt", "<= 1.3"),
            ("packed, ragged", "rnnt, ragged", "<= 1"),
        ]
        # The time must be proportional to the width of the band.
        limits += [(f"pruned {b}", f"pruned {a}", f"<= {1.1 * b / a:.3g}") for a, b in itertools.pairwise(WIDTHS)]
        for name, other, limit in limits:
            above, below = by_name[name], by_name[other]
            ratio, best = above.median / below.median, above.best / below.best
            rows.append(bench.judge(f"{case}: {name} / {other}", ratio, limit, best))
    return rows


def start_torch(args):
    python = Path(args.torch_python or bench.PEERS / "bin" / "python")
    worker = bench.Torch(python, args.threads, nemo=args.nemo) if python.exists() else None
    peers = worker.peers if worker else []
    if "fast_rnnt pruned" not in peers:
        print("fast_rnnt is left out: no environment of PyTorch can import it.\n")
    if "NeMo tdt" not in peers:
        why = f"the worker could not load it from {args.nemo}" if args.nemo else "--nemo names no folder"
        print(f"NeMo is left out: {why}.\n")
    return worker if peers else None


def main(argv=None):
    parser = bench.options(__doc__, (*SHAPES, NEMO_SHAPE))
    parser.add_argument("--nemo", help=f"folder that holds NeMo's package `nemo`; its losses on {NEMO_SHAPE}")
    args = parser.parse_args(argv)
    budget = bench.settle(args)
    load = os.getloadavg()
    torch = start_torch(args)
    results, nemo = {}, {}
    for case in (cases.CASES[name] for name in args.only):
        if case.name != NEMO_SHAPE:
            results[case.name] = contestants(case, args, torch)
            bench.take_turns(results[case.name], budget, args.repeat)
            report(case, results[case.name])
        elif torch and "NeMo tdt" in torch.peers:
            nemo[case.name] = beside_nemo(case, args, torch)
            bench.take_turns(nemo[case.name], budget, args.repeat)
            report_nemo(case, nemo[case.name])
    checks = targets({case: {c.name: c for c in found} for case, found in results.items()})
    if checks:
        bench.report_targets(checks)
    versions = torch.versions if torch else None
    bench.save(args, load, checks, {"value_and_gradient": results, "nemo": nemo}, name="-variants", versions=versions)


if __name__ == "__main__":
    main()
