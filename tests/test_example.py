"""Does the example train, resume where it stopped, agree between jit and pmap, and say what is wrong with data?"""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import wave

import numpy as np
import pytest

for name in ("flax", "optax", "orbax.checkpoint", "sklearn", "matplotlib", "tqdm"):
    pytest.importorskip(name)

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def train(workdir, *arguments):
    """Runs the script on two CPU devices; returns the finished process and what it logged, if anything."""
    log = workdir / "log.json"
    log.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-W",
        "error::DeprecationWarning:__main__",
        str(EXAMPLES / "train.py"),
        "--workdir",
        str(workdir),
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(
        [*command, "--log-json", str(log), *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    return process, json.loads(log.read_text()) if log.exists() else None


def test_resume_and_pmap(tmp_path):
    options = "--steps", "4", "--batch", "4", "--save-every", "2"
    process, whole = train(tmp_path, *options)
    assert process.returncode == 0, process.stderr
    assert "held-out CER" in process.stdout
    assert (tmp_path / "lattice.png").stat().st_size > 10_000
    assert len(whole["losses"]) == 4
    assert np.isfinite(whole["losses"]).all()

    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as if interrupted after step 2
    process, resumed = train(tmp_path, *options, "--resume", "--pmap")
    assert process.returncode == 0, process.stderr
    assert resumed["first_step"] == 2
    np.testing.assert_allclose(resumed["losses"], whole["losses"][2:], rtol=1e-4)


def write_wav(path, *, channels=1, rate=8000, samples=1200):
    audio = np.random.default_rng(0).integers(-3000, 3000, channels * samples, np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(audio.tobytes())


def test_recordings(tmp_path):
    folder = tmp_path / "recordings"
    folder.mkdir()
    for digit in range(10):
        for index in (0, 5):
            write_wav(folder / f"{digit}_a_{index}.wav")
    process, log = train(tmp_path, "--steps", "2", "--batch", "4", "--data", str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert np.isfinite(log["losses"]).all()


def test_missing_folder(tmp_path):
    process, _ = train(tmp_path, "--data", str(tmp_path / "nowhere"))
    assert process.returncode == 2
    assert process.stderr == f"train.py: {tmp_path}/nowhere is not a folder\n"


MALFORMED = {
    "no recordings": lambda folder: (folder / "notes.txt").touch(),
    "no recordings to test on": lambda folder: write_wav(folder / "1_a_5.wav"),
    "not a readable WAV": lambda folder: (folder / "1_a_5.wav").write_bytes(b"RIFF, not really"),
    "2 channel": lambda folder: write_wav(folder / "1_a_5.wav", channels=2),
    "16000 Hz": lambda folder: write_wav(folder / "1_a_5.wav", rate=16000),
    "empty": lambda folder: write_wav(folder / "1_a_5.wav", samples=0),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_recordings(tmp_path, message):
    spec = importlib.util.spec_from_file_location("example_data", EXAMPLES / "data.py")
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    MALFORMED[message](tmp_path)
    with pytest.raises(data.DataError, match=message) as error:
        data.SpokenDigits(tmp_path)
    assert "\n" not in str(error.value)
