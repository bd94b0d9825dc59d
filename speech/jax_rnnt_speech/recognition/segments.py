"""Segments of recordings, such as the turns of speakers, from other programs: RTTM, CTM, and JSON of pyannote.

Each becomes an Entry of its own, overlaps too, so that the encoder sees nothing but the segment.
"""

import collections
import itertools
import json
import math
import sys
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from jax_rnnt_speech.data import audio, lists, rows
from jax_rnnt_speech.data.names import Names, composed
from jax_rnnt_speech.data.rows import LineError
from jax_rnnt_speech.data.utterances import column, shown
from jax_rnnt_speech.recognition import recognise
from jax_rnnt_speech.system import UserError, as_user_error, refuse_if

GAP = 0.5  # seconds between words of a speaker in CTM that do not end a turn
HELD = 60  # longest segment in seconds that is decoded with its neighbours; a longer one is decoded by itself
MISSING = "", "<NA>", "NA", "-"


class Segment(NamedTuple):
    recording: str  # "" for the only one
    channel: str  # as the file says it
    start: float
    end: float
    speaker: str = ""


def times(start, end=None, duration=None):
    """Returns (start, end) of a segment; with a duration, their sum to a microsecond."""
    try:
        start = float(start)
        end = float(end) if duration is None else round(start + float(duration), 6)
    except (TypeError, ValueError, OverflowError):
        raise LineError("its times are no numbers") from None
    rows.leave_out_if(not 0 <= start < end < math.inf, f"it must end after it begins, got {start:g} to {end:g} s")
    return start, end


def segment_of_rttm(line):
    """Returns the Segment of a line, or None for a line of another type than SPEAKER."""
    fields = line.split()
    if fields[0] != "SPEAKER":
        return None
    rows.leave_out_if(len(fields) < 8, f"SPEAKER has 9 or 10 columns, got {len(fields)}")
    # Tools write names with spaces: a recording's before these two columns, a speaker's behind them.
    place = next((i for i in range(5, len(fields) - 2) if fields[i : i + 2] == ["<NA>", "<NA>"]), 5)
    channel, start, duration, _, _, *last = fields[place - 3 :]
    for _ in range(2):  # two columns may follow the speaker
        last = last[:-1] if len(last) > 1 and (last[-1] == "<NA>" or is_number(last[-1])) else last
    name, speaker = (" ".join(x) for x in (fields[1 : place - 3], last))
    return Segment(name, channel, *times(start, duration=duration), known(speaker))


def is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def segment_of_ctm(line):
    """Reads a Segment: the last of eight columns is a word's speaker; with fewer, the token is that of a segment."""
    fields = line.split()
    rows.leave_out_if(len(fields) < 5, f"CTM has 5 to 8 columns, got {len(fields)}")
    speaker = known(fields[7] if len(fields) > 7 else fields[4])
    return Segment(fields[0], fields[1], *times(fields[2], duration=fields[3]), speaker)


def known(speaker):
    return "" if speaker in MISSING else speaker


def segment_of_json(segment):
    """Returns a Segment from an object of pyannote."""
    rows.leave_out_if(not isinstance(segment, dict), "it is no object")
    place = segment["segment"] if isinstance(segment.get("segment"), dict) else segment
    speaker = next((str(segment[key]) for key in ("speaker", "label") if segment.get(key) is not None), "")
    return Segment(str(segment["uri"] or ""), "1", *times(place.get("start"), place.get("end")), speaker)


def lines_of(path):
    """Returns (place, line) of the lines that are no comments."""
    return ((f"line {i}", x) for i, x in lists.lines_of(path) if not x.lstrip().startswith(";;"))


