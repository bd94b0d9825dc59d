"""Calls of the CPU kernels' handlers that fuzzers found: each is taken, or refused in words."""

import jax
import numpy as np
import pytest

import platforms

pytestmark = pytest.mark.no_kernel
B, T, U1, V = 2, 3, 4, 5
F32, S32, S64 = np.float32, np.int32, np.int64
NODES = (B, T, U1)


def call(target, operands, results, **attributes):
    """A custom call as a program from elsewhere might hold it, by shapes and types."""
    given = [np.zeros(shape, dtype) for shape, dtype in operands]
    wanted = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax.block_until_ready(jax.ffi.ffi_call(f"jax_rnnt_{target}", wanted)(*given, **attributes))


EMISSION = {"blanks": np.array([4], S64), "normalize": S64(1), "durations": S64(0), "bernoulli": S64(0)}
ARCS = {"dt": [1, 0], "du": [0, 1], "may_end": [1, 1], "plane": [0, 1], "other": [-1, -1]}
LOGITS, LABEL, LENGTHS, PLANE = ((*NODES, V), F32), ((B, 1, U1), S32), ((B,), S32), (NODES, F32)
SCALE, LOSS, SMALL = ((B,), F32), ((B,), F32), ((B, T, U1 - 1), F32)


def emission_fwd(operands=(LOGITS, LABEL, LENGTHS), results=(PLANE,) * 3, **options):
    return call("softmax_emission_fwd", operands, results, **EMISSION | options)


def emission_bwd(operands=(LOGITS, LABEL, LENGTHS, PLANE, SCALE, SCALE, PLANE, PLANE), results=(LOGITS,), **options):
    return call("softmax_emission_bwd", operands, results, **EMISSION | options)


WITH_TOTAL = (*emission_bwd.__defaults__[0], PLANE)


def lattice_loss(operands=(PLANE, LENGTHS, LENGTHS, PLANE), results=(LOSS,), **options):
    return call("lattice_loss", operands, results, **{k: np.array(v, S64) for k, v in (ARCS | options).items()})


@pytest.fixture
def handlers(kernel):
    if platforms.platform() != "cpu" or platforms.emulated() or platforms.interpreted():
        pytest.skip("calls the handlers of the CPU kernels")


def test_handlers_take_what_fits(handlers):
    assert len(emission_fwd()) == 3 and len(emission_bwd()) == 1 and len(lattice_loss()) == 1
    assert len(emission_bwd(WITH_TOTAL)) == 1


def replaced(function, index, operand):
    operands = list(function.__defaults__[0])
    operands[index] = operand
    return tuple(operands)


@pytest.mark.parametrize(
    ("function", "changes", "message"),
    [
        # Each of these read or wrote beyond a buffer.
        (emission_fwd, {"results": (PLANE, SMALL, PLANE)}, r"planes must be \[..., T, U1\]"),
        (emission_fwd, {"results": (PLANE, PLANE, (NODES, np.float16))}, r"planes must be .* float32"),
        (emission_fwd, {"operands": (LOGITS, ((1, 1, U1), S32), LENGTHS)}, "label and num_frames must have the same"),
        (emission_bwd, {"operands": replaced(emission_bwd, 3, SMALL)}, r"planes must be \[..., T, U1\]"),
        (emission_bwd, {"operands": replaced(emission_bwd, 4, ((1,), F32))}, r"scale and clamp \[...\]"),
        (emission_bwd, {"operands": replaced(emission_bwd, 5, ((B,), np.float16))}, r"scale and clamp \[...\]"),
        (emission_bwd, {"operands": replaced(emission_bwd, 7, SMALL)}, r"planes must be \[..., T, U1\]"),
        (emission_bwd, {"results": (((*NODES, V - 1), F32),)}, "dlogits like logits"),
        (emission_bwd, {"operands": (*WITH_TOTAL, PLANE)}, "one plane more or none: the total"),
        (emission_bwd, {"operands": WITH_TOTAL, "bernoulli": S64(1)}, "without a Bernoulli blank, one plane more"),
        (lattice_loss, {"operands": replaced(lattice_loss, 2, ((1,), S32))}, "must have the same batch dimensions"),
        (lattice_loss, {"results": (((1,), F32),)}, r"loss must be \[...\]"),
        (lattice_loss, {"operands": (((B, T, 0), F32), LENGTHS, LENGTHS, ((B, T, 0), F32))}, "U1 >= 1"),
        # These overflowed.
        (emission_fwd, {"durations": S64(-(2**63))}, "durations must be between 0 and 63"),
        (lattice_loss, {"dt": [2**63 - 1, 0], "du": [1, 1]}, "every arc must move"),
        (lattice_loss, {"dt": [2**40, 0]}, "every arc must move"),
    ],
)
def test_handlers_refuse(handlers, function, changes, message):
    with pytest.raises(Exception, match=message):  # its type depends on the version of jax
        function(**changes)


def test_arcs_longer_than_any_sequence(handlers):
    """No path takes them, and the lattice takes no memory for them: 2^31 rows once."""
    results = (LOSS, ((B, 2 * T * (U1 + 32) + 64 * T), F32))
    (loss, _) = call(
        "lattice_loss", [PLANE, ((B,), S32), ((B,), S32), PLANE], results,
        **{k: np.array(v, S64) for k, v in (ARCS | {"dt": [2**31 - 1, 1]}).items()},
    )  # fmt: skip
    np.testing.assert_array_equal(loss, 0)  # no frames, no labels


@pytest.mark.parametrize("skips", [False, True])
def test_many_columns_without_frames(handlers, skips):
    """Arrays of no bytes have any number of columns, and the lattice takes no scratch for them: terabytes once."""
    columns = 2**36
    plane, labels = ((2, 0, columns), F32), np.array([0, 2**31 - 1], S32)
    arcs = ARCS | ({"dt": [2, 1]} if skips else {})
    (loss,) = jax.ffi.ffi_call("jax_rnnt_lattice_loss", [jax.ShapeDtypeStruct((2,), F32)])(
        np.zeros(*plane), np.zeros(2, S32), labels, np.zeros(*plane), **{k: np.array(v, S64) for k, v in arcs.items()}
    )
    np.testing.assert_array_equal(loss, [0, np.inf])
