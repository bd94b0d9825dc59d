"""Is a sum over nodes that of all logits, for any layouts side by side? Is what has no weight left alone, and skipped?

The truth is another formula on all logits, in plain JAX.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import batches
import compare
import hlo
import layout_table
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits, sum_over_nodes
from layout_table import Network, closure, linear
from meshes import at, mean_over_devices, mesh_of

pytestmark = pytest.mark.no_kernel
EXACT = 1e-12


def lengths(p):
    return {"logit_lengths": p.logit_lengths, "target_lengths": p.target_lengths}


def plain(x):
    """[..., V] -> [...]: log of the sum of exp."""
    peak = jax.lax.stop_gradient(jnp.max(x, -1, keepdims=True))
    return jnp.log(jnp.sum(jnp.exp(x - peak), -1)) + peak[..., 0]


def entropy(rows):
    x = jax.nn.log_softmax(rows)
    return -jnp.sum(jnp.exp(x) * x, -1)


def entropy_of_all(x):
    total = plain(x)
    return total - jnp.sum(jnp.exp(x - total[..., None]) * x, -1)


def total_of_all(values, weights, counts):
    return jnp.sum(jnp.where(counts & (weights != 0), weights * values, 0), (1, 2))


def some_weights(p, seed=0):
    """Random, 0 in some nodes and in a whole frame."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=p.logits.shape[:3]) * (rng.random(p.logits.shape[:3]) < 0.7)
    weights[:, 2] = 0
    return weights


def mixed(rows, *others, scale=1.0):
    """Of the rows of one or two, and labels."""
    *others, labels = others
    of_label = jnp.sum(jax.nn.one_hot(labels, rows.shape[-1]) * jax.nn.log_softmax(rows), -1)
    of_label = jnp.where(labels == -1, 10.0, of_label)  # after the last label
    more = jnp.tanh(others[0][:, 0] * others[0][:, -1]) if others else 1.0
    return scale * entropy(rows) * more - of_label


def mixed_of_all(p, x, *others, scale=1.0):
    hot, last = np.zeros(p.logits.shape), np.arange(p.logits.shape[2]) == p.target_lengths[:, None, None]
    for b, m in enumerate(p.target_lengths):
        for u in range(m):
            hot[b, :, u, p.targets[b, u]] = 1
    more = jnp.tanh(others[0][..., 0] * others[0][..., -1]) if others else 1.0
    return scale * entropy_of_all(x) * more - jnp.sum(hot * (x - plain(x)[..., None]), -1) - 10.0 * last


def check(got, expected, arguments, cotangent=(1.0, -2.0, 0.5, 3.0), limit=EXACT):
    """Values and gradients of two functions of the arguments."""

    def step(function):
        return jax.jit(lambda *x: (function(*x), jax.grad(lambda *y: function(*y) @ jnp.array(cotangent), every)(*x)))

    every = tuple(range(len(arguments)))
    found = step(got)(*arguments)
    compare.assert_close(found, step(expected)(*arguments), limit)
    return found


# --------------------------------------------------------------------------------------------------------- layouts
SIDE_BY_SIDE = ("AdditiveLogits", "JointLogits"), ("PackedLogits", "PackedLogits"), ("BandLogits",)


@pytest.mark.quick("BandLogits")
@pytest.mark.parametrize("names", SIDE_BY_SIDE, ids="-".join)
def test_layouts(names):
    """V of the two differs."""
    problems = [batches.problem(V=V, scale=1.0, seed=i) for i, V in zip(range(2), (9, 5))]
    problems = [x._replace(targets=problems[0].targets) for x in problems][: len(names)]
    p, weights = problems[0], some_weights(problems[0])
    makers = [layout_table.layout(x, name) for x, name in zip(problems, names)]
    arrays = [layout_table.arrays(x, name) for x, name in zip(problems, names)]
    counts = batches.inside(p)
    if "BandLogits" in names:
        counts &= layout_table.in_band(p)

    def got(arrays, weights):
        made = [make(*own) for make, own in zip(makers, arrays)]
        return sum_over_nodes(mixed, *made, **lengths(p), weights=weights, targets=p.targets)

    def of_all(arrays, weights):
        dense = [own[0] if n == "BandLogits" else layout_table.dense(p, n)(*own) for own, n in zip(arrays, names)]
        return total_of_all(mixed_of_all(p, *dense), weights, counts)

    check(got, of_all, (arrays, weights))


