"""Is the alignment the best path, are its frames those of the path, and are ties always broken in the same way?"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import lattices
from jax_rnnt.lattices._viterbi import best_path
from topologies import EVERY, TOPOLOGIES, T, U, arcs_of
from vectors import LABELS, LENGTHS, X

EXACT = 1e-13


def best_of_all(topology, arcs, num_frames, num_labels):
    """(score, frames) of the best path, by enumeration."""
    paths = truth.enumerate_paths(topology, num_frames, num_labels)
    scores = [sum(arcs[slot][t, u] for slot, t, u in path) for path in paths]
    if not paths or max(scores) == -np.inf:
        return -np.inf, [-1] * num_labels
    path = paths[int(np.argmax(scores))]
    return max(scores), [t for slot, t, _ in path if slot.startswith("label")]


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_best_path(topology):
    """Every (T, U) up to (5, 3) on every topology, some arcs forbidden, garbage outside the lengths."""
    arcs = arcs_of(topology[1])
    rng = np.random.default_rng(1)
    arcs = {k: np.where(rng.random(x.shape) < 0.15, -np.inf, x) for k, x in arcs.items()}
    frames, labels = np.array(EVERY, np.int32).T
    outside = (np.arange(T)[:, None] >= frames[:, None, None]) | (np.arange(U + 1) > labels[:, None, None])
    dirty = {k: np.where(outside, np.nan, x) for k, x in arcs.items()}
    score, emitted = jax.jit(lambda *a: best_path(topology[0], *a))(dirty, frames, labels)
    for b, (n, m) in enumerate(EVERY):
        expected, where = best_of_all(topology[1], {k: x[b] for k, x in arcs.items()}, n, m)
        np.testing.assert_allclose(score[b], expected, rtol=EXACT, err_msg=f"T={n}, U={m}")
        np.testing.assert_array_equal(emitted[b], where + [-1] * (U - m), err_msg=f"T={n}, U={m}")


def test_vector():
    """Numbers from the formula, since no other library has a forced alignment."""
    score, frames = jax_rnnt.rnnt_align(X, LABELS, *LENGTHS, blank=0)
    np.testing.assert_allclose(score, -15.255785035, rtol=1e-9)
    assert frames.dtype == jnp.int32 and frames.tolist() == [0, 2, 2]
    expected = jax_rnnt.expected_emission_frames(X, LABELS, *LENGTHS, blank=0)
    np.testing.assert_allclose((expected + 1).sum(), 8.678643171, rtol=1e-9)  # there frames count from 1


def sequences(loss, p):
    """(b, T_b, U_b, topology, arcs) of every sequence."""
    for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths, strict=True)):
        yield b, n, m, *loss.lattice(p.logits[b, :n, : m + 1], p.targets[b, :m])


@pytest.mark.family("quick")
def test_align(loss, implementation):
    p = losses.problem(loss=loss)
    implementation = None if implementation == "kernel" else implementation  # the search has no kernel
    score, frames = jax_rnnt.rnnt_align(*losses.poisoned(p), loss=loss.value(implementation=implementation))
    for b, n, m, topology, arcs in sequences(loss, p):
        expected, where = best_of_all(topology, arcs, n, m)
        np.testing.assert_allclose(score[b], expected, rtol=EXACT)
        np.testing.assert_array_equal(frames[b], where + [-1] * (4 - m))


def by_kind(posteriors):
    """Posteriors of blanks and of labels, summed over durations."""
    return [sum(x for slot, x in posteriors.items() if slot.startswith(kind)) for kind in ("blank", "label")]


def assert_posteriors(got, frames, sequences):
    """(blank, label) of `rnnt_posteriors` and the expected frames against the truth; nothing outside the lengths."""
    for b, n, m, topology, arcs in sequences:
        expected = by_kind(truth.posteriors(topology, arcs, n, m)[1])
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x[b, :n, : m + 1], y, atol=EXACT)
            assert not x[b, n:].any() and not x[b, :, m + 1 :].any()
        mean = (np.arange(n)[:, None] * expected[1]).sum(0)[:m]
        np.testing.assert_allclose(frames[b], np.append(mean, [0] * (frames.shape[1] - m)), atol=EXACT)


@pytest.mark.family
def test_posteriors_and_expected_frames(loss, implementation):
    p = losses.problem(loss=loss)
    options = {"loss": loss.value(implementation=implementation)}
    got = jax_rnnt.rnnt_posteriors(*losses.poisoned(p), **options)
    assert_posteriors(got, jax_rnnt.expected_emission_frames(*losses.poisoned(p), **options), sequences(loss, p))
    np.testing.assert_allclose(got[1].sum((1, 2)), p.target_lengths, atol=EXACT)
    latency = loss.value(implementation=implementation, reduction="none").latency(*p)
    frames = np.asarray(jax_rnnt.expected_emission_frames(*p, **options))
    counted = np.where(np.arange(4) < p.target_lengths[:, None], frames + 1, 0).sum(1)
    np.testing.assert_allclose(latency, counted / np.maximum(p.target_lengths, 1), atol=EXACT)


@pytest.mark.parametrize("sampled", [False, True])
def test_durations_arc_by_arc(kernel, sampled):
    """With FastEmit or sampling, each pair of token and duration is an arc; posteriors stay the same."""
    p = losses.problem(loss=losses.TDT)
    options = {"omega": 1.0} if sampled else {"fastemit_lambda": 0.5}
    options = {"loss": losses.TDT.value(**options, implementation=kernel), "key": jax.random.key(0)}
    expected = sequences(losses.RNNT, p._replace(logits=p.logits[..., :-3])) if sampled else sequences(losses.TDT, p)
    got = jax_rnnt.rnnt_posteriors(*p, **options)
    assert_posteriors(got, jax_rnnt.expected_emission_frames(*p, **options), expected)


@pytest.mark.parametrize("topology", ["standard", "monotonic", "constrained"])
@pytest.mark.parametrize("hat", [False, True])
def test_band(kernel, topology, hat):
    """Results for a band have the shape of the whole lattice, with the other nodes forbidden."""
    p, width = losses.problem(), 3
    first = np.array([[0, 0, 0, 1, 1, 2, 2], [0] * 7, [0] * 7, [0, 0, 1, 1, 1, 1, 1]], np.int32)
    column = first[..., None] + np.arange(width)
    band = np.take_along_axis(p.logits, column[..., None], 2)
    band = jax_rnnt.BandLogits(band, first)
    alone = {"standard": losses.RNNT, "monotonic": losses.MONOTONIC, "constrained": losses.CONSTRAINED}[topology]
    options = dict(alone.truth)
    loss = alone.value(implementation=kernel)
    if hat:
        emission = {"constrained": constrained_hat}.get(topology, truth.hat_emission)
        alone = losses.Loss("hat", None, None, {**options, "emission": emission})
        loss = jax_rnnt.HATLoss(topology=topology, implementation=kernel)

    def forbidden():
        for b, n, m, arcs_of_truth, arcs in sequences(alone, p):
            place = np.arange(m + 1) - first[b, :n, None]
            inside = (place >= 0) & (place < width)
            arcs = {slot: np.where(inside, x, -np.inf) for slot, x in arcs.items()}
            if topology == "constrained":  # the blank after a label lies in the band, too
                arcs["label"][:, :-1] = np.where(inside[:, 1:], arcs["label"][:, :-1], -np.inf)
            yield b, n, m, arcs_of_truth, arcs

    got = jax_rnnt.rnnt_posteriors(band, *p[1:], loss=loss)
    frames = jax_rnnt.expected_emission_frames(band, *p[1:], loss=loss)
    assert_posteriors(got, frames, forbidden())
    score, frames = dataclasses.replace(loss, implementation=None).align(band, *p[1:])
    for b, n, m, arcs_of_truth, arcs in forbidden():
        expected, where = best_of_all(arcs_of_truth, arcs, n, m)
        np.testing.assert_allclose(score[b], expected, rtol=EXACT)
        np.testing.assert_array_equal(frames[b], where + [-1] * (4 - m))


def constrained_hat(logits, labels, *, blank):
    """HAT's arcs, with k2's constraint."""
    arcs, _ = truth.hat_emission(logits, labels, blank=blank)
    after = np.full_like(arcs["blank"], -np.inf)
    after[:, :-1] = arcs["blank"][:, 1:]
    return {**arcs, "label": arcs["label"] + after}, None


def test_packed(implementation):
    p = losses.problem()
    rows = jax_rnnt.PackedLogits(losses.packed(p, p.logits), max_frames=7)
    got = jax_rnnt.rnnt_posteriors(rows, *p[1:], implementation=implementation)
    frames = jax_rnnt.expected_emission_frames(rows, *p[1:], implementation=implementation)
    assert_posteriors(got, frames, sequences(losses.RNNT, p))
    for x, y in zip(jax_rnnt.rnnt_align(rows, *p[1:]), jax_rnnt.rnnt_align(*p), strict=True):
        losses.assert_same_bits(x, y)


def test_options_of_the_call_or_of_the_loss():
    """An option may come from the call or the loss, but not both. Options of value or gradient alone have no effect."""
    p = losses.problem()
    windows = {"label_windows": np.array([[[0, 6]] * 4] * 4, np.int32)}
    given = {"blank": 3, "delay_penalty": 0.25}
    expected = jax_rnnt.rnnt_posteriors(*p, **given, **windows)
    loss = jax_rnnt.RNNTLoss(**given, reduction="sum", clamp=0.5)
    for x, y in zip(jax_rnnt.rnnt_posteriors(*p, loss=loss, **windows), expected, strict=True):
        losses.assert_same_bits(x, y)
    for option, value in (("blank", 3), ("blank", -1), ("delay_penalty", 0.25), ("implementation", None)):
        with pytest.raises(TypeError, match=rf"rnnt_posteriors: {option} must be given in loss alone"):
            jax_rnnt.rnnt_posteriors(*p, loss=loss, **{option: value})
    joint = jax_rnnt.LinearJoint(np.zeros((9, 5)))
    arguments = joint, np.zeros((4, 7, 9)), np.zeros((4, 5, 9)), *p[1:]
    for option, value in (
        ("reduction", "mean"),
        ("clamp", -1.0),
        ("fastemit_lambda", 0.0),
        ("fused_log_softmax", True),
    ):
        with pytest.raises(TypeError, match=rf"joint_rnnt_loss: {option} must be given in loss alone"):
            jax_rnnt.joint_rnnt_loss(*arguments, loss=jax_rnnt.RNNTLoss(reduction="sum"), **{option: value})


@pytest.mark.parametrize("function", ["rnnt_posteriors", "expected_emission_frames", "minimum_latency", "rnnt_align"])
def test_unsuitable_losses(function):
    p = losses.problem()
    bound = functools.partial(jax_rnnt.tdt_loss, durations=[0, 1])
    for loss in ("tdt", None, lambda **_: 0.0, jax_rnnt.rnnt_loss, jax_rnnt.RNNTLoss, bound):
        with pytest.raises(TypeError, match=rf"{function}: loss must be a TransducerLoss, .*RNNTLoss, TDTLoss.* got"):
            getattr(jax_rnnt, function)(*p, loss=loss)
    for logits in (None, "logits", [[1.0], [1.0, 2.0]], p.logits.astype(int)):
        with pytest.raises((TypeError, ValueError), match=rf"{function}.*logits must"):
            getattr(jax_rnnt, function)(logits, *p[1:])
    with pytest.raises(ValueError, match=rf"{function}: blank must lie in"):
        getattr(jax_rnnt, function)(*p, loss=jax_rnnt.RNNTLoss(blank=9))


def test_ties_prefer_blank():
    """With equal paths, the search back from the end takes blanks first, so every label comes as early as possible."""
    p = losses.problem(1, 6, 3, 5, lengths=([6], [3]), dtype=np.float32)
    for logits in (np.zeros_like(p.logits), np.full_like(p.logits, 0.1)):
        for name, expected in (("rnnt", [0, 0, 0]), ("monotonic", [0, 1, 2]), ("constrained", [0, 1, 2])):
            loss = next(loss for loss in losses.LOSSES if loss.name == name)
            _, frames = jax_rnnt.rnnt_align(logits, *p[1:], loss=loss.value())
            assert frames[0].tolist() == expected, name
    windows = np.array([[[1, 4], [1, 5], [3, 5]]], np.int32)
    assert jax_rnnt.rnnt_align(np.zeros_like(p.logits), *p[1:], label_windows=windows)[1].tolist() == [[1, 1, 3]]


@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_best_path_of_a_long_utterance(spread):
    """float32 scores of thousands: the path is that of float64, even if paths differ by less than float32 resolves."""
    T, U = 2000, 300
    rng = np.random.default_rng(0)
    arcs = {slot: rng.normal(-3, spread, (T, U + 1)).astype(np.float32) for slot in ("blank", "label")}
    lengths = np.int32(T), np.int32(U)
    score, frames = jax.jit(lambda a: best_path(lattices.STANDARD, a, *lengths))(arcs)
    wide = {k: x.astype(np.float64) for k, x in arcs.items()}
    expected, exact = jax.jit(lambda a: best_path(lattices.STANDARD, a, *lengths))(wide)
    np.testing.assert_allclose(score, expected, rtol=1e-6)
    np.testing.assert_array_equal(frames, exact)


def test_odd_sequences():
    p = losses.problem(6, lengths=([7, 0, 0, 8, 7, 7], [4, 0, 2, 1, 2, 2]))
    p.logits[4, 3, 1, 2] = np.nan
    p.logits[5, 3] = -np.inf
    score, frames = jax_rnnt.rnnt_align(*p)
    alone, alone_frames = jax_rnnt.rnnt_align(*p.take(slice(1)))
    losses.assert_same_bits(np.asarray(score)[:1], alone)
    losses.assert_same_bits(np.asarray(frames)[:1], alone_frames)
    np.testing.assert_array_equal(score[1:], [0, -np.inf, np.nan, np.nan, -np.inf])
    assert (np.asarray(frames)[1:] == -1).all()
    with pytest.raises(NotImplementedError, match="implementation='kernel'"):
        jax_rnnt.rnnt_align(*p, implementation="kernel")


def test_gradient_of_the_score_is_its_path():
    p = losses.problem()
    call = lambda x: jax_rnnt.rnnt_align(x, *p[1:], fused_log_softmax=False)[0].sum()
    gradient = np.asarray(jax.grad(call)(jnp.asarray(p.logits)))
    assert set(np.unique(gradient)) == {0.0, 1.0}
    np.testing.assert_array_equal(gradient.sum((1, 2, 3)), p.logit_lengths + p.target_lengths)


def test_vmap_and_shard_map(devices):
    p = losses.problem(16, dtype=np.float32)
    expected = jax_rnnt.rnnt_align(*p)
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    mapped = jax.shard_map(jax_rnnt.rnnt_align, mesh=mesh, in_specs=spec, out_specs=spec)
    for got in (jax.vmap(jax_rnnt.rnnt_align)(*p), jax.jit(mapped)(*p)):
        np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
        np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.family("slow")
def test_expected_frames_have_a_gradient(loss, implementation):
    """Their sum is a latency to train on; finite differences confirm it, and the loss's FastEmit does not enter."""
    p = losses.problem(2, 3, 2, 5, loss=loss, scale=1.0, lengths=([3, 3], [2, 1]))
    options = {"loss": loss.value(fastemit_lambda=1.0, implementation=implementation)}
    call = jax.jit(lambda x: jax_rnnt.expected_emission_frames(x, *p[1:], **options).sum())
    gradient = jax.grad(call)(p.logits)
    direction = np.random.default_rng(0).normal(size=p.logits.shape)
    slope = (call(p.logits + 1e-5 * direction) - call(p.logits - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-9)


@pytest.mark.rare("reference")
def test_minimum_latency(implementation):
    """The value of TransducerLoss.jl's formula; the gradient is its slope; odd sequences affect no other."""
    options = {"blank": 0, "implementation": implementation}
    value = jax_rnnt.rnnt_loss(X, LABELS, *LENGTHS, **options)
    latency = jax_rnnt.minimum_latency(X, LABELS, *LENGTHS, **options)
    np.testing.assert_allclose(value + 0.1 * latency, 13.753066395, rtol=1e-9)

    p = losses.problem(5, 4, 2, 4, scale=1.0, lengths=([4, 3, 4, 0, 5], [2, 1, 0, 1, 1]))
    p.logits[1, 0, 1] = -np.inf
    call = jax.jit(lambda x: jax_rnnt.minimum_latency(x, *p[1:], reduction="none", implementation=implementation))
    values, pull = jax.vjp(call, jnp.asarray(p.logits))
    gradient = np.asarray(pull(jnp.array([1.0, 2.0, 1.0, 1.0, 0.0]))[0])
    np.testing.assert_array_equal(values[2:], [0, 0, np.nan])
    assert np.isfinite(gradient).all() and not gradient[3:].any()
    for b, weight in ((0, 1), (1, 2)):
        step = np.where(np.isfinite(p.logits[b]), np.random.default_rng(b).normal(size=p.logits[b].shape), 0)
        up, down = p.logits.copy(), p.logits.copy()
        up[b] += 1e-5 * step
        down[b] -= 1e-5 * step
        slope = weight * (call(up)[b] - call(down)[b]) / 2e-5
        np.testing.assert_allclose((gradient[b] * step).sum(), slope, rtol=1e-6, atol=1e-9)
