"""Rows of arrays by index, for B utterances, W hypotheses and K slots of each; every index is in range."""

import functools

import jax
import jax.numpy as jnp

UNROLLED = 16  # up to this many hypotheses, a reduction is no kernel of its own on a GPU


def flat(x):
    """Reshapes [B, W, ...] to [B W, ...]."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def rows_at(x, index):
    """Returns x[index]."""
    return x.at[index].get(mode="promise_in_bounds")


@jax.vmap
def take(x, index):
    """Returns x[b, index[b, c]] for x [B, W, ...] and index [B, C]."""
    return x.at[index].get(mode="promise_in_bounds")


def take_each(tree, index):
    """Applies `take` to all arrays [B, W] of a pytree: a gather for each dtype, on a GPU choices, which fuse more."""

    def by_dtype(tree, index):
        leaves, structure = jax.tree.flatten(tree)
        same_dtype: dict = {}
        for i, x in enumerate(leaves):
            same_dtype.setdefault(x.dtype, []).append(i)
        for places in same_dtype.values():
            rows = take(jnp.stack([leaves[i] for i in places], 2), index)
            for column, i in enumerate(places):
                leaves[i] = rows[:, :, column]
        return jax.tree.unflatten(structure, leaves)

    def by_choice(tree, index):
        def chosen(x):
            found = jnp.broadcast_to(x[:, :1], index.shape)
            for i in range(1, x.shape[1]):
                found = jnp.where(index == i, x[:, i : i + 1], found)
            return found

        return jax.tree.map(chosen, tree)

    if jax.tree.leaves(tree)[0].shape[1] > 4 * UNROLLED:
        return by_dtype(tree, index)
    return jax.lax.platform_dependent(tree, index, cuda=by_choice, rocm=by_choice, default=by_dtype)


def in_rows(x, index):
    """Returns x[b, index[b, c]] for x [B, N] and index [B, C]."""
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds")


def pick(x, place):
    """Returns the entry [...] of each row of x [..., N] at `place` [...]."""
    return jnp.take_along_axis(x, place[..., None], -1, mode="promise_in_bounds")[..., 0]


def hypothesis_rows(x, index, rows):
    """Returns x[b, index[b, w]] for the hypotheses `rows`, numbers below B W; for all of them in order if None.

    x is [B, K, ...] and index is [B, W]; without an index, K is W and each hypothesis has its own row.
    """
    batch, slots = x.shape[:2]
    if rows is None:
        return flat(x if index is None else take(x, index))
    if index is not None:
        first = slots * jnp.arange(batch, dtype=jnp.int32)[:, None]
        rows = rows_at(flat(first + index), rows)
    return rows_at(flat(x), rows)


def put_hypothesis_rows(x, index, new, rows):
    """Sets x[b, index[b, w]] of x [B, K, ...] to new[n] for the n-th of the hypotheses `rows`; index K sets nothing."""
    batch, slots = x.shape[:2]
    if rows is None:
        new = new.reshape(*index.shape, *new.shape[1:])
        return jax.lax.platform_dependent(x, index, new, cpu=put_each, default=put_all)
    first = slots * jnp.arange(batch, dtype=jnp.int32)[:, None]
    index = flat(jnp.where(index < slots, first + index, batch * slots))
    return flat(x).at[rows_at(index, rows)].set(new, mode="drop").reshape(x.shape)


@jax.vmap
def put_each(x, index, new):
    """Returns x [B, K, ...] with new[b, w] at x[b, index[b, w]]; index K writes nowhere."""
    return x.at[index].set(new, mode="drop")


def put_all(x, index, new):
    """Does the same by a choice for each of the K; GPUs and TPUs fuse the choices with what makes the rows."""
    slots = jnp.arange(x.shape[1], dtype=jnp.int32)[None, None]
    rows = jnp.arange(index.shape[1], dtype=jnp.int32)[None, :, None]
    place = over_hypotheses(jnp.maximum, jnp.where(index[..., None] == slots, rows, -1))
    rows = take(new, jnp.maximum(place, 0))
    return jnp.where((place >= 0).reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), rows, x)


def over_hypotheses(function, x):
    """Reduces x [B, W, ...] over W to [B, ...] by an associative ufunc of NumPy."""
    if x.shape[1] > UNROLLED:
        return function.reduce(x, 1)
    return functools.reduce(function, [x[:, i] for i in range(x.shape[1])])


def one_after_another(arrays):
    """Joins K arrays [B, W] to [B, K W]; on a GPU by a choice, since a concatenation is a kernel of its own there."""

    def choice(*arrays):
        kind, found = jnp.arange(len(arrays), dtype=jnp.int32)[None, :, None], arrays[0][:, None]
        for i, x in enumerate(arrays[1:], 1):
            found = jnp.where(kind == i, x[:, None], found)
        return found.reshape(found.shape[0], len(arrays) * arrays[0].shape[1])

    def joined(*arrays):
        return jnp.concatenate(arrays, 1)

    return jax.lax.platform_dependent(*arrays, cuda=choice, rocm=choice, default=joined)


def replace_rows(condition, new, old):
    """Takes rows of the pytree `new` where condition [B] holds, else of `old`."""

    def pick(x, y):
        return jnp.where(condition.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(pick, new, old)
