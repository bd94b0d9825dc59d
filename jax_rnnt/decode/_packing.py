"""Rows that a network takes in a step: the wanted ones only, packed together.

B utterances, W hypotheses of each, N = B W rows. On a CPU time is arithmetic, so rows are packed: a network takes
`size` wanted rows at a time. Rows that would be equal are computed once: `source` [N] is the row that computes this
one, itself for most. Elsewhere all rows are computed, since packs would exchange those of a sharded batch.
"""

from __future__ import annotations

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt.decode._gather import flat, hypothesis_rows, put_hypothesis_rows, rows_at, take

PACK = 32  # rows or more that a network takes at once on a CPU: 640 by 1024 weights take 290 us for 16, 490 for 32


class Packing(typing.NamedTuple):
    """Which of N rows are computed, and in which order, `size` at a time."""

    order: jax.Array  # [N and more]: first those that are computed
    place: jax.Array  # [N]: where in that order the source of this row is
    computed: jax.Array  # how many are computed
    size: int


def packs(rows: int) -> bool:
    """Whether so many rows are packed: on a CPU, where they are more than one pack.

    A symbolic number of rows (`jax.export`) is not packed: packs have a static size.
    """
    return jax.default_backend() == "cpu" and isinstance(rows, int) and rows > PACK


def pack_size(rows: int, usual: int) -> int:
    """Rows that a network takes at once, where about `usual` of them are wanted.

    Packs that are seldom full take the time of full ones.
    """
    return min(max(PACK, usual), 4 * PACK) if packs(rows) else rows


def packing(wanted, source, size, lag=0) -> Packing:
    """Packs of the wanted rows [N] that are their own source; those of a lower `lag` [N] come first."""
    rows = source.shape[0]
    computed = wanted & (source == jnp.arange(rows, dtype=jnp.int32))
    # One number holds the lag and the row: XLA sorts pairs on a CPU in twice the time.
    most = np.iinfo(np.int32).max // rows - 1
    lag = jnp.where(computed, jnp.minimum(lag, most - 1), most)
    order = jnp.sort(lag * rows + jnp.arange(rows, dtype=jnp.int32)) % rows
    place = jnp.zeros_like(order).at[order].set(jnp.arange(rows, dtype=jnp.int32), mode="promise_in_bounds")
    return Packing(jnp.pad(order, (0, -rows % size)), rows_at(place, source), jnp.sum(computed, dtype=jnp.int32), size)


def each_pack(packs, count, function, made):
    """`made` after ``made = function(made, place, rows)`` of each pack of the first `count` rows; it is at `place`."""

    def step(carry):
        place, made = carry
        rows = jax.lax.dynamic_slice(packs.order, (place,), (packs.size,))
        return place + packs.size, function(made, place, rows)

    return jax.lax.while_loop(lambda carry: carry[0] < count, step, (jnp.zeros_like(count), made))[1]


# ------------------------------------------------------------------------------------------ results of all rows


def empty_results(rows, usual, function, *inputs):
    """Arrays for the results of `compute_rows` of so many rows, where `function` takes rows of `inputs` [..., E]."""
    size = pack_size(rows, usual)
    shapes = jax.eval_shape(function, *(jax.ShapeDtypeStruct((size, x.shape[-1]), x.dtype) for x in inputs))
    count = rows + -rows % max(size, 1) if packs(rows) else rows
    return jax.tree.map(lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype), shapes)


def compute_rows(wanted, source, usual, function, results):
    """(``function(rows)`` of the wanted rows [N], the place [N] of each row in it); `rows` None: all N in order.

    About `usual` of them are wanted. The results replace rows of `results`: new arrays would have to be filled.
    """
    rows = wanted.shape[0]
    if not packs(rows):
        return function(None), jnp.arange(rows, dtype=jnp.int32)
    packed = packing(wanted, source, pack_size(rows, usual))

    def put(results, place, rows):
        put_at = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=0)
        return jax.tree.map(put_at, results, function(rows))

    return each_pack(packed, packed.computed, put, results), packed.place


# ------------------------------------------------------------------------------------------ states in their slots


def step_rows(step, tree, labels, wanted, source, slot, may_wait, lag):
    """Steps the networks of wanted hypotheses: (those that have stepped [B, W], slots [B, W], the new tree).

    Parameters
    ----------
    step : callable
        ``step(rows of tree [N, ...], labels [N]) -> rows of tree``.
    tree : pytree of Arrays [B, 2 W, ...]
        Networks in slots. Hypotheses step into slots that no other one has, so no row is written that another pack
        still reads.
    labels, wanted, source, slot : Array [B, W]
        Of each hypothesis: the label that its networks read, whether they shall, the hypothesis (of all B W) whose
        step serves this one too, and its slot.
    may_wait : Array, bool
        Where rows are packed, those that do not fill a pack wait for a later step, if other packs are full or if this
        holds.
    lag : Array, int32 [B]
        Utterances of a lower one come first.
    """
    batch, width = wanted.shape
    own = jnp.arange(batch * width, dtype=jnp.int32).reshape(wanted.shape)
    labels = jnp.where(wanted, labels, 0)
    if packs(batch * width):
        size = pack_size(batch * width, batch * width // 4)
        packed = packing(flat(wanted), flat(source), size, jnp.repeat(lag, width))
        full = packed.computed // packed.size * packed.size
        count = jnp.where(may_wait | (full > 0), full, packed.computed)
        steps = wanted & (packed.place.reshape(wanted.shape) < count)
    else:
        packed, count, steps = None, jnp.sum(wanted, dtype=jnp.int32), wanted
    computed = steps & (source == own)
    new = free_slots(computed, slot)

    def advance(tree, _, rows):
        made = step(jax.tree.map(lambda x: hypothesis_rows(x, slot, rows), tree), hypothesis_rows(labels, None, rows))
        target = jnp.where(computed, new, 2 * width)
        return jax.tree.map(lambda x, y: put_hypothesis_rows(x, target, y, rows), tree, made)

    if packed is None:
        tree = jax.lax.cond(count > 0, lambda tree: advance(tree, 0, None), lambda tree: tree, tree)
    else:
        tree = each_pack(packed, count, advance, tree)
    return steps, jnp.where(steps, take(new, source % width), slot), tree


def free_slots(computed, slot):
    """[B, W]: the n-th computed hypothesis of an utterance gets its n-th slot, of 2 W, without a hypothesis."""
    slots = jnp.arange(2 * computed.shape[1], dtype=jnp.int32)[None, None]
    free = ~jnp.any(slot[:, :, None] == slots, 1)
    same_rank = count_before(computed)[:, :, None] == count_before(free)[:, None]
    taken = computed[:, :, None] & free[:, None] & same_rank
    return jnp.sum(jnp.where(taken, slots, 0), 2, dtype=jnp.int32)


def count_before(chosen):
    """[B, W]: how many before this one are chosen."""
    before = jnp.tri(chosen.shape[1], k=-1, dtype=bool)[None]
    return jnp.sum(chosen[:, None] & before, 2, dtype=jnp.int32)
