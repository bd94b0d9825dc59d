"""Words with times and confidences, and the forms in which programs read them."""

import collections
import contextlib
import dataclasses
import html
import itertools
import json
import math
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_rnnt import timing
from jax_rnnt_speech.config.options import option
from jax_rnnt_speech.data.rows import Entry, later
from jax_rnnt_speech.data.utterances import column, shown
from jax_rnnt_speech.recognition import subtitles, timed
from jax_rnnt_speech.system import UserError, as_user_error, outputs, refuse_if

LINES = "text", "json", "jsonl"  # written as they come
# Formats with a file for each recording.
SUFFIXES = {"srt": ".srt", "vtt": ".vtt", "textgrid": ".TextGrid"}
FORMATS = *LINES, "ctm", *SUFFIXES
SHORTEST = 0.01  # seconds before the end of a recording in which a label can be spoken
LEAST_COLUMNS = 20  # columns of a line of captions behind a long name
DIGITS = 6  # decimals of a confidence
LONGEST = 240  # bytes of the name of a recording: with a suffix, and a number where names are equal, 255 are allowed
SHARE = 10  # times as long as it takes to write a file of some segments, nothing is written again


class Transcript(NamedTuple):
    text: str
    duration: float  # seconds of the recording, or of its segment
    words: list  # a list of timing.Interval, in seconds from the start of the file
    nbest: list | None = None  # a list of {"text", "score"}
    space: str = " "  # between words
    speaker: str = ""  # speaker of a segment, if one is to be named
    unheard: tuple = ()  # [begin, end) of speech without words, in seconds from the start of the file
    invented: tuple = ()  # like `words`, those where nobody speaks

    def object(self, entry):
        x = {"file": str(entry.audio), "text": self.text, "duration": round(self.duration, 3)}
        if (entry.start, entry.end) != (0.0, None):
            x["start"] = entry.start  # start of a segment, in seconds from the start of the file
        if self.speaker:
            x["speaker"] = self.speaker
        x["words"] = timed.objects(self.words)
        x |= self.doubts
        return x if self.nbest is None else x | {"nbest": self.nbest}

    @property
    def doubts(self):
        """The words and the speech that do not match each other, for JSON."""
        doubts = {"unheard": timed.stretches(self.unheard), "invented": timed.objects(self.invented)}
        return {name: x for name, x in doubts.items() if x}


def words_of(tokens, labels, frames, durations=None, **options):
    mark = tokens.separator if tokens.separates else None  # without spaces, every label is a word
    # JAX compiles a conversion of any other type anew for each number of labels.
    labels, frames, durations = (x if x is None else np.array(x, np.int32) for x in (labels, frames, durations))
    return timing.words(labels, frames, tokens.labels, mark=mark, durations=durations, **options)


def words(model, labels, frames, confidences=None, durations=None, start=0.0, duration=math.inf):
    """Returns the words of an utterance, from the frames of its labels; it begins at `start` seconds of its file.

    The last frame may reach beyond the recording, or begin at its end. No word does.
    """
    if not len(labels):
        return []
    if math.isfinite(duration):
        frames = np.minimum(frames, max(math.ceil((duration - SHORTEST) / model.seconds) - 1, 0))
    clock = {"hop": model.seconds, "offset": start}
    intervals = words_of(model.tokens, labels, frames, **clock, durations=durations, confidences=confidences)
    begin, end = start + float(frames[-1]) * model.seconds, max((x.end for x in intervals), default=0.0)
    share = min(1, (start + duration - begin) / (end - begin)) if end > begin else 1

    def inside(x):
        return x if x <= begin else begin + share * (x - begin)

    def rounded(x):
        return None if x is None else round(x, DIGITS)

    return [timing.Interval(inside(a), inside(b), text, rounded(sure)) for a, b, text, sure in intervals]


