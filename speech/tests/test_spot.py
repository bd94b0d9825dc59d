"""Phrases in recordings: scores and times are those of a sum over all starts and alignments that the test writes."""

import json

import jax
import numpy as np
import pytest

from jax_rnnt_speech.data import audio
from jax_rnnt_speech.recognition import spotting, windows
from support import CONVOLUTIONAL, asr, random_model, run

HALF = 0.24


def spotted(log_probs, labels):
    """(score, last frame) of log-probabilities [T, U + 1, V], by the recursion of the definition, in float64."""
    blank = log_probs[..., -1]
    before, best = np.full(len(labels), -np.inf), (-np.inf, -1)
    for t in range(len(log_probs)):
        now = np.full(len(labels), -np.inf)
        now[0] = 0
        for u in range(1, len(labels)):
            waits = before[u] + blank[t - 1, u] - blank[t - 1, 0] if t else -np.inf
            now[u] = np.logaddexp(waits, now[u - 1] + log_probs[t, u - 1, labels[u - 1]])
        best = max(best, (now[-1] + log_probs[t, len(labels) - 1, labels[-1]], -t))
        before = now
    return best[0], -best[1]


def test_phrases(tmp_path, monkeypatch, capsys, refused):
    monkeypatch.setattr(spotting, "HALF", HALF)
    model = random_model(**CONVOLUTIONAL, chunk=0)
    samples = np.random.default_rng(2).normal(0, 0.2, 20000).clip(-0.99, 0.99)
    audio.write(tmp_path / "a.flac", samples, 8000)
    samples, texts = audio.read(tmp_path / "a.flac", 8000), ["AB", "C A", "B"]

    @jax.jit
    def nodes(x, labels):
        network = model.network(model.params)
        rows, _ = network.encode(x[None], np.array([len(x)]))
        return jax.nn.log_softmax(network.joint(rows[:, :, None], network.predictor(labels[None])[:, None]))[0]

    x, half, expected = model.features(samples), round(HALF / model.seconds), {}
    for text in texts:
        labels = model.tokens.encode(text)
        log_probs = np.asarray(nodes(x, np.array(labels)), np.float64)
        starts = range(0, len(log_probs) - half, half)
        expected[text] = max((*spotted(log_probs[a : a + 2 * half], labels), a) for a in starts)
    phrases = [spotting.Phrase(text, model.tokens.encode(text), expected[text][0] - 1) for text in texts]

    def best():
        found = [*spotting.spot(model, "a", samples, phrases)]
        for a, b in ((a, b) for a in found for b in found if a is not b and a.text == b.text):
            assert a.end <= b.start or b.end <= a.start
        assert all(0 <= x.start < x.end <= len(samples) / 8000 + model.seconds for x in found)
        return {text: max((x for x in found if x.text == text), key=lambda x: x.score) for text in texts}

    for window in (windows.WINDOW, 1.6):  # in several windows, too
        monkeypatch.setattr(windows, "WINDOW", window)
        for text, x in best().items():
            score, end, start = expected[text]
            np.testing.assert_allclose(x.score, score, atol=1e-3)
            assert round(x.end / model.seconds) == start + end + 1
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    (tmp_path / "p.txt").write_text("".join(f"{x.text}\t{x.threshold}\n" for x in phrases) + "AZ\n")
    command = ["spot", "--model", tmp_path, "--phrases", tmp_path / "p.txt"]
    run([*command, "--json", tmp_path / "a.flac", tmp_path / "none.wav"], 1)
    out, error = capsys.readouterr()
    found = [json.loads(x) for x in out.splitlines()]
    for text in texts:
        assert max(x["score"] for x in found if x["phrase"] == text) == pytest.approx(expected[text][0], abs=2e-3)
    assert "cannot spell 'AZ'" in error and "none.wav: no such file" in error
    run([*command, tmp_path / "a.flac"])
    lines = [x.split("\t") for x in capsys.readouterr().out.splitlines()]
    assert [(x[4], float(x[1])) for x in lines] == [(x["phrase"], round(x["start"], 2)) for x in found]
    refused([*command[:3], tmp_path / "a.flac"], "--phrases is missing")
    model = random_model(**CONVOLUTIONAL, chunk=0, loss="tdt")
    refused([*command, tmp_path / "a.flac"], "--loss tdt: TDTLoss.spot: the loss must have arcs")
