"""Does the subpackage parakeet compute what `transformers` computed for golden, padded, in training and in streams?"""

import json
import pathlib
import re
import runpy
import shutil
import sys
import types

import jax
import numpy as np
import optax
import pytest
import scipy.io.wavfile
from flax import nnx

from jax_rnnt import decode
from jax_rnnt_speech.parakeet import commands, finetune, inputs, recordings, transcribe, weights
from jax_rnnt_speech.parakeet.model import reduced
from jax_rnnt_speech.parakeet.weights import LogMel
from support import asr

GOLDEN = pathlib.Path(__file__).parent / "golden"
SLOW = pytest.mark.slow
KINDS = pytest.param("rnnt", marks=SLOW), "tdt", "streaming"
TARGETS, TARGET_LENGTHS = recordings.LABELS["targets"], recordings.LABELS["target_lengths"]
NEAR = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """(name, model, extractor, golden arrays, features and lengths of the extractor)."""
    return loaded(request.param)


def loaded(kind):
    model, extractor = weights.load(GOLDEN / kind)
    return kind, model, extractor, np.load(GOLDEN / kind / "golden.npz"), extractor(recordings.recordings())


def frames_of(x, lengths):
    """The frames inside the lengths."""
    return np.asarray(x)[:, : max(lengths)][np.arange(max(lengths)) < lengths[:, None]]


def test_features(case):
    """Of three lengths; 128 bins of a short recording; parts of a stream are parts of the whole."""
    kind, _, extractor, golden, (features, lengths) = case
    np.testing.assert_array_equal(lengths, golden["feature_lengths"])
    np.testing.assert_allclose(features, golden["features"][:, : lengths.max()], **NEAR)
    assert not golden["features"][:, lengths.max() :].any()
    if kind == "streaming":
        part = extractor.chunk(recordings.recordings()[1], 75, 30)
        np.testing.assert_allclose(part[:13], features[1, 75:88], atol=1e-6)
        assert part.shape == (30, 16) and not part[13:].any()
    else:
        with pytest.raises(ValueError, match="the whole recording"):
            extractor.chunk(recordings.recordings()[1], 0, 1)


def test_features_of_128_bins():
    expected = np.load(GOLDEN / "features128.npz")["features"]
    features, _ = LogMel(feature_size=128)([recordings.recordings()[2][:3000]])
    np.testing.assert_allclose(features, expected[:, : features.shape[1]], **NEAR)


def test_encoder_logits_and_losses(case):
    """To 1e-4, whatever the padding holds; every reduction; in tiles and as an array."""
    _, model, _, golden, (features, feature_lengths) = case
    inside = np.arange(features.shape[1]) < feature_lengths[:, None]
    features = np.pad(np.where(inside[..., None], features, np.nan), [(0, 0), (0, 20), (0, 0)], constant_values=np.nan)
    rows, lengths = transcribe.encode(model, features, feature_lengths)
    np.testing.assert_array_equal(lengths, golden["lengths"])
    np.testing.assert_allclose(frames_of(rows, golden["lengths"]), frames_of(golden["rows"], golden["lengths"]), **NEAR)

    arrays = nnx.jit(lambda model, *x: model.logits(*x, tiles=False)[0])(model, features, feature_lengths, TARGETS)
    np.testing.assert_allclose(*(frames_of(x, golden["lengths"]) for x in (arrays, golden["logits"])), **NEAR)

    def losses(model, features, lengths):
        logits, lengths = model.logits(features, lengths, TARGETS, chunk=16)
        return model.criterion(reduction="none")(logits, TARGETS, lengths, TARGET_LENGTHS)

    tiles = nnx.jit(losses)(model, features, feature_lengths)
    direct = model.criterion(reduction="none")(arrays, TARGETS, lengths, TARGET_LENGTHS)
    for reduction in ("none", "mean", "mean_volume", "mean_batch", "sum"):
        for results in (tiles, direct):
            np.testing.assert_allclose(
                reduced(results, TARGET_LENGTHS, reduction), golden[f"loss_{reduction}"], rtol=1e-5
            )
    for here, theirs in (("mean", "mean_batch"), ("sum", "sum")):
        value = model.criterion(reduction=here)(arrays, TARGETS, lengths, TARGET_LENGTHS)
        np.testing.assert_allclose(value, golden[f"loss_{theirs}"], rtol=1e-5)


