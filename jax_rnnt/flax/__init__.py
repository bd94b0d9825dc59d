"""Joint networks and predictors for Flax: `jax_rnnt.flax.nnx` and `jax_rnnt.flax.linen` hold the same modules.

A predictor serves training and decoding. ``predictor(targets [..., U]) -> rows [..., U + 1, P]`` takes all labels at
once. As a `jax_rnnt.decode.Predictor` it takes one at a time: ``initial(batch) -> state``, ``step(state, labels [B]) ->
(rows [B, P], state)``, `start` and `symbols`. Both give the same rows. A joint makes `JointLogits` for the losses, and
the arguments of a decoder.
"""

import typing as _typing

from jax_rnnt import _extras

if not _typing.TYPE_CHECKING:  # a type checker would take any name
    _names = "Joint", "LSTMPredictor", "StatelessPredictor"
    _elsewhere = {name: f"jax_rnnt.flax.nnx.{name} or jax_rnnt.flax.linen.{name}" for name in _names}
    __getattr__ = _extras.lookup(__name__, ("nnx", "linen"), _elsewhere)
