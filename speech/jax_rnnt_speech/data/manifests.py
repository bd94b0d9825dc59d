"""Lists of recordings with their texts, in the dialects of the field: what a manifest or folder says, nothing decoded.

`read` yields an Entry for each utterance, or a Fault where a line is none. A key that says which part of a file a text
belongs to is honoured, or the line is a Fault.
"""

import csv
import gzip
import itertools
import json
import math
import os
import re
import urllib.request
import zlib
from pathlib import Path
from typing import NamedTuple

from jax_rnnt_speech.data import twins
from jax_rnnt_speech.data.names import SUFFIXES, actual, composed, is_hidden
from jax_rnnt_speech.system import UserError, reason

AUDIO_KEYS = ("audio", "audio_filepath", "path", "file_name", "filename", "file", "audio_path", "audio_file", "wav",
              "wav_filename")  # fmt: skip
TEXT_KEYS = "text", "sentence", "transcript", "transcription"
START_KEYS, END_KEYS = ("offset", "start", "start_time", "begin_time", "begin"), ("end", "end_time", "stop")
CHANNEL_KEYS = "channel", "channel_selector", "channels"  # a number under the last one counts them
SPEAKER_KEYS = "speaker", "speaker_id", "client_id", "spk_id"
SPLIT_KEYS = "split", "subset", "partition"  # under which a row says to which split of its data set it belongs
PLAIN = ("audio",), ("text",), SPEAKER_KEYS  # keys of a row that another dialect becomes
# Keys of other tools that choose a part of a file, in units that are not seconds.
UNREAD = "frame_offset", "start_frame", "end_frame", "start_sample", "end_sample", "start_ms", "end_ms", "offset_ms"
# What tables have for a number that is missing; as a text, it is a word.
NOTHING = dict.fromkeys((*START_KEYS, *END_KEYS, "duration", *CHANNEL_KEYS, *UNREAD), ("nan", "none", "null", "<na>"))
COLUMNS = "--audio-column", "--text-column", "--speaker-column"
TOUCH = 0.0005  # seconds by which times that are equal may differ, as sums of rounded ones do
NEAR = 0.1, 0.05  # seconds, and share of a file, by which its length may differ from what is stated
ARRAY = "an array in place of audio: name a file"
SAVED = ("which datasets.save_to_disk writes as Arrow, and which is not read: write Parquet, by "
         "datasets.load_from_disk(FOLDER)[SPLIT].to_parquet(FILE)")  # fmt: skip
KALDI = "wav.scp", "segments", "text"


class Entry(NamedTuple):
    """An utterance: a text, and the seconds and channel of a file that it belongs to."""

    name: str
    audio: Path
    text: str
    start: float = 0.0
    end: float | None = None  # None: that of the file
    channel: int | tuple | None = None  # None: the mean of all
    whole: float | None = None  # seconds that the file is said to last
    speaker: str = ""  # "": unknown
    notes: tuple = ()  # what of its line is not read, and does no harm
    columns: bool = False  # whether they have names, which an option may choose
    listed: str = ""  # the file or folder that lists it
    split: str = ""  # what its row says


class Fault(NamedTuple):
    reason: str
    name: str


class LineError(ValueError):
    """Why a line is left out."""


def leave_out_if(wrong, reason):
    """Raises the LineError of a line that is left out where something is wrong."""
    if wrong:
        raise LineError(reason)


class ListError(UserError):
    """A manifest or folder that lists nothing. `reason` says why, behind its name."""

    def __init__(self, path, reason):
        super().__init__(f"{path} {reason}")
        self.reason = reason


def suffix_of(path):
    """The suffix of a name in lower case, without .gz."""
    return (Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix).lower()


def is_list(path):
    """Whether `read` takes it for a list of recordings, and not for one."""
    from jax_rnnt_speech.data import archives

    known = actual(path).is_dir() or path.name in KALDI or suffix_of(path) in LISTS
    return known or archives.is_archive(path) or archives.is_pattern(path)


