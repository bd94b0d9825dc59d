"""The checked input of a search: one static description, and arrays.

A step of a search is a pure function ``step(static, given, carry) -> carry``. `Static` is hashable and holds no array.
`Given` is a pytree: the batch, and the `Search` itself with its networks and the numbers that are on.
There are B utterances and T frames; E is the width of encoder rows.
"""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt.decode import _options, _predictor
from jax_rnnt.decode._gather import take
from jax_rnnt.decode._model import checked_joint, constant, scores_dtype
from jax_rnnt.decode._moves import Moves, moves_of
from jax_rnnt.decode._scores import is_blank, is_sure, tempered_head
from jax_rnnt.layouts import LinearJoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static:
    """The static values of a step, known when it is traced."""

    moves: Moves
    start: int  # the label before the first one
    dtype: np.dtype  # dtype of the scores
    max_labels: int
    frames_at_once: int  # size of a window, the frames that a step reads
    exact_end: bool | None  # None: `Given.ends_here` says which utterances end
    blank_first: bool  # whether the product for the labels is left out where the blank is sure
    copies: int = 1  # number of searches of each utterance, one after another


class Given(typing.NamedTuple):
    """Arrays that stay the same from step to step, and the networks, which hold arrays or close over some.

    With several `copies` of each utterance, `lengths`, `bad`, `ends_here` and `first` have an entry for every copy.
    """

    search: Any  # the `Search`
    arc_weights: tuple  # the weight that the loss gives to each arc; None if nothing is added
    encoder_out: jax.Array  # [B, T, E]
    lengths: jax.Array  # [B]: 0 where it was out of range
    bad: jax.Array  # [B]: whether the length or a number is out of range
    ends_here: jax.Array | None  # bool [B, 1]: whether the utterance ends with these frames
    first: Any = None  # [B]: frames of the stream before these
    threshold: Any = None  # used by `beam`
    draws: Any = None  # `_sample.Draws`

    def inside(self, t):
        """Returns the nearest frame number inside encoder_out."""
        return jnp.clip(t, 0, max(self.encoder_out.shape[1] - 1, 0))

    def frame(self, t, copies=1):
        """Returns encoder rows [B N, K, E] of frames t [B N, K] for N `copies`; any row for frames outside."""
        batch, _, width = self.encoder_out.shape
        rows = take(self.encoder_out, self.inside(t).reshape(batch, copies * t.shape[1]))
        return rows.reshape(*t.shape, width)

    def vary(self, tree):
        """Makes the leaves of a loop's first carry vary over the same manual mesh axes as the loop's results."""
        like = self.encoder_out, self.lengths
        return jax.tree.map(lambda x: _xla.vary_together(x, *like)[0], tree)


def checked(search, encoder_out, lengths, exact_end):
    """Returns (search, encoder_out [B, T, E], lengths int32 [B], exact_end), checked where their values are known."""
    search = constant(search)
    search = _pytree.replace(search, **_options.checked(search))
    encoder_out = _checks.floating("encoder_out", encoder_out, 3, "[B, T, E]")
    if encoder_out.ndim != 3:
        raise _checks.bad_value(f"encoder_out must have shape [B, T, E], got {encoder_out.shape}.")
    batch, frames, _ = encoder_out.shape
    if np.shape(lengths) == (frames,) != (batch,):
        expected = f"shape [B, T, E], got {encoder_out.shape}, where dimension 1 has the B = {frames} utterances"
        raise _checks.bad_value(f"encoder_out must have {expected}: jnp.swapaxes(encoder_out, 0, 1).")
    _checks.unsplit("encoder_out", encoder_out, {-2: "T", -1: "E"})
    raw, lengths = lengths, _checks.integers("lengths", lengths, (batch,), "[B]")
    known = _checks.known(raw)
    if known is not None and np.any((known < 0) | (known > frames)):
        expected = f"lie in [0, {frames}], as encoder_out has {frames} frames"
        raise _checks.bad_value(f"lengths must {expected}, got {known.tolist()}.")
    if isinstance(exact_end, (bool, np.bool_)):
        exact_end = bool(exact_end)
    else:
        if getattr(exact_end, "dtype", None) != np.bool_ or tuple(exact_end.shape) != (batch,):
            got = f"{exact_end.dtype} {tuple(exact_end.shape)}" if hasattr(exact_end, "dtype") else repr(exact_end)
            raise _checks.bad_type(f"exact_end must be True or False, or bool [B] with B = {batch}, got {got}.")
        exact_end = jnp.asarray(exact_end)
    check_utterances(search, encoder_out)
    return search, constant(encoder_out), lengths, exact_end


def check_utterances(search, encoder_out) -> None:
    """Raises if a model of fusion has tables for other utterances than these."""
    batch = encoder_out.shape[0]
    for i, (model, _) in enumerate(search.fusion):
        served = getattr(model, "utterances", None)
        if served is not None and served != batch:
            expected = f"{batch}, those of encoder_out, or None"
            raise _checks.bad_value(f"fusion[{i}].utterances must be {expected}, got {served}.")
        if served is not None and _xla.is_split(encoder_out):
            cure = "run the search in jax.shard_map, which gives each device the model of its own utterances"
            got = f"got {served} where a mesh axis of type Explicit splits encoder_out"
            raise _checks.bad_value(f"fusion[{i}].utterances must be None, {got}: {cure}.")


