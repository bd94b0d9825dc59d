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
        ([("a", 4.0), ("x", 4.0), ("c", 4.0)], [3.5, 1.5], 2),
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
    """Latencies are those of the words that a stream made final, against the ends that `align` prints.

    Truth: words that are final so many seconds after those ends.
    """
    command = ["align", "--model", trained[0], corpus / "all.jsonl", "--format", "jsonl"]
    aligned = [json.loads(x) for x in said(command).out.splitlines()]
    ends = [[(y["word"], y["end"]) for y in x["words"]] for x in aligned]
    late, order = 0.25, iter(ends)

    def heard(live, samples):
        words = next(order)
        return " ".join(x for x, _ in words), [(x, end + late * (1 + i)) for i, (x, end) in enumerate(words)]

    monkeypatch.setattr(latency, "heard", heard)
    command = ["test", "--model", trained[0], corpus / "all.jsonl"]
    rates, line, *_ = said([*command, "--stream"]).out.splitlines()
    expected = np.concatenate([late * (1 + np.arange(len(x))) for x in ends])
    assert rates.startswith("WER 0.0%") and line.startswith(
        f"latency {expected.mean():.2f} s on average, {np.percentile(expected, 95):.2f} s or less for 95% of "
        f"{len(expected)} words; the end of a recording made "
    )
    refused([*command, "--chunk", 1], "need --stream")
