"""Is `lattices.log_likelihood` right for every topology, and differentiable any number of times, in both modes?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compare
import door
import family
import reference_numpy as truth
import topologies
from jax_rnnt import emissions, lattices
from jax_rnnt.lattices import _lattice as lattice
from topologies import TOPOLOGIES, T, U, arcs_of

ALL = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)


@functools.cache
def compiled(topology, implementation):
    """(value alone, value, posteriors)"""

    def run(arcs, *lengths):
        call = lambda arcs: lattices.log_likelihood(topology, arcs, *lengths, implementation)
        values, pull = jax.vjp(call, arcs)
        alone = call(arcs) if implementation == "kernel" else values  # of which the kernels have another one
        return alone, values, pull(jnp.ones_like(values))[0]

    return jax.jit(run)


def by_kernel(topology, arcs, *lengths, target=None, threads=0):
    """The same through the door."""
    with door.opened(threads), door.using(target):
        alone = lattice.value(topology, arcs, *lengths)
        values, gradients = lattice.value_and_grad(topology, arcs, *lengths)
    return -np.asarray(alone), -np.asarray(values), {slot: -np.asarray(x) for slot, x in gradients.items()}


def answers(topology, implementation):
    """Functions of (arcs, lengths): the kernel on every instruction set, or the reference."""
    if implementation == "reference":
        return [compiled(topology, implementation)]
    return [functools.partial(by_kernel, topology, target=target) for target in door.TARGETS]


def check(topology, arcs, frames, labels, implementation, limits):
    topologies.check(topology, arcs, frames, labels, answers(topology[0], implementation), limits)


def forbid(arcs, share, seed=0):
    rng = np.random.default_rng(seed)
    return {slot: np.where(rng.random(x.shape) < share, -np.inf, x).astype(x.dtype) for slot, x in arcs.items()}


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((x, "kernel") for x in TOPOLOGIES), ("standard", "reference"), ("durations_unordered_without_1", "reference")],
    indirect=["implementation"],
)
def test_every_length(name, implementation):
    """Every (T, U) up to (9, 9) in one padded batch; no path gives -inf, gradient 0."""
    topology = TOPOLOGIES[name]
    every = np.array(truth.every_length(9, 9)).T
    for share in (0, 0.3) if implementation == "kernel" else (0.3,):
        arcs = forbid(arcs_of(topology[1], (every.shape[1], 9, 10)), share)
        check(topology, arcs, *every, implementation, {np.float64: 1e-13})


SIZES = (17, 16), (33, 5), (40, 40), (70, 65), (8, 8), (64, 7), (1, 33), (40, 1), (21, 64)


@ALL
def test_sizes(topology, kernel):
    """Sizes around strips of frames and vectors of columns; a quarter of the arcs are forbidden."""
    for frames, labels in (*SIZES, *((7 + i // 3, i) for i in range(36)), *((i, 3 + i % 3) for i in range(1, 36, 2))):
        arcs = forbid(arcs_of(topology[1], (2, frames, labels + 1), dtype=np.float32, seed=frames), 0.25)
        lengths = [frames, max(frames - frames % 4, 0)], [labels, labels // 2]
        check(topology, arcs, *lengths, kernel, {np.float32: 1e-5, np.float64: 1e-12})


@pytest.mark.slow
def test_program_size_does_not_depend_on_the_lattice():
    """The program is a loop; unrolled steps would make compile time grow with the utterance."""
    topology = TOPOLOGIES["durations"]

    def size(frames, labels):
        shapes = {a.slot: jax.ShapeDtypeStruct((2, frames, labels + 1), jnp.float32) for a in topology[0]}
        lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
        call = lambda arcs, n, m: lattices.log_likelihood(topology[0], arcs, n, m, "reference").sum()
        return len(jax.jit(jax.grad(call)).lower(shapes, lengths, lengths).as_text().splitlines())

    assert size(400, 100) <= 1.1 * size(100, 100)
    assert size(100, 400) <= 1.2 * size(100, 100)  # scans over u may take log2(U) steps


@pytest.mark.parametrize(("dtype", "batch"), [("float16", ()), ("bfloat16", (2, 3)), ("float32", (2, 1, 2))], ids=str)
def test_dtypes_and_batch_dimensions(dtype, batch):
    topology = TOPOLOGIES["durations"]
    arcs = {slot: jnp.asarray(x, dtype) for slot, x in arcs_of(topology[1], (*batch, T, U + 1)).items()}
    value = lattices.log_likelihood(topology[0], arcs, np.full(batch, T, np.int32), np.full(batch, U - 1, np.int32))
    assert value.dtype == np.float32 and value.shape == batch
    for index in np.ndindex(batch):
        own = {slot: np.asarray(x[index], np.float64) for slot, x in arcs.items()}
        np.testing.assert_allclose(value[index], truth.log_likelihood(topology[1], own, T, U - 1), 1e-6, 1e-6)


def test_lengths_out_of_range(implementation):
    """NaN for their own sequence, with a zero gradient."""
    arcs = arcs_of(truth.STANDARD, (5, T, U + 1))
    frames, labels = np.array([T, T + 1, -1, T, T]), np.array([U, U, U, U + 1, -1])
    call = lambda arcs: lattices.log_likelihood(lattices.STANDARD, arcs, frames, labels, implementation)
    values, pull = jax.vjp(call, arcs)
    np.testing.assert_array_equal(np.isnan(values), [False, True, True, True, True])
    for (slot, g), count in zip(sorted(pull(jnp.ones(5))[0].items()), (T, U)):  # of blanks and labels on every path
        np.testing.assert_allclose(g[0].sum(), count, err_msg=slot)
        assert not np.any(g[1:])
    if implementation == "kernel":  # no label leaves the last column: its arc may have any tangent
        tangents = {slot: np.ones_like(x) for slot, x in arcs.items()}
        tangents["label"][..., -1] = np.nan
        np.testing.assert_allclose(jax.jvp(call, (arcs,), (tangents,))[1][0], T + U)


def test_errors():
    arcs = arcs_of(truth.STANDARD, (T, U + 1))
    given = {"topology": lattices.STANDARD, "arc_log_probs": arcs, "num_frames": T, "num_labels": U}
    for changes, message in (
        ({"arc_log_probs": {"blank": arcs["blank"]}}, r"missing: \['label'\]"),
        ({"arc_log_probs": arcs | {"label": arcs["label"][:, :2]}}, "one shape"),
        ({"arc_log_probs": {slot: np.zeros((2, T, 0)) for slot in arcs}}, "U1 >= 1"),
        (
            {"arc_log_probs": arcs | {"label": arcs["label"].astype(int)}},
            r"arc_log_probs\['label'\] must have one of the dtypes",
        ),
        ({"num_frames": np.array([T])}, "num_frames must have shape"),
        ({"num_labels": 1.0}, "num_labels must have an integer dtype"),
        ({"implementation": "fast"}, "implementation must be"),
        ({"topology": ()}, "topology must hold one Arc"),
        ({"topology": "standard"}, "topology must be a tuple of Arc"),
        ({"arc_log_probs": arcs["blank"]}, "arc_log_probs must be a dict"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"log_likelihood: .*{message}"):
            lattices.log_likelihood(**given | changes)
    for dt, du in ((0, 0), (-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=f"dt={dt} and du={du}"):
            lattices.Arc("blank", dt, du)
    for changes in ({"dt": True}, {"slot": 1}, {"other": 1}, {"may_end": 1}):
        ((name, value),) = changes.items()
        with pytest.raises(TypeError, match=f"Arc: .*{name}.* got .*{value}"):
            lattices.Arc(**{"slot": "blank", "dt": 1, "du": 0} | changes)
    for table, name in (
        (lattices.token_and_duration, "durations"),
        (lattices.products, "durations"),
        (lattices.multi_blank, "big_blank_durations"),
    ):
        for value in (None, (), (2, 2), {2, 3}, (True,), (-1,), 3):
            with pytest.raises((TypeError, ValueError), match=f"{table.__name__}: {name} must be"):
                table(value)
    for name, value in (("blanks", (1.5,)), ("normalize", 1), ("bernoulli", None), ("num_durations", 1.0)):
        with pytest.raises(TypeError, match=f"Softmax: {name} must be .*got"):
            emissions.Softmax(**{"blanks": (0,)} | {name: value})


@family.reference_slow
@pytest.mark.parametrize(
    "table", [lattices.STANDARD, lattices.token_and_duration((0, 1, 2))], ids=["standard", "durations"]
)
def test_bad_arcs(table, implementation):
    """NaN or +inf of one arc is NaN, beside arcs of any size; other sequences stay."""
    arcs = {arc.slot: np.full((5, 4, 3), -1.0, np.float32) for arc in table}
    bad = arcs[table[0].slot]
    bad[:4, 1, 1], bad[2:4, 0, 0] = [np.inf, np.nan, np.inf, np.nan], -1e6
    for answer in answers(table, implementation):
        _, values, posteriors = answer(arcs, np.full(5, 4, np.int32), np.full(5, 2, np.int32))
        assert np.isnan(values).tolist() == [True] * 4 + [False]
        assert np.isfinite(np.stack([x[4] for x in posteriors.values()])).all()


def test_expanded_topologies():
    """A slot for each sum of two planes, also where arcs share slot and frames."""
    assert lattices._topology.expanded(lattices.products((2, 0))) == lattices.token_and_duration((2, 0))
    arcs = tuple(lattices.Arc("label", 1, 1, other=other) for other in ("slow", "fast"))
    slots = [arc.slot for arc in lattices._topology.expanded((*lattices.STANDARD, *arcs))]
    assert len(set(slots)) == len(slots) and all(slot.startswith("label") for slot in slots[1:])


SHIFTS = (-1e3, -1e4, -1e5, -(2.0**21), -3e6, -5e6, -1e9, -1e15, -1e30, 1e5)


@pytest.mark.parametrize("topology", [lattices.STANDARD, lattices.MONOTONIC], ids=["standard", "monotonic"])
def test_shifted_arcs(implementation, topology):
    """All paths have equal numbers of blanks and labels, so an offset of all blanks or labels moves only the loss.

    Arcs and shifts are multiples of the spacing of float32 at their sum; from 1e9 on the arcs are equal.
    """
    for frames, labels in ((70, 20), (300, 90)) if implementation == "kernel" else ((70, 20),):
        check_shifted_arcs(implementation, topology, frames, labels)


def check_shifted_arcs(implementation, topology, frames, labels):
    rng = np.random.default_rng(0)
    blanks = frames - (labels if topology == lattices.MONOTONIC else 0)
    plain = {slot: -rng.integers(0, 8, (frames, labels + 1)) / 2 for slot in ("blank", "label")}
    rows, moves = [], []  # each after the row that it moves
    for equal, shifts in ((False, [x for x in SHIFTS if abs(x) < 1e9]), (True, SHIFTS)):
        first = len(rows)
        rows.append({slot: 0 * x if equal else x for slot, x in plain.items()})
        for shift in shifts:
            for shifted, count in ((("blank",), blanks), (("label",), labels), (("blank", "label"), blanks + labels)):
                rows.append({slot: x + shift if slot in shifted else x for slot, x in rows[first].items()})
                moves.append((len(rows) - 1, first, count * float(np.float32(shift)), f"{shift:g} {shifted}"))
    arcs = {slot: np.stack([row[slot] for row in rows]).astype(np.float32) for slot in plain}
    lengths = np.full(len(rows), frames, np.int32), np.full(len(rows), labels, np.int32)
    for answer in answers(topology, implementation):
        _, values, posteriors = answer(arcs, *lengths)
        values = np.asarray(values, np.float64)
        for row, first, more, name in moves:
            np.testing.assert_allclose(values[row], values[first] + more, rtol=1e-5, atol=1e-3, err_msg=name)
            for slot, x in posteriors.items():
                np.testing.assert_allclose(x[row], x[first], atol=1e-5, err_msg=f"{name} {slot}")


@pytest.mark.slow
def test_second_derivative_with_forbidden_arcs_and_no_path(kernel):
    """The double `where` of a safe logaddexp must hold in the second derivative too, which is the reference's."""
    arcs = arcs_of(truth.STANDARD, (2, 3, 3), seed=7)
    arcs["label"][0, 1] = -np.inf
    arcs["blank"][1, 0], arcs["label"][1, 0] = -np.inf, -np.inf
    lengths = np.full(2, 3, np.int32), np.full(2, 2, np.int32)

    def total(arcs, implementation=kernel):
        value = lattices.log_likelihood(lattices.STANDARD, arcs, *lengths, implementation)
        return jnp.where(jnp.isfinite(value), value, 0.0).sum()

    expected = jax.jit(jax.jacfwd(jax.grad(functools.partial(total, implementation="reference"))))(arcs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
    for second in (jax.jacfwd(jax.grad(total)), jax.jacrev(jax.grad(total))):
        compare.assert_close(jax.jit(second)(arcs), expected, 1e-12)
