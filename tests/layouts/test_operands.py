"""Do learned numbers and arrays get the slope of the loss as gradient, on kernels and in plain JAX?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from meshes import mesh_of
from pages import code
from slopes import CLOSE, WEIGHTS, B, T, U, V, assert_slopes, heads, slope, small


def weighted(call):
    """Compiled gradient of the weighted sum of losses, for all arguments."""

    def total(*arguments):
        return jnp.sum(call(*arguments) * WEIGHTS)

    return jax.jit(lambda *arguments: jax.grad(total, tuple(range(len(arguments))))(*arguments))


SCALARS = {"delay_penalty": 0.3, "sigma": 0.07}


def scalars_of(loss):
    return SCALARS if loss.name in ("multiblank", "tdt") else {"delay_penalty": SCALARS["delay_penalty"]}


def expected(loss, p, **options):
    """Losses in float64; `sigma` is an option of the emission."""
    return truth.loss_and_gradient(*p, **loss.truth, **options)


@pytest.mark.family
def test_scalars(loss, implementation):
    """Gradients of scalars, beside that of the logits, with weights other than one."""
    p, scalars = small(loss), scalars_of(loss)

    def call(logits, scalars):
        return loss(logits, *p[1:], **scalars, reduction="none", implementation=implementation)

    gradient = weighted(call)
    zeros = dict.fromkeys(scalars, 0.0)  # an array of 0 switches nothing off
    for problem, options in ((p, scalars), (p, zeros), (p._replace(logits=0 * p.logits), zeros)):
        to_logits, got = gradient(problem.logits, {k: jnp.asarray(x) for k, x in options.items()})
        for name, value in options.items():
            along = functools.partial(
                lambda x, name, q, o: expected(loss, q, **(o | {name: x}))[0], name=name, q=problem, o=options
            )
            np.testing.assert_allclose(got[name], slope(along, value) @ WEIGHTS, **CLOSE, err_msg=name)
        wanted = expected(loss, problem, **options)[1] * WEIGHTS[:, None, None, None]
        np.testing.assert_allclose(to_logits, wanted, atol=1e-12)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions_and_vmap(implementation, reduction):
    """For TDT: a scalar for each element of a vmap, under jit, times a cotangent."""
    loss = losses.TDT
    p = small(loss)

    def call(penalty, sigma):
        return 3 * loss(*p, delay_penalty=penalty, sigma=sigma, reduction=reduction, implementation=implementation)

    penalties, sigmas = np.array([0.3, -0.2]), np.array([0.07, 0.0])
    got = jax.jit(jax.vmap(jax.grad(call, (0, 1))))(penalties, sigmas)
    share = 3 / B if reduction == "mean" else 3
    for b in range(2):
        along = lambda d, s: expected(loss, p, delay_penalty=d, sigma=s)[0].sum() * share
        np.testing.assert_allclose(got[0][b], slope(lambda d: along(d, sigmas[b]), penalties[b]), **CLOSE)
        np.testing.assert_allclose(got[1][b], slope(lambda s: along(penalties[b], s), sigmas[b]), **CLOSE)


def test_without_jit_and_of_float32(implementation):
    """A Python float, a NumPy scalar and a float32 array give the same numbers."""
    p = small().astype(np.float32)
    call = lambda d: losses.RNNT(*p, delay_penalty=d, reduction="sum", implementation=implementation)
    zeros = 0.0, np.float32(0), jnp.float32(0)
    for at, penalties in ((0.25, (0.25, np.float32(0.25), jnp.float32(0.25))), (0.0, zeros)):
        wanted = slope(lambda d: expected(losses.RNNT, p, delay_penalty=d)[0].sum(), at)
        for penalty in penalties:
            np.testing.assert_allclose(jax.grad(call)(penalty), wanted, rtol=1e-5)


def test_clamp_is_for_logits(implementation):
    """It limits the gradients of logits; the gradient of a scalar stays the slope."""
    p = small()

    def call(logits, penalty):
        return losses.RNNT(
            logits, *p[1:], delay_penalty=penalty, clamp=0.05, reduction="none", implementation=implementation
        )

    to_logits, got = weighted(call)(p.logits, 0.3)
    np.testing.assert_allclose(
        to_logits, expected(losses.RNNT, p, delay_penalty=0.3, clamp=0.05)[1] * WEIGHTS[:, None, None, None], atol=1e-12
    )
    along = lambda d: expected(losses.RNNT, p, delay_penalty=d)[0] @ WEIGHTS
    np.testing.assert_allclose(got, slope(along, 0.3), **CLOSE)


@pytest.mark.family
def test_settings_have_no_gradient(loss, implementation):
    """Clamp, FastEmit and TDT's coin act on gradients; their own gradient is exactly 0, and no error, also at 0."""
    p = small(loss)
    settings = {"clamp": 0.1, "fastemit_lambda": 0.5}
    extra = {"key": jax.random.key(0)} if loss is losses.TDT else {}
    settings |= {"omega": 0.5} if extra else {}

    def call(settings, logits, penalty):
        options = {**settings, **extra, "delay_penalty": penalty, "reduction": "none"}
        return loss(logits, *p[1:], **options, implementation=implementation)

    gradient = weighted(call)
    got, *_ = gradient({k: jnp.asarray(x) for k, x in settings.items()}, p.logits, 0.0)
    assert all(x == 0 for x in got.values()), got
    # Arrays of 0 leave all other gradients as they are.
    _, to_logits, to_penalty = gradient({k: jnp.zeros(()) for k in settings}, p.logits, 0.0)
    np.testing.assert_allclose(to_logits, expected(loss, p)[1] * WEIGHTS[:, None, None, None], atol=1e-12)
    along = lambda d: expected(loss, p, delay_penalty=d)[0] @ WEIGHTS
    np.testing.assert_allclose(to_penalty, slope(along, 0.0), **CLOSE)


