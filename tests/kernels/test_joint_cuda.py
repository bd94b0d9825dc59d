"""Are the CUDA kernels of a joint network right, on a GPU or emulated, and who gets them?

The truth is that of the logits in float64. `lab/emulation/check_joint.h` checks the kernels alone, with poison in
memory that was not written; `lab/tests/test_gpu_compile.py` counts launches and memory.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import family
import hlo
import jax_rnnt
import platforms
from family import slow
from jax_rnnt import JointLogits, LinearJoint
from jax_rnnt._xla import devices, loading, primitive
from jax_rnnt.layouts import _joint_cuda as kernels
from joint_cases import Case, bfloat16, check, same
from meshes import at, mesh_of

pytestmark = pytest.mark.skipif(not platforms.cuda_kernels(), reason="the CUDA kernels, on a GPU or emulated")


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.mark.parametrize("loss", family.LOSSES, ids=str)
def test_losses(loss):
    """Value and gradients against float64; NaN outside the lengths moves no bit, and a second run none either."""
    case = Case(loss, 9)
    got = case.run(fill=np.nan)
    check(got, case.expected(), 2e-5)
    same(got, case.run(fill=7.0))
    same(got, case.run(fill=np.nan))


def test_lengths():
    """Out of range, and none: no block but those of the last sequence, which has no weight."""
    case = Case(family.RNNT, 9)
    case.lengths = [np.array([0, 99, 0, 5], np.int32), np.array([0, 2, 0, 4], np.int32)]
    losses, (encoder, predictor, weight, bias) = case.run()
    assert np.isnan(losses[1]) and losses[0] == losses[2] == 0
    assert not encoder[[0, 2, 3]].any() and not predictor[[0, 2, 3]].any() and not weight.any() and not bias.any()


def test_overflow_stays_in_its_sequence():
    case = Case(family.RNNT, 9)
    (_, spoilt), (_, expected) = (case.run(weights=[1, w, 1, 1]) for w in (3e38, 0.0))
    for x, true in zip(spoilt[:2], expected):
        assert np.isnan(x[1]).any()
        same(x[[0, 2, 3]], true[[0, 2, 3]])
    same(spoilt[2:], expected[2:])


@pytest.mark.parametrize("loss", [family.TDT, slow(family.HAT), slow(family.MULTIBLANK)], ids=str)
def test_slabs(loss, monkeypatch):
    """Several slabs and chunks of classes, hypotheses that share the rows of their encoder, and options."""
    monkeypatch.setattr(kernels, "SLAB", 0)
    monkeypatch.setattr(kernels, "_LEAST", 5)
    options = {"clamp": 0.05, "fastemit_lambda": 0.3}
    case = Case(loss, 300, copies=2, scale=0.5)
    got = case.run(fill=np.nan, **options)
    check(got, case.expected(**options), 5e-5)
    same(got, case.run(fill=7.0, **options))


def tf32(x):
    """Rounded as the kernels round the factors of products."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x1000) & ~np.uint32(0x1FFF)).view(np.float32).astype(np.float64)


ROUNDED = {
    "float32": (np.float32, tf32, 2**-23), "bfloat16": (jnp.bfloat16, bfloat16, 2**-8),
    "float16": (np.float16, lambda x: np.asarray(x, np.float16).astype(np.float64), 2**-11),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ROUNDED)
def test_default_precision(dtype, monkeypatch):
    """Factors of products are rounded, sums are not, from slab to slab: the rest of the error is a part of theirs."""
    monkeypatch.setattr(kernels, "SLAB", 0)
    monkeypatch.setattr(kernels, "_LEAST", 1)
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


ACTIVATIONS = {
    "relu": (jax.nn.relu, lambda x: np.maximum(x, 0), lambda x: np.where(x > 0, 1.0, 0.0)),
    "silu": (jax.nn.silu, lambda x: x / (1 + np.exp(-x)), None),
    "gelu": (jax.nn.gelu, None, None),
    "exact": (functools.partial(jax.nn.gelu, approximate=False), None, None),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    """Against the same loss of logits in memory, in plain JAX in float64."""
    activation = ACTIVATIONS[name][0]
    case = Case(family.RNNT, 9)
    encoder, predictor, weight, bias = (jnp.asarray(x) for x in case.arrays)
    weights = jnp.asarray([1.0, -2.0, 0.5, 0.0])

    def total(encoder, predictor, weight, bias):
        logits = (
            jnp.einsum("btuh,hv->btuv", activation(encoder[:, :, None] + predictor[:, None]), weight)
            + bias[None, None, None]
        )
        loss = jax_rnnt.RNNTLoss(reduction="none", implementation="reference")
        losses = loss(logits, case.problem.targets, *case.lengths)
        return jnp.sum(losses * weights), losses

    (_, losses), gradients = jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True)(encoder, predictor, weight, bias)
    check(case.run(activation=activation), (losses, [np.asarray(x) for x in gradients]), 2e-5)


