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
import launches
import losses
from jax_rnnt._xla import loading

pytestmark = pytest.mark.usefixtures("optimized")

DEVICES = 8
# As large as real shapes, so that sizes independent of the batch do not count.
B, T, U, V, H = 4 * DEVICES, 128, 63, 1024, 256
NODES = B * T * (U + 1)
SUPPORT = pathlib.Path(__file__).parents[1] / "support"
CALLS = losses.once(("jax_rnnt_softmax_emission_fwd", "jax_rnnt_lattice_grad", "jax_rnnt_softmax_emission_bwd"))


def mesh_of(devices):
    missing = pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") == "gpu-compile" else pytest.skip
    if "cuda" in loading.MISSING:
        missing(loading.MISSING["cuda"])
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=(SUPPORT / "h100.txtpb").read_text(), topology=f"1x1x{devices}"
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
    """Temporaries beside logits and gradient, in float32 planes [B, T, U + 1], and a little for each column: few,
    long sequences."""
    b, frames = B // 8, 8 * T
    sharding = NamedSharding(mesh_of(1), P())

    def spec(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def loss(*p):
        return jax_rnnt.rnnt_loss(*p, implementation="kernel", inplace=inplace)

    step = jax.jit(jax.value_and_grad(loss) if gradient else loss, donate_argnums=(0,) if inplace else ())
    shapes = spec((b, frames, U + 1, V), np.float32), spec((b, U), np.int32), *2 * (spec((b,), np.int32),)
    memory = step.lower(*shapes).compile({"xla_gpu_autotune_level": 0}).memory_analysis()
    assert memory.temp_size_in_bytes / (4 * NODES) == pytest.approx(planes, abs=0.2)
    assert memory.alias_size_in_bytes == (4 * NODES * V if inplace else 0)


# ------------------------------------------------------------------------------------------- a joint network in tiles

ROWS = 2048  # rows of a tile: 64 MB, where the default takes 256


@pytest.fixture(scope="module")
def in_tiles(kind, mesh, dtype):
    """The step of `JointLogits` with 32 sequences a device, whose logits would be 3.4 GB in bfloat16."""
    batch, frames, labels, width = 32 * DEVICES, 400, 128, 640

    def loss(parameters, rows, rest):
        joint = jax_rnnt.LinearJoint(*parameters)
        return jax_rnnt.RNNTLoss(implementation="kernel")(jax_rnnt.JointLogits(joint, *rows, ROWS), *rest)

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


JOINTS = {
    "rnnt": (losses.RNNT, "linear", 1.0),
    "tdt": (losses.tdt((0, 1, 2, 3, 4)), "linear", 1.01),  # 1,207 launches; with a tile less, 257 MB
    "hat": (losses.HAT, "linear", 1.0),
    "function": (losses.RNNT, "function", 1.5),
}


@pytest.fixture(scope="module", params=JOINTS)
def by_default(request):
    """(program, its text, how much of the limit it may take, rows of a tile, nodes): no `chunk`, bfloat16."""
    loss, kind, share = JOINTS[request.param]
    sharding = NamedSharding(mesh_of(1), P())
    batch, frames, labels, classes, width = 32, 400, 128, 1024, 640

    def run(parameters, rows, rest):
        joint = jax_rnnt.LinearJoint(*parameters)
        if kind == "function":
            joint = lambda encoder, predictor: jnp.tanh(encoder + predictor) @ parameters[0] + parameters[1][None]
        return loss.value(implementation="kernel")(jax_rnnt.JointLogits(joint, *rows), *rest)

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    parameters = spec(width, classes), spec(classes)
    rows = spec(batch, frames, width), spec(batch, labels + 1, width)
    rest = spec(batch, labels, dtype=np.int32), spec(batch, dtype=np.int32), spec(batch, dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")  # decides the rows of a tile for a function
        lowered = jax.jit(jax.value_and_grad(run, (0, 1))).lower(parameters, rows, rest)
    compiled = lowered.compile({"xla_gpu_autotune_level": 0})
    text = compiled.as_text()
    rows = max(int(n) for n in re.findall(rf"bf16\[(\d+),1,1,{classes}\]", text))
    return compiled, text, share, rows, batch * frames * (labels + 1)


def test_launches_of_tiles(by_default):
    """With all blocks listed; each launch costs about 2.5 us, the products of the step 15 ms."""
    _, text, share, rows, nodes = by_default
    turns = 1 + 1.03 * nodes / rows  # of which a block's edges take 1%
    tiles = dict.fromkeys(("jax_rnnt_softmax_emission_fwd", "jax_rnnt_softmax_emission_bwd"), turns)
    assert launches.Program(text, tiles).total.launches <= 1200 * share


def test_default_workspace_of_tiles(by_default):
    """At most 256 MB, where the logits have 3.4 GB; an eighth of them would be 420 MB."""
    compiled, *_ = by_default
    assert compiled.memory_analysis().temp_size_in_bytes <= 256e6


def test_logits_of_a_tile_in_their_dtype(by_default):
    """The products round to 16 bits: no array has the logits or hidden units of a tile in float32."""
    _, text, _, rows, _ = by_default
    program = launches.Program(text)
    loops = [own for own in program.computations.values() if any(_emission(x) for x in own.values())]
    assert len(loops) == 2
    kernels = [x for own in loops for x in own.values() if x.opcode in ("fusion", "custom-call", "copy")]
    shapes = [dims for x in kernels for dtype, dims in launches.arrays(x.shape) if dtype == "f32"]
    assert shapes and max(map(np.prod, shapes)) < rows * 640


def _emission(x):
    return x.opcode == "custom-call" and "softmax_emission" in x.rest


def test_counted_launches():
    """A loop counts as often as it runs, a fused product by its dimensions, an update in place by its update."""
    text = """HloModule m

%product (a: bf16[64,32], b: bf16[32,16]) -> bf16[64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %d = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (s: f32[100,16], u: f32[4,16], i: s32[]) -> f32[100,16] {
  %s = f32[100,16]{1,0} parameter(0)
  %u = f32[4,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %r = f32[100,16]{1,0} dynamic-update-slice(%s, %u, %i, %z)
}

%body (p: (s32[], bf16[64,32], bf16[32,16])) -> (s32[], bf16[64,32], bf16[32,16]) {
  %p = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %x = bf16[64,32]{1,0} get-tuple-element(%p), index=1
  %y = bf16[32,16]{1,0} get-tuple-element(%p), index=2
  %f = bf16[64,16]{1,0} fusion(%x, %y), kind=kCustom, calls=%product
  ROOT %t = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) tuple(%p)
}

%condition (q: (s32[], bf16[64,32], bf16[32,16])) -> pred[] {
  ROOT %q = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
}

ENTRY %main (v: (s32[], bf16[64,32], bf16[32,16]), s: f32[100,16], u: f32[4,16], i: s32[]) -> f32[100,16] {
  %v = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) parameter(0)
  %s = f32[100,16]{1,0} parameter(1)
  %u = f32[4,16]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %w = (s32[], bf16[64,32]{1,0}, bf16[32,16]{1,0}) while(%v), condition=%condition, body=%body, TRIPS
  ROOT %e = f32[100,16]{1,0} fusion(%s, %u, %i), kind=kLoop, calls=%update
}
"""
    cost = launches.Program(text.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')).total
    assert cost.launches == 5 + 1
    assert cost.tensor == 5 * 2 * 64 * 32 * 16 and cost.vector == 0
    assert cost.bytes == 5 * 2 * (64 * 32 + 32 * 16 + 64 * 16) + 2 * 4 * 4 * 16 + 4
    with pytest.raises(ValueError, match="no one said"):
        launches.Program(text.replace("TRIPS", "")).total  # noqa: B018
