"""Is the loss of a joint network in tiles that of its logits, for any joint, and in little memory?

Tiles also answer the tests of the family (`losses.in_tiles`). Here is what only a joint has: parameters, rows that many
nodes share, tiles, randomness.
"""

import functools
import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from networks import (
    CHUNK,
    JOINTS,
    B,
    H,
    Network,
    T,
    U,
    V,
    assert_close,
    closure,
    gradients,
    linear,
    materialized,
    tiles,
)

import jax_rnnt
import losses
from jax_rnnt import LinearJoint, joint_rnnt_loss
from jax_rnnt.layouts import _tiles as tiled

# Both kinds of joint, and plain JAX for the one that it does not know.
WAYS = pytest.mark.parametrize(
    ("joint", "implementation"), [(linear, "kernel"), (closure, "kernel"), (closure, "reference")],
    indirect=["implementation"],
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ values, gradients


@WAYS
@pytest.mark.rare("closure-kernel")
def test_is_that_of_the_logits(implementation, joint):
    network, weights = Network(), np.array([1.0, -2.0, 0.5, 3.0])
    got = gradients(tiles, joint=joint, reduction="none", implementation=implementation)(network, weights)
    expected = gradients(materialized, reduction="none", implementation="reference")(network, weights)
    assert_close(got, expected, 1e-12)


def test_options_of_the_call():
    """They mean what they mean in a loss."""
    network = Network()
    parameters, rows, rest = network.arguments
    for given in (
        {"blank": 2, "reduction": "sum", "clamp": 0.05, "fastemit_lambda": 0.5, "delay_penalty": 0.1},
        {"fused_log_softmax": False, "label_windows": np.tile(np.array([1, T], np.int32), (B, U, 1))},
    ):
        call = lambda *trained: joint_rnnt_loss(LinearJoint(*trained), *rows, *rest, chunk=CHUNK, **given)
        expected = jax.value_and_grad(lambda *trained: materialized(trained, rows, rest, **given), (0, 1))(*parameters)
        assert_close(jax.value_and_grad(call, (0, 1))(*parameters), expected, 1e-12)


def test_parameters_where_nothing_is_read():
    """Batches without frames and without sequences."""
    parameters = Network().parameters
    for batch, frames in ((2, 0), (0, 3)):
        rows = np.zeros((batch, frames, H)), np.zeros((batch, 4, H))
        rest = np.zeros((batch, 3), np.int32), np.zeros(batch, np.int32), np.zeros(batch, np.int32)
        value, gradient = jax.value_and_grad(tiles, (0, 1))(parameters, rows, rest)
        assert value == 0 and not any(np.any(g) for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("wide", [0, 1], ids=["weight", "bias"])
def test_parameters_of_two_dtypes(wide):
    network, narrow = Network(), Network(dtype=np.float32)
    expected = jax.grad(tiles)(*network.arguments)
    narrow.parameters = tuple(
        x if i == wide else y for i, (x, y) in enumerate(zip(network.parameters, narrow.parameters))
    )
    got = jax.grad(tiles)(*narrow.arguments)
    assert [g.dtype for g in got] == [x.dtype for x in narrow.parameters]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@JOINTS
@pytest.mark.rare("closure")
def test_any_chunk(joint):
    network = Network()
    expected = gradients(tiles, joint=joint, chunk=None)(network)
    for chunk in (1, 10**6):
        assert_close(gradients(tiles, joint=joint, chunk=chunk)(network), expected, 1e-12)


@pytest.fixture
def elsewhere(monkeypatch):
    """Tiles as they are lowered for other platforms than a CPU."""
    lowered_for = tiled.Tiled.lowered_for
    monkeypatch.setattr(tiled.Tiled, "lowered_for", lambda self, _, *rows: lowered_for(self, ("other",), *rows))
    monkeypatch.setattr(tiled, "block_of", lambda *_: (4, 3))  # so that a tile has several


def test_as_on_other_platforms(elsewhere):
    """Other blocks, sums in another order, hidden units made twice."""
    network, weights = Network(), np.array([1.0, -2.0, 0.5, 3.0])
    got = gradients(tiles, reduction="none")(network, weights)
    assert_close(got, gradients(materialized, reduction="none")(network, weights), 1e-12)
    wide, network = network, Network(dtype=jnp.bfloat16)
    wide.parameters, wide.rows = (
        jax.tree.map(lambda x: x.astype(np.float64), x) for x in (network.parameters, network.rows)
    )
    got, peer = (gradients(f)(network)[1] for f in (tiles, materialized))
    _, expected = gradients(materialized)(wide)
    for a, b, true in zip(*map(jax.tree.leaves, (got, peer, expected)), strict=True):
        error, of_peer = (np.abs(np.asarray(x, np.float64) - true).max() for x in (a, b))
        assert error <= max(1.5 * of_peer, losses.eps(jnp.bfloat16) * np.abs(true).max())


def test_overflow_stays_in_its_sequence(elsewhere):
    """A sum beyond the range of float32 makes the gradient of its sequence NaN, and of no other one in its tile."""
    network = Network(dtype=np.float32)
    run = gradients(tiles, chunk=256, reduction="none")
    (_, (_, got)), (_, (_, expected)) = (run(network, np.array([1.0, w, 1.0, 1.0], np.float32)) for w in (3e38, 0.0))
    others = np.array([0, 2, 3])
    for a, b in zip(got, expected, strict=True):
        assert np.isnan(a[1]).any()
        np.testing.assert_allclose(a[others], b[others], atol=1e-6)


def test_places_of_sums_are_distinct():
    """No two blocks of a tile add to one place, and each place gets its key's sum."""
    keys = np.random.default_rng(0).integers(0, 5, 24, np.int32)
    made = tiled.Tiled.goals(types.SimpleNamespace(blocks=8), jnp.asarray(keys), 5)
    for key, place, goal in zip(*(np.asarray(x).reshape(3, 8) for x in (keys, *made)), strict=True):
        assert len(set(goal)) == 8
        assert set(goal[goal < 5]) == set(key)
        np.testing.assert_array_equal(goal[place], key)


@JOINTS
def test_half_precision(joint):
    """Sums over rows and tiles are in float32: only logits, hidden units and results are rounded to 16 bits."""
    network, wide = Network(dtype=jnp.bfloat16), Network()
    wide.parameters, wide.rows = (
        jax.tree.map(lambda x: x.astype(np.float64), x) for x in (network.parameters, network.rows)
    )
    values, gradient = gradients(tiles, joint=joint, chunk=1)(network)
    assert values.dtype == np.float32
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.bfloat16)}
    _, expected = gradients(materialized)(wide)
    _, peer = gradients(materialized)(network)
    for got, other, true in zip(*map(jax.tree.leaves, (gradient, peer, expected)), strict=True):
        error, of_peer = (np.abs(np.asarray(x, np.float64) - true).max() for x in (got, other))
        assert error <= max(1.5 * of_peer, losses.eps(jnp.bfloat16) * np.abs(true).max())


