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
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _xla
from jax_rnnt._xla import is_trained
from jax_rnnt.emissions._emission import Emission, Wrapper, has_nan
from jax_rnnt.layouts._joint_networks import LinearJoint, split, sum_dtype
from jax_rnnt.layouts._tile_blocks import Blocks, add_blocks, row_index
from jax_rnnt.layouts._tile_sizes import blocks_for, tile_types


def tiled(function: str, logits, inner: Emission):
    """(emission, its logits) of checked `JointLogits`, in tiles; errors name `function`."""
    joint, encoder, predictor = logits.joint, logits.encoder_out, logits.predictor_out
    linear = isinstance(joint, LinearJoint)
    emission, rows = Tiled(inner, None, logits.classes, logits.dtype, logits.chunk, linear), 1
    if not linear:
        # A function is traced for its number of rows, so there the default backend decides: DECISIONS.md.
        blocks = blocks_for(emission, encoder, predictor, jax.default_backend())
        emission, rows = dataclasses.replace(emission, blocks=blocks), math.prod(dataclasses.astuple(blocks))
    static, parameters = split(function, joint, rows, encoder, predictor)
    return dataclasses.replace(emission, joint=static), (parameters, encoder, predictor)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tiled(Wrapper):
    """Reads `(parameters, encoder [..., T, E], predictor [..., U1, P])`; the emission `inner` runs on the tiles.

    For `_nodes` arrays [..., T, U1, ...] follow, whose rows the joint gets as well, and `nodes` has one plane more:
    bool [..., T, U1], which nodes count.

    The trailing batch dimensions of the encoder may be 1: all sequences of theirs share its rows. `joint` is the static
    part of the joint network; `classes` and `dtype` are those of its logits. The lowering chooses the blocks: it knows
    the platform, and the sequences of a device.
    """

    joint: Any
    classes: int
    dtype: Any
    chunk: int | None
    linear: bool
    blocks: Blocks | None = None  # of a function from the start: it is traced for its rows

    def lowered_for(self, platforms, encoder, predictor):
        """The same with the tiles of these platforms, for these rows of one device."""
        platform = platforms[0] if len(platforms) == 1 else "gpu"
        blocks = self.blocks or blocks_for(self, encoder, predictor, platform)
        return dataclasses.replace(self, joint=self.joint.lowered_for(platforms), blocks=blocks)

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
        parameters, encoder, predictor, *arrays = logits
        batch, shape = predictor.shape[:-2], (encoder.shape[-2], predictor.shape[-2])
        (planes, saved), structure = self._planes(strict)
        if 0 in (*batch, *shape):
            filled = [jnp.full((*batch, *shape), fill, x.dtype) for x, fill in (*planes, *saved)]
        else:
            flat = _flat(batch, encoder, predictor, *nodes, *arrays)
            results = [((*flat[1].shape[1:2], *shape), x.dtype) for x, _ in (*planes, *saved)]
            filled, _ = _forward((self, strict), parameters, flat, results)
            filled = [x.reshape(*batch, *shape) for x in filled]
        return jax.tree.unflatten(structure, filled)

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        parameters, encoder, predictor, *arrays = logits
        batch = predictor.shape[:-2]
        trained = [i for i, x in enumerate(parameters) if is_trained(x)]
        learned = self.joint.arrays if arrays else ()
        rows = encoder, predictor, *(arrays[i] for i in learned)
        if 0 in (*batch, encoder.shape[-2], predictor.shape[-2]):
            grad_rows, grad_parameters = map(jnp.zeros_like, rows), [jnp.zeros_like(parameters[i]) for i in trained]
        else:
            planes, structure = jax.tree.flatten((cotangents, residuals))
            differentiable = dataclasses.replace(self, joint=self.joint.differentiable())
            flat = _flat(batch, encoder, predictor, *nodes, *arrays, scale, clamp, *planes)
            places = 0, 1, *(2 + len(nodes) + i for i in learned)
            grad_rows, grad_parameters = _backward(
                (differentiable, strict, structure), parameters, flat,
                [(flat[i].shape[1:], flat[i].dtype) for i in places],
                [(i, sum_dtype(parameters[i])) for i in trained],
            )  # fmt: skip
        gradients: list[Any] = [None] * len(parameters)  # keys and integers have none
        for i, x in zip(trained, grad_parameters):
            gradients[i] = x.astype(parameters[i].dtype)
        grad_encoder, grad_predictor, *made = (g.reshape(x.shape) for g, x in zip(grad_rows, rows))
        of_arrays = dict(zip(learned, made))
        return gradients, grad_encoder, grad_predictor, *(of_arrays.get(i) for i in range(len(arrays)))

    def pullback(self, logits, nodes, cotangents, scale, clamp):
        raise NotImplementedError(
            "Tiles have no second derivative; use implementation='reference', or plain JAX for sum_over_nodes."
        )

    def without(self, nodes, masked):
        label, num_frames, *rest = nodes
        if self.joint.random:  # rows keep the places in their tiles that they had in the forward pass
            return nodes
        return label, jnp.where(masked, 0, num_frames), *rest

    def _planes(self, strict):
        """((planes, residuals) of the inner emission as lists of (what it makes of a tile, fill), their structure)."""
        made = tile_types(self.inner, 1, self.classes, self.dtype, strict)
        planes, saved = (jax.tree.leaves(x) for x in made)
        return ([(x, -math.inf) for x in planes], [(x, 0) for x in saved]), jax.tree.structure(made)


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
    blocks = tiled.blocks
    copies = batched[1].shape[1]
    batched = _unshared(*batched)
    encoder, predictor, label, num_frames, num_labels, *more = batched
    shape = encoder.shape[1], predictor.shape[1]
    flags, more = _with_nodes(blocks, shape, num_frames, num_labels, more)
    work = blocks.work(flags, grouped)

    def step(i, stores):
        tile = blocks.tile(i, work, encoder, predictor, label, num_frames, num_labels, *more)
        logits = tiled.joint.logits(parameters, tile.encoder, tile.predictor, *tile.more)
        made = tiled.inner.forward(logits[:, None, None], tile.nodes, strict=strict)
        made = jnp.stack([x.reshape(blocks.count, -1) for x in jax.tree.leaves(made)])
        return jax.lax.dynamic_update_slice_in_dim(stores, made, i * blocks.count, 1)

    (planes, saved), _ = tiled._planes(strict)
    made = *planes, *saved  # of one dtype
    stores = jnp.zeros((len(made), work.block.size, blocks.frames * blocks.columns), made[0][0].dtype)
    stores = _for_each(work.tiles, step, stores)
    place = jnp.maximum(jnp.cumsum(flags.reshape(-1), dtype=jnp.int32) - 1, 0)
    frame, column = (jax.lax.broadcasted_iota(jnp.int32, (1, *shape), axis) for axis in (1, 2))
    inside = (frame < num_frames[:, None, None]) & (column <= num_labels[:, None, None])
    planes = [jnp.where(inside, blocks.join(x[place], shape), fill) for x, (_, fill) in zip(stores, made)]
    return [x.reshape(-1, copies, *shape) for x in planes], []


