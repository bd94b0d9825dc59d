"""Is the simple loss that of am + lm, are the ranges k2's, and is the pruned loss that of its band?"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from topologies import BY_TOPOLOGY, FAMILY, IN_TRUTH, fused
from vectors import LABELS, LENGTHS

EXACT = 1e-12
t, u, v = np.arange(5)[:, None], np.arange(4)[:, None], np.arange(6)
AM, LM = 2 * np.sin(1 + 3 * t + 7 * v), 2 * np.cos(2 + 5 * u + 3 * v)


def ranges(lengths, width, planes, **options):
    """`prune_ranges` for (T_b, U_b) and posteriors (of blanks, of labels)."""
    names = "logit_lengths", "target_lengths", "blank_posteriors", "label_posteriors"
    return jax_rnnt.prune_ranges(**dict(zip(names, (*lengths, *planes))), width=width, **options)


def simple_problem(B=4, dtype=np.float64, scale=2.0):
    """am, lm and the problem whose logits are their sum."""
    p = losses.problem(B)
    rng = np.random.default_rng(5)
    am, lm = rng.normal(0, scale, (B, 7, 9)).astype(dtype), rng.normal(0, scale, (B, 5, 9)).astype(dtype)
    return am, lm, p._replace(logits=am[:, :, None].astype(np.float64) + lm[:, None].astype(np.float64))


def poisoned_heads(am, lm, p):
    am = np.where(np.arange(7)[:, None] < p.logit_lengths[:, None, None], am, np.nan)
    return am, np.where(np.arange(5)[:, None] <= p.target_lengths[:, None, None], lm, np.nan)


# --------------------------------------------------------------------------------------------------------- vectors


def test_vectors_of_the_simple_loss():
    """fast_rnnt."""
    call = lambda am, lm, **o: jax_rnnt.simple_rnnt_loss(am, lm, LABELS, *LENGTHS, blank=0, **o)
    value, gradients = jax.value_and_grad(call, (0, 1))(AM, LM)
    np.testing.assert_allclose(value, 13.946255752, rtol=1e-9)
    np.testing.assert_allclose([np.abs(g).sum() for g in gradients], [8.882651222, 8.983783374], rtol=1e-9)
    np.testing.assert_allclose(call(AM, LM, topology="monotonic"), 8.533267626, rtol=1e-9)
    np.testing.assert_allclose(call(AM, LM, delay_penalty=0.1), 13.874540574, rtol=1e-9)
    for scales, expected, wanted in (
        ((0.1, 0.1), 13.875060464, 7.953364928),
        ((0.25, 0.15), 13.720407677, 6.609245613),
    ):
        smoothed = lambda am, s=scales: call(am, LM, lm_only_scale=s[0], am_only_scale=s[1])
        value, gradient = jax.value_and_grad(smoothed)(AM)
        np.testing.assert_allclose(value, expected, rtol=1e-9)
        np.testing.assert_allclose(np.abs(gradient).sum(), wanted, rtol=1e-9)


RANGES = {  # width -> (first, pruned loss)
    "standard": {
        2: ([0, 1, 1, 1, 2], 14.470983214),
        3: ([0, 0, 0, 1, 1], 13.950161025),
        4: ([0] * 5, 13.946255752),
        7: ([0] * 5, 13.946255752),
    },
    "monotonic": {2: ([0, 0, 1, 1, 2], 8.544806275), 3: ([0, 0, 0, 1, 1], 8.533267626)},
}


@pytest.mark.rare("reference")
@pytest.mark.parametrize("topology", RANGES)
def test_vectors_of_ranges(implementation, topology):
    """fast_rnnt."""
    call = lambda **o: jax_rnnt.simple_rnnt_loss(AM, LM, LABELS, *LENGTHS, blank=0, topology=topology, **o)
    _, (blank, label) = call(return_posteriors=True)
    for width, (expected, value) in RANGES[topology].items():
        first = ranges(LENGTHS, width, (blank, label), topology=topology)
        assert first.dtype == jnp.int32 and first.tolist() == expected
        am, lm = jax_rnnt.prune_inputs(AM, LM, first, width)
        got = jax_rnnt.pruned_rnnt_loss(
            am + lm, first, LABELS, *LENGTHS, blank=0, topology=topology, implementation=implementation
        )
        np.testing.assert_allclose(got, value, rtol=1e-9)


# ------------------------------------------------------------------------------------------------------ simple loss


@pytest.mark.rare("monotonic", "constrained")
@pytest.mark.parametrize("topology", FAMILY)
def test_simple_is_the_loss_of_the_sum(topology):
    am, lm, p = simple_problem()

    def call(am, lm):
        loss, posteriors = jax_rnnt.simple_rnnt_loss(
            am, lm, *p[1:], reduction="none", topology=topology, return_posteriors=True
        )
        return loss.sum(), (loss, posteriors)

    gradients, (values, posteriors) = jax.jit(jax.grad(call, (0, 1), has_aux=True))(*poisoned_heads(am, lm, p))
    expected, gradient = truth.loss_and_gradient(*p, **IN_TRUTH[topology])
    np.testing.assert_allclose(values, expected, rtol=EXACT)
    np.testing.assert_allclose(gradients[0], gradient.sum(2), atol=EXACT)
    np.testing.assert_allclose(gradients[1], gradient.sum(1), atol=EXACT)
    whole = {"standard": losses.RNNT, "monotonic": losses.MONOTONIC, "constrained": losses.CONSTRAINED}[topology]
    for got, wanted in zip(posteriors, whole.value().posteriors(*p), strict=True):
        np.testing.assert_allclose(got, wanted, atol=EXACT)
    reference = jax_rnnt.simple_rnnt_loss(
        am, lm, *p[1:], topology=topology, reduction="none", implementation="reference"
    )
    np.testing.assert_allclose(reference, expected, rtol=EXACT)


def smoothed_truth(am, lm, labels, lm_only, am_only, blank):
    """Arcs of one sequence by the formula of Kuang et al., one element at a time."""
    joint = truth.log_softmax(am[:, None] + lm[None])
    lm_alone = truth.log_softmax(lm)
    unigram = np.exp(lm_alone).mean(0)
    am_alone = am + np.log(unigram) - np.log((np.exp(am) * unigram).sum(-1, keepdims=True))
    mixed = (1 - lm_only - am_only) * joint + lm_only * lm_alone[None] + am_only * am_alone[:, None]
    label = np.full(mixed.shape[:2], -np.inf)
    for u, k in enumerate(labels):
        label[:, u] = mixed[:, u, k]
    return {"blank": mixed[..., blank], "label": label}


def test_smoothing_of_a_batch():
    """Each sequence has its own unigram, without its padding."""
    am, lm, p = simple_problem()
    values = jax_rnnt.simple_rnnt_loss(
        *poisoned_heads(am, lm, p), *p[1:], reduction="none", lm_only_scale=0.25, am_only_scale=0.1
    )
    for b in range(4):
        n, m = p.logit_lengths[b], p.target_lengths[b]
        arcs = smoothed_truth(am[b, :n], lm[b, : m + 1], p.targets[b, :m], 0.25, 0.1, 8)
        np.testing.assert_allclose(values[b], -truth.log_likelihood(truth.STANDARD, arcs, n, m), rtol=EXACT)


def test_unigram_of_the_batch():
    """k2's unigram, the mean over the batch, is given by the caller."""
    am, lm, p = simple_problem()
    unigram = np.exp(truth.log_softmax(lm)).mean((0, 1))
    call = lambda **o: jax_rnnt.simple_rnnt_loss(am, lm, *p[1:], am_only_scale=0.2, reduction="none", **o)
    np.testing.assert_allclose(call(unigram=unigram), call(unigram=np.tile(unigram, (4, 1))), rtol=EXACT)
    assert not np.allclose(call(unigram=unigram), call())


