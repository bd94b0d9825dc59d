"""Fusion adds scores of other models to labels. `Predictor` has the rules of the interface.

There are B utterances, N hypotheses, V tokens (labels and blanks); P is the width of predictor rows.
"""

import math
import typing
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt.decode import _guard, _predictor
from jax_rnnt.decode._gather import replace_rows
from jax_rnnt.decode._given import Given, Static, logits_of
from jax_rnnt.decode._model import constant, log_softmax
from jax_rnnt.decode._options import is_on
from jax_rnnt.decode._scores import is_blank, tempered_head


@_pytree.exportable("Networks")
class Networks(typing.NamedTuple):
    """The predictor and the models of fusion, after all labels that they have read."""

    rows: jax.Array  # [N, P]
    predictor: Any
    models: tuple
    bonus: Any  # [N, V]: what fusion adds to the score of each next label; None without fusion
    key: Any = None  # [N, 2]: hashes for beam search, equal where all other fields are
    matches: tuple = ()  # a `_guard.Match` for each model that the guard watches; `bonus` lacks what these add


def adds(search) -> bool:
    """Returns True if fusion or the internal language model changes scores of labels."""
    return bool(search.fusion) or is_on(search, "ilm_weight")


def ends(search) -> bool:
    """Returns True if a model scores the end of an utterance."""
    return any(getattr(model, "final", None) for model, _ in search.fusion)


# ---------------------------------------------------------------------------------------------------- networks


def begin(static: Static, given: Given, rows: int) -> Networks:
    """Returns the networks after their start labels, with `rows` rows."""
    predicted, state = _predictor.begin("predictor", given.search.predictor, rows, static.start)
    begun = [begin_model(static, i, model, rows) for i, (model, _) in enumerate(given.search.fusion)]
    scores, states = [scores for scores, _ in begun], tuple(after for _, after in begun)
    return networks_of(static, given, predicted, state, scores, states)


def networks_of(static: Static, given: Given, rows, state, scores, states) -> Networks:
    """Returns networks with these rows and states of the predictor, and these scores and states of the models."""
    search, tokens = given.search, static.moves.tokens
    each = [(i, fitted(scores[i], tokens), states[i]) for i in _guard.watched(search)]
    matches = tuple(_guard.match(search, *x, static.dtype) for x in each)
    return Networks(rows, state, states, bonus(static, given, scores, rows), matches=matches)


def begin_model(static: Static, i: int, model, rows: int):
    """Returns (scores [rows, V], state) of a model after its start label, by default that of the predictor."""
    name, moves = f"fusion[{i}]", static.moves
    start = _predictor.declared_start(name, model)
    if start is None:
        default = f"start, by default that of the predictor, of {name}"
        start = _predictor.start_label(default, static.start, _predictor.declared_symbols(model))
    _predictor.check_symbols(name, model, moves.symbols)
    scores, state = _predictor.begin(name, model, rows, start, "scores [N, V]")
    sizes = moves.symbols, moves.tokens, moves.classes
    if scores.shape[-1] not in sizes:
        expected = "V = {} (labels), {} (with blanks) or {} (all classes of the joint network)".format(*sizes)
        raise _checks.bad_value(f"{name}.step must make scores [N, V] with {expected}, got {scores.shape}.")
    for option in "final", "place":
        if (method := getattr(model, option, None)) is not None and not callable(method):
            raise _checks.bad_type(f"{name}.{option} must be a function or None, got {method!r}.")
    if final := getattr(model, "final", None):
        ends, _ = _xla.shape_of(f"{name}.final", final, state)
        if getattr(ends, "shape", None) != (rows,):
            raise _checks.bad_value(f"{name}.final must make scores [N] with N = {rows}, got {ends!r}.")
    return scores, state


def placed(static: Static, given: Given, networks: Networks) -> Networks:
    """Gives the models in a stream's networks, in rows [B, ...] or slots [B, K, ...], the utterances of this batch."""
    models, batch = [], networks.rows.shape[:-1]
    rows = math.prod(batch)
    for i, ((model, _), state) in enumerate(zip(given.search.fusion, networks.models)):
        if place := getattr(model, "place", None):
            before = jax.tree.map(lambda x: x.reshape(rows, *x.shape[len(batch) :]), state)
            after = constant(place(before))
            _predictor.same_state(f"fusion[{i}].place", before, after)
            state = jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), after)
        models.append(state)
    return networks._replace(models=tuple(models))


