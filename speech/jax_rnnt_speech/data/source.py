"""The source of a training, which determines its utterances and their order, and makes their batches.

Before the first step, lines and headers of archives are read, and headers of one window where lengths are not written
(`order`). Grain's workers decode, augment and make features anew in each epoch, and faults of an utterance are found
when its turn comes. A source that remembers does so once, before the first step (`memory`); nothing else differs, and a
corpus that a function makes is read likewise.

An utterance that turns out to be longer than its manifest or header says, so that its batch has no room for it, is
trained on at the end of the epoch, in a batch that has.
"""

import collections
import functools
import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jax_rnnt_speech.config.options import names
from jax_rnnt_speech.data import (
    archives,
    audio,
    augmentation,
    buckets,
    features,
    loading,
    memory,
    order,
    texts,
    workers,
)
from jax_rnnt_speech.data.corpora import Recordings
from jax_rnnt_speech.data.index import SLACK, SURE, indexed, surely_longer
from jax_rnnt_speech.data.loading import Late, Note, is_long, roomy
from jax_rnnt_speech.data.rows import Fault, keys_of
from jax_rnnt_speech.data.utterances import Report, Utterance
from jax_rnnt_speech.system import UserError, hosts, refuse_if

SAMPLE = 20_000  # texts from which a vocabulary is made, and among which the longest ones are found
ROOM = 1.25  # factor of the room for labels in a batch, relative to the longest of a sample
THREADS = 2  # threads that load batches, without workers
RUNS = RUN = 10  # numbers of runs and of utterances in each, from which hours are estimated
FULL = 20  # least number of batches in a window
USUAL = 5  # seconds of an utterance, as far as that matters
SHARE = 0.5  # of a former option: digests of earlier runs hold it
EARLIER = {}  # the state of the order in a checkpoint of a version that had another one


def hours_of(index, items):
    """Returns the hours of items of an index; by some headers where they are not written."""
    seconds, some = index.seconds[items], np.arange(len(items))
    if not seconds.all():
        some = np.unique(np.linspace(0, max(0, len(items) - RUN), RUNS).astype(int)[:, None] + np.arange(RUN))
        some = some[some < len(items)]
        seconds = np.nan_to_num(index.lengths(items[some]))
    return float(np.abs(seconds).sum(dtype=np.float64)) / 3600 * len(items) / max(1, len(some))


def batch_of(drawn, loads, i):
    """Returns a batch of an `order.Batches` by its number; behind the last one there is nothing."""
    batch = drawn[i]
    return loads(*batch) if batch else {}


