"""Are the rows of an utterance its own: alone, of a single frame, with padding behind it, and as a stream?"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from jax_rnnt_speech.model import encoders, transducer
from support import configuration

FEATURES = 6
QUICK = "conformer", "fastconformer", "nemotron", "whisper"


def kinds(blocks):
    """The class and the sizes of each kind of encoder."""
    own = configuration(blocks=blocks, heads=2)
    small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "subsampling_conv_channels": 2}
    fast = encoders.EncoderConfig(num_hidden_layers=blocks, num_mel_bins=FEATURES, **small)
    causal = dataclasses.replace(fast, model_type="nemotron_asr_streaming_encoder", sliding_window=5)
    longer = own.replace(blocks=blocks + 1, chunk=4, past=6, convolution=5)
    return {
        "conformer": (encoders.Conformer, own.replace(chunk=0), FEATURES),
        "conformer in chunks": (encoders.Conformer, own.replace(chunk=1, past=2), FEATURES),
        "conformer in longer chunks": (encoders.Conformer, longer, FEATURES),
        "convolutional": (encoders.Convolutional, own, FEATURES),
        "convolutional in chunks": (encoders.Convolutional, own.replace(chunk=1), FEATURES),
        "fastconformer": (encoders.FastConformer, fast),
        "nemotron": (encoders.FastConformer, dataclasses.replace(causal, default_num_lookahead_tokens=0)),
        "nemotron ahead": (encoders.FastConformer, dataclasses.replace(causal, default_num_lookahead_tokens=1)),
        "whisper": (encoders.Whisper, encoders.WhisperConfig(8, blocks, 2, 8, num_mel_bins=FEATURES)),
        "head": (transducer.Head, own.replace(stack=2), FEATURES),
    }


@pytest.mark.parametrize("kind", [pytest.param(x, marks=[] if x in QUICK else pytest.mark.slow) for x in kinds(1)])
def test_rows_are_those_of_the_utterance(kind):
    """A batch of one, as long as the utterance, has the rows that it has behind others and before padding of 1e3.

    Encoders of streams make them frame by frame, or chunk by chunk, as well; rows of a conformer without chunks depend
    on what comes later. All parameters are random, so that attention matters.
    """
    make, *sizes = kinds(1)[kind]
    encoder = make(*sizes, dtype=np.float32, rngs=nnx.Rngs(0))
    encoder.eval()
    graph, parameters, rest = nnx.split(encoder, nnx.Param, ...)
    rng = np.random.default_rng(0)
    parameters = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) / max(x.shape[0], 1) ** 0.5), parameters)
    rate = encoder.stack if kind == "head" else encoder.subsampling
    longer = {9 * rate + 1, 16 * rate} if kind in ("conformer", "conformer in longer chunks") else set()
    lengths = sorted({1, rate, rate + 1, 2 * rate, *longer})
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
    if kind == "conformer":
        x[-1, most // 2 : most] = 0
        assert np.abs(run(x)[1][0] - padded)[-1, 0].max() > 1e-3


def test_a_barrier_before_each_block():
    """Of every encoder; without them, XLA computes gradients of later blocks again in each block on CPUs."""
    for name, (kind, *sizes) in kinds(3).items():
        make = lambda kind=kind, sizes=sizes: kind(*sizes, dtype=np.float32, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(nnx.eval_shape(make))
        run = lambda state, x, lengths, graphdef=graphdef: nnx.merge(graphdef, state)(x, lengths)
        program = jax.make_jaxpr(run)(state, np.zeros((1, 40, FEATURES), np.float32), np.array([40]))
        count = sum(x.primitive.name == "optimization_barrier" for x in program.eqns)
        assert count == 3 + (name == "conformer in longer chunks")
