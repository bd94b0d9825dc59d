"""Do packed rows give the loss of the same logits in a padded array, wherever they end?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import hlo
import jax_rnnt
from jax_rnnt import PackedLogits

EXACT = 1e-12


@functools.partial(jax.jit, static_argnums=(2, 3))
def evaluate(p, rows, implementation, max_frames=7):
    """(losses [B], gradient of the rows)"""
    loss = jax_rnnt.RNNTLoss(reduction="none", implementation=implementation)
    return compare.with_gradient(lambda x: loss(PackedLogits(x, max_frames), *p[1:]))(rows)


@pytest.mark.slow
def test_max_frames(kernel):
    """It is given, or known from concrete lengths that a trace may close over, or N. A longer sequence is NaN."""
    p = batches.problem()
    rows, (expected, _) = batches.packed(p, p.logits), family.RNNT.expected(p)
    rest = tuple(map(jnp.asarray, p[1:]))
    loss = jax_rnnt.RNNTLoss(reduction="none", implementation=kernel)
    traced = jax.jit(lambda rows, *rest: loss(PackedLogits(rows), *rest))
    closed_over = jax.jit(lambda rows: loss(PackedLogits(rows), *rest))
    for got in (loss(PackedLogits(rows), *p[1:]), traced(rows, *rest), closed_over(rows)):
        np.testing.assert_allclose(got, expected, rtol=EXACT)
    arcs = jax.eval_shape(lambda rows: loss.arc_log_probs(PackedLogits(rows), *rest), rows)
    assert {x.shape for x in arcs.values()} == {(4, 7, 5)}
    rows[: 7 * 5] = np.nan  # never read
    short, gradient = evaluate(p, rows, kernel, max_frames=6)
    np.testing.assert_allclose(short, np.where(p.logit_lengths > 6, np.nan, expected), rtol=EXACT)
    assert not np.asarray(gradient)[: 7 * 5].any()


def test_odd_sequences(kernel):
    """Empty sequences take no rows; sequences beyond the rows are NaN; a NaN row affects only its own sequence."""
    p = batches.problem(5, lengths=([7, 0, 5, 0, 6], [4, 2, 2, 0, 3]))
    rows, (expected, gradient) = batches.packed(p, p.logits), family.RNNT.expected(p)
    got = evaluate(p, rows, kernel)
    compare.assert_matches(got, (expected, batches.packed(p, gradient, fill=0)), np.float64, 11)
    assert expected[1] == np.inf and expected[3] == 0
    cut = evaluate(p, rows[:-10], kernel)
    np.testing.assert_allclose(cut[0], [*expected[:4], np.nan], rtol=EXACT)
    assert not np.asarray(cut[1])[7 * 5 + 5 * 3 :].any()
    hurt = rows.copy()
    hurt[36] = np.nan  # of sequence 2
    values, hurt_gradient = evaluate(p, hurt, kernel)
    np.testing.assert_array_equal(np.isnan(values), [False, False, True, False, False])
    np.testing.assert_array_equal(np.isnan(hurt_gradient).all(-1), np.isin(np.arange(len(rows)), np.arange(35, 50)))
    for lengths in ([-1, 7], [2**31 - 1, 7], [7, -(2**31)]):
        bad = p.take(slice(2))._replace(logit_lengths=np.array(lengths, np.int32))
        values, gradient = evaluate(bad, rows, kernel)
        assert np.isnan(values).any() and np.isfinite(gradient).all()


@pytest.mark.parametrize(("max_frames", "rows"), [(0, 1), (None, 0), (4, 3)])
def test_nothing_at_all(kernel, max_frames, rows):
    """No frames: no label is a path of no arcs, a label has none. No sequences."""
    for batch, expected in ((2, [0, np.inf]), (0, [])):
        p = batches.problem(batch, 4, 2, 5, lengths=([0, 0][:batch], [0, 1][:batch]))
        values, gradient = evaluate(p, np.zeros((rows, 5)), kernel, max_frames=max_frames)
        np.testing.assert_array_equal(values, expected)
        assert not np.any(gradient)


def test_vmap_and_calls(kernel):
    """The same bits, by one custom call of each kind."""
    p = batches.problem(dtype=np.float32)
    rows = batches.packed(p, p.logits)
    loss = jax_rnnt.RNNTLoss(implementation=kernel)
    call = jax.value_and_grad(lambda x: loss(PackedLogits(x, 7), *p[1:]))
    (value, gradient), alone = hlo.compiled(call, rows)
    (values, gradients), twice = hlo.compiled(jax.vmap(call), np.stack([rows, rows]))
    np.testing.assert_allclose(values, [value] * 2, rtol=1e-6)
    compare.assert_same_bits(gradients, np.stack([gradient, gradient]))
    assert hlo.custom_calls(alone) == hlo.custom_calls(twice) == hlo.once(family.RNNT.gradient_calls)
