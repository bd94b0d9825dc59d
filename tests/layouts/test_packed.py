"""Do packed logits give the loss of the same logits in a padded array?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

EXACT = 1e-12


def evaluate(p, rows, implementation, *, cotangents=None, jit=True, **options):
    def call(x):
        return jax_rnnt.rnnt_loss_packed(x, *p[1:], reduction="none", implementation=implementation, **options)

    def run(x, cotangents):
        values, pull = jax.vjp(call, x)
        return values, pull(cotangents.astype(values.dtype))[0]

    cotangents = np.ones(len(p.targets)) if cotangents is None else cotangents
    return (jax.jit(run) if jit else run)(rows, cotangents)


def test_no_frames(implementation):
    """`max_frames` may be 0: no label is a path of no arcs, a label has none."""
    rows, targets = np.zeros((1, 5)), np.zeros((2, 1), np.int32)
    options = {"max_frames": 0, "reduction": "none", "implementation": implementation}
    got = jax_rnnt.rnnt_loss_packed(rows, targets, np.array([0, 0]), np.array([0, 1]), **options)
    np.testing.assert_array_equal(got, [0, np.inf])


@pytest.mark.rare("reference-float64")
@pytest.mark.parametrize("dtype", [np.float64, np.float32, "bfloat16"])
def test_value_and_gradient(implementation, dtype):
    """Every option; cotangents of each sequence reach its own rows; rows past the end hold NaN."""
    p = losses.problem(dtype=dtype)
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    weights = np.array([1.0, -2.0, 0.0, 3.0])
    for options in ({}, {"clamp": 0.125, "fastemit_lambda": 0.5, "delay_penalty": 0.25, "label_windows": windows}):
        expected, gradient = losses.RNNT.expected(p, **options)
        gradient = losses.packed(p, gradient * weights[:, None, None, None], fill=0)
        rows = losses.packed(p, p.logits)
        got = evaluate(p, rows, implementation, cotangents=weights, max_frames=7, **options)
        losses.assert_matches(got, (expected, gradient), dtype, 11, scale=4.5)
        assert got[1].dtype == rows.dtype and not np.asarray(got[1][-5:]).any()


def test_max_frames(kernel):
    """It is given, or known from concrete lengths, or N. A longer sequence is NaN."""
    p = losses.problem()
    rows, (expected, _) = losses.packed(p, p.logits), losses.RNNT.expected(p)
    np.testing.assert_allclose(evaluate(p, rows, kernel, jit=False)[0], expected, rtol=EXACT)
    traced = jax.jit(lambda *p: jax_rnnt.rnnt_loss_packed(*p, reduction="none"))(rows, *p[1:])
    np.testing.assert_allclose(traced, expected, rtol=EXACT)
    rows[: 7 * 5] = np.nan  # never read
    for implementation in (kernel, "reference"):
        short, gradient = evaluate(p, rows, implementation, max_frames=6)
        np.testing.assert_allclose(short, np.where(p.logit_lengths > 6, np.nan, expected), rtol=EXACT)
        assert not np.asarray(gradient)[: 7 * 5].any()


@pytest.mark.rare("reference")
def test_odd_sequences(implementation):
    """Empty sequences take no rows; sequences beyond the rows are NaN; a NaN row affects only its own sequence."""
    p = losses.problem(5, lengths=([7, 0, 5, 0, 6], [4, 2, 2, 0, 3]))
    rows, (expected, gradient) = losses.packed(p, p.logits), losses.RNNT.expected(p)
    got = evaluate(p, rows, implementation, max_frames=7)
    losses.assert_matches(got, (expected, losses.packed(p, gradient, fill=0)), np.float64, 11)
    assert expected[1] == np.inf and expected[3] == 0
    cut = evaluate(p, rows[:-10], implementation, max_frames=7)
    np.testing.assert_allclose(cut[0], [*expected[:4], np.nan], rtol=EXACT)
    assert not np.asarray(cut[1])[7 * 5 + 5 * 3 :].any()
    hurt = rows.copy()
    hurt[36] = np.nan  # of sequence 2
    values, hurt_gradient = evaluate(p, hurt, implementation, max_frames=7)
    np.testing.assert_array_equal(np.isnan(values), [False, False, True, False, False])
    np.testing.assert_array_equal(np.isnan(hurt_gradient).all(-1), np.isin(np.arange(len(rows)), np.arange(35, 50)))
    for lengths in ([-1, 7], [2**31 - 1, 7], [7, -(2**31)]):
        bad = p.take(slice(2))._replace(logit_lengths=np.array(lengths, np.int32))
        values, gradient = evaluate(bad, rows, implementation, max_frames=7)
        assert np.isnan(values).any() and np.isfinite(gradient).all()


def test_nothing_at_all(implementation):
    p = losses.problem(0, 4, 2, 5)
    values, gradient = evaluate(p, np.zeros((3, 5)), implementation, max_frames=4)
    assert values.shape == (0,) and not np.asarray(gradient).any()
    p = losses.problem(2, 4, 2, 5, lengths=([0, 0], [0, 1]))
    values, _ = evaluate(p, np.zeros((0, 5)), implementation)
    np.testing.assert_array_equal(values, [0, np.inf])


def test_vmap_and_calls(kernel):
    p = losses.problem(dtype=np.float32)
    rows = losses.packed(p, p.logits)
    call = jax.value_and_grad(lambda x: jax_rnnt.rnnt_loss_packed(x, *p[1:], max_frames=7, implementation=kernel))
    value, gradient = jax.jit(call)(rows)
    values, gradients = jax.jit(jax.vmap(call))(np.stack([rows, rows]))
    np.testing.assert_allclose(values, [value] * 2, rtol=1e-6)
    for g in gradients:
        losses.assert_same_bits(g, gradient)
    for run, x in ((call, rows), (jax.vmap(call), np.stack([rows, rows]))):
        text = jax.jit(run).lower(x).compile().as_text()
        assert losses.custom_calls(text) == losses.once(losses.RNNT.gradient_calls)


def test_reductions(kernel):
    p = losses.problem()
    rows = losses.packed(p, p.logits)
    for reduction in ("mean", "sum", "mean_target", "mean_volume"):
        np.testing.assert_allclose(
            jax_rnnt.rnnt_loss_packed(rows, *p[1:], reduction=reduction),
            jax_rnnt.rnnt_loss(*p, reduction=reduction),
            rtol=EXACT,
        )


def test_messages():
    p = losses.problem()
    rows = losses.packed(p, p.logits)
    for arguments, options, name in (
        ((p.logits, *p[1:]), {}, "logits"),
        ((rows, p.targets[0], *p[2:]), {}, "targets"),
        ((rows, p.targets, p.logit_lengths[:3], p.target_lengths), {}, "logit_lengths"),
        ((rows, *p[1:]), {"max_frames": 7.0}, "max_frames"),
        ((rows, *p[1:]), {"max_frames": -1}, "max_frames"),
        ((jnp.asarray(rows), *p[1:]), {"blank": 9}, "blank"),
    ):
        with pytest.raises((ValueError, TypeError), match=rf"rnnt_loss_packed: {name} must"):
            jax_rnnt.rnnt_loss_packed(*arguments, **options)
