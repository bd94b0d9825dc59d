"""Reads models from elsewhere: JSON whose fields are checked, and files of weights. No pickle is run.

`hugging_face`, `nemo`, `whisper` and `package` decide which fields and weights these must have.
"""

import collections
import dataclasses
import io
import json
import math
import pickle
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jax_rnnt_speech.system import UserError, as_user_error, outputs, refuse_if, say_once

SETTINGS = "config.json", "preprocessor_config.json", "processor_config.json", "generation_config.json"
SETTINGS += "tokenizer_config.json", "special_tokens_map.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
# Names that decide what a folder's model is, in any form.
MODEL = re.compile(rf".*\.safetensors(\.index.*\.json)?|model\.bin|tokenizer\.json|recogniser\.json|card\.md|"
                   rf"{'|'.join(map(re.escape, SETTINGS))}")  # fmt: skip
ACTIVATIONS = "relu", "silu", "gelu"
# Names of fields that do not change what a model computes.
METADATA = re.compile(
    "_.*|architectures|.*dtype|.*_version|initializer_range|is_encoder_decoder|.*_token_id|use_cache|return_.*"
    "|output_.*|processor_class|id2label|label2id|problem_type|chunk_size_feed_forward|model_type|tie_word_embeddings"
)
DTYPES = {"Float": "f4", "Double": "f8", "Half": "f2", "Long": "i8", "Int": "i4", "Short": "i2", "Char": "i1",
          "Byte": "u1", "Bool": "?"}  # fmt: skip
STORAGES = {f"{name}Storage": np.dtype(x) for name, x in DTYPES.items()} | {"BFloat16Storage": np.dtype(jnp.bfloat16)}


def require(fine, file, name, expected, got):
    refuse_if(not fine, f"{file}: {name} must be {expected}, got {got!r}")


def read_json(file):
    """Returns the object of a JSON file."""
    with as_user_error(f"{file} must be JSON", ValueError):
        fields = json.loads(file.read_bytes())
    refuse_if(not isinstance(fields, dict), f"{file} must be an object, got {type(fields).__name__}")
    return fields


def checked(kind, fields, file, only=None):
    """Returns a dataclass of the fields that it has. `only` are values that others must have; the rest is named."""
    values, unused = {}, []
    for field in dataclasses.fields(kind):
        if field.name not in fields:
            continue
        x, default = fields[field.name], field.default
        if isinstance(default, bool | str):
            fine, expected = type(x) is type(default), {bool: "true or false", str: "text"}[type(default)]
        elif isinstance(default, int):
            low = 0 if field.name.startswith("default_") else 1
            fine, expected = type(x) is int and x >= low, f"a whole number of {low} or more"
        else:
            fine, expected = type(x) in (int, float) and 0 <= x < 1, "a number of 0 or more and less than 1"
        if field.name == "hidden_act":
            fine, expected = x in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}"
        require(fine, file, field.name, expected, x)
        values[field.name] = x
    for name in fields.keys() - values.keys():
        if name in (only or {}):
            require(fields[name] == only[name], file, name, only[name], fields[name])
        elif not METADATA.fullmatch(name) and fields[name] not in (None, False, 0):
            unused.append(f"{name} {json.dumps(fields[name])[:100]}")
    if unused:
        say_once(f"{file}: not used: {', '.join(sorted(unused))}")
    return kind(**values)


# ------------------------------------------------------------------------------------------------------------- weights


def files_of(folder):
    """Returns ({file of weights: names of tensors that an index expects in it, or None}) of a folder."""
    there = sorted(x.name for x in folder.glob("*.safetensors") if x.is_file() and not x.name.startswith("."))
    whole = {}
    for match in filter(None, map(SHARD.fullmatch, there)):
        whole.setdefault((match[1], match[3]), set()).add(int(match[2]))
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX).get("weight_map")
        fine = isinstance(index, dict) and index
        fine = fine and all(isinstance(x, str) and x == Path(x).name for x in index.values())
        require(fine, folder / INDEX, "weight_map", "an object of files in this folder by tensors", index)
        used = {file: {name for name, x in index.items() if x == file} for file in sorted({*index.values()})}
    elif WEIGHTS in there or (len(there) == 1 and not whole):
        used = {WEIGHTS if WEIGHTS in there else there[0]: None}
    elif len(whole) == 1:
        (((name, count), numbers),) = whole.items()
        most = min(int(count), len(numbers) + 1)  # of an incomplete set, one is missing among these
        used = {f"{name}-{i:0{len(count)}}-of-{count}.safetensors": None for i in range(1, most + 1)}
    elif there:
        raise UserError(f"{folder} has several files of weights, and no {WEIGHTS} or {INDEX}: {', '.join(there)}")
    else:
        pickles = sorted(x.name for x in folder.glob("pytorch_model*.bin"))
        more = f", and {pickles[0]} is a pickle, which nothing reads here" if pickles else ""
        raise UserError(f"{folder} has no *.safetensors{more}")
    if missing := [x for x in used if x not in there]:
        raise UserError(f"{folder} has no {missing[0]}, one of the files of its weights")
    others = [x.name for kind in ("model.bin", "pytorch_model*.bin", "*.nemo") for x in folder.glob(kind)]
    if unused := [x for x in there if x not in used] + sorted(others):
        say_once(f"{folder}: not used: {', '.join(unused)}")
    return {folder / name: x for name, x in used.items()}


