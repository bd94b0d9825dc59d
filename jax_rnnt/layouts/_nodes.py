"""sum_over_nodes sums any function of the rows of logits over the nodes of each sequence, in tiles.

There are B sequences, T frames, U1 columns, V classes and N rows.

`Tiled` runs the function as it runs a loss's joint network (`_rowwise`). All layouts become planes [..., T, U1] first:
a band has S columns, and a packed row is a sequence of one node. Arrays of logits are cut into tiles, too.
"""

import dataclasses
import functools
import itertools
import math
import operator
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.emissions import _emission
from jax_rnnt.emissions._emission import gradient, inside_rows, inside_targets, label_map, scale_cotangent
from jax_rnnt.emissions._softmax import accumulation_dtype
from jax_rnnt.layouts import _layout
from jax_rnnt.layouts._additive import AdditiveLogits
from jax_rnnt.layouts._band import BandLogits, band, band_label_map
from jax_rnnt.layouts._joint import JointLogits
from jax_rnnt.layouts._joint_networks import LinearJoint, split
from jax_rnnt.layouts._packed import PackedLogits, labels_of_rows, nodes_of_rows, offsets
from jax_rnnt.layouts._rowwise import Network, Rowwise, Values, common_dtype, side_by_side
from jax_rnnt.tiles._networks import RowFunction
from jax_rnnt.tiles._tile_sizes import blocks_for
from jax_rnnt.tiles._tiles import Tiled


# ---------------------------------------------------------------------------------------------- the sum, in tiles
class Inputs(typing.NamedTuple):
    """The arrays of all logits; lists have an entry for each joint network, or for each array."""

    parameters: list[list[jax.Array]]
    encoders: list[jax.Array]
    predictors: list[jax.Array]
    arrays: list[jax.Array]  # [..., T, U1, V]
    constants: list[jax.Array]  # constants of the function
    labels: list[jax.Array]  # none, or [..., T, U1, 1]


class CountedNodes(typing.NamedTuple):
    """The nodes of a batch [...]."""

    counts: jax.Array  # bool [..., T, U1]: which nodes are inside the lengths, with a weight
    num_frames: jax.Array  # [...]
    num_labels: jax.Array  # [...]
    members: jax.Array | None = None  # bool [B, N]: which packed rows belong to which sequence


def _of_tiles(inputs, nodes):
    """Returns the (logits, nodes) that `Tiled` takes."""
    *batch, _, columns = nodes.counts.shape
    encoder = side_by_side(inputs.encoders, nodes.counts.shape[:-1])
    predictor = side_by_side(inputs.predictors, (*batch, columns))
    parameters = [*itertools.chain.from_iterable(inputs.parameters), *inputs.constants]
    label = jnp.zeros((*batch, 1, columns), jnp.int32)  # only losses read it
    of_tiles = _emission.Nodes(label, nodes.num_frames, nodes.num_labels, nodes.counts)
    return (parameters, encoder, predictor, *inputs.arrays, *inputs.labels), of_tiles


def _weighted(emission, weights, inputs, nodes):
    """Returns (sums [...], values [..., T, U1])."""
    values = emission.forward(*_of_tiles(inputs, nodes))[0]["value"]
    values = jnp.where(nodes.counts, values, 0)
    if nodes.members is not None:  # a NaN concerns all rows of its sequence
        bad = jnp.any(nodes.members & jnp.any(jnp.isnan(values), (-1, -2))[None], -1)
        values = jnp.where(jnp.any(nodes.members & bad[:, None], 0)[:, None, None], jnp.nan, values)
    return jnp.sum(jnp.where(nodes.counts, weights * values, 0), (-1, -2)), values


@jax.custom_vjp
def _sums(emission, weights, inputs, nodes):
    return _weighted(emission, weights, inputs, nodes)[0]


def _sums_fwd(emission, *primals):
    perturbed = jax.tree.map(lambda x: x.perturbed, primals[1])
    weights, inputs, nodes = jax.tree.map(lambda x: x.value, primals)
    networks = zip(perturbed.parameters, perturbed.encoders, perturbed.predictors)
    of_networks, of_arrays = (any(jax.tree.leaves(x)) for x in networks), iter(perturbed.arrays)
    learned = tuple(next(of_arrays if source is None else of_networks) for source in emission.joint.sources)
    emission = dataclasses.replace(emission, joint=dataclasses.replace(emission.joint, learned=learned))
    sums, values = _weighted(emission, weights, inputs, nodes)
    return sums, (emission, weights, inputs, nodes, _xla.named(values, "rnnt_residuals"))


