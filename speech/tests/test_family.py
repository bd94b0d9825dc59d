"""Relatives of the golden models: heads for CTC, archives of NeMo, prompts of languages."""

import collections
import dataclasses
import io
import json
import pickle
import shutil
import sys
import tarfile
import types
import zipfile

import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from tones import LABELS, recordings

from support import arrays, asr, run
from test_pretrained import GOLDEN, padded

LETTERS = "ABCDEFGHIJKLMNOPQRS"  # 19 labels
HEADS = "decoder.", "encoder_projector.", "joint."
NEMO = {  # parts of names of `transformers`
    "subsampling.linear": "pre_encode.out", "subsampling.layers": "pre_encode.conv", ".conv.norm.": ".conv.batch_norm.",
    "relative_k_proj": "linear_pos", "q_proj": "linear_q", "k_proj": "linear_k", "v_proj": "linear_v",
    "o_proj": "linear_out", "self_attn.bias_": "self_attn.pos_bias_", "decoder.decoder_projector": "joint.pred",
    "encoder_projector": "joint.enc", "joint.head": "joint.joint_net.2",
    "decoder.embedding": "decoder.prediction.embed",
    "decoder.lstm": "decoder.prediction.dec_rnn.lstm", "ctc_head": "ctc_decoder.decoder_layers.0",
}  # fmt: skip


def collapsed(best, blank):
    """(labels, frames) of the best classes of frames."""
    kept = [(int(x), i) for i, x in enumerate(best) if x != blank and (not i or x != best[i - 1])]
    return [x for x, _ in kept], [i for _, i in kept]


def test_search_of_ctc():
    """By hand; parts of a stream give what the whole does, and slots that begin again forget."""
    logits = 3 * np.random.default_rng(0).normal(size=(3, 12, 4)).astype(np.float32)
    lengths = np.array([12, 9, 0])
    whole = jax.device_get(jax.jit(lambda *x: asr.ctc.search(*x, 30))(logits, lengths))
    log_probs = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum(-1, keepdims=True))
    for i, n in enumerate(lengths):
        labels, frames = collapsed(logits[i, :n].argmax(-1), 3)
        assert (
            whole.labels[i, : whole.counts[i]].tolist() == labels and (whole.labels[i, whole.counts[i] :] == -1).all()
        )
        assert whole.frames[i, : whole.counts[i]].tolist() == frames
        assert whole.durations[i, : whole.counts[i]].sum() == (logits[i, :n].argmax(-1) != 3).sum()
        np.testing.assert_allclose(whole.scores[i], log_probs[i, :n].max(-1).sum(), rtol=1e-5)
    state, labels = None, [[], []]
    for start in (0, 4, 8):
        found = asr.ctc.search(logits[:2, start : start + 4], np.clip(lengths[:2] - start, 0, 4), 9, state)
        for i in range(2):
            labels[i] += found.labels[i, : found.counts[i]].tolist()
        state = found.state
    assert labels == [whole.labels[i, : whole.counts[i]].tolist() for i in range(2)]
    np.testing.assert_allclose(found.scores, whole.scores[:2], rtol=1e-5)
    again = asr.ctc.search(logits[:2], lengths[:2], 30, asr.recogniser.decode.reset_streams(state, np.ones(2, bool)))
    np.testing.assert_array_equal(again.labels, whole.labels[:2])


def relative(folder, name, golden, left=()):
    """(a folder of Hugging Face with some tensors of a golden model and its own ones, what `transformers` found)."""
    shutil.copytree(GOLDEN / golden, folder)
    shutil.copy(GOLDEN / f"{name}.json", folder / "config.json")
    found = {k.removeprefix(f"{name}/"): x for k, x in arrays(GOLDEN / "relatives.npz").items() if k.startswith(name)}
    tensors = asr.pretrained.hugging_face.read_tensors(folder)
    tensors = {k: x for k, x in tensors.items() if not k.startswith(left)}
    tensors |= {k.removeprefix("tensor:"): x for k, x in found.items() if k.startswith("tensor:")}
    save_file({k: np.array(x, np.float32) for k, x in tensors.items()}, folder / "model.safetensors")
    return folder, found


@pytest.fixture
def ctc(tmp_path):
    """A folder of Parakeet CTC, with the encoder of the golden TDT, and what `transformers` makes of it."""
    return relative(tmp_path / "ctc", "ctc", "tdt", HEADS)


