"""Lattices by kernel: arc log-probabilities -> loss and its gradient, minus the arc posteriors. Any topology.

There are two kernels behind one pair of custom calls: one for unit steps (standard, monotonic), one for arcs that skip
frames (multi-blank, token and duration).
"""

import math

import jax
import jax.numpy as jnp

from jax_rnnt import _ffi
from jax_rnnt.lattices.reference import inside, log_likelihood
from jax_rnnt.lattices.topology import MONOTONIC, STANDARD, Arc, Topology, bounded, slots

_MOST_ARCS = 64  # and planes: kMaxArcs of the kernels


def reference_grad(topology: Topology, arcs, num_frames, num_labels):
    """(-log likelihood [...], {slot: its gradient [..., T, U1]}) in plain JAX."""

    def total(arcs):
        loss = -log_likelihood(topology, arcs, num_frames, num_labels)
        return jnp.sum(loss), loss

    gradients, loss = jax.grad(total, has_aux=True)(arcs)
    first, *_ = arcs.values()
    used = inside(num_frames, num_labels, *first.shape[-2:])
    nan = jnp.isnan(loss)[..., None, None]
    return loss, {slot: jnp.where(used, jnp.where(nan, jnp.nan, g), 0) for slot, g in gradients.items()}


# Operands of the kernels: a plane for each slot, with the lengths behind the first; attributes: the table of arcs.


def _call(topology, arcs, num_frames, num_labels):
    """(operands, attributes)"""
    first, *others = (arcs[slot] for slot in slots(topology))
    attributes = _attributes(bounded(topology, first.shape[-2]))
    return (first, num_frames, num_labels, *others), dict(num_batch_dims=num_frames.ndim, **attributes)


def _attributes(topology):
    index = {slot: i for i, slot in enumerate(slots(topology))} | {None: -1}
    table = ((arc.dt, arc.du, int(arc.may_end), index[arc.slot], index[arc.other]) for arc in topology)
    return dict(zip(("dt", "du", "may_end", "plane", "other"), zip(*table)))


def _problem(first, num_frames, num_labels, *others, dt, du, may_end, plane, other):
    """What `log_likelihood` takes, from operands and attributes."""
    table = zip(plane, dt, du, map(bool, may_end), (None if p < 0 else str(p) for p in other))
    topology = tuple(Arc(str(p), *arc) for p, *arc in table)
    return topology, {str(p): x for p, x in enumerate((first, *others))}, num_frames, num_labels


def _loss_reference(*operands, **attributes):
    return [-log_likelihood(*_problem(*operands, **attributes))]


def _grad_reference(*operands, **attributes):
    topology, planes, *lengths = _problem(*operands, **attributes)
    loss, gradients = reference_grad(topology, planes, *lengths)
    return [loss, *(gradients[slot] for slot in planes)]  # whose own order is that of JAX: "10" before "2"


def _is_unit_step(**attributes):
    return any(attributes == _attributes(topology) for topology in (STANDARD, MONOTONIC))


def _cpu_loss_workspace(first, *_, **attributes):
    return 0 if _is_unit_step(**attributes) else _cpu_grad_workspace(first, **attributes)


def _cpu_grad_workspace(first, *_, **attributes):
    """Mantissa and exponent of alpha: unit steps, in every eighth frame, from which beta's sweep restarts."""
    frames, columns = first.shape[-2:]
    return 2 * -(-frames // 8) * columns if _is_unit_step(**attributes) else 2 * frames * (columns + 32)


def _cuda_workspace(first, *_, **attributes):
    """Unit steps: both planes in the order of diagonals, running values of the sweeps; else all arcs, alpha and beta.
    A flag per tile of 32 by 32 nodes."""
    frames, columns = first.shape[-2:]
    nodes, tiles, arcs = frames * columns, -(-frames // 32) * -(-columns // 32), len(attributes["dt"])
    elements = 2 * nodes + 12 * columns + tiles if _is_unit_step(**attributes) else (4 + arcs) * nodes + arcs * tiles
    return (elements + 1) // 2 * 2


def _unsupported_arcs(*, dt, du, plane, other, **_):
    labels = ("labels written by an arc", max(du), 1)
    return _ffi.beyond(labels, ("arcs", len(dt), _MOST_ARCS), ("planes of arcs", 1 + max(*plane, *other), _MOST_ARCS))


def _unsupported(kernels, first, num_frames, *_, **attributes):
    reason = _unsupported_arcs(**attributes)
    if reason or kernels != "cuda":
        return reason
    frames, columns = first.shape[-2:]
    limits = [
        ("nodes [T, U + 1]", frames * columns, (1 << 30) - 1),  # int32
        ("diagonals", frames + columns, (1 << 29) - 1),
        ("sequences", math.prod(num_frames.shape), (1 << 31) - 1),
    ]
    if _is_unit_step(**attributes):  # 144 bytes of shared memory for 32 columns, of the 99 KiB that every device has
        limits.append(("columns U + 1", columns, 22528))
    return _ffi.beyond(*limits)


_loss_kernel = _ffi.define(
    "jax_rnnt_lattice_loss",
    reference=_loss_reference,
    results=lambda first, *_, **__: [((), first.dtype)],
    workspace={"cpu": _cpu_loss_workspace, "cuda": _cuda_workspace},
    unsupported=_unsupported,
)
_grad_kernel = _ffi.define(
    "jax_rnnt_lattice_grad",
    reference=_grad_reference,
    results=lambda first, *others, **__: [((), first.dtype)] + [(first.shape[-2:], first.dtype)] * (len(others) - 1),
    aliases={0: 1} | {k + 2: k + 1 for k in range(1, _MOST_ARCS)},
    workspace={"cpu": _cpu_grad_workspace, "cuda": _cuda_workspace},
    unsupported=_unsupported,
)


def supported(topology: Topology, platform: str) -> bool:
    """Whether a platform ("cpu" or "cuda") has a kernel for this topology."""
    kernels = _ffi.KERNELS.get(platform)
    return kernels is not None and _unsupported_arcs(**_attributes(topology)) is None


def value(topology: Topology, arcs, num_frames, num_labels, *, strict=False):
    """-log likelihood [...] by the kernel; `arcs` as for `log_likelihood`."""
    operands, params = _call(topology, arcs, num_frames, num_labels)
    return _loss_kernel(*operands, strict=strict, **params)[0]


def value_and_grad(topology: Topology, arcs, num_frames, num_labels, *, strict=False):
    """(`value`, {slot: its gradient, minus the posterior of the slot's arcs [..., T, U1]})."""
    operands, params = _call(topology, arcs, num_frames, num_labels)
    loss, *planes = _grad_kernel(*operands, strict=strict, alias=True, **params)
    return loss, dict(zip(slots(topology), planes))
