"""A model of the kernels' performance from their own machine code. Needs nvcc and nvdisasm, no GPU.

    python tools/model/cuda_model.py [--check] [--write]
    python tools/model/cuda_model.py emission --classes 500 --dtypes bfloat16 --profile backward
    python tools/model/cuda_model.py lattice --lattices 'standard, U = 127' --profile 'Sweep<float, 2, 1>'

Compiles the kernels for sm_90, runs their machine code on real inputs (interpreter.py) and counts what ran. The
launches are those of the host code itself, linked with a runtime that launches nothing (host.cc). docs/cuda.md explains
the tables and states the assumptions. --check fails if the tables there are out of date; --write
writes them. --profile prints, for every instruction, how often it ran and how long warps waited before it.
"""

import argparse
import collections
import concurrent.futures
import ctypes
import itertools
import multiprocessing
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/support"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))
import interpreter
import operations
import sass
from cases import GPU_LARGE
from cycles import RATES, chain, cycles, floor, memory_cycles, pipe
from resources import OPTIONS, ROOT, SOURCES, kernel_name

# ----------------------------------------------------------------------------------------------- the kernels, launched

Launch = collections.namedtuple("Launch", "kernel grid block shared parameters")


class Kernels:
    """The kernels' host code and machine code. `launches` lists the launches of the last call."""

    def __init__(self, root=ROOT, flags=(), folder=None, sources=SOURCES):
        """`folder` keeps what was compiled, for the next call with the same sources and flags."""
        nvcc, nvdisasm = shutil.which("nvcc"), sass.find_nvdisasm()
        if nvcc is None:
            raise FileNotFoundError("no nvcc on the path")
        if nvdisasm is None:
            raise FileNotFoundError(sass.INSTALL)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(folder or name).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            headers = [*root.glob("xla_kernels/*/*.h"), *root.glob("xla_kernels/*/*.cuh")]

            def compile_source(source):
                code = ["-gencode=arch=compute_90,code=sm_90", "--keep", f"--keep-dir={folder}"]
                path, out = root / f"xla_kernels/cuda/{source}.cu", folder / f"{source}.o"
                if source == "host":
                    code, path = [], pathlib.Path(__file__).with_name("host.cc")
                if out.exists() and out.stat().st_mtime > max(p.stat().st_mtime for p in (path, *headers)):
                    return
                options = [f"-I{root}", *OPTIONS, *flags, *code, "-Xcompiler", "-fPIC"]
                command = [nvcc, *options, "-c", path, "-o", out]
                if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
                    raise RuntimeError(done.stderr)

            names = ["host", *SOURCES]
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                list(pool.map(compile_source, names))
            library = pathlib.Path(name) / "model.so"
            subprocess.run(["g++", "-shared", "-o", library, *(folder / f"{n}.o" for n in names)], check=True)
            self.kernels = {}
            for source in sources:
                self.kernels.update(sass.load(folder / f"{source}.cubin", nvdisasm, kernel_name))
            try:
                self.library = ctypes.CDLL(str(library))
            except OSError as error:
                raise RuntimeError(f"the host code calls what host.cc does not define: {error}") from error
        self.launches = []
        self._listener = ctypes.CFUNCTYPE(
            None,
            ctypes.c_char_p,
            ctypes.POINTER(ctypes.c_uint),
            ctypes.POINTER(ctypes.c_uint),
            ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_void_p),
        )(self._launched)
        self.library.model_listen(self._listener)
        self.library.model_lattice.restype = ctypes.c_int64

    def _launched(self, name, grid, block, shared, arguments):
        kernel = self.kernels[name.decode()]
        values = [ctypes.string_at(arguments[i], size) for i, (_, size) in enumerate(kernel.parameters)]
        self.launches.append(Launch(kernel, tuple(grid[:3]), tuple(block[:3]), shared, values))

    def call(self, function, *arguments, value=False):
        """The launches that the host code makes, or the value that it returns. Arrays are passed as pointers."""
        self.launches = []
        pointers = [a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in arguments]
        result = getattr(self.library, function)(*pointers)
        if value:
            return result
        if result:
            raise RuntimeError(f"{function}: CUDA error {result}")
        return self.launches


def run_block(launch, memory, index):
    kernel, grid, block, shared, parameters = launch
    return interpreter.Block(kernel, grid, block, shared, parameters, memory, index).run()


# ------------------------------------------------------------------------------------------------------------- machine

