"""Trains a model, or goes on with a training."""

import sys
import time
from pathlib import Path

from jax_rnnt_speech import models, runs
from jax_rnnt_speech.config import OPTIONS, Config, command_line, files, flag
from jax_rnnt_speech.config.options import amount, names, natural, positive, sources
from jax_rnnt_speech.data import corpora, texts
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.recognition import search_options
from jax_rnnt_speech.system import UserError, hosts


def resumed(options, args):
    """The configuration of the run in the workdir, with options where they may differ."""
    run = runs.Run(args.workdir, resume=True)
    if run.last is None:
        if "train" not in options:
            raise run.missing()
        return Config.of(**models.completed(options))
    setup = run.setup("params", "training", quiet=True)
    # A checkpoint of before an option has its default.
    earlier = Config.of(**files.from_json(setup["config"], f"{args.workdir}"))
    now = encoders.checked(earlier.replace(**options), setup.get("source"))
    for name, x in options.items():
        option, before, metadata = flag(name), earlier.get(name), OPTIONS[name][1].metadata
        if now.get(name) == before:
            continue
        if metadata.get("fixed"):
            raise UserError(f"{args.workdir} holds a model with {option} {before}, got {x}")
        if not args.change:
            raise UserError(f"{args.workdir} holds a run with {option} {before}, got {x}: --change allows that")
        off = metadata.get("off", x)
        if off is None or ("off" in metadata and (x == off) != (before == off)):
            raise UserError(f"{args.workdir} holds an optimiser with {option} {before}, which {x} does not fit")
    return now


def train(args):
    given, file = command_line.given(args), files.read_file(args.config) if args.config else {}
    file = {name: x for name, x in file.items() if name not in given}
    options = file | given
    for name in {"train", "valid", "synthetic", "text", "noise"} & options.keys():
        options[name] = corpora.absolute(sources(options[name]))
    if corpora.by_function(options.get("train")):
        options.setdefault("valid", options["train"])
    if "normalize" in options:
        options["normalize"] = texts.absolute(options["normalize"])
    search_options.check(args)
    if args.hook:
        args.hook = texts.loaded(args.hook, "--hook", "")
    if options.get("steps") == 0 and not options.get("epochs"):
        raise UserError("--steps 0 trains nothing: `rnnt-speech test` evaluates a run")
    if args.change and not args.resume:
        raise UserError("--change needs --resume")
    args.workdir = args.workdir or Path("runs") / "{}-{}".format(
        Path(args.config or names(options.get("train", [""]))[0]).stem, options.get("loss", Config().head.loss)
    )
    with files.origins(f"--config {args.config}", file):
        chosen = None if args.resume else Config.of(**models.completed(options)).for_its_encoder(given).checked()
    from jax_rnnt_speech.training.train import (
        Training,  # with Grain and Orbax, slow to import: no other command needs them
    )

    hosts.join(args)
    started = time.perf_counter()
    with hosts.together():
        chosen = chosen or resumed(options, args).for_its_encoder(given).checked()
        rates = Training(chosen, args).main()
    hosts.say(f"held-out CER {rates.cer:.1f}%, WER {rates.wer:.1f}% ({time.perf_counter() - started:.0f} seconds)")
    if args.expect_cer is not None and not rates.cer <= args.expect_cer:
        print(f"expected a CER of at most {args.expect_cer}%", file=sys.stderr)
        return 1
    return 0


def add_processes(parser):
    help = (
        "address at which process 0 listens, as HOST:PORT; with auto, Slurm, Open MPI or the TPU's runtime "
        "say it, and the two below"
    )
    parser.add_argument("--coordinator", metavar="ADDRESS", help=help)
    parser.add_argument("--processes", type=positive, metavar="N", help="how many processes train together")
    help = "a process without a sign of life for so many seconds counts as dead (%(default)s)"
    parser.add_argument("--heartbeat", type=positive, default=60, metavar="SECONDS", help=help)
    parser.add_argument("--process", type=natural, metavar="I", help="the number of this process, from 0 on")


def add_command(commands):
    parser = commands.add_parser("train", help="train a model, or go on with a training")
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file of the options below, or the name of one of ours, such as small"
    )
    parser.add_argument("--workdir", type=Path, help="folder of this training; default: runs/NAME-LOSS")
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of the folder, if there is one"
    )
    earlier.add_argument("--overwrite", action="store_true", help="replace an earlier training in the folder")
    parser.add_argument("--change", action="store_true", help="with --resume, allow options that differ from before")
    help = "steps between checkpoints (%(default)s)"
    parser.add_argument("--save-every", type=positive, default=1000, metavar="STEPS", help=help)
    help = "steps between tests on --valid; default: as --save-every"
    parser.add_argument("--valid-every", type=positive, metavar="STEPS", help=help)
    help = "steps between lines of metrics.jsonl (%(default)s)"
    parser.add_argument("--log-every", type=positive, default=10, metavar="STEPS", help=help)
    parser.add_argument(
        "--platform", choices=("cpu", "gpu", "tpu"), help="platform to train on; default: the one that JAX finds"
    )
    parser.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="number of devices to train on; default: all, or a CPU that is split into 2",
    )
    parser.add_argument(
        "--implementation",
        choices=("kernel", "reference"),
        help="how the loss is computed; default: by kernels where there are some",
    )
    help = "folder in which features are kept, or none to compute them at each use; default: cache in the workdir"
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help=help)
    help = "call this function with (step, {name: number}) at each log and each test"
    parser.add_argument("--hook", metavar="FILE:FUNCTION", help=help)
    add_processes(parser.add_argument_group("several processes"))
    search_options.add_options(parser.add_argument_group("search of tests"))
    parser.add_argument(
        "--expect-cer",
        type=amount,
        metavar="PERCENT",
        help="end with status 1 if the last error rate of characters is higher",
    )
    command_line.add_options(parser, grouped=True)
    parser.set_defaults(run=train)
