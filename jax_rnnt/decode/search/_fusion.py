"""Fusion: scores that other models give to labels. `Predictor` has the rules of the interface.

B utterances, N hypotheses, V tokens (labels and blanks), P the width of predictor rows.
"""

import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt.decode import _predictor
from jax_rnnt.decode._gather import replace_rows
from jax_rnnt.decode._model import constant, log_softmax
from jax_rnnt.decode.search._problem import Problem


class Weighted(typing.NamedTuple):
    """A model with its name in errors and its weight."""

    name: str
    model: Any
    weight: Any

    def function(self, name: str) -> Callable | None:
        """An optional function of the model."""
        return getattr(self.model, name, None)


class Fusion(typing.NamedTuple):
    """The models and their weights. A Python 0 as a weight leaves its model out."""

    models: tuple[Weighted, ...]
    internal_weight: Any  # subtracts the internal language model

    @property
    def internal(self) -> bool:
        return not _checks.is_zero(self.internal_weight)

    @property
    def adds(self) -> bool:
        return bool(self.models) or self.internal

    @property
    def ends(self) -> bool:
        """Whether a model scores the end of an utterance."""
        return any(fused.function("final") for fused in self.models)

    @property
    def numbers(self) -> dict[str, Any]:
        """The weights, as for `out_of_range`."""
        return {"ilm_weight": self.internal_weight} | {f"{fused.name} weight": fused.weight for fused in self.models}


NO_FUSION = Fusion((), 0.0)


@_pytree.exportable("Networks")
class Networks(typing.NamedTuple):
    """The predictor and the models of fusion, after all labels that they have read."""

    rows: jax.Array  # [N, P]
    predictor: Any
    models: tuple
    bonus: Any  # [N, V]: what fusion adds to the score of each next label; None without fusion
    key: Any = None  # [N, 2]: of beam search: hashes, equal where all other fields are


def checked_fusion(function, fusion, ilm_weight) -> Fusion:
    models = []
    expected = "a sequence of pairs (model, weight), as fusion=((model, 0.3),)"
    if isinstance(fusion, str) or not isinstance(fusion, Sequence):
        raise TypeError(f"{function}: fusion must be {expected}, got {fusion!r}.")
    for i, pair in enumerate(fusion):
        name = f"fusion[{i}]"
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"{function}: fusion must be {expected}, got {name} = {pair!r}.")
        model, weight = pair
        if not _checks.is_zero(weight := _checks.scalar(function, f"{name} weight", weight)):
            models.append(Weighted(name, model, weight))
    return Fusion(tuple(models), _checks.scalar(function, "ilm_weight", ilm_weight))


def check_utterances(function, fusion: Fusion, encoder_out):
    """Raises if a model has tables for other utterances than these."""
    batch = encoder_out.shape[0]
    for name, model, _ in fusion.models:
        served = getattr(model, "utterances", None)
        if served is not None and served != batch:
            expected = f"{batch}, those of encoder_out, or None"
            raise ValueError(f"{function}: {name}.utterances must be {expected}, got {served}.")
        if served is not None and _xla.is_split(encoder_out):
            cure = "run the search in jax.shard_map, which gives each device the model of its own utterances"
            got = f"got {served} where a mesh axis of type Explicit splits encoder_out"
            raise ValueError(f"{function}: {name}.utterances must be None, {got}: {cure}.")


# ---------------------------------------------------------------------------------------------------- networks


def begin(fusion: Fusion, problem: Problem, start: int, rows, state) -> Networks:
    """The networks after their start labels; `rows` [N, P] and `state` are those of the predictor."""
    begun = [begin_model(fused, problem, rows.shape[0], start) for fused in fusion.models]
    scores, states = [scores for scores, _ in begun], tuple(after for _, after in begun)
    return Networks(rows, state, states, bonus(fusion, problem, scores, rows))


def begin_model(fused: Weighted, problem: Problem, rows: int, start: int):
    """(scores [rows, V], state) of a model after its start label, by default that of the predictor."""
    function, (name, model, _) = problem.function, fused
    first_label = _predictor.declared_start(function, name, model)
    if first_label is None:
        default = f"start, by default that of the predictor, of {name}"
        first_label = _predictor.start_label(function, default, start, _predictor.declared_symbols(model))
    _predictor.check_symbols(function, name, model, problem.labels)
    scores, state = _predictor.begin(function, name, model, rows, first_label, "scores [N, V]")
    labels, tokens, classes = problem.labels, problem.tokens, problem.classes
    if scores.shape[-1] not in (labels, tokens, classes):
        expected = f"V = {labels} (labels), {tokens} (with blanks) or {classes} (all classes of the joint network)"
        raise ValueError(f"{function}: {name}.step must make scores [N, V] with {expected}, got {scores.shape}.")
    for option in "final", "place":
        if (method := fused.function(option)) is not None and not callable(method):
            raise TypeError(f"{function}: {name}.{option} must be a function or None, got {method!r}.")
    if final := fused.function("final"):
        ends, _ = _xla.shape_of(f"{function}: {name}.final", final, state)
        if getattr(ends, "shape", None) != (rows,):
            raise ValueError(f"{function}: {name}.final must make scores [N] with N = {rows}, got {ends!r}.")
    return scores, state


