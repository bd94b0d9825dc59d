"""Lattice topologies as data: a transducer variant is a short table of arcs."""

import dataclasses

from jax_rnnt import _checks
from jax_rnnt._keywords import in_name_of


@dataclasses.dataclass(frozen=True)
class Arc:
    """A transition out of node (t, u): to (t + dt, u + du), weighted by the log-probability called `slot`.

    With `other`, the log-probability is the sum of both slots; arcs may share slots. `may_end` tells if the arc may
    enter the terminal node (T_b, U_b). Every arc moves: dt + du >= 1.
    """

    slot: str
    dt: int
    du: int
    may_end: bool = True
    other: str | None = None

    @in_name_of("Arc")
    def __post_init__(self):
        if not all(isinstance(x, int) and not isinstance(x, bool) for x in (self.dt, self.du)):
            raise _checks.bad_type(f"dt and du must be integers, got dt={self.dt!r} and du={self.du!r}.")
        if not isinstance(self.slot, str) or not isinstance(self.other, str | None):
            expected = "slot must be a string, and other a string or None"
            raise _checks.bad_type(f"{expected}, got slot={self.slot!r} and other={self.other!r}.")
        _checks.boolean("may_end", self.may_end)
        if self.dt < 0 or self.du < 0 or self.dt + self.du < 1:
            raise _checks.bad_value(f"dt and du must be 0 or more and not both 0, got dt={self.dt} and du={self.du}.")
        if self.other == self.slot:
            raise _checks.bad_value(f"other must be a slot beside slot, got {self.slot!r} for both.")

    def score(self, planes):
        """Returns the log-probability of this arc, from the planes by slot."""
        return planes[self.slot] if self.other is None else planes[self.slot] + planes[self.other]


Topology = tuple[Arc, ...]


def slots(topology: Topology) -> tuple[str, ...]:
    """Returns all slots of a topology, each once."""
    return tuple(dict.fromkeys(s for arc in topology for s in (arc.slot, arc.other) if s is not None))


def bounded(topology: Topology, frames) -> Topology:
    """Returns the same paths, with arcs cut to frames + 1 frames: no sequence holds a longer one."""
    if not isinstance(frames, int):  # symbolic
        return topology
    return tuple(dataclasses.replace(arc, dt=min(arc.dt, frames + 1)) for arc in topology)


def expanded(topology: Topology) -> Topology:
    """Gives each arc that is the sum of two slots a slot of its own: "label" over 2 frames becomes "label+2"."""
    pairs = [(arc.slot, arc.dt) for arc in topology if arc.other is not None]

    def slot(arc):
        name = f"{arc.slot}+{arc.dt}"
        return name if pairs.count((arc.slot, arc.dt)) == 1 else f"{name}+{arc.du}+{arc.other}"

    return tuple(arc if arc.other is None else dataclasses.replace(arc, slot=slot(arc), other=None) for arc in topology)


STANDARD: Topology = (Arc("blank", 1, 0), Arc("label", 0, 1))
"""Graves (2012): a blank reads a frame, a label stays on it."""

MONOTONIC: Topology = (Arc("blank", 1, 0), Arc("label", 1, 1))
"""One symbol, blank or label, per frame (Tripathi et al. 2019; k2's "modified")."""

MONOTONIC_FINAL_BLANK: Topology = (Arc("blank", 1, 0), Arc("label", 1, 1, may_end=False))
"""The same, with a blank in the last frame (optimized_transducer's one_sym_per_frame)."""


@in_name_of("multi_blank")
def multi_blank(big_blank_durations: tuple[int, ...]) -> Topology:
    """Returns STANDARD and one blank arc over d frames for each big blank (Xu et al. 2022)."""
    durations = _checks.distinct_integers("big_blank_durations", big_blank_durations, 2)
    return STANDARD + tuple(Arc(f"blank+{d}", d, 0) for d in durations)


@in_name_of("token_and_duration")
def token_and_duration(durations: tuple[int, ...]) -> Topology:
    """Token-and-duration transducer (Xu et al. 2023): any arc reads d frames; a path ends with a blank."""
    durations = _checks.distinct_integers("durations", durations, 0)
    blanks = tuple(Arc(f"blank+{d}", d, 0) for d in durations if d)
    return blanks + tuple(Arc(f"label+{d}", d, 1, may_end=False) for d in durations)


@in_name_of("products")
def products(durations: tuple[int, ...]) -> Topology:
    """`token_and_duration` with independent heads: "blank" or "label", and "duration+i" for the i-th duration."""
    durations = _checks.distinct_integers("durations", durations, 0)
    blanks = tuple(Arc("blank", d, 0, other=f"duration+{i}") for i, d in enumerate(durations) if d)
    return blanks + tuple(Arc("label", d, 1, False, f"duration+{i}") for i, d in enumerate(durations))
