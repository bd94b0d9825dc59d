"""Are the ranges and the losses of pruned training k2's, and is the loss of a band that of its paths?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
from jax_rnnt import AdditiveLogits, BandLogits
from layout_table import ranges
from vectors import LABELS, LENGTHS

pytestmark = pytest.mark.no_kernel
EXACT = 1e-12
t, u, v = np.arange(5)[:, None], np.arange(4)[:, None], np.arange(6)
AM, LM = 2 * np.sin(1 + 3 * t + 7 * v), 2 * np.cos(2 + 5 * u + 3 * v)
UNIT_STEPS = {"standard": family.RNNT, "monotonic": family.MONOTONIC, "constrained": family.CONSTRAINED}


# --------------------------------------------------------------------------------------------------------- vectors
@pytest.mark.slow
def test_vectors_of_the_simple_loss():
    """fast_rnnt."""

    def call(am, *scales, loss=jax_rnnt.RNNTLoss, lm=LM, **options):
        return loss(blank=0, **options)(AdditiveLogits(am, lm, *scales), LABELS, *LENGTHS)

    value, gradients = jax.jit(jax.value_and_grad(lambda am, lm: call(am, lm=lm), (0, 1)))(AM, LM)
    np.testing.assert_allclose(value, 13.946255752, rtol=1e-9)
    np.testing.assert_allclose([np.abs(g).sum() for g in gradients], [8.882651222, 8.983783374], rtol=1e-9)
    monotonic, late = jax.jit(lambda am: (call(am, loss=jax_rnnt.MonotonicRNNTLoss), call(am, delay_penalty=0.1)))(AM)
    np.testing.assert_allclose([monotonic, late], [8.533267626, 13.874540574], rtol=1e-9)
    smoothed = jax.jit(jax.value_and_grad(call))
    for scales, expected, wanted in (
        ((0.1, 0.1), 13.875060464, 7.953364928),
        ((0.25, 0.15), 13.720407677, 6.609245613),
    ):
        value, gradient = smoothed(AM, *scales)
        np.testing.assert_allclose(value, expected, rtol=1e-9)
        np.testing.assert_allclose(np.abs(gradient).sum(), wanted, rtol=1e-9)


RANGES = {  # width -> (first, pruned loss)
    "standard": {
        2: ([0, 1, 1, 1, 2], 14.470983214),
        3: ([0, 0, 0, 1, 1], 13.950161025),
        4: ([0] * 5, 13.946255752),
        7: ([0] * 5, 13.946255752),
    },
    "monotonic": {2: ([0, 0, 1, 1, 2], 8.544806275), 3: ([0, 0, 0, 1, 1], 8.533267626)},
}


@pytest.mark.parametrize("variant", RANGES)
def test_vectors_of_ranges(variant):
    """fast_rnnt."""
    kind = UNIT_STEPS[variant].kind

    @jax.jit
    def run(am, lm):
        posteriors = kind(blank=0).posteriors(AdditiveLogits(am, lm), LABELS, *LENGTHS)
        made = {}
        for width in RANGES[variant]:
            first = ranges(LENGTHS, width, posteriors, variant=variant)
            band = BandLogits(sum(jax_rnnt.prune_inputs(am, lm, first, width)), first)
            made[width] = first, kind(blank=0)(band, LABELS, *LENGTHS)
        return made

    for width, (first, got) in run(AM, LM).items():
        expected, value = RANGES[variant][width]
        assert first.dtype == jnp.int32 and first.tolist() == expected
        np.testing.assert_allclose(got, value, rtol=1e-9)


# ------------------------------------------------------------------------------------------------------------ bands
BANDS = {
    "narrow": [0, 0, 0, 1, 1, 2, 2],
    "back": [0, 1, 0, 1, 2, 2, 2],
    "far_back": [0, 1, 2, 0, 1, 2, 2],
    "before_the_first_column": [-1, 0, 0, 1, 2, 2, 2],
    "apart": [0, 3, 3, 3, 3, 3, 3],
    "late_start": [1, 1, 1, 2, 2, 2, 2],
    "early_end": [0, 0, 1, 1, 1, 1, 1],
    "beyond_the_columns": [99] * 7,
    "whole": [-2, 0, 0, 0, 0, 0, 0],
}


def banded(x, first, width):
    """[B, T, S, ...] of the band; NaN where it leaves the columns."""
    out = np.full((*x.shape[:2], width, *x.shape[3:]), np.nan)
    for b, n, s in np.ndindex(out.shape[:3]):
        if 0 <= first[b, n] + s < x.shape[2]:
            out[b, n, s] = x[b, n, first[b, n] + s]
    return out


@pytest.mark.parametrize("loss", [family.RNNT, family.HAT, family.CONSTRAINED], ids=str)
def test_a_band_is_the_loss_with_other_nodes_forbidden(loss):
    """For any band, also one without a path, the truth has -inf at all classes of the other nodes."""
    B, width = len(BANDS), 3
    p = batches.problem(B, 7, 4, 9, lengths=([7] * (B - 1) + [5], [4] * (B - 1) + [2]))
    first = np.array([*BANDS.values()], np.int32)
    column = np.arange(5)
    inside = (column >= first[..., None]) & (column < first[..., None] + width)
    forbidden = p._replace(logits=np.where(inside[..., None], p.logits, -np.inf))
    options = {"clamp": 0.5, "fastemit_lambda": 0.25}
    expected, gradient = loss.expected(forbidden, **options)
    no_path = {"apart", "late_start", "beyond_the_columns"}
    assert no_path <= {name for name, x in zip(BANDS, expected) if np.isposinf(x)} <= no_path | {"early_end"}

    call = lambda x: loss.value(**options, reduction="none")(BandLogits(x, first), *p[1:])
    values, got = jax.jit(compare.with_gradient(call))(banded(p.logits, first, width))
    np.testing.assert_allclose(values, expected, rtol=EXACT)
    np.testing.assert_allclose(got, np.nan_to_num(banded(gradient, first, width)), atol=EXACT)


# ----------------------------------------------------------------------------------------------------------- ranges
@pytest.mark.parametrize(("variant", "steepest"), [("standard", None), ("monotonic", 1), ("constrained", 1)])
@pytest.mark.parametrize("width", [2, 3, 6])
def test_ranges_of_any_posteriors(variant, steepest, width):
    """Random planes, which no lattice has, against the rule as loops. The last window contains the last column."""
    rng = np.random.default_rng(0)
    blank, label = rng.random((2, 50, 9, 8))
    frames, labels = rng.integers(1, 10, 50).astype(np.int32), rng.integers(0, 8, 50).astype(np.int32)
    # Under jit, since otherwise lengths without a path in a band of this width would be an error.
    call = jax.jit(lambda lengths, planes: ranges(lengths, width, planes, variant=variant))
    got = np.asarray(call((frames, labels), (blank, label)))
    most = steepest or width - 1
    for b in range(50):
        inside = [[blank[b, t, s : s + width].sum() for s in range(8 - width + 1)] for t in range(9)]
        entered = [[label[b, t, s - 1] if s else 0 for s in range(8 - width + 1)] for t in range(9)]
        first = np.argmax(np.subtract(inside, entered), 1)
        first[frames[b] - 1 :] = max(labels[b] - width + 1, 0)
        for t in range(7, -1, -1):
            first[t] = min(first[t], first[t + 1])
        for t in range(7, -1, -1):
            first[t] = max(first[t], first[t + 1] - most)
        np.testing.assert_array_equal(got[b], np.minimum(first, most * np.arange(9)))
        np.testing.assert_array_equal(call((frames[b], labels[b]), (blank[b], label[b])), got[b])
    assert (np.diff(got) >= 0).all()


def test_width_of_a_batch():
    """The error names the sequence that needs most. Lengths out of range and traced lengths raise nothing."""
    plane = np.zeros((2, 2, 4, 7))
    frames, labels = np.array([[2, 9], [4, 2]], np.uint8), np.array([[3, 6], [6, 6]], np.uint8)
    call = lambda frames, labels, plane=plane: ranges((frames, labels), 2, (plane, plane))
    message = r"prune_ranges: width must be 4 .* sequence \[1, 1\] with T_b = 2 frames and U_b = 6 labels.* got 2"
    for kind in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match=message):
            call(kind(frames), kind(labels))
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda: call(frames, labels))()
    for variant, m, needed in (("standard", 6, 3), ("standard", 5, 3), ("constrained", 1, 2)):  # in four frames
        one = lambda width, m=m, v=variant: ranges((np.int32(4), np.int32(m)), width, plane[:, 0], variant=v)
        one(needed)
        with pytest.raises(ValueError, match=f"width must be {needed} or more"):
            one(needed - 1)
    first = jax.jit(call)(frames, labels)
    assert jax.vmap(call)(frames, labels, plane).tolist() == first.tolist()
    logits, targets = np.zeros((2, 2, 4, 2, 5)), np.zeros((2, 2, 6), np.int32)
    values = jax_rnnt.RNNTLoss(reduction="none")(BandLogits(logits, first), targets, frames, labels)
    np.testing.assert_array_equal(np.isposinf(values), [[True, False], [True, True]])


def test_inputs_of_any_band():
    """Rows for the band's columns; outside the lattice the nearest column, so nothing poisons a gradient."""
    rng = np.random.default_rng(0)
    encoder, predictor = rng.normal(size=(2, 3, 4, 6)), rng.normal(size=(2, 3, 5, 7))
    first = rng.integers(-2, 6, (2, 3, 4)).astype(np.int32)
    got = jax_rnnt.prune_inputs(encoder, predictor, first, 3)
    for i, j, n, s in np.ndindex(2, 3, 4, 3):
        np.testing.assert_array_equal(got[0][i, j, n, s], encoder[i, j, n])
        np.testing.assert_array_equal(got[1][i, j, n, s], predictor[i, j, np.clip(first[i, j, n] + s, 0, 4)])
