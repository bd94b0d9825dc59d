"""Are answers right where logits or arcs are masked by finite numbers of any size?"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from feeds import (
    INF,
    MASKS,
    Row,
    T,
    U,
    V,
    all_failures,
    far,
    lowest,
    none_of,
    possible,
    problem_of,
    table,
    twin_failures,
)
from jax_rnnt import lattices
from losses import lookup

# ------------------------------------------------------------------------------------------------------------- masks


def test_the_usual_mask(implementation):
    """The mask is on all labels of frame 0, or on all labels: numbers by hand."""
    logits = np.zeros((3, 3, 4), np.float32)
    rest = np.array([[1, 2]], np.int32), np.array([3], np.int32), np.array([2], np.int32)
    for mask in (*MASKS["float32"], -(2.0**21), -INF):  # 2^21 is the largest size for the kernels' sweeps
        first, everywhere = logits.copy(), logits.copy()
        first[0, :, 1:] = everywhere[..., 1:] = mask
        p = losses.Problem(np.stack([first, everywhere]), *(np.concatenate([x, x]) for x in rest))
        values, _ = losses.evaluate(losses.RNNT, p, implementation, blank=0)
        # Two labels fit into two frames in 3 ways, into three in 6; with equal logits an arc costs log 4.
        np.testing.assert_allclose(values[0], 4 * math.log(4) - math.log(3), rtol=1e-6, err_msg=f"{mask}")
        expected = -2 * mask - math.log(6)
        expected = expected if expected <= float(np.finfo(np.float32).max) else INF
        np.testing.assert_allclose(values[1], expected, rtol=1e-6, err_msg=f"{mask}")


@pytest.mark.rare("tdt-reference")
@pytest.mark.family("reference")
def test_masks(loss, implementation):
    rows = table(loss)
    got = losses.evaluate(loss, problem_of(rows), implementation)
    none_of(all_failures(loss, rows, got, "float32", implementation))


@pytest.mark.rare("reference-float64", "reference-bfloat16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_masks_of_other_dtypes(loss, implementation, dtype):
    rows = table(loss, dtype)
    got = losses.evaluate(loss, problem_of(rows), implementation)
    none_of(all_failures(loss, rows, got, dtype, implementation))


@pytest.mark.family
def test_masked_log_probabilities(loss, implementation):
    rows = table(loss, fused=False)
    got = losses.evaluate(loss, problem_of(rows), implementation, fused_log_softmax=False)
    none_of(all_failures(loss, rows, got, "float32", implementation, fused=False))


def test_what_is_beyond_float32(loss, implementation):
    """Two masks of finfo.min on every path: +inf and a gradient of exactly zero."""
    logits = np.zeros((1, T, U + 1, V), np.float32)
    logits[..., : V - 1] = lowest(np.float32)
    p = problem_of([Row("", logits[0], T, None, 0)])
    values, gradient = losses.evaluate(loss, p, implementation)
    assert (values == INF).all() and not gradient.any()


# --------------------------------------------------------------------------------------------- questions to the lattice


def kinds(solution):
    """(blank, label) posteriors [T, U1]."""
    return [
        sum((x for slot, x in solution.posteriors.items() if slot.startswith(kind)), np.zeros(()))
        for kind in ("blank", "label")
    ]


@functools.cache
def question(function, loss, implementation):
    """A compiled function of a batch; the loss and its options are bound."""
    return jax.jit(functools.partial(getattr(jax_rnnt, function), loss=loss.value(implementation=implementation)))


@pytest.mark.family
def test_posteriors_of_masks(loss, implementation):
    """Posteriors lie in [0, 1], sum to one emission per label, and are those of the truth."""
    rows = table(loss)
    got = question("rnnt_posteriors", loss, implementation)(*problem_of(rows))
    blank, label = (np.asarray(x) for x in got)

    def failures():
        for b, row in enumerate(rows):
            both = np.stack([blank[b], label[b]])
            if not (np.isfinite(both).all() and both.min() >= -1e-6 and both.max() <= 1 + 1e-5):
                yield f"{row.name}: posteriors in [{both.min()}, {both.max()}]"
            elif both[:, row.frames :].any():
                yield f"{row.name}: posteriors outside the lengths"
            elif possible(row, "float32"):
                if far(label[b, :, :U].sum(0), 1, 1e-5):
                    yield f"{row.name}: labels are emitted {label[b, :, :U].sum(0)} times"
                expected = np.stack(kinds(row.solution))
                if row.slack < 1e-2 and far(both[:, : row.frames], expected, 1e-5 + row.slack):
                    yield f"{row.name}: posteriors off by {np.abs(both[:, : row.frames] - expected).max()}"
            elif both.any():
                yield f"{row.name}: posteriors without a path"
        if implementation == "kernel":
            yield from twin_failures(rows, blank, label)

    none_of(failures())


BOTH = pytest.mark.parametrize("variant", [losses.RNNT, losses.TDT], ids=["rnnt", "tdt"])


@BOTH
def test_alignments_of_masks(variant):
    """The score is that of the best path, and the frames are those of a path with that score."""
    rows = table(variant)
    scores, frames = map(np.asarray, question("rnnt_align", variant, None)(*problem_of(rows)))

    def failures():
        for row, score, where in zip(rows, scores, frames):
            if not possible(row, "float32"):
                continue
            best = max(row.solution.scores)
            limit = 1e-5 + 1e-6 * abs(float(best))
            same = [
                x
                for path, x in zip(row.solution.paths, row.solution.scores)
                if [t for slot, t, _ in path if truth.is_label(slot)] == where.tolist()
            ]
            if far(score, float(best), limit):
                yield f"{row.name}: score {score}, expected {float(best)}"
            if not same or best - max(same) > limit:
                yield f"{row.name}: frames {where} are not those of a best path"

    none_of(failures())


@BOTH
def test_expected_frames_of_masks(variant, implementation):
    rows = table(variant)
    got = np.asarray(question("expected_emission_frames", variant, implementation)(*problem_of(rows)))

    def failures():
        for row, frames in zip(rows, got):
            expected = (np.arange(row.frames)[:, None] * kinds(row.solution)[1]).sum(0)[:U]
            if not (np.isfinite(frames).all() and frames.min() >= -1e-5 and frames.max() <= row.frames - 1 + 1e-4):
                yield f"{row.name}: frames {frames}"
            elif possible(row, "float32") and row.slack < 1e-2 and far(frames, expected, T * (2e-5 + row.slack)):
                yield f"{row.name}: frames {frames}, expected {expected}"

    none_of(failures())


COSTLY = ("class without a label", "labels of a frame", "run of arcs")


def costly(loss):
    """Rows with the masks -inf, -1e9 and finfo.min, which must all give the same answers."""
    names = [f"{name} at {m:g}" for name in COSTLY for m in (-INF, -1e9, lowest(np.float32))]
    rows = [row for row in table(loss) if row.name.split(",")[0] in names]
    ids = [table(loss).index(row) if row.twin is None else row.twin for row in rows]
    return rows, ids


def assert_twins(rows, ids, *results):
    """Rows of one mask and one base have equal, finite results."""
    results = [np.asarray(x) for x in results]
    for i, row in enumerate(rows):
        twin = ids.index(ids[i])
        for x in results:
            assert np.isfinite(x[i]).all(), row.name
            np.testing.assert_allclose(x[i], x[twin], rtol=1e-5, atol=2e-5, err_msg=row.name)
    assert all(x.any() for x in results)


@pytest.mark.rare("reference")
@BOTH
def test_latency_of_masks(variant, implementation):
    """Value and gradient are those of a mask of -inf."""
    rows, ids = costly(variant)
    p = problem_of(rows, 0)
    call = lambda x: jax_rnnt.minimum_latency(
        x, *p[1:], loss=variant.value(reduction="none", implementation=implementation)
    )

    @jax.jit
    def run(x):
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    assert_twins(rows, ids, *run(p.logits))


@BOTH
@pytest.mark.rare("tdt")
def test_second_derivatives_of_masks(variant):
    """Hessian-vector products, forward over reverse, are those of a mask of -inf."""
    rows, ids = costly(variant)
    p = problem_of(rows, 0)
    call = lambda x: variant(x, *p[1:], reduction="sum", implementation="reference")
    direction = np.random.default_rng(1).normal(size=p.logits.shape[1:]).astype(np.float32)
    direction = np.broadcast_to(direction, p.logits.shape)
    _, product = jax.jit(lambda x, v: jax.jvp(jax.grad(call), (x,), (v,)))(p.logits, direction)
    assert_twins(rows, ids, np.where(np.isneginf(p.logits), 0, product))


def test_masked_arcs(implementation):
    """`lattices.log_likelihood` and its posteriors with arcs of any size, huge ones included."""
    rng = np.random.default_rng(0)
    planes, expected = [], []
    for size in (1e5, 3e6, 1e9, 1e15, 1e30, 1e37):
        for signs in ([-1], [1], [-1, 1]):
            arcs = {slot: rng.normal(-1, 1, (T, U + 1)).astype(np.float32) for slot in ("blank", "label")}
            for x in arcs.values():
                x[:] = np.where(rng.random(x.shape) < 0.5, rng.choice(signs, x.shape) * np.float32(size), x)
            planes.append(arcs)
            exact = {slot: truth.fractions_of(x) for slot, x in arcs.items()}
            scores = [
                sum(exact[slot][t, u] for slot, t, u in path) for path in truth.enumerate_paths(truth.STANDARD, T, U)
            ]
            best = max(scores)
            shares = np.array([math.exp(max(x - best, -1000)) for x in scores])
            posteriors = {slot: np.zeros((T, U + 1)) for slot in arcs}
            for path, share in zip(truth.enumerate_paths(truth.STANDARD, T, U), shares / shares.sum()):
                for slot, t, u in path:
                    posteriors[slot][t, u] += share
            expected.append((float(best) + math.log(shares.sum()), posteriors))
    batch = {slot: np.stack([x[slot] for x in planes]) for slot in ("blank", "label")}
    lengths = np.full(len(planes), T, np.int32), np.full(len(planes), U, np.int32)

    @jax.jit
    def run(arcs):
        call = lambda arcs: lattices.log_likelihood(lattices.STANDARD, arcs, *lengths, implementation)
        values, pull = jax.vjp(call, arcs)
        return values, pull(jnp.ones_like(values))[0]

    values, gradient = run(batch)
    for b, (value, posteriors) in enumerate(expected):
        np.testing.assert_allclose(values[b], value, rtol=1e-6, atol=1e-5)
        for slot, x in posteriors.items():
            # Only float64 sums of 3e6 are right to 1 in 2^31, although the arcs themselves are exact.
            np.testing.assert_allclose(gradient[slot][b], x, atol=1e-5, err_msg=f"{b}")


# ----------------------------------------------------------------------------------------------- other ways to the loss


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_beyond_64_bits(implementation, sign):
    """The exponents of three arcs of 3e18 nats add up to no 64-bit number: UndefinedBehaviorSanitizer looks on."""
    topology = lattices.durations((1, 2))
    arcs = {slot: np.full((3, 1), sign * 3e18) for slot in {arc.slot for arc in topology}}
    got = lattices.log_likelihood(topology, arcs, 3, 0, implementation=implementation)
    np.testing.assert_allclose(got, 9e18 if sign > 0 else -6e18, rtol=1e-12)  # of most arcs, or of fewest


@BOTH
def test_masks_in_tiles(kernel, variant):
    """`joint_rnnt_loss` with a joint that looks up the same logits."""
    rows = table(variant)
    p = problem_of(rows)
    columns = np.broadcast_to(np.arange(U + 1, dtype=np.float32)[:, None], (len(p.targets), U + 1, 1))

    @jax.jit
    def run(x):
        call = lambda e: jax_rnnt.joint_rnnt_loss(
            lookup(U + 1), e, columns, *p[1:], loss=variant.value(reduction="none", implementation=kernel), chunk=512
        )
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    values, gradient = run(p.logits.reshape(*p.logits.shape[:2], -1))
    gradient = np.asarray(gradient).reshape(p.logits.shape)
    none_of(all_failures(variant, rows, (values, gradient), "float32", "reference"))


def test_masked_bias():
    """A class that the bias of a `LinearJoint` forbids does not matter: the other weights get the same gradient."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, T, 3)).astype(np.float32), rng.normal(size=(2, U + 1, 3)).astype(np.float32)
    weight = rng.normal(size=(3, V)).astype(np.float32)
    rest = problem_of([Row("", np.zeros((T, U + 1, V)), T, None, 0)], 2)[1:]

    @jax.jit
    def run(weight, bias):
        call = lambda w: jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(w, bias), *rows, *rest)
        return jax.value_and_grad(call)(weight)

    others = np.arange(V) != 2  # targets are below 2, so they keep their numbers
    expected, wanted = run(weight[:, others], np.zeros(V - 1, np.float32))
    for mask in (-1e9, lowest(np.float32), -INF):
        bias = np.where(others, 0, mask).astype(np.float32)
        value, gradient = run(weight, bias)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient[:, others], wanted, atol=1e-5)
        assert not np.asarray(gradient)[:, 2].any()


def test_masks_in_a_band(implementation):
    """`pruned_rnnt_loss` over all columns."""
    rows = table(losses.RNNT)
    p = problem_of(rows)
    first = np.zeros((len(p.targets), T), np.int32)

    @jax.jit
    def run(x):
        call = lambda x: jax_rnnt.pruned_rnnt_loss(x, first, *p[1:], reduction="none", implementation=implementation)
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    none_of(all_failures(losses.RNNT, rows, run(p.logits), "float32", implementation))


def test_masks_in_packed_rows(implementation):
    rows = table(losses.RNNT)
    p = problem_of(rows)

    @jax.jit
    def run(x):
        call = lambda x: jax_rnnt.rnnt_loss_packed(
            x, *p[1:], reduction="none", max_frames=T, implementation=implementation
        )
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    values, gradient = run(losses.packed(p, p.logits, extra=0))
    whole = np.zeros_like(p.logits)
    whole[losses.inside(p)] = gradient
    none_of(all_failures(losses.RNNT, rows, (values, whole), "float32", implementation))
