"""Reads of archives: storage that fails is tried again, and then ends the command."""

import dataclasses
import itertools
import os
import stat
import time

from jax_rnnt_speech.data import audio, rows
from jax_rnnt_speech.data.lists import ListError
from jax_rnnt_speech.data.rows import Fault
from jax_rnnt_speech.system import UserError, reason

WAITS = 1, 4, 16  # seconds before storage that has failed is tried again
HEAD = 256  # bytes of audio that are enough to read its seconds


def steadily(act, path):
    """Returns the result of `act`, which may need several attempts."""
    for wait in (*WAITS, None):
        try:
            return act()
        except (OSError, audio.AudioError) as error:
            if not getattr(error, "passing", True):
                raise
            if wait is None:
                tried, is_audio = f"tried {len(WAITS) + 1} times", isinstance(error, audio.AudioError)
                what = f"{error} (" if is_audio else f"{error.filename or path} cannot be read ({reason(error)}; "
                raise UserError(f"{what}{tried})") from None
            time.sleep(wait)


def bytes_of(path, place, size):
    """Returns bytes of a file, from a place on; fewer where it ends."""

    def act():
        with open(path, "rb", buffering=0) as file:
            file.seek(place)
            parts = []
            while (left := size - sum(map(len, parts))) > 0 and (data := file.read(left)):
                parts.append(data)
            return b"".join(parts)

    return steadily(act, path)


def refuse_pipes(path):
    """Raises an error where no part of an archive can be read by itself."""
    if not stat.S_ISREG(steadily(lambda: os.stat(path), path).st_mode):
        raise ListError(path, "is a pipe or device, of which no part can be read alone: save it as a file")


@dataclasses.dataclass(frozen=True)
class Member:
    """A recording within an archive, which may be read in place of a path."""

    archive: str
    place: int
    size: int
    name: str
    seconds: float = dataclasses.field(default=0.0, compare=False)  # by its header, if that was read

    def __str__(self):
        return f"{self.archive}/{self.name}"

    def loaded(self):
        data = bytes_of(self.archive, self.place, self.size)
        if len(data) < self.size:
            raise audio.AudioError(self, audio.CUT)
        return audio.Memory(data, str(self))


@dataclasses.dataclass(frozen=True)
class Shard:
    """A part of a source, in a file.

    A kind of shard has `located(keys, brief)`. It yields a place, as four numbers that are places in the shard's files,
    and the Entries and Faults that are there. `entries_at` finds those again from the numbers; (), no numbers, is the
    place of a Fault that nobody seeks again. A row is these numbers, and the number of the utterance among those of the
    same place. `keys` are those of `rows.keys_of`: without texts, `keys[1]` is empty.
    """

    path: str

    @property
    def files(self):
        return [self.path]

    @property
    def amount(self):
        """About how much the shard holds."""
        return os.path.getsize(self.path)

    @property
    def base(self):
        return os.path.basename(self.path)

    def read(self, keys, brief=False):
        """Yields (row, Entry) of the utterances, or Faults. With `brief`, usual ones may be (name, seconds or None)."""
        for where, entries in self.located(keys, brief):
            for part, x in enumerate(entries):
                yield x if type(x) is Fault else ((*where, part), x)

    def entry(self, row, keys, sought=True):
        """Returns the Entry or Fault of a row. Without `sought`, its audio may be a name and no path."""
        *where, part = row
        return next(itertools.islice(self.entries_at(where, keys, sought), part, None))


def utterances(row, member, name, keys):
    """Returns Entries of a row whose audio is a recording in an archive."""
    return rows.utterances(row, lambda _: member, name, (("audio",), *keys[1:]))