def test_parakeet_ctc(ctc, tmp_path, refused):
    """Losses, labels and frames of `transformers`; what is written is what was read; options that it has not."""
    ctc, golden = ctc
    recogniser, tensors = asr.pretrained.open_model(ctc), load_file(ctc / "model.safetensors")
    x, lengths = padded(recogniser)

    @jax.jit
    def compute(params):
        model = recogniser.model(params)
        encoded = recogniser.encoded(model, x, {"lengths": lengths} | LABELS)
        return recogniser.variant.compute(None, model, encoded, False), encoded.frame_lengths

    losses, counts = compute(recogniser.params)
    np.testing.assert_allclose(losses, golden["loss"], rtol=1e-5)
    for x, best, n in zip(asr.recognise.transcribe(recogniser, enumerate(recordings())), golden["best"], counts):
        assert (list(x.labels), list(x.frames)) == collapsed(best[:n], 19) and x.labels
    run(["convert", ctc, tmp_path / "again"])
    for name, x in load_file(tmp_path / "again/model.safetensors").items():
        if "conv.norm" not in name:
            np.testing.assert_array_equal(x, tensors[name], err_msg=name)
    asr.audio.write(tmp_path / "a.wav", recordings()[0], 16000)
    for more, message in ((["--beam", "2"], "greedy search alone"), (["--head", "transducer"], "no such head"),
                          (["--prompt", "de"], "knows no prompts")):  # fmt: skip
        refused(["transcribe", "--model", ctc, tmp_path / "a.wav", *more], message)


def test_beams_of_tdt_lose_no_words():
    """Long blanks have few factors; still the best hypothesis beats greedy's, and none is silent but by the loss."""
    recogniser = asr.pretrained.open_model(GOLDEN / "tdt")
    recogniser.config = dataclasses.replace(recogniser.config, duration_choice="pair")
    x, lengths = padded(recogniser)
    heard = recogniser.window(recogniser.params, x, lengths, np.zeros(3, np.int32))
    greedy, *_ = recogniser.taken(recogniser.params, *heard)
    silence = {"lengths": lengths, "targets": np.zeros((3, 1), np.int32), "target_lengths": np.zeros(3, np.int32)}
    model = recogniser.model(recogniser.params)
    silent = -recogniser.variant.compute(recogniser.loss, model, recogniser.encoded(model, x, silence), False)
    for width in (2, 8):
        best, *_ = recogniser.taken(recogniser.params, *heard, None, asr.recogniser.Search(beam=width))
        assert (best.scores >= greedy.scores - 1e-4).all() and ((best.counts > 0) | (best.scores <= silent)).all()


