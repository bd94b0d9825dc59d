"""Parakeet and Nemotron as `transformers` stores them: folders with config.json and *.safetensors, read and written.

A tensor has the name of its parameter, and input and output axes the other way round; `names_of` has the exceptions.
"""

import argparse
import dataclasses
import json
import math
import re

import jax
import numpy as np

from jax_rnnt_speech.config import Config
from jax_rnnt_speech.config.options import durations
from jax_rnnt_speech.data import tokens
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.model.encoders.fastconformer import EncoderConfig
from jax_rnnt_speech.pretrained import files
from jax_rnnt_speech.system import UserError, as_user_error, refuse_if, say_once

# The encoder of a model, its loss, and the class of its features.
WHOLE = "parakeet_encoder", "ParakeetFeatureExtractor"
CAUSAL = "nemotron_asr_streaming_encoder", "NemotronAsrStreamingFeatureExtractor"
MODELS = {
    "parakeet_ctc": ("ctc", *WHOLE),
    "parakeet_rnnt": ("rnnt", *WHOLE),
    "parakeet_tdt": ("tdt", *WHOLE),
    "nemotron_asr_streaming": ("rnnt", *CAUSAL),
    "nemotron3_5_asr": ("rnnt", *CAUSAL),
}
CHECKED = "encoder_config", "durations", "vocab_size"  # checked one by one
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}
MODULES = {
    "joint.encoder": "encoder_projector",
    "joint.predictor": "decoder.decoder_projector",
    "joint.output": "joint.head",
    "predictor.embed": "decoder.embedding",
    "ctc": "ctc_head",
    "prompt.linear_1": "prompt_projector.linear_1",
    "prompt.linear_2": "prompt_projector.linear_2",
}
UNUSED = re.compile(r".*\.num_batches_tracked$")  # a count that only a batch norm without momentum needs


@dataclasses.dataclass(frozen=True)
class HeadFields:
    """Fields of config.json besides `encoder_config`, with their defaults."""

    decoder_hidden_size: int = 640
    num_decoder_layers: int = 2
    hidden_act: str = "relu"
    max_symbols_per_step: int = 10


@dataclasses.dataclass(frozen=True)
class PromptedHeadFields(HeadFields):
    num_prompts: int = 128
    prompt_intermediate_size: int = 2048
    default_prompt_id: int = 101


@dataclasses.dataclass(frozen=True)
class FeatureFields:
    """Fields of preprocessor_config.json, with their defaults."""

    feature_size: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    n_fft: int = 512
    win_length: int = 400
    preemphasis: float = 0.97


def encoder_of(fields, kind, file):
    """Returns the EncoderConfig of encoder_config."""
    files.require(isinstance(fields, dict), file, "encoder_config", "an object", fields)
    heads = fields.get("num_attention_heads", EncoderConfig.num_attention_heads)
    x = files.checked(EncoderConfig, fields, f"{file}: encoder_config", {"num_key_value_heads": heads})
    files.require(x.model_type == kind, file, "model_type of encoder_config", kind, x.model_type)
    files.require(x.subsampling_conv_stride == 2, file, "subsampling_conv_stride", 2, x.subsampling_conv_stride)
    size, factor = x.subsampling_conv_kernel_size, x.subsampling_factor
    files.require(size == 3 or (size % 2 and not x.causal), file, "subsampling_conv_kernel_size", "3", size)
    files.require(factor >= 2 and factor & (factor - 1) == 0, file, "subsampling_factor", "a power of 2", factor)
    files.require(x.conv_kernel_size % 2 or x.causal, file, "conv_kernel_size", "odd", x.conv_kernel_size)
    for count in (2, heads):
        files.require(x.hidden_size % count == 0, file, "hidden_size", f"a multiple of {count}", x.hidden_size)
    return x


def features_of(source, folder, kind, bins):
    """Reads the features from preprocessor_config.json, or from the part of processor_config.json in its place."""
    file, name = folder / "preprocessor_config.json", "feature_extractor_type"
    fields = source.get(file.name)
    if fields is None and "processor_config.json" in source:
        file = folder / "processor_config.json"
        fields = source[file.name].get("feature_extractor")
    files.require(isinstance(fields, dict), file, "the extractor of features", "an object", fields)
    files.require(fields.get(name) == kind, file, name, kind, fields.get(name))
    only = {"padding_value": 0, "padding_side": "right", name: kind}
    x = files.checked(FeatureFields, fields, file, only)
    dtype = fields.get("mel_filters_dtype", "float32")
    files.require(dtype == "float32", file, "mel_filters_dtype", "float32", dtype)
    files.require(x.feature_size == bins, file, "feature_size", f"{bins}, the encoder's num_mel_bins", x.feature_size)
    files.require(x.preemphasis == 0.97, file, "preemphasis", 0.97, x.preemphasis)
    size = 2 ** math.ceil(math.log2(x.win_length))
    files.require(x.n_fft == size, file, "n_fft", f"{size}, the power of 2 from win_length on", x.n_fft)
    return x


