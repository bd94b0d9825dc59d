"""Does the same input give the same bits in every call, with any number of threads, whatever memory held?"""

import os
import platform

import jax
import numpy as np
import pytest

import batches
import compare
import jax_rnnt
import platforms
from programs import run

pytestmark = pytest.mark.usefixtures("optimized")


def test_devices_at_once(kernel, devices):
    """Eight devices share one pool of threads; none waits for another."""
    loss = jax_rnnt.RNNTLoss(reduction="none", implementation=kernel)
    gradient = jax.jit(lambda *p: jax.vjp(lambda x: loss(x, *p[1:]), p[0])[1](np.ones(8, np.float32)))
    p = batches.problem(8, 100, 60, 9, dtype="float32")
    expected, *others = [gradient(*jax.device_put(p, device)) for device in devices]
    for got in others:
        compare.assert_same_bits(got, expected)


PROGRAM = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import numpy as np
import jax, batches, compare, family, platforms
jax.config.update("jax_enable_x64", True)
assert np.empty(5000, np.uint8).any() or not os.environ.get("MALLOC_PERTURB_"), "memory is not dirty"
for loss, dtype, options in (
    (family.RNNT, "bfloat16", {}),
    (family.RNNT, "float32", {"clamp": 0.5}),
    (family.RNNT, "float64", {"fused_log_softmax": False}),
    (family.TDT, "float32", {}),
    (family.WILDCARD, "float32", {}),
):
    p = batches.poisoned(batches.problem(13, 100, 60, 33, loss=loss, dtype=dtype))
    jax.config.update("jax_disable_most_optimizations", loss is family.RNNT)  # kernels alone
    got = compare.evaluate(loss, p, "kernel", **options)
    if sys.argv[1] == "1":
        compare.assert_matches(got, loss.expected(p, **options), dtype, 160)
    assert not got[1][~batches.inside(p)].any(), "gradient"
    print(loss.name, dtype, hashlib.sha256(b"".join(x.tobytes() for x in got)).hexdigest())
for x in family.RNNT.value(implementation="kernel").posteriors(*p):
    assert not np.asarray(x)[~batches.inside(p)].any(), "posteriors"
"""


@pytest.mark.slow
def test_threads_and_what_memory_held(kernel):
    """XLA takes one thread per core of the process: with one and with all, the same right bits. glibc fills new memory
    with a pattern, another one each time, which reveals elements that a kernel does not write."""
    if platforms.platform() != "cpu" or not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs the CPU's kernels and Linux")
    counts = {1: "85", len(os.sched_getaffinity(0)): "170"}
    dirty = {"MALLOC_PERTURB_": ""} if platform.libc_ver()[0] != "glibc" else {}
    runs = [run(PROGRAM, n, env=os.environ | {"MALLOC_PERTURB_": x} | dirty) for n, x in counts.items()]
    assert len(set(runs)) == 1, runs
