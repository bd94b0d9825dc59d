"""Is a sum over nodes that of all logits, for any layouts side by side, and is what has no weight left alone?

The truth: values by loops in NumPy, gradients of another formula on all logits in plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import layout_table
from jax_rnnt import BandLogits, JointLogits, PackedLogits, sum_over_nodes
from layout_table import Network, closure, linear
from node_sums import entropy, entropy_of_all, lengths, plain, some_weights, total_of_all

pytestmark = pytest.mark.no_kernel
EXACT = 1e-12


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
        place = np.arange(p.logits.shape[2]) - layout_table.first_columns(p)[..., None]
        counts &= (place >= 0) & (place < layout_table.WIDTH)

    def logits(makers, flat):
        flat = iter(flat)
        return [make(*(next(flat) for _ in own)) for make, own in zip(makers, arrays)]

    def got(*flat):
        *flat, weights = flat
        return sum_over_nodes(mixed, *logits(makers, flat), **lengths(p), weights=weights, targets=p.targets)

    def of_all(*flat):
        *flat, weights = flat
        dense = [x if n == "BandLogits" else layout_table.dense(p, n)(*x) for x, n in zip(split(flat), names)]
        dense = [x[0] if isinstance(x, list) else x for x in dense]
        return total_of_all(mixed_of_all(p, *dense), weights, counts)

    def split(flat):
        flat = iter(flat)
        return [[next(flat) for _ in own] for own in arrays]

    check(got, of_all, [*(x for own in arrays for x in own), weights])


def test_against_loops():
    """Values in NumPy, node by node; also without weights and labels."""
    p, q = batches.problem(scale=1.0), batches.problem(scale=1.0, seed=1)
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

    for make in (jnp.asarray, family.in_tiles):
        both = make(p.logits), make(q.logits)
        got = sum_over_nodes(function, *both, **lengths(p), weights=weights, targets=p.targets)
        np.testing.assert_allclose(got, expected, rtol=EXACT)
        np.testing.assert_allclose(sum_over_nodes(entropy, both[0], **lengths(p)), alone, rtol=EXACT)


@pytest.mark.parametrize("shared", [False, family.slow(True)])
def test_joint_networks(shared):
    """Two, with parameters of their own, in several tiles; and a scale that the function closes over.

    `shared`: pairs of hypotheses have the encoder rows [B, 1, T, E] of the first network in common.
    """
    a, b = Network(), Network(seed=1)
    p, weights = a.problem, some_weights(a.problem, 3)

    def pairs(x):
        return x.reshape(-1, 2, *x.shape[1:]) if shared else x

    def got(first, second, rows, others, scale, weights):
        rows, others = (rows[0][:, None] if shared else rows[0], pairs(rows[1])), map(pairs, others)
        logits = JointLogits(linear(*first), *rows, 64), JointLogits(closure(*second), *others, 128)
        function, given = functools.partial(mixed, scale=scale), {name: pairs(x) for name, x in lengths(p).items()}
        return sum_over_nodes(function, *logits, **given, weights=pairs(weights), targets=pairs(p.targets)).ravel()

    def of_all(first, second, rows, others, scale, weights):
        rows = jnp.repeat(rows[0], 2 if shared else 1, 0), rows[1]
        made = [
            jnp.tanh(e[:, :, None] + q[:, None]) @ w + c[None, None, None]
            for (w, c), (e, q) in ((first, rows), (second, others))
        ]
        return total_of_all(mixed_of_all(p, *made, scale=scale), weights, batches.inside(p))

    rows = a.rows[0][: 2 if shared else None], a.rows[1]
    check(got, of_all, (a.parameters, b.parameters, rows, b.rows, np.array(0.7), weights), limit=1e-11)


# --------------------------------------------------------------------------------------- what is not read, and NaN
def singular(rows):
    """Its derivative is infinite where the row is constant."""
    return jnp.sqrt(jnp.sum((rows - jnp.mean(rows, -1, keepdims=True)) ** 2, -1))


@pytest.mark.parametrize("name", ["array", family.slow("BandLogits")])
def test_nodes_without_weight(name):
    """Bad rows there change no bit, whatever the function makes of them: nor of shared arrays."""
    p, weights = batches.problem(scale=1.0), some_weights(batches.problem(scale=1.0))
    found = []

    @jax.jit
    def run(x, scale):
        def total(x, scale, weights):
            q = p._replace(logits=x)
            function = lambda rows: jnp.log(scale) * singular(rows * scale)
            return sum_over_nodes(function, layout_table.layout(q, name)(x), **lengths(p), weights=weights).sum()

        return jax.value_and_grad(total, (0, 1, 2))(x, scale, weights)

    for value in (np.nan, np.inf, 0.0, 1.5):
        x = np.where(weights[..., None] == 0, value * np.arange(9) if value == 1.5 else value, p.logits)
        found.append(run(np.where(batches.inside(p)[..., None], x, value * np.ones(9)), 0.7))
    for x in found[:-1]:
        compare.assert_same_bits(x, found[-1])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found[0]))
    gradient, of_weights = found[0][1][0], found[0][1][2]
    assert not np.any(gradient[weights == 0]) and not np.any(of_weights[weights == 0])
    assert np.abs(of_weights[batches.inside(p) & (weights != 0) & (name != "BandLogits")]).min(initial=1) > 1e-3


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


@pytest.mark.parametrize("name", ["JointLogits", family.slow("PackedLogits")])
def test_nan_stays_in_its_sequence(name):
    """NaN in a node, and lengths or labels out of range."""
    p = batches.problem(B=6, scale=1.0)
    arrays = [x.copy() for x in layout_table.arrays(p, name)]
    arrays[0][1, 1] = np.nan
    bad = p._replace(targets=p.targets.copy(), target_lengths=p.target_lengths.copy())
    bad.targets[3, 0] = 9 if name != "PackedLogits" else -1
    bad.target_lengths[5] = p.targets.shape[1] + 1

    @jax.jit
    def run(arrays, scale, cotangent, targets, target_lengths):
        def total(arrays, scale):
            given = {"logit_lengths": p.logit_lengths, "target_lengths": target_lengths, "targets": targets}
            x = layout_table.layout(p, name)(*arrays)
            sums = sum_over_nodes(functools.partial(mixed, scale=scale), x, **given)
            return jnp.sum(jnp.where(cotangent == 0, 0, cotangent * sums)), sums

        return jax.grad(total, (0, 1), has_aux=True)(arrays, scale)

    ones, masked = np.ones(6), np.array([1.0, 0, 1, 0, 1, 0])
    if name == "PackedLogits":  # the rows of a longer sequence would not fit, or move the others
        bad.target_lengths[5] = p.target_lengths[5]
        masked[5] = 1
    of_bad = bad.targets, bad.target_lengths
    (gradient, of_scale), sums = run(arrays, 0.7, ones, *of_bad)
    (expected, alone), values = run(layout_table.arrays(p, name), 0.7, masked, p.targets, p.target_lengths)
    np.testing.assert_array_equal(np.isnan(sums), masked == 0)
    compare.assert_close((sums[masked == 1], of_scale), (values[masked == 1], alone), EXACT)
    for x, y in zip(gradient, expected):
        np.testing.assert_allclose(x[masked == 1], y[masked == 1], atol=EXACT)
        assert np.isnan(x[1]).any() and not np.any(x[3]) and (name == "PackedLogits" or not np.any(x[5]))
    (gradient, _), _ = run(arrays, 0.7, masked, *of_bad)
    compare.assert_close(gradient, expected, atol=EXACT)  # a masked sum that is NaN adds nothing


@pytest.mark.slow
def test_empty_batches():
    for shape in ((0, 3, 2, 5), (2, 0, 2, 5)):
        given = {name: np.zeros(shape[0], np.int32) for name in ("logit_lengths", "target_lengths")}
        for make in (family.in_tiles, family.in_a_band):
            x = jnp.zeros(shape)
            total = lambda x, make=make, given=given: sum_over_nodes(entropy, make(x), **given).sum()
            value, gradient = jax.jit(jax.value_and_grad(total))(x)
            assert value == 0 and gradient.shape == shape
    packed = PackedLogits(jnp.zeros((3, 5)), 2)
    given = {name: np.zeros(0, np.int32) for name in ("logit_lengths", "target_lengths")}
    assert sum_over_nodes(entropy, packed, **given, weights=np.zeros((0, 2, 1))).shape == (0,)


def test_bands_that_differ():
    p = batches.problem(scale=1.0)
    first = layout_table.first_columns(p)
    other = first.copy()
    other[2, 3] += 1
    x = p.logits[:, :, : layout_table.WIDTH]
    sums = sum_over_nodes(lambda a, b: entropy(a) * b[:, 0], BandLogits(x, first), BandLogits(x, other), **lengths(p))
    np.testing.assert_array_equal(np.isnan(sums), [False, False, True, False])
