"""What XLA and Mosaic make of the losses for TPUs, on a machine that has none: memory, traffic, copies, collectives,
and the cycles of a diagonal, and of a block of a joint network, in the compiler's final schedule.

    python lab/benchmarks/tpu.py          # every program for every generation: the tables of lab/tpu.md
    python lab/benchmarks/tpu.py v5e      # of these generations

`lab/run.sh tpu` installs jax[tpu] and runs it; it fails where an aim is missed. Memory, copies, collectives and
VMEM are those that would run. Time on a TPU also depends on what no compiler knows.
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

import ahead  # before JAX
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import measure
from jax_rnnt import JointLogits, LinearJoint, RNNTLoss, TDTLoss
from jax_rnnt.emissions import Softmax
from jax_rnnt.lattices import _pallas as pallas
from jax_rnnt.lattices import _topology as topology
from jax_rnnt.tiles._networks import Linear
from jax_rnnt.tiles._tile_blocks import TileInputs
from jax_rnnt.tiles._tiles import Tiled
from jax_rnnt.tiles.joint import _tpu as plans

B, T, U, V, H = 8, 256, 64, 512, 640  # B on each chip
TDT = TDTLoss(durations=(0, 1, 2, 3, 4))


# ------------------------------------------------------------------------------------------------------- programs
#
# Each is (loss and gradient, (shape, dtype, mesh axes) of its arguments, those that are donated).


def rest_of(batch, labels):
    return (((batch, *more), jnp.int32, "data") for more in ((labels,), (), ()))


def of_logits(loss, devices, dtype, extra=0):
    shapes = ((devices * B, T, U + 1, V + extra), dtype, "data"), *rest_of(devices * B, U)
    return jax.value_and_grad(loss), shapes, (0,)


def of_matmul(devices, dtype):
    def mean(weight, hidden, *rest):
        return RNNTLoss()((hidden @ weight).reshape(-1, T, U + 1, V), *rest)

    shapes = ((H, V), dtype), ((devices * B * T * (U + 1), H), dtype, "data"), *rest_of(devices * B, U)
    return jax.value_and_grad(mean, (0, 1)), shapes, ()


def of_joint(devices, dtype, classes=V):
    def mean(weight, encoder, predictor, *rest):
        return RNNTLoss()(JointLogits(LinearJoint(weight), encoder, predictor), *rest)

    rows = (((devices * B, n, H), dtype, "data") for n in (T, U + 1))
    return jax.value_and_grad(mean, (0, 1, 2)), (((H, classes), dtype), *rows, *rest_of(devices * B, U)), ()


PROGRAMS = {
    "rnnt": functools.partial(of_logits, RNNTLoss()),
    "tdt": functools.partial(of_logits, TDT, extra=len(TDT.durations)),
    "after a matmul": of_matmul,
    "joint": of_joint,
}
# Of v5e all, of other generations the first.
CASES = [(name, jnp.float32) for name in PROGRAMS] + [(name, jnp.bfloat16) for name in ("rnnt", "tdt")]
TOPOLOGIES = {"tdt": topology.products(TDT.durations)}  # of the others: the standard one
# Most temporaries, in units of the logits.
AIMS = {"rnnt": 0.05, "tdt": 0.15, "after a matmul": 1.05, "joint": 0.02}
MOST_BYTES, MOST_OF_A_DIAGONAL = 1.2e9, 200  # of rnnt on one v5e; cycles
JOINT_CLASSES, MOST_OF_PRODUCTS = (V, 8192), 2.5  # of the joint's kernels: the cycles of its products, on a v5e
# Products of bfloat16 numbers that a core adds up in a cycle.
MACS = dict.fromkeys(("v4", "v5e", "v5p"), 4 * 128**2) | dict.fromkeys(("v6e", "tpu7x"), 4 * 256**2)
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def lowered(generation, step, shapes, donated=(), devices=1):
    """A program for the first `devices` of a generation's topology."""
    mesh = ahead.mesh(generation, devices)
    arguments = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, P(*axes))) for shape, kind, *axes in shapes
    ]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # which names the chip
        return jax.jit(step, donate_argnums=donated).lower(*arguments)


