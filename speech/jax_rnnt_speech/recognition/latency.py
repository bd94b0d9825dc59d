"""Measures when words of a stream become final: the seconds from the end of each word to the event that has it.

The clock is that of the audio: the seconds that a stream has received when an event comes, without computing time.
"""

from typing import NamedTuple

import jax
import numpy as np
from rapidfuzz.distance import Levenshtein

from jax_rnnt_speech.data import batches
from jax_rnnt_speech.recognition import transcripts
from jax_rnnt_speech.system import programs

BLOCK = 0.02  # seconds that arrive at once
SHARE = 95  # per cent of words


def alignments(model, data, settings, language=None):
    """Yields (place, labels, frames) of each utterance of `batches.labelled` data whose audio is readable.

    Frames are those of the labels on the best path; None if the model has no path.
    """

    @programs.announced("alignments", place=1)
    @jax.jit
    def frames_of(params, batch):
        """Returns the frame of each label on the best path, [B, U]; -1 where there is no path."""
        network = model.network(params)
        x = model.encoded(network, model.inputs(batch), batch, language=language)
        return model.loss.align(network.joint.logits(x.frames, x.states), *x[2:])[1]

    for batch in batches.testing(data, settings, batches.make_buckets(data, settings, 1), (0, 1)):
        index = batch.pop("index")
        for i, frames in zip(index, np.asarray(frames_of(model.params, batch))):
            if i >= 0:
                labels = data.labels[i].tolist()
                frames = frames[: len(labels)]
                yield i, labels, None if (frames < 0).any() else frames


def words_of(model, corpus, data, settings, language=None):
    """Returns {(audio, start, end, channel): words with times from their starts} for utterances of `alignments`."""
    found = {}
    for i, labels, frames in alignments(model, data, settings, language):
        if frames is not None:
            words = transcripts.words(model, labels, frames, duration=corpus.utterances[i].seconds)
            found[key(corpus.entries[i])] = words
    return found


def key(entry):
    return entry.audio, entry.start, entry.end, entry.channel


def heard(live, samples):
    """Returns (text, [(word, seconds received when it was final)]) of samples [S] that arrive in a `streams.Stream`."""
    live.restart()
    rate, found = live.extractor.rate, []
    size = round(BLOCK * rate)
    for start in range(0, len(samples), size):
        piece = samples[start : start + size]
        found += [(x.text, (start + len(piece)) / rate) for words, _ in live.heard(piece) for x in words]
    last = live.heard(np.zeros(0, np.float32), end=True)
    found += [(x.text, len(samples) / rate) for words, _ in last for x in words]
    return live.words.said.strip(), found


class Latency(NamedTuple):
    """The latencies of one recording."""

    seconds: list  # from the end of each recognised word to the event that made it final
    at_the_end: int  # how many of these words the end of the recording made final
    laal: float | None


def latency(reference, found, duration):
    """Returns the Latency of words that were `heard`, against those of the reference, as Intervals."""
    seconds, at_the_end = [], 0
    for x in Levenshtein.opcodes([x.text for x in reference], [text for text, _ in found]):
        for i, j in zip(range(x.src_start, x.src_end), range(x.dest_start, x.dest_end)) if x.tag == "equal" else ():
            seconds.append(found[j][1] - reference[i].end)
            at_the_end += found[j][1] >= duration
    return Latency(seconds, at_the_end, laal([time for _, time in found], duration, len(reference)))


def laal(delays, duration, count):
    """Returns length-adaptive average lagging (Papi et al. 2022), as NeMo: how far words lag behind evenly spoken ones.

    `delays` are the seconds received when each word was final; `count` are the reference's words. None: no word came.
    """
    if not delays:
        return None
    step, lags = duration / max(len(delays), count), []
    for i, x in enumerate(delays):
        lags.append(x - i * step)
        if x >= duration:
            break
    return sum(lags) / len(lags)


def summary(latencies):
    """Returns a test's summary of the Latency of its recordings."""
    seconds, lags = [y for x in latencies for y in x.seconds], [x.laal for x in latencies if x.laal is not None]
    mean, most = (float(np.mean(seconds)), float(np.percentile(seconds, SHARE))) if seconds else (None, None)
    more = {"words": len(seconds), "at_the_end": sum(x.at_the_end for x in latencies)}
    return {"mean": mean, "p95": most, **more, "laal": float(np.mean(lags)) if lags else None}
