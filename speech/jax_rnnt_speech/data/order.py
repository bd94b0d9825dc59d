"""In which order a corpus of shards is read: a function of the seed, the epoch and the list of shards.

Shards are dealt to R readers once; a process owns R / P of them, and rows of a batch come from every reader alike. In
each epoch a reader permutes its shards, reads them one after the other, and moves each utterance to a random place
among the next `buffer` ones. It then fills batches of a few lengths, the buckets. Nothing is read for that, so any
batch of any epoch is known by its number: workers and resumed runs need nothing else.
"""

import functools
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.system import UserError, hosts

SLACK = 0.05  # seconds by which an utterance may be longer than is written, as manifests round
ESTIMATE = 1.05, 0.2  # factor, and seconds: by how much it may be longer than estimated
SOUGHT = 1000  # lengths among which limits of buckets are chosen


class Source(NamedTuple):
    """What one name of --train or --synthetic is for a reader."""

    items: np.ndarray  # numbers of usable utterances of the reader, as the shards list them
    synthetic: bool = False


class Shape(NamedTuple):
    """Batches of a bucket."""

    seconds: float  # of its utterances, at most
    rows: int  # for each reader
    frames: int = 0
    labels: int = 0


def dealt(sizes, readers):
    """Numbers of shards of each reader, such that all have about as much: the largest first, to who has the least."""
    total, found = np.zeros(readers), [[] for _ in range(readers)]
    for i in np.argsort(-np.asarray(sizes, np.float64), kind="stable"):
        reader = int(np.argmin(total))
        total[reader] += max(sizes[i], 1)
        found[reader].append(int(i))
    return [sorted(x) for x in found]


def longest(seconds):
    """What utterances may last, by what is written."""
    return np.where(seconds < 0, -seconds * ESTIMATE[0] + ESTIMATE[1], seconds + SLACK).astype(np.float64)


def shuffled(rng, shards, buffer):
    """A permutation of utterances in the order of their shards: of the shards, and within the buffer."""
    starts = np.flatnonzero(np.diff(shards, prepend=-1))
    sizes = np.diff(starts, append=len(shards))
    ranks = rng.permutation(len(starts))  # the place of each shard
    begins = np.zeros(len(starts), np.int64)
    begins[np.argsort(ranks)] = np.cumsum([0, *sizes[np.argsort(ranks)]])[:-1]
    place = np.arange(len(shards)) - np.repeat(starts, sizes) + np.repeat(begins, sizes)
    return np.argsort(place + rng.uniform(0, max(buffer, 1), len(shards)), kind="stable")