def test_simple_loss_slope():
    am, lm, p = simple_problem(2)
    options = {"lm_only_scale": 0.25, "am_only_scale": 0.1, "delay_penalty": 0.1}
    call = jax.jit(lambda am, lm: jax_rnnt.simple_rnnt_loss(am, lm, *p[1:], **options))
    gradients = jax.grad(call, (0, 1))(am, lm)
    rng = np.random.default_rng(0)
    steps = rng.normal(size=am.shape), rng.normal(size=lm.shape)
    up, down = (call(am + h * steps[0], lm + h * steps[1]) for h in (1e-5, -1e-5))
    slope = sum((g * s).sum() for g, s in zip(gradients, steps))
    np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-7)


def test_simple_loss_in_float32():
    am, lm, p = simple_problem(dtype=np.float32, scale=4.0)
    call = lambda am, lm: jax_rnnt.simple_rnnt_loss(am, lm, *p[1:], reduction="sum")
    value, gradients = jax.value_and_grad(call, (0, 1))(am, lm)
    expected, gradient = truth.loss_and_gradient(*p)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(gradients[0], gradient.sum(2), atol=1e-5)
    np.testing.assert_allclose(gradients[1], gradient.sum(1), atol=1e-5)


def test_simple_loss_of_odd_sequences():
    """-inf with and without a path, NaN, lengths out of range, peaks of am and lm in different classes."""
    am, lm, p = simple_problem(8)
    p = p._replace(
        logit_lengths=np.array([7, 7, 7, 7, 0, 0, 8, 5], np.int32),
        target_lengths=np.array([4, 4, 2, 2, 0, 1, 2, 2], np.int32),
    )
    clean = jax_rnnt.simple_rnnt_loss(am, lm, *p[1:], reduction="none")
    am[1, :, 3], lm[1, 2, 8] = -np.inf, -np.inf
    am[2, 3] = -np.inf
    am[3, 2, 1] = np.nan
    call = lambda am, lm: (lambda v: (v.sum(), v))(jax_rnnt.simple_rnnt_loss(am, lm, *p[1:], reduction="none"))
    gradients, values = jax.grad(call, (0, 1), has_aux=True)(am, lm)
    expected = truth.loss_and_gradient(am[:, :, None] + lm[:, None], *p[1:])[0]
    np.testing.assert_allclose(values, expected, rtol=EXACT)
    losses.assert_same_bits(np.asarray(values)[[0, 7]], np.asarray(clean)[[0, 7]])
    for g in gradients:
        assert np.isfinite(np.delete(np.asarray(g), 3, 0)).all() and not np.asarray(g)[[2, 4, 5, 6]].any()
    far = np.float32(1e4) * np.eye(9, dtype=np.float32)
    am, lm = far[np.arange(7) % 3], far[3 + np.arange(5) % 3]
    call = lambda am, lm: jax_rnnt.simple_rnnt_loss(am, lm, p.targets[0], np.int32(7), np.int32(4))
    value, gradients = jax.value_and_grad(call, (0, 1))(am, lm)
    assert np.isfinite(value) and value >= 0 and all(np.isfinite(g).all() for g in gradients)


