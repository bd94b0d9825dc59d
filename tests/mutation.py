"""Injects faults at random into Python, the CPU kernels and the CUDA kernels; how many do the tests find?

    python tests/mutation.py --seed 1 --count 40            # make mutation-score ARGS="--seed 1 --count 40"
    python tests/mutation.py --report

A fault is one change of an operator, a comparison, a constant, min and max, two arguments, a condition or a statement,
drawn from all places of an area. Python: in a copy of the package, under the tests of that file first. CPU kernels:
compiled and linked into a copy of the module, under the tests of kernels. CUDA kernels: run by the emulation, under its
checks. A fault whose object code is that of the sources changes nothing and does not count; one that does not compile
does not either. Results are appended to a file of JSON lines, and a run goes on where the last one stopped.

Each fault meets the tests that reach its line, the quickest first, for so many CPU seconds: a score is a lower bound.
What each test reaches is recorded once, on a copy of the package that says so, and again where tests have changed.

One worker on one core, with limits in CPU seconds: others may use the machine. The sources stay as they are.
"""

import argparse
import ast
import atexit
import builtins
import collections
import compileall
import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback

import jax  # for the processes of all faults at once; the package is imported in each
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutation"
PROGRAMS = BUILD / "programs"  # that JAX compiled
RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
AREAS = ("python", "cpu", "cuda")
BUILD.mkdir(parents=True, exist_ok=True)
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


