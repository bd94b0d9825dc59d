"""Archives of NeMo: a tar file with model_config.yaml, weights that PyTorch has pickled, and a model of sentencepiece.

Configuration and tensors become those of `transformers`, which `hugging_face` checks and reads. Pickles are not run:
what they name, but for tensors, is an error.
"""

import contextlib
import math
import pickle
import re
import tarfile
import zipfile
import zlib

import numpy as np
import yaml

from jax_rnnt_speech.data import tokens
from jax_rnnt_speech.pretrained import files, hugging_face
from jax_rnnt_speech.system import UserError, refuse_if, say_once

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
LARGEST = 2**26  # bytes of a member that are read; a tar file of a few bytes may claim any number
# NeMo's names of modules, and those of `transformers`; a pattern that does not fit changes nothing.
MODULES = {
    r"^encoder\.pre_encode\.out": "encoder.subsampling.linear",
    r"^encoder\.pre_encode\.conv": "encoder.subsampling.layers",
    r"\.conv\.batch_norm\.": ".conv.norm.",
    r"\.self_attn\.linear_([qkv])\.": r".self_attn.\1_proj.",
    r"\.self_attn\.linear_out\.": ".self_attn.o_proj.",
    r"\.self_attn\.linear_pos\.": ".self_attn.relative_k_proj.",
    r"\.self_attn\.pos_bias_([uv])$": r".self_attn.bias_\1",
    r"^decoder\.prediction\.embed": "decoder.embedding",
    r"^decoder\.prediction\.dec_rnn\.lstm": "decoder.lstm",
    r"^(ctc_)?decoder\.decoder_layers\.0": "ctc_head",
    r"^joint\.enc\.": "encoder_projector.",
    r"^joint\.pred\.": "decoder.decoder_projector.",
    r"^joint\.joint_net\.\d+": "joint.head",
    r"^prompt_kernel\.0": "prompt_projector.linear_1",
    r"^prompt_kernel\.2": "prompt_projector.linear_2",
}
UNUSED = re.compile(r"preprocessor\..*|encoder\.pos_enc\..*|.*spec_augmentation.*")
# Fields of the encoder, with their names in `transformers`, and the required values of others.
ENCODER = {
    "feat_in": "num_mel_bins", "n_layers": "num_hidden_layers", "d_model": "hidden_size",
    "n_heads": "num_attention_heads", "subsampling_factor": "subsampling_factor",
    "subsampling_conv_channels": "subsampling_conv_channels", "conv_kernel_size": "conv_kernel_size",
    "xscaling": "scale_input", "dropout": "dropout", "dropout_emb": "dropout_positions",
    "dropout_att": "attention_dropout",
}  # fmt: skip
ONLY = {"subsampling": "dw_striding", "self_attention_model": "rel_pos", "untie_biases": True, "feat_out": -1}
ONLY |= {"reduction": None, "global_tokens": 0, "use_pytorch_sdpa": False}
REGULAR = {"causal_downsampling": False, "conv_norm_type": "batch_norm", "conv_context_size": None}
REGULAR |= {"conv_context_style": "regular"}
CAUSAL = {"causal_downsampling": True, "conv_norm_type": "layer_norm", "conv_context_size": "causal"}
SEVERAL = "chunked_limited_with_rc"
STYLES = {  # styles of attention, with the values that belong to them
    "regular": REGULAR,
    "chunked_limited": REGULAR | CAUSAL,
    SEVERAL: REGULAR | {"conv_context_style": "dcc"},
}
KNOWN = {*ENCODER, *ONLY, *REGULAR, "_target_", "use_bias", "ff_expansion_factor", "att_context_size"}
KNOWN |= {"att_chunk_context_size"}
KNOWN |= {"att_context_style", "pos_emb_max_len", "dropout_pre_encoder", "att_context_probs", "sync_max_audio_length"}
KNOWN |= {"reduction_position", "reduction_factor", "stochastic_depth_start_layer", "stochastic_depth_mode"}
SOUNDS = {"window": "hann", "log": True, "frame_splicing": 1, "mag_power": 2.0, "exact_pad": False}


