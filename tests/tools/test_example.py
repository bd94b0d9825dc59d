"""Does the example train and decode every loss, resume, agree between jit and pmap, and explain bad data?"""

import functools
import importlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import wave

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_rnnt import decode

for name in ("flax", "optax", "orbax.checkpoint", "sklearn", "matplotlib", "rapidfuzz", "tqdm"):
    pytest.importorskip(name)

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def environment(workdir):
    """That of users, but for a cache of programs: runs of a test share most of them."""
    cache = {"JAX_COMPILATION_CACHE_DIR": f"{workdir}/programs", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return os.environ | cache | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": ""}


def script(name, workdir, *arguments, status=0):
    """Runs the script on CPU devices; returns its output and its log, if any."""
    log = workdir / "log.json"
    log.unlink(missing_ok=True)
    command = [sys.executable, "-W", "error::DeprecationWarning:__main__", str(EXAMPLES / name)]
    command += ["--workdir", str(workdir), "--log-json", str(log), *arguments]
    process = subprocess.run(command, capture_output=True, text=True, env=environment(workdir), timeout=900)
    assert process.returncode == status, process.stderr
    return process.stdout + process.stderr, json.loads(log.read_text()) if log.exists() else None


@pytest.mark.slow
def test_resume_and_pmap(tmp_path):
    options, train = (
        ("--steps", "4", "--batch", "4", "--save-every", "2"),
        functools.partial(script, "train.py", tmp_path),
    )
    out, whole = train(*options)
    assert "held-out CER" in out and (tmp_path / "lattice.png").stat().st_size > 10_000
    assert len(whole["losses"]) == 4 and np.isfinite(whole["losses"]).all()
    _, log = train(*options[2:], "--steps", "0", "--resume")
    assert log["losses"] == [] and log["cer"] == whole["cer"]
    out, _ = train(*options, status=2)
    assert "holds an earlier run" in out
    shutil.rmtree(tmp_path / "checkpoints" / "4")  # as after an interruption at step 2
    _, resumed = train(*options, "--resume", "--pmap")
    assert resumed["first_step"] == 2
    np.testing.assert_allclose(resumed["losses"], whole["losses"][2:], rtol=1e-4)


@pytest.fixture(scope="module")
def mwer():
    """The module, beside which the others of the example are importable."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("mwer")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def noisy(mwer):
    return importlib.import_module("noisy")


@pytest.fixture(scope="module")
def transcripts(mwer):
    return importlib.import_module("noisy_transcripts")


@pytest.fixture(scope="module")
def training(mwer):
    return sys.modules["train"]


@pytest.fixture(autouse=True)
def flax_promotion():
    """Flax promotes implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def small(mwer, name):
    """(model, variant) of a few units, and a batch."""
    rng, variant = np.random.default_rng(0), mwer.VARIANTS[name]
    model = variant.model(6, variant.outputs, variant.blank, 8, [(2, 2)], [4], rngs=mwer.nnx.Rngs(0))
    lengths = {"feature_lengths": np.array([12, 7]), "target_lengths": np.array([3, 2])}
    arrays = {"features": rng.normal(size=(2, 12, 6)).astype(np.float32), "targets": rng.integers(0, 10, (2, 3))}
    return model, variant, arrays | lengths


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnnt", "monotonic", "tdt", "multiblank", "hat", "pruned"])
def test_every_loss(training, mwer, name, devices):
    """Steps of a training on two devices lower the loss of the batch; the tiles give the same loss; it decodes."""
    model, variant, batch = small(mwer, name)
    search = lambda *x: decode.greedy(variant.loss, *model.decoder_inputs(*x), 5)
    assert jax.eval_shape(search, batch["features"], batch["feature_lengths"]).labels.shape == (2, 5)
    graphdef, params = mwer.nnx.split(model)
    mesh, optimizer = Mesh(np.array(devices[:2]), ("data",)), mwer.optax.adam(1e-2)
    state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, PartitionSpec()))
    compute = functools.partial(variant.compute, variant.loss, fused=False)
    step = training.make_train_step(graphdef, optimizer, compute, mesh, False)
    of_tiles = None if name == "pruned" else variant.compute(variant.loss, model, batch, True)
    found = []
    for _ in range(30):
        state, value = step(state, batch)
        found.append(float(value))
    assert np.isfinite(found).all() and found[-1] < found[0] / 2
    if name != "pruned":
        np.testing.assert_allclose(of_tiles, found[0], rtol=1e-4)


