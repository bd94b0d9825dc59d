"""Problems of a loss with a linear joint network, and their truth in float64: kernels of TPUs and GPUs share them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import batches
import jax_rnnt
from jax_rnnt import JointLogits, LinearJoint

LENGTHS = np.array([37, 20, 33, 5], np.int32), np.array([9, 2, 0, 4], np.int32)  # of blocks of 32 frames, 8 columns
WEIGHTS = np.array([1.0, -2.0, 0.5, 0.0], np.float32)  # a sequence without weight is skipped
H = 12


def bfloat16(x):
    return np.asarray(jnp.asarray(x, jnp.float32).astype(jnp.bfloat16), np.float64)


class Case:
    """A problem of which a joint network makes the logits, in float64."""

    def __init__(self, loss, V, seed=0, copies=None, lengths=LENGTHS, scale=1.0):
        self.loss, rng = loss, np.random.default_rng(seed)
        self.lengths = [np.asarray(x, np.int32) for x in lengths]
        T, U, batch = max(self.lengths[0].max(), 37), max(self.lengths[1].max(), 9), len(self.lengths[0])
        self.problem = batches.problem(batch, T, U, V, loss=loss, lengths=self.lengths)
        self.encoders = batch // (copies or 1)
        classes = V + loss.extra_classes
        rows = (self.encoders, T, H), (batch, U + 1, H), (H, classes), (classes,)
        self.arrays = [rng.normal(0, scale, shape).astype(np.float32).astype(np.float64) for shape in rows]

    def expected(self, activation=np.tanh, derivative=lambda h: 1 - h**2, rounded=lambda x: x, **options):
        """(losses, gradients of `arrays`), where factors of products are `rounded`."""
        encoder, predictor, weight, bias = self.arrays
        copies = len(predictor) // self.encoders
        h = activation(np.repeat(encoder, copies, 0)[:, :, None] + predictor[:, None])
        logits = rounded(h) @ rounded(weight) + bias
        losses, g = self.loss.expected(self.problem._replace(logits=logits), **options)
        g = g * WEIGHTS[:, None, None, None]
        dx = rounded(g) @ rounded(weight).T * derivative(h)
        of_encoder = dx.sum(2).reshape(self.encoders, copies, *encoder.shape[1:]).sum(1)
        of_weight = np.einsum("btuh,btuv->hv", rounded(h), rounded(g))
        return losses, [of_encoder, dx.sum(1), of_weight, g.sum((0, 1, 2))]

    def run(self, dtype=np.float32, precision="highest", fill=None, activation=None, weights=WEIGHTS, **options):
        """(losses, gradients); `fill` replaces rows outside the lengths."""
        program = _program(self.loss, precision, activation or jax_rnnt.LinearJoint.activation, tuple(options.items()))
        arrays = [np.array(x, np.float32) for x in self.arrays]
        if fill is not None:
            copies = len(arrays[1]) // self.encoders
            frames = self.lengths[0].reshape(-1, copies).max(1)
            for x, lengths in zip(arrays, (frames, self.lengths[1] + 1)):
                for row, n in zip(x, lengths):
                    row[n:] = fill
        arrays = [jnp.asarray(x, dtype) for x in arrays]
        batch = np.array(weights, np.float32), self.problem.targets, *self.lengths
        return jax.tree.map(np.asarray, program(arrays, *batch))


@functools.cache
def _program(loss, precision, activation, options):
    def total(arrays, weights, targets, *lengths):
        encoder, predictor, weight, bias = arrays
        if len(encoder) < len(predictor):
            fold = lambda x: x.reshape(len(encoder), -1, *x.shape[1:])
            encoder, predictor, targets, *lengths = encoder[:, None], *map(fold, (predictor, targets, *lengths))
        logits = JointLogits(LinearJoint(weight, bias, activation), encoder, predictor)
        losses = loss.value(reduction="none", **dict(options))(logits, targets, *lengths).reshape(-1)
        return jnp.sum(jnp.where(weights == 0, 0, losses * weights)), losses

    def run(*arguments):
        with jax.default_matmul_precision(precision):
            (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(*arguments)
        return losses, gradients

    return jax.jit(run)


def check(got, expected, limit):
    (losses, gradients), (true_losses, true_gradients) = got, expected
    np.testing.assert_allclose(losses, true_losses, rtol=limit)
    for x, true in zip(gradients, true_gradients, strict=True):
        np.testing.assert_allclose(x, true, atol=limit * np.abs(true).max())


def same(a, b):
    assert all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
