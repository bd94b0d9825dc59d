"""Is the loss of a joint network in tiles that of its logits, and does it work wherever that of logits works?"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt
import losses
from jax_rnnt import LinearJoint, joint_rnnt_loss
from jax_rnnt.emissions import tiled

pytestmark = pytest.mark.usefixtures("optimized")

B, T, U, V, H = 4, 23, 9, 9, 6
CHUNK = 64  # rows: several tiles


class Network:
    """Parameters (weight, bias), encoder and predictor rows, and the rest of a problem."""

    def __init__(self, loss=losses.RNNT, batch=B, dtype=np.float64, seed=0, **options):
        self.problem = losses.problem(batch, T, U, V, loss=loss, dtype=dtype, seed=seed, **options)
        rng = np.random.default_rng(seed)
        draw = lambda *shape, scale=1.0: rng.normal(0, scale, shape).astype(jnp.dtype(dtype))
        self.parameters = draw(H, V + loss.extra_classes), draw(V + loss.extra_classes)
        self.rows = draw(batch, T, H), draw(batch, U + 1, H)
        self.rest = self.problem[1:]

    @property
    def arguments(self):
        return self.parameters, self.rows, self.rest


def function_of(loss):
    return functools.partial(loss.function, **loss.options)


def linear(weight, bias):
    return LinearJoint(weight, bias)


def closure(weight, bias):
    return lambda encoder, predictor: jnp.tanh(encoder + predictor) @ weight + bias[None]


JOINTS = pytest.mark.parametrize("joint", [linear, closure])


def tiles(parameters, rows, rest, *, joint=linear, loss=losses.RNNT, chunk=CHUNK, **options):
    return joint_rnnt_loss(joint(*parameters), *rows, *rest, loss=function_of(loss), chunk=chunk, **options)


def materialized(parameters, rows, rest, *, loss=losses.RNNT, **options):
    weight, bias = parameters
    hidden = jnp.tanh(rows[0][..., :, None, :] + rows[1][..., None, :, :])
    logits = (hidden.reshape(-1, H) @ weight + bias[None]).reshape(*hidden.shape[:-1], len(bias))
    return function_of(loss)(logits, *rest, **options)


def gradients(function, **options):
    """Compiled (losses, gradients of their weighted sum with respect to parameters and rows)."""

    def total(parameters, rows, rest, weights):
        values = function(parameters, rows, rest, **options)
        return jnp.sum(values * weights.astype(values.dtype)), values

    run = jax.jit(jax.grad(total, (0, 1), has_aux=True))

    def call(network, weights=1.0, **changes):
        parameters, rows, rest = network.arguments
        gradient, values = run(parameters, changes.get("rows", rows), changes.get("rest", rest), np.asarray(weights))
        return values, gradient

    return call


def assert_close(got, expected, limit):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=limit, atol=limit)


# ------------------------------------------------------------------------------------------------ values, gradients


@JOINTS
def test_is_that_of_the_logits(implementation, joint):
    network, weights = Network(), np.array([1.0, -2.0, 0.5, 3.0])
    got = gradients(tiles, joint=joint, reduction="none", implementation=implementation)(network, weights)
    expected = gradients(materialized, reduction="none", implementation="reference")(network, weights)
    assert_close(got, expected, 1e-12)


@pytest.mark.family
def test_every_option(loss):
    """Clamp clips the gradient of a logit, which only the tile knows."""
    network = Network(loss)
    windows = np.tile(np.array([0, 99], np.int32), (B, U, 1))
    windows[:, 1, 0], windows[:, 2, 1] = 1, 15
    options = dict(
        loss=loss, reduction="mean_volume", blank=3, clamp=0.05, fastemit_lambda=0.25, delay_penalty=0.01,
        label_windows=windows,
    )  # fmt: skip
    got = gradients(tiles, **options)(network)
    expected = gradients(materialized, **options)(network)
    assert_close(got, expected, 1e-12)
    if loss is not losses.RNNT:
        return
    unclipped = gradients(materialized, **(options | {"clamp": -1.0}))(network)
    assert np.abs(unclipped[1][0][0] - expected[1][0][0]).max() > 0.01


def test_log_probabilities():
    network = Network()
    normalized = lambda weight, bias: lambda *rows: jax.nn.log_softmax(closure(weight, bias)(*rows))
    got = gradients(tiles, joint=normalized, fused_log_softmax=False)(network)
    assert_close(got, gradients(materialized)(network), 1e-12)


def test_bound_options():
    """What a partial or an object binds stays bound."""
    network = Network()
    parameters, rows, rest = network.arguments
    expected = materialized(parameters, rows, rest, blank=2, reduction="sum")
    for loss, options in (
        (functools.partial(jax_rnnt.rnnt_loss, blank=2), {"reduction": "sum"}),
        (jax_rnnt.RNNTLoss(blank=2, reduction="sum"), {}),
    ):
        got = joint_rnnt_loss(LinearJoint(*parameters), *rows, *rest, loss=loss, **options)
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("batch", [(), (1,), (2, 2), (2, 0)])
def test_batch_dimensions(batch):
    network = Network()
    take = lambda x: x[: int(np.prod(batch))].reshape((*batch, *x.shape[1:]))
    parameters, rows, rest = network.parameters, *(tuple(map(take, x)) for x in network.arguments[1:])
    got, expected = (
        jax.value_and_grad(f, (0, 1))(parameters, rows, rest, reduction="sum") for f in (tiles, materialized)
    )
    assert_close(got, expected, 1e-12)


def test_nothing_to_read():
    """No frame, no label, no sequence with either."""
    parameters = Network().parameters
    for frames, columns in ((0, 1), (0, 4), (3, 1)):
        rows = np.zeros((2, frames, H)), np.zeros((2, columns, H))
        rest = np.zeros((2, columns - 1), np.int32), np.zeros(2, np.int32), np.zeros(2, np.int32)
        value, gradient = jax.value_and_grad(tiles, (0, 1))(parameters, rows, rest)
        assert value == 0 and not any(np.any(g) for g in jax.tree.leaves(gradient))


@JOINTS
def test_any_chunk(joint):
    network = Network()
    expected = gradients(tiles, joint=joint, chunk=None)(network)
    for chunk in (1, 10**6):
        assert_close(gradients(tiles, joint=joint, chunk=chunk)(network), expected, 1e-12)


def test_same_bits():
    network = Network(dtype=np.float32)
    run = gradients(tiles)
    for a, b in zip(*map(jax.tree.leaves, (run(network), run(network))), strict=True):
        losses.assert_same_bits(a, b)


def test_float32_is_close_to_float64():
    network, wide = Network(dtype=np.float32), Network()
    wide.parameters, wide.rows = (
        jax.tree.map(lambda x: x.astype(np.float64), x) for x in (network.parameters, network.rows)
    )
    assert_close(gradients(tiles)(network), gradients(materialized)(wide), 1e-5)


@JOINTS
def test_half_precision(joint):
    """Sums over rows and tiles are in float32: the only roundings are those of logits, hidden units and results."""
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


@JOINTS
def test_nan_stays_in_its_sequence(implementation, joint):
    """Neither encoder and predictor gradients of the others nor those of the parameters know of it."""
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


@JOINTS
def test_odd_sequences_contribute_nothing(implementation, joint):
    """Bad lengths or labels (NaN), no path (+inf), none of anything (0); their rows may even be NaN."""
    network = Network(batch=6)
    targets, frames, labels = (x.copy() for x in network.rest)
    frames[1], labels[2], targets[3, 0], frames[4], labels[4] = T + 1, -1, V, 0, 2
    run = gradients(tiles, joint=joint, reduction="none", implementation=implementation)
    rows = tuple(x.copy() for x in network.rows)
    for x in rows:
        x[1:5] = np.nan
    values, (of_parameters, of_rows) = run(network, rows=rows, rest=(targets, frames, labels))
    np.testing.assert_array_equal(np.isnan(values), [False, True, True, labels[3] > 0, False, False])
    assert values[4] == np.inf
    assert not any(np.any(np.asarray(g)[1:5]) for g in of_rows)
    good = np.array([0, 5])
    network.rows, network.rest = (jax.tree.map(lambda x: x[good], x) for x in (network.rows, network.rest))
    expected_values, (expected, of_rows_alone) = gradients(materialized, reduction="none")(network)
    np.testing.assert_allclose(values[good], expected_values, rtol=1e-12)
    assert_close(of_parameters, expected, 1e-12)
    assert_close([g[good] for g in of_rows], of_rows_alone, 1e-12)


@pytest.mark.parametrize("variant", [losses.RNNT, losses.TDT], ids=lambda x: x.name)
def test_rows_of_bad_sequences_change_no_bit(implementation, variant):
    """NaN in the rows of sequences whose lengths or labels are out of range, or which have no frame."""
    network = Network(variant, batch=8)
    targets, frames, labels = (x.copy() for x in network.rest)
    labels[:] = np.maximum(labels, 1)
    frames[1], frames[2], labels[3], labels[4], targets[5, 0], targets[6, 0], frames[7] = T + 1, -1, U + 1, -1, V, -1, 0
    run = gradients(tiles, loss=variant, reduction="none", implementation=implementation)
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
    """One program, whose loops follow the lengths."""
    network = Network()
    run = jax.jit(jax.value_and_grad(tiles))
    for shift in range(3):
        targets, frames, labels = network.rest
        run(network.parameters, network.rows, (targets, np.maximum(frames - shift, 0), np.maximum(labels - shift, 0)))
    assert run._cache_size() == 1
    program = run.lower(*network.arguments).compile().as_text()
    assert program.count("known_trip_count") < program.count(" while(")


def test_custom_calls(kernel):
    """Logits are made twice: forward, and again for the gradient."""
    network = Network(dtype=np.float32)
    text = jax.jit(jax.value_and_grad(tiles)).lower(*network.arguments).compile().as_text()
    assert losses.custom_calls(text) == losses.once(losses.RNNT.gradient_calls)
    text = jax.jit(tiles).lower(*network.arguments).compile().as_text()
    assert losses.custom_calls(text) == losses.once(losses.RNNT.value_calls)


def test_kernel_on_request(kernel):
    network = Network()
    np.testing.assert_allclose(tiles(*network.arguments, implementation="kernel"), tiles(*network.arguments))


@pytest.mark.parametrize(
    ("joint", "axes"), [(linear, (None, 0, 0)), (closure, (0, None, None)), (linear, (0, 0, 0))], ids=lambda x: None
)
def test_vmap(joint, axes):
    """Of the gradient: one for each element, of parameters too."""
    network = Network()
    rng = np.random.default_rng(3)
    stack = lambda x: np.stack([x, (x * rng.normal(1, 0.1, x.shape)).astype(x.dtype) if x.dtype.kind == "f" else x])
    arguments = [jax.tree.map(stack, x) if a == 0 else x for x, a in zip(network.arguments, axes, strict=True)]
    got, expected = (
        jax.jit(jax.vmap(jax.value_and_grad(f, (0, 1)), axes))(*arguments)
        for f in (functools.partial(tiles, joint=joint), materialized)
    )
    assert_close(got, expected, 1e-12)


def test_vmap_of_vmap():
    network = Network()
    parameters, rows, rest = network.arguments
    scales = np.array([1.0, 0.5, 2.0])

    def total(function, parameters):
        of_sequence = jax.vmap(functools.partial(function, reduction="none"), (None, 0, 0))
        of_scale = lambda s: of_sequence(jax.tree.map(lambda x: x * s, parameters), rows, rest)
        return jax.vmap(of_scale)(scales).sum()

    got, expected = (jax.jit(jax.grad(functools.partial(total, f)))(parameters) for f in (tiles, materialized))
    assert_close(got, expected, 1e-11)


def test_remat():
    network = Network()
    expected = jax.grad(materialized, (0, 1))(*network.arguments)
    policy = jax.checkpoint_policies.save_only_these_names("rnnt_residuals")
    run = jax.jit(jax.grad(jax.checkpoint(tiles, policy=policy), (0, 1)))
    assert_close(run(*network.arguments), expected, 1e-12)


def test_eager():
    network = Network()
    assert_close(
        jax.value_and_grad(tiles)(*network.arguments), jax.value_and_grad(materialized)(*network.arguments), 1e-12
    )


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
    """Said so, and where there is one."""
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
    """Against finite differences: with another mask in the backward pass the gradient would be another."""
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
        # Far from uniform, so that without care blocks would be skipped.
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


# --------------------------------------------------------------------------------------------------------- sharding


@contextlib.contextmanager
def mesh_of(devices, kind, shape=(8,), names=("data",)):
    if kind == "explicit" and not hasattr(jax, "set_mesh"):
        pytest.skip("explicit axes need jax.set_mesh")
    axis = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = Mesh(np.array(devices).reshape(shape), names, axis_types=(axis,) * len(names))
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        yield mesh


def place(network, mesh, *names):
    at = lambda *names: lambda x: jax.device_put(x, NamedSharding(mesh, P(*names)))
    parameters, *batched = network.arguments
    return jax.tree.map(at(), parameters), *(jax.tree.map(at(names or "data"), x) for x in batched)


def check_sharded(run, arguments, expected):
    """Exchanged are sums, once each: the loss, the parameters, and twice how many tiles there are at most."""
    compiled = jax.jit(run).lower(*arguments).compile()
    got = compiled(*arguments)
    assert_close(got, expected, 1e-5)
    loops, entry = compiled.as_text().split("\nENTRY ")
    assert not losses.collectives(loops.replace("= s32[] all-reduce(", "number of tiles"))
    found = losses.collectives(entry)
    assert set(found) == {"all-reduce"} and found["all-reduce"] <= 5
    return got


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("joint", "shape"), [(linear, (8,)), (closure, (8,)), (linear, (4, 2))])
def test_batch_sharded(joint, kind, shape, devices):
    network = Network(batch=16, dtype=np.float32)
    run = jax.value_and_grad(functools.partial(tiles, joint=joint), (0, 1))
    expected = jax.jit(jax.value_and_grad(materialized, (0, 1)))(*network.arguments)
    with mesh_of(devices, kind, shape, ("data", "model")[: len(shape)]) as mesh:
        arguments = place(network, mesh)
        _, (_, rows) = check_sharded(run, arguments, expected)
        for x, gradient in zip(arguments[1], rows, strict=True):
            assert gradient.sharding.is_equivalent_to(x.sharding, 3)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_of_sharded(kind, devices):
    network = Network(batch=16, dtype=np.float32)

    def run(parameters, rows, rest, function=tiles):
        return jax.vmap(functools.partial(function, parameters, reduction="none"))(rows, rest).mean()

    expected = jax.jit(jax.value_and_grad(functools.partial(run, function=materialized), (0, 1)))(*network.arguments)
    with mesh_of(devices, kind) as mesh:
        check_sharded(jax.value_and_grad(run, (0, 1)), place(network, mesh), expected)


# Mesh axes of the mapped dimensions of parameters and of the batch (None: it has none).
MAPPED = {
    "parameters": (("model",), None),
    "parameters_everywhere": ((None,), None),
    "batch": (None, ("model",)),
    "both": (("model",), ("model",)),
    "twice": ((None, "model"), (None, "model")),
    "in_turn": (("model",), (None, "model")),
}


@pytest.mark.parametrize(("case", "kind"), [("in_turn", "auto"), *((case, "explicit") for case in MAPPED)])
def test_vmap_over_a_mesh(case, kind, devices):
    """The gradient of every element; on explicit axes each has the type of what it is the gradient of."""
    of_parameters, of_batch = MAPPED[case]
    network, sizes = Network(batch=8), {None: 3, "model": 2}
    random = np.random.default_rng(3)

    def stack(axes, x):
        shape = tuple(sizes[a] for a in axes or ())
        x = np.broadcast_to(x, (*shape, *x.shape))
        return (x * random.normal(1, 0.1, x.shape)).astype(x.dtype) if x.dtype.kind == "f" else x

    run, expected = (jax.value_and_grad(functools.partial(f, reduction="sum"), (0, 1)) for f in (tiles, materialized))
    depth = max(len(axes or ()) for axes in (of_parameters, of_batch))
    for level in range(depth):  # from the innermost on
        mapped = [0 if axes and len(axes) > level else None for axes in (of_parameters, of_batch, of_batch)]
        run, expected = (jax.vmap(f, mapped) for f in (run, expected))
    parameters = jax.tree.map(functools.partial(stack, of_parameters), network.parameters)
    batch = jax.tree.map(functools.partial(stack, of_batch), network.arguments[1:])
    with mesh_of(devices, kind, (4, 2), ("data", "model")) as mesh:
        at = lambda x, *names: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*names))), x)
        placed = at(parameters, *(of_parameters or ())), *at(batch, *(of_batch or ()), "data")
        got = jax.jit(run)(*placed)
        for axes, x, gradient in zip(MAPPED[case], placed, got[1]):
            if kind == "explicit" and len(axes or ()) == depth:
                shardings = jax.tree.map(lambda x, g: g.sharding.is_equivalent_to(x.sharding, x.ndim), x, gradient)
                assert all(jax.tree.leaves(shardings))
    assert_close(got, jax.jit(expected)(parameters, *batch), 1e-11)


def test_uneven_batch(devices):
    network = Network(batch=10, dtype=np.float32)
    expected = jax.jit(jax.value_and_grad(materialized, (0, 1)))(*network.arguments)
    with mesh_of(devices, "auto") as mesh:
        sharding = NamedSharding(mesh, P("data"))

        @jax.jit
        def run(parameters, *batched):
            batched = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x * 1, sharding), batched)
            return jax.value_and_grad(tiles, (0, 1))(parameters, *batched)

        assert_close(
            run(*jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P())), network.arguments)), expected, 1e-5
        )


@pytest.mark.parametrize(("joint", "check_vma"), [(linear, True), (closure, True), (linear, False)])
def test_shard_map(joint, check_vma, devices):
    """Each device packs its own sequences; nothing is exchanged but the sums."""
    network = Network(batch=16, dtype=np.float32)
    expected = jax.jit(jax.value_and_grad(materialized, (0, 1)))(*network.arguments)
    with mesh_of(devices, "auto") as mesh:
        body = lambda *arguments: jax.lax.pmean(tiles(*arguments, joint=joint), "data")
        specs = P(), P("data"), P("data")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        check_sharded(jax.value_and_grad(mapped, (0, 1)), place(network, mesh), expected)


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


@pytest.mark.parametrize("kind", ["alone", "auto", "explicit"])
def test_constraints_in_the_joint(kind, devices):
    """What a module says of the sharding of all rows is nothing to those of a tile."""
    if kind != "alone" and not hasattr(jax, "set_mesh"):
        pytest.skip("this jax has no jax.set_mesh")
    network = Network(batch=8)
    with mesh_of(devices, "explicit" if kind == "explicit" else "auto") as mesh:
        replicated = NamedSharding(mesh, P(None, None)) if kind == "alone" else P(None, None)

        def constrained(*parameters):
            return lambda *rows: jax.lax.with_sharding_constraint(closure(*parameters)(*rows), replicated)

        with contextlib.nullcontext() if kind == "alone" else jax.set_mesh(mesh):
            got = jax.jit(jax.value_and_grad(functools.partial(tiles, joint=constrained), (0, 1)))(*network.arguments)
    assert_close(got, jax.jit(jax.value_and_grad(materialized, (0, 1)))(*network.arguments), 1e-11)


@pytest.mark.parametrize("way", ["shard_map", "shard_map_unchecked", "auto", "explicit", "vmap"])
def test_programs_in_the_joint(way, devices):
    """Of replicated parameters and of such that differ from device to device, as the joint of all rows."""
    network = Network(batch=8)
    arguments = network.parameters[0], np.random.default_rng(7).normal(size=(8, H, H)), network.rows, network.rest

    def loss(weight, mix, rows, rest, function):
        if function is tiles:
            return joint_rnnt_loss(lambda e, p: programs(weight, mix, e + p), *rows, *rest, chunk=CHUNK)
        nodes = rows[0][..., :, None, :] + rows[1][..., None, :, :]
        logits = programs(weight, mix, nodes.reshape(-1, H)).reshape(*nodes.shape[:-1], V)
        return jax_rnnt.rnnt_loss(logits, *rest)

    def gradient(function, mesh):
        of = functools.partial(loss, function=function)
        if way == "vmap":
            return jax.vmap(jax.value_and_grad(of, (0, 1, 2)), (None, 0, None, None))
        if way in ("auto", "explicit"):
            return jax.value_and_grad(lambda weight, mix, *batch: of(weight, mix[3], *batch), (0, 1, 2))
        body = lambda weight, mix, *batch: jax.lax.pmean(of(weight, mix[0], *batch), "data")
        specs = P(), P("data"), P("data"), P("data")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=way == "shard_map")
        return jax.value_and_grad(mapped, (0, 1, 2))

    with mesh_of(devices, "explicit" if way == "explicit" else "auto") as mesh:
        at = lambda x, *names: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, P(*names))), x)
        weight, mix, *batch = arguments
        got = jax.jit(gradient(tiles, mesh))(at(weight), at(mix), *at(batch, *(() if way == "vmap" else ("data",))))
    assert_close(got, jax.jit(gradient(materialized, mesh))(*arguments), 1e-11)


def test_key_of_each_device(devices):
    """Dropout under shard_map: what the joint closes over varies over devices, though its rows need not."""
    network = Network(batch=16, dtype=np.float32)

    def body(parameters, rows, rest, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))

        def joint(encoder, predictor):
            hidden = jnp.tanh(encoder + predictor)
            hidden = jnp.where(jax.random.bernoulli(key, 0.75, hidden.shape), hidden, 0)
            return hidden @ parameters[0] + parameters[1][None]

        return jax.lax.pmean(joint_rnnt_loss(joint, *rows, *rest, chunk=CHUNK), "data")

    with mesh_of(devices, "auto") as mesh:
        specs = P(), P("data"), P("data"), P()
        run = jax.jit(jax.value_and_grad(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())))
        values = [run(*place(network, mesh), jax.random.key(i)) for i in (0, 0, 1)]
    assert values[0][0] == values[1][0] != values[2][0]
    assert all(np.isfinite(g).all() for g in values[0][1])


def test_pmap(devices):
    network = Network(batch=16, dtype=np.float32)
    expected = jax.jit(jax.value_and_grad(materialized, (0, 1)))(*network.arguments)

    def body(*arguments):
        value, (parameters, rows) = jax.value_and_grad(functools.partial(tiles, joint=closure), (0, 1))(*arguments)
        return *jax.lax.pmean((value, parameters), "data"), rows

    split = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), network.arguments[1:])
    value, parameters, rows = jax.pmap(body, "data", in_axes=(None, 0, 0), devices=devices)(network.parameters, *split)
    first = lambda x: x[0]
    rows = [g.reshape(x.shape) / 8 for g, x in zip(rows, network.rows, strict=True)]
    assert_close((first(value), jax.tree.map(first, parameters), rows), expected, 1e-5)


# ----------------------------------------------------------------------------------------------------- skip, memory


def confident(batch=B, dtype=np.float32):
    """A network whose posteriors are concentrated on few nodes."""
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
    """Clipping makes what is kept small, and what is left out must be as much smaller."""
    network = confident()
    got = gradients(tiles, clamp=clamp)(network)
    monkeypatch.setattr(tiled, "not_skipped", lambda *_: jnp.bool_(True))
    expected = gradients(tiles, clamp=clamp)(network)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=4 * losses.eps(np.float32) * np.abs(b).max())


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
        ({"predictor_out": states[:2]}, "predictor_out"),
        ({"predictor_out": states[:, :0]}, "predictor_out"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": 2.0}, "chunk"),
        ({"predictor_out": states[0]}, "predictor_out"),
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


@pytest.mark.parametrize(
    "unsuitable",
    [
        "rnnt",
        jax_rnnt.rnnt_loss_packed,
        jax_rnnt.simple_rnnt_loss,
        jax_rnnt.pruned_rnnt_loss,
        lambda logits, *rest: jax_rnnt.pruned_rnnt_loss(logits, np.zeros((B, T), np.int32), *rest),
        jax_rnnt.tdt_loss,
        jax_rnnt.rnnt_align,
        joint_rnnt_loss,
        jax.jit(jax_rnnt.rnnt_loss),
        jax.checkpoint(jax_rnnt.rnnt_loss),
        lambda logits, labels: logits.sum(),
        lambda logits, *rest: jax_rnnt.rnnt_loss(logits * 2.0, *rest),
        lambda logits, *rest: jax_rnnt.rnnt_loss(logits.astype(np.float32), *rest),
        lambda logits, *rest: jax_rnnt.rnnt_loss(logits[..., :-1], *rest),
        lambda logits, *rest: jax_rnnt.rnnt_loss(jax.nn.log_softmax(logits), *rest),
    ],
)
@pytest.mark.parametrize("jitted", [False, True])
def test_unsuitable_losses(unsuitable, jitted):
    run = functools.partial(joint_rnnt_loss, loss=unsuitable)
    (weight, bias), rows, rest = Network().arguments
    expected = r"joint_rnnt_loss: loss must be a loss of this library that takes logits \[..., T, U \+ 1, V\].*, got "
    with pytest.raises(TypeError, match=expected):
        (jax.jit(run) if jitted else run)(LinearJoint(weight, bias), *rows, *rest)


def test_losses_of_the_users_own():
    """Sums of losses and the like."""
    network = Network()
    both = lambda *args: 2.0 * jax_rnnt.rnnt_loss(*args) + jax_rnnt.monotonic_rnnt_loss(*args)
    parameters, rows, rest = network.arguments
    expected = 2 * materialized(parameters, rows, rest) + materialized(parameters, rows, rest, loss=losses.LOSSES[1])
    np.testing.assert_allclose(joint_rnnt_loss(LinearJoint(*parameters), *rows, *rest, loss=both), expected, rtol=1e-12)


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
