"""Shards: archives of recordings, or parts of a manifest, of which any utterance can be read by itself.

A shard yields (row, Entry) of its utterances, or Faults. A row is five numbers, with which `entry` finds the utterance
again: places in the files of the shard, and the number of the utterance among those of the same line.

Archives are tars of WebDataset, of NeMo and of Lhotse Shar, and Parquet. Tars are read by their headers, at any place,
so they must not be compressed. Storage that fails is tried again, and then ends the command.
"""

import dataclasses
import functools
import glob
import gzip
import itertools
import os
import re
import tarfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

from jax_rnnt_speech.data import audio, headers, manifests
from jax_rnnt_speech.data.manifests import Fault, LineError, ListError
from jax_rnnt_speech.system import UserError, reason

WAITS = 1, 4, 16  # seconds before storage that has failed is tried again
CUT = "an archive that is cut off; what comes before was read"
DAMAGED = "a damaged archive; what comes before was read"
PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
BLOCK = 4096  # bytes of a tar that are read with a header
HEAD = 256  # bytes of audio that tell its seconds
LINES = 2**20  # bytes of a manifest that are one shard
LISTED = 1000  # utterances of other lists that are one shard
TEXTS = "txt", "json"
ONE = ("audio",)  # key of the audio, where a row is put together here
RANGE = re.compile(r"(?:_OP_|\{)(\d+)\.\.(\d+)(?:_CL_|\})")


class StorageError(UserError):
    """Storage that fails again and again."""


def steadily(act, path):
    """What `act` returns, which may need several attempts."""
    for wait in (*WAITS, None):
        try:
            return act()
        except (OSError, audio.AudioError) as error:
            if not getattr(error, "passing", True):
                raise
            if wait is None:
                tried, known = f"tried {len(WAITS) + 1} times", isinstance(error, audio.AudioError)
                what = f"{error} (" if known else f"{error.filename or path} cannot be read ({reason(error)}; "
                raise StorageError(f"{what}{tried})") from None
            time.sleep(wait)


def bytes_of(path, place, size):
    """Bytes of a file, from a place on; fewer where it ends."""

    def act():
        with open(path, "rb", buffering=0) as file:
            file.seek(place)
            parts = []
            while (left := size - sum(map(len, parts))) > 0 and (data := file.read(left)):
                parts.append(data)
            return b"".join(parts)

    return steadily(act, path)


@dataclasses.dataclass(frozen=True)
class Member:
    """A recording within an archive: may be read in the place of a path."""

    archive: str
    place: int
    size: int
    name: str
    seconds: float = dataclasses.field(default=0.0, compare=False)  # by its header, if that was read

    def __str__(self):
        return f"{self.archive}/{self.name}"

    def loaded(self):
        data = bytes_of(self.archive, self.place, self.size)
        if len(data) < self.size:
            raise audio.AudioError(self, audio.CUT)
        return audio.Memory(data, str(self))


@dataclasses.dataclass(frozen=True)
class Cell(Member):
    """A recording in a row of Parquet: `place` is the number of its group of rows, `size` that of its row there."""

    column: str = ""

    def loaded(self):
        found = group_of(self.archive, self.place, self.column)[self.size].as_py()
        return audio.Memory(found["bytes"] if isinstance(found, dict) else found, str(self))


# What is in tars.


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


def usual(block, place):
    """The Info of a plain file by its header and what comes behind it, or None: tarfile knows the other kinds."""
    name, kind, header = block[:100], block[156:157], block[:512]
    if len(header) < 512 or kind not in b"0\0" or block[345] or block[124] & 128 or name[99]:
        return None
    try:
        size, told = (int(x.strip(b" \0") or b"0", 8) for x in (block[124:136], block[148:156]))
    except ValueError:
        return None
    name = name.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    total = told + sum(block[148:156]) - 256  # of all bytes, which Adler's sum has by one call
    if (total + 1) % 65521 != zlib.adler32(header) % 2**16 or name.endswith("/"):
        return None
    return Info(name, place, place + 512, size, block[512 : 512 + size])


