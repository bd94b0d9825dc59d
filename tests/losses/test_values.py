"""Are value and gradient those of the definition, for every length, vocabulary, blank, option and batch shape?"""

import jax
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth

WINDOWS = [[0, 2], [1, 4], [1, 6], [3, 6]], [[0, 3], [0, 1], [9, 3], [0, 0]], [[5, 1]] * 4  # of three sequences
WINDOWS = np.array([*WINDOWS, [[0, 1], [0, 9], [2, 3], [-5, -4]]], np.int32)
ALL = {"fastemit_lambda": 0.25, "clamp": 0.125, "delay_penalty": 0.125, "label_windows": WINDOWS}


def check(loss, implementation, p, blank=-1, **options):
    dtype, (_, T, U1, _) = p.logits.dtype, p.logits.shape
    got = losses.evaluate(loss, losses.poisoned(p), implementation, blank=blank, **options)
    scale = 1 + options.get("fastemit_lambda", 0)
    losses.assert_matches(got, loss.expected(p, blank=blank, **options), dtype, T + U1 - 1, scale=scale)
    return got


@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
@pytest.mark.parametrize("options", [{}, ALL, {"label_windows": WINDOWS}], ids=["plain", "all", "windows"])
@losses.every_layout
def test_every_loss(loss, implementation, options, fused):
    """With the first blank, one amid the classes and the last one; arbitrary windows beyond the lengths."""
    for dtype, blank in ((np.float64, 0), (np.float64, -1), (np.float32, 3)):
        p = losses.problem(loss=loss, dtype=dtype)
        check(loss, implementation, p, loss.blank(blank), fused_log_softmax=fused, **options)


@losses.every
def test_every_small_length(loss, implementation):
    """One batch has every (T_b, U_b) up to (5, 3), no frames and no labels among them."""
    lengths = np.array(truth.every_length(5, 3)).T
    p = losses.problem(lengths.shape[1], 5, 3, 6, loss=loss, lengths=lengths)
    values, gradient = check(loss, implementation, p._replace(targets=p.targets % 3))
    assert values[0] == 0 and not np.signbit(values[0]) and values[1] == np.inf  # no frames
    assert not gradient[:4].any()


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 1000])
def test_vocabulary_sizes(kernel, classes):
    """Sizes around every vector width, since the remainder of a row has its own code."""
    for dtype in (np.float32, np.float64):
        p = losses.problem(2, 3, 2, classes, dtype=dtype, lengths=([3, 2], [2, 1]))
        for blank in {0, classes - 1}:
            check(losses.RNNT, kernel, p, blank)


def test_the_last_column_is_scaled_too(kernel):
    """It has a vector of its own if labels fill whole ones. Unscaled, 350 factors of 1/3 leave the range of floats."""
    lengths = [350, 349, 350, 348], [32, 16, 8, 4]
    check(losses.RNNT, kernel, losses.problem(4, 350, 32, 3, dtype=np.float32, scale=0, lengths=lengths))


@losses.every_layout
def test_label_equal_to_blank(loss, implementation):
    """A class that is both blank and label gets both terms."""
    blank = loss.blank(0)
    targets = np.array(np.meshgrid([0, blank or 1], [0, blank or 1])).T.reshape(4, 2).astype(np.int32)
    p = losses.problem(4, 4, 2, 5, loss=loss, lengths=([4] * 4, [2] * 4))._replace(targets=targets)
    check(loss, implementation, p, blank, fastemit_lambda=0.25)


@losses.every_layout
def test_other_calls(loss, implementation):
    """Without a gradient another kernel runs; without jit, each stage alone; by default, one of the implementations."""
    for dtype in (np.float32, np.float64):
        p = losses.problem(loss=loss, dtype=dtype)
        expected = losses.evaluate(loss, p, implementation)[0]
        alone = jax.jit(lambda *p: loss(*p, reduction="none", implementation=implementation))(*p)
        eager = loss(*p, reduction="none", implementation=implementation)
        for got in (alone, eager, loss(*p, reduction="none")):
            np.testing.assert_allclose(got, expected, rtol=losses.tolerance(dtype, 11))


