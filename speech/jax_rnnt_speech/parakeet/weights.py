"""Reads checkpoints of Hugging Face's Parakeet and Nemotron transducers, and writes them again.

    model, extractor = load("parakeet-tdt-0.6b-v3")  # a folder with config.json and *.safetensors

A tensor has the name of its parameter, and input and output axes the other way round; `names_of` has the exceptions.
"""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.flax import load_file, save_file

from .encoder import ACTIVATIONS, EncoderConfig
from .features import LogMel
from .model import Config, Transducer

MODELS = "parakeet_rnnt", "parakeet_tdt", "nemotron_asr_streaming"
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}
MODULES = {
    "joint.encoder": "encoder_projector",
    "joint.predictor": "decoder.decoder_projector",
    "joint.output": "joint.head",
    "predictor.embed": "decoder.embedding",
}
UNUSED = re.compile(r".*\.num_batches_tracked$")  # a count that only a batch norm without momentum needs


def load(folder, *, rngs=None):
    """(Transducer in evaluation mode, LogMel) of a folder. `rngs` draws the dropout of a training."""
    config, tensors = read_config(folder), read_tensors(folder)
    model = Transducer(config, rngs=rngs or nnx.Rngs(0))
    used = set()

    def value(path, x):
        names = names_of(path, config)
        if missing := [name for name in names if name not in tensors]:
            raise ValueError(f"load: {folder} has no tensor {missing[0]}.")
        used.update(names)
        return jnp.asarray(sum(from_torch(name, tensors[name], x.shape, config).astype(x.dtype) for name in names))

    update(model, value)
    if left := sorted(name for name in tensors.keys() - used if not UNUSED.match(name)):
        raise ValueError(f"load: {folder} has tensors that are not of this model: {', '.join(left)}.")
    model.eval()
    extractor, bins = read_extractor(folder), config.encoder_config.num_mel_bins
    if (size := extractor.feature_size) != bins:
        raise ValueError(f"load: {folder} must have a feature_size of {bins}, its num_mel_bins, got {size}.")
    return model, extractor


def save(model, folder, source):
    """Writes a checkpoint for `transformers`, with names, shapes, dtypes and other files of the one in `source`.

    Of two biases with one sum the first one has all of it. A checkpoint that is in `folder` is no more.
    """
    folder = Path(folder)
    if folder.resolve() == Path(source).resolve():
        raise ValueError(f"save: folder must not be source, got {folder}.")
    config, tensors = read_config(source), read_tensors(source)

    def write(path, x):
        for i, name in enumerate(names_of(path, config)):
            tensors[name] = to_torch(name, np.asarray(x) * (i == 0), tensors[name], config)
            if not np.isfinite(tensors[name]).all():
                raise ValueError(f"save: {name} must be finite, got NaN or infinity; nothing is written.")
        return x

    update(model, write)
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.safetensors*"):  # `load` reads them all
        file.unlink()
    for file in Path(source).glob("*.json"):
        if file.name != "model.safetensors.index.json":
            shutil.copy(file, folder)
    arrays = {name: jnp.asarray(x) for name, x in tensors.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})


def update(model, value):
    """Sets every parameter and running mean to ``value(its path, itself)``."""
    state = nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))
    nnx.replace_by_pure_dict(state, each(state, value))
    nnx.update(model, state)


def each(state, value):
    """Nested dictionaries of ``value("encoder.layers0...", array)`` for the arrays of a state."""
    return jax.tree.map_with_path(
        lambda path, x: value(".".join(str(key.key) for key in path), x), nnx.to_pure_dict(state)
    )


def names_of(path, config):
    """The tensors whose sum is the parameter of this path."""
    module, leaf = path.rsplit(".", 1)
    if lstm := re.fullmatch(r"predictor\.lstm(\d+)\.dense_(i|h)", module):
        layer, side = lstm[1], {"i": "ih", "h": "hh"}[lstm[2]]
        if leaf == "kernel":
            return [f"decoder.lstm.weight_{side}_l{layer}"]
        return [f"decoder.lstm.bias_{side}_l{layer}" for side in ("ih", "hh")]
    if path == "joint.encoder.bias":
        return ["encoder_projector.bias", "decoder.decoder_projector.bias"]
    name = re.sub(r"\.layers(\d+)", r".layers.\1", MODULES.get(module, module))
    if not config.encoder_config.causal:  # one list of convolutions and activations
        for first, part in ((2, "depthwise_conv"), (3, "pointwise_conv")):
            if match := re.search(rf"subsampling\.layers\.(\d+)\.{part}", name):
                name = name.replace(match[0], f"subsampling.layers.{3 * int(match[1]) + first}")
        name = name.replace("subsampling.conv_in", "subsampling.layers.0")
    return [f"{name}.{LEAVES.get(leaf, leaf)}"]