def test_joint_networks():
    """Two, with parameters of their own, in several tiles; and a scale that the function closes over."""
    a, b = Network(), Network(seed=1)
    p, weights = a.problem, some_weights(a.problem, 3)

    def got(first, second, rows, others, scale, weights):
        logits = JointLogits(linear(*first), *rows, 64), JointLogits(closure(*second), *others, 128)
        function = functools.partial(mixed, scale=scale)
        return sum_over_nodes(function, *logits, **lengths(p), weights=weights, targets=p.targets)

    def of_all(first, second, rows, others, scale, weights):
        made = [
            jnp.tanh(e[:, :, None] + q[:, None]) @ w + c[None, None, None]
            for (w, c), (e, q) in ((first, rows), (second, others))
        ]
        return total_of_all(mixed_of_all(p, *made, scale=scale), weights, batches.inside(p))

    check(got, of_all, (a.parameters, b.parameters, a.rows, b.rows, np.array(0.7), weights), limit=1e-11)


# --------------------------------------------------------------------------------------- what is not read, and NaN
def singular(rows):
    """Its derivative is infinite where the row is constant."""
    return jnp.sqrt(jnp.sum((rows - jnp.mean(rows, -1, keepdims=True)) ** 2, -1))


@pytest.mark.slow
def test_nodes_without_weight():
    """Bad rows there change no bit, whatever the function makes of them: nor of shared arrays."""
    p, weights = batches.problem(scale=1.0), some_weights(batches.problem(scale=1.0))
    found = []

    @jax.jit
    def run(x, scale):
        def total(x, scale, weights):
            function = lambda rows: jnp.log(scale) * singular(rows * scale)
            return sum_over_nodes(function, x, **lengths(p), weights=weights).sum()

        return jax.value_and_grad(total, (0, 1, 2))(x, scale, weights)

    for value in (np.nan, np.inf, 0.0, 1.5):
        x = np.where(weights[..., None] == 0, value * np.arange(9) if value == 1.5 else value, p.logits)
        found.append(run(np.where(batches.inside(p)[..., None], x, value * np.ones(9)), 0.7))
    for x in found[:-1]:
        compare.assert_same_bits(x, found[-1])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0]))
    gradient, of_weights = found[0][1][0], found[0][1][2]
    assert not np.any(gradient[weights == 0]) and not np.any(of_weights[weights == 0])
    assert np.abs(of_weights[batches.inside(p) & (weights != 0)]).min() > 1e-3


@pytest.mark.slow
def test_joint_network_without_weight():
    """NaN in frames and columns without weight, and a joint whose derivative is infinite in nodes without weight."""
    network = Network()
    weights = some_weights(network.problem, 5)
    weights[1, :, 1] = 0
    good = network.rows
    bad = [x.copy() for x in good]
    bad[0][:, 2], bad[1][1, 1] = np.nan, np.inf
    # Frame 0 and column 0 add up to 0, where sqrt has no derivative.
    weights[:, 0, 0] = 0

    def run(rows, scale):
        rows = rows[0].at[:, 0].set(-rows[1][:, 0]), rows[1]

        def total(parameters, rows, scale):
            weight, bias = parameters
            sharp = lambda x: jnp.sqrt(jnp.abs(x))
            logits = JointLogits(lambda e, q: sharp(e + q) @ weight + bias, *rows, 64)
            return sum_over_nodes(
                lambda x: scale * entropy(x), logits, **lengths(network.problem), weights=weights
            ).sum()

        return jax.value_and_grad(total, (0, 1, 2))(network.parameters, rows, scale)

    run = jax.jit(run)
    with jax.numpy_rank_promotion("allow"):
        found, expected = (run([*map(jnp.asarray, rows)], 0.7) for rows in (bad, good))
    compare.assert_same_bits(found, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_nan_stays_in_its_sequence():
    """NaN in a node, and lengths or labels out of range."""
    p, name = batches.problem(B=6, scale=1.0), "JointLogits"
    arrays = tuple(x.copy() for x in layout_table.arrays(p, name))
    arrays[0][1, 1] = np.nan
    of_bad = p.targets.copy(), p.target_lengths.copy()
    of_bad[0][3, 0], of_bad[1][5] = 9, p.targets.shape[1] + 1

    @jax.jit
    def run(arrays, scale, cotangent, targets, target_lengths):
        def total(arrays, scale):
            given = {"logit_lengths": p.logit_lengths, "target_lengths": target_lengths, "targets": targets}
            x = layout_table.layout(p, name)(*arrays)
            sums = sum_over_nodes(functools.partial(mixed, scale=scale), x, **given)
            return jnp.sum(jnp.where(cotangent == 0, 0, cotangent * sums)), sums

        return jax.grad(total, (0, 1), has_aux=True)(arrays, scale)

    ones, masked = np.ones(6), np.array([1.0, 0, 1, 0, 1, 0])
    (gradient, of_scale), sums = run(arrays, 0.7, ones, *of_bad)
    (expected, alone), values = run(layout_table.arrays(p, name), 0.7, masked, p.targets, p.target_lengths)
    np.testing.assert_array_equal(np.isnan(sums), masked == 0)
    compare.assert_close((sums[masked == 1], of_scale), (values[masked == 1], alone), EXACT)
    for x, y in zip(gradient, expected):
        np.testing.assert_allclose(x[masked == 1], y[masked == 1], atol=EXACT)
        assert np.isnan(x[1]).any() and not np.any(x[3]) and not np.any(x[5])
    (gradient, _), _ = run(arrays, 0.7, masked, *of_bad)
    compare.assert_close(gradient, expected, atol=EXACT)  # a masked sum that is NaN adds nothing


@pytest.mark.slow
def test_bands_that_differ():
    p = batches.problem(scale=1.0)
    first = layout_table.first_columns(p)
    other = first.copy()
    other[2, 3] += 1
    x = p.logits[:, :, : layout_table.WIDTH]
    sums = sum_over_nodes(lambda a, b: entropy(a) * b[:, 0], BandLogits(x, first), BandLogits(x, other), **lengths(p))
    np.testing.assert_array_equal(np.isnan(sums), [False, False, True, False])


# ---------------------------------------------------------------------------------------------------------- cost
def products(network, teacher, learned):
    """Matrix products in the compiled gradient of a divergence from a teacher."""

    def total(*both):
        made = [JointLogits(LinearJoint(*parameters), *rows, 64) for parameters, rows in both]
        function = lambda x, y: jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(y), -1)
        return sum_over_nodes(function, *made, **lengths(network.problem)).sum()

    _, text = hlo.compiled(jax.grad(total, learned), *((x.parameters, x.rows) for x in (network, teacher)))
    return len(re.findall(r" dot\(|__onednn\$matmul|custom_call_target=\"__cublas", text))


