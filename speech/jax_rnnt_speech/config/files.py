"""JSON of the tree: an object of sections with their fields. An object of options by their names is read, too."""

import argparse
import contextlib
import dataclasses
import json
import re
from pathlib import Path

from jax_rnnt_speech.config import OPTIONS
from jax_rnnt_speech.system import UserError, as_user_error, refuse_if

PRESETS = Path(__file__).parent / "presets"
MIXED = "synthetic", "synthetic_share"  # of earlier runs; weights of the sources of --train have the same meaning


def read_file(name):
    """Returns the options of a JSON file, or of one in the folder `presets` by its name."""
    path = Path(name) if Path(name).is_file() else PRESETS / f"{name}.json"
    if not path.is_file():
        presets = ", ".join(sorted(x.stem for x in PRESETS.glob("*.json")))
        raise UserError(f"--config {name} is neither a file nor one of {presets}")
    with as_user_error(f"--config {name} is not readable as JSON", OSError, ValueError):
        options = json.loads(path.read_text("utf-8"), object_pairs_hook=once)
    return from_json(options, f"--config {name}", training=True)


def once(pairs):
    """Builds an object of JSON, which must have no key twice."""
    fields = {}
    for key, x in pairs:
        if key in fields:
            raise ValueError(f"{key} is there twice")
        fields[key] = x
    return fields


@contextlib.contextmanager
def origins(file, options):
    """Makes errors say which of the options that they name are those of a file."""
    try:
        yield
    except UserError as error:
        named = {name.replace("-", "_") for name in re.findall(r"--([a-z0-9-]+)", str(error))}
        usual = {x: OPTIONS[x][1].default for x in options if x in named}
        said = [f"{x} {options[x]}" + f", by default {y or 'off'}" * (options[x] != y) for x, y in usual.items()]
        raise UserError(f"{error} ({file} has {'; '.join(said)})" if said else f"{error}") from None


def to_json(config):
    return json.loads(json.dumps(dataclasses.asdict(config)))  # lists, no tuples


def from_json(tree, name, training=False):
    """Returns options by their names, with their types checked as the command line checks them.

    With `training`, it raises an error where options that are gone decide what the model was trained on.
    """
    refuse_if(not isinstance(tree, dict), f"{name}: expected an object of options, got {type(tree).__name__}")
    fields = {(section, field.name): option for option, (section, field) in OPTIONS.items()}
    sections, checked, mixed = {section for section, _ in fields}, {}, {}

    def take(option, x, place):
        refuse_if(option in checked, f"{name}: {place} says again what the option {option} is")
        checked[option] = value(option, x, f"{name}: {place}")

    for key, x in tree.items():
        if key in sections and isinstance(x, dict):
            for inner, y in x.items():
                if key == "data" and inner in MIXED:
                    mixed[inner] = y
                    continue
                refuse_if((key, inner) not in fields, f"{name}: the section {key} has no field {inner}")
                take(fields[key, inner], y, f"{key}.{inner}")
        elif key in MIXED:
            mixed[key] = x
        elif key in OPTIONS:
            take(key, x, key)
        elif key in sections:
            raise UserError(f"{name}: {key}: expected an object of fields, got {x}")
        else:
            raise UserError(f"{name}: there is no option {key}")
    if training and mixed.get("synthetic"):
        way = "name its sources in --train, each with a weight, as --train A:0.5 B:0.5"
        raise UserError(f"{name}: there is no option synthetic any more, got {mixed['synthetic']}: {way}")
    return checked


def value(option, x, place):
    metadata = OPTIONS[option][1].metadata
    kind, choices = metadata.get("type"), metadata.get("choices")
    with as_user_error(place, argparse.ArgumentTypeError):
        if kind is None and not isinstance(x, bool):
            raise argparse.ArgumentTypeError(f"expected true or false, got {x}")
        if kind is str and not isinstance(x, str):
            raise argparse.ArgumentTypeError(f"expected text, got {x}")
        x = x if kind is None else kind(x)
    if choices and x not in choices:
        raise UserError(f"{place}: expected one of {', '.join(choices)}, got {x}")
    return x
