"""The reference lattice: one dynamic program over any topology, in plain JAX.

The scan runs over anti-diagonals n = t + u, so one step is element-wise over u for every topology, arcs inside a frame
included; a scan over frames needs an associative scan over u for those, which took 9.9 s to compile where this takes
less than 1 s.

A path weight is held as an extended number (m, e) = m * 2^e with a float mantissa and an integer exponent. Float32 logs
reach 1e3 ... 1e4, where their spacing is 1e-4 ... 1e-3, and posteriors, differences of such logs, inherit that error;
mantissas keep the error at the rounding of single operations. The exponents are piecewise constant, so plain automatic
differentiation of the mantissas is exact, any number of times and in both modes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._vma import vary_together
from jax_rnnt.lattices.topology import Topology, bounded, slots

# An exponent that stands for log 0. The sum of two still fits an int32; far below any path of finite arcs.
_LOWEST = -(1 << 30)
# ln 2 in two parts: the product of the first with an integer below 2^15 is exact in float32.
_LN2_HI, _LN2_LO = 0.693145751953125, 1.4286068203094172e-06


def _float_layout(dtype):
    """(unsigned integer of the same width, number of mantissa bits, exponent bias)"""
    info = jnp.finfo(dtype)
    return np.dtype(f"uint{info.bits}"), info.nmant, int(2 ** (info.nexp - 1) - 1)


def _pow2(k, dtype):
    """2^k for integers k <= 0, exactly; the smallest normal number below its range."""
    uint, mantissa, bias = _float_layout(dtype)
    biased = (jnp.maximum(k, 1 - bias) + bias).astype(uint)
    return lax.bitcast_convert_type(lax.shift_left(biased, jnp.full_like(biased, mantissa)), dtype)


def _normalize(m, e):
    """The same number with 1 <= m < 2, or (0, _LOWEST)."""
    uint, mantissa, bias = _float_layout(m.dtype)
    bits = lax.bitcast_convert_type(lax.stop_gradient(m), uint)
    k = lax.shift_right_logical(bits, jnp.full_like(bits, mantissa)).astype(jnp.int32) - bias
    k = jnp.where(jnp.abs(k) > 64, 0, k)  # zero and NaN stay what they are
    return m * _pow2(-k, m.dtype), jnp.where(m == 0, _LOWEST, e + k)


def _from_log(x):
    """exp(x) as an extended number; -inf gives zero with a zero derivative."""
    zero = x == -jnp.inf
    x = jnp.where(zero, 0, x)
    k = lax.stop_gradient(jnp.floor(x * np.asarray(1 / np.log(2), x.dtype)))
    m = jnp.exp((x - k * np.asarray(_LN2_HI, x.dtype)) - k * np.asarray(_LN2_LO, x.dtype))
    e = jnp.where(jnp.isfinite(k), k, 0).astype(jnp.int32)
    return jnp.where(zero, 0, m), jnp.where(zero, _LOWEST, e)


def _log(m, e):
    zero = m == 0
    x = jnp.log(jnp.where(zero, 1, m)) + e.astype(m.dtype) * np.asarray(np.log(2), m.dtype)
    return jnp.where(zero, -jnp.inf, x)


def _add(a, b):
    (m, i), (n, j) = a, b
    e = jnp.maximum(i, j)
    return m * _pow2(i - e, m.dtype) + n * _pow2(j - e, m.dtype), e


def _multiply(a, b):
    (m, i), (n, j) = a, b
    return m * n, jnp.maximum(i + j, _LOWEST)


def _skew(x):
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


def log_likelihood(topology: Topology, arcs: dict[str, jax.Array], num_frames: jax.Array, num_labels: jax.Array):
    """Log of the summed weight of all paths from (0, 0) to (T_b, U_b).

    T frames, U labels, U1 = U + 1; `...` is any number of batch dimensions. Node (t, u): t frames read, u labels
    written. With w(a) the exponential of the arc log-probability of arc a::

        alpha(0, 0) = 1
        alpha(t, u) = sum over arcs a = (dt, du) of alpha(t - dt, u - du) * w(a)(t - dt, u - du)

    and the result is log alpha(T_b, U_b), where only arcs that may end a path enter (T_b, U_b). Arcs that leave nodes
    outside the lengths are never used, whatever they hold.

    Parameters
    ----------
    topology : tuple of Arc
        The table of arcs: `STANDARD`, `MONOTONIC`, `multi_blank(...)`, `durations(...)` or your own.
    arcs : dict of str to Array, float32 or float64 [..., T, U1]
        Log-probability of each slot's arcs leaving each node, in nats; -inf forbids them.
    num_frames, num_labels : Array, int32 [...]
        Lengths T_b <= T and U_b <= U of each sequence.

    Returns
    -------
    Array [...]
        In nats; -inf where there is no path (its gradient is zero), 0 for T_b = U_b = 0, NaN where an arc inside the
        lengths is NaN or +inf. The derivative with respect to an arc is the arc's posterior. Differentiable any number
        of times, in both modes.
    """
    shapes = {slot: x.shape for slot, x in arcs.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(f"log_likelihood: arcs must all have one shape [..., T, U1], got {shapes}.")
    if missing := set(slots(topology)) - set(arcs):
        raise ValueError(f"log_likelihood: arcs must hold every slot of the topology; missing: {sorted(missing)}.")
    num_frames, num_labels, *planes = vary_together(num_frames, num_labels, *(a.of(arcs) for a in topology))
    frames, columns = planes[0].shape[-2:]
    topology = bounded(topology, frames)
    if frames == 0:
        planes = [jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]) for x in planes]
        frames = 1

    used = [inside(num_frames, num_labels - a.du, frames, columns) for a in topology]
    bad = [jnp.any(i & (jnp.isnan(x) | (x == jnp.inf)), axis=(-1, -2)) for i, x in zip(used, planes)]
    poison = jnp.where(functools.reduce(jnp.logical_or, bad), jnp.nan, 0).astype(planes[0].dtype)
    masked = [jnp.where(i, x + poison[..., None, None], -jnp.inf) for i, x in zip(used, planes)]
    diagonals = [_from_log(_skew(x)) for x in masked]

    depth = max(a.dt + a.du for a in topology)
    column = lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + (columns,), num_frames.ndim)
    last = num_frames + num_labels  # the diagonal of the terminal node
    first = diagonals[0][0][0]
    zero = jnp.zeros_like(first), jnp.full_like(first, _LOWEST, dtype=jnp.int32)
    start = jnp.where(column == 0, 1, zero[0]), jnp.where(column == 0, 0, zero[1])
    at_once = last == 0
    end = jnp.where(at_once, 1, zero[0][..., 0]), jnp.where(at_once, 0, zero[1][..., 0])

    def shift(x, du, fill):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(du, 0)], constant_values=fill)[..., :columns]

    def step(carry, xs):
        (alpha, *coming), end = carry  # coming[k]: what already entered diagonal n + 1 + k
        n, weights = xs
        alpha = _normalize(*alpha)  # once a step: a sum of products stays far inside the range of floats
        coming = [*coming, zero]
        for arc, weight in zip(topology, weights):
            m, e = _multiply(alpha, weight)
            k = arc.dt + arc.du
            coming[k - 1] = _add(coming[k - 1], (shift(m, arc.du, 0), shift(e, arc.du, _LOWEST)))
            if arc.may_end:
                ends = (n + k == last)[..., None] & (column == num_labels[..., None] - arc.du)
                final = jnp.sum(jnp.where(ends, m, 0), -1), jnp.max(jnp.where(ends, e, _LOWEST), -1)
                end = _add(end, final)
        return (tuple(coming), end), None

    steps = jnp.arange(frames + columns - 1, dtype=jnp.int32)
    initial, structure = jax.tree.flatten(((start, *[zero] * (depth - 1)), end))
    _, *initial = vary_together(first, *initial)  # a carry keeps its varying axes
    (_, end), _ = lax.scan(step, jax.tree.unflatten(structure, initial), (steps, diagonals))
    return _log(*end) + poison
