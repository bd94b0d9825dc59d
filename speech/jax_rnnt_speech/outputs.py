"""Where commands write, checked before they work, and the bars that say how far they are."""

import functools
import os
from pathlib import Path

from tqdm import tqdm

from jax_rnnt_speech.config import UserError

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
