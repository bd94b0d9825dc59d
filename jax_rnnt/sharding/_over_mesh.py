"""Takes a call into `jax.shard_map`, over the mesh axes of its loss."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt.layouts._layout import Layout
from jax_rnnt.sharding import _axes


class Call(Protocol):
    """A call of a loss as it is known here: a pytree, whose other arrays are those of the sequences of the batch."""

    loss: Any
    layout: Layout


def axes_to_enter(loss) -> dict[str, str]:
    """Returns the mesh axes over which the loss is split and the program not yet, by the names of the loss's fields."""
    axes = {"frame_axis": loss.frame_axis, "vocab_axis": loss.vocab_axis}
    return {name: axis for name, axis in axes.items() if axis is not None and _axes.axis_size(axis) is None}


def run(of_device: Callable[[Any], Any], call: Call, axes: dict[str, str], per_node: bool):
    """Runs ``of_device(call)`` on the devices of these axes together, each with its part of the arrays.

    With `per_node`, the result has a number for each node, and else for each sequence.
    """
    layout = call.layout
    mesh = _axes.mesh_with(axes.values(), jax.tree.leaves(call))
    if mesh is None:
        name, axis = next(iter(axes.items()))
        known = jax.sharding.get_abstract_mesh().axis_names
        way = f"call jax.set_mesh(mesh) with such a mesh, or run the loss inside jax.shard_map over {axis!r}"
        raise _checks.bad_value(f"{name} must name an axis of the mesh, one of {known}, got {axis!r}: {way}.")
    for name, axis in axes.items():
        letter, size = ("V", layout.classes) if name == "vocab_axis" else ("T", layout.frames)
        if size % mesh.shape[axis]:
            expected = f"{letter} must be a multiple of the {mesh.shape[axis]} devices of {name}={axis!r}"
            raise _checks.bad_value(f"{expected}, got {letter} = {size}.")
    batch, frame_axis = _batch(layout), axes.get("frame_axis")
    specs = _pytree.replace(
        jax.tree.map(lambda _: P(*batch), call),
        loss=jax.tree.map(lambda _: P(), call.loss),
        layout=layout.specs(batch, frame_axis, axes.get("vocab_axis")),
    )
    out_specs = P(*batch, frame_axis) if per_node else P(*batch)
    return _on_mesh(of_device, mesh, tuple(axes.values()), tuple(jax.tree.leaves(specs)), out_specs, call)


def _batch(layout):
    """Returns over which explicit mesh axes the batch of the logits is split."""
    nb = layout.ndim - 3
    specs = [_xla.spec_of(jax.typeof(x))[:nb] for x in jax.tree.leaves(layout) if jnp.ndim(x) >= nb + 2]
    return [next((axes for axes in each if axes is not None), None) for each in zip(*specs)]


@functools.partial(jax.jit, static_argnums=range(5))
def _on_mesh(of_device, mesh, axes, specs, out_specs, call):
    """Runs ``of_device(call)`` on each device of these and all explicit mesh axes; `specs` are those of its leaves."""
    specs, explicit = jax.tree.unflatten(jax.tree.structure(call), specs), _xla.explicit_axes(mesh)
    if explicit:
        call = jax.tree.map(lambda x, spec: _xla.reshard(x, NamedSharding(mesh, spec)), call, specs)
    names = {*axes, *explicit}
    return jax.shard_map(of_device, mesh=mesh, in_specs=(specs,), out_specs=out_specs, axis_names=names)(call)
