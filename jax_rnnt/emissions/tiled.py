"""Emission of logits that never exist as a whole: a joint network makes them tile by tile.

B sequences, T frames, U1 columns, V classes, E and P the widths of encoder and predictor rows.

The nodes [T, U1] of a sequence are cut into blocks of `frames` by `columns`. Blocks inside the lengths are listed; a
tile takes the next `blocks` of the list, from any sequences. The loss's emission takes every row of a tile's logits [N,
V] as a sequence of one node. The backward pass lists the blocks that have a cotangent, makes their logits again and
overwrites them with the gradient. It sums the gradient for each encoder and predictor state: densely within a block, by
a small matrix product over the blocks of a tile, and from tile to tile in float32. The order of every sum is fixed.
"""

import dataclasses
import functools
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _xla
from jax_rnnt._xla import is_trained
from jax_rnnt.emissions.emission import OUTSIDE, Emission, Wrapper, isolate, out_of_range, spoiled
from jax_rnnt.emissions.joint import LinearJoint, check_rows, pair, split, sum_dtype


class Joint(typing.NamedTuple):
    """The checked arguments of `JointLogits`, with V and the dtype of the logits."""

    function: str  # in errors
    joint: Any
    encoder: jax.Array  # [..., T, E]; trailing batch dimensions may be 1 where the predictor has more
    predictor: jax.Array  # [..., U1, P]
    classes: int
    dtype: Any
    chunk: int | None

    @property
    def shape(self):
        batch, columns = self.predictor.shape[:-2], self.predictor.shape[-2]
        return (*batch, self.encoder.shape[-2], columns, self.classes)


def tiled(logits: Joint, inner: Emission):
    """(emission, its logits) in tiles."""
    linear = isinstance(logits.joint, LinearJoint)
    emission = Tiled(inner, None, logits.classes, logits.dtype, logits.chunk, linear)
    rows = 1
    if not linear:
        # A function is traced for its number of rows, so there the default backend decides: docs/design.md.
        size = size_of(emission, logits.encoder, logits.predictor, jax.default_backend())
        emission, rows = dataclasses.replace(emission, size=size), math.prod(size)
    joint, parameters = split(logits.function, logits.joint, rows, logits.encoder, logits.predictor)
    return dataclasses.replace(emission, joint=joint), (parameters, logits.encoder, logits.predictor)


def _made(inner: Emission, rows: int, classes: int, dtype, strict=False):
    """Types of (planes, residuals) that the inner emission makes of a tile."""
    logits = jax.ShapeDtypeStruct((rows, 1, 1, classes), dtype)
    nodes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 1, 1), (rows,))]
    return jax.eval_shape(functools.partial(inner.forward, strict=strict), logits, tuple(nodes))


def materialized(logits: Joint, emission: Emission, targets, num_frames, num_labels):
    """The logits as an array, for the reference. The joint gets zeros for rows that no sequence reads.

    These are rows outside the lengths, and all rows of a sequence that is empty or whose lengths or labels are out of
    range. NaN there would reach the gradient of the joint's parameters. A sequence with NaN inside its lengths is made
    of zeros too, and its logits become NaN afterwards.
    """
    frames, classes = emission.dimensions(logits)
    empty = (num_frames == 0) | out_of_range(targets, num_frames, num_labels, frames, classes)
    rows = []
    for x, last in ((logits.encoder, num_frames), (logits.predictor, num_labels + 1)):
        x = jnp.broadcast_to(x, (*num_frames.shape, *x.shape[-2:]))
        last = jnp.where(empty, 0, last)[..., None]
        index = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + x.shape[-2:-1], num_frames.ndim)
        rows.append(jnp.where((index < last)[..., None], x, 0))
    bad = functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x), (-1, -2)) for x in rows))
    if 0 in logits.shape:
        return jnp.zeros(logits.shape, logits.dtype)
    rows = pair(*(isolate(x, bad).reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in rows))
    made = logits.joint(*rows)
    check_rows(logits.function, made, rows[0].shape[0])
    return jnp.where(bad[..., None, None, None], jnp.nan, made.reshape(logits.shape))


