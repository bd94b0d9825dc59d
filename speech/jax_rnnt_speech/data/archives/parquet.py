"""Parquet with audio in it, as Hugging Face's datasets write it."""

import dataclasses
import functools
from pathlib import Path

from jax_rnnt_speech.data import audio, rows
from jax_rnnt_speech.data.archives.storage import Shard, steadily, utterances
from jax_rnnt_speech.data.lists import ListError
from jax_rnnt_speech.data.rows import Fault, LineError
from jax_rnnt_speech.system import UserError

KIND = "Parquet"
NAMES = r".*\.parquet"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recording in a row, which may be read in place of a path."""

    archive: str
    column: str
    group: int  # group of rows
    row: int  # within the group
    clip = True  # a row holds only the recording that it describes

    def __str__(self):
        return f"{self.archive}/{self.group}.{self.row}"

    def loaded(self):
        try:
            cell = group_of(self.archive, self.group, self.column)[self.row].as_py()
        except LineError:
            raise audio.AudioError(self, audio.DAMAGED) from None
        return audio.Memory(cell["bytes"] if isinstance(cell, dict) else cell, str(self))


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
    """Returns columns of a group of rows. An error of Arrow without a number is no failure of the storage."""

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
class Parquet(Shard):
    """A group of rows of a file. Rows are (group, row in it)."""

    group: int
    amount = 1

    def columns(self, keys):
        """Returns (name of the audio's column, names of the others that hold no bytes)."""
        names = opened(self.path).schema_arrow.names
        sound = next((x for x in keys[0] if x in names), None)
        if sound is None:
            raise ListError(self.path, f"must have one of the columns {', '.join(keys[0])}, got {names}"[:1000])
        return sound, tuple(x for x in names if x != sound)

    def located(self, keys, brief):
        try:
            for i, row in enumerate(rows_of(self.path, self.group, *self.columns(keys))):
                yield (self.group, i, 0, 0), self.entries(i, *row, keys)
        except LineError as error:
            yield (), [Fault(str(error), f"{self.base} {self.group}")]

    def entries(self, i, sound, inside, path, row, keys):
        name = f"{self.base} row {self.group}.{i}"
        try:
            none = not inside and not isinstance(path, str)
            rows.leave_out_if(none, rows.ARRAY if holds_arrays(self.path, sound) else "no audio")
            shown = f"{name} ({path})" if isinstance(path, str) else name
            if inside:
                cell = Cell(self.path, sound, self.group, i)
                yield from utterances(row | {"audio": shown}, cell, name, keys)
            else:
                yield from rows.utterances(row | {"audio": path}, Path(self.path), name, (("audio",), *keys[1:]))
        except LineError as error:
            yield Fault(str(error), name)

    def entries_at(self, where, keys, sought):
        try:
            return self.entries(where[1], *rows_of(self.path, self.group, *self.columns(keys))[where[1]], keys)
        except LineError as error:
            return [Fault(str(error), f"{self.base} {self.group}")]


@functools.lru_cache(8)
def rows_of(path, group, sound, names):
    """Returns (name of the audio's column, whether it has audio, the audio's path or None, its other values) by row."""
    cells = cells_of(path, group, sound)
    others = table_of(path, group, names).to_pylist() if names else [{}] * len(cells)
    return [(sound, *cell, row) for cell, row in zip(cells, others)]


def cells_of(path, group, column):
    """Returns (whether it holds bytes, its path or None) of each cell; bytes are read if nothing else tells."""
    file, name = opened(path), f"{column}.bytes"
    group_of_rows, kind = file.metadata.row_group(group), file.schema_arrow.field(column).type
    leaves = [group_of_rows.column(k) for k in range(group_of_rows.num_columns)]
    known = next((x.statistics for x in leaves if x.path_in_schema == name), None)
    nulls = known.null_count if known is not None and known.has_null_count else None
    if nulls not in (0, group_of_rows.num_rows):
        cells = [x.as_py() for x in group_of(path, group, column)]
        values = [x if isinstance(x, dict) else {"bytes" if isinstance(x, bytes) else "path": x} for x in cells]
        return [(bool(x.get("bytes")), x.get("path")) for x in values]
    paths = [None] * group_of_rows.num_rows
    if any(x.name == "path" for x in kind.fields):
        paths = [x and x.get("path") for x in table_of(path, group, [f"{column}.path"])[column].to_pylist()]
    return [(nulls == 0, x) for x in paths]


def holds_arrays(path, column):
    """Returns True if a column has lists of numbers in place of audio."""
    kind = opened(path).schema_arrow.field(column).type
    return "list" in str(kind) and "bytes" not in [x.name for x in getattr(kind, "fields", ())]


def takes(path):
    return path.suffix == ".parquet"


def shards(path):
    return [Parquet(str(path), i) for i in range(opened(str(path)).num_row_groups)]
