"""The arguments that searches share, checked."""

import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt.decode import _predictor
from jax_rnnt.decode._gather import take
from jax_rnnt.decode._model import checked_joint, constant, scores_dtype
from jax_rnnt.decode.search import _options
from jax_rnnt.decode.search._symbols import Symbols, symbols_of
from jax_rnnt.layouts import LinearJoint


class Problem(typing.NamedTuple):
    """What a search runs on, checked. B utterances, T frames, E the width of encoder rows."""

    function: str
    symbols: Symbols
    joint: Callable  # may leave labels out where the blank is sure (`blank_first`)
    whole_joint: Callable
    predictor: Any
    encoder_out: jax.Array  # [B, T, E]
    lengths: jax.Array  # [B], 0 where out of range
    bad: jax.Array  # [B], where the length is out of range
    ends_here: Any  # True, False or bool [B, 1]: whether the utterance ends with these frames (`exact_end`)
    classes: int
    labels: int  # classes up to the last one that is no blank
    dtype: Any  # of scores
    copies: int = 1  # searches of each utterance, one after another; `lengths`, `bad` and `ends_here` are those of all

    @property
    def tokens(self) -> int:
        """Labels and blanks."""
        return self.classes - self.symbols.emission.num_durations

    def inside(self, t):
        """The nearest frame of encoder_out."""
        return jnp.clip(t, 0, max(self.encoder_out.shape[1] - 1, 0))

    def frame(self, t):
        """Encoder rows [B N, K, E] of frames t [B N, K], for N = `copies`; any row for frames outside."""
        batch, _, width = self.encoder_out.shape
        rows = take(self.encoder_out, self.inside(t).reshape(batch, self.copies * t.shape[1]))
        return rows.reshape(*t.shape, width)

    def vary(self, tree):
        """Leaves of a loop's first state, which vary over the same manual mesh axes as the loop's results."""
        like = self.encoder_out, self.lengths
        return jax.tree.map(lambda x: _xla.vary_together(x, *like)[0], tree)


def checked(function, encoder_out, lengths, exact_end):
    """(encoder_out [B, T, E], lengths int32 [B], exact_end), checked as far as their values are known."""
    encoder_out = _checks.floating(function, "encoder_out", encoder_out, 3, "[B, T, E]")
    if encoder_out.ndim != 3:
        raise ValueError(f"{function}: encoder_out must have shape [B, T, E], got {encoder_out.shape}.")
    batch, frames, _ = encoder_out.shape
    if np.shape(lengths) == (frames,) != (batch,):
        expected = f"shape [B, T, E], got {encoder_out.shape}, where dimension 1 has the B = {frames} utterances"
        raise ValueError(f"{function}: encoder_out must have {expected}: jnp.swapaxes(encoder_out, 0, 1).")
    _checks.unsplit(function, "encoder_out", encoder_out, {-2: "T", -1: "E"})
    raw, lengths = lengths, _checks.integers(function, "lengths", lengths, (batch,), "[B]")
    known = _checks.known(raw)
    if known is not None and np.any((known < 0) | (known > frames)):
        expected = f"lie in [0, {frames}], as encoder_out has {frames} frames"
        raise ValueError(f"{function}: lengths must {expected}, got {known.tolist()}.")
    if isinstance(exact_end, (bool, np.bool_)):
        exact_end = bool(exact_end)
    else:
        if getattr(exact_end, "dtype", None) != np.bool_ or tuple(exact_end.shape) != (batch,):
            got = f"{exact_end.dtype} {tuple(exact_end.shape)}" if hasattr(exact_end, "dtype") else repr(exact_end)
            raise TypeError(f"{function}: exact_end must be True or False, or bool [B] with B = {batch}, got {got}.")
        exact_end = jnp.asarray(exact_end)
    return constant(encoder_out), lengths, exact_end


def on_devices(run, encoder_out, lengths, exact_end, state):
    """``run(encoder_out, lengths, exact_end, state)``; on explicit mesh axes by each device for its own utterances."""
    others = [x for x in jax.tree.leaves((exact_end, state)) if isinstance(x, jax.Array)]
    encoder_out, lengths, *_ = _xla.split_alike(1, encoder_out, lengths, *others)
    if not _xla.is_split(encoder_out):
        return run(encoder_out, lengths, exact_end, state)
    if isinstance(exact_end, jax.Array):
        return _xla.by_shards(run, encoder_out, lengths, exact_end, state)
    return _xla.by_shards(lambda *arrays: run(*arrays[:2], exact_end, *arrays[2:]), encoder_out, lengths, state)


