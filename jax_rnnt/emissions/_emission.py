"""Emissions turn logits into log-probabilities ("planes"), from which adjustments make the arcs of a lattice.

An `Emission` composes three parts, each with a protocol of its own:

    Rows        the arithmetic of a row: logits -> planes, and back
    Placement   where the rows of a layout are: which node has which row. A new layout of logits implements this one
    Exchange    what devices tell each other when a loss is split over them: `jax_rnnt/sharding`

Planes are named by slots; a slot that starts with "label" is a label arc. B sequences (`...`, any number of batch
dimensions), T frames, U1 = U + 1 columns.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp

NO_LABEL = -1  # in a label map: no label arc leaves this node
OUTSIDE = -2  # in a label map: the node lies outside the sequence, and its row is never read

Planes = dict[str, jax.Array]  # for each slot an array [..., T, U1]
Logits = TypeVar("Logits")  # an array, or a pytree of arrays
Residuals = TypeVar("Residuals")  # a pytree of arrays
Where = TypeVar("Where")  # a pytree of integers


class Nodes(typing.NamedTuple):
    """The rows that belong to a sequence, and the label arc that leaves each node."""

    label: jax.Array  # int32 [..., 1 or T, U1]: class of the label arc, `NO_LABEL` or `OUTSIDE`
    num_frames: jax.Array  # int32 [...]: rows of later frames are never read
    num_labels: jax.Array | None = None  # int32 [...]; None where `label` alone determines the columns
    counts: jax.Array | None = None  # bool [..., T, U1]: nodes that `sum_over_nodes` adds up

    def without(self, masked: jax.Array) -> Nodes:
        """Removes the sequences `masked` [...]: nothing of them is read."""
        label = jnp.where(masked[..., None, None], OUTSIDE, self.label)
        return self._replace(label=label, num_frames=jnp.where(masked, 0, self.num_frames))


def label_map(targets: jax.Array, num_labels: jax.Array) -> jax.Array:
    """Returns the class of the label arc that leaves column u, int32 [..., 1, U1], the same in every frame."""
    shape = (1,) * num_labels.ndim + (targets.shape[-1] + 1,)
    column = jax.lax.broadcasted_iota(jnp.int32, shape, num_labels.ndim)
    last = num_labels[..., None]
    padded = jnp.pad(targets, [(0, 0)] * (targets.ndim - 1) + [(0, 1)])
    return jnp.where(column < last, padded, jnp.where(column == last, NO_LABEL, OUTSIDE))[..., None, :]


def inside_targets(targets: jax.Array, num_labels: jax.Array) -> jax.Array:
    """Returns bool [..., U]: which targets lie inside the lengths."""
    column = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_labels.ndim + targets.shape[-1:], num_labels.ndim)
    return column < num_labels[..., None]


def inside_rows(nodes: Nodes, frames: int) -> jax.Array:
    """Returns bool [..., T, U1]: which of the T = `frames` rows lie inside the sequence."""
    shape = (1,) * nodes.num_frames.ndim + (frames, 1)
    frame = jax.lax.broadcasted_iota(jnp.int32, shape, nodes.num_frames.ndim)
    return (frame < nodes.num_frames[..., None, None]) & (nodes.label != OUTSIDE)


def out_of_range(targets, num_frames, num_labels, frames: int, tokens: int) -> jax.Array:
    """Returns bool [...]: sequences with a length not in [0, frames] or [0, U], or a used label not in [0, tokens)."""
    bad = jnp.any(inside_targets(targets, num_labels) & ((targets < 0) | (targets >= tokens)), -1)
    return bad | (num_frames < 0) | (num_frames > frames) | (num_labels < 0) | (num_labels > targets.shape[-1])


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns x y; 0 where one factor is 0, even if the other is NaN or infinite.

    A factor is replaced and not the product: the derivative with respect to a factor that is 0 is the other one.
    """
    return jnp.where((y == 0) & ~jnp.isfinite(x), 0, x) * jnp.where((x == 0) & ~jnp.isfinite(y), 0, y)


