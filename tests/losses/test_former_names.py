"""Former public names work for one minor version, and warn: each beside the new name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import HATLoss, RNNTLoss, emissions, lattices, prune_ranges, timing

LOGITS, REST = jnp.arange(24.0).reshape(3, 2, 4) / 7, (jnp.array([1]), jnp.array(3), jnp.array(1))
LENGTHS = dict(logit_lengths=jnp.array(3), target_lengths=jnp.array(1))
POSTERIORS = dict(blank_posteriors=jnp.ones((3, 2)), label_posteriors=jnp.ones((3, 2)))
ARCS = {"blank": jnp.zeros((3, 2)), "label": jnp.zeros((3, 2))}
LOSS = RNNTLoss()
FORMER = {
    "TransducerLoss.lattice": (lambda: LOSS.lattice, lambda: LOSS.topology),
    "TransducerLoss.arcs": (lambda: LOSS.arcs(LOGITS, *REST), lambda: LOSS.arc_log_probs(LOGITS, *REST)),
    "TransducerLoss.emission_frames": (
        lambda: LOSS.emission_frames(LOGITS, *REST),
        lambda: LOSS.label_frames(LOGITS, *REST),
    ),
    "lattices.durations": (lambda: lattices.durations((0, 1)), lambda: lattices.token_and_duration((0, 1))),
    "log_likelihood(arcs=)": (
        lambda: lattices.log_likelihood(LOSS.topology, arcs=ARCS, num_frames=3, num_labels=1),
        lambda: lattices.log_likelihood(LOSS.topology, arc_log_probs=ARCS, num_frames=3, num_labels=1),
    ),
    "Softmax(durations=)": (
        lambda: emissions.Softmax((0,), durations=2),
        lambda: emissions.Softmax((0,), num_durations=2),
    ),
    "Softmax.durations": (lambda: emissions.Softmax((0,), num_durations=2).durations, lambda: 2),
    "frames_to_seconds(reduction=)": (
        lambda: timing.frames_to_seconds([3], hop=0.5, reduction=4).item(),
        lambda: timing.frames_to_seconds([3], hop=0.5, subsampling=4).item(),
    ),
    "intervals(reduction=)": (
        lambda: timing.intervals([3], ["a"], hop=0.5, reduction=4),
        lambda: timing.intervals([3], ["a"], hop=0.5, subsampling=4),
    ),
    "HATLoss(topology=)": (lambda: HATLoss(topology="monotonic"), lambda: HATLoss(variant="monotonic")),
    "prune_ranges(topology=)": (
        lambda: prune_ranges(**POSTERIORS, **LENGTHS, width=1, topology="monotonic"),
        lambda: prune_ranges(**POSTERIORS, **LENGTHS, width=1, variant="monotonic"),
    ),
}


@pytest.mark.parametrize("name", FORMER)
def test_a_former_name_warns_and_works(name):
    former, present = FORMER[name]
    with pytest.warns(DeprecationWarning, match="is deprecated, use"):
        got = former()
    expected = present()  # without a warning, which would be an error here
    if isinstance(expected, dict | jax.Array):
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    else:
        assert got == expected