SEARCHED = {
    "python": sorted(p for p in (ROOT / "jax_rnnt").rglob("*.py") if p.name not in NO_SITES),
    "cpu": sorted([*(ROOT / "xla_kernels/cpu").glob("*.h"), *(ROOT / "xla_kernels/cpu").glob("*.cc"),
                   ROOT / "xla_kernels/common/extended.h", ROOT / "xla_kernels/common/ffi_calls.h"]),
    "cuda": sorted([*(ROOT / "xla_kernels/cuda").glob("*.cuh"),
                    *(ROOT / f"xla_kernels/cuda/{n}.cu" for n in ("lattice", "skip_lattice", "softmax_emission"))]),
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------ limits of time


def spawned(call, seconds, log):
    """Exit status and CPU seconds of `call` in a process of its own, which may use that many and prints into `log`.

    Limits count CPU seconds: a busy machine, or one that stops processes for a while, ends nothing. A process that
    waits for something that never comes uses none: it is ended after IDLE looks without any progress.
    """
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
            to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(to, 1)
            os.dup2(to, 2)
            os._exit(call())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(70)
    idle, before = 0, None
    for look in itertools.count():
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        time.sleep(0.1)
        if look % 20:
            continue
        now = progress(child)
        idle, before = (idle + 1 if now == before else 0), now
        if idle > IDLE:
            os.killpg(child, signal.SIGKILL)


IDLE = 60  # looks, one in two seconds: no test sleeps or waits for a process outside its session for so long


def progress(session):
    """CPU ticks of all processes of a session; what never equals itself while one of them could run or is stopped."""
    ticks = 0
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == session:
            if fields[0] in "RTD":
                return object()
            ticks += int(fields[11]) + int(fields[12])
    return ticks


def program(command, environment):
    """For `spawned`."""
    return lambda: os.execvpe(command[0], [str(c) for c in command], {**os.environ, **environment})


# ------------------------------------------------------------------------------------------- which tests reach a line

# Tests of figures, files and processes; large problems and many devices, where others ask the same of small ones.
NOT_MAPPED = (
    "example docs benchmarks gpu gpu_compile machine_code plot distributed installation faults large memory joint_mesh"
)
OF_KERNELS = "lattices emissions lengths values masks offsets targets dtypes edges family fuzz layouts"


class Recorder:
    """Of each test that passes: its CPU seconds, and the lines of the package that it reaches."""

    def __init__(self):
        self.lines, self.tests = set(), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.lines, start = set(), time.process_time()
        builtins._reached = self.lines.add
        result = yield
        self.tests[item.nodeid] = [round(time.process_time() - start, 3), sorted(self.lines)]
        return result

    def pytest_runtest_logreport(self, report):
        if report.outcome != "passed":
            self.failed = {*getattr(self, "failed", ()), report.nodeid}

    def passed(self):
        return {name: entry for name, entry in self.tests.items() if name not in getattr(self, "failed", ())}


def recording(text, name):
    """The source with a note before each statement inside a function."""
    tree = ast.parse(text)

    def note(line):
        return ast.parse(f"__import__('builtins').__dict__.get('_reached', id)({f'{name}:{line}'!r})").body[0]

    def walk(body, inside):
        statements = []
        for statement in body:
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if inside and not is_text and not isinstance(statement, ast.Global | ast.Nonlocal):
                statements.append(note(statement.lineno))
            deeper = inside or isinstance(statement, ast.FunctionDef)
            for part in [statement, *getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
                for field in ("body", "orelse", "finalbody"):
                    if isinstance(getattr(part, field, None), list):
                        setattr(part, field, walk(getattr(part, field), deeper))
            statements.append(statement)
        return statements

    tree.body = walk(tree.body, False)
    return ast.unparse(ast.fix_missing_locations(tree))


def statement_of(text, line):
    """First line of the innermost statement with this line that is inside a function; None: outside of all."""
    found = None

    def walk(node, inside):
        nonlocal found
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt) and child.lineno <= line <= child.end_lineno:
                found = child.lineno if inside else found
            walk(child, inside or isinstance(child, ast.FunctionDef))

    walk(ast.parse(text), False)
    return found


def place(path, line):
    return f"{path.relative_to(ROOT)}:{statement_of(path.read_text(), line)}"


def digest(paths):
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def record(path, helpers):
    """{"files": {file: digest}, "tests": {test: (CPU seconds, lines)}} of the quick tests of a file."""
    with tempfile.TemporaryDirectory(prefix="map-", dir=BUILD) as name:
        folder = pathlib.Path(name)
        out, log = folder / "map.json", folder / "log.txt"
        copy_of_package(folder)
        for source in SEARCHED["python"]:
            replace(folder, source, recording(source.read_text(), str(source.relative_to(ROOT))).encode())

        def call():
            recorder = Recorder()
            status = run_pytest(folder, [path], recorder)
            out.write_text(json.dumps(recorder.passed()))
            return status

        status, seconds = spawned(call, 1500, log)
        text = log.read_text()
        if not out.exists():
            sys.exit(f"{path.name}: exit {status}\n{text[-3000:]}")
        tests = json.loads(out.read_text())
    print(f"{path.name}: {seconds:.0f} s, {text.strip().splitlines()[-1]}", flush=True)
    lines = {line.rpartition(":")[0] for _, lines in tests.values() for line in lines}
    return {"files": {str(f): digest([ROOT / f]) for f in sorted(lines)} | helpers(path), "tests": tests}


def reached():
    """{test: (CPU seconds, lines)} of all quick tests; what has not changed since is read from the last run."""
    shared = digest(p for p in sorted((ROOT / "tests").glob("*.py")) if not p.name.startswith(("test_", "mutation")))

    def helpers(path):
        return {"tests": shared, str(path.relative_to(ROOT)): digest([path])}

    kept, known, tests = BUILD / "reached.json", {}, {}
    if kept.exists():
        known = json.loads(kept.read_text())
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if path.stem.removeprefix("test_") in NOT_MAPPED.split():
            continue
        files = known.get(path.name, {"files": {"none": ""}})["files"]
        now = {f: digest([ROOT / f]) for f in files if (ROOT / f).is_file()} | helpers(path)
        if files != now:
            known[path.name] = record(path, helpers)
            kept.write_text(json.dumps(known))
        tests |= known[path.name]["tests"]
    return tests


def chosen(candidates, tests, kills, budget):
    """Tests for so many CPU seconds: those that found most, then the quickest; by files, which share programs."""
    order = sorted(candidates, key=lambda name: (-kills[name], tests[name][0]))
    total, taken = 0, {}
    for name in order:
        total += tests[name][0]
        if total > budget and taken:
            break
        taken.setdefault(name.split("::")[0], []).append(name)
    files = sorted(taken.values(), key=lambda names: (-sum(kills[n] for n in names), tests[names[0]][0]))
    return [name for names in files for name in names]


def tests_for(path, line, tests, kills, budget):
    """Those that reach the statement of this line; for a line outside of functions, those that reach its file."""
    at = place(path, line)
    if not any(lines for _, lines in tests.values()):
        return [*tests]
    if not at.endswith(":None"):
        candidates = [test for test, (_, lines) in tests.items() if at in lines]
    else:
        file = at.removesuffix("None")
        candidates = [test for test, (_, lines) in tests.items() if any(x.startswith(file) for x in lines)]
    return chosen(candidates, tests, kills, budget)


# --------------------------------------------------------------------------------------------------- building, testing


class Chosen:
    def __init__(self, names):
        self.place = {name: i for i, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        place = {item: self.place.get(item.nodeid, self.place.get(item.nodeid.split("[")[0])) for item in items}
        items[:] = sorted((item for item in items if place[item] is not None), key=place.get)


def run_pytest(folder, files, plugin, *options):
    """In a child: JAX and pytest are imported already, the package is not."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ |= {"PYTHONPATH": str(folder), "JAX_RNNT_REQUIRE": "cpu", "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS)}
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    sys.dont_write_bytecode = False
    command = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--rootdir", str(ROOT)]
    return int(pytest.main([*command, "-c", str(ROOT / "pyproject.toml"), *options, *map(str, files)], [plugin]))


def verdict_of(folder, names, tests):
    """Of these tests on the package in `folder`."""
    if not names:
        return "survived", "no test reaches it"
    files = dict.fromkeys(ROOT / name.split("::")[0] for name in names)
    expected = sum(tests[name][0] for name in names)
    log = folder / "log.txt"
    status, seconds = spawned(lambda: run_pytest(folder, files, Chosen(names), "-x"), 3 * expected + 60, log)
    text = log.read_text(errors="replace")
    if status == 0:
        return "survived", f"{len(names)} tests, {seconds:.0f} s"
    found = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(test_\S+)", text, re.M)
    if status == 1 and found:
        return "killed", found[0]
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "killed", f"no end after {seconds:.0f} s, {expected:.0f} s expected"
    return "killed", f"exit {status}: {(text.strip().splitlines() or [''])[-1]}"[:160]


def copy_of_package(folder):
    """Hard links to a copy with its compiled modules, since compiling takes longer than most tests."""
    if not PACKAGE.exists():
        shutil.copytree(ROOT / "jax_rnnt", PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "_cuda*"))
        compileall.compile_dir(PACKAGE, quiet=1)
    shutil.copytree(PACKAGE, folder / "jax_rnnt", copy_function=os.link)


PACKAGE = BUILD / f"package-{os.getpid()}"  # several runs may go on at once


def replace(folder, path, data):
    """Another text of a file in a copy."""
    file = folder / path.relative_to(ROOT)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    for old in file.parent.glob(f"__pycache__/{file.stem}.*"):
        old.unlink()
    file.write_bytes(data)


def try_python(path, data, folder, line, known):
    try:
        ast.parse(data)
    except SyntaxError:
        return "does not compile", ""
    copy_of_package(folder)
    replace(folder, path, data)
    return verdict_of(folder, tests_for(path, line, *known[:3]), known[0])


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
    files = tuple(f"tests/test_{name}.py::" for name in OF_KERNELS.split())
    tests, kills, budget = known[:3]
    given = not any(lines for _, lines in tests.values())
    candidates = [name for name in tests if given or (name.startswith(files) and "reference" not in name)]
    verdict = verdict_of(folder, chosen(candidates, tests, kills, budget), tests)
    if verdict[0] == "survived" and path.read_bytes() != data:
        for name, unit in concerned.items():
            optimised = folder / "objects" / f"{name}-O1.o"
            compile_cpu(unit, folder, optimised, "-O1")
            if optimised.read_bytes() != original(name, unit, "-O1").read_bytes():
                return verdict
        return "same code", ""
    return verdict


sys.path.insert(0, str(ROOT / "xla_kernels/emulation"))
import checks  # noqa: E402

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
    later = ((OPTIMISED, ("forward",)), (checks.MODES[1], ("forward",))) if known[3] else ()
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

# ------------------------------------------------------------------------------------------------------------- the run


@functools.cache
def sites(area):
    """(path, start, end, replacement, operator) of all faults of an area, and the files' bytes."""
    found, texts = [], {}
    for path in SEARCHED[area]:
        here, texts[path] = (python_sites if area == "python" else cxx_sites)(path.read_text())
        found += [(path, *site) for site in here]
    return found, texts


def draw(seed, number, area):
    """(path, file without and with the fault, line, operator)."""
    found, texts = sites(area)
    path, start, end, new, operator = random.Random(f"{seed} {number} {area}").choice(found)
    data = texts[path]
    return path, data, data[:start] + new.encode() + data[end:], data[:start].count(b"\n") + 1, operator


def difference(old, new):
    lines = difflib.unified_diff(old.decode().splitlines(), new.decode().splitlines(), n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def reapplied(entry):
    """As `draw`, a fault of before in the sources of today; None if they have no such lines."""
    path = ROOT / entry["file"]
    old, new = ([line[1:] for line in entry["difference"] if line[0] == sign] for sign in "-+")
    lines = path.read_text().splitlines(keepends=True)
    bare = [line.rstrip("\n") for line in lines]
    places = [i for i in range(len(lines)) if bare[i : i + len(old)] == old]
    if not places:
        return None
    at = min(places, key=lambda i: abs(i + 1 - entry["line"]))
    faulty = [*lines[:at], *(line + "\n" for line in new), *lines[at + len(old) :]]
    return path, path.read_bytes(), "".join(faulty).encode(), at + 1, entry["operator"]


def report(results):
    counted = collections.Counter((r["area"], r["verdict"]) for r in results)
    print("area    faults  killed  survived  score   (not counted: equivalent, same code, does not compile)")
    for area in (*AREAS, "all"):
        of = lambda verdict, area=area: sum(n for (a, v), n in counted.items() if v == verdict and area in (a, "all"))
        killed, survived = of("killed"), of("survived")
        score = f"{100 * killed / (killed + survived):5.1f}%" if killed + survived else "    -"
        others = ", ".join(str(of(v)) for v in ("equivalent", "same code", "does not compile"))
        print(f"{area:7} {killed + survived:6} {killed:7} {survived:9}  {score}   {others}")
    for r in results:
        if r["verdict"] in ("survived", "equivalent"):
            print(
                f"\n{r['verdict']}: {r['area']} {r['number']} {r['file']}:{r['line']} ({r['operator']}) "
                f"{r.get('reason') or r['by']}"
            )
            print("  " + "\n  ".join(r["difference"]))


def write(results, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in results))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40, help="faults in each area")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--budget", type=float, default=60, help="CPU seconds of tests for each fault")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="of what was run so far, with all survivors")
    parser.add_argument("--control", action="store_true", help="no fault: everything must survive")
    parser.add_argument("--again", nargs="*", metavar="AREA:SEED:NUMBER", help="run these, or all survivors, once more")
    parser.add_argument("--tests", nargs="+", default=[], help="these instead of those that reach the line")
    parser.add_argument("--reason", nargs=3, metavar=("AREA", "NUMBER", "TEXT"), help="a survivor changes no result")
    options = parser.parse_args()
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    results = [json.loads(line) for line in lines]
    if options.report:
        report(results)
        return 0
    if options.reason:
        area, number, reason = options.reason
        for r in results:
            if (r["seed"], r["area"], r["number"]) == (options.seed, area, int(number)) and r["verdict"] == "survived":
                r |= {"verdict": "equivalent", "reason": reason}
        write(results, options.results)
        return 0
    atexit.register(shutil.rmtree, PACKAGE, ignore_errors=True)
    tests = {name: (0, []) for name in options.tests}
    if {*options.areas} != {"cuda"} and not tests:
        tests = reached()
    kills = collections.Counter(r["by"] if "::" in r["by"] and "/" in r["by"] else f"tests/{r['by']}" for r in results)

    def attempt(area, path, data, line):
        with tempfile.TemporaryDirectory(prefix="fault-", dir=BUILD) as folder:
            known = tests, kills, options.budget, options.again is not None
            return TRY[area](path, data, pathlib.Path(folder).resolve(), line, known)

    if options.control:
        survived = True
        for area, number in itertools.product(options.areas, range(options.count)):
            path, old, _, line, _ = draw(options.seed, number, area)
            verdict = attempt(area, path, old, line)
            survived &= verdict[0] == "survived"
            print(f"{area} {path.name}:{line}: {' '.join(verdict)}", flush=True)
        return int(not survived)

    def run(seed, number, area, fault):
        path, old, new, line, operator = fault
        start = cpu_seconds()
        verdict, by = attempt(area, path, new, line)
        kills[f"tests/{by}"] += verdict == "killed"
        entry = {
            "seed": seed, "number": number, "area": area, "file": str(path.relative_to(ROOT)), "line": line,
            "operator": operator, "verdict": verdict, "by": by, "difference": difference(old, new),
            "seconds": round(cpu_seconds() - start),
        }  # fmt: skip
        results[:] = [r for r in results if (r["seed"], r["number"], r["area"]) != (seed, number, area)]
        results.append(entry)
        write(results, options.results)
        print(f"{area} {number} {entry['file']}:{line} {operator}: {verdict} {by} ({entry['seconds']} s)", flush=True)

    if options.again is not None:
        for r in [*results]:
            wanted = f"{r['area']}:{r['seed']}:{r['number']}" in options.again
            if wanted or (not options.again and r["verdict"] == "survived" and r["area"] in options.areas):
                fault = reapplied(r)
                if fault:
                    run(r["seed"], r["number"], r["area"], fault)
                else:
                    print(f"{r['area']} {r['seed']} {r['number']}: the sources have changed there", flush=True)
        return 0
    done = {(r["seed"], r["number"], r["area"]) for r in results}
    same = {(r["file"], *r["difference"]) for r in results}  # drawn twice, a fault counts once
    for number, area in itertools.product(range(options.count), options.areas):
        if (options.seed, number, area) not in done:
            fault = draw(options.seed, number, area)
            key = (str(fault[0].relative_to(ROOT)), *difference(*fault[1:3]))
            if key not in same:
                same.add(key)
                run(options.seed, number, area, fault)
    report([r for r in results if r["seed"] == options.seed])
    return 0


def cpu_seconds():
    """Of this process and all that ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    sys.exit(main())
