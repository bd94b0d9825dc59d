"""The frames that a frame of an encoder may see: a context of left, chunk and right, in encoder frames.

Frames are cut into chunks. In each layer, the attention of a frame sees its chunk, `left` frames before the chunk and
`right` frames after it. A convolution sees the frames that its kernel reaches: those before the chunk, those of the
chunk, and `right` frames after it. Beyond them it sees zeros, as in dynamic chunk convolution (Li et al. 2023,
arXiv:2304.09325). Frames after a chunk see their own right in each layer, so rows see further with each layer. A
context is data, so one program serves all contexts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

EVERYTHING = 1 << 29  # frames of a chunk that no recording fills


class Context(NamedTuple):
    """The numbers of frames before a chunk, in it and after it, which may be traced.

    `before` tells how many frames of the first chunk came earlier, and are not there.
    """

    left: int
    chunk: int
    right: int
    before: int = 0

    def edges(self, count):
        """Returns the first frame that each of `count` frames sees, and the end of what it sees, int32 [count] each."""
        place = jnp.arange(count) + self.before
        start = place - jax.lax.rem(place, jnp.int32(self.chunk)) - self.before
        return start - self.left, start + self.chunk + self.right

    def visible(self, count):
        """Returns True where a frame (row) sees another one (column), bool [count, count]."""
        first, end = (x[:, None] for x in self.edges(count))
        place = jnp.arange(count)
        return (place >= first) & (place < end)


WHOLE = Context(0, EVERYTHING, 0)


def listed(options):
    """Returns the lists (left, chunk, right) of a `config.Encoder` from which batches draw; None if none draws."""
    if not options.draws:
        return None
    several = (x if isinstance(x, tuple) else (x,) for x in (options.past, options.chunk, options.ahead))
    return tuple(tuple(min(size, EVERYTHING) for size in sizes) for sizes in several)


def drawn(options, seed, step):
    """Returns the Context of a batch, by seed and step: everything, or one entry of each list."""
    sizes = listed(options)
    if sizes is None:
        return None
    share, *keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), step), 4)
    chosen = (jax.random.choice(key, jnp.array(x, jnp.int32)) for key, x in zip(keys, sizes))
    whole = jax.random.uniform(share) < options.whole
    return Context(*(jnp.where(whole, everything, x) for everything, x in zip(WHOLE, chosen)))


def usual(options):
    """Returns the Context of a whole recording: None (all of it) if the training had such batches, else the largest."""
    sizes = listed(options)
    return None if sizes is None or options.whole else Context(*map(max, sizes))


def nearest(options, chunk, right):
    """Returns the Context of a training with the chunk and right nearest to these frames, and the longest left."""
    lefts, *sizes = listed(options)
    return Context(max(lefts), *(min(x, key=lambda y, z=z: abs(y - z)) for x, z in zip(sizes, (chunk, right))))
