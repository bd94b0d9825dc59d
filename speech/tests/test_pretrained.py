"""Do pretrained models compute what other programs computed for golden: padded, in gradients, searches and streams?"""

import dataclasses
import functools
import itertools
import json
import pathlib
import re

import chex
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from tones import LABELS, recordings

from jax_rnnt_speech.data import audio, corpora, features, utterances
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.model.encoders import base, fastconformer
from jax_rnnt_speech.recognition import streams, windows
from jax_rnnt_speech.training import objective
from support import GOLDEN, arrays, asr, run

SLOW = pytest.mark.slow
KINDS = pytest.param("rnnt", marks=SLOW), "tdt", "streaming"
TARGETS, TARGET_LENGTHS = LABELS["targets"], LABELS["target_lengths"]
NEAR = {"atol": 1e-4, "rtol": 0}
hugging_face, recognise = asr.models.hugging_face, asr.recognition.recognise


def padded(model):
    """Features [B, T, F] of the golden recordings, and their lengths [B]."""
    rows = [model.features(x) for x in recordings()]
    lengths = np.array([len(x) for x in rows])
    return np.stack([np.pad(x, ((0, lengths.max() - len(x)), (0, 0))) for x in rows]), lengths


@pytest.fixture(scope="module", params=KINDS)
def case(request):
    """(model, golden arrays, features [B, T, F] and their lengths [B])."""
    model = asr.models.open_model(GOLDEN / request.param)
    return model, arrays(GOLDEN / request.param / "golden.npz"), *padded(model)


def frames_of(x, lengths):
    """The frames inside the lengths."""
    return np.asarray(x)[:, : max(lengths)][np.arange(max(lengths)) < np.asarray(lengths)[:, None]]


def test_features(case):
    model, golden, x, lengths = case
    np.testing.assert_array_equal(lengths, golden["feature_lengths"])
    np.testing.assert_allclose(x, golden["features"][:, : lengths.max()], **NEAR)
    assert not golden["features"][:, lengths.max() :].any()
    on_device = jax.jit(lambda x: model.extractor(x, jax.numpy))(recordings()[0])
    np.testing.assert_allclose(on_device, x[0], atol=1e-3)


def test_features_of_128_bins():
    config = asr.config.Config.from_options(features="nemo", mels=128)
    expected = arrays(GOLDEN / "features128.npz")["features"]
    results = features.extractor(config)(recordings()[2][:3000])
    np.testing.assert_allclose(results, expected[0, : len(results)], **NEAR)


def test_rows_logits_and_losses(case):
    """To 1e-4, whatever the padding holds; every reduction of `transformers`; in tiles, as an array, in two parts."""
    model, golden, x, lengths = case
    inside = np.arange(x.shape[1]) < lengths[:, None]
    x = np.pad(np.where(inside[..., None], x, np.nan), [(0, 0), (0, 20), (0, 0)], constant_values=np.nan)
    batch = {"lengths": lengths, "targets": TARGETS, "target_lengths": TARGET_LENGTHS}

    @jax.jit
    def compute(params):
        network = model.network(params)
        encoded = model.encoded(network, x, batch)
        lower = network.encoder.lower(x, lengths, 1)
        parts, counts = network.encoder.upper(lower, network.encoder.lengths(lengths), 1)
        values = (model.variant.compute(model.loss, network, encoded, tiles) for tiles in (True, False))
        logits = network.joint(encoded.frames[:, :, None], encoded.states[:, None])
        return encoded.frames, encoded.frame_lengths, parts, counts, logits, *values

    rows, counts, parts, again, logits, *values = compute(model.params)
    np.testing.assert_array_equal(counts, golden["lengths"])
    np.testing.assert_array_equal(again, golden["lengths"])
    for results in (rows, parts):
        np.testing.assert_allclose(frames_of(results, counts), frames_of(golden["rows"], counts), **NEAR)
    np.testing.assert_allclose(frames_of(logits, counts), frames_of(golden["logits"], counts), **NEAR)
    for results in values:
        reduced = {"none": results, "sum": results.sum(), "mean_batch": results.mean()}
        reduced |= {"mean": (results / TARGET_LENGTHS).mean(), "mean_volume": results.sum() / TARGET_LENGTHS.sum()}
        for name, x in reduced.items():
            np.testing.assert_allclose(x, golden[f"loss_{name}"], rtol=1e-5)


