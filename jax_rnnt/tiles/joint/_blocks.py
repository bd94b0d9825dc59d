"""The list of the blocks of nodes that a kernel takes, one integer each.

There are B encoders with N sequences each.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Cut:
    """The list of blocks: each is an integer, with bits for encoder, block of frames, sequence, block of columns."""

    encoders: int
    copies: int  # N
    shape: tuple[int, int]  # blocks of frames and of columns

    @property
    def size(self) -> int:
        """The number of all blocks."""
        return self.encoders * self.copies * math.prod(self.shape)

    @property
    def bits(self) -> list[int]:
        """The numbers of bits for frames, sequence and columns."""
        return [max(n - 1, 0).bit_length() for n in (self.shape[0], self.copies, self.shape[1])]

    def encode(self, encoder, frame, copy, column):
        of_frame, of_copy, of_column = self.bits
        return (((encoder << of_frame | frame) << of_copy) | copy) << of_column | column

    def decode(self, code):
        """Returns (encoder, block of frames, sequence of the encoder, block of columns)."""
        of_frame, of_copy, of_column = self.bits
        column, code = code & ((1 << of_column) - 1), code >> of_column
        copy, code = code & ((1 << of_copy) - 1), code >> of_copy
        return code >> of_frame, code & ((1 << of_frame) - 1), copy, column

    def listed(self, flags):
        """Returns (codes of the blocks with a flag, then -1 [n + 1], their number) for flags [B N, frames, columns]."""
        frames, columns = self.shape
        flags = flags.reshape(self.encoders, self.copies, frames, columns).swapaxes(1, 2)
        axes = (lax.broadcasted_iota(jnp.int32, flags.shape, axis) for axis in range(4))
        codes, flags = self.encode(*axes).reshape(-1), flags.reshape(-1)
        place = jnp.cumsum(flags, dtype=jnp.int32)
        out = jnp.full(flags.size + 1, -1, jnp.int32)
        index = jnp.where(flags, place - 1, flags.size + 1 + jnp.arange(flags.size, dtype=jnp.int32))
        out = out.at[index].set(codes, mode="drop", unique_indices=True)
        return out.at[0].max(0), place[-1]  # the grid takes at least one block


def cut_of(inputs, blocks) -> Cut:
    return Cut(inputs.encoder.shape[0], inputs.copies, blocks.grid(inputs.shape))
