"""The command line of the tree, and of other dataclasses: an option for each field. The tree's sections are groups."""

import argparse
import dataclasses
from pathlib import Path

from jax_rnnt_speech import config
from jax_rnnt_speech.config import OPTIONS, flag
from jax_rnnt_speech.config.options import dashed, satisfied, written

ARGPARSE = "type", "action", "help", "choices", "nargs", "metavar"
TWINS = {"batch": "batch_seconds", "steps": "epochs"}  # they mean the same: with one, the other is at its default


def add(parser, name, field, default=None):
    """`default`: what help says of the default, if it is not that of the field."""
    more, usual = {key: x for key, x in field.metadata.items() if key in ARGPARSE}, field.default
    if not {"choices", "action", "metavar"} & more.keys():
        more["metavar"] = "TEXT" if more["type"] is str else getattr(more["type"], "metavar", "N")
    if isinstance(usual, tuple):
        usual = written(usual)
    if default:
        more["help"] = f"{more['help'].partition('; default')[0]} ({default})"
    elif usual not in ("", 0, None):
        more["help"] += f" ({usual})"
    parser.add_argument(name, default=argparse.SUPPRESS, **more)


def files(parser):
    """Adds the argument for recordings."""
    about = "files of audio in any format, manifests, or folders"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=about)


def data(parser):
    """Adds the argument for recordings with texts."""
    about = "manifests or folders of recordings with their texts, as for train"
    parser.add_argument("data", nargs="+", metavar="DATA", help=about)


def command(commands, name, about, run, *parts):
    """Adds a command with its arguments: dataclasses, and functions of a parser that add some."""
    parser = commands.add_parser(name, help=about)
    for part in parts:
        add_fields(parser, part) if dataclasses.is_dataclass(part) else part(parser)
    parser.set_defaults(run=run)


def add_options(parser, names=tuple(OPTIONS), default=None, grouped=False):
    """Adds options of the tree by their names; those that are not given are absent from the result.

    If `grouped`, each section has a heading.
    """
    groups = {}
    for name, (section, field) in OPTIONS.items():
        if name not in names or field.metadata.get("hidden"):
            continue
        if grouped and section not in groups:
            about = type(getattr(config.Config(), section)).__doc__
            groups[section] = parser.add_argument_group(section, about)
        add(groups.get(section, parser), flag(name), field, default)


def add_fields(parser, kind, names=None, but=(), group=None):
    """Adds options for the fields of another dataclass: for all, for these `names` alone, or for all `but` some.

    `group` is their heading.
    """
    parser = parser.add_argument_group(group) if group else parser
    for field in dataclasses.fields(kind):
        if field.name in (names or [field.name]) and field.name not in but:
            add(parser, dashed(field.name), field)


def taken(args, kind):
    """Returns the dataclass of a command's options; raises an error where one lacks what it needs."""
    fields = [field for field in dataclasses.fields(kind) if field.name in vars(args)]
    x = kind(**{field.name: getattr(args, field.name) for field in fields})
    satisfied(x, [(dashed(field.name), field, getattr(x, field.name)) for field in fields])
    return x


def given(args, names=tuple(OPTIONS)):
    """Returns the options of the tree that a command has."""
    return {name: x for name, x in vars(args).items() if name in names}


def decided(options):
    """Returns the options and their twins; an error about twins names the first one that differs from a run's."""
    pairs = [*TWINS.items(), *((y, x) for x, y in TWINS.items())]
    return {y: OPTIONS[y][1].default for x, y in pairs if x in options and y not in options} | options


def changed(config, args, names):
    """Returns a run's configuration with options of a command. A column that only the run names may be missing."""
    columns = {name: [x] for name in ("audio_column", "text_column", "speaker_column") if (x := config.get(name))}
    options = given(args, names)
    return config.replace(**columns | decided(options)).judged(options)