# ----------------------------------------------------------------------------------------------------- pruned loss


def banded(p, first, width):
    """Logits [B, T, S, V] of the band; NaN where it leaves the columns."""
    out = np.full((*p.logits.shape[:2], width, p.logits.shape[-1]), np.nan)
    for b, n, s in np.ndindex(out.shape[:3]):
        if 0 <= first[b, n] + s < p.logits.shape[2]:
            out[b, n, s] = p.logits[b, n, first[b, n] + s]
    return out


@pytest.mark.rare("monotonic", "constrained")
@pytest.mark.parametrize("hat", [False, True], ids=["softmax", "hat"])
@pytest.mark.parametrize("topology", FAMILY)
def test_pruned_is_the_loss_with_other_nodes_forbidden(topology, hat):
    """For any band, also one without a path, the truth has -inf at all classes of the other nodes."""
    p = losses.problem()
    rng = np.random.default_rng(0)
    first = np.sort(rng.integers(-1, 3, (4, 7)), 1).astype(np.int32)
    first[:, 0] = np.minimum(first[:, 0], 0)
    first[1, 2:] = 4  # leaves (T_b, U_b) out
    width = 3
    emission = {"emission": truth.hat_emission} if hat else {}
    if hat and topology == "constrained":
        pytest.skip("the truth has no constrained HAT")
    column = np.arange(5)
    inside = (column >= first[..., None]) & (column < first[..., None] + width)
    logits = np.where(inside[..., None], p.logits, -np.inf)
    expected, gradient = truth.loss_and_gradient(
        logits, *p[1:], clamp=0.5, fastemit_lambda=0.25, **(IN_TRUTH[topology] | emission)
    )
    call = lambda x, i: jax_rnnt.pruned_rnnt_loss(
        x, first, *p[1:], clamp=0.5, fastemit_lambda=0.25, topology=topology, hat=hat, reduction="none",
        implementation=i,
    )  # fmt: skip
    for implementation in (None, "reference"):
        run = jax.jit(jax.grad(lambda x, i=implementation: (lambda v: (v.sum(), v))(call(x, i)), has_aux=True))
        got, values = run(banded(p, first, width))
        np.testing.assert_allclose(values, expected, rtol=EXACT)
        assert np.isposinf(expected[1])
        back = np.zeros_like(gradient)
        for b, n, s in np.ndindex(got.shape[:3]):
            if 0 <= first[b, n] + s < 5:
                back[b, n, first[b, n] + s] = got[b, n, s]
            else:
                assert not np.asarray(got)[b, n, s].any()
        np.testing.assert_allclose(back, gradient, atol=EXACT)