def keys_of(audio_column="", text_column="", speaker_column="", texts=True):
    """Keys of a row's audio, text and speaker: a column, or the usual ones, perhaps behind others."""
    columns = (audio_column, AUDIO_KEYS), (text_column if texts else "", TEXT_KEYS if texts else ())
    columns = *columns, (speaker_column, SPEAKER_KEYS)
    return [(x,) if x and isinstance(x, str) else (*x, *usual) for x, usual in columns]


def read(path, audio_column="", text_column="", speaker_column="", texts=True, alone=True, shards=None):
    """Entries and Faults of a manifest or folder. Without `texts`, it needs none, and none is read.

    `shards`: those of an archive that are to be read, by default all.

    A column must be there; one of a list may be missing, and then the usual ones count. A form that has no columns is
    an error if it is `alone`; beside others, for which the column may be meant, its entries have a note.
    """
    from jax_rnnt_speech.data import archives  # which reads lines of manifests

    path, several = actual(Path(path)), archives.is_pattern(path)
    if several:
        for x, shards in archives.sources(path):
            yield from read(x, audio_column, text_column, speaker_column, texts, alone, shards)
        return
    keys = keys_of(audio_column, text_column, speaker_column, texts)
    try:
        if not path.exists():
            raise ListError(path, "does not exist")
        of_kaldi = path.name in KALDI and not path.is_dir()
        rows = kaldi(path.parent, texts) if of_kaldi else (folder if path.is_dir() else manifest)(path, keys)
        shards = archives.of_archive(path) if shards is None else shards
        if shards is not None:
            rows = (x if isinstance(x, Fault) else x[1] for shard in shards for x in shard.read(keys))
        named = [option for option, x in zip(COLUMNS, keys) if len(x) == 1]
        for x in itertools.chain([next(rows, Fault("nothing is listed", path.name))], rows):
            if named and isinstance(x, Entry) and not x.columns:
                if alone:
                    raise ListError(path, f"has no columns or keys that one could name: leave out {named[0]}")
                x = x._replace(notes=(*x.notes, f"{named[0]} names no column of theirs"))
            yield x._replace(listed=str(path)) if isinstance(x, Entry) else x
    except (OSError, EOFError, zlib.error) as error:
        inside = getattr(error, "filename", None)
        place = f"{Path(inside).name}: " if inside and Path(inside) != path else ""
        raise ListError(path, f"is not readable: {place}{reason(error)}") from None


def read_all(paths, *columns, lenient=True, texts=True, alone=None):
    """Entries and Faults of several. `lenient`: one that cannot be read is a Fault."""
    for path in paths:
        try:
            yield from read(path, *columns, texts=texts, alone=len(paths) == 1 if alone is None else alone)
        except ListError as error:
            if not lenient:
                raise
            yield Fault(error.reason, str(path))


def text_of(path):
    """The text of a file, with a newline alone at the ends of lines. Bytes that are no UTF-8 are for `encodable`."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # as spreadsheets write "Unicode text"
        try:
            data = data.decode("utf-16").encode()
        except UnicodeError:
            raise ListError(path, "is UTF-16 with damaged characters") from None
    return data.decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")


def lines_of(path):
    """(number, line) of a text's lines that are not empty. Other characters that Unicode counts as ends are none."""
    for i, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            yield i, line


def sentences(path):
    """An Entry without audio, or a Fault, for each line of a text."""
    try:
        for i, line in lines_of(path):
            name = f"{path.name} line {i}"
            try:
                yield Entry(name, path, encodable(line, "the text"))
            except LineError as error:
                yield Fault(str(error), name)
    except OSError as error:
        raise ListError(path, f"is not readable: {reason(error)}") from None


