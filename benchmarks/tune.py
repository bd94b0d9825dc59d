"""Builds the CUDA kernels with other constants, and times all builds beside a copy on one GPU.

    python benchmarks/tune.py --build                 # compiles only; needs nvcc and no GPU
    python benchmarks/tune.py                         # compiles what is older than the sources, times, prints
    python benchmarks/tune.py --set JAX_RNNT_EMISSION_THREADS=128,512,1024
    python benchmarks/tune.py --dry-run               # emulated kernels, one tiny shape, three builds

The constants are those of the sources: every `#define JAX_RNNT_NAME NUMBER` in xla_kernels/cuda behind an `#ifndef`. A
build changes one of them, by default to half and to twice its value. The first build changes none. It runs once
more at the end, to show how far the clock drifts. Where ncu is installed and may read the counters, it adds the
shares of issue slots and of DRAM bandwidth for each kernel of the first build, instructions issued a cycle, and what L1
did: requests, sectors, lines looked up, wavefronts.
"""

import argparse
import concurrent.futures
import csv
import dataclasses
import datetime
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import cases

ROOT = Path(__file__).resolve().parents[1]
KERNELS = tuple(f"xla_kernels/cuda/{name}.cu" for name in ("softmax_emission", "lattice", "skip_lattice"))
PARTS = dict(zip(KERNELS, ("emission", "lattice", "skip")))
DEVICES = "xla_kernels/cuda/devices.cu"
PROGRAM, EMULATION = "benchmarks/tune.cu", "tools/emulation/cuda_emulation.cc"
SWITCH = re.compile(r"#ifndef (JAX_RNNT_\w+)\n#define \1 (\d+)\n")
COUNTERS = {
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots, %",
    "sm__inst_issued.avg.per_cycle_active": "issued a cycle",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, %",
    "gpu__time_duration.sum": "ns",
}
# What L1 does for loads of global memory: whether rows of a lane each, spread over many lines, would take a cycle a
# line. Left out where ncu does not know one of these names.
GLOBAL_LOADS = "pipe_lsu_mem_global_op_ld.sum"
L1 = {
    f"l1tex__t_requests_{GLOBAL_LOADS}": "L1 requests",
    f"l1tex__t_sectors_{GLOBAL_LOADS}": "sectors",
    f"l1tex__t_set_accesses_{GLOBAL_LOADS}": "lines looked up",
    f"l1tex__t_output_wavefronts_{GLOBAL_LOADS}": "wavefronts behind the tags",
    "l1tex__data_pipe_lsu_wavefronts.sum": "wavefronts of data",
    "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active": "L1 data, %",
    "l1tex__lsuin_requests.avg.pct_of_peak_sustained_active": "LSU requests, %",
}


@dataclasses.dataclass(frozen=True)
class Build:
    """`changes`: (switch, value) pairs; `part` of the kernels that they concern."""

    changes: tuple[tuple[str, int], ...] = ()
    part: str = "all"

    @property
    def name(self):
        return ", ".join(f"{switch.removeprefix('JAX_RNNT_')}={value}" for switch, value in self.changes) or "as it is"

    @property
    def flags(self):
        return [f"-D{switch}={value}" for switch, value in self.changes]


def switches(root=ROOT):
    """{switch: (default, files of xla_kernels/cuda that define it)}"""
    found = {}
    for file in sorted((root / "xla_kernels/cuda").glob("*.cu*")):
        for name, value in SWITCH.findall(file.read_text()):
            default, files = found.setdefault(name, (int(value), []))
            if default != int(value):
                raise ValueError(f"{name} is {default} in {files[0]} and {value} in {file.name}")
            files.append(file.name)
    return found


def _includes(source):
    return re.findall(r'#include "xla_kernels/(.*)"', (ROOT / source).read_text())


