"""Joint networks in the form in which tiles call them: blocks of encoder rows meet blocks of predictor rows.

There are N rows of logits and S blocks; E and P are the widths of encoder and predictor rows. H units, V classes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _xla
from jax_rnnt.emissions._softmax import accumulation_dtype


def instead(x, counts):
    """Replaces rows of x [S, frames or 1, columns or 1, ...] that do not count by the first one of the block that does.

    So neither NaN or inf in these rows nor what a function makes of them reaches a gradient: a block has a row that
    counts. `counts` is bool [S, frames, columns]; None means that all rows count.
    """
    if counts is None:
        return x
    first = jnp.argmax(counts.reshape(len(counts), -1), -1).astype(jnp.int32)
    node = first // counts.shape[2], first % counts.shape[2]
    row = x[jnp.arange(len(x)), *(jnp.minimum(i, n - 1) for i, n in zip(node, x.shape[1:]))]
    row = jax.lax.stop_gradient(row)[:, None, None]
    return jnp.where(counts.reshape(*counts.shape, *(1 for _ in x.shape[3:])), x, row)


def pair(encoder, predictor, counts=None):
    """Returns rows [N, E] and [N, P] of all nodes of blocks [S, frames, E] and [S, columns, P]."""
    shape = (*encoder.shape[:2], predictor.shape[1])
    rows = (instead(x, counts) for x in (encoder[:, :, None], predictor[:, None]))
    return [jnp.broadcast_to(x, (*shape, x.shape[-1])).reshape(math.prod(shape), x.shape[-1]) for x in rows]


class TileJoint:
    """The static part of a joint network, as tiles call it. `random` tells if it may draw random numbers."""

    def differentiable(self):
        """Returns the network with its derivative. Call it in the mesh context of the loss."""
        return self

    def lowered_for(self, platforms):
        """Returns the network for these platforms."""
        return self

    def barrier(self, x):
        """Returns x behind a barrier where XLA must share no result with x itself."""
        return x

    def totals(self, sums):
        """Returns the gradients of the parameters from those in `zeros`."""
        return sums


@dataclasses.dataclass(frozen=True)
class Linear(TileJoint):
    """activation(encoder + predictor) @ weight + bias, for parameters (weight, bias) or (weight,).

    On a CPU (`wide`), products are rounded to the dtype of the weight after the next operation, and hidden units are
    kept for their gradient. Elsewhere memory traffic costs more than arithmetic: products are rounded at once, and
    hidden units are made again.
    """

    activation: Callable[[jax.Array], jax.Array]
    wide: bool = True
    random = False

    def lowered_for(self, platforms):
        return dataclasses.replace(self, wide=platforms == ("cpu",))

    def barrier(self, x):  # on a CPU it would copy x
        return x if self.wide else jax.lax.optimization_barrier(x)

    def _sum(self, dtype, encoder, predictor, counts=None):
        wide = accumulation_dtype(dtype)
        return instead(encoder.astype(wide)[:, :, None], counts) + instead(predictor.astype(wide)[:, None], counts)

    def _product(self, x, weight, dimensions):
        """Returns a matrix product, summed in float32 or better."""
        wide = accumulation_dtype(weight.dtype) if self.wide else weight.dtype
        return jnp.einsum(dimensions, x, weight, preferred_element_type=wide)

    def _logits(self, parameters, hidden):
        weight, *bias = parameters
        logits = self._product(hidden, weight, "...h,hv->...v")
        ones = (1,) * (hidden.ndim - 1)
        return (logits + bias[0].astype(logits.dtype).reshape(*ones, -1) if bias else logits).astype(weight.dtype)

    def logits(self, parameters, encoder, predictor, counts=None):
        dtype = parameters[0].dtype
        hidden = self.activation(self._sum(dtype, encoder, predictor, counts))
        return self._logits(parameters, hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1]).astype(dtype))

    def rows(self, parameters, encoder, predictor):
        """Returns logits [..., V] of rows [..., H], whose leading dimensions broadcast against each other."""
        dtype = parameters[0].dtype
        wide = accumulation_dtype(dtype)
        shape = jnp.broadcast_shapes(encoder.shape, predictor.shape)
        encoder, predictor = (
            x.astype(wide).reshape((1,) * (len(shape) - x.ndim) + x.shape) for x in (encoder, predictor)
        )
        return self._logits(parameters, self.activation(encoder + predictor).astype(dtype))

    def pullback(self, parameters, encoder, predictor, counts=None):
        weight, *bias = parameters
        wide = accumulation_dtype(weight.dtype)
        hidden = self.activation(self._sum(weight.dtype, encoder, predictor, counts))
        shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1]).astype(weight.dtype)

        def gradients(x, totals, encoder, predictor):
            sums = [jnp.einsum("nh,nv->hv", hidden, x, preferred_element_type=wide)]
            sums += [jnp.sum(x.reshape(shape[0], -1, x.shape[-1]), 1, dtype=wide) for _ in bias]
            # This comes first, so that the memory of the hidden units is free for their gradient.
            x, totals = self.barrier((x, [a + b for a, b in zip(totals, sums)]))
            _, pull = jax.vjp(self.activation, self._sum(weight.dtype, encoder, predictor, counts))
            (grad_rows,) = pull(self._product(x, weight, "nv,hv->nh").reshape(shape).astype(wide))
            if not self.wide:
                # Two sums read it. Without the barrier, XLA keeps it in float32.
                grad_rows = self.barrier(grad_rows.astype(weight.dtype)).astype(wide)
            return totals, jnp.sum(grad_rows, 2), jnp.sum(grad_rows, 1)

        return self._logits(parameters, hidden), gradients

    def zeros(self, parameters, blocks):
        """Returns zeros to sum the parameters' gradients in. The bias has a sum for each block of a tile."""
        weight, *bias = (jnp.zeros(x.shape, accumulation_dtype(parameters[0].dtype)) for x in parameters)
        return [weight, *(jnp.broadcast_to(x, (blocks, *x.shape)) for x in bias)]

    def totals(self, sums):
        weight, *bias = sums
        return [weight, *(jnp.sum(x, 0) for x in bias)]


