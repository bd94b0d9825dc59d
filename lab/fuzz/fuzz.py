"""Feeds the CPU kernels' handlers with random calls (handlers.cc), under sanitizers; needs a C++ compiler.

First on one thread with AddressSanitizer and UndefinedBehaviorSanitizer, then on 16 threads with ThreadSanitizer. The
exit code is not 0 if anything was found; the failed call is printed, and the same seed repeats it.
"""

import argparse
import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGETS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
KERNELS = [f"xla_kernels/cpu/{name}.cc" for name in ("softmax_emission", "lattice", "skip_lattice")]
OTHERS = [f"xla_kernels/cpu/{name}.cc" for name in ("ffi", "dispatch", "wide_lattice")] + ["lab/fuzz/handlers.cc"]
# Threads and sanitizers of each run.
RUNS = {
    "memory": (1, ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]),
    "threads": (16, ["-fsanitize=thread"]),
}


def build(name, flags):
    """The program, compiled where any source or header is newer."""
    jaxlib = importlib.util.find_spec("jaxlib")  # XLA's headers; nothing of it is imported
    if jaxlib is None:
        sys.exit("fuzz.py needs the headers of jaxlib: run it by the Python of an environment with jax")
    folder = ROOT / "build/fuzz" / name
    folder.mkdir(parents=True, exist_ok=True)
    cxx = os.environ.get("CXX", "g++")
    common = [cxx, "-std=c++17", "-O2", "-g1", "-w", "-fno-omit-frame-pointer", *flags, f"-I{ROOT}"]
    common += ["-isystem", pathlib.Path(jaxlib.submodule_search_locations[0]) / "include"]
    read = [*ROOT.glob("xla_kernels/c*/*"), *ROOT.glob("lab/fuzz/*.[ch]*")]
    newest = max(path.stat().st_mtime for path in read)
    objects = []
    for source, target in [(s, t) for s in KERNELS for t in TARGETS] + [(s, None) for s in OTHERS]:
        objects.append(folder / f"{pathlib.Path(source).stem}-{target or 'common'}.o")
        own = []
        if target:
            own = [f"-DJAX_RNNT_TARGET={target}", "-fno-math-errno", "-ffp-contract=fast", *TARGETS[target]]
        elif "dispatch" in source:
            own = [f"-DJAX_RNNT_HAS_{target}" for target in TARGETS]
        if not objects[-1].exists() or objects[-1].stat().st_mtime < newest:
            subprocess.run([*common, *own, "-c", ROOT / source, "-o", objects[-1]], check=True)
    subprocess.run([cxx, *flags, *objects, "-o", folder / "handlers", "-pthread"], check=True)
    return folder / "handlers"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=RUNS)
    options, failed = parser.parse_args(), False
    environment = os.environ | {
        "ASAN_OPTIONS": "allocator_may_return_null=1:malloc_context_size=0:quarantine_size_mb=4",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    for name in [options.only] if options.only else RUNS:
        threads, flags = RUNS[name]
        command = [build(name, flags), f"{options.seconds}", f"{options.seed}", f"{threads}"]
        print(f"{name}:", flush=True)
        failed |= bool(subprocess.run(command, env=environment).returncode)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
