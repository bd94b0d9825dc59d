"""Does the loss of a joint network in tiles work under vmap and on every mesh, with sums as its only exchange?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import compare
import hlo
import jax_rnnt
from jax_rnnt import JointLogits
from jax_rnnt.tiles import _tiles as tiled
from layout_table import CHUNK, H, Network, V, closure, function, linear, materialized, step_of_logits, tiles
from meshes import KINDS, at, mean_over_devices, mesh_of

pytestmark = [pytest.mark.no_kernel, pytest.mark.slow]
SPECS = P(), P("data"), P("data")  # of parameters, rows and the rest


def step(function, **options):
    """(loss, gradients of parameters and rows)"""
    return jax.value_and_grad(functools.partial(function, **options), (0, 1))


def place(network, mesh):
    return [at(mesh, x, *spec) for x, spec in zip(network.arguments, SPECS, strict=True)]


def check_sharded(run, arguments, expected):
    """Exchanged are sums, once each: the loss, the parameters, and twice how many tiles there are at most."""
    got, text = hlo.compiled(run, *arguments)
    compare.assert_close(got, expected, 1e-5)
    loops, entry = text.split("\nENTRY ")
    assert not hlo.collectives(loops.replace("= s32[] all-reduce(", "number of tiles"))
    found = hlo.collectives(entry)
    assert set(found) == {"all-reduce"} and found["all-reduce"] <= 5
    return got


@KINDS
def test_tile_of_one_device(kind, devices, monkeypatch):
    """A tile has rows of one device's sequences, not of the batch: so its memory does not grow with the mesh."""
    sizes, lowered_for = [], tiled.Tiled.lowered_for

    def seen(*arguments):
        made = lowered_for(*arguments)
        sizes.append(made.blocks)
        return made

    monkeypatch.setattr(tiled.Tiled, "lowered_for", seen)
    run = jax.jit(step(tiles, chunk=None))
    run.lower(*Network(batch=2).arguments)
    with mesh_of(devices, kind) as mesh:
        run.lower(*place(Network(batch=16), mesh))
    assert len(sizes) == 4 and len(set(sizes)) == 1 and sizes[0].count > 1


def mapped(parameters, rows, rest, joint):
    return jax.vmap(functools.partial(tiles, parameters, reduction="none", joint=joint))(rows, rest).mean()


WAYS = (linear, "vmap"), (closure, "two_axes"), (function, "explicit_two_axes"), (linear, "shard_map")


@pytest.mark.parametrize(("joint", "way"), WAYS)
def test_batch_sharded(joint, way, devices):
    """Each device packs its own sequences; nothing is exchanged but the sums."""
    axes = ((4, 2), ("data", "model")) if "two_axes" in way else ()
    mean = functools.partial(mapped if way == "vmap" else tiles, joint=joint)
    with mesh_of(devices, way.split("_")[0], *axes) as mesh:
        if way == "shard_map":
            mean = mean_over_devices(mean, mesh, SPECS)
        arguments = place(Network(batch=16, dtype=np.float32), mesh)
        _, (_, rows) = check_sharded(step(mean), arguments, step_of_logits(16))
        for x, gradient in zip(arguments[1], rows, strict=True):
            assert gradient.sharding.is_equivalent_to(x.sharding, 3)


def test_uneven_batch(devices):
    with mesh_of(devices, "auto") as mesh:
        sharding = NamedSharding(mesh, P("data"))

        @jax.jit
        def run(parameters, *batched):
            batched = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x * 1, sharding), batched)
            return step(tiles)(parameters, *batched)

        got = run(*at(mesh, Network(batch=10, dtype=np.float32).arguments))
    compare.assert_close(got, step_of_logits(10), 1e-5)


# Mesh axes of the mapped dimensions of parameters and of the batch (None: it has none).
MAPPED = {"parameters": (("model",), None), "in_turn": (("model",), (None, "model"))}


