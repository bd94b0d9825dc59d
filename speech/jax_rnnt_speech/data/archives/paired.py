"""Tars of audio whose texts are in another file: those of NeMo, and parts of Lhotse Shar."""

import dataclasses
import functools
import gzip
import re
from pathlib import Path

from jax_rnnt_speech.data import manifests
from jax_rnnt_speech.data.archives.storage import Shard, bytes_of, steadily
from jax_rnnt_speech.data.archives.tars import DAMAGED, is_audio, key_of, member_of, members, walked
from jax_rnnt_speech.data.manifests import Fault, ListError


@dataclasses.dataclass(frozen=True)
class Paired(Shard):
    """A tar of audio, and lines elsewhere about it. Rows: (start, end) in the tar, (start, size) of a line."""

    lines: str  # the file with the lines
    places: tuple = None  # starts and sizes of those of this tar; None: all

    @property
    def files(self):
        return [self.path, self.lines]

    def listed(self):
        """(start, size) of each line, and its text."""
        text = unpacked(self.lines)
        for begin, size in lines_in(text) if self.places is None else zip(*self.places):
            yield begin, size, text[begin : begin + size]

    def found(self, keys, brief):
        known, base = {}, Path(self.lines).name
        for x in members(self.path):
            if type(x) is Fault:
                yield (), [x]
            elif is_audio(key_of(x.name)[1]):
                stem, member = Path(x.name).stem, member_of(self.path, x)
                if stem in known:
                    yield (), [Fault("a second recording of the same name", str(member))]
                else:
                    known[stem] = member, (x.offset, x.end)
        for i, (begin, size, line) in enumerate(self.listed(), 1):
            name, place = f"{base} line {i}" if self.places is None else f"{base} byte {begin}", (0, 0)

            def where(wanted):
                nonlocal place
                stem = Path(wanted).stem
                found = known.get(stem) or known.get(re.sub(r"-sub\d+$", "", stem))
                manifests.leave_out_if(found is None, f"no such recording in {self.base}")
                member, place = found
                return member

            entries = [*described(line, where, name, keys)]
            yield (*place, begin, size), entries

    def entries_at(self, where, keys, sought):
        begin, end, place, size = where
        line = unpacked(self.lines)[place : place + size] if packed(self.lines) else bytes_of(self.lines, place, size)
        info = next(walked(self.path, begin, end), Fault(DAMAGED, self.base))
        if type(info) is Fault:
            return [info]
        member = member_of(self.path, info)
        return described(line, lambda _: member, f"{Path(self.lines).name} byte {place}", keys)


def described(line, where, name, keys):
    """Entries and Faults of a line of JSON whose audio is in an archive."""
    row = manifests.parsed(line)
    recording = row.get("recording") if isinstance(row, dict) else None
    for source in recording.get("sources") or () if isinstance(recording, dict) else ():
        if isinstance(source, dict) and source.get("type") == "shar":  # the audio is known by the id of the cut
            source |= {"type": "file", "source": f"{row.get('id')}.shar"}
    return manifests.of_row(row, where, name, keys)


def packed(path):
    return str(path).endswith(".gz")


@functools.lru_cache(16)
def unpacked(path):
    """The bytes of a file of lines."""

    def act():
        with gzip.open(path) if packed(path) else open(path, "rb") as file:
            return file.read()

    try:
        return steadily(act, path)
    except (EOFError, gzip.zlib.error):
        raise ListError(path, "is a damaged or unfinished archive of gzip") from None


def lines_in(text):
    """(start, size) of the lines that are not empty."""
    for found in re.finditer(rb"[^\r\n]+", text):
        if found[0].strip():
            yield found.start(), len(found[0])
