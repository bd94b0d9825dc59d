"""Meshes of the eight CPU devices."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

KINDS = pytest.mark.parametrize("kind", ["auto", "explicit"])
SET_MESH = pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="needs jax.set_mesh")


@contextlib.contextmanager
def mesh_of(devices, kind, shape=(8,), names=("data",), is_set=None):
    """A mesh of Explicit axes if the kind is "explicit", which is then set, or of Auto axes."""
    is_set = kind == "explicit" if is_set is None else is_set
    if is_set and not hasattr(jax, "set_mesh"):
        pytest.skip("needs jax.set_mesh")
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=(axis,) * len(names))
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        yield mesh


def at(mesh, tree, *names):
    """The arrays on this mesh, their dimensions split over these axes."""
    return jax.device_put(tree, NamedSharding(mesh, P(*names)))


def place(arrays, mesh, *specs):
    """Arrays with a partition each, or one for all."""
    specs = specs * len(arrays) if len(specs) == 1 else specs
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def mean_over_devices(f, mesh, specs, axes="data", **options):
    """The mean over devices of what each computes of its part."""
    body = lambda *p: jax.lax.pmean(f(*p), axes)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), **options)
