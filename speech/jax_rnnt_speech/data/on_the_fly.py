"""A corpus that is read while it is trained on: decoded, augmented and made features of in Grain's workers.

Before the first step, the index alone is read, and headers of one window where lengths are not written (`order`). What
of an utterance cannot be used is found when its turn comes: its row of a batch is not valid then, and the report has
its name. An utterance that turns out to be longer than its manifest or header says, so that its batch has no room for
it, is trained on at the end of the epoch, in a batch that has.
"""

import collections
import functools
import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
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
    order,
    texts,
    workers,
)
from jax_rnnt_speech.data import tokens as vocabularies
from jax_rnnt_speech.data.archives import storage
from jax_rnnt_speech.data.rows import Fault, LineError, differs, keys_of, leave_out_if
from jax_rnnt_speech.data.utterances import Report, Utterance
from jax_rnnt_speech.system import UserError, hosts, refuse_if

SAMPLE = 20_000  # texts of which a vocabulary is made, and the longest ones are found
ROOM = 1.25  # for labels in a batch, beyond the longest of a sample
THREADS = 2  # that load batches, without workers
RUNS = RUN = 10  # of how many utterances hours are estimated
FULL = 20  # batches that a window has at least
USUAL = 5  # seconds of an utterance, as far as that matters
SHARE = 0.5  # of a former option: digests of earlier runs hold it


class Named(NamedTuple):
    """A source by its name, with the weight that it may have."""

    name: str
    weight: float | None


class Late(NamedTuple):
    """An utterance that its batch has no room for."""

    reader: int
    item: int
    version: int
    frames: int
    labels: int
    name: str


class Note(NamedTuple):
    """What of an utterance is not as its manifest says, and does no harm."""

    text: str
    name: str


class LargerError(Exception):
    """An utterance is larger than the rows of its batch; the arguments are its frames and labels."""


def hours_of(found, items):
    """Hours of items of an index; by some headers where they are not written."""
    seconds, some = found.seconds[items], np.arange(len(items))
    if not seconds.all():
        some = np.unique(np.linspace(0, max(0, len(items) - RUN), RUNS).astype(int)[:, None] + np.arange(RUN))
        some = some[some < len(items)]
        seconds = np.nan_to_num(found.lengths(items[some]))
    return float(np.abs(seconds).sum(dtype=np.float64)) / 3600 * len(items) / max(1, len(some))


