"""AdditiveLogits: logits am[t, v] + lm[u, v], never formed, normalised by one matrix product (Kuang et al. 2022).

    lse[t, u]   = log sum over v of exp(am[t, v]) exp(lm[u, v])
    log_blank   = am[t, blank] + lm[u, blank] - lse            log_label = am[t, y[u]] + lm[u, y[u]] - lse

Smoothing mixes in log-probabilities of either network alone, with p[v] the mean over u of softmax(lm)[u, v]:

    log_x = (1 - l - a) log_x + l (lm[u, x] - log sum exp lm[u]) + a (am[t, x] + log p[x] - log sum over v of exp am p)

A log-probability of -inf with weight 0 adds nothing. With any other weight the arc is impossible. The loss jumps there,
so the weight has no derivative, and the term adds 0 to its gradient. All other terms have their true derivative at
every weight.

All of it is plain JAX. XLA's matrix products do the work; `_additive_sums.py` does the rest.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.emissions._emission import NO_LABEL, OUTSIDE, Emission, Rows, isolate, scale_cotangent
from jax_rnnt.emissions._softmax import accumulation_dtype, one_hot, row_sum
from jax_rnnt.layouts import _additive_sums as sums
from jax_rnnt.layouts._layout import Layout, unsplit_by_reference


class Scores(typing.NamedTuple):
    """The arrays of additive scores; all leaves have a gradient."""

    am: jax.Array  # [..., T, V]
    lm: jax.Array  # [..., U1, V]
    lm_only: jax.Array | None = None  # weights of smoothing
    am_only: jax.Array | None = None
    unigram: jax.Array | None = None  # [..., V]


def _weighted(weight, x):
    """Returns weight * x. Where x is -inf: 0 if the weight is 0, else -inf, without a derivative for the weight."""
    impossible = jnp.isneginf(x)
    return jnp.where(impossible & (weight != 0), -jnp.inf, weight * jnp.where(impossible, 0, x))


def _log_sum_exp(x, axis):
    """Returns log sum exp, -inf where all of x is -inf; it is differentiable any number of times."""
    row = row_sum(x, axis)
    return jnp.where(row.dead, -jnp.inf, row.peak + row.log_total)


def _log(p):
    """Returns log p, -inf where p is 0, with derivative 0 there."""
    return jnp.where(p == 0, -jnp.inf, jnp.log(jnp.where(p == 0, 1, p)))


def _log_expectation(x, p):
    """Returns [..., T, 1]: log of the sum over v of exp(x[t, v]) p[v], 0 where that is 0; derivatives hold at p = 0."""
    value = jax.lax.stop_gradient(_log_sum_exp(x + _log(p), -1)[..., None])
    value = jnp.where(jnp.isneginf(value), 0, value)
    # The sum is 1 now. Where p is 0 or tiny, the exponential may overflow, so it is split into two factors.
    half = jnp.exp((x - value) / 2)
    return value + jnp.log(jnp.sum(p * half * half, -1, keepdims=True))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Additive(Rows[Scores, tuple[()]]):
    """Reads `Scores`, each row relative to its largest score, so that a common offset costs no precision.

    `slots` names the plane of each of `blanks`.
    """

    blanks: tuple[int, ...]
    slots: tuple[str, ...]
    normalized: bool  # without smoothing
    clips = False

    def reference(self, logits, nodes):
        am, lm = logits.am, logits.lm
        # Arrays on the host are copied to every device; products need both sides split alike.
        label, num_frames = _xla.shard_like(am, nodes.label), _xla.shard_like(am, nodes.num_frames)
        dtype = accumulation_dtype(jnp.promote_types(am.dtype, lm.dtype))
        frame = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + am.shape[-2:-1], am.ndim - 2)
        rows, columns = frame < num_frames[..., None], label[..., 0, :] != OUTSIDE
        am, lm = (jnp.where(x[..., None], y, 0).astype(dtype) for x, y in ((rows, am), (columns, lm)))
        bad = functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x) | jnp.isposinf(x), (-1, -2)) for x in (am, lm)))
        am, lm = isolate(am, bad), isolate(lm, bad)
        peak_am, peak_lm = sums.row_peak(am), jnp.swapaxes(sums.row_peak(lm), -1, -2)
        peak, above_peak = sums.log_total(am, lm)

        # It picks by a product with one-hot rows, whose transpose is no scatter, so the gradient has a fixed order.
        hot = one_hot(label[..., 0, :], lm)
        picks, forbidden = hot.astype(dtype), jnp.isneginf(am)
        am_label = sums.product("...tv,...uv->...tu", jnp.where(forbidden, 0, am), picks)
        picked_forbidden = sums.product("...tv,...uv->...tu", forbidden.astype(dtype), picks) > 0
        am_label = jnp.where(picked_forbidden, -jnp.inf, am_label)
        lm_label = jnp.sum(jnp.where(hot, lm, 0), -1)[..., None, :]
        # The score of each slot's class in either network.
        scores = {slot: (am[..., v, None], lm[..., v][..., None, :]) for slot, v in zip(self.slots, self.blanks)}
        scores["label"] = am_label, lm_label
        planes = {}
        for slot, (am_part, lm_part) in scores.items():
            score, error = sums.score(am_part, peak_am, lm_part, peak_lm)
            planes[slot] = (score - peak) + (error - above_peak)
        weights = [None if w is None else jnp.asarray(w, dtype) for w in (logits.lm_only, logits.am_only)]
        if any(w is not None for w in weights):
            joint_part = 1 - sum(w for w in weights if w is not None)
            planes = {slot: _weighted(joint_part, x) for slot, x in planes.items()}
        row = row_sum(lm)
        if weights[0] is not None:
            for slot, x in planes.items():
                alone = row.log_probability(scores[slot][1][..., 0, :])[..., None, :]
                planes[slot] = x + _weighted(weights[0], alone)
        if weights[1] is not None:
            log_prior, norm = self._prior(am - peak_am, row.log_probability(lm), columns, logits.unigram, hot)
            for slot, x in planes.items():
                planes[slot] = x + _weighted(weights[1], (scores[slot][0] - peak_am) + log_prior[slot] - norm)
        planes["label"] = jnp.where(label == NO_LABEL, -jnp.inf, planes["label"])
        inside = rows[..., None] & columns[..., None, :]
        planes = {slot: jnp.where(bad[..., None, None], jnp.nan, x) for slot, x in planes.items()}
        return {slot: jnp.where(inside, x, -jnp.inf) for slot, x in planes.items()}

    def _prior(self, am, log_softmax_lm, columns, unigram, hot):
        """Returns (log p by slot, [..., T, 1] log of the expectation of exp(am) under p); p is given or made here."""
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

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        """Scales before the pullback, since sequences share leaves; clips nothing, since there are no logits to clip.

        Masked sequences are read as in the forward pass, whose products XLA then keeps for the backward pass.
        """
        cotangents = jax.tree.map(lambda ct: scale_cotangent(ct, scale), cotangents)
        gradient = jax.vjp(lambda x: self.reference(x, nodes), logits)[1](cotangents)[0]
        masked = (scale == 0)[..., None, None]
        return gradient._replace(am=jnp.where(masked, 0, gradient.am), lm=jnp.where(masked, 0, gradient.lm))


@keywords
@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class AdditiveLogits(Layout):
    """Logits am[t, v] + lm[u, v], never formed: a matrix product normalises the softmax (Kuang et al. 2022).

    T frames, U labels, V classes; `...` is any number of batch dimensions. Smoothing mixes in log-probabilities of
    either network alone; p[v] is the mean over u of softmax(lm)[u, v] of the same sequence::

        log_x(t, u) = (1 - l - a) log_softmax(am[t] + lm[u])[x] + l log_softmax(lm[u])[x]
                      + a (am[t, x] + log p[x] - log sum over v of exp(am[t, v]) p[v])

    All arrays and scales have their true gradient, at any size of scores and any scales. A term of -inf adds 0 if its
    scale is 0, else it makes the arc impossible; the loss jumps there, and the term adds 0 to the scales' gradients.
    There are no logits to clip: a loss whose `clamp` is above 0 is an error, or, if it is traced, NaN with a gradient
    of NaN.

    Parameters
    ----------
    am : Array, float16 | bfloat16 | float32 | float64 [..., T, V]
        Scores of the encoder ("acoustic model").
    lm : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, V]
        Scores of the predictor ("language model").
    lm_only_scale, am_only_scale : float or scalar Array, default 0.0
        l and a above. k2's recipes use 0.25 and 0.0.
    unigram : Array, floating [V] or [..., V], optional
        p above, in place of the sequence's own; 0: impossible. k2 takes the mean over the whole batch, with padding.

    See Also
    --------
    prune_ranges : Chooses the columns that a pruned loss keeps, from the posteriors of these logits.

    Notes
    -----
    The matrix products are plain JAX, so implementation="kernel" is an error.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import AdditiveLogits, RNNTLoss
    >>> logits = AdditiveLogits(jnp.zeros((4, 5)), jnp.zeros((3, 5)))
    >>> loss = RNNTLoss()(logits, jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    7.354
    """

    instead = "compute with its arrays am and lm"
    sides = "lm", "am"
    batched = "am", "lm"

    am: jax.Array
    lm: jax.Array
    lm_only_scale: float | jax.Array = 0.0
    am_only_scale: float | jax.Array = 0.0
    unigram: jax.Array | None = None

    @property
    def shape(self):
        return (*self.am.shape[:-1], *self.lm.shape[-2:])

    @property
    def dtype(self):
        return jnp.promote_types(self.am.dtype, self.lm.dtype)

    def checked(self):
        am = _checks.floating("am", self.am, 2, "[..., T, V]")
        lm = _checks.floating("lm", self.lm, 2, "[..., U + 1, V]")
        batch, classes = am.shape[:-2], am.shape[-1]
        if lm.shape[:-2] != batch or lm.shape[-1] != classes or classes < 1 or lm.shape[-2] < 1:
            expected = f"shape [..., U + 1, V] with the batch dimensions and V of am, {tuple(am.shape)}"
            raise _checks.bad_value(f"lm must have {expected}, got {tuple(lm.shape)}.")
        for name, matrix in (("am", am), ("lm", lm)):
            _checks.unsplit(name, matrix, {-1: "V"})
        lm_only = _checks.number("lm_only_scale", self.lm_only_scale)
        am_only = _checks.number("am_only_scale", self.am_only_scale)
        unigram = self.unigram
        if unigram is not None:
            unigram = _checks.floating("unigram", unigram, 1, "[..., V]")
            if unigram.shape not in ((classes,), (*batch, classes)):
                expected = f"shape {(classes,)} or {(*batch, classes)}"
                raise _checks.bad_value(f"unigram must have {expected}, got {unigram.shape}.")
        am, lm = _xla.split_alike(len(batch), am, lm)
        return AdditiveLogits(am, lm, lm_only, am_only, unigram)

    def emission(self, loss, softmax, *sequences):
        name = type(loss).__name__
        if softmax.num_durations or softmax.bernoulli or not softmax.normalize:
            reason = (
                "durations are a second softmax"
                if softmax.num_durations
                else "the blank is no part of the softmax"
                if softmax.bernoulli
                else "fused_log_softmax=False leaves nothing to normalise"
            )
            expected = "an array, JointLogits, PackedLogits or BandLogits"
            raise _checks.bad_type(f"logits of {name} must be {expected}, got AdditiveLogits: {reason}.")
        lm, clamp = self.lm, loss.clamp
        if clamp is not None and _checks.known(clamp) is None:
            lm = lm + jnp.where(clamp <= 0, 0, jnp.nan).astype(lm.dtype)
        elif clamp is not None and not float(clamp) <= 0:
            expected = "off (<= 0) with AdditiveLogits, whose logits have no gradient of their own"
            raise _checks.bad_type(f"clamp of {name} must be {expected}, got {clamp}.")
        for argument, matrix, rows in (("am", self.am, "T"), ("lm", self.lm, "U + 1")):
            unsplit_by_reference(loss, argument, matrix, {-2: rows})
        scales = (self.lm_only_scale, self.am_only_scale)
        lm_only, am_only = (None if _checks.is_zero(x) else jnp.asarray(x) for x in scales)
        unigram = None if lm_only is None and am_only is None else self.unigram
        if unigram is not None:
            unigram = jnp.broadcast_to(unigram, (*self.am.shape[:-2], self.classes))
        arithmetic = Additive(softmax.blanks, softmax.slots, normalized=lm_only is None and am_only is None)
        scores = Scores(self.am, lm, lm_only, am_only, unigram)
        return Emission(arithmetic, self.frames, self.classes), scores
