"""A cache on disk, for arrays that a training reads again and again: features, and rows of a frozen encoder.

Arrays are float16, in one file for a corpus, which is mapped into memory. The folder's name is a hash of everything
that decides them; whoever changes any of it makes another folder.
"""

import hashlib
import json
import os
import shutil
import sys

import numpy as np

from jax_rnnt_speech.system import UserError, outputs

FORM = 3  # version of the files' form: another number makes them anew
LEFT_OUT = "left-out.json"
AGAIN = "again"  # marks a folder that lacks what could not be read then: the next start makes it anew
THREADS = 4  # threads that make features
LIMIT = np.finfo(np.float16).max


def stamp(path):
    """Returns the path, size and time of a file, which show whether it has changed."""
    status = os.stat(getattr(path, "archive", path))
    return [str(path), status.st_size, status.st_mtime_ns]


def stamps(paths):
    """Returns the stamps of files, None where there is no such file."""
    every = []
    for x in dict.fromkeys(paths):
        try:
            every.append(stamp(x))
        except (OSError, ValueError):
            every.append(None)
    return every


class Stored:
    """Arrays [T, features] by their numbers, in a folder that `stored` has filled. Some numbers have none."""

    def __init__(self, folder, features):
        self.folder, self.features = folder, features
        self.index = np.load(folder / "index.npy")
        total = int(self.index[:, 1].sum())
        self.arrays = np.zeros((0, features), np.float16)
        if total:
            self.arrays = np.memmap(folder / "arrays", np.float16, "r", shape=(total, features))

    def __reduce__(self):
        return Stored, (self.folder, self.features)

    def load(self, i, rng=None):
        first, count = self.index[i]
        return self.arrays[first : first + count].astype(np.float32) if count else None


def stored(folder, key, count, features, report, expected, made, name_of, makes=True):
    """Returns the Stored of a key in a folder of several, for `count` numbers; makes it if it is damaged or missing.

    `expected()` is about how many frames there will be, `made()` yields (number, array or None), and `name_of` has the
    name of a number's utterance. The report gets what is left out as they are made. Without `makes`, another process
    has made it.
    """
    place = folder / hashlib.sha256(json.dumps([FORM, key], default=str).encode()).hexdigest()[:16]
    if makes and (place / AGAIN).exists():
        outputs.remove(place)
    elif makes and place.is_dir() and (damage := outputs.damage(place)):
        print(f"the cache {place} is damaged, and made anew: {damage}", file=sys.stderr)
        outputs.remove(place)
    if makes and not place.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        need, free = 2 * expected() * features, shutil.disk_usage(folder).free
        if need > free:
            room = f"{need / 1e9:.1f} GB in {folder}, which has {free / 1e9:.1f}"
            raise UserError(f"--cache needs {room}: name another folder, or none")
        with outputs.whole(place) as part:  # another run may make it meanwhile
            part.mkdir()
            fill(part, count, made(), name_of)
            (part / LEFT_OUT).write_text(json.dumps([report.names, report.notes]), "utf-8")
            if report.passing:
                (part / AGAIN).touch()
            outputs.seal(part)
    for add, names in zip((report.add, report.note), json.loads((place / LEFT_OUT).read_text("utf-8"))):
        for why, some in names.items():
            for name in some:
                add(why, name, again=False)
    return Stored(place, features)


def fill(folder, count, made, name_of):
    """Writes arrays (number, array or None), and where each one is."""
    index, place = np.zeros((count, 2), np.int64), 0
    with (folder / "arrays").open("wb") as file:
        for i, x in outputs.bar(made, "cache", count):
            if x is not None:
                if not np.abs(x).max(initial=0) <= LIMIT:
                    raise UserError(f"{name_of(i)}: numbers too large for float16: --cache none")
                file.write(np.ascontiguousarray(x, np.float16).tobytes())
                index[i], place = (place, len(x)), place + len(x)
    np.save(folder / "index.npy", index)


def tidy(folder, used):
    """Removes everything from the cache of a run but the folders that are used, and says so."""
    other = [x for x in folder.glob("*") if x.is_dir() and x.name not in used]
    size = sum(y.stat().st_size for x in other for y in x.iterdir())
    for x in other:
        shutil.rmtree(x)
    if other:
        print(f"cache: {size / 1e6:.1f} MB of other settings are removed from {folder}")
