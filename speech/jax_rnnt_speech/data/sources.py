"""Finds the files that names of sources stand for, with their splits and hours, before anything is read.

A folder or pattern whose files belong to several splits of a data set is refused, as a training would learn what is
held out. Nor may --train and --valid name the same files. `source` makes the batches of a training from these files.
"""

import collections
import contextlib
import functools
import gzip
import itertools
import os
import re
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.config.options import names
from jax_rnnt_speech.data import archives, index, lists, texts
from jax_rnnt_speech.data.archives import nemo, parquet, shar, tars
from jax_rnnt_speech.data.names import SUFFIXES, actual
from jax_rnnt_speech.data.rows import SPLIT_KEYS, Entry, Fault, first_of, keys_of
from jax_rnnt_speech.data.utterances import shown
from jax_rnnt_speech.system import UserError

# Words in names of files and folders, which end at anything but a letter, as Hugging Face's datasets looks for them.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
AUDIO, KALDI, MANIFEST = "audio", "Kaldi", "manifest"  # kinds of files that are no archives
NAMED = 3  # files or sources that a line names
PROBED = 100  # utterances whose headers are read to estimate hours
PEEKED = 8  # files or lines of a tar that are read to learn whether its rows name their split
SHARDS = 8  # shards of a source that are listed to estimate hours


class File(NamedTuple):
    """A file of a source."""

    path: str
    kind: str
    split: str  # "" if no name has one
    group: str  # a folder or pattern that has the files of this split, or the file
    rows: tuple = ()  # (split, how many rows name it in a column); empty if there is no such column


def is_list(path):
    """Returns True if `read` takes it for a list of recordings, and not for a recording."""
    listed = actual(path).is_dir() or path.name in lists.KALDI or lists.suffix_of(path) in lists.LISTS
    return listed or archives.is_archive(path) or archives.is_pattern(path)


def read(name, *columns, **options):
    """Yields Entries and Faults of all that a name stands for, as `lists.read`: a list, an archive, or a pattern."""
    if not archives.is_pattern(name):
        yield from lists.read(name, *columns, **options, archive=archives.shards_of)
        return
    for path, shards in archives.sources(name):
        yield from lists.read(path, *columns, **options, archive=lambda _, shards=shards: shards)


def read_all(paths, *columns, lenient=True, texts=True, alone=None):
    """Yields Entries and Faults of several names. If `lenient`, one that cannot be read is a Fault."""
    for path in paths:
        try:
            yield from read(path, *columns, texts=texts, alone=len(paths) == 1 if alone is None else alone)
        except lists.ListError as error:
            if not lenient:
                raise
            yield Fault(error.reason, str(path))


def by_function(name):
    """Returns (FILE.py:FUNCTION, the arguments behind it) of a corpus that a function makes, or None."""
    match = re.fullmatch(r"(.+\.py:\w+)(?::(.+))?", name) if isinstance(name, str) else None
    return match and (match[1], [match[2]] if match[2] else [])


def absolute(name):
    """Returns names of the same corpora that hold in any folder."""
    if not isinstance(name, str):
        return [absolute(x) for x in name]
    if made := by_function(name):
        return ":".join([texts.absolute(made[0]), *map(absolute, made[1])])
    if name and actual(name).exists():
        return str(actual(name).resolve())
    if archives.is_pattern(name):
        return os.path.abspath(name)
    rest, weight = archives.weighted(name)
    return name if weight is None else f"{absolute(rest)}:{weight:g}"


def last_parts(name):
    """Returns the names of the same corpora without their folders."""
    return Path(name).name if isinstance(name, str) else [Path(x).name for x in name]


def word_of(name):
    """Returns (the split in a name, where its word ends), or None."""
    words = re.finditer(r"[^\W\d_]+", name)
    return next(((SPLITS[x[0].lower()], x.end()) for x in words if x[0].lower() in SPLITS), None)


@functools.lru_cache(10_000)
def split_by_folders(base, folder):
    """Returns (split, group) by the names of folders from a base on; the outermost that names a split decides."""
    parts = [x for x in os.path.relpath(folder or ".", base).split(os.sep) if x != "."]
    for i, part in enumerate(parts, 1):
        if word := word_of(part):
            return word[0], os.path.join(base, *parts[:i])
    return "", os.path.join(base, parts[0]) if parts else ""


def split_of(base, path, with_name):
    """Returns (split, group) of a file by its folders from a base on, and perhaps by its name."""
    folder, name = os.path.split(path)
    split, group = split_by_folders(str(base), folder)
    if not split and with_name and (word := word_of(name)):
        split, end = word
        return split, os.path.join(folder, f"{name[:end]}*{os.path.splitext(name)[1]}")
    return split, group or str(path)


