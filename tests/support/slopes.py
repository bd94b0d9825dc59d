"""Gradients against difference quotients of the float64 truth."""

import numpy as np

import batches
import family

B, T, U, V = 2, 4, 2, 6
WEIGHTS = np.array([2.0, -3.0])
CLOSE = {"rtol": 1e-7, "atol": 1e-8}  # the precision of differences of float64
STEP = 1e-5


def small(loss=family.RNNT):
    """Two sequences, the second one shorter; NaN outside the lengths."""
    return batches.poisoned(batches.problem(B, T, U, V, loss=loss, scale=1.0, lengths=([4, 3], [2, 1])))


def slope(function, *arrays, directions=None):
    """Difference quotient of the float64 truth along directions. The default, all ones, is a scalar's derivative."""
    directions = directions or [np.ones(np.shape(x)) for x in arrays]
    up, down = (function(*(x + h * d for x, d in zip(arrays, directions))) for h in (STEP, -STEP))
    return (up - down) / (2 * STEP)


def heads():
    rng = np.random.default_rng(5)
    return rng.normal(size=(B, T, V)), rng.normal(size=(B, U + 1, V))


def assert_slopes(gradients, function, leaves):
    """Each leaf by itself along three directions."""
    assert len(gradients) == len(leaves)
    rng = np.random.default_rng(0)
    for i, gradient in [*enumerate(gradients)] * 3:
        direction = rng.normal(size=np.shape(leaves[i]))
        directions = [direction if i == j else np.zeros(np.shape(x)) for j, x in enumerate(leaves)]
        expected = slope(function, *leaves, directions=directions)
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), expected, **CLOSE, err_msg=f"leaf {i}")
