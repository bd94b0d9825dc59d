"""Are answers right for masks of any finite size, common offsets and all magnitudes?

One batch has all inputs ("feeds"), so that each loss compiles one program. The truth sums Python fractions along paths
(`truth.solve`), so a mask of -1e30 hides nothing from it.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import lattices
from test_packed import packed

T, U, V = 4, 2, 6
SIZE = 208  # sequences of a batch
TARGETS = (1, 0)  # class 2 is neither a label nor a blank, 3 and 4 are the big blanks
INF = math.inf


def lowest(dtype):
    return float(jnp.finfo(dtype).min)


MASKS = {
    "float32": (-1e5, -3e6, -1e9, -1e10, -1e15, -1e30, lowest(np.float32)),
    "float16": (-6e4, lowest(np.float16)),
    "bfloat16": (-1e9, lowest(jnp.bfloat16)),
    "float64": (-1e9, -1e30, -1e300, lowest(np.float64)),
}

# Masks by name, each a selection of the logits [T, U1, V + durations].
ONE_PATH = ((0, 0, -1), (1, 0, TARGETS[0]), (1, 1, TARGETS[1]), (1, 2, -1), (2, 2, -1), (3, 2, -1))  # t, u, class
FEEDS = {
    "class without a label": np.s_[..., 2],
    "class of a label": np.s_[..., TARGETS[0]],
    "labels of a frame": np.s_[0, :, : V - 1],
    "blanks of a frame": np.s_[1, :, V - 1],
    "all labels": np.s_[..., : V - 1],
    "all blanks": np.s_[..., V - 1],
    "run of arcs": np.s_[0:3, 0:2, :2],
    "one arc": np.s_[1, 1, TARGETS[1]],
    "all of a frame": np.s_[1],
    "everything": np.s_[...],
    "all but one path": np.s_[..., :V],
    "one duration": np.s_[..., V : V + 1],
    "random": np.random.default_rng(0).random((T, U + 1, V)) < 0.4,
}


def fed(logits, name, value):
    """The logits with `value` at the places of this mask."""
    out = logits.copy()
    where = FEEDS[name]
    if isinstance(where, np.ndarray):
        out[..., :V][where] = value
    else:
        out[where] = value
    if name == "all but one path":
        for t, u, k in ONE_PATH:
            out[t, u, k % V] = logits[t, u, k % V]
    return out


def bases(loss, dtype):
    """(name, logits, T_b): equal logits, with exact ties, and normal logits of a shorter sequence."""
    shape = T, U + 1, V + loss.extra_classes
    yield "equal", np.zeros(shape, dtype), T
    yield "normal", np.random.default_rng(0).normal(0, 2, shape).astype(dtype), T - 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One sequence of a batch and its answer. `slack` bounds the effect of float32 arcs on posteriors."""

    name: str
    logits: np.ndarray  # [T, U1, V]
    frames: int
    solution: truth.Solution
    slack: float
    twin: int | None = None  # the row with -inf for the mask, if the answers must be the same


def slack(solution, eps):
    """Bound on the change of posteriors by rounding arcs to eps; 0 if one path is far ahead of all others."""
    if solution.value == -INF:
        return 0.0
    arcs = {slot: np.abs(truth.as_float(x)) for slot, x in solution.arcs.items()}
    with np.errstate(over="ignore"):
        sizes = [sum(arcs[slot][t, u] for slot, t, u in path) for path in solution.paths]
    scores, best = solution.scores, max(solution.scores)
    size = sizes[scores.index(best)]
    with np.errstate(over="ignore"):
        near = [s for s, score in zip(sizes, scores) if best - score < 40 + 4 * eps * (s + size)]
        return 0.0 if len(near) == 1 else 4 * eps * (size + max(near))


