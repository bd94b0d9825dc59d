"""Greedy search: every utterance runs from label to label at its own pace.

B utterances, T frames, E and P the widths of encoder and predictor rows, K frames of a window, L labels at most. One
`lax.while_loop` steps all utterances together. A step looks at the next K frames of each, with the predictor row that
they share until a label comes: one matrix product for B K rows. It follows the best moves up to the first label or the
end of the window, then steps the predictor where there is a label. So the predictor runs once a label and not once a
frame, and utterances do not wait for each other's labels.
"""

import functools
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _renamed
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._gather import replace_rows
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._streams import begin_part
from jax_rnnt.decode.lm import _fusion
from jax_rnnt.decode.lm._fusion import Fusion, Networks, checked_fusion
from jax_rnnt.decode.search import _options
from jax_rnnt.decode.search._entropy import Entropy
from jax_rnnt.decode.search._packing import any_or_always
from jax_rnnt.decode.search._search import Search, beyond_the_end, checked, on_devices, prepare
from jax_rnnt.decode.search._symbols import checked_scoring
from jax_rnnt.losses import TransducerLoss


class Stream(typing.NamedTuple):
    """Where a part of a stream ended."""

    fresh: jax.Array  # [B]: the next part starts anew
    bad: jax.Array  # [B]: NaN has been met
    first: jax.Array  # [B]: frames of the stream before the next part
    skip: jax.Array  # [B]: frames of the next part that the last move has read
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs
    scores: jax.Array  # [B]
    networks: Networks


class Rules(typing.NamedTuple):
    """What stays the same from step to step."""

    search: Search
    fusion: Fusion
    first: jax.Array  # [B]: frames of the stream before these
    window: int
    max_labels: int
    choose: Callable  # of the move out of each node, as `most_probable`

    @property
    def offsets(self):
        """[1, K]: frames of the window after its first one."""
        return np.arange(self.window, dtype=np.int32)[None]


class State(typing.NamedTuple):
    """Of the loop over steps."""

    frame: jax.Array  # [B]: the next one to read, counted in this part
    count_here: jax.Array  # [B]: labels on that frame
    counts: jax.Array  # [B]
    reached: jax.Array  # [B]: frames that an exact end needs
    scores: jax.Array  # [B]
    labels: jax.Array  # [B, L]
    frames: jax.Array  # [B, L]
    durations: jax.Array  # [B, L]
    log_probs: jax.Array  # [B, L]: of the labels
    confidences: jax.Array | None  # [B, L]
    networks: Networks


class Walk(typing.NamedTuple):
    """What an utterance does in a step: blanks, and the first label that it meets."""

    ahead: jax.Array  # [B]: frames from the first one of the window
    reached: jax.Array  # [B]: as in `State`
    score: jax.Array  # [B]: as in `State`
    label: jax.Array  # [B]: -1 for none
    log_prob: jax.Array  # [B]: of the label, in the model alone
    at: jax.Array  # [B]: where in the window the last move was taken
    reads: jax.Array  # [B]: frames that it read
    confidence: jax.Array | None  # [B]: of the label


