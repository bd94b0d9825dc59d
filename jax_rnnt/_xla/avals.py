"""Types of arrays: the mesh axes over which they are sharded (explicit axes) and over which they vary (`shard_map`).

Every operand of one operation must vary over the same manual axes.
"""

import functools
import inspect
import math

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

try:
    from jax.sharding import reshard
except ImportError:  # before jax 0.7
    from jax.experimental.shard import reshard  # type: ignore[no-redef]


def named(x, name: str):
    """Returns x under this name, for policies of `jax.checkpoint`."""
    return checkpoint_name(x, name) if not getattr(jax.config, "jax_remat3", False) or _names_under_vmap() else x


@functools.cache
def _names_under_vmap() -> bool:
    """Returns True if `vmap` may map a name while the flag `jax_remat3` is on; in jax 0.10 it may not."""
    try:
        jax.eval_shape(jax.vmap(lambda x: checkpoint_name(x, "any")), jax.ShapeDtypeStruct((1,), np.float32))
    except NotImplementedError:
        return False
    return True


def varying_axes(aval) -> frozenset:
    """Returns the manual mesh axes over which arrays of this type vary."""
    axes = getattr(aval, "mat", None)  # jax >= 0.10
    return frozenset(axes.varying if axes is not None else getattr(aval, "vma", None) or ())


def vary_together(*arrays: jax.Array, like=(), without=()) -> tuple[jax.Array, ...]:
    """Returns the arrays, each marked as varying over the union of the manual mesh axes over which any of them varies.

    The arrays of `like` count, too; the axes of `without` do not.
    """
    avals = [jax.typeof(x) for x in arrays]
    union = frozenset().union(*map(varying_axes, (*avals, *map(jax.typeof, like)))) - {*without}

    def vary(x, missing):
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # jax < 0.8

    return tuple(vary(x, tuple(sorted(union - varying_axes(a)))) for x, a in zip(arrays, avals))


def explicit_axes(mesh) -> set[str]:
    """Returns the names of the mesh's axes of type Explicit."""
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == jax.sharding.AxisType.Explicit}


def spec_of(aval) -> list:
    """Returns for each dimension the explicit mesh axes over which it is sharded, or None."""
    sharding = getattr(aval, "sharding", None)
    spec = list(sharding.spec) if sharding is not None else []
    return spec + [None] * (aval.ndim - len(spec))


def split_alike(dimensions: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays, with their first `dimensions` split over the same explicit mesh axes in all of them.

    These are the batch dimensions; an array may have size 1 in one, and is whole there. JAX refuses to add arrays that
    are split differently, so a dimension follows the first array in which it is split. That costs nothing where the
    others are whole.
    """
    specs: list = [None] * dimensions
    sizes = [0] * dimensions
    source = None
    for x in arrays:
        for i, axes in enumerate(spec_of(jax.typeof(x))[:dimensions]):
            if axes is not None and specs[i] is None:
                specs[i], sizes[i], source = axes, x.shape[i], x if source is None else source
    if source is None:
        return arrays

    def place(x):
        spec = [axes if n == size else None for axes, n, size in zip(specs, x.shape, sizes)]
        return _resharded(x, spec + spec_of(jax.typeof(x))[dimensions:], source)

    return tuple(map(place, arrays))


def whole(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays, none of them split over explicit mesh axes."""
    return tuple(_resharded(x, [None] * x.ndim, x) for x in arrays)


def _resharded(x, spec: list, source):
    """Returns x, split as `spec` says over the mesh of `source`."""
    if spec == spec_of(jax.typeof(x)):
        return x
    if isinstance(x, jax.core.Tracer) or isinstance(source, jax.core.Tracer):
        return reshard(x, NamedSharding(jax.typeof(source).sharding.mesh, PartitionSpec(*spec)))
    # Without `jax.set_mesh`, only the array knows the devices.
    return jax.device_put(x, NamedSharding(source.sharding.mesh, PartitionSpec(*spec)))


def shard_like(like: jax.Array, x: jax.Array) -> jax.Array:
    """Splits x over the explicit mesh axes of the leading dimensions of `like`; further dimensions are not split."""
    aval = jax.typeof(like)
    spec = (spec_of(aval) + [None] * x.ndim)[: x.ndim]
    if spec == spec_of(jax.typeof(x)):
        return x
    return reshard(x, NamedSharding(aval.sharding.mesh, PartitionSpec(*spec)))


def state_like(batch: jax.Array, x: jax.Array) -> jax.Array:
    """Applies `shard_like` to a predictor's state; where no axis splits `batch`, the predictor decides its split."""
    return shard_like(batch, x) if is_split(batch) else x


def is_split(x: jax.Array) -> bool:
    """Returns True if explicit mesh axes split a dimension."""
    return any(axes is not None for axes in spec_of(jax.typeof(x)))


def rows_of_table(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns table[index] for an index that explicit mesh axes split, and the result with it."""
    spec, mesh = spec_of(jax.typeof(index)), jax.typeof(index).sharding.mesh
    return table.at[index].get(out_sharding=NamedSharding(mesh, PartitionSpec(*spec, *spec_of(jax.typeof(table))[1:])))


def rows_of_batch(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x[index], clipped and split over explicit mesh axes as x is; `index` has a multiple of its `shards`."""
    aval = jax.typeof(x)
    if not is_split(x):
        return x.at[index].get(mode="clip")
    return x.at[index].get(mode="clip", out_sharding=NamedSharding(aval.sharding.mesh, PartitionSpec(*spec_of(aval))))


def shards(x: jax.Array) -> int:
    """Returns the number of shards into which explicit mesh axes split the first dimension."""
    aval = jax.typeof(x)
    axes, *_ = spec_of(aval)
    names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
    return math.prod(aval.sharding.mesh.shape[name] for name in names)


def aval_like(like, shape, dtype, spec):
    """Returns an aval of this shape and sharding, with the mesh and the varying axes of `like`."""
    kwargs = dict(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
    if getattr(like, "sharding", None) is not None:
        spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
        kwargs["sharding"] = NamedSharding(like.sharding.mesh, spec)
    return like.update(**kwargs)


def result_aval(like, shape, dtype, num_batch_dims):
    """Returns an aval of this shape with the batch sharding and the varying axes of `like`."""
    spec = spec_of(like)[: None if tuple(shape) == tuple(like.shape) else num_batch_dims]
    return aval_like(like, shape, dtype, spec)


def struct_like(like: jax.Array, shape, dtype) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of an array that varies as `like` does. Pallas needs it under `jax.shard_map`."""
    aval = jax.typeof(like)
    parameters = inspect.signature(jax.ShapeDtypeStruct).parameters
    if "manual_axis_type" in parameters:  # jax >= 0.10
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=aval.manual_axis_type)
    if "vma" in parameters:
        return jax.ShapeDtypeStruct(shape, dtype, vma=varying_axes(aval))  # type: ignore[call-arg]
    return jax.ShapeDtypeStruct(shape, dtype)


def plain_aval(aval):
    """Returns the same shape and dtype, without sharding and varying axes."""
    return jax.core.ShapedArray(aval.shape, aval.dtype)


def on_mesh(avals) -> bool:
    """Returns True if types have a mesh's shardings and varying axes: here and now, or in `avals`."""
    shardings = (getattr(aval, "sharding", None) for aval in avals)
    meshes = [sharding.mesh for sharding in shardings if sharding is not None]
    return not all(mesh.empty for mesh in (jax.sharding.get_abstract_mesh(), *meshes))
