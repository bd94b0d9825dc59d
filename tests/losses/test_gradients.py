"""Is the gradient the right one: through the softmax, every option, every reduction and every cotangent?"""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
import reference_numpy as truth

WINDOWS = np.array(
    [
        [[0, 2], [1, 4], [1, 6], [3, 6]],
        [[0, 3], [0, 1], [9, 3], [0, 0]],
        [[5, 1]] * 4,
        [[0, 1], [0, 9], [2, 3], [-5, -4]],
    ]
)

OPTIONS = {
    "plain": {},
    "fastemit": {"fastemit_lambda": 0.7},
    "clamp": {"clamp": 0.1},
    "delay_penalty": {"delay_penalty": 0.4},
    "windows": {"label_windows": WINDOWS.astype(np.int32)},
    "fastemit_clamp": {"fastemit_lambda": 0.7, "clamp": 0.1},
    "all": {"fastemit_lambda": 0.3, "clamp": 0.2, "delay_penalty": 0.1, "label_windows": WINDOWS.astype(np.int32)},
}


@pytest.mark.rare("reference-windows")
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(loss, implementation, options, fused):
    """Each option against float64, with arbitrary windows beyond the lengths, float32, and a blank amid the classes."""
    for dtype, blank in ((np.float64, -1), (np.float32, 4)):
        p = losses.poisoned(losses.problem(loss=loss, dtype=dtype))
        got = losses.evaluate(loss, p, implementation, fused_log_softmax=fused, blank=blank, **options)
        expected = loss.expected(p, fused_log_softmax=fused, blank=blank, **_as_float32(options))
        losses.assert_matches(got, expected, dtype, 11, scale=1 + options.get("fastemit_lambda", 0))


def _as_float32(options):
    """`evaluate` passes the floats as float32; the truth takes the same values."""
    return {k: float(np.float32(v)) if isinstance(v, float) else v for k, v in options.items()}


@pytest.mark.rare("reference-none", "reference-sum", "reference-mean_target", "reference-mean_volume")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum", "mean_target", "mean_volume"])
def test_reductions(loss, implementation, reduction):
    """Value and gradient; FastEmit and clamp act before the reduction's weights."""
    p = losses.problem(loss=loss)
    options = {"clamp": 0.15, "fastemit_lambda": 0.5}

    @jax.jit
    def run(logits):
        def reduced(x):
            out = loss(x, *p[1:], reduction=reduction, implementation=implementation, **options)
            return out.sum(), out

        return jax.grad(reduced, has_aux=True)(logits)

    gradient, value = run(p.logits)
    expected, per_sequence = loss.expected(p, **options)
    expected, weights = truth.reduce(expected, p.target_lengths, reduction)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    np.testing.assert_allclose(gradient, weights[:, None, None, None] * per_sequence, atol=1e-13)


def test_reduction_of_empty_targets_is_finite(loss, implementation):
    """U_b = 0 for all: mean_target and mean_volume divide by 1."""
    p = losses.problem(3, 4, 2, 5, loss=loss, lengths=([4, 3, 1], [0, 0, 0]))
    expected, _ = loss.expected(p)
    for reduction, value in (
        ("mean_target", expected.mean()),
        ("mean_volume", expected.sum()),
        ("mean", expected.mean()),
    ):
        np.testing.assert_allclose(loss(*p, reduction=reduction, implementation=implementation), value, rtol=1e-13)


@pytest.mark.family("layouts")
def test_cotangents(loss, implementation):
    """Positive, negative, zero and large cotangents multiply the clamped gradient of their own sequence."""
    p = losses.problem(loss=loss)
    cotangents = np.array([2.0, -3.0, 0.0, 1e6])
    _, expected = loss.expected(p, clamp=0.1)

    @jax.jit
    def pull(logits, cotangents):
        call = lambda x: loss(x, *p[1:], clamp=0.1, reduction="none", implementation=implementation)
        return jax.vjp(call, logits)[1](cotangents)[0]

    gradient = pull(p.logits, cotangents)
    np.testing.assert_allclose(gradient, cotangents[:, None, None, None] * expected, rtol=1e-9, atol=1e-12)
    assert not np.asarray(gradient[2]).any()


