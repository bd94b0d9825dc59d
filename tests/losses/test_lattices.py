"""Is `lattices.log_likelihood` right for every topology, and differentiable any number of times, in both modes?"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
import reference_numpy as truth
from jax_rnnt import lattices
from jax_rnnt.lattices import _lattice as lattice
from topologies import EVERY, SHAPE, TOPOLOGIES, T, U, arcs_of


@functools.cache
def compiled(topology, implementation):
    def run(arcs, num_frames, num_labels):
        value = lattices.log_likelihood(topology, arcs, num_frames, num_labels, implementation)
        return jnp.where(jnp.isfinite(value), value, 0.0).sum(), value

    return jax.jit(jax.grad(run, has_aux=True))


@pytest.fixture(params=TOPOLOGIES.values(), ids=TOPOLOGIES)
def topology(request):
    return request.param


# For what takes long: unit steps, and arcs that skip frames.
FEW = ("standard", "durations")


@pytest.fixture(
    params=[pytest.param(x, id=k, marks=[] if k in FEW else [pytest.mark.slow]) for k, x in TOPOLOGIES.items()]
)
def some_topology(request):
    return request.param


def test_arcs_are_the_same(topology):
    """A topology is data: the same arcs, in any order."""
    assert {(a.slot, a.dt, a.du, a.may_end) for a in topology[0]} == {
        (a.slot, a.dt, a.du, a.may_end) for a in topology[1]
    }


@pytest.mark.rare(
    "durations-reference", "multi_blank-reference", "monotonic-reference", "durations_without_0-reference"
)
def test_value_and_posteriors(topology, implementation):
    """Every (T, U) up to (5, 3) in one padded batch, against all paths; no path gives -inf, gradient 0."""
    arcs = arcs_of(topology[1])
    frames, labels = np.array(EVERY, np.int32).T
    gradient, value = compiled(topology[0], implementation)(arcs, frames, labels)
    for b, (n, m) in enumerate(EVERY):
        expected, posteriors = truth.enumerate_log_likelihood(topology[1], {k: x[b] for k, x in arcs.items()}, n, m)
        np.testing.assert_allclose(value[b], expected, rtol=1e-13, atol=1e-13, err_msg=f"T={n}, U={m}")
        for slot in arcs:
            np.testing.assert_allclose(gradient[slot][b], posteriors[slot], atol=1e-13, err_msg=f"T={n}, U={m}, {slot}")


def test_outside_the_lengths_is_never_read(topology, implementation):
    arcs = arcs_of(topology[1])
    frames, labels = np.array(EVERY, np.int32).T
    outside = np.arange(T)[:, None] >= frames[:, None, None]
    outside = outside | (np.arange(U + 1) > labels[:, None, None])
    run = compiled(topology[0], implementation)
    expected = run(arcs, frames, labels)
    for garbage in (np.nan, np.inf, -np.inf, 1e300):
        got = run({k: np.where(outside, garbage, x) for k, x in arcs.items()}, frames, labels)
        chex.assert_trees_all_equal(got, expected)
    for gradient in expected[0].values():
        assert not np.asarray(gradient)[outside].any()


def test_forbidden_arcs(topology, implementation):
    """-inf scores: gradient 0 there, never NaN, the rest as if the arc did not exist."""
    arcs = arcs_of(topology[1], seed=2)
    rng = np.random.default_rng(5)
    arcs = {k: np.where(rng.random(x.shape) < 0.3, -np.inf, x) for k, x in arcs.items()}
    frames, labels = np.array(EVERY, np.int32).T
    gradient, value = compiled(topology[0], implementation)(arcs, frames, labels)
    for b, (n, m) in enumerate(EVERY):
        expected, posteriors = truth.enumerate_log_likelihood(topology[1], {k: x[b] for k, x in arcs.items()}, n, m)
        np.testing.assert_allclose(value[b], expected, rtol=1e-13, atol=1e-13)
        for slot in arcs:
            np.testing.assert_allclose(gradient[slot][b], posteriors[slot], atol=1e-13)


@pytest.mark.rare(
    "durations_unordered_without_1-reference",
    "multi_blank-reference",
    "durations_without_0-reference",
    "monotonic-reference",
)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
def test_batch_dimensions(topology, batch, implementation):
    arcs = arcs_of(topology[1], (*batch, T, U + 1), seed=3)
    value = lattices.log_likelihood(
        topology[0], arcs, np.full(batch, T, np.int32), np.full(batch, U - 1, np.int32), implementation
    )
    assert value.shape == batch
    for index in np.ndindex(batch):
        expected = truth.log_likelihood(topology[1], {k: x[index] for k, x in arcs.items()}, T, U - 1)
        np.testing.assert_allclose(value[index], expected, rtol=1e-13)


ORDERS = {
    "forward over reverse": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("reverse over reverse", "forward over forward")]


@pytest.mark.rare("durations-reference", "standard-kernel")
@pytest.mark.parametrize("order", ["forward over reverse", *SLOW])
def test_derivatives_of_both_orders_and_modes(some_topology, implementation, order):
    """d log Z / ds_i = P(i) and d2 log Z / ds_i ds_j = P(i and j) - P(i) P(j), from the enumeration."""
    frames, labels = 4, 2
    arcs = arcs_of(some_topology[1], (frames, labels + 1), seed=6)
    slots, scores = list(arcs), np.stack(list(arcs.values()))
    paths = truth.enumerate_paths(some_topology[1], frames, labels)
    visits = np.zeros((len(paths), *scores.shape))
    for i, path in enumerate(paths):
        for slot, t, u in path:
            visits[i, slots.index(slot), t, u] = 1
    visits = visits.reshape(len(paths), -1)
    weights = np.exp(visits @ scores.ravel())
    weights /= weights.sum()
    mean = weights @ visits
    covariance = (visits * weights[:, None]).T @ visits - np.outer(mean, mean)

    def value(x):
        arcs = dict(zip(slots, x.reshape(scores.shape)))
        return lattices.log_likelihood(some_topology[0], arcs, np.int32(frames), np.int32(labels), implementation)

    if order == "forward over reverse":  # once
        np.testing.assert_allclose(jax.jit(jax.jacfwd(value))(scores.ravel()), mean, atol=1e-13)
    np.testing.assert_allclose(jax.jit(ORDERS[order](value))(scores.ravel()), covariance, atol=1e-13)


@pytest.mark.rare("reference")
def test_second_derivative_with_forbidden_arcs_and_no_path(implementation):
    """The double `where` of a safe logaddexp must hold in the second derivative too."""
    arcs = arcs_of(truth.STANDARD, (2, 3, 3), seed=7)
    arcs["label"][0, 1] = -np.inf
    arcs["blank"][1, 0], arcs["label"][1, 0] = -np.inf, -np.inf

    def total(arcs):
        value = lattices.log_likelihood(
            lattices.STANDARD, arcs, np.full(2, 3, np.int32), np.full(2, 2, np.int32), implementation
        )
        return jnp.where(jnp.isfinite(value), value, 0.0).sum()

    for second in (jax.jacfwd(jax.grad(total)), jax.jacrev(jax.grad(total))):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.jit(second)(arcs)))


@pytest.mark.rare("durations_unordered_without_1", "multi_blank", "durations_without_0", "monotonic")
def test_program_size_does_not_depend_on_the_lattice(topology):
    """The program is a loop; unrolled steps would make compile time grow with the utterance."""

    def size(frames, labels):
        shapes = {a.slot: jax.ShapeDtypeStruct((2, frames, labels + 1), jnp.float32) for a in topology[0]}
        lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
        call = lambda arcs, n, m: lattices.log_likelihood(topology[0], arcs, n, m, "reference").sum()
        return len(jax.jit(jax.grad(call)).lower(shapes, lengths, lengths).as_text().splitlines())

    assert size(400, 100) <= 1.1 * size(100, 100)
    assert size(100, 400) <= 1.2 * size(100, 100)  # scans over u may take log2(U) steps


@pytest.mark.parametrize(("frames", "labels"), [(3950, 50), (600, 600)])
def test_error_does_not_grow_with_the_likelihood(frames, labels, implementation):
    """float32 arcs, |log-likelihood| of thousands: posteriors within 1e-5 (plain float32 log alphas: 1e-3)."""
    arcs = arcs_of(truth.STANDARD, (frames, labels + 1), dtype=np.float32, seed=8)
    call = lambda arcs: lattices.log_likelihood(
        lattices.STANDARD, arcs, np.int32(frames), np.int32(labels), implementation
    )
    value, gradient = jax.jit(jax.value_and_grad(call))(arcs)
    expected, posteriors = truth.posteriors(truth.STANDARD, arcs, frames, labels)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for slot in arcs:
        np.testing.assert_allclose(gradient[slot], posteriors[slot], atol=1e-5)


def test_one_custom_call(kernel):
    """Value and gradient: the lattice's kernel, once."""
    arcs = arcs_of(truth.STANDARD, (2, T, U + 1))
    call = lambda arcs: lattices.log_likelihood(lattices.STANDARD, arcs, np.full(2, T), np.full(2, U)).sum()
    text = jax.jit(jax.value_and_grad(call)).lower(arcs).compile().as_text()
    assert losses.custom_calls(text) == losses.once(["jax_rnnt_lattice_grad"])
    text = jax.jit(call).lower(arcs).compile().as_text()
    assert losses.custom_calls(text) == losses.once(["jax_rnnt_lattice_loss"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_narrow_arcs(dtype, implementation):
    arcs = {slot: jnp.asarray(x, dtype) for slot, x in arcs_of(truth.STANDARD, (T, U + 1)).items()}
    value = lattices.log_likelihood(lattices.STANDARD, arcs, T, U, implementation)
    wide = {slot: np.asarray(x, np.float64) for slot, x in arcs.items()}
    assert value.dtype == np.float32
    np.testing.assert_allclose(value, truth.log_likelihood(truth.STANDARD, wide, T, U), rtol=1e-6)


def test_lengths_out_of_range(implementation):
    """NaN for their own sequence, with a zero gradient."""
    arcs = arcs_of(truth.STANDARD, (5, T, U + 1))
    frames, labels = np.array([T, T + 1, -1, T, T]), np.array([U, U, U, U + 1, -1])
    call = lambda arcs: lattices.log_likelihood(lattices.STANDARD, arcs, frames, labels, implementation)
    values, pull = jax.vjp(call, arcs)
    np.testing.assert_array_equal(np.isnan(values), [False, True, True, True, True])
    for g in pull(jnp.ones(5))[0].values():
        assert np.any(g[0]) and not np.any(g[1:])


def test_errors():
    arcs = arcs_of(truth.STANDARD, (T, U + 1))
    call = lambda **x: lattices.log_likelihood(
        **{"topology": lattices.STANDARD, "arcs": arcs, "num_frames": T, "num_labels": U} | x
    )
    for changes, message in (
        ({"arcs": {"blank": arcs["blank"]}}, r"missing: \['label'\]"),
        ({"arcs": arcs | {"label": arcs["label"][:, :2]}}, "one shape"),
        ({"arcs": {slot: np.zeros((2, T, 0)) for slot in arcs}}, "U1 >= 1"),
        ({"arcs": arcs | {"label": arcs["label"].astype(int)}}, r"arcs\['label'\] must have one of the dtypes"),
        ({"num_frames": np.array([T])}, "num_frames must have shape"),
        ({"num_labels": 1.0}, "num_labels must have an integer dtype"),
        ({"implementation": "fast"}, "implementation must be"),
        ({"topology": ()}, "topology must hold one Arc"),
        ({"topology": "standard"}, "topology must be a tuple of Arc"),
        ({"arcs": arcs["blank"]}, "arcs must be a dict"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"log_likelihood: .*{message}"):
            call(**changes)


def test_no_frames(implementation):
    """The axis may be empty: no label is a path of no arcs, a label has none."""
    arcs = {slot: np.zeros((2, 0, U + 1)) for slot in ("blank", "label")}
    lengths = np.zeros(2, np.int32), np.array([0, U])
    got = lattices.log_likelihood(lattices.STANDARD, arcs, *lengths, implementation=implementation)
    np.testing.assert_array_equal(got, [0, -np.inf])


@pytest.mark.rare("reference")
@pytest.mark.parametrize("table", [lattices.STANDARD, lattices.durations((0, 1, 2))], ids=["standard", "durations"])
def test_bad_arcs(table, implementation):
    """NaN or +inf of one arc is NaN, beside arcs of any size; other sequences stay."""
    arcs = {arc.slot: np.full((5, 4, 3), -1.0, np.float32) for arc in table}
    bad = arcs[table[0].slot]
    bad[:4, 1, 1], bad[2:4, 0, 0] = [np.inf, np.nan, np.inf, np.nan], -1e6
    values = lattices.log_likelihood(table, arcs, np.full(5, 4), np.full(5, 2), implementation)
    assert np.isnan(values).tolist() == [True] * 4 + [False]


@pytest.mark.rare("reference")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("table", [lattices.STANDARD, lattices.MONOTONIC], ids=["standard", "monotonic"])
def test_no_labels_in_many_frames(table, dtype, implementation):
    """One path, so that each of its posteriors is 1; a mantissa that is not scaled overflows or underflows."""
    arcs = {slot: np.full((2400, 2), -0.34, dtype) for slot in ("blank", "label")}
    call = lambda arcs: lattices.log_likelihood(table, arcs, 2400, 0, implementation)
    value, posteriors = jax.value_and_grad(call)(arcs)
    np.testing.assert_allclose(value, -0.34 * 2400, rtol=1e-6)
    np.testing.assert_allclose(posteriors["blank"], np.arange(2) == np.zeros((2400, 1)), atol=1e-3)
    assert not np.any(posteriors["label"])


def test_topology_as_a_list(implementation):
    arcs = arcs_of(truth.STANDARD, (T, U + 1))
    got, expected = (
        lattices.log_likelihood(topology, arcs, T, U, implementation=implementation)
        for topology in ([*lattices.STANDARD], lattices.STANDARD)
    )
    assert got == expected


def test_expanded_topologies():
    """A slot for each sum of two planes, also where arcs share slot and frames."""
    assert lattices.topology.expanded(lattices.products((2, 0))) == lattices.durations((2, 0))
    arcs = tuple(lattices.Arc("label", 1, 1, other=other) for other in ("slow", "fast"))
    slots = [arc.slot for arc in lattices.topology.expanded((*lattices.STANDARD, *arcs))]
    assert len(set(slots)) == len(slots) and all(slot.startswith("label") for slot in slots[1:])


@pytest.mark.parametrize(("dt", "du"), [(0, 0), (-1, 1), (1, -1)])
def test_arcs_move(dt, du):
    with pytest.raises(ValueError, match=f"dt={dt} and du={du}"):
        lattices.Arc("blank", dt, du)


# ------------------------------------------------------------------------------------------------- the kernels


@pytest.fixture(params=TOPOLOGIES.values(), ids=TOPOLOGIES)
def with_kernel(request, kernel):
    if not lattice.supported(request.param[0], losses.platform()):
        pytest.skip("no kernel for this topology on this platform")
    return request.param


@functools.cache
def kernels(topology):
    def run(arcs, *lengths):
        operands = topology, arcs, *lengths
        return lattice.value(*operands, strict=True), *lattice.value_and_grad(*operands, strict=True)

    return jax.jit(run)


def check_kernels(topology, arcs, frames, labels, limit):
    alone, value, gradients = kernels(topology[0])(arcs, np.int32(frames), np.int32(labels))
    np.testing.assert_array_equal(alone, value)
    for b in np.ndindex(np.shape(frames)):
        n, m = frames[b], labels[b]
        expected, posteriors = truth.posteriors(topology[1], {k: x[b] for k, x in arcs.items()}, n, m)
        np.testing.assert_allclose(value[b], -expected, rtol=limit, atol=limit, err_msg=f"T={n}, U={m}")
        for slot, gradient in gradients.items():
            np.testing.assert_allclose(gradient[b][:n, : m + 1], -posteriors[slot], atol=limit, err_msg=f"T={n}, U={m}")
            assert not np.asarray(gradient[b])[n:].any() and not np.asarray(gradient[b])[:, m + 1 :].any()


def test_kernels(with_kernel):
    """Every (T, U) up to (9, 9), garbage outside the lengths, no path among them."""
    every = truth.every_length(9, 9)
    frames, labels = np.array(every).T
    arcs = arcs_of(with_kernel[1], (len(every), 9, 10))
    outside = (np.arange(9)[:, None] >= frames[:, None, None]) | (np.arange(10) > labels[:, None, None])
    arcs = {k: np.where(outside, np.nan, x) for k, x in arcs.items()}
    check_kernels(with_kernel, arcs, frames, labels, 1e-13)


@pytest.mark.parametrize(("frames", "labels"), [(17, 16), (33, 5), (40, 40), (70, 65), (8, 8), (64, 7)])
def test_kernels_with_forbidden_arcs(with_kernel, frames, labels):
    """Sizes around strips of frames and vectors of columns; a quarter of the arcs are forbidden."""
    rng = np.random.default_rng(0)
    for dtype, limit in ((np.float32, 1e-5), (np.float64, 1e-12)):
        arcs = arcs_of(with_kernel[1], (3, frames, labels + 1), dtype=dtype, seed=frames)
        arcs = {k: np.where(rng.random(x.shape) < 0.25, -np.inf, x).astype(dtype) for k, x in arcs.items()}
        lengths = np.array([frames, frames - 1, frames - 3]), np.array([labels, max(labels - 9, 0), labels // 2])
        check_kernels(with_kernel, arcs, *lengths, limit)


@pytest.mark.rare("durations", "durations_unordered_without_1")
def test_error_of_the_kernels_does_not_grow(with_kernel):
    arcs = arcs_of(with_kernel[1], (1, 3000, 801), dtype=np.float32, seed=9)
    check_kernels(with_kernel, arcs, np.array([3000]), np.array([800]), 1e-5)


@pytest.mark.parametrize("durations", [(0, 1, 2, 4), (3, 0, 2)], ids=str)
def test_products(implementation, durations):
    """Arcs that are sums of two planes: a plane's gradient is that of all its arcs."""
    topology, arcs = lattices.products(durations), truth.token_durations(durations)
    rng = np.random.default_rng(8)
    names = ("blank", "label", *(f"duration+{i}" for i in range(len(durations))))
    planes = {name: rng.normal(-1, 1, SHAPE) for name in names}
    planes["duration+1"][rng.random(SHAPE) < 0.2] = -np.inf
    parts = {arc.slot: (arc.slot.split("+")[0], f"duration+{durations.index(arc.dt)}") for arc in arcs}
    frames, labels = np.array(EVERY, np.int32).T
    if implementation == "kernel":
        call = functools.partial(lattice.value_and_grad, topology, strict=True)
    else:
        call = functools.partial(lattice.reference_grad, topology)
    loss, gradient = jax.jit(call)(planes, frames, labels)
    for b, (n, m) in enumerate(EVERY):
        sums = {slot: planes[token][b] + planes[duration][b] for slot, (token, duration) in parts.items()}
        expected, posteriors = truth.enumerate_log_likelihood(arcs, sums, n, m)
        np.testing.assert_allclose(loss[b], -expected, rtol=1e-13, atol=1e-13, err_msg=f"T={n}, U={m}")
        for name in names:
            total = sum(posteriors[slot] for slot, pair in parts.items() if name in pair)
            np.testing.assert_allclose(gradient[name][b], -total, atol=1e-13, err_msg=f"T={n}, U={m}, {name}")


SHIFTS = (-1e3, -1e4, -1e5, -3e6, -5e6, -1e9, -1e15, -1e30, 1e5)


@pytest.mark.rare("reference-300")
@pytest.mark.parametrize(("frames", "labels"), [(70, 20), (300, 90)], ids=str)
@pytest.mark.parametrize("arcs_table", [lattices.STANDARD, lattices.MONOTONIC], ids=["standard", "monotonic"])
def test_shifted_arcs(implementation, arcs_table, frames, labels):
    """All paths have equal numbers of blanks and labels, so an offset of all blanks or labels moves only the loss.

    Arcs and shifts are multiples of the spacing of float32 at their sum; from 1e9 on the arcs are equal.
    """
    rng = np.random.default_rng(0)
    lengths = np.array([frames], np.int32), np.array([labels], np.int32)
    run = jax.jit(
        lambda arcs: (
            lattice.value_and_grad(arcs_table, arcs, *lengths, strict=True)
            if implementation == "kernel"
            else lattice.reference_grad(arcs_table, arcs, *lengths)
        )
    )
    blanks = frames - (labels if arcs_table == lattices.MONOTONIC else 0)
    for equal, shifts in ((False, [x for x in SHIFTS if abs(x) < 1e9]), (True, SHIFTS)):
        size = (1, frames, labels + 1)
        arcs = {
            slot: np.zeros(size, np.float32) if equal else -rng.integers(0, 8, size) / 2 for slot in ("blank", "label")
        }
        arcs = {slot: x.astype(np.float32) for slot, x in arcs.items()}
        loss, gradients = run(arcs)
        for shift in shifts:
            for shifted, count in ((("blank",), blanks), (("label",), labels), (("blank", "label"), blanks + labels)):
                moved = {slot: x + np.float32(shift) if slot in shifted else x for slot, x in arcs.items()}
                got, posteriors = run(moved)
                np.testing.assert_allclose(
                    got, np.asarray(loss, np.float64) - count * float(np.float32(shift)), rtol=1e-5, atol=1e-3
                )
                for slot, x in posteriors.items():
                    np.testing.assert_allclose(x, gradients[slot], atol=1e-5, err_msg=f"{shift} {shifted} {slot}")