# ------------------------------------------------------------------------------------------------------ simple loss


def simple_truth(p, am, lm, lm_only, am_only, unigram, penalty):
    """Losses [B] of the formula in the docstring of `simple_rnnt_loss`, dense, in float64 NumPy."""
    out = np.zeros(B)
    for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths, strict=True)):
        joint = truth.log_softmax(am[b, :n, None] + lm[b, None, : m + 1])
        lm_alone = truth.log_softmax(lm[b, : m + 1])
        p_v = np.exp(lm_alone).mean(0) if unigram is None else unigram[b]
        am_alone = am[b, :n] + np.log(p_v) - np.log((np.exp(am[b, :n]) * p_v).sum(-1, keepdims=True))
        mixed = (1 - lm_only - am_only) * joint + lm_only * lm_alone[None] + am_only * am_alone[:, None]
        label = np.full((n, m + 1), -np.inf)
        for u in range(m):
            label[:, u] = mixed[:, u, p.targets[b, u]] + penalty * ((n - 1) / 2 - np.arange(n))
        out[b] = -truth.log_likelihood(truth.STANDARD, {"blank": mixed[..., -1], "label": label}, n, m)
    return out


def test_simple_loss(implementation):
    """am, lm, both scales, the unigram and the delay penalty."""
    implementation = None if implementation == "kernel" else implementation  # its matrix products have no kernel
    p, (am, lm) = small(), heads()
    unigram = np.exp(np.random.default_rng(1).normal(size=(B, V)))  # any weights
    leaves = am, lm, np.array(0.25), np.array(0.15), unigram, np.array(0.3)

    def call(am, lm, lm_only, am_only, unigram, penalty):
        return jax_rnnt.simple_rnnt_loss(
            am, lm, *p[1:], lm_only_scale=lm_only, am_only_scale=am_only, unigram=unigram, delay_penalty=penalty,
            reduction="none", implementation=implementation,
        )  # fmt: skip

    along = lambda *leaves: simple_truth(p, *leaves) @ WEIGHTS
    np.testing.assert_allclose(jax.jit(call)(*leaves), simple_truth(p, *leaves), rtol=1e-12)
    assert_slopes(weighted(call)(*leaves), along, leaves)


def test_simple_loss_with_its_own_unigram(implementation):
    """The unigram of a sequence is also a function of lm."""
    implementation = None if implementation == "kernel" else implementation
    p, (am, lm) = small(), heads()

    def call(am, lm):
        return jax_rnnt.simple_rnnt_loss(
            am, lm, *p[1:], lm_only_scale=0.25, am_only_scale=0.15, reduction="none", implementation=implementation
        )

    along = lambda am, lm: simple_truth(p, am, lm, 0.25, 0.15, None, 0.0) @ WEIGHTS
    assert_slopes(weighted(call)(am, lm), along, (am, lm))


def test_smoothing_of_k2(implementation):
    """One unigram of the whole batch, padding included, and the gradient flows through it."""
    implementation = None if implementation == "kernel" else implementation
    p, (am, lm) = small(), heads()

    def call(am, lm):
        return jax_rnnt.simple_rnnt_loss(
            am, lm, *p[1:], lm_only_scale=0.25, am_only_scale=0.15, unigram=jax.nn.softmax(lm).mean((0, 1)),
            reduction="none", implementation=implementation,
        )  # fmt: skip

    def along(am, lm):
        unigram = np.exp(truth.log_softmax(lm)).mean((0, 1))
        return simple_truth(p, am, lm, 0.25, 0.15, [unigram] * B, 0.0)

    np.testing.assert_allclose(jax.jit(call)(am, lm), along(am, lm), rtol=1e-12)
    assert_slopes(weighted(call)(am, lm), lambda *x: along(*x) @ WEIGHTS, (am, lm))


