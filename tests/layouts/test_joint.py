"""Is the loss of a joint network in tiles that of its logits, for any joint, and in little memory?

Tiles also answer the tests of the family (`family.in_tiles`). Here is what only a joint has: parameters, rows that many
nodes share, tiles, randomness.
"""

import dataclasses
import functools
import inspect
import math
import pickle
import pydoc
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compare
import family
import hlo
import jax_rnnt
from jax_rnnt import JointLogits, LinearJoint
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.tiles import _tile_sizes
from jax_rnnt.tiles import _tiles as tiled
from jax_rnnt.tiles._tile_blocks import Blocks
from layout_table import (
    CHUNK,
    B,
    H,
    Network,
    T,
    U,
    V,
    closure,
    function,
    gradients,
    gradients_anew,
    linear,
    materialized,
    tiles,
)

pytestmark = pytest.mark.no_kernel

# All kinds of joint, and plain JAX for those that it does not know.
WAYS = pytest.mark.parametrize(
    ("joint", "implementation"),
    [
        (linear, "kernel"), (closure, "reference"), (function, "kernel"),
    ],
    indirect=["implementation"],
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ sizes
@pytest.mark.parametrize("shape", [(11, 174, 147, 28, 256), (2, 748, 409, 28, 256), (16, 120, 30, 12, 128),
                                   (8, 400, 80, 500, 512), (64, 400, 80, 4096, 640),
                                   (1 << 21, 1, 0, 28, 0)], ids=str)  # fmt: skip
def test_tiles_of_a_gpu(shape):
    """(B, T, U, V, H) in float32. About 40 launches of a tile take 0.1 ms, in which an H100 moves 300 MB. Logits and
    hidden units of a tile pass through the memory some eight times: unless there is but one tile, they have 30 MB.
    Packed rows, the last shape, have no hidden units."""
    B, T, U, V, H = shape
    blocks = blocks_of(*shape, "cuda")
    size, of_blocks = 4 * (V + H) * math.prod(dataclasses.astuple(blocks)), math.prod((blocks.frames, blocks.columns))
    alone = blocks.count * of_blocks >= B * T * (U + 1)
    assert (size >= 30e6 or alone) and size <= 256e6


def blocks_of(B, T, U, V, H, platform):
    emission = tiled.Tiled(Softmax((0,)), None, V, np.dtype("float32"), None, linear=True)
    rows = [jax.ShapeDtypeStruct((B, n, H), np.float32) for n in (T, U + 1)]
    return _tile_sizes.blocks_for(emission, *rows, platform)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_tiles_of_short_sequences(platform):
    """(B, T, U, V, H). A tile of S blocks sums their gradients by a table [S, S], which has 64 MB at most."""
    (size,) = jax.export.symbolic_shape("b")
    for shape in ((2**14, 3, 2, 32, 32), (10**5, 1, 0, 28, 256), (64, 500, 100, 2, 8), (size, 2, 1, 2, 8)):
        assert 4 * blocks_of(*shape, platform).count ** 2 <= 64e6


def test_symbolic_units_and_classes():
    """Tiles of an exported program. Equal logits: each of the binomial(T - 1 + U, U) paths has the same probability."""
    h, v = jax.export.symbolic_shape("h, v")
    assert blocks_of(2, 7, 3, v, h, "cuda").count and blocks_of(2, 7, 3, v, h, "tpu").count

    def loss(weight, encoder, predictor, targets, *lengths):
        logits = JointLogits(LinearJoint(weight), encoder, predictor)
        return jax_rnnt.rnnt_loss(logits, targets, *lengths, blank=0)

    batch = np.ones((2, 3), np.int32), np.full(2, 7, np.int32), np.full(2, 3, np.int32)
    types = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((h, v), (2, 7, h), (2, 4, h))]
    exported = jax.export.export(jax.jit(loss), disabled_checks=jax_rnnt.export_checks())(*types, *batch)
    value = exported.call(*(np.zeros(shape, np.float32) for shape in ((5, 9), (2, 7, 5), (2, 4, 5))), *batch)
    assert float(value) == pytest.approx(10 * math.log(9) - math.log(math.comb(9, 3)), rel=1e-6)


