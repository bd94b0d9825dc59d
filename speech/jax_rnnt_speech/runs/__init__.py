"""Folders of runs: checkpoints with the configuration inside, metrics as JSON lines and for TensorBoard."""

import contextlib
import fcntl
import json
import math
import os
import signal
import socket
import sys
import threading
import time

import jax
import numpy as np
from tqdm import tqdm

from jax_rnnt_speech.system import Terminated, UserError, hosts, outputs, reason

METRICS, TENSORBOARD, CHECKPOINTS, BEST = "metrics.jsonl", "tensorboard", "checkpoints", "best"
BEST_FIRST = BEST, CHECKPOINTS
LEFT_OUT = "left-out-{}.tsv"
WRITTEN = METRICS, TENSORBOARD, LEFT_OUT.format("*"), BEST, CHECKPOINTS  # names that a run writes
EARLIER = "earlier"  # the run before --overwrite, until the new one has a checkpoint
FLUSH = 10  # seconds between events for TensorBoard on the disk
LOCKS = {}  # locks of folders that this process trains in


def steps_of(folder):
    """Returns the steps of the checkpoints in a folder, the last one first."""
    names = (x.name for x in folder.iterdir() if x.is_dir()) if folder.is_dir() else ()
    return sorted((int(x) for x in names if x.isascii() and x.isdigit()), reverse=True)


def read_setup(folder):
    """Returns what a checkpoint stores besides its arrays."""
    setup = json.loads((folder / "setup/metadata").read_text("utf-8"))  # as Orbax writes JSON
    if not isinstance(setup, dict) or "config" not in setup:
        raise ValueError("it has no config")
    return setup


def damage(folder, parts):
    """Describes in a line what is wrong with parts of a checkpoint; returns None if nothing is."""
    if wrong := outputs.damage(folder, [f"{x}/" for x in parts]):
        return wrong
    try:
        read_setup(folder)
    except (OSError, ValueError) as error:
        return f"setup: {reason(error)}"
    return next((f"it has no {x}" for x in parts if not (folder / x).is_dir()), None)


