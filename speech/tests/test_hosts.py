"""Several processes: the training is that of one, and outlives a process."""

import json
import signal
import socket
import time

import jax
import numpy as np
import pytest

from support import asr, run, start

pytestmark = pytest.mark.slow

OPTIONS = [
    "--rate", 8000, "--mels", 6, "--encoder", "convolutional", "--width", 16, "--blocks", 1, "--kernel", 3,
    "--channels", 2, "--batch", 16, "--buckets", 1, "--time-masks", 0, "--mel-masks", 0, "--dropout", 0,
    "--steps", 4, "--save-every", 2, "--log-every", 1, "--learning-rate", 0.004,
]  # fmt: skip
HEARTBEAT = 10  # seconds after which a process counts as dead


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A manifest of 32 utterances of noise, and one of 16."""
    folder, rng = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    lines = [json.dumps({"audio": f"{i}.wav", "text": " ".join("ABC"[i % 3 :])}) for i in range(32)]
    for i in range(32):
        asr.audio.write(folder / f"{i}.wav", 0.1 * rng.normal(size=3200 + 80 * (i % 5)), 8000)
    (folder / "train.jsonl").write_text("\n".join(lines))
    (folder / "valid.jsonl").write_text("\n".join(lines[:16]))
    return folder


def arguments(corpus, workdir, devices, *options):
    files = "--train", corpus / "train.jsonl", "--valid", corpus / "valid.jsonl", "--workdir", workdir
    return list(map(str, ["train", *OPTIONS, *files, "--devices", devices, *options]))


def start_two(corpus, workdir, *options):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    numbers = [("--coordinator", f"localhost:{port}", "--processes", 2, "--process", i) for i in range(2)]
    return [start(*arguments(corpus, workdir, 4, *x, "--heartbeat", HEARTBEAT, *options)) for x in numbers]


def finished(processes):
    """Status and output of each; none is left behind."""
    try:
        texts = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, texts)]


def parameters(workdir):
    of = asr.runs.open_run(workdir)
    (params,) = of.restore(params=asr.recogniser.Recogniser.from_setup(of.setup()).params)
    of.close()
    return [np.asarray(x) for x in jax.tree.leaves(jax.device_get(params))]


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


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
    run(arguments(corpus, tmp_path / "one", 8))
    pairs = [(x, y) for x, y in zip(metrics(workdir), metrics(tmp_path / "one"), strict=True)]
    assert sum("loss" in x for x, _ in pairs) == 4
    for x, y in pairs:
        assert x.keys() == y.keys() and x["step"] == y["step"]
        for name in x.keys() - {"seconds"}:
            assert x[name] == pytest.approx(y[name], rel=2e-3), (x, y)
    for x, y in zip(parameters(workdir), parameters(tmp_path / "one"), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


def test_options(corpus, tmp_path, refused):
    for options, message in (
        (["--processes", 2], "--processes and --process need --coordinator HOST:PORT"),
        (["--coordinator", "localhost:1", "--processes", 2], "needs --processes N and --process I"),
        (["--coordinator", "localhost:1", "--processes", 2, "--process", 2], "with I from 0 to N - 1"),
    ):
        refused(arguments(corpus, tmp_path / "run", 4, *options), message)
