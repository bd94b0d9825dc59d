"""Can a training step be exported, stored, and run elsewhere?"""

import warnings

import jax
import numpy as np
import pytest
from jax import export

import jax_rnnt
import losses

pytestmark = pytest.mark.rare("reference")  # JAX itself transforms plain JAX


def step(loss, **options):
    return jax.jit(jax.value_and_grad(lambda *p: loss(*p, **options)))


def shapes(p):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in p]


def round_trip(exported):
    pytest.importorskip("flatbuffers")
    return export.deserialize(exported.serialize())


def check(got, p, expected):
    np.testing.assert_allclose(got[0], expected[0].mean(), rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1] / len(expected[0]), atol=losses.tolerance(np.float32, 11))


@pytest.mark.family
def test_round_trip(loss, implementation):
    p = losses.problem(loss=loss, dtype=np.float32)
    f = step(loss, implementation=implementation, clamp=0.5)
    exported = export.export(f, disabled_checks=jax_rnnt.export_checks())(*p)
    check(round_trip(exported).call(*p), p, loss.expected(p, clamp=0.5))
    calls = [f"custom_call @{target}" in exported.mlir_module() for target in loss.gradient_calls]
    assert all(calls) if implementation == "kernel" and not losses.interpreted() else not any(calls)


def test_without_the_checks(loss, native_kernel):
    """Fails without `export_checks`. If JAX ever gives the guarantee, the helper may go."""
    p = losses.problem(loss=loss, dtype=np.float32)
    with pytest.raises(ValueError, match="custom call"):
        export.export(step(loss, implementation=native_kernel))(*p)


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("tpu",), ("cpu", "cuda", "tpu", "rocm")], ids="+".join)
def test_platforms(loss, platforms):
    """One program for several platforms: kernels where there are some, the reference elsewhere."""
    p = losses.problem(loss=loss, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "no kernels for platform", once a process
        exported = export.export(step(loss), platforms=platforms, disabled_checks=jax_rnnt.export_checks())(*p)
    assert exported.platforms == platforms
    restored = round_trip(exported)
    if losses.platform() in platforms:
        check(restored.call(*p), p, loss.expected(p))
    if platforms == ("tpu",):
        assert "custom_call @jax_rnnt" not in exported.mlir_module()


@pytest.mark.family
def test_symbolic_batch(loss, implementation):
    """One exported program serves every batch size."""
    pytest.importorskip("flatbuffers")
    (b,) = export.symbolic_shape("b")
    p = losses.problem(loss=loss, dtype=np.float32)
    symbolic = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in p]
    f = step(loss, implementation=implementation)
    restored = round_trip(export.export(f, disabled_checks=jax_rnnt.export_checks())(*symbolic))
    for size in (1, 3, 4) if loss is losses.RNNT else (3,):
        part = p.take(slice(size))
        check(restored.call(*part), part, loss.expected(part))


@pytest.mark.family
def test_symbolic_frames(loss, kernel):
    """Frames and labels may be symbolic too: the shapes reach the kernels at run time."""
    pytest.importorskip("flatbuffers")
    b, t = export.symbolic_shape("b, t", constraints=["t >= 1"])
    p = losses.problem(loss=loss, dtype=np.float32)
    symbolic = [jax.ShapeDtypeStruct((b, t, *p.logits.shape[2:]), np.float32)]
    symbolic += [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in p[1:]]
    restored = round_trip(
        export.export(step(loss, implementation=kernel), disabled_checks=jax_rnnt.export_checks())(*symbolic)
    )
    check(restored.call(*p), p, loss.expected(p))


def test_vmapped_and_exported(loss, kernel):
    p = losses.problem(loss=loss, dtype=np.float32)
    f = jax.jit(jax.vmap(jax.value_and_grad(lambda *p: loss(*p, reduction="none", implementation=kernel))))
    got = round_trip(export.export(f, disabled_checks=jax_rnnt.export_checks())(*p)).call(*p)
    losses.assert_matches(got, loss.expected(p), np.float32, 11)


def test_gradient_of_an_exported_loss(loss, implementation):
    """vjp_order keeps a derivative in the file."""
    p = losses.problem(loss=loss, dtype=np.float32)
    f = jax.jit(lambda *p: loss(*p, implementation=implementation))
    exported = export.export(f, disabled_checks=jax_rnnt.export_checks())(*p)
    pytest.importorskip("flatbuffers")
    restored = export.deserialize(exported.serialize(vjp_order=1))
    check(jax.value_and_grad(restored.call)(*map(jax.numpy.asarray, p)), p, loss.expected(p))


