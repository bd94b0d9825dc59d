"""What decides the result of a run: one dataclass, whose fields are options of the command line and of a JSON file."""

import argparse
import contextlib
import dataclasses
import json
import math
import re
import sys
from pathlib import Path

from jax_rnnt_speech.model.losses import LOSSES
from jax_rnnt_speech.system import UserError

PRETRAINED = "fastconformer", "whisper"
ENCODERS = "conformer", "convolutional", *PRETRAINED
RETIRED = {"copies": 1, "mel_on": "host"}  # options of earlier runs, which are read where they changed nothing
CONFIGS = Path(__file__).parent / "presets"


def digits(name):
    """(kind, folder) of handwritten-digits and spoken-digits:FOLDER; ("", name) of other corpora."""
    kind, _, folder = name.partition(":") if isinstance(name, str) else ("", "", "")
    return (kind, folder) if name == "handwritten-digits" or (kind == "spoken-digits" and folder) else ("", name)


def names(x):
    """A list of the names of corpora."""
    return list(x) if isinstance(x, list | tuple) or x == "" else [x]


def sources(x):
    """A type of argparse: the name of a corpus, or a list of names; of one, it is that name."""
    if x != "" and (not isinstance(x, str | list) or not x or not all(type(y) is str for y in x)):
        raise argparse.ArgumentTypeError(f"expected a name or a list of names, got {x}")
    return x[0] if isinstance(x, list) and len(x) == 1 else x


def number(kind, low, below=math.inf, most=math.inf):
    """A type of argparse: a number from `low` on, less than `below` and `most` or less."""

    def read(text):
        try:
            x = kind(text)
            if isinstance(text, bool) or x != float(text):
                x = None
        except (ValueError, TypeError, OverflowError):
            x = None
        if x is None or not low <= x < below or x > most:
            limit = "" if below == math.inf else f" and less than {below:.10g}"
            limit += "" if most == math.inf else f" and {most:.10g} or less"
            name = {int: "whole number", float: "number"}[kind]
            raise argparse.ArgumentTypeError(f"expected a {name} of {low} or more{limit}, got {text}")
        return x

    return read


natural, positive, amount, share = number(int, 0), number(int, 1), number(float, 0), number(float, 0, 1)
seed = number(int, 0, 2**32)


def sequence(read, valid, metavar, expected):
    """A type of argparse: text with commas, of which `read` makes values, or a list of JSON."""

    def parse(text):
        try:
            values = list(map(read, text.split(",") if text else [])) if isinstance(text, str) else list(text)
            if valid(values):
                return values
        except (ValueError, TypeError):
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text}")

    parse.metavar = metavar
    return parse


def within(numbers, low, high):
    return all(type(x) in (int, float) and low <= x <= high for x in numbers)


strides = sequence(
    lambda text: [int(x) for x in text.split("x")],
    lambda pairs: pairs and all(len(x) == 2 and all(type(y) is int and y >= 1 for y in x) for x in pairs),
    "STRIDES",
    "strides over time and features such as 2x2,2x2",
)
durations = sequence(
    int,
    lambda x: all(type(y) is int and y >= 0 for y in x) and any(x) and len({*x}) == len(x),
    "N,...",
    "different durations such as 0,1,2, and not 0 alone",
)
speeds = sequence(float, lambda x: x and within(x, 0.5, 2), "N,...", "speeds from 0.5 to 2 such as 0.9,1,1.1")
snr = sequence(
    float,
    lambda x: within(x, -100, 100) and x == sorted(x) and len(x) == 2,
    "LOW,HIGH",
    "the lowest and highest ratio in dB such as 5,20",
)
rates = sequence(
    lambda text: [text.rpartition("=")[0], float(text.rpartition("=")[2])],
    lambda pairs: all(type(name) is str and name and within([x], 0, sys.float_info.max) for name, x in pairs),
    "PREFIX=N,...",
    "prefixes of parameters and factors such as encoder=0.1",
)


def option(default, kind, text, **more):
    return dataclasses.field(default=default, metadata={"type": kind, "help": text, **more})


DATA = {"nargs": "+", "metavar": "DATA"}


def switch(text):
    return dataclasses.field(default=False, metadata={"action": argparse.BooleanOptionalAction, "help": text})


