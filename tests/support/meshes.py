"""Meshes of the eight CPU devices."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh


@contextlib.contextmanager
def mesh_of(devices, kind, shape=(8,), names=("data",)):
    if kind == "explicit" and not hasattr(jax, "set_mesh"):
        pytest.skip("explicit axes need jax.set_mesh")
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=(axis,) * len(names))
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        yield mesh
