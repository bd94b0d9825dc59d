"""Short runs of the fuzzer: it passes, and finds handlers that are broken."""

import pathlib
import re
import sys

import pytest

import door

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "fuzz"))
import fuzz

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