class Loader:
    """Makes a batch of what the order has for it. Workers have a copy each."""

    def __init__(self, config, subsampling, vocabulary, indices, shapes):
        self.config, self.subsampling, self.vocabulary = config, subsampling, vocabulary
        self.indices, self.shapes, self.features = indices, shapes, config.features.mels

    @functools.cached_property
    def tools(self):
        """What is better made than copied."""
        normalize = texts.normalizer(self.config.texts.normalize, self.config.texts.lower)
        extractor = features.extractor(self.config.features, self.config.encoder.chunk)
        return vocabularies.from_json(self.vocabulary), normalize, extractor, augmentation.Versions(self.config)

    def __call__(self, epoch, shape, rows):
        labels, left_out, items = {}, [], []
        for i, row in enumerate(rows):
            x, spans, name = None, 0, "an utterance"
            if row is not None:
                place, number, version = row
                index = self.indices[place]
                key = epoch, index.number, number
                try:
                    entry = index.entry(number)
                    name = entry.name
                    seconds, notes = index.lengths(np.array([number]))[0], []
                    x, labels[i] = self.loaded(entry, version, key, shape, seconds, notes)
                    left_out += [Note(note, name) for note in notes]
                    rng = np.random.default_rng((self.config.run.seed, 3, *key))
                    spans = features.draw_spans(self.config.data, rng, len(x), self.features)
                except (audio.AudioError, LineError) as error:
                    left_out.append((getattr(error, "reason", str(error)), name))
                except LargerError as error:
                    left_out.append(Late(index.number, number, version, *error.args, name))
            items.append((i, x, spans))
        data = batches.Labelled(self, labels)
        return batches.collate(data, self.config.data, self.shapes[shape], items, len(rows)) | {"left_out": left_out}

    def loaded(self, entry, version, key, shape, seconds, notes):
        """(features, labels) of an utterance, or a LineError or AudioError that says why there are none.

        `seconds`: how long it lasts by its manifest or header. A batch without room for it raises a LargerError.
        """
        vocabulary, normalize, extractor, versions = self.tools
        if isinstance(entry, Fault):
            raise LineError(entry.reason)
        text = normalize(entry.text)
        leave_out_if(not text, "empty transcript")
        labels = vocabulary.encode(text)
        leave_out_if(labels is None, "characters outside the vocabulary")
        rate, most = self.config.features.rate, self.config.data.max_seconds
        leave_out_if(is_long(entry, seconds, most), f"longer than {most:g} s")
        samples = read(entry, rate, notes)
        if entry.end is None and entry.whole and differs(entry.whole, entry.start + len(samples) / rate):
            raise LineError("duration differs from the manifest's")
        leave_out_if(len(samples) > round(most * rate), f"longer than {most:g} s")
        x = extractor(versions.of(samples, version, key))
        leave_out_if(not len(x), "shorter than a frame")
        leave_out_if(len(labels) > -(-len(x) // self.subsampling), "fewer frames than labels")
        if not roomy(self.shapes[shape], len(x), len(labels)):
            raise LargerError(len(x), len(labels))
        return x, np.array(labels, np.int32)


def is_long(entry, seconds, most):
    """Whether an utterance is longer than a limit, however its length was rounded, estimated, or cut by its file.

    A file may have no more than half of a segment, and a clip that the times of its row do not fit is read as a whole.
    """
    if getattr(entry, "end", None) is None:
        return order.surely_longer(seconds, most)
    return not getattr(entry.audio, "clip", False) and order.surely_longer(seconds, 2 * most)


def roomy(shape, frames, labels):
    """Whether a row of batches of a shape has room for an utterance."""
    return frames <= shape.frames and labels <= shape.labels


def read(entry, rate, notes=None):
    """Samples of an utterance; `notes` gets what differs from its manifest."""
    where = entry.audio, rate, entry.start, entry.end, entry.channel
    samples, note = storage.steadily(lambda: audio.heard(*where), entry.audio)
    if note and notes is not None:
        notes.append(note)
    return samples


def batch_of(drawn, loads, i):
    """A batch of an `order.Batches` by its number; behind the last one there is nothing."""
    found = drawn[i]
    return loads(*found) if found else {}


class OnTheFly:
    """A corpus in shards. Its `utterances` are a sample, of which vocabulary and statistics are made.

    `known`: what `state` was in the checkpoint with which a run goes on, or None.
    """

    def __init__(self, config, folder, count, known=None, step=0):
        self.config, self.folder, self.workers, self.report = config, folder, count, Report()
        self.features, self.hop = config.features.mels, config.features.hop / 1000
        self.keys = keys_of(*config.texts.columns)
        self.normalize = texts.normalizer(config.texts.normalize, config.texts.lower)
        self.extractor = features.extractor(config.features, config.encoder.chunk)
        self.versions, self.known, self.step = augmentation.Versions(config), known, step
        self.named = [Named(*archives.weighted(x)) for x in names(config.data.train)]
        part, processes = hosts.part()
        self.readers = known["readers"] if known and known["readers"] % processes == 0 else 0
        self.readers = self.readers or config.data.readers or processes
        refuse_if(self.readers % processes, f"--readers {self.readers} must be a multiple of the {processes} processes")
        self.own = range(part * self.readers // processes, (part + 1) * self.readers // processes)
        self.list()
        self.utterances, self.places = self.sample()
        self.texts = [text for some in hosts.each([x.text for x in self.utterances]) for text in some]

    def list(self):
        """Shards of the sources, and the index of those that are this process's."""
        every = [archives.of(x.name, self.config.texts.columns, self.readers) for x in self.named]
        for x, shards in zip(self.named, every):
            refuse_if(not shards, f"{x.name}: nothing is listed")
        self.indices, self.kinds = [], []
        files = [[str(y), os.path.getsize(y)] for some in every for shard in some for y in shard.files
                 if os.path.isfile(y)]  # fmt: skip
        self.digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        for reader in self.own:
            mine, kinds = [], []
            for k, shards in enumerate(every):
                split = len(shards) < self.readers  # each reader then has a part of each shard
                chosen = range(len(shards)) if split else order.dealt([x.amount for x in shards], self.readers)[reader]
                mine += [shards[i] for i in chosen]
                kinds += [(k, split)] * len(chosen)
            found = index.indexed(mine, self.keys, self.folder, reader, self.workers)
            for reason, name in found.faults:
                self.report.add(reason, name, again=False)
            self.indices.append(found)
            self.kinds.append(np.array(kinds))
        written = all(found.seconds.all() for found in self.indices)
        self.written = bool(hosts.gathered(np.array([[written]])).all())  # whether all lengths are

    def chosen(self, place):
        """Numbers of usable utterances of each source of a reader of this process."""
        found, most = self.indices[place], self.config.data.max_seconds
        kind, split = self.kinds[place][found.shards].T if len(found.shards) else np.zeros((2, 0), int)
        numbers = np.arange(len(found.shards))
        mine = (split == 0) | (numbers % self.readers == self.indices[place].number)
        long = mine & order.surely_longer(found.seconds, most)
        for i in np.flatnonzero(long):
            entry = found.entry(i, False)
            long[i] = is_long(entry, found.seconds[i], most)
            if long[i]:
                self.report.add(f"longer than {most:g} s", entry.name, again=False)
        return [np.flatnonzero(mine & ~long & (kind == k)) for k in range(len(self.named))]

    def loader(self, model=None, shapes=()):
        subsampling, vocabulary = (model.subsampling, model.tokens.to_json()) if model else (1, None)
        return Loader(self.config, subsampling, vocabulary, self.indices, shapes)

    @functools.cached_property
    def items(self):
        """Of each reader of this process and source."""
        return [self.chosen(place) for place in range(len(self.own))]

    def sample(self):
        """Utterances of this process, and (reader, number) of each."""
        if not hosts.gathered(np.array([[sum(len(x) for some in self.items for x in some)]])).sum():
            raise UserError(f"{', '.join(x.name for x in self.named)}: no usable utterance{self.report.summary()}")
        found, places, self.whole_sample = [], [], True
        for place, some in enumerate(self.items):  # as many of each reader: the number of processes does not matter
            numbers = np.sort(np.concatenate(some))
            step = max(1, -(-len(numbers) * self.readers // SAMPLE))
            self.whole_sample &= step == 1
            for i in numbers[::step].tolist():
                if x := self.said(place, i):
                    x, text = x
                    seconds = float(abs(self.indices[place].seconds[i])) or self.config.data.max_seconds
                    longest = seconds * order.SURE[0] + order.SURE[1]  # whether its labels fit is found in its turn
                    samples = round(longest * self.config.features.rate)
                    found.append(Utterance(x.name, self.extractor.count(samples), text, x.speaker, seconds))
                    places.append((place, i))
        return found, places

    def said(self, place, i):
        """(Entry, normalised text) of an utterance, or None; its audio is not sought."""
        x = self.indices[place].entry(i, False)
        return (x, text) if not isinstance(x, Fault) and (text := self.normalize(x.text)) else None

    def load(self, i, rng):
        """Features of an utterance of the sample; None: its audio is bad."""
        place, number = self.places[i]
        entry = self.indices[place].entry(number)
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
        hours = [[hours_of(found, x) for x in some] for found, some in zip(self.indices, self.items)]
        self.hours = hosts.gathered(np.array(hours)).sum(0)
        given = [x.weight for x in self.named]
        missing = [x is None for x in given]
        refuse_if(any(missing) and not all(missing), "a weight behind one source needs a weight behind each of them")
        if all(missing) and options.temperature == 1:
            return counts, [None] * len(self.named)
        weights = np.power([self.hours[k] if w is None else w for k, w in enumerate(given)], options.temperature)
        refuse_if(not weights.sum(), "the weights of sources must not all be 0")
        return counts, [round(int(counts.sum()) * x / weights.sum()) for x in weights]

    def opened(self, model, devices):
        """The order of a run of a model on so many devices, with its shapes."""
        config, options = self.config, self.config.data
        counts, draws = self.shares()

        each = [None if x is None else max(1, round(x / self.readers)) if x else 0 for x in draws]
        readers = [
            order.Reader(found.number, config.run.seed, found, some, each, self.versions.count, self.versions.speeds,
                         options.max_seconds, options.buffer)
            for found, some in zip(self.indices, self.items)
        ]  # fmt: skip
        rows = (options.batch_seconds / USUAL or options.batch) / self.readers
        window = max(options.buffer, order.LEAST, round(FULL * rows))
        listed = [max(x.size, sum(map(len, some))) for x, some in zip(readers, self.items)]
        if self.written or hosts.gathered(np.array([[max(listed)]])).max() <= window:
            window = 0
        decided = [options.buffer, options.batch, options.batch_seconds, options.buckets, options.max_seconds,
                   self.versions.key(), config.run.seed, each, SHARE, window]  # fmt: skip
        decided = hashlib.sha256(json.dumps(decided).encode()).hexdigest()
        known, self.first, place = self.known, (0, 0), (0, 0, 0)  # first: step and epoch
        if known:
            other = {
                f"{known['readers']} parts of the data, which {hosts.part()[1]} processes cannot share":
                    known["readers"] != self.readers,
                "other data": known["list"] != self.digest,
                "other options": known["options"] != decided,
                "batches that these devices cannot share":
                    any(order.Shape(*x).rows * self.readers % devices for x in known["shapes"]),
            }  # fmt: skip
            if why := [x for x, true in other.items() if true]:
                self.first, place = (self.step, known["epoch"]), (known["epoch"], 0, 0)
                hosts.say(f"epoch {place[0] + 1} begins anew, in another order: the run had {' and '.join(why)}")
                known = None
            else:
                self.first, place = known["first"], known["place"]
        kept = (Late(*x) for x in (known or {}).get("late", ()))
        self.late = [x for x in kept if x.reader in self.own]
        shapes = [order.Shape(*x) for x in known["shapes"]] if known else self.shapes(readers, model, devices, window)
        self.place = self.step, *place  # epoch, window, and how many batches of it came before
        self.order = order.Order(readers, shapes, config.run.seed, window)
        self.loads = self.loader(model, [*shapes, self.largest(shapes[-1], model, devices)])
        self.state = {"readers": self.readers, "list": self.digest, "options": decided,
                      "first": [*self.first], "shapes": [[*x] for x in shapes]}  # fmt: skip
        self.say(counts, draws)
        return self

    def largest(self, last, model, devices):
        """The shape of batches for what is longer than expected, and has no room in the `last` of the others."""
        longest = (self.config.data.max_seconds + order.SLACK) / min(1.0, *self.versions.speeds)
        frames = max(last.frames, self.extractor.count(math.ceil(longest * self.config.features.rate)))
        labels = max(last.labels, min(2 * last.labels, -(-frames // model.subsampling)))
        return order.Shape(longest, math.lcm(devices, self.readers) // self.readers, frames, labels)

    def shapes(self, readers, model, devices, window):
        epoch, rate, found = self.first[1], self.config.features.rate, []
        edges = order.limits(readers, epoch, self.config.data.buckets, window)

        def shaped(shapes):
            return order.Order(readers, shapes, self.config.run.seed, window)

        counted = shaped([order.Shape(x, 1) for x in edges])
        labels, longest, whole = np.zeros((1, len(edges)), int), 0.0, self.whole_sample
        for seconds, text in self.spoken(None if self.written else counted.rows(epoch, 0)):
            if (encoded := model.tokens.encode(text)) is not None:
                k = min(int(np.searchsorted(edges, seconds)), len(edges) - 1)
                labels[0, k], longest = max(labels[0, k], len(encoded)), max(longest, seconds)
        labels = np.maximum.accumulate(hosts.gathered(labels).max(0))
        if window:  # later ones are longer, and have more labels
            labels[-1] = math.ceil(labels[-1] * edges[-1] / (hosts.gathered(np.array([[longest]])).max() or edges[-1]))
        whole = self.written and hosts.gathered(np.array([[whole]])).all() and self.versions.speeds == [1.0]
        common = math.lcm(devices, self.readers)
        least = common // self.readers  # rows of a reader come in multiples of this
        for seconds, most, count in zip(edges, labels, counted.most(epoch, 0)):
            frames = self.extractor.count(math.ceil(seconds * rate))
            rows = batches.size_of(self.config, common, frames) // self.readers
            rows = rows if window else min(rows, -(-count // least) * least)
            room = most if whole else -(-int(most * ROOM) // 8) * 8
            room = max(1, min(room, -(-frames // model.subsampling)))
            found.append(order.Shape(float(seconds), max(rows, least), frames, int(room)))
        return [x._replace(batches=n) for x, n in zip(found, shaped(found).most(epoch, 0))]

    def spoken(self, rows):
        """(seconds, text) of a sample, or of utterances of rows of the order where lengths are not written."""
        if rows is None:
            yield from ((x.seconds, x.text) for x in self.utterances)
            return
        for place, (items, _, seconds, _) in enumerate(rows):
            for i, x in zip(items[: SAMPLE // self.readers].tolist(), seconds.tolist()):
                if found := self.said(place, i):
                    yield x, found[1]

    def say(self, counts, draws):
        about, window = "" if self.written else "about ", self.order.window
        shards = sum(len(x.listed) for x in self.indices)
        hosts.say(f"{counts.sum():,} utterances, {about}{self.hours.sum():.4g} hours, by their manifests and headers; "
                  f"{shards:,} shards in this process, in {len(self.own)} of {self.readers} parts; "
                  f"order shuffled by shards and within {self.config.data.buffer:,} utterances")  # fmt: skip
        if any(x is not None for x in draws):
            each = ", ".join(f"{x.name} {n if d is None else d:,}" for x, n, d in zip(self.named, counts, draws))
            hosts.say(f"an epoch is so many draws: {each}")
        shapes = ", ".join(
            f"{x.rows * self.readers} x {x.frames} frames x {x.labels} labels" for x in self.order.shapes
        )
        first = self.first[1]
        padding, steps, about = self.order.padding(first), self.order.steps(first, first + 1), "about " * bool(window)
        hosts.say(f"batches: {shapes}; {about}{padding:.0%} padding; {about}{steps:,} an epoch")
        if window:
            hosts.say(f"not all lengths are written: headers are read as training goes on, and batches are made within "
                      f"windows of {window:,} utterances of each part")  # fmt: skip

    def steps(self, epochs):
        """Steps until the end of so many epochs of the whole run; about that where lengths are not written."""
        return self.first[0] + self.order.steps(self.first[1], max(epochs, self.first[1]))

    def at(self, step):
        """What a checkpoint keeps of the order, to go on from a step."""
        collections.deque(self.read(step, step), 0)
        late = [x for some in hosts.each(self.late) for x in some]
        return self.state | {"epoch": self.place[1], "place": [*self.place[1:]], "late": late}

    def planned(self):
        """(shape, rows of this process) of batches for what came too late; processes have as many of each shape."""
        shapes, found = self.loads.shapes, []
        groups = [[] for _ in shapes]
        for x in self.late:
            k = next(k for k, shape in enumerate(shapes) if roomy(shape, x.frames, x.labels))
            groups[k].append((self.own.index(x.reader), x.item, x.version))
        sizes = [x.rows * len(self.own) for x in shapes]
        counts = hosts.gathered(np.array([[-(-len(x) // size) for x, size in zip(groups, sizes)]])).max(0)
        for k, (rows, size, count) in enumerate(zip(groups, sizes, counts.tolist())):
            rows += [None] * (count * size - len(rows))
            found += [(k, rows[i * size : (i + 1) * size]) for i in range(count)]
        return found

    def taken(self, batch, step, then):
        """A batch as `read` gives it; what it lacks is noted."""
        for x in batch.pop("left_out"):
            if type(x) is Note:
                self.report.note(*x, again=False)
            elif type(x) is not Late:
                self.report.add(*x, again=False)
            elif any(roomy(shape, x.frames, x.labels) for shape in self.loads.shapes):
                self.late.append(x)
            else:
                self.report.add("more labels than batches of its length have room for", x.name, again=False)
        return then(batch, np.random.default_rng((self.config.run.seed, 4, step))) if then else batch

    def read(self, first, end, then=None, until=None):
        """Batches of steps `first` to `end`, or to the start of epoch `until`, whose `last` one says so.

        `then`: a function of a batch and a generator of random numbers, to add to it.
        """
        source, made, ahead, pool = self.order, None, None, ThreadPoolExecutor(1)
        (step, epoch, window, done), late = self.place, []
        try:
            while (epoch < until) if until is not None else (step < end):
                if ahead is not None:
                    ahead.result()
                counts, those = source.most(epoch, window), source.counts(epoch, window)
                following = source.after(epoch, window)
                ahead = pool.submit(source.counts, *following)  # so that workers seldom wait for headers
                shapes, numbers = source.sequence(epoch, window, counts)
                mine = numbers < np.array(those)[shapes]
                for i in range(done, len(shapes)):
                    if step == end and until is None:
                        return
                    step, ends = step + 1, i + 1 == len(shapes)
                    self.place = (step, *following, 0) if ends else (step, epoch, window, i + 1)
                    if step <= first:
                        continue
                    if made is None:
                        left = order.Batches(source, epoch, window, int(mine[:i].sum()), until)
                        some = any(x.size for x in source.readers)
                        count = some * (2**31 if until is not None else end - step + 1)
                        load = functools.partial(batch_of, left, self.loads)
                        made = workers.items(load, count, 1 if self.workers else THREADS, self.workers)
                    empty = [None] * source.shapes[shapes[i]].rows * len(source.readers)
                    batch = next(made) if mine[i] else self.loads(epoch, int(shapes[i]), empty)
                    batch = self.taken(batch, step, then)
                    if ends and following[0] > epoch and (late := self.planned()):
                        self.place = step, epoch, window, i + 1
                    if until is not None:
                        batch["last"] = ends and not late and following == (until, 0)
                    yield batch
                late = self.planned() if following[0] > epoch else []
                for i in range(max(0, done - len(shapes)), len(late)):
                    if step == end and until is None:
                        return
                    step, ends = step + 1, i + 1 == len(late)
                    batch = self.taken(self.loads(epoch, *late[i]), step, then)
                    self.place = (step, *following, 0) if ends else (step, epoch, window, len(shapes) + i + 1)
                    self.late *= not ends
                    if until is not None:
                        batch["last"] = ends and following == (until, 0)
                    yield batch
                (epoch, window), done = following, 0
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            if made is not None:
                made.close()
