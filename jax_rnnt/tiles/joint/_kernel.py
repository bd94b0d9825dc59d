"""The kernels of a device for a linear joint network, and the limits of a problem that all of them share."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.tiles._networks import Tanh


@dataclasses.dataclass(frozen=True)
class JointKernel:
    """The kernels of a linear joint network and its loss on one kind of device.

    `forward` and `backward` work on one batch dimension, and may be called where XLA's partitioner does not look.
    """

    name: str  # name of the devices
    # (`Tiled`, parameters, `TileInputs`, device), with avals for arrays, to the static part of both calls, or to a
    # sentence that says why there is no kernel for the problem. `device` has the facts that `_xla.Grouped` knows. A
    # plan has `blocks`, the `Blocks` of its list.
    plan: Callable[..., Any]
    # (plan, parameters, inputs, interpret) to (planes by slot, norm), each [B N, T, U1].
    forward: Callable[..., Any]
    # (plan, parameters, inputs, cotangents, norm, scale, clamp, flags, interpret) to (gradient of the encoder
    # [B, T, H], of the predictor [B N, U1, H], those of the parameters). `flags`, bool [B N, blocks of frames, blocks
    # of columns], says which blocks count. Gradients are in float32, but that of the encoder may have its type.
    backward: Callable[..., Any]


@jax.custom_jvp
def _gelu(x):
    """Computes `jax.nn.gelu` with approximate=False: Mosaic has neither erfc nor JAX's derivative of erf."""
    return x * _normal(x)


def _normal(x):
    return 0.5 + 0.5 * lax.erf(x * np.float32(math.sqrt(0.5)))


@_gelu.defjvp
def _(primals, tangents):
    (x,) = primals
    density = jnp.exp(-0.5 * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
    return _gelu(x), tangents[0] * (_normal(x) + x * density)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu, "exact_gelu": _gelu,
}  # fmt: skip


def activation_of(function) -> str | None:
    """Returns the name in `ACTIVATIONS` of the function of a `LinearJoint`; None if it is none of them."""
    approximate = True
    if isinstance(function, functools.partial) and function.func is jax.nn.gelu and not function.args:
        if set(function.keywords) - {"approximate"}:
            return None
        function, approximate = jax.nn.gelu, bool(function.keywords.get("approximate", True))
    if isinstance(function, Tanh) or function is lax.tanh:
        return "tanh"
    if function is jax.nn.gelu and not approximate:
        return "exact_gelu"
    return next((name for name, f in ACTIVATIONS.items() if f is function), None)


def refused(tiled, parameters, inputs) -> str | None:
    """Returns why no device has a kernel for avals of the operands."""
    softmax = tiled.inner
    if type(softmax) is not Softmax:
        return "its classes are split over devices"
    if any(x.dtype == jnp.float64 for x in (parameters[0], inputs.encoder, inputs.predictor)):
        return "it takes no float64"
    if activation_of(tiled.joint.activation) is None:
        names = "jnp.tanh, jax.nn.relu, jax.nn.silu and jax.nn.gelu"
        return f"it has the activations {names}, got {tiled.joint.activation!r}"
    if len(set(softmax.blanks)) < len(softmax.blanks):
        return f"its blanks must differ, got {softmax.blanks}"
    return None
