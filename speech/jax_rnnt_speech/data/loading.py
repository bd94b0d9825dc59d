"""Makes batches of utterances by their places in an order: decoded, augmented and turned into features, or from memory.

A fault of an utterance is found when its turn comes: its row of a batch is not valid then, and the batch names it in
`left_out`.
"""

import functools
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.data import audio, augmentation, batches, features, texts
from jax_rnnt_speech.data import tokens as vocabularies
from jax_rnnt_speech.data.archives import storage
from jax_rnnt_speech.data.index import surely_longer
from jax_rnnt_speech.data.rows import Fault, LineError, differs, leave_out_if
from jax_rnnt_speech.data.utterances import Utterance


class Late(NamedTuple):
    """An utterance for which its batch has no room."""

    reader: int
    item: int
    version: int
    frames: int
    labels: int
    name: str


class Note(NamedTuple):
    """A difference between an utterance and its manifest that does no harm."""

    text: str
    name: str


class LargerError(Exception):
    """The error of an utterance larger than the rows of its batch; the arguments are its frames and labels."""


def is_long(entry, seconds, most):
    """Returns True if an utterance exceeds a limit, however its length was rounded, estimated, or cut by its file.

    A file may have no more than half of a segment, and a clip that the times of its row do not fit is read as a whole.
    """
    if getattr(entry, "end", None) is None:
        return surely_longer(seconds, most)
    return not getattr(entry.audio, "clip", False) and surely_longer(seconds, 2 * most)


def roomy(shape, frames, labels):
    """Returns True if a row of batches of a shape has room for an utterance."""
    return frames <= shape.frames and labels <= shape.labels


def samples_of(entry, rate, again=True):
    """Returns (samples, None or a note of what differs from its manifest) of an utterance.

    Storage that fails is tried `again`, and then ends the command.
    """
    where = entry.audio, rate, entry.start, entry.end, entry.channel
    return storage.steadily(lambda: audio.read_noted(*where), entry.audio) if again else audio.read_noted(*where)


def text_of(entry, normalize):
    """Returns the text of an Entry as a training uses it; raises a LineError for a Fault or an empty text."""
    if isinstance(entry, Fault):
        raise LineError(entry.reason)
    text = normalize(entry.text)
    leave_out_if(not text, "empty transcript")
    return text


class Loader:
    """Makes a batch from the order's rows. Each worker has a copy.

    `features` are the numbers in a frame. `subsampling` says how many of the frames become one of the encoder.
    """

    def __init__(self, config, subsampling, vocabulary, indices, shapes, features):
        self.config, self.subsampling, self.vocabulary = config, subsampling, vocabulary
        self.indices, self.shapes, self.features = indices, shapes, features

    @functools.cached_property
    def tools(self):
        """The tools (vocabulary, normalizer, extractor, augmentation), which each worker makes for itself."""
        normalize = texts.normalizer(self.config.texts.normalize, self.config.texts.lower)
        extractor = features.extractor(self.config)
        vocabulary = self.vocabulary and vocabularies.from_json(self.vocabulary)
        return vocabulary, normalize, extractor, augmentation.Versions(self.config)

    def __call__(self, epoch, shape, rows):
        labels, left_out, items = {}, [], []
        for i, row in enumerate(rows):
            x, spans, name = None, 0, "an utterance"
            if row is not None:
                place, number, version = row
                index = self.indices[place]
                key = epoch, index.number, number
                try:
                    entry, notes = index.entry(number), []
                    name = entry.name
                    x, labels[i] = self.loaded(entry, index, version, key, notes)
                    if not roomy(self.shapes[shape], len(x), len(labels[i])):
                        raise LargerError(len(x), len(labels[i]))
                    left_out += [Note(note, name) for note in notes]
                    rng = np.random.default_rng((self.config.run.seed, 3, *key))
                    spans = features.draw_spans(self.config, rng, len(x), self.features)
                except (audio.AudioError, LineError) as error:
                    x = None
                    left_out.append((getattr(error, "reason", str(error)), name))
                except LargerError as error:
                    x = None
                    left_out.append(Late(index.number, number, version, *error.args, name))
            items.append((i, x, spans))
        data = batches.Labelled(self, labels)
        return batches.collate(data, self.config, self.shapes[shape], items, len(rows)) | {"left_out": left_out}

    def loaded(self, entry, index, version, key, notes):
        """Returns (features, labels) of an utterance, or raises a LineError or AudioError that says what is wrong."""
        vocabulary, normalize, extractor, versions = self.tools
        remembered = isinstance(entry, Utterance)  # whose text is what is taught
        labels = vocabulary.encode(entry.text if remembered else text_of(entry, normalize))
        leave_out_if(labels is None, "characters outside the vocabulary")
        if remembered:
            x = index.load(key[2], version, np.random.default_rng((self.config.run.seed, 5, *key)))
            leave_out_if(x is None, "no readable audio")
        else:
            samples = self.samples(entry, index.lengths(np.array([key[2]]))[0], notes)
            x = extractor(versions.applied(samples, version, key))
        leave_out_if(not len(x), "shorter than a frame")
        leave_out_if(len(labels) > -(-len(x) // self.subsampling), "fewer frames than labels")
        return x, np.array(labels, np.int32)

    def samples(self, entry, seconds, notes, again=True):
        """Returns the samples of an Entry, or raises a LineError or AudioError.

        `seconds` are its length by its manifest or header. `notes` gets what differs from its manifest.
        """
        rate, most = self.config.features.rate, self.config.data.max_seconds
        leave_out_if(is_long(entry, seconds, most), f"longer than {most:g} s")
        samples, note = samples_of(entry, rate, again)
        notes += [note] * bool(note)
        if entry.end is None and entry.whole and differs(entry.whole, entry.start + len(samples) / rate):
            raise LineError("duration differs from the manifest's")
        leave_out_if(len(samples) > round(most * rate), f"longer than {most:g} s")
        return samples

    def versions_of(self, place, items, i):
        """(features by version, None for one that is too long; what is left out; notes) of an item, to be kept.

        A file that cannot be read now, but perhaps later, is left out; its reason is followed by True.
        """
        index, number, notes = self.indices[place], int(items[i]), []
        _, normalize, extractor, versions = self.tools
        entry, most = index.entry(number), round(self.config.data.max_seconds * self.config.features.rate)
        try:
            text_of(entry, normalize)
            seconds = index.seconds[number] or index.later[number]  # headers have been read, or their storage fails
            samples = self.samples(entry, seconds, notes, again=False)
            fits = [versions.size(len(samples), k) <= most for k in range(versions.count)]
            arrays = [extractor(versions.applied(samples, k, (index.number, number))) if x else None
                      for k, x in enumerate(fits)]  # fmt: skip
            leave_out_if(not len(arrays[0]), "shorter than a frame")
        except (audio.AudioError, LineError) as error:
            reason = getattr(error, "reason", str(error))
            return [None] * versions.count, [(reason, entry.name, getattr(error, "passing", False))], []
        return arrays, [], [Note(x, entry.name) for x in notes]