def _with_nodes(blocks, shape, num_frames, num_labels, more):
    """(bool [B, blocks of frames, blocks of columns]: which hold a node that counts; `more` with its plane cut)."""
    flags = blocks.within(shape, num_frames, num_labels)
    if more:
        more = [blocks.cut(more[0]), *more[1:]]
        flags &= jnp.any(more[0], -1).reshape(flags.shape)
    return flags, more


def _largest(plane):
    """[B]: the largest absolute value of each sequence, from two reductions: |plane| would be a plane in memory."""
    return jnp.maximum(jnp.max(plane, (1, 2), initial=0), -jnp.min(plane, (1, 2), initial=0))


def _negligible(cotangents, scale, clamp):
    """bool [B, T, U1]: nodes whose gradients together stay below the rounding error of the sums.

    The occupancies of a column sum to 1 or more, those of a frame too unless arcs skip it. A clamp lowers the limit,
    since clipped sums are smaller. So does a small largest cotangent: cotangents of a latency have any size.
    """
    first = cotangents[0]
    size = functools.reduce(jnp.maximum, map(jnp.abs, cotangents))
    most = jnp.minimum(functools.reduce(jnp.maximum, map(_largest, cotangents)), 1)
    limit = most * jnp.where(clamp > 0, jnp.minimum(clamp, 1), 1).astype(first.dtype)
    limit = limit[:, None, None] * (jnp.finfo(first.dtype).eps / sum(first.shape[1:]))
    return size * (scale != 0).astype(first.dtype)[:, None, None] <= limit  # not where it is NaN


