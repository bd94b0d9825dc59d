"""What may happen between the two stages: cheap changes of the planes [..., T, U1], by slot, in plain JAX.

Steps of a variant come first, `step(arcs, num_frames, operands) -> arcs`: they are static, so they are functions of a
module or frozen dataclasses. Then come the public options. A slot that starts with "label" is a label arc.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@jax.custom_jvp
def scale_gradient(x, scale):
    """x itself; its derivative is `scale` times that of x."""
    return x


@scale_gradient.defjvp
def _(primals, tangents):
    x, scale = primals
    return x, tangents[0] * scale


def frame(label):
    """int32, [..., T, 1] up to broadcasting: the frame of each node of a plane."""
    return lax.broadcasted_iota(jnp.int32, (1,) * (label.ndim - 2) + (label.shape[-2], 1), label.ndim - 2)


def fastemit(label, fastemit_lambda):
    """FastEmit (Yu et al. 2021): the gradient of label arcs times (1 + lambda); values stay."""
    return scale_gradient(label, 1 + fastemit_lambda)


def delay_penalty(label, num_frames, penalty):
    """k2's delay penalty: label arcs of frame t gain penalty * ((T_b - 1) / 2 - t)."""
    middle = (num_frames[..., None, None] - 1).astype(label.dtype) / 2
    return label + penalty * (middle - frame(label).astype(label.dtype))


def label_windows(label, windows):
    """Label u may only be emitted in frames windows[..., u, 0] <= t <= windows[..., u, 1]."""
    # The last column has no label arc; any window will do there.
    padded = jnp.pad(windows, [(0, 0)] * (windows.ndim - 2) + [(0, 1), (0, 0)])[..., None, :, :]
    first, last, t = padded[..., 0], padded[..., 1], frame(label)
    return jnp.where((first <= t) & (t <= last), label, -jnp.inf)


def label_slots(arcs) -> list[str]:
    return [slot for slot in arcs if slot.startswith("label")]


# ------------------------------------------------------------------------------------------------ steps of variants

Step = Callable[[dict[str, jax.Array], jax.Array, dict[str, Any]], dict[str, jax.Array]]


def pay_next_blank(arcs, num_frames, operands):
    """k2's constrained RNN-T: a label also pays the blank of the node that it leads to, in the same frame."""
    blank = arcs["blank"]
    after = jnp.concatenate([blank[..., 1:], jnp.full_like(blank[..., :1], -jnp.inf)], -1)
    return {**arcs, "label": arcs["label"] + after}


def final_blank(arcs, num_frames, operands):
    """No label in the last frame, so that a path of one symbol a frame ends with a blank."""
    last = frame(arcs["label"]) == num_frames[..., None, None] - 1
    return {**arcs, "label": jnp.where(last, -jnp.inf, arcs["label"])}


def _sigma(arc, operands):
    return jnp.asarray(operands.get("sigma", 0), arc.dtype)


def under_normalize(arcs, num_frames, operands):
    """Every arc pays sigma once (Xu et al. 2022)."""
    return {slot: x - _sigma(x, operands) for slot, x in arcs.items()}


def under_normalize_tokens(arcs, num_frames, operands):
    """Every arc of a token and a duration pays sigma once: with the token."""
    return arcs | {slot: arcs[slot] - _sigma(arcs[slot], operands) for slot in ("blank", "label")}


@dataclasses.dataclass(frozen=True)
class Durations:
    """Token times duration, arc by arc: planes "blank", "label", "duration+0" ... -> arcs "blank+d", "label+d".

    Where `operands["sampled"]` is true the arcs are those of the RNN-T instead: blanks of one frame, labels of none, no
    durations, no sigma.
    """

    durations: tuple[int, ...]

    def __call__(self, arcs, num_frames, operands):
        sampled, nothing = operands.get("sampled"), jnp.full_like(arcs["blank"], -jnp.inf)
        every = dict.fromkeys(self.durations if sampled is None else (*self.durations, 0, 1))
        out = {}
        for slot, alone in (("blank", 1), ("label", 0)):
            for d in every:
                if d in self.durations:
                    arc = arcs[slot] + arcs[f"duration+{self.durations.index(d)}"] - _sigma(nothing, operands)
                else:
                    arc = nothing
                if sampled is not None:
                    arc = jnp.where(sampled, arcs[slot] if d == alone else nothing, arc)
                out[f"{slot}+{d}"] = arc
        out.pop("blank+0", None)  # would not move
        return out


@dataclasses.dataclass(frozen=True)
class Unband:
    """Planes of a band, [..., T, S] with column `operands["first"][..., t] + s` in place s -> all `columns`."""

    columns: int

    def __call__(self, arcs, num_frames, operands):
        return {slot: unband(x, operands["first"], self.columns) for slot, x in arcs.items()}


def unband(x, first, columns):
    """[..., T, S] -> [..., T, columns], -inf outside the band; one-hot and not a gather, so that it shards."""
    width, rank = x.shape[-1], x.ndim + 1
    column = lax.broadcasted_iota(jnp.int32, (1,) * (rank - 2) + (columns, 1), rank - 2)
    place = lax.broadcasted_iota(jnp.int32, (1,) * (rank - 1) + (width,), rank - 1)
    hit = column - first[..., None, None] == place
    picked = jnp.sum(jnp.where(hit, x[..., None, :], 0), -1)
    return jnp.where(jnp.any(hit, -1), picked, -jnp.inf)


# ---------------------------------------------------------------------------------------------------- public options


def modify(arcs, num_frames, operands, steps: tuple[Step, ...] = ()):
    """Steps of the variant, then the options that are present, by the names of the public keywords."""
    for step in steps:
        arcs = step(arcs, num_frames, operands)
    for slot in label_slots(arcs):
        label = arcs[slot]
        as_scalar = lambda name: jnp.asarray(operands[name], label.dtype)  # noqa: B023, E731
        if "delay_penalty" in operands:
            label = delay_penalty(label, num_frames, as_scalar("delay_penalty"))
        if "label_windows" in operands:
            label = label_windows(label, operands["label_windows"])
        if "fastemit_lambda" in operands:
            label = fastemit(label, as_scalar("fastemit_lambda"))
        arcs = {**arcs, slot: label}
    return arcs
