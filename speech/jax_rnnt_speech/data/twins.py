"""Files that stand for the same thing: compressed and not, as lines and as an array, in two forms of Unicode.

Where a person names a folder or a pattern, the same is not read twice, and no one of two that differ is chosen.
"""

import functools
import gzip
import itertools
import zlib
from pathlib import Path

from jax_rnnt_speech.data.names import composed
from jax_rnnt_speech.system import say_once

PACKED = ".gz", ".bz2", ".xz", ".zst"
ARCHIVES = ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst"
say = functools.cache(say_once)


def plain(path):
    """(name without what says how it is packed or written, whether it is a tar)."""
    name = composed(path.name)
    packed = name.lower().endswith(PACKED)
    base, dot, suffix = (name.rpartition(".")[0] if packed else name).rpartition(".")
    tar, known = f".{suffix.lower()}" in ARCHIVES, f".{suffix.lower()}" in lists()
    return (base if dot and (tar or known) else name), tar


def lists():
    """The suffixes of manifests."""
    from jax_rnnt_speech.data import manifests  # which finds twins in folders

    return manifests.LISTS


def once(paths, same=False, named=False):
    """The paths, but of those that stand for the same thing one; a line says so. Raises where they differ.

    `same`: all of them do, whatever their names are. `named`: a person named each, so that those that differ are kept.
    """
    paths, found = [Path(x) for x in paths], set()
    some = paths if same else sorted(filter(Path.is_file, paths), key=key)
    for _, group in itertools.groupby(some, lambda x: same or key(x)[:3]):
        first, *others = group
        for x in others:
            if not plain(x)[1] and content(x) != content(first):
                from jax_rnnt_speech.data.manifests import ListError

                if named:
                    continue
                raise ListError(x, f"and {first} stand for the same, and differ: leave one of them out")
            say(f"{x} is not read: {first} stands for the same")
            found.add(x)
    return [x for x in paths if x not in found]


def key(path):
    """What those that stand for the same have in common; behind it, an order in which the best form comes first."""
    return (str(path.parent), *plain(path), path.name.lower().endswith(PACKED), str(path))


def content(path):
    """What a manifest says, in whatever form; its bytes where it says nothing."""
    from jax_rnnt_speech.data import manifests

    try:
        rows = lists()[manifests.suffix_of(path)](path, manifests.keys_of())
        rows = [row if isinstance(row, dict) else {"": row} for _, row in rows]
        return [{key: str(x) for key, x in row.items() if not manifests.missing(x)} for row in rows]
    except (KeyError, manifests.ListError, OSError, EOFError, zlib.error, gzip.BadGzipFile):
        return path.read_bytes()
