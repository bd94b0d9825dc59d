"""Lists of recordings with their texts: manifests, tables, and folders of several layouts. Nothing is decoded.

`read` yields an Entry for each utterance, or a Fault where a line has none. Where a person names a folder or a pattern,
the same list may be there in several forms: compressed and not, as lines and as an array, in two forms of Unicode.
`once` reads one of them, and never chooses between two that differ.
"""

import csv
import functools
import gzip
import itertools
import os
import zlib
from pathlib import Path

from jax_rnnt_speech.data.names import SUFFIXES, actual, composed, is_hidden
from jax_rnnt_speech.data.rows import (
    CHANNEL_KEYS,
    END_KEYS,
    PLAIN,
    START_KEYS,
    UNREAD,
    Entry,
    Fault,
    LineError,
    encodable,
    entries_of_row,
    entry,
    keys_of,
    leave_out_if,
    missing,
    parsed,
    plainly,
)
from jax_rnnt_speech.system import UserError, reason, say_once

NOTHING = dict.fromkeys((*START_KEYS, *END_KEYS, "duration", *CHANNEL_KEYS, *UNREAD), ("nan", "none", "null", "<na>"))
COLUMNS = "--audio-column", "--text-column", "--speaker-column"
SAVED = ("which datasets.save_to_disk writes as Arrow, and which is not read: write Parquet, by "
         "datasets.load_from_disk(FOLDER)[SPLIT].to_parquet(FILE)")  # fmt: skip
KALDI = "wav.scp", "segments", "text"
PACKED = ".gz", ".bz2", ".xz", ".zst"
ARCHIVES = ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst"
say = functools.cache(say_once)


class ListError(UserError):
    """The error of a manifest or folder that lists nothing. `reason` is the cause, without the name."""

    def __init__(self, path, reason):
        super().__init__(f"{path} {reason}")
        self.reason = reason


def suffix_of(path):
    """Returns the suffix of a name in lower case, without .gz."""
    return (Path(path.stem).suffix if path.suffix.lower() == ".gz" else path.suffix).lower()


def read(path, audio_column="", text_column="", speaker_column="", texts=True, alone=True, archive=lambda path: None):
    """Yields Entries and Faults of a manifest or folder. Without `texts`, it needs none, and none is read.

    `archive` is a function of the path: the shards that are to be read if it is an archive, or None.

    A column must be there; one of a list may be missing, and then the usual ones count. A form that has no columns is
    an error if it is `alone`; among others, for which the column may be meant, its entries have a note.
    """
    path = actual(Path(path))
    keys = keys_of(audio_column, text_column, speaker_column, texts)
    try:
        if not path.exists():
            raise ListError(path, "does not exist")
        is_kaldi = path.name in KALDI and not path.is_dir()
        rows = kaldi(path.parent, texts) if is_kaldi else (folder if path.is_dir() else manifest)(path, keys)
        if (shards := archive(path)) is not None:
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


