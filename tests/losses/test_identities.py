"""Do the identities hold that every transducer loss must satisfy?"""

import jax
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth

EXACT = 1e-13


@pytest.fixture
def p():
    return losses.problem()


def posteriors(p, implementation, **options):
    return (np.asarray(x) for x in jax_rnnt.rnnt_posteriors(*p, implementation=implementation, **options))


@pytest.mark.parametrize(("T", "U", "V"), [(1, 0, 2), (5, 0, 7), (1, 4, 3), (9, 4, 5), (30, 20, 11)])
def test_uniform_logits_closed_form(implementation, T, U, V):
    """(T + U) log V - log C(T - 1 + U, U): all paths weigh the same."""
    p = losses.problem(1, T, U, V, lengths=([T], [U]))._replace(logits=np.full((1, T, U + 1, V), 1.25))
    value = jax_rnnt.rnnt_loss(*p, implementation=implementation)
    np.testing.assert_allclose(value, truth.uniform_loss(T, U, V), rtol=EXACT)


@pytest.mark.family("layouts")
def test_rows_of_the_gradient_sum_to_zero(loss, implementation):
    p = losses.problem(loss=loss)
    for options in ({}, {"fastemit_lambda": 3.0}, {"delay_penalty": 0.5}):
        _, gradient = losses.evaluate(loss, p, implementation, **options)
        for head in losses.heads(loss, gradient):
            np.testing.assert_allclose(head.sum(-1), 0, atol=EXACT)


def test_every_label_is_emitted_once(p, implementation):
    """Label posteriors sum to 1 over t for each label; blank posteriors to 1 over u in each frame."""
    blank, label = posteriors(p, implementation)
    for b in range(4):
        n, m = p.logit_lengths[b], p.target_lengths[b]
        np.testing.assert_allclose(label[b, :, :m].sum(0), 1, rtol=EXACT)
        np.testing.assert_allclose(blank[b, :n].sum(1), 1, rtol=EXACT)
        assert not label[b, :, m:].any() and not blank[b, n:].any()


def test_flow_is_conserved(p, implementation):
    """The posteriors of arcs into a node and out of it have the same sum."""
    blank, label = posteriors(p, implementation)
    out = blank + label
    into = np.zeros_like(out)
    into[:, 1:] += blank[:, :-1]
    into[:, :, 1:] += label[:, :, :-1]
    into[:, 0, 0] += 1
    used = losses.inside(p)
    np.testing.assert_allclose(into[used], out[used], atol=EXACT)


def test_every_antidiagonal_is_crossed_once(implementation):
    p = losses.problem(lengths=([7] * 4, [4] * 4))
    blank, label = posteriors(p, implementation)
    n = np.arange(7)[:, None] + np.arange(5)
    for k in range(11):
        np.testing.assert_allclose((blank + label)[:, n == k].sum(-1), 1, rtol=EXACT)


def test_gradient_of_log_probs_is_minus_the_posteriors(p, implementation):
    _, gradient = losses.evaluate(losses.RNNT, p, implementation, fused_log_softmax=False)
    blank, label = posteriors(p, implementation, fused_log_softmax=False)
    expected = np.zeros_like(gradient)
    expected[..., -1] -= blank
    for b in range(4):
        for u in range(p.target_lengths[b]):
            expected[b, :, u, p.targets[b, u]] -= label[b, :, u]
    np.testing.assert_allclose(gradient, expected, atol=EXACT)


@pytest.mark.family("layouts")
def test_shift_of_a_row_changes_nothing(loss, implementation):
    """A constant added to all logits of one softmax of a node cancels."""
    p = losses.problem(loss=loss)
    logits = p.logits.copy()
    for i, head in enumerate(losses.heads(loss, logits)):
        head += np.random.default_rng(i).normal(0, 5, (*logits.shape[:-1], 1))
    shifted = losses.evaluate(loss, p._replace(logits=logits), implementation)
    losses.assert_matches(shifted, losses.evaluate(loss, p, implementation), np.float64, 11)


