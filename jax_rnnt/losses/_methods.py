"""The methods of a loss as functions: emission, adjustments and lattice in one program, with one fused gradient.

Of one sequence: z its logits, l(z) the planes of the emission, a(l, w) the arcs, which adjustments with leaves w of the
loss make of them, L(a) the loss, c the cotangent that comes in (docs/gradient.md). The lattice gives dL/da = -gamma,
minus the posteriors. By the chain rule

    dL/dl = -(da/dl)^T gamma               planes [T, U1], in the forward pass: c is not needed
    dz    = c clip((dl/dz)^T dL/dl)        in the backward pass, by one kernel that reads z and writes dz over it
    dw    = sum over sequences of -(da/dw)^T (c gamma)

So alpha, beta and gamma are used up in the forward pass; dL/dl and `norm` are the residuals. For a softmax the second
line is c clip(dL/dl[k] - softmax(z)[k] sum of dL/dl), with dL/dl[k] = 0 for classes that no arc has.

Chained VJPs of the stages would multiply by c before the clip, which is not linear: `emissions._emission`'s
`clip_and_scale`. The third line is linear in c and sums over sequences, so there c comes first, and gamma waits for it.

`loss` is a `TransducerLoss`, a pytree: its leaves are operands, so changing one retraces nothing. `emission` is static.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_rnnt import _pytree
from jax_rnnt._xla import named, vary_together
from jax_rnnt.emissions._emission import has_nan, inside_targets, isolate, scale_cotangent, widened
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices import _order as order
from jax_rnnt.lattices import _reference as reference
from jax_rnnt.lattices._topology import expanded
from jax_rnnt.lattices._viterbi import best_path
from jax_rnnt.losses._adjustments import adjust, frame
from jax_rnnt.losses._composition import Alignment


def _strict(loss) -> bool:
    return loss.implementation == "kernel"


def _adjust_isolated(loss, planes, num_frames, num_labels, windows, closed=True):
    """(arcs, sequences with a NaN in a plane). Such sequences add nothing to the gradient of the loss's leaves."""
    bad = has_nan(planes)
    isolated = {slot: isolate(x, bad) for slot, x in planes.items()}
    return adjust(loss, isolated, num_frames, num_labels, windows, closed), bad


def _reference(emission, loss, logits, placed, num_frames, num_labels, windows):
    """Losses [...] in plain JAX."""
    arcs, bad = _adjust_isolated(loss, emission.reference(logits, placed), num_frames, num_labels, windows)
    losses = 0 - reference.log_likelihood(loss.compose().topology, arcs, num_frames, num_labels)
    return jnp.where(bad, jnp.nan, losses)


def _clamp(loss, cotangent):
    """The clamp of each sequence; <= 0: off."""
    clamp = -1.0 if loss.clamp is None else loss.clamp
    return jnp.broadcast_to(jnp.asarray(clamp, cotangent.dtype), cotangent.shape)


@jax.custom_vjp
def _reference_clamped(emission, loss, logits, placed, num_frames, num_labels, windows):
    return _reference(emission, loss, logits, placed, num_frames, num_labels, windows)


def _reference_clamped_fwd(emission, loss, logits, *others):
    # Clipped and scaled in float32, as by the kernels: float16 does not hold every cotangent.
    losses, vjp = jax.vjp(lambda loss, logits: _reference(emission, loss, logits, *others), loss, widened(logits))
    return losses, (emission, loss, logits, others[0], vjp, losses)


def _reference_clamped_bwd(residuals, cotangent):
    emission, loss, logits, placed, vjp, losses = residuals
    _, unit = vjp(vary_together(jnp.ones_like(losses), cotangent)[0])
    grad_loss, _ = vjp(cotangent)
    gradient = emission.clip_and_scale(unit, placed, cotangent, _clamp(loss, cotangent))
    return None, grad_loss, jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, logits), *[None] * 4


_reference_clamped.defvjp(_reference_clamped_fwd, _reference_clamped_bwd)


@jax.custom_vjp
def _fused(emission, loss, logits, placed, num_frames, num_labels, windows):
    """Losses [...] by kernel: reads the logits once."""
    planes, _ = emission.forward(logits, placed, strict=_strict(loss))
    arcs = adjust(loss, planes, num_frames, num_labels, windows)
    return lattice.value(loss.compose().topology, arcs, num_frames, num_labels, strict=_strict(loss))


