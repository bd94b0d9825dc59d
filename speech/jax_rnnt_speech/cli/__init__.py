"""The command line. Options are checked before anything runs; what is wrong is one line, and the exit status 2."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jax_rnnt_speech import config, pretrained
from jax_rnnt_speech.cli import align, check, synthesis, testing
from jax_rnnt_speech.config import Config, amount, natural, positive
from jax_rnnt_speech.data import corpora, texts
from jax_rnnt_speech.data.audio import AudioError
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.recognition import ngrams, recognise, streams, transcripts
from jax_rnnt_speech.serving import export, serve
from jax_rnnt_speech.system import UserError, hosts, outputs
from jax_rnnt_speech.training import runs

# They decide the shapes of arrays, or their meaning: a checkpoint has them.
FIXED = (
    pretrained.HEARING | pretrained.OWN_ENCODER | pretrained.HEAD | {"init", "new_head", "ctc", "lower", "normalize"}
)
FIXED -= {"sigma", "max_symbols", "duration_choice"}
# At this value the optimiser lacks a part, and so does its state in checkpoints.
WITHOUT = {"accumulate": 1, "clip": 0.0, "average": 0.0}


class Parser(argparse.ArgumentParser):
    """An error is one line: the usage has a hundred."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")


def add_train(commands):
    parser = commands.add_parser("train", help="train a model, or resume a training")
    parser.add_argument("--config", metavar="FILE", help="JSON with options below, or a name as in small")
    parser.add_argument("--workdir", type=Path, help="default: runs/NAME-LOSS")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument("--resume", action="store_true", help="continue from the last checkpoint, if any")
    earlier.add_argument("--overwrite", action="store_true", help="replace the earlier run")
    parser.add_argument("--change", action="store_true", help="with --resume: options may differ from before")
    parser.add_argument("--save-every", type=positive, default=1000, metavar="STEPS", help="also tests (%(default)s)")
    parser.add_argument("--log-every", type=positive, default=10, metavar="STEPS", help="(%(default)s)")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: what JAX finds")
    parser.add_argument("--devices", type=positive, metavar="N", help="default: all; a CPU poses as this many, or 2")
    parser.add_argument("--implementation", choices=("kernel", "reference"), help="of the loss; default: automatic")
    help = "for features on disk, or none; default: cache in the workdir"
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help=help)
    help = "called with (step, {name: number}) at each log and test"
    parser.add_argument("--hook", metavar="FILE:FUNCTION", help=help)
    hosts.add_options(parser.add_argument_group("several processes"))
    ngrams.add_options(parser.add_argument_group("search of tests"))
    parser.add_argument("--expect-cer", type=amount, metavar="PERCENT", help="exit 1 if the error rate is higher")
    config.add_options(parser.add_argument_group("what decides the result"))
    parser.set_defaults(run=train)


def add_recognition(commands):
    parser = commands.add_parser("transcribe", help="write the texts of audio files")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="audio of any format, manifest or folder")
    transcripts.add_options(parser)
    parser.add_argument("--nbest", type=natural, default=0, metavar="N", help="hypotheses of --beam that JSON lists")
    kinds = ngrams.PROBABILITY, "tsallis", "renyi", "gibbs"
    help = "of words: the least probability of their labels (the default), or from this entropy of all labels"
    parser.add_argument("--confidence", choices=kinds, default=ngrams.PROBABILITY, help=help)
    ngrams.add_options(parser)
    config.add_options(parser, {"audio_column"}, "as trained, or the usual ones")
    parser.set_defaults(run=transcribe)
    live = commands.add_parser("stream", help="text of a file or a microphone, as it arrives")
    source = live.add_mutually_exclusive_group(required=True)
    source.add_argument("files", type=Path, nargs="*", default=[], metavar="FILE", help="audio of any format")
    source.add_argument("--microphone", action="store_true", help="listen until Ctrl-C")
    help = "seconds of silence that end an utterance, and its line; 0: none (%(default)s)"
    live.add_argument("--endpoint", type=amount, default=0.0, metavar="S", help=help)
    live.add_argument("--json", action="store_true", help="an object a line: words, text that may change, endpoints")
    ngrams.add_options(live)
    live.set_defaults(run=stream)
    for one in (parser, live):
        help = f"folder of a training, of convert, or of transformers; default: ${pretrained.VARIABLE}, or the cache's"
        one.add_argument("--model", type=Path, help=help)
        pretrained.add_options(one)
    other = commands.add_parser("convert", help="write a model to hand on, for transformers or in our own form")
    other.add_argument("model", type=Path, help="folder of a training, or of transformers")
    other.add_argument("folder", type=Path, help="folder to write")
    pretrained.add_checkpoint(other)
    other.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(%(default)s)")
    other.add_argument("--card", type=Path, metavar="FILE", help="text for card.md, in our own form")
    other.add_argument("--overwrite", action="store_true", help="replace what is in the folder")
    other.set_defaults(run=convert)


