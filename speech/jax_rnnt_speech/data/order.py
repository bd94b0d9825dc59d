"""The order in which a corpus of shards is read: a function of the seed, the epoch and the list of shards.

Shards are dealt to R readers once; a process owns R / P of them, and rows of a batch come from every reader alike. In
each epoch a reader permutes its shards, reads them one after the other, and moves each utterance to a random place
among the next `buffer` ones. Windows of that order then fill batches of a few lengths, the buckets. Where all lengths
are written, an epoch is one window. Where some are not, a window has a stated number of utterances of each reader, and
its lengths are read from headers when its turn comes; so a run begins with those of its first window.

The batches of a window are a function of its lengths, and whoever needs one finds it out: the workers that make it, and
the process that takes it. Processes tell each other how many batches of each shape they have. The largest number
counts, and a reader that has fewer gives rows without an utterance. A place in the order is the epoch, the window, and
how many of its batches came before; nothing else is needed to go on.
"""

import bisect
import functools
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.data.index import SLACK
from jax_rnnt_speech.system import hosts, refuse_if

SOUGHT = 1000  # lengths among which limits of buckets are chosen
NEAR = 0.9  # share of the longest utterances' length above which no bucket for longer ones is considered
LEAST = 1000  # utterances of a window, for each reader


class Shape(NamedTuple):
    """The batches of a bucket."""

    seconds: float  # longest of its utterances
    rows: int  # rows for each reader
    frames: int = 0
    labels: int = 0
    batches: int = 0  # batches of a window, by the first one


def dealt(sizes, readers):
    """Returns the shards of each reader, such that all have about as much: the largest first, to who has the least."""
    total, shards = np.zeros(readers), [[] for _ in range(readers)]
    for i in np.argsort(-np.asarray(sizes, np.float64), kind="stable"):
        reader = int(np.argmin(total))
        total[reader] += max(sizes[i], 1)
        shards[reader].append(int(i))
    return [sorted(x) for x in shards]


def shuffled(rng, shards, buffer):
    """Returns a permutation of utterances in the order of their shards: of the shards, and within the buffer."""
    starts = np.flatnonzero(np.diff(shards, prepend=-1))
    sizes = np.diff(starts, append=len(shards))
    ranks = rng.permutation(len(starts))  # the place of each shard
    begins = np.zeros(len(starts), np.int64)
    begins[np.argsort(ranks)] = np.cumsum([0, *sizes[np.argsort(ranks)]])[:-1]
    place = np.arange(len(shards)) - np.repeat(starts, sizes) + np.repeat(begins, sizes)
    return np.argsort(place + rng.uniform(0, max(buffer, 1), len(shards)), kind="stable")


