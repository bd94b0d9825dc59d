"""Counts what a joint network in tiles costs on an H100: launches, memory, and a model of time. Needs no GPU.

    python benchmarks/joint_model.py                  # or make joint-model, which sets up what it needs

Compiles value and gradient for an H100 at B = 32, T = 400, U = 128, V = 1024, H = 640 in bfloat16, beside the same with
logits in memory, and counts both from their HLO (`tests/support/launches.py`). The model adds 2.5 us a launch, products
at 600 TFLOP/s (50 in float32) and bytes at 4.3 TB/s. Nothing is timed.

How many blocks the backward pass lists is data. It is counted here by the CPU, for newly initialised networks of the
same T and U and of unit logits; fewer classes and units do for that. Beside it stands the time without skipping.
"""

import dataclasses
import functools
import math
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import jax
import jax.numpy as jnp
import launches
import measure
import numpy as np
import problems
import skipping
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from joint import ALL, function, linear, materialized
from problems import cases

from jax_rnnt import HATLoss, RNNTLoss, TDTLoss

FULL = cases.Case("full lengths", B=32, T=400, U=128, V=1024, H=640)
PADDED = dataclasses.replace(FULL, name="30% padded", shortest=0.673)
LOSSES = {"RNN-T": RNNTLoss(), "TDT, 5 durations": TDTLoss(durations=(0, 1, 2, 3, 4)), "HAT": HATLoss()}
FORWARD, BACKWARD = "jax_rnnt_softmax_emission_fwd", "jax_rnnt_softmax_emission_bwd"


def compiled_for_h100(step, loss):
    """(compiled value and gradient, frames and columns of a block and blocks of a tile)."""
    config = (measure.ROOT / "tests/support/h100.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("data",)), PartitionSpec())
    B, T, U1, V = FULL.shape
    shapes = (FULL.H, V), (V,), (B, T, FULL.H), (B, U1, FULL.H), (B, U1 - 1), (B,), (B,)
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16 if i in ALL else np.int32, sharding=sharding)
        for i, shape in enumerate(shapes)
    ]
    # A function takes the rows of a tile from the default backend.
    with mock.patch.object(jax, "default_backend", return_value="gpu"), skipping.chosen_sizes() as tiles:
        lowered = jax.jit(jax.value_and_grad(functools.partial(step, loss=loss), ALL)).lower(*arguments)
    # Autotuning products would need a GPU.
    return lowered.compile({"xla_gpu_autotune_level": 0}), tiles[-1] if tiles else None


def listed(loss, case, block):
    """Blocks that the forward pass and the backward pass list, for a newly initialised network."""
    small = dataclasses.replace(case, V=128, H=64)
    sources, rest = problems.joint(small, 0, extra=len(getattr(loss, "durations", ())))
    with skipping.blocks_of(block), skipping.counted_blocks() as counts:
        jax.block_until_ready(jax.jit(jax.grad(functools.partial(linear, loss=loss)))(*sources, *rest))
        jax.effects_barrier()
    return counts


def main():
    columns = "joint, loss", "lengths", "rows", "workspace, MB", "launches", "model, ms", "x materialized"
    columns += "nothing skipped: launches", "model, ms", "x materialized"
    rows = []
    for name, loss in LOSSES.items():
        memory, _ = compiled_for_h100(materialized, loss)
        base = {case: launches.Program(memory.as_text(), valid=case.valid).total for case in (FULL, PADDED)}
        for step in (linear, function) if name == "RNN-T" else (linear,):
            compiled, block = compiled_for_h100(step, loss)
            for case in (FULL, PADDED):
                forward, backward = listed(loss, case, block[:2])
                cells = []
                for some in (backward, forward):
                    turns = {FORWARD: math.ceil(forward / block[2]), BACKWARD: math.ceil(some / block[2])}
                    cost = launches.Program(compiled.as_text(), turns).total
                    ratio = cost.seconds / base[case].seconds
                    cells += f"{cost.launches:.0f}", f"{cost.seconds * 1e3:.1f}", f"{ratio:.2f}"
                workspace = f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}"
                rows.append((f"{step.__name__}, {name}", case.name, f"{math.prod(block)}", workspace, *cells))
        workspace, cost = f"{memory.memory_analysis().temp_size_in_bytes / 1e6:.0f}", base[FULL]
        cells = workspace, f"{cost.launches:.0f}", f"{cost.seconds * 1e3:.1f}", "1", "", "", ""
        rows.append((f"materialized, {name}", FULL.name, "", *cells))
    measure.table(columns, rows)


if __name__ == "__main__":
    main()
