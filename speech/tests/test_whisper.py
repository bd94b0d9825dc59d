"""Does the encoder of Whisper compute its definition, and what other programs computed for golden/whisper.npz?"""

import json
import os
import pathlib
import struct

import chex
import jax
import numpy as np
import pytest
import scipy.special
from safetensors.numpy import save_file
from tones import recordings

from jax_rnnt_speech.data import features
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.recognition import recognise
from support import arrays, asr, configuration

GOLDEN = arrays(pathlib.Path(__file__).parent / "golden/whisper.npz")
RNG = np.random.default_rng(0)
WIDTH, HEADS, HIDDEN, BINS, PLACES = 8, 2, 12, 5, 40


def arrays_of_whisper():
    """Random weights of two layers, by the names of CTranslate2, in float16."""
    draw = lambda *shape: RNG.normal(0, 0.5, shape).astype(np.float16)
    angles = np.arange(PLACES)[:, None] / 10000.0 ** (np.arange(WIDTH // 2) / (WIDTH // 2 - 1))
    positions = np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float16)
    shapes = {"conv1": (WIDTH, BINS, 3), "conv2": (WIDTH, WIDTH, 3)}
    for i in range(2):
        shapes |= {f"layer_{i}/self_attention/linear_0": (3 * WIDTH, WIDTH)}
        shapes |= {f"layer_{i}/self_attention/linear_1": (WIDTH, WIDTH)}
        shapes |= {f"layer_{i}/ffn/linear_0": (HIDDEN, WIDTH), f"layer_{i}/ffn/linear_1": (WIDTH, HIDDEN)}
    norms = ["layer_norm", *(f"layer_{i}/{x}/layer_norm" for i in range(2) for x in ("self_attention", "ffn"))]
    arrays = {f"{name}/weight": draw(*shape) for name, shape in shapes.items()}
    arrays |= {f"{name}/bias": draw(shape[0]) for name, shape in shapes.items()}
    arrays |= {f"{name}/{leaf}": draw(WIDTH) for name in norms for leaf in ("gamma", "beta")}
    for i in range(2):
        arrays[f"layer_{i}/self_attention/linear_0/bias"][WIDTH : 2 * WIDTH] = 0  # of the keys: Whisper has none
    return arrays | {"position_encodings/encodings": positions, "num_heads": np.int16(HEADS)}


def write_binary(file, arrays):
    """A model.bin as CTranslate2 writes it."""
    text = lambda x: struct.pack("<H", len(x) + 1) + x.encode() + b"\0"
    data = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(arrays) + 1)
    for name, x in {"decoder/alibi": np.int8(0), **{f"encoder/{name}": x for name, x in arrays.items()}}.items():
        kind = {np.dtype(np.int8): 1, np.dtype(np.int16): 2, np.dtype(np.float16): 4}[x.dtype]
        data += text(name) + struct.pack(f"<B{x.ndim}I", x.ndim, *x.shape) + struct.pack("<BI", kind, x.nbytes)
        data += x.tobytes()
    file.write_bytes(data + struct.pack("<I", 0))


def forward(arrays, x):
    """Rows of features [T, BINS] by the definition, in float64."""
    a = {name: np.float64(x) for name, x in arrays.items()}
    gelu = lambda x: x * scipy.special.ndtr(x)
    linear = lambda name, x: x @ a[f"{name}/weight"].T + a[f"{name}/bias"]

    def norm(name, x):
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return x * a[f"{name}/gamma"] + a[f"{name}/beta"]

    for name, stride in (("conv1", 1), ("conv2", 2)):
        padded = np.pad(x, ((1, 1), (0, 0)))
        windows = [padded[i : i + 3] for i in range(0, len(x), stride)]
        x = gelu(np.einsum("nkc,ock->no", windows, a[f"{name}/weight"]) + a[f"{name}/bias"])
    x = x + a["position_encodings/encodings"][: len(x)]
    for i in range(2):
        joined = linear(f"layer_{i}/self_attention/linear_0", norm(f"layer_{i}/self_attention/layer_norm", x))
        query, key, value = (y.reshape(len(x), HEADS, -1) for y in np.split(joined, 3, 1))
        weights = scipy.special.softmax(np.einsum("qhd,khd->hqk", query, key) / np.sqrt(WIDTH / HEADS), -1)
        attended = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), WIDTH)
        x = x + linear(f"layer_{i}/self_attention/linear_1", attended)
        y = linear(f"layer_{i}/ffn/linear_0", norm(f"layer_{i}/ffn/layer_norm", x))
        x = x + linear(f"layer_{i}/ffn/linear_1", gelu(y))
    return norm("layer_norm", x)


