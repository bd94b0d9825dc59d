"""What the names of sources stand for, before anything is read: which files, of which splits, of about how many hours.

A folder or pattern whose files belong to several splits of a data set is refused, as a training would learn what is
held out. Nor may --train and --valid name the same files.
"""

import collections
import contextlib
import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.config.options import names
from jax_rnnt_speech.data import archives, corpora, index, manifests
from jax_rnnt_speech.data.archives import nemo, parquet, shar, tars
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.system import UserError

# Words in names of files and folders, which end at anything but a letter, as Hugging Face's datasets looks for them.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
KINDS = {tars: "tar", nemo: "NeMo's tar", shar: "Lhotse Shar", parquet: "Parquet", None: "manifest"}
AUDIO, KALDI = "audio", "Kaldi"
NAMED = 3  # files or sources that a line names
PROBED = 100  # utterances whose headers are read to estimate hours
SHARDS = 8  # shards of a source that are listed for that


class File(NamedTuple):
    """A file of a source."""

    path: str
    kind: str
    split: str  # "": no name says one
    group: str  # a folder or pattern that has the files of this split, or the file


def word_of(name):
    """(the split that a name says, where its word ends), or None."""
    words = re.finditer(r"[^\W\d_]+", name)
    return next(((SPLITS[x[0].lower()], x.end()) for x in words if x[0].lower() in SPLITS), None)


@functools.lru_cache(10_000)
def of_folders(base, folder):
    """(split, group) by the names of the folders from a base on; the outermost that says one decides."""
    parts = [x for x in os.path.relpath(folder or ".", base).split(os.sep) if x != "."]
    for i, part in enumerate(parts, 1):
        if found := word_of(part):
            return found[0], os.path.join(base, *parts[:i])
    return "", os.path.join(base, parts[0]) if parts else ""


def split_of(base, path, with_name):
    """(split, group) of a file by its folders from a base on, and perhaps by its name."""
    folder, name = os.path.split(path)
    split, group = of_folders(str(base), folder)
    if not split and with_name and (found := word_of(name)):
        split, end = found
        return split, os.path.join(folder, f"{name[:end]}*{os.path.splitext(name)[1]}")
    return split, group or str(path)


def files_of(name):
    """The Files that a source names."""
    name, found = archives.weighted(name)[0], []
    several = archives.is_pattern(name)
    fixed = os.path.dirname(re.split(r"[*?[{]|_OP_", name)[0])
    for path in map(Path, archives.expanded(name)):
        kind, inside = KINDS[archives.kind_of(path)], [path]
        if path.is_dir() and archives.is_archive(path):
            module, inside = archives.of_folder(path)
            kind = KINDS[module]
        elif (path / "wav.scp").exists():
            kind, inside = KALDI, [path / "wav.scp"]
        elif path.is_dir():
            kind, inside = AUDIO, [x for x in manifests.below(path) if x.suffix.lower() in manifests.SUFFIXES]
        base = fixed if several else path if path.is_dir() else path.parent
        splits = [split_of(base, x, True) for x in inside]
        if kind == AUDIO and not all(split for split, _ in splits):  # names of recordings may be words that are spoken
            splits = [split_of(base, x, False) for x in inside]
        found += [File(str(x), kind, *y) for x, y in zip(inside, splits)]
    return found


def listed(sources):
    """The Files of each source, by its name; of none that a function makes, or that cannot be read."""
    found = {}
    for x in map(str, names(sources)):
        if not corpora.by_function(x):
            found[x] = []
            with contextlib.suppress(OSError):  # it is an error once it is read
                found[x] = files_of(x)
    return found


def described(every):
    """The sources of an option in a line, with their files by kind and split."""
    found = []
    for name, files in [*every.items()][:NAMED]:
        kinds = ", ".join(f"{n:,} file{'s' * (n > 1)} of {x}" for x, n in counted(x.kind for x in files))
        splits = [(x or "no split", n) for x, n in counted(x.split for x in files)]
        each = ", ".join(f"{n:,} of {x}" for x, n in splits) if len(splits) > 1 else ""
        found.append(f"{shown(name)} ({kinds}{': ' * bool(each)}{each})" if files else shown(name))
    return ", ".join([*found, *[f"{len(every) - NAMED} more"] * (len(every) > NAMED)])


