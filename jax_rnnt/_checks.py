"""Static checks of arguments, whose errors name the argument, what was expected and what was given.

The public function that was called puts its own name before the message (`_keywords`).
"""

import numbers
from collections.abc import Mapping, Set
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt._keywords import Refusal
from jax_rnnt._lazy import LazyArray

Reduction: TypeAlias = Literal["none", "mean", "sum", "mean_target", "mean_volume"]
Implementation: TypeAlias = Literal["kernel", "reference"]
REDUCTIONS = ("none", "mean", "sum", "mean_target", "mean_volume")
IMPLEMENTATIONS = ("kernel", "reference", None)
FLOATS = ("float16", "bfloat16", "float32", "float64")
_INT32 = np.iinfo(np.int32)
_NAME = "InconclusiveDimensionOperation"
_INCONCLUSIVE = getattr(jax.errors if hasattr(jax.errors, _NAME) else jax.core, _NAME)  # in jax.core at first


def bad_value(message: str) -> ValueError:
    """Returns the error for an argument with a wrong value, still without the name of the function that was called."""
    return ValueError(Refusal(message))


def bad_type(message: str) -> TypeError:
    """Returns the error for an argument of a wrong type."""
    return TypeError(Refusal(message))


def shown(x) -> str:
    """Returns x for a message: a module or an array in full would hide what is wrong."""
    text = repr(x)
    return text if len(text) < 100 and "\n" not in text else f"an object of the class {type(x).__qualname__}"


def array(name: str, x) -> jax.Array:
    """Returns x, converted to an array if it is none; raises a TypeError if it cannot be one."""
    converted: Any
    try:
        converted = x if isinstance(x, jax.Array) or hasattr(x, "__array__") else np.asarray(x)
        converted = None if isinstance(x, LazyArray) else converted
    except ValueError:  # lists of different lengths
        converted = None
    if (dtype := getattr(converted, "dtype", None)) is None or dtype == np.dtype(object):
        raise bad_type(f"{name} must be an array, got {shown(x)}.")
    return converted


def floating(name: str, x, rank: int, dimensions: str) -> jax.Array:
    """Returns x as an array of a supported floating dtype with at least `rank` dimensions."""
    x = array(name, x)
    if str(x.dtype) not in FLOATS:
        raise bad_type(f"{name} must have one of the dtypes {', '.join(FLOATS)}, got {x.dtype}.")
    if x.ndim < rank:
        raise bad_value(
            f"{name} must have shape {dimensions} (at least {rank} dimensions), got shape {tuple(x.shape)}."
        )
    # `jnp.asarray` of a tracer is an operation. Run eagerly on NaN padding, it would trip `jax_debug_nans`.
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def integral(name: str, x) -> jax.Array:
    """Returns x as an array of integers; an empty list, which becomes a float array, counts too."""
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        if np.size(x) or not isinstance(x, np.ndarray):
            raise bad_type(f"{name} must have an integer dtype, got {x.dtype}.")
        x = x.astype(np.int32)
    return x


def integers(name: str, x, shape: tuple[int, ...], dimensions: str) -> jax.Array:
    """Returns x as an int32 array of exactly this shape. Values beyond int32 are clipped: they are out of range."""
    x = integral(name, x)
    if tuple(x.shape) != tuple(shape):
        raise bad_value(f"{name} must have shape {dimensions} = {tuple(shape)}, got {tuple(x.shape)}.")
    if not np.can_cast(x.dtype, np.int32):
        low = max(_INT32.min, jnp.iinfo(x.dtype).min)
        x = np.clip(x, low, _INT32.max) if isinstance(x, np.ndarray) else jnp.clip(x, low, _INT32.max)
    return jnp.asarray(x, jnp.int32)


def sequences(
    targets, logit_lengths, target_lengths, batch, labels, columns_of: str = "", rows_of: str = "", rows=0
) -> tuple[jax.Array, ...]:
    """Returns targets [..., U] and both lengths [...], checked.

    `columns_of` names the argument with U + 1 columns, if there is one. `rows_of` names an argument of the same shape
    with T rows.
    """
    cure, shape = None, np.shape(targets)
    if rows_of and rows != labels + 1 and shape == (*batch, rows - 1):
        cure = f"They fit {rows_of}: exchange {rows_of} and {columns_of}"
    elif columns_of and shape == (*batch, labels + 1):
        needed = f"{labels + 2} columns: one before the first label, and one after each"
        cure = f"With {labels + 1} labels {columns_of} needs {needed}"
    if cure:
        expected = f"[..., U] = {(*batch, labels)} beside {columns_of} with U + 1 = {labels + 1} columns"
        raise bad_value(f"targets must have shape {expected}, got {shape}. {cure}.")
    targets = integers("targets", targets, (*batch, labels), "[..., U]")
    unsplit("targets", targets, {-1: "U"})
    return (
        targets,
        integers("logit_lengths", logit_lengths, batch, "[...]"),
        integers("target_lengths", target_lengths, batch, "[...]"),
    )


def unsplit(name: str, x, dimensions: dict[int, str], why: str = "") -> None:
    """Raises an error if an Explicit mesh axis splits one of these dimensions of x: {index from the end: name}.

    JAX would fail later, in terms of its own operations. Axes of type Auto need no check: the partitioner gathers.
    """
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None:
        return
    spec = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    if split := {i: letter for i, letter in dimensions.items() if -i <= x.ndim and spec[i] is not None}:
        i, letter = next(iter(split.items()))
        whole = jax.sharding.PartitionSpec(*(None if n - x.ndim in split else axes for n, axes in enumerate(spec)))
        expected = f"{name} must not be split over {letter} (dimension {i}){why}"
        got = f"got mesh axis {spec[i]!r} of type Explicit there"
        raise bad_value(f"{expected}, {got}: gather with jax.sharding.reshard({name}, {whole}).")


