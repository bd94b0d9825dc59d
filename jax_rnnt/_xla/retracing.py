"""Traces a function in one place and evaluates it in another: joint networks, which run on tiles.

The user calls the loss in one context; tiles are evaluated in the lowering of their passes, outside any mesh. A joint
that takes its arrays as parameters is `Pure`: it is called again there.

A joint that closes over arrays is `Traced`, as a jaxpr whose constants are its parameters. Traced under a mesh, a jaxpr
carries mesh axes and shardings in all its avals, those of loops and branches too, and custom-derivative rules must be
traced in the original mesh context. So the derivative is traced there as well, as two jaxprs without such rules: one
makes the result and the residuals, the other the gradients. Both are evaluated equation by equation, on plain arrays.

JAX has no function for this. `jax.closure_convert` hoists the constants, but returns a function that evaluates the same
jaxpr, and so does `jax.extend.core.jaxpr_as_fun`. Under an empty mesh, JAX cannot trace a function that closes over
arrays with varying manual axes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jax_rnnt import _checks
from jax_rnnt._xla.avals import on_mesh, plain_aval


def is_trained(x) -> bool:
    """Returns True if x has a gradient: keys and integers have none."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


class Function:
    """A function of arrays with one result, which takes its parameters first, then rows."""

    def differentiable(self):
        """Returns the same function with its derivative. Call it in the mesh context of the trace."""
        return self

    def vjp(self, *values):
        """Returns (result, function from its cotangent to the gradients of the values that have one)."""
        result, pull = _vjp(self, values)
        return result, lambda cotangent: pull(cotangent)[0]


@dataclasses.dataclass(frozen=True)
class Pure(Function):
    """``function(parameters, *rows)`` that closes over no array."""

    function: Callable
    structure: Any  # structure of the parameters
    random: bool

    def __call__(self, *values):
        count = self.structure.num_leaves
        return self.function(jax.tree.unflatten(self.structure, values[:count]), *values[count:])


@dataclasses.dataclass(frozen=True)
class Traced(Function):
    """A function as a jaxpr, whose constants are the parameters."""

    jaxpr: Jaxpr
    on_mesh: bool  # whether it was traced where there is a mesh
    # With a mesh: values -> result, *residuals, and *residuals, cotangent of the result -> gradients.
    derivative: tuple[ClosedJaxpr, ClosedJaxpr] | None = None

    @property
    def random(self) -> bool:
        return draws(self.jaxpr)

    def __call__(self, *values):
        return evaluate(self.jaxpr, *values)[0] if self.on_mesh else self._as_traced(*values)

    def _as_traced(self, *values):
        count = len(self.jaxpr.constvars)
        return jax.core.eval_jaxpr(self.jaxpr, values[:count], *values[count:])[0]

    def differentiable(self):
        if not self.on_mesh:
            return self
        structure: Any = None

        def forward(values):
            nonlocal structure
            result, pull = _vjp(self._as_traced, values)
            residuals, structure = jax.tree.flatten(pull)
            return result, *residuals

        def backward(residuals, cotangent):
            return jax.tree.unflatten(structure, residuals)(cotangent)[0]

        closed = jax.make_jaxpr(forward)([v.aval for v in (*self.jaxpr.constvars, *self.jaxpr.invars)])
        result, *residuals = closed.out_avals
        return dataclasses.replace(self, derivative=(closed, jax.make_jaxpr(backward)(residuals, result)))

    def vjp(self, *values):
        if self.derivative is None:
            return super().vjp(*values)
        forward, backward = self.derivative
        result, *residuals = evaluate(forward.jaxpr, *forward.consts, *values)
        # Sums over devices (the transposes of `pvary`) follow after all tiles: their loop cannot wait for devices.
        pull = functools.partial(evaluate, backward.jaxpr, drop=(*_OF_MESH, "psum_invariant"))
        return result, lambda cotangent: pull(*backward.consts, *residuals, cotangent)


def trace(function: Callable, *avals) -> tuple[Traced, list[jax.Array], Any]:
    """Returns (the function, its constants, shape and dtype of its result)."""
    # A fresh lambda, since JAX caches traces by function identity and could return stale constants.
    closed, result = jax.make_jaxpr(lambda *arguments: function(*arguments), return_shape=True)(*avals)
    types = (v.aval for v in (*closed.jaxpr.constvars, *closed.jaxpr.invars))
    return Traced(closed.jaxpr, on_mesh(types)), [jnp.asarray(x) for x in closed.consts], result