class Source:
    """The utterances of --train, in shards. Its `utterances` are a sample, for the vocabulary and the statistics.

    Parameters
    ----------
    config
        A `Config`. Without `on_the_fly`, features are computed once and kept in `kept`.
    folder
        The folder of the index.
    count
        Number of processes that load batches, besides this one.
    state
        The result of `at`, from the checkpoint with which a run goes on at `step`; `EARLIER` if that has none, or None.
    kept
        A folder for features; None to keep none.
    corpus
        A corpus that is read in place of those that the configuration names.
    """

    def __init__(self, config, folder, count=0, state=None, step=0, kept=None, corpus=None):
        self.config, self.folder, self.workers, self.corpus = config, folder, count, corpus
        self.report = Report() if corpus is None else corpus.report
        self.hop = config.features.hop / 1000 if corpus is None else corpus.hop
        self.features = config.features.mels if corpus is None else corpus.features
        self.normalize = texts.normalizer(config.texts.normalize, config.texts.lower)
        self.extractor = features.extractor(config)
        versions, self.state, self.step = augmentation.Versions(config), state, step
        self.augmented = versions.key()
        varied = corpus is None or isinstance(corpus, Recordings)
        self.speeds, self.versions = (versions.speeds, versions.count) if varied else ([1.0], 1)
        self.named = [archives.weighted(x) for x in names(config.data.train)] if corpus is None else [("", None)]
        part, processes = hosts.part()
        before = (state or {}).get("readers", 0)
        self.readers = (before if before % processes == 0 else 0) or config.data.readers or processes
        refuse_if(self.readers % processes, f"--readers {self.readers} must be a multiple of the {processes} processes")
        self.own = range(part * self.readers // processes, (part + 1) * self.readers // processes)
        self.exact = corpus is not None or kept is not None  # whether the frames of all utterances are known
        if corpus is None:
            self.list()
        else:
            frames = [corpus.frames_of(x, versions) if varied else [x.frames] for x in corpus.utterances]
            self.indices, self.items = zip(*(memory.remember_corpus(corpus, frames, i, self.readers) for i in self.own))
            self.items = [[x] for x in self.items]
        if kept is not None:
            self.remember(kept)
        written = hosts.gathered(np.array([[all(x.seconds.all() for x in self.indices)]]))
        self.written = bool(written.all())  # whether all lengths are written, in all processes
        self.utterances, self.places = self.sample()
        self.texts = [text for some in hosts.each([x.text for x in self.utterances]) for text in some]
        if self.exact:  # everything that is used is known
            used = (
                [(x.name, x.text) for x in corpus.utterances]
                if corpus is not None
                else [self.digest, sorted(self.texts)]
            )
            self.digest = hashlib.sha256(json.dumps(used).encode()).hexdigest()

    def list(self):
        """Lists the shards of the sources, and the index of those that are this process's."""
        shards_of = [archives.all_shards(name, self.config.texts.columns, self.readers) for name, _ in self.named]
        for (name, _), shards in zip(self.named, shards_of):
            refuse_if(not shards, f"{name}: nothing is listed")
        self.indices, self.items = [], []
        files = [[str(y), os.path.getsize(y)] for some in shards_of for shard in some for y in shard.files
                 if os.path.isfile(y)]  # fmt: skip
        self.digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
        for reader in self.own:
            mine, kinds = [], []
            for k, shards in enumerate(shards_of):
                split = len(shards) < self.readers  # each reader then has a part of each shard
                dealt = range(len(shards)) if split else order.dealt([x.amount for x in shards], self.readers)[reader]
                mine += [shards[i] for i in dealt]
                kinds += [(k, split)] * len(dealt)
            own = indexed(mine, keys_of(*self.config.texts.columns), self.folder, reader, self.workers)
            for reason, name in own.faults:
                self.report.add(reason, name, again=False)
            self.indices.append(own)
            self.items.append(self.chosen(own, np.array(kinds)))

    def chosen(self, index, kinds):
        """Returns numbers of usable utterances of each source of a reader.

        `kinds` has for each shard its source, and whether it is a part of every reader.
        """
        most = self.config.data.max_seconds
        kind, split = kinds[index.shards].T if len(index.shards) else np.zeros((2, 0), int)
        numbers = np.arange(len(index.shards))
        mine = (split == 0) | (numbers % self.readers == index.number)
        long = mine & surely_longer(index.seconds, most)
        for i in np.flatnonzero(long):
            entry = index.entry(i, False)
            long[i] = is_long(entry, index.seconds[i], most)
            if long[i]:
                self.report.add(f"longer than {most:g} s", entry.name, again=False)
        return [np.flatnonzero(mine & ~long & (kind == k)) for k in range(len(self.named))]

    def remember(self, folder):
        """Computes what is not in the folder yet. From then on, items are those that have features."""
        loader = self.loader()
        for place, some in enumerate(self.items):
            every = np.sort(np.concatenate(some))
            self.indices[place], numbers = memory.kept(loader, place, every, folder, self.report, self.workers)
            self.items[place] = [np.searchsorted(numbers, x[np.isin(x, numbers)]) for x in some]

    @property
    def remembers(self):
        """True if features are kept on the disk."""
        return self.exact and self.corpus is None

    @property
    def folders(self):
        """Names of folders with features in them, for all processes."""
        own = [x for index in self.indices for x in getattr(index, "folders", ())]
        return {x for some in hosts.each(own) for x in some}

    def loader(self, model=None, shapes=()):
        subsampling, vocabulary = (model.subsampling, model.tokens.to_json()) if model else (1, None)
        return loading.Loader(self.config, subsampling, vocabulary, list(self.indices), shapes, self.features)

    def sample(self):
        """Returns utterances of this process, and (place, number) of each."""
        if not hosts.gathered(np.array([[sum(len(x) for some in self.items for x in some)]])).sum():
            raise UserError(f"{', '.join(name for name, _ in self.named)}: no usable utterance{self.report.summary()}")
        utterances, places, self.whole_sample = [], [], True
        for place, some in enumerate(self.items):  # as many of each reader: the number of processes does not matter
            numbers = np.sort(np.concatenate(some))
            step = max(1, -(-len(numbers) * self.readers // SAMPLE))
            self.whole_sample &= step == 1
            for i in numbers[::step].tolist():
                if x := self.said(place, i):
                    utterances.append(x)
                    places.append((place, i))
        return utterances, places

    def said(self, place, i):
        """Returns the Utterance of an item, or None; its audio is not looked for."""
        index = self.indices[place]
        x = index.entry(i, False)
        if isinstance(x, Utterance):
            return x._replace(seconds=float(index.seconds[i]))
        if isinstance(x, Fault) or not (text := self.normalize(x.text)):
            return None
        seconds = float(abs(index.seconds[i])) or self.config.data.max_seconds
        longest = seconds * SURE[0] + SURE[1]  # whether its labels fit is found in its turn
        samples = round(longest * self.config.features.rate)
        return Utterance(x.name, self.extractor.count(samples), text, x.speaker, seconds)

    def load(self, i, rng):
        """Returns the features of an utterance of the sample; None if its audio is bad."""
        place, number = self.places[i]
        index = self.indices[place]
        entry = index.entry(number)
        if isinstance(entry, Utterance):
            return index.load(number, 0, rng)
        try:
            return self.extractor(loading.samples_of(entry, self.config.features.rate)[0])
        except audio.AudioError as error:
            return self.report.add(error.reason, entry.name, again=False)

    def shares(self):
        """Returns how many utterances of each source an epoch of all readers draws; None is each utterance once."""
        options = self.config.data
        counts = hosts.gathered(np.array([[sum(len(some[k]) for some in self.items) for k in range(len(self.named))]]))
        counts = counts.sum(0)
        hours = [[hours_of(index, x) for x in some] for index, some in zip(self.indices, self.items)]
        self.hours = hosts.gathered(np.array(hours)).sum(0)
        given = [weight for _, weight in self.named]
        missing = [x is None for x in given]
        refuse_if(any(missing) and not all(missing), "a weight behind one source needs a weight behind each of them")
        if all(missing) and options.temperature == 1:
            return counts, [None] * len(self.named)
        weights = np.power([self.hours[k] if w is None else w for k, w in enumerate(given)], options.temperature)
        refuse_if(not weights.sum(), "the weights of sources must not all be 0")
        return counts, [round(int(counts.sum()) * x / weights.sum()) for x in weights]

    def opened(self, model, devices):
        """Opens the order of a run of a model on `devices` devices, with its shapes."""
        config, options = self.config, self.config.data
        counts, draws = self.shares()
        each = [None if x is None else max(1, round(x / self.readers)) if x else 0 for x in draws]
        most = self.longest()
        readers = [
            order.Reader(x.number, config.run.seed, x, some, each, self.versions, self.speeds, most, options.buffer)
            for x, some in zip(self.indices, self.items)
        ]
        rows = (options.batch_seconds / USUAL or options.batch) / self.readers
        window = max(options.buffer, order.LEAST, round(FULL * rows))
        listed = [max(x.size, sum(map(len, some))) for x, some in zip(readers, self.items)]
        if self.written or hosts.gathered(np.array([[max(listed)]])).max() <= window:
            window = 0
        decided = [options.buffer, options.batch, options.batch_seconds, options.buckets, options.max_seconds,
                   self.augmented, config.run.seed, each, SHARE, window, *["exact"] * self.exact]  # fmt: skip
        former, decided = (
            hashlib.sha256(json.dumps(x).encode()).hexdigest() for x in (decided, [*decided, buckets.PADDING])
        )
        state = self.continued(decided, former, devices)
        self.late = [x for x in (Late(*x) for x in state.get("late", ())) if x.reader in self.own]
        shapes = [order.Shape(*x) for x in state.get("shapes", ())] or self.shapes(readers, model, devices, window)
        self.order = order.Order(readers, shapes, config.run.seed, window)
        if self.state == EARLIER:
            every = self.versions * self.order.steps(0, 1)  # an epoch of that order read all versions of a recording
            self.begins_anew(self.step // max(1, every), "the order of an earlier version")
        self.loads = self.loader(model, [*shapes, self.largest(shapes[-1], model, devices)])
        self.state = {"readers": self.readers, "list": self.digest, "options": decided,
                      "first": [*self.first], "shapes": [[*x] for x in shapes]}  # fmt: skip
        self.counts, self.draws = counts, draws
        return self

    def continued(self, decided, former, devices):
        """Returns the state with which the run goes on exactly, or nothing; then `anew` says why.

        `decided` is a digest of the options; `former` is that of an earlier version.
        """
        state, self.anew = self.state, None
        self.first, self.place = (0, 0), (self.step, 0, 0, 0)  # step and epoch; step, epoch, window, batches before
        if not state:
            return {}
        other = {
            f"{state['readers']} parts of the data, which {hosts.part()[1]} processes cannot share":
                state["readers"] != self.readers,
            "other data": state["list"] != self.digest,
            "batches of an earlier version, all with the same number of utterances": state["options"] == former,
            "other options": state["options"] not in (decided, former),
            "batches that these devices cannot share":
                any(order.Shape(*x).rows * self.readers % devices for x in state["shapes"]),
        }  # fmt: skip
        if why := [x for x, true in other.items() if true]:
            self.begins_anew(state["epoch"], " and ".join(why))
            return {}
        self.first, self.place = state["first"], (self.step, *state["place"])
        return state

    def begins_anew(self, epoch, why):
        self.first, self.place = (self.step, epoch), (self.step, epoch, 0, 0)
        self.anew = f"epoch {epoch + 1} begins anew, in another order: the run had {why}"

    def longest(self):
        """Returns the seconds that an utterance lasts at most."""
        if not self.exact:
            return self.config.data.max_seconds
        frames = [x.frames.max(initial=0) for x in self.indices]
        return float(hosts.gathered(np.array([[max(frames)]])).max()) * self.hop

    def frames(self, seconds):
        """Returns the frames of an utterance that lasts so long."""
        if self.exact:
            return int(seconds / self.hop + 1e-6)
        return self.extractor.count(math.ceil(seconds * self.config.features.rate))

    def largest(self, last, model, devices):
        """Returns the shape of batches for utterances longer than expected, for which the other shapes have no room."""
        longest = (self.longest() + SLACK) / min(1.0, *self.speeds)
        frames = max(last.frames, self.frames(longest))
        labels = max(last.labels, min(2 * last.labels, -(-frames // model.subsampling)))
        return order.Shape(longest, math.lcm(devices, self.readers) // self.readers, frames, labels)

    def shapes(self, readers, model, devices, window):
        epoch, planned = self.first[1], []
        common = math.lcm(devices, self.readers)
        varies = window or any(x.varies for x in readers)
        found = order.lengths(readers, epoch, window)
        edges, sizes = buckets.planned(*found, self.config.data, common, devices, bool(window), bool(varies))

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
        whole = self.written and hosts.gathered(np.array([[whole]])).all() and self.speeds == [1.0]
        for seconds, most, rows in zip(edges, labels, sizes):
            frames = self.frames(seconds)
            room = most if whole else -(-int(most * ROOM) // 8) * 8
            room = max(1, min(room, -(-frames // model.subsampling)))
            planned.append(order.Shape(float(seconds), rows // self.readers, frames, int(room)))
        return [x._replace(batches=n) for x, n in zip(planned, shaped(planned).most(epoch, 0))]

    def spoken(self, rows):
        """Yields (seconds, text) of a sample, or of utterances of rows of the order where lengths are not written."""
        if rows is None:
            yield from ((x.seconds, x.text) for x in self.utterances)
            return
        for place, (items, _, seconds, _) in enumerate(rows):
            for i, x in zip(items[: SAMPLE // self.readers].tolist(), seconds.tolist()):
                if utterance := self.said(place, i):
                    yield x, utterance.text

    def say(self):
        """Prints the size of the source, and the shapes of its batches."""
        counts, draws = self.counts, self.draws
        about, window = "" if self.written else "about ", self.order.window
        by = "" if self.exact else ", by their manifests and headers"
        shards = f"{sum(len(x.listed) for x in self.indices):,} shards in this process, in " * (self.corpus is None)
        hosts.say(f"{counts.sum():,} utterances, {about}{self.hours.sum():.4g} hours{by}; "
                  f"{shards}{len(self.own)} of {self.readers} parts; "
                  f"order shuffled by shards and within {self.config.data.buffer:,} utterances")  # fmt: skip
        if any(x is not None for x in draws):
            each = ", ".join(f"{x} {n if d is None else d:,}" for (x, _), n, d in zip(self.named, counts, draws))
            hosts.say(f"an epoch is so many draws: {each}")
        hosts.say(self.batches())
        if window:
            hosts.say(f"not all lengths are written: headers are read as training goes on, and batches are made within "
                      f"windows of {window:,} utterances of each part")  # fmt: skip

    def batches(self):
        """Returns a line with the shapes of batches; other epochs may have other padding where their draws vary."""
        shapes = ", ".join(
            f"{x.rows * self.readers} x {x.frames} frames x {x.labels} labels" for x in self.order.shapes
        )
        varies = self.order.window or any(x.varies for x in self.order.readers)
        first, about = self.first[1], "about " * bool(varies)
        padding, steps = self.order.padding(first), self.order.steps(first, first + 1)
        return f"batches: {shapes}; {about}{padding:.0%} padding; {about}{steps:,} an epoch"

    @property
    def usual(self):
        """The utterances that a batch has on average."""
        shapes = self.order.shapes
        return self.readers * sum(x.rows * x.batches for x in shapes) / max(1, sum(x.batches for x in shapes))

    def steps(self, epochs):
        """Returns the steps until `epochs` epochs of the whole run end; an estimate where lengths are not written."""
        return self.first[0] + self.order.steps(self.first[1], max(epochs, self.first[1]))

    def at(self, step):
        """Returns the order's state that a checkpoint keeps, to go on from a step."""
        collections.deque(self.read(step, step), 0)
        late = [x for some in hosts.each(self.late) for x in some]
        return self.state | {"epoch": self.place[1], "place": [*self.place[1:]], "late": late}

    def planned(self):
        """Returns (shape, this process's rows) of batches for late utterances; processes have as many of each shape."""
        shapes, plan = self.loads.shapes, []
        groups = [[] for _ in shapes]
        for x in self.late:
            k = next(k for k, shape in enumerate(shapes) if roomy(shape, x.frames, x.labels))
            groups[k].append((self.own.index(x.reader), x.item, x.version))
        sizes = [x.rows * len(self.own) for x in shapes]
        counts = hosts.gathered(np.array([[-(-len(x) // size) for x, size in zip(groups, sizes)]])).max(0)
        for k, (rows, size, count) in enumerate(zip(groups, sizes, counts.tolist())):
            rows += [None] * (count * size - len(rows))
            plan += [(k, rows[i * size : (i + 1) * size]) for i in range(count)]
        return plan

    def taken(self, batch, step, then):
        """Returns a batch as `read` yields it, and notes what it lacks."""
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
        """Yields batches of steps `first` to `end`, or to the start of epoch `until`, whose `last` one says so.

        `then` is a function of a batch and a generator of random numbers, to add to it.
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
