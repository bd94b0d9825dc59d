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

from jax_rnnt import _checks, seam
from jax_rnnt._reduce import reduce
from jax_rnnt._vma import vary_together
from jax_rnnt.emissions.emission import Emission, inside_targets, isolate, out_of_range, scale_cotangent, spoiled
from jax_rnnt.emissions.tiled import materialized, tiled
from jax_rnnt.emissions.virtual import Inquiry, JointLogits
from jax_rnnt.lattices import lattice
from jax_rnnt.lattices.reference import log_likelihood
from jax_rnnt.lattices.topology import STANDARD, Topology
from jax_rnnt.lattices.viterbi import best_path


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known when a loss is traced. Numbers that people schedule are operands instead: they retrace nothing.

    `bounded` tells that the likelihood is a probability, so that the loss cannot be negative.
    """

    emission: Emission
    topology: Topology = STANDARD
    steps: tuple[seam.Step, ...] = ()
    bounded: bool = True
    reduction: str = "mean"
    implementation: str | None = None
    inplace: bool = True

    @property
    def strict(self) -> bool:
        return self.implementation == "kernel"

    def modify(self, planes, num_frames, operands):
        """The arcs of the topology, from the planes of the emission."""
        return seam.modify(planes, num_frames, operands, self.steps)

    def modify_isolated(self, planes, num_frames, operands):
        """(the same, sequences with a NaN in their planes), which add nothing to gradients of the operands."""
        bad = spoiled(planes)
        planes = {slot: isolate(x, bad) for slot, x in planes.items()}
        return self.modify(planes, num_frames, operands), bad


def _reference(spec, logits, nodes, num_frames, num_labels, operands):
    """Losses [...] in plain JAX."""
    arcs, bad = spec.modify_isolated(spec.emission.reference(logits, nodes), num_frames, operands)
    return jnp.where(bad, jnp.nan, -log_likelihood(spec.topology, arcs, num_frames, num_labels))


def _split(operands):
    """(operands with a gradient, the others). FastEmit's scale acts on gradients alone, so it has no gradient."""
    floating = {name for name, x in operands.items() if jnp.issubdtype(jnp.result_type(x), jnp.floating)}
    learned = floating - {"fastemit_lambda"}
    return tuple({k: x for k, x in operands.items() if (k in learned) == kept} for kept in (True, False))


def _gradients(operands, of_learned):
    """Of all operands, None for those without a gradient."""
    return {name: of_learned.get(name) for name in operands}


@jax.custom_vjp
def _reference_clamped(spec, logits, nodes, num_frames, num_labels, clamp, operands):
    return _reference(spec, logits, nodes, num_frames, num_labels, operands)


def _reference_clamped_fwd(spec, logits, nodes, num_frames, num_labels, clamp, operands):
    learned, fixed = _split(operands)

    def function(logits, learned):
        return _reference(spec, logits, nodes, num_frames, num_labels, fixed | learned)

    loss, vjp = jax.vjp(function, logits, learned)
    return loss, (spec, nodes, vjp, loss, clamp, operands)


def _reference_clamped_bwd(residuals, cotangent):
    spec, nodes, vjp, loss, clamp, operands = residuals
    gradient, _ = vjp(vary_together(jnp.ones_like(loss), cotangent)[0])
    clamp = jnp.broadcast_to(jnp.asarray(clamp, cotangent.dtype), cotangent.shape)
    of_operands = _gradients(operands, vjp(cotangent)[1])
    return None, spec.emission.finish(gradient, nodes, cotangent, clamp), *[None] * 4, of_operands


_reference_clamped.defvjp(_reference_clamped_fwd, _reference_clamped_bwd)


@jax.custom_vjp
def _fused(spec, logits, nodes, num_frames, num_labels, clamp, operands):
    """Losses [...] by kernel: reads the logits once."""
    planes, _ = spec.emission.forward(logits, nodes, strict=spec.strict)
    arcs = spec.modify(planes, num_frames, operands)
    return lattice.value(spec.topology, arcs, num_frames, num_labels, strict=spec.strict)