def test_checks_name_every_target(kernel):
    checks = str(jax_rnnt.export_checks())
    for target in losses.RNNT.value_calls + losses.RNNT.gradient_calls:
        assert target in checks


# ----------------------------------------------------------------------------------- joints, predictors and decoders


def names(*dimensions):
    """Symbolic shapes of these names; a number stays one."""
    symbols = iter(export.symbolic_shape(",".join(x for x in dimensions if isinstance(x, str))))
    return [next(symbols) if isinstance(x, str) else x for x in dimensions]


def check_symbolic(f, symbolic, arrays):
    """The program for symbolic shapes gives what the one for these shapes gives."""
    f = jax.jit(f)
    checks = jax_rnnt.export_checks()
    found = export.export(f, disabled_checks=checks)(*symbolic).call(*arrays)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(f(*arrays)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


DIMENSIONS = [("b", 7, 4), (4, "t", 4), (4, 7, "u"), ("b", "t", "u")]


@pytest.mark.parametrize(
    "sizes", [*DIMENSIONS[2:3], *(pytest.param(x, marks=pytest.mark.slow) for x in DIMENSIONS[:2])]
)
def test_symbolic_labels(sizes, implementation):
    """No dimension of an array of logits must be known but V."""
    p = losses.problem(dtype=np.float32)
    b, t, u = names(*sizes)
    given = (b, t, u + 1, 9), (b, u), (b,), (b,)
    symbolic = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(given, p)]
    check_symbolic(step(losses.RNNT, implementation=implementation), symbolic, p)


OFTEN = {("linear", DIMENSIONS[0]), ("function", DIMENSIONS[3])}
JOINTS = [
    pytest.param(kind, x, marks=() if (kind, x) in OFTEN else pytest.mark.slow)
    for kind in ("linear", "function")
    for x in DIMENSIONS
]


@pytest.mark.parametrize(("kind", "sizes"), JOINTS)
def test_symbolic_joint(kind, sizes):
    p = losses.problem(dtype=np.float32)
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    arrays = draw(6, 9), draw(4, 7, 6), draw(4, 5, 6), *p[1:]
    b, t, u = names(*sizes)
    given = (6, 9), (b, t, 6), (b, u + 1, 6), (b, u), (b,), (b,)

    def f(weight, encoder, predictor, *rest):
        function = lambda e, p: jax.numpy.tanh(e + p) @ weight
        joint = jax_rnnt.LinearJoint(weight) if kind == "linear" else function
        return jax_rnnt.RNNTLoss()(jax_rnnt.JointLogits(joint, encoder, predictor), *rest)

    symbolic = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(given, arrays)]
    check_symbolic(jax.value_and_grad(f, argnums=(0, 1, 2)), symbolic, arrays)


@pytest.mark.parametrize("search", ["greedy", "beam"])
@pytest.mark.parametrize("kind", ["StatelessPredictor", "LSTMPredictor"])
@pytest.mark.parametrize("sizes", [("b", 7), ("b", "t")], ids=["b", "bt"])
@pytest.mark.rare("b-greedy", "b-StatelessPredictor", "bt-LSTMPredictor-greedy", "bt-StatelessPredictor-beam")
def test_symbolic_search(search, kind, sizes):
    nnx = pytest.importorskip("flax.nnx")
    from jax_rnnt import decode
    from jax_rnnt.flax import nnx as modules

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        predictor = getattr(modules, kind)(5, 6, rngs=nnx.Rngs(0))
        joint = modules.Joint(4, 6, 6, 5, rngs=nnx.Rngs(1))
        options = {"max_labels": 5, "max_symbols": 2} | ({"width": 3} if search == "beam" else {})
        b, t = names(*sizes)

        def f(encoder, lengths, targets):
            networks = joint.decoder_inputs(predictor, encoder)
            return getattr(decode, search)(jax_rnnt.TDTLoss((0, 2)), *networks, lengths, **options)[:6], predictor(
                targets
            )

        joint = modules.Joint(4, 6, 6, 7, rngs=nnx.Rngs(1))
        encoder = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
        arrays = encoder, np.array([7, 5, 0], np.int32), np.ones((3, 2), np.int32)
        symbolic = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(((b, t, 4), (b,), (b, 2)), arrays)]
        check_symbolic(f, symbolic, arrays)
