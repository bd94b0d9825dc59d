"""Injects faults at random into Python, the CPU kernels and the CUDA kernels; how many do the tests find?

    python tests/mutation.py --seed 1 --count 40            # make mutation-score ARGS="--seed 1 --count 40"
    python tests/mutation.py --report

A fault is one change of an operator, a comparison, a constant, min and max, two arguments, a condition or a statement,
drawn from all places of an area. Python: in a copy of the package, under the tests of that file first. CPU kernels:
compiled and linked into a copy of the module, under the tests of kernels. CUDA kernels: run by the emulation, under its
checks. A fault whose object code is that of the sources changes nothing and does not count; one that does not compile
does not either. Results are appended to a file of JSON lines, and a run goes on where the last one stopped.

One worker on one core; no time is measured. The sources stay as they are.
"""

import argparse
import ast
import collections
import difflib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutation"
RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
AREAS = ("python", "cpu", "cuda")
# Files without a promise about results: figures, timing, the command line.
NO_SITES = {"plot.py", "timing.py", "_bench.py", "__main__.py", "_installation.py", "_extras.py"}

# ------------------------------------------------------------------------------------------------- faults in Python

SWAPPED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "*",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
    ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
PAIRS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "all": "any", "any": "all"}
PAIRS |= {
    "zeros_like": "ones_like",
    "ones_like": "zeros_like",
    "logaddexp": "add",
    "cumsum": "cumprod",
    "argmax": "argmin",
}


def python_sites(text):
    """(start, end, replacement, operator) of each fault in a file."""
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data = text.encode()

    def span(node):
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def source(node):
        start, end = span(node)
        return data[start:end].decode()

    skipped = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        quiet = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            quiet = [node.returns, *(a.annotation for a in arguments if a), *node.decorator_list]
            quiet += [node] if node.name in ("__repr__", "__dir__") else []
        elif isinstance(node, ast.AnnAssign):
            quiet = [node.annotation]
        elif isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
            quiet = [node]
        for root in filter(None, quiet):
            skipped |= {id(n) for n in ast.walk(root)}
        if isinstance(node, ast.If) and "TYPE_CHECKING" in source(node.test):
            skipped |= {id(n) for n in ast.walk(node)}

    def between(left, right, old, new):
        """Replaces an operator that stands between two nodes."""
        start, end = span(left)[1], span(right)[0]
        gap = data[start:end].decode()
        return (start, end, gap.replace(old, new, 1), "operator") if gap.count(old) == 1 else None

    signs = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Lt: "<",
             ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
             ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.And: "and", ast.Or: "or", ast.BitAnd: "&",
             ast.BitOr: "|"}  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.BinOp) and type(node.op) in SWAPPED:
            found.append(between(node.left, node.right, signs[type(node.op)], SWAPPED[type(node.op)]))
        elif isinstance(node, ast.BoolOp):
            found.append(between(*node.values[:2], signs[type(node.op)], SWAPPED[type(node.op)]))
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            op = type(node.ops[0])
            found.append(between(node.left, node.comparators[0], signs[op], SWAPPED[op]))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            start, end = span(node)
            found.append((start, end, f"({source(node.operand)})", "sign" if isinstance(node.op, ast.USub) else "not"))
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            found.append((*span(node), repr(node.value + 1), "constant"))
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            found.append((*span(node), repr(not node.value), "constant"))
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            found.append((*span(node.test), f"(not ({source(node.test)}))", "condition"))
        elif isinstance(node, ast.Call):
            name = source(node.func).split(".")[-1]
            if name in PAIRS:
                start, end = span(node.func)
                found.append((end - len(name), end, PAIRS[name], "function"))
            if len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args[:3]):
                first, second = node.args[-2:]
                gap = data[span(first)[1] : span(second)[0]].decode()
                found.append((span(first)[0], span(second)[1], source(second) + gap + source(first), "arguments"))
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            found.append((*span(node), "pass", "statement"))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id  # a value that is made anew from its old one
            if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.value)):
                found.append((*span(node), "pass", "statement"))
    return [site for site in found if site], data


# ------------------------------------------------------------------------------------------------- faults in C++, CUDA

