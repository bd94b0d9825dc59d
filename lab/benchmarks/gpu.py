"""Times the loss and its gradient on a GPU: this library, its stages, its rivals, and the bandwidth of the device.

Everything runs in one process; README.md beside this file explains the measurements. `--dry-run` executes all of it on
tiny shapes on the default device, as a test; it keeps no results.
"""

import argparse
import datetime
import functools
import gc
import os
import re
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers need memory, too
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np
import peers

import measure
import plain_jax
from jax_rnnt import RNNTLoss
from jax_rnnt.emissions import _softmax as softmax
from jax_rnnt.lattices import STANDARD
from jax_rnnt.lattices import _lattice as lattice
from problems import cases

try:
    import torch
except (ImportError, OSError):
    torch = None

L2_BYTES = 60e6
IN_FLIGHT = 16e9  # bytes of results of calls that were issued but not awaited, at most


# -------------------------------------------------------------------------------------------------------- measuring
#
# XLA launches on a stream of its own, which the events of other libraries do not see, and executes calls in order. So
# calls are issued one after the other without waiting, and the clock stops when the last is ready. The time of one call
# is the time of 2 n calls minus the time of n, divided by n: start and wait cancel. This is device time if issuing a
# call takes less than running it; otherwise the row says "host". The PyTorch peers are timed alike.


