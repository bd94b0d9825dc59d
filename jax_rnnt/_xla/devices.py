"""Checks if the CUDA kernels run on the devices of this process, and what these hold.

The answers come from the CUDA runtime inside the extension module when a program is lowered, never at import. Where no
device is visible (programs compiled ahead of time), nothing is known and the kernels are taken to fit.
"""

import re

from jax_rnnt import _installation

OLDEST = (7, 5)  # compute capability
_LARGE = re.compile(r"\b(G?[HB][123]00|GH200)\b")  # kinds with 227 KB of shared memory for a thread block
_CAPABILITY = re.compile(r"(\d+)(\d)[af]?(-real|-virtual)?")  # "90" of CMAKE_CUDA_ARCHITECTURES: code and PTX


def unfit(module) -> str | None:
    """Returns why this extension module's kernels cannot run on visible devices, and the remedy; None if they can."""
    if not hasattr(module, "devices"):
        return None
    driver, runtime = module.driver_version(), module.runtime_version
    install = _installation.reinstall("cuda")
    if 0 < driver // 1000 < runtime // 1000:
        return (
            f"the CUDA kernels were built with CUDA {_version(runtime)}, and the driver supports CUDA "
            f"{_version(driver)} at most: update it, or put an nvcc of CUDA {driver // 1000} on the PATH and run "
            f"`{install}`"
        )
    for i, (major, minor, _) in enumerate(module.devices()):
        if not _has_code(module.architectures, major, minor, newest_ptx=driver >= runtime):
            cure = "hide it by CUDA_VISIBLE_DEVICES"
            if (major, minor) >= OLDEST:
                cure += f", or run `{install} -Ccmake.define.CMAKE_CUDA_ARCHITECTURES={major}{minor}`"
            return (
                f"the CUDA kernels have code for {module.architectures}, and none for device {i}, "
                f"of compute capability {major}.{minor}: {cure}"
            )
    return None


def limits(module) -> dict[str, int]:
    """Returns the limits of the visible device with the least shared memory, in place of the kernels' general ones."""
    visible = module.devices() if hasattr(module, "devices") else []
    return module.limits_of_shared_memory(min(shared for *_, shared in visible)) if visible else {}


def shared_memory(module, emulated: bool, kind: str | None) -> int | str:
    """Returns the bytes that a thread block may have in kernels of joint networks, or why devices cannot run them.

    Without a visible device, these are the bytes of a device of this kind, and else the least of all that can run them.
    """
    visible = module.devices()
    for i, (major, minor, _) in enumerate(visible):
        if major < (oldest := module.joint["capability"]):
            return f"it needs compute capability {oldest}.0, and device {i} has {major}.{minor}"
        if not _has_code(module.joint_architectures, major, minor, newest_ptx=True):
            return (
                f"its kernels have code for {module.joint_architectures}, and none for device {i}, of compute "
                f"capability {major}.{minor}"
            )
    if visible:
        return min(shared for *_, shared in visible)
    return 227 << 10 if emulated or _LARGE.search(kind or "") else module.joint["shared_bytes"]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _has_code(architectures: str, major: int, minor: int, *, newest_ptx: bool) -> bool:
    """Returns True if code runs: machine code on its major version from its minor one on, PTX on every later device.

    The driver compiles PTX only if it is as new as the toolkit (`newest_ptx`). Names without a number, such as
    "native", are taken to fit.
    """
    for name in architectures.split():
        match = _CAPABILITY.fullmatch(name)
        if match is None:
            return True
        code, capability = match[3] != "-virtual", (int(match[1]), int(match[2]))
        if code and capability[0] == major and capability[1] <= minor:
            return True
        if match[3] != "-real" and newest_ptx and capability <= (major, minor):
            return True
    return False
