"""What all benchmarks share: contestants that take turns, their tables and aims, and files of results."""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import __main__

HERE = Path(__file__).parent
SAMPLES = 1000  # of each array of a gradient


@dataclasses.dataclass
class Contestant:
    """`run()` returns the seconds of one repetition; `check` is (loss, samples of the gradient) of the first."""

    name: str
    run: Callable[[], float] | None
    check: tuple[float, np.ndarray] | None = None
    megabytes: float | None = None  # of workspace
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self):
        return float(np.median(self.seconds))

    @property
    def best(self):
        return min(self.seconds)


def samples(arrays):
    arrays = [np.ravel(x) for x in arrays]
    return np.concatenate([x[:: max(1, x.size // SAMPLES)] for x in arrays]).astype(np.float64)


def program(name, loss, arguments, *, gradient=0, donate=False, whole=False):
    """The loss and its gradient with respect to the arguments `gradient`, or the loss alone (None), jitted.

    `whole`: the megabytes are also those of arguments and results.
    """
    function = loss if gradient is None else jax.value_and_grad(loss, gradient)
    step = jax.jit(function, donate_argnums=(0,) if donate else ())
    first, *others = jax.tree.map(jnp.asarray, tuple(arguments))

    def run(keep=False):
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, first))
        start = time.perf_counter()
        result = jax.block_until_ready(step(fresh, *others))
        seconds = time.perf_counter() - start
        return result if keep else seconds

    memory = step.lower(first, *others).compile().memory_analysis()
    parts = ("temp", "argument", "output") if whole else ("temp",)
    megabytes = sum(getattr(memory, f"{part}_size_in_bytes") for part in parts) / 1e6 if memory else None
    result = run(keep=True)
    check = None if gradient is None else (float(result[0]), samples(jax.tree.leaves(result[1])))
    return Contestant(name, run, check, megabytes)


def calls(name, function, *arguments):
    """A function as it is."""

    def run():
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        return time.perf_counter() - start

    return Contestant(name, run)


def take_turns(contestants, budget, repeat, deadline=float("inf")):
    """Always runs the contestant that has used the least of its share, so all are spread over the whole run. A share is
    `budget` seconds or `repeat` times, but at least 3 times; all end at the deadline. In the pauses, threads of the
    previous contestant fall asleep. A contestant of less than 5 ms therefore runs once untimed, to wake its own."""

    def share(contestant):
        times = contestant.seconds
        return max(min(sum(times) / budget, len(times) / 3), len(times) / repeat)

    contestants = [c for c in contestants if c.run]
    while share(contestant := min(contestants, key=share)) < 1:
        if time.monotonic() > deadline and all(c.seconds for c in contestants):
            break
        time.sleep(0.003)
        seconds = contestant.run()
        contestant.seconds.append(contestant.run() if seconds < 0.005 else seconds)
    for contestant in contestants:
        contestant.run = None  # frees its arrays


def agree(first, others, *, loss=1e-5, gradient):
    """Fails if a contestant's loss or gradient is off that of the first; the second limit is absolute."""
    for other in others:
        np.testing.assert_allclose(other.check[0], first.check[0], rtol=loss, err_msg=f"loss of {other.name}")
        message = f"gradient of {other.name}"
        np.testing.assert_allclose(other.check[1], first.check[1], rtol=0, atol=gradient, err_msg=message)


# ---------------------------------------------------------------------------------------------------------- report


def table(header, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, *rows)]
    print(lines[0], "|---|" + "--:|" * (len(header) - 1), *lines[1:], "", sep="\n", flush=True)


@dataclasses.dataclass
class Case:
    """Contestants of one problem, and what to tell of them."""

    title: str
    contestants: list[Contestant]
    bases: tuple[str, ...]  # contestants of which the times are multiples
    aims: Sequence[tuple[str, str, str]] = ()  # of two contestants: their ratio, and a limit such as "<= 1.4"
    columns: dict[str, Callable[[Contestant], str]] = dataclasses.field(default_factory=dict)
    wrong: Sequence[str] = ()  # which contestants disagree

    @property
    def by_name(self):
        return {c.name: c for c in self.contestants}

    def report(self):
        print(f"### {self.title}\n")
        bases = [self.by_name[name] for name in self.bases if name in self.by_name]
        rows = []
        for c in self.contestants:
            ratios = (f"{c.median / base.median:.2f}" for base in bases)
            megabytes = "" if c.megabytes is None else f"{c.megabytes:.3g}"
            cells = f"{c.median * 1e3:.3g}", f"{c.best * 1e3:.3g}", *ratios, *(f(c) for f in self.columns.values())
            rows.append((c.name, *cells, megabytes, str(len(c.seconds))))
        table(("", "ms", "min", *(f"x {base.name}" for base in bases), *self.columns, "MB", "runs"), rows)

    def checked(self, name):
        """Rows of the table of aims, of the contestants that are there."""
        by_name = self.by_name
        return [aim(f"{name}: {a} / {b}", by_name[a], by_name[b], x) for a, b, x in self.aims if {a, b} <= {*by_name}]


def aim(what, above, below, limit):
    """A row of the table of aims."""
    sign, bound = limit.split()
    ratio, best = above.median / below.median, above.best / below.best
    met = ratio <= float(bound) if sign == "<=" else ratio >= float(bound)
    return what, float(f"{ratio:.4g}"), float(f"{best:.4g}"), limit, met


def run(args, suffix, makers, seconds=float("inf"), **more):
    """The `Case` of each name, after its turns, as long as there is time. What ends the program loses none before."""
    deadline, cases, aims = time.monotonic() + seconds, {}, []
    for name, make in makers.items():
        if cases and time.monotonic() > deadline:
            print(f"left out: {name}: no time left", file=sys.stderr)
            continue
        case = make()
        take_turns(case.contestants, args.budget, args.repeat, deadline)
        cases[name] = case
        case.report()
        aims += case.checked(name)
        save(args, suffix, aims, {name: case.contestants for name, case in cases.items()}, **more)
    if aims:
        print("### Aims\n")
        rows = (
            (what, f"{x:.2f}", f"{best:.2f}", limit, "met" if met else "MISSED") for what, x, best, limit, met in aims
        )
        table(("", "by medians", "by minima", "aim", ""), rows)
    print(f"Results: {args.output}")
    return cases


# --------------------------------------------------------------------------------------------------- options, results


def options(description, names):
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = ", ".join(names).replace("%", "%%")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=listed)
    parser.add_argument("--repeat", type=int, default=200, help="repetitions of one contestant at most (%(default)s)")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for one contestant of a case (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the budget")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of a contestant (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON of the results (results/DATE.json beside the program)")
    return parser


