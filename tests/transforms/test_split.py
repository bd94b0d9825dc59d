"""Is a loss over classes or frames of several devices that of whole logits, and do only planes travel?"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import batches
import compare
import family
import hlo
import jax_rnnt
from jax_rnnt import JointLogits, LinearJoint, PackedLogits, RNNTLoss, TDTLoss
from meshes import SET_MESH, mesh_of, place

pytestmark = pytest.mark.no_kernel
VOCAB, FRAMES = {"vocab_axis": "model"}, {"frame_axis": "seq"}
AXES = {"vocabulary": VOCAB, "frames": FRAMES, "both": VOCAB | FRAMES}
LENGTHS = (8, 5, 8, 3), (4, 2, 0, 3)


def problem(loss=family.RNNT, dtype=np.float64, **options):
    return batches.problem(4, 8, 4, 24 - loss.extra_classes, loss=loss, dtype=dtype, lengths=LENGTHS, **options)


def split_mesh(devices, kind, axes):
    """A mesh of "data" and the axes of the loss, over eight devices."""
    sizes = (2, 4) if len(axes) == 1 else (2, 2, 2)
    return mesh_of(devices, kind, sizes, ("data", *axes.values()), is_set=kind in ("auto", "explicit"))


def spec(axes):
    return P("data", axes.get("frame_axis"), None, axes.get("vocab_axis"))


WEIGHTS = np.array([1.0, -2.0, 0.5, 3.0])


# Losses, axes, kind of mesh, implementation; every other loss: test_promises.py. "unchecked": without check_vma.
RNNT, BOTH = family.RNNT, VOCAB | FRAMES
CASES = [(RNNT, axes, "shard_map", "kernel") for axes in (VOCAB, FRAMES)]
CASES += [(RNNT, axes, kind, "kernel") for axes, kind in ((VOCAB, "auto"), (FRAMES, "explicit"), (BOTH, "unchecked"))]
CASES += [(family.TDT, BOTH, "shard_map", "kernel"), (RNNT, BOTH, "auto", "kernel")]
CASES += [(family.HAT, BOTH, "explicit", "kernel"), family.slow(RNNT, BOTH, "shard_map", "reference")]


@pytest.mark.parametrize(("loss", "axes", "kind", "implementation"), CASES, ids=str, indirect=["implementation"])
def test_value_and_gradient(loss, axes, kind, implementation, devices):
    """Under jit and inside `shard_map`, with every option; no array with all classes or frames of logits exists."""
    p = problem(loss)
    options = {"clamp": 0.5, "fastemit_lambda": 0.5, "delay_penalty": 0.125}
    value = loss.value(reduction="none", implementation=implementation, **options, **axes)
    values, gradient = loss.expected(p, **options)
    with split_mesh(devices, kind, axes) as mesh:
        f, specs = value, (spec(axes), *[P("data")] * 3)
        if kind in ("shard_map", "unchecked"):  # every device sees its own part
            f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=kind == "shard_map")
        placed = place(p, mesh, *specs)

        def weighted(*p):
            losses = f(*p)
            return jnp.sum(losses * WEIGHTS), losses

        step = jax.value_and_grad(weighted, has_aux=True)
        ((_, got), grad), text = hlo.compiled(step, *placed)
    np.testing.assert_allclose(got, values, rtol=1e-12)
    np.testing.assert_allclose(grad, gradient * WEIGHTS[:, None, None, None], atol=1e-12)
    # Two sequences of each part of "data", with 8 frames and 5 columns. Planes: a sum, two picks, all batches of them.
    planes = 2 * 8 * 5 * (5 + loss.extra_classes)
    for kind_of_exchange in ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"):
        sizes = [int(np.prod(shape)) for shape in hlo.exchanged(text, kind_of_exchange)]
        assert max(sizes, default=0) <= planes, (kind_of_exchange, sizes)


METHODS = "posteriors", "align", "label_frames", "latency", "label_log_probs", "arc_log_probs"


@functools.cache
def methods_of_whole_logits(loss):
    p = problem(loss)
    return jax.jit(functools.partial(all_methods, loss.value()))(*p, WINDOWS)


WINDOWS = np.tile(np.array([0, 6], np.int32), (4, 4, 1))


def all_methods(value, *p):
    return {name: getattr(value, name)(*p[:4], label_windows=p[4]) for name in METHODS}


@pytest.mark.parametrize(
    ("loss", "axes", "kind"),
    [(RNNT, FRAMES, "auto"), (RNNT, BOTH, "explicit"), (family.TDT, VOCAB, "explicit")],
    ids=str,
)
def test_methods(loss, axes, kind, devices):
    """The answers are those of whole logits; planes of nodes lie as the logits do."""
    with split_mesh(devices, kind, axes) as mesh, jax.set_mesh(mesh):
        placed = place((*problem(loss), WINDOWS), mesh, spec(axes), *[P("data")] * 4)
        got = jax.jit(functools.partial(all_methods, loss.value(**axes)))(*placed)
        compare.assert_close(got, methods_of_whole_logits(loss), 1e-12)
        for plane in jax.tree.leaves([got["posteriors"], got["arc_log_probs"]]):
            assert (*plane.sharding.spec, None, None)[1] == axes.get("frame_axis")


def network(dtype=np.float64, hypotheses=None, classes=16):
    """Arrays of a joint network and a batch, [B, 1] encoders and [B, N] predictors if there are hypotheses."""
    rng = np.random.default_rng(0)
    p = problem(dtype=dtype)
    batch = (4,) if hypotheses is None else (4, hypotheses)
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    rows = draw(*batch[:1], *(1,) * (len(batch) - 1), 8, 6), draw(*batch, 5, 6)
    rest = [
        np.broadcast_to(x.reshape(4, *(1,) * (len(batch) - 1), *x.shape[1:]), (*batch, *x.shape[1:])) for x in p[1:]
    ]
    rest[0] = rest[0] % 13  # of a token, with any loss
    return draw(6, classes), draw(classes), *rows, *rest


def of_joint(loss, weight, bias, encoder, predictor, *rest):
    return loss(JointLogits(LinearJoint(weight, bias), encoder, predictor, 16), *rest)


@functools.cache
def of_whole_joint(loss, hypotheses=None):
    return jax.jit(jax.value_and_grad(of_joint, (1, 2, 3, 4)))(loss, *network(hypotheses=hypotheses))


# Loss, axes, hypotheses of each utterance, kind of mesh, implementation.
WHOLE, DURATIONS = RNNTLoss(), TDTLoss((0, 2))
OF_JOINTS = [(WHOLE, VOCAB, None, "auto", "kernel"), (WHOLE, FRAMES, None, "shard_map", "kernel")]
OF_JOINTS += [(WHOLE, BOTH, None, "explicit", "kernel"), family.slow(WHOLE, BOTH, None, "unchecked", "kernel")]
OF_JOINTS += [family.slow(WHOLE, BOTH, 3, kind, "kernel") for kind in ("shard_map", "explicit")]
OF_JOINTS += [family.slow(WHOLE, BOTH, None, "shard_map", "reference")]
OF_JOINTS += [family.slow(loss, BOTH, None, "auto", "kernel") for loss in (DURATIONS, jax_rnnt.HATLoss())]


@pytest.mark.parametrize(
    ("loss", "axes", "hypotheses", "kind", "implementation"), OF_JOINTS, ids=str, indirect=["implementation"]
)
def test_joint(loss, axes, hypotheses, kind, implementation, devices):
    """The output layer lies split over classes, the encoder over frames; every gradient is that of whole arrays.

    Durations, or the blank of HAT, lie on the last device.
    """
    arguments, whole = network(hypotheses=hypotheses), loss
    loss = dataclasses.replace(loss, implementation=implementation, **axes)
    model, seq = axes.get("vocab_axis"), axes.get("frame_axis")
    rows = ("data",) if hypotheses is None else ("data", None)
    specs = P(None, model), P(model), P(*rows, seq), *[P("data")] * 4
    with split_mesh(devices, kind, axes) as mesh:
        f = functools.partial(of_joint, loss)
        if kind in ("shard_map", "unchecked"):
            mean = lambda *p: jax.lax.pmean(of_joint(loss, *p), "data")
            f = jax.shard_map(mean, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=kind == "shard_map")
        step = jax.value_and_grad(f, (0, 1, 2, 3))
        got, text = hlo.compiled(step, *place(arguments, mesh, *specs))
    compare.assert_close(got, of_whole_joint(whole, hypotheses), 1e-12)
    sizes = [n for each in ("all-gather", "all-to-all") for n in map(np.prod, hlo.exchanged(text, each))]
    assert max(sizes, default=0) <= 2 * 3 * 8 * 5


def odd_logits(loss, blank):
    """(name, problem): values that a device has alone, among logits [..., 24] on four devices. Faults of a sequence:
    test_promises.py."""
    p = problem(loss)
    p.logits[..., 6:12] = -np.inf  # all classes of a device
    p.targets[:] = np.where((p.targets >= 6) & (p.targets < 12), 1, p.targets)
    yield "device without classes", p
    p = problem(loss)
    p.logits[..., :6] = -np.inf
    p.logits[..., 3] = 0  # a device whose lse is 0 beside an anchor of -inf
    p.targets[:] = np.where(p.targets < 6, 3, p.targets)
    yield "one class of logit 0", p
    p = problem(loss)
    p.logits[..., :3] = -np.inf  # also where the kernel leaves out the other columns
    p.targets[:] = np.where(p.targets < 3, 5, p.targets)
    yield "classes in the place of another head", p
    p = problem(loss)
    first = [c for c in range(blank % 6, 24, 6) if c != blank % 24]  # of other devices, where this one has its blank
    p.logits[..., first] -= 1e9
    p.targets[:] = np.where(np.isin(p.targets, first), 2, p.targets)
    yield "masked", p
    for value in (np.nan, np.inf, -np.inf, 1e4, -1e4):
        for column in (-1, 5):  # the other head's, and a class in its place
            p = problem(loss)
            p.logits[0, 1, 1, column], p.targets[:2, :2] = value, [5, 3]
            yield f"{value} in {column}", p


# Loss, blank, axes, implementation.
ODD = [(RNNT, -1, axes, "kernel") for axes in (VOCAB, FRAMES)] + [(RNNT, 12, BOTH, "kernel")]
ODD += [family.slow(loss, -1, BOTH, "kernel") for loss in (family.TDT, family.HAT)]
ODD += [family.slow(RNNT, -1, BOTH, "reference")]


@pytest.mark.parametrize(("loss", "blank", "axes", "implementation"), ODD, ids=str, indirect=["implementation"])
def test_odd_logits(loss, blank, axes, implementation, devices):
    """NaN, infinity and masks stay where they are, as in whole logits."""
    step = lambda value: jax.jit(jax.grad(lambda *p: ((losses := value(*p)).sum(), losses), has_aux=True))
    whole = step(loss.value(blank=blank, reduction="none"))
    with split_mesh(devices, "auto", axes) as mesh, jax.set_mesh(mesh):
        split = step(loss.value(blank=blank, reduction="none", implementation=implementation, **axes))
        for name, p in odd_logits(loss, blank):
            gradient, values = split(*place(p, mesh, spec(axes), *[P("data")] * 3))
            of_whole, expected = whole(*p)
            np.testing.assert_allclose(values, expected, rtol=1e-12, err_msg=name)
            good = ~np.isnan(expected)
            np.testing.assert_allclose(gradient[good], of_whole[good], atol=1e-11, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=str)
def test_accuracy(dtype, native_kernel, devices):
    """In float32 the split costs no digits, also where all logits share an offset."""
    step = jax.jit(jax.value_and_grad(lambda loss, *p: loss(*p), 1))
    for offset in (0, 1e4):
        p = problem(dtype=dtype)
        p = p._replace(logits=(np.asarray(p.logits, np.float32) + np.float32(offset)).astype(dtype))
        value, gradient = step(RNNTLoss(), *p.astype(np.float64))
        with split_mesh(devices, "auto", VOCAB) as mesh, jax.set_mesh(mesh):
            got = step(RNNTLoss(**VOCAB), *place(p, mesh, spec(VOCAB), *[P("data")] * 3))
        np.testing.assert_allclose(got[0], value, rtol=1e-6)
        relative, smallest = compare.rounding(dtype)
        np.testing.assert_allclose(np.asarray(got[1], np.float64), gradient, rtol=relative, atol=1e-6 + smallest)


@SET_MESH
def test_vmap_remat_and_second_derivatives(devices):
    p = problem()
    stacked = jax.tree.map(lambda x: np.stack([x, x[::-1]]), p)

    sharpness = lambda loss, x: jnp.sum(jax.grad(lambda x: loss(x, *p[1:]))(x) ** 2)
    each = jax.jit(lambda loss, *p: jax.vmap(jax.value_and_grad(jax.checkpoint(lambda *p: loss(*p))))(*p))
    curve = jax.jit(lambda loss: jax.grad(functools.partial(sharpness, loss))(p.logits))
    want = each(RNNTLoss(), *stacked)
    for axes in AXES.values():
        with split_mesh(devices, "auto", axes) as mesh, jax.set_mesh(mesh):
            compare.assert_close(each(RNNTLoss(**axes), *stacked), want, 1e-12)
    want = curve(RNNTLoss(implementation="reference"))
    with split_mesh(devices, "auto", BOTH) as mesh, jax.set_mesh(mesh):
        compare.assert_close(curve(RNNTLoss(**BOTH)), want, 1e-12)


@pytest.mark.slow
@SET_MESH
def test_any_batch(devices):
    """No batch dimension, fewer sequences than devices, two batch dimensions."""
    step = jax.jit(jax.value_and_grad(lambda loss, *p: loss(*p).sum(), 1))
    for shape, axes in itertools.product(((), (1,), (3, 2)), (VOCAB, FRAMES)):
        count = int(np.prod(shape))
        p = jax.tree.map(lambda x: np.resize(x, (count, *x.shape[1:])).reshape((*shape, *x.shape[1:])), problem())
        want = step(RNNTLoss(reduction="none"), *p)
        with mesh_of(devices, "auto", (8,), (*axes.values(),), is_set=True):
            compare.assert_close(step(RNNTLoss(reduction="none", **axes), *p), want, 1e-12)


@pytest.mark.slow
def test_memory(native_kernel, devices, optimized):
    """A device needs its part of the logits; gradients take their place."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((2, 64, 16, 4096), np.float32), ((2, 15), np.int32), ((2,), np.int32), ((2,), np.int32),
    )]  # fmt: skip
    for axes, where in ((VOCAB, P(None, None, None, "model")), (FRAMES, P(None, "seq"))):
        with mesh_of(devices, "auto", (8,), (*axes.values(),), is_set=True) as mesh:
            placement = [jax.NamedSharding(mesh, s) for s in (where, P(), P(), P())]
            f = jax.jit(jax.grad(RNNTLoss(**axes)), in_shardings=placement, donate_argnums=0)
            memory = f.lower(*shapes).compile().memory_analysis()
        part = 2 * 64 * 16 * 4096 * 4 // 8
        assert memory.argument_size_in_bytes < 1.01 * part
        assert memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes < 1.3 * part


