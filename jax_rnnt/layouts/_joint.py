"""JointLogits: logits that a joint network computes in tiles and never all at once."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._keywords import in_name_of, keywords
from jax_rnnt.emissions._emission import Emission, isolate, out_of_range
from jax_rnnt.emissions._softmax import accumulation_dtype
from jax_rnnt.layouts._joint_networks import LinearJoint, check_rows, row_avals, split
from jax_rnnt.layouts._layout import Layout
from jax_rnnt.tiles._networks import pair
from jax_rnnt.tiles._tile_sizes import blocks_for
from jax_rnnt.tiles._tiles import Tiled

_LEAVES = "parameters", "encoder_out", "predictor_out"
_FIELDS = "joint", "encoder_out", "predictor_out", "chunk", "parameters"


@keywords
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class JointLogits(Layout):
    """Logits that a joint network computes in tiles, on demand and never all at once.

    T frames, U labels, V classes, E and P the widths of encoder and predictor; `...` is any number of batch dimensions.
    They are ``joint(encoder_out[..., :, None, :], predictor_out[..., None, :, :])``. Only implementation="reference"
    computes all at once.

    Parameters
    ----------
    joint : callable or LinearJoint
        ``joint(parameters, encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself; without
        `parameters`, ``joint(encoder rows, predictor rows)``, whose gradients reach the arrays that `joint` closes
        over. The leaves of a joint that is a pytree are leaves here too; a function is part of the structure.
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [..., T, E]
        Output of the encoder; frames from `logit_lengths` on are never read.
    predictor_out : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, P]
        Output of the predictor; columns after `target_lengths` are never read. Both arrays have equally many batch
        dimensions, or one has none. Those of 1 broadcast: [B, 1, T, E] and [B, N, U + 1, P] are N hypotheses of
        each of B utterances.
    chunk : int, optional
        Approximate number of rows in a tile; the default depends on the shapes and the device. More rows take more
        memory, fewer rows more time. The result is the same up to rounding. Kernels have no tiles, and ignore it.
    parameters : pytree of Array, optional
        The first argument of `joint`. Gradients reach them, and `joint` closes over no other array. It should be the
        same function in every call: then it compiles once, outside of `jax.jit` too.

    See Also
    --------
    LinearJoint : The usual joint network.
    BandLogits : Fewer logits, instead of all in less memory.

    Notes
    -----
    The joint network runs on tiles of rows, once forward and once more backward, in the memory of one tile and some
    planes [..., T, U + 1]. The backward pass skips blocks of nodes whose posteriors together stay below the rounding
    error of the gradient. Time grows with the lengths, not the padding. Projections of encoder or predictor alone
    belong outside of `joint`, where they run once a frame or column and not once a node.

    On TPUs and GPUs a `LinearJoint` can run in kernels instead, which keep logits on the chip: where `selftest` has
    found them right, or with implementation="kernel". They honour
    `jax.default_matmul_precision`: unless it asks for more, factors of products are rounded to bfloat16 on a TPU, and
    those of float32 to TF32 on a GPU.

    Sharding over the batch exchanges the gradient of the parameters alone. With an output layer that jit splits over V
    the result is right, but devices gather every tile of logits. Inside `shard_map` the loss takes a part of V for all
    of V, and is wrong: call ``jax.lax.all_gather(..., tiled=True)`` on the output layer first.

    A random key that `joint` closes over, or gets, draws the same numbers in every tile and in both passes. Outside of
    `jax.jit`, every call with a joint that closes over its arrays compiles anew.

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

    A joint network with parameters of its own:

    >>> def gated(parameters, encoder, predictor):
    ...     return jnp.tanh(encoder * predictor) @ parameters["weight"] + parameters["bias"]
    >>> parameters = {"weight": jnp.zeros((8, 5)), "bias": jnp.zeros(5)}
    >>> JointLogits(gated, jnp.zeros((2, 4, 8)), jnp.zeros((2, 3, 8)), parameters=parameters).shape
    (2, 4, 3, 5)
    """

    joint: Callable[..., jax.Array]
    encoder_out: jax.Array
    predictor_out: jax.Array
    chunk: int | None = None
    parameters: Any = None

    def tree_flatten_with_keys(self):
        # A function is no array. As part of the structure, it lets `jax.jit` take the layout as an argument.
        function = jax.tree_util.all_leaves([self.joint])
        names = _LEAVES if function else ("joint", *_LEAVES)
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return leaves, (self.joint if function else None, self.chunk)

    @classmethod
    def tree_unflatten(cls, structure, leaves):
        function, chunk = structure
        joint, parameters, encoder_out, predictor_out = leaves if function is None else (function, *leaves)
        return _pytree.make(cls, _FIELDS, (joint, encoder_out, predictor_out, chunk, parameters))

    sides = "predictor_out", "encoder_out"
    batched = "encoder_out", "predictor_out"
    instead = (
        "let joint compute it, as lambda e, p: network(e, p) / 2, or make the array: "
        "joint(encoder_out[..., :, None, :], predictor_out[..., None, :, :])"
    )

    @property
    def of_rows(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns the joint as a function of rows alone."""
        return self.joint if self.parameters is None else functools.partial(self.joint, self.parameters)

    @functools.cached_property
    def _result(self):
        """A value with the dtype of the logits and V as its last dimension."""
        if isinstance(self.joint, LinearJoint):
            return self.joint.weight
        with in_name_of("JointLogits"):
            return _xla.shape_of("joint", self.of_rows, *row_avals(2, self.encoder_out, self.predictor_out))[0]

    @property
    def shape(self):
        batch = jnp.broadcast_shapes(self.encoder_out.shape[:-2], self.predictor_out.shape[:-2])
        return (*batch, self.encoder_out.shape[-2], self.predictor_out.shape[-2], self._result.shape[-1])

    @property
    def dtype(self):
        return self._result.dtype

    def checked(self):
        joint, chunk = self.joint, self.chunk
        if not callable(joint):
            raise _checks.bad_type(f"joint must be callable, got {_checks.shown(joint)}.")
        if chunk is not None:
            _checks.positive("chunk", chunk)
        parameters = self.parameters
        if parameters is not None:
            if not (jax.tree_util.all_leaves([joint]) and isinstance(joint, Hashable)):
                raise _checks.bad_type(f"joint must be a hashable function beside parameters, got {joint!r}.")
            parameters = jax.tree.map(lambda x: jnp.asarray(_checks.array("parameters", x)), parameters)
        encoder = _checks.floating("encoder_out", self.encoder_out, 2, "[..., T, E]")
        predictor = _checks.floating("predictor_out", self.predictor_out, 2, "[..., U + 1, P]")
        if encoder.ndim != predictor.ndim and min(encoder.ndim, predictor.ndim) > 2:  # N would be paired with B
            expected = (
                f"as many batch dimensions as encoder_out {encoder.shape}, with 1 for those that one of them lacks"
            )
            way = "encoder_out[:, None] for N hypotheses of each utterance"
            raise _checks.bad_value(f"predictor_out must have {expected} ({way}), got {predictor.shape}.")
        try:
            batch = jnp.broadcast_shapes(encoder.shape[:-2], predictor.shape[:-2])
        except ValueError:
            batch = None
        if batch is None or _checks.smaller(predictor.shape[-2], 1):
            expected = (
                f"shape [..., U + 1, P] with U + 1 >= 1 and batch dimensions that broadcast against those of "
                f"encoder_out, {encoder.shape[:-2]}"
            )
            raise _checks.bad_value(f"predictor_out must have {expected}, got {predictor.shape}.")
        _checks.unsplit("encoder_out", encoder, {-2: "T", -1: "E"})
        _checks.unsplit("predictor_out", predictor, {-2: "U + 1", -1: "P"})
        if encoder.ndim == predictor.ndim:
            encoder, predictor = _xla.split_alike(len(batch), encoder, predictor)
        predictor = jnp.broadcast_to(predictor, (*batch, *predictor.shape[-2:]))
        outer = encoder.shape[:-2]
        alike = next((i for i, (n, m) in enumerate(zip(outer, batch)) if n != m), len(outer))
        if alike == 0 or len(outer) < len(batch) or any(n != 1 for n in outer[alike:]):
            encoder = jnp.broadcast_to(encoder, (*batch, *encoder.shape[-2:]))  # else the emission shares its rows
        if isinstance(joint, LinearJoint):
            joint = _linear(joint, (encoder.shape[-1], predictor.shape[-1]))
        logits = JointLogits(joint, encoder, predictor, chunk, parameters)
        if not isinstance(joint, LinearJoint):
            check_rows(logits._result, 2)
            if str(logits.dtype) not in _checks.FLOATS:
                raise _checks.bad_type(f"joint must make logits of a floating dtype, got {logits.dtype}.")
        return logits

    def split_arrays(self, option):
        if option == "frame_axis":
            return {"encoder_out": self.encoder_out}
        return {"joint.weight": self.joint.weight} if isinstance(self.joint, LinearJoint) else {}

    def specs(self, batch, frame_axis, vocab_axis):
        joint: Any = self.joint
        if vocab_axis is not None and isinstance(joint, LinearJoint):
            joint = jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), vocab_axis), joint)
        elif vocab_axis is not None:
            expected = "joint must be a LinearJoint outside of jax.shard_map"
            raise _checks.bad_type(f"vocab_axis: {expected}, got {joint!r}, whose classes may lie anywhere.")
        elif not jax.tree_util.all_leaves([joint]):
            joint = jax.tree.map(lambda _: P(), joint)

        def axes_of(x):  # a batch dimension of 1 is split over no axis
            *shape, _, _ = jnp.shape(x)
            return [None if n == 1 else axes for n, axes in zip(shape, batch[len(batch) - len(shape) :])]

        encoder = P(*axes_of(self.encoder_out), frame_axis)
        parameters = jax.tree.map(lambda _: P(), self.parameters)
        values = joint, encoder, P(*axes_of(self.predictor_out)), self.chunk, parameters
        return _pytree.make(JointLogits, _FIELDS, values)

    def emission(self, loss, softmax, *sequences):
        if loss.implementation == "reference":
            logits = _materialized(self, softmax, *sequences)
            return Emission(softmax, self.frames, softmax.tokens(self.classes)), logits
        rows, logits = _tiled(self, softmax)
        return Emission(rows, self.frames, softmax.tokens(self.classes)), logits


