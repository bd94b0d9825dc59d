"""Softmax emission of packed logits: the rows of all sequences one after the other, no padding between them.

Each row is a sequence of one node for the emission, which so runs on the packed logits as they are, in place; only its
planes are put where the lattice wants them.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from jax_rnnt.emissions import softmax
from jax_rnnt.emissions.emission import NO_LABEL, Emission, clip_and_scale


class Nodes(typing.NamedTuple):
    label: jax.Array  # [N, 1, 1]
    used: jax.Array  # [N], 1 where the row belongs to a sequence
    place: tuple[jax.Array, ...]  # (b, t, u) of each row, 0 where it belongs to none
    row: jax.Array  # [B, T, U1]
    inside: jax.Array  # [B, T, U1]


def offsets(num_frames: jax.Array, num_labels: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(first row [B], row after the last [B]) of each sequence, no more than rows + 1 whatever the lengths are."""
    frames, columns = jnp.clip(num_frames, 0, rows + 1), jnp.clip(num_labels, -1, rows) + 1
    many = frames > rows // jnp.maximum(columns, 1)
    count = jnp.where(columns == 0, 0, jnp.where(many, rows + 1, frames * columns))
    end = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows + 1), count)
    return jnp.concatenate([jnp.zeros_like(end[:1]), end[:-1]]), end


@dataclasses.dataclass(frozen=True)
class Packed(Emission):
    """Of logits [N, V] with at most `frames` frames a sequence; `operands["first_row"]` comes from `offsets`."""

    frames: int = 0

    def dimensions(self, logits):
        return self.frames, logits.shape[-1]

    def nodes(self, logits, targets, num_frames, num_labels, operands):
        (batch, labels), rows = targets.shape, logits.shape[0]
        first, end = operands["first_row"], operands["end_row"]
        shape = (batch, self.frames, labels + 1)
        t, u = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
        inside = (t < num_frames[:, None, None]) & (u <= num_labels[:, None, None])
        row = jnp.where(inside, first[:, None, None] + t * (num_labels[:, None, None] + 1) + u, 0)

        index = jnp.arange(rows, dtype=jnp.int32)
        b = jnp.sum(end[:, None] <= index[None], 0, dtype=jnp.int32)
        known, b = b < batch, jnp.minimum(b, max(batch - 1, 0))
        if batch == 0:
            zero = jnp.zeros_like(index)
            return Nodes(zero[:, None, None], zero, (zero, zero, zero), row, inside)
        within, columns = index - first[b], num_labels[b] + 1
        used = known & (within < num_frames[b] * columns)
        t, u = jnp.where(used, within // columns, 0), jnp.where(used, within % columns, 0)
        padded = jnp.pad(targets, ((0, 0), (0, 1)))
        label = jnp.where(u < num_labels[b], padded[b, u], NO_LABEL)
        return Nodes(label[:, None, None], used.astype(jnp.int32), (b, t, u), row, inside)

    def _params(self):
        return dict(blanks=self.blanks, normalize=self.normalize)

    def _planes(self, rows, nodes):
        """Planes [B, T, U1] by slot from those of the rows, [N, 1, 1]."""

        def place(x):
            return (
                jnp.where(nodes.inside, x[nodes.row, 0, 0], -jnp.inf)
                if x.size
                else jnp.full(nodes.row.shape, -jnp.inf, x.dtype)
            )

        return {slot: place(x) for slot, x in zip(("blank", "label"), rows)}

    def reference(self, logits, nodes):
        rows = softmax.softmax_emission(logits[:, None, None], nodes.label, nodes.used, **self._params())
        return self._planes(rows, nodes)

    def forward(self, logits, nodes, *, strict=False):
        operands = logits[:, None, None], nodes.label, nodes.used
        *rows, norm = softmax.forward(*operands, strict=strict, **self._params())
        return self._planes(rows, nodes), norm

    def _of_rows(self, x, nodes):
        """Of each row, what its sequence has: [B] -> [N]."""
        return x[nodes.place[0]] if x.size else jnp.zeros(nodes.used.shape, x.dtype)

    def backward(self, logits, nodes, norm, cotangents, scale, clamp, *, strict=False, alias=True):
        planes = (cotangents[slot] for slot in ("blank", "label"))
        zero = jnp.zeros_like(norm)
        rows = tuple(
            jnp.where(nodes.used[:, None, None] > 0, x[nodes.place][:, None, None], 0) if x.size else zero
            for x in planes
        )
        scale, clamp = self._of_rows(scale, nodes), self._of_rows(clamp, nodes)
        operands = logits[:, None, None], nodes.label, nodes.used, norm, rows, scale, clamp
        return softmax.backward(*operands, strict=strict, alias=alias, **self._params())[:, 0, 0]

    def mute(self, nodes, scale):
        return nodes._replace(used=jnp.where(self._of_rows(scale, nodes) == 0, 0, nodes.used))

    def finish(self, gradient, nodes, scale, clamp):
        return clip_and_scale(gradient, self._of_rows(scale, nodes), self._of_rows(clamp, nodes))
