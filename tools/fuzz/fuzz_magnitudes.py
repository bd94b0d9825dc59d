"""Compares every loss on logits of any magnitude with exact sums: python tools/fuzz/fuzz_magnitudes.py --seconds 60

Hypothesis draws a loss, a dtype, options and a batch of problems: magnitudes from 1e-30 to 3e38 per element, class or
frame, masks of any constant on any of these, -inf, offsets. The truth sums Python fractions along all paths
(`reference_numpy.solve`). A failure is repeated with fewer and simpler problems, as long as it stays; the exit status
is then 1.
"""

import collections
import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

import feeds
import jax
import jax.numpy as jnp
import losses
import numpy as np
import reference_numpy as truth
from hypothesis import strategies as st
from search import options as parse
from search import search

jax.config.update("jax_enable_x64", True)

ROWS = 64  # problems of a batch
SHAPES = ((4, 2, 6), (5, 2, 33), (3, 3, 300))  # T, U, V; the reference runs on the first one alone
LARGEST = float(np.finfo(np.float32).max)
MASKS = (-1e4, -1e5, -3e6, -1e9, -1e10, -1e15, -1e30, -LARGEST, -np.inf)
VALUES = (0, -1, 3, 30, -100, 1e4, -1e4, 1e6, -1e9, 1e20, -1e38)


# ------------------------------------------------------------------------------------------------------------ examples


class Mask(typing.NamedTuple):
    """A constant on these classes (blank, labels, class, all) of these frames and columns, or on half of them."""

    value: float
    classes: str
    frames: tuple
    columns: tuple
    random: bool


class Row(typing.NamedTuple):
    """A problem. `kind`: equal logits, normal ones of some size, or a choice of constants."""

    seed: int
    length: int  # index of its lengths
    kind: str
    size: float
    per: str
    masks: list
    offset: float


class Example(typing.NamedTuple):
    loss: losses.Loss
    dtype: str
    shape: tuple
    implementation: str
    options: dict
    rows: list

    def __repr__(self):
        rows = "\n  ".join(map(str, self.rows))
        return f"{self.loss.name} {self.dtype} {self.shape} {self.implementation} {self.options}\n  {rows}"


sizes = st.floats(-30, 38.5).map(lambda x: 10.0**x)
spans = st.sampled_from([(0, None), (0, 1), (1, 2), (1, None)])
masks = st.builds(
    Mask,
    st.sampled_from(MASKS) | sizes.map(lambda x: -x) | sizes,
    st.sampled_from(["blank", "labels", "class", "all"]),
    spans,
    spans,
    st.booleans(),
)
rows = st.builds(
    Row,
    st.integers(0, 2**20),
    st.integers(0, 3),
    st.sampled_from(["equal", "normal", "choice"]),
    st.just(2.0) | sizes,
    st.sampled_from(["all", "element", "class", "frame"]),
    st.lists(masks, max_size=3),
    st.just(0.0) | st.sampled_from([1e3, -1e4, 1e6]) | sizes,
)


@st.composite
def examples(draw):
    loss = draw(st.sampled_from(losses.LOSSES))
    reference = draw(st.integers(0, 3)) == 3
    shape = SHAPES[0] if reference else draw(st.sampled_from(SHAPES))
    # The reference takes long to compile.
    dtypes = ["float32", "float64"] if reference else ["float32", "float64", "bfloat16", "float16"]
    options = {"blank": draw(st.sampled_from([-1, loss.blank(0)])), "fused_log_softmax": draw(st.integers(0, 3)) < 3}
    options["delay_penalty"] = draw(st.sampled_from([0.0, 0.0, 0.0625]))
    implementation = "reference" if reference else "kernel"
    found = draw(st.lists(rows, min_size=1, max_size=16))
    return Example(loss, draw(st.sampled_from(dtypes)), shape, implementation, options, found)


def logits_of(row, shape, blank, fused):
    """[T, U1, V] in float64."""
    T, _, V = shape
    rng = np.random.default_rng(row.seed)
    per = {"all": (), "element": shape, "class": (V,), "frame": (T, 1, 1)}[row.per]
    size = row.size * 10.0 ** rng.uniform(-6, 0, per)
    if row.kind == "choice":
        x = rng.choice(rng.choice(VALUES, 3), shape)
    else:
        x = rng.normal(size=shape) * size * (row.kind == "normal")
    x = x if fused else -np.abs(x)  # log-probabilities
    for mask in row.masks:
        chosen = np.zeros(shape, bool)
        block = chosen[slice(*mask.frames), slice(*mask.columns)]
        classes = {"blank": [blank], "class": [rng.integers(V)], "all": slice(None)}
        block[..., classes.get(mask.classes, np.arange(V) != blank)] = True
        chosen &= (rng.random(shape) < 0.5) | (not mask.random)
        x[chosen] = mask.value if fused else -abs(mask.value)
    return x + row.offset * fused


# -------------------------------------------------------------------------------------------------------------- checks


