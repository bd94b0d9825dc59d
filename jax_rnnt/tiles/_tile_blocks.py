"""Blocks of nodes: planes cut into blocks, the list of blocks to do, and the rows of a tile.

There are B sequences, T frames, U1 columns, S blocks in a tile and N rows.
"""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _xla
from jax_rnnt.emissions._emission import OUTSIDE, Nodes


class TileInputs(typing.NamedTuple):
    """The inputs of tiles: B encoders, and N sequences for each of them."""

    encoder: jax.Array  # [B, T, E]
    predictor: jax.Array  # [B N, U1, P]
    label: jax.Array  # int32 [B N, 1, U1]
    num_frames: jax.Array  # [B N]
    num_labels: jax.Array  # [B N]
    counts: Any  # from `_nodes`: bool [B N, T, U1], which nodes count; None if all inside the lengths do
    arrays: tuple[jax.Array, ...]  # from `_nodes`: [B N, T, U1, V]

    @property
    def shape(self):
        """The dimensions (T, U1)."""
        return self.encoder.shape[1], self.predictor.shape[1]

    @property
    def copies(self) -> int:
        """N, the number of sequences of each encoder."""
        return self.predictor.shape[0] // self.encoder.shape[0]


class Tile(typing.NamedTuple):
    """S blocks: their sequences, their nodes inside the lengths, and their rows of encoder and predictor."""

    block: jax.Array  # [S], its number in a plane cut into blocks
    sequence: jax.Array  # [S]
    inside: jax.Array  # [S, frames, columns]
    encoder: jax.Array  # [S, frames, E]
    predictor: jax.Array  # [S, columns, P]
    nodes: Nodes  # nodes of the inner rows: label [N, 1, 1], 1 or 0 frames [N]
    more: tuple[jax.Array, ...] = ()  # from `_nodes`: which nodes count, and rows of arrays, [S, frames, columns, ...]
    place: jax.Array | None = None  # from `_nodes`: [S, frames, columns], in a plane [B T U1]; not inside: past its end


