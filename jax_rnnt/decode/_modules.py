"""Flax modules as predictors and joint networks of a decoder: in evaluation mode, and left as they are."""

import sys
import types
from typing import Any

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._predictor import Predictor, check_methods, declared_start, declared_symbols


@keywords
def nnx_predictor(module: Any, *, initial: str = "initial", step: str = "step") -> Predictor:
    """The predictor of a Flax NNX module with two methods, in evaluation mode.

    Parameters
    ----------
    module : flax.nnx.Module
        The predictor reads its parameters now, and its attributes `start` and `symbols`, if it has them. Dropout is
        off, and what a step changes in the module is lost.
    initial, step : str
        Names of its methods, as in `Predictor`.

    Returns
    -------
    Predictor

    Examples
    --------
    ::

        decode.greedy(loss, joint, decode.nnx_predictor(model.predictor), encoder_out, lengths, max_labels=200)
    """
    check_methods("nnx_predictor", "module", module, (initial, step))
    copy = _copies(module)

    def method(name):
        return lambda *arguments: getattr(copy(), name)(*arguments)

    start = declared_start("nnx_predictor", "module", module)
    return Predictor(method(initial), method(step), start, declared_symbols(module))


def linen_predictor(
    module: Any, variables: Any, *, initial: str = "initial", step: str = "step", **options: Any
) -> Predictor:
    """The predictor of a Flax Linen module with two methods.

    Parameters
    ----------
    module : flax.linen.Module
        Unbound. Its attributes `start` and `symbols` count, if it has them.
    variables : pytree
        As for ``module.apply``; no call changes a collection.
    initial, step : str
        Names of its methods, as in `Predictor`.
    **options
        Keywords of both calls of ``module.apply``.

    Returns
    -------
    Predictor

    Examples
    --------
    ::

        predictor = decode.linen_predictor(Predictor(), {"params": params["predictor"]})
        decode.greedy(loss, joint, predictor, encoder_out, lengths, max_labels=200)
    """

    def method(name):
        return lambda *arguments: module.apply(variables, *arguments, method=name, **options)

    check_methods("linen_predictor", "module", module, (initial, step))
    # Bound, so that attributes that `setup` sets count too.
    bound = module.bind(variables)
    start = declared_start("linen_predictor", "module", bound)
    return Predictor(method(initial), method(step), start, declared_symbols(bound))


def in_evaluation(x):
    """A Flax NNX module, or a method of one, in evaluation mode: no dropout, and nothing that it changes is kept.

    Anything else is returned unchanged.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return x
    if isinstance(x, types.MethodType) and isinstance(x.__self__, nnx.Module):
        copy = _copies(x.__self__)
        return lambda *arguments: x.__func__(copy(), *arguments)
    return _Evaluation(x) if isinstance(x, nnx.Module) else x


class _Evaluation:
    """An NNX module, each of whose methods runs on a copy in evaluation mode."""

    def __init__(self, module):
        self._module, self._copy = module, _copies(module)

    def __call__(self, *arguments):
        return self._copy()(*arguments)

    def __repr__(self):
        return _checks.shown(self._module)

    def __getattr__(self, name):
        attribute = getattr(self._module, name)
        return (lambda *arguments: getattr(self._copy(), name)(*arguments)) if callable(attribute) else attribute


def _copies(module):
    """A function that makes a copy of an NNX module, in evaluation mode. A trace may change its copy."""
    from flax import nnx

    graph, values = nnx.split(module)

    def copy():
        module = nnx.merge(graph, values)
        module.eval()
        return module

    return copy
