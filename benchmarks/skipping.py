"""Replaces functions of the library to compute all blocks, to count them or to tell tiles, since no option does so.

Only this file does so. Enter the context when a program is traced, not when it runs.
"""

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp

from jax_rnnt.layouts import _tile_blocks, _tile_sizes, _tiles


def nothing_skipped():
    """The backward pass over tiles computes all blocks inside the lengths."""
    return mock.patch.object(_tiles, "not_skipped", return_value=jnp.bool_(True))


def blocks_of(size):
    """Blocks have this many frames and columns."""
    return mock.patch.object(_tile_sizes, "block_of", return_value=size)


@contextlib.contextmanager
def counted_blocks():
    """Yields a list. A forward or backward pass appends the number of its blocks when it runs."""
    counts, work = [], _tile_blocks.Blocks.work

    def counted(blocks, flags, grouped):
        jax.debug.callback(lambda blocks: counts.append(int(blocks)), jnp.sum(flags))
        return work(blocks, flags, grouped)

    with mock.patch.object(_tile_blocks.Blocks, "work", counted):
        yield counts


@contextlib.contextmanager
def chosen_sizes():
    """Yields a list. A pass over tiles appends (frames, columns of a block, blocks of a tile) when it is lowered."""
    sizes, lowered_for = [], _tiles.Tiled.lowered_for

    def seen(*arguments):
        made = lowered_for(*arguments)
        sizes.append(dataclasses.astuple(made.blocks))
        return made

    with mock.patch.object(_tiles.Tiled, "lowered_for", seen):
        yield sizes
