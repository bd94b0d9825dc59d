"""Losses of the transducer family, as values."""

from jax_rnnt.losses._base import TransducerLoss as TransducerLoss
from jax_rnnt.losses._composition import Alignment as Alignment
from jax_rnnt.losses._composition import Composition as Composition
from jax_rnnt.losses._composition import DecodingRules as DecodingRules
from jax_rnnt.losses._composition import Spot as Spot
from jax_rnnt.losses._constrained import ConstrainedRNNTLoss as ConstrainedRNNTLoss
from jax_rnnt.losses._hat import HATLoss as HATLoss
from jax_rnnt.losses._monotonic import MonotonicRNNTLoss as MonotonicRNNTLoss
from jax_rnnt.losses._multiblank import MultiblankRNNTLoss as MultiblankRNNTLoss
from jax_rnnt.losses._mwer import mwer_loss as mwer_loss
from jax_rnnt.losses._pruning import prune_inputs as prune_inputs
from jax_rnnt.losses._pruning import prune_ranges as prune_ranges
from jax_rnnt.losses._rnnt import RNNTLoss as RNNTLoss
from jax_rnnt.losses._rnnt import rnnt_loss as rnnt_loss
from jax_rnnt.losses._target_robust import TargetRobustRNNTLoss as TargetRobustRNNTLoss
from jax_rnnt.losses._tdt import TDTLoss as TDTLoss
from jax_rnnt.losses._wildcard import WildcardRNNTLoss as WildcardRNNTLoss