def _backward_tiles(static, parameters, batched, grouped, platforms):
    """Gradients of encoder [B, T, E], predictor [B, N, U1, P] and arrays; of the parameters, summed over the batch."""
    tiled, strict, structure = static
    tiled = tiled.lowered_for(platforms, *batched[:2])
    blocks = tiled.blocks
    copies = batched[1].shape[1]
    batched = _unshared(*batched)
    batched, planes = batched[: -structure.num_leaves], batched[-structure.num_leaves :]
    encoder, predictor, label, num_frames, num_labels, *more, scale, clamp = batched
    shape = encoder.shape[1], predictor.shape[1]
    cotangents, _ = jax.tree.unflatten(structure, planes)
    which = more[:1]  # nodes count
    flags, more = _with_nodes(blocks, shape, num_frames, num_labels, more)
    # Sequences whose loss is NaN get NaN, and do not touch the parameters.
    off = has_nan(cotangents) | (scale == 0)
    bad = off & (scale != 0)
    if tiled.joint.random:  # as in `without`
        predictor, *planes = (jnp.where(off[:, None, None], 0, x) for x in (predictor, *planes))
        more[1:] = (jnp.where(off[:, None, None, None], 0, x) for x in more[1:])
    else:
        flags &= not_skipped(blocks, [*cotangents.values()], scale, clamp) & ~off[:, None, None]
    work = blocks.work(flags, grouped)
    planes = [blocks.cut(x) for x in planes]
    high, columns = blocks.grid(shape)
    frame_keys = work.sequence // copies * high + work.block // columns % high
    keys = frame_keys, work.sequence * columns + work.block % columns
    counts = [x.shape[0] * n for x, n in zip((encoder, predictor), (high, columns))]
    goals = [blocks.goals(key, count) for key, count in zip(keys, counts)]

    def frames_of(tile):
        # As in `without`; a sequence that counts may share the frames.
        return jnp.where(off[tile.sequence][:, None, None], 0, tile.encoder) if tiled.joint.random else tile.encoder

    def step(i, sums):
        tile = blocks.tile(i, work, encoder, predictor, label, num_frames, num_labels, *more)
        inside = tile.inside.reshape(blocks.count, -1)
        rows = [jnp.where(inside, x[tile.block], 0).reshape(-1, 1, 1) for x in planes]
        cotangents, saved = jax.tree.unflatten(structure, rows)
        logits, pull = tiled.joint.pullback(parameters, frames_of(tile), tile.predictor, *tile.more)
        per_row = [jnp.repeat(x[tile.sequence], blocks.frames * blocks.columns) for x in (scale, clamp)]
        operands = logits[:, None, None], tile.nodes, saved, cotangents, *per_row
        grad_logits = tiled.inner.backward(*operands, strict=strict, alias=True)[:, 0, 0]
        grad_states, grad_arrays, infinite, totals = sums
        again = blocks.tile(tiled.joint.barrier(i), work, encoder, predictor, label, num_frames, num_labels)
        totals, grad_encoder, grad_predictor, *made = pull(grad_logits, totals, frames_of(again), again.predictor)
        grad_arrays = [
            x.at[tile.place.reshape(-1)].set(g, mode="drop", unique_indices=True) for x, g in zip(grad_arrays, made)
        ]
        made = [
            add_blocks(x, g, blocks.part(i, place), blocks.part(i, goal), platforms)
            for x, g, (place, goal) in zip(grad_states, (grad_encoder, grad_predictor), goals)
        ]
        grad_states, flags = zip(*made)
        infinite = jax.lax.dynamic_update_slice_in_dim(infinite, flags[0] | flags[1], i * blocks.count, 0)
        return list(grad_states), grad_arrays, infinite, totals

    states = [
        jnp.zeros((n, size, x.shape[-1]), sum_dtype(x))
        for n, size, x in zip(counts, (blocks.frames, blocks.columns), (encoder, predictor))
    ]
    infinite = jnp.zeros(work.block.size, bool)
    totals = tiled.joint.zeros(parameters, blocks.count)
    arrays = [more[1 + i] for i in tiled.joint.arrays] if more else []  # those with a gradient
    arrays = [jnp.zeros((math.prod(x.shape[:3]), *x.shape[3:]), x.dtype) for x in arrays]
    states, arrays, infinite, totals = _for_each(work.tiles, step, (states, arrays, infinite, totals))
    trained = (x for x in parameters if is_trained(x))
    totals = [total.astype(sum_dtype(x)) for total, x in zip(tiled.joint.totals(totals), trained, strict=True)]
    bad = bad.at[work.sequence].max(infinite & work.live)
    used = (
        row_index(shape[0]) < num_frames[:, None],
        (row_index(shape[1]) <= num_labels[:, None]) & (num_frames > 0)[:, None],
    )
    gradients = []
    for x, sums, rows in zip((encoder, predictor), states, used):
        sums = sums.reshape(x.shape[0], -1, x.shape[-1])[:, : x.shape[1]]
        spoils = (bad[:, None] & rows).reshape(x.shape[0], -1, x.shape[1]).any(1)
        gradients.append(jnp.where(spoils[..., None], jnp.nan, sums).astype(x.dtype))
    for x in arrays:
        spoils = (bad[:, None, None] & which[0]).reshape(-1, 1)
        gradients.append(jnp.where(spoils, jnp.nan, x).reshape(*which[0].shape, x.shape[1]))
    grad_encoder, *others = gradients
    return [grad_encoder, *(x.reshape(-1, copies, *x.shape[1:]) for x in others)], totals


def not_skipped(blocks, cotangents, scale, clamp):
    """bool [B, blocks of frames, blocks of columns]: blocks whose gradient counts."""
    kept = blocks.cut(~_negligible(cotangents, scale, clamp))
    return jnp.any(kept, -1).reshape(-1, *blocks.grid(cotangents[0].shape[1:]))


_forward = _xla.Grouped("jax_rnnt_tiles_fwd", _forward_tiles)
_backward = _xla.Grouped("jax_rnnt_tiles_bwd", _backward_tiles)
