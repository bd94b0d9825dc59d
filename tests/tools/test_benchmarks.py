"""Do the benchmarks measure what they say? Everything but time, on tiny problems and without a GPU."""

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import losses

HERE = losses.ROOT / "benchmarks"
if not HERE.exists():
    pytest.skip("no benchmarks beside the tests", allow_module_level=True)


def load(name):
    """A program of benchmarks/ as a module."""
    sys.path.insert(0, str(HERE))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", HERE / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look it up
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HERE))
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "bench.py --only tiny",
        "bench.py --family --only characters",
        "joint.py --librispeech --batches 1 --share 0.1 --shrink 40",
        "joint.py --skip --steps 1",
        "decode.py --only 'stateless 1' --frames 8",
        "decode.py --only 'stateless 1' --frames 8 --rows",
        "soak.py --steps 20 --kinds jit eager",
        "gpu.py --dry-run --only tiny --budget 1000",
    ],
)
def test_a_run(tmp_path, command):
    """Contestants agree, and what is said to be written is there."""
    script, *arguments = shlex.split(command)
    if script in ("bench.py", "joint.py", "decode.py"):
        arguments += ["--quick", "--repeat", "1", "--output", str(tmp_path / "found.json")]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    run = functools.partial(subprocess.run, capture_output=True, text=True, timeout=600, check=False)
    done = run([sys.executable, HERE / script, *arguments], env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    if "Results" in done.stdout:
        times = json.loads((tmp_path / "found.json").read_text())["times"]
        assert all(row["median_ms"] >= row["minimum_ms"] > 0 for rows in times.values() for row in rows.values())


def test_tuning():
    """Each `#ifndef JAX_RNNT_` of the kernels is tried at half and twice its value."""
    tune = load("tune")
    names = set()
    for file in (HERE.parent / "xla_kernels/cuda").glob("*.cu*"):
        names |= set(re.findall(r"#ifndef (JAX_RNNT_\w+)", file.read_text()))
    found = tune.switches()
    assert set(found) == names and "JAX_RNNT_EMISSION_THREADS" in names
    rows = tune.builds(found)
    assert rows[0] == tune.Build() and len(rows) == len(set(rows))
    assert len(rows) == 1 + sum(1 + (default > 1) for default, _ in found.values())


def test_parts_fit_into_one_call():
    """Their time limits add up to less than the limit of the whole."""
    text = (HERE / "gpu.sh").read_text()
    parts = re.search(r"^PARTS=\((.*)\)$", text, re.M)[1].split()
    seconds = dict(re.findall(r"\[(\w+)\]=(\d+)", re.search(r"declare -A SECONDS_OF=\((.*?)\)\n", text, re.S)[1]))
    limit = int(re.search(r"DRY_RUN \? \d+ : (\d+)\)\)\}", text)[1])
    assert set(parts) == set(seconds) and sum(map(int, seconds.values())) <= limit < 600


def test_commands_in_the_text():
    """Pages and docstrings name programs of benchmarks/ and tools/ and targets of make that are there."""
    makefile = (HERE.parent / "Makefile").read_text()
    pages = [*HERE.parent.glob("*.md"), *HERE.parent.glob("docs/*.md"), HERE / "README.md"]
    for page in pages:
        text = page.read_text() if page.name != "CHANGELOG.md" else ""
        for name in re.findall(r"\b(?:benchmarks|tools/\w+)/\w+\.(?:py|sh|cu|c)\b", text):
            assert (HERE.parent / name).exists(), f"{page.name}: {name}"
        for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"
