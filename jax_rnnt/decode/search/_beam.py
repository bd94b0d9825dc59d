"""Beam search: the N most probable label sequences, each a sum over its alignments.

One `lax.while_loop` runs `_beam_step.step` until every utterance is at its end. Labels are compared by hashes of 64
bits, and so are predictors: by all labels where the state holds floating-point numbers, else by rows and state. Two
that differ are taken for one with a probability of 2^-64.
"""

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._gather import flat, hypothesis_rows, take
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._streams import begin_part
from jax_rnnt.decode.lm import _fusion
from jax_rnnt.decode.lm._fusion import Fusion, Networks, checked_fusion
from jax_rnnt.decode.search import _beam_step, _options
from jax_rnnt.decode.search._beam_step import Beam, Rules, State
from jax_rnnt.decode.search._entropy import Entropy
from jax_rnnt.decode.search._hashing import append_label
from jax_rnnt.decode.search._packing import by_platform, packs
from jax_rnnt.decode.search._search import Search, beyond_the_end, checked, on_devices, prepare
from jax_rnnt.decode.search._symbols import checked_scoring
from jax_rnnt.losses import TransducerLoss


class Stream(typing.NamedTuple):
    """Where a part of a stream ended; the beam's frames count from the start of the next part."""

    fresh: jax.Array  # [B]: the next part starts anew
    bad: jax.Array  # [B]: NaN has been met
    first: jax.Array  # [B]: frames of the stream before the next part
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs, for the same search
    committed: jax.Array  # [B]: labels of the stream that the beam has let go
    beam: Beam
    networks: Networks


@keywords
def beam(
    loss: TransducerLoss,
    joint: Callable[..., jax.Array],
    predictor: Any,
    encoder_out: jax.Array,
    lengths: jax.Array,
    max_labels: int,
    width: int,
    *,
    max_symbols: int = 10,
    merge: bool = True,
    threshold: float | jax.Array | None = None,
    length_norm: float = 0.0,
    fusion: Sequence[tuple[Any, float | jax.Array]] = (),
    ilm_weight: float | jax.Array = 0.0,
    blank_penalty: float | jax.Array = 0.0,
    temperature: float | jax.Array = 1.0,
    confidence: Entropy | None = None,
    start: int | None = None,
    exact_end: bool | jax.Array = False,
    state: Any = None,
) -> Hypotheses:
    """The N best label sequences of each utterance, by time-synchronous beam search.

    B utterances, T frames, E and P the widths of encoder and predictor rows, V classes. As in `greedy`, a move is an
    arc of the loss with its log-probability. Hypotheses with equal labels are merged: their score is the log of the
    summed probability of their alignments. If the beam loses none, and with `exact_end`, it is minus the loss of these
    labels.

    Parameters
    ----------
    loss, joint, predictor, encoder_out, lengths, fusion, ilm_weight, blank_penalty, temperature, start, exact_end
        As for `greedy`. The predictor runs on B `width` sequences.
    max_labels : int
        Room for labels in a hypothesis, over the whole stream.
    width : int
        Hypotheses that the search keeps, N. Those of an utterance compete whatever frame they have reached, so a beam
        that loses none needs room for the same labels on several frames.
    max_symbols : int, default 10
        Labels that one frame may emit.
    merge : bool, default True
        False: alignments of equal labels stay apart. With `width` 1 this is `greedy`.
    threshold : float or scalar Array, optional
        Drops hypotheses with a score more than this, in nats, below the best. Fewer hypotheses take less time.
    length_norm : float, default 0.0
        Ranks the result by score / (labels + 1)^length_norm; 0: by score. Scores and search stay as they are.
    confidence : Entropy, optional
        As for `greedy`.
    state : pytree, optional
        `Hypotheses.state` of the previous part of a stream. Labels, frames and scores are those of the whole stream.

    Returns
    -------
    Hypotheses
        The `width` best of each utterance, best first.

    Raises
    ------
    TypeError, ValueError
        As for `greedy`.

    See Also
    --------
    mwer_loss : Training with N-best lists.

    References
    ----------
    Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, arXiv:1211.3711.
    Saon, Tüske and Audhkhasi, "Alignment-Length Synchronous Decoding for RNN Transducer", ICASSP 2020.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 3)), 1, start=0)
    >>> frames = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    >>> lists = decode.beam(RNNTLoss(blank=0), jnp.add, predictor, frames, jnp.array([1]), max_labels=2, width=3)
    >>> lists.labels[0].tolist(), [round(float(x), 3) for x in jnp.exp(lists.scores[0])]
    ([[-1, -1], [1, -1], [2, -1]], [0.5, 0.15, 0.1])
    """
    function = "beam"
    sizes = _options.size(function, "width", width), _options.size(function, "max_labels", max_labels)
    merge = _checks.boolean(function, "merge", merge)
    numbers = {"length_norm": _checks.scalar(function, "length_norm", length_norm)}
    if threshold is not None:
        numbers["threshold"] = _checks.scalar(function, "threshold", threshold)
    scoring = checked_scoring(function, max_symbols, blank_penalty, temperature, confidence=confidence)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    models = checked_fusion(function, fusion, ilm_weight, encoder_out)

    def run(encoder_out, lengths, exact_end, state):
        batch = (loss, joint, predictor), encoder_out, lengths, exact_end
        search, label, first = prepare(function, *batch, scoring, start, width, models.numbers | numbers)
        start_stream = functools.partial(first_stream, search, models, *sizes, label, first)
        stream = begin_part(function, start_stream, fitted(state, search.lengths.shape[0] * width), search.vary)
        if state is not None:
            stream = stream._replace(networks=_fusion.placed(models, function, stream.networks))
        beyond = beyond_the_end(search, exact_end, stream.reached)
        rules = Rules(search, models, _beam_step.recurrent(stream.networks), stream.first, *sizes, merge, threshold)
        return result(rules, stream.committed, run_steps(rules, stream, beyond), length_norm)

    return on_devices(run, encoder_out, lengths, exact_end, state)