def read(static: Static, given: Given, networks: Networks, codes) -> Networks:
    """Returns the networks after one more label [N], given by its code in `_guard`, without a key."""
    search, tokens = given.search, static.moves.tokens
    watched = _guard.watched(search)
    labels = codes % tokens if watched else codes
    rows, state = constant(search.predictor.step(networks.predictor, labels))
    steps = []
    for i, ((model, _), x) in enumerate(zip(search.fusion, networks.models)):
        stepped = _guard.after(model, place_of(watched, i), x, codes, tokens) if watched else model.step(x, labels)
        steps.append(constant(stepped))
    scores, states = [scores for scores, _ in steps], tuple(after for _, after in steps)
    return networks_of(static, given, rows, state, scores, states)


def place_of(watched: list[int], i: int) -> int | None:
    """Returns the place of model i among those that the guard watches, None if it is not one of them."""
    return watched.index(i) if i in watched else None


# ------------------------------------------------------------------------------------------------------ scores


def bonus(static: Static, given: Given, scores, rows):
    """Returns what fusion adds to scores of labels [N, V] after predictor rows [N, P]; None if it adds nothing."""
    search, tokens = given.search, static.moves.tokens
    if not adds(search):
        return None
    total, watched = jnp.zeros((rows.shape[0], tokens), static.dtype), _guard.watched(search)
    for i, (x, (_, weight)) in enumerate(zip(scores, search.fusion)):
        total = total if i in watched else added(total, weight, fitted(x, tokens))
    if is_on(search, "ilm_weight"):
        internal, weight = internal_scores(static, given, rows), jnp.asarray(search.ilm_weight, static.dtype)
        total = total - weighted(weight, jnp.where(jnp.isneginf(internal), 0, internal))
    return jnp.where(is_blank(static.moves, total), 0, total)


def fitted(scores, tokens: int):
    """Returns scores [N, V] of all tokens, with 0 for those that a model has no scores for."""
    return jnp.pad(scores[:, :tokens], [(0, 0), (0, max(tokens - scores.shape[1], 0))])


def internal_scores(static: Static, given: Given, rows):
    """Log-probabilities [N, V] of labels in the internal language model: the joint network without an encoder."""
    moves, encoder_out = static.moves, given.encoder_out
    silence = jnp.zeros((rows.shape[0], encoder_out.shape[-1]), encoder_out.dtype)
    logits = logits_of(static, given, silence, rows, whole=True).astype(static.dtype)[:, : moves.tokens]
    logits = tempered_head(given.search, jnp.where(is_blank(moves, logits), -jnp.inf, logits))
    return log_softmax(logits) if moves.emission.normalize else logits


def at_the_end(search, tokens: int, states: tuple, unread, scores):
    """Adds to `scores` [N] what models give to an end here, after one more code `unread` [N] where it is not -1.

    The result is NaN where that is NaN or +inf; scores of -inf and NaN stay.
    """
    if not ends(search):
        return scores
    total, watched = scores, _guard.watched(search)
    for i, ((model, weight), state) in enumerate(zip(search.fusion, states)):
        if final := getattr(model, "final", None):
            if unread is not None:
                codes = jnp.maximum(unread, 0)
                guarded = watched and _guard.after(model, place_of(watched, i), state, codes, tokens)
                _, after = constant(guarded or model.step(state, codes))
                state = replace_rows(unread >= 0, after, state)
            if i in watched:
                total = total + _guard.given_back(search, i, state, total.dtype)[0]
            else:
                total = added(total, weight, constant(final(state)))
    return jnp.where(scores > -jnp.inf, jnp.where(total < jnp.inf, total, jnp.nan), scores)


def added(total, weight, scores):
    """Returns total + weight scores; scores of -inf forbid a label unless the weight is 0."""
    weight, scores = jnp.asarray(weight, total.dtype), scores.astype(total.dtype)
    forbids = jnp.isneginf(scores) & (weight != 0)
    return jnp.where(forbids, -jnp.inf, total + weighted(weight, scores))


def weighted(weight, x):
    """Returns weight x, which is 0 for the weight 0 whatever x is."""
    return weight * jnp.where((weight == 0) & ~jnp.isfinite(x), 0, x)
