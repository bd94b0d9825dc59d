"""A transducer loss is emission, seam, lattice: their composition, with the fused gradient.

The gradient is composed here and not by chaining the stages' own VJPs: the pullback through seam and lattice has the
unit cotangent, so the emission's backward kernel can clip the gradient of each sequence before the incoming cotangent
and the reduction multiply it, in its single pass over the logits.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_rnnt import seam
from jax_rnnt._reduce import reduce
from jax_rnnt._vma import vary_together
from jax_rnnt.emissions import softmax
from jax_rnnt.lattices import lattice
from jax_rnnt.lattices.reference import log_likelihood
from jax_rnnt.lattices.topology import STANDARD, Topology


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known when a loss is traced. Numbers that people schedule are operands instead: they retrace nothing."""

    blank: int
    normalize: bool = True
    topology: Topology = STANDARD
    reduction: str = "mean"
    implementation: str | None = None
    inplace: bool = True

    @property
    def emission(self) -> dict[str, Any]:
        return dict(blanks=(self.blank,), normalize=self.normalize)

    @property
    def strict(self) -> bool:
        return self.implementation == "kernel"


def _arcs(outputs):
    log_blank, log_label, lse = outputs
    return {"blank": log_blank, "label": log_label}, lse


def _reference(spec, logits, label, num_frames, num_labels, options):
    """Losses [...] in plain JAX."""
    arcs, _ = _arcs(softmax.softmax_emission(logits, label, num_frames, **spec.emission))
    arcs = seam.modify(arcs, num_frames, options)
    return -log_likelihood(spec.topology, arcs, num_frames, num_labels)


@jax.custom_vjp
def _reference_clamped(spec, logits, label, num_frames, num_labels, clamp, options):
    return _reference(spec, logits, label, num_frames, num_labels, options)


def _reference_clamped_fwd(spec, logits, label, num_frames, num_labels, clamp, options):
    loss, vjp = jax.vjp(lambda x: _reference(spec, x, label, num_frames, num_labels, options), logits)
    return loss, (vjp, loss, clamp)


def _reference_clamped_bwd(residuals, cotangent):
    vjp, loss, clamp = residuals
    (gradient,) = vjp(vary_together(jnp.ones_like(loss), cotangent)[0])
    bound = jnp.asarray(clamp, gradient.dtype)
    gradient = jnp.where(bound > 0, jnp.clip(gradient, -bound, bound), gradient)
    return None, gradient * cotangent[..., None, None, None].astype(gradient.dtype), *[None] * 5


_reference_clamped.defvjp(_reference_clamped_fwd, _reference_clamped_bwd)


def _emit(spec, logits, label, num_frames):
    return _arcs(softmax.forward(logits, label, num_frames, strict=spec.strict, **spec.emission))


@jax.custom_vjp
def _fused(spec, logits, label, num_frames, num_labels, clamp, options):
    """Losses [...] by kernel: reads the logits once."""
    arcs, _ = _emit(spec, logits, label, num_frames)
    arcs = seam.modify(arcs, num_frames, options)
    return lattice.value(spec.topology, arcs, num_frames, num_labels, strict=spec.strict)


def _fused_fwd(spec, logits, label, num_frames, num_labels, clamp, options):
    arcs, lse = _emit(spec, logits, label, num_frames)
    arcs, pullback = jax.vjp(lambda a: seam.modify(a, num_frames, options), arcs)
    loss, gradients = lattice.value_and_grad(spec.topology, arcs, num_frames, num_labels, strict=spec.strict)
    (cotangents,) = pullback(gradients)
    # For policies of jax.checkpoint: where these are saved, only what computes the logits runs again.
    name = functools.partial(checkpoint_name, name="rnnt_residuals")
    loss, lse, cotangents = jax.tree.map(name, (loss, lse, cotangents))  # jax 0.6 names single arrays only
    return loss, (spec, logits, label, num_frames, lse, cotangents, clamp)


