"""Numeric options of the searches: one table of what each may be.

A static number out of its range is an error. A traced one is not known before the program runs: then the score of
every utterance is NaN.
"""

import typing
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks


class Range(typing.NamedTuple):
    """What a number may be."""

    expected: str  # in words
    holds: Callable[[Any], Any]  # of an int, or of a scalar of NumPy or JAX in the dtype of scores


AT_LEAST_1, AT_LEAST_0 = Range("1 or more", lambda x: x >= 1), Range("0 or more", lambda x: x >= 0)
FINITE = Range("finite", lambda x: abs(x) < np.inf)
# A subnormal temperature counts as 0: some devices round it to 0, and its inverse is infinite.
ABOVE_0 = Range("finite and above 0", lambda x: (x >= np.finfo(x.dtype).tiny) & (x < np.inf))
PROBABILITY = Range("above 0 and at most 1", lambda x: (x > 0) & (x <= 1))
UP_TO_1 = Range("0 or more and at most 1", lambda x: (x >= 0) & (x <= 1))
NOT_INFINITE = Range("finite or -inf", lambda x: x < np.inf)

RANGES = {
    "max_labels": AT_LEAST_1,
    "max_symbols": AT_LEAST_1,
    "window": AT_LEAST_1,
    "frames_at_once": AT_LEAST_1,
    "width": AT_LEAST_1,
    "samples": AT_LEAST_1,
    "rounds": AT_LEAST_0,
    "threshold": AT_LEAST_0,
    "length_norm": FINITE,
    "blank_penalty": FINITE,
    "temperature": ABOVE_0,
    "blank_threshold": UP_TO_1,
    "ilm_weight": FINITE,
    "weight": FINITE,  # of a model of fusion
    "top_k": AT_LEAST_1,
    "top_p": PROBABILITY,
    "arc_weights": NOT_INFINITE,  # of `DecodingRules`
}

# Numbers of a `Search`, and where they change nothing. `_symbols.Scoring` has those that change what moves score.
OFF = {"ilm_weight": 0.0, "blank_penalty": 0.0, "temperature": 1.0, "blank_threshold": 1.0}

LIMITS = (
    "max_symbols",
    "window",
    "frames_at_once",
)  # larger ones than int32 holds are none; the other counts are sizes of arrays and loops


def size(function: str, name: str, x) -> int:
    """x, an integer that is known at trace time and lies in the range of this option."""
    x = _checks.integer(function, name, x)
    if not RANGES[name].holds(x):
        raise ValueError(f"{function}: {name} must be {RANGES[name].expected}, got {x}.")
    return x if name in LIMITS else _checks.index(function, name, x)


def sizes(function: str, **options) -> list[int]:
    """`size` of each."""
    return [size(function, name, x) for name, x in options.items()]


def out_of_range(function: str, numbers: dict[str, Any], dtype):
    """Whether one of the traced numbers is out of its range, bool []; one that is known raises.

    `numbers` are scalars by the name that an error gives them; it ends with the name of the option, and perhaps an
    index. They count as they are in `dtype`, that of scores.
    """
    bad = False
    for name, x in numbers.items():
        expected, holds = RANGES[name.split()[-1].partition("[")[0]]
        known = _checks.known(x)
        if known is None:
            bad |= ~holds(jnp.asarray(x, dtype))
            continue
        with np.errstate(over="ignore", under="ignore"):
            rounded = known.astype(dtype)
        if not holds(rounded):
            where = f" in {np.dtype(dtype).name}, the dtype of scores" if holds(known.astype(np.float64)) else ""
            raise ValueError(f"{function}: {name} must be {expected}{where}, got {float(known)!r}.")
    return bad
