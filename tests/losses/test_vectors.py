"""Are the numbers equal to those that other libraries publish or compute?

`vectors` has the problem. Each number was reproduced by running the libraries named beside it.
"""

import numpy as np
import pytest

import batches
import compare
import family
import reference_numpy as truth
from slopes import assert_slopes
from vectors import BLANK_AMONG_LABELS, LABELS, LENGTHS, WEIGHTS, X, t, u

RNNT, MONOTONIC, HAT = family.RNNT, family.MONOTONIC, family.HAT
BIG, DURATIONS = family.multiblank((2, 3)), family.tdt((0, 1, 2))
HEADS = np.concatenate([X, np.cos(2 + 3 * t + 2 * u + 5 * np.arange(3))], -1)
LOG_PROBS, FIRST = truth.log_softmax(X), {"blank": 0}
UNFUSED = FIRST | {"fused_log_softmax": False}

VECTORS = {
    # name: (loss, logits, labels, options, value, check of the gradient of the tokens, of the durations)
    "rnnt": (RNNT, X, LABELS, FIRST, 13.463778289, 1.500800675),  # torchaudio, fast_rnnt, NeMo, warp-transducer
    "fastemit": (RNNT, X, LABELS, FIRST | {"fastemit_lambda": 0.1}, 13.463778289, 1.526103074),  # NeMo (gradient)
    "clamp": (RNNT, X, LABELS, FIRST | {"clamp": 0.05}, 13.463778289, -0.020971005),  # torchaudio on CPU, NeMo
    "both": (RNNT, X, LABELS, FIRST | {"fastemit_lambda": 0.1, "clamp": 0.05}, 13.463778289, -0.033753754),  # NeMo
    "label_is_blank": (RNNT, X, BLANK_AMONG_LABELS, FIRST, 13.306622875, 1.531182386),  # NeMo, fast_rnnt
    "delay_penalty": (RNNT, X, LABELS, FIRST | {"delay_penalty": 0.1}, 13.381384833, 1.388385705),  # fast_rnnt
    "log_probs": (RNNT, LOG_PROBS, LABELS, UNFUSED, 13.463778289, 1.309783010),  # torchaudio
    "log_probs_fastemit": (RNNT, LOG_PROBS, LABELS, UNFUSED | {"fastemit_lambda": 0.1}, 13.463778289, 1.335904507),
    "monotonic": (MONOTONIC, X, LABELS, FIRST, 5.069890840, 1.187062517),  # fast_rnnt, monotonic-rnnt
    "final_blank": (family.FINAL_BLANK, X, LABELS, FIRST, 5.178358055, 1.087357062),  # optimized_transducer
    "constrained": (family.CONSTRAINED, X, LABELS, FIRST, 15.341724887, 1.512987188),  # fast_rnnt
    "multiblank": (BIG, X, BLANK_AMONG_LABELS, {}, 6.081578563, 0.158461885),  # NeMo, as those below
    "multiblank_sigma": (BIG, X, BLANK_AMONG_LABELS, {"sigma": 0.05}, 6.342662180, 0.159294526),
    "multiblank_options": (
        BIG, X, BLANK_AMONG_LABELS, {"sigma": 0.05, "fastemit_lambda": 0.1, "clamp": 0.05}, 6.342662180, -0.090990276,
    ),
    "tdt": (DURATIONS, HEADS, BLANK_AMONG_LABELS, {}, 8.052819877, 0.168474524, 1.140951660),
    "tdt_sigma": (DURATIONS, HEADS, BLANK_AMONG_LABELS, {"sigma": 0.05}, 8.274350104, 0.172450515, 1.141180559),
    "tdt_fastemit": (  # tokens as NeMo; durations scaled with them
        DURATIONS, HEADS, BLANK_AMONG_LABELS, {"sigma": 0.05, "fastemit_lambda": 0.1},
        8.274350104, 0.246719295, 1.234320538,
    ),
    "hat": (HAT, X, LABELS, FIRST, 8.630254897, 0.682359906),  # k2
}  # fmt: skip


@pytest.mark.parametrize("loss", {case[0]: None for case in VECTORS.values()}, ids=str)
@pytest.mark.parametrize("source", ["library", "truth"])
def test_vectors(source, loss):
    """A loss compiles one program for all options that may be traced; the reference equals the truth elsewhere."""
    for name, (own, logits, labels, options, expected, *checks) in VECTORS.items():
        if own is not loss:
            continue
        p = batches.Problem(logits[None], labels[None], *(np.array([n], np.int32) for n in LENGTHS))
        if source == "truth":
            value, (gradient,) = loss.expected(p, **options)
        else:
            value, (gradient,) = compare.evaluate(loss, p, None, **options)
        np.testing.assert_allclose(value, [expected], rtol=1e-9, err_msg=name)
        for head, check in zip(batches.heads(loss, gradient) if loss is DURATIONS else [gradient], checks, strict=True):
            found = (head * WEIGHTS[..., : head.shape[-1]]).sum()
            np.testing.assert_allclose(found, check, atol=1e-8, err_msg=name)


TABLES = {"standard": truth.STANDARD, "durations_without_0_and_1": truth.token_durations((2, 3))}
TABLES |= {loss.name: loss.truth["topology"] for loss in (MONOTONIC, family.FINAL_BLANK, BIG, family.tdt((0, 1, 2, 4)))}


@pytest.mark.parametrize("topology", TABLES.values(), ids=TABLES)
def test_dynamic_program_equals_enumeration(topology):
    rng = np.random.default_rng(0)
    for frames, labels in truth.every_length(5, 3):
        arcs = {arc.slot: rng.normal(size=(frames, labels + 1)) for arc in topology}
        _, value, posteriors = truth.sum_of_paths(truth.enumerate_paths(topology, frames, labels), arcs)
        got, got_posteriors = truth.posteriors(topology, arcs, frames, labels)
        np.testing.assert_allclose(got, value, rtol=1e-14, atol=1e-14)
        for slot in arcs:
            np.testing.assert_allclose(got_posteriors[slot], posteriors[slot], atol=1e-14)


def test_number_of_paths():
    """T - 1 + U choose U paths on the standard lattice, so a closed form for equal logits; T choose U if monotonic."""
    assert len(truth.enumerate_paths(truth.STANDARD, 4, 3)) == 20
    assert len(truth.enumerate_paths(truth.MONOTONIC, 4, 3)) == 4
    assert len(truth.enumerate_paths(truth.MONOTONIC_FINAL_BLANK, 4, 3)) == 1
    assert len(truth.enumerate_paths(truth.STANDARD, 0, 1)) == 0
    for n, m, classes in ((1, 0, 2), (5, 0, 7), (1, 4, 3), (9, 4, 5), (30, 20, 11)):
        p = batches.problem(1, n, m, classes, scale=0, lengths=([n], [m]))
        np.testing.assert_allclose(RNNT.expected(p)[0], truth.uniform_loss(n, m, classes), rtol=1e-13)


@pytest.mark.parametrize("options", [{}, {"sigma": 0.05}, {"fused_log_softmax": False}, {"blank": 2}], ids=str)
@family.every_quick
def test_gradient_of_the_truth_is_its_slope(loss, options):
    if "sigma" in options and loss not in (family.MULTIBLANK, family.TDT):
        pytest.skip("a loss without sigma")
    p = batches.problem(1, 4, 2, 7, loss=loss, scale=1.0, lengths=([4], [2]))
    _, gradient = loss.expected(p, **options)
    value = lambda logits: loss.expected(p._replace(logits=logits), **options)[0][0]
    assert_slopes([gradient], value, [p.logits])
