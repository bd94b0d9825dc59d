"""Options of the searches: what each may be, and which verbs take it.

A static number out of its range is an error. A traced one is not known before the program runs: then the score of
every utterance is NaN.
"""

import dataclasses
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
    is_size: bool = True  # a count of arrays or loops, which int32 must hold, and no limit that may be any larger


AT_LEAST_1, AT_LEAST_0 = Range("1 or more", lambda x: x >= 1), Range("0 or more", lambda x: x >= 0)
LIMIT = AT_LEAST_1._replace(is_size=False)
FINITE = Range("finite", lambda x: abs(x) < np.inf)
# A subnormal temperature counts as 0: some devices round it to 0, and its inverse is infinite.
ABOVE_0 = Range("finite and above 0", lambda x: (x >= np.finfo(x.dtype).tiny) & (x < np.inf))
PROBABILITY = Range("above 0 and at most 1", lambda x: (x > 0) & (x <= 1))
UP_TO_1 = Range("0 or more and at most 1", lambda x: (x >= 0) & (x <= 1))
NOT_INFINITE = Range("finite or -inf", lambda x: x < np.inf)

# Of arguments of the verbs, of `fusion` and of `DecodingRules`; `declared` adds those of the fields of `Search`.
RANGES = {
    "max_labels": AT_LEAST_1,
    "frames_at_once": LIMIT,
    "width": AT_LEAST_1,
    "samples": AT_LEAST_1,
    "threshold": AT_LEAST_0,
    "length_norm": FINITE,
    "weight": FINITE,
    "top_k": AT_LEAST_1,
    "top_p": PROBABILITY,
    "arc_weights": NOT_INFINITE,
}


def option(default, *verbs: str, range: Range | None = None) -> Any:
    """A field of `Search`: its default, the verbs that take it, by default all, and what a number may be.

    Where the default is a float, a Python number of that value switches the option off.
    """
    return dataclasses.field(default=default, metadata={"verbs": verbs, "range": range})


def declared(search: type) -> dict[str, float]:
    """Takes over the ranges of the fields; the numbers among them, with the values that switch them off."""
    fields = dataclasses.fields(search)
    RANGES.update({f.name: f.metadata["range"] for f in fields if f.metadata.get("range")})
    return {f.name: f.default for f in fields if isinstance(f.default, float)}


def size(function: str, name: str, x) -> int:
    """x, an integer that is known at trace time and lies in the range of this option."""
    x = _checks.integer(function, name, x)
    if not RANGES[name].holds(x):
        raise ValueError(f"{function}: {name} must be {RANGES[name].expected}, got {x}.")
    return _checks.index(function, name, x) if RANGES[name].is_size else x


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
        expected, holds, _ = RANGES[name.split()[-1].partition("[")[0]]
        known = _checks.known(x)
        if known is None:
            bad |= ~holds(jnp.asarray(x, dtype))
            continue
        with np.errstate(over="ignore", under="ignore"):
            rounded = known.astype(dtype)
        if not holds(rounded):
            where = f" in {np.dtype(dtype).name}, the dtype of scores" if holds(known.astype(np.float64)) else ""
            raise ValueError(f"{function}: {name} must be {expected}{where}, got {known.item()!r}.")
    return bad