# ------------------------------------------------------------------------------------------------ values, gradients
@pytest.fixture
def elsewhere(monkeypatch):
    """Tiles as they are lowered for other platforms than a CPU: other blocks, sums in another order."""
    lowered_for = tiled.Tiled.lowered_for
    monkeypatch.setattr(tiled.Tiled, "lowered_for", lambda self, _, *rows: lowered_for(self, ("other",), *rows))
    monkeypatch.setattr(_tile_sizes, "block_of", lambda *_: (4, 3))  # so that a tile has several


def check_value_and_gradient(joint=linear, made=gradients, **options):
    """A sequence without weight is skipped."""
    network, weights = Network(), np.array([1.0, -2.0, 0.0, 3.0])
    got = made(tiles, joint=joint, **options)(network, weights)
    expected = gradients(materialized)(network, weights)
    compare.assert_close(got, expected, 1e-12)


@pytest.mark.quick("1000000")
@pytest.mark.parametrize("chunk", [None, 10**6])
def test_any_chunk(chunk):
    check_value_and_gradient(chunk=chunk)


def check_half_precision(made=gradients, **options):
    """Sums over rows and tiles are in float32: only logits, hidden units and results are rounded to 16 bits."""
    network = Network(dtype=jnp.bfloat16)
    values, gradient = made(tiles, **options)(network)
    assert values.dtype == np.float32
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    expected, peer = (gradients(materialized)(x)[1] for x in (network.widened(), network))

    def close(got, other, true):
        error, of_peer = (np.abs(np.asarray(x, np.float64) - true).max() for x in (got, other))
        return error <= max(1.5 * of_peer, compare.eps(jnp.bfloat16) * np.abs(true).max())

    assert all(jax.tree.leaves(jax.tree.map(close, gradient, peer, expected)))


@pytest.mark.slow
def test_half_precision():
    check_half_precision(joint=closure, chunk=1)


@pytest.mark.slow
def test_as_on_other_platforms(elsewhere):
    check_value_and_gradient(made=gradients_anew)
    check_half_precision(gradients_anew)


def test_overflow_stays_in_its_sequence(elsewhere):
    """A sum beyond the range of float32 makes the gradient of its sequence NaN, and of no other one in its tile."""
    network = Network(dtype=np.float32)
    run = gradients_anew(tiles, chunk=256)
    (_, (_, got)), (_, (_, expected)) = (run(network, np.array([1.0, w, 1.0, 1.0], np.float32)) for w in (3e38, 0.0))
    others = np.array([0, 2, 3])
    for a, b in zip(got, expected, strict=True):
        assert np.isnan(a[1]).any()
        np.testing.assert_allclose(a[others], b[others], atol=1e-6)


def test_places_of_sums_are_distinct():
    """No two blocks of a tile add to one place, and each place gets its key's sum."""
    keys = np.random.default_rng(0).integers(0, 5, 240, np.int32)
    made = Blocks(1, 1, count=8).goals(jnp.asarray(keys), 5)
    for key, place, goal in zip(*(np.asarray(x).reshape(30, 8) for x in (keys, *made)), strict=True):
        assert len(set(goal)) == 8
        assert set(goal[goal < 5]) == set(key)
        np.testing.assert_array_equal(goal[place], key)


