"""Binds each kernel as one primitive; without a kernel it runs the pure-JAX reference.

`jax.ffi.ffi_call` alone would all-gather sharded logits under jit and fail under `jax.shard_map` and on explicit-axis
meshes (jax 0.6.2 ... 0.12), so each primitive carries
  * a lowering to the custom call on every platform that has the kernel, and to the pure-JAX reference on all others;
  * one batching rule: all leading dimensions are batch, vmap adds one more;
  * an abstract evaluation that keeps batch sharding and varying manual axes;
  * a Shardy rule: batch dimensions are sharded, all others need replication;
  * a JVP rule, the reference's, for forward mode and second derivatives, where the primitive is differentiable.
"""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import layout
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir, xla

from jax_rnnt import _installation
from jax_rnnt._xla import loading, proof
from jax_rnnt._xla.avals import result_aval, vary_together
from jax_rnnt._xla.over_devices import lower_over_devices, unpartitioned

PALLAS = (0, 8)  # the first jax whose Pallas runs the TPU kernels
_PARTLY_MANUAL = (0, 10)  # the same within a mesh that has manual and automatic axes
_warning = threading.RLock()  # a cache lets two threads compute one entry


@functools.cache
def _warn(message: str) -> None:
    _installation.warn(message)


def warn_once(message: str) -> None:
    """Calls `_installation.warn` once for each message."""
    with _warning:
        _warn(message)


def beyond(limits: Mapping[str, int], *numbers: tuple[str, str, Any]) -> str | None:
    """Returns a sentence about the first of (name in `limits`, things counted, their number) above its limit.

    Symbolic sizes are taken to fit.
    """
    for name, things, number in numbers:
        if isinstance(number, int) and name in limits and number > limits[name]:
            return f"the kernels take at most {limits[name]} {things}, got {number}"
    return None


def new_primitive(
    name: str, abstract_eval: Callable, lower: Callable, jvp: Callable | None = None, batch: Callable | None = None
) -> Primitive:
    """Makes a primitive of several results that runs by its lowering, with these rules; `batch` takes it first."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = functools.partial(batch or _add_batch_dim, primitive)
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    return primitive


def _add_batch_dim(primitive: Primitive, operands, axes, *, num_batch_dims: int, **params):
    """Batches a primitive whose leading dimensions are all batch."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
    operands = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes)
    ]
    outputs = primitive.bind(*vary_together(*operands), num_batch_dims=num_batch_dims + 1, **params)
    return outputs, [0] * len(outputs)


def _sharding_rule(num_batch_dims: int, operands, results) -> str:
    """Returns a Shardy rule: batch dimensions share one factor each; every other has its own and needs replication."""
    sizes: list[int] = []

    def factor(size):
        sizes.append(size)
        return len(sizes) - 1

    def symbol(i):  # i, j, ..., z, z_1, z_2, ...
        return chr(ord("i") + i) if i < 18 else f"z_{i - 17}"

    batch = [factor(d) for d in operands[0].shape[:num_batch_dims]]

    def dimensions(aval):
        others = [factor(d) for d in aval.shape[num_batch_dims:]]
        return "[" + ", ".join(map(symbol, batch + others)) + "]"

    left, right = (", ".join(map(dimensions, avals)) for avals in (operands, results))
    factors = ", ".join(f"{symbol(i)}={size}" for i, size in enumerate(sizes))
    replicated = ", ".join(map(symbol, range(num_batch_dims, len(sizes))))
    need = f" need_replication={{{replicated}}}" if replicated else ""
    return f"#sdy.op_sharding_rule<({left})->({right}) {{{factors}}}{need}, custom>"


def too_old_for_pallas() -> str | None:
    """Returns why this JAX runs no kernel in Pallas."""
    if jax.__version_info__ < PALLAS:
        return f"the TPU kernels need jax {'.'.join(map(str, PALLAS))}, got {jax.__version__}"
    return None


def no_pallas(ctx) -> str | None:
    """Returns why Pallas cannot run here at all."""
    return too_old_for_pallas() or no_parts(ctx, "the TPU kernels")


def no_parts(ctx, kernels: str) -> str | None:
    """Returns why kernels cannot run on each device's own part."""
    partly = getattr(ctx.module_context.axis_context, "manual_axes", ()) and not unpartitioned(ctx)
    if partly and jax.__version_info__ < _PARTLY_MANUAL:
        return f"{kernels} in a jax.shard_map over some axes need jax {'.'.join(map(str, _PARTLY_MANUAL))}"
    symbols = [d for aval in ctx.avals_in for d in aval.shape if not isinstance(d, int)]
    return f"{kernels} need sizes known when lowered, got the symbol {symbols[0]}" if symbols else None


def _row_major(x):
    if jax.__version_info__ < (0, 7):  # there, Layout meant what Format means now
        make = layout.DeviceLocalLayout  # type: ignore[attr-defined]
    else:
        make = layout.Layout
    return layout.with_layout_constraint(x, make(tuple(range(x.ndim))))


