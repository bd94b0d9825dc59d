"""Does every odd sequence get the promised answer, and does it leave the other sequences of its batch alone?"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def with_value(p, name, index, value):
    changed = np.array(getattr(p, name))
    changed[index] = value
    return p._replace(**{name: changed})


# Changes of sequence 1 of four (T_b = 5, U_b = 2, V = 9): field, index, value -> loss, gradient inside.
BAD = {
    "T_b=-1": ("logit_lengths", 1, -1, np.nan, 0),
    "T_b=T+1": ("logit_lengths", 1, 8, np.nan, 0),
    "T_b=min": ("logit_lengths", 1, INT_MIN, np.nan, 0),
    "T_b=max": ("logit_lengths", 1, INT_MAX, np.nan, 0),
    "U_b=-1": ("target_lengths", 1, -1, np.nan, 0),
    "U_b=U+1": ("target_lengths", 1, 5, np.nan, 0),
    "U_b=min": ("target_lengths", 1, INT_MIN, np.nan, 0),
    "U_b=max": ("target_lengths", 1, INT_MAX, np.nan, 0),
    "label=-1": ("targets", (1, 1), -1, np.nan, 0),
    "label=V": ("targets", (1, 0), 9, np.nan, 0),
    "label=min": ("targets", (1, 0), INT_MIN, np.nan, 0),
    "label=max": ("targets", (1, 1), INT_MAX, np.nan, 0),
    "nan_blank": ("logits", (1, 2, 1, 8), np.nan, np.nan, np.nan),
    "nan_other": ("logits", (1, 0, 0, 3), np.nan, np.nan, np.nan),
    "nan_row": ("logits", (1, 4, 2), np.nan, np.nan, np.nan),
    "+inf_other": ("logits", (1, 0, 0, 3), np.inf, np.nan, np.nan),
    "+inf_blank": ("logits", (1, 4, 2, 8), np.inf, np.nan, np.nan),
    "+inf_twice": ("logits", (1, 4, 2, slice(3, 5)), np.inf, np.nan, np.nan),
    "-inf_first_row": ("logits", (1, 0, 0), -np.inf, np.inf, 0),
    "-inf_last_blank": ("logits", (1, 4, 2, 8), -np.inf, np.inf, 0),
    "-inf_frame": ("logits", (1, 3), -np.inf, np.inf, 0),
    "-inf_all": ("logits", 1, -np.inf, np.inf, 0),
    "T_b=0": ("logit_lengths", 1, 0, np.inf, 0),
}


@pytest.mark.family("quick", "band")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_sequence_hurts_only_itself(loss, implementation, bad, dtype):
    name, index, value, expected_loss, expected_gradient = bad
    p = losses.problem(loss=loss, dtype=dtype)
    options = {"fastemit_lambda": 0.5, "clamp": 0.25}
    values, gradient = losses.evaluate(loss, p, implementation, **options)
    changed = with_value(p, name, index, value)
    got_values, got = losses.evaluate(loss, changed, implementation, **options)
    if loss is not losses.RNNT and name == "logits" and np.isneginf(value):  # another lattice may have a way around
        true_values, true_gradient = loss.expected(changed, **options)
        losses.assert_matches((got_values[1], got[1]), (true_values[1], true_gradient[1]), dtype, 11, scale=1.5)
        expected_loss, expected_gradient = got_values[1], got[1][losses.inside(p)[1]]
    np.testing.assert_array_equal(got_values[1], expected_loss)
    in_lengths = losses.inside(changed)[1] & losses.inside(p)[1]
    np.testing.assert_array_equal(got[1][in_lengths], np.broadcast_to(expected_gradient, got[1][in_lengths].shape))
    if np.all(expected_gradient == 0):
        assert not got[1].any()
    assert not got[1][~losses.inside(p)[1]].any()
    others = [0, 2, 3]
    losses.assert_same_bits(got_values[others], values[others])
    losses.assert_same_bits(got[others], gradient[others])


@pytest.mark.family("layouts")
def test_windows_that_exclude_every_path(loss, implementation):
    p = losses.problem(loss=loss)
    open_ = np.tile(np.array([0, 6], np.int32), (4, 4, 1))
    shut = open_.copy()
    shut[0, 2] = [4, 3]  # empty
    shut[1, 1] = [7, 9]  # after the last frame
    shut[3, :2] = [[3, 3], [0, 2]]  # label 1 before label 0
    if loss is not losses.RNNT:
        p = p._replace(logit_lengths=np.full(4, 7, np.int32))  # a path for every lattice while windows are open
    values, gradient = losses.evaluate(loss, p, implementation, label_windows=open_)
    got_values, got = losses.evaluate(loss, p, implementation, label_windows=shut)
    np.testing.assert_array_equal(got_values[[0, 1, 3]], np.inf)
    assert not got[[0, 1, 3]].any()
    losses.assert_same_bits(got_values[2], values[2])
    losses.assert_same_bits(got[2], gradient[2])


@pytest.mark.family("layouts")
def test_empty_sequences(loss, implementation):
    """T_b = 0: loss 0 without labels, inf with; U_b = 0: the blanks alone."""
    p = losses.problem(loss=loss, lengths=([0, 0, 1, 7], [0, 2, 0, 0]))
    got = losses.evaluate(loss, losses.poisoned(p), implementation)
    losses.assert_matches(got, loss.expected(p), np.float64, 7)
    assert got[0][0] == 0 and not np.signbit(got[0][0]) and got[0][1] == np.inf
    assert not got[1][:2].any()


@pytest.mark.rare("reference-(2, 4, 0, 5)", "reference-(2, 0, 0, 3)")
@pytest.mark.family("layouts")
@pytest.mark.parametrize("shape", [(0, 4, 2, 5), (2, 0, 2, 5), (2, 4, 0, 5), (2, 0, 0, 3)], ids=str)
def test_empty_dimensions(loss, implementation, shape):
    """No sequences, no frames, no labels in the arrays themselves; every reduction is defined."""
    B, T, U, V = shape
    p = losses.problem(B, T, U, V, loss=loss, lengths=([T, max(T - 1, 0)][:B], [U, 0][:B]))
    got = losses.evaluate(loss, p, implementation)
    losses.assert_matches(got, loss.expected(p), np.float64, 6)
    if implementation == "kernel":  # the reductions are the same code for both
        for reduction in ("sum", "mean", "mean_target", "mean_volume"):
            value = loss(*p, reduction=reduction, implementation=implementation)
            np.testing.assert_allclose(value, truth.reduce(got[0], p.target_lengths, reduction)[0], rtol=1e-14)


@pytest.mark.family("layouts")
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
def test_minus_infinity_with_a_path(loss, implementation, fused):
    """Forbidden classes and whole forbidden rows off the path: finite loss, gradient 0 there, never NaN."""
    rng = np.random.default_rng(0)
    p = losses.problem(8, loss=loss, lengths=([7, 6, 5, 4] * 2, [3, 2, 1, 0] * 2))
    logits = np.where(rng.random(p.logits.shape) < 0.3, -np.inf, p.logits)
    for b in range(8):  # open one path: all labels in the first frame, then blanks; another one on the last row
        m = p.target_lengths[b]
        logits[b, 0, np.arange(m), p.targets[b, :m]] = 0.5
        logits[b, :, m, -1] = 0.25
    logits[0, 2, 0] = logits[4, 1, 1] = -np.inf
    p = p._replace(logits=logits)
    values, gradient = losses.evaluate(loss, p, implementation, fused_log_softmax=fused)
    expected = loss.expected(p, fused_log_softmax=fused)
    assert np.isfinite(expected[0]).all() or loss is not losses.RNNT  # the path above is the standard lattice's
    losses.assert_matches((values, gradient), expected, np.float64, 11)
    assert not gradient[np.isneginf(logits)].any()


def test_one_path_of_certainty(loss, implementation):
    """All other classes at -inf: probability 1, loss exactly 0, gradient exactly 0; for CUDA, but for a rounding."""
    p = losses.problem(1, 4, 2, 5, loss=loss, lengths=([4], [2]))
    logits = np.full(p.logits.shape, -np.inf)
    logits[0, 0, [0, 1], p.targets[0]] = 3.0
    logits[0, :, 2, 4] = -7.0
    values, gradient = losses.evaluate(loss, p._replace(logits=logits), implementation)
    rounding = 2 * losses.eps(gradient.dtype) if implementation == "kernel" and losses.cuda_kernels() else 0
    assert values[0] == 0 and np.abs(gradient).max() <= rounding


@pytest.mark.rare("reference-float64", "reference-bfloat16")
@pytest.mark.family("layouts")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_large_finite_logits(loss, implementation, dtype):
    """Logits in [-1e4, 1e4] give a finite loss >= 0 and a finite gradient, right up to the rounding of the dtype."""
    rng = np.random.default_rng(1)
    p = losses.problem(16, loss=loss)
    logits = rng.choice([-1e4, -5000.0, -1.0, 0.0, 3.0, 1e4], p.logits.shape)
    p = p._replace(logits=logits).astype(dtype)
    values, gradient = losses.evaluate(loss, p, implementation)
    expected = loss.expected(p)
    assert np.isfinite(values).all() and (values >= 0).all() and np.isfinite(gradient).all()
    # A log-prob of 2e4 is rounded to 2e4 eps; eleven of them make a path.
    limit = 2e4 * 11 * losses.eps(jnp.float64 if dtype == "float64" else jnp.float32) + losses.eps(dtype)
    np.testing.assert_allclose(values, expected[0], rtol=1e-6, atol=0 if loss is losses.RNNT else limit)
    np.testing.assert_allclose(gradient.astype(np.float64), expected[1], atol=limit)


@pytest.mark.family("layouts")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_never_negative(loss, implementation, dtype):
    """Nearly certain targets: the loss is never below 0, not even by a bit."""
    rng = np.random.default_rng(2)
    for scale in (0.0, 5.0, 30.0):
        p = losses.problem(64, 6, 3, 4, loss=loss, scale=1.0, lengths=(rng.integers(1, 7, 64), rng.integers(0, 4, 64)))
        if loss.first_blank:  # a label that is a big blank counts twice
            p = p._replace(targets=np.zeros_like(p.targets))
        logits = p.logits.copy()
        for b in range(64):
            frames = np.sort(rng.integers(0, p.logit_lengths[b], p.target_lengths[b]))
            u = 0
            for t in range(p.logit_lengths[b]):
                while u < len(frames) and frames[u] == t:
                    logits[b, t, u, p.targets[b, u]] += scale
                    u += 1
                logits[b, t, u, -1] += scale
        values, _ = losses.evaluate(loss, p._replace(logits=logits).astype(dtype), implementation)
        assert (values >= 0).all(), values.min()


def test_log_probs_may_be_negative_losses(loss, implementation):
    """Unnormalised scores are summed as they are: zeros count paths."""
    p = losses.problem(1, 4, 3, 5, lengths=([4], [3]))
    p = p._replace(logits=np.zeros_like(p.logits))
    value = jax_rnnt.rnnt_loss(*p, fused_log_softmax=False, implementation=implementation)
    np.testing.assert_allclose(value, -math.log(math.comb(6, 3)), rtol=1e-14)


def test_label_equal_to_blank_counts_twice(implementation):
    """One class: every arc is certain, and the two paths of T=2, U=1 add up to 2."""
    logits = np.zeros((1, 2, 2, 1))
    args = np.array([[0]], np.int32), np.array([2], np.int32), np.array([1], np.int32)
    np.testing.assert_allclose(
        jax_rnnt.rnnt_loss(logits, *args, implementation=implementation), -math.log(2), rtol=1e-14
    )


@pytest.mark.family("layouts")
def test_infinite_loss_can_be_masked(loss, implementation):
    """`where(isinf(loss), 0, loss)` trains on the rest of the batch."""
    p = losses.problem(loss=loss, lengths=([7, 0, 6, 4], [4, 2, 0, 3]))

    def total(x):
        values = loss(x, *p[1:], reduction="none", implementation=implementation)
        return jnp.where(jnp.isinf(values), 0.0, values).sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(p.logits)
    expected = loss.expected(p)
    np.testing.assert_allclose(value, expected[0][[0, 2, 3]].sum(), rtol=1e-13)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-13)


@pytest.mark.family("layouts")
def test_infinite_loss_under_mean(loss, implementation):
    """The mean is inf, its gradient is finite: zero for the impossible sequence."""
    p = losses.problem(loss=loss, lengths=([7, 0, 6, 4], [4, 2, 0, 3]))
    value, gradient = jax.value_and_grad(lambda x: loss(x, *p[1:], implementation=implementation))(p.logits)
    assert value == np.inf
    np.testing.assert_allclose(gradient, loss.expected(p)[1] / 4, atol=1e-13)


@pytest.mark.family("layouts")
@pytest.mark.parametrize("magnitude", [1e30, 3e38])
def test_absurd_logits_hurt_only_themselves(loss, implementation, magnitude):
    """No value is promised, but there is no crash, and the neighbours keep their bits."""
    p = losses.problem(loss=loss, dtype=np.float32)
    values, gradient = losses.evaluate(loss, p, implementation)
    signs = np.random.default_rng(3).choice([-1, 1], p.logits.shape[1:])
    changed = with_value(p, "logits", 1, (signs * magnitude).astype(np.float32))
    got_values, got = losses.evaluate(loss, changed, implementation)
    losses.assert_same_bits(got_values[[0, 2, 3]], values[[0, 2, 3]])
    losses.assert_same_bits(got[[0, 2, 3]], gradient[[0, 2, 3]])


@pytest.mark.parametrize("blank", [0, -1])
def test_two_classes(loss, implementation, blank):
    p = losses.problem(4, 7, 4, 2, loss=loss)
    p = p._replace(targets=np.full_like(p.targets, 1 if blank == 0 else 0))
    got = losses.evaluate(loss, p, implementation, blank=blank)
    losses.assert_matches(got, loss.expected(p, blank=blank), np.float64, 11)


def test_posteriors_of_bad_sequences(implementation):
    """No path: zeros. NaN logits or lengths out of range: no neighbour changes."""
    p = losses.problem(dtype=np.float32)
    clean = jax_rnnt.rnnt_posteriors(*p, implementation=implementation)
    for name, index, value in (("logit_lengths", 1, 0), ("logits", (1, 0, 0), -np.inf), ("logits", (1, 0, 0), np.nan)):
        changed = with_value(p, name, index, value)
        got = jax_rnnt.rnnt_posteriors(*changed, implementation=implementation)
        for x, expected in zip(got, clean, strict=True):
            losses.assert_same_bits(np.asarray(x)[[0, 2, 3]], np.asarray(expected)[[0, 2, 3]])
            if not np.isnan(value).any():
                assert not np.asarray(x)[1].any()


def test_more_sequences_than_a_grid_is_high(implementation):
    """65,535 blocks is the most that CUDA starts in one dimension."""
    batch = 65_600
    logits = np.random.default_rng(0).standard_normal((batch, 1, 1, 2), np.float32)
    lengths = np.ones(batch, np.int32)
    p = losses.Problem(logits, np.zeros((batch, 0), np.int32), lengths, np.zeros(batch, np.int32))
    values, gradient = losses.evaluate(losses.RNNT, p, implementation)
    log_probs = truth.log_softmax(logits[:, 0, 0].astype(np.float64))
    np.testing.assert_allclose(values, -log_probs[:, 1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient[:, 0, 0, 1], np.exp(log_probs[:, 1]) - 1, atol=1e-6)
