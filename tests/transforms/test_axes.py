"""Modules and decoders on a mesh of `jax.make_mesh`, whose axes are Explicit, or Auto: the same as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_rnnt import RNNTLoss, decode
from jax_rnnt.flax import linen as flax_linen
from jax_rnnt.flax import nnx as flax_nnx
from meshes import at, mesh_of

pytestmark = pytest.mark.no_kernel
B, T, U, V, E = 8, 6, 3, 5, 8
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(B, T, E)).astype(np.float32)
TARGETS = RNG.integers(V - 1, size=(B, U)).astype(np.int32)
FRAMES, LABELS = np.int32([6, 5, 6, 4, 1, 3, 6, 6]), np.int32([3, 2, 3, 1, 0, 3, 2, 3])
PREDICTORS = {"LSTM": "LSTMPredictor", "stateless": "StatelessPredictor"}
JOINTS = {"plain": {}, "dropout": {"dropout": 0.3}, "masking": {"masking": 0.3}}


@pytest.fixture(autouse=True)
def rank_promotion():
    """Layers of Flax need it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def on_both(devices, function, *arrays, kind="explicit"):
    """Results without a mesh, and with arrays split over four devices."""
    alone = jax.device_get(function(*map(jnp.asarray, arrays)))
    with mesh_of(devices[:4], kind, (4,)) as mesh:
        split = [at(mesh, x, "data", *[None] * (np.ndim(x) - 1)) for x in arrays]
        assert kind == "auto" or jax.typeof(split[0]).sharding.spec[0] == "data"
        return alone, jax.device_get(function(*split))


def agree(results, **tolerance):
    alone, split = map(jax.tree.leaves, results)
    assert len(alone) == len(split) > 0
    for x, y in zip(alone, split):
        np.testing.assert_allclose(y, x, **tolerance)


def nnx_modules(predictor, joint="plain"):
    predictor = getattr(flax_nnx, PREDICTORS[predictor])(V, E, rngs=nnx.Rngs(0))
    return predictor, flax_nnx.Joint(E, E, 8, V, rngs=nnx.Rngs(1), **JOINTS[joint])


def nnx_logits(predictor, joint, tiles):
    graphdef, params, rest = nnx.split(nnx_modules(predictor, joint), nnx.Param, ...)

    def logits(params, rows, targets):
        predictor, joint = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest))
        states = predictor(targets)
        return joint.logits(rows, states) if tiles else joint(rows[:, :, None], states[:, None])

    return logits, params


def linen_logits(predictor, joint, tiles):
    predictor, training = getattr(flax_linen, PREDICTORS[predictor])(V, E), joint != "plain"
    joint = flax_linen.Joint(8, V, **JOINTS[joint])
    options = {"deterministic": True} if training else {}
    states = np.zeros((B, 1, U + 1, E), np.float32)
    params = (
        predictor.init(jax.random.key(0), TARGETS),
        joint.init(jax.random.key(1), ROWS[:, :, None], states, **options),
    )
    if training:
        options = {"deterministic": False, "rngs": {"dropout": jax.random.key(2)}}

    def logits(params, rows, targets):
        states = predictor.apply(params[0], targets)
        if tiles:
            return joint.apply(params[1], rows, states, method="logits", **options)
        return joint.apply(params[1], rows[:, :, None], states[:, None], **options)

    return logits, params


def test_modules(devices):
    """Loss and gradient of all parameters; dropout draws the same masks. Without them: decode/test_agreement.py."""
    cases = nnx_logits("stateless", "dropout", tiles=True), linen_logits("LSTM", "masking", tiles=False)
    logits, params = zip(*cases)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=4, has_aux=True)
    def loss(rows, targets, frames, labels, params):
        each = [RNNTLoss()(f(x, rows, targets), targets, frames, labels) for f, x in zip(logits, params)]
        return sum(each), each

    problem = ROWS, TARGETS, FRAMES, LABELS
    agree(on_both(devices, lambda *x: loss(*x, params), *problem), rtol=1e-5, atol=1e-6)


def search(function, predictor, rows, frames, state=None):
    predictor, joint = nnx_modules(predictor)
    return function(RNNTLoss(), *joint.decoder_inputs(predictor, rows), frames, 8, state=state)


def test_streams(devices):
    """A stream in two parts, with its rows changed between them in every way."""

    beam = functools.partial(search, functools.partial(decode.beam, width=3), "LSTM")

    @jax.jit
    def run(first, second, lengths, more, order):
        state = decode.select_streams(beam(first, lengths).state, order)
        state = decode.concatenate_streams([decode.reset_streams(state, order > 4), state])
        state = decode.select_streams(state, order + 8 * (order % 2))
        return beam(second, more, state)._replace(state=None)

    parts = ROWS[:, :3], ROWS[:, 3:], np.minimum(FRAMES, 3), np.maximum(FRAMES - 3, 0)
    agree(on_both(devices, run, *parts, np.int32([1, 0, 3, 2, 5, 4, 7, 7])), rtol=1e-5)


@pytest.mark.slow
def test_auto(devices):
    """Greedy search on axes of type Auto."""
    run = jax.jit(lambda *x: search(decode.greedy, "stateless", *x)._replace(state=None))
    agree(on_both(devices, run, ROWS, FRAMES, kind="auto"), rtol=1e-5)


def test_rows_of_streams(devices):
    """They lie where the frames do; no mesh splits three of them."""
    with mesh_of(devices[:4], "explicit", (4,)) as mesh:
        found = jax.jit(functools.partial(search, decode.greedy, "stateless"))(
            at(mesh, ROWS, "data"), at(mesh, FRAMES, "data")
        )
        assert jax.typeof(found.labels).sharding.spec[0] == "data"
        with pytest.raises(ValueError, match=r"rows must have a multiple of 4 numbers, .* got 3"):
            decode.select_streams(found.state, np.int32([0, 1, 2]))
    of_jax = jax.make_mesh((4,), ("data",), devices=devices[:4])
    assert of_jax == mesh or jax.sharding.AxisType.Explicit not in of_jax.axis_types
