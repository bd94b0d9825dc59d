"""Keeps compiled programs in a folder for the next start, and announces them before they are compiled."""

import contextlib
import functools
import hashlib
import os
import platform
import sys
import time
from pathlib import Path

import jax
import jaxlib
import numpy as np
from tqdm import tqdm

MOST = 2**30  # bytes of programs in a folder
PROCESSOR = Path("/proc/cpuinfo")
NAMING = "model name", "flags", "CPU part", "Features"  # lines there, of x86 and of ARM, on which programs depend


def machine():
    """Returns a folder's name: programs of another jaxlib, or of a processor with other features, do not run here."""
    lines = PROCESSOR.read_text().splitlines() if PROCESSOR.exists() else [platform.processor()]
    named = sorted({x for x in lines if x.startswith(NAMING)} or {*lines})
    return f"jaxlib-{jaxlib.__version__}-{platform.machine()}-{hashlib.sha256(repr(named).encode()).hexdigest()[:8]}"


def keep(folder):
    """Reads and writes programs in the folder, or in the user's cache; JAX may have a folder already."""
    if folder is None or not os.access(next(x for x in folder.absolute().parents if x.exists()), os.W_OK):
        folder = Path.home() / ".cache/jax_rnnt_speech/programs"
    if not jax.config.jax_compilation_cache_dir:
        folder = folder / machine()
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        tidy(folder)
    if jax.process_count() == 1 and jax.default_backend() == "cpu" and not jax.config.jax_logging_level:
        # XLA has two lines for each program that it rejects, and rejects all where its compiler was told to prefer no
        # gathers, as on Cascade Lake (jax#38445). JAX compiles them again, so nobody needs to know.
        jax.config.update("jax_logging_level", "CRITICAL")


def tidy(folder):
    """Removes the oldest programs of a folder that has more than `MOST` bytes of them. Others may do so as well."""
    found, room = [], MOST
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path.stat().st_size, path))
    for _, size, path in sorted(found, reverse=True):
        room -= size
        if room < 0:
            with contextlib.suppress(OSError):
                path.unlink()


def announced(name, place=2):
    """Decorates a compiled function to say when it compiles for new shapes, and how long that took.

    Its argument at `place` is features [B, T, ...], or a batch with them. `shapes` of the result has the compiled
    shapes.
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
