"""Does every device work on its own part of the batch without collectives, for every way to shard it?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_rnnt
import losses
from meshes import mesh_of
from pages import code

pytestmark = pytest.mark.rare("reference")  # JAX itself transforms plain JAX


def test_eight_devices(devices):
    assert len(devices) == 8


@pytest.fixture
def batch(loss):
    """Sixteen ragged sequences, two per device."""
    p = losses.problem(16, loss=loss, dtype=np.float32)
    return p, loss.expected(p)


def place(p, mesh, *specs):
    specs = specs * 4 if len(specs) == 1 else specs
    return losses.Problem(*(jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(p, specs, strict=True)))


def step(loss, implementation, **options):
    """Mean loss, and its gradient with respect to the logits, as a training step computes them."""
    return jax.value_and_grad(lambda *p: loss(*p, reduction="mean", implementation=implementation, **options))


def check(got, expected):
    losses_, gradient = expected
    np.testing.assert_allclose(got[0], losses_.mean(), rtol=1e-6)
    np.testing.assert_allclose(got[1], gradient / len(losses_), atol=losses.tolerance(np.float32, 11))


def run(f, p, loss, expected, *, kernel, only=("all-reduce",)):
    """Runs the step: only the mean's collective, one custom call of each kind, gradients sharded as the logits."""
    compiled = jax.jit(f).lower(*p).compile()
    got = compiled(*p)
    check(got, expected)
    text = compiled.as_text()
    assert set(losses.collectives(text)) <= set(only)
    if kernel == "kernel":
        assert losses.custom_calls(text) == losses.once(loss.gradient_calls)
    return got


