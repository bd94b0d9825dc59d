"""Feeds the CPU kernels' handlers with calls made from bytes (handlers.cc), under sanitizers.

First libFuzzer with AddressSanitizer and UndefinedBehaviorSanitizer, which looks for bytes that reach new code, then 16
threads at once with ThreadSanitizer. Needs a clang with libFuzzer, or a g++: then random bytes stand in for libFuzzer.
The exit code is not 0 if anything was found; the bytes of a crash lie in build/fuzz, and --bytes FILE repeats it.
"""

import argparse
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


def compiler() -> tuple[str, bool]:
    """A C++ compiler, and whether it has libFuzzer."""
    names = [os.environ.get("CLANGXX"), "clang++", *(f"clang++-{version}" for version in range(25, 13, -1))]
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return (found, True) if found else (os.environ.get("CXX", "g++"), False)


def jaxlib_headers() -> pathlib.Path:
    """XLA's FFI headers; nothing of jaxlib is imported."""
    import importlib.util

    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("fuzz.py needs the headers of jaxlib: run it by the Python of an environment with jax")
    return pathlib.Path(spec.submodule_search_locations[0]) / "include"


def read_by(out: pathlib.Path) -> list[pathlib.Path]:
    """The files that the compiler read for this object, by its note beside it."""
    note = out.with_suffix(".d").read_text().replace("\\\n", " ").partition(": ")[2]
    return [path for path in map(pathlib.Path, note.split()) if path.exists()]


def build(cxx: str, name: str, flags: list[str], link: list[str]) -> pathlib.Path:
    """The program, compiled where a source or a header is newer."""
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    sources = [(source, target) for source in KERNELS for target in TARGETS] + [(source, None) for source in OTHERS]
    objects = []
    for source, target in sources:
        out = folder / f"{pathlib.Path(source).stem}-{target or 'common'}.o"
        objects.append(out)
        if (
            out.exists()
            and out.with_suffix(".d").exists()
            and out.stat().st_mtime > max(path.stat().st_mtime for path in read_by(out))
        ):
            continue
        own = (
            [*TARGETS[target], f"-DJAX_RNNT_TARGET={target}", "-fno-math-errno", "-ffp-contract=fast"] if target else []
        )
        # Comparisons of the kernels' loops and of our own program are no hints, and a third of the time.
        if "-fsanitize=fuzzer-no-link" in flags and not source.endswith("/ffi.cc"):
            own.append("-fno-sanitize-coverage=trace-cmp")
        command = [
            cxx,
            "-std=c++17",
            "-O2",
            "-g1",
            "-MMD",
            "-w",
            "-fno-omit-frame-pointer",
            *flags,
            *own,
            f"-I{ROOT}",
            "-isystem",
        ]
        subprocess.run([*command, jaxlib_headers(), "-c", ROOT / source, "-o", out], check=True)
    program = folder / "handlers"
    subprocess.run([cxx, *flags, *link, *objects, "-o", program, "-pthread"], check=True)
    return program


def run(command: list, **environment: str) -> tuple[int, str]:
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, errors="replace")
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=["memory", "threads"])
    parser.add_argument("--bytes", type=pathlib.Path, help="repeats one call alone")
    options = parser.parse_args()
    cxx, has_fuzzer = compiler()
    # A call allocates some thirty times: no notes of who did (--bytes has them), and little freed memory kept.
    memory = {
        "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1:malloc_context_size=0:quarantine_size_mb=4",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    if symbolizer := shutil.which("llvm-symbolizer") or shutil.which(f"llvm-symbolizer{cxx.partition('++')[2]}"):
        memory |= {"ASAN_SYMBOLIZER_PATH": symbolizer, "UBSAN_SYMBOLIZER_PATH": symbolizer}
    failed = False
    if options.only != "threads":
        if has_fuzzer:
            program = build(cxx, "memory", [*MEMORY, "-fsanitize=fuzzer-no-link"], ["-fsanitize=fuzzer"])
        else:
            sys.exit("fuzz.py: no clang with libFuzzer was found: install clang, or name one in CLANGXX")
        if options.bytes:
            memory["ASAN_OPTIONS"] += ":malloc_context_size=20"
            code, output = run([program, options.bytes], JAX_RNNT_FUZZ_SHOW="1", **memory)
            print(output)
            return code
        corpus = BUILD / "corpus"
        corpus.mkdir(exist_ok=True)
        began = sum(os.times()[2:4])
        arguments = [f"-max_total_time={options.seconds:.0f}", f"-seed={options.seed}", "-max_len=512", "-timeout=1800"]
        arguments += [f"-artifact_prefix={BUILD}/", "-rss_limit_mb=4096", "-len_control=20", "-entropic=0"]
        code, output = run([program, *arguments, corpus], **memory)
        seconds = sum(os.times()[2:4]) - began
        calls = sum(map(int, (re.findall(r"(\d+) calls taken, (\d+) refused", output) or [(0, 0)])[0]))
        print(f"memory: {calls} calls in {seconds:.0f} CPU seconds, {calls / seconds:.0f} a second", flush=True)
        print("  " + "\n  ".join(re.findall(r"\d+ calls taken, \d+ refused|.*DONE.*", output)))
        if code:
            failed = True
            print(output[-8000:], file=sys.stderr)
    if options.only != "memory":
        flags = ["-fsanitize=thread", "-DJAX_RNNT_FUZZ_THREADS=16"]
        program = build(cxx, "threads", flags, [])
        code, output = run([program, f"{options.seconds}", f"{options.seed}"], TSAN_OPTIONS="halt_on_error=1")
        print(f"threads: {output.strip().splitlines()[-1] if code == 0 else 'FAILED'}", flush=True)
        if code:
            failed = True
            print(output[-8000:], file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