def resumed(options, args):
    """The configuration of the run in the workdir, with options where they may differ."""
    run = runs.Run(args.workdir, resume=True)
    if run.last is None:
        if "train" not in options:
            raise run.missing()
        return Config(**pretrained.completed(options))
    setup = run.setup("params", "training", quiet=True)
    # A checkpoint of before an option has its default.
    earlier = dataclasses.asdict(Config()) | config.from_json(setup["config"], f"{args.workdir}")
    encoders.checked(Config(**earlier | options), setup.get("source"))
    changed = {name: x for name, x in options.items() if x != earlier[name]}
    for name, x in changed.items():
        option = f"--{name.replace('_', '-')}"
        if name in FIXED:
            raise UserError(f"{args.workdir} holds a model with {option} {earlier[name]}, got {x}")
        if not args.change:
            raise UserError(f"{args.workdir} holds a run with {option} {earlier[name]}, got {x}: --change allows that")
        off = WITHOUT.get(name)
        if name in ("freeze", "scan", "batch_norm") or (off is not None and (x == off) != (earlier[name] == off)):
            raise UserError(f"{args.workdir} holds an optimiser with {option} {earlier[name]}, which {x} does not fit")
    return Config(**(earlier | options))


def train(args):
    names = {field.name for field in dataclasses.fields(Config)}
    given = config.given(args, names)
    file = {name: x for name, x in (config.read_file(args.config) if args.config else {}).items() if name not in given}
    options = file | given
    for name in {"train", "valid", "synthetic", "text", "noise"} & options.keys():
        options[name] = corpora.absolute(config.sources(options[name]))
    if "normalize" in options:
        options["normalize"] = texts.absolute(options["normalize"])
    ngrams.check(args)
    if args.hook:
        args.hook = texts.loaded(args.hook, "--hook", "")
    if options.get("steps") == 0:
        raise UserError("--steps 0 trains nothing: `rnnt-speech test` evaluates a run")
    if args.change and not args.resume:
        raise UserError("--change needs --resume")
    args.workdir = args.workdir or Path("runs") / "{}-{}".format(
        Path(args.config or config.names(options.get("train", [""]))[0]).stem, options.get("loss", Config.loss)
    )
    with config.origins(f"--config {args.config}", file):
        chosen = None if args.resume else Config(**pretrained.completed(options)).checked()
    from jax_rnnt_speech.training.train import (
        Training,  # with Grain and Orbax, slow to import: no other command needs them
    )

    hosts.join(args)
    started = time.perf_counter()
    with hosts.together():
        chosen = chosen or resumed(options, args).checked()
        rates = Training(chosen, args).main()
    hosts.say(f"held-out CER {rates.cer:.1f}%, WER {rates.wer:.1f}% ({time.perf_counter() - started:.0f} seconds)")
    if args.expect_cer is not None and not rates.cer <= args.expect_cer:
        print(f"expected a CER of at most {args.expect_cer}%", file=sys.stderr)
        return 1
    return 0