@pytest.mark.rare("reference-70", "reference-300")
@pytest.mark.family("band")
@pytest.mark.parametrize("classes", [9, 70, 300])  # short and long rows of the kernels
@pytest.mark.parametrize("clamp", [-1.0, 0.1])
def test_cotangents_that_are_not_finite(loss, implementation, classes, clamp):
    """Exact zeros stay 0: sequences without a path, impossible classes, padding."""
    if implementation == "reference" and clamp < 0:
        pytest.skip("plain automatic differentiation: 0 times infinity is NaN")
    p = losses.problem(5, V=classes, loss=loss, lengths=([7, 5, 6, 0, 7], [4, 2, 0, 3, 4]))
    p.logits[..., 1] = -np.inf
    p = p._replace(targets=np.maximum(p.targets, 2))
    cotangents = np.array([np.inf, np.nan, -np.inf, np.inf, 2.0])
    values, unit = loss.expected(p, clamp=clamp)
    assert np.isinf(values[3]) and not unit[3].any() and (unit[:3] == 0).any() and np.isfinite(unit).all()
    with np.errstate(invalid="ignore"):
        expected = np.where(unit == 0, 0, unit * cotangents[:, None, None, None])

    @jax.jit
    def pull(logits, cotangents):
        call = lambda x: loss(x, *p[1:], clamp=clamp, reduction="none", implementation=implementation)
        return jax.vjp(call, logits)[1](cotangents)[0]

    np.testing.assert_allclose(pull(p.logits, cotangents), expected, atol=1e-12)


def test_clamp_bounds_both_sides(loss, implementation):
    """grad(3 * loss) lies in [-3c, 3c] and reaches both ends."""
    p = losses.problem(loss=loss, scale=6.0)
    total = lambda x: 3 * loss(x, *p[1:], clamp=0.05, reduction="sum", implementation=implementation)
    gradient = np.asarray(jax.grad(total)(jnp.asarray(p.logits)))
    np.testing.assert_allclose([gradient.min(), gradient.max()], [-0.15, 0.15], rtol=1e-6)


@pytest.mark.parametrize("clamp", [0.0, -1.0, -0.01])
def test_clamp_off(loss, implementation, clamp):
    p = losses.problem(loss=loss)
    losses.assert_same_bits(
        losses.evaluate(loss, p, implementation, clamp=clamp)[1], losses.evaluate(loss, p, implementation)[1]
    )


@pytest.mark.family("layouts")
def test_fastemit_leaves_the_value_and_the_row_sums(loss, implementation):
    p = losses.problem(loss=loss)
    plain, _ = losses.evaluate(loss, p, implementation)
    value, gradient = losses.evaluate(loss, p, implementation, fastemit_lambda=2.0)
    losses.assert_same_bits(value, plain)
    for head in losses.heads(loss, gradient):
        np.testing.assert_allclose(head.sum(-1), 0, atol=1e-13)


def test_fastemit_is_zero_by_default(loss, implementation):
    p = losses.problem(loss=loss)
    call = lambda **k: jax.grad(lambda x: loss(x, *p[1:], implementation=implementation, **k))(jnp.asarray(p.logits))
    losses.assert_same_bits(call(), call(fastemit_lambda=0.0, clamp=-1.0, delay_penalty=0.0))