def objects_of(path):
    """Yields (place, object) of pyannote's annotation (`for_json`), result (`serialize`) or API's answer, or a list."""
    with as_user_error(f"--segments {path} is no JSON", ValueError, RecursionError):
        x = json.loads(lists.text_of(path))
    x = x.get("output", x) if isinstance(x, dict) else x
    name = x.get("uri") if isinstance(x, dict) else None
    if isinstance(x, dict):
        x = next((x[key] for key in ("diarization", "content", "segments") if isinstance(x.get(key), list)), None)
    if not isinstance(x, list):
        expected = "a list of segments, or an object with one under diarization, content or segments"
        raise UserError(f"--segments {path}: expected {expected}")
    return ((f"segment {i}", {"uri": name} | y if isinstance(y, dict) else y) for i, y in enumerate(x, 1))


FORMATS = {
    ".rttm": (lines_of, segment_of_rttm),
    ".ctm": (lines_of, segment_of_ctm),
    ".json": (objects_of, segment_of_json),
}


def read(path):
    """Returns (the segments of a file, a Fault for each line that is no segment)."""
    refuse_if(path.suffix.lower() not in FORMATS, f"--segments {path} must end in {', '.join(FORMATS)}")
    read, form = FORMATS[path.suffix.lower()]
    segments, faults, others = [], [], collections.Counter()
    with as_user_error(f"--segments {path} is not readable", OSError):
        for place, row in read(path):
            try:
                x = form(row)
            except LineError as error:
                faults.append(rows.Fault(str(error), f"--segments {path}, {place}"))
                continue
            if x is None:
                others[row.split()[0]] += 1
            else:
                segments.append(x._replace(speaker=composed(shown(" ".join(x.speaker.split())))))
    for name, count in others.items():
        print(f"--segments {path}: lines of type {shown(name)} are not used: {count}", file=sys.stderr)
    return joined(segments, GAP if form is segment_of_ctm else 0), faults


def joined(segments, gap):
    """Returns the segments in order of time. A speaker's that overlap, or are at most `gap` apart, become one."""
    turns = []
    for _, group in itertools.groupby(sorted(segments, key=key), key):
        last = None
        for x in sorted(group, key=lambda x: x.start):
            if last and (x.start < last.end or (gap and x.start - last.end <= gap)):
                last = turns[-1] = last._replace(end=max(last.end, x.end))
            else:
                turns.append(last := x)
    return sorted(turns, key=lambda x: (x.recording, x.start, x.end, x.speaker))


def key(x):
    return x.recording, x.channel, x.speaker


def entries(path, recordings):
    """Returns Entries of the segments of recordings, and Faults of those that have no place.

    The recordings are Entries of whole files; a Fault among them stays one.
    """
    segments, faults = read(path)
    bad = [f"; {x.name.rpartition(', ')[2]}: {x.reason}" for x in faults]
    by_name = collections.defaultdict(list)
    for x in segments:
        by_name[composed(x.recording)].append(x)
    whole = [x for x in recordings if isinstance(x, rows.Entry)]
    results = [x for x in recordings if not isinstance(x, rows.Entry)]
    meant = recordings_of(by_name, whole, path)
    used = {name for names in meant.values() for name in names}
    for x in whole:
        refuse_if((x.start, x.end) != (0.0, None), f"--segments needs whole recordings, got {x.name}")
        some = [y for name in meant[x.audio] for y in by_name[name]]
        if not some:
            faults.append(rows.Fault(f"{path} has no segment of it", x.name))
        channels = {y.channel for y in some}
        for y in some:
            # Tools write 1 for recordings of any number of channels.
            chosen = x.channel if channels == {"1"} else number_of(y.channel)
            about = f" from {y.start:g} s to {y.end:g} s" + (f", {y.speaker}" if y.speaker else "")
            results.append(x._replace(name=x.name + about, start=y.start, end=y.end, speaker=y.speaker, channel=chosen))
    lost = f"no recording has this name, as {path} has it", f"{path} has segments without the name of a recording"
    faults += [rows.Fault(lost[not x], shown(x)) for x in sorted(by_name.keys() - used)]
    if whole and not used:
        raise UserError(f"--segments {path} has no segment of {shown(whole[0].audio)}; it names "
                        f"{', '.join(sorted(map(shown, by_name))) or 'no recording'}{''.join(bad[:1])}")  # fmt: skip
    return results + faults


