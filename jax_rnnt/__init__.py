"""jax_rnnt: the RNN-Transducer loss family for JAX, with decoders and language models."""

import typing as _typing

from jax_rnnt import _extras as _extras
from jax_rnnt import decode as decode
from jax_rnnt import emissions as emissions
from jax_rnnt import lattices as lattices
from jax_rnnt import layouts as _layouts
from jax_rnnt import losses as _losses
from jax_rnnt._lengths import lengths_from_paddings as lengths_from_paddings
from jax_rnnt._selftest import selftest as selftest
from jax_rnnt._xla import export_checks as export_checks
from jax_rnnt.layouts import *  # noqa: F403
from jax_rnnt.losses import *  # noqa: F403

__version__ = "0.4.0"

if not _typing.TYPE_CHECKING:  # a type checker cannot read a sum of lists, and would accept any name
    __all__ = ["export_checks", "lengths_from_paddings", "selftest"]
    __all__ += _layouts.__all__ + _losses.__all__
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
