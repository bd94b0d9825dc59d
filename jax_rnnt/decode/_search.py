"""What greedy and beam search share: results, checks of arguments, the joint network on rows."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt._layouts import JointLogits
from jax_rnnt.decode import _predictor
from jax_rnnt.decode._symbols import Symbols, symbols_of
from jax_rnnt.emissions.softmax import accumulation_dtype

PACK = 16  # rows that a predictor takes at once on a CPU: 640 by 1024 weights take 295 us for 8, 438 us for 16
BLOCK = 32  # places of a row of which `largest` looks at the maximum first


class Hypotheses(typing.NamedTuple):
    """Decoded label sequences: one of each utterance [B], or the N best, the best one first [B, N].

    L is `max_labels`; `...` is [B] or [B, N].

    Parameters
    ----------
    labels : Array, int32 [..., L]
        -1 from `counts` on.
    frames : Array, int32 [..., L]
        The frame that each label was emitted in, counted from the start of the stream; -1 from `counts` on. After
        merging, those of the best alignment among the merged ones.
    durations : Array, int32 [..., L]
        Frames that each label read, 0 for labels that stay on their frame; -1 from `counts` on.
    counts : Array, int32 [...]
        Labels of each hypothesis.
    scores : Array, float32 (float64 for float64 logits) [...]
        Log-probability in nats, with what `beam` adds to it; from the start of the stream. -inf: there is no (further)
        hypothesis. NaN: logits held NaN or +inf, or the length was out of range.
    full : Array, bool [...]
        The hypothesis holds L labels, so labels may be missing: decode again with more.
    state : pytree
        For the next part of a stream.

    Examples
    --------
    >>> from jax_rnnt.decode import Hypotheses
    >>> Hypotheses._fields
    ('labels', 'frames', 'durations', 'counts', 'scores', 'full', 'state')
    """

    labels: jax.Array
    frames: jax.Array
    durations: jax.Array
    counts: jax.Array
    scores: jax.Array
    full: jax.Array
    state: Any


class Search(typing.NamedTuple):
    """The checked arguments of a search."""

    function: str
    symbols: Symbols
    joint: Callable
    predictor: Any
    encoder_out: jax.Array  # [B, T, E]
    lengths: jax.Array  # [B], 0 where out of range
    bad: jax.Array  # [B], where the length is out of range
    classes: int
    dtype: Any  # of scores

    def frame(self, t):
        """Encoder rows [B, K, E] of frames t [B, K]; any row for frames outside."""
        t = jnp.clip(t, 0, max(self.encoder_out.shape[1] - 1, 0))
        return jnp.take_along_axis(self.encoder_out, t[..., None], axis=1, mode="promise_in_bounds")

    def vary(self, tree):
        """Leaves of a loop's first state, which vary over the same manual mesh axes as what the loop makes of it."""
        like = self.encoder_out, self.lengths
        return jax.tree.map(lambda x: _xla.vary_together(x, *like)[0], tree)


def prepare(function, loss, joint, predictor, encoder_out, lengths, max_symbols, start, width=1):
    """(search, start class, rows and state of `width` predictors for each utterance after the start label)."""
    encoder_out = _checks.floating(function, "encoder_out", encoder_out, 3, "[B, T, E]")
    if encoder_out.ndim != 3:
        raise ValueError(f"{function}: encoder_out must have shape [B, T, E], got {encoder_out.shape}.")
    batch, frames, _ = encoder_out.shape
    lengths = _checks.integers(function, "lengths", lengths, (batch,), "[B]")
    bad = (lengths < 0) | (lengths > frames)
    if _checks.is_known(lengths) and np.any(np.asarray(bad)):
        expected = f"lie in [0, {frames}], as encoder_out has {frames} frames"
        raise ValueError(f"{function}: lengths must {expected}, got {np.asarray(lengths).tolist()}.")
    most = _checks.positive(function, "max_symbols", max_symbols)
    if start is not None:
        start = _checks.integer(function, "start", start)
    # The classes are known once there is a predictor row, and the start label by default once classes are known.
    row, _ = jax.eval_shape(lambda: _predictor.begin(function, "predictor", predictor, batch, 0))
    rows = jnp.zeros((batch, 1, row.shape[-1]), row.dtype)
    layout = JointLogits(joint, encoder_out, rows).checked(function)
    symbols = symbols_of(function, loss, layout.classes, most)
    start = symbols.emission.blanks[0] if start is None else start
    first = _predictor.begin(function, "predictor", predictor, batch * width, start)
    dtype = accumulation_dtype(layout.dtype)
    lengths = jnp.where(bad, 0, lengths)

    def paired(encoder, predictor):
        return layout.joint(encoder, predictor) if len(encoder) else jnp.zeros((0, layout.classes), dtype)

    search = Search(function, symbols, paired, predictor, encoder_out, lengths, bad, layout.classes, dtype)
    return search, start, *first


