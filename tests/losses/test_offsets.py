"""Are answers right for logits with common offsets, and for all magnitudes?"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import compare
import door
import family
from feeds import T, U, V, far, gradient_failures, lowest, none_of, problem_of, row_of, value_failures

# (offsets, parts of one in which the logits are counted): logit + offset is a float32.
OFFSETS = (((1, 30, 1e3, 1e4), 64), ((1e6,), 8))


def heads_of(loss, blank, classes=V):
    """Selections of classes to shift together: those of one softmax."""
    if loss.extra_classes:
        return {"both": np.s_[:], "tokens": np.s_[:classes], "durations": np.s_[classes:]}
    if loss.name == "hat":
        return {"labels": [k for k in range(classes) if k != blank % classes]}
    return {"all": np.s_[:]}


@functools.cache
def shifted(loss, blank, classes=V):
    """(rows, their limits): each row of logits is shifted by plus or minus the offset; the truth is not shifted.

    Equal logits of 3e38, and the largest and lowest of float32, are equal logits.
    """
    rng = np.random.default_rng(0)
    rows, limits = [], []
    for offsets, spacing in OFFSETS:
        shape = T, U + 1, classes + loss.extra_classes
        logits = rng.integers(-2 * spacing, 2 * spacing + 1, shape) / spacing
        plain = row_of(loss, "float32", "", logits, T, blank=blank)
        for offset, (head, where) in itertools.product(offsets, heads_of(loss, blank, classes).items()):
            for kind, sign in (("alike", 1), ("alike", -1), ("by row", rng.choice([-1, 1], (T, U + 1, 1)))):
                moved = logits.copy()
                moved[..., where] += offset * sign
                assert (moved == moved.astype(np.float32)).all()
                name = f"{offset:g} to {head}, {kind}"
                rows.append(dataclasses.replace(plain, name=name, logits=moved.astype(np.float32)))
                limits.append(1e-5 if offset <= 1e3 else 1e-4)
    equal = np.zeros((T, U + 1, classes + loss.extra_classes), np.float32)
    plain = row_of(loss, "float32", "", equal, T, blank=blank)
    for value in (3e38, -3e38, lowest(np.float32), -lowest(np.float32)):
        for head, where in heads_of(loss, blank, classes).items():
            logits = equal.copy()
            logits[..., where] = value
            rows.append(dataclasses.replace(plain, name=f"{value:g} in {head}", logits=logits))
            limits.append(1e-5)
    return rows, limits


def offset_failures(rows, limits, values, gradient):
    for row, limit, value, got in zip(rows, limits, values, gradient):
        expected = row.solution.loss
        if far(value, expected, limit * max(1, abs(expected))):
            yield f"{row.name}: loss off by {value - expected:.2g}"
        if far(got, row.solution.gradient, limit):
            yield f"{row.name}: gradient off by {np.abs(got - row.solution.gradient).max():.2g}"


@pytest.mark.parametrize("classes", [V, 17, 70, 300])
@pytest.mark.parametrize("loss", door.LOSSES, ids=str)
def test_common_offsets_by_kernel(loss, classes):
    """An offset of all logits of a softmax changes neither loss nor gradient. Rows may have different offsets."""
    for blank in (-1, 0, classes // 2):
        blank = loss.blank(blank)
        rows, limits = shifted(loss, blank, classes)
        for got in door.answers(loss, problem_of(rows), "kernel", blank=blank):
            none_of(offset_failures(rows, limits, *got))


# Losses that differ in what is between logits and lattice: their references, and the kernels of those with steps.
IN_JAX = [(family.RNNT, "reference"), family.slow(family.HAT, "reference")]
IN_JAX += [family.slow(x, "kernel") for x in family.SKIPPING]


@pytest.mark.parametrize(("loss", "implementation"), IN_JAX, indirect=["implementation"], ids=str)
def test_common_offsets(loss, implementation):
    """The same in JAX."""
    rows, limits = shifted(loss, -1)
    none_of(offset_failures(rows, limits, *compare.evaluate(loss, problem_of(rows), implementation)))


MAGNITUDES = (1e-30, 1e-3, 1.0, 1e2, 1e4, 1e8, 1e15, 1e30, 1e38)


def rounded_normalizer(row, blank):
    """Whether the row keeps a rounded log-sum-exp, since its anchor is nearly impossible."""
    x = row.logits[: row.frames].astype(np.float64)[..., :V]
    second, top = np.moveaxis(np.sort(x, -1)[..., -2:], -1, 0)
    rounded = (top - x[..., blank] > 45) & (top - second < 20)
    return min(float(np.max(np.where(rounded, np.abs(top), 0) * compare.eps(np.float32))), 1.0)


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
    if loss is family.RNNT and not fused:  # huge positive scores: the loss is negative, and one path has posterior 1
        for size in (1e4, 1e9, 1e30):
            for logits in np.abs(rng.normal(size=(4, T, U + 1, V)) * size).astype(np.float32):
                rows.append(row_of(loss, "float32", f"up to {size:g}", logits, T, fused_log_softmax=False))
    return rows


@family.every_kernel
def test_magnitudes(loss, implementation):
    """The loss is right to 1e-5, or +inf beyond float32. Gradients count if rounding cannot change the best paths.

    Of log-probabilities too, but for steps between emission and lattice, which are the same.
    """
    for fused in (True,) if loss in family.SKIPPING else (True, False):
        rows = scaled(loss, fused)
        for values, gradient in door.answers(loss, problem_of(rows), implementation, fused_log_softmax=fused):
            none_of(value_failures(rows, values, "float32", 1e-5))
            none_of(gradient_failures(loss, rows, gradient, "float32", False))
