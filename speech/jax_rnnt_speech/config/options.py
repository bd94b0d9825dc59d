"""An option is a field of a dataclass that knows its type on the command line and in JSON, and its help."""

import argparse
import dataclasses
import math
import sys

from jax_rnnt_speech.system import refuse_if


def names(x):
    """Returns a list of the names of corpora."""
    return list(x) if isinstance(x, list | tuple) or x == "" else [x]


def sources(x):
    """Parses, for argparse, the name of a corpus, or a list of names; a list of one becomes that name."""
    if x != "" and (not isinstance(x, str | list) or not x or not all(type(y) is str for y in x)):
        raise argparse.ArgumentTypeError(f"expected a name or a list of names, got {x}")
    return x[0] if isinstance(x, list) and len(x) == 1 else x


def number(kind, low, below=math.inf, most=math.inf):
    """Makes a type of argparse: a number from `low` on, less than `below` and `most` or less."""

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
    """Makes a type of argparse: text with commas, from which `read` makes values, or a list of JSON."""

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


def counts(low):
    """Makes a type of argparse: a whole number, or different ones of `low` or more with commas, or a list of JSON."""
    several = sequence(
        int,
        lambda x: x and all(type(y) is int and y >= low for y in x) and len({*x}) == len(x),
        "N,...",
        f"a whole number of 0 or more, or different ones of {low} or more such as 1,2,7",
    )

    def read(x):
        return several(x) if isinstance(x, list | tuple) or "," in str(x) else natural(x)

    read.metavar = several.metavar
    return read


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
    """Declares a field. `kind` is a type of argparse, or bool for a switch; `text` is its help.

    `flag` is the option's name, if it is not that of the field. `needs` is (condition on the whole value, the condition
    in words), without which nobody may name the option. `fixed` says that a checkpoint's arrays, or their meaning,
    depend on it, as on all of the sections `config.FIXED`; `free` that it may change where a run goes on. `off` is the
    value at which the optimiser and its state lack a part. `hidden` marks a field that pretrained models set, and no
    option. Other names are those of argparse.
    """
    kind = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
    return dataclasses.field(default=default, metadata={"help": text, **kind, **more})


def dashed(name):
    return f"--{name.replace('_', '-')}"


def written(x):
    """A value as the command line has it: pairs such as 2x2 or encoder=0.1, and several values with commas."""
    if not isinstance(x, list | tuple):
        return f"{x:.10g}" if isinstance(x, float) else f"{x}"
    named = any(isinstance(y, str) for y in x)
    if any(isinstance(y, list | tuple) for y in x):
        return ",".join(("=" if isinstance(y[0], str) else "x").join(map(written, y)) for y in x)
    return (" " if named else ",").join(map(written, x))


def satisfied(whole, given):
    """Raises where an option is named without what it needs. `given`: (flag, field, what it says) of those named.

    What is off, as it is by default, contradicts nothing.
    """
    for flag, field, x in given:
        condition, words = field.metadata.get("needs", (None, ""))
        refuse_if(condition and (x or x != field.default) and not condition(whole), f"{flag} needs {words}")