def rounding_is_harmless(solution, dtype):
    """Whether rounding arcs to `dtype` keeps the shares of the paths, as it does for equal logits and equal masks."""
    with np.errstate(over="ignore"):
        arcs = {slot: truth.fractions_of(truth.as_float(x).astype(dtype)) for slot, x in solution.arcs.items()}
    scores = [sum(arcs[slot][t, u] for slot, t, u in path) for path in solution.paths]
    best = max(scores, default=-INF)
    if best == -INF:
        return False
    shares = np.array([math.exp(max(x - best, -1000)) for x in scores])
    exact = np.array([math.exp(max(x - max(solution.scores), -1000)) for x in solution.scores])
    return bool(np.abs(shares / shares.sum() - exact / exact.sum()).max() < 1e-7)


def working(dtype):
    """The dtype of sums."""
    return np.float64 if dtype == "float64" else np.float32


def row_of(loss, dtype, name, logits, frames, **options):
    inside = logits[:frames].astype(np.float64)
    solution = truth.solve(inside, np.array(TARGETS), **loss.truth, **options)
    return Row(name, logits, frames, solution, slack(solution, losses.eps(working(dtype))))


@functools.cache
def table(loss, dtype="float32", fused=True):
    """All rows: each mask at each size on each base, and the twins with -inf."""
    rows = []
    for base, logits, frames in bases(loss, jnp.dtype(dtype)):
        if not fused:
            heads = [truth.log_softmax(x.astype(np.float64)) for x in losses.heads(loss, logits)]
            log_probs = np.concatenate(heads, -1)  # HAT takes blanks and labels as they are
            logits = (log_probs if log_probs.shape == logits.shape else logits).astype(jnp.dtype(dtype))
        for name in FEEDS:
            if name == "one duration" and not loss.extra_classes:
                continue
            make = lambda m: row_of(
                loss, dtype, f"{name} at {m:g}, {base}", fed(logits, name, m), frames, fused_log_softmax=fused
            )
            twin, index = make(-INF), len(rows)
            rows.append(twin)
            for value in MASKS[dtype]:
                row = make(value)
                if base == "equal" and rounding_is_harmless(row.solution, working(dtype)):
                    row = dataclasses.replace(row, slack=0.0)
                same = abs(row.solution.loss - twin.solution.loss) < 1e-12
                if same and np.allclose(row.solution.gradient, twin.solution.gradient, rtol=0, atol=1e-14):
                    row = dataclasses.replace(row, twin=index)
                rows.append(row)
    return tuple(rows)


def problem_of(rows, size=SIZE):
    """The batch, NaN outside the lengths. Rows are repeated up to `size`, so that all tables run the same program."""
    rows = [rows[i % len(rows)] for i in range(max(size, len(rows)))]
    frames, size = np.array([row.frames for row in rows], np.int32), len(rows)
    logits = np.stack([row.logits for row in rows])
    p = losses.Problem(logits, np.tile(np.array(TARGETS, np.int32), (size, 1)), frames, np.full(size, U, np.int32))
    return losses.poisoned(p)


def none_of(failures):
    failures = list(failures)
    assert not failures, f"{len(failures)} rows:\n" + "\n".join(failures[:25])


def far(got, expected, limit):
    """Whether some element is beyond the limit; NaN always is."""
    return not (np.abs(np.asarray(got, np.float64) - expected) <= limit).all()


def possible(row, dtype):
    """Whether the loss is finite in its dtype."""
    return row.solution.value != -INF and abs(row.solution.loss) <= float(jnp.finfo(working(dtype)).max)


def value_failures(rows, values, dtype, relative=1e-6):
    relative = 1e-12 if dtype == "float64" else relative
    for row, value in zip(rows, np.asarray(values)):
        expected, limit = row.solution.loss, losses.tolerance(working(dtype), T + U)
        if not possible(row, dtype):
            if value != INF:
                yield f"{row.name}: loss {value}, expected inf"
        elif far(value, expected, limit + relative * abs(expected)):
            yield f"{row.name}: loss {value}, expected {expected}"


