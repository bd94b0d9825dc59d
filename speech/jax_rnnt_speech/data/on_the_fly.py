"""A corpus that is read while it is trained on: decoded, augmented and made features of in Grain's workers.

Before the first step, the index alone is read. What of an utterance cannot be used is found when its turn comes: its
row of a batch is not valid then, and the report has its name.
"""

import functools
import hashlib
import json
import math
import os
import time
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.config.options import names
from jax_rnnt_speech.data import (
    archives,
    audio,
    augmentation,
    batches,
    features,
    index,
    manifests,
    order,
    texts,
    workers,
)
from jax_rnnt_speech.data import tokens as vocabularies
from jax_rnnt_speech.data.utterances import Report, Utterance
from jax_rnnt_speech.system import UserError, hosts

SAMPLE = 20_000  # texts of which a vocabulary is made, and the longest ones are found
ROOM = 1.25  # for labels in a batch, beyond the longest of a sample
SMALL = 20  # hours for which a cache takes less time
THREADS = 2  # that load batches, without workers
CHANGED = "other training archives or manifests than its list has"


class Named(NamedTuple):
    """A source by its name, with the weight that it may have."""

    name: str
    weight: float | None
    synthetic: bool = False


def keys_of(options):
    """Names of columns, and of the keys of a row, by a `config.Texts`."""
    columns = options.audio_column, options.text_column, options.speaker_column
    usual = manifests.AUDIO_KEYS, manifests.TEXT_KEYS, manifests.SPEAKER_KEYS
    return columns, [(x,) if x and isinstance(x, str) else (*x, *more) for x, more in zip(columns, usual)]


def size_of(shard):
    """About how much a shard holds."""
    if isinstance(shard, archives.Lines):
        return shard.end - shard.begin
    if isinstance(shard, archives.Listed):
        return len(shard.entries)
    return 1 if isinstance(shard, archives.Parquet) else os.path.getsize(shard.path)


