"""Threads that import, compile and run at once: with and without a global interpreter lock."""

import concurrent.futures
import sys
import sysconfig
import threading
import warnings

import jax
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import platforms
import reference_numpy as truth
from jax_rnnt._xla import loading, primitive

THREADS = 32


def at_once(function):
    """The results of `function(0)` ... `function(31)`, started together."""
    barrier = threading.Barrier(THREADS)

    def work(i):
        barrier.wait()
        return function(i)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def test_threads_ask_the_module(kernel):
    """Its functions answer alike, also where other threads choose the instruction set."""
    module = loading.module(platforms.platform())
    targets = module.targets() if hasattr(module, "targets") else []

    def ask(i):
        for target in targets:
            module.use_target(target)
            assert module.target() in targets
        handlers = module.registrations()
        return sorted(handlers), module.limits(), module.api_version(), module.workspace(i % 2 == 0, 3, True)

    try:
        several = at_once(ask)
    finally:
        if targets:
            module.use_target(targets[0])
    assert all(found == several[i % 2] for i, found in enumerate(several))


def gradient(loss, problem):
    """Value and gradient by a program of its own."""
    program = jax.jit(jax.value_and_grad(lambda x: loss(x, *problem[1:], reduction="sum")))
    return jax.tree.map(np.asarray, program(problem.logits))


def test_threads_compile_and_run_at_once():
    """Two shapes of two losses, each by eight threads: the very numbers of one thread."""
    losses = [family.RNNT, family.TDT] * 2
    problems = [batches.problem(loss=loss, T=3 + i // 2, dtype=np.float32) for i, loss in enumerate(losses)]
    several = at_once(lambda i: gradient(losses[i % 4], problems[i % 4]))
    alone = [gradient(loss, problem) for loss, problem in zip(losses, problems)]
    for i, found in enumerate(several):
        jax.tree.map(np.testing.assert_array_equal, found, alone[i % 4])


@pytest.mark.slow
def test_threads_share_a_program(kernel):
    """All call at once, the first call that compiles included. Each problem is large enough for several threads."""
    p = batches.problem(32, 60, 19, 40, dtype=np.float32)  # 38,400 nodes, 6 MB of logits
    expected = family.RNNT.expected(p)
    gradients = expected[1].astype(np.float32)
    step = jax.jit(jax.value_and_grad(lambda x, *rest: family.RNNT(x, *rest, implementation=kernel)))
    reduced = truth.reduce(expected[0], p.target_lengths, "mean")[0]

    def call(shift):
        order = (np.arange(32) + shift) % 32  # every thread has other data
        mine = p.take(order)
        for _ in range(3):
            value, gradient = step(*mine)
            np.testing.assert_allclose(value, reduced, rtol=1e-5)
            assert np.abs(np.asarray(gradient) * 32 - gradients[order]).max() < 1e-5

    at_once(call)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_devices_at_once(kernel, devices):
    """Eight devices share one pool of threads; none waits for another, and all give the same bits."""
    loss = jax_rnnt.RNNTLoss(reduction="none", implementation=kernel)
    gradient = jax.jit(lambda *p: jax.vjp(lambda x: loss(x, *p[1:]), p[0])[1](np.ones(8, np.float32)))
    p = batches.problem(8, 100, 60, 9, dtype="float32")
    expected, *others = [gradient(*jax.device_put(p, device)) for device in devices]
    for got in others:
        compare.assert_same_bits(got, expected)


def test_threads_warn_once():
    """The warning that a program runs on the reference comes once for each reason."""
    reason = f"a reason of {test_threads_warn_once.__name__}"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        at_once(lambda i: primitive.warn_once(reason))
    assert sum(reason in str(w.message) for w in seen) == 1


def test_lock_is_off_where_the_interpreter_has_none():
    """The tests above ran without it: no package of theirs turned it on."""
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert getattr(sys, "_is_gil_enabled", lambda: True)() != free
