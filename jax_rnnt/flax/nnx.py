"""Flax NNX modules: the joint network and two predictors, which `jax_rnnt.decode` takes as predictors.

B sequences, T frames, U labels, V classes; E, P and H the widths of encoder rows, predictor rows and hidden units.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt._extras import needed_by
from jax_rnnt._keywords import in_name_of
from jax_rnnt.decode._modules import in_evaluation
from jax_rnnt.decode._predictor import no_labels, shifted
from jax_rnnt.flax import _rows
from jax_rnnt.layouts import JointLogits, LinearJoint

with needed_by("jax_rnnt.flax", "flax"):
    from flax import nnx

__all__ = ["Joint", "LSTMPredictor", "StatelessPredictor"]


class Joint(nnx.Module):
    """Additive joint network: ``activation(encoder_out W1 + predictor_out W2 + b) W3 + c``.

    T frames, U labels, V classes; E, P and H the widths of encoder rows, predictor rows and hidden units; `...` is any
    number of batch dimensions. Dropout acts on projected rows, not on nodes: tiles draw nothing, so `logits` and the
    call see the same masks.

    Parameters
    ----------
    encoder_width, predictor_width : int
        E and P.
    width : int
        H.
    outputs : int
        V, or V + D with durations.
    activation : callable, default jnp.tanh
        Element-wise and hashable: jnp.tanh, jax.nn.relu.
    dropout : float, default 0.0
        Share of projected entries that training drops; ``model.eval()`` turns it off.
    dtype : dtype, optional
        Dtype of products and logits; sums before the activation are float32 or better. Default: `param_dtype`.
    param_dtype : dtype, default float32
        Dtype of the parameters.
    rngs : flax.nnx.Rngs
        Makes parameters, and masks if there is dropout.

    See Also
    --------
    jax_rnnt.JointLogits : The result of `logits`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_rnnt import RNNTLoss
    >>> from jax_rnnt.flax.nnx import Joint, StatelessPredictor
    >>> predictor = StatelessPredictor(30, 16, rngs=nnx.Rngs(0))
    >>> joint = Joint(24, 16, 32, 30, rngs=nnx.Rngs(1))
    >>> encoder_out, targets = jnp.ones((2, 5, 24)), jnp.array([[1, 2, 3], [4, 5, 0]])
    >>> logits = joint.logits(encoder_out, predictor(targets))
    >>> logits.shape
    (2, 5, 4, 30)
    >>> RNNTLoss(reduction="none")(logits, targets, jnp.array([5, 4]), jnp.array([3, 2])).shape
    (2,)
    """

    def __init__(
        self,
        encoder_width: int,
        predictor_width: int,
        width: int,
        outputs: int,
        *,
        activation: Callable[[jax.Array], jax.Array] = jnp.tanh,
        dropout: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": param_dtype if dtype is None else dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.encoder = nnx.Linear(encoder_width, width, **options)
        self.predictor = nnx.Linear(predictor_width, width, use_bias=False, **options)
        self.output = nnx.Linear(width, outputs, **options)
        # Without dropout there is no random state: the state of the module is its parameters.
        self.dropout = nnx.Dropout(dropout, rngs=rngs) if dropout else None
        self.activation = activation
        self.dtype = options["dtype"]

    def _project(self, encoder_out, predictor_out):
        encoder, predictor = self.encoder(encoder_out), self.predictor(predictor_out)
        if self.dropout is None:
            return encoder, predictor
        return _rows.dropped(self.dropout, encoder), _rows.dropped(self.dropout, predictor)

    @property
    def linear(self) -> LinearJoint:
        """The joint after its projections, from projected rows [..., H] to logits [..., V]."""
        _rows.check_output(_is_linear(self.output), self.output, "a flax.nnx.Linear")
        kernel, bias = (jnp.asarray(x) for x in (self.output.kernel, self.output.bias))
        return LinearJoint(kernel.astype(self.dtype), bias, self.activation)

    def __call__(self, encoder_out: jax.Array, predictor_out: jax.Array) -> jax.Array:
        """Returns logits [..., V] of rows [..., E] and [..., P], whose leading dimensions broadcast together."""
        return self.linear(*self._project(encoder_out, predictor_out))

    def logits(self, encoder_out: jax.Array, predictor_out: jax.Array, chunk: int | None = None) -> JointLogits:
        """Returns logits of all nodes, in tiles: encoder_out [..., T, E], predictor_out [..., U + 1, P].

        Batch dimensions are broadcast. `chunk`: as in `JointLogits`.
        """
        encoder, predictor = self._project(encoder_out, predictor_out)
        return JointLogits(self.linear, encoder, predictor, chunk)

    def decoder_inputs(self, predictor, encoder_out: jax.Array) -> tuple[LinearJoint, Any, jax.Array]:
        """Returns joint, predictor and encoder_out [B, T, H] for a decoder: rows are projected once, without dropout.

        The bias of the encoder's projection is in the predictor's rows: so an encoder row of zeros means no encoder, as
        `ilm_weight` of a search needs it. Adapters in place of `encoder` or `predictor` work too.

        ``joint, predictor, rows = joint.decoder_inputs(predictor, encoder_out)``, and then
        ``decode.Search(loss, joint, predictor, max_labels).greedy(rows, lengths)``.
        """
        layers = in_evaluation(self.encoder), in_evaluation(self.predictor)
        rows = jnp.asarray(encoder_out, self.dtype)
        return self.linear, *_rows.decoder_inputs(*layers, _is_linear(self.encoder), predictor, rows)


def _is_linear(layer) -> bool:
    """Returns True if the layer computes what `flax.nnx.Linear` does: an adapter may have a kernel too, and do more."""
    return type(layer).__call__ is nnx.Linear.__call__


class StatelessPredictor(nnx.Module):
    """Predictor that sees the last labels only (Ghodsi et al. 2020): ``relu(sum of their embeddings)``.

    A label has an embedding for each distance. B sequences, U labels, P the width of a row; `...` is any number of
    batch dimensions. Labels outside the symbols, as padding may hold them, count as the nearest symbol.

    Parameters
    ----------
    symbols : int
        Labels that `step` takes, with the start label: V of most losses.
    width : int
        P.
    history : int, default 2
        Number of labels that it sees.
    start : int, default -1
        The label before the first one, in training and decoding. Negative: from the end; the attribute is 0 or more.
    dtype : dtype, optional
        Dtype of the rows. Default: `param_dtype`.
    param_dtype : dtype, default float32
        Dtype of the parameters.
    rngs : flax.nnx.Rngs
        Makes the parameters.

    References
    ----------
    Ghodsi, Liu, Apfel, Cabrera and Weinstein, "RNN-Transducer with Stateless Prediction Network", ICASSP 2020.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_rnnt.flax.nnx import StatelessPredictor
    >>> predictor = StatelessPredictor(30, 16, rngs=nnx.Rngs(0))
    >>> predictor(jnp.array([[1, 2, 3], [4, 5, 0]])).shape
    (2, 4, 16)
    >>> rows, state = predictor.step(predictor.initial(2), jnp.array([29, 29]))  # the start label
    >>> rows.shape
    (2, 16)
    """

    @in_name_of("StatelessPredictor")
    def __init__(
        self,
        symbols: int,
        width: int,
        *,
        history: int = 2,
        start: int = -1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.symbols = _checks.positive("symbols", symbols)
        self.history = _checks.positive("history", history)
        self.start = _checks.class_index("start", start, symbols)
        dtype = param_dtype if dtype is None else dtype
        self.embed = nnx.Embed(symbols * history, width, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def rows(self, past: jax.Array) -> jax.Array:
        """Returns rows [..., P] after the last labels [..., history], the newest one last."""
        return nnx.relu(_rows.embedded_sum(self.embed, past, self.symbols))

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


class LSTMPredictor(nnx.Module):
    """Embedding and LSTM layers, all P wide (Graves 2012).

    B sequences, U labels, P the width of a row; `...` is any number of batch dimensions. Labels outside the symbols, as
    padding may hold them, count as the nearest symbol.

    Parameters
    ----------
    layers : int, default 1
        LSTM layers.
    symbols, width, start, dtype, param_dtype, rngs
        As for `StatelessPredictor`; `dtype` is that of the state too.

    References
    ----------
    Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, arXiv:1211.3711.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jax_rnnt.flax.nnx import LSTMPredictor
    >>> predictor = LSTMPredictor(30, 16, rngs=nnx.Rngs(0))
    >>> predictor(jnp.array([[1, 2, 3], [4, 5, 0]])).shape
    (2, 4, 16)
    """

    @in_name_of("LSTMPredictor")
    def __init__(
        self,
        symbols: int,
        width: int,
        *,
        layers: int = 1,
        start: int = -1,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.symbols, self.width = _checks.positive("symbols", symbols), width
        self.layers = _checks.positive("layers", layers)
        self.start = _checks.class_index("start", start, symbols)
        self.dtype = param_dtype if dtype is None else dtype
        options = {"dtype": self.dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.embed = nnx.Embed(symbols, width, **options)
        for i in range(layers):
            setattr(self, f"lstm{i}", nnx.OptimizedLSTMCell(width, width, **options))

    def __call__(self, targets: jax.Array) -> jax.Array:
        """Returns rows [..., U + 1, P] of all columns; column u follows the first u of targets [..., U]."""
        return _rows.layered(self, self._cells(), _products, _rows.checked("LSTMPredictor", targets))

    def initial(self, batch: int) -> Any:
        """Returns the state before the start label: two arrays [batch, P] for each layer."""
        shape = batch, self.width
        return [(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in range(self.layers)]

    def step(self, state: Any, labels: jax.Array) -> tuple[jax.Array, Any]:
        """Returns rows [B, P] after labels [B], and the next state."""
        return _rows.stacked(self._cells(), state, _rows.embedded(self.embed, _rows.inside(labels, self.symbols)))

    def _cells(self):
        return [getattr(self, f"lstm{i}") for i in range(self.layers)]


def _products(cell):
    """Implements `products` of `_rows.layered`: adapters in place of the two layers count."""
    plain = type(cell).__call__ is nnx.OptimizedLSTMCell.__call__
    return (cell.dense_i, cell.dense_h) if plain else None