class Loader:
    """Makes a batch of an item of the order. Workers have a copy each."""

    def __init__(self, config, subsampling, vocabulary, shards, indices, shapes):
        self.config, self.subsampling, self.vocabulary = config, subsampling, vocabulary
        self.shards, self.indices, self.shapes = shards, indices, shapes  # for each reader of the process
        self.features, self.keys = config.features.mels, keys_of(config.texts)[1]

    @functools.cached_property
    def tools(self):
        """What is better made than copied."""
        normalize = texts.normalizer(self.config.texts.normalize, self.config.texts.lower)
        extractor = features.extractor(self.config.features, self.config.encoder.chunk)
        return vocabularies.from_json(self.vocabulary), normalize, extractor, augmentation.Versions(self.config)

    def entry(self, place, item, sought=True):
        """The Entry or Fault of an item of a reader. `sought`: whether its audio is."""
        number = self.indices[place]
        return self.shards[place][number.shards[item]].entry(number.rows[item].tolist(), self.keys, sought)

    def __call__(self, item):
        epoch, shape, rows = item
        frames, labels, left_out, items = self.shapes[shape].frames, {}, [], []
        for i, row in enumerate(rows):
            x, spans, name = None, 0, "an utterance"
            if row is not None:
                place, number, version = row
                key = epoch, self.indices[place].number, number
                try:
                    entry = self.entry(place, number)
                    name = entry.name
                    x, labels[i] = self.loaded(entry, version, key, shape)
                    rng = np.random.default_rng((self.config.run.seed, 3, *key))
                    spans = features.draw_spans(self.config.data, rng, len(x), self.features)
                except (audio.AudioError, manifests.LineError) as error:
                    left_out.append((getattr(error, "reason", str(error)), name))
                except UserError as error:  # workers of Grain would print a traceback
                    return {"error": str(error)}
            items.append((i, x, spans))
        bucket = batches.Bucket(frames, self.shapes[shape].labels, len(rows), ())
        batch = batches.collate(batches.Labelled(self, labels), self.config.data, bucket, items, len(rows))
        return batch | {"left_out": left_out}

    @property
    def corpus(self):
        return self

    def loaded(self, entry, version, key, shape):
        """(features, labels) of an utterance, or a LineError or AudioError that says why there are none."""
        vocabulary, normalize, extractor, versions = self.tools
        if isinstance(entry, manifests.Fault):
            raise manifests.LineError(entry.reason)
        text = normalize(entry.text)
        if not text:
            raise manifests.LineError("empty transcript")
        labels = vocabulary.encode(text)
        if labels is None:
            raise manifests.LineError("characters outside the vocabulary")
        rate, most = self.config.features.rate, self.config.data.max_seconds
        samples = read(entry, rate)
        found = len(samples) / rate
        if entry.end is None and entry.whole and abs(entry.whole - entry.start - found) > 0.1 + 0.05 * entry.whole:
            raise manifests.LineError("duration differs from the manifest's")
        if len(samples) > round(most * rate):
            raise manifests.LineError(f"longer than {most:g} s")
        x = extractor(versions.of(samples, version, key))
        if not len(x):
            raise manifests.LineError("shorter than a frame")
        if len(x) > self.shapes[shape].frames:
            raise manifests.LineError("longer than its manifest or header says")
        if len(labels) > -(-len(x) // self.subsampling):
            raise manifests.LineError("fewer frames than labels")
        if len(labels) > self.shapes[shape].labels:
            raise manifests.LineError("more labels than batches of its length have room for")
        return x, np.array(labels, np.int32)


def read(entry, rate):
    """Samples of an utterance. Storage that fails is tried again, and then ends the run."""
    for wait in (*archives.WAITS, None):
        try:
            return audio.read(entry.audio, rate, entry.start, entry.end, entry.channel)
        except audio.AudioError as error:
            if not error.passing:
                raise
            if wait is None:
                raise archives.StorageError(f"{error}; tried {len(archives.WAITS) + 1} times") from None
            time.sleep(wait)


class OnTheFly:
    """A corpus in shards. Its `utterances` are a sample, of which vocabulary and statistics are made.

    `known`: what `state` was in the checkpoint with which a run goes on, or None.
    """

    def __init__(self, config, folder, count, known=None, step=0):
        self.config, self.folder, self.workers, self.report = config, folder, count, Report()
        self.features, self.hop, self.further = config.features.mels, config.features.hop / 1000, frozenset()
        self.columns, self.keys = keys_of(config.texts)
        self.extractor = features.extractor(config.features, config.encoder.chunk)
        self.versions, self.known, self.step = augmentation.Versions(config), known, step
        self.named = [Named(*archives.weighted(x)) for x in names(config.data.train)]
        self.named += [
            Named(*archives.weighted(x), True) for x in names(config.data.synthetic) if config.data.synthetic
        ]
        part, processes = hosts.part()
        self.readers = known["readers"] if known and known["readers"] % processes == 0 else 0
        self.readers = self.readers or self.wished(processes)
        self.own = range(part * self.readers // processes, (part + 1) * self.readers // processes)
        self.list()
        self.utterances, self.places = self.sample()
        self.texts = [text for some in hosts.each([x.text for x in self.utterances]) for text in some]

    def wished(self, processes):
        count = self.config.data.readers
        if count and count % processes:
            raise UserError(f"--readers {count} must be a multiple of the {processes} processes")
        return count or processes

    def list(self):
        """Shards of the sources, and the index of those that are this process's."""
        every = [archives.of(x.name, self.keys, self.columns, self.readers) for x in self.named]
        for x, shards in zip(self.named, every):
            if not shards:
                raise UserError(f"{x.name}: nothing is listed")
        self.shards, self.indices, self.kinds = [], [], []
        files = [[str(y), os.path.getsize(y)] for some in every for shard in some for y in shard.files
                 if os.path.isfile(y)]  # fmt: skip
        self.digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        for reader in self.own:
            mine, kinds = [], []
            for k, shards in enumerate(every):
                split = len(shards) < self.readers  # each reader then has a part of each shard
                chosen = range(len(shards)) if split else order.dealt([*map(size_of, shards)], self.readers)[reader]
                mine += [shards[i] for i in chosen]
                kinds += [(k, split)] * len(chosen)
            found = index.indexed(mine, self.keys, self.folder, reader, self.workers)
            for reason, name in found.faults:
                self.report.add(reason, name, again=False)
            self.shards.append(mine)
            self.indices.append(found)
            self.kinds.append(np.array(kinds))

    def chosen(self, place):
        """Numbers of usable utterances of each source of a reader of this process."""
        found, most = self.indices[place], self.config.data.max_seconds
        kind, split = self.kinds[place][found.shards].T if len(found.shards) else np.zeros((2, 0), int)
        numbers = np.arange(len(found.shards))
        mine = (split == 0) | (numbers % self.readers == self.indices[place].number)
        long = mine & (np.abs(found.seconds) > most)
        loader = self.loader()
        for i in np.flatnonzero(long):
            self.report.add(f"longer than {most:g} s", loader.entry(place, i, False).name, again=False)
        return [np.flatnonzero(mine & ~long & (kind == k)) for k in range(len(self.named))]

    def loader(self, model=None, shapes=()):
        subsampling, vocabulary = (model.subsampling, model.tokens.to_json()) if model else (1, None)
        return Loader(self.config, subsampling, vocabulary, self.shards, self.indices, shapes)

    @functools.cached_property
    def items(self):
        """Of each reader of this process and source."""
        return [self.chosen(place) for place in range(len(self.own))]

    def sample(self):
        """Utterances of this process, and (reader, number) of each."""
        if not hosts.gathered(np.array([[sum(len(x) for some in self.items for x in some)]])).sum():
            raise UserError(f"{', '.join(x.name for x in self.named)}: no usable utterance{self.report.summary()}")
        every = []  # of each reader as many, so that the number of processes does not matter
        self.whole_sample = True
        for place, some in enumerate(self.items):
            numbers = np.sort(np.concatenate(some))
            step = max(1, -(-len(numbers) * self.readers // SAMPLE))
            self.whole_sample &= step == 1
            every += [(place, i) for i in numbers[::step].tolist()]
        normalize, loader, found, places = (
            texts.normalizer(self.config.texts.normalize, self.config.texts.lower), self.loader(), [], [],
        )  # fmt: skip
        for place, i in every:
            x = loader.entry(place, i, False)
            if not isinstance(x, manifests.Fault) and (text := normalize(x.text)):
                seconds = float(abs(self.indices[place].seconds[i]))
                samples = round(seconds * self.config.features.rate)
                found.append(Utterance(x.name, self.extractor.count(samples), text, x.speaker, seconds))
                places.append((place, i))
        return found, places

    def load(self, i, rng):
        """Features of an utterance of the sample; None: its audio is bad."""
        entry = self.loader().entry(*self.places[i])
        try:
            return self.extractor(read(entry, self.config.features.rate))
        except audio.AudioError as error:
            return self.report.add(error.reason, entry.name, again=False)

    # What the sources are for each reader.

    def shares(self):
        """Draws of each source in an epoch, of all readers: None is each utterance once."""
        options = self.config.data
        counts = hosts.gathered(np.array([[sum(len(some[k]) for some in self.items) for k in range(len(self.named))]]))
        counts = counts.sum(0)
        hours = [sum(float(np.abs(self.indices[p].seconds[some[k]]).sum()) for p, some in enumerate(self.items)) / 3600
                 for k in range(len(self.named))]  # fmt: skip
        self.hours = hosts.gathered(np.array([hours])).sum(0)
        given = [x.weight for x in self.named]
        for synthetic in (False, True):
            some = [x.weight is None for x in self.named if x.synthetic == synthetic]
            if any(some) and not all(some):
                raise UserError("a weight behind one source needs a weight behind each of the same option")
        train = np.array([not x.synthetic for x in self.named])
        mixed = any(x is not None for x in given) or options.temperature != 1
        total = int(counts[train].sum())
        draws = [None] * len(self.named)
        for part, amount in ((train, total), (~train, total * options.synthetic_share / (1 - options.synthetic_share))):
            if part.any() and (mixed or part is not train):
                base = [self.hours[k] if w is None else w for k, w in enumerate(given)]
                weights = np.where(part, np.power(base, options.temperature), 0)
                if not weights.sum():
                    raise UserError("the weights of sources must not all be 0")
                for k in np.flatnonzero(part):
                    draws[k] = round(amount * weights[k] / weights.sum())
        return counts, draws

    def opened(self, model, devices):
        """The order of a run of a model on so many devices, with its shapes."""
        config, options = self.config, self.config.data
        counts, draws = self.shares()

        def sources(some):
            return [order.Source(x, y.synthetic) for x, y in zip(some, self.named)]

        each = [None if x is None else max(1, round(x / self.readers)) if x else 0 for x in draws]
        readers = [
            order.Reader(found.number, config.run.seed, found, sources(some), each, self.versions.count,
                         self.versions.speeds, options.max_seconds, options.buffer)
            for found, some in zip(self.indices, self.items)
        ]  # fmt: skip
        decided = [options.buffer, options.batch, options.batch_seconds, options.buckets, options.max_seconds,
                   self.versions.key(), config.run.seed, each, options.synthetic_share]  # fmt: skip
        decided = hashlib.sha256(json.dumps(decided).encode()).hexdigest()
        known, (first_step, first_epoch) = self.known, (0, 0)
        if known:
            first_step, first_epoch = known["first"]
            shapes = [order.Shape(*x) for x in known["shapes"]]
            other = {
                f"{known['readers']} parts of the data, which {hosts.part()[1]} processes cannot share":
                    known["readers"] != self.readers,
                "other data": known["list"] != self.digest,
                "other options": known["options"] != decided,
                "batches that these devices cannot share": any(x.rows * self.readers % devices for x in shapes),
            }  # fmt: skip
            if why := [x for x, true in other.items() if true]:
                first_step, first_epoch, known = self.step, known["epoch"], None
                hosts.say(f"epoch {first_epoch + 1} begins anew, in another order: the run had {' and '.join(why)}")
        if not known:
            shapes = self.shapes(readers, model, devices, first_epoch)
        self.order = order.Order(readers, shapes, config.run.seed, first_step, first_epoch)
        self.loads = self.loader(model, shapes)
        self.state = {"readers": self.readers, "list": self.digest, "options": decided,
                      "first": [first_step, first_epoch], "shapes": [[*x] for x in shapes]}  # fmt: skip
        self.say(counts, draws)
        return self

    def shapes(self, readers, model, devices, epoch):
        edges, rate, found = order.limits(readers, epoch, self.config.data.buckets), self.config.features.rate, []
        labels = np.zeros((1, len(edges)), int)
        for x in self.utterances:
            if (encoded := model.tokens.encode(x.text)) is not None:
                k = min(int(np.searchsorted(edges, x.seconds)), len(edges) - 1)
                labels[0, k] = max(labels[0, k], len(encoded))
        labels = np.maximum.accumulate(hosts.gathered(labels).max(0))
        whole = hosts.gathered(np.array([[self.whole_sample]])).all() and self.versions.speeds == [1.0]
        some = order.Order(readers, [order.Shape(x, 1) for x in edges], self.config.run.seed, 0, epoch).batches[0]
        common = math.lcm(devices, self.readers)
        least = common // self.readers  # rows of a reader come in multiples of this
        for seconds, most, count in zip(edges, labels, some):
            frames = self.extractor.count(math.ceil(seconds * rate))
            rows = batches.size_of(self.config, common, frames) // self.readers
            rows = min(rows, -(-int(count) // least) * least)
            room = most if whole else -(-int(most * ROOM) // 8) * 8
            room = max(1, min(room, -(-frames // model.subsampling)))
            found.append(order.Shape(float(seconds), max(rows, least), frames, int(room)))
        return found

    def say(self, counts, draws):
        shards = sum(map(len, self.shards))
        hosts.say(f"{counts.sum():,} utterances, {self.hours.sum():.4g} hours, by their manifests and headers; "
                  f"{shards:,} shards in this process, in {len(self.own)} of {self.readers} parts; "
                  f"order shuffled by shards and within {self.config.data.buffer:,} utterances")  # fmt: skip
        if any(x is not None for x in draws):
            each = ", ".join(f"{x.name} {n if d is None else d:,}" for x, n, d in zip(self.named, counts, draws))
            hosts.say(f"an epoch is so many draws: {each}")
        shapes = ", ".join(
            f"{x.rows * self.readers} x {x.frames} frames x {x.labels} labels" for x in self.order.shapes
        )
        hosts.say(f"batches: {shapes}; {self.order.padding():.0%} padding; {self.order.batches[0].sum():,} an epoch")
        if self.hours.sum() < SMALL:
            hosts.say(f"under {SMALL} hours, a cache takes less time: --no-on-the-fly keeps features on the disk")

    def at(self, step):
        """What a checkpoint keeps of the order, to go on from a step."""
        self.order.cover(step + 1)
        return self.state | {"epoch": self.order.place(step)[0]}

    def read(self, first, end, then=None):
        """Batches of steps `first` to `end`; `then`: a function of Grain's datasets, to add to them."""
        import grain

        self.order.cover(end)
        every = grain.MapDataset.source(self.order).map(self.loads)
        every = then(every) if then else every
        for batch in workers.items(every[first:end], 1 if self.workers else THREADS, self.workers):
            if "error" in batch:
                raise UserError(batch["error"])
            for reason, name in batch.pop("left_out"):
                self.report.add(reason, name, again=False)
            yield batch
