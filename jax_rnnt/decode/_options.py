"""Options of the searches: the values that each may have, and the verbs that take it.

A static number out of its range is an error. A traced one is not known before the program runs: then the score of
every utterance is NaN.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt.decode._entropy import Entropy
from jax_rnnt.decode._guard import USUAL, Guard


class Range(typing.NamedTuple):
    """The values that a number may have."""

    expected: str  # the range in words
    holds: Callable[[Any], Any]  # whether an int, or a scalar of NumPy or JAX in the dtype of scores, lies in the range
    is_size: bool = True  # a size of arrays or loops must fit int32; a mere limit may be larger


AT_LEAST_1, AT_LEAST_0 = Range("1 or more", lambda x: x >= 1), Range("0 or more", lambda x: x >= 0)
LIMIT = AT_LEAST_1._replace(is_size=False)
FINITE = Range("finite", lambda x: abs(x) < np.inf)
# A subnormal temperature counts as 0: some devices round it to 0, and its inverse is infinite.
ABOVE_0 = Range("finite and above 0", lambda x: (x >= np.finfo(x.dtype).tiny) & (x < np.inf))
PROBABILITY = Range("above 0 and at most 1", lambda x: (x > 0) & (x <= 1))
UP_TO_1 = Range("0 or more and at most 1", lambda x: (x >= 0) & (x <= 1))
NOT_INFINITE = Range("finite or -inf", lambda x: x < np.inf)

# Ranges of the arguments of verbs, of `fusion` and of `DecodingRules`; `declare` adds those of the fields of `Search`.
RANGES = {
    "max_labels": AT_LEAST_1,
    "frames_at_once": LIMIT,
    "width": AT_LEAST_1,
    "samples": AT_LEAST_1,
    "threshold": AT_LEAST_0,
    "length_norm": FINITE,
    "weight": FINITE,
    "margin": AT_LEAST_0,
    "blank_margin": AT_LEAST_0,
    "most": Range("above 0", lambda x: x > 0),
    "top_k": AT_LEAST_1,
    "top_p": PROBABILITY,
    "arc_weights": NOT_INFINITE,
}
OFF: dict[str, float] = {}  # the numbers among the fields of `Search`, with the values that switch them off


def option(default, *verbs: str, range: Range | None = None) -> Any:
    """Declares a field of `Search`: its default, the verbs that take it (by default all), and the range of a number.

    Where the default is a float, a Python number of that value switches the option off.
    """
    return dataclasses.field(default=default, metadata={"verbs": verbs, "range": range})


def declare(search: type) -> None:
    """Records the ranges of the fields, and the values that switch numbers off."""
    fields = dataclasses.fields(search)
    RANGES.update({f.name: f.metadata["range"] for f in fields if f.metadata.get("range")})
    OFF.update({f.name: f.default for f in fields if isinstance(f.default, float)})


def is_on(search, name: str) -> bool:
    """Returns True if a number of a `Search` may change anything: it differs from its default, or is traced."""
    x = getattr(search, name)
    return not (_checks.is_number(x) and x == OFF[name])


def checked(search) -> dict[str, Any]:
    """Returns the options of a `Search` by name, checked as far as is possible without a batch.

    Numbers of Python and NumPy become floats, and a model of fusion with the weight 0 is left out.
    """
    counts = "max_labels", "max_symbols"
    values: dict[str, Any] = {name: size(name, getattr(search, name)) for name in counts}
    values |= {name: _checks.scalar(name, getattr(search, name)) for name in OFF}
    _checks.choice("duration_choice", search.duration_choice, ("pair", "token_first"))
    if search.confidence is not None and not isinstance(search.confidence, Entropy):
        raise _checks.bad_type(f"confidence must be an Entropy or None, got {search.confidence!r}.")
    if search.guard is not None and not isinstance(search.guard, Guard):
        raise _checks.bad_type(f"guard must be a Guard or None, got {search.guard!r}.")
    expected, pairs = "a sequence of pairs (model, weight), as fusion=((model, 0.3),)", []
    if isinstance(search.fusion, str) or not isinstance(search.fusion, Sequence):
        raise _checks.bad_type(f"fusion must be {expected}, got {search.fusion!r}.")
    for i, pair in enumerate(search.fusion):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise _checks.bad_type(f"fusion must be {expected}, got fusion[{i}] = {pair!r}.")
        pairs.append((pair[0], _checks.scalar(f"fusion[{i}] weight", pair[1])))
    pairs = [pair for pair in pairs if not _checks.is_zero(pair[1])]
    return values | {"fusion": tuple(pairs)}


def numbers(search) -> dict[str, Any]:
    """Returns the numbers of a `Search` by their names in errors, as for `out_of_range`."""
    weights = {f"fusion[{i}] weight": weight for i, (_, weight) in enumerate(search.fusion)}
    guard = {f"guard {name}": getattr(search.guard, name, None) for name in USUAL}
    guard = {name: x for name, x in guard.items() if x is not None}
    return {name: getattr(search, name) for name in OFF} | weights | guard


def size(name: str, x) -> int:
    """Returns x as an integer that is known at trace time and lies in the range of this option."""
    x = _checks.integer(name, x)
    if not RANGES[name].holds(x):
        raise _checks.bad_value(f"{name} must be {RANGES[name].expected}, got {x}.")
    return _checks.index(name, x) if RANGES[name].is_size else x


def out_of_range(numbers: dict[str, Any], dtype):
    """Returns bool []: True if one of the traced numbers is out of its range; a known one raises an error.

    `numbers` are scalars by the name that an error gives them; it ends with the name of the option, and perhaps an
    index. They are compared after conversion to `dtype`, the dtype of scores.
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
            raise _checks.bad_value(f"{name} must be {expected}{where}, got {known.item()!r}.")
    return bad
