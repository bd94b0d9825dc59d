"""Modules and decoders on a mesh of Explicit axes, as `jax.make_mesh` makes them: the same as on one device."""

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


@pytest.fixture(autouse=True)
def rank_promotion():
    """Layers of Flax need it."""
    with jax.numpy_rank_promotion("allow"):
        yield


def on_both(devices, function, *arrays):
    """Results without a mesh, and with arrays split over four devices."""
    alone = jax.device_get(function(*map(jnp.asarray, arrays)))
    with mesh_of(devices[:4], "explicit", (4,)) as mesh:
        split = [at(mesh, x, "data", *[None] * (np.ndim(x) - 1)) for x in arrays]
        assert jax.typeof(split[0]).sharding.spec[0] == "data"
        return alone, jax.device_get(function(*split))


def agree(results, **tolerance):
    alone, split = map(jax.tree.leaves, results)
    assert len(alone) == len(split) > 0
    for x, y in zip(alone, split):
        np.testing.assert_allclose(y, x, **tolerance)


def nnx_modules(predictor, **options):
    return predictor(V, E, rngs=nnx.Rngs(0)), flax_nnx.Joint(E, E, 8, V, rngs=nnx.Rngs(1), **options)


def nnx_logits():
    """(function of parameters, rows and targets; parameters): in tiles, with dropout."""
    modules = nnx_modules(flax_nnx.StatelessPredictor, dropout=0.3)
    graphdef, params, rest = nnx.split(modules, nnx.Param, ...)

    def logits(params, rows, targets):
        predictor, joint = nnx.merge(graphdef, params, jax.tree.map(lambda x: x, rest))
        return joint.logits(rows, predictor(targets))

    return logits, params


def linen_logits():
    """The same as an array, with masking."""
    predictor, joint = flax_linen.LSTMPredictor(V, E), flax_linen.Joint(8, V, masking=0.3)
    of_predictor, states = predictor.init(jax.random.key(0), TARGETS), np.zeros((B, 1, U + 1, E), np.float32)
    params = of_predictor, joint.init(jax.random.key(1), ROWS[:, :, None], states, deterministic=True)

    def logits(params, rows, targets):
        states, rngs = predictor.apply(params[0], targets), {"dropout": jax.random.key(2)}
        return joint.apply(params[1], rows[:, :, None], states[:, None], deterministic=False, rngs=rngs)

    return logits, params


def test_modules(devices):
    """Loss and gradient of all parameters; dropout draws the same masks. Without them: decode/test_agreement.py."""
    logits, params = zip(nnx_logits(), linen_logits())

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

    beam = functools.partial(search, functools.partial(decode.beam, width=3), flax_nnx.LSTMPredictor)

    @jax.jit
    def run(first, second, lengths, more, order):
        state = decode.select_streams(beam(first, lengths).state, order)
        state = decode.concatenate_streams([decode.reset_streams(state, order > 4), state])
        state = decode.select_streams(state, order + 8 * (order % 2))
        return beam(second, more, state)._replace(state=None)

    parts = ROWS[:, :3], ROWS[:, 3:], np.minimum(FRAMES, 3), np.maximum(FRAMES - 3, 0)
    agree(on_both(devices, run, *parts, np.int32([1, 0, 3, 2, 5, 4, 7, 7])), rtol=1e-5)


def test_rows_of_streams(devices):
    """They lie where the frames do; no mesh splits three of them."""
    with mesh_of(devices[:4], "explicit", (4,)) as mesh:
        found = jax.jit(functools.partial(search, decode.greedy, flax_nnx.StatelessPredictor))(
            at(mesh, ROWS, "data"), at(mesh, FRAMES, "data")
        )
        assert jax.typeof(found.labels).sharding.spec[0] == "data"
        with pytest.raises(ValueError, match=r"rows must have a multiple of 4 numbers, .* got 3"):
            decode.select_streams(found.state, np.int32([0, 1, 2]))
    of_jax = jax.make_mesh((4,), ("data",), devices=devices[:4])
    assert of_jax == mesh or jax.sharding.AxisType.Explicit not in of_jax.axis_types
