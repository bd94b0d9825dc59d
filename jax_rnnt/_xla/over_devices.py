"""Runs a function on each device's own part of the batch, from within a lowering.

XLA does not partition a Mosaic kernel: `jax.shard_map` must say who computes what. Shardings of automatic axes are
known only after the partitioner has run, so the batch is split over all devices of the program. A batch that is sharded
over all of them stays in place. Over a mesh axis that does not shard the batch, results are gathered: planes, V times
smaller than the logits. On explicit axes the operands' types tell.
"""

import math

import jax
from jax.interpreters import mlir
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_rnnt._xla.avals import plain_aval, spec_of


def unpartitioned(ctx) -> bool:
    """Whether the SPMD partitioner will not run over this operation: one device, or every mesh axis is manual."""
    axes = ctx.module_context.axis_context
    if (num_devices := getattr(axes, "num_devices", None)) is not None:
        return num_devices == 1
    mesh, manual = getattr(axes, "mesh", None), getattr(axes, "manual_axes", None)
    if mesh is not None and manual is not None:
        return set(manual) == set(mesh.axis_names)
    return type(axes).__name__ == "ReplicaAxisContext"  # pmap before jax 0.8


def _mesh(ctx):
    """(mesh of the program, its manual axes, whether types tell the shardings)"""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return axes.mesh, set(axes.manual_axes), False
    own = ctx.avals_in[0].sharding.mesh
    if not own.empty and jax.sharding.AxisType.Explicit in own.axis_types:
        return own, set(), True
    for mesh in (jax.sharding.get_abstract_mesh(), axes.abstract_mesh):
        if mesh is not None and mesh.size == axes.num_devices:
            return mesh, set(), False
    return AbstractMesh((axes.num_devices,), ("jax_rnnt_devices",)), set(), False


def _batch_spec(shape, mesh, manual):
    """Over which axes to split each batch dimension: all axes, where they divide it."""
    spec: list[tuple] = [()] * len(shape)
    for axis, devices in zip(mesh.axis_names, mesh.axis_sizes):
        for i in reversed(range(len(shape))):  # the innermost is the user's batch, the others are those of vmap
            split = devices * math.prod(mesh.shape[name] for name in spec[i])
            if axis not in manual and shape[i] % split == 0:
                spec[i] = *spec[i], axis
                break
    return spec


def lower_over_devices(ctx, function, operands, num_batch_dims):
    """Lowers ``function(*operands) -> results``, all with `num_batch_dims` leading batch dimensions."""
    plain = ctx.replace(avals_in=[plain_aval(aval) for aval in ctx.avals_in])
    if unpartitioned(ctx):
        return mlir.lower_fun(function, multiple_results=True)(plain, *operands)
    mesh, manual, known = _mesh(ctx)
    first = ctx.avals_in[0]
    spec = spec_of(first)[:num_batch_dims] if known else _batch_spec(first.shape[:num_batch_dims], mesh, manual)
    kinds = jax.sharding.AxisType
    types = tuple(kinds.Manual if name in manual else kinds.Auto for name in mesh.axis_names)
    mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)

    def split(*operands):
        names = set(mesh.axis_names) - manual
        with jax.sharding.use_abstract_mesh(mesh):
            mapped = jax.shard_map(
                function, mesh=mesh, in_specs=P(*spec), out_specs=P(*spec), axis_names=names, check_vma=False
            )
            return mapped(*operands)

    return mlir.lower_fun(split, multiple_results=True)(plain, *operands)
