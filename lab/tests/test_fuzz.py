"""Short runs of the fuzzers: they pass, make failures small, and find answers that are broken."""

import pathlib
import re
import sys

import jax
import numpy as np
import pytest

import batches
import door
import family

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fuzz"))
import fuzz
import fuzz_properties


def test_random_problems(monkeypatch, capsys):
    """A few programs of a seed of their own."""
    monkeypatch.setattr(fuzz_properties, "BATCHES", 2)
    assert fuzz_properties.main(["--seed", "18", "--examples", "4"]) == 0, capsys.readouterr().out


BREAKS = {
    "loss": lambda p, a: a[0].__setitem__(0, a[0][0] * 1.001),
    "gradient": lambda p, a: a[1].__setitem__((0, 0, 0, 0), 0.5),
    "gradient outside the lengths": lambda p, a: a[1].__setitem__((~batches.inside(p)).nonzero(), 1e-30),
    "posterior of label": lambda p, a: a[2][1].__setitem__((0, 0, 0), 1.5),
    "best path above": lambda p, a: a[3].score.__setitem__(0, 1),
    "frames outside": lambda p, a: a[3].frames.__setitem__((slice(None), 0), 99),
}


@pytest.mark.parametrize("text", BREAKS)
def test_the_fuzzer_finds(monkeypatch, text):
    """Whatever of an answer is wrong."""
    draw, rng = fuzz_properties.Draw(family.RNNT), np.random.default_rng(0)
    right = fuzz_properties.program(draw)

    def broken(p):
        answer = jax.tree.map(np.array, right(p))
        BREAKS[text](p, answer)
        return answer

    monkeypatch.setattr(fuzz_properties, "program", lambda d: broken)
    found = [x for _ in range(2) for x in fuzz_properties.failures_of_batch(draw, rng)]
    assert any(x.startswith(text) for x in found), found


needs_door = pytest.mark.skipif(not door.native(), reason="the door leads to the kernels of the CPU platform")


@needs_door
@pytest.mark.parametrize("threads", ["1", "3"])
def test_random_calls(threads, capsys):
    """Most are taken."""
    assert fuzz.main(["--seconds", "1", "--threads", threads]) == 0
    taken, refused = map(int, re.match(r"(\d+) calls taken, (\d+) refused", capsys.readouterr().out).groups())
    assert taken > refused > 10


@needs_door
@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda frame: None, "result 0 was not written"),
        (lambda frame: door._errors.update({99: b"no"}) or 99, "refused a call that fits together: no"),
    ],
)
def test_handlers_that_the_fuzzer_finds(monkeypatch, capsys, broken, text):
    monkeypatch.setattr(door, "_handler", lambda target: broken)
    assert fuzz.main(["--seconds", "5"]) == 1
    assert f"FAILED: {text}\nCall(kernel=" in capsys.readouterr().out
