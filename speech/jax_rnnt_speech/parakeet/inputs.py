"""Tokenizers, and the labels of recordings."""

import json
from pathlib import Path

from jax_rnnt_speech import audio, corpora, manifests, texts
from jax_rnnt_speech.config import UserError
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


def read_manifest(file, folder, model, extractor, normalize="none", audio_column="", text_column=""):
    """([(entry, labels)] that can be trained on, report of the rest) of a manifest or folder.

    In the place of a text, the entries of JSON may have "labels", a list of integers. A text needs the tokenizer of the
    checkpoint.
    """
    tokenizer, report, usable = tokenizer_of(folder), Report(), []
    config, known, encode = model.config, range(model.config.vocab_size), tokenizer and encoder_of(tokenizer)
    normalize = texts.normalizer(normalize)
    for entry, stretches in corpora.usable(manifests.read(file, audio_column, text_column), report):
        labels = entry.labels
        if labels is None:
            if not encode:
                raise UserError(f"{file} has texts: they need pip install tokenizers, and {folder}/tokenizer.json")
            text = normalize(entry.text)
            labels = encode(text) if text else ()
        samples = audio.size(stretches, extractor.sampling_rate, entry.start, entry.end)
        if not labels:
            report.add("empty transcript", entry.name)
        elif any(x not in known or x == config.blank_token_id for x in labels):
            report.add("outside the vocabulary", entry.name)
        elif config.encoder_config.length(samples // extractor.hop_length) < len(labels):
            report.add("fewer frames than labels", entry.name)
        else:
            usable.append((entry, labels))
    if not usable:
        raise UserError(f"{file} has no usable utterance" + "".join(f"; {x}" for x in report.lines()))
    return usable, report


def encoder_of(tokenizer):
    """Function of a text: its labels, with -1 for what the tokenizer does not know."""
    model = json.loads(tokenizer.to_str())["model"]
    unknown = model.get("unk_id", tokenizer.token_to_id(model.get("unk_token") or ""))
    return lambda text: [-1 if x == unknown else x for x in tokenizer.encode(text, add_special_tokens=False).ids]