def read_tensors(folder):
    """Returns {name: array} of the files of weights of a folder, float32."""
    arrays, places = {}, {}
    for file, expected in files_of(folder).items():
        with as_user_error(f"{file} must be a file of safetensors", SafetensorError, ValueError):
            tensors = load_file(file)
        if missing := sorted((expected or set()) - {*tensors}):
            raise UserError(f"{file} has no tensor {missing[0]}, which {INDEX} expects there")
        for name, x in tensors.items():
            if name in arrays:
                raise UserError(f"{folder}: {name} is in {places[name].name} and in {file.name}")
            arrays[name], places[name] = np.asarray(x, np.float32), file
    return arrays


class Tensors(pickle.Unpickler):
    """Reads the tensors of a checkpoint of PyTorch, a zip file."""

    def __init__(self, archive):
        (name,) = (x for x in archive.namelist() if x.rpartition("/")[2] == "data.pkl")
        super().__init__(io.BytesIO(archive.read(name)))
        self.archive, self.folder, self.read = archive, name.removesuffix("data.pkl"), {}

    def find_class(self, module, name):
        classes = {("collections", "OrderedDict"): collections.OrderedDict}
        classes |= {("torch._utils", "_rebuild_tensor_v2"): strided}
        classes |= {("torch._utils", "_rebuild_parameter"): lambda x, *_: x}
        classes |= {("torch", storage): dtype for storage, dtype in STORAGES.items()}
        if (module, name) not in classes:
            raise ValueError(f"its weights name {module}.{name}, which is no tensor")
        return classes[module, name]

    def persistent_load(self, pid):
        _, dtype, key, _, size = pid
        if key not in self.read:
            self.read[key] = np.frombuffer(self.archive.read(f"{self.folder}data/{key}"), dtype, size)
        return self.read[key]


def strided(storage, offset, shape, strides, *_):
    """Returns a tensor, copied from within its storage."""
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    count = math.prod(shape)  # steps of 0 would turn one number into many
    if min([offset, *shape, *strides], default=0) < 0 or count > len(storage) or (count and last >= len(storage)):
        raise ValueError(f"a tensor {tuple(shape)} of its weights is outside of their {len(storage)} numbers")
    bytes_of = [step * storage.itemsize for step in strides]
    return np.array(np.lib.stride_tricks.as_strided(storage[offset:], shape, bytes_of, writeable=False))


def mapped(params, value):
    """Returns the parameters, each replaced by ``value("encoder.blocks.layers.0...", array)``; they may be shapes."""

    def replaced(path, x):
        x = np.asarray(value(".".join(str(key.key) for key in path), x), x.dtype)
        return jax.device_put(x)  # `jnp.asarray` would compile a program for each shape

    pure = jax.tree.map_with_path(replaced, nnx.to_pure_dict(params))
    params = jax.tree.map(lambda x: x, params)
    nnx.replace_by_pure_dict(params, pure)
    return params


def replaced(folder):
    """A new folder to write a model to, which takes the place of `folder` once it is whole.

    Files of an earlier model, of any form, go then; others stay.
    """
    return outputs.whole_folder(folder, keep=lambda name: not MODEL.fullmatch(name))


def save(arrays, file, like):
    """Writes tensors to a file with the mode of another one: safetensors lets only the owner read it."""
    try:
        save_file({name: np.asarray(x) for name, x in arrays.items()}, file, {"format": "pt"})
    except SafetensorError as error:  # of the disk, too
        raise OSError(str(error)) from None
    shutil.copymode(like, file)
