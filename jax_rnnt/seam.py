"""What may happen between the two stages: cheap, element-wise changes of the arc log-probabilities.

Each takes and gives {"blank": [..., T, U1], "label": [..., T, U1]}. All are linear in the arcs up to a constant, so
their gradient needs no residuals.
"""

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


def _frame(label):
    return lax.broadcasted_iota(jnp.int32, (1,) * (label.ndim - 2) + (label.shape[-2], 1), label.ndim - 2)


def fastemit(label, fastemit_lambda):
    """FastEmit (Yu et al. 2021): the gradient of label arcs times (1 + lambda); values stay."""
    return scale_gradient(label, 1 + fastemit_lambda)


def delay_penalty(label, num_frames, penalty):
    """k2's delay penalty: label arcs of frame t gain penalty * ((T_b - 1) / 2 - t)."""
    middle = (num_frames[..., None, None] - 1).astype(label.dtype) / 2
    return label + penalty * (middle - _frame(label).astype(label.dtype))


def label_windows(label, windows):
    """Label u may only be emitted in frames windows[..., u, 0] <= t <= windows[..., u, 1]."""
    # The last column has no label arc; any window will do there.
    padded = jnp.pad(windows, [(0, 0)] * (windows.ndim - 2) + [(0, 1), (0, 0)])[..., None, :, :]
    first, last, frame = padded[..., 0], padded[..., 1], _frame(label)
    return jnp.where((first <= frame) & (frame <= last), label, -jnp.inf)


def modify(arcs, num_frames, options):
    """Applies the options that are present, by the names of the public keywords."""
    label = arcs["label"]
    as_scalar = lambda name: jnp.asarray(options[name], label.dtype)  # noqa: E731
    if "delay_penalty" in options:
        label = delay_penalty(label, num_frames, as_scalar("delay_penalty"))
    if "label_windows" in options:
        label = label_windows(label, options["label_windows"])
    if "fastemit_lambda" in options:
        label = fastemit(label, as_scalar("fastemit_lambda"))
    return {**arcs, "label": label}
