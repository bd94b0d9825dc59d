"""Checkpoints by step in a folder, as Orbax stores them: JSON that says how a model was made, and trees of arrays.

Orbax has no sums of arrays: a disk that changes a byte would change weights. So each checkpoint is sealed before it
gets its name, and `runs` reads none whose sums differ.
"""

import contextlib
import logging
import os
import re
import sys

import jax
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding

from jax_rnnt_speech.system import UserError, outputs

UNFINISHED = ".orbax-checkpoint-tmp"
for name in ("absl", "asyncio"):  # Orbax logs each error with its traceback, and raises it, too
    logging.getLogger(name).setLevel(logging.CRITICAL)


def unraised(event, before=sys.unraisablehook):
    """Drops later errors of TensorStore: of several files without room, the first one has ended its loop."""
    if str(event.exc_value) != "Event loop is closed":
        before(event)


sys.unraisablehook = unraised


def restore(folder, trees):
    """Returns a list of trees of arrays, for {name: tree of shapes}; shapes without a place go to the first device."""
    here = SingleDeviceSharding(jax.local_devices()[0])

    def placed(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)

    args = {name: ocp.args.StandardRestore(jax.tree.map(placed, x)) for name, x in trees.items()}
    with contextlib.closing(ocp.Checkpointer(ocp.CompositeCheckpointHandler())) as reader:
        saved = reader.restore(folder, args=ocp.args.Composite(**args))
    return [saved[name] for name in trees]


class Checkpoints:
    """Writes checkpoints, and keeps the last `count` of them."""

    def __init__(self, folder, count):
        self.folder, self.step, self.failed = folder, None, False
        self.tidy()
        seals = ocp.AsyncOptions(post_finalization_callback=self.seal)
        # Two managers write steps of one number at a time: without its name, processes would wait for the wrong one.
        own = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=folder.name)
        options = ocp.CheckpointManagerOptions(max_to_keep=count, async_options=seals, multiprocessing_options=own)
        with self.writing():
            self.manager = ocp.CheckpointManager(folder, options=options)

    def tidy(self):
        """Removes the remains of interrupted writes."""
        if not jax.process_index():
            for x in self.folder.glob(f"*{UNFINISHED}*"):
                outputs.remove(x)

    def seal(self):
        """Seals a written checkpoint. Orbax calls it in the first process, before or after its last rename."""
        for x in (*self.folder.glob(f"{self.step}{UNFINISHED}*"), self.folder / str(self.step)):
            if x.is_dir():
                return outputs.seal(x)

    @contextlib.contextmanager
    def writing(self):
        """Turns whatever Orbax or TensorStore says of a disk into one line."""
        try:
            yield
        except Exception as error:
            self.failed = True
            name = self.folder if self.step is None else self.folder / str(self.step)
            code = re.search(r"os_error_code='(\d+)'", str(error))  # a code of TensorStore
            reason = os.strerror(int(code[1])) if code else getattr(error, "strerror", None) or str(error)
            reason = reason.partition("\n")[0]
            raise UserError(f"{name} cannot be written: {reason}") from None

    def save(self, step, setup, trees):
        """Saves a step in place of itself and of later ones, which are damaged or of an interrupted run."""
        self.check()
        with self.writing():
            self.manager.wait_until_finished()
            self.step = step
            for later in [x for x in self.manager.all_steps() if x >= step]:
                self.manager.delete(later)
            args = {name: ocp.args.StandardSave(x) for name, x in trees.items()}
            args["setup"] = ocp.args.JsonSave(setup)
            self.manager.save(step, args=ocp.args.Composite(**args), force=True)

    def check(self):
        """Raises an error if writing in the background has failed."""
        with self.writing():
            self.manager.check_for_errors()

    def close(self):
        """Waits for writing in the background."""
        try:
            with self.writing() if not self.failed else contextlib.suppress(Exception):
                self.manager.close()
        finally:
            self.tidy()
