"""What greedy and beam search share: results, checks of arguments, the joint network on rows."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt.decode import _predictor
from jax_rnnt.decode._symbols import Symbols, symbols_of
from jax_rnnt.emissions._softmax import accumulation_dtype
from jax_rnnt.layouts._joint import JointLogits
from jax_rnnt.layouts._joint_networks import LinearJoint, row_avals

PACK = 32  # rows or more that a network takes at once on a CPU: 640 by 1024 weights take 290 us for 16, 490 for 32
BLOCK = 32  # places of a row of which `largest_sums` looks at the maximum first


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
        Labels of each hypothesis; 0 where the score is NaN.
    scores : Array, float32 (float64 for float64 logits) [...]
        Log-probability in nats, with what `beam` adds to it; from the start of the stream. -inf: there is no (further)
        hypothesis. NaN: logits held NaN or +inf, the length was out of range, or the last part of a stream was too
        short for `exact_end`.
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

    def inside(self, t):
        """The nearest frame of encoder_out."""
        return jnp.clip(t, 0, max(self.encoder_out.shape[1] - 1, 0))

    def frame(self, t):
        """Encoder rows [B, K, E] of frames t [B, K]; any row for frames outside."""
        return take(self.encoder_out, self.inside(t))

    def vary(self, tree):
        """Leaves of a loop's first state, which vary over the same manual mesh axes as what the loop makes of it."""
        like = self.encoder_out, self.lengths
        return jax.tree.map(lambda x: _xla.vary_together(x, *like)[0], tree)


def prepare(function, loss, joint, predictor, encoder_out, lengths, max_symbols, start, width=1):
    """(search, start label, labels of the joint, rows and state of the predictors after it), all checked.

    Each utterance has `width` predictors.
    """
    batch, frames, _ = encoder_out.shape
    bad = (lengths < 0) | (lengths > frames)
    if frames == 0:  # nothing is read, but rows are gathered
        encoder_out = jnp.zeros((batch, 1, encoder_out.shape[2]), encoder_out.dtype)
    most = _checks.positive(function, "max_symbols", max_symbols)
    joint, predictor = _predictor.in_evaluation(joint), _predictor.in_evaluation(predictor)
    start = _predictor.start_of(function, predictor, start)
    # The classes are known once there is a predictor row, and the start label by default once classes are known.
    row, _ = jax.eval_shape(lambda: _predictor.begin(function, "predictor", predictor, batch, 0))
    rows = jnp.zeros((batch, 1, row.shape[-1]), row.dtype)
    if callable(joint) and not isinstance(joint, LinearJoint):
        _, draws = _xla.shape_of(f"{function}: joint", joint, *row_avals(2, encoder_out, rows))
        _checks.no_draws(function, "joint", draws)
    layout = JointLogits(joint, encoder_out, rows).checked(function)
    _checks.unsplit(function, "logits of joint", layout._made, {-1: "V"})
    symbols = symbols_of(function, loss, layout.classes, most)
    labels = layout.classes - symbols.emission.durations
    while labels - 1 in symbols.emission.blanks:
        labels -= 1
    _predictor.check_symbols(function, "predictor", predictor, labels)
    if start is None:
        name, known = "start, by default the blank,", _predictor.own_symbols(predictor)
        start = _predictor.start_label(function, name, symbols.emission.blanks[0], known)
    first = _predictor.begin(function, "predictor", predictor, batch * width, start)
    dtype = accumulation_dtype(layout.dtype)
    lengths = jnp.where(bad, 0, lengths)

    def paired(encoder, predictor):
        if encoder.shape[0] == 0:
            return jnp.zeros((0, layout.classes), dtype)
        return layout.joint(encoder, predictor)

    search = Search(function, symbols, paired, predictor, encoder_out, lengths, bad, layout.classes, dtype)
    return search, start, labels, *first


