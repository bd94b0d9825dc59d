"""Models of any kind: those of runs, and others.

`open_model` reads a run's folder, our own package, or one of Hugging Face with Parakeet or Nemotron. `fresh` makes the
model of a new training, whose --init may be any of these or Whisper.
"""

import dataclasses
import functools
import os
from pathlib import Path

from jax_rnnt_speech import runs
from jax_rnnt_speech.config import Config, flag, options_of, own, tuples
from jax_rnnt_speech.config.files import from_json
from jax_rnnt_speech.config.options import option, written
from jax_rnnt_speech.data import tokens
from jax_rnnt_speech.model import Model, encoders
from jax_rnnt_speech.pretrained import hugging_face, nemo, package, whisper
from jax_rnnt_speech.system import UserError, hosts, programs, refuse_if

KINDS = {"package": package, "hugging_face": hugging_face, "whisper": whisper, "nemo": nemo}
VARIABLE = "RNNT_SPEECH_MODEL"
STACK = {"whisper": 4, "fastconformer": 1}  # rows of 80 ms, if nothing else is wanted


def kind_of(folder):
    """Returns run, package, hugging_face, whisper or nemo."""
    folder = Path(folder)
    if (folder / runs.CHECKPOINTS).is_dir():
        return "run"
    if (folder / package.SETUP).is_file():
        return "package"
    if whisper.binary_of(folder):
        return "whisper"
    if any((folder / name).is_file() for name in ("config.json", "preprocessor_config.json", "processor_config.json")):
        return "whisper" if whisper.is_whisper(folder) else "hugging_face"
    if any(x.suffix == ".nemo" and x.is_file() for x in (folder, *folder.glob("*.nemo"))):
        return "nemo"
    refuse_if(not folder.is_dir(), f"{folder} is no folder")
    expected = f"neither checkpoints/ of a run, nor {package.SETUP}, nor config.json, nor model.bin, nor a .nemo file"
    raise UserError(f"{folder} has no checkpoint: {expected}")


def read(folder, best=True):
    """Returns the Model of a folder, with its parameters; that of Whisper has an encoder alone, and no labels.

    With `best`, they are those of a run's best checkpoint, not the last.
    """
    kind = kind_of(folder)
    if kind != "run":
        return KINDS[kind].read(Path(folder))
    run = runs.open_run(Path(folder))
    checkpoint = run.whole(["params"], runs.BEST_FIRST[:: 1 if best else -1])
    model = Model.from_setup(runs.read_setup(checkpoint))
    (model.params,) = run.restore(checkpoint, params=model.shapes)
    return model


def default():
    """Returns the folder of the model that is used where none is named."""
    folder = Path(os.environ.get(VARIABLE) or Path.home() / ".cache/jax_rnnt_speech/read-speech")
    if not folder.is_dir():
        raise UserError(f"--model is missing, and there is no {folder}: docs/speech/read_speech.md of jax_rnnt "
                        f"says how to make it; {VARIABLE} may name another folder")  # fmt: skip
    return folder


@dataclasses.dataclass(frozen=True)
class Opening:
    """The options that decide which model a command opens."""

    model: Path | None = option(
        None, Path, "folder of a model: of a training, of convert, of transformers, or a .nemo file; default: "
        f"${VARIABLE}, or the model in the user's cache", metavar="MODEL",
    )  # fmt: skip
    checkpoint: str | None = option(
        None, str, "which weights of a training: the best by held-out WER (the default), or the last",
        choices=("best", "last"),
    )  # fmt: skip
    platform: str | None = option(
        None, str, "platform to run on; default: the one that JAX finds", choices=("cpu", "gpu", "tpu")
    )

    @functools.cached_property
    def folder(self):
        return self.model or default()

    def opened(self, platform=None):
        return open_model(self.folder, self.platform or platform, self.checkpoint, getattr(self, "dtype", None))


@dataclasses.dataclass(frozen=True)
class Computing(Opening):
    """The options that decide which model a command opens to search with."""

    dtype: str | None = option(
        None, str, "type of matrix products, whose sums and search are float32; default: that of the training",
        choices=("float32", "bfloat16"),
    )  # fmt: skip