class Work(typing.NamedTuple):
    """The blocks to do, one after the other; those past the end repeat the last one."""

    tiles: jax.Array  # their number, the most of any group
    some: jax.Array  # whether there is a block
    block: jax.Array  # [n], its number in a plane cut into blocks
    sequence: jax.Array  # [n]
    frame: jax.Array  # [n], the first of a block
    column: jax.Array  # [n], the first of a block
    live: jax.Array  # [n], whether it is before the end


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A block has `frames` by `columns` nodes, a tile has `count` blocks."""

    frames: int
    columns: int
    count: int

    def grid(self, shape):
        """Returns the numbers of blocks of frames and of columns in a plane [T, U1]."""
        return -(-shape[0] // self.frames), -(-shape[1] // self.columns)

    def cut(self, x):
        """Converts [B, T, U1] to [blocks, frames * columns]."""
        (frames, columns), size = self.grid(x.shape[1:]), (self.frames, self.columns)
        edges = [(0, n * k - m) for n, k, m in zip((frames, columns), size, x.shape[1:])]
        x = jnp.pad(x, [(0, 0), *edges]).reshape(-1, frames, self.frames, columns, self.columns)
        return jnp.swapaxes(x, 2, 3).reshape(-1, self.frames * self.columns)

    def join(self, x, shape):
        """Converts [blocks, frames * columns] to [B, T, U1]."""
        frames, columns = self.grid(shape)
        x = jnp.swapaxes(x.reshape(-1, frames, columns, self.frames, self.columns), 2, 3)
        return x.reshape(-1, frames * self.frames, columns * self.columns)[:, : shape[0], : shape[1]]

    def within(self, shape, num_frames, num_labels):
        """Returns which blocks hold a node inside the lengths, bool [B, blocks of frames, blocks of columns]."""
        frames, columns = (row_index(n) for n in self.grid(shape))
        rows = frames * self.frames < num_frames[:, None]
        return rows[:, :, None] & (columns * self.columns <= num_labels[:, None])[:, None]

    def work(self, flags, grouped):
        """Returns the list of blocks with a flag, for flags [B, blocks of frames, blocks of columns]."""
        _, frames, columns = flags.shape
        flags = flags.reshape(-1)
        place = jnp.cumsum(flags, dtype=jnp.int32)
        count = place[-1]
        size = -(-flags.size // self.count) * self.count
        index = jnp.arange(flags.size, dtype=jnp.int32)
        order = jnp.zeros(size, jnp.int32)
        order = order.at[jnp.where(flags, place - 1, size + index)].set(index, mode="drop", unique_indices=True)
        # Past the end the last block repeats, so that nothing outside is read.
        place = jnp.arange(size, dtype=jnp.int32)
        block = order[jnp.clip(place, 0, jnp.maximum(count - 1, 0))]
        sequence, inner = block // (frames * columns), block % (frames * columns)
        return Work(
            tiles=_xla.most_over_groups(-(-count // self.count), grouped),
            some=count > 0,
            block=block,
            sequence=sequence,
            frame=inner // columns * self.frames,
            column=inner % columns * self.columns,
            live=place < count,
        )

    def goals(self, key, count):
        """Returns (place in its tile of the first block with the same key [n], those blocks' key [n], in [0, count)).

        The other blocks have distinct keys from `count` on.
        """
        keys = key.reshape(-1, self.count)
        place = jnp.argmax(keys[:, :, None] == keys[:, None], -1).astype(jnp.int32)
        index = row_index(self.count)
        return place.reshape(-1), jnp.where(place == index, keys, count + index).reshape(-1)

    def part(self, i, x):
        """Returns the part of tile i in an array [n] of all blocks to do."""
        return jax.lax.dynamic_slice_in_dim(x, i * self.count, self.count)

    def tile(self, i, work, inputs: TileInputs, counts=None):
        """Returns tile i of all. `counts` are the inputs', in blocks; without them the tile has no rows of arrays."""
        names = "block", "sequence", "frame", "column", "live"
        block, sequence, frame, column, live = (self.part(i, getattr(work, name)) for name in names)
        frame, column = frame[:, None] + row_index(self.frames), column[:, None] + row_index(self.columns)
        frames, labels = inputs.num_frames[sequence][:, None], inputs.num_labels[sequence][:, None]
        inside = ((frame < frames) & live[:, None])[:, :, None] & (column <= labels)[:, None]
        frame, column = jnp.clip(frame, 0, jnp.maximum(frames - 1, 0)), jnp.clip(column, 0, labels)
        more: tuple[jax.Array, ...] = ()
        place = None
        if counts is not None:
            node = sequence[:, None, None], frame[:, :, None], column[:, None]
            more = counts[block].reshape(inside.shape), *(_rows_of(x, *node) for x in inputs.arrays)
            rows, width = inputs.shape
            past = inputs.predictor.shape[0] * rows * width + jnp.arange(inside.size, dtype=jnp.int32).reshape(
                inside.shape
            )
            place = jnp.where(inside, (node[0] * rows + node[1]) * width + node[2], past)
        encoder = _rows_of(inputs.encoder, (sequence // inputs.copies)[:, None], frame)
        predictor = _rows_of(inputs.predictor, sequence[:, None], column)
        encoder, predictor = (jnp.where(work.some, x, 0) for x in (encoder, predictor))
        labels = jnp.where(inside, inputs.label[sequence[:, None], 0, column][:, None], OUTSIDE)
        nodes = Nodes(labels.reshape(-1, 1, 1), inside.reshape(-1).astype(jnp.int32))
        return Tile(block, sequence, inside, encoder, predictor, nodes, more, place)


def _rows_of(x, *index):
    """Returns x[index]."""
    if x.dtype.itemsize != 2:
        return x[index]
    # As integers, since XLA's CPU backend gathers 16-bit floats in float32, and first converts all of x.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return jax.lax.bitcast_convert_type(bits[index], x.dtype)


def row_index(n):
    """Returns 0, 1, ..., n - 1 as int32 [1, n]."""
    return jax.lax.broadcasted_iota(jnp.int32, (1, n), 1)


def add_blocks(sums, x, place, goal, platforms):
    """(sums [K, ...] with x [S, ...] added at the key of each block, whether x [S] is not finite).

    Blocks of one key are summed first, by a matrix product, so that no two threads add to one place. Entries that are
    not finite are left out: the product would spread them.
    """
    finite = jnp.abs(x) < jnp.finfo(x.dtype).max / 2  # false for NaN; the largest numbers round to inf in 16 bits
    x = jnp.where(finite, x, 0).astype(sums.dtype)
    if len(place) > 1:
        picks = (place[None] == row_index(len(place)).T).astype(sums.dtype)
        x = jnp.einsum("rs,sth->rth", picks, x, precision=_exact(sums.dtype, platforms))
    return sums.at[goal].add(x, mode="drop", unique_indices=True), ~jnp.all(finite, (1, 2))


def _exact(dtype, platforms) -> Any:
    """Returns the precision of a product with zeros and ones that rounds no factor."""
    if platforms == ("cuda",) and dtype == jnp.float32:
        # Three 16-bit parts of every number on tensor cores; a float32 product takes ten times as long.
        return jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    return jax.lax.Precision.HIGHEST
