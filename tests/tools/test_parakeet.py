"""Does examples/parakeet compute what `transformers` computed for golden/, with padding, in training and in streams?"""

import importlib
import json
import pathlib
import shutil
import sys
import wave

import jax
import numpy as np
import pytest

from jax_rnnt import decode

nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")
pytest.importorskip("safetensors")

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
finetune, recordings, transcribe, weights = (
    importlib.import_module(f"parakeet.{name}") for name in ("finetune", "recordings", "transcribe", "weights")
)
LogMel, reduced = weights.LogMel, importlib.import_module("parakeet.model").reduced
sys.path.remove(str(EXAMPLES))

GOLDEN = EXAMPLES / "parakeet" / "golden"
SLOW = pytest.mark.slow
KINDS = pytest.param("rnnt", marks=SLOW), "tdt", "streaming"
TARGETS, TARGET_LENGTHS = recordings.LABELS["targets"], recordings.LABELS["target_lengths"]
NEAR = {"atol": 1e-4, "rtol": 0}


@pytest.fixture(autouse=True)
def flax_promotion():
    """Flax promotes implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


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
        for found in (tiles, direct):
            np.testing.assert_allclose(
                reduced(found, TARGET_LENGTHS, reduction), golden[f"loss_{reduction}"], rtol=1e-5
            )
    for own, theirs in (("mean", "mean_batch"), ("sum", "sum")):
        value = model.criterion(reduction=own)(arrays, TARGETS, lengths, TARGET_LENGTHS)
        np.testing.assert_allclose(value, golden[f"loss_{theirs}"], rtol=1e-5)


def test_transcripts(case):
    """Labels and frames of `generate`; an utterance without a frame has no labels."""
    _, model, extractor, golden, (features, feature_lengths) = case
    found = transcribe.transcribe(model, extractor, recordings.recordings())
    width = golden["labels"].shape[1]
    np.testing.assert_array_equal(found.labels[:, :width], golden["labels"])
    np.testing.assert_array_equal(found.frames[:, :width], golden["frames"])
    np.testing.assert_array_equal(found.counts, (golden["labels"] >= 0).sum(1))
    rows, _ = transcribe.encode(model, features, np.array([0, *feature_lengths[1:]]))
    assert np.isfinite(rows[1:, :8]).all()


def test_rule_of_durations():
    """The golden labels tell the rule of `transformers` from that of most probable pairs."""
    _, model, _, golden, batch = loaded("tdt")
    inputs = model.decoder_inputs(*transcribe.encode(model, *batch))
    found = decode.greedy(model.criterion(), *inputs, 40, max_symbols=40)
    assert (found.labels[:, : golden["labels"].shape[1]] != golden["labels"]).any()


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
    found = {}
    weights.each(gradient, lambda path, x: found.update({path: x}))
    for path, tensor in (
        ("joint.encoder.kernel", "encoder_projector.weight"),
        ("joint.output.bias", "joint.head.bias"),
        ("encoder.layers0.self_attn.relative_k_proj.kernel", "encoder.layers.0.self_attn.relative_k_proj.weight"),
    ):
        expected = golden[f"gradient:{tensor}"]
        np.testing.assert_allclose(found[path].T, expected, atol=2e-5 * abs(expected).max(), err_msg=path)


@pytest.mark.slow
def test_fine_tuning(tmp_path):
    """Ten steps of finetune.py lower the loss, in tiles too; the tuned checkpoint loads again."""
    _, model, extractor, _, _ = loaded("tdt")
    lines = []
    for i, x in enumerate(recordings.recordings()):
        with wave.open(str(tmp_path / f"{i}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes((np.clip(x, -1, 1) * 32767).astype("<i2").tobytes())
        labels = TARGETS[i, : TARGET_LENGTHS[i]].tolist()
        lines.append(json.dumps({"audio_filepath": f"{i}.wav", "labels": labels}))
    (tmp_path / "manifest.json").write_text("\n".join(lines))
    data = finetune.read_manifest(tmp_path / "manifest.json", GOLDEN / "tdt", 16000)
    batch = finetune.batched(extractor, *zip(*data))
    assert batch[0].shape == (3, 128, 16) and batch[2].shape == (3, 8)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    model.train()
    found = [float(finetune.train_step(model, optimizer, *batch)) for _ in range(10)]
    assert found[-1] < 0.8 * found[0]
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
    for found in transcribe.stream(model, extractor, recordings.recordings()[0][: 105 * 160]):
        labels += transcribe.labels_of(found)[0]
        places += np.asarray(found.frames)[0, : int(found.counts[0])].tolist()
    np.testing.assert_array_equal(labels, golden["stream_labels"])
    np.testing.assert_array_equal(places, golden["stream_frames"])


def test_messages(tmp_path):
    """A missing tensor, one too many, another model and a wrong part are named."""
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
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "parakeet_ctc"}))
    with pytest.raises(ValueError, match="got 'parakeet_ctc'"):
        weights.load(folder)
    model, _ = weights.load(GOLDEN / "tdt")
    with pytest.raises(ValueError, match="must be causal"):
        model.encoder.stream(np.zeros((1, 9, 16)))
    model, _ = weights.load(GOLDEN / "streaming")
    with pytest.raises(ValueError, match="must have 9 frames, got 16"):
        model.encoder.stream(np.zeros((1, 16, 16)))
