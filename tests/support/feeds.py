"""One batch of inputs ("feeds") with masks of any finite size, and their truth; each loss compiles one program for it.

The truth sums Python fractions along paths (`truth.solve`), so a mask of -1e30 hides nothing from it.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

import batches
import compare
import platforms
import reference_numpy as truth

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
ONE_PATH = ((0, 0, V - 1), (1, 0, TARGETS[0]), (1, 1, TARGETS[1]), *((t, 2, V - 1) for t in (1, 2, 3)))  # t, u, class
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
    (out[..., :V] if name == "random" else out)[where] = value
    if name == "all but one path":
        for node in ONE_PATH:
            out[node] = logits[node]
    return out


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
    """Whether rounding arcs to `dtype` keeps the posteriors, as it does for equal logits and equal masks."""
    with np.errstate(over="ignore"):
        arcs = {slot: truth.fractions_of(truth.as_float(x).astype(dtype)) for slot, x in solution.arcs.items()}
    _, value, posteriors = truth.sum_of_paths(solution.paths, arcs)
    return value != -INF and all(np.allclose(x, solution.posteriors[slot], 0, 1e-7) for slot, x in posteriors.items())


def working(dtype):
    """The dtype of sums."""
    return np.float64 if dtype == "float64" else np.float32


def row_of(loss, dtype, name, logits, frames, **options):
    inside = logits[:frames].astype(np.float64)
    solution = truth.solve(inside, np.array(TARGETS), **loss.truth, **options)
    return Row(name, logits, frames, solution, slack(solution, compare.eps(working(dtype))))


@functools.cache
def table(loss, dtype="float32", fused=True):
    """All rows: each mask at each size, and its twin with -inf, on equal logits, with exact ties, and normal ones."""
    rows, shape = [], (T, U + 1, V + loss.extra_classes)
    normal = np.random.default_rng(0).normal(0, 2, shape)
    for base, logits, frames in (("equal", np.zeros(shape), T), ("normal", normal, T - 1)):
        logits = logits.astype(jnp.dtype(dtype))
        if not fused:
            heads = [truth.log_softmax(x.astype(np.float64)) for x in batches.heads(loss, logits)]
            log_probs = np.concatenate(heads, -1)  # HAT takes blanks and labels as they are
            logits = (log_probs if log_probs.shape == logits.shape else logits).astype(jnp.dtype(dtype))
        for name in FEEDS:
            if name == "one duration" and not loss.extra_classes:
                continue

            def make(mask):
                title = f"{name} at {mask:g}, {base}"
                return row_of(loss, dtype, title, fed(logits, name, mask), frames, fused_log_softmax=fused)

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
    p = batches.Problem(logits, np.tile(np.array(TARGETS, np.int32), (size, 1)), frames, np.full(size, U, np.int32))
    return batches.poisoned(p)


def none_of(failures):
    failures = list(failures)
    assert not failures, f"{len(failures)} rows:\n" + "\n".join(failures[:25])


def far(got, expected, limit):
    """Whether some element is beyond the limit; NaN always is."""
    return not (np.abs(np.asarray(got, np.float64) - expected) <= limit).all()


def possible(row, dtype):
    """Whether the loss is finite in its dtype."""
    return row.solution.value != -INF and abs(row.solution.loss) <= float(jnp.finfo(working(dtype)).max)


def value_failures(rows, values, dtype):
    relative = 1e-12 if dtype == "float64" else 1e-6
    for row, value in zip(rows, np.asarray(values)):
        expected, limit = row.solution.loss, compare.tolerance(working(dtype), T + U)
        if not possible(row, dtype):
            if value != INF:
                yield f"{row.name}: loss {value}, expected inf"
        elif far(value, expected, limit + relative * abs(expected)):
            yield f"{row.name}: loss {value}, expected {expected}"


def gradient_failures(loss, rows, gradients, dtype, fused=True):
    """Gradients must be finite, right, 0 outside the lengths and without a path, and sum to 0 over each softmax."""
    rounding, smallest = compare.rounding(jnp.dtype(dtype))
    for row, gradient in zip(rows, np.asarray(gradients)):
        gradient = gradient.astype(np.float64)
        if not np.isfinite(gradient).all():
            yield f"{row.name}: gradient is not finite"
            continue
        if gradient[row.frames :].any() or (not possible(row, dtype) and gradient.any()):
            yield f"{row.name}: gradient {np.abs(gradient).max()} where it is zero"
            continue
        for head in batches.heads(loss, gradient) if fused else ():
            if far(head.sum(-1), 0, 1e-4 + 8 * rounding):
                yield f"{row.name}: gradients of a softmax add up to {np.abs(head.sum(-1)).max()}"
        if possible(row, dtype) and row.slack < 1e-2:
            expected = row.solution.gradient
            limit = compare.tolerance(working(dtype), T + U) + row.slack + smallest
            if far(gradient[: row.frames], expected, limit + rounding * np.abs(expected)):
                error = np.abs(gradient[: row.frames] - expected).max()
                yield f"{row.name}: gradient off by {error:.2g} (slack {row.slack:.2g})"


def twin_failures(rows, *results):
    """Twins have equal numbers, not bits: a zero may have either sign. CUDA's wide mode may round otherwise."""
    for i, row in enumerate(rows):
        for x in map(np.asarray, results):
            if row.twin is None or np.array_equal(x[i], x[row.twin], equal_nan=True):
                continue
            rounding = 4 * compare.eps(x.dtype) if platforms.cuda_kernels() else 0
            if not np.allclose(x[i], x[row.twin], rtol=rounding, atol=rounding, equal_nan=True):
                yield f"{row.name}: {x[i].ravel()[:4]}... is not {x[row.twin].ravel()[:4]}... of a mask of -inf"


def all_failures(loss, rows, got, dtype, implementation, fused=True):
    yield from value_failures(rows, got[0], dtype)
    yield from gradient_failures(loss, rows, got[1], dtype, fused)
    if implementation == "kernel":
        yield from twin_failures(rows, *got)