def _sums_bwd(residuals, cotangent):
    emission, weights, inputs, nodes, values = residuals
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros(cotangent.shape, cotangent.dtype)
    # Sequences with a NaN get NaN, and add nothing to the gradient of what all share.
    bad = jnp.any(jnp.isnan(values), (-1, -2), keepdims=True)
    planes = {"value": jnp.where(bad, jnp.nan, jnp.where(nodes.counts, weights, 0))}
    logits, of_tiles = _of_tiles(inputs, nodes)
    gradients = gradient(emission, False, False, logits, of_tiles, (), planes, cotangent, -jnp.ones_like(cotangent))
    parameters, encoder, predictor, *arrays = gradients
    parameters, labels = iter(parameters), [arrays.pop() for _ in inputs.labels]  # None
    of_networks = [[next(parameters) for _ in leaves] for leaves in inputs.parameters]

    def of_states(xs, like, gradient):
        return jax.vjp(lambda xs: side_by_side(xs, like.shape[:-1]), xs)[1](gradient)[0]

    states = of_states(inputs.encoders, logits[1], encoder), of_states(inputs.predictors, logits[2], predictor)
    return None, scale_cotangent(values, cotangent), Inputs(of_networks, *states, arrays, [*parameters], labels), None


_sums.defvjp(_sums_fwd, _sums_bwd, symbolic_zeros=True)


# ------------------------------------------------------------------------------------------- layouts become planes
class Sequences(typing.NamedTuple):
    """The checked arguments of a call."""

    num_frames: jax.Array  # [...]
    num_labels: jax.Array  # [...]
    weights: jax.Array | None  # [..., T, U + 1]
    targets: jax.Array | None  # [..., U]
    columns: int | None  # U + 1, if any argument determines it
    classes: int  # the largest number of any logits

    def within(self, frames, unfit):
        """Returns (bool [...]: sequences that are NaN, both lengths with 0 there); `unfit` has those already known."""
        bad = unfit | (self.num_frames < 0) | (self.num_frames > frames) | (self.num_labels < 0)
        if self.columns is not None:
            bad |= self.num_labels >= self.columns
        if self.targets is not None:
            outside = (self.targets < 0) | (self.targets >= self.classes)
            bad |= jnp.any(inside_targets(self.targets, self.num_labels) & outside, -1)
        return bad, *(jnp.where(bad, 0, n) for n in (self.num_frames, self.num_labels))


class Terms(typing.NamedTuple):
    """The terms of the sum over a batch: its nodes, in planes [..., T, U1] of its logits."""

    nodes: CountedNodes
    weights: jax.Array | None  # [..., T, U1]
    labels: jax.Array  # int32 [..., T, U1], or a shape that broadcasts to it
    bad: jax.Array  # bool: which sequences are NaN


def _padded(layouts, x: Sequences) -> Terms:
    """Returns the terms for arrays and joint networks, or for bands with the same first columns."""
    *batch, frames, width, _ = layouts[0].shape
    firsts = [layout.first for layout in layouts if isinstance(layout, BandLogits)]
    differ = (jnp.any(firsts[0] != first, -1) for first in firsts[1:])
    bad, num_frames, num_labels = x.within(
        frames, functools.reduce(operator.or_, differ, jnp.zeros_like(x.num_frames, bool))
    )
    targets = x.targets
    if targets is None:  # split over devices as the lengths are
        targets = jnp.broadcast_to(jnp.zeros_like(x.num_frames)[..., None], (*batch, (x.columns or 1) - 1))
    labels, weights, last = label_map(targets, num_labels), x.weights, num_labels
    if firsts:
        labels = band_label_map(targets, num_labels, firsts[0], width)
        weights = None if weights is None else band(weights, firsts[0], width)
        last = jnp.full_like(num_labels, width - 1)
    inside = inside_rows(_emission.Nodes(labels, num_frames), frames)
    return Terms(CountedNodes(inside, num_frames, last), weights, labels, bad)


