"""A model of the CUDA kernels' performance from their own machine code. Needs nvcc and nvdisasm, no GPU.

    python lab/model/cuda_model.py [--check]
    python lab/model/cuda_model.py emission --classes 500 --dtypes bfloat16 --profile backward
    python lab/model/cuda_model.py lattice --lattices 'standard, U = 127' --profile 'Sweep<float, 2, 1>'

Compiles the kernels for sm_90, runs their machine code on real inputs (interpreter.py), counts what ran and replays it
(cycles.py). The launches are those of the host code itself, linked with a runtime that launches nothing (host.cc).
Prints tables, and what misses an aim; with --check that is an error. --profile prints, for every instruction, how often
it ran and how long warps waited before it.

Emission: instructions of a row and of an element, by pipe; most KiB of loads in flight; shares of the bandwidth of a
copy if a multiprocessor issues 4 or 2.7 instructions a cycle ("a line a cycle": by the stricter rule of the memory
pipe, see memory_cycles), and if blocks do not slow each other down. Lattice: cycles of a diagonal of alpha and of beta,
of two blocks side by side, and of a block beside its diagonals.
"""

import argparse
import collections
import itertools
import multiprocessing
import re
import subprocess
import sys

import kernel_problems as model
import numpy as np
from cycles import RATES, Replay, memory_cycles, pipe

# H200: the bandwidth of a copy, 4.3 TB/s, in bytes a cycle of one of 132 multiprocessors at 1.98 GHz.
COPY = 16.45
WARPS, REGISTERS, SHARED, BLOCKS = 64, 65536, 228 << 10, 32  # of a multiprocessor
LOADED = 800  # cycles from a load to its result when memory is busy

# Aims. Emission: share of the copy bandwidth at 4 instructions a cycle, for V = 32 and above; at 2.7, by either rule of
# the memory pipe, for whole cache lines; bytes in flight.
SHARES = {"float32": (1.0, 1.5), "bfloat16": (1.0, 1.2), "float16": (1.0, 1.2)}
ISSUED = 1.0
FLIGHT = 32 << 10

LATTICES = {  # arcs, U, two numbers of frames, and most cycles a diagonal
    "standard, U = 127": (model.STANDARD, 127, (64, 128), 120),
    "standard, U = 128": (model.STANDARD, 128, (64, 128), 120),
    "standard, U = 255": (model.STANDARD, 255, (64, 128), 165),
    "standard, U = 256": (model.STANDARD, 256, (64, 128), 180),
    "monotonic, U = 127": (model.MONOTONIC, 127, (160, 224), 120),
    "token and duration, 5 durations, U = 63": (model.token_and_duration(range(5)), 63, (32, 64), 300),
    "multi-blank, 5 durations, U = 63": (model.multi_blank(range(1, 6)), 63, (32, 64), 240),
}

PIPES = "ALU", "FMA", "IMAD", "XU", "memory"
HEADS = {
    "emission": "| emission ({version}) | V | instructions a row | an element | " + " | ".join(PIPES) + " "
    "| KiB in flight | at 4 | at 2.7 | a line a cycle | alone |\n|---|" + "--:|" * 13,
    "lattice": "| lattice ({version}) | kernel | alpha | beta | two blocks | fixed |\n|---|---|--:|--:|--:|--:|",
}