class Reader:
    """Draws the utterances of a reader, epoch by epoch.

    For each source, `items` are the numbers of usable utterances of the reader, as the shards list them, and `draws` is
    how many of them it draws, None being all it has.
    """

    def __init__(self, number, seed, index, items, draws, versions, speeds, most, buffer):
        self.number, self.seed, self.index, self.items, self.draws = number, seed, index, items, draws
        self.versions, self.speeds, self.most, self.buffer = versions, np.array(speeds), most, buffer
        self.size = sum(len(x) if n is None else n for x, n in zip(items, draws) if len(x))
        self.varies = len(speeds) > 1 or any(n is not None for n in draws)  # whether the number of batches varies

    def rng(self, *what):
        return np.random.default_rng((self.seed, self.number, *what))

    def source(self, epoch, k):
        """Returns the items of a source in their order."""
        items, draws = self.items[k], self.draws[k]
        shards = np.asarray(self.index.shards[items])

        def items_of_pass(i):
            return items[shuffled(self.rng(0, k, i), shards, self.buffer)]

        if draws is None:
            return items_of_pass(epoch)
        if not draws or not len(items):
            return np.zeros(0, np.int64)
        first = epoch * draws
        passes = range(first // len(items), -(-(first + draws) // len(items)))
        drawn = np.concatenate([items_of_pass(i) for i in passes])
        start = first - passes[0] * len(items)
        return drawn[start : start + draws]

    def epoch(self, epoch):
        """Returns (items, versions) in their order; mixed sources lie evenly among the others."""
        parts = [self.source(epoch, k) for k in range(len(self.items))]
        items = np.concatenate([*parts, np.zeros(0, np.int64)])
        if len(parts) > 1:
            share = np.concatenate([(np.arange(len(x)) + 0.5) / max(len(x), 1) for x in parts])
            items = items[np.argsort(share, kind="stable")]
        return items, self.rng(1, epoch).integers(self.versions, size=len(items))

    def lengths_of_versions(self, items, versions):
        """Returns (versions, seconds) of items: they may be too long for their version's speed. Headers may be read."""
        return self.index.lengths_of_versions(items, versions, self.speeds, self.most)

    def longest_item(self):
        """Returns the seconds of the longest item, in any version and epoch; all lengths must be known."""
        items = np.concatenate(self.items)
        versions = (np.full(len(items), i) for i in range(len(self.speeds)))
        return float(max(self.lengths_of_versions(items, x)[1].max(initial=0) for x in versions))


def lengths(readers, epoch, window):
    """Returns (seconds [N], counts [N], sum of seconds) of the first window's utterances, on all processes.

    The seconds are the upper edges of the bins of a histogram, and the last of them holds utterances of other windows.
    Utterances that will be left out last 0 s, and are not counted.
    """
    most = readers[0].most + SLACK
    edges, found = np.linspace(0, most, SOUGHT + 1), np.zeros((2, SOUGHT))
    for reader in readers:
        _, seconds = reader.lengths_of_versions(*(x[: window or None] for x in reader.epoch(epoch)))
        found += [np.histogram(seconds, edges, weights=x)[0] for x in (np.sign(seconds), seconds)]
    counts, amount = hosts.gathered(found[None]).sum(0)
    used = np.flatnonzero(counts)
    seconds, counts = edges[used + 1], counts[used].astype(int)
    if not window and len(used):  # other epochs may have longer ones
        longest = hosts.gathered(np.array([[max(x.longest_item() for x in readers)]])).max()
        seconds[-1] = max(seconds[-1], longest)
    elif len(used) and seconds[-1] > NEAR * most:  # other windows may have longer ones
        seconds[-1] = most
    else:
        seconds, counts = np.append(seconds, most), np.append(counts, 0 if len(used) else 1)
    return seconds, counts, float(amount.sum())


class Order:
    """The batches of all epochs by their windows, for some readers.

    `window` is the number of utterances of each reader in a window; 0 makes an epoch the window, as all lengths are
    written or the readers have no more than one window.
    """

    def __init__(self, readers, shapes, seed, window=0):
        self.readers, self.shapes, self.seed, self.window = readers, shapes, seed, window
        self.size = int(hosts.gathered(np.array([[max(x.size for x in readers)]])).max())
        self.windows = -(-self.size // window) if window else 1  # of an epoch
        refuse_if(not self.size, "no utterance is left for a batch")

    def bucket(self, seconds):
        edges = np.array([x.seconds for x in self.shapes])
        return np.minimum(np.searchsorted(edges, seconds - 1e-9), len(edges) - 1)

    def after(self, epoch, window):
        """Returns the next window."""
        return (epoch, window + 1) if window + 1 < self.windows else (epoch + 1, 0)

    @functools.lru_cache(2)  # noqa: B019
    def epoch(self, epoch):
        return [x.epoch(epoch) for x in self.readers]

    @functools.lru_cache(3)  # noqa: B019
    def rows(self, epoch, window):
        """Returns for each reader (items, versions, seconds, places of the items of each shape)."""
        every, some = [], slice(window * self.window, (window + 1) * self.window or None)
        for reader, (items, versions) in zip(self.readers, self.epoch(epoch)):
            versions, seconds = reader.lengths_of_versions(items[some], versions[some])
            bucket = self.bucket(seconds)
            places = [np.flatnonzero(bucket == k) for k in range(len(self.shapes))]
            every.append((items[some], versions, seconds, places))
        return every

    def counts(self, epoch, window):
        """Returns the batches of each shape in a window, as far as these readers are concerned."""
        utterances = [[len(x) for x in places] for *_, places in self.rows(epoch, window)]
        return tuple((-(-np.array(utterances) // [x.rows for x in self.shapes])).max(0).tolist())

    def most(self, epoch, window):
        """Returns the batches of each shape in a window. All processes must ask together."""
        return tuple(hosts.gathered(np.array([self.counts(epoch, window)])).max(0).tolist())

    @functools.lru_cache(4)  # noqa: B019
    def sequence(self, epoch, window, counts):
        """Returns (shape, number among the batches of that shape) of each batch of a window.

        It is the same for smaller counts, save that batches are missing.
        """
        number = [np.arange(x) for x in counts]
        place = [(n + np.random.default_rng((self.seed, 2, epoch, window, k)).uniform(size=len(n))) / max(1, x.batches)
                 for k, (n, x) in enumerate(zip(number, self.shapes))]  # fmt: skip
        shape, number, place = np.repeat(np.arange(len(counts)), counts), *map(np.concatenate, (number, place))
        order = np.lexsort((shape, place))
        return shape[order], number[order]

    def batch(self, epoch, window, shape, number):
        """Returns (epoch, shape, [(reader, item, version) or None, ...])."""
        size, batch = self.shapes[shape].rows, []
        for i, (items, versions, _, places) in enumerate(self.rows(epoch, window)):
            some = places[shape][number * size :][:size]
            rows = [(i, int(items[j]), int(versions[j])) for j in some]
            batch += [*rows, *[None] * (size - len(rows))]
        return epoch, shape, batch

    def steps(self, first, epochs):
        """Returns how many batches lie between two epochs' starts; an estimate where a window is less than an epoch."""
        if self.window:
            return round((epochs - first) * sum(x.batches for x in self.shapes) * max(1, self.size / self.window))
        varies = any(x.varies for x in self.readers)
        counts = [sum(self.most(i, 0)) for i in range(first, epochs if varies else min(first + 1, epochs))]
        return sum(counts) * (1 if varies else epochs - first)

    def padding(self, epoch):
        """Returns the share of padding in the frames of an epoch's first window; rows without an utterance count."""
        total = sum(x.seconds * x.rows * x.batches for x in self.shapes) * len(self.readers)
        return 1 - sum(seconds.sum() for _, _, seconds, _ in self.rows(epoch, 0)) / total


class Batches:
    """The batches of an order that have utterances of its readers, from a place on; None from epoch `until` on."""

    def __init__(self, order, epoch, window, done=0, until=None):
        """Starts in a window, of which `done` batches came before."""
        self.order, self.until = order, until
        self.starts = [(-done, epoch, window)]  # numbers of the first batches of windows

    def __getitem__(self, i):
        starts, order = self.starts, self.order  # threads may both go on from there, and find the same
        while (end := starts[-1][0] + sum(order.counts(*starts[-1][1:]))) <= i and starts[-1][1] != self.until:
            starts = self.starts = [*starts, (end, *order.after(*starts[-1][1:]))]
        begin, epoch, window = starts[bisect.bisect_right(starts, i, key=lambda x: x[0]) - 1]
        if self.until is not None and epoch >= self.until:
            return None
        shapes, numbers = order.sequence(epoch, window, order.counts(epoch, window))
        return order.batch(epoch, window, int(shapes[i - begin]), int(numbers[i - begin]))
