"""Are value and gradient those of the definition, for every length, option and batch shape?

test_targets.py has what depends on kernels alone: vocabularies, blanks, dtypes, instruction sets.
"""

import chex
import jax
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import reference_numpy as truth

WINDOWS = [[0, 2], [1, 4], [1, 6], [3, 6]], [[0, 3], [0, 1], [9, 3], [0, 0]], [[5, 1]] * 4  # of three sequences
WINDOWS = np.array([*WINDOWS, [[0, 1], [0, 9], [2, 3], [-5, -4]]], np.int32)
ALL = {"fastemit_lambda": 0.25, "clamp": 0.125, "delay_penalty": 0.125}
EVERY_LENGTH = truth.every_length(5, 3)


def batch(loss, dtype, blank):
    """Ragged sequences, those with labels that are the blank, then every (T_b, U_b) up to (5, 3)."""
    ragged = list(zip(batches.FRAMES, batches.LABELS))
    lengths = np.array([*ragged, *[(4, 2)] * 4, *EVERY_LENGTH]).T
    p = batches.problem(lengths.shape[1], 7, 4, 9, loss=loss, dtype=dtype, lengths=lengths)
    blank %= 9
    p.targets[4:8, :2] = np.array(np.meshgrid([0, blank or 1], [0, blank or 1])).T.reshape(4, 2)
    return batches.poisoned(p)


def check(loss, implementation, p, **options):
    got = compare.evaluate(loss, p, implementation, **options)
    scale = 1 + options.get("fastemit_lambda", 0)
    compare.assert_matches(got, loss.expected(p, **options), p.logits.dtype, 11, scale=scale)
    return got


@family.implementations(
    family.RNNT,
    family.TDT,
    slowly=(*family.OTHERS, family.TILES, family.BAND),
    reference_slowly=(family.TDT, family.HAT),  # test_emissions and test_lattices have those of the others
)
def test_every_loss(loss, implementation):
    """Every length and option; arbitrary windows beyond the lengths. No frames and no labels cost 0, and no -0."""
    cases = (np.float64, -1, True), (np.float32, 3, False)
    one = loss in family.SKIPPING or (implementation == "reference" and loss is not family.RNNT)
    for dtype, blank, fused in cases[: one or None]:
        p = batch(loss, dtype, loss.blank(blank))
        given = {"blank": loss.blank(blank), "fused_log_softmax": fused}
        windows = np.tile(WINDOWS, (len(p.targets) // 4, 1, 1))
        anywhere = np.broadcast_to(np.array([0, 7], np.int32), windows.shape)
        values, gradient = check(loss, implementation, p, label_windows=anywhere, **given)
        assert values[8] == 0 and not np.signbit(values[8]) and values[9] == np.inf  # no frames
        assert not gradient[8:12].any()
        check(loss, implementation, p, label_windows=windows, **given)
        check(loss, implementation, p, label_windows=windows, **ALL, **given)


# What differs between logits and lattice. Around kernels and reference is the same code: one of them tells.
WAYS = pytest.mark.parametrize("loss", [family.RNNT, family.TDT, family.TILES], ids=str)


def test_torchaudio_s_call(kernel):
    """`rnnt_loss` is RNNTLoss with torchaudio's positional arguments; the others need names."""
    p = batches.problem()
    options = {"blank": 2, "clamp": 0.25, "fused_log_softmax": False}
    further = {"fastemit_lambda": 0.5, "delay_penalty": 0.125, "label_windows": WINDOWS, "inplace": False}
    positional = lambda x: jax_rnnt.rnnt_loss(x, *p[1:], 2, 0.25, "none", False, implementation=kernel, **further)
    named = lambda x: family.RNNT(x, *p[1:], reduction="none", implementation=kernel, **options, **further)
    of_function, of_loss = (
        jax.value_and_grad(lambda x, call=call: call(x).sum())(p.logits) for call in (positional, named)
    )
    compare.assert_same_bits(of_function, of_loss)
    with pytest.raises(TypeError):
        jax_rnnt.rnnt_loss(*p, 2, 0.25, "none", False, 0.1)
    with pytest.raises(TypeError, match="fast_emit"):
        jax_rnnt.rnnt_loss(*p, fast_emit=0.1)


@WAYS
def test_any_number_of_batch_dimensions(loss, kernel):
    p = batches.problem(loss=loss)
    for batch in ((2, 1, 2), ()) if loss is family.RNNT else ((2, 1, 2),):
        flat = p.take(slice(int(np.prod(batch))))
        shaped = batches.Problem(*(x.reshape(batch + x.shape[1:]) for x in flat))
        windows = WINDOWS[: len(flat.targets)]
        got = compare.evaluate(loss, shaped, kernel, label_windows=windows.reshape(*batch, 4, 2), clamp=0.25)
        chex.assert_shape(got, (batch, shaped.logits.shape))
        got = got[0].reshape(-1), got[1].reshape(flat.logits.shape)
        compare.assert_matches(got, loss.expected(flat, label_windows=windows, clamp=0.25), np.float64, 11)


REDUCTIONS = "none", "mean", "sum", "mean_target", "mean_volume"


def test_reductions(kernel):
    """FastEmit and clamp act before the reduction's weights. Without labels, lengths divide by 1."""
    p, options = batches.problem(), {"clamp": 0.125, "fastemit_lambda": 0.5}

    losses = {name: family.RNNT.value(reduction=name, implementation=kernel, **options) for name in REDUCTIONS}
    run = jax.jit(lambda p: {name: compare.with_gradient(loss)(*p) for name, loss in losses.items()})
    for q in (p, p._replace(target_lengths=0 * p.target_lengths)):
        per_sequence, per_logit = family.RNNT.expected(q, **options)
        for reduction, (value, gradient) in run(q).items():
            expected, weights = truth.reduce(per_sequence, q.target_lengths, reduction)
            np.testing.assert_allclose(value, expected, rtol=1e-12, err_msg=reduction)
            np.testing.assert_allclose(gradient, weights[:, None, None, None] * per_logit, atol=1e-13)


def test_no_sequences(implementation):
    """Every reduction is defined."""
    p = batches.problem(0, 4, 2, 5, lengths=([], []))
    got = compare.evaluate(family.RNNT, p, implementation)
    chex.assert_shape(got, ((0,), p.logits.shape))
    found = jax.jit(lambda *p: [family.RNNT(*p, reduction=r, implementation=implementation) for r in REDUCTIONS[1:]])
    assert np.array(found(*p)).tolist() == [0, 0, 0, 0]
