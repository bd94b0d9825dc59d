"""Layouts: how logits [..., T, U + 1, V] are given. Every question takes every layout that suits the loss.

B sequences (`...`, any number of batch dimensions), T frames, U labels, V classes. A layout is a frozen dataclass and a
pytree. When a loss takes a layout, the layout checks its arrays, with errors in the name of the called function, and
makes the emission that reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._pytree import static
from jax_rnnt.emissions.additive import Additive, Scores
from jax_rnnt.emissions.band import Band, unband
from jax_rnnt.emissions.joint import LinearJoint, check_rows, row_avals
from jax_rnnt.emissions.packed import Packed, offsets
from jax_rnnt.emissions.softmax import accumulation_dtype
from jax_rnnt.emissions.tiled import Joint, materialized, tiled


class _Layout:
    """What all layouts share. A loss calls `checked` first, and the other methods on its result."""

    shape: Any
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def frames(self) -> int:
        """The most frames that a sequence may have."""
        return self.shape[-3]

    @property
    def classes(self) -> int:
        """Logits of a row: V, or V + D with durations."""
        return self.shape[-1]

    def checked(self, function: str) -> _Layout:
        """The same layout with checked arrays."""
        raise NotImplementedError

    def sequences(self, function: str, targets, logit_lengths, target_lengths) -> tuple[jax.Array, ...]:
        """targets [..., U] and both lengths [...], checked against the logits."""
        raise NotImplementedError

    def emission(self, function: str, loss, head, targets, logit_lengths, target_lengths) -> tuple[Any, Any]:
        """(emission, its logits); `head` is the loss's own emission, which reads rows."""
        raise NotImplementedError

    # What `TransducerLoss.validate` asks.
    integers: Any = ()  # arrays of integers that say where the rows lie

    def fits(self, num_frames, num_labels) -> jax.Array:
        """bool [...]: whether the rows of a sequence are there."""
        return jnp.ones(num_frames.shape, bool)

    def kept(self, frames: int, columns: int) -> jax.Array | None:
        """bool [..., frames, columns]: nodes that have a row; None: all."""
        return None


def of(function: str, logits) -> _Layout:
    """The layout of the argument `logits`, checked."""
    if isinstance(logits, _Layout):
        return logits.checked(function)
    return _Dense(logits).checked(function)


def _unsplit_by_reference(function, loss, name, x, dimensions):
    if loss.implementation == "reference":
        _checks.unsplit(function, name, x, dimensions, " with implementation='reference'")


def _rows_of_frames(function, logits, columns):
    """Checked logits [..., T, columns, V]; `columns` is the name of their number."""
    dimensions = f"[..., T, {columns}, V]"
    logits = _checks.floating(function, "logits", logits, 3, dimensions)
    if any(_checks.smaller(n, 1) for n in logits.shape[-2:]):
        expected = f"shape {dimensions} with {columns} >= 1 and V >= 1"
        raise ValueError(f"{function}: logits must have {expected}, got {logits.shape}.")
    return logits


