"""Are the numbers equal to those that other libraries publish or compute?

`vectors` has the problem. Each number was reproduced by running the libraries named beside it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import lattices
from vectors import BLANK_AMONG_LABELS, LABELS, LENGTHS, WEIGHTS, T, U, X, t, u

VECTORS = {
    # name: (labels, options, loss, check of the gradient)
    "rnnt": (LABELS, {}, 13.463778289, 1.500800675),  # torchaudio, fast_rnnt, NeMo, warp-transducer
    "fastemit": (LABELS, {"fastemit_lambda": 0.1}, 13.463778289, 1.526103074),  # NeMo (gradient)
    "clamp": (LABELS, {"clamp": 0.05}, 13.463778289, -0.020971005),  # torchaudio on CPU, NeMo
    "label_is_blank": (BLANK_AMONG_LABELS, {}, 13.306622875, 1.531182386),  # NeMo, fast_rnnt
    "delay_penalty": (LABELS, {"delay_penalty": 0.1}, 13.381384833, 1.388385705),  # fast_rnnt
    "log_probs": (LABELS, {"fused_log_softmax": False}, 13.463778289, 1.309783010),  # torchaudio
    "log_probs_fastemit": (LABELS, {"fused_log_softmax": False, "fastemit_lambda": 0.1}, 13.463778289, 1.335904507),
}


@pytest.mark.parametrize("name", VECTORS)
def test_rnnt(implementation, name):
    labels, options, value, check = VECTORS[name]
    logits = X if options.get("fused_log_softmax", True) else truth.log_softmax(X)
    call = lambda x: jax_rnnt.rnnt_loss(x, labels, *LENGTHS, blank=0, implementation=implementation, **options)
    got, gradient = jax.value_and_grad(call)(logits)
    np.testing.assert_allclose(got, value, rtol=1e-9)
    np.testing.assert_allclose((gradient * WEIGHTS).sum(), check, atol=1e-8)


def test_standard_small_case(implementation):
    """The test case of warp-rnnt and torchaudio, whole and cut to one frame, no labels and both."""
    rows = [
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.6, 0.1, 0.1], [0.1, 0.1, 0.2, 0.8, 0.1]],
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.1, 0.1, 0.2, 0.1, 0.1], [0.7, 0.1, 0.2, 0.1, 0.1]],
    ]
    logits = np.array([rows] * 4)
    labels = np.array([[1, 2]] * 4, np.int32)
    lengths = np.array([2, 1, 2, 1], np.int32), np.array([2, 2, 0, 0], np.int32)
    values = jax_rnnt.rnnt_loss(logits, labels, *lengths, blank=0, reduction="none", implementation=implementation)
    np.testing.assert_allclose(values, [4.495666774, 4.274244594, 3.462858392, 1.731429196], rtol=1e-9)


# ---------------------------------------------------------------------- the reference lattice with other topologies


def log_probs(x, k):
    return jax.nn.log_softmax(x)[..., k]


def label_scores(x, labels):
    """[T, U1], -inf in the last column."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(x)[:, :U], labels[None, :, None], -1)[..., 0]
    return jnp.pad(picked, ((0, 0), (0, 1)), constant_values=-jnp.inf)


def check(value_of, expected, *checks):
    """Loss of `value_of(*heads)` and each head's gradient check."""
    heads = [X, np.cos(2 + 3 * t + 2 * u + 5 * np.arange(3))][: len(checks)]
    value, gradients = jax.value_and_grad(lambda heads: -value_of(*heads))(heads)
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    for gradient, wanted in zip(gradients, checks, strict=True):
        weights = np.cos(1 + t + 2 * u + 3 * np.arange(gradient.shape[-1]))
        np.testing.assert_allclose((gradient * weights).sum(), wanted, atol=1e-8)


def test_standard():
    arcs = lambda x: {"blank": log_probs(x, 0), "label": label_scores(x, LABELS)}
    check(lambda x: lattices.log_likelihood(lattices.STANDARD, arcs(x), *LENGTHS), 13.463778289, 1.500800675)


def test_monotonic():
    """fast_rnnt rnnt_type="modified", monotonic-rnnt."""
    arcs = lambda x: {"blank": log_probs(x, 0), "label": label_scores(x, LABELS)}
    check(lambda x: lattices.log_likelihood(lattices.MONOTONIC, arcs(x), *LENGTHS), 5.069890840, 1.187062517)


def test_monotonic_with_final_blank():
    """optimized_transducer one_sym_per_frame: durations of one frame only, so the last arc is a blank."""
    arcs = lambda x: {"blank+1": log_probs(x, 0), "label+1": label_scores(x, LABELS)}
    check(lambda x: lattices.log_likelihood(lattices.durations((1,)), arcs(x), *LENGTHS), 5.178358055, 1.087357062)


def test_constrained():
    """fast_rnnt rnnt_type="constrained": a label also pays the next row's blank."""

    def value(x):
        blank = log_probs(x, 0)
        after = jnp.pad(blank[:, 1:], ((0, 0), (0, 1)), constant_values=-jnp.inf)
        arcs = {"blank": blank, "label": label_scores(x, LABELS) + after}
        return lattices.log_likelihood(lattices.MONOTONIC, arcs, *LENGTHS)

    check(value, 15.341724887, 1.512987188)


@pytest.mark.parametrize(
    ("sigma", "expected", "wanted"), [(0.0, 6.081578563, 0.158461885), (0.05, 6.342662180, 0.159294526)]
)
def test_multi_blank(sigma, expected, wanted):
    """NeMo: blank 5, big blanks 4 and 3 of 2 and 3 frames."""

    def value(x):
        arcs = {"blank": log_probs(x, 5), "blank+2": log_probs(x, 4), "blank+3": log_probs(x, 3)}
        arcs = {k: s - sigma for k, s in (arcs | {"label": label_scores(x, BLANK_AMONG_LABELS)}).items()}
        return lattices.log_likelihood(lattices.multi_blank((2, 3)), arcs, *LENGTHS)

    check(value, expected, wanted)


@pytest.mark.parametrize(
    ("sigma", "expected", "token", "duration"),
    [(0.0, 8.052819877, 0.168474524, 1.140951660), (0.05, 8.274350104, 0.172450515, 1.141180559)],
)
def test_token_and_duration(sigma, expected, token, duration):
    """NeMo: blank 5, durations 0, 1, 2."""

    def value(x, d):
        blank, label = log_probs(x, 5) - sigma, label_scores(x, BLANK_AMONG_LABELS) - sigma
        arcs = {f"label+{i}": label + log_probs(d, i) for i in range(3)}
        arcs |= {f"blank+{i}": blank + log_probs(d, i) for i in (1, 2)}
        return lattices.log_likelihood(lattices.durations((0, 1, 2)), arcs, *LENGTHS)

    check(value, expected, token, duration)


def test_truth_gives_the_same_numbers():
    """The float64 truth of this suite gives the same vectors."""
    for labels, options, value, wanted in VECTORS.values():
        logits = X if options.get("fused_log_softmax", True) else truth.log_softmax(X)
        got, gradient = losses.RNNT.expected((logits[None], labels[None], [T], [U]), blank=0, **options)
        np.testing.assert_allclose(got[0], value, rtol=1e-9)
        np.testing.assert_allclose((gradient[0] * WEIGHTS).sum(), wanted, atol=1e-8)
