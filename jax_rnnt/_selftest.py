"""selftest compares every kind of kernel of this machine with the reference."""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _selftest_joint
from jax_rnnt._xla import loading, proof
from jax_rnnt._xla.grouped import enable_x64
from jax_rnnt._xla.primitive import too_old_for_pallas
from jax_rnnt.emissions import _softmax as softmax
from jax_rnnt.emissions._emission import label_map
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices._topology import MONOTONIC, STANDARD, multi_blank, products, slots

# {kind: (classes of a row, options)}. A row is read by one lane, a few, a warp or a block of a GPU, by its bytes.
EMISSIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "softmax, tiny rows": (15, {}),
    "softmax, short rows": (120, {}),
    "softmax, medium rows": (1001, {}),
    "softmax, long rows": (33003, {}),
    "log-probabilities": (33, {"normalize": False}),
    "three blanks": (40, {"blanks": (0, 3, 2)}),
    "tokens and durations": (53, {"durations": 3}),
    "Bernoulli blank": (65, {"bernoulli": True}),
}
LATTICES = {  # {kind: (arcs, whether every path of a sequence with labels pays 1e9 once)}
    "standard": (STANDARD, False),
    "monotonic": (MONOTONIC, False),
    "big blanks": (multi_blank((2, 3)), False),
    "tokens and durations": (products((2, 0, 1)), False),
    "standard, arcs of -1e9": (STANDARD, True),
    "durations, arcs of -1e9": (products((2, 0, 1)), True),
}


def _emissions(dtype):
    """Returns {kind: operands}: ragged batches with padding, an empty target and a sequence without frames."""
    rng, operands = np.random.default_rng(0), {}
    for kind, (classes, _) in EMISSIONS.items():
        frames, columns = (9, 6) if classes < 10000 else (3, 2)
        logits = jnp.asarray(rng.normal(0, 2, (4, frames, columns, classes)), dtype)
        num_frames = jnp.minimum(jnp.array([9, 5, 7, 0], jnp.int32), frames)
        num_labels = jnp.minimum(jnp.array([5, 3, 0, 0], jnp.int32), columns - 1)
        targets = jnp.asarray(rng.integers(0, classes - 3, (4, columns - 1)), jnp.int32)  # below the durations
        operands[kind] = logits, label_map(targets, num_labels), num_frames
    return operands


def _lattices(dtype):
    """Returns {kind: (arcs, num_frames, num_labels)}; the lattice only ever sees the accumulation dtypes."""
    rng, operands = np.random.default_rng(0), {}
    for kind, (topology, wide) in LATTICES.items() if softmax.accumulation_dtype(jnp.dtype(dtype)) == dtype else ():
        arcs = {slot: -rng.exponential(2, (4, 9, 37)) for slot in slots(topology)}
        if wide:
            arcs["label"][..., 0] -= 1e9
        planes = {slot: jnp.asarray(x, dtype) for slot, x in arcs.items()}
        operands[kind] = planes, jnp.array([9, 5, 7, 0], jnp.int32), jnp.array([7, 3, 0, 0], jnp.int32)
    return operands


def _options(kind):
    return {"blanks": (0,), "normalize": True, "durations": 0, "bernoulli": False, **EMISSIONS[kind][1]}


def _pullback(planes):
    """Returns (norm, scale, clamp, cotangents)."""
    *arcs, norm = planes
    scale = jnp.asarray([1.0, -2.0, 0.5, 1.0], norm.dtype)
    return norm, scale, jnp.full_like(scale, 0.1), *(-jnp.exp(x) for x in arcs)


def _emission_references(emissions):
    """Returns {target: {kind: results}}. 16-bit logits are taken as float32: the program is the same."""
    forward, backward = {}, {}
    for kind, operands in emissions.items():
        forward[kind] = softmax.softmax_emission(*operands, **_options(kind))
        backward[kind] = softmax.backward_reference(*operands, *_pullback(forward[kind]), **_options(kind))
    return dict(zip(loading.TARGETS[:2], (forward, backward)))


def _emission_kernels(emissions, planes):
    """Returns the same by kernel, with the backward kernels at the reference's planes."""
    forward, backward = {}, {}
    for kind, operands in emissions.items():
        options = dict(num_batch_dims=1, strict=True, **_options(kind))
        forward[kind] = softmax.forward_kernel(*operands, **options)
        backward[kind] = softmax.backward_kernel(*operands, *_pullback(planes[kind]), **options)
    return dict(zip(loading.TARGETS[:2], (forward, backward)))