def test_transcripts(case):
    """Labels and frames of `generate`; an utterance without a frame has no labels."""
    _, model, extractor, golden, (features, feature_lengths) = case
    results = transcribe.transcribe(model, extractor, recordings.recordings())
    width = golden["labels"].shape[1]
    np.testing.assert_array_equal(results.labels[:, :width], golden["labels"])
    np.testing.assert_array_equal(results.frames[:, :width], golden["frames"])
    np.testing.assert_array_equal(results.counts, (golden["labels"] >= 0).sum(1))
    rows, _ = transcribe.encode(model, features, np.array([0, *feature_lengths[1:]]))
    assert np.isfinite(rows[1:, :8]).all()


def test_rule_of_durations():
    """The golden labels tell the rule of `transformers` from that of most probable pairs."""
    _, model, _, golden, batch = loaded("tdt")
    inputs = model.decoder_inputs(*transcribe.encode(model, *batch))
    results = decode.greedy(model.criterion(), *inputs, 40, max_symbols=40)
    assert (results.labels[:, : golden["labels"].shape[1]] != golden["labels"]).any()


@pytest.mark.parametrize("kind", ["tdt", *(pytest.param(kind, marks=SLOW) for kind in ("rnnt", "streaming"))])
def test_training_step(kind):
    """Loss and gradients of a step in training mode, with the batch norm of the batch, padding included."""
    _, model, _, golden, batch = loaded(kind)
    model.train()

    def compute(model):
        logits, lengths = model.logits(*batch, TARGETS)
        return model.criterion()(logits, TARGETS, lengths, TARGET_LENGTHS)

    loss, gradient = nnx.jit(nnx.value_and_grad(compute))(model)
    np.testing.assert_allclose(loss, golden["train_loss"], rtol=1e-5)
    results = {}
    weights.each(gradient, lambda path, x: results.update({path: x}))
    for path, tensor in (
        ("joint.encoder.kernel", "encoder_projector.weight"),
        ("joint.output.bias", "joint.head.bias"),
        ("encoder.layers0.self_attn.relative_k_proj.kernel", "encoder.layers.0.self_attn.relative_k_proj.weight"),
    ):
        expected = golden[f"gradient:{tensor}"]
        np.testing.assert_allclose(results[path].T, expected, atol=2e-5 * abs(expected).max(), err_msg=path)


@pytest.mark.slow
def test_fine_tuning(tmp_path):
    """Ten steps of finetune.py lower the loss, in tiles too; the tuned checkpoint loads again."""
    _, model, extractor, _, _ = loaded("tdt")
    lines = []
    for i, x in enumerate(recordings.recordings()):
        asr.audio.write(tmp_path / f"{i}.wav", x, 16000)
        labels = TARGETS[i, : TARGET_LENGTHS[i]].tolist()
        lines.append(json.dumps({"audio_filepath": f"{i}.wav", "labels": labels}))
    (tmp_path / "manifest.json").write_text("\n".join(lines))
    data, _ = inputs.read_manifest(tmp_path / "manifest.json", GOLDEN / "tdt", model, extractor)
    entries, labels = zip(*data)
    batch = finetune.batched(extractor, [asr.corpora.samples_of(x, 16000) for x in entries], labels)
    assert batch[0].shape == (3, 128, 16) and batch[2].shape == (3, 8)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    model.train()
    results = [float(finetune.train_step(model, optimizer, *batch)) for _ in range(10)]
    assert results[-1] < 0.8 * results[0]
    weights.save(model, tmp_path / "tuned", GOLDEN / "tdt")
    again, _ = weights.load(tmp_path / "tuned")
    model.eval()
    logits = [nnx.jit(lambda m, *x: m.logits(*x, tiles=False)[0])(m, *batch[:3]) for m in (model, again)]
    np.testing.assert_allclose(logits[1], logits[0], atol=0.2)  # the files have bfloat16


def test_stream():
    """Rows and labels part by part are those of `transformers`, and of the whole recording where parts are full."""
    _, model, extractor, golden, _ = loaded("streaming")
    rows, state, frames = [], None, golden["stream_rows"].shape[1]
    for begin in [0, *range(9, 9 + 16 * 6, 16)]:
        part = np.stack([extractor.chunk(x, begin, 16 if begin else 9) for x in recordings.recordings()[:2]])
        more, state = transcribe.encode_part(model, part, state, None)
        rows.append(more)
    rows = np.concatenate(rows, 1)
    assert rows.shape[1] == frames == 14
    np.testing.assert_allclose(rows[:1], golden["stream_rows"], **NEAR)
    np.testing.assert_allclose(rows[:, :10], golden["rows"][:2, :10], **NEAR)
    labels, places = [], []
    for results in transcribe.stream(model, extractor, recordings.recordings()[0][: 105 * 160]):
        labels += transcribe.labels_of(results)[0]
        places += np.asarray(results.frames)[0, : int(results.counts[0])].tolist()
    np.testing.assert_array_equal(labels, golden["stream_labels"])
    np.testing.assert_array_equal(places, golden["stream_frames"])


