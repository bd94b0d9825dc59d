"""Short runs of the fuzzers, and what they found."""

import jax
import numpy as np
import pytest

import losses

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


def lattice_loss(operands=(PLANE, LENGTHS, LENGTHS, PLANE), results=(LOSS,), **options):
    return call("lattice_loss", operands, results, **{k: np.array(v, S64) for k, v in (ARCS | options).items()})


@pytest.fixture
def handlers(kernel):
    if losses.platform() != "cpu" or losses.emulated() or losses.interpreted():
        pytest.skip("calls the handlers of the CPU kernels")


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
    loss, _ = lattice_loss(results=results, dt=[2**31 - 1, 1])
    np.testing.assert_array_equal(loss, 0)  # no frames, no labels


@pytest.mark.parametrize("skips", [False, True])
def test_many_columns_without_frames(handlers, skips):
    """Arrays of no bytes have any number of columns, and the lattice takes no scratch for them: terabytes once."""
    columns = 2**36
    plane, labels = ((2, 0, columns), F32), np.array([0, 2**31 - 1], S32)
    arcs = {k: np.array(v, S64) for k, v in (ARCS | ({"dt": [2, 1]} if skips else {})).items()}
    handler = jax.ffi.ffi_call("jax_rnnt_lattice_loss", [jax.ShapeDtypeStruct((2,), F32)])
    (loss,) = handler(np.zeros(*plane), np.zeros(2, S32), labels, np.zeros(*plane), **arcs)
    np.testing.assert_array_equal(loss, [0, np.inf])


# ------------------------------------------------------------------------------------------------------- the fuzzers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fuzz_properties", "fuzz_magnitudes"])
def test_random_problems(capsys, name):
    """`make fuzz` for a few programs, of a seed of their own."""
    fuzzer = pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fuzzer, "BATCHES", 2, raising=False)
        assert fuzzer.main(["--seed", "18", "--examples", "4"]) == 0, capsys.readouterr().out


BREAKS = {
    "loss is not finite": lambda p, a: a[0].__setitem__(0, np.nan),
    "loss below 0": lambda p, a: a[0].__setitem__(0, -1),
    "gradient of a softmax": lambda p, a: a[1].__setitem__((0, 0, 0, 0), 0.5),
    "gradient outside the lengths": lambda p, a: a[1].__setitem__((~losses.inside(p)).nonzero(), 1e-30),
    "posterior of label not in": lambda p, a: a[2][1].__setitem__((0, 0, 0), 1.5),
    "posteriors of a label": lambda p, a: a[2][1].__setitem__((slice(None), slice(None), 0), 0),
    "best path above": lambda p, a: a[3].score.__setitem__(0, 1),
    "frames outside": lambda p, a: a[3].frames.__setitem__((slice(None), 0), 99),
    "expected": lambda p, a: a[0].__setitem__(slice(None), a[0] * 1.001),
    "order of the batch": lambda p, a: a[0].__setitem__(0, a[0][0] * (1 + 1e-6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("text", BREAKS)
def test_the_fuzzer_finds(monkeypatch, text):
    """Each property fails for an answer that breaks it."""
    fuzzer = pytest.importorskip("fuzz_properties")
    draw, rng = fuzzer.Draw(losses.RNNT), np.random.default_rng(0)
    right = fuzzer.program(draw)

    def broken(p):
        answer = jax.tree.map(np.array, right(p))
        BREAKS[text](p, answer)
        return answer

    monkeypatch.setattr(fuzzer, "program", lambda d: broken)
    found = [x for number in range(2) for x in fuzzer.failures_of_batch(draw, rng, number, size=64)]
    assert any(text in x for x in found), found
