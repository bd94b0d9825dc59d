"""Do sums over nodes cost what they should and work in every program, and are the examples of their page right?"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import batches
import compare
import family
import hlo
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits, sum_over_nodes
from layout_table import Network
from meshes import at, mean_over_devices, mesh_of
from node_sums import entropy, lengths, some_weights
from pages import code

pytestmark = pytest.mark.no_kernel
PAGE = "docs/nodes.md"


# ---------------------------------------------------------------------------------------------------------- cost
def products(network, teacher, learned):
    """Matrix products in the compiled gradient of a divergence from a teacher."""

    def total(*both):
        made = [JointLogits(LinearJoint(*parameters), *rows, 64) for parameters, rows in both]
        function = lambda x, y: jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(y), -1)
        return sum_over_nodes(function, *made, **lengths(network.problem)).sum()

    _, text = hlo.compiled(jax.grad(total, learned), *((x.parameters, x.rows) for x in (network, teacher)))
    return len(re.findall(r" dot\(|__onednn\$matmul|custom_call_target=\"__cublas", text))


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
@pytest.mark.slow
def test_half_precision():
    """Rows come in the dtype of the logits; sums are in float32."""
    network, seen = Network(dtype=jnp.bfloat16), []

    def function(rows, others):
        seen.append((rows.dtype, others.dtype))
        return entropy(rows.astype(np.float32)) * others[:, 0].astype(np.float32)

    def total(parameters, rows):
        first = JointLogits(LinearJoint(*parameters), *rows, 64)
        second = JointLogits(jnp.add, *(x.astype(np.float32) for x in rows))
        return sum_over_nodes(function, first, second, **lengths(network.problem))

    summed = lambda *x: (jnp.sum(sums := total(*x)), sums)
    gradient, sums = jax.jit(jax.grad(summed, (0, 1), has_aux=True))(network.parameters, network.rows)
    assert set(seen) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(np.float32))} and sums.dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}


def divergence(parameters, rows, rest, weights):
    """Of two passes with shared parameters; the second pass sees half of the encoder rows."""
    given = dict(zip(("targets", "logit_lengths", "target_lengths"), rest))
    made = [JointLogits(LinearJoint(*parameters), rows[0] * scale, rows[1], 64) for scale in (1.0, 0.5)]

    def function(x, y, labels):
        return entropy(x) * entropy(y) + jnp.where(labels < 0, 0, labels).astype(x.dtype) * x[:, 0]

    return sum_over_nodes(function, *made, **given, weights=weights)


def mean(parameters, rows, rest, weights):
    return divergence(parameters, rows, rest, weights).mean()


@functools.cache
def step_alone(batch):
    """On one device, without a transformation; test_nodes.py has its truth."""
    network = Network(batch=batch, dtype=np.float32)
    weights = some_weights(network.problem).astype(np.float32)
    return network, weights, jax.jit(jax.value_and_grad(mean, (0, 1, 3)))(*network.arguments, weights)


WAYS = ["shard_map", *map(family.slow, ("vmap", "remat"))]


@pytest.mark.parametrize("way", WAYS)
def test_programs(way, devices):
    network, weights, expected = step_alone(16)
    arguments = *network.arguments, weights
    function = mean
    if way == "vmap":
        function = lambda parameters, *x: jax.vmap(functools.partial(divergence, parameters))(*x).mean()
    if way == "remat":
        function = jax.checkpoint(mean, policy=jax.checkpoint_policies.save_only_these_names("rnnt_residuals"))
    step = jax.value_and_grad(function, (0, 1, 3))
    if way in ("vmap", "remat"):
        compare.assert_close(jax.jit(step)(*arguments), expected, 1e-5)
        return
    with mesh_of(devices, way) as mesh:
        specs = P(), P("data"), P("data"), P("data")
        step = jax.value_and_grad(mean_over_devices(function, mesh, specs), (0, 1, 3))
        placed = [at(mesh, x, *spec) for x, spec in zip(arguments, specs, strict=True)]
        got, text = hlo.compiled(step, *placed)
        compare.assert_close(got, expected, 1e-5)
        assert set(hlo.collectives(text)) == {"all-reduce"}


@pytest.mark.slow
def test_random_numbers():
    """Those of the forward pass are those of the backward pass."""
    network = Network()
    weights = some_weights(network.problem)
    weights[:, 4:20] = 0
    key = jax.random.key(0)

    @jax.jit
    def total(x):
        drop = lambda rows: rows * jax.random.bernoulli(key, 0.5, rows.shape)
        joint = lambda e, p: jnp.tanh(e + p) @ network.parameters[0] * x
        made, function = (lambda e, p: drop(joint(e, p))), (lambda rows: entropy(drop(rows)))
        rows = network.rows[0] * x, network.rows[1]
        logits = JointLogits(made, *rows, 64)
        return sum_over_nodes(function, logits, **lengths(network.problem), weights=weights).sum()

    with jax.numpy_dtype_promotion("standard"):
        slope = (total(1 + 1e-6) - total(1 - 1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(total)(1.0), slope, rtol=1e-7)


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


# ------------------------------------------------------------------------------------------- examples of the page
def logits_of(encoder_out, predictor_out, weight):
    return np.tanh(np.asarray(encoder_out)[:, :, None] + np.asarray(predictor_out)[:, None]) @ np.asarray(weight)


def nodes_of(lengths):
    for b, (n, m) in enumerate(zip(*(np.asarray(lengths[x]) for x in ("logit_lengths", "target_lengths")))):
        yield from ((b, t, u, u == m) for t in range(n) for u in range(m + 1))


@pytest.fixture
def as_users():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def softmax(x):
    made = np.exp(x - x.max())
    return made / made.sum()


@pytest.mark.slow
def test_example_of_distillation(as_users):
    names, _ = code(PAGE, "def distillation(")
    student = logits_of(*(names[x] for x in ("encoder_out", "predictor_out", "weight")))
    teacher = logits_of(*(names[f"teacher_{x}"] for x in ("encoder_out", "predictor_out", "weight")))
    expected = np.zeros(2)
    for b, t, u, is_last in nodes_of(names["lengths"]):
        p, q = softmax(teacher[b, t, u]), softmax(student[b, t, u])
        expected[0] += p @ np.log(p / q)
        kinds = [[0]] if is_last else [[0], [int(names["targets"][b, u])]]
        kinds.append([v for v in range(10) if [v] not in kinds])
        for kind in kinds:
            expected[1] += p[kind].sum() * np.log(p[kind].sum() / q[kind].sum())
    np.testing.assert_allclose(names["distillation"](names["weight"]), expected / 2, rtol=1e-6)
