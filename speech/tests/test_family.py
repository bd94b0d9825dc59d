"""Relatives of the golden models: heads for CTC, archives of NeMo, prompts of languages."""

import io
import json
import pickle
import shutil
import tarfile
import types
import zipfile

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tones import LABELS, recordings

import fastconformer64
from jax_rnnt import decode
from jax_rnnt_speech.data import audio
from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.recognition import recognise, streams, windows
from jax_rnnt_speech.recognition.search import Decoding
from support import GOLDEN, arrays, asr, run
from test_pretrained import padded

HEADS = "decoder.", "encoder_projector.", "joint."


def collapsed(best, blank):
    """(labels, frames) of the best classes of frames."""
    kept = [(int(x), i) for i, x in enumerate(best) if x != blank and (not i or x != best[i - 1])]
    return [x for x, _ in kept], [i for _, i in kept]


def test_search_of_ctc():
    """By hand; parts of a stream give what the whole does, and slots that begin again forget."""
    logits = 3 * np.random.default_rng(0).normal(size=(3, 12, 4)).astype(np.float32)
    lengths = np.array([12, 9, 0])
    whole = jax.device_get(jax.jit(lambda *x: asr.model.ctc.search(*x, 30))(logits, lengths))
    log_probs = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    for i, n in enumerate(lengths):
        labels, frames = collapsed(logits[i, :n].argmax(-1), 3)
        assert whole.labels[i, : whole.counts[i]].tolist() == labels
        assert (whole.labels[i, whole.counts[i] :] == -1).all()
        assert whole.frames[i, : whole.counts[i]].tolist() == frames
        assert whole.durations[i, : whole.counts[i]].sum() == (logits[i, :n].argmax(-1) != 3).sum()
        np.testing.assert_allclose(whole.scores[i], log_probs[i, :n].max(-1).sum(), rtol=1e-5)
    state, labels = None, [[], []]
    for start in (0, 4, 8):
        found = asr.model.ctc.search(logits[:2, start : start + 4], np.clip(lengths[:2] - start, 0, 4), 9, state)
        for i in range(2):
            labels[i] += found.labels[i, : found.counts[i]].tolist()
        state = found.state
    assert labels == [whole.labels[i, : whole.counts[i]].tolist() for i in range(2)]
    np.testing.assert_allclose(found.scores, whole.scores[:2], rtol=1e-5)
    again = asr.model.ctc.search(logits[:2], lengths[:2], 30, decode.reset_streams(state, np.ones(2, bool)))
    np.testing.assert_array_equal(again.labels, whole.labels[:2])


def relative(folder, name, golden, left=()):
    """(a folder of Hugging Face with some tensors of a golden model and its own ones, what `transformers` found)."""
    shutil.copytree(GOLDEN / golden, folder)
    shutil.copy(GOLDEN / f"{name}.json", folder / "config.json")
    found = {k.removeprefix(f"{name}/"): x for k, x in arrays(GOLDEN / "relatives.npz").items() if k.startswith(name)}
    tensors = asr.pretrained.files.read_tensors(folder)
    tensors = {k: x for k, x in tensors.items() if not k.startswith(left)}
    tensors |= {k.removeprefix("tensor:"): x for k, x in found.items() if k.startswith("tensor:")}
    save_file({k: np.array(x, np.float32) for k, x in tensors.items()}, folder / "model.safetensors")
    return folder, found


@pytest.fixture
def ctc(tmp_path):
    """A folder of Parakeet CTC, with the encoder of the golden TDT, and what `transformers` makes of it."""
    return relative(tmp_path / "ctc", "ctc", "tdt", HEADS)


@pytest.mark.slow
def test_parakeet_ctc(ctc, tmp_path, refused):
    """Losses, labels and frames of `transformers`; what is written is what was read; options that it has not."""
    ctc, golden = ctc
    model, tensors = asr.models.open_model(ctc), load_file(ctc / "model.safetensors")
    x, lengths = padded(model)

    @jax.jit
    def compute(params):
        network = model.network(params)
        encoded = model.encoded(network, x, {"lengths": lengths} | LABELS)
        return model.variant.compute(None, network, encoded, False), encoded.frame_lengths

    losses, counts = compute(model.params)
    np.testing.assert_allclose(losses, golden["loss"], rtol=1e-5)
    for x, best, n in zip(recognise.transcribe(model, enumerate(recordings())), golden["best"], counts):
        assert (list(x.labels), list(x.frames)) == collapsed(best[:n], 19) and x.labels
    run(["convert", tmp_path / "again", "--model", ctc])
    for name, x in load_file(tmp_path / "again/model.safetensors").items():
        if "conv.norm" not in name:
            np.testing.assert_array_equal(x, tensors[name], err_msg=name)
    audio.write(tmp_path / "a.wav", recordings()[0], 16000)
    for more, message in ((["--beam", "2"], "greedy search alone"), (["--head", "transducer"], "no such head"),
                          (["--prompt", "de"], "knows no prompts")):  # fmt: skip
        refused(["transcribe", "--model", ctc, tmp_path / "a.wav", *more], message)


