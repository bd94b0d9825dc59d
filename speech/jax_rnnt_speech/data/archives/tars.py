"""Tars, which are read by their headers, at any place: so they must not be compressed. Those of WebDataset are here."""

import dataclasses
import functools
import os
import struct
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

from jax_rnnt_speech.data import headers, manifests
from jax_rnnt_speech.data.archives.storage import HEAD, ONE, Member, bytes_of, nth, same, steadily
from jax_rnnt_speech.data.manifests import Fault, LineError, ListError

NAMES = r".*\.tar"
CUT = "an archive that is cut off; what comes before was read"
DAMAGED = "a damaged archive; what comes before was read"
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
BLOCK = 4096  # bytes of a tar that are read at once
HEADER = struct.Struct("100s24x12s12x8sc188xB166x")  # name, size, sum of the bytes, kind, start of a prefix
TEXTS = "txt", "json"


class Info(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int  # of its header
    offset_data: int
    size: int
    start: bytes = b""  # of its data

    @property
    def end(self):
        return self.offset_data + -(-self.size // 512) * 512


def usual(block, begin, place):
    """The Info of a plain file whose header is at a place, or None: tarfile knows the other kinds.

    `block`: what is in the tar from `begin` on. None, too, if more of it may be needed.
    """
    at = place - begin
    if len(block) < at + 512:
        return None
    name, size, told, kind, prefix = HEADER.unpack_from(block, at)
    try:
        size, total = int(size.rstrip(b" \0"), 8), int(told.rstrip(b" \0"), 8) + sum(told) - 256
    except ValueError:
        return None
    # The sum of all bytes is half of Adler's, which one call has.
    wrong = (total + 1) % 65521 != zlib.adler32(block[at : at + 512]) & 65535
    if wrong or size < 0 or prefix or name[99] or kind not in b"0\0":
        return None
    start = block[at + 512 : at + 512 + size]
    if at and len(start) < (HEAD if size > BLOCK - 512 else size):
        return None
    name = name[: name.index(0)].decode("utf-8", "surrogateescape")
    return None if name.endswith("/") else Info(name, place, place + 512, size, start)


def walked(path, place=0, end=None):
    """Infos of the files of a tar from a place on, and where that ends: a Fault where the tar ends early."""
    with steadily(lambda: open(path, "rb", buffering=0), path) as file:
        size, last, tar, begin, block = os.fstat(file.fileno()).st_size, "the start", None, place, b""

        def unusual():
            nonlocal tar
            if tar is None:
                file.seek(place)
                tar = tarfile.open(fileobj=file, mode="r:", errorlevel=1)  # noqa: SIM115
            else:
                tar.offset = place
            found = tar.next()
            tar.members.clear()
            return found

        while end is None or place < end:
            info = usual(block, begin, place)
            if info is None:
                begin, block = place, steadily(lambda at=place: os.pread(file.fileno(), BLOCK, at), path)
                try:
                    info = usual(block, begin, place) or steadily(unusual, path)
                except tarfile.TarError:
                    what = DAMAGED if last != "the start" else "no tar archive"
                    yield Fault(what, f"{Path(path).name} after {last}")
                    return
            if info is None:
                if block[:512] != bytes(512):
                    yield Fault(CUT if len(block) < 512 else DAMAGED, f"{Path(path).name} after {last}")
                return
            plain = type(info) is Info
            if info.offset_data + info.size > size:
                yield Fault(CUT, f"{Path(path).name}: {info.name}")
                return
            if plain or info.isreg():
                info = info if plain else Info(info.name, info.offset, info.offset_data, info.size)
                yield info
            last, place = info.name, info.end if plain else tar.offset


def members(path):
    """Infos of all files of a tar, and a Fault where it ends early."""
    start = bytes_of(path, 0, 8)
    if kind := next((x for mark, x in PACKED.items() if start.startswith(mark)), None):
        raise ListError(path, f"is compressed by {kind}, so that no part can be read alone: unpack it")
    return walked(path)


def data_of(path, info):
    return info.start if len(info.start) == info.size else bytes_of(path, info.offset_data, info.size)


def member_of(path, info):
    return Member(path, info.offset_data, info.size, info.name, headers.seconds(info.start[:HEAD], info.size) or 0.0)


def key_of(name):
    """A member's sample and its kind: a/b.c.txt is c.txt of a/b."""
    folder, slash, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return folder + slash + key, kind.lower()


def samples(infos):
    """(key, {kind: Info}) of files in a row with the same key, or Faults. A second file of a kind begins another."""
    key, found = None, {}
    for x in infos:
        now, kind = (None, "") if type(x) is Fault else key_of(x.name)
        if now != key or kind in found:
            if found:
                yield key, found
            key, found = now, {}
        if now is None:
            yield x
        else:
            found[kind] = x
    if found:
        yield key, found


def is_audio(kind):
    return f".{kind.rpartition('.')[2]}" in manifests.SUFFIXES


@dataclasses.dataclass(frozen=True)
class Tar:
    """A tar of WebDataset: audio beside a text or an object of JSON with the same key. Rows: (start, end) of a key."""

    path: str

    @property
    def files(self):
        return [self.path]

    @property
    def amount(self):
        return os.path.getsize(self.path)

    def read(self, keys, brief=False):
        """`brief`: of the usual utterances, (name, seconds or None) will do."""
        for x in samples(members(self.path)):
            if type(x) is Fault:
                yield x
                continue
            infos = [*x[1].values()]
            begin, end = infos[0].offset, infos[-1].end
            if brief and (known := self.plain(x[1], keys)):
                yield (begin, end, 0, 0, 0), known
                continue
            for part, entry in enumerate(self.entries(*x, keys)):
                yield entry if isinstance(entry, Fault) else ((begin, end, 0, 0, part), entry)

    def plain(self, infos, keys):
        """What `manifests.plain` is for a line, for the files of a key: one of audio, and one of text or JSON."""
        if len(infos) != 2:
            return None
        (kind, sound), (other, text) = infos.items()
        if kind in TEXTS:
            kind, sound, other, text = other, text, kind, sound
        if not is_audio(kind) or other not in TEXTS:
            return None
        data, seconds = data_of(self.path, text), headers.seconds(sound.start[:HEAD], sound.size)
        if other == "json":
            known = manifests.plain(data, keys, sound.name)
            return known and (known[0], known[1] or seconds)
        try:
            data.decode()
        except UnicodeError:
            return None
        return sound.name, seconds

    def entries(self, key, infos, keys):
        """Entries or Faults of one key."""
        base = os.path.basename(self.path)
        name = f"{base}/{key}"
        texts = {kind: data_of(self.path, x) for kind, x in infos.items() if kind in TEXTS}
        sounds = [x for kind, x in infos.items() if is_audio(kind)]
        if not sounds:
            if texts:
                yield Fault("a text without its audio", name)
            return
        try:
            row = manifests.object_of(texts["json"]) if "json" in texts else {}
            if "txt" in texts:
                row["text"] = texts["txt"].decode("utf-8-sig", "surrogateescape").strip()
            where = member_of(self.path, sounds[0])
            row |= {"audio": f"{base}/{where.name}"}
            yield from manifests.utterances(row, functools.partial(same, where), name, (ONE, *keys[1:]))
        except LineError as error:
            yield Fault(str(error), name)
        for x in sounds[1:]:
            yield Fault("a second audio file for the same text", f"{base}/{x.name}")

    def entry(self, row, keys, sought=True):
        begin, end, *_, part = row
        found = next(samples(walked(self.path, begin, end)), Fault(DAMAGED, Path(self.path).name))
        return found if isinstance(found, Fault) else nth(self.entries(*found, keys), part)


def takes(path):
    return path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst"))


def shards(path):
    return [Tar(str(path))]
