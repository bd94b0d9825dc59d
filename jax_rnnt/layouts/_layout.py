"""A layout says how logits [..., T, U + 1, V] are given. Every method of a loss takes every layout that suits the loss.

There are B sequences (`...`, any number of batch dimensions), T frames, U labels and V classes. A layout is a frozen
dataclass and a pytree. When a loss takes a layout, the layout checks its arrays and makes the emission that reads them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._lazy import LazyArray
from jax_rnnt.emissions._emission import Emission


class Layout(LazyArray):
    """The base of all layouts. A loss calls `checked` first, and the other methods on its result."""

    logits: Any
    sides: tuple[str, str] = "logits", ""  # the argument with U + 1 columns, and the one with T rows if it is another

    @property
    def shape(self) -> Any:
        return self.logits.shape

    @property
    def dtype(self) -> Any:
        return self.logits.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def frames(self) -> int:
        """The most frames that a sequence may have."""
        return self.shape[-3]

    @property
    def classes(self) -> int:
        """The logits in a row: V, or V + D with durations."""
        return self.shape[-1]

    def checked(self) -> Layout:
        """Returns the same layout with checked arrays."""
        raise NotImplementedError

    def sequences(self, targets, logit_lengths, target_lengths) -> tuple[jax.Array, ...]:
        """Returns targets [..., U] and both lengths [...], checked against the logits."""
        shape, sequences = self.shape, (targets, logit_lengths, target_lengths)
        return _checks.sequences(*sequences, shape[:-3], shape[-2] - 1, *self.sides, self.frames)

    batched: tuple[str, ...] = ()  # fields with arrays [..., more], which explicit mesh axes may split by the batch

    def split_alike(self, *arrays) -> tuple[Any, ...]:
        """Returns (the layout, the sequences' arrays, the last one [...]), all split over the same explicit axes."""
        own = [getattr(self, name) for name in self.batched]
        placed = _xla.split_alike(arrays[-1].ndim, *own, *arrays)
        changed = {name: new for name, old, new in zip(self.batched, own, placed) if new is not old}
        # A layout that stays keeps what it has computed, above all the shape of a joint network, which costs a trace.
        return _pytree.replace(self, **changed) if changed else self, *placed[len(own) :]

    def emission(self, loss, softmax, targets, logit_lengths, target_lengths) -> tuple[Emission, Any]:
        """Returns (emission, its logits); `softmax` reads rows. A layout adds a `Placement`, or rows of its own."""
        raise NotImplementedError

    # A loss with `vocab_axis` or `frame_axis` calls the next two methods.
    def split_arrays(self, option: str) -> dict[str, jax.Array]:
        """Returns the arrays, by name, whose rows hold the classes (`vocab_axis`) or the frames (`frame_axis`)."""
        expected = "an array [..., T, U + 1, V] or JointLogits"
        raise _checks.bad_type(f"{option}: logits must be {expected}, got {type(self).__name__}.")

    def specs(self, batch: list, frame_axis: str | None, vocab_axis: str | None) -> Layout:
        """Returns the layout with a `PartitionSpec` for each array; `batch` has the axes of batch dimensions."""
        self.split_arrays("vocab_axis" if frame_axis is None else "frame_axis")
        raise NotImplementedError

    # `TransducerLoss.validate` uses the next two attributes.
    integers: Any = ()  # arrays of integers that say where the rows lie

    def kept(self, frames: int, columns: int) -> jax.Array | None:
        """Returns which nodes have a row, bool [..., frames, columns]; None if all have one."""
        return None


def as_layout(logits) -> Layout:
    """Returns the layout for the argument `logits`, checked."""
    if isinstance(logits, Layout):
        return logits.checked()
    return ArrayLogits(logits).checked()


def unsplit_by_reference(loss, name, x, dimensions):
    if loss.implementation == "reference":
        _checks.unsplit(name, x, dimensions, " with implementation='reference'")


def rows_of_frames(logits, columns):
    """Returns checked logits [..., T, columns, V]; `columns` is the name of their number."""
    dimensions = f"[..., T, {columns}, V]"
    logits = _checks.floating("logits", logits, 3, dimensions)
    if any(_checks.smaller(n, 1) for n in logits.shape[-2:]):
        expected = f"shape {dimensions} with {columns} >= 1 and V >= 1"
        raise _checks.bad_value(f"logits must have {expected}, got {logits.shape}.")
    return logits


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayLogits(Layout):
    """An array [..., T, U + 1, V]."""

    logits: Any
    batched = ("logits",)

    def checked(self):
        return type(self)(rows_of_frames(self.logits, "U + 1"))

    def sequences(self, targets, logit_lengths, target_lengths):
        _dimensions(self.shape, targets, target_lengths)
        return super().sequences(targets, logit_lengths, target_lengths)

    def split_arrays(self, option):
        return {"logits": self.logits}

    def specs(self, batch, frame_axis, vocab_axis):
        return ArrayLogits(P(*batch, frame_axis, None, vocab_axis))

    def emission(self, loss, softmax, *sequences):
        unsplit_by_reference(loss, "logits", self.logits, {-3: "T", -2: "U + 1"})
        return Emission(softmax, self.frames, softmax.tokens(self.classes)), self.logits


def _dimensions(shape, targets, target_lengths):
    """Raises an error where targets show that a dimension of the logits is missing, or in the place of another."""
    *batch, labels = _checks.array("targets", targets).shape or (0,)
    if not batch or (*batch, labels) == (*shape[:-3], shape[-2] - 1):
        return
    longest = _checks.known(_checks.array("target_lengths", target_lengths))
    columns = {labels + 1} | ({int(longest.max()) + 1} if longest is not None and longest.size else set())
    elsewhere = [axis for axis in (-3, -1) if shape[axis] in columns and tuple(shape[:-3]) == tuple(batch)]
    if tuple(shape[:-2]) == tuple(batch):
        network = "tanh(encoder[..., :, None, :] + predictor[..., None, :, :]) @ W"
        way = f"a joint network makes a row of every frame and every column, as {network} does"
        fault = f"without the dimension U + 1: {way}"
    elif len(shape) == len(batch) + 3 and shape[-2] not in columns and elsewhere:
        place = elsewhere[0]
        fault = f"where dimension {place} has U + 1 = {shape[place]}: jnp.moveaxis(logits, {place}, -2)"
    elif len(batch) == 1 and len(shape) == 4 and shape[0] != batch[0] == shape[1]:
        fault = f"where dimension 1 has the B = {batch[0]} sequences: jnp.swapaxes(logits, 0, 1)"
    else:
        return
    raise _checks.bad_value(f"logits must have shape [..., T, U + 1, V], got {shape}, {fault}.")