def recordings_of(by_name, whole, path):
    """Returns {audio: its names in the file of segments}; a name that may mean two recordings is an error."""
    names, meant = Names(), collections.defaultdict(list)
    for x in whole:
        for name in {str(x.audio), x.name}:
            for form in {name, column(name)}:  # the form in CTM
                names.add(form, x.audio)
    audios = dict.fromkeys(x.audio for x in whole)
    for name in by_name:
        named = names.find(name) if name else [*audios] * (len(audios) == 1)  # without a name, it is the only one
        if len(named) > 1:
            raise UserError(f"--segments {path}: {shown(name)} may be {shown(named[0])} or {shown(named[1])}: "
                            "name their folders, too, or transcribe them one by one")  # fmt: skip
        for path_of_it in named:
            meant[path_of_it].append(name)
    return meant


def number_of(channel):
    """Returns a channel's number, from 0 on; None if it is none. RTTM and CTM count from 1, or have letters from A."""
    if channel.isdecimal() and int(channel) > 0:
        return int(channel) - 1
    letters = len(channel) == 1 and channel.upper().isascii() and channel.isalpha()
    return ord(channel.upper()) - ord("A") if letters else None


def loaded(entries, rate):
    """Yields (name, samples, their pieces, or the UserError that there are none) of each Entry.

    Segments of a recording that follow each other in time are cut out of it as it is decoded, once.
    """
    for _, group in itertools.groupby(entries, lambda x: isinstance(x, rows.Entry) and x.audio):
        neighbours, sources = list(group), {}  # sources by the channels of a recording
        for x in neighbours:
            if isinstance(x, rows.Fault):
                yield from recognise.loaded([x], rate)
            elif x.end - x.start > HELD:
                yield x.name, cut_at_the_end(x, rate)
            else:
                if x.channel not in sources:
                    short = [y for y in neighbours if y.channel == x.channel and y.end - y.start <= HELD]
                    sources[x.channel] = cuts(short, rate)
                yield x.name, next(sources[x.channel])


def cut_at_the_end(x, rate):
    """Yields pieces of the samples of a segment, which may end behind its recording."""
    heard = False
    try:
        for piece in audio.pieces(x.audio, rate, x.start, x.end, x.channel):
            heard = True
            yield piece
    except audio.Beyond:
        if not heard:
            raise
        say_overrun(x)


def say_overrun(x):
    tqdm.write(f"{shown(x.name)}: {audio.OVERRUN}", file=sys.stderr)


def cuts(entries, rate):
    """Yields samples of each segment, or a UserError: cut out of a recording as it is decoded, in order of starts.

    A segment that ends behind its recording, as diarizers write them, is cut there, and a line says so. Samples are
    held from the start of the last segment on.
    """
    pieces, error = audio.pieces(entries[0].audio, rate, 0.0, None, entries[0].channel) if entries else None, None
    held, begin = np.zeros(0, np.float32), 0
    for x in entries:
        first, last = (round(y * rate) for y in (x.start, x.end))
        parts, end = [held], begin + len(held)
        while end < last and pieces:
            try:
                parts.append(next(pieces))
            except (StopIteration, UserError) as stopped:
                pieces, error = None, stopped if isinstance(stopped, UserError) else None
                break
            end += len(parts[-1])
            if end <= first:  # all of it is before the segment
                parts, begin = [], end
        held = np.concatenate([np.zeros(0, np.float32), *parts])
        dropped = min(max(0, first - begin), len(held))
        held, begin = held[dropped:], begin + dropped
        samples, missing = held[: max(0, last - begin)], last - begin - len(held)
        lacks = not pieces and missing > audio.SLACK * rate
        if not pieces and (not len(samples) or (lacks and error)):
            yield error or audio.AudioError(x.name, audio.BEYOND)
            continue
        if lacks:
            say_overrun(x)
        yield samples
