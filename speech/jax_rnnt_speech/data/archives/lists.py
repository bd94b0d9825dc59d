"""Parts of lists that are no archives, so that they are read as shards are."""

import dataclasses
import os
from pathlib import Path

from jax_rnnt_speech.data import manifests
from jax_rnnt_speech.data.archives.paired import described, packed
from jax_rnnt_speech.data.archives.storage import bytes_of, nth
from jax_rnnt_speech.data.manifests import Fault

LINES = 2**20  # bytes of a manifest that are one shard
LISTED = 1000  # utterances of other lists that are one shard


@dataclasses.dataclass(frozen=True)
class Lines:
    """A part of a manifest of JSON lines. Rows: (number, 0), (start, size) of a line."""

    path: str
    begin: int
    end: int
    number: int  # of its first line

    @property
    def amount(self):
        return self.end - self.begin

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
    def amount(self):
        return len(self.entries)

    @property
    def files(self):
        return [self.path]

    def read(self, keys, brief=False):
        for i, x in enumerate(self.entries):
            yield x if isinstance(x, Fault) else ((i, 0, 0, 0, 0), x)

    def entry(self, row, keys, sought=True):
        return self.entries[row[0]]


def shards(path, columns, several):
    """Those of a list. Of each there are so many that every reader has some."""
    path = Path(path)
    if manifests.suffix_of(path) in (".jsonl", ".ndjson", ".json") and not packed(path):
        if (found := of_lines(path, several)) is not None:
            return found
    entries = list(manifests.read(path, *columns))
    size = min(LISTED, -(-len(entries) // several))
    return [Listed(str(path), tuple(entries[i : i + size])) for i in range(0, len(entries), size)]


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