@pytest.mark.slow
def test_mwer_after_training(tmp_path):
    """Of recordings. It starts from the checkpoint of train.py, and reports error rates before and after."""
    (tmp_path / "recordings").mkdir()
    for digit, index in itertools.product(range(10), (0, 5)):
        write_wav(tmp_path / f"recordings/{digit}_a_{index}.wav")
    data = "--data", str(tmp_path)
    _, log = script("train.py", tmp_path, "--steps", "2", "--batch", "4", *data)
    assert np.isfinite(log["losses"]).all()
    _, log = script("mwer.py", tmp_path, "--steps", "1", "--width", "2", *data)
    assert np.isfinite([log["before"], log["after"], *log["losses"]]).all()
    options = "--data", str(tmp_path), "--workdir", str(tmp_path), "--utterances", "2"
    command = [sys.executable, str(EXAMPLES / "noisy.py"), *options]
    process = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=900)
    assert process.returncode == 0, process.stderr
    rows = [line.strip("| ").split(" | ")[1:] for line in process.stdout.splitlines()[2:]]
    assert len(rows) == 5 and np.isfinite([float(x) for row in rows for x in row]).all()
    options = *data, "--loss", "tdt", "--masking", "0.5", "--steps", "2", "--turns", "1"
    command = [sys.executable, str(EXAMPLES / "masked.py"), *options]
    process = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=900)
    assert process.returncode == 0, process.stderr
    masked, *found = process.stdout.splitlines()[-1].strip("| ").split(" | ")
    assert masked == "50%" and len(found) == 8 and np.isfinite([*map(float, found)]).all()


def test_digit_ngrams(noisy, tmp_path):
    """Probabilities of what follows sum to one in every context; a trigram's is that of Witten and Bell's formula."""
    numbers = noisy.draw(np.random.default_rng(0).dirichlet(np.full(10, 0.2), 11), np.random.default_rng(1), 50)
    noisy.write_arpa(tmp_path / "arpa", numbers)
    model, found = decode.NGram.from_arpa(tmp_path / "arpa", [*map(str, range(10)), None]), []
    state = model.initial(1)
    for label in (model.start, *numbers[0]):
        scores, state = model.step(state, np.array([label], np.int32))
        found.append(np.exp([*scores[0, :10], *model.final(state)]))
    np.testing.assert_allclose(np.sum(found, 1), 1, rtol=1e-4)

    words = [["<s>", *number, "</s>"] for number in numbers]

    def witten_bell(context, word):
        n = len(context)
        after = [w[i + n] for w in words for i in range(len(w) - n) if w[i : i + n] == context and w[i + n] != "<s>"]
        shorter = witten_bell(context[1:], word) if n else 1 / 11
        return (after.count(word) + len({*after}) * shorter) / (len(after) + len({*after}))

    expected = [witten_bell(["<s>", numbers[0][0]], digit) for digit in (*range(10), "</s>")]
    np.testing.assert_allclose(found[1], expected, rtol=1e-4)


