"""Does the example train and decode every loss, resume, agree between jit and pmap, and explain bad data?"""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types
import wave

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for name in ("flax", "optax", "orbax.checkpoint", "sklearn", "matplotlib", "rapidfuzz", "tqdm"):
    pytest.importorskip(name)

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"


def train(workdir, *arguments):
    """Runs the script on two CPU devices; returns the finished process and its log, if any."""
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


@pytest.mark.slow
def test_resume_and_pmap(tmp_path):
    options = "--steps", "4", "--batch", "4", "--save-every", "2"
    process, whole = train(tmp_path, *options)
    assert process.returncode == 0, process.stderr
    assert "held-out CER" in process.stdout
    assert (tmp_path / "lattice.png").stat().st_size > 10_000
    assert len(whole["losses"]) == 4
    assert np.isfinite(whole["losses"]).all()

    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as after an interruption at step 2
    process, resumed = train(tmp_path, *options, "--resume", "--pmap")
    assert process.returncode == 0, process.stderr
    assert resumed["first_step"] == 2
    np.testing.assert_allclose(resumed["losses"], whole["losses"][2:], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["monotonic", "tdt", "multiblank", "hat", "pruned"])
def test_every_loss(tmp_path, name):
    process, log = train(tmp_path, "--steps", "2", "--batch", "4", "--loss", name)
    assert process.returncode == 0, process.stderr
    assert np.isfinite(log["losses"]).all()
    assert (tmp_path / "lattice.png").exists()


@pytest.mark.slow
def test_fused_joint(tmp_path):
    """The tiles give the same losses; the pruned loss refuses them, as it has no logits of all nodes."""
    options = "--steps", "3", "--batch", "4", "--loss", "multiblank"
    (_, logits), (process, fused) = train(tmp_path, *options), train(tmp_path, *options, "--joint", "fused")
    assert process.returncode == 0, process.stderr
    np.testing.assert_allclose(fused["losses"], logits["losses"], rtol=1e-4)
    process, _ = train(tmp_path, "--loss", "pruned", "--joint", "fused")
    assert process.returncode == 2 and "pruned" in process.stderr


# --------------------------------------------------------------------------------------------------------- decoding

L, BLANK = 3, 10  # one of ten labels; the blank of all but the multi-blank transducer


@pytest.fixture(scope="module")
def example():
    """Modules of the example: its table of losses, and its decoder."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield types.SimpleNamespace(
            variants=importlib.import_module("variants").VARIANTS, decode=importlib.import_module("model").greedy_decode
        )
    finally:
        sys.path.remove(str(EXAMPLES))


def decode(example, name, best, frames=None, **options):
    """The decoded labels if class (or class and duration) `best[t][u]` wins at node (t, u)."""
    variant = example.variants[name]
    logits = np.zeros((len(best), len(best[0]), variant.outputs), np.float32)
    logits[..., variant.blank] = -1  # HAT: no blank unless one is asked for
    for t, u in np.ndindex(logits.shape[:2]):
        logits[t, u, np.array(best[t][u])] = 5
    model = types.SimpleNamespace(
        blank=variant.blank,
        history=8,
        encoder=lambda features: features,
        lengths=lambda lengths: lengths,
        predictor=types.SimpleNamespace(rows=lambda past: jnp.sum(past != variant.blank, -1)),
        joint=lambda here, u: here[jnp.arange(len(u)), u],
    )
    lengths = jnp.array([len(best) if frames is None else frames], jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # as the example runs
        labels, count = example.decode(model, variant.decide, jnp.asarray(logits)[None], lengths, 6, **options)
    return labels[0, : count[0]].tolist()


def column(*rows, columns=7):
    """The same winner at every u, frame by frame."""
    return [[row] * columns for row in rows]


def test_standard_decoding(example):
    for name in ("rnnt", "hat", "pruned"):
        assert decode(example, name, [[1, 2, BLANK, 9], [9, 9, 4, BLANK]]) == [1, 2, 4]
        assert decode(example, name, column(L, BLANK, L)) == [L] * 6  # three a frame at most
        assert decode(example, name, column(L, L), max_per_frame=1) == [L] * 2
        assert decode(example, name, column(L, L, L), frames=1) == [L] * 3  # padding is not decoded
        assert decode(example, name, column(BLANK, BLANK)) == []


def test_blank_of_hat_is_decided_first(example):
    """The sign of its logit decides, however large the logits of labels are."""
    decide = example.variants["hat"].decide
    logits = jnp.full((2, 11), 4.0).at[:, L].set(5.0).at[:, BLANK].set(jnp.array([0.5, -0.5]))
    assert decide(logits, BLANK)[0].tolist() == [BLANK, L]


def test_monotonic_decoding(example):
    """Every symbol takes a frame."""
    assert decode(example, "monotonic", column(1, BLANK, 2, 3)) == [1, 2, 3]
    assert decode(example, "monotonic", [[1, 9], [9, 2], [9, 9]], frames=2) == [1, 2]


def test_tdt_decoding(example):
    """Outputs: eleven tokens, then durations 0 to 4."""
    take = lambda token, duration: (token, 11 + duration)
    skip = column(take(1, 3), take(9, 0), take(9, 0), take(2, 1), take(BLANK, 2), take(9, 0), take(4, 4))
    assert decode(example, "tdt", skip) == [1, 2, 4]
    assert decode(example, "tdt", column(take(L, 0), take(BLANK, 1))) == [L] * 3  # zero durations, three at most
    assert decode(example, "tdt", column(take(BLANK, 0), take(L, 1))) == [L]  # a blank reads a frame at least
    blocked = column(take(L, 0), take(1, 2), take(9, 1), take(2, 1))
    assert decode(example, "tdt", blocked, max_per_frame=1) == [L, 1, 2]


def test_multiblank_decoding(example):
    """Big blank i is class blank - 1 - i and reads 2, 3, 4 frames."""
    blank = example.variants["multiblank"].blank
    assert blank == BLANK + 3
    for duration, big in ((1, blank), (2, blank - 1), (3, blank - 2), (4, blank - 3)):
        rows = [[big, blank], *([t, blank] for t in range(1, 6))]
        assert decode(example, "multiblank", rows) == [duration]


def write_wav(path, *, channels=1, rate=8000, samples=1200):
    audio = np.random.default_rng(0).integers(-3000, 3000, channels * samples, np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(audio.tobytes())


@pytest.mark.slow
def test_recordings(tmp_path):
    folder = tmp_path / "recordings"
    folder.mkdir()
    for digit in range(10):
        for index in (0, 5):
            write_wav(folder / f"{digit}_a_{index}.wav")
    process, log = train(tmp_path, "--steps", "2", "--batch", "4", "--data", str(tmp_path))
    assert process.returncode == 0, process.stderr
    assert np.isfinite(log["losses"]).all()


def test_missing_package():
    """The script says what to install, in one line."""
    script = "import sys, runpy; sys.modules['tqdm'] = None; runpy.run_path('train.py')"
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 1
    assert process.stderr.strip() == "examples/train.py needs tqdm: run pip install '.[examples]' in the clone."


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
