"""Are derivatives of second and higher order right, or refused, for tangents and cotangents of any size?

`gradient(x, w)` is that of the losses at the cotangents w. Its truth is the float64 gradient of reference_numpy.py, and
the slopes of that.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import meshes
import reference_numpy as truth

LENGTHS = [3, 2, 3, 3], [2, 1, 0, 2]
WEIGHTS = np.array([1.0, -0.5, 2.0, 0.0])  # of the losses; that of the last is exactly 0, and has a tangent
WINDOWS = np.array([[[0, 1], [0, 2]]] * 4, np.int32)
OPTIONS = {
    "plain": {},
    "clamp": {"clamp": 0.125},
    "fastemit": {"fastemit_lambda": 0.75},
    "all": {"clamp": 0.25, "fastemit_lambda": 0.5, "delay_penalty": 0.25, "label_windows": WINDOWS},
}
SIZES = 1e-6, 1e-3, 1.0, 1e3, 1e6


def small(loss, dtype=np.float64, **kwargs):
    return losses.problem(4, 3, 2, 4, loss=loss, dtype=dtype, scale=1.0, lengths=LENGTHS, **kwargs)


def in_packed_rows(logits, targets, logit_lengths, target_lengths, **options):
    """The RNN-T loss of the rows inside the lengths, one after the other."""
    inside = np.argwhere(losses.inside(losses.Problem(logits, targets, logit_lengths, target_lengths)))
    rows = logits[tuple(inside.T)]
    rest = targets, logit_lengths, target_lengths
    return jax_rnnt.rnnt_loss_packed(rows, *rest, max_frames=logits.shape[1], **options)


PACKED = losses.Loss("packed", jax_rnnt.RNNTLoss, in_packed_rows)
TILES, BAND = losses.LAYOUTS


def gradient_of(loss, p, implementation, **options):
    """gradient(x, w)"""

    def gradient(x, w):
        call = lambda x: loss(x, *p[1:], reduction="none", implementation=implementation, **options)
        return jax.vjp(call, x)[1](w)[0]

    return gradient


def both_modes(gradient):
    """(forward over reverse along (v, dw), reverse over reverse at the cotangent v)"""

    @jax.jit
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


def check(loss, implementation, dtype, sizes, **options):
    """Both modes for tangents and for cotangents of these sizes."""
    p = small(loss, dtype)
    p = p if loss is TILES else losses.poisoned(p)  # whose encoder rows hold the logits of all columns
    wide = np.float64 if dtype == np.float64 else np.float32
    run = both_modes(gradient_of(loss, p, implementation, **options))
    clean = p._replace(logits=np.where(losses.inside(p)[..., None], p.logits, 0))
    # A 16-bit result is rounded, smallest numbers included; in reverse mode it is the sum of two that are.
    half = np.dtype(dtype).itemsize == 2
    rounding, smallest = (losses.eps(dtype) / 2, 2.0**-24) if half else (0, 0)
    limit = 1e-8 if wide == np.float64 else 20 * losses.tolerance(np.float32, 5)
    for of_tangent, of_cotangent in [(size, 1.0) for size in sizes] + [(1.0, size) for size in sizes]:
        v, dw = directions(p, dtype, of_tangent)
        w, dw = (of_cotangent * x for x in (WEIGHTS, dw))
        tangent, (of_x, of_w) = run(p.logits, w.astype(wide), v, dw.astype(wide))
        forward, times, unit = expected(loss, clean, w, v.astype(np.float64), dw, **options)
        close = functools.partial(np.testing.assert_allclose, rtol=rounding)
        error = of_cotangent * max(of_tangent, 1) * limit + smallest
        close(np.asarray(tangent, np.float64), forward, atol=error)
        error = of_cotangent * of_tangent * limit + smallest
        of_x = np.asarray(of_x, np.float64)
        if {"clamp", "fastemit_lambda"} & {*options}:  # else the matrix is symmetric
            for seed in range(3):
                direction = np.random.default_rng(seed).normal(size=v.shape)
                np.testing.assert_allclose((of_x * direction).sum((1, 2, 3)), times(direction), atol=9 * error)
        else:
            symmetric = forward - expected(loss, clean, 0 * w, v.astype(np.float64), dw, **options)[0]
            close(of_x, symmetric, atol=error + 2 * rounding * np.abs(symmetric).max())
        np.testing.assert_allclose(of_w, unit, atol=of_tangent * limit)


@pytest.mark.rare("clamp", "fastemit", "plain-reference", "plain-tdt", "tdt-reference")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.family("reference")
def test_second_derivatives(loss, implementation, options):
    """Hessian-vector products in both modes, with NaN in the padding; the weight of one loss is exactly 0."""
    check(loss, implementation, np.float64, [1.0], **options)


@pytest.mark.rare("reference", "bfloat16", "float16", "tdt")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16], ids=lambda d: np.dtype(d).name)
@pytest.mark.family("reference")
def test_sizes(loss, implementation, dtype):
    """Nothing underflows and nothing overflows that its dtype can hold."""
    check(loss, implementation, dtype, SIZES if dtype != np.float16 else (2e-4, 1.0, 5e3))


# ------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.rare("reference", "plain")
@pytest.mark.parametrize("layout", [BAND, PACKED], ids=lambda x: x.name)
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_layouts(layout, implementation, options):
    check(layout, implementation, np.float64, [1.0], **options)


@pytest.mark.slow
def test_tiles_of_the_reference():
    check(TILES, "reference", np.float64, [1.0])


REFUSED = {
    "logits": lambda gradient, x, w: jax.jvp(lambda x: gradient(x, w), (x,), (x,)),
    "weights": lambda gradient, x, w: jax.jvp(lambda w: gradient(x, w), (w,), (w,)),
    "hessian": lambda gradient, x, w: jax.jacfwd(lambda x: gradient(x, w))(x),
    "reverse over reverse": lambda gradient, x, w: jax.grad(lambda x: gradient(x, w).sum())(x),
    "linearize": lambda gradient, x, w: jax.linearize(lambda x: gradient(x, w), x)[1](x),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_tiles_are_refused(kernel, call):
    """The error names the reference, which has them."""
    p = small(TILES)
    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        call(gradient_of(TILES, p, None), p.logits, WEIGHTS)


def enumerated(p, fused=True):
    """`RNNTLoss` [B] of logits as sums over enumerated paths, in plain jax.numpy, for JAX to differentiate.

    `shift` [B, T, U1] is added to the label arcs.
    """

    def values(x, shift=None):
        log_probs = jax.nn.log_softmax(x) if fused else x
        out = []
        for b in range(len(x)):
            n, m = int(p.logit_lengths[b]), int(p.target_lengths[b])

            def score(slot, t, u, b=b):
                if slot == "blank":
                    return log_probs[b, t, u, -1]
                return log_probs[b, t, u, p.targets[b, u]] + (0 if shift is None else shift[b, t, u])

            paths = truth.enumerate_paths(truth.STANDARD, n, m)
            out.append(-jax.nn.logsumexp(jnp.stack([sum(score(*arc) for arc in path) for path in paths])))
        return jnp.stack(out)

    return values


def assert_same_products(got, expected, operands, atol=1e-10):
    """Hessian-vector products of two functions of trees, forward over reverse and reverse over reverse."""
    rng = np.random.default_rng(0)
    vectors = jax.tree.map(lambda x: rng.normal(size=np.shape(x)), operands)

    @functools.partial(jax.jit, static_argnums=0)
    def products(function, operands):
        gradient = jax.grad(lambda operands: (WEIGHTS * function(*operands)).sum())
        return jax.jvp(gradient, (operands,), (vectors,))[1], jax.vjp(gradient, operands)[1](vectors)[0]

    truth = products(expected, operands)[0]
    for made in products(got, operands):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), made, truth)


@pytest.mark.rare("function")
@pytest.mark.parametrize("linear", [True, False], ids=["linear", "function"])
def test_joint_networks(linear):
    """Through a joint network, by the reference."""
    p = small(losses.RNNT)
    rng = np.random.default_rng(1)
    operands = [rng.normal(size=shape) for shape in ((4, 3, 5), (4, 3, 5), (5, 4), (4,))]

    def logits(encoder, predictor, weight, bias):
        return jnp.tanh(encoder[:, :, None] + predictor[:, None]) @ weight + bias.reshape(1, 1, 1, -1)

    def got(encoder, predictor, weight, bias):
        joint = jax_rnnt.LinearJoint(weight, bias)
        if not linear:
            joint = lambda a, b: jnp.tanh(a + b) @ weight + bias[None]
        made = jax_rnnt.JointLogits(joint, encoder, predictor)
        return jax_rnnt.RNNTLoss(reduction="none", implementation="reference")(made, *p[1:])

    assert_same_products(got, lambda *operands: enumerated(p)(logits(*operands)), operands)


@pytest.mark.parametrize("smoothed", [False, True], ids=["plain", "smoothed"])
@pytest.mark.rare("smoothed")
def test_additive(smoothed):
    p = small(losses.RNNT)._replace(target_lengths=np.full(4, 2, np.int32))
    rng = np.random.default_rng(2)
    operands = [rng.normal(size=(4, 3, 4)), rng.normal(size=(4, 3, 4))]
    operands += [np.float64(0.25), np.float64(0.125)] if smoothed else []

    def expected(am, lm, *scales):
        if not smoothed:
            return enumerated(p)(am[:, :, None] + lm[:, None])
        own = jax.nn.log_softmax(lm)
        prior = jnp.log(jnp.mean(jax.nn.softmax(lm), 1, keepdims=True))
        mixed = am + prior - jax.nn.logsumexp(am + prior, -1, keepdims=True)
        both = jax.nn.log_softmax(am[:, :, None] + lm[:, None])
        planes = (1 - scales[0] - scales[1]) * both + scales[0] * own[:, None] + scales[1] * mixed[:, :, None]
        return enumerated(p, fused=False)(planes)

    got = lambda *operands: jax_rnnt.RNNTLoss(reduction="none")(jax_rnnt.AdditiveLogits(*operands), *p[1:])
    assert_same_products(got, expected, operands)


# ------------------------------------------------------------------------------------------- leaves, orders, zeros


@pytest.mark.parametrize("name", ["rnnt", "tdt", "multiblank"])
@pytest.mark.rare("tdt", "multiblank", "reference")
def test_leaves(name, implementation):
    """Derivatives of the gradient with respect to options, and of the options' own gradients."""
    loss = next(x for x in losses.LOSSES if x.name == name)
    p = small(loss)
    point = {"delay_penalty": 0.25} | ({} if name == "rnnt" else {"sigma": 0.5})
    others = {"clamp": 0.125, "fastemit_lambda": 0.75}
    call = lambda x, **o: loss(x, *p[1:], reduction="none", implementation=implementation, **o)
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
        first = lambda v, k=k: value(v)[1]
        mixed = each(WEIGHTS) * slope(first, point[k], 1.0)
        np.testing.assert_allclose(of_x[k], mixed, atol=1e-8)
        np.testing.assert_allclose(pulled[k], (mixed * vector).sum(), atol=1e-7)
        h = 1e-3
        losses_of = {s: value(point[k] + s * h)[0] for s in (-2, -1, 0, 1, 2)}
        second = (-losses_of[2] + 16 * losses_of[1] - 30 * losses_of[0] + 16 * losses_of[-1] - losses_of[-2]) / (
            12 * h**2
        )
        np.testing.assert_allclose(of_leaves[k][k], (WEIGHTS * second).sum(), atol=1e-7)
        np.testing.assert_allclose(of_weights[k], slope(lambda v, k=k: value(v)[0], point[k], 1.0).sum(), atol=1e-8)
    for k in others:
        first = lambda v, k=k: loss.expected(p, **others | {k: v})[1]
        np.testing.assert_allclose(of_others[k], each(WEIGHTS) * slope(first, others[k], 1.0), atol=1e-8)


