"""Compiled programs: kept in a folder for the next start, and announced before they are compiled."""

import functools
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm


def keep(folder):
    """Programs are read from the folder and written there, or in the user's cache; JAX may have a folder already."""
    if folder is None or not os.access(next(x for x in folder.absolute().parents if x.exists()), os.W_OK):
        folder = Path.home() / ".cache/jax_rnnt_speech/programs"
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def announced(name, place=2):
    """For a compiled function that is to say when it compiles for new shapes, and how long that took.

    Its argument at `place` is features [B, T, ...], or a batch with them. `shapes` of the result has what was compiled.
    """

    def decorated(function):
        shapes = set()

        @functools.wraps(function)
        def run(*arguments):
            leaves, tree = jax.tree.flatten(arguments[place:])
            key = id(arguments[0]) if place == 2 else 0, tree, *map(np.shape, leaves)
            quiet = key in shapes or jax.process_index() or any(isinstance(x, jax.core.Tracer) for x in leaves)
            shapes.add(key)
            if quiet:
                return function(*arguments)
            batch, started = arguments[place], time.perf_counter()
            rows, frames = np.shape(batch["features"] if isinstance(batch, dict) else batch)[:2]
            labels = f" x {batch['targets'].shape[1]} labels" if isinstance(batch, dict) else ""
            of = f"{name}, {rows} x {frames} frames{labels}"
            tqdm.write(f"compiling: {of}", file=sys.stderr)
            result = function(*arguments)
            tqdm.write(f"compiled: {of}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
            return result

        run.shapes = shapes
        return run

    return decorated