def _lattice_references(lattices):
    results = {kind: lattice.reference_grad(LATTICES[kind][0], *x) for kind, x in lattices.items()}
    return dict(zip(loading.TARGETS[2:], ({kind: x[:1] for kind, x in results.items()}, results)))


def _lattice_kernels(lattices):
    loss = {kind: (lattice.value(LATTICES[kind][0], *x, strict=True),) for kind, x in lattices.items()}
    grad = {kind: lattice.value_and_grad(LATTICES[kind][0], *x, strict=True) for kind, x in lattices.items()}
    return dict(zip(loading.TARGETS[2:], (loss, grad)))


def _error(got, expected):
    if isinstance(got, Exception):
        return np.inf

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        with np.errstate(invalid="ignore"):
            return np.max(np.where(a == b, 0, np.abs(a - b) / np.maximum(1, np.abs(b))))

    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return np.max([one(a, b) for a, b in pairs])  # NaN wins, unlike in max()


def _required(require, platform: str) -> list[str]:
    """Returns the platforms that must have kernels."""
    known = [name for name, _, _ in loading.PLATFORMS]
    if require is None:
        return ["cpu", "cuda"] if platform == "cuda" else ["cpu"]
    if isinstance(require, str) or not isinstance(require, Collection) or not set(require) <= set(known):
        expected = f"None or a sequence of {', '.join(map(repr, known))}"
        raise ValueError(f"selftest: require must be {expected}, got {require!r}.")
    return [name for name in known if name in require]


def selftest(*, require: Sequence[str] | None = None) -> list[str]:
    """Runs every kind of kernel against the pure-JAX reference, on small ragged batches.

    Emissions: rows of each size, log-probabilities, several blanks, durations, a Bernoulli blank. Lattices: unit steps,
    arcs that skip frames, arcs of -1e9. Linear joint networks: value and gradients of several losses. Dtypes: all that
    the kernel takes. The kernels of the default backend run, and those of the required platforms, on one device of each
    kind. On a GPU or a TPU this takes about two minutes.

    A kernel that no device has yet shown to be right is not the default. Where all lines are right, a verdict in the
    user's cache (``$XDG_CACHE_HOME/jax_rnnt``, by default ``~/.cache/jax_rnnt``) makes such kernels the default on this
    kind of device, until driver, jaxlib, JAX or this package change. Programs that are already compiled stay as they
    are.

    Parameters
    ----------
    require : sequence of {"cpu", "cuda"}, optional
        Platforms whose kernels must run. None: "cpu", and "cuda" where the default backend is an NVIDIA GPU; a CPU that
        JAX_PLATFORMS hides is no error, but a line of the result. Kernels of TPUs need no build; ROCm and Metal have
        none and run the reference. (): none, so that a pure-Python install passes.

    Returns
    -------
    list of str
        One line for each kernel and kind: platform, kernel, kind, and for each dtype the largest error relative to
        ``max(1, |reference|)``, of a joint network relative to the largest number of an array. One line for each
        platform that was not tested, with the reason. For devices with kernels that need a verdict, one line that names
        device, driver and versions, and one that says what became of the verdict.

    Raises
    ------
    RuntimeError
        If kernels of a required platform are missing or did not run: the message names the reason and the remedy. If an
        error exceeds the rounding of the dtype, or a kernel raises: the message holds the lines that are wrong, and
        names the device. No verdict is kept.
    ValueError
        If `require` names another platform, or the environment variable JAX_RNNT_KERNELS has an unknown value.

    Examples
    --------
    >>> import jax_rnnt
    >>> print(jax_rnnt.selftest()[0])  # doctest: +SKIP
    cpu   jax_rnnt_softmax_emission_fwd  softmax, tiny rows  float16 1.2e-07, ..., float64 2.2e-16  ok
    """
    proof.all_chosen()  # this raises an error where the variable is wrong
    platform = loading.default_platform()
    required = _required(require, platform)
    reasons = {}
    for name in dict.fromkeys((platform, *required, *(name for name, _, _ in loading.PLATFORMS))):
        reasons[name] = loading.missing(name)
        if reasons[name] is None and name not in (*loading.KERNELS, "tpu"):
            reasons[name] = "there are none for this platform"
        if name == "tpu":
            reasons[name] = too_old_for_pallas()
    missing = [f"{name:5} no kernels: {reasons[name]}" for name in required if reasons[name]]
    if missing:
        raise RuntimeError("jax_rnnt.selftest: required kernels are missing:\n" + "\n".join(missing))
    lines: list[str] = []
    wrong: list[str] = []
    idle: list[str] = []
    for name, reason in reasons.items():
        if reason and name == platform:
            lines.append(f"{name:5} no kernels, the reference runs: {reason}")
        elif reason or name not in (platform, *required):
            lines.append(f"{name:5} not run: {reason or 'not required, and not the default backend'}")
        elif not (found := proof.devices_of(name)):
            lines.append(f"{name:5} not run: JAX sees no such device")
            idle += [lines[-1]] if require is not None else []
        else:
            for device in found.values():
                good, bad = _of_device(name, device)
                lines, wrong = lines + good, wrong + bad
    if wrong:
        raise RuntimeError("jax_rnnt.selftest: kernels that disagree with the reference:\n" + "\n".join(wrong))
    if idle:
        raise RuntimeError("jax_rnnt.selftest: required kernels did not run:\n" + "\n".join(idle))
    return lines