def _fused_fwd(emission, *primals):
    # Whether somebody asks for the gradient of a leaf that acts on the planes. That of clamp and FastEmit is 0.
    learned = any(x.perturbed for x in jax.tree.leaves(_pytree.replace(primals[0], clamp=None, fastemit_lambda=None)))
    loss, logits, placed, num_frames, num_labels, windows = jax.tree.map(lambda x: x.value, primals)
    planes, saved = emission.forward(logits, placed, strict=_strict(loss))

    def adjusted(planes, loss):
        if learned:
            return _adjust_isolated(loss, planes, num_frames, num_labels, windows)
        return adjust(loss, planes, num_frames, num_labels, windows), None

    arcs, pullback, bad = jax.vjp(adjusted, planes, loss, has_aux=True)
    topology = loss.compose().topology
    losses, gradients = lattice.value_and_grad(topology, arcs, num_frames, num_labels, strict=_strict(loss))
    losses = losses if bad is None else jnp.where(bad, jnp.nan, losses)
    cotangents, _ = pullback(gradients)
    # All sequences share the leaves and each has its own cotangent, so the leaves' gradient waits for it.
    later = (pullback, gradients, bad) if learned else None
    # A policy of jax.checkpoint that saves this name recomputes the logits alone.
    name = functools.partial(named, name="rnnt_residuals")
    losses, saved, cotangents, later = jax.tree.map(name, (losses, saved, cotangents, later))  # jax 0.6: arrays only
    return losses, (emission, loss, logits, placed, saved, cotangents, later)


def _fused_bwd(residuals, cotangent):
    emission, loss, logits, placed, saved, cotangents, later = residuals
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros(cotangent.shape, cotangent.dtype)
    grad_loss = None
    if later is not None:
        pullback, gradients, bad = later
        good = {slot: jnp.where(bad[..., None, None], 0, g) for slot, g in gradients.items()}
        _, grad_loss = pullback({slot: scale_cotangent(g, cotangent) for slot, g in good.items()})
    arguments = logits, placed, saved, cotangents, cotangent, _clamp(loss, cotangent)
    gradient = emission.backward(*arguments, strict=_strict(loss), alias=loss.inplace)
    return None, grad_loss, gradient, *[None] * 4


_fused.defvjp(_fused_fwd, _fused_bwd, symbolic_zeros=True)


@jax.custom_vjp
def _planes(emission, loss, logits, placed):
    """Planes by slot, by kernel. Their gradient reads the logits once more, however many uses the planes have."""
    return emission.forward(logits, placed, strict=_strict(loss))[0]


def _planes_fwd(emission, loss, logits, placed):
    planes, saved = emission.forward(logits, placed, strict=_strict(loss))
    return planes, (emission, loss, logits, placed, saved)


def _planes_bwd(residuals, cotangents):
    emission, loss, logits, placed, saved = residuals
    first = next(iter(cotangents.values()))
    scale = jnp.ones_like(first[..., 0, 0]) if first.size else jnp.ones(first.shape[:-2], first.dtype)
    arguments = logits, placed, saved, cotangents, scale, -scale
    return None, None, emission.backward(*arguments, strict=_strict(loss), alias=loss.inplace), None


_planes.defvjp(_planes_fwd, _planes_bwd)


def _nonnegative(loss, emission, losses, targets, target_lengths):
    """Raises losses [...] or [..., U] below 0 to 0, with an unchanged gradient, where no weight exceeds 1.

    Rounding may lift a likelihood of 1 above 1. Sequences with a label that equals a blank stay as they are: both arcs
    count, so the likelihood may exceed 1.
    """
    bounded = loss.compose().bounded
    if bounded is False or not emission.rows.normalized:
        return losses
    bounded = bounded if loss.delay_penalty is None else bounded & (loss.delay_penalty == 0)
    is_blank = functools.reduce(jnp.logical_or, (targets == blank for blank in emission.rows.blanks))
    twice = jnp.any(inside_targets(targets, target_lengths) & is_blank, -1)
    twice = twice.reshape(twice.shape + (1,) * (losses.ndim - twice.ndim))
    below = jax.lax.stop_gradient(jnp.where(twice | ~(losses < 0), 0, losses))
    return losses - below if bounded is True else jnp.where(bounded, losses - below, losses)


