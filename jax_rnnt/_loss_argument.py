"""The `loss` argument of functions that want to know, or do, something else than a loss of logits."""

import inspect
from typing import Any

from jax_rnnt._transducer import Composition
from jax_rnnt.emissions.virtual import Inquiry, JointLogits

_DEFAULTS = dict(
    blank=-1,
    clamp=-1.0,
    reduction="mean",
    fused_log_softmax=True,
    fastemit_lambda=0.0,
    delay_penalty=0.0,
    label_windows=None,
    implementation=None,
)


def given(**options) -> dict[str, Any]:
    """Those that differ from the default that all losses share: a loss may have others bound."""
    return {k: x for k, x in options.items() if not (isinstance(x, type(_DEFAULTS[k])) and x == _DEFAULTS[k])}


def apply_loss(function: str, loss, expected: str, *arguments, **named):
    """`loss` of these arguments, with something in the place of logits; `expected` says which losses can take it.

    Errors name `function`, and then the loss.
    """

    def unsuitable(why=""):
        return TypeError(f"{function}: loss must be {expected}, got {loss!r}{why}.")

    if not callable(loss):
        raise unsuitable()
    try:
        inspect.signature(loss).bind(*arguments, **named)
    except ValueError:  # some callables have no signature
        pass
    except TypeError as error:
        raise unsuitable(f": {error}") from None
    try:
        return loss(*arguments, **named)
    except Exception as error:
        if any(kind.__name__ in str(error) for kind in (Inquiry, JointLogits, Composition)):
            raise unsuitable(", which wants arrays") from error  # to compute with
        if type(error) in (TypeError, ValueError, NotImplementedError):
            raise type(error)(f"{function}: {error}") from error
        raise
