"""The reference lattice: one dynamic program over any topology, in plain JAX.

The scan runs over anti-diagonals n = t + u, so one step is element-wise over u for every topology, also with arcs
inside a frame. A scan over frames needs an associative scan over u for those; it took 9.9 s to compile, this takes less
than 1 s.

A path weight is an extended number (m, e, h) = m * 2^(e + 4096 h): a float mantissa, an integer exponent, and a float
exponent for large arcs. Float32 logs reach 1e3 ... 1e4, where their spacing is 1e-4 ... 1e-3, and posteriors,
differences of such logs, inherit that error; mantissas keep the error at the rounding of single operations. The
exponents are piecewise constant, so plain automatic differentiation of the mantissas is exact, any number of times and
in both modes.

Finite arcs may be of any size: users mask with -1e9 or the lowest float. An arc above 2^11 in size gives its whole
multiples of 4096 ln 2 to h and the rest to e and m, so that no integer overflows. Sums of h are exact up to 5e10 nats.
Beyond, equal masks still have equal sums, so that e and m decide between paths through as many of them.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import vary_together
from jax_rnnt.lattices.topology import Topology, bounded

_RADIX = 1 << 12  # of h, in powers of 2


class _Number(typing.NamedTuple):
    m: jax.Array
    e: jax.Array
    h: jax.Array


def _float_layout(dtype):
    """(unsigned integer of the same width, number of mantissa bits, exponent bias)"""
    info = jnp.finfo(dtype)
    return np.dtype(f"uint{info.bits}"), info.nmant, int(2 ** (info.nexp - 1) - 1)


def _lowest(dtype):
    """The h of zero, below that of any path. Sums are cut here, so differences are never NaN."""
    return np.asarray(-0.9 * float(jnp.finfo(dtype).max), dtype)


def _where(condition, x, y):
    """`jnp.where` for scalars and arrays of the condition's shape, without a nested jit for each of its 50 calls.

    A program with the gradient is traced and lowered in two thirds of the time.
    """
    dtype = next(v.dtype for v in (x, y) if not isinstance(v, float | int))
    x, y = (lax.full_like(condition, v, dtype) if jnp.ndim(v) == 0 else v for v in (x, y))
    return lax.select(condition, x, y)


def _zero(m):
    return _Number(jnp.zeros_like(m), jnp.zeros_like(m, jnp.int32), jnp.full_like(m, _lowest(m.dtype)))


def _pow2(k, dtype):
    """2^k for integers k, exactly; 0 below the range of normal numbers."""
    uint, mantissa, bias = _float_layout(dtype)
    biased = jnp.maximum(k + bias, 0).astype(uint)
    return lax.bitcast_convert_type(lax.shift_left(biased, jnp.full_like(biased, mantissa)), dtype)


def _normalize(a):
    """The same number with 1 <= m < 2, or m = 0."""
    uint, mantissa, bias = _float_layout(a.m.dtype)
    bits = lax.bitcast_convert_type(lax.stop_gradient(a.m), uint)
    k = lax.shift_right_logical(bits, jnp.full_like(bits, mantissa)).astype(jnp.int32) - bias
    k = _where(jnp.abs(k) > 64, 0, k)  # zero and NaN stay what they are
    return _Number(a.m * _pow2(-k, a.m.dtype), a.e + k, a.h)


def _parts_of_ln2(multiple, dtype):
    """multiple * ln 2 as the sum of three floats. The first two have 12 bits: their products with 12 more are exact."""
    rest, parts = multiple * np.log(2), []
    for _ in range(2):
        unit = 2.0 ** (np.floor(np.log2(rest)) - 11)
        parts.append(np.floor(rest / unit) * unit)
        rest = rest - parts[-1]
    return [np.asarray(x, dtype) for x in (*parts, rest)]


def _truncate(x):
    return lax.sign(x) * lax.floor(lax.abs(x))


def _reduce(x, multiple):
    """(n, x - n * multiple * ln 2 but for its last part, that part) for a small integer n of the sign of x."""
    n = _truncate(lax.stop_gradient(x) * np.asarray(1 / (multiple * np.log(2)), x.dtype))
    first, second, last = _parts_of_ln2(multiple, x.dtype)
    return n, x - n * first - n * second, n * last


def _from_log(x):
    """exp(x); -inf gives zero with a zero derivative."""
    zero = x == -jnp.inf
    x = _where(zero, 0, x)
    size = jnp.abs(lax.stop_gradient(x))
    near = ~(size > 2.0**11)  # NaN too
    far = size > 2.0 ** (jnp.finfo(x.dtype).nmant + 8)  # beyond exact reduction
    high, rest, late = _reduce(_where(far, x - lax.stop_gradient(x), x), _RADIX**2)
    low, rest, later = _reduce(rest, _RADIX)
    lowest, rest, last = _reduce(rest - (late + later), _RADIX)  # float64: late is large where high is
    whole = _truncate(lax.stop_gradient(x) * np.asarray(1 / (_RADIX * np.log(2)), x.dtype))
    h = _where(zero, _lowest(x.dtype), _where(near, 0, _where(far, whole, _RADIX * high + (low + lowest))))
    k, rest, latest = _reduce(_where(near, x, rest - last), 1)
    e = _where(jnp.isnan(k), 0, k).astype(jnp.int32)
    return _Number(_where(zero, 0, jnp.exp(rest - latest)), e, h)


def _multiply(a, b):
    return _Number(a.m * b.m, a.e + b.e, jnp.maximum(a.h + b.h, _lowest(a.m.dtype)))


def _gap(a, b):
    """By how many bits the exponent of a exceeds that of b, cut where the lesser number is negligible."""
    bias = _float_layout(a.m.dtype)[2]
    bits = _RADIX * (a.h - b.h) + (a.e - b.e).astype(a.m.dtype)
    return lax.clamp(np.asarray(-bias, bits.dtype), bits, np.asarray(bias, bits.dtype)).astype(jnp.int32)


def _add(a, b):
    d = _gap(a, b)
    m = a.m * _pow2(jnp.minimum(d, 0), a.m.dtype) + b.m * _pow2(jnp.minimum(-d, 0), b.m.dtype)
    return _Number(m, _where(d < 0, b.e, a.e), _where(d < 0, b.h, a.h))


def _log_of_sum(a):
    """Log of the sum over the last axis; -inf, with a zero derivative, where it is zero or no float holds its log."""
    dtype = a.m.dtype
    size = _RADIX * (a.h - jnp.max(a.h, -1, keepdims=True)) + a.e.astype(dtype)
    place = jnp.argmax(_where(a.m == 0, -jnp.inf, size), -1)[..., None]
    largest = lax.broadcasted_iota(place.dtype, a.m.shape, a.m.ndim - 1) == place
    top = _Number(*(jnp.sum(_where(largest, x, 0), -1, keepdims=True, dtype=x.dtype) for x in a))
    # Relative to the top by integers, which the float size has rounded.
    m = jnp.sum(a.m * _pow2(_gap(a, top), dtype), -1)
    exponent = top.e.astype(dtype) * np.asarray(np.log(2), dtype) + top.h * np.asarray(_RADIX * np.log(2), dtype)
    none = (m == 0) | (exponent[..., 0] == -jnp.inf)
    return _where(none, -jnp.inf, jnp.log(_where(none, 1, m)) + exponent[..., 0])


def skew(x):
    """[..., T, U1] -> [T + U1 - 1, ..., U1]: anti-diagonals first; -inf where a diagonal leaves the lattice."""
    frames, columns = x.shape[-2:]
    x = jnp.swapaxes(x, -1, -2)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)], constant_values=-jnp.inf)
    x = x.reshape(*x.shape[:-2], columns * (frames + columns))[..., : columns * (frames + columns - 1)]
    return jnp.moveaxis(x.reshape(*x.shape[:-1], columns, frames + columns - 1), -1, 0)


def inside(num_frames: jax.Array, num_labels: jax.Array, frames: int, columns: int) -> jax.Array:
    """bool [..., frames, columns]: which nodes lie inside the lengths."""
    shape = (1,) * num_frames.ndim + (frames, columns)
    t, u = (lax.broadcasted_iota(jnp.int32, shape, num_frames.ndim + axis) for axis in (0, 1))
    return (t < num_frames[..., None, None]) & (u <= num_labels[..., None, None])


def prepared(topology: Topology, arcs, num_frames, num_labels):
    """(topology, num_frames, num_labels, planes, bad [...]) of a dynamic program over anti-diagonals.

    There is a plane for each arc, with one frame at least, and -inf where an arc leaves a node outside the lengths. A
    sequence with NaN or +inf inside is bad.
    """
    num_frames, num_labels, *planes = vary_together(num_frames, num_labels, *(a.of(arcs) for a in topology))
    frames, columns = planes[0].shape[-2:]
    topology = bounded(topology, frames)
    if frames == 0:
        planes = [jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]) for x in planes]
        frames = 1
    used = [inside(num_frames, num_labels - a.du, frames, columns) for a in topology]
    bad = (jnp.any(i & (jnp.isnan(x) | (x == jnp.inf)), axis=(-1, -2)) for i, x in zip(used, planes))
    planes = [jnp.where(i, x, -jnp.inf) for i, x in zip(used, planes)]
    return topology, num_frames, num_labels, planes, functools.reduce(jnp.logical_or, bad)


def log_likelihood(topology: Topology, arcs: dict[str, jax.Array], num_frames: jax.Array, num_labels: jax.Array):
    """Log of the summed weight of all paths, [...]: `lattices.log_likelihood` has the recursion.

    Differentiable any number of times, in both modes. `num_frames` and `num_labels` lie in their ranges.
    """
    topology, num_frames, num_labels, planes, bad = prepared(topology, arcs, num_frames, num_labels)
    poison = jnp.where(bad, jnp.nan, 0).astype(planes[0].dtype)
    frames, columns = planes[0].shape[-2:]
    diagonals = [_from_log(skew(x + poison[..., None, None])) for x in planes]

    depth = max(a.dt + a.du for a in topology)
    column = lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + (columns,), num_frames.ndim)
    last = num_frames + num_labels  # the diagonal of the terminal node
    zero = _zero(diagonals[0].m[0])

    def one(where):
        return _Number(jnp.where(where, 1, zero.m), zero.e, jnp.where(where, 0, zero.h))

    def shift(a, du):
        def along(x, fill):
            return lax.pad(x, np.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(du, -du, 0)])

        return _Number(along(a.m, 0), along(a.e, 0), along(a.h, _lowest(a.h.dtype))) if du else a

    def step(carry, xs):
        (alpha, *coming), ends = carry  # coming[k]: what already entered diagonal n + 1 + k
        n, weights = xs
        alpha = _normalize(alpha)  # once a step: a sum of products stays far inside the range of floats
        coming, ends = [*coming, None], list(ends)
        for j, (arc, weight) in enumerate(zip(topology, weights)):
            leaves = _multiply(alpha, weight)
            k = arc.dt + arc.du
            entered = shift(leaves, arc.du)
            coming[k - 1] = entered if coming[k - 1] is None else _add(coming[k - 1], entered)
            if arc.may_end:  # kept by column: a sum over columns in every step is half of its time on a TPU
                here = (n + k == last)[..., None] & (column == num_labels[..., None] - arc.du)
                ends[j] = _Number(*(_where(here, x, y) for x, y in zip(leaves, ends[j])))
        coming = [zero if x is None else x for x in coming]
        return (tuple(coming), tuple(ends)), None

    steps = jnp.arange(frames + columns - 1, dtype=jnp.int32)
    start, at_once = one(column == 0), one((last == 0)[..., None] & (column == 0))
    initial, structure = jax.tree.flatten(
        ((start, *[zero] * (depth - 1)), tuple(zero if a.may_end else None for a in topology))
    )
    _, *initial = vary_together(num_frames, *initial)  # a carry keeps its varying axes
    (_, ends), _ = lax.scan(step, jax.tree.unflatten(structure, initial), (steps, diagonals))
    ends = [at_once, *(x for x in ends if x is not None)]
    return _log_of_sum(_Number(*(jnp.concatenate(x, -1) for x in zip(*ends)))) + poison
