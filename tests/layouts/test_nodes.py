"""Is a sum over nodes that of all logits, for any layouts side by side, and is what has no weight left alone?

The truth: values by loops in NumPy, gradients of another formula on all logits in plain JAX.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import layouts
import losses
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits, RNNTLoss, sum_over_nodes
from layouts import H, Network, closure, linear
from meshes import at, mesh_of
from pages import code

EXACT = 1e-12
PAGE = "docs/nodes.md"


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


def mixed(rows, *others, scale=1.0):
    """Of the rows of one or two, and labels."""
    *others, labels = others
    of_label = jnp.sum(jax.nn.one_hot(labels, rows.shape[-1]) * jax.nn.log_softmax(rows), -1)
    more = jnp.tanh(others[0][:, 0] * others[0][:, -1]) if others else 1.0
    return scale * entropy(rows) * more - of_label


def mixed_of_all(p, x, *others, scale=1.0):
    hot = np.zeros(p.logits.shape)
    for b, m in enumerate(p.target_lengths):
        for u in range(m):
            hot[b, :, u, p.targets[b, u]] = 1
    more = jnp.tanh(others[0][..., 0] * others[0][..., -1]) if others else 1.0
    return scale * entropy_of_all(x) * more - jnp.sum(hot * (x - plain(x)[..., None]), -1)


def total_of_all(values, weights, counts):
    return jnp.sum(jnp.where(counts & (weights != 0), weights * values, 0), (1, 2))


def some_weights(p, seed=0):
    """Random, 0 in some nodes and in a whole frame."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=p.logits.shape[:3]) * (rng.random(p.logits.shape[:3]) < 0.7)
    weights[:, 2] = 0
    return weights


def check(got, expected, arguments, cotangent=(1.0, -2.0, 0.5, 3.0), limit=EXACT):
    """Values and gradients of two functions of the arguments."""

    def step(function):
        return jax.jit(lambda *x: (function(*x), jax.grad(lambda *y: function(*y) @ jnp.array(cotangent), every)(*x)))

    every = tuple(range(len(arguments)))
    found = step(got)(*arguments)
    losses.assert_close(found, step(expected)(*arguments), limit)
    return found


# --------------------------------------------------------------------------------------------------------- layouts
QUICK = [("JointLogits", "array"), ("PackedLogits", "PackedLogits"), ("BandLogits",)]
OTHERS = [("array",), ("JointLogits",), ("PackedLogits",), ("AdditiveLogits",), ("array", "JointLogits")]
OTHERS += [("AdditiveLogits", "JointLogits"), ("BandLogits", "BandLogits")]


@pytest.mark.parametrize("names", [*QUICK, *map(losses.slow, OTHERS)], ids="-".join)
def test_layouts(names):
    """V of the two differs."""
    problems = [losses.problem(V=V, scale=1.0, seed=i) for i, V in zip(range(2), (9, 5))]
    problems = [x._replace(targets=problems[0].targets) for x in problems][: len(names)]
    p, weights = problems[0], some_weights(problems[0])
    makers = [layouts.layout(x, name) for x, name in zip(problems, names)]
    arrays = [layouts.arrays(x, name) for x, name in zip(problems, names)]
    counts = losses.inside(p)
    if "BandLogits" in names:
        place = np.arange(p.logits.shape[2]) - layouts.first_columns(p)[..., None]
        counts &= (place >= 0) & (place < layouts.WIDTH)

    def logits(makers, flat):
        flat = iter(flat)
        return [make(*(next(flat) for _ in own)) for make, own in zip(makers, arrays)]

    def got(*flat):
        *flat, weights = flat
        return sum_over_nodes(mixed, *logits(makers, flat), **lengths(p), weights=weights, targets=p.targets)

    def of_all(*flat):
        *flat, weights = flat
        dense = [x if n == "BandLogits" else layouts.dense(p, n)(*x) for x, n in zip(split(flat), names)]
        dense = [x[0] if isinstance(x, list) else x for x in dense]
        return total_of_all(mixed_of_all(p, *dense), weights, counts)

    def split(flat):
        flat = iter(flat)
        return [[next(flat) for _ in own] for own in arrays]

    check(got, of_all, [*(x for own in arrays for x in own), weights])


