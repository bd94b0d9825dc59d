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
