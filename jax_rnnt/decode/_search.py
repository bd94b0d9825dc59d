"""A search as a value: a model and the options of decoding, with a method for each way to search.

B utterances, T frames, E and P the widths of encoder and predictor rows, V classes, L labels at most, N hypotheses.
"""

from __future__ import annotations

import dataclasses
import numbers
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_rnnt import _keywords, _pytree
from jax_rnnt.decode import _beam, _greedy, _options, _sample
from jax_rnnt.decode._entropy import Entropy
from jax_rnnt.decode._guard import Guard
from jax_rnnt.decode._hypotheses import Hypotheses
from jax_rnnt.decode._model import switched_off
from jax_rnnt.decode._modules import in_evaluation
from jax_rnnt.decode._options import option
from jax_rnnt.decode._predictor import Predictor
from jax_rnnt.layouts import LinearJoint
from jax_rnnt.losses import TransducerLoss

Joint: typing.TypeAlias = Callable[[jax.Array, jax.Array], jax.Array] | LinearJoint
NETWORKS = "loss", "joint", "predictor", "fusion", "guard"  # fields that may hold arrays


@_keywords.keywords
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Search:
    """Searches for the labels of utterances: a trained transducer, and the options of decoding.

    B utterances, T frames, E and P the widths of encoder and predictor rows, V classes. A move is an arc of the loss, a
    blank or a label, with the log-probability of this arc in the loss. A search goes from move to move, from the first
    frame to the last: `greedy` takes the best one, `beam` keeps the best sequences of labels, `sample` draws. A verb
    refuses options that it does not use, unless they have their defaults.

    A search is frozen and a pytree. Arrays are its leaves: those of the loss, of networks that are pytrees, of models
    of `fusion`, and weights. Functions, other objects and counts are its structure: a new one compiles anew. Options
    that a Python number switches off are structure too, so a search that `jax.jit` takes as an argument has the program
    of one that it closes over. Streams go from part to part by the argument `state` of `greedy` and `beam`.

    Results have no derivative: inside `jax.grad` all that a search reads is a constant, also what its networks close
    over. To train on what it finds, compute the loss of those labels.

    Parameters
    ----------
    loss : TransducerLoss
        Gives the classes their meaning: any loss of the family, or yours (`TransducerLoss.decoding`). Options of
        training (sigma, FastEmit, delay penalty, omega) change nothing.
    joint : callable or LinearJoint
        ``joint(encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself, as in `JointLogits`.
        It runs in the loop: project `encoder_out` before. One that draws random numbers is an error; a Flax NNX module,
        or a method of one, runs in evaluation mode with the parameters that it has when the search is made.
    predictor : Predictor
        Or any object with `initial` and `step`, and perhaps `start` and `symbols`. No dropout, as in `joint`.
    max_labels : int
        L, the room for labels in a hypothesis. Once it is full, no label follows; `Hypotheses.full` says so. In a
        stream, `beam` has so much room for all parts, `greedy` for each part.
    max_symbols : int, default 10
        Labels that one frame may emit; after these only a blank is allowed.
    fusion : sequence of pairs (model, weight), default ()
        Adds weight times the score that a model gives to each label, and to an end: shallow fusion. `Predictor` says
        which objects are models. A score of -inf forbids the label. Weights may be traced, or below 0. A weight of 0
        adds nothing; a Python 0 skips the model.
    ilm_weight : float or scalar Array, default 0.0
        Subtracts ilm_weight times the log-probability of each label in the internal language model: the label softmax
        of ``joint(0, predictor row)``. If `encoder_out` was projected before, the bias of that projection belongs in
        the joint. For `HATLoss` this is the model's own language model (Variani et al. 2020); for others, without
        blanks, an estimate (Meng et al. 2021). A Python 0 skips it. For `greedy` and `beam`.
    blank_penalty : float or scalar Array, default 0.0
        Nats to subtract from the log-probability of every blank move, after the softmax, so that the search leaves out
        fewer labels. It counts in the scores. For every loss but `HATLoss`, greedy search finds the same labels as if
        the blanks' logits were lowered by it, as icefall and sherpa-onnx do. For all verbs but `sample`.
    temperature : float or scalar Array, default 1.0
        Divides the logits before the softmax: those of tokens, of durations and of a HAT's blank. It counts in the
        scores. Rows that are log-probabilities already (`fused_log_softmax=False`) allow 1 alone.
    blank_threshold : float or scalar Array, default 1.0
        On a frame whose blanks have together at least this probability, at the temperature and before penalty and
        fusion, no label may be written; 1 is off. So a search chooses, merges and reads fewer labels, and may lose some
        of them. For a `HATLoss` with a `LinearJoint` and a number that is not traced, the product for the labels is
        left out where the blanks of all rows of a step are so probable; and from 0.5 on `greedy` finds exactly what it
        finds without, up to the rounding of scores, as long as there is no fusion, internal language model or penalty.
        For all verbs but `sample`.
    duration_choice : {"pair", "token_first"}, default "pair"
        "pair": the best move is the best pair of token and duration. "token_first": NeMo's and Hugging Face's rule for
        TDT. The most probable token comes first, then the most probable duration by itself. A blank of duration 0 reads
        one frame, and so does, with no log-probability, a label of duration 0 that is the `max_symbols`-th of its frame
        (Hugging Face has no such limit). The score is the log-probability of the chosen tokens and durations. A path
        with such frames is not in the loss's lattice, so `exact_end` is an error. For losses without durations it
        changes nothing. For `greedy`.
    guard : Guard, optional
        Lets `Phrases` of `fusion` earn only where the model itself holds their labels possible. None: everywhere. For
        `greedy` and `beam`.
    confidence : Entropy, optional
        Adds `Hypotheses.label_confidences`, from the entropy of the row of each label. None: only the log-probabilities
        of the labels show how sure the model is, and the program computes nothing more. For `greedy` and `beam`.
    start : int, optional
        The label before the first one, for a predictor without `start`. Default: the blank. Negative: from the end of
        the predictor's `symbols`, an error without them.

    Raises
    ------
    TypeError, ValueError
        An option has the wrong type or range. The verbs raise them too.

    References
    ----------
    Meng et al., "Internal Language Model Estimation for Domain-Adaptive End-to-End Speech Recognition", 2021,
    arXiv:2011.01991.

    Examples
    --------
    Each frame asks for a class, and the predictor forbids to repeat the last label:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.Predictor(lambda batch: (), lambda state, labels: (-9 * jax.nn.one_hot(labels, 3), state))
    >>> search = decode.Search(RNNTLoss(blank=0), jnp.add, predictor, max_labels=5)
    >>> frames = 5 * jax.nn.one_hot(jnp.array([[1, 0, 2, 0]]), 3)
    >>> best = jax.jit(decode.Search.greedy)(search, frames, jnp.array([4]))
    >>> best.labels.tolist(), best.frames.tolist(), best.counts.tolist()
    ([[1, 2, -1, -1, -1]], [[0, 2, -1, -1, -1]], [2])
    """

    loss: TransducerLoss
    joint: Joint
    predictor: Predictor | Any
    max_labels: int
    _: dataclasses.KW_ONLY
    max_symbols: int = option(10, range=_options.LIMIT)
    fusion: Sequence[tuple[Any, float | jax.Array]] = ()
    ilm_weight: float | jax.Array = option(0.0, "greedy", "beam", range=_options.FINITE)
    blank_penalty: float | jax.Array = option(0.0, "greedy", "beam", range=_options.FINITE)
    temperature: float | jax.Array = option(1.0, range=_options.ABOVE_0)
    blank_threshold: float | jax.Array = option(1.0, "greedy", "beam", range=_options.UP_TO_1)
    duration_choice: typing.Literal["pair", "token_first"] = option("pair", "greedy")
    guard: Guard | None = option(Guard(), "greedy", "beam")
    confidence: Entropy | None = option(None, "greedy", "beam")
    start: int | None = None

    @_keywords.in_name_of("Search")
    def __post_init__(self):
        """Checks the options before there are utterances; a Flax NNX module becomes a pytree of its parameters."""
        values = _options.checked(self)
        values |= {name: in_evaluation(getattr(self, name)) for name in ("joint", "predictor")}
        values["fusion"] = tuple((in_evaluation(model), weight) for model, weight in values["fusion"])
        for name, x in values.items():
            object.__setattr__(self, name, x)

    def _refuse_unused(self, verb: str) -> None:
        """Raises an error unless the options that the verb does not take have their defaults: nothing is ignored."""
        for f in dataclasses.fields(self):
            value, verbs = getattr(self, f.name), f.metadata.get("verbs") or (verb,)
            if verb not in verbs and value is not f.default and (isinstance(value, jax.Array) or value != f.default):
                raise ValueError(f"{verb}: {f.name} must be left out, as it changes nothing here, got {value!r}.")

    def __repr__(self):
        """Shows the fields without a default, then those that differ from it."""
        shown = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return f"Search({', '.join(f'{name}={x!r}' for name, x, default in shown if x is not default)})"

    # ---- verbs on a batch

    @_keywords.keywords
    def greedy(
        self,
        encoder_out: jax.Array,
        lengths: jax.Array,
        *,
        exact_end: bool | jax.Array = False,
        state: Any = None,
        frames_at_once: int = 4,
    ) -> Hypotheses:
        """Takes the most probable move out of each node, from the first frame to the last.

        Ties prefer blanks, then lower classes. Utterances run from label to label at their own pace in one loop. A
        search without a path in the lattice (`exact_end`) has the score -inf and no labels, as in `beam`.

        Parameters
        ----------
        encoder_out : Array, float16 | bfloat16 | float32 | float64 [B, T, E]
            Output of the encoder.
        lengths : Array, integer [B]
            Frames of each utterance; later ones are never read.
        exact_end : bool or bool Array [B], default False
            True: only paths of the loss's lattice, so no move reads beyond the last frame. False: the last move may
            read further, as a search does not know a stream's end in advance. It matters for durations, big blanks and
            `final_blank`. In a stream: which utterances end with this part.
        state : pytree, optional
            `Hypotheses.state` of the previous part of a stream. Labels are those of this part; frames and scores count
            from the start of the stream.
        frames_at_once : int, default 4
            Frames of each utterance that a step reads. More frames make fewer and larger steps; labels stay the same.

        Returns
        -------
        Hypotheses
            One hypothesis for each utterance.

        Raises
        ------
        TypeError, ValueError
            An argument has the wrong type, shape or range; a loss lacks its `DecodingRules`; the predictor's state
            changes its shape; `start` contradicts the predictor; the joint network has more labels than the predictor;
            a model of `fusion` has another vocabulary, or serves another number of utterances; a weight is not finite;
            `exact_end` where an earlier part of the stream has read beyond the end. Where values are traced, an
            utterance gets the score NaN and no labels instead.

        References
        ----------
        Xu, Bataev, Jia and Ginsburg, "Label-Looping: Highly Efficient Decoding for Transducers", 2024,
        arXiv:2406.06220.
        """
        return _greedy.run(self, encoder_out, lengths, exact_end, state, frames_at_once)

    @_keywords.keywords
    def beam(
        self,
        encoder_out: jax.Array,
        lengths: jax.Array,
        width: int,
        *,
        merge: bool = True,
        threshold: float | jax.Array | None = None,
        length_norm: float | jax.Array = 0.0,
        exact_end: bool | jax.Array = False,
        state: Any = None,
        frames_at_once: int = 1,
    ) -> Hypotheses:
        """Finds the N best label sequences of each utterance by time-synchronous beam search.

        Hypotheses with equal labels are merged: their score is the log of the summed probability of their alignments.
        If the beam loses none, and with `exact_end`, it is minus the loss of these labels.

        Parameters
        ----------
        encoder_out, lengths, exact_end
            As for `greedy`. The predictor runs on B `width` sequences.
        width : int
            Hypotheses that the search keeps, N. Those of an utterance compete whatever frame they have reached, so a
            beam that loses none needs room for the same labels on several frames.
        merge : bool, default True
            False: alignments of equal labels stay apart. With `width` 1 this is `greedy`.
        threshold : float or scalar Array, optional
            Drops hypotheses with a score more than this, in nats, below the best. Fewer hypotheses take less time.
        length_norm : float or scalar Array, default 0.0
            Ranks the result by score / (labels + 1)^length_norm; 0: by score. Scores and search stay as they are.
        state : pytree, optional
            `Hypotheses.state` of the previous part of a stream. Labels, frames and scores are those of the whole
            stream.
        frames_at_once : int, default 1
            K, the frames of each utterance that a step reads. More frames make fewer and larger steps, for a GPU; they
            may change the result, unlike in `greedy`. A window of K frames begins at each K-th frame of an utterance or
            stream. A step takes every hypothesis in it to its next label, on any frame of the window, or by blanks out
            of the window, and keeps the `width` best of all. So one sequence of labels may occupy several places, for
            ends on several frames, until it leaves the window, where they are merged. A beam that loses none finds the
            same scores for each K; others may find other lists. Parts of a stream find the lists of the whole if all
            but the last have a multiple of K frames.

        Returns
        -------
        Hypotheses
            The `width` best of each utterance, best first.

        Raises
        ------
        TypeError, ValueError
            As for `greedy`; the search has an option that `beam` does not take; `frames_at_once` without `merge`.

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
        >>> search = decode.Search(RNNTLoss(blank=0), jnp.add, predictor, max_labels=2)
        >>> lists = search.beam(jnp.log(jnp.array([[[0.5, 0.3, 0.2]]])), jnp.array([1]), width=3)
        >>> lists.labels[0].tolist(), [round(float(x), 3) for x in jnp.exp(lists.scores[0])]
        ([[-1, -1], [1, -1], [2, -1]], [0.5, 0.15, 0.1])
        """
        self._refuse_unused("beam")
        more = merge, threshold, length_norm, exact_end, state, frames_at_once
        return _beam.run(self, encoder_out, lengths, width, *more)

    @_keywords.keywords
    def sample(
        self,
        encoder_out: jax.Array,
        lengths: jax.Array,
        key: jax.Array,
        *,
        samples: int,
        top_k: int | jax.Array | None = None,
        top_p: float | jax.Array = 1.0,
        exact_end: bool | jax.Array = False,
        frames_at_once: int = 4,
    ) -> Hypotheses:
        """Draws alignments from the model, move by move, with the exact log-probability of each draw.

        Out of each node an alignment takes an allowed move at random: a blank, or a label with its duration. A move has
        the probability that it has in the loss, divided by that of all allowed moves. As in `greedy`, all arcs of the
        loss are allowed, but no labels at `max_symbols` and `max_labels`, and with `exact_end` no move out of the
        lattice. So without these limits an alignment of `RNNTLoss` or `HATLoss` is drawn with its probability in the
        model, and labels with the sum over their alignments. For `TDTLoss`, blanks of duration 0 share their
        probability among the other moves.

        Models of `fusion` change the scores of labels, from which the probabilities of all moves at a node are made
        again; a label with -inf is never drawn. An end is no choice, so their `final` is not asked.

        Parameters
        ----------
        encoder_out, lengths, exact_end, frames_at_once
            As for `greedy`. The predictor runs on B N sequences.
        key : Array, a JAX random key, or one for each utterance [B]
            An utterance draws by the key's `jax.random.fold_in` with its number, or by its own key; then its draws do
            not depend on the batch. Inside `jax.shard_map`, where numbers start anew on each device, give one for each.
        samples : int
            N. Samples are independent, so labels may repeat.
        top_k : int or integer scalar Array, optional
            At each node, draws are among the moves of the `top_k` most probable classes. Classes are those of the first
            softmax, labels and blanks, each with the probability of its allowed moves at the temperature of the search;
            of equal ones blanks come first, then lower classes. Durations are drawn in full. None: all classes.
        top_p : float or scalar Array, default 1.0
            Of these classes, whose probabilities are made to add up to 1 again, the most probable ones whose
            probabilities reach `top_p`, and no more. Above 0 and at most 1, which keeps all.

        Returns
        -------
        Hypotheses
            [B, N], in the order of the draws. `scores` are log-probabilities, in nats, of drawing these alignments, not
            of their labels; `label_log_probs` are those of the model. -inf: the draws met a dead end of the lattice
            (`exact_end`). `state` is None.

        Raises
        ------
        TypeError, ValueError
            As for `greedy`; `key` is no random key; the search has an option that `sample` does not take.

        See Also
        --------
        mwer_loss : Training by the expected number of errors of a list.

        Examples
        --------
        One frame that emits a label with probability 0.2, and then another one:

        >>> import jax
        >>> import jax.numpy as jnp
        >>> from jax_rnnt import RNNTLoss, decode
        >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2)), 1, start=0)
        >>> search = decode.Search(RNNTLoss(blank=0), jnp.add, predictor, max_labels=5)
        >>> frame = jnp.log(jnp.array([[[0.8, 0.2]]]))
        >>> drawn = search.sample(frame, jnp.array([1]), jax.random.key(0), samples=4000)
        >>> bool(abs((drawn.counts == 0).mean() - 0.8) < 0.03)
        True
        >>> [round(float(jnp.exp(drawn.scores[drawn.counts == n][0])), 3) for n in (0, 1, 2)]
        [0.8, 0.16, 0.032]
        """
        self._refuse_unused("sample")
        return _sample.run(self, encoder_out, lengths, key, samples, top_k, top_p, exact_end, frames_at_once)


