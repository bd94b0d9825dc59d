"""Are answers right where logits or arcs are masked by finite numbers of any size?"""

import jax
import numpy as np
import pytest

import compare
import door
import family
import feeds
import jax_rnnt
import reference_numpy as truth
from feeds import INF, T, U, V, none_of, problem_of, table
from jax_rnnt import lattices
from jax_rnnt.lattices import _extended as extended


# ------------------------------------------------------------------------------------------------ values and gradients
def check(loss, implementation, dtype="float32", fused=True):
    rows = table(loss, dtype, fused)
    for got in door.answers(loss, problem_of(rows), implementation, fused_log_softmax=fused):
        none_of(feeds.all_failures(loss, rows, got, dtype, implementation, fused))


@pytest.mark.quick("tdt-kernel")
@family.implementations(*family.LOSSES, reference=(family.RNNT, family.TDT))
def test_masks(loss, implementation):
    check(loss, implementation)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_masks_of_other_dtypes(kernel, dtype):
    check(family.RNNT, kernel, dtype)


@pytest.mark.parametrize("loss", [family.RNNT, family.TDT, family.HAT], ids=str)
def test_masked_log_probabilities(loss, kernel):
    check(loss, kernel, fused=False)


@pytest.mark.slow
def test_masked_bias():
    """A class that the bias of a `LinearJoint` forbids does not matter: the other weights get the same gradient."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, T, 3)).astype(np.float32), rng.normal(size=(2, U + 1, 3)).astype(np.float32)
    weight = rng.normal(size=(3, V)).astype(np.float32)
    rest = problem_of([feeds.Row("", np.zeros((T, U + 1, V)), T, None, 0)], 2)[1:]

    @jax.jit
    def run(weight, bias):
        logits = lambda w: jax_rnnt.JointLogits(jax_rnnt.LinearJoint(w, bias), *rows)
        return jax.value_and_grad(lambda w: family.RNNT.value()(logits(w), *rest))(weight)

    others = np.arange(V) != 2  # targets are below 2, so they keep their numbers
    expected, wanted = run(weight[:, others], np.zeros(V - 1, np.float32))
    for mask in (-1e9, feeds.lowest(np.float32), -INF):
        value, gradient = run(weight, np.where(others, 0, mask).astype(np.float32))
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient[:, others], wanted, atol=1e-5)
        assert not np.asarray(gradient)[:, 2].any()


# Posteriors are gradients, and `best_path` adds up without rounding: test_questions.py.
@pytest.mark.quick("rnnt")
@pytest.mark.parametrize("loss", [family.RNNT, family.TDT], ids=str)
def test_label_log_probs(loss, kernel):
    rows = table(loss)
    run = jax.jit(compare.with_gradient(loss.value(implementation=kernel).label_log_probs))
    log_probs, gradient = map(np.asarray, run(*problem_of(rows)))
    none_of(label_failures(loss.truth.get("topology", truth.STANDARD), rows, log_probs))
    assert np.isfinite(gradient).all()


def label_failures(topology, rows, log_probs):
    """Each label has its log-probability by exact fractions."""
    for row, scores in zip(rows, log_probs):
        before = 0
        for u, score in enumerate(scores):
            total = truth.sum_of_prefixes(topology, row.solution.arcs, row.frames, U, u + 1)
            expected = -np.inf if total == -np.inf else float(total - before)
            limit = 1e-5 + 1e-6 * float(max(abs(total), abs(before)))
            if score != expected and feeds.far(score, expected, limit):
                yield f"{row.name}: label {u} has {score}, expected {expected}"
            if (before := total) == -np.inf:
                break


# ------------------------------------------------------------------------------------------------------------- the arcs
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_beyond_64_bits(implementation, sign):
    """The exponents of three arcs of 3e18 nats add up to no 64-bit number: UndefinedBehaviorSanitizer looks on."""
    topology = lattices.token_and_duration((1, 2))
    arcs = {slot: np.full((3, 1), sign * 3e18) for slot in {arc.slot for arc in topology}}
    got = lattices.log_likelihood(topology, arcs, 3, 0, implementation=implementation)
    np.testing.assert_allclose(got, 9e18 if sign > 0 else -6e18, rtol=1e-12)  # of most arcs, or of fewest


def test_sums_beyond_any_float():
    """No float holds the sum of 4,096 masks of the lowest float on either path; what differs beside them counts."""

    @jax.jit
    def difference(*arcs):
        masks, arc = map(extended.from_log, arcs)
        for _ in range(12):
            masks = extended.normalize(extended.multiply(masks, masks))
        return extended.log_of_ratio(extended.multiply(masks, arc), masks)

    np.testing.assert_allclose(difference(np.float32(feeds.lowest(np.float32)), np.float32(-2)), -2, rtol=1e-6)
