"""Injects faults at random into Python, the CPU kernels and the CUDA kernels; how many do the tests find?

    python tests/mutation.py --seed 1 --count 40            # make mutation-score ARGS="--seed 1 --count 40"
    python tests/mutation.py --report

A fault is one change of an operator, a comparison, a constant, min and max, two arguments, a condition or a statement,
drawn from all places of an area. Python: in a copy of the package, under the tests that reach the line. CPU kernels:
compiled and linked into a copy of the module, under the tests of kernels. CUDA kernels: run by the emulation, under its
checks. A fault whose object code is that of the sources changes nothing and does not count; one that does not compile
does not either. Results are appended to a file of JSON lines, and a run goes on where the last one stopped.

A fault meets the quickest tests, for so many CPU seconds: the score of a first run is a lower bound. A survivor is then
read: --again lets it meet given tests or, in CUDA, optimised code and a sanitizer; --equivalent and --gap note why it
changes no result, or why nothing finds it. What a test reaches is recorded once, and again where it may have changed.

One worker on one core, with limits in CPU seconds: others may use the machine. The sources stay as they are.
"""

import argparse
import atexit
import collections
import difflib
import functools
import itertools
import json
import os
import pathlib
import random
import shutil
import sys
import tempfile

from mutation_areas import TRY
from mutation_reach import BUILD, PACKAGE, Known, reached
from mutation_sites import ROOT, SEARCHED, cxx_sites, python_sites

RESULTS = ROOT / "benchmarks" / "results" / "mutations.jsonl"
AREAS = ("python", "cpu", "cuda")


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


def name(entry):
    return f"{entry['area']}:{entry['seed']}:{entry['number']}"


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
            print(f"\n{r['verdict']}: {name(r)} {r['file']}:{r['line']} ({r['operator']}) {r.get('reason') or r['by']}")
            print("  " + "\n  ".join(r["difference"]))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


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
    of_one = {"nargs": 2, "metavar": ("AREA:SEED:NUMBER", "TEXT")}
    parser.add_argument("--equivalent", **of_one, help="why a survivor changes no result")
    parser.add_argument("--gap", **of_one, help="why no test finds a survivor that does")
    options = parser.parse_args()
    results = read(options.results)
    if options.report:
        report(results)
        return 0
    for judged, given in (("equivalent", options.equivalent), ("survived", options.gap)):
        for r in results:
            if given and name(r) == given[0] and r["verdict"] in ("survived", "equivalent"):
                r |= {"verdict": judged, "reason": given[1]}
    if options.equivalent or options.gap:
        write(results, options.results)
        return 0
    atexit.register(shutil.rmtree, PACKAGE, ignore_errors=True)
    tests = {name: (0, []) for name in options.tests}
    if {*options.areas} != {"cuda"} and not tests:
        tests = reached()
    kills = collections.Counter(r["by"] if "::" in r["by"] and "/" in r["by"] else f"tests/{r['by']}" for r in results)

    def attempt(area, path, data, line):
        with tempfile.TemporaryDirectory(prefix="fault-", dir=BUILD) as folder:
            known = Known(tests, kills, options.budget, bool(options.tests), options.again is not None)
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
        # Read again, since another run may have added to it.
        results[:] = [r for r in read(options.results) if name(r) != name(entry)] + [entry]
        write(results, options.results)
        print(f"{name(entry)} {entry['file']}:{line} {operator}: {verdict} {by} ({entry['seconds']} s)", flush=True)

    if options.again is not None:
        for r in [*results]:
            left = not options.again and r["verdict"] == "survived" and r["area"] in options.areas
            if left or name(r) in options.again:
                fault = reapplied(r)
                if fault:
                    run(r["seed"], r["number"], r["area"], fault)
                else:
                    print(f"{name(r)}: the sources have changed there", flush=True)
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
