"""The table of shapes: all cases of the benchmarks.

Uses NumPy only, since the PyTorch worker imports it without JAX.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """B sequences, T frames, U labels, V classes (the last is the blank); H units of a joint network.

    Lengths decrease evenly from full ones in the first sequence to `shortest` times T and U in the last.
    """

    name: str
    B: int
    T: int
    U: int
    V: int
    H: int = 0
    shortest: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.B, self.T, self.U + 1, self.V

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [B] T_b and int32 [B] U_b."""
        share = np.linspace(1, self.shortest, self.B)
        return np.ceil(self.T * share).astype(np.int32), np.floor(self.U * share).astype(np.int32)

    @property
    def valid(self) -> float:
        """The share of nodes inside the lengths."""
        frames, labels = self.lengths
        return float(np.mean(frames * (labels + 1.0))) / (self.T * (self.U + 1))


# Losses on the CPU. The speech shapes stand for characters, subwords and words.
LARGE = (
    Case("tiny", B=1, T=20, U=5, V=29),
    Case("small", B=4, T=100, U=20, V=64),
    Case("characters", B=8, T=200, U=40, V=64),
    Case("subwords", B=8, T=250, U=60, V=500),
    Case("subwords_ragged", B=8, T=250, U=60, V=500, shortest=0.39),  # 52% of the nodes valid
    Case("bpe1024", B=4, T=200, U=50, V=1024),
    Case("words", B=2, T=150, U=30, V=4096),
    Case("lattice_bound", B=8, T=400, U=100, V=32),
)

# Joint networks on the CPU.
JOINT = (
    Case("characters", B=8, T=200, U=40, V=64, H=256),
    Case("characters, 30% padded", B=8, T=200, U=40, V=64, H=256, shortest=0.673),
    Case("subwords", B=4, T=160, U=40, V=1024, H=640),
    Case("subwords, 30% padded", B=4, T=160, U=40, V=1024, H=640, shortest=0.673),
    Case("subwords, 50% padded", B=4, T=160, U=40, V=1024, H=640, shortest=0.41),
    Case("words", B=2, T=100, U=25, V=8192, H=320),
    Case("V = 32768", B=1, T=100, U=20, V=32768, H=320),
    Case("V = 131072", B=1, T=50, U=10, V=131072, H=320),
)

CASES = {case.name: case for case in LARGE}