def test_transcripts(case):
    """Labels and frames of `generate`, from floats or integers; nothing gives nothing."""
    model, golden, _, _ = case
    loud = [np.round(x * 2**14) / 2**15 for x in recordings()]
    whole = [*enumerate(recordings()), ("loud", loud[0]), ("int", (loud[0] * 2**15).astype(np.int16))]
    *results, floats, integers = recognise.transcribe(model, [*whole[:3], ("", np.zeros(0)), *whole[3:]])
    assert results.pop() == asr.recognition.results.Result("", "", *asr.recognition.results.no_labels())
    assert floats.labels == integers.labels
    for x, labels, frames in zip(results, golden["labels"], golden["frames"], strict=True):
        assert x.labels == labels[labels >= 0].tolist() and x.frames == frames[labels >= 0].tolist()
    assert list(recognise.transcribe(model, [])) == []
    (bad,) = recognise.transcribe(model, [("x.wav", 2**15 * loud[0])])
    assert bad.error.startswith("x.wav: samples far beyond full scale") and not bad.text


# Nats between a choice and the next best one, which products in bfloat16 may exchange: docs/speech/difficult.md.
MARGIN = 0.25


def cuts(count):
    """Parts of the golden recordings, louder and softer."""
    rng = np.random.default_rng(1)
    for x in itertools.islice(itertools.cycle(recordings()), count):
        start, size = rng.integers(len(x) - 8000), rng.integers(6000, 8000)
        yield x[start : start + size] * np.float32(rng.uniform(0.3, 1.5))


def choices(model, samples, results):
    """Of each recording, (labels before it, nats to the next best one) of each choice that greedy search makes.

    By a walk of its own over the logits of all nodes, which finds the same labels.
    """
    features, room = [model.features(x) for x in samples], max(len(x.labels) for x in results)
    size, classes, limit = max(map(len, features)), model.blank + 1, model.config.search.max_symbols

    @jax.jit
    def nodes(x, length, labels):
        network = model.network(model.params)
        rows, (count,) = network.encode(x[None], length[None])
        return network.joint(rows[:, :, None], network.predictor(labels[None])[:, None])[0], count

    for x, result in zip(features, results, strict=True):
        labels = np.int32(np.pad(result.labels, (0, room - len(result.labels))))
        logits, count = nodes(np.pad(x, ((0, size - len(x)), (0, 0))), np.int32(len(x)), labels)
        found, t, here, known = [], 0, 0, []
        while t < count:
            row = np.asarray(logits[t, len(found)], np.float64)
            parts = [y for y in (row[:classes], row[classes:]) if len(y)]
            known += [(len(found), np.diff(np.sort(y)[-2:])[0]) for y in parts]
            label, *durations = (int(y.argmax()) for y in parts)
            blank = label == model.blank
            found += [] if blank else [label]
            step = model.variant.loss.durations[durations[0]] if durations else int(blank or here + 1 == limit)
            step = max(step, int(blank))
            here, t = 0 if step else here + 1, t + step
        assert found == result.labels
        yield known


@pytest.mark.slow
def test_products_in_bfloat16(case):
    """Where labels are not those of float32, the first choice that differs was a close one."""
    model, samples = case[0], [*cuts(12)]
    other = asr.models.computing(model, "bfloat16")
    results = [list(recognise.transcribe(x, enumerate(samples))) for x in (model, other)]
    for known, a, b in zip(choices(model, samples, results[0]), *results, strict=True):
        if a.labels != b.labels:
            pairs = [zip(x.labels, x.frames) for x in (a, b)]
            same = sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(*pairs)))
            assert min(nats for count, nats in known if count in (same - 1, same)) < MARGIN
        assert a.log_probs != b.log_probs and np.isclose(a.log_probs[:1], b.log_probs[:1], atol=0.2)


@pytest.fixture(scope="module")
def streaming():
    return asr.models.open_model(GOLDEN / "streaming")


KEYS = "layers.0.self_attn.relative_k_proj"
GRADIENTS = {"joint.encoder.kernel": "encoder_projector.weight", "joint.output.bias": "joint.head.bias"}
GRADIENTS |= {f"encoder.blocks.{KEYS}.kernel": f"encoder.{KEYS}.weight"}


