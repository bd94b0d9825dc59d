"""What kernels of a linear joint network take, and how they cut it: those of TPUs (`_joint_pallas.py`).

Those of GPUs (`_joint_cuda.py`) have a `Problem` of their own, and the same order of classes and list of blocks. Both
leave to XLA what is at the end: planes of numbers of rows, and numbers of cotangents.

B encoders with N sequences each, T frames, U1 columns, H units, V classes.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt.emissions import _norm
from jax_rnnt.emissions._emission import Nodes, inside_rows, scale_cotangent
from jax_rnnt.emissions._softmax import Heads, Softmax, planes_of
from jax_rnnt.layouts._joint_networks import Tanh
from jax_rnnt.layouts._tile_blocks import Blocks

LANES, SUBLANES = 128, 8
FRAMES, COLUMNS = 32, SUBLANES
ROWS = FRAMES * COLUMNS
CHUNKS, CHUNK_COST = (512, 640, 384, 768, 256, 128), 32  # classes of a chunk; what one costs, in classes
BLOCKS = Blocks(FRAMES, COLUMNS, 1)


def rounded(n, to):
    return -(-n // to) * to


@dataclasses.dataclass(frozen=True)
class Classes:
    """The order of the classes of a row: other heads in lanes of their own, blanks of the softmax, all others.

    Groups of classes have equally many lanes; the grid takes all blocks for each of them. A group has as many lanes for
    other heads as the first, and nothing in them.
    """

    count: int  # V, with durations
    blanks: tuple[int, ...]  # of the softmax
    others: tuple[int, ...]  # of other heads
    groups: int
    sizes: tuple[int, ...] | None = None  # that a chunk may have; None: CHUNKS

    @property
    def start(self) -> int:
        """The lane of a group's first class of the softmax."""
        return LANES if self.others else 0

    @property
    def kept(self) -> int:
        """Classes of the softmax, from the first, whose logits the loss needs: blanks, or what anchors `norm`."""
        return max(len(self.blanks), 1)

    @property
    def _least(self) -> int:
        """Lanes that a group needs."""
        return rounded(self.start + -(-(self.count - len(self.others)) // self.groups), LANES)

    @functools.cached_property
    def chunk(self) -> int:
        """Classes that a kernel takes at once: few chunks, and little padding."""
        sizes = self.sizes or [size for size in CHUNKS if size > self.start]
        return min(sizes, key=lambda size: rounded(self._least, size) + self._least // size * CHUNK_COST)

    @property
    def lanes(self) -> int:
        """Of a group."""
        return rounded(self._least, self.chunk)

    @property
    def chunks(self) -> int:
        return self.lanes // self.chunk

    def _runs(self):
        """[(first class, end)] of the classes that are neither blanks nor of other heads."""
        edges = [-1, *sorted((*self.blanks, *self.others)), self.count]
        return [(a + 1, b) for a, b in itertools.pairwise(edges) if b > a + 1]

    def arrange(self, x, fill):
        """[..., V] -> [..., groups * lanes]."""

        def padded(parts, size):
            parts = list(parts)
            missing = size - sum(y.shape[-1] for y in parts)
            if missing:
                parts.append(jnp.full((*x.shape[:-1], missing), fill, x.dtype))
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1)

        size = self.lanes - self.start
        tokens = [*(x[..., k : k + 1] for k in self.blanks), *(x[..., a:b] for a, b in self._runs())]
        tokens = padded(tokens, self.groups * size)
        if not self.others:
            return tokens
        heads = [padded((x[..., k : k + 1] for k in self.others), self.start)]
        heads += [jnp.full_like(heads[0], fill)] * (self.groups - 1)
        parts = (tokens[..., i * size : (i + 1) * size] for i in range(self.groups))
        return jnp.concatenate([y for pair in zip(heads, parts) for y in pair], -1)

    def restore(self, x):
        """The inverse of `arrange`."""
        others, tokens = x[..., : self.start], x
        if self.others:
            parts = x.reshape(*x.shape[:-1], self.groups, self.lanes)[..., self.start :]
            tokens = parts.reshape(*x.shape[:-1], self.groups * (self.lanes - self.start))
        parts = {k: others[..., i : i + 1] for i, k in enumerate(self.others)}
        parts |= {k: tokens[..., i : i + 1] for i, k in enumerate(self.blanks)}
        at = len(self.blanks)
        for a, b in self._runs():
            parts[a] = tokens[..., at : at + b - a]
            at += b - a
        ordered = [parts[k] for k in sorted(parts)]
        return ordered[0] if len(ordered) == 1 else jnp.concatenate(ordered, -1)

    def lane(self, label):
        """The lane of each label; -1: none, or of another head."""
        moved = sum((label > k).astype(jnp.int32) for k in (*self.blanks, *self.others))
        place = len(self.blanks) + label - moved
        for i, k in enumerate(self.blanks):
            place = jnp.where(label == k, i, place)
        size = self.lanes - self.start
        lane = place + (place // size + 1) * self.start
        for k in self.others:
            lane = jnp.where(label == k, -1, lane)
        return jnp.where(label < 0, -1, lane)


@dataclasses.dataclass(frozen=True)
class Cut:
    """The list of blocks: an integer of each, of bits for encoder, block of frames, sequence, block of columns."""

    encoders: int
    copies: int  # N
    shape: tuple[int, int]  # blocks of frames and of columns

    @property
    def size(self) -> int:
        """All blocks."""
        return self.encoders * self.copies * math.prod(self.shape)

    @property
    def bits(self) -> list[int]:
        """Of frames, sequence and columns."""
        return [max(n - 1, 0).bit_length() for n in (self.shape[0], self.copies, self.shape[1])]

    def encode(self, encoder, frame, copy, column):
        of_frame, of_copy, of_column = self.bits
        return (((encoder << of_frame | frame) << of_copy) | copy) << of_column | column

    def decode(self, code):
        """(encoder, block of frames, sequence of the encoder, block of columns)"""
        of_frame, of_copy, of_column = self.bits
        column, code = code & ((1 << of_column) - 1), code >> of_column
        copy, code = code & ((1 << of_copy) - 1), code >> of_copy
        return code >> of_frame, code & ((1 << of_frame) - 1), copy, column

    def listed(self, flags):
        """(codes of the blocks with a flag, then -1 [n + 1], how many), of flags [B N, frames, columns]."""
        frames, columns = self.shape
        flags = flags.reshape(self.encoders, self.copies, frames, columns).swapaxes(1, 2)
        axes = (lax.broadcasted_iota(jnp.int32, flags.shape, axis) for axis in range(4))
        codes, flags = self.encode(*axes).reshape(-1), flags.reshape(-1)
        place = jnp.cumsum(flags, dtype=jnp.int32)
        out = jnp.full(flags.size + 1, -1, jnp.int32)
        index = jnp.where(flags, place - 1, flags.size + 1 + jnp.arange(flags.size, dtype=jnp.int32))
        out = out.at[index].set(codes, mode="drop", unique_indices=True)
        return out.at[0].max(0), place[-1]  # the grid takes one block at least


def cut_of(inputs, blocks=BLOCKS) -> Cut:
    return Cut(inputs.encoder.shape[0], inputs.copies, blocks.grid(inputs.shape))


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static of a call of the kernels."""

    classes: Classes
    cut: Cut
    softmax: Softmax
    activation: Any
    units: int  # H, padded
    exact: bool  # products of float32

    blocks = BLOCKS

    def of(self, inputs) -> "Problem":
        """The same for the inputs of one device: of a part of the batch."""
        return dataclasses.replace(self, cut=cut_of(inputs))

    @property
    def factor(self):
        """The dtype of factors of products."""
        return np.dtype(jnp.float32 if self.exact else jnp.bfloat16)

    @property
    def vmem(self) -> int:
        """Bytes of VMEM for the backward kernel, which takes more than the other; the rest is XLA's, for planes."""
        width, units, lanes = self.factor.itemsize, self.units, self.classes.lanes
        weights = units * lanes * (width + 4) + 6 * SUBLANES * lanes * 4
        hidden = ROWS * units * (2 * width + 4 * 4) + 4 * FRAMES * units * 4
        chunk = ROWS * (4 * self.classes.chunk + 6 * LANES) * 4
        of_predictor = 2 * self.cut.copies * self.cut.shape[1] * COLUMNS * units * 4
        return (weights + hidden + chunk + of_predictor) * 9 // 8 + (1 << 20)

    def product(self, x, y, axes=((1,), (0,))):
        precision = lax.Precision.HIGHEST if self.exact else None
        return lax.dot_general(x, y, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def chunk(self, c):
        """The lanes of chunk c of a group."""
        from jax.experimental import pallas as pl

        size = self.classes.chunk
        return pl.ds(c * size if isinstance(c, int) else pl.multiple_of(c * size, size), size)

    def each_other_chunk(self, step):
        """``step(c)`` of all chunks of a group but the first."""
        if self.classes.chunks == 2:
            step(1)
        elif self.classes.chunks > 2:
            lax.fori_loop(1, self.classes.chunks, lambda c, _: (step(c), _)[1], np.int32(0))


# Bytes of VMEM of a core by the kind of a device, and where nothing tells the kind.
VMEM = {
    "TPU v4": 16, "TPU v5 lite": 128, "TPU v5e": 128, "TPU v5": 64, "TPU v5p": 64, "TPU v6 lite": 128, "TPU v6e": 128,
    "TPU7x": 64,
}  # fmt: skip
LEAST_VMEM = 16
MOST_BLOCKS = 1 << 17  # of a list: half of the scalar memory


@jax.custom_jvp
def _gelu(x):
    """`jax.nn.gelu` with approximate=False: Mosaic has neither erfc nor JAX's derivative of erf."""
    return x * _normal(x)


def _normal(x):
    return 0.5 + 0.5 * lax.erf(x * np.float32(math.sqrt(0.5)))


@_gelu.defjvp
def _(primals, tangents):
    (x,) = primals
    density = jnp.exp(-0.5 * x * x) * np.float32(1 / math.sqrt(2 * math.pi))
    return _gelu(x), tangents[0] * (_normal(x) + x * density)


def activation_of(function):
    """The function in a kernel, of those that a `LinearJoint` may have; None: it is not among them."""
    approximate = True
    if isinstance(function, functools.partial) and function.func is jax.nn.gelu and not function.args:
        if set(function.keywords) - {"approximate"}:
            return None
        function, approximate = jax.nn.gelu, bool(function.keywords.get("approximate", True))
    if isinstance(function, Tanh) or function is lax.tanh:
        return jnp.tanh
    if function is jax.nn.gelu:
        return function if approximate else _gelu
    return next((f for f in (jnp.tanh, jax.nn.relu, jax.nn.silu) if f is function), None)


def refused(tiled, parameters, inputs) -> str | None:
    """Why no device has a kernel for avals of the operands."""
    softmax = tiled.inner
    if type(softmax) is not Softmax:
        return "its classes are split over devices"
    if any(x.dtype == jnp.float64 for x in (parameters[0], inputs.encoder, inputs.predictor)):
        return "it takes no float64"
    if activation_of(tiled.joint.activation) is None:
        names = "jnp.tanh, jax.nn.relu, jax.nn.silu and jax.nn.gelu"
        return f"it has the activations {names}, got {tiled.joint.activation!r}"
    if len(set(softmax.blanks)) < len(softmax.blanks):
        return f"its blanks must differ, got {softmax.blanks}"
    return None


def heads(softmax, classes):
    """(blanks of the softmax, classes of other heads)"""
    if softmax.bernoulli:
        return (), softmax.blanks
    return softmax.blanks, tuple(range(classes - softmax.num_durations, classes))


def plan(tiled, parameters, inputs, device) -> Problem | str:
    """The problem for avals of the operands of a device of this (kind, cores), or why there is no kernel for it."""
    if reason := refused(tiled, parameters, inputs):
        return reason
    softmax, weight, activation = tiled.inner, parameters[0], activation_of(tiled.joint.activation)
    blanks, others = heads(softmax, tiled.classes)
    if len(others) + len(blanks) + 4 > LANES:
        return f"it takes at most {LANES - 4} blanks and durations, got {len(others) + len(blanks)}"
    cut = cut_of(inputs)
    if cut.size > MOST_BLOCKS:
        return f"it takes at most {MOST_BLOCKS} blocks of {FRAMES} frames and {COLUMNS} columns, got {cut.size}"
    exact = tiled.precision not in _FAST and weight.dtype != jnp.bfloat16
    kind, cores = device
    vmem = VMEM.get(kind, LEAST_VMEM) << 20
    for doublings in range(8):
        classes = Classes(tiled.classes, blanks, others, cores << doublings)
        problem = Problem(classes, cut, softmax, activation, rounded(weight.shape[0], LANES), exact)
        if problem.vmem <= 0.95 * vmem:
            return problem
    return f"it needs {problem.vmem >> 20} of {vmem >> 20} MB of VMEM"


# `jax.default_matmul_precision` of products of bfloat16 factors.
_FAST = None, "default", "fastest", "bfloat16", "BF16_BF16_F32"


# ------------------------------------------------------------------------------------------------------------ rows


def inside(inputs):
    return inside_rows(Nodes(inputs.label, inputs.num_frames), inputs.shape[-2])


def planes(softmax, classes, inputs, rows):
    """(planes by slot, norm) from numbers [B N, T, U1], of any value outside the lengths.

    Logits of other heads, then those that `classes` keeps; the largest logit, the sum of exponentials relative to it,
    the logit of the label.
    """
    within = inside(inputs)
    rows = [jnp.where(within, x, 0) for x in rows]
    others = len(classes.others)
    of_others, kept, (peak, total, of_label) = rows[:others], rows[others:-3], rows[-3:]
    row = _norm.row_sum_of_total(peak, total) if softmax.normalize else None
    blank, durations = (of_others[0], []) if softmax.bernoulli else (None, of_others)
    heads = Heads(within, row, of_label, kept[: len(classes.blanks)], durations, blank, kept[0])
    *made, norm = planes_of(heads, inputs.label, softmax.blanks)
    return dict(zip(softmax._names(), made)), norm


def numbers(softmax, inputs, cotangents, norm, scale):
    """Numbers of rows [B N, T, U1] for the backward kernel.

    What other heads get; what is added at each blank, and at the label; the factor of exp(logit - base), and base: -inf
    for the logit of the anchor, +inf where the softmax adds nothing.
    """
    cotangents = [cotangents[name] for name in softmax._names()]
    used = inside(inputs) & functools.reduce(jnp.logical_or, (x != 0 for x in cotangents))
    cotangents = [jnp.where(used, scale_cotangent(x, scale), 0) for x in cotangents]
    count = len(softmax.blanks)
    of_blanks, of_label, of_others = cotangents[:count], cotangents[count], cotangents[count + 1 :]
    if softmax.bernoulli:  # a label that is the blank counts as one
        same = inputs.label == softmax.blanks[0]
        of_others, of_blanks = [of_blanks[0] + jnp.where(same, of_label, 0)], []
        of_label = jnp.where(same, 0, of_label)
    factor, base = jnp.zeros_like(of_label), jnp.full_like(of_label, jnp.inf)
    if softmax.normalize:
        anchored, total = _norm.denominator(norm)
        factor = -sum(of_blanks, of_label) / jnp.where(used, total, 1)
        base = jnp.where(used, jnp.where(anchored, -jnp.inf, norm), base)
    return [*of_others, *of_blanks, of_label, factor, base]