_BUDGET = 256e6  # bytes on a GPU
_VMEM = 32e6  # bytes of a tile on a TPU


def size_of(tiled: "Tiled", encoder, predictor, platform: str) -> tuple[int, int, int]:
    """Frames and columns of a block, and blocks of a tile, for the sequences of one device.

    Symbolic dimensions (`jax.export`) count as large ones.
    """
    shape = encoder.shape[-2], predictor.shape[-2]
    frames, columns = (n if isinstance(n, int) else 1 << 10 for n in shape)
    block = block_of((frames, columns), platform)
    blocks = math.prod(-(-n // k) for n, k in zip(shape, block)) * math.prod(predictor.shape[:-2])
    most = max((tiled.chunk or _rows(tiled, encoder, predictor, platform)) // math.prod(block), 1)
    if isinstance(blocks, int):
        tiles = -(-blocks // most)
        blocks = max(-(-blocks // max(tiles, 1)), 1)  # as many in every tile, if all are inside the lengths
    else:
        blocks = most
    return *block, blocks if platform == "cpu" else _rounded(blocks, math.prod(block))


def _rows(tiled: "Tiled", encoder, predictor, platform: str) -> int:
    """Rows of a tile: few enough for the caches (CPU, TPU), enough to hide the launches of its kernels (GPU).

    On a CPU, with fewer rows than units, adding up the weight's gradient would take as long as making it. On a GPU the
    workspace may have an eighth of the logits, at most 256 MB. Sums of gradients and planes are a part of it. On a TPU
    (v5e, T = 256, U = 64, V = 512, H = 640) XLA estimates 26, 20, 17 and 17 million cycles for all tiles of 8, 16,
    32 and 64 MB; those of 64 MB leave VMEM.
    """
    units = [x.shape[-1] for x in (encoder, predictor)]
    if platform == "cpu":
        return min(max((1 << 21) // (tiled.classes + sum(units)), 256, min(max(units), 1024)), 4096)
    width, sums = tiled.dtype.itemsize, np.dtype(sum_dtype(tiled)).itemsize
    # Logits and hidden units; a function keeps more, such as the gradient of each pair of rows.
    row = width * (tiled.classes + max(units) + (0 if tiled.linear else sum(units)))
    if platform == "tpu":
        return max(int(_VMEM / row), 1024)
    nodes = math.prod(predictor.shape[:-1]) * encoder.shape[-2]
    if not isinstance(nodes, int):
        return max(int(_BUDGET / 2 / row), 1024)
    most = 0.94 * min(_BUDGET, width * nodes * tiled.classes / 8)
    planes = len(jax.tree.leaves(_made(tiled.inner, 1, tiled.classes, tiled.dtype)))
    fixed = sums * (encoder.size + predictor.size + planes * nodes)
    return max(int(max(most - fixed, most / 4) / row), 1024)


def block_of(shape: tuple[int, int], platform: str) -> tuple[int, int]:
    """Frames and columns of a block.

    At most 1/20 of a long axis, so that its edges waste about 1/40. Elsewhere than on a CPU blocks are larger: a tile
    has more of them, and their sums cost the square of their number.
    """
    frames, columns = (max(n, 1) for n in shape)
    if platform == "cpu":
        return min(_power_of_two(frames // 20, 4, 16), frames), min(_power_of_two(columns // 20, 4, 8), columns)
    return _divisor(frames, (24, 20, 16)), _divisor(columns, (12, 10, 8))


def _rounded(blocks: int, nodes: int) -> int:
    """Blocks of a large tile whose rows are a multiple of 64: else XLA copies the operands of products to pad them."""
    step = 64 // math.gcd(64, nodes)
    return blocks if blocks < 4 * step else -(-blocks // step) * step


def _power_of_two(n: int, low: int, high: int) -> int:
    return min(max(1 << max(n, 1).bit_length() - 1, low), high)


def _divisor(n: int, sizes: tuple[int, ...]) -> int:
    """The size whose multiples exceed n the least; n where that is smaller."""
    return min(n, min(sizes, key=lambda size: -n % size))


# ------------------------------------------------------------------------------------------------------- the tiles


class Tile(typing.NamedTuple):
    """S blocks: their sequences, their nodes inside the lengths, and their rows of encoder and predictor."""

    block: jax.Array  # [S], as in a plane cut into blocks
    sequence: jax.Array  # [S]
    inside: jax.Array  # [S, frames, columns]
    encoder: jax.Array  # [S, frames, E]
    predictor: jax.Array  # [S, columns, P]
    nodes: tuple[jax.Array, jax.Array]  # of the inner emission: label [N, 1, 1], 1 or 0 frames [N]


class Work(typing.NamedTuple):
    """The blocks to do, one after the other; those past the end repeat the last one."""

    tiles: jax.Array  # how many, the most of any group
    some: jax.Array  # whether there is a block
    block: jax.Array  # [n], as in a plane cut into blocks
    sequence: jax.Array  # [n]
    frame: jax.Array  # [n], the first of a block
    column: jax.Array  # [n], the first of a block
    live: jax.Array  # [n], whether it is before the end


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tiled(Wrapper):
    """Reads `(parameters, encoder [..., T, E], predictor [..., U1, P])`; the emission `inner` runs on the tiles.

    The trailing batch dimensions of the encoder may be 1: all sequences of theirs share its rows. `joint` is the static
    part of the joint network; `classes` and `dtype` are those of its logits. A block has `frames` by `columns` nodes, a
    tile has `blocks` blocks. The lowering chooses them: it knows the platform, and the sequences of a device.
    """

    joint: Any
    classes: int
    dtype: Any
    chunk: int | None
    linear: bool
    size: tuple[int, int, int] | None = None  # of a function from the start: it is traced for its rows

    frames = property(lambda self: self.size[0])
    columns = property(lambda self: self.size[1])
    blocks = property(lambda self: self.size[2])

    def lowered_for(self, platforms, encoder, predictor):
        """The same with the tiles of these platforms, for these rows of one device."""
        platform = platforms[0] if len(platforms) == 1 else "gpu"
        size = self.size or size_of(self, encoder, predictor, platform)
        return dataclasses.replace(self, joint=self.joint.lowered_for(platforms), size=size)

    # ---- the interface of `Emission`

    def _virtual(self, logits):
        _, encoder, predictor = logits
        shape = (*predictor.shape[:-2], encoder.shape[-2], predictor.shape[-2], self.classes)
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def dimensions(self, logits):
        return self.inner.dimensions(self._virtual(logits))

    def nodes(self, logits, targets, num_frames, num_labels):
        label, _ = self.inner.nodes(self._virtual(logits), targets, num_frames, num_labels)
        return label, num_frames, num_labels

    def forward(self, logits, nodes, *, strict=False):
        parameters, *rows = logits
        batch, shape = rows[1].shape[:-2], (rows[0].shape[-2], rows[1].shape[-2])
        (planes, saved), structure = self._planes(strict)
        if 0 in (*batch, *shape):
            filled = [jnp.full((*batch, *shape), fill, x.dtype) for x, fill in (*planes, *saved)]
        else:
            flat = _flat(batch, *rows, *nodes)
            results = [((*flat[1].shape[1:2], *shape), x.dtype) for x, _ in (*planes, *saved)]
            filled, _ = _forward((self, strict), parameters, flat, results)
            filled = [x.reshape(*batch, *shape) for x in filled]
        return jax.tree.unflatten(structure, filled)

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        parameters, *rows = logits
        batch = rows[1].shape[:-2]
        trained = [i for i, x in enumerate(parameters) if is_trained(x)]
        if 0 in (*batch, rows[0].shape[-2], rows[1].shape[-2]):
            of_rows, of_parameters = map(jnp.zeros_like, rows), [jnp.zeros_like(parameters[i]) for i in trained]
        else:
            planes, structure = jax.tree.flatten((cotangents, residuals))
            differentiable = dataclasses.replace(self, joint=self.joint.differentiable())
            flat = _flat(batch, *rows, *nodes, scale, clamp, *planes)
            of_rows, of_parameters = _backward(
                (differentiable, strict, structure), parameters, flat,
                [(x.shape[1:], x.dtype) for x in flat[:2]],
                [(i, sum_dtype(parameters[i])) for i in trained],
            )  # fmt: skip
        gradients: list[Any] = [None] * len(parameters)  # keys and integers have none
        for i, x in zip(trained, of_parameters):
            gradients[i] = x.astype(parameters[i].dtype)
        return gradients, *(g.reshape(x.shape) for g, x in zip(of_rows, rows))

    def pullback(self, logits, nodes, cotangents, scale, clamp):
        raise NotImplementedError("JointLogits have no second derivative in tiles; use implementation='reference'.")

    def without(self, nodes, masked):
        label, num_frames, num_labels = nodes
        if self.joint.random:  # rows keep the places in their tiles that they had in the forward pass
            return nodes
        return label, jnp.where(masked, 0, num_frames), num_labels

    def _planes(self, strict):
        """((planes, residuals) of the inner emission as lists of (what it makes of a tile, fill), their structure)."""
        made = _made(self.inner, 1, self.classes, self.dtype, strict)
        planes, saved = (jax.tree.leaves(x) for x in made)
        return ([(x, -math.inf) for x in planes], [(x, 0) for x in saved]), jax.tree.structure(made)

    # ---- blocks

    def grid(self, shape):
        """Blocks of frames and of columns in a plane [T, U1]."""
        return -(-shape[0] // self.frames), -(-shape[1] // self.columns)

    def cut(self, x):
        """[B, T, U1] -> [blocks, frames * columns]."""
        (frames, columns), size = self.grid(x.shape[1:]), (self.frames, self.columns)
        edges = [(0, n * k - m) for n, k, m in zip((frames, columns), size, x.shape[1:])]
        x = jnp.pad(x, [(0, 0), *edges]).reshape(-1, frames, self.frames, columns, self.columns)
        return jnp.swapaxes(x, 2, 3).reshape(-1, self.frames * self.columns)

    def join(self, x, shape):
        """[blocks, frames * columns] -> [B, T, U1]."""
        frames, columns = self.grid(shape)
        x = jnp.swapaxes(x.reshape(-1, frames, columns, self.frames, self.columns), 2, 3)
        return x.reshape(-1, frames * self.frames, columns * self.columns)[:, : shape[0], : shape[1]]

    def within(self, shape, num_frames, num_labels):
        """bool [B, blocks of frames, blocks of columns]: which hold a node inside the lengths."""
        frames, columns = (_row(n) for n in self.grid(shape))
        rows = frames * self.frames < num_frames[:, None]
        return rows[:, :, None] & (columns * self.columns <= num_labels[:, None])[:, None]

    def work(self, flags, grouped):
        """The blocks with a flag, of flags [B, blocks of frames, blocks of columns]."""
        _, frames, columns = flags.shape
        flags = flags.reshape(-1)
        place = jnp.cumsum(flags, dtype=jnp.int32)
        count = place[-1]
        size = -(-flags.size // self.blocks) * self.blocks
        own = jnp.arange(flags.size, dtype=jnp.int32)
        order = jnp.zeros(size, jnp.int32)
        order = order.at[jnp.where(flags, place - 1, size + own)].set(own, mode="drop", unique_indices=True)
        # Past the end the last block repeats, so that nothing outside is read.
        place = jnp.arange(size, dtype=jnp.int32)
        block = order[jnp.clip(place, 0, jnp.maximum(count - 1, 0))]
        sequence, inner = block // (frames * columns), block % (frames * columns)
        return Work(
            tiles=_xla.most_over_groups(-(-count // self.blocks), grouped),
            some=count > 0,
            block=block,
            sequence=sequence,
            frame=inner // columns * self.frames,
            column=inner % columns * self.columns,
            live=place < count,
        )

    def goals(self, key, count):
        """(place in its tile of the first block with the same key [n], the key of those blocks [n], in [0, count)).

        The other blocks have distinct keys from `count` on.
        """
        keys = key.reshape(-1, self.blocks)
        place = jnp.argmax(keys[:, :, None] == keys[:, None], -1).astype(jnp.int32)
        own = _row(self.blocks)
        return place.reshape(-1), jnp.where(place == own, keys, count + own).reshape(-1)

    def part(self, i, x):
        """That of tile i of an array [n] of all blocks to do."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.blocks, self.blocks)

    def tile(self, i, work, encoder, predictor, label, num_frames, num_labels):
        names = "block", "sequence", "frame", "column", "live"
        block, sequence, frame, column, live = (self.part(i, getattr(work, name)) for name in names)
        frame, column = frame[:, None] + _row(self.frames), column[:, None] + _row(self.columns)
        frames, labels = num_frames[sequence][:, None], num_labels[sequence][:, None]
        inside = ((frame < frames) & live[:, None])[:, :, None] & (column <= labels)[:, None]
        frame, column = jnp.clip(frame, 0, jnp.maximum(frames - 1, 0)), jnp.clip(column, 0, labels)
        shared = sequence // (predictor.shape[0] // encoder.shape[0])
        places = (encoder, shared, frame), (predictor, sequence, column)
        rows = [_rows_of(x, sequence, index) for x, sequence, index in places]
        encoder, predictor = (jnp.where(work.some, x, 0) for x in rows)
        labels = jnp.where(inside, label[sequence[:, None], 0, column][:, None], OUTSIDE)
        nodes = labels.reshape(-1, 1, 1), inside.reshape(-1).astype(jnp.int32)
        return Tile(block, sequence, inside, encoder, predictor, nodes)


def _rows_of(x, sequence, index):
    """x[sequence[s], index[s, r]] for x [B, R, E]."""
    if x.dtype.itemsize > 2:
        return x[sequence[:, None], index]
    # As integers: 16-bit floats are gathered in float32 by XLA's CPU backend, which first converts all of x.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[sequence[:, None], index], x.dtype)


def _row(n):
    return jax.lax.broadcasted_iota(jnp.int32, (1, n), 1)


def _flat(batch, encoder, *arrays):
    """The encoder with one batch dimension, for `_xla.Grouped`; the others with one more: who shares its rows."""
    count = math.prod(encoder.shape[:-2])
    encoder = encoder.reshape(count, *encoder.shape[-2:])
    return [encoder, *(x.reshape(count, math.prod(batch) // count, *x.shape[len(batch) :]) for x in arrays)]


def _unshared(encoder, *arrays):
    """The arrays of `_flat` with one batch dimension each."""
    return encoder, *(x.reshape(-1, *x.shape[2:]) for x in arrays)


def _for_each(tiles, step, carry):
    """`fori_loop` that carries whether there is a next turn: on a GPU its condition is no launch."""

    def turn(state):
        i, _, carry = state
        return i + 1, i + 1 < tiles, step(i, carry)

    return jax.lax.while_loop(lambda state: state[1], turn, (jnp.int32(0), tiles > 0, carry))[2]


def _forward_tiles(static, parameters, batched, grouped, platforms):
    """Planes and residuals [B, N, T, U1] for B encoders and N sequences of each."""
    tiled, strict = static
    tiled = tiled.lowered_for(platforms, *batched[:2])
    copies = batched[1].shape[1]
    batched = _unshared(*batched)
    encoder, predictor, _, num_frames, num_labels = batched
    shape = encoder.shape[1], predictor.shape[1]
    flags = tiled.within(shape, num_frames, num_labels)
    work = tiled.work(flags, grouped)

    def step(i, stores):
        tile = tiled.tile(i, work, *batched)
        logits = tiled.joint.logits(parameters, tile.encoder, tile.predictor)
        made = tiled.inner.forward(logits[:, None, None], tile.nodes, strict=strict)
        made = jnp.stack([x.reshape(tiled.blocks, -1) for x in jax.tree.leaves(made)])
        return jax.lax.dynamic_update_slice_in_dim(stores, made, i * tiled.blocks, 1)

    (planes, saved), _ = tiled._planes(strict)
    made = *planes, *saved  # of one dtype
    stores = jnp.zeros((len(made), work.block.size, tiled.frames * tiled.columns), made[0][0].dtype)
    stores = _for_each(work.tiles, step, stores)
    place = jnp.maximum(jnp.cumsum(flags.reshape(-1), dtype=jnp.int32) - 1, 0)
    frame, column = (jax.lax.broadcasted_iota(jnp.int32, (1, *shape), axis) for axis in (1, 2))
    inside = (frame < num_frames[:, None, None]) & (column <= num_labels[:, None, None])
    planes = [jnp.where(inside, tiled.join(x[place], shape), fill) for x, (_, fill) in zip(stores, made)]
    return [x.reshape(-1, copies, *shape) for x in planes], []


def _largest(plane):
    """[B]: the largest absolute value of each sequence, from two reductions: |plane| would be a plane in memory."""
    return jnp.maximum(jnp.max(plane, (1, 2), initial=0), -jnp.min(plane, (1, 2), initial=0))


def _negligible(cotangents, scale, clamp):
    """bool [B, T, U1]: nodes whose gradients together stay below the rounding error of the sums.

    The occupancies of a column sum to 1 or more, those of a frame too unless arcs skip it. A clamp lowers the limit,
    since clipped sums are smaller. So does a small largest cotangent: that of a latency has any size.
    """
    first = cotangents[0]
    size = functools.reduce(jnp.maximum, map(jnp.abs, cotangents))
    most = jnp.minimum(functools.reduce(jnp.maximum, map(_largest, cotangents)), 1)
    limit = most * jnp.where(clamp > 0, jnp.minimum(clamp, 1), 1).astype(first.dtype)
    limit = limit[:, None, None] * (jnp.finfo(first.dtype).eps / sum(first.shape[1:]))
    return size * (scale != 0).astype(first.dtype)[:, None, None] <= limit  # not where it is NaN


def _backward_tiles(static, parameters, batched, grouped, platforms):
    """Gradients of encoder [B, T, E] and predictor [B, N, U1, P]; of the parameters, summed over the batch."""
    tiled, strict, structure = static
    tiled = tiled.lowered_for(platforms, *batched[:2])
    copies = batched[1].shape[1]
    encoder, predictor, label, num_frames, num_labels, scale, clamp, *planes = _unshared(*batched)
    shape = encoder.shape[1], predictor.shape[1]
    cotangents, _ = jax.tree.unflatten(structure, planes)
    flags = tiled.within(shape, num_frames, num_labels)
    # Sequences whose loss is NaN get NaN, and do not touch the parameters.
    off = spoiled(cotangents) | (scale == 0)
    bad = off & (scale != 0)
    if tiled.joint.random:  # as in `without`
        predictor, *planes = (jnp.where(off[:, None, None], 0, x) for x in (predictor, *planes))
    else:
        flags &= not_skipped(tiled, [*cotangents.values()], scale, clamp) & ~off[:, None, None]
    work = tiled.work(flags, grouped)
    planes = [tiled.cut(x) for x in planes]
    high, columns = tiled.grid(shape)
    of_frames = work.sequence // copies * high + work.block // columns % high
    keys = of_frames, work.sequence * columns + work.block % columns
    counts = [x.shape[0] * n for x, n in zip((encoder, predictor), (high, columns))]
    goals = [tiled.goals(key, count) for key, count in zip(keys, counts)]

    def frames_of(tile):
        # As in `without`; a sequence that counts may share the frames.
        return jnp.where(off[tile.sequence][:, None, None], 0, tile.encoder) if tiled.joint.random else tile.encoder

    def step(i, sums):
        tile = tiled.tile(i, work, encoder, predictor, label, num_frames, num_labels)
        inside = tile.inside.reshape(tiled.blocks, -1)
        rows = [jnp.where(inside, x[tile.block], 0).reshape(-1, 1, 1) for x in planes]
        cotangents, saved = jax.tree.unflatten(structure, rows)
        logits, pull = tiled.joint.pullback(parameters, frames_of(tile), tile.predictor)
        per_row = [jnp.repeat(x[tile.sequence], tiled.frames * tiled.columns) for x in (scale, clamp)]
        operands = logits[:, None, None], tile.nodes, saved, cotangents, *per_row
        of_logits = tiled.inner.backward(*operands, strict=strict, alias=True)[:, 0, 0]
        of_states, infinite, totals = sums
        again = tiled.tile(tiled.joint.fence(i), work, encoder, predictor, label, num_frames, num_labels)
        totals, of_encoder, of_predictor = pull(of_logits, totals, frames_of(again), again.predictor)
        made = [
            _add_blocks(x, g, tiled.part(i, place), tiled.part(i, goal), platforms)
            for x, g, (place, goal) in zip(of_states, (of_encoder, of_predictor), goals)
        ]
        of_states, flags = zip(*made)
        infinite = jax.lax.dynamic_update_slice_in_dim(infinite, flags[0] | flags[1], i * tiled.blocks, 0)
        return list(of_states), infinite, totals

    states = [
        jnp.zeros((n, size, x.shape[-1]), sum_dtype(x))
        for n, size, x in zip(counts, (tiled.frames, tiled.columns), (encoder, predictor))
    ]
    infinite = jnp.zeros(work.block.size, bool)
    totals = tiled.joint.zeros(parameters, tiled.blocks)
    states, infinite, totals = _for_each(work.tiles, step, (states, infinite, totals))
    trained = (x for x in parameters if is_trained(x))
    totals = [total.astype(sum_dtype(x)) for total, x in zip(tiled.joint.totals(totals), trained, strict=True)]
    bad = bad.at[work.sequence].max(infinite & work.live)
    used = (
        _row(shape[0]) < num_frames[:, None],
        (_row(shape[1]) <= num_labels[:, None]) & (num_frames > 0)[:, None],
    )
    gradients = []
    for x, sums, rows in zip((encoder, predictor), states, used):
        sums = sums.reshape(x.shape[0], -1, x.shape[-1])[:, : x.shape[1]]
        spoils = (bad[:, None] & rows).reshape(x.shape[0], -1, x.shape[1]).any(1)
        gradients.append(jnp.where(spoils[..., None], jnp.nan, sums).astype(x.dtype))
    of_encoder, of_predictor = gradients
    return [of_encoder, of_predictor.reshape(-1, copies, *of_predictor.shape[1:])], totals


def not_skipped(tiled, cotangents, scale, clamp):
    """bool [B, blocks of frames, blocks of columns]: blocks whose gradient counts."""
    kept = tiled.cut(~_negligible(cotangents, scale, clamp))
    return jnp.any(kept, -1).reshape(-1, *tiled.grid(cotangents[0].shape[1:]))


def _add_blocks(sums, x, place, goal, platforms):
    """(sums [K, ...] with x [S, ...] added at the key of each block, whether x [S] is not finite).

    Blocks of one key are summed first, by a matrix product, so that no two threads add to one place. What is not finite
    is left out: the product would spread it.
    """
    finite = jnp.abs(x) < jnp.finfo(x.dtype).max / 2  # not where it is NaN; the largest numbers round to inf in 16 bits
    x = jnp.where(finite, x, 0).astype(sums.dtype)
    if len(place) > 1:
        picks = (place[None] == _row(len(place)).T).astype(sums.dtype)
        x = jnp.einsum("rs,sth->rth", picks, x, precision=_exact(sums.dtype, platforms))
    return sums.at[goal].add(x, mode="drop", unique_indices=True), ~jnp.all(finite, (1, 2))


def _exact(dtype, platforms) -> Any:
    """The precision of a product with zeros and ones that rounds no factor."""
    if platforms == ("cuda",) and dtype == jnp.float32:
        # Three 16-bit parts of every number on tensor cores; a float32 product takes ten times as long.
        return jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    return jax.lax.Precision.HIGHEST


_forward = _xla.Grouped("jax_rnnt_tiles_fwd", _forward_tiles)
_backward = _xla.Grouped("jax_rnnt_tiles_bwd", _backward_tiles)
