"""Seconds from the end of a word until it is final: by hand, and of recordings that the program hears as streams."""

import json
import types

import numpy as np
import pytest

from jax_rnnt.timing import Interval
from jax_rnnt_speech.recognition import latency


def test_by_hand():
    """Words that are recognised count, each against its own end; LAAL by its formula (Papi et al. 2022)."""
    reference = [Interval(i, i + 0.5, x) for i, x in enumerate(["a", "b", "c", "b"])]
    for found, seconds, at_the_end in (
        ([("a", 1.0), ("b", 2.0), ("c", 3.0), ("b", 4.0)], [0.5, 0.5, 0.5, 0.5], 1),
        ([("x", 1.0), ("b", 2.5), ("b", 3.75)], [1.0, 0.25], 0),
        ([("a", 4.0), ("a", 4.0), ("b", 4.0)], [3.5, 2.5], 2),
        ([("a", 0.25)], [-0.25], 0),  # a model may write a word before it ends
        ([], [], 0),
    ):
        x = latency.latency(reference, found, 4.0)
        assert (x.seconds, x.at_the_end) == (seconds, at_the_end), found
    for delays, count, expected in (
        ([1, 2, 3, 4], 4, 1.0),  # as evenly as they are spoken, each a step behind
        ([2, 2, 4, 4], 4, ((2 - 0) + (2 - 1) + (4 - 2)) / 3),  # up to the first that the end made final
        ([2, 4], 4, ((2 - 0) + (4 - 1)) / 2),
        ([1, 2, 3, 4], 2, 1.0),  # four words came in place of two: no credit for that
    ):
        assert latency.laal(delays, 4, count) == pytest.approx(expected), delays
    assert latency.laal([], 4, 2) is None
    many = [latency.Latency([0.0, 1.0], 1, 0.5), latency.Latency([2.0], 0, None), latency.Latency([], 0, 1.5)]
    assert latency.summary(many) == {"mean": 1.0, "p95": pytest.approx(1.9), "words": 3, "at_the_end": 1, "laal": 1.0}


def test_the_clock():
    """A word is final when the samples have been heard that its event waits for, to a block of 20 ms."""

    class Live:
        """Each word is final so many samples after the start; the last one, at the end."""

        extractor = types.SimpleNamespace(rate=8000)
        due = ("a", 1000), ("b", 1600), ("c", 1601), ("d", 10**9)

        def restart(self):
            self.words, self.count = types.SimpleNamespace(said=" "), 0

        def heard(self, samples, end=False):
            before, self.count = self.count, self.count + len(samples)
            for text, place in self.due:
                if (before < place <= self.count) or (end and place > self.count):
                    self.words.said += f"{text} "
                    yield [types.SimpleNamespace(text=text)], False

    text, found = latency.heard(Live(), np.zeros(4004, np.float32))
    assert text == "a b c d" and found == [("a", 0.14), ("b", 0.2), ("c", 0.22), ("d", 0.5005)]


def test_of_a_stream(corpus, trained, said, refused, monkeypatch):
    """`test --stream` measures the words of `stream` against those of `align`; so do what the command prints and JSON.

    Truth: the ends of the words in the CTM that `align` prints, and words that the stream made final at known times.
    """
    lines = [x.split() for x in said(["align", "--model", trained[0], corpus / "all.jsonl"]).out.splitlines()]
    ends = {}
    for name, _, start, length, word, *_ in lines:
        ends.setdefault(name, []).append((word, float(start) + float(length)))
    late, files = 0.25, sorted(ends, key=lambda x: int(x.rpartition("-")[2]))
    order = iter(files)

    def heard(live, samples):
        words = ends[next(order)]
        return " ".join(x for x, _ in words), [(x, end + late * (1 + i)) for i, (x, end) in enumerate(words)]

    monkeypatch.setattr(latency, "heard", heard)
    command = ["test", "--model", trained[0], corpus / "all.jsonl"]
    x = json.loads(said([*command, "--stream", "--json"]).out)
    assert x["wer"] == 0 and x["latency"]["words"] == x["words"] == len(lines)
    counts = np.array([len(x) for x in ends.values()])
    expected = np.concatenate([late * (1 + np.arange(n)) for n in counts])
    assert x["latency"]["mean"] == pytest.approx(expected.mean(), abs=1e-5)
    assert x["latency"]["p95"] == pytest.approx(np.percentile(expected, 95), abs=1e-5)
    order = iter(files)
    assert f"latency {expected.mean():.2f} s on average" in said([*command, "--stream"]).out.splitlines()[1]
    refused([*command, "--chunk", 1], "need --stream")