def files_of(name):
    """Returns the Files that a source names; none where there is nothing: reading it raises the error."""
    name, files = archives.weighted(name)[0], []
    several = archives.is_pattern(name)
    fixed = os.path.dirname(re.split(r"[*?[{]|_OP_", name)[0])
    for path in filter(Path.exists, map(Path, archives.expanded(name))):
        kind, inside = MANIFEST, [path]
        if path.is_dir() and archives.is_archive(path):
            archive, inside = archives.archives_of_folder(path)
            kind = archive.KIND
        elif (path / "wav.scp").exists() or path.name in lists.KALDI:
            path = path if path.is_dir() else path.parent
            kind, inside = KALDI, [path]
        elif path.is_dir():
            kind, inside = AUDIO, [x for x in lists.below(path) if x.suffix.lower() in SUFFIXES]
        elif archive := archives.kind_of(path):
            kind = archive.KIND
        base = fixed if several else path if path.is_dir() and kind != KALDI else path.parent
        splits = [split_of(base, x, True) for x in inside]
        if kind == AUDIO and not all(split for split, _ in splits):  # names of recordings may be words that are spoken
            splits = [split_of(base, x, False) for x in inside]
        for x, (split, group) in zip(inside, splits):
            rows = rows_of(x, kind)
            files.append(File(str(x), kind, rows[0][0] if len(rows) == 1 else split, group, rows))
    return files


def rows_of(path, kind):
    """Returns (split, how many rows name it) for a manifest, Parquet or tar; nothing where no key names splits."""
    rows = ()
    with contextlib.suppress(UserError, OSError, EOFError, zlib.error):  # reading it later raises the error
        if kind == parquet.KIND:
            file = parquet.opened(str(path))
            columns = [x for x in SPLIT_KEYS if x in file.schema_arrow.names]
            rows = file.read(columns).to_pylist() if columns else ()
        elif kind in (tars.KIND, nemo.KIND) and path.is_file():
            every = (x for shard in archives.shards_of(path) for x in shard.objects())
            first = list(itertools.islice(every, PEEKED))
            if any(isinstance(x, dict) and not x.keys().isdisjoint(SPLIT_KEYS) for x in first):
                rows = [x for x in itertools.chain(first, every) if isinstance(x, dict)]
        elif kind == MANIFEST and (form := lists.LISTS.get(lists.suffix_of(path))):
            with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as data:
                head = data.read(2**16).replace(b"\0", b"")  # also from UTF-16
            head = head if form is lists.objects else head.partition(b"\n")[0]
            if re.search(rb"\b(%s)\b" % "|".join(SPLIT_KEYS).encode(), head):
                rows = [x for _, x in form(path, keys_of()) if isinstance(x, dict)]
    said = [first_of(x, SPLIT_KEYS) for x in rows]
    return tuple(counted(split_of_row(x) for x in said)) if any(said) else ()


def split_of_row(said):
    """Returns the split that a row's column names; "" for none."""
    return (word_of(str(said or "")) or ("",))[0]


def listed(sources):
    """Returns the Files of each source, by its name; without functions, and empty for one that cannot be read."""
    every = {}
    for x in map(str, names(sources)):
        if not by_function(x):
            every[x] = []
            with contextlib.suppress(OSError):  # reading it later raises the error
                every[x] = files_of(x)
    return every


def once(sources):
    """Returns the sources but those that are named twice or whose files others have; a line names those left out."""
    every, some = {}, list(map(str, names(sources)))
    if len(some) < 2 or any(by_function(x) or archives.weighted(x)[1] is not None for x in some):
        return sources  # a weight says how often each is read
    for x in some:
        with contextlib.suppress(UserError, OSError):  # reading it later raises the error
            every[x] = {os.path.realpath(file.path) for file in files_of(x)}
    kept = {str(x) for x in lists.once(dict.fromkeys(some), named=True)}
    for x in sorted(every.keys() & kept, key=lambda x: (len(every[x]), -some.index(x))):
        others = [every[y] for y in kept - {x} if y in every]
        if every[x] and every[x] <= set().union(*others):
            lists.say(f"{x} is not read by itself: other sources that are named have its files")
            kept.remove(x)
        elif both := [y for y in every[x] if any(y in other for other in others)]:
            some_of = f"{len(both):,} of its files, too, such as {both[0]}"
            lists.say(f"{x}: another source has {some_of}: they are read twice")
    if len(set(some)) < len(some):
        lists.say(f"{next(x for x in some if some.count(x) > 1)} is named twice, and read once")
    return [x for x in dict.fromkeys(some) if x in kept]


def places(every):
    """Returns {a file, or the name of an utterance's place in it: the split} for the Files of sources."""
    splits = {x.path: x.split for files in every.values() for x in files}
    return splits | {str(shar.tar_of(Path(x))): split for x, split in splits.items() if shar.tar_of(Path(x))}


def described(every):
    """Describes the sources of an option that have files, in a line, with these files by kind and split."""
    lines, every = [], {name: files for name, files in every.items() if files}
    for name, files in [*every.items()][:NAMED]:
        kinds = ", ".join(f"{n:,} file{'s' * (n > 1)} of {x}" for x, n in counted(x.kind for x in files))
        splits = [(x or "no split", n) for x, n in counted(x.split for x in files)]
        each = ", ".join(f"{n:,} of {x}" for x, n in splits) if len(splits) > 1 else ""
        lines.append(f"{shown(name)} ({kinds}{': ' * bool(each)}{each})")
    return ", ".join([*lines, *[f"{len(every) - NAMED} more"] * (len(every) > NAMED)])


