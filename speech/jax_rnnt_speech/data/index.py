"""The place and length of each utterance of some shards, which an order over them needs. Nothing is decoded.

Seconds come from the manifest, or from headers of FLAC and WAV that are read with those of a tar. Others are read from
the header of the audio by whoever asks first. All are kept in a folder and mapped into memory, so that another start
reads no header, and workers share one copy. What is read later has a file of its own, as the order of a run depends on
which lengths were there at its start: so it does not matter what an earlier run has read.
"""

import contextlib
import functools
import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jax_rnnt_speech.data import audio, cache, headers, workers
from jax_rnnt_speech.data.archives import storage
from jax_rnnt_speech.data.rows import Fault
from jax_rnnt_speech.system import outputs

FORM = 3  # version of the files' form: another number makes them anew
LITTLE = 1e-3  # seconds of an utterance that begins behind the end of its file
THREADS = 16  # threads that read headers, in each process
PIECE = 100  # headers that one of them reads
ARRAYS = "rows", "seconds", "shards"
SLACK = 0.05  # seconds by which an utterance may be longer than is written, as manifests round
SURE = 1.05, 1.1  # factor, and seconds: an utterance that is stated to exceed a limit by more than this is not decoded
ESTIMATE = 1.05, 0.2  # factor, and seconds: by how much it may be longer than estimated
STATED = {*audio.STATED, *audio.ENDLESS, "ogg"} - {"mpegts", "mpeg"} | {audio.MATROSKA}  # headers have durations


def longest(seconds):
    """Returns the seconds that utterances may last at most, by what is written."""
    return np.where(seconds < 0, -seconds * ESTIMATE[0] + ESTIMATE[1], seconds + SLACK).astype(np.float64)


def surely_longer(seconds, most):
    """Returns True where utterances are longer than a limit however their lengths were rounded or estimated."""
    return np.abs(seconds) > most * SURE[0] + SURE[1]


class Index:
    """The index in a folder. A worker gets the name of the folder with the shards.

    `rows` is int64 [n, 5], as the shards understand them. `seconds` is float32 [n]: below 0 where they are an estimate,
    0 where a header must be read. `shards` is int32 [n], numbers of shards, which ascend.
    """

    def __init__(self, folder, number, listed, keys):
        self.folder, self.number, self.listed, self.keys = folder, number, listed, keys  # the number of the reader
        self.rows, self.seconds, self.shards = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS)

    def __reduce__(self):
        return Index, (self.folder, self.number, self.listed, self.keys)

    @functools.cached_property
    def later(self):
        """Seconds float32 [n] from headers that were read later; 0 where none was, and NaN where that failed."""
        try:
            with open(self.folder / "later", "a+b") as file:
                os.posix_fallocate(file.fileno(), 0, 4 * len(self.seconds))
            return np.memmap(self.folder / "later", np.float32, "r+", shape=self.seconds.shape)
        except OSError:  # no room, or a folder of someone else: nothing is kept
            return np.zeros(self.seconds.shape, np.float32)

    def entry(self, i, sought=True):
        """Returns the Entry or Fault of an utterance. `sought` tells if its audio is looked for."""
        return self.listed[self.shards[i]].entry(self.rows[i].tolist(), self.keys, sought)

    listing = entry

    def lengths(self, items):
        """Returns the seconds of utterances, below 0 for estimates, NaN if they are unknown. Headers may be read."""
        seconds = np.array(self.seconds[items])
        if (unwritten := np.unique(items[seconds == 0])).size:
            left = unwritten[self.later[unwritten] == 0]
            pieces = np.split(left, np.flatnonzero(np.diff(self.shards[left])) + 1)  # each piece belongs to one shard
            pieces = [x[i : i + PIECE] for x in pieces for i in range(0, len(x), PIECE)]
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(self.read, pieces))  # so that errors are raised
            seconds = np.where(seconds == 0, self.later[items], seconds)
        return seconds

    def lengths_of_versions(self, items, versions, speeds, most):
        """Returns (versions, seconds) of items: they may be too long for their version's speed. Headers may be read."""
        seconds = self.lengths(items)
        used = np.isfinite(seconds) & ~surely_longer(seconds, most)  # the others are left out in their turn
        lengths = np.where(used, np.minimum(longest(seconds), most + SLACK), 0)
        plain = lengths / speeds[versions % len(speeds)] > most + SLACK
        versions = np.where(plain, versions - versions % len(speeds), versions)  # at the recording's own speed
        return versions, lengths / speeds[versions % len(speeds)]

    def read(self, items):
        """Reads headers of utterances. Several threads may do it at once, as all get the same."""
        for i in items.tolist():
            self.later[i] = by_header(self.entry(i))

    @property
    def faults(self):
        """[reason, name] of what can never be used."""
        return json.loads((self.folder / "faults.json").read_text("utf-8"))