def archive(path, fields, tensors, monkeypatch):
    """What NeMo and PyTorch write: a tar file with YAML and a zip file, whose pickle names storages."""
    names = {"torch": types.ModuleType("torch"), "torch._utils": types.ModuleType("torch._utils")}
    storage = type("FloatStorage", (), {"__module__": "torch", "__qualname__": "FloatStorage"})
    names["torch"].FloatStorage, data = storage, {}

    def rebuild(*_): ...

    rebuild.__module__, rebuild.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    names["torch._utils"]._rebuild_tensor_v2 = rebuild
    for name, module in names.items():
        monkeypatch.setitem(sys.modules, name, module)

    class Pickler(pickle.Pickler):
        def persistent_id(self, x):
            return ("storage", storage, x.key, "cpu", x.size) if isinstance(x, types.SimpleNamespace) else None

        def reducer_override(self, x):
            if not isinstance(x, np.ndarray):
                return NotImplemented
            key = str(len(data))
            data[key] = np.array(x, order="C")
            place = types.SimpleNamespace(key=key, size=x.size)
            steps = tuple(n // 4 for n in data[key].strides)
            return rebuild, (place, 0, x.shape, steps, False, collections.OrderedDict())

    out, weights = io.BytesIO(), io.BytesIO()
    Pickler(out, 2).dump(tensors)
    with zipfile.ZipFile(weights, "w") as file:
        file.writestr("model_weights/data.pkl", out.getvalue())
        for key, x in data.items():
            file.writestr(f"model_weights/data/{key}", x.tobytes())
    with tarfile.open(path, "w") as tar:
        members = ("model_config.yaml", yaml.safe_dump(fields).encode()), ("model_weights.ckpt", weights.getvalue())
        for name, x in members:
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(x)
            tar.addfile(info, io.BytesIO(x))


def fields_of():
    encoder = dict(feat_in=16, n_layers=2, d_model=16, n_heads=4, subsampling="dw_striding", subsampling_factor=8)
    encoder |= dict(subsampling_conv_channels=4, ff_expansion_factor=1.5, self_attention_model="rel_pos", xscaling=True)
    encoder |= dict(att_context_size=[-1, -1], att_context_style="regular", conv_kernel_size=9, dropout=0.0)
    sounds = dict(sample_rate=16000, normalize="per_feature", window_size=0.025, window_stride=0.01, features=16)
    return {
        "preprocessor": sounds, "encoder": encoder, "labels": list(LETTERS),
        "decoder": {"blank_as_pad": True, "prednet": {"pred_hidden": 12, "pred_rnn_layers": 2}},
        "joint": {"jointnet": {"joint_hidden": 12, "activation": "relu"}, "num_extra_outputs": 5},
        "decoding": {"durations": [0, 1, 2, 3, 4], "greedy": {"max_symbols": 3}},
        "aux_ctc": {"ctc_loss_weight": 0.3},
    }  # fmt: skip


def nemo_name(name):
    for ours, theirs in NEMO.items():
        name = name.replace(ours, theirs)
    return name


def test_archives_of_nemo(ctc, tmp_path, monkeypatch, capsys):
    """A hybrid has the parameters of the golden TDT and a head for CTC, to the bit; both find labels."""
    (ctc, _), tensors = ctc, asr.pretrained.hugging_face.read_tensors(GOLDEN / "tdt")
    heads = {k: x for k, x in load_file(ctc / "model.safetensors").items() if k.startswith("ctc_head")}
    named = {nemo_name(k): np.array(x, np.float32) for k, x in (tensors | heads).items()}
    assert "encoder.layers.0.self_attn.linear_pos.weight" in named and "joint.joint_net.2.bias" in named
    named |= {"preprocessor.featurizer.fb": np.zeros(3, np.float32)}
    archive(tmp_path / "a.nemo", fields_of(), named, monkeypatch)
    recogniser, other = (asr.pretrained.open_model(x) for x in (tmp_path / "a.nemo", GOLDEN / "tdt"))
    for name, x in other.params.items():
        for a, b in zip(jax.tree.leaves(recogniser.params[name]), jax.tree.leaves(x), strict=True):
            np.testing.assert_array_equal(a, b)
    assert recogniser.config.ctc == 0.3 and recogniser.config.durations == other.config.durations
    golden = arrays(GOLDEN / "tdt/golden.npz")
    for how in (asr.recogniser.GREEDY, asr.recogniser.Search(ctc=True)):
        found = [list(x.labels) for x in asr.recognise.transcribe(recogniser, enumerate(recordings()), how)]
        if not how.ctc:
            assert found == [x[x >= 0].tolist() for x in golden["labels"]]
    alone = asr.recognise.transcribe(asr.pretrained.open_model(ctc), enumerate(recordings()))
    assert found == [list(x.labels) for x in alone]
    harmful = named | {"x": types.SimpleNamespace}
    for fields, weights, message in (
        ({"encoder": {"self_attention_model": "abs_pos"}}, named, "encoder.self_attention_model must be rel_pos"),
        ({"preprocessor": {"normalize": "NA"}}, named, "preprocessor.normalize must be per_feature, got 'NA'"),
        ({"joint": {"jointnet": {"joint_hidden": 3}}}, named, "joint.jointnet.joint_hidden must be 12, got 3"),
        ({}, harmful, "its weights name types.SimpleNamespace, which is no tensor"),
        ({}, {}, "has no tensor"),
    ):
        whole = fields_of()
        whole |= {k: whole[k] | x for k, x in fields.items()}
        archive(tmp_path / "b.nemo", whole, weights, monkeypatch)
        run(["transcribe", "--model", tmp_path / "b.nemo", "a.wav"], 2)
        assert message in capsys.readouterr().err


def test_prompts(tmp_path):
    """Logits of `transformers` for a language each; the usual one is auto."""
    folder, golden = relative(tmp_path / "prompted", "prompted", "streaming")
    sounds = json.loads((folder / "preprocessor_config.json").read_text())
    processor = {"feature_extractor": sounds, "prompt_dictionary": {"de-DE": 1, "auto": 2}}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    recogniser = asr.pretrained.open_model(folder)
    assert [recogniser.language(x) for x in ("0", "de-DE", "")] == [0, 1, 2]
    x, lengths = padded(recogniser)

    @jax.jit
    def compute(params):
        model = recogniser.model(params)
        rows, counts = model.encode(x, lengths)
        row = model.predictor(np.zeros((3, 0), np.int32))
        told = (recogniser.prompted(model, rows, asr.recogniser.Search(language=i)) for i in range(3))
        return [model.joint(x, row)[i] for i, x in enumerate(told)], counts

    for logits, n, expected in zip(*compute(recogniser.params), golden["logits"], strict=True):
        np.testing.assert_allclose(logits[:n], expected[:n], rtol=0, atol=1e-4)
    with pytest.raises(asr.config.UserError, match="--prompt xx: expected one of de-DE, auto, or a number below 3"):
        recogniser.language("xx")
    for language in (0, 1):
        (x,) = asr.recognise.transcribe(recogniser, [("", recordings()[0])], asr.recogniser.Search(language=language))
        assert not x.error and x.duration > 1
