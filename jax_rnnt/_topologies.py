"""The unit-step lattices by the names of the `topology` argument."""

from jax_rnnt import seam
from jax_rnnt.lattices.topology import MONOTONIC, STANDARD, Topology

TOPOLOGIES: dict[str, tuple[Topology, tuple[seam.Step, ...]]] = {
    "standard": (STANDARD, ()),
    "monotonic": (MONOTONIC, ()),
    "constrained": (MONOTONIC, (seam.pay_next_blank,)),
}