def _fused_fwd(spec, logits, nodes, num_frames, num_labels, clamp, operands):
    planes, saved = spec.emission.forward(logits, nodes, strict=spec.strict)
    learned, fixed = _split(operands)

    def modify(planes, learned):
        if learned:
            return spec.modify_isolated(planes, num_frames, fixed | learned)
        return spec.modify(planes, num_frames, fixed), None

    arcs, pullback, bad = jax.vjp(modify, planes, learned, has_aux=True)
    loss, gradients = lattice.value_and_grad(spec.topology, arcs, num_frames, num_labels, strict=spec.strict)
    loss = loss if bad is None else jnp.where(bad, jnp.nan, loss)
    cotangents, _ = pullback(gradients)
    # Operands are shared by sequences, each of which has its own cotangent: their gradient has to wait for it.
    later = (pullback, gradients, bad) if learned else None
    # For policies of jax.checkpoint: where these are saved, only what computes the logits runs again.
    name = functools.partial(checkpoint_name, name="rnnt_residuals")
    loss, saved, cotangents, later = jax.tree.map(name, (loss, saved, cotangents, later))  # jax 0.6: arrays only
    return loss, (spec, logits, nodes, saved, cotangents, clamp, operands, later)


def _fused_bwd(residuals, cotangent):
    spec, logits, nodes, saved, cotangents, clamp, operands, later = residuals
    clamp = jnp.broadcast_to(jnp.asarray(clamp, cotangent.dtype), cotangent.shape)
    of_operands = dict.fromkeys(operands)
    if later is not None:
        pullback, gradients, bad = later
        scale = jnp.where(bad, 0, cotangent)
        scaled = {slot: scale_cotangent(g, scale) for slot, g in gradients.items()}
        of_operands = _gradients(operands, pullback(scaled)[1])
    arguments = logits, spec.emission.mute(nodes, cotangent), saved, cotangents, cotangent, clamp
    gradient = spec.emission.backward(*arguments, strict=spec.strict, alias=spec.inplace)
    return None, gradient, *[None] * 4, of_operands


_fused.defvjp(_fused_fwd, _fused_bwd)


def _nonnegative(losses, targets, target_lengths, blanks):
    """The losses, at least 0 with an unchanged gradient: rounding must not make a likelihood of 1 a negative loss.

    A label that equals a blank counts twice, so that the likelihood of its sequence may truly exceed 1.
    """
    is_blank = functools.reduce(jnp.logical_or, (targets == blank for blank in blanks))
    twice = jnp.any(inside_targets(targets, target_lengths) & is_blank, -1)
    below = jax.lax.stop_gradient(jnp.where(twice | ~(losses < 0), 0, losses))
    return losses - below


def _prepare(spec, logits, targets, logit_lengths, target_lengths, operands) -> tuple[Any, Any, jax.Array]:
    """((logits, nodes, num_frames, num_labels), operands, bad [...]), to compute with.

    A sequence with lengths or labels out of range becomes T_b = U_b = 0, so that nothing of it is read and its gradient
    is zero, and is marked bad.
    """
    frames, classes = spec.emission.dimensions(logits)
    bad = out_of_range(targets, logit_lengths, target_lengths, frames, classes)
    num_frames, num_labels = (jnp.where(bad, 0, n) for n in (logit_lengths, target_lengths))
    nodes = spec.emission.nodes(logits, targets, num_frames, num_labels, operands)
    # Logits first: its sharding and varying axes are those of the result.
    leaves, structure = jax.tree.flatten(((logits, nodes, num_frames, num_labels), operands))
    return *jax.tree.unflatten(structure, vary_together(*leaves)), bad


@jax.jit
def loss(spec: Spec, logits, targets, logit_lengths, target_lengths, clamp, operands):
    """The reduced loss. `clamp` is None where it is known to be off; `operands` are those of the seam."""
    arrays, operands, bad = _prepare(spec, logits, targets, logit_lengths, target_lengths, operands)
    if spec.implementation == "reference" and clamp is None:
        logits, nodes, num_frames, num_labels = arrays
        losses = _reference(spec, logits, nodes, num_frames, num_labels, operands)
    else:
        function = _reference_clamped if spec.implementation == "reference" else _fused
        losses = function(spec, *arrays, jnp.asarray(-1.0 if clamp is None else clamp), operands)
    if spec.bounded and spec.emission.normalize and not {"delay_penalty", "sigma"} & set(operands):
        losses = _nonnegative(losses, targets, target_lengths, spec.emission.blanks)
    losses = jnp.where(bad, jnp.nan, losses)
    return reduce(losses, target_lengths, spec.reduction)


def _arcs(spec, arrays, operands):
    """(arcs by slot, sequences with a NaN in them), without the fused gradient."""
    logits, nodes, num_frames, _ = arrays
    if spec.implementation == "reference":
        planes = spec.emission.reference(logits, nodes)
    else:
        planes, _ = spec.emission.forward(logits, nodes, strict=spec.strict)
    return spec.modify_isolated(planes, num_frames, operands)


