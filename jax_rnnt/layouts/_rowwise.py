"""A function of the rows of several logits, after their joint networks, as a joint network with values for "logits".

There are N rows, S blocks and V classes; E and P are the widths of encoder and predictor rows.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt.emissions._emission import Rows, scale_cotangent
from jax_rnnt.emissions._softmax import accumulation_dtype
from jax_rnnt.tiles._networks import RowFunction, instead


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Values(Rows[jax.Array, tuple[()]]):
    """Reads "logits" [N, 1, 1, 1] that are values already."""

    def forward(self, logits, nodes, *, strict=False):
        return {"value": logits[..., 0].astype(accumulation_dtype(logits.dtype))}, ()

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        return scale_cotangent(cotangents["value"], scale)[..., None]


def common_dtype(xs):
    """Returns the dtype of all xs; else float64 if one is that, else float32. Users may forbid JAX to promote."""
    dtypes = {x.dtype for x in xs}
    return dtypes.pop() if len(dtypes) == 1 else max(map(accumulation_dtype, dtypes), key=lambda x: x.itemsize)


def side_by_side(xs, shape):
    """Returns rows [*shape, E] of several networks as rows of one; all may be broadcast alike."""
    if not xs:
        return jnp.zeros((*shape, 1), jnp.float32)  # not 0 wide, since its reshapes infer a size
    if len({x.shape[:-1] for x in xs}) > 1:
        xs = [jnp.broadcast_to(x, (*shape, x.shape[-1])) for x in xs]
    dtype = common_dtype(xs)
    return xs[0] if len(xs) == 1 else jnp.concatenate([x.astype(dtype) for x in xs], -1)


def _cut(x, sizes):
    """Cuts a list, or the last dimension of an array, into these sizes; the rest of a list is one part more."""
    ends = list(itertools.accumulate(sizes, initial=0))
    if isinstance(x, list):
        return [*(x[a:b] for a, b in itertools.pairwise(ends)), x[ends[-1] :]]
    return [x[..., a:b] for a, b in itertools.pairwise(ends)]


@dataclasses.dataclass(frozen=True)
class Network:
    """One of the joint networks of `Rowwise`."""

    joint: Any  # the static part of the network
    parameters: int  # number of its parameters
    encoder: tuple[int, Any]  # width and dtype of its encoder rows
    predictor: tuple[int, Any]


@dataclasses.dataclass(frozen=True)
class Rowwise:
    """``function(*rows, *labels) -> values [N]``; rows come from a network or, where `sources` has None, from an array.

    Encoder rows of all networks come side by side, and so do predictor rows. After them come the nodes that count and
    the rows of arrays, [S, frames, columns, V]; labels are one array more. Parameters are those of the networks in
    order, then the constants of the function.
    """

    sources: tuple[Network | None, ...]
    function: RowFunction
    learned: tuple[bool, ...]  # which of the logits have a gradient; the others are not differentiated

    @property
    def networks(self) -> list[Network]:
        return [source for source in self.sources if source is not None]

    @property
    def arrays(self) -> list[int]:
        """The numbers of the arrays with a gradient."""
        learned = [x for x, source in zip(self.learned, self.sources) if source is None]
        return [i for i, x in enumerate(learned) if x]

    @property
    def random(self) -> bool:
        return self.function.random or any(x.joint.random for x in self.networks)

    def _each(self, change):
        """Returns the same function with `change` applied to every joint and to the function."""
        sources = (source and dataclasses.replace(source, joint=change(source.joint)) for source in self.sources)
        return dataclasses.replace(self, sources=tuple(sources), function=change(self.function))

    def differentiable(self):
        return self._each(lambda x: x.differentiable())

    def lowered_for(self, platforms):
        return self._each(lambda x: x.lowered_for(platforms))

    def barrier(self, x):
        return functools.reduce(lambda x, network: network.joint.barrier(x), self.networks, x)

    def _by_network(self, parameters):
        """Returns the parameters of each network, then those of the function."""
        return _cut(list(parameters), [x.parameters for x in self.networks])

    def _states(self, encoder, predictor):
        """Returns [(encoder rows, predictor rows)] for each network."""
        kinds = [x.encoder for x in self.networks], [x.predictor for x in self.networks]
        parts = [_cut(x, [width for width, _ in kind]) for x, kind in zip((encoder, predictor), kinds)]
        states = [[x.astype(dtype) for x, (_, dtype) in zip(*each)] for each in zip(parts, kinds)]
        return list(zip(*states))

    def _arguments(self, of_networks, counts, arrays):
        """Returns the rows of the logits in order, then the labels."""
        arrays = [instead(x, counts).reshape(-1, x.shape[-1]) for x in arrays]
        of_arrays = iter(arrays)
        rows = [next(of_arrays) if source is None else of_networks.pop(0) for source in self.sources]
        return *rows, *(labels[:, 0] for labels in of_arrays)

    def logits(self, parameters, encoder, predictor, counts, *arrays):
        *by_network, constants = self._by_network(parameters)
        states = self._states(encoder, predictor)
        logits = [x.joint.logits(p, *rows, counts) for x, p, rows in zip(self.networks, by_network, states)]
        return self.function.function(*constants, *self._arguments(logits, counts, arrays))[:, None]

    def pullback(self, parameters, encoder, predictor, counts, *arrays):
        *by_network, constants = self._by_network(parameters)
        learned = [x for x, source in zip(self.learned, self.sources) if source is not None]
        rows_of_networks, pulls = [], []
        for x, p, rows, is_learned in zip(self.networks, by_network, self._states(encoder, predictor), learned):
            pullback = x.joint.pullback if is_learned else functools.partial(_fixed, x.joint)
            logits, pull = pullback(p, rows[0], rows[1], counts)
            rows_of_networks.append(logits)
            pulls.append(pull)
        values, of_values = self.function.function.vjp(*constants, *self._arguments(rows_of_networks, counts, arrays))

        def gradients(x, totals, encoder, predictor):
            of_all = of_values(x[:, 0])
            of_constants, of_rows = _cut(list(of_all), [len(of_all) - len(self.sources)])
            *totals, total = totals
            total = [a + b.astype(a.dtype) for a, b in zip(total, of_constants, strict=True)]
            of_logits = [g for g, source in zip(of_rows, self.sources) if source is not None]
            of_arrays = [g for g, source, has in zip(of_rows, self.sources, self.learned) if source is None and has]
            states = self._states(encoder, predictor)
            gradients = [pull(g, t, *rows) for pull, g, t, rows in zip(pulls, of_logits, totals, states)]
            totals = [*(t for t, *_ in gradients), total]
            grads = (side_by_side([g[i] for g in gradients], x.shape[:-1]) for i, x in ((1, encoder), (2, predictor)))
            return totals, *grads, *of_arrays

        return values[:, None], gradients

    def zeros(self, parameters, blocks):
        """Returns zeros to sum the parameters' gradients in, by network, those of the function last."""
        *by_network, constants = self._by_network(parameters)
        sums = [x.joint.zeros(p, blocks) for x, p in zip(self.networks, by_network)]
        return [*sums, self.function.zeros(constants, blocks)]

    def totals(self, sums):
        *by_network, constants = sums
        totals = (x.joint.totals(t) for x, t in zip(self.networks, by_network))
        return [*itertools.chain.from_iterable(totals), *self.function.totals(constants)]


def _fixed(joint, parameters, encoder, predictor, counts):
    """Implements `pullback` for a network without a gradient."""
    zeros = jnp.zeros_like(encoder), jnp.zeros_like(predictor)
    return joint.logits(parameters, encoder, predictor, counts), lambda _, totals, *__: (totals, *zeros)