def checked(function, encoder_out, lengths, exact_end):
    """(encoder_out [B, T, E], lengths int32 [B], exact_end), checked as far as their values are known."""
    encoder_out = _checks.floating(function, "encoder_out", encoder_out, 3, "[B, T, E]")
    if encoder_out.ndim != 3:
        raise ValueError(f"{function}: encoder_out must have shape [B, T, E], got {encoder_out.shape}.")
    batch, frames, _ = encoder_out.shape
    _checks.unsplit(function, "encoder_out", encoder_out, {-2: "T", -1: "E"})
    given, lengths = lengths, _checks.integers(function, "lengths", lengths, (batch,), "[B]")
    known = _checks.known(given)
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
    return encoder_out, lengths, exact_end


def on_devices(run, encoder_out, lengths, exact_end, state):
    """``run(encoder_out, lengths, exact_end, state)``; on explicit mesh axes by each device for its own utterances."""
    if not _xla.is_split(encoder_out):
        return run(encoder_out, lengths, exact_end, state)
    if isinstance(exact_end, jax.Array):
        return _xla.by_shards(run, encoder_out, lengths, exact_end, state)
    return _xla.by_shards(lambda *arrays: run(*arrays[:2], exact_end, *arrays[2:]), encoder_out, lengths, state)


def beyond_the_end(function, symbols, exact_end, reached, lengths):
    """bool [B]: utterances that end here, and of which an earlier part has read further, or ended by a wrong move.

    `reached` [B]: how many frames the moves of earlier parts need beyond these. The whole utterance at once would have
    taken other moves. Known ones raise.
    """
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


def replace_rows(condition, new, old):
    """Rows of the pytree `new` where condition [B] holds, else of `old`."""

    def pick(x, y):
        return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)


class Packing(typing.NamedTuple):
    """Which of N rows are computed, and in which order, `size` at a time."""

    order: jax.Array  # [N and more]: first those that are computed
    rank: jax.Array  # [N]: place in that order of the row that makes this one
    makers: jax.Array  # how many are computed
    size: int


def packs(rows: int) -> bool:
    """Whether few of so many rows are packed, `PACK` or more at a time, before a network takes them.

    On a CPU, where time is arithmetic. Elsewhere all rows are computed: packs would exchange those of a sharded batch.
    So are a symbolic number of rows (`jax.export`): packs have a static size.
    """
    return jax.default_backend() == "cpu" and isinstance(rows, int) and rows > PACK


def pack_size(rows: int, usual: int) -> int:
    """Rows that a network takes at once, where `usual` of so many rows are no surprise.

    Packs that are seldom full take the time of full ones.
    """
    return min(max(PACK, usual), 4 * PACK) if packs(rows) else rows


def packing(wanted, maker, size, turn=0) -> Packing:
    """The rows that are wanted [N] and make themselves; `maker` [N] is the row that makes this one.

    Rows of a lower `turn` [N] come first.
    """
    rows = maker.shape[0]
    makes = wanted & (maker == jnp.arange(rows, dtype=jnp.int32))
    # Numbers alone: XLA sorts pairs of a flag and a number on a CPU in twice the time.
    most = np.iinfo(np.int32).max // rows - 1
    turn = jnp.where(makes, jnp.minimum(turn, most - 1), most)
    order = jnp.sort(turn * rows + jnp.arange(rows, dtype=jnp.int32)) % rows
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(rows, dtype=jnp.int32), mode="promise_in_bounds")
    return Packing(jnp.pad(order, (0, -rows % size)), rows_at(rank, maker), jnp.sum(makes, dtype=jnp.int32), size)


def each_pack(pack, count, function, made):
    """`made` after ``function(made, place, rows)`` of each pack of the first `count` rows; a pack is at `place`."""

    def step(carry):
        place, made = carry
        rows = jax.lax.dynamic_slice(pack.order, (place,), (pack.size,))
        return place + pack.size, function(made, place, rows)

    return jax.lax.while_loop(lambda carry: carry[0] < count, step, (jnp.zeros_like(count), made))[1]


def room(rows, usual, function, *inputs):
    """Arrays for the results of `compute_rows` of so many rows, where `function` takes rows of `inputs` [..., E]."""
    size = pack_size(rows, usual)
    shapes = jax.eval_shape(function, *(jax.ShapeDtypeStruct((size, x.shape[-1]), x.dtype) for x in inputs))
    count = rows + -rows % max(size, 1) if packs(rows) else rows
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), shapes)


