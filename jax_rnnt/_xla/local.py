"""A primitive of plain JAX that may branch on data, where each device decides for its own part of the batch.

Under the partitioner a predicate over a sharded batch is a collective, and under `vmap` both branches run. This
primitive has rules for both: the lowering runs the function on each device's part where the part is known, and tells it
not to branch elsewhere; `vmap` adds a batch dimension.
"""

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax.interpreters import ad

from jax_rnnt._xla.avals import aval_like, spec_of, vary_together
from jax_rnnt._xla.over_devices import is_local, lower_over_devices, lower_plain, without_mesh
from jax_rnnt._xla.primitive import new_primitive


class Local:
    """A function of arrays with leading batch dimensions.

    Parameters
    ----------
    name : str
        Name of the primitive.
    function : callable
        ``function(*operands, branch) -> results``; `branch` is True if it may branch on data.
    results : sequence of sequence of (int, int)
        For each result the trailing dimensions: (operand, which of its trailing dimensions).
    jvp : callable
        ``jvp(primals, results, tangents) -> tangents of the results``; None is a tangent of 0.
    transpose : callable, optional
        ``transpose(cotangent, *operands) -> cotangents`` for the one operand that is None, the linear one.
    """

    def __init__(
        self, name: str, function: Callable, results: Sequence, jvp: Callable, transpose: Callable | None = None
    ):
        self.function, self.results, self.jvp_rule = function, results, jvp
        self.primitive = new_primitive(name, self.abstract_eval, self.lower, self.jvp)
        if transpose is not None:
            ad.primitive_transposes[self.primitive] = functools.partial(self.transpose, transpose)

    def __call__(self, *operands, num_batch_dims: int):
        return self.primitive.bind(*vary_together(*operands), num_batch_dims=num_batch_dims)

    def abstract_eval(self, *avals, num_batch_dims):
        def result(dimensions):
            places = [(avals[i], num_batch_dims + axis) for i, axis in dimensions]
            shape = *avals[0].shape[:num_batch_dims], *(aval.shape[axis] for aval, axis in places)
            spec = *spec_of(avals[0])[:num_batch_dims], *(spec_of(aval)[axis] for aval, axis in places)
            return aval_like(avals[0], shape, avals[0].dtype, spec)

        return list(map(result, self.results))

    def lower(self, ctx, *operands, num_batch_dims):
        local = is_local(ctx, num_batch_dims)

        def function(*operands):
            return self.function(*operands, branch=local)

        if local:
            return lower_over_devices(ctx, function, operands, num_batch_dims)
        return lower_plain(ctx, without_mesh(function), operands)

    def jvp(self, primals, tangents, *, num_batch_dims):
        results = self(*primals, num_batch_dims=num_batch_dims)
        tangents = [None if type(x) is ad.Zero else x for x in tangents]
        of_results = self.jvp_rule(primals, results, tangents)
        zeros = [jnp.zeros_like(x) if t is None else t for x, t in zip(results, of_results, strict=True)]
        return results, zeros

    def transpose(self, rule, cotangents, *operands, num_batch_dims):
        linear = [ad.is_undefined_primal(x) for x in operands]
        (cotangent,) = cotangents
        if type(cotangent) is ad.Zero:
            return [None] * len(operands)
        of_operand = rule(cotangent, *(None if is_linear else x for x, is_linear in zip(operands, linear)))
        return [of_operand if is_linear else None for is_linear in linear]
