"""Rows of lists of recordings, in the dialects of the field: the text of each part of each file.

A row gives an `Entry` for each of its utterances, or a `Fault` where it has none. A key that says which part of a file
a text belongs to is honoured, or the row is a Fault.
"""

import json
import math
import os
import re
import urllib.request
from pathlib import Path
from typing import NamedTuple

from jax_rnnt_speech.data.names import actual, composed

AUDIO_KEYS = ("audio", "audio_filepath", "path", "file_name", "filename", "file", "audio_path", "audio_file", "wav",
              "wav_filename")  # fmt: skip
TEXT_KEYS = "text", "sentence", "transcript", "transcription"
START_KEYS, END_KEYS = ("offset", "start", "start_time", "begin_time", "begin"), ("end", "end_time", "stop")
CHANNEL_KEYS = "channel", "channel_selector", "channels"  # a number under the last one counts them
SPEAKER_KEYS = "speaker", "speaker_id", "client_id", "spk_id"
SPLIT_KEYS = "split", "subset", "partition"  # keys for the split of its data set to which a row belongs
PLAIN = ("audio",), ("text",), SPEAKER_KEYS  # keys of a row that another dialect becomes
UNREAD = "frame_offset", "start_frame", "end_frame", "start_sample", "end_sample", "start_ms", "end_ms", "offset_ms"
TOUCH = 0.0005  # seconds by which times that are equal may differ, as sums of rounded ones do
NEAR = 0.1, 0.05  # seconds, and share of a file, by which its length may differ from what is stated
ARRAY = "an array in place of audio: name a file"


class Entry(NamedTuple):
    """An utterance: a text, and the seconds and channel of a file that it belongs to."""

    name: str
    audio: Path
    text: str
    start: float = 0.0
    end: float | None = None  # None: the end of the file
    channel: int | tuple | None = None  # None: the mean of all
    whole: float | None = None  # seconds that the file is said to last
    speaker: str = ""  # "": unknown
    notes: tuple = ()  # parts of its line that are not read, and do no harm
    columns: bool = False  # whether they have names, which an option may choose
    listed: str = ""  # the file or folder that lists it
    split: str = ""  # the split that its row names


class Fault(NamedTuple):
    reason: str
    name: str


class LineError(ValueError):
    """The reason why a line is left out."""


def leave_out_if(wrong, reason):
    """Raises the LineError of a line that is left out if something is wrong."""
    if wrong:
        raise LineError(reason)


def keys_of(audio_column="", text_column="", speaker_column="", texts=True):
    """Returns keys of a row's audio, text and speaker: a column, or the usual ones, perhaps behind others."""
    columns = (audio_column, AUDIO_KEYS), (text_column if texts else "", TEXT_KEYS if texts else ())
    columns = *columns, (speaker_column, SPEAKER_KEYS)
    return [(x,) if x and isinstance(x, str) else (*x, *usual) for x, usual in columns]


def entries_of_row(row, path, name, keys):
    """Yields Entries and Faults of a row; `path` as for `entry`."""
    try:
        yield from (cuts if is_cut(object_of(row)) else utterances)(row, path, name, keys)
    except LineError as error:
        yield Fault(str(error), name)


def object_of(row):
    """Returns the row, which must be an object; raises the LineError that it may be."""
    row = plainly(row)
    leave_out_if(not isinstance(row, dict), "not an object with keys")
    return row


