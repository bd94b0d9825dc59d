"""Are the rows of an utterance its own: alone, of a single frame, with padding behind it, and as a stream?"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_rnnt_speech.model import encoders, transducer
from support import configuration

FEATURES = 6
OWN = configuration(blocks=1, heads=2)
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "subsampling_conv_channels": 2}
FAST = encoders.EncoderConfig(num_hidden_layers=1, num_mel_bins=FEATURES, **SMALL)
CAUSAL = dataclasses.replace(FAST, model_type="nemotron_asr_streaming_encoder", sliding_window=5)
KINDS = {
    "conformer": (encoders.Conformer, OWN, FEATURES),
    "conformer in chunks": (encoders.Conformer, OWN.replace(chunk=1, past=2), FEATURES),
    "convolutional": (encoders.Convolutional, OWN, FEATURES),
    "convolutional in chunks": (encoders.Convolutional, OWN.replace(chunk=1), FEATURES),
    "fastconformer": (encoders.FastConformer, FAST),
    "nemotron": (encoders.FastConformer, dataclasses.replace(CAUSAL, default_num_lookahead_tokens=0)),
    "nemotron ahead": (encoders.FastConformer, dataclasses.replace(CAUSAL, default_num_lookahead_tokens=1)),
    "whisper": (encoders.Whisper, encoders.WhisperConfig(8, 1, 2, 8, num_mel_bins=FEATURES)),
    "head": (transducer.Head, OWN.replace(stack=2), FEATURES),
}
QUICK = "fastconformer", "nemotron", "whisper"


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in KINDS])
def test_rows_are_those_of_the_utterance(kind):
    """A batch of one, as long as the utterance, has the rows that it has behind others and before padding of 1e3.

    Encoders of streams make them frame by frame as well. All parameters are random, so that attention matters.
    """
    make, *sizes = KINDS[kind]
    encoder = make(*sizes, dtype=np.float32, rngs=nnx.Rngs(0))
    encoder.eval()
    graph, parameters, rest = nnx.split(encoder, nnx.Param, ...)
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / max(x.shape[0], 1) ** 0.5), parameters)
    rate = encoder.stack if kind == "head" else encoder.subsampling
    lengths = sorted({1, rate, rate + 1, 2 * rate})
    most = lengths[-1]
    x = np.full((len(lengths), 2 * most + 3, FEATURES), 1e3, np.float32)
    for row, length in zip(x, lengths):
        row[:length] = rng.normal(size=(length, FEATURES))

    @jax.jit
    def run(x):
        encoder = nnx.merge(graph, parameters, rest)
        alone = [encoder(x[i : i + 1, :n], np.array([n])) for i, n in enumerate(lengths)]
        if not getattr(encoder, "chunk", 0):
            return alone, encoder(x, np.array(lengths)), []
        state, rows, start = encoder.initial(1), [], 0
        while start < most:
            size = encoder.frames_of_step(1 if start == 0 and kind.startswith("nemotron") else 0)
            part, start = x[-1:, start : start + size], start + size
            count = np.array([max(0, min(size, most - start + size))])
            made, count, state = encoder.step(part, count, state)
            rows.append((made, count))
        return alone, encoder(x, np.array(lengths)), rows

    alone, (padded, counts), parts = run(x)
    for i, (rows, count) in enumerate(alone):
        assert count == counts[i] >= 1
        np.testing.assert_allclose(rows[0, : counts[i]], padded[i, : counts[i]], atol=2e-5, err_msg=str(lengths[i]))
    if parts:
        streamed = np.concatenate([rows[0, : count[0]] for rows, count in parts])
        np.testing.assert_allclose(streamed, padded[-1, : counts[-1]], atol=2e-5)
