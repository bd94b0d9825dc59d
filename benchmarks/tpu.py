"""What XLA and Mosaic make of the losses for TPUs, on a machine that has none: memory, traffic, collectives, schedule.

    python benchmarks/tpu.py                  compiles every program for every generation and prints the table
    python benchmarks/tpu.py --check          fails where docs/tpu.md differs from it, or an aim is missed
    python benchmarks/tpu.py --write v5e      writes the rows of these generations into docs/tpu.md

`make test-tpu-compile` installs jax[tpu] and runs it. Memory, copies, aliases, collectives, VMEM and the bundles of a
kernel are those that would run. Cycles of a step are counted in the final schedule: the larger of its bundles and its
longest chain of latencies. Time on a TPU also depends on what no compiler knows.
"""

import argparse
import collections
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Else libtpu asks a metadata server for them, and waits; a lock file would allow one process at a time.
os.environ |= dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    JAX_PLATFORMS="cpu",
)

import jax
import jax.numpy as jnp
import numpy as np
import skipping
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt
from jax_rnnt.lattices import _pallas as pallas, _topology as topology

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "tpu.md"
B, T, U, V, H = 8, 256, 64, 512, 640  # B on each chip
DURATIONS = (0, 1, 2, 3, 4)
GENERATIONS = {"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "tpu7x": "tpu7x:2x2x1"}


# ------------------------------------------------------------------------------------------------------- programs


def of_logits(loss, devices, dtype, extra=0):
    shapes = ((devices * B, T, U + 1, V + extra), dtype, "data"), *_lengths(devices)
    return jax.value_and_grad(loss), shapes, (0,)


def _lengths(devices):
    return (((devices * B, *more), jnp.int32, "data") for more in ((U,), (), ()))


def of_matmul(devices, dtype):
    def mean(weight, hidden, *rest):
        return jax_rnnt.rnnt_loss((hidden @ weight).reshape(-1, T, U + 1, V), *rest)

    shapes = ((H, V), dtype), ((devices * B * T * (U + 1), H), dtype, "data"), *_lengths(devices)
    return jax.value_and_grad(mean, (0, 1)), shapes, ()


def of_joint(devices, dtype):
    def mean(weight, encoded, predicted, *rest):
        return jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(weight), encoded, predicted, *rest)

    rows = (((devices * B, n, H), dtype, "data") for n in (T, U + 1))
    return jax.value_and_grad(mean, (0, 1, 2)), (((H, V), dtype), *rows, *_lengths(devices)), ()


tdt_loss = functools.partial(jax_rnnt.tdt_loss, durations=DURATIONS)
PROGRAMS = {
    "rnnt_loss": functools.partial(of_logits, jax_rnnt.rnnt_loss),
    "tdt_loss": functools.partial(of_logits, tdt_loss, extra=len(DURATIONS)),
    "after a matmul": of_matmul,
    "joint_rnnt_loss": of_joint,
}
# Of v5e all, of other generations the first.
CASES = [(name, jnp.float32) for name in PROGRAMS] + [(name, jnp.bfloat16) for name in ("rnnt_loss", "tdt_loss")]
TOPOLOGIES = {"tdt_loss": topology.products(DURATIONS)}  # of the others: the standard one
# Most temporaries, in units of the logits; most bytes moved; most cycles by XLA's estimate.
AIMS = {"rnnt_loss": 0.05, "tdt_loss": 0.15, "after a matmul": 1.05, "joint_rnnt_loss": 0.02}
MOST_BYTES, MOST_CYCLES, MOST_OF_A_DIAGONAL = 1.2e9, 0.4 * 13.5e6, 200  # of rnnt_loss on one v5e
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def lowered(generation, step, shapes, donated=(), devices=1):
    """A program for the first `devices` of a generation's topology. `shapes`: (shape, dtype, mesh axes) of each."""
    found = topologies.get_topology_desc(platform="tpu", topology_name=GENERATIONS[generation]).devices
    mesh = Mesh(np.array(found[:devices]), ("data",))
    arguments = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, P(*axes))) for shape, kind, *axes in shapes
    ]
    return jax.jit(step, donate_argnums=donated).lower(*arguments)


def compiled(generation, name, devices, dtype):
    return lowered(generation, *PROGRAMS[name](devices, dtype), devices).compile()


# -------------------------------------------------------------------------------------------- reading HLO and schedule

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")


