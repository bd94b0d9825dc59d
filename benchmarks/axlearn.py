"""The loss of a joint network as apple/axlearn computes it, written anew from a description.

A map over the frames of each sequence makes log-probabilities and picks by one-hot products. A scan over anti-diagonals
follows, with a derivative of its own.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_rnnt.lattices._reference import skew

LOWEST = -1e9


def _diagonals(blank, label):
    return tuple(jnp.maximum(skew(x), LOWEST) for x in (blank, label))


def _ends(n, num_frames, num_labels, columns):
    return (n == num_frames + num_labels - 1)[:, None] & (jnp.arange(columns) == num_labels[:, None])


def _alphas(blank, label, num_frames, num_labels):
    def step(carry, xs):
        alpha, total = carry
        n, blank, label = xs
        ends = _ends(n, num_frames, num_labels, alpha.shape[1])
        total = jnp.where(ends, alpha + blank, total)
        moved = jnp.pad((alpha + label)[:, :-1], ((0, 0), (1, 0)), constant_values=LOWEST)
        return (jnp.logaddexp(alpha + blank, moved), total), alpha

    blank, label = _diagonals(blank, label)
    start = jnp.full_like(blank[0], LOWEST)
    carry = start.at[:, 0].set(0), start
    (_, total), alphas = lax.scan(step, carry, (jnp.arange(len(blank)), blank, label))
    return jnp.max(total, 1), alphas


@jax.custom_vjp
def log_likelihood(blank, label, num_frames, num_labels):
    return _alphas(blank, label, num_frames, num_labels)[0]


def _forward(*operands):
    total, alphas = _alphas(*operands)
    return total, (operands, total, alphas)


def _backward(saved, cotangent):
    (blank, label, num_frames, num_labels), total, alphas = saved
    columns = blank.shape[2]

    def step(beta, xs):
        n, alpha, blank, label = xs
        ends = _ends(n, num_frames, num_labels, columns)
        by_blank = blank + jnp.where(ends, 0, beta)
        by_label = label + jnp.pad(beta[:, 1:], ((0, 0), (0, 1)), constant_values=LOWEST)
        before = alpha - total[:, None]
        posteriors = jnp.exp(before + by_blank), jnp.exp(before + by_label)
        return jnp.where(ends, by_blank, jnp.logaddexp(by_blank, by_label)), posteriors

    planes, unskew = jax.vjp(_diagonals, blank, label)
    steps = jnp.arange(len(alphas)), alphas, *planes
    _, posteriors = lax.scan(step, jnp.full_like(alphas[0], LOWEST), steps, reverse=True)
    return *(g * cotangent[:, None, None] for g in unskew(posteriors)), None, None


log_likelihood.defvjp(_forward, _backward)


def axlearn(parameters, rows, rest):
    """Mean loss; the last class is the blank."""
    (weight, bias), (targets, num_frames, num_labels) = parameters, rest

    def planes(encoded, predicted, targets):
        labels = jax.nn.one_hot(jnp.append(targets, 0), len(bias))

        def frame(row):
            log_p = jax.nn.log_softmax(jnp.tanh(row + predicted) @ weight + bias)
            return log_p[:, -1], jnp.sum(log_p * labels, -1)

        return lax.map(frame, encoded)

    blank, label = jax.vmap(planes)(*rows, targets)
    label = jnp.where(jnp.arange(label.shape[2]) < num_labels[:, None, None], label, LOWEST)
    return -jnp.mean(log_likelihood(blank, label, num_frames, num_labels))