class Run:
    """A folder of checkpoints. An earlier run in it is continued or replaced only if that is asked for."""

    def __init__(self, workdir, *, resume=False, overwrite=False):
        self.workdir, self.overwrite = workdir.resolve(), overwrite
        self.last = None if overwrite else next(iter(steps_of(self.workdir / CHECKPOINTS)), None)
        self.manager = self.best = None
        self.saved = False
        started = self.last is not None or (self.workdir / METRICS).is_file()
        if started and not (resume or overwrite):
            raise UserError(f"{workdir} holds an earlier run: continue it with --resume, or delete it with --overwrite")

    def missing(self):
        """Returns the error that it has no checkpoint."""
        earlier = self.workdir / EARLIER
        more = f"; {earlier} holds the run before --overwrite" if has_model(earlier) else ""
        return UserError(f"{self.workdir} has no checkpoint: train first, with all options{more}")

    def open(self):
        """Makes the folder ready for checkpoints. Only now an earlier run is set aside."""
        with outputs.writing(self.workdir):
            self.workdir.mkdir(parents=True, exist_ok=True)
            if not jax.process_index():
                lock(self.workdir)
                if self.overwrite:
                    self.set_aside()
        hosts.wait("an earlier run is set aside")
        from jax_rnnt_speech.runs.checkpoints import Checkpoints  # Orbax is slow to import, and a run alone needs it

        self.manager, self.best = Checkpoints(self.workdir / CHECKPOINTS, 2), Checkpoints(self.workdir / BEST, 1)

    def set_aside(self):
        """Keeps a run with checkpoints until the new one has one; removes other files of runs that are here."""
        earlier = self.workdir / EARLIER
        kept = has_model(self.workdir)
        if kept and has_model(earlier):
            outputs.remove(earlier)
        for path in (x for name in WRITTEN for x in self.workdir.glob(name)):
            if kept:
                earlier.mkdir(exist_ok=True)
                path.rename(earlier / path.name)
            else:
                outputs.remove(path)

    def whole(self, parts, names=(CHECKPOINTS,), quiet=False):
        """Returns the folder of the last checkpoint whose parts are whole; searches folders of these names in turn."""
        bad = []
        for folder in (self.workdir / name / str(x) for name in names for x in steps_of(self.workdir / name)):
            if not (wrong := damage(folder, ("setup", *parts))):
                if bad and not quiet and not jax.process_index():
                    used = f"{'; '.join(bad)}: {folder.parent.name}/{folder.name} is used"
                    print(f"{self.workdir}: {used}", file=sys.stderr)
                return folder
            bad.append(f"{folder.parent.name}/{folder.name} is damaged ({wrong})")
        raise UserError(f"{self.workdir} has no whole checkpoint: {'; '.join(bad)}")

    def setup(self, *parts, quiet=False):
        """Returns what the last whole checkpoint stores besides its arrays; from now on it is the last."""
        folder = self.whole(parts, quiet=quiet)
        self.last = int(folder.name)
        return read_setup(folder)

    def restore(self, folder=None, **trees):
        """Returns arrays by name of a checkpoint, as these trees of shapes say; by default of the last one."""
        from jax_rnnt_speech.runs import checkpoints

        folder = folder or self.workdir / CHECKPOINTS / str(self.last)
        try:
            return checkpoints.restore(folder, trees)
        except Exception as error:  # Orbax raises many kinds
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{folder} lacks arrays of this model ({why})") from None

    def save(self, step, setup, best=False, **trees):
        """Saves a checkpoint in place of those of this step and of later ones."""
        with self.resumable():
            (self.best if best else self.manager).save(step, setup, trees)
        if self.saved:  # the one before is whole now
            self.forget()
        self.saved |= not best

    def check(self):
        """Raises an error where a checkpoint could not be written."""
        with self.resumable():
            for manager in (self.manager, self.best):
                manager.check()

    @contextlib.contextmanager
    def resumable(self):
        """Adds to an error the step from which the run can go on."""
        try:
            yield
        except UserError as error:
            with contextlib.suppress(UserError):
                step = self.whole(("params", "training"), quiet=True).name
                error = UserError(f"{error}; --resume goes on from step {step}")
            raise error from None

    def forget(self):
        """Removes the run before --overwrite, which has a successor now."""
        if not jax.process_index():
            outputs.remove(self.workdir / EARLIER)

    def close(self):
        try:
            with self.resumable(), contextlib.ExitStack() as stack:
                for manager in filter(None, (self.best, self.manager)):
                    stack.callback(manager.close)
            if self.saved:
                self.forget()
        finally:
            self.manager = self.best = None
            if self.workdir in LOCKS:
                os.close(LOCKS.pop(self.workdir))


def has_model(workdir):
    return any(steps_of(workdir / name) for name in (CHECKPOINTS, BEST))


def lock(workdir):
    """Keeps other processes from training in a folder, for as long as this one does."""
    if workdir in LOCKS:
        return
    file = os.open(workdir, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UserError(f"another process trains in {workdir}: name another --workdir, or wait") from None
    except OSError:  # a file system without locks
        pass
    LOCKS[workdir] = file


def open_run(workdir):
    """Returns the run of a folder that must have a checkpoint, to read."""
    run = Run(workdir, resume=True)
    if not has_model(run.workdir):
        raise run.missing()
    return run


def setup_of(workdir):
    """Returns what a folder's last whole checkpoint stores besides its arrays; whoever reads these names it."""
    return read_setup(open_run(workdir).whole((), (CHECKPOINTS, BEST), quiet=True))


def metrics_of(workdir):
    """Returns the objects in metrics.jsonl. Of repeated steps a resumed run's count; damaged lines are left out."""
    file, kept, bad = workdir / METRICS, [], []
    for i, line in enumerate(file.read_bytes().split(b"\n") if file.is_file() else (), 1):
        try:
            x = json.loads(line.strip(b"\0 \r\t")) if line else None
            fine = x is None or type(x["step"]) is int
        except (ValueError, TypeError, KeyError, RecursionError):
            fine = False
        if not fine:
            bad.append(i)
        elif x:
            while kept and (
                kept[-1]["step"] > x["step"] or (kept[-1].keys() == x.keys() and kept[-1]["step"] == x["step"])
            ):
                kept.pop()
            kept.append(x)
    if bad:
        print(f"{file}: damaged lines are left out: {', '.join(map(str, bad))}", file=sys.stderr)
    return kept


@contextlib.contextmanager
def interruptions():
    """Yields a list for the exception of Ctrl-C or SIGTERM; the second one ends, and in several processes the first."""
    heard, alone = [], jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    before = {x: signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)} if alone else {}
    before = {x: handler for x, handler in before.items() if handler is not signal.SIG_IGN}  # as nohup and & have it

    def restore():
        for x, handler in before.items():
            signal.signal(x, handler)

    def hear(number, _):
        heard.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        restore()
        os.write(2, b"\ninterrupted: the run is saved after this step; Ctrl-C again ends it now\n")

    for x in before:
        signal.signal(x, hear)
    try:
        yield heard
    finally:
        restore()


