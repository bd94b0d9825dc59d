"""The emission of logits that never exist as a whole: a joint network computes them tile by tile.

There are B sequences, T frames, U1 columns and V classes; E and P are the widths of encoder and predictor rows.

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
from jax_rnnt._xla.loading import JOINT
from jax_rnnt.emissions._emission import Rows, has_nan
from jax_rnnt.tiles._networks import Linear, sum_dtype
from jax_rnnt.tiles._tile_blocks import Blocks, TileInputs, Work, add_blocks, row_index
from jax_rnnt.tiles._tile_sizes import blocks_for, tile_types
from jax_rnnt.tiles.joint import KERNELS


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Tiled(Rows[Any, Any]):
    """Reads `(parameters, encoder [..., T, E], predictor [..., U1, P])`; the rows `inner` run on the tiles.

    For `_nodes`, arrays [..., T, U1, ...] follow, whose rows the joint gets as well, and `nodes` has one plane more,
    bool [..., T, U1]: which nodes count.

    The trailing batch dimensions of the encoder may be 1: all its sequences share its rows. `joint` is the static part
    of the joint network; `classes` and `dtype` are those of its logits. The lowering chooses the blocks: it knows the
    platform, and the sequences of a device.
    """

    inner: Rows
    joint: Any
    classes: int
    dtype: Any
    chunk: int | None
    linear: bool
    blocks: Blocks | None = None  # set for a closure from the start, as it is traced for its rows
    precision: str | None = None  # precision of a kernel's products; for tiles JAX is asked

    def lowered_for(self, platforms, encoder, predictor):
        """Returns the same with the tiles of these platforms, for these rows of one device."""
        platform = platforms[0] if len(platforms) == 1 else "gpu"
        blocks = self.blocks or blocks_for(self, encoder, predictor, platform)
        return dataclasses.replace(self, joint=self.joint.lowered_for(platforms), blocks=blocks)

    @property
    def blanks(self):
        return self.inner.blanks

    @property
    def normalized(self):
        return self.inner.normalized

    def reference(self, logits, nodes):
        raise NotImplementedError(
            "Tiles have no second derivative; use implementation='reference', or plain JAX for sum_over_nodes."
        )

    def forward(self, logits, nodes, *, strict=False):
        parameters, encoder, predictor, *_ = logits
        batch, shape = predictor.shape[:-2], (encoder.shape[-2], predictor.shape[-2])
        types, fills, structure = self._planes(strict)
        if 0 in (*batch, *shape):
            planes = [jnp.full((*batch, *shape), fill, x.dtype) for x, fill in zip(types, fills)]
        else:
            operands, structure_of_inputs = _with_copies(_inputs(logits, nodes), batch)
            results = [((operands[1].shape[1], *shape), x.dtype) for x in types]
            planes, _ = _forward((self, strict, structure_of_inputs), parameters, operands, results)
            planes = [x.reshape(*batch, *shape) for x in planes]
        return jax.tree.unflatten(structure, planes)

    def backward(self, logits, nodes, residuals, cotangents, scale, clamp, *, strict=False, alias=True):
        parameters, encoder, predictor, *arrays = logits
        batch = predictor.shape[:-2]
        trained = [i for i, x in enumerate(parameters) if is_trained(x)]
        learned = self.joint.arrays if arrays else ()
        rows = encoder, predictor, *(arrays[i] for i in learned)
        if 0 in (*batch, encoder.shape[-2], predictor.shape[-2]):
            of_rows, of_parameters = map(jnp.zeros_like, rows), [jnp.zeros_like(parameters[i]) for i in trained]
        else:
            differentiable = dataclasses.replace(self, joint=self.joint.differentiable())
            inputs = BackwardInputs(_inputs(logits, nodes), cotangents, residuals, scale, clamp)
            operands, structure = _with_copies(inputs, batch)
            types = jax.tree.unflatten(structure, [(x.shape[1:], x.dtype) for x in operands]).inputs
            of_rows, of_parameters = _backward(
                (differentiable, strict, structure), parameters, operands,
                [types.encoder, types.predictor, *(types.arrays[i] for i in learned)],
                [(i, sum_dtype(parameters[i])) for i in trained],
            )  # fmt: skip
        gradients: list[Any] = [None] * len(parameters)  # keys and integers have none
        for i, x in zip(trained, of_parameters):
            gradients[i] = x.astype(parameters[i].dtype)
        of_encoder, of_predictor, *of_arrays = (g.reshape(x.shape) for g, x in zip(of_rows, rows))
        by_array = dict(zip(learned, of_arrays))
        return gradients, of_encoder, of_predictor, *(by_array.get(i) for i in range(len(arrays)))

    def _planes(self, strict):
        """Returns the inner emission's form of nodes: (types, fills of nodes outside the lengths, structure)."""
        planes, residuals = both = tile_types(self.inner, 1, self.classes, self.dtype, strict)
        fills = [-math.inf for _ in jax.tree.leaves(planes)] + [0 for _ in jax.tree.leaves(residuals)]
        return jax.tree.leaves(both), fills, jax.tree.structure(both)


