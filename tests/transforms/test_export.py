"""Can a training step be exported, stored, and run elsewhere, with the library's types as arguments and results?

Every loss for arrays of any size: test_promises.py.
"""

import warnings

import jax
import numpy as np
import pytest
from jax import export

import batches
import compare
import decoding
import family
import jax_rnnt
import platforms
from jax_rnnt import BandLogits, JointLogits, LinearJoint, PackedLogits, RNNTLoss, TDTLoss, decode, metrics
from jax_rnnt._xla import loading, primitive

pytestmark = pytest.mark.no_kernel


def step(loss=family.RNNT, **options):
    return jax.jit(jax.value_and_grad(loss.value(**options).__call__))


def exported(f, arguments, derivatives=0, **options):
    """After a round trip through bytes, with this many derivatives, and the text of the program."""
    pytest.importorskip("flatbuffers")
    made = export.export(jax.jit(f), disabled_checks=jax_rnnt.export_checks(), **options)(*arguments)
    return export.deserialize(made.serialize(derivatives)), made.mlir_module()


@family.implementations(family.RNNT, family.TDT)
def test_round_trip(loss, implementation):
    p = batches.problem(loss=loss, dtype=np.float32)
    restored, text = exported(step(loss, implementation=implementation, clamp=0.5), p)
    compare.assert_mean(restored.call(*p), loss.expected(p, clamp=0.5))
    calls = [f"custom_call @{target}" in text for target in loss.gradient_calls]
    assert all(calls) if implementation == "kernel" and not platforms.interpreted() else not any(calls)


def test_without_the_checks(native_kernel):
    """Fails without `export_checks`. If JAX ever gives the guarantee, the helper may go."""
    p = batches.problem(dtype=np.float32)
    with pytest.raises(ValueError, match="custom call"):
        export.export(step(implementation=native_kernel))(*p)
    checks = str(jax_rnnt.export_checks())
    assert all(target in checks for target in family.RNNT.value_calls + family.RNNT.gradient_calls)


@pytest.mark.parametrize("names", [("cpu", "cuda"), ("tpu",), ("cpu", "cuda", "tpu", "rocm")], ids="+".join)
def test_platforms(names):
    """One program for several platforms: kernels where there are some, the reference elsewhere."""
    p = batches.problem(dtype=np.float32)
    primitive._warn.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        restored, text = exported(step(), p, platforms=names)
    said = " ".join(str(x.message) for x in seen)
    assert not any(f"no kernels for platform {name}" in said for name in (*loading.KERNELS, "tpu")), said
    assert restored.platforms == names
    if platforms.platform() in names:
        compare.assert_mean(restored.call(*p), family.RNNT.expected(p))
    assert names != ("tpu",) or "custom_call @jax_rnnt" not in text


def test_vmapped_and_differentiated(kernel):
    """A program of vmap; a file that keeps a derivative."""
    p = batches.problem(dtype=np.float32)
    each = RNNTLoss(reduction="none", implementation=kernel)
    got = exported(jax.vmap(jax.value_and_grad(each.__call__)), p)[0].call(*p)
    compare.assert_matches(got, family.RNNT.expected(p), np.float32, 11)
    restored, _ = exported(RNNTLoss(implementation=kernel), p, 1)
    compare.assert_mean(jax.value_and_grad(restored.call)(*map(jax.numpy.asarray, p)), family.RNNT.expected(p))


def names(*dimensions):
    """Symbolic shapes of these names; a number stays one."""
    symbols = iter(export.symbolic_shape(",".join(x for x in dimensions if isinstance(x, str))))
    return [next(symbols) if isinstance(x, str) else x for x in dimensions]


def like(shapes, arrays):
    return [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, arrays, strict=True)]


