"""A model as one file, which runs alone; and the features of padded recordings, which it needs for that."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jax_rnnt_speech.data import features
from jax_rnnt_speech.models import open_model
from jax_rnnt_speech.recognition import recognise
from support import asr, run

ALONE = """
import json, sys, zipfile
import jax, numpy as np
sys.modules["jax_rnnt_speech"] = sys.modules["jax_rnnt"] = None
program = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
with zipfile.ZipFile(sys.argv[1]) as file:
    about = json.loads(file.read("model.json"))
x, texts = np.zeros((3, about["samples"]), np.float32), []
for size in (7000, 5000, 100, 0):
    x[0, :size], x[0, size:] = np.load(sys.argv[2])[:size], 9
    labels, frames, log_probs, counts = program.call(x, np.array([size, 0, 0], np.int32))
    texts.append("".join(about["labels"][i] for i in labels[0, : counts[0]]))
assert about["jax"] == jax.__version__
print(json.dumps(texts))
"""


@pytest.mark.slow
def test_export(talkative, tmp_path, said):
    """A process that cannot import the packages finds the same texts, whatever is behind the samples. The command says
    which JAX wrote the file, since later ones may refuse it."""
    pytest.importorskip("flatbuffers")
    command = ["export", tmp_path / "x.zip", "--model", talkative, "--seconds"]
    words = said([*command, 1]).out
    assert f"jax {jax.__version__}" in words and "six months" in words
    samples = np.random.default_rng(0).normal(0, 0.3, 7000).astype(np.float32)
    np.save(tmp_path / "x.npy", samples)
    alone = [sys.executable, "-c", ALONE, tmp_path / "x.zip", tmp_path / "x.npy"]
    done = subprocess.run(alone, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    cuts = [("", samples[:n]) for n in (7000, 5000, 100, 0)]
    assert json.loads(done.stdout) == [x.text for x in recognise.transcribe(open_model(talkative), cuts)]
    run([*command, 0.001], 2)


@pytest.mark.parametrize("preset", [*features.PRESETS, "sherpa-onnx"])
def test_features_of_padded_recordings(preset):
    """Whatever is behind a recording, its frames are those of it alone."""
    extractor = features.extractor(asr.config.Config.from_options(features=preset, mels=16))
    samples = np.random.default_rng(0).normal(0, 0.3, (3, 9000)).astype(np.float32)
    lengths = np.array([9000, 4321, 800])
    counts = extractor.counts(lengths, np)
    for row, frames, size, count in zip(samples, extractor(samples, np, lengths), lengths, counts):
        np.testing.assert_allclose(frames[:count], extractor(row[:size]), atol=1e-4)
