"""Extended numbers (m, e, h) = m * 2^(e + 4096 h): the path weights of the reference and of the Pallas kernels.

m is a float mantissa, e an integer exponent, h a float exponent for large arcs. Float32 logs reach 1e3 ... 1e4, where
their spacing is 1e-4 ... 1e-3, and posteriors, differences of such logs, inherit that error. With the log-probability
x = k ln 2 + r of an arc, k an integer and |r| < ln 2,

    w = exp(x) = exp(r) * 2^k                                               is the number (exp(r), k)
    alpha * w = (m * exp(r)) * 2^(e + k)                                    integers add without rounding
    alpha + alpha' = (m + m' * 2^(e' - e)) * 2^e,  e >= e'                  powers of 2 scale without rounding

so a step rounds the mantissa by a few eps, whatever log alpha is, and n steps by a few n eps. The exponents are
piecewise constant: dw/dx = exp(r) * 2^k comes from the mantissa alone, and the posterior of an arc,

    d log alpha / dx = (dm/dx * 2^e) / (m * 2^e) = (dm/dx) / m

has no exponent at all. So plain automatic differentiation of the mantissas is exact, any number of times and in both
modes.

Finite arcs may be of any size: users mask with -1e9 or the lowest float. An arc above 2^11 in size gives its whole
multiples of 4096 ln 2 to h and the rest to e and m, so that no integer overflows. Sums of h are exact up to 5e10 nats.
Beyond, equal masks still have equal sums, so that e and m decide between paths through as many of them.

Where no arc is above 2^11 in size, h is not needed: the Pallas kernels then take numbers without it (h = None).
"""

import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_RADIX = 1 << 12  # of h, in powers of 2


class Number(typing.NamedTuple):
    m: jax.Array
    e: jax.Array
    h: jax.Array | None


def _float_layout(dtype):
    """Returns (unsigned integer of the same width, number of mantissa bits, exponent bias)."""
    info = jnp.finfo(dtype)
    return np.dtype(f"uint{info.bits}"), info.nmant, int(2 ** (info.nexp - 1) - 1)


def lowest(dtype):
    """Returns the h of zero, below the h of any path. Sums are cut here, so differences are never NaN."""
    return np.asarray(-0.9 * float(jnp.finfo(dtype).max), dtype)


def where(condition, x, y):
    """Works as `jnp.where` for scalars and arrays of the condition's shape, without a nested jit for each of 50 calls.

    This traces and lowers the reference and its gradient in three quarters of the time.
    """
    dtype = next(v.dtype for v in (x, y) if not isinstance(v, float | int))
    x, y = (lax.full_like(condition, v, dtype) if jnp.ndim(v) == 0 else v for v in (x, y))
    return lax.select(condition, x, y)


_LOWEST = -(1 << 28)  # the e of zero where there is no h: no sum of six overflows


def zero(m, wide=True):
    m = jnp.zeros_like(m)
    if wide:
        return Number(m, jnp.zeros_like(m, jnp.int32), jnp.full_like(m, lowest(m.dtype)))
    return Number(m, jnp.full_like(m, _LOWEST, jnp.int32), None)


def pow2(k, dtype):
    """Returns 2^k for integers k, exactly; 0 below the range of normal numbers."""
    uint, mantissa, bias = _float_layout(dtype)
    biased = jnp.maximum(k + bias, 0).astype(uint)
    return lax.bitcast_convert_type(lax.shift_left(biased, jnp.full_like(biased, mantissa)), dtype)


def normalize(a):
    """Returns the same number with 1 <= m < 2, or m = 0."""
    uint, mantissa, bias = _float_layout(a.m.dtype)
    bits = lax.bitcast_convert_type(lax.stop_gradient(a.m), uint)
    k = lax.shift_right_logical(bits, jnp.full_like(bits, mantissa)).astype(jnp.int32) - bias
    k = where(jnp.abs(k) > 64, 0, k)  # zero and NaN stay what they are
    return Number(a.m * pow2(-k, a.m.dtype), a.e + k, a.h)


def _parts_of_ln2(multiple, dtype):
    """Returns multiple * ln 2 as a sum of three floats. The first two have 12 bits: products with 12 more are exact."""
    left, parts = multiple * np.log(2), []
    for _ in range(2):
        unit = 2.0 ** (np.floor(np.log2(left)) - 11)
        parts.append(np.floor(left / unit) * unit)
        left = left - parts[-1]
    return [np.asarray(x, dtype) for x in (*parts, left)]


def _truncate(x):
    return where(x < 0, lax.ceil(x), lax.floor(x))


