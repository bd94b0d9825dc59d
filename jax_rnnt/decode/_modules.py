"""Flax modules as predictors and joint networks of a decoder, in evaluation mode and left unchanged."""

import dataclasses
import sys
import types
from collections.abc import Callable
from typing import Any

import jax

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import in_name_of, keywords
from jax_rnnt.decode._predictor import Predictor, check_methods, declared_start, declared_symbols


@keywords
def nnx_predictor(module: Any, *, initial: str = "initial", step: str = "step") -> Predictor:
    """Makes a predictor from a Flax NNX module with two methods, in evaluation mode.

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

        search = decode.Search(loss, joint, decode.nnx_predictor(model.predictor), max_labels=200)
        search.greedy(encoder_out, lengths)
    """
    check_methods("module", module, (initial, step))
    evaluated = Evaluated.of(module)
    start = declared_start("module", module)
    return Predictor(getattr(evaluated, initial), getattr(evaluated, step), start, declared_symbols(module))


@in_name_of("linen_predictor")
def linen_predictor(
    module: Any, variables: Any, *, initial: str = "initial", step: str = "step", **options: Any
) -> Predictor:
    """Makes a predictor from a Flax Linen module with two methods.

    Parameters
    ----------
    module : flax.linen.Module
        An unbound module. Its attributes `start` and `symbols` count, if it has them.
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
        decode.Search(loss, joint, predictor, max_labels=200).greedy(encoder_out, lengths)
    """

    def method(name):
        return lambda *arguments: module.apply(variables, *arguments, method=name, **options)

    check_methods("module", module, (initial, step))
    # The module is bound so that attributes that `setup` sets count too.
    bound = module.bind(variables)
    start = declared_start("module", bound)
    return Predictor(method(initial), method(step), start, declared_symbols(bound))


def in_evaluation(x):
    """Puts a Flax NNX module, or a method of one, in evaluation mode: no dropout, and nothing that it changes is kept.

    Anything else is returned unchanged.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return x
    if isinstance(x, types.MethodType) and isinstance(x.__self__, nnx.Module):
        return dataclasses.replace(Evaluated.of(x.__self__), method=x.__func__)
    return Evaluated.of(x) if isinstance(x, nnx.Module) else x


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class Evaluated:
    """A Flax NNX module as a value with the parameters that it had, or one of its methods.

    Each call runs on a copy in evaluation mode, which a trace may change.
    """

    values: Any
    graph: Any = dataclasses.field(metadata={"static": True})
    # None means the module itself.
    method: Callable | str | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, module):
        from flax import nnx

        graph, values = nnx.split(module)
        return cls(jax.tree.map(lambda x: x, values), graph)  # new variables, since those of the module change in place

    def __repr__(self):
        return _checks.shown(self._copy())

    def _copy(self):
        from flax import nnx

        module = nnx.merge(self.graph, self.values)
        module.eval()
        return module

    def __call__(self, *arguments):
        copy = self._copy()
        if self.method is None:
            return copy(*arguments)
        return getattr(copy, self.method)(*arguments) if isinstance(self.method, str) else self.method(copy, *arguments)

    def __getattr__(self, name):
        if name[:2] == "__" or self.method is not None:
            raise AttributeError(name)
        attribute = getattr(self._copy(), name)
        return dataclasses.replace(self, method=name) if callable(attribute) else attribute