def refusals():
    p = problem()
    whole = lambda loss: lambda *p: loss(*p)
    draw = lambda *shape: np.zeros(shape)
    joint = lambda loss: lambda *p: loss(JointLogits(lambda e, q: e + q, draw(4, 8, 24), draw(4, 5, 24)), *p[1:])
    yield "V must be a multiple of the 4 .*got V = 22", whole(RNNTLoss(**VOCAB)), p._replace(logits=p.logits[..., :22])
    yield "T must be a multiple of the 4 .*got T = 7", whole(RNNTLoss(**FRAMES)), p._replace(logits=p.logits[:, :7])
    yield "more logits of a row than the 6 durations, got 24 .* 4 devices", whole(TDTLoss(range(6), **VOCAB)), p
    yield "blank of HATLoss must be the last class, -1 or 23, got 0", whole(jax_rnnt.HATLoss(blank=0, **VOCAB)), p
    yield "LinearJoint outside of jax.shard_map", joint(RNNTLoss(**VOCAB)), p
    packed = lambda x, *rest: RNNTLoss(**VOCAB)(PackedLogits(x.reshape(-1, 24)), *rest)
    yield "an array .* or JointLogits, got PackedLogits", packed, p
    yield "must name an axis of the mesh.*got 'other'", whole(RNNTLoss(vocab_axis="other")), p


