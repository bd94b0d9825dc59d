"""The only file that touches jax.ffi and JAX's primitive machinery: loads, registers and binds the compiled kernels.

One kernel is one primitive. `jax.ffi.ffi_call` alone would all-gather sharded logits under jit and fail under
`jax.shard_map` and on explicit-axis meshes (jax 0.6.2 ... 0.12), so each primitive carries
  * a lowering to the custom call on every platform that has the kernel, and to the pure-JAX reference on all others;
  * one batching rule: all leading dimensions are batch, vmap adds one more;
  * an abstract evaluation that keeps batch sharding and varying manual axes;
  * a Shardy rule: batch dimensions are sharded, all others need replication;
  * a JVP rule: that of the reference, for forward mode and second derivatives.
"""

import functools
import math
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import layout
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jax_rnnt import _installation
from jax_rnnt._vma import vary_together

TARGETS = (
    "jax_rnnt_softmax_emission_fwd",
    "jax_rnnt_softmax_emission_bwd",
    "jax_rnnt_lattice_loss",
    "jax_rnnt_lattice_grad",
)
# JAX's name for a platform in lowering rules, XLA's name for it in the registry, and the module with its handlers.
PLATFORMS = (("cpu", "cpu", "_cpu"), ("cuda", "CUDA", "_cuda"))


def _runtime_api() -> tuple[int, int] | None:
    """(major, minor) of the FFI that the installed jaxlib speaks; None if its headers do not say."""
    try:
        text = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    except OSError:
        return None
    numbers = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    return (int(numbers["MAJOR"]), int(numbers["MINOR"])) if len(numbers) == 2 else None


def _load() -> tuple[dict[str, str], dict[str, str]]:
    """Registers the handlers of every extension module that is here and fits.

    Returns whose kernels each platform has, "cpu" or "cuda" (the emulation runs CUDA kernels on the CPU platform), and
    why the others have none.
    """
    kernels, missing = {}, {}
    runtime = _runtime_api()
    for platform, registry, name in PLATFORMS:
        try:
            module = __import__(f"jax_rnnt.{name}", fromlist=[name])
        except ImportError as error:
            missing[platform] = _installation.explain(platform, name, error)
            continue
        built = module.api_version()
        # A handler newer than the runtime would make JAX unable to initialise its backend at all: never register it.
        if runtime is not None and (built[0] != runtime[0] or built[1] > runtime[1]):
            missing[platform] = f"jax_rnnt.{name} was built for XLA FFI {built}, newer than this jaxlib's {runtime}"
            continue
        for target, handler in module.registrations().items():
            jax.ffi.register_ffi_target(target, handler, platform=registry)
        kernels[platform] = module.kernels
    for target in TARGETS:
        jax.ffi.register_ffi_target_as_batch_partitionable(target)
    return kernels, missing


KERNELS, MISSING = _load()
if "cpu" in MISSING:
    _installation.warn(f"jax_rnnt runs on its pure-JAX reference: {MISSING['cpu']}.")


@functools.cache
def _warn_reference(reason: str) -> None:  # once for each
    _installation.warn(f"jax_rnnt runs on its pure-JAX reference: {reason}.")


def beyond(*limits: tuple[str, Any, int]) -> str | None:
    """Which of (what, how many, at most) is exceeded, as a sentence; sizes that are symbolic are taken to fit."""
    for what, number, most in limits:
        if isinstance(number, int) and number > most:
            return f"the kernels take at most {most} {what}, got {number}"
    return None