def gradient_failures(loss, rows, gradients, dtype, fused=True):
    """Gradients must be finite, right, 0 outside the lengths and without a path, and sum to 0 over each softmax."""
    narrow = jnp.dtype(dtype).itemsize == 2
    rounding, smallest = (losses.eps(dtype) / 2, 2.0**-24) if narrow else (0, 0)
    for row, gradient in zip(rows, np.asarray(gradients)):
        gradient = gradient.astype(np.float64)
        if not np.isfinite(gradient).all():
            yield f"{row.name}: gradient is not finite"
            continue
        if gradient[row.frames :].any() or (not possible(row, dtype) and gradient.any()):
            yield f"{row.name}: gradient {np.abs(gradient).max()} where it is zero"
            continue
        for head in losses.heads(loss, gradient) if fused else ():
            if far(head.sum(-1), 0, 1e-4 + 8 * rounding):
                yield f"{row.name}: gradients of a softmax add up to {np.abs(head.sum(-1)).max()}"
        if possible(row, dtype) and row.slack < 1e-2:
            expected = row.solution.gradient
            limit = losses.tolerance(working(dtype), T + U) + row.slack + smallest
            if far(gradient[: row.frames], expected, limit + rounding * np.abs(expected)):
                error = np.abs(gradient[: row.frames] - expected).max()
                yield f"{row.name}: gradient off by {error:.2g} (slack {row.slack:.2g})"


def twin_failures(rows, *results):
    """Twins have equal numbers, not bits: a zero may have either sign."""
    for i, row in enumerate(rows):
        for x in map(np.asarray, results):
            if row.twin is not None and not np.array_equal(x[i], x[row.twin], equal_nan=True):
                yield f"{row.name}: {x[i].ravel()[:4]}... is not {x[row.twin].ravel()[:4]}... of a mask of -inf"


def all_failures(loss, rows, got, dtype, implementation, fused=True):
    yield from value_failures(rows, got[0], dtype)
    yield from gradient_failures(loss, rows, got[1], dtype, fused)
    if implementation == "kernel":
        yield from twin_failures(rows, *got)


# ------------------------------------------------------------------------------------------------------------- masks


def test_the_usual_mask(implementation):
    """The mask is on all labels of frame 0, or on all labels: numbers by hand."""
    logits = np.zeros((3, 3, 4), np.float32)
    rest = np.array([[1, 2]], np.int32), np.array([3], np.int32), np.array([2], np.int32)
    for mask in (*MASKS["float32"], -(2.0**21), -INF):  # 2^21 is the largest size for the kernels' sweeps
        first, everywhere = logits.copy(), logits.copy()
        first[0, :, 1:] = everywhere[..., 1:] = mask
        p = losses.Problem(np.stack([first, everywhere]), *(np.concatenate([x, x]) for x in rest))
        values, _ = losses.evaluate(losses.RNNT, p, implementation, blank=0)
        # Two labels fit into two frames in 3 ways, into three in 6; with equal logits an arc costs log 4.
        np.testing.assert_allclose(values[0], 4 * math.log(4) - math.log(3), rtol=1e-6, err_msg=f"{mask}")
        expected = -2 * mask - math.log(6)
        expected = expected if expected <= float(np.finfo(np.float32).max) else INF
        np.testing.assert_allclose(values[1], expected, rtol=1e-6, err_msg=f"{mask}")


@pytest.mark.family("reference")
def test_masks(loss, implementation):
    rows = table(loss)
    got = losses.evaluate(loss, problem_of(rows), implementation)
    none_of(all_failures(loss, rows, got, "float32", implementation))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_masks_of_other_dtypes(loss, implementation, dtype):
    rows = table(loss, dtype)
    got = losses.evaluate(loss, problem_of(rows), implementation)
    none_of(all_failures(loss, rows, got, dtype, implementation))


@pytest.mark.family
def test_masked_log_probabilities(loss, implementation):
    rows = table(loss, fused=False)
    got = losses.evaluate(loss, problem_of(rows), implementation, fused_log_softmax=False)
    none_of(all_failures(loss, rows, got, "float32", implementation, fused=False))