def _of_device(platform, device) -> tuple[list[str], list[str]]:
    """Returns (lines of the report, those of wrong kernels); keeps the verdict of a device whose kernels need one."""
    home = next(iter(proof.devices_of("cpu").values()), device)
    of_loss, of_joint = _compare(platform, device, home), _selftest_joint.compare(platform, device, home)
    good, bad = (a + b for a, b in zip(of_loss, of_joint))
    unproven, tested = proof.unvouched(platform), {line.split()[1] for line in good + bad}
    if tested.isdisjoint(unproven):
        return good, bad
    name = f"{platform:5} " + ", ".join(f"{key} {value}" for key, value in proof.identity(platform, device).items())
    if bad:
        return [name, *good], [name, *bad]
    return [name, *good, f"{platform:5} {proof.keep(platform, device)}"], []


def _compare(platform, device, home) -> tuple[list[str], list[str]]:
    """Returns (lines of right kernels, lines of wrong ones); references run on `home`, the CPU where there is one.

    XLA takes half a minute to compile them for a GPU.
    """
    errors: dict[tuple[str, str], list[str]] = {}
    wrong = set()
    for dtype in _checks.FLOATS:
        if dtype == "float64" and platform == "tpu":
            continue
        wide = softmax.accumulation_dtype(jnp.dtype(dtype))
        with enable_x64(wide == np.float64 or jax.config.read("jax_enable_x64")):
            emissions, lattices = jax.device_put((_emissions(dtype), _lattices(dtype)), device)
            as_read = {kind: (logits.astype(wide), *arrays) for kind, (logits, *arrays) in emissions.items()}
            as_read, same = jax.device_put((as_read, lattices), home)
            run = functools.partial(_quick, home.platform)
            expected = run(_emission_references)(as_read) | run(_lattice_references)(same)
            planes = jax.device_put(expected[loading.TARGETS[0]], device)
            got = _attempt(platform, _emission_kernels, loading.TARGETS[:2], emissions, planes)
            got |= _attempt(platform, _lattice_kernels, loading.TARGETS[2:], lattices)
        kinds = *((x, EMISSIONS) for x in loading.TARGETS[:2]), *((x, lattices) for x in loading.TARGETS[2:])
        for target, kind in ((target, kind) for target, table in kinds for kind in table):
            result = got[target][kind]
            error = _error(result, expected[target][kind])
            text = _selftest_joint.described(result) if isinstance(result, Exception) else f"{error:.1e}"
            errors.setdefault((target, kind), []).append(f"{dtype} {text}")
            # Arcs and posteriors are float32 for 16-bit logits; only the gradient of the logits is rounded to 16 bits.
            rounded = dtype if target == loading.TARGETS[1] else wide
            if not error <= 32 * float(jnp.finfo(rounded).eps):
                wrong.add((target, kind))
    line = {key: f"{platform:5} {key[0]:29} {key[1]:24} {', '.join(x)}" for key, x in errors.items()}
    good, bad = ([key for key in line if (key in wrong) == is_bad] for is_bad in (False, True))
    return [f"{line[key]}  ok" for key in good], [f"{line[key]}  WRONG" for key in bad]


def _attempt(platform, function, targets, *operands):
    """Returns {target: {kind: results}}, with the exception in place of results where kernels of a kind raise one."""

    def run(*operands):
        return jax.block_until_ready(_quick(platform, function)(*operands))

    try:
        return run(*operands)
    except Exception:  # from XLA, Mosaic or the driver: the kinds, one by one, show which
        found: dict[str, dict[str, Any]] = {target: {} for target in targets}
    for kind in operands[0]:
        try:
            results = run(*({kind: x[kind]} for x in operands))
        except Exception as error:
            results = {target: {kind: error} for target in targets}
        for target in targets:
            found[target] |= results[target]
    return found


def _quick(platform, function):
    """Compiles in haste: the function runs once, and LLVM would take long to optimise the references."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(function, compiler_options=quick if platform == "cpu" else None)
