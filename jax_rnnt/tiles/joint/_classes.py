"""The order of the classes of a row in which those that a loss treats in its own way have known places.

There are V classes.
"""

import dataclasses
import functools
import itertools

import jax.numpy as jnp

LANES = 128
CHUNKS, CHUNK_COST = (512, 640, 384, 768, 256, 128), 32  # classes of a chunk, and its cost in classes


def rounded(n, to):
    return -(-n // to) * to


@dataclasses.dataclass(frozen=True)
class Classes:
    """The order of the classes of a row: other heads in lanes of their own, blanks of the softmax, all others.

    Groups of classes have equally many lanes; the grid takes all blocks for each of them. A group has as many lanes for
    other heads as the first, and nothing in them.
    """

    count: int  # V, including durations
    blanks: tuple[int, ...]  # blanks of the softmax
    others: tuple[int, ...]  # classes of other heads
    groups: int
    sizes: tuple[int, ...] | None = None  # that a chunk may have; CHUNKS if None

    @property
    def start(self) -> int:
        """The lane of a group's first class of the softmax."""
        return LANES if self.others else 0

    @property
    def kept(self) -> int:
        """The number of the softmax's first classes whose logits the loss needs: blanks, or the anchor of `norm`."""
        return max(len(self.blanks), 1)

    @property
    def _least(self) -> int:
        """The number of lanes that a group needs."""
        return rounded(self.start + -(-(self.count - len(self.others)) // self.groups), LANES)

    @functools.cached_property
    def chunk(self) -> int:
        """The number of classes that a kernel takes at once, for few chunks and little padding."""
        sizes = self.sizes or [size for size in CHUNKS if size > self.start]
        return min(sizes, key=lambda size: rounded(self._least, size) + self._least // size * CHUNK_COST)

    @property
    def lanes(self) -> int:
        """The number of lanes of a group."""
        return rounded(self._least, self.chunk)

    @property
    def chunks(self) -> int:
        return self.lanes // self.chunk

    def _runs(self):
        """Returns the classes that are neither blanks nor of other heads, as [(first class, end)]."""
        edges = [-1, *sorted((*self.blanks, *self.others)), self.count]
        return [(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]

    def arrange(self, x, fill):
        """Arranges [..., V] as [..., groups * lanes]."""

        def padded(parts, size):
            parts = list(parts)
            missing = size - sum(y.shape[-1] for y in parts)
            if missing:
                parts.append(jnp.full((*x.shape[:-1], missing), fill, x.dtype))
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)

        size = self.lanes - self.start
        tokens = [*(x[..., k : k + 1] for k in self.blanks), *(x[..., a:b] for a, b in self._runs())]
        tokens = padded(tokens, self.groups * size)
        if not self.others:
            return tokens
        heads = [padded((x[..., k : k + 1] for k in self.others), self.start)]
        heads += [jnp.full_like(heads[0], fill)] * (self.groups - 1)
        parts = (tokens[..., i * size : (i + 1) * size] for i in range(self.groups))
        return jnp.concatenate([y for pair in zip(heads, parts) for y in pair], -1)

    def restore(self, x):
        """Inverts `arrange`."""
        others, tokens = x[..., : self.start], x
        if self.others:
            parts = x.reshape(*x.shape[:-1], self.groups, self.lanes)[..., self.start :]
            tokens = parts.reshape(*x.shape[:-1], self.groups * (self.lanes - self.start))
        parts = {k: others[..., i : i + 1] for i, k in enumerate(self.others)}
        parts |= {k: tokens[..., i : i + 1] for i, k in enumerate(self.blanks)}
        at = len(self.blanks)
        for a, b in self._runs():
            parts[a] = tokens[..., at : at + b - a]
            at += b - a
        ordered = [parts[k] for k in sorted(parts)]
        return ordered[0] if len(ordered) == 1 else jnp.concatenate(ordered, -1)

    def lane(self, label):
        """Returns the lane of each label; -1 for none, or for one of another head."""
        moved = sum((label > k).astype(jnp.int32) for k in (*self.blanks, *self.others))
        place = len(self.blanks) + label - moved
        for i, k in enumerate(self.blanks):
            place = jnp.where(label == k, i, place)
        size = self.lanes - self.start
        lane = place + (place // size + 1) * self.start
        for k in self.others:
            lane = jnp.where(label == k, -1, lane)
        return jnp.where(label < 0, -1, lane)


def heads(softmax, classes):
    """Returns (blanks of the softmax, classes of other heads)."""
    if softmax.bernoulli:
        return (), softmax.blanks
    return softmax.blanks, tuple(range(classes - softmax.num_durations, classes))
