"""Folders of runs: checkpoints with the configuration inside, metrics as JSON lines and for TensorBoard."""

import contextlib
import json
import os
import shutil
import signal
import threading

import jax
import numpy as np

from jax_rnnt_speech import hosts
from jax_rnnt_speech.config import UserError

METRICS, TENSORBOARD, CHECKPOINTS, BEST = "metrics.jsonl", "tensorboard", "checkpoints", "best"
LEFT_OUT = "left-out-{}.tsv"
WRITTEN = METRICS, TENSORBOARD, CHECKPOINTS, BEST, LEFT_OUT.format("*")  # by a run


class Run:
    """A folder of checkpoints. An earlier run in it is continued or deleted only if that is asked for."""

    def __init__(self, workdir, *, resume=False, overwrite=False):
        self.workdir = workdir.resolve()
        folder, self.overwrite = self.workdir / CHECKPOINTS, overwrite
        saved = [int(x.name) for x in folder.iterdir() if x.name.isdigit()] if folder.is_dir() else []
        self.last = None if overwrite else max(saved, default=None)
        started = self.last is not None or (self.workdir / METRICS).is_file()
        if started and not (resume or overwrite):
            raise UserError(f"{workdir} holds an earlier run: continue it with --resume, or delete it with --overwrite")
        self.manager = self.best = None

    def open(self):
        """Makes the folder ready for checkpoints. Only now an earlier run is deleted."""
        if self.overwrite and not jax.process_index():
            for path in (x for name in WRITTEN for x in self.workdir.glob(name)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        hosts.wait("an earlier run is deleted")
        from jax_rnnt_speech.checkpoints import Checkpoints  # Orbax is slow to import, and a run alone needs it

        self.manager, self.best = Checkpoints(self.workdir / CHECKPOINTS, 2), Checkpoints(self.workdir / BEST, 1)

    def setup(self):
        """What the last checkpoint stores beside its arrays."""
        try:
            return self.manager.setup(self.last)
        except (OSError, KeyError, ValueError) as error:
            raise UserError(f"{self.workdir}: checkpoint {self.last} does not say how it was made ({error})") from None

    def restore(self, best=False, **trees):
        """The arrays of the last checkpoint by name, as these trees of shapes say; `best`: of the best, if any."""
        manager, step = self.manager, self.last
        if best and self.best.latest is not None:
            manager, step = self.best, self.best.latest
        try:
            return manager.restore(step, trees)
        except (OSError, KeyError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{self.workdir}: checkpoint {step} lacks arrays of this model ({reason})") from None

    def save(self, step, setup, best=False, **trees):
        """`best`: replaces the best checkpoint, and those that an interrupted run has of later steps."""
        (self.best if best else self.manager).save(step, setup, trees, replace=best)

    def close(self):
        for manager in (self.manager, self.best):
            if manager:
                manager.close()


def open_run(workdir):
    """The run of a folder that must have a checkpoint."""
    run = Run(workdir, resume=True)
    if run.last is None:
        raise UserError(f"{workdir} has no checkpoint: train first")
    run.open()
    return run


def setup_of(workdir):
    """What the last checkpoint of a folder stores beside its arrays."""
    with contextlib.closing(open_run(workdir)) as run:
        return run.setup()


def metrics_of(workdir):
    """Objects of the lines of metrics.jsonl; the last one may be cut off, and is left out then."""
    file = workdir / METRICS
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    return [json.loads(x) for x in lines if x.endswith("}")]


@contextlib.contextmanager
def interruptions():
    """A list that holds something after Ctrl-C; the second Ctrl-C interrupts, and in several processes the first."""
    heard, before = [], signal.getsignal(signal.SIGINT)

    def hear(*_):
        heard.append(True)
        signal.signal(signal.SIGINT, before)
        os.write(2, b"\ninterrupted: the run is saved after this step; Ctrl-C again ends it now\n")

    alone = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
    if alone:
        signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        if alone:
            signal.signal(signal.SIGINT, before)


class Metrics:
    """Numbers of steps, written by the first process alone.

    What an interrupted run wrote after the step that is resumed is dropped.
    """

    def __init__(self, workdir, first, hook=None):
        self.file, self.hook = None, hook
        if jax.process_index():
            return
        from tensorboardX import SummaryWriter  # not at every start

        file = workdir / METRICS
        kept = [x for x in metrics_of(workdir) if x["step"] <= first]
        file.write_text("".join(json.dumps(x) + "\n" for x in kept))
        self.file = file.open("a", buffering=1)
        self.board = SummaryWriter(str(workdir / TENSORBOARD), purge_step=first + 1)

    def write(self, step, **numbers):
        if not self.file:
            return
        numbers = {name: float(x) for name, x in numbers.items()}
        self.file.write(json.dumps({"step": step} | numbers) + "\n")
        if self.hook:
            self.hook(step, numbers)
        for name, x in numbers.items():
            if np.isfinite(x):
                self.board.add_scalar(name, x, step)

    def close(self):
        if self.file:
            self.file.close()
            self.board.close()