# H200: the bandwidth of a copy, 4.3 TB/s, in bytes a cycle of one of 132 multiprocessors at 1.98 GHz.
COPY = 16.45
WARPS, REGISTERS, SHARED, BLOCKS = 64, 65536, 228 << 10, 32  # of a multiprocessor
LOADED = 800  # cycles from a load to its result when memory is busy


def resident(launch):
    """Blocks of a launch that a multiprocessor holds."""
    warps = -(-launch.block[0] * launch.block[1] * launch.block[2] // 32)
    by_registers = REGISTERS // (warps * -(-launch.kernel.registers * 32 // 256) * 256)
    by_shared = SHARED // (launch.kernel.shared + launch.shared)  # with the KiB of the system
    return min(WARPS // warps, by_registers, by_shared, BLOCKS)


# ------------------------------------------------------------------------------------------------------------ emission

CASES = {case.V: case.shape[:3] for case in sorted(GPU_LARGE, key=lambda case: case.V)}  # V: B, T, U + 1
DTYPES = {"float16": (0, np.uint16), "bfloat16": (1, np.uint16), "float32": (2, np.float32)}
# Of all rows: their number, bytes moved, instructions by pipe, cycles of the memory pipe by either rule. Of a
# multiprocessor: most bytes of loads in flight, and bytes moved a cycle if blocks do not slow each other down, by the
# slower rule.
Emission = collections.namedtuple("Emission", "kernel rows bytes counts memory tags flight alone")


def narrow(values, dtype):
    if dtype == "float32":
        return values.astype(np.float32)
    return operations.to_half(values.astype(np.float64), dtype == "bfloat16").astype(np.uint16)


def widen(values, dtype):
    if dtype == "float32":
        return values.astype(np.float64)
    return operations.from_half(values.astype(np.uint32), dtype == "bfloat16").astype(np.float64)


class EmissionProblem:
    """Inputs and results of the emission at a benchmark's shape. Only the first `rows` rows have values. `shift` is
    added to all logits."""

    def __init__(self, V, dtype, offset=0, rows=256, seed=0, case=None, shift=0):
        self.memory, self.dtype = interpreter.Memory(), dtype
        self.V, (self.B, self.T, self.U1) = V, case or CASES[V]
        self.code, kind = DTYPES[dtype]
        random = np.random.default_rng(seed)
        nodes = self.B * self.T * self.U1
        self.rows = min(rows, nodes)
        self.sizes = np.array([self.B, self.T, self.U1, V], np.int64)
        self.logits = self.memory.zeros((nodes, V), kind, offset)
        self.logits[: self.rows] = narrow(shift + 3 * random.normal(size=(self.rows, V)), dtype)
        self.x = widen(self.logits[: self.rows], dtype)
        label = random.integers(0, V - 1, (self.B, self.U1)).astype(np.int32)
        label[:, -1] = -1
        self.label = self.memory.array(label)
        self.num_frames = self.memory.array(np.full(self.B, self.T, np.int32))
        self.blank_plane, self.label_plane, self.norm = (self.memory.zeros(nodes) for _ in range(3))
        self.row_label = label[0, np.arange(self.rows) % self.U1]
        assert self.rows <= self.T * self.U1

    def lse(self):
        top = self.x.max(1)
        return top + np.log(np.exp(self.x - top[:, None]).sum(1))

    def forward(self, kernels):
        (launch,) = kernels.call(
            "model_emission_forward", self.code, self.sizes, self.logits, self.label, self.num_frames,
            self.blank_plane, self.label_plane, self.norm,
        )  # fmt: skip
        return launch

    def backward(self, kernels):
        # norm as common/shape.h defines it, and cotangents as a loss gives them
        n, random = self.rows, np.random.default_rng(1)
        self.norm[:n] = np.exp(self.x - self.x[:, -1:]).sum(1) * 2.0**-124
        self.blank_plane[:n], self.label_plane[:n] = -random.random((2, n))
        self.label_plane[:n][self.row_label < 0] = 0
        self.scale, self.clamp = self.memory.array(np.full(self.B, 0.5, np.float32)), self.memory.zeros(self.B)
        (launch,) = kernels.call(
            "model_emission_backward", self.code, self.sizes, self.logits, self.label, self.num_frames, self.norm,
            self.blank_plane, self.label_plane, self.scale, self.clamp, self.logits,
        )  # fmt: skip
        return launch

    def gradient(self):
        """float64: what the backward pass must write."""
        n = np.arange(self.rows)
        ct = self.blank_plane[n].astype(np.float64) + self.label_plane[n]
        dx = -np.exp(self.x - self.lse()[:, None]) * ct[:, None]
        dx[:, -1] += self.blank_plane[n]
        used = self.row_label >= 0
        dx[n[used], self.row_label[used]] += self.label_plane[n][used]
        return 0.5 * dx


def written_rows(blocks, array):
    """Rows of an array that the blocks have stored to."""
    start, step, end = array.ctypes.data, array.strides[0], array.ctypes.data + array.nbytes
    rows = set()
    for block in blocks:
        for addresses, _ in block.stored:
            mine = addresses[(addresses >= start) & (addresses < end)]
            rows.update(((mine - np.uint64(start)) // np.uint64(step)).tolist())
    return sorted(rows)


def emission(kernels, V, dtype, backward, aligned, at_least=16):
    """Runs blocks until they have done so many rows, and models them."""
    problem = EmissionProblem(V, dtype, 0 if aligned else 1)
    launch = problem.backward(kernels) if backward else problem.forward(kernels)
    blocks, rows = [], []
    while len(rows) < at_least:
        blocks.append(run_block(launch, problem.memory, (len(blocks), 0, 0)))
        rows = written_rows(blocks, problem.logits if backward else problem.norm)
    assert max(rows) < problem.rows
    size = 2 if dtype != "float32" else 4
    counts, memory, tags = collections.Counter(), 0, 0
    for block in blocks:
        for warp in block.warps:
            for x, detail in warp.trace:
                counts[pipe(x)] += 1
                memory += memory_cycles(x, detail)
                tags += memory_cycles(x, detail, tags=True)
    moved = V * size * (2 if backward else 1) + 12  # and three planes
    first = blocks[0]
    ends, loads = cycles([[[w.trace for w in first.warps]]], LOADED, tags=True)
    held = resident(launch)
    events = sorted([(a, n) for a, _, n in loads] + [(b, -n) for _, b, n in loads])
    flight = max(itertools.accumulate(n for _, n in events)) * held
    alone = held * moved * len(written_rows([first], problem.logits if backward else problem.norm)) / ends[0][2]
    return Emission(launch.kernel.name, len(rows), moved * len(rows), counts, memory, tags, flight, alone)


def ceiling(e, rate, tags=False):
    """Share of the copy bandwidth if a multiprocessor issues so many instructions a cycle. `tags`: the rule of the
    memory pipe, as in cycles.py."""
    clocks = [sum(e.counts.values()) / rate, (e.tags if tags else e.memory) / RATES["memory"]]
    clocks += [n / RATES[pipe] for pipe, n in e.counts.items() if pipe != "memory"]
    return e.bytes / max(clocks) / COPY


# ------------------------------------------------------------------------------------------------------------- lattice

STANDARD = np.array([[1, 0], [0, 1], [1, 1], [0, 1], [-1, -1]])  # rows: dt, du, may_end, plane, other
MONOTONIC = np.array([[1, 1], [0, 1], [1, 1], [0, 1], [-1, -1]])


def token_and_duration(durations):
    """Arcs of token-and-duration: blanks of every duration above 0, labels of every duration."""
    arcs = [(d, 0, 1, 0, 2 + i) for i, d in enumerate(durations) if d > 0]
    arcs += [(d, 1, int(d > 0), 1, 2 + i) for i, d in enumerate(durations)]
    return np.array(arcs).T


def multi_blank(durations):
    """Arcs of a label, and of a blank of every duration."""
    return np.array([(0, 1, 1, 0, -1), *((d, 0, 1, 1 + i, -1) for i, d in enumerate(durations))]).T


class LatticeProblem:
    """A lattice of one sequence at full length."""

    def __init__(self, table, T, U, seed=0, shift=0):
        self.memory, random = interpreter.Memory(), np.random.default_rng(seed)
        self.table, self.T, self.U1 = np.ascontiguousarray(table, np.int64), T, U + 1
        n = int(max(table[3].max(), table[4].max())) + 1
        planes = shift - 1 - 3 * np.abs(random.normal(size=(n, T, U + 1)))
        self.planes = [self.memory.array(p.astype(np.float32)) for p in planes]
        self.gradients = [self.memory.zeros((T, U + 1)) for _ in range(n)]
        self.lengths = [self.memory.array(np.array([k], np.int32)) for k in (T, U)]
        self.loss = self.memory.zeros(1)

    def launches(self, kernels):
        pointers = [np.array([a.ctypes.data for a in arrays], np.uint64) for arrays in (self.planes, self.gradients)]
        sizes = np.array([1, self.T, self.U1, self.table.shape[1], len(self.planes)], np.int64)
        arguments = [sizes, self.table, pointers[0], *self.lengths, self.loss, pointers[1]]
        size = kernels.call("model_lattice", *arguments, None, value=True)
        return kernels.call("model_lattice", *arguments, self.memory.zeros(size))

    def run(self, kernels):
        """Runs all launches. Returns {(kernel, block): cycles of the block, of two of them side by side, floor and
        chain of its instructions} of the sweeps."""
        found = {}
        for launch in self.launches(kernels):
            for index in np.ndindex(launch.grid):
                block = run_block(launch, self.memory, index)
                if "Sweep" in launch.kernel.name:
                    traces = [w.trace for w in block.warps]
                    one, two = (max(end for *_, end in cycles([[traces]] * n)[0]) for n in (1, 2))
                    found[launch.kernel.name, index[0]] = np.array([one, two, floor(traces), chain(traces)])
        return found

    def truth(self):
        """float64: loss and, of every plane, minus the sum of its arcs' posteriors."""
        T, U1 = self.T, self.U1
        alpha, beta = np.full((T + 1, U1), -np.inf), np.full((T + 1, U1), -np.inf)
        alpha[0, 0] = beta[T, U1 - 1] = 0
        planes = [p.astype(np.float64) for p in self.planes]
        arcs = [(dt, du, end, planes[p] + (planes[o] if o >= 0 else 0), (p, o)) for dt, du, end, p, o in self.table.T]

        def to(t, u, dt, du, end):
            t, u = t + dt, u + du
            return (t, u) if u < U1 and (t < T or (t == T and u == U1 - 1 and end)) else None

        nodes = [(t, u) for t in range(T) for u in range(U1)]
        for t, u in nodes:
            for dt, du, end, x, _ in arcs:
                if node := to(t, u, dt, du, end):
                    alpha[node] = np.logaddexp(alpha[node], alpha[t, u] + x[t, u])
        gradients = [np.zeros((T, U1)) for _ in planes]
        for t, u in reversed(nodes):
            for dt, du, end, x, _ in arcs:
                if node := to(t, u, dt, du, end):
                    beta[t, u] = np.logaddexp(beta[t, u], beta[node] + x[t, u])
        for t, u in nodes:
            for dt, du, end, x, which in arcs:
                if node := to(t, u, dt, du, end):
                    for p in which:
                        if p >= 0:
                            gradients[p][t, u] -= np.exp(alpha[t, u] + x[t, u] + beta[node] - beta[0, 0])
        return -beta[0, 0], gradients


def diagonal_cycles(kernels, table, U, frames):
    """{(kernel, block): cycles a diagonal, of one and of two blocks, floor, chain, and the cycles of a block beside its
    diagonals}, from the cycles at two numbers of frames. A sweep takes half of the diagonals; a sweep of skipping arcs
    takes all."""
    few, many = (LatticeProblem(table, T, U).run(kernels) for T in frames)
    found = {}
    for key in few:
        share = 1 if key[0].startswith("Skip") else 2
        slope = (many[key] - few[key]) * share / (frames[1] - frames[0])
        found[key] = *slope, few[key][0] - slope[0] * (frames[0] + U) / share
    return found


LATTICES = {  # arcs, U, and two numbers of frames
    "standard, U = 127": (STANDARD, 127, (64, 128)),
    "standard, U = 128": (STANDARD, 128, (64, 128)),
    "standard, U = 255": (STANDARD, 255, (64, 128)),
    "standard, U = 256": (STANDARD, 256, (64, 128)),
    "token and duration, 5 durations, U = 63": (token_and_duration(range(5)), 63, (32, 64)),
    "multi-blank, 5 durations, U = 63": (multi_blank(range(1, 6)), 63, (32, 64)),
}

# -------------------------------------------------------------------------------------------------------------- tables

# Aims. Emission: share of the copy bandwidth at 4 instructions a cycle, for V = 32 and above; at 2.7, by either rule of
# the memory pipe, for whole cache lines; bytes in flight.
SHARES = {"float32": (1.0, 1.5), "bfloat16": (1.0, 1.2), "float16": (1.0, 1.2)}
ISSUED = 1.0
FLIGHT = 32 << 10
# Lattice: most cycles a diagonal at U = 127 and 128; how many times as many at U = 255, and with arcs that skip frames.
DIAGONAL, WIDE, SKIPPING = 120, 1.3, 2.5
AIMS = {"127": 1, "128": 1, "255": WIDE, "durations": SKIPPING}

HEADS = {
    "emission": "| emission ({version}) | V | instructions a row | an element | ALU | FMA | IMAD | XU | memory "
    "| KiB in flight | at 4 | at 2.7 | a line a cycle | alone |\n|---|" + "--:|" * 13,
    "lattice": "| lattice ({version}) | kernel | alpha, cycles a diagonal | beta | two blocks | floor | chain "
    "| fixed |\n|---|---|--:|--:|--:|--:|--:|--:|",
}


def emission_row(kernels, V, dtype, backward, aligned):
    """A row of the table, and what it misses."""
    e = emission(kernels, V, dtype, backward, aligned)
    n = sum(e.counts.values()) / e.rows
    pipes = " | ".join(f"{e.counts[p] / e.rows:.0f}" for p in ("ALU", "FMA", "IMAD", "XU", "memory"))
    name = f"`{e.kernel}`{'' if aligned else ', shifted'}"
    by_lines = ceiling(e, 2.7, tags=True)
    shares = f"{ceiling(e, 4):.0%} | {ceiling(e, 2.7):.0%} | {by_lines:.0%} | {e.alone / COPY:.0%}"
    missed = []
    if ceiling(e, 4) < (aim := SHARES[dtype][V > 32]):
        missed.append(
            f"{name}, V = {V}: {ceiling(e, 4):.0%} of the copy bandwidth at 4 instructions a cycle, below {aim:.0%}"
        )
    if aligned and by_lines < ISSUED:
        missed.append(f"{name}, V = {V}: {by_lines:.0%} at 2.7 instructions and a line a cycle, below {ISSUED:.0%}")
    if e.flight < FLIGHT:
        missed.append(f"{name}, V = {V}: {e.flight / 1024:.0f} KiB in flight, below {FLIGHT >> 10}")
    return f"| {name} | {V} | {n:.0f} | {n / V:.2f} | {pipes} | {e.flight / 1024:.0f} | {shares} |", missed


def lattice_row(kernels, name):
    """Rows of the table, and {kernel: cycles a diagonal, the slower direction}."""
    found = {}
    for (kernel, block), value in diagonal_cycles(kernels, *LATTICES[name]).items():
        found.setdefault(kernel, {})["alpha" if (block == 0) != kernel.startswith("Skip") else "beta"] = value

    def bound(v, i):
        return f"{max(x[i] for x in v.values()):.0f}"

    rows = [
        f"| {name} | `{k}` | {v['alpha'][0]:.0f} | {v['beta'][0]:.0f} | "
        + " | ".join(bound(v, i) for i in range(1, 5))
        + " |"
        for k, v in found.items()
    ]
    return "\n".join(rows), {k: max(x[0] for x in v.values()) for k, v in found.items()}


def lattice_faults(found):
    """What the lattices miss. `found`: {lattice: {kernel: cycles a diagonal}}."""
    faults = []
    for name, kernels in found.items():
        for kernel, value in kernels.items():
            limit = next((DIAGONAL * times for word, times in AIMS.items() if word in name), np.inf)
            if value > limit:
                faults.append(f"{name}, `{kernel}`: {value:.0f} cycles a diagonal, above {limit:.0f}")
    return faults


def work(task):
    part, *arguments = task
    return {"emission": emission_row, "lattice": lattice_row}[part](KERNELS, *arguments)


def tables(tasks, version):
    """Runs the tasks on two processes. Returns {part: table} and what misses an aim."""
    lines, missed, lattices = {}, [], {}
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for (part, *arguments), (row, result) in zip(tasks, pool.imap(work, tasks)):
            if part not in lines:
                lines[part] = [HEADS[part].format(version=version)]
                print(f"\n{lines[part][0]}")
            print(row, flush=True)
            lines[part].append(row)
            if part == "emission":
                missed += result
            else:
                lattices[arguments[0]] = result
    return {part: "\n".join(rows) for part, rows in lines.items()}, missed + lattice_faults(lattices)


def profile(kernels, V, dtype, backward):
    """Prints how often each instruction of an emission kernel ran, a row."""
    problem = EmissionProblem(V, dtype)
    launch = problem.backward(kernels) if backward else problem.forward(kernels)
    block = run_block(launch, problem.memory, (0, 0, 0))
    rows = len(written_rows([block], problem.logits if backward else problem.norm))
    print_profile(launch, [block], rows, "row")


def profile_lattice(kernels, table, T, U, only=""):
    """Prints how often each instruction of the sweeps ran, and how long warps waited before it, a diagonal."""
    problem = LatticeProblem(table, T, U)
    for launch in problem.launches(kernels):
        for index in np.ndindex(launch.grid):
            block = run_block(launch, problem.memory, index)
            if "Sweep" in launch.kernel.name and only in f"{launch.kernel.name} {index[0]}":
                print(index)
                print_profile(launch, [block], T + U, "diagonal of the lattice")


def print_profile(launch, blocks, share, unit):
    counts = collections.Counter(x.number for b in blocks for w in b.warps for x, _ in w.trace)
    waits = collections.Counter()
    ends, _ = cycles([[[w.trace for w in b.warps] for b in blocks]], waits=waits)
    total = sum(counts.values())
    print(f"{launch.kernel.name}: {total / share:.1f} instructions, {ends[-1][2] / share:.1f} cycles a {unit}")
    for x in launch.kernel.code:
        if n := counts[x.number]:
            control = f"stall {x.stall:2} wait {x.wait:06b} write {x.write} read {x.read}"
            print(f"{16 * x.number:5x} {n / share:8.2f} waits {waits[x.number] / n:6.1f}  {control}  {x.text}")


def main():
    global KERNELS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["emission", "lattice"], help="emission, lattice")
    parser.add_argument("--root", default=ROOT, type=pathlib.Path, help="a checkout whose kernels are modelled")
    parser.add_argument("--classes", nargs="+", type=int, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES))
    parser.add_argument("--lattices", nargs="+", default=list(LATTICES), choices=list(LATTICES))
    parser.add_argument("--build", help="a folder that keeps what was compiled")
    parser.add_argument("--flags", default="", help="more options for nvcc: -DJAX_RNNT_...=...")
    parser.add_argument("--profile", help="forward, backward, or a kernel of the lattice")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    try:
        KERNELS = Kernels(options.root, options.flags.split(), options.build)
    except FileNotFoundError as error:
        if not options.check:
            sys.exit(f"cuda-model: {error}")
        print(f"cuda-model: left out, {error}")
        return
    if options.profile and "lattice" in options.parts:
        for name in options.lattices:
            table, U, frames = LATTICES[name]
            profile_lattice(KERNELS, table, frames[0], U, options.profile)
    if options.profile and "emission" in options.parts:
        for V, dtype in itertools.product(options.classes, options.dtypes):
            profile(KERNELS, V, dtype, options.profile == "backward")
    if options.profile:
        return
    tasks = []
    if "emission" in options.parts:
        every = itertools.product((False, True), options.dtypes, options.classes, (True, False))
        tasks += [("emission", V, dtype, backward, aligned) for backward, dtype, V, aligned in every]
    if "lattice" in options.parts:
        tasks += [("lattice", name) for name in options.lattices]
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    found, missed = tables(tasks, f"nvcc {re.search(r'release ([0-9.]+)', release)[1]}")

    path = options.root / "docs/cuda.md"
    document = path.read_text()
    whole = (options.classes, options.dtypes, options.lattices) == (
        list(CASES),
        ["float32", "bfloat16"],
        list(LATTICES),
    )
    faults = []
    for table in found.values() if whole else ():
        head = table.partition(" (nvcc")[0]
        old = re.search(rf"^{re.escape(head)} \(nvcc.*\n(\|.*\n)+", document, re.MULTILINE)
        if options.write and old:
            document = document.replace(old[0], table + "\n")
        elif old is None or (old[0].splitlines()[0] == table.splitlines()[0] and old[0] != table + "\n"):
            faults.append(f"the table of the {head[2:]} in docs/cuda.md is out of date: make cuda-model ARGS=--write")
    if options.write and whole:
        path.write_text(document)
    print("\n" + "\n".join(missed or ["every aim is met"]))
    print(*faults, sep="\n")
    if options.check and faults:
        sys.exit(1)


if __name__ == "__main__":
    main()
