"""The recipes of examples/recipes: short, listed, and they run. `make recipes` checks their figures."""

import re
import subprocess
import sys

import pytest

import losses

FOLDER = losses.ROOT / "examples/recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
SHORT = {"steps": 2, "mwer-steps": 2, "tuning-steps": 2, "student-steps": 2, "lines": 20}


@pytest.mark.parametrize("name", RECIPES)
def test_page_of_code(name):
    """Fewer than 150 lines, with the command that runs it, and a row in the table."""
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) < 150
    assert f"python examples/recipes/{name}.py" in text.split('"""')[1]
    assert f"[{name}]({name}.py)" in (FOLDER / "README.md").read_text()


def test_table():
    """Every row is a recipe."""
    rows = re.findall(r"^\| \[(\w+)\]", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == RECIPES and len(rows) >= 9


def run(tmp_path, name, *options):
    command = [sys.executable, FOLDER / f"{name}.py", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)


def test_options(tmp_path):
    done = run(tmp_path, "latency", "--help")
    assert done.returncode == 0 and "--tuning-steps" in done.stdout
    done = run(tmp_path, "noisy_transcripts", "--error", "lost")
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("--error must be one of deleted, inserted")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_few_steps(tmp_path, name):
    """The program comes to its figure, whose limit a model without training may miss."""
    text = (FOLDER / f"{name}.py").read_text()
    options = [f"--{key}={value}" for key, value in SHORT.items() if f"{key.replace('-', '_')}=" in text]
    done = run(tmp_path, name, *options)
    lines = done.stderr.strip().splitlines()
    assert "Traceback" not in done.stderr and " (at most " in done.stdout, done.stderr
    assert done.returncode == 0 or re.search(r" is above -?[\d.]+$", lines[-1]), lines[-1]