CXX = [
    *((re.escape(f" {a} "), f" {b} ", "operator") for a, b in (
        ("+", "-"), ("-", "+"), ("*", "/"), ("<", "<="), ("<=", "<"), (">", ">="), (">=", ">"), ("==", "!="),
        ("!=", "=="), ("&&", "||"), ("||", "&&"), ("+=", "-="), ("<<", ">>"), (">>", "<<"), ("&", "|"), ("|", "&"),
    )),
    (r"\bmin(?=[(<])", "max", "function"), (r"\bmax(?=[(<])", "min", "function"),
    (r"\bMin(?=\()", "Max", "function"), (r"\bMax(?=\()", "Min", "function"),
    (r"\btrue\b", "false", "constant"), (r"\bfalse\b", "true", "constant"),
    (r"(?<=[=(\[,<>+\-*/?:&|] )\d+\b(?![.\w'])", None, "constant"), (r"(?<=[(\[])\d+\b(?![.\w'])", None, "constant"),
    (r"(?<=[ (])-(?=[a-z])", "", "sign"), (r"(?<=[ (])!(?=[a-z(])", "", "not"),
    (r"\+\+(?=\w)", "--", "operator"),
]  # fmt: skip
STATEMENT = re.compile(r"^ +(?!return|const |constexpr|static|using|auto |typename|template|for |if |while |else|case |"
                       r"break|continue|F |I |A |One |Value |int |int64_t |size_t |float |double )[\w:\[\]().>*-]+"
                       r"( [-+*/|&]?= [^;{}]*|\([^;{}]*\))?;$", re.M)  # fmt: skip


def cxx_sites(text):
    # Comments, strings, preprocessor lines and assertions stay.
    quiet = (
        r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|^ *#.*?(?<!\\)$|static_assert\([^;]*;"
        r"|^ *(?:template|namespace|using)[^\n]*"
    )
    bare = re.sub(quiet, lambda m: re.sub(r"[^\n]", "\0", m[0]), text, flags=re.M | re.S)
    found = []
    for pattern, new, operator in CXX:
        for match in re.finditer(pattern, bare):
            found.append((*match.span(), str(int(match[0]) + 1) if new is None else new, operator))
    for match in STATEMENT.finditer(bare):
        start = match.start() + len(match[0]) - len(match[0].lstrip())
        found.append((start, match.end(), ";", "statement"))
    for match in re.finditer(r"\? ([^?:;\n]+) : ([^?:;,)\n]+)", bare):
        found.append((*match.span(), f"? {match[2]} : {match[1]}", "arguments"))
    assert text.isascii(), "sites are counted in bytes"
    return found, text.encode()


# --------------------------------------------------------------------------------------------------- building, testing

SEARCHED = {
    "python": sorted(p for p in (ROOT / "jax_rnnt").rglob("*.py") if p.name not in NO_SITES),
    "cpu": sorted([*(ROOT / "xla_kernels/cpu").glob("*.h"), *(ROOT / "xla_kernels/cpu").glob("*.cc"),
                   ROOT / "xla_kernels/common/extended.h", ROOT / "xla_kernels/common/ffi_calls.h"]),
    "cuda": sorted([*(ROOT / "xla_kernels/cuda").glob("*.cuh"),
                    *(ROOT / f"xla_kernels/cuda/{n}.cu" for n in ("lattice", "skip_lattice", "softmax_emission"))]),
}  # fmt: skip
GENERAL = "values lengths edges gradients family errors layouts"
TESTS = {  # words of a path -> the tests that look there
    "decode": "decode", "flax": "flax", "_align": "align", "_pruned": "pruned", "metrics": "metrics", "_mwer": "mwer",
    "_packed": "packed layouts", "packed": "packed layouts", "_joint": "joint", "joint": "joint",
    "tiled": "joint memory", "additive": "layouts pruned", "band": "layouts pruned", "_layouts": "layouts errors",
    "_lengths": "paddings lengths",
    "_tdt": "family values operands errors", "_hat": "family values", "_multiblank": "family values errors",
    "_monotonic": "family values errors", "pallas": "tpu", "viterbi": "align", "seam": "masks family values gradients",
    "_validate": "errors lengths layouts", "_reduce": "values", "primitive": "vmap sharding jit export kernel_choice",
    "over_devices": "sharding", "grouped": "sharding vmap joint", "retracing": "jit export vmap operands",
    "loading": "kernel_choice installation", "devices": "devices installation kernel_choice", "avals": "sharding jit",
    "_selftest": "installation public", "_checks": "errors", "softmax": "emissions offsets values dtypes",
    "reference": "lattices gradients forward_mode", "extended": "lattices accuracy forward_mode", "lattice": "lattices",
    "topology": "lattices values", "_transducer": "align values gradients jit remat",
    "_loss": "errors public values jit",
    "emission": "emissions offsets values", "_pytree": "public jit operands", "_topologies": "pruned decode",
}  # fmt: skip
OF_KERNELS = "lattices emissions lengths values masks offsets targets dtypes edges"


