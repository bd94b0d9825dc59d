"""For mutation.py: a fault in Python, the CPU kernels or the CUDA kernels meets their tests."""

import ast
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import sysconfig

from mutation_reach import BUILD, OF_KERNELS, copy_of_package, program, replace, spawned, verdict_of
from mutation_sites import ROOT

sys.path.insert(0, str(ROOT / "xla_kernels/emulation"))
import checks


def try_python(path, data, folder, line, known):
    try:
        ast.parse(data)
    except SyntaxError:
        return "does not compile", ""
    copy_of_package(folder)
    replace(folder, path, data)
    return verdict_of(folder, known.of_line(path, line), known)


FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-w"]
AVX512 = [f"-m{x}" for x in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma", "f16c")]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]


def cpu_units():
    """(source, instruction set) of each object of the module, and the best set of this processor."""
    flags = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    best = "avx512" if "avx512vl" in flags else "avx2" if "avx2" in flags else "portable"
    kernels = ("softmax_emission", "lattice", "skip_lattice")
    units = {f"{name}-{t}": (f"xla_kernels/cpu/{name}.cc", t) for name in kernels for t in TARGETS}
    units |= {name: (f"xla_kernels/cpu/{name}.cc", None) for name in ("ffi", "dispatch", "wide_lattice", "module")}
    return units, best


TARGETS = {"portable": [], "avx2": AVX2, "avx512": AVX512}


def compile_cpu(unit, root, out, level="-O0"):
    """Whether it compiles. Headers under root shadow those of the repository. Optimising takes ten times as long."""
    source, target = unit

    def package(name):
        return importlib.util.find_spec(name).submodule_search_locations[0]

    includes = [
        root,
        ROOT,
        f"{package('jaxlib')}/include",
        f"{package('pybind11')}/include",
        sysconfig.get_path("include"),
    ]
    own = [*TARGETS[target], f"-DJAX_RNNT_TARGET={target}", "-fno-math-errno", "-ffp-contract=fast"] if target else []
    command = [*os.environ.get("CXX", "g++").split(), level, *FLAGS, *own, *(f"-I{i}" for i in includes)]
    at = root / source if (root / source).exists() else ROOT / source
    out.parent.mkdir(parents=True, exist_ok=True)
    # Paths are no part of the code: an object depends on what it does alone.
    command += [f"-ffile-prefix-map={root}=.", f"-ffile-prefix-map={ROOT}=."]
    return subprocess.run([*command, "-c", at, "-o", out], capture_output=True).returncode == 0


def uses(path, source):
    """Whether a source includes a header, by way of others too."""
    seen, waiting = set(), [ROOT / source]
    while waiting:
        file = waiting.pop()
        if file in seen or not file.exists():
            continue
        seen.add(file)
        waiting += [ROOT / name for name in re.findall(r'#include "(xla_kernels/[^"]+)"', file.read_text())]
    return path in seen


def original(name, unit, level="-O0"):
    """The object of the sources as they are."""
    out = BUILD / f"cpu{level}" / f"{name}.o"
    newest = max(path.stat().st_mtime for path in (ROOT / "xla_kernels").glob("c*/*.*"))
    stale = not out.exists() or out.stat().st_mtime < newest
    if stale and not compile_cpu(unit, ROOT, out, level):
        sys.exit(f"{unit[0]} does not compile")
    return out


def try_cpu(path, data, folder, line, known):
    """Only the best instruction set gets the fault in a kernel: compiling takes most of the time."""
    units, best = cpu_units()
    (folder / path.relative_to(ROOT)).parent.mkdir(parents=True)
    (folder / path.relative_to(ROOT)).write_bytes(data)
    objects = {name: original(name, unit) for name, unit in units.items()}
    concerned = {name: unit for name, unit in units.items() if unit[1] in (None, best) and uses(path, unit[0])}
    for name, unit in concerned.items():
        objects[name] = folder / "objects" / f"{name}.o"
        if not compile_cpu(unit, folder, objects[name]):
            return "does not compile", ""
    copy_of_package(folder)
    for old in (folder / "jax_rnnt").glob("_cpu*"):
        old.unlink()
    module = folder / "jax_rnnt" / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"
    linked = subprocess.run(["g++", "-shared", *objects.values(), "-o", module, "-pthread"], capture_output=True)
    if linked.returncode:
        return "does not compile", ""
    verdict = verdict_of(folder, known.of_files(OF_KERNELS, "reference"), known)
    if verdict[0] == "survived" and path.read_bytes() != data:
        for name, unit in concerned.items():
            optimised = folder / "objects" / f"{name}-O1.o"
            compile_cpu(unit, folder, optimised, "-O1")
            if optimised.read_bytes() != original(name, unit, "-O1").read_bytes():
                return verdict
        return "same code", ""
    return verdict


# Not optimised, the emission compiles in a quarter of the time, which is most of it. The sanitizers see the survivors.
QUICK = checks.Mode("quick", ("-O0", "-g0", *checks.SMALL_BLOCKS), ("forward", "reverse"))
OPTIMISED = checks.Mode("optimised", ("-g0",), ("forward",))


def try_cuda(path, data, folder, line, known):
    """The emulation's checks, in the order that finds most per second."""
    name = str(path.relative_to(ROOT))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(data)
    sources = [s for s in checks.KERNELS if s == name or uses(path, s)]
    for source in sources:
        if source != name:
            shutil.copy(ROOT / source, folder / source)
    build = BUILD / "cuda"
    # What survives takes minutes more; a first run leaves that to --again.
    later = ((OPTIMISED, ("forward",)), (checks.MODES[1], ("forward",))) if known.again else ()
    for mode, orders in ((QUICK, QUICK.orders), *later):
        originals = {s: checks.compile_object(s, mode, build=build) for s in (*checks.KERNELS, *checks.OTHERS)}
        try:
            mutated = {s: checks.compile_object(s, mode, folder, folder, warnings=["-w"]) for s in sources}
        except subprocess.CalledProcessError:
            return "does not compile", ""
        if mode == OPTIMISED and path.read_bytes() != data and same_code(mutated, originals):
            return "same code", ""
        executable = checks.link([*(originals | mutated).values()], mode, folder / mode.name / "check")
        for order in orders:
            environment = {**checks.ENVIRONMENT, "JAX_RNNT_EMULATION_ORDER": order}
            limit = 25 if mode == QUICK else 600  # without a fault it takes 5, and 80 with AddressSanitizer
            status, seconds = spawned(program([executable, "--first"], environment), limit, folder / "log.txt")
            if status != 0:
                output = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
                by = f"no end after {seconds:.0f} s" if status == -signal.SIGXCPU else (output or [f"exit {status}"])[0]
                return "killed", f"{mode.name} {order}: {by}"[:160]
    return "survived", ""


def same_code(mutated, originals):
    """Without what the debugger reads, which has the lines' numbers."""

    def code(file):
        stripped = file.with_suffix(".stripped")
        subprocess.run(["objcopy", "--strip-debug", file, stripped], check=True)
        return stripped.read_bytes()

    return all(code(file) == code(originals[source]) for source, file in mutated.items())


TRY = {"python": try_python, "cpu": try_cpu, "cuda": try_cuda}