def test_what_is_beyond_float32(loss, implementation):
    """Two masks of finfo.min on every path: +inf and a gradient of exactly zero."""
    logits = np.zeros((1, T, U + 1, V), np.float32)
    logits[..., : V - 1] = lowest(np.float32)
    p = problem_of([Row("", logits[0], T, None, 0)])
    values, gradient = losses.evaluate(loss, p, implementation)
    assert (values == INF).all() and not gradient.any()


# --------------------------------------------------------------------------------------------- questions to the lattice


def kinds(solution):
    """(blank, label) posteriors [T, U1]."""
    return [
        sum((x for slot, x in solution.posteriors.items() if slot.startswith(kind)), np.zeros(()))
        for kind in ("blank", "label")
    ]


@functools.cache
def question(function, loss, implementation):
    """A compiled function of a batch; the loss and its options are bound."""
    return jax.jit(functools.partial(getattr(jax_rnnt, function), loss=loss.value(implementation=implementation)))


@pytest.mark.family
def test_posteriors_of_masks(loss, implementation):
    """Posteriors lie in [0, 1], sum to one emission per label, and are those of the truth."""
    rows = table(loss)
    got = question("rnnt_posteriors", loss, implementation)(*problem_of(rows))
    blank, label = (np.asarray(x) for x in got)

    def failures():
        for b, row in enumerate(rows):
            both = np.stack([blank[b], label[b]])
            if not (np.isfinite(both).all() and both.min() >= -1e-6 and both.max() <= 1 + 1e-5):
                yield f"{row.name}: posteriors in [{both.min()}, {both.max()}]"
            elif both[:, row.frames :].any():
                yield f"{row.name}: posteriors outside the lengths"
            elif possible(row, "float32"):
                if far(label[b, :, :U].sum(0), 1, 1e-5):
                    yield f"{row.name}: labels are emitted {label[b, :, :U].sum(0)} times"
                expected = np.stack(kinds(row.solution))
                if row.slack < 1e-2 and far(both[:, : row.frames], expected, 1e-5 + row.slack):
                    yield f"{row.name}: posteriors off by {np.abs(both[:, : row.frames] - expected).max()}"
            elif both.any():
                yield f"{row.name}: posteriors without a path"
        if implementation == "kernel":
            yield from twin_failures(rows, blank, label)

    none_of(failures())


BOTH = pytest.mark.parametrize("variant", [losses.RNNT, losses.TDT], ids=["rnnt", "tdt"])


@BOTH
def test_alignments_of_masks(variant):
    """The score is that of the best path, and the frames are those of a path with that score."""
    rows = table(variant)
    scores, frames = map(np.asarray, question("rnnt_align", variant, None)(*problem_of(rows)))

    def failures():
        for row, score, where in zip(rows, scores, frames):
            if not possible(row, "float32"):
                continue
            best = max(row.solution.scores)
            limit = 1e-5 + 1e-6 * abs(float(best))
            same = [
                x
                for path, x in zip(row.solution.paths, row.solution.scores)
                if [t for slot, t, _ in path if truth.is_label(slot)] == where.tolist()
            ]
            if far(score, float(best), limit):
                yield f"{row.name}: score {score}, expected {float(best)}"
            if not same or best - max(same) > limit:
                yield f"{row.name}: frames {where} are not those of a best path"

    none_of(failures())


@BOTH
def test_expected_frames_of_masks(variant, implementation):
    rows = table(variant)
    got = np.asarray(question("expected_emission_frames", variant, implementation)(*problem_of(rows)))

    def failures():
        for row, frames in zip(rows, got):
            expected = (np.arange(row.frames)[:, None] * kinds(row.solution)[1]).sum(0)[:U]
            if not (np.isfinite(frames).all() and frames.min() >= -1e-5 and frames.max() <= row.frames - 1 + 1e-4):
                yield f"{row.name}: frames {frames}"
            elif possible(row, "float32") and row.slack < 1e-2 and far(frames, expected, T * (2e-5 + row.slack)):
                yield f"{row.name}: frames {frames}, expected {expected}"

    none_of(failures())


COSTLY = ("class without a label", "labels of a frame", "run of arcs")


