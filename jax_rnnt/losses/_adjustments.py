"""Adjustments of arcs, between emission and lattice: cheap changes of the planes [..., T, U1], by slot, in plain JAX.

Steps of a loss come first, ``step(planes, num_frames, num_labels) -> planes``. Then come the options of all losses. A
slot that starts with "label" is a label arc.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_rnnt.lattices._topology import slots


@jax.custom_jvp
def scale_gradient(x, scale):
    """Returns x itself; its derivative is `scale` times that of x."""
    return x


@scale_gradient.defjvp
def _(primals, tangents):
    x, scale = primals
    return x, tangents[0] * scale


def frame(label):
    """Returns the frame of each node of a plane, int32, [..., T, 1] up to broadcasting."""
    return lax.broadcasted_iota(jnp.int32, (1,) * (label.ndim - 2) + (label.shape[-2], 1), label.ndim - 2)


def fastemit(label, fastemit_lambda):
    """Scales the gradient of label arcs by (1 + lambda) and keeps their values: FastEmit (Yu et al. 2021).

    Every path crosses the diagonal t + u = n once, by a blank or by a label. So for each n

        P = exp(-L) = sum over t + u = n of alpha(t, u) (exp(l_blank) beta(t + 1, u) + exp(l_label) beta(t, u + 1))

    FastEmit adds lambda times the second part, the share of the labels, in each diagonal. Its derivative by l_label is
    alpha exp(l_label) beta = P gamma_label, if alpha and beta count as constants; so, divided by -P,

        dL/dl_label = -(1 + lambda) gamma_label        dL/dl_blank = -gamma_blank

    No function of the arcs has this derivative, so the value stays L, and the factor belongs to the arc.
    """
    return scale_gradient(label, 1 + fastemit_lambda)


def delay_penalty(label, num_frames, penalty):
    """Adds penalty * ((T_b - 1) / 2 - t) to label arcs of frame t: k2's delay penalty."""
    middle = (num_frames[..., None, None] - 1).astype(label.dtype) / 2
    return label + penalty * (middle - frame(label).astype(label.dtype))


def label_windows(label, windows):
    """Restricts label u to frames windows[..., u, 0] <= t <= windows[..., u, 1]."""
    # The last column has no label arc; any window will do there.
    padded = jnp.pad(windows, [(0, 0)] * (windows.ndim - 2) + [(0, 1), (0, 0)])[..., None, :, :]
    first, last, t = padded[..., 0], padded[..., 1], frame(label)
    return jnp.where((first <= t) & (t <= last), label, -jnp.inf)


# ------------------------------------------------------------------------------------------------ steps of variants

Step = Callable[[dict[str, jax.Array], jax.Array, jax.Array], dict[str, jax.Array]]


def pay_next_blank(arcs, num_frames, num_labels):
    """Makes a label also pay the blank of the node it leads to, in the same frame: k2's constrained RNN-T."""
    blank = arcs["blank"]
    after = jnp.concatenate([blank[..., 1:], jnp.full_like(blank[..., :1], -jnp.inf)], -1)
    return {**arcs, "label": arcs["label"] + after}


def forbid_final_label(arcs, num_frames, num_labels):
    """Forbids labels in the last frame, so that a path of one symbol a frame ends with a blank."""
    last = frame(arcs["label"]) == num_frames[..., None, None] - 1
    return {**arcs, "label": jnp.where(last, -jnp.inf, arcs["label"])}


@dataclasses.dataclass(frozen=True)
class UnderNormalize:
    """Subtracts `sigma` once from every arc (Xu et al. 2022): from the given slots, or from all."""

    sigma: Any
    slots: tuple[str, ...] = ()

    def __call__(self, arcs, num_frames, num_labels):
        return arcs | {slot: arcs[slot] - jnp.asarray(self.sigma, arcs[slot].dtype) for slot in self.slots or arcs}


@dataclasses.dataclass(frozen=True)
class TokenAndDuration:
    """Makes arcs "blank+d", "label+d" from planes "blank", "label", "duration+0" ...: token times duration.

    Where `sampled` is true, the arcs are those of the RNN-T instead: blanks of one frame, labels of none, no durations,
    no sigma.
    """

    durations: tuple[int, ...]
    sigma: Any = None
    sampled: Any = None

    def __call__(self, arcs, num_frames, num_labels):
        nothing = jnp.full_like(arcs["blank"], -jnp.inf)
        sigma = jnp.asarray(0 if self.sigma is None else self.sigma, nothing.dtype)
        every = dict.fromkeys(self.durations if self.sampled is None else (*self.durations, 0, 1))
        out = {}
        for slot, alone in (("blank", 1), ("label", 0)):
            for d in every:
                if d in self.durations:
                    arc = arcs[slot] + arcs[f"duration+{self.durations.index(d)}"] - sigma
                else:
                    arc = nothing
                if self.sampled is not None:
                    arc = jnp.where(self.sampled, arcs[slot] if d == alone else nothing, arc)
                out[f"{slot}+{d}"] = arc
        out.pop("blank+0", None)  # it would not move
        return out


# ------------------------------------------------------------------------------------------------------------- all


def _checked(planes, shape, topology_slots, loss):
    """Raises an error, in the loss's name, unless every slot of its topology has a plane of this shape."""
    name = type(loss).__name__
    if not isinstance(planes, dict) or not set(topology_slots) <= set(planes):
        got = sorted(planes) if isinstance(planes, dict) else repr(planes)
        expected = f"a plane for every slot of its topology, {sorted(topology_slots)}"
        raise ValueError(f"{name}.compose(): emission and steps must give {expected}, got {got}.")
    for slot in topology_slots:
        if jnp.shape(planes[slot]) != shape:
            expected = f"shape [..., T, U + 1] = {shape}"
            raise ValueError(
                f"{name}.compose(): plane {slot!r} must have {expected} after the steps, got {jnp.shape(planes[slot])}."
            )


def adjust(loss, planes, num_frames, num_labels, windows, closed=True):
    """Returns the arcs of the loss's topology, by slot, after the steps of the loss and then its options.

    If `closed`, arcs include what labels pay for the rest of their frame (`Composition.closing`).
    """
    composition, like = loss.compose(), next(iter(planes.values()))
    for step in (*composition.steps, *(composition.closing if closed else ())):
        planes = step(planes, num_frames, num_labels)
    wanted = slots(composition.topology)
    _checked(planes, like.shape, wanted, loss)
    arcs = {slot: planes[slot].astype(like.dtype) for slot in wanted}
    for slot in [slot for slot in arcs if slot.startswith("label")]:
        label = arcs[slot]
        if loss.delay_penalty is not None:
            label = delay_penalty(label, num_frames, jnp.asarray(loss.delay_penalty, label.dtype))
        if windows is not None:
            label = label_windows(label, windows)
        if loss.fastemit_lambda is not None:
            label = fastemit(label, jnp.asarray(loss.fastemit_lambda, label.dtype))
        arcs[slot] = label
    return arcs