def _prepare(loss, emission, logits, targets, logit_lengths, target_lengths, windows) -> tuple[Any, ...]:
    """((loss, logits, placed, num_frames, num_labels, windows), bad [...]) for the computation.

    A sequence with lengths or labels out of range is marked bad and gets T_b = U_b = 0: none of its rows is read, and
    its gradient is zero.
    """
    logits, placed, *lengths, bad = emission.prepare(logits, targets, logit_lengths, target_lengths)
    windows = None if windows is None else emission.exchange.of_own(windows)
    # Logits first: its sharding and varying axes are those of the result.
    (rows, rows_structure), (others, structure) = map(jax.tree.flatten, ((logits, placed), (*lengths, windows, loss)))
    logits, placed = jax.tree.unflatten(rows_structure, vary_together(*rows, like=others))
    varied = vary_together(*others, like=rows, without=emission.exchange.axes)
    num_frames, num_labels, windows, loss = jax.tree.unflatten(structure, varied)
    return (loss, logits, placed, num_frames, num_labels, windows), bad


def reduce(losses: jax.Array, num_labels: jax.Array, reduction: str) -> jax.Array:
    """ "none", "mean" over sequences, "sum", "mean_target" or "mean_volume"; an empty batch gives 0.

    mean_target is the mean of loss_b / max(U_b, 1); mean_volume is the sum of the losses / max(sum of U_b, 1).
    """
    count = max(losses.size, 1)
    match reduction:
        case "none":
            return losses
        case "sum":
            return jnp.sum(losses)
        case "mean":
            return jnp.sum(losses) / count
        case "mean_target":
            return jnp.sum(losses / jnp.maximum(num_labels, 1).astype(losses.dtype)) / count
        case "mean_volume":
            return jnp.sum(losses) / jnp.maximum(jnp.sum(num_labels), 1).astype(losses.dtype)
        case _:
            raise AssertionError(reduction)


_jit = functools.partial(jax.jit, static_argnums=1)


@_jit
def loss_of_batch(loss, emission, logits, targets, logit_lengths, target_lengths, windows):
    """The reduced loss."""
    problem = logits, targets, logit_lengths, target_lengths, windows
    (varied, logits, *lattice_arguments), bad = _prepare(loss, emission, *problem)
    function: Callable[..., jax.Array] = _fused
    if loss.implementation == "reference":  # differentiable in forward mode, unless it clips
        function = _reference_clamped if emission.rows.clips and loss.clamp is not None else _reference
    losses = function(emission, varied, logits, *lattice_arguments)
    losses = emission.exchange.joined(jnp.where(bad, jnp.nan, losses))
    losses = _nonnegative(loss, emission, losses, targets, target_lengths)
    return reduce(losses, target_lengths, loss.reduction)


def _plain_planes(loss, emission, logits, placed):
    """Planes by slot, without the fused gradient."""
    if loss.implementation == "reference":
        return emission.reference(logits, placed)
    return _planes(emission, jax.tree.map(lambda _: None, loss), logits, placed)  # of its static fields alone


def _lattice(loss, emission, *problem):
    """(topology, arcs by slot, num_frames, num_labels, sequences that are NaN, ends) for methods other than the loss.

    `ends` are the arcs without what must follow a label, if they differ.
    """
    # FastEmit acts on the loss's gradient alone.
    loss = _pytree.replace(loss, fastemit_lambda=None)
    (loss, logits, placed, num_frames, num_labels, windows), bad = _prepare(loss, emission, *problem)
    planes, composition = _plain_planes(loss, emission, logits, placed), loss.compose()
    lengths_and_windows = num_frames, num_labels, windows
    arcs, nan = _adjust_isolated(loss, planes, *lengths_and_windows)
    ends = _adjust_isolated(loss, planes, *lengths_and_windows, closed=False)[0] if composition.closing else None
    return composition.topology, arcs, num_frames, num_labels, bad | nan, ends