def test_against_loops():
    """Values in NumPy, node by node; also without weights and labels."""
    p, q = losses.problem(scale=1.0), losses.problem(scale=1.0, seed=1)
    weights = some_weights(p)
    expected, alone = np.zeros(4), np.zeros(4)
    for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths)):
        for t in range(n):
            for u in range(m + 1):
                prob, other = (np.exp(x.logits[b, t, u]) / np.exp(x.logits[b, t, u]).sum() for x in (p, q))
                alone[b] -= prob @ np.log(prob)
                label = other[p.targets[b, u]] if u < m else 10.0
                expected[b] += weights[b, t, u] * (prob @ np.log(prob / other) + label)

    def function(rows, others, labels):
        x, y = jax.nn.log_softmax(rows), jax.nn.log_softmax(others)
        label = jnp.take_along_axis(y, jnp.maximum(labels, 0)[:, None], -1)[:, 0]
        return jnp.sum(jnp.exp(x) * (x - y), -1) + jnp.where(labels == -1, 10.0, jnp.exp(label))

    for make in (jnp.asarray, losses.in_tiles):
        both = make(p.logits), make(q.logits)
        got = sum_over_nodes(function, *both, **lengths(p), weights=weights, targets=p.targets)
        np.testing.assert_allclose(got, expected, rtol=EXACT)
        np.testing.assert_allclose(sum_over_nodes(entropy, both[0], **lengths(p)), alone, rtol=EXACT)


@pytest.mark.parametrize("joint", [linear, losses.slow(closure)])
def test_joint_networks(joint):
    """Two, with parameters of their own, in several tiles; and a scale that the function closes over."""
    a, b = Network(), Network(seed=1)
    p, weights = a.problem, some_weights(a.problem, 3)

    def got(first, second, rows, others, scale, weights):
        logits = JointLogits(joint(*first), *rows, 64), JointLogits(closure(*second), *others, 128)
        function = functools.partial(mixed, scale=scale)
        return sum_over_nodes(function, *logits, **lengths(p), weights=weights, targets=p.targets)

    def of_all(first, second, rows, others, scale, weights):
        made = [
            jnp.tanh(e[:, :, None] + q[:, None]) @ w + c[None, None, None]
            for (w, c), (e, q) in ((first, rows), (second, others))
        ]
        return total_of_all(mixed_of_all(p, *made, scale=scale), weights, losses.inside(p))

    check(got, of_all, (a.parameters, b.parameters, a.rows, b.rows, np.array(0.7), weights), limit=1e-11)


@pytest.mark.slow
def test_gradient_of_the_loss():
    """The loss's gradient is that of minus the arcs' log-probabilities, weighted by posteriors."""
    network = Network()
    p, criterion = network.problem, RNNTLoss(reduction="none")

    def logits(parameters, rows):
        return JointLogits(LinearJoint(*parameters), *rows, 64)

    def of_arcs(parameters, rows, planes):
        def arcs(rows, posteriors, labels):
            x = jax.nn.log_softmax(rows)
            label = jnp.sum(jax.nn.one_hot(labels, rows.shape[-1]) * x, -1)
            return -posteriors[:, 0] * x[:, -1] - posteriors[:, 1] * label

        made = logits(parameters, rows), jax.lax.stop_gradient(jnp.stack(planes, -1))
        return jnp.sum(sum_over_nodes(arcs, *made, **lengths(p), targets=p.targets))

    planes = criterion.posteriors(logits(network.parameters, network.rows), *p[1:])
    got = jax.jit(jax.grad(of_arcs, (0, 1)))(network.parameters, network.rows, planes)
    loss = lambda parameters, rows: criterion(logits(parameters, rows), *p[1:]).sum()
    losses.assert_close(got, jax.jit(jax.grad(loss, (0, 1)))(network.parameters, network.rows), EXACT)