@pytest.mark.parametrize("case", MAPPED)
def test_vmap_over_a_mesh(case, devices):
    """The gradient of every element; each has the type of what it is the gradient of."""
    of_parameters, of_batch = MAPPED[case]
    network, sizes = Network(batch=8), {None: 3, "model": 2}
    random = np.random.default_rng(3)

    def stack(axes, x):
        shape = tuple(sizes[a] for a in axes or ())
        x = np.broadcast_to(x, (*shape, *x.shape))
        return (x * random.normal(1, 0.1, x.shape)).astype(x.dtype) if x.dtype.kind == "f" else x

    joint = closure if case == "parameters" else linear
    run, expected = step(tiles, reduction="sum", joint=joint), step(materialized, reduction="sum")
    depth = max(len(axes or ()) for axes in (of_parameters, of_batch))
    for level in range(depth):  # from the innermost on
        axes = [0 if axes and len(axes) > level else None for axes in (of_parameters, of_batch, of_batch)]
        run, expected = (jax.vmap(f, axes) for f in (run, expected))
    parameters = jax.tree.map(functools.partial(stack, of_parameters), network.parameters)
    batch = jax.tree.map(functools.partial(stack, of_batch), network.arguments[1:])
    with mesh_of(devices, "explicit", (4, 2), ("data", "model")) as mesh:
        placed = at(mesh, parameters, *(of_parameters or ())), *at(mesh, batch, *(of_batch or ()), "data")
        got = jax.jit(run)(*placed)
        for axes, x, gradient in zip(MAPPED[case], placed, got[1]):
            if len(axes or ()) == depth:
                shardings = jax.tree.map(lambda x, g: g.sharding.is_equivalent_to(x.sharding, x.ndim), x, gradient)
                assert all(jax.tree.leaves(shardings))
    compare.assert_close(got, jax.jit(expected)(parameters, *batch), 1e-11)


# ----------------------------------------------------------------------------------------------- programs in joints
@pytest.mark.parametrize("kind", ["alone", "explicit"])
def test_constraints_in_the_joint(kind, devices):
    """What a module says of the sharding of all rows is nothing to those of a tile. "alone": no mesh is set."""
    with mesh_of(devices, kind, is_set=kind != "alone") as mesh:
        replicated = NamedSharding(mesh, P(None, None)) if kind == "alone" else P(None, None)

        def constrained(*parameters):
            return lambda *rows: jax.lax.with_sharding_constraint(closure(*parameters)(*rows), replicated)

        got = jax.jit(step(tiles, joint=constrained))(*Network(batch=8).arguments)
    compare.assert_close(got, step_of_logits(8, np.float64), 1e-11)


@jax.custom_vjp
def product(x, y):
    return x @ y


product.defvjp(lambda x, y: (x @ y, (x, y)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))


def programs(weight, mix, x):
    """Logits of rows through all that JAX traces by itself."""
    x = jax.nn.relu(x @ mix)
    x, _ = jax.lax.scan(lambda x, scale: (jnp.tanh(jax.nn.relu(x * scale) + mix[:1]), None), x, mix[0])
    x = jax.lax.cond(mix[0, 0] > 0, lambda x: x @ mix, lambda x: jnp.sin(x), x)
    x = jax.checkpoint(lambda x: jnp.tanh(x + jax.nn.relu(mix[1:2])))(x)
    x = jax.jit(lambda x: jax.nn.silu(x @ mix))(x)
    x = product(x, mix)
    x, _ = jax.lax.scan(lambda x, _: (jax.checkpoint(product)(x, mix), None), x, length=2)
    return jax.lax.fori_loop(0, 2, lambda _, x: jax.nn.softplus(x), x @ weight)


@pytest.mark.parametrize("way", ["shard_map", "vmap"])
def test_programs_in_the_joint(way, devices):
    """Of replicated parameters and of such that differ from device to device, as the joint of all rows."""
    network = Network(batch=8)
    arguments = network.parameters[0], np.random.default_rng(7).normal(size=(8, H, H)), network.rows, network.batch

    def loss(weight, mix, rows, rest, in_tiles):
        joint = lambda e, p: programs(weight, mix, e + p)
        if in_tiles:
            return jax_rnnt.RNNTLoss()(JointLogits(joint, *rows, CHUNK), *rest)
        nodes = rows[0][..., :, None, :] + rows[1][..., None, :, :]
        logits = programs(weight, mix, nodes.reshape(-1, H)).reshape(*nodes.shape[:-1], V)
        return jax_rnnt.RNNTLoss()(logits, *rest)

    def gradient(mesh, in_tiles):
        of = functools.partial(loss, in_tiles=in_tiles)
        if way == "vmap":
            return jax.vmap(jax.value_and_grad(of, (0, 1, 2)), (None, 0, None, None))
        own = lambda weight, mix, *batch: of(weight, mix[0], *batch)
        specs = P(), P("data"), P("data"), P("data")
        return jax.value_and_grad(mean_over_devices(own, mesh, specs), (0, 1, 2))

    with mesh_of(devices, way) as mesh:
        weight, mix, *batch = arguments
        placed = *at(mesh, (weight, mix)), *at(mesh, batch, *(() if way == "vmap" else ("data",)))
        got = jax.jit(gradient(mesh, True))(*placed)
    compare.assert_close(got, jax.jit(gradient(mesh, False))(*arguments), 1e-11)
