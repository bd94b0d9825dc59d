"""Phrases in recordings: scores are those of sums over all alignments that the test writes, behind a greedy text."""

import itertools
import json

import jax
import numpy as np
import pytest

from jax_rnnt_speech.data import audio
from jax_rnnt_speech.recognition import recognise, spotting, windows
from support import CONVOLUTIONAL, asr, random_model, run


def log_prob_next(log_probs, labels, count):
    """log P(the last `count` of the labels come next, behind the others): by sums of prefixes, in float64."""
    found = [0.0]
    blank = np.cumsum(log_probs[:, 0, -1])  # below, alpha are frames of the column of the labels so far
    alpha = np.concatenate([[0.0], blank[:-1]])
    for u, label in enumerate(labels):
        writes = alpha + log_probs[:, u, label]
        found.append(np.logaddexp.reduce(writes))
        alpha = np.empty(len(writes))
        for t in range(len(writes)):
            alpha[t] = np.logaddexp(writes[t], alpha[t - 1] + log_probs[t - 1, u + 1, -1]) if t else writes[t]
    return found[-1] - found[-1 - count]


@pytest.mark.slow
def test_phrases(tmp_path, monkeypatch, capsys, refused, said):
    """Also in several windows; a phrase that greedy search wrote is where it wrote it."""
    model = random_model(**CONVOLUTIONAL, chunk=0, max_symbols=1)
    samples = np.random.default_rng(2).normal(0, 0.2, 16000).clip(-0.99, 0.99)
    audio.write(tmp_path / "a.flac", samples, 8000)
    samples = audio.read(tmp_path / "a.flac", 8000)
    (greedy,) = recognise.transcribe(model, [("", samples)])
    written = [greedy.labels[i : i + 3] for i in (4, 20)]
    phrases = [spotting.Phrase(model.tokens.decode(x), x, -60.0) for x in [*written, [2, 0]]]

    @jax.jit
    def nodes(x, labels):
        network = model.network(model.params)
        rows, _ = network.encode(x[None], np.array([len(x)]))
        return jax.nn.log_softmax(network.joint(rows[:, :, None], network.predictor(labels[None])[:, None]))[0]

    found = [*spotting.spot(model, "a", samples, phrases)]
    assert {x.text for x in found} >= {x.text for x in phrases[:2]}
    room = len(greedy.labels) + 3
    for x in found:
        labels = next(y.labels for y in phrases if y.text == x.text)
        tried = [greedy.labels[:n] + labels for n in range(len(greedy.labels) + 1)]
        scores = [
            log_prob_next(np.asarray(nodes(model.features(samples), np.resize(y, room)), np.float64), y, len(labels))
            for y in tried
        ]
        start = round(x.start / model.seconds)
        near = [s for n, s in enumerate(scores) if abs(n - sum(f < start for f in greedy.frames)) <= 1]
        np.testing.assert_allclose(x.score, max(near), atol=1e-3)
        assert 0 <= x.start < x.end <= len(samples) / 8000 + model.seconds
    for a, b in ((a, b) for a in found for b in found if a is not b and a.text == b.text):
        assert a.end <= b.start or b.end <= a.start
    monkeypatch.setattr(windows, "WINDOW", 1.2)
    monkeypatch.setattr(spotting, "HALF", 0.24)
    placed, stretches = spotting.placed, []

    def seen(model, params, rows, lengths, *more):
        stretches.append([np.asarray(x) for x, n in zip(rows, lengths) if n == rows.shape[1]])
        return placed(model, params, rows, lengths, *more)

    monkeypatch.setattr(spotting, "placed", seen)
    many = [*spotting.spot(model, "a", samples, phrases)]
    half = len(stretches[0][0]) // 2
    pairs = [pair for some in stretches for pair in itertools.pairwise(some)]
    assert len(pairs) > 1
    for x, y in pairs:
        np.testing.assert_array_equal(x[half:], y[:half])  # so that half a stretch is in one as a whole
    least = float(np.median([x.score for x in many]))
    fewer = [*spotting.spot(model, "a", samples, [x._replace(threshold=least) for x in phrases])]
    assert len(fewer) < len(many) and all(x.score >= least for x in fewer)
    good, bad, apart = (spotting.Found("", *x) for x in ((0.0, 1.0, -1.0), (0.5, 1.5, -2.0), (1.5, 2.0, -3.0)))
    for order in itertools.permutations([good, bad]):
        known = [apart]
        for x in order:
            spotting.put(known, x)
        assert known == [apart, good]
    assert max(x.end for x in many) > 1.5 and all(0 <= x.start < x.end <= 2.1 for x in many)
    monkeypatch.undo()
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    (tmp_path / "p.txt").write_text("".join(f"{x.text}\t{x.threshold}\n" for x in phrases) + "AZ\n")
    command = ["spot", "--model", tmp_path, "--phrases", tmp_path / "p.txt"]
    out, error = said([*command, "--json", tmp_path / "a.flac", tmp_path / "none.wav"], 1)
    told = [json.loads(x) for x in out.splitlines()]
    assert [(x["phrase"], x["start"]) for x in told] == [(x.text, round(x.start, 3)) for x in found]
    assert "cannot spell 'AZ'" in error and "none.wav: no such file" in error
    refused([*command[:3], tmp_path / "a.flac"], "--phrases is missing")
    model = random_model(**CONVOLUTIONAL, chunk=0, loss="tdt", durations=(0, 1, 3))
    found = [*spotting.spot(model, "a", samples, phrases)]
    assert {x.text for x in found} == {x.text for x in phrases}
    assert all(-60 <= x.score <= 0 <= x.start < x.end <= 2.1 for x in found)
    model = random_model(**CONVOLUTIONAL, chunk=0, loss="robust")
    run([*command, tmp_path / "a.flac"], 2)
    assert "rnnt-speech: --loss robust: TargetRobustRNNTLoss.spot: the loss must have arcs" in capsys.readouterr().err