# ---------------------------------------------------------------------------------------------- what is never read


def poison(network, value):
    frames, columns = (np.arange(n) for n in (T, U + 1))
    lengths = network.rest[1][:, None], network.rest[2][:, None] + 1
    outside = frames >= lengths[0], columns >= lengths[1]
    return tuple(np.where(o[..., None], value, x) for o, x in zip(outside, network.rows, strict=True))


@JOINTS
def test_padding_changes_no_bit(joint):
    network = Network()
    run = gradients(tiles, joint=joint, reduction="none")
    expected = run(network, rows=poison(network, 0.0))
    got = run(network, rows=poison(network, np.nan))
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        losses.assert_same_bits(a, b)
    for g, inside in zip(got[1][1], poison(network, np.inf), strict=True):
        assert not np.any(np.asarray(g)[np.isinf(inside)])


@WAYS
def test_nan_stays_in_its_sequence(implementation, joint):
    """It reaches neither the encoder and predictor gradients of other sequences nor those of the parameters."""
    network = Network()
    run = gradients(tiles, joint=joint, reduction="none", implementation=implementation)
    expected, (_, rows) = run(network)
    encoder, predictor = (x.copy() for x in network.rows)
    encoder[1, 2], predictor[2, 0, 3] = np.nan, np.nan
    got, (of_parameters, of_rows) = run(network, rows=(encoder, predictor))
    others = [0, 3]
    np.testing.assert_array_equal(np.isnan(got), [False, True, True, False])
    np.testing.assert_allclose(got[np.array(others)], expected[np.array(others)], rtol=1e-12)
    for a, b, lengths in zip(of_rows, rows, (network.rest[1], network.rest[2] + 1), strict=True):
        np.testing.assert_allclose(a[others, ...], b[others, ...], atol=1e-12)
        for i in (1, 2):
            inside = np.arange(a.shape[1]) < lengths[i]
            np.testing.assert_array_equal(np.isnan(a[i]).all(-1), inside)
            assert not np.any(a[i][~inside])
    network.rows, network.rest = (jax.tree.map(lambda x: x[np.array(others)], x) for x in (network.rows, network.rest))
    alone, _ = gradients(materialized, reduction="none")(network)[1]
    assert_close(of_parameters, alone, 1e-12)