class BackwardInputs(typing.NamedTuple):
    """The inputs of the backward pass, for B N sequences."""

    inputs: TileInputs
    cotangents: dict[str, jax.Array]  # [B N, T, U1]
    residuals: Any  # [B N, T, U1]
    scale: jax.Array  # [B N]
    clamp: jax.Array  # [B N]


def _inputs(logits, nodes):
    _, encoder, predictor, *arrays = logits
    return TileInputs(encoder, predictor, nodes.label, nodes.num_frames, nodes.num_labels, nodes.counts, tuple(arrays))


def _with_copies(inputs, batch):
    """(operands of `_xla.Grouped`, structure): the encoder [B, T, E], then all [B, N, ...] that share its rows."""
    (encoder, *others), structure = jax.tree.flatten(inputs)
    count = math.prod(encoder.shape[:-2])
    encoder = encoder.reshape(count, *encoder.shape[-2:])
    others = [x.reshape(count, math.prod(batch) // count, *x.shape[len(batch) :]) for x in others]
    return [encoder, *others], structure


def _without_copies(operands, structure):
    """Returns the inputs, with one batch dimension each."""
    encoder, *others = operands
    return jax.tree.unflatten(structure, [encoder, *(x.reshape(-1, *x.shape[2:]) for x in others)])


def _for_each(tiles, step, carry):
    """Runs a `fori_loop` that carries whether there is a next turn: on a GPU its condition is no launch."""

    def turn(state):
        i, _, carry = state
        return i + 1, i + 1 < tiles, step(i, carry)

    return jax.lax.while_loop(lambda state: state[1], turn, (jnp.int32(0), tiles > 0, carry))[2]


def _forward_tiles(static, parameters, batched, grouped, platforms):
    """Computes planes and residuals [B, N, T, U1] for B encoders and N sequences of each."""
    tiled, strict, structure = static
    inputs = _without_copies(batched, structure)
    tiled = tiled.lowered_for(platforms, inputs.encoder, inputs.predictor)
    blocks, shape = tiled.blocks, inputs.shape
    flags, counts = _flags(blocks, inputs)
    work = blocks.work(flags, grouped)

    def add_tile(i, stores):
        tile = blocks.tile(i, work, inputs, counts)
        logits = tiled.joint.logits(parameters, tile.encoder, tile.predictor, *tile.more)
        planes = tiled.inner.forward(logits[:, None, None], tile.nodes, strict=strict)
        planes = jnp.stack([x.reshape(blocks.count, -1) for x in jax.tree.leaves(planes)])
        return jax.lax.dynamic_update_slice_in_dim(stores, planes, i * blocks.count, 1)

    types, fills, _ = tiled._planes(strict)  # all of one dtype
    stores = jnp.zeros((len(types), work.block.size, blocks.frames * blocks.columns), types[0].dtype)
    stores = _for_each(work.tiles, add_tile, stores)
    place = jnp.maximum(jnp.cumsum(flags.reshape(-1), dtype=jnp.int32) - 1, 0)
    frame, column = (jax.lax.broadcasted_iota(jnp.int32, (1, *shape), axis) for axis in (1, 2))
    inside = (frame < inputs.num_frames[:, None, None]) & (column <= inputs.num_labels[:, None, None])
    planes = [jnp.where(inside, blocks.join(x[place], shape), fill) for x, fill in zip(stores, fills)]
    return [x.reshape(-1, inputs.copies, *shape) for x in planes], []


def _flags(blocks, inputs):
    """Returns (bool [B, frame blocks, column blocks]: those with a node that counts; `inputs.counts` in blocks)."""
    flags = blocks.within(inputs.shape, inputs.num_frames, inputs.num_labels)
    if inputs.counts is None:
        return flags, None
    counts = blocks.cut(inputs.counts)
    return flags & jnp.any(counts, -1).reshape(flags.shape), counts


def _largest(plane):
    """Returns each sequence's largest absolute value [B], by two reductions: |plane| would be a plane in memory."""
    return jnp.maximum(jnp.max(plane, (1, 2), initial=0), -jnp.min(plane, (1, 2), initial=0))


def _negligible(size, largest, scale, clamp):
    """Returns bool [B, T, U1]: nodes whose gradients together stay below the rounding error of the sums.

    The cotangents of a node are minus the posteriors of its arcs, so a row of logits has a gradient of the size of the
    largest, gamma[t, u]. Nodes with gamma[t, u] <= eps / (T + U1) are left out. Together they have at most

        U1 eps / (T + U1) < eps                in a frame, whose row of the encoder is a sum over columns
        T eps / (T + U1) < eps                 in a column, whose row of the predictor is a sum over frames
        T U1 eps / (T + U1) < eps min(T, U1)   in the sums of the parameters, over all nodes.

    Every path leaves each column (the last one unless a label ends it), each frame unless an arc skips it, and at least
    min(T, U1) nodes except for these. So the posteriors in these sums add up to 1, 1 and min(T, U1): what is left out
    is less than eps of them.

    A clamp lowers the limit, since clipped sums are smaller. So does a small largest cotangent: those of a latency have
    any size, and the bound is linear in them.

    `size` is the largest absolute value of the cotangents of a node [B, T, U1], `largest` that of a sequence [B].
    """
    limit = jnp.minimum(largest, 1) * jnp.where(clamp > 0, jnp.minimum(clamp, 1), 1).astype(size.dtype)
    limit = limit[:, None, None] * (jnp.finfo(size.dtype).eps / sum(size.shape[1:]))
    return size * (scale != 0).astype(size.dtype)[:, None, None] <= limit  # false where it is NaN


class Sums(typing.NamedTuple):
    """The gradients, summed from tile to tile."""

    encoder: jax.Array  # [B blocks of frames, frames, E]
    predictor: jax.Array  # [B N blocks of columns, columns, P]
    arrays: list[jax.Array]  # [B N T U1, V], each row written once
    infinite: jax.Array  # bool [n]: blocks of the list whose gradient is not finite
    parameters: Any  # in the form in which the joint network sums them


class Backward(typing.NamedTuple):
    """The inputs of every turn of the backward pass."""

    tiled: Any  # `Tiled`, lowered for these platforms
    strict: bool
    platforms: tuple[str, ...]
    parameters: list[jax.Array]
    inputs: TileInputs
    counts: jax.Array | None  # `inputs.counts` cut into blocks
    planes: Any  # (cotangents, residuals), cut into blocks
    per_sequence: tuple[jax.Array, jax.Array]  # scale and clamp
    off: jax.Array  # bool [B N]: sequences that add nothing
    work: Work

    def goals(self):
        """Returns (number of keys, `Blocks.goals`), for encoder and predictor."""
        blocks, work, inputs = self.tiled.blocks, self.work, self.inputs
        high, columns = blocks.grid(inputs.shape)
        of_frames = work.sequence // inputs.copies * high + work.block // columns % high
        of_columns = work.sequence * columns + work.block % columns
        sizes = inputs.encoder.shape[0] * high, inputs.predictor.shape[0] * columns
        return [(size, *blocks.goals(key, size)) for key, size in zip((of_frames, of_columns), sizes)]

    def zeros(self, goals) -> Sums:
        blocks, inputs, joint = self.tiled.blocks, self.inputs, self.tiled.joint
        sides = zip(goals, (blocks.frames, blocks.columns), (inputs.encoder, inputs.predictor))
        encoder, predictor = (jnp.zeros((size, rows, x.shape[-1]), sum_dtype(x)) for (size, *_), rows, x in sides)
        learned = (inputs.arrays[i] for i in joint.arrays) if inputs.arrays else ()
        arrays = [jnp.zeros((math.prod(x.shape[:3]), *x.shape[3:]), x.dtype) for x in learned]
        infinite = jnp.zeros(self.work.block.size, bool)
        return Sums(encoder, predictor, arrays, infinite, joint.zeros(self.parameters, blocks.count))

    def encoder_of(self, tile):
        # For a random joint, a sequence that is off has zeros, and its rows keep their places. One that counts may
        # share its frames.
        off = self.off[tile.sequence][:, None, None]
        return jnp.where(off, 0, tile.encoder) if self.tiled.joint.random else tile.encoder

    def add_tile(self, goals, i, sums: Sums) -> Sums:
        blocks, joint = self.tiled.blocks, self.tiled.joint
        tile = blocks.tile(i, self.work, self.inputs, self.counts)
        inside = tile.inside.reshape(blocks.count, -1)
        planes = jax.tree.map(lambda x: jnp.where(inside, x[tile.block], 0).reshape(-1, 1, 1), self.planes)
        logits, pull = joint.pullback(self.parameters, self.encoder_of(tile), tile.predictor, *tile.more)
        of_logits = self.of_logits(tile, logits[:, None, None], *planes)
        again = blocks.tile(joint.barrier(i), self.work, self.inputs)
        parameters, of_encoder, of_predictor, *of_arrays = pull(
            of_logits, sums.parameters, self.encoder_of(again), again.predictor
        )

        def add(x, gradient, goal):
            _, place, key = goal
            return add_blocks(x, gradient, blocks.part(i, place), blocks.part(i, key), self.platforms)

        encoder, spoilt = add(sums.encoder, of_encoder, goals[0])
        predictor, spoilt_too = add(sums.predictor, of_predictor, goals[1])
        arrays = [
            x.at[tile.place.reshape(-1)].set(g, mode="drop", unique_indices=True)
            for x, g in zip(sums.arrays, of_arrays)
        ]
        infinite = jax.lax.dynamic_update_slice_in_dim(sums.infinite, spoilt | spoilt_too, i * blocks.count, 0)
        return Sums(encoder, predictor, arrays, infinite, parameters)

    def of_logits(self, tile, logits, cotangents, residuals):
        """Returns the gradient [N, V] of the logits [N, 1, 1, V] of a tile."""
        rows = self.tiled.blocks.frames * self.tiled.blocks.columns
        scale, clamp = (jnp.repeat(x[tile.sequence], rows) for x in self.per_sequence)
        operands = logits, tile.nodes, residuals, cotangents, scale, clamp
        return self.tiled.inner.backward(*operands, strict=self.strict, alias=True)[:, 0, 0]

    def finish(self, sums: Sums, bad):
        """(gradients of encoder, predictor and arrays, of the parameters); NaN in what bad sequences [B N] read."""
        inputs = self.inputs
        bad = bad.at[self.work.sequence].max(sums.infinite & self.work.live)
        of_encoder, *gradients = _of_states(inputs, sums.encoder, sums.predictor, bad)
        for x in sums.arrays:
            spoils = (bad[:, None, None] & inputs.counts).reshape(-1, 1)
            gradients.append(jnp.where(spoils, jnp.nan, x).reshape(*inputs.counts.shape, x.shape[1]))
        gradients = [of_encoder, *(x.reshape(-1, inputs.copies, *x.shape[1:]) for x in gradients)]
        trained = (x for x in self.parameters if is_trained(x))
        totals = self.tiled.joint.totals(sums.parameters)
        return gradients, [total.astype(sum_dtype(x)) for total, x in zip(totals, trained, strict=True)]


def _of_states(inputs, of_encoder, of_predictor, bad):
    """Gradients of encoder [B, T, E] and predictor [B N, U1, P] from their sums; NaN in what bad sequences read."""
    frames, columns = inputs.shape
    read_frames = row_index(frames) < inputs.num_frames[:, None]
    read_columns = (row_index(columns) <= inputs.num_labels[:, None]) & (inputs.num_frames > 0)[:, None]
    bad = bad[:, None]
    return (
        _spread_nan(of_encoder, inputs.encoder, bad & read_frames),
        _spread_nan(of_predictor, inputs.predictor, bad & read_columns),
    )


def _spread_nan(sums, like, spoils):
    """Returns the gradient of `like` [B, n, width] from sums by blocks, NaN in rows that a sequence [B N, n] spoils."""
    sums = sums.reshape(like.shape[0], -1, like.shape[-1])[:, : like.shape[1]]
    spoils = spoils.reshape(like.shape[0], -1, like.shape[1]).any(1)
    return jnp.where(spoils[..., None], jnp.nan, sums).astype(like.dtype)


def _backward_tiles(static, parameters, batched, grouped, platforms):
    """Gradients of encoder [B, T, E], predictor [B, N, U1, P] and arrays; of the parameters, summed over the batch."""
    tiled, strict, structure = static
    inputs, cotangents, residuals, scale, clamp = _without_copies(batched, structure)
    tiled = tiled.lowered_for(platforms, inputs.encoder, inputs.predictor)
    blocks, planes = tiled.blocks, (cotangents, residuals)
    flags, counts = _flags(blocks, inputs)
    # A sequence whose loss is NaN gets NaN, and does not touch the parameters.
    off = has_nan(cotangents) | (scale == 0)
    bad = off & (scale != 0)
    if tiled.joint.random:  # rows keep the places in their tiles that they had in the forward pass
        planes, predictor, arrays = jax.tree.map(
            lambda x: jnp.where(off.reshape(-1, *[1] * (x.ndim - 1)), 0, x), (planes, inputs.predictor, inputs.arrays)
        )
        inputs = inputs._replace(predictor=predictor, arrays=arrays)
    else:
        largest = functools.reduce(jnp.maximum, map(_largest, cotangents.values()))
        flags &= not_skipped(blocks, _size(cotangents), largest, scale, clamp) & ~off[:, None, None]
    work, planes = blocks.work(flags, grouped), jax.tree.map(blocks.cut, planes)
    per_sequence = scale, clamp
    backward = Backward(tiled, strict, platforms, parameters, inputs, counts, planes, per_sequence, off, work)
    goals = backward.goals()
    sums = _for_each(work.tiles, functools.partial(backward.add_tile, goals), backward.zeros(goals))
    return backward.finish(sums, bad)


def _size(cotangents):
    """Returns the largest absolute value of the cotangents of each node, [B, T, U1]."""
    return functools.reduce(jnp.maximum, map(jnp.abs, cotangents.values()))


def not_skipped(blocks, size, largest, scale, clamp):
    """Returns which blocks have a gradient that counts, bool [B, blocks of frames, blocks of columns]."""
    kept = blocks.cut(~_negligible(size, largest, scale, clamp))
    return jnp.any(kept, -1).reshape(-1, *blocks.grid(size.shape[1:]))


def _forward_kernel(kernel, plan, static, parameters, batched, interpret):
    """Computes what `_forward_tiles` does, by the kernel."""
    inputs = _without_copies(batched, static[2])
    planes = kernel.forward(plan, parameters, inputs, interpret)
    return [x.reshape(-1, inputs.copies, *inputs.shape) for x in jax.tree.leaves(planes)], []


def _backward_kernel(kernel, plan, static, parameters, batched, interpret):
    """Computes what `_backward_tiles` does, by the kernel."""
    inputs, cotangents, norm, scale, clamp = _without_copies(batched, static[2])
    # One reduction of all cotangents, since each is some launches on a GPU. The largest is NaN if one is.
    size = _size(cotangents)
    largest = jnp.max(size, (1, 2))
    # Gradients of a scale near the end of float32 would be infinite in sums that sequences share.
    off = (scale == 0) | ~(jnp.abs(scale) * largest < 2.0**106)
    blocks = plan.blocks
    flags, _ = _flags(blocks, inputs)
    flags &= not_skipped(blocks, size, largest, scale, clamp) & ~off[:, None, None]
    operands = parameters, inputs, cotangents, norm, scale, clamp, flags
    of_encoder, of_predictor, totals = kernel.backward(plan, *operands, interpret)
    gradients = _of_states(inputs, of_encoder, of_predictor, off & (scale != 0))
    return [gradients[0], gradients[1].reshape(-1, inputs.copies, *inputs.predictor.shape[1:])], totals


def _kernel(function, inputs_of):
    """Returns the function that `_xla.Grouped` calls: it gives the kernel where that takes the problem."""

    def choose(kind, static, parameters, batched, device, reason, doubt):
        tiled, strict, structure = static
        if not isinstance(tiled.joint, Linear):
            return None
        encoder, *others = batched
        flat = [jax.core.ShapedArray((math.prod(x.shape[:2]), *x.shape[2:]), x.dtype) for x in others]
        inputs = inputs_of(jax.tree.unflatten(structure, [encoder, *flat]))
        kernel = KERNELS[kind]
        plan = reason or kernel.plan(tiled, parameters, inputs, device)
        if isinstance(plan, str):
            _xla.warn_once(f"jax_rnnt computes a LinearJoint in tiles, not by its kernels for {kernel.name}: {plan}.")
            return None
        # The kernels of both passes are chosen together.
        if not strict and (warning := doubt(JOINT)):
            _xla.warn_once(warning)
            return None
        return lambda shared, batched, interpret: function(kernel, plan, static, shared, batched, interpret)

    return choose


_forward = _xla.Grouped("jax_rnnt_tiles_fwd", _forward_tiles, _kernel(_forward_kernel, lambda x: x))
_backward = _xla.Grouped("jax_rnnt_tiles_bwd", _backward_tiles, _kernel(_backward_kernel, lambda x: x.inputs))
