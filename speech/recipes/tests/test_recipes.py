"""The recipes: short, listed, and they run. `make recipes` checks their figures."""

import importlib
import pathlib
import re
import runpy
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1]
RECIPES = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
SHORT = {"steps": 2, "mwer-steps": 2, "tuning-steps": 2, "student-steps": 2, "lines": 20, "seeds": 1}


def test_pages_of_code():
    """Each has fewer than 150 lines, the command that runs it, and a row in the table."""
    rows = re.findall(r"^\| \[(\w+)\]\(\1\.py\)", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == RECIPES
    for name in RECIPES:
        text = (FOLDER / f"{name}.py").read_text()
        assert len(text.splitlines()) < 150 and f"python speech/recipes/{name}.py" in text.split('"""')[1]


def test_options(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, tmp_path, "latency", "--help") == 0 and "--tuning-steps" in capsys.readouterr().out
    status = run(monkeypatch, tmp_path, "noisy_transcripts", "--error", "lost")
    assert status.startswith("--error must be one of deleted, inserted")


def run(monkeypatch, tmp_path, name, *options):
    """The exit status of a recipe, or its message."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, options)])
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def small(monkeypatch):
    """Fewer lines, and a narrow model of one block, of the encoder that compiles in half of the time."""
    monkeypatch.syspath_prepend(FOLDER)
    files, digits = map(importlib.import_module, ("jax_rnnt_speech.config.files", "corpora.digits"))
    usual = files.read_file
    narrow = {"encoder": "convolutional", "width": 16, "blocks": 1, "channels": 2}
    monkeypatch.setattr(files, "read_file", lambda name: usual(name) | narrow)
    monkeypatch.setattr(digits, "LINES", {"train": 64, "valid": 32})


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_few_steps(tmp_path, monkeypatch, capsys, small, name):
    """The program comes to its figure, whose limit a model without training may miss."""
    text = (FOLDER / f"{name}.py").read_text()
    options = [f"--{key}={value}" for key, value in SHORT.items() if f"{key.replace('-', '_')}=" in text]
    status = run(monkeypatch, tmp_path, name, *options)
    assert " (at most " in capsys.readouterr().out
    assert status is None or re.search(r" is above -?[\d.]+$", status), status