# ------------------------------------------------------------------------------------- operands of a loss of one's own


def test_operands_of_a_step(implementation):
    """The gradient of the docs' risk is the posterior of the label, zero outside the lengths, also under vmap."""
    names, _ = code("docs/losses.md", "class BypassLoss")
    names, _ = code("docs/losses.md", "class RiskLoss", **names)
    p = small()
    risk = np.random.default_rng(0).normal(size=(2, B, T, U + 1))  # two risks for vmap
    risk[1] = 0

    def posterior(risk):
        out = np.zeros(risk.shape)
        for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths, strict=True)):
            topology, arcs = losses.RNNT.lattice(p.logits[b, :n, : m + 1], p.targets[b, :m])
            arcs["label"] = arcs["label"] - risk[b, :n, : m + 1]
            out[b, :n, : m + 1] = truth.posteriors(topology, arcs, n, m)[1]["label"]
        return out

    wanted = np.stack([posterior(x) for x in risk]) * WEIGHTS[:, None, None]
    call = lambda x: names["RiskLoss"](risk=x, reduction="none", implementation=implementation)(*p)
    total = lambda x: jnp.sum(call(x) * WEIGHTS)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(total)))(risk), wanted, atol=1e-12)


def test_a_learned_scale_of_an_operand(implementation):
    """The risk is a function of parameters, as users write it."""
    names, _ = code("docs/losses.md", "class BypassLoss")
    names, _ = code("docs/losses.md", "class RiskLoss", **names)
    p = small()
    frame = np.broadcast_to(np.arange(T)[:, None] - (p.logit_lengths[:, None, None] - 1) / 2, (B, T, U + 1))
    loss = functools.partial(names["RiskLoss"], reduction="sum", implementation=implementation)
    gradient = jax.jit(jax.grad(lambda scale: loss(risk=scale * frame)(*p)))
    for scale in (0.3, 0.0):
        wanted = slope(lambda d: expected(losses.RNNT, p, delay_penalty=d)[0].sum(), scale)
        np.testing.assert_allclose(gradient(scale), wanted, **CLOSE)


# ------------------------------------------------------------------------------------------- other ways to the loss


def test_in_tiles(implementation):
    """`joint_rnnt_loss`: gradients of scalars bound in the loss and of weights of the joint."""
    loss = losses.TDT
    p = losses.problem(B, T, U, V, loss=loss, lengths=([4, 3], [2, 1]))
    rng = np.random.default_rng(0)
    encoder, predictor = rng.normal(size=(B, T, 3)), rng.normal(size=(B, U + 1, 3))
    weight, bias = rng.normal(size=(3, V + 3)), rng.normal(size=V + 3)

    def call(weight, bias, penalty, sigma):
        return jax_rnnt.joint_rnnt_loss(
            jax_rnnt.LinearJoint(weight, bias), encoder, predictor, *p[1:],
            loss=loss.value(sigma=sigma, delay_penalty=penalty, reduction="none", implementation=implementation),
        )  # fmt: skip

    def along(weight, bias, penalty, sigma):
        logits = np.tanh(encoder[:, :, None] + predictor[:, None]) @ weight + bias
        return expected(loss, p._replace(logits=logits), delay_penalty=float(penalty), sigma=float(sigma))[0]

    leaves = weight, bias, np.array(0.3), np.array(0.07)
    assert_slopes(weighted(call)(*leaves), lambda *x: along(*x) @ WEIGHTS, leaves)


# --------------------------------------------------------------------------------------------------------- isolation


def spoil(x, index):
    x = np.array(x)
    x[index] = np.nan
    return x


