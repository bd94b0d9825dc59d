"""Are derivatives of second and higher order right, or refused, for tangents and cotangents of any size?

`gradient(x, w)` is that of the losses at the cotangents w. Its truth is the float64 gradient of reference_numpy.py, and
the slopes of that.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import layout_table
from family import RNNT, TDT, slow
from jax_rnnt import AdditiveLogits, JointLogits, LinearJoint

pytestmark = pytest.mark.no_kernel
LENGTHS = [3, 2, 3, 3], [2, 1, 0, 2]
WEIGHTS = np.array([1.0, -0.5, 2.0, 0.0])  # of the losses; that of the last is exactly 0, and has a tangent
WINDOWS = np.array([[[0, 1], [0, 2]]] * 4, np.int32)
OFF = {"clamp": -1.0, "fastemit_lambda": 0.0, "delay_penalty": 0.0, "label_windows": 0 * WINDOWS + [0, 2]}
ALL = {"clamp": 0.25, "fastemit_lambda": 0.5, "delay_penalty": 0.25, "label_windows": WINDOWS}
SIZES = 1e-6, 1e-3, 1.0, 1e3, 1e6


def small(loss=RNNT, dtype=np.float64):
    return batches.problem(4, 3, 2, 4, loss=loss, dtype=dtype, scale=1.0, lengths=LENGTHS)


def values_of(p, implementation, loss=RNNT, layout=None, label_windows=None, **options):
    """The losses [B] as a function of the logits."""
    value = loss.value(reduction="none", implementation=implementation, **options)
    make = layout_table.layout(p, layout) if layout else lambda x: x
    return lambda x: value(make(x), *p[1:], label_windows=label_windows)


def gradient_of(values):
    """gradient(x, w)"""
    return lambda x, w: jax.vjp(values, x)[1](w)[0]


def both_modes(gradient):
    """(forward over reverse along (v, dw), reverse over reverse at the cotangent v)"""

    def run(x, w, v, dw):
        tangent = jax.jvp(gradient, (x, w), (v, dw))[1]
        return tangent, jax.vjp(gradient, x, w)[1](v)

    return run


def slope(function, x, v):
    """The derivative of a float64 function along v, for v of any size."""
    size, h = np.abs(v).max(), 1e-5
    up, down = (function(x + sign * h / size * v) for sign in (1, -1))
    return (up - down) * (size / (2 * h))


def each(w):
    return w[:, None, None, None]


def expected(loss, p, w, v, dw, **options):
    """What `both_modes` gives, and the unit gradient; of the second the product with any direction, by `times`."""
    first = lambda x: loss.expected(p._replace(logits=x), **options)[1]
    x = np.asarray(p.logits, np.float64)
    unit = first(x)

    def times(direction):
        return w * (v * slope(first, x, direction)).sum((1, 2, 3))

    return each(w) * slope(first, x, v) + each(dw) * unit, times, (v * unit).sum((1, 2, 3))


def directions(p, dtype, size):
    rng = np.random.default_rng(10)
    v = (size * rng.normal(size=p.logits.shape)).astype(dtype)
    return v, rng.normal(size=len(WEIGHTS))


def check(loss, implementation, several, layout=None, dtype=np.float64, sizes=(1.0,)):
    """Both modes for these options and for tangents and cotangents of these sizes, with NaN in the padding.

    One program: it takes the options.
    """
    p = batches.poisoned(small(loss, dtype))
    wide = np.float64 if dtype == np.float64 else np.float32

    @jax.jit
    def run(options, *arguments):
        return both_modes(gradient_of(values_of(p, implementation, loss, layout, **options)))(*arguments)

    clean = p._replace(logits=np.where(batches.inside(p)[..., None], p.logits, 0))
    rounding, smallest = compare.rounding(dtype)  # in reverse mode a result is the sum of two that are rounded
    limit = 1e-8 if wide == np.float64 else 20 * compare.tolerance(np.float32, 5)
    pairs = [(size, 1.0) for size in sizes] + [(1.0, size) for size in sizes if size != 1]
    for options, (of_tangent, of_cotangent) in itertools.product(several, pairs):
        v, dw = directions(p, dtype, of_tangent)
        w, dw = (of_cotangent * x for x in (WEIGHTS, dw))
        tangent, (of_x, of_w) = run(options, p.logits, w.astype(wide), v, dw.astype(wide))
        forward, times, unit = expected(loss, clean, w, v.astype(np.float64), dw, **options)
        close = functools.partial(np.testing.assert_allclose, rtol=rounding)
        error = of_cotangent * max(of_tangent, 1) * limit + smallest
        close(np.asarray(tangent, np.float64), forward, atol=error)
        error = of_cotangent * of_tangent * limit + smallest
        of_x = np.asarray(of_x, np.float64)
        if options.get("clamp", -1) > 0 or options.get("fastemit_lambda"):  # else the matrix is symmetric
            for seed in range(3):
                direction = np.random.default_rng(seed).normal(size=v.shape)
                np.testing.assert_allclose((of_x * direction).sum((1, 2, 3)), times(direction), atol=9 * error)
        else:
            symmetric = forward - expected(loss, clean, 0 * w, v.astype(np.float64), dw, **options)[0]
            close(of_x, symmetric, atol=error + 2 * rounding * np.abs(symmetric).max())
        np.testing.assert_allclose(of_w, unit, atol=of_tangent * limit)


# Options that are off are another program than numbers that switch them off: `test_sizes`.
OPTIONS = {"all": [ALL], "one by one": [ALL, OFF | {"clamp": 0.125}, OFF | {"fastemit_lambda": 0.75}]}
CASES = [(RNNT, "kernel", "one by one", None), slow(RNNT, "reference", "one by one", None)]
CASES += [slow(RNNT, "kernel", "all", layout) for layout in ("BandLogits", "PackedLogits")]
CASES += [slow(loss, "kernel", "all", None) for loss in (TDT, family.HAT)]
CASES += [slow(family.ROBUST, "kernel", "all", None)]  # steps between logits and lattice


@pytest.mark.parametrize(("loss", "implementation", "options", "layout"), CASES, ids=str, indirect=["implementation"])
def test_second_derivatives(loss, implementation, options, layout):
    """Hessian-vector products in both modes; the weight of one loss is exactly 0."""
    check(loss, implementation, OPTIONS[options], layout)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sizes(kernel, dtype):
    """Nothing underflows and nothing overflows that its dtype can hold."""
    check(RNNT, kernel, [{}], None, jnp.dtype(dtype), SIZES if dtype != "float16" else (2e-4, 1.0, 5e3))


# ------------------------------------------------------------------------------------------------------- layouts
REFUSED = [
    lambda gradient, x, w: jax.jvp(lambda x: gradient(x, w), (x,), (x,)),
    lambda gradient, x, w: jax.jvp(lambda w: gradient(x, w), (w,), (w,)),
    lambda gradient, x, w: jax.jacfwd(lambda x: gradient(x, w))(x),
    lambda gradient, x, w: jax.grad(lambda x: gradient(x, w).sum())(x),
    lambda gradient, x, w: jax.linearize(lambda x: gradient(x, w), x)[1](x),
]


def test_tiles_are_refused(kernel):
    """The error names the reference, which has them."""
    p = small()
    for call in REFUSED:
        with pytest.raises(NotImplementedError, match="implementation='reference'"):
            call(gradient_of(values_of(p, None, layout="JointLogits")), p.logits, WEIGHTS)


def two():
    """Two sequences, since paths of many take long to trace."""
    return small().take(slice(2))


def assert_products(got, expected, operands, forward_alone=False):
    """Hessian-vector products, forward over reverse and reverse over reverse, are slopes of the other's gradient.

    Returns the first kind as a function of operands and weights of the losses.
    """
    rng = np.random.default_rng(0)
    vectors = jax.tree.map(lambda x: rng.normal(size=np.shape(x)), operands)

    def gradient(function, weights):
        each = lambda operands: (values := function(*operands), jnp.where(jnp.isnan(values), 0, weights * values))[1]
        return jax.grad(lambda operands: each(operands).sum())

    forward = jax.jit(lambda x, w: jax.jvp(gradient(got, w), (x,), (vectors,))[1])
    reverse = jax.jit(lambda x, w: jax.vjp(gradient(got, w), x)[1](vectors)[0])
    up, down = (jax.tree.map(lambda x, v, h=h: x + h * v, operands, vectors) for h in (1e-5, -1e-5))
    first = jax.jit(gradient(expected, WEIGHTS[:2]))
    truth = jax.tree.map(lambda x, y: (x - y) / 2e-5, first(up), first(down))
    for product in (forward, reverse)[: 1 if forward_alone else 2]:
        compare.assert_close(product(operands, WEIGHTS[:2]), truth, atol=1e-8)
    return forward


@pytest.mark.slow
def test_joint_networks():
    """Through a joint network, by the reference, as through its logits: half with a linear output layer."""
    p, loss = two(), jax_rnnt.RNNTLoss(reduction="none", implementation="reference")
    rng = np.random.default_rng(1)
    operands = [rng.normal(size=shape) for shape in ((2, 3, 5), (2, 3, 5), (5, 4), (4,))]

    def logits(encoder, predictor, weight, bias):
        return jnp.tanh(encoder[:, :, None] + predictor[:, None]) @ weight + bias.reshape(1, 1, 1, -1)

    def got(encoder, predictor, weight, bias):
        joints = LinearJoint(weight, bias), lambda a, b: jnp.tanh(a + b) @ weight + bias[None]
        return sum(loss(JointLogits(joint, encoder, predictor), *p[1:]) / 2 for joint in joints)

    assert_products(got, lambda *operands: loss(logits(*operands), *p[1:]), operands)


@pytest.mark.slow
def test_additive():
    """With a smoothed loss. What sequences share gets nothing from a masked one that is NaN."""
    p = two()._replace(target_lengths=np.full(2, 2, np.int32))
    rng = np.random.default_rng(2)
    operands = [rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3, 4)), np.float64(0.25), np.float64(0.125)]

    def expected(am, lm, *scales):
        own = jax.nn.log_softmax(lm)
        prior = jnp.log(jnp.mean(jax.nn.softmax(lm), 1, keepdims=True))
        mixed = am + prior - jax.nn.logsumexp(am + prior, -1, keepdims=True)
        both = jax.nn.log_softmax(am[:, :, None] + lm[:, None])
        planes = (1 - scales[0] - scales[1]) * both + scales[0] * own[:, None] + scales[1] * mixed[:, :, None]
        return jax_rnnt.RNNTLoss(fused_log_softmax=False, reduction="none", implementation="reference")(planes, *p[1:])

    got = lambda *operands: jax_rnnt.RNNTLoss(reduction="none")(AdditiveLogits(*operands), *p[1:])
    product = assert_products(got, expected, operands, forward_alone=True)  # more: `test_sums`
    spoilt = [operands[0].copy(), *operands[1:]]
    spoilt[0][1, 0, 0] = np.nan
    masked, alone = product(spoilt, WEIGHTS[:2]), product(operands, WEIGHTS[:2] * [1, 0])
    compare.assert_close(masked, alone, atol=1e-12)


# ------------------------------------------------------------------------------------------- leaves, orders, zeros
@pytest.mark.slow
def test_leaves(kernel):
    """Derivatives of the gradient with respect to options, and of the options' own gradients."""
    p, loss = small(TDT), TDT
    point, others = {"delay_penalty": 0.25, "sigma": 0.5}, {"clamp": 0.125, "fastemit_lambda": 0.75}
    call = lambda x, **o: values_of(p, kernel, loss, **o)(x)
    vector = np.random.default_rng(3).normal(size=p.logits.shape)

    @jax.jit
    def run(x, w, leaves, others):
        gradient = lambda x, w, leaves, others: jax.vjp(lambda x, o: call(x, **o, **others), x, leaves)[1](w)
        of_x, of_leaves = jax.jacfwd(lambda leaves: gradient(x, w, leaves, {}))(leaves)
        of_others = jax.jacfwd(lambda others: gradient(x, w, {}, others)[0])(others)
        of_weights = jax.jvp(lambda w: gradient(x, w, leaves, {})[1], (w,), (jnp.ones_like(w),))[1]
        pulled = jax.vjp(lambda leaves: gradient(x, w, leaves, {})[0], leaves)[1](vector)[0]
        return of_x, of_leaves, of_others, of_weights, pulled

    of_x, of_leaves, of_others, of_weights, pulled = run(p.logits, WEIGHTS, point, others)
    for k in point:
        value = lambda v, k=k: loss.expected(p, **point | {k: v})
        mixed = each(WEIGHTS) * slope(lambda v, f=value: f(v)[1], point[k], 1.0)
        np.testing.assert_allclose(of_x[k], mixed, atol=1e-8)
        np.testing.assert_allclose(pulled[k], (mixed * vector).sum(), atol=1e-7)
        h, coefficients = 1e-3, {-2: -1, -1: 16, 0: -30, 1: 16, 2: -1}
        second = sum(c * value(point[k] + s * h)[0] for s, c in coefficients.items()) / (12 * h**2)
        np.testing.assert_allclose(of_leaves[k][k], (WEIGHTS * second).sum(), atol=1e-7)
        np.testing.assert_allclose(of_weights[k], slope(lambda v, f=value: f(v)[0], point[k], 1.0).sum(), atol=1e-8)
    for k in others:
        first = lambda v, k=k: loss.expected(p, **others | {k: v})[1]
        np.testing.assert_allclose(of_others[k], each(WEIGHTS) * slope(first, others[k], 1.0), atol=1e-8)