def manifest(path, keys):
    rows = LISTS.get(suffix_of(path))
    if path.suffix == ".arrow" or path.name == "dataset_dict.json":
        raise ListError(path, f"is a part of a folder {SAVED}")
    if rows is None:
        raise ListError(path, f"is neither a folder nor a manifest ({MANIFESTS})")
    for name, row in rows(path, keys):
        yield from of_row(row, path, name, keys)


def of_row(row, path, name, keys):
    """Entries and Faults of a row; `path`: -> `entry`."""
    try:
        yield from (cuts if is_cut(object_of(row)) else utterances)(row, path, name, keys)
    except LineError as error:
        yield Fault(str(error), name)


def object_of(row):
    """The row, which must be an object; raises the LineError that it may be."""
    row = plainly(row)
    leave_out_if(not isinstance(row, dict), "not an object with keys")
    return row


def parsed(text):
    """What JSON says, or a LineError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return LineError("not JSON")


def objects(path, keys):
    """(name, object or LineError) of JSON lines, or of an array."""
    text = text_of(path)
    whole = parsed(text)
    if isinstance(whole, list):
        yield from ((f"{path.name} item {i}", x) for i, x in enumerate(whole, 1))
    elif isinstance(whole, dict):
        yield f"{path.name} line 1", whole
    else:
        for i, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{path.name} line {i}", parsed(line)


def table(path, keys):
    """(name, row as a dictionary or LineError) of a table whose first line names the columns."""
    text = text_of(path)
    first = text.split("\n", 1)[0]
    tabs = suffix_of(path) == ".tsv" or first.count("\t") > max(first.count(x) for x in ",;")
    delimiter = "\t" if tabs else max(",;", key=first.count)
    rows = records(text.split("\n"), delimiter)
    _, names = next(rows, (1, []))
    for option, choices in zip(COLUMNS, keys):
        optional = option == "--speaker-column" and len(choices) > 1
        if choices and not optional and not set(choices) & set(names):
            known = "the column " + choices[0] if len(choices) == 1 else "one of the columns " + ", ".join(choices)
            raise ListError(path, f"must have {known} in its first line ({option} names another), got {names}"[:1000])
    used = [x for x in names if x]
    if len(set(used)) < len(used):
        raise ListError(path, f"must name each column once, got {names}"[:1000])
    for i, row in rows:
        other = LineError("another number of columns than in the first line")
        fields = {key: x if x.lower() not in NOTHING.get(key, ()) else "" for key, x in zip(names, row)}
        yield f"{path.name} line {i}", fields if len(row) == len(names) else other


def records(lines, delimiter):
    """(number of its line, fields) of each record that is not empty, with quotes as Python's csv reads them.

    A quote that csv cannot pair, or that would join lines which are rows already, is a character.
    """
    place, width = 0, None
    while place < len(lines):
        used, row = 1, lines[place].split(delimiter)
        try:
            reader = csv.reader((lines[i] + "\n" for i in range(place, len(lines))), delimiter=delimiter, strict=True)
            quoted = next(reader)
            spanned = lines[place : place + reader.line_num]
            rows = len(spanned) > 1 and all(len(x.split(delimiter)) == width for x in spanned)
            if len(spanned) == 1 or (len(quoted) == width and not rows):
                used, row = reader.line_num, quoted
        except (csv.Error, StopIteration):
            pass
        if any(x.strip() for x in row):
            width = width or len(row)
            yield place + 1, row
        place += used


# Who makes rows of a file: (name, a dictionary or LineError) of each. Rows that another dialect becomes have keys of
# `PLAIN`, START_KEYS, END_KEYS and CHANNEL_KEYS.
LISTS = {".jsonl": objects, ".ndjson": objects, ".json": objects, ".tsv": table, ".csv": table}
MANIFESTS = f"{', '.join([*LISTS][:-1])} or {[*LISTS][-1]}, also with .gz"


# Keys of a line that is not one utterance, is not measured in seconds, or may be one to skip.
SKIP = "_skipme"  # NeMo's: whatever is under it is a reason, unless it is nothing or false
APART = {*UNREAD, *END_KEYS, "segments", "supervisions", "recording", "tracks", SKIP}


def plain(line, keys, name=None):
    """(name of the audio, seconds or None) of a line that is one utterance, the usual one; else None.

    `name`: that of the audio, if it is not in the line.
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
    """Whether a time comes after another, and not just by a sum that was rounded."""
    return a > b + TOUCH


