"""Programs in processes of their own, which import the same package and the tests' modules."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys

import project


def environment(**variables):
    """With buffers, so that lines of two processes stay whole."""
    path = os.pathsep.join([str(project.HERE), *filter(None, sys.path)])
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
    return os.environ | settings | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"} | variables


def start(program, *arguments, **options):
    """A Python process of the program's text, its file, or the options of Python."""
    command = [str(program)] if isinstance(program, pathlib.Path) else ["-c", program]
    options = {"cwd": project.HERE, "env": environment(), "stdout": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, *command, *map(str, arguments)], stderr=subprocess.PIPE, **options)


def run(program, *arguments, timeout=300, **options):
    """Standard output of a program that must end well."""
    with start(program, *arguments, **options) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert process.returncode == 0, f"exit {process.returncode}\n{out}{error}"
    return out


# The head of a program that `pair` runs: both processes make the same batch, and each holds half of the global arrays.
PEER = """
import os, pathlib, signal, sys, threading, time
process, port, *arguments = sys.argv[1:]
process = int(process)
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_rnnt import RNNTLoss

B, V = 8, 16
mesh = Mesh(np.array(jax.devices()), ("data",))
sharded, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

def batch(seed, T, U):
    rng = np.random.default_rng(seed)
    rest = rng.integers(0, V - 1, (B, U)), rng.integers(1, T + 1, B), rng.integers(0, U + 1, B)
    return rng.normal(size=(B, T, U + 1, V)).astype(np.float32), *(x.astype(np.int32) for x in rest)

def placed(arrays):
    half = slice(process * B // 2, (process + 1) * B // 2)
    return [jax.make_array_from_process_local_data(sharded, x[half]) for x in arrays]
"""


@contextlib.contextmanager
def pair(program, *arguments, **variables):
    """Two processes of `PEER` and this program."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start(PEER + program, i, port, *arguments, env=environment(**variables)) for i in range(2)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
