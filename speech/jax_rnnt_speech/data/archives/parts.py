"""Parts of lists that are no archives, which are read as shards are."""

import dataclasses
import os
from pathlib import Path

from jax_rnnt_speech.data import lists, rows
from jax_rnnt_speech.data.archives.paired import described, packed
from jax_rnnt_speech.data.archives.storage import Shard, bytes_of

LINES = 2**20  # bytes of a manifest in one shard
LISTED = 1000  # utterances of other lists in one shard


@dataclasses.dataclass(frozen=True)
class Lines(Shard):
    """A part of a manifest of JSON lines. Rows are (number, 0), (start, size) of a line."""

    begin: int
    end: int
    number: int  # number of its first line

    @property
    def amount(self):
        return self.end - self.begin

    def located(self, keys, brief):
        place, data = self.begin, bytes_of(self.path, self.begin, self.end - self.begin)
        for number, line in enumerate(data.split(b"\n"), self.number):
            if line.strip():
                usual, name = rows.plain(line, keys), f"{self.base} line {number}"
                yield (number, 0, place, len(line)), [usual] if usual else described(line, lambda x: x, name, keys)
            place += len(line) + 1

    def entries_at(self, where, keys, sought):
        number, _, place, size = where
        line, path = bytes_of(self.path, place, size), Path(self.path) if sought else lambda name: name
        return described(line, path, f"{self.base} line {number}", keys)


@dataclasses.dataclass(frozen=True)
class Listed(Shard):
    """Entries and Faults of any other list, in memory. A row is the number of one."""

    entries: tuple

    @property
    def amount(self):
        return len(self.entries)

    def located(self, keys, brief):
        return (((i, 0, 0, 0), [x]) for i, x in enumerate(self.entries))

    def entries_at(self, where, keys, sought):
        return [self.entries[where[0]]]


def shards(path, columns, several):
    """Returns the shards of a list, so many that every reader has some."""
    path = Path(path)
    lines = lists.suffix_of(path) in (".jsonl", ".ndjson", ".json") and not packed(path)
    if lines and (parts := parts_of_manifest(path, several)) is not None:
        return parts
    entries = list(lists.read(path, *columns))
    size = min(LISTED, -(-len(entries) // several))
    return [Listed(str(path), tuple(entries[i : i + size])) for i in range(0, len(entries), size)]


def parts_of_manifest(path, several):
    """Returns the parts of a manifest of JSON lines, or None if it is not one."""
    if not path.is_file():
        return None  # the list's reader says what there is in its place
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