def _packed(layouts, x: Sequences) -> Terms:
    """Returns the terms for packed rows, where every row is a sequence of one node."""
    rows, count = layouts[0].rows.shape[0], x.num_frames.shape[0]
    first, end = offsets(x.num_frames, x.num_labels, rows)
    bad, num_frames, num_labels = x.within(layouts[0].frames_for(x.num_frames), end > rows)
    used, (b, t, u) = nodes_of_rows(num_frames, num_labels, first, end, rows)
    weights, labels = None, jnp.zeros(rows, jnp.int32)
    if x.weights is not None:
        weights = x.weights[b, t, u] if x.weights.size else jnp.zeros(rows, x.weights.dtype)
        weights = weights[:, None, None]
    if x.targets is not None and count:
        labels = labels_of_rows(x.targets, num_labels, b, u)
    members = (b[None] == jax.lax.broadcasted_iota(jnp.int32, (count, 1), 0)) & used[None]
    frames = used.astype(jnp.int32)
    nodes = CountedNodes(used[:, None, None], frames, jnp.zeros_like(frames), members)
    return Terms(nodes, weights, labels[:, None, None], bad)


# ------------------------------------------------------------------------------------------------------- arguments
def _checked_layouts(logits):
    """Returns the checked layouts, with additive ones as joint networks."""
    if not logits:
        raise _checks.bad_type("logits must be one or several arrays or layouts, got none.")
    layouts = [_layout.as_layout(x) for x in logits]
    for i, x in enumerate(layouts):
        if isinstance(x, AdditiveLogits):
            if not (_checks.is_zero(x.lm_only_scale) and _checks.is_zero(x.am_only_scale)):
                expected = "without smoothing, which mixes log-probabilities and has no rows of logits"
                got = f"lm_only_scale {x.lm_only_scale} and am_only_scale {x.am_only_scale}"
                raise _checks.bad_type(f"AdditiveLogits must be {expected}, got {got}.")
            layouts[i] = JointLogits(operator.add, x.am, x.lm).checked()
    of_library = _layout.ArrayLogits, JointLogits, PackedLogits, BandLogits
    if others := [type(x).__name__ for x in layouts if type(x) not in of_library]:
        raise _checks.bad_type(f"logits must be arrays or layouts of jax_rnnt, got {others[0]}.")
    if len({x if x in (PackedLogits, BandLogits) else None for x in map(type, layouts)}) > 1:
        got = ", ".join(type(x).__name__ for x in layouts)
        raise _checks.bad_type(f"logits must all be PackedLogits, or all BandLogits, or none of them, got {got}.")
    if any(x.shape[:-1] != layouts[0].shape[:-1] for x in layouts):
        raise _checks.bad_value(f"logits must have equal shapes but for V, got {[x.shape for x in layouts]}.")
    return layouts


def _checked(layouts, logit_lengths, target_lengths, weights, targets, dtype) -> Sequences:
    """Checks the arguments other than the logits."""
    shape = layouts[0].shape[:-1]
    packed, bands = (isinstance(layouts[0], kind) for kind in (PackedLogits, BandLogits))
    if packed and np.ndim(logit_lengths) != 1:
        raise _checks.bad_value(f"logit_lengths must have shape [B], got {np.shape(logit_lengths)}.")
    batch = np.shape(logit_lengths) if packed else shape[:-2]
    num_frames = _checks.integers("logit_lengths", logit_lengths, batch, "[...]")
    num_labels = _checks.integers("target_lengths", target_lengths, batch, "[...]")
    frames = layouts[0].frames_for(logit_lengths) if packed else shape[-2]
    columns = None if packed or bands else shape[-1]
    if weights is not None:
        weights = _checks.array("weights", weights)
        if not jnp.isrealobj(weights):
            raise _checks.bad_type(f"weights must be an array of real numbers, got {weights.dtype}.")
        columns = weights.shape[-1] if columns is None and weights.ndim else columns
        if weights.shape != (*batch, frames, columns):
            expected = f"[..., T, U + 1] = {(*batch, frames, columns)}"
            raise _checks.bad_value(f"weights must have shape {expected}, got {weights.shape}.")
        weights = jnp.asarray(weights).astype(dtype)
    if targets is not None:
        columns = np.shape(targets)[-1] + 1 if columns is None and np.ndim(targets) else columns
        targets = _checks.integers("targets", targets, (*batch, (columns or 1) - 1), "[..., U]")
        _checks.unsplit("targets", targets, {-1: "U"})
    return Sequences(num_frames, num_labels, weights, targets, columns, max(x.classes for x in layouts))


