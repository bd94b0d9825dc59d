"""Layouts: the forms in which the logits of a batch are given."""

from jax_rnnt.layouts._additive import AdditiveLogits
from jax_rnnt.layouts._band import BandLogits
from jax_rnnt.layouts._joint import JointLogits
from jax_rnnt.layouts._joint_networks import LinearJoint
from jax_rnnt.layouts._nodes import sum_over_nodes
from jax_rnnt.layouts._packed import PackedLogits

__all__ = [
    "AdditiveLogits",
    "BandLogits",
    "JointLogits",
    "LinearJoint",
    "PackedLogits",
    "sum_over_nodes",
]
