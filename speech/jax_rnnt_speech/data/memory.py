"""A source that remembers: the features of its utterances, computed once, whose frames are then known exactly."""

import contextlib
import dataclasses
import functools
import hashlib
from typing import NamedTuple

import jax
import numpy as np

from jax_rnnt_speech.config.options import names
from jax_rnnt_speech.data import archives, cache, corpora, sources, workers
from jax_rnnt_speech.data.index import indexed
from jax_rnnt_speech.data.loading import Loader, text_of
from jax_rnnt_speech.data.rows import Entry, keys_of
from jax_rnnt_speech.data.utterances import Report, Utterance
from jax_rnnt_speech.system import UserError, hosts, refuse_if


@dataclasses.dataclass
class Remembered:
    """Utterances of one reader whose frames [n, versions] are known; a version that is too long has none.

    It takes the place of an `index.Index`. `arrays` has the features of number i * versions + version; `places` are
    the i of the utterances.
    """

    number: int  # number of the reader
    utterances: list
    frames: np.ndarray
    hop: float  # seconds of a frame
    arrays: object
    places: np.ndarray
    shards: np.ndarray
    listed: tuple = ()
    index: object = None  # an Index, which has the utterances by these numbers
    numbers: np.ndarray = None
    folders: list = dataclasses.field(default_factory=list)  # folders of arrays that were made

    @property
    def seconds(self):
        return self.frames[:, 0] * self.hop

    def lengths(self, items):
        return self.seconds[items]

    def entry(self, i, sought=True):
        return self.utterances[i]

    def listing(self, i, sought=True):
        """Returns the Entry that the sources list."""
        return self.index.entry(int(self.numbers[i]), sought)

    def load(self, i, version, rng):
        """Returns the features [T, F] of a version; None if its audio is bad."""
        return self.arrays.load(int(self.places[i]) * self.frames.shape[1] + version, rng)

    def lengths_of_versions(self, items, versions, speeds, most):
        """Returns (versions, seconds) of items: they may be too long for their version's speed."""
        frames = self.frames[items, versions]
        versions = np.where(frames, versions, versions - versions % len(speeds))  # at the recording's own speed
        return versions, self.frames[items, versions] * self.hop


def remember_corpus(corpus, frames, number, readers):
    """Returns the Remembered of a corpus whose versions have these frames, and the items of a reader."""
    frames = np.array(frames, np.int64).reshape(len(corpus.utterances), -1)
    places = np.arange(len(frames))
    remembered = Remembered(
        number, corpus.utterances, frames, corpus.hop, corpus, places, np.zeros(len(frames), np.int32)
    )
    return remembered, places[number::readers][frames[number::readers, 0] > 0]


class HeldOut(NamedTuple):
    """The corpus of recordings that --valid names, whose features are kept."""

    utterances: list
    entries: list
    features: int
    hop: float
    report: Report
    remembered: Remembered

    def load(self, i, rng):
        return self.remembered.load(i, 0, rng)


def held_out(config, index, folder, count):
    """Returns the corpus that --valid names, with its index and its features in folders.

    Of several processes, the first one makes them, in `count` processes. Without a folder for features, they are
    computed at each use.
    """
    valid, first, report = names(config.data.valid), not jax.process_index(), Report()
    if folder is None or any(map(sources.by_function, valid)):
        return corpora.open_corpus(config.data.valid, config)
    corpora.refuse_weights(valid, "valid")
    config = config.replace(speeds=[1.0], noise="", gain=0.0)
    if not first:
        hosts.wait("held-out features")
    shards = [y for x in valid for y in archives.all_shards(x, config.texts.columns)]
    read = indexed(shards, keys_of(*config.texts.columns), index, 0, count)
    for reason, name in read.faults:
        report.add(reason, name)
    loader = Loader(config, 1, None, [read], (), config.features.mels)
    remembered, numbers = kept(loader, 0, np.arange(len(read.shards)), folder, report, count, first)
    if first:
        hosts.wait("held-out features")
    refuse_if(not len(numbers), f"{', '.join(valid)}: no usable utterance{report.summary()}")
    entries = [read.entry(i) for i in numbers.tolist()]
    for x in entries:
        for note in x.notes:
            report.note(note, x.name)
    return HeldOut(remembered.utterances, entries, config.features.mels, remembered.hop, report, remembered)


def kept(loader, place, items, folder, report, processes, makes=True):
    """Returns the Remembered of an index, with features of some items in a folder, and the numbers that have any.

    Features that are not in the folder yet are made by `processes` processes; without `makes`, another one has made
    them.
    """
    index, (_, normalize, extractor, versions) = loader.indices[place], loader.tools
    options, count, hop = loader.config, versions.count, loader.config.features.hop / 1000
    entries = (index.entry(i) for i in items.tolist())
    files = cache.stamps(x.audio for x in entries if isinstance(x, Entry) and not hasattr(x.audio, "archive"))
    decided = [index.folder.name, files, index.number, hashlib.sha256(items.astype(np.int64).tobytes()).hexdigest(),
               dataclasses.asdict(extractor), versions.key(), options.data.max_seconds,
               options.texts.normalize, options.texts.lower]  # fmt: skip

    def made():
        work = functools.partial(loader.versions_of, place, items)
        for i, (arrays, left_out, notes) in enumerate(workers.items(work, len(items), cache.THREADS, processes)):
            for reason, name, passing in left_out:
                report.add(reason, name, again=False, passing=passing)
            for note in notes:
                report.note(*note, again=False)
            yield from ((i * count + k, x) for k, x in enumerate(arrays))

    def expected():
        seconds = index.seconds[items]
        with contextlib.suppress(UserError):  # storage that fails: its files are left out in their turn
            seconds = index.lengths(items)
        return float(np.nan_to_num(np.abs(seconds)).sum()) / hop * count

    def name_of(number):
        return index.entry(int(items[number // count]), False).name

    arrays = cache.stored(folder, decided, len(items) * count, extractor.mels, report, expected, made, name_of, makes)
    frames = arrays.index[:, 1].reshape(-1, count)
    places = np.flatnonzero(frames[:, 0])
    utterances = []
    for i in places.tolist():
        x = index.entry(int(items[i]), False)
        utterances.append(Utterance(x.name, int(frames[i, 0]), text_of(x, normalize), x.speaker, frames[i, 0] * hop))
    numbers = items[places]
    where = arrays, places, np.asarray(index.shards[numbers]), index.listed
    where = *where, index, numbers, [arrays.folder.name]
    return Remembered(index.number, utterances, frames[places], hop, *where), numbers
