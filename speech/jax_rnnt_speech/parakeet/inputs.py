"""Tokenizers, and manifests of recordings with texts."""

import json
from pathlib import Path

from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.corpora import lines_of
from jax_rnnt_speech.features import read_named
from jax_rnnt_speech.utterances import Report


def tokenizer_of(folder):
    """The tokenizer of a checkpoint, or None: the package, or tokenizer.json, is not there."""
    file = Path(folder) / "tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    try:
        return Tokenizer.from_file(str(file)) if file.exists() else None
    except Exception as error:  # tokenizers raises no narrower one
        raise UserError(f"{file} is no tokenizer: {error}") from None


def read_manifest(file, folder, model, extractor):
    """([(recording, labels)] that can be trained on, report of the rest) of a manifest, whose paths are relative to it.

    A line is {"audio_filepath": "a.wav", "text": "..."}, as in NeMo. In the place of the text may stand "labels", a
    list of integers. A text needs the tokenizer of the checkpoint.
    """
    file, tokenizer, report, examples = Path(file), tokenizer_of(folder), Report(), []
    config, known, encode = model.config, range(model.config.vocab_size), tokenizer and encoder_of(tokenizer)
    for i, entry in entries(file):
        if entry is None:
            report.add("not audio_filepath and text or labels", f"{file.name} line {i}")
            continue
        name, labels = entry
        if isinstance(labels, str):
            if not encode:
                raise UserError(f"{file} has texts: they need pip install tokenizers, and {folder}/tokenizer.json")
            text = " ".join(labels.split())
            labels = encode(text) if text else []
        try:
            recording = read_named(file.parent / name, extractor.sampling_rate)
        except UserError:
            report.add("missing or bad audio", name)
            continue
        if not labels:
            report.add("empty transcript", name)
        elif any(x not in known or x == config.blank_token_id for x in labels):
            report.add("outside the vocabulary", name)
        elif config.encoder_config.length(len(recording) // extractor.hop_length) < len(labels):
            report.add("fewer frames than labels", name)
        else:
            examples.append((recording, labels))
    if not examples:
        raise UserError(f"{file} has no usable utterance" + "".join(f"; {x}" for x in report.lines()))
    return examples, report


def entries(file):
    """(number, (audio, text or labels)) of each line, or (number, None) of one that has no such thing."""
    try:
        for i, line in lines_of(file):
            yield i, entry_of(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} must be UTF-8: {error}") from None


def entry_of(line):
    try:
        x = json.loads(line)
        kind = "labels" if "labels" in x else "text"
        name, said = x["audio_filepath"], x[kind]
    except (ValueError, KeyError, TypeError):
        return None
    whole = isinstance(name, str) and not x.get("offset")  # NeMo's offset: a part of the recording
    if kind == "labels":
        right = isinstance(said, list) and all(type(y) is int for y in said)
    else:
        right = isinstance(said, str)
    return (name, said) if whole and right else None


def encoder_of(tokenizer):
    """Function of a text: its labels, with -1 for what the tokenizer does not know."""
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    return lambda text: [-1 if x == unknown else x for x in tokenizer.encode(text, add_special_tokens=False).ids]