@pytest.mark.slow
def test_gradients(streaming):
    """Loss and gradients of a training step, without dropout, of single blocks and of scanned ones."""
    golden = arrays(GOLDEN / "streaming/golden.npz")
    batch = LABELS | dict(zip(("features", "lengths"), padded(streaming)))
    batch |= {"valid": np.ones(3, bool), "spans": np.zeros((3, 4, 2), np.int32)}
    for way in ({}, {"scan": True, "remat": True}):
        config = streaming.config.replace(**way)
        one = Model(config, streaming.tokens, streaming.mean, streaming.deviation, streaming.source)
        parts = asr.training.parts.Parts(config, streaming.params)
        loss_of = lambda free, one=one, parts=parts: objective.mean_loss(one, parts.whole(free), batch, 1)
        loss, gradient = jax.jit(jax.value_and_grad(loss_of))(parts.free(streaming.params))
        np.testing.assert_allclose(loss, golden["train_loss"], rtol=1e-5)
        results = {}
        asr.pretrained.files.mapped(parts.whole(gradient), lambda path, x, into=results: into.update({path: x}) or x)
        for path, tensor in GRADIENTS.items():
            expected = golden[f"gradient:{tensor}"]
            np.testing.assert_allclose(results[path].T, expected, atol=2e-5 * abs(expected).max(), err_msg=path)


@pytest.mark.parametrize("kind", ["parakeet_encoder", "nemotron_asr_streaming_encoder"])
def test_subsampling_by_channels(kind, monkeypatch):
    """Rows and gradients are those of XLA's convolutions of all channels; the largest array has those of a group."""
    config = fastconformer.EncoderConfig(kind, 6, subsampling_factor=4, subsampling_conv_channels=12, num_mel_bins=9)
    config = dataclasses.replace(config, dropout=0.0)
    module = fastconformer.Subsampling(config, dtype=np.float32, rngs=nnx.Rngs(0))
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    rng, lengths = np.random.default_rng(0), np.array([23, 14, 1, 0])
    parameters = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), parameters)
    x, probe = np.float32(rng.normal(size=(4, 23, 9))), np.float32(rng.normal(size=(4, 7, 6)))

    def grouped(parameters):
        rows, _ = nnx.merge(graph, parameters, rest)(x, lengths, None)
        return (rows * probe[:, : rows.shape[1]]).sum(), rows

    def at_once(parameters):
        inside = lambda y, count: y * (np.arange(y.shape[1]) < count[:, None])[..., None, None]
        model, count, y = nnx.merge(graph, parameters, rest), lengths, inside(x[..., None], lengths)
        layer = model.layers0
        for module, groups in ((model.conv_in, 1), (layer.depthwise_conv, 12)):
            kernel = module.kernel[...].reshape(3, 3, 1, 12)
            options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
            y = jax.lax.conv_general_dilated(y, kernel, (2, 2), [config.margins] * 2, **options) + module.bias[...]
            count = np.ceil(count / 2) if not config.causal else np.floor(count / 2) + (count > 0)
            y = y if groups > 1 else inside(jax.nn.relu(y), count)
        y = inside(jax.nn.relu(y @ layer.pointwise_conv.kernel[...] + layer.pointwise_conv.bias[...]), count)
        rows = 6**0.5 * (y.reshape(*y.shape[:2], -1) @ model.linear.kernel[...] + model.linear.bias[...])
        return (rows * probe[:, : rows.shape[1]]).sum(), rows

    monkeypatch.setattr(fastconformer, "GROUP", 2)
    step = jax.jit(jax.grad(grouped, has_aux=True))
    results, expected = step(parameters), jax.jit(jax.grad(at_once, has_aux=True))(parameters)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-4), results, expected)
    shapes = re.findall(r"tensor<([\dx]+)xf32>", step.lower(parameters).as_text())
    shapes = {tuple(map(int, x.split("x"))) for x in shapes}
    assert max(map(np.prod, shapes)) < 4 * 12 * 5 * 12  # what conv_in makes


class Layer(nnx.Module):
    def __init__(self):
        self.norm = fastconformer.BatchNorm(4, dtype=np.float32, rngs=None)
        self.norm.use_running_average = False

    def __call__(self, rows, lengths, past):
        return self.norm(rows, lengths), past