def resident(launch):
    """Blocks of a launch that a multiprocessor holds."""
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
    by_registers = REGISTERS // (warps * -(-launch.kernel.registers * 32 // 256) * 256)
    by_shared = SHARED // (launch.kernel.shared + launch.shared)  # with the KiB of the system
    return min(WARPS // warps, by_registers, by_shared, BLOCKS)


def traces(block):
    return [w.trace for w in block.warps]


# Of all rows: their number, bytes moved, instructions by pipe, cycles of the memory pipe by either rule. Of a
# multiprocessor: most bytes of loads in flight, and bytes moved a cycle if blocks do not slow each other down, by the
# slower rule.
Emission = collections.namedtuple("Emission", "kernel rows bytes counts memory tags flight alone")


def emission(kernels, V, dtype, backward, aligned, at_least=16):
    """Runs blocks until they have done so many rows, and models them."""
    problem = model.EmissionProblem(V, dtype, 0 if aligned else 1)
    launch = problem.backward(kernels) if backward else problem.forward(kernels)
    blocks, rows, result = [], [], problem.logits if backward else problem.norm
    while len(rows) < at_least:
        blocks.append(model.run_block(launch, problem.memory, (len(blocks), 0, 0)))
        rows = model.written_rows(blocks, result)
    assert max(rows) < problem.rows
    ran = [step for block in blocks for trace in traces(block) for step in trace]
    counts = collections.Counter(pipe(x) for x, _ in ran)
    memory, tags = (sum(memory_cycles(*step, tags=tags) for step in ran) for tags in (False, True))
    moved = V * (2 if dtype != "float32" else 4) * (2 if backward else 1) + 12  # and three planes
    replay = Replay([traces(blocks[0])], LOADED, tags=True)
    events = sorted([(a, n) for a, _, n in replay.loads] + [(b, -n) for _, b, n in replay.loads])
    held = resident(launch)
    flight = max(itertools.accumulate(n for _, n in events)) * held
    alone = held * moved * len(model.written_rows(blocks[:1], result)) / replay.end
    return Emission(launch.kernel.name, len(rows), moved * len(rows), counts, memory, tags, flight, alone)


def ceiling(e, rate, tags=False):
    """Share of the copy bandwidth if a multiprocessor issues so many instructions a cycle."""
    clocks = [sum(e.counts.values()) / rate, (e.tags if tags else e.memory) / RATES["memory"]]
    clocks += [n / RATES[pipe] for pipe, n in e.counts.items() if pipe != "memory"]
    return e.bytes / max(clocks) / COPY


def emission_row(V, dtype, backward, aligned):
    """A row of the table, and what it misses."""
    e = emission(KERNELS, V, dtype, backward, aligned)
    n = sum(e.counts.values()) / e.rows
    name = f"`{e.kernel}`{'' if aligned else ', shifted'}"
    at_4, at_2, by_lines = ceiling(e, 4), ceiling(e, 2.7), ceiling(e, 2.7, tags=True)
    cells = [name, V, f"{n:.0f}", f"{n / V:.2f}", *(f"{e.counts[p] / e.rows:.0f}" for p in PIPES)]
    cells += [f"{e.flight / 1024:.0f}", *(f"{share:.0%}" for share in (at_4, at_2, by_lines, e.alone / COPY))]
    missed = []
    if at_4 < (aim := SHARES[dtype][V > 32]):
        missed.append(f"{at_4:.0%} of the copy bandwidth at 4 instructions a cycle, below {aim:.0%}")
    if aligned and by_lines < ISSUED:
        missed.append(f"{by_lines:.0%} at 2.7 instructions and a line a cycle, below {ISSUED:.0%}")
    if e.flight < FLIGHT:
        missed.append(f"{e.flight / 1024:.0f} KiB in flight, below {FLIGHT >> 10}")
    # XLA aligns buffers to 16 bytes at least, so rows of whole vectors are never shifted: shown, without an aim.
    whole = V * (4 if dtype == "float32" else 2) % 16 == 0
    return [cells], [f"{name}, V = {V}: {what}" for what in missed if aligned or not whole]


def sweeps(kernels, table, T, U):
    """{(kernel, block): cycles of a block, of two of them side by side} of the sweeps."""
    found = {}
    problem = model.LatticeProblem(table, T, U)
    for name, index, block in problem.run(kernels):
        if "Sweep" in name:
            found[name, index[0]] = np.array([Replay([traces(block)] * n).end for n in (1, 2)])
    return found


def lattice_row(name):
    """Rows of the table, and what they miss. Cycles of a diagonal are the difference of two numbers of frames. A sweep
    takes half of the diagonals; a sweep of skipping arcs takes all, and its second block is the one of alpha."""
    table, U, frames, aim = LATTICES[name]
    few, many = (sweeps(KERNELS, table, T, U) for T in frames)
    skips = "durations" in name
    diagonals = 0 if name.startswith("monotonic") else U
    rows, missed = [], []
    for kernel in dict.fromkeys(kernel for kernel, _ in few):
        slopes, fixed = [], []
        for block in (1, 0) if skips else (0, 1):
            share = 1 if skips else 2
            slope = (many[kernel, block] - few[kernel, block]) * share / (frames[1] - frames[0])
            slopes.append(slope)
            fixed.append(few[kernel, block][0] - slope[0] * (frames[0] + diagonals) / share)
        one = [slope[0] for slope in slopes]
        rows.append([name, f"`{kernel}`", *(f"{x:.0f}" for x in (*one, max(s[1] for s in slopes), max(fixed)))])
        if max(one) > aim:
            missed.append(f"{name}, `{kernel}`: {max(one):.0f} cycles a diagonal, above {aim}")
    return rows, missed


def work(task):
    part, *arguments = task
    return {"emission": emission_row, "lattice": lattice_row}[part](*arguments)


def print_tables(tasks, version):
    """Runs the tasks on two processes. Returns what misses an aim."""
    missed, last = [], None
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for (part, *_), (rows, faults) in zip(tasks, pool.imap(work, tasks), strict=True):
            if part != last:
                print(f"\n{HEADS[part].format(version=version)}")
            last = part
            for cells in rows:
                print("|", " | ".join(map(str, cells)), "|", flush=True)
            missed += faults
    return missed


def print_profile(name, block, share, unit):
    counts = collections.Counter(x.number for trace in traces(block) for x, _ in trace)
    replay = Replay([traces(block)])
    print(f"{name}: {sum(counts.values()) / share:.1f} instructions, {replay.end / share:.1f} cycles a {unit}")
    for x in block.code:
        if n := counts[x.number]:
            control = f"stall {x.stall:2} wait {x.wait:06b} write {x.write} read {x.read}"
            print(f"{16 * x.number:5x} {n / share:8.2f} waits {replay.waits[x.number] / n:6.1f}  {control}  {x.text}")


def profile(options):
    for V, dtype in itertools.product(options.classes, options.dtypes) if "emission" in options.parts else ():
        problem, backward = model.EmissionProblem(V, dtype), options.profile == "backward"
        launch = problem.backward(KERNELS) if backward else problem.forward(KERNELS)
        block = model.run_block(launch, problem.memory, (0, 0, 0))
        rows = len(model.written_rows([block], problem.logits if backward else problem.norm))
        print_profile(launch.kernel.name, block, rows, "row")
    for lattice in options.lattices if "lattice" in options.parts else ():
        table, U, frames, _ = LATTICES[lattice]
        for name, index, block in model.LatticeProblem(table, frames[0], U).run(KERNELS):
            if "Sweep" in name and options.profile in f"{name} {index[0]}":
                print_profile(f"{name}, block {index}", block, frames[0] + U, "diagonal of the lattice")


def main():
    global KERNELS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["emission", "lattice"], help="emission, lattice")
    parser.add_argument("--classes", nargs="+", type=int, default=list(model.CASES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(SHARES))
    parser.add_argument("--lattices", nargs="+", default=list(LATTICES), choices=list(LATTICES))
    parser.add_argument("--profile", help="forward, backward, or a kernel of the lattice")
    parser.add_argument("--check", action="store_true", help="fail where an aim is missed")
    options = parser.parse_args()
    try:
        KERNELS = model.Kernels()
    except FileNotFoundError as error:
        if not options.check:
            sys.exit(f"cuda-model: {error}")
        print(f"cuda-model: left out, {error}")
        return
    if options.profile:
        profile(options)
        return
    tasks = []
    if "emission" in options.parts:
        every = itertools.product((False, True), options.dtypes, options.classes, (True, False))
        tasks += [("emission", V, dtype, backward, aligned) for backward, dtype, V, aligned in every]
    if "lattice" in options.parts:
        tasks += [("lattice", name) for name in options.lattices]
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    missed = print_tables(tasks, f"nvcc {re.search(r'release ([0-9.]+)', release)[1]}")
    print("\n" + "\n".join(missed or ["every aim is met"]))
    sys.exit(bool(missed) and options.check)


if __name__ == "__main__":
    main()