def places_of_words(tokens, labels):
    """Yields [first, last) of the labels of each of the `words`, and of the punctuation that it has."""
    found, first = words_of(tokens, labels, range(len(labels)), hop=1.0), 0
    for word, stop in zip(found, [*(int(x.start) for x in found[1:]), len(labels)]):
        size, places = len("".join(word.text.split())), range(math.ceil(word.end), stop + 1)
        last = next((i for i in places if len("".join(tokens.decode(labels[first:i]).split())) == size), stop)
        yield first, last
        first = last


def space_of(tokens):
    """Returns the separator that is written between words."""
    return " " if tokens.separates else ""


def captions(words, end, space=" ", text=None, **lines):
    """Returns captions of a recording that ends after so many seconds. Only slivers at the end are shown longer.

    `text` is what the words spell, with its white space. `lines` are other options of `subtitles.lay_out`.
    """
    cues = subtitles.lay_out(words, text, space=space, **lines)
    return [x._replace(end=min(x.end, max(end, x.start + SHORTEST))) for x in cues]


def spoken_captions(form, parts, end):
    """Returns the file of captions of (start, Transcript) that names speakers, whose captions may overlap."""
    cues = []
    for _, x in parts:
        name = f"{shown(x.speaker)}: " if x.speaker and form == "srt" else ""
        words = in_order(x.words)
        for caption in captions(words, end, x.space, x.text, line_length=max(LEAST_COLUMNS, 42 - len(name))):
            # One caption at a time is checked and spelled, as in a list none may overlap.
            cue = captioned(form, [caption._replace(text=name + caption.text)])
            times, text = cue.removeprefix("WEBVTT\n\n").removeprefix("1\n").split("\n", 1)
            voice = f"<v {html.escape(shown(x.speaker), quote=False)}>" if form == "vtt" and x.speaker else ""
            cues.append((caption[:2], f"{times}\n{voice}{text}"))
    cues = [text for _, text in sorted(cues, key=lambda x: x[0])]
    if form == "vtt":
        return "\n".join(["WEBVTT\n", *cues])
    return "\n".join(f"{i}\n{text}" for i, text in enumerate(cues, 1))


def segments(x):
    """Returns the text of a Transcript in parts, with their times: captions of one line."""
    return captions(x.words, x.duration, x.space, x.text, line_length=84, lines=1)


def captioned(form, cues):
    """Returns captions as the text of a file."""
    if form == "srt":  # it has no escapes
        cues = [x._replace(text=x.text.replace("-->", "→")) for x in cues]
    return {"srt": subtitles.srt, "vtt": subtitles.vtt}[form](cues)


def transcript(model, entry, result, nbest=0, speaker=""):
    """Returns the Transcript of a Result of an Entry."""
    heard = result.labels, result.frames, result.confidences, result.durations
    best = [{"text": text, "score": round(score, 4)} for text, score in result.nbest[:nbest]] if nbest else None
    with as_user_error(shown(entry.name), ValueError):
        spoken = result.written.words(words(model, *heard, entry.start, result.duration))
    missed = tuple((entry.start + a, entry.start + b) for a, b in result.unheard)
    invented = tuple(x._replace(start=entry.start + x.start, end=entry.start + x.end) for x in result.invented)
    return Transcript(result.text, result.duration, spoken, best, space_of(model.tokens), speaker, missed, invented)


# ------------------------------------------------------------------------------------------------------------- options


@dataclasses.dataclass(frozen=True)
class Output:
    """The options that decide what is written, and where."""

    format: str = option(FORMATS[0], str, "format of what is written", choices=FORMATS)
    output: Path | None = option(
        None, Path, "file that is written, or replaced; with --format srt, vtt and textgrid also a folder, for a file "
        "of each recording; default: the screen, on which these formats and ctm show one recording", metavar="FILE",
    )  # fmt: skip

    @property
    def alone(self):
        """True if --output is the file of one recording."""
        return self.output.suffix.lower() == SUFFIXES[self.format].lower()

    def checked(self, sources, entries=()):
        """Returns itself, or raises an error where the output has no place."""
        if self.output:
            outputs.check(self.output, sources, self.format in SUFFIXES and not self.alone)
        elif sys.stdout is None:
            raise UserError("the standard output is closed: name --output")
        self.check_names(names_of(entries))
        return self

    def check_names(self, names):
        """Raises an error where the output has no place for so many recordings."""
        count = len(set(names.values()))
        if count < 2 or self.format in LINES:
            return
        if not self.output:
            kind = "a folder" if self.format in SUFFIXES else "a file"
            raise UserError(f"--format {self.format} of {count} recordings needs --output, {kind}")
        if self.format in SUFFIXES and self.alone:
            raise UserError(f"--output {self.output} is the file of one recording, got {count}: name a folder")


