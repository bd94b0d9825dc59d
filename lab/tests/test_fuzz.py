"""Random problems for the losses, and random calls of the handlers: some of each, and answers that are broken."""

import dataclasses
import os
import pathlib
import re
import sys

import numpy as np
import pytest

import batches
import compare
import door
import family
import layout_table
from jax_rnnt import _checks

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fuzz"))
import fuzz

# DRAWS=400 pytest lab/tests/test_fuzz.py: more of them.
DRAWS, SIZE = int(os.environ.get("DRAWS", 6)), 200
OPTIONS = {"clamp": 0.25, "fastemit_lambda": 0.5, "delay_penalty": 0.0625, "fused_log_softmax": False, "blank": 4}


@pytest.mark.parametrize("seed", range(DRAWS))
def test_random_problems(seed):
    """Loss, layout, implementation, type and options are drawn, and so are the sequences; the truth is in float64.

    Other files have each property by itself: test_values.py, test_questions.py, test_promises.py, test_layouts.py.
    """
    rng = np.random.default_rng(seed)
    draw = lambda some: some[rng.integers(len(some))]
    loss, name, dtype = draw(family.LOSSES), draw(layout_table.NAMES[:4]), draw(_checks.FLOATS)
    implementation, scale = draw(["kernel", "kernel", "reference"]), 10.0 ** rng.uniform(-2, 0.5)
    options = {key: x for key, x in OPTIONS.items() if rng.random() < 0.5}
    lengths = rng.integers(1, 7, SIZE), rng.integers(0, 5, SIZE)
    p = batches.problem(SIZE, 6, 4, 7, loss=loss, dtype=dtype, seed=seed, scale=scale, lengths=lengths)
    # The reference takes NaN of an encoder's row for that of the sequence, whatever the joint network makes of the row.
    p = batches.poisoned(p, 0.0 if (name, implementation) == ("JointLogits", "reference") else np.nan)
    expected = loss.expected(p._replace(logits=np.asarray(layout_table.dense(p, name)(p.logits))), **options)
    in_layout = dataclasses.replace(loss, layout=layout_table.layout(p, name))
    got = compare.evaluate(in_layout, p, implementation, **options)
    compare.assert_matches(got, expected, p.logits.dtype, 10, scale=1 + options.get("fastemit_lambda", 0))


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
