"""Does the same input give the same bits in every call, with any number of threads?"""

import os

import jax
import numpy as np
import pytest

import jax_rnnt
import losses
from programs import run

pytestmark = pytest.mark.usefixtures("optimized")


def problem(loss=losses.RNNT, **options):
    return losses.problem(8, 100, 60, 9, loss=loss, dtype="float32", **options)


@losses.every_layout
def test_repeated_calls(loss, implementation):
    p = problem(loss)
    first = losses.evaluate(loss, p, implementation, fastemit_lambda=0.5, clamp=0.25)
    for _ in range(10):
        losses.assert_same_bits(losses.evaluate(loss, p, implementation, fastemit_lambda=0.5, clamp=0.25), first)


PROGRAM = """
import hashlib, os, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
import losses
for loss in losses.LOSSES:
    for dtype in ("bfloat16", "float32") if loss is losses.RNNT else ("float32",):
        p = losses.problem(13, 100, 60, 33, loss=loss, dtype=dtype)
        digest = hashlib.sha256(b"".join(x.tobytes() for x in losses.evaluate(loss, p, "kernel", clamp=0.5)))
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
    expected, *others = [gradient(*jax.device_put(problem(), device)) for device in devices]
    for got in others:
        losses.assert_same_bits(got, expected)
