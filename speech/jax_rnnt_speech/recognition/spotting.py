"""Where phrases are said in recordings of any length: `loss.spot` finds places, and the text before decides.

The encoder hears a recording in windows, as for a transcript. Each is divided into stretches that overlap by half, so
that a phrase of half a stretch is in one as a whole. `loss.spot` says where in a stretch each phrase is most probably
said, as if the stretch began with it. Its odds are those against silence, which other words have, too; so a place
counts by the probability that the labels of the phrase come next, behind what greedy search wrote before it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt_speech.recognition.search import search
from jax_rnnt_speech.recognition.windows import Recording, encoded
from jax_rnnt_speech.system import UserError, programs, refuse_if

HALF = 2.0  # seconds: a longer phrase may be missed
NODES, MOST = 2**24, 16  # logits that a program computes at once, and stretches, at most
TOGETHER = 16  # places that are scored at once


class LossError(UserError):
    """Why no recording can be spotted with a model."""


class Phrase(NamedTuple):
    text: str
    labels: list
    threshold: float  # the least log-probability that counts


class Found(NamedTuple):
    """A phrase, in seconds from the start of a recording. `score`: the log-probability of its labels there."""

    text: str
    start: float
    end: float
    score: float


@programs.announced("a spotter")
@functools.partial(jax.jit, static_argnums=0)
def placed(model, params, rows, lengths, targets, counts):
    """((score, start, end) [P, K] of phrases [P, U], (labels, frames, counts) [K, L] of a greedy search).

    Of stretches of rows [K, N, E].
    """
    network = model.network(params)
    rows = model.prompted(network, rows)
    found = search(model, network, rows, lengths)
    shape = len(targets), len(rows)
    logits = network.joint.logits(rows[None], network.predictor(targets)[:, None])
    targets = jnp.broadcast_to(targets[:, None], (*shape, targets.shape[1]))
    places = model.loss.spot(logits, targets, *(jnp.broadcast_to(x, shape) for x in (lengths, counts[:, None])))
    return places, (found.labels, found.frames, found.counts)


@programs.announced("scores of phrases")
@functools.partial(jax.jit, static_argnums=0)
def scored(model, params, rows, lengths, targets, counts):
    """Log-probabilities [M, U] of labels behind those before them, in stretches [M, N, E]."""
    network = model.network(params)
    logits = network.joint.logits(model.prompted(network, rows), network.predictor(targets))
    return model.loss.label_log_probs(logits, targets, lengths, counts)


def scores_of(model, rows, lengths, places, greedy, phrases):
    """[P, K] of phrases in stretches: the best one behind the labels before its place, one fewer or one more."""
    tried = []
    for i, k in np.argwhere(places.score > 0):
        labels, frames = (x[k, : greedy[2][k]].tolist() for x in greedy[:2])
        before = sum(x < places.start[i, k] for x in frames)
        tried += [(i, k, labels[:n]) for n in range(max(0, before - 1), min(len(labels), before + 1) + 1)]
    result = np.full(places.score.shape, -np.inf)
    room = 1 << max(3, max((len(x) + len(phrases[i].labels) for i, _, x in tried), default=1).bit_length())
    for some in (tried[n : n + TOGETHER] for n in range(0, len(tried), TOGETHER)):
        whole = [x + list(phrases[i].labels) for i, _, x in some]
        targets, counts = np.zeros((TOGETHER, room), np.int32), np.zeros(TOGETHER, np.int32)
        for row, x in enumerate(whole):
            targets[row, : len(x)], counts[row] = x, len(x)
        chosen = np.array([k for _, k, _ in some] + [0] * (TOGETHER - len(some)))
        found = np.asarray(scored(model, model.params, rows[chosen], lengths[chosen], targets, counts), np.float64)
        for (i, k, x), row, y in zip(some, found, whole):
            result[i, k] = max(result[i, k], row[len(x) : len(y)].sum())
    return result


def windows_of(model, recording, overlap):
    """(number of the first row, rows [N, E] on the device, how many count, whether they end it) of a Recording."""
    frames = model.extractor.count(recording.size)
    while not recording.error and recording.frames:
        last = recording.last
        if not recording.long and not recording.row:
            frames = 1 << max(9, (recording.frames - 1).bit_length())
        rows, counts = encoded(model, [recording.window], frames)
        count = int(counts[0]) - (0 if last else recording.margin)
        yield recording.row, rows[0], count, last
        if last:
            return
        recording.go_on(count - overlap)


def spot(model, name, samples, phrases):
    """Yields each Found in a recording, in order of its windows; raises where its samples cannot be had."""
    if model.loss is None:
        raise LossError("spot needs a transducer: the model is a CTC alone")
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
            stretches = rows[jnp.asarray(place)]
            try:
                places, greedy = jax.device_get(placed(model, model.params, stretches, lengths, targets, counts))
            except TypeError as error:
                raise LossError(f"--loss {model.config.head.loss}: {error}") from None
            scores = scores_of(model, stretches, lengths, places, greedy, phrases)
            for i, phrase in enumerate(phrases):
                for k in np.flatnonzero(scores[i, : len(some)] >= phrase.threshold):
                    a, b = (row + some[k] + x[i, k] for x in (places.start, places.end))
                    found = Found(phrase.text, a * model.seconds, (b + 1) * model.seconds, float(scores[i, k]))
                    put(open_, found)
        until = np.inf if last else (row + count - 2 * half) * model.seconds
        yield from (x for x in sorted(open_, key=lambda x: x.start) if x.end < until)
        open_ = [x for x in open_ if x.end >= until]
    refuse_if(recording.error, recording.error)


def put(known, found):
    """Adds one, or of those of a phrase that overlap, keeps the best."""
    for i, x in enumerate(known):
        if x.text == found.text and x.start < found.end and found.start < x.end:
            known[i] = max(x, found, key=lambda x: x.score)
            return
    known.append(found)
