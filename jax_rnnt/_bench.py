"""Times value and gradient of a loss at a user's own shape, beside the reference, plain JAX and a copy."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import losses
from jax_rnnt._xla import loading

LOSSES = {
    "rnnt": losses.RNNTLoss,
    "monotonic": losses.MonotonicRNNTLoss,
    "constrained": losses.ConstrainedRNNTLoss,
    "hat": losses.HATLoss,
    "multiblank": losses.MultiblankRNNTLoss,
    "tdt": losses.TDTLoss,
}
_DURATIONS = {"multiblank": (2, 4, 8), "tdt": (0, 1, 2, 3, 4)}


def _seconds(function, *arguments, budget=1.0):
    """Median time of a call, after one call; three turns at least.

    A turn lasts 10 ms or a call: the host waits once, as in training, where a device has the next work before it is
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
    return statistics.median(times)


def _copy_bandwidth(size):
    """Bytes per second of a program that reads and writes `size` bytes in place, again and again.

    A fresh result would be a cold copy: mapping its pages takes several times as long on a CPU. A program of one copy
    would measure its launch where the array is small. XLA must not know how often: it would add up the rounds.
    """
    words = jnp.zeros(-(-size // 4), jnp.uint32)
    times = max(1, 2**28 // words.nbytes)

    def copies(x, n):
        return jax.lax.fori_loop(0, n, lambda i, x: x + jnp.uint32(1), x) if times > 1 else x + jnp.uint32(1)

    return 2 * words.nbytes * times / _in_place(jax.jit(copies, donate_argnums=0), words, jnp.int32(times))


def _in_place(function, first, *others):
    """`_seconds` of a function that writes its last result over its first argument; the result is the next argument."""
    held = [first]

    def again():
        result = function(held[0], *others)
        held[0] = result[-1] if isinstance(result, tuple) else result
        return result

    return _seconds(again)


def _variants(name, alone):
    """{row: the loss}: kernels where there are some; unless alone, the reference, and the softmax outside the loss."""
    durations = {"durations": _DURATIONS["tdt"]} if name == "tdt" else {}
    durations |= {"big_blank_durations": _DURATIONS["multiblank"]} if name == "multiblank" else {}
    kind: Any = LOSSES[name]

    def make(**options):
        return kind(**durations, **options)

    rows = {"jax_rnnt": make()}
    if alone:
        return rows
    if loading.default_platform() in loading.KERNELS:
        rows["its reference"] = make(implementation="reference")
    if name in ("rnnt", "monotonic"):  # the emission is one log_softmax
        outside = make(implementation="reference", fused_log_softmax=False)
        rows["plain JAX"] = lambda logits, *batch: outside(jax.nn.log_softmax(logits.astype(jnp.float32)), *batch)
    return rows


def bench(
    B: int, T: int, U: int, V: int, loss: str = "rnnt", dtype: str = "float32", alone: bool = False
) -> dict[str, Any]:
    """Figures of value and gradient for B full sequences of T frames and U labels. V excludes durations.

    A share of 1 means: the three passes over the logits that a gradient needs (two read, one writes) take the time in
    which a warm copy moves as many bytes, measured in the same process. The gradient overwrites the
    logits. Memory is what a program needs beside its arguments, the gradient included.
    """
    classes = V + (len(_DURATIONS["tdt"]) if loss == "tdt" else 0)
    rng = np.random.default_rng(0)
    logits = jax.random.normal(jax.random.key(0), (B, T, U + 1, classes), dtype)
    labels = (len(_DURATIONS["multiblank"]) if loss == "multiblank" else 0, V - 1)
    batch = jnp.asarray(rng.integers(*labels, (B, U)), jnp.int32), jnp.full(B, T, jnp.int32), jnp.full(B, U, jnp.int32)
    copied = _copy_bandwidth(logits.nbytes)
    rows = {}
    for name, function in _variants(loss, alone).items():
        compiled = jax.jit(jax.value_and_grad(function), donate_argnums=0).lower(logits, *batch).compile()
        seconds = _in_place(compiled, logits.copy(), *batch)
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
    """A table of `bench`'s figures."""
    size, speed = figures["logits_bytes"], figures["copy_bytes_per_second"]
    lines = [
        f"{figures['loss']} {figures['dtype']} {figures['shape']} on {figures['device']}: value and gradient",
        f"logits {size / 1e6:.1f} MB; a warm copy reads and writes as much in place, at {speed / 1e9:.1f} GB/s",
        f"share of copy: of that speed, for the {3 * size / 1e6:.1f} MB that value and gradient must move",
        f"{'':14} {'ms':>10} {'share of copy':>14} {'memory MB':>10}",
    ]
    for name, row in figures["rows"].items():
        memory = "unknown" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 1e6:.1f}"
        lines.append(f"{name:14} {row['milliseconds']:10.2f} {row['share_of_copy_bandwidth']:14.0%} {memory:>10}")
    return lines
