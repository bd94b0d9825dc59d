"""The command line of the tree: an option for each field, in groups that are its sections."""

import argparse

from jax_rnnt_speech import config
from jax_rnnt_speech.config import OPTIONS, flag


def add_options(parser, names=tuple(OPTIONS), default=None, grouped=False):
    """Options by their names; those that are not given are absent from the result.

    `default`: what help says of the default, if it is not that of the tree. `grouped`: each section has a heading.
    """
    groups = {}
    for name, (section, field) in OPTIONS.items():
        more = {
            key: x
            for key, x in field.metadata.items()
            if key in ("type", "action", "help", "choices", "nargs", "metavar")
        }
        if name not in names or field.metadata.get("hidden"):
            continue
        if grouped and section not in groups:
            about = type(getattr(config.Config(), section)).__doc__
            groups[section] = parser.add_argument_group(section, about)
        if not {"choices", "action", "metavar"} & more.keys():
            more["metavar"] = "TEXT" if more["type"] is str else getattr(more["type"], "metavar", "N")
        usual = field.default
        if isinstance(usual, tuple):
            usual = ",".join("x".join(map(str, x)) if isinstance(x, tuple) else f"{x:g}" for x in usual)
        if default:
            more["help"] = f"{more['help'].partition('; default')[0]} ({default})"
        elif usual not in ("", 0):
            more["help"] += f" ({usual})"
        groups.get(section, parser).add_argument(flag(name), default=argparse.SUPPRESS, **more)


def given(args, names=tuple(OPTIONS)):
    """Options of a command that take the place of a run's. Of those that say the same thing, the given one counts."""
    found = {name: x for name, x in vars(args).items() if name in names}
    for name, other in (("batch", "batch_seconds"), ("steps", "epochs")):
        if name in found:
            found = {other: OPTIONS[other][1].default} | found  # the first one that differs from a run's is named
        elif other in found:
            found[name] = OPTIONS[name][1].default
    return found


def changed(known, args, names):
    """A run's configuration with options of a command. A column that only the run names may be missing."""
    columns = {name: [x] for name in ("audio_column", "text_column", "speaker_column") if (x := known.get(name))}
    return known.replace(**columns | given(args, names))