def open_model(folder=None, platform=None, checkpoint=None, dtype=None):
    """Opens the Model of a folder, with its parameters in `params`, to transcribe with.

    `checkpoint` is best or last; `dtype` is that of matrix products, in place of the training's.
    """
    folder = folder or default()
    if checkpoint and kind_of(folder) != "run":
        raise UserError(f"--checkpoint {checkpoint}: {folder} is no folder of a training")
    hosts.devices(platform, 1)
    programs.keep(Path(folder) / "programs" if kind_of(folder) == "run" else None)
    model = read(folder, best=checkpoint != "last")
    if len(model.mean) != model.extractor.mels:
        raise UserError(f"{folder} holds a model of {len(model.mean)} features a frame that are not those of audio")
    refuse_if(not model.tokens.pieces, f"{folder} has an encoder alone: rnnt-speech train --init {folder}")
    return model if dtype in (None, model.config.compute.dtype) else computing(model, dtype)


def computing(model, dtype):
    """Returns the Model whose matrix products have a type, with the same parameters."""
    config = model.config.replace(dtype=dtype)
    other = Model(config, model.tokens, model.mean, model.deviation, model.source)
    other.take(model.params)
    return other


def setup_of(folder):
    """Returns the JSON of a run or of our own package; None for other models."""
    read = {"run": runs.setup_of, "package": package.setup_of}.get(kind_of(folder))
    return read and read(Path(folder))


def outline(folder):
    """Returns (Config, the JSON files of its source, vocabulary) of a folder."""
    if setup := setup_of(folder):
        return *config_of(folder), tokens.from_json(setup["tokens"])
    model = KINDS[kind_of(folder)].read(Path(folder))
    return model.config, model.source, model.tokens


def config_of(folder):
    """Returns (Config of a folder, the JSON files of its source)."""
    if setup := setup_of(folder):
        return Config.from_options(**from_json(setup["config"], f"{folder}")), setup.get("source")
    return KINDS[kind_of(folder)].config_of(Path(folder))


def hears_anew(config):
    """Returns True if a new training has features of its own: it has no --init, or one that was trained with others."""
    return not config.run.init or config.features.kind != config_of(config.run.init)[0].features.kind


def completed(options):
    """Returns options of a new training, with those that its --init decides.

    It may have other features than those: the ones that sherpa-onnx computes, whose frames are what they are.
    """
    if not options.get("init"):
        if options.get("chunk"):
            encoders.checked(Config.from_options(**options), None)
        return options
    folder, (start, source) = options["init"], config_of(options["init"])
    new = kind_of(folder) == "whisper" or options.get("new_head", False)
    options = ({"stack": STACK.get(start.encoder.kind, 0)} if new else {}) | options | {"new_head": new}
    head = options_of("head", "search") - {"prompt"}
    blocks = set() if new and not own(start) else options_of("blocks")
    decided = options_of("features", "encoder") | blocks | (set() if new else head)
    seen = {name: options.get(name, start.get(name)) for name in ("chunk", "past", "ahead", "whole")}
    if not (start.encoder.step or start.replace(**seen).encoder.step):  # no array depends on what frames see
        decided, options = decided - seen.keys(), options | seen
    if options.get("features") == "sherpa-onnx":
        decided = decided - {"features", "window", "hop"}
    for name in sorted(decided):
        x = start.get(name)
        if tuples(options.get(name, x)) != x:
            hint = ": --new-head allows that" if name in head else ""
            raise UserError(f"{flag(name)} {written(options[name])}: {folder} has {written(x)}{hint}")
        options[name] = x
    encoders.checked(Config.from_options(**options), source)
    return options


def fresh(config, corpus):
    """Returns the Model of a new training, with random weights or from --init."""
    features, start = corpus.features, config.run.init
    new = not start or config.run.new_head
    said = getattr(corpus, "texts", None) or (x.text for x in corpus.utterances)
    vocabulary = tokens.train(config.head, said) if new else None
    if not start:
        return Model(config, vocabulary, [0.0] * features, [1.0] * features)
    old = read(start)
    if len(old.mean) != features:
        raise UserError(f"--init {start} hears {len(old.mean)} features a frame, {config.data.train} has {features}")
    anew = hears_anew(config)
    statistics = ([0.0] * features, [1.0] * features) if anew else (old.mean, old.deviation)
    model = Model(config, vocabulary or old.tokens, *statistics, old.source)
    if not anew and model.extractor != old.extractor:  # sherpa-onnx computes others for an LSTM predictor and for TDT
        raise UserError(f"--init {start} hears other features than sherpa-onnx computes for the new head: "
                        "neither or both must have --predictor lstm or --loss tdt")  # fmt: skip
    model.take({name: old.params[name] for name in (["encoder"] if new else old.params)})
    return model