# ---------------------------------------------------------------------------------------------------- who gets them
def shapes(outer=(), dtype=np.float32, batch=16, units=8):
    like = lambda *shape, kind=dtype: jax.ShapeDtypeStruct(shape, kind)
    rest = (like(*outer, batch, *more, kind=np.int32) for more in ((4,), (), ()))
    return like(units, 9), like(*outer, batch, 7, units), like(*outer, batch, 5, units), *rest


def mean(weight, encoder, predictor, *rest, activation=jnp.tanh):
    return jax_rnnt.RNNTLoss()(JointLogits(LinearJoint(weight, None, activation), encoder, predictor), *rest)


step = jax.value_and_grad(mean, (0, 1, 2))


def calls(function, arguments, lowered_for=None):
    """(custom calls of the joint network in the program, warnings about tiles)"""
    primitive._warn.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=lowered_for).as_text()
    return text.count("@jax_rnnt_joint_"), [str(w.message) for w in caught if "LinearJoint in tiles" in str(w.message)]


def test_calls_of_a_pass():
    assert calls(mean, shapes())[0] == 1
    assert calls(step, shapes())[0] == 3
    assert calls(jax.vmap(step, (None, 0, 0, 0, 0, 0)), shapes((3,)))[0] == 3
    exported = export.export(jax.jit(step), disabled_checks=jax_rnnt.export_checks())(*shapes())
    assert exported.mlir_module().count("@jax_rnnt_joint_") == 3


def test_on_a_mesh(devices):
    """Each device takes its own sequences; gradients of the weight are summed once, and nothing else is exchanged."""
    case = Case(family.RNNT, 9, lengths=[np.tile(x, 2) for x in Case(family.RNNT, 9).lengths])
    encoder, predictor, weight, bias = (jnp.asarray(x, jnp.float32) for x in case.arrays)

    def total(weight, bias, encoder, predictor, *rest):
        return jax_rnnt.RNNTLoss()(JointLogits(LinearJoint(weight, bias), encoder, predictor), *rest)

    arguments = weight, bias, encoder, predictor, case.problem.targets, *case.lengths
    expected = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arguments)
    with mesh_of(devices, "auto") as mesh:
        placed = [at(mesh, x, *(["data"] if i > 1 else [])) for i, x in enumerate(arguments)]
        got, text = hlo.compiled(jax.value_and_grad(total, (0, 1, 2, 3)), *placed)
    assert set(hlo.collectives(text)) == {"all-reduce"}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, expected)


@pytest.mark.slow
def test_vmap():
    """Over weights and encoder rows, with one batch of everything else."""
    case = Case(family.RNNT, 9)
    encoder, predictor, weight, _ = (jnp.asarray(x, jnp.float32) for x in case.arrays)
    rest = predictor, case.problem.targets, *case.lengths
    stacked = jnp.stack([weight, 2 * weight, -weight]), jnp.stack([encoder, encoder - 1, 3 * encoder])
    mapped = jax.jit(jax.vmap(step, (0, 0, *[None] * 4)))(*stacked, *rest)
    for i, arguments in enumerate(zip(*stacked)):
        expected = jax.jit(step)(*arguments, *rest)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[i], b, atol=1e-5), mapped, expected)


REFUSED = {
    "float64": (dict(dtype=np.float64), {}, "no float64"),
    "activation": ({}, dict(activation=jnp.sin), "activations jnp.tanh"),
    "units": (dict(units=4096), {}, "4096 units take 568 KB of shared memory, and a thread block has 227"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case):
    options, of_joint, reason = REFUSED[case]
    count, (text,) = calls(functools.partial(mean, **of_joint), shapes(**options))
    assert count == 0 and reason in text


def test_shared_memory(monkeypatch):
    """Fewer rows of a block where a device has less of it; tiles before compute capability 8.0."""
    module = lambda *found: type("Module", (), {"devices": staticmethod(lambda: found)})
    assert devices.shared_memory(module((9, 0, 232448), (8, 9, 101376)), False, None) == 101376
    assert "device 0 has 7.5" in devices.shared_memory(module((7, 5, 65536)), False, None)
    kinds = {"NVIDIA H100 80GB HBM3": 227, "NVIDIA B200": 227, "NVIDIA H200": 227, "NVIDIA A100": 99, None: 99}
    for kind, size in kinds.items():
        assert devices.shared_memory(module(), False, kind) == size << 10
    monkeypatch.setattr(loading, "shared_memory", lambda *_: 99 << 10)
    case = Case(family.RNNT, 9)
    check(case.run(activation=jnp.tanh), case.expected(), 2e-5)
    (text,) = calls(mean, shapes(units=512))[1]
    assert "of shared memory, and a thread block has 99" in text


def test_several_platforms_are_tiles():
    """A program for a platform with kernels and one without: what the first has is asked of the right one."""
    both = "rocm", platforms.platform()
    count, (text,) = calls(mean, shapes(), both)
    assert count == 0 and f"the program is for {' and '.join(both)}" in text


def test_functions_are_tiles_without_a_word():
    def of_function(weight, encoder, predictor, *rest):
        joint = lambda w, e, p: jnp.tanh(e + p) @ w
        return jax_rnnt.RNNTLoss()(JointLogits(joint, encoder, predictor, parameters=weight), *rest)

    assert calls(of_function, shapes()) == (0, [])