def parsed(text):
    """Returns the value of some JSON, or a LineError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return LineError("not JSON")


SKIP = "_skipme"  # NeMo's key: its value is a reason, unless it is nothing or false
APART = {*UNREAD, *END_KEYS, "segments", "supervisions", "recording", "tracks", SKIP}


def plain(line, keys, name=None):
    """Returns (name of the audio, seconds or None) for a line that is one utterance, the usual case; else None.

    `name` is that of the audio, if it is not in the line.
    """
    row = parsed(line)
    if not isinstance(row, dict) or not APART.isdisjoint(row):
        return None
    name, seconds = name or row.get(keys[0][0]) or first_of(row, keys[0]), row.get("duration")
    if type(name) is not str or not any(x in row for x in keys[1]):
        return None
    if type(seconds) in (int, float) and 0 < seconds < math.inf:
        return name, seconds
    return (name, None) if seconds is None and first_of(row, START_KEYS) is None else None


def later(a, b):
    """Returns True if a time comes after another, and not just by a sum that was rounded."""
    return a > b + TOUCH


def differs(stated, seconds):
    """Returns True if a file's length is not as stated. A whole number of seconds may have been rounded."""
    return abs(stated - seconds) > NEAR[0] + NEAR[1] * seconds + (stated == round(stated))


def missing(x):
    """Returns True for what tools write where there is nothing. NaN is no number in JSON, but pandas writes it."""
    return x is None or x == "" or (isinstance(x, float) and math.isnan(x))


def first_of(row, keys):
    return next((row[x] for x in keys if not missing(row.get(x))), None)


def leave_out_if_marked(*rows):
    """Raises the LineError of a line that NeMo skips. Some rows may be no objects."""
    marks = [str(x[SKIP]).strip().lower() for x in rows if isinstance(x, dict) and not missing(x.get(SKIP))]
    leave_out_if({*marks} - {"", "0", "0.0", "false", "no", "none", "null", "nan"}, f"marked to be skipped ({SKIP})")


def number(row, keys):
    """Returns the seconds under one of the keys, or None."""
    values = {x: row[x] for x in keys if not missing(row.get(x))}
    if not values:
        return None
    key = next(iter(values))
    try:
        numbers = [math.nan if isinstance(x, bool) else float(x) for x in values.values()]
    except (ValueError, TypeError, OverflowError):
        numbers = [math.nan]
    leave_out_if(not 0 <= numbers[0] < math.inf, f"{key} is no number of seconds")
    if any(later(x, numbers[0]) or later(numbers[0], x) for x in numbers):
        raise LineError(f"{' and '.join(values)} contradict each other")
    return numbers[0]


def span(row, notes):
    """Returns (start, end, whole): the seconds of a segment, and those of the file where the row has no segment."""
    for key in UNREAD:
        if not missing(row.get(key)):
            raise LineError(f"the key {key} is not in seconds: give start and end")
    start, end = number(row, START_KEYS), number(row, END_KEYS)
    if start is None and end is None:
        return 0.0, None, length(row, notes)
    start, duration = start or 0.0, number(row, ("duration",))
    leave_out_if(duration == 0, "duration is no number of seconds above 0")
    if end is not None and duration is not None and abs(start + duration - end) > 0.1:
        raise LineError("end and duration contradict each other")
    end = end if end is not None or duration is None else start + duration
    leave_out_if(end is not None and not later(end, start), "the end is not after the start")
    return start, end, None


def length(row, notes):
    """Returns the stated seconds of a file, or None: only a check needs them."""
    try:
        seconds = number(row, ("duration",))
    except LineError as error:
        notes.append(str(error))
        return None
    if seconds == 0:
        notes.append("duration is no number of seconds above 0")
    return seconds or None


def channel(row, keys=CHANNEL_KEYS):
    """Returns None, the number of a channel from 0 on, or several."""
    x = first_of({key: x for key, x in row.items() if key != "channels" or isinstance(x, list)}, keys)
    if x in (None, "average"):
        return None
    some = [as_integer(y) for y in (x if isinstance(x, list) else [x])]
    leave_out_if(not some or None in some, "channel is no number from 0 on")
    return tuple(some) if isinstance(x, list) else some[0]


def as_integer(x):
    """Returns 1, 1.0, "1" or "1.0", as in columns with gaps, as a number from 0 on; None if it is none."""
    if isinstance(x, (int, float, str)) and not isinstance(x, bool):
        whole = re.fullmatch(r"(\d{1,9})(?:\.0+)?", str(x))
        return int(whole[1]) if whole else None
    return None


