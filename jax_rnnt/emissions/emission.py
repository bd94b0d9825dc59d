"""Emissions: logits -> log-probabilities ("planes"), from which the seam makes the arcs of a lattice.

Planes are named by slots; a slot that starts with "label" is a label arc.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

NO_LABEL = -1  # label map: no label arc leaves this node
OUTSIDE = -2  # label map: the node lies outside the sequence, its row is never read


def label_map(targets: jax.Array, num_labels: jax.Array) -> jax.Array:
    """int32 [..., 1, U1]: class of the label arc that leaves column u, in every frame alike."""
    shape = (1,) * num_labels.ndim + (targets.shape[-1] + 1,)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, num_labels.ndim)
    last = num_labels[..., None]
    padded = jnp.pad(targets, [(0, 0)] * (targets.ndim - 1) + [(0, 1)])
    return jnp.where(column < last, padded, jnp.where(column == last, NO_LABEL, OUTSIDE))[..., None, :]


def inside_targets(targets: jax.Array, num_labels: jax.Array) -> jax.Array:
    """bool [..., U]: which targets lie inside the lengths."""
    column = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_labels.ndim + targets.shape[-1:], num_labels.ndim)
    return column < num_labels[..., None]


def out_of_range(targets, num_frames, num_labels, frames: int, classes: int) -> jax.Array:
    """bool [...]: sequences with a length outside [0, frames] or [0, U], or a used label outside [0, classes)."""
    bad = jnp.any(inside_targets(targets, num_labels) & ((targets < 0) | (targets >= classes)), -1)
    return bad | (num_frames < 0) | (num_frames > frames) | (num_labels < 0) | (num_labels > targets.shape[-1])


def clip_and_scale(gradient: jax.Array, scale: jax.Array, clamp: jax.Array) -> jax.Array:
    """scale * clip(gradient, clamp) with `scale` and `clamp` per sequence; clamp <= 0 clips nothing, and 0 stays 0."""
    bound, scale = (jnp.reshape(x, x.shape + (1,) * (gradient.ndim - x.ndim)) for x in (clamp, scale))
    bound, scale = bound.astype(gradient.dtype), scale.astype(gradient.dtype)
    clipped = jnp.where(bound > 0, jnp.clip(gradient, -bound, bound), gradient)
    return jnp.where(gradient == 0, 0, clipped * scale)  # whatever the scale


def scale_cotangent(plane: jax.Array, scale: jax.Array) -> jax.Array:
    """plane [..., T, U1] times scale [...]; 0 where either factor is 0: a masked loss that is NaN adds nothing."""
    scale = scale[..., None, None].astype(plane.dtype)
    return jnp.where((plane == 0) | (scale == 0), 0, plane * scale)


def _each(condition: jax.Array, like: jax.Array) -> jax.Array:
    """A condition [...] with the trailing axes of `like`."""
    return jnp.reshape(condition, condition.shape + (1,) * (like.ndim - condition.ndim))


@jax.custom_jvp
def isolate(x, bad):
    """x with 0 in the sequences `bad` [...]: their own gradient is NaN, but shared arrays get nothing from them."""
    return jnp.where(_each(bad, x), 0, x)


@isolate.defjvp
def _(primals, tangents):
    x, bad = primals
    return isolate(x, bad), tangents[0] * jnp.where(_each(bad, x), jnp.nan, 1).astype(x.dtype)


def spoiled(planes: dict[str, jax.Array]) -> jax.Array:
    """bool [...]: sequences with a NaN in a plane [..., T, U1]."""
    return functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x), (-1, -2)) for x in planes.values()))


class Emission:
    """How logits become planes. A frozen, hashable object, static under jit: `jax.tree_util.register_static`.

    `logits` is an array, or whatever arrays a layout gives in its place.
    """

    blanks: Any  # classes, a tuple of int
    clips = True  # whether there are logits whose gradient a clamp can clip

    def normalized(self, logits) -> bool:
        """Whether the arcs of a node are probabilities that sum to 1 at most."""
        raise NotImplementedError

    def dimensions(self, logits) -> tuple[int, int]:
        """(T, V): the bounds of lengths and labels."""
        raise NotImplementedError

    def prepare(self, logits, targets, logit_lengths, target_lengths):
        """(logits, nodes, num_frames, num_labels, bad [...]) of a batch.

        A sequence with lengths or labels out of range is bad and gets T_b = U_b = 0. `nodes` holds integers: which rows
        belong to a sequence, and which label arc leaves each.
        """
        bad = out_of_range(targets, logit_lengths, target_lengths, *self.dimensions(logits))
        num_frames, num_labels = (jnp.where(bad, 0, n) for n in (logit_lengths, target_lengths))
        return logits, self.nodes(logits, targets, num_frames, num_labels), num_frames, num_labels, bad

    def nodes(self, logits, targets, num_frames, num_labels):
        """(label map, num_frames), or other arrays that tell `reference` which rows to read."""
        return label_map(targets, num_labels), num_frames

    def reference(self, logits, nodes) -> dict[str, jax.Array]:
        """Planes [..., T, U1] by slot, in plain JAX: -inf outside the sequence, whose rows are masked before use."""
        raise NotImplementedError

    def forward(self, logits, nodes, *, strict=False):
        """(planes, residuals of `backward`) by kernel; `strict` insists on one."""
        raise NotImplementedError

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        """scale * clip(vjp of the planes at `cotangents`, clamp); `scale` and `clamp` are per sequence, [...]."""
        raise NotImplementedError

    def mute(self, nodes, scale):
        """The nodes without sequences whose `scale` [...] is 0: a masked loss has gradient 0, whatever its logits."""
        label, num_frames = nodes
        return label, jnp.where(scale == 0, 0, num_frames)

    def finish(self, gradient, nodes, scale, clamp):
        """scale * clip(gradient, clamp)."""
        return jax.tree.map(lambda g: clip_and_scale(g, scale, clamp), gradient)


@dataclasses.dataclass(frozen=True)
class Wrapper(Emission):
    """Another layout of the rows that `inner` reads."""

    inner: Any

    @property
    def blanks(self):
        return self.inner.blanks

    def normalized(self, logits):
        return self.inner.normalized(logits)
