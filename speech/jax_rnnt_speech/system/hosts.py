"""Devices, and several processes that train together, on one host or many, each with its own devices."""

import contextlib
import ctypes
import hashlib
import json
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from jax_rnnt_speech.system import UserError, refuse_if

ONE_HEAP = -8  # value of M_ARENA_MAX in malloc.h
DIED = "another process has ended or is out of reach; start all again with --resume"
# Where another process dies, C++ aborts this one: JAX's client, or Gloo within a collective. No Python runs in it then,
# so the advice must come from yet another process, which reads what C++ writes. It passes that on, without the stack,
# and writes the advice last. It ignores signals, which schedulers send to all processes of a job, and ends when nobody
# is left who could write to it.
RELAY = """
import re, signal, sys
for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
    signal.signal(number, signal.SIG_IGN)
fatal = False
for line in sys.stdin.buffer:
    fatal = fatal or re.search(rb"JAX distributed service detected fatal errors|terminat.*gloo::", line)
    if not fatal:
        sys.stderr.buffer.write(line)
        sys.stderr.flush()
if fatal:
    print(sys.argv[1], file=sys.stderr)
"""


RELAYS = []


def relay(words):
    """Starts a `RELAY` that reads what C++ writes to the standard error, and may write these words last.

    Python goes on writing to the standard error itself, which may be a terminal with a bar.
    """
    try:
        own = os.dup(sys.stderr.fileno())
    except (OSError, ValueError):  # it is closed
        return
    command = [sys.executable, "-S", "-c", RELAY, words]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    RELAYS.append(child)  # its end is not waited for
    sys.stderr = os.fdopen(own, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace")
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()


def died():
    """Returns the last line of a process that another one has left alone."""
    return f"process {jax.process_index()}: " * bool(jax.process_index()) + f"rnnt-speech: {DIED}"


def join(platform, count, coordinator=None, processes=None, process=None, heartbeat=60):
    """Waits for the other processes. Errors and warnings of all but the first then begin with their number."""
    numbers = processes, process
    if coordinator in (None, "auto"):
        refuse_if(numbers != (None, None), "--processes and --process need --coordinator HOST:PORT")
    elif None in numbers or process >= processes:
        raise UserError(f"--coordinator {coordinator} needs --processes N and --process I, with I from 0 to N - 1")
    if coordinator:
        if process:
            wait_for(coordinator, heartbeat)
        address = {"coordinator_address": coordinator, "num_processes": processes, "process_id": process}
        more = {"initialization_timeout": max(60, heartbeat), "heartbeat_timeout_seconds": heartbeat}
        try:
            jax.distributed.initialize(**(address if coordinator != "auto" else {}), **more)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"--coordinator {coordinator}: {str(error).splitlines()[0]}") from None
    devices(platform, count)
    if jax.process_count() > 1:
        relay(died())
    if jax.process_index():
        sys.stderr = Numbered(sys.stderr, f"process {jax.process_index()}: ")


class Numbered:
    """A stream whose lines begin with these words."""

    def __init__(self, stream, words):
        self.stream, self.words, self.begins = stream, words, True

    def write(self, text):
        for line in text.splitlines(keepends=True):
            self.stream.write(self.words * self.begins + line)
            self.begins = line.endswith("\n")
        return len(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def say(line):
    """Prints what all processes know, in the first one alone; above a bar, if there is one."""
    if not jax.process_index():
        tqdm.write(line)


def devices(platform, count):
    """Returns `count` devices of each process, or all. A CPU poses as `count` or 2, unless XLA_FLAGS splits it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc alone has it; elsewhere nothing is needed
        ctypes.CDLL(None).mallopt(ONE_HEAP, 1)  # memory that compilers free can then be used by steps, in any thread
    if platform:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(platform, platform))
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX runs already
            jax.config.update("jax_num_cpu_devices", count or 2)
    try:
        of = [[x for x in jax.devices() if x.process_index == i] for i in range(jax.process_count())]
        chosen = [x for local in of for x in local[:count]]
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a platform has no plugin
        reason = str(error).splitlines()[0] if str(error) else "JAX has no such backend here"
        raise UserError(f"no device of {jax.config.jax_platforms or 'any platform'}: {reason}") from None
    if count and len(chosen) < count * jax.process_count():
        raise UserError(f"--devices {count}: there are {len(jax.local_devices())}")
    return chosen


def wait_for(address, seconds):
    """Returns when something listens there. JAX itself would abort the process where nothing does."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + max(60, seconds)
    while True:
        try:
            return socket.create_connection((host, int(port)), 1).close()
        except (OSError, ValueError, OverflowError) as error:
            if not isinstance(error, OSError) or time.monotonic() > deadline:
                raise UserError(f"--coordinator {address}: expected HOST:PORT of process 0 ({error})") from None
            time.sleep(0.5)


@contextlib.contextmanager
def together():
    """Ends this process with one line where another one has died. JAX itself would wait for it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # after what C++ has said of it, which goes the same way
            os.write(2, f"{died()} ({str(error).splitlines()[0]})\n".encode())
        os._exit(2)


def part():
    """Returns (number of this process, number of all)."""
    return jax.process_index(), jax.process_count()


def agree(name, x):
    """Raises an error unless all processes have the same JSON."""
    digest = np.frombuffer(hashlib.sha256(json.dumps(x).encode()).digest(), np.uint8)
    refuse_if((multihost_utils.process_allgather(digest) != digest).any(), f"{name} differ between the processes")


def each(x):
    """Returns the JSON of every process, in a list."""
    if jax.process_count() == 1:
        return [x]
    data = np.frombuffer(json.dumps(x).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data)))
    every = multihost_utils.process_allgather(np.pad(data, (0, int(sizes.max()) - len(data))))
    return [json.loads(row[:size].tobytes()) for row, size in zip(every, sizes)]


def gathered(tree):
    """Returns the NumPy arrays of all processes, along their first axis."""
    return multihost_utils.process_allgather(tree, tiled=True)


wait = multihost_utils.sync_global_devices