@pytest.mark.rare("reference")
def test_hessians(implementation):
    """Whole matrices in every way that JAX offers, against JAX's own derivatives of enumerated paths."""
    p = small(losses.RNNT).take(slice(1, 2))
    call = lambda x: losses.RNNT(x, *p[1:], reduction="sum", implementation=implementation)
    gradient = jax.grad(call)
    ways = {
        "hessian": jax.hessian(call),
        "reverse over reverse": jax.jacrev(gradient),
        "linearize": lambda x: jax.vmap(jax.linearize(gradient, x)[1], out_axes=-1)(basis).reshape(x.shape * 2),
        "checkpoint": jax.hessian(jax.checkpoint(call)),
        "policy": jax.hessian(
            jax.checkpoint(call, policy=jax.checkpoint_policies.save_only_these_names("rnnt_residuals"))
        ),
        "vmap": lambda x: jax.vmap(jax.hessian(call))(x[None])[0],
    }
    basis = np.eye(p.logits.size).reshape(-1, *p.logits.shape)
    expected = jax.jit(jax.hessian(lambda x: enumerated(p)(x).sum()))(p.logits)
    for name, made in jax.jit(lambda x: {key: way(x) for key, way in ways.items()})(p.logits).items():
        np.testing.assert_allclose(made, expected, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_third_derivatives(implementation):
    p = small(losses.RNNT)
    x, v = p.logits, np.random.default_rng(4).normal(size=p.logits.shape)

    def along(call):
        gradient = jax.grad(lambda x: (WEIGHTS * call(x)).sum())
        product = lambda x: jax.jvp(gradient, (x,), (v,))[1]
        return jax.jit(lambda x: (jax.jvp(product, (x,), (v,))[1], jax.vjp(product, x)[1](v)[0]))

    got = along(lambda x: losses.RNNT(x, *p[1:], reduction="none", implementation=implementation))(x)
    for a, b in zip(got, along(enumerated(p))(x), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-11)


@pytest.mark.rare("1.0")
@pytest.mark.parametrize("clamp", [-1.0, 0.75])
def test_gradient_that_is_zero(implementation, clamp):
    """At equal logits of two classes some gradients are exactly 0, but not their derivatives."""
    p = small(losses.RNNT).take(slice(0, 1))._replace(logits=np.zeros((1, 2, 2, 2)), targets=np.zeros((1, 1), np.int32))
    p = p._replace(logit_lengths=np.array([2], np.int32), target_lengths=np.array([1], np.int32))
    call = lambda x: losses.RNNT(x, *p[1:], reduction="sum", clamp=clamp, implementation=implementation)
    assert not np.asarray(jax.grad(call)(p.logits)[0, 0, 0]).any()
    expected = jax.hessian(lambda x: enumerated(p)(x).sum())(p.logits)
    assert np.asarray(expected)[0, 0, 0, 0].any()
    np.testing.assert_allclose(jax.jit(jax.hessian(call))(p.logits), expected, atol=1e-14)


@pytest.mark.rare("reference")
def test_cotangent_of_a_plane_that_is_zero(implementation):
    """Half the sum of squared arcs has the gradient `arcs`, 0 for arcs of 0, and the unit matrix as its derivative."""
    p = small(losses.RNNT)
    x = np.zeros_like(p.logits)
    loss = jax_rnnt.RNNTLoss(fused_log_softmax=False, implementation=implementation)

    def half(x):
        blank = loss.arcs(x, *p[1:])["blank"]
        return (jnp.where(losses.inside(p), blank, 0) ** 2).sum() / 2

    product = jax.jit(lambda x, v: jax.jvp(jax.grad(half), (x,), (v,))[1])(x, np.ones_like(x))
    np.testing.assert_array_equal(product[..., -1], losses.inside(p))
    np.testing.assert_array_equal(product[..., :-1], 0)


@pytest.mark.rare("1.0")
@pytest.mark.parametrize("clamp", [-1.0, 0.125])
def test_masked_loss_that_is_nan(kernel, clamp):
    """Forward over reverse it stays 0, and the others are right."""
    p = small(losses.RNNT)
    spoilt = p._replace(logits=p.logits.copy())
    spoilt.logits[3, 1, 1, 1] = np.nan
    v = np.random.default_rng(5).normal(size=p.logits.shape)
    gradient = gradient_of(losses.RNNT, spoilt, kernel, clamp=clamp)
    made = jax.jit(lambda x, w: jax.jvp(lambda x: gradient(x, w), (x,), (v,))[1])(spoilt.logits, WEIGHTS)
    np.testing.assert_allclose(made, expected(losses.RNNT, p, WEIGHTS, v, 0 * WEIGHTS, clamp=clamp)[0], atol=1e-8)


@pytest.mark.slow
def test_leaf_beside_a_masked_loss_that_is_nan(kernel):
    """What sequences share gets nothing from it, in forward over reverse too."""
    p = small(losses.RNNT)
    spoilt = p.logits.copy()
    spoilt[3, 1, 1, 1] = np.nan
    v = np.random.default_rng(5).normal(size=p.logits.shape)

    @jax.jit
    def run(x, penalty):
        call = lambda x, d: losses.RNNT(x, *p[1:], delay_penalty=d, reduction="none", implementation=kernel)
        gradient = lambda x: jax.vjp(lambda d: call(x, d), penalty)[1](jnp.asarray(WEIGHTS))[0]
        return jax.jvp(gradient, (x,), (v,))[1]

    mixed = slope(lambda d: losses.RNNT.expected(p, delay_penalty=d)[1], 0.25, 1.0)
    np.testing.assert_allclose(run(spoilt, np.float64(0.25)), (each(WEIGHTS) * mixed * v).sum(), atol=1e-8)


def test_masked_scores_that_are_nan(kernel):
    """The same for am + lm, whose scales the sequences share: as without that sequence."""
    rng = np.random.default_rng(5)
    am, lm = rng.normal(size=(2, 4, 6)), rng.normal(size=(2, 3, 6))
    labels, lengths = np.array([[1, 2]] * 2), (np.array([4, 4]), np.array([2, 2]))
    spoilt = am.copy()
    spoilt[1, 0, 0] = np.nan

    def product(am, lm, *rest):
        def loss(am, lm, scale):
            logits = jax_rnnt.AdditiveLogits(am, lm, scale, 0.1)
            losses = jax_rnnt.RNNTLoss(reduction="none")(logits, *rest)
            return jnp.where(jnp.isnan(losses), 0, losses).sum()

        arrays = am, lm, np.float64(0.2)
        return jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, tuple(map(jnp.ones_like, arrays)))[1]

    made = jax.jit(product)(spoilt, lm, labels, *lengths)
    alone = jax.jit(product)(am[:1], lm[:1], labels[:1], *(x[:1] for x in lengths))
    for x, y in zip(made[:2], alone[:2], strict=True):
        np.testing.assert_allclose(x, np.concatenate([y, np.zeros_like(y)]), atol=1e-12)
    np.testing.assert_allclose(made[2], alone[2], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["shard_map", "explicit"])
