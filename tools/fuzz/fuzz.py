"""Feeds the CPU kernels' handlers with calls made from bytes (handlers.cc), under sanitizers.

First libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer, which looks for bytes that reach new code, then 16
threads at once with ThreadSanitizer. Needs a clang with libFuzzer; for the threads alone, any compiler.
The exit code is not 0 if anything was found; the bytes of a crash lie in build/fuzz, and --bytes FILE repeats it.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "fuzz"
TARGETS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
KERNELS = [f"xla_kernels/cpu/{name}.cc" for name in ("softmax_emission", "lattice", "skip_lattice")]
OTHERS = [f"xla_kernels/cpu/{name}.cc" for name in ("ffi", "dispatch", "wide_lattice")] + ["tools/fuzz/handlers.cc"]
MEMORY = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiler():
    """A clang with libFuzzer, or None."""
    names = [os.environ.get("CLANGXX"), "clang++", *(f"clang++-{version}" for version in range(25, 13, -1))]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def jaxlib_headers():
    """XLA's FFI headers; nothing of jaxlib is imported."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None:
        sys.exit("fuzz.py needs the headers of jaxlib: run it by the Python of an environment with jax")
    return pathlib.Path(spec.submodule_search_locations[0]) / "include"


def is_new(out):
    """Whether the object is newer than all that the compiler read for it, by its note beside it."""
    note = out.with_suffix(".d")
    if not (out.exists() and note.exists()):
        return False
    read = map(pathlib.Path, note.read_text().replace("\\\n", " ").partition(": ")[2].split())
    return out.stat().st_mtime > max(path.stat().st_mtime for path in read if path.exists())


def build(cxx, name, flags, link=()):
    """The program, compiled where a source or a header is newer."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    common = [cxx, "-std=c++17", "-O2", "-g1", "-MMD", "-w", "-fno-omit-frame-pointer", *flags, f"-I{ROOT}"]
    common += ["-isystem", jaxlib_headers()]
    objects = []
    sources = [(source, target) for source in KERNELS for target in TARGETS] + [(source, None) for source in OTHERS]
    for source, target in sources:
        objects.append(folder / f"{pathlib.Path(source).stem}-{target or 'common'}.o")
        own = [f"-DJAX_RNNT_TARGET={target}", "-fno-math-errno", "-ffp-contract=fast"] if target else []
        # Comparisons of the kernels' loops and of our own program are no hints, and a third of the time.
        if "-fsanitize=fuzzer-no-link" in flags and not source.endswith("/ffi.cc"):
            own.append("-fno-sanitize-coverage=trace-cmp")
        if not is_new(objects[-1]):
            own += TARGETS.get(target, [])
            subprocess.run([*common, *own, "-c", ROOT / source, "-o", objects[-1]], check=True)
    program = folder / "handlers"
    subprocess.run([cxx, *flags, *link, *objects, "-o", program, "-pthread"], check=True)
    return program


def run(command, **environment):
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace")
    return done.returncode, done.stdout + done.stderr


def memory(options):
    """libFuzzer under AddressSanitizer and UndefinedBehaviorSanitizer; its exit code."""
    if (cxx := compiler()) is None:
        sys.exit("fuzz.py: no clang with libFuzzer was found: install clang, or name one in CLANGXX")
    program = build(cxx, "memory", [*MEMORY, "-fsanitize=fuzzer-no-link"], ["-fsanitize=fuzzer"])
    # A call allocates some thirty times: no notes of who did (--bytes has them), and little freed memory kept.
    size = 20 if options.bytes else 0
    asan = f"detect_leaks=1:allocator_may_return_null=1:malloc_context_size={size}:quarantine_size_mb=4"
    environment = {"ASAN_OPTIONS": asan, "UBSAN_OPTIONS": "print_stacktrace=1"}
    if symbolizer := shutil.which("llvm-symbolizer") or shutil.which(f"llvm-symbolizer{cxx.partition('++')[2]}"):
        environment |= {"ASAN_SYMBOLIZER_PATH": symbolizer, "UBSAN_SYMBOLIZER_PATH": symbolizer}
    if options.bytes:
        code, output = run([program, options.bytes], JAX_RNNT_FUZZ_SHOW="1", **environment)
        print(output)
        return code
    corpus = BUILD / "corpus"
    corpus.mkdir(exist_ok=True)
    began = sum(os.times()[2:4])
    arguments = [f"-max_total_time={options.seconds:.0f}", f"-seed={options.seed}", "-max_len=512", "-timeout=1800"]
    arguments += [f"-artifact_prefix={BUILD}/", "-rss_limit_mb=4096", "-len_control=20", "-entropic=0"]
    code, output = run([program, *arguments, corpus], **environment)
    counts = re.search(r"(\d+) calls taken, (\d+) refused", output)
    calls = sum(map(int, counts.groups())) if counts else 0
    print(f"memory: {calls} calls in {sum(os.times()[2:4]) - began:.0f} CPU seconds", flush=True)
    if code:
        print(output[-8000:], file=sys.stderr)
    return code


def threads(options):
    """16 threads that call at once, under ThreadSanitizer; the exit code."""
    cxx = compiler() or os.environ.get("CXX", "g++")
    program = build(cxx, "threads", ["-fsanitize=thread", "-DJAX_RNNT_FUZZ_THREADS=16"])
    code, output = run([program, f"{options.seconds}", f"{options.seed}"], TSAN_OPTIONS="halt_on_error=1")
    print(f"threads: {output[-8000:] if code else output.strip().splitlines()[-1]}", flush=True)
    return code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["memory", "threads"])
    parser.add_argument("--bytes", type=pathlib.Path, help="repeats one call alone")
    options = parser.parse_args()
    if options.bytes:
        return memory(options)
    codes = [run(options) for run in (memory, threads) if options.only in (None, run.__name__)]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
