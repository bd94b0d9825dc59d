"""Logits that look like an array, with shape and dtype, but are not: operations say what to do instead."""

import typing

import jax

_UNARY = "neg pos abs invert round float int complex array jax_array getitem"
_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and or xor"
_OPERATORS = (
    *_UNARY.split(),
    *("lt", "le", "gt", "ge"),
    *(side + name for name in _BINARY.split() for side in ("", "r")),
)


class LazyArray:
    """The base of such a class."""

    instead = "compute with what makes them"  # the advice in errors

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name):
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(jax.Array, name):
                message += f": its logits are no array. To change them, {self.instead}"
            raise AttributeError(message, name=name, obj=self)


def _refuse(operator):
    what = {"array": "NumPy", "jax_array": "jax.numpy", "getitem": "an index"}.get(operator, f"operator.{operator}")

    def method(self, *_, **__):
        kind = type(self).__name__
        raise TypeError(f"{kind}: {what} needs an array, which the logits of {kind} are not: {self.instead}.")

    return method


for _name in _OPERATORS:
    setattr(LazyArray, f"__{_name}__", _refuse(_name))