def walked(path, place=0, end=None):
    """Infos of the files of a tar from a place on, and where that ends: a Fault where the tar ends early."""
    with steadily(lambda: open(path, "rb", buffering=0), path) as file:
        size, last, tar = os.fstat(file.fileno()).st_size, "the start", None

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
            block = steadily(lambda at=place: os.pread(file.fileno(), BLOCK, at), path)
            try:
                info = usual(block, place) or steadily(unusual, path)
            except tarfile.TarError:
                yield Fault(DAMAGED if last != "the start" else "no tar archive", f"{Path(path).name} after {last}")
                return
            if info is None:
                if block[:512] != bytes(512):
                    yield Fault(CUT if len(block) < 512 else DAMAGED, f"{Path(path).name} after {last}")
                return
            plain = isinstance(info, Info)
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


def key_of(name):
    """A member's sample and its kind: a/b.c.txt is c.txt of a/b."""
    folder, slash, base = name.rpartition("/")
    key, _, kind = base.partition(".")
    return folder + slash + key, kind.lower()


def samples(infos):
    """(key, {kind: Info}) of files in a row with the same key, or Faults. A second file of a kind begins another."""
    key, found = None, {}
    for x in infos:
        now, kind = (None, "") if isinstance(x, Fault) else key_of(x.name)
        if found and (now != key or kind in found):
            yield key, found
            found = {}
        if isinstance(x, Fault):
            yield x
        else:
            key, found = now, found | {kind: x}
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

    def read(self, keys, brief=False):
        """`brief`: of the usual utterances, (name, seconds or None) will do."""
        for x in samples(members(self.path)):
            if isinstance(x, Fault):
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
        (kind, sound), (other, text) = [*infos.items()] if len(infos) == 2 else [("", None)] * 2
        if kind in TEXTS:
            (kind, sound), (other, text) = (other, text), (kind, sound)
        if not is_audio(kind) or other not in TEXTS:
            return None
        data, seconds = data_of(self.path, text), headers.seconds(sound.start[:HEAD], sound.size)
        if other == "json":
            known = manifests.plain(data, keys, sound.name)
            return known and (known[0], known[1] or seconds)
        try:
            data.decode("utf-8-sig")
        except UnicodeError:
            return None
        return sound.name, seconds

    def entries(self, key, infos, keys):
        """Entries or Faults of one key."""
        name = f"{Path(self.path).name}/{key}"
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
            row |= {"audio": f"{Path(self.path).name}/{where.name}"}
            yield from manifests.utterances(row, functools.partial(same, where), name, (ONE, *keys[1:]))
        except LineError as error:
            yield Fault(str(error), name)
        for x in sounds[1:]:
            yield Fault("a second audio file for the same text", f"{Path(self.path).name}/{x.name}")

    def entry(self, row, keys, sought=True):
        begin, end, *_, part = row
        found = next(samples(walked(self.path, begin, end)), Fault(DAMAGED, Path(self.path).name))
        return found if isinstance(found, Fault) else nth(self.entries(*found, keys), part)


def member_of(path, info):
    return Member(path, info.offset_data, info.size, info.name, headers.seconds(info.start[:HEAD], info.size) or 0.0)


def same(member, _):
    """The only recording that a row can mean."""
    return member


def nth(entries, part):
    return next(itertools.islice(entries, part, None))