def _split_alike(layouts, x: Sequences):
    """Returns (layouts, arguments), all split over the same explicit mesh axes by the batch."""
    fields = [(i, name) for i, layout in enumerate(layouts) for name in layout.batched]
    own = [getattr(layouts[i], name) for i, name in fields]
    names = [name for name in ("weights", "targets", "num_frames", "num_labels") if getattr(x, name) is not None]
    arrays = *own, *(getattr(x, name) for name in names)
    packed = isinstance(layouts[0], PackedLogits)
    placed = iter(_xla.whole(*arrays) if packed else _xla.split_alike(x.num_frames.ndim, *arrays))
    for i, name in fields:
        layouts[i] = _pytree.replace(layouts[i], **{name: next(placed)})
    changed: dict[str, typing.Any] = dict(zip(names, placed))
    return layouts, x._replace(**changed)


def _traced(function, rows, like, layouts, labels, dtype):
    """Returns (the function of `rows` rows of each of these logits, and of labels if there are any; its constants)."""
    aval = functools.partial(_xla.result_aval, jax.typeof(like), num_batch_dims=0)
    avals = [aval((rows, x.classes), x.dtype) for x in layouts] + [aval((rows,), x.dtype) for x in labels]

    def values(*arguments):
        value = function(*arguments)
        if jnp.shape(value) != (rows,) or jnp.iscomplexobj(value):
            expected = f"one real number for each row, [N] for rows [N, V], here [{rows}]"
            raise _checks.bad_value(f"function must return {expected}, got {value}.")
        return jnp.asarray(value).astype(dtype)

    traced, constants, _ = _xla.trace(values, *avals)
    return RowFunction(traced), constants


def _in_tiles(function, layouts, shape, labels):
    """Returns (the emission of `_sums`, its arrays)."""
    dtype = common_dtype(layouts)
    joints = [x for x in layouts if isinstance(x, JointLogits)]
    encoders, predictors = ([getattr(x, name) for x in joints] for name in ("encoder_out", "predictor_out"))
    rows_of = {_layout.ArrayLogits: "logits", BandLogits: "logits", PackedLogits: "rows"}
    arrays = [getattr(x, rows_of[type(x)]) for x in layouts if not isinstance(x, JointLogits)]
    arrays = [x.reshape(*shape, x.shape[-1]) for x in arrays]

    linear = all(isinstance(x.joint, LinearJoint) for x in joints)
    chunk = min((x.chunk for x in joints if x.chunk is not None), default=None)
    emission = Tiled(Values(), None, sum(x.classes for x in layouts), dtype, chunk, linear)
    *batch, frames, columns = shape
    encoder = jax.eval_shape(lambda xs: side_by_side(xs, (*batch, frames)), encoders)
    predictor = jax.eval_shape(lambda xs: side_by_side(xs, (*batch, columns)), predictors)
    # The function is traced here, for its number of rows: as in `tiled`, the default backend decides.
    blocks = blocks_for(emission, encoder, predictor, jax.default_backend())
    rows = math.prod(dataclasses.astuple(blocks))

    sources: list[Network | None] = []
    parameters = []
    for x in layouts:
        if isinstance(x, JointLogits):
            joint, leaves = split(x, rows)
            of_encoder, of_predictor = ((y.shape[-1], y.dtype) for y in (x.encoder_out, x.predictor_out))
            sources.append(Network(joint, len(leaves), of_encoder, of_predictor))
            parameters.append(leaves)
        else:
            sources.append(None)
    like, *_ = _xla.vary_together(*encoders, *predictors, *arrays)
    traced, constants = _traced(function, rows, like, layouts, labels, accumulation_dtype(dtype))
    rowwise = Rowwise(tuple(sources), traced, (False,) * len(sources))
    inputs = Inputs(parameters, encoders, predictors, arrays, constants, labels)
    return dataclasses.replace(emission, joint=rowwise, blocks=blocks), inputs