def config_of(folder):
    """Returns (Config of a folder, its JSON files by name); both are checked as a whole."""
    refuse_if(not (folder / "config.json").is_file(), f"{folder} has no config.json")
    source = {x: files.read_json(folder / x) for x in files.SETTINGS if (folder / x).is_file()}
    return config_from(folder, source), source


def config_from(folder, source):
    """Returns the Config of JSON files by name."""
    file, fields = folder / "config.json", source["config.json"]
    kind = fields.get("model_type")
    files.require(kind in MODELS, file, "model_type", f"one of {', '.join(MODELS)}", kind)
    loss, encoder, extractor = MODELS[kind]
    encoder = encoder_of(fields.get("encoder_config"), encoder, file)
    size, frames = fields.get("vocab_size"), fields.get("durations")
    files.require(type(size) is int and size >= 2, file, "vocab_size", "a whole number of 2 or more", size)
    name = "pad_token_id" if loss == "ctc" else "blank_token_id"
    blank = fields.get(name)
    files.require(blank == size - 1, file, name, f"{size - 1}, the last of vocab_size", blank)
    try:
        frames = durations(frames or ()) if loss == "tdt" else []
    except argparse.ArgumentTypeError:
        frames = []
    files.require(frames or loss != "tdt", file, "durations", "different whole numbers", fields.get("durations"))
    left = {k: x for k, x in fields.items() if k not in CHECKED}
    width = left.get("decoder_hidden_size", HeadFields.decoder_hidden_size)
    head = files.checked(
        PromptedHeadFields if kind == "nemotron3_5_asr" else HeadFields, left, file, {"joint_hidden_size": width}
    )
    sounds = features_of(source, folder, extractor, encoder.num_mel_bins)
    generation = source.get("generation_config.json", {})
    start = generation.get("decoder_start_token_id", blank)
    file = folder / "generation_config.json"
    files.require(start == blank, file, "decoder_start_token_id", f"{blank}, the blank", start)
    more = generation.get("suppress_tokens") or []
    if more := [x for x in more if type(x) is not int or x < size] if isinstance(more, list) else more:
        say_once(f"{file}: not used: suppress_tokens {more}")
    default, milliseconds = Config(), 1000 / sounds.sampling_rate
    return Config.from_options(
        init=str(folder), encoder="fastconformer", features="nemo", rate=sounds.sampling_rate, mels=sounds.feature_size,
        window=sounds.win_length * milliseconds, hop=sounds.hop_length * milliseconds, width=head.decoder_hidden_size,
        chunk=encoder.default_num_lookahead_tokens + 1 if encoder.causal else 0, predictor="lstm", loss=loss,
        predictor_layers=head.num_decoder_layers, activation=head.hidden_act, sigma=0.0,
        max_symbols=head.max_symbols_per_step, duration_choice="token_first" if frames else "pair",
        durations=frames or default.head.durations, dropout=0.0,
    )  # fmt: skip


def read(folder):
    """Returns the Model of a folder, with its parameters in float32."""
    config, source = config_of(folder)
    labels, file = source["config.json"]["vocab_size"] - 1, folder / "tokenizer.json"
    with as_user_error(f"{file} must be JSON", UnicodeDecodeError):
        vocabulary = tokens.Pretrained(file.read_text("utf-8"), labels) if file.exists() else tokens.Numbers(labels)
    return filled(folder, config, source, vocabulary, files.read_tensors(folder))


def filled(folder, config, source, vocabulary, tensors):
    """Returns the Model of {name: array}, all of which it must have. Each is taken out, so none stays twice."""
    model = Model(config, vocabulary, [0.0] * config.features.mels, [1.0] * config.features.mels, source)
    channels = channels_of(source)

    def value(path, x):
        names = names_of(path, config)
        if missing := [name for name in names if name not in tensors]:
            raise UserError(f"{folder} has no tensor {missing[0]}")
        return sum(from_torch(name, tensors.pop(name), x.shape, channels) for name in names)

    model.params = files.mapped(model.shapes, value)
    if left := sorted(name for name in tensors if not UNUSED.match(name)):
        raise UserError(f"{folder} has tensors that are not of this model: {', '.join(left)}")
    return model


