"""Feeds compiled programs with random problems, and compares every answer with the float64 truth.

    python lab/fuzz/fuzz_properties.py --seconds 60 --seed 1

Hypothesis draws a program (loss, layout, implementation, dtype and options, compiled for one shape) and the seed of its
batches: random logits in [-1e4, 1e4], some with an offset of up to 1e6 common to each softmax, lengths and labels. A
problem is one sequence: its loss, gradient and posteriors are those of `reference_numpy` (itself compared with
enumerated paths in test_vectors.py), and its best path is a path, no more probable than all of them.

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
import reference_numpy as truth

jax.config.update("jax_enable_x64", True)

T, U, V = 6, 3, 7
LAYOUTS = ("array", "JointLogits", "PackedLogits", "BandLogits", "AdditiveLogits")
LARGEST = 1e4
OFFSETS = (1e3, -1e3, 1e4, -1e4, 1e6)  # of all logits of a softmax
SIZE, BATCHES = 64, 40  # problems of a batch, batches of a program
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

        values, gradient = compare.with_gradient(lambda x: loss(layout(d.layout, x, index), *p[1:]))(p.logits)
        logits = layout(d.layout, p.logits, index)
        return values, gradient, loss.posteriors(logits, *p[1:]), best.align(logits, *p[1:])

    # The row of each node in the packed layout, and any row behind them.
    index = lambda p: np.argsort(~batches.inside(p).reshape(-1), kind="stable").astype(np.int32)
    return lambda p: jax.tree.map(np.asarray, run(p, index(p)))


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


# ------------------------------------------------------------------------------------------------------------ checks


def failures(d, p, answer, small):
    """Text of each part of an answer that is not that of the truth."""
    values, gradient, (blank, label), (score, frames) = (jax.tree.map(np.asarray, x) for x in answer)
    gradient, score = gradient.astype(np.float64), score.astype(np.float64)
    wide, options = d.dtype == "float64", {k: v for k, v in d.options.items() if k not in ("clamp", "fastemit_lambda")}
    with np.errstate(all="ignore"):
        expected, slopes = d.loss.expected(p, **d.options)
        posteriors = np.zeros((2, *blank.shape))
        for b, n, m, topology, arcs in d.loss.sequences(p, **options):
            for kind, x in enumerate(truth.by_kind(truth.posteriors(topology, arcs, n, m)[1])):
                posteriors[kind, b, :n, : m + 1] = x
    exists, used = np.isfinite(expected), np.arange(U) < p.target_lengths[:, None]

    def check(text, wrong):
        wrong = wrong.reshape(len(wrong), -1).any(1)
        if wrong.any():
            yield f"{text}: sequences {np.flatnonzero(wrong)[:5]}, of {wrong.sum()}"

    def off(got, expected, limit, relative=0.0):
        with np.errstate(invalid="ignore"):
            return ~((got == expected) | (np.abs(got - expected) <= limit + relative * np.abs(expected)))

    close = 1e-10 if wide else 2e-5
    yield from check("loss", off(values.astype(np.float64), expected, close, close))
    if d.layout != "AdditiveLogits":
        yield from check("gradient outside the lengths", np.where(batches.inside(p)[..., None], 0, gradient))
    if small and d.layout != "AdditiveLogits":
        rounding = compare.eps(d.dtype) if jnp.dtype(d.dtype).itemsize == 2 else 0
        yield from check("gradient", off(gradient, slopes, 1e-9 if wide else 2e-4, rounding))
    yield from check("gradient is not finite", ~np.isfinite(gradient))
    for name, x, y in zip(("blank", "label"), (blank, label), posteriors):
        yield from check(f"posterior of {name}", off(x.astype(np.float64), y, 1e-3 if small else 0.05))
    unit = 64 * compare.eps(np.float64 if wide else np.float32)  # of a log-probability
    above = -expected + unit * (1 + np.abs(np.where(exists, expected, 0)))
    yield from check("best path above all paths", exists & ~(score <= above))
    inside = (frames >= 0) & (frames < p.logit_lengths[:, None])
    yield from check("frames outside", exists[:, None] & used & ~inside)
    yield from check("frames go back", exists[:, None] & used[:, 1:] & (np.diff(frames, axis=1) < 0))


def failures_of_batch(d, rng, size=SIZE):
    """Text of what is wrong in a batch of this program."""
    p, small = feed(d, rng, size)
    yield from failures(d, p, program(d)(p), small)


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
            found = list(failures_of_batch(d, rng))
            assert not found, f"{d}, seed {seed}, batch {number}: " + "; ".join(found)
            tried[d.implementation] += SIZE

    usual = dict(deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck))
    end, left, seed, status = time.monotonic() + options.seconds, options.examples, options.seed, 0
    while left > 0 and time.monotonic() < end and not status:
        settings = hypothesis.settings(max_examples=min(ROUND, left), **usual)
        run = hypothesis.given(st.tuples(draws(), st.integers(0, 2**32)))(lambda example: check(example))
        try:
            hypothesis.seed(seed)(settings(run))()
        except Exception:
            print(f"seed {seed}: " + traceback.format_exc(chain=False, limit=-4))
            status = 1
        left, seed = left - ROUND, seed + 1000
    counts = f"{tried['kernel']} problems of the kernels, {tried['reference']} of the reference"
    print(f"{counts}: {'FAILED' if status else 'no failure'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
