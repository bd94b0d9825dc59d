"""Puts faults into copies of the CUDA kernels, one at a time: how many do the checks of the emulation find?

    python3 lab/mutation/kernels.py --count 20 --seed 1

Faults are those that one makes there: a barrier or a wait that is missing, a bound or an index off by one, a condition
turned round. `count` places are drawn, of each kind as many. Prints what found each: EMU is a report of the emulation,
ASAN, UBSAN or RACE one of a sanitizer, NaN or value a wrong result, "-" nothing. A fault that nothing finds changes no
result, or shows what the checks lack: read it. The exit code is 1 if the sources as they are fail.
"""

import argparse
import concurrent.futures
import itertools
import pathlib
import random
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "emulation"))
import checks

SOURCES = [*checks.ROOT.glob("xla_kernels/cuda/*.cuh"), *(checks.ROOT / source for source in checks.KERNELS)]
SOURCES.append(checks.ROOT / "xla_kernels/common/rounding.h")
# What to look for in a line of code, and its replacement.
FAULTS = [
    (r"\b(__syncthreads|__syncwarp|SyncWarps|SyncTeam<\w+>|CommitCopies|WaitForCopies<\d>)\(\);", ";"),
    (r"\bWaitForCopies<0>\(\)", "WaitForCopies<1>()"),
    (r" < (?!<)", " <= "),
    (r" <= ", " < "),
    (r" >= ", " > "),
    (r" == ", " != "),
    (r" && ", " || "),
    (r" [+-] 1\b", ""),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r"\bkUp \?", "!kUp ?"),
    (r"(?<=[\w)] )\+ (?=\w)", "- "),
    (r"\bif \((?:[^()]|\([^()]*\))*\)", "if (true)"),
]
SIGNS = {
    "jax_rnnt emulation:": "EMU",
    "ERROR: AddressSanitizer": "ASAN",
    "runtime error:": "UBSAN",
    "ThreadSanitizer: data race": "RACE",
    "is nan": "NaN",
    "is -nan": "NaN",
    "FAILED:": "value",
}


def places(pattern, fault):
    """(source, number of a line, the line with the fault) of all faults of a kind."""
    for source in SOURCES:
        for number, line in enumerate(source.read_text().splitlines()):
            code = line.partition("//")[0]
            if "template" in code or "static_assert" in code or code.lstrip().startswith(("#", "constexpr", "using")):
                continue
            for at in re.finditer(pattern, code):
                yield source, number, code[: at.start()] + fault + code[at.end() :]


def concerned(changed):
    """The kernels' sources that are or include this one."""

    def includes(path):
        names = re.findall(r'#include "(xla_kernels/.*)"', path.read_text())
        return path == changed or any(includes(checks.ROOT / name) for name in names)

    return [source for source in checks.KERNELS if includes(checks.ROOT / source)]


def verdict(code, output):
    if code is None:
        return "timeout"
    return next((name for sign, name in SIGNS.items() if sign in output), f"exit {code}") if code else "-"


def try_fault(source, number, line, objects):
    """What the first run says that finds the fault, and which one it is."""
    lines = source.read_text().splitlines()
    lines[number] = line
    with tempfile.TemporaryDirectory(prefix="mutation-", dir=checks.BUILD) as folder:
        root = pathlib.Path(folder)
        copy = root / source.relative_to(checks.ROOT)
        copy.parent.mkdir(parents=True)
        copy.write_text("\n".join(lines) + "\n")
        for mode in checks.MODES:
            try:
                faulty = {s: checks.compile_object(s, mode, root, root, warnings=["-w"]) for s in concerned(source)}
            except subprocess.CalledProcessError:
                return "does not compile"
            program = checks.link(objects[mode.name] | faulty, mode, root)
            for order in mode.orders[:2]:
                found = verdict(*checks.run(program, order, "--first"))
                if found != "-":
                    return f"{found} ({mode.name} {order})"
    return "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="faults to draw (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    options = parser.parse_args()
    draw, kinds = random.Random(options.seed), [list(places(*fault)) for fault in FAULTS]
    for kind in kinds:
        draw.shuffle(kind)
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*kinds))
    chosen = list(itertools.islice(filter(None, in_turn), options.count))
    with concurrent.futures.ThreadPoolExecutor(checks.WORKERS) as pool:
        objects = checks.build_all(pool)
        for mode in checks.MODES:
            program = checks.link(objects[mode.name], mode, checks.BUILD)
            code, output = checks.run(program, "forward")
            if code != 0:
                sys.exit(f"{mode.name}: the sources as they are fail\n{output}")
        found = list(pool.map(lambda place: try_fault(*place, objects), chosen))
    tried = [(place, what) for place, what in zip(chosen, found) if what != "does not compile"]
    for (source, number, line), what in sorted(tried, key=lambda x: x[1]):
        print(f"{what:22} {source.name}:{number + 1}: {line.strip()}", flush=True)
    print(f"{sum(what != '-' for _, what in tried)} of {len(tried)} found; there are {sum(map(len, kinds))} places")


if __name__ == "__main__":
    main()
