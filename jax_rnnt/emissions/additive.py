"""Additive emission: logits am[t, v] + lm[u, v], never formed, normalised by one matrix product (Kuang et al. 2022).

    lse[t, u]   = log sum over v of exp(am[t, v]) exp(lm[u, v])
    log_blank   = am[t, blank] + lm[u, blank] - lse            log_label = am[t, y[u]] + lm[u, y[u]] - lse

Smoothing mixes in log-probabilities of either network alone, with p[v] the mean over u of softmax(lm)[u, v]:

    log_x = (1 - l - a) log_x + l (lm[u, x] - log sum exp lm[u]) + a (am[t, x] + log p[x] - log sum over v of exp am p)

A log-probability of -inf with weight 0 adds nothing. With any other weight the arc is impossible. The loss jumps there,
so the weight has no derivative, and the term adds 0 to its gradient. All other terms have their true derivative at
every weight.

All of it is plain JAX. XLA's matrix products do the work, and `sums.py` what they cannot.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp

from jax_rnnt.emissions import sums
from jax_rnnt.emissions.emission import NO_LABEL, OUTSIDE, Emission, isolate, scale_cotangent
from jax_rnnt.emissions.softmax import accumulation_dtype, one_hot, row_sum


class Scores(typing.NamedTuple):
    """All leaves have a gradient."""

    am: jax.Array  # [..., T, V]
    lm: jax.Array  # [..., U1, V]
    lm_only: jax.Array | None = None  # weights of smoothing
    am_only: jax.Array | None = None
    unigram: jax.Array | None = None  # [..., V]


def _weighted(weight, x):
    """weight * x. Where x is -inf: 0 if the weight is 0, else -inf, and no derivative with respect to the weight."""
    impossible = jnp.isneginf(x)
    return jnp.where(impossible & (weight != 0), -jnp.inf, weight * jnp.where(impossible, 0, x))


def _log_sum_exp(x, axis):
    """-inf where all of x is; differentiable any number of times."""
    row = row_sum(x, axis)
    return jnp.where(row.dead, -jnp.inf, row.peak + row.log_total)


def _log(p):
    """-inf where p is 0, with derivative 0."""
    return jnp.where(p == 0, -jnp.inf, jnp.log(jnp.where(p == 0, 1, p)))


def _log_expectation(x, p):
    """[..., T, 1]: log of the sum over v of exp(x[t, v]) p[v], 0 where that is 0; its derivatives are true at p = 0."""
    value = jax.lax.stop_gradient(_log_sum_exp(x + _log(p), -1)[..., None])
    value = jnp.where(jnp.isneginf(value), 0, value)
    # The sum is 1 now. Where p is 0 or tiny the exponential may overflow, so it is made of two factors.
    half = jnp.exp((x - value) / 2)
    return value + jnp.log(jnp.sum(p * half * half, -1, keepdims=True))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Additive(Emission):
    """Reads `Scores`, each row relative to its largest score: a common offset costs no precision.

    `slots` names the plane of each of `blanks`.
    """

    blanks: tuple[int, ...]
    slots: tuple[str, ...]
    clips = False

    def dimensions(self, logits):
        return logits.am.shape[-2:]

    def normalized(self, logits):
        return logits.lm_only is None and logits.am_only is None

    def reference(self, logits, nodes):
        am, lm = logits.am, logits.lm
        label, num_frames = nodes
        dtype = accumulation_dtype(jnp.promote_types(am.dtype, lm.dtype))
        frame = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + am.shape[-2:-1], am.ndim - 2)
        rows, columns = frame < num_frames[..., None], label[..., 0, :] != OUTSIDE
        am, lm = (jnp.where(x[..., None], y, 0).astype(dtype) for x, y in ((rows, am), (columns, lm)))
        bad = functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x) | jnp.isposinf(x), (-1, -2)) for x in (am, lm)))
        am, lm = isolate(am, bad), isolate(lm, bad)
        peak_am, peak_lm = sums.row_peak(am), jnp.swapaxes(sums.row_peak(lm), -1, -2)
        peak, rest = sums.log_total(am, lm)

        # Picked by a product with one-hot rows, whose transpose is no scatter, so the gradient has a fixed order.
        hot = one_hot(label[..., 0, :], lm)
        picks, forbidden = hot.astype(dtype), jnp.isneginf(am)
        am_label = sums.product("...tv,...uv->...tu", jnp.where(forbidden, 0, am), picks)
        picked_forbidden = sums.product("...tv,...uv->...tu", forbidden.astype(dtype), picks) > 0
        am_label = jnp.where(picked_forbidden, -jnp.inf, am_label)
        lm_label = jnp.sum(jnp.where(hot, lm, 0), -1)[..., None, :]
        # By slot, the score of its class in either network.
        of = {slot: (am[..., v, None], lm[..., v][..., None, :]) for slot, v in zip(self.slots, self.blanks)}
        of["label"] = am_label, lm_label
        planes = {}
        for slot, (of_am, of_lm) in of.items():
            score, error = sums.score(of_am, peak_am, of_lm, peak_lm)
            planes[slot] = (score - peak) + (error - rest)
        weights = [None if w is None else jnp.asarray(w, dtype) for w in (logits.lm_only, logits.am_only)]
        if any(w is not None for w in weights):
            of_joint = 1 - sum(w for w in weights if w is not None)
            planes = {slot: _weighted(of_joint, x) for slot, x in planes.items()}
        row = row_sum(lm)
        if weights[0] is not None:
            for slot, x in planes.items():
                alone = row.log_probability(of[slot][1][..., 0, :])[..., None, :]
                planes[slot] = x + _weighted(weights[0], alone)
        if weights[1] is not None:
            log_prior, norm = self._prior(am - peak_am, row.log_probability(lm), columns, logits.unigram, hot)
            for slot, x in planes.items():
                planes[slot] = x + _weighted(weights[1], (of[slot][0] - peak_am) + log_prior[slot] - norm)
        planes["label"] = jnp.where(label == NO_LABEL, -jnp.inf, planes["label"])
        inside = rows[..., None] & columns[..., None, :]
        planes = {slot: jnp.where(bad[..., None, None], jnp.nan, x) for slot, x in planes.items()}
        return {slot: jnp.where(inside, x, -jnp.inf) for slot, x in planes.items()}

    def _prior(self, am, log_softmax_lm, columns, unigram, hot):
        """(log p by slot, [..., T, 1] log of the expectation of exp(am) under p), p as given or the sequence's own."""
        if unigram is None:
            count = jnp.maximum(jnp.sum(columns, -1, dtype=jnp.int32), 1).astype(am.dtype)[..., None]
            log_p = _log_sum_exp(jnp.where(columns[..., None], log_softmax_lm, -jnp.inf), -2) - jnp.log(count)
            norm = _log_sum_exp(am + log_p[..., None, :], -1)[..., None]
            norm = jnp.where(jnp.isneginf(norm), 0, norm)
        else:
            p = unigram.astype(am.dtype)
            log_p, norm = _log(p), _log_expectation(am, p[..., None, :])
        of = {slot: log_p[..., v][..., None, None] for slot, v in zip(self.slots, self.blanks)}
        return of | {"label": jnp.sum(jnp.where(hot, log_p[..., None, :], 0), -1)[..., None, :]}, norm

    def forward(self, logits, nodes, *, strict=False):
        if strict:
            message = "implementation='kernel': jax_rnnt has no kernel for the emission of AdditiveLogits; "
            raise NotImplementedError(message + "use implementation=None or 'reference'.")
        return self.reference(logits, nodes), ()

    def without(self, nodes, masked):
        label, num_frames = nodes
        return jnp.where(masked[..., None, None], OUTSIDE, label), jnp.where(masked, 0, num_frames)

    def mute(self, nodes, scale):
        return nodes  # as in the forward pass, whose products XLA then keeps for the backward pass

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        """Scaled before the pullback, since sequences share leaves; without a clamp, since no logit exists to clip."""
        cotangents = jax.tree.map(lambda ct: scale_cotangent(ct, scale), cotangents)
        gradient = jax.vjp(lambda x: self.reference(x, nodes), logits)[1](cotangents)[0]
        masked = (scale == 0)[..., None, None]
        return gradient._replace(am=jnp.where(masked, 0, gradient.am), lm=jnp.where(masked, 0, gradient.lm))