def tests_of(path):
    """Files of tests, those that look at this file first."""
    words = []
    for part in [path.stem, *(p.name for p in path.parents if p != ROOT)]:
        words += TESTS.get(part, "").split()
    names = dict.fromkeys([*words, *GENERAL.split()])
    return [str(ROOT / f"tests/test_{name}.py") for name in names if (ROOT / f"tests/test_{name}.py").exists()]


def pytest(folder, files, timeout, *options):
    """The verdict of the tests on the package in `folder`."""
    environment = {
        **os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(BUILD / "programs"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow"]
    command += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), *options, *files]
    try:
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return "survived", f"not found in {timeout:.0f} s"
    if done.returncode == 0:
        return "survived", ""
    text = done.stdout + done.stderr
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    if done.returncode > 2 or done.returncode < 0:
        return ("killed", f"exit {done.returncode}") if done.returncode < 0 else ("broken", text[-300:])
    return "killed", found[0].split("/")[-1] if found else "import"


def copy_of_package(folder):
    shutil.copytree(ROOT / "jax_rnnt", folder / "jax_rnnt", ignore=shutil.ignore_patterns("__pycache__", "_cuda*"))


def try_python(path, data, folder, timeout):
    try:
        ast.parse(data)
    except SyntaxError:
        return "does not compile", ""
    copy_of_package(folder)
    (folder / path.relative_to(ROOT)).write_bytes(data)
    return pytest(folder, tests_of(path), timeout)


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
    import importlib.util

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


def try_cpu(path, data, folder, timeout):
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
    files = [str(ROOT / f"tests/test_{name}.py") for name in OF_KERNELS.split()]
    verdict = pytest(folder, files, timeout, "-k", "not reference")
    if verdict[0] == "survived" and path.read_bytes() != data:
        for name, unit in concerned.items():
            optimised = folder / "objects" / f"{name}-O1.o"
            compile_cpu(unit, folder, optimised, "-O1")
            if optimised.read_bytes() != original(name, unit, "-O1").read_bytes():
                return verdict
        return "same code", ""
    return verdict


def try_cuda(path, data, folder, timeout):
    """The emulation's checks, in the order that finds most per second."""
    sys.path.insert(0, str(ROOT / "xla_kernels/emulation"))
    import checks

    name = str(path.relative_to(ROOT))
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_bytes(data)
    sources = [s for s in checks.KERNELS if s == name or uses(path, s)]
    for source in sources:
        if source != name:
            shutil.copy(ROOT / source, folder / source)
    for mode in (checks.MODES[0], checks.MODES[1]):
        originals = {s: checks.compile_object(s, mode) for s in (*checks.KERNELS, *checks.OTHERS)}
        try:
            mutated = {s: checks.compile_object(s, mode, folder, folder, warnings=["-w"]) for s in sources}
        except subprocess.CalledProcessError:
            return "does not compile", ""
        program = checks.link([*(originals | mutated).values()], mode, folder / mode.name / "check")
        for order in mode.orders[:2]:
            code, output = checks.run(program, order, "--first", timeout=timeout)
            if code != 0:
                return (
                    "killed",
                    f"{mode.name} {order}: {'timeout' if code is None else (output.strip().splitlines() or [code])[0]}"[
                        :160
                    ],
                )
    return "survived", ""