@dataclasses.dataclass(frozen=True)
class Paired:
    """A tar of audio, and lines elsewhere about it. Rows: (start, end) in the tar, (start, size) of a line."""

    path: str
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

    def read(self, keys, brief=False):
        found = {}
        for x in members(self.path):
            if isinstance(x, Fault):
                yield x
            elif is_audio(key_of(x.name)[1]):
                stem, where = Path(x.name).stem, member_of(self.path, x)
                if stem in found:
                    yield Fault("a second recording of the same name", str(where))
                else:
                    found[stem] = (x.offset, x.end), where
        for i, (begin, size, line) in enumerate(self.listed(), 1):
            name = (
                f"{Path(self.lines).name} line {i}" if self.places is None else f"{Path(self.lines).name} byte {begin}"
            )
            place = (0, 0)

            def where(wanted):
                nonlocal place
                stem = Path(wanted).stem
                known = found.get(stem) or found.get(re.sub(r"-sub\d+$", "", stem))
                if known is None:
                    raise LineError(f"no such recording in {Path(self.path).name}")
                place = known[0]
                return known[1]

            for part, entry in enumerate(described(line, where, name, keys)):
                yield entry if isinstance(entry, Fault) else ((*place, begin, size, part), entry)

    def entry(self, row, keys, sought=True):
        begin, end, place, size, part = row
        line = unpacked(self.lines)[place : place + size] if packed(self.lines) else bytes_of(self.lines, place, size)
        info = next(walked(self.path, begin, end), Fault(DAMAGED, Path(self.path).name))
        if isinstance(info, Fault):
            return info
        name, where = f"{Path(self.lines).name} byte {place}", functools.partial(same, member_of(self.path, info))
        return nth(described(line, where, name, keys), part)


def described(line, where, name, keys):
    """Entries and Faults of a line of JSON whose audio is in an archive."""
    try:
        row = manifests.object_of(line)
        if manifests.is_cut(row):  # of Shar: the audio is known by the id of the cut
            recording = row.get("recording")
            for source in recording.get("sources") or () if isinstance(recording, dict) else ():
                if isinstance(source, dict) and source.get("type") == "shar":
                    source |= {"type": "file", "source": f"{row.get('id')}.shar"}
            yield from manifests.cuts(row, where, name, keys)
        else:
            yield from manifests.utterances(row, where, name, keys)
    except LineError as error:
        yield Fault(str(error), name)


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


def lines_in(text, begin=0):
    """(start, size) of the lines that are not empty."""
    for found in re.finditer(rb"[^\r\n]+", text):
        if found[0].strip():
            yield begin + found.start(), len(found[0])


# Parquet, as Hugging Face's datasets write it.


def parquet(path):
    try:
        import pyarrow.parquet as arrow
    except ModuleNotFoundError:
        raise UserError(f"{path}: Parquet needs: pip install pyarrow") from None
    from pyarrow import ArrowInvalid

    def act():
        try:
            return arrow.ParquetFile(path)
        except ArrowInvalid as error:
            raise ListError(path, f"is no Parquet, or not all of it: {str(error).splitlines()[0]}") from None

    return steadily(act, path)


opened_parquet = functools.lru_cache(32)(parquet)


@functools.lru_cache(8)
def group_of(path, group, column):
    """A column of a group of rows."""
    return steadily(lambda: opened_parquet(path).read_row_group(group, columns=[column])[column], path)


