"""Do the studies measure what they say, and has gpu.sh what it runs? Everything but time, without a GPU."""

import importlib
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import project
from programs import environment, run

HERE = project.ROOT / "lab/benchmarks"


@pytest.fixture
def load(monkeypatch):
    """A program of lab/benchmarks as a module."""
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module


def test_errors_of_rivals(load):
    """One label is wrong, one missing, one extra; utterances that were not decoded do not count."""
    rivals = load("rivals")
    found = [[1, 2], [3], [7, 8, 9]]
    assert rivals.error_rate(found, [[1, 4], [3, 5], [7, 9]]) == pytest.approx(100 * 3 / 6)
    assert rivals.error_rate(found[:1], [[1, 4], [3, 5], [7, 9]]) == pytest.approx(100 / 2)


@pytest.mark.parametrize("kind", ["stateless", "lstm"])
def test_planted_models_of_rivals(load, kind):
    """Predictors of standard architecture nearly forbid the last label and its rivals, and nothing after the start."""
    rivals = load("rivals")
    forbid = 0.05 * np.random.default_rng(0).standard_normal((6, 16), np.float32)
    forbid[-1] = 0
    predictor, _ = getattr(rivals, kind)(forbid, 0)
    state = predictor.initial(1)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for label in (predictor.start, 3, 1):
            rows, state = predictor.step(state, np.array([label], np.int32))
            np.testing.assert_allclose(rows[0], forbid[label], atol=0.05)
            assert label == predictor.start or np.corrcoef(rows[0], forbid[label])[0, 1] > 0.9


def test_help(load, capsys):
    """Of the one that needs packages of rivals: without them."""
    with pytest.raises(SystemExit) as ended:
        load("rivals").main(["--help"])
    assert ended.value.code == 0 and "--workdir" in capsys.readouterr().out


RUNS = """
import importlib, shlex, sys
sys.path.insert(0, sys.argv[1])
for command in sys.argv[2:]:
    print("RUN", command, flush=True)
    name, *arguments = shlex.split(command)
    if importlib.import_module(name).main(arguments):
        sys.exit(f"failed: {command}")
"""


@pytest.mark.slow
def test_runs(tmp_path):
    """In one process, in JAX's default configuration."""
    commands = (
        f"ngram --tokens 400 --quick --repeat 1 --output {tmp_path}/ngram.json",
        "soak --steps 20 --kinds jit eager",
        "gpu --dry-run --only tiny --budget 1000",
        "gpu --dry-run --only tiny --once",
    )
    quick = environment(JAX_DISABLE_MOST_OPTIMIZATIONS="1", XLA_FLAGS=os.environ["XLA_FLAGS"])
    run(RUNS, HERE, *commands, env=quick, timeout=900)


# ------------------------------------------------------------------------------------------------------ parts of gpu.sh


def test_parts_fit_into_one_call():
    """In the order of what they teach first, with time limits that add up to less than the limit of the whole."""
    text = (HERE / "gpu.sh").read_text()
    parts = re.search(r"^PARTS=\((.*)\)$", text, re.M)[1].split()
    seconds = dict(re.findall(r"\[(\w+)\]=(\d+)", re.search(r"declare -A SECONDS_OF=\((.*?)\)\n", text, re.S)[1]))
    limit = int(re.search(r"DRY_RUN \? \d+ : (\d+)\)\)\}", text)[1])
    assert set(parts) == set(seconds) and sum(map(int, seconds.values())) <= limit < 600
    order = ["build", "check", "benchmark", "counters", "suite", "large", "memcheck", "racecheck", "example"]
    assert [part for part in parts if part in order] == order
    document = (project.ROOT / "docs/cuda.md").read_text()
    rows = dict(
        re.findall(r"^\| (\w+) \| (\d+) \|", document.replace("memcheck, racecheck | 20 each", "memcheck | 20"), re.M)
    )
    assert rows == {part: n for part, n in seconds.items() if part != "racecheck"}


def test_log_has_the_last_lines(tmp_path):
    """Whatever `tee` has not written when the parts are done would be lost."""
    copy = tmp_path / "lab/benchmarks"
    copy.mkdir(parents=True)
    script = (HERE / "gpu.sh").read_text()
    (copy / "gpu.sh").write_text(script.replace("  case $1 in\n", "  seq 20000\n  return 3\n  case $1 in\n", 1))
    done = subprocess.run(
        ["bash", copy / "gpu.sh", "--dry-run", "selftest", "example"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHON": sys.executable}, check=False,
    )  # fmt: skip
    log = (tmp_path / "build/gpu/dry-run/gpu.log").read_text()
    assert done.returncode == 1 and log == done.stdout
    assert log.count("20000\n") == 2 and re.search(r"selftest\t[\d.]+\t3\nexample\t[\d.]+\t3\n$", log)
    done = subprocess.run(
        ["bash", copy / "gpu.sh", "--dry-run", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "no such part: nothing" in done.stdout
