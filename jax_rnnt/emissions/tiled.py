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
    frames, columns = block_of(*logits.shape[-3:-1])
    most = math.prod(-(-n // k) for n, k in zip(logits.shape[-3:-1], (frames, columns))) * math.prod(logits.shape[:-3])

    def blocks(platform):
        tiles = -(-most // max((logits.chunk or _rows(logits, platform)) // (frames * columns), 1))
        return max(-(-most // max(tiles, 1)), 1)  # as many in every tile, if all are inside the lengths

    # A function is traced for its number of rows, so there the default backend decides: docs/design.md.
    linear = isinstance(logits.joint, LinearJoint)
    choices = tuple(blocks(platform if linear else jax.default_backend()) for platform in ("cpu", "other"))
    rows = choices[0] * frames * columns
    joint, parameters = split(logits.function, logits.joint, rows, logits.encoder, logits.predictor)
    emission = Tiled(inner, joint, logits.classes, logits.dtype, frames, columns, choices[0], choices[1])
    return emission, (parameters, logits.encoder, logits.predictor)


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
    rows = pair(*(isolate(x, bad).reshape(-1, *x.shape[-2:]) for x in rows))
    made = logits.joint(*rows)
    check_rows(logits.function, made, len(rows[0]))
    return jnp.where(bad[..., None, None, None], jnp.nan, made.reshape(logits.shape))


def _rows(logits: Joint, platform: str) -> int:
    """Rows of a tile: enough for its matrix products, few enough for the caches (CPU) or the memory (others).

    With fewer rows than units, adding up the weight's gradient would take as long as making it.
    """
    classes, *units = logits.classes, *(x.shape[-1] for x in (logits.encoder, logits.predictor))
    most, low, high = (1 << 21, 256, 4096) if platform == "cpu" else (1 << 22, 1024, 1 << 14)
    return min(max(most // (classes + sum(units)), low, min(max(units), 1024)), high)


def _power_of_two(n: int, low: int, high: int) -> int:
    return min(max(1 << max(n, 1).bit_length() - 1, low), high)


def block_of(frames: int, columns: int) -> tuple[int, int]:
    """Frames and columns of a block: at most 1/20 of a long axis, so that its edges waste about 1/40."""
    return min(_power_of_two(frames // 20, 4, 16), max(frames, 1)), min(_power_of_two(columns // 20, 4, 8), columns)


# ------------------------------------------------------------------------------------------------------- the tiles


class Tile(typing.NamedTuple):
    """S blocks: their sequences, their nodes inside the lengths, and their rows of encoder and predictor."""

    block: jax.Array  # [S], as in a plane cut into blocks
    sequence: jax.Array  # [S]
    inside: jax.Array  # [S, frames, columns]
    live: jax.Array  # [S]
    encoder: jax.Array  # [S, frames, E]
    predictor: jax.Array  # [S, columns, P]
    nodes: tuple[jax.Array, jax.Array]  # of the inner emission: label [N, 1, 1], 1 or 0 frames [N]


class Work(typing.NamedTuple):
    """The blocks to do, one after the other in `order`, and how many there are."""

    order: jax.Array
    length: jax.Array
    tiles: jax.Array  # the most of any group


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tiled(Wrapper):
    """Reads `(parameters, encoder [..., T, E], predictor [..., U1, P])`; the emission `inner` runs on the tiles.

    The trailing batch dimensions of the encoder may be 1: all sequences of theirs share its rows. `joint` is the static
    part of the joint network; `classes` and `dtype` are those of its logits. A block has `frames` by `columns` nodes, a
    tile has `blocks` blocks on the CPU and `blocks_elsewhere` on other platforms.
    """

    joint: Any
    classes: int
    dtype: Any
    frames: int
    columns: int
    blocks: int
    blocks_elsewhere: int

    def lowered_for(self, platforms):
        """The same with the tiles of these platforms."""
        return self if platforms == ("cpu",) else dataclasses.replace(self, blocks=self.blocks_elsewhere)

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

    def mute(self, nodes, scale):
        label, num_frames, num_labels = nodes
        if self.joint.random:  # rows keep the places in their tiles that they had in the forward pass
            return nodes
        return label, jnp.where(scale == 0, 0, num_frames), num_labels

    def _planes(self, strict):
        """((planes, residuals) of the inner emission as lists of (what it makes of a tile, fill), their structure)."""
        size = self.frames * self.columns * self.blocks
        logits = jax.ShapeDtypeStruct((size, 1, 1, self.classes), self.dtype)
        nodes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size, 1, 1), (size,))]
        made = jax.eval_shape(functools.partial(self.inner.forward, strict=strict), logits, tuple(nodes))
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
        flags = flags.reshape(-1)
        count = jnp.sum(flags, dtype=jnp.int32)
        # Past the end the last block repeats, so that nothing outside is read.
        order = jnp.argsort(~flags, stable=True).astype(jnp.int32)
        place = jnp.arange(-(-flags.size // self.blocks) * self.blocks, dtype=jnp.int32)
        order = order[jnp.clip(place, 0, jnp.maximum(count - 1, 0))]
        return Work(order, count, _xla.most_over_groups(-(-count // self.blocks), grouped))

    def tile(self, i, work, encoder, predictor, label, num_frames, num_labels):
        place = i * self.blocks + jnp.arange(self.blocks, dtype=jnp.int32)
        live = place < work.length
        block = jax.lax.dynamic_slice_in_dim(work.order, i * self.blocks, self.blocks)
        frames, columns = self.grid((encoder.shape[1], predictor.shape[1]))
        sequence, place = block // (frames * columns), block % (frames * columns)
        frame = (place // columns * self.frames)[:, None] + _row(self.frames)
        column = (place % columns * self.columns)[:, None] + _row(self.columns)
        frames, labels = num_frames[sequence][:, None], num_labels[sequence][:, None]
        inside = ((frame < frames) & live[:, None])[:, :, None] & (column <= labels)[:, None]
        frame, column = jnp.clip(frame, 0, jnp.maximum(frames - 1, 0)), jnp.clip(column, 0, labels)
        shared = sequence // (len(predictor) // len(encoder))
        places = (encoder, shared, frame), (predictor, sequence, column)
        rows = [_rows_of(x, sequence, index) for x, sequence, index in places]
        encoder, predictor = (jnp.where(work.length > 0, x, 0) for x in rows)
        labels = jnp.where(inside, label[sequence[:, None], 0, column][:, None], OUTSIDE)
        nodes = labels.reshape(-1, 1, 1), inside.reshape(-1).astype(jnp.int32)
        return Tile(block, sequence, inside, live, encoder, predictor, nodes)


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
    encoder = encoder.reshape(-1, *encoder.shape[-2:])
    return [encoder, *(x.reshape(len(encoder), -1, *x.shape[len(batch) :]) for x in arrays)]


def _unshared(encoder, *arrays):
    """The arrays of `_flat` with one batch dimension each."""
    return encoder, *(x.reshape(-1, *x.shape[2:]) for x in arrays)


def _forward_tiles(static, parameters, batched, grouped, platforms):
    """Planes and residuals [B, N, T, U1] for B encoders and N sequences of each."""
    tiled, strict = static
    tiled = tiled.lowered_for(platforms)
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
        made = [x.reshape(tiled.blocks, -1) for x in jax.tree.leaves(made)]
        return [jax.lax.dynamic_update_slice_in_dim(s, x, i * tiled.blocks, 0) for s, x in zip(stores, made)]

    (planes, saved), _ = tiled._planes(strict)
    size = (work.order.size, tiled.frames * tiled.columns)
    stores = [jnp.full(size, fill, x.dtype) for x, fill in (*planes, *saved)]
    stores = jax.lax.fori_loop(0, work.tiles, step, stores)
    place = jnp.maximum(jnp.cumsum(flags.reshape(-1), dtype=jnp.int32) - 1, 0)
    frame, column = (jax.lax.broadcasted_iota(jnp.int32, (1, *shape), axis) for axis in (1, 2))
    inside = (frame < num_frames[:, None, None]) & (column <= num_labels[:, None, None])
    fills = [fill for _, fill in (*planes, *saved)]
    made = [jnp.where(inside, tiled.join(x[place], shape), fill) for x, fill in zip(stores, fills)]
    return [x.reshape(-1, copies, *shape) for x in made], []


def _negligible(cotangents, scale, clamp):
    """bool [B, T, U1]: nodes whose gradients together stay below the rounding error of the sums.

    The occupancies of a column sum to 1 or more, those of a frame too unless arcs skip it. A clamp lowers the limit,
    since clipped sums are smaller.
    """
    first = cotangents[0]
    limit = jnp.finfo(first.dtype).eps / sum(first.shape[1:])
    limit = limit * jnp.where(clamp > 0, jnp.minimum(clamp, 1), 1).astype(first.dtype)[:, None, None]
    size = functools.reduce(jnp.maximum, map(jnp.abs, cotangents))
    return size * (scale != 0).astype(first.dtype)[:, None, None] <= limit  # not where it is NaN


def _backward_tiles(static, parameters, batched, grouped, platforms):
    """Gradients of encoder [B, T, E] and predictor [B, N, U1, P]; of the parameters, summed over the batch."""
    tiled, strict, structure = static
    tiled = tiled.lowered_for(platforms)
    copies = batched[1].shape[1]
    encoder, predictor, label, num_frames, num_labels, scale, clamp, *planes = _unshared(*batched)
    shape = encoder.shape[1], predictor.shape[1]
    cotangents, _ = jax.tree.unflatten(structure, planes)
    flags = tiled.within(shape, num_frames, num_labels)
    # Sequences whose loss is NaN get NaN, and do not touch the parameters.
    off = spoiled(cotangents) | (scale == 0)
    bad = off & (scale != 0)
    if tiled.joint.random:  # as in `mute`
        predictor, *planes = (jnp.where(off[:, None, None], 0, x) for x in (predictor, *planes))
    else:
        flags &= not_skipped(tiled, [*cotangents.values()], scale, clamp) & ~off[:, None, None]
    work = tiled.work(flags, grouped)
    planes = [tiled.cut(x) for x in planes]

    def step(i, sums):
        tile = tiled.tile(i, work, encoder, predictor, label, num_frames, num_labels)
        inside = tile.inside.reshape(tiled.blocks, -1)
        rows = [jnp.where(inside, x[tile.block], 0).reshape(-1, 1, 1) for x in planes]
        cotangents, saved = jax.tree.unflatten(structure, rows)
        frames = tile.encoder
        if tiled.joint.random:  # the frames of a sequence that counts are shared with others
            frames = jnp.where(off[tile.sequence][:, None, None], 0, frames)
        logits, pull = tiled.joint.pullback(parameters, frames, tile.predictor)
        per_row = [jnp.repeat(x[tile.sequence], tiled.frames * tiled.columns) for x in (scale, clamp)]
        operands = logits[:, None, None], tile.nodes, saved, cotangents, *per_row
        of_logits = tiled.inner.backward(*operands, strict=strict, alias=True)[:, 0, 0]
        of_parameters, of_encoder, of_predictor = pull(of_logits)
        of_states, bad, totals = sums
        high, columns = tiled.grid(shape)
        of_frames = tile.sequence // copies * high + tile.block // columns % high
        keys = of_frames, tile.sequence * columns + tile.block % columns
        updates = [_add_blocks(*each, tile.live) for each in zip(of_states, keys, (of_encoder, of_predictor))]
        of_states, infinite = zip(*updates)
        bad = bad.at[tile.sequence].max((infinite[0] | infinite[1]) & tile.live)
        totals = [x + y.astype(x.dtype) for x, y in zip(totals, of_parameters)]
        return list(of_states), bad, totals

    counts = [len(x) * n for x, n in zip((encoder, predictor), tiled.grid(shape))]
    states = [
        jnp.zeros((n, size, x.shape[-1]), sum_dtype(x))
        for n, size, x in zip(counts, (tiled.frames, tiled.columns), (encoder, predictor))
    ]
    totals = [jnp.zeros(x.shape, sum_dtype(x)) for x in parameters if is_trained(x)]
    states, bad, totals = jax.lax.fori_loop(0, work.tiles, step, (states, bad, totals))
    used = (
        _row(shape[0]) < num_frames[:, None],
        (_row(shape[1]) <= num_labels[:, None]) & (num_frames > 0)[:, None],
    )
    gradients = []
    for x, sums, rows in zip((encoder, predictor), states, used):
        sums = sums.reshape(len(x), -1, x.shape[-1])[:, : x.shape[1]]
        spoils = (bad[:, None] & rows).reshape(len(x), -1, x.shape[1]).any(1)
        gradients.append(jnp.where(spoils[..., None], jnp.nan, sums).astype(x.dtype))
    of_encoder, of_predictor = gradients
    return [of_encoder, of_predictor.reshape(-1, copies, *of_predictor.shape[1:])], totals


def not_skipped(tiled, cotangents, scale, clamp):
    """bool [B, blocks of frames, blocks of columns]: blocks whose gradient counts."""
    kept = tiled.cut(~_negligible(cotangents, scale, clamp))
    return jnp.any(kept, -1).reshape(-1, *tiled.grid(cotangents[0].shape[1:]))


def _add_blocks(sums, key, x, live):
    """(sums [K, ...] with x [S, ...] added at key [S], whether x [S] is not finite).

    Blocks of one key are summed first, by a matrix product, so that no two threads add to one place. Blocks that are
    not finite are left out: the product would spread them.
    """
    finite = jnp.all(jnp.isfinite(x), (1, 2))
    counted = jnp.where((finite & live)[:, None, None], x, 0).astype(sums.dtype)
    count = len(key)
    if count > 1:
        same = key[:, None] == key[None]
        first = jnp.argmax(same, 1) == jnp.arange(count)
        picks = (same & first[:, None]).astype(sums.dtype)
        total = jnp.einsum("rs,sth->rth", picks, counted, precision=jax.lax.Precision.HIGHEST)
        # Keys past the end are dropped.
        key = jnp.where(first, key, len(sums) + jnp.arange(count, dtype=key.dtype))
    else:
        total = counted
    return sums.at[key].add(total, mode="drop", unique_indices=True), ~finite


_forward = _xla.Grouped("jax_rnnt_tiles_fwd", _forward_tiles)
_backward = _xla.Grouped("jax_rnnt_tiles_bwd", _backward_tiles)
