"""Layouts: how the logits of a batch are given."""

from jax_rnnt.layouts._additive import AdditiveLogits as AdditiveLogits
from jax_rnnt.layouts._band import BandLogits as BandLogits
from jax_rnnt.layouts._joint import JointLogits as JointLogits
from jax_rnnt.layouts._joint_networks import LinearJoint as LinearJoint
from jax_rnnt.layouts._nodes import sum_over_nodes as sum_over_nodes
from jax_rnnt.layouts._packed import PackedLogits as PackedLogits
