"""Are lengths and paddings each other's inverse, and are paddings that no length describes told apart?"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
from jax_rnnt import RNNTLoss, lengths_from_paddings, paddings_from_lengths

pytestmark = pytest.mark.no_kernel


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_inverse(batch, dtype):
    lengths = np.random.default_rng(0).integers(0, 8, batch).astype(np.int32)
    paddings = jax.jit(paddings_from_lengths, static_argnums=(1, 2))(lengths, 7, dtype)
    assert paddings.shape == (*batch, 7) and paddings.dtype == dtype
    for index in np.ndindex(batch):
        assert np.asarray(paddings[index]).astype(float).tolist() == [float(t >= lengths[index]) for t in range(7)]
    found = jax.jit(lengths_from_paddings)(paddings)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, lengths)


def test_edges():
    assert lengths_from_paddings(np.zeros((2, 0))).tolist() == [0, 0]
    assert paddings_from_lengths(np.array([-1, 0, 3, 4]), 3).sum(-1).tolist() == [3, 3, 0, 0]
    assert paddings_from_lengths(np.array([0, 255], np.uint8), 300).sum(-1).tolist() == [300, 45]
    assert paddings_from_lengths(np.array([2]), 0).shape == (1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paddings_from_lengths([2, 0], 3).sum(-1).tolist() == [1, 3]
    with pytest.raises(TypeError, match="paddings_from_lengths: lengths must be an array"):
        paddings_from_lengths([[1], [2, 3]], 3)


def test_padding_before_a_frame_makes_its_loss_nan():
    p = batches.problem()
    paddings = np.asarray(paddings_from_lengths(p.logit_lengths, p.logits.shape[1])).copy()
    paddings[1, 0] = True
    loss = RNNTLoss(reduction="none")
    values = np.asarray(loss(p.logits, p.targets, lengths_from_paddings(paddings), p.target_lengths))
    expected = np.asarray(loss(*p))
    assert np.isnan(values).tolist() == [False, True, False, False]
    np.testing.assert_array_equal(values[[0, 2, 3]], expected[[0, 2, 3]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lengths_from_paddings(None), TypeError, "paddings must be an array"),
        (lambda: lengths_from_paddings(np.array(["x"])), TypeError, "paddings must be an array of bool, integers"),
        (lambda: lengths_from_paddings(np.float32(1)), ValueError, r"paddings must have shape \[..., T\], got shape"),
        (lambda: paddings_from_lengths(np.zeros(2), 3), TypeError, "lengths must have an integer dtype, got float64"),
        (lambda: paddings_from_lengths(np.zeros(2, int), 3.0), TypeError, "size must be an integer .*, got 3.0"),
        (lambda: paddings_from_lengths(np.zeros(2, int), -1), ValueError, "size must be 0 or more, got -1"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
