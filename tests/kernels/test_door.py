"""Does the door give what JAX gives, bit for bit? Does it see what a kernel must not do?"""

import ctypes

import jax
import numpy as np
import pytest

import batches
import compare
import door
import family
from jax_rnnt.emissions import Softmax
from jax_rnnt.emissions._emission import Nodes

LATTICE = "jax_rnnt_lattice_loss"


@pytest.fixture(autouse=True)
def there(native_kernel):
    if not door.native():
        pytest.skip("the door leads to the kernels of the CPU platform")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", door.LOSSES, ids=str)
def test_bits_of_jax(loss, dtype):
    """Value and gradient of one program without options."""
    p = batches.poisoned(batches.problem(loss=loss, dtype=dtype))

    @jax.jit
    def run(p):
        def total(logits):
            values = loss(logits, *p[1:], reduction="none", implementation="kernel")
            return values.sum(), values

        gradient, values = jax.grad(total, has_aux=True)(p.logits)
        return values, gradient

    compare.assert_same_bits(run(p), door.evaluate(loss, p))


def test_clamp_and_scale_of_jax():
    """The cotangent of the loss is the scale."""
    p, scale = batches.problem(dtype="float32"), np.array([2, 0.5, -1, 1e-3], np.float32)
    loss = family.RNNT.value(reduction="none", implementation="kernel", clamp=0.125)
    values, pull = jax.vjp(lambda x: loss(x, *p[1:]), p.logits)
    compare.assert_same_bits((values, pull(scale)[0]), door.evaluate(family.RNNT, p, clamp=0.125, scale=scale))


def lattice_call(num_frames=2, dtype=np.float32, **options):
    arcs, lengths = np.zeros((1, 2, 2), dtype), [np.array([n], np.int32) for n in (num_frames, 1)]
    attributes = {"dt": (1, 0), "du": (0, 1), "may_end": (1, 1), "plane": (0, 1), "other": (-1, -1)}
    terms = door.loading.WORKSPACES["cpu"](True, 2, False)
    results = [((1,), "float32"), *([((1, 4096), "float32")] if terms else [])]
    given = {"operands": [arcs, *lengths, arcs], "attributes": attributes, "results": results}
    return door.call(LATTICE, **given | options)


def test_errors():
    """In the words of the handler, whose message lives no longer than it."""
    for options, message in (
        ({"dtype": np.int32}, "arcs must be float32 or float64"),
        ({"attributes": {"dt": (1,), "du": (0,), "may_end": (1,), "plane": (0,), "other": (0,)}}, "no such plane"),
        ({"operands": [np.zeros((1, 2, 2), np.float32)]}, "lengths must be int32"),
        ({"attributes": {}}, "attributes"),
    ):
        with pytest.raises(RuntimeError, match=message):
            lattice_call(**options)
    assert not door._errors


def test_guards(monkeypatch):
    """A handler that writes beyond a result is found, as is one that leaves out an element."""

    def writing(offset):
        def handler(at):
            rets = door._Frame.from_address(at).rets
            first = door._Buffer.from_address(ctypes.c_void_p.from_address(rets.buffers).value)
            ctypes.c_float.from_address(first.data + offset).value = 0

        monkeypatch.setattr(door, "_handler", lambda target: handler)

    for offset in (4, -4):
        writing(offset)
        with pytest.raises(AssertionError, match="outside"):
            lattice_call()
    writing(0)
    assert lattice_call()[0] == 0
    monkeypatch.setattr(door, "_handler", lambda target: lambda at: None)
    assert np.isnan(lattice_call()[0])


@pytest.mark.skipif(not door.FLUSH, reason="how to flush subnormals is not known here")
def test_subnormals_are_flushed():
    """As on XLA's threads; here they are not."""
    small = np.full((1, 1, 1, 2), 1e-40, np.float32)
    label, frames = np.zeros((1, 1, 1), np.int32), np.ones(1, np.int32)
    with door.opened():
        planes, _ = Softmax((1,), normalize=False).forward(small, Nodes(label, frames))
    log_blank, log_label = planes["blank"], planes["label"]
    assert log_blank == 0 and log_label == 0
    assert (small * np.float32(1) > 0).all()


def test_losses_with_steps_have_no_door():
    assert {family.RNNT, family.MONOTONIC, family.MULTIBLANK, family.TDT, family.HAT} <= {*door.LOSSES}
    assert not {family.FINAL_BLANK, family.CONSTRAINED, *family.SKIPPING} & {*door.LOSSES}
    assert door.parts(family.TDT, 9, sigma=0.1) is None
