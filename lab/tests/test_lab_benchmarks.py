"""Does the soak run, and has gpu.sh what it runs? Everything but time, without a GPU."""

import os
import re
import subprocess
import sys

import project
from programs import environment, run

HERE = project.ROOT / "lab/benchmarks"


def test_soak():
    """In JAX's default configuration."""
    quick = environment(JAX_DISABLE_MOST_OPTIMIZATIONS="1", XLA_FLAGS=os.environ["XLA_FLAGS"])
    run(HERE / "soak.py", "--steps", "20", "--kinds", "jit", "eager", env=quick, timeout=900)


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
    document = (project.ROOT / "lab/cuda.md").read_text().split("\n## Launches of a search")[0]
    document = document.replace("memcheck, racecheck | 20 each", "memcheck | 20")
    rows = dict(re.findall(r"^\| (\w+) \| (\d+) \|", document, re.M))
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
