"""jax_rnnt: the RNN-Transducer loss family for JAX."""

from jax_rnnt._ffi import export_checks as export_checks
from jax_rnnt._rnnt import RNNTLoss as RNNTLoss
from jax_rnnt._rnnt import rnnt_loss as rnnt_loss
from jax_rnnt._rnnt import rnnt_posteriors as rnnt_posteriors
from jax_rnnt._selftest import selftest as selftest
from jax_rnnt._validate import validate_inputs as validate_inputs

__version__ = "0.1.0"
__all__ = [
    "RNNTLoss",
    "export_checks",
    "rnnt_loss",
    "rnnt_posteriors",
    "selftest",
    "validate_inputs",
]