def test_log_probs_mode_through_log_softmax_is_the_fused_loss(implementation, p):
    """Value and gradient, FastEmit included: it passes through the outer softmax the same way."""

    def composed(x):
        call = lambda x: jax_rnnt.rnnt_loss(
            jax.nn.log_softmax(x), *p[1:], fused_log_softmax=False, fastemit_lambda=0.5, reduction="none",
            implementation=implementation,
        )  # fmt: skip
        values = call(x)
        return values.sum(), values

    gradient, values = jax.jit(jax.grad(composed, has_aux=True))(p.logits)
    fused = losses.evaluate(losses.RNNT, p, implementation, fastemit_lambda=0.5)
    losses.assert_matches((values, gradient), fused, np.float64, 11)


def test_window_of_a_single_alignment(loss, implementation):
    """Each label allowed in one frame only: minus the log-prob of that path, every arc with posterior 1."""
    if loss is not losses.RNNT:
        pytest.skip("written for the standard lattice")
    p = losses.problem(3, 6, 3, 5, lengths=([6, 5, 6], [3, 2, 3]))
    frames = np.array([[0, 2, 5], [1, 1, -9], [0, 0, 0]], np.int32)
    got = losses.evaluate(loss, p, implementation, label_windows=np.stack([frames, frames], -1))
    log_probs = truth.log_softmax(p.logits)
    for b in range(3):
        u, score = 0, 0.0
        used = np.zeros(p.logits.shape[1:3], bool)
        for t in range(p.logit_lengths[b]):
            while u < p.target_lengths[b] and frames[b, u] == t:
                score += log_probs[b, t, u, p.targets[b, u]]
                used[t, u] = True
                u += 1
            score += log_probs[b, t, u, -1]
            used[t, u] = True
        np.testing.assert_allclose(got[0][b], -score, rtol=EXACT)
        np.testing.assert_array_equal(got[1][b].any(-1), used)


def test_windows_partition_the_paths(implementation):
    """Label 0 in frames [0, 2] or in [3, 6]: the two probabilities add up to the whole."""
    p = losses.problem(lengths=([7] * 4, [4] * 4))
    whole = np.tile(np.array([0, 6], np.int32), (4, 4, 1))
    early, late = whole.copy(), whole.copy()
    early[:, 0], late[:, 0] = [0, 2], [3, 6]
    value = {}
    for name, windows in (("whole", whole), ("early", early), ("late", late), ("none", None)):
        value[name], _ = losses.evaluate(losses.RNNT, p, implementation, label_windows=windows)
    np.testing.assert_allclose(np.logaddexp(-value["early"], -value["late"]), -value["whole"], rtol=EXACT)
    np.testing.assert_allclose(value["whole"], value["none"], rtol=EXACT)


def test_probabilities_of_all_targets_add_up(implementation):
    """T frames, one label class: the probabilities of U = 0, 1, 2 ... labels sum to 1."""
    U = 60
    logits = np.full((1, 2, U + 1, 2), 0.0)
    logits[..., 1] = np.random.default_rng(0).normal(2, 0.3, logits.shape[:-1])
    batch = np.repeat(logits, U + 1, 0)
    args = np.zeros((U + 1, U), np.int32), np.full(U + 1, 2, np.int32), np.arange(U + 1, dtype=np.int32)
    values = jax_rnnt.rnnt_loss(batch, *args, blank=1, reduction="none", implementation=implementation)
    np.testing.assert_allclose(np.exp(-np.asarray(values)).sum(), 1, rtol=1e-12)


