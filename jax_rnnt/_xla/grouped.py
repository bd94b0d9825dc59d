"""A primitive of plain JAX that the partitioner splits as a whole, by its one batch dimension.

The lowering knows over how many devices the partitioner will spread the program, and splits the batch into as many
groups. Each group works on its own part, so data sharded over the batch stays in place. Results that the groups share
are summed over them once. On one device, or where the mesh axes are manual, there is one group.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jax_rnnt._xla import loading, proof
from jax_rnnt._xla.avals import aval_like, spec_of, struct_like, vary_together
from jax_rnnt._xla.over_devices import Devices, device_of, lower_plain, unpartitioned, without_mesh
from jax_rnnt._xla.primitive import new_primitive, no_pallas, no_parts

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:  # before jax 0.8
    from jax.experimental import enable_x64  # type: ignore[attr-defined,no-redef]


def _groups(count, devices: int) -> int:
    """Returns the number of groups of a batch; a symbolic batch (`jax.export`) is not split."""
    return math.gcd(count, devices) if devices > 1 and isinstance(count, int) else 1


# This avoids `jax.lax.pmax` over a named axis: where `jax.shard_map` maps some axes of the mesh, its lowering fails.
@jax.custom_batching.custom_vmap
def _alike(x):
    return x


@_alike.def_vmap
def _(size, batched, x):
    return (jnp.max(x, 0) if batched[0] else x), False


def most_over_groups(x: jax.Array, grouped: bool) -> jax.Array:
    """Returns the maximum of x over the groups of `Grouped`, the same for all, so that loops over it need no masks."""
    return _alike(x) if grouped else x


def _split(function, axes, arrays, groups):
    """Runs the mapped function over groups of the leading dimension of the arrays whose axis is 0."""
    parts = [x.reshape(groups, -1, *x.shape[1:]) if a == 0 else x for a, x in zip(axes, arrays)]
    return jax.vmap(function, axes)(*parts)


def _merge(xs):
    return [x.reshape(-1, *x.shape[2:]) for x in xs]


def _each(function, mapped, *operands):
    """Runs ``function(*operands)`` for all mapped elements [count, ...], one after the other."""

    def element(elements):
        elements = iter(elements)
        return function(*(next(elements) if m else x for x, m in zip(operands, mapped)))

    return jax.lax.map(element, [x for x, m in zip(operands, mapped) if m])


def _flat(function, mapped, depth, *operands):
    """Runs ``function(*operands)`` on operands with one mapped dimension; results have all `depth` of them again."""
    extents = next(x.shape[:depth] for x, m in zip(operands, mapped) if m)
    count = math.prod(extents)  # -1 would divide by a dimension of size 0
    outputs = function(*(x.reshape(count, *x.shape[depth:]) if m else x for x, m in zip(operands, mapped)))
    return [x.reshape(*extents, *x.shape[1:]) for x in outputs]


def custom_call(target: str, results, operands, aliases=None, **attributes):
    """Calls a kernel in a function of `Grouped`: results [(shape, dtype)], `aliases` {operand: result over it}."""
    types = [struct_like(operands[0], shape, dtype) for shape, dtype in results]
    return jax.ffi.ffi_call(target, types, input_output_aliases=aliases or {})(*operands, **attributes)


class Grouped:
    """A function of one batch dimension, as a primitive that the partitioner splits as a whole.

    `vmap` adds leading dimensions, `depth` of them, to the operands in `mapped`, and runs one element after the other.

    Parameters
    ----------
    name : str
        Name of the primitive.
    function : callable
        ``function(static, shared, batched, grouped, platforms) -> (batched results, shared results)``, two lists each,
        in plain JAX, for one group. Shared results are sums over the batch. `grouped` is for `most_over_groups`.
        `platforms` are those for which the program is lowered.
    kernel : callable, optional
        ``kernel(kind, static, shared, batched, device, reason, doubt) -> function`` of kernels, where `function` runs
        as one: ``function(shared, batched, interpret=...) -> (batched results, shared results)``; None: there is none.
        It gets their kind ("tpu": in Pallas, "cuda"), avals, the facts about a device (`device_of` the program; for
        CUDA, its shared memory and the module of the kernels), and why no kernel can run here at all, or None.
        ``doubt(names)`` is why kernels of these names are not the default here, or None.
    """

    def __init__(self, name: str, function: Callable, kernel: Callable = lambda *_: None):
        self.name, self.function, self.kernel = name, function, kernel
        self.primitive = new_primitive(name, self.abstract_eval, self.lower, self.jvp, self.batch)

    def __call__(self, static, shared, batched, batched_results, shared_results=()):
        """Returns (batched results, shared results).

        `batched_results` lists (trailing shape, dtype) of each; `shared_results` lists (index in `shared` of the
        operand with the same shape, dtype).
        """
        operands = vary_together(*shared, *batched)
        outputs = self.primitive.bind(
            *operands, static=static, num_shared=len(shared), mapped=(False,) * len(operands), depth=0,
            batched_results=tuple(batched_results), shared_results=tuple(shared_results),
        )  # fmt: skip
        return outputs[: len(batched_results)], outputs[len(batched_results) :]

    def abstract_eval(self, *avals, num_shared, mapped, depth, batched_results, shared_results, static):
        extents = next((aval.shape[:depth] for aval, m in zip(avals, mapped) if m), ())
        specs = [spec_of(aval)[:depth] for aval, m in zip(avals, mapped) if m]
        outer = [next((axes for axes in each if axes is not None), None) for each in zip(*specs)]

        def element(i):
            """Returns shape and sharding of an element of this operand."""
            first = depth if mapped[i] else 0
            return avals[i].shape[first:], spec_of(avals[i])[first:]

        def result(i, shape, dtype, spec):
            return aval_like(avals[i], (*extents, *shape), dtype, (*outer, *spec))

        (batch, *_), (axes, *_) = element(num_shared)
        outputs = [result(num_shared, (batch, *shape), dtype, [axes]) for shape, dtype in batched_results]
        return outputs + [result(i, element(i)[0], dtype, element(i)[1]) for i, dtype in shared_results]

    def lower(self, ctx, *operands, mapped, depth, static, num_shared, batched_results, shared_results):
        axes = ctx.module_context.axis_context
        alone = unpartitioned(ctx)
        platforms = tuple(ctx.module_context.platforms)
        if kernel := self._kernel(ctx, platforms, static, num_shared, mapped, depth):
            return self._lower_kernel(ctx, kernel, operands, mapped, depth, num_shared)
        devices = 1 if alone else getattr(axes, "num_devices", None) or axes.mesh.size

        def of_group(grouped, *operands):
            return self.function(static, operands[:num_shared], operands[num_shared:], grouped, platforms)

        def over_batch(devices, grouped, *operands):
            groups = _groups(operands[num_shared].shape[0], devices)
            if groups <= 1:
                outputs, sums = of_group(grouped, *operands)
                return [*outputs, *sums]
            axes = [None] * num_shared + [0] * (len(operands) - num_shared)
            outputs, sums = _split(functools.partial(of_group, True), axes, operands, groups)
            return [*_merge(outputs), *(jnp.sum(x, 0) for x in sums)]

        def over_elements(*operands):
            """Runs all mapped elements, one after the other in each group."""
            groups = _groups(operands[mapped.index(True)].shape[0], devices)
            one = functools.partial(over_batch, 1 if groups > 1 else devices, groups > 1)
            part = functools.partial(_each, one, mapped)
            if groups <= 1:
                return part(*operands)
            return _merge(_split(part, [0 if m else None for m in mapped], operands, groups))

        run = functools.partial(over_batch, devices, False)
        if depth:
            run = functools.partial(_flat, over_elements, mapped, depth)
        return lower_plain(ctx, run if alone else without_mesh(run), operands)

    def _kernel(self, ctx, platforms, static, num_shared, mapped, depth):
        found = [(name, kind) for name in platforms if (kind := loading.joint_kernels(name))]
        if not found:
            return None
        (platform, kind), *_ = found
        avals = [
            jax.core.ShapedArray(x.shape[depth if m else 0 :], x.dtype) for x, m in zip(ctx.avals_in, mapped)
        ]  # fmt: skip
        device: Any = device_of(ctx)
        if kind == "cuda":
            device = loading.shared_memory(platform, device[0]), loading.module(platform)
        several = f"the program is for {' and '.join(platforms)}" if len(platforms) > 1 else None
        reason = several or (no_pallas(ctx) if kind == "tpu" else no_parts(ctx, "the CUDA kernels"))
        doubt = functools.partial(proof.doubt, ctx, platform)
        kernel = self.kernel(kind, static, avals[:num_shared], avals[num_shared:], device, reason, doubt)
        return kernel and functools.partial(kernel, interpret=loading.INTERPRETED.get(platforms[0], False))

    def _lower_kernel(self, ctx, kernel, operands, mapped, depth, num_shared):
        """Lowers to a kernel, which XLA does not partition: each device takes its part of batch or elements."""
        devices = None if unpartitioned(ctx) else Devices(ctx)

        def one(*operands):
            outputs, sums = kernel(operands[:num_shared], operands[num_shared:])
            return [*outputs, *sums]

        def of_parts(*operands):
            """Runs one element, each device a part of its batch."""
            if devices is None:
                return one(*operands)
            (axes,) = devices.spec(ctx.avals_in[num_shared], depth * mapped[num_shared], depth * mapped[num_shared] + 1)

            def part(*operands):
                outputs, sums = kernel(operands[:num_shared], operands[num_shared:])
                return [*outputs], [x[None] for x in sums]

            specs = (*[P()] * num_shared, *[P(axes)] * (len(operands) - num_shared))
            outputs, sums = devices.map(part, specs, P(axes))(*operands)
            return [*outputs, *(jnp.sum(x, 0) if axes else x[0] for x in sums)]

        def over_elements(*operands):
            axes, *others = [None] if devices is None else devices.spec(ctx.avals_in[mapped.index(True)], 0, depth)
            if devices is None or not axes or any(others):
                return _each(of_parts, mapped, *operands)
            specs = tuple(P(axes) if m else P() for m in mapped)
            return devices.map(functools.partial(_each, one, mapped), specs, P(axes))(*operands)

        def on_mesh(*operands):
            with contextlib.nullcontext() if devices is None else jax.sharding.use_abstract_mesh(devices.mesh):
                return _flat(over_elements, mapped, depth, *operands) if depth else of_parts(*operands)

        # This also holds where the program has 64-bit integers: jax 0.6 lowers Python's numbers in the width of the
        # moment.
        with contextlib.nullcontext() if kernel.keywords["interpret"] else enable_x64(False):
            return lower_plain(ctx, on_mesh, operands)

    def batch(self, primitive, operands, axes, *, mapped, depth, **params):
        size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
        operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes)]
        inner = (x.shape[axis is not None :][:depth] for x, axis, m in zip(operands, axes, mapped) if m)
        extents = size, *next(inner, ())

        def widen(x, axis, m):
            """Gives x all leading dimensions, or none."""
            if axis is None and m:
                return jnp.broadcast_to(x[None], (size, *x.shape))
            if axis is not None and not m:
                return jnp.broadcast_to(jnp.expand_dims(x, range(1, depth + 1)), (*extents, *x.shape[1:]))
            return x

        operands = map(widen, operands, axes, mapped)
        mapped = tuple(axis is not None or m for axis, m in zip(axes, mapped))
        outputs = primitive.bind(*operands, mapped=mapped, depth=depth + 1, **params)
        return outputs, [0] * len(outputs)

    def jvp(self, primals, tangents, **_):
        message = f"{self.name} has no derivative in forward mode and none of second order; "
        raise NotImplementedError(message + "use implementation='reference', or plain JAX for sum_over_nodes.")