def speaker(row, notes, keys=SPEAKER_KEYS):
    """Returns the name or number of the speaker, or "": only statistics need it."""
    if len(keys) == 1 and keys[0] not in row:
        notes.append(f"no {keys[0]}, which is to name the speaker")
    x = first_of(row, keys)
    try:
        if isinstance(x, (int, float)) or (isinstance(x, str) and re.fullmatch(r"\d+\.0+", x)):
            return str(x if as_integer(x) is None else as_integer(x))
        return "" if x is None else composed(encodable(x, "the speaker"))
    except LineError as error:
        notes.append(str(error).replace("no string of characters", "no name"))
        return ""


def encodable(text, what):
    """Returns the text; raises a LineError for none, for bytes that are not UTF-8, or for half of a surrogate pair."""
    try:
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeEncodeError:
        if re.search("[\udc80-\udcff]", text):
            raise LineError(f"{what} is not UTF-8") from None
    raise LineError(f"{what} is no string of characters")


def located(name, manifest):
    """Returns the file of a name: next to the manifest, in `clips` there (Common Voice), or from the current folder.

    A Mac may have written accents of the name by themselves, on its disk or in the list, and Windows backslashes.
    """
    if os.path.isfile(usual := os.path.join(manifest.parent, name)):
        return Path(usual)
    places = manifest.parent, manifest.parent / "clips", Path()
    here = next((file for x in places if is_file(file := actual(x / name))), None)
    other = name.replace("\\", os.sep) if here or not re.match("~|[A-Za-z][A-Za-z0-9+.-]+:/", name) else local(name)
    return here or next((file for x in places if is_file(file := actual(x / other))), manifest.parent / other)


def local(name):
    """Returns the path that a shell or a browser makes of ~/a.wav or file:///a%20b.wav."""
    if name.startswith("~"):
        return os.path.expanduser(name)
    scheme, _, rest = name.partition(":")
    host, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest)
    leave_out_if(scheme.lower() != "file", f"an address of {scheme}: only files of this computer are read")
    leave_out_if(host.lower() not in ("", "localhost"), "an address of a file on another computer")
    return urllib.request.url2pathname(slash + path)


def is_file(path):
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def entry(row, path, keys, name=""):
    """Returns the Entry of a row with the text of a part of a file; by default, its audio gives the name.

    `path` is the manifest, or a function that finds the audio by its name.
    """
    audio, notes = first_of(row, keys[0]), []
    if isinstance(audio, dict):  # as Hugging Face writes it
        leave_out_if(not audio.get("path") and not missing(audio.get("array")), ARRAY)
        audio = audio.get("path")
    leave_out_if(isinstance(audio, list), ARRAY)
    leave_out_if(not audio, "no name of an audio file")
    audio = encodable(audio, "the name of the audio")
    file = path(audio) if callable(path) else located(audio, path)
    (start, end, whole), text = span(row, notes), first_of(row, keys[1])
    leave_out_if(keys[1] and not any(x in row for x in keys[1]), "no text")
    text = "" if text is None else encodable(text, "the text")
    if (start, end) != (0.0, None):
        audio += f" from {start:g} s" + (f" to {end:g} s" if end is not None else "")
    where, spoken_by = (start, end, channel(row), whole), speaker(row, notes, keys[2])
    complete = Entry(name or audio, file, text, *where, spoken_by, tuple(notes), keys is not PLAIN)
    return complete._replace(split=str(first_of(row, SPLIT_KEYS) or ""))


