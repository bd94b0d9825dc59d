"""Lattices by kernel: arc log-probabilities -> loss and its gradient, minus the arc posteriors. Any topology.

There are two kernels behind one pair of custom calls: one for unit steps (standard, monotonic), one for arcs that skip
frames (multi-blank, token and duration). On TPUs there is one kernel for all of them, in Pallas (`_pallas.py`).
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import in_name_of
from jax_rnnt.lattices import _pallas as pallas
from jax_rnnt.lattices import _reference as reference
from jax_rnnt.lattices._reference import inside
from jax_rnnt.lattices._topology import MONOTONIC, STANDARD, Arc, Topology, bounded, slots


def reference_grad(topology: Topology, arcs, num_frames, num_labels):
    """Returns (-log likelihood [...], {slot: its gradient [..., T, U1]}), computed in plain JAX."""

    def total(arcs):
        loss = 0 - reference.log_likelihood(topology, arcs, num_frames, num_labels)  # 0 - x, as -x could be -0
        return jnp.sum(loss), loss

    gradients, loss = jax.grad(total, has_aux=True)(arcs)
    first, *_ = arcs.values()
    used = inside(num_frames, num_labels, *first.shape[-2:])
    nan = jnp.isnan(loss)[..., None, None]
    return loss, {slot: jnp.where(used, jnp.where(nan, jnp.nan, g), 0) for slot, g in gradients.items()}


# Operands of the kernels are a plane for each slot, with the lengths behind the first; attributes are the table of
# arcs.


def _call(topology, arcs, num_frames, num_labels):
    """Returns (operands, attributes)."""
    first, *others = (arcs[slot] for slot in slots(topology))
    attributes = _attributes(bounded(topology, first.shape[-2]))
    return (first, num_frames, num_labels, *others), dict(num_batch_dims=num_frames.ndim, **attributes)


def _attributes(topology):
    index = {slot: i for i, slot in enumerate(slots(topology))} | {None: -1}
    table = ((arc.dt, arc.du, int(arc.may_end), index[arc.slot], index[arc.other]) for arc in topology)
    return dict(zip(("dt", "du", "may_end", "plane", "other"), zip(*table)))


def _problem(first, num_frames, num_labels, *others, dt, du, may_end, plane, other):
    """Returns the arguments of `log_likelihood`, from operands and attributes."""
    table = zip(plane, dt, du, map(bool, may_end), (None if p < 0 else str(p) for p in other))
    topology = tuple(Arc(str(p), *arc) for p, *arc in table)
    return topology, {str(p): x for p, x in enumerate((first, *others))}, num_frames, num_labels


def _loss_reference(*operands, **attributes):
    return [0 - reference.log_likelihood(*_problem(*operands, **attributes))]


def _grad_reference(*operands, **attributes):
    topology, planes, *lengths = _problem(*operands, **attributes)
    loss, gradients = reference_grad(topology, planes, *lengths)
    return [loss, *(gradients[slot] for slot in planes)]  # JAX sorts the keys of a dict: "10" before "2"


def _loss_tpu(*operands, interpret, **attributes):
    if 0 in operands[0].shape:
        return _loss_reference(*operands, **attributes)
    return [pallas.value(*_problem(*operands, **attributes), interpret=interpret)]


def _grad_tpu(*operands, interpret, **attributes):
    if 0 in operands[0].shape:
        return _grad_reference(*operands, **attributes)
    topology, planes, *lengths = _problem(*operands, **attributes)
    loss, gradients = pallas.value_and_grad(topology, planes, *lengths, interpret=interpret)
    return [loss, *(gradients[slot] for slot in planes)]


def _is_unit_step(**attributes):
    return any(attributes == _attributes(topology) for topology in (STANDARD, MONOTONIC))


def _workspace(sizes, first, *_, gradient, **attributes):
    """Returns elements for each sequence. Dimensions may be symbols, so the kernels' module only gives the table."""
    extents = first.shape[-2:]
    terms = sizes(_is_unit_step(**attributes), len(attributes["dt"]), gradient)
    blocks = (
        elements * math.prod(-(-n // size) for n, size in zip(extents, block) if size) for elements, *block in terms
    )
    return (sum(blocks) + 1) // 2 * 2


def _unsupported(limits, first, num_frames, *_, **attributes):
    frames, columns = first.shape[-2:]
    dt, du, planes = attributes["dt"], attributes["du"], 1 + max(*attributes["plane"], *attributes["other"])
    return _xla.beyond(
        limits,
        ("arc_labels", "labels written by an arc", max(du)),
        ("arcs", "arcs", len(dt)),
        ("arcs", "planes of arcs", planes),
        ("lattice_nodes", "nodes [T, U + 1]", frames * columns),
        ("diagonals", "diagonals", frames + columns),
        ("sequences", "sequences", math.prod(num_frames.shape)),
        *([("unit_columns", "columns U + 1", columns)] if _is_unit_step(**attributes) else []),
        ("columns_by_planes", "columns U + 1, times planes of arcs", columns * planes),
        ("columns_by_diagonals", "columns U + 1, times diagonals of an arc", columns * max(map(operator.add, dt, du))),
        ("bytes", "bytes a number (float32)", first.dtype.itemsize),
    )


_loss_kernel = _xla.Kernel(
    "jax_rnnt_lattice_loss",
    reference=_loss_reference,
    results=lambda first, *_, **__: [((), first.dtype)],
    workspace=functools.partial(_workspace, gradient=False),
    unsupported=_unsupported,
    tpu=_loss_tpu,
    tpu_limits=pallas.LIMITS,
)
_grad_kernel = _xla.Kernel(
    "jax_rnnt_lattice_grad",
    reference=_grad_reference,
    results=lambda first, *others, **__: [((), first.dtype)] + [(first.shape[-2:], first.dtype)] * (len(others) - 1),
    aliases=lambda operands: {0: 1} | {i: i - 1 for i in range(3, operands)},
    workspace=functools.partial(_workspace, gradient=True),
    unsupported=_unsupported,
    tpu=_grad_tpu,
    tpu_limits=pallas.LIMITS,
)


def value(topology: Topology, arcs, num_frames, num_labels, *, strict=False):
    """Returns -log likelihood [...] by the kernel; `arcs` as for `log_likelihood`."""
    operands, params = _call(topology, arcs, num_frames, num_labels)
    return _loss_kernel(*operands, strict=strict, **params)[0]


def value_and_grad(topology: Topology, arcs, num_frames, num_labels, *, strict=False):
    """Returns (`value`, {slot: its gradient, minus the posterior of the slot's arcs [..., T, U1]})."""
    operands, params = _call(topology, arcs, num_frames, num_labels)
    loss, *planes = _grad_kernel(*operands, strict=strict, alias=True, **params)
    return loss, dict(zip(slots(topology), planes))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 4))