def _linear(joint, widths):
    """Returns the `LinearJoint` with checked arrays, for rows of these widths."""
    weight, bias, activation = joint.weight, joint.bias, joint.activation
    weight = _checks.floating("joint.weight", weight, 2, "[H, V]")
    if weight.ndim != 2 or weight.shape[1] < 1 or widths != (weight.shape[0],) * 2:
        expected = f"[H, V], H the width of encoder_out and predictor_out, here {widths}"
        raise _checks.bad_value(f"joint.weight must have shape {expected}, got {weight.shape}.")
    if bias is not None:
        bias = _checks.floating("joint.bias", bias, 1, "[V]")
        if bias.shape != weight.shape[1:]:
            raise _checks.bad_value(f"joint.bias must have shape [V] = {weight.shape[1:]}, got {bias.shape}.")
    if not isinstance(activation, Hashable) or not callable(activation):
        raise _checks.bad_type(f"joint.activation must be a hashable function, got {activation!r}.")
    units = jax.ShapeDtypeStruct((1, 1, 1, weight.shape[0]), accumulation_dtype(weight.dtype))
    activated = jax.eval_shape(activation, units)
    if getattr(activated, "shape", None) != units.shape or not jnp.issubdtype(activated.dtype, jnp.floating):
        raise _checks.bad_value(f"joint.activation must be element-wise, got {activated} of {units}.")
    return LinearJoint(weight, bias, activation)


