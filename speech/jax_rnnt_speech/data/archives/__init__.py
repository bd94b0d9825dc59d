"""Shards: archives of recordings, or parts of a manifest, any utterance of which can be read by itself.

Each module of `KINDS` is a kind of archive. Messages call it `KIND`. Names of its files in a folder match `NAMES`,
`takes` says whether a path is one, and `shards` makes its shards. The first kind that takes a path has it.
"""

import glob
import os
import re
import unicodedata
from pathlib import Path

from jax_rnnt_speech.data.archives import nemo, parquet, parts, shar, tars
from jax_rnnt_speech.data.lists import ListError, once, say
from jax_rnnt_speech.data.names import SUFFIXES, actual, is_hidden

KINDS = shar, nemo, tars, parquet
RANGE = re.compile(r"(?:_OP_|\{)(\d+)\.\.(\d+)(?:_CL_|\})")


def expanded(name):
    """Returns the names that a pattern or a range matches; a name that is neither by itself."""
    name = str(name)
    if os.path.exists(path := actual(name)):
        return [str(path)]
    if match := RANGE.search(name):
        first, last = int(match[1]), int(match[2])
        width = len(match[1]) if match[1].startswith("0") else 0
        names = [name[: match.start()] + f"{i:0{width}}" + name[match.end() :] for i in range(first, last + 1)]
        names = [y for x in names for y in (expanded(x) if RANGE.search(x) else [str(actual(x))])]
        if missing := [x for x in names if not os.path.exists(x)]:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ListError(name, f"lacks {len(missing)} of {len(names)} files: {', '.join(missing[:3])}{more}")
        return names
    forms = dict.fromkeys([name, *(unicodedata.normalize(x, name) for x in ("NFC", "NFD"))])
    paths = sorted(
        {x for form in forms for x in glob.glob(form, recursive=True) if is_hidden(name) or not is_hidden(x)}
    )
    if not paths and glob.has_magic(name):
        raise ListError(name, "matches no file")
    return list(map(str, once(paths))) or [name]


def is_pattern(name):
    """Returns True if a name may stand for several files."""
    return not os.path.exists(actual(name)) and bool(RANGE.search(str(name)) or glob.has_magic(str(name)))


def weighted(name):
    """Returns (name, weight or None) of NAME:WEIGHT, where NAME alone is a source."""
    rest, _, number = str(name).rpartition(":")
    number = re.fullmatch(r"\d+(\.\d+)?|\.\d+", number) and number
    if rest and number and not os.path.exists(name) and (os.path.exists(rest) or is_pattern(rest)):
        return rest, float(number)
    return str(name), None


def wanted(paths):
    """Returns True if sources are read on the fly by default: archives, and sources with weights."""
    return any(weight is not None or is_archive(x) for x, weight in map(weighted, paths))


def archives_of_folder(folder):
    """Returns (kind, archives) of a folder and of the folders in it; none where there is audio too."""
    files = []
    for x in [*os.scandir(folder)]:
        files += os.scandir(x) if x.is_dir() else [x]
    files = [x for x in files if not is_hidden(os.path.relpath(x.path, folder))]
    if not any(os.path.splitext(x.name)[1].lower() in SUFFIXES for x in files):
        files = sorted(Path(x.path) for x in files)
        for kind in KINDS:
            some = [x for x in files if re.fullmatch(kind.NAMES, x.name)]
            if any(map(kind.takes, some)):
                return kind, once(some)
    return None, []


def kind_of(path):
    """Returns the module of an archive's kind, or None."""
    return next((kind for kind in KINDS if kind.takes(path)), None)


def is_archive(name):
    """Returns True if the name is an archive, or a folder, range or pattern of archives."""
    path = Path(str(name))
    if is_pattern(name):
        return any(map(is_archive, expanded(name)[:1]))
    if path.is_dir():
        plain = any((path / x).exists() for x in ("wav.scp", "metadata.jsonl", "metadata.csv"))
        return not plain and archives_of_folder(path)[0] is not None
    return kind_of(path) is not None


def shards_of(name):
    """Returns the shards of an archive, or of a folder of archives; None if it is neither."""
    path = Path(name)
    if not is_archive(name):
        return None
    if not path.is_dir():
        return kind_of(path).shards(path)
    usual, files = archives_of_folder(path)
    return [x for file in files for x in (kind_of(file) or usual).shards(file)]


def sources(name):
    """Returns [(path, shards or None)] for everything that a name matches. Parts of others are not read by themselves.

    A pattern may match a tar and the manifest that is for it, or two manifests for one tar.
    """
    listed = [(x, shards_of(x)) for x in expanded(name)]
    if len(listed) == 1:
        return listed
    shards = [
        (-len(x.files), i, *map(os.path.realpath, x.files)) for i, (_, some) in enumerate(listed) for x in some or ()
    ]
    lines, owner = {file for x in shards for file in x[3:]}, {}
    for _, i, file, *_ in sorted(shards):  # those with a manifest first
        owner.setdefault(file, i)
    for i, (path, some) in enumerate(listed):
        inside = glob.glob(f"{glob.escape(path)}/*") or [path]
        if some is None:
            left = None if {os.path.realpath(x) for x in inside} - lines else []
        else:
            left = [x for x in some if owner[os.path.realpath(x.path)] == i]
        if left is not None and len(left) < max(1, len(some or ())):
            say(f"{path} is not read by itself: another source that {name} matches has it")
        listed[i] = path, left
    return [x for x in listed if x[1] != []]


def all_shards(name, columns=(), readers=1):
    """Returns the shards of any source. Lists that are no archives are cut such that each reader has several."""
    every = []
    for x, shards in sources(name):
        every += parts.shards(x, columns, 8 * readers) if shards is None else shards
    return every
