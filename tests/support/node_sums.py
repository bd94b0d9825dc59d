"""Sums over nodes under test: a function of rows, the same of all logits, and weights."""

import jax
import jax.numpy as jnp
import numpy as np


def lengths(p):
    return {"logit_lengths": p.logit_lengths, "target_lengths": p.target_lengths}


def plain(x):
    """[..., V] -> [...]: log of the sum of exp."""
    peak = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(x - peak), -1)) + peak[..., 0]


def entropy(rows):
    x = jax.nn.log_softmax(rows)
    return -jnp.sum(jnp.exp(x) * x, -1)


def entropy_of_all(x):
    total = plain(x)
    return total - jnp.sum(jnp.exp(x - total[..., None]) * x, -1)


def total_of_all(values, weights, counts):
    return jnp.sum(jnp.where(counts & (weights != 0), weights * values, 0), (1, 2))


def some_weights(p, seed=0):
    """Random, 0 in some nodes and in a whole frame."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=p.logits.shape[:3]) * (rng.random(p.logits.shape[:3]) < 0.7)
    weights[:, 2] = 0
    return weights
