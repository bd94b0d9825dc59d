"""Tars of audio whose texts are in another file: those of NeMo, and parts of Lhotse Shar."""

import collections
import dataclasses
import functools
import gzip
import re
from pathlib import Path

from jax_rnnt_speech.data import names, rows
from jax_rnnt_speech.data.archives.storage import Member, Shard, bytes_of, steadily
from jax_rnnt_speech.data.archives.tars import DAMAGED, LINK, is_audio, is_text, key_of, member_of, members, two, walked
from jax_rnnt_speech.data.lists import ListError
from jax_rnnt_speech.data.names import Names
from jax_rnnt_speech.data.rows import Fault, LineError

CUT = ".shar"  # behind the id of a cut of Lhotse, which names its recording with all its folders


@dataclasses.dataclass(frozen=True)
class Paired(Shard):
    """A tar of audio, and lines elsewhere about it. Rows are (start, end) in the tar, (start, size) of a line."""

    lines: str  # the file with the lines
    places: tuple = None  # starts and sizes of this tar's lines; None for all

    @property
    def files(self):
        return [self.path, self.lines]

    def listed(self):
        """Yields (start, size) of each line, and its text."""
        text = unpacked(self.lines)
        for begin, size in lines_in(text) if self.places is None else zip(*self.places):
            yield begin, size, text[begin : begin + size]

    def objects(self):
        """Returns the values of each line's JSON."""
        return (rows.parsed(line) for *_, line in self.listed())

    def located(self, keys, brief):
        recordings, base = Names(), Path(self.lines).name
        others = {}  # members that are no audio, by their names
        for x in members(self.path):
            kind = "" if type(x) is Fault else key_of(x.name)[1]
            if type(x) is Fault:
                yield (), [x]
            elif is_audio(kind):
                recordings.add(x.name, (x._replace(start=b""), member_of(self.path, x).seconds))
            elif kind and not is_text(kind):
                others[names.stem(x.name)] = kind
        folders = functools.cache(lambda: self.folders(keys))
        for i, (begin, size, line) in enumerate(self.listed(), 1):
            name, place = f"{base} line {i}" if self.places is None else f"{base} byte {begin}", (0, 0)

            def where(wanted):
                nonlocal place
                fitting = some(recordings, wanted)
                if not fitting:
                    raise LineError(self.missing(recordings, others, wanted))
                (info, seconds), *more = fitting
                if more:
                    raise LineError(f"two recordings of one name: {two(info, more[0][0])}")
                bare = len(names.parts(info.name)[0]) < len(names.parts(wanted)[0])
                if bare and len(folders()[last(wanted)]) > 1:
                    raise LineError(f"{info.name} of {self.base} has no folder, and lines name it in several")
                rows.leave_out_if(info.link, LINK)
                place = info.offset, info.end
                return Member(self.path, info.offset_data, info.size, info.name, seconds)

            entries = [*described(line, where, name, keys)]
            yield (*place, begin, size), entries

    def folders(self, keys):
        """Returns the folders that lines name for each last part of a name."""
        folders = collections.defaultdict(set)
        for *_, line in self.listed():
            row = rows.parsed(line)
            name = rows.first_of(row, keys[0]) if isinstance(row, dict) else None
            if isinstance(name, str):
                folders[last(name)].add(names.parts(name)[0])
        return folders

    def missing(self, recordings, others, wanted):
        """Returns why there is no recording of a name, as far as a second look at the names shows."""
        name = wanted.removesuffix(CUT)
        kind = others.get("/".join(filter(None, name.split("/"))) if name != wanted else names.stem(name))
        other = f", but .{kind}" if kind else ", but one of another folder" * recordings.namesakes(name)
        return f"no such recording in {self.base}{other}"

    def entries_at(self, where, keys, sought):
        begin, end, place, size = where
        line = unpacked(self.lines)[place : place + size] if packed(self.lines) else bytes_of(self.lines, place, size)
        info = next(walked(self.path, begin, end), Fault(DAMAGED, self.base))
        if type(info) is Fault:
            return [info]
        member = member_of(self.path, info)
        return described(line, lambda _: member, f"{Path(self.lines).name} byte {place}", keys)


def last(name):
    """Returns the last part of a name, without its suffix and what `some` leaves out."""
    return re.sub(r"-sub\d+$", "", names.stem(names.parts(name)[1]))


def some(recordings, name):
    """Returns the recordings that a name may mean; NeMo writes -sub1, -sub2, ... behind further parts of one."""
    if name.endswith(CUT):
        return recordings.find(name.removesuffix(CUT), whole=True)
    return recordings.find(name) or recordings.find(re.sub(r"-sub\d+(?=\.\w+$|$)", "", name))


def described(line, where, name, keys):
    """Returns Entries and Faults of a line of JSON whose audio is in an archive."""
    row = rows.parsed(line)
    recording = row.get("recording") if isinstance(row, dict) else None
    for source in recording.get("sources") or () if isinstance(recording, dict) else ():
        if isinstance(source, dict) and source.get("type") == "shar":  # the audio is found by the id of the cut
            source |= {"type": "file", "source": f"{row.get('id')}{CUT}"}
    return rows.entries_of_row(row, where, name, keys)


def packed(path):
    return str(path).endswith(".gz")


@functools.lru_cache(16)
def unpacked(path):
    """Returns the bytes of a file of lines."""

    try:
        data = steadily(Path(path).read_bytes, path)
        return gzip.decompress(data) if packed(path) else data
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error):
        raise ListError(path, "is a damaged or unfinished archive of gzip") from None


def lines_in(text):
    """Yields (start, size) of the lines that are not empty."""
    for line in re.finditer(rb"[^\r\n]+", text):
        if line[0].strip():
            yield line.start(), len(line[0])