@pytest.mark.parametrize("topology", FAMILY)
def test_full_band_is_the_whole_lattice(kernel, topology):
    p = losses.poisoned(losses.problem())
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    options = {"delay_penalty": 0.3, "label_windows": windows, "reduction": "none", "implementation": kernel}
    first = np.zeros((4, 7), np.int32)
    got = jax_rnnt.pruned_rnnt_loss(p.logits, first, *p[1:], topology=topology, **options)
    np.testing.assert_allclose(got, BY_TOPOLOGY[topology](*p, **options), rtol=EXACT)
    options |= {"implementation": None, "topology": topology}
    got = jax_rnnt.pruned_rnnt_loss(p.logits, first, *p[1:], hat=True, **options)
    np.testing.assert_allclose(got, jax_rnnt.hat_loss(*p, **options), rtol=EXACT)


def test_ranges_of_a_ragged_batch():
    """Ranges start at 0, rise in steps below the width, contain (T_b, U_b) if possible, and ignore the batch."""
    am, lm, p = simple_problem()
    p = p._replace(target_lengths=np.array([4, 2, 0, 3], np.int32))
    _, posteriors = jax_rnnt.simple_rnnt_loss(*poisoned_heads(am, lm, p), *p[1:], return_posteriors=True)
    for topology, steps in (("standard", 1), ("constrained", 1)):
        for width in (2, 3):
            lengths = p.logit_lengths, p.target_lengths
            first = np.asarray(ranges(lengths, width, posteriors, topology=topology))
            most = width - 1 if topology == "standard" else steps
            assert (first[:, 0] == 0).all() and (np.diff(first) >= 0).all() and (np.diff(first) <= most).all()
            for b in range(4):
                assert first[b, p.logit_lengths[b] - 1] == max(p.target_lengths[b] - width + 1, 0)
                row = ranges([x[b] for x in lengths], width, [x[b] for x in posteriors], topology=topology)
                np.testing.assert_array_equal(row, first[b])