def _fused_bwd(residuals, cotangent):
    spec, logits, label, num_frames, lse, arcs, clamp = residuals
    cotangents, clamp = (arcs["blank"], arcs["label"]), jnp.broadcast_to(jnp.asarray(clamp, lse.dtype), cotangent.shape)
    operands = logits, label, num_frames, lse, cotangents, cotangent, clamp
    return None, softmax.backward(*operands, strict=spec.strict, alias=spec.inplace, **spec.emission), *[None] * 5


_fused.defvjp(_fused_fwd, _fused_bwd)


def _used(targets, target_lengths):
    """bool [..., U]: which targets lie inside the lengths."""
    column = jax.lax.broadcasted_iota(jnp.int32, (1,) * target_lengths.ndim + targets.shape[-1:], target_lengths.ndim)
    return column < target_lengths[..., None]


def _nonnegative(losses, targets, target_lengths, blank):
    """The losses, at least 0 with an unchanged gradient: rounding must not make a likelihood of 1 a negative loss.

    A label that equals blank counts twice, so that the likelihood of its sequence may truly exceed 1.
    """
    twice = jnp.any(_used(targets, target_lengths) & (targets == blank), -1)
    below = jax.lax.stop_gradient(jnp.where(twice | ~(losses < 0), 0, losses))
    return losses - below


def prepare(targets, logit_lengths, target_lengths, frames, classes):
    """(label map, num_frames, num_labels, bad [...]): a sequence whose lengths or labels are out of range is emptied.

    Such a sequence becomes T_b = U_b = 0, so that nothing of it is read and its gradient is zero, and is marked bad.
    """
    labels = targets.shape[-1]
    bad = jnp.any(_used(targets, target_lengths) & ((targets < 0) | (targets >= classes)), -1)
    bad |= (logit_lengths < 0) | (logit_lengths > frames) | (target_lengths < 0) | (target_lengths > labels)
    num_frames, num_labels = (jnp.where(bad, 0, n) for n in (logit_lengths, target_lengths))
    return softmax.label_map(targets, num_labels), num_frames, num_labels, bad


@jax.jit
def loss(spec: Spec, logits, targets, logit_lengths, target_lengths, clamp, options):
    """The reduced loss. `clamp` is None where it is known to be off; `options` are the operands of `seam.modify`."""
    label, num_frames, num_labels, bad = prepare(
        targets, logit_lengths, target_lengths, logits.shape[-3], logits.shape[-1]
    )
    # Logits first: its sharding and varying axes are those of the result.
    logits, label, num_frames, num_labels = vary_together(logits, label, num_frames, num_labels)
    operands = spec, logits, label, num_frames, num_labels
    if spec.implementation == "reference" and clamp is None:
        losses = _reference(*operands, options)
    else:
        function = _reference_clamped if spec.implementation == "reference" else _fused
        losses = function(*operands, jnp.asarray(-1.0 if clamp is None else clamp), options)
    if spec.normalize and "delay_penalty" not in options:
        losses = _nonnegative(losses, targets, target_lengths, spec.blank)
    losses = jnp.where(bad, jnp.nan, losses)
    return reduce(losses, target_lengths, spec.reduction)


@jax.jit
def posteriors(spec: Spec, logits, targets, logit_lengths, target_lengths, options):
    """(blank, label) arc posteriors [..., T, U1]; NaN for a sequence whose lengths or labels are out of range."""
    label, num_frames, num_labels, bad = prepare(
        targets, logit_lengths, target_lengths, logits.shape[-3], logits.shape[-1]
    )
    logits, label, num_frames, num_labels = vary_together(logits, label, num_frames, num_labels)
    if spec.implementation == "reference":
        arcs, _ = _arcs(softmax.softmax_emission(logits, label, num_frames, **spec.emission))
        grad = lattice.reference_grad
    else:
        arcs, _ = _emit(spec, logits, label, num_frames)
        grad = functools.partial(lattice.value_and_grad, strict=spec.strict)
    arcs = seam.modify(arcs, num_frames, options)
    _, gradients = grad(spec.topology, arcs, num_frames, num_labels)
    return tuple(jnp.where(bad[..., None, None], jnp.nan, 0 - gradients[slot]) for slot in ("blank", "label"))