def first_stream(search: Search, fusion: Fusion, width: int, max_labels: int, start: int, first) -> Stream:
    """The start of a stream; `first` makes rows and state of the predictor."""
    batch = search.lengths.shape[0]
    zeros, none = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    networks = _beam_step.first_networks(search, fusion, batch, width, start, *first())
    return Stream(none, none, zeros, zeros, zeros, _beam_step.first_beam(search, width, max_labels), networks)


def fitted(state, rows: int):
    """The state of a stream with keys if so many rows are packed, and without if not: a batch may change its size."""
    if not isinstance(state, Stream) or (state.networks.key is not None) == packs(rows):
        return state
    key = unshared_keys(state.networks) if packs(rows) else None
    return state._replace(networks=state.networks._replace(key=key))


def unshared_keys(networks: Networks):
    """Keys [B, 2 W, 2] by which slots share no rows until their next labels."""
    batch, slots, _ = networks.rows.shape
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], (batch, slots))
    return jnp.stack(append_label((slot, slot), slot), 2)


def run_steps(rules: Rules, stream: Stream, bad) -> State:
    """The state after all frames of this part; `bad` [B]: utterances without a result."""
    search, beam, networks = rules.search, stream.beam, stream.networks
    bad = jnp.broadcast_to((stream.bad | search.bad | bad)[:, None], beam.score.shape)
    state = search.vary(State(stream.reached, beam, networks, bad))
    running, few_steps = functools.partial(_beam_step.running, rules), functools.partial(_beam_step.few_steps, rules)
    return jax.lax.while_loop(running, few_steps, state)


def result(rules: Rules, committed, state: State, length_norm) -> Hypotheses:
    """The hypotheses at the end of these frames, best first."""
    state = state._replace(bad=jnp.any(state.bad, -1))
    now, lengths = state.beam, rules.search.lengths
    part = now._replace(frame=now.frame - lengths[:, None])
    first, reached, networks = rules.first + lengths, state.reached - lengths, state.networks
    if networks.key is not None:  # elsewhere than on a CPU they are those of the first state
        unshared = rules.search.vary(unshared_keys(networks))
        key = by_platform(rules.rows, lambda key: key, lambda _: unshared, networks.key)
        networks = networks._replace(key=key)
    after = Stream(jnp.zeros_like(state.bad), state.bad, first, reached, committed, part, networks)
    score = now.score
    if rules.merge:  # moves that read beyond the last frame by different numbers of frames end here alike
        score, _ = _beam_step.merged(score, now.path_score, now.key)
    score, bad = with_final_scores(rules, state, score)
    _, order = jax.lax.top_k(ranks(score, now.counts + committed[:, None], length_norm), rules.width)
    score, counts, written = (take(x, order) for x in (score, now.counts, now.written))
    score = jnp.where(bad[:, None], jnp.nan, score)
    labels, frames, durations = (written[:, :, i] for i in range(3))
    log_probs, *confidences = _beam_step.of_bits(written[:, :, 3:], rules.search.dtype)
    return hypotheses(labels, frames, durations, log_probs, counts, score, after, *confidences)


def ranks(score, counts, length_norm):
    """What hypotheses are ordered by [B, W]; the norm of a label may be infinite, or 0."""
    if _checks.is_zero(length_norm):
        return score
    norm = (counts + 1).astype(score.dtype) ** jnp.asarray(length_norm, score.dtype)
    least = jnp.finfo(score.dtype).min  # of a hypothesis; a dead one has -inf
    return jnp.where((score == 0) | jnp.isneginf(score), score, jnp.maximum(score / norm, least))


def with_final_scores(rules: Rules, state: State, score):
    """(scores [B, W] of hypotheses that end here, bad [B]): models of fusion may score an end."""
    if not rules.fusion.ends:
        return score, state.bad
    now, models = state.beam, state.networks.models
    rows = jax.tree.map(lambda x: hypothesis_rows(x, now.slot, None), models)
    score = _fusion.at_the_end(rules.fusion, rows, flat(now.unread), flat(score)).reshape(score.shape)
    return score, state.bad | jnp.any(jnp.isnan(score), -1)
