"""Compiled programs: their custom calls and collectives."""

import collections
import re

import jax

from platforms import interpreted


def compiled(function, *arguments):
    """(results, text of the compiled program)"""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), program.as_text()


def custom_calls(text):
    """The number of calls of each target of the library in an HLO text."""
    return dict(collections.Counter(re.findall(r'custom_call_target="(jax_rnnt_\w+)"', text)))


def collectives(text):
    """The number of collectives of each kind in an HLO text."""
    names = r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)"
    return dict(collections.Counter(re.findall(rf" {names}(?:-start)?\(", text)))


def exchanged(text, collective):
    """Shapes of the results of one kind of collective in an HLO text."""
    results = re.findall(rf" = (.*?) {collective}(?:-start)?\(", text)
    shapes = re.findall(r"\w+\[([\d,]*)\]", " ".join(results))
    return [tuple(map(int, filter(None, shape.split(",")))) for shape in shapes]


def once(targets):
    return {} if interpreted() else dict.fromkeys(targets, 1)
