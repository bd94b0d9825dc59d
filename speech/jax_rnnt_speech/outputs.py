"""Where commands write, checked before they work, and the bars that say how far they are."""

import contextlib
import functools
import os
from pathlib import Path

from tqdm import tqdm

from jax_rnnt_speech.config import UserError, reason

# On a terminal alone. No delay: what is written before a delayed bar is shown leaves a part of it.
bar = functools.partial(tqdm, mininterval=1, leave=False, disable=None)


def check(path, sources, folder=False, option="--output"):
    """Raises where a file or folder cannot be written, or is one of the files that are read."""
    name = f"{option} {path}".strip()
    if not path.parent.is_dir():
        raise UserError(f"{name}: {path.parent} is no folder")
    if path.exists() and path.is_dir() != folder:
        raise UserError(f"{name} must be {'a folder' if folder else 'a file'}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{name} cannot be written")
    if path.exists() and path.resolve() in {Path(x).resolve() for x in sources}:
        raise UserError(f"{name} is one of the files that are read")


@contextlib.contextmanager
def writing(path):
    """An error of the disk becomes a line that names what could not be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {reason(error)}") from None


@contextlib.contextmanager
def whole(path):
    """A name beside `path`, to write a file to. It takes the place of `path` once it is on the disk."""
    path = path.resolve()  # a link stays one
    part = path if path.exists() and not path.is_file() else path.with_name(f".{path.name[:200]}.{os.getpid()}.part")
    try:
        with writing(path):
            yield part
            part.replace(path)
    finally:
        if part != path:
            part.unlink(missing_ok=True)


class Growing:
    """A text file to which whole pieces are added: of one for which there is no room, nothing stays."""

    def __init__(self, path):
        self.path, self.size = path, 0
        with writing(path):
            self.file = path.open("wb", buffering=0)

    def write(self, text):
        data = text.encode()
        try:
            with writing(self.path):
                rest = memoryview(data)
                while rest:
                    rest = rest[self.file.write(rest) :]
        except UserError:
            with contextlib.suppress(OSError):
                self.file.truncate(self.size)
                self.file.seek(self.size)
            raise
        self.size += len(data)

    def close(self):
        self.file.close()


class Screen:
    """The standard output, as `Growing`."""

    def write(self, text):
        print(text, end="", flush=True)

    def close(self):
        pass