def test_parameters_where_nothing_is_read():
    """Batches without frames and without sequences."""
    for batch, frames in ((2, 0), (0, 3)):
        rows = np.zeros((batch, frames, H)), np.zeros((batch, 4, H))
        rest = np.zeros((batch, 3), np.int32), np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        value, gradient = jax.value_and_grad(tiles, (0, 1))(Network().parameters, rows, rest)
        assert value == 0 and not any(np.any(g) for g in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_parameters_of_two_dtypes():
    network, narrow = Network(), Network(dtype=np.float32)
    _, (expected, _) = gradients(materialized)(network)
    both = zip(network.parameters, narrow.parameters, strict=True)
    narrow.parameters = tuple(x if i == 0 else y for i, (x, y) in enumerate(both))
    _, (got, _) = gradients(tiles)(narrow)
    assert [g.dtype for g in got] == [x.dtype for x in narrow.parameters]
    compare.assert_close(got, expected, atol=4e-5)


# ---------------------------------------------------------------------------------------------- sequences of a batch
@pytest.mark.quick("linear-kernel", "function-kernel")
@WAYS
def test_sequences(implementation, joint):
    """Good ones have the values and gradients of their logits, for any weight; one without weight is skipped.

    NaN inside stays in its sequence. NaN changes no bit in padding, nor in the rows of sequences with lengths or labels
    out of range (NaN), no path (+inf), no frame and no label (0).

    These come first: tiles that are not full must not read the first rows instead.
    """
    run, made, weights = gradients(tiles, joint=joint, implementation=implementation), [], np.ones(14)
    odd, spoilt, good = np.arange(8), (8, 9), np.arange(10, 14)
    weights[good] = 1, -2, 0, 3
    for value in (np.nan, 0.0):
        network = Network(batch=14)
        targets, frames, labels = network.batch
        labels[odd] = [0, U + 1, -1, 1, 1, 0, 2, 0]
        frames[odd] = [T + 1, T, T, T, T, -1, 0, 0]
        targets[3, 0], targets[4, 0] = V, -1
        network.rows[0][8, 2], network.rows[1][9, 0, 3] = np.nan, np.nan
        ends = np.where(np.arange(14) < 8, 0, (frames, labels + 1))
        outside = [np.arange(x.shape[1]) >= n[:, None] for x, n in zip(network.rows, ends, strict=True)]
        network.rows = tuple(np.where(o[..., None], value, x) for o, x in zip(outside, network.rows, strict=True))
        made.append(run(network, weights))
    compare.assert_same_bits(*made)
    values, (of_parameters, of_rows) = made[0]
    assert np.isnan(values[:6]).all() and values[6] == np.inf and values[7] == 0 and np.isnan(values[8:10]).all()
    for g, o in zip(of_rows, outside, strict=True):
        assert not np.any(np.asarray(g)[o])
        assert all(np.isnan(g[i][~o[i]]).all() for i in spoilt)
    got = values[good], (of_parameters, [g[good] for g in of_rows])
    expected, (alone, rows_alone) = gradients(materialized)(network.take(good), weights[good])
    compare.assert_close(got, (expected, (alone, [*rows_alone])), 1e-12)


# ------------------------------------------------------------------------------------------------------- programs
def test_lengths_change_without_compiling():
    """The loops of one program follow the lengths."""
    network = Network()
    run = jax.jit(jax.value_and_grad(chex.assert_max_traces(tiles, n=1)))
    for shift in range(3):
        targets, frames, labels = network.batch
        run(network.parameters, network.rows, (targets, np.maximum(frames - shift, 0), np.maximum(labels - shift, 0)))
    program = run.lower(*network.arguments).compile().as_text()
    assert program.count("known_trip_count") < program.count(" while(")


def test_custom_calls(kernel):
    """Logits are computed twice: forward, and again for the gradient."""
    arguments = Network(dtype=np.float32).arguments
    for run, calls in ((jax.value_and_grad(tiles), family.RNNT.gradient_calls), (tiles, family.RNNT.value_calls)):
        assert hlo.custom_calls(hlo.compiled(run, *arguments)[1]) == hlo.once(calls)


def test_parameters_compile_once():
    """Outside of jit a function is known again, and its rule too: each call checks its shapes by two traces, and the
    first one makes programs by two more."""
    network, joint = Network(dtype=np.float32), chex.assert_max_traces(function, n=2 + 2 + 2)
    value = lambda parameters, rows: jax_rnnt.RNNTLoss()(JointLogits(joint, *rows, CHUNK, parameters), *network.batch)
    for parameters in (network.parameters, tuple(2 * x for x in network.parameters)):
        jax.value_and_grad(value, (0, 1))(parameters, network.rows)


@pytest.mark.parametrize(("joint", "platform"), [(linear, "cuda"), (function, "tpu")])
def test_tiles_follow_the_platform(joint, platform):
    """The platform of the lowering chooses the rows of a tile, not the default backend."""
    shape = lambda *x: jax.ShapeDtypeStruct(x, np.float32)
    rest = np.zeros((2, 9), np.int32), np.array([40, 40], np.int32), np.array([9, 9], np.int32)

    def rows(platform):
        call = lambda parameters, *rows: tiles(parameters, rows, rest, joint=joint, chunk=None)
        traced = jax.jit(call).trace([shape(640, 8192), shape(8192)], shape(2, 40, 640), shape(2, 10, 640))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there may be no kernels for it
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        return max(int(x) for x in re.findall(r"tensor<(\d+)x8192xf32>", text) if x != "640")  # the weight

    assert rows("cpu") < rows(platform)


# --------------------------------------------------------------------------------------------- modules, randomness
def test_linear_joint():
    """A pytree that broadcasts rows; with its default activation it can be pickled and printed."""
    (weight, bias), (frames, states), _ = Network().arguments
    joint, rows = LinearJoint(weight, bias, jax.nn.relu), (frames[:, :, None], states[:, None])
    expected = np.maximum(rows[0] + rows[1], 0) @ weight
    np.testing.assert_allclose(joint(*rows), expected + bias, atol=1e-12)
    np.testing.assert_allclose(LinearJoint(weight, None, jax.nn.relu)(*rows), expected, atol=1e-12)
    assert len(jax.tree.leaves(joint)) == 2
    doubled = jax.tree.map(lambda x: 2 * x, joint)
    assert doubled.activation is jax.nn.relu and np.array_equal(doubled.weight, 2 * weight)
    usual = LinearJoint(weight, bias)
    compare.assert_close(pickle.loads(pickle.dumps(usual))(*rows), np.tanh(rows[0] + rows[1]) @ weight + bias, 1e-12)
    for text in (str(inspect.signature(LinearJoint)), pydoc.render_doc(LinearJoint), repr(usual)):
        assert "jnp.tanh" in text and " at 0x" not in text


@pytest.mark.slow
def test_complex_parameters():
    network, loss = Network(), jax_rnnt.RNNTLoss()
    phases = np.exp(1j * np.random.default_rng(4).normal(size=H))

    def joint(phases, weight, rows):
        return (jnp.tanh(rows).astype(complex) * phases[None]).imag @ weight

    def in_tiles(phases, weight, rows):
        return loss(JointLogits(lambda e, p: joint(phases, weight, e + p), *rows, CHUNK), *network.batch)

    def of_logits(phases, weight, rows):
        nodes = rows[0][:, :, None] + rows[1][:, None]
        return loss(joint(phases, weight, nodes.reshape(-1, H)).reshape(B, T, U + 1, V), *network.batch)

    arguments = phases, network.parameters[0], network.rows
    got, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*arguments) for f in (in_tiles, of_logits))
    compare.assert_close(got, expected, 1e-12)


