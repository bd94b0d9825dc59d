"""Reads the encoder of Whisper from model.bin of CTranslate2, or from *.safetensors of Hugging Face's WhisperModel.

model.bin, little-endian; a string is its length with a final zero (uint16) and its bytes:

    uint32 version (6), string "WhisperSpec", uint32 revision, uint32 number of arrays;
    each array: string name, uint8 rank, uint32 of each size, uint8 type, uint32 bytes, the numbers;
    uint32 number of aliases; each: string alias, string name.

Types are 0 float32, 1 int8, 2 int16, 3 int32, 4 float16, 5 bfloat16. Weights are [outputs, inputs]; the first matrix
of an attention has the outputs of query, key and value, one after the other.
"""

import dataclasses
import re
import struct

import numpy as np

from jax_rnnt_speech.config import Config
from jax_rnnt_speech.data import tokens
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.model.encoders.whisper import WhisperConfig, positions
from jax_rnnt_speech.pretrained import files
from jax_rnnt_speech.system import UserError, as_user_error, refuse_if, say_once

TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
# Modules here, in CTranslate2 and in Hugging Face, where three matrices of an attention are one of the others.
WHOLE = {
    "subsample.conv1": ("conv1", ["conv1"]),
    "subsample.conv2": ("conv2", ["conv2"]),
    "norm": ("layer_norm", ["layer_norm"]),
}
LAYER = {
    "attention.norm": ("self_attention/layer_norm", ["self_attn_layer_norm"]),
    "attention.inputs": ("self_attention/linear_0", [f"self_attn.{x}_proj" for x in "qkv"]),
    "attention.output": ("self_attention/linear_1", ["self_attn.out_proj"]),
    "feed_forward.norm": ("ffn/layer_norm", ["final_layer_norm"]),
    "feed_forward.rise": ("ffn/linear_0", ["fc1"]),
    "feed_forward.fall": ("ffn/linear_1", ["fc2"]),
}
SIZES = tuple(field.name for field in dataclasses.fields(WhisperConfig) if field.name != "dropout")
LEAVES = {
    "kernel": ("weight", "weight"),
    "scale": ("gamma", "weight"),
    "bias": ("bias", "bias"),
    "beta": ("beta", "bias"),
}


def is_whisper(folder):
    """Returns True if a folder of Hugging Face holds a Whisper."""
    file = folder / "config.json"
    return file.is_file() and files.read_json(file).get("model_type") == "whisper"


def binary_of(folder):
    """Returns a folder's model.bin or None; next to *.safetensors only if config.json has no type, as CTranslate2's."""
    file = folder / "model.bin"
    if not file.is_file():
        return None
    others = sorted(x.name for x in folder.glob("*.safetensors"))
    if others and (folder / "config.json").is_file() and "model_type" in files.read_json(folder / "config.json"):
        return None
    if others:
        say_once(f"{folder}: not used: {', '.join(others)}")
    return file


