"""Do the benchmarks measure what they say? Everything but time, on tiny problems and without a GPU."""

import dataclasses
import importlib
import json
import shlex
import sys

import numpy as np
import pytest

import project
from pages import defaults

HERE = project.ROOT / "benchmarks"
sys.path.append(str(HERE))
load = importlib.import_module


# ----------------------------------------------------------------------------------------------------------- measuring


def test_turns_and_aims():
    """The share decides whose turn it is; all end at the deadline; ratios are those of medians."""
    measure = load("measure")
    fast, slow = (measure.Contestant(name, lambda s=s: s) for name, s in (("fast", 1.0), ("slow", 2.0)))
    measure.take_turns([fast, slow], 4.0, 200)
    assert (len(fast.seconds), len(slow.seconds)) == (4, 3)
    assert measure.aim("slow / fast", slow, fast, "<= 1.5") == ("slow / fast", 2.0, 2.0, "<= 1.5", False)
    late = measure.Contestant("late", lambda: 1.0)
    measure.take_turns([late], 1e9, 200, deadline=0)
    assert len(late.seconds) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "bench --only tiny",
        "joint --librispeech --batches 1 --share 0.1 --shrink 40",
        "joint --only characters",
        "decode --only 'stateless 1' 'parakeet 1' --frames 8",
    ],
)
def test_runs(command, tmp_path, monkeypatch):
    """Contestants agree, and what is said to be written is there."""
    cases, small = load("cases"), {"characters": dict(B=2, T=30, U=20, V=16)}
    for name, more in (("LARGE", {}), ("JOINT", {"H": 8})):
        made = tuple(dataclasses.replace(x, **small.get(x.name, {}), **more) for x in getattr(cases, name))
        monkeypatch.setattr(cases, name, made)
    monkeypatch.setattr(cases, "CASES", {case.name: case for case in cases.LARGE})
    program, *arguments = shlex.split(f"{command} --quick --repeat 1 --output {tmp_path}/times.json")
    with defaults():
        assert not load(program).main(arguments)
    times = json.loads((tmp_path / "times.json").read_text())["times"]
    assert times and all(x["median_ms"] >= x["minimum_ms"] > 0 for rows in times.values() for x in rows.values())


def test_disagreement_is_found():
    measure = load("measure")
    first, second = (measure.Contestant(name, None, (1.0, np.ones(3) * x)) for name, x in (("a", 1), ("b", 1.1)))
    with pytest.raises(AssertionError, match="gradient of b"):
        measure.agree(first, [second], gradient=0.05)


def test_help_names_the_cases(capsys):
    """Names of cases hold a %, which argparse would format."""
    for name in ("bench", "joint", "decode"):
        with pytest.raises(SystemExit) as stopped:
            load(name).main(["--help"])
        assert stopped.value.code == 0 and "--only" in capsys.readouterr().out