def written(entry):
    """Returns how long an utterance lasts by what is written, 0 where nothing is."""
    if entry.end is not None:
        return entry.end - entry.start
    whole = entry.whole or getattr(entry.audio, "seconds", 0.0)
    return max(whole - entry.start, LITTLE) if whole else 0.0


def by_header(entry):
    """Returns how long an utterance lasts by its audio's header; below 0 for an estimate, NaN if there is none."""
    if isinstance(entry, Fault):
        return np.nan
    try:
        whole = storage.steadily(functools.partial(seconds_by_header, entry.audio), entry.audio)
    except audio.AudioError:
        return np.nan
    return np.copysign(max(abs(whole) - entry.start, LITTLE), whole)


def seconds_by_header(recording):
    """Returns seconds of a recording by its header, below 0 for an estimate; raises an AudioError if there are none."""
    member = isinstance(recording, storage.Member)
    with audio.opened(recording.archive if member else recording) as file:
        begin = recording.place if member else 0
        end = begin + recording.size if member else file.seek(0, os.SEEK_END)
        part = headers.Part(file, begin, end)
        start = part.at(0, storage.HEAD)
        if stated := headers.seconds(start, end - begin):
            return stated
        if start.startswith(b"RIFF") and len(headers.begins(part)) > 1:  # several files that are joined
            return audio.seconds(audio.stretches(recording))
        headers.correct(part)
        return probed(recording, part)


def probed(recording, part):
    """Returns the seconds that FFmpeg finds in a header, or those that the packets last, below 0.

    FFmpeg estimates the duration of some formats from the size of the file, which may be wrong by any factor where the
    bit rate varies. Their packets are counted, which reads all of the file and decodes nothing.
    """
    import av

    start, (form, options) = part.at(0, 4096), part.raw or (None, {"format_whitelist": audio.FORMATS})
    part.seek(0)
    part.name = os.path.basename(str(recording))
    with (
        contextlib.suppress(av.error.FFmpegError),
        av.open(part, format=form, options=options, **audio.TAGS) as container,
    ):
        kind = container.format.name
        stated = part.raw or kind in STATED or (kind == "mp3" and headers.frames_of_mp3(start) is not None)
        if stated and container.duration:
            return -container.duration / av.time_base
        stream = container.streams.best("audio") or container.streams.audio[0]
        lengths = (x.duration or 0 for x in container.demux(stream))
        if seconds := sum(lengths) * float(stream.time_base or 0):
            return -seconds
    return -audio.seconds(audio.stretches(recording))  # only decoding tells


def scanned(shards, keys, i):
    """Returns (rows, seconds, faults) of a shard."""
    rows, seconds, faults = [], [], []
    for x in shards[i].read(keys, brief=True):
        if isinstance(x, Fault):
            faults.append([x.reason, x.name])
            continue
        rows.append(x[0])
        seconds.append((x[1][1] or 0.0) if type(x[1]) is tuple else written(x[1]))  # of a usual line, or of an Entry
    return np.array(rows, np.int64).reshape(-1, 5), np.array(seconds, np.float32), faults


def indexed(shards, keys, folder, number=0, count=0):
    """Returns the Index of a reader's shards, by its number, from the folder, or read by `count` processes."""
    files = dict.fromkeys(x for shard in shards for x in shard.files)
    stamps = [cache.stamp(x) for x in files]
    parts = [[type(x).__name__, *x.files, *(str(y) for y in vars(x).values() if isinstance(y, int))] for x in shards]
    decided = json.dumps([FORM, stamps, parts, keys], default=str)
    folder = folder / f"index-{hashlib.sha256(decided.encode()).hexdigest()[:16]}"
    if not folder.is_dir() or outputs.damage(folder):
        fill(shards, keys, folder, count)
    return Index(folder, number, shards, keys)


def fill(shards, keys, folder, count):
    scans, faults, read = [], [], functools.partial(scanned, shards, keys)
    for x in outputs.bar(workers.items(read, len(shards), THREADS, count), "shards", len(shards)):
        scans.append(x[:2])
        faults += x[2]
    with outputs.whole_folder(folder) as part:
        empty = np.zeros((0, 5), np.int64), np.zeros(0, np.float32)
        rows, seconds = map(np.concatenate, zip(*[*scans, empty]))
        shard = np.repeat(np.arange(len(scans), dtype=np.int32), [len(x) for x, _ in scans])
        for key, x in zip(ARRAYS, (rows, seconds, shard)):
            np.save(part / f"{key}.npy", x)
        (part / "faults.json").write_text(json.dumps(faults), "utf-8")
        outputs.seal(part)
