"""Parameters by their paths, such as encoder/blocks/layers/0/...: which are frozen, and the others' rates."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt_speech.system import UserError, refuse_if

LOWER = re.compile(r"encoder:(\d+)")
STATISTICS = "/norm/mean", "/norm/var"  # ends of the paths of batch norms' statistics
BLOCK = re.compile(r"(encoder/blocks/layers)/(\d+)/(.*)")


def path_of(keys):
    names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in keys]
    return "/".join(names[:-1] if names[-1] == "value" else names)


def lower_layers(freeze):
    """Returns the LAYERS of encoder:LAYERS in --freeze, or None."""
    counts = [int(match[1]) for x in freeze.split(",") if (match := LOWER.fullmatch(x.strip()))]
    return max(counts, default=None)


def within(path, prefix):
    return path == prefix or path.startswith(f"{prefix}/")


@jax.custom_vjp
def unstacked(x):
    """Returns an array's rows. Their gradients are stacked; JAX would add as many arrays of zeros with a row each."""
    return jnp.unstack(x)


unstacked.defvjp(lambda x: (jnp.unstack(x), None), lambda _, rows: (jnp.stack(rows),))


class Parts:
    """The choice of parameters to train. Those in training are a dictionary by path.

    With --scan, those of all blocks are one array, as the program of the encoder takes them: XLA removes the splitting
    and stacking, and the optimiser has few arrays.
    """

    def __init__(self, config, params):
        flat, self.tree = jax.tree_util.tree_flatten_with_path(params)
        self.paths = [path_of(keys) for keys, _ in flat]
        prefixes = [x.strip() for x in config.optimiser.freeze.split(",") if x.strip()]
        self.layers = lower_layers(config.optimiser.freeze)
        prefixes = [x for x in prefixes if not LOWER.fullmatch(x)]
        prefixes += self.statistics(config, prefixes)
        if self.layers is not None:
            prefixes += ["encoder/subsample", *(f"encoder/blocks/layers/{i}" for i in range(self.layers))]
        rates = [(name, float(x)) for name, x in config.optimiser.rates]
        for option, named in (("--freeze", prefixes), ("--rates", [name for name, _ in rates])):
            for prefix in named:
                if not any(within(path, prefix) for path in self.paths):
                    heads = ", ".join(dict.fromkeys(path.split("/")[0] for path in self.paths))
                    raise UserError(f"{option}: no parameter is called {prefix}; they begin with {heads}")
        self.trained = [not any(within(path, x) for x in prefixes) for path in self.paths]
        refuse_if(not any(self.trained), f"--freeze {config.optimiser.freeze} leaves nothing to train")
        free = (path for path, trained in zip(self.paths, self.trained) if trained)
        if config.network.batch_norm == "batch" and not any(path.endswith(STATISTICS) for path in free):
            raise UserError(f"--batch-norm batch: --freeze {config.optimiser.freeze} leaves no batch norm to train")
        matching = {p: [(len(x), factor) for x, factor in rates if within(p, x)] for p in self.paths}
        factors = [max(matching[path])[1] if matching[path] else 1.0 for path in self.paths]
        groups = {}
        for i, (path, free) in enumerate(zip(self.paths, self.trained)):
            block = config.compute.scan and BLOCK.fullmatch(path)
            groups.setdefault((block.expand(r"\1/*/\3") if block else path, free), []).append(i)
        self.groups, self.factors = {}, {}  # indices of the parameters of an array, and factors of its learning rate
        for group in groups.values():
            first, last = (BLOCK.fullmatch(self.paths[i]) for i in (group[0], group[-1]))
            name = first.expand(rf"\1/\2-{last[2]}/\3") if len(group) > 1 else self.paths[group[0]]
            column = np.reshape([factors[i] for i in group], (-1, *[1] * flat[group[0]][1].ndim))
            self.groups[name], self.factors[name] = group, float(column.min()) if np.ptp(column) == 0 else column

    def statistics(self, config, frozen):
        """Returns the paths of batch norms' statistics that --batch-norm freezes, besides the prefixes in --freeze."""
        paths = [path for path in self.paths if path.endswith(STATISTICS)]
        if config.network.batch_norm == "frozen":
            return paths
        refuse_if(not paths, "--batch-norm batch: the encoder has no batch norm")
        for prefix in frozen:
            if any(within(path, prefix) for path in paths):
                raise UserError(f"--batch-norm batch needs its batch norms: --freeze {prefix} must be encoder:N")
        return []

    def chosen(self, params, trained):
        leaves = jax.tree.leaves(params)
        chosen = {name: group for name, group in self.groups.items() if self.trained[group[0]] == trained}
        return {name: jnp.stack([leaves[i] for i in group]) if len(group) > 1 else leaves[group[0]]
                for name, group in chosen.items()}  # fmt: skip

    def free(self, params):
        """Returns {path: array} of the parameters that are trained."""
        return self.chosen(params, True)

    def frozen(self, params):
        return self.chosen(params, False)

    def whole(self, *some):
        """Returns the parameters from dictionaries that together have all of them."""
        arrays, leaves = {path: x for one in some for path, x in one.items()}, {}
        for name, group in self.groups.items():
            leaves |= zip(group, unstacked(arrays[name]) if len(group) > 1 else [arrays[name]])
        return jax.tree_util.tree_unflatten(self.tree, [leaves[i] for i in range(len(self.paths))])