def compiled(generation, name, devices, dtype):
    return lowered(generation, *PROGRAMS[name](devices, dtype), devices).compile()


# ------------------------------------------------------------------------------------------------- reading programs


def large_copies(text, elements):
    """{operation: how often} of those that only move at least so many elements."""
    kinds = collections.Counter()
    for kind, opcode in re.findall(
        r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) (copy|copy-start|transpose|concatenate)\(", text, re.M
    ):
        sizes = [math.prod(map(int, size.split(","))) for size in re.findall(r"\[([\d,]+)\]", kind)]
        kinds[opcode] += max(sizes, default=0) >= elements
    return dict(+kinds)


def nested(folder, kernel):
    """[(first bundle, bundles)] of all loops of a kernel's last schedule."""
    return [(start, end - start + 1) for start, end, _ in _loops(folder, kernel)]


def loops(folder, kernel):
    """[(first bundle, bundles, longest chain in cycles)] of the innermost loops of a kernel's last schedule."""
    found = _loops(folder, kernel)
    inner = [a for a in found if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in found)]
    analysis = sorted(folder.glob(f"*-{kernel}*-critical-path.txt"))[-1].read_text()
    chains = collections.Counter()
    for block in analysis.split("New basic block in region: ")[1:]:
        region = block.split()[0].removeprefix("region")
        chains[region] = max(chains[region], *map(int, re.findall(r"Length to end: (\d+)", block)), 0)
    return [(start, end - start + 1, chains[region]) for start, end, region in sorted(inner)]


def _loops(folder, kernel):
    """[(first bundle, last bundle, region)]"""
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
    return found


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


def joint_schedule(generation, classes):
    """{pass: cycles of a block of nodes}, {"groups": of classes, "cores": of a device}, of the joint's kernels.

    Cycles are bundles, or those of the block's products where these are more.
    """
    (device,) = ahead.mesh(generation).devices
    step, shapes, _ = of_joint(1, jnp.dtype(jnp.float32), classes)
    lowered(generation, step, shapes).compile()
    plan = joint_plan(classes, device)
    block = math.prod((plans.ROWS, H, plan.classes.lanes)) / MACS[generation]
    found = {"groups": plan.classes.groups, "cores": device.num_cores or 1}
    for name, products in (("forward", 1), ("backward", 3)):
        inner, outer = {}, 0
        for start, size in nested(pathlib.Path(os.environ["JAX_RNNT_DUMP"]), f"jax_rnnt_joint_{name}"):
            inner[start], outer = size, max(outer, size)
        # Inner loops clear or copy sums once in all, but for the longest, over chunks.
        sizes = sorted(size for size in inner.values() if size < outer)
        chunk = sizes[-1] if plan.classes.chunks > 2 else 0
        found[name] = max(outer - sum(sizes) + (plan.classes.chunks - 1) * chunk, math.ceil(products * block))
    return found


def joint_plan(classes, device):
    like = jax.ShapeDtypeStruct
    inputs = TileInputs(
        like((B, T, H), jnp.float32), like((B, U + 1, H), jnp.float32), like((B, 1, U + 1), jnp.int32),
        *(like((B,), jnp.int32),) * 2, None, (),
    )  # fmt: skip
    tiled = Tiled(Softmax((classes - 1,)), Linear(jnp.tanh), classes, jnp.dtype(jnp.float32), None, True)
    return plans.plan(tiled, [like((H, classes), jnp.float32)], inputs, (device.device_kind, device.num_cores or 1))