@pytest.mark.slow
def test_beams_of_tdt_lose_no_words():
    """Long blanks have few factors; still the best hypothesis beats greedy's, and none is silent but by the loss."""
    model = asr.models.open_model(GOLDEN / "tdt")
    model.config = model.config.replace(duration_choice="pair")
    x, lengths = padded(model)
    heard = windows.window(model, model.params, x, lengths, np.zeros(3, np.int32))
    greedy, *_ = windows.taken(model, model.params, *heard)
    silence = {"lengths": lengths, "targets": np.zeros((3, 1), np.int32), "target_lengths": np.zeros(3, np.int32)}
    network = model.network(model.params)
    silent = -model.variant.compute(model.loss, network, model.encoded(network, x, silence), False)
    for width in (2, 8):
        best, *_ = windows.taken(model, model.params, *heard, None, Decoding(beam=width))
        assert (best.scores >= greedy.scores - 1e-4).all() and ((best.counts > 0) | (best.scores <= silent)).all()


def changed(path, fields, weights=None):
    """The golden hybrid with other fields in parts of its configuration, or other weights, a pickle of these."""
    with tarfile.open(GOLDEN / "hybrid.nemo") as old, tarfile.open(path, "w") as new:
        for member in old:
            x = old.extractfile(member).read() if member.isfile() else b""
            if member.name.endswith(".yaml"):
                whole = yaml.safe_load(x)
                whole |= {k: whole.get(k, {}) | y if isinstance(y, dict) else y for k, y in fields.items()}
                x = yaml.safe_dump(whole).encode()
            elif weights is not None and member.name.endswith(".ckpt"):
                out = io.BytesIO()
                with zipfile.ZipFile(out, "w") as file:
                    file.writestr("model_weights/data.pkl", pickle.dumps(weights))
                x = out.getvalue()
            member.size = len(x)
            new.addfile(member, io.BytesIO(x))


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("eou", marks=pytest.mark.slow)])
def test_archives_of_nemo(kind):
    """Logits, labels and those of a head for CTC are what NeMo computed; a stream has them too, and ends at <EOU>."""
    golden = {k.removeprefix(f"{kind}/"): x for k, x in arrays(GOLDEN / "archives.npz").items() if k.startswith(kind)}
    model = asr.models.open_model(GOLDEN / f"{kind}.nemo")
    x, lengths = padded(model)

    @jax.jit
    def compute(params):
        network = model.network(params)
        rows, counts = network.encode(x, lengths)
        logits = network.joint(rows[:, :, None], network.predictor(LABELS["targets"][:, :2] % 17)[:, None])
        return rows, counts, logits, network.ctc(rows).argmax(-1) if model.config.objective.ctc else None

    rows, counts, logits, best = jax.device_get(compute(model.params))
    np.testing.assert_array_equal(counts, golden["lengths"])
    for i, n in enumerate(counts):
        np.testing.assert_allclose(logits[i, :n], golden["logits"][i, :n], rtol=0, atol=2e-5)
    labels = [golden[f"labels{i}"].tolist() for i in range(3)]
    if kind == "hybrid":
        found, *_ = windows.taken(model, model.params, rows, counts)
        assert [x[:n].tolist() for x, n in zip(np.array(found.labels), found.counts)] == labels
        assert [model.text(x, n) for x, n in zip(found.labels, found.counts)] == golden["texts"].tolist()
        for i, n in enumerate(counts):
            np.testing.assert_array_equal(best[i, :n], golden["ctc"][i, :n])
        assert model.config.objective.ctc == 0.3 and model.config.head.durations == (0, 1, 2, 3, 4)
        return
    slots, end = streams.Slots(model), model.tokens.pieces.index("<EOU>")
    for samples, expected in zip(recordings(), labels):
        live, found, ends = streams.Stream(model, slots=slots), [], 0
        slots.free.append(live.slot)
        for step in live.steps(samples, end=True):
            ((part, *rest),) = slots.run([step])
            found, ended = found + part.labels, end in part.labels
            assert streams.finished(live.taking(part, *rest))[1] == ended
            ends += ended
        assert found == expected and (ends > 0) == (end in expected)


SEVERAL = {"att_context_style": "chunked_limited_with_rc", "att_context_size": [-1, -1], "conv_context_style": "dcc",
           "att_chunk_context_size": [[4], [1, 2, 3], [0, 1, 2]]}  # fmt: skip


