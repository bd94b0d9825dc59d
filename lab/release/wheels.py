"""Builds the wheels of a release, on this machine and without containers: `make wheels`.

    python lab/release/wheels.py [--out dist] [--pythons PYTHON ...] [--machine x86_64] [--nvcc NVCC]

A wheel with kernels for each interpreter, free-threaded ones too, and one of pure Python for every other place. Each
is checked: symbol versions, size, hardening, SBOM. The kernels are compiled once, since their objects do not depend on
the interpreter. Two builds of one commit give the same bytes: verify.py.

The wheels run where jaxlib runs, which is glibc 2.27 or later, whatever this machine has. The machine's own compiler
compiles, so that wheels hold the code of an install from source. But zig links: its stubs of glibc end at the version
asked for. libstdc++ is linked statically, since a compiler's own needs a system as new as itself. Tried: zig as the
compiler, whose libc++ nvcc does not take; zig 0.12 and 0.15 do not link __builtin_cpu_supports.
"""

import argparse
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import sbom
from sbom import output

ROOT = pathlib.Path(__file__).parents[2]
GLIBC = (2, 27)
LARGEST = 10 << 20
# Kernels of CUDA 12 run under the drivers of CUDA 12 and of all later ones; 12.8 is the first that knows sm_120.
CUDA = (12, 8), (13,)
# Code for 8.0 runs on 8.6, 8.7 and 8.9. PTX is of 10.0, since 11.0 cannot take that of 12.0.
ARCHITECTURES = "75-real;80-real;90-real;100;120-real"
# A kernel that spills is an error. Code is not compressed: the wheel itself is, better than LZ4 would, and PTX by a
# seventh of all; zstd would need a driver of CUDA 12.4.
NVCC_FLAGS = "-Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warning-as-error --compress-mode=none"
NVCC_HOSTS = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}

# CMake and nvcc call it as a compiler. libgcc comes before zig's own runtime, which knows no processors.
COMPILER = """#!/bin/sh
case " $* " in
*" -shared "*)
  exec "{zig}" c++ -target {machine}-linux-gnu.{glibc} -nostdlib++ -s -Wl,--gc-sections \\
    -Wl,--version-script="{folder}/exports" "$@" \\
    "{folder}/single_threaded.o" "{libstdcxx}" "{libgcc}" "{libgcc_s}" -lpthread -ldl -lrt -lm ;;
*) exec {cxx} "$@" ;;
esac
"""


def run(*command, **keywords):
    """Says what it runs and returns its output; ends the program with the output of what fails."""
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False, **keywords)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {' '.join(map(str, command))}")
    return done.stdout


def interpreters():
    """{"3.14": path, "3.14t": path, ...}: CPython 3.11 and later of the system, on the PATH and in pyenv, the first of
    each that can build modules and make environments.

    That of the system is optimised by a profile: tracing takes a fifth less time than with one that pyenv builds by
    default.
    """
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    folders = [*map(pathlib.Path, ("/usr/bin", *os.get_exec_path())), *sorted(pyenv.glob("versions/*/bin"))]
    names = [f"python3.{minor}{t}" for minor in range(11, 20) for t in ("", "t")]
    found = {}
    for path in filter(pathlib.Path.is_file, (folder / name for name in names for folder in folders)):
        probe = "import ensurepip, os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')"
        if subprocess.run([path, "-c", probe], capture_output=True, check=False).returncode == 0:
            found.setdefault(version(path), str(path))
    return found


def version(python):
    """Of an interpreter: 3.14, or 3.14t without the GIL."""
    gil = "'t' if sysconfig.get_config_var('Py_GIL_DISABLED') else ''"
    return output(python, "-c", f"import sys, sysconfig; print('{{}}.{{}}'.format(*sys.version_info), end={gil})")


def packages(python, folder):
    """A folder with the packages of the lock file and nothing else, for all interpreters."""
    locked, done = ROOT / "lab/release/wheels.txt", folder / "lock.txt"
    if not done.is_file() or done.read_text() != locked.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        options = ["--quiet", "--no-deps", "--require-hashes", "--target", folder]
        run(python, "-m", "pip", "install", *options, "-r", locked)
        shutil.copy(locked, done)
    return folder


def environment(site, **variables):
    """With the packages of `site`, and the commit's time as that of every file in an archive."""
    own = {"PYTHONPATH": str(site), "PATH": f"{site / 'bin'}:{os.environ['PATH']}"}
    if "SOURCE_DATE_EPOCH" not in os.environ:
        own["SOURCE_DATE_EPOCH"] = output("git", "log", "-1", "--format=%ct", cwd=ROOT)
    return {**os.environ, **own, **variables}