@jax.jit
def posteriors(spec: Spec, logits, targets, logit_lengths, target_lengths, operands):
    """(blank, label) posteriors [..., T, U1], each the sum over all arcs of its kind that leave a node.

    NaN for a sequence whose lengths or labels are out of range.
    """
    arrays, operands, bad = _prepare(spec, logits, targets, logit_lengths, target_lengths, operands)
    *_, num_frames, num_labels = arrays
    arcs, nan = _arcs(spec, arrays, operands)
    bad |= nan
    if spec.implementation == "reference":
        _, gradients = lattice.reference_grad(spec.topology, arcs, num_frames, num_labels)
    else:
        _, gradients = lattice.value_and_grad(spec.topology, arcs, num_frames, num_labels, strict=spec.strict)

    def kind(name):
        total = -sum(g for slot, g in gradients.items() if slot.startswith(name))
        return jnp.where(bad[..., None, None], jnp.nan, 0 + total)  # 0 and no -0

    return kind("blank"), kind("label")


@jax.jit
def align(spec: Spec, logits, targets, logit_lengths, target_lengths, operands):
    """(score [...], frames [..., U]) of the best path."""
    if spec.strict:
        message = "implementation='kernel': jax_rnnt has no kernel for the best path; "
        raise NotImplementedError(message + "use implementation=None or 'reference'.")
    arrays, operands, bad = _prepare(spec, logits, targets, logit_lengths, target_lengths, operands)
    arcs, nan = _arcs(spec, arrays, operands)
    bad |= nan
    score, frames = best_path(spec.topology, arcs, *arrays[2:])
    return jnp.where(bad, jnp.nan, score), jnp.where(bad[..., None], -1, frames)


# ---------------------------------------------------------------------------------------------- for the public losses


def seam_operands(function, targets, *, fastemit_lambda=0.0, delay_penalty=0.0, label_windows=None, sigma=0.0):
    """Operands of the seam, checked; a number known to be 0 is left out."""
    scalars = {"fastemit_lambda": fastemit_lambda, "delay_penalty": delay_penalty, "sigma": sigma}
    scalars = {name: _checks.scalar(function, name, x) for name, x in scalars.items()}
    operands = {name: x for name, x in scalars.items() if not _checks.is_zero(x)}
    if label_windows is not None:
        shape = (*targets.shape, 2)
        operands["label_windows"] = _checks.integers(function, "label_windows", label_windows, shape, "[..., U, 2]")
    return operands


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Composition:
    """What a loss is made of: for those that ask something else of its lattice, without what acts on its gradient."""

    spec: Spec
    arrays: tuple[Any, ...]
    operands: dict[str, Any]


def evaluate(
    function: str,
    arrays,
    emission: Emission,
    topology: Topology = STANDARD,
    *,
    steps: tuple[seam.Step, ...] = (),
    bounded: bool = True,
    clamp=-1.0,
    reduction="mean",
    implementation=None,
    inplace=True,
    operands=None,
    **options,
) -> Any:
    """The loss that these parts make: all that is left for a public function to do once its own arguments are checked.

    `arrays` are (logits, targets, logit_lengths, target_lengths) from `_checks`; `options` are those of
    `seam_operands`; `operands` are arrays for the steps. Errors name `function`. Of an `Inquiry` in place of logits the
    result is a `Composition`.
    """
    logits, *rest = arrays
    if isinstance(logits, JointLogits):
        if implementation == "reference":
            logits = materialized(logits, emission, *rest)
        else:
            emission, logits = tiled(logits, emission)
        arrays = logits, *rest
    if implementation == "reference":
        _checks.unsplit(function, "logits", logits, {-3: "T", -2: "U + 1"}, " with implementation='reference'")
    spec = Spec(
        emission,
        topology,
        steps,
        bounded,
        reduction=_checks.reduction(function, reduction),
        implementation=_checks.choice(function, "implementation", implementation, _checks.IMPLEMENTATIONS),
        inplace=_checks.boolean(function, "inplace", inplace),
    )
    clamp = _checks.scalar(function, "clamp", clamp)
    clamp = None if isinstance(clamp, float) and clamp <= 0 else clamp
    operands = {**seam_operands(function, arrays[1], **options), **(operands or {})}
    if isinstance(logits, Inquiry):
        operands.pop("fastemit_lambda", None)
        return Composition(spec, (logits.logits, *rest), operands)
    return loss(spec, *arrays, clamp, operands)
