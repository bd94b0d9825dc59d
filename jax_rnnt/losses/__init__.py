"""Losses of the transducer family, as values."""

from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Alignment, Composition, DecodingRules
from jax_rnnt.losses._constrained import ConstrainedRNNTLoss
from jax_rnnt.losses._hat import HATLoss
from jax_rnnt.losses._monotonic import MonotonicRNNTLoss
from jax_rnnt.losses._multiblank import MultiblankRNNTLoss
from jax_rnnt.losses._mwer import mwer_loss
from jax_rnnt.losses._pruning import prune_inputs, prune_ranges
from jax_rnnt.losses._rnnt import RNNTLoss, rnnt_loss
from jax_rnnt.losses._target_robust import TargetRobustRNNTLoss
from jax_rnnt.losses._tdt import TDTLoss
from jax_rnnt.losses._wildcard import WildcardRNNTLoss

__all__ = [
    "Alignment",
    "Composition",
    "ConstrainedRNNTLoss",
    "DecodingRules",
    "HATLoss",
    "MonotonicRNNTLoss",
    "MultiblankRNNTLoss",
    "RNNTLoss",
    "TDTLoss",
    "TargetRobustRNNTLoss",
    "TransducerLoss",
    "WildcardRNNTLoss",
    "mwer_loss",
    "prune_inputs",
    "prune_ranges",
    "rnnt_loss",
]