@pytest.mark.family
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_batch_sharded(loss, implementation, batch, devices, kind):
    p, expected = batch
    with mesh_of(devices, kind) as mesh:
        placed = place(p, mesh, P("data"))
        got = run(step(loss, implementation), placed, loss, expected, kernel=implementation)
        assert got[1].sharding.is_equivalent_to(placed.logits.sharding, 4)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_lengths_replicated(loss, implementation, batch, devices, kind):
    p, expected = batch
    with mesh_of(devices, kind) as mesh:
        placed = place(p, mesh, P("data"), P("data"), P(), P())
        run(step(loss, implementation), placed, loss, expected, kernel=implementation)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_all_but_the_logits_replicated(implementation, batch, devices, kind):
    """As NumPy arrays of the host are. `align` and the gradient of the latency have no kernel."""
    p, expected = batch
    with mesh_of(devices, kind) as mesh:
        placed = place(p, mesh, P("data"), P(), P(), P())
        run(step(losses.RNNT, implementation), placed, losses.RNNT, expected, kernel=implementation)
        loss = jax_rnnt.RNNTLoss(implementation=None if implementation == "kernel" else implementation)
        found = jax.jit(lambda *p: (loss.align(*p).frames, jax.grad(loss.latency)(*p)))(*placed)
    for a, b in zip(found, (loss.align(*p).frames, jax.grad(loss.latency)(*p)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.family
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_value_alone(loss, kernel, batch, devices, kind):
    """Without a reduction there is no collective; the loss is sharded like the batch."""
    p, expected = batch
    with mesh_of(devices, kind) as mesh:
        placed = place(p, mesh, P("data"))
        compiled = jax.jit(lambda *p: loss(*p, reduction="none", implementation=kernel)).lower(*placed).compile()
        got = compiled(*placed)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    np.testing.assert_allclose(got, expected[0], rtol=1e-6)
    assert not losses.collectives(compiled.as_text())
    assert losses.custom_calls(compiled.as_text()) == losses.once(loss.value_calls)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_two_axes_of_batch(loss, kernel, batch, devices, kind):
    p, expected = batch
    with mesh_of(devices, kind, (4, 2), ("data", "more")) as mesh:
        run(step(loss, kernel), place(p, mesh, P(("data", "more"))), loss, expected, kernel=kernel)


@pytest.mark.family
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_options_are_sharded_too(loss, kernel, batch, devices, kind):
    """Windows [B, U, 2] are sharded like the batch; scalars are replicated."""
    p, _ = batch
    windows = np.tile(np.array([[0, 3], [1, 4], [2, 9], [3, 9]], np.int32), (16, 1, 1))
    options = {"fastemit_lambda": 0.5, "clamp": 0.25, "delay_penalty": 0.125}
    expected = loss.expected(p, label_windows=windows, **options)
    with mesh_of(devices, kind) as mesh:
        placed = place(p, mesh, P("data"))
        windows = jax.device_put(windows, NamedSharding(mesh, P("data")))
        f = jax.value_and_grad(
            lambda *p: loss(*p[:4], label_windows=p[4], reduction="mean", implementation=kernel, **options)
        )
        compiled = jax.jit(f).lower(*placed, windows).compile()
        check(compiled(*placed, windows), expected)
    assert set(losses.collectives(compiled.as_text())) <= {"all-reduce"}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_vmap_of_sharded(loss, kernel, batch, devices, kind):
    p, expected = batch
    mapped = lambda *p: jax.vmap(lambda *p: loss(*p, reduction="none", implementation=kernel))(*p).mean()
    with mesh_of(devices, kind) as mesh:
        run(jax.value_and_grad(mapped), place(p, mesh, P("data")), loss, expected, kernel=kernel)


@pytest.mark.family
def test_uneven_batch(loss, kernel, devices):
    """Ten sequences on eight devices: XLA calls the kernels on padding rows with arbitrary contents."""
    p = losses.problem(10, loss=loss, dtype=np.float32)
    with mesh_of(devices, "auto") as mesh:
        sharding = NamedSharding(mesh, P("data"))

        @jax.jit
        def run_uneven(*p):
            p = [jax.lax.with_sharding_constraint(x * 1, sharding) for x in p]
            return step(loss, kernel)(*p)

        got = run_uneven(*place(p, mesh, P()))
    check(got, loss.expected(p))


@pytest.mark.family
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("replicated", [False, True], ids=["lengths_sharded", "lengths_replicated"])
def test_shard_map(loss, implementation, batch, devices, check_vma, replicated):
    p, _ = batch
    if replicated:  # the same lengths on every device: two sequences each
        p = p._replace(logit_lengths=p.logit_lengths[:2], target_lengths=p.target_lengths[:2])
        full = p._replace(logit_lengths=np.tile(p.logit_lengths, 8), target_lengths=np.tile(p.target_lengths, 8))
    expected = loss.expected(full if replicated else p)
    lengths = P() if replicated else P("data")
    with mesh_of(devices, "auto") as mesh:
        body = lambda *p: jax.lax.pmean(loss(*p, implementation=implementation), "data")
        specs = P("data"), P("data"), lengths, lengths
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        run(jax.value_and_grad(mapped), place(p, mesh, *specs), loss, expected, kernel=implementation)


@pytest.mark.family
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_inside_shard_map(loss, kernel, batch, devices, check_vma):
    p, expected = batch
    with mesh_of(devices, "auto") as mesh:
        body = jax.value_and_grad(lambda *p: loss(*p, reduction="sum", implementation=kernel))
        local = lambda *p: (lambda v, g: (v[None], g))(*body(*p))
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=(P("data"), P("data")), check_vma=check_vma
        )
        values, gradient = jax.jit(mapped)(*place(p, mesh, P("data")))
    np.testing.assert_allclose(values, expected[0].reshape(8, 2).sum(1), rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], atol=losses.tolerance(np.float32, 11))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_replicated_weights(loss, kernel, batch, devices, check_vma):
    """The gradient of a weight that all devices share; the logits are computed inside."""
    p, _ = batch
    weight = np.random.default_rng(0).normal(size=(9, 9)).astype(np.float32)
    _, expected = loss.expected(p._replace(logits=p.logits @ weight))
    expected = np.einsum("btuh,btuv->hv", p.logits, expected) / 16
    with mesh_of(devices, "auto") as mesh:

        def body(weight, x, *rest):
            return jax.lax.pmean(loss(x @ weight, *rest, implementation=kernel), "data")

        specs = P(), *(P("data"),) * 4
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        gradient = jax.jit(jax.grad(mapped))(weight, *place(p, mesh, P("data")))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4)