@WAYS
def test_odd_sequences_contribute_nothing(implementation, joint):
    """Bad lengths or labels (NaN), no path (+inf), no frame and no label (0). Their rows may even be NaN.

    They come first: tiles that are not full must not read the first rows instead.
    """
    network = Network(batch=6)
    targets, frames, labels = (x.copy() for x in network.rest)
    frames[0], labels[1], targets[2, 0], labels[2], frames[3], labels[3] = T + 1, -1, V, 1, 0, 2
    run = gradients(tiles, joint=joint, reduction="none", implementation=implementation)
    rows = tuple(x.copy() for x in network.rows)
    for x in rows:
        x[:4] = np.nan
    values, (of_parameters, of_rows) = run(network, rows=rows, rest=(targets, frames, labels))
    np.testing.assert_array_equal(np.isnan(values), [True, True, True, False, False, False])
    assert values[3] == np.inf
    assert not any(np.any(np.asarray(g)[:4]) for g in of_rows)
    good = np.array([4, 5])
    network.rows, network.rest = (jax.tree.map(lambda x: x[good], x) for x in (network.rows, network.rest))
    expected_values, (expected, of_rows_alone) = gradients(materialized, reduction="none")(network)
    np.testing.assert_allclose(values[good], expected_values, rtol=1e-12)
    assert_close(of_parameters, expected, 1e-12)
    assert_close([g[good] for g in of_rows], of_rows_alone, 1e-12)


def test_rows_of_bad_sequences_change_no_bit(implementation):
    """NaN in the rows of sequences whose lengths or labels are out of range, or which have no frame."""
    network = Network(losses.TDT, batch=8)
    targets, frames, labels = (x.copy() for x in network.rest)
    labels[:] = np.maximum(labels, 1)
    frames[1], frames[2], labels[3], labels[4], targets[5, 0], targets[6, 0], frames[7] = T + 1, -1, U + 1, -1, V, -1, 0
    run = gradients(tiles, loss=losses.TDT, reduction="none", implementation=implementation)
    made = []
    for value in (0.0, np.nan):
        rows = tuple(x.copy() for x in network.rows)
        for x in rows:
            x[1:] = value
        made.append(run(network, rows=rows, rest=(targets, frames, labels)))
    values, gradient = made[1]
    assert np.isfinite(values[0]) and np.isnan(values[1:7]).all() and np.isposinf(values[7])
    for a, b in zip(*map(jax.tree.leaves, made), strict=True):
        losses.assert_same_bits(a, b)
    assert all(np.any(g) and np.isfinite(g).all() for g in gradient[0])
    assert all(np.any(np.asarray(g)[0]) and not np.any(np.asarray(g)[1:]) for g in gradient[1])


# ------------------------------------------------------------------------------------------------- transformations


def test_lengths_change_without_compiling():
    """The loops of one program follow the lengths."""
    network = Network()
    run = jax.jit(jax.value_and_grad(tiles))
    for shift in range(3):
        targets, frames, labels = network.rest
        run(network.parameters, network.rows, (targets, np.maximum(frames - shift, 0), np.maximum(labels - shift, 0)))
    assert run._cache_size() == 1
    program = run.lower(*network.arguments).compile().as_text()
    assert program.count("known_trip_count") < program.count(" while(")


def test_custom_calls(kernel):
    """Logits are computed twice: forward, and again for the gradient."""
    network = Network(dtype=np.float32)
    text = jax.jit(jax.value_and_grad(tiles)).lower(*network.arguments).compile().as_text()
    assert losses.custom_calls(text) == losses.once(losses.RNNT.gradient_calls)
    text = jax.jit(tiles).lower(*network.arguments).compile().as_text()
    assert losses.custom_calls(text) == losses.once(losses.RNNT.value_calls)


