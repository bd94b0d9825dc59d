"""Topologies beside those of the truth, and random arcs for them."""

import numpy as np

import reference_numpy as truth
from jax_rnnt import lattices

TOPOLOGIES = {
    "standard": (lattices.STANDARD, truth.STANDARD),
    "monotonic": (lattices.MONOTONIC, truth.MONOTONIC),
    "multi_blank": (lattices.multi_blank((2, 3)), truth.multi_blank((2, 3))),
    "durations": (lattices.token_and_duration((0, 1, 2, 4)), truth.token_durations((0, 1, 2, 4))),
    "durations_unordered_without_1": (lattices.token_and_duration((3, 0, 2)), truth.token_durations((3, 0, 2))),
    "durations_without_0": (lattices.token_and_duration((1,)), truth.token_durations((1,))),
}
T, U = 5, 3
EVERY = truth.every_length(T, U)


SHAPE = len(EVERY), T, U + 1


def arcs_of(topology, shape=SHAPE, *, dtype=np.float64, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {arc.slot: rng.normal(-1, scale, shape).astype(dtype) for arc in topology}


def check(topology, arcs, frames, labels, answers, limits):
    """Against the truth, in each dtype with a limit; arcs that leave the lengths are NaN.

    Answers are functions of (arcs, frames, labels): (value alone, value with a gradient, posteriors).
    """
    frames, labels = np.array(frames, np.int32), np.array(labels, np.int32)
    _, rows, columns = arcs[topology[1][0].slot].shape
    inside = np.arange(rows)[:, None] < frames[:, None, None]
    inside = inside & (np.arange(columns) <= labels[:, None, None])
    expected, exact = np.zeros(len(frames)), {slot: np.zeros(x.shape) for slot, x in arcs.items()}
    for b, (n, m) in enumerate(zip(frames, labels)):
        own = {slot: x[b] for slot, x in arcs.items()}
        expected[b], posteriors = truth.posteriors(topology[1], own, n, m)
        for slot, x in posteriors.items():
            exact[slot][b, :n, : m + 1] = x[:n, : m + 1]
    last = np.arange(columns) == labels[:, None, None]  # no label leaves it
    used = {slot: inside & ~(last & truth.is_label(slot)) for slot in arcs}
    for dtype, limit in limits.items():
        dirty = {slot: np.where(used[slot], x, np.nan).astype(dtype) for slot, x in arcs.items()}
        for answer in answers:
            alone, values, posteriors = answer(dirty, frames, labels)
            np.testing.assert_array_equal(alone, values)
            np.testing.assert_allclose(values, expected, rtol=limit, atol=limit)
            for slot, x in exact.items():
                got = np.asarray(posteriors[slot])
                np.testing.assert_allclose(got, x, atol=limit, err_msg=slot)
                assert not got[~inside].any()
