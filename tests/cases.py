"""The table of shapes that tests and benchmarks share. NumPy only: also read where JAX is not installed."""

import dataclasses
from typing import NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """B sequences, T frames, U labels, V classes, the last of which is blank.

    Lengths are those of every sequence; None: all sequences are full.
    """

    name: str
    B: int
    T: int
    U: int
    V: int
    logit_lengths: tuple[int, ...] | None = None
    target_lengths: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.T, self.U + 1, self.V

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [B] T_b and int32 [B] U_b."""
        frames = (self.T,) * self.B if self.logit_lengths is None else self.logit_lengths
        labels = (self.U,) * self.B if self.target_lengths is None else self.target_lengths
        return np.array(frames, np.int32), np.array(labels, np.int32)

    @property
    def valid(self) -> float:
        """Share of the nodes inside the lengths."""
        frames, labels = self.lengths
        return float(np.mean(frames * (labels + 1.0))) / (self.T * (self.U + 1))


class Inputs(NamedTuple):
    logits: np.ndarray  # [B, T, U + 1, V]
    targets: np.ndarray  # int32 [B, U], never the blank
    logit_lengths: np.ndarray  # int32 [B]
    target_lengths: np.ndarray  # int32 [B]


def make_inputs(case: Case, dtype=np.float32, seed: int = 0) -> Inputs:
    """Normal logits and uniform labels; the same values in every dtype, up to rounding."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, case.V - 1, (case.B, case.U), np.int32)
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    logits = rng.standard_normal(case.shape, np.float32).astype(wide, copy=False).astype(dtype, copy=False)
    return Inputs(logits, targets, *case.lengths)


# Small enough for float64 dynamic programs and, up to T + U = 10, for enumeration of all paths.
SMALL = (
    Case("one_node", B=1, T=1, U=0, V=2),
    Case("one_frame", B=2, T=1, U=4, V=5),
    Case("no_labels", B=2, T=5, U=0, V=4),
    Case("two_classes", B=2, T=4, U=3, V=2),
    Case("square", B=2, T=5, U=5, V=7),
    Case("more_labels_than_frames", B=2, T=3, U=6, V=5),
    Case("empty_batch", B=0, T=4, U=2, V=5),
    Case("ragged", B=5, T=6, U=4, V=6, logit_lengths=(6, 4, 1, 5, 6), target_lengths=(4, 2, 3, 0, 1)),
    Case("empty_sequences", B=4, T=4, U=3, V=5, logit_lengths=(0, 0, 3, 4), target_lengths=(0, 2, 0, 3)),
    Case("odd_classes", B=1, T=3, U=2, V=37),  # neither a multiple of a vector nor smaller than one
    Case("long", B=1, T=90, U=40, V=9),
)

# Read by the benchmarks; the speech shapes stand for characters, subwords and words.
LARGE = (
    Case("tiny", B=1, T=20, U=5, V=29),
    Case("small", B=4, T=100, U=20, V=64),
    Case("characters", B=8, T=200, U=40, V=64),
    Case("subwords", B=8, T=250, U=60, V=500),
    Case(
        "subwords_ragged", B=8, T=250, U=60, V=500,
        logit_lengths=(250, 228, 205, 182, 170, 150, 134, 110), target_lengths=(60, 54, 46, 43, 37, 34, 28, 23),
    ),
    Case("bpe1024", B=4, T=200, U=50, V=1024),
    Case("words", B=2, T=150, U=30, V=4096),
    Case("lattice_bound", B=8, T=400, U=100, V=32),
)  # fmt: skip

CASES = {case.name: case for case in SMALL + LARGE}
