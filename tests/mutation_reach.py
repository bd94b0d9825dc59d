"""For mutation.py: which tests reach a line, and runs of some tests on a copy of the package."""

import ast
import builtins
import collections
import compileall
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import typing

import jax  # for the processes of all faults at once; the package is imported in each
import pytest

from mutation_sites import ROOT, SEARCHED

BUILD = ROOT / "build" / "mutation"
BUILD.mkdir(parents=True, exist_ok=True)
PROGRAMS = BUILD / "programs"  # that JAX compiled
PACKAGE = BUILD / f"package-{os.getpid()}"  # several runs may go on at once
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


# ------------------------------------------------------------------------------------------------ the copy, some tests


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


def verdict_of(folder, names, known):
    """Of these tests on the package in `folder`."""
    if not names:
        return "survived", "no test reaches it"
    files = dict.fromkeys(ROOT / name.split("::")[0] for name in names)
    expected = sum(known.tests[name][0] for name in names)
    log = folder / "log.txt"
    more = ("-m", "") if known.given else ()
    status, seconds = spawned(lambda: run_pytest(folder, files, Chosen(names), "-x", *more), 3 * expected + 60, log)
    text = log.read_text(errors="replace")
    if status == 5:
        sys.exit(f"no such tests: {names}")
    if status == 0:
        return "survived", f"{len(names)} tests, {seconds:.0f} s"
    found = re.findall(r"^(?:FAILED|ERROR) (?:\S*/)?(test_\S+)", text, re.M)
    if status == 1 and found:
        return "killed", found[0]
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        return "killed", f"no end after {seconds:.0f} s, {expected:.0f} s expected"
    last = "" if status < 0 else (text.strip().splitlines() or [""])[-1]
    return "killed", f"exit {status} {last}".strip()[:160]


def copy_of_package(folder):
    """Hard links to a copy with its compiled modules, since compiling takes longer than most tests."""
    if not PACKAGE.exists():
        shutil.copytree(ROOT / "jax_rnnt", PACKAGE, ignore=shutil.ignore_patterns("__pycache__", "_cuda*"))
        compileall.compile_dir(PACKAGE, quiet=1)
    shutil.copytree(PACKAGE, folder / "jax_rnnt", copy_function=os.link)


def replace(folder, path, data):
    """Another text of a file in a copy."""
    file = folder / path.relative_to(ROOT)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    for old in file.parent.glob(f"__pycache__/{file.stem}.*"):
        old.unlink()
    file.write_bytes(data)


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


class Known(typing.NamedTuple):
    """What a run knows of tests."""

    tests: dict  # {test: (CPU seconds, lines)}
    kills: collections.Counter  # how many faults a test has found
    budget: float  # CPU seconds for a fault
    given: bool  # by the caller, slow ones too, and nothing of them is recorded
    again: bool  # survivors of before, which may take minutes each

    def chosen(self, candidates):
        """Tests for the budget: those that found most, then the quickest; by files, which share programs."""
        if self.given:
            return [*self.tests]
        seconds = {name: self.tests[name][0] for name in candidates}
        total, taken = 0, {}
        for name in sorted(candidates, key=lambda name: (-self.kills[name], seconds[name])):
            total += seconds[name]
            if total > self.budget and taken:
                break
            taken.setdefault(name.split("::")[0], []).append(name)
        files = sorted(taken.values(), key=lambda names: (-sum(self.kills[n] for n in names), seconds[names[0]]))
        return [name for names in files for name in names]

    def of_line(self, path, line):
        """Tests that reach the statement of a line; for a line outside of functions, those that reach its file."""
        at = place(path, line)
        exact, file = not at.endswith(":None"), at.removesuffix("None")
        reach = lambda lines: at in lines if exact else any(x.startswith(file) for x in lines)
        return self.chosen([test for test, (_, lines) in self.tests.items() if reach(lines)])

    def of_files(self, names, without):
        """Tests of these files, but for those with a word in their name."""
        files = tuple(f"tests/test_{name}.py::" for name in names.split())
        return self.chosen([test for test in self.tests if test.startswith(files) and without not in test])
