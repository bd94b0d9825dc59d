"""Does XLA compile a sharded training step for eight H100s or B200s without needless collectives, copies and memory?

Compiling needs jax's CUDA plugin and the names in the extension module of the CUDA kernels, but
neither driver nor GPU. `lab/run.sh gpu-compile` sets both up; without them these tests are skipped.
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

import family
import hlo
import jax_rnnt
from jax_rnnt._xla import loading, proof
from meshes import mean_over_devices

pytestmark = pytest.mark.usefixtures("optimized", "all_kernels")

DEVICES = 8
# As large as real shapes, so that sizes independent of the batch do not count.
B, T, U, V, H = 4 * DEVICES, 128, 63, 1024, 256
NODES = B * T * (U + 1)
# Of the joint networks: 32 sequences a device, whose logits would be 3.4 GB in bfloat16.
BATCH, FRAMES, LABELS, WIDTH = 32, 400, 128, 640
TILED_NODES = BATCH * FRAMES * (LABELS + 1)
EMISSION = "jax_rnnt_softmax_emission_fwd", "jax_rnnt_softmax_emission_bwd"
CALLS = hlo.once((*EMISSION, "jax_rnnt_lattice_grad"))


@pytest.fixture
def all_kernels(monkeypatch):
    """Also those that no device has shown to be right."""
    monkeypatch.setenv(proof.VARIABLE, "all")


def mesh_of(devices, gpu="h100"):
    missing = pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") == "gpu-compile" else pytest.skip
    if "cuda" in loading.MISSING:
        missing(loading.MISSING["cuda"])
    config = (pathlib.Path(__file__).with_name(f"{gpu}.txtpb")).read_text()
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{devices}")
    except (NotImplementedError, RuntimeError) as error:
        missing(f"this jax cannot compile for CUDA: {error}")
    return topologies.make_mesh(topology, (devices,), ("data",))


def shape(mesh, *sizes, dtype=np.int32, axes=("data",)):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*axes) if mesh.size > 1 else P()))


def labels_and_lengths(mesh, batch, labels):
    return shape(mesh, batch, labels), shape(mesh, batch), shape(mesh, batch)


def joint_shapes(mesh, batch, dtype, classes=V):
    """(parameters, rows, the rest) of a joint network."""
    parameters = shape(mesh, WIDTH, classes, dtype=dtype, axes=()), shape(mesh, classes, dtype=dtype, axes=())
    rows = [shape(mesh, batch, n, WIDTH, dtype=dtype) for n in (FRAMES, LABELS + 1)]
    return parameters, rows, labels_and_lengths(mesh, batch, LABELS)


def compile_for_gpus(step, shapes, **options):
    """Autotuning matmuls would need a GPU."""
    return jax.jit(step, **options).lower(*shapes).compile({"xla_gpu_autotune_level": 0})


def temporaries(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


def over_devices(kind, mean, mesh, batched):
    """The mean loss of replicated parameters and of arrays of the batch."""
    return mean if kind == "auto" else mean_over_devices(mean, mesh, (P(), *[P("data")] * batched))


@pytest.fixture(scope="module", params=["h100", "b200"])
def mesh(request):
    return mesh_of(DEVICES, request.param)


@pytest.fixture(scope="module", params=[np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return np.dtype(request.param)


@pytest.fixture(scope="module", params=["auto", "shard_map"])
def kind(request):
    return request.param


def test_training_step(kind, mesh, dtype):
    """Mean loss of a joint network's last matmul, [N, H] @ [H, V], and the gradients of both."""

    def mean(weight, hidden, targets, *lengths):
        logits = (hidden @ weight).reshape(len(targets), T, U + 1, V)
        return jax_rnnt.rnnt_loss(logits, targets, *lengths, blank=0, implementation="kernel")

    shapes = shape(mesh, H, V, dtype=dtype, axes=()), shape(mesh, NODES, H, dtype=dtype)
    step = jax.value_and_grad(over_devices(kind, mean, mesh, 4), (0, 1))
    compiled = compile_for_gpus(step, (*shapes, *labels_and_lengths(mesh, B, U)))
    text, elements = compiled.as_text(), NODES // DEVICES * V
    # Devices exchange only the mean and the gradient of the replicated weight.
    assert set(hlo.collectives(text)) == {"all-reduce"}
    assert hlo.custom_calls(text) == CALLS
    # No operation copies a buffer of the logits' size; under shard_map the gradient takes their memory.
    for copied in re.findall(r"= \w+\[([\d,]*)\][^=]* (?:copy|copy-start|transpose)\(", text):
        assert np.prod([int(d) for d in copied.split(",") if d], dtype=np.int64) < elements
    aliased = re.search(r"custom-call\([^\n]*jax_rnnt_softmax_emission_bwd[^\n]*output_to_operand_aliasing", text)
    assert (aliased is not None) == (kind == "shard_map")
    used = temporaries(compiled) / (elements * dtype.itemsize)
    assert used <= {"shard_map": 1.2, "auto": 2.1}[kind], f"{used:.3f} logits"


