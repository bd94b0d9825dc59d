"""Times the loss and its gradient on a GPU: this library, its stages, its rivals, and the bandwidth of the device.

Everything runs in one process; README.md beside this file explains the measurements. `--dry-run` executes all of it on
tiny shapes on the default device, as a test; it keeps no results.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import glob
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers need memory, too

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import cases
import gpu_peers
import gpu_report
import rivals

from jax_rnnt import rnnt_loss, rnnt_posteriors
from jax_rnnt.emissions import _softmax as softmax
from jax_rnnt.lattices import STANDARD, _lattice as lattice

HERE = Path(__file__).parent
L2_BYTES = 60e6


# -------------------------------------------------------------------------------------------------------- measuring
#
# XLA launches on a stream of its own, which the events of other libraries do not see, and executes calls in order. So
# calls are issued one after the other without waiting, and the clock stops when the last is ready. The time of one call
# is the time of 2 n calls minus the time of n, divided by n: start and wait cancel. This is device time if issuing a
# call takes less than running it; otherwise the row says "host". The PyTorch peers are timed alike.


@dataclasses.dataclass
class Time:
    samples: list[float]  # seconds of a call
    dispatch: float  # seconds to issue one
    calls: int = 1  # calls in one program

    @property
    def median(self):
        return float(np.median(self.samples)) / self.calls

    @property
    def host_bound(self):
        return self.dispatch > 0.7 * float(np.median(self.samples))


IN_FLIGHT = 16e9  # bytes of results of calls that were issued but not awaited, at most
wait_jax = jax.block_until_ready


@dataclasses.dataclass(frozen=True)
class Timer:
    """`queue`: seconds of n calls; `budget`: seconds of all repetitions."""

    queue: float = 0.02
    budget: float = 0.25

    def measure(self, call, wait=wait_jax, calls=1):
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
        while len(samples) < 3 or (time.perf_counter() - start < self.budget and len(samples) < 25):
            samples.append(max((run(2 * n)[0] - run(n)[0]) / n, 1e-9))
        return Time(samples, dispatch, calls)


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


class Run:
    """The measurements so far, saved after every step, since a later step may end the process."""

    def __init__(self, args):
        self.args, self.start = args, time.monotonic()
        self.timer = Timer(queue=0.001, budget=0.0) if args.dry_run else Timer()
        self.record = {"dry_run": args.dry_run, "variants": [], "errors": []}

    def left(self):
        return self.args.budget - (time.monotonic() - self.start)

    def attempt(self, what, function, reserve=0.0):
        """function(), or None if it fails or no time is left; the record says why."""
        if self.left() < reserve:
            return self.fail(what, "left out: no time left")
        try:
            return function()
        except Exception as error:
            if self.args.dry_run:
                traceback.print_exc()
            return self.fail(what, f"{type(error).__name__}: {str(error).strip()[:500]}")
        finally:
            gc.collect()
            self.save()

    def fail(self, what, why):
        self.record["errors"].append([what, why])
        print(f"{what}: {why}", file=sys.stderr, flush=True)

    def save(self):
        if self.args.output:
            self.args.output.parent.mkdir(parents=True, exist_ok=True)
            gpu_report.write(self.record, self.args.output)


# ------------------------------------------------------------------------------------------------------- the device


def output_of(*command):
    try:
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def nvidia_smi(*fields):
    text = output_of("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0")
    return dict(zip(fields, map(str.strip, text.split(",")))) if text else {}


def describe(torch):
    packages = ("jax_rnnt", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "numpy", "triton")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("COMMIT") or output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "device": jax.devices()[0].device_kind,
        **nvidia_smi("driver_version", "memory.total", "clocks.max.sm", "clocks.max.mem", "power.limit"),
        "nvcc": (re.search(r"release ([\d.]+)", output_of("nvcc", "--version") or "") or [None, None])[1],
        "versions": versions | torch.versions | {"python": platform.python_version()},
        "not_here": torch.missing,
    }


def copy_bandwidth(elements, timer, torch):
    """{how: bytes per second}; bytes read and bytes written both count."""
    x = normal(0, (elements,), np.float32)
    copy, add = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)
    found = {"copy": timer.measure(lambda _: copy(x)), "x + 1": timer.measure(lambda _: add(x))}
    if torch.torch is not None:
        source = torch.torch.from_dlpack(x)
        target = torch.torch.empty_like(source)
        found["copy by torch"] = timer.measure(lambda _: target.copy_(source), torch.wait)
    return {name: 8 * elements / t.median for name, t in found.items()}


def sm_clock(call):
    """MHz of the multiprocessors while `call` keeps them busy."""
    found = []
    for _ in range(3):
        command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
        try:
            query = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:
            return None
        while query.poll() is None:
            for i in range(4):
                handle = call(i)
            wait_jax(handle)
        found += [float(x) for x in query.communicate()[0].split() if x.isdigit()]
    return float(np.median(found)) if found else None


def first_call(case):
    """Seconds of the first and the second call of a compiled step. No kernel of ours must have run in this process."""
    (logits, *_), rest = make_inputs(case, np.float32)
    wait_jax([jnp.zeros_like(logits) for _ in range(2)])  # the allocator now holds the memory for the results
    step = jax.jit(jax.value_and_grad(functools.partial(rnnt_loss, inplace=False)))
    step = step.lower(logits, *rest).compile()
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        wait_jax(step(logits, *rest))
        seconds.append(time.perf_counter() - start)
    return seconds


# -------------------------------------------------------------------------------------------------------- the stages


def emission_forward(ring, rest):
    targets, frames, labels = rest
    options = dict(blanks=(ring[0].shape[-1] - 1,), normalize=True, strict=True)
    label = softmax.label_map(targets, labels)
    return turns(jax.jit(lambda x: softmax.forward(x, label, frames, **options)), ring, ())


def emission_backward(ring, rest):
    """Not in place. Every row inside the lengths has nonzero cotangents."""
    targets, frames, labels = rest
    options = dict(blanks=(ring[0].shape[-1] - 1,), normalize=True, strict=True)
    label = softmax.label_map(targets, labels)
    *arcs, lse = jax.jit(lambda x: softmax.forward(x, label, frames, **options))(ring[0])
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


def seconds_per_diagonal(timer, short, long):
    """The cost of one more frame for a single sequence."""
    times = []
    for case in (short, long):
        call, calls = lattice_alone(case)
        times.append(timer.measure(call, calls=calls).median)
    return (times[1] - times[0]) / (long.T - short.T)


def kernel_times(call, dry_run):
    """{kernel: [count, mean microseconds]} from the profiler, over 5 calls."""
    with tempfile.TemporaryDirectory() as folder:
        wait_jax(call(0))
        with jax.profiler.trace(folder):
            for i in range(5):
                wait_jax(call(i))
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        found = {}
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                if dry_run or ("GPU" in plane.name and line.name.startswith("Stream")):
                    for event in line.events:
                        found.setdefault(event.name, []).append(event.duration_ns * 1e-3)
    rows = sorted(found.items(), key=lambda row: -sum(row[1]))[:20]
    return {name: [len(times), float(np.mean(times))] for name, times in rows}


# --------------------------------------------------------------------------------------------------------- contestants


def loss_and_gradient(loss, **jit):
    return jax.jit(jax.value_and_grad(loss), **jit)


JAX_RIVALS = {
    "ours, reference": functools.partial(rnnt_loss, implementation="reference"),
    "two-stage JAX": rivals.two_stage,
    "plain JAX": rivals.plain,
}


def sample(handle, count=1000):
    """(loss, some elements of the gradient) from the result of a step, ours or a peer's."""
    value, gradient = handle
    stride = max(1, int(np.prod(gradient.shape)) // count)
    if isinstance(gradient, jax.Array):
        gradient = jax.jit(lambda x: x.reshape(-1)[::stride])(gradient)
    else:
        gradient = gradient.reshape(-1)[::stride].float().cpu()
    return float(value), np.asarray(gradient, np.float64)


@jax.jit
def rows_with_posterior(*arrays):
    blank, label = rnnt_posteriors(*arrays)
    return jnp.sum((blank != 0) | (label != 0))


def answer(*arrays):
    """(losses, gradient). The last array is the clamp."""
    *arrays, clamp = arrays

    def total(*arrays):
        values = rnnt_loss(*arrays, clamp=clamp, reduction="none")
        return values.sum(), values

    gradient, values = jax.grad(total, has_aux=True)(*map(jnp.asarray, arrays))
    return values, gradient


class Variant:
    """One shape, dtype and set of lengths: bytes, times, and the deviation of results from ours."""

    def __init__(self, run, case, dtype, lengths, torch):
        self.run, self.dtype, self.torch = run, np.dtype(dtype), torch
        self.case = case if lengths == "full" else case.ragged()
        self.name = f"{case.name}, {self.dtype.name}, {lengths}"
        self.row = {"case": case.name, "shape": case.shape, "dtype": self.dtype.name, "lengths": lengths}
        self.row |= {"valid": self.case.valid, "times": {}, "off_ours": {}}
        self.first = None  # (loss, sample of the gradient)

    def time(self, name, make, wait=wait_jax, *, compare=False, reserve=0.0):
        """`make()` returns a call for `measure`, or (call, number of calls in it)."""

        def measured():
            made = make()
            call, calls = made if isinstance(made, tuple) else (made, 1)
            if compare:
                self.compare(name, sample(call(0)))
            found = self.run.timer.measure(call, wait, calls)
            samples = [seconds / calls for seconds in found.samples]
            self.row["times"][name] = dict(median=found.median, samples=samples, host_bound=found.host_bound)

        self.run.attempt(f"{self.name}: {name}", measured, reserve)

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
        step = loss_and_gradient(functools.partial(rnnt_loss, inplace=False))
        donated = loss_and_gradient(rnnt_loss, donate_argnums=0)
        self.time("ours", lambda: turns(step, ring, rest), compare=True)
        self.time("ours, in place", lambda: in_place(donated, ring, rest), compare=True)
        self.time("stage: value", lambda: turns(jax.jit(rnnt_loss), ring, rest))
        self.time("stage: emission forward", lambda: emission_forward(ring, rest))
        self.time("stage: lattice", lambda: lattice_alone(self.case))
        self.time("stage: emission backward", lambda: emission_backward(ring, rest))
        self.row["extra_planes"] = {}
        for name, function in (("ours", step), ("ours, in place", donated), ("value", jax.jit(rnnt_loss))):
            memory = function.lower(ring[0], *rest).compile().memory_analysis()
            if memory is not None:
                self.row["extra_planes"][name] = memory.temp_size_in_bytes / (4 * np.prod(self.case.shape[:3]))
        for name in self.torch.names(self.dtype.name):
            make = functools.partial(self.torch.step, name, (ring[0], *rest))
            self.time(name, make, self.torch.wait, compare=True)
            self.torch.release()

    def measure_rivals(self):
        ring, rest = make_inputs(self.case, self.dtype)
        for name, loss in JAX_RIVALS.items():
            make = functools.partial(turns, loss_and_gradient(loss), ring, rest)
            self.time(name, make, compare=True, reserve=8)

    def count_bytes(self, used):
        """Bytes as in docs/cuda.md. `used` rows have a posterior; a step's backward pass reads no other rows."""
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


# ---------------------------------------------------------------------------------------------------------------- main


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=150, help="seconds of all measurements (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[c.name for c in cases.GPU])
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on any device; keeps nothing")
    parser.add_argument("--output", type=Path, help="folder of DATE-DEVICE.json and .md (benchmarks/results)")
    args = parser.parse_args()
    if jax.default_backend() != "gpu" and not args.dry_run:
        parser.exit(2, "no GPU: --dry-run executes the benchmark without one\n")
    name = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    file = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}.json"
    args.output = None if args.dry_run else (args.output or HERE / "results") / file
    return args


