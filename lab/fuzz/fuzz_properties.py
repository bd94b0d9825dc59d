"""Feeds compiled programs with random problems and checks properties that every answer has.

    python lab/fuzz/fuzz_properties.py --seconds 60 --seed 1

Hypothesis draws a program (loss, layout, implementation, dtype and options, compiled for one shape) and the seed of its
batches: random logits in [-1e4, 1e4], some with an offset of up to 1e6 common to each softmax, lengths and labels. A
problem is one sequence. lab/README.md lists the properties. Some sequences of each batch are compared with the
float64 truth (`reference_numpy`, itself compared with enumerated paths in test_vectors.py), so kernel, reference and
truth agree.

A failure is repeated with fewer options, on a simpler layout and loss, as long as it stays. The exit status is then 1.
"""

import argparse
import collections
import functools
import sys
import time
import traceback
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/support"))

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import batches
import compare
import family
import jax_rnnt

jax.config.update("jax_enable_x64", True)

T, U, V = 6, 3, 7
LAYOUTS = ("array", "JointLogits", "PackedLogits", "BandLogits", "AdditiveLogits")
LARGEST = 1e4
OFFSETS = (1e3, -1e3, 1e4, -1e4, 1e6)  # of all logits of a softmax
SIZE, BATCHES = 1024, 40  # problems of a batch, batches of a program
ROUND = 10  # programs between looks at the clock


class Draw(typing.NamedTuple):
    """A program."""

    loss: family.Loss
    layout: str = "array"
    implementation: str = "kernel"
    dtype: str = "float32"
    pairs: tuple = (("blank", -1),)

    @property
    def options(self):
        return dict(self.pairs)

    def __repr__(self):
        options = " ".join(f"{k}={v}" for k, v in self.pairs)
        return f"{self.loss.name} {self.layout} {self.implementation} {self.dtype} {options}"


OPTIONS = {"clamp": 0.25, "fastemit_lambda": 0.5, "delay_penalty": 0.0625, "fused_log_softmax": False}


@st.composite
def draws(draw):
    loss = draw(st.sampled_from(family.LOSSES))
    layout = draw(st.just("array") | st.sampled_from(LAYOUTS if loss is family.RNNT else LAYOUTS[:4]))
    additive = layout == "AdditiveLogits"
    dtype = draw(st.sampled_from(["float32", "float64"] if additive else ["float32", "float64", "bfloat16", "float16"]))
    options = {"blank": draw(st.sampled_from([-1, loss.first_blank, 4]))}
    for name, value in OPTIONS.items():
        if draw(st.integers(0, 4)) == 4 and not (additive and name == "fused_log_softmax"):
            options[name] = value
    implementation = draw(st.sampled_from(["kernel", "kernel", "kernel", "reference"]))
    return Draw(loss, layout, implementation, dtype, tuple(options.items()))


# ------------------------------------------------------------------------------------------------------- the program


def layout(name, x, index):
    """The layout that holds the logits x [B, T, U1, V]."""
    if name == "JointLogits":
        return family.in_tiles(x, 64)
    if name == "PackedLogits":
        return jax_rnnt.PackedLogits(x.reshape(-1, x.shape[-1])[index], x.shape[1])
    if name == "BandLogits":
        return family.in_a_band(x)
    if name == "AdditiveLogits":
        # The truth gets am + lm: the feed makes them so.
        return jax_rnnt.AdditiveLogits(x[:, :, 0] - x[:, :1, 0, :1] * 0, x[:, 0] - x[:, 0, :1])
    return x


@functools.cache
def program(d):
    """Compiled: problem, rows of the packed layout -> (values, gradient, posteriors, alignment)."""
    # The reference takes NaN of a row inside the lengths for the sequence's, also if the joint network uses none of it.
    whole_rows = d.layout == "JointLogits" and d.implementation == "reference"
    make = lambda implementation: d.loss.value(**d.options, reduction="none", implementation=implementation)
    loss, best = make(d.implementation), make(None)  # no kernel finds the best path

    @jax.jit
    def run(p, index):
        if whole_rows:
            column = jnp.arange(p.logits.shape[2])[None, None, :, None]
            p = p._replace(logits=jnp.where(column <= p.target_lengths[:, None, None, None], p.logits, 0))

        def total(x):
            values = loss(layout(d.layout, x, index), *p[1:])
            return values.sum(), values

        gradient, values = jax.grad(total, has_aux=True)(p.logits)
        logits = layout(d.layout, p.logits, index)
        return values, gradient, loss.posteriors(logits, *p[1:]), best.align(logits, *p[1:])

    return lambda p: jax.tree.map(np.asarray, run(p, rows_of(p)))


