"""Words with times and confidences, and the forms in which programs read them."""

import collections
import contextlib
import itertools
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_rnnt import timing
from jax_rnnt_speech import outputs
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.manifests import Entry, later
from jax_rnnt_speech.utterances import shown

LINES = "text", "json", "jsonl"  # written as they come
# What has a file for each recording.
SUFFIXES = {"srt": ".srt", "vtt": ".vtt", "textgrid": ".TextGrid"}
FORMATS = *LINES, "ctm", *SUFFIXES
SHORTEST = 0.01  # seconds before the end of a recording in which a label can be spoken
DIGITS = 6  # of a confidence


class Transcript(NamedTuple):
    text: str
    duration: float  # seconds of the recording, or of its segment
    words: list  # of timing.Interval, in seconds from the start of the file
    nbest: list | None = None  # of {"text", "score"}
    space: str = " "  # between words

    def object(self, entry):
        x = {"file": str(entry.audio), "text": self.text, "duration": round(self.duration, 3)}
        if (entry.start, entry.end) != (0.0, None):
            x["start"] = entry.start  # of a segment, in seconds from the start of the file
        x["words"] = timing.to_json(self.words)
        return x if self.nbest is None else x | {"nbest": self.nbest}


def mark_of(tokens):
    """What words begin with, or None: the vocabulary has no label that begins one, so that every label is a word."""
    return tokens.separator if any((x or "").startswith(tokens.separator) for x in tokens.labels()) else None


def words(recogniser, labels, frames, confidences=None, durations=None, start=0.0, duration=math.inf):
    """The words of an utterance, from the encoder frames of its labels; it begins at `start` seconds of its file.

    The last frame may reach beyond the recording, or begin at its end. No word does.
    """
    if not len(labels):
        return []
    if math.isfinite(duration):
        frames = np.minimum(frames, max(math.ceil((duration - SHORTEST) / recogniser.seconds) - 1, 0))
    integers = (None if x is None else np.array(x, np.int32) for x in (labels, frames, durations))
    labels, frames, durations = integers
    confidences = None if confidences is None else np.array(confidences, float)
    tokens, clock = recogniser.tokens, {"hop": recogniser.seconds, "offset": start}
    found = timing.words(labels, frames, tokens.labels(), **clock, durations=durations, confidences=confidences,
                         mark=mark_of(tokens))  # fmt: skip
    begin, end = start + float(frames[-1]) * recogniser.seconds, max((x.end for x in found), default=0.0)
    share = min(1, (start + duration - begin) / (end - begin)) if end > begin else 1

    def inside(x):
        return x if x <= begin else begin + share * (x - begin)

    def rounded(x):
        return None if x is None else round(x, DIGITS)

    return [timing.Interval(inside(a), inside(b), text, rounded(sure)) for a, b, text, sure in found]


def space_of(tokens):
    """What is written between words."""
    return "" if mark_of(tokens) is None else " "


def captions(words, end, space=" "):
    """Captions of a recording that ends after so many seconds. They are shown no longer, but for slivers at the end."""
    return [x._replace(end=min(x.end, max(end, x.start + SHORTEST))) for x in timing.captions(words, space=space)]


