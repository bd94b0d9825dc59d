"""Is the alignment the best of all paths, its frames those of the path, and do ties fall the same way every time?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import lattices
from jax_rnnt.lattices.viterbi import best_path
from test_lattices import EVERY, TOPOLOGIES, T, U, arcs_of
from test_vectors import LABELS, LENGTHS, X

EXACT = 1e-13
NAMES = ("standard", "monotonic", "constrained")
TRUTH = {
    "standard": (truth.STANDARD, truth.softmax_emission),
    "monotonic": (truth.MONOTONIC, truth.softmax_emission),
    "constrained": (truth.MONOTONIC, truth.constrained_emission),
}


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
    """By the formula; no other library has a forced alignment."""
    score, frames = jax_rnnt.rnnt_align(X, LABELS, *LENGTHS, blank=0)
    np.testing.assert_allclose(score, -15.255785035, rtol=1e-9)
    assert frames.dtype == jnp.int32 and frames.tolist() == [0, 2, 2]
    expected = jax_rnnt.expected_emission_frames(X, LABELS, *LENGTHS, blank=0)
    np.testing.assert_allclose((expected + 1).sum(), 8.678643171, rtol=1e-9)  # there frames count from 1


@pytest.mark.parametrize("topology", NAMES)
def test_align(topology):
    p = losses.problem()
    arcs_of_truth, emission = TRUTH[topology]
    for implementation in (None, "reference"):
        score, frames = jax_rnnt.rnnt_align(*losses.poisoned(p), topology=topology, implementation=implementation)
        for b in range(4):
            n, m = p.logit_lengths[b], p.target_lengths[b]
            arcs, _ = emission(p.logits[b, :n, : m + 1], np.append(p.targets[b, :m], -1).astype(int), blank=8)
            expected, where = best_of_all(arcs_of_truth, arcs, n, m)
            np.testing.assert_allclose(score[b], expected, rtol=EXACT)
            np.testing.assert_array_equal(frames[b], where + [-1] * (4 - m))


def test_ties_prefer_blank():
    """All paths alike: the last arc is a blank as long as it can be, so every label comes as early as it may."""
    p = losses.problem(1, 6, 3, 5, lengths=([6], [3]), dtype=np.float32)
    for logits in (np.zeros_like(p.logits), np.full_like(p.logits, 0.1)):
        for topology, expected in (("standard", [0, 0, 0]), ("monotonic", [0, 1, 2]), ("constrained", [0, 1, 2])):
            _, frames = jax_rnnt.rnnt_align(logits, *p[1:], topology=topology)
            assert frames[0].tolist() == expected, topology
    windows = np.array([[[1, 4], [1, 5], [3, 5]]], np.int32)
    assert jax_rnnt.rnnt_align(np.zeros_like(p.logits), *p[1:], label_windows=windows)[1].tolist() == [[1, 1, 3]]


@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_best_path_of_a_long_utterance(spread):
    """float32 scores of thousands: the path is that of float64, also where paths differ by less than float32 adds."""
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


@pytest.mark.parametrize("topology", NAMES)
def test_posteriors_and_expected_frames(implementation, topology):
    p = losses.problem()
    arcs_of_truth, emission = TRUTH[topology]
    blank, label = jax_rnnt.rnnt_posteriors(*losses.poisoned(p), topology=topology, implementation=implementation)
    frames = jax_rnnt.expected_emission_frames(*losses.poisoned(p), topology=topology, implementation=implementation)
    for b in range(4):
        n, m = p.logit_lengths[b], p.target_lengths[b]
        arcs, _ = emission(p.logits[b, :n, : m + 1], np.append(p.targets[b, :m], -1).astype(int), blank=8)
        _, expected = truth.posteriors(arcs_of_truth, arcs, n, m)
        np.testing.assert_allclose(blank[b, :n, : m + 1], expected["blank"], atol=EXACT)
        np.testing.assert_allclose(label[b, :n, : m + 1], expected["label"], atol=EXACT)
        mean = (np.arange(n)[:, None] * expected["label"]).sum(0)[:m]
        np.testing.assert_allclose(frames[b], np.append(mean, [0] * (4 - m)), atol=EXACT)


def test_expected_frames_have_a_gradient():
    """Their sum is a latency to train on: finite differences."""
    p = losses.problem(2, 3, 2, 4, scale=1.0, lengths=([3, 2], [2, 1]))
    call = jax.jit(lambda x: jax_rnnt.expected_emission_frames(x, *p[1:]).sum())
    gradient = jax.grad(call)(p.logits)
    direction = np.random.default_rng(0).normal(size=p.logits.shape)
    slope = (call(p.logits + 1e-5 * direction) - call(p.logits - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6)


def test_minimum_latency(implementation):
    """The number of TransducerLoss.jl's formula; a gradient that is a slope; odd sequences by themselves."""
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
