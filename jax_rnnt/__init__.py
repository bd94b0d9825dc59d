"""jax_rnnt: the RNN-Transducer loss family for JAX, with decoders and language models."""

import typing as _typing

from jax_rnnt import _extras as _extras
from jax_rnnt import decode as decode
from jax_rnnt import emissions as emissions
from jax_rnnt import lattices as lattices
from jax_rnnt import layouts as layouts
from jax_rnnt import losses as losses
from jax_rnnt._lengths import lengths_from_paddings as lengths_from_paddings
from jax_rnnt._lengths import paddings_from_lengths as paddings_from_lengths
from jax_rnnt._selftest import selftest as selftest
from jax_rnnt._xla import export_checks as export_checks
from jax_rnnt.layouts import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits, sum_over_nodes
from jax_rnnt.losses import (
    Alignment,
    Composition,
    ConstrainedRNNTLoss,
    DecodingRules,
    HATLoss,
    MonotonicRNNTLoss,
    MultiblankRNNTLoss,
    RNNTLoss,
    Spot,
    TargetRobustRNNTLoss,
    TDTLoss,
    TransducerLoss,
    WildcardRNNTLoss,
    mwer_loss,
    prune_inputs,
    prune_ranges,
    rnnt_loss,
)

__version__ = "0.4.0"
__all__ = [  # in full: of a sum of lists of modules mypy sees nothing
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
    "Spot",
    "TDTLoss",
    "TargetRobustRNNTLoss",
    "TransducerLoss",
    "WildcardRNNTLoss",
    "export_checks",
    "lengths_from_paddings",
    "mwer_loss",
    "paddings_from_lengths",
    "prune_inputs",
    "prune_ranges",
    "rnnt_loss",
    "selftest",
    "sum_over_nodes",
]

if not _typing.TYPE_CHECKING:  # a type checker would take any name
    _elsewhere = {
        **{name: f"jax_rnnt.decode.{name}" for name in decode.__all__},
        **{name: f"jax_rnnt.lattices.{name}" for name in ("Arc", "STANDARD", "MONOTONIC", "log_likelihood")},
        **{name: f"jax_rnnt.flax.nnx.{name}" for name in ("Joint", "LSTMPredictor", "StatelessPredictor")},
        "Softmax": "jax_rnnt.emissions.Softmax",
        "label_errors": "jax_rnnt.metrics.label_errors",
        # Names in k2.
        "rnnt_loss_simple": "RNNTLoss()(AdditiveLogits(...), ...)",
        "rnnt_loss_smoothed": "RNNTLoss()(AdditiveLogits(...), ...)",
        "rnnt_loss_pruned": "RNNTLoss()(BandLogits(...), ...)",
        "get_rnnt_prune_ranges": "jax_rnnt.prune_ranges",
        "do_rnnt_pruning": "jax_rnnt.prune_inputs",
    }
    __getattr__ = _extras.lookup(__name__, ("flax", "metrics", "plot", "timing"), _elsewhere)