def transcribe(args):
    ngrams.check(args)
    transcripts.check(args, args.files, recognise.recordings(args.files, vars(args).get("audio_column", "")))
    recogniser = pretrained.open_model(args.model, args.platform, args.checkpoint)
    columns = config.changed(recogniser.config, args, {"audio_column"})
    entries = list(recognise.listed(args.files, columns.audio_column))
    quiet = True if not args.output and sys.stdout.isatty() else None  # a bar would be within the texts
    bad = 0
    with transcripts.writer(args, entries) as write:
        recordings = recognise.loaded(entries, recogniser.config.rate)
        results = recognise.transcribe(recogniser, recordings, ngrams.search_of(args, recogniser))
        for i, x in enumerate(outputs.bar(results, "recordings", len(entries), disable=quiet)):
            if x.error:
                tqdm.write(x.error, file=sys.stderr)
                bad += 1
            write(i, None if x.error else transcripts.transcript(recogniser, entries[i], x, args.nbest))
    return 1 if bad else 0


def stream(args):
    ngrams.check(args)
    recogniser = pretrained.open_model(args.model, args.platform, args.checkpoint)
    how, bad = ngrams.search_of(args, recogniser), 0
    for file in args.files or [None]:
        live = streams.Stream(recogniser, how, args.endpoint)
        try:
            show = show_events if args.json else show_words
            show(live, events_of(live, file), file if len(args.files) > 1 else None)
        except AudioError as error:
            print(error, file=sys.stderr)
            bad += 1
    if bad and bad == len(args.files):
        raise UserError("no recording could be used")
    return 1 if bad else 0


def events_of(live, file):
    """Those of a file, or of the microphone until it is interrupted; the last one is the end."""
    rate = live.extractor.rate
    with contextlib.suppress(*[KeyboardInterrupt] * (file is None)):
        for samples in streams.blocks_of_file(file, rate) if file else streams.blocks_of_microphone(rate):
            for found in live.heard(samples):
                yield from live.events(*found)
    for found in live.heard(np.zeros(0, np.float32), end=True):
        yield from live.events(*found)
    yield {"type": "end", "duration": round(live.total / rate, 3)}


def show_words(live, events, file):
    """A line for each utterance, as its words come; an empty one if there are none."""
    begin, said, inside = f"{file}\t" if file else "", False, False
    for x in events:
        if x["type"] == "words":
            print((" " * live.text[:1].isspace() if inside else begin) + x["text"], end="", flush=True)
            said = inside = True
        elif x["type"] == "endpoint" and inside:
            print(flush=True)
            inside = False
    if inside or not said:
        print("" if said else begin, flush=True)


def show_events(live, events, file):
    """An object for each event."""
    for x in events:
        print(json.dumps(({"file": str(file)} if file else {}) | x, ensure_ascii=False), flush=True)


def convert(args):
    if args.folder.is_file() or (args.folder.is_dir() and any(args.folder.iterdir()) and not args.overwrite):
        raise UserError(f"{args.folder} must be an empty folder: --overwrite writes into a full one")
    if (args.folder / runs.CHECKPOINTS).exists():
        raise UserError(f"{args.folder} holds a training: name another folder")
    if args.folder.resolve() == args.model.resolve():
        raise UserError(f"{args.folder} must not be the folder that is read")
    recogniser = pretrained.open_model(args.model, checkpoint=args.checkpoint)
    if args.dtype != "float32":
        print(f"weights are rounded to {args.dtype}")
    if args.card is None and pretrained.hugging_face.fits(recogniser):
        pretrained.hugging_face.write(recogniser, args.folder, args.dtype)
        return 0
    try:
        card = args.card.read_text("utf-8") if args.card else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--card {args.card} is not readable: {config.reason(error)}") from None
    pretrained.package.write(recogniser, args.folder, args.dtype, card)
    return 0


def main(arguments=None):
    parser = Parser(prog="rnnt-speech", description="Speech recognition on any corpus.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check.add_command(commands)
    add_train(commands)
    testing.add_command(commands)
    add_recognition(commands)
    align.add_command(commands)
    synthesis.add_command(commands)
    ngrams.add_command(commands)
    export.add_command(commands)
    serve.add_command(commands)
    if sys.stderr is None:  # closed before the start, as some services are
        sys.stderr = outputs.Nowhere()
    args = parser.parse_args(arguments)
    try:
        status = args.run(args)
    except (UserError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt as error:
        going_on = "; --resume goes on from the last checkpoint" if args.run is train else ""
        message = error if error.args else f"interrupted{going_on}"
        parser.exit(130, f"{parser.prog}: {message}\n")
    raise SystemExit(status)
