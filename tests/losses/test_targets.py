"""Are the kernels right on every compiled instruction set, in place and not, on many threads?

Nearly all go through the door, without a JAX program. Rows of every size: test_emissions.py.
"""

import numpy as np
import pytest

import batches
import compare
import door
import family
import platforms

pytestmark = pytest.mark.usefixtures("kernel")

DTYPES = "float16", "bfloat16", "float32", "float64"
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_loss = pytest.mark.parametrize("loss", door.LOSSES, ids=str)


@every_dtype
@every_loss
def test_options(loss, dtype):
    """Odd sizes, NaN outside the lengths; the first blank, one amid the classes, the last; both input modes."""
    clamp, scale = np.array([0.25, -1, 0.01, 0.5]), np.array([1, -2, 0.5, 0])
    p = batches.poisoned(batches.problem(4, 9, 18, 37, loss=loss, dtype=dtype))
    for blank in (loss.blank(0), loss.blank(17), -1):
        door.check(loss, p, blank=blank, clamp=clamp, scale=scale)
        door.check(loss, p, blank=blank, fused_log_softmax=False)


@every_loss
def test_label_equal_to_blank(loss):
    """A class that is both blank and label gets both terms; in rows of less than a vector, and of many."""
    for dtype in DTYPES:
        for classes, blank in ((5, loss.blank(0)), (5, loss.blank(3)), (40, loss.blank(33)), (300, loss.blank(299))):
            others = np.array(np.meshgrid([blank - 1, blank], [blank, blank and 0])).T.reshape(4, 2) % classes
            p = batches.problem(4, 4, 2, classes, loss=loss, dtype=dtype, lengths=([4] * 4, [2] * 4))
            door.check(loss, p._replace(targets=others.astype(np.int32)), blank=blank, clamp=0.3)


@every_loss
def test_empty_dimensions(loss):
    """No sequences, no frames, no labels in the arrays themselves."""
    for B, T, U, V in ((0, 4, 2, 5), (2, 0, 2, 5), (2, 4, 0, 5), (2, 0, 0, 3), (0, 0, 0, 4)):
        door.check(loss, batches.problem(B, T, U, V, loss=loss, lengths=([T, max(T - 1, 0)][:B], [U, 0][:B])))


def test_the_last_column_is_scaled_too():
    """It has a vector of its own if labels fill whole ones. Unscaled, 350 factors of 1/3 leave the range of floats."""
    for U in (8, 16, 32):
        lengths = [350, 349, 350, 348], [U, U // 2, U // 4, 4]
        door.check(family.RNNT, batches.problem(4, 350, U, 3, dtype=np.float32, scale=0, lengths=lengths))


@every_dtype
@every_loss
def test_threads(loss, dtype):
    """Enough rows and nodes for several threads, which take them in turns. Neither their number nor other sequences of
    the batch change a bit."""
    if platforms.cuda_kernels():
        pytest.skip("threads are a matter of the CPU kernels")
    p = batches.poisoned(batches.problem(9, 60, 61, 9, loss=loss, dtype=dtype))
    assert p.logits[..., 0].size > 1 << 15
    alone = door.evaluate(loss, p)
    compare.assert_matches(alone, loss.expected(p), dtype, 2 * 121)  # many paths, whose errors add up
    for threads in (1, 2, 3, 8):
        compare.assert_same_bits(door.evaluate(loss, p, threads=threads, inplace=threads % 2 == 0), alone)
        part = slice(threads, threads + 2)
        compare.assert_same_bits(door.evaluate(loss, p.take(part), threads=threads), [x[part] for x in alone])


@pytest.mark.skipif(len(door.TARGETS) == 1, reason="one instruction set")
def test_jax_runs_the_chosen_one():
    p = batches.problem(dtype=np.float32, V=37)
    for target in door.TARGETS:
        with door.using(target):
            got = compare.evaluate(family.RNNT, p, "kernel")
        compare.assert_same_bits(got, door.evaluate(family.RNNT, p, target=target))


@pytest.mark.skipif(door.TARGETS == ("only",), reason="instruction sets are a matter of the CPU kernels")
def test_names_of_targets():
    """Best first; the last one runs everywhere, unless the build has one alone."""
    assert len(door.TARGETS) == 1 or door.TARGETS[-1] == "portable"
    with pytest.raises((ValueError, RuntimeError)), door.using("sse9"):
        pass