def _tiled(logits: JointLogits, inner):
    """Returns (rows, their logits) of checked logits, in tiles."""
    encoder, predictor = logits.encoder_out, logits.predictor_out
    linear = isinstance(logits.joint, LinearJoint)
    emission, rows = Tiled(inner, None, logits.classes, logits.dtype, logits.chunk, linear), 1
    if not linear and logits.parameters is None:
        # A closure is traced here, for its number of rows; the platform of the program is not known yet. If it is not
        # the default backend's, results are right, and only the size of the tiles suits the wrong platform.
        blocks = blocks_for(emission, encoder, predictor, jax.default_backend())
        emission, rows = dataclasses.replace(emission, blocks=blocks), math.prod(dataclasses.astuple(blocks))
    static, parameters = split(logits, rows)
    # The precision is read where the primitive is bound, as the lowering may run elsewhere.
    precision = jax.config.jax_default_matmul_precision
    return dataclasses.replace(emission, joint=static, precision=precision), (parameters, encoder, predictor)


def _materialized(logits: JointLogits, softmax, targets, num_frames, num_labels):
    """Computes the logits as an array, for the reference. The joint gets zeros for rows that no sequence reads.

    These are rows outside the lengths, and all rows of a sequence that is empty or whose lengths or labels are out of
    range. NaN there would reach the gradient of the joint's parameters. A sequence with NaN inside its lengths gets
    zeros too, and its logits become NaN afterwards.
    """
    if logits.parameters is not None:
        split(logits, 1)  # this raises an error where the joint closes over arrays
    tokens = softmax.tokens(logits.classes)
    empty = (num_frames == 0) | out_of_range(targets, num_frames, num_labels, logits.frames, tokens)
    rows = []
    for x, last in ((logits.encoder_out, num_frames), (logits.predictor_out, num_labels + 1)):
        x = jnp.broadcast_to(x, (*num_frames.shape, *x.shape[-2:]))
        last = jnp.where(empty, 0, last)[..., None]
        index = jax.lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + x.shape[-2:-1], num_frames.ndim)
        rows.append(jnp.where((index < last)[..., None], x, 0))
    bad = functools.reduce(jnp.logical_or, (jnp.any(jnp.isnan(x), (-1, -2)) for x in rows))
    if 0 in logits.shape:
        return jnp.zeros(logits.shape, logits.dtype)
    rows = pair(*(isolate(x, bad).reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in rows))
    flat = logits.of_rows(*rows)
    check_rows(flat, rows[0].shape[0])
    return jnp.where(bad[..., None, None, None], jnp.nan, flat.reshape(logits.shape))
