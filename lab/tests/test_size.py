"""Does a wheel fit into its 10 MB? Adds up, as a wheel compresses it, what there is without building one.

Counted: the package's Python files; the CPU kernels of this environment, three times where they are of one instruction
set; the CUDA code of the record that `lab/resources.py --sizes` writes, for the architectures of `wheels.py`, of which
one that has not been recorded counts as the largest that has; and an allowance for CUDA's runtime, the code of hosts
and metadata. `make wheels` measures the whole.
"""

import json
import pathlib
import re
import sys
import zlib

import jax_rnnt
from jax_rnnt._xla import loading
from project import ROOT

sys.path.insert(0, str(ROOT / "lab/release"))
sys.path.insert(0, str(ROOT / "lab"))
import resources
import wheels

RUNTIME = 600_000  # of which CUDA's static runtime has 200,000
INSTRUCTION_SETS = 3  # of the largest wheel, that for x86-64


def compressed(path):
    return len(zlib.compress(path.read_bytes()))


def cuda_code():
    """{source: bytes} for every architecture of a wheel."""
    recorded = json.loads(resources.SIZES.read_text())
    text = (ROOT / "CMakeLists.txt").read_text()
    sources = set(re.findall(r"xla_kernels/cuda/(\w+)\.cu\b", text)) - {"devices", "ffi"}  # code of the host
    assert sources == set(recorded) == set(resources.SOURCES)
    found = {}
    for source in sources:
        names = [name.removesuffix("-real") for name in wheels.ARCHITECTURES.split(";")]
        ptx = [f"{name}-ptx" for name in wheels.ARCHITECTURES.split(";") if name.isdigit()]
        if source == "joint":  # CMakeLists.txt
            names, ptx = [name for name in names if name != "75"], []
        largest = max(size for name, size in recorded[source].items() if not name.endswith("-ptx"))
        found[source] = sum(recorded[source].get(name, largest) for name in names)
        found[source] += sum(recorded[source][name] for name in ptx)
    return found


def test_a_wheel_fits():
    package = pathlib.Path(jax_rnnt.__file__).parent
    python = sum(map(compressed, package.rglob("*.py")))
    module = pathlib.Path(loading.module("cpu").__file__)
    cpu = compressed(module) * (1 if len(loading.module("cpu").targets()) > 1 else INSTRUCTION_SETS)
    parts = {"Python": python, "CPU": cpu, "runtime": RUNTIME, **cuda_code()}
    assert "--compress-mode=none" in wheels.NVCC_FLAGS  # as the record has it
    assert sum(parts.values()) <= wheels.LARGEST, parts
