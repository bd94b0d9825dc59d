"""Flax Linen modules: the joint network and two predictors, as in `jax_rnnt.flax.nnx`.

B sequences, T frames, U labels, V classes; E, P and H the widths of encoder rows, predictor rows and hidden units.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt._extras import needed_by
from jax_rnnt._keywords import in_name_of
from jax_rnnt.decode._predictor import no_labels, shifted
from jax_rnnt.flax import _rows
from jax_rnnt.layouts import JointLogits, LinearJoint

with needed_by("jax_rnnt.flax", "flax"):
    from flax import linen as nn

__all__ = ["Joint", "LSTMPredictor", "StatelessPredictor"]


class Joint(nn.Module):
    """Additive joint network, as `jax_rnnt.flax.nnx.Joint`. Widths E and P follow from the first call.

    `init` works through `logits` and a loss: all parameters exist before tiles are made.

    Parameters
    ----------
    width, outputs, activation, dropout, dtype, param_dtype
        As for `jax_rnnt.flax.nnx.Joint`. With dropout, calls need ``deterministic=``, and those with False a "dropout"
        key.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from flax import linen as nn
    >>> from jax_rnnt import RNNTLoss
    >>> from jax_rnnt.flax.linen import Joint, StatelessPredictor
    >>> class Model(nn.Module):
    ...     def setup(self):
    ...         self.predictor, self.joint = StatelessPredictor(30, 16), Joint(32, 30)
    ...
    ...     def __call__(self, encoder_out, targets, logit_lengths, target_lengths):
    ...         logits = self.joint.logits(encoder_out, self.predictor(targets))
    ...         return RNNTLoss()(logits, targets, logit_lengths, target_lengths)
    >>> batch = jnp.ones((2, 5, 24)), jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([5, 4]), jnp.array([3, 2])
    >>> variables = Model().init(jax.random.key(0), *batch)
    >>> variables["params"]["joint"]["encoder"]["kernel"].shape
    (24, 32)
    """

    width: int
    outputs: int
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh
    dropout: float = 0.0
    dtype: Any = None
    param_dtype: Any = jnp.float32

    def setup(self):
        options = {"dtype": self._dtype, "param_dtype": self.param_dtype}
        self.encoder = nn.Dense(self.width, **options)
        self.predictor = nn.Dense(self.width, use_bias=False, **options)
        self.output = nn.Dense(self.outputs, **options)
        self.drop = nn.Dropout(self.dropout)

    @property
    def _dtype(self):
        return self.param_dtype if self.dtype is None else self.dtype

    def _project(self, encoder_out, predictor_out, deterministic):
        encoder, predictor = self.encoder(encoder_out), self.predictor(predictor_out)
        if not self.dropout:
            return encoder, predictor
        options = {"deterministic": deterministic}
        return _rows.dropped(self.drop, encoder, **options), _rows.dropped(self.drop, predictor, **options)

    def _linear(self):
        if self.is_initializing():
            self.output(jnp.zeros((1, self.width), self._dtype))
        _rows.check_output(_is_dense(self.output), self.output, "a flax.linen.Dense")
        parameters = self.output.variables["params"]
        return LinearJoint(parameters["kernel"].astype(self._dtype), parameters["bias"], self.activation)

    def __call__(
        self, encoder_out: jax.Array, predictor_out: jax.Array, *, deterministic: bool | None = None
    ) -> jax.Array:
        """Returns logits [..., V] of rows [..., E] and [..., P], whose leading dimensions broadcast together."""
        return self._linear()(*self._project(encoder_out, predictor_out, deterministic))

    def logits(
        self,
        encoder_out: jax.Array,
        predictor_out: jax.Array,
        chunk: int | None = None,
        *,
        deterministic: bool | None = None,
    ) -> JointLogits:
        """Returns logits of all nodes, in tiles: encoder_out [..., T, E], predictor_out [..., U + 1, P].

        Batch dimensions are broadcast. `chunk`: as in `JointLogits`.
        """
        encoder, predictor = self._project(encoder_out, predictor_out, deterministic)
        return JointLogits(self._linear(), encoder, predictor, chunk)

    def decoder_inputs(self, predictor, encoder_out: jax.Array) -> tuple[LinearJoint, Any, jax.Array]:
        """Returns joint, predictor and encoder_out [B, T, H] for a decoder: rows are projected once, without dropout.

        The bias of the encoder's projection is in the predictor's rows, as in `jax_rnnt.flax.nnx.Joint`.
        They hold the parameters, so they may leave `apply` if `predictor` may (``decode.linen_predictor``).
        """
        unbound = (layer.unbind() for layer in (self.encoder, self.predictor))
        encoder, project = (functools.partial(module.apply, variables) for module, variables in unbound)
        rows = jnp.asarray(encoder_out, self._dtype)
        return self._linear(), *_rows.decoder_inputs(encoder, project, _is_dense(self.encoder), predictor, rows)


def _is_dense(layer) -> bool:
    """Returns True if the layer computes what `flax.linen.Dense` does."""
    return type(layer).__call__ is nn.Dense.__call__


class StatelessPredictor(nn.Module):
    """Predictor that sees the last labels only, as `jax_rnnt.flax.nnx.StatelessPredictor`.

    Parameters
    ----------
    symbols, width, history, start, dtype, param_dtype
        As for `jax_rnnt.flax.nnx.StatelessPredictor`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.flax.linen import StatelessPredictor
    >>> targets = jnp.array([[1, 2, 3], [4, 5, 0]])
    >>> rows, variables = StatelessPredictor(30, 16).init_with_output(jax.random.key(0), targets)
    >>> rows.shape
    (2, 4, 16)
    """

    symbols: int
    width: int
    history: int = 2
    start: int = -1
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @in_name_of("StatelessPredictor")
    def __post_init__(self):
        symbols = _checks.positive("symbols", self.symbols)
        object.__setattr__(self, "start", _checks.class_index("start", self.start, symbols))
        super().__post_init__()

    @in_name_of("StatelessPredictor")
    def setup(self):
        symbols = self.symbols * _checks.positive("history", self.history)
        dtype = self.param_dtype if self.dtype is None else self.dtype
        self.embed = nn.Embed(symbols, self.width, dtype=dtype, param_dtype=self.param_dtype)

    def rows(self, past: jax.Array) -> jax.Array:
        """Returns rows [..., P] after the last labels [..., history], the newest one last."""
        return nn.relu(_rows.embedded_sum(self.embed, past, self.symbols))

    def __call__(self, targets: jax.Array) -> jax.Array:
        """Returns rows [..., U + 1, P] of all columns; column u follows the first u of targets [..., U]."""
        targets = _rows.checked("StatelessPredictor", targets)
        return self.rows(_rows.windows(targets, self.history, self.start))

    def initial(self, batch: int) -> tuple[jax.Array, ...]:
        """Returns the state before the start label: each of the last labels but one, int32 [batch]."""
        return no_labels(batch, self.history, self.start)

    def step(self, state, labels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Returns rows [B, P] after labels [B], and the next state."""
        past, state = shifted(state, labels)
        return self.rows(past), state


