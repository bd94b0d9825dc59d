"""Fusion: scores that other models give to labels, in beam search.

N hypotheses, V tokens (labels and blanks), P the width of predictor rows.
"""

from __future__ import annotations

import typing
from typing import Any

import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt.decode import _predictor
from jax_rnnt.decode._modules import in_evaluation
from jax_rnnt.decode._search import Search
from jax_rnnt.emissions._softmax import row_sum


class Fusion(typing.NamedTuple):
    """The models and their weights. A Python 0 as a weight leaves its model out."""

    models: tuple  # of pairs: a predictor of log-probabilities [N, V], and its weight
    internal_weight: Any  # subtracts the internal language model

    @property
    def internal(self) -> bool:
        return not _checks.is_zero(self.internal_weight)

    @property
    def adds(self) -> bool:
        return bool(self.models) or self.internal


def checked_fusion(function, lm, lm_weight, ilm_weight) -> Fusion:
    if lm is not None and lm_weight is None:
        raise ValueError(f"{function}: lm_weight must be given with lm, got None.")
    lm_weight = 0.0 if lm_weight is None else lm_weight
    for name, x in (("lm_weight", lm_weight), ("ilm_weight", ilm_weight)):
        _checks.scalar(function, name, x)
    if lm is None and not _checks.is_zero(lm_weight):
        raise ValueError(f"{function}: lm must be given with lm_weight={lm_weight!r}, got None.")
    models = () if _checks.is_zero(lm_weight) else ((in_evaluation(lm), lm_weight),)
    return Fusion(models, ilm_weight)


def begin(fusion: Fusion, search: Search, rows: int, start: int):
    """(log-probabilities, states) of each model after its start label, by default that of the predictor."""
    scores, states = [], []
    function, name, tokens = search.function, "lm", search.tokens
    for model, _ in fusion.models:
        own = _predictor.own_start(function, name, model)
        if own is None:
            default = f"start, by default that of the predictor, of {name}"
            own = _predictor.start_label(function, default, start, _predictor.own_symbols(model))
        _predictor.check_symbols(function, name, model, search.labels)
        log_probs, state = _predictor.begin(function, name, model, rows, own)
        if log_probs.shape[-1] != tokens:
            expected = f"log_probs [N, V] with V = {tokens}, the tokens of the joint network"
            raise ValueError(f"{function}: {name} must make {expected}, got {log_probs.shape}.")
        scores.append(log_probs)
        states.append(state)
    return scores, tuple(states)


def read(fusion: Fusion, states: tuple, labels):
    """(log-probabilities, states) of each model after one more label [N]."""
    scores, after = [], []
    for (model, _), state in zip(fusion.models, states):
        log_probs, state = model.step(state, labels)
        scores.append(log_probs)
        after.append(state)
    return scores, tuple(after)


def bonus(fusion: Fusion, search: Search, scores, rows):
    """[N, V]: what fusion adds to the score of each label after predictor rows [N, P]."""
    dtype = search.dtype
    total = jnp.zeros((rows.shape[0], search.tokens), dtype)
    for log_probs, (_, weight) in zip(scores, fusion.models):
        weight = jnp.asarray(weight, dtype)
        forbids = jnp.isneginf(log_probs) & (weight != 0)
        total = jnp.where(forbids, -jnp.inf, total + weighted(weight, log_probs.astype(dtype)))
    if fusion.internal:
        own = internal_scores(search, rows)
        total = total - weighted(jnp.asarray(fusion.internal_weight, dtype), jnp.where(jnp.isneginf(own), 0, own))
    return total


def internal_scores(search: Search, rows):
    """Log-probabilities [N, V] of labels in the internal language model: the joint network without an encoder."""
    symbols = search.symbols
    silence = jnp.zeros((rows.shape[0], search.encoder_out.shape[-1]), search.encoder_out.dtype)
    logits = search.joint(silence, rows).astype(search.dtype)[:, : search.tokens]
    logits = jnp.where(symbols.is_blank(logits), -jnp.inf, logits)
    return row_sum(logits).log_probability(logits) if symbols.emission.normalize else logits


def weighted(weight, x):
    """weight x, and 0 for the weight 0 whatever x is. Its derivative by the weight is x where x is finite."""
    return weight * jnp.where((weight == 0) & ~jnp.isfinite(x), 0, x)