def problem_of(example):
    """The batch of ROWS problems, NaN outside the lengths. Rows repeat with other numbers."""
    T, U, V = example.shape
    blank, fused = example.options["blank"] % V, example.options["fused_log_softmax"]
    every = [(T, U), (T - 1, U - 1), (T, 1), (2, 0)]
    given = [example.rows[i % len(example.rows)] for i in range(ROWS)]
    given = [row._replace(seed=row.seed + i) for i, row in enumerate(given)]
    shape = T, U + 1, V + example.loss.extra_classes
    low = min(LARGEST, float(jnp.finfo(example.dtype).max))
    x = np.stack([logits_of(row, shape, blank, fused) for row in given])
    x = np.where(np.isneginf(x), x, np.clip(x, -low, low)).astype(jnp.dtype(example.dtype))
    labels = np.array([k for k in range(V) if not blank - example.loss.first_blank <= k <= blank], np.int32)
    targets = np.stack([np.random.default_rng(row.seed).choice(labels, U) for row in given])
    lengths = np.array([every[row.length] for row in given], np.int32)
    return losses.poisoned(losses.Problem(x, targets, *lengths.T))


def rounded_normalizer(loss, x, blank, eps):
    """The error of rows whose anchor is nearly impossible, since they keep a rounded log-sum-exp."""
    x = x[..., : -loss.extra_classes] if loss.extra_classes else x
    anchor = 0 if loss.name == "hat" else blank
    x = np.delete(x, blank, -1) if loss.name == "hat" else x
    top = x.max(-1)
    with np.errstate(invalid="ignore"):
        rounded = (top > -np.inf) & (top - x[..., anchor] > 45)
    return min(float(np.where(rounded, eps * (1 + np.abs(top)), 0).max()), 1.0)


def size_of(solution, eps):
    """The sum of absolute scores, whose rounding is an error of the loss, of the paths that may count."""
    arcs = {slot: np.abs(truth.as_float(scores)) for slot, scores in solution.arcs.items()}
    with np.errstate(over="ignore"):
        sizes = [sum(arcs[slot][t, u] for slot, t, u in path) for path in solution.paths]
    best = max(solution.scores)
    return max(size for size, score in zip(sizes, solution.scores) if best - score < 40 + 4 * eps * size)


def failures(example, p, b, value, gradient):
    """Text of each promise that the answer for sequence b breaks."""
    loss, fused, wide = example.loss, example.options["fused_log_softmax"], example.dtype == "float64"
    n, m = int(p.logit_lengths[b]), int(p.target_lengths[b])
    x = p.logits[b, :n, : m + 1].astype(np.float64)
    solution = truth.solve(x, p.targets[b, :m], **loss.truth, **example.options)
    eps, blank = losses.eps(np.float64 if wide else np.float32), example.options["blank"] % example.shape[2]
    base = 1e-10 if wide else 1e-5
    largest = float(np.finfo(np.float64 if wide else np.float32).max)
    if solution.loss > largest * (1 + 1e-5):
        if value != np.inf or gradient.any():
            yield f"loss {value}, expected inf and no gradient"
        return
    if solution.loss > largest * (1 - 1e-5):
        return  # either answer is right
    limit = (1e-12 if wide else 1e-5) * abs(solution.loss) + base + 4 * eps * size_of(solution, eps)
    if not abs(value - solution.loss) <= limit:
        yield f"loss {value}, expected {solution.loss}"
    if not np.isfinite(gradient).all():
        yield "gradient is not finite"
        return
    if gradient[n:].any() or gradient[:, m + 1 :].any():
        yield "gradient outside the lengths"
    normalizer = rounded_normalizer(loss, x, blank, eps) * fused
    rounding = losses.eps(example.dtype) / 2 if jnp.dtype(example.dtype).itemsize == 2 else 0
    if normalizer >= 1e-2:
        return
    kept = gradient[:n, : m + 1]
    ordered = np.concatenate([np.delete(kept, blank, -1), kept[..., [blank]]], -1) if loss.name == "hat" else kept
    for head in losses.heads(loss, ordered) if fused else ():
        off = np.abs(head.sum(-1)).max()
        if off > 1e-4 + 2 * normalizer + 4 * rounding + 2.0**-24 * head.shape[-1] * (rounding > 0):
            yield f"gradients of a softmax add up to {off:.3g}"
    slack = feeds.slack(solution, eps) + normalizer
    if slack < 1e-2:
        excess = np.abs(kept - solution.gradient) - rounding * np.abs(solution.gradient)
        if excess.max() > base + slack + 2.0**-24 * (rounding > 0):
            yield f"gradient off by {excess.max():.3g}, allowed {base + slack:.3g}"


def main(arguments=None):
    options, tried = parse(__doc__, arguments), collections.Counter()

    def check(example):
        p = problem_of(example)
        values, gradient = losses.evaluate(example.loss, p, example.implementation, **example.options)
        for b in range(ROWS):
            found = list(failures(example, p, b, float(values[b]), gradient[b].astype(np.float64)))
            tried[example.implementation] += 1
            assert not found, f"problem {b}: " + "; ".join(found)

    status = search(examples(), check, options)
    counts = f"{tried['kernel']} problems of the kernels, {tried['reference']} of the reference"
    print(f"{counts}: {'FAILED' if status else 'no failure'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
