"""Whisper, with or without its decoder: from model.bin of CTranslate2, or *.safetensors of Hugging Face's WhisperModel.

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

from jax_rnnt_speech import tokens
from jax_rnnt_speech.attention_decoder import DecoderConfig
from jax_rnnt_speech.config import Config, UserError
from jax_rnnt_speech.encoders.whisper import WhisperConfig, positions
from jax_rnnt_speech.pretrained import hugging_face
from jax_rnnt_speech.recogniser import Recogniser

ENGLISH = 51864  # tokens of Whisper for English alone, which has those of languages and never met them
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
# Modules of ours, of CTranslate2 and of Hugging Face, where some matrices of an attention are one of the others.
WHOLE = {
    "subsample.conv1": ("conv1", ["conv1"]),
    "subsample.conv2": ("conv2", ["conv2"]),
    "norm": ("layer_norm", ["layer_norm"]),
}
FEED_FORWARD = {
    "feed_forward.norm": ("ffn/layer_norm", ["final_layer_norm"]),
    "feed_forward.rise": ("ffn/linear_0", ["fc1"]),
    "feed_forward.fall": ("ffn/linear_1", ["fc2"]),
}
LAYERS = {
    "encoder": {
        "attention.norm": ("self_attention/layer_norm", ["self_attn_layer_norm"]),
        "attention.inputs": ("self_attention/linear_0", [f"self_attn.{x}_proj" for x in "qkv"]),
        "attention.output": ("self_attention/linear_1", ["self_attn.out_proj"]),
        **FEED_FORWARD,
    },
    "decoder": {
        "norm": ("self_attention/layer_norm", ["self_attn_layer_norm"]),
        "inputs": ("self_attention/linear_0", [f"self_attn.{x}_proj" for x in "qkv"]),
        "output": ("self_attention/linear_1", ["self_attn.out_proj"]),
        "rows_norm": ("attention/layer_norm", ["encoder_attn_layer_norm"]),
        "query": ("attention/linear_0", ["encoder_attn.q_proj"]),
        "memory": ("attention/linear_1", [f"encoder_attn.{x}_proj" for x in "kv"]),
        "rows_output": ("attention/linear_2", ["encoder_attn.out_proj"]),
        **FEED_FORWARD,
    },
}
EMBEDDINGS = "decoder/embeddings/weight", ["decoder.embed_tokens.weight"]
PLACES = "decoder/position_encodings/encodings", ["decoder.embed_positions.weight"]
SIZES = tuple(field.name for field in dataclasses.fields(WhisperConfig) if field.name != "dropout")
DECODER_SIZES = tuple(field.name for field in dataclasses.fields(DecoderConfig))
LEAVES = {
    "kernel": ("weight", "weight"),
    "scale": ("gamma", "weight"),
    "bias": ("bias", "bias"),
    "beta": ("beta", "bias"),
}


def is_whisper(folder):
    """Whether a folder of Hugging Face holds a Whisper."""
    file = folder / "config.json"
    return file.is_file() and hugging_face.read_json(file).get("model_type") == "whisper"


def binary_of(folder):
    """The model.bin of a folder, or None: beside *.safetensors if config.json is CTranslate2's, which has no type."""
    file = folder / "model.bin"
    if not file.is_file():
        return None
    others = sorted(x.name for x in folder.glob("*.safetensors"))
    if others and (folder / "config.json").is_file() and "model_type" in hugging_face.read_json(folder / "config.json"):
        return None
    if others:
        hugging_face.say(f"{folder}: not used: {', '.join(others)}")
    return file


def read_binary(file):
    """{name: array or number} in a model.bin."""
    data, place, arrays = file.read_bytes(), 0, {}

    def take(form):
        nonlocal place
        (x,) = struct.unpack_from(f"<{form}", data, place)
        place += struct.calcsize(f"<{form}")
        return x

    def text():
        return take(f"{take('H')}s").rstrip(b"\0").decode()

    try:
        version, spec, _ = take("I"), text(), take("I")
        if spec != "WhisperSpec" or version != 6:
            raise UserError(f"{file} must hold a WhisperSpec of version 6, got {spec} of version {version}")
        for _ in range(take("I")):
            name, shape = text(), [take("I") for _ in range(take("B"))]
            kind, size = take("B"), take("I")
            if name.startswith(("encoder/", "decoder/")) and name != "decoder/projection/weight":
                if kind not in TYPES or (shape and np.issubdtype(TYPES[kind], np.integer)):
                    raise UserError(f"{file}: {name} must be of float32 or float16: quantised weights are not read")
                count = size // np.dtype(TYPES[kind]).itemsize
                x = np.frombuffer(data, TYPES[kind], count, place).reshape(shape)
                arrays[name] = x if shape else int(x)
            place += size
    except (struct.error, ValueError) as error:
        raise UserError(f"{file} is no model.bin of CTranslate2, or is cut off: {error}") from None
    return arrays