def test_scan():
    network = Network()

    def body(parameters, _):
        value, gradient = jax.value_and_grad(functools.partial(tiles, joint=closure))(
            parameters, *network.arguments[1:]
        )
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient), value

    _, values = jax.jit(lambda p: jax.lax.scan(body, p, length=3))(network.parameters)
    assert values[0] > values[1] > values[2]


def test_reference_in_forward_mode():
    network = Network()
    f = functools.partial(tiles, implementation="reference")
    total = lambda *trained: f(*trained, network.rest)
    ones = jax.tree.map(np.ones_like, network.arguments[:2])
    _, tangent = jax.jvp(total, network.arguments[:2], ones)
    gradient = jax.grad(total, (0, 1))(*network.arguments[:2])
    np.testing.assert_allclose(tangent, sum(np.sum(g) for g in jax.tree.leaves(gradient)), rtol=1e-10)


def test_no_second_derivative_of_tiles():
    """The error says so, and names the reference, which has one."""
    network = Network()
    with pytest.raises(NotImplementedError, match="implementation='reference'"):
        jax.hessian(lambda bias: tiles((network.parameters[0], bias), *network.arguments[1:]))(network.parameters[1])


# --------------------------------------------------------------------------------------------- modules, randomness


def test_flax_module():
    nnx = pytest.importorskip("flax.nnx")

    class Joint(nnx.Module):
        def __init__(self, rngs):
            kwargs = dict(param_dtype=jnp.float64, rngs=rngs)
            self.encoder, self.predictor = nnx.Linear(H, 5, **kwargs), nnx.Linear(H, 5, use_bias=False, **kwargs)
            self.output = nnx.Linear(5, V, **kwargs)

        def __call__(self, encoder, predictor):
            return self.output(jax.nn.relu(self.encoder(encoder) + self.predictor(predictor)))

    network, joint = Network(), Joint(nnx.Rngs(0))
    frames, states = network.rows

    def in_tiles(joint):
        return joint_rnnt_loss(joint, frames, states, *network.rest, chunk=CHUNK)

    def of_logits(joint):
        logits = joint(jnp.repeat(frames[:, :, None], U + 1, 2), jnp.repeat(states[:, None], T, 1))
        return jax_rnnt.rnnt_loss(logits, *network.rest)

    for _ in range(2):  # the same module, updated in place
        got, expected = (nnx.value_and_grad(f)(joint) for f in (in_tiles, of_logits))
        assert_close(got, expected, 1e-12)
        np.testing.assert_allclose(in_tiles(joint), of_logits(joint), rtol=1e-12)
        nnx.update(joint, jax.tree.map(lambda p, g: p - 0.5 * g, nnx.state(joint), expected[1]))


def test_complex_parameters():
    network = Network()
    rng = np.random.default_rng(4)
    phases = np.exp(1j * rng.normal(size=H))

    def joint(phases, weight, rows):
        return (jnp.tanh(rows).astype(complex) * phases[None]).imag @ weight

    def in_tiles(phases, weight, rows):
        return joint_rnnt_loss(lambda e, p: joint(phases, weight, e + p), *rows, *network.rest, chunk=CHUNK)

    def of_logits(phases, weight, rows):
        nodes = rows[0][:, :, None] + rows[1][:, None]
        return jax_rnnt.rnnt_loss(joint(phases, weight, nodes.reshape(-1, H)).reshape(B, T, U + 1, V), *network.rest)

    arguments = phases, network.parameters[0], network.rows
    got, expected = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*arguments) for f in (in_tiles, of_logits))
    assert_close(got, expected, 1e-12)


def test_dropout_is_the_same_in_both_passes():
    """Finite differences would reveal another mask in the backward pass."""
    network = Network()

    def joint_of(key):
        def joint(weight, bias):
            def call(encoder, predictor):
                hidden = jnp.tanh(encoder + predictor)
                keep = jax.random.bernoulli(key, 0.5, hidden.shape)
                return jnp.where(keep, 2 * hidden, 0) @ weight + bias[None]

            return call

        return joint

    @jax.jit
    def loss(parameters, rows, key):
        # Posteriors far from uniform, so that blocks could be skipped by mistake.
        return tiles((40 * parameters[0], parameters[1]), rows, network.rest, joint=joint_of(key))

    key, other = jax.random.key(1), jax.random.key(2)
    parameters, rows = network.arguments[:2]
    assert loss(parameters, rows, key) == loss(parameters, rows, key) != loss(parameters, rows, other)
    gradient = jax.grad(loss, (0, 1))(parameters, rows, key)
    direction = jax.tree.map(lambda x: np.random.default_rng(5).normal(size=x.shape), (parameters, rows))
    shift = lambda s: jax.tree.map(lambda x, d: x + s * d, (parameters, rows), direction)
    numeric = (loss(*shift(1e-6), key) - loss(*shift(-1e-6), key)) / 2e-6
    exact = sum(np.sum(g * d) for g, d in zip(*map(jax.tree.leaves, (gradient, direction)), strict=True))
    np.testing.assert_allclose(exact, numeric, rtol=1e-6)