@dataclasses.dataclass(frozen=True)
class Config:
    # Each of these is a name, or a list of names.
    train: str = option("", sources, "manifests or folders; handwritten-digits; spoken-digits:FOLDER", **DATA)
    valid: str = option("", sources, "held-out data, as for --train; digits have their own", **DATA)
    synthetic: str = option("", sources, "more of them for training, such as synthetic speech", **DATA)
    synthetic_share: float = option(0.5, share, "share of the utterances of a batch that are from --synthetic")
    # Audio and text.
    rate: int = option(16000, positive, "samples a second; other files are resampled")
    mels: int = option(80, positive, "features of a frame")
    window: float = option(25.0, amount, "length of a frame, in milliseconds")
    hop: float = option(10.0, amount, "milliseconds from one frame to the next")
    features: str = option("log-mel", str, "our spectra, NeMo's or Whisper's", choices=("log-mel", "nemo", "whisper"))
    max_seconds: float = option(20.0, amount, "seconds; longer utterances are left out")
    tokens: str = option("characters", str, "what the labels are", choices=("characters", "subwords"))
    vocabulary: int = option(256, positive, "number of subwords, with --tokens subwords")
    alphabet: str = option("", str, "characters that texts may have; default: those of the training texts")
    lower: bool = switch("put texts in lower case, with --normalize none:tr in Turkish letters")
    normalize: str = option(
        "none", str, "texts as they are said: none, basic (English), basic:LANGUAGE, or by FILE:FUNCTION"
    )
    audio_column: str = option("", str, "key or column of a manifest that names the audio; default: the usual ones")
    text_column: str = option("", str, "key or column of a manifest that has the text; default: the usual ones")
    speaker_column: str = option("", str, "key or column of a manifest that names the speaker; default: the usual ones")
    text: str = option("", str, "sentences, a line each, to teach predictor and joint without audio", metavar="FILE")
    text_weight: float = option(0.3, amount, "weight of the loss of --text")
    # Batches.
    batch_seconds: float = option(0.0, amount, "seconds of a batch, padding included; 0: --batch counts")
    batch: int = option(16, positive, "utterances in a batch, with --batch-seconds 0")
    buckets: int = option(4, positive, "shapes of batches at most; each has utterances of similar length")
    speeds: tuple = option((1.0,), speeds, "at which each recording of --train is heard, beside 1")
    noise: str = option("", str, "folder of audio; each recording is also heard with it added", metavar="FOLDER")
    snr: tuple = option((5.0, 20.0), snr, "range of the ratio of speech to --noise, in dB")
    gain: float = option(
        0.0, number(float, 0, most=100), "dB by which noisy copies are louder or softer at most; also without --noise"
    )
    time_masks: int = option(2, natural, "SpecAugment: masks over time")
    time_mask: float = option(0.05, share, "share of the frames that a mask over time hides at most")
    mel_masks: int = option(2, natural, "SpecAugment: masks over features")
    mel_mask: int = option(20, natural, "features that a mask hides at most")
    # Model.
    init: str = option("", str, "start from a run, Parakeet, Nemotron or Whisper", metavar="FOLDER")
    new_head: bool = switch("with --init: its encoder alone, and labels of --tokens")
    width: int = option(256, positive, "width of the encoder; of what follows a pretrained one")
    encoder: str = option("conformer", str, "kind of the encoder; the last two need --init", choices=ENCODERS)
    blocks: int = option(8, positive, "blocks of the encoder, or between a pretrained one and a new head")
    stack: int = option(0, natural, "rows of a pretrained encoder that are joined for --blocks; 0: no such blocks")
    heads: int = option(4, positive, "heads of the attention")
    expansion: int = option(4, positive, "width of the feed-forward layers, in widths of a block")
    kernel: int = option(15, positive, "frames that a convolution sees")
    strides: tuple = option(((2, 2), (2, 2)), strides, "strides of the first convolutions: TIMExFEATURES,...")
    channels: int = option(32, positive, "channels of the first convolutions")
    chunk: int = option(0, natural, "encoder frames that see each other and --past, for streams; 0: all see all")
    past: int = option(64, natural, "encoder frames before its chunk that a frame sees")
    predictor: str = option("stateless", str, "network that reads the labels", choices=("stateless", "lstm"))
    history: int = option(2, positive, "labels that a stateless predictor sees")
    predictor_layers: int = option(1, positive, "layers of the LSTM predictor")
    activation: str = option("tanh", str, "activation of the joint", choices=("tanh", "relu", "silu", "gelu"))
    dropout: float = option(0.1, share, "dropout in the blocks and the joint")
    row_dropout: float = option(0.0, share, "dropout of a pretrained encoder's rows, before --blocks")
    dtype: str = option("float32", str, "type of matrix products; weights are float32", choices=("float32", "bfloat16"))
    bfloat16_rows: bool = switch("rows of frozen blocks in the cache by products in bfloat16")
    remat: bool = switch("compute blocks again in the backward pass, which saves memory")
    batch_norm: str = option(
        "frozen", str, "statistics of a pretrained encoder's: its own, or each batch's", choices=("frozen", "batch")
    )
    scan: bool = switch("the encoder's blocks as one program that is run for each: compiles in less time")
    # Loss and optimiser.
    loss: str = option("rnnt", str, "loss of the training", choices=tuple(LOSSES))
    prompt: str = option("", str, "language, for a pretrained model that takes one; default: its own choice")
    durations: tuple = option((0, 1, 2, 3, 4), durations, "frames that a symbol of --loss tdt may read")
    sigma: float = option(0.05, amount, "under-normalisation of --loss tdt and multiblank, in nats")
    max_symbols: int = option(10, positive, "labels that a search writes in a frame, at most")
    duration_choice: str = option(
        "pair", str, "greedy search with --loss tdt: pairs, or the token first", choices=("pair", "token_first")
    )
    joint: str = option("tiles", str, "compute all logits at once, or in tiles", choices=("logits", "tiles"))
    ctc: float = option(0.0, amount, "weight of a CTC loss beside the transducer's")
    fastemit: float = option(0.0, amount, "lambda of FastEmit, which makes labels come earlier")
    steps: int = option(10000, natural, "batches to train on")
    accumulate: int = option(1, positive, "batches for each update")
    average: float = option(0.0, share, "decay of the weights' moving average, which is tested and used; 0: none")
    patience: int = option(0, natural, "tests without a better WER that end the run; 0: any number")
    freeze: str = option("", str, "prefixes of parameters, as in encoder,head/blocks; encoder:N is its first N blocks")
    rates: tuple = option((), rates, "factors of the learning rate, by prefixes of parameters: encoder=0.1")
    shard: bool = switch("split parameters and the optimiser's state over the devices")
    learning_rate: float = option(1e-3, amount, "highest learning rate, which then falls as a cosine")
    warmup: float = option(0.1, share, "share of the updates until the highest learning rate")
    clip: float = option(1.0, amount, "largest norm of the gradient; 0: any")
    decay: float = option(0.01, amount, "weight decay of AdamW")
    seed: int = option(0, seed, "seed of weights, order and masks")

    def checked(self):
        """Itself, to train with; raises where corpora are missing or options contradict each other."""
        if not self.train:
            raise UserError("--train is missing: a manifest, a folder, handwritten-digits or spoken-digits:FOLDER")
        if not self.valid and not digits(self.train)[0]:
            raise UserError("--valid is missing: held-out utterances, as for --train")
        if not self.init and (self.encoder in PRETRAINED or self.new_head):
            option = "--new-head" if self.new_head else f"--encoder {self.encoder}"
            raise UserError(f"{option} needs --init, a folder with weights of an encoder")
        return self.consistent()

    def consistent(self):
        """Itself; raises where options contradict each other."""
        for name, there, needed in (
            ("synthetic_share", self.synthetic, "--synthetic"),
            ("text_weight", self.text, "--text"),
            ("past", self.chunk, "--chunk"),
            ("bfloat16_rows", "encoder:" in self.freeze, "--freeze encoder:N, whose rows the cache holds"),
            ("stack", self.encoder in PRETRAINED, "a pretrained encoder, whose rows it joins"),
            ("batch", not self.batch_seconds, f"--batch-seconds 0, got {self.batch_seconds:g}"),
            ("alphabet", self.tokens == "characters", "--tokens characters"),
            ("vocabulary", self.tokens == "subwords", "--tokens subwords"),
            ("scan", self.encoder != "convolutional", "blocks that are alike, which --encoder convolutional lacks"),
            ("ctc", self.loss != "ctc", "a transducer beside it, which --loss ctc lacks"),
            ("text", self.loss != "ctc", "a transducer, which --loss ctc lacks"),
        ):
            if not there and getattr(self, name) != getattr(Config, name):
                raise UserError(f"--{name.replace('_', '-')} needs {needed}")
        if self.synthetic and not self.synthetic_share:
            raise UserError("--synthetic-share 0 takes nothing of --synthetic: leave both out")
        if list(self.snr) != list(Config.snr) and not self.noise:
            raise UserError("--snr needs --noise")
        if (self.encoder == "conformer" or self.stack) and self.width % (2 * self.heads):
            raise UserError(f"--width {self.width} must be a multiple of 2 x --heads {self.heads}")
        if not 0 < self.hop <= self.window:
            raise UserError(f"--hop {self.hop:g} must be above 0, and at most --window {self.window:g}")
        if round(self.rate * self.window / 1000) < 2:
            raise UserError(f"--window {self.window:g} has fewer than two samples at --rate {self.rate}")
        if self.steps < self.accumulate:
            raise UserError(f"--accumulate {self.accumulate} must be at most --steps {self.steps}")
        return self


