"""What a loss takes in the place of logits."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Inquiry:
    """Logits of which a loss shall not be computed: it returns its parts instead, a `_transducer.Composition`."""

    logits: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.logits.shape

    @property
    def dtype(self) -> Any:
        return self.logits.dtype

    @property
    def ndim(self) -> int:
        return self.logits.ndim