@dataclasses.dataclass(frozen=True, eq=False)
class _Dense(_Layout):
    """An array [..., T, U + 1, V]."""

    logits: Any

    @property
    def shape(self):
        return self.logits.shape

    @property
    def dtype(self):
        return self.logits.dtype

    def checked(self, function):
        return _Dense(_rows_of_frames(function, self.logits, "U + 1"))

    def sequences(self, function, targets, logit_lengths, target_lengths):
        shape = self.shape[:-3], self.shape[-2] - 1
        return _checks.sequences(function, targets, logit_lengths, target_lengths, *shape, "logits")

    def emission(self, function, loss, head, *sequences):
        _unsplit_by_reference(function, loss, "logits", self.logits, {-3: "T", -2: "U + 1"})
        return head, self.logits


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class PackedLogits(_Layout):
    """Rows of all sequences one after the other, without padding.

    B sequences, T frames, U labels, V classes, N rows. Row T_0 (U_0 + 1) + ... + T_{b-1} (U_{b-1} + 1) + t (U_b + 1)
    + u is node (t, u) of sequence b; rows past the last sequence are never read. `shape` is that of the rows.

    Parameters
    ----------
    rows : Array, float16 | bfloat16 | float32 | float64 [N, V]
        Output of the joint network. N is static: the sum of T_b (U_b + 1), or more.
    max_frames : int, optional
        A bound of T_b, known at trace time: beside the logits there are planes [B, max_frames, U + 1]. Default: the
        largest of `logit_lengths`; where these are traced, N: correct but wasteful, so give it under jit.

    See Also
    --------
    rnnt_loss_packed : The RNN-T loss of packed rows, and the rules for odd lengths.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import PackedLogits, RNNTLoss
    >>> logits = PackedLogits(jnp.zeros((4 * 3 + 3 * 2, 5)), max_frames=4)
    >>> loss = RNNTLoss()(logits, jnp.array([[1, 2], [3, 0]]), jnp.array([4, 3]), jnp.array([2, 1]))
    >>> round(float(loss), 3)
    6.347
    """

    rows: jax.Array
    max_frames: int | None = static(None)

    @property
    def shape(self):
        return self.rows.shape

    @property
    def dtype(self):
        return self.rows.dtype

    @property
    def frames(self):
        return len(self.rows) if self.max_frames is None else self.max_frames

    def checked(self, function):
        rows = _checks.floating(function, "logits", self.rows, 2, "[N, V]")
        if rows.ndim != 2 or rows.shape[-1] < 1:
            raise ValueError(f"{function}: logits must have shape [N, V] with V >= 1, got {tuple(rows.shape)}.")
        _checks.unsplit(function, "logits", rows, {-2: "N"})
        if self.max_frames is not None and _checks.integer(function, "max_frames", self.max_frames) < 0:
            raise ValueError(f"{function}: max_frames must be 0 or more, got {self.max_frames}.")
        return PackedLogits(rows, self.max_frames)

    def sequences(self, function, targets, logit_lengths, target_lengths):
        if np.ndim(targets) != 2:
            raise ValueError(f"{function}: targets must have shape [B, U], got {np.shape(targets)}.")
        batch, labels = np.shape(targets)
        return _checks.sequences(function, targets, logit_lengths, target_lengths, (batch,), labels)

    def emission(self, function, loss, head, targets, logit_lengths, target_lengths):
        frames, rows = self.max_frames, len(self.rows)
        if frames is None:
            known = _checks.known(logit_lengths)
            frames = rows if known is None else max(min(int(np.max(known, initial=0)), rows), 0)
        return Packed(head, int(frames)), self.rows

    def fits(self, num_frames, num_labels):
        return offsets(num_frames, num_labels, len(self.rows))[1] <= len(self.rows)


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class BandLogits(_Layout):
    """Logits of S columns in every frame, the others forbidden (Kuang et al. 2022). `shape` is that of the band.

    T frames, U labels, V classes, S columns; `...` is any number of batch dimensions.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, S, V]
        Output of the joint network: row s of frame t is node (t, first[..., t] + s).
    first : Array, integer [..., T]
        First column of each frame's band, from `prune_ranges` or your own. Columns outside [0, U_b] are ignored.
        Offsets may go back or start above 0: only paths inside the band count.

    See Also
    --------
    prune_ranges, prune_inputs : They choose a band, and gather its rows of encoder and predictor.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import BandLogits, RNNTLoss
    >>> logits = BandLogits(jnp.zeros((4, 2, 5)), first=jnp.array([0, 0, 1, 1]))
    >>> loss = RNNTLoss()(logits, jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    8.27
    """

    logits: jax.Array
    first: jax.Array

    @property
    def shape(self):
        return self.logits.shape

    @property
    def dtype(self):
        return self.logits.dtype

    def checked(self, function):
        logits = _rows_of_frames(function, self.logits, "S")
        return BandLogits(logits, _checks.integers(function, "first", self.first, logits.shape[:-2], "[..., T]"))

    def sequences(self, function, targets, logit_lengths, target_lengths):
        labels = np.shape(targets)[-1] if np.ndim(targets) else 0
        return _checks.sequences(function, targets, logit_lengths, target_lengths, self.shape[:-3], labels)

    def emission(self, function, loss, head, targets, *lengths):
        _unsplit_by_reference(function, loss, "logits", self.logits, {-3: "T", -2: "S"})
        return Band(head, targets.shape[-1] + 1), (self.logits, self.first)

    @property
    def integers(self):
        return (self.first,)

    def kept(self, frames, columns):
        return unband(jnp.zeros(self.shape[:-1]), self.first, columns)[..., :frames, :] == 0


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class AdditiveLogits(_Layout):
    """Logits am[t, v] + lm[u, v], never formed: the softmax is normalised by a matrix product (Kuang et al. 2022).

    T frames, U labels, V classes; `...` is any number of batch dimensions. With smoothing, log-probabilities of either
    network alone are mixed in, p[v] being the mean over u of softmax(lm)[u, v] of the same sequence::

        log_x(t, u) = (1 - l - a) log_softmax(am[t] + lm[u])[x] + l log_softmax(lm[u])[x]
                      + a (am[t, x] + log p[x] - log sum over v of exp(am[t, v]) p[v])

    All arrays and scales have their true gradient, at any size of scores and any scales. A term of -inf adds 0 if its
    scale is 0, else it makes the arc impossible; the loss jumps there, and the term adds 0 to the scales' gradients.
    There are no logits to clip: a loss whose `clamp` is above 0 is an error; where `clamp` is traced, the loss and its
    gradient are NaN.

    Parameters
    ----------
    am : Array, float16 | bfloat16 | float32 | float64 [..., T, V]
        Scores of the encoder ("acoustic model").
    lm : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, V]
        Scores of the predictor ("language model").
    lm_only_scale, am_only_scale : float or scalar Array, default 0.0
        l and a above. k2's recipes use 0.25 and 0.0.
    unigram : Array, floating [V] or [..., V], optional
        p above, in place of the sequence's own; 0: impossible. k2 takes the mean over the whole batch, with padding.

    See Also
    --------
    simple_rnnt_loss : The RNN-T loss of it.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import AdditiveLogits, RNNTLoss
    >>> logits = AdditiveLogits(jnp.zeros((4, 5)), jnp.zeros((3, 5)))
    >>> loss = RNNTLoss()(logits, jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    7.354
    """

    am: jax.Array
    lm: jax.Array
    lm_only_scale: float | jax.Array = 0.0
    am_only_scale: float | jax.Array = 0.0
    unigram: jax.Array | None = None

    @property
    def shape(self):
        return (*self.am.shape[:-1], *self.lm.shape[-2:])

    @property
    def dtype(self):
        return jnp.promote_types(self.am.dtype, self.lm.dtype)

    def checked(self, function):
        am = _checks.floating(function, "am", self.am, 2, "[..., T, V]")
        lm = _checks.floating(function, "lm", self.lm, 2, "[..., U + 1, V]")
        batch, classes = am.shape[:-2], am.shape[-1]
        if lm.shape[:-2] != batch or lm.shape[-1] != classes or classes < 1 or lm.shape[-2] < 1:
            expected = f"shape [..., U + 1, V] with the batch dimensions and V of am, {tuple(am.shape)}"
            raise ValueError(f"{function}: lm must have {expected}, got {tuple(lm.shape)}.")
        for name, matrix in (("am", am), ("lm", lm)):
            _checks.unsplit(function, name, matrix, {-1: "V"})
        lm_only = _checks.scalar(function, "lm_only_scale", self.lm_only_scale)
        am_only = _checks.scalar(function, "am_only_scale", self.am_only_scale)
        unigram = self.unigram
        if unigram is not None:
            unigram = _checks.floating(function, "unigram", unigram, 1, "[..., V]")
            if unigram.shape not in ((classes,), (*batch, classes)):
                expected = f"shape {(classes,)} or {(*batch, classes)}"
                raise ValueError(f"{function}: unigram must have {expected}, got {unigram.shape}.")
        return AdditiveLogits(am, lm, lm_only, am_only, unigram)

    def sequences(self, function, targets, logit_lengths, target_lengths):
        shape = self.am.shape[:-2], self.lm.shape[-2] - 1
        given = targets, logit_lengths, target_lengths
        return _checks.sequences(function, *given, *shape, "lm", "am", self.frames)

    def emission(self, function, loss, head, *sequences):
        name = type(loss).__name__
        if head.durations or head.bernoulli or not head.normalize:
            reason = (
                "durations are a second softmax"
                if head.durations
                else "the blank is no part of the softmax"
                if head.bernoulli
                else "fused_log_softmax=False leaves nothing to normalise"
            )
            expected = "an array, JointLogits, PackedLogits or BandLogits"
            raise TypeError(f"{function}: logits of {name} must be {expected}, got AdditiveLogits: {reason}.")
        lm, clamp = self.lm, loss.clamp
        if clamp is not None and _checks.known(clamp) is None:
            lm = lm + jnp.where(clamp <= 0, 0, jnp.nan).astype(lm.dtype)
        elif clamp is not None and not float(clamp) <= 0:
            expected = "off (<= 0) with AdditiveLogits, whose logits have no gradient of their own"
            raise TypeError(f"{function}: clamp of {name} must be {expected}, got {clamp}.")
        for argument, matrix, rows in (("am", self.am, "T"), ("lm", self.lm, "U + 1")):
            _unsplit_by_reference(function, loss, argument, matrix, {-2: rows})
        scales = (self.lm_only_scale, self.am_only_scale)
        lm_only, am_only = (None if _checks.is_zero(x) else jnp.asarray(x) for x in scales)
        unigram = None if lm_only is None and am_only is None else self.unigram
        if unigram is not None:
            unigram = jnp.broadcast_to(unigram, (*self.am.shape[:-2], self.classes))
        return Additive(head.blanks, head.slots), Scores(self.am, lm, lm_only, am_only, unigram)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class JointLogits(_Layout):
    """Logits that a joint network makes in tiles, on demand and never all at once.

    T frames, U labels, V classes, E and P the widths of encoder and predictor; `...` is any number of batch dimensions.
    They stand for ``joint(encoder_out[..., :, None, :], predictor_out[..., None, :, :])``. Only
    implementation="reference" makes them all.

    Parameters
    ----------
    joint : callable or LinearJoint
        ``joint(encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself. Gradients reach the
        arrays it closes over. A joint that is a pytree brings its leaves; a function is part of the structure.
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [..., T, E]
        Output of the encoder; frames from `logit_lengths` on are never read.
    predictor_out : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, P]
        Output of the predictor; columns after `target_lengths` are never read. Batch dimensions of 1 are broadcast:
        [B, 1, T, E] and [B, N, U + 1, P] are the N hypotheses of each of B utterances. Both have equally many of them,
        or one has none.
    chunk : int, optional
        Approximate number of rows in a tile; the default depends on the shapes and the device. More rows take more
        memory, fewer rows more time. The result is the same up to rounding.

    See Also
    --------
    joint_rnnt_loss : Any loss of these logits, with notes on time, sharding and random numbers.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import JointLogits, LinearJoint, RNNTLoss
    >>> logits = JointLogits(LinearJoint(jnp.zeros((8, 5))), jnp.zeros((2, 4, 8)), jnp.zeros((2, 3, 8)))
    >>> logits.shape
    (2, 4, 3, 5)
    >>> loss = RNNTLoss()(logits, jnp.array([[1, 2], [3, 0]]), jnp.array([4, 3]), jnp.array([2, 1]))
    >>> round(float(loss), 3)
    6.347
    """

    joint: Callable[[jax.Array, jax.Array], jax.Array]
    encoder_out: jax.Array
    predictor_out: jax.Array
    chunk: int | None = None

    def tree_flatten_with_keys(self):
        # A function is no array. As part of the structure it lets `jax.jit` take the layout as an argument.
        function = jax.tree_util.all_leaves([self.joint])
        names = ("encoder_out", "predictor_out") if function else ("joint", "encoder_out", "predictor_out")
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return leaves, (self.joint if function else None, self.chunk)

    @classmethod
    def tree_unflatten(cls, structure, leaves):
        function, chunk = structure
        joint, encoder_out, predictor_out = leaves if function is None else (function, *leaves)
        names = "joint", "encoder_out", "predictor_out", "chunk"
        return _pytree.make(cls, names, (joint, encoder_out, predictor_out, chunk))

    @functools.cached_property
    def _made(self):
        """Has the dtype of the logits, and V as its last dimension."""
        if isinstance(self.joint, LinearJoint):
            return self.joint.weight
        return _xla.shape_of("JointLogits: joint", self.joint, *row_avals(2, self.encoder_out, self.predictor_out))[0]

    @property
    def shape(self):
        batch = jnp.broadcast_shapes(self.encoder_out.shape[:-2], self.predictor_out.shape[:-2])
        return (*batch, self.encoder_out.shape[-2], self.predictor_out.shape[-2], self._made.shape[-1])

    @property
    def dtype(self):
        return self._made.dtype

    def checked(self, function):
        joint, chunk = self.joint, self.chunk
        if not callable(joint):
            raise TypeError(f"{function}: joint must be callable, got {joint!r}.")
        if chunk is not None:
            _checks.positive(function, "chunk", chunk)
        encoder = _checks.floating(function, "encoder_out", self.encoder_out, 2, "[..., T, E]")
        predictor = _checks.floating(function, "predictor_out", self.predictor_out, 2, "[..., U + 1, P]")
        if encoder.ndim != predictor.ndim and min(encoder.ndim, predictor.ndim) > 2:  # N would meet B
            expected = (
                f"as many batch dimensions as encoder_out {encoder.shape}, with 1 for those that one of them lacks"
            )
            way = "encoder_out[:, None] for N hypotheses of each utterance"
            raise ValueError(f"{function}: predictor_out must have {expected} ({way}), got {predictor.shape}.")
        try:
            batch = jnp.broadcast_shapes(encoder.shape[:-2], predictor.shape[:-2])
        except ValueError:
            batch = None
        if batch is None or _checks.smaller(predictor.shape[-2], 1):
            expected = (
                f"shape [..., U + 1, P] with U + 1 >= 1 and batch dimensions that broadcast against those of "
                f"encoder_out, {encoder.shape[:-2]}"
            )
            raise ValueError(f"{function}: predictor_out must have {expected}, got {predictor.shape}.")
        _checks.unsplit(function, "encoder_out", encoder, {-2: "T", -1: "E"})
        _checks.unsplit(function, "predictor_out", predictor, {-2: "U + 1", -1: "P"})
        predictor = jnp.broadcast_to(predictor, (*batch, *predictor.shape[-2:]))
        own = encoder.shape[:-2]
        alike = next((i for i, (n, m) in enumerate(zip(own, batch)) if n != m), len(own))
        if alike == 0 or len(own) < len(batch) or any(n != 1 for n in own[alike:]):
            encoder = jnp.broadcast_to(encoder, (*batch, *encoder.shape[-2:]))  # else the emission shares its rows
        if isinstance(joint, LinearJoint):
            joint = _linear(function, joint, (encoder.shape[-1], predictor.shape[-1]))
        made = JointLogits(joint, encoder, predictor, chunk)
        if not isinstance(joint, LinearJoint):
            check_rows(function, made._made, 2)
            if str(made.dtype) not in _checks.FLOATS:
                raise TypeError(f"{function}: joint must make logits of a floating dtype, got {made.dtype}.")
        return made

    def sequences(self, function, targets, logit_lengths, target_lengths):
        shape = self.shape[:-3], self.shape[-2] - 1
        given = targets, logit_lengths, target_lengths
        return _checks.sequences(function, *given, *shape, "predictor_out", "encoder_out", self.frames)

    def emission(self, function, loss, head, *sequences):
        logits = Joint(function, self.joint, self.encoder_out, self.predictor_out, self.classes, self.dtype, self.chunk)
        if loss.implementation == "reference":
            return head, materialized(logits, head, *sequences)
        return tiled(logits, head)


