"""Does every loss keep docs/promises.md, in every layout, in arrays of any size, and split over devices?

One batch holds good sequences, each several times with other neighbours and other garbage outside its lengths, and
between them sequences with one fault each; a second batch has the same without faults, and a third one has that in
larger arrays. A program exported for any size answers for a loss, and one more for several devices.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import batches
import compare
import door
import family
import jax_rnnt
import layout_table
import platforms
from jax_rnnt import AdditiveLogits, PackedLogits
from meshes import SET_MESH, mesh_of

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
T, U, CLASSES = 36, 4, 12
LARGER = 49, 10
FRAMES, LABELS = (36, 20, 5, 13), (4, 2, 0, 3)  # of the good sequences; every lattice has a path

# Outside the lengths: a logit, a label, the first frame of a window.
GARBAGE = (np.nan, -1, INT_MAX), (np.inf, INT_MAX, INT_MIN), (-np.inf, INT_MIN, -1), (3e38, 9, 0), (-3e38, 8, 99)

# Faults of a sequence of T_b = 5, U_b = 2: (field, index, value). float64 has the answer.
FAULTS = {
    **{f"T_b={n}": [("logit_lengths", (), n)] for n in (-1, T + 1, INT_MIN, INT_MAX)},
    **{f"U_b={m}": [("target_lengths", (), m)] for m in (-1, U + 1, INT_MIN, INT_MAX)},
    **{f"label={k}": [("targets", 1, k)] for k in (-1, CLASSES, INT_MIN, INT_MAX)},
    "label 0": [("targets", 0, CLASSES)],
    "NaN of a class": [("logits", (0, 1, 3), np.nan)],
    "NaN of the last class": [("logits", (2, 0, -1), np.nan)],  # a blank or a duration
    "NaN row": [("logits", (4, 2), np.nan)],
    "inf of a class": [("logits", (0, 0, 3), np.inf)],
    "inf of the last class": [("logits", (4, 2, -1), np.inf)],
    "inf twice": [("logits", (2, 0, slice(3, 5)), np.inf)],
    "NaN beside a length": [("logits", (1, 1, 1), np.nan), ("logit_lengths", (), T + 1)],
    "-inf first row": [("logits", (0, 0), -np.inf)],
    "-inf frame": [("logits", 3, -np.inf)],
    "-inf": [("logits", ..., -np.inf)],
    "no frames": [("logit_lengths", (), 0)],
    "empty window": [("label_windows", 0, [4, 3])],
    "window after the last frame": [("label_windows", 1, [5, 9])],
    "windows in the wrong order": [("label_windows", slice(2), [[3, 3], [0, 2]])],
}
B = 2 * len(FAULTS) + 1
GOOD, FAULTY = np.arange(0, B, 2), np.arange(1, B, 2)

Batch = collections.namedtuple("Batch", (*batches.Problem._fields, "label_windows"))


LOG_PROBS = family.Loss(  # in float64
    "log_probs", jax_rnnt.RNNTLoss, {"fused_log_softmax": False}, {"fused_log_softmax": False}
)


def batch(loss, faults):
    """GOOD sequences, which repeat those of FRAMES and LABELS, and FAULTY ones with each of these lists of changes."""
    repeated, lengths = np.resize(np.arange(4), len(GOOD)), (np.full(B, 5), np.full(B, 2))
    lengths[0][GOOD], lengths[1][GOOD] = np.take(FRAMES, repeated), np.take(LABELS, repeated)
    dtype = np.float64 if loss is LOG_PROBS else np.float32
    p = batches.problem(B, T, U, CLASSES - loss.extra_classes, loss=loss, dtype=dtype, lengths=lengths)
    x = Batch(*p, np.tile(np.array([0, T - 2], np.int32), (B, U, 1)))
    x.targets[GOOD[3], 1] = CLASSES - loss.extra_classes - 1  # the blank
    for array in (x.logits, x.targets):
        array[GOOD] = array[GOOD[repeated]]
    for b, outside in enumerate(~batches.inside(p)):
        logit, label, window = GARBAGE[b // 8 % len(GARBAGE)]
        x.logits[b][outside] = logit
        x.targets[b, p.target_lengths[b] :] = label
        x.label_windows[b, p.target_lengths[b] :] = window, INT_MIN
    for b, changes in zip(FAULTY, faults, strict=True):
        for name, index, value in changes:
            getattr(x, name)[b : b + 1][0, ...][index] = value
    return x


def larger(x):
    """The same sequences in larger arrays, with garbage in the rest."""
    frames, labels = LARGER
    more = [(0, 0), (0, labels - U)]
    return x._replace(
        logits=np.pad(x.logits, [(0, 0), (0, frames - T), more[1], (0, 0)], constant_values=np.nan),
        targets=np.pad(x.targets, more, constant_values=-7),
        label_windows=np.pad(x.label_windows, [*more, (0, 0)], constant_values=3),
    )


# By name, a layout of a batch; and the arrays [T, ...] or [U + 1, ...] of which a sequence reads its nodes [T, U + 1].
LAYOUTS = {
    "array": (lambda x: x.logits, lambda inside: [inside]),
    "JointLogits": (lambda x: family.in_tiles(x.logits, 64), lambda inside: [inside.any(1)]),
    "PackedLogits": (lambda x: PackedLogits(batches.packed(x, x.logits), x.logits.shape[1]), lambda inside: [inside]),
    "BandLogits": (
        lambda x: layout_table.layout(x, "BandLogits")(x.logits),
        lambda inside: [inside[:, : layout_table.WIDTH]],
    ),
    "AdditiveLogits": (
        lambda x: AdditiveLogits(x.logits[:, :, 0], x.logits[:, 0]),
        lambda inside: [inside.any(1), inside.any(0)],
    ),
}
INEXACT = "JointLogits", "AdditiveLogits"  # padding and batch decide how matrix products and tiles round
GRADIENTS = "gradient", "learned gradient"
OPTIONS = {"clamp": 0.25, "fastemit_lambda": 0.5, "delay_penalty": 0.125, "sigma": 0.0625}


def learned(loss, name):
    """All numbers of the loss, the options switched on."""
    value = loss.value()
    numbers = {f.name: x for f in dataclasses.fields(value) if type(x := getattr(value, f.name)) is float}
    without = {"omega", "clamp"} if name == "AdditiveLogits" else {"omega"}  # a coin; no logits to clip
    return {key: np.float32(OPTIONS.get(key, x)) for key, x in numbers.items() if key not in without}


# They depend on arcs alone, so one loss stands for all.
OF_ARCS = "label_log_probs", "label_frames", "latency", "align"


def answers(loss, methods, **static):
    """A function whose results have a row for each sequence, but for "leaves".

    It takes the learned numbers, logits, the rest of the batch, and the weight of each sequence in the gradients.
    """

    def run(leaves, logits, rest, weights):
        *rest, windows = rest
        value = loss.value(reduction="none", **static)

        def call(leaves, logits):
            return dataclasses.replace(value, **leaves)(logits, *rest, label_windows=windows)

        out = {}
        out["loss"], pull = jax.vjp(lambda logits: call({}, logits), logits)
        weights = weights.astype(out["loss"].dtype)
        out["gradient"] = pull(weights)[0]
        out["learned loss"], pull = jax.vjp(call, leaves, logits)
        out["leaves"], out["learned gradient"] = pull(weights)
        for name in methods:
            asked = dataclasses.replace(value, implementation=None) if name == "align" else value  # it has no kernel
            out[name] = getattr(asked, name)(logits, *rest, label_windows=windows)
        for key in GRADIENTS:
            out[key] = [g for g in jax.tree.leaves(out[key]) if jnp.issubdtype(g.dtype, jnp.floating)]
        return out

    return run


def by_sequence(out, name, x):
    """NumPy arrays; gradients with a row for each sequence."""
    out = jax.tree.map(np.array, out)
    for key in GRADIENTS:
        if name == "AdditiveLogits":  # whose scales the sequences share, as they do the loss's numbers
            out["leaves"] = [out["leaves"], out[key][2:]]
            out[key] = out[key][:2]
        if name == "PackedLogits":
            packed, inside = out[key][0], batches.inside(x)
            out[key] = [np.zeros((*inside.shape, CLASSES), packed.dtype)]
            out[key][0][inside] = packed[: inside.sum()]
            assert not packed[inside.sum() :].any()
        if name == "JointLogits":
            out[key] = [out[key][0].reshape(B, x.logits.shape[1], -1, CLASSES)]  # the predictor has no logits
    return out


def rows(out, index):
    return {key: jax.tree.map(lambda x: x[index], value) for key, value in out.items() if key != "leaves"}


def assert_equal(got, expected, exact):
    """Rows of the same sequences; the first may be those of larger arrays, with nothing in the rest."""
    for key in expected:
        for x, y in zip(*map(jax.tree.leaves, (got[key], expected[key])), strict=True):
            more = [(0, n - m) for n, m in zip(x.shape, y.shape, strict=True)]
            y = np.pad(y, more, constant_values=-1 if x.dtype == np.int32 else 0)  # frames of no label
            if exact:
                x, y = (np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}") for x in (x, y))
            np.testing.assert_allclose(x, y, **({"rtol": 0} if exact else {"rtol": 2e-6, "atol": 2e-6}), err_msg=key)


def of_good(of_faulty):
    """Weights of the sequences in gradients: 1 for GOOD ones."""
    weights = np.ones(B, np.float32)
    weights[FAULTY] = of_faulty
    return weights


def check_good_sequences(of_clean, of_faulty, exact):
    """Equal sequences have equal results, whatever lies behind, beside and before them; faulty ones add nothing.

    In `of_clean` the sequences between them have weight 0; in `of_faulty` all those whose loss is finite have.
    """
    assert not any(g[FAULTY].any() for key in GRADIENTS for g in of_clean[key])
    compare.assert_close(of_faulty["leaves"], of_clean["leaves"], 1e-5)
    found = rows(of_clean, GOOD)
    for i in range(4):
        for j in range(i + 4, len(GOOD), 4):
            assert_equal(rows(found, slice(j, j + 1)), rows(found, slice(i, i + 1)), exact)
    assert_equal(rows(of_faulty, GOOD), found, exact)


def answers_to_faults(loss, x):
    """Losses in float64, where +inf counts as NaN."""
    p = batches.Problem(*(y[FAULTY] for y in x[:4]))
    p = p._replace(logits=np.where(np.isposinf(p.logits), np.nan, p.logits))
    return loss.expected(p, label_windows=x.label_windows[FAULTY])[0]


def check_faults(wanted, x, out, seen, read, close=True):
    """Loss NaN or inf as wanted; gradients exactly 0 outside the lengths, and NaN only for the sake of logits."""
    for i, (name, changes) in enumerate(FAULTS.items()):
        if not seen[i]:
            continue
        row, answer = rows(out, FAULTY[i]), wanted[i]
        of_logits = np.isnan(answer) and {field for field, *_ in changes} == {"logits"}
        if np.isfinite(answer):
            assert not close or abs(row["loss"] - answer) < 1e-5 * abs(answer), name
        else:
            np.testing.assert_array_equal([row["loss"], row["learned loss"]], answer, err_msg=name)
        for key in GRADIENTS:
            for g, used in zip(row[key], read(batches.inside(x)[FAULTY[i]]), strict=True):
                assert not g[~used].any(), (key, name)
                assert np.isfinite(answer) or of_logits or not g.any(), (key, name)
            assert of_logits == any(np.isnan(g).any() for g in row[key]), (key, name)
        if np.isfinite(answer):
            continue
        bad = np.isnan(answer)
        for key in ("posteriors", "label_frames", "latency"):
            for y in jax.tree.leaves(row.get(key)):
                np.testing.assert_array_equal(y, np.nan if bad else 0, err_msg=f"{key}, {name}")
        if "align" in row:
            assert not bad or np.isnan(row["label_log_probs"]).all(), name
            np.testing.assert_array_equal(row["align"].score, np.nan if bad else -np.inf, err_msg=name)
            np.testing.assert_array_equal(row["align"].frames, -1, err_msg=name)


# Loss, layout, implementation, whether XLA optimises the programs: it then also splits sums.
CASES = [(loss, "array", "kernel", False) for loss in (*family.LOSSES, LOG_PROBS)]
# A band moves columns, which a step of the constrained loss reads; a placement of rows does not know their heads.
CASES += [(loss, "BandLogits", "kernel", False) for loss in (family.TDT, family.CONSTRAINED)]
CASES += [(family.TDT, name, "kernel", False) for name in ("PackedLogits", "JointLogits")]
CASES += [(family.RNNT, "AdditiveLogits", "kernel", False), (family.RNNT, "array", "kernel", True)]
CASES += [(family.RNNT, "array", "reference", False)]
QUICK = [f"{x}-kernel-False" for x in ("rnnt-array", "tdt-array", "tdt-BandLogits", "constrained-BandLogits")]


def of_any_size(run, *arguments):
    """The program of an array of logits, exported for any number of sequences, frames and labels."""
    b, t, u = export.symbolic_shape("b, t, u")
    names = {B: b, LARGER[0]: t, LARGER[1]: u, LARGER[1] + 1: u + 1}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct([names.get(n, n) for n in x.shape], x.dtype), arguments)
    return export.export(jax.jit(run), disabled_checks=jax_rnnt.export_checks())(*like).call


OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize(("loss", "name", "implementation", "optimized"), CASES, ids=str, indirect=["implementation"])
def test_every_loss_and_layout(loss, name, implementation, optimized):
    layout, read = LAYOUTS[name]
    methods = ("posteriors", *(OF_ARCS if loss is family.RNNT else ()))
    methods = methods if (name, implementation, optimized) == ("array", "kernel", False) else ()
    run = answers(loss, methods, implementation=None if name == "AdditiveLogits" else implementation)
    leaves, exact = learned(loss, name), name not in INEXACT
    faults = FAULTS
    if name == "PackedLogits":  # whose sequences lie where the lengths say
        faults = {k: [] if any("lengths" in field for field, *_ in x) else x for k, x in FAULTS.items()}
    clean, faulty = (batch(loss, x) for x in ([[]] * len(FAULTS), faults.values()))
    wanted = answers_to_faults(loss, faulty)
    parts = [(x if name == "PackedLogits" else (layout(x), x[1:])) for x in (clean, faulty)]
    differ = [
        np.any(~np.isclose(x, y, 0, 0, equal_nan=True).reshape(B, -1), 1)[FAULTY]
        for x, y in zip(*map(jax.tree.leaves, parts), strict=True)
        if np.ndim(x)
    ]
    seen = np.any(differ, 0)  # which faults the layout has

    jit = functools.partial(jax.jit, compiler_options=OPTIMIZED if optimized else None)
    x, weights = larger(clean), (of_good(0), of_good(seen & ~np.isfinite(wanted)))
    arguments = leaves, layout(x), x[1:], weights[0]
    if name == "array" and not optimized and not platforms.interpreted():
        run = of_any_size(run, *arguments)
    run = jit(run)
    found = [by_sequence(run(leaves, layout(x), x[1:], w), name, x) for x, w in zip((clean, faulty), weights)]
    check_good_sequences(*found, exact)
    check_faults(wanted, faulty, found[1], seen, read, close=name != "AdditiveLogits")
    in_larger = by_sequence(run(*arguments), name, x)
    assert_equal(rows(in_larger, GOOD), rows(found[0], GOOD), exact)


# Frames and labels more than there are: the elements that fill no vector of the processor are others.
PADDINGS = (27, 0), (11, 0), (0, 5), (3, 2)


def draws(loss):
    """16 sequences at each of five scales of the logits."""
    for seed, scale in enumerate((0.1, 1.0, 3.0, 10.0, 30.0)):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(20, 38, 16), rng.integers(0, 4, 16)
        options = {"loss": loss, "dtype": np.float32, "seed": seed, "scale": scale, "lengths": lengths}
        yield batches.problem(16, 37, 3, 11 - loss.extra_classes, **options)


def padded(p, frames, labels):
    logits = np.pad(p.logits, [(0, 0), (0, frames), (0, labels), (0, 0)], constant_values=np.nan)
    return p._replace(logits=logits, targets=np.pad(p.targets, [(0, 0), (0, labels)], constant_values=-7))


def assert_same_after_padding(run, p, paddings):
    expected = jax.tree.map(np.asarray, run(p))
    for more in paddings:
        cut = jax.tree.map(lambda x, y: np.asarray(x)[tuple(map(slice, y.shape))], run(padded(p, *more)), expected)
        compare.assert_same_bits(cut, expected)


@pytest.mark.parametrize("loss", door.LOSSES, ids=str)
def test_padding_of_many_draws(loss, native_kernel):
    """Value, posteriors and gradient of the kernels have the same bits, in another order of the batch too."""
    if not door.native():
        pytest.skip("the door leads to the kernels of the CPU platform")
    for p in draws(loss):
        assert_same_after_padding(lambda p: door.run(loss, p, clamp=0.5, scale=3.0), p, PADDINGS)
        compare.assert_same_bits(door.run(loss, p.take(slice(None, None, -1)))[0][::-1], door.run(loss, p)[0])


@pytest.mark.slow
@pytest.mark.parametrize("loss", family.SKIPPING, ids=str)
def test_padding_of_many_draws_of_skips(loss, kernel):
    """Value and gradient by steps that XLA compiles, optimised. Posteriors are of the same steps."""

    one = lambda p: compare.with_gradient(loss.value(reduction="none"))(*p)
    pairs = lambda p: jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), p)
    several = jax.jit(lambda p: jax.lax.map(one, pairs(p)), compiler_options=OPTIMIZED)
    run = lambda p: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), several(p))
    every = jax.tree.map(lambda *x: np.concatenate(x), *draws(loss))
    assert_same_after_padding(run, every, [(27, 5)])


SPLIT = {family.RNNT: "auto", family.TDT: "explicit", family.CONSTRAINED: "auto", family.WILDCARD: "explicit"}


@SET_MESH
@pytest.mark.parametrize(("loss", "kind"), SPLIT.items(), ids=str)
def test_split_over_devices(loss, kind, kernel, devices):
    """Classes over two devices and frames over four: values and gradients in float64, a learned number's too."""
    axes = {"vocab_axis": "model", "frame_axis": "seq"}
    run, leaves = answers(loss, (), implementation=kernel, **axes), learned(loss, "array")
    clean, faulty = (batch(loss, x) for x in ([[]] * len(FAULTS), FAULTS.values()))
    wanted = answers_to_faults(loss, faulty)
    with mesh_of(devices, kind, (4, 2), ("seq", "model"), is_set=True):
        at_once, weights = jax.jit(run), (of_good(0), of_good(~np.isfinite(wanted)))
        found = [by_sequence(at_once(leaves, x.logits, x[1:], w), "", x) for x, w in zip((clean, faulty), weights)]
    check_good_sequences(*found, exact=True)
    check_faults(wanted, faulty, found[1], [True] * len(FAULTS), LAYOUTS["array"][1])
    options = {key: float(x) for key, x in leaves.items() if key in OPTIONS}
    good = [y[GOOD] for y in clean]

    def expected(**changed):
        return loss.expected(batches.Problem(*good[:4]), label_windows=good[4], **options | changed)

    values, gradient = expected()
    np.testing.assert_allclose(found[1]["learned loss"][GOOD], values, rtol=1e-5)
    np.testing.assert_allclose(found[1]["learned gradient"][0][GOOD], gradient, atol=1e-5)
    ends = [expected(delay_penalty=options["delay_penalty"] + h)[0].sum() for h in (1e-4, -1e-4)]
    slope = (ends[0] - ends[1]) / 2e-4 * (1 + options["fastemit_lambda"])  # it acts on labels alone
    np.testing.assert_allclose(found[1]["leaves"]["delay_penalty"], slope, rtol=1e-4)
