"""Loads the extension modules and registers their handlers with XLA, if they fit the installed jaxlib."""

import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
from jax import export

from jax_rnnt import _installation
from jax_rnnt._xla import devices

TARGETS = (
    "jax_rnnt_softmax_emission_fwd",
    "jax_rnnt_softmax_emission_bwd",
    "jax_rnnt_lattice_loss",
    "jax_rnnt_lattice_grad",
)
# Kernels of GPUs alone, without a batch dimension.
JOINT = "jax_rnnt_joint_fwd", "jax_rnnt_joint_bwd", "jax_rnnt_joint_sums"
# JAX's name for a platform in lowering rules, XLA's name for it in the registry, and the module with its handlers.
PLATFORMS = (("cpu", "cpu", "_cpu"), ("cuda", "CUDA", "_cuda"))

# The kind of a platform's kernels, "cpu" or "cuda" (the emulation runs CUDA kernels on the CPU platform).
KERNELS: dict[str, str] = {}
# Why a platform has no kernels.
MISSING: dict[str, str] = {}
# The largest sizes that a platform's kernels take, by name. A name without an entry has no limit.
LIMITS: dict[str, dict[str, int]] = {}
# Platforms where kernels in Pallas are interpreted, with Pallas's way of doing so; tests fill it.
INTERPRETED: dict[str, Any] = {}
# ``(unit_steps, num_arcs, gradient) -> [(elements, frames, columns), ...]``: `xla_kernels/common/workspace.h`.
WORKSPACES: dict[str, Callable[[bool, int, bool], list[tuple[int, int, int]]]] = {}


def runtime_api() -> tuple[int, int] | None:
    """Returns (major, minor) of the installed jaxlib's FFI; None if its headers are missing or name no version."""
    try:
        text = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return None
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return (int(numbers["MAJOR"]), int(numbers["MINOR"])) if len(numbers) == 2 else None


def _load() -> None:
    """Registers the handlers of every extension module that is installed and fits."""
    runtime = runtime_api()
    for platform, registry, name in PLATFORMS:
        try:
            module = _installation.extension(name)
        except ImportError as error:
            MISSING[platform] = _installation.explain(platform, name, error)
            continue
        built = module.api_version()
        # A handler newer than the runtime would make JAX unable to initialise its backend at all: never register it.
        if runtime is not None and (built[0] != runtime[0] or built[1] > runtime[1]):
            MISSING[platform] = (
                f"jax_rnnt.{name} was built for XLA FFI {built}, newer than this jaxlib's {runtime}: update jax, or "
                f"run `{_installation.reinstall(platform)}`"
            )
            continue
        if not hasattr(module, "joint" if getattr(module, "kernels", "") == "cuda" else "limits"):
            cure = f"run `{_installation.reinstall(platform)}`"
            MISSING[platform] = f"jax_rnnt.{name} was built from an older source: {cure}"
            continue
        for target, handler in module.registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform=registry)
        KERNELS[platform], LIMITS[platform], WORKSPACES[platform] = module.kernels, module.limits(), module.workspace
    for target in TARGETS:
        jax.ffi.register_ffi_target_as_batch_partitionable(target)


_load()
if "cpu" in MISSING:
    _installation.warn(f"jax_rnnt runs on its pure-JAX reference: {MISSING['cpu']}.")


def default_platform() -> str:
    """Returns the default backend's platform by the name that lowering uses: JAX calls both makes of GPU "gpu"."""
    backend = jax.extend.backend.get_backend()
    if backend.platform == "gpu":
        return "rocm" if "rocm" in backend.platform_version.lower() else "cuda"
    return backend.platform


def module(platform: str):
    """Returns the loaded extension module with this platform's kernels, or None."""
    return sys.modules.get(next(f"jax_rnnt.{name}" for lowered, _, name in PLATFORMS if lowered == platform))


def missing(platform: str) -> str | None:
    """Returns why programs for this platform run without kernels; None if they have them."""
    return MISSING.get(platform) or (devices.unfit(module(platform)) if platform in KERNELS else None)


def limits(platform: str) -> dict[str, int]:
    """Returns `LIMITS` of the platform, with those of its devices."""
    return LIMITS[platform] | devices.limits(module(platform))


def joint_kernels(platform: str) -> str | None:
    """Returns the kind of a platform's kernels of joint networks, "tpu" (in Pallas) or "cuda"; None if it has none."""
    if platform in ("tpu", *INTERPRETED):
        return "tpu"
    return "cuda" if KERNELS.get(platform) == "cuda" and not missing(platform) else None


def shared_memory(platform: str, kind: str | None) -> int | str:
    """Returns a thread block's bytes for kernels of joint networks, for devices of this kind if none is visible."""
    return devices.shared_memory(module(platform), platform == "cpu", kind)


def instruction_set(platform: str) -> str:
    """Returns the instruction set of the platform's kernels, as far as their module names one."""
    kernels = module(platform)
    if hasattr(kernels, "target"):
        return kernels.target()
    return f"{KERNELS[platform]} kernels {getattr(kernels, 'architectures', '')}".strip()


def export_checks() -> list[export.DisabledSafetyCheck]:
    """Returns the safety checks to disable when a program that calls this library is exported.

    Returns
    -------
    list of export.DisabledSafetyCheck
        For the `disabled_checks` argument of `jax.export.export`: one for each custom call of this library. The
        program then runs where `jax_rnnt` of the same major version is imported.

    Examples
    --------
    >>> import jax, jax_rnnt
    >>> def double(x):
    ...     return 2 * x
    >>> exported = jax.export.export(jax.jit(double), disabled_checks=jax_rnnt.export_checks())(1.0)
    """
    return [export.DisabledSafetyCheck.custom_call(target) for target in (*TARGETS, *JOINT)]
