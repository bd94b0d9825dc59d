"""Labels of recordings by greedy search, of the whole or as it comes in."""

import functools

import numpy as np
from flax import nnx

from jax_rnnt import decode


@functools.partial(nnx.jit, static_argnames="max_labels")
def search(model, rows, lengths, max_labels, state=None):
    """Hypotheses of encoder rows [B, T, E] and their lengths, by the rules of `transformers`.

    A TDT chooses the token first, and then its duration; one frame may have any number of labels of duration 0.
    """
    config = model.config
    max_symbols = max_labels if config.durations else config.max_symbols_per_step
    options = dict(max_symbols=max_symbols, duration_choice="token_first", state=state)
    return decode.greedy(model.criterion(), *model.decoder_inputs(rows, lengths), max_labels, **options)


def transcribe(model, extractor, recordings, max_labels=None):
    """Hypotheses of whole recordings [N]; by default with the room that `transformers` gives them."""
    features, lengths = extractor(recordings)
    rows, lengths = encode(model, features, lengths)
    return search(model, rows, lengths, max_labels or rows.shape[1] * model.config.max_symbols_per_step)


@nnx.jit
def encode(model, features, lengths):
    return model.encoder(features, lengths)


@functools.partial(nnx.jit, static_argnames="lookahead")
def encode_part(model, features, state, lookahead):
    return model.encoder.stream(features, state, lookahead)


def stream(model, extractor, recording, lookahead=None):
    """Yields the hypotheses of each part of one recording [N], whose labels are never taken back."""
    encoder, begin, seen, state, decoder_state = model.encoder, 0, 0, None, None
    total = encoder.config.length(len(recording) // extractor.hop_length)
    while seen < total:
        count = encoder.frames_of_part(state is None, lookahead)
        rows, state = encode_part(model, extractor.chunk(recording, begin, count)[None], state, lookahead)
        lengths = np.array([min(total - seen, rows.shape[1])], np.int32)
        hypotheses = search(model, rows, lengths, rows.shape[1] * model.config.max_symbols_per_step, decoder_state)
        begin, seen, decoder_state = begin + count, seen + rows.shape[1], hypotheses.state
        yield hypotheses


def labels_of(hypotheses):
    """[[label]] of hypotheses."""
    return [row[:count].tolist() for row, count in zip(np.asarray(hypotheses.labels), np.asarray(hypotheses.counts))]