def differs(stated, found):
    """Whether a file lasts other than its manifest states. A whole number of seconds may have been rounded."""
    return abs(stated - found) > NEAR[0] + NEAR[1] * found + (stated == round(stated))


def missing(x):
    """Whether it is what tools write where there is nothing. NaN is no number in JSON, but pandas writes it."""
    return x is None or x == "" or (isinstance(x, float) and math.isnan(x))


def first_of(row, keys):
    return next((row[x] for x in keys if not missing(row.get(x))), None)


def leave_out_if_marked(*rows):
    """Raises the LineError of a line that NeMo skips. Some rows may be no objects."""
    marks = [str(x[SKIP]).strip().lower() for x in rows if isinstance(x, dict) and not missing(x.get(SKIP))]
    leave_out_if({*marks} - {"", "0", "0.0", "false", "no", "none", "null", "nan"}, f"marked to be skipped ({SKIP})")


def number(row, keys):
    """The seconds under one of the keys, or None."""
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
    """(start, end, whole): the seconds of a segment, and those of the file where the row has no segment."""
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
    """The seconds that a file is said to last, or None: nothing but a check needs them."""
    try:
        seconds = number(row, ("duration",))
    except LineError as error:
        notes.append(str(error))
        return None
    if seconds == 0:
        notes.append("duration is no number of seconds above 0")
    return seconds or None


def channel(row, keys=CHANNEL_KEYS):
    """None, the number of a channel from 0 on, or several."""
    x = first_of({key: x for key, x in row.items() if key != "channels" or isinstance(x, list)}, keys)
    if x in (None, "average"):
        return None
    some = [as_integer(y) for y in (x if isinstance(x, list) else [x])]
    leave_out_if(not some or None in some, "channel is no number from 0 on")
    return tuple(some) if isinstance(x, list) else some[0]


def as_integer(x):
    """1, 1.0, "1" or "1.0", as columns with gaps have them, as a number from 0 on; None: it is none."""
    if isinstance(x, (int, float, str)) and not isinstance(x, bool):
        found = re.fullmatch(r"(\d{1,9})(?:\.0+)?", str(x))
        return int(found[1]) if found else None
    return None


def speaker(row, notes, keys=SPEAKER_KEYS):
    """The name or number of the speaker, or "": nothing but statistics needs it."""
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
    """The text, unless it holds bytes that are no UTF-8, or half of a surrogate pair, or is none."""
    try:
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeEncodeError:
        if re.search("[\udc80-\udcff]", text):
            raise LineError(f"{what} is not UTF-8") from None
    raise LineError(f"{what} is no string of characters")


def located(name, manifest):
    """The file of a name: beside the manifest, in `clips` there (Common Voice), or from the current folder.

    A Mac may have written accents of the name by themselves, on its disk or in the list, and Windows backslashes.
    """
    if os.path.isfile(usual := os.path.join(manifest.parent, name)):
        return Path(usual)
    places = manifest.parent, manifest.parent / "clips", Path()
    found = next((file for x in places if is_file(file := actual(x / name))), None)
    other = name.replace("\\", os.sep) if found or not re.match("~|[A-Za-z][A-Za-z0-9+.-]+:/", name) else local(name)
    return found or next((file for x in places if is_file(file := actual(x / other))), manifest.parent / other)