@dataclasses.dataclass(frozen=True)
class Parquet:
    """A group of rows of a file. Rows: (group, row in it)."""

    path: str
    group: int

    @property
    def files(self):
        return [self.path]

    def columns(self, keys):
        """(name of the audio's column, names of the others that hold no bytes)."""
        names = opened_parquet(self.path).schema_arrow.names
        sound = next((x for x in keys[0] if x in names), None)
        if sound is None:
            raise ListError(self.path, f"must have one of the columns {', '.join(keys[0])}, got {names}"[:1000])
        return sound, [x for x in names if x != sound]

    def read(self, keys, brief=False):
        sound, names = self.columns(keys)
        try:
            others, cells = rows_of(self.path, self.group, tuple(names)), cells_of(self.path, self.group, sound)
        except OSError as error:  # ArrowInvalid is one in some versions
            yield Fault(
                f"rows that cannot be read ({str(error).splitlines()[0]})", f"{Path(self.path).name} {self.group}"
            )
            return
        for i, cell in enumerate(cells):
            row = others[i] if names else {}
            for part, entry in enumerate(self.entries(i, sound, cell, row, keys)):
                yield entry if isinstance(entry, Fault) else ((self.group, i, 0, 0, part), entry)

    def entries(self, i, sound, cell, row, keys):
        name = f"{Path(self.path).name} row {self.group}.{i}"
        inside, known = cell
        try:
            if not inside and not isinstance(known, str):
                raise LineError("no audio")
            shown = f"{name} ({known})" if isinstance(known, str) else name
            where = Path(self.path)
            if inside:
                member = Cell(self.path, self.group, i, f"{self.group}.{i}", column=sound)
                where = functools.partial(same, member)
            row = row | {"audio": shown if inside else known}
            yield from manifests.utterances(row, where, name, (ONE, *keys[1:]))
        except LineError as error:
            yield Fault(str(error), name)

    def entry(self, row, keys, sought=True):
        sound, names = self.columns(keys)
        _, i, *_, part = row
        others = rows_of(self.path, self.group, tuple(names))
        cell = cells_of(self.path, self.group, sound)[i]
        return nth(self.entries(i, sound, cell, others[i] if names else {}, keys), part)


@functools.lru_cache(8)
def rows_of(path, group, names):
    return steadily(lambda: opened_parquet(path).read_row_group(group, columns=list(names)).to_pylist(), path)


@functools.lru_cache(8)
def cells_of(path, group, column):
    """(whether it holds bytes, its path or None) of each cell with audio; bytes are read if nothing else tells."""
    file, inside, paths = opened_parquet(path), None, None
    known, names = file.metadata.row_group(group), file.schema_arrow.field(column).type
    names = {x.name for x in names.fields} if hasattr(names, "fields") else set()
    for k in range(known.num_columns):
        leaf = known.column(k)
        counted = leaf.statistics is not None and leaf.statistics.has_null_count
        if leaf.path_in_schema == f"{column}.bytes" and counted and leaf.statistics.null_count in (0, known.num_rows):
            inside = leaf.statistics.null_count == 0
    if inside is None:
        cells = [x.as_py() for x in group_of(path, group, column)]
        found = [x if isinstance(x, dict) else {"bytes" if isinstance(x, bytes) else "path": x} for x in cells]
        return [(bool(x.get("bytes")), x.get("path")) for x in found]
    if "path" in names:
        table = steadily(lambda: file.read_row_group(group, columns=[f"{column}.path"]), path)
        paths = [x and x.get("path") for x in table[column].to_pylist()]
    return [(inside, x) for x in paths or [None] * known.num_rows]


# Parts of lists that are no archives.


@dataclasses.dataclass(frozen=True)
class Lines:
    """A part of a manifest of JSON lines. Rows: (number, 0), (start, size) of a line."""

    path: str
    begin: int
    end: int
    number: int  # of its first line

    @property
    def files(self):
        return [self.path]

    def read(self, keys, brief=True):
        """Entries whose audio is a name; for the usual lines, these are (name, seconds or None)."""
        place, data = self.begin, bytes_of(self.path, self.begin, self.end - self.begin)
        for number, line in enumerate(data.split(b"\n"), self.number):
            if line.strip():
                if known := manifests.plain(line, keys):
                    yield (number, 0, place, len(line), 0), known
                else:
                    name = f"{Path(self.path).name} line {number}"
                    for part, entry in enumerate(described(line, lambda x: x, name, keys)):
                        yield entry if isinstance(entry, Fault) else ((number, 0, place, len(line), part), entry)
            place += len(line) + 1

    def entry(self, row, keys, sought=True):
        """`sought`: whether its audio is a path, and not a name."""
        number, _, place, size, part = row
        where, name = Path(self.path) if sought else lambda name: name, f"{Path(self.path).name} line {number}"
        return nth(described(bytes_of(self.path, place, size), where, name, keys), part)