def main():
    args = parse()
    run, torch = Run(args), gpu_peers.Torch()
    record = run.record
    record |= describe(torch) | {"large": [case.name for case in cases.GPU_LARGE]}
    chosen = [c for c in (cases.GPU_DRY_RUN if args.dry_run else cases.GPU) if c.name in args.only]
    record["first_call"] = run.attempt("first call", lambda: first_call(chosen[0]))
    copied = run.attempt("copy", lambda: copy_bandwidth(1 << (12 if args.dry_run else 28), run.timer, torch))
    if copied:
        record |= {"copy_bandwidth": copied, "bandwidth": max(copied.values())}

    def at_the_first_shape():
        ring, rest = make_inputs(chosen[0], np.float32)
        call = turns(loss_and_gradient(functools.partial(rnnt_loss, inplace=False)), ring, rest)
        record["sm_clock_mhz"] = sm_clock(call)
        record["kernels"] = run.attempt("profiler", lambda: kernel_times(call, args.dry_run))

    def diagonals():
        clock = record.get("sm_clock_mhz") or float(record.get("clocks.max.sm", 0))
        pairs = cases.DIAGONALS_DRY_RUN if args.dry_run else cases.DIAGONALS
        seconds = {str(short.U): seconds_per_diagonal(run.timer, short, long) for short, long in pairs}
        record["seconds_per_diagonal"] = seconds
        record["cycles_per_diagonal"] = {U: x * clock * 1e6 if clock else None for U, x in seconds.items()}

    first_variants, surveyed = [], False
    for lengths in ("full", "ragged"):
        for dtype in (np.float32, jnp.bfloat16):
            for case in chosen:
                variant = Variant(run, case, dtype, lengths, torch)
                run.attempt(variant.name, variant.measure, reserve=15)
                if lengths == "full" and dtype == np.float32:
                    first_variants.append(variant)
            if not surveyed:  # after float32 and full lengths, as time may run out
                surveyed = True
                run.attempt("clock and profiler", at_the_first_shape)
                run.attempt("cycles per diagonal", diagonals)
                if "torchaudio" in torch.losses:
                    run.attempt("answers", lambda: record.update(answers=gpu_peers.answers(torch, answer)))
    for variant in first_variants:
        run.attempt(f"{variant.name}: JAX rivals", variant.measure_rivals, reserve=10)

    run.save()
    print(gpu_report.markdown(record))
    ours = all("ours" in variant["times"] for variant in record["variants"]) and len(record["variants"]) > 0
    return int(not ours or (args.dry_run and bool(record["errors"])))


if __name__ == "__main__":
    sys.exit(main())