def fits(model):
    """Returns True if the model has the old head of its source."""
    fields, config = (model.source or {}).get("config.json", {}), model.config
    head = fields.get("vocab_size", 0) - 1, fields.get("decoder_hidden_size", HeadFields.decoder_hidden_size)
    same = (len(model.tokens.pieces), config.blocks.width) == head and not config.head.stack
    same &= config.head.predictor == "lstm" and isinstance(model.tokens, tokens.Pretrained | tokens.Numbers)
    same &= not config.encoder.draws  # `transformers` has no contexts
    return fields.get("model_type") in MODELS and same and config.head.loss == MODELS[fields["model_type"]][0]


def write(model, folder, dtype="float32"):
    """Writes a folder for `transformers`. Where two biases have one sum, the first one has all of it."""
    config, tensors, channels = model.config, {}, channels_of(model.source)

    def add(path, x):
        if path.startswith("ctc.") and config.head.loss != "ctc":
            say_once("the head for CTC is left out: `transformers` has no model with both")
            return x
        for i, name in enumerate(names_of(path, config)):
            refuse_if(not np.isfinite(x).all(), f"{name} must be finite, got NaN or infinity: nothing is written")
            tensors[name] = to_torch(path, name, np.asarray(x) * (i == 0), channels)
        return x

    files.mapped(model.params, add)
    for name in [x for x in tensors if x.endswith(".running_mean")]:
        tensors[name.replace("running_mean", "num_batches_tracked")] = np.zeros((), np.int32)
    arrays = {name: jax.numpy.asarray(x, x.dtype if x.dtype == np.int32 else dtype) for name, x in tensors.items()}
    with files.replaced(folder) as new:
        for name, fields in model.source.items():
            fields = {**fields, "dtype": dtype} if name == "config.json" else fields
            fields.pop("torch_dtype", None)
            (new / name).write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
        if isinstance(model.tokens, tokens.Pretrained):
            (new / "tokenizer.json").write_text(model.tokens.text, "utf-8")
        files.save(arrays, new / files.WEIGHTS, like=new / "config.json")


def channels_of(source):
    name = "subsampling_conv_channels"
    return source["config.json"]["encoder_config"].get(name, getattr(EncoderConfig, name))


def names_of(path, config):
    """Returns the tensors whose sum is the parameter of this path."""
    module, leaf = path.rsplit(".", 1)
    if lstm := re.fullmatch(r"predictor\.lstm(\d+)\.dense_(i|h)", module):
        layer, side = lstm[1], {"i": "ih", "h": "hh"}[lstm[2]]
        if leaf == "kernel":
            return [f"decoder.lstm.weight_{side}_l{layer}"]
        return [f"decoder.lstm.bias_{side}_l{layer}" for side in ("ih", "hh")]
    if path == "joint.encoder.bias":
        return ["encoder_projector.bias", "decoder.decoder_projector.bias"]
    name = MODULES.get(module, module).replace("encoder.blocks.layers", "encoder.layers")
    name = re.sub(r"\.layers(\d+)", r".layers.\1", name.replace("encoder.subsample", "encoder.subsampling"))
    if not config.encoder.step:  # one list of convolutions and activations
        for first, part in ((2, "depthwise_conv"), (3, "pointwise_conv")):
            if match := re.search(rf"subsampling\.layers\.(\d+)\.{part}", name):
                name = name.replace(match[0], f"subsampling.layers.{3 * int(match[1]) + first}")
        name = name.replace("subsampling.conv_in", "subsampling.layers.0")
    return [f"{name}.{LEAVES.get(leaf, leaf)}"]


def from_torch(name, x, shape, channels):
    """Returns the parameter of this shape from a tensor [outputs, inputs, ...]."""
    if x.ndim >= 2 and not is_table(name):
        if name.endswith("subsampling.linear.weight"):  # PyTorch's rows have channels before bins
            x = x.reshape(len(x), channels, -1).swapaxes(1, 2).reshape(x.shape)
        x = np.moveaxis(x, (1, 0), (-2, -1))
    refuse_if(x.size != math.prod(shape), f"{name} must have {shape} entries, got {x.shape}")
    return x.reshape(shape)


def to_torch(path, name, x, channels):
    """Returns the tensor of a parameter."""
    if x.ndim < 2 or is_table(name):
        return x
    x = np.moveaxis(x[..., None, :] if "depthwise_conv" in path else x, (-2, -1), (1, 0))
    if name.endswith("subsampling.linear.weight"):
        return x.reshape(len(x), -1, channels).swapaxes(1, 2).reshape(x.shape)
    convolves = "pointwise_conv" in path or path.startswith("ctc.")
    ones = 0 if not convolves else 2 if "subsample" in path else 1  # sizes of its kernel
    return x.reshape(*x.shape, *[1] * ones)


def is_table(name):
    """Returns True if a tensor of two axes is no matrix of a layer."""
    return name.endswith(("embedding.weight", "bias_u", "bias_v"))
