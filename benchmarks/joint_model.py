"""Counts what a joint network in tiles costs on an H100: launches, memory, and a model of time. Needs no GPU.

    python benchmarks/joint_model.py                  # or make joint-model, which sets up what it needs

Compiles value and gradient for an H100 at B = 32, T = 400, U = 128, V = 1024, H = 640 in bfloat16, beside the same with
logits in memory, and counts both from their HLO (`tests/support/launches.py`). The model adds 2.5 us a launch, products
at 600 TFLOP/s (50 in float32) and bytes at 4.3 TB/s. Nothing is timed.

How many blocks the backward pass lists is data. It is counted here by the CPU, for newly initialised networks of the
same T and U and of unit logits; fewer classes and units do for that. Beside it stands the time without skipping.
"""

import argparse
import functools
import math
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

import cases
import jax
import jax.numpy as jnp
import launches
import numpy as np
import skipping
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

import jax_rnnt
from jax_rnnt.layouts import _tiles as tiled

FULL = cases.Case("full lengths", B=32, T=400, U=128, V=1024, H=640)
PADDED = cases.Case("30% padded", B=32, T=400, U=128, V=1024, H=640, shortest=0.673)
LOSSES = {
    "RNN-T": jax_rnnt.RNNTLoss(),
    "TDT, 5 durations": jax_rnnt.TDTLoss(durations=(0, 1, 2, 3, 4)),
    "HAT": jax_rnnt.HATLoss(),
}
FORWARD, BACKWARD = "jax_rnnt_softmax_emission_fwd", "jax_rnnt_softmax_emission_bwd"


def linear(loss, parameters, rows, rest):
    return loss(jax_rnnt.JointLogits(jax_rnnt.LinearJoint(*parameters), *rows), *rest)


def function(loss, parameters, rows, rest):
    weight, bias = parameters
    return loss(jax_rnnt.JointLogits(lambda frames, states: jnp.tanh(frames + states) @ weight + bias, *rows), *rest)


def materialized(loss, parameters, rows, rest):
    weight, bias = parameters
    hidden = jnp.tanh(rows[0][:, :, None] + rows[1][:, None])
    logits = hidden.reshape(-1, hidden.shape[-1]) @ weight + bias
    return loss(logits.reshape(*hidden.shape[:-1], -1), *rest)


def compiled_for_h100(step, loss, case, dtype=jnp.bfloat16):
    """(compiled value and gradient, frames and columns of a block and blocks of a tile)."""
    config = (Path(__file__).parents[1] / "tests/support" / "h100.txtpb").read_text()
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("data",)), PartitionSpec())

    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    parameters = spec(case.H, case.V), spec(case.V)
    rows = spec(case.B, case.T, case.H), spec(case.B, case.U + 1, case.H)
    rest = [spec(*shape, dtype=np.int32) for shape in ((case.B, case.U), (case.B,), (case.B,))]
    # A function takes the rows of a tile from the default backend.
    with mock.patch.object(jax, "default_backend", return_value="gpu"), skipping.chosen_sizes() as tiles:
        lowered = jax.jit(jax.value_and_grad(functools.partial(step, loss), (0, 1))).lower(parameters, rows, rest)
    # Autotuning products would need a GPU.
    return lowered.compile({"xla_gpu_autotune_level": 0}), tiles[-1] if tiles else None


def listed(loss, case, block, seed=0):
    """Blocks that the forward pass and the backward pass list, for a newly initialised network."""
    rng = np.random.default_rng(seed)
    classes, units = 128, 64

    def draw(*shape):
        return rng.standard_normal(shape, np.float32)

    weight = draw(units, classes + len(getattr(loss, "durations", ()))) * np.float32(units**-0.5)
    rows = draw(case.B, case.T, units), draw(case.B, case.U + 1, units)
    rest = rng.integers(0, classes - 1, (case.B, case.U), np.int32), *case.lengths
    with mock.patch.object(tiled, "block_of", return_value=block), skipping.counted_blocks() as counts:
        step = jax.jit(jax.grad(lambda weight: linear(loss, (weight,), rows, rest)))
        jax.block_until_ready(step(weight))
        jax.effects_barrier()
    return counts


def tiles_of(blocks, block):
    """Turns of a loop over this many blocks."""
    return math.ceil(blocks / block[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true", help="also list the kernels of a turn of each loop")
    args = parser.parse_args()
    columns = "joint, loss", "lengths", "rows", "workspace, MB", "launches", "model, ms", "x materialized"
    columns += "nothing skipped: launches", "model, ms", "x materialized"
    print("| " + " | ".join(columns) + " |\n|---|---|" + "--:|" * (len(columns) - 2))
    for name, loss in LOSSES.items():
        texts = {step: compiled_for_h100(step, loss, FULL) for step in (materialized, linear, function)}
        for step in (linear, function) if name == "RNN-T" else (linear,):
            compiled, block = texts[step]
            for case in (FULL, PADDED):
                base = launches.Program(texts[materialized][0].as_text(), valid=case.valid).total
                forward, backward = listed(loss, case, block[:2])
                cells = []
                for some in (backward, forward):
                    turns = {FORWARD: tiles_of(forward, block), BACKWARD: tiles_of(some, block)}
                    cost = launches.Program(compiled.as_text(), turns).total
                    cells += f"{cost.launches:.0f}", f"{cost.seconds * 1e3:.1f}", f"{cost.seconds / base.seconds:.2f}"
                memory = f"{compiled.memory_analysis().temp_size_in_bytes / 1e6:.0f}"
                row = f"{step.__name__}, {name}", case.name, f"{math.prod(block)}", memory, *cells
                print("| " + " | ".join(row) + " |", flush=True)
            if args.kernels:
                launches.Program(compiled.as_text(), turns).describe()
        base = launches.Program(texts[materialized][0].as_text()).total
        memory = texts[materialized][0].memory_analysis().temp_size_in_bytes / 1e6
        row = f"materialized, {name}", "full lengths", "", f"{memory:.0f}", f"{base.launches:.0f}"
        print("| " + " | ".join((*row, f"{base.seconds * 1e3:.1f}", "1", "", "", "")) + " |", flush=True)


if __name__ == "__main__":
    main()
