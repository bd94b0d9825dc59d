"""Runs the tests on the wheels of one build, under several versions of JAX and Python.

    python lab/release/matrix.py [--wheels dist] [--only oldest ... | JAX:PYTHON[:WHEEL] ...] [--full]

A row is a fresh environment, filled from wheels alone with no compiler on the PATH. It runs the selftest and some
tests, or the suite (--full), and prints its line of the table in README.md beside this file. A row whose interpreter is
not on this machine is left out, and named.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import sys
import time

from wheels import ROOT, interpreters, run

# Each jax is the last of its minor version. A wheel is the interpreter's own, or "pure", which fits all.
ROWS = [
    ("0.6.2", "3.11", "own"),
    ("0.7.2", "3.12", "own"),
    ("0.8.3", "3.12", "own"),
    ("0.9.2", "3.13", "own"),
    ("0.10.2", "3.11", "own"),
    ("0.11.2", "3.12", "own"),
    ("0.12.0.1", "3.13", "own"),
    ("0.12.0.1", "3.14", "own"),
    ("0.12.0.1", "3.14t", "own"),
    ("0.12.0.1", "3.15", "own"),
    ("0.12.0.1", "3.15t", "own"),
    ("0.12.0.1", "3.13", "pure"),
]
NAMES = {
    "oldest": ROWS[0],
    "newest": ("0.12.0.1", "3.13", "own"),
    "free-threaded": ("0.12.0.1", "3.14t", "own"),
    "pure": ROWS[-1],
}

# What depends on JAX most: values, gradients, jit, vmap, sharding, export and a search.
QUICK = {
    "losses/test_values": ["every_loss"],
    "losses/test_gradients": ["cotangents_that_are_not_finite", "vjp_called_twice"],
    "transforms/test_jit": ["changing_lengths_and_labels_compiles_nothing", "inside_control_flow"],
    "transforms/test_vmap": ["vmap_and_nested_vmap", "options_mapped"],
    "transforms/test_sharding": ["batch_sharded", "shard_map", "gradient_inside"],
    "transforms/test_export": ["round_trip", "platforms"],
    "decode/test_decode": ["beam_is_the_enumeration"],
    "kernels/test_threads": [""],
}
HEADER = "| jax | Python | wheel | kernels | tests |\n|---|---|---|---|---|"


def wheel_for(folder, python, wheel):
    version = python.replace(".", "")
    own = f"cp{version.rstrip('t')}-cp{version}-manylinux*{os.uname().machine}"
    tag = "py3-none-any" if wheel == "pure" else own
    found = sorted(folder.glob(f"jax_rnnt-*-{tag}.whl"))
    if len(found) != 1:
        sys.exit(f"expected one wheel {tag} in {folder}, got {[f.name for f in found]}: run `make wheels`")
    return found[0]


def row(jax, python, wheel, interpreter, wheels, full):
    """A line of the table."""
    folder = ROOT / f"build/matrix/{jax}-{python}-{wheel}"
    uv = shutil.which("uv", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}") or sys.exit("no uv: run `make setup`")
    run(uv, "venv", "--clear", "--python", interpreter, folder)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CXX", "CUDACXX")}
    env |= {"PATH": str(folder / "bin"), "JAX_PLATFORMS": "cpu"}
    keywords = {"env": env, "cwd": folder}
    file = wheel_for(wheels, python, wheel)
    needed = f"jax_rnnt[test] @ {file.as_uri()}"
    options = ["--only-binary", ":all:", "--python", folder / "bin/python"]
    run(uv, "pip", "install", *options, f"jax=={jax}", needed, **keywords)
    site = "import jax_rnnt, pathlib; print(pathlib.Path(jax_rnnt.__file__).parents[1])"
    env["JAX_RNNT_INSTALLED"] = run(folder / "bin/python", "-W", "ignore", "-c", site, **keywords).strip()
    require = "" if wheel == "pure" else "cpu"
    program = [folder / "bin/python", "-W", "ignore", "-m", "jax_rnnt", "--json"]
    info = json.loads(run(*program, "info", **keywords))
    run(*program, "selftest", "--require", require, **keywords)
    instructions = "none"
    if require:
        env["JAX_RNNT_REQUIRE"] = require
        instructions = instruction_set(info)
    tests = [f"tests/{file}.py::test_{name}".removesuffix("::test_") for file, names in QUICK.items() for name in names]
    if full:
        # Not those of benchmarks: they need the shell, which is not on the PATH.
        tests = ["-n", "auto", "--dist", "worksteal", "--ignore=tests/tools/test_benchmarks.py"]
    else:
        other = "kernel" if wheel == "pure" else "reference"  # as a part of a test's name
        tests += ["-p", "no:xdist", "-k", f"not ({other}] or {other}-)"]
    if wheel == "pure":
        tests += ["-W", "default:jax_rnnt runs on its pure-JAX reference:RuntimeWarning"]
    if wheel != "pure" or full:  # where there are kernels, most tests of the reference are slow ones
        tests += ["-m", "not slow"]
    start = time.monotonic()
    text = run(folder / "bin/pytest", "-q", *tests, env=env, cwd=ROOT)
    print(f"{time.monotonic() - start:.0f} s: the tests of the next line", file=sys.stderr)
    tags = file.stem.split("-", 2)[2].rpartition("_" + os.uname().machine)[0] or "py3-none-any"
    version = info["versions"]["python"] + python[4:]  # t
    return f"| {info['versions']['jax']} | {version} | `{tags}` | {instructions} | {counts(text)} |"


def instruction_set(info):
    """Of the kernels; fails where the processor has a better one, as where a wheel does not know processors."""
    found = info["kernels"]["cpu"]
    flags = re.search(r"^flags\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    flags = set(flags[1].split()) if flags else set()
    wanted = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2"}, "portable": set()}
    best = next(name for name, needed in wanted.items() if needed <= flags)
    if found != best:
        sys.exit(f"the kernels run on {found}, this processor has {best}")
    return found


def counts(text):
    """`112 passed, 3 skipped` of pytest's last line."""
    return ", ".join(re.findall(r"\d+ (?:passed|skipped)", text.strip().splitlines()[-1]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--only", nargs="+", metavar="ROW", help=f"{', '.join(NAMES)}, or JAX:PYTHON[:WHEEL]")
    parser.add_argument("--full", action="store_true", help="the suite in place of some tests")
    options = parser.parse_args()
    rows = [NAMES.get(name) or (*name.split(":"), "own")[:3] for name in options.only or []] or ROWS
    known = interpreters()
    print(HEADER, flush=True)
    for jax, python, wheel in rows:
        interpreter = known.get(python)
        if interpreter is None:
            print(f"no Python {python} on this machine: jax {jax} is left out", file=sys.stderr)
            continue
        print(row(jax, python, wheel, interpreter, options.wheels.resolve(), options.full), flush=True)


if __name__ == "__main__":
    main()
