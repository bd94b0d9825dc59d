"""Do paddings give the lengths that made them, and are paddings that no length describes told apart?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
from jax_rnnt import RNNTLoss, lengths_from_paddings

pytestmark = pytest.mark.no_kernel


@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)], ids=str)
def test_inverse(batch, dtype):
    lengths = np.random.default_rng(0).integers(0, 8, batch).astype(np.int32)
    paddings = (np.arange(7) >= lengths[..., None]).astype(dtype)
    found = jax.jit(lengths_from_paddings)(paddings)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, lengths)


def test_edges():
    assert lengths_from_paddings(np.zeros((2, 0))).tolist() == [0, 0]


def test_padding_before_a_frame_makes_its_loss_nan():
    p = batches.problem()
    paddings = np.arange(p.logits.shape[1]) >= np.asarray(p.logit_lengths)[:, None]
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
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
