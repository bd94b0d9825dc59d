"""Several processes: the training is that of one, and outlives a process."""

import signal
import socket
import time

import numpy as np
import pytest

from jax_rnnt_speech import runs
from support import arguments, run, start, weights

pytestmark = pytest.mark.slow

OPTIONS = {"batch": 8, "buckets": 1, "time_masks": 0, "mel_masks": 0, "dropout": 0, "steps": 4, "save_every": 2}
HEARTBEAT = 10  # seconds after which a process counts as dead


def start_two(corpus, workdir, *options):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    usual = [*arguments(corpus, workdir, devices=4, **OPTIONS), "--heartbeat", HEARTBEAT, *options]
    coordinator = "--coordinator", f"localhost:{port}", "--processes", 2
    return [start(*usual, *coordinator, "--process", i) for i in range(2)]


def finished(processes):
    """Status and output of each; none is left behind."""
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts)]


def test_a_process_that_dies(corpus, tmp_path):
    """The other one ends in bounded time; both together resume to what one process with all devices has."""
    workdir = tmp_path / "two"
    processes = start_two(corpus, workdir)
    deadline = time.monotonic() + 120
    while not (workdir / "checkpoints/2").is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGKILL)
    try:
        assert processes[0].wait(timeout=10 * HEARTBEAT) != 0
    finally:
        processes[0].kill()
    finished(processes)
    (first, *_), (second, quiet, _) = results = finished(start_two(corpus, workdir, "--resume"))
    assert first == second == 0, results
    printed = [line for line in quiet.splitlines() if "peer ranks" not in line]  # of collectives
    assert "held-out CER" in results[0][1] and printed == []
    run(arguments(corpus, tmp_path / "one", devices=8, **OPTIONS))
    pairs = list(zip(*map(runs.metrics_of, (workdir, tmp_path / "one")), strict=True))
    assert sum("loss" in x for x, _ in pairs) == 4
    for x, y in pairs:
        assert x.keys() == y.keys() and x["step"] == y["step"]
        for name in x.keys() - {"seconds"}:
            assert x[name] == pytest.approx(y[name], rel=2e-3), (x, y)
    for x, y in zip(weights(workdir), weights(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)
