"""Parameters by their paths, such as encoder/blocks/layers/0/...: which are frozen, and how fast the others learn."""

import re

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_rnnt_speech.config import UserError

LOWER = re.compile(r"encoder:(\d+)")


def path_of(keys):
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys]
    return "/".join(names[:-1] if names[-1] == "value" else names)


def lower_layers(freeze):
    """LAYERS of encoder:LAYERS in --freeze, or None."""
    found = [int(match[1]) for x in freeze.split(",") if (match := LOWER.fullmatch(x.strip()))]
    return max(found, default=None)


def within(path, prefix):
    return path == prefix or path.startswith(f"{prefix}/")


class Parts:
    """Which of the parameters are trained. As they are trained, they are a dictionary by path."""

    def __init__(self, config, params):
        flat, self.tree = jax.tree_util.tree_flatten_with_path(params)
        self.paths = [path_of(keys) for keys, _ in flat]
        prefixes = [x.strip() for x in config.freeze.split(",") if x.strip()]
        self.layers = lower_layers(config.freeze)
        if self.layers is not None:
            prefixes = [x for x in prefixes if not LOWER.fullmatch(x)]
            prefixes += ["encoder/subsample", *(f"encoder/blocks/layers/{i}" for i in range(self.layers))]
        rates = [(name, float(x)) for name, x in config.rates]
        for option, known in (("--freeze", prefixes), ("--rates", [name for name, _ in rates])):
            for prefix in known:
                if not any(within(path, prefix) for path in self.paths):
                    heads = ", ".join(dict.fromkeys(path.split("/")[0] for path in self.paths))
                    raise UserError(f"{option}: no parameter is called {prefix}; they begin with {heads}")
        self.trained = [not any(within(path, x) for x in prefixes) for path in self.paths]
        if not any(self.trained):
            raise UserError(f"--freeze {config.freeze} leaves nothing to train")
        matching = {p: [(len(x), factor) for x, factor in rates if within(p, x)] for p in self.paths}
        self.factors = {path: max(x)[1] if x else 1.0 for path, x in matching.items()}

    def free(self, params):
        """{path: array} of those that are trained."""
        return {path: x for path, x, free in zip(self.paths, jax.tree.leaves(params), self.trained) if free}

    def frozen(self, params):
        return {path: x for path, x, free in zip(self.paths, jax.tree.leaves(params), self.trained) if not free}

    def whole(self, *some):
        """The parameters of dictionaries that have all of them."""
        known = {path: x for one in some for path, x in one.items()}
        return jax.tree_util.tree_unflatten(self.tree, [known[path] for path in self.paths])


def placed(mesh, tree, shard):
    """Where each array lies: on all devices, or with `shard` in parts, along its largest dimension that allows it."""

    def place(x):
        axes = [i for i, size in enumerate(np.shape(x)) if size and size % mesh.size == 0]
        if not shard or not axes:
            return NamedSharding(mesh, PartitionSpec())
        axis = max(axes, key=lambda i: np.shape(x)[i])
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))

    return jax.tree.map(place, tree)