def test_dropout_is_the_same_in_both_passes():
    """Finite differences would reveal another mask in the backward pass."""
    network = Network()

    def drop(parameters, encoder, predictor):
        weight, bias, key = parameters
        hidden = jnp.tanh(encoder + predictor)
        keep = jax.random.bernoulli(key, 0.5, hidden.shape)
        return jnp.where(keep, 2 * hidden, 0) @ weight + bias[None]

    @jax.jit
    def loss(parameters, rows, key):
        # Posteriors far from uniform, so that blocks could be skipped by mistake.
        parameters = 40 * parameters[0], parameters[1], key
        joint = functools.partial(drop, parameters)
        return jax_rnnt.RNNTLoss()(JointLogits(joint, *rows, CHUNK), *network.batch)

    key, other = jax.random.key(1), jax.random.key(2)
    parameters, rows = network.arguments[:2]
    assert loss(parameters, rows, key) == loss(parameters, rows, key) != loss(parameters, rows, other)
    gradient = jax.jit(jax.grad(loss, (0, 1)))(parameters, rows, key)
    direction = jax.tree.map(lambda x: np.random.default_rng(5).normal(size=x.shape), (parameters, rows))
    shift = lambda s: jax.tree.map(lambda x, d: x + s * d, (parameters, rows), direction)
    numeric = (loss(*shift(1e-6), key) - loss(*shift(-1e-6), key)) / 2e-6
    exact = jax.tree.reduce(np.add, jax.tree.map(lambda g, d: np.sum(g * d), gradient, direction))
    np.testing.assert_allclose(exact, numeric, rtol=1e-6)


# ----------------------------------------------------------------------------------------------------- skip, memory
def confident():
    """A network with posteriors concentrated on few nodes."""
    network = Network(dtype=np.float32)
    network.parameters = tuple(12 * x for x in network.parameters)
    return network