def test_posteriors_have_names():
    """k2 takes the plane of labels before that of blanks: neither order is accepted."""
    plane = np.full((5, 4), 0.5)
    with pytest.raises(TypeError, match="0 positional arguments"):
        jax_rnnt.prune_ranges(plane, plane, *LENGTHS, width=2)
    with pytest.raises(TypeError, match="'blank_posteriors' and 'label_posteriors'"):
        jax_rnnt.prune_ranges(logit_lengths=LENGTHS[0], target_lengths=LENGTHS[1], width=2)


@pytest.mark.parametrize(("topology", "steepest"), [("standard", None), ("monotonic", 1)])
@pytest.mark.parametrize("width", [2, 3, 6])
def test_ranges_of_any_posteriors(topology, steepest, width):
    """Random planes, which no lattice has, against the rule as loops. The last window contains the last column."""
    rng = np.random.default_rng(0)
    blank, label = rng.random((2, 50, 9, 8))
    frames, labels = rng.integers(1, 10, 50).astype(np.int32), rng.integers(0, 8, 50).astype(np.int32)
    # Under jit, since otherwise lengths without a path in a band of this width would be an error.
    call = jax.jit(lambda lengths, planes: ranges(lengths, width, planes, topology=topology))
    got = np.asarray(call((frames, labels), (blank, label)))
    most = steepest or width - 1
    for b in range(50):
        inside = [[blank[b, t, s : s + width].sum() for s in range(8 - width + 1)] for t in range(9)]
        entered = [[label[b, t, s - 1] if s else 0 for s in range(8 - width + 1)] for t in range(9)]
        first = np.argmax(np.subtract(inside, entered), 1)
        first[frames[b] - 1 :] = max(labels[b] - width + 1, 0)
        for t in range(7, -1, -1):
            first[t] = min(first[t], first[t + 1])
        for t in range(7, -1, -1):
            first[t] = max(first[t], first[t + 1] - most)
        np.testing.assert_array_equal(got[b], np.minimum(first, most * np.arange(9)))
    assert (np.diff(got) >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("topology", FAMILY)
def test_width_that_holds_no_path(topology):
    """Tries every band: known lengths raise if, and only if, no band of this width holds a path."""
    T, U = 4, 5
    uniform = {"blank": np.zeros((T, U + 1)), "label": np.zeros((T, U + 1))}
    rng = np.random.default_rng(0)
    planes = rng.random((2, T, U + 1))

    def any_path(n, m, inside):
        arcs = {slot: np.where(inside[:n], x[:n], -np.inf)[:, : m + 1] for slot, x in uniform.items()}
        if topology == "constrained":
            arcs["label"][:, :-1] += arcs["blank"][:, 1:]
        arcs["label"][:, m:] = -np.inf
        return np.isfinite(truth.log_likelihood(IN_TRUTH[topology].get("topology", truth.STANDARD), arcs, n, m))

    def band(first, width):
        column = np.arange(U + 1)
        return (column >= np.asarray(first)[:, None]) & (column < np.asarray(first)[:, None] + width)

    smallest = 2 if topology == "standard" else 1
    for n, m, width in itertools.product(range(1, T + 1), range(U + 1), range(smallest, 5)):
        lengths = np.int32(n), np.int32(m)
        call = lambda *lengths, w=width: ranges(lengths, w, planes, topology=topology)
        some_band = any(any_path(n, m, band(first, width)) for first in itertools.product(range(m + 1), repeat=n))
        if some_band or not any_path(n, m, band([0] * n, U + 1)):
            assert any_path(n, m, band(call(*lengths)[:n], width)) == some_band
            continue
        message = rf"width must be (\d+) .* T_b = {n} .* U_b = {m} .* got {width}"
        with pytest.raises(ValueError, match=message) as caught:
            call(*lengths)
        enough = int(re.search(r"be (\d+)", str(caught.value))[1])
        assert any_path(n, m, band(call(*lengths, w=enough)[:n], enough))
        with pytest.raises(ValueError, match="width"):
            call(*lengths, w=enough - 1)
        assert not any_path(n, m, band(jax.jit(call)(*lengths)[:n], width))


@pytest.mark.parametrize(("topology", "narrowest"), [("standard", 2), ("monotonic", 1), ("constrained", 2)])
def test_narrowest_band_of_one_label(topology, narrowest):
    """A monotonic label ends a frame; a constrained one also pays the blank of the next column."""
    call = lambda labels, width: ranges((3, labels), width, np.zeros((2, 3, 2)), topology=topology)
    call(np.int32(1), narrowest)
    with pytest.raises(ValueError, match=f"width must be {narrowest}"):
        call(np.int32(1), narrowest - 1)
    if topology != "standard":
        assert call(np.int32(0), 1).tolist() == [0, 0, 0]


def test_width_of_a_batch():
    """The error names the sequence that needs most. Lengths out of range and traced lengths raise nothing."""
    plane = np.zeros((2, 2, 4, 7))
    frames, labels = np.array([[2, 9], [4, 2]], np.uint8), np.array([[3, 6], [6, 6]], np.uint8)
    call = lambda frames, labels, plane=plane: ranges((frames, labels), 2, (plane, plane))
    message = r"prune_ranges: width must be 4 .* sequence \[1, 1\] with T_b = 2 frames and U_b = 6 labels.* got 2"
    for kind in (np.asarray, jnp.asarray):
        with pytest.raises(ValueError, match=message):
            call(kind(frames), kind(labels))
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda: call(frames, labels))()
    first = jax.jit(call)(frames, labels)
    assert jax.vmap(call)(frames, labels, plane).tolist() == first.tolist()
    logits, targets = np.zeros((2, 2, 4, 2, 5)), np.zeros((2, 2, 6), np.int32)
    values = jax_rnnt.pruned_rnnt_loss(logits, first, targets, frames, labels, reduction="none")
    np.testing.assert_array_equal(np.isposinf(values), [[True, False], [True, True]])


