"""Compiles and links the CPU kernels for macOS on 64-bit ARM. Runs on Linux; nothing built is run.

    python lab/release/macos.py

zig of the lock file has a clang for macOS and stubs of its libraries. Builds the module of an install from source and
the library of the wheel. Fails on a warning, if one lacks its entry or shows other names of ours, and if kernels do not
compute with vectors of NEON; says how many instructions do.
"""

import os
import re
import shutil
import struct
import sys

import wheels

TARGET = "aarch64-macos.11.0"  # as jaxlib's wheels
# zig 0.17 crashes on -bundle. A bundle differs in a field of the header.
COMPILER = """#!/bin/sh
for a; do
  shift
  test "$a" != -bundle || a=-dynamiclib
  set -- "$@" "$a"
done
exec "{zig}" c++ -target {target} -Werror -Wno-unused-command-line-argument "$@"
"""
SYMBOL_TABLE = 2  # load command LC_SYMTAB
ARM64 = 0x0100000C
# Of float arithmetic, and of conversions between half and float.
INSTRUCTIONS = {
    "vector": r"\tf(?:mla|mls|add|sub|mul|maxnm|minnm)\.(?:4s|2d)\t",
    "scalar": r"\tf(?:madd|msub|nmsub|add|sub|mul|maxnm|minnm)\t[sd]",
    "from half": r"\tfcvtl\t",
    "to half": r"\tfcvtn\t",
}


def symbols(path):
    """(exported, undefined) names of a Mach-O file for ARM."""
    data = path.read_bytes()
    magic, machine, _, _, commands, *_ = struct.unpack_from("<8I", data)
    if (magic, machine) != (0xFEEDFACF, ARM64):
        sys.exit(f"{path} is no Mach-O file for 64-bit ARM")
    exported, undefined, at = set(), set(), 32
    for _ in range(commands):
        kind, size = struct.unpack_from("<2I", data, at)
        if kind == SYMBOL_TABLE:
            entries, count, strings, _ = struct.unpack_from("<4I", data, at + 8)
            for i in range(count):
                name, flags, _, _, _ = struct.unpack_from("<IBBHQ", data, entries + 16 * i)
                text = data[strings + name : data.index(b"\0", strings + name)].decode()
                if flags & 0x01 and not flags & 0x10:  # external, and not kept within the module
                    (exported if flags & 0x0E else undefined).add(text)
        at += size
    return exported, undefined


def main():
    folder = wheels.ROOT / "build/macos"
    site = wheels.packages(sys.executable, wheels.ROOT / "build/wheels/packages")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    compiler = folder / "c++"
    compiler.write_text(COMPILER.format(zig=site / "ziglang/zig", target=TARGET))
    compiler.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}
    defines = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_SYSTEM_NAME": "Darwin",
        "CMAKE_SYSTEM_PROCESSOR": "arm64",
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_CXX_FLAGS": "-save-temps=obj",
        "CMAKE_INSTALL_NAME_TOOL": "true",  # CMake wants one, and has nothing to rename
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": site / "pybind11/share/cmake/pybind11",
    }
    for plain, pattern, entry in (("OFF", "_cpu.*.so", "_PyInit__cpu"), ("ON", "lib_cpu.so", "_jax_rnnt_table")):
        options = [f"-D{name}={value}" for name, value in (defines | {"JAX_RNNT_PLAIN": plain}).items()]
        wheels.run("cmake", "-G", "Ninja", "-S", wheels.ROOT, "-B", folder / "build", *options, env=env)
        wheels.run("cmake", "--build", folder / "build", env=env)
        (module,) = (folder / "build").glob(pattern)
        exported, undefined = symbols(module)
        # zig links the C++ library statically, whose operators new and delete show; Apple's is the system's.
        ours = [x for x in exported | undefined if ("jax_rnnt" in x or "pybind11" in x) and x != entry]
        if entry not in exported or ours:
            sys.exit(f"{module} has no entry {entry}, or names that others see: {ours}")
        print(f"{module.name}: linked for {TARGET}, {module.stat().st_size} bytes; not run")
    for listing in sorted((folder / "build").rglob("kernels_*/**/*.s")):
        text = listing.read_text("latin-1")  # strings are written as their bytes
        counts = {name: len(re.findall(pattern, text)) for name, pattern in INSTRUCTIONS.items()}
        if not counts["vector"]:
            sys.exit(f"{listing} has no vectors")
        print(f"{listing.stem}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
