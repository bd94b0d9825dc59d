"""Logits that are not there yet."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class JointLogits:
    """What a loss takes for logits [..., T, U1, V] that `joint` shall make of rows: their shape and dtype."""

    shape: tuple[int, ...]
    dtype: Any
    joint: Callable[[jax.Array, jax.Array], jax.Array]
    encoder: jax.Array
    predictor: jax.Array
    chunk: int | None

    @property
    def ndim(self) -> int:
        return len(self.shape)