@keywords
def sum_over_nodes(
    function: Callable[..., jax.Array],
    *logits: ArrayLike | _layout.Layout,
    logit_lengths: ArrayLike,
    target_lengths: ArrayLike,
    weights: ArrayLike | None = None,
    targets: ArrayLike | None = None,
) -> jax.Array:
    """Sums a function of the logits over the nodes of each sequence, in tiles: distillation, consistency, entropy.

    T frames, U labels, V classes, N rows of a tile; `...` is any number of batch dimensions::

        sum over t < T_b, u <= U_b of weights[t, u] * function(row (t, u) of each of the logits)

    For each `JointLogits`, no more than a tile of logits exists at a time.

    Parameters
    ----------
    function : callable
        ``function(rows [N, V], ...) -> [N]``, each row by itself: rows of each of `logits`, in their dtype and order.
        Gradients reach the arrays that it closes over. With `targets` it gets labels int32 [N] as the last argument:
        the label that leaves the node, -1 in the last column (`jax.nn.one_hot` makes that a row of zeros).
    *logits : Array, floating [..., T, U + 1, V], or a layout
        One or several, with the same batch, T and U + 1. V may differ. Arrays, `JointLogits` and `AdditiveLogits`
        without smoothing go together. `BandLogits` and `PackedLogits` go with their like: only nodes inside the band
        count, and bands that differ make a sequence NaN.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    weights : Array, real or bool [..., T, U + 1], optional
        The weight of each node; by default 1. The sum skips nodes of weight 0: NaN or inf there reaches nothing, and
        the derivative with respect to such a weight counts as 0. For posteriors take
        ``jax.lax.stop_gradient(blank + label)``. With `PackedLogits`, T is their `max_frames`.
    targets : Array, integer [..., U], optional
        Labels, if the function takes them.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...]
        In the unit of the function. 0 without frames. NaN for a sequence whose lengths or used targets are out of
        range, with a gradient of 0; NaN also where the function is NaN in a node that counts. Then the gradient of its
        own rows is NaN, and what sequences share (parameters, closed-over arrays) gets nothing from it.

    Raises
    ------
    TypeError, ValueError
        If shapes or dtypes do not fit, layouts do not go together, `AdditiveLogits` have smoothing, or the function
        does not return [N].

    See Also
    --------
    JointLogits : Tiles, and `chunk`, their size.

    Notes
    -----
    The value runs joint networks and function once for each node inside the lengths whose weight is not 0, the gradient
    once more; it differentiates no network that needs no gradient (a teacher). The backward pass leaves out blocks of
    nodes whose weights stay below eps / (T + U + 1) of the sequence's largest weight, or of 1 if that is less. Only
    gradients of first order exist. Outside of `jax.jit`, every call compiles anew.

    References
    ----------
    Panchapagesan et al., "Efficient knowledge distillation for RNN-transducer models", 2021, arXiv:2011.06110.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_rnnt import JointLogits, LinearJoint, sum_over_nodes
    >>> logits = JointLogits(LinearJoint(jnp.zeros((8, 5))), jnp.zeros((2, 4, 8)), jnp.zeros((2, 3, 8)))
    >>> entropy = lambda rows: -jnp.sum(jax.nn.softmax(rows) * jax.nn.log_softmax(rows), -1)
    >>> lengths = {"logit_lengths": jnp.array([4, 3]), "target_lengths": jnp.array([2, 1])}
    >>> [round(float(x), 3) for x in sum_over_nodes(entropy, logits, **lengths)]  # 12 and 6 times log 5
    [19.313, 9.657]
    """
    if not callable(function):
        raise _checks.bad_type(f"function must be callable, got {function!r}.")
    layouts = _checked_layouts(logits)
    dtype = accumulation_dtype(common_dtype(layouts))
    terms_of = _packed if isinstance(layouts[0], PackedLogits) else _padded
    sequences = _checked(layouts, logit_lengths, target_lengths, weights, targets, dtype)
    layouts, sequences = _split_alike(layouts, sequences)
    terms = terms_of(layouts, sequences)
    nodes, inside = terms.nodes, terms.nodes.counts
    labels = [] if targets is None else [jnp.broadcast_to(terms.labels, inside.shape)[..., None]]
    emission, inputs = _in_tiles(function, layouts, inside.shape, labels)
    plane = jnp.ones_like(inside, dtype) if terms.weights is None else terms.weights
    nodes = nodes._replace(counts=inside & (plane != 0))
    leaves, structure = jax.tree.flatten((plane, inputs, nodes))
    plane, inputs, nodes = jax.tree.unflatten(structure, _xla.vary_together(*leaves))
    sums = _sums(emission, plane, inputs, nodes)
    if nodes.members is not None:  # no scatter, so that the order is fixed
        sums = jnp.sum(jnp.where(nodes.members, sums[None], 0), -1)
    return jnp.where(terms.bad, jnp.nan, sums)