@contextlib.contextmanager
def in_a_line(name):
    """What the library cannot write, or make words of, is an error of the user's."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"{name}: {error}") from None


def transcript(recogniser, entry, result, nbest=0):
    """The Transcript of a Result of an Entry."""
    heard = result.labels, result.frames, result.confidences, result.durations
    best = [{"text": text, "score": round(score, 4)} for text, score in result.nbest[:nbest]] if nbest else None
    with in_a_line(shown(entry.name)):
        timed = words(recogniser, *heard, entry.start, result.duration)
    return Transcript(result.text, result.duration, timed, best, space_of(recogniser.tokens))


# ------------------------------------------------------------------------------------------------------------- options


def add_options(parser, formats=FORMATS):
    parser.add_argument("--format", choices=formats, default=formats[0], help="(%(default)s)")
    help = "file, which is overwritten; of --format srt, vtt and textgrid also a folder, with a file a recording"
    parser.add_argument("--output", type=Path, metavar="FILE", help=help)


def alone(args):
    """Whether --output is the file of one recording."""
    return args.output.suffix.lower() == SUFFIXES[args.format].lower()


def check(args, sources):
    """Raises where options contradict each other, or the output has no place."""
    if args.output:
        outputs.check(args.output, sources, args.format in SUFFIXES and not alone(args))
    elif args.format not in LINES:
        kind = f"a file {SUFFIXES[args.format]} or a folder" if args.format in SUFFIXES else "a file"
        raise UserError(f"--format {args.format} needs --output, {kind}")
    if getattr(args, "nbest", 0) and (not args.beam or args.format not in ("json", "jsonl")):
        raise UserError("--nbest needs --beam, and --format json or jsonl")
    if getattr(args, "nbest", 0) > getattr(args, "beam", 0):
        raise UserError(f"--nbest {args.nbest}: --beam {args.beam} has fewer hypotheses")


# -------------------------------------------------------------------------------------------------------------- writing


def recordings(entries, clean=str):
    """What each Entry is called in CTM and as a file: as its audio is, with one name for all segments of it.

    Where segments of a file overlap, each has its own name. `clean` makes a text one that can be written.
    """
    files = collections.defaultdict(list)
    for i, x in enumerate(entries):
        if isinstance(x, Entry):
            files[str(x.audio)].append(i)
    stems, names, used = collections.Counter(clean(Path(file).stem) for file in files), {}, set()

    def unused(name):
        name = clean(name.strip("/").replace("/", "_"))
        chosen = next(x for x in itertools.chain([name], (f"{name}_{i}" for i in itertools.count(2))) if x not in used)
        used.add(chosen)
        return chosen

    for file, members in files.items():
        stem = Path(file).stem
        base = stem if stems[clean(stem)] == 1 else file
        pairs = itertools.pairwise(sorted((entries[i] for i in members), key=lambda x: x.start))
        overlap = any(later(math.inf if a.end is None else a.end, b.start) for a, b in pairs)
        if overlap:
            names |= {i: unused(entries[i].name.replace(file, base)) for i in members}
        else:
            names |= dict.fromkeys(members, unused(base))
    return names


@contextlib.contextmanager
def writer(args, entries):
    """A function of (place in entries, Transcript) that writes what --format says. Raises where it is never called."""
    names = recordings(entries, (lambda x: "_".join(shown(x).split())) if args.format == "ctm" else shown)
    if args.output and args.format in SUFFIXES and alone(args) and len(set(names.values())) > 1:
        raise UserError(f"--output {args.output} is the file of one recording, got {len(set(names.values()))}: "
                        f"name a folder")  # fmt: skip
    kept, count = collections.defaultdict(list), 0
    with contextlib.ExitStack() as stack:
        file = None

        def write(i, x):
            nonlocal count, file
            count += 1
            if args.format not in LINES:
                kept[names[i]].append((entries[i].start + x.duration, x.words, x.space))
                return
            if file is None:
                file = stack.enter_context(args.output.open("w", encoding="utf-8")) if args.output else sys.stdout
            if args.format == "text":
                line = f"{shown(entries[i].name)}\t{x.text}"
            else:
                with in_a_line(shown(entries[i].name)):
                    line = json.dumps(x.object(entries[i]), ensure_ascii=False)
            before = "" if args.format != "json" else "[" if count == 1 else ",\n"
            print(before + line, end="" if args.format == "json" else "\n", file=file, flush=True)

        yield write
        if not count:
            raise UserError("no recording could be used")
        if args.format == "json":
            print("]", file=file, flush=True)
        if kept:
            with in_a_line(f"--format {args.format}"):
                write_files(args, kept)


def in_order(words):
    """The words of a recording, which end before the next one begins, where segments touch."""
    words = sorted(words)
    ends = [x.start for x in words[1:]] + [math.inf]
    return [x if later(x.end, end) else x._replace(end=min(x.end, end)) for x, end in zip(words, ends)]


def write_files(args, kept):
    """Of {name: [(second of the end, words, what is between them)]}."""
    spoken = {name: in_order(itertools.chain(*(x for _, x, _ in parts))) for name, parts in kept.items()}
    if args.format == "ctm":
        timing.write_ctm(args.output, spoken)
        return
    single = alone(args)
    if not single:
        args.output.mkdir(exist_ok=True)
    for name, found in spoken.items():
        path = args.output if single else args.output / f"{name}{SUFFIXES[args.format]}"
        end, space = max(end for end, *_ in kept[name]), kept[name][0][2]
        if args.format == "textgrid":
            timing.write_textgrid(path, {"words": found}, end)
        else:
            {"srt": timing.write_srt, "vtt": timing.write_vtt}[args.format](path, captions(found, end, space))
