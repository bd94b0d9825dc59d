"""Words with times and confidence, and the forms in which programs read them."""

import collections
import contextlib
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_rnnt import metrics, timing
from jax_rnnt_speech.config import UserError, natural

FORMATS = "text", "json", "jsonl", "ctm", "textgrid"


class Word(NamedTuple):
    word: str
    start: float  # seconds from the start of the file
    end: float
    confidence: float | None  # the least probability of its labels


class Transcript(NamedTuple):
    file: str
    text: str
    duration: float  # seconds of the recording, or of its segment
    words: list
    nbest: list | None = None  # of {"text", "score"}
    name: str = ""  # of the recording in a corpus

    def object(self):
        x = {"file": self.file, "text": self.text, "duration": round(self.duration, 3)}
        x["words"] = [word._asdict() for word in self.words]
        return x if self.nbest is None else x | {"nbest": self.nbest}


def word_of_label(tokens, labels):
    """The number of the word that each label belongs to; -1 for a separator alone."""
    pieces, numbers, word, begun = tokens.labels(), [], -1, False
    for label in labels:
        piece = pieces[label] or ""
        begun = begun or piece.startswith(tokens.separator) or word < 0
        empty = not piece.replace(tokens.separator, "")
        word += begun and not empty
        begun = begun and empty
        numbers.append(-1 if empty else word)
    return numbers


def words(recogniser, labels, frames, log_probs=None, durations=None, start=0.0, end=None):
    """The Words of an utterance, from the encoder frames of its labels. It begins and ends at seconds of its file."""
    if not len(labels):
        return []
    durations = None if durations is None else np.array(durations, np.int32)
    spoken = timing.intervals(np.array(frames, np.int32), [""] * len(labels), hop=recogniser.seconds, offset=start,
                              durations=durations)  # fmt: skip
    numbers, groups = np.array(word_of_label(recogniser.tokens, labels), np.int32), collections.defaultdict(list)
    for i, number in enumerate(numbers):
        groups[int(number)].append(i)
    groups.pop(-1, None)
    sure = [None] * len(groups)
    if log_probs is not None:
        sure = metrics.word_confidence(np.array(labels), np.array(log_probs, float), np.array(len(labels)), numbers)
    found = []
    for places, confidence in zip(groups.values(), sure):
        first, last = spoken[places[0]].start, spoken[places[-1]].end
        last = last if end is None or end <= first else min(last, end)  # its frame may reach beyond the recording
        text = recogniser.tokens.decode([labels[i] for i in places]).strip()
        confidence = None if confidence is None else round(confidence, 4)
        found.append(Word(text, round(first, 6), round(last, 6), confidence))
    return found


def transcript(recogniser, entry, result, nbest=0):
    """The Transcript of a Result of an Entry."""
    timed = words(recogniser, result.labels, result.frames, result.log_probs, result.durations, entry.start,
                  entry.start + result.duration)  # fmt: skip
    best = [{"text": text, "score": round(score, 4)} for text, score in result.nbest[:nbest]] if nbest else None
    return Transcript(str(entry.audio), result.text, result.duration, timed, best, entry.name)


def add_options(parser):
    parser.add_argument("--format", choices=FORMATS, default="text", help="(%(default)s); textgrid: a file for each")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file, or folder of --format textgrid")
    parser.add_argument("--nbest", type=natural, default=0, metavar="N", help="hypotheses of --beam in JSON")


def check(args):
    """Raises where options contradict each other, or the output has no place."""
    kind = "a folder" if args.format == "textgrid" else "a file"
    if args.format in ("ctm", "textgrid") and not args.output:
        raise UserError(f"--format {args.format} needs --output, {kind}")
    if args.output and not args.output.parent.is_dir():
        raise UserError(f"--output {args.output}: {args.output.parent} is no folder")
    if args.output and (args.output.is_file() if args.format == "textgrid" else args.output.is_dir()):
        raise UserError(f"--output {args.output} must be {kind}")
    if getattr(args, "nbest", 0) and (not args.beam or args.format not in ("json", "jsonl")):
        raise UserError("--nbest needs --beam, and --format json or jsonl")


@contextlib.contextmanager
def writer(args):
    """A function that takes Transcripts one by one, and writes what --format says. Raises where it got none."""
    kept, count = [], 0
    with contextlib.ExitStack() as stack:
        file = None

        def write(x):
            nonlocal count, file
            count += 1
            if args.format in ("ctm", "textgrid"):
                kept.append(x)
                return
            if file is None:
                file = stack.enter_context(args.output.open("w", encoding="utf-8")) if args.output else sys.stdout
            line = json.dumps(x.object(), ensure_ascii=False) if "json" in args.format else f"{x.name}\t{x.text}"
            before = "" if args.format != "json" else "[" if count == 1 else ",\n"
            print(before + line, end="" if args.format == "json" else "\n", file=file, flush=True)

        yield write
        if not count:
            raise UserError("no recording could be used")
        if args.format == "json":
            print("]", file=file, flush=True)
    if kept:
        write_intervals(args, kept)


def write_intervals(args, transcripts):
    """CTM or TextGrids of the recordings; segments of one file are joined."""
    spoken, seconds = collections.defaultdict(list), collections.defaultdict(float)
    names = {Path(x.file).stem for x in transcripts}
    unique = len(names) == len({x.file for x in transcripts})
    for x in transcripts:
        name = "_".join((Path(x.file).stem if unique else x.file.strip("/").replace("/", "_")).split())
        spoken[name] += [timing.Interval(*y[1:3], y.word) for y in x.words]
        seconds[name] = max(seconds[name], x.duration, *(y.end for y in spoken[name]))
    spoken = {name: sorted(x) for name, x in spoken.items()}
    try:
        if args.format == "ctm":
            timing.write_ctm(args.output, spoken)
            return
        args.output.mkdir(exist_ok=True)
        for name, x in spoken.items():
            timing.write_textgrid(args.output / f"{name}.TextGrid", {"words": x}, seconds[name])
    except ValueError as error:
        raise UserError(f"--format {args.format}: {error}") from None
