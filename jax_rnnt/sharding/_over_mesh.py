"""The way of a call into `jax.shard_map`, over the mesh axes of its loss."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_rnnt import _pytree, _xla
from jax_rnnt.sharding import _axes
from jax_rnnt.sharding._device import emission_of_device


def run(call):
    """The result of a `losses._call.Call`, by the devices over which its loss is split together.

    The program may already be one for each of them, or may have to enter `jax.shard_map`.
    """
    axes = {"frame_axis": call.loss.frame_axis, "vocab_axis": call.loss.vocab_axis}
    axes = {name: axis for name, axis in axes.items() if axis is not None and _axes.axis_size(axis) is None}
    return _run_over_mesh(call, axes) if axes else _run_on_device(call)


def _run_on_device(call):
    call = call.checked()
    return call.result(*emission_of_device(call))


def _run_over_mesh(call, axes: dict[str, str]):
    function, layout = call.function, call.layout
    mesh = _axes.mesh_with(axes.values(), jax.tree.leaves(call))
    if mesh is None:
        name, axis = next(iter(axes.items()))
        known = jax.sharding.get_abstract_mesh().axis_names
        way = f"call jax.set_mesh(mesh) with such a mesh, or run the loss inside jax.shard_map over {axis!r}"
        raise ValueError(f"{function}: {name} must name an axis of the mesh, one of {known}, got {axis!r}: {way}.")
    for name, axis in axes.items():
        letter, size = ("V", layout.classes) if name == "vocab_axis" else ("T", layout.frames)
        if size % mesh.shape[axis]:
            expected = f"{letter} must be a multiple of the {mesh.shape[axis]} devices of {name}={axis!r}"
            raise ValueError(f"{function}: {expected}, got {letter} = {size}.")
    batch, frame_axis = _batch(layout), axes.get("frame_axis")
    specs = _pytree.replace(
        jax.tree.map(lambda _: P(*batch), call),
        loss=jax.tree.map(lambda _: P(), call.loss),
        layout=layout.specs(function, batch, frame_axis, axes.get("vocab_axis")),
    )
    out_specs = P(*batch, frame_axis) if call.method.per_node else P(*batch)
    unreduced = _pytree.replace(call, loss=_pytree.replace(call.loss, reduction="none"))
    return call.reduced(_on_mesh(mesh, tuple(axes.values()), tuple(jax.tree.leaves(specs)), out_specs, unreduced))


def _batch(layout):
    """Over which explicit mesh axes the batch of the logits is split."""
    nb = layout.ndim - 3
    specs = [_xla.spec_of(jax.typeof(x))[:nb] for x in jax.tree.leaves(layout) if jnp.ndim(x) >= nb + 2]
    return [next((axes for axes in each if axes is not None), None) for each in zip(*specs)]


@functools.partial(jax.jit, static_argnums=range(4))
def _on_mesh(mesh, axes, specs, out_specs, call):
    specs = (jax.tree.unflatten(jax.tree.structure(call), specs),)
    return _axes.over_mesh(_run_on_device, mesh, axes, specs, out_specs)(call)