@_renamed.argument(durations="duration_choice")
@keywords
def greedy(
    loss: TransducerLoss,
    joint: Callable[..., jax.Array],
    predictor: Any,
    encoder_out: jax.Array,
    lengths: jax.Array,
    max_labels: int,
    *,
    max_symbols: int = 10,
    window: int = 4,
    fusion: Sequence[tuple[Any, float | jax.Array]] = (),
    ilm_weight: float | jax.Array = 0.0,
    blank_penalty: float | jax.Array = 0.0,
    temperature: float | jax.Array = 1.0,
    duration_choice: Literal["pair", "token_first"] = "pair",
    confidence: Entropy | None = None,
    start: int | None = None,
    exact_end: bool | jax.Array = False,
    state: Any = None,
) -> Hypotheses:
    """Takes the most probable move out of each node, from the first frame to the last.

    B utterances, T frames, E and P the widths of encoder and predictor rows, V classes. A move is an arc of the loss, a
    blank or a label, with the log-probability of this arc in the loss; ties prefer blanks, then lower classes.
    Utterances run from label to label at their own pace in one loop. A search without a path in the lattice
    (`exact_end`) has the score -inf and no labels, as in `beam`.

    Parameters
    ----------
    loss : TransducerLoss
        Gives the classes their meaning: any loss of the family, or yours (`TransducerLoss.decoding`). Options of
        training (sigma, FastEmit, delay penalty, omega) change nothing.
    joint : callable or LinearJoint
        ``joint(encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself, as in `JointLogits`.
        It runs in the loop: project `encoder_out` before. One that draws random numbers is an error; a Flax NNX module
        runs in evaluation mode.
    predictor : Predictor
        Or any object with `initial` and `step`, and perhaps `start` and `symbols`. No dropout, as in `joint`.
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [B, T, E]
        Output of the encoder.
    lengths : Array, integer [B]
        Frames of each utterance; later ones are never read.
    max_labels : int
        Room for labels in a hypothesis. Once it is full, no label follows; `Hypotheses.full` says so.
    max_symbols : int, default 10
        Labels that one frame may emit; after these only a blank is allowed.
    window : int, default 4
        Frames that a step looks at. More frames make fewer and larger steps.
    fusion : sequence of pairs (model, weight), default ()
        Adds weight times the score that a model gives to each label, and to an end: shallow fusion. `Predictor` says
        which objects are models. A score of -inf forbids the label. Weights may be traced, or below 0. A weight of 0
        adds nothing; a Python 0 skips the model.
    ilm_weight : float or scalar Array, default 0.0
        Subtracts ilm_weight times the log-probability of each label in the internal language model: the label softmax
        of ``joint(0, predictor row)``. If `encoder_out` was projected before, the bias of that projection belongs in
        the joint. For `HATLoss` this is the model's own language model (Variani et al. 2020); for others, without
        blanks, an estimate (Meng et al. 2021). A Python 0 skips it.
    blank_penalty : float or scalar Array, default 0.0
        Nats to subtract from the log-probability of every blank move, after the softmax, so that the search leaves out
        fewer labels. It counts in the scores. For every loss but `HATLoss`, greedy search finds the same labels as if
        the blanks' logits were lowered by it, as icefall and sherpa-onnx do.
    temperature : float or scalar Array, default 1.0
        Divides the logits before the softmax: those of tokens, of durations and of a HAT's blank. It counts in the
        scores. Rows that are log-probabilities already (`fused_log_softmax=False`) allow 1 alone.
    duration_choice : {"pair", "token_first"}, default "pair"
        "pair": the best move is the best pair of token and duration. "token_first": NeMo's and Hugging Face's rule for
        TDT. The most probable token comes first, then the most probable duration by itself. A blank of duration 0 reads
        one frame, and so does, with no log-probability, a label of duration 0 that is the `max_symbols`-th of its frame
        (Hugging Face has no such limit). The score is the log-probability of the chosen tokens and durations. A path
        with such frames is not in the loss's lattice, so `exact_end` is an error. For losses without durations it
        changes nothing.
    confidence : Entropy, optional
        Adds `Hypotheses.label_confidences`, from the entropy of the row of each label. None: only the log-probabilities
        of the labels tell how sure the model is, and the program computes nothing more.
    start : int, optional
        The label before the first one, for a predictor without `start`. Default: the blank. Negative: from the end of
        the predictor's `symbols`, an error without them.
    exact_end : bool or bool Array [B], default False
        True: only paths of the loss's lattice, so no move reads beyond the last frame. False: the last move may read
        further, as a search does not know a stream's end in advance. It matters for durations, big blanks and
        `final_blank`. In a stream: which utterances end with this part.
    state : pytree, optional
        `Hypotheses.state` of the previous part of a stream. Labels are those of this part; frames and scores count from
        the start of the stream.

    Returns
    -------
    Hypotheses
        One of each utterance.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or range; a loss lacks its `DecodingRules`; the predictor's state changes
        its shape; `start` contradicts the predictor; the joint network has more labels than the predictor; a model of
        `fusion` has another vocabulary, or serves another number of utterances; a weight is not finite;
        `exact_end` where an earlier part of the stream has read beyond the end. Where values are traced, an utterance
        gets the score NaN and no labels instead.

    See Also
    --------
    beam : The N best hypotheses.

    References
    ----------
    Xu, Bataev, Jia and Ginsburg, "Label-Looping: Highly Efficient Decoding for Transducers", 2024, arXiv:2406.06220.
    Meng et al., "Internal Language Model Estimation for Domain-Adaptive End-to-End Speech Recognition", 2021,
    arXiv:2011.01991.

    Examples
    --------
    Each frame asks for a class, and the predictor forbids to repeat the last label:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.Predictor(lambda batch: (), lambda state, labels: (-9 * jax.nn.one_hot(labels, 3), state))
    >>> frames = 5 * jax.nn.one_hot(jnp.array([[1, 0, 2, 0]]), 3)
    >>> search = lambda frames: decode.greedy(RNNTLoss(blank=0), jnp.add, predictor, frames, jnp.array([4]), 5)
    >>> best = jax.jit(search)(frames)
    >>> best.labels.tolist(), best.frames.tolist(), best.counts.tolist()
    ([[1, 2, -1, -1, -1]], [[0, 2, -1, -1, -1]], [2])
    """
    function = "greedy"
    max_labels, window = _options.sizes(function, max_labels=max_labels, window=window)
    scoring = checked_scoring(function, max_symbols, blank_penalty, temperature, duration_choice, confidence)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    window = frames_at_once(window, encoder_out)
    models = checked_fusion(function, fusion, ilm_weight, encoder_out)

    def run(encoder_out, lengths, exact_end, state):
        batch = (loss, joint, predictor), encoder_out, lengths, exact_end
        search, label, first = prepare(function, *batch, scoring, start, numbers=models.numbers)
        if search.symbols.scoring.token_first and exact_end is not False:
            raise ValueError(
                f"{function}: exact_end must be False with duration_choice='token_first', got {exact_end}."
            )
        start_stream = functools.partial(first_stream, search, models, label, first)
        stream = begin_part(function, start_stream, state, search.vary)
        if state is not None:
            stream = stream._replace(networks=_fusion.placed(models, function, stream.networks))
        bad = stream.bad | beyond_the_end(search, exact_end, stream.reached)
        rules = Rules(search, models, stream.first, window, max_labels, most_probable)
        return result(rules, run_steps(rules, stream), bad)

    return on_devices(run, encoder_out, lengths, exact_end, state)


