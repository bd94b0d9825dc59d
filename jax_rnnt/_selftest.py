"""selftest: every registered kernel of this machine against the reference."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt._xla import loading
from jax_rnnt.emissions import softmax
from jax_rnnt.lattices import lattice
from jax_rnnt.lattices.topology import MONOTONIC, STANDARD, products, slots


def _problem(dtype):
    """A ragged batch with padding, an empty target and a sequence without frames."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 2, (4, 9, 6, 37)), dtype)
    num_frames, num_labels = jnp.array([9, 5, 7, 0], jnp.int32), jnp.array([5, 3, 0, 0], jnp.int32)
    label = softmax.label_map(jnp.asarray(rng.integers(0, 37, (4, 5)), jnp.int32), num_labels)
    return logits, label, num_frames, num_labels


def _error(got, expected):
    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):
            return np.max(np.where(a == b, 0, np.abs(a - b) / np.maximum(1, np.abs(b))))

    return np.max([one(a, b) for a, b in zip(got, expected, strict=True)])  # NaN wins, unlike in max()


def _results(platform, logits, label, num_frames, num_labels):
    """{target: (what the kernel gives, what the reference gives)}"""
    options: dict[str, Any] = dict(blanks=(0,), normalize=True)
    arcs = softmax.softmax_emission(logits, label, num_frames, **options)
    forward = softmax.forward(logits, label, num_frames, strict=True, **options)
    operands = logits, label, num_frames, arcs[2]
    scale = jnp.asarray([1.0, -2.0, 0.5, 1.0], arcs[0].dtype)
    clamp = jnp.full_like(scale, 0.1)
    cotangents = -jnp.exp(arcs[0]), -jnp.exp(arcs[1])
    backward = softmax.backward(*operands, cotangents, scale, clamp, strict=True, alias=False, **options)
    results = {
        loading.TARGETS[0]: (forward, arcs),
        loading.TARGETS[1]: ([backward], softmax.backward_reference(*operands, scale, clamp, *cotangents, **options)),
    }
    if arcs[0].dtype != logits.dtype:  # the lattice only ever sees the accumulation dtypes
        return results
    # Of the kernels, of the reference.
    values: tuple[list, list] = [], []
    gradients: tuple[list, list] = [], []
    for topology in (STANDARD, MONOTONIC, products((2, 0, 1))):
        if not lattice.supported(topology, platform):
            continue
        operands = topology, {slot: arcs["label" in slot] for slot in slots(topology)}, num_frames, num_labels
        got, expected = lattice.value_and_grad(*operands, strict=True), lattice.reference_grad(*operands)
        values[0].append(lattice.value(*operands, strict=True))
        values[1].append(expected[0])
        gradients[0].extend(jax.tree.leaves(got))
        gradients[1].extend(jax.tree.leaves(expected))
    return results | {loading.TARGETS[2]: values, loading.TARGETS[3]: gradients}


def _required(require, platform: str) -> list[str]:
    """The platforms that must have kernels."""
    known = [name for name, _, _ in loading.PLATFORMS]
    if require is None:
        return ["cpu", "cuda"] if platform == "cuda" else ["cpu"]
    if isinstance(require, str) or not isinstance(require, Collection) or not set(require) <= set(known):
        expected = f"None or a sequence of {', '.join(map(repr, known))}"
        raise ValueError(f"selftest: require must be {expected}, got {require!r}.")
    return [name for name in known if name in require]


def selftest(*, require: Sequence[str] | None = None) -> list[str]:
    """Runs every kernel registered for the default backend against the pure-JAX reference on a small ragged batch.

    Parameters
    ----------
    require : sequence of {"cpu", "cuda"}, optional
        Platforms that must have kernels. None: "cpu", and "cuda" where the default backend is an NVIDIA GPU. Those of
        TPUs need no build; ROCm and Metal have none and run the reference. (): none, so that a pure-Python install
        passes.

    Returns
    -------
    list of str
        One line for each kernel and dtype: platform, kernel, dtype, largest error relative to
        max(1, |reference|). One line saying so where the platform has no kernels. float64 needs jax_enable_x64.

    Raises
    ------
    RuntimeError
        If a required platform has no kernels: the message names the reason and the cure. If an error exceeds the
        rounding of the dtype: the message holds the lines that are wrong.
    ValueError
        If `require` names another platform.

    Examples
    --------
    >>> import jax_rnnt
    >>> print(jax_rnnt.selftest()[0])  # doctest: +SKIP
    cpu   jax_rnnt_softmax_emission_fwd  float32   max error 1.2e-07  ok
    """
    platform = loading.default_platform()
    reasons = {name: loading.missing(name) for name in {*_required(require, platform), platform}}
    missing = [name for name in _required(require, platform) if reasons[name]]
    if missing:
        lines = [f"{name:5} no kernels: {reasons[name]}" for name in missing]
        raise RuntimeError("jax_rnnt.selftest: required kernels are missing:\n" + "\n".join(lines))
    if platform != "tpu" and (platform not in loading.KERNELS or reasons[platform]):
        reason = reasons[platform] or "there are none for this platform"
        return [f"{platform:5} no kernels, the reference runs: {reason}"]
    # The references run once, and LLVM would take 9 s to optimise them. Kernels are compiled already.
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    options = quick if platform == "cpu" else None
    lines, wrong = [], []
    for dtype in _checks.FLOATS:
        if dtype == "float64" and (platform == "tpu" or not jax.config.read("jax_enable_x64")):
            continue
        program = jax.jit(functools.partial(_results, platform), compiler_options=options)
        for target, (got, expected) in program(*_problem(dtype)).items():
            error = _error(got, expected)
            # Arcs and posteriors are float32 for 16-bit logits; only the gradient of the logits is rounded to 16 bits.
            rounded = dtype if target == loading.TARGETS[1] else softmax.accumulation_dtype(jnp.dtype(dtype))
            good = error <= 32 * float(jnp.finfo(rounded).eps)
            lines.append(f"{platform:5} {target:30} {dtype:9} max error {error:.1e}  {'ok' if good else 'WRONG'}")
            if not good:
                wrong.append(lines[-1])
    if wrong:
        raise RuntimeError("jax_rnnt.selftest: kernels that disagree with the reference:\n" + "\n".join(wrong))
    return lines