def window(frames_at_once, encoder_out) -> int:
    """Returns the number of frames that a step reads: no more than there are."""
    size, frames = _options.size("frames_at_once", frames_at_once), encoder_out.shape[1]
    return max(frames, 1) if _checks.smaller(frames, size) else size


def on_devices(run, encoder_out, lengths, exact_end, state):
    """Calls ``run(encoder_out, lengths, exact_end, state)``, on explicit mesh axes on each device for its own rows."""
    others = [x for x in jax.tree.leaves((exact_end, state)) if isinstance(x, jax.Array)]
    encoder_out, lengths, *_ = _xla.split_alike(1, encoder_out, lengths, *others)
    if not _xla.is_split(encoder_out):
        return run(encoder_out, lengths, exact_end, state)
    if isinstance(exact_end, jax.Array):
        return _xla.by_shards(run, encoder_out, lengths, exact_end, state)
    return _xla.by_shards(lambda *arrays: run(*arrays[:2], exact_end, *arrays[2:]), encoder_out, lengths, state)


def prepare(search, encoder_out, lengths, exact_end, frames_at_once: int, numbers=None, greedy=False):
    """Returns (`Static`, `Given`) for a checked search and batch.

    `numbers` are those of the verb by their names, as for `out_of_range`.
    """
    batch, frames, _ = encoder_out.shape
    bad = (lengths < 0) | (lengths > frames)
    if frames == 0:  # nothing is read, but rows are gathered
        encoder_out = jnp.zeros((batch, 1, encoder_out.shape[2]), encoder_out.dtype)
    predictor = search.predictor
    start = _predictor.start_of(predictor, search.start)
    # The classes are known once there is a predictor row, and the start label by default once classes are known.
    row, _ = jax.eval_shape(lambda: _predictor.begin("predictor", predictor, batch, 0))
    layout = checked_joint(search.joint, encoder_out, jnp.zeros((batch, 1, row.shape[-1]), row.dtype))
    moves, weights = moves_of(search.loss, layout.classes, search.max_symbols, search.duration_choice)
    if _options.is_on(search, "temperature") and not moves.emission.normalize:
        expected = "1 with fused_log_softmax=False: rows are log-probabilities already"
        raise _checks.bad_value(f"temperature must be {expected}, got {search.temperature!r}.")
    _predictor.check_symbols("predictor", predictor, moves.symbols)
    if start is None:
        name, known = "start, by default the blank,", _predictor.declared_symbols(predictor)
        start = _predictor.start_label(name, moves.emission.blanks[0], known)
    dtype = scores_dtype(layout.dtype)
    weights = constant(weights)
    bad |= _options.out_of_range(weights | _options.numbers(search) | (numbers or {}), dtype)
    is_static = isinstance(exact_end, bool)
    # Not with a traced threshold: whether it is 1, which is off, is then unknown, and XLA would round products
    # otherwise.
    known = _options.is_on(search, "blank_threshold") and _checks.is_number(search.blank_threshold)
    static = Static(
        moves=moves,
        start=start,
        dtype=dtype,
        max_labels=search.max_labels,
        frames_at_once=frames_at_once,
        exact_end=exact_end if is_static else None,
        blank_first=known and moves.emission.bernoulli and isinstance(layout.joint, LinearJoint),
    )
    guard = search.guard and search.guard.of_verb(greedy)
    search = _pytree.replace(search, joint=layout.joint, guard=guard)
    arcs = tuple(None if _checks.is_zero(x) else x for x in weights.values())
    ends_here = None if is_static else exact_end[:, None]
    return static, Given(search, arcs, encoder_out, jnp.where(bad, 0, lengths), bad, ends_here)


# ---------------------------------------------------------------------------------------------------- joint network


def logits_of(static: Static, given: Given, encoder, rows, *, whole=False):
    """Returns logits [N, V] of encoder rows [N, E] and predictor rows; `whole`: all, even where the blank is sure."""
    if not encoder.shape[0]:
        return jnp.zeros((0, static.moves.classes), static.dtype)
    joint = given.search.joint
    if static.blank_first and not whole:
        joint = functools.partial(blank_first, static.moves, given.search)
    return constant(joint(encoder, rows))


def blank_first(moves: Moves, search, encoder, rows):
    """Returns logits [N, V] of rows; where the blank is sure in all rows, labels get -inf without their product.

    The blank's logit comes from a product of its own, of one column.
    """
    (blank,) = moves.emission.blanks
    weight, bias = search.joint.weight, search.joint.bias
    column = LinearJoint(weight[:, blank, None], None if bias is None else bias[blank, None], search.joint.activation)
    of_blank = column(encoder, rows)
    score = jax.nn.log_sigmoid(tempered_head(search, of_blank, True).astype(scores_dtype(of_blank.dtype)))

    def none(encoder, rows):
        return jnp.full_like(encoder, -jnp.inf, of_blank.dtype, (encoder.shape[0], weight.shape[1]))

    every = functools.partial(product, search.joint)
    logits = jax.lax.cond(jnp.all(is_sure(search, [score])), none, every, encoder, rows)
    return jnp.where(is_blank(moves, logits), of_blank, logits)


def product(joint: LinearJoint, encoder, rows):
    """Returns all logits; it is a function of this module so that its calls can be counted."""
    return joint(encoder, rows)
