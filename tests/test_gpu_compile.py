"""Does XLA compile a sharded training step for eight H100s without needless collectives, copies and memory?

Compiling needs jax's CUDA plugin and the names in the extension module of the CUDA kernels, but
neither driver nor GPU. `make test-gpu-compile` sets both up; without them these tests are skipped.
"""

import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt
import losses
from jax_rnnt._xla import loading

pytestmark = pytest.mark.usefixtures("optimized")

DEVICES = 8
# As large as real shapes, so that sizes independent of the batch do not count.
B, T, U, V, H = 4 * DEVICES, 128, 63, 1024, 256
NODES = B * T * (U + 1)
HERE = pathlib.Path(__file__).parent
CALLS = losses.once(
    ("jax_rnnt_softmax_emission_fwd", "jax_rnnt_lattice_grad", "jax_rnnt_softmax_emission_bwd"),
)


def mesh_of(devices):
    missing = pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") == "gpu-compile" else pytest.skip
    if "cuda" in loading.MISSING:
        missing(loading.MISSING["cuda"])
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=(HERE / "h100.txtpb").read_text(), topology=f"1x1x{devices}"
        )
    except (NotImplementedError, RuntimeError) as error:
        missing(f"this jax cannot compile for CUDA: {error}")
    return topologies.make_mesh(topology, (devices,), ("data",))


@pytest.fixture(scope="module")
def mesh():
    return mesh_of(DEVICES)


@pytest.fixture(scope="module", params=[np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return np.dtype(request.param)


def loss(weight, hidden, targets, *lengths):
    """Loss of a joint network's last matmul, [N, H] @ [H, V]."""
    logits = (hidden @ weight).reshape(len(targets), T, U + 1, V)
    return jax_rnnt.rnnt_loss(logits, targets, *lengths, blank=0, implementation="kernel")


def step_of(kind, mesh):
    """(weight, hidden, targets, logit lengths, target lengths) -> mean loss and gradients of weight and hidden."""
    if kind == "auto":
        return jax.value_and_grad(loss, (0, 1))

    def shard(weight, hidden, *rest):
        return jax.lax.pmean(loss(weight, hidden, *rest), "data")

    specs = (P(), P("data"), P("data"), P("data"), P("data"))
    return jax.value_and_grad(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1))


@pytest.fixture(scope="module", params=["auto", "shard_map"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(kind, mesh, dtype):
    def spec(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    shapes = (
        spec((H, V), dtype),
        spec((NODES, H), dtype, "data"),
        spec((B, U), np.int32, "data"),
        spec((B,), np.int32, "data"),
        spec((B,), np.int32, "data"),
    )
    # Autotuning matmuls would need a GPU.
    return jax.jit(step_of(kind, mesh)).lower(*shapes).compile({"xla_gpu_autotune_level": 0})


def test_collectives(compiled):
    """Devices exchange only the mean and the gradient of the replicated weight."""
    assert set(losses.collectives(compiled.as_text())) == {"all-reduce"}


def test_one_call_per_stage(compiled):
    assert losses.custom_calls(compiled.as_text()) == CALLS


def test_no_copy_of_the_logits(compiled, kind, dtype):
    """No operation copies a buffer of their size; under shard_map the gradient takes their memory."""
    text = compiled.as_text()
    elements = NODES // DEVICES * V
    for shape in re.findall(r"= \w+\[([\d,]*)\][^=]* (?:copy|copy-start|transpose)\(", text):
        assert np.prod([int(d) for d in shape.split(",") if d], dtype=np.int64) < elements
    aliased = re.search(r"custom-call\([^\n]*jax_rnnt_softmax_emission_bwd[^\n]*output_to_operand_aliasing", text)
    assert (aliased is not None) == (kind == "shard_map")


def test_temporaries(compiled, kind, dtype):
    """In units of the logits of a device: 1 if the gradient takes their memory, else 2."""
    logits = NODES // DEVICES * V * dtype.itemsize
    used = compiled.memory_analysis().temp_size_in_bytes / logits
    assert used <= {"shard_map": 1.2, "auto": 2.1}[kind], f"{used:.3f} logits"


@pytest.mark.parametrize(
    ("inplace", "gradient", "planes"), [(False, True, 3), (True, True, 5), (False, False, 4)], ids=str
)
def test_planes_of_the_loss_alone(inplace, gradient, planes):
    """Temporaries beside logits and gradient, in float32 planes [B, T, U + 1], and a little for each column."""

    sharding = NamedSharding(mesh_of(1), P())

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(*p):
        return jax_rnnt.rnnt_loss(*p, implementation="kernel", inplace=inplace)

    step = jax.jit(jax.value_and_grad(loss) if gradient else loss, donate_argnums=(0,) if inplace else ())
    shapes = spec((B, T, U + 1, V), np.float32), spec((B, U), np.int32), spec((B,), np.int32), spec((B,), np.int32)
    memory = step.lower(*shapes).compile({"xla_gpu_autotune_level": 0}).memory_analysis()
    assert memory.temp_size_in_bytes / (4 * NODES) == pytest.approx(planes, abs=0.2)
    assert memory.alias_size_in_bytes == (4 * NODES * V if inplace else 0)


# ------------------------------------------------------------------------------------------- a joint network in tiles

ROWS = 2048  # rows of a tile, about the default on GPUs for these shapes


@pytest.fixture(scope="module")
def in_tiles(kind, mesh, dtype):
    """The step of `joint_rnnt_loss` with 32 sequences a device, whose logits would be 3.4 GB in bfloat16."""
    batch, frames, labels, width = 32 * DEVICES, 400, 128, 640

    def loss(parameters, rows, rest):
        joint = jax_rnnt.LinearJoint(*parameters)
        return jax_rnnt.joint_rnnt_loss(joint, *rows, *rest, implementation="kernel", chunk=ROWS)

    def spec(shape, dtype, *axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    step = loss
    if kind == "shard_map":
        mean = lambda *arguments: jax.lax.pmean(loss(*arguments), "data")
        step = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    parameters = spec((width, V), dtype), spec((V,), dtype)
    rows = spec((batch, frames, width), dtype, "data"), spec((batch, labels + 1, width), dtype, "data")
    integers = spec((batch, labels), np.int32, "data"), *[spec((batch,), np.int32, "data")] * 2
    lowered = jax.jit(jax.value_and_grad(step, (0, 1))).lower(parameters, rows, integers)
    return lowered.compile({"xla_gpu_autotune_level": 0}), 4 * batch // DEVICES * frames * (labels + 1)


def test_tiles_exchange_sums_alone(in_tiles):
    """Devices exchange the gradient of the parameters, once, and the largest number of tiles."""
    loops, entry = in_tiles[0].as_text().split("\nENTRY ")
    assert not losses.collectives(loops)
    assert set(losses.collectives(entry)) == {"all-reduce"}
    assert losses.custom_calls(in_tiles[0].as_text()) == CALLS


def test_workspace_of_tiles(in_tiles):
    compiled, plane = in_tiles
    assert compiled.memory_analysis().temp_size_in_bytes <= 64e6 + 4 * plane


def test_tiles_add_nothing_atomically(in_tiles):
    """Every scatter-add has unique indices."""
    scatters = [line for line in in_tiles[0].as_text().splitlines() if re.search(r" scatter\(", line)]
    assert len(scatters) >= 2  # encoder and predictor
    assert all("unique_indices=true" in line or "= pred[" in line for line in scatters), scatters