def add_options(parser, names=None, default=None):
    """Fields of Config, by default all; options that are not given are absent from the result.

    `default`: what help says of the default, if it is not that of Config.
    """
    for field in dataclasses.fields(Config):
        if names and field.name not in names:
            continue
        more = dict(field.metadata)
        usual = field.default
        if isinstance(usual, tuple):
            usual = ",".join("x".join(map(str, x)) if isinstance(x, tuple) else f"{x:g}" for x in usual)
        if not {"choices", "action", "metavar"} & more.keys():
            more["metavar"] = "TEXT" if more["type"] is str else getattr(more["type"], "metavar", "N")
        if default:
            more["help"] = f"{more['help'].partition('; default')[0]} ({default})"
        elif usual not in ("", 0):
            more["help"] += f" ({usual})"
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS, **more)


def given(args, names):
    """Options of a command that take the place of a run's. Of --batch and --batch-seconds the given one counts."""
    found = {name: x for name, x in vars(args).items() if name in names}
    if "batch" in found:
        found.setdefault("batch_seconds", 0.0)
    elif "batch_seconds" in found:
        found["batch"] = Config.batch
    return found


def changed(config, args, names):
    """The configuration of a run with options of a command. A column that only the run names may be missing."""
    columns = {name: [x] for name in ("audio_column", "text_column", "speaker_column") if (x := getattr(config, name))}
    return dataclasses.replace(config, **columns | given(args, names))