def build(python, site, out, settings, *, kind="wheel", **variables):
    """Runs the build backend, not isolated, with the packages of `site`."""
    env = environment(site, **variables)
    options = [f"-C{key}={value}" for key, value in settings.items()]
    flags = [f"--{kind}", "--no-isolation", "--skip-dependency-check"]
    run(python, "-m", "build", *flags, "--outdir", out, *options, ROOT, env=env)


def compiler(site, machine, cxx, folder):
    """Path of a compiler driver for the machine: compiles with `cxx`, links against the old glibc."""
    folder.mkdir(parents=True, exist_ok=True)
    # libstdc++ asks it whether atomics may be skipped; glibc before 2.32 has no such variable. Never is right.
    (folder / "single_threaded.c").write_text("char __libc_single_threaded = 0;\n")
    run(cxx, "-x", "c", "-fPIC", "-c", folder / "single_threaded.c", "-o", folder / "single_threaded.o")
    (folder / "exports").write_text("{ global: PyInit_*; local: *; };\n")
    libraries = {
        name: output(cxx, f"-print-file-name={file}")
        for name, file in (("libstdcxx", "libstdc++.a"), ("libgcc", "libgcc.a"), ("libgcc_s", "libgcc_s.so.1"))
    }
    driver = folder / "g++"
    text = COMPILER.format(
        zig=site / "ziglang/zig",
        machine=machine,
        glibc="{}.{}".format(*GLIBC),
        folder=folder.resolve(),
        cxx=cxx,
        **libraries,
    )
    driver.write_text(text)
    driver.chmod(0o755)
    return driver.resolve()


def cuda_compiler(nvcc):
    """The path of an nvcc whose ptxas, which writes what runs, has the right version."""
    if nvcc is None:
        sys.exit("no nvcc: name one of CUDA 12 with --nvcc (see lab/release/README.md), or pass --nvcc off")
    path = pathlib.Path(shutil.which(nvcc)).resolve()
    release = re.search(r"release (\d+)\.(\d+)", output(path.with_name("ptxas"), "--version"))
    if not CUDA[0] <= tuple(map(int, release.groups())) < CUDA[1]:
        sys.exit(f"{path} has the ptxas of {release[0]}: wheels need one of CUDA 12, from 12.8 on; name it by --nvcc")
    return path


def with_kernels(python, site, machine, driver, nvcc, folder):
    """The wheel of one interpreter, tagged for the system that built it."""
    components = sbom.write(folder / f"{machine}.cdx.json", ROOT, driver, nvcc)
    settings = {
        "build-dir": folder / machine,
        "install.strip": "false",  # the linker does
        "cmake.define.JAX_RNNT_CUDA": "on" if nvcc else "off",
        "cmake.define.JAX_RNNT_SBOM": components,
    }
    variables = {"CXX": str(driver)}
    if nvcc:
        settings["cmake.define.CMAKE_CUDA_ARCHITECTURES"] = ARCHITECTURES
        flags = f"{NVCC_FLAGS} --target-directory={NVCC_HOSTS[machine]}"
        variables |= {"CUDACXX": str(nvcc), "CUDAHOSTCXX": str(driver), "NVCC_APPEND_FLAGS": flags}
    if machine != os.uname().machine:
        suffix = f".cpython-{version(python).replace('.', '')}-{machine}-linux-gnu.so"
        variables |= {"_PYTHON_HOST_PLATFORM": f"linux-{machine}", "SETUPTOOLS_EXT_SUFFIX": suffix}
    (folder / machine / "CMakeCache.txt").unlink(missing_ok=True)  # it names the last interpreter; the objects stay
    raw = folder / f"raw-{machine}-{version(python)}"
    shutil.rmtree(raw, ignore_errors=True)
    build(python, site, raw, settings, **variables)
    (wheel,) = raw.glob("*.whl")
    return wheel


def for_macos(pythons, site, folder, out):
    """Apple's compiler makes these, and needs no help to link against an old system."""
    components = sbom.write(folder / "macos.cdx.json", ROOT, None, None)
    settings = {"build-dir": folder / "macos", "cmake.define.JAX_RNNT_SBOM": components}
    for python in pythons:
        (folder / "macos/CMakeCache.txt").unlink(missing_ok=True)
        build(python, site, out, settings, MACOSX_DEPLOYMENT_TARGET="11.0")


