"""Does every odd sequence get the promised answer, and does it leave the other sequences of its batch alone?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
import reference_numpy as truth

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
T, U, V = 7, 4, 9

# Faults of a sequence of T_b = 5, U_b = 2: field, index, value -> loss. The gradient is zero, or NaN for bad logits.
BAD = {
    **{f"T_b={n}": ("logit_lengths", (), n, np.nan) for n in (-1, T + 1, INT_MIN, INT_MAX)},
    **{f"U_b={m}": ("target_lengths", (), m, np.nan) for m in (-1, U + 1, INT_MIN, INT_MAX)},
    **{f"label={k}": ("targets", 1, k, np.nan) for k in (-1, V, INT_MIN, INT_MAX)},
    "label 0": ("targets", 0, V, np.nan),
    "NaN blank": ("logits", (2, 1, 8), np.nan, np.nan),
    "NaN of another class": ("logits", (0, 0, 3), np.nan, np.nan),
    "NaN row": ("logits", (4, 2), np.nan, np.nan),
    "inf of another class": ("logits", (0, 0, 3), np.inf, np.nan),
    "inf blank": ("logits", (4, 2, 8), np.inf, np.nan),
    "inf twice": ("logits", (4, 2, slice(3, 5)), np.inf, np.nan),
    "NaN of the last class": ("logits", (2, 1, -1), np.nan, np.nan),  # a duration
    "inf of the last class": ("logits", (2, 1, -1), np.inf, np.nan),
    "-inf first row": ("logits", (0, 0), -np.inf, np.inf),
    "-inf last blank": ("logits", (4, 2, 8), -np.inf, np.inf),
    "-inf frame": ("logits", 3, -np.inf, np.inf),
    "-inf": ("logits", ..., -np.inf, np.inf),
    "no frames": ("logit_lengths", (), 0, np.inf),
    "empty window": ("label_windows", 0, [4, 3], np.inf),
    "window after the last frame": ("label_windows", 1, [5, 9], np.inf),
    "windows in the wrong order": ("label_windows", slice(2), [[3, 3], [0, 2]], np.inf),
}


def batch(loss, dtype):
    """(a problem and windows of good sequences, the same where each odd sequence has one fault)"""
    size = 2 * len(BAD) + 1
    p = losses.problem(size, T, U, V, loss=loss, dtype=dtype, lengths=([5] * size, [2] * size))
    good = {**p._asdict(), "label_windows": np.tile(np.array([0, 6], np.int32), (size, U, 1))}
    bad = {name: x.copy() for name, x in good.items()}
    for b, (name, index, value, _) in enumerate(BAD.values()):
        row = bad[name][2 * b + 1, ...]
        row[index] = value
        bad[name][2 * b + 1] = row
    return [(losses.Problem(*(x[name] for name in losses.Problem._fields)), x["label_windows"]) for x in (good, bad)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@losses.every_array
def test_bad_sequences_hurt_only_themselves(loss, implementation, dtype):
    options = {"fastemit_lambda": 0.5, "clamp": 0.25}
    (p, open_), (changed, windows) = batch(loss, dtype)
    clean = losses.evaluate(loss, p, implementation, label_windows=open_, **options)
    got = losses.evaluate(loss, changed, implementation, label_windows=windows, **options)
    expected = loss.expected(changed, label_windows=windows, **options)
    losses.assert_matches(got, expected, dtype, T + U, scale=1.5)
    losses.assert_same_bits([x[::2] for x in got], [x[::2] for x in clean])
    for b, (name, (field, *_, value)) in enumerate(BAD.items()):
        if loss is losses.RNNT or not name.startswith("-inf"):  # another lattice may have a way around
            np.testing.assert_array_equal(got[0][2 * b + 1], value, err_msg=name)
            assert (field == "logits" and np.isnan(value)) or not got[1][2 * b + 1].any(), name


@losses.every_kernel
def test_questions_to_bad_sequences(loss, implementation):
    (p, open_), (changed, windows) = batch(loss, np.float32)
    value = loss.value(implementation=implementation, reduction="none")
    search = loss.value()  # the search has no kernel
    # The answers for faults that make the loss NaN, and where there is no path.
    for question, *answers in (
        (value.posteriors, (np.nan, 0), (np.nan, 0)),
        (value.emission_frames, (np.nan, 0)),
        (value.latency, (np.nan, 0)),
        (value.label_log_probs, (np.nan, None)),  # 0 labels or one have a path
        (search.align, (np.nan, -np.inf), (-1, -1)),
    ):
        run = jax.jit(lambda p, windows, ask=question: ask(*p, label_windows=windows))
        clean, got = (map(np.asarray, jax.tree.leaves(run(*x))) for x in ((p, open_), (changed, windows)))
        for x, expected, (bad, impossible) in zip(got, clean, answers, strict=True):
            losses.assert_same_bits(x[::2], expected[::2])
            for b, (name, (*_, of_loss)) in enumerate(BAD.items()):
                answer = bad if np.isnan(of_loss) else impossible
                if answer is not None and (loss is losses.RNNT or not name.startswith("-inf")):
                    np.testing.assert_array_equal(x[2 * b + 1], answer, err_msg=name)


def test_one_path_of_certainty(implementation):
    """All other classes at -inf: probability 1, loss exactly 0, gradient exactly 0; for CUDA, but for a rounding."""
    p = losses.problem(1, 4, 2, 5, lengths=([4], [2]))
    logits = np.full(p.logits.shape, -np.inf)
    logits[0, 0, [0, 1], p.targets[0]] = 3.0
    logits[0, :, 2, 4] = -7.0
    values, gradient = losses.evaluate(losses.RNNT, p._replace(logits=logits), implementation)
    rounding = 2 * losses.eps(gradient.dtype) if implementation == "kernel" and losses.cuda_kernels() else 0
    assert values[0] == 0 and np.abs(gradient).max() <= rounding


@losses.every_layout
def test_never_negative(loss, implementation):
    """Many paths that share a probability of 1 on the standard lattice: the loss is not below 0, not even by a bit."""
    if loss in losses.SKIPPING:
        pytest.skip("skipped frames add to the probability")
    for dtype, frames in ((np.float32, 12), (np.float64, 12), (np.float32, 1)):
        p = losses.problem(64, frames, 6, 4, loss=loss, scale=1.0, lengths=([frames] * 64, [6] * 64))
        p = p._replace(targets=np.zeros_like(p.targets))
        logits = p.logits.copy()
        logits[..., 1:3] = -100  # neither the label nor the blank
        logits[:, -1, :-1, 0], logits[:, :, -1, 3] = 100, 100
        values, _ = losses.evaluate(loss, p._replace(logits=logits).astype(dtype), implementation)
        assert (values >= 0).all(), values.min()
        if loss.truth == {}:
            assert (values < 1e-5).all(), values.max()


@losses.every_layout
def test_infinite_losses(loss, implementation):
    """The mean is inf with a finite gradient, zero for the impossible sequence; where(isinf) trains on the rest."""
    p = losses.problem(loss=loss, lengths=([7, 0, 6, 4], [4, 2, 0, 3]))
    expected, gradient = loss.expected(p)

    def masked(x):
        values = loss(x, *p[1:], reduction="none", implementation=implementation)
        return jnp.where(jnp.isinf(values), 0.0, values).sum()

    mean = lambda x: loss(x, *p[1:], implementation=implementation)
    for call, value, weight in ((mean, np.inf, 0.25), (masked, expected[[0, 2, 3]].sum(), 1)):
        got = jax.jit(jax.value_and_grad(call))(p.logits)
        np.testing.assert_allclose(got[0], value, rtol=1e-13)
        np.testing.assert_allclose(got[1], weight * gradient, atol=1e-13)


def test_more_sequences_than_a_grid_is_high(implementation):
    """65,535 blocks is the most that CUDA starts in one dimension."""
    size = 65_600
    logits = np.random.default_rng(0).standard_normal((size, 1, 1, 2), np.float32)
    p = losses.Problem(logits, np.zeros((size, 0), np.int32), np.ones(size, np.int32), np.zeros(size, np.int32))
    values, gradient = losses.evaluate(losses.RNNT, p, implementation)
    log_probs = truth.log_softmax(logits[:, 0, 0].astype(np.float64))
    np.testing.assert_allclose(values, -log_probs[:, 1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient[:, 0, 0, 1], np.exp(log_probs[:, 1]) - 1, atol=1e-6)