def _log_likelihood(topology, arcs, num_frames, num_labels, strict):
    return -value(topology, arcs, num_frames, num_labels, strict=strict)


@_log_likelihood.defjvp
def _(topology, strict, primals, tangents):
    arcs, num_frames, num_labels = primals
    loss, gradients = value_and_grad(topology, arcs, num_frames, num_labels, strict=strict)
    used = inside(num_frames, num_labels, *next(iter(arcs.values())).shape[-2:])
    # Selected before the product, as an arc of -inf, or outside, may have any tangent.
    terms = (jnp.where(used & (g != 0), tangents[0][slot], 0) * g for slot, g in gradients.items())
    return -loss, -functools.reduce(jnp.add, (jnp.sum(x, (-1, -2)) for x in terms))


@in_name_of("log_likelihood")
def log_likelihood(
    topology: Topology,
    arc_log_probs: dict[str, jax.Array],
    num_frames: jax.Array,
    num_labels: jax.Array,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the log of the summed weight of all paths from (0, 0) to (T_b, U_b).

    T frames, U labels, U1 = U + 1; `...` is any number of batch dimensions. Node (t, u): t frames read, u labels
    written. With w(a) the exponential of the arc log-probability of arc a::

        alpha(0, 0) = 1
        alpha(t, u) = sum over arcs a = (dt, du) of alpha(t - dt, u - du) * w(a)(t - dt, u - du)

    The result is log alpha(T_b, U_b); only arcs that may end a path enter (T_b, U_b). No path uses arcs that leave
    nodes outside the lengths, whatever they hold. Arcs need not be normalised.

    Parameters
    ----------
    topology : tuple of Arc
        The table of arcs: `STANDARD`, `MONOTONIC`, `multi_blank(...)`, `token_and_duration(...)`,
        `TransducerLoss.topology`, or your own.
    arc_log_probs : dict of str to Array, floating [..., T, U1]
        Log-probability of each slot's arcs leaving each node, in nats; -inf forbids them.
    num_frames, num_labels : Array, integer [...]
        Lengths 0 <= T_b <= T and 0 <= U_b <= U of each sequence.
    implementation : {None, "kernel", "reference"}
        "kernel": the compiled kernel, an error where there is none; "reference": a scan in plain JAX; None: the kernel
        where there is one. Both are differentiable any number of times, in forward and reverse mode. Another kernel
        computes the first derivative, the posteriors of the arcs; higher derivatives are those of the reference.

    Returns
    -------
    Array, float32 (float64 for float64 arcs) [...]
        In nats; -inf where there is no path (its gradient is zero), 0 for T_b = U_b = 0, NaN where an arc inside the
        lengths is NaN or +inf or a length is out of range. The derivative with respect to an arc is its posterior.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message.
    NotImplementedError
        For implementation="kernel" where there is none.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import lattices
    >>> arcs = {"blank": jnp.log(jnp.full((3, 2), 0.5)), "label": jnp.log(jnp.full((3, 2), 0.5))}
    >>> score = lattices.log_likelihood(lattices.STANDARD, arcs, jnp.array(3), jnp.array(1))
    >>> round(float(jnp.exp(score)), 4)  # three paths of four arcs
    0.1875
    """
    _checks.choice("implementation", implementation, _checks.IMPLEMENTATIONS)
    if not isinstance(topology, Sequence) or not all(isinstance(arc, Arc) for arc in topology):
        raise _checks.bad_type(f"topology must be a tuple of Arc, got {topology!r}.")
    if not topology:
        raise _checks.bad_value(f"topology must hold one Arc at least, got {topology!r}.")
    if not isinstance(arc_log_probs, Mapping):
        raise _checks.bad_type(f"arc_log_probs must be a dict of slot to Array, got {arc_log_probs!r}.")
    topology = tuple(topology)  # hashable
    wanted = slots(topology)
    if missing := set(wanted) - set(arc_log_probs):
        raise _checks.bad_value(f"arc_log_probs must hold every slot of the topology; missing: {sorted(missing)}.")
    planes = {
        slot: _checks.floating(f"arc_log_probs[{slot!r}]", arc_log_probs[slot], 2, "[..., T, U1]") for slot in wanted
    }
    shapes = {slot: x.shape for slot, x in planes.items()}
    if len(set(shapes.values())) != 1 or shapes[wanted[0]][-1] < 1:
        raise _checks.bad_value(f"arc_log_probs must all have one shape [..., T, U1] with U1 >= 1, got {shapes}.")
    wide = any(x.dtype == np.float64 for x in planes.values())
    planes = {slot: x.astype(np.float64 if wide else np.float32) for slot, x in planes.items()}
    (*batch, frames, columns) = shapes[wanted[0]]
    num_frames, num_labels = (
        _checks.integers(argument, x, tuple(batch), "[...]")
        for argument, x in (("num_frames", num_frames), ("num_labels", num_labels))
    )
    *each, num_frames, num_labels = _xla.split_alike(len(batch), *planes.values(), num_frames, num_labels)
    planes = dict(zip(planes, each))
    bad = (num_frames < 0) | (num_frames > frames) | (num_labels < 0) | (num_labels >= columns)
    num_frames, num_labels = (jnp.where(bad, 0, n) for n in (num_frames, num_labels))
    arguments = topology, planes, num_frames, num_labels
    if implementation == "reference":
        score = reference.log_likelihood(*arguments)
    else:
        score = _log_likelihood(*arguments, implementation == "kernel")
    return jnp.where(bad, jnp.nan, score)