def archive_of(path):
    """Returns the archive itself, or that in a folder."""
    archives = [path] if path.suffix == ".nemo" and path.is_file() else sorted(path.glob("*.nemo"))
    refuse_if(len(archives) > 1, f"{path} has several archives of NeMo: name {' or '.join(x.name for x in archives)}")
    return archives[0]


@contextlib.contextmanager
def reading(file, name, what):
    """Turns whatever Python raises for a faulty part of an archive into an error that names this part."""
    try:
        yield
    except (
        zipfile.BadZipFile, tarfile.TarError, zlib.error, pickle.UnpicklingError, yaml.YAMLError, ArithmeticError,
        AttributeError, EOFError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{file}: {name} must be {what}: {reason}") from None


def opened(path):
    """Returns (the archive, {last part of a member's name: its bytes, empty for weights}, configuration fields)."""
    file, members = archive_of(path), {}
    try:
        with tarfile.open(file) as tar:
            for x in tar:
                name = x.name.rpartition("/")[2]
                if name in members and name in (CONFIG, WEIGHTS):
                    raise UserError(f"{file} must be an archive of one model of NeMo, but has several {name}")
                read = x.isfile() and name.endswith((CONFIG, ".model"))
                members[name] = tar.extractfile(x).read(LARGEST) if read else b""
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        reason = str(error).partition(":\n")[0]  # the rest has a line for each compression
        raise UserError(f"{file} must be an archive of NeMo: {reason}") from None
    if missing := {CONFIG, WEIGHTS} - {*members}:
        raise UserError(f"{file} must be an archive of NeMo, but has no {min(missing)}")
    with reading(file, CONFIG, "YAML"):
        fields = yaml.safe_load(members[CONFIG])
    files.require(isinstance(fields, dict), file, CONFIG, "an object", fields)
    return file, members, fields


def weights_of(file):
    """Returns {NeMo's name: array}."""
    with reading(file, WEIGHTS, "a checkpoint of PyTorch"), tarfile.open(file) as tar:
        member = next(x for x in tar if x.name.rpartition("/")[2] == WEIGHTS)
        with zipfile.ZipFile(tar.extractfile(member)) as archive:
            tensors = files.Tensors(archive).load()
        return {name: np.asarray(x, np.float32) for name, x in tensors.items() if not UNUSED.fullmatch(name)}


class Fields:
    """A part of the configuration, whose fields must have some type or value."""

    def __init__(self, file, whole, *path):
        self.file, self.name, x = file, ".".join(path), whole
        for key in path:
            x = (x or {}).get(key) if isinstance(x, dict) else None
        files.require(isinstance(x, dict), file, self.name, "an object", x)
        self.fields = x

    def must(self, name, expected, default=None):
        got = self.fields.get(name, default)
        files.require(got == expected, self.file, f"{self.name}.{name}", expected, got)

    def number(self, name, default=None):
        x = self.fields.get(name, default)
        fine = type(x) in (int, float) and x >= 0
        files.require(fine, self.file, f"{self.name}.{name}", "a number of 0 or more", x)
        return x


def encoder_of(file, whole):
    encoder = Fields(file, whole, "encoder")
    fields, style = encoder.fields, encoder.fields.get("att_context_style", "regular")
    styles = ", ".join(STYLES)
    files.require(style in STYLES, file, "encoder.att_context_style", f"one of {styles}", style)
    for name, x in ONLY.items():
        encoder.must(name, x, x)
    for name, x in STYLES[style].items():
        encoder.must(name, x, REGULAR[name])
    found = {ours: fields[theirs] for theirs, ours in ENCODER.items() if theirs in fields}
    size = round(encoder.number("d_model") * encoder.number("ff_expansion_factor", 4))
    found |= {"hidden_act": "silu", "intermediate_size": size}
    found |= {"attention_bias": fields.get("use_bias", True), "convolution_bias": fields.get("use_bias", True)}
    context = fields.get("att_context_size") or [-1, -1]
    sizes = context[0] if isinstance(context[0], list) else context
    if style != "chunked_limited":  # if there are several contexts, NeMo has three sizes, which add nothing
        fine, found["model_type"] = sizes in ([-1] * 2, [-1] * 3), hugging_face.WHOLE[0]
    else:
        left, right = sizes
        fine, found["model_type"] = left >= 0 <= right, hugging_face.CAUSAL[0]
        found |= {"sliding_window": left + 1, "default_num_lookahead_tokens": right}
    expected = "[-1, -1]" if style != "chunked_limited" else "numbers of frames before and ahead"
    files.require(fine, file, "encoder.att_context_size", expected, context)
    if more := sorted(f"{k} {x}" for k, x in fields.items() if k not in KNOWN and x not in (None, False, 0, "")):
        say_once(f"{file}: not used: encoder.{', encoder.'.join(more)}")
    return found


def contexts_of(file, whole):
    """Returns the options of an encoder that was trained in several contexts; {} for another encoder.

    NeMo adds the losses of the whole and of a context, with weights; here, each batch draws one of the two. As in
    NeMo's training, chunks count from the start of the recording. NeMo's script for live text counts them from the
    start of each window, and its convolutions see all of the window.
    """
    fields = whole["encoder"]
    if fields.get("att_context_style") != SEVERAL:
        return {}
    lists = fields.get("att_chunk_context_size")
    fine = isinstance(lists, list) and len(lists) == 3 and all(isinstance(x, list) and x for x in lists)
    fine = fine and all(type(y) is int and y >= low for x, low in zip(lists, (0, 1, 0)) for y in x)
    expected = "three lists of frames: before a chunk, of it, and ahead"
    files.require(fine, file, "encoder.att_chunk_context_size", expected, lists)
    past, chunk, ahead = (list(dict.fromkeys(x)) for x in lists)
    weights = [(whole.get("loss") or {}).get(f"{name}_loss_weight") for name in ("offline", "streaming")]
    known = all(type(x) in (int, float) and 0 < x < math.inf for x in weights)
    share = weights[0] / sum(weights) if known else 0.5
    return {"past": past, "chunk": chunk, "ahead": ahead, "whole": round(share, 6)}


def sounds_of(file, whole, causal):
    sounds = Fields(file, whole, "preprocessor")
    for name, x in SOUNDS.items():
        sounds.must(name, x, x)
    names = ("NA", None, False) if causal else ("per_feature",)
    got = sounds.fields.get("normalize")
    files.require(got in names, file, "preprocessor.normalize", names[0], got)
    rate = sounds.number("sample_rate", 16000)
    sizes = {x: round(rate * sounds.number(name, default)) for x, name, default in
             (("win_length", "window_size", 0.025), ("hop_length", "window_stride", 0.01))}  # fmt: skip
    count = sounds.fields.get("n_fft") or 2 ** math.ceil(math.log2(sizes["win_length"]))
    kind = (hugging_face.CAUSAL if causal else hugging_face.WHOLE)[1]
    features = {"feature_extractor_type": kind, "sampling_rate": rate, "feature_size": sounds.number("features", 64)}
    return features | sizes | {"n_fft": count, "preemphasis": sounds.fields.get("preemph", 0.97)}


def contents(path):
    """Returns (the archive, JSON files by name, further options, labels)."""
    file, members, whole = opened(path)
    with reading(file, CONFIG, "the configuration of a model"):
        return file, *translated(path, file, members, whole)


def translated(path, file, members, whole):
    if b"${" in members[CONFIG]:
        raise UserError(f"{file}: {CONFIG} refers to other fields by ${{...}}: save it with NeMo's save_to")
    vocabulary = labels_of(file, members, whole)
    encoder, size = encoder_of(file, whole), len(vocabulary.pieces) + 1
    fields = {"encoder_config": encoder, "vocab_size": size, "blank_token_id": size - 1}
    more, causal = {"init": str(path)} | contexts_of(file, whole), encoder["model_type"] == hugging_face.CAUSAL[0]
    if "joint" not in whole:
        fields |= {"model_type": "parakeet_ctc", "pad_token_id": size - 1}
    else:
        prednet, joint = Fields(file, whole, "decoder", "prednet"), Fields(file, whole, "joint", "jointnet")
        width = prednet.number("pred_hidden")
        joint.must("joint_hidden", width, 0)
        Fields(file, whole, "decoder").must("blank_as_pad", True, True)
        fields |= {"decoder_hidden_size": width, "num_decoder_layers": prednet.number("pred_rnn_layers", 1)}
        fields["hidden_act"] = joint.fields.get("activation", "relu")
        fields["max_symbols_per_step"] = (whole.get("decoding", {}).get("greedy") or {}).get("max_symbols") or 10
        if "aux_ctc" in whole:
            more["ctc"] = float(Fields(file, whole, "aux_ctc").number("ctc_loss_weight", 0.5)) or 0.5
        fields["model_type"] = "nemotron_asr_streaming" if causal else "parakeet_rnnt"
        if whole["joint"].get("num_extra_outputs"):
            sections = (whole.get(part) or {} for part in ("decoding", "model_defaults"))
            durations = next((y for x in sections for y in (x.get("durations"), x.get("tdt_durations")) if y), None)
            fields |= {"model_type": "parakeet_tdt", "durations": durations}
    source = {"config.json": fields, "preprocessor_config.json": sounds_of(file, whole, causal)}
    defaults = whole.get("model_defaults") or {}
    if causal and defaults.get("num_prompts"):
        names = {str(k): x for k, x in (defaults.get("prompt_dictionary") or {}).items()}
        fields |= {"model_type": "nemotron3_5_asr", "num_prompts": defaults["num_prompts"]}
        fields |= {"default_prompt_id": names.get("auto", 0)}
        source["processor_config.json"] = {"prompt_dictionary": names}
    return source, more, vocabulary


def labels_of(file, members, whole):
    """Returns the vocabulary: a model of sentencepiece, or characters."""
    kind = (whole.get("tokenizer") or {}).get("type")
    models = [x for name, x in members.items() if name.endswith(".model")]
    named = str((whole.get("tokenizer") or {}).get("model_path") or "").removeprefix("nemo:").rpartition("/")[2]
    if len(models) > 1 and named in members:
        models = [members[named]]
    if kind == "bpe" and len(models) == 1:
        return tokens.Subwords(models[0])
    labels = whole.get("labels") or (whole.get("joint") or {}).get("vocabulary")
    if not kind and labels and all(isinstance(x, str) and len(x) == 1 for x in labels):
        return tokens.Characters(labels)
    got = f"{kind} with {len(models)}"
    raise UserError(f"{file}: tokenizer.type must be bpe, with one model of sentencepiece, got {got}")


def config_of(path):
    file, source, more, _ = contents(path)
    return hugging_face.config_from(file, source).replace(**more), source


def renamed(name, causal):
    for pattern, x in MODULES.items():
        name = re.sub(pattern, x, name)
    if causal and (part := re.match(r"encoder\.subsampling\.layers\.(\d+)", name)):
        layer, place = divmod(int(part[1]) - 2, 3)
        new = "conv_in" if layer < 0 else f"layers.{layer}.{('depthwise_conv', 'pointwise_conv')[place]}"
        name = name.replace(part[0], f"encoder.subsampling.{new}")
    return name


def read(path):
    """Returns the Model of an archive, with its parameters in float32."""
    file, source, more, vocabulary = contents(path)
    fields = source["config.json"]
    causal = fields["encoder_config"]["model_type"] == hugging_face.CAUSAL[0]
    arrays = {renamed(name, causal): x for name, x in weights_of(file).items()}
    if "prompt_projector.linear_1.bias" in arrays:
        fields["prompt_intermediate_size"] = len(arrays["prompt_projector.linear_1.bias"])
    config = hugging_face.config_from(file, source).replace(**more)
    return hugging_face.filled(file, config, source, vocabulary, arrays)
