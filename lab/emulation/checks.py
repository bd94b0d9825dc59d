"""Builds the CUDA kernels for the CPU and checks them there; needs a C++ compiler and nothing else.

There are four builds: plain, run in four orders of blocks and threads whose results must be the same bits;
AddressSanitizer with UndefinedBehaviorSanitizer; ThreadSanitizer; one whose products and sums are multiply-adds
wherever the compiler may, as those of nvcc are. The last three use smaller blocks, since GCC's ThreadSanitizer
distinguishes only 255 threads, and smaller blocks are faster. There, a group of lanes of the emission takes several
rows, and a block several sequences, as it does in large problems. Prints a line per run; the exit code is 1 if any
check fails. --quick: the plain build alone, in one order.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "emulation-check"
NAMES = "softmax_emission", "lattice", "skip_lattice", "joint", "devices"
KERNELS = tuple(f"xla_kernels/cuda/{name}.cu" for name in NAMES)
EMULATION = "lab/emulation/cuda_emulation.cc"
PROGRAMS = {
    "cuda_emulation_test": (EMULATION, "lab/emulation/cuda_emulation_test.cc"),
    "check": (EMULATION, "lab/emulation/check.cc", *KERNELS),
}
SOURCES = set().union(*PROGRAMS.values())
HEADERS = [
    *ROOT.glob("xla_kernels/c[ou]*/*.h"),
    *ROOT.glob("xla_kernels/cuda/*.cuh"),
    *ROOT.glob("lab/emulation/*.h"),
]
CXX = [*shlex.split(os.environ.get("CXX", "g++")), "-std=c++17", "-O1"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-unknown-pragmas"]
SMALL_BLOCKS = [
    "-DJAX_RNNT_EMISSION_THREADS=64",
    "-DJAX_RNNT_EMISSION_TEAMS=1",
    "-DJAX_RNNT_LATTICE_WARPS=4",
    "-DJAX_RNNT_LATTICE_COPIERS=2",
    "-DJAX_RNNT_LATTICE_NARROW=1",
    "-DJAX_RNNT_SKIP_THREADS=64",
    "-DJAX_RNNT_GRID_Y=2",
    "-DJAX_RNNT_JOINT_ROW_WARPS=1",
]
SANITIZE = "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"
# Products and sums as multiply-adds wherever the compiler may, as nvcc has it. GCC makes none at -O1 alone.
FUSE = ["-mfma"] if platform.machine() == "x86_64" else []
FUSE += ["-ffp-contract=fast", "-fexpensive-optimizations"]
WORKERS = max(1, min(8, len(os.sched_getaffinity(0))))


@dataclasses.dataclass(frozen=True)
class Mode:
    """One build and the orders in which it runs."""

    name: str
    flags: tuple[str, ...]
    orders: tuple[str, ...]


MODES = (
    Mode("plain", ("-ffp-contract=off",), ("forward", "reverse", "random:1", "random:2")),
    # -O1 would compile for 70 s more, and run for 20 s less. -g1: lines for reports; -g takes twice as long.
    Mode("asan", ("-O0", "-g1", *SANITIZE, *SMALL_BLOCKS), ("forward",)),
    # Copies count where they run: as late as may be, or at once.
    Mode("tsan", ("-g1", "-fsanitize=thread", *SMALL_BLOCKS), ("forward", "reverse")),
    Mode("fused", (*FUSE, *SMALL_BLOCKS), ("forward",)),
)
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
}


def compile_object(source: str, mode: Mode) -> pathlib.Path:
    """The object of a source, compiled unless it is newer than the source and all headers."""
    target = BUILD / mode.name / (pathlib.Path(source).name + ".o")
    path = ROOT / source
    newest = max(file.stat().st_mtime for file in [path, pathlib.Path(__file__), *HEADERS])
    if not target.exists() or target.stat().st_mtime < newest:
        target.parent.mkdir(parents=True, exist_ok=True)
        flags = [*WARNINGS, *mode.flags, f"-I{ROOT}", "-x", "c++"]
        subprocess.run([*CXX, *flags, "-c", path, "-o", target], check=True)
    return target


def build(modes: list[Mode], pool: concurrent.futures.Executor) -> None:
    """The programs of each mode: `check`, and the test of the emulation."""
    jobs = {(mode, source): pool.submit(compile_object, source, mode) for mode in modes for source in SOURCES}
    for mode in modes:
        for name, sources in PROGRAMS.items():
            objects = [jobs[mode, source].result() for source in sources]
            subprocess.run([*CXX, *mode.flags, *objects, "-o", BUILD / mode.name / name, "-pthread"], check=True)


def run(mode: Mode, name: str, order: str) -> tuple[int | None, str, float]:
    """Exit code of a program, or None after a timeout, its output, and how long it ran."""
    environment = {**os.environ, **ENVIRONMENT, "JAX_RNNT_EMULATION_ORDER": order}
    command, start = [BUILD / mode.name / name], time.monotonic()
    options = {"env": environment, "capture_output": True, "text": True, "errors": "replace", "timeout": 900}
    try:
        done = subprocess.run(command, check=False, **options)
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, output = None, ""
    return code, output, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the plain build alone, in one order")
    quick = parser.parse_args().quick
    modes = [dataclasses.replace(MODES[0], orders=MODES[0].orders[2:3])] if quick else [*MODES]
    start, failed, results = time.monotonic(), False, set()
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        build(modes, pool)
        print(f"built in {time.monotonic() - start:.1f} s", flush=True)
        calls = [(mode, "cuda_emulation_test", "forward") for mode in modes]
        calls += [(mode, "check", order) for mode in modes for order in mode.orders]
        for (mode, name, order), (code, output, seconds) in zip(calls, pool.map(run, *zip(*calls))):
            summary = next((line for line in output.splitlines() if " passed, " in line), "no result")
            print(f"{mode.name:6} {name:20} {order:10} {seconds:6.1f} s  {summary}", flush=True)
            if code != 0:
                failed = True
                print(f"exit code {code}\n{output}", file=sys.stderr)
            if mode.name == "plain" and name == "check":
                results.add(summary)
    if len(results) != 1:
        failed = True
        print("results depend on the order of blocks and threads", file=sys.stderr)
    print(f"{'FAILED' if failed else 'passed'} in {time.monotonic() - start:.1f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
