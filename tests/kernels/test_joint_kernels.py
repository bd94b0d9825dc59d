"""Are the kernels of a joint network right, and who gets them?

The TPU's run in Pallas's interpreter, those for CUDA on a GPU or emulated. The truth is that of the logits in float64.
`lab/emulation/check_joint.h` checks the CUDA kernels alone, with poison in memory that was not written;
`lab/tests/test_gpu_compile.py` counts launches and memory. `lab/benchmarks/tpu.py` compiles the others for TPUs and
counts cycles.
"""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import batches
import compare
import family
import hlo
import jax_rnnt
import platforms
from jax_rnnt import JointLogits, LinearJoint
from jax_rnnt._xla import devices as gpus
from jax_rnnt._xla import grouped, loading, primitive, proof
from jax_rnnt.emissions._emission import label_map
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.tiles import joint
from jax_rnnt.tiles._networks import Linear
from jax_rnnt.tiles._tile_blocks import TileInputs
from jax_rnnt.tiles._tiles import Tiled
from jax_rnnt.tiles.joint import _classes, _gpu, _kernel, _tpu
from meshes import at, mean_over_devices, mesh_of

LENGTHS = np.array([37, 20, 33, 5], np.int32), np.array([9, 2, 0, 4], np.int32)  # of blocks of 32 frames, 8 columns
WEIGHTS = np.array([1.0, -2.0, 0.5, 0.0], np.float32)  # a sequence without weight is skipped
H = 12
NO_PALLAS = pytest.mark.skipif(jax.__version_info__ < primitive.PALLAS, reason="before the Pallas of the TPU kernels")
TPU = pytest.param("tpu", marks=[pytest.mark.no_kernel, NO_PALLAS])
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not platforms.cuda_kernels(), reason="on a GPU or emulated"))
BOTH = pytest.mark.parametrize("kernels", [TPU, CUDA], indirect=True)
OF_TPU, OF_CUDA = (pytest.mark.parametrize("kernels", [x], indirect=True) for x in (TPU, CUDA))


def bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


class Case:
    """A problem of which a joint network makes the logits, in float64."""

    def __init__(self, loss, V, seed=0, copies=None, lengths=LENGTHS, scale=1.0):
        self.loss, rng = loss, np.random.default_rng(seed)
        self.lengths = [np.asarray(x, np.int32) for x in lengths]
        T, U, batch = max(self.lengths[0].max(), 37), max(self.lengths[1].max(), 9), len(self.lengths[0])
        self.problem = batches.problem(batch, T, U, V, loss=loss, lengths=self.lengths)
        self.encoders = batch // (copies or 1)
        classes = V + loss.extra_classes
        rows = (self.encoders, T, H), (batch, U + 1, H), (H, classes), (classes,)
        self.arrays = [rng.normal(0, scale, shape).astype(np.float32).astype(np.float64) for shape in rows]

    def expected(self, activation=np.tanh, derivative=lambda h: 1 - h**2, rounded=lambda x: x, **options):
        """(losses, gradients of `arrays`), where factors of products are `rounded`."""
        encoder, predictor, weight, bias = self.arrays
        copies = len(predictor) // self.encoders
        h = activation(np.repeat(encoder, copies, 0)[:, :, None] + predictor[:, None])
        logits = rounded(h) @ rounded(weight) + bias
        losses, g = self.loss.expected(self.problem._replace(logits=logits), **options)
        g = g * WEIGHTS[:, None, None, None]
        dx = rounded(g) @ rounded(weight).T * derivative(h)
        of_encoder = dx.sum(2).reshape(self.encoders, copies, *encoder.shape[1:]).sum(1)
        of_weight = np.einsum("btuh,btuv->hv", rounded(h), rounded(g))
        return losses, [of_encoder, dx.sum(1), of_weight, g.sum((0, 1, 2))]

    def run(self, dtype=np.float32, precision="highest", fill=None, activation=None, weights=WEIGHTS, **options):
        """(losses, gradients); `fill` replaces rows outside the lengths."""
        program = _program(self.loss, precision, activation or jax_rnnt.LinearJoint.activation, tuple(options.items()))
        arrays = [np.array(x, np.float32) for x in self.arrays]
        if fill is not None:
            copies = len(arrays[1]) // self.encoders
            frames = self.lengths[0].reshape(-1, copies).max(1)
            for x, lengths in zip(arrays, (frames, self.lengths[1] + 1)):
                for row, n in zip(x, lengths):
                    row[n:] = fill
        arrays = [jnp.asarray(x, dtype) for x in arrays]
        batch = np.array(weights, np.float32), self.problem.targets, *self.lengths
        return jax.tree.map(np.asarray, program(arrays, *batch))


