"""Largest entries of rows, since XLA's own argmax and top-k are slow on a CPU."""

import jax
import jax.numpy as jnp

from jax_rnnt.decode._gather import in_rows, rows_at

RANKED = 256  # most candidates of an utterance that `largest` compares with each other
BLOCK = 32  # size of the parts of a row whose maxima `largest_sums` looks at first


def peak(x):
    """Returns (value, place int32) [...] of the maximum of each row of x [..., N]; the first one if several are equal.

    XLA compiles an argmax for a CPU as a loop over single numbers: 340 us for 64 rows of 1024, and 80 us here. On a
    GPU one pass finds both.
    """
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)

    def two_passes(x):
        value = jnp.max(x, -1)
        return value, jnp.min(jnp.where(x == value[..., None], places, x.shape[-1] - 1), -1)

    def better(left, right):
        first = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1])) | jnp.isnan(left[0])
        return tuple(jnp.where(first, a, b) for a, b in zip(left, right))

    def one_pass(x):
        start = jnp.asarray(-jnp.inf, x.dtype), jnp.int32(x.shape[-1] - 1)
        return jax.lax.reduce((x, places), start, better, (x.ndim - 1,))

    return jax.lax.platform_dependent(x, cuda=one_pass, rocm=one_pass, default=two_passes)


def largest(x, k):
    """Returns (values, places) [B, k] of the k largest of each row of x [B, C], without NaN; first ones if equal.

    XLA sorts them on a GPU, which takes a copy and two kernels; up to `RANKED` numbers are ranked by all pairs there.
    """
    size = x.shape[1]

    def by_ranks(x):
        first = jnp.tri(size, k=-1, dtype=bool)[None]
        above = (x[:, None] > x[:, :, None]) | ((x[:, None] == x[:, :, None]) & first)
        rank = jnp.sum(above, 2, dtype=jnp.int32)
        places = jnp.arange(size, dtype=jnp.int32)[None, None]
        wanted = rank[:, None] == jnp.arange(k, dtype=jnp.int32)[None, :, None]
        place = jnp.minimum(jnp.sum(jnp.where(wanted, places, 0), 2, dtype=jnp.int32), size - 1)
        return in_rows(x, place), place

    def by_order(x):
        return tuple(jax.lax.top_k(x, k))

    if size > RANKED:
        return by_order(x)
    return jax.lax.platform_dependent(x, cpu=by_order, default=by_ranks)


def largest_sums(x, row, gain, k):
    """Finds the k largest of gain[b, w] + x[row[b, w], v] in each b, without NaN; the first ones if several are equal.

    x [R, V], row int32 and gain [B, W]; returns their w, v and x, each [B, k], k <= W. XLA's top_k for a CPU takes 520
    us for 8 of 8 x 1024, 16 times. The maxima of blocks take 30 us, and the rest looks only at the blocks with the k
    largest maxima.
    """
    width, size = row.shape[1], x.shape[1]

    def on_cpu(x, row, gain):
        count = -(-size // BLOCK)
        blocks = jnp.pad(x, [(0, 0), (0, count * BLOCK - size)], constant_values=-jnp.inf)
        blocks = blocks.reshape(-1, BLOCK)
        maxima = gain[..., None] + rows_at(jnp.max(blocks, -1).reshape(-1, count), row)
        _, chosen = jax.lax.top_k(maxima.reshape(-1, width * count), k)
        chosen = jnp.sort(chosen, -1)  # so that the first of equal ones comes first
        parent, block = chosen // count, chosen % count
        candidates = rows_at(blocks, in_rows(row, parent) * count + block)
        _, places = jax.lax.top_k((in_rows(gain, parent)[..., None] + candidates).reshape(-1, k * BLOCK), k)
        parent, block = in_rows(parent, places // BLOCK), in_rows(block, places // BLOCK)
        return parent, block * BLOCK + places % BLOCK, in_rows(candidates.reshape(-1, k * BLOCK), places)

    def anywhere(x, row, gain):
        rows = rows_at(x, row)
        _, places = jax.lax.top_k((gain[..., None] + rows).reshape(-1, width * size), k)
        return places // size, places % size, in_rows(rows.reshape(-1, width * size), places)

    if size <= BLOCK:
        return anywhere(x, row, gain)
    return jax.lax.platform_dependent(x, row, gain, cpu=on_cpu, default=anywhere)
