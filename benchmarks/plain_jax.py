"""The loss in pure JAX, as a user would write it. The last class is the blank."""

import jax
import jax.numpy as jnp

NEG = -1e30  # log 0; finite, so that autodiff meets no inf - inf


def skew(x):
    """[B, T, U1] -> [T + U1 - 1, B, U1]: entry [n, b, u] is node (n - u, u)."""
    B, T, U1 = x.shape
    x = jnp.pad(x.transpose(2, 0, 1), ((0, 0), (0, 0), (0, U1)), constant_values=NEG)  # [U1, B, T + U1]
    x = x.transpose(1, 0, 2).reshape(B, -1)[:, : U1 * (T + U1 - 1)]
    return x.reshape(B, U1, T + U1 - 1).transpose(2, 0, 1)


def plain(logits, targets, logit_lengths, target_lengths):
    """Uses log_softmax, a gather, a scan over the anti-diagonals, and automatic differentiation."""
    B, _, U1, _ = logits.shape
    log_probs = jax.nn.log_softmax(logits)
    log_blank = log_probs[..., -1]
    labels = jnp.pad(targets, ((0, 0), (0, 1)))[:, None, :, None]
    log_label = jnp.take_along_axis(log_probs, labels, -1)[..., 0]

    def step(alpha, diagonal):
        blank, label = diagonal
        moved = jnp.pad((alpha + label)[:, :-1], ((0, 0), (1, 0)), constant_values=NEG)
        return jnp.logaddexp(alpha + blank, moved), alpha

    start = jnp.full((B, U1), NEG).at[:, 0].set(0.0)
    _, alphas = jax.lax.scan(step, start, (skew(log_blank), skew(log_label)))
    b, t, u = jnp.arange(B), logit_lengths - 1, target_lengths
    return -(alphas[t + u, b, u] + log_blank[b, t, u]).mean()