@pytest.mark.rare("reference-monotonic", "reference-constrained")
@pytest.mark.parametrize("topology", FAMILY)
def test_bands_that_go_back_or_start_late(implementation, topology):
    """The loss sums the enumerated paths inside the band; without one it is +inf with gradient 0."""
    T, U, width = 5, 3, 2
    bands = {
        "back": ([0, 1, 0, 1, 2], True),
        "far_back": ([0, 1, 2, 1, 2], True),
        "apart": ([0, 2, 2, 2, 2], False),
        "late_start": ([1, 1, 1, 2, 2], False),
        "early_end": ([0, 0, 1, 1, 1], topology == "monotonic"),
        "before_the_first_column": ([-1, 0, 0, 1, 2], True),
    }
    p = losses.problem(1, T, U, lengths=([T], [U]))
    for first, finite in bands.values():
        first = np.array([first], np.int32)
        column = np.arange(U + 1)
        inside = (column >= first[0, :, None]) & (column < first[0, :, None] + width)
        whole = np.where(inside[..., None], p.logits[0], -np.inf)
        options = {"emission": truth.softmax_emission, "topology": truth.STANDARD} | IN_TRUTH[topology]
        arcs, _ = options["emission"](whole, np.append(p.targets[0], -1), blank=8)
        expected = -truth.enumerate_log_likelihood(options["topology"], arcs, T, U)[0]
        assert np.isfinite(expected) == finite
        call = lambda x, f=first: jax_rnnt.pruned_rnnt_loss(
            x, f, *p[1:], topology=topology, implementation=fused(implementation)
        )
        value, gradient = jax.value_and_grad(call)(banded(p, first, width))
        np.testing.assert_allclose(value, expected, rtol=EXACT)
        assert np.isfinite(gradient).all() and np.any(gradient) == finite