def _linear(function, joint, widths):
    """The `LinearJoint` with checked arrays, for rows of these widths."""
    weight, bias, activation = joint.weight, joint.bias, joint.activation
    weight = _checks.floating(function, "joint.weight", weight, 2, "[H, V]")
    if weight.ndim != 2 or weight.shape[1] < 1 or widths != (weight.shape[0],) * 2:
        expected = f"[H, V], H the width of encoder_out and predictor_out, here {widths}"
        raise ValueError(f"{function}: joint.weight must have shape {expected}, got {weight.shape}.")
    if bias is not None:
        bias = _checks.floating(function, "joint.bias", bias, 1, "[V]")
        if bias.shape != weight.shape[1:]:
            raise ValueError(f"{function}: joint.bias must have shape [V] = {weight.shape[1:]}, got {bias.shape}.")
    if not isinstance(activation, Hashable) or not callable(activation):
        raise TypeError(f"{function}: joint.activation must be a hashable function, got {activation!r}.")
    units = jax.ShapeDtypeStruct((1, 1, 1, weight.shape[0]), accumulation_dtype(weight.dtype))
    made = jax.eval_shape(activation, units)
    if getattr(made, "shape", None) != units.shape or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(f"{function}: joint.activation must be element-wise, got {made} of {units}.")
    return LinearJoint(weight, bias, activation)