@pytest.mark.parametrize(
    ("inplace", "gradient", "planes"), [(False, True, 3), (True, True, 5), (False, False, 4)], ids=str
)
def test_planes_of_the_loss_alone(inplace, gradient, planes):
    """Temporaries beside logits and gradient, in float32 planes [B, T, U + 1], and a little for each column: few,
    long sequences."""
    mesh = mesh_of(1)
    loss = lambda *p: jax_rnnt.rnnt_loss(*p, implementation="kernel", inplace=inplace)
    shapes = shape(mesh, B // 8, 8 * T, U + 1, V, dtype=np.float32), *labels_and_lengths(mesh, B // 8, U)
    step = jax.value_and_grad(loss) if gradient else loss
    compiled = compile_for_gpus(step, shapes, donate_argnums=(0,) if inplace else ())
    assert temporaries(compiled) / (4 * NODES) == pytest.approx(planes, abs=0.2)
    assert compiled.memory_analysis().alias_size_in_bytes == (4 * NODES * V if inplace else 0)


def of_function(weight, bias):
    """A joint network that is no LinearJoint: it runs in tiles."""
    return lambda encoder, predictor: jnp.tanh(encoder + predictor) @ weight + bias[None]


def test_tiles(kind, mesh, dtype):
    """Tiles of 2,048 rows take 64 MB, where the default takes 256."""

    def mean(parameters, rows, rest):
        logits = jax_rnnt.JointLogits(of_function(*parameters), *rows, 2048)
        return jax_rnnt.RNNTLoss(implementation="kernel")(logits, *rest)

    step = jax.value_and_grad(over_devices(kind, mean, mesh, 2), (0, 1))
    compiled = compile_for_gpus(step, joint_shapes(mesh, BATCH * DEVICES, dtype))
    text = compiled.as_text()
    loops, entry = text.split("\nENTRY ")
    # Devices exchange the gradient of the parameters, once, and the largest number of tiles.
    assert not hlo.collectives(loops)
    assert set(hlo.collectives(entry)) == {"all-reduce"}
    assert hlo.custom_calls(text) == CALLS
    assert temporaries(compiled) <= 64e6 + 4 * (4 * TILED_NODES)
    # Nothing is added atomically: every scatter-add has unique indices.
    scatters = [line for line in text.splitlines() if re.search(r" scatter\(", line)]
    assert len(scatters) >= 2  # encoder and predictor
    assert all("unique_indices=true" in line or "= pred[" in line for line in scatters), scatters


def test_default_tiles(monkeypatch):
    """Without `chunk`, in bfloat16. A launch costs about 2.5 us, the products of the step 15 ms."""

    def mean(parameters, rows, rest):
        return family.RNNT.value(implementation="kernel")(jax_rnnt.JointLogits(of_function(*parameters), *rows), *rest)

    shapes = joint_shapes(mesh_of(1), BATCH, jnp.bfloat16)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # decides the rows of a tile for a function
    compiled = compile_for_gpus(jax.value_and_grad(mean, (0, 1)), shapes)
    # At most 256 MB, where the logits have 3.4 GB; an eighth of them would be 420 MB.
    assert temporaries(compiled) <= 256e6
    # The kernels of the two loops over tiles, which run as often as there are tiles; few others run once.
    parts = compiled.as_text().split("\n\n")
    loops = [x for x in parts if "ENTRY" not in x and re.search(r" custom-call\(.*softmax_emission", x)]
    assert len(loops) == 2
    kernels = re.findall(r" = (.*?) (?:fusion|custom-call|copy|sort)\(", "\n".join(loops))
    rows = max(int(n) for x in loops for n in re.findall(rf"bf16\[(\d+),1,1,{V}\]", x))
    turns = 1 + 1.03 * TILED_NODES / rows  # with all blocks listed, of which a block's edges take 1%
    assert turns * len(kernels) <= 1700
    # The products round to 16 bits: no array has the logits or hidden units of a tile in float32.
    shapes = [tuple(map(int, dims.split(","))) for x in kernels for dims in re.findall(r"\bf32\[([\d,]+)\]", x)]
    assert shapes and max(map(np.prod, shapes)) < rows * WIDTH


# ------------------------------------------------------------------------------------------ kernels of a joint network
OPERATIONS = "fusion", "custom-call", "copy", "sort", "scatter", "reduce", "reduce-window", "transpose", "concatenate"
LAUNCHED = rf" = .*? (?:{'|'.join(OPERATIONS)})\("


def compiled_joint(loss, batch, dtype, mesh, kind="auto", vocabulary=V):
    """The step of a mean loss with a LinearJoint."""

    def mean(parameters, rows, rest):
        return loss.value()(jax_rnnt.JointLogits(jax_rnnt.LinearJoint(*parameters), *rows), *rest)

    shapes = joint_shapes(mesh, batch, dtype, vocabulary + loss.extra_classes)
    step = jax.value_and_grad(over_devices(kind, mean, mesh, 2), (0, 1))
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}  # the library's products
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), jax.default_matmul_precision("default"):
        return jax.jit(step).lower(*shapes).compile(options)


