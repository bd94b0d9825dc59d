"""Decides which kernels are the default: those that a device has shown to be right.

`KERNELS` lists the kernels that a record of a device in the repository vouches for. A CUDA kernel that one CUDA device
has run counts on all of them. The kernels of the CPU are tested on every kind of machine that wheels exist for, so they
are not in the list and always count.

Any other kernel becomes the default where `python -m jax_rnnt selftest` has found it right, which keeps a verdict in
the user's cache. This is decided when a program is lowered for a platform, so a program that is already compiled stays
as it is. A verdict belongs to a kind of device, a driver, a jaxlib and a build of this package.
"""

import functools
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable

import jax
import jaxlib

from jax_rnnt import _installation
from jax_rnnt._xla import loading
from jax_rnnt._xla.over_devices import device_of

_H100 = "lab/benchmarks/results/2026-11-26-h100-second-log.txt"  # suite, check program, memcheck, selftest
# For each platform, the kernels of its devices, with the record of a device that has run it; None where none has.
KERNELS: dict[str, dict[str, str | None]] = {
    "cuda": dict.fromkeys(loading.TARGETS, _H100) | dict.fromkeys(loading.JOINT),
    "tpu": dict.fromkeys((*loading.TARGETS[2:], *loading.JOINT[:2])),  # the emission is XLA's there
}
VARIABLE = "JAX_RNNT_KERNELS"
_SELFTEST = "`python -m jax_rnnt selftest`"


def all_chosen() -> bool:
    """Returns True if the environment asks for all kernels, with or without proof."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "all"):
        raise ValueError(f"The environment variable {VARIABLE} must be 'all' or not be set, got {value!r}.")
    return value == "all"


def unvouched(platform: str) -> list[str]:
    """Returns the platform's kernels that no record vouches for."""
    return [name for name, record in KERNELS.get(platform, {}).items() if record is None]


def doubt(ctx, platform: str, kernels: Iterable[str]) -> str | None:
    """Returns why these kernels are not the default in the program being lowered, and what to do; None if they are."""
    chosen, unproven = all_chosen(), unvouched(platform)
    if chosen or set(unproven).isdisjoint(kernels):
        return None
    found, named = devices_of(platform), device_of(ctx)[0]
    kinds = {named} if named else set(found)
    ahead = ctx.module_context.lowering_parameters.for_export or not kinds or not kinds <= set(found)
    several = jax.process_count() > 1
    if not ahead and not several and all(proven(platform, found[kind]) for kind in kinds):
        return None
    where = f"platform {platform}" if ahead else " and ".join(sorted(kinds))
    message = (
        f"jax_rnnt does not use its kernels {', '.join(unproven)} on {where}, since no device has shown yet that they "
        "are right; tiles or the pure-JAX reference take their place"
    )
    anyway = f"{VARIABLE}=all in the environment or implementation='kernel'"
    if ahead:
        return (
            f"{message}. A program that is compiled ahead of time asks no device: run {_SELFTEST} on one, and choose "
            f"the kernels by {anyway}."
        )
    if several:
        return (
            f"{message}. Run {_SELFTEST} on one device. Its verdict does not count for several processes, whose "
            f"programs must not differ, so choose the kernels in all of them by {anyway}."
        )
    return f"{message}. Run {_SELFTEST} on this machine: where they are right, they are the default from then on."


def devices_of(platform: str) -> dict[str, jax.Device]:
    """Returns {kind: a device} of this process on the platform; programs for others are compiled ahead of time."""
    if platform == loading.default_platform():
        found = jax.local_devices()
    else:
        try:
            found = jax.local_devices(backend=platform)
        except RuntimeError:
            found = []
    return {device.device_kind: device for device in reversed(found)}


# --------------------------------------------------------------------------------------------------------- verdicts


def identity(platform: str, device: jax.Device) -> dict[str, str]:
    """Returns everything that a verdict depends on."""
    return {
        "platform": platform,
        "device": device.device_kind,
        "driver": _driver(device),
        "jaxlib": jaxlib.__version__,
        "jax": jax.__version__,
        "jax_rnnt": build(platform),
    }


def _driver(device: jax.Device) -> str:
    """Returns the versions of the plugin and, for NVIDIA's devices, of the system's driver."""
    version = " ".join(device.client.platform_version.split())
    try:
        of_system = re.search(r"\d+(\.\d+)+", pathlib.Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        of_system = None
    return f"{version}, NVIDIA {of_system[0]}" if of_system and device.platform in ("gpu", "cuda") else version


@functools.cache
def build(platform: str) -> str:
    """Names this build by the version, and a digest of its Python files and of the platform's extension module."""
    digest, package = hashlib.sha256(), pathlib.Path(_installation.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    module = loading.module(platform) if platform in loading.KERNELS else None
    if file := getattr(module, "__file__", None):
        digest.update(pathlib.Path(file).read_bytes())
    return digest.hexdigest()[:16]


def folder() -> pathlib.Path:
    """Returns the folder of the user's cache that has the verdicts."""
    base: str | pathlib.Path = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform == "win32":
        base = base or os.environ.get("LOCALAPPDATA", "")
    if not os.path.isabs(base):  # the standard ignores a relative path
        base = pathlib.Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    return pathlib.Path(base) / "jax_rnnt"


def _verdict(platform: str, device: jax.Device) -> tuple[str, str]:
    """Returns (name of its file, text): one file each, since machines with other devices may share a home."""
    text = json.dumps(identity(platform, device) | {"right": sorted(unvouched(platform))}, indent=2) + "\n"
    return f"selftest-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json", text


def proven(platform: str, device: jax.Device) -> bool:
    """Returns True if a selftest on this kind of device found the kernels right. A damaged file counts for nothing."""
    name, text = _verdict(platform, device)
    try:
        return (folder() / name).read_bytes() == text.encode()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return False


def keep(platform: str, device: jax.Device) -> str:
    """Writes that the kernels are right, and returns a sentence about what follows."""
    name, text = _verdict(platform, device)
    kernels = ", ".join(unvouched(platform))
    try:
        path = folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as own:  # several threads, or machines, may write at once
            part = pathlib.Path(own) / name
            part.write_bytes(text.encode())
            part.replace(path)
    except (OSError, RuntimeError) as error:
        return (
            f"all right, but the verdict cannot be kept ({error}): set XDG_CACHE_HOME to a folder that can be written, "
            f"or choose the kernels by {VARIABLE}=all"
        )
    return f"all right: from now on {kernels} are the default here; verdict in {path}"
