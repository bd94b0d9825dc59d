"""Additive emission: logits am[t, v] + lm[u, v], never formed, normalised by one matrix product (Kuang et al. 2022).

    lse[t, u]   = log sum over v of exp(am[t, v]) exp(lm[u, v])
    log_blank   = am[t, blank] + lm[u, blank] - lse            log_label = am[t, y[u]] + lm[u, y[u]] - lse

Smoothing mixes in log-probabilities of either network alone, with p[v] the mean over u of softmax(lm)[u, v]:

    log_x = (1 - l - a) log_x + l (lm[u, x] - log sum exp lm[u]) + a (am[t, x] + log p[x] - log sum over v of exp am p)

All of it is plain JAX: XLA's matrix products do the work.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp

from jax_rnnt.emissions.emission import NO_LABEL, OUTSIDE, Emission, isolate, scale_cotangent
from jax_rnnt.emissions.softmax import accumulation_dtype, one_hot


class Scores(typing.NamedTuple):
    """All leaves have a gradient."""

    am: jax.Array  # [..., T, V]
    lm: jax.Array  # [..., U1, V]
    lm_only: jax.Array | None = None  # weights of smoothing
    am_only: jax.Array | None = None
    unigram: jax.Array | None = None  # [..., V]


def _product(x, y):
    """[..., T, U1] = x [..., T, V] times y [..., U1, V] transposed, in full precision on every device."""
    return jnp.einsum("...tv,...uv->...tu", x, y, precision=jax.lax.Precision.HIGHEST)


def _weighted(weight, x):
    """weight * x, 0 where the weight is 0 and x infinite."""
    return jnp.where(weight == 0, 0, weight * x)


def _relative(x):
    """(x - peak, its exponential), with peak the largest of the last axis; 0 for a row of -inf."""
    peak = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True, initial=-jnp.inf))
    x = x - jnp.where(jnp.isneginf(peak), 0, peak)
    return x, jnp.exp(x)


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
        (am, exp_am), (lm, exp_lm) = (_relative(isolate(x, bad)) for x in (am, lm))
        total = _product(exp_am, exp_lm)

        # Picked by a product with one-hot rows, whose transpose is no scatter, so the gradient has a fixed order.
        hot = one_hot(label[..., 0, :], lm)
        forbidden = jnp.isneginf(am)
        am_label = _product(jnp.where(forbidden, 0, am), hot.astype(dtype))
        am_label = jnp.where(_product(forbidden.astype(dtype), hot.astype(dtype)) > 0, -jnp.inf, am_label)
        lm_label = jnp.sum(jnp.where(hot, lm, 0), -1)[..., None, :]
        # By slot, the score of its class in either network.
        of = {slot: (am[..., v, None], lm[..., v][..., None, :]) for slot, v in zip(self.slots, self.blanks)}
        of["label"] = am_label, lm_label
        scores = {slot: of_am + of_lm for slot, (of_am, of_lm) in of.items()}
        # The product underflows where no class is likely on both sides. `low` is a lower bound, which keeps p <= 1.
        tiny = jnp.finfo(dtype).tiny
        known = (jnp.where(label < 0, -jnp.inf, x) if slot == "label" else x for slot, x in scores.items())
        low = functools.reduce(jnp.maximum, known, jnp.asarray(-1e30, dtype))
        log_total = jnp.where(total > tiny, jnp.log(jnp.where(total > tiny, total, 1)), low)
        log_total = jnp.where(jnp.isnan(total) | jnp.isposinf(total), jnp.nan, log_total)

        planes = {slot: x - log_total for slot, x in scores.items()}
        if logits.lm_only is not None or logits.am_only is not None:
            weights = [jnp.asarray(0 if w is None else w, dtype) for w in (logits.lm_only, logits.am_only)]
            sum_lm = jnp.sum(exp_lm, -1)
            if logits.unigram is None:
                softmax_lm = jnp.where(columns[..., None], exp_lm / sum_lm[..., None], 0)
                count = jnp.maximum(jnp.sum(columns, -1, dtype=jnp.int32), 1).astype(dtype)
                unigram = jnp.sum(softmax_lm, -2) / count[..., None]
            else:
                unigram = logits.unigram.astype(dtype)
            log_unigram = jnp.log(unigram + tiny)
            unigram_label = jnp.sum(jnp.where(hot, log_unigram[..., None, :], 0), -1)[..., None, :]
            norm_am = jnp.log(jnp.sum(exp_am * unigram[..., None, :], -1, keepdims=True) + tiny)
            log_prior = {slot: log_unigram[..., v][..., None, None] for slot, v in zip(self.slots, self.blanks)}
            log_prior["label"] = unigram_label
            for slot, (of_am, of_lm) in of.items():
                mixed = _weighted(1 - weights[0] - weights[1], planes[slot])
                mixed = mixed + _weighted(weights[0], of_lm - jnp.log(sum_lm)[..., None, :])
                planes[slot] = mixed + _weighted(weights[1], of_am + log_prior[slot] - norm_am)
        planes["label"] = jnp.where(label == NO_LABEL, -jnp.inf, planes["label"])
        inside = rows[..., None] & columns[..., None, :]
        planes = {slot: jnp.where(bad[..., None, None], jnp.nan, x) for slot, x in planes.items()}
        return {slot: jnp.where(inside, x, -jnp.inf) for slot, x in planes.items()}

    def forward(self, logits, nodes, *, strict=False):
        if strict:
            message = "implementation='kernel': jax_rnnt has no kernel for the emission of AdditiveLogits; "
            raise NotImplementedError(message + "use implementation=None or 'reference'.")
        return self.reference(logits, nodes), ()

    def mute(self, nodes, scale):
        return nodes  # as in the forward pass, whose products XLA then keeps for the backward pass

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        """Scaled before the pullback, since sequences share leaves; without a clamp, since no logit exists to clip."""
        cotangents = jax.tree.map(lambda ct: scale_cotangent(ct, scale), cotangents)
        gradient = jax.vjp(lambda x: self.reference(x, nodes), logits)[1](cotangents)[0]
        masked = (scale == 0)[..., None, None]
        return gradient._replace(am=jnp.where(masked, 0, gradient.am), lm=jnp.where(masked, 0, gradient.lm))
