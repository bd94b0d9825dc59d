"""Are answers right for logits with common offsets, and for all magnitudes?"""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

import compare
import door
import family
from feeds import T, U, V, far, lowest, none_of, problem_of, row_of

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
