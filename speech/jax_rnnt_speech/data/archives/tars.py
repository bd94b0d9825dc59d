"""Reads tars by their headers, at any place, so they must not be compressed. Those of WebDataset are here.

A tar ends where nothing but zeros follows: behind the end of one, another may have been joined.
"""

import collections
import itertools
import os
import re
import struct
import tarfile
import zlib
from pathlib import Path
from typing import NamedTuple

from jax_rnnt_speech.data import headers, names, rows
from jax_rnnt_speech.data.archives.storage import HEAD, Member, Shard, bytes_of, refuse_pipes, steadily, utterances
from jax_rnnt_speech.data.lists import ListError
from jax_rnnt_speech.data.names import composed, is_hidden
from jax_rnnt_speech.data.rows import Fault, LineError

COMPRESSED = ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tzst"
KIND = "tar"
NAMES = r"(?!\._).*\.(tar|tar\.(gz|bz2|xz|zst)|tgz|tbz2?|txz|tzst)"
CUT = "an archive that is cut off; what comes before was read"
DAMAGED = "a damaged archive; what comes before was read"
BEHIND = "bytes behind the end of an archive that are no archive"
LINK = "a link within the archive: pack the file itself (tar --dereference --hard-dereference)"
SECOND = "a second audio file for the same text"
APART = "texts of one key that are apart in the archive: sort the files by name before they are packed"
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
BLOCK = 4096  # bytes of a tar that are read at once
HEADER = struct.Struct("100s24x12s12x8sc188x155s12x")  # name, size, sum of the bytes, kind, prefix of the name
ENOUGH = 512  # bytes of data that are wanted from a block that other files share
PLAIN = {b"path", b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname"}  # of an extended header
TEXTS = "txt", "json"
ARRAYS = "npy", "npz", "pyd", "pkl", "pickle", "pt", "pth", "ten", "tensor", "mp", "msgpack"
MOST = 64  # files of a key that are held until the next one comes
NEAR = 2**20  # bytes that are read at once for two texts of a key


class Info(NamedTuple):
    """A file in a tar."""

    name: str
    offset: int  # offset of its header
    offset_data: int
    size: int
    start: bytes = b""  # beginning of its data
    link: str = ""  # the file that it stands for, if the tar has a link in its place

    @property
    def end(self):
        return self.offset_data + -(-self.size // 512) * 512


def usual(block, begin, place):
    """Returns the Info of a plain file whose header is at a place, or None: tarfile knows the other kinds.

    `block` holds the tar's bytes from `begin` on. The Info has as much of the file's data as the block has.
    """
    at = place - begin
    if len(block) < at + 512:
        return None
    name, size, written, kind, prefix = HEADER.unpack_from(block, at)
    try:
        size, total = int(size.rstrip(b" \0"), 8), int(written.rstrip(b" \0"), 8) + sum(written) - 256
    except ValueError:
        return None
    # The sum of all bytes is half of Adler's, which one call computes.
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
    """Returns the name in an extended header, or nothing; None where it may hold something else of importance."""
    fields = dict(re.findall(rb"\d+ ([^=\n]+)=([^\n]*)\n", data))
    size = sum(len(key) + len(value) + 3 for key, value in fields.items())
    digits = sum(len(x) for x in re.findall(rb"(?:^|\n)(\d+) ", data))
    return fields.get(b"path", b"") if size + digits == len(data) and fields.keys() <= PLAIN else None


def size_of_common(block):
    """Returns the bytes of an extended header of all files without anything of importance, as git writes; 0 if none."""
    try:
        info = tarfile.TarInfo.frombuf(block[:512], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return 0
    return (info.type == tarfile.XGLTYPE) * (512 + -(-info.size // 512) * 512)


def past_zeros(read, place):
    """Returns where the block of the first nonzero byte begins, from a place on; None if all bytes are zero."""
    while data := read(place, 2**20):
        if left := len(data.lstrip(b"\0")):
            return (place + len(data) - left) // 512 * 512
        place += len(data)
    return None


def info_of(member, read):
    """Returns the Info of a file, or of a link that has the name of one of audio or text; None for others."""
    if member.isreg():
        start = read(member.offset_data, min(member.size, HEAD))
        return Info(member.name, member.offset, member.offset_data, member.size, start)
    kind = key_of(member.name)[1]
    linked = (member.issym() or member.islnk()) and (is_audio(kind) or is_text(kind))
    return Info(member.name, member.offset, member.offset_data, 0, b"", member.linkname or "?") if linked else None


def walked(path, place=0, end=None):
    """Yields Infos of the files of a tar from a place on, and where that ends: a Fault where the tar ends early.

    Files that a system has put there are left out. A link is an Info if its name is that of audio or of a text.
    """
    with steadily(lambda: open(path, "rb", buffering=0), path) as file:
        size, last, tar, begin, block = os.fstat(file.fileno()).st_size, "the start", None, place, b""
        ended = False  # whether an end has just been passed

        def unusual():
            nonlocal tar
            if tar is None:
                file.seek(place)
                tar = tarfile.open(fileobj=file, mode="r:", errorlevel=1)  # noqa: SIM115
            else:
                tar.offset = place
            member = tar.next()
            tar.members.clear()
            return member

        def read(place, size):
            return steadily(lambda: os.pread(file.fileno(), size, place), path)

        while end is None or place < end:
            info = usual(block, begin, place)
            if info is None or (begin < place and len(info.start) < min(info.size, ENOUGH)):
                begin, block = place, read(place, BLOCK)
                if common := size_of_common(block):
                    place += common
                    continue
                what = DAMAGED if len(block) >= 512 else CUT
                try:
                    info = usual(block, begin, place) or steadily(unusual, path)
                except tarfile.TarError:
                    what = DAMAGED if last != "the start" else "no tar archive"
                if info is None and block[:512] != bytes(512):
                    yield Fault(BEHIND if ended else what, f"{Path(path).name} after {last}")
                    return
            if info is None:
                place, tar, ended = past_zeros(read, place), None, True
                if place is None:
                    return
                continue
            plain, ended = type(info) is Info, False
            if info.offset_data + info.size > size:
                yield Fault(CUT, f"{Path(path).name}: {info.name}")
                return
            last, place = info.name, info.end if plain else tar.offset
            if not is_hidden(info.name) and (chosen := info if plain else info_of(info, read)):
                yield chosen


def members(path):
    """Returns Infos of all files of a tar, and a Fault where it ends early."""
    refuse_pipes(path)
    start = bytes_of(path, 0, 8)
    if kind := next((x for mark, x in PACKED.items() if start.startswith(mark)), None):
        raise ListError(path, f"is compressed by {kind}, so that no part can be read alone: unpack it")
    return walked(path)


def data_of(path, info):
    return info.start if len(info.start) == info.size else bytes_of(path, info.offset_data, info.size)


def member_of(path, info):
    return Member(path, info.offset_data, info.size, info.name, headers.seconds(info.start[:HEAD], info.size) or 0.0)


def two(a, b):
    """Returns the names of two files, with their places where the names are equal."""
    return f"{a.name} and {b.name}" if a.name != b.name else f"{a.name} at byte {a.offset} and at byte {b.offset}"


def key_of(name):
    """Returns a member's sample and its kind, as in WebDataset: a/b.c.txt is c.txt of a/b."""
    folder, slash, base = composed(name).removeprefix("./").rpartition("/")
    key, _, kind = base.partition(".")
    return folder + slash + key, kind.lower()


def is_audio(kind):
    return f".{kind.rpartition('.')[2]}" in names.SUFFIXES


def is_text(kind):
    return kind.rpartition(".")[2] in TEXTS


def stem_of(kind):
    return kind.rpartition(".")[0]


def samples(infos):
    """Yields (key, {kind: Info}) of files in a row with one key, or Faults. A second file of a kind begins one more.

    So does a file that differs behind the first dot of its name, where both the audio and a text of the one before are
    there: a.1.wav, a.1.txt, a.2.wav, a.2.txt.
    """
    key, files, last = None, {}, ""
    for x in infos:
        now, kind = (None, "") if type(x) is Fault else key_of(x.name)
        ends = now != key or kind in files
        if not ends and last and (stem := stem_of(kind)) and stem != last:
            same = [y for y in files if stem_of(y) == last]
            ends = len(files) >= MOST or (any(map(is_audio, same)) and any(map(is_text, same)))
        if ends:
            if files:
                yield key, files
            key, files = now, {}
        if now is None:
            yield x
        else:
            files[kind], last = x, stem_of(kind)
    if files:
        yield key, files


def paired(infos):
    """Returns [(Infos of audio, {txt or json: Info})] for the files of a key.

    A text of the key alone is for its first audio that has none whose name agrees behind the first dot, too.
    """
    sounds, texts = collections.defaultdict(list), collections.defaultdict(dict)
    for kind, x in infos.items():
        if is_audio(kind):
            sounds[stem_of(kind)].append(x)
        elif is_text(kind):
            texts[stem_of(kind)][kind.rpartition(".")[2]] = x
    common, complete, rest = texts[""], [], []
    for stem, some in sounds.items():
        own = texts[stem] if stem else {}
        (complete if own else rest).append((some, common | own if len(sounds) == 1 else own or common))
    if common and rest:
        rest = [([x for some, _ in rest for x in some], common)]
    return rest + complete if sounds else [([], x) for x in texts.values() if x]


class Tar(Shard):
    """A tar of WebDataset: audio next to a text or an object of JSON with the same key.

    Rows are (start, end) of a key, or of its audio, with (start, end) of its texts where these are elsewhere in the
    tar.
    """

    def located(self, keys, brief):
        apart, twice = collections.defaultdict(dict), {}  # files of keys that lack audio or a text, by kind
        for x in samples(members(self.path)):
            if type(x) is Fault:
                yield (), [x]
                continue
            key, infos = x
            if any(not sounds or (keys[1] and not texts) for sounds, texts in paired(infos)):
                for kind, info in infos.items():
                    if kind in apart[key]:
                        twice[key] = apart[key][kind], info
                    apart[key][kind] = info._replace(start=info.start[:HEAD] if is_audio(kind) else b"")
                continue
            several = [*infos.values()]
            usual = self.plain(infos, keys) if brief else None
            yield (several[0].offset, several[-1].end, 0, 0), [usual] if usual else self.entries(key, infos, keys)
        for key, (a, b) in twice.items():
            del apart[key]
            yield (), [Fault("two files of one name, apart from what they belong to", f"{self.base}: {two(a, b)}")]
        halves = {(key.rpartition("/")[2], any(map(is_audio, infos))) for key, infos in apart.items()}
        for key, infos in apart.items():
            for sounds, texts in paired(infos):
                if sounds and texts:
                    yield self.joined(key, sounds, texts, keys)
                elif keys[1] or any(x.rpartition(".")[2] in ARRAYS for x in infos):
                    elsewhere = (key.rpartition("/")[2], not sounds) in halves
                    yield (), [self.incomplete(key, infos, sounds, texts, elsewhere)]

    def joined(self, key, sounds, texts, keys):
        """Returns (place, Entries or Faults) of audio and texts that are apart in the tar."""
        several = sorted(texts.values(), key=lambda x: x.offset)
        if len(several) > 1 and several[-1].end - several[0].offset > NEAR:
            return (), [Fault(APART, f"{self.base}/{key}")]
        infos = {key_of(x.name)[1]: x for x in (sounds[0], *several)}
        more = [Fault(SECOND, f"{self.base}/{x.name}") for x in sounds[1:]]
        place = sounds[0].offset, sounds[0].end, several[0].offset, several[-1].end
        return place, itertools.chain(self.entries(key, infos, keys), more)

    def incomplete(self, key, infos, sounds, texts, elsewhere):
        """Returns the Fault of a key without audio or text; `elsewhere`: another folder has what is missing."""
        kinds = sorted({x.rpartition(".")[2] for x in infos if not is_audio(x) and not is_text(x)})
        folder = "; one of the same name is in another folder of the archive" * elsewhere
        if sounds:
            reason = "no text" + (f", but .{', .'.join(kinds)}: .txt and .json are read" if kinds else folder)
        elif arrays := [x for x in kinds if x in ARRAYS]:
            reason = f"an array (.{arrays[0]}) in place of audio: pack files of audio, such as FLAC"
        else:
            reason = "a text without its audio" + (f", but with .{', .'.join(kinds)}" if kinds else folder)
        stem = stem_of(key_of(next(iter(sounds or texts.values())).name)[1])
        return Fault(reason, f"{self.base}/{key}" + f".{stem}" * bool(stem))

    def objects(self):
        """Yields the value of each file's JSON, or None where it has none."""
        for x in members(self.path):
            is_json = type(x) is not Fault and key_of(x.name)[1].endswith("json")
            yield rows.parsed(data_of(self.path, x)) if is_json else None

    def plain(self, infos, keys):
        """Works as `rows.plain` for a line, for the files of a key: one of audio, and one of text or JSON."""
        if len(infos) != 2 or any(x.link for x in infos.values()):
            return None
        (kind, sound), (other, text) = infos.items()
        if is_text(kind):
            kind, sound, other, text = other, text, kind, sound
        if not is_audio(kind) or not is_text(other):
            return None
        data, seconds = data_of(self.path, text), headers.seconds(sound.start[:HEAD], sound.size)
        if other.endswith("json"):
            usual = rows.plain(data, keys, sound.name)
            return usual and (usual[0], usual[1] or seconds)
        try:
            data.decode()
        except UnicodeError:
            return None
        return sound.name, seconds

    def entries(self, key, infos, keys):
        """Yields Entries or Faults of one key."""
        for sounds, texts in paired(infos):
            if links := [x for x in (*sounds[:1], *texts.values()) if x.link]:
                yield Fault(LINK, f"{self.base}/{links[0].name} to {links[0].link}")
                continue
            name = f"{self.base}/{key}"
            try:
                said = {kind: data_of(self.path, x) for kind, x in texts.items()}
                row = rows.object_of(rows.parsed(said["json"])) if "json" in said else {}
                if "txt" in said:
                    row["text"] = said["txt"].decode("utf-8-sig", "surrogateescape").strip()
                where = member_of(self.path, sounds[0])
                row |= {"audio": f"{self.base}/{where.name}"}
                yield from utterances(row, where, name, keys)
            except LineError as error:
                yield Fault(str(error), name)
            for x in sounds[1:]:
                yield Fault(SECOND, f"{self.base}/{x.name}")

    def entries_at(self, where, keys, sought):
        key, infos = None, {}
        for place in (where[:2], where[2:4]):
            for x in walked(self.path, *place) if place[1] else ():
                if type(x) is Fault:
                    return [x]
                now, kind = key_of(x.name)
                key = now if key is None else key
                if now == key:
                    infos.setdefault(kind, x)
        return self.entries(key, infos, keys) if infos else [Fault(DAMAGED, self.base)]


def takes(path):
    return path.name.lower().endswith((".tar", *COMPRESSED))


def shards(path):
    return [Tar(str(path))]