def clip_and_scale(gradient: jax.Array, scale: jax.Array, clamp: jax.Array) -> jax.Array:
    """Returns scale * clip(gradient, clamp), both per sequence; clamp <= 0 clips nothing, and 0 stays 0.

    L = sum over b of c_b l_b, for losses l_b and incoming cotangents c_b (`scale`). `clamp` must mean the same whatever
    multiplies a loss, a mean over the batch or a factor against float16's underflow. So it clips the sequence's own
    gradient, and only then comes the cotangent:

        dL/dz = c_b clip(dl_b/dz, -clamp, clamp)        and not        clip(c_b dl_b/dz, -clamp, clamp)

    Clipping is not linear, so a backward pass that starts from c_b cannot give this.
    """
    bound, scale = (_each(x, gradient).astype(gradient.dtype) for x in (clamp, scale))
    return _product(jnp.where(bound > 0, jnp.clip(gradient, -bound, bound), gradient), scale)


def scale_cotangent(plane: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns plane [..., T, U1] times scale [...]; 0 if either is 0, so a masked loss that is NaN adds nothing."""
    return _product(plane, _each(scale, plane).astype(plane.dtype))


def _each(x: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes a number [...] of each sequence to the trailing axes of `like`."""
    return jnp.reshape(x, x.shape + (1,) * (like.ndim - x.ndim))


@jax.custom_jvp
def isolate(x, bad):
    """Returns x with 0 in sequences `bad` [...]: their own gradient is NaN, but shared arrays get nothing from them."""
    return jnp.where(_each(bad, x), 0, x)


@isolate.defjvp
def _(primals, tangents):
    x, bad = primals
    return isolate(x, bad), tangents[0] * jnp.where(_each(bad, x), jnp.nan, 1).astype(x.dtype)


def widened(arrays):
    """Returns 16-bit floats as float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype.itemsize == 2 else x, arrays)


def has_nan(planes: Planes) -> jax.Array:
    """Returns bool [...]: sequences with a NaN in a plane [..., T, U1]."""
    return functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x), (-1, -2)) for x in planes.values()))


class Rows(Generic[Logits, Residuals]):
    """Turns rows of logits into planes. A frozen, hashable object, static under jit: `jax.tree_util.register_static`.

    `Softmax` reads an array [..., T, U1, V]. Other rows come from a joint network or from two matrices.
    """

    blanks: Any  # classes, a tuple of int
    clips: Any = True  # whether there are logits whose gradient a clamp can clip
    normalized: Any  # whether the arcs of a node are probabilities that sum to 1 at most

    def reference(self, logits: Logits, nodes: Nodes) -> Planes:
        """Returns planes in plain JAX: -inf outside the sequence, whose rows are masked before use."""
        raise NotImplementedError

    def forward(self, logits: Logits, nodes: Nodes, *, strict: bool = False) -> tuple[Planes, Residuals]:
        """Returns (planes, residuals of `backward`) by kernel; `strict` insists on one."""
        raise NotImplementedError

    def backward(
        self, logits: Logits, nodes: Nodes, residuals: Residuals, cotangents: Planes, scale: jax.Array,
        clamp: jax.Array, *, strict: bool = False, alias: bool = True,
    ) -> Logits:  # fmt: skip
        """Returns scale * clip(vjp of the planes at `cotangents`, clamp); `scale` and `clamp` are per sequence, [...].

        It is 0 for a sequence whose `scale` is 0: a masked loss has gradient 0, whatever its logits. With `alias` the
        result may take the memory of the logits.
        """
        raise NotImplementedError

    def pullback(self, logits: Logits, nodes: Nodes, cotangents: Planes, scale: jax.Array, clamp: jax.Array) -> Logits:
        """Computes `backward` from `reference`: differentiable any number of times, with respect to all arguments."""
        # It is in float32 up to the end, as in `backward`: float16 holds neither a large scale nor its product with a
        # small one.
        wide = widened(logits)
        _, pull = jax.vjp(lambda x: self.reference(x, nodes), wide)
        if self.clips:
            gradient = jax.tree.map(lambda g: clip_and_scale(g, scale, clamp), pull(cotangents)[0])
        else:  # sequences share leaves, so each is scaled before
            gradient = pull(jax.tree.map(lambda ct: scale_cotangent(ct, scale), cotangents))[0]
        return jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, logits)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def gradient(rows: Rows, strict, alias, logits, nodes, residuals, cotangents, scale, clamp):
    """Computes `rows.backward`, with the derivative of `pullback`.

    `residuals` cache the logits and need no derivative: they are scaled by 2^-124, so tangents would underflow and
    cotangents overflow. It also keeps the derivative with respect to a zero weight.
    """
    return rows.backward(logits, nodes, residuals, cotangents, scale, clamp, strict=strict, alias=alias)


@gradient.defjvp
def _(rows, strict, alias, primals, tangents):
    logits, nodes, _, cotangents, scale, clamp = primals
    # A masked loss that is NaN has no derivative either.
    counted = nodes.without((scale == 0) & has_nan(cotangents))
    operands = logits, cotangents, scale, clamp

    def function(logits, *others):
        return rows.pullback(logits, counted, *others)

    _, tangent = jax.jvp(function, operands, (tangents[0], *tangents[3:]))
    return gradient(rows, strict, alias, *primals), tangent


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Placement(Generic[Where]):
    """Finds the rows of a layout. This class is for rows [..., T, U1, V], one for each node of the lattice.

    A layout that stores the rows in another way overrides what differs: `nodes` finds them, the other methods carry
    planes and numbers between the lattice [..., T, U1] and the sequences that `Rows` get. These may be others
    than those of the batch: for packed logits every row is a sequence of one node. It is frozen, hashable and static
    under jit. `where` is what `nodes` returns, for the methods that follow.
    """

    def fits(self, logits, num_frames: jax.Array, num_labels: jax.Array) -> jax.Array | None:
        """Returns bool [...]: sequences of which all rows exist, for lengths checked or not; None: always."""
        return None

    def nodes(
        self, logits, targets, num_frames, num_labels, lengths: tuple[jax.Array, jax.Array]
    ) -> tuple[Any, Nodes, Where | None]:
        """Returns (the arrays with rows among `logits`, their nodes, where they are), for checked lengths.

        `lengths` are both lengths as they were given.
        """
        return logits, Nodes(label_map(targets, num_labels), num_frames, num_labels), None

    def view(self, logits):
        """Returns logits in the shape that `Rows` read, in the same memory."""
        return logits

    def to_planes(self, planes: Planes, where: Where) -> Planes:
        """Returns planes [..., T, U1] of the lattice from those of the rows; -inf where a node has no row."""
        return planes

    def to_rows(self, planes: Planes, where: Where) -> Planes:
        """Returns the transpose of `to_planes`, for cotangents."""
        return planes

    def of_rows(self, x: jax.Array, where: Where) -> jax.Array:
        """Returns a number for each of the rows' sequences, from one [...] for each sequence of the batch."""
        return x


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Exchanges arrays between devices. This class exchanges nothing, since every device has all of its sequences.

    `own` sequences are those whose lattice is on this device.
    """

    axes: typing.ClassVar[Any] = ()  # mesh axes over which logits vary, but planes do not

    def own_frames(self, num_frames: jax.Array) -> jax.Array:
        """Returns how many frames of each sequence are on this device."""
        return num_frames

    def of_own(self, x: jax.Array) -> jax.Array:
        """Returns the numbers [..., more] of own sequences, from those of each sequence."""
        return x

    def every(self, x: jax.Array) -> jax.Array:
        """Returns a number of each sequence [...], from those of own ones; devices may differ in their types."""
        return x

    def to_lattice(self, plane: jax.Array) -> jax.Array:
        """Returns all frames of own sequences, from own frames of all sequences."""
        return plane

    def to_rows(self, plane: jax.Array) -> jax.Array:
        """Returns own frames of all sequences, from all frames of own ones."""
        return plane

    def joined(self, x: jax.Array) -> jax.Array:
        """Returns results of all sequences [..., more], the same on all devices, from those of own ones."""
        return x

    def joined_planes(self, plane: jax.Array) -> jax.Array:
        """Works as `to_rows`, for a result."""
        return self.joined(plane)


class Placed(typing.NamedTuple):
    """The nodes of a batch, and the places of their rows."""

    nodes: Nodes
    where: Any


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Emission(Generic[Logits, Residuals]):
    """Turns a batch's logits into planes of its lattice: by rows, where these are, and what devices exchange.

    `frames` and `tokens` bound lengths and labels.
    """

    rows: Rows[Logits, Residuals]
    frames: int
    tokens: int
    placement: Placement = Placement()
    exchange: Exchange = Exchange()

    def prepare(self, logits, targets, logit_lengths, target_lengths):
        """Returns (logits, `Placed`, num_frames, num_labels, bad [...]) for a batch.

        A sequence with lengths or labels out of range is bad and gets T_b = U_b = 0.
        """
        bad = out_of_range(targets, logit_lengths, target_lengths, self.frames, self.tokens)
        if (fits := self.placement.fits(logits, logit_lengths, target_lengths)) is not None:
            bad |= ~fits
        num_frames, num_labels = (jnp.where(bad, 0, n) for n in (logit_lengths, target_lengths))
        own_frames, lengths = self.exchange.own_frames(num_frames), (logit_lengths, target_lengths)
        logits, nodes, where = self.placement.nodes(logits, targets, own_frames, num_labels, lengths)
        return logits, Placed(nodes, where), *map(self.exchange.of_own, (num_frames, num_labels, bad))

    def _to_lattice(self, planes: Planes, placed: Placed) -> Planes:
        placed_planes = self.placement.to_planes(planes, placed.where)
        return {slot: self.exchange.to_lattice(x) for slot, x in placed_planes.items()}

    def _of_rows(self, placed: Placed, *numbers):
        """Returns numbers for each of the rows' sequences, from those of own sequences."""
        return [self.placement.of_rows(self.exchange.every(x), placed.where) for x in numbers]

    def reference(self, logits: Logits, placed: Placed) -> Planes:
        """Works as `Rows.reference`, for the lattice."""
        return self._to_lattice(self.rows.reference(self.placement.view(logits), placed.nodes), placed)

    def forward(self, logits: Logits, placed: Placed, *, strict: bool = False) -> tuple[Planes, Residuals]:
        """Works as `Rows.forward`, for the lattice."""
        planes, residuals = self.rows.forward(self.placement.view(logits), placed.nodes, strict=strict)
        return self._to_lattice(planes, placed), residuals

    def backward(
        self, logits: Logits, placed: Placed, residuals: Residuals, cotangents: Planes, scale, clamp, *, strict, alias
    ) -> Logits:
        """Works as `Rows.backward`, for the lattice; it has derivatives of its own."""
        of_frames = {slot: self.exchange.to_rows(x) for slot, x in cotangents.items()}
        operands = residuals, self.placement.to_rows(of_frames, placed.where), *self._of_rows(placed, scale, clamp)
        stored: Any = logits
        viewed = self.placement.view(stored)
        of_rows = gradient(self.rows, strict, alias, viewed, placed.nodes, *operands)
        return of_rows if viewed is stored else of_rows.reshape(stored.shape)

    def clip_and_scale(self, gradient: Logits, placed: Placed, scale, clamp) -> Logits:
        """Returns scale * clip(gradient, clamp), for own sequences."""
        numbers = self._of_rows(placed, scale, clamp)
        return jax.tree.map(lambda g: clip_and_scale(g, *numbers), gradient)