@dataclasses.dataclass(frozen=True)
class RowFunction(TileJoint):
    """Any function of parameters and rows."""

    function: Any  # `Pure` or `Traced` of `_xla.retracing`

    @property
    def random(self) -> bool:
        return self.function.random

    def differentiable(self):
        return dataclasses.replace(self, function=self.function.differentiable())

    def logits(self, parameters, encoder, predictor, counts=None):
        return self.function(*parameters, *pair(encoder, predictor, counts))

    def pullback(self, parameters, encoder, predictor, counts=None):
        def rows(*wide):
            return [x.astype(like.dtype) for x, like in zip(pair(wide[0], wide[1], counts), (encoder, predictor))]

        # Rows meet in float32, so that their gradients are summed in it.
        pairs, pull = jax.vjp(rows, *(x.astype(sum_dtype(x)) for x in (encoder, predictor)))
        logits, of_values = self.function.vjp(*parameters, *pairs)

        def gradients(x, totals, *_):
            *of_parameters, grad_encoder, grad_predictor = of_values(x)
            return [a + b.astype(a.dtype) for a, b in zip(totals, of_parameters)], *pull([grad_encoder, grad_predictor])

        return logits, gradients

    def zeros(self, parameters, blocks):
        """Returns zeros to sum the parameters' gradients in."""
        return [jnp.zeros(x.shape, sum_dtype(x)) for x in parameters if _xla.is_trained(x)]


def sum_dtype(x):
    """Returns the dtype in which gradients of x are summed."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.complexfloating) else accumulation_dtype(x.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class Tanh:
    """jnp.tanh as a default: unlike the jitted function it can be pickled, and signatures show no address."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns jnp.tanh(x)."""
        return jnp.tanh(x)

    def __repr__(self) -> str:
        return "jnp.tanh"