def check_symbolic(f, shapes, arrays):
    """The program for symbolic shapes gives what the one for these shapes gives."""
    found = exported(f, like(shapes, arrays))[0].call(*arrays)
    compare.assert_close(found, jax.jit(f)(*arrays), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "sizes"), [("linear", ("b", 7, 4)), family.slow("function", ("b", "t", "u"))])
def test_symbolic_joint(kind, sizes):
    p = batches.problem(dtype=np.float32)
    rng = np.random.default_rng(0)
    arrays = *(rng.normal(size=shape).astype(np.float32) for shape in ((6, 9), (4, 7, 6), (4, 5, 6))), *p[1:]
    b, t, u = names(*sizes)

    def f(weight, encoder, predictor, *rest):
        function = lambda e, p: jax.numpy.tanh(e + p) @ weight
        joint = LinearJoint(weight) if kind == "linear" else function
        return RNNTLoss()(JointLogits(joint, encoder, predictor), *rest)

    shapes = (6, 9), (b, t, 6), (b, u + 1, 6), (b, u), (b,), (b,)
    check_symbolic(jax.value_and_grad(f, argnums=(0, 1, 2)), shapes, arrays)


@pytest.mark.slow
def test_symbolic_rows_and_posteriors():
    """Packed rows of any number; a derivative of the lattice's kernel, whose operands are integers, too."""
    p = batches.problem(dtype=np.float32)
    b, t, u, n = names("b", "t", "u", "n")
    rest = (b, u), (b,), (b,)
    packed = lambda rows, *rest: RNNTLoss()(PackedLogits(rows), *rest)
    check_symbolic(jax.grad(packed), [(n, 9), *rest], (batches.packed(p, p.logits, fill=0), *p[1:]))
    exported(jax.grad(RNNTLoss().latency), like([(b, t, u + 1, 9), *rest], p))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "kind"),
    [("greedy", "StatelessPredictor"), ("beam", "LSTMPredictor")],
)
def test_symbolic_search(search, kind, flax_promotion):
    nnx = pytest.importorskip("flax.nnx")
    from jax_rnnt.flax import nnx as modules

    predictor = getattr(modules, kind)(5, 6, rngs=nnx.Rngs(0))
    joint = modules.Joint(4, 6, 6, 7, rngs=nnx.Rngs(1))
    options = {"max_symbols": 2} | ({"width": 3} if search == "beam" else {})
    b, t, u = names("b", "t", "u")

    def f(encoder, lengths, targets):
        networks = joint.decoder_inputs(predictor, encoder)
        found = decoding.found(search, TDTLoss((0, 2)), *networks, lengths, 5, **options)
        return found[:-1], predictor(targets)

    encoder = np.random.default_rng(0).normal(size=(3, 7, 4)).astype(np.float32)
    arrays = encoder, np.array([7, 5, 0], np.int32), np.ones((3, 2), np.int32)
    check_symbolic(f, ((b, t, 4), (b,), (b, u)), arrays)


RESULTS = jax_rnnt.Alignment, decode.Hypotheses, decode.FoundPhrase, metrics.LabelErrors
TYPES = [result(*np.arange(1.0 * len(result._fields))) for result in RESULTS]
TYPES += [TDTLoss((0, 2)), RNNTLoss(reduction="none")]
TYPES += [BandLogits(np.zeros((2, 3, 2, 4)), np.zeros((2, 3), np.int32))]


@pytest.mark.parametrize("x", TYPES, ids=lambda x: type(x).__name__)
def test_types(x):
    """A program takes and returns results, losses and arrays of logits, also from a file."""
    found = exported(lambda x: jax.tree.map(lambda leaf: leaf + leaf, x), [x])[0].call(x)
    assert type(found) is type(x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * np.asarray(b)), found, x)


def test_a_function_cannot_be_stored():
    logits = JointLogits(LinearJoint(np.zeros((4, 6))), np.zeros((5, 4)), np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"JointLogits|LinearJoint"):
        exported(lambda x: jax.tree.leaves(x)[0], [logits])