def export_checks() -> list[export.DisabledSafetyCheck]:
    """Safety checks to disable when a program that calls this library is exported.

    Returns
    -------
    list of export.DisabledSafetyCheck
        For the `disabled_checks` argument of `jax.export.export`: one for each custom call of this library. The
        program then runs where `jax_rnnt` of the same major version is imported.

    Examples
    --------
    >>> import jax, jax_rnnt
    >>> def double(x):
    ...     return 2 * x
    >>> exported = jax.export.export(jax.jit(double), disabled_checks=jax_rnnt.export_checks())(1.0)
    """
    return [export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


def _spec(aval) -> list:
    """Over which explicit mesh axes each dimension is sharded."""
    sharding = getattr(aval, "sharding", None)
    spec = list(sharding.spec) if sharding is not None else []
    return spec + [None] * (aval.ndim - len(spec))


def _aval(like, shape, dtype, spec):
    """An array of this shape and sharding, with the mesh and the varying axes of `like`."""
    kwargs = dict(shape=tuple(shape), dtype=np.dtype(dtype), weak_type=False)
    if getattr(like, "sharding", None) is not None:
        spec = PartitionSpec(*spec, *[None] * (len(shape) - len(spec)))
        kwargs["sharding"] = NamedSharding(like.sharding.mesh, spec)
    return like.update(**kwargs)


def result_aval(like, shape, dtype, num_batch_dims):
    """An array of this shape with the batch sharding and the varying axes of `like`."""
    return _aval(like, shape, dtype, _spec(like)[: None if tuple(shape) == tuple(like.shape) else num_batch_dims])


def _sharding_rule(num_batch_dims: int, operands, results) -> str:
    """Shardy rule: one factor per batch dimension, shared; every other dimension has its own and needs replication."""
    sizes: list[int] = []

    def factor(size):
        sizes.append(size)
        return len(sizes) - 1

    def symbol(i):  # i, j, ..., z, z_1, z_2, ...
        return chr(ord("i") + i) if i < 18 else f"z_{i - 17}"

    batch = [factor(d) for d in operands[0].shape[:num_batch_dims]]

    def dimensions(aval):
        own = [factor(d) for d in aval.shape[num_batch_dims:]]
        return "[" + ", ".join(map(symbol, batch + own)) + "]"

    left, right = (", ".join(map(dimensions, avals)) for avals in (operands, results))
    factors = ", ".join(f"{symbol(i)}={size}" for i, size in enumerate(sizes))
    replicated = ", ".join(map(symbol, range(num_batch_dims, len(sizes))))
    need = f" need_replication={{{replicated}}}" if replicated else ""
    return f"#sdy.op_sharding_rule<({left})->({right}) {{{factors}}}{need}, custom>"


def _unpartitioned(ctx) -> bool:
    """Whether the SPMD partitioner will not run over this operation: one device, or every mesh axis is manual."""
    axes = ctx.module_context.axis_context
    if (num_devices := getattr(axes, "num_devices", None)) is not None:
        return num_devices == 1
    mesh, manual = getattr(axes, "mesh", None), getattr(axes, "manual_axes", None)
    if mesh is not None and manual is not None:
        return set(manual) == set(mesh.axis_names)
    return type(axes).__name__ == "ReplicaAxisContext"  # pmap before jax 0.8


def _row_major(x):
    if jax.__version_info__ < (0, 7):  # where Layout meant what Format means now
        make = layout.DeviceLocalLayout  # type: ignore[attr-defined]
    else:
        make = layout.Layout
    return layout.with_layout_constraint(x, make(tuple(range(x.ndim))))


def define(
    target: str,
    *,
    reference: Callable[..., Sequence[jax.Array]],
    results: Callable,
    aliases: dict[int, int] | None = None,
    workspace: dict[str, Callable] | None = None,
    unsupported: Callable[..., str | None] = lambda kernels, *operands, **attributes: None,
) -> Callable[..., Sequence[jax.Array]]:
    """A function that calls the kernel `target`, or `reference` where the platform has no kernel for the problem.

    Parameters
    ----------
    target : str
        Name in XLA's registry, the same on all platforms.
    reference : callable
        ``reference(*operands, **attributes) -> results`` in plain JAX; all leading dimensions are batch.
    results : callable
        ``results(*operands, **attributes) -> [(trailing shape, dtype), ...]`` from the operands' avals.
    aliases : dict, optional
        ``{operand: result}`` of the same shape, where the kernel can write the result over the operand. Operands that
        a call does not have are left out.
    workspace : dict, optional
        ``{"cpu" | "cuda": f}`` with ``f(*operands, **attributes) -> elements`` of the first operand's dtype that the
        kernels of that device want for each batch element, from the operands' avals: one more result of the call.
    unsupported : callable, optional
        ``unsupported("cpu" | "cuda", *operands, **attributes)``: why that device's kernels do not take this problem,
        from the operands' avals; None where they do.

    Returns
    -------
    callable
        ``call(*operands, num_batch_dims, strict=False, **attributes)``. Every operand has `num_batch_dims` leading
        batch dimensions. `strict` refuses to lower to the reference. The keyword `alias` allows the results to take
        the memory of the operands in `aliases`.
    """
    primitive = Primitive(target)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    @primitive.def_abstract_eval
    def _(*avals, num_batch_dims, strict, alias, **attributes):
        batch = avals[0].shape[:num_batch_dims]
        outputs = results(*avals, **attributes)
        return [result_aval(avals[0], batch + tuple(shape), dtype, num_batch_dims) for shape, dtype in outputs]

    # The bare custom call in place, without a rule for the partitioner: only used where none runs.
    aliased = Primitive(f"{target}_in_place")
    aliased.multiple_results = True
    aliased.def_abstract_eval(lambda *avals, **params: primitive.abstract_eval(*avals, **params)[0])

    def encode(attributes):
        return {k: np.array(v, np.int64) if isinstance(v, tuple) else np.int64(v) for k, v in attributes.items()}

    def aliases_of(operands):
        return {i: result for i, result in (aliases or {}).items() if i < len(operands)}

    def custom_call(ctx, operands, platform, num_batch_dims, attributes, **lowering):
        first, extended = ctx.avals_in[0], ctx
        elements = workspace[KERNELS[platform]](*ctx.avals_in, **attributes) if workspace else 0
        if not (isinstance(elements, int) and elements == 0):
            space = result_aval(first, (*first.shape[:num_batch_dims], elements), first.dtype, num_batch_dims)
            extended = ctx.replace(avals_out=[*ctx.avals_out, space])
        if "extra_attributes" in lowering:
            avals = [*extended.avals_in, *extended.avals_out]
            if all(isinstance(d, int) for aval in avals for d in aval.shape):  # not where a dimension is symbolic
                text = _sharding_rule(num_batch_dims, extended.avals_in, extended.avals_out)
                lowering["extra_attributes"]["sdy.sharding_rule"] = ir.Attribute.parse(text)
        rule = jax.ffi.ffi_lowering(target, **lowering)
        return rule(extended, *operands, **encode(attributes))[: len(ctx.avals_out)]

    def lower_in_place(ctx, *operands, platform, num_batch_dims, strict, alias, **attributes):
        in_place = aliases_of(operands)
        return custom_call(ctx, operands, platform, num_batch_dims, attributes, operand_output_aliases=in_place)

    def lower(ctx, *operands, platform, num_batch_dims, strict, alias, **attributes):
        if reason := unsupported(KERNELS[platform], *ctx.avals_in, **attributes):
            params = dict(num_batch_dims=num_batch_dims, strict=strict, alias=alias)
            return lower_reference(ctx, *operands, reason=reason, **params, **attributes)
        exporting = ctx.module_context.lowering_parameters.for_export
        if alias and platform == "cpu" and _unpartitioned(ctx) and not exporting:
            # XLA's CPU layout assignment copies an aliased operand unless its layout is fixed beforehand; the
            # constraint itself gathers sharded operands under the partitioner of jax <= 0.10 (hence _unpartitioned).
            def in_place(*operands):
                params = dict(num_batch_dims=num_batch_dims, strict=strict, alias=alias, **attributes)
                fixed = [_row_major(x) if i in aliases_of(operands) else x for i, x in enumerate(operands)]
                return aliased.bind(*fixed, **params)

            return mlir.lower_fun(in_place, multiple_results=True)(ctx, *operands)
        extra: dict[str, ir.Attribute] = {
            "mhlo.frontend_attributes": ir.DictAttr.get({"num_batch_dims": ir.StringAttr.get(str(num_batch_dims))})
        }
        # Elsewhere XLA inserts the copy itself, where there must be one.
        allowed = {"operand_output_aliases": aliases_of(operands)} if alias and platform != "cpu" else {}
        return custom_call(ctx, operands, platform, num_batch_dims, attributes, extra_attributes=extra, **allowed)

    def lower_reference(ctx, *operands, num_batch_dims, strict, alias, reason=None, **attributes):
        known = reason is None and "cpu" in MISSING  # the import has warned
        platforms = ctx.module_context.platforms
        reason = reason or "; ".join(
            f"there are no kernels for platform {name}" + (f", as {MISSING[name]}" if name in MISSING else "")
            for name in platforms
        )
        if strict:
            message = f"implementation='kernel': jax_rnnt has no kernel {target} for this: {reason}; "
            raise NotImplementedError(message + "use implementation=None or 'reference'.")
        if not known:
            _warn_reference(reason)
        function = functools.partial(reference, **attributes)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, lower_reference)
    for platform in KERNELS:
        for bound, rule in ((primitive, lower), (aliased, lower_in_place)):
            mlir.register_lowering(bound, functools.partial(rule, platform=platform), platform=platform)

    def batch(operands, axes, *, num_batch_dims, **params):
        size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
        operands = [
            jnp.broadcast_to(x[None], (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
            for x, axis in zip(operands, axes)
        ]
        outputs = primitive.bind(*vary_together(*operands), num_batch_dims=num_batch_dims + 1, **params)
        return outputs, [0] * len(outputs)

    batching.primitive_batchers[primitive] = batch

    def jvp(primals, tangents, *, num_batch_dims, strict, alias, **attributes):
        def instantiate(primal, tangent):
            if not jnp.issubdtype(primal.dtype, jnp.inexact):
                return np.zeros(primal.shape, jax.dtypes.float0)
            return ad.instantiate_zeros(tangent) if type(tangent) is ad.Zero else tangent

        function = functools.partial(reference, **attributes)
        return jax.jvp(function, primals, tuple(map(instantiate, primals, tangents)))

    ad.primitive_jvps[primitive] = jvp

    def call(*operands, num_batch_dims: int, strict: bool = False, alias: bool = False, **attributes):
        params = dict(num_batch_dims=num_batch_dims, strict=strict, alias=alias and bool(aliases), **attributes)
        return primitive.bind(*vary_together(*operands), **params)

    return call


# ------------------------------------------------------------------------------------- programs that know their devices

_GROUPS = "jax_rnnt_groups"


def most_over_groups(x: jax.Array, grouped: bool) -> jax.Array:
    """The maximum of x over the groups of `define_grouped`: the same for all, so that loops do not run under masks."""
    return jax.lax.pmax(x, _GROUPS) if grouped else x


def define_grouped(name: str, function: Callable) -> Callable:
    """A function of one batch dimension that the partitioner splits as a whole.

    The lowering knows over how many devices the partitioner will spread the program, and splits the batch into as many
    groups, each of which works on its own part: what is sharded over the batch stays where it is, and what the groups
    share is summed over them once. On one device, or where the mesh axes are manual, there is one group.

    Parameters
    ----------
    name : str
        Of the primitive.
    function : callable
        ``function(static, shared, batched, grouped) -> (batched results, shared results)``, two lists each, in plain
        JAX, for one group. Shared results are sums over the batch. `grouped`: for `most_over_groups`.

    Returns
    -------
    callable
        ``call(static, shared, batched, batched_results, shared_results) -> (batched results, shared results)``. The
        results are described by (trailing shape, dtype) and by (index of the operand in `shared`, dtype) whose shape
        they have. `vmap` runs one element after the other.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))

    # vmap adds leading dimensions, `depth` of them to each of the operands that `mapped` says.
    @primitive.def_abstract_eval
    def _(*avals, num_shared, mapped, depth, batched_results, shared_results, **_):
        extents = next((aval.shape[:depth] for aval, m in zip(avals, mapped) if m), ())
        specs = [_spec(aval)[:depth] for aval, m in zip(avals, mapped) if m]
        outer = [next((axes for axes in each if axes is not None), None) for each in zip(*specs)]

        def own(i):
            """Shape and sharding of an element of this operand."""
            first = depth if mapped[i] else 0
            return avals[i].shape[first:], _spec(avals[i])[first:]

        def result(i, shape, dtype, spec):
            return _aval(avals[i], (*extents, *shape), dtype, (*outer, *spec))

        (batch, *_), (axes, *_) = own(num_shared)
        outputs = [result(num_shared, (batch, *shape), dtype, [axes]) for shape, dtype in batched_results]
        return outputs + [result(i, own(i)[0], dtype, own(i)[1]) for i, dtype in shared_results]

    def split(function, axes, arrays, groups):
        """The mapped function over groups of the leading dimension of the arrays whose axis is 0."""
        parts = [x.reshape(groups, -1, *x.shape[1:]) if a == 0 else x for a, x in zip(axes, arrays)]
        return jax.vmap(function, axes, axis_name=_GROUPS)(*parts)

    def merge(xs):
        return [x.reshape(-1, *x.shape[2:]) for x in xs]

    def over_batch(operands, *, devices, grouped, static, num_shared):
        groups = math.gcd(operands[num_shared].shape[0], devices)
        if groups <= 1:
            return function(static, operands[:num_shared], operands[num_shared:], grouped)

        def part(*operands):
            return function(static, operands[:num_shared], operands[num_shared:], True)

        axes = [None] * num_shared + [0] * (len(operands) - num_shared)
        outputs, sums = split(part, axes, operands, groups)
        return merge(outputs), [jnp.sum(x, 0) for x in sums]

    def run(*operands, devices, mapped, depth, static, num_shared, **_):
        over = functools.partial(over_batch, static=static, num_shared=num_shared)
        if not depth:
            outputs, sums = over(operands, devices=devices, grouped=False)
            return [*outputs, *sums]
        extents = next(x.shape[:depth] for x, m in zip(operands, mapped) if m)
        count = math.prod(extents)
        flat = [x.reshape(count, *x.shape[depth:]) if m else x for x, m in zip(operands, mapped)]
        groups = math.gcd(count, devices)

        def part(*operands):
            def one(own):
                own = iter(own)
                each = [next(own) if m else x for x, m in zip(operands, mapped)]
                return over(each, devices=1 if groups > 1 else devices, grouped=groups > 1)

            outputs, sums = jax.lax.map(one, [x for x, m in zip(operands, mapped) if m])
            return [*outputs, *sums]

        if groups <= 1:
            outputs = part(*flat)
        else:
            outputs = merge(split(part, [0 if m else None for m in mapped], flat, groups))
        return [x.reshape(*extents, *x.shape[1:]) for x in outputs]

    def lower(ctx, *operands, batched_results, shared_results, **params):
        axes = ctx.module_context.axis_context
        devices = 1 if _unpartitioned(ctx) else getattr(axes, "num_devices", None) or axes.mesh.size
        # Without sharding and varying axes: within there is nothing but plain arrays of this program.
        plain = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]

        def without_mesh(*operands, **params):
            if _unpartitioned(ctx) or jax.__version_info__ < (0, 7):  # which has no explicit axes
                return run(*operands, devices=devices, **params)
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return run(*operands, devices=devices, **params)

        lowered = mlir.lower_fun(without_mesh, multiple_results=True)
        return lowered(ctx.replace(avals_in=plain), *operands, **params)

    mlir.register_lowering(primitive, lower)

    def batch(operands, axes, *, mapped, depth, **params):
        size = next(x.shape[axis] for x, axis in zip(operands, axes) if axis is not None)
        operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes)]
        inner = (x.shape[axis is not None :][:depth] for x, axis, m in zip(operands, axes, mapped) if m)
        extents = size, *next(inner, ())

        def widen(x, axis, m):
            """With all leading dimensions, or none."""
            if axis is None and m:
                return jnp.broadcast_to(x[None], (size, *x.shape))
            if axis is not None and not m:
                return jnp.broadcast_to(jnp.expand_dims(x, range(1, depth + 1)), (*extents, *x.shape[1:]))
            return x

        operands = map(widen, operands, axes, mapped)
        mapped = tuple(axis is not None or m for axis, m in zip(axes, mapped))
        outputs = primitive.bind(*operands, mapped=mapped, depth=depth + 1, **params)
        return outputs, [0] * len(outputs)

    batching.primitive_batchers[primitive] = batch

    def jvp(primals, tangents, **_):
        message = f"{name} has no derivative in forward mode and none of second order; "
        raise NotImplementedError(message + "use implementation='reference'.")

    ad.primitive_jvps[primitive] = jvp

    def call(static, shared, batched, batched_results, shared_results=()):
        operands = vary_together(*shared, *batched)
        outputs = primitive.bind(
            *operands, static=static, num_shared=len(shared), mapped=(False,) * len(operands), depth=0,
            batched_results=tuple(batched_results), shared_results=tuple(shared_results),
        )  # fmt: skip
        return outputs[: len(batched_results)], outputs[len(batched_results) :]

    return call
