"""What an emission is: logits -> log-probabilities ("planes") from which the seam makes the arcs of a lattice.

An emission is a frozen, hashable object, so that it can be static under jit. Its planes are named by slots; a slot that
starts with "label" is a label arc. `nodes` are the integers that say which rows belong to a sequence and what leaves
them. Only `reference` must be written: the rest follows from it, until a kernel takes its place.
"""

import dataclasses
import functools

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


def band_label_map(targets: jax.Array, num_labels: jax.Array, first: jax.Array, width: int) -> jax.Array:
    """int32 [..., T, S]: class of the label arc that leaves column first[..., t] + s in frame t."""
    rank = first.ndim + 2
    place = jax.lax.broadcasted_iota(jnp.int32, (1,) * first.ndim + (width,), first.ndim)
    column = first[..., None] + place
    index = jax.lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + targets.shape[-1:], rank - 1)
    picked = jnp.sum(jnp.where(column[..., None] == index, targets[..., None, None, :], 0), -1, dtype=jnp.int32)
    last = num_labels[..., None, None]
    within = (column >= 0) & (column < last)
    return jnp.where(within, picked, jnp.where(column == last, NO_LABEL, OUTSIDE))


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
    """x, and 0 in the sequences `bad` [...], whose own gradient is NaN: what sequences share gets nothing from them."""
    return jnp.where(_each(bad, x), 0, x)


@isolate.defjvp
def _(primals, tangents):
    x, bad = primals
    return isolate(x, bad), tangents[0] * jnp.where(_each(bad, x), jnp.nan, 1).astype(x.dtype)


def spoiled(planes: dict[str, jax.Array]) -> jax.Array:
    """bool [...]: sequences with a NaN in a plane [..., T, U1]."""
    return functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x), (-1, -2)) for x in planes.values()))


@dataclasses.dataclass(frozen=True)
class Emission:
    """`blanks` are the blank classes; `normalize=False`: the logits already are log-probabilities."""

    blanks: tuple[int, ...]
    normalize: bool = True

    def dimensions(self, logits) -> tuple[int, int]:
        """(T, V): how many frames there may be, and in what range labels must lie."""
        return logits.shape[-3], logits.shape[-1]

    def nodes(self, logits, targets, num_frames, num_labels, operands):
        """(label map, num_frames), or whatever else `reference` wants to know about the rows."""
        if "first" in operands:
            return band_label_map(targets, num_labels, operands["first"], logits.shape[-2]), num_frames
        return label_map(targets, num_labels), num_frames

    def reference(self, logits, nodes) -> dict[str, jax.Array]:
        """Planes [..., T, U1] by slot, in plain JAX: -inf outside the sequence, whose rows are masked before use."""
        raise NotImplementedError

    def forward(self, logits, nodes, *, strict=False):
        """(planes, residuals of `backward`); `strict` insists on a kernel."""
        self.refuse(strict)
        return self.reference(logits, nodes), ()

    def mute(self, nodes, scale):
        """The same nodes without sequences of which `scale` [...] is 0: a masked loss gives 0, whatever its logits."""
        label, num_frames = nodes
        return label, jnp.where(scale == 0, 0, num_frames)

    def refuse(self, strict):
        if strict:
            message = f"implementation='kernel': jax_rnnt has no kernel for the emission {type(self).__name__}; "
            raise NotImplementedError(message + "use implementation=None or 'reference'.")

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        """scale * clip(vjp of the planes at `cotangents`, clamp); `scale` and `clamp` are per sequence, [...]."""
        (gradient,) = jax.vjp(lambda x: self.reference(x, nodes), logits)[1](cotangents)
        return self.finish(gradient, nodes, scale, clamp)

    def finish(self, gradient, nodes, scale, clamp):
        """scale * clip(gradient, clamp)."""
        return jax.tree.map(lambda g: clip_and_scale(g, scale, clamp), gradient)
