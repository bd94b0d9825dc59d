"""Named mesh axes over which one loss is split, and collectives over them.

Inside `jax.shard_map(..., check_vma=True)` types tell which arrays vary over an axis, and JAX transposes a sum over
devices of varying arrays into no collective. Without these types (`check_vma=False`, `pmap`) it transposes the sum into
a sum. Then the cotangents of a result that all devices share are parts, one a device, and `shared` adds them.
"""

import functools
from typing import Any

import jax

from jax_rnnt._xla import varying_axes


def axis_size(axis: str) -> int | None:
    """Returns the number of an axis's devices if this function runs there as one program each, else None."""
    try:
        return jax.lax.psum(1, axis)
    except NameError:
        return None


def varies(x: jax.Array, axis: str) -> bool:
    """Returns True if the type of x says that devices of the axis hold different values."""
    return axis in varying_axes(jax.typeof(x))


def is_typed(axis: str) -> bool:
    """Returns True if the types of arrays say whether they vary over the axis."""
    return varies(jax.lax.axis_index(axis), axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_untyped(x, axis):
    return jax.lax.psum(x, axis)


_sum_untyped.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, cotangent: (cotangent,))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _shared_untyped(x, axis):
    return x


_shared_untyped.defvjp(lambda x, axis: (x, None), lambda axis, _, cotangent: (jax.lax.psum(cotangent, axis),))


def sum_over(axis: str, x):
    """Returns the sum over the devices of the axis. Its cotangent is that of `shared`, the same on all of them."""
    return jax.lax.psum(x, axis) if is_typed(axis) else _sum_untyped(x, axis)


def shared(axis: str, x):
    """Returns x, the same on all devices of the axis and made from `sum_over`: a result of all of them together."""
    return x if is_typed(axis) else _shared_untyped(x, axis)


def mesh_with(axes, arrays):
    """Returns a mesh that has these axes, from the context or from one of the arrays; None if there is none."""
    meshes: list[Any] = [jax.sharding.get_abstract_mesh()]
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            meshes.append(getattr(x.sharding, "mesh", None))
        meshes.append(getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None))
    return next((mesh for mesh in meshes if mesh is not None and set(axes) <= set(mesh.axis_names)), None)