# ----------------------------------------------------------------------------------------------------- skip, memory


def confident(batch=B, dtype=np.float32):
    """A network with posteriors concentrated on few nodes."""
    network = Network(batch=batch, dtype=dtype)
    network.parameters = tuple(x * dtype(12) for x in network.parameters)
    return network


def test_skipped_blocks_change_nothing_but_rounding(monkeypatch):
    network, counts = confident(), []

    def count(tiled, flags, grouped, work=tiled.Tiled.work):
        jax.debug.callback(lambda blocks: counts.append(int(blocks)), jnp.sum(flags))
        return work(tiled, flags, grouped)

    monkeypatch.setattr(tiled.Tiled, "work", count)
    got = gradients(tiles)(network)
    jax.effects_barrier()
    forward, backward = counts
    assert 0 < backward < 0.8 * forward
    monkeypatch.undo()
    monkeypatch.setattr(tiled, "not_skipped", lambda *_: jnp.bool_(True))
    expected = gradients(tiles)(network)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * losses.eps(np.float32) * np.abs(b).max())


@pytest.mark.parametrize("clamp", [1e-3, 1e-7])
def test_what_is_clipped_is_skipped_for_less(monkeypatch, clamp):
    """Clipping makes the kept gradients small, so the skipped ones must be smaller still."""
    network = confident()
    got = gradients(tiles, clamp=clamp)(network)
    monkeypatch.setattr(tiled, "not_skipped", lambda *_: jnp.bool_(True))
    expected = gradients(tiles, clamp=clamp)(network)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * losses.eps(np.float32) * np.abs(b).max())


@pytest.mark.parametrize("weight", [1e-6, 1e-12])
def test_small_cotangents_are_not_skipped(weight):
    """The gradient of a latency is linear in its weight, however small."""
    network = Network(dtype=np.float32)
    parameters, rows, rest = network.arguments
    loss = losses.RNNT.value(reduction="sum")
    total = lambda e, scale: scale * loss.latency(jax_rnnt.JointLogits(LinearJoint(*parameters), e, rows[1]), *rest)
    got, expected = (jax.grad(total)(rows[0], np.float32(scale)) for scale in (weight, 1))
    np.testing.assert_allclose(got / np.float32(weight), expected, atol=1e-4 * np.abs(expected).max())


def test_sequences_without_weight():
    network = Network()
    run = gradients(tiles, reduction="none")
    weights = np.array([1.0, 0.0, 2.0, 0.0])
    _, gradient = run(network, weights)
    _, expected = gradients(materialized, reduction="none")(network, weights)
    assert_close(gradient, expected, 1e-12)


def workspace(run, *shapes):
    found = jax.jit(run).lower(*shapes).compile().memory_analysis()
    if found is None:
        pytest.skip("this backend does not tell")
    return found.temp_size_in_bytes


@pytest.mark.rare("closure", "float32")
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
@JOINTS
def test_workspace(joint, dtype):
    """64 MB beside arguments, gradients and planes, where the logits alone are 3.4 GB in bfloat16."""
    batch, frames, labels, classes, width = 32, 400, 128, 1024, 640
    spec = jax.ShapeDtypeStruct
    parameters = spec((width, classes), dtype), spec((classes,), dtype)
    rows = spec((batch, frames, width), dtype), spec((batch, labels + 1, width), dtype)
    rest = spec((batch, labels), np.int32), spec((batch,), np.int32), spec((batch,), np.int32)
    run = jax.value_and_grad(functools.partial(tiles, joint=joint, chunk=None), (0, 1))
    plane = 4 * batch * frames * (labels + 1)
    size = workspace(run, parameters, rows, rest)
    assert size <= 64e6 + 4 * plane, f"{(size - 4 * plane) / 1e6:.0f} MB and four planes"


# --------------------------------------------------------------------------------------------------------- messages


class Unhashable:
    __hash__ = None

    def __call__(self, x):
        return x


