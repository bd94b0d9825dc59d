"""Does the float64 dynamic program agree with the enumeration of all paths, and its gradient with slopes?"""

import numpy as np
import pytest

import reference_numpy as truth

TOPOLOGIES = {
    "standard": truth.STANDARD,
    "monotonic": truth.MONOTONIC,
    "monotonic_final_blank": truth.MONOTONIC_FINAL_BLANK,
    "multi_blank": truth.multi_blank((2, 3)),
    "durations": truth.token_durations((0, 1, 2, 4)),
    "durations_without_0_and_1": truth.token_durations((2, 3)),
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_dynamic_program_equals_enumeration(topology):
    rng = np.random.default_rng(0)
    for T, U in truth.every_length(5, 3):
        arcs = {arc.slot: rng.normal(size=(T, U + 1)) for arc in topology}
        value, posteriors = truth.enumerate_log_likelihood(topology, arcs, T, U)
        got, got_posteriors = truth.posteriors(topology, arcs, T, U)
        np.testing.assert_allclose(got, value, rtol=1e-14, atol=1e-14)
        for slot in arcs:
            np.testing.assert_allclose(got_posteriors[slot], posteriors[slot], atol=1e-14)


def test_number_of_paths():
    """T - 1 + U choose U paths on the standard lattice; T choose U with one symbol a frame."""
    assert len(truth.enumerate_paths(truth.STANDARD, 4, 3)) == 20
    assert len(truth.enumerate_paths(truth.MONOTONIC, 4, 3)) == 4
    assert len(truth.enumerate_paths(truth.MONOTONIC_FINAL_BLANK, 4, 3)) == 1
    assert len(truth.enumerate_paths(truth.STANDARD, 0, 1)) == 0


EMISSIONS = {
    "softmax": {},
    "log_probs": {"fused_log_softmax": False},
    "multi_blank": {
        "topology": truth.multi_blank((2, 3)),
        "emission": truth.multi_blank_emission,
        "durations": (2, 3),
        "sigma": 0.05,
    },
    "hat": {"emission": truth.hat_emission, "blank": 2},
    "constrained": {"topology": truth.MONOTONIC, "emission": truth.constrained_emission},
    "durations": {
        "topology": truth.token_durations((0, 2, 1)),
        "emission": truth.duration_emission,
        "durations": (0, 2, 1),
        "extra_classes": 3,
        "sigma": 0.05,
    },
}


@pytest.mark.parametrize("options", EMISSIONS.values(), ids=EMISSIONS)
def test_gradient_equals_slope(options):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(1, 4, 3, 7))
    rest = np.array([[0, 3]]), np.array([4]), np.array([2])
    _, gradient = truth.loss_and_gradient(logits, *rest, **options)
    for _ in range(5):
        direction = rng.normal(size=logits.shape)
        up, down = (truth.loss_and_gradient(logits + h * direction, *rest, **options)[0][0] for h in (1e-6, -1e-6))
        np.testing.assert_allclose((gradient * direction).sum(), (up - down) / 2e-6, rtol=1e-7, atol=1e-8)
