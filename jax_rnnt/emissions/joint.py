"""Joint networks on tiles: blocks of encoder rows meet blocks of predictor rows.

N rows of logits, S blocks, E and P the widths of encoder and predictor rows, H units, V classes.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jax_rnnt.emissions.softmax import accumulation_dtype


def pair(encoder, predictor):
    """Rows [N, E] and [N, P] of all nodes of blocks [S, frames, E] and [S, columns, P]."""
    shape = (*encoder.shape[:2], predictor.shape[1])
    rows = encoder[:, :, None], predictor[:, None]
    return [jnp.broadcast_to(x, (*shape, x.shape[-1])).reshape(-1, x.shape[-1]) for x in rows]


@dataclasses.dataclass(frozen=True)
class Linear:
    """activation(encoder + predictor) @ weight + bias, of parameters (weight, bias) or (weight,)."""

    activation: Callable[[jax.Array], jax.Array]
    random = False

    def _hidden(self, encoder, predictor):
        return self.activation(encoder[:, :, None] + predictor[:, None])

    def _logits(self, parameters, hidden):
        weight, *bias = parameters
        logits = _product(hidden, weight, "nh,hv->nv")
        return (logits + bias[0].astype(logits.dtype)[None] if bias else logits).astype(weight.dtype)

    def logits(self, parameters, encoder, predictor):
        wide = accumulation_dtype(parameters[0].dtype)
        hidden = self._hidden(encoder.astype(wide), predictor.astype(wide))
        return self._logits(parameters, hidden.reshape(-1, hidden.shape[-1]).astype(parameters[0].dtype))

    def pullback(self, parameters, encoder, predictor):
        weight, *bias = parameters
        wide = accumulation_dtype(weight.dtype)
        hidden, pull = jax.vjp(self._hidden, encoder.astype(wide), predictor.astype(wide))
        shape, hidden = hidden.shape, hidden.reshape(-1, hidden.shape[-1]).astype(weight.dtype)

        def gradients(x):
            of_hidden = _product(x, weight, "nv,hv->nh").reshape(shape)
            of_weight = _product(hidden, x, "nh,nv->hv")
            of_bias = [jnp.sum(x, 0, dtype=wide) for _ in bias]
            return [of_weight, *of_bias], *pull(of_hidden)

        return self._logits(parameters, hidden), gradients


def _product(x, y, dimensions):
    """A matrix product, summed and returned in float32 or better."""
    return jnp.einsum(dimensions, x, y, preferred_element_type=accumulation_dtype(y.dtype))


@dataclasses.dataclass(frozen=True)
class Traced:
    """Any function of rows, as a jaxpr whose constants are the parameters."""

    jaxpr: Any

    @property
    def random(self) -> bool:
        """Whether it may draw random numbers: rows then depend on their place in the tile."""
        return re.search(r"random_|threefry|rng_", str(self.jaxpr)) is not None

    def logits(self, parameters, encoder, predictor):
        return _evaluate(self.jaxpr, parameters, *pair(encoder, predictor))[0]

    def pullback(self, parameters, encoder, predictor):
        trained = [i for i, x in enumerate(parameters) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def function(inexact, encoder32, predictor32):
            every = list(parameters)
            for i, x in zip(trained, inexact):
                every[i] = x
            # Differentiated in float32, so that sums over the rows of a state are.
            return self.logits(every, encoder32.astype(encoder.dtype), predictor32.astype(predictor.dtype))

        wide = (x.astype(accumulation_dtype(x.dtype)) for x in (encoder, predictor))
        return jax.vjp(function, [parameters[i] for i in trained], *wide)


def _evaluate(jaxpr, constants, *arguments):
    """The results of a jaxpr in the present context: that in which it was made may have had a mesh."""
    present = jax.make_jaxpr(jax.lax.neg)(1.0).eqns[0].ctx
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments)))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("pvary", "pcast"):
            outputs = [read(v) for v in equation.invars]
        elif name in ("pjit", "jit"):
            closed = equation.params["jaxpr"]
            outputs = _evaluate(closed.jaxpr, closed.consts, *map(read, equation.invars))
        else:
            inputs = list(dict.fromkeys(v for v in equation.invars if not isinstance(v, Literal)))
            single = jaxpr.replace(
                constvars=[], invars=inputs, outvars=equation.outvars, eqns=[equation.replace(ctx=present)]
            )
            outputs = jax.core.eval_jaxpr(single, (), *map(read, inputs))
        values.update(zip(equation.outvars, outputs))
    return list(map(read, jaxpr.outvars))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearJoint:
    """Joint network ``activation(encoder + predictor) @ weight + bias``, known to `joint_rnnt_loss`.

    H units, V classes. A pytree of its arrays. The sum and the activation are in float32 (float64 for a float64
    weight), the product and the logits in the dtype of the weight; gradients are summed in float32.

    Parameters
    ----------
    weight : Array, floating [H, V]
        Output layer.
    bias : Array, floating [V], optional
        Of the output layer.
    activation : callable, default jnp.tanh
        Element-wise, and hashable: a function of a module, not a new lambda at every call.

    See Also
    --------
    joint_rnnt_loss : The loss.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import LinearJoint
    >>> joint = LinearJoint(jnp.ones((4, 3)), jnp.zeros(3))
    >>> joint(jnp.zeros((7, 1, 4)), jnp.zeros((5, 4))).shape
    (7, 5, 3)
    """

    weight: jax.Array
    bias: jax.Array | None = None
    activation: Callable[[jax.Array], jax.Array] = dataclasses.field(default=jnp.tanh, metadata={"static": True})

    def __call__(self, encoder: jax.Array, predictor: jax.Array) -> jax.Array:
        """Logits [..., V] of rows [..., H], whose leading dimensions are broadcast against each other."""
        shape = jnp.broadcast_shapes(encoder.shape, predictor.shape)
        rows = [jnp.broadcast_to(x, shape).reshape(-1, 1, shape[-1]) for x in (encoder, predictor)]
        return Linear(self.activation).logits(self.parameters, *rows).reshape(*shape[:-1], -1)

    @property
    def parameters(self) -> list[jax.Array]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def split(joint, rows: int, encoder, predictor):
    """(static part, parameters) of a joint network for tiles of so many rows."""
    if isinstance(joint, LinearJoint):
        return Linear(joint.activation), joint.parameters
    shapes = (jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype) for x in (encoder, predictor))
    # A new function, as what is traced of an old one may hold parameters of before their update.
    closed = jax.make_jaxpr(lambda *rows: joint(*rows))(*shapes)
    return Traced(closed.jaxpr), [jnp.asarray(x) for x in closed.consts]