def config_of(folder):
    """(Config of a folder, its JSON files by name)."""
    return described(folder)[:2]


def described(folder):
    """(Config, JSON files with the sizes of both halves, function of the names of both formats: an array)."""
    if file := binary_of(folder):
        arrays = read_binary(file)

        def array(name, _):
            if name not in arrays:
                raise UserError(f"{file} has no {name}")
            return arrays[name] if isinstance(arrays[name], int) else arrays[name].astype(np.float32)

        def layers(half):
            return sum(name.startswith(f"{half}/") and name.endswith("/ffn/linear_0/weight") for name in arrays)

        width, mels, _ = array("encoder/conv1/weight", ()).shape
        fields = {
            "d_model": width, "encoder_layers": layers("encoder"),
            "encoder_attention_heads": array("encoder/num_heads", ()),
            "encoder_ffn_dim": len(array("encoder/layer_0/ffn/linear_0/bias", ())), "num_mel_bins": mels,
            "max_source_positions": len(array("encoder/position_encodings/encodings", ())),
        }  # fmt: skip
        if count := layers("decoder"):
            fields |= {
                "decoder_layers": count, "decoder_attention_heads": array("decoder/num_heads", ()),
                "decoder_ffn_dim": len(array("decoder/layer_0/ffn/linear_0/bias", ())),
                "max_target_positions": len(array(*PLACES)),
            }  # fmt: skip
    else:
        fields = hugging_face.read_json(folder / "config.json")
        tensors = hugging_face.read_tensors(folder)
        tensors = {name.removeprefix("model."): x for name, x in tensors.items()}
        if EMBEDDINGS[1][0] not in tensors:
            fields = {name: x for name, x in fields.items() if name not in DECODER_SIZES}

        def array(_, names):
            known = [x for x in names if x in tensors]
            if missing := [x for x in names if x not in known and not x.endswith("k_proj.bias")]:
                raise UserError(f"{folder} has no tensor {missing[0]}")
            none = np.zeros_like(tensors[known[0]])  # the key has no bias
            return np.concatenate([tensors.get(x, none) for x in names])

    file = folder / "config.json"
    sizes = hugging_face.checked(WhisperConfig, {k: fields[k] for k in SIZES if k in fields}, file)
    heads, kind = sizes.encoder_attention_heads, fields.get("activation_function", "gelu")
    hugging_face.require(sizes.d_model % heads == 0, folder, "d_model", f"a multiple of {heads}", sizes.d_model)
    hugging_face.require(kind == "gelu", folder, "activation_function", "gelu", kind)
    expected = positions(sizes.max_source_positions, sizes.d_model)
    stored = array("encoder/position_encodings/encodings", ["encoder.embed_positions.weight"])
    if stored.shape != expected.shape or not np.allclose(stored, expected, atol=1e-3):
        raise UserError(f"{folder}: positions must be the sines of Whisper")
    config = Config(
        init=str(folder), encoder="whisper", features="whisper", rate=16000, mels=sizes.num_mel_bins, dropout=0.0
    )
    decoder = {name: fields[name] for name in DECODER_SIZES if name in fields}
    return config, {"config.json": {"model_type": "whisper", **dataclasses.asdict(sizes), **decoder}}, array


def values(folder, source, array, embedded=()):
    """What `hugging_face.mapped` takes. `embedded`: the tokens of the decoder's embeddings."""

    def value(path, x):
        half, _, rest = path.partition(".")
        if half == "predictor" and embedded:
            half = "decoder"
        elif half != "encoder":
            return np.zeros(x.shape)  # nobody uses it
        if rest in ("embedding", "positions"):
            y = array(*EMBEDDINGS)[embedded] if rest == "embedding" else array(*PLACES)
            return fitting(path, x, y)
        module, leaf = rest.rsplit(".", 1)
        here, there, before = WHOLE, f"{half}/", f"{half}."
        if layer := re.match(r"(?:blocks|layers)\.layers\.(\d+)\.", module):
            here, module = LAYERS[half], module[layer.end() :]
            there, before = f"{there}layer_{layer[1]}/", f"{before}layers.{layer[1]}."
        name, parts = here[module]
        ours, theirs = LEAVES[leaf if leaf != "bias" or not module.endswith("norm") else "beta"]
        y = array(f"{there}{name}/{ours}", [f"{before}{part}.{theirs}" for part in parts])
        if module == "attention.inputs":  # query, key and value of each head side by side
            heads = source["config.json"]["encoder_attention_heads"]
            y = y.reshape(3, heads, -1, *y.shape[1:]).swapaxes(0, 1).reshape(y.shape)
        return fitting(path, x, y.T.reshape(-1, len(y)) if y.ndim > 1 else y)  # of a convolution: frames side by side

    def fitting(path, x, y):
        if y.shape != x.shape:
            raise UserError(f"{folder}: {path} must have shape {x.shape}, got {y.shape}")
        return y

    return value


