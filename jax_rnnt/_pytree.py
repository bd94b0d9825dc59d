"""Frozen dataclasses as pytrees: fields are leaves unless ``metadata={"static": True}``, as JAX names it.

`jax.tree_util.register_dataclass` rebuilds values by calling the class, so checks of fields would run on whatever JAX
puts in their place (tracers, None, shardings). Here they run only when a user makes a value.
"""

import ast
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import export

Tuple = TypeVar("Tuple", bound=type)


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declares a field of the pytree's structure: a new value compiles anew."""
    return dataclasses.field(default=default, metadata={"static": True})


def option(default: float, *, negative: bool = False) -> Any:
    """Declares a leaf for a number. A Python 0 switches it off at trace time; with `negative`, so does one below 0.

    A number that changes nothing at another value, such as a temperature of 1, is a field without this.
    """
    return dataclasses.field(default=default, metadata={"off": lambda x: x == 0 or (negative and x < 0)})


def make(cls, names, values):
    """Returns a value with these fields, without checks."""
    instance = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def register(cls):
    """Registers a dataclass; keys of leaves are the names of fields."""
    fields = dataclasses.fields(cls)
    names = [[f.name for f in fields if f.metadata.get("static", False) == kept] for kept in (False, True)]

    def flatten_with_keys(x):
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in names[0]]
        return leaves, tuple(getattr(x, name) for name in names[1])

    def flatten(x):
        return [getattr(x, name) for name in names[0]], tuple(getattr(x, name) for name in names[1])

    def unflatten(structure, leaves):
        return make(cls, names[0] + names[1], [*leaves, *structure])

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    if cls.__module__.partition(".")[0] == __package__:
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"{__package__}.{cls.__qualname__}",
            serialize_auxdata=functools.partial(_written, cls),
            deserialize_auxdata=_read,
        )
    return cls


def exportable(name: str) -> Callable[[Tuple], Tuple]:
    """Decorates a named tuple: programs that `jax.export` stores under this name may take and return it."""

    def decorate(cls: Tuple) -> Tuple:
        export.register_namedtuple_serialization(cls, serialized_name=f"{__package__}.{name}")
        return cls

    return decorate


def _written(cls, structure) -> bytes:
    """Returns the structure of a value as text, for the file of an exported program that takes or returns it."""
    text = repr(structure)
    try:
        if ast.literal_eval(text) == structure:
            return text.encode()
    except (SyntaxError, ValueError):
        pass
    cure = "let the exported function close over it, and take its arrays as arguments"
    raise ValueError(f"jax.export: {cls.__name__} must be made of numbers and texts alone, got {text}: {cure}.")


def _read(text: bytes):
    return ast.literal_eval(text.decode())


def replace(x, **fields):
    """Works as `dataclasses.replace`, without checks."""
    values = {f.name: getattr(x, f.name) for f in dataclasses.fields(x)} | fields
    return make(type(x), values.keys(), values.values())