def test_shard_map_invariant_logits(loss, kernel, devices):
    """Devices have the same logits and different labels: the gradient sums over devices."""
    p = losses.problem(16, loss=loss, dtype=np.float32)
    shared = p._replace(logits=p.logits[:2])
    full = p._replace(logits=np.tile(p.logits[:2], (8, 1, 1, 1)))
    values, gradient = loss.expected(full)
    with mesh_of(devices, "auto") as mesh:
        body = lambda *p: jax.lax.pmean(loss(*p, implementation=kernel), "data")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data"), P("data"), P("data")), out_specs=P())
        got = jax.jit(jax.value_and_grad(mapped))(*shared)
    np.testing.assert_allclose(got[0], values.mean(), rtol=1e-6)
    expected = gradient.reshape(8, 2, *gradient.shape[1:]).sum(0) / 16
    np.testing.assert_allclose(got[1], expected, atol=losses.tolerance(np.float32, 11))


def test_vmap_inside_shard_map(loss, kernel, batch, devices):
    p, expected = batch
    with mesh_of(devices, "auto") as mesh:
        one = lambda *p: loss(*p, reduction="none", implementation=kernel)
        body = lambda *p: jax.lax.pmean(jax.vmap(one)(*p).mean(), "data")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P())
        run(jax.value_and_grad(mapped), place(p, mesh, P("data")), loss, expected, kernel=kernel)


@pytest.mark.family
def test_pmap(loss, kernel, batch, devices):
    p, expected = batch
    split = [x.reshape(8, 2, *x.shape[1:]) for x in p]

    def body(*p):
        value, gradient = step(loss, kernel)(*p)
        return jax.lax.pmean(value, "data"), gradient

    values, gradient = jax.pmap(body, axis_name="data", devices=devices)(*split)
    check((values[0], gradient.reshape(p.logits.shape) / 8), expected)


def test_data_parallel_training_step(loss, kernel, devices):
    """Sharded data, replicated parameters, donated state: one all-reduce for the parameters and the loss, no gather."""
    p = losses.problem(16, loss=loss, dtype=np.float32)
    weight = np.random.default_rng(1).normal(size=(9, 9)).astype(np.float32)
    with mesh_of(devices, "auto") as mesh:

        def update(weight, x, *rest):
            value, gradient = jax.value_and_grad(lambda w: loss(x @ w, *rest, implementation=kernel))(weight)
            return weight - jnp.float32(0.5) * gradient, value

        placed = place(p, mesh, P("data"))
        replicated = jax.device_put(weight, NamedSharding(mesh, P()))
        compiled = jax.jit(update, donate_argnums=0).lower(replicated, *placed).compile()
        _, first = compiled(replicated, *placed)
    assert set(losses.collectives(compiled.as_text())) == {"all-reduce"}
    assert losses.custom_calls(compiled.as_text()) == losses.once(loss.gradient_calls)
    np.testing.assert_allclose(first, loss.expected(p._replace(logits=p.logits @ weight))[0].mean(), rtol=1e-5)


