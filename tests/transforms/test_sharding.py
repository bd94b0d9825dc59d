"""Does every device work on its own part of the batch without collectives, for every way to shard it?"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import batches
import compare
import family
import hlo
import jax_rnnt
import platforms
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, LinearJoint, PackedLogits
from layout_table import pruned_step
from meshes import KINDS, mean_over_devices, mesh_of, place

pytestmark = pytest.mark.no_kernel

# On a mesh losses differ in a table of arcs and in their steps alone: two lattice kernels, steps, and the reference.
LOSSES = [(family.RNNT, "kernel"), (family.TDT, "kernel"), (family.WILDCARD, "kernel"), (family.RNNT, "reference")]


def batch_of(loss=family.RNNT):
    """Sixteen ragged sequences, two per device."""
    p = batches.problem(16, loss=loss, dtype=np.float32)
    return p, loss.expected(p)


def call(loss, implementation, **options):
    """The loss of an array, by position."""
    return lambda *p: loss.value(implementation=implementation, **options)(*p)


def one_by_one(loss, implementation):
    """The mean of the losses under vmap."""
    return lambda *p: jax.vmap(call(loss, implementation, reduction="none"))(*p).mean()


def run(f, p, loss, expected, implementation):
    """Value and gradient of a mean loss: its collective alone, and one custom call of each kind."""
    got, text = hlo.compiled(jax.value_and_grad(f), *p)
    compare.assert_mean(got, expected)
    assert set(hlo.collectives(text)) <= {"all-reduce"}
    if implementation == "kernel":
        assert hlo.custom_calls(text) == hlo.once(loss.gradient_calls)
    return got


# --------------------------------------------------------------------------------------------------------- the batch
@pytest.mark.parametrize(
    ("loss", "implementation", "kind"),
    [(*case, kind) for case, kind in zip(LOSSES, ("auto", "explicit", "auto", "explicit"))],
    indirect=["implementation"],
    ids=str,
)
def test_batch_sharded(loss, implementation, devices, kind):
    """Windows [B, U, 2] too. The gradient is sharded as the logits. Losses per sequence need no collective at all."""
    p, (values, _) = batch_of(loss)
    windows = np.tile(np.array([[0, 3], [1, 4], [2, 9], [3, 9]], np.int32), (16, 1, 1))
    options = {"fastemit_lambda": 0.5, "clamp": 0.25, "delay_penalty": 0.125}
    value = loss.value(implementation=implementation, **options)
    with mesh_of(devices, kind) as mesh:
        placed = place((*p, windows), mesh, P("data"))
        f = lambda *p: value(*p[:4], label_windows=p[4])
        expected = loss.expected(p, label_windows=windows, **options)
        _, gradient = run(f, placed, loss, expected, implementation)
        assert gradient.sharding.is_equivalent_to(placed[0].sharding, 4)
        got, text = hlo.compiled(call(loss, implementation, reduction="none"), *placed[:4])
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    np.testing.assert_allclose(got, values, rtol=1e-6)
    assert not hlo.collectives(text)
    assert hlo.custom_calls(text) == (hlo.once(loss.value_calls) if implementation == "kernel" else {})


PARTITIONS = (
    (call, (P("data"), P("data"), P(), P()), (8,)),
    (call, (P("data"), P(), P(), P()), (8,)),  # as NumPy arrays of the host are
    (call, (P(("data", "more")),), (4, 2)),
    (one_by_one, (P("data"),), (8,)),
)


@KINDS
def test_other_partitions_of_the_batch(kernel, devices, kind):
    p, expected = batch_of()
    for make, specs, shape in PARTITIONS:
        with mesh_of(devices, kind, shape, ("data", "more")[: len(shape)]) as mesh:
            run(make(family.RNNT, kernel), place(p, mesh, *specs), family.RNNT, expected, kernel)


def test_uneven_batch(kernel, devices):
    """Ten sequences on eight devices: XLA calls the kernels on padding rows with arbitrary contents."""
    p, loss = batches.problem(10, dtype=np.float32), family.RNNT
    with mesh_of(devices, "auto") as mesh:
        sharding = NamedSharding(mesh, P("data"))

        @jax.jit
        def run_uneven(*p):
            p = [jax.lax.with_sharding_constraint(x * 1, sharding) for x in p]
            return jax.value_and_grad(call(loss, kernel))(*p)

        compare.assert_mean(run_uneven(*place(p, mesh, P())), loss.expected(p))


# --------------------------------------------------------------------------------------------------------- shard_map
IN_SHARD_MAP = [(*LOSSES[0], y, z) for y, z in ((False, "sharded"), (True, "replicated"), (True, "vmap"))]
IN_SHARD_MAP += [(*x, True, "sharded") for x in LOSSES[:2]]
IN_SHARD_MAP += [family.slow(*x, True, "sharded") for x in LOSSES[2:]] + [family.slow(*LOSSES[2], False, "vmap")]


@pytest.mark.parametrize(
    ("loss", "implementation", "check_vma", "case"), IN_SHARD_MAP, indirect=["implementation"], ids=str
)
def test_shard_map(loss, implementation, devices, check_vma, case):
    """With lengths that are sharded or replicated, and under vmap."""
    p, _ = batch_of(loss)
    full, lengths = p, P("data")
    if case == "replicated":  # the same on every device: two sequences each
        p = p._replace(logit_lengths=p.logit_lengths[:2], target_lengths=p.target_lengths[:2])
        full = p._replace(logit_lengths=np.tile(p.logit_lengths, 8), target_lengths=np.tile(p.target_lengths, 8))
        lengths = P()
    specs = P("data"), P("data"), lengths, lengths
    make = one_by_one if case == "vmap" else call
    with mesh_of(devices, "auto") as mesh:
        f = mean_over_devices(make(loss, implementation), mesh, specs, check_vma=check_vma)
        run(f, place(p, mesh, *specs), loss, loss.expected(full), implementation)


def test_shard_map_invariant_logits(kernel, devices):
    """Devices have the same logits and different labels: the gradient sums over devices."""
    p, _ = batch_of()
    shared = p._replace(logits=p.logits[:2])
    values, gradient = family.RNNT.expected(p._replace(logits=np.tile(p.logits[:2], (8, 1, 1, 1))))
    with mesh_of(devices, "auto") as mesh:
        f = mean_over_devices(call(family.RNNT, kernel), mesh, (P(), P("data"), P("data"), P("data")))
        got = jax.jit(jax.value_and_grad(f))(*shared)
    np.testing.assert_allclose(got[0], values.mean(), rtol=1e-6)
    expected = gradient.reshape(8, 2, *gradient.shape[1:]).sum(0) / 16
    np.testing.assert_allclose(got[1], expected, atol=compare.tolerance(np.float32, 11))


@pytest.mark.parametrize("kind", ["pmap", "unchecked", "checked"])
def test_gradient_inside(kernel, devices, kind):
    """The steps of docs/sharding.md, which take the gradient on each device: of a bias that all devices share, and of
    the device's own logits. A sum over devices inside makes the gradient eight times too large unless JAX checks types.
    """
    p, (_, gradient) = batch_of()
    of_bias = gradient.sum((0, 1, 2), keepdims=True) / 16  # of the mean of all
    own = gradient / 2  # of a device's mean of two
    value = lambda bias, logits, *batch: call(family.RNNT, kernel)(logits + bias, *batch)

    def step(*p):
        reduced = jax.grad(lambda *p: jax.lax.pmean(value(*p), "data"))(*p)
        if kind != "checked":
            reduced = jax.lax.pmean(jax.grad(value)(*p), "data")
        return reduced, jax.grad(lambda *p: jax.lax.psum(value(*p), "data"), 1)(*p)

    bias, axes = np.zeros((1, 1, 1, p.logits.shape[-1]), np.float32), (None, 0, 0, 0, 0)
    if kind == "pmap":
        split = [x.reshape(8, 2, *x.shape[1:]) for x in p]
        each, of_logits = jax.pmap(step, axis_name="data", devices=devices, in_axes=axes)(bias, *split)
        got = each[0], of_logits.reshape(p.logits.shape)
    else:
        with mesh_of(devices, "auto") as mesh:
            specs = {"in_specs": (P(), *[P("data")] * 4), "out_specs": (P(), P("data"))}
            got = jax.jit(jax.shard_map(step, mesh=mesh, check_vma=kind == "checked", **specs))(bias, *p)
    np.testing.assert_allclose(got[0], of_bias, atol=1e-5)
    np.testing.assert_allclose(got[1], own * (1 if kind == "checked" else 8), atol=1e-4)


# ------------------------------------------------------------------ dimensions that are not the batch: docs/sharding.md
AXES = {"T": 1, "U + 1": 2, "V": 3}


def split_problem():
    """Sixteen sequences whose dimensions all divide by two."""
    p = batches.problem(16, 8, 5, 8, dtype=np.float32)
    return p, family.RNNT.expected(p)


def over(axis):
    """Partitions of a problem: the batch over "data", this dimension of the logits over "model"."""
    return P("data", *[None] * (axis - 1), "model"), *(P("data"),) * 3


def model_mesh(devices, kind):
    return mesh_of(devices, kind, (4, 2), ("data", "model"))


# JAX refuses to split T and U + 1 of the reference on an Explicit mesh: see below.
DIMENSIONS = [("kernel", axis, "auto") for axis in AXES] + [("kernel", "V", "explicit")]
DIMENSIONS += [("reference", "T", "auto"), ("reference", "V", "auto"), ("reference", "V", "explicit")]


@pytest.mark.parametrize(("implementation", "name", "kind"), DIMENSIONS, indirect=["implementation"])
def test_other_dimensions(implementation, devices, name, kind):
    """The results are right. For the kernels every device holds all logits of its part of the batch.

    On the reference with a split vocabulary, devices exchange sums over V, but no logits.
    """
    (p, expected), axis = split_problem(), AXES[name]
    with model_mesh(devices, kind) as mesh:
        placed = place(p, mesh, *over(axis))
        got, text = hlo.compiled(jax.value_and_grad(call(family.RNNT, implementation)), *placed)
        compare.assert_mean(got, expected)
        if implementation == "kernel":
            assert set(hlo.exchanged(text, "all-gather")) == {(4, 8, 6, 8)} or platforms.interpreted()
        elif name == "V":
            assert got[1].sharding.is_equivalent_to(placed[0].sharding, 4)
            assert set(hlo.collectives(text)) == {"all-reduce"}
            assert set(hlo.exchanged(text, "all-reduce")) <= {(4, 8, 6), (4, 8, 6, 1), ()}


@pytest.mark.slow
def test_split_output_layer_of_a_joint(native_kernel, devices):
    """One tile of logits is gathered at a time."""
    rng = np.random.default_rng(0)
    networks = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 8), (16, 8, 4), (16, 6, 4))]
    arguments, specs = (*networks, *split_problem()[0][1:]), (P(None, "model"), *(P("data"),) * 5)

    def mean(weight, encoder, predictor, *rest):
        logits = JointLogits(LinearJoint(weight), encoder, predictor, 32)
        return jax_rnnt.RNNTLoss(implementation=native_kernel)(logits, *rest)

    step = jax.value_and_grad(mean, (0, 1, 2))
    expected = jax.jit(step)(*arguments)
    with model_mesh(devices, "auto") as mesh:
        got, text = hlo.compiled(step, *place(arguments, mesh, *specs))
    compare.assert_close(got, expected, 1e-5)
    shapes = hlo.exchanged(text, "all-gather")
    assert shapes and max(map(np.prod, shapes)) <= 4 * 32 * 8  # a tile on each of four parts of the batch


def test_split_logits_under_shard_map(kernel, devices):
    """After a gather, the loss and its gradient are right. A part of V or T is taken for the whole: lengths and labels
    beyond it are NaN. Split columns are an error."""
    p, expected = split_problem()
    loss, specs = call(family.RNNT, kernel), over(3)

    def body(logits, *batch):
        logits = jax.lax.all_gather(logits, "model", axis=3, tiled=True)
        return jax.lax.pmean(loss(logits, *batch), ("data", "model"))

    with model_mesh(devices, "auto") as mesh:
        gathered = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
        whole = mean_over_devices(loss, mesh, (P("data"), *specs[1:]))
        placed = place(p, mesh, *specs)
        for right in (gathered, whole):
            compare.assert_mean(jax.jit(jax.value_and_grad(right))(*placed), expected)
        parts = [jax.jit(mean_over_devices(loss, mesh, over(axis), ("data", "model"))) for axis in (1, 2, 3)]
        assert np.isnan(parts[0](*place(p, mesh, *over(1)))) and np.isnan(parts[2](*placed))
        with pytest.raises(ValueError, match="targets must have shape"):
            parts[1](*place(p, mesh, *over(2)))


def refused():
    """(call of arrays, arrays, number of the array, its dimension, message): JAX cannot trace this split."""
    logits, targets, *lengths = split_problem()[0]
    rest, draw = (targets, *lengths), lambda *shape: np.zeros(shape, np.float32)
    band = lambda x: BandLogits(x, np.zeros((16, 8), np.int32))
    joint = lambda e, q: JointLogits(LinearJoint(draw(4, 8)), e, q)
    scores, rows = (draw(16, 8, 8), draw(16, 6, 8)), (draw(16, 8, 4), draw(16, 6, 4))
    reference = jax_rnnt.RNNTLoss(implementation="reference")
    on_band = lambda x, *rest: reference(band(x), *rest)
    durations = jax_rnnt.TDTLoss((0, 1), implementation="reference")
    for f in (reference, durations, reference.posteriors, reference.align, reference.label_log_probs, on_band):
        yield f, (logits, *rest), 0, 1, "logits .* T "
        yield f, (logits, *rest), 0, 2, rf"logits .* {'S' if f is on_band else r'U . 1'} "
    on = lambda loss, make: lambda *p: loss(make(*p[:-3]), *p[-3:])
    for loss in (reference, jax_rnnt.RNNTLoss()):
        yield loss, (draw(16, 8, 7, 8), np.zeros((16, 6), np.int32), *lengths), 1, 1, "targets .* U "
        yield on(loss, lambda x: PackedLogits(x, 8)), (draw(896, 8), *rest), 0, 0, "logits .* N "
        yield on(loss, AdditiveLogits), (*scores, *rest), 0, 2, "am .* V "
        yield on(loss, AdditiveLogits), (*scores, *rest), 1, 2, "lm .* V "
        for i, (name, letters) in enumerate((("encoder_out", ("T", "E")), ("predictor_out", (r"U . 1", "P")))):
            for axis, letter in enumerate(letters, 1):
                yield on(loss, joint), (*rows, *rest), i, axis, f"{name} .* {letter} "
    yield on(reference, AdditiveLogits), (*scores, *rest), 0, 1, "am .* T "
    yield on(reference, AdditiveLogits), (*scores, *rest), 1, 1, r"lm .* U . 1 "


def test_refused_on_an_explicit_mesh(devices):
    """The error names argument, dimension and mesh axis, and its advice works."""
    with model_mesh(devices, "explicit") as mesh:
        for f, arguments, position, axis, message in refused():
            split = jax.device_put(arguments[position], NamedSharding(mesh, P(*[None] * axis, "model")))
            of = lambda x, f=f, a=arguments, i=position: f(*a[:i], x, *a[i + 1 :])
            for way in (of, jax.jit(of)):
                with pytest.raises(ValueError, match=rf"{message}.*mesh axis 'model'.*jax\.sharding\.reshard\(\w+, "):
                    way(split)
            jax.eval_shape(of, jax.sharding.reshard(split, P()))


# ----------------------------------------------------------------------------------- other methods, other layouts
RNNT, DURATIONS = jax_rnnt.RNNTLoss(reduction="none"), jax_rnnt.TDTLoss((2, 0, 1))


def pruned(x, *rest):
    return pruned_step(x[..., 0, :], x[..., 0, :, :], *rest)


def all_methods(*p):
    """Posteriors with durations, questions and their gradients, and pruned training."""
    several = [RNNT.align(*p), DURATIONS.posteriors(*p)]
    for f in (RNNT.label_log_probs, RNNT.latency):
        several.append(jax.grad(lambda *p, f=f: ((values := f(*p)).sum(), values), has_aux=True)(*p))
    several.append(jax.grad(lambda *p: (sum((results := pruned(*p))[:2]).sum(), results), has_aux=True)(*p))
    return several


@functools.cache
def expected_of_all_methods():
    return jax.jit(all_methods)(*batches.problem(16, dtype=np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["auto", "shard_map", "explicit_replicated"])
def test_other_methods(way, devices):
    """All results are per sequence: each device computes its own, without communication; under vmap in `shard_map`.

    "replicated": all but the logits, as NumPy arrays of the host are.
    """
    p, expected, f = batches.problem(16, dtype=np.float32), expected_of_all_methods(), all_methods
    assert all(np.any(x) for x in jax.tree.leaves(expected))
    with mesh_of(devices, way.removesuffix("_replicated")) as mesh:
        if way.endswith("replicated"):
            got = jax.jit(f)(*place(p, mesh, P("data"), P(), P(), P()))
        else:
            if way == "shard_map":
                typed = jax.__version_info__ >= (0, 7)  # before, JAX's own scans lose types in second derivatives
                f = jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=typed)
            got, text = hlo.compiled(f, *place(p, mesh, P("data")))
            assert not hlo.collectives(text)
            for x in jax.tree.leaves(got):
                assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), x.ndim)
    compare.assert_close(got, expected, rtol=1e-5, atol=compare.tolerance(np.float32, 11))


def test_packed_under_shard_map(kernel, devices):
    """Every device packs its own sequences; no collective but the mean's."""
    p, (values, gradient) = batch_of()
    parts = [slice(i, i + 2) for i in range(0, 16, 2)]
    rows = max(len(batches.packed(p.take(i), p.logits[i], extra=0)) for i in parts)

    def packed(x, fill):
        lengths = [len(batches.packed(p.take(i), x[i], extra=0)) for i in parts]
        own = zip(parts, lengths, strict=True)
        return np.concatenate([batches.packed(p.take(i), x[i], extra=rows - n, fill=fill) for i, n in own])

    loss = jax_rnnt.RNNTLoss(implementation=kernel)
    with mesh_of(devices, "auto") as mesh:
        f = mean_over_devices(lambda x, *rest: loss(PackedLogits(x, 7), *rest), mesh, (P("data"),) * 4)
        placed = place(p._replace(logits=packed(p.logits, np.nan)), mesh, P("data"))
        (value, got), text = hlo.compiled(jax.value_and_grad(f), *placed)
    np.testing.assert_allclose(value, values.mean(), rtol=1e-6)
    np.testing.assert_allclose(got, packed(gradient, 0) / 16, atol=compare.tolerance(np.float32, 11))
    assert set(hlo.collectives(text)) <= {"all-reduce"}
    assert hlo.custom_calls(text) == hlo.once(family.RNNT.gradient_calls)
