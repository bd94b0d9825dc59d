"""Former public names. Each works for one minor version, with a DeprecationWarning that names the new one."""

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


def names(module: str, renamed: dict[str, str], otherwise=None):
    """`__getattr__` of a module whose names were `renamed`, old to new; other names go to `otherwise`."""

    def __getattr__(name):
        if name in renamed:
            _warn(f"{module}.{name}", f"{module}.{renamed[name]}")
            return getattr(importlib.import_module(module), renamed[name])
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

    return __getattr__


def argument(**renamed: str) -> Callable[[Function], Function]:
    """Decorator of a function, or of the `__init__` of a class, whose arguments were renamed: old=new keyword."""

    def decorate(function):
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            for old, new in renamed.items():
                if old not in kwargs:
                    continue
                if new in kwargs:
                    raise TypeError(f"{name}: {old} is the former name of {new}; give {new} alone")
                _warn(f"{name}: the argument {old}", new)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def attribute(old: str, new: str) -> property:
    """The former name `old` of the attribute or method `new`, for the body of a class."""

    def get(self):
        _warn(f"{type(self).__name__}.{old}", f"{type(self).__name__}.{new}")
        return getattr(self, new)

    return property(get, doc=f"Deprecated: the former name of `{new}`.")
