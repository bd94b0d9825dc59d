"""Are the TPU's kernels of a joint network right in Pallas's interpreter, and who gets them?

The truth is that of the logits in float64. `lab/benchmarks/tpu.py` compiles the kernels for TPUs and counts cycles.
"""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import family
import hlo
import jax_rnnt
from family import slow
from jax_rnnt import JointLogits, LinearJoint
from jax_rnnt._xla import grouped, loading, primitive
from jax_rnnt.emissions._emission import label_map
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.layouts import _joint_pallas as kernels
from jax_rnnt.layouts import _joint_plan as plans
from jax_rnnt.layouts._joint_networks import Linear
from jax_rnnt.layouts._tile_blocks import TileInputs
from jax_rnnt.layouts._tiles import Tiled
from joint_cases import LENGTHS, Case, H, bfloat16, check, same
from meshes import at, mean_over_devices, mesh_of

pytestmark = [
    pytest.mark.no_kernel,
    pytest.mark.skipif(jax.__version_info__ < primitive.PALLAS, reason="before the Pallas that runs the TPU kernels"),
]


@pytest.fixture
def interpreted(monkeypatch):
    """Programs for the CPU take the kernels, whose memory is NaN until it is written (`interpret=True`)."""
    monkeypatch.setitem(loading.INTERPRETED, "cpu", True)  # no other test has these programs


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.parametrize("loss", [x if x is family.RNNT else slow(x) for x in family.LOSSES], ids=str)
def test_losses(loss, interpreted):
    """Value and gradients against float64; NaN outside the lengths moves no bit, and a second run none either."""
    case = Case(loss, 9)
    got = case.run(fill=np.nan)
    check(got, case.expected(), 2e-5)
    same(got, case.run(fill=7.0))
    same(got, case.run(fill=np.nan))


def test_lengths(interpreted):
    """Out of range, and none: no block but those of the last sequence, which has no weight."""
    case = Case(family.RNNT, 9)
    case.lengths = [np.array([0, 99, 0, 5], np.int32), np.array([0, 2, 0, 4], np.int32)]
    losses, (encoder, predictor, weight, bias) = case.run()
    assert np.isnan(losses[1]) and losses[0] == losses[2] == 0
    assert not encoder[[0, 2, 3]].any() and not predictor[[0, 2, 3]].any() and not weight.any() and not bias.any()


def test_overflow_stays_in_its_sequence(interpreted):
    case = Case(family.RNNT, 9)
    (_, spoilt), (_, expected) = (case.run(weights=[1, w, 1, 1]) for w in (3e38, 0.0))
    for x, true in zip(spoilt[:2], expected):
        assert np.isnan(x[1]).any()
        same(x[[0, 2, 3]], true[[0, 2, 3]])
    same(spoilt[2:], expected[2:])


@pytest.mark.parametrize(("loss", "copies"), [(family.TDT, 2), slow(family.HAT, None), slow(family.MULTIBLANK, None)])
def test_chunks_and_groups(loss, copies, interpreted, monkeypatch):
    """Two groups of classes with two chunks each, hypotheses that share the rows of their encoder, and options."""
    monkeypatch.setattr(grouped, "device_of", lambda ctx: (None, 2))
    monkeypatch.setattr(plans, "CHUNKS", (256,))
    options = {"clamp": 0.05, "fastemit_lambda": 0.3}
    case = Case(loss, 700, copies=copies, scale=0.5)
    check(case.run(fill=np.nan, **options), case.expected(**options), 5e-5)


@pytest.mark.parametrize("dtype", [np.float32, slow(jnp.bfloat16), slow(np.float16)])
def test_default_precision(dtype, interpreted):
    """Factors of products are rounded to bfloat16, sums are not: the rest of the error is a tenth of theirs."""
    case = Case(family.RNNT, 9, seed=2)
    case.arrays = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in case.arrays]
    (losses, gradients), limit = case.run(dtype, None), np.finfo(np.float32).eps if dtype == np.float32 else 2**-8
    (exact, true), (rounded, near) = case.expected(), case.expected(rounded=bfloat16)
    np.testing.assert_allclose(losses, rounded, rtol=1e-5)
    assert np.abs(losses - exact).max() > 1e-4
    for got, a, b in zip(gradients, true, near, strict=True):
        assert got.dtype == dtype
        error = np.abs(np.asarray(got, np.float64) - b).max()
        assert error <= 0.2 * np.abs(a - b).max() + limit * np.abs(a).max()


@pytest.mark.slow
def test_memory_of_a_tpu():
    """The interpreter of memory spaces and copies, with NaN in what was not written."""
    B, T, U, V = 2, 33, 8, 5
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    softmax = Softmax((0,)).resolved("test", V)
    tiled = Tiled(softmax, Linear(jnp.tanh), V, np.dtype(np.float32), None, True, precision="highest")
    num_frames, num_labels = jnp.array([T, 2], jnp.int32), jnp.array([U, 0], jnp.int32)
    label = label_map(jnp.ones((B, U), jnp.int32), num_labels)
    inputs = TileInputs(normal(B, T, H), normal(B, U + 1, H), label, num_frames, num_labels, None, ())
    parameters, cotangents = [normal(H, V), normal(V)], {slot: normal(B, T, U + 1) for slot in ("blank", "label")}
    flags = plans.BLOCKS.within(inputs.shape, num_frames, num_labels).at[1].set(False)

    @functools.partial(jax.jit, static_argnums=0)
    def run(interpret, parameters, inputs, *rest):
        problem = plans.plan(tiled, parameters, inputs, (None, 1))
        planes, norm = kernels.forward(problem, parameters, inputs, interpret)
        return planes, kernels.backward(problem, parameters, inputs, cotangents, norm, *rest, interpret)

    modes = True, pltpu.InterpretParams(uninitialized_memory="nan")
    plain, poisoned = (run(mode, parameters, inputs, jnp.ones(B), jnp.zeros(B), flags) for mode in modes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, poisoned)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(poisoned[1]))


