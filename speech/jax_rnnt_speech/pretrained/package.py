"""A model of any kind as a folder to hand on: its weights, everything that their use needs, and a card for people."""

import hashlib
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_rnnt_speech.config.files import to_json
from jax_rnnt_speech.data import sources
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.pretrained import files
from jax_rnnt_speech.system import UserError, refuse_if

SETUP, WEIGHTS, CARD = "recogniser.json", files.WEIGHTS, "card.md"
FILES = "train", "valid", "text", "noise", "init"


def write(model, folder, dtype, card=""):
    """Writes a model as a folder. Its card is `card`, then the facts: size, numbers, and the hash of the weights."""
    dtype = jnp.dtype(dtype)
    arrays, largest = {}, float(jnp.finfo(dtype).max)

    def taken(path, x):
        refuse_if(not np.abs(x).max(initial=0) <= largest, f"{path} must have finite numbers of {dtype.name}")
        arrays[path] = np.asarray(x).astype(dtype)
        return x

    files.mapped(model.params, taken)
    config = model.config  # without the folders of this machine, which mean nothing elsewhere
    config = config.replace(**{name: sources.last_parts(config.get(name)) for name in FILES})
    setup = model.setup() | {"config": to_json(config)}
    with files.replaced(folder) as new:
        (new / SETUP).write_text(json.dumps(setup) + "\n", "utf-8")
        files.save(arrays, new / WEIGHTS, like=new / SETUP)
        digest = hashlib.sha256((new / WEIGHTS).read_bytes()).hexdigest()
        size, count = (new / WEIGHTS).stat().st_size / 1e6, sum(x.size for x in arrays.values())
        facts = f"{count:,} parameters in {dtype.name}, {size:.1f} MB; {WEIGHTS} has the SHA-256 {digest}.\n"
        (new / CARD).write_text(f"{card.rstrip()}\n\n{facts}".lstrip(), "utf-8")


def setup_of(folder):
    """Returns the setup of a folder, from which `Model.from_setup` makes a model without parameters."""
    file = Path(folder) / SETUP
    setup = files.read_json(file)
    if not isinstance(setup, dict) or not {"config", "tokens", "mean", "deviation"} <= {*setup}:
        raise UserError(f"{file} must have config, tokens, mean and deviation")
    return setup


def read(folder):
    """Returns a Model with its parameters, in float32."""
    model = Model.from_setup(setup_of(folder))
    arrays = files.read_tensors(folder)

    def value(path, x):
        if path not in arrays or arrays[path].shape != x.shape:
            shape = arrays[path].shape if path in arrays else "nothing"
            raise UserError(f"{folder / WEIGHTS}: {path} must have shape {x.shape}, got {shape}")
        return arrays.pop(path)

    model.params = files.mapped(model.shapes, value)
    refuse_if(arrays, f"{folder} has tensors that are not of this model: {', '.join(sorted(arrays))}")
    return model