@_jit
def posteriors(loss, emission, *problem):
    """(blank, label) posteriors [..., T, U1], each the sum over all arcs of its kind that leave a node.

    NaN for a sequence whose lengths or labels are out of range.
    """
    blank, label = map(emission.exchange.joined_planes, _posteriors(loss, emission, *problem))
    return blank, label


def _posteriors(loss, emission, *problem):
    topology, arcs, num_frames, num_labels, bad, _ = _lattice(loss, emission, *problem)
    if loss.implementation == "reference":
        _, gradients = lattice.reference_grad(topology, arcs, num_frames, num_labels)
    else:
        _, gradients = lattice.value_and_grad(topology, arcs, num_frames, num_labels, strict=_strict(loss))

    def kind(name):
        zero = jnp.zeros_like(next(iter(gradients.values())))
        total = sum((g for slot, g in gradients.items() if slot.startswith(name)), zero)
        return jnp.where(bad[..., None, None], jnp.nan, 0 - total)  # 0 and no -0

    return kind("blank"), kind("label")


@_jit
def label_frames(loss, emission, *problem):
    """The expected frame of every label, [..., U]."""
    label = _posteriors(loss, emission, *problem)[1][..., :-1]
    return emission.exchange.joined(order.total(frame(label).astype(label.dtype) * label, -2))


@_jit
def latency(loss, emission, logits, targets, logit_lengths, target_lengths, windows):
    """The expected latency, reduced."""
    _, label = _posteriors(loss, emission, logits, targets, logit_lengths, target_lengths, windows)
    total = emission.exchange.joined(order.total(order.total((frame(label) + 1).astype(label.dtype) * label, -2)))
    losses = total / jnp.maximum(target_lengths, 1).astype(total.dtype)
    return reduce(losses, target_lengths, loss.reduction)


@_jit
def align(loss, emission, *problem):
    """The best path."""
    *arguments, bad, _ = _lattice(loss, emission, *problem)
    score, frames = best_path(*arguments)
    found = jnp.where(bad, jnp.nan, score), jnp.where(bad[..., None], -1, frames)
    return Alignment(*map(emission.exchange.joined, found))


@_jit
def label_log_probs(loss, emission, logits, targets, logit_lengths, target_lengths, windows):
    """log P(y_u | y_<u, x) of every label, [..., U]."""
    problem = logits, targets, logit_lengths, target_lengths, windows
    *arguments, bad, ends = _lattice(loss, emission, *problem)
    losses = jnp.where(bad[..., None], jnp.nan, 0 - reference.label_log_probs(*arguments, ends))
    losses = emission.exchange.joined(losses)
    return 0 - _nonnegative(loss, emission, losses, targets, target_lengths)


@_jit
def arc_log_probs(loss, emission, *problem):
    """{slot: log-probabilities [..., T, U1]} for the slots of the expanded topology."""
    (loss, logits, placed, num_frames, num_labels, windows), bad = _prepare(loss, emission, *problem)
    planes = adjust(loss, _plain_planes(loss, emission, logits, placed), num_frames, num_labels, windows)

    def masked(arc):
        x = arc.of(planes)
        inside = reference.inside(num_frames, num_labels - arc.du, *x.shape[-2:])  # a step may fill the rest
        return emission.exchange.joined_planes(jnp.where(bad[..., None, None], jnp.nan, jnp.where(inside, x, -jnp.inf)))

    topology = loss.compose().topology
    return {wide.slot: masked(arc) for arc, wide in zip(topology, expanded(topology), strict=True)}


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a loss: ``compute(loss, emission, logits, targets, both lengths, windows)`` makes its results."""

    name: str  # of `TransducerLoss`
    compute: Callable[..., Any]
    per_node: bool = False  # whether results are planes [..., T, U1]
    reduces: bool = False  # whether `loss.reduction` acts on it


LOSS = Method("__call__", loss_of_batch, reduces=True)
POSTERIORS = Method("posteriors", posteriors, per_node=True)
ALIGN = Method("align", align)
LABEL_FRAMES = Method("label_frames", label_frames)
LATENCY = Method("latency", latency, reduces=True)
LABEL_LOG_PROBS = Method("label_log_probs", label_log_probs)
ARC_LOG_PROBS = Method("arc_log_probs", arc_log_probs, per_node=True)
