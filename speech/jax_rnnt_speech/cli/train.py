"""Trains a model, or goes on with a training."""

import contextlib
import dataclasses
import sys
import time
from pathlib import Path

from jax_rnnt_speech import models, runs
from jax_rnnt_speech.config import FIXED, OPTIONS, Config, command_line, files, flag, named
from jax_rnnt_speech.config.options import names, written
from jax_rnnt_speech.config.options import sources as named_sources
from jax_rnnt_speech.data import archives, sources, texts
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.recognition.search_options import Searching
from jax_rnnt_speech.system import UserError, hosts, refuse_if
from jax_rnnt_speech.training.options import Processes, Start

SMALL = 20  # hours for which a cache takes less time than reading on the fly


def resumed(options, start):
    """Returns the configuration of the run in the workdir, with options where they may differ."""
    run = runs.Run(start.workdir, resume=True)
    if run.last is None:
        if "train" not in options:
            raise run.missing()
        return Config.from_options(**models.completed(options))
    setup = run.setup("params", "training", quiet=True)
    # A checkpoint of before an option has its default.
    earlier = Config.from_options(**files.from_json(setup["config"], f"{start.workdir}", "train" not in options))
    now = encoders.checked(earlier.replace(**options), setup.get("source"))
    for name, x in options.items():
        before, (section, field) = earlier.get(name), OPTIONS[name]
        metadata = {"fixed": section in FIXED} | field.metadata
        if now.get(name) == before or metadata.get("free"):
            continue
        was, wanted = f"{flag(name)} {written(before)}", written(x)
        refuse_if(metadata["fixed"], f"{start.workdir} holds a model with {was}, got {wanted}")
        if not start.change:
            raise UserError(f"{start.workdir} holds a run with {was}, got {wanted}: --change allows that")
        off = metadata.get("off", x)
        if off is None or ("off" in metadata and (x == off) != (before == off)):
            raise UserError(f"{start.workdir} holds an optimiser with {was}, which {wanted} does not fit")
    return now


def decide_road(options, start):
    """Sets in the options of a new run whether its data are read on the fly, unless they say so; returns the reason."""
    corpora_named = names(options.get("train", ""))
    if "on_the_fly" in options:
        return "as asked for"
    if start.cache and start.cache.name == "none" and not start.resume:
        options["on_the_fly"] = True
        return "as --cache none keeps no features"
    if archives.wanted(corpora_named) or (start.workers and not start.resume):
        options["on_the_fly"] = True
        return "as archives, weights of sources and --workers are"
    if start.resume or any(map(sources.by_function, corpora_named)) or options.get("bfloat16_rows"):  # rows of a cache
        return ""
    columns = [options.get(name, "") for name in ("audio_column", "text_column", "speaker_column")]
    with contextlib.suppress(UserError, OSError):  # reading it later raises the error
        hours = sources.hours(corpora_named, columns)
        if hours >= SMALL:
            options["on_the_fly"] = True
        than = "less than" if hours < SMALL else "and not less than"
        return f"as --train has about {hours:,.{0 if hours >= 10 else 2}f} hours, {than} {SMALL}"
    return ""


def road_of(config, why):
    """Describes the way in which a training reads its data, and the other one."""
    kept = "features, and rows of the frozen layers," if "encoder:" in config.optimiser.freeze else "features"
    ways = (f"decodes all audio before the first step and keeps {kept} on the disk", "--no-on-the-fly"), \
           ("reads audio on the fly, anew in each epoch", "--on-the-fly")  # fmt: skip
    way, (other, flag) = ways[config.data.on_the_fly][0], ways[not config.data.on_the_fly]
    return f"train {way}, {why}; {flag} {other}" if why else ""


def reading(data, goes_on):
    """Describes the files that a training reads, in a line; those of a new run must not be those of its tests."""
    every = {name: sources.listed(getattr(data, name)) for name in ("train", "valid")}
    if not goes_on and not any(map(sources.by_function, names(data.train))):
        for name, x in every.items():
            sources.unmixed(f"--{name}", x, held_out=name == "valid")
        sources.apart(every["train"], every["valid"])
    lines = [f"--{name} {found}" for name, x in every.items() if (found := sources.described(x))]
    return f"reading {'; '.join(lines)}" if lines else ""


def train(args):
    start, processes = command_line.taken(args, Start), command_line.taken(args, Processes)
    searching = command_line.taken(args, Searching).checked()
    given, file = command_line.given(args), files.read_file(args.config) if args.config else {}
    file = {name: x for name, x in file.items() if name not in command_line.decided(given)}
    options, judged = command_line.decided(file | given), named(given, file)
    for name in {"train", "valid", "text", "noise"} & options.keys():
        options[name] = sources.absolute(named_sources(options[name]))
        if name in ("train", "valid"):
            options[name] = named_sources(sources.once(options[name]))
    if sources.by_function(options.get("train")):
        options.setdefault("valid", options["train"])
    if "normalize" in options:
        options["normalize"] = texts.absolute(options["normalize"])
    why = decide_road(options, start)
    if start.hook:
        start = dataclasses.replace(start, hook=texts.loaded(start.hook, "--hook", ""))
    if options.get("steps") == 0 and not options.get("epochs"):
        raise UserError("--steps 0 trains nothing: `rnnt-speech test` evaluates a run")
    usual = Path(args.config or names(options.get("train", [""]))[0]).stem, options.get("loss", Config().head.loss)
    start = dataclasses.replace(start, workdir=start.workdir or Path("runs") / "{}-{}".format(*usual))
    for option, path in {"--workdir": start.workdir, "--cache": start.cache}.items():
        refuse_if(path and path.is_file(), f"{option} {path} must be a folder, and is a file")
    with files.origins(f"--config {args.config}", file):
        chosen = None if start.resume else Config.from_options(**models.completed(options)).checked(judged)
    from jax_rnnt_speech.training.preparation import prepared  # with Grain and Orbax: no other command waits for them

    hosts.join(start.platform, start.devices, **dataclasses.asdict(processes))
    started = time.perf_counter()
    with hosts.together():
        chosen = chosen or resumed(options, start).checked(judged)
        lines = [reading(chosen.data, start.resume), road_of(chosen, why)]
        if chosen.features.kind == "sherpa-onnx" and chosen.formless:
            lines += [f"{chosen.formless}: export --format sherpa-onnx will refuse this one"]
        rates = prepared(chosen, start, searching, lines).main()
    hosts.say(f"held-out CER {rates.cer:.1f}%, WER {rates.wer:.1f}% ({time.perf_counter() - started:.0f} seconds)")
    if start.expect_cer is not None and not rates.cer <= start.expect_cer:
        print(f"expected a CER of at most {start.expect_cer}%", file=sys.stderr)
        return 1
    return 0


def arguments(parser):
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file of the options below, or the name of one of ours, such as small"
    )
    earlier = "resume", "overwrite"
    command_line.add_fields(parser.add_mutually_exclusive_group(), Start, earlier)
    command_line.add_fields(parser, Start, but=earlier)
    command_line.add_fields(parser, Processes, group="several processes")
    command_line.add_fields(parser, Searching, but=["confidence", "prompt", "drop_invented"], group="search of tests")
    command_line.add_options(parser, grouped=True)


COMMAND = "train", "train a model, or go on with a training", train, arguments