@dataclasses.dataclass(frozen=True)
class Listed:
    """Entries and Faults of any other list, in memory. Rows: the number of one."""

    path: str
    entries: tuple

    @property
    def files(self):
        return [self.path]

    def read(self, keys, brief=False):
        for i, x in enumerate(self.entries):
            yield x if isinstance(x, Fault) else ((i, 0, 0, 0, 0), x)

    def entry(self, row, keys, sought=True):
        return self.entries[row[0]]


# Which shards a name is.


def expanded(name):
    """The names that a pattern or a range is for; a name that is neither by itself."""
    name = str(name)
    if os.path.exists(name):
        return [name]
    if found := RANGE.search(name):
        first, last = int(found[1]), int(found[2])
        width = len(found[1]) if found[1].startswith("0") else 0
        names = [name[: found.start()] + f"{i:0{width}}" + name[found.end() :] for i in range(first, last + 1)]
        names = [y for x in names for y in (expanded(x) if RANGE.search(x) else [x])]
        if missing := [x for x in names if not os.path.exists(x)]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ListError(name, f"lacks {len(missing)} of {len(names)} files: {', '.join(missing[:3])}{more}")
        return names
    if glob.has_magic(name):
        return sorted(glob.glob(name, recursive=True)) or [name]
    return [name]


def is_pattern(name):
    """Whether several files may be meant."""
    return not os.path.exists(name) and bool(RANGE.search(str(name)) or glob.has_magic(str(name)))


def weighted(name):
    """(name, weight or None) of NAME:WEIGHT, where NAME alone is a source."""
    rest, _, number = str(name).rpartition(":")
    number = re.fullmatch(r"\d+(\.\d+)?|\.\d+", number) and number
    if rest and number and not os.path.exists(name) and (os.path.exists(rest) or is_pattern(rest)):
        return rest, float(number)
    return str(name), None


def wanted(paths):
    """Whether sources are read on the fly unless one says otherwise: archives, and sources with weights."""
    return any(weight is not None or is_archive(x) for x, weight in map(weighted, paths))


def of_folder(folder):
    """The archives of a folder and of the folders in it: parts of Shar, tars or Parquet; none where audio is beside."""
    found = []
    for x in [*os.scandir(folder)]:
        found += os.scandir(x) if x.is_dir() else [x]
    if any(os.path.splitext(x.name)[1].lower() in manifests.SUFFIXES for x in found):
        return []
    found = sorted(Path(x.path) for x in found)
    shar = [x for x in found if re.fullmatch(r"cuts\..+\.jsonl(\.gz)?", x.name)]
    if any(map(shar_of, shar)):
        return shar
    tars = [x for x in found if x.suffix == ".tar"]
    return tars or [x for x in found if x.suffix == ".parquet"]


def is_archive(name):
    """Whether the name is an archive, or a folder, range or pattern of some."""
    path = Path(str(name))
    if is_pattern(name):
        return any(map(is_archive, expanded(name)[:1]))
    if path.is_dir():
        plain = any((path / x).exists() for x in ("wav.scp", "metadata.jsonl", "metadata.csv"))
        return not plain and bool(of_folder(path))
    return path.name.endswith((".tar", ".parquet", ".tar.gz", ".tgz", ".tar.zst")) or (
        path.is_file() and bool(tars_of(path) or shar_of(path))
    )


def tars_of(manifest):
    """The tars beside a manifest of NeMo, by their numbers: those that its lines name in `shard_id`."""
    if manifests.suffix_of(manifest) not in (".json", ".jsonl") or packed(manifest):
        return {}
    with open(manifest, "rb") as file:
        if b'"shard_id"' not in file.readline(2**16):
            return {}
    folders = manifest.parent, manifest.parent.parent
    found = [x for folder in folders for x in folder.glob("*.tar") if re.search(r"\d+$", x.stem)]
    return {int(re.search(r"\d+$", x.stem)[0]): x for x in reversed(found)}


