"""Sums over classes of exp(am[t, v] + lm[u, v]) and their derivatives, without [T, U1, V] in memory.

A matrix product of exponentials, each relative to the largest of its row, makes all nodes at once. Its terms underflow
where no class is likely on both sides. There a loop over the classes adds them up relative to the largest term of the
node itself. The loop makes no turn if no node needs it. It keeps the rounding errors of scores, which are sums of four
numbers: at 1e4 a float32 sum is off by up to 5e-4.

With p = exp(am[t, v] + lm[u, v] - lse[t, u]) all derivatives of lse are sums over one index of p times two factors:

    nodes[t, u]   = sum over v of p x[t, v] y[u, v]
    frames[t, v]  = sum over u of p c[t, u] y[u, v]
    columns[u, v] = sum over t of p c[t, u] x[t, v]

and so are the derivatives of these.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _xla

_CLASSES = 8  # classes in a turn of the loop


def product(equation, x, y):
    """Returns the product in full precision on every device."""
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)


def _least(dtype):
    """Returns the smallest sum that a product is trusted with: what underflows is at most 2^-62 of it."""
    return np.asarray(2.0**-512 if dtype == np.float64 else 2.0**-64, dtype)


def two_sum(x, y):
    """Returns (x + y rounded, its rounding error); the error is 0 where the sum is infinite."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    return total, jax.lax.stop_gradient(jnp.where(jnp.isfinite(error), error, 0))


def row_peak(x):
    """Returns the largest entry along the last axis [..., 1], 0 for a row of -inf, without a derivative."""
    peak = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True, initial=-jnp.inf))
    return jnp.where(jnp.isneginf(peak), 0, peak)


def score(am, peak_am, lm, peak_lm):
    """Returns am - peak_am + lm - peak_lm as (rounded, error).

    An error above 32, of float32 scores above 2^29, is left out: its exponential could overflow, and scores as large
    are as exact as their sum in an array.
    """
    am, error_am = two_sum(am, -peak_am)
    lm, error_lm = two_sum(lm, -peak_lm)
    total, error = two_sum(am, lm)
    error = error + (error_am + error_lm)
    return total, jnp.where(jnp.abs(error) > 32, 0, error)


def _relative(x):
    return jnp.exp(x - row_peak(x))


def _over_classes(am, lm, some, turn, carry):
    """Calls `turn` for each block of classes if `some`: (carry, slice of classes, scores, errors, which are new)."""
    classes = am.shape[-1]
    size = min(_CLASSES, classes)
    peaks = row_peak(am)[..., None, :], row_peak(lm)[..., None, :, :]

    def step(state):
        i, _, carry = state
        start = jnp.minimum(i * size, classes - size)
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size, axis=-1)
        scores, errors = score(cut(am)[..., None, :], peaks[0], cut(lm)[..., None, :, :], peaks[1])
        new = start + jnp.arange(size, dtype=jnp.int32) >= i * size
        carry = turn(carry, start, cut, scores, errors, new)
        return i + 1, some & ((i + 1) * size < classes), carry

    return jax.lax.while_loop(lambda state: state[1], step, (jnp.int32(0), some, carry))[2]


def _log_total(am, lm, *, branch):
    total = product("...tv,...uv->...tu", _relative(am), _relative(lm))
    doubt = total < _least(total.dtype)
    some = jnp.any(doubt) if branch else jnp.asarray(True)

    def largest(peak, start, cut, scores, errors, new):
        return jnp.maximum(peak, jnp.max(scores, -1))

    lowest = jnp.full_like(total, jnp.finfo(total.dtype).min)
    peak = _over_classes(am, lm, some, largest, lowest)

    def add(scaled, start, cut, scores, errors, new):
        terms = jnp.exp((scores - peak[..., None]) + errors)
        return scaled + jnp.sum(jnp.where(new, terms, 0), -1)

    scaled = _over_classes(am, lm, some, add, jnp.zeros_like(total))
    scaled = jnp.where(doubt, scaled, total)
    return [jnp.where(doubt, peak, 0), jnp.log(jnp.where(scaled == 0, 1, scaled))]


def _log_total_jvp(primals, results, tangents):
    (am, lm), (of_am, of_lm) = primals, tangents
    ones = None if of_am is None else nodes(am, lm, results, of_am, jnp.ones_like(lm))
    twos = None if of_lm is None else nodes(am, lm, results, jnp.ones_like(am), of_lm)
    return [None, _sum(ones, twos)]


def _sum(*terms):
    """Adds the terms that are not None."""
    present = [x for x in terms if x is not None]
    return functools.reduce(jnp.add, present) if present else None


def _shares(scores, errors, peak, above_peak, doubt):
    """Returns p for a block of classes, for the nodes in doubt."""
    shares = jnp.exp((scores - peak[..., None]) + (errors - above_peak[..., None]))
    return jnp.where(doubt[..., None], shares, 0)


def _sure(peak, above_peak):
    """Returns (nodes in doubt, exp(-above_peak) of the others)."""
    doubt = peak != 0
    return doubt, jnp.where(doubt, 0, jnp.exp(-jnp.where(doubt, 0, above_peak)))


