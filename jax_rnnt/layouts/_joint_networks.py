"""`LinearJoint`, and the joint network of `JointLogits` in the form in which tiles call it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.tiles._networks import Linear, RowFunction, Tanh


@keywords
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearJoint:
    """The usual joint network, ``activation(encoder + predictor) @ weight + bias``, for `JointLogits`.

    There are H units and V classes. It is a pytree of its arrays. The sum and the activation are in float32 (float64
    for a float64 weight), the product and the logits in the dtype of the weight; sums of gradients are in float32 too.

    Parameters
    ----------
    weight : Array, floating [H, V]
        Output layer.
    bias : Array, floating [V], optional
        Bias of the output layer.
    activation : callable, default jnp.tanh
        Element-wise and hashable: a module-level function, not a new lambda at every call.

    See Also
    --------
    JointLogits : Its logits, computed in tiles.

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
        """Returns logits [..., V] of rows [..., H], whose leading dimensions broadcast against each other."""
        return Linear(self.activation).rows(self.parameters, encoder, predictor)

    @property
    def parameters(self) -> list[jax.Array]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def row_avals(rows: int, encoder, predictor):
    """Returns avals of `rows` rows to trace a joint network with; they vary over the mesh axes of both arrays."""
    both = _xla.vary_together(encoder, predictor)
    return [_xla.result_aval(jax.typeof(x), (rows, x.shape[-1]), x.dtype, 0) for x in both]


def split(logits, rows: int):
    """Returns (static part, parameters) of the joint network of checked `JointLogits`, for tiles of `rows` rows."""
    joint, parameters = logits.joint, logits.parameters
    if isinstance(joint, LinearJoint):
        return Linear(joint.activation), joint.parameters
    traced: Any
    avals = row_avals(rows, logits.encoder_out, logits.predictor_out)
    if parameters is None:
        traced, parameters, result = _xla.trace(joint, *avals)
    else:
        traced, parameters, result = _xla.pure(joint, parameters, *avals)
    check_rows(result, rows)
    return RowFunction(traced), parameters


def check_rows(logits, rows: int):
    """Raises an error unless `logits` is [rows, V]."""
    shape = getattr(logits, "shape", None)
    if shape is None or len(shape) != 2 or shape[0] != rows or shape[1] < 1:
        raise _checks.bad_value(f"joint must make logits [N, V] of N rows, got {logits} of {rows} rows.")
