"""Runs a function on each device's own part of the batch, from within a lowering.

XLA does not partition a Mosaic kernel: `jax.shard_map` must say who computes what. Shardings of automatic axes are
known only after the partitioner has run, so the batch is split over all devices of the program. A batch that is sharded
over all of them stays in place. Over a mesh axis that does not shard the batch, results are gathered: planes, V times
smaller than the logits. For explicit axes, the types of the operands say how they are sharded.
"""

import math

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_rnnt._xla.avals import explicit_axes, plain_aval, reshard, spec_of
from jax_rnnt._xla.retracing import evaluate


def by_shards(function, *trees):
    """Runs ``function(*trees)`` on pytrees of arrays [B, ...], where explicit mesh axes split the first array's batch.

    Each device runs it on its own part of the batch, and exchanges nothing. JAX lets no function in `jax.shard_map`
    close over arrays on explicit axes. So it is traced for a part, outside, and its constants are arguments.
    """
    arrays, structure = jax.tree.flatten(trees)
    aval = jax.typeof(arrays[0])
    axes, mesh = spec_of(aval)[0], aval.sharding.mesh
    place = reshard
    if not isinstance(arrays[0], jax.core.Tracer):  # without `jax.set_mesh`, only the array knows the devices
        mesh, place = arrays[0].sharding.mesh, jax.device_put
    arrays = [place(jnp.asarray(x), NamedSharding(mesh, P(axes))) for x in arrays]
    parts = mesh.shape[axes] if isinstance(axes, str) else math.prod(mesh.shape[name] for name in axes)
    avals = [plain_aval(x).update(shape=(x.shape[0] // parts, *x.shape[1:])) for x in map(jax.typeof, arrays)]

    def flat(*arrays):
        return function(*jax.tree.unflatten(structure, arrays))

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*avals)
    whole = [place(jnp.asarray(x), NamedSharding(mesh, P())) for x in closed.consts]

    def run(constants, *arrays):
        return evaluate(closed.jaxpr, *constants, *arrays)

    specs = (P(), *[P(axes)] * len(arrays))
    names = explicit_axes(mesh)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(axes), axis_names=names, check_vma=False)
    return jax.tree.unflatten(jax.tree.structure(shapes), jax.jit(mapped)(whole, *arrays))


_UNKNOWN = "jax_rnnt_devices"  # the only axis of a mesh that is not known


def unpartitioned(ctx) -> bool:
    """Returns True if no SPMD partitioner will run over this operation: one device, or every mesh axis is manual."""
    axes = ctx.module_context.axis_context
    if (num_devices := getattr(axes, "num_devices", None)) is not None:
        return num_devices == 1
    mesh, manual = getattr(axes, "mesh", None), getattr(axes, "manual_axes", None)
    if mesh is not None and manual is not None:
        return set(manual) == set(mesh.axis_names)
    return type(axes).__name__ == "ReplicaAxisContext"  # pmap before jax 0.8


def lower_plain(ctx, function, operands):
    """Lowers the function on arrays without shardings and varying axes."""
    plain = ctx.replace(avals_in=[plain_aval(aval) for aval in ctx.avals_in])
    return mlir.lower_fun(function, multiple_results=True)(plain, *operands)


def without_mesh(function):
    """Returns the function as it runs outside any mesh."""

    def run(*operands):
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return function(*operands)

    return run if jax.__version_info__ >= (0, 7) else function  # before that no axes are explicit


def _mesh(ctx):
    """Returns (mesh of the program, its manual axes, whether the types of operands say how they are sharded)."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return axes.mesh, set(axes.manual_axes), False
    typed = ctx.avals_in[0].sharding.mesh
    if not typed.empty and jax.sharding.AxisType.Explicit in typed.axis_types:
        return typed, set(), True
    for mesh in (jax.sharding.get_abstract_mesh(), axes.abstract_mesh):
        if mesh is not None and mesh.size == axes.num_devices:
            return mesh, set(), False
    return AbstractMesh((axes.num_devices,), (_UNKNOWN,)), set(), False


def _batch_spec(shape, mesh, manual):
    """Returns the axes over which to split each batch dimension: all axes, where they divide it."""
    spec: list[tuple] = [()] * len(shape)
    for axis, devices in zip(mesh.axis_names, mesh.axis_sizes):
        for i in reversed(range(len(shape))):  # the innermost is the user's batch; the others come from vmap
            split = devices * math.prod(mesh.shape[name] for name in spec[i])
            if axis not in manual and shape[i] % split == 0:
                spec[i] = *spec[i], axis
                break
    return spec


def is_local(ctx, num_batch_dims) -> bool:
    """Returns True if `lower_over_devices` leaves each device its own part of any batch split over devices.

    The part is known without a partitioner, from types, or where one mesh axis meets one batch dimension.
    """
    if unpartitioned(ctx):
        return True
    mesh, manual, known = _mesh(ctx)
    sizes = {name: size for name, size in zip(mesh.axis_names, mesh.axis_sizes) if size > 1}
    if manual or _UNKNOWN in sizes:
        return False
    if known:
        kinds = dict(zip(mesh.axis_names, mesh.axis_types))
        whole = all(axes is None for aval in ctx.avals_in for axes in spec_of(aval)[num_batch_dims:])
        return whole and all(kinds[name] == jax.sharding.AxisType.Explicit for name in sizes)
    batch = [n for n in ctx.avals_in[0].shape[:num_batch_dims] if not (isinstance(n, int) and n == 1)]
    return len(sizes) == len(batch) == 1 and isinstance(batch[0], int) and batch[0] % max(sizes.values()) == 0


class Devices:
    """The devices of a program that the partitioner will split, as a lowering sees them."""

    def __init__(self, ctx):
        self.program, self._manual, self._known = _mesh(ctx)
        kinds = jax.sharding.AxisType
        types = tuple(kinds.Manual if name in self._manual else kinds.Auto for name in self.program.axis_names)
        self.mesh = AbstractMesh(self.program.axis_sizes, self.program.axis_names, axis_types=types)

    def spec(self, aval, first, last):
        """Returns the axes over which to split an operand's dimensions from `first` to `last`, all of them batch."""
        if self._known:
            return spec_of(aval)[first:last]
        return _batch_spec(aval.shape[first:last], self.program, self._manual)

    def map(self, function, in_specs, out_specs):
        """Returns the function that runs on each device's own part."""

        def split(*operands):
            names = set(self.mesh.axis_names) - self._manual
            with jax.sharding.use_abstract_mesh(self.mesh):
                mapped = jax.shard_map(
                    function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=False
                )
                return mapped(*operands)

        return split


def lower_over_devices(ctx, function, operands, num_batch_dims):
    """Lowers ``function(*operands) -> results``, all with `num_batch_dims` leading batch dimensions."""
    if not unpartitioned(ctx):
        devices = Devices(ctx)
        spec = P(*devices.spec(ctx.avals_in[0], 0, num_batch_dims))
        function = devices.map(function, spec, spec)
    return lower_plain(ctx, function, operands)


def device_of(ctx) -> tuple[str | None, int]:
    """Returns (kind of the TPUs for which a program is lowered, None where it is unknown; cores of a device)."""
    axes = ctx.module_context.axis_context
    for mesh in (getattr(axes, "mesh", None), getattr(axes, "abstract_mesh", None), jax.sharding.get_abstract_mesh()):
        device = getattr(getattr(mesh, "abstract_mesh", mesh), "abstract_device", None)
        if device is not None:
            return device.device_kind, device.num_cores or 1
    if jax.default_backend() == "tpu":
        first = jax.devices()[0]
        return first.device_kind, getattr(first, "num_cores", None) or 1
    return None, 1