def costly(loss):
    """Rows with the masks -inf, -1e9 and finfo.min, which must all give the same answers."""
    names = [f"{name} at {m:g}" for name in COSTLY for m in (-INF, -1e9, lowest(np.float32))]
    rows = [row for row in table(loss) if row.name.split(",")[0] in names]
    ids = [table(loss).index(row) if row.twin is None else row.twin for row in rows]
    return rows, ids


def assert_twins(rows, ids, *results):
    """Rows of one mask and one base have equal, finite results."""
    results = [np.asarray(x) for x in results]
    for i, row in enumerate(rows):
        twin = ids.index(ids[i])
        for x in results:
            assert np.isfinite(x[i]).all(), row.name
            np.testing.assert_allclose(x[i], x[twin], rtol=1e-5, atol=2e-5, err_msg=row.name)
    assert all(x.any() for x in results)


@BOTH
def test_latency_of_masks(variant, implementation):
    """Value and gradient are those of a mask of -inf."""
    rows, ids = costly(variant)
    p = problem_of(rows, 0)
    call = lambda x: jax_rnnt.minimum_latency(
        x, *p[1:], loss=variant.value(reduction="none", implementation=implementation)
    )

    @jax.jit
    def run(x):
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    assert_twins(rows, ids, *run(p.logits))


@BOTH
def test_second_derivatives_of_masks(variant):
    """Hessian-vector products, forward over reverse, are those of a mask of -inf."""
    rows, ids = costly(variant)
    p = problem_of(rows, 0)
    call = lambda x: variant(x, *p[1:], reduction="sum", implementation="reference")
    direction = np.random.default_rng(1).normal(size=p.logits.shape[1:]).astype(np.float32)
    direction = np.broadcast_to(direction, p.logits.shape)
    _, product = jax.jit(lambda x, v: jax.jvp(jax.grad(call), (x,), (v,)))(p.logits, direction)
    assert_twins(rows, ids, np.where(np.isneginf(p.logits), 0, product))


def test_masked_arcs(implementation):
    """`lattices.log_likelihood` and its posteriors with arcs of any size, huge ones included."""
    rng = np.random.default_rng(0)
    planes, expected = [], []
    for size in (1e5, 3e6, 1e9, 1e15, 1e30, 1e37):
        for signs in ([-1], [1], [-1, 1]):
            arcs = {slot: rng.normal(-1, 1, (T, U + 1)).astype(np.float32) for slot in ("blank", "label")}
            for x in arcs.values():
                x[:] = np.where(rng.random(x.shape) < 0.5, rng.choice(signs, x.shape) * np.float32(size), x)
            planes.append(arcs)
            exact = {slot: truth.fractions_of(x) for slot, x in arcs.items()}
            scores = [
                sum(exact[slot][t, u] for slot, t, u in path) for path in truth.enumerate_paths(truth.STANDARD, T, U)
            ]
            best = max(scores)
            shares = np.array([math.exp(max(x - best, -1000)) for x in scores])
            posteriors = {slot: np.zeros((T, U + 1)) for slot in arcs}
            for path, share in zip(truth.enumerate_paths(truth.STANDARD, T, U), shares / shares.sum()):
                for slot, t, u in path:
                    posteriors[slot][t, u] += share
            expected.append((float(best) + math.log(shares.sum()), posteriors))
    batch = {slot: np.stack([x[slot] for x in planes]) for slot in ("blank", "label")}
    lengths = np.full(len(planes), T, np.int32), np.full(len(planes), U, np.int32)

    @jax.jit
    def run(arcs):
        call = lambda arcs: lattices.log_likelihood(lattices.STANDARD, arcs, *lengths, implementation)
        values, pull = jax.vjp(call, arcs)
        return values, pull(jnp.ones_like(values))[0]

    values, gradient = run(batch)
    for b, (value, posteriors) in enumerate(expected):
        np.testing.assert_allclose(values[b], value, rtol=1e-6, atol=1e-5)
        for slot, x in posteriors.items():
            # Only float64 sums of 3e6 are right to 1 in 2^31, although the arcs themselves are exact.
            np.testing.assert_allclose(gradient[slot][b], x, atol=1e-5, err_msg=f"{b}")


