"""Short runs of the fuzzer of properties: it passes, makes failures small, and finds answers that are broken."""

import argparse
import pathlib
import sys

import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import batches
import family

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fuzz"))
import fuzz_properties

pytestmark = pytest.mark.slow


def test_random_problems(monkeypatch, capsys):
    """A few programs of a seed of their own."""
    monkeypatch.setattr(fuzz_properties, "BATCHES", 2)
    assert fuzz_properties.main(["--seed", "18", "--examples", "4"]) == 0, capsys.readouterr().out


def test_search_makes_a_failure_small(capsys):

    def check(example):
        assert len(example) < 3

    options = argparse.Namespace(seconds=20, seed=0, examples=200)
    assert fuzz_properties.search(st.lists(st.integers()), check, options) == 1
    assert "example=[0, 0, 0]" in capsys.readouterr().out


BREAKS = {
    "loss is not finite": lambda p, a: a[0].__setitem__(0, np.nan),
    "loss below 0": lambda p, a: a[0].__setitem__(0, -1),
    "gradient of a softmax": lambda p, a: a[1].__setitem__((0, 0, 0, 0), 0.5),
    "gradient outside the lengths": lambda p, a: a[1].__setitem__((~batches.inside(p)).nonzero(), 1e-30),
    "posterior of label not in": lambda p, a: a[2][1].__setitem__((0, 0, 0), 1.5),
    "posteriors of a label": lambda p, a: a[2][1].__setitem__((slice(None), slice(None), 0), 0),
    "best path above": lambda p, a: a[3].score.__setitem__(0, 1),
    "frames outside": lambda p, a: a[3].frames.__setitem__((slice(None), 0), 99),
    "expected": lambda p, a: a[0].__setitem__(slice(None), a[0] * 1.001),
}


@pytest.mark.parametrize("text", BREAKS)
def test_the_fuzzer_finds(monkeypatch, text):
    """Each property fails for an answer that breaks it."""
    draw, rng = fuzz_properties.Draw(family.RNNT), np.random.default_rng(0)
    right = fuzz_properties.program(draw)

    def broken(p):
        answer = jax.tree.map(np.array, right(p))
        BREAKS[text](p, answer)
        return answer

    monkeypatch.setattr(fuzz_properties, "program", lambda d: broken)
    found = [x for number in range(2) for x in fuzz_properties.failures_of_batch(draw, rng, number, size=64)]
    assert any(text in x for x in found), found