def launches(compiled):
    """(outside of the loop over slabs, in a turn). A call of ours is one launch, but the lattice has three."""
    loop, entry = compiled.as_text().split("\nENTRY ")
    (body,) = (part for part in loop.split("\n\n") if "jax_rnnt_joint_sums" in part)
    return len(re.findall(LAUNCHED, entry)) + 2, len(re.findall(LAUNCHED, body))


JOINTS = {  # and the most launches of all blocks, at most MB of workspace
    "rnnt": (family.RNNT, BATCH, V, 200, 256),
    "hat": (family.HAT, BATCH, V, 200, 256),
    "tdt": (family.tdt((0, 1, 2, 3, 4)), BATCH, V, 200, 256),
    "tdt, many classes": (family.tdt((0, 1, 2, 3, 4)), 4, 8193, 200, 400),
    "one slab": (family.RNNT, 1, V, 60, 256),
}


@pytest.mark.parametrize(("loss", "batch", "vocabulary", "most", "megabytes"), JOINTS.values(), ids=JOINTS)
def test_joint(loss, batch, vocabulary, most, megabytes):
    """In bfloat16, with all nodes inside the lengths. Four launches a slab: two of ours and two products."""
    compiled = compiled_joint(loss, batch, np.dtype(jnp.bfloat16), mesh_of(1), vocabulary=vocabulary)
    outside, turn = launches(compiled)
    slab = int(re.search(r"bf16\[(\d+),640\]\S*, bf16\[\d+,\d+\]\S*, f32\[\d+,2,\d+\]", compiled.as_text())[1]) // 128
    blocks = batch * -(-FRAMES // 16) * -(-(LABELS + 1) // 8)
    assert turn == 4
    assert outside + turn * -(-blocks // slab) <= most, (outside, turn, blocks, slab)
    assert temporaries(compiled) <= megabytes * 1e6


def test_joint_on_devices(kind, mesh, dtype):
    """Devices exchange the mean and the gradients of the parameters, once."""
    compiled = compiled_joint(family.RNNT, BATCH * DEVICES, dtype, mesh, kind)
    text = compiled.as_text()
    assert set(hlo.collectives(text)) == {"all-reduce"}
    loop, _ = text.split("\nENTRY ")
    assert not hlo.collectives(loop)
    kernels = "jax_rnnt_joint_fwd", "jax_rnnt_joint_bwd", "jax_rnnt_joint_sums", "jax_rnnt_lattice_grad"
    assert hlo.custom_calls(text) == hlo.once(kernels)
    assert temporaries(compiled) <= 320e6
