"""Does a training loop's memory stay where it is? Thousands of steps of several kinds, and the resident set.

Each kind is another way to use the library: a jitted step, a new length of each batch in a few buckets, calls without
jit, tiles of a joint network, and the reference. Prints the resident set after each tenth of the steps. The exit code
is 1 where the last six tenths of a run grow by more than --allowed MB. (A joint network that is a new function in each
step, outside jit, is compiled in each step, and JAX keeps all programs: that is none of the kinds.)

    python benchmarks/soak.py [--steps 10000] [--kinds jit eager ...]
"""

import argparse
import gc
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_rnnt

B, T, U, V, H = 4, 30, 8, 64, 16


def resident():
    """MB of this process that are in memory."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    sys.exit("soak.py: needs Linux's /proc/self/status")


def batch(rng, frames=T, labels=U):
    hidden = rng.normal(size=(B, frames, labels + 1, H)).astype(np.float32)
    return (
        hidden,
        rng.integers(0, V - 1, (B, labels)).astype(np.int32),
        rng.integers(1, frames + 1, B).astype(np.int32),
        rng.integers(0, labels + 1, B).astype(np.int32),
    )


def dense(implementation=None):
    def step(weight, hidden, *rest):
        def mean(w):
            return jax_rnnt.rnnt_loss(hidden @ w, *rest, implementation=implementation)

        value, gradient = jax.value_and_grad(mean)(weight)
        return weight - 0.01 * gradient, value

    return step


def tiles(weight, hidden, *rest):
    encoder, predictor = hidden[:, :, 0], hidden[:, 0]

    def mean(w):
        def joint(e, p):
            return jnp.tanh(e + p) @ w

        return jax_rnnt.RNNTLoss()(jax_rnnt.JointLogits(joint, encoder, predictor, chunk=32), *rest)

    value, gradient = jax.value_and_grad(mean)(weight)
    return weight - 0.01 * gradient, value


def kinds():
    """Name of a kind -> (step, sizes of its batches, share of the steps)."""
    return {
        "jit": (jax.jit(dense(), donate_argnums=0), [(T, U)], 1),
        "buckets": (jax.jit(dense()), [(T + 8 * i, U + i) for i in range(6)], 1),
        "reference": (jax.jit(dense("reference")), [(T, U)], 0.1),
        "tiles": (jax.jit(tiles), [(T, U)], 0.1),
        "eager": (dense(), [(T, U)], 0.1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--kinds", nargs="+", default=list(kinds()), choices=list(kinds()))
    parser.add_argument("--allowed", type=float, default=4, help="MB of growth, the noise of an allocator")
    options = parser.parse_args()
    grown = []
    for name in options.kinds:
        step, sizes, share = kinds()[name]
        steps = max(10, int(options.steps * share))
        rng = np.random.default_rng(0)
        weight, held, start = jnp.zeros((H, V)), [], time.monotonic()
        for i in range(steps):
            weight, value = step(weight, *batch(rng, *sizes[i % len(sizes)]))
            if (i + 1) % max(1, steps // 10) == 0:
                assert np.isfinite(float(value)), value
                gc.collect()
                held.append(resident())
        growth = held[-1] - held[3]
        grown += [name] * (growth > options.allowed)
        figures = " ".join(f"{x:.1f}" for x in held)
        print(f"{name}: {steps} steps in {time.monotonic() - start:.0f} s; MB after each tenth: {figures}; "
              f"growth of the last six tenths {growth:+.1f}", flush=True)  # fmt: skip
    if grown:
        print(f"memory grows: {', '.join(grown)}")
    return int(bool(grown))


if __name__ == "__main__":
    sys.exit(main())