def _nodes(am, lm, peak, above_peak, x, y, *, branch):
    doubt, scale = _sure(peak, above_peak)
    sums = product("...tv,...uv->...tu", _relative(am) * x, _relative(lm) * y) * scale
    sums = jnp.where(sums == 0, 0, sums)  # no -0: a loop for another sequence would add 0 to it

    def add(sums, start, cut, scores, errors, new):
        terms = _shares(scores, errors, peak, above_peak, doubt) * cut(x)[..., None, :] * cut(y)[..., None, :, :]
        return sums + jnp.sum(jnp.where(new, terms, 0), -1)

    return [_over_classes(am, lm, jnp.any(doubt) if branch else jnp.asarray(True), add, sums)]


def _rows(am, lm, peak, above_peak, weight, factor, *, of_frames, branch):
    """Computes `frames` or `columns`."""
    doubt, scale = _sure(peak, above_peak)
    near, other = (am, lm) if of_frames else (lm, am)
    equation = "...tu,...uv->...tv" if of_frames else "...tu,...tv->...uv"
    sums = _relative(near) * product(equation, weight * scale, _relative(other) * factor)
    sums = jnp.where(sums == 0, 0, sums)  # no -0: a loop for another sequence would add 0 to it

    def add(sums, start, cut, scores, errors, new):
        across = cut(factor)[..., None, :, :] if of_frames else cut(factor)[..., None, :]
        terms = _shares(scores, errors, peak, above_peak, doubt) * (weight[..., None] * across)
        chunk = cut(sums) + jnp.where(new, jnp.sum(terms, -2 if of_frames else -3), 0)
        return jax.lax.dynamic_update_slice_in_dim(sums, chunk, start, -1)

    return [_over_classes(am, lm, jnp.any(doubt) if branch else jnp.asarray(True), add, sums)]


def _jvp(which):
    """Returns the product rule, with the derivative of p, for `nodes`, `frames` or `columns`."""

    def rule(primals, results, tangents):
        am, lm, peak, above_peak, *factors = primals
        of_am, of_lm, _, of_above, *of_factors = tangents
        result_of = functools.partial(which, am, lm, (peak, above_peak))
        # p times a tangent is p with another factor, or a factor of the result.
        by_result, by_factor = {
            nodes: ((of_above, -1), (of_am, of_lm)),
            frames: ((of_am, 1), (_minus(of_above), of_lm)),
            columns: ((of_lm, 1), (_minus(of_above), of_am)),
        }[which]
        terms = [] if by_result[0] is None else [by_result[1] * by_result[0] * results[0]]
        for i, shift in enumerate(by_factor):
            shifted = None if shift is None or factors[i] is None else factors[i] * shift
            change = _sum(shifted, of_factors[i])
            if change is not None:
                terms.append(result_of(*factors[:i], change, *factors[i + 1 :]))
        return [_sum(*terms)]

    return rule


def _minus(x):
    return None if x is None else -x


def _bind(primitive, am, lm, total, *factors):
    return primitive(am, lm, *total, *factors, num_batch_dims=am.ndim - 2)[0]


def nodes(am, lm, total, x, y):
    """Returns the sums over classes [..., T, U1] of the module's docstring."""
    return _bind(_nodes_primitive, am, lm, total, x, y)


def frames(am, lm, total, weight, y):
    """Returns the sums over columns [..., T, V] of the module's docstring."""
    return _bind(_frames_primitive, am, lm, total, weight, y)


def columns(am, lm, total, weight, x):
    """Returns the sums over frames [..., U1, V] of the module's docstring."""
    return _bind(_columns_primitive, am, lm, total, weight, x)


def _transpose(of_first, of_second):
    """Returns, for the two factors, (the sum that is the cotangent, whether the cotangent is its first factor)."""

    def rule(cotangent, am, lm, peak, above_peak, first, second):
        (which, leads), other = (of_first, second) if first is None else (of_second, first)
        return which(am, lm, (peak, above_peak), *((cotangent, other) if leads else (other, cotangent)))

    return rule


_PLANE, _OF_AM, _OF_LM = ((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (1, 1))
_total_primitive = _xla.Local("jax_rnnt_additive_total", _log_total, (_PLANE, _PLANE), _log_total_jvp)
_nodes_primitive, _frames_primitive, _columns_primitive = (
    _xla.Local(f"jax_rnnt_additive_{which.__name__}", function, (result,), _jvp(which), _transpose(*transposes))
    for which, function, result, transposes in (
        (nodes, _nodes, _PLANE, ((frames, True), (columns, True))),
        (frames, functools.partial(_rows, of_frames=True), _OF_AM, ((nodes, True), (columns, False))),
        (columns, functools.partial(_rows, of_frames=False), _OF_LM, ((nodes, False), (frames, False))),
    )
)


def log_total(am, lm):
    """Returns lse [..., T, U1], relative to the peaks of both rows, as (peak, above_peak): their sum is lse.

    The peak is 0 where a product made the sum, without a derivative, and the lowest number where no class is possible.
    """
    return _total_primitive(am, lm, num_batch_dims=am.ndim - 2)
