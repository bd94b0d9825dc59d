"""examples/asr in several processes: the same training as in one, and a run that outlives a process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import losses

pytest.importorskip("orbax.checkpoint")
pytestmark = pytest.mark.slow

OPTIONS = [
    "--config", "handwritten-digits", "--width", "16", "--blocks", "1", "--channels", "4",
    "--batch", "16", "--steps", "12", "--save-every", "4", "--log-every", "1",
]  # fmt: skip
PATIENCE = 150  # seconds: a process counts as dead after 60


def start(workdir, devices, *options):
    """A process with so many devices; its output is in `stdout` and `stderr`."""
    command = [
        sys.executable,
        losses.ROOT / "examples/asr",
        "train",
        *OPTIONS,
        "--workdir",
        workdir,
        "--devices",
        devices,
    ]
    environment = os.environ | {"XLA_FLAGS": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(list(map(str, [*command, *options])), env=environment, **pipes)


def start_two(workdir, *options):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    numbers = [("--coordinator", f"localhost:{port}", "--processes", 2, "--process", i) for i in range(2)]
    return [start(workdir, 4, *x, *options) for x in numbers]


def finished(processes):
    """Status and output of each; none is left behind."""
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts)]


def parameters(workdir):
    sys.path.insert(0, str(losses.ROOT / "examples"))
    try:
        from asr import recogniser, runs
    finally:
        sys.path.pop(0)
    run = runs.open_run(workdir)
    (params,) = run.restore(params=recogniser.Recogniser.from_setup(run.setup()).params)
    run.close()
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(params))]


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run in two processes of four devices."""
    workdir = tmp_path_factory.mktemp("two") / "run"
    (first, *_), (second, quiet, _) = found = finished(start_two(workdir))
    assert first == second == 0, found
    printed = [line for line in quiet.splitlines() if not line.startswith("[Gloo]")]  # of JAX's collectives
    assert "held-out CER" in found[0][1] and printed == []
    return workdir


def test_as_in_one_process(two, tmp_path):
    """Losses and error rates are those of one process with all eight devices."""
    ((status, *texts),) = finished([start(tmp_path / "run", 8)])
    assert status == 0, texts
    pairs = [(x, y) for x, y in zip(metrics(two), metrics(tmp_path / "run"), strict=True)]
    assert sum("loss" in x for x, _ in pairs) >= 12
    for x, y in pairs:
        assert x.keys() == y.keys() and x["step"] == y["step"]
        for name in x.keys() - {"seconds"}:
            assert x[name] == pytest.approx(y[name], rel=2e-3), (x, y)
    for x, y in zip(parameters(two), parameters(tmp_path / "run"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


def test_a_process_that_dies(two, tmp_path):
    """The other one ends in bounded time; both together resume to the bits of a run without the death."""
    workdir = tmp_path / "run"
    processes = start_two(workdir)
    deadline = time.monotonic() + 120
    while not (workdir / "checkpoints/4").is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGKILL)
    try:
        assert processes[0].wait(timeout=PATIENCE) != 0
    finally:
        processes[0].kill()
    finished(processes)
    (first, *_), (second, *_) = found = finished(start_two(workdir, "--resume"))
    assert first == second == 0, found
    for x, y in zip(parameters(two), parameters(workdir), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--processes", 2], "--processes and --process need --coordinator HOST:PORT"),
        (["--coordinator", "localhost:1", "--processes", 2], "needs --processes N and --process I"),
        (["--coordinator", "localhost:1", "--processes", 2, "--process", 2], "with I from 0 to N - 1"),
    ],
)
def test_options(tmp_path, options, message):
    ((status, _, error),) = finished([start(tmp_path / "run", 4, *options)])
    assert status == 2 and message in error and len(error.strip().splitlines()) == 1
