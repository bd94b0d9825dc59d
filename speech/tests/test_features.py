"""The features that sherpa-onnx computes, against loops in float64, and in streams."""

import itertools
import math

import numpy as np
import pytest

from jax_rnnt_speech import models
from jax_rnnt_speech.config import Config
from jax_rnnt_speech.data import features
from jax_rnnt_speech.data.audio import read
from jax_rnnt_speech.recognition.streams import Stream
from jax_rnnt_speech.system import UserError
from jax_rnnt_speech.training import preparation
from support import CONVOLUTIONAL, arguments, configuration, random_model, run, saved


def fbank(samples, rate, mels, nemo):
    """kaldi-native-fbank with sherpa-onnx's settings, one sample, bin and filter after the other."""
    hop, window = rate // 100, rate // 40
    size = 2 ** math.ceil(math.log2(window))
    scale = (lambda f: f * 3 / 200 if f < 1000 else 15 + 27 * math.log(f / 1000) / math.log(6.4)) if nemo else (
        lambda f: 1127 * math.log(1 + f / 700))  # fmt: skip
    back = (lambda m: m * 200 / 3 if m < 15 else 1000 * 6.4 ** ((m - 15) / 27)) if nemo else (lambda m: m)
    lowest, top = scale(0 if nemo else 20), scale(rate / 2 - 400)
    corners = [back(lowest + (top - lowest) * i / (mels + 1)) for i in range(mels + 2)]
    frames = []
    for t in range(int(len(samples) / hop + 0.5)):
        frame = []
        for i in range(hop * t + hop // 2 - window // 2, hop * t + hop // 2 - window // 2 + window):
            while not 0 <= i < len(samples):
                i = -i - 1 if i < 0 else 2 * len(samples) - 1 - i
            frame.append(float(samples[i]))
        mean = 0 if nemo else sum(frame) / window
        frame = [x - mean for x in frame]
        frame = [frame[0] * 0.03] + [x - 0.97 * y for y, x in itertools.pairwise(frame)]
        hann = [0.5 - 0.5 * math.cos(2 * math.pi * i / (window - 1)) for i in range(window)]
        power = np.abs(np.fft.fft([x * w**0.85 for x, w in zip(frame, hann)], size)) ** 2
        row = []
        for low, middle, high in zip(corners, corners[1:], corners[2:]):
            total = 0.0
            for k in range(size // 2):
                place = k * rate / size if nemo else scale(k * rate / size)
                if low < place < high:
                    part = (place - low) / (middle - low) if place <= middle else (high - place) / (high - middle)
                    total += power[k] * part * (2 / (high - low) if nemo else 1)
            row.append(math.log(max(total, np.finfo(np.float32).eps)))
        frames.append(row)
    return np.array(frames).reshape(len(frames), mels)


HEADS = {"icefall": {}, "lstm": {"predictor": "lstm"}, "tdt": {"loss": "tdt"}}


@pytest.mark.parametrize("head", HEADS)
def test_features_of_sherpa_onnx(head):
    """Whatever the rate, for recordings shorter than a window too; with silence, which has the least power."""
    for rate, size in ((16000, 1000), (8000, 719), (8000, 41), (8000, 39), (8000, 0), (11025, 300), (22050, 1000)):
        extractor = features.extractor(
            configuration(features="sherpa-onnx", rate=rate, mels=20, chunk=0, **HEADS[head])
        )
        samples = np.random.default_rng(0).normal(0, 0.1, size).astype(np.float32)
        samples[:300] *= size != 1000
        expected = fbank(samples, rate, 20, head != "icefall")
        assert extractor.count(size) == len(expected)
        np.testing.assert_allclose(extractor(samples), expected, atol=1e-3, err_msg=f"{rate} {size}")


@pytest.mark.parametrize("pieces", [1000, 77])
def test_features_of_streams(pieces):
    """Samples in pieces, fewer than the first frame sees or more, make the frames of the whole recording."""
    model = random_model(features="sherpa-onnx", **CONVOLUTIONAL)
    for size in (3001, 150, 41, 30):
        samples = np.random.default_rng(1).normal(0, 0.1, size).astype(np.float32)
        live, steps = Stream(model, listens=False), []
        for i in range(0, size, pieces):
            steps += live.steps(samples[i : i + pieces])
        steps += live.steps(samples[:0], end=True)
        frames = [x.x[: x.count] for x in steps] + [np.zeros((0, 6))]
        np.testing.assert_allclose(np.concatenate(frames), fbank(samples, 8000, 6, False), atol=1e-3)


def test_what_sherpa_onnx_cannot_have(tmp_path):
    for options, words in (({"hop": 5}, "--hop 10"), ({"rate": 2000}, "--rate of 4000")):
        with pytest.raises(UserError, match=words):
            configuration(**{"features": "sherpa-onnx"} | options).checked()
    start = saved(random_model(features="sherpa-onnx", chunk=0, **CONVOLUTIONAL), tmp_path / "run")
    config = configuration(features="sherpa-onnx", chunk=0, init=f"{start}", new_head=True, loss="tdt", **CONVOLUTIONAL)
    corpus = type("Corpus", (), {"features": 6, "texts": ["AB C"], "utterances": ()})
    with pytest.raises(UserError, match="--predictor lstm or --loss tdt"):
        models.fresh(config, corpus)


def test_a_form_that_is_missing_is_said_at_once(corpus, tmp_path, monkeypatch, refused):
    said = []

    def prepared(config, start, searching, lines):
        said[:] = lines
        raise UserError("no step is trained")

    monkeypatch.setattr(preparation, "prepared", prepared)
    for options, words in (({"loss": "hat"}, "--loss hat"), ({"loss": "tdt"}, "--chunk and"), ({}, "")):
        refused(arguments(corpus, tmp_path, features="sherpa-onnx", **options), "no step is trained")
        assert ("sherpa-onnx has no form for models with" in said[-1]) == bool(words) and words in said[-1]


def test_features_of_another_training(monkeypatch):
    """A training may go on with these, of which it takes the statistics anew; with no other features."""
    monkeypatch.setattr(models, "config_of", lambda folder: (configuration(chunk=0, hop=12.5), None))
    monkeypatch.setattr(models, "kind_of", lambda folder: "run")
    for more, anew in (({"features": "sherpa-onnx"}, True), ({}, False), ({"features": "log-mel"}, False)):
        config = Config.from_options(**models.completed({"init": "run", "train": "t", "valid": "v"} | more))
        assert (models.hears_anew(config), config.features.kind) == (anew, more.get("features", "log-mel"))
        assert (config.features.hop, config.features.rate) == (10 if anew else 12.5, 8000)
    with pytest.raises(UserError, match="--features nemo"):
        models.completed({"init": "run", "features": "nemo"})


@pytest.mark.slow
def test_training_goes_on_with_them(corpus, tmp_path):
    """By the command line: the statistics are those of the frames."""
    run(arguments(corpus, tmp_path / "old", steps=1))
    run(arguments(corpus, tmp_path / "new", steps=1, init=tmp_path / "old", features="sherpa-onnx", save_every=1))
    model = models.open_model(tmp_path / "new")
    frames = [fbank(read(x, 8000), 8000, 6, False) for x in sorted(corpus.glob("7/*/*.flac"))]
    np.testing.assert_allclose(model.mean, np.concatenate(frames[:8]).mean(0), atol=1)
    assert np.abs(model.mean - models.open_model(tmp_path / "old").mean).max() > 1


@pytest.mark.slow
def test_training(corpus, tmp_path):
    """All commands take them: a training, and transcripts and streams of it."""
    run(arguments(corpus, tmp_path / "run", features="sherpa-onnx"))
    run(["transcribe", "--model", tmp_path / "run", corpus / "7/0/7-0-0000.flac"])
    run(["stream", "--model", tmp_path / "run", corpus / "7/0/7-0-0000.flac"])