@functools.cache
def _program(loss, precision, activation, options):
    def total(arrays, weights, targets, *lengths):
        encoder, predictor, weight, bias = arrays
        if len(encoder) < len(predictor):
            fold = lambda x: x.reshape(len(encoder), -1, *x.shape[1:])
            encoder, predictor, targets, *lengths = encoder[:, None], *map(fold, (predictor, targets, *lengths))
        logits = JointLogits(LinearJoint(weight, bias, activation), encoder, predictor)
        losses = loss.value(reduction="none", **dict(options))(logits, targets, *lengths).reshape(-1)
        return jnp.sum(jnp.where(weights == 0, 0, losses * weights)), losses

    def run(*arguments):
        with jax.default_matmul_precision(precision):
            (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(*arguments)
        return losses, gradients

    return jax.jit(run)


def check(got, expected, limit):
    (losses, gradients), (true_losses, true_gradients) = got, expected
    np.testing.assert_allclose(losses, true_losses, rtol=limit)
    for x, true in zip(gradients, true_gradients, strict=True):
        np.testing.assert_allclose(x, true, atol=limit * np.abs(true).max())


@pytest.fixture
def kernels(request, monkeypatch):
    """Programs for the CPU take the TPU's kernels, whose memory is NaN until it is written (`interpret=True`).

    No device has shown that these kernels are right (`test_proof.py`), so programs ask for all.
    """
    monkeypatch.setenv(proof.VARIABLE, "all")
    if request.param == "tpu":
        monkeypatch.setitem(loading.INTERPRETED, "cpu", True)  # no other test has these programs
    return request.param


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.quick("rnnt-tpu", *(f"{loss}-cuda" for loss in family.LOSSES))
@BOTH
@pytest.mark.parametrize("loss", family.LOSSES, ids=str)
def test_losses(loss, kernels):
    """Value and gradients against float64; NaN outside the lengths moves no bit, and a second run none either."""
    case = Case(loss, 9)
    got = case.run(fill=np.nan)
    check(got, case.expected(), 2e-5)
    compare.assert_same_bits(got, case.run(fill=7.0))
    compare.assert_same_bits(got, case.run(fill=np.nan))


@BOTH
def test_lengths(kernels):
    """Out of range, and none: no block but those of the last sequence, which has no weight."""
    case = Case(family.RNNT, 9)
    case.lengths = [np.array([0, 99, 0, 5], np.int32), np.array([0, 2, 0, 4], np.int32)]
    losses, (encoder, predictor, weight, bias) = case.run()
    assert np.isnan(losses[1]) and losses[0] == losses[2] == 0
    assert not encoder[[0, 2, 3]].any() and not predictor[[0, 2, 3]].any() and not weight.any() and not bias.any()


@BOTH
def test_overflow_stays_in_its_sequence(kernels):
    case = Case(family.RNNT, 9)
    (_, spoilt), (_, expected) = (case.run(weights=[1, w, 1, 1]) for w in (3e38, 0.0))
    for x, true in zip(spoilt[:2], expected):
        assert np.isnan(x[1]).any()
        compare.assert_same_bits(x[[0, 2, 3]], true[[0, 2, 3]])
    compare.assert_same_bits(spoilt[2:], expected[2:])


@pytest.mark.quick("tdt-tpu", "tdt-cuda")
@BOTH
@pytest.mark.parametrize("loss", [family.TDT, family.HAT, family.MULTIBLANK], ids=str)
def test_chunks_and_groups(loss, kernels, monkeypatch):
    """Two groups of classes with two chunks each, or several slabs and chunks; hypotheses that share the rows of their
    encoder, and options."""
    if kernels == "tpu":
        monkeypatch.setattr(grouped, "device_of", lambda ctx: (None, 2))
        monkeypatch.setattr(_classes, "CHUNKS", (256,))
    monkeypatch.setattr(_gpu, "SLAB", 0)
    monkeypatch.setattr(_gpu, "_LEAST", 5)
    options = {"clamp": 0.05, "fastemit_lambda": 0.3}
    case = Case(loss, 700 if kernels == "tpu" else 300, copies=2, scale=0.5)
    got = case.run(fill=np.nan, **options)
    check(got, case.expected(**options), 5e-5)
    compare.assert_same_bits(got, case.run(fill=7.0, **options))


@pytest.mark.quick("float32-tpu")
@OF_TPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_default_precision(dtype, kernels):
    """Factors of products are rounded to bfloat16, sums are not: the rest of the error is a tenth of theirs."""
    case = Case(family.RNNT, 9, seed=2)
    case.arrays = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in case.arrays]
    (losses, gradients), limit = case.run(dtype, None), np.finfo(np.float32).eps if dtype == "float32" else 2**-8
    (exact, true), (rounded, near) = case.expected(), case.expected(rounded=bfloat16)
    np.testing.assert_allclose(losses, rounded, rtol=1e-5)
    assert np.abs(losses - exact).max() > 1e-4
    for got, a, b in zip(gradients, true, near, strict=True):
        assert got.dtype == dtype
        error = np.abs(np.asarray(got, np.float64) - b).max()
        assert error <= 0.2 * np.abs(a - b).max() + limit * np.abs(a).max()