def rows_of(p):
    """Row of each node in the packed layout, and any row behind them."""
    inside = batches.inside(p).reshape(-1)
    return np.argsort(~inside, kind="stable").astype(np.int32)


# ---------------------------------------------------------------------------------------------------------- the feed


def feed(d, rng, size):
    """A batch of `size` problems and whether its logits are of a size at which gradients are compared."""
    classes = V + d.loss.extra_classes
    blank = d.options["blank"] % V
    labels = [k for k in range(V) if not blank - d.loss.first_blank <= k <= blank]  # big blanks lie before the blank
    targets = rng.choice(labels, (size, U)).astype(np.int32)
    scale = 10.0 ** rng.uniform(-2, 4) if rng.random() < 0.5 else 2.0
    shape = size, T, U + 1, classes
    kind = rng.integers(4)
    if d.layout == "AdditiveLogits":
        x = rng.normal(0, scale, (size, T, 1, classes)) + rng.normal(0, scale, (size, 1, U + 1, classes))
    elif kind == 0:
        x = rng.choice([0.0, scale, -scale], shape)
    elif kind == 1:
        x = rng.normal(0, scale, shape) * (rng.random((classes,)) < 0.5)
    else:
        x = rng.normal(0, scale, shape)
    if not d.options.get("fused_log_softmax", True):
        x = -np.abs(x)
    x = np.clip(x, -LARGEST, LARGEST)
    # Without kernels, a row whose blank is improbable rounds its normalizer: not so in logits of size 2.
    heads = d.options.get("fused_log_softmax", True) and d.layout != "AdditiveLogits"
    if heads and scale <= (30 if d.implementation == "kernel" else 2) and rng.random() < 0.3:
        offset = rng.choice(OFFSETS[: 4 if d.dtype == "float16" else 5])
        x += np.where((np.arange(classes) == blank) & (d.loss.name == "hat"), 0, offset)
    x = x.astype(jnp.dtype(d.dtype))
    frames, columns = rng.integers(1, T + 1, size), rng.integers(0, U + 1, size)
    p = batches.Problem(x, targets, frames.astype(np.int32), columns.astype(np.int32))
    # Lattices without an origin are no additive ones: am and lm are read where t = 0 and where u = 0.
    return (p if d.layout == "AdditiveLogits" else batches.poisoned(p)), scale <= 30


def possible(d, p):
    """[B] whether a path exists: the float64 truth of equal logits is finite."""
    known = {}
    for pair in set(zip(p.logit_lengths.tolist(), p.target_lengths.tolist(), strict=True)):
        one = batches.problem(1, T, U, V, loss=d.loss, lengths=([pair[0]], [pair[1]]))
        label = (d.options["blank"] % V + 1) % V  # that is no blank of any loss
        one = one._replace(logits=np.zeros_like(one.logits), targets=np.full((1, U), label))
        options = {k: v for k, v in d.options.items() if k == "blank"}
        known[pair] = np.isfinite(d.loss.expected(one, **options)[0][0])
    pairs = zip(p.logit_lengths.tolist(), p.target_lengths.tolist(), strict=True)
    return np.array([known[pair] for pair in pairs])


# ------------------------------------------------------------------------------------------------------------ checks