def text_of(path):
    """Returns a file's text, with only a newline at the ends of lines. Bytes that are not UTF-8 are for `encodable`."""
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix.lower() == ".gz" else data
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):  # as spreadsheets write "Unicode text"
        try:
            data = data.decode("utf-16").encode()
        except UnicodeError:
            raise ListError(path, "is UTF-16 with damaged characters") from None
    return data.decode("utf-8-sig", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")


def lines_of(path):
    """Yields (number, line) of a text's nonempty lines. Other characters that Unicode counts as ends are none."""
    for i, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            yield i, line


def sentences(path):
    """Yields an Entry without audio, or a Fault, for each line of a text."""
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
        yield from entries_of_row(row, path, name, keys)


def objects(path, keys):
    """Yields (name, object or LineError) of JSON lines, or of an array."""
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
    """Yields (name, row as a dictionary or LineError) of a table whose first line names the columns."""
    text = text_of(path)
    first = text.split("\n", 1)[0]
    tabs = suffix_of(path) == ".tsv" or first.count("\t") > max(first.count(x) for x in ",;")
    delimiter = "\t" if tabs else max(",;", key=first.count)
    rows = records(text.split("\n"), delimiter)
    _, names = next(rows, (1, []))
    for option, choices in zip(COLUMNS, keys):
        optional = option == "--speaker-column" and len(choices) > 1
        if choices and not optional and not set(choices) & set(names):
            expected = "the column " + choices[0] if len(choices) == 1 else "one of the columns " + ", ".join(choices)
            raise ListError(
                path, f"must have {expected} in its first line ({option} names another), got {names}"[:1000]
            )
    used = [x for x in names if x]
    if len(set(used)) < len(used):
        raise ListError(path, f"must name each column once, got {names}"[:1000])
    for i, row in rows:
        other = LineError("another number of columns than in the first line")
        fields = {key: x if x.lower() not in NOTHING.get(key, ()) else "" for key, x in zip(names, row)}
        yield f"{path.name} line {i}", fields if len(row) == len(names) else other


def records(lines, delimiter):
    """Yields (number of its line, fields) of each record that is not empty, with quotes as Python's csv reads them.

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


LISTS = {".jsonl": objects, ".ndjson": objects, ".json": objects, ".tsv": table, ".csv": table}
MANIFESTS = f"{', '.join([*LISTS][:-1])} or {[*LISTS][-1]}, also with .gz"


def folder(path, keys):
    """Reads a folder by its layout: Kaldi, Hugging Face's table, LibriSpeech, or a text next to each file."""
    if (path / "wav.scp").exists():
        return kaldi(path, bool(keys[1]))
    tables = once(x for form in ("jsonl", "csv") if (x := path / f"metadata.{form}").exists())
    return manifest(tables[0], keys) if tables else audio_with_texts(path) if keys[1] else recordings(path)


def no_corpus(path, what):
    """Returns the error of a folder; it names what a person may have meant, there or one level below.

    That is a manifest or a folder of Kaldi: one for a training, if a name says so, and then the largest one.
    """
    inside = [x for level in ("*", "*/*") for x in sorted(path.glob(level)) if not is_hidden(x.relative_to(path))]
    if any(x.suffix == ".arrow" for x in inside):
        return ListError(path, f"is a folder {SAVED}")
    lists = [x for x in inside if (suffix_of(x) in LISTS or x.name == "wav.scp") and x.is_file()]
    best = max(lists, default=None, key=lambda x: ("train" in str(x.relative_to(path)).lower(), x.stat().st_size))
    such = f"such as {best.parent if best.name == 'wav.scp' else best}" if best else MANIFESTS
    return ListError(path, f"holds no {what}; to read a manifest, name it ({such})")


def below(folder):
    """Returns files below a folder, also behind links, sorted; none that a system has put there.

    Each folder is read once, however many links lead there.
    """

    def fail(error):
        raise error

    seen, files = {os.path.realpath(folder)}, []
    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = {x: os.path.realpath(os.path.join(place, x)) for x in folders}
        several = (x for x in sorted(folders) if not is_hidden(f"{x}/"))
        folders[:] = [x for x in several if real[x] not in seen and not seen.add(real[x])]
        files += [Path(place, x) for x in names if not is_hidden(x)]
    return sorted(files)


def recordings(path):
    """Yields all audio files below a folder."""
    files = [x for x in below(path) if x.suffix.lower() in SUFFIXES]
    if not files:
        raise no_corpus(path, "audio files, and no wav.scp as Kaldi")
    yield from (Entry(str(x.relative_to(path)), x, "") for x in files)


def key_of(file):
    """Returns the part of a name that an audio file and its text have in common."""
    return composed(str(file.parent)), composed(file.stem)


def audio_with_texts(path):
    """Reads texts in lines NAME TEXT of *.trans.txt, or in NAME.txt, next to the audio files NAME.*."""
    files, inside = {}, below(path)
    for x in inside:
        if x.suffix.lower() in SUFFIXES and files.setdefault(key_of(x), x) != x:
            yield Fault("a second audio file for the same text", str(x.relative_to(path)))
    unused, lists = dict(files), [x for x in inside if x.name.endswith(".trans.txt")]
    texts = [x for x in inside if x.suffix.lower() == ".txt" and (key_of(x) in files or not lists)]
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
            names = Path(os.path.abspath(file)).parts[-3:]  # in LibriSpeech: SPEAKER/CHAPTER/SPEAKER-CHAPTER-NUMBER
            speaker = names[0] if name.startswith("-".join(names[:2]) + "-") else ""
            yield Entry(str(file.relative_to(path)), file, encodable(text, "the text"), speaker=speaker)
        except LineError as error:
            yield Fault(str(error), line)
    yield from (Fault("an audio file without a text", str(x.relative_to(path))) for x in unused.values())


def kaldi(path, texts=True):
    """Reads a folder of Kaldi: wav.scp, text, and perhaps segments and utt2spk."""

    def fields(name):
        return [(composed(x[0]), *x[1:]) for _, line in lines_of(path / name) if (x := line.split(None, 1))]

    def by_name(name):
        """Returns {a name: the rest of its line}, or the LineError that two lines of one name differ."""
        rests = {}
        for x, *rest in fields(name):
            rest, other = "".join(rest).strip(), rests.get(x)
            twice = other is not None and other != rest
            rests[x] = LineError(f"two lines of one name in {name}: {other} and {rest}") if twice else rest
        return rests

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


def base_of(path):
    """Returns (name without what says how it is packed or written, whether it is a tar)."""
    name = composed(path.name)
    packed = name.lower().endswith(PACKED)
    base, dot, suffix = (name.rpartition(".")[0] if packed else name).rpartition(".")
    tar, manifest = f".{suffix.lower()}" in ARCHIVES, f".{suffix.lower()}" in LISTS
    return (base if dot and (tar or manifest) else name), tar


def once(paths, same=False, named=False):
    """Returns one path for each thing that several stand for; a line says so. Raises an error where they differ.

    With `same`, all of them do, whatever their names are. With `named`, a person named each, so those that differ are
    kept.
    """
    paths, twins = [Path(x) for x in paths], set()
    some = paths if same else sorted(filter(Path.is_file, paths), key=form_of)
    for _, group in itertools.groupby(some, lambda x: same or form_of(x)[:3]):
        first, *others = group
        for x in others:
            if not base_of(x)[1] and content(x) != content(first):
                if named:
                    continue
                raise ListError(x, f"and {first} stand for the same, and differ: leave one of them out")
            say(f"{x} is not read: {first} stands for the same")
            twins.add(x)
    return [x for x in paths if x not in twins]


def form_of(path):
    """Returns a key that is equal for those that stand for the same, and puts the best form first."""
    return (str(path.parent), *base_of(path), path.name.lower().endswith(PACKED), str(path))


def content(path):
    """Returns the content of a manifest, in whatever form; its bytes where it says nothing."""
    try:
        rows = LISTS[suffix_of(path)](path, keys_of())
        rows = [row if isinstance(row, dict) else {"": row} for _, row in rows]
        return [{key: str(x) for key, x in row.items() if not missing(x)} for row in rows]
    except (KeyError, ListError, OSError, EOFError, zlib.error, gzip.BadGzipFile):
        return path.read_bytes()