def counted(some):
    return collections.Counter(some).items()


def unmixed(option, every, held_out=True):
    """Raises where a source has several splits. A training may have files beside those of its split."""
    for name, files in every.items():
        found = collections.defaultdict(lambda: collections.defaultdict(list))
        for x in files:
            found[x.split][x.group].append(x.path)
        if len(found) < 2 or (not held_out and found.keys() <= {"", "train"}):
            continue
        each = []
        for split, groups in found.items():
            some = [x if len(paths) > 1 or "*" not in x else paths[0] for x, paths in groups.items()]
            some = [*map(shown, some[:NAMED]), *[f"{len(some) - NAMED} more"] * (len(some) > NAMED)]
            each.append(f"{sum(map(len, groups.values())):,} of {split or 'no split'} ({', '.join(some)})")
        raise UserError(f"{f'{option} {shown(name)}'.strip()} mixes splits, by the names of its files and folders: "
                        f"{'; '.join(each)}; name those that you mean, patterns in quotes")  # fmt: skip


def apart(trained, tested):
    """Raises where a training would be tested on files that it is trained on."""
    real = {os.path.realpath(x.path) for files in trained.values() for x in files}
    both = [x for files in tested.values() for x in files if os.path.realpath(x.path) in real]
    if not both:
        return
    what = shown(both[0].path) + f" and {len(both) - 1:,} more files" * (len(both) > 1)
    parts = "put some of its lines into a manifest for --valid, and the others into one for --train"
    if both[0].kind != KINDS[None]:
        parts = "name some of the folders or files for --valid, and the others for --train"
    raise UserError(f"--train and --valid both read {what}, so that error rates would be those of the training: {parts}"
                    ", best by speakers; to see a model learn its data by heart, name a manifest for --valid that "
                    "lists the same audio")  # fmt: skip


def in_both(train, valid):
    """How many utterances of a corpus of recordings are also in another one, or in the sample of one on the fly."""
    valid = getattr(valid, "corpus", valid)
    held_out = {key(x) for x in getattr(valid, "entries", ())}
    bases = {os.path.basename(audio) for audio, *_ in held_out}
    train = getattr(train, "corpus", train)
    found = getattr(train, "entries", ())
    if hasattr(train, "places"):
        near = ((train.indices[k], i) for k, i in train.places)
        found = (x.entry(i) for x, i in near if os.path.basename(str(x.entry(i, False).audio)) in bases)
    return len(held_out & {key(x) for x in found if isinstance(x, manifests.Entry)})


def key(entry):
    """What tells an utterance from others: its recording, and where it is in that."""
    return os.path.realpath(str(entry.audio)), entry.start, entry.end, entry.channel


def hours(sources, columns):
    """About how many hours sources hold, by a part of what their manifests say, and by some headers."""
    keys, total = manifests.keys_of(*columns), 0.0
    for name in sources:
        shards, rows, seconds = archives.of(archives.weighted(name)[0], columns), [], []
        chosen = np.unique(np.linspace(0, len(shards) - 1, SHARDS).astype(int)) if shards else []
        for shard in (shards[i] for i in chosen):
            for x in shard.read(keys, brief=True):
                if type(x) is not manifests.Fault:
                    rows.append((shard, x[0]))
                    seconds.append((x[1][1] or 0.0) if type(x[1]) is tuple else index.written(x[1]))
        if not all(seconds):
            some = np.unique(np.linspace(0, len(rows) - 1, PROBED).astype(int))
            found = [seconds[i] or index.by_header(rows[i][0].entry(rows[i][1], keys)) for i in some.tolist()]
            seconds = [np.nan_to_num(np.abs(found)).mean() * len(rows)]
        share = sum(shards[i].amount for i in chosen) / max(1, sum(x.amount for x in shards))
        total += sum(seconds) / 3600 / (share or 1)
    return total