def failures(d, p, answer, exists, small):
    """Text of each property that does not hold."""
    values, gradient, posteriors, alignment = answer
    narrow = jnp.dtype(d.dtype).itemsize == 2
    unit = compare.eps(np.float64 if d.dtype == "float64" else np.float32)
    fused, lam = d.options.get("fused_log_softmax", True), 1 + d.options.get("fastemit_lambda", 0.0)
    wide = np.asarray(gradient, np.float64)
    most = 64 * unit * (1 + np.abs(np.where(np.isfinite(values), values, 0)))  # of a log-probability

    def check(text, wrong):
        if np.any(wrong):
            where = np.flatnonzero(wrong)
            yield f"{text}: sequences {where[:5]}, of {len(where)}"

    yield from check("loss is not finite", exists & ~np.isfinite(values))
    yield from check("gradient is not finite", ~np.isfinite(wide).all((1, 2, 3)))
    yield from check("a loss without a path", ~exists & (values != np.inf))
    yield from check("gradient without a path", ~exists & wide.any((1, 2, 3)))
    outside = np.where(batches.inside(p)[..., None], 0, wide).any((1, 2, 3))
    if d.layout != "AdditiveLogits":
        yield from check("gradient outside the lengths", outside)
    if fused and "delay_penalty" not in d.options and d.loss not in family.SKIPPING:  # skipped frames add to it
        yield from check("loss below 0", exists & (values < 0))
    if fused and "clamp" not in d.options and d.layout != "AdditiveLogits":
        # An anchor that is nearly impossible rounds its row's normalizer: see jax_rnnt/emissions/softmax.py.
        tolerance = (1e-4 if unit > 1e-10 else 1e-10) * lam if small else unit * 2 * LARGEST * 8 * lam
        tolerance += (compare.eps(d.dtype) * V + 2.0**-20) * lam if narrow else 0
        for head in heads(d, wide):
            sums = np.abs(head.sum(-1)).max((1, 2))
            yield from check("gradient of a softmax does not add up to 0", exists & (sums > tolerance))
    blank, label = (np.asarray(x, np.float64) for x in posteriors[:2])
    slack = 1e-4 if small else 0.05
    for name, x in (("blank", blank), ("label", label)):
        yield from check(f"posterior of {name} not in [0, 1]", ~((x > -1e-6) & (x < 1 + slack)).all((1, 2)))
    if small:
        sums = label.sum(1)[:, :U]
        used = np.arange(U) < p.target_lengths[:, None]
        yield from check("posteriors of a label", (exists[:, None] & used & (np.abs(sums - 1) > 1e-3)).any(1))
    score, at = alignment
    used = np.arange(U) < p.target_lengths[:, None]
    with np.errstate(invalid="ignore"):
        yield from check("best path above all paths", exists & (np.asarray(score, np.float64) > -values + most))
    yield from check("frames outside", (exists[:, None] & used & ~((at >= 0) & (at < p.logit_lengths[:, None]))).any(1))
    later = np.diff(at, axis=1) < 0
    yield from check("frames go back", (exists[:, None] & used[:, 1:] & later).any(1))


def heads(d, gradient):
    if d.loss.name == "hat":
        return [np.delete(gradient, d.options["blank"] % V, -1)]
    return batches.heads(d.loss, gradient)


def compared(d, p, answer, small, count):
    """Text where the first `count` sequences differ from the float64 truth."""
    few = p.take(slice(count))
    with np.errstate(all="ignore"):
        values, gradient = d.loss.expected(few, **d.options)
    wide = d.dtype == "float64"
    relative = 1e-10 if wide else 2e-5
    got, slope = np.asarray(answer[0][:count], np.float64), np.asarray(answer[1][:count], np.float64)
    with np.errstate(invalid="ignore"):
        close = (got == values) | (np.abs(got - values) <= relative * (1 + np.abs(values)))
    if not close.all():
        yield f"loss {got[~close][0]!r}, expected {values[~close][0]!r}: sequence {np.flatnonzero(~close)[0]}"
    if small and d.layout != "AdditiveLogits":
        rounding = compare.eps(d.dtype) if jnp.dtype(d.dtype).itemsize == 2 else 0
        error = np.abs(slope - gradient) - rounding * np.abs(gradient) - (1e-9 if wide else 2e-4)
        if error.max() > 0:
            yield f"gradient off by {error.max():.3g}: sequence {np.unravel_index(error.argmax(), error.shape)[0]}"


def failures_of_batch(d, rng, number, size=SIZE):
    """Text of each property that does not hold for a batch of this program; `number` counts its batches."""
    p, small = feed(d, rng, size)
    answer = program(d)(p)
    yield from failures(d, p, answer, possible(d, p), small)
    if number % 8 == 0:
        yield from compared(d, p, answer, small, 16)


# -------------------------------------------------------------------------------------------------------------- search


def search(examples, check, options):
    """0, or 1 after a failure of `check`, which is printed with its example; the same seed repeats it."""
    usual = dict(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    end, left, seed = time.monotonic() + options.seconds, options.examples, options.seed
    while left > 0 and time.monotonic() < end:
        settings = hypothesis.settings(max_examples=min(ROUND, left), **usual)
        run = hypothesis.seed(seed)(settings(hypothesis.given(examples)(lambda example: check(example))))
        try:
            run()
        except Exception:
            print(f"seed {seed}: " + traceback.format_exc(chain=False, limit=-4))
            return 1
        left, seed = left - ROUND, seed + 1000
    return 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=10**6, help="stop after so many")
    options, tried = parser.parse_args(arguments), collections.Counter()

    def check(example):
        d, seed = example
        rng = np.random.default_rng(seed)
        for number in range(BATCHES):
            found = list(failures_of_batch(d, rng, number))
            assert not found, f"{d}, seed {seed}, batch {number}: " + "; ".join(found)
            tried[d.implementation] += SIZE

    status = search(st.tuples(draws(), st.integers(0, 2**32)), check, options)
    counts = f"{tried['kernel']} problems of the kernels, {tried['reference']} of the reference"
    print(f"{counts}: {'FAILED' if status else 'no failure'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