def _reduce(x, multiple):
    """Returns (n, x - n * multiple * ln 2 without its last part, that part) for a small integer n of x's sign."""
    n = _truncate(lax.stop_gradient(x) * np.asarray(1 / (multiple * np.log(2)), x.dtype))
    first, second, last = _parts_of_ln2(multiple, x.dtype)
    return n, x - n * first - n * second, n * last


def from_log(x):
    """Returns exp(x); -inf gives zero with a zero derivative."""
    none = x == -jnp.inf
    x = where(none, 0, x)
    size = jnp.abs(lax.stop_gradient(x))
    near = ~(size > 2.0**11)  # NaN too
    far = size > 2.0 ** (jnp.finfo(x.dtype).nmant + 8)  # beyond exact reduction
    high, left, late = _reduce(where(far, x - lax.stop_gradient(x), x), _RADIX**2)
    low, left, later = _reduce(left, _RADIX)
    smallest, left, last = _reduce(left - (late + later), _RADIX)  # in float64, `late` is large where `high` is
    whole = _truncate(lax.stop_gradient(x) * np.asarray(1 / (_RADIX * np.log(2)), x.dtype))
    h = where(none, lowest(x.dtype), where(near, 0, where(far, whole, _RADIX * high + (low + smallest))))
    k, left, latest = _reduce(where(near, x, left - last), 1)
    e = where(jnp.isnan(k), 0, k).astype(jnp.int32)
    return Number(where(none, 0, jnp.exp(left - latest)), e, h)


def from_small_log(x):
    """Returns exp(x) without h, for |x| <= 2^11 or -inf."""
    none = x == -jnp.inf
    k, left, last = _reduce(where(none, 0, x), 1)
    return Number(where(none, 0, jnp.exp(left - last)), where(none, _LOWEST, k.astype(jnp.int32)), None)


def multiply(a, b):
    if a.h is None:
        return Number(a.m * b.m, a.e + b.e, None)
    return Number(a.m * b.m, a.e + b.e, jnp.maximum(a.h + b.h, lowest(a.m.dtype)))


def gap(a, b):
    """Returns the exponent of a minus that of b, in bits, cut where the lesser number is negligible."""
    bias = _float_layout(a.m.dtype)[2]
    if a.h is None:
        return jnp.clip(a.e - b.e, -bias, bias)
    bits = _RADIX * (a.h - b.h) + (a.e - b.e).astype(a.m.dtype)
    return lax.clamp(np.asarray(-bias, bits.dtype), bits, np.asarray(bias, bits.dtype)).astype(jnp.int32)


def add(a, b):
    if a.h is None:
        e = jnp.maximum(jnp.maximum(a.e, b.e), _LOWEST)
        return Number(a.m * pow2(a.e - e, a.m.dtype) + b.m * pow2(b.e - e, b.m.dtype), e, None)
    d = gap(a, b)
    m = a.m * pow2(jnp.minimum(d, 0), a.m.dtype) + b.m * pow2(jnp.minimum(-d, 0), b.m.dtype)
    return Number(m, where(d < 0, b.e, a.e), where(d < 0, b.h, a.h))


def total(a, add_up=jnp.sum):
    """Returns the sum over the last axis; ``add_up(m, axis)`` adds mantissas of one exponent."""
    dtype = a.m.dtype
    size = _RADIX * (a.h - jnp.max(a.h, -1, keepdims=True)) + a.e.astype(dtype)
    place = jnp.argmax(where(a.m == 0, -jnp.inf, size), -1)[..., None]
    largest = lax.broadcasted_iota(place.dtype, a.m.shape, a.m.ndim - 1) == place
    top = [jnp.sum(where(largest, x, 0), -1, keepdims=True, dtype=x.dtype) for x in a]
    # Gaps to the top are computed from integers, since the float `size` is rounded.
    return Number(add_up(a.m * pow2(gap(a, Number(*top)), dtype), -1), *(x[..., 0] for x in top[1:]))


def _log(m, e, h):
    """Returns log(m * 2^(e + 4096 h)); -inf, with a zero derivative, where m is 0 or no float holds it."""
    dtype = m.dtype
    exponent = e.astype(dtype) * np.asarray(np.log(2), dtype) + h * np.asarray(_RADIX * np.log(2), dtype)
    none = (m == 0) | (exponent == -jnp.inf)
    return where(none, -jnp.inf, jnp.log(where(none, 1, m)) + exponent)


def log_of_sum(a):
    """Returns the log of the sum over the last axis; -inf, with derivative 0, if it is 0 or no float holds its log."""
    return _log(*total(a))


def log_of_ratio(a, b):
    """Returns log(a / b), as exact where both logs are large; -inf, with a zero derivative, where a is zero."""
    none = a.m == 0
    m = where(none, 0, where(none, 1, a.m) / where(none, 1, b.m))
    return _log(m, a.e - b.e, a.h - b.h)
