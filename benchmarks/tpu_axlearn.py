"""A training step's loss as apple/axlearn computes it, beside ours, compiled for TPU v5e at axlearn's shape.

    python benchmarks/tpu_axlearn.py

axlearn maps over the frames of each sequence: joint network, log-softmax, one-hot picks. A scan over anti-diagonals
with a derivative of its own follows. It is written anew here, from this description. Value and gradients with respect
to encoder, predictor and output layer; `make test-tpu-compile` installs what it needs. No time is measured, and no
bytes: XLA counts the body of a loop once, and both ways are loops.
"""

import functools

import tpu  # first: it sets up libtpu

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt
from jax_rnnt.lattices.reference import skew

B, T, U, V, H = 4, 750, 200, 1024, 640
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


def axlearn(weight, encoded, predicted, targets, num_frames, num_labels):
    def planes(encoded, predicted, targets):
        labels = jax.nn.one_hot(jnp.append(targets, 0), V)

        def frame(row):
            log_p = jax.nn.log_softmax(jnp.tanh(row + predicted) @ weight)
            return log_p[:, 0], jnp.sum(log_p * labels, -1)

        return lax.map(frame, encoded)

    blank, label = jax.vmap(planes)(encoded, predicted, targets)
    label = jnp.where(jnp.arange(U + 1) < num_labels[:, None, None], label, LOWEST)
    return -jnp.mean(log_likelihood(blank, label, num_frames, num_labels))


def ours(weight, encoded, predicted, *rest):
    return jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(weight), encoded, predicted, *rest, blank=0)


def arguments(make):
    shapes = (H, V), (B, T, H), (B, U + 1, H), (B, U), (B,), (B,)
    return [make(shape, np.float32 if i < 3 else np.int32) for i, shape in enumerate(shapes)]


def main():
    found = topologies.get_topology_desc(platform="tpu", topology_name=tpu.GENERATIONS["v5e"]).devices
    place = NamedSharding(Mesh(np.array(found[:1]), ("data",)), P())
    print(f"v5e, B = {B}, T = {T}, U = {U}, V = {V}, H = {H}, float32; value and all gradients")
    print("| way | temporaries, MB |\n|---|--:|")
    for function in (axlearn, ours):
        step = jax.jit(jax.value_and_grad(function, (0, 1, 2)))
        made = step.lower(*arguments(functools.partial(jax.ShapeDtypeStruct, sharding=place))).compile()
        print(f"| {function.__name__} | {made.memory_analysis().temp_size_in_bytes / 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