def computations(text):
    """{computation: [(instruction, type, opcode, rest of the line)]}, name of the entry"""
    found, entry = {}, None
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.<>-]+) \(.*\{$", line):
            current = found.setdefault(head[2], [])
            entry = head[2] if head[1] else entry
        elif match := _INSTRUCTION.match(line):
            current.append(match.groups())
    return found, entry


def estimated_cycles(text):
    """XLA's estimate: bodies of loops as often as they run where that is a constant."""
    found, entry = computations(text)
    return _cost_in(found)(entry)


def _cost_in(found):
    def cost(name):
        total = 0
        for _, _, opcode, rest in found[name]:
            if opcode == "while":
                condition, body = (re.search(rf"{key}=%?([\w.<>-]+)", rest)[1] for key in ("condition", "body"))
                bounds = [r for _, kind, o, r in found[condition] if o == "constant" and kind.startswith("s32[]")]
                total += (int(bounds[0].split(")")[0]) if len(bounds) == 1 else 1) * cost(body)
            elif opcode == "conditional":
                branches = re.search(r"branch_computations=\{([^}]*)\}", rest)[1].split(",")
                total += max(cost(branch.strip(" %")) for branch in branches)
            elif opcode == "call":
                total += cost(re.search(r"to_apply=%?([\w.<>-]+)", rest)[1])
            elif match := re.search(r'estimated_cycles":"(\d+)"', rest):
                total += int(match[1])
        return total

    return cost


def tile_loops(text):
    """XLA's estimates for one turn of each outermost loop whose turns are data: the forward and the backward tiles."""
    found, entry = computations(text)
    cost = _cost_in(found)
    bodies = [re.search(r"body=%?([\w.<>-]+)", rest)[1] for _, _, opcode, rest in found[entry] if opcode == "while"]
    return [cost(body) for body in bodies]


def large_copies(text, elements):
    """Operations that only move at least so many elements."""
    found, _ = computations(text)
    kinds = collections.Counter()
    for body in found.values():
        for _, kind, opcode, _ in body:
            sizes = [math.prod(map(int, s.split(","))) for s in re.findall(r"\[([\d,]+)\]", kind)]
            if opcode in ("copy", "copy-start", "transpose", "concatenate") and max(sizes, default=0) >= elements:
                kinds[opcode] += 1
    return dict(kinds)


def loops(folder, kernel):
    """[(first bundle, bundles, longest chain in cycles)] of the innermost loops of a kernel's last schedule."""
    paths = folder.glob(f"*-{kernel}*-final_bundles.txt")
    (bundles,) = (path for path in paths if "schedule-analysis" not in path.name)
    starts, found = {}, []
    for line in bundles.read_text().splitlines():
        if not (at := re.match(r"\s*(0x[0-9a-f]+)\s", line)):
            continue
        address = int(at[1], 16)
        starts |= dict.fromkeys(re.findall(r"Start region (\d+)", line), address)
        back = re.search(r"sbr\.rel [^;]*target = \$region(\d+)", line)
        if back and starts.get(back[1], address) < address:
            found.append((starts[back[1]], address, back[1]))
    inner = [a for a in found if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in found)]
    analysis = sorted(folder.glob(f"*-{kernel}*-critical-path.txt"))[-1].read_text()
    chains = collections.Counter()
    for block in analysis.split("New basic block in region: ")[1:]:
        region = block.split()[0].removeprefix("region")
        chains[region] = max(chains[region], *map(int, re.findall(r"Length to end: (\d+)", block)), 0)
    return [(start, end - start + 1, chains[region]) for start, end, region in sorted(inner)]


def schedule(generation, name):
    """{"alpha" and "beta": cycles of a diagonal without and with the second exponent}, from the compiler's dump."""
    table = TOPOLOGIES.get(name, topology.STANDARD)
    unroll = pallas.Plan(table, B, T, U + 1, pallas.MOST).unroll
    folder = pathlib.Path(os.environ["JAX_RNNT_DUMP"])

    def step(*operands):
        planes, lengths = operands[:-2], operands[-2:]
        return pallas.value_and_grad(table, dict(zip(pallas.slots(table), planes)), *lengths)

    plane, length = ((B, T, U + 1), jnp.float32, "data"), ((B,), jnp.int32, "data")
    lowered(generation, step, [plane] * len(pallas.slots(table)) + [length] * 2).compile()
    steps = {}
    for kernel in ("alpha", "beta"):
        found = loops(folder, f"jax_rnnt_lattice_{kernel}")
        wide, narrow = (max(bundles, chain) for _, bundles, chain in found if bundles > 16)
        steps[kernel] = round(narrow / unroll), wide
    return steps


@functools.cache
def dumped(generation, name):
    """`schedule` in a process of its own: the dump's folder is fixed once libtpu is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        environment = os.environ | dict(LIBTPU_INIT_ARGS=flags, JAX_RNNT_DUMP=folder)
        command = [sys.executable, __file__, generation, "--schedule", name]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def vmem(text):
    """Bytes of VMEM that the kernels hold at once, at most."""
    lines = [line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line]
    found = [
        re.findall(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', x)
        for x in lines
    ]
    return max((int(size) for sizes in found for size in sizes), default=0)


# ----------------------------------------------------------------------------------------------------------- table

HEAD = """| chip | program | temporaries / logits | bytes, GB | VMEM, KB | Mcycles | alpha, beta | large arcs |
|---|---|--:|--:|--:|--:|--:|--:|"""


TILES = """| chips | rows of a tile | tiles | Mcycles of a tile, forward | backward | Mcycles of all tiles |
|--:|--:|--:|--:|--:|--:|"""


def tiles_row(generation, devices):
    """The loops of the joint network in tiles, of which XLA's estimate for a program counts one turn."""
    with skipping.chosen_sizes() as sizes:
        text = compiled(generation, "joint_rnnt_loss", devices, np.dtype(np.float32)).as_text()
    frames, columns, blocks = sizes[-1]
    tiles = -(-B * -(-T // frames) * -(-(U + 1) // columns) // blocks)  # of full lengths
    forward, backward = (cycles / 1e6 for cycles in tile_loops(text))
    rows = frames * columns * blocks
    return f"| {devices} | {rows} | {tiles} | {forward:.2f} | {backward:.2f} | {tiles * (forward + backward):.1f} |"


def row(generation, name, dtype, faults):
    executable = compiled(generation, name, 1, dtype)
    text, memory = executable.as_text(), executable.memory_analysis()
    logits = B * T * (U + 1) * V * dtype.itemsize
    temporaries = memory.temp_size_in_bytes / logits
    moved, cycles = executable.cost_analysis()["bytes accessed"], estimated_cycles(text)
    steps = dumped(generation, name if name in TOPOLOGIES else next(iter(PROGRAMS))).values()
    label = f"{generation} {name} {dtype}"
    if temporaries > AIMS[name]:
        faults.append(f"{label}: temporaries are {temporaries:.3f} of the logits, more than {AIMS[name]}")
    # Where the logits are an argument; a matmul may also copy its operands.
    if name in ("rnnt_loss", "tdt_loss") and (copies := large_copies(text, B * T * (U + 1) * V)):
        faults.append(f"{label}: logits are copied: {copies}")
    missed = moved > MOST_BYTES or cycles > MOST_CYCLES or max(narrow for narrow, _ in steps) > MOST_OF_A_DIAGONAL
    if missed and (generation, name, dtype) == ("v5e", "rnnt_loss", np.float32):
        faults.append(f"{label}: {moved:.2e} bytes, {cycles:.2e} cycles, {steps} of a diagonal")
    narrow, wide = (", ".join(map(str, each)) for each in zip(*steps))
    numbers = f"{temporaries:.3f} | {moved / 1e9:.2f} | {vmem(text) / 1e3:.0f} | {cycles / 1e6:.1f} | {narrow} | {wide}"
    return f"| {generation} | {name}, {dtype} | {numbers} |"


def check_devices(generation, name, devices, faults):
    """Only the mean, and gradients of what the devices share, are exchanged."""
    executable = compiled(generation, name, devices, np.dtype(np.float32))
    kinds = set(re.findall(rf" ({KINDS})(?:-start)?\(", executable.as_text()))
    temporaries = executable.memory_analysis().temp_size_in_bytes / (B * T * (U + 1) * V * 4)
    print(f"{generation}, {devices} chips, {name}: {sorted(kinds)}, temporaries {temporaries:.3f}", flush=True)
    if kinds - {"all-reduce"} or temporaries > AIMS[name]:
        faults.append(f"{generation}, {devices} chips, {name}: {sorted(kinds)}, temporaries {temporaries:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", nargs="*", default=list(GENERATIONS), help=", ".join(GENERATIONS))
    parser.add_argument("--check", action="store_true", help="fail where docs/tpu.md differs or an aim is missed")
    parser.add_argument("--write", action="store_true", help="write the rows into docs/tpu.md")
    parser.add_argument("--schedule", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.schedule:
        print(json.dumps(schedule(options.generations[0], options.schedule)))
        return
    docs, faults = DOCS.read_text(), []
    print(HEAD)
    for generation in options.generations:
        rows = []
        for name, dtype in CASES if generation == "v5e" else CASES[:1]:
            rows.append(row(generation, name, np.dtype(dtype), faults))
            print(rows[-1], flush=True)
        for devices in (4, 8):
            check_devices(generation, "rnnt_loss", devices, faults)
        if generation == "v5e":
            check_devices(generation, "joint_rnnt_loss", 8, faults)
            made = "\n".join([TILES, *(tiles_row(generation, devices) for devices in (1, 8))]) + "\n"
            print(made, flush=True)
            if options.check and made not in docs:
                faults.append(f"docs/tpu.md is out of date for tiles: python benchmarks/tpu.py --write {generation}")
            docs = re.sub(re.escape(TILES) + r"\n(?:\|.*\n)*", made, docs)
        block = re.compile(rf"(?:^\| {generation} \|.*\n)+", re.M)
        made = "\n".join(rows) + "\n"
        if not block.search(docs):
            docs = docs.replace(HEAD + "\n", f"{HEAD}\n| {generation} | |\n")
        if options.check and block.search(docs)[0] != made:
            faults.append(f"docs/tpu.md is out of date for {generation}: python benchmarks/tpu.py --write {generation}")
        docs = block.sub(made, docs)
    if options.write:
        DOCS.write_text(docs)
    print(*faults, sep="\n")
    sys.exit(bool(faults) and not options.write)


if __name__ == "__main__":
    main()