def without_skipping(monkeypatch, **options):
    with monkeypatch.context() as patched:
        patched.setattr(tiled, "not_skipped", lambda *_: jnp.bool_(True))
        return gradients_anew(tiles, **options)(confident())


def assert_only_rounding(got, expected):
    scaled = lambda tree: jax.tree.map(lambda x, b: x / np.abs(b).max(), tree, expected)
    compare.assert_close(scaled(got), scaled(expected), atol=4 * compare.eps(np.float32))


def test_skipped_blocks_change_nothing_but_rounding(monkeypatch):
    counts = []

    def count(self, flags, grouped, work=Blocks.work):
        jax.debug.callback(lambda blocks: counts.append(int(blocks)), jnp.sum(flags))
        return work(self, flags, grouped)

    with monkeypatch.context() as patched:
        patched.setattr(Blocks, "work", count)
        got = gradients_anew(tiles)(confident())
        jax.effects_barrier()
    forward, backward = counts
    assert 0 < backward < 0.8 * forward
    assert_only_rounding(got, without_skipping(monkeypatch))


@pytest.mark.slow
def test_what_is_clipped_is_skipped_for_less(monkeypatch):
    """Clipping makes the kept gradients small, so the skipped ones must be smaller still."""
    clamp = 1e-7
    assert_only_rounding(gradients(tiles, clamp=clamp)(confident()), without_skipping(monkeypatch, clamp=clamp))


@pytest.mark.slow
def test_small_cotangents_are_not_skipped():
    """The gradient of a latency is linear in its weight, however small."""
    parameters, rows, rest = Network(dtype=np.float32).arguments
    loss = jax_rnnt.RNNTLoss(reduction="sum")
    total = lambda e, scale: scale * loss.latency(JointLogits(LinearJoint(*parameters), e, rows[1]), *rest)
    run = jax.jit(jax.grad(total))
    expected = run(rows[0], np.float32(1))
    for weight in (1e-6, 1e-12):
        got = run(rows[0], np.float32(weight)) / np.float32(weight)
        np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("batch", "encoders", "labels", "classes", "planes", "limit"),
    [((32,), (32,), 128, 1024, 4, 64e6), ((8, 16), (8, 1), 64, 512, 5, 20e6)],
    ids=["utterances", "hypotheses"],
)
def test_workspace(batch, encoders, labels, classes, planes, limit):
    """Planes, a tile and the float32 sums of the gradients: no logits, of which there are 3.4 GB in bfloat16, and no
    encoder row for each of 16 hypotheses, which would take 66 MB."""
    spec, frames, width = jax.ShapeDtypeStruct, 400, 640
    parameters = spec((width, classes), jnp.bfloat16), spec((classes,), jnp.bfloat16)
    rows = [spec((*shape, width), jnp.bfloat16) for shape in ((*encoders, frames), (*batch, labels + 1))]
    rest = spec((*batch, labels), np.int32), spec(batch, np.int32), spec(batch, np.int32)
    run = jax.value_and_grad(functools.partial(tiles, chunk=None), (0, 1))
    found = jax.jit(run).lower(parameters, rows, rest).compile().memory_analysis()
    if found is None:
        pytest.skip("this backend does not tell")
    beyond = found.temp_size_in_bytes - planes * 4 * np.prod(batch) * frames * (labels + 1)
    beyond -= 4 * sum(x.size for x in (*parameters, *rows)) if batch != encoders else 0
    assert beyond <= limit, f"{beyond / 1e6:.0f} MB, {planes} planes and the gradients"


@pytest.mark.slow
def test_hypotheses_are_summed_in_float32():
    """16 equal hypotheses of an utterance, of weights 256, 1, 1, ...: a sum in bfloat16 would stay at 256 of 271."""
    network, weights = Network(dtype=jnp.bfloat16), np.ones((B, 16), np.float32)
    weights[:, 0] = 256
    _, (_, (expected, _)) = gradients(materialized)(network.widened(), 271.0)
    network.rows = network.rows[0][:, None], np.repeat(network.rows[1][:, None], 16, 1)
    network.batch = [np.repeat(x[:, None], 16, 1) for x in network.batch]
    _, (_, (got, _)) = gradients(tiles)(network, weights)
    np.testing.assert_allclose(np.asarray(got[:, 0], np.float64), expected, atol=0.01 * np.abs(expected).max())