@pytest.mark.family
def test_bad_data_on_one_device_stops_no_other(loss, kernel, devices):
    """Lengths and labels out of range on one device must not fail there while the others wait in the all-reduce."""
    p = losses.problem(16, loss=loss, dtype=np.float32)
    bad = p._replace(logit_lengths=p.logit_lengths.copy(), targets=p.targets.copy())
    bad.logit_lengths[3], bad.targets[8, 0] = 99, -5
    with mesh_of(devices, "auto") as mesh:

        def mean_of_finite(x, *rest):
            values = loss(x, *rest, reduction="none", implementation=kernel)
            return jnp.where(jnp.isnan(values), jnp.float32(0), values).mean()

        value, gradient = jax.jit(jax.value_and_grad(mean_of_finite))(*place(bad, mesh, P("data")))
    values, expected = loss.expected(bad)
    assert np.isnan(values[[3, 8]]).all()
    np.testing.assert_allclose(value, np.nan_to_num(values).mean(), rtol=1e-6)
    np.testing.assert_allclose(gradient, expected / 16, atol=losses.tolerance(np.float32, 11))


# ------------------------------------------------------------------ dimensions that are not the batch: docs/sharding.md

AXES = {"T": 1, "U + 1": 2, "V": 3}


def split_problem(loss=losses.RNNT):
    """Sixteen sequences whose dimensions all divide by two."""
    p = losses.problem(16, 8, 5, 8, loss=loss, dtype=np.float32)
    return p, loss.expected(p)


def over(axis):
    """A partition: the batch over "data", this dimension over "model"."""
    return P("data", *[None] * (axis - 1), "model")


def place_split(p, mesh, axis):
    return place(p, mesh, over(axis), P("data"), P("data"), P("data"))


def model_mesh(devices, kind):
    return mesh_of(devices, kind, (4, 2), ("data", "model"))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("axis", AXES.values(), ids=AXES)
def test_other_dimensions_are_gathered(loss, native_kernel, devices, axis, kind):
    """The results are right, but every device holds all logits of its part of the batch."""
    p, expected = split_problem(loss)
    with model_mesh(devices, kind) as mesh:
        placed = place_split(p, mesh, axis)
        compiled = jax.jit(step(loss, native_kernel)).lower(*placed).compile()
        got = compiled(*placed)
    check(got, expected)
    assert set(losses.exchanged(compiled.as_text(), "all-gather")) == {(4, 8, 6, 8)}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_split_vocabulary_on_the_reference(loss, devices, kind):
    """Devices exchange sums over V, but no logits."""
    p, expected = split_problem(loss)
    with model_mesh(devices, kind) as mesh:
        placed = place_split(p, mesh, 3)
        compiled = jax.jit(step(loss, "reference")).lower(*placed).compile()
        got = compiled(*placed)
        assert got[1].sharding.is_equivalent_to(placed.logits.sharding, 4)
    check(got, expected)
    assert set(losses.collectives(compiled.as_text())) == {"all-reduce"}
    assert set(losses.exchanged(compiled.as_text(), "all-reduce")) <= {(4, 8, 6), (4, 8, 6, 1), ()}


@pytest.mark.parametrize("axis", [1, 2], ids=["T", "U + 1"])
def test_split_lattice_on_the_reference(loss, devices, axis):
    p, expected = split_problem(loss)
    with model_mesh(devices, "auto") as mesh:
        check(jax.jit(step(loss, "reference"))(*place_split(p, mesh, axis)), expected)


