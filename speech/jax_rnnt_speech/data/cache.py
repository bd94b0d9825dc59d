"""What a training reads again and again, on disk: features, rows of a frozen encoder, lengths of audio files.

Arrays are float16, in one file for a corpus, which is mapped into memory. The folder's name is a hash of all that
decides them; whoever changes any of it makes another folder.
"""

import hashlib
import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jax_rnnt_speech.data import audio
from jax_rnnt_speech.system import UserError, hosts, outputs, refuse_if

FORM = 2  # of the files: another number makes them anew
READERS = 4  # threads that make features
AGAIN = "again"  # a file in a folder that lacks what could not be read then: the next start makes it anew
LIMIT = np.finfo(np.float16).max


def stamp(path):
    """What tells that a file has changed."""
    known = os.stat(getattr(path, "archive", path))
    return [str(path), known.st_size, known.st_mtime_ns]


class Lengths:
    """Stretches of audio files, or why they cannot be read, from earlier starts. Without a folder it forgets."""

    def __init__(self, folder=None):
        self.path, self.known = folder and folder / "lengths.json", {}
        try:
            stored = json.loads(self.path.read_text("utf-8")) if self.path else {}
            self.known = stored["files"] if stored.get("form") == FORM else {}
        except (OSError, ValueError):
            pass  # they are decoded anew

    def of(self, path):
        """Stretches of a file, or an AudioError."""
        try:
            now = stamp(path)[1:]
        except (OSError, ValueError):
            now = None
        known = self.known.get(str(path))
        if known and now == known[:2]:
            found = known[2]
            return audio.AudioError(path, found) if isinstance(found, str) else [audio.Stretch(*x) for x in found]
        try:
            found = audio.stretches(path)
        except audio.AudioError as error:
            found = error
        bad = isinstance(found, audio.AudioError)
        if now and not (bad and found.passing):
            self.known[str(path)] = [*now, found.reason if bad else found]
        return found

    def write(self):
        if self.path and not jax.process_index():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({"form": FORM, "files": self.known}), "utf-8")
            part.replace(self.path)


class Stored:
    """A corpus whose arrays [T, features] lie in a folder; utterances without readable audio have none.

    `made` yields (number of the utterance, array or None) if the folder is not there yet.
    """

    def __init__(self, corpus, folder, key, features, made):
        self.corpus, self.report, self.hop, self.features = corpus, corpus.report, corpus.hop, features
        self.utterances, self.key = corpus.utterances, key
        digest = hashlib.sha256(json.dumps([FORM, key], default=str).encode()).hexdigest()[:16]
        self.folder = folder / digest
        if not jax.process_index():
            if (self.folder / AGAIN).exists():
                outputs.remove(self.folder)
            elif self.folder.is_dir() and (found := outputs.damage(self.folder)):
                print(f"the cache {self.folder} is damaged, and made anew: {found}", file=sys.stderr)
                outputs.remove(self.folder)
            if not self.folder.is_dir():
                self.fill(made)
        hosts.wait(f"{self.folder.name} is filled")
        self.open()

    def open(self):
        self.index = np.load(self.folder / "index.npy")
        for why, names in json.loads((self.folder / "left-out.json").read_text("utf-8")).items():
            for name in names:
                self.report.add(why, name, again=False)
        total = int(self.index[:, 1].sum())
        refuse_if(not total, f"no utterance has readable audio{self.report.summary()}")
        self.arrays = np.memmap(self.folder / "arrays", np.float16, "r", shape=(total, self.features))

    def fill(self, made):
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        frames = sum(x.frames for x in self.utterances)
        need, free = 2 * frames * self.features, shutil.disk_usage(self.folder.parent).free
        if need > free:
            room = f"{need / 1e9:.1f} GB in {self.folder.parent}, which has {free / 1e9:.1f}"
            raise UserError(f"--cache needs {room}: name another folder, or none")
        with outputs.whole(self.folder) as part:  # which another run may make meanwhile
            part.mkdir()
            index, place = np.zeros((len(self.utterances), 2), np.int64), 0
            with (part / "arrays").open("wb") as file:
                for i, x in outputs.bar(made, "cache", len(self.utterances)):
                    if x is not None:
                        if not np.abs(x).max(initial=0) <= LIMIT:
                            name = self.utterances[i].name
                            raise UserError(f"{name}: numbers too large for float16: --cache none")
                        file.write(np.ascontiguousarray(x, np.float16).tobytes())
                        index[i], place = (place, len(x)), place + len(x)
            np.save(part / "index.npy", index)
            (part / "left-out.json").write_text(json.dumps(dict(self.report.names)), "utf-8")
            if self.report.passing:
                (part / AGAIN).touch()
            outputs.seal(part)

    def load(self, i, rng):
        first, count = self.index[i]
        return self.arrays[first : first + count].astype(np.float32) if count else None


def folders(corpora):
    """Those that hold the arrays of corpora, and of corpora that these are made of."""
    inner = [x.corpus for x in corpora if isinstance(x, Stored)]
    return {x.folder for x in corpora if isinstance(x, Stored)} | (folders(inner) if inner else set())


def tidy(folder, corpora):
    """Removes what the cache of a run holds for other corpora or settings, and says so."""
    used = folders(corpora)
    other = [x for x in folder.glob("*") if x.is_dir() and x not in used]
    size = sum(y.stat().st_size for x in other for y in x.iterdir())
    for x in other:
        shutil.rmtree(x)
    if other:
        print(f"cache: {size / 1e6:.1f} MB of other settings are removed from {folder}")


def features(corpus, folder):
    """Recordings with their features on disk, all versions of all utterances, if there is a folder."""
    if folder is None:
        return corpus

    def made():
        with ThreadPoolExecutor(READERS) as pool:
            chosen = [i for i, x in enumerate(corpus.utterances) if x.frames]
            yield from zip(chosen, pool.map(lambda i: corpus.load(i, np.random.default_rng(i)), chosen))

    return Stored(corpus, folder, corpus.key(), corpus.features, made())
