"""Models from elsewhere: what a training starts from, and what transcribes without one.

`open_model` reads a run's folder, or one of Hugging Face with Parakeet or Nemotron. `fresh` makes the recogniser of a
new training, whose --init may be any of these or Whisper.
"""

import os
from pathlib import Path

from jax_rnnt_speech.config import PRETRAINED, Config, from_json
from jax_rnnt_speech.data import tokens
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.pretrained import hugging_face, nemo, package, whisper
from jax_rnnt_speech.recognition.recogniser import Recogniser
from jax_rnnt_speech.system import UserError, hosts, programs
from jax_rnnt_speech.training import runs

# Options that weights decide: of the features and the encoder; with the old head, all of these.
HEARING = {"rate", "mels", "window", "hop", "features", "encoder", "chunk"}
KINDS = {"package": package, "hugging_face": hugging_face, "whisper": whisper, "nemo": nemo}
VARIABLE = "RNNT_SPEECH_MODEL"
STACK = {"whisper": 4, "fastconformer": 1}  # rows of 80 ms, if nothing else is wanted
OWN_ENCODER = {"width", "blocks", "heads", "expansion", "kernel", "strides", "channels", "past"}
HEAD = {"tokens", "vocabulary", "alphabet", "predictor", "history", "predictor_layers", "activation", "loss"}
HEAD |= {"durations", "sigma", "max_symbols", "duration_choice", "stack"}


def kind_of(folder):
    """run, package, hugging_face, whisper or nemo."""
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
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder")
    known = f"neither checkpoints/ of a run, nor {package.SETUP}, nor config.json, nor model.bin"
    raise UserError(f"{folder} has no checkpoint: {known}")


def read(folder, best=True):
    """The Recogniser of a folder, with its parameters; that of Whisper has an encoder alone, and no labels.

    `best`: those of a run's best checkpoint, not the last.
    """
    kind = kind_of(folder)
    if kind != "run":
        return KINDS[kind].read(Path(folder))
    run = runs.open_run(Path(folder))
    checkpoint = run.whole(["params"], runs.BEST_FIRST[:: 1 if best else -1])
    recogniser = Recogniser.from_setup(runs.read_setup(checkpoint))
    (recogniser.params,) = run.restore(checkpoint, params=recogniser.shapes)
    return recogniser


def add_checkpoint(parser):
    help = "of a training: the best by held-out WER (the default), or the last"
    parser.add_argument("--checkpoint", choices=("best", "last"), help=help)


def add_options(parser):
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: what JAX finds")
    parser.add_argument("--prompt", metavar="NAME", help="language of the recordings, for a model that takes one")
    add_checkpoint(parser)


def default():
    """The folder of the model that is used where none is named."""
    folder = Path(os.environ.get(VARIABLE) or Path.home() / ".cache/jax_rnnt_speech/read-speech")
    if not folder.is_dir():
        raise UserError(f"--model is missing, and there is no {folder}: docs/read_speech.md of jax_rnnt says how to "
                        f"make it; {VARIABLE} may name another folder")  # fmt: skip
    return folder


def open_model(folder=None, platform=None, checkpoint=None):
    """The Recogniser of a folder, with its parameters in `params`, to transcribe with. `checkpoint`: best or last."""
    folder = folder or default()
    if checkpoint and kind_of(folder) != "run":
        raise UserError(f"--checkpoint {checkpoint}: {folder} is no folder of a training")
    hosts.devices(platform, 1)
    programs.keep(Path(folder) / "programs" if kind_of(folder) == "run" else None)
    recogniser = read(folder, best=checkpoint != "last")
    if recogniser.config.train == "handwritten-digits":
        raise UserError(f"{folder} holds a model of images, which hears nothing")
    if not recogniser.tokens.pieces:
        raise UserError(f"{folder} has an encoder alone: rnnt-speech train --init {folder}")
    return recogniser


def config_of(folder):
    """(Config of a folder, the JSON files of its source)."""
    kind = kind_of(folder)
    if kind != "run":
        return KINDS[kind].config_of(Path(folder))
    setup = runs.setup_of(Path(folder))
    return Config(**from_json(setup["config"], f"{folder}")), setup.get("source")


def completed(options):
    """Options of a new training, with those that its --init decides."""
    if not options.get("init"):
        return options
    folder, (start, source) = options["init"], config_of(options["init"])
    new = kind_of(folder) == "whisper" or options.get("new_head", False)
    options = ({"stack": STACK.get(start.encoder, 0)} if new else {}) | options | {"new_head": new}
    decided = HEARING | (set() if new and start.encoder in PRETRAINED else OWN_ENCODER) | (set() if new else HEAD)
    for name in decided:
        x = getattr(start, name)
        x = [list(pair) for pair in x] if name == "strides" else list(x) if name == "durations" else x
        if options.get(name, x) != x:
            hint = ": --new-head allows that" if name in HEAD else ""
            raise UserError(f"--{name.replace('_', '-')} {options[name]}: {folder} has {x}{hint}")
        options[name] = x
    encoders.checked(Config(**options), source)
    return options


def fresh(config, corpus, **more):
    """The Recogniser of a new training: of random weights, or from --init."""
    features = corpus.features
    if not config.init:
        vocabulary = tokens.train(config, (x.text for x in corpus.utterances))
        return Recogniser(config, vocabulary, [0.0] * features, [1.0] * features, **more)
    start = read(config.init)
    vocabulary = tokens.train(config, (x.text for x in corpus.utterances)) if config.new_head else start.tokens
    if len(start.mean) != features:
        raise UserError(f"--init {config.init} hears {len(start.mean)} features a frame, {config.train} has {features}")
    recogniser = Recogniser(config, vocabulary, start.mean, start.deviation, start.source, **more)
    recogniser.take({name: start.params[name] for name in (["encoder"] if config.new_head else start.params)})
    return recogniser
