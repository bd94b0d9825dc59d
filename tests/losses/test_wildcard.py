"""Are skips at both ends arcs as NeMo defines them? Every arc is written out here; layouts and options: `LOSSES`."""

import functools

import jax
import numpy as np
import pytest

import batches
import reference_numpy as truth
from jax_rnnt import WildcardRNNTLoss

T, U = 4, 2
EVERY = [(n, m) for n in range(1, T + 1) for m in range(U + 1)]
SKIPS = (0.0, 0.0), (-1.5, -0.5), (2.0, -3.0), (-40.0, -1.0), (None, 0.0), (-1.0, None), (-np.inf, -np.inf)


def explicit(logits, labels, skip_start, skip_end):
    """(topology, arcs) with an arc from (0, 0) to every (t, 0), and one from every (t, U_b) to (T_b - 1, U_b)."""
    topology, arcs, _ = truth.lattice(logits, labels)
    last, m = len(logits) - 1, len(labels)
    for name, skip, place in (("start", skip_start, lambda d: (0, 0)), ("end", skip_end, lambda d: (last - d, m))):
        for d in range(1, last + 1):
            slot = f"{name}+{d}"
            topology, arcs[slot] = (*topology, truth.Arc(slot, d, 0)), np.full((last + 1, m + 1), -np.inf)
            arcs[slot][place(d)] = -np.inf if skip is None else skip
    return topology, arcs


@functools.cache
def solved(skips):
    """(problem of every (T_b, U_b), [(paths, scores, log of their sum, posteriors of arcs) of each])"""
    p = batches.problem(len(EVERY), T, U, 5, lengths=list(zip(*EVERY)))
    rows = []
    for b, (n, m) in enumerate(EVERY):
        topology, arcs = explicit(p.logits[b, :n, : m + 1], p.targets[b, :m], *skips)
        paths = truth.enumerate_paths(topology, n, m)
        rows.append((paths, *truth.sum_of_paths(paths, arcs)))
    return p, rows


def value(skips, implementation=None, **options):
    return WildcardRNNTLoss(skip_start=skips[0], skip_end=skips[1], implementation=implementation, **options)


@pytest.mark.slow
def test_every_arc(kernel):
    """Loss, and its derivatives by both weights: minus the expected numbers of skips. Every (T_b, U_b)."""

    @jax.jit
    def run(leaves):
        of = lambda leaves: value((leaves.get("start"), leaves.get("end")), kernel, reduction="none")(*p)
        return of(leaves), jax.jacrev(of)(leaves)

    for skips in SKIPS:
        p, rows = solved(skips)
        values, derivatives = run({name: x for name, x in zip(("start", "end"), skips) if x is not None})
        np.testing.assert_allclose(values, [-row[2] for row in rows], rtol=1e-12, atol=1e-13)
        for name, found in derivatives.items():
            expected = [-sum(x.sum() for slot, x in row[3].items() if slot.startswith(name)) for row in rows]
            np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.quick("(None, 0.0)")
@pytest.mark.parametrize("skips", [SKIPS[1], SKIPS[4]], ids=str)
def test_questions(skips):
    """Posteriors by path; the best path is the best of the labels' frames, over whose skips its score adds up."""
    p, rows = solved(skips)
    loss = value(skips)
    blank, label = map(np.asarray, loss.posteriors(*p))
    score, frames = map(np.asarray, loss.align(*p))
    for b, ((n, m), (paths, scores, _, posteriors)) in enumerate(zip(EVERY, rows)):
        np.testing.assert_allclose(label[b, :n, : m + 1], posteriors["label"], atol=1e-12)
        emitted = label[b].sum(-1).cumsum() if m else np.zeros(T)  # labels until this frame
        if m == 1:
            np.testing.assert_allclose(blank[b, :n, 0], 1 - emitted[:n], atol=1e-12)
            np.testing.assert_allclose(blank[b, :n, 1], emitted[:n], atol=1e-12)
        if m == 0:
            np.testing.assert_allclose(blank[b, :n, 0], 1, atol=1e-12)
        ways = {}
        for path, x in zip(paths, scores, strict=True):
            where = tuple(t for slot, t, _ in path if slot == "label")
            ways[where] = np.logaddexp(ways.get(where, -np.inf), x)
        best = max(ways, key=ways.get)
        np.testing.assert_allclose(score[b], ways[best], rtol=1e-12, atol=1e-13)
        assert frames[b].tolist() == [*best, *[-1] * (U - m)]


@pytest.mark.slow
def test_blanks_that_are_impossible(kernel):
    """A skip passes a frame whose blank is impossible, and counts only there."""
    p = batches.problem(1, 4, 2, 5, lengths=([4], [2]))
    p.logits[0, 1, 0, -1] = p.logits[0, 2, 2, -1] = -np.inf
    topology, arcs = explicit(p.logits[0], p.targets[0], -1.0, 0.5)
    expected = truth.sum_of_paths(truth.enumerate_paths(topology, 4, 2), arcs)[1]
    loss = value((-1.0, 0.5), kernel)
    np.testing.assert_allclose(loss(*p), -expected, rtol=1e-12)
    assert np.isfinite(jax.grad(lambda x: loss(x, *p[1:]))(p.logits)).all()


@pytest.mark.slow
def test_long_utterance():
    """In float32 at T = 1000, values and gradients by the weights are those of float64.

    Blanks of the first and last columns multiply to e^-300 and less, and in the other half of the batch to nearly 1.
    """
    p = batches.problem(2, 1000, 20, 8, lengths=([1000, 991], [20, 17]), scale=1.0)
    p.logits[1, :, :, -1] += 12
    p = p.astype(np.float32)
    run = jax.jit(jax.value_and_grad(lambda skips, p: value(skips, reduction="sum")(*p)))
    for skip in (-30.0, -3.0, 0.0):
        found, exact = (run((np.dtype(x).type(skip),) * 2, p.astype(x)) for x in (np.float32, np.float64))
        np.testing.assert_allclose(found[0], exact[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], exact[1], rtol=1e-5, atol=1e-6)
