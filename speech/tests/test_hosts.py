"""Several processes: the training is that of one, and outlives a process."""

import json
import shutil
import signal
import socket
import time

import chex
import pytest

from jax_rnnt_speech import runs
from jax_rnnt_speech.data import order, source
from support import arguments, losses, run, start, weights

pytestmark = pytest.mark.slow

OPTIONS = {"batch": 8, "buckets": 1, "time_masks": 0, "mel_masks": 0, "dropout": 0, "steps": 4, "save_every": 2}
HEARTBEAT = 10  # seconds after which a process counts as dead


def start_two(corpus, workdir, *options, **more):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    usual = [*arguments(corpus, workdir, devices=4, **OPTIONS), "--heartbeat", HEARTBEAT, *options]
    coordinator = "--coordinator", f"localhost:{port}", "--processes", 2
    return [start(*usual, *coordinator, "--process", i, **more) for i in range(2)]


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
        _, error = processes[0].communicate(timeout=10 * HEARTBEAT)
    finally:
        processes[0].kill()
    assert processes[0].returncode != 0 and "another process has ended" in error.splitlines()[-1]
    assert "start all again with --resume" in error.splitlines()[-1] and "Check failure stack trace" not in error
    finished(processes[1:])
    (first, *_), (second, quiet, _) = results = finished(start_two(corpus, workdir, "--resume"))
    assert first == second == 0, results
    printed = [line for line in quiet.splitlines() if "peer ranks" not in line]  # of collectives
    assert "held-out CER" in results[0][1] and printed == []
    run(arguments(corpus, tmp_path / "one", devices=8, readers=2, **OPTIONS))
    pairs = list(zip(*map(runs.metrics_of, (workdir, tmp_path / "one")), strict=True))
    assert sum("loss" in x for x, _ in pairs) == 4
    for x, y in pairs:
        assert x.keys() == y.keys() and x["step"] == y["step"]
        for name in x.keys() - {"seconds"}:
            assert x[name] == pytest.approx(y[name], rel=2e-3), (x, y)
    chex.assert_trees_all_close(weights(workdir), weights(tmp_path / "one"), atol=2e-3, rtol=1e-7)


def test_windows(corpus, tmp_path, monkeypatch):
    """Two processes read headers as training goes on, in windows that are not alike; one goes on from within these."""
    names = [json.loads(x)["audio"] for x in (corpus / "all.jsonl").read_text().splitlines()]
    rows = [{"audio": f"{corpus}/{names[i % 10]}", "text": ("A B", "C", "B")[i % 3]} for i in range(22)]
    (tmp_path / "bare.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = "--train", tmp_path / "bare.jsonl", "--on-the-fly", "--buffer", 5, "--steps", 8, "--max-seconds", 1
    small = "from jax_rnnt_speech.data import order, source; order.LEAST, source.FULL = 5, 0"
    # The usual checkpoint is whole before the best one of the same step, whose writers must not take it for theirs.
    slow = "import time; from jax_rnnt_speech.runs.checkpoints import Checkpoints as C; seal = C.seal"
    slow += "; C.seal = lambda self: (time.sleep(2 * (self.folder.name == 'best')), seal(self))[1]"
    first, second = finished(start_two(corpus, tmp_path / "two", *more, first=f"{small}; {slow}"))
    assert first[0] == second[0] == 0, (first, second)
    assert "within windows of 5 utterances" in first[1] and "in 1 of 2 parts" in first[1]
    monkeypatch.setattr(order, "LEAST", 5)
    monkeypatch.setattr(source, "FULL", 0)
    command = [*arguments(corpus, tmp_path / "one", devices=8, **OPTIONS), *more]
    run([*command, "--readers", 2])
    shutil.rmtree(tmp_path / "two/checkpoints/8")
    pairs = list(zip(*map(losses, (tmp_path / "two", tmp_path / "one")), strict=True))
    run([*command, "--workdir", tmp_path / "two", "--resume"])
    again = zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True)
    assert len(pairs) == 8
    for x, y in [*pairs, *again]:
        assert x == pytest.approx(y, rel=2e-3)
