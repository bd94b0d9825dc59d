"""A training step's loss in axlearn's way (axlearn.py), beside ours, compiled for TPU v5e at axlearn's shape.

    python benchmarks/tpu_axlearn.py

Value and gradients with respect to encoder, predictor and output layer; `make test-tpu-compile` installs what it needs.
No time is measured, and no bytes: XLA counts the body of a loop once, and both ways are loops. `benchmarks/joint.py`
measures both on a CPU.
"""

import functools

import tpu  # first: it sets up libtpu

import jax  # isort: skip
import numpy as np
from axlearn import axlearn
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt

B, T, U, V, H = 4, 750, 200, 1024, 640


def ours(parameters, rows, rest):
    return jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(*parameters), *rows, *rest)


def arguments(make):
    parameters, rows, rest = ((H, V), (V,)), ((B, T, H), (B, U + 1, H)), ((B, U), (B,), (B,))
    dtypes = np.float32, np.float32, np.int32
    return [tuple(make(x, dtype) for x in shapes) for shapes, dtype in zip((parameters, rows, rest), dtypes)]


def main():
    found = topologies.get_topology_desc(platform="tpu", topology_name=tpu.GENERATIONS["v5e"]).devices
    place = NamedSharding(Mesh(np.array(found[:1]), ("data",)), P())
    print(f"v5e, B = {B}, T = {T}, U = {U}, V = {V}, H = {H}, float32; value and all gradients")
    print("| way | temporaries, MB |\n|---|--:|")
    for function in (axlearn, ours):
        step = jax.jit(jax.value_and_grad(function, (0, 1)))
        made = step.lower(*arguments(functools.partial(jax.ShapeDtypeStruct, sharding=place))).compile()
        print(f"| {function.__name__} | {made.memory_analysis().temp_size_in_bytes / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