def settle(args):
    """Selects the CPU and its cores, unless JAX_PLATFORMS names a GPU, and how long turns last.

    XLA takes one thread per core of the process, and children inherit the cores.
    """
    args.budget = args.budget / 10 if args.quick else args.budget
    if not os.environ.get("JAX_PLATFORMS", "").startswith(("cuda", "gpu")):
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
        jax.config.update("jax_platforms", "cpu")


def commit():
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found = None
    return os.environ.get("COMMIT") or found


def machine():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def save(args, name, aims, results, **more):
    """Writes medians and minima of {case: contestants}, with machine, load, versions and commit."""
    now, (library, _) = datetime.datetime.now(datetime.UTC), __main__._info()
    record = {
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine() | {"device": library["device"]["kind"], "kernels": library["kernels"]},
        "threads": args.threads,
        "load_average": os.getloadavg(),
        "versions": library["versions"] | more.pop("versions", {}),
        **more,
        "aims": {what: dict(zip(("by_medians", "by_minima", "aim", "met"), values)) for what, *values in aims},
        "times": {
            case: {c.name: summary(c) for c in contestants if c.seconds} for case, contestants in results.items()
        },
    }
    args.output = args.output or Path(sys.argv[0]).resolve().parent / f"results/{now:%Y-%m-%d-%H%M%S}{name}.json"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(compact(record) + "\n")


def summary(contestant):
    """What a result file keeps of the repetitions."""
    ms = 1e3 * np.sort(contestant.seconds)
    figures = {"median_ms": float(f"{np.median(ms):.4g}"), "minimum_ms": float(f"{ms[0]:.4g}"), "repetitions": len(ms)}
    return figures | ({} if contestant.megabytes is None else {"megabytes": float(f"{contestant.megabytes:.4g}")})


def compact(record, indent=""):
    """JSON with a line for each dictionary that holds no other one: a contestant, say."""
    if not isinstance(record, dict) or not any(isinstance(v, dict) for v in record.values()):
        return json.dumps(record)
    lines = (f"{indent} {json.dumps(k)}: {compact(v, indent + ' ')}" for k, v in record.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
