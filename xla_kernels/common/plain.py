"""The kernels of lib_cpu.so or lib_cuda.so beside this file, under the names of the modules of pybind11.

In the wheel for every interpreter this file is jax_rnnt/_cpu.py and jax_rnnt/_cuda.py. The structures are those of
xla_kernels/common/plain.h, field by field.
"""

import ctypes
import pathlib

import jax


class _Registration(ctypes.Structure):
    _fields_ = [("target", ctypes.c_char_p), ("execute", ctypes.c_void_p), ("instantiate", ctypes.c_void_p)]


class _Limit(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("most", ctypes.c_int64)]


class _Term(ctypes.Structure):
    _fields_ = [("elements", ctypes.c_int64), ("frames", ctypes.c_int64), ("columns", ctypes.c_int64)]


class _Device(ctypes.Structure):
    _fields_ = [("major", ctypes.c_int32), ("minor", ctypes.c_int32), ("shared_bytes", ctypes.c_int64)]


_bool, _int32, _int64, _text, _many = ctypes.c_bool, ctypes.c_int32, ctypes.c_int64, ctypes.c_char_p, ctypes.POINTER


class _Table(ctypes.Structure):
    _fields_ = [
        ("kernels", _text),
        ("api_major", _int32),
        ("api_minor", _int32),
        ("registrations", _many(_Registration)),
        ("num_registrations", _int64),
        ("limits", _many(_Limit)),
        ("num_limits", _int64),
        ("workspace", ctypes.CFUNCTYPE(None, _bool, _int64, _bool, _many(_Term))),
        ("targets", ctypes.CFUNCTYPE(_many(_text))),
        ("target", ctypes.CFUNCTYPE(_text)),
        ("use_target", ctypes.CFUNCTYPE(_bool, _text)),
        ("architectures", _text),
        ("runtime_version", _int32),
        ("driver_version", ctypes.CFUNCTYPE(_int32)),
        ("devices", ctypes.CFUNCTYPE(_int32, _many(_Device), _int32)),
        ("unit_columns", ctypes.CFUNCTYPE(_int64, _int64)),
    ]


_name = __name__.rpartition(".")[2]
try:
    _library = ctypes.CDLL(str(pathlib.Path(__file__).with_name(f"lib{_name}.so")))
except OSError as error:  # what an extension module would raise
    raise ImportError(str(error), name=__name__) from None
_library.jax_rnnt_table.restype = _many(_Table)
_table = _library.jax_rnnt_table().contents

kernels = _table.kernels.decode()


def api_version():
    return _table.api_major, _table.api_minor


def registrations():
    capsules: dict[str, dict] = {}
    for registration in _table.registrations[: _table.num_registrations]:
        stages = {"execute": registration.execute, "instantiate": registration.instantiate}
        capsules[registration.target.decode()] = {stage: jax.ffi.pycapsule(at) for stage, at in stages.items() if at}
    return capsules


def limits():
    """{name: the largest number that the kernels take}."""
    return {limit.name.decode(): limit.most for limit in _table.limits[: _table.num_limits]}


def workspace(unit_steps, num_arcs, gradient):
    """[(elements, frames, columns), ...]: see xla_kernels/common/workspace.h."""
    terms = (_Term * 3)()
    _table.workspace(unit_steps, num_arcs, gradient, terms)
    return [(t.elements, t.frames, t.columns) for t in terms if t.elements]


if kernels == "cpu":

    def targets():
        """Instruction sets that this processor runs, best first."""
        names: list[str] = []
        while (name := _table.targets()[len(names)]) is not None:  # which ends them
            names.append(name.decode())
        return names

    def target():
        return _table.target().decode()

    def use_target(name):
        if not _table.use_target(name.encode()):
            raise ValueError(f"jax_rnnt._cpu.use_target: no target {name}")

else:
    architectures = _table.architectures.decode()
    runtime_version = _table.runtime_version

    def driver_version():
        """1000 * major + 10 * minor of the newest CUDA of the driver; 0 without one."""
        return _table.driver_version()

    def devices():
        """[(major, minor, most bytes of shared memory of a block), ...] of the visible devices."""
        devices = (_Device * _table.devices(None, 0))()
        _table.devices(devices, len(devices))
        return [(d.major, d.minor, d.shared_bytes) for d in devices]

    def limits_of_shared_memory(bytes):
        """The limits that depend on the shared memory of a block."""
        return {"unit_columns": _table.unit_columns(bytes)}
