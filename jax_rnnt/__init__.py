"""jax_rnnt: the RNN-Transducer loss family for JAX."""

import typing as _typing

from jax_rnnt import _extras as _extras
from jax_rnnt import decode as decode
from jax_rnnt._align import expected_emission_frames as expected_emission_frames
from jax_rnnt._align import minimum_latency as minimum_latency
from jax_rnnt._align import rnnt_align as rnnt_align
from jax_rnnt._align import rnnt_posteriors as rnnt_posteriors
from jax_rnnt._hat import HATLoss as HATLoss
from jax_rnnt._hat import hat_loss as hat_loss
from jax_rnnt._joint import joint_rnnt_loss as joint_rnnt_loss
from jax_rnnt._layouts import AdditiveLogits as AdditiveLogits
from jax_rnnt._layouts import BandLogits as BandLogits
from jax_rnnt._layouts import JointLogits as JointLogits
from jax_rnnt._layouts import PackedLogits as PackedLogits
from jax_rnnt._lengths import lengths_from_paddings as lengths_from_paddings
from jax_rnnt._lengths import paddings_from_lengths as paddings_from_lengths
from jax_rnnt._loss import TransducerLoss as TransducerLoss
from jax_rnnt._monotonic import ConstrainedRNNTLoss as ConstrainedRNNTLoss
from jax_rnnt._monotonic import MonotonicRNNTLoss as MonotonicRNNTLoss
from jax_rnnt._monotonic import constrained_rnnt_loss as constrained_rnnt_loss
from jax_rnnt._monotonic import monotonic_rnnt_loss as monotonic_rnnt_loss
from jax_rnnt._multiblank import MultiblankRNNTLoss as MultiblankRNNTLoss
from jax_rnnt._multiblank import multiblank_rnnt_loss as multiblank_rnnt_loss
from jax_rnnt._mwer import mwer_loss as mwer_loss
from jax_rnnt._packed import rnnt_loss_packed as rnnt_loss_packed
from jax_rnnt._pruned import prune_inputs as prune_inputs
from jax_rnnt._pruned import prune_ranges as prune_ranges
from jax_rnnt._pruned import pruned_rnnt_loss as pruned_rnnt_loss
from jax_rnnt._pruned import simple_rnnt_loss as simple_rnnt_loss
from jax_rnnt._rnnt import RNNTLoss as RNNTLoss
from jax_rnnt._rnnt import rnnt_loss as rnnt_loss
from jax_rnnt._selftest import selftest as selftest
from jax_rnnt._tdt import TDTLoss as TDTLoss
from jax_rnnt._tdt import tdt_loss as tdt_loss
from jax_rnnt._transducer import Alignment as Alignment
from jax_rnnt._transducer import Composition as Composition
from jax_rnnt._transducer import DecodingRules as DecodingRules
from jax_rnnt._xla import export_checks as export_checks
from jax_rnnt.emissions.joint import LinearJoint as LinearJoint

__version__ = "0.2.0"
__all__ = [
    "AdditiveLogits",
    "Alignment",
    "BandLogits",
    "Composition",
    "ConstrainedRNNTLoss",
    "DecodingRules",
    "HATLoss",
    "JointLogits",
    "LinearJoint",
    "MonotonicRNNTLoss",
    "MultiblankRNNTLoss",
    "PackedLogits",
    "RNNTLoss",
    "TDTLoss",
    "TransducerLoss",
    "constrained_rnnt_loss",
    "expected_emission_frames",
    "export_checks",
    "hat_loss",
    "joint_rnnt_loss",
    "lengths_from_paddings",
    "minimum_latency",
    "monotonic_rnnt_loss",
    "multiblank_rnnt_loss",
    "mwer_loss",
    "paddings_from_lengths",
    "prune_inputs",
    "prune_ranges",
    "pruned_rnnt_loss",
    "rnnt_align",
    "rnnt_loss",
    "rnnt_loss_packed",
    "rnnt_posteriors",
    "selftest",
    "simple_rnnt_loss",
    "tdt_loss",
]

if not _typing.TYPE_CHECKING:  # a type checker would take any name
    _elsewhere = {
        **{name: f"jax_rnnt.decode.{name}" for name in decode.__all__},
        **{name: f"jax_rnnt.lattices.{name}" for name in ("Arc", "STANDARD", "MONOTONIC", "log_likelihood")},
        **{name: f"jax_rnnt.flax.nnx.{name}" for name in ("Joint", "LSTMPredictor", "StatelessPredictor")},
        "Softmax": "jax_rnnt.emissions.Softmax",
        "label_errors": "jax_rnnt.metrics.label_errors",
        # Names in k2.
        "rnnt_loss_simple": "jax_rnnt.simple_rnnt_loss",
        "rnnt_loss_smoothed": "jax_rnnt.simple_rnnt_loss",
        "rnnt_loss_pruned": "jax_rnnt.pruned_rnnt_loss",
        "get_rnnt_prune_ranges": "jax_rnnt.prune_ranges",
        "do_rnnt_pruning": "jax_rnnt.prune_inputs",
    }
    __getattr__ = _extras.lookup(__name__, ("flax", "metrics", "plot", "timing"), _elsewhere)
