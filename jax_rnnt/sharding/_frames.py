"""Exchange of a loss whose frames are split over several devices: each holds T / n of them, in the order of the axis.

Every device makes the planes of its own frames, for all sequences. The lattice needs all frames of a sequence. So the
devices exchange planes, V times smaller than the logits: afterwards each has all frames of B / n sequences, its own.
The cotangents go the way back. A batch that n does not divide is filled up with empty sequences. Every n-th sequence
belongs to a device, so that a batch split over another axis stays in place.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jax_rnnt.emissions._emission import Exchange
from jax_rnnt.sharding import _axes


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FrameExchange(Exchange):
    """Exchanges planes: [..., T / n, U + 1] of own frames become [B / n, T, U + 1] of own sequences.

    It runs where `axis` is a manual mesh axis. Sequences of the lattice, and so lengths and results, have one
    dimension; `shape` is that of the batch, `frames` is T / n. Results then go through `vocabulary`, which has the
    other axis.
    """

    axis: str
    shape: tuple[int, ...]
    frames: int
    vocabulary: Exchange

    @property
    def axes(self):
        return self.vocabulary.axes

    def own_frames(self, num_frames):
        return own_frames(num_frames, self.frames, self.axis)

    def of_own(self, x):
        x = self._dealt(x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :]))
        return jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(self.axis), 1, keepdims=False)

    def _dealt(self, x):
        """Reshapes [B, more] to [B / n, n, more]."""
        size, count = _axes.axis_size(self.axis), x.shape[0]
        x = jnp.pad(x, [(0, -count % size), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(x.shape[0] // size, size, *x.shape[1:])

    def _collected(self, x):
        """Reshapes [B / n, n, more] to [..., more]."""
        x = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])[: math.prod(self.shape)]
        return x.reshape(*self.shape, *x.shape[1:])

    def every(self, x):
        return self._collected(jax.lax.all_gather(x, self.axis, axis=1))

    def to_lattice(self, plane):
        plane = self._dealt(plane.reshape(math.prod(self.shape), *plane.shape[-2:]))
        return jax.lax.all_to_all(plane, self.axis, 1, 2, tiled=True)[:, 0]

    def to_rows(self, plane):
        return self._collected(jax.lax.all_to_all(plane[:, None], self.axis, 2, 1, tiled=True))

    def joined(self, x):
        place = jnp.arange(_axes.axis_size(self.axis), dtype=jnp.int32).reshape(1, -1, *(1,) * (x.ndim - 1))
        whole = jnp.where(place == jax.lax.axis_index(self.axis), x[:, None], jnp.zeros((), x.dtype))
        # A sum and no all-gather, since its type says that all devices have the same.
        return self.vocabulary.joined(self._collected(jax.lax.psum(whole, self.axis)))

    def joined_planes(self, plane):
        return self.vocabulary.joined(self.to_rows(plane))


def own_frames(num_frames, frames: int, axis: str):
    """Returns how many frames of each sequence are on this device, which holds `frames` of them."""
    return jnp.clip(num_frames - (jax.lax.axis_index(axis) * frames).astype(num_frames.dtype), 0, frames)
