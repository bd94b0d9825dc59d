"""Is the loss of am + lm right where no class is likely on both sides, at any size of scores and any smoothing?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import reference_numpy as truth
from jax_rnnt import AdditiveLogits
from jax_rnnt.emissions._emission import NO_LABEL, Nodes
from jax_rnnt.layouts._additive import Additive, Scores
from slopes import STEP, WEIGHTS, assert_slopes, heads, small

LOWEST = float(np.finfo(np.float32).min)


def dense(am, lm):
    """(lse [..., T, U1], softmax [..., T, U1, V]) of am + lm in float64."""
    x = np.asarray(am, np.float64)[..., :, None, :] + np.asarray(lm, np.float64)[..., None, :, :]
    return np.logaddexp.reduce(x, -1), np.exp(truth.log_softmax(x))


def scores(scale, dtype=np.float32, seed=5):
    """Of 8 sequences, so that tests share a program."""
    B = 8
    p = batches.problem(B)
    rng = np.random.default_rng(seed)
    am, lm = (rng.normal(0, scale, (B, n, 9)).astype(dtype) for n in (7, 5))
    return am, lm, p


def of_sum(am, lm, p, loss=family.RNNT):
    """(losses [B], gradients of am and lm) of the dense sum in float64."""
    logits = am[:, :, None].astype(np.float64) + lm[:, None].astype(np.float64)
    values, gradient = loss.expected(p._replace(logits=logits))
    return values, (gradient.sum(2), gradient.sum(1))


@functools.cache
def compiled(way, loss=family.RNNT):
    """(losses [B], gradients of am and lm)"""

    value = loss.value(reduction="none", implementation=way)
    return jax.jit(compare.with_gradient(lambda am, lm, *rest: value(AdditiveLogits(am, lm), *rest), (0, 1)))


WAYS = (
    (None, family.RNNT, np.float32),
    (None, family.RNNT, np.float64),
    family.slow(None, family.CONSTRAINED, np.float32),
)


@pytest.mark.parametrize(("way", "loss", "dtype"), WAYS, ids=str)
def test_scores_of_any_size(way, loss, dtype):
    """Value and gradient are those of the dense sum; float64 exponentials underflow as well, from 700 on."""
    for scale in (1, 50, 100, 1e3, 1e4):
        am, lm, p = scores(scale, dtype)
        got, wanted = compiled(way, loss)(am, lm, *p[1:]), of_sum(am, lm, p, loss)
        # Arcs are rounded: at 1e4 to 5e-4 in float32. Paths add up to 11 of them, or of pairs.
        length = 22 if loss is family.CONSTRAINED else 11
        limit = max(compare.tolerance(dtype, length), length * scale * compare.eps(dtype))
        np.testing.assert_allclose(got[0], wanted[0], rtol=16 * compare.eps(dtype), err_msg=f"{scale}")
        compare.assert_close(got[1], wanted[1], atol=limit, message=f"{scale}")
    for scale in (1e7, 1e9, 1e20, 1e30) if dtype == np.float32 else ():  # where rounding hides all differences
        am, lm, p = scores(scale, dtype)
        got, wanted = compiled(way, loss)(am, lm, *p[1:]), of_sum(am, lm, p, loss)
        np.testing.assert_allclose(got[0], wanted[0], rtol=16 * compare.eps(dtype), err_msg=f"{scale}")
        assert all(np.isfinite(x).all() for x in got[1]), scale


CASES = {
    "one class on either side": (lambda am, lm: (am.at[..., 1].add(100), lm.at[..., 2].add(100))),
    "two classes that are likely on one side": (lambda am, lm: (am.at[..., 1].add(1e4), lm.at[..., 4].add(1e4))),
    "one class far off on either side": (lambda am, lm: (am.at[..., 1].add(3e4), lm.at[..., 2].add(2e4))),
    "mask": (lambda am, lm: (am.at[..., 3:].set(-1e9), lm.at[..., :3].set(-1e9))),
    "lowest float": (lambda am, lm: (am.at[..., 3:].set(LOWEST), lm.at[..., :3].set(LOWEST))),
    "no mask": (lambda am, lm: (am.at[..., 3:].set(0), lm.at[..., :3].set(0))),
    "mask on one side": (lambda am, lm: (am.at[..., 3:].set(-1e9), lm)),
    "masks of both kinds": (lambda am, lm: (am.at[..., 4:].set(-jnp.inf), lm.at[..., :4].set(-1e9))),
    "-inf": (lambda am, lm: (am.at[:, 2, 5:].set(-jnp.inf).at[..., 1].add(200), lm.at[..., 1].set(-jnp.inf))),
    "offsets": (lambda am, lm: (am.at[..., 1].add(100) + 1024, lm.at[..., 2].add(100) - 512)),
}


def log_probability(am, lm):
    """log_softmax(am + lm)[..., 4], the plane of a blank, [..., T, U1]."""
    nodes = Nodes(jnp.full((*lm.shape[:-2], 1, lm.shape[-2]), NO_LABEL, jnp.int32), jnp.full(len(am), am.shape[-2]))
    return Additive((4,), ("blank",), normalized=True).reference(Scores(am, lm), nodes)["blank"]


@jax.jit
def derivatives(am, lm, cotangent, step):
    """Value, gradients, tangent along a step of am, and second derivatives in three orders."""
    value, pullback = jax.vjp(log_probability, am, lm)
    tangent = jax.jvp(lambda am: log_probability(am, lm), (am,), (step,))[1]
    product = jax.jvp(lambda am: jax.vjp(log_probability, am, lm)[1](cotangent), (am,), (step,))[1]
    twice = jax.grad(lambda lm: jnp.sum(jax.vjp(log_probability, am, lm)[1](cotangent)[0] * step))(lm)
    return value, *pullback(cotangent), tangent, *product, twice


@pytest.mark.parametrize("case", CASES)
def test_sums(case):
    """log-probabilities and derivatives in float32, where products of exponentials are 0."""
    am, lm, _ = scores(2.0)
    same = "no mask" if case == "lowest float" else case  # a mask of every class of a node cancels
    (am, lm), plain = (CASES[name](jnp.asarray(am), jnp.asarray(lm)) for name in (case, same))
    lse, p = dense(*plain)
    rng = np.random.default_rng(0)
    cotangent, step = rng.normal(size=lse.shape).astype(np.float32), rng.normal(size=am.shape).astype(np.float32)
    of_am, of_lm = (np.float64(x[..., 4]) for x in plain)
    score = of_am[..., None] + of_lm[..., None, :]
    wanted = np.where(np.isneginf(score), -np.inf, score - np.where(np.isneginf(lse), 0, lse))
    value, *got = derivatives(am, lm, cotangent, step)
    np.testing.assert_allclose(value, np.where(wanted < LOWEST, -np.inf, wanted), rtol=2e-7, atol=2e-6)
    change, along = (np.arange(9) == 4) - p, step[..., :, None, :]
    first = change * cotangent[..., None]
    second = -p * (along - (p * along).sum(-1, keepdims=True)) * cotangent[..., None]
    expected = first.sum(2), first.sum(1), (change * along).sum(-1), second.sum(2), second.sum(1), second.sum(1)
    compare.assert_close(tuple(got), expected, atol=1e-5)


def mixed():
    """Arrays of ordinary sequences and of such whose exponentials underflow, in turns."""
    am, lm, p = scores(2.0)
    am[1::2, :, 1] += 300
    lm[1::2, :, 2] += 300
    return am, lm, *p[1:]


@pytest.mark.slow
def test_no_sequence_changes_another():
    """An ordinary sequence has the same bits alone, beside others, and under vmap."""
    arrays = mixed()
    together = compiled(None)(*arrays)
    ordinary = compiled(None)(*(np.repeat(x[::2], 2, 0) for x in arrays))
    mapped = jax.vmap(compiled(None))(*(x.reshape(4, 2, *x.shape[1:]) for x in arrays))
    compare.assert_same_bits(*(jax.tree.map(lambda x: x[::2], found) for found in (together, ordinary)))
    compare.assert_same_bits(together, jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), mapped))


# -------------------------------------------------------------------------------------------------------- smoothing
def smoothed_truth(p, am, lm, lm_only, am_only, penalty=0.0, unigram=None):
    """Losses [B] of the formula in the docstring of `AdditiveLogits`, in the log domain, dense, in float64."""
    am, lm = np.float64(am), np.float64(lm)
    out = np.zeros(len(p.logit_lengths))
    prior = None if unigram is None else np.broadcast_to(unigram, (len(out), lm.shape[-1]))
    for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths, strict=True)):
        joint = truth.log_softmax(am[b, :n, None] + lm[b, None, : m + 1])
        lm_alone = truth.log_softmax(lm[b, : m + 1])
        with np.errstate(divide="ignore"):
            log_p = np.logaddexp.reduce(lm_alone, 0) - np.log(m + 1) if prior is None else np.log(prior[b])
        am_alone = am[b, :n] + log_p - np.logaddexp.reduce(am[b, :n] + log_p, -1)[:, None]
        terms = (1 - lm_only - am_only, joint), (lm_only, lm_alone[None]), (am_only, am_alone[:, None])
        arcs = sum(w * np.where(np.isneginf(x), -np.inf if w else 0, np.where(np.isneginf(x), 0, x)) for w, x in terms)
        label = np.full((n, m + 1), -np.inf)
        for u in range(m):
            label[:, u] = arcs[:, u, p.targets[b, u]] + penalty * ((n - 1) / 2 - np.arange(n))
        out[b] = -truth.log_likelihood(truth.STANDARD, {"blank": arcs[..., -1], "label": label}, n, m)
    return out


@jax.jit
def smoothed(leaves, rest, weights):
    """(losses [B], gradients of their weighted sum), of the leaves that `smoothed_truth` takes."""

    def losses(am, lm, lm_only, am_only, penalty, unigram=None):
        loss = jax_rnnt.RNNTLoss(reduction="none", delay_penalty=penalty)
        return loss(AdditiveLogits(am, lm, lm_only, am_only, unigram), *rest)

    values, pull = jax.vjp(losses, *leaves)
    return values, pull(weights)


WEIGHTS_OF_SMOOTHING = ((0.0, 0.0), (0.2, 0.0), (0.0, 1.0), (1.0, 0.0), (0.6, 0.4), (-0.3, 0.5), (1.5, 0.25))
UNIGRAMS = {"own_unigram": None, "unigram_of_each": (2, 6)}  # their shapes


@pytest.mark.slow
@pytest.mark.parametrize("shape", UNIGRAMS.values(), ids=UNIGRAMS)
def test_slopes_at_every_weight(shape):
    """Scales that are 0, that add up to 1, or lie outside [0, 1]; a unigram that is 0 at a class that no arc reads."""
    p, (am, lm) = small(), heads()
    own, unigram = shape is None, np.exp(np.random.default_rng(1).normal(size=shape))  # any weights
    unread = [next(v for v in range(6) if v not in {5, *p.targets[b]}) for b in range(2)]

    along = lambda *leaves: smoothed_truth(p, *leaves) @ WEIGHTS
    for scales in WEIGHTS_OF_SMOOTHING:
        leaves = (am, lm, *map(np.asarray, (*scales, 0.3))) + (() if own else (unigram,))
        values, gradients = smoothed(leaves, p[1:], WEIGHTS)
        np.testing.assert_allclose(values @ WEIGHTS, along(*leaves), rtol=1e-12)
        assert_slopes(gradients, along, leaves)
    if own:
        return
    unigram[range(2), unread] = 0
    leaves = am, lm, *map(np.asarray, (0.2, 0.3, 0.0)), unigram
    up = np.zeros_like(unigram)
    up[range(2), unread] = STEP  # a probability has no lower side
    none, half, whole = (along(*leaves[:5], unigram + h * up) for h in (0, 0.5, 1))
    got = np.sum(smoothed(leaves, p[1:], WEIGHTS)[1][5] * up)
    np.testing.assert_allclose(got, 4 * half - whole - 3 * none, rtol=1e-6)


@pytest.mark.slow
def test_impossible_classes_of_smoothing():
    """A log-probability of -inf adds 0 at weight 0, and its weight then has no derivative there: 0."""
    p, (am, lm) = small(), heads()
    lm[0, 0, p.targets[0, 0]] = -np.inf  # the first label of the first sequence is impossible
    unigram = np.ones((2, 6))
    unigram[1, 5] = 0  # so is the blank of the second, in the prior
    for scales in ((0.0, 0.0), (0.0, 1.0), (0.0, 0.25), (0.25, 0.0)):
        leaves = (am, lm, *map(np.asarray, (*scales, 0.0)), unigram)
        values, gradients = smoothed(leaves, p[1:], np.ones(2))
        np.testing.assert_allclose(values, smoothed_truth(p, *leaves), rtol=1e-12)
        assert all(np.isfinite(g).all() for g in gradients), scales
    assert np.isposinf(smoothed_truth(p, am, lm, 0.25, 0.0, 0.0, unigram)[0])


@pytest.mark.slow
def test_smoothing_of_large_scores():
    """In float32, where softmax(lm) underflows; sums of the log-probabilities are rounded relative to their size."""
    scales = np.float32(0.25), np.float32(0.15)
    for scale in (1.0, 100.0, 1e3, 1e4):
        am, lm, p = scores(scale)
        values, _ = smoothed((am, lm, *scales, np.float32(0)), p[1:], np.ones(8, np.float32))
        np.testing.assert_allclose(values, smoothed_truth(p, am, lm, *scales), rtol=2e-6, err_msg=f"{scale}")