def read(folder):
    """A Recogniser with the encoder of a folder, and no labels."""
    config, source, array = described(folder)
    recogniser = Recogniser(config, tokens.Characters(""), [0.0] * config.mels, [1.0] * config.mels, source)
    recogniser.params = hugging_face.mapped(recogniser.shapes, values(folder, source, array))
    return recogniser


def with_decoder(folder, config, texts, **more):
    """A Recogniser of the encoder and the decoder of a folder; its labels are the tokens that spell such texts."""
    _, source, array = described(folder)
    fields, file = source["config.json"], folder / "tokenizer.json"
    if missing := [x for x in DECODER_SIZES if x not in fields]:
        raise UserError(f"--predictor attention: {folder} has no decoder, or its config.json no {missing[0]}")
    sizes = hugging_face.checked(DecoderConfig, {name: fields[name] for name in DECODER_SIZES}, folder / "config.json")
    heads = sizes.decoder_attention_heads
    hugging_face.require(fields["d_model"] % heads == 0, folder, "d_model", f"a multiple of {heads}", fields["d_model"])
    alphabet = set(config.alphabet) or set().union(*texts)
    stored = hugging_face.read_json(file)
    model = stored.get("model")
    fine = isinstance(model, dict) and all(isinstance(model.get(x), y) for x, y in (("vocab", dict), ("merges", list)))
    hugging_face.require(fine, file, "model", "one of byte pairs, with vocab and merges", model and sorted(model))
    vocabulary, numbers = tokens.spelled(stored, alphabet)
    if missing := sorted(x for x in alphabet - {" "} if x not in vocabulary.index):
        way = (
            "--alphabet with the others leaves their utterances out, --normalize FILE:FUNCTION may write them otherwise"
        )
        raise UserError(f"{file} has no token for these characters of the training texts: {' '.join(missing)}; {way}")
    special = {x["content"]: x["id"] for x in stored.get("added_tokens", ())}
    start = ["<|startoftranscript|>", f"<|{config.prompt or 'en'}|>", "<|transcribe|>", "<|notimestamps|>"]
    count, known = len(array(*EMBEDDINGS)), any(re.fullmatch(r"<\|[a-z]{2}\|>", x) for x in special)
    if "<|transcribe|>" not in special or not known or count == ENGLISH:
        hugging_face.require(not config.prompt, folder, "--prompt", "left out: it knows one language", config.prompt)
        start = [start[0], start[-1]]
    for name in ("<|endoftext|>", *start):
        if name not in special:
            raise UserError(f"{file} has no token {name}")
    fields |= {"start_tokens": len(start), "alignment_heads": following(folder, sizes)}
    nothing, one = [0.0] * config.mels, [1.0] * config.mels
    recogniser = Recogniser(config, vocabulary, nothing, one, source, **more)
    embedded = [*numbers, special["<|endoftext|>"], *(special[x] for x in start)]
    hugging_face.require(max(embedded) < count, file, "numbers of tokens", f"below {count}", max(embedded))
    recogniser.params = hugging_face.mapped(recogniser.shapes, values(folder, source, array, embedded))
    return recogniser


def following(folder, sizes):
    """[layer, head] of the heads that follow the audio: as the folder says, or all of the upper half."""
    layers, heads = sizes.decoder_layers, sizes.decoder_attention_heads
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file() and (found := hugging_face.read_json(folder / name).get("alignment_heads")):
            pairs = [(layer, head) for layer in range(layers) for head in range(heads)]
            fine = isinstance(found, list) and all(isinstance(x, list) and (*x,) in pairs for x in found)
            hugging_face.require(fine, folder / name, "alignment_heads", f"pairs below {layers} and {heads}", found)
            return found
    return [[layer, head] for layer in range(layers // 2, layers) for head in range(heads)]