class LSTMPredictor(nn.Module):
    """Embedding and LSTM layers, all P wide, as `jax_rnnt.flax.nnx.LSTMPredictor`.

    Parameters
    ----------
    symbols, width, layers, start, dtype, param_dtype
        As for `jax_rnnt.flax.nnx.LSTMPredictor`.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.flax.linen import LSTMPredictor
    >>> targets = jnp.array([[1, 2, 3], [4, 5, 0]])
    >>> rows, variables = LSTMPredictor(30, 16, layers=2).init_with_output(jax.random.key(0), targets)
    >>> rows.shape
    (2, 4, 16)
    """

    symbols: int
    width: int
    layers: int = 1
    start: int = -1
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @in_name_of("LSTMPredictor")
    def __post_init__(self):
        symbols = _checks.positive("symbols", self.symbols)
        object.__setattr__(self, "start", _checks.class_index("start", self.start, symbols))
        super().__post_init__()

    @in_name_of("LSTMPredictor")
    def setup(self):
        options = {"dtype": self._dtype, "param_dtype": self.param_dtype}
        self.embed = nn.Embed(self.symbols, self.width, **options)
        layers = range(_checks.positive("layers", self.layers))
        self.lstm = [nn.OptimizedLSTMCell(self.width, **options) for _ in layers]

    @property
    def _dtype(self):
        return self.param_dtype if self.dtype is None else self.dtype

    def __call__(self, targets: jax.Array) -> jax.Array:
        """Returns rows [..., U + 1, P] of all columns; column u follows the first u of targets [..., U]."""
        targets = _rows.checked("LSTMPredictor", targets)
        if self.is_initializing():  # parameters made inside the scan would leak out of it
            self.step(self.initial(1), jnp.zeros(1, jnp.int32))
        return _rows.layered(self, self.lstm, _products, targets)

    def initial(self, batch: int) -> Any:
        """Returns the state before the start label: two arrays [batch, P] for each layer."""
        shape = batch, self.width
        return [(jnp.zeros(shape, self._dtype), jnp.zeros(shape, self._dtype)) for _ in range(self.layers)]

    def step(self, state: Any, labels: jax.Array) -> tuple[jax.Array, Any]:
        """Returns rows [B, P] after labels [B], and the next state."""
        return _rows.stacked(self.lstm, state, _rows.embedded(self.embed, _rows.inside(labels, self.symbols)))


def _products(cell):
    """Implements `products` of `_rows.layered`."""
    if type(cell).__call__ is not nn.OptimizedLSTMCell.__call__:
        return None
    parameters = cell.variables["params"]

    def product(kind, x):
        gates = [parameters[kind + gate] for gate in "ifgo"]
        kernel = jnp.concatenate([gate["kernel"] for gate in gates], -1)
        bias = jnp.concatenate([gate["bias"] for gate in gates], -1) if "bias" in gates[0] else None
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=cell.dtype)
        return x @ kernel if bias is None else x @ kernel + bias[(None,) * (x.ndim - 1)]

    return functools.partial(product, "i"), functools.partial(product, "h")
