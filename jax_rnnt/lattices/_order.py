"""Numbers that padding does not change: sums along an axis, and functions of single elements.

XLA adds the elements of an axis in an order that depends on the axis's size: more zeros at its end change bits. Here
the order depends on an element's place alone. Element-wise operations do all of it, so no compiler changes the order.

On a CPU a compiled element-wise function is a loop over vectors, and another one over the elements that fill no vector.
Both may round differently (one contracts a product and a sum, the other branches between them), and the size of the
array decides which of them an element meets. `elementwise` has arrays of one size that vectors always fill.
"""

import contextvars
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 512  # elements of each sequence, a multiple of every vector's
# Whether `elementwise` has blocks: JAX before 0.7 lowers no such loop under `jax.ensure_compile_time_eval`.
in_blocks = contextvars.ContextVar("in_blocks", default=True)


def elementwise(function, *arrays, batch_dims):
    """Computes ``function(*arrays)`` for arrays of one shape, whose first `batch_dims` dimensions are batch.

    The function is element-wise and returns an array or a tuple of arrays. Other sequences are on other devices, so a
    block has elements of each. There are at least two blocks, since XLA takes the body out of a loop that runs once.
    """
    shape = arrays[0].shape
    size = math.prod(shape[batch_dims:])
    if not isinstance(size, int) or not in_blocks.get():  # a symbol of `jax.export` allows no loop
        return function(*arrays)

    def by_blocks(*arrays):
        def split(x):
            flat = x.reshape(*shape[:batch_dims], size)
            flat = jnp.pad(flat, [*[(0, 0)] * batch_dims, (0, 2 * BLOCK - size % BLOCK)])
            return jnp.moveaxis(flat.reshape(*shape[:batch_dims], size // BLOCK + 2, BLOCK), -2, 0)

        def joined(x):
            x = jnp.moveaxis(x, 0, -2)
            return x.reshape(*shape[:batch_dims], (size // BLOCK + 2) * BLOCK)[..., :size].reshape(shape)

        return jax.tree.map(joined, lax.map(lambda x: function(*x), tuple(map(split, arrays))))

    return lax.platform_dependent(*arrays, cpu=by_blocks, default=function)


def cumulative(combine, arrays, neutral, reverse=False):
    """Combines, for each place of the last axis, all elements up to it, or with `reverse` from the last one down to it.

    ``combine(first, second)`` is associative, takes and returns a tuple of arrays, and `neutral` has the numbers of an
    element that changes nothing, not even a bit. After step k each place holds the last 2^k elements up to it. Steps
    beyond its own number of elements combine it with neutral ones. The size may be a symbol of `jax.export`.
    """
    size = arrays[0].shape[-1]
    steps = size.bit_length() if isinstance(size, int) else 31
    distances = jnp.minimum(jnp.asarray(2 ** np.arange(steps), jnp.int32), jnp.asarray(size, jnp.int32))
    pads = (0, size, 0) if reverse else (size, 0, 0)

    def step(latest, distance):
        start = distance if reverse else size - distance

        def before(x, fill):
            padded = lax.pad(x, np.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [pads])
            return lax.dynamic_slice_in_dim(padded, start, size, x.ndim - 1)

        return combine(tuple(map(before, latest, neutral)), latest), None

    return lax.scan(step, tuple(arrays), distances)[0]


def total(x, axis=-1):
    """Returns the sum over an axis; zeros at its end change no bit."""
    (sums,) = cumulative(lambda x, y: (x[0] + y[0],), (jnp.moveaxis(x, axis, -1),), (0,), reverse=True)
    return jnp.sum(sums[..., :1], -1)  # the sum of nothing is 0


def logaddexp(x, y):
    """Returns log(exp x + exp y). If both are -inf, its derivatives are 0, where those of `jnp.logaddexp` are NaN."""
    none = jnp.isneginf(x) & jnp.isneginf(y)
    return jnp.where(none, -jnp.inf, jnp.logaddexp(jnp.where(none, 0, x), y))