def repair(python, site, wheel, machine, out):
    """Tags the wheel for the old glibc; auditwheel fails where a symbol is newer."""
    plat = "manylinux_{}_{}_{}".format(*GLIBC, machine)
    # It knows the tags of the machine that it runs on alone.
    program = f"import platform; platform.machine = lambda: {machine!r}; from auditwheel.main import main; exit(main())"
    run(python, "-c", program, "repair", "--plat", plat, "--only-plat", "-w", out, wheel, env=environment(site))


def faults(elf):
    """What a module lacks of SECURITY.md, and what it shows of its libraries."""
    segments = {s["p_type"]: s["p_flags"] for s in elf.iter_segments()}
    dynamic = elf.get_section_by_name(".dynamic")
    flags = {tag.entry.d_tag: tag.entry.d_val for tag in dynamic.iter_tags()}
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    exported = [s.name for s in symbols if s["st_shndx"] != "SHN_UNDEF" and s["st_info"]["bind"] != "STB_LOCAL"]
    if segments.get("PT_GNU_STACK", 1) & 1:
        yield "has an executable stack"
    if "PT_GNU_RELRO" not in segments or not flags.get("DT_FLAGS_1", 0) & 1:
        yield "binds no symbols before it runs"
    if len(exported) != 1 or not exported[0].startswith("PyInit_"):
        yield f"exports {exported[:3]}, expected its entry alone"


def check(wheel, machine, cuda):
    """A line about a finished wheel; fails where something is missing or large."""
    from elftools.elf.elffile import ELFFile  # of the lock file

    modules, pure = set(), wheel.name.endswith("any.whl")
    module = rf"jax_rnnt/(_cpu|_cuda)\.cpython-\d+t?-{machine}-linux-gnu\.so"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for name in names:
            if match := re.fullmatch(module, name):
                modules.add(match[1])
                if found := list(faults(ELFFile(io.BytesIO(archive.read(name))))):
                    sys.exit(f"{wheel.name}: {name} {', '.join(found)}")
            elif name.endswith(".so") or ".libs/" in name:
                sys.exit(f"{wheel.name} holds {name}")
        components = [json.loads(archive.read(n))["components"] for n in names if n.endswith(".cdx.json")]
    wanted = set() if pure else {"_cpu", "_cuda"} if cuda else {"_cpu"}
    if modules != wanted:
        sys.exit(f"{wheel.name} holds the modules {sorted(modules)}, expected {sorted(wanted)}")
    if len(components) != (0 if pure else 1):  # nothing of others is in the wheel of pure Python
        sys.exit(f"{wheel.name} holds {len(components)} SBOMs, expected {0 if pure else 1}")
    if (size := wheel.stat().st_size) > LARGEST:
        sys.exit(f"{wheel.name} has {size} bytes, expected at most {LARGEST}")
    return f"{size / 1e6:6.2f} MB  {wheel.name}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    parser.add_argument("--pythons", nargs="+", default=None, help="interpreters; the default: all at hand")
    parser.add_argument("--machine", default=os.uname().machine, choices=["x86_64", "aarch64"])
    parser.add_argument("--cxx", help="compiler for the machine; the default: g++ or a cross compiler of that name")
    parser.add_argument("--nvcc", default=os.environ.get("CUDACXX") or shutil.which("nvcc"), help="of CUDA 12, or off")
    options = parser.parse_args()
    folder, out = ROOT / "build/wheels", options.out.resolve()
    pythons = options.pythons or list(interpreters().values())
    site = packages(pythons[0], folder / "packages")
    if sys.platform == "darwin":
        for_macos(pythons, site, folder, out)
        return
    sys.path.append(str(site))
    nvcc = None if options.nvcc == "off" else cuda_compiler(options.nvcc)
    cxx = options.cxx or ("g++" if options.machine == os.uname().machine else f"{options.machine}-linux-gnu-g++")
    driver = compiler(site, options.machine, cxx, folder / f"compiler-{options.machine}")
    build(pythons[0], site, out, {}, kind="sdist")
    build(pythons[0], site, out, {"build-dir": folder / "pure"}, JAX_RNNT_WHEEL="pure")
    for python in pythons:
        wheel = with_kernels(python, site, options.machine, driver, nvcc, folder)
        repair(pythons[0], site, wheel, options.machine, out)
    for wheel in sorted(out.glob("*.whl")):
        if wheel.name.endswith((f"{options.machine}.whl", "any.whl")):
            print(check(wheel, options.machine, cuda=nvcc))


if __name__ == "__main__":
    main()