def replace_rows(condition, new, old):
    """Rows of the pytree `new` where condition [B] holds, else of `old`."""

    def pick(x, y):
        return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)


def step_rows(condition, step, tree, labels):
    """`step(tree, labels)` of the rows where condition [N] holds; the other rows of the pytree `tree` stay.

    Beam search asks for few of many rows. On a CPU, where time is arithmetic, these are packed, `PACK` at a time. Other
    platforms compute all rows: packing would exchange those of a sharded batch.
    """
    labels = jnp.where(condition, labels, 0)
    size = len(labels)
    if jax.default_backend() != "cpu" or size <= PACK:

        def advance(tree):
            return replace_rows(condition, step(tree, labels), tree)

        return jax.lax.cond(jnp.any(condition), advance, lambda x: x, tree)
    rank, count = jnp.cumsum(condition.astype(jnp.int32)) - 1, jnp.sum(condition, dtype=jnp.int32)
    order = jnp.argsort(~condition, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, -size % PACK))

    def pack(carry):
        done, tree = carry
        chosen = jax.lax.dynamic_slice(order, (done,), (PACK,))
        made = step(*jax.tree.map(lambda x: rows_at(x, chosen), (tree, labels)))
        place = rank - done
        mine = condition & (place >= 0) & (place < PACK)
        made = jax.tree.map(lambda x: rows_at(x, jnp.where(mine, place, 0)), made)
        return done + PACK, replace_rows(mine, made, tree)

    return jax.lax.while_loop(lambda carry: carry[0] < count, pack, (jnp.zeros_like(count), tree))[1]


def rows_at(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def peak(x):
    """(value, place int32) [...] of the maximum of each row of x [..., N]; the first of equal ones.

    XLA compiles an argmax for a CPU as a loop over single numbers: 340 us for 64 rows of 1024, and 80 us here.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    value = jnp.max(x, -1)
    return value, jnp.min(jnp.where(x == value[..., None], places, x.shape[-1] - 1), -1)


def largest(x, k):
    """(values, places int32) [B, k] of the k largest of each row of x [B, N], no NaN; the first of equal ones.

    On a CPU XLA's top_k reads all of a row again and again: 520 us for 8 of 8192 in 16 rows. The maxima of blocks take
    30 us, and the rest looks at the blocks with the k largest maxima alone.
    """

    def on_cpu(x):
        size = x.shape[1]
        count = -(-size // BLOCK)
        if count <= 2 * k:
            return tuple(jax.lax.top_k(x, k))
        blocks = jnp.pad(x, [(0, 0), (0, count * BLOCK - size)], constant_values=-jnp.inf).reshape(-1, count, BLOCK)
        _, chosen = jax.lax.top_k(jnp.max(blocks, -1), k)
        chosen = jnp.sort(chosen, -1)
        candidates = jnp.take_along_axis(blocks, chosen[..., None], 1, mode="promise_in_bounds").reshape(-1, k * BLOCK)
        values, places = jax.lax.top_k(candidates, k)
        block = jnp.take_along_axis(chosen, places // BLOCK, 1, mode="promise_in_bounds")
        return values, block * BLOCK + places % BLOCK

    return jax.lax.platform_dependent(x, cpu=on_cpu, default=lambda x: tuple(jax.lax.top_k(x, k)))