def frames_at_once(window: int, encoder_out) -> int:
    """Frames of a window; no more than there are."""
    frames = encoder_out.shape[1]
    return max(frames, 1) if _checks.smaller(frames, window) else window


def first_stream(search: Search, fusion: Fusion, start: int, first) -> Stream:
    """The start of a stream; `first` makes rows and state of the predictor."""
    zeros = jnp.zeros(search.lengths.shape, jnp.int32)
    none, networks = jnp.zeros(zeros.shape, bool), _fusion.begin(fusion, search, start, *first())
    return Stream(none, none, zeros, zeros, zeros, zeros.astype(search.dtype), networks)


def run_steps(rules: Rules, stream: Stream) -> State:
    """The state after all frames of this part."""
    zeros = jnp.zeros_like(stream.skip)
    none = jnp.full((zeros.shape[0], rules.max_labels), -1, jnp.int32)
    sure = jnp.zeros(none.shape, rules.search.dtype)
    written = none, none, none, sure, sure if rules.search.symbols.scoring.entropy else None
    state = State(stream.skip, zeros, zeros, stream.reached, stream.scores, *written, stream.networks)
    state = rules.search.vary(state)
    return jax.lax.while_loop(functools.partial(running, rules), functools.partial(step, rules), state)


def result(rules: Rules, state: State, bad) -> Hypotheses:
    """The hypotheses at the end of these frames; `bad` [B]: utterances without a result."""
    search, lengths = rules.search, rules.search.lengths
    scores = jnp.where(search.bad | bad | (state.scores == jnp.inf), jnp.nan, state.scores)
    skip, reached = state.frame - lengths, state.reached - lengths
    bad = jnp.isnan(scores)
    after = Stream(jnp.zeros_like(bad), bad, rules.first + lengths, skip, reached, scores, state.networks)
    written = state.labels, state.frames, state.durations, state.log_probs
    scores = _fusion.at_the_end(rules.fusion, state.networks.models, None, scores)
    return hypotheses(*written, state.counts, scores, after, state.confidences)


# ----------------------------------------------------------------------------------------------------- one step


def running(rules: Rules, state: State):
    return jnp.any(state.frame < rules.search.lengths)


def step(rules: Rules, state: State) -> State:
    """Every utterance goes on to its next label, or to the end of its window."""
    walk = walk_to_label(rules, state, *best_moves(rules, state))
    return advance(rules, *write(rules, state, walk))


def best_moves(rules: Rules, state: State):
    """Of each frame of the windows [B, K]: score, frames read, frames that an exact end needs, label or -1, and its
    log-probability and confidence in the model alone.
    """
    search, window, offsets = rules.search, rules.window, rules.offsets
    symbols = search.symbols
    frame = state.frame[:, None] + offsets
    batch = frame.shape[0]
    encoder = search.frame(frame).reshape(batch * window, search.encoder_out.shape[-1])
    logits = search.joint(encoder, jnp.repeat(state.networks.rows, window, 0)).reshape(batch, window, search.classes)
    scores, labels = symbols.scores(logits)
    count_here = jnp.where(offsets == 0, state.count_here[:, None], 0)
    may_write = (count_here < symbols.labels_per_frame) & (state.counts < rules.max_labels)[:, None]
    allowed = symbols.allowed(frame, search.lengths[:, None], may_write, search.ends_here)
    if rules.fusion.adds:
        labels = labels._replace(bonus=state.networks.bonus[:, None])
    score, move, label, log_prob = rules.choose(symbols, scores, labels, allowed, frame, count_here)
    reads, needs = (symbols.of_move(move, x) for x in zip(*((x.frames, x.needs) for x in symbols.moves)))
    # Computed once: the walk reads single numbers of each frame.
    return jax.lax.optimization_barrier((score, reads, needs, label, log_prob, symbols.confidence(logits)))