# -------------------------------------------------------------------------------------------------------------- writing


def names_of(entries, clean=str, together=False):
    """Returns the name of each Entry in CTM and as a file: that of its audio, with one name for all its segments.

    Where segments of a file overlap, each has its own name, unless all are `together`, as those of speakers are.
    `clean` makes a text one that can be written.
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
        if overlap and not together:
            names |= {i: unused(entries[i].name.replace(file, base)) for i in members}
        else:
            names |= dict.fromkeys(members, unused(base))
    return names


@contextlib.contextmanager
def writer(to, entries):
    """Yields a function of (place in entries, Transcript or None) that writes as an Output says.

    Everything is on the disk as it comes, in files that programs can read; JSON's list is closed at the end, whatever
    ends it. Raises an error where no transcript came.
    """
    clean = column if to.format == "ctm" else lambda name: outputs.shortened(shown(name), LONGEST)
    names = names_of(entries, clean, together=bool(getattr(to, "segments", None)))
    to.check_names(names)
    files = {"ctm": Rows}.get(to.format, Lines if to.format in LINES else Files)(to, entries, names)
    count = 0

    def write(i, x):
        nonlocal count
        count += x is not None
        if i in names:
            files.add(i, x)

    try:
        yield write
        refuse_if(not count, "no recording could be used")
    except KeyboardInterrupt as error:
        files.close()
        where = to.output or "the screen"
        raise type(error)(f"interrupted: {count} of {len(names)} recordings are written to {where}") from None
    except BaseException:
        with contextlib.suppress(UserError, OSError):
            files.close()
        raise
    files.close()


def in_order(words):
    """Returns the words of a recording, which end before the next one begins, where segments touch."""
    words = sorted(words)
    ends = [x.start for x in words[1:]] + [math.inf]
    return [x if later(x.end, end) else x._replace(end=min(x.end, end)) for x, end in zip(words, ends)]


def tiers(parts):
    """Returns {name: words} of (start, Transcript) in order: for each speaker, and again for overlaps."""
    found, ends = {}, {}  # ends: the speaker of a tier, and when its last segment ends
    for begin, x in sorted(parts, key=lambda part: part[1].speaker):
        name = x.speaker.strip() or "words"
        numbered = itertools.chain([name], (f"{name} {i}" for i in itertools.count(2)))
        chosen = next(
            y for y in numbered if y not in ends or (ends[y][0] == x.speaker and not later(ends[y][1], begin))
        )
        found.setdefault(chosen, []).extend(x.words)
        ends[chosen] = x.speaker, begin + x.duration
    return {name: in_order(words) for name, words in found.items()}


class Lines:
    """Writes a line for each Transcript, in the order of their entries: each once those before it are known."""

    def __init__(self, to, entries, names):
        self.to, self.entries, self.names, self.file, self.known = to, entries, names, None, {}
        self.waiting = collections.defaultdict(list)  # places in entries that are to come, the first one last
        for i in sorted(names, key=self.place, reverse=True):
            self.waiting[self.group(i)].append(i)

    def place(self, i):
        return i

    def group(self, i):
        """Returns a key that distinguishes the entries among which the order counts."""
        return None

    def add(self, i, x):
        self.known[i], waiting = x, self.waiting[self.group(i)]
        while waiting and waiting[-1] in self.known:
            self.release(waiting.pop())

    def release(self, i):
        x = self.known.pop(i)
        if x is None:
            return
        with as_user_error(shown(self.entries[i].name), ValueError):
            text = self.text(i, x)
        if self.file is None:  # an earlier file stays until there is something to write
            self.file = outputs.Growing(self.to.output) if self.to.output else outputs.Screen()
            text = text.removeprefix(",\n").join(["[", ""]) if self.to.format == "json" else text
        self.file.write(text)

    def text(self, i, x):
        if self.to.format == "text":
            who = f"{x.speaker}: " if x.speaker else ""
            return f"{shown(self.entries[i].name)}\t{' '.join(f'{who}{x.text}'.splitlines())}\n"
        line = json.dumps(x.object(self.entries[i]), ensure_ascii=False)
        return f"{line}\n" if self.to.format == "jsonl" else f",\n{line}"

    def close(self):
        try:
            for i in sorted(self.known, key=self.place):
                self.release(i)
            if self.file is not None and self.to.format == "json":
                self.file.write("]\n")
        finally:
            if self.file is not None:
                self.file.close()


def ctm_word(text):
    """Returns a word as one column of CTM. NIST's tools take <...> for marks of theirs, such as <ALT_BEGIN>."""
    return re.sub("^<(.*)>$", "＜\\1＞", column("_".join(text.split())))


