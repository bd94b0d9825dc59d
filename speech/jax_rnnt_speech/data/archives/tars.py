"""Tars, which are read by their headers, at any place: so they must not be compressed. Those of WebDataset are here."""

import os
import re
import struct
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

from jax_rnnt_speech.data import headers, manifests
from jax_rnnt_speech.data.archives.storage import HEAD, Member, Shard, bytes_of, steadily, utterances
from jax_rnnt_speech.data.manifests import Fault, LineError, ListError

NAMES = r".*\.tar"
CUT = "an archive that is cut off; what comes before was read"
DAMAGED = "a damaged archive; what comes before was read"
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
BLOCK = 4096  # bytes of a tar that are read at once
HEADER = struct.Struct("100s24x12s12x8sc188x155s12x")  # name, size, sum of the bytes, kind, prefix of the name
ENOUGH = 512  # bytes of data that are wanted of a block that other files share
PLAIN = {b"path", b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname"}  # of an extended header
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

    `block`: what is in the tar from `begin` on. The Info has as much of the file's data as the block has.
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
    if wrong or size < 0:
        return None
    start = block[at + 512 : at + 512 + size]
    if kind in (b"x", b"L") and len(start) == size:  # a time or a long name of the file that follows
        info = usual(block, begin, place + 512 + -(-size // 512) * 512)
        name = start if kind == b"L" else pax(start)
        return None if info is None or name is None else info._replace(name=text(name) or info.name, offset=place)
    name = text(name)
    if kind not in b"0\0" or (kind == b"\0" and name.endswith("/")):
        return None
    return Info(f"{text(prefix)}/{name}" if prefix[0] else name, place, place + 512, size, start)


def text(field):
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def pax(data):
    """The name in an extended header, or nothing; None where something else of importance may be in it."""
    found = dict(re.findall(rb"\d+ ([^=\n]+)=([^\n]*)\n", data))
    size = sum(len(key) + len(value) + 3 for key, value in found.items())
    digits = sum(len(x) for x in re.findall(rb"(?:^|\n)(\d+) ", data))
    return found.get(b"path", b"") if size + digits == len(data) and found.keys() <= PLAIN else None


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

        def read(place, size):
            return steadily(lambda: os.pread(file.fileno(), size, place), path)

        while end is None or place < end:
            info = usual(block, begin, place)
            if info is None or (begin < place and len(info.start) < min(info.size, ENOUGH)):
                begin, block = place, read(place, BLOCK)
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
            last, place = info.name, info.end if plain else tar.offset
            if plain:
                yield info
            elif info.isreg():
                start = read(info.offset_data, min(info.size, HEAD))
                yield Info(info.name, info.offset, info.offset_data, info.size, start)


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


class Tar(Shard):
    """A tar of WebDataset: audio beside a text or an object of JSON with the same key. Rows: (start, end) of a key."""

    def found(self, keys, brief):
        for x in samples(members(self.path)):
            if type(x) is Fault:
                yield (), [x]
                continue
            infos = [*x[1].values()]
            known = self.plain(x[1], keys) if brief else None
            yield (infos[0].offset, infos[-1].end, 0, 0), [known] if known else self.entries(*x, keys)

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
        name = f"{self.base}/{key}"
        texts = {kind: data_of(self.path, x) for kind, x in infos.items() if kind in TEXTS}
        sounds = [x for kind, x in infos.items() if is_audio(kind)]
        if not sounds:
            if texts:
                yield Fault("a text without its audio", name)
            return
        try:
            row = manifests.object_of(manifests.parsed(texts["json"])) if "json" in texts else {}
            if "txt" in texts:
                row["text"] = texts["txt"].decode("utf-8-sig", "surrogateescape").strip()
            where = member_of(self.path, sounds[0])
            row |= {"audio": f"{self.base}/{where.name}"}
            yield from utterances(row, where, name, keys)
        except LineError as error:
            yield Fault(str(error), name)
        for x in sounds[1:]:
            yield Fault("a second audio file for the same text", f"{self.base}/{x.name}")

    def entries_at(self, where, keys, sought):
        found = next(samples(walked(self.path, *where[:2])), Fault(DAMAGED, self.base))
        return [found] if type(found) is Fault else self.entries(*found, keys)


def takes(path):
    return path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.zst"))


def shards(path):
    return [Tar(str(path))]