def test_statistics_of_batches():
    """Two recomputed, scanned batch norms in float64 of NumPy: of valid frames alone, on one device and on eight."""
    rng = np.random.default_rng(0)
    x, probe, lengths = rng.normal(3, 2, (8, 5, 4)), rng.normal(size=(8, 5, 4)), np.array([5, 3, 0, 1, 5, 2, 4, 5])
    graphs, states = zip(*(nnx.split(Layer()) for _ in range(2)))

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def step(states, x, lengths):
        layers = [nnx.merge(graph, state) for graph, state in zip(graphs, states)]
        rows, _ = base.scanned(layers, x, lengths, [np.zeros(1)] * 2, remat=True)
        return (rows * probe).sum(), rows

    for devices in (1, 8):
        place = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), PartitionSpec("data"))
        gradients, rows = step(states, *jax.device_put((np.float32(x), lengths), place))
        expected, valid = x, np.arange(5) < lengths[:, None]
        for one in gradients:
            frames = expected[valid]
            np.testing.assert_allclose(one["norm"]["mean"][...], 0.1 * frames.mean(0), atol=1e-6)
            np.testing.assert_allclose(one["norm"]["var"][...], 0.9 + 0.1 * frames.var(0, ddof=1), atol=1e-6)
            expected = (expected - frames.mean(0)) / np.sqrt(frames.var(0) + 1e-5)
        np.testing.assert_allclose(one["norm"]["scale"][...], (probe * expected).sum((0, 1)), rtol=1e-4)
        np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_stream(streaming):
    """Labels and frames are those of `transformers`, and at every length those of the whole recording.

    First steps have another size; slots are used again.
    """
    golden, slots = arrays(GOLDEN / "streaming/golden.npz"), streams.Slots(streaming, 2)
    full = recordings()[0][: 105 * 160]
    for samples in (full, *recordings(), full[: 97 * 160], full[:100]):
        live, seen = streams.Stream(streaming, slots=slots), []
        found = asr.recognition.results.no_labels()
        slots.free.insert(0, live.slot)
        for i, piece in enumerate(np.array_split(samples, [1, 2, 3001, 9000])):
            for step in live.steps(piece, end=i == 4):
                seen.append(step.x[: step.count])
                found.extend(slots.run([step])[0][0])
        (whole,) = recognise.transcribe(streaming, [("", samples)])
        np.testing.assert_allclose(np.concatenate([np.zeros((0, 16)), *seen]), streaming.features(samples), atol=1e-4)
        assert (found.labels, found.frames) == (list(whole.labels), list(whole.frames))
        if samples is full:
            assert found.labels == golden["stream_labels"].tolist() and found.frames == golden["stream_frames"].tolist()


def test_start(tmp_path):
    """Weights decide options, which others may not contradict; a new head keeps the encoder."""
    options = {"train": "t", "valid": "v", "init": str(GOLDEN / "streaming")}
    config = asr.config.Config.from_options(**asr.models.completed(options)).checked()
    assert config.features.mels == 16 and config.encoder.chunk == 2
    assert config.head.stack == 0 and config.head.predictor_layers == 2
    for more, message in (
        ({"mels": 80}, "--mels 80: .* has 16$"),
        ({"predictor": "stateless"}, "--predictor stateless: .* has lstm: --new-head allows that"),
    ):
        with pytest.raises(asr.system.UserError, match=message):
            asr.models.completed(options | more)
    sizes = {"stack": 2, "width": 8, "heads": 2, "blocks": 1, "row_dropout": 0.5}
    config = asr.config.Config.from_options(**asr.models.completed(options | {"new_head": True} | sizes)).checked()
    corpus = corpora.Recordings.__new__(corpora.Recordings)
    corpus.utterances, corpus.features = [utterances.Utterance("a", 9, "A B")], 16
    model, start = asr.models.fresh(config, corpus), asr.models.read(GOLDEN / "streaming")
    chex.assert_trees_all_equal(*(x.params["encoder"] for x in (model, start)))
    assert (model.subsampling, model.chunk, model.tokens.pieces) == (16, 0, [" ", "A", "B"])
    x, lengths = np.zeros((2, 108, 16), np.float32), np.array([108, 80])
    rows, counts = jax.jit(lambda params: model.network(params).encode(x, lengths))(model.params)
    assert rows.shape == (2, 8, 8) and counts.tolist() == [8, 6]  # of 15 and 12
    dropped = model.network(model.params, 1).head.dropout(np.ones((99, 99)))
    assert abs(np.mean(dropped == 0) - 0.5) < 0.03