def test_errors_of_transcripts(transcripts):
    """Errors of all labels, of none, and how many of half; what is left keeps its order."""
    rng, digits = np.random.default_rng(0), np.arange(1000) % 10
    corrupt = lambda kind, share: transcripts.corrupt(kind, rng, digits, share)
    for kind in transcripts.KINDS:
        assert corrupt(kind, 0.0).tolist() == digits.tolist()
    assert not corrupt("deleted", 1.0).size and not corrupt("cut", 1.0).size
    assert (corrupt("replaced", 1.0) != digits).all() and (corrupt("inserted", 1.0)[1::2] == digits).all()
    half = {kind: corrupt(kind, 0.5) for kind in transcripts.KINDS}
    wrong = {kind: abs(len(half[kind]) - 1000) for kind in ("deleted", "inserted", "cut")}
    wrong["replaced"] = (half["replaced"] != digits).sum()
    assert all(430 < x < 570 for x in wrong.values()), wrong
    remains = iter(half["inserted"])
    assert all(digit in remains for digit in digits)  # in this order
    assert set(np.diff(half["cut"]) % 10) == {1} != set(np.diff(half["deleted"]) % 10)


@pytest.mark.slow
def test_training_on_errors(tmp_path):
    """A table with finite error rates for all losses of two kinds of errors."""
    options = "--steps", "2", "--utterances", "4", "--seeds", "1", "--errors", "inserted", "cut"
    command = [sys.executable, str(EXAMPLES / "noisy_transcripts.py"), *options]
    process = subprocess.run(command, capture_output=True, text=True, env=environment(tmp_path), timeout=900)
    assert process.returncode == 0, process.stderr
    rows = [line.strip("| ").split(" | ") for line in process.stdout.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6 and len({(kind, loss) for kind, loss, *_ in rows}) == 6
    assert np.isfinite([float(x) for row in rows for x in row[3:]]).all()


RUN = {"data": "handwritten-digits", "loss": "rnnt", "steps": 4, "batch": 4, "seed": 0, "fastemit": 0.0}


def test_earlier_runs_are_kept(training, tmp_path):
    """Neither a new run nor one with other arguments touches the checkpoints; --overwrite replaces them."""
    begin = functools.partial(training.begin, tmp_path, resume=False, overwrite=False)
    begin(RUN)
    begin(RUN)  # nothing was saved yet
    saved = tmp_path / "checkpoints" / "4"
    saved.mkdir(parents=True)
    with pytest.raises(training.DataError, match=r"holds an earlier run: continue it with --resume, or .*--overwrite"):
        begin(RUN)
    with pytest.raises(training.DataError, match="a run with loss rnnt, got tdt"):
        begin(RUN | {"loss": "tdt"}, resume=True)
    begin(RUN | {"steps": 0}, resume=True)  # evaluates
    assert saved.exists() and json.loads((tmp_path / "run.json").read_text()) == RUN
    (tmp_path / "run.json").unlink()
    with pytest.raises(training.DataError, match="does not say how its checkpoints were made"):
        begin(RUN, resume=True)
    begin(RUN | {"seed": 1}, overwrite=True)
    assert not saved.exists() and json.loads((tmp_path / "run.json").read_text()) == RUN | {"seed": 1}


def write_wav(path, *, channels=1, rate=8000, samples=1200):
    audio = np.random.default_rng(0).integers(-3000, 3000, channels * samples, np.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(audio.tobytes())


MALFORMED = {
    "no recordings": lambda folder: None,
    "no recordings to test on": lambda folder: write_wav(folder / "1_a_5.wav"),
    "not a readable WAV": lambda folder: (folder / "1_a_5.wav").write_bytes(b"RIFF, not really"),
    "2 channel": lambda folder: write_wav(folder / "1_a_5.wav", channels=2),
    "16000 Hz": lambda folder: write_wav(folder / "1_a_5.wav", rate=16000),
    "empty": lambda folder: write_wav(folder / "1_a_5.wav", samples=0),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_recordings(mwer, tmp_path, message):
    data = sys.modules["data"]
    MALFORMED[message](tmp_path)
    with pytest.raises(data.DataError, match=message):
        data.SpokenDigits(tmp_path)
