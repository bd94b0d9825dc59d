"""The outputs of commands: checked before they work, written whole or not at all; and the bars that show progress."""

import contextlib
import ctypes
import errno
import functools
import glob
import hashlib
import io
import json
import os
import select
import shutil
import socket
import sys
import zlib
from pathlib import Path

from tqdm import tqdm

from jax_rnnt_speech.system import UserError, as_user_error, reason, refuse_if

SUMS = "sums.json"  # in a sealed folder
CLAIMS = {}  # open sockets, by the files that this process writes
BROKEN_PIPE = 141  # the status of processes that SIGPIPE ends

# A bar is shown on a terminal alone. No delay: text that is written before a delayed bar is shown leaves a part of it.
bar = functools.partial(tqdm, mininterval=1, leave=False, disable=None)


def unread():
    """Returns True if the reader of the standard output has ended, as `head` does. Nothing more is written there."""
    if sys.stdout is None:
        return False
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
        if not poll.poll(0):
            return False
        with open(os.devnull, "wb") as nowhere:  # else Python says what it cannot flush at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except (OSError, ValueError):  # no file of the system
        return False
    return True


def claim(path, name):
    """Raises an error if another command of this machine writes the same; else none may, while this process lives.

    It uses a name of Linux's for sockets: unlike a file that locks, it ends with the process, and nothing stays.
    """
    place = path.resolve()
    if sys.platform != "linux" or place in CLAIMS or (path.exists() and not (path.is_file() or path.is_dir())):
        return
    with contextlib.suppress(FileNotFoundError):
        parent = place.parent.stat()
        mark = hashlib.sha256(f"{parent.st_dev} {parent.st_ino} {place.name}".encode(errors="surrogateescape"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claimed:
            try:
                claimed.bind(f"\0rnnt-speech {mark.hexdigest()}")
                CLAIMS[place] = claimed.detach()
            except OSError as error:
                refuse_if(error.errno == errno.EADDRINUSE, f"{name}: another command is writing there")


def check(path, sources, folder=False, option="--output"):
    """Raises an error where a file or folder cannot be written, or is one of the files that are read."""
    name = f"{option} {path}".strip()
    refuse_if(not path.parent.is_dir(), f"{name}: {path.parent} is no folder")
    refuse_if(path.exists() and path.is_dir() != folder, f"{name} must be {'a folder' if folder else 'a file'}")
    refuse_if(not os.access(path if path.exists() else path.parent, os.W_OK), f"{name} cannot be written")
    if path.exists() and path.resolve() in {Path(x).resolve() for x in sources}:
        raise UserError(f"{name} is one of the files that are read")
    if not folder:  # into which several commands may write files of other recordings
        claim(path, name)


def writing(path):
    """Turns an error of the disk into a line that names what could not be written."""
    return as_user_error(f"{path} cannot be written", OSError)


@contextlib.contextmanager
def whole(path, keep=None):
    """Yields a name next to `path`, to write a file or folder to. It replaces `path` once it is on the disk.

    Whatever happens before leaves `path` as it was. In an earlier folder, entries stay for whose name `keep` is true.
    """
    path = Path(path)
    if alone := path.exists() and not (path.is_file() or path.is_dir()):  # a device or a pipe
        part = path
    else:
        path = path.resolve()  # a link stays one
        empty = path.is_dir() and not any(path.iterdir())
        alone = empty and (path.is_mount() or not os.access(path.parent, os.W_OK))  # nothing can be next to it
        part = path if alone else path.with_name(f".{shortened(path.name, 200)}.{os.getpid()}.part")
    try:
        with writing(path):
            for left in path.parent.glob(f".{glob.escape(shortened(path.name, 200))}.*.part"):
                if not running(left.name.split(".")[-2]):  # the process was killed
                    remove(left)
            yield part
            if alone:
                return
            for x in path.iterdir() if keep and path.is_dir() else ():
                if keep(x.name) and not (part / x.name).exists():
                    copy = functools.partial(shutil.copytree, symlinks=True, copy_function=link)
                    (copy if x.is_dir() and not x.is_symlink() else link)(x, part / x.name)
            if path.exists():
                shutil.copymode(path, part)
            sync(part)
            exchange(part, path) if part.is_dir() and path.is_dir() else part.replace(path)
            sync(path.parent, within=False)
    finally:
        if not alone:
            remove(part)


@contextlib.contextmanager
def whole_folder(path, keep=None):
    """`whole` of a folder. Its parents are made, and those that were missing go again if nothing is written."""
    missing = [x for x in path.resolve().parents if not x.exists()]
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path, keep) as part:
            part.mkdir(exist_ok=True)
            yield part
    finally:
        for x in missing:
            with contextlib.suppress(OSError):  # something is in it
                x.rmdir()


def shortened(name, most):
    """Returns the first characters of a name, in so many bytes at most."""
    return os.fsencode(name)[:most].decode("utf-8", "ignore") if len(os.fsencode(name)) > most else name


class Growing:
    """A text file to which whole pieces are added; if there is no room for one, nothing of it stays."""

    def __init__(self, path):
        self.path, self.size = path, 0
        with writing(path):
            self.file = path.open("wb", buffering=0)

    def write(self, text):
        data = text.encode("utf-8", "backslashreplace")  # as JSON escapes bytes of names that are no UTF-8
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
    """The standard output, in the form of `Growing`."""

    def write(self, text):
        with writing("the standard output"):
            print(text, end="", flush=True)

    def close(self):
        pass


class Nowhere(io.TextIOBase):
    """Takes output that nobody reads."""

    def write(self, text):
        return len(text)


def running(process):
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        pass
    return True


def remove(path):
    """Removes a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link(old, new):
    """Gives a file a second name, or copies it where the file system has no second names."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copy2(old, new, follow_symlinks=False)


def exchange(new, old):
    """Exchanges the names of two folders: in one step on Linux, so that at no moment the name is missing."""
    here, swapped, libc = -100, 2, ctypes.CDLL(None)  # AT_FDCWD, RENAME_EXCHANGE
    if hasattr(libc, "renameat2") and not libc.renameat2(here, os.fsencode(new), here, os.fsencode(old), swapped):
        return
    aside = old.with_name(f"{old.name}.old")
    old.rename(aside)
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)


