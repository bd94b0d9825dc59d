"""Packs the rows that a network computes in a step: only the wanted ones, together.

B utterances, W hypotheses of each, N = B W rows. On a CPU time is arithmetic, so rows are packed: a network takes
`size` wanted rows at a time. Rows that would be equal are computed once: `source` [N] is the row that computes this
one, itself for most. Elsewhere all rows are computed, since packs would exchange those of a sharded batch. States of
streams are the same on all platforms.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _xla
from jax_rnnt.decode._gather import (
    flat,
    hypothesis_rows,
    one_after_another,
    over_hypotheses,
    put_hypothesis_rows,
    rows_at,
    take,
)

PACK = 32  # rows that a network takes at once on a CPU, at least: 640 by 1024 weights take 290 us for 16, 490 for 32


class Packing(typing.NamedTuple):
    """Tells which of N rows are computed, and in which order, `size` at a time."""

    order: jax.Array  # [N]: rows in the order of the computation; those that are computed come first
    place: jax.Array  # [N]: the place in that order of this row's source
    computed: jax.Array  # number of rows that are computed
    size: int


def packs(rows: int) -> bool:
    """Returns True if a CPU packs this number of rows, which is so for more than one pack.

    A symbolic number of rows (`jax.export`) is not packed: packs have a static size.
    """
    return isinstance(rows, int) and rows > PACK


def by_platform(rows: int, in_packs, all_rows, *arguments):
    """Returns ``in_packs(*arguments)`` where a program for a CPU has enough rows, else ``all_rows(*arguments)``.

    The platform is that for which the program is lowered, which need not be that of this process.
    """
    if not packs(rows):
        return all_rows(*arguments)
    return jax.lax.platform_dependent(*arguments, cpu=in_packs, default=all_rows)


def any_or_always(wanted):
    """Returns True where a step must run what these rows want: on a CPU if any row does, elsewhere always.

    A branch would copy all states on a GPU, and few steps have no label.
    """
    # `some | True` and not `ones_like`: within `jax.shard_map` it varies over the devices, as `some` does.
    return jax.lax.platform_dependent(jnp.any(wanted), cpu=lambda some: some, default=lambda some: some | True)


def pack_size(usual: int) -> int:
    """Returns how many rows a network takes at once, where about `usual` of them are wanted.

    A pack that is seldom full takes as much time as a full one.
    """
    return min(max(PACK, usual), 4 * PACK)


def packing(wanted, source, size, lag=0) -> Packing:
    """Returns packs of the wanted rows [N] that are their own source; those with a lower `lag` [N] come first."""
    rows = source.shape[0]
    computed = wanted & (source == jnp.arange(rows, dtype=jnp.int32))
    # One number holds the lag and the row, since XLA on a CPU takes twice the time to sort pairs.
    most = np.iinfo(np.int32).max // rows - 1
    lag = jnp.where(computed, jnp.minimum(lag, most - 1), most)
    order = jnp.sort(lag * rows + jnp.arange(rows, dtype=jnp.int32)) % rows
    place = jnp.zeros_like(order).at[order].set(jnp.arange(rows, dtype=jnp.int32), mode="promise_in_bounds")
    return Packing(order, rows_at(place, source), jnp.sum(computed, dtype=jnp.int32), size)


def each_pack(packed, count, function, results):
    """Runs ``results = function(results, place, rows)`` for each pack of the first `count` rows; it begins at `place`.

    If the last pack would end beyond the N rows, it begins earlier, and some rows are computed twice.
    """

    def step(carry):
        place, results = carry
        rows = jax.lax.dynamic_slice(packed.order, (place,), (packed.size,))
        return place + packed.size, function(results, place, rows)

    return jax.lax.while_loop(lambda carry: carry[0] < count, step, (jnp.zeros_like(count), results))[1]


# ------------------------------------------------------------------------------------------ results of all rows


def empty_results(rows, function, *inputs):
    """Makes arrays for `compute_rows` with `rows` rows, where `function` takes rows of `inputs` [..., E]."""
    shapes = jax.eval_shape(function, *(jax.ShapeDtypeStruct((rows, x.shape[-1]), x.dtype) for x in inputs))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def compute_rows(wanted, source, usual, function, results):
    """Returns (``function(rows)`` of the wanted rows [N], the place [N] of each row in it); `rows` is None for all N.

    About `usual` of the rows are wanted. The results replace rows of `results`, since new arrays would have to be
    filled.
    """
    count = wanted.shape[0]

    def in_packs(wanted, source, results):
        packed = packing(wanted, source, pack_size(usual))

        def put(results, place, rows):
            put_at = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=place, axis=0)
            return jax.tree.map(put_at, results, function(rows))

        return each_pack(packed, packed.computed, put, results), packed.place

    def all_rows(wanted, source, results):
        return function(None), _xla.vary_together(jnp.arange(count, dtype=jnp.int32), source)[0]

    return by_platform(count, in_packs, all_rows, wanted, source, results)


# ------------------------------------------------------------------------------------------ states in their slots


def step_rows(step, tree, labels, wanted, source, slot, may_wait, lag):
    """Steps the networks of wanted hypotheses; returns (which have stepped [B, W], their slots [B, W], the new tree).

    Parameters
    ----------
    step : callable
        ``step(rows of tree [N, ...], labels [N]) -> rows of tree``.
    tree : pytree of Arrays [B, 2 W, ...]
        Networks in slots. Hypotheses step into slots that no other one has, so no row is written that another pack
        still reads.
    labels, wanted, source, slot : Array [B, W]
        For each hypothesis: the label that its networks read, whether they shall, the hypothesis (of all B W) whose
        step serves this one too, and its slot.
    may_wait : Array, bool
        Where rows are packed, those that do not fill a pack wait for a later step, if other packs are full or if this
        holds.
    lag : Array, int32 [B]
        Utterances with a lower lag come first.
    """
    batch, width = wanted.shape
    itself = jnp.arange(batch * width, dtype=jnp.int32).reshape(wanted.shape)
    labels = jnp.where(wanted, labels, 0)

    def targets(computed):
        """Returns the slots [B, W] into which hypotheses step; 2 W for those that do not, or share a step."""
        return jnp.where(computed, free_slots(slot), 2 * width)

    def advance(target, tree, rows):
        before = jax.tree.map(lambda x: hypothesis_rows(x, slot, rows), tree)
        after = step(before, hypothesis_rows(labels, None, rows))
        return jax.tree.map(lambda x, y: put_hypothesis_rows(x, target, y, rows), tree, after)

    def in_packs(tree, lag, may_wait):
        size = pack_size(batch * width // 4)
        packed = packing(flat(wanted), flat(source), size, jnp.repeat(lag, width))
        full = packed.computed // packed.size * packed.size
        count = jnp.where(may_wait | (full > 0), full, packed.computed)
        steps = wanted & (packed.place.reshape(wanted.shape) < count)
        target = targets(steps & (source == itself))
        tree = each_pack(packed, count, lambda tree, _, rows: advance(target, tree, rows), tree)
        return steps, take(target, source % width), tree

    def all_rows(tree, lag, may_wait):
        target, without = targets(wanted), tree._replace(key=None)  # no rows are shared
        after = jax.lax.cond(any_or_always(wanted), lambda x: advance(target, x, None), lambda x: x, without)
        return wanted, target, after._replace(key=tree.key)

    steps, target, tree = by_platform(batch * width, in_packs, all_rows, tree, lag, may_wait)
    return steps, jnp.where(steps, target, slot), tree


def free_slots(slot):
    """Returns the first W of the 2 W slots [B, W] that hold no hypothesis."""
    width = slot.shape[1]
    if width > 16:
        slots = jnp.arange(2 * width, dtype=jnp.int32)[None]
        taken = jnp.any(slot[:, :, None] == slots[:, None], 1)
        return jnp.sort(jnp.where(taken, 2 * width, slots))[:, :width]
    free, found = ~over_hypotheses(jnp.bitwise_or, jnp.left_shift(jnp.uint32(1), slot.astype(jnp.uint32))), []
    for _ in range(width):
        rest = free & (free - 1)  # without its lowest bit
        found.append(jax.lax.population_count((free ^ rest) - 1)[:, None])
        free = rest
    return one_after_another(found).astype(jnp.int32)