def prepare(function, search, encoder_out, lengths, exact_end, scoring, width=1, numbers=None):
    """(problem, start label, function that makes the predictor rows and state after it) of a `Search`.

    For `width` predictors of each utterance. `numbers`: further options by name, as for `out_of_range`.
    """
    batch, frames, _ = encoder_out.shape
    bad = (lengths < 0) | (lengths > frames)
    if frames == 0:  # nothing is read, but rows are gathered
        encoder_out = jnp.zeros((batch, 1, encoder_out.shape[2]), encoder_out.dtype)
    joint, predictor = search.joint, search.predictor
    start = _predictor.start_of(function, predictor, search.start)
    # The classes are known once there is a predictor row, and the start label by default once classes are known.
    row, _ = jax.eval_shape(lambda: _predictor.begin(function, "predictor", predictor, batch, 0))
    layout = checked_joint(function, joint, encoder_out, jnp.zeros((batch, 1, row.shape[-1]), row.dtype))
    symbols = symbols_of(function, search.loss, layout.classes, scoring)
    labels = layout.classes - symbols.emission.num_durations
    while labels - 1 in symbols.emission.blanks:
        labels -= 1
    _predictor.check_symbols(function, "predictor", predictor, labels)
    if start is None:
        name, known = "start, by default the blank,", _predictor.declared_symbols(predictor)
        start = _predictor.start_label(function, name, symbols.emission.blanks[0], known)
    first = functools.partial(_predictor.begin, function, "predictor", predictor, batch * width, start)
    dtype = scores_dtype(layout.dtype)
    bad |= _options.out_of_range(function, scoring.numbers | symbols.numbers | (numbers or {}), dtype)
    lengths = jnp.where(bad, 0, lengths)
    ends_here = exact_end if isinstance(exact_end, bool) else exact_end[:, None]

    def paired(joint, encoder, predictor):
        if not encoder.shape[0]:
            return jnp.zeros((0, layout.classes), dtype)
        return constant(joint(encoder, predictor))

    joint = layout.joint
    # Not with a traced threshold: 1 must be off by value, and XLA rounds the products of another program otherwise.
    known = scoring.skips and _checks.is_number(scoring.blank_threshold)
    if known and symbols.emission.bernoulli and isinstance(joint, LinearJoint):
        joint = functools.partial(blank_first, symbols, joint)
    pair, whole = functools.partial(paired, joint), functools.partial(paired, layout.joint)
    arrays = encoder_out, lengths, bad, ends_here
    return Problem(function, symbols, pair, whole, predictor, *arrays, layout.classes, labels, dtype), start, first


def blank_first(symbols: Symbols, joint: LinearJoint, encoder, predictor):
    """Logits [N, V] of rows; -inf for labels where the blank is sure in all rows, without their product.

    The blank's logit comes from a product of its own, of one column.
    """
    (blank,) = symbols.emission.blanks
    weight, bias = joint.weight, joint.bias
    column = LinearJoint(weight[:, blank, None], None if bias is None else bias[blank, None], joint.activation)
    of_blank = column(encoder, predictor)
    score = jax.nn.log_sigmoid(symbols.scoring.tempered(of_blank, True).astype(scores_dtype(of_blank.dtype)))

    def none(encoder, predictor):
        return jnp.full_like(encoder, -jnp.inf, of_blank.dtype, (encoder.shape[0], weight.shape[1]))

    every = functools.partial(product, joint)
    logits = jax.lax.cond(jnp.all(symbols.is_sure([score])), none, every, encoder, predictor)
    return jnp.where(symbols.is_blank(logits), of_blank, logits)


def product(joint: LinearJoint, encoder, predictor):
    """All logits; a function of this module, so that its calls can be counted."""
    return joint(encoder, predictor)


def beyond_the_end(problem, exact_end, reached):
    """bool [B]: utterances that end here, and of which an earlier part has read further, or ended by a wrong move.

    `reached` [B]: how many of these frames the moves of earlier parts need. The whole utterance at once would have
    taken other moves. Known ones raise.
    """
    function, symbols, lengths = problem.function, problem.symbols, problem.lengths
    if exact_end is False or not symbols.reach:
        return jnp.zeros(lengths.shape, bool)
    beyond = (reached > lengths) & exact_end
    known = _checks.known(beyond)
    if known is not None and known.any():
        expected = f"False, or True for utterances whose last part has {symbols.reach} frames or more"
        where = np.flatnonzero(known).tolist()
        got = f"True where an earlier part has read beyond the end, in the utterances {where}"
        raise ValueError(f"{function}: exact_end must be {expected}, as moves of this loss reach so far, got {got}.")
    return beyond