def test_refusals(devices):
    errors = ValueError, TypeError, NotImplementedError
    for message, f, p in refusals():
        axes = FRAMES if "T must" in message else VOCAB
        with split_mesh(devices, "auto", axes), pytest.raises(errors, match=message):
            jax.jit(f)(*p)


def test_refused_inside_shard_map(devices):
    """Whole logits, and targets, lengths or options that differ, where types tell."""
    for axes, wrong in itertools.product((VOCAB, FRAMES), range(4)):
        (axis,), p = axes.values(), problem()
        specs, arrays = [spec(axes), P("data"), P("data"), P()], [*p[:3], np.ones(4)]
        specs[wrong] = (P("data"), P("data", axis), P(("data", axis)), P(axis))[wrong]
        arrays[wrong] = np.resize(arrays[wrong], (arrays[0].shape, (4, 16), 16, 4)[wrong])

        def f(logits, targets, frames, penalty, axes=axes):
            loss = RNNTLoss(reduction="none", delay_penalty=penalty[0], **axes)
            return loss(logits, targets, frames, jnp.minimum(frames, 2))

        message = "logits must be split" if not wrong else "must be alike"
        with split_mesh(devices, "auto", axes) as mesh:
            f = jax.shard_map(f, mesh=mesh, in_specs=tuple(specs), out_specs=P("data"))
            with pytest.raises(ValueError, match=message):
                jax.jit(f)(*arrays)
    for wrong in ({"vocab_axis": 3}, {"vocab_axis": "x", "frame_axis": "x"}):
        with pytest.raises((TypeError, ValueError), match="axis"):
            RNNTLoss(**wrong)