@pytest.mark.rare("explicit")
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_split_vocabulary_of_a_joint(native_kernel, devices, kind):
    """One tile of logits is gathered at a time."""
    p, _ = split_problem()
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    arguments = draw(4, 8), draw(16, 8, 4), draw(16, 6, 4), *p[1:]
    specs = P(None, "model"), *(P("data"),) * 5

    def mean(weight, *rest):
        return jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(weight), *rest, chunk=32, implementation=native_kernel)

    run = jax.jit(jax.value_and_grad(mean, (0, 1, 2)))
    expected = run(*arguments)
    with model_mesh(devices, kind) as mesh:
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
        compiled = run.lower(*placed).compile()
        got = compiled(*placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    shapes = losses.exchanged(compiled.as_text(), "all-gather")
    assert shapes and max(map(np.prod, shapes)) <= 4 * 32 * 8  # a tile on each of four parts of the batch


@pytest.mark.slow
def test_split_vocabulary_under_shard_map(loss, implementation, devices):
    """The loss takes a part of V for all of V. After a gather, the loss and its gradient are right."""
    p, expected = split_problem(loss)
    assert np.any(p.targets >= 4)  # labels beyond the part
    known = p._replace(targets=p.targets % 3)  # nothing looks wrong
    call = functools.partial(loss, implementation=implementation)
    names, _ = code("docs/sharding.md", "def body", jax=jax, rnnt_loss=call)
    whole = lambda *p: jax.lax.pmean(call(*p), "data")
    part = lambda *p: jax.lax.pmean(call(*p), ("data", "model"))
    with model_mesh(devices, "auto") as mesh:
        specs = over(3), P("data"), P("data"), P("data")
        run = lambda body, first: jax.value_and_grad(
            jax.shard_map(body, mesh=mesh, in_specs=(first, *specs[1:]), out_specs=P())
        )
        placed = place(p, mesh, *specs)
        for right in (run(names["body"], specs[0]), run(whole, P("data"))):
            check(jax.jit(right)(*placed), expected)
        wrong = jax.jit(run(part, specs[0]))
        value, _ = wrong(*place(known, mesh, *specs))
        assert np.isfinite(value) and abs(float(value) - loss.expected(known)[0].mean()) > 1
        assert np.isnan(wrong(*placed)[0])


@pytest.mark.parametrize("axis", [1, 2], ids=["T", "U + 1"])
def test_split_lattice_under_shard_map(loss, implementation, devices, axis):
    """Split frames give NaN if the lengths exceed them, else a wrong number. Split columns are an error."""
    p, _ = split_problem(loss)
    short = p._replace(logit_lengths=np.minimum(p.logit_lengths, 4))
    body = lambda *p: jax.lax.pmean(loss(*p, implementation=implementation), ("data", "model"))
    with model_mesh(devices, "auto") as mesh:
        specs = over(axis), P("data"), P("data"), P("data")
        run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))
        if axis == 2:
            with pytest.raises(ValueError, match="targets must have shape"):
                run(*place(p, mesh, *specs))
            return
        assert np.isnan(run(*place(p, mesh, *specs)))
        value = run(*place(short, mesh, *specs))
        assert np.isfinite(value) and abs(float(value) - loss.expected(short)[0].mean()) > 0.1