def shared(name, p, implementation):
    """(losses of (shared, own), shared arrays, own arrays of the sequences, an index into each own array to spoil)"""
    rest, rng = p[1:], np.random.default_rng(5)
    options = {"reduction": "none", "implementation": implementation}
    am, lm = rng.normal(0, 1, (B, T, V)), rng.normal(0, 1, (B, U + 1, V))
    place = (1, 2, 0)  # inside the lengths of the second sequence

    def dense(shared, own, rest=rest):
        return jax_rnnt.tdt_loss(*own, *rest, [1, 2], **shared, clamp=clamp, **options)

    def simple(shared, own, rest=rest):
        return jax_rnnt.simple_rnnt_loss(*own, *rest, **shared, **options)

    def joint(shared, own, rest=rest):
        linear = jax_rnnt.LinearJoint(shared["weight"])
        return jax_rnnt.joint_rnnt_loss(linear, *own, *rest, **options)

    clamp = 0.5 if name == "clamped" else -1.0
    scalars = {"delay_penalty": 0.3, "sigma": 0.1}
    smoothing = {"lm_only_scale": 0.25, "am_only_scale": 0.1, "unigram": np.full(V, 1 / V), "delay_penalty": 0.2}
    return {
        "dense": (dense, scalars, (p.logits,), [place]),
        "clamped": (dense, scalars, (p.logits,), [place]),
        "simple": (simple, smoothing, (am, lm), [place, (1, 1, 3)]),
        "joint": (joint, {"weight": rng.normal(0, 1, (V, V))}, (am, lm), [place, (1, 1, 3)]),
    }[name]


@pytest.mark.rare("reference", "simple")
@pytest.mark.parametrize("name", ["dense", pytest.param("clamped", marks=pytest.mark.slow), "simple", "joint"])
def test_nan_reaches_nothing_shared(implementation, name):
    """A sequence with NaN inside changes no gradient of the others, whether its loss is masked or not."""
    p = losses.problem(B, T, U, V, scale=1.0, lengths=([4, 3], [2, 1]))
    call, shared_, own, places = shared(
        name, p, None if name == "simple" and implementation == "kernel" else implementation
    )
    one = tuple(x[:1] for x in own), tuple(x[:1] for x in p[1:])
    wanted = jax.grad(lambda s, x: call(s, x, one[1])[0], (0, 1))(shared_, one[0])

    for i, place in enumerate(places):
        bad = tuple(spoil(x, place) if i == j else x for j, x in enumerate(own))

        @functools.partial(jax.jit, static_argnums=2)
        def total(shared, own, masked):
            values = call(shared, own)
            return jnp.sum(jnp.where(jnp.isfinite(values), values, 0) if masked else values), values

        for masked in (True, False):
            (of_shared, of_own), values = jax.grad(total, (0, 1), has_aux=True)(shared_, bad, masked)
            np.testing.assert_array_equal(np.isnan(values), [False, True])
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), of_shared, wanted[0])
            for got, alone in zip(of_own, wanted[1], strict=True):
                np.testing.assert_allclose(got[:1], alone, atol=1e-12)
                if masked and implementation == "kernel":
                    assert not np.any(got[1])
                else:
                    assert np.isnan(got[1]).any()


# ---------------------------------------------------------------------------------------------------------- sharding


@pytest.mark.rare("reference")
@pytest.mark.parametrize("kind", ["shard_map", "auto", pytest.param("explicit", marks=pytest.mark.slow)])
def test_on_a_mesh(kind, devices, implementation):
    """A loss is replicated, its batch is split: the gradient of its leaves is the sum over devices."""
    p = losses.problem(16, loss=losses.TDT)
    loss = losses.TDT.value(sigma=0.1, delay_penalty=0.3, implementation=implementation)
    total = lambda loss, p: loss(*p)
    wanted = jax.jit(jax.grad(total))(loss, p)
    whole, spec = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    with mesh_of(devices, "explicit" if kind == "explicit" else "auto") as mesh:
        if kind == "shard_map":
            mean = lambda loss, p: jax.lax.pmean(loss(*p), "data")
            total = jax.shard_map(mean, mesh=mesh, in_specs=(whole, spec), out_specs=whole)
        placed = jax.tree.map(lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)), p)
        got = jax.jit(jax.grad(total))(loss, placed)
    for leaf in ("sigma", "delay_penalty"):
        np.testing.assert_allclose(getattr(got, leaf), getattr(wanted, leaf), rtol=1e-12)


def test_integers_are_numbers_too():
    """An option given as an int is a float leaf: it has a gradient, and a float in its place traces nothing."""
    p = losses.problem()
    run = jax.jit(lambda loss: loss(*p))
    gradient = jax.grad(run)(jax_rnnt.RNNTLoss(delay_penalty=1, fastemit_lambda=2))
    assert gradient == jax.grad(run)(jax_rnnt.RNNTLoss(delay_penalty=1.0, fastemit_lambda=2.0))
    run(jax_rnnt.RNNTLoss(delay_penalty=1)), run(jax_rnnt.RNNTLoss(delay_penalty=2.0))
    assert run._cache_size() == 1
    assert repr(jax_rnnt.RNNTLoss(clamp=-1)) == "RNNTLoss()"
