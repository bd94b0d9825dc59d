"""Where phrases are said in recordings of any length, by `loss.spot`: without a search, which may write something else.

The encoder hears a recording in windows, as for a transcript. Each is divided into stretches that overlap by half, so
that a phrase of half a stretch is in one as a whole, and one program scores all phrases in all of them.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt_speech.recognition.windows import Recording, window
from jax_rnnt_speech.system import UserError, programs

HALF = 2.0  # seconds: a longer phrase may be missed
NODES, MOST = 2**24, 16  # logits that a program computes at once, and stretches, at most


class Phrase(NamedTuple):
    text: str
    labels: list
    threshold: float  # least log-odds that count


class Found(NamedTuple):
    """A phrase, in seconds from the start of a recording. `score`: its log-odds against saying nothing."""

    text: str
    start: float
    end: float
    score: float


@programs.announced("a spotter")
@functools.partial(jax.jit, static_argnums=0)
def scored(model, params, rows, lengths, targets, counts):
    """(score, start, end) [P, K] of phrases [P, U] in stretches of rows [K, N, E]."""
    network = model.network(params)
    rows = model.prompted(network, rows)
    states = network.predictor(targets)  # [P, U + 1, E]
    logits = network.joint.logits(rows[None], states[:, None])
    shape = len(targets), len(rows)
    targets = jnp.broadcast_to(targets[:, None], (*shape, targets.shape[1]))
    return model.loss.spot(logits, targets, jnp.broadcast_to(lengths, shape), jnp.broadcast_to(counts[:, None], shape))


def windows_of(model, recording, overlap):
    """(number of the first row, rows [N, E] on the device, how many count, whether they end it) of a Recording."""
    frames = model.extractor.count(recording.size)
    while not recording.error and recording.frames:
        x, first = model.features(recording.samples[: recording.size]), recording.row - recording.begin
        last = recording.last
        if not recording.long and not recording.row:
            frames = 1 << max(9, (len(x) - 1).bit_length())
        batch = np.pad(x, ((0, frames - len(x)), (0, 0)))[None]
        rows, counts = window(model, model.params, batch, np.array([len(x)], np.int32), np.array([first], np.int32))
        count = int(counts[0]) - (0 if last else recording.margin)
        yield recording.row, rows[0], count, last
        if last:
            return
        recording.go_on(count - overlap)


def spot(model, name, samples, phrases):
    """Yields each Found in a recording, in order of its windows; raises where its samples cannot be had."""
    if model.loss is None:
        raise UserError("spot needs a transducer: the model is a CTC alone")
    half = round(HALF / model.seconds)
    recording, open_ = Recording(name, samples, model, again=True), []
    counts = np.array([len(x.labels) for x in phrases], np.int32)
    targets = np.array([np.pad(x.labels, (0, counts.max() - len(x.labels))) for x in phrases], np.int32)
    size = max(1, min(MOST, NODES // (2 * half * (counts.max() + 1) * model.classes * len(phrases))))
    for row, rows, count, last in windows_of(model, recording, 2 * half):
        starts = np.arange(0, max(count - half, 1), half)
        for some in np.split(starts, range(size, len(starts), size)):
            padded = np.pad(some, (0, size - len(some)))
            place = np.minimum(padded[:, None] + np.arange(2 * half), rows.shape[0] - 1)
            lengths = np.where(np.arange(size) < len(some), np.clip(count - padded, 0, 2 * half), 0).astype(np.int32)
            try:
                results = scored(model, model.params, rows[jnp.asarray(place)], lengths, targets, counts)
            except TypeError as error:
                raise UserError(f"--loss {model.config.head.loss}: {error}") from None
            scores, begins, ends = map(np.asarray, results)
            for i, phrase in enumerate(phrases):
                for k in np.flatnonzero(scores[i, : len(some)] >= phrase.threshold):
                    a, b = (row + some[k] + x[i, k] for x in (begins, ends))
                    found = Found(phrase.text, a * model.seconds, (b + 1) * model.seconds, float(scores[i, k]))
                    put(open_, found)
        until = np.inf if last else (row + count - 2 * half) * model.seconds
        yield from (x for x in sorted(open_, key=lambda x: x.start) if x.end < until)
        open_ = [x for x in open_ if x.end >= until]
    if recording.error:
        raise UserError(recording.error)


def put(known, found):
    """Adds one, or of those of a phrase that overlap, keeps the best."""
    for i, x in enumerate(known):
        if x.text == found.text and x.start < found.end and found.start < x.end:
            known[i] = max(x, found, key=lambda x: x.score)
            return
    known.append(found)