@pytest.mark.slow
def test_a_fixed_teacher_is_not_differentiated():
    """It lacks the products that make the gradients of its weight and of its hidden units."""
    fixed, both = (products(Network(), Network(seed=1), learned) for learned in (0, (0, 1)))
    assert both - fixed == 2


def test_blocks_without_weight_are_skipped(monkeypatch):
    """The function runs on as many tiles as there are blocks with a weight."""
    network, calls = Network(), []

    def function(rows):
        def seen(x):
            calls.append(len(x))
            return x

        return jax.pure_callback(seen, jax.ShapeDtypeStruct(rows.shape[:1], rows.dtype), rows[:, 0])

    weights = np.zeros(network.problem.logits.shape[:3])
    logits = JointLogits(LinearJoint(*network.parameters), *network.rows, 16)
    found = []
    for nodes in ((), ((0, 0, 0),), ((0, 0, 0), (0, 1, 1), (2, 9, 0), (0, 9, 9))):
        for node in nodes:
            weights[node] = 1
        calls.clear()
        jax.block_until_ready(sum_over_nodes(function, logits, **lengths(network.problem), weights=weights))
        found.append(len(calls))
    assert found == [0, 1, 3] and set(calls) == {16}


# ------------------------------------------------------------------------------------------------------- programs


def divergence(parameters, rows, rest, weights):
    """Of two passes with shared parameters; the second pass sees half of the encoder rows."""
    given = dict(zip(("targets", "logit_lengths", "target_lengths"), rest))
    made = [JointLogits(LinearJoint(*parameters), rows[0] * scale, rows[1], 64) for scale in (1.0, 0.5)]

    def function(x, y, labels):
        return entropy(x) * entropy(y) + jnp.where(labels < 0, 0, labels).astype(x.dtype) * x[:, 0]

    return sum_over_nodes(function, *made, **given, weights=weights)


def mean(parameters, rows, rest, weights):
    return divergence(parameters, rows, rest, weights).mean()


@pytest.mark.slow
def test_programs(devices):
    """Under vmap, and over devices, which exchange sums alone; the tests above have the truth."""
    network = Network(batch=16, dtype=np.float32)
    arguments = *network.arguments, some_weights(network.problem).astype(np.float32)
    mapped = lambda parameters, *x: jax.vmap(functools.partial(divergence, parameters))(*x).mean()
    step = lambda function: jax.value_and_grad(function, (0, 1, 3))
    expected = jax.jit(step(mean))(*arguments)
    compare.assert_close(jax.jit(step(mapped))(*arguments), expected, 1e-5)
    with mesh_of(devices, "shard_map") as mesh:
        specs = P(), P("data"), P("data"), P("data")
        placed = [at(mesh, x, *spec) for x, spec in zip(arguments, specs, strict=True)]
        got, text = hlo.compiled(step(mean_over_devices(mean, mesh, specs)), *placed)
    compare.assert_close(got, expected, 1e-5)
    assert set(hlo.collectives(text)) == {"all-reduce"}


