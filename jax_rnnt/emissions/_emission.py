"""Emissions: logits -> log-probabilities ("planes"), from which adjustments make the arcs of a lattice.

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


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y; 0 where one factor is 0, also beside NaN or infinity.

    A factor is replaced and not the product: the derivative with respect to a factor that is 0 is the other one.
    """
    return jnp.where((y == 0) & ~jnp.isfinite(x), 0, x) * jnp.where((x == 0) & ~jnp.isfinite(y), 0, y)


def clip_and_scale(gradient: jax.Array, scale: jax.Array, clamp: jax.Array) -> jax.Array:
    """scale * clip(gradient, clamp) with `scale` and `clamp` per sequence; clamp <= 0 clips nothing, and 0 stays 0."""
    bound, scale = (_each(x, gradient).astype(gradient.dtype) for x in (clamp, scale))
    return _product(jnp.where(bound > 0, jnp.clip(gradient, -bound, bound), gradient), scale)


def scale_cotangent(plane: jax.Array, scale: jax.Array) -> jax.Array:
    """plane [..., T, U1] times scale [...]; 0 where either factor is 0: a masked loss that is NaN adds nothing."""
    return _product(plane, _each(scale, plane).astype(plane.dtype))


def _each(x: jax.Array, like: jax.Array) -> jax.Array:
    """A number [...] of each sequence with the trailing axes of `like`."""
    return jnp.reshape(x, x.shape + (1,) * (like.ndim - x.ndim))


@jax.custom_jvp
def isolate(x, bad):
    """x with 0 in the sequences `bad` [...]: their own gradient is NaN, but shared arrays get nothing from them."""
    return jnp.where(_each(bad, x), 0, x)


@isolate.defjvp
def _(primals, tangents):
    x, bad = primals
    return isolate(x, bad), tangents[0] * jnp.where(_each(bad, x), jnp.nan, 1).astype(x.dtype)


def widened(arrays):
    """16-bit floats as float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, arrays)


def has_nan(planes: dict[str, jax.Array]) -> jax.Array:
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

    def without(self, nodes, masked):
        """The nodes without the sequences `masked` [...]: nothing of these is read."""
        label, num_frames = nodes
        return label, jnp.where(masked, 0, num_frames)

    def drop_zero_cotangent(self, nodes, scale):
        """The nodes without sequences whose `scale` [...] is 0: a masked loss has gradient 0, whatever its logits."""
        return self.without(nodes, scale == 0)

    def finish(self, gradient, nodes, scale, clamp):
        """scale * clip(gradient, clamp)."""
        return jax.tree.map(lambda g: clip_and_scale(g, scale, clamp), gradient)

    # For emissions whose rows lie on several devices.
    split_axes: Any = ()  # mesh axes over which logits vary, and planes do not

    def own(self, x):
        """Of numbers of each sequence [..., more], those whose planes this device has."""
        return x

    def joined(self, x):
        """Results of all sequences [..., more], from those of `own`."""
        return x

    def joined_planes(self, plane):
        """A plane that lies as the rows do, from one of `own` sequences with all frames."""
        return plane

    def pullback(self, logits, nodes, cotangents, scale, clamp):
        """What `backward` computes, from `reference`: differentiable any number of times, with respect to all of it."""
        # In float32 up to the end, as `backward`: float16 holds neither a large scale nor its product with a small one.
        wide = widened(logits)
        _, pull = jax.vjp(lambda x: self.reference(x, nodes), wide)
        if self.clips:
            gradient = self.finish(pull(cotangents)[0], nodes, scale, clamp)
        else:  # sequences share leaves, so each is scaled before
            gradient = pull(jax.tree.map(lambda ct: scale_cotangent(ct, scale), cotangents))[0]
        return jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, logits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def gradient(emission, strict, alias, logits, nodes, residuals, cotangents, scale, clamp):
    """`emission.backward`; 0 for a sequence whose `scale` is 0, whatever its logits.

    Its derivative belongs to `pullback`. So `residuals`, a cache of the logits, need none: their sums are scaled by
    2^-124, where small tangents become 0 and large cotangents infinite. Nor does a loss with weight 0 lose the
    derivative with respect to its weight.
    """
    problem = logits, emission.drop_zero_cotangent(nodes, scale), residuals, cotangents, scale, clamp
    return emission.backward(*problem, strict=strict, alias=alias)


@gradient.defjvp
def _(emission, strict, alias, primals, tangents):
    logits, nodes, _, cotangents, scale, clamp = primals
    # A masked loss that is NaN has no derivative either.
    nodes = emission.without(nodes, (scale == 0) & has_nan(cotangents))
    operands = logits, cotangents, scale, clamp

    def function(logits, *rest):
        return emission.pullback(logits, nodes, *rest)

    _, tangent = jax.jvp(function, operands, (tangents[0], *tangents[3:]))
    return gradient(emission, strict, alias, *primals), tangent


@dataclasses.dataclass(frozen=True)
class Wrapper(Emission):
    """Another layout of the rows that `inner` reads."""

    inner: Any

    @property
    def blanks(self):
        return self.inner.blanks

    @property
    def split_axes(self):
        return self.inner.split_axes

    def normalized(self, logits):
        return self.inner.normalized(logits)