def counted(some):
    return collections.Counter(some).items()


def unmixed(option, every, held_out=True):
    """Raises an error if a source has several splits, by names of files and folders or by a column of its rows."""
    for name, files in every.items():
        splits, rows = collections.defaultdict(lambda: collections.defaultdict(list)), collections.Counter()
        for x in files:
            splits[x.split][x.group].append(x.path)
            rows.update(dict(x.rows))
        source = f"{option} {shown(name)}".strip()
        if mixed(rows, held_out):
            each = ", ".join(f"{n:,} of {split or 'no split'}" for split, n in rows.items())
            said = " or ".join(SPLIT_KEYS)
            raise UserError(f"{source} mixes splits, as its rows say under {said}: {each}; write the rows of each "
                            "split into a file of its own, and name those that you mean")  # fmt: skip
        if not mixed(splits, held_out) or is_a_speaker(files, splits):
            continue
        each = []
        for split, groups in splits.items():
            some = [x if len(paths) > 1 or "*" not in x else paths[0] for x, paths in groups.items()]
            some = [*map(shown, some[:NAMED]), *[f"{len(some) - NAMED} more"] * (len(some) > NAMED)]
            each.append(f"{sum(map(len, groups.values())):,} of {split or 'no split'} ({', '.join(some)})")
        table = any(Path(name, f"metadata.{form}").exists() for form in ("jsonl", "csv"))
        how = "name those that you mean, patterns in quotes"
        how = "write the lines of each split into a manifest of its own" if table else how
        raise UserError(f"{source} mixes splits, by the names of its files and folders: {'; '.join(each)}; {how}")


def mixed(splits, held_out):
    """Returns True if some splits must not be one source. A training may have files that name no split."""
    return len(splits) > 1 and (held_out or not splits.keys() <= {"", "train"})


def is_a_speaker(files, splits):
    """Returns True if the one folder named like a split is rather a person: several folders next to it name none."""
    if len(splits) > 2 or "" not in splits or any(x.kind != AUDIO for x in files):
        return False
    (split,) = splits.keys() - {""}
    parents = {os.path.dirname(x) for x in splits[split]}
    return len(splits[split]) == 1 and sum(os.path.dirname(x) in parents and os.path.isdir(x) for x in splits[""]) > 1


def apart(trained, tested):
    """Raises an error where a training would be tested on files that it is trained on."""
    real = {os.path.realpath(x.path) for files in trained.values() for x in files}
    both = [x for files in tested.values() for x in files if os.path.realpath(x.path) in real]
    if not both:
        return
    what = shown(both[0].path) + f" and {len(both) - 1:,} more files" * (len(both) > 1)
    parts = "put some of its lines into a manifest for --valid, and the others into one for --train"
    if both[0].kind != MANIFEST:
        parts = "name some of the folders or files for --valid, and the others for --train"
    raise UserError(f"--train and --valid both read {what}, so that error rates would be those of the training: {parts}"
                    ", best by speakers; to see a model learn its data by heart, name a manifest for --valid that "
                    "lists the same audio")  # fmt: skip


def in_both(train, valid):
    """Counts the utterances of a corpus of recordings that are also among those that a `Source` samples."""
    held_out = {key(x) for x in getattr(valid, "entries", ())}
    if not held_out or train.corpus is not None:
        return 0
    bases, same = {os.path.basename(audio) for audio, *_ in held_out}, set()
    for place, i in train.places:
        listed = train.indices[place].listing(i, False)
        if isinstance(listed, Entry) and os.path.basename(str(listed.audio)) in bases:
            same.add(key(train.indices[place].listing(i)))
    return len(held_out & same)


def key(entry):
    """Returns what distinguishes an utterance from others: its recording, and its place in that."""
    return os.path.realpath(str(entry.audio)), entry.start, entry.end, entry.channel


def hours(sources, columns):
    """Estimates how many hours sources hold, by a part of what their manifests say, and by some headers."""
    keys, total = keys_of(*columns), 0.0
    for name in sources:
        shards, rows, seconds = archives.all_shards(archives.weighted(name)[0], columns), [], []
        chosen = np.unique(np.linspace(0, len(shards) - 1, SHARDS).astype(int)) if shards else []
        for shard in (shards[i] for i in chosen):
            for x in shard.read(keys, brief=True):
                if type(x) is not Fault:
                    rows.append((shard, x[0]))
                    seconds.append((x[1][1] or 0.0) if type(x[1]) is tuple else index.written(x[1]))
        if not all(seconds):
            some = np.unique(np.linspace(0, len(rows) - 1, PROBED).astype(int))
            lengths = [seconds[i] or index.by_header(rows[i][0].entry(rows[i][1], keys)) for i in some.tolist()]
            seconds = [np.nan_to_num(np.abs(lengths)).mean() * len(rows)]
        share = sum(shards[i].amount for i in chosen) / max(1, sum(x.amount for x in shards))
        total += sum(seconds) / 3600 / (share or 1)
    return total
