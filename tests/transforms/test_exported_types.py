"""Can a stored program take and return the results, losses and layouts of the library?"""

import jax
import numpy as np
import pytest
from jax import export

import jax_rnnt
from jax_rnnt import decode, metrics

pytestmark = pytest.mark.no_kernel

RESULTS = jax_rnnt.Alignment, decode.Hypotheses, decode.FoundPhrase, metrics.LabelErrors
ARGUMENTS = (
    jax_rnnt.TDTLoss((0, 2)),
    jax_rnnt.RNNTLoss(reduction="none"),
    jax_rnnt.BandLogits(np.zeros((2, 3, 2, 4)), np.zeros((2, 3), np.int32)),
)


@pytest.mark.parametrize(
    "x", [*(x(*np.arange(1.0 * len(x._fields))) for x in RESULTS), *ARGUMENTS], ids=lambda x: type(x).__name__
)
def test_exported_types(x):
    """A program takes and returns results, losses and arrays of logits, also from a file."""
    pytest.importorskip("flatbuffers")
    made = export.export(jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + leaf, x)))(x)
    found = export.deserialize(made.serialize()).call(x)
    assert type(found) is type(x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * np.asarray(b)), found, x)


def test_a_function_cannot_be_stored():
    pytest.importorskip("flatbuffers")
    loss = jax_rnnt.JointLogits(jax_rnnt.LinearJoint(np.zeros((4, 6))), np.zeros((5, 4)), np.zeros((3, 4)))
    made = export.export(jax.jit(lambda x: jax.tree.leaves(x)[0]))(loss)
    with pytest.raises(ValueError, match=r"JointLogits|LinearJoint"):
        made.serialize()
