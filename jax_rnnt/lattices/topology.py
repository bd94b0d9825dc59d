"""Lattice topologies as data: a transducer variant is a short table of arcs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Arc:
    """A transition out of node (t, u): to (t + dt, u + du), weighted by the arc log-probability called `slot`.

    `may_end` tells whether the arc may enter the terminal node (T_b, U_b). Every arc moves: dt + du >= 1.
    """

    slot: str
    dt: int
    du: int
    may_end: bool = True


Topology = tuple[Arc, ...]

STANDARD: Topology = (Arc("blank", 1, 0), Arc("label", 0, 1))
"""Graves (2012): a blank reads a frame, a label stays on it."""

MONOTONIC: Topology = (Arc("blank", 1, 0), Arc("label", 1, 1))
"""One symbol, blank or label, per frame (Tripathi et al. 2019; k2's "modified")."""


def multi_blank(big_blank_durations: tuple[int, ...]) -> Topology:
    """STANDARD and one blank arc over d frames for each big blank (Xu et al. 2022)."""
    return STANDARD + tuple(Arc(f"blank+{d}", d, 0) for d in big_blank_durations)


def durations(durations: tuple[int, ...]) -> Topology:
    """Token-and-duration transducer (Xu et al. 2023): any arc reads d frames; a path ends with a blank."""
    blanks = tuple(Arc(f"blank+{d}", d, 0) for d in durations if d)
    return blanks + tuple(Arc(f"label+{d}", d, 1, may_end=False) for d in durations)
