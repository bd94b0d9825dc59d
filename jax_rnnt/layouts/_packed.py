"""PackedLogits: the rows of all sequences one after the other, no padding between them.

The loss's emission takes each row as a sequence of one node, so it runs on the packed logits in place. Only its planes
are gathered into the padded lattice.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt._pytree import static
from jax_rnnt.emissions._emission import NO_LABEL, Emission, Nodes, Placement
from jax_rnnt.layouts._layout import Layout


class NodesOfRows(typing.NamedTuple):
    """The node of each row, and the row of each node."""

    node: tuple[jax.Array, ...]  # (b, t, u), each [N]; 0 where the row belongs to no sequence
    used: jax.Array  # bool [N]: whether the row belongs to a sequence
    row: jax.Array  # [B, T, U1]
    inside: jax.Array  # bool [B, T, U1]


def offsets(num_frames: jax.Array, num_labels: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns (first row [B], row after the last [B]) of each sequence, at most rows + 1 whatever the lengths are."""
    frames, columns = jnp.clip(num_frames, 0, rows + 1), jnp.clip(num_labels, -1, rows) + 1
    many = frames > rows // jnp.maximum(columns, 1)
    count = jnp.where(columns == 0, 0, jnp.where(many, rows + 1, frames * columns))
    if isinstance(count.shape[0], int):
        end = jax.lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows + 1), count)
    else:  # a symbol of `jax.export`
        end = jax.lax.scan(lambda a, b: (jnp.minimum(a + b, rows + 1),) * 2, jnp.zeros_like(count[0]), count)[1]
    return jnp.concatenate([jnp.zeros_like(end[:1]), end[:-1]]), end


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Packed(Placement[NodesOfRows]):
    """Places logits [N, V], where every row is a sequence of one node. The lattice has `frames` frames."""

    frames: int

    def fits(self, logits, num_frames, num_labels):
        return offsets(num_frames, num_labels, logits.shape[0])[1] <= logits.shape[0]

    def nodes(self, logits, targets, num_frames, num_labels, lengths):
        # A sequence takes as many rows as its lengths say, in range or not.
        (batch, labels), rows = targets.shape, logits.shape[0]
        first, end = offsets(lengths[0], lengths[1], rows)
        shape = (batch, self.frames, labels + 1)
        t, u = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (1, 2))
        inside = (t < num_frames[:, None, None]) & (u <= num_labels[:, None, None])
        row = jnp.where(inside, first[:, None, None] + t * (num_labels[:, None, None] + 1) + u, 0)
        used, node = nodes_of_rows(num_frames, num_labels, first, end, rows)
        b, _, u = node
        label = labels_of_rows(targets, num_labels, b, u) if batch else b
        nodes = Nodes(label[:, None, None], used.astype(jnp.int32))
        return logits, nodes, NodesOfRows(node, used, row, inside)

    def view(self, logits):
        return logits[:, None, None]

    def to_planes(self, planes, where):
        def place(x):
            if not x.size:
                return jnp.full(where.row.shape, -jnp.inf, x.dtype)
            return jnp.where(where.inside, x[where.row, 0, 0], -jnp.inf)

        return {slot: place(x) for slot, x in planes.items()}

    def to_rows(self, planes, where):
        def pick(x):
            if not x.size:
                return jnp.zeros((where.used.shape[0], 1, 1), x.dtype)
            return jnp.where(where.used[:, None, None], x[where.node][:, None, None], 0)

        return {slot: pick(x) for slot, x in planes.items()}

    def of_rows(self, x, where):
        return x[where.node[0]] if x.size else jnp.zeros(where.used.shape, x.dtype)