def as_hugging_face(arrays):
    """The same weights under the names of `transformers`."""
    names = {"layer_norm": "layer_norm", "conv1": "conv1", "conv2": "conv2"}
    for i in range(2):
        names |= {f"layer_{i}/self_attention/linear_1": f"layers.{i}.self_attn.out_proj"}
        names |= {f"layer_{i}/self_attention/layer_norm": f"layers.{i}.self_attn_layer_norm"}
        names |= {f"layer_{i}/ffn/layer_norm": f"layers.{i}.final_layer_norm"}
        names |= {f"layer_{i}/ffn/linear_0": f"layers.{i}.fc1", f"layer_{i}/ffn/linear_1": f"layers.{i}.fc2"}
    leaves = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
    tensors = {"model.encoder.embed_positions.weight": arrays["position_encodings/encodings"]}
    for name, x in arrays.items():
        module, _, leaf = name.rpartition("/")
        if module in names:
            tensors[f"model.encoder.{names[module]}.{leaves[leaf]}"] = x
        elif module.endswith("linear_0"):
            for which, part in zip("qkv", np.split(x, 3)):
                if (which, leaf) != ("k", "bias"):
                    tensors[f"model.encoder.layers.{module[6]}.self_attn.{which}_proj.{leaf}"] = part
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()} | {"model.decoder.x": np.zeros(1)}


@pytest.mark.slow
def test_whisper(tmp_path, refused):
    """A random encoder, from both formats, with padding of NaN, against its definition in float64."""
    arrays = arrays_of_whisper()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write_binary(tmp_path / "a/model.bin", arrays)
    save_file(as_hugging_face(arrays), tmp_path / "b/model.safetensors")
    sizes = {"d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": HEADS, "encoder_ffn_dim": HIDDEN}
    sizes |= {"num_mel_bins": BINS, "max_source_positions": PLACES, "model_type": "whisper", "dropout": 0.1}
    (tmp_path / "b/config.json").write_text(json.dumps(sizes))
    model, other = (asr.models.read(tmp_path / name) for name in ("a", "b"))
    chex.assert_trees_all_equal(model.params, other.params)
    x, lengths = RNG.normal(size=(2, 21, BINS)).astype(np.float32), np.array([21, 12])
    x[1, 12:] = np.nan
    rows, counts = jax.jit(lambda params: model.network(params).encoder(x, lengths))(model.params)
    assert counts.tolist() == [11, 6]
    for i, count in enumerate(counts):
        np.testing.assert_allclose(rows[i, :count], forward(arrays, x[i, : lengths[i]]), atol=2e-5)
    refused(["transcribe", "--model", tmp_path / "a", "a.wav"], "has an encoder alone: rnnt-speech train --init")
    (long,) = recognise.transcribe(model, [("x.wav", np.zeros(16000))])
    assert (long.error, long.duration) == ("", 1.0)
    assert model.longest == pytest.approx(2 * PLACES * 0.01 - 0.5)  # half a second is silence
    data = (tmp_path / "a/model.bin").read_bytes()
    name = "layer_0/ffn/linear_0/weight"
    write_binary(tmp_path / "a/model.bin", arrays | {name: np.zeros((HIDDEN, WIDTH), np.int16)})
    quantised = (tmp_path / "a/model.bin").read_bytes()
    for changed, message in (
        (quantised, f"{name} must be of float32"),
        (data[:-500], "is cut off"),
        (data.replace(b"Whisper", b"Wav2Vec"), "must hold a Whisper"),
    ):
        (tmp_path / "a/model.bin").write_bytes(changed)
        with pytest.raises(asr.system.UserError, match=message):
            asr.models.config_of(tmp_path / "a")


def test_whisper_features():
    """Those of faster-whisper."""
    config = asr.config.Config.from_options(features="whisper")
    results = features.extractor(config)(recordings()[2])
    np.testing.assert_allclose(results[::7], GOLDEN["features"], atol=1e-5)


@pytest.mark.skipif("WHISPER" not in os.environ, reason="WHISPER names no folder with model.bin of Whisper tiny.en")
def test_whisper_rows():
    """Rows of the released weights are those of CTranslate2."""
    model = asr.models.read(os.environ["WHISPER"])
    x, expected = model.features(recordings()[2])[None], GOLDEN["rows"]
    encode = jax.jit(lambda params: model.network(params).encoder(x, np.array([x.shape[1]]))[0])
    results = np.asarray(encode(model.params))[0, ::5]
    assert np.linalg.norm(results - expected) < 2e-5 * np.linalg.norm(expected)


def test_length_of_utterances():
    """The positions of the weights say how long an utterance may be; other encoders hear any length."""
    config = configuration(encoder="whisper", features="whisper", init="x", rate=16000, max_seconds=20.0)
    for places, seconds in ((1500, 29.5), (500, 9.5)):
        assert encoders.longest(config, {"config.json": {"max_source_positions": places}}) == seconds
    with pytest.raises(asr.system.UserError, match=r"--max-seconds 20: the encoder hears 9\.5 s at most"):
        encoders.checked(config, {"config.json": {"max_source_positions": 500}})
    assert encoders.longest(configuration(features="whisper"), None) == float("inf")