# ----------------------------------------------------------------------------------------------- other ways to the loss


def gather(encoder, predictor):
    """A joint that looks up: the encoder row holds the logits of all columns, the predictor row the column."""
    rows = encoder.reshape(len(encoder), U + 1, -1)
    hit = predictor == jnp.arange(U + 1, dtype=predictor.dtype)[None]
    return jnp.sum(jnp.where(hit[..., None], rows, 0), -2)


@BOTH
def test_masks_in_tiles(kernel, variant):
    """`joint_rnnt_loss` with a joint that looks up the same logits."""
    rows = table(variant)
    p = problem_of(rows)
    columns = np.broadcast_to(np.arange(U + 1, dtype=np.float32)[:, None], (len(p.targets), U + 1, 1))

    @jax.jit
    def run(x):
        call = lambda e: jax_rnnt.joint_rnnt_loss(
            gather, e, columns, *p[1:], loss=variant.value(reduction="none", implementation=kernel), chunk=512
        )
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    values, gradient = run(p.logits.reshape(*p.logits.shape[:2], -1))
    gradient = np.asarray(gradient).reshape(p.logits.shape)
    none_of(all_failures(variant, rows, (values, gradient), "float32", "reference"))


def test_masked_bias():
    """A class that the bias of a `LinearJoint` forbids does not matter: the other weights get the same gradient."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, T, 3)).astype(np.float32), rng.normal(size=(2, U + 1, 3)).astype(np.float32)
    weight = rng.normal(size=(3, V)).astype(np.float32)
    rest = problem_of([Row("", np.zeros((T, U + 1, V)), T, None, 0)], 2)[1:]

    @jax.jit
    def run(weight, bias):
        call = lambda w: jax_rnnt.joint_rnnt_loss(jax_rnnt.LinearJoint(w, bias), *rows, *rest)
        return jax.value_and_grad(call)(weight)

    others = np.arange(V) != 2  # targets are below 2, so they keep their numbers
    expected, wanted = run(weight[:, others], np.zeros(V - 1, np.float32))
    for mask in (-1e9, lowest(np.float32), -INF):
        bias = np.where(others, 0, mask).astype(np.float32)
        value, gradient = run(weight, bias)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(gradient[:, others], wanted, atol=1e-5)
        assert not np.asarray(gradient)[:, 2].any()


def test_masks_in_a_band(implementation):
    """`pruned_rnnt_loss` over all columns."""
    rows = table(losses.RNNT)
    p = problem_of(rows)
    first = np.zeros((len(p.targets), T), np.int32)

    @jax.jit
    def run(x):
        call = lambda x: jax_rnnt.pruned_rnnt_loss(x, first, *p[1:], reduction="none", implementation=implementation)
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    none_of(all_failures(losses.RNNT, rows, run(p.logits), "float32", implementation))


def test_masks_in_packed_rows(implementation):
    rows = table(losses.RNNT)
    p = problem_of(rows)

    @jax.jit
    def run(x):
        call = lambda x: jax_rnnt.rnnt_loss_packed(
            x, *p[1:], reduction="none", max_frames=T, implementation=implementation
        )
        values, pull = jax.vjp(call, x)
        return values, pull(jnp.ones_like(values))[0]

    values, gradient = run(packed(p, p.logits, extra=0))
    whole = np.zeros_like(p.logits)
    whole[losses.inside(p)] = gradient
    none_of(all_failures(losses.RNNT, rows, (values, whole), "float32", implementation))


# ----------------------------------------------------------------------------------------------------------- offsets

# (offsets, parts of one in which the logits are counted): logit + offset is a float32.
OFFSETS = (((1, 30, 1e3, 1e4), 64), ((1e6,), 8))


def heads_of(loss, blank):
    """Selections of classes to shift together: those of one softmax."""
    if loss.extra_classes:
        return {"both": np.s_[:], "tokens": np.s_[:V], "durations": np.s_[V:]}
    if loss.name == "hat":
        return {"labels": [k for k in range(V) if k != blank % V]}
    return {"all": np.s_[:]}


@functools.cache
def shifted(loss, blank, classes=V):
    """(rows, their limits): each row of logits is shifted by plus or minus the offset; the truth is not shifted."""
    rng = np.random.default_rng(0)
    rows, limits = [], []
    for offsets, spacing in OFFSETS:
        shape = T, U + 1, classes + loss.extra_classes
        logits = rng.integers(-2 * spacing, 2 * spacing + 1, shape) / spacing
        plain = row_of(loss, "float32", "", logits, T, blank=blank)
        for offset, (head, where) in itertools.product(offsets, heads_of(loss, blank).items()):
            for kind, sign in (("alike", 1), ("alike", -1), ("by row", rng.choice([-1, 1], (T, U + 1, 1)))):
                moved = logits.copy()
                moved[..., where] += offset * sign
                assert (moved == moved.astype(np.float32)).all()
                name = f"{offset:g} to {head}, {kind}"
                rows.append(dataclasses.replace(plain, name=name, logits=moved.astype(np.float32)))
                limits.append(1e-5 if offset <= 1e3 else 1e-4)
    return rows, limits


def offset_failures(rows, limits, values, gradient):
    for row, limit, value, got in zip(rows, limits, values, gradient):
        expected = row.solution.loss
        if far(value, expected, limit * max(1, abs(expected))):
            yield f"{row.name}: loss off by {value - expected:.2g}"
        if far(got, row.solution.gradient, limit):
            yield f"{row.name}: gradient off by {np.abs(got - row.solution.gradient).max():.2g}"


@pytest.mark.family("reference")
def test_common_offsets(loss, implementation):
    """An offset of all logits of a softmax changes neither loss nor gradient. Rows may have different offsets."""
    rows, limits = shifted(loss, -1)
    none_of(offset_failures(rows, limits, *losses.evaluate(loss, problem_of(rows), implementation)))


@pytest.mark.family
def test_common_offsets_of_the_first_blank(loss, kernel):
    blank = loss.blank(0)
    rows, limits = shifted(loss, blank)
    got = losses.evaluate(loss, problem_of(rows), kernel, blank=blank)
    none_of(offset_failures(rows, limits, *got))


@pytest.mark.parametrize("classes", [70, 300])
def test_common_offsets_of_long_rows(loss, implementation, classes):
    rows, limits = shifted(loss, 0, classes)
    got = losses.evaluate(loss, problem_of(rows), implementation, blank=0)
    none_of(offset_failures(rows, limits, *got))


@pytest.mark.parametrize("classes", [6, 70])
@pytest.mark.parametrize("mask", [-50, -1e9, -INF])
def test_common_offsets_of_masked_blanks(implementation, mask, classes):
    """Rows whose anchor, the blank, is masked: labels must come first in that frame."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-8, 9, (T, U + 1, classes)) / 4
    logits[1, :U, 0] = mask
    rest = np.array([[1, 2]], np.int32), np.array([T], np.int32), np.array([U], np.int32)
    expected = losses.RNNT.expected(losses.Problem(logits[None], *rest), blank=0)
    for offset, limit in ((1e3, 1e-5), (-1e3, 1e-5), (1e4, 1e-4), (-1e4, 1e-4)):
        moved = np.where(logits > -1e3, logits + offset, logits).astype(np.float32)
        values, gradient = losses.evaluate(losses.RNNT, losses.Problem(moved[None], *rest), implementation, blank=0)
        np.testing.assert_allclose(values, expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient, expected[1], atol=limit)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_common_offsets_of_other_dtypes(loss, implementation, dtype):
    """The error scales with the spacing of the dtype. Up to 512, float16 represents quarters exactly."""
    rng = np.random.default_rng(0)
    wide = dtype == "float64"
    rows = []
    for offset in (1e6, -1e9) if wide else (256.0, -256.0):
        logits = rng.integers(-8, 9, (T, U + 1, V)) / 4
        row = row_of(loss, dtype, f"{offset:g}", logits, T)
        assert (logits + offset == (logits + offset).astype(dtype)).all()
        rows.append(dataclasses.replace(row, logits=(logits + offset).astype(dtype)))
    values, gradient = losses.evaluate(loss, problem_of(rows), implementation)
    expected = [np.stack(x) for x in zip(*((row.solution.loss, row.solution.gradient) for row in rows))]
    losses.assert_matches((values[:2], gradient[:2]), expected, dtype, T + U)


