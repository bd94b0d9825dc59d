"""Encoders, by the names of --encoder. `base.Encoder` says what all of them have."""

import dataclasses
import math

from jax_rnnt_speech.data import features
from jax_rnnt_speech.model.encoders.conformer import Conformer
from jax_rnnt_speech.model.encoders.convolutional import Convolutional
from jax_rnnt_speech.model.encoders.fastconformer import EncoderConfig, FastConformer
from jax_rnnt_speech.model.encoders.whisper import Whisper, WhisperConfig
from jax_rnnt_speech.system import UserError

OWN = {"conformer": Conformer, "convolutional": Convolutional}
PRETRAINED = {"fastconformer": (FastConformer, EncoderConfig), "whisper": (Whisper, WhisperConfig)}


def fields_of(source):
    """Returns the fields of an encoder, among the JSON files of a pretrained model."""
    fields = (source or {}).get("config.json", {})
    return fields.get("encoder_config", fields)


def subsampling(config, source):
    """Returns the feature frames of a row that predictor and joint see."""
    if config.encoder.kind in OWN:
        return math.prod(time for time, _ in config.encoder.strides)
    factor = EncoderConfig.subsampling_factor if config.encoder.kind == "fastconformer" else Whisper.subsampling
    return fields_of(source).get("subsampling_factor", factor) * max(config.head.stack, 1)


def longest(config, source):
    """Returns the seconds of the longest recording that the encoder takes."""
    if config.encoder.kind != "whisper":
        return math.inf
    extractor = features.extractor(config)
    places = fields_of(source).get("max_source_positions", WhisperConfig.max_source_positions)
    return max(0, Whisper.subsampling * places * extractor.hop - extractor.tail) / extractor.rate


def checked(config, source):
    """Returns the configuration; raises an error if recordings or contexts are too long for the encoder."""
    seconds = config.data.max_seconds
    if seconds > (most := longest(config, source)):
        raise UserError(f"--max-seconds {seconds:g}: the encoder hears {most:g} s at most")
    for name in ("chunk", "ahead") if config.encoder.draws else ():
        sizes = getattr(config.encoder, name)
        frames = max(sizes) if isinstance(sizes, tuple) else sizes
        if (lasts := frames * subsampling(config, source) * config.features.hop / 1000) > seconds:
            raise UserError(f"--{name} {frames} is {lasts:.4g} s, longer than all utterances (--max-seconds {seconds:g}"
                            "): --whole is the share of batches that see everything")  # fmt: skip
    return config


def make(config, inputs, fields, *, dtype, rngs):
    """Makes the encoder of a configuration. `fields` are those of a pretrained one's config.json."""
    if config.encoder.kind in OWN:
        encoder = OWN[config.encoder.kind](config, inputs, dtype=dtype, rngs=rngs)
    else:
        kind, sizes = PRETRAINED[config.encoder.kind]
        known = {field.name for field in dataclasses.fields(sizes)}
        encoder = kind(sizes(**{name: x for name, x in fields.items() if name in known}), dtype=dtype, rngs=rngs)
    encoder.remat, encoder.scan = config.compute.remat, config.compute.scan
    encoder.set_attributes(use_running_average=config.network.batch_norm == "frozen", raise_if_not_found=False)
    return encoder
