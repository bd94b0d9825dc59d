"""Times the loss and its gradient with respect to the logits: this library, its rivals, and the floor of the machine.

All contestants of a case take turns in one run; every repetition works on a fresh copy of the logits, made outside the
timed region. See README.md beside this file.
"""

import argparse
import ctypes
import dataclasses
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import cases
import rivals

from jax_rnnt import rnnt_loss

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / "build" / "peers"
PEER_PACKAGES = ("torch==2.11.0", "torchaudio==2.11.0", "numpy")
PEER_NAMES = "torchaudio", "warp-transducer"
FLOAT32 = np.dtype(np.float32).itemsize


@dataclasses.dataclass
class Contestant:
    """`run()` returns the seconds of one repetition; `check` is (loss, samples of the gradient) of the first."""

    name: str
    run: Callable[[], float] | None
    check: tuple[float, np.ndarray] | None = None
    temporaries: int | None = None  # bytes
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self):
        return float(np.median(self.seconds))

    @property
    def best(self):
        return min(self.seconds)


def stride(case):
    return max(1, int(np.prod(case.shape)) // 1000)


# --------------------------------------------------------------------------------------------------- contestants


def jax_contestant(name, case, inputs, loss, *, donate=False, gradient=True):
    """`inputs` are the arguments of the loss. The gradient is with respect to the first, an array or a tuple."""
    function = jax.value_and_grad(loss) if gradient else loss
    step = jax.jit(function, donate_argnums=(0,) if donate else ())
    logits, *rest = jax.tree.map(jnp.asarray, tuple(inputs))

    def run(keep=False):
        fresh = jax.block_until_ready(jax.tree.map(jnp.copy, logits))
        start = time.perf_counter()
        result = jax.block_until_ready(step(fresh, *rest))
        seconds = time.perf_counter() - start
        return result if keep else seconds

    compiled = step.lower(logits, *rest).compile()
    result = run(keep=True)
    check = None
    if gradient:
        samples = [np.asarray(x).reshape(-1)[:: stride(case)] for x in jax.tree.leaves(result[1])]
        check = float(result[0]), np.concatenate(samples)
    return Contestant(name, run, check, compiled.memory_analysis().temp_size_in_bytes)


@functools.cache
def floor_library():
    target = ROOT / "build" / "floor.so"
    target.parent.mkdir(exist_ok=True)
    flags = ("-O3", "-march=native", "-fopenmp-simd", "-pthread", "-shared", "-fPIC")
    subprocess.run([os.environ.get("CC", "cc"), *flags, str(HERE / "floor.c"), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def floor_contestant(name, case, inputs, threads, passes):
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
    room = np.empty(inputs.logits.size + 16, np.float32)
    logits = room[-room.ctypes.data % 64 // FLOAT32 :][: inputs.logits.size].reshape(case.shape)  # aligned as in XLA
    pointers = [x.ctypes.data_as(ctypes.c_void_p) for x in (logits, begin, end)]
    library = floor_library()

    def run():
        np.copyto(logits, inputs.logits)
        start = time.perf_counter()
        library.floor_run(*pointers, ctypes.c_int64(begin.size), passes, threads)
        return time.perf_counter() - start

    run()
    return Contestant(name, run)


class Torch:
    """The worker process that runs the PyTorch peers."""

    def __init__(self, python, threads, *, warp_transducer=None, nemo=None):
        command = [str(python), str(HERE / "torch_worker.py"), "--threads", str(threads)]
        command += ["--warp-transducer", warp_transducer] if warp_transducer else []
        command += ["--nemo", nemo] if nemo else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        greeting = json.loads(self.process.stdout.readline() or "{}")
        self.peers, self.versions = greeting.get("peers", []), greeting.get("versions", {})

    def ask(self, **request):
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def contestant(self, peer, case, seed, problem="logits"):
        ask = functools.partial(self.ask, peer=peer, problem=problem, case=case.name, seed=seed, stride=stride(case))
        first = ask()
        name = " ".join((peer, *problem.split()[1:]))
        return Contestant(name, lambda: ask()["seconds"], (first["loss"], np.array(first["gradient"])))


def start_torch(args):
    python = Path(args.torch_python) if args.torch_python else PEERS / "bin" / "python"
    if args.peers and not args.torch_python:
        if not python.exists():
            venv.create(PEERS, with_pip=True)
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *PEER_PACKAGES]).returncode:
            print("torchaudio is left out: pip could not install it.\n")
            return None
    if not python.exists():
        print("torchaudio and warp-transducer are left out: no environment for them; `make bench-peers` makes one.\n")
        return None
    worker = Torch(python, args.threads, warp_transducer=args.warp_transducer)
    if not worker.peers:
        print("torchaudio and warp-transducer are left out: their worker did not start.\n")
        return None
    if not args.warp_transducer:
        print("warp-transducer is left out: --warp-transducer names no library.\n")
    return worker


# --------------------------------------------------------------------------------------------------- measurement


def take_turns(contestants, budget, repeat):
    """Always runs the contestant that has used the least of its share, so all are spread over the whole run. A share is
    `budget` seconds or `repeat` times, but at least 3 times. In the pauses, threads of the previous contestant fall
    asleep. A contestant of less than 5 ms therefore runs once untimed, to wake its own."""

    def share(contestant):
        times = contestant.seconds
        return max(min(sum(times) / budget, len(times) / 3), len(times) / repeat)

    while share(contestant := min(contestants, key=share)) < 1:
        time.sleep(0.003)
        seconds = contestant.run()
        contestant.seconds.append(contestant.run() if seconds < 0.005 else seconds)
    for contestant in contestants:
        contestant.run = None  # frees its arrays


def verify(case, contestants):
    """Fails if contestants disagree. Gradients from float32 logs of up to T + U nats are off by up to 1e-3."""
    checks = {c.name: c.check for c in contestants if c.check}
    loss, gradient = checks["ours, reference"]
    for name, (its_loss, its_gradient) in checks.items():
        np.testing.assert_allclose(its_loss, loss, rtol=1e-5, err_msg=f"{case.name}: loss of {name}")
        message = f"{case.name}: gradient of {name}"
        np.testing.assert_allclose(its_gradient, gradient, rtol=0, atol=2e-3 / case.B, err_msg=message)


def gradient_contestants(case, inputs, args, torch):
    """Contestants for loss and gradient, the floor first. All compute the same mean loss; the last class is blank."""
    start = functools.partial(jax_contestant, case=case, inputs=inputs)
    reference = functools.partial(rnnt_loss, implementation="reference")
    contestants = [
        floor_contestant("floor", case, inputs, args.threads, passes=2),
        start("ours", loss=rnnt_loss, donate=True),
        start("ours, not in place", loss=functools.partial(rnnt_loss, inplace=False)),
        start("ours, reference", loss=reference, donate=True),
        start("two-stage JAX", loss=rivals.two_stage, donate=True),
        start("plain JAX", loss=rivals.plain),
        start("plain JAX, donated", loss=rivals.plain, donate=True),
        *(torch.contestant(peer, case, args.seed) for peer in PEER_NAMES if torch and peer in torch.peers),
    ]
    verify(case, contestants)
    if case.valid < 1:  # the same logits with full lengths, measured in the same turns, to judge the padding
        lengths = dict(zip(("logit_lengths", "target_lengths"), case.full().lengths))
        contestants.append(start("ours, all valid", inputs=inputs._replace(**lengths), loss=rnnt_loss, donate=True))
    return contestants


def value_contestants(case, inputs, args):
    return [
        floor_contestant("one read", case, inputs, args.threads, passes=1),
        jax_contestant("ours", case, inputs, rnnt_loss, gradient=False),
    ]


def joint_temporaries(case):
    """Bytes of temporaries of the gradient through logits = hidden @ weight, in units of the logits."""
    _, targets, *lengths = cases.make_inputs(dataclasses.replace(case, V=2))
    nodes, width = int(np.prod(case.shape[:3])), 16

    def loss(hidden, weight):
        return rnnt_loss((hidden @ weight).reshape(case.shape), targets, *lengths)

    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((nodes, width), (width, case.V)))
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (nodes * case.V * FLOAT32)


# -------------------------------------------------------------------------------------------------------- report


def table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|---|" + "--:|" * (len(header) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def report(case, contestants):
    size = int(np.prod(case.shape)) * FLOAT32
    floor, ours, *_ = contestants
    print(f"### {case.name}: B={case.B} T={case.T} U={case.U} V={case.V}, logits {size / 1e6:.3g} MB", end="")
    print(f", {case.valid:.0%} of the nodes valid\n" if case.valid < 1 else "\n")
    table(
        ("", "ms", "min", "x floor", "x ours", "GB/s", "temporaries", "runs"),
        [
            (
                c.name,
                f"{c.median * 1e3:.3g}",
                f"{c.best * 1e3:.3g}",
                f"{c.median / floor.median:.2f}",
                f"{c.median / ours.median:.2f}",
                f"{3 * size * case.valid / c.median / 1e9:.1f}",
                "" if c.temporaries is None else f"{c.temporaries / size:.2f}",
                str(len(c.seconds)),
            )
            for c in contestants
        ],
    )


def targets(results, temporaries):
    """Rows of the table of targets, as `judge` makes them, for the targets whose contestants ran."""
    rows = []

    def ratio(what, case, name, other, limit):
        above, below = (results.get(case, {}).get(x) for x in (name, other))
        if above and below:
            rows.append(judge(what, above.median / below.median, limit, above.best / below.best))

    ratio("subwords: ours / floor", "subwords", "ours", "floor", "<= 1.4")
    ratio("subwords: torchaudio / ours", "subwords", "torchaudio", "ours", ">= 50")
    ratio("subwords: plain JAX / ours", "subwords", "plain JAX", "ours", ">= 6")
    ratio("subwords: warp-transducer / ours", "subwords", "warp-transducer", "ours", ">= 4")
    for case in results:
        ratio(f"{case}: two-stage JAX / ours", case, "two-stage JAX", "ours", ">= 1")
    ratio("lattice_bound: ours / floor", "lattice_bound", "ours", "floor", "<= 2")
    ratio("subwords_ragged: ours / ours, all valid", "subwords_ragged", "ours", "ours, all valid", "<= 0.55")
    rows.append(judge("temporaries / logits, gradient through a 2-D joint matmul", temporaries, "<= 1.15"))
    return rows


def command_output(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def machine():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split(":", 1)[1].split()}
    return {
        "cpu": models[0] if models else platform.processor(),
        "simd": sorted(flags & {"avx2", "avx512f", "avx512bw", "avx512_bf16", "fma"}),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def options(description, names):
    """A parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--repeat", type=int, default=200, help="repetitions of one contestant at most (%(default)s)")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds for one contestant of a case (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tenth of the budget")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of a contestant (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch-python", help="Python that has torch and torchaudio, instead of that under build/")
    parser.add_argument("--output", type=Path, help="JSON of the results (benchmarks/results/DATE.json)")
    return parser


def settle(args):
    """Selects the CPU and its cores; returns the seconds for each contestant."""
    if hasattr(os, "sched_setaffinity"):  # XLA takes one thread per core of the process; children inherit the cores
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    jax.config.update("jax_platforms", "cpu")
    return args.budget / 10 if args.quick else args.budget


def save(args, load, targets, groups, *, name="", versions=None):
    """Writes medians and minima of {key: {case: contestants}}, with machine, load, versions and commit."""
    now = datetime.datetime.now(datetime.UTC)
    packages = ("jax_rnnt", "jax", "jaxlib", "numpy")
    record = {
        "date": now.isoformat(timespec="seconds"),
        "commit": command_output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "machine": machine(),
        "threads": args.threads,
        "load_average": {"before": load, "after": os.getloadavg()},
        "versions": {package: importlib.metadata.version(package) for package in packages}
        | {"python": platform.python_version(), "cc": command_output(os.environ.get("CC", "cc"), "-dumpfullversion")}
        | (versions or {}),
        "targets": {what: dict(zip(("by_medians", "by_minima", "target", "met"), rest)) for what, *rest in targets},
    }
    for key, results in groups.items():
        record[key] = {
            case: {c.name: summary(c) for c in contestants if c.seconds} for case, contestants in results.items()
        }
    output = args.output or HERE / "results" / f"{now:%Y-%m-%d-%H%M%S}{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(compact(record) + "\n")
    print(f"Results: {output}")


def summary(contestant):
    """What a result file keeps of the repetitions."""
    ms = 1e3 * np.sort(contestant.seconds)
    made = {"median_ms": float(f"{np.median(ms):.4g}"), "minimum_ms": float(f"{ms[0]:.4g}"), "repetitions": len(ms)}
    return made | ({} if contestant.temporaries is None else {"temporary_bytes": contestant.temporaries})


def compact(record, indent=""):
    """JSON with a line for each dictionary that holds no other one: a contestant, say."""
    if not isinstance(record, dict) or not any(isinstance(v, dict) for v in record.values()):
        return json.dumps(record)
    lines = (f"{indent} {json.dumps(k)}: {compact(v, indent + ' ')}" for k, v in record.items())
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def judge(what, value, limit, best=None):
    """(what, ratio of medians, ratio of minima, target, met by the medians); `limit` is a sign and a number."""
    sign, bound = limit.split()
    met = value <= float(bound) if sign == "<=" else value >= float(bound)
    return what, value, best, limit, met


def report_targets(rows):
    print("### Targets\n")
    rows = [
        (what, f"{value:.2f}", "" if best is None else f"{best:.2f}", target, "PASS" if met else "MISS")
        for what, value, best, target, met in rows
    ]
    table(("", "by medians", "by minima", "target", ""), rows)


def parse(argv):
    parser = options(__doc__, [case.name for case in cases.LARGE])
    parser.add_argument("--peers", action="store_true", help=f"install {', '.join(PEER_PACKAGES)} under build/")
    parser.add_argument("--warp-transducer", metavar="LIBRARY", help="its shared library, built by you with OpenMP")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    budget = settle(args)
    load = os.getloadavg()
    torch = start_torch(args)

    results, values = {}, {}
    for case in (cases.CASES[name] for name in args.only):
        inputs = cases.make_inputs(case, seed=args.seed)
        results[case.name] = gradient_contestants(case, inputs, args, torch)
        take_turns(results[case.name], budget, args.repeat)
        report(case, results[case.name])
        values[case.name] = value_contestants(case, inputs, args)
        take_turns(values[case.name], budget, args.repeat)

    print("### The loss alone\n")
    rows = []
    for name, (read, ours) in values.items():
        times = (f"{x.median * 1e3:.3g}" for x in (read, ours))
        rows.append((name, *times, f"{ours.median / read.median:.2f}"))
    table(("", "one read, ms", "ours, ms", "x one read"), rows)

    by_name = {case: {c.name: c for c in contestants} for case, contestants in results.items()}
    checks = targets(by_name, joint_temporaries(cases.CASES["subwords"]))
    report_targets(checks)
    groups = {"value_and_gradient": results, "value": values}
    save(args, load, checks, groups, versions=torch.versions if torch else None)


if __name__ == "__main__":
    main()