def local(name):
    """The path that a shell or a browser makes of ~/a.wav or file:///a%20b.wav."""
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
    """The Entry of a row that says which part of a file has which text; by default, its audio gives the name.

    `path`: the manifest, or a function that finds the audio by its name.
    """
    audio, notes = first_of(row, keys[0]), []
    if isinstance(audio, dict):  # as Hugging Face has it
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
    found = Entry(name or audio, file, text, *where, spoken_by, tuple(notes), keys is not PLAIN)
    return found._replace(split=str(first_of(row, SPLIT_KEYS) or ""))


def utterances(row, path, line, keys):
    """Entries of one row: one, or one for each of its segments."""
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
            found, notes = entry(common | part, path, keys), []
            yield found._replace(whole=length(row, notes), notes=(*found.notes, *notes))
        except LineError as error:
            yield Fault(str(error), f"{line} segment {i}")


def is_cut(row):
    """Whether it is one of Lhotse's."""
    return bool({"supervisions", "recording", "tracks"} & row.keys())


def cuts(row, path, line, _):
    """Entries of one of Lhotse's cuts: one for each of its supervisions."""
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
    """The Entry of a supervision, whose times count from the start of its cut."""
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
        known = source.get("channels") or [0]
        if isinstance(known, list) and wanted <= {y for y in known if type(y) is int}:
            places = [known.index(y) for y in sorted(wanted)]
            places = places[0] if len(places) == 1 else places or None
            said = {key: x[key] for key in ("text", *SPEAKER_KEYS) if key in x}
            where = {"audio": source.get("source"), "start": start, "end": first + offset + duration}
            found, notes = entry({"text": "", "channel": places} | said | where, path, PLAIN, name), []
            return found._replace(whole=length(recording, notes), notes=(*found.notes, *notes))
    raise LineError("no source of Lhotse has the channel")


def folder(path, keys):
    """What the layout of a folder says: Kaldi, Hugging Face's table, LibriSpeech, or a text beside each file."""
    if (path / "wav.scp").exists():
        return kaldi(path, bool(keys[1]))
    tables = twins.once(x for form in ("jsonl", "csv") if (x := path / f"metadata.{form}").exists())
    return manifest(tables[0], keys) if tables else beside(path) if keys[1] else recordings(path)


def no_corpus(path, what):
    """The error of a folder; it names what a person may have meant, there or one level below.

    That is a manifest or a folder of Kaldi: one for a training, if a name says so, and then the largest one.
    """
    inside = [x for level in ("*", "*/*") for x in sorted(path.glob(level)) if not is_hidden(x.relative_to(path))]
    if any(x.suffix == ".arrow" for x in inside):
        return ListError(path, f"is a folder {SAVED}")
    found = [x for x in inside if (suffix_of(x) in LISTS or x.name == "wav.scp") and x.is_file()]
    best = max(found, default=None, key=lambda x: ("train" in str(x.relative_to(path)).lower(), x.stat().st_size))
    such = f"such as {best.parent if best.name == 'wav.scp' else best}" if best else MANIFESTS
    return ListError(path, f"holds no {what}; to read a manifest, name it ({such})")


def below(folder):
    """Files below a folder, also behind links, sorted; none that a system has put there.

    Each folder is read once, however many links lead there.
    """

    def fail(error):
        raise error

    seen, found = {os.path.realpath(folder)}, []
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = {x: os.path.realpath(os.path.join(place, x)) for x in folders}
        several = (x for x in sorted(folders) if not is_hidden(f"{x}/"))
        folders[:] = [x for x in several if real[x] not in seen and not seen.add(real[x])]
        found += [Path(place, x) for x in names if not is_hidden(x)]
    return sorted(found)


def recordings(path):
    """All audio files below a folder."""
    files = [x for x in below(path) if x.suffix.lower() in SUFFIXES]
    if not files:
        raise no_corpus(path, "audio files, and no wav.scp as Kaldi")
    yield from (Entry(str(x.relative_to(path)), x, "") for x in files)


