"""The unit-step lattices by the names of the `topology` argument."""

from jax_rnnt import _checks, seam
from jax_rnnt.lattices.topology import MONOTONIC, STANDARD, Topology

_TOPOLOGIES: dict[str, tuple[Topology, tuple[seam.Step, ...]]] = {
    "standard": (STANDARD, ()),
    "monotonic": (MONOTONIC, ()),
    "constrained": (MONOTONIC, (seam.pay_next_blank,)),
}


def by_name(function: str, topology) -> tuple[Topology, tuple[seam.Step, ...]]:
    """(arcs, steps of the seam) of "standard", "monotonic" or "constrained"."""
    return _TOPOLOGIES[_checks.choice(function, "topology", topology, tuple(_TOPOLOGIES))]
