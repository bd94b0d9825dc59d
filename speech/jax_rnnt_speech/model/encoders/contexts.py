"""What a frame of an encoder may see: a context of left, chunk and right, in encoder frames.

Frames are cut into chunks. In each layer, a frame sees its chunk, `left` frames before the chunk and `right` frames
behind it. A convolution over time sees what its kernel reaches of its chunk, of all before it and of `right` frames
behind it, with zeros beyond: dynamic chunk convolution (Li et al. 2023, arXiv:2304.09325). A context is data, so one
program serves all. What lies `right` of a chunk sees its own right in each layer, so rows see further with each layer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EVERYTHING = 1 << 29  # frames of a chunk that no recording fills


class Context(NamedTuple):
    """Frames before a chunk, of it and behind it; the first chunk has lost `before` frames. Numbers, or traced ones."""

    left: int
    chunk: int
    right: int
    before: int = 0

    def edges(self, count):
        """(the first frame that each of `count` frames sees, the one behind the last), int32 [count] each."""
        place = jnp.arange(count) + self.before
        start = place - jax.lax.rem(place, jnp.int32(self.chunk)) - self.before
        return start - self.left, start + self.chunk + self.right

    def visible(self, count):
        """Which keys a query sees: bool [count, count]."""
        first, end = (x[:, None] for x in self.edges(count))
        place = jnp.arange(count)
        return (place >= first) & (place < end)


WHOLE = Context(0, EVERYTHING, 0)


def listed(options):
    """The lists (left, chunk, right) of a `config.Encoder` from which batches draw contexts, or None."""
    if not options.draws:
        return None
    return tuple(x if isinstance(x, tuple) else (x,) for x in (options.past, options.chunk, options.ahead))


def drawn(options, seed, step):
    """The Context of a batch, which the seed and the step decide: everything, or one entry of each list."""
    sizes = listed(options)
    if sizes is None:
        return None
    share, *keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 4)
    chosen = (jax.random.choice(key, jnp.array(x, jnp.int32)) for key, x in zip(keys, sizes))
    whole = jax.random.uniform(share) < options.whole
    return Context(*(jnp.where(whole, everything, x) for everything, x in zip(WHOLE, chosen)))


def usual(options):
    """The Context of a recording that is there as a whole; None: all of it, where a training has seen that."""
    sizes = listed(options)
    return None if sizes is None or options.whole else Context(*map(max, sizes))


def nearest(options, chunk, right):
    """The Context of a `config.Encoder` whose chunk and right are nearest to these frames, with the most before it."""
    lefts, *sizes = listed(options)
    return Context(max(lefts), *(min(x, key=lambda y, z=z: abs(y - z)) for x, z in zip(sizes, (chunk, right))))