def test_on_a_mesh(implementation, devices, split):
    """Each device has a sequence."""
    p = small(losses.RNNT)
    v, dw = directions(p, np.float64, 1.0)
    operands = p.logits, WEIGHTS, v, dw, *p[1:]
    spec = jax.sharding.PartitionSpec("data")

    def run(x, w, v, dw, *rest):
        return both_modes(gradient_of(losses.RNNT, (x, *rest), implementation))(x, w, v, dw)

    with meshes.mesh_of(devices[:4], split, (4,)) as mesh:
        if split == "explicit":
            operands = jax.device_put(operands, jax.sharding.NamedSharding(mesh, spec))
            tangent, (of_x, of_w) = jax.jit(run)(*operands)
        else:
            tangent, (of_x, of_w) = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(*operands)
    forward, _, unit = expected(losses.RNNT, p, WEIGHTS, v, dw)
    np.testing.assert_allclose(tangent, forward, atol=1e-8)
    np.testing.assert_allclose(of_x, expected(losses.RNNT, p, WEIGHTS, v, 0 * dw)[0], atol=1e-8)
    np.testing.assert_allclose(of_w, unit, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("question", ["latency", "posteriors"])
def test_questions(question, implementation):
    """Second derivatives of the other questions, against slopes of enumerated gradients."""
    p = small(losses.RNNT)
    direction = np.random.default_rng(6).normal(size=losses.inside(p).shape) * losses.inside(p)
    frame = np.arange(3.0)[None, :, None]

    def of_label(label):
        if question == "posteriors":
            return (label * direction).sum()
        return (((frame + 1) * label).sum((-1, -2)) / np.maximum(p.target_lengths, 1.0)).sum() / 4

    def got(x):
        loss = jax_rnnt.RNNTLoss(implementation=implementation)
        if question == "latency":
            return loss.latency(x, *p[1:])
        return (loss.posteriors(x, *p[1:])[1] * direction).sum()

    def expected(x):
        return of_label(-jax.grad(lambda s: enumerated(p)(x, s).sum())(jnp.zeros(direction.shape)))

    v = np.random.default_rng(7).normal(size=p.logits.shape)
    product = lambda call: jax.jit(lambda x: jax.jvp(jax.grad(call), (x,), (v,))[1])(p.logits)
    np.testing.assert_allclose(product(got), product(expected), atol=1e-11)