def test_split_output_layer_under_shard_map(kernel, devices):
    """The gather of docs/sharding.md makes it right."""
    p, _ = split_problem()
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    arguments = draw(4, 8), draw(16, 8, 4), draw(16, 6, 4), *p[1:]

    def mean(weight, *rest):
        return jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(weight), *rest, implementation=kernel)

    def body(weight, *rest):
        return jax.lax.pmean(mean(jax.lax.all_gather(weight, "model", axis=1, tiled=True), *rest), ("data", "model"))

    expected = jax.jit(jax.value_and_grad(mean, (0, 1, 2)))(*arguments)
    with model_mesh(devices, "auto") as mesh:
        specs = P(None, "model"), *(P("data"),) * 5
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
        got = jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))(*arguments)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def refused():
    """Calls by (argument, dimension, implementation) that JAX cannot trace if that dimension is split."""
    draw = lambda *shape: np.zeros(shape, np.float32)
    logits, targets, *lengths = split_problem()[0]
    rest = targets, *lengths
    joint = lambda e, q, *rest, **o: jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(draw(4, 8)), e, q, *rest, **o)
    first = np.zeros((16, 8), np.int32)
    pruned = lambda x, *rest, **o: jax_rnnt.pruned_rnnt_loss(x, first, *rest, **o)
    packed_loss = functools.partial(jax_rnnt.rnnt_loss_packed, max_frames=8)
    scores, rows = (draw(16, 8, 8), draw(16, 6, 8)), (draw(16, 8, 4), draw(16, 6, 4))
    for function in (jax_rnnt.rnnt_loss, jax_rnnt.tdt_loss, jax_rnnt.rnnt_posteriors, jax_rnnt.rnnt_align, pruned):
        if function is jax_rnnt.tdt_loss:
            function = functools.partial(function, durations=(0, 1))
        yield function, (logits, *rest), 0, 1, "logits .* T ", "reference"
        columns = "S" if function is pruned else r"U \+ 1"
        yield function, (logits, *rest), 0, 2, rf"logits .* {columns} ", "reference"
    for implementation in (None, "reference"):
        even = draw(16, 8, 7, 8), np.zeros((16, 6), np.int32), *lengths
        yield jax_rnnt.rnnt_loss, even, 1, 1, "targets .* U ", implementation
        yield packed_loss, (draw(896, 8), *rest), 0, 0, "logits .* N ", implementation
        yield jax_rnnt.simple_rnnt_loss, (*scores, *rest), 0, 2, "am .* V ", implementation
        yield jax_rnnt.simple_rnnt_loss, (*scores, *rest), 1, 2, "lm .* V ", implementation
        for i, (name, letters) in enumerate((("encoder_out", ("T", "E")), ("predictor_out", (r"U \+ 1", "P")))):
            for axis, letter in enumerate(letters, 1):
                yield joint, (*rows, *rest), i, axis, f"{name} .* {letter} ", implementation
    yield jax_rnnt.simple_rnnt_loss, (*scores, *rest), 0, 1, "am .* T ", "reference"
    yield jax_rnnt.simple_rnnt_loss, (*scores, *rest), 1, 1, r"lm .* U \+ 1 ", "reference"


def test_refused_on_an_explicit_mesh(devices):
    """The error names argument, dimension and mesh axis, and its advice works."""
    with model_mesh(devices, "explicit") as mesh:
        for function, arguments, position, axis, message, implementation in refused():
            x = arguments[position]
            split = jax.device_put(x, NamedSharding(mesh, P(*[None] * axis, "model")))
            call = lambda x, f=function, a=arguments, i=position, o=implementation: f(
                *a[:i], x, *a[i + 1 :], implementation=o
            )
            expected = rf"{message}.*mesh axis 'model'.*jax\.sharding\.reshard\(\w+, "
            for way in (call, jax.jit(call)):
                with pytest.raises(ValueError, match=expected):
                    way(split)
            jax.eval_shape(call, jax.sharding.reshard(split, P()))


# -------------------------------------------------------------------------------------------------- other functions


def pruned_step(x, *rest):
    """Both losses of pruned training, and the steps between them."""
    am, lm = x[:, :, 0], x[:, 0]
    simple, posteriors = jax_rnnt.simple_rnnt_loss(am, lm, *rest, reduction="none", return_posteriors=True)
    names = "logit_lengths", "target_lengths", "blank_posteriors", "label_posteriors"
    first = jax_rnnt.prune_ranges(**dict(zip(names, (*rest[1:], *posteriors))), width=3)
    frames, states = jax_rnnt.prune_inputs(am, lm, first, 3)
    loss = jax_rnnt.pruned_rnnt_loss(jnp.tanh(frames + states), first, *rest, reduction="none")
    return simple, posteriors, first, loss


minimum_latency = functools.partial(jax_rnnt.minimum_latency, reduction="none")
durations = jax_rnnt.TDTLoss((2, 0, 1))
OTHERS = {
    "align": jax_rnnt.rnnt_align,
    "align_durations": functools.partial(jax_rnnt.rnnt_align, loss=durations),
    "posteriors": jax_rnnt.rnnt_posteriors,
    "posteriors_durations": functools.partial(jax_rnnt.rnnt_posteriors, loss=durations),
    "expected_frames": jax_rnnt.expected_emission_frames,
    "minimum_latency": minimum_latency,
    "minimum_latency_gradient": jax.grad(lambda *p: minimum_latency(*p).sum()),
    "pruned": pruned_step,
    "pruned_gradient": jax.grad(lambda *p: sum(pruned_step(*p)[::3]).sum()),
}


