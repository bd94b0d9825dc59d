"""Emission of rows whose frames lie on several devices: each holds T / n of them, in the order of the axis.

Every device makes the planes of its own frames, for all sequences. The lattice needs all frames of a sequence. So the
devices exchange planes, V times smaller than the logits: afterwards each has all frames of B / n sequences, its own.
The cotangents go the way back. A batch that n does not divide is filled up with empty sequences. Every n-th sequence
belongs to a device, so that a batch split over another axis stays in place.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_rnnt import _xla
from jax_rnnt.emissions._emission import Wrapper, out_of_range


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SplitFrames(Wrapper):
    """Planes [B / n, T, U + 1] of own sequences, from the rows of own frames. Runs where `axis` is a manual mesh axis.

    Sequences of the lattice, and so lengths and results, have one dimension; `shape` is that of the batch.
    """

    axis: str
    shape: tuple[int, ...]

    @property
    def _size(self):
        return _xla.axis_size(self.axis)

    def dimensions(self, logits):
        frames, classes = self.inner.dimensions(logits)
        return frames * self._size, classes

    def prepare(self, logits, targets, logit_lengths, target_lengths):
        bad = out_of_range(targets, logit_lengths, target_lengths, *self.dimensions(logits))
        num_frames, num_labels = (jnp.where(bad, 0, n) for n in (logit_lengths, target_lengths))
        frames, _ = self.inner.dimensions(logits)
        nodes = self.inner.nodes(logits, targets, own_frames(num_frames, frames, self.axis), num_labels)
        return logits, nodes, *map(self.own, (num_frames, num_labels, bad))

    def own(self, x):
        """The own sequences of x [..., more]."""
        x = self._dealt(x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :]))
        return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(self.axis), 1, keepdims=False)

    def _dealt(self, x):
        """[B / n, n, more] from [B, more]."""
        size, count = self._size, x.shape[0]
        x = jnp.pad(x, [(0, -count % size), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(x.shape[0] // size, size, *x.shape[1:])

    def _collected(self, x):
        """[..., more] from [B / n, n, more]."""
        x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[: math.prod(self.shape)]
        return x.reshape(*self.shape, *x.shape[1:])

    def joined(self, x):
        """All sequences [..., more] of x [B / n, more]."""
        place = jnp.arange(self._size, dtype=jnp.int32).reshape(1, -1, *(1,) * (x.ndim - 1))
        whole = jnp.where(place == jax.lax.axis_index(self.axis), x[:, None], jnp.zeros((), x.dtype))
        # A sum and no all-gather: its type says that all devices have the same.
        return self.inner.joined(self._collected(jax.lax.psum(whole, self.axis)))

    def joined_planes(self, plane):
        return self.inner.joined_planes(self._by_frames(plane))

    def _by_sequences(self, plane):
        """[B / n, T, U + 1] of own sequences, from [..., T / n, U + 1] of own frames."""
        plane = self._dealt(plane.reshape(math.prod(self.shape), *plane.shape[-2:]))
        return jax.lax.all_to_all(plane, self.axis, 1, 2, tiled=True)[:, 0]

    def _by_frames(self, plane):
        return self._collected(jax.lax.all_to_all(plane[:, None], self.axis, 2, 1, tiled=True))

    def _all(self, x):
        """x [...] of all sequences, from [B / n] of own ones."""
        return self._collected(jax.lax.all_gather(x, self.axis, axis=1))

    def without(self, nodes, masked):
        return self.inner.without(nodes, self._all(masked))

    def finish(self, gradient, nodes, scale, clamp):
        return self.inner.finish(gradient, nodes, self._all(scale), self._all(clamp))

    def reference(self, logits, nodes):
        return {slot: self._by_sequences(x) for slot, x in self.inner.reference(logits, nodes).items()}

    def forward(self, logits, nodes, *, strict=False):
        planes, saved = self.inner.forward(logits, nodes, strict=strict)
        return {slot: self._by_sequences(x) for slot, x in planes.items()}, saved

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        cotangents = {slot: self._by_frames(x) for slot, x in cotangents.items()}
        operands = residuals, cotangents, self._all(scale), self._all(clamp)
        return self.inner.backward(logits, nodes, *operands, strict=strict, alias=alias)


def own_frames(num_frames, frames: int, axis: str):
    """The frames of each sequence that lie on this device, of `frames` each."""
    return jnp.clip(num_frames - (jax.lax.axis_index(axis) * frames).astype(num_frames.dtype), 0, frames)