def test_an_archive_of_several_contexts(tmp_path):
    """Rows in float64 of NumPy: of the whole, which are NeMo's, and in contexts."""
    weights = {"loss": {"loss_name": "default", "offline_loss_weight": 0.3, "streaming_loss_weight": 0.7}}
    for more, share in (({}, 0.5), (weights, 0.3)):
        changed(tmp_path / "b.nemo", {"encoder": SEVERAL | {"att_context_size": [[-1, -1, -1]]}} | more)
        assert asr.models.config_of(tmp_path / "b.nemo")[0].encoder.whole == share
    model, golden = asr.models.open_model(tmp_path / "b.nemo"), arrays(GOLDEN / "archives.npz")
    encoder = model.config.encoder
    assert (encoder.past, encoder.chunk, encoder.ahead, model.chunk) == (4, (1, 2, 3), (0, 1, 2), 0)
    tensors = {k: np.float64(x) for k, x in asr.models.nemo.weights_of(tmp_path / "b.nemo").items()}
    x, lengths = padded(model)
    run = jax.jit(lambda x, lengths, context: model.network(model.params).encode(x, lengths, context))
    for context in (contexts.WHOLE, *(contexts.Context(4, a, b, c) for a, b, c in ((1, 0, 0), (2, 2, 0), (3, 1, 2)))):
        rows, counts = jax.device_get(run(x, lengths, contexts.Context(*map(np.int32, context))))
        np.testing.assert_array_equal(counts, golden["hybrid/lengths"])
        for i, n in enumerate(counts):
            expected = fastconformer64.rows(tensors, x[i, : lengths[i]], 4, *context)
            np.testing.assert_allclose(rows[i, :n], expected, rtol=0, atol=2e-5)


def test_other_archives(tmp_path, said):
    """What is not read is said in words; a model of characters has its labels in the configuration."""
    for fields, weights, message in (
        ({"encoder": {"self_attention_model": "abs_pos"}}, None, "encoder.self_attention_model must be rel_pos"),
        (
            {"encoder": SEVERAL | {"att_chunk_context_size": [[70], [0], [1]]}},
            None,
            "att_chunk_context_size must be three",
        ),
        ({"encoder": SEVERAL | {"conv_context_style": "x"}}, None, "encoder.conv_context_style must be dcc, got 'x'"),
        ({"encoder": SEVERAL | {"att_context_size": [70, 1]}}, None, "encoder.att_context_size must be [-1, -1]"),
        ({"preprocessor": {"normalize": "NA"}}, None, "preprocessor.normalize must be per_feature, got 'NA'"),
        ({"joint": {"jointnet": {"joint_hidden": 3}}}, None, "joint.jointnet.joint_hidden must be 12, got 3"),
        ({"decoding": None}, None, "b.nemo: model_config.yaml must be the configuration of a model: 'NoneType'"),
        ({}, [1], "b.nemo: model_weights.ckpt must be a checkpoint of PyTorch: 'list' object"),
        ({}, {"x": types.SimpleNamespace}, "its weights name types.SimpleNamespace, which is no tensor"),
        ({}, {}, "has no tensor"),
    ):
        changed(tmp_path / "b.nemo", fields, weights)
        assert message in said(["transcribe", "--model", tmp_path / "b.nemo", "a.wav"], 2).err
    changed(tmp_path / "b.nemo", {"tokenizer": None, "labels": [*"ABCDEFGHIJKLMNOPQ"]})
    assert asr.models.open_model(tmp_path / "b.nemo").tokens.encode("BAD") == [1, 0, 3]


@pytest.mark.slow
def test_prompts(tmp_path):
    """Logits of `transformers` for a language each; the usual one is auto."""
    folder, golden = relative(tmp_path / "prompted", "prompted", "streaming")
    sounds = json.loads((folder / "preprocessor_config.json").read_text())
    processor = {"feature_extractor": sounds, "prompt_dictionary": {"de-DE": 1, "auto": 2}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    model = asr.models.open_model(folder)
    assert [model.language(x) for x in ("0", "de-DE", "")] == [0, 1, 2]
    x, lengths = padded(model)

    @jax.jit
    def compute(params):
        network = model.network(params)
        rows, counts = network.encode(x, lengths)
        row = network.predictor(np.zeros((3, 0), np.int32))
        told = (model.prompted(network, rows, i) for i in range(3))
        return [network.joint(x, row)[i] for i, x in enumerate(told)], counts

    for logits, n, expected in zip(*compute(model.params), golden["logits"], strict=True):
        np.testing.assert_allclose(logits[:n], expected[:n], rtol=0, atol=1e-4)
    with pytest.raises(asr.system.UserError, match="--prompt xx: expected one of de-DE, auto, or a number below 3"):
        model.language("xx")
    for language in (0, 1):
        (x,) = recognise.transcribe(model, [("", recordings()[0])], Decoding(language=language))
        assert not x.error and x.duration > 1
