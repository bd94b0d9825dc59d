"""Emission, adjustments and lattice as one function of the logits, with one fused gradient.

For one sequence: z its logits, l(z) the planes of the emission, a(l, w) the arcs, which adjustments with leaves w of
the loss make of them, L(a) the loss, c the cotangent that comes in (docs/gradient.md). The lattice gives dL/da =
-gamma, minus the posteriors. By the chain rule

    dL/dl = -(da/dl)^T gamma               planes [T, U1], in the forward pass: c is not needed
    dz    = c clip((dl/dz)^T dL/dl)        in the backward pass, by one kernel that reads z and writes dz over it
    dw    = sum over sequences of -(da/dw)^T (c gamma)

So alpha, beta and gamma are used up in the forward pass; dL/dl and `norm` are the residuals. For a softmax the second
line is c clip(dL/dl[k] - softmax(z)[k] sum of dL/dl), with dL/dl[k] = 0 for classes that no arc has.

Chained VJPs of the stages would multiply by c before the clip, which is not linear: `emissions._emission`'s
`clip_and_scale`. The third line is linear in c and sums over sequences, so there c comes first, and gamma waits for it.

`loss` is a `TransducerLoss`, a pytree: its leaves are operands, so changing one retraces nothing. `emission` is static.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from jax_rnnt import _pytree
from jax_rnnt._xla import named, vary_together
from jax_rnnt.emissions._emission import has_nan, isolate, scale_cotangent, widened
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices import _reference as reference
from jax_rnnt.losses._adjustments import adjust


def strict(loss) -> bool:
    return loss.implementation == "kernel"


def adjust_isolated(loss, planes, num_frames, num_labels, windows, closed=True):
    """Returns (arcs, sequences with a NaN in a plane). Such sequences add nothing to the gradient of the leaves."""
    bad = has_nan(planes)
    isolated = {slot: isolate(x, bad) for slot, x in planes.items()}
    return adjust(loss, isolated, num_frames, num_labels, windows, closed), bad


def _reference(emission, loss, logits, placed, num_frames, num_labels, windows):
    """Computes losses [...] in plain JAX."""
    arcs, bad = adjust_isolated(loss, emission.reference(logits, placed), num_frames, num_labels, windows)
    losses = 0 - reference.log_likelihood(loss.compose().topology, arcs, num_frames, num_labels)
    return jnp.where(bad, jnp.nan, losses)


def _clamp(loss, cotangent):
    """Returns the clamp of each sequence; <= 0 means off."""
    clamp = -1.0 if loss.clamp is None else loss.clamp
    return jnp.broadcast_to(jnp.asarray(clamp, cotangent.dtype), cotangent.shape)


@jax.custom_vjp
def _reference_clamped(emission, loss, logits, placed, num_frames, num_labels, windows):
    return _reference(emission, loss, logits, placed, num_frames, num_labels, windows)


def _reference_clamped_fwd(emission, loss, logits, *others):
    # Gradients are clipped and scaled in float32, as in the kernels: float16 does not hold every cotangent.
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
    """Computes losses [...] by kernel, which reads the logits once."""
    planes, _ = emission.forward(logits, placed, strict=strict(loss))
    arcs = adjust(loss, planes, num_frames, num_labels, windows)
    return lattice.value(loss.compose().topology, arcs, num_frames, num_labels, strict=strict(loss))


def _fused_fwd(emission, *primals):
    # True if somebody wants the gradient of a leaf that acts on the planes. That of clamp and FastEmit is 0.
    learned = any(x.perturbed for x in jax.tree.leaves(_pytree.replace(primals[0], clamp=None, fastemit_lambda=None)))
    loss, logits, placed, num_frames, num_labels, windows = jax.tree.map(lambda x: x.value, primals)
    planes, saved = emission.forward(logits, placed, strict=strict(loss))

    def adjusted(planes, loss):
        if learned:
            return adjust_isolated(loss, planes, num_frames, num_labels, windows)
        return adjust(loss, planes, num_frames, num_labels, windows), None

    arcs, pullback, bad = jax.vjp(adjusted, planes, loss, has_aux=True)
    topology = loss.compose().topology
    losses, gradients = lattice.value_and_grad(topology, arcs, num_frames, num_labels, strict=strict(loss))
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
    gradient = emission.backward(*arguments, strict=strict(loss), alias=loss.inplace)
    return None, grad_loss, gradient, *[None] * 4


_fused.defvjp(_fused_fwd, _fused_bwd, symbolic_zeros=True)


@jax.custom_vjp
def _planes(emission, loss, logits, placed):
    """Computes planes by slot, by kernel. Their gradient reads the logits once more, however often planes are used."""
    return emission.forward(logits, placed, strict=strict(loss))[0]


def _planes_fwd(emission, loss, logits, placed):
    planes, saved = emission.forward(logits, placed, strict=strict(loss))
    return planes, (emission, loss, logits, placed, saved)


def _planes_bwd(residuals, cotangents):
    emission, loss, logits, placed, saved = residuals
    first = next(iter(cotangents.values()))
    scale = jnp.ones_like(first[..., 0, 0]) if first.size else jnp.ones(first.shape[:-2], first.dtype)
    arguments = logits, placed, saved, cotangents, scale, -scale
    return None, None, emission.backward(*arguments, strict=strict(loss), alias=loss.inplace), None


_planes.defvjp(_planes_fwd, _planes_bwd)


def losses_of(emission, loss, *arrays) -> jax.Array:
    """Computes losses [...] from the arrays that `_methods` prepares."""
    if loss.implementation != "reference":
        return _fused(emission, loss, *arrays)
    # Only the reference without a clip is differentiable in forward mode.
    clips = emission.rows.clips and loss.clamp is not None
    return (_reference_clamped if clips else _reference)(emission, loss, *arrays)


def planes_of(emission, loss, logits, placed):
    """Computes planes by slot, for methods other than the loss."""
    if loss.implementation == "reference":
        return emission.reference(logits, placed)
    static = jax.tree.map(lambda _: None, loss)  # options act on arcs alone
    return _planes(emission, static, logits, placed)