@pytest.mark.family("reference")
def test_the_largest_logits(loss, implementation):
    """Equal logits of 3e38, and the largest and lowest of float32, are equal logits."""
    rows = []
    plain = np.zeros((T, U + 1, V + loss.extra_classes), np.float32)
    for value in (3e38, -3e38, lowest(np.float32), -lowest(np.float32)):
        for name, where in heads_of(loss, -1).items():
            row = row_of(loss, "float32", f"{value:g} in {name}", plain, T)
            logits = plain.copy()
            logits[..., where] = value
            rows.append(dataclasses.replace(row, logits=logits))
    got = losses.evaluate(loss, problem_of(rows), implementation)
    none_of(offset_failures(rows, [1e-5] * len(rows), *got))


# --------------------------------------------------------------------------------------------------------- magnitudes

MAGNITUDES = (1e-30, 1e-3, 1.0, 1e2, 1e4, 1e8, 1e15, 1e30, 1e38)


def rounded_normalizer(row, blank):
    """Whether the row keeps a rounded log-sum-exp, since its anchor is nearly impossible."""
    x = row.logits[: row.frames].astype(np.float64)[..., :V]
    second, top = np.moveaxis(np.sort(x, -1)[..., -2:], -1, 0)
    rounded = (top - x[..., blank] > 45) & (top - second < 20)
    return min(float(np.max(np.where(rounded, np.abs(top), 0) * losses.eps(np.float32))), 1.0)


