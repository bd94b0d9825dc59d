"""Masks and streams on a mesh of Explicit axes, as `jax.make_mesh` makes them: the same as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import compare
import decoding
from jax_rnnt import RNNTLoss, decode
from jax_rnnt.flax import linen as flax_linen
from jax_rnnt.flax import nnx as flax_nnx
from meshes import SET_MESH, at, mesh_of

pytestmark = [pytest.mark.no_kernel, pytest.mark.usefixtures("flax_promotion"), SET_MESH]
B, T, V, E = 8, 6, 5, 8
ROWS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)
FRAMES = np.int32([6, 5, 6, 4, 1, 3, 6, 6])


def test_dropout(devices):
    """The same entries are dropped, with gradients. Modules without: decode/test_agreement.py."""
    joint, rows = flax_linen.Joint(8, V, dropout=0.3), (ROWS[:, :, None], np.ones((B, 1, 4, E), np.float32))
    variables = joint.init(jax.random.key(1), *rows, deterministic=True)
    options = dict(deterministic=False, rngs={"dropout": jax.random.key(2)})
    run = jax.jit(jax.value_and_grad(lambda x, *rows: jnp.sum(joint.apply(x, *rows, **options) ** 2)))
    alone = run(variables, *rows)
    with mesh_of(devices[:4], "explicit", (4,)) as mesh:
        compare.assert_close(jax.device_get(run(variables, *at(mesh, rows, "data"))), alone, 1e-5)


def search(function, predictor, rows, frames, state=None):
    predictor, joint = predictor(V, E, rngs=nnx.Rngs(0)), flax_nnx.Joint(E, E, 8, V, rngs=nnx.Rngs(1))
    return function(RNNTLoss(), *joint.decoder_inputs(predictor, rows), frames, 8, state=state)


def test_packed_rows_in_shard_map(devices):
    """A beam whose rows are packed on each device. Streams are a case of test_every_function.py."""
    wide, of = functools.partial(decoding.beam, width=17), jax.sharding.PartitionSpec("data")
    manual = dict(mesh=jax.sharding.Mesh(np.array(devices[:4]), "data"), in_specs=of, out_specs=of)
    part = jax.shard_map(lambda *x: search(wide, flax_nnx.StatelessPredictor, *x).scores, **manual)
    assert jax.eval_shape(part, ROWS, FRAMES).shape == (B, 17)


def test_rows_of_streams(devices):
    """They lie where the frames do; no mesh splits three of them."""
    with mesh_of(devices[:4], "explicit", (4,)) as mesh:
        found = jax.jit(functools.partial(search, decoding.greedy, flax_nnx.StatelessPredictor))(
            at(mesh, ROWS, "data"), at(mesh, FRAMES, "data")
        )
        assert jax.typeof(found.labels).sharding.spec[0] == "data"
        with pytest.raises(ValueError, match=r"rows must have a multiple of 4 numbers, .* got 3"):
            decode.select_streams(found.state, np.int32([0, 1, 2]))
    of_jax = jax.make_mesh((4,), ("data",), devices=devices[:4])
    assert of_jax == mesh or jax.sharding.AxisType.Explicit not in of_jax.axis_types


@pytest.mark.parametrize("spec", [("data", None), (None, "data")])
def test_split_state_of_a_predictor(devices, spec):
    """It stays as the predictor splits it where nothing splits the labels."""
    targets, first = np.int32([[1, 2], [0, 3], [4, 4], [2, 0]]), jnp.zeros((4, E))

    def rows(split):
        step = lambda state, label: (jnp.tanh(state + split(jnp.sin(label[:, None] * jnp.arange(1.0, E + 1)))),) * 2
        return decode.predict(decode.Predictor(lambda batch: split(first), step, 0), targets)

    alone = rows(lambda x: x)
    with mesh_of(devices[:4], "explicit", (4,)) as mesh:
        found = rows(lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))))
        assert [*jax.typeof(found).sharding.spec] == [spec[0], None, spec[1]]
    compare.assert_close(jax.device_get(found), alone, 1e-6)