def placed(fusion: Fusion, function: str, networks: Networks) -> Networks:
    """Networks of a stream, in rows [B, ...] or slots [B, K, ...], whose models know the utterances of this batch."""
    models, batch = [], networks.rows.shape[:-1]
    rows = math.prod(batch)
    for fused, state in zip(fusion.models, networks.models):
        if place := fused.function("place"):
            before = jax.tree.map(lambda x: x.reshape(rows, *x.shape[len(batch) :]), state)
            after = constant(place(before))
            _predictor.same_state(function, f"{fused.name}.place", before, after)
            state = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), after)
        models.append(state)
    return networks._replace(models=tuple(models))


def read(fusion: Fusion, problem: Problem, networks: Networks, labels) -> Networks:
    """The networks after one more label [N], without a key."""
    rows, state = constant(problem.predictor.step(networks.predictor, labels))
    steps = [constant(fused.model.step(state, labels)) for fused, state in zip(fusion.models, networks.models)]
    scores, states = [scores for scores, _ in steps], tuple(after for _, after in steps)
    return Networks(rows, state, states, bonus(fusion, problem, scores, rows))


# ------------------------------------------------------------------------------------------------------ scores


def bonus(fusion: Fusion, problem: Problem, scores, rows):
    """[N, V]: what fusion adds to the score of each label after predictor rows [N, P]; None if it adds nothing."""
    if not fusion.adds:
        return None
    total = jnp.zeros((rows.shape[0], problem.tokens), problem.dtype)
    for x, fused in zip(scores, fusion.models):
        x = jnp.pad(x[:, : problem.tokens], [(0, 0), (0, max(problem.tokens - x.shape[1], 0))])
        total = added(total, fused.weight, x)
    if fusion.internal:
        internal, weight = internal_scores(problem, rows), jnp.asarray(fusion.internal_weight, problem.dtype)
        total = total - weighted(weight, jnp.where(jnp.isneginf(internal), 0, internal))
    return jnp.where(problem.symbols.is_blank(total), 0, total)


def internal_scores(problem: Problem, rows):
    """Log-probabilities [N, V] of labels in the internal language model: the joint network without an encoder."""
    symbols = problem.symbols
    silence = jnp.zeros((rows.shape[0], problem.encoder_out.shape[-1]), problem.encoder_out.dtype)
    logits = problem.whole_joint(silence, rows).astype(problem.dtype)[:, : problem.tokens]
    logits = symbols.scoring.tempered(jnp.where(symbols.is_blank(logits), -jnp.inf, logits))
    return log_softmax(logits) if symbols.emission.normalize else logits


def at_the_end(fusion: Fusion, states: tuple, unread, scores):
    """`scores` [N] with those that models give to an end here, after one more label `unread` [N], if it is not -1.

    NaN where that is NaN or +inf; scores of -inf and NaN stay.
    """
    if not fusion.ends:
        return scores
    total = scores
    for fused, state in zip(fusion.models, states):
        if final := fused.function("final"):
            if unread is not None:
                _, after = constant(fused.model.step(state, jnp.maximum(unread, 0)))
                state = replace_rows(unread >= 0, after, state)
            total = added(total, fused.weight, constant(final(state)))
    return jnp.where(scores > -jnp.inf, jnp.where(total < jnp.inf, total, jnp.nan), scores)


def added(total, weight, scores):
    """total + weight scores; scores of -inf forbid, unless the weight is 0."""
    weight, scores = jnp.asarray(weight, total.dtype), scores.astype(total.dtype)
    forbids = jnp.isneginf(scores) & (weight != 0)
    return jnp.where(forbids, -jnp.inf, total + weighted(weight, scores))


def weighted(weight, x):
    """weight x, and 0 for the weight 0 whatever x is."""
    return weight * jnp.where((weight == 0) & ~jnp.isfinite(x), 0, x)