class Rows(Lines):
    """Writes CTM, whose order counts within a recording."""

    def place(self, i):
        return self.entries[i].start

    def group(self, i):
        return self.names[i]

    def text(self, i, x):
        channel = self.entries[i].channel
        channel = str(channel + 1) if isinstance(channel, int) else "1"  # NIST counts from 1
        with as_user_error(f"--format {self.to.format}", ValueError):
            rows = timed.ctm(self.names[i], [y._replace(text=ctm_word(y.text)) for y in x.words], channel)
        more = f" lex {column(x.speaker)}\n" if x.speaker else "\n"  # NIST's columns for a type and a speaker
        return rows.replace("\n", more)


class Files:
    """Writes a file for each recording. While segments of it come, it is written again from time to time."""

    def __init__(self, to, entries, names):
        self.to, self.entries, self.names = to, entries, names
        self.missing = collections.Counter(names.values())  # segments of each recording
        self.found = collections.defaultdict(list)  # (second in which it begins, Transcript) by recording
        self.next = {}  # the time to write the file of a recording again

    def add(self, i, x):
        name = self.names[i]
        if x is not None:
            self.found[name].append((self.entries[i].start, x))
        self.missing[name] -= 1
        done, began = not self.missing[name], time.monotonic()
        if name in self.found and (done or (self.to.output and x is not None and began >= self.next.get(name, 0))):
            self.write(name)
            self.next[name] = time.monotonic() + SHARE * (time.monotonic() - began)
        if done:
            self.found.pop(name, None)
            self.next.pop(name, None)

    def write(self, name):
        with as_user_error(f"--format {self.to.format}", ValueError):
            text = self.text(sorted(self.found[name], key=lambda x: x[0]))
        if not self.to.output:
            outputs.Screen().write(text)
            return
        path = self.to.output if self.to.alone else self.to.output / f"{name}{SUFFIXES[self.to.format]}"
        with outputs.writing(path):
            path.parent.mkdir(exist_ok=True)
        with outputs.whole(path) as part:
            part.write_text(text, "utf-8")

    def text(self, parts):
        end, named = max(SHORTEST, *(start + x.duration for start, x in parts)), tiers(parts)
        if self.to.format == "textgrid":
            return timed.textgrid(named, end)
        if len(named) > 1 or any(x.speaker for _, x in parts):
            return spoken_captions(self.to.format, parts, end)
        ((spoken,), space) = named.values(), parts[0][1].space
        texts = space.join(x.text for _, x in parts if x.words)
        return captioned(self.to.format, captions(spoken, end, space, texts))

    def close(self):
        for name in [*self.found]:
            self.write(name)
            del self.found[name]