class Kernel:
    """Calls the kernel `target`, or `reference` where the platform has no kernel for the problem.

    Parameters
    ----------
    target : str
        Name in XLA's registry, the same on all platforms.
    reference : callable
        ``reference(*operands, **attributes) -> results`` in plain JAX; all leading dimensions are batch.
    results : callable
        ``results(*operands, **attributes) -> [(trailing shape, dtype), ...]`` from the operands' avals.
    aliases : callable, optional
        ``aliases(number of operands) -> {operand: result}`` of the same shape, where the kernel can write the result
        over the operand.
    workspace : callable, optional
        ``workspace(sizes, *operands, **attributes) -> elements`` of the first operand's dtype that the kernel needs for
        each batch element, from the platform's entry of `loading.WORKSPACES` and the operands' avals. The custom call
        gets one more result of this size.
    unsupported : callable, optional
        ``unsupported(limits, *operands, **attributes)``: why the kernel does not take this problem, from its limits on
        the platform (`tpu_limits`, or `loading.limits`) and the operands' avals; None where it does.
    tpu : callable, optional
        ``tpu(*operands, interpret, **attributes) -> results`` on one batch dimension: the kernel for TPUs, in JAX with
        Pallas. None: there the reference is the kernel, as XLA fuses it with its neighbours.
    tpu_limits : mapping, optional
        The largest sizes that it takes, by the names of `loading.LIMITS`.
    differentiable : bool
        False: the caller defines the derivative.
    """

    def __init__(
        self,
        target: str,
        *,
        reference: Callable[..., Sequence[jax.Array]],
        results: Callable,
        aliases: Callable[[int], dict[int, int]] = lambda operands: {},
        workspace: Callable = lambda sizes, *operands, **attributes: 0,
        unsupported: Callable[..., str | None] = lambda limits, *operands, **attributes: None,
        tpu: Callable[..., Sequence[jax.Array]] | None = None,
        tpu_limits: Mapping[str, int] = {},
        differentiable: bool = True,
    ):
        self.target, self.reference, self.results = target, reference, results
        self.aliases, self.workspace, self.unsupported = aliases, workspace, unsupported
        self.tpu, self.tpu_limits = tpu, tpu_limits
        self.primitive = new_primitive(
            target, self.abstract_eval, self.lower_reference, self.jvp if differentiable else None
        )
        # The bare in-place custom call, without a rule for the partitioner, is used only where no partitioner runs.
        self.in_place = new_primitive(f"{target}_in_place", self.abstract_eval, self.lower_reference)
        for platform in loading.KERNELS:
            for primitive, rule in ((self.primitive, self.lower), (self.in_place, self.lower_in_place)):
                mlir.register_lowering(primitive, functools.partial(rule, platform=platform), platform=platform)
        mlir.register_lowering(self.primitive, self.lower_tpu, platform="tpu")

    def __call__(self, *operands, num_batch_dims: int, strict: bool = False, alias: bool = False, **attributes):
        """Binds the primitive. Every operand has `num_batch_dims` leading batch dimensions.

        `strict` refuses to lower to the reference. `alias` allows the results to take the memory of the operands in
        `aliases`.
        """
        params = dict(num_batch_dims=num_batch_dims, strict=strict, alias=alias, **attributes)
        return self.primitive.bind(*vary_together(*operands), **params)

    def abstract_eval(self, *avals, num_batch_dims, strict, alias, **attributes):
        first = avals[0]
        batch = first.shape[:num_batch_dims]
        outputs = self.results(*avals, **attributes)
        return [result_aval(first, batch + tuple(shape), dtype, num_batch_dims) for shape, dtype in outputs]

    def lower(self, ctx, *operands, platform, num_batch_dims, strict, alias, **attributes):
        """Lowers to this platform's kernel, if its devices have it and it takes the problem."""
        params = dict(num_batch_dims=num_batch_dims, strict=strict, alias=alias, **attributes)
        reason = loading.missing(platform) or self.unsupported(loading.limits(platform), *ctx.avals_in, **attributes)
        if reason:
            return self.lower_reference(ctx, *operands, reason=reason, **params)
        if not strict and (doubt := proof.doubt(ctx, platform, [self.target])):
            return self._lower_plain(ctx, *operands, doubt=doubt, **attributes)
        aliases = self.aliases(len(operands)) if alias else {}
        exporting = ctx.module_context.lowering_parameters.for_export
        if aliases and platform == "cpu" and unpartitioned(ctx) and not exporting:
            # XLA's CPU layout assignment copies an aliased operand unless its layout is fixed beforehand; the
            # constraint itself gathers sharded operands under the partitioner of jax <= 0.10 (hence `unpartitioned`).
            def in_place(*operands):
                fixed = [_row_major(x) if i in aliases else x for i, x in enumerate(operands)]
                return self.in_place.bind(*fixed, **params)

            return mlir.lower_fun(in_place, multiple_results=True)(ctx, *operands)
        extra: dict[str, ir.Attribute] = {
            "mhlo.frontend_attributes": ir.DictAttr.get({"num_batch_dims": ir.StringAttr.get(str(num_batch_dims))})
        }
        # On other platforms XLA inserts a copy where it needs one.
        lowering = {"operand_output_aliases": aliases} if aliases and platform != "cpu" else {}
        return self._custom_call(
            ctx, operands, platform, num_batch_dims, attributes, extra_attributes=extra, **lowering
        )

    def lower_in_place(self, ctx, *operands, platform, num_batch_dims, strict, alias, **attributes):
        lowering = {"operand_output_aliases": self.aliases(len(operands))}
        return self._custom_call(ctx, operands, platform, num_batch_dims, attributes, **lowering)

    def lower_tpu(self, ctx, *operands, num_batch_dims, strict, alias, interpret=False, **attributes):
        """Lowers to XLA's program, or to the kernel in Pallas, each device on its part of the batch."""
        kernel = self.tpu
        if kernel is None:
            return self._lower_plain(ctx, *operands, **attributes)
        reason = no_pallas(ctx) or self.unsupported(self.tpu_limits, *ctx.avals_in, **attributes)
        if reason:
            params = dict(num_batch_dims=num_batch_dims, strict=strict, alias=alias, **attributes)
            return self.lower_reference(ctx, *operands, reason=reason, **params)
        if not (strict or interpret) and (doubt := proof.doubt(ctx, "tpu", [self.target])):
            return self._lower_plain(ctx, *operands, doubt=doubt, **attributes)

        def run(*operands):
            batch = operands[0].shape[:num_batch_dims]
            count = math.prod(batch)  # -1 would divide by a dimension of size 0
            flat = [x.reshape(count, *x.shape[num_batch_dims:]) for x in operands]
            with contextlib.nullcontext() if interpret else jax.enable_x64(False):
                outputs = kernel(*flat, interpret=interpret, **attributes)
            return [x.reshape(*batch, *x.shape[1:]) for x in outputs]

        return lower_over_devices(ctx, run, operands, num_batch_dims)

    def lower_reference(self, ctx, *operands, num_batch_dims, strict, alias, reason=None, **attributes):
        missing = loading.MISSING
        known = reason is None and "cpu" in missing  # the import has warned
        # A program for several platforms comes here for those without a rule of their own.
        platforms = [x for x in ctx.module_context.platforms if x not in (*loading.KERNELS, "tpu")]
        reason = reason or "; ".join(
            f"there are no kernels for platform {name}" + (f", as {missing[name]}" if name in missing else "")
            for name in platforms
        )
        if strict:
            message = f"implementation='kernel': jax_rnnt has no kernel {self.target} for this: {reason}; "
            raise NotImplementedError(message + "use implementation=None or 'reference'.")
        warning = None if known else f"jax_rnnt runs on its pure-JAX reference: {reason}."
        return self._lower_plain(ctx, *operands, doubt=warning, **attributes)

    def _lower_plain(self, ctx, *operands, doubt=None, **attributes):
        """Lowers to the reference, after a warning."""
        if doubt:
            warn_once(doubt)
        function = functools.partial(self.reference, **attributes)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    def _custom_call(self, ctx, operands, platform, num_batch_dims, attributes, **lowering):
        first, extended = ctx.avals_in[0], ctx
        elements = self.workspace(loading.WORKSPACES[platform], *ctx.avals_in, **attributes)
        if not (isinstance(elements, int) and elements == 0):
            space = result_aval(first, (*first.shape[:num_batch_dims], elements), first.dtype, num_batch_dims)
            extended = ctx.replace(avals_out=[*ctx.avals_out, space])
        if "extra_attributes" in lowering:
            avals = [*extended.avals_in, *extended.avals_out]
            if all(isinstance(d, int) for aval in avals for d in aval.shape):  # not where a dimension is symbolic
                text = _sharding_rule(num_batch_dims, extended.avals_in, extended.avals_out)
                lowering["extra_attributes"]["sdy.sharding_rule"] = ir.Attribute.parse(text)
        rule = jax.ffi.ffi_lowering(self.target, **lowering)
        encoded = {k: np.array(v, np.int64) if isinstance(v, tuple) else np.int64(v) for k, v in attributes.items()}
        return rule(extended, *operands, **encoded)[: len(ctx.avals_out)]

    def jvp(self, primals, tangents, *, num_batch_dims, strict, alias, **attributes):
        # The integers are left out, as their tangents would be NumPy arrays: none has the size of a symbol
        # (`jax.export`).
        floats = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.inexact)]

        def function(*values):
            operands = dict(enumerate(primals)) | dict(zip(floats, values))
            return self.reference(*operands.values(), **attributes)

        of_floats = ([primals[i] for i in floats], [ad.instantiate_zeros(tangents[i]) for i in floats])
        return jax.jvp(function, *of_floats)
