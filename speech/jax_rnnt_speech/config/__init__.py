"""The configuration of a run decides its result: dataclasses, whose fields are options in the command line and JSON.

A function takes the part of the tree that it needs. Options have one name each over the whole tree, so that the command
line stays flat: `Config.from_options(width=8)` is `Config(blocks=Blocks(width=8))`. `command_line` and `files` read
them.
"""

import dataclasses
import math
import types

from jax_rnnt_speech.config.options import (
    amount,
    counts,
    dashed,
    durations,
    natural,
    number,
    option,
    positive,
    rates,
    satisfied,
    seed,
    share,
    snr,
    sources,
    speeds,
    strides,
    written,
)
from jax_rnnt_speech.system import UserError, refuse_if

PRETRAINED = "fastconformer", "whisper"
ENCODERS = "conformer", "convolutional", *PRETRAINED
# The losses of `model.losses`, with jax_rnnt.
LOSSES = "rnnt", "monotonic", "constrained", "tdt", "multiblank", "hat", "robust", "wildcard", "pruned", "ctc"
# Sections on whose options a checkpoint's arrays, or their meaning, depend, except for options that say otherwise.
FIXED = "features", "encoder", "blocks", "head"
ONE_A_FRAME = "monotonic", "constrained"  # losses by which each label reads a frame
MORE_MASKS = 2.5  # factor by which CR-CTC raises masks over time (Yao et al. 2024)
MOST_FRAMES = 1 << 20  # limit for a step of a stream, and for what it remembers: 11 hours of frames of 40 ms
MIN_SHERPA_RATE = 4000  # its highest filter ends 400 Hz below half of this
DATA = {"nargs": "+", "metavar": "DATA"}


def own(config):
    """Returns True if the encoder is one of ours."""
    return config.encoder.kind not in PRETRAINED


def attends(config):
    """Returns True if a network of our blocks has attention."""
    return config.encoder.kind == "conformer" or bool(config.head.stack)


def where(name, *values):
    """Returns the condition that an option needs another one, or one of its values, and the condition in words."""
    words = f"{dashed(name)} {' or '.join(values)}".strip()
    return (lambda config: config.get(name) in values if values else config.get(name)), words


BLOCKS = attends, "--encoder conformer, or --stack, whose blocks have attention"
OWN = own, "an encoder of ours, conformer or convolutional"
STREAMS = where("chunk")
TRANSDUCER = lambda config: config.head.loss != "ctc", "a transducer, which --loss ctc lacks"
TDT = where("loss", "tdt")


@dataclasses.dataclass(frozen=True)
class Data:
    """Which recordings a training reads, and how they are gathered into batches."""

    # Each of these is a name, or a list of names.
    train: str = option("", sources, "manifests, folders or archives to train on, each perhaps with :WEIGHT, or a "
                        "corpus by FILE.py:FUNCTION", **DATA)  # fmt: skip
    valid: str = option("", sources, "held-out data that the run is tested on, named as for --train", **DATA)
    max_seconds: float = option(20.0, amount, "seconds; longer utterances are left out")
    text: str = option("", str, "a file of sentences, one a line, that teach predictor and joint without audio",
                       metavar="FILE", needs=TRANSDUCER)  # fmt: skip
    batch_seconds: float = option(
        0.0, amount, "seconds of audio in a batch, with its padding; 0: --batch counts utterances"
    )
    batch: int = option(16, positive, "utterances in a batch on average, with --batch-seconds 0: more where they are "
                        "short, and fewer where they are long",
                        needs=(lambda config: not config.data.batch_seconds, "--batch-seconds 0"))  # fmt: skip
    buckets: int = option(8, positive, "shapes of batches at most; as few as leave a tenth of padding")
    speeds: tuple = option((1.0,), speeds, "speeds at which each recording of --train is heard, beside 1")
    noise: str = option("", str, "folder of audio that is added to a further copy of each recording", metavar="FOLDER")
    snr: tuple = option((5.0, 20.0), snr, "range of the ratio of speech to --noise, in dB", needs=where("noise"))
    gain: float = option(
        0.0, number(float, 0, most=100), "dB by which noisy copies are louder or softer at most; also without --noise"
    )
    on_the_fly: bool = option(
        False, bool, "decode, augment and make features anew in each epoch, and keep none; default: for archives, for "
        "sources with weights, with --workers, and from 20 hours on",
    )  # fmt: skip
    buffer: int = option(10_000, natural, "utterances within which the order is shuffled, beside that of the shards")
    readers: int = option(
        0, natural, "parts of the data, of which each process reads as many; a run goes on exactly with a number of "
        "processes that divides them; 0: one for each process",
    )  # fmt: skip
    temperature: float = option(
        1.0, amount, "exponent of the weights of sources, or of their hours: 0 draws from all alike"
    )
    time_masks: int = option(2, natural, "masks over time, by SpecAugment")
    time_mask: float = option(0.05, share, "share of the frames that a mask over time hides at most")
    mel_masks: int = option(2, natural, "masks over features, by SpecAugment")
    mel_mask: int = option(20, natural, "features that a mask hides at most")


