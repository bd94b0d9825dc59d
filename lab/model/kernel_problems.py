"""The CUDA kernels of this tree for lab/model: compiled for sm_90, launched as their host code launches them, and the
problems they run on, with truth in float64. Needs nvcc and nvdisasm, no GPU."""

import collections
import concurrent.futures
import ctypes
import pathlib
import shutil
import subprocess
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/support"))
import interpreter
import sass
from floats import from_half, to_half
from resources import OPTIONS, ROOT, SOURCES, kernel_name

import reference_numpy as reference

Launch = collections.namedtuple("Launch", "kernel grid block shared parameters")


class Kernels:
    """The kernels' host code and machine code. `launches` lists the launches of the last call."""

    def __init__(self):
        nvcc, nvdisasm = shutil.which("nvcc"), sass.find_nvdisasm()
        if nvcc is None:
            raise FileNotFoundError("no nvcc on the path")
        if nvdisasm is None:
            raise FileNotFoundError(sass.INSTALL)
        with tempfile.TemporaryDirectory() as name:
            folder, host = pathlib.Path(name).resolve(), pathlib.Path(__file__).with_name("host.cc")
            device = ["-gencode=arch=compute_90,code=sm_90", "--keep", f"--keep-dir={folder}"]

            def compile_source(path, options):
                out = folder / f"{path.stem}.o"
                command = [nvcc, *OPTIONS, *options, "-Xcompiler", "-fPIC", "-c", path, "-o", out]
                if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
                    raise RuntimeError(done.stderr)
                return out

            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                jobs = [pool.submit(compile_source, ROOT / f"xla_kernels/cuda/{s}.cu", device) for s in SOURCES]
                jobs.append(pool.submit(compile_source, host, []))
                objects = [job.result() for job in jobs]
            library = folder / "model.so"
            subprocess.run(["g++", "-shared", "-o", library, *objects], check=True)
            self.kernels = {}
            for source in SOURCES:
                self.kernels.update(sass.load(folder / f"{source}.cubin", nvdisasm, kernel_name))
            try:
                self.library = ctypes.CDLL(str(library))
            except OSError as error:
                raise RuntimeError(f"the host code calls what host.cc does not define: {error}") from error
        self.launches = []
        sizes, pointers = ctypes.POINTER(ctypes.c_uint), ctypes.POINTER(ctypes.c_void_p)
        listener = ctypes.CFUNCTYPE(None, ctypes.c_char_p, sizes, sizes, ctypes.c_size_t, pointers)
        self._listener = listener(self._launched)
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


# ---- emission

# V: B, T, U + 1; 500 stands for LibriSpeech
CASES = {32: (64, 1000, 201), 129: (32, 1500, 301), 500: (30, 400, 81), 1024: (16, 300, 61), 4096: (8, 250, 51)}
DTYPES = {"float16": (0, np.uint16), "bfloat16": (1, np.uint16), "float32": (2, np.float32)}


def narrow(values, dtype):
    if dtype == "float32":
        return values.astype(np.float32)
    return to_half(values.astype(np.float64), dtype == "bfloat16").astype(np.uint16)


def widen(values, dtype):
    if dtype == "float32":
        return values.astype(np.float64)
    return from_half(values.astype(np.uint32), dtype == "bfloat16").astype(np.float64)


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
        self.log_probs = reference.log_softmax(self.x)
        label = random.integers(0, V - 1, (self.B, self.U1)).astype(np.int32)
        label[:, -1] = -1
        self.label = self.memory.array(label)
        self.num_frames = self.memory.array(np.full(self.B, self.T, np.int32))
        self.blank_plane, self.label_plane, self.norm = (self.memory.zeros(nodes) for _ in range(3))
        self.row_label = label[0, np.arange(self.rows) % self.U1]
        assert self.rows <= self.T * self.U1

    def launch(self, kernels, *more):
        inputs = self.code, self.sizes, self.logits, self.label, self.num_frames
        name = "model_emission_backward" if more else "model_emission_forward"
        (launch,) = kernels.call(name, *inputs, self.blank_plane, self.label_plane, self.norm, *more)
        return launch

    def true_norm(self):
        """As common/shape.h defines it."""
        return np.exp(-self.log_probs[:, -1]) * 2.0**-124

    def forward(self, kernels):
        return self.launch(kernels)

    def backward(self, kernels):
        n, random = self.rows, np.random.default_rng(1)
        self.norm[:n] = self.true_norm()  # and cotangents as a loss gives them
        self.blank_plane[:n], self.label_plane[:n] = -random.random((2, n))
        self.label_plane[:n][self.row_label < 0] = 0
        self.scale, self.clamp = self.memory.array(np.full(self.B, 0.5, np.float32)), self.memory.zeros(self.B)
        return self.launch(kernels, self.scale, self.clamp)

    def gradient(self):
        """float64: what the backward pass must write."""
        n = np.arange(self.rows)
        ct = self.blank_plane[n].astype(np.float64) + self.label_plane[n]
        dx = -np.exp(self.log_probs) * ct[:, None]
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


# ---- lattice

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
        """Runs all launches. Yields (kernel, index, block) of each block."""
        for launch in self.launches(kernels):
            for index in np.ndindex(launch.grid):
                yield launch.kernel.name, index, run_block(launch, self.memory, index)

    def truth(self):
        """float64: loss and, of every plane, minus the sum of its arcs' posteriors."""
        arcs = [reference.Arc(str(k), dt, du, bool(end)) for k, (dt, du, end, *_) in enumerate(self.table.T)]
        parts = [[p for p in which if p >= 0] for which in self.table[3:].T]
        scores = {str(k): sum(self.planes[p].astype(np.float64) for p in which) for k, which in enumerate(parts)}
        value, posteriors = reference.posteriors(arcs, scores, self.T, self.U1 - 1)
        gradients = [np.zeros((self.T, self.U1)) for _ in self.planes]
        for k, which in enumerate(parts):
            for p in which:
                gradients[p] -= posteriors[str(k)]
        return -value, gradients