def shar_of(cuts):
    """The tar of recordings beside a part of Lhotse Shar, or None."""
    found = re.fullmatch(r"cuts\.(.+?)\.jsonl(\.gz)?", cuts.name)
    tar = cuts.with_name(f"recording.{found[1]}.tar") if found else None
    return tar if tar is not None and tar.exists() else None


def lacking(cuts):
    raise ListError(cuts, "lacks the tar of its recordings beside it")


def manifest_of(tar):
    """NeMo's manifest of a tar, for it alone or for all beside it; or None."""
    number = re.search(r"\d+$", tar.stem)
    places = tar.parent, tar.parent / "sharded_manifests"
    own = [folder / f"manifest_{number[0]}.json" for folder in places if number]
    return next((x for x in (*own, tar.parent / "tarred_audio_manifest.json") if x.exists()), None)


@functools.lru_cache(4)
def by_shard(manifest, _changed):
    """{number of a tar: (starts, sizes) of its lines} of a manifest; None: those without a number."""
    import numpy as np

    text, places = unpacked(manifest), {}
    for begin, size in lines_in(text):
        found = re.search(rb'"shard_id"\s*:\s*(\d+)', text[begin : begin + size])
        places.setdefault(int(found[1]) if found else None, []).append((begin, size))
    return {key: tuple(np.array(x).T) for key, x in places.items()}


def of_tar(tar):
    """The shard of a tar, with its manifest if there is one."""
    manifest = manifest_of(tar)
    if manifest is None:
        return Tar(str(tar))
    places = None
    if manifest.name == "tarred_audio_manifest.json":
        known = by_shard(str(manifest), manifest.stat().st_mtime_ns)
        number = re.search(r"\d+$", tar.stem)
        places = known.get(int(number[0]) if number else None)
        places = places if places is not None else known.get(None, ((), ()))
    return Paired(str(tar), str(manifest), places)


def of_archive(name):
    """Shards of an archive, or of a folder of some; None: it is none."""
    path = Path(name)
    if not is_archive(name):
        return None
    if path.is_dir():
        return [x for file in of_folder(path) for x in of_archive(file) or lacking(file)]
    if path.suffix == ".parquet":
        return [Parquet(str(path), i) for i in range(opened_parquet(str(path)).num_row_groups)]
    if tar := shar_of(path):
        return [Paired(str(tar), str(path))]
    if tars := tars_of(path):
        known = by_shard(str(path), path.stat().st_mtime_ns)
        if missing := sorted({*known} - {*tars} - {None}):
            raise ListError(path, f"names {len(missing)} tars that are not beside it: number {missing[0]}")
        return [Paired(str(tars[i]), str(path), known[i]) for i in sorted({*known} & {*tars})]
    return [of_tar(path)]


def of(name, keys, columns=(), readers=1):
    """The shards of any source. Lists that are no archives are cut such that each reader has several."""
    found, several = [], 8 * readers
    for x in expanded(name):
        shards = of_archive(x)
        path = Path(x)
        if shards is None and manifests.suffix_of(path) in (".jsonl", ".ndjson", ".json") and not packed(path):
            shards = of_lines(path, several)
        if shards is None:
            entries = list(manifests.read(x, *columns))
            size = min(LISTED, -(-len(entries) // several))
            shards = [Listed(x, tuple(entries[i : i + size])) for i in range(0, len(entries), size)]
        found += shards
    return found


def of_lines(path, several):
    """Parts of a manifest of JSON lines, or None if it is none of them."""
    with open(path, "rb") as file:
        start = file.read(2)
        if start[:1] != b"{":
            return None
        file.seek(0)
        shards, begin, number = [], 0, 1
        size = min(LINES, -(-os.path.getsize(path) // several))
        while data := file.read(size):
            data += file.readline()
            shards.append(Lines(str(path), begin, begin + len(data), number))
            begin, number = begin + len(data), number + data.count(b"\n")
    return shards