def key_of(file):
    """What an audio file and its text have in common."""
    return composed(str(file.parent)), composed(file.stem)


def beside(path):
    """Texts in lines NAME TEXT of *.trans.txt, or in NAME.txt, beside the audio files NAME.*."""
    files, found = {}, below(path)
    for x in found:
        if x.suffix.lower() in SUFFIXES and files.setdefault(key_of(x), x) != x:
            yield Fault("a second audio file for the same text", str(x.relative_to(path)))
    unused, lists = dict(files), [x for x in found if x.name.endswith(".trans.txt")]
    texts = [x for x in found if x.suffix.lower() == ".txt" and (key_of(x) in files or not lists)]
    if not lists and not any(key_of(x) in files for x in texts):
        raise no_corpus(path, "*.trans.txt as LibriSpeech does, no wav.scp as Kaldi, and no audio files with a text "
                        "of the same name")  # fmt: skip
    said = [(f"{file.name} line {i}", file.parent, *[*line.split(None, 1), ""][:2])
            for file in lists for i, line in lines_of(file)]  # fmt: skip
    said += [(x.name, x.parent, x.stem, text_of(x)) for x in texts if x not in lists]
    for line, parent, name, text in said:
        key = composed(str(parent)), composed(name)
        file, first = files.get(key), unused.pop(key, None)
        try:
            leave_out_if(file is None, "a text without its audio file")
            leave_out_if(first is None, "a second text for the same audio file")
            names = Path(os.path.abspath(file)).parts[-3:]  # SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER in LibriSpeech
            known = names[0] if name.startswith("-".join(names[:2]) + "-") else ""
            yield Entry(str(file.relative_to(path)), file, encodable(text, "the text"), speaker=known)
        except LineError as error:
            yield Fault(str(error), line)
    yield from (Fault("an audio file without a text", str(x.relative_to(path))) for x in unused.values())


def plainly(x):
    """What is no LineError; raises what is one."""
    if isinstance(x, LineError):
        raise x
    return x


def kaldi(path, texts=True):
    """A folder of Kaldi: wav.scp, text, and perhaps segments and utt2spk."""

    def fields(name):
        return [(composed(x[0]), *x[1:]) for _, line in lines_of(path / name) if (x := line.split(None, 1))]

    def by_name(name):
        """{a name: the rest of its line}, or the LineError that two lines of one name differ."""
        found = {}
        for x, *rest in fields(name):
            rest, other = "".join(rest).strip(), found.get(x)
            twice = other is not None and other != rest
            found[x] = LineError(f"two lines of one name in {name}: {other} and {rest}") if twice else rest
        return found

    files, speakers = by_name("wav.scp"), by_name("utt2spk") if (path / "utt2spk").exists() else {}
    segments = {x: f"{x} 0 -1" for x in files}
    if (path / "segments").exists():
        segments = by_name("segments")
    seen = set()
    for name, *text in fields("text") if texts else [[x] for x in segments]:
        try:
            leave_out_if(name in seen, "a second text of the same name")
            seen.add(name)
            where = segments.pop(name, None)
            where = where if where is None else plainly(where).split()
            leave_out_if(where is None, "a text without its recording")
            leave_out_if(len(where) not in (3, 4), "no segment: expected a recording, a start and an end")
            file = plainly(files.get(composed(where[0])))
            leave_out_if(not file, "a segment of a recording that wav.scp lacks")
            leave_out_if(file.endswith("|") or file.startswith("|"), "a command in wav.scp is not run")
            row = {"audio": file, "text": " ".join(text), "speaker": speakers.get(name), "channel": "".join(where[3:])}
            row |= {"start": where[1], "end": None if where[2].startswith("-") else where[2]}
            yield entry(row, path / "wav.scp", PLAIN, name)
        except LineError as error:
            yield Fault(str(error), name)
    yield from (Fault("a recording without a text", x) for x in segments)