def test_pruned_training_step(devices):
    """Both losses of a step, with the joint between them, are the same under shard_map and vmap."""
    am, lm, p = simple_problem(16, np.float32)

    def step(am, lm, *rest):
        simple, (blank, label) = jax_rnnt.simple_rnnt_loss(am, lm, *rest, reduction="none", return_posteriors=True)
        first = ranges(rest[1:], 3, (blank, label))
        a, b = jax_rnnt.prune_inputs(am, lm, first, 3)
        return simple + jax_rnnt.pruned_rnnt_loss(jnp.tanh(a + b), first, *rest, reduction="none")

    def value_and_gradient(step):
        def total(am, *rest):
            values = step(am, *rest)
            return values.sum(), values

        (_, values), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(am, lm, *p[1:])
        return values, gradient

    expected, gradient = value_and_gradient(step)
    assert np.isfinite(expected).all() and np.any(gradient)
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(step, mesh=jax.sharding.Mesh(np.array(devices), ("data",)), in_specs=spec, out_specs=spec)
    for other in (jax.vmap(step), mapped):
        values, got = value_and_gradient(other)
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        np.testing.assert_allclose(got, gradient, atol=1e-5)


def test_inputs_of_any_band():
    """Rows for the band's columns; outside the lattice the nearest column, so nothing poisons a gradient."""
    rng = np.random.default_rng(0)
    encoder, predictor = rng.normal(size=(2, 3, 4, 6)), rng.normal(size=(2, 3, 5, 7))
    first = rng.integers(-2, 6, (2, 3, 4)).astype(np.int32)
    got = jax_rnnt.prune_inputs(encoder, predictor, first, 3)
    for i, j, n, s in np.ndindex(2, 3, 4, 3):
        np.testing.assert_array_equal(got[0][i, j, n, s], encoder[i, j, n])
        np.testing.assert_array_equal(got[1][i, j, n, s], predictor[i, j, np.clip(first[i, j, n] + s, 0, 4)])


def test_messages():
    am, lm, p = simple_problem()
    first = np.zeros((4, 7), np.int32)
    plane = np.zeros((4, 7, 5))

    def ranges_of(width, label):
        return ranges(p[2:], width, (plane, label))

    cases = (
        (jax_rnnt.simple_rnnt_loss, (am, lm[:, :, :8], *p[1:]), {}, "lm"),
        (jax_rnnt.simple_rnnt_loss, (am[0, 0], lm, *p[1:]), {}, "am"),
        (jax_rnnt.simple_rnnt_loss, (am, lm, *p[1:]), {"topology": "ctc"}, "topology"),
        (jax_rnnt.simple_rnnt_loss, (am, lm, *p[1:]), {"unigram": np.zeros(3)}, "unigram"),
        (jax_rnnt.simple_rnnt_loss, (am, lm, *p[1:]), {"lm_only_scale": "1"}, "lm_only_scale"),
        (jax_rnnt.pruned_rnnt_loss, (p.logits, first[:, 1:], *p[1:]), {}, "first"),
        (jax_rnnt.pruned_rnnt_loss, (p.logits, first.astype(float), *p[1:]), {}, "first"),
        (jax_rnnt.pruned_rnnt_loss, (p.logits, first, *p[1:]), {"hat": 1}, "hat"),
        (ranges_of, (2, plane[:, 1:]), {}, "label_posteriors"),
        (ranges_of, (1, plane), {}, "width"),
        (ranges_of, (2.0, plane), {}, "width"),
        (jax_rnnt.prune_inputs, (am, lm[1:], first, 2), {}, "predictor_out"),
        (jax_rnnt.prune_inputs, (am, lm, first, 0), {}, "width"),
    )
    for function, arguments, options, name in cases:
        called = "prune_ranges" if function is ranges_of else function.__name__
        with pytest.raises((ValueError, TypeError), match=rf"{called}: {name} must"):
            function(*arguments, **options)
