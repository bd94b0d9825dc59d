"""Texts of many recordings of any length, in batches."""

import sys
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from jax_rnnt_speech import audio, manifests, windows
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.recogniser import GREEDY
from jax_rnnt_speech.results import Labels

ROUND = 256  # recordings are padded to multiples of so many frames, for few programs
HELD = 60_000  # frames of the recordings that are sorted by length at once: 10 minutes of usual features
BATCH = 16_384  # frames of a batch, padding included, if it has more than one recording


def listed(arguments, audio_column=""):
    """Entries and Faults of audio files, manifests and folders, which need no texts."""
    for path in map(Path, arguments):
        if manifests.is_list(path):
            yield from manifests.read(path, audio_column, texts=False)
        else:
            yield manifests.Entry(str(path), path, "")


def loaded(entries, rate):
    """(name, pieces of its samples or the UserError that there are none) of each entry."""
    for x in entries:
        if isinstance(x, manifests.Fault):
            yield x.name, UserError(f"{x.name}: {x.reason}")
        else:
            yield x.name, audio.pieces(x.audio, rate, x.start, x.end, x.channel)


def transcribe(recogniser, recordings, how=GREEDY):
    """Yields the Result of each (name, recording), in their order.

    A recording is samples [S], floats in [-1, 1] or integers, at `recogniser.extractor.rate`; or pieces of them, one
    after the other; or a UserError. Some recordings at a time are sorted by length and go through the model in batches,
    and of one that is longer than a window no more than that is held: memory depends neither on how many there are nor
    on how long they are.
    """
    waiting, held = [], 0
    for name, samples in recordings:
        x = windows.Recording(name, samples, recogniser)
        waiting.append(x)
        held += len(x.samples) // recogniser.extractor.hop
        if held >= HELD:
            yield from together(recogniser, waiting, how)
            waiting, held = [], 0
    yield from together(recogniser, waiting, how)


def together(recogniser, waiting, how):
    """Yields the results of Recordings, in their order: the long ones come first, then the others."""
    long = [x for x in waiting if x.long]
    windows.hear(recogniser, long, how)
    short = ((x.result(), None if x.long or x.error else recogniser.features(x.samples)) for x in waiting)
    yield from heard(recogniser, list(short), how)


def heard(recogniser, waiting, how):
    """Yields the results of (result so far, features or None), in their order, as soon as they are there."""
    results, ready = [result for result, _ in waiting], 0
    order = [i for i, (_, x) in enumerate(waiting) if x is not None and len(x)]
    order.sort(key=lambda i: len(waiting[i][1]), reverse=True)
    while order:
        frames = -(-len(waiting[order[0]][1]) // ROUND) * ROUND
        most = max(1, BATCH // frames)
        size = 1 << min(most.bit_length() - 1, (len(order) - 1).bit_length())  # powers of 2: few programs
        chosen, order = order[:size], order[size:]
        batch, lengths = np.zeros((size, frames, len(recogniser.mean)), np.float32), np.zeros(size, np.int32)
        for row, i in enumerate(chosen):
            x = waiting[i][1]
            batch[row, : len(x)], lengths[row] = x, len(x)
        if batch.shape not in recogniser.searched:
            recogniser.searched.add(batch.shape)
            tqdm.write(f"compiling: a search, {size} x {frames} frames", file=sys.stderr)
        found, others = jax.device_get(recogniser.heard(recogniser.params, batch, lengths, how))
        for row, i in enumerate(chosen):
            count = int(found.counts[row])
            more = Labels.of(found, row, count, how)._asdict()
            if others is not None:
                listed = zip(*(x[row].tolist() for x in others))
                more["nbest"] = [(recogniser.text(x, n), score) for x, n, score in listed if score > -np.inf]
            results[i] = results[i]._replace(text=recogniser.text(found.labels[row], count), **more)
        left = min(order, default=len(results))
        yield from results[ready:left]
        ready = max(ready, left)
    yield from results[ready:]