def compute_rows(wanted, maker, usual, function, made):
    """(`function(rows)`, place in it of each row [N]), for the rows of `wanted` [N]; `rows` None: of all N.

    `usual` of them are no surprise. The results replace rows of `made`: new arrays would have to be filled.
    """
    rows = wanted.shape[0]
    if not packs(rows):
        return function(None), jnp.arange(rows, dtype=jnp.int32)
    pack = packing(wanted, maker, pack_size(rows, usual))

    def put(made, place, rows):
        put_at = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=0)
        return jax.tree.map(put_at, made, function(rows))

    return each_pack(pack, pack.makers, put, made), pack.rank


def step_rows(wanted, maker, slot, live, step, tree, labels, waits, turn):
    """(hypotheses that have stepped [B, W], slots [B, W], `tree` with their `step(tree rows, labels)`).

    The networks of a hypothesis lie in its slot of `tree` [B, 2 W, ...]; several may share one. The hypotheses of
    `wanted` step into slots that no live one had before, so no row is written that another pack still reads. `maker`
    [B, W], of all B W, makes the row of this one: they share the slot, too. Where rows are packed, those that do not
    fill a pack wait, unless no pack is full and `waits` does not hold. Utterances of a lower `turn` [B] come first.
    """
    batch, width = wanted.shape
    own = jnp.arange(batch * width, dtype=jnp.int32).reshape(wanted.shape)
    labels = jnp.where(wanted, labels, 0)
    packed = packs(batch * width)
    if packed:
        size = pack_size(batch * width, batch * width // 4)
        pack = packing(flat(wanted), flat(maker), size, jnp.repeat(turn, width))
        full = pack.makers // pack.size * pack.size
        count = jnp.where(waits | (full > 0), full, pack.makers)
        mine = wanted & (pack.rank.reshape(wanted.shape) < count)
    else:
        count, mine = jnp.sum(wanted, dtype=jnp.int32), wanted

    # The n-th hypothesis that makes a row takes the n-th free slot.
    slots = jnp.arange(2 * width, dtype=jnp.int32)[None, None]
    free = ~jnp.any((slot[:, :, None] == slots) & live[:, :, None], 1)
    makes = mine & (maker == own)
    taken = makes[:, :, None] & free[:, None] & (places(makes)[:, :, None] == places(free)[:, None])
    new = jnp.sum(jnp.where(taken, slots, 0), 2, dtype=jnp.int32)

    def advance(tree, _, rows):
        made = step(jax.tree.map(lambda x: rows_of(x, slot, rows), tree), rows_of(labels, None, rows))
        return jax.tree.map(lambda x, y: put_rows(x, jnp.where(makes, new, 2 * width), y, rows), tree, made)

    if packed:
        tree = each_pack(pack, count, advance, tree)
    else:
        tree = jax.lax.cond(count > 0, lambda tree: advance(tree, 0, None), lambda tree: tree, tree)
    return mine, jnp.where(mine, take(new, maker % width), slot), tree


def places(chosen):
    """[B, W]: how many before this one are chosen."""
    before = jnp.tri(chosen.shape[1], k=-1, dtype=bool)[None]
    return jnp.sum(chosen[:, None] & before, 2, dtype=jnp.int32)


def rows_of(x, index, rows):
    """Of x[b, index[b, w]], x [B, K, ...] and index [B, W] or None, the `rows` of all B W, or all in order."""
    batch, size = x.shape[:2]
    if rows is None:
        return flat(x if index is None else take(x, index))
    if index is not None:
        first = size * jnp.arange(batch, dtype=jnp.int32)[:, None]
        rows = rows_at(flat(first + index), rows)
    return rows_at(flat(x), rows)


def put_rows(x, index, y, rows):
    """x [B, K, ...] with y[n] at x[b, index[b, w]], where y holds `rows` of all B W, or all in order; none at K."""
    batch, size = x.shape[:2]
    if rows is None:
        return jax.vmap(lambda x, i, y: x.at[i].set(y, mode="drop"))(x, index, y.reshape(*index.shape, *y.shape[1:]))
    first = size * jnp.arange(batch, dtype=jnp.int32)[:, None]
    index = flat(jnp.where(index < size, first + index, batch * size))
    return flat(x).at[rows_at(index, rows)].set(y, mode="drop").reshape(x.shape)


def flat(x):
    """[B, M, ...] -> [B M, ...]"""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


@jax.vmap
def take(x, index):
    """x[b, index[b, c]] for x [B, W, ...] and index [B, C]."""
    return x.at[index].get(mode="promise_in_bounds")


def rows_at(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def scrambled(x):
    """A permutation of uint32 numbers [...] that spreads each bit over all (the last step of MurmurHash3)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def fingerprints(tree):
    """Two hashes int32 [N, 2] of the bits of each row of a pytree of numbers.

    Sums of a hash of each word, so that XLA vectorises them. Sums of multiplied bytes took as long on a CPU as the LSTM
    step before them.
    """
    total: Any = 0
    count = 0
    for x in jax.tree.leaves(tree):
        word = np.dtype(f"uint{min(32, 8 * x.dtype.itemsize)}")
        x = jax.lax.bitcast_convert_type(x, word)
        x = x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(np.uint32)
        places = np.random.default_rng(count).integers(0, 2**32, (2, x.shape[1]), np.uint32)
        parts = [jnp.sum(scrambled(x + y[None]), 1, dtype=np.uint32) for y in places]
        total, count = total + jnp.stack(parts, 1), count + 1
    return jax.lax.bitcast_convert_type(total, np.int32)


def peak(x):
    """(value, place int32) [...] of the maximum of each row of x [..., N]; the first of equal ones.

    XLA compiles an argmax for a CPU as a loop over single numbers: 340 us for 64 rows of 1024, and 80 us here.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    value = jnp.max(x, -1)
    return value, jnp.min(jnp.where(x == value[..., None], places, x.shape[-1] - 1), -1)


def largest_sums(x, row, gain, k):
    """The k largest of gain[b, w] + x[row[b, w], v] in each b, no NaN; the first of equal ones.

    x [R, V], row int32 and gain [B, W]; returns their w, v and x, each [B, k], k <= W. XLA's top_k for a CPU takes 520
    us for 8 of 8 x 1024, 16 times. The maxima of blocks take 30 us, and the rest looks at the blocks with the k largest
    maxima alone.
    """
    width, size = row.shape[1], x.shape[1]

    def on_cpu(x, row, gain):
        count = -(-size // BLOCK)
        blocks = jnp.pad(x, [(0, 0), (0, count * BLOCK - size)], constant_values=-jnp.inf)
        blocks = blocks.reshape(-1, BLOCK)
        maxima = gain[..., None] + rows_at(jnp.max(blocks, -1).reshape(-1, count), row)
        _, chosen = jax.lax.top_k(maxima.reshape(-1, width * count), k)
        chosen = jnp.sort(chosen, -1)  # the first of equal ones comes first
        parent, block = chosen // count, chosen % count
        candidates = rows_at(blocks, at(row, parent) * count + block)
        _, places = jax.lax.top_k((at(gain, parent)[..., None] + candidates).reshape(-1, k * BLOCK), k)
        parent, block = at(parent, places // BLOCK), at(block, places // BLOCK)
        return parent, block * BLOCK + places % BLOCK, at(candidates.reshape(-1, k * BLOCK), places)

    def anywhere(x, row, gain):
        rows = rows_at(x, row)
        _, places = jax.lax.top_k((gain[..., None] + rows).reshape(-1, width * size), k)
        return places // size, places % size, at(rows.reshape(-1, width * size), places)

    if size <= BLOCK:
        return anywhere(x, row, gain)
    return jax.lax.platform_dependent(x, row, gain, cpu=on_cpu, default=anywhere)


def at(x, index):
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds")