ACTIVATIONS = {
    "tanh": jnp.tanh, "own": LinearJoint.activation, "lax": jax.lax.tanh, "relu": jax.nn.relu, "silu": jax.nn.swish,
    "gelu": jax.nn.gelu, "exact": functools.partial(jax.nn.gelu, approximate=False),
    "approximate": functools.partial(jax.nn.gelu, approximate=True),
}  # fmt: skip


def test_activations():
    """Known by identity; value and derivative are those of the function, that of relu at 0 is 0."""
    x = jnp.linspace(-6, 6, 121, dtype=np.float32)
    for function in ACTIVATIONS.values():
        of_kernel = plans.activation_of(function)
        for each in (lambda f: f(x), lambda f: jax.vjp(f, x)[1](jnp.ones_like(x))[0]):
            np.testing.assert_allclose(each(of_kernel), each(function), atol=2e-6)
    assert jax.grad(plans.activation_of(jax.nn.relu))(np.float32(0)) == 0
    for function in (jnp.sin, lambda x: jnp.tanh(x), functools.partial(jax.nn.gelu, True)):
        assert plans.activation_of(function) is None


@pytest.mark.slow
def test_order_of_classes():
    """Blanks, other heads, all others: each class has one lane, and labels know theirs."""
    counts, blanks, heads = (2, 700), ((), (0,), (1, 0)), (0, 5)
    for count, of_blanks, durations, groups in itertools.product(counts, blanks, heads, (1, 4)):
        for others in (tuple(range(count, count + durations)), *([of_blanks] if len(of_blanks) == 1 else [])):
            own = () if others == of_blanks else of_blanks
            total = count + len(others) * (others != of_blanks)
            classes = plans.Classes(total, own, others, groups)
            x = jnp.arange(2 * total, dtype=jnp.float32).reshape(2, total)
            arranged = np.asarray(classes.arrange(x, -1))
            assert arranged.shape == (2, groups * classes.lanes) and classes.lanes % classes.chunk == 0
            np.testing.assert_array_equal(classes.restore(jnp.asarray(arranged)), x)
            labels = np.array([v for v in range(count) if v not in others], np.int32)
            np.testing.assert_array_equal(arranged[:, np.asarray(classes.lane(jnp.asarray(labels)))], x[:, labels])
            none = np.asarray(classes.lane(jnp.asarray([-1, -2, *others[:1]], jnp.int32)))
            assert (none == -1).all()


# ---------------------------------------------------------------------------------------------------- who gets them
def shapes(outer=(), dtype=np.float32, batch=16):
    like = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(shape, kind)
    rest = (like(*outer, batch, *more, kind=np.int32) for more in ((4,), (), ()))
    return like(8, 9), like(*outer, batch, 7, 8), like(*outer, batch, 5, 8), *rest


def mean(weight, encoder, predictor, *rest, activation=jnp.tanh):
    return jax_rnnt.RNNTLoss()(JointLogits(LinearJoint(weight, None, activation), encoder, predictor), *rest)


step = jax.value_and_grad(mean, (0, 1, 2))


def calls(function, arguments):
    """Kernels of the joint network in the program for TPUs."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return lowered.as_text(debug_info=True).count('kernel_name = "jax_rnnt_joint_')


def test_one_kernel_a_pass():
    assert calls(mean, shapes()) == 1
    assert calls(step, shapes()) == 2
    mapped = jax.vmap(step, (None, 0, 0, 0, 0, 0))
    assert calls(mapped, shapes((3,))) == 2
    made = export.export(jax.jit(step), platforms=("tpu",))(*shapes())
    assert made.mlir_module().count("@tpu_custom_call") == 4  # with those of the lattice


@pytest.mark.parametrize("kind", ["auto", slow("explicit"), slow("shard_map")])
def test_on_a_mesh(kind, devices, interpreted):
    """Each device takes its own sequences; gradients of the weight are summed once, and nothing else is exchanged."""
    case = Case(family.RNNT, 9, lengths=[np.tile(x, 2) for x in LENGTHS])
    encoder, predictor, weight, bias = (jnp.asarray(x, jnp.float32) for x in case.arrays)

    def total(weight, bias, encoder, predictor, *rest):
        logits = JointLogits(LinearJoint(weight, bias), encoder, predictor)
        return jax_rnnt.RNNTLoss()(logits, *rest)

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
def test_vmap(interpreted):
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
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case):
    options, of_joint, reason = REFUSED[case]
    primitive._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert calls(functools.partial(mean, **of_joint), shapes(**options)) == 0
    (text,) = (str(w.message) for w in caught if "LinearJoint in tiles" in str(w.message))
    assert reason in text


def test_functions_are_tiles_without_a_word(recwarn):
    def of_function(weight, encoder, predictor, *rest):
        joint = lambda w, e, p: jnp.tanh(e + p) @ w
        return jax_rnnt.RNNTLoss()(JointLogits(joint, encoder, predictor, parameters=weight), *rest)

    assert calls(of_function, shapes()) == 0
    assert not [w for w in recwarn if "LinearJoint" in str(w.message)]
