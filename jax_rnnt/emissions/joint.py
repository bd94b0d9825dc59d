"""Joint networks on tiles: blocks of encoder rows meet blocks of predictor rows.

N rows of logits, S blocks, E and P the widths of encoder and predictor rows, H units, V classes.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import ad

from jax_rnnt import _ffi
from jax_rnnt._vma import vary_together
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

    def differentiable(self):
        return self

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
    on_mesh: bool  # whether it was traced where there is a mesh, whose axes and shardings are then all over it
    derivative: Any = None  # where it was: a jaxpr of values and tangents, to both of the logits

    @property
    def random(self) -> bool:
        """Whether it may draw random numbers: rows then depend on their place in the tile."""
        return re.search(r"random_|threefry|rng_", str(self.jaxpr)) is not None

    def differentiable(self):
        """The same with its derivative, traced where the jaxpr was: rules of custom derivatives know that place."""
        if not self.on_mesh:
            return self
        count = len(self.jaxpr.constvars)

        def function(values):
            return jax.core.eval_jaxpr(self.jaxpr, values[:count], *values[count:])[0]

        def derivative(values, tangents):
            return jax.jvp(lambda trained: function(_updated(values, trained)), [_trained(values)], [tangents])

        avals = [v.aval for v in (*self.jaxpr.constvars, *self.jaxpr.invars)]
        return dataclasses.replace(self, derivative=jax.make_jaxpr(derivative)(avals, _trained(avals)))

    def _apply(self, *values):
        if not self.on_mesh:
            return jax.core.eval_jaxpr(self.jaxpr, values[: len(self.jaxpr.constvars)], *values[-2:])[0]
        if self.derivative is None:
            return _evaluate(self.jaxpr, *values)[0]
        logits = jax.custom_jvp(lambda *values: _evaluate(self.jaxpr, *values)[0])

        @logits.defjvp
        def _(values, tangents):
            trained = [t for x, t in zip(values, tangents, strict=True) if is_trained(x)]
            return tuple(_evaluate(self.derivative.jaxpr, *self.derivative.consts, *values, *trained))

        return logits(*values)

    def logits(self, parameters, encoder, predictor):
        return self._apply(*parameters, *pair(encoder, predictor))

    def pullback(self, parameters, encoder, predictor):
        def function(trained, encoder32, predictor32):
            # Rows meet in float32, so that their gradients are summed in it.
            rows = zip(pair(encoder32, predictor32), (encoder, predictor))
            return self._apply(*_updated(parameters, trained), *(x.astype(like.dtype) for x, like in rows))

        wide = (x.astype(sum_dtype(x)) for x in (encoder, predictor))
        return jax.vjp(function, _trained(parameters), *wide)


def is_trained(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def sum_dtype(x):
    """In which gradients of x are summed."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.complexfloating) else accumulation_dtype(x.dtype)


def _trained(values):
    return [x for x in values if is_trained(x)]


def _updated(values, trained):
    trained = iter(trained)
    return [next(trained) if is_trained(x) else x for x in values]


