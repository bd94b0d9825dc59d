"""Reports the content of corpora, before anyone trains on them."""

import collections
import contextlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech import models
from jax_rnnt_speech.config import Config, command_line, files, named, options_of
from jax_rnnt_speech.data import batches, corpora, sources, texts, tokens
from jax_rnnt_speech.data.source import Source
from jax_rnnt_speech.data.utterances import listed, shown
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.system import UserError, refuse_if

# Options of train that decide what is read, or how it is padded.
OPTIONS = options_of("texts")
OPTIONS |= {"rate", "hop", "alphabet", "max_seconds", "batch_seconds", "batch", "buckets"}
SHOWN = 10  # texts that are shown, before and after --normalize
RARE = 3  # characters of fewer texts are named if there are ten times as many texts


class Counting(NamedTuple):
    """The part of a model on which the batches of its training depend."""

    tokens: object
    subsampling: int


class Findings:
    """The content of some corpora."""

    def __init__(self, paths, settings, vocabulary, subsampling, splits):
        corpus = corpora.Recordings(paths, settings, lenient=True)
        self.report, self.utterances, self.settings = corpus.report, corpus.utterances, settings
        self.corpus, labels = corpus, {}
        if self.utterances:
            labels_of_texts = vocabulary or tokens.train(settings.head, (x.text for x in self.utterances))
            with contextlib.suppress(batches.NothingLeft):  # the report says why
                labels = batches.labelled(corpus, labels_of_texts, subsampling).labels
                self.size, self.model = len(labels_of_texts.pieces), Counting(labels_of_texts, subsampling or 1)
        self.kept = [(corpus.entries[i], self.utterances[i].text) for i in labels]
        self.splits = splits
        self.seconds = np.array([entry.whole for entry, _ in self.kept])

    def object(self):
        """Returns the object that --json prints."""
        return {
            "utterances": len(self.kept),
            "hours": float(self.seconds.sum() / 3600),
            "labels": self.size if self.kept else 0,
            "characters": sum(len(text) for _, text in self.kept),
            "words": sum(len(text.split()) for _, text in self.kept),
            "splits": self.by_split(),
            "left_out": dict(self.report.names),
            "notes": dict(self.report.notes),
            "not_read_aloud": self.not_read_aloud(),
        }

    def by_split(self):
        """Counts the utterances of each split, by names of files and folders or a column; {} if nothing names one."""
        counts = collections.Counter()
        for entry, _ in self.kept:
            places = str(getattr(entry.audio, "archive", entry.audio)), entry.listed
            by_name = next((self.splits[x] for x in places if x in self.splits), "")
            counts[sources.split_of_row(entry.split) if entry.split else by_name] += 1
        return {split or "none": n for split, n in counts.items()} if any(counts) else {}

    def not_read_aloud(self):
        """Returns utterances' names by the parts that --normalize basic leaves as they are, the most frequent first."""
        names = collections.defaultdict(list)
        for entry, text in self.kept if self.settings.texts.normalize.startswith("basic") else ():
            for part in dict.fromkeys(texts.unread(text)):
                names[part].append(shown(entry.name))
        return dict(sorted(names.items(), key=lambda x: -len(x[1])))

    def batches(self):
        """Returns the batches of a training on these corpora, on one device, or why there is none.

        With --speeds, a training draws others of the same versions, and its shorter shapes may differ a little.
        """
        with TemporaryDirectory() as folder:
            try:
                fly = self.settings.data.on_the_fly
                source = Source(self.settings, Path(folder), corpus=None if fly else self.corpus)
                return source.opened(self.model, 1).batches()
            except UserError as error:
                return f"batches: none, as a training would be refused: {error}"

    def lines(self):
        x, said = self.object(), [text for _, text in self.kept]
        yield f"{x['utterances']} utterances, {x['hours']:.3g} hours, {x['labels']} labels"
        if x["splits"]:
            yield "splits: " + ", ".join(f"{n} of {k}" for k, n in x["splits"].items())
        shortest, half, most, longest = np.quantile(self.seconds, [0, 0.5, 0.95, 1])
        yield f"lengths: {shortest:.2f} to {longest:.2f} s; half up to {half:.2f} s, 95% up to {most:.2f} s"
        texts_with = collections.Counter(x for text in said for x in set(text))
        yield f"characters: {x['characters']}, of {len(texts_with)} kinds: {''.join(sorted(texts_with))}"
        yield f"words: {x['words']}, {len({word for text in said for word in text.split()})} different"
        for rare in sorted(x for x, count in texts_with.items() if count < RARE and len(said) >= 10 * RARE):
            names = ", ".join(entry.name for entry, text in self.kept if rare in text)
            yield f"rare character {rare!r} (U+{ord(rare):04X}): {names}"
        yield self.batches()
        changed = [(entry.text.strip(), text) for entry, text in self.kept if entry.text.strip() != text]
        yield f"texts that change as they are read (--normalize {self.settings.texts.normalize}): {len(changed)}"
        for before, after in list(dict.fromkeys(changed or [(x, x) for x in said]))[:SHOWN]:
            yield f"  {before!r} -> {after!r}"
        parts = x["not_read_aloud"]
        if parts:
            count = len({name for names in parts.values() for name in names})
            yield f"not read aloud, and left as it is in {count} utterances: {len(parts)} different (--json: all)"
            yield from (f"  {line}" for line in listed("not read aloud", dict([*parts.items()][:SHOWN])))


def options_of(args):
    """Returns configuration, vocabulary or None, and subsampling or None, from a model or file and the options."""
    usual, vocabulary, source, file = {}, None, None, {}
    if args.model:
        settings, source, vocabulary = models.outline(args.model)
        usual = settings.options()
    elif args.config:
        file = files.read_file(args.config)
        usual = models.completed(dict(file))
    given = command_line.given(args, OPTIONS)
    decided = command_line.decided(given)
    file = {name: x for name, x in file.items() if name not in decided}
    others = {name: x for name, x in usual.items() if name not in decided}
    with files.origins(args.model or f"--config {args.config}", others):
        settings = Config.from_options(**usual | decided).consistent(named(given, file))
    return settings, vocabulary, encoders.subsampling(settings, source) if usual else None


def check(args):
    settings, *model = options_of(args)
    every, args.data = {}, sources.once(args.data)
    for name in args.data:
        with contextlib.suppress(UserError, OSError):  # it is left out, with its reason
            every |= sources.listed(name)
    if found := sources.described(every):
        print(f"reading {found}", file=sys.stderr)
    settings = settings.replace(train=args.data)
    data = Findings(args.data, settings, *model, sources.places(every))
    if args.json:
        print(json.dumps(data.object(), indent=1))
    else:
        for line in (*(data.lines() if data.kept else ()), *data.report.lines(named=sys.maxsize)):
            print(line)
    refuse_if(not data.kept, f"no usable utterance in {', '.join(args.data)}")
    return 1 if data.report.names else 0


def arguments(parser):
    parser.add_argument("data", nargs="+", metavar="DATA", help="manifests or folders, as for train")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: utterances, hours, left_out, not_read_aloud, ..."
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="count labels and frames as the model in this folder does")
    model.add_argument("--config", metavar="FILE", help="count as a training with these options would, as for train")
    command_line.add_options(parser, OPTIONS)


COMMAND = "check", "show what corpora hold, and what of them is left out and why", check, arguments
