"""mwer_loss: the expected number of errors of an N-best list, minus their mean."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.emissions._softmax import accumulation_dtype


@keywords
def mwer_loss(nll: ArrayLike, errors: ArrayLike, reduction: Literal["mean", "none", "sum"] = "mean") -> jax.Array:
    """Minimum word error rate loss (Prabhavalkar et al. 2018): expected errors of an N-best list, minus their mean.

    N hypotheses of each utterance; `...` is any number of batch dimensions. With p = softmax(-nll) over the list and
    the mean error e' of its hypotheses::

        loss = sum over n of p[n] (errors[n] - e')

    So the loss is not the expectation itself, but below 0 where better hypotheses are more probable. Subtracting e'
    changes no gradient: d loss / d nll[n] = -p[n] (errors[n] - sum over m of p[m] errors[m]).

    Parameters
    ----------
    nll : Array, float16 | bfloat16 | float32 | float64 [..., N]
        The loss of each hypothesis, with reduction="none", in nats. +inf: not in the list.
    errors : Array, integer or floating [..., N]
        Edit distance of each hypothesis to the reference, in words or labels. They get no gradient.
    reduction : {"mean", "none", "sum"}
        Over utterances.

    Returns
    -------
    Array, float32 (float64 for float64 nll) [...] for reduction "none", else []
        In errors. 0 with a zero gradient where no hypothesis is in the list; NaN, with a zero gradient as well, where
        an nll is NaN or -inf, or the errors of a listed hypothesis are not finite.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, shape or reduction.

    See Also
    --------
    decode.Search.beam : N-best lists.
    JointLogits : [B, 1, T, E] and [B, N, U + 1, P] score N hypotheses of each utterance without a copy of the encoder.

    References
    ----------
    Prabhavalkar et al., "Minimum Word Error Rate Training for Attention-based Sequence-to-Sequence Models", 2018,
    arXiv:1712.01818.
    Guo et al., "Efficient Minimum Word Error Rate Training of RNN-Transducer for End-to-End Speech Recognition", 2020,
    arXiv:2007.13802.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import mwer_loss
    >>> round(float(mwer_loss(jnp.array([1.0, 1.0, jnp.inf]), jnp.array([0, 2, 9]))), 3)
    0.0
    >>> round(float(mwer_loss(jnp.array([0.0, 9.0]), jnp.array([0, 2]))), 3)
    -1.0
    """
    nll = _checks.floating("nll", nll, 1, "[..., N]")
    errors = _checks.array("errors", errors)
    if not jnp.issubdtype(errors.dtype, jnp.number) or jnp.issubdtype(errors.dtype, jnp.complexfloating):
        raise _checks.bad_type(f"errors must be numbers, got {errors.dtype}.")
    if tuple(errors.shape) != nll.shape:
        raise _checks.bad_value(f"errors must have the shape of nll, {nll.shape}, got {tuple(errors.shape)}.")
    _checks.choice("reduction", reduction, ("mean", "none", "sum"))
    errors = jax.lax.stop_gradient(jnp.asarray(errors)).astype(accumulation_dtype(nll.dtype))
    nll, errors = _xla.split_alike(nll.ndim - 1, nll, errors)
    no_number = jnp.isnan(nll) | jnp.isneginf(nll) | (~jnp.isposinf(nll) & ~jnp.isfinite(errors))
    bad = jnp.any(no_number, -1, keepdims=True)
    nll = jnp.where(bad, 0, nll).astype(errors.dtype)
    listed = ~jnp.isposinf(nll)
    errors = jnp.where(listed & ~bad, errors, 0)
    scores = jnp.where(listed, -nll, 0)
    best = jax.lax.stop_gradient(jnp.max(jnp.where(listed, scores, -jnp.inf), -1, initial=-jnp.inf, keepdims=True))
    weights = jnp.where(listed, jnp.exp(jnp.where(listed, scores - best, 0)), 0)
    count = jnp.sum(listed, -1, keepdims=True)
    mean = jnp.sum(errors, -1, keepdims=True) / jnp.maximum(count, 1).astype(nll.dtype)
    total = jnp.where(count > 0, jnp.sum(weights, -1, keepdims=True), 1)
    losses = jnp.sum(weights / total * jnp.where(listed, errors - mean, 0), -1)
    losses = jnp.where(bad[..., 0], jnp.nan, losses)
    if reduction == "none":
        return losses
    return jnp.sum(losses) / (max(losses.size, 1) if reduction == "mean" else 1)