def builds(found, chosen=(), most=None):
    """The build as it is, then one for each other value of each switch. `chosen`: "NAME=VALUE,VALUE"."""
    values = {name: (default // 2, default * 2) for name, (default, _) in found.items()}
    if chosen:
        values = {}
        for text in chosen:
            name, _, numbers = text.partition("=")
            if name not in found:
                raise ValueError(f"--set: there is no switch {name}; there are {', '.join(found)}")
            values[name] = tuple(map(int, numbers.split(",")))
    rows = [Build()]
    for name, several in values.items():
        default, files = found[name]
        # A header is of the kernels that include it.
        parts = {
            PARTS[k] for k in KERNELS for file in files if k.endswith(f"/{file}") or f"cuda/{file}" in _includes(k)
        }
        part = parts.pop() if len(parts) == 1 else "all"
        rows += [Build(((name, value),), part) for value in several if value > 0 and value != default]
    return rows[:most]


class Compiler:
    """Compiles each file once for each set of flags that concerns it."""

    def __init__(self, args):
        self.dry_run, self.folder = args.dry_run, args.folder
        if args.dry_run:
            self.command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-w", f"-I{ROOT}"]
            self.sources = (*KERNELS, DEVICES, PROGRAM, EMULATION)
        else:
            architecture = args.architecture
            code = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
            self.command = [args.nvcc, "-std=c++17", "-O3", "-lineinfo", "-w", f"-I{ROOT}", code]
            self.command += ["--extended-lambda", "--expt-relaxed-constexpr"]
            self.sources = (*KERNELS, DEVICES, PROGRAM)

    def program(self, build):
        return self.folder / re.sub(r"\W+", "_", build.name)

    def is_new(self, build):
        """Whether there is a program newer than every source."""
        program = self.program(build)
        sources = [ROOT / PROGRAM, *(path for path in (ROOT / "xla_kernels").rglob("*.*"))]
        return program.exists() and program.stat().st_mtime > max(path.stat().st_mtime for path in sources)

    def run(self, *command):
        subprocess.run([*map(str, command)], check=True, capture_output=True, text=True)

    def compile(self, source, flags):
        target = self.folder / (re.sub(r"\W+", "_", " ".join((source, *flags))) + ".o")
        self.run(*self.command, *flags, *(("-x", "c++") if self.dry_run else ("-x", "cu")), "-c", ROOT / source,
                 "-o", target)  # fmt: skip
        return target

    def all(self, rows):
        """[(build, what went wrong or None)]"""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not rows:
            return []
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = {}
            for build in rows:
                for source in self.sources:
                    concerned = source in KERNELS and build.part in ("all", PARTS.get(source))
                    key = source, tuple(build.flags if concerned else ())
                    if key not in jobs:
                        jobs[key] = pool.submit(self.compile, source, key[1])
            done = []
            for build in rows:
                try:
                    objects = []
                    for source in self.sources:
                        flagged = jobs.get((source, tuple(build.flags)))
                        objects.append((flagged or jobs[source, ()]).result())
                    self.run(self.command[0], *objects, "-o", self.program(build), *(["-pthread"] * self.dry_run))
                    done.append((build, None))
                except subprocess.CalledProcessError as error:
                    done.append((build, (error.stderr or "").strip()[-300:] or str(error)))
        return done


def shapes(args):
    found = cases.GPU_DRY_RUN[:1] if args.dry_run else cases.GPU_LARGE
    return [str(x) for c in found for x in (c.name, c.B, c.T, c.U, c.V)]


def measure(program, part, args, timeout):
    """{(stage, shape, dtype): (ms, share of the copy)} of one run, and the copy's GB/s."""
    command = [program, part, "1" if args.dry_run else "3", *shapes(args)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=timeout).stdout
    rows = [line.split("\t") for line in text.splitlines()]
    times = {(stage, shape, dtype): (float(ms), float(share)) for stage, shape, dtype, ms, _, share in rows}
    (copy_ms, _), (bytes_,) = times.pop(("copy", "1 GiB", "float32")), (float(r[4]) for r in rows if r[0] == "copy")
    return times, bytes_ / copy_ms / 1e6


def counters(program, args, timeout):
    """[(kernel, {counter: value})] of one run of every kernel under ncu, or why not."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "ncu is not installed"
    kernels = "regex:Forward|Backward|Skew|Sweep|Total|Loss|ReadFromL1"
    end = time.monotonic() + timeout
    for metrics in ((*COUNTERS, *L1), tuple(COUNTERS)):
        command = [ncu, "--csv", "--print-units", "base", "--clock-control", "none", "--metrics", ",".join(metrics)]
        command += ["--kernel-name", kernels, str(program), "all", "0", *shapes(args)]
        try:
            left = max(1, end - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return f"ncu took more than {timeout:.0f} s"
        lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
        if not done.returncode and lines:
            break
    else:
        return (done.stdout + done.stderr).strip()[-300:]
    rows = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = rows.setdefault(row["ID"], (row["Kernel Name"][:80], {}))
        kernel[1][row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return list(rows.values())


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def report(record):
    """Markdown: times as they are, what each change does to them, and the counters."""
    first = record["runs"][0]["times"] if record["runs"] else {}
    text = [f"Copy: {', '.join(str(round(r['copy_gb_per_s'])) for r in record['runs'])} GB/s\n"]
    rows = [(key, f"{ms:.3f}", f"{share:.2f}") for key, (ms, share) in first.items()]
    text.append(table(("as it is", "ms", "of the copy"), rows))
    rows = []
    for run in record["runs"][1:]:
        ratios = {key: ms / first[key][0] for key, (ms, _) in run["times"].items() if key in first}
        best, worst = (f(ratios, key=ratios.get) for f in (min, max))
        mean = sum(ratios.values()) / len(ratios)
        rows.append(
            (run["build"], f"{mean:.3f}", f"{ratios[best]:.3f} {best}", f"{ratios[worst]:.3f} {worst}"),
        )
    text.append(table(("time / as it is", "mean", "best", "worst"), rows))
    if isinstance(record["counters"], str):
        text.append(f"No counters: {record['counters']}\n")
    else:
        for names in (COUNTERS, L1):
            found = [(name, [c.get(k, float("nan")) for k in names]) for name, c in record["counters"]]
            text.append(table(("kernel", *names.values()), [(name, *(f"{x:.1f}" for x in xs)) for name, xs in found]))
    text += [f"{name}: {why}" for name, why in record["left_out"]]
    return "\n".join(text)


def gpu(field):
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="compile only")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE,...", help="only these switches and values")
    parser.add_argument("--most", type=int, help="builds at most (dry run: 3)")
    parser.add_argument("--budget", type=float, default=600, help="seconds of all runs (%(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="emulated kernels on a tiny shape; keeps nothing")
    parser.add_argument("--architecture", help="compute capability without the dot (that of the GPU)")
    parser.add_argument("--nvcc", default=shutil.which("nvcc"))
    parser.add_argument("--folder", type=Path, default=ROOT / "build/tune", help="of the builds (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder of DATE-DEVICE-tune.json (none)")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.most = args.most or 3
    elif args.nvcc is None:
        parser.error("no nvcc on the path; name one with --nvcc")
    elif args.architecture is None:
        args.architecture = gpu("compute_cap").replace(".", "")
    args.folder = args.folder / ("dry-run" if args.dry_run else f"sm_{args.architecture}")
    return args


def main(argv=None):
    args, start = parse(argv), time.monotonic()
    compiler, rows = Compiler(args), builds(switches(), args.set, args.most)
    compiled = compiler.all([build for build in rows if not compiler.is_new(build)])
    failed = dict(compiled)
    compiled = [(build, failed.get(build)) for build in rows]
    left_out = [(build.name, f"does not compile: {why}") for build, why in compiled if why]
    good = [build for build, why in compiled if not why]
    for name, why in left_out:
        print(f"{name}: {why}", file=sys.stderr)
    if args.build or Build() not in good:
        return int(Build() not in good)

    now = datetime.datetime.now(datetime.UTC)
    device = "none" if args.dry_run else gpu("name")
    record = {"date": now.isoformat(timespec="seconds"), "device": device, "dry_run": args.dry_run, "runs": []}
    record |= {"commit": os.environ.get("COMMIT"), "counters": "the first build did not run", "left_out": left_out}
    for build in [*good, Build()]:
        left = args.budget - (time.monotonic() - start)
        if left < 3:
            left_out.append((build.name, "no time left"))
            continue
        try:
            times, bandwidth = measure(compiler.program(build), build.part, args, left)
        except subprocess.SubprocessError as error:
            left_out.append((build.name, (getattr(error, "stderr", "") or str(error)).strip()[-300:]))
            continue
        times = {", ".join(key): value for key, value in times.items()}
        name = "as it is, once more" if record["runs"] and build == Build() else build.name
        record["runs"].append({"build": name, "copy_gb_per_s": bandwidth, "times": times})
        if args.dry_run:
            record["counters"] = "a dry run"
        elif len(record["runs"]) == 1:
            record["counters"] = counters(compiler.program(build), args, max(1, min(30, args.budget / 3)))
    print(report(record))
    if args.output and not args.dry_run:
        name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / f"{now:%Y-%m-%d}-{name}-tune.json").write_text(json.dumps(record, indent=1) + "\n")
    return int(not record["runs"] or (args.dry_run and bool(left_out)))


if __name__ == "__main__":
    sys.exit(main())