@functools.cache
def scaled(loss, fused):
    rng = np.random.default_rng(0)
    top = np.finfo(np.float32).max
    rows = []
    for magnitude in MAGNITUDES:
        for frames in (T, T - 1, T):
            logits = rng.normal(size=(T, U + 1, V + loss.extra_classes)) * magnitude
            logits = np.clip(logits if fused else -np.abs(logits), -top, top).astype(np.float32)
            row = row_of(loss, "float32", f"{magnitude:g}", logits, frames, fused_log_softmax=fused)
            extra = rounded_normalizer(row, 0 if loss.name == "hat" else V - 1) if fused else 0
            rows.append(dataclasses.replace(row, slack=row.slack + extra))
    return rows


@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
@pytest.mark.family
def test_magnitudes(loss, implementation, fused):
    """The loss is right to 1e-5, or +inf beyond float32. Gradients count if rounding cannot change the best paths."""
    rows = scaled(loss, fused)
    values, gradient = losses.evaluate(loss, problem_of(rows), implementation, fused_log_softmax=fused)
    none_of(
        [*value_failures(rows, values, "float32", 1e-5), *gradient_failures(loss, rows, gradient, "float32", False)]
    )


@pytest.mark.parametrize("magnitude", [1e4, 1e9, 1e30])
def test_scores_that_are_huge(implementation, magnitude):
    """With huge positive log-weights the loss is negative, and the best path has posterior 1."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(8, T, U + 1, V)) * magnitude).astype(np.float32)
    logits[:4] = np.abs(logits[:4])
    rows = [row_of(losses.RNNT, "float32", f"{b}", x, T, fused_log_softmax=False) for b, x in enumerate(logits)]
    got = losses.evaluate(losses.RNNT, problem_of(rows), implementation, fused_log_softmax=False)
    assert all(row.slack == 0 for row in rows) or magnitude == 1e4
    none_of([*value_failures(rows, got[0], "float32"), *gradient_failures(losses.RNNT, rows, got[1], "float32", False)])
