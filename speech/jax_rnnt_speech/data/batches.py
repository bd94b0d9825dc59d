"""Batches of similar length: a few static shapes, so XLA compiles few programs and computes little padding.

Utterances are sorted into buckets. A bucket pads to its longest member.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.data import corpora, texts
from jax_rnnt_speech.data.buckets import fewest
from jax_rnnt_speech.data.utterances import Report
from jax_rnnt_speech.system import UserError, hosts, refuse_if

TEXT_LABELS = 48  # of a sentence, at most
TEXTS = 6  # sentences of --text for each row of a batch


class Bucket(NamedTuple):
    frames: int
    labels: int
    batch: int  # utterances
    members: list  # utterances of the corpus


class Labelled(NamedTuple):
    """A corpus and the labels of its usable utterances."""

    corpus: object
    labels: dict  # by the number of the utterance
    without: frozenset = frozenset()  # utterances that have no loss, but an error rate: they have no labels here


class NothingLeft(UserError):
    """The error of a corpus in which nothing can be trained on."""


def labelled(corpus, tokens, subsampling, held_out=False):
    """Returns the labels of what can be trained on; the rest goes to the corpus's report.

    `subsampling` is the number of frames of an encoder frame; with None, no model decides whether the labels fit. With
    `held_out`, utterances whose labels do not fit stay, `without` a loss.
    """
    labels, without, scope = {}, [], "from the loss alone, " * held_out
    for i, x in enumerate(corpus.utterances):
        if not x.frames:
            continue
        tokens_of_text = tokens.encode(x.text)
        if tokens_of_text is None:
            reason = "characters outside the vocabulary"
        elif subsampling and len(tokens_of_text) > -(-x.frames // subsampling):
            reason = "fewer frames than labels"
        else:
            labels[i] = np.array(tokens_of_text, np.int32)
            continue
        corpus.report.add(scope + reason, x.name, again=False)
        without += [i] * held_out
    if not labels:
        which = "held-out utterance" if held_out else "utterance"
        raise NothingLeft(f"no usable {which} is left{corpus.report.summary()}")
    return Labelled(corpus, labels | {i: np.zeros(0, np.int32) for i in without}, frozenset(without))


def sentences(config, tokens):
    """Returns the first labels of each sentence of --text, [S, TEXT_LABELS], and their numbers [S]; without it None."""
    if not config.data.text:
        return None
    normalize, report, spelled = texts.normalizer(config.texts.normalize, config.texts.lower), Report(), []
    for words in corpora.sentences_of(Path(config.data.text), normalize, report):
        if labels := tokens.encode(" ".join(words)):
            spelled.append(labels[:TEXT_LABELS])
        else:
            report.add("characters outside the vocabulary", " ".join(words))
    for line in report.lines():
        hosts.say(f"text: {line}")
    refuse_if(not spelled, f"--text {config.data.text} has no sentence that the vocabulary can spell")
    labels = np.zeros((len(spelled), TEXT_LABELS), np.int32)
    for row, x in zip(labels, spelled):
        row[: len(x)] = x
    return labels, np.array([len(x) for x in spelled], np.int32)


def with_texts(batch, rng, part, texts):
    """Returns the batch with sentences."""
    (first, step), size = part, len(batch["valid"])
    some = rng.integers(len(texts[0]), size=TEXTS * step * size)[first::step]
    return batch | {"texts": texts[0][some], "text_lengths": texts[1][some]}


def make_buckets(data, config, devices):
    """Makes buckets with little padding, from the shortest utterances to the longest; fewer if that fills no batch."""
    order = sorted(data.labels, key=lambda i: (data.corpus.utterances[i].frames, i))
    frames = np.array([data.corpus.utterances[i].frames for i in order])
    limits = fewest(*np.unique(frames, return_counts=True), config.data.buckets).tolist()
    groups, waiting = [], []  # (frames, utterances)
    for low, high in zip([-1, *limits], limits):
        waiting += [i for i in order if low < data.corpus.utterances[i].frames <= high]
        if len(waiting) >= size_of(config, devices, high):
            groups.append((high, waiting))
            waiting = []  # otherwise they are too few for a batch, and join the next bucket
    if waiting:  # the longest ones are few, and the bucket before takes them
        groups.append((limits[-1], (groups.pop()[1] if groups else []) + waiting))
    buckets = []
    for limit, group in groups:
        full = max(devices, len(group) // devices * devices)
        labels = max(1, *(len(data.labels[i]) for i in group))
        buckets.append(Bucket(limit, labels, min(size_of(config, devices, limit), full), group))
    return buckets


def size_of(config, devices, frames):
    """Returns how many utterances of `frames` frames a batch has, as many on each device."""
    size, seconds = config.data.batch, config.data.batch_seconds
    if seconds:
        size = max(1, int(seconds * 1000 / config.features.hop / frames))
    return max(devices, size // devices * devices)


def collate(data, config, bucket, items, size):
    """Returns arrays of a batch of `size` rows from (utterance, features or None, spans); rows without: not `valid`."""
    copies, time_masks = config.masks
    batch = {
        "features": np.zeros((size, bucket.frames, data.corpus.features), np.float32),
        "lengths": np.ones(size, np.int32),
        "targets": np.zeros((size, bucket.labels), np.int32),
        "target_lengths": np.zeros(size, np.int32),
        "valid": np.zeros(size, bool),
        "spans": np.zeros((size, copies * (time_masks + config.data.mel_masks), 2), np.int32),
        "index": np.full(size, -1, np.int32),
    }
    for row, (i, x, spans) in enumerate(items):
        if x is not None:
            x = x[: bucket.frames]
            batch["features"][row, : len(x)], batch["lengths"][row] = x, len(x)
            batch["targets"][row, : len(data.labels[i])] = data.labels[i]
            batch["target_lengths"][row] = len(data.labels[i])
            batch["valid"][row], batch["spans"][row], batch["index"][row] = True, spans, i
    return batch


def testing(data, config, buckets, part):
    """Yields every utterance once, always in the same draw; a bucket's last batch may have rows that are not valid."""
    for bucket in buckets:
        size = bucket.batch // part[1]
        for start in range(0, len(bucket.members), bucket.batch):
            chosen, spans = bucket.members[start : start + bucket.batch][part[0] * size :][:size], 0
            items = [(i, data.corpus.load(i, np.random.default_rng(i)), spans) for i in chosen]
            yield collate(data, config, bucket, items, size)
