"""BandLogits: S columns in every frame, [..., T, S, V], of a lattice with U + 1.

Place (t, s) is node (t, first[t] + s). The loss's emission reads the rows as they are; its planes are then placed on
the full lattice.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt.emissions._emission import NO_LABEL, OUTSIDE, Emission, Nodes, Placement
from jax_rnnt.layouts._layout import Layout, rows_of_frames, unsplit_by_reference


def band_label_map(targets: jax.Array, num_labels: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """Returns the class of the label arc that leaves column first[..., t] + s in frame t, int32 [..., T, S]."""
    rank = first.ndim + 2
    place = jax.lax.broadcasted_iota(jnp.int32, (1,) * first.ndim + (width,), first.ndim)
    column = first[..., None] + place
    index = jax.lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + targets.shape[-1:], rank - 1)
    picked = jnp.sum(jnp.where(column[..., None] == index, targets[..., None, None, :], 0), -1, dtype=jnp.int32)
    last = num_labels[..., None, None]
    within = (column >= 0) & (column < last)
    return jnp.where(within, picked, jnp.where(column == last, NO_LABEL, OUTSIDE))


def _hit(first, columns, width):
    """Returns which place of the band holds which column, bool [..., T, columns, S]; a gather would not shard."""
    rank = first.ndim + 2
    column = lax.broadcasted_iota(jnp.int32, (1,) * (rank - 2) + (columns, 1), rank - 2)
    place = lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + (width,), rank - 1)
    return column - first[..., None, None] == place


def unband(x, first, columns):
    """Expands [..., T, S] to [..., T, columns], with -inf outside the band."""
    hit = _hit(first, columns, x.shape[-1])
    return jnp.where(jnp.any(hit, -1), jnp.sum(jnp.where(hit, x[..., None, :], 0), -1), -jnp.inf)


def band(x, first, width):
    """Cuts [..., T, columns] to [..., T, S], with 0 where the band leaves the columns: the transpose of `unband`."""
    return jnp.sum(jnp.where(_hit(first, x.shape[-1], width), x[..., None], 0), -2)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Band(Placement[jax.Array]):
    """Places (logits [..., T, S, V], first int32 [..., T]) on a lattice with `columns` columns; `where` is `first`."""

    columns: int
    width: int  # S

    def nodes(self, logits, targets, num_frames, num_labels, lengths):
        rows, first = logits
        return rows, Nodes(band_label_map(targets, num_labels, first, self.width), num_frames), first

    def to_planes(self, planes, where):
        return {slot: unband(x, where, self.columns) for slot, x in planes.items()}

    def to_rows(self, planes, where):
        return {slot: band(x, where, self.width) for slot, x in planes.items()}


@keywords
@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class BandLogits(Layout):
    """Logits of S columns in every frame, the others forbidden (Kuang et al. 2022). `shape` is the band's.

    T frames, U labels, V classes, S columns; `...` is any number of batch dimensions.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, S, V]
        Output of the joint network: row s of frame t is node (t, first[..., t] + s).
    first : Array, integer [..., T]
        First column of each frame's band, from `prune_ranges` or your own. Columns outside [0, U_b] are ignored.
        Offsets may go back or start above 0: only paths inside the band count.

    See Also
    --------
    prune_ranges, prune_inputs : They choose a band, and gather its rows of encoder and predictor.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import BandLogits, RNNTLoss
    >>> logits = BandLogits(jnp.zeros((4, 2, 5)), first=jnp.array([0, 0, 1, 1]))
    >>> loss = RNNTLoss()(logits, jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    8.27
    """

    instead = "compute with its array logits"

    logits: jax.Array
    first: jax.Array
    batched = "logits", "first"

    def checked(self):
        logits = rows_of_frames(self.logits, "S")
        return BandLogits(logits, _checks.integers("first", self.first, logits.shape[:-2], "[..., T]"))

    def sequences(self, targets, logit_lengths, target_lengths):
        labels = np.shape(targets)[-1] if np.ndim(targets) else 0
        return _checks.sequences(targets, logit_lengths, target_lengths, self.shape[:-3], labels)

    def emission(self, loss, softmax, targets, *lengths):
        unsplit_by_reference(loss, "logits", self.logits, {-3: "T", -2: "S"})
        placement = Band(targets.shape[-1] + 1, self.shape[-2])
        return Emission(softmax, self.frames, softmax.tokens(self.classes), placement), (self.logits, self.first)

    @property
    def integers(self):
        return (self.first,)

    def kept(self, frames, columns):
        return unband(jnp.zeros(self.shape[:-1]), self.first, columns)[..., :frames, :] == 0
