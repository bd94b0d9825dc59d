"""Parquet with audio in it, as Hugging Face's datasets write it."""

import dataclasses
import functools
from pathlib import Path

from jax_rnnt_speech.data import audio, manifests
from jax_rnnt_speech.data.archives.storage import ONE, Member, nth, same, steadily
from jax_rnnt_speech.data.manifests import Fault, LineError, ListError
from jax_rnnt_speech.system import UserError

NAMES = r".*\.parquet"


@dataclasses.dataclass(frozen=True)
class Cell(Member):
    """A recording in a row: `place` is the number of its group of rows, `size` that of its row there."""

    column: str = ""

    def loaded(self):
        try:
            found = group_of(self.archive, self.place, self.column)[self.size].as_py()
        except LineError:
            raise audio.AudioError(self, audio.DAMAGED) from None
        return audio.Memory(found["bytes"] if isinstance(found, dict) else found, str(self))


@functools.lru_cache(32)
def opened(path):
    try:
        import pyarrow.parquet as arrow
    except ModuleNotFoundError:
        raise UserError(f"{path}: Parquet needs: pip install pyarrow") from None
    from pyarrow import ArrowInvalid

    def act():
        try:
            return arrow.ParquetFile(path)
        except ArrowInvalid as error:
            raise ListError(path, f"is no Parquet, or not all of it: {str(error).splitlines()[0]}") from None

    return steadily(act, path)


def table_of(path, group, columns):
    """Columns of a group of rows. What Arrow cannot read is no failure of the storage, if that has no number."""

    def act():
        try:
            return opened(path).read_row_group(group, columns=list(columns))
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None):
                raise
            raise LineError(f"rows that cannot be read ({str(error).splitlines()[0]})") from None

    return steadily(act, path)


@functools.lru_cache(8)
def group_of(path, group, column):
    return table_of(path, group, [column])[column]


@dataclasses.dataclass(frozen=True)
class Parquet:
    """A group of rows of a file. Rows: (group, row in it)."""

    path: str
    group: int

    amount = 1

    @property
    def files(self):
        return [self.path]

    def columns(self, keys):
        """(name of the audio's column, names of the others that hold no bytes)."""
        names = opened(self.path).schema_arrow.names
        sound = next((x for x in keys[0] if x in names), None)
        if sound is None:
            raise ListError(self.path, f"must have one of the columns {', '.join(keys[0])}, got {names}"[:1000])
        return sound, [x for x in names if x != sound]

    def read(self, keys, brief=False):
        try:
            found = self.rows(keys)
        except LineError as error:
            yield Fault(str(error), f"{Path(self.path).name} {self.group}")
            return
        for i, row in enumerate(found):
            for part, entry in enumerate(self.entries(i, *row, keys)):
                yield entry if isinstance(entry, Fault) else ((self.group, i, 0, 0, part), entry)

    def rows(self, keys):
        """(name of the audio's column, whether a row has audio, its path or None, what else it has) of each row."""
        sound, names = self.columns(keys)
        cells = cells_of(self.path, self.group, sound)
        others = rows_of(self.path, self.group, tuple(names)) if names else [{}] * len(cells)
        return [(sound, *cell, row) for cell, row in zip(cells, others)]

    def entries(self, i, sound, inside, known, row, keys):
        name = f"{Path(self.path).name} row {self.group}.{i}"
        try:
            if not inside and not isinstance(known, str):
                raise LineError("no audio")
            shown = f"{name} ({known})" if isinstance(known, str) else name
            where = Path(self.path)
            if inside:
                member = Cell(self.path, self.group, i, f"{self.group}.{i}", column=sound)
                where = functools.partial(same, member)
            row = row | {"audio": shown if inside else known}
            yield from manifests.utterances(row, where, name, (ONE, *keys[1:]))
        except LineError as error:
            yield Fault(str(error), name)

    def entry(self, row, keys, sought=True):
        _, i, *_, part = row
        try:
            return nth(self.entries(i, *self.rows(keys)[i], keys), part)
        except LineError as error:
            return Fault(str(error), f"{Path(self.path).name} {self.group}")


@functools.lru_cache(8)
def rows_of(path, group, names):
    return table_of(path, group, names).to_pylist()


@functools.lru_cache(8)
def cells_of(path, group, column):
    """(whether it holds bytes, its path or None) of each cell with audio; bytes are read if nothing else tells."""
    file, inside, paths = opened(path), None, None
    known, names = file.metadata.row_group(group), file.schema_arrow.field(column).type
    names = {x.name for x in names.fields} if hasattr(names, "fields") else set()
    for k in range(known.num_columns):
        leaf = known.column(k)
        counted = leaf.statistics is not None and leaf.statistics.has_null_count
        if leaf.path_in_schema == f"{column}.bytes" and counted and leaf.statistics.null_count in (0, known.num_rows):
            inside = leaf.statistics.null_count == 0
    if inside is None:
        cells = [x.as_py() for x in group_of(path, group, column)]
        found = [x if isinstance(x, dict) else {"bytes" if isinstance(x, bytes) else "path": x} for x in cells]
        return [(bool(x.get("bytes")), x.get("path")) for x in found]
    if "path" in names:
        paths = [x and x.get("path") for x in table_of(path, group, [f"{column}.path"])[column].to_pylist()]
    return [(inside, x) for x in paths or [None] * known.num_rows]


def takes(path):
    return path.suffix == ".parquet"


def shards(path):
    return [Parquet(str(path), i) for i in range(opened(str(path)).num_row_groups)]