@pytest.mark.slow
def test_function_of_any_dtype():
    """A count has no gradient."""
    p = batches.problem(scale=1.0)
    best = lambda rows, labels: jnp.argmax(rows, -1).astype(np.int32) == labels
    total = lambda x: sum_over_nodes(best, x, **lengths(p), targets=p.targets).sum()
    value, gradient = jax.jit(jax.value_and_grad(total))(p.logits)
    labels = np.pad(p.targets, ((0, 0), (0, 1)))
    hit = (p.logits.argmax(-1) == labels[:, None]) & (np.arange(5) < p.target_lengths[:, None, None])
    assert int(value) == (hit & batches.inside(p)).sum() and not np.any(gradient)


# --------------------------------------------------------------------------------------------------------- errors
X, AM = np.zeros((2, 4, 3, 5)), np.zeros((2, 4, 5))
GIVEN = {"logit_lengths": np.array([4, 3]), "target_lengths": np.array([2, 1])}
ROWS = PackedLogits(np.zeros((18, 5)), 4)
BANDS = BandLogits(X[:, :, :2], np.zeros((2, 4), np.int32))
JOINT = JointLogits(jnp.add, AM, np.zeros((2, 3, 5)))
FIRST = lambda rows, *_: rows[:, 0]
ERRORS = [
    ((3, X), {}, "function must be callable, got 3"),
    ((FIRST,), {}, "logits must be one or several arrays or layouts, got none"),
    ((FIRST, X[0, 0]), {}, r"logits must have shape \[..., T, U \+ 1, V\]"),
    ((FIRST, X, X[:, :3]), {}, r"equal shapes but for V, got \[\(2, 4, 3, 5\), \(2, 3, 3, 5\)\]"),
    ((FIRST, JOINT, X[:1]), {}, "equal shapes but for V"),
    ((FIRST, X, ROWS), {}, "all be PackedLogits, or all BandLogits, or none of them, got ArrayLogits, PackedLogits"),
    ((FIRST, BANDS, JOINT), {}, "or none of them, got BandLogits, JointLogits"),
    ((FIRST, AdditiveLogits(AM, AM[:, :3], lm_only_scale=0.1)), {}, "without smoothing.*got lm_only_scale 0.1"),
    ((FIRST, X), {"logit_lengths": np.array([4.0, 3])}, "logit_lengths must have an integer dtype"),
    ((FIRST, X), {"target_lengths": np.array([2])}, r"target_lengths must have shape .*\(2,\), got \(1,\)"),
    ((FIRST, ROWS), {"logit_lengths": np.array(4)}, r"logit_lengths must have shape \[B\], got \(\)"),
    ((FIRST, X), {"weights": np.zeros((2, 3, 4))}, r"weights must have shape .* = \(2, 4, 3\), got \(2, 3, 4\)"),
    ((FIRST, ROWS), {"weights": np.zeros((2, 3, 3))}, r"weights must have shape .* = \(2, 4, 3\), got \(2, 3, 3\)"),
    ((FIRST, X), {"weights": np.zeros((2, 4, 3), complex)}, "weights must be an array of real numbers"),
    ((FIRST, X), {"targets": np.zeros((2, 3), int)}, r"targets must have shape .* = \(2, 2\), got \(2, 3\)"),
    ((FIRST, BANDS), {"weights": np.zeros((2, 4, 3)), "targets": np.zeros((2, 3), int)}, "targets must have shape"),
    ((lambda rows: rows, X), {}, r"function must return one real number for each row, \[N\] for rows \[N, V\]"),
    ((jnp.sum, X), {}, "function must return one real number for each row"),
    (
        (lambda rows: jax.lax.complex(rows[:, 0], rows[:, 0]), X),
        {},
        "function must return one real number for each row",
    ),
]


@pytest.mark.parametrize(("arguments", "given", "message"), ERRORS, ids=[message[:24] for *_, message in ERRORS])
def test_errors(arguments, given, message):
    with pytest.raises((TypeError, ValueError), match=f"sum_over_nodes: .*{message}"):
        sum_over_nodes(*arguments, **{**GIVEN, **given})


@pytest.mark.slow
def test_second_derivative():
    with pytest.raises(NotImplementedError, match=r"none of second order.*plain JAX for sum_over_nodes"):
        jax.hessian(lambda x: sum_over_nodes(entropy, x, **GIVEN).sum())(X)