@pytest.mark.slow
def test_hypotheses_share_the_encoder():
    """[B, 1, T, E] beside [B, N, T, E]."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 1, 5, H)), rng.normal(size=(2, 3, 4, H)), rng.normal(size=(2, 3, 5, H))
    weight = rng.normal(size=(H, 6))
    given = {"logit_lengths": np.array([[5, 4, 3]] * 2), "target_lengths": np.array([[3, 2, 0]] * 2)}
    frames = np.arange(5)[:, None] < given["logit_lengths"][..., None, None]
    inside = frames & (np.arange(4) <= given["target_lengths"][..., None, None])

    def function(rows, others):
        return entropy(rows) * others[:, 0]

    def got(weight, shared, states, own):
        first, second = JointLogits(LinearJoint(weight), shared, states), JointLogits(jnp.multiply, own, states)
        return jnp.sum(sum_over_nodes(function, first, second, **given) * np.arange(6.0).reshape(2, 3))

    def of_all(weight, shared, states, own):
        x = entropy_of_all(jnp.tanh(shared[..., None, :] + states[:, :, None]) @ weight)
        sums = jnp.sum(jnp.where(inside, x * (own[..., None, :] * states[:, :, None])[..., 0], 0), (2, 3))
        return jnp.sum(sums * np.arange(6.0).reshape(2, 3))

    arguments = weight, *rows
    with jax.numpy_rank_promotion("allow"):
        found = (jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*arguments) for f in (got, of_all))
        losses.assert_close(*found, EXACT)


# --------------------------------------------------------------------------------------- what is not read, and NaN
def singular(rows):
    """Its derivative is infinite where the row is constant."""
    return jnp.sqrt(jnp.sum((rows - jnp.mean(rows, -1, keepdims=True)) ** 2, -1))


@pytest.mark.parametrize("bad", [np.nan, losses.slow(np.inf), losses.slow(0.0)])
@pytest.mark.parametrize(
    "name", ["array", losses.slow("JointLogits"), *map(losses.slow, ("PackedLogits", "BandLogits"))]
)
def test_nodes_without_weight(name, bad):
    """Bad rows there change no bit, whatever the function makes of them: nor of shared arrays."""
    p, weights = losses.problem(scale=1.0), some_weights(losses.problem(scale=1.0))
    found = []

    @jax.jit
    def run(x, scale):
        def total(x, scale, weights):
            q = p._replace(logits=x)
            function = lambda rows: jnp.log(scale) * singular(rows * scale)
            return sum_over_nodes(function, layouts.layout(q, name)(x), **lengths(p), weights=weights).sum()

        return jax.value_and_grad(total, (0, 1, 2))(x, scale, weights)

    for value in (bad, 1.5):
        x = np.where(weights[..., None] == 0, value * np.arange(9) if value == 1.5 else value, p.logits)
        found.append(run(np.where(losses.inside(p)[..., None], x, value * np.ones(9)), 0.7))
    losses.assert_same_bits(*found)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0]))
    gradient, of_weights = found[0][1][0], found[0][1][2]
    assert not np.any(gradient[weights == 0]) and not np.any(of_weights[weights == 0])
    assert np.abs(of_weights[losses.inside(p) & (weights != 0) & (name != "BandLogits")]).min(initial=1) > 1e-3


@pytest.mark.parametrize("joint", [losses.slow(linear), closure])
def test_joint_network_without_weight(joint):
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
            made = LinearJoint(weight, bias, sharp) if joint is linear else lambda e, q: sharp(e + q) @ weight + bias
            logits = JointLogits(made, *rows, 64)
            return sum_over_nodes(
                lambda x: scale * entropy(x), logits, **lengths(network.problem), weights=weights
            ).sum()

        return jax.value_and_grad(total, (0, 1, 2))(network.parameters, rows, scale)

    run = jax.jit(run)
    with jax.numpy_rank_promotion("allow"):
        found, expected = (run([*map(jnp.asarray, rows)], 0.7) for rows in (bad, good))
    losses.assert_same_bits(found, expected)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize(
    "name", ["JointLogits", *map(losses.slow, ("array", "PackedLogits", "BandLogits", "AdditiveLogits"))]
)
def test_nan_stays_in_its_sequence(name):
    """NaN in a node, and lengths or labels out of range."""
    p = losses.problem(B=6, scale=1.0)
    arrays = [x.copy() for x in layouts.arrays(p, name)]
    arrays[0][1, 1] = np.nan
    bad = p._replace(targets=p.targets.copy(), target_lengths=p.target_lengths.copy())
    bad.targets[3, 0] = 9 if name != "PackedLogits" else -1
    bad.target_lengths[5] = -1

    @jax.jit
    def run(arrays, scale, cotangent, targets, target_lengths):
        def total(arrays, scale):
            given = {"logit_lengths": p.logit_lengths, "target_lengths": target_lengths, "targets": targets}
            x = layouts.layout(p, name)(*arrays)
            sums = sum_over_nodes(functools.partial(mixed, scale=scale), x, **given)
            return jnp.sum(jnp.where(cotangent == 0, 0, cotangent * sums)), sums

        return jax.grad(total, (0, 1), has_aux=True)(arrays, scale)

    ones, masked = np.ones(6), np.array([1.0, 0, 1, 0, 1, 0])
    if name == "PackedLogits":  # the rows of a sequence of negative length would move the others
        bad.target_lengths[5] = p.target_lengths[5]
        masked[5] = 1
    of_bad = bad.targets, bad.target_lengths
    (gradient, of_scale), sums = run(arrays, 0.7, ones, *of_bad)
    (expected, alone), values = run(layouts.arrays(p, name), 0.7, masked, p.targets, p.target_lengths)
    np.testing.assert_array_equal(np.isnan(sums), masked == 0)
    losses.assert_close((sums[masked == 1], of_scale), (values[masked == 1], alone), EXACT)
    for x, y in zip(gradient, expected):
        np.testing.assert_allclose(x[masked == 1], y[masked == 1], atol=EXACT)
        assert np.isnan(x[1]).any() and not np.any(x[3]) and (name == "PackedLogits" or not np.any(x[5]))
    (gradient, _), _ = run(arrays, 0.7, masked, *of_bad)
    losses.assert_close(gradient, expected, atol=EXACT)  # a masked sum that is NaN adds nothing


@pytest.mark.slow
def test_empty_batches():
    for shape in ((0, 3, 2, 5), (2, 0, 2, 5)):
        given = {name: np.zeros(shape[0], np.int32) for name in ("logit_lengths", "target_lengths")}
        for make in (jnp.asarray, losses.in_tiles, losses.in_a_band):
            x = jnp.zeros(shape)
            value, gradient = jax.value_and_grad(lambda x: sum_over_nodes(entropy, make(x), **given).sum())(x)
            assert value == 0 and gradient.shape == shape
    packed = PackedLogits(jnp.zeros((3, 5)), 2)
    given = {name: np.zeros(0, np.int32) for name in ("logit_lengths", "target_lengths")}
    assert sum_over_nodes(entropy, packed, **given, weights=np.zeros((0, 2, 1))).shape == (0,)


def test_bands_that_differ():
    p = losses.problem(scale=1.0)
    first = layouts.first_columns(p)
    other = first.copy()
    other[2, 3] += 1
    x = p.logits[:, :, : layouts.WIDTH]
    sums = sum_over_nodes(lambda a, b: entropy(a) * b[:, 0], BandLogits(x, first), BandLogits(x, other), **lengths(p))
    np.testing.assert_array_equal(np.isnan(sums), [False, False, True, False])


# ---------------------------------------------------------------------------------------------------------- cost
def step_of_two(network, teacher, teacher_is_fixed):
    """Text of the compiled gradient of a divergence from a teacher."""

    def total(student, teacher, rows):
        made = [JointLogits(LinearJoint(*x), *rows, 64) for x in (student, teacher)]
        function = lambda x, y: jnp.sum(jax.nn.softmax(x) * jax.nn.log_softmax(y), -1)
        return sum_over_nodes(function, *made, **lengths(network.problem)).sum()

    run = jax.grad(total, 0 if teacher_is_fixed else (0, 1))
    return losses.compiled(run, network.parameters, teacher.parameters, network.rows)[1]


def test_a_fixed_teacher_is_not_differentiated():
    """Products: 2 forward, 2 again, and for each network with a gradient 2 of it."""

    def products(text):
        return len(re.findall(r"= f64\[\d+,\d+\]\S* dot\(", text)) + text.count("__onednn$matmul")

    network, teacher = Network(), Network(seed=1)
    fixed, both = (products(step_of_two(network, teacher, x)) for x in (True, False))
    assert fixed < both


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

    sums = total(network.parameters, network.rows)
    gradient = jax.grad(lambda *x: total(*x).sum(), (0, 1))(network.parameters, network.rows)
    assert set(seen) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(np.float32))} and sums.dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    wide = network.widened()
    made = jax.nn.tanh(wide.rows[0][:, :, None] + wide.rows[1][:, None]) @ wide.parameters[0]
    values = entropy_of_all(made + wide.parameters[1][None, None, None])
    values *= wide.rows[0][:, :, None, 0] + wide.rows[1][:, None, :, 0]
    counts = losses.inside(network.problem)
    np.testing.assert_allclose(sums, total_of_all(values, np.ones(counts.shape), counts), rtol=0.02)


def divergence(parameters, rows, rest, weights):
    """Of two passes with shared parameters, in tiles; the second pass sees half of the encoder rows."""
    given = dict(zip(("targets", "logit_lengths", "target_lengths"), rest))
    made = [JointLogits(LinearJoint(*parameters), rows[0] * scale, rows[1], 64) for scale in (1.0, 0.5)]

    def function(x, y, labels):
        return entropy(x) * entropy(y) + jnp.where(labels < 0, 0, labels).astype(x.dtype) * x[:, 0]

    return sum_over_nodes(function, *made, **given, weights=weights)


def divergence_of_all(parameters, rows, rest, weights):
    weight, bias = parameters
    inside = (np.arange(rows[0].shape[1])[:, None] < np.asarray(rest[1])[:, None, None]) & (
        np.arange(rows[1].shape[1]) <= np.asarray(rest[2])[:, None, None]
    )
    x, y = (
        jnp.tanh(scale * rows[0][:, :, None] + rows[1][:, None]) @ weight + bias[None, None, None] for scale in (1, 0.5)
    )
    columns = np.arange(rows[1].shape[1] - 1) < np.asarray(rest[2])[:, None]
    labels = np.pad(np.where(columns, rest[0], 0), ((0, 0), (0, 1)))[:, None]
    return total_of_all(entropy_of_all(x) * entropy_of_all(y) + labels * x[..., 0], weights, inside)


@functools.cache
def step_of_all(batch):
    network = Network(batch=batch, dtype=np.float32)
    weights = some_weights(network.problem).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        run = jax.value_and_grad(lambda p, r, w: divergence_of_all(p, r, network.rest, w).mean(), (0, 1, 2))
        return network, weights, run(network.parameters, network.rows, weights)


def mean(parameters, rows, rest, weights):
    return divergence(parameters, rows, rest, weights).mean()


WAYS = ["shard_map", *map(losses.slow, ("vmap", "remat", "auto", "explicit", "shard_map_unchecked"))]


@pytest.mark.parametrize("way", WAYS)
def test_programs(way, devices):
    network, weights, expected = step_of_all(16)
    arguments = *network.arguments, weights
    function = mean
    if way == "vmap":
        function = lambda parameters, *x: jax.vmap(functools.partial(divergence, parameters))(*x).mean()
    if way == "remat":
        function = jax.checkpoint(mean, policy=jax.checkpoint_policies.save_only_these_names("rnnt_residuals"))
    step = jax.value_and_grad(function, (0, 1, 3))
    if way in ("vmap", "remat"):
        losses.assert_close(jax.jit(step)(*arguments), expected, 1e-5)
        return
    with mesh_of(devices, way.split("_")[0]) as mesh:
        specs = P(), P("data"), P("data"), P("data")
        if way.startswith("shard_map"):
            inner, checked = function, way == "shard_map"
            body = lambda *x: jax.lax.pmean(inner(*x), "data")
            function = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
            step = jax.value_and_grad(function, (0, 1, 3))
        placed = [at(mesh, x, *spec) for x, spec in zip(arguments, specs, strict=True)]
        got, text = losses.compiled(step, *placed)
        losses.assert_close(got, expected, 1e-5)
        assert set(losses.collectives(text)) == {"all-reduce"}


@pytest.mark.slow
def test_lengths_change_without_compiling():
    network, weights, _ = step_of_all(16)
    run = jax.jit(jax.grad(mean))
    for shift in range(2):
        targets, frames, labels = network.rest
        run(network.parameters, network.rows, (targets, np.maximum(frames - shift, 0), labels), weights)
    assert run._cache_size() == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "function"])
def test_random_numbers(name):
    """Those of the forward pass are those of the backward pass."""
    network = Network()
    weights = some_weights(network.problem)
    weights[:, 4:20] = 0
    key = jax.random.key(0)

    @jax.jit
    def total(x):
        drop = lambda rows: rows * jax.random.bernoulli(key, 0.5, rows.shape)
        joint = lambda e, p: jnp.tanh(e + p) @ network.parameters[0] * x
        made = (lambda e, p: drop(joint(e, p))) if name == "joint" else joint
        function = (lambda rows: entropy(drop(rows))) if name == "function" else entropy
        rows = network.rows[0] * x, network.rows[1]
        logits = JointLogits(made, *rows, 64)
        return sum_over_nodes(function, logits, **lengths(network.problem), weights=weights).sum()

    with jax.numpy_dtype_promotion("standard"):
        slope = (total(1 + 1e-6) - total(1 - 1e-6)) / 2e-6
        np.testing.assert_allclose(jax.grad(total)(1.0), slope, rtol=1e-7)


@pytest.mark.slow
def test_function_of_any_dtype():
    """A count has no gradient."""
    p = losses.problem(scale=1.0)
    best = lambda rows, labels: jnp.argmax(rows, -1).astype(np.int32) == labels
    total = lambda x: sum_over_nodes(best, x, **lengths(p), targets=p.targets).sum()
    value, gradient = jax.value_and_grad(total)(p.logits)
    labels = np.pad(p.targets, ((0, 0), (0, 1)))
    hit = (p.logits.argmax(-1) == labels[:, None]) & (np.arange(5) < p.target_lengths[:, None, None])
    assert int(value) == (hit & losses.inside(p)).sum() and not np.any(gradient)


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


@pytest.mark.slow
def test_example_of_two_passes(as_users):
    names, _ = code(PAGE, "def divergence(")
    loss, rest = names["loss"], (names["targets"], *names["lengths"].values())
    passes = [logits_of(x, names["predictor_out"], names["weight"]) for x in names["encoders"]]
    expected = sum(np.asarray(loss(jnp.asarray(x), *rest)).sum() for x in passes)
    weights = sum(sum(map(np.asarray, loss.posteriors(jnp.asarray(x), *rest))) for x in passes) / 2
    for b, t, u, _ in nodes_of(names["lengths"]):
        p, q = (softmax(x[b, t, u]) for x in passes)
        expected += 0.5 * weights[b, t, u] * 0.5 * (p @ np.log(p / q) + q @ np.log(q / p))
    np.testing.assert_allclose(names["value"], expected / 2, rtol=1e-6)


@pytest.mark.slow
def test_example_of_entropy(as_users):
    names, _ = code(PAGE, "def mean_entropy(")
    made = logits_of(names["encoder_out"], names["predictor_out"], names["logits"].joint.weight)
    rest = names["targets"], *names["lengths"].values()
    weights = sum(map(np.asarray, RNNTLoss(blank=0).posteriors(jnp.asarray(made), *rest)))
    expected = np.zeros(2)
    for b, t, u, _ in nodes_of(names["lengths"]):
        p = softmax(made[b, t, u] / 2)
        expected[b] -= weights[b, t, u] * (p @ np.log(p))
    np.testing.assert_allclose(names["mean_entropy"](names["logits"], 2.0), expected / weights.sum((1, 2)), rtol=1e-6)