def utterances(row, path, line, keys):
    """Yields Entries of one row: one, or one for each of its segments."""
    parts = row.get("segments")
    leave_out_if_marked(row)
    if missing(parts):
        yield entry(row, path, keys)
        return
    if not isinstance(parts, list) or not parts or not all(isinstance(x, dict) for x in parts):
        raise LineError("segments are no list of objects")
    leave_out_if(first_of(row, START_KEYS + END_KEYS) is not None, "segments of a segment are not read")
    common = {x: row[x] for x in (*keys[0], *CHANNEL_KEYS, *keys[2], *SPLIT_KEYS) if x in row}
    for i, part in enumerate(parts, 1):
        try:
            leave_out_if_marked(part)
            leave_out_if(span(part, [])[:2] == (0.0, None), "a segment without start and end")
            segment, notes = entry(common | part, path, keys), []
            yield segment._replace(whole=length(row, notes), notes=(*segment.notes, *notes))
        except LineError as error:
            yield Fault(str(error), f"{line} segment {i}")


def is_cut(row):
    """Returns True if the row is one of Lhotse's cuts."""
    return bool({"supervisions", "recording", "tracks"} & row.keys())


def cuts(row, path, line, _):
    """Yields Entries of one of Lhotse's cuts: one for each of its supervisions."""
    recording, supervisions = row.get("recording"), row.get("supervisions")
    leave_out_if_marked(row, row.get("custom"))
    leave_out_if("tracks" in row, "a mixed cut of Lhotse is not read")
    if not isinstance(recording, dict) or not isinstance(recording.get("sources"), list):
        raise LineError("a cut of Lhotse without a recording")
    if not isinstance(supervisions, list) or not supervisions or not all(isinstance(x, dict) for x in supervisions):
        raise LineError("a cut of Lhotse without supervisions")
    leave_out_if(recording.get("transforms"), "a recording of Lhotse with transforms is not read")
    first, duration = number(row, ("start",)) or 0.0, number(row, ("duration",))
    for i, x in enumerate(supervisions, 1):
        try:
            leave_out_if_marked(x, x.get("custom"))
            named = first_of(x, ("id",)), first_of(row, ("id",)), f"{line} supervision {i}"
            name = next(str(y) for y in named if isinstance(y, (int, str)))
            yield supervision(x, encodable(name, "the id of a supervision"), row, recording, path, first, duration)
        except LineError as error:
            yield Fault(str(error), f"{line} ({row.get('id')})"[:200])


def supervision(x, name, row, recording, path, first, whole):
    """Returns the Entry of a supervision, whose times count from the start of its cut."""
    offset, duration = first_of(x, ("start",)) or 0.0, number(x, ("duration",))
    if isinstance(offset, bool) or not isinstance(offset, (int, float)) or not math.isfinite(offset):
        raise LineError("start is no number of seconds")
    leave_out_if(not duration, "a supervision of Lhotse without duration")
    if later(-0.1, offset) or (whole is not None and later(offset + duration, whole + 0.1)):
        raise LineError("a supervision of Lhotse that goes beyond its cut")
    start = max(0.0, first + offset)
    chosen = channel(row if missing(x.get("channel")) else x, ("channel",))
    sources = [y for y in recording["sources"] if isinstance(y, dict) and y.get("type") == "file"]
    if len(sources) < len(recording["sources"]) or not sources:
        raise LineError("a source of Lhotse that is no file is not read")
    leave_out_if(chosen is None and len(sources) > 1, "a recording of Lhotse in several files, without a channel")
    wanted = {chosen} if isinstance(chosen, int) else set(chosen or ())
    for source in sources:
        channels = source.get("channels") or [0]
        if isinstance(channels, list) and wanted <= {y for y in channels if type(y) is int}:
            places = [channels.index(y) for y in sorted(wanted)]
            places = places[0] if len(places) == 1 else places or None
            said = {key: x[key] for key in ("text", *SPEAKER_KEYS) if key in x}
            where = {"audio": source.get("source"), "start": start, "end": first + offset + duration}
            part, notes = entry({"text": "", "channel": places} | said | where, path, PLAIN, name), []
            return part._replace(whole=length(recording, notes), notes=(*part.notes, *notes))
    raise LineError("no source of Lhotse has the channel")


def plainly(x):
    """Returns its argument, but raises a LineError."""
    if isinstance(x, LineError):
        raise x
    return x
