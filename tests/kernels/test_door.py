"""Does the door give what JAX gives, bit for bit? Does it see what a kernel must not do?

And are calls of the CPU kernels' handlers that fuzzers found taken, or refused in words?
"""

import ctypes
import functools

import jax
import numpy as np
import pytest

import batches
import compare
import door
import family
import platforms
from jax_rnnt._xla import loading
from jax_rnnt.emissions import Softmax
from jax_rnnt.emissions._emission import Nodes

B, T, U1, V = 2, 3, 4, 5
F32, S32 = "float32", "int32"
NODES = (B, T, U1)


@pytest.fixture(autouse=True)
def there(native_kernel):
    if not door.native():
        pytest.skip("the door leads to the kernels of the CPU platform")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", door.LOSSES, ids=str)
def test_bits_of_jax(loss, dtype):
    """Value and gradient of one program without options."""
    p = batches.poisoned(batches.problem(loss=loss, dtype=dtype))
    value = loss.value(reduction="none", implementation="kernel")
    compare.assert_same_bits(jax.jit(compare.with_gradient(value))(*p), door.evaluate(loss, p))


def test_clamp_and_scale_of_jax():
    """The cotangent of the loss is the scale."""
    p, scale = batches.problem(dtype="float32"), np.array([2, 0.5, -1, 1e-3], np.float32)
    loss = family.RNNT.value(reduction="none", implementation="kernel", clamp=0.125)
    values, pull = jax.vjp(lambda x: loss(x, *p[1:]), p.logits)
    compare.assert_same_bits((values, pull(scale)[0]), door.evaluate(family.RNNT, p, clamp=0.125, scale=scale))


def test_guards(monkeypatch):
    """A handler that writes beyond a result is found, as is one that leaves out an element."""

    def writing(offset):
        def handler(at):
            rets = door._Frame.from_address(at).rets
            first = door._Buffer.from_address(ctypes.c_void_p.from_address(rets.buffers).value)
            ctypes.c_float.from_address(first.data + offset).value = 0

        monkeypatch.setattr(door, "_handler", lambda target: handler)

    for offset in (4 * B, -4):
        writing(offset)
        with pytest.raises(AssertionError, match="outside"):
            lattice_loss()
    writing(0)
    assert np.isnan(lattice_loss()[0]).tolist() == [False, True]


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


# --------------------------------------------------------------------------------------------------------- handlers
EMISSION = {"blanks": (4,), "normalize": 1, "durations": 0, "bernoulli": 0}
ARCS = {"dt": (1, 0), "du": (0, 1), "may_end": (1, 1), "plane": (0, 1), "other": (-1, -1)}
LOGITS, LABEL, LENGTHS, PLANE = ((*NODES, V), F32), ((B, 1, U1), S32), ((B,), S32), (NODES, F32)
SCALE, LOSS, SMALL = ((B,), F32), ((B,), F32), ((B, T, U1 - 1), F32)
SPACE = [((B, 4096), F32)] if door.native() and loading.WORKSPACES["cpu"](True, 2, False) else []


def call(target, operands, results, attributes):
    """A custom call as a program from elsewhere might hold it, by shapes and types."""
    given = [x if isinstance(x, np.ndarray) else np.zeros(*x) for x in operands]
    return door.call(f"jax_rnnt_{target}", given, attributes, results)


def emission_fwd(operands=(LOGITS, LABEL, LENGTHS), results=(PLANE,) * 3, **options):
    return call("softmax_emission_fwd", operands, results, EMISSION | options)


def emission_bwd(operands=(LOGITS, LABEL, LENGTHS, PLANE, SCALE, SCALE, PLANE, PLANE), results=(LOGITS,), **options):
    return call("softmax_emission_bwd", operands, results, EMISSION | options)


WITH_TOTAL = (*emission_bwd.__defaults__[0], PLANE)


def lattice_loss(operands=(PLANE, LENGTHS, LENGTHS, PLANE), results=(LOSS, *SPACE), **options):
    return call("lattice_loss", operands, results, ARCS | options)


@pytest.fixture
def handlers():
    if platforms.emulated():
        pytest.skip("calls the handlers of the CPU kernels")


