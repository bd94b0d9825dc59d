"""Joint networks, in tiles and with all logits, for the tests of `JointLogits`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from jax_rnnt import JointLogits, LinearJoint

B, T, U, V, H = 4, 23, 9, 9, 6
CHUNK = 64  # rows: several tiles


class Network:
    """Parameters (weight, bias), encoder and predictor rows, and the rest of a problem."""

    def __init__(self, loss=losses.RNNT, batch=B, dtype=np.float64, seed=0, **options):
        self.problem = losses.problem(batch, T, U, V, loss=loss, dtype=dtype, seed=seed, **options)
        rng = np.random.default_rng(seed)
        draw = lambda *shape, scale=1.0: rng.normal(0, scale, shape).astype(jnp.dtype(dtype))
        self.parameters = draw(H, V + loss.extra_classes), draw(V + loss.extra_classes)
        self.rows = draw(batch, T, H), draw(batch, U + 1, H)
        self.rest = self.problem[1:]

    @property
    def arguments(self):
        return self.parameters, self.rows, self.rest


def linear(weight, bias):
    return LinearJoint(weight, bias)


def closure(weight, bias):
    return lambda encoder, predictor: jnp.tanh(encoder + predictor) @ weight + bias[None]


JOINTS = pytest.mark.parametrize("joint", [linear, closure])


def tiles(parameters, rows, rest, *, joint=linear, loss=losses.RNNT, chunk=CHUNK, label_windows=None, **options):
    logits = JointLogits(joint(*parameters), *rows, chunk=chunk)
    return loss.value(**options)(logits, *rest, label_windows=label_windows)


def materialized(parameters, rows, rest, *, loss=losses.RNNT, **options):
    weight, bias = parameters
    hidden = jnp.tanh(rows[0][..., :, None, :] + rows[1][..., None, :, :])
    logits = (hidden.reshape(-1, H) @ weight + bias[None]).reshape(*hidden.shape[:-1], len(bias))
    return loss(logits, *rest, **options)


def gradients(function, **options):
    """Compiled (losses, gradients of their weighted sum with respect to parameters and rows)."""

    def total(parameters, rows, rest, weights):
        values = function(parameters, rows, rest, **options)
        return jnp.sum(values * weights.astype(values.dtype)), values

    run = jax.jit(jax.grad(total, (0, 1), has_aux=True))

    def call(network, weights=1.0, **changes):
        parameters, rows, rest = network.arguments
        gradient, values = run(parameters, changes.get("rows", rows), changes.get("rest", rest), np.asarray(weights))
        return values, gradient

    return call


def assert_close(got, expected, limit):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit)