@pytest.mark.slow
def test_gradient_that_is_zero(kernel):
    """At equal logits of two classes some gradients are exactly 0, but not their derivatives."""
    lengths = np.array([2], np.int32), np.array([1], np.int32)
    p = batches.Problem(np.zeros((1, 2, 2, 2)), np.zeros((1, 1), np.int32), *lengths)
    of_logits = lambda x: RNNT.expected(p._replace(logits=x))[1]
    units = np.eye(p.logits.size).reshape(-1, *p.logits.shape)
    expected = np.stack([slope(of_logits, p.logits, unit) for unit in units], -1).reshape(p.logits.shape * 2)
    assert expected[0, 0, 0, 0].any()
    gradient = jax.grad(lambda x, clamp: values_of(p, kernel, clamp=clamp)(x).sum())
    run = jax.jit(lambda *x: (gradient(*x), jax.jacfwd(gradient)(*x)))
    for clamp in (-1.0, 0.75):
        found, hessian = run(p.logits, clamp)
        assert not np.asarray(found[0, 0, 0]).any()
        np.testing.assert_allclose(hessian, expected, atol=1e-9)


def test_cotangent_of_a_plane_that_is_zero(kernel):
    """Half the sum of squared arcs has the gradient `arcs`, 0 for arcs of 0, and the unit matrix as its derivative."""
    p = small()
    x = np.zeros_like(p.logits)
    loss = jax_rnnt.RNNTLoss(fused_log_softmax=False, implementation=kernel)

    def half(x):
        blank = loss.arc_log_probs(x, *p[1:])["blank"]
        return (jnp.where(batches.inside(p), blank, 0) ** 2).sum() / 2

    product = jax.jit(lambda x, v: jax.jvp(jax.grad(half), (x,), (v,))[1])(x, np.ones_like(x))
    np.testing.assert_array_equal(product[..., -1], batches.inside(p))
    np.testing.assert_array_equal(product[..., :-1], 0)


@pytest.mark.slow
def test_masked_loss_that_is_nan(kernel):
    """Forward over reverse it stays 0, and the others are right. What sequences share gets nothing from it."""
    p, clamp = small(), 0.125
    spoilt = p.logits.copy()
    spoilt[3, 1, 1, 1] = np.nan
    v = np.random.default_rng(5).normal(size=p.logits.shape)

    @jax.jit
    def run(x, w, penalty):
        values = lambda x, d: values_of(p, kernel, clamp=clamp, delay_penalty=d)(x)
        return jax.jvp(lambda x: jax.vjp(values, x, penalty)[1](w), (x,), (v,))[1]

    of_x, of_penalty = run(spoilt, WEIGHTS, 0.25)
    options = {"clamp": clamp, "delay_penalty": 0.25}
    np.testing.assert_allclose(of_x, expected(RNNT, p, WEIGHTS, v, 0 * WEIGHTS, **options)[0], atol=1e-8)
    mixed = slope(lambda d: RNNT.expected(p, delay_penalty=d)[1], 0.25, 1.0)
    np.testing.assert_allclose(of_penalty, (each(WEIGHTS) * mixed * v).sum(), atol=1e-8)