SLOW = pytest.mark.slow


@pytest.mark.rare("pruned_gradient-shard_map", "minimum_latency_gradient", "align_durations", "align-shard_map")
@pytest.mark.parametrize(
    "way", ["auto", pytest.param("explicit", marks=SLOW), "shard_map", pytest.param("pmap", marks=SLOW)]
)
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions(name, way, devices):
    """All results are per sequence: each device computes its own, without communication."""
    p = losses.problem(16, dtype=np.float32)
    function = OTHERS[name]
    expected = jax.jit(function)(*p)
    with mesh_of(devices, "explicit" if way == "explicit" else "auto") as mesh:
        if way == "pmap":
            split = [x.reshape(8, 2, *x.shape[1:]) for x in p]
            got = jax.pmap(function, devices=devices)(*split)
            got = jax.tree.map(lambda x: x.reshape(16, *x.shape[2:]), got)
        else:
            if way == "shard_map":
                function = jax.shard_map(function, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P("data"))
            placed = place(p, mesh, P("data"))
            compiled = jax.jit(function).lower(*placed).compile()
            got = compiled(*placed)
            assert not losses.collectives(compiled.as_text())
            for x in jax.tree.leaves(got):
                assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), x.ndim)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=losses.tolerance(np.float32, 11))


def test_packed_under_shard_map(kernel, devices):
    """Every device packs its own sequences; no collective but the mean's."""
    p = losses.problem(16, dtype=np.float32)
    parts = [p.take(slice(i, i + 2)) for i in range(0, 16, 2)]
    rows = max(len(losses.packed(part, part.logits)) for part in parts)
    pack = lambda part, x, fill: losses.packed(part, x, extra=rows - len(losses.packed(part, x, extra=0)), fill=fill)
    logits = np.concatenate([pack(part, part.logits, np.nan) for part in parts])
    values, gradient = losses.RNNT.expected(p)
    expected = np.concatenate([pack(part, gradient[2 * i : 2 * i + 2], 0) for i, part in enumerate(parts)])

    def body(*p):
        return jax.lax.pmean(jax_rnnt.rnnt_loss_packed(*p, max_frames=7, implementation=kernel), "data")

    with mesh_of(devices, "auto") as mesh:
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(P("data"),) * 4, out_specs=P())
        placed = place(p._replace(logits=logits), mesh, P("data"))
        compiled = jax.jit(jax.value_and_grad(mapped)).lower(*placed).compile()
        value, got = compiled(*placed)
    np.testing.assert_allclose(value, values.mean(), rtol=1e-6)
    np.testing.assert_allclose(got, expected / 16, atol=losses.tolerance(np.float32, 11))
    assert set(losses.collectives(compiled.as_text())) <= {"all-reduce"}
    assert losses.custom_calls(compiled.as_text()) == losses.once(losses.RNNT.gradient_calls)


def test_packed_under_pmap(kernel, devices):
    p = losses.problem(16, dtype=np.float32, lengths=([7, 5] * 8, [4, 2] * 8))
    logits = np.stack([losses.packed(part, part.logits) for part in (p.take(slice(i, i + 2)) for i in range(0, 16, 2))])
    split = [x.reshape(8, 2, *x.shape[1:]) for x in p[1:]]
    call = lambda *p: jax_rnnt.rnnt_loss_packed(*p, max_frames=7, reduction="none", implementation=kernel)
    values = jax.pmap(call, devices=devices)(logits, *split)
    np.testing.assert_allclose(values.reshape(16), losses.RNNT.expected(p)[0], rtol=1e-6)