def sync(path, within=True):
    """Waits until a file, or a folder and all that is in it, is on the disk: a rename may be there before its data."""
    for x in (*(path.rglob("*") if within and path.is_dir() else ()), path):
        if x.is_file() or x.is_dir():
            file = os.open(x, os.O_RDONLY)
            try:
                os.fsync(file)
            except OSError:
                if not x.is_dir():  # some file systems do not sync folders
                    raise
            finally:
                os.close(file)


def sum_of(path):
    """Returns [bytes, CRC-32] of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def seal(folder):
    """Writes the checksums of all files of a folder into it, and waits until all is on the disk."""
    files = sorted(x for x in folder.rglob("*") if x.is_file() and x.name != SUMS)
    (folder / SUMS).write_text(json.dumps({x.relative_to(folder).as_posix(): sum_of(x) for x in files}), "utf-8")
    sync(folder)


def damage(folder, parts=("",)):
    """Describes in a line what is wrong with parts of a folder, by the beginnings of their names; else None."""
    try:
        if not (folder / SUMS).exists():
            return f"it has no {SUMS}"
        sums = json.loads((folder / SUMS).read_text("utf-8"))
        for part in parts:
            sealed_files = {name: x for name, x in sums.items() if name.startswith(part)}
            if not sealed_files:
                return f"{SUMS} names no {part}"
            for name, (size, crc) in sealed_files.items():
                now = sum_of(folder / name)
                if now != [size, crc]:
                    return f"{name} has {now[0]} bytes of {size}" if now[0] != size else f"{name} has changed"
    except (OSError, ValueError, AttributeError, TypeError) as error:
        name = getattr(error, "filename", None)
        return f"{Path(name).relative_to(folder) if name else SUMS}: {reason(error)}"
    return None
