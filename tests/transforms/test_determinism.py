"""Does the same input give the same bits in every call, with any number of threads?"""

import os
import subprocess
import sys
import textwrap

import pytest

import losses

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.mark.rare("reference")
@pytest.mark.family("layouts")
def test_repeated_calls(loss, implementation):
    p = losses.problem(16, 100, 60, 9, loss=loss, dtype="float32")
    first = losses.evaluate(loss, p, implementation, fastemit_lambda=0.5, clamp=0.25)
    for _ in range(10):
        for a, b in zip(losses.evaluate(loss, p, implementation, fastemit_lambda=0.5, clamp=0.25), first, strict=True):
            losses.assert_same_bits(a, b)


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
    outputs = set()
    for count in {1, 2, len(os.sched_getaffinity(0))}:
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(count)]
        done = subprocess.run(command, cwd=losses.HERE, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1, outputs


def test_calls_from_many_threads(loss, kernel):
    """A server calls from its own threads; they must not share scratch memory."""
    from concurrent.futures import ThreadPoolExecutor

    problems = [losses.problem(8, 100, 60, 9, loss=loss, dtype="float32", seed=seed) for seed in range(8)]
    alone = [losses.evaluate(loss, p, kernel) for p in problems]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: losses.evaluate(loss, p, kernel), problems * 4))
    for got, expected in zip(together, alone * 4, strict=True):
        for a, b in zip(got, expected, strict=True):
            losses.assert_same_bits(a, b)


def test_devices_at_once(loss, kernel, devices):
    """Eight devices share one pool of threads; none waits for another."""
    import jax

    p = losses.problem(8, 100, 60, 9, loss=loss, dtype="float32")
    with jax.default_device(devices[0]):
        expected = losses.evaluate(loss, p, kernel)
    run = losses._compiled(loss, kernel, ())
    scheduled = {"clamp": -1.0, "fastemit_lambda": 0.0, "delay_penalty": 0.0}
    scheduled = {k: jax.numpy.float32(v) for k, v in scheduled.items()}
    results = [run(*jax.device_put((p, scheduled), device), None) for device in devices]
    for values, gradient in results:
        losses.assert_same_bits(values, expected[0])
        losses.assert_same_bits(gradient, expected[1])