def read_binary(file):
    """Returns {name: array or number} of the encoder in a model.bin."""
    data, place, arrays = file.read_bytes(), 0, {}

    def take(form):
        nonlocal place
        (x,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return x

    def text():
        return take(f"{take('H')}s").rstrip(b"\0").decode()

    with as_user_error(f"{file} is no model.bin of CTranslate2, or is cut off", struct.error, ValueError):
        version, spec, _ = take("I"), text(), take("I")
        if spec != "WhisperSpec" or version != 6:
            raise UserError(f"{file} must hold a WhisperSpec of version 6, got {spec} of version {version}")
        for _ in range(take("I")):
            name, shape = text(), [take("I") for _ in range(take("B"))]
            kind, size = take("B"), take("I")
            if name.startswith("encoder/"):
                if kind not in TYPES or (shape and np.issubdtype(TYPES[kind], np.integer)):
                    raise UserError(f"{file}: {name} must be of float32 or float16: quantised weights are not read")
                count = size // np.dtype(TYPES[kind]).itemsize
                x = np.frombuffer(data, TYPES[kind], count, place).reshape(shape)
                arrays[name.removeprefix("encoder/")] = x.astype(np.float32) if shape else int(x)
            place += size
    return arrays


def config_of(folder):
    """Returns (Config of a folder, its JSON files by name)."""
    return parts_of(folder)[:2]


def parts_of(folder):
    """Returns (Config, JSON files, function of the names of both formats that returns an array)."""
    if file := binary_of(folder):
        arrays = read_binary(file)

        def array(name, _):
            refuse_if(name not in arrays, f"{file} has no encoder/{name}")
            return arrays[name]

        count = sum(name.endswith("/ffn/linear_0/weight") for name in arrays)
        width, mels, _ = array("conv1/weight", ()).shape
        fields = {
            "d_model": width, "encoder_layers": count, "encoder_attention_heads": array("num_heads", ()),
            "encoder_ffn_dim": len(array("layer_0/ffn/linear_0/bias", ())), "num_mel_bins": mels,
            "max_source_positions": len(array("position_encodings/encodings", ())),
        }  # fmt: skip
    else:
        fields = files.read_json(folder / "config.json")
        tensors = files.read_tensors(folder)
        tensors = {re.sub("^(model\\.)?encoder\\.", "", name): x for name, x in tensors.items()}

        def array(_, names):
            if missing := [x for x in names if x not in tensors and not x.endswith("k_proj.bias")]:
                raise UserError(f"{folder} has no tensor encoder.{missing[0]}")
            first = tensors[names[0]]  # the key has no bias
            return np.concatenate([tensors.get(x, np.zeros_like(first)) for x in names])

    sizes = files.checked(WhisperConfig, {k: fields[k] for k in SIZES if k in fields}, folder / "config.json")
    heads, kind = sizes.encoder_attention_heads, fields.get("activation_function", "gelu")
    files.require(sizes.d_model % heads == 0, folder, "d_model", f"a multiple of {heads}", sizes.d_model)
    files.require(kind == "gelu", folder, "activation_function", "gelu", kind)
    expected = positions(sizes.max_source_positions, sizes.d_model)
    stored = array("position_encodings/encodings", ["embed_positions.weight"])
    if stored.shape != expected.shape or not np.allclose(stored, expected, atol=1e-3):
        raise UserError(f"{folder}: positions must be the sines of Whisper")
    config = Config.from_options(
        init=str(folder), encoder="whisper", features="whisper", rate=16000, mels=sizes.num_mel_bins, dropout=0.0
    )
    return config, {"config.json": {"model_type": "whisper", **dataclasses.asdict(sizes)}}, array


def read(folder):
    """Returns a Model with the encoder of a folder, and no labels."""
    config, source, array = parts_of(folder)
    model = Model(config, tokens.Characters(""), [0.0] * config.features.mels, [1.0] * config.features.mels, source)
    heads = source["config.json"]["encoder_attention_heads"]

    def value(path, x):
        if not path.startswith("encoder."):
            return np.zeros(x.shape)  # nobody uses these
        module, leaf = path.removeprefix("encoder.").rsplit(".", 1)
        here, there, before = WHOLE, "", ""
        if layer := re.match(r"blocks\.layers\.(\d+)\.", module):
            here, module = LAYER, module[layer.end() :]
            there, before = f"layer_{layer[1]}/", f"layers.{layer[1]}."
        name, parts = here[module]
        ours, theirs = LEAVES[leaf if leaf != "bias" or not module.endswith("norm") else "beta"]
        y = array(f"{there}{name}/{ours}", [f"{before}{part}.{theirs}" for part in parts])
        if module == "attention.inputs":  # query, key and value of each head side by side
            y = y.reshape(3, heads, -1, *y.shape[1:]).swapaxes(0, 1).reshape(y.shape)
        y = y.T.reshape(-1, len(y)) if y.ndim > 1 else y  # for a convolution: three frames side by side
        refuse_if(y.shape != x.shape, f"{folder}: encoder.{path} must have shape {x.shape}, got {y.shape}")
        return y

    model.params = files.mapped(model.shapes, value)
    return model
