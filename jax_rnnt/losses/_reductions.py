"""Reductions of the losses of a batch."""

import jax
import jax.numpy as jnp


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
