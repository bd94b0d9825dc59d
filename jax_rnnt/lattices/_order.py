"""Sums along an axis in an order that padding does not change.

XLA adds the elements of an axis in an order that depends on the axis's size: more zeros at its end change bits. Here
the order depends on an element's place alone. Element-wise operations do all of it, so no compiler changes the order.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax


def cumulative(combine, arrays, neutral, reverse=False):
    """For each place of the last axis, all elements up to it, combined; with `reverse`, from the last one down to it.

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
    """The sum over an axis; zeros at its end change no bit."""
    (sums,) = cumulative(lambda x, y: (x[0] + y[0],), (jnp.moveaxis(x, axis, -1),), (0,), reverse=True)
    return jnp.sum(sums[..., :1], -1)  # of nothing: 0