def test_handlers_take_what_fits(handlers):
    assert len(emission_fwd()) == 3 and len(emission_bwd()) == 1 and len(lattice_loss()) == 1
    assert len(emission_bwd(WITH_TOTAL)) == 1


def replaced(function, index, operand):
    operands = list(function.__defaults__[0])
    operands[index] = operand
    return tuple(operands)


REFUSED = [
    # Each of these read or wrote beyond a buffer.
    (emission_fwd, {"results": (PLANE, SMALL, PLANE)}, r"planes must be \[..., T, U1\]"),
    (emission_fwd, {"results": (PLANE, PLANE, (NODES, "float16"))}, r"planes must be .* float32"),
    (emission_fwd, {"operands": (LOGITS, ((1, 1, U1), S32), LENGTHS)}, "label and num_frames must have the same"),
    (emission_bwd, {"operands": replaced(emission_bwd, 3, SMALL)}, r"planes must be \[..., T, U1\]"),
    (emission_bwd, {"operands": replaced(emission_bwd, 4, ((1,), F32))}, r"scale and clamp \[...\]"),
    (emission_bwd, {"operands": replaced(emission_bwd, 5, ((B,), "float16"))}, r"scale and clamp \[...\]"),
    (emission_bwd, {"operands": replaced(emission_bwd, 7, SMALL)}, r"planes must be \[..., T, U1\]"),
    (emission_bwd, {"results": (((*NODES, V - 1), F32),)}, "dlogits like logits"),
    (emission_bwd, {"operands": (*WITH_TOTAL, PLANE)}, "one plane more or none: the total"),
    (emission_bwd, {"operands": WITH_TOTAL, "bernoulli": 1}, "without a Bernoulli blank, one plane more"),
    (lattice_loss, {"operands": replaced(lattice_loss, 2, ((1,), S32))}, "must have the same batch dimensions"),
    (lattice_loss, {"results": (((1,), F32),)}, r"the loss \[...\] their type"),
    (lattice_loss, {"operands": (((B, T, 0), F32), LENGTHS, LENGTHS, ((B, T, 0), F32))}, "U1 >= 1"),
    # These overflowed.
    (emission_fwd, {"durations": -(2**63)}, "durations must be between 0 and 63"),
    (lattice_loss, {"dt": (2**63 - 1, 0), "du": (1, 1)}, "every arc must move"),
    (lattice_loss, {"dt": (2**40, 0)}, "every arc must move"),
    # What no program has.
    (lattice_loss, {"operands": replaced(lattice_loss, 0, (NODES, S32))}, "arcs must be float32 or float64"),
    (lattice_loss, {"plane": (0, 2)}, "no such plane"),
    (lattice_loss, {"operands": (PLANE,)}, "lengths must be int32"),
    (functools.partial(call, "lattice_loss", *lattice_loss.__defaults__), {"attributes": {}}, "attributes"),
]


@pytest.mark.parametrize(("function", "changes", "message"), REFUSED)
def test_handlers_refuse(handlers, function, changes, message):
    """In the words of the handler, whose message lives no longer than it."""
    with pytest.raises(RuntimeError, match=message):
        function(**changes)
    assert not door._errors


def test_arcs_longer_than_any_sequence(handlers):
    """No path takes them, and the lattice takes no memory for them: 2^31 rows once."""
    loss, _ = lattice_loss(results=(LOSS, ((B, 2 * T * (U1 + 32) + 64 * T), F32)), dt=(2**31 - 1, 1))
    np.testing.assert_array_equal(loss, 0)  # no frames, no labels


@pytest.mark.parametrize("skips", [False, True])
def test_many_columns_without_frames(handlers, skips):
    """Arrays of no bytes have any number of columns, and the lattice takes no scratch for them: terabytes once."""
    plane, labels = ((2, 0, 2**36), F32), np.array([0, 2**31 - 1], S32)
    (loss,) = lattice_loss((plane, LENGTHS, labels, plane), **({"dt": (2, 1)} if skips else {}))
    np.testing.assert_array_equal(loss, [0, np.inf])
