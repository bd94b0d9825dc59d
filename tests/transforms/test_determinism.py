"""Does the same input give the same bits in every call, with any number of threads, whatever memory held?"""

import os
import platform

import jax
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import platforms
from programs import run

pytestmark = pytest.mark.usefixtures("optimized")


def problem(size, loss=family.RNNT):
    return batches.problem(size, 100, 60, 9, loss=loss, dtype="float32")


@pytest.mark.parametrize("loss", [family.RNNT, family.slow(family.TDT), family.slow(family.TILES)], ids=str)
def test_calls_and_batches(loss, native_kernel):
    """Ten times all at once; one by one and in pairs: the split over threads does not show."""
    p = problem(16, loss)
    clean = compare.evaluate(loss, p, native_kernel)
    for _ in range(10):
        compare.assert_same_bits(compare.evaluate(loss, p, native_kernel), clean)
    if loss is family.RNNT:
        for part in (slice(b, b + size) for size in (1, 2) for b in range(0, 16, size)):
            got = compare.evaluate(loss, p.take(part), native_kernel)
            compare.assert_same_bits(got, [x[part] for x in clean])


PROGRAM = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import batches
import compare
import family
import platforms
for loss in family.LOSSES:
    for dtype in ("bfloat16", "float32") if loss is family.RNNT else ("float32",):
        p = batches.problem(13, 100, 60, 33, loss=loss, dtype=dtype)
        digest = hashlib.sha256(b"".join(x.tobytes() for x in compare.evaluate(loss, p, "kernel", clamp=0.5)))
        print(loss.name, dtype, digest.hexdigest())
"""


@pytest.mark.slow
def test_number_of_threads(kernel):
    """With one, two and all cores: XLA takes one thread per core of the process."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two cores and Linux")
    outputs = {run(PROGRAM, count) for count in {1, 2, len(os.sched_getaffinity(0))}}
    assert len(outputs) == 1, outputs


def test_devices_at_once(kernel, devices):
    """Eight devices share one pool of threads; none waits for another."""
    loss = jax_rnnt.RNNTLoss(reduction="none", implementation=kernel)
    gradient = jax.jit(lambda *p: jax.vjp(lambda x: loss(x, *p[1:]), p[0])[1](np.ones(8, np.float32)))
    expected, *others = [gradient(*jax.device_put(problem(8), device)) for device in devices]
    for got in others:
        compare.assert_same_bits(got, expected)


DIRTY = """
import numpy as np
import jax, jax_rnnt, batches, compare, family, platforms
jax.config.update("jax_enable_x64", True)
assert np.empty(5000, np.uint8).any(), "memory is not dirty"
for T, U in ((7, 4), (19, 33)):
    for dtype in (np.float32, np.float64):
        p = batches.problem(6, T, U, 9, dtype=dtype)
        for x in jax_rnnt.RNNTLoss(implementation="kernel").posteriors(*p):
            assert not np.asarray(x)[~batches.inside(p)].any(), "posteriors"
        for loss in family.LOSSES if dtype == np.float32 else family.LOSSES[:1]:
            p = batches.poisoned(batches.problem(6, T, U, 9, loss=loss, dtype=dtype))
            for options in ({}, {"fused_log_softmax": False}) if loss is family.RNNT else ({},):
                got = compare.evaluate(loss, p, "kernel", **options)
                compare.assert_matches(got, loss.expected(p, **options), dtype, T + U)
                assert not got[1][~batches.inside(p)].any(), "gradient"
print("ok")
"""


@pytest.mark.slow
def test_results_do_not_depend_on_what_memory_held(kernel):
    """glibc fills new memory with a pattern, which reveals elements that a kernel does not write."""
    if platform.libc_ver()[0] != "glibc" or platforms.platform() != "cpu":
        pytest.skip("MALLOC_PERTURB_ is glibc's")
    assert run(DIRTY, env=os.environ | {"MALLOC_PERTURB_": "85"}).endswith("ok\n")