def test_messages():
    (weight, bias), (frames, states), rest = Network().arguments
    joint = LinearJoint(weight, bias)
    for changes, name in (
        ({"joint": None}, "joint"),
        ({"encoder_out": frames[0, 0]}, "encoder_out"),
        ({"encoder_out": frames.astype(int)}, "encoder_out"),
        ({"predictor_out": states[:2]}, "predictor_out"),  # 2 sequences for 4
        ({"predictor_out": states[:, :0]}, "predictor_out"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.0}, "chunk"),
        ({"joint": LinearJoint(weight[:2], bias)}, "joint.weight"),
        ({"joint": LinearJoint(weight, bias[:2])}, "joint.bias"),
        ({"joint": LinearJoint(None)}, "joint.weight"),
        ({"joint": LinearJoint(weight, bias.astype(int))}, "joint.bias"),
        ({"joint": LinearJoint(weight, bias, lambda x: x[..., :2])}, "joint.activation"),
        ({"joint": LinearJoint(weight, bias, lambda x: (x, x))}, "joint.activation"),
        ({"joint": LinearJoint(weight, bias, lambda x: jnp.sum(x, -1, keepdims=True))}, "joint.activation"),
        ({"joint": LinearJoint(weight, bias, None)}, "joint.activation"),
        ({"joint": LinearJoint(weight, bias, Unhashable())}, "joint.activation"),
        ({"joint": lambda e, p: e[0]}, "joint"),
        ({"joint": lambda e, p: (e, p)}, "joint"),
        ({"joint": lambda e, p: jnp.concatenate([e, p])}, "joint"),
        ({"joint": lambda e, p: jnp.zeros((2, V))}, "joint"),
        ({"joint": lambda e, p: jnp.zeros((2, V)), "implementation": "reference"}, "joint"),
        ({"joint": lambda e, p: (e + p).astype(jnp.int32)}, "joint"),
    ):
        arguments = {"joint": joint, "encoder_out": frames, "predictor_out": states} | changes
        with pytest.raises((ValueError, TypeError), match=rf"joint_rnnt_loss: {name} must"):
            joint_rnnt_loss(**arguments, **dict(zip(("targets", "logit_lengths", "target_lengths"), rest, strict=True)))
    for options, name in (({"blank": 9}, "blank"), ({"reduction": "average"}, "reduction"), ({"clamp": "1"}, "clamp")):
        with pytest.raises((ValueError, TypeError), match=rf"rnnt_loss: {name} must"):
            joint_rnnt_loss(joint, frames, states, *rest, **options)
    with pytest.raises(ValueError, match=r"rnnt_loss: targets must"):
        joint_rnnt_loss(joint, frames, states, rest[0][:, :2], *rest[1:])


def test_tiles_follow_the_platform():
    """The platform of the lowering chooses the rows of a tile, not the default backend."""
    shape = lambda *x: jax.ShapeDtypeStruct(x, np.float32)
    lengths = np.array([40, 40], np.int32), np.array([9, 9], np.int32)
    targets = np.zeros((2, 9), np.int32)

    def rows(platform):
        call = lambda weight, *rows: joint_rnnt_loss(LinearJoint(weight), *rows, targets, *lengths)
        traced = jax.jit(call).trace(shape(640, 8192), shape(2, 40, 640), shape(2, 10, 640))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # there may be no kernels for it
            text = traced.lower(lowering_platforms=(platform,)).as_text()
        return max(int(x) for x in re.findall(r"tensor<(\d+)x8192xf32>", text) if x != "640")  # the weight

    assert rows("cpu") < rows("tpu")


def test_linear_joint():
    """A pytree that broadcasts rows."""
    (weight, bias), (frames, states), _ = Network().arguments
    joint = LinearJoint(weight, bias, jax.nn.relu)
    expected = np.maximum(frames[:, :, None] + states[:, None], 0) @ weight
    np.testing.assert_allclose(joint(frames[:, :, None], states[:, None]), expected + bias, atol=1e-12)
    np.testing.assert_allclose(
        LinearJoint(weight, None, jax.nn.relu)(frames[:, :, None], states[:, None]), expected, atol=1e-12
    )
    assert len(jax.tree.leaves(joint)) == 2
    doubled = jax.tree.map(lambda x: 2 * x, joint)
    assert doubled.activation is jax.nn.relu and np.array_equal(doubled.weight, 2 * weight)
