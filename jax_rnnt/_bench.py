"""Times value and gradient of a loss at a user's own shape, next to the reference, plain JAX and a copy."""

import functools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import losses
from jax_rnnt._xla import loading

LOSSES: dict[str, Any] = {
    "rnnt": losses.RNNTLoss,
    "monotonic": losses.MonotonicRNNTLoss,
    "constrained": losses.ConstrainedRNNTLoss,
    "hat": losses.HATLoss,
    "multiblank": functools.partial(losses.MultiblankRNNTLoss, (2, 4, 8)),
    "tdt": functools.partial(losses.TDTLoss, (0, 1, 2, 3, 4)),
}


def _turns(function, *arguments, budget=1.0):
    """Measures the times of a call in several turns, at least three, after one call.

    A turn lasts 10 ms or one call: the host waits once, as in training, where a device has the next work before it is
    done.
    """

    def turn(calls):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*arguments)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    turn(1)
    calls = max(1, round(0.01 / turn(1)))
    times: list[float] = []
    while len(times) < 3 or calls * sum(times) < budget:
        times.append(turn(calls))
    return times


def copy_speed(size: int) -> float:
    """Bytes that a copy reads and writes a second: the ruler of all benchmarks, for programs that move `size` bytes.

    It is the best of several copies of three sizes. None is smaller than `size`, since a smaller one may fit into a
    cache that `size` bytes do not. A copy is in place: to map the pages of a fresh result takes a CPU several times as
    long. Small arrays are copied again and again in one program, which otherwise would measure its launch; XLA must not
    know how often, since it would add up the rounds.
    """

    def speed(words):
        times = max(1, 2**28 // words.nbytes)

        def copies(x, n):
            return jax.lax.fori_loop(0, n, lambda i, x: x + jnp.uint32(1), x) if times > 1 else x + jnp.uint32(1)

        turns = _in_place(jax.jit(copies, donate_argnums=0), words, jnp.int32(times), budget=0.3)
        return 2 * words.nbytes * times / min(turns)

    return max(speed(jnp.zeros(-(-halves * size // 8), jnp.uint32)) for halves in (2, 3, 4))


def _in_place(function, first, *others, budget=1.0):
    """Calls `_turns` for a function that writes its last result over its first argument, which it gets next time."""
    held = [first]

    def again():
        result = function(held[0], *others)
        held[0] = result[-1] if isinstance(result, tuple) else result
        return result

    return _turns(again, budget=budget)


def _variants(name, alone):
    """Returns {row: the loss}: kernels if any; unless alone, the reference, and the softmax outside the loss."""
    make = LOSSES[name]
    rows = {"jax_rnnt": make()}
    if alone:
        return rows
    if loading.default_platform() in loading.KERNELS:
        rows["its reference"] = make(implementation="reference")
    if name in ("rnnt", "monotonic"):  # their emission is one log_softmax
        outside = make(implementation="reference", fused_log_softmax=False)
        rows["plain JAX"] = lambda logits, *batch: outside(jax.nn.log_softmax(logits.astype(jnp.float32)), *batch)
    return rows


def bench(
    B: int, T: int, U: int, V: int, loss: str = "rnnt", dtype: str = "float32", alone: bool = False
) -> dict[str, Any]:
    """Measures value and gradient for B full sequences of T frames and U labels. V excludes durations.

    A share of 1 means: the three passes over the logits that a gradient needs (two read, one writes) take the time in
    which a copy moves as many bytes (`copy_speed`, measured in the same process). The time is a median. The gradient
    overwrites the logits. Memory is what a program needs besides its arguments, the gradient included.
    """
    variants = _variants(loss, alone)
    classes = V + len(getattr(variants["jax_rnnt"], "durations", ()))
    first = len(getattr(variants["jax_rnnt"], "big_blank_durations", ()))
    rng = np.random.default_rng(0)
    copied = copy_speed(math.prod((B, T, U + 1, classes)) * jnp.dtype(dtype).itemsize)  # before the logits take memory
    logits = jax.random.normal(jax.random.key(0), (B, T, U + 1, classes), dtype)
    targets = jnp.asarray(rng.integers(first, V - 1, (B, U)), jnp.int32)
    batch = targets, jnp.full(B, T, jnp.int32), jnp.full(B, U, jnp.int32)
    rows = {}
    for name, function in variants.items():
        compiled = jax.jit(jax.value_and_grad(function), donate_argnums=0).lower(logits, *batch).compile()
        seconds = statistics.median(_in_place(compiled, logits.copy(), *batch))
        memory = compiled.memory_analysis()
        rows[name] = {
            "milliseconds": 1e3 * seconds,
            "share_of_copy_bandwidth": 3 * logits.nbytes / seconds / copied,
            "memory_bytes": memory and memory.temp_size_in_bytes + memory.output_size_in_bytes,
        }
    return {
        "shape": [B, T, U, V],
        "loss": loss,
        "dtype": dtype,
        "device": jax.devices()[0].device_kind,
        "logits_bytes": logits.nbytes,
        "copy_bytes_per_second": copied,
        "rows": rows,
    }


def text(figures: dict[str, Any]) -> list[str]:
    """Returns a table of `bench`'s figures."""
    size, speed = figures["logits_bytes"], figures["copy_bytes_per_second"]
    lines = [
        f"{figures['loss']} {figures['dtype']} {figures['shape']} on {figures['device']}: value and gradient",
        f"logits {size / 1e6:.1f} MB; the best of several copies reads and writes at {speed / 1e9:.1f} GB/s",
        f"share of copy: of that speed, for the {3 * size / 1e6:.1f} MB that value and gradient must move",
        f"{'':14} {'ms':>10} {'share of copy':>14} {'memory MB':>10}",
    ]
    for name, row in figures["rows"].items():
        memory = "unknown" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.1f}"
        lines.append(f"{name:14} {row['milliseconds']:10.2f} {row['share_of_copy_bandwidth']:14.0%} {memory:>10}")
    return lines