def read_file(name):
    """Options of a JSON file, or of one of the folder `presets` by its name."""
    path = Path(name) if Path(name).is_file() else CONFIGS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(x.stem for x in CONFIGS.glob("*.json")))
        raise UserError(f"--config {name} is neither a file nor one of {known}")
    try:
        options = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--config {name} is not readable as JSON: {error}") from None
    return from_json(options, f"--config {name}")


@contextlib.contextmanager
def origins(file, options):
    """Errors say which of the options that they name are those of a file."""
    try:
        yield
    except UserError as error:
        named = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", str(error))}
        chosen = [x for x in options if x in named and options[x] != getattr(Config, x)]
        found = [f"{x} {options[x]}, by default {getattr(Config, x) or 'off'}" for x in chosen]
        raise UserError(f"{error} ({file} has {'; '.join(found)})" if found else f"{error}") from None


def from_json(options, name):
    """The same options with their types checked, as the command line checks them."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    checked = {}
    if not isinstance(options, dict):
        raise UserError(f"{name}: expected an object of options, got {type(options).__name__}")
    for key, x in options.items():
        if key in RETIRED and x == RETIRED[key]:
            continue
        if key not in fields:
            raise UserError(f"{name}: there is no option {key}")
        kind, choices = fields[key].metadata.get("type"), fields[key].metadata.get("choices")
        try:
            if kind is None and not isinstance(x, bool):
                raise argparse.ArgumentTypeError(f"expected true or false, got {x}")
            if kind is str and not isinstance(x, str):
                raise argparse.ArgumentTypeError(f"expected text, got {x}")
            checked[key] = x if kind is None else kind(x)
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{name}: {key}: {error}") from None
        if choices and x not in choices:
            raise UserError(f"{name}: {key}: expected one of {', '.join(choices)}, got {x}")
    return checked