def nodes_of_rows(num_frames, num_labels, first, end, rows: int):
    """Returns (bool [N]: whether a row belongs to a sequence, its (b, t, u), with t = u = 0 where it does not)."""
    batch, index = end.shape[0], jnp.arange(rows, dtype=jnp.int32)
    b = jnp.sum(end[:, None] <= index[None], 0, dtype=jnp.int32)
    known, b = b < batch, jnp.minimum(b, max(batch - 1, 0))
    if batch == 0:
        zero = jnp.zeros_like(index)
        return known, (zero, zero, zero)
    within, columns = index - first[b], num_labels[b] + 1
    used = known & (within < num_frames[b] * columns)
    return used, (b, jnp.where(used, within // columns, 0), jnp.where(used, within % columns, 0))


def labels_of_rows(targets, num_labels, b, u):
    """Returns the class of the label that leaves node (t, u) of sequence b, int32 [N]."""
    return jnp.where(u < num_labels[b], jnp.pad(targets, ((0, 0), (0, 1)))[b, u], NO_LABEL)


@keywords
@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class PackedLogits(Layout):
    """Rows of all sequences one after the other, without padding.

    B sequences, T frames, U labels, V classes, N rows. Row T_0 (U_0 + 1) + ... + T_{b-1} (U_{b-1} + 1) + t (U_b + 1)
    + u is node (t, u) of sequence b; rows past the last sequence are never read. `shape` is [N, V].

    Parameters
    ----------
    rows : Array, float16 | bfloat16 | float32 | float64 [N, V]
        Output of the joint network. N is static: the sum of T_b (U_b + 1), or more.
    max_frames : int, optional
        A bound of T_b, known at trace time: besides the logits there are planes [B, max_frames, U + 1]. Default: the
        largest of `logit_lengths`, or N where these are traced, which is correct but wasteful: set it under jit.

    Notes
    -----
    The loss is NaN also for T_b > max_frames and for sequences that do not fit into the N rows. A sequence whose
    lengths are out of range still takes as many rows as they say, or none if one is negative.

    `jax.vmap` adds batch dimensions. The rows of a sequence may be on any device of a sharded array: under
    `jax.shard_map` every device can pack its own sequences, while jit gathers the rows.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import PackedLogits, RNNTLoss
    >>> logits = PackedLogits(jnp.zeros((4 * 3 + 3 * 2, 5)), max_frames=4)
    >>> loss = RNNTLoss()(logits, jnp.array([[1, 2], [3, 0]]), jnp.array([4, 3]), jnp.array([2, 1]))
    >>> round(float(loss), 3)
    6.347
    """

    instead = "compute with its array rows"

    rows: jax.Array
    max_frames: int | None = static(None)

    @property
    def logits(self):
        return self.rows

    @property
    def frames(self):
        return self.rows.shape[0] if self.max_frames is None else self.max_frames

    def checked(self):
        rows = _checks.floating("logits", self.rows, 2, "[N, V]")
        if rows.ndim != 2 or rows.shape[-1] < 1:
            raise _checks.bad_value(f"logits must have shape [N, V] with V >= 1, got {tuple(rows.shape)}.")
        _checks.unsplit("logits", rows, {-2: "N"})
        if self.max_frames is not None and _checks.index("max_frames", self.max_frames) < 0:
            raise _checks.bad_value(f"max_frames must be 0 or more, got {self.max_frames}.")
        return PackedLogits(rows, self.max_frames)

    def sequences(self, targets, logit_lengths, target_lengths):
        if np.ndim(targets) != 2:
            raise _checks.bad_value(f"targets must have shape [B, U], got {np.shape(targets)}.")
        batch, labels = np.shape(targets)
        return _checks.sequences(targets, logit_lengths, target_lengths, (batch,), labels)

    def split_alike(self, *arrays):
        """Gives each device all sequences, since it has all rows, which may belong to any sequence."""
        return self, *_xla.whole(*arrays)

    def emission(self, loss, softmax, targets, logit_lengths, target_lengths):
        frames = self.frames_for(logit_lengths)
        return Emission(softmax, frames, softmax.tokens(self.classes), Packed(frames)), self.rows

    def frames_for(self, logit_lengths) -> int:
        """Returns a bound of the frames of sequences of these lengths."""
        if self.max_frames is not None:
            return int(self.max_frames)
        rows, known = self.rows.shape[0], _checks.known(logit_lengths)
        return rows if known is None else max(min(int(np.max(known, initial=0)), rows), 0)