def pure(function: Callable, parameters, *avals) -> tuple[Pure, list[jax.Array], Any]:
    """Works as `trace` for ``function(parameters, *rows)``, with the leaves of `parameters` in place of constants."""
    leaves, structure = jax.tree.flatten(parameters)
    closed, result = jax.make_jaxpr(lambda *arguments: function(*arguments), return_shape=True)(parameters, *avals)
    if closed_over := [jax.typeof(x) for x in closed.consts if isinstance(x, jax.Array)]:
        expected = "take all its arrays from parameters"
        raise _checks.bad_type(f"joint must {expected}, got one that closes over {closed_over}.")
    return Pure(function, structure, draws(closed.jaxpr)), leaves, result


def shape_of(what: str, function: Callable, *avals) -> tuple[Any, bool]:
    """Returns (shapes and dtypes of its result, whether it draws random numbers); errors name the argument `what`."""
    try:
        closed, result = jax.make_jaxpr(lambda *arguments: function(*arguments), return_shape=True)(*avals)
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # an error of Flax NNX
            raise
        name = getattr(function, "__qualname__", type(function).__qualname__)
        cure = "call eval() of the module that it runs, or drop and normalise rows before"
        got = f"got {name}, which changes a Flax NNX module in training mode, as dropout and batch norm do"
        raise _checks.bad_type(f"{what} must not change anything, {got}: {cure}. Flax says: {error}") from error
    return result, draws(closed.jaxpr)


# Primitives that draw random numbers. Making and splitting keys draws none, except for keys of plain integers.
_DRAWS = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform", "prng_random_bits"}


def draws(jaxpr) -> bool:
    """Returns True if the jaxpr draws random numbers, which depend on a row's place in the tile."""
    return not _DRAWS.isdisjoint(_primitives(jaxpr))


def _vjp(function, values):
    def of_trained(trained):
        trained = iter(trained)
        return function(*(next(trained) if is_trained(x) else x for x in values))

    return jax.vjp(of_trained, [x for x in values if is_trained(x)])


def _primitives(jaxpr) -> Iterator[str]:
    """Yields the names of the primitives, including those of inner jaxprs."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for param in jax.tree.leaves(equation.params):
            inner = param.jaxpr if isinstance(param, ClosedJaxpr) else param
            if isinstance(inner, Jaxpr):
                yield from _primitives(inner)


# Primitives that do nothing to plain arrays.
_OF_MESH = ("pvary", "pcast", "reshard", "sharding_constraint")
# Primitives that call a jaxpr, with the name of the parameter that holds it. The derivative has been taken, so what
# `jax.checkpoint` computes again is written out.
_CALLS = dict.fromkeys(("closed_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
_CALLS |= dict.fromkeys(("pjit", "jit", "checkpoint", "remat2"), "jaxpr") | {"custom_vjp_call_jaxpr": "fun_jaxpr"}


def evaluate(jaxpr, *operands, drop=_OF_MESH):
    """Evaluates a jaxpr outside any mesh, given its constants and arguments.

    Primitives in `drop` return their operands.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), operands, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        primitive, params = equation.primitive, equation.params
        arguments = [read(v) for v in equation.invars]
        if primitive.name in drop:
            outputs = arguments
        elif primitive.name in _CALLS:
            called = params[_CALLS[primitive.name]]
            called = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
            outputs = evaluate(called.jaxpr, *called.consts, *arguments, drop=drop)
        else:
            outputs = _bind(primitive, arguments, jax.tree.map(functools.partial(_anew, drop=drop), params))
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _bind(primitive, arguments, params):
    bound = primitive.get_bind_params(params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)  # jax < 0.10
    outputs = primitive.bind(*functions, *arguments, **params)
    return outputs if primitive.multiple_results else [outputs]


def _anew(param, drop):
    """Returns an equation's parameter, remade in the present context."""
    if isinstance(param, ClosedJaxpr):
        function = functools.partial(evaluate, param.jaxpr, *param.consts, drop=drop)
        return jax.make_jaxpr(function)(*(plain_aval(v.aval) for v in param.jaxpr.invars))
    if isinstance(param, jax.core.ShapedArray):
        return plain_aval(param)
    return None if isinstance(param, jax.sharding.Sharding) else param
