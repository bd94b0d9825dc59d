"""Sizes of blocks and tiles, by platform.

There are B sequences, T frames, U1 columns and V classes; E and P are the widths of encoder and predictor rows.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt.emissions._emission import Nodes, Rows
from jax_rnnt.tiles._networks import sum_dtype
from jax_rnnt.tiles._tile_blocks import Blocks

_BUDGET = 64e6, 256e6  # least and most bytes of a tile's workspace on a GPU
_VMEM = 32e6  # bytes of a tile on a TPU
_BLOCKS = 1024  # most blocks of a tile, whose sums take a table of their square


def blocks_for(tiled, encoder, predictor, platform: str) -> Blocks:
    """Returns the blocks of a `_tiles.Tiled` emission, for the sequences of one device.

    Symbolic dimensions (`jax.export`) count as large ones.
    """
    shape = encoder.shape[-2], predictor.shape[-2]
    frames, columns = map(_known, shape)
    block = block_of((frames, columns), platform)
    blocks = math.prod(-(-n // k) for n, k in zip(shape, block)) * math.prod(predictor.shape[:-2])
    most = max((tiled.chunk or _rows(tiled, encoder, predictor, platform)) // math.prod(block), 1)
    if not tiled.chunk and (encoder.shape[-1] or predictor.shape[-1]):  # arrays of logits have no sums
        most = min(most, _BLOCKS)  # those of short sequences are small
    if isinstance(blocks, int):
        tiles = -(-blocks // most)
        blocks = max(-(-blocks // max(tiles, 1)), 1)  # as many in every tile, if all are inside the lengths
    else:
        blocks = most
    return Blocks(*block, blocks if platform == "cpu" else _rounded(blocks, math.prod(block)))


def _known(n) -> int:
    """Returns n, or a large number for a symbol."""
    return n if isinstance(n, int) else 1 << 10


def _rows(tiled, encoder, predictor, platform: str) -> int:
    """Returns the rows of a tile: few enough for caches (CPU, TPU), enough to hide the launches of its kernels (GPU).

    On a CPU, with fewer rows than units, adding up the weight's gradient would take as long as making it. On a GPU the
    workspace may have an eighth of the logits, at most 256 MB, and 64 MB in any case: hidden units of 28 characters
    take nine times the memory of their logits. Sums of gradients and planes are a part of it. On a TPU
    (v5e, T = 256, U = 64, V = 512, H = 640) XLA estimates 26, 20, 17 and 17 million cycles for all tiles of 8, 16,
    32 and 64 MB; those of 64 MB leave VMEM.
    """
    units, classes = [_known(x.shape[-1]) for x in (encoder, predictor)], _known(tiled.classes)
    if platform == "cpu":
        return min(max((1 << 21) // (classes + sum(units)), 256, min(max(units), 1024)), 4096)
    width, sums = tiled.dtype.itemsize, np.dtype(sum_dtype(tiled)).itemsize
    # Logits and hidden units; a function keeps more, such as the gradient of each pair of rows.
    row = width * (classes + max(units) + (0 if tiled.linear else sum(units)))
    if platform == "tpu":
        return max(int(_VMEM / row), 1024)
    nodes = math.prod(predictor.shape[:-1]) * encoder.shape[-2]
    if not isinstance(nodes, int):
        return max(int(_BUDGET[1] / 2 / row), 1024)
    most = 0.94 * min(max(_BUDGET[0], width * nodes * classes / 8), _BUDGET[1])
    planes = len(jax.tree.leaves(tile_types(tiled.inner, 1, tiled.classes, tiled.dtype)))
    fixed = sums * (sum(math.prod(map(_known, x.shape)) for x in (encoder, predictor)) + planes * nodes)
    return max(int(max(most - fixed, most / 4) / row), 1024)


def block_of(shape: tuple[int, int], platform: str) -> tuple[int, int]:
    """Returns frames and columns of a block.

    They are at most 1/20 of a long axis, so that its edges waste about 1/40. Elsewhere than on a CPU blocks are larger:
    a tile has more of them, and their sums cost the square of their number.
    """
    frames, columns = (max(n, 1) for n in shape)
    if platform == "cpu":
        return min(_power_of_two(frames // 20, 4, 16), frames), min(_power_of_two(columns // 20, 4, 8), columns)
    return _divisor(frames, (24, 20, 16)), _divisor(columns, (12, 10, 8))


def _rounded(blocks: int, nodes: int) -> int:
    """Returns blocks of a large tile, with a multiple of 64 rows; else XLA copies operands of products to pad them."""
    step = 64 // math.gcd(64, nodes)
    return blocks if blocks < 4 * step else -(-blocks // step) * step


def _power_of_two(n: int, low: int, high: int) -> int:
    return min(max(1 << max(n, 1).bit_length() - 1, low), high)


def _divisor(n: int, sizes: tuple[int, ...]) -> int:
    """Returns the size whose multiples exceed n the least; n where that is smaller."""
    return min(n, min(sizes, key=lambda size: -n % size))


def tile_types(inner: Rows, rows: int, classes: int, dtype, strict=False):
    """Returns types of (planes, residuals) that the inner emission computes for a tile."""
    logits = jax.ShapeDtypeStruct((rows, 1, 1, classes), dtype)
    label, frames = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 1, 1), (rows,)))
    return jax.eval_shape(functools.partial(inner.forward, strict=strict), logits, Nodes(label, frames))  # type: ignore
