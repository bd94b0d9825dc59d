"""Does a training loop's memory stay where it is? Thousands of steps of several kinds, and the resident set.

    python lab/benchmarks/soak.py [--steps 10000] [--kinds jit eager ...]

Prints the resident set after each tenth of the steps. The exit code is 1 where the last six tenths of a run grow by
more than --allowed MB. (A joint network that is a new function in each step, outside jit, is compiled in each step, and
JAX keeps all programs: that is none of the kinds.)
"""

import argparse
import functools
import gc
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import JointLogits, RNNTLoss

B, T, U, V, H = 4, 30, 8, 64, 16


def dense(weight, encoder, predictor, *rest, implementation=None):
    logits = jnp.tanh(encoder[:, :, None] + predictor[:, None]) @ weight
    return RNNTLoss(implementation=implementation)(logits, *rest)


def tiles(weight, encoder, predictor, *rest):
    return RNNTLoss()(JointLogits(lambda e, p: jnp.tanh(e + p) @ weight, encoder, predictor, chunk=32), *rest)


def step(loss, weight, *batch):
    value, gradient = jax.value_and_grad(loss)(weight, *batch)
    return weight - 0.01 * gradient, value


def jitted(loss):
    return jax.jit(functools.partial(step, loss), donate_argnums=0)


# Name -> (step, sizes of its batches, share of the steps)
KINDS = {
    "jit": (jitted(dense), [(T, U)], 1),
    "buckets": (jitted(dense), [(T + 8 * i, U + i) for i in range(6)], 1),
    "reference": (jitted(functools.partial(dense, implementation="reference")), [(T, U)], 0.1),
    "tiles": (jitted(tiles), [(T, U)], 0.1),
    "eager": (functools.partial(step, dense), [(T, U)], 0.1),
}


def batch(rng, frames, labels):
    rows = (rng.normal(size=(B, n, H)).astype(np.float32) for n in (frames, labels + 1))
    lengths = rng.integers(1, frames + 1, B), rng.integers(0, labels + 1, B)
    return *rows, *(x.astype(np.int32) for x in (rng.integers(0, V - 1, (B, labels)), *lengths))


def resident():
    """MB of this process that are in memory."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--allowed", type=float, default=4, help="MB of growth, the noise of an allocator")
    options = parser.parse_args(argv)
    grown = []
    for name in options.kinds:
        train, sizes, share = KINDS[name]
        tenth = max(1, int(options.steps * share) // 10)
        rng, weight, held, start = np.random.default_rng(0), jnp.zeros((H, V)), [], time.monotonic()
        for i in range(10 * tenth):
            weight, value = train(weight, *batch(rng, *sizes[i % len(sizes)]))
            if (i + 1) % tenth == 0:
                assert np.isfinite(float(value)), value
                gc.collect()
                held.append(resident())
        grown += [name] * (held[-1] - held[3] > options.allowed)
        seconds, figures = time.monotonic() - start, " ".join(f"{x:.1f}" for x in held)
        print(f"{name}: {10 * tenth} steps in {seconds:.0f} s; MB after each tenth: {figures}", flush=True)
    if grown:
        print(f"memory grows: {', '.join(grown)}")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