@dataclasses.dataclass(frozen=True)
class Texts:
    """How manifests and their texts are read."""

    audio_column: str = option("", str, "key or column of a manifest that names the audio; default: the usual ones")
    text_column: str = option("", str, "key or column of a manifest that has the text; default: the usual ones")
    speaker_column: str = option("", str, "key or column of a manifest that names the speaker; default: the usual ones")
    lower: bool = option(
        False, bool, "put texts in lower case, with --normalize none:tr in Turkish letters", fixed=True
    )
    normalize: str = option(
        "none", str, "write texts as they are said: none, basic (English), basic:LANGUAGE, or by FILE:FUNCTION",
        fixed=True,
    )  # fmt: skip

    @property
    def columns(self):
        return self.audio_column, self.text_column, self.speaker_column


@dataclasses.dataclass(frozen=True)
class Features:
    """How audio becomes the features that the encoder reads."""

    rate: int = option(16000, positive, "samples a second; other files are resampled")
    mels: int = option(80, positive, "features of a frame")
    window: float = option(25.0, amount, "length of a frame, in milliseconds", hidden=True)
    hop: float = option(10.0, amount, "milliseconds from one frame to the next")
    kind: str = option("log-mel", str, "our spectra, NeMo's, Whisper's, or those that sherpa-onnx computes",
                       flag="features", choices=("log-mel", "nemo", "whisper", "sherpa-onnx"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Encoder:
    """The network that makes rows of features."""

    kind: str = option("conformer", str, "kind of the encoder; the last two need --init", flag="encoder",
                       choices=ENCODERS)  # fmt: skip
    strides: tuple = option(
        ((2, 2), (2, 2)), strides, "strides of the first convolutions: TIMExFEATURES,...", needs=OWN
    )
    channels: int = option(32, positive, "channels of the first convolutions", needs=OWN)
    chunk: int | tuple = option(
        0, counts(1), "encoder frames that see each other and --past, for streams; 0: all see all. Of several numbers "
        "with commas, as of those of --past and --ahead, each batch draws one",
    )  # fmt: skip
    past: int | tuple = option(64, counts(0), "encoder frames before its chunk that a frame sees", needs=STREAMS)
    ahead: int | tuple = option(0, counts(0), "encoder frames after its chunk that a frame sees", needs=STREAMS)
    whole: float = option(
        0.0, number(float, 0, most=1), "share of the batches whose frames see everything", needs=STREAMS
    )

    def __post_init__(self):
        for name in ("chunk", "past", "ahead"):  # a list of one entry is that entry
            if isinstance(x := getattr(self, name), tuple) and len(x) == 1:
                object.__setattr__(self, name, x[0])

    @property
    def draws(self):
        """True if each batch draws what its frames see. A stream of such a model reads windows."""
        lists = any(isinstance(x, tuple) for x in (self.chunk, self.past, self.ahead))
        return bool(self.chunk and (lists or self.ahead or self.whole))

    @property
    def step(self):
        """Encoder frames in a step of a stream whose encoder has a state; 0 if its streams have no such steps."""
        return 0 if self.draws else self.chunk


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Our own blocks: those of the encoder, or those between a pretrained encoder and a new head."""

    width: int = option(256, positive, "width of the blocks, and of predictor and joint")
    count: int = option(8, positive, "number of blocks", flag="blocks")
    heads: int = option(4, positive, "heads of the attention", needs=BLOCKS)
    expansion: int = option(4, positive, "width of the feed-forward layers, in widths of a block", needs=BLOCKS)
    convolution: int = option(15, positive, "frames that the convolution of a block sees")


@dataclasses.dataclass(frozen=True)
class Head:
    """Labels, and the networks that write them."""

    tokens: str = option("characters", str, "what the labels are", choices=("characters", "subwords"))
    vocabulary: int = option(256, positive, "number of subwords", needs=where("tokens", "subwords"))
    alphabet: str = option("", str, "characters that texts may have; default: those of the training texts",
                           needs=where("tokens", "characters"))  # fmt: skip
    stack: int = option(
        0, natural, "rows of a pretrained encoder that are joined for --blocks; 0: no such blocks",
        needs=(lambda config: not own(config), "a pretrained encoder, whose rows it joins"),
    )  # fmt: skip
    predictor: str = option("stateless", str, "network that reads the labels", choices=("stateless", "lstm"))
    history: int = option(2, positive, "labels that a stateless predictor sees", needs=where("predictor", "stateless"))
    predictor_layers: int = option(1, positive, "layers of the LSTM predictor", hidden=True)
    activation: str = option(
        "tanh", str, "activation of the joint", choices=("tanh", "relu", "silu", "gelu"), hidden=True
    )
    loss: str = option("rnnt", str, "loss of the training", choices=LOSSES)
    durations: tuple = option((0, 1, 2, 3, 4), durations, "frames that a symbol of --loss tdt may read", needs=TDT)
    sigma: float = option(0.05, amount, "under-normalisation of --loss tdt and multiblank, in nats", fixed=False,
                          needs=where("loss", "tdt", "multiblank"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Network:
    """How the networks behave in a training, whatever their sizes."""

    dropout: float = option(0.1, share, "dropout in the blocks and the joint")
    row_dropout: float = option(0.0, share, "dropout of a pretrained encoder's rows, before --blocks")
    batch_norm: str = option(
        "frozen", str, "statistics of a pretrained encoder's batch norms: its own, or each batch's",
        choices=("frozen", "batch"), off=None,
    )  # fmt: skip
    joint: str = option("tiles", str, "compute all logits at once, or in tiles", choices=("logits", "tiles"))


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss that a training makes small."""

    ctc: float = option(0.0, amount, "weight of a CTC loss beside the transducer's", fixed=True, needs=TRANSDUCER)
    cr_ctc: float = option(
        0.0, amount, "weight in the CTC loss of CR-CTC, for which two copies of each utterance, with other masks and "
        "2.5 times as many over time, learn from each other",
        needs=(lambda config: config.objective.ctc or config.head.loss == "ctc", "--ctc or --loss ctc"),
    )  # fmt: skip
    fastemit: float = option(0.0, amount, "lambda of FastEmit, which makes labels come earlier")
    text_weight: float = option(0.3, amount, "weight of the loss of --text", needs=where("text"))


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """How parameters change from one update to the next."""

    accumulate: int = option(1, positive, "batches for each update", off=1)
    learning_rate: float = option(1e-3, amount, "highest learning rate, which then falls as a cosine")
    warmup: float = option(0.1, share, "share of the updates until the highest learning rate")
    clip: float = option(1.0, amount, "largest norm of the gradient; 0: any", hidden=True, off=0.0)
    decay: float = option(0.01, amount, "weight decay of AdamW")
    average: float = option(
        0.0, share, "decay of the weights' moving average, which is then tested and used; 0: none", off=0.0
    )
    freeze: str = option(
        "", str, "prefixes of parameters that do not learn, as in encoder,head/blocks; encoder:N is its first N blocks",
        off=None,
    )  # fmt: skip
    rates: tuple = option((), rates, "factors of the learning rate, by prefixes of parameters: encoder=0.1")


@dataclasses.dataclass(frozen=True)
class Run:
    """Where a training starts, how long it goes on, and when it is tested and saved."""

    init: str = option("", str, "start from a run, Parakeet, Nemotron or Whisper", metavar="FOLDER", fixed=True)
    new_head: bool = option(False, bool, "with --init: take its encoder alone, with labels of --tokens", fixed=True)
    steps: int = option(
        10000, natural, "batches to train on",
        needs=(lambda config: not config.run.epochs, "--epochs 0, as epochs count batches"),
    )  # fmt: skip
    epochs: int = option(0, natural, "train on all data so many times; 0: --steps counts")
    seed: int = option(0, seed, "seed of weights, order and masks")
    save_every: int = option(1000, positive, "steps between checkpoints", free=True)
    valid_every: int = option(0, natural, "steps between tests on --valid; 0: as --save-every", free=True)
    log_every: int = option(10, positive, "steps between lines of metrics.jsonl", free=True)
    patience: int = option(0, natural, "tests without a better WER after which the run ends; 0: any number")


@dataclasses.dataclass(frozen=True)
class Compute:
    """How the same numbers are computed: types, memory, devices."""

    dtype: str = option("float32", str, "type of matrix products; weights are float32", choices=("float32", "bfloat16"))
    bfloat16_rows: bool = option(
        False, bool, "compute the cached rows of frozen blocks by products in bfloat16",
        needs=(lambda config: "encoder:" in config.optimiser.freeze,
               "--freeze encoder:N, whose rows the cache holds"),
    )  # fmt: skip
    remat: bool = option(False, bool, "compute blocks again in the backward pass, which saves memory")
    scan: bool = option(
        False, bool, "compile the encoder's blocks as one program that is run for each, which takes less time",
        needs=(lambda config: config.encoder.kind != "convolutional",
               "blocks that are alike, which --encoder convolutional lacks"), off=None,
    )  # fmt: skip
    shard: bool = option(False, bool, "split parameters and the optimiser's state over the devices")


@dataclasses.dataclass(frozen=True)
class Search:
    """How labels are searched for."""

    max_symbols: int = option(10, positive, "labels that a search writes in a frame, at most")
    duration_choice: str = option(
        "pair", str, "greedy search with --loss tdt: pairs, or the token first", choices=("pair", "token_first"),
        needs=TDT,
    )  # fmt: skip
    prompt: str = option("", str, "language, for a pretrained model that takes one; default: its own choice")


@dataclasses.dataclass(frozen=True)
class Config:
    data: Data = Data()
    texts: Texts = Texts()
    features: Features = Features()
    encoder: Encoder = Encoder()
    blocks: Blocks = Blocks()
    head: Head = Head()
    network: Network = Network()
    objective: Objective = Objective()
    optimiser: Optimiser = Optimiser()
    run: Run = Run()
    compute: Compute = Compute()
    search: Search = Search()

    @classmethod
    def from_options(cls, **options):
        """Returns the configuration of options by their names."""
        return cls().replace(**options)

    def replace(self, **options):
        """Returns the same configuration with some options changed."""
        sections = {}
        for name, x in options.items():
            section, field = OPTIONS[name]
            sections.setdefault(section, {})[field.name] = tuples(x)
        return dataclasses.replace(self, **{
            name: dataclasses.replace(getattr(self, name), **fields) for name, fields in sections.items()
        })  # fmt: skip

    def get(self, name):
        """Returns the value of an option."""
        section, field = OPTIONS[name]
        return getattr(getattr(self, section), field.name)

    def options(self):
        """Returns all options by their names."""
        return {name: self.get(name) for name in OPTIONS}

    @property
    def streams(self):
        """Whether the rows of a recording can be computed in steps. Blocks on top of an encoder see all of them."""
        return bool(self.encoder.step and not self.head.stack)

    @property
    def nemo_form(self):
        """Whether sherpa-onnx runs such a model in NeMo's form, with NeMo's features."""
        return not self.streams and (self.head.predictor == "lstm" or self.head.loss == "tdt")

    @property
    def formless(self):
        """A sentence that says why sherpa-onnx has no form for such a model; empty: it has one."""
        head, kind = self.head, self.encoder.kind
        reasons = {
            "Whisper's encoder": kind == "whisper",
            "Nemotron's encoder": kind == "fastconformer" and self.streams,
            f"--loss {head.loss}": head.loss in ("multiblank", "hat", "ctc"),
            f"--predictor lstm and --loss {head.loss}": head.predictor == "lstm" and head.loss in ONE_A_FRAME,
            "--chunk and --predictor lstm or --loss tdt":
                self.streams and (head.predictor == "lstm" or head.loss == "tdt"),
            f"--durations {written(head.durations)}, which must be 0, 1, 2 and so on":
                head.loss == "tdt" and list(head.durations) != [*range(len(head.durations))],
        }  # fmt: skip
        return next((f"sherpa-onnx has no form for models with {x}" for x, there in reasons.items() if there), "")

    @property
    def masks(self):
        """The pair (copies of each utterance in a batch of a training, masks over time of each)."""
        return (2, math.ceil(MORE_MASKS * self.data.time_masks)) if self.objective.cr_ctc else (1, self.data.time_masks)

    def checked(self, given=()):
        """Returns itself, or raises an error where corpora are missing or options contradict each other."""
        refuse_if(not self.data.train, "--train is missing: a manifest, a folder, or a corpus by FILE.py:FUNCTION")
        refuse_if(not self.data.valid, "--valid is missing: held-out utterances, as for --train")
        if not self.run.init and (not own(self) or self.run.new_head):
            option = "--new-head" if self.run.new_head else f"--encoder {self.encoder.kind}"
            raise UserError(f"{option} needs --init, a folder with weights of an encoder")
        return self.consistent(given)

    def judged(self, given):
        """Returns itself, or raises an error if an option that a person named lacks what it needs, at any value."""
        satisfied(self, [(flag(name), OPTIONS[name][1], self.get(name)) for name in OPTIONS if name in given])
        return self

    def consistent(self, given=()):
        """Returns itself, or raises an error if options contradict each other. `given` has the names for `judged`."""
        self.judged(given)
        features, width = self.features, self.blocks.width
        if attends(self) and width % (2 * self.blocks.heads):
            raise UserError(f"--width {width} must be a multiple of 2 x --heads {self.blocks.heads}")
        if not 0 < features.hop <= features.window:
            raise UserError(f"--hop {features.hop:g} must be above 0, and at most the window of {features.window:g} ms")
        if round(features.rate * features.window / 1000) < 2:
            raise UserError(f"a window of {features.window:g} ms has fewer than two samples at --rate {features.rate}")
        if self.encoder.draws:
            several = "several --chunk or --past, or --ahead or --whole,"
            fine = self.encoder.kind in ("conformer", "fastconformer")
            refuse_if(not fine, f"{several} need --encoder conformer or fastconformer, got {self.encoder.kind}")
            leaks = self.encoder.kind == "conformer" and any(time == 1 for time, _ in self.encoder.strides)
            refuse_if(leaks, f"{several} need --strides of 2 or more over time: with 1, frames see the next chunk")
            refuse_if(self.head.stack, f"{several} leave no place for --stack, whose blocks see everything")
            none = "--whole 1 leaves no batch for --chunk: --chunk 0 is for a model that hears whole recordings alone"
            refuse_if(self.encoder.whole == 1, none)
            frozen = "encoder:" in self.optimiser.freeze
            refuse_if(frozen, f"{several} change the rows that --freeze {self.optimiser.freeze} would keep")
        for name in ("chunk", "past") if self.encoder.step else ():
            if (frames := getattr(self.encoder, name)) > MOST_FRAMES:
                raise UserError(f"--{name} expects {MOST_FRAMES:,} frames at most, got {frames}")
        if features.kind == "sherpa-onnx" and (features.window, features.hop) != (25, 10):
            at = f"windows of {features.window:g} ms and --hop {features.hop:g}"
            raise UserError(f"--features sherpa-onnx has windows of 25 ms and --hop 10, got {at}")
        if features.kind == "sherpa-onnx" and features.rate < MIN_SHERPA_RATE:
            raise UserError(f"--features sherpa-onnx needs a --rate of {MIN_SHERPA_RATE} or more, got {features.rate}")
        data = self.data
        if self.objective.cr_ctc and not (data.time_masks * data.time_mask or data.mel_masks * data.mel_mask):
            raise UserError("--cr-ctc needs --time-masks or --mel-masks, neither of size 0: without masks, both copies "
                            "are the same")  # fmt: skip
        steps, accumulate = self.run.steps, self.optimiser.accumulate
        if not self.run.epochs and steps < accumulate:
            raise UserError(f"--accumulate {accumulate} must be at most --steps {steps}")
        return self


def tuples(x):
    """Returns lists, as JSON and the command line have them, as tuples."""
    return tuple(map(tuples, x)) if isinstance(x, list | tuple) else x


def flag(name):
    """Returns an option as the command line has it, or else as JSON does."""
    section, field = OPTIONS[name]
    return f"{section}.{field.name}" if field.metadata.get("hidden") else dashed(name)


def _options():
    """Returns (section, field) of each option, by its name."""
    options = {}
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.default):
            name = field.metadata.get("flag", field.name)
            assert name not in options, f"two options are called {name}"
            options[name] = section.name, field
    return types.MappingProxyType(options)


OPTIONS = _options()


def named(given, file):
    """Returns options that a person named, on the command line or in a file, where another encoder may have more."""
    other = {"encoder", "init"} & given.keys()
    lacks = {name for name in file if other and OPTIONS[name][1].metadata.get("needs") in (BLOCKS, OWN)}
    return given.keys() | (file.keys() - lacks)


def options_of(*sections):
    """Returns the names of the options of some sections."""
    return {name for name, (section, _) in OPTIONS.items() if section in sections}
