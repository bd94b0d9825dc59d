"""The unit-step lattices by kernel: arc log-probabilities -> loss and its gradient, minus the arc posteriors."""

import jax
import jax.numpy as jnp

from jax_rnnt import _ffi
from jax_rnnt.lattices.reference import inside, log_likelihood
from jax_rnnt.lattices.topology import MONOTONIC, STANDARD

_TOPOLOGIES = (STANDARD, MONOTONIC)  # in the order of the kernels' enum


def lattice_loss(log_blank, log_label, num_frames, num_labels, *, topology=STANDARD):
    """-log likelihood [...] in plain JAX, differentiable any number of times in both modes."""
    return -log_likelihood(topology, {"blank": log_blank, "label": log_label}, num_frames, num_labels)


def lattice_grad(log_blank, log_label, num_frames, num_labels, *, topology=STANDARD):
    """(loss [...], dloss/dlog_blank, dloss/dlog_label [..., T, U1]) in plain JAX."""

    def total(blank, label):
        loss = lattice_loss(blank, label, num_frames, num_labels, topology=topology)
        return jnp.sum(loss), loss

    gradients, loss = jax.grad(total, (0, 1), has_aux=True)(log_blank, log_label)
    used = inside(num_frames, num_labels, *log_blank.shape[-2:])
    nan = jnp.isnan(loss)[..., None, None]
    return loss, *(jnp.where(used, jnp.where(nan, jnp.nan, g), 0) for g in gradients)


def _loss_reference(*operands, topology):
    return [lattice_loss(*operands, topology=_TOPOLOGIES[topology])]


def _grad_reference(*operands, topology):
    return lattice_grad(*operands, topology=_TOPOLOGIES[topology])


def _cpu_workspace(log_blank, *_):
    """Mantissa and exponent of alpha in every eighth frame, from which beta's sweep restarts."""
    frames, columns = log_blank.shape[-2:]
    return 2 * -(-frames // 8) * columns


def _cuda_workspace(log_blank, *_):
    """Both planes in the order of diagonals, running values of the sweeps, a flag per tile of 32 by 32 nodes."""
    frames, columns = log_blank.shape[-2:]
    elements = 2 * frames * columns + 12 * columns + -(-frames // 32) * -(-columns // 32)
    return (elements + 1) // 2 * 2


_loss_kernel = _ffi.define(
    "jax_rnnt_lattice_loss",
    reference=_loss_reference,
    results=lambda log_blank, *_, **__: [((), log_blank.dtype)],
    workspace={"cpu": lambda *_: 0, "cuda": _cuda_workspace},
)
_grad_kernel = _ffi.define(
    "jax_rnnt_lattice_grad",
    reference=_grad_reference,
    results=lambda log_blank, *_, **__: [
        ((), log_blank.dtype),
        (log_blank.shape[-2:], log_blank.dtype),
        (log_blank.shape[-2:], log_blank.dtype),
    ],
    aliases={0: 1, 1: 2},
    workspace={"cpu": _cpu_workspace, "cuda": _cuda_workspace},
)


def loss(log_blank, log_label, num_frames, num_labels, *, topology=STANDARD, strict=False):
    """`lattice_loss` by the kernel."""
    operands = log_blank, log_label, num_frames, num_labels
    index = _TOPOLOGIES.index(topology)
    return _loss_kernel(*operands, num_batch_dims=log_blank.ndim - 2, strict=strict, topology=index)[0]


def grad(log_blank, log_label, num_frames, num_labels, *, topology=STANDARD, strict=False):
    """`lattice_grad` by the kernel."""
    operands = log_blank, log_label, num_frames, num_labels
    index = _TOPOLOGIES.index(topology)
    params = dict(num_batch_dims=log_blank.ndim - 2, strict=strict, alias=True, topology=index)
    return tuple(_grad_kernel(*operands, **params))