TRY = {"python": try_python, "cpu": try_cpu, "cuda": try_cuda}

# ------------------------------------------------------------------------------------------------------------- the run


def draw(seed, number, area):
    """(path, place, operator, file with the fault)."""
    rng = random.Random(f"{seed} {number} {area}")
    sites = []
    for path in SEARCHED[area]:
        found, data = (python_sites if area == "python" else cxx_sites)(path.read_text())
        sites += [(path, data, *site) for site in found]
    path, data, start, end, new, operator = rng.choice(sites)
    return path, data, operator, data[:start] + new.encode() + data[end:], len(sites)


def difference(old, new):
    lines = difflib.unified_diff(old.decode().splitlines(), new.decode().splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def make_folder(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def report(results):
    counted = collections.Counter((r["area"], r["verdict"]) for r in results)
    print("area    faults  killed  survived  score   (not counted: same code, does not compile)")
    for area in (*AREAS, "all"):
        of = lambda verdict, area=area: sum(n for (a, v), n in counted.items() if v == verdict and area in (a, "all"))
        killed, survived = of("killed"), of("survived")
        score = f"{100 * killed / (killed + survived):5.1f}%" if killed + survived else "    -"
        print(
            f"{area:7} {killed + survived:6} {killed:7} {survived:9}  {score}   "
            f"{of('same code')}, {of('does not compile')}"
        )
    for r in results:
        if r["verdict"] in ("survived", "broken"):
            print(
                f"\n{r['verdict']}: {r['area']} {r['number']} {r['file']}:{r['line']} ({r['operator']}) "
                f"{r.get('reason') or r['by']}"
            )
            print("  " + "\n  ".join(r["difference"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="faults in each area")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no fault after that time")
    parser.add_argument(
        "--timeout", type=float, default=400, help="seconds of tests after which a fault counts as survived"
    )
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="of what was run so far, with all survivors")
    parser.add_argument("--control", action="store_true", help="no fault: everything must survive")
    parser.add_argument("--again", action="store_true", help="run the survivors once more, on the tests of today")
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    if options.report:
        report(results)
        return 0
    if options.control:
        for area in options.areas:
            path = draw(options.seed, 0, area)[0]
            with tempfile.TemporaryDirectory(prefix="control-", dir=make_folder(BUILD)) as folder:
                verdict = TRY[area](path, path.read_bytes(), pathlib.Path(folder).resolve(), 3600)
            print(f"{area}: {' '.join(verdict)}", flush=True)
        return 0
    done = {(r["seed"], r["number"], r["area"]) for r in results if not (options.again and r["verdict"] == "survived")}
    began = time.monotonic()
    make_folder(BUILD)
    for number in range(options.count):
        for area in options.areas:
            if (options.seed, number, area) in done or time.monotonic() - began > options.seconds:
                continue
            path, old, operator, new, _ = draw(options.seed, number, area)
            start = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="fault-", dir=BUILD) as folder:
                verdict, by = TRY[area](path, new, pathlib.Path(folder).resolve(), options.timeout)
            changed = difference(old, new)
            line = next(i for i, (a, b) in enumerate(zip(old.splitlines(), new.splitlines()), 1) if a != b)
            entry = {
                "seed": options.seed, "number": number, "area": area, "file": str(path.relative_to(ROOT)), "line": line,
                "operator": operator, "verdict": verdict, "by": by, "difference": changed,
                "seconds": round(time.monotonic() - start),
            }  # fmt: skip
            results = [r for r in results if (r["seed"], r["number"], r["area"]) != (options.seed, number, area)]
            results.append(entry)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            with open(options.results, "w") as file:
                file.writelines(json.dumps(r) + "\n" for r in results)
            print(
                f"{area} {number} {entry['file']}:{line} {operator}: {verdict} {by} ({entry['seconds']} s)", flush=True
            )
    report([r for r in results if r["seed"] == options.seed])
    return 0


if __name__ == "__main__":
    sys.exit(main())