@pytest.mark.family("layouts")
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
def test_slope(loss, implementation, fused):
    """The gradient is the slope of the value, with delay penalty and windows; FastEmit and clamp are left out."""
    p = losses.problem(2, 3, 2, 4, loss=loss, scale=1.0, lengths=([3, 3], [2, 1]))
    windows = np.array([[[0, 1], [1, 2]], [[0, 2], [7, 7]]], np.int32)
    options = {} if fused else {"delay_penalty": 0.3, "label_windows": windows}
    options |= {"fused_log_softmax": fused, "implementation": implementation}
    call = jax.jit(lambda x: loss(x, *p[1:], reduction="sum", **options))
    chex.assert_numerical_grads(call, (p.logits,), order=1, modes=("rev",), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss_value", [True, False], ids=["value_and_grad", "grad"])
def test_inplace_changes_nothing(loss, kernel, loss_value):
    """`inplace` changes memory but no number, even if the logits are used again afterwards."""
    p = losses.problem(loss=loss, dtype=np.float32)

    def run(inplace):
        def total(x):
            x = x * 1.5
            value = loss(x, *p[1:], reduction="sum", clamp=0.3, implementation=kernel, inplace=inplace)
            return value, x

        (value, used), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(p.logits)
        return (value, used, gradient) if loss_value else (used, gradient)

    for a, b in zip(run(True), run(False), strict=True):
        losses.assert_same_bits(a, b)


@pytest.mark.family("layouts")
def test_logits_survive_their_gradient(loss, implementation):
    """Writing in place must not change an array that is still in use: the argument, a second loss, a later use."""
    p, other = losses.problem(loss=loss, dtype=np.float32), loss.blank(0)
    logits = jnp.asarray(p.logits)

    def total(x):
        first = loss(x, *p[1:], reduction="sum", implementation=implementation)
        second = loss(x, *p[1:], reduction="sum", blank=other, implementation=implementation)
        return first + second + (x**2).sum()

    gradient = jax.jit(jax.grad(total))(logits)
    expected = sum(loss.expected(p, blank=b)[1] for b in (-1, other)) + 2 * p.logits.astype(np.float64)
    np.testing.assert_allclose(gradient, expected, atol=3 * losses.tolerance(np.float32, 11))
    losses.assert_same_bits(logits, p.logits)


def test_vjp_called_twice(loss, implementation):
    p = losses.problem(loss=loss)
    call = lambda x: loss(x, *p[1:], reduction="none", implementation=implementation)
    value, pull = jax.vjp(call, jnp.asarray(p.logits))
    first, second = pull(jnp.ones_like(value))[0], pull(2 * jnp.ones_like(value))[0]
    losses.assert_same_bits(2 * first, second)


def test_gradient_reaches_parameters(loss, implementation):
    """logits = joint @ weight, the usual producer: gradients of both factors."""
    p = losses.problem(loss=loss)
    rng = np.random.default_rng(3)
    hidden, weight = rng.normal(size=(*p.logits.shape[:3], 5)), rng.normal(size=(5, p.logits.shape[-1]))

    @jax.jit
    def run(hidden, weight):
        call = lambda h, w: loss(h @ w, *p[1:], reduction="sum", implementation=implementation)
        return jax.grad(call, argnums=(0, 1))(hidden, weight)

    _, expected = loss.expected(p._replace(logits=hidden @ weight))
    to_hidden, to_weight = run(hidden, weight)
    np.testing.assert_allclose(to_hidden, expected @ weight.T, atol=1e-12)
    np.testing.assert_allclose(to_weight, np.einsum("btuh,btuv->hv", hidden, expected), atol=1e-11)


def test_integer_arguments_have_no_gradient(loss, implementation):
    p = losses.problem(loss=loss)
    call = lambda *args: loss(*args, reduction="sum", implementation=implementation)
    _, *others = jax.grad(call, argnums=(0, 1, 2, 3), allow_int=True)(*map(jnp.asarray, p))
    for gradient in others:
        assert gradient.dtype == jax.dtypes.float0


@pytest.mark.family("layouts")
def test_label_equal_to_blank(loss, implementation):
    """A class that is both blank and label gets both terms."""
    blank = loss.blank(0)
    for labels in itertools.product([0, blank or 1], repeat=2):
        p = losses.problem(1, 4, 2, 5, loss=loss, lengths=([4], [2]))._replace(targets=np.array([labels], np.int32))
        got = losses.evaluate(loss, p, implementation, blank=blank, fastemit_lambda=0.25)
        losses.assert_matches(got, loss.expected(p, blank=blank, fastemit_lambda=0.25), np.float64, 6, scale=1.25)