def from_torch(name, x, shape, config):
    """The parameter of this shape from a tensor [outputs, inputs, ...]."""
    if x.ndim >= 2 and not is_table(name):
        if name.endswith("subsampling.linear.weight"):  # PyTorch's rows have channels before bins
            channels = config.encoder_config.subsampling_conv_channels
            x = x.reshape(len(x), channels, -1).swapaxes(1, 2).reshape(x.shape)
        x = np.moveaxis(x, (1, 0), (-2, -1))
    if x.size != math.prod(shape):
        raise ValueError(f"load: {name} must have {shape} entries, got {x.shape}.")
    return x.reshape(shape)


def to_torch(name, x, old, config):
    """The tensor of a parameter, with shape and dtype of `old`."""
    if old.ndim >= 2 and not is_table(name):
        x = np.moveaxis(x.reshape(*old.shape[2:], old.shape[1], old.shape[0]), (-2, -1), (1, 0))
        if name.endswith("subsampling.linear.weight"):
            channels = config.encoder_config.subsampling_conv_channels
            x = x.reshape(len(x), -1, channels).swapaxes(1, 2)
    return x.reshape(old.shape).astype(old.dtype)


def is_table(name):
    """Whether a tensor of two axes is no matrix of a layer."""
    return name.endswith(("embedding.weight", "bias_u", "bias_v"))


def read_tensors(folder):
    """{name: tensor} of all files of a checkpoint."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"read_tensors: {folder} has no *.safetensors.")
    tensors = {}
    for file in files:
        try:
            tensors |= {name: np.asarray(x) for name, x in load_file(file).items()}
        except SafetensorError as error:
            raise ValueError(f"read_tensors: {file} must be a file of safetensors: {error}.") from None
    return tensors


def read_json(file, *needed):
    """The object of a JSON file, with these entries at least."""
    try:
        fields = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"read_json: {file} must be JSON: {error}.") from None
    if missing := [name for name in needed if not isinstance(fields, dict) or name not in fields]:
        raise ValueError(f"read_json: {file} must have {', '.join(needed)}, got no {missing[0]}.")
    return fields


def read_config(folder):
    file = Path(folder) / "config.json"
    fields = read_json(file, "model_type")
    if fields["model_type"] not in MODELS:
        raise ValueError(f"read_config: model_type of {file} must be one of {MODELS}, got {fields['model_type']!r}.")
    if not isinstance(fields.get("encoder_config"), dict):
        raise ValueError(
            f"read_config: {file} must have a dictionary of encoder_config, got {fields.get('encoder_config')}."
        )
    for one in (fields, fields["encoder_config"]):
        if (name := one.get("hidden_act", "relu")) not in ACTIVATIONS:
            raise ValueError(f"read_config: hidden_act of {file} must be one of {tuple(ACTIVATIONS)}, got {name!r}.")
    fields["durations"] = tuple(fields.get("durations", ()))
    return of_class(Config, fields | {"encoder_config": of_class(EncoderConfig, fields["encoder_config"])})


def read_extractor(folder):
    """From preprocessor_config.json, or from the part of processor_config.json that stands for it."""
    file = Path(folder) / "preprocessor_config.json"
    if (other := Path(folder) / "processor_config.json").exists() and not file.exists():
        fields = read_json(other, "feature_extractor")["feature_extractor"]
    else:
        fields = read_json(file, "feature_extractor_type")
    if fields.get("mel_filters_dtype", "float32") != "float32":
        raise ValueError(f"read_extractor: mel_filters_dtype must be float32, got {fields['mel_filters_dtype']}.")
    return of_class(LogMel, fields | {"normalize": fields["feature_extractor_type"] == "ParakeetFeatureExtractor"})


def of_class(kind, fields):
    """A dataclass from the fields that it has."""
    return kind(**{field.name: fields[field.name] for field in dataclasses.fields(kind) if field.name in fields})