@pytest.mark.slow
def test_fine_tuning(tmp_path, capsys, monkeypatch, said):
    """Steps lower the loss of the old head, and what comes out transcribes."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for i, x in enumerate(recordings()):
        audio.write(tmp_path / f"{i}.wav", x, 16000)
        text = " ".join(map(str, TARGETS[i, : TARGET_LENGTHS[i]]))
        lines.append(json.dumps({"audio_filepath": f"{i}.wav", "text": text}))
    for name in ("m.json", "again.json"):  # to learn by heart
        (tmp_path / name).write_text("\n".join(lines))
    more = {"steps": 20, "learning_rate": 1e-2, "time_masks": 0, "mel_masks": 0, "batch": 3, "devices": 1}
    more |= {"log_every": 1, "batch_norm": "batch"}
    options = [x for name, value in more.items() for x in (f"--{name.replace('_', '-')}", value)]
    options += ["--train", "m.json", "--valid", "again.json", "--init", GOLDEN / "tdt"]
    for frozen, message in (
        ("encoder", "--batch-norm batch needs its batch norms: --freeze encoder must be encoder:N"),
        ("encoder:2", "--batch-norm batch: --freeze encoder:2 leaves no batch norm to train"),
    ):
        assert message in said(["train", "--workdir", "bad", *options, "--freeze", frozen], 2).err
    run(["train", "--workdir", "w", *options])
    losses = [json.loads(x).get("loss") for x in pathlib.Path("w/metrics.jsonl").read_text().splitlines()]
    assert losses[19] < 0.8 * losses[0] and "held-out CER" in capsys.readouterr().out
    run(["convert", "again", "--model", "w"])
    old, new = (load_file(folder / "model.safetensors") for folder in (GOLDEN / "tdt", pathlib.Path("again")))
    assert all((new[name] != x).any() for name, x in old.items() if "running" in name)
    head = ["--new-head", "--stack", 2, "--width", 8, "--heads", 2, "--blocks", 1, "--batch-norm", "frozen"]
    run(["train", "--workdir", "r", *options, *head, "--freeze", "encoder:1", "--steps", 4, "--buckets", 3])
    stacked = [json.loads(x).get("loss") for x in pathlib.Path("r/metrics.jsonl").read_text().splitlines()]
    assert max(stacked[:2]) > 1  # of an epoch: batches into which no rows fit have the loss 0


def test_tokenizer(tmp_path):
    """Its labels, and None for what it does not know."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens = asr.data.tokens.from_json(asr.data.tokens.Pretrained(tokenizer.to_str(), 3).to_json())
    assert tokens.encode("a b") == [1, 2] and tokens.encode("a z") is None and tokens.labels == [None, "a", "b"]
    assert tokens.decode([1, 2]) == "a b"
    numbers = asr.data.tokens.from_json(asr.data.tokens.Numbers(5).to_json())
    assert numbers.encode("3 1") == [3, 1] and numbers.encode("5") is numbers.encode("x") is None


def test_batches_of_recordings(streaming, monkeypatch):
    """Results do not depend on who is in the batch, nor on how many recordings are held."""
    many = [(str(i), x[:n]) for i, (x, n) in enumerate((x, n) for n in (4000, 9600, 7000) for x in recordings())]
    whole = list(recognise.transcribe(streaming, many))
    assert [x.name for x in whole] == [name for name, _ in many]
    for module, name, size in (
        (recognise, "HELD", 100),
        (windows, "BATCHES", {"cpu": windows.BATCHES["cpu"]._replace(frames=512)}),
        (windows, "BATCHES", {}),
    ):
        monkeypatch.setattr(module, name, size)
        for a, b in zip(whole, recognise.transcribe(streaming, many), strict=True):
            assert (a.name, a.labels, a.frames, a.duration) == (b.name, b.labels, b.frames, b.duration)
        monkeypatch.undo()


PAGE = pathlib.Path(__file__).parents[2] / "docs/speech/parakeet.md"
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