def test_torchaudio_s_call(implementation):
    """`rnnt_loss` is RNNTLoss with torchaudio's positional arguments; the others need names."""
    p = losses.problem()
    got = jax_rnnt.rnnt_loss(*p, 2, 0.25, "none", False, implementation=implementation)
    options = {"blank": 2, "clamp": 0.25, "fused_log_softmax": False}
    np.testing.assert_array_equal(got, losses.RNNT(*p, reduction="none", implementation=implementation, **options))
    further = {"fastemit_lambda": 0.5, "delay_penalty": 0.125, "label_windows": WINDOWS, "inplace": False}
    of_function, of_loss = (
        jax.grad(lambda x: f(x, *p[1:], **options, **further, implementation=implementation))(p.logits)
        for f in (jax_rnnt.rnnt_loss, losses.RNNT)
    )
    np.testing.assert_array_equal(of_function, of_loss)
    with pytest.raises(TypeError):
        jax_rnnt.rnnt_loss(*p, 2, 0.25, "none", False, 0.1)
    with pytest.raises(TypeError, match="fast_emit"):
        jax_rnnt.rnnt_loss(*p, fast_emit=0.1)


@pytest.mark.parametrize("batch", [(), (2, 2), (2, 1, 2)], ids=str)
@losses.every_layout
def test_any_number_of_batch_dimensions(loss, implementation, batch):
    p = losses.problem(loss=loss)
    flat = p.take(slice(int(np.prod(batch))))
    shaped = losses.Problem(*(x.reshape(batch + x.shape[1:]) for x in flat))
    values, gradient = losses.evaluate(loss, shaped, implementation)
    assert values.shape == batch and gradient.shape == shaped.logits.shape
    got = values.reshape(-1), gradient.reshape(flat.logits.shape)
    losses.assert_matches(got, loss.expected(flat), np.float64, 11)
    reduced = loss(*shaped, implementation=implementation)
    assert reduced.shape == ()
    np.testing.assert_allclose(reduced, np.mean(values), rtol=1e-13)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "mean_target", "mean_volume"])
def test_reductions(implementation, reduction):
    """FastEmit and clamp act before the reduction's weights. Without labels, lengths divide by 1."""
    p, options = losses.problem(), {"clamp": 0.125, "fastemit_lambda": 0.5}

    @jax.jit
    def run(p):
        def reduced(x):
            values = losses.RNNT(x, *p[1:], reduction=reduction, implementation=implementation, **options)
            return values.sum(), values

        return jax.grad(reduced, has_aux=True)(p.logits)

    for q in (p, p._replace(target_lengths=0 * p.target_lengths)):
        gradient, value = run(q)
        per_sequence, per_logit = losses.RNNT.expected(q, **options)
        expected, weights = truth.reduce(per_sequence, q.target_lengths, reduction)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
        np.testing.assert_allclose(gradient, weights[:, None, None, None] * per_logit, atol=1e-13)


@losses.every_layout
def test_empty_dimensions(loss, implementation):
    """No sequences, no frames, no labels in the arrays themselves; every reduction is defined."""
    for B, T, U, V in ((0, 4, 2, 5), (2, 0, 2, 5), (2, 4, 0, 5), (2, 0, 0, 3)):
        p = losses.problem(B, T, U, V, loss=loss, lengths=([T, max(T - 1, 0)][:B], [U, 0][:B]))
        got = losses.evaluate(loss, p, implementation)
        losses.assert_matches(got, loss.expected(p), np.float64, 6)
        if implementation == "kernel":  # the reductions are the same code for both
            for reduction in ("sum", "mean", "mean_target", "mean_volume"):
                value = loss(*p, reduction=reduction, implementation=implementation)
                expected, _ = truth.reduce(got[0], p.target_lengths, reduction)
                np.testing.assert_allclose(value, expected, rtol=1e-14)