# ------------------------------------------------------------------------------------------------------------ a pytree

_options.declare(Search)


class _Structure(typing.NamedTuple):
    """Everything in a search but its leaves."""

    tree: Any  # structure of the fields that may hold leaves
    found: tuple  # what `jax.tree.flatten` finds there, with `_LEAF` in the place of each leaf
    fields: tuple  # the other fields, by name


class _Object:
    """Wraps an object that has no hash. It equals itself alone."""

    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, _Object) and self.x is other.x

    def __hash__(self):
        return id(self.x)


_LEAF = object()


def _is_leaf(x) -> bool:
    """Counts, such as a predictor's start label, are structure. JAX puts shapes in the places of arrays, too."""
    array = hasattr(x, "shape") and hasattr(x, "dtype")
    return (array or isinstance(x, numbers.Real)) and not isinstance(x, numbers.Integral)


def _kept(x):
    if _is_leaf(x):
        return _LEAF
    try:
        hash(x)
    except TypeError:
        return _Object(x)
    return x


def _flatten(search: Search):
    fields = {f.name: getattr(search, f.name) for f in dataclasses.fields(search)}
    if isinstance(fields["loss"], TransducerLoss):
        fields["loss"] = switched_off(fields["loss"])
    names = [*NETWORKS, *(name for name in _options.OFF if _options.is_on(search, name))]
    found, tree = jax.tree.flatten({name: fields.pop(name) for name in names})
    leaves = [x for x in found if _is_leaf(x)]
    return leaves, _Structure(tree, tuple(map(_kept, found)), tuple(sorted(fields.items())))


def _unflatten(structure: _Structure, leaves):
    leaves = iter(leaves)
    found = [next(leaves) if x is _LEAF else x.x if isinstance(x, _Object) else x for x in structure.found]
    fields = jax.tree.unflatten(structure.tree, found) | dict(structure.fields)
    return _pytree.make(Search, fields.keys(), fields.values())


jax.tree_util.register_pytree_node(Search, _flatten, _unflatten)