# Calls, by name the parameter that holds what they call. Derivatives have been taken before.
_CALLS = dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
_CALLS |= {"pjit": "jaxpr", "jit": "jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}


def _evaluate(jaxpr, *operands):
    """The results of a jaxpr that was traced on a mesh, given its constants and arguments, where there is none."""
    present = jax.make_jaxpr(jax.lax.neg)(1.0).eqns[0].ctx
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), operands, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        arguments = [read(v) for v in equation.invars]
        if name in ("pvary", "pcast", "reshard", "sharding_constraint"):
            outputs = arguments
        elif name in _CALLS:
            called = params[_CALLS[name]]
            outputs = _evaluate(called.jaxpr, *called.consts, *arguments)
        elif name in ("checkpoint", "remat2"):
            function = functools.partial(_evaluate, params["jaxpr"])
            outputs = jax.checkpoint(function, prevent_cse=params["prevent_cse"], policy=params["policy"])(*arguments)
        else:
            if name == "custom_lin":
                params = params | {"bwd": _plain_bwd(equation)}
            inputs = {v: x for v, x in zip(equation.invars, arguments) if not isinstance(v, Literal)}
            anew = equation.replace(ctx=present, params=jax.tree.map(_anew, params))
            single = jaxpr.replace(constvars=[], invars=[*inputs], outvars=equation.outvars, eqns=[anew])
            outputs = jax.core.eval_jaxpr(single, (), *inputs.values())
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _plain_bwd(equation):
    """The `bwd` of a `jax.custom_vjp`, which wants arrays, and gives them, as they were where it was traced."""
    params = equation.params
    bwd, count, zeros = (params[k] for k in ("bwd", "num_res", "in_zeros"))
    avals = [*(v.aval for v in equation.invars[:count]), *params["out_avals"]]

    logs: list[None] = []

    def gradients(*operands):
        made = bwd.call_wrapped(*operands)
        if isinstance(made, tuple):  # from jax 0.12 on with logs beside the gradients, which nobody asks for here
            made, _ = made
            logs.append(None)
        return [ad.instantiate_zeros(x) for x, zero in zip(made, zeros, strict=True) if not zero]

    with equation.ctx.manager:
        traced = jax.make_jaxpr(gradients)(*avals)

    def plain(*operands):
        made = iter(_evaluate(traced.jaxpr, *traced.consts, *operands))
        made = [None if zero else next(made) for zero in zeros]
        return (made, None) if logs else made

    return linear_util.wrap_init(plain, debug_info=bwd.debug_info)


def _anew(param):
    """A parameter of an equation in the present context."""
    if isinstance(param, ClosedJaxpr):
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in param.jaxpr.invars]
        return jax.make_jaxpr(functools.partial(_evaluate, param.jaxpr, *param.consts))(*shapes)
    if isinstance(param, jax.core.ShapedArray):
        return jax.core.ShapedArray(param.shape, param.dtype)
    return None if isinstance(param, jax.sharding.Sharding) else param


@dataclasses.dataclass(frozen=True, repr=False)
class Tanh:
    """jnp.tanh as a default: unlike the jitted function it can be pickled, and signatures show no address."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """jnp.tanh(x)."""
        return jnp.tanh(x)

    def __repr__(self) -> str:
        return "jnp.tanh"


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
    activation: Callable[[jax.Array], jax.Array] = dataclasses.field(default=Tanh(), metadata={"static": True})

    def __call__(self, encoder: jax.Array, predictor: jax.Array) -> jax.Array:
        """Logits [..., V] of rows [..., H], whose leading dimensions are broadcast against each other."""
        shape = jnp.broadcast_shapes(encoder.shape, predictor.shape)
        rows = [jnp.broadcast_to(x, shape).reshape(-1, 1, shape[-1]) for x in (encoder, predictor)]
        return Linear(self.activation).logits(self.parameters, *rows).reshape(*shape[:-1], -1)

    @property
    def parameters(self) -> list[jax.Array]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def row_avals(rows: int, encoder, predictor):
    """What a joint network is traced with: so many rows, which vary over mesh axes as those of all nodes would."""
    return [_ffi.result_aval(jax.typeof(x), (rows, x.shape[-1]), x.dtype, 0) for x in vary_together(encoder, predictor)]


def split(joint, rows: int, encoder, predictor):
    """(static part, parameters) of a joint network for tiles of so many rows."""
    if isinstance(joint, LinearJoint):
        return Linear(joint.activation), joint.parameters
    # A new function, as what is traced of an old one may hold parameters of before their update.
    closed, made = jax.make_jaxpr(lambda *rows: joint(*rows), return_shape=True)(*row_avals(rows, encoder, predictor))
    check_rows(made, rows)
    return Traced(closed.jaxpr, _on_mesh(closed.jaxpr)), [jnp.asarray(x) for x in closed.consts]


def _on_mesh(jaxpr) -> bool:
    """Whether it was traced, just now, where arrays have types that tell of a mesh."""
    shardings = (getattr(v.aval, "sharding", None) for v in (*jaxpr.constvars, *jaxpr.invars))
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    return not all(mesh.empty for mesh in (jax.sharding.get_abstract_mesh(), *meshes))


def check_rows(made, rows: int):
    """An error unless this is [rows, V]."""
    shape = getattr(made, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != rows or shape[1] < 1:
        raise ValueError(f"joint_rnnt_loss: joint must make logits [N, V] of N rows, got {made} of {rows} rows.")