def test_delay_penalty_is_a_change_of_label_scores(implementation, p):
    """Equal to adding it to the labels' log-probs by hand; nothing without labels."""
    penalty = 0.5
    log_probs = truth.log_softmax(p.logits)
    moved = log_probs.copy()
    for b in range(4):
        for u in range(p.target_lengths[b]):
            bonus = penalty * ((p.logit_lengths[b] - 1) / 2 - np.arange(7))
            moved[b, :, u, p.targets[b, u]] += bonus
    by_hand, _ = losses.evaluate(losses.RNNT, p._replace(logits=moved), implementation, fused_log_softmax=False)
    values, _ = losses.evaluate(losses.RNNT, p, implementation, delay_penalty=penalty)
    np.testing.assert_allclose(values, by_hand, rtol=EXACT)
    plain, _ = losses.evaluate(losses.RNNT, p, implementation)
    assert values[2] == plain[2]  # no labels, no penalty


def test_delay_penalty_moves_labels_forward(implementation, p):
    mean_frame = {}
    for penalty in (0.0, 1.0):
        _, label = posteriors(p, implementation, delay_penalty=penalty)
        mean_frame[penalty] = (label * np.arange(7)[:, None]).sum((1, 2))
    assert (mean_frame[1.0] < mean_frame[0.0])[[0, 1, 3]].all()


def test_fastemit_is_the_paper_s_gradient(implementation, p):
    """standard + lambda * posterior * (softmax - one hot)."""
    _, plain = losses.evaluate(losses.RNNT, p, implementation)
    _, scaled = losses.evaluate(losses.RNNT, p, implementation, fastemit_lambda=0.75)
    _, label = posteriors(p, implementation)
    one_hot = np.zeros_like(p.logits)
    for b in range(4):
        for u in range(p.target_lengths[b]):
            one_hot[b, :, u, p.targets[b, u]] = 1
    softmax = np.exp(truth.log_softmax(p.logits))
    np.testing.assert_allclose(scaled - plain, 0.75 * label[..., None] * (softmax - one_hot), atol=EXACT)


@pytest.mark.family("layouts")
def test_clamp_is_a_clip(loss, implementation):
    p = losses.problem(loss=loss)
    _, plain = losses.evaluate(loss, p, implementation)
    for clamp in (0.5, 0.125, 2.0**-10):
        _, clamped = losses.evaluate(loss, p, implementation, clamp=clamp)
        losses.assert_same_bits(clamped, np.clip(plain, -clamp, clamp))


def test_renaming_classes_changes_nothing(loss, implementation):
    p = losses.problem(loss=loss)
    if loss.extra_classes:
        pytest.skip("durations keep their places")
    order = np.random.default_rng(0).permutation(9)
    place = np.argsort(order)
    renamed = p._replace(logits=p.logits[..., order], targets=place[p.targets].astype(np.int32))
    values, gradient = losses.evaluate(loss, renamed, implementation, blank=int(place[0]))
    losses.assert_matches(
        (values, gradient[..., place]), losses.evaluate(loss, p, implementation, blank=0), np.float64, 11
    )


@pytest.mark.family("layouts")
def test_batch_is_independent(loss, implementation):
    p = losses.problem(loss=loss)
    order = [2, 0, 3, 1]
    values, gradient = losses.evaluate(loss, p, implementation)
    losses.assert_matches(
        losses.evaluate(loss, p.take(order), implementation), (values[order], gradient[order]), np.float64, 11
    )


def test_reductions_agree(loss, implementation):
    p = losses.problem(loss=loss)
    values, _ = losses.evaluate(loss, p, implementation)
    for reduction in ("none", "sum", "mean", "mean_target", "mean_volume"):
        expected, _ = truth.reduce(values, p.target_lengths, reduction)
        np.testing.assert_allclose(loss(*p, reduction=reduction, implementation=implementation), expected, rtol=EXACT)


def test_loss_object_is_the_function(implementation, p):
    options = {"blank": 2, "clamp": 0.25, "reduction": "sum", "fastemit_lambda": 0.5, "delay_penalty": 0.125}
    criterion = jax_rnnt.RNNTLoss(**options, implementation=implementation)
    np.testing.assert_array_equal(criterion(*p), jax_rnnt.rnnt_loss(*p, **options, implementation=implementation))