class Metrics:
    """Numbers of steps, written by the first process alone. They are no part of the state: without them a run goes on.

    Lines that an interrupted run wrote after the step that is resumed are dropped.
    """

    def __init__(self, workdir, first, hook=None):
        self.path, self.hook, self.failed, self.board = None, hook, set(), None
        if jax.process_index():
            return
        self.path, self.before = workdir / METRICS, b"\n"  # until the file is known to end with a line
        with self.trying(first, METRICS):
            kept = [x for x in metrics_of(workdir) if x["step"] <= first]
            with outputs.whole(self.path) as part:
                part.write_text("".join(json.dumps(x) + "\n" for x in kept))
            self.before = b""
        with self.trying(first, TENSORBOARD):
            self.open_board(first + 1)

    @contextlib.contextmanager
    def trying(self, step, name):
        """Reports that a file cannot be written, once until it can be again."""
        try:
            yield
            self.failed.discard(name)
        except (OSError, UserError) as error:
            if name not in self.failed:
                path = self.path.with_name(name)
                tqdm.write(
                    f"step {step}: {path} cannot be written, and lacks numbers: {reason(error)}", file=sys.stderr
                )
            self.failed.add(name)

    def open_board(self, step):
        """Opens a file for TensorBoard, which is to forget the steps in others from this one on.

        It is written without SummaryWriter, whose thread ends at an error, and whose queue then waits for ever.
        """
        from tensorboardX.proto.event_pb2 import SessionLog  # not at every start
        from tensorboardX.record_writer import RecordWriter

        folder = self.path.with_name(TENSORBOARD)
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{step}"
        self.board, self.flushed = RecordWriter(str(folder / name)), -math.inf
        self.add(file_version="brain.Event:2")
        self.add(step=step, session_log=SessionLog(status=SessionLog.START))

    def add(self, **fields):
        from tensorboardX.proto.event_pb2 import Event

        self.board.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def write(self, step, **numbers):
        if not self.path:
            return
        numbers = {name: float(x) for name, x in numbers.items()}
        with self.trying(step, METRICS), self.path.open("ab", buffering=0) as file:
            line = self.before + json.dumps({"step": step} | numbers).encode() + b"\n"
            self.before = b"\n"  # of half a line
            while line:  # where the disk has room for a part alone, the second time says why
                line = line[file.write(line) :]
            self.before = b""
        if self.hook:
            self.hook(step, numbers)
        with self.trying(step, TENSORBOARD):
            self.show(step, numbers)

    def show(self, step, numbers):
        """Writes numbers for TensorBoard; after an error into another file, as it reads none behind half a record."""
        from tensorboardX.summary import scalar

        if not self.board:
            self.open_board(step)
        try:
            for name, x in numbers.items():
                if np.isfinite(x):
                    self.add(step=step, summary=scalar(name, x))
            if time.monotonic() > self.flushed + FLUSH:
                self.board.flush()
                self.flushed = time.monotonic()
        except OSError:
            self.close()
            raise

    def close(self):
        board, self.board = self.board, None
        with contextlib.suppress(OSError):  # the data in memory have no room
            if board:
                board.close()