def tf32(x):
    """Rounded as the kernels round the factors of products."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x1000) & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)


ROUNDED = {
    "float32": (np.float32, tf32, 2**-23), "bfloat16": (jnp.bfloat16, bfloat16, 2**-8),
    "float16": (np.float16, lambda x: np.asarray(x, np.float16).astype(np.float64), 2**-11),
}  # fmt: skip


@OF_CUDA
@pytest.mark.parametrize("dtype", ROUNDED)
def test_default_precision_of_slabs(dtype, kernels, monkeypatch):
    """Factors of products are rounded, sums are not, from slab to slab: the rest of the error is a part of theirs."""
    monkeypatch.setattr(_gpu, "SLAB", 0)
    monkeypatch.setattr(_gpu, "_LEAST", 1)
    dtype, rounded, limit = ROUNDED[dtype]
    case = Case(family.RNNT, 9, seed=2)
    case.arrays = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in case.arrays]
    losses, gradients = case.run(dtype, None)
    (exact, true), (near, close) = case.expected(), case.expected(rounded=rounded)
    np.testing.assert_allclose(losses, near, rtol=2e-5)
    assert np.abs(losses - exact).max() > 1e-5
    for got, a, b in zip(gradients, true, close, strict=True):
        assert got.dtype == dtype
        error = np.abs(np.asarray(got, np.float64) - a).max()
        assert error <= 1.5 * np.abs(a - b).max() + 2 * limit * np.abs(a).max()


@pytest.mark.slow
@NO_PALLAS
@pytest.mark.no_kernel
def test_memory_of_a_tpu():
    """The interpreter of memory spaces and copies, with NaN in what was not written."""
    B, T, U, V = 2, 33, 8, 5
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    softmax = Softmax((0,)).resolved(V)
    tiled = Tiled(softmax, Linear(jnp.tanh), V, np.dtype(np.float32), None, True, precision="highest")
    num_frames, num_labels = jnp.array([T, 2], jnp.int32), jnp.array([U, 0], jnp.int32)
    label = label_map(jnp.ones((B, U), jnp.int32), num_labels)
    inputs = TileInputs(normal(B, T, H), normal(B, U + 1, H), label, num_frames, num_labels, None, ())
    parameters, cotangents = [normal(H, V), normal(V)], {slot: normal(B, T, U + 1) for slot in ("blank", "label")}
    flags = _tpu.BLOCKS.within(inputs.shape, num_frames, num_labels).at[1].set(False)

    @functools.partial(jax.jit, static_argnums=0)
    def run(interpret, parameters, inputs, *rest):
        kernel = joint.KERNELS["tpu"]
        plan = kernel.plan(tiled, parameters, inputs, (None, 1))
        planes, norm = kernel.forward(plan, parameters, inputs, interpret)
        return planes, kernel.backward(plan, parameters, inputs, cotangents, norm, *rest, interpret)

    modes = True, pltpu.InterpretParams(uninitialized_memory="nan")
    plain, poisoned = (run(mode, parameters, inputs, jnp.ones(B), jnp.zeros(B), flags) for mode in modes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, poisoned)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(poisoned[1]))


ACTIVATIONS = {
    "tanh": jnp.tanh, "own": LinearJoint.activation, "lax": jax.lax.tanh, "relu": jax.nn.relu, "silu": jax.nn.swish,
    "gelu": jax.nn.gelu, "exact": functools.partial(jax.nn.gelu, approximate=False),
    "approximate": functools.partial(jax.nn.gelu, approximate=True),
}  # fmt: skip


@pytest.mark.no_kernel
def test_activations_of_a_plan():
    """Known by identity; value and derivative are those of the function, that of relu at 0 is 0."""
    x = jnp.linspace(-6, 6, 121, dtype=np.float32)
    for function in ACTIVATIONS.values():
        of_kernel = _kernel.ACTIVATIONS[_kernel.activation_of(function)]
        for each in (lambda f: f(x), lambda f: jax.vjp(f, x)[1](jnp.ones_like(x))[0]):
            np.testing.assert_allclose(each(of_kernel), each(function), atol=2e-6)
    assert jax.grad(_kernel.ACTIVATIONS[_kernel.activation_of(jax.nn.relu)])(np.float32(0)) == 0
    for function in (jnp.sin, lambda x: jnp.tanh(x), functools.partial(jax.nn.gelu, True)):
        assert _kernel.activation_of(function) is None


@OF_CUDA
@pytest.mark.parametrize("name", ["relu", "silu", "gelu", "exact"])
def test_activations(name, kernels):
    """Against the same loss of logits in memory, in plain JAX in float64."""
    activation = ACTIVATIONS[name]
    case = Case(family.RNNT, 9)
    encoder, predictor, weight, bias = (jnp.asarray(x) for x in case.arrays)
    weights = jnp.asarray([1.0, -2.0, 0.5, 0.0])

    def total(encoder, predictor, weight, bias):
        hidden = activation(encoder[:, :, None] + predictor[:, None])
        logits = jnp.einsum("btuh,hv->btuv", hidden, weight) + bias[None, None, None]
        loss = jax_rnnt.RNNTLoss(reduction="none", implementation="reference")
        losses = loss(logits, case.problem.targets, *case.lengths)
        return jnp.sum(losses * weights), losses

    (_, losses), gradients = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(encoder, predictor, weight, bias)
    check(case.run(activation=activation), (losses, [np.asarray(x) for x in gradients]), 2e-5)


@pytest.mark.slow
@pytest.mark.no_kernel
def test_order_of_classes():
    """Blanks, other heads, all others: each class has one lane, and labels know theirs."""
    counts, blanks, heads = (2, 700), ((), (0,), (1, 0)), (0, 5)
    for count, of_blanks, durations, groups in itertools.product(counts, blanks, heads, (1, 4)):
        for others in (tuple(range(count, count + durations)), *([of_blanks] if len(of_blanks) == 1 else [])):
            own = () if others == of_blanks else of_blanks
            total = count + len(others) * (others != of_blanks)
            classes = _classes.Classes(total, own, others, groups)
            x = jnp.arange(2 * total, dtype=jnp.float32).reshape(2, total)
            arranged = np.asarray(classes.arrange(x, -1))
            assert arranged.shape == (2, groups * classes.lanes) and classes.lanes % classes.chunk == 0
            np.testing.assert_array_equal(classes.restore(jnp.asarray(arranged)), x)
            labels = np.array([v for v in range(count) if v not in others], np.int32)
            np.testing.assert_array_equal(arranged[:, np.asarray(classes.lane(jnp.asarray(labels)))], x[:, labels])
            none = np.asarray(classes.lane(jnp.asarray([-1, -2, *others[:1]], jnp.int32)))
            assert (none == -1).all()


# ---------------------------------------------------------------------------------------------------- who gets them
def shapes(outer=(), dtype=np.float32, batch=16, units=8):
    like = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(shape, kind)
    rest = (like(*outer, batch, *more, kind=np.int32) for more in ((4,), (), ()))
    return like(units, 9), like(*outer, batch, 7, units), like(*outer, batch, 5, units), *rest


def mean(weight, encoder, predictor, *rest, activation=jnp.tanh):
    return jax_rnnt.RNNTLoss()(JointLogits(LinearJoint(weight, None, activation), encoder, predictor), *rest)


step = jax.value_and_grad(mean, (0, 1, 2))
MARKS = {"tpu": 'kernel_name = "jax_rnnt_joint_', "cuda": "@jax_rnnt_joint_"}


def calls(function, arguments, kernels="cuda", lowered_for=None):
    """(kernels of the joint network in the program, warnings about tiles)"""
    primitive._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered_for = ("tpu",) if kernels == "tpu" else lowered_for
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=lowered_for).as_text(debug_info=True)
    return text.count(MARKS[kernels]), [str(w.message) for w in caught if "LinearJoint in tiles" in str(w.message)]


@BOTH
def test_calls_of_a_pass(kernels):
    in_step = {"tpu": 2, "cuda": 3}[kernels]
    assert calls(mean, shapes(), kernels)[0] == 1
    assert calls(step, shapes(), kernels)[0] == in_step
    assert calls(jax.vmap(step, (None, 0, 0, 0, 0, 0)), shapes((3,)), kernels)[0] == in_step
    if kernels == "tpu":
        made = export.export(jax.jit(step), platforms=("tpu",))(*shapes())
        assert made.mlir_module().count("@tpu_custom_call") == 4  # with those of the lattice
    else:
        made = export.export(jax.jit(step), disabled_checks=jax_rnnt.export_checks())(*shapes())
        assert made.mlir_module().count("@jax_rnnt_joint_") == in_step


@pytest.mark.quick("auto-tpu", "auto-cuda")
@BOTH
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_on_a_mesh(kind, devices, kernels):
    """Each device takes its own sequences; gradients of the weight are summed once, and nothing else is exchanged."""
    case = Case(family.RNNT, 9, lengths=[np.tile(x, 2) for x in LENGTHS])
    encoder, predictor, weight, bias = (jnp.asarray(x, jnp.float32) for x in case.arrays)

    def total(weight, bias, encoder, predictor, *rest):
        return jax_rnnt.RNNTLoss()(JointLogits(LinearJoint(weight, bias), encoder, predictor), *rest)

    with jax.default_matmul_precision("highest"):
        arguments = weight, bias, encoder, predictor, case.problem.targets, *case.lengths
        expected = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arguments)
        with mesh_of(devices, kind.replace("shard_map", "auto")) as mesh:
            run = mean_over_devices(total, mesh, (P(), P(), *[P("data")] * 5)) if kind == "shard_map" else total
            placed = [at(mesh, x, *(["data"] if i > 1 else [])) for i, x in enumerate(arguments)]
            got, text = hlo.compiled(jax.value_and_grad(run, (0, 1, 2, 3)), *placed)
    assert set(hlo.collectives(text)) == {"all-reduce"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


@pytest.mark.slow
@BOTH
def test_vmap(kernels):
    """Over weights and encoder rows, with one batch of everything else."""
    case = Case(family.RNNT, 9, lengths=[x[:2] for x in LENGTHS])
    encoder, predictor, weight, _ = (jnp.asarray(x, jnp.float32) for x in case.arrays)
    rest = predictor, case.problem.targets, *case.lengths
    stacked = jnp.stack([weight, 2 * weight, -weight]), jnp.stack([encoder, encoder - 1, 3 * encoder])
    with jax.default_matmul_precision("highest"):
        mapped = jax.jit(jax.vmap(step, (0, 0, *[None] * 4)))(*stacked, *rest)
        for i, arguments in enumerate(zip(*stacked)):
            expected = jax.jit(step)(*arguments, *rest)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a[i], b, atol=1e-5), mapped, expected)


REFUSED = {
    "float64": (dict(dtype=np.float64), {}, "no float64"),
    "activation": ({}, dict(activation=jnp.sin), "activations jnp.tanh"),
    "blocks": (dict(batch=1 << 18), {}, "blocks of 32 frames and 8 columns"),
    "units": (dict(units=4096), {}, "4096 units take 568 KB of shared memory, and a thread block has 227"),
}


@BOTH
@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case, kernels):
    if case == {"tpu": "units", "cuda": "blocks"}[kernels]:
        pytest.skip("a limit of the others")
    options, of_joint, reason = REFUSED[case]
    count, (text,) = calls(functools.partial(mean, **of_joint), shapes(**options), kernels)
    assert count == 0 and reason in text


# What the module of the CUDA kernels says of them.
JOINT = {
    "capability": 8, "shared_bytes": 99 << 10, "columns": 8, "classes": 128, "unit_bytes": 128, "blocks": 1 << 24,
    "rows": {2: [128, 64, 32], 4: [64, 32]}, "activations": list(_kernel.ACTIVATIONS),
}  # fmt: skip
# Most units by kilobytes of shared memory and bytes of a unit: lab/cuda.md.
UNITS = {(99, 2): 640, (99, 4): 320, (227, 2): 2688, (227, 4): 1344}


@OF_CUDA
def test_limits_of_the_module(kernels):
    module = loading.module(platforms.platform())
    assert module.joint == JOINT
    for (shared, size), units in UNITS.items():
        needed = (module.joint_shared_bytes(32, n * size) for n in (units, units + 128 // size))
        assert [n <= shared << 10 for n in needed] == [True, False]


@pytest.mark.no_kernel
@pytest.mark.parametrize(
    ("dtype", "units", "kilobytes", "expected"),
    [
        (np.float16, 100, 227, (128, 128)), (np.float16, 641, 227, (64, 704)), (np.float32, 33, 227, (64, 64)),
        (np.float32, 1344, 227, (32, 1344)), (np.float32, 1345, 227, "1345 units take .* a thread block has 227"),
        (np.float16, 8, "no such device", "no such device"),
    ],
)  # fmt: skip
def test_plan_of_a_gpu(dtype, units, kilobytes, expected):
    """The most rows of a block that fit, and units in whole stages; a row takes its units and 64 bytes."""
    needed = lambda rows, row_bytes: 3 * 128 * (128 + 16) + rows * (row_bytes + 64)
    module = type("Module", (), {"joint": JOINT, "joint_shared_bytes": staticmethod(needed)})
    weight, encoder, predictor, *_ = shapes(dtype=dtype, batch=2, units=units)
    tiled = Tiled(Softmax((0,)), Linear(jnp.tanh), 9, np.dtype(dtype), None, True)
    shared = kilobytes if isinstance(kilobytes, str) else kilobytes << 10
    plan = _gpu.plan(tiled, [weight], TileInputs(encoder, predictor, *[None] * 4, ()), (shared, module))
    if isinstance(expected, str):
        assert re.fullmatch(expected, plan)
    else:
        assert ((plan.rows, plan.padded), plan.blocks.frames) == (expected, expected[0] // 8)


@pytest.mark.no_kernel
def test_devices_of_kernels():
    """Tiles before compute capability 8.0 and where there is no code, as the kernels have no PTX."""
    own = {"joint_architectures": "80-real 90-real", "joint": JOINT}
    module = lambda *found: type("Module", (), own | {"devices": staticmethod(lambda: found)})
    assert gpus.shared_memory(module((9, 0, 232448), (8, 9, 101376)), False, None) == 101376
    assert "device 0 has 7.5" in gpus.shared_memory(module((7, 5, 65536)), False, None)
    assert "none for device 1, of compute capability 11.0" in gpus.shared_memory(
        module((8, 6, 101376), (11, 0, 232448)), False, None
    )
    assert JOINT["shared_bytes"] == 99 << 10
    kinds = {"NVIDIA H100 80GB HBM3": 227, "NVIDIA B200": 227, "NVIDIA H200": 227, "NVIDIA A100": 99, None: 99}
    for kind, size in kinds.items():
        assert gpus.shared_memory(module(), False, kind) == size << 10


@OF_CUDA
def test_shared_memory(kernels, monkeypatch):
    """Fewer rows of a block where a device has less of it."""
    monkeypatch.setattr(loading, "shared_memory", lambda *_: 99 << 10)
    case = Case(family.RNNT, 9)
    check(case.run(activation=jnp.tanh), case.expected(), 2e-5)
    (text,) = calls(mean, shapes(units=512))[1]
    assert "of shared memory, and a thread block has 99" in text


@OF_CUDA
def test_several_platforms_are_tiles(kernels):
    """A program for a platform with kernels and one without: what the first has is asked of the right one."""
    both = "rocm", platforms.platform()
    count, (text,) = calls(mean, shapes(), lowered_for=both)
    assert count == 0 and f"the program is for {' and '.join(both)}" in text


@BOTH
def test_functions_are_tiles_without_a_word(kernels):
    def of_function(weight, encoder, predictor, *rest):
        joint = lambda w, e, p: jnp.tanh(e + p) @ w
        return jax_rnnt.RNNTLoss()(JointLogits(joint, encoder, predictor, parameters=weight), *rest)

    assert calls(of_function, shapes(), kernels) == (0, [])