_OTHER_REDUCTIONS = {"mean_batch": "mean", "batchmean": "mean", "average": "mean", "avg": "mean", None: "none"}


def reduction(x) -> str:
    """Returns x if it is the name of a reduction."""
    if isinstance(x, (str, type(None))) and x in _OTHER_REDUCTIONS:
        names = ", ".join(map(repr, REDUCTIONS))
        raise bad_value(f"reduction must be one of {names}, got {x!r}; the same here is {_OTHER_REDUCTIONS[x]!r}.")
    return choice("reduction", x, REDUCTIONS)


def scalar(name: str, x):
    """Returns a real number or a numeric scalar array, traced or not. Numbers of Python and NumPy become floats."""
    if isinstance(x, numbers.Real) and not isinstance(x, bool):
        try:
            return float(x)
        except OverflowError:
            raise bad_value(f"{name} must be a number that a float holds, got a larger one.") from None
    dtype = getattr(x, "dtype", np.dtype(object))
    if not jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.complexfloating):
        raise bad_type(f"{name} must be a real number, got {x!r}.")
    if x.shape != ():
        raise bad_value(f"{name} must be a scalar, got shape {tuple(x.shape)}.")
    return float(x) if isinstance(x, (np.generic, np.ndarray)) else x


def number(name: str, x):
    """Checks as `scalar`, and refuses a NaN that is known while tracing; a traced one makes losses NaN."""
    x = scalar(name, x)
    if isinstance(x, float) and x != x:
        raise bad_value(f"{name} must be a number, got nan.")
    return x


def known(x) -> np.ndarray | None:
    """Returns x as a NumPy array if its values can be read now. Compute with that: under jit JAX traces operations."""
    if isinstance(x, jax.Array) and (isinstance(x, jax.core.Tracer) or not x.is_fully_addressable):
        return None
    return np.asarray(x)


def is_number(x) -> bool:
    """Returns True if x is a number of Python or NumPy, which is known while tracing. A leaf may hold either."""
    return isinstance(x, numbers.Real) or (isinstance(x, (np.generic, np.ndarray)) and x.ndim == 0)


def is_zero(x) -> bool:
    """Returns True if x is the number 0, known while tracing."""
    return is_number(x) and x == 0


def key(x) -> None:
    """Raises an error unless x is None or one JAX random key, typed or of type uint32."""
    if x is None:
        return
    dtype, rank = getattr(x, "dtype", None), np.ndim(x)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and (dtype != np.uint32 or rank == 0):
        raise bad_type(f"key must be a JAX random key, got {x!r}.")
    if rank != (0 if typed else 1):
        raise bad_type(f"key must be one JAX random key, got an array of shape {np.shape(x)}.")


def choice(name: str, x, choices):
    """Returns x if it is one of `choices`."""
    if not any(x is c or (isinstance(x, str) and x == c) for c in choices):
        raise bad_value(f"{name} must be one of {', '.join(map(repr, choices))}, got {x!r}.")
    return x


def boolean(name: str, x) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise bad_type(f"{name} must be True or False, got {x!r}.")
    return bool(x)


def no_draws(name: str, draws: bool) -> None:
    """Raises an error if a decoder's network draws random numbers: its dropout would silently make every step noisy."""
    if draws:
        cure = "turn its dropout off, by module.eval() in NNX or deterministic=True in Linen"
        raise bad_type(f"{name} must not draw random numbers, got one that does: {cure}.")


def smaller(n, bound: int) -> bool:
    """Returns True if a dimension is below a bound; for a symbolic one (`jax.export`), only if that is certain."""
    try:
        return bool(n < bound)
    except _INCONCLUSIVE:
        return False


def integer(name: str, x) -> int:
    if not isinstance(x, (int, np.integer)) or isinstance(x, bool):
        raise bad_type(f"{name} must be an integer known at trace time, got {x!r}.")
    return int(x)


def index(name: str, x) -> int:
    """Returns an integer that fits int32, as the sizes of arrays and labels do."""
    x = integer(name, x)
    if not _INT32.min <= x <= _INT32.max:
        raise bad_value(f"{name} must lie in [-2^31, 2^31), got {x}.")
    return x


def positive(name: str, x) -> int:
    x = index(name, x)
    if x < 1:
        raise bad_value(f"{name} must be 1 or more, got {x}.")
    return x


def class_index(name: str, x, classes: int) -> int:
    """Returns a class in [0, classes) from an index that may count from the end."""
    x = integer(name, x)
    if not -classes <= x < classes:
        raise bad_value(f"{name} must lie in [{-classes}, {classes}) for {classes} classes, got {x}.")
    return x % classes


def distinct_integers(name: str, x, smallest: int) -> tuple[int, ...]:
    """Returns a tuple of at least one distinct integers, each at least `smallest`."""
    try:
        values = None if isinstance(x, (Set, Mapping)) else tuple(x)  # their order would choose the classes
    except TypeError:
        values = None
    if values is None or not all(isinstance(d, (int, np.integer)) and not isinstance(d, bool) for d in values):
        raise bad_type(f"{name} must be an ordered sequence of integers known at trace time, got {x!r}.")
    values = tuple(int(d) for d in values)
    if len(set(values)) != len(values) or min(values, default=smallest - 1) < smallest:
        raise bad_value(f"{name} must be distinct integers >= {smallest}, at least one, got {values}.")
    return values
