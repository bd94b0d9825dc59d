"""Where each utterance of some shards is, and how long it lasts: what an order over them needs, and nothing decoded.

Seconds come from the manifest or from the header of the audio. They are kept in a folder and mapped into memory, so
that another start reads no header, and workers share one copy.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np

from jax_rnnt_speech.data import archives, audio, cache, headers, manifests, workers
from jax_rnnt_speech.data.manifests import Fault
from jax_rnnt_speech.system import UserError, outputs

FORM = 1  # of the files: another number makes them anew
HEAD = 256  # bytes of a header
THREADS = 16  # that read headers, in each process
ARRAYS = "rows", "seconds", "shards"


class Index:
    """What a folder holds. To a worker, the name of the folder goes alone."""

    def __init__(self, folder, number):
        self.folder, self.number = folder, number  # that of the reader

    def __reduce__(self):
        return Index, (self.folder, self.number)

    def array(self, name):
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")

    @functools.cached_property
    def rows(self):
        """int64 [n, 5], as the shards understand them."""
        return self.array("rows")

    @functools.cached_property
    def seconds(self):
        """float32 [n]; below 0 where they are an estimate."""
        return self.array("seconds")

    @functools.cached_property
    def shards(self):
        """int32 [n], numbers of shards, which ascend."""
        return self.array("shards")

    @property
    def faults(self):
        """[reason, name] of what can never be used."""
        return json.loads((self.folder / "faults.json").read_text("utf-8"))


def seconds_of(entry, manifest):
    """How long an utterance of a manifest lasts by what is written; below 0 where that is an estimate."""
    if not isinstance(entry, manifests.Entry):
        beside = os.path.join(manifest.parent, entry[0])
        return of_header(beside if os.path.isfile(beside) else manifests.located(entry[0], manifest))
    if entry.end is not None:
        return entry.end - entry.start
    named = isinstance(entry.audio, str) and not entry.whole
    whole = entry.whole or of_header(manifests.located(entry.audio, manifest) if named else entry.audio)
    return np.copysign(max(abs(whole) - entry.start, 0.0), whole)


def of_header(recording):
    """Seconds of a recording by its header, below 0 where they are an estimate; an AudioError where there are none."""
    member = isinstance(recording, archives.Member)
    place, size = (recording.place, recording.size) if member else (0, None)
    if isinstance(recording, archives.Cell):
        data = recording.loaded()
        size = data.getbuffer().nbytes
        return of_bytes(data.read(HEAD), size) or probed(recording, data, 0, size)
    name = recording.archive if member else str(recording)
    try:
        with open(name, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            file.seek(place)
            return of_bytes(file.read(HEAD), size) or probed(recording, file, place, place + size)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise audio.AudioError(recording, "no such file") from None
    except IsADirectoryError:
        raise audio.AudioError(recording, "a folder, not a file") from None


def of_bytes(start, size):
    """Seconds of FLAC and of WAV, or None where they are not where they usually are."""
    if start[:4] == b"fLaC" and start[4] & 127 == 0 and len(start) >= 26:
        rate = int.from_bytes(start[18:21], "big") >> 4
        samples = int.from_bytes(start[21:26], "big") & (2**36 - 1)
        return samples / rate if rate and samples else None
    if re.match(rb"RIFF....WAVEfmt ", start, re.DOTALL):
        a_second, place = int.from_bytes(start[28:32], "little"), 12
        while len(chunk := start[place : place + 8]) == 8:
            length, place = int.from_bytes(chunk[4:], "little"), place + 8
            if chunk[:4] == b"data":
                return min(length, size - place) / a_second if a_second and length else None
            place += length + length % 2
    return None


def probed(recording, file, begin, end):
    """Seconds that FFmpeg finds in a header or estimates from a size, below 0."""
    import av

    named = headers.Part(Named(file, str(recording)), begin, end)
    options = {"format_whitelist": audio.FORMATS}
    with contextlib.suppress(av.error.FFmpegError), av.open(named, options=options, **audio.TAGS) as container:
        if container.duration:
            return -container.duration / av.time_base
    return -audio.seconds(audio.stretches(recording))  # nothing but decoding tells


class Named:
    """A file with a name."""

    def __init__(self, file, name):
        self.read, self.seek, self.tell, self.name = file.read, file.seek, file.tell, name


def scanned(shard, keys):
    """(rows, seconds, faults) of a shard."""
    rows, seconds, faults, manifest = [], [], [], Path(shard.path)
    for x in shard.read(keys):
        if type(x[1]) is tuple and x[1][1]:  # the seconds of a usual line
            rows.append(x[0])
            seconds.append(x[1][1])
            continue
        if isinstance(x, Fault):
            faults.append([x.reason, x.name])
            continue
        try:
            found = archives.steadily(functools.partial(seconds_of, x[1], manifest), shard.path)
        except (audio.AudioError, manifests.LineError) as error:
            if getattr(error, "passing", False):
                raise archives.StorageError(str(error)) from None
            name = x[1].name if isinstance(x[1], manifests.Entry) else x[1][0]
            faults.append([getattr(error, "reason", str(error)), name])
            continue
        rows.append(x[0])
        seconds.append(found)
    return np.array(rows, np.int64).reshape(-1, 5), np.array(seconds, np.float32), faults


class Scan:
    """Scans shards by their numbers. Errors are results, as Grain's workers would print them with a traceback."""

    def __init__(self, shards, keys):
        self.shards, self.keys = shards, keys

    def __call__(self, i):
        try:
            return scanned(self.shards[i], self.keys)
        except UserError as error:
            return str(error)


def indexed(shards, keys, folder, number=0, count=0):
    """The Index of the shards of a reader, by its number, from the folder, or read by so many processes."""
    files = dict.fromkeys(x for shard in shards for x in shard.files)
    stamps = [cache.stamp(x) for x in files]
    parts = [[type(x).__name__, *x.files, *(str(y) for y in vars(x).values() if isinstance(y, int))] for x in shards]
    decided = json.dumps([FORM, stamps, parts, keys], default=str)
    folder = folder / f"index-{hashlib.sha256(decided.encode()).hexdigest()[:16]}"
    if not folder.is_dir() or outputs.damage(folder):
        fill(shards, keys, folder, count)
    return Index(folder, number)


def fill(shards, keys, folder, count):
    import grain

    read = grain.MapDataset.source(range(len(shards))).map(Scan(shards, keys))
    found, faults = [], []
    for x in outputs.bar(workers.items(read, THREADS, count), "shards", len(shards)):
        if isinstance(x, str):
            raise UserError(x)
        found.append(x[:2])
        faults += x[2]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with outputs.whole(folder) as part:
        part.mkdir()
        empty = np.zeros((0, 5), np.int64), np.zeros(0, np.float32)
        rows, seconds = map(np.concatenate, zip(*[*found, empty]))
        shard = np.repeat(np.arange(len(found), dtype=np.int32), [len(x) for x, _ in found])
        for key, x in zip(ARRAYS, (rows, seconds, shard)):
            np.save(part / f"{key}.npy", x)
        (part / "faults.json").write_text(json.dumps(faults), "utf-8")
        outputs.seal(part)