class Reader:
    """What one reader draws in each epoch. `draws` of each source: how many; None: all it has."""

    def __init__(self, number, seed, index, sources, draws, versions, speeds, most, buffer):
        self.number, self.seed, self.index, self.sources, self.draws = number, seed, index, sources, draws
        self.versions, self.speeds, self.most, self.buffer = versions, np.array(speeds), most + SLACK, buffer
        self.lengths = np.minimum(longest(index.seconds), self.most)

    def rng(self, *what):
        return np.random.default_rng((self.seed, self.number, *what))

    def source(self, epoch, k):
        """Items of a source in their order."""
        source, draws = self.sources[k], self.draws[k]
        shards = np.asarray(self.index.shards[source.items])

        def of_pass(i):
            return source.items[shuffled(self.rng(0, k, i), shards, self.buffer)]

        if draws is None:
            return of_pass(epoch)
        if not draws or not len(source.items):
            return np.zeros(0, np.int64)
        first = epoch * draws
        passes = range(first // len(source.items), -(-(first + draws) // len(source.items)))
        found = np.concatenate([of_pass(i) for i in passes])
        start = first - passes[0] * len(source.items)
        return found[start : start + draws]

    def epoch(self, epoch):
        """(items, versions) in their order; what is mixed lies evenly among the others."""
        parts = [self.source(epoch, k) for k in range(len(self.sources))]
        items = np.concatenate([*parts, np.zeros(0, np.int64)])
        if len(parts) > 1:
            share = np.concatenate([(np.arange(len(x)) + 0.5) / max(len(x), 1) for x in parts])
            items = items[np.argsort(share, kind="stable")]
        synthetic = np.isin(
            items, np.concatenate([np.zeros(0, np.int64), *(x.items for x in self.sources if x.synthetic)])
        )
        versions = self.rng(1, epoch).integers(self.versions, size=len(items))
        plain = versions - versions % len(self.speeds)  # the same without another speed
        slow = self.lengths[items] / self.speeds[versions % len(self.speeds)] > self.most
        return items, np.where(slow | synthetic, plain, versions)

    def heard(self, items, versions):
        """Seconds of items in their versions, at most."""
        return self.lengths[items] / self.speeds[versions % len(self.speeds)]

    @property
    def varies(self):
        """Whether epochs have other numbers of batches."""
        return len(self.speeds) > 1 or any(x is not None for x in self.draws)


def limits(readers, epoch, count):
    """Seconds that end the buckets, of which each has about as much audio; the same in all processes."""
    edges = np.linspace(0, readers[0].most, SOUGHT + 1)
    amount = np.zeros(SOUGHT)
    for reader in readers:
        seconds = reader.heard(*reader.epoch(epoch))
        amount += np.histogram(seconds, edges, weights=seconds)[0]
    amount = hosts.gathered(amount[None]).sum(0)
    if not amount.any():
        return []
    share = np.cumsum(amount) / amount.sum()
    found = {int(np.searchsorted(share, (k + 1) / count - 1e-9)) for k in range(count)}
    return [float(edges[min(i, SOUGHT - 1) + 1]) for i in sorted(found)]


class Order:
    """Batches of all epochs by their numbers: a source of data for Grain.

    An item is (epoch, shape, [(reader, item, version), ...]). A run that goes on with other readers begins at
    `first_step` with `first_epoch`.
    """

    def __init__(self, readers, shapes, seed, first_step=0, first_epoch=0):
        self.readers, self.shapes, self.seed, self.end = readers, shapes, seed, 0  # the end of what is covered
        self.first_step, self.first_epoch = first_step, first_epoch
        self.batches = np.zeros((0, len(shapes)), np.int64)  # of each shape, in each epoch
        self.reach(1)

    def counted(self, epoch):
        """Utterances of each shape, for each reader."""
        found = []
        for reader in self.readers:
            items, versions = reader.epoch(epoch)
            found.append(np.bincount(self.bucket(reader.heard(items, versions)), minlength=len(self.shapes)))
        return found

    def bucket(self, seconds):
        edges = np.array([x.seconds for x in self.shapes])
        return np.minimum(np.searchsorted(edges, seconds - 1e-9), len(edges) - 1)

    def reach(self, epochs):
        """Counts the batches of so many epochs. All processes do it together."""
        known = len(self.batches)
        if epochs <= known:
            return
        if known and not any(x.varies for x in self.readers):
            self.batches = np.tile(self.batches[:1], (epochs, 1))
            return
        some = np.array([self.counted(self.first_epoch + i) for i in range(known, epochs)])  # [epochs, readers, shapes]
        rows = np.array([x.rows for x in self.shapes])
        most = hosts.gathered((-(-some // rows)).max(1)[None]).max(0)
        self.batches = np.concatenate([self.batches, most])
        if not self.batches[0].sum():
            raise UserError("no utterance is left for a batch")

    def cover(self, end):
        """Counts as many epochs as there are until a step."""
        self.end = max(self.end, end)
        while (left := end - self.first_step - self.batches.sum()) > 0:
            self.reach(len(self.batches) + 1 + int(left // max(self.batches.sum(1).mean(), 1)))

    def steps(self, epochs):
        """Steps until the end of so many epochs of the whole run."""
        self.reach(max(epochs - self.first_epoch, 1))
        return self.first_step + int(self.batches[: max(epochs - self.first_epoch, 0)].sum())

    def place(self, step):
        """(epoch, number of the batch in it) of a step, counted from 0."""
        ends = np.cumsum(self.batches.sum(1))
        i = int(np.searchsorted(ends, step - self.first_step, side="right"))
        return self.first_epoch + i, int(step - self.first_step - (ends[i - 1] if i else 0))

    @functools.lru_cache(2)  # noqa: B019
    def sequence(self, epoch):
        """(shape, number among the batches of that shape) of each batch of an epoch."""
        counts = self.batches[epoch - self.first_epoch]
        shape = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(x) for x in counts])
        rng = np.random.default_rng((self.seed, 2, epoch))
        order = np.argsort((number + rng.uniform(size=len(number))) / counts[shape], kind="stable")
        return shape[order], number[order]

    @functools.lru_cache(2)  # noqa: B019
    def rows(self, epoch):
        """For each reader: (items, versions, places of the items of each shape)."""
        found = []
        for reader in self.readers:
            items, versions = reader.epoch(epoch)
            bucket = self.bucket(reader.heard(items, versions))
            found.append((items, versions, [np.flatnonzero(bucket == k) for k in range(len(self.shapes))]))
        return found

    def __len__(self):
        return self.end

    def __getitem__(self, step):
        epoch, place = self.place(step)
        shapes, numbers = self.sequence(epoch)
        shape, number = int(shapes[place]), int(numbers[place])
        size, batch = self.shapes[shape].rows, []
        for i, (items, versions, places) in enumerate(self.rows(epoch)):
            some = places[shape][number * size :][:size]
            rows = [(i, int(items[j]), int(versions[j])) for j in some]
            batch += [*rows, *[None] * (size - len(rows))]
        return epoch, shape, batch

    def padding(self):
        """Share of the frames of the first epoch that are none, by seconds; rows without an utterance count."""
        total = sum(x.seconds * x.rows * n for x, n in zip(self.shapes, self.batches[0])) * len(self.readers)
        used = 0.0
        for reader in self.readers:
            used += reader.heard(*reader.epoch(self.first_epoch)).sum()
        return 1 - used / total