@functools.cache
def dumped(generation, name):
    """`schedule` in a process of its own: the dump's folder is fixed once libtpu is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        passes = "--xla_jf_dump_llo_pass_label_regex=final_bundles|critical-path"
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {passes}"
        environment = os.environ | dict(LIBTPU_INIT_ARGS=flags, JAX_RNNT_DUMP=folder)
        command = [sys.executable, __file__, generation, "--schedule", str(name)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def vmem(text):
    """Bytes of VMEM that the kernels hold at once, at most."""
    lines = (line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line)
    size = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    return max((int(found) for line in lines for found in re.findall(size, line)), default=0)


# ----------------------------------------------------------------------------------------------------------- table

JOINT_HEAD = "chip", "V", "groups", "forward", "backward", "all, M", "products, M", "ratio"
HEAD = "chip", "program", "temporaries / logits", "bytes, GB", "VMEM, KB", "alpha, beta", "large arcs"


def row(generation, name, dtype, faults):
    executable = compiled(generation, name, 1, dtype)
    text, memory = executable.as_text(), executable.memory_analysis()
    temporaries = memory.temp_size_in_bytes / (B * T * (U + 1) * V * dtype.itemsize)
    moved = executable.cost_analysis()["bytes accessed"]
    steps = dumped(generation, name if name in TOPOLOGIES else next(iter(PROGRAMS))).values()
    label = f"{generation} {name} {dtype}"
    if temporaries > AIMS[name]:
        faults.append(f"{label}: temporaries are {temporaries:.3f} of the logits, more than {AIMS[name]}")
    # Where the logits are an argument; a matmul may also copy its operands.
    if name in ("rnnt", "tdt") and (copies := large_copies(text, B * T * (U + 1) * V)):
        faults.append(f"{label}: logits are copied: {copies}")
    missed = moved > MOST_BYTES or max(narrow for narrow, _ in steps) > MOST_OF_A_DIAGONAL
    if missed and (generation, name, dtype) == ("v5e", "rnnt", np.float32):
        faults.append(f"{label}: {moved:.2e} bytes, {steps} cycles of a diagonal")
    numbers = f"{temporaries:.3f}", f"{moved / 1e9:.2f}", f"{vmem(text) / 1e3:.0f}"
    return generation, f"{name}, {dtype}", *numbers, *(", ".join(map(str, each)) for each in zip(*steps))


def joint_row(generation, classes, faults):
    found = dumped(generation, classes)
    blocks = B * -(-T // plans.FRAMES) * -(-(U + 1) // plans.COLUMNS)
    cycles = blocks * (found["forward"] + found["backward"]) * found["groups"] / found["cores"]
    products = 4 * B * T * (U + 1) * H * classes / MACS[generation] / found["cores"]
    if generation == "v5e" and cycles > MOST_OF_PRODUCTS * products:
        faults.append(f"joint, V = {classes}: {cycles:.3g} cycles, {cycles / products:.2f} times those of its products")
    numbers = (f"{x / 1e6:.2f}" for x in (cycles, products))
    of_block = (f"{found[name]:.0f}" for name in ("forward", "backward"))
    return generation, str(classes), str(found["groups"]), *of_block, *numbers, f"{cycles / products:.2f}"


def check_devices(generation, name, devices, faults):
    """Only the mean, and gradients of what the devices share, are exchanged."""
    executable = compiled(generation, name, devices, np.dtype(np.float32))
    kinds = set(re.findall(rf" ({KINDS})(?:-start)?\(", executable.as_text()))
    temporaries = executable.memory_analysis().temp_size_in_bytes / (B * T * (U + 1) * V * 4)
    text = f"{generation}, {devices} chips, {name}: {sorted(kinds)}, temporaries {temporaries:.3f}"
    print(text, flush=True)
    if kinds - {"all-reduce"} or temporaries > AIMS[name]:
        faults.append(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", nargs="*", default=list(ahead.TPUS), help=", ".join(ahead.TPUS))
    parser.add_argument("--schedule", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.schedule:
        generation, name = *options.generations, options.schedule
        print(json.dumps(joint_schedule(generation, int(name)) if name.isdigit() else schedule(generation, name)))
        return
    rows, joints, faults = [], [], []
    for generation in options.generations:
        for name, dtype in CASES if generation == "v5e" else CASES[:1]:
            rows.append(row(generation, name, np.dtype(dtype), faults))
        joints += [joint_row(generation, classes, faults) for classes in JOINT_CLASSES]
        for devices in (4, 8):
            check_devices(generation, "rnnt", devices, faults)
    if "v5e" in options.generations:
        check_devices("v5e", "joint", 8, faults)
    measure.table(HEAD, rows)
    measure.table(JOINT_HEAD, joints)
    print(*faults, sep="\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
