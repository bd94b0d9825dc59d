"""Corpora of recordings: the utterances that a manifest or a folder lists, and those of them that can be used.

A corpus has `utterances`, `load(i, rng)`, the number of `features` of a frame, `hop`, the seconds between frames, and a
`report`. To be tested it has `samples(i, rng)` too. FILE.py:FUNCTION names one of another kind: a function of the
configuration, of "train" or "valid", and of the text behind another colon, if there is one.
"""

from concurrent.futures import ThreadPoolExecutor

from jax_rnnt_speech.config.options import names
from jax_rnnt_speech.data import archives, audio, features, lists, rows, sources, texts
from jax_rnnt_speech.data.audio import AudioError
from jax_rnnt_speech.data.rows import Fault
from jax_rnnt_speech.data.utterances import Report, Utterance
from jax_rnnt_speech.system import UserError, outputs, refuse_if

READERS = 16  # threads that decode
MARKS = "<unk>", "<s>", "</s>", "<UNK>", "<S>", "</S>"  # words of language models


def stretches_of(path):
    """Returns the stretches of a file, or an AudioError."""
    try:
        return audio.stretches(path)
    except AudioError as error:
        return error


def usable(entries, report):
    """Yields (entry, stretches of its file) where its audio, segment and channel exist; the rest goes to the report."""
    listed = []
    for x in entries:
        report.add(*x) if isinstance(x, Fault) else listed.append(x)
    files = list(dict.fromkeys(x.audio for x in listed))
    with ThreadPoolExecutor(READERS) as pool:
        stretches = dict(zip(files, outputs.bar(pool.map(stretches_of, files), "audio files", len(files))))
    for entry in listed:
        file = stretches[entry.audio]
        try:
            if isinstance(file, AudioError):
                raise file
            seconds = audio.seconds(file)
            start, end, note = audio.within(entry.audio, seconds, entry.start, entry.end)
            audio.lacks_channel(entry.audio, file, entry.channel)
            if entry.whole is not None and rows.differs(entry.whole, seconds):
                raise AudioError(entry.audio, "duration differs from the manifest's")
            entry = entry._replace(start=start, end=end, notes=(*entry.notes, *[note] * bool(note)))
        except AudioError as error:
            report.add(error.reason, entry.name)
        else:
            for note in entry.notes:
                report.note(note, entry.name)
            if entry.channel is None and any(x.opposed for x in file):
                report.note(audio.CANCELLED, entry.audio, again=False)
            yield entry, file


def sentences_of(path, normalize, report, columns=()):
    """Yields words, without marks of a model, of sentences of a corpus or a text; the report names those without."""
    for x in lists.sentences(path) if path.suffix == ".txt" else sources.read(path, *columns):
        if isinstance(x, rows.Fault):
            report.add(*x)
        elif words := [word for word in normalize(x.text).split() if word not in MARKS]:
            yield words
        else:
            report.add("no words", x.name)


class Recordings:
    """The usable utterances of manifests and folders; the rest is in `report`.

    With `lenient`, some of several sources may be no corpus. With `testing`, utterances may have any length.
    """

    def __init__(self, paths, config, lenient=False, testing=False):
        self.testing, self.config, self.report = testing, config, Report()
        self.features, self.hop = config.features.mels, config.features.hop / 1000
        self.extractor = features.extractor(config)
        self.entries, self.utterances = [], []
        normalize = texts.normalizer(config.texts.normalize, config.texts.lower)
        paths = names(paths)
        refuse_functions(paths)
        entries = sources.read_all(paths, *config.texts.columns, lenient=lenient and len(paths) > 1)
        for entry, file in usable(entries, self.report):
            samples = audio.size(file, config.features.rate, entry.start, entry.end)
            frames, seconds = self.extractor.count(samples), samples / config.features.rate
            utterance = Utterance(entry.name, frames, normalize(entry.text), entry.speaker, seconds)
            if reason := self.unusable(entry, utterance, samples):
                self.report.add(reason, entry.name)
            else:
                self.entries.append(entry._replace(whole=seconds))
                self.utterances.append(utterance)

    def unusable(self, entry, utterance, samples):
        """Returns why it cannot be trained on, or None. A test leaves out only entries that have no text as written."""
        if not (entry.text.split() if self.testing else utterance.text):
            return "empty transcript"
        if self.testing:
            return None
        if samples > round(self.config.data.max_seconds * self.config.features.rate):
            return f"longer than {self.config.data.max_seconds:g} s"
        return None if utterance.frames else "shorter than a frame"

    def frames_of(self, utterance, versions):
        """Returns the frames of each of the `augmentation.Versions` of an utterance; 0 if too long for a training."""
        rate = self.config.features.rate
        sizes = [versions.size(round(utterance.seconds * rate), k) for k in range(versions.count)]
        return [self.extractor.count(x) if x <= round(self.config.data.max_seconds * rate) else 0 for x in sizes]

    def samples(self, i, rng):
        """Returns the samples [S] of an utterance."""
        x = self.entries[i]
        return audio.read(x.audio, self.config.features.rate, x.start, x.end, x.channel)

    def load(self, i, rng):
        """Returns the features [T, F] of an utterance; None if its audio is bad."""
        entry = self.entries[i]
        try:
            samples = self.samples(i, rng)
            if self.extractor.count(len(samples)) != self.utterances[i].frames:
                raise AudioError(entry.audio, "audio that has changed since it was listed")
        except AudioError as error:
            return self.report.add(error.reason, entry.name, again=False, passing=error.passing)
        return self.extractor(samples)


def tested(paths, config):
    """Returns the corpus of a test: every utterance with a text; or that of a function."""
    if len(paths) != 1 or not sources.by_function(paths[0]):
        return Recordings(paths, config, lenient=True, testing=True)
    corpus = open_corpus(paths[0], config, "valid")
    refuse_if(not hasattr(corpus, "samples"), f"{paths[0]}: its corpus has no samples, which a test listens to")
    return corpus


def refuse_functions(paths):
    """Raises an error where a corpus of a function is among sources that are read."""
    if made := [x for x in map(str, paths) if sources.by_function(x)]:
        raise UserError(f"{made[0]}: a corpus that a function makes goes with no other, and only into train and test")


def made_by(name, config, split):
    """Returns the corpus that a user's function makes for --train or --valid; None if the name is not of a function."""
    refuse_functions(names(name) if isinstance(name, list | tuple) and len(name) > 1 else ())
    made = sources.by_function(name)
    return made and texts.loaded(made[0], f"--{split}", "a manifest, a folder or ")(config, split, *made[1])


def open_corpus(name, config, split="valid"):
    """Returns the corpus that --valid names, or --train."""
    refuse_weights(name, split)
    if (corpus := made_by(name, config, split)) is not None:
        return corpus
    corpus = Recordings(name, config)
    refuse_if(not corpus.utterances, f"{', '.join(names(name))}: no usable utterance{corpus.report.summary()}")
    return corpus


def refuse_weights(name, split):
    if weight := next((x for x in names(name) if archives.weighted(x)[1] is not None), None):
        raise UserError(f"--{split} {weight}: weights are for --train")