def most_probable(symbols, scores, labels, allowed, *_):
    """Of the best move [B, K]: score, number, label or -1, and the log-probability of this label in the model alone.

    From what `Symbols.scores` and `allowed` give.
    """
    label_score, label = labels.best()
    log_prob = label_score if labels.bonus is None else labels.at(label)
    move, best = jnp.zeros(label.shape, jnp.int32), jnp.full(label.shape, -jnp.inf, scores.dtype)
    for i in range(len(symbols.moves)):  # an argmax would be a kernel of its own on a GPU
        score = scores[..., i] if i < len(symbols.blanks) else scores[..., i] + label_score
        score = jnp.where(allowed[..., i], score, -jnp.inf)
        better = (score > best) | (jnp.isnan(score) & ~jnp.isnan(best))
        move, best = jnp.where(better, i, move), jnp.maximum(best, score)
    return best, move, jnp.where(move >= len(symbols.blanks), label, -1), log_prob


def walk_to_label(rules: Rules, state: State, score, reads, needs, label, log_prob, confidence) -> Walk:
    """The best moves up to the first label, or out of the window."""
    search = rules.search
    zeros = jnp.zeros_like(state.frame)
    sure = [jax.tree.map(lambda x, k=k: x[:, k], confidence) for k in range(rules.window)]
    walk = Walk(zeros, state.reached, state.scores, zeros - 1, log_prob[:, 0], zeros, zeros, sure[0])
    for k in range(rules.window):
        frame = state.frame + k
        here = (walk.ahead == k) & (walk.label < 0) & (frame < search.lengths)
        reached = frame + needs[:, k] if search.symbols.reach else walk.reached
        score_after, at = walk.score + score[:, k], zeros + k
        move = Walk(k + reads[:, k], reached, score_after, label[:, k], log_prob[:, k], at, reads[:, k], sure[k])
        walk = replace_rows(here, move, walk)
    return walk


def write(rules: Rules, state: State, walk: Walk):
    """(the state after the walk, its label [B]), which the networks have not read yet."""
    writes = walk.label >= 0
    going = state.frame < rules.search.lengths
    before = jnp.where(walk.at == 0, state.count_here, 0)
    after = jnp.where(going, 0, state.count_here)
    count_here = jnp.where(writes & (walk.reads == 0), before + 1, after)
    frame, symbols = state.frame + walk.ahead, rules.search.symbols
    if symbols.scoring.token_first:  # the last label of a frame leaves it
        leaves = count_here >= symbols.labels_per_frame
        frame, count_here = frame + leaves.astype(jnp.int32), jnp.where(leaves, 0, count_here)
    counts, at = state.counts + writes.astype(jnp.int32), rules.first + state.frame + walk.at
    fields: dict[str, Any] = dict(frame=frame, count_here=count_here, counts=counts)
    fields |= dict(reached=walk.reached, scores=walk.score)
    new = dict(labels=walk.label, frames=at, durations=walk.reads, log_probs=walk.log_prob)
    new |= {} if walk.confidence is None else {"confidences": walk.confidence}
    # The walk is computed once, and what follows reads no array of the old state that it replaces: no copies.
    fields, new = jax.lax.optimization_barrier((fields, new))
    places = np.arange(1, rules.max_labels + 1, dtype=np.int32)[None]
    here = (places == fields["counts"][:, None]) & (new["labels"] >= 0)[:, None]
    fields |= {name: jnp.where(here, x[:, None], getattr(state, name)) for name, x in new.items()}
    return state._replace(**fields), new["labels"]


def advance(rules: Rules, state: State, label) -> State:
    """The networks read the new label [B] where there is one."""

    def read(networks):
        after = _fusion.read(rules.fusion, rules.search, networks, jnp.where(label >= 0, label, 0))
        return replace_rows(label >= 0, after, networks)

    networks = jax.lax.cond(any_or_always(label >= 0), read, lambda networks: networks, state.networks)
    return state._replace(networks=networks)
