"""Are offsets 64-bit everywhere? More than 2^31 logits, against one sequence at a time.

Takes about 10 GB and a minute, so it runs only on a GPU or with JAX_RNNT_LARGE=1. A small size runs everywhere.
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

pytestmark = pytest.mark.usefixtures("optimized")

LARGE = (33, 256, 64, 4096)


@pytest.mark.parametrize(("B", "T", "U", "V"), [(3, 16, 4, 40), losses.slow(*LARGE)], ids=str)
def test_more_than_2_to_the_31_logits(kernel, B, T, U, V):
    """Value and gradient, in place, have the bits that each sequence has alone."""
    large = LARGE == (B, T, U, V)
    if large and losses.platform() != "cuda" and os.environ.get("JAX_RNNT_LARGE") != "1":
        pytest.skip("takes 10 GB: set JAX_RNNT_LARGE=1")
    assert B * T * (U + 1) * V > 2**31 or not large
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V - 1, (B, U), np.int32)
    logit_lengths, target_lengths = rng.integers(T // 2, T + 1, B, np.int32), rng.integers(U // 2, U + 1, B, np.int32)
    logit_lengths[-1], target_lengths[-1] = T, U  # the last sequence lies beyond 2^31, to its end

    # Every sequence is another slice of the same numbers.
    rows = T * (U + 1)
    numbers = rng.standard_normal((rows + B, V), np.float32).astype(jnp.bfloat16)
    one = lambda b: numbers[b : b + rows].reshape(T, U + 1, V)
    logits = np.empty((B, T, U + 1, V), jnp.bfloat16)
    for b in range(B):
        logits[b] = one(b)

    def loss(*p):
        values = jax_rnnt.RNNTLoss(implementation=kernel, reduction="none")(*p)
        return values.sum(), values

    step = jax.jit(jax.grad(loss, has_aux=True), donate_argnums=0)
    on_device = jax.device_put(logits)
    del logits
    gradient, values = step(on_device, targets, logit_lengths, target_lengths)
    gradient, values = np.asarray(gradient), np.asarray(values)
    for b in range(B):
        expected = step(jnp.array(one(b)), targets[b], logit_lengths[b], target_lengths[b])
        losses.assert_same_bits(values[b], expected[1])
        losses.assert_same_bits(gradient[b], expected[0])