class Run:
    """The measurements so far, saved after every step, since a later step may end the process."""

    def __init__(self, args):
        self.args, self.start = args, time.monotonic()
        self.queue, self.seconds = (0.001, 0.0) if args.dry_run else (0.02, 0.25)  # of n calls, of all repetitions
        self.record = {"dry_run": args.dry_run, "variants": [], "errors": []}

    def attempt(self, what, function, *arguments, reserve=0.0):
        """function(), or None if it fails or no time is left; the record says why."""
        if self.args.budget - (time.monotonic() - self.start) < reserve:
            return self.fail(what, "left out: no time left")
        try:
            return function(*arguments)
        except Exception as error:
            if self.args.dry_run:
                traceback.print_exc()
            return self.fail(what, f"{type(error).__name__}: {str(error).strip()[:500]}")
        finally:
            gc.collect()
            self.save()

    def save(self):
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            text = measure.compact(self.record | {"aims": aims(self.record)})
            self.args.output.write_text(text + "\n")

    def fail(self, what, why):
        self.record["errors"].append([what, why])
        print(f"{what}: {why}", file=sys.stderr, flush=True)

    def time(self, call, wait=jax.block_until_ready, calls=1):
        """`call(i)` issues the i-th call and returns a handle for `wait`. One call does the work of `calls`."""
        first = call(0)
        size = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(first))
        wait(first)
        del first

        def run(n):
            start = time.perf_counter()
            for i in range(n):
                handle = call(i)
            issued = time.perf_counter()
            wait(handle)
            return time.perf_counter() - start, (issued - start) / n

        once = min(run(1)[0] for _ in range(3))
        n = max(1, min(300, round(self.queue / once), int(IN_FLIGHT / 2 / max(1, size))))
        _, dispatch = run(min(n, 16))  # XLA blocks the caller when more are in flight
        samples, start = [], time.perf_counter()
        while len(samples) < 3 or (time.perf_counter() - start < self.seconds and len(samples) < 25):
            samples.append(max((run(2 * n)[0] - run(n)[0]) / n, 1e-9))
        median = float(np.median(samples))
        return {"median": median / calls, "minimum": min(samples) / calls, "host_bound": dispatch > 0.7 * median}


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def make_inputs(case, dtype):
    """So many sets of logits that none is in the cache when its turn comes, and the other arrays."""
    size = np.prod(case.shape, dtype=np.int64) * np.dtype(dtype).itemsize
    count = int(np.clip(-(-4 * L2_BYTES // size), 1, 32))
    targets = np.random.default_rng(0).integers(0, case.V - 1, (case.B, case.U), np.int32)
    return [normal(i, case.shape, dtype) for i in range(count)], tuple(map(jnp.asarray, (targets, *case.lengths)))


def turns(step, ring, rest):
    return lambda i: step(ring[i % len(ring)], *rest)


def in_place(step, ring, rest):
    """The gradient takes the memory of the logits and serves as the logits of a later call."""
    ring = [jnp.copy(x) for x in ring]

    def call(i):
        value, ring[i % len(ring)] = step(ring[i % len(ring)], *rest)
        return value, ring[i % len(ring)]

    return call


def torch_step(loss, ring, rest):
    """A peer's loss and gradient, without a copy."""
    logits, *rest = (torch.from_dlpack(x) for x in (ring[0], *rest))

    def call(_):
        x = logits.detach().requires_grad_()
        value = loss(x, *rest)
        value.backward()
        return value.detach(), x.grad

    return call


def torch_wait(_):
    torch.cuda.is_available() and torch.cuda.synchronize()


# ------------------------------------------------------------------------------------------------------- the device


def describe(missing):
    fields = "driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit"
    query = f"--query-gpu={','.join(fields)}"
    found = measure.output_of("nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0") or ""
    release = re.search(r"release ([\d.]+)", measure.output_of("nvcc", "--version") or "")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": measure.commit(),
        "device": jax.devices()[0].device_kind,
        **dict(zip(fields, map(str.strip, found.split(",")))),
        "nvcc": release and release[1],
        "versions": measure.versions("jax-cuda13-plugin", "jax-cuda12-plugin") | peers.versions(),
        "not_here": missing,
    }


def copy_bandwidth(run):
    """{how: bytes per second}; bytes read and bytes written both count."""
    elements = 1 << (12 if run.args.dry_run else 28)
    x = normal(0, (elements,), np.float32)
    copy, add = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)
    found = {"copy": run.time(lambda _: copy(x)), "x + 1": run.time(lambda _: add(x))}
    return {name: 8 * elements / t["median"] for name, t in found.items()}


# -------------------------------------------------------------------------------------------------------- the stages


def emission(ring, rest, backward=False):
    """The forward pass, or the backward pass of it: not in place, with cotangents in every row inside the lengths."""
    targets, frames, labels = rest
    options = dict(blanks=(ring[0].shape[-1] - 1,), normalize=True, strict=True)
    label = softmax.label_map(targets, labels)
    forward = jax.jit(lambda x: softmax.forward(x, label, frames, **options))
    if not backward:
        return turns(forward, ring, ())
    *arcs, lse = forward(ring[0])
    cotangents = tuple(jnp.where(jnp.isfinite(x), -jnp.exp(x), 0) for x in arcs)
    scale = jnp.full(frames.shape, 1 / len(frames), lse.dtype)

    @jax.jit
    def step(x, label, frames, lse, cotangents, scale):
        return softmax.backward(x, label, frames, lse, cotangents, scale, -scale, alias=False, **options)

    return turns(step, ring, (label, frames, lse, cotangents, scale))


def lattice_alone(case):
    """(call, number of lattices per call). In place: the next call reads the gradients as log-probabilities."""
    shape, lengths = case.shape[:3], [jnp.asarray(x) for x in case.lengths]
    count = int(np.clip(-(-4 * L2_BYTES // (8 * np.prod(shape))), 4, 32))
    planes = [tuple(-1 - 3 * jnp.abs(normal(2 * i + k, shape, np.float32)) for k in range(2)) for i in range(count)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(planes, frames, labels):
        slots = [arc.slot for arc in STANDARD]
        done = [lattice.value_and_grad(STANDARD, dict(zip(slots, p)), frames, labels, strict=True) for p in planes]
        return [tuple(gradients[slot] for slot in slots) for _, gradients in done], [loss for loss, _ in done]

    def call(_):
        nonlocal planes
        planes, values = step(planes, *lengths)
        return values

    return call, count


def diagonals(run):
    """The cost of one more frame for a single sequence, in seconds and in cycles of the highest clock."""
    record = run.record
    clock = float(record.get("clocks.max.sm", 0))
    record["seconds_per_diagonal"] = seconds = {}
    for short, long in cases.DIAGONALS_DRY_RUN if run.args.dry_run else cases.DIAGONALS:
        below, above = (run.time(call, calls=calls)["median"] for call, calls in map(lattice_alone, (short, long)))
        seconds[str(short.U)] = (above - below) / (long.T - short.T)
    record["cycles_per_diagonal"] = {U: x * clock * 1e6 if clock else None for U, x in seconds.items()}


# --------------------------------------------------------------------------------------------------------- contestants


def loss_and_gradient(loss, **jit):
    return jax.jit(jax.value_and_grad(loss), **jit)


JAX_RIVALS = {"ours, reference": RNNTLoss(implementation="reference"), "plain JAX": plain_jax.plain}


def sample(handle):
    """(loss, some elements of the gradient) from the result of a step, ours or a peer's."""
    value, gradient = handle
    stride = measure.stride(int(np.prod(gradient.shape)))
    if isinstance(gradient, jax.Array):
        gradient = jax.jit(lambda x: x.reshape(-1)[::stride])(gradient)
    else:
        gradient = gradient.reshape(-1)[::stride].float().cpu()
    return float(value), np.asarray(gradient, np.float64)


@jax.jit
def rows_with_posterior(*arrays):
    blank, label = RNNTLoss().posteriors(*arrays)
    return jnp.sum((blank != 0) | (label != 0))


class Variant:
    """One shape, dtype and set of lengths: bytes, times, and the deviation of results from ours."""

    def __init__(self, run, case, dtype, lengths, others):
        self.run, self.dtype, self.others = run, np.dtype(dtype), others
        self.case = case if lengths == "full" else case.ragged()
        self.name = f"{case.name}, {self.dtype.name}, {lengths}"
        self.row = {"case": case.name, "shape": case.shape, "dtype": self.dtype.name, "lengths": lengths}
        self.row |= {"valid": self.case.valid, "times": {}, "off_ours": {}}
        self.first = None  # (loss, sample of the gradient)

    def time(self, name, make, wait=jax.block_until_ready, *, compare=False, reserve=0.0):
        """`make()` returns a call for `Run.time`, or (call, number of calls in it)."""

        def measured():
            made = make()
            call, calls = made if isinstance(made, tuple) else (made, 1)
            if compare:
                self.compare(name, sample(call(0)))
            self.row["times"][name] = self.run.time(call, wait, calls)

        self.run.attempt(f"{self.name}: {name}", measured, reserve=reserve)

    def compare(self, name, found):
        self.first = self.first or found
        off = abs(found[0] / self.first[0] - 1), self.case.B * float(np.max(np.abs(found[1] - self.first[1])))
        self.row["off_ours"][name] = off
        # Many contestants keep logarithms of up to thousands in float32; 16-bit gradients are rounded.
        if not (off[0] < 1e-3 and off[1] < (0.02 if self.dtype.itemsize == 2 else 0.01)):
            self.run.fail(f"{self.name}: {name}", f"loss and gradient are off ours by {off}")

    def measure(self):
        ring, rest = make_inputs(self.case, self.dtype)
        self.count_bytes(int(rows_with_posterior(ring[0], *rest)))
        self.run.record["variants"].append(self.row)
        step, donated = loss_and_gradient(RNNTLoss(inplace=False)), loss_and_gradient(RNNTLoss(), donate_argnums=0)
        self.time("ours", lambda: turns(step, ring, rest), compare=True)
        self.time("ours, in place", lambda: in_place(donated, ring, rest), compare=True)
        self.time("stage: value", lambda: turns(jax.jit(RNNTLoss()), ring, rest))
        self.time("stage: emission forward", lambda: emission(ring, rest))
        self.time("stage: lattice", lambda: lattice_alone(self.case))
        self.time("stage: emission backward", lambda: emission(ring, rest, backward=True))
        for name, loss in self.others.items() if self.dtype == np.float32 else ():
            self.time(name, functools.partial(torch_step, loss, ring, rest), torch_wait, compare=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def measure_rivals(self):
        ring, rest = make_inputs(self.case, self.dtype)
        for name, loss in JAX_RIVALS.items():
            self.time(name, lambda f=loss: turns(loss_and_gradient(f), ring, rest), compare=True, reserve=8)

    def count_bytes(self, used):
        """Bytes as in lab/cuda.md. `used` rows have a posterior; a step's backward pass reads no other rows."""
        B, T, U1, V = self.case.shape
        nodes, row = B * T * U1, V * self.dtype.itemsize
        valid = round(nodes * self.case.valid)
        self.row["rows_with_posterior"] = used / nodes
        self.row["bytes"] = {
            "stage: value": valid * row + 20 * nodes,
            "stage: emission forward": valid * row + 12 * nodes,
            "stage: lattice": 16 * nodes,
            "stage: emission backward": (valid + nodes) * row + 12 * nodes,
            "step": (valid + used + nodes) * row + 40 * nodes,
        }


# -------------------------------------------------------------------------------------------------------------- report

# Contestant, ratio, sign and limit, for the large shapes with full lengths.
AIMS = (
    ("stage: emission forward", "x floor", "<=", 1.18),  # 85% of the bandwidth of a copy
    ("stage: emission backward", "x floor", "<=", 1.18),
    ("ours", "x floor", "<=", 1.25),
    ("torchaudio", "x ours", ">=", 3),
)


def ratios(row, bandwidth):
    """{contestant: {"x floor": ratio, "x ours": ratio}}"""
    times = {name: found["median"] for name, found in row["times"].items()}
    floors = {name: row["bytes"].get(name, row["bytes"]["step"]) / bandwidth for name in times}
    return {name: {"x floor": t / floors[name], "x ours": t / times.get("ours", np.nan)} for name, t in times.items()}


def aims(record):
    """[(what, measured, aim, met or MISSED)]"""
    rows, large = [], [case.name for case in cases.GPU_LARGE]

    def judge(what, sign, limit, value):
        met = value <= limit if sign == "<=" else value >= limit
        rows.append((what, f"{value:.3g}", f"{sign} {limit}", "met" if met else "MISSED"))

    for row in record["variants"]:
        if row["case"] not in large or row["lengths"] != "full":
            continue
        found, what = ratios(row, record.get("bandwidth", np.nan)), f"{row['case']}, {row['dtype']}"
        for name, column, sign, limit in AIMS:
            if name in found:
                judge(f"{what}: {name}, {column}", sign, limit, found[name][column])
        if row["case"] == large[0] and "stage: lattice" in found:
            judge(f"{what}: lattice / step", "<=", 0.1, found["stage: lattice"]["x ours"])
    for U, cycles in record.get("cycles_per_diagonal", {}).items():
        if cycles and int(U) <= 127:
            judge(f"cycles per diagonal, U = {U}", "<=", 120, cycles)
    return rows


def report(record):
    """The record as it is, but for its times, which are one table, and the aims."""
    print(measure.compact({k: v for k, v in record.items() if k not in ("variants", "aims", "errors")}))
    rows = []
    for row in record["variants"]:
        what = f"{row['case']}, {row['dtype']}, {row['lengths']}"
        for name, found in ratios(row, record.get("bandwidth", np.nan)).items():
            times, off = row["times"][name], row["off_ours"].get(name, (0, np.nan))[1]
            cells = f"{times['median'] * 1e3:.3g}", *(f"{x:.3g}" for x in found.values()), f"{off:.1g}"
            rows.append((what, name, *cells, "host" if times["host_bound"] else ""))
    measure.table(("", "", "ms", "x floor", "x ours", "gradient off ours", "bound by"), rows)
    measure.table(("aims", "measured", "aim", ""), aims(record))
    print(*(f"{what}: {why}" for what, why in record["errors"]), sep="\n")


# ---------------------------------------------------------------------------------------------------------------- main


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=150, help="seconds of all measurements (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[c.name for c in cases.GPU])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on any device; keeps nothing")
    parser.add_argument("--once", action="store_true", help="a step of each case for ncu; nothing is timed or kept")
    parser.add_argument("--output", type=Path, help="folder of DATE-DEVICE.json (benchmarks/results)")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu" and not args.dry_run:
        parser.exit(2, "no GPU: --dry-run executes the benchmark without one\n")
    name = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    file = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}.json"
    args.output = None if args.dry_run else (args.output or Path(__file__).parent / "results") / file
    return args


def once(chosen):
    """A step of each case, for a profiler; nothing is timed."""
    for case in chosen:
        for dtype in (np.float32, jnp.bfloat16):
            (logits, *_), rest = make_inputs(case, dtype)
            jax.block_until_ready(loss_and_gradient(RNNTLoss(inplace=False))(logits, *rest))


def main(argv=None):
    run = Run(parse(argv))
    chosen = [c for c in (cases.GPU_DRY_RUN if run.args.dry_run else cases.GPU) if c.name in run.args.only]
    if run.args.once:
        return once(chosen)
    others, missing = peers.losses([peers.torchaudio]) if torch else ({}, {"all": "torch cannot be imported"})
    others.pop("torchaudio, joint", None)
    run.record |= describe(missing)
    if copied := run.attempt("copy", copy_bandwidth, run):
        run.record |= {"copy_bandwidth": copied, "bandwidth": max(copied.values())}
    made = []
    for lengths in ("full", "ragged"):
        for dtype in (np.float32, jnp.bfloat16):
            for case in chosen:
                made.append(Variant(run, case, dtype, lengths, others))
                run.attempt(made[-1].name, made[-1].measure, reserve=15)
            if len(made) == len(chosen):  # after float32 and full lengths, as time may run out
                run.attempt("cycles per diagonal", diagonals, run)
    for variant in made[: len(chosen)]:
        run.attempt(f"{variant.name}: JAX rivals", variant.measure_rivals, reserve=10)
    run.save()
    report(run.record)
    ours = all("ours" in variant["times"] for variant in run.record["variants"]) and len(run.record["variants"]) > 0
    return int(not ours or (run.args.dry_run and bool(run.record["errors"])))


if __name__ == "__main__":
    sys.exit(main())