def test_integers():
    """Samples of 16 bits are scaled, in whole recordings and in streams; floats of that scale are refused."""
    _, extractor = weights.load(GOLDEN / "streaming")
    x = np.round(recordings.recordings()[0] * 2**14)
    np.testing.assert_array_equal(extractor.frames(x.astype(np.int16)), extractor.frames(x / 2**15))
    np.testing.assert_array_equal(extractor.chunk(x.astype(np.int16), 9, 4), extractor.chunk(x / 2**15, 9, 4))
    with pytest.raises(ValueError, match="samples far beyond full scale"):
        extractor.frames(x)


def test_messages(tmp_path):
    """A missing tensor, one too many and a wrong part are named."""
    folder = shutil.copytree(GOLDEN / "tdt", tmp_path / "checkpoint")
    tensors = weights.read_tensors(folder)
    spare = tensors | {"ctc_head.weight": tensors["joint.head.bias"]}
    weights.save_file({name: jax.numpy.asarray(x) for name, x in spare.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"not of this model: ctc_head\.weight"):
        weights.load(folder)
    del tensors["encoder.layers.1.self_attn.bias_u"]
    weights.save_file({name: jax.numpy.asarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor encoder\.layers\.1\.self_attn\.bias_u"):
        weights.load(folder)
    model, _ = weights.load(GOLDEN / "tdt")
    with pytest.raises(ValueError, match="must be causal"):
        model.encoder.stream(np.zeros((1, 9, 16)))
    model, _ = weights.load(GOLDEN / "streaming")
    with pytest.raises(ValueError, match="must have 9 frames, got 16"):
        model.encoder.stream(np.zeros((1, 16, 16)))


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    """A folder of good recordings, of short ones, and of bad ones."""
    folder = tmp_path_factory.mktemp("audio")
    a, b, c = recordings.recordings()
    bad = np.where(np.arange(len(c)) == 5, np.nan, c)
    files = {"a.wav": (a, 16000), "stereo.flac": (np.stack([b, b]), 16000), "8kHz.wav": (c[::2], 8000)}
    files |= {"none.wav": (c[:0], 16000), "none8.wav": (c[:0], 8000), "short.wav": (c[:100], 16000)}
    for name, (x, rate) in files.items():
        asr.audio.write(folder / name, x, rate)
    scipy.io.wavfile.write(folder / "nan.wav", 16000, bad)
    (folder / "empty.wav").touch()
    (folder / "text.wav").write_text("hello " * 99)
    return folder


@pytest.fixture
def command(audio, monkeypatch, capsys):
    """Function of arguments: (status, output, errors) of `python -m jax_rnnt_speech.parakeet` in the folder `audio`."""

    def run(line, folder=GOLDEN / "streaming"):
        arguments = [str(folder) if x == "FOLDER" else x for x in line.split()]
        monkeypatch.chdir(audio)
        monkeypatch.setattr(sys, "argv", ["parakeet", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("jax_rnnt_speech.parakeet", run_name="__main__")
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("stream", ["", "--stream"])
def test_transcribe_command(command, stream):
    """Any format, rate and channels; no frames give no labels; bad files are named, and the others transcribed."""
    good = "a.wav stereo.flac 8kHz.wav none.wav none8.wav short.wav"
    status, out, errors = command(f"transcribe FOLDER {stream} {good} empty.wav text.wav nan.wav gone.wav")
    results = dict(line.split(": ") for line in out.splitlines())
    assert status == 1 and " ".join(results) == good and "1, 1" in results["a.wav"] and "1, 1" in results["stereo.flac"]
    assert [results[f"{name}.wav"] for name in ("none", "none8", "short")] == ["[]"] * 3
    reasons = (
        "empty.wav: an empty file",
        "text.wav: no audio that FFmpeg knows",
        "nan.wav: samples that are NaN or infinite",
        "gone.wav: no such file",
    )
    assert all(f"parakeet: {a}" in b for a, b in zip(reasons, errors.splitlines(), strict=True))


def edited(folder, name, change):
    """Changes a JSON file of a checkpoint, or replaces its text; None deletes a file."""
    file = folder / name
    if change is None:
        file.unlink()
    else:
        file.write_text(change if isinstance(change, str) else json.dumps(json.loads(file.read_text()) | change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", None, "No such file or directory: "),
        ("preprocessor_config.json", None, "No such file or directory: "),
        ("model.safetensors", None, "has no *.safetensors"),
        ("config.json", {"model_type": "parakeet_ctc"}, "config.json must be one of "),
        ("config.json", {"encoder_config": None}, "config.json must have a dictionary of encoder_config, got None"),
        ("config.json", {"hidden_act": "swish"}, "config.json must be one of ('relu', 'silu', 'gelu'), got 'swish'"),
        ("preprocessor_config.json", {"feature_size": 80}, "must have a feature_size of 16, its num_mel_bins, got 80"),
        ("config.json", "version https://git-lfs", "config.json must be JSON"),
        ("model.safetensors", "version https://git-lfs", "model.safetensors must be a file of safetensors"),
    ],
)
def test_bad_checkpoints(command, tmp_path, name, change, message):
    """One line and status 2."""
    folder = shutil.copytree(GOLDEN / "tdt", tmp_path / "checkpoint")
    edited(folder, name, change)
    status, _, errors = command("transcribe FOLDER a.wav", folder)
    assert status == 2 and message in errors and errors.count("\n") == 1


def test_what_ends_transcribe(command, monkeypatch):
    """A model that cannot stream, and Ctrl-C."""
    status, _, errors = command("transcribe FOLDER a.wav --stream", GOLDEN / "tdt")
    assert status == 2 and errors.startswith(
        "parakeet: --stream needs a nemotron_asr_streaming_encoder, got the parakeet"
    )
    monkeypatch.setattr(commands, "load", lambda folder: interrupt())
    assert command("transcribe FOLDER a.wav") == (130, "", "parakeet: interrupted\n")


def interrupt():
    raise KeyboardInterrupt


GOOD = '{"audio_filepath": "a.wav", "labels": [3, 7]}'


def entry(name, labels, **more):
    return json.dumps({"audio_filepath": name, "labels": labels} | more)


@pytest.fixture(scope="module")
def streaming():
    return weights.load(GOLDEN / "streaming")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (entry("a.wav", [99]), "outside the vocabulary: 1 (a.wav)"),
        (entry("a.wav", [19]), "outside the vocabulary: 1 (a.wav)"),  # the blank
        (entry("a.wav", [-1]), "outside the vocabulary: 1 (a.wav)"),
        (entry("a.wav", []), "empty transcript: 1 (a.wav)"),
        (entry("a.wav", [1] * 99), "fewer frames than labels: 1 (a.wav)"),
        (entry("short.wav", [1]), "fewer frames than labels: 1 (short.wav)"),
        (entry("empty.wav", [1]), "an empty file: 1 (empty.wav)"),
        (entry("gone.wav", [1]), "no such file: 1 (gone.wav)"),
        (entry("nan.wav", [1]), "samples that are NaN or infinite: 1 (nan.wav)"),
        ("{", "not JSON: 1 (m.json line 2)"),
        ("3", "not an object with keys: 1 (m.json line 2)"),
        (entry(3, [1]), "the name of the audio is no string of characters: 1 (m.json line 2)"),
        *((entry("a.wav", x), "labels are no list of integers: 1 (m.json line 2)") for x in ("x", [True])),
        ('{"text": "x"}', "no name of an audio file: 1 (m.json line 2)"),
        (entry("a.wav", [1], offset=1.5), "a segment beyond the end of its file: 1 (a.wav from 1.5 s)"),
        (entry("a.wav", [1] * 9, offset=0, duration=0.5), "fewer frames than labels: 1 (a.wav from 0 s to 0.5 s)"),
    ],
)
def test_bad_utterances(audio, streaming, tmp_path, line, message):
    """They are left out by name; without another one, the manifest has none."""
    (tmp_path / "m.json").write_text(f"\n{line}\n{GOOD}".replace('"a.wav"', json.dumps(str(audio / "a.wav"))))
    for name in ("short", "empty", "gone", "nan"):
        (tmp_path / f"{name}.wav").symlink_to(audio / f"{name}.wav")
    data, report = inputs.read_manifest(tmp_path / "m.json", GOLDEN / "streaming", *streaming)
    (results,) = (x.replace(f"{audio}/", "") for x in report.lines())
    assert len(data) == 1 and results == f"left out, {message}"
    (tmp_path / "m.json").write_text(f"\n{line}")
    with pytest.raises(inputs.UserError, match=r"m\.json has no usable utterance; left out, "):
        inputs.read_manifest(tmp_path / "m.json", GOLDEN / "streaming", *streaming)


def test_lines_of_a_manifest(audio, streaming):
    """BOM, CRLF, U+2028 within a text and blank lines are no errors."""
    (audio / "m.json").write_bytes(f'\ufeff{GOOD}\r\n\r\n{GOOD[:-1]}, "text": "a\u2028b"}}\r\n'.encode())
    data, report = inputs.read_manifest(audio / "m.json", GOLDEN / "streaming", *streaming)
    assert [labels for _, labels in data] == [[3, 7]] * 2 and not report.names


def test_texts_of_a_manifest(audio, streaming, monkeypatch):
    """A tokenizer gives labels; what it does not know is outside the vocabulary."""
    (audio / "m.json").write_text(
        "\n".join(json.dumps({"audio_filepath": "a.wav", "text": x}) for x in ("ab\u2028", " ", "az"))
    )
    monkeypatch.setattr(inputs, "tokenizer_of", lambda folder: None)
    with pytest.raises(inputs.UserError, match=r"m\.json has texts: they need pip install tokenizers, and .*\.json"):
        inputs.read_manifest(audio / "m.json", GOLDEN / "streaming", *streaming)
    fake = types.SimpleNamespace(
        to_str=lambda: '{"model": {"unk_token": "?"}}',
        token_to_id="?ab".index,
        encode=lambda text, add_special_tokens: types.SimpleNamespace(ids=[max("?ab".find(x), 0) for x in text]),
    )
    monkeypatch.setattr(inputs, "tokenizer_of", lambda folder: fake)
    data, report = inputs.read_manifest(audio / "m.json", GOLDEN / "streaming", *streaming)
    assert [labels for _, labels in data] == [[1, 2]]
    assert list(report.names) == ["empty transcript", "outside the vocabulary"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--output OUT --steps -1", "argument --steps: expected a whole number of 1 or more, got -1"),
        ("--output OUT --batch 0", "argument --batch: expected a whole number of 1 or more, got 0"),
        ("--output OUT --learning-rate nan", "argument --learning-rate: expected a number of 0 or more, got nan"),
        ("--output FULL", "--output must be an empty folder, got "),
        ("--output a.wav", "--output must be a folder, got the file a.wav"),
        ("--output FOLDER --overwrite", "--output must not be the folder that is tuned"),
        ("--output OUT", "m.json has no usable utterance\n"),
    ],
)
def test_options_of_finetune(command, audio, tmp_path, options, message):
    """They are checked before anything is written."""
    (audio / "m.json").write_text("")
    options = options.replace("OUT", str(tmp_path / "new")).replace("FULL", str(GOLDEN))
    status, _, errors = command(f"finetune FOLDER m.json {options}")
    assert status == 2 and message in errors and not (tmp_path / "new").exists()


def test_finetune_command(command, audio, tmp_path, monkeypatch):
    """It writes into a full folder with --overwrite alone, where no other tensors stay, and never a loss of NaN."""
    (audio / "m.json").write_text(f"{GOOD}\n{entry('text.wav', [1])}")
    (tmp_path / "other.safetensors").touch()
    source = shutil.copytree(GOLDEN / "streaming", tmp_path / "source")
    (source / "generation_config.json").unlink()  # some checkpoints have none
    line = f"finetune {source} m.json --steps 1 --overwrite --output {tmp_path}"
    monkeypatch.setattr(commands, "train_step", lambda *_: np.nan)
    status, out, errors = command(line)
    assert status == 2 and errors == "parakeet: step 1: the loss must be finite, got nan; nothing is written\n"
    assert out == "left out, no audio that FFmpeg knows: 1 (text.wav)\n" and not (tmp_path / "config.json").exists()
    monkeypatch.setattr(commands, "train_step", lambda *_: 1.0)
    assert command(line)[0] == 0 and [x.name for x in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    weights.load(tmp_path)


def test_save_refuses(streaming, tmp_path):
    """The folder that it reads, and weights that are not finite."""
    model, _ = weights.load(GOLDEN / "streaming")
    with pytest.raises(ValueError, match="save: folder must not be source"):
        weights.save(model, GOLDEN / "streaming", GOLDEN / "streaming")
    model.joint.output.bias[...] = np.nan
    with pytest.raises(ValueError, match=r"save: joint\.head\.bias must be finite"):
        weights.save(model, tmp_path / "tuned", GOLDEN / "streaming")
    assert not (tmp_path / "tuned").exists()


PAGE = pathlib.Path(__file__).parents[2] / "docs/parakeet.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE) if PAGE.exists() else ()


@SLOW
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_blocks_of_the_page(block, tmp_path, monkeypatch, capsys):
    """As if pasted into a fresh Python in the clone."""
    (tmp_path / "speech/tests").mkdir(parents=True)
    (tmp_path / "speech/tests/golden").symlink_to(GOLDEN)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out
