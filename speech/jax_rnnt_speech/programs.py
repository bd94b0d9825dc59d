"""Compiled programs: kept in a folder for the next start, and announced before they are compiled."""

import contextlib
import time

import jax
from tqdm import tqdm


def keep(folder):
    """Programs are read from the folder and written there, unless JAX has another one already."""
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class Announced:
    """A compiled function of (tree, batch, ...) that says when it compiles for a new shape, and how long that took."""

    def __init__(self, name, function):
        self.name, self.function, self.shapes = name, function, set()

    def __call__(self, tree, batch, *more):
        shape = tuple(x.shape for x in jax.tree.leaves(batch))
        with contextlib.ExitStack() as stack:
            if shape not in self.shapes:
                self.shapes.add(shape)
                stack.enter_context(announced(self.name, batch))
            return self.function(tree, batch, *more)


@contextlib.contextmanager
def announced(name, batch):
    rows, frames = batch["audio"].shape[:2]
    unit = "samples" if batch["audio"].ndim == 2 else "frames"
    of = f"{name}, {rows} x {frames} {unit} x {batch['targets'].shape[1]} labels"
    started = time.perf_counter()
    if not jax.process_index():
        tqdm.write(f"compiling: {of}")
    yield
    if not jax.process_index():
        tqdm.write(f"compiled: {of}: {time.perf_counter() - started:.1f} s")
