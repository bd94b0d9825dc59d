"""Do searches with guarded phrases follow the definition in `decode.Guard`, loop by loop in float64?"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decoding
import family
from decoding import NAMED, ROOM, Model, allowed, assert_same, earned, moves, worth
from jax_rnnt import decode

PHRASES, WEIGHTS, DEPTH = [[0, 1], [0, 1, 1, 0], [1, 1, 0], [1, 0, 1]], [1.0, 2.0, 0.5, 1.5], 0.5
NEGATIVE = [1.0, -2.0, 0.5, 1.5]
REACH, CHARGED = {True: (0, 0.3), False: (2, 2)}, 0.3


class Guarded:
    """The definition: what phrases add to a label, by the labels since the last match that was broken."""

    def __init__(self, fusion, margin, blank_margin, most, greedy, weights=WEIGHTS):
        self.margins, self.greedy, self.weights, self.broken = (margin, blank_margin), greedy, weights, 0
        average = max(earned(len(x), w, DEPTH) / len(x) for x, w in zip(PHRASES, weights))
        self.scale = fusion * min(1, most / (fusion * average))

    def worth(self, labels, finished=False):
        return self.scale * worth(labels, PHRASES, self.weights, finished, DEPTH)

    def in_progress(self, since):
        return self.worth(since) - self.worth(since, True)

    def label(self, since, label, node):
        """(what is added to its score, to what greedy search chooses by, labels since the last broken match)."""
        best = {k: max((x for (y, _), x in node.items() if y == k), default=-math.inf) for k in (None, 0, 1)}
        below = max(best[0], best[1]) - best[label], best[None] - best[label]
        before = self.in_progress(since)
        gain = self.worth([*since, label]) - self.worth(since) + before
        start, share = REACH[self.greedy]
        margins = [min(x, start + share * before) for x in self.margins]
        breaks = gain > 1e-9 and any(x > margin for x, margin in zip(below, margins))
        self.broken += breaks
        gain = 0 if breaks else gain
        score = chosen = gain - before
        if before > 0:
            chosen = max(score, 0 if gain > 1e-9 else gain - CHARGED)
        return score, chosen, [] if breaks else [*since, label]


def greedy_loop(model, b, rule):
    t, written, total, labels, since = 0, 0, 0.0, [], []
    while t < model.lengths[b]:
        may_write = lambda limit: written < limit and len(labels) < ROOM
        node, choices = moves(model, b, t, tuple(labels)), []
        for label, reads, gain in allowed(model, b, t, tuple(labels), may_write, exact_end=False, max_symbols=2):
            score, chosen, after = (0, 0, since) if label is None else rule.label(since, label, node)
            choices.append((gain + chosen, gain + score, label, reads, after))
        _, gain, label, reads, after = max(choices, key=lambda x: x[0])
        total, since, t = total + gain, after, t + reads
        written = written + 1 if label is not None and not reads else 0
        labels += [] if label is None else [label]
    return labels, total - rule.in_progress(since)


def beam_loop(model, b, rule):
    """{labels: score} where each move reads a frame, so that equal labels are merged frame by frame."""
    beam = {(): (0.0, 0.0, [])}  # score, that of the best path, labels since a broken match
    for t in range(model.lengths[b]):
        after = {}
        for labels, (score, path, since) in beam.items():
            node = moves(model, b, t, labels)
            for (label, _), gain in node.items():
                more, _, then = (0, 0, since) if label is None else rule.label(since, label, node)
                new = labels if label is None else (*labels, label)
                after.setdefault(new, []).append((path + gain + more, score + gain + more, then))
        beam = {}
        for labels, found in after.items():
            path, _, since = max(found, key=lambda x: x[0])
            beam[labels] = np.logaddexp.reduce([x[1] for x in found]), path, since
    return {labels: score - rule.in_progress(since) for labels, (score, _, since) in beam.items()}


def phrases_of(weights=WEIGHTS):
    return decode.Phrases(PHRASES, weights, classes=2, depth=DEPTH)


@functools.partial(jax.jit, static_argnames=("verb", "loss", "sizes"))
def run(networks, encoder, lengths, phrases, fusion, guard, *, verb, loss, sizes, state=None):
    options = dict(max_symbols=2, fusion=((phrases, fusion),), guard=guard, state=state)
    return verb(loss.value(), networks.joint, networks.predictor, encoder, lengths, *sizes, **options)


# (weight of fusion, margin, blank_margin, most): the defaults of greedy search and of beams, others, and no guard.
SETTINGS = (
    (1.0, 5.0, 1.5, 2.5),
    (8.0, 8.0, 5.0, 1.0),
    (3.0, 0.7, 0.4, 4.0),
    (0.5, 2.0, 0.0, 0.3),
    (2.0, math.inf, math.inf, math.inf),
)


@pytest.mark.quick("tdt")
@pytest.mark.parametrize("loss", [family.RNNT, family.TDT, family.HAT], ids=str)
def test_greedy(loss):
    """Labels and scores are those of the loop; all numbers are traced, and one program has all settings."""
    model, broken = Model(loss, batch=24, frames=9), 0
    search = functools.partial(run, verb=decoding.greedy, loss=loss, sizes=(ROOM,))
    for fusion, *limits in SETTINGS:
        for weights in (WEIGHTS, NEGATIVE):
            given = model.parameters, model.encoder, model.lengths, phrases_of(weights), fusion
            found = search(*given, decode.Guard(*limits))
            for b in range(24):
                rule = Guarded(fusion, *limits, greedy=True, weights=weights)
                labels, score = greedy_loop(model, b, rule)
                assert found.labels[b, : found.counts[b]].tolist() == labels
                np.testing.assert_allclose(found.scores[b], score, rtol=1e-6, atol=1e-5)  # phrases are float32
                broken += rule.broken
    assert broken > 100


def test_beam():
    """With room for all labels, the scores are those of the loop, whatever the guard, and without one."""
    loss = NAMED["monotonic"]
    model = Model(loss, batch=3, frames=4)
    search = functools.partial(run, verb=decoding.beam, loss=loss, sizes=(4, 40))
    plain = search(model.parameters, model.encoder, model.lengths, phrases_of(), 2.0, None)
    for fusion, *limits in SETTINGS:
        found = search(model.parameters, model.encoder, model.lengths, phrases_of(), fusion, decode.Guard(*limits))
        for b in range(3):
            expected = beam_loop(model, b, Guarded(fusion, *limits, greedy=False))
            every = zip(found.labels[b].tolist(), found.counts[b], found.scores[b])
            scores = {tuple(x[:n]): s for x, n, s in every if s > -math.inf}
            assert scores.keys() == expected.keys()
            for labels, score in expected.items():
                np.testing.assert_allclose(scores[labels], score, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(found.scores, plain.scores, rtol=1e-6, atol=1e-5)  # the last setting guards nothing


def test_defaults():
    """None stands for the numbers of the verb; samples are drawn without a guard."""
    model = Model(family.RNNT, batch=8, frames=9)
    given = model.parameters, model.encoder, model.lengths, phrases_of(), 8.0
    for verb, sizes, numbers in (
        (decoding.greedy, (ROOM,), (5.0, 1.5, 2.5)),
        (decoding.beam, (ROOM, 4), (8.0, 5.0, 1.0)),
    ):
        search = functools.partial(run, *given, verb=verb, loss=family.RNNT, sizes=sizes)
        assert_same(search(decode.Guard())[:-1], search(decode.Guard(*numbers))[:-1])
        assert not np.array_equal(search(decode.Guard()).scores, search(None).scores)


def test_streams():
    """Parts of a stream, cut anywhere, find the bits of the whole, with lists of each utterance."""
    model = Model(family.TDT, batch=3, frames=12)
    model.lengths = np.array([12, 9, 4], np.int32)
    lists = decode.Phrases([PHRASES, [], PHRASES[:1]], 2.0, classes=2, size=16)
    for verb, sizes in ((decoding.greedy, (ROOM,)), (decoding.beam, (40, 5))):
        search = functools.partial(run, verb=verb, loss=family.TDT, sizes=sizes)
        go_on = lambda x, n, state, search=search: search(
            model.parameters, x, n, lists, 3.0, decode.Guard(), state=state
        )
        shapes = jax.eval_shape(lambda go_on=go_on: go_on(jnp.asarray(model.encoder), model.lengths, None)).state
        state = idle = decode.reset_streams(shapes, np.ones(3, bool))
        whole, start, scores = go_on(model.encoder, model.lengths, idle), 0, None
        for size in (5, 1, 6):
            part = np.zeros_like(model.encoder)
            part[:, :size] = model.encoder[:, start : start + size]
            found = go_on(part, np.clip(model.lengths - start, 0, size).astype(np.int32), state)
            state, start, scores = found.state, start + size, found.scores
        assert_same(scores, whole.scores)


@pytest.mark.parametrize(
    ("guard", "error", "message"),
    [
        (3.0, TypeError, r"Search: guard must be a Guard or None, got 3\.0\."),
        (decode.Guard(margin=-1.0), ValueError, r"greedy: guard margin must be 0 or more, got -1\.0\."),
        (decode.Guard(most=0.0), ValueError, r"greedy: guard most must be above 0, got 0\.0\."),
    ],
)
def test_errors(guard, error, message):
    model = Model(family.RNNT)
    with pytest.raises(error, match=message):
        decoding.greedy(*model.networks, model.encoder, model.lengths, 3, guard=guard)


@pytest.mark.parametrize("limits", [(-1.0, 1.0, 1.0), (1.0, math.nan, 1.0), (1.0, 1.0, 0.0)])
def test_wrong_numbers_that_are_traced(limits):
    model = Model(family.RNNT)
    given = model.parameters, model.encoder, model.lengths, phrases_of(), 1.0, decode.Guard(*limits)
    assert np.isnan(run(*given, verb=decoding.greedy, loss=family.RNNT, sizes=(ROOM,)).scores).all()


def test_phrases_behind_a_label():
    """They count only behind `before` and at the start, which earns nothing: the sum over all places, by hand."""
    space, lists = 3, [[0, 1], [0, 1, 2], [1, 0]]
    model = decode.Phrases(lists, 2.0, classes=4, depth=1.0, before=space)
    rng = np.random.default_rng(0)
    for _ in range(40):
        labels = rng.choice([0, 1, 2, 3], 8, p=[0.3, 0.3, 0.1, 0.3]).tolist()
        state, total = model.initial(1), 0.0
        scores, state = model.step(state, jnp.array([model.start]))
        for label in labels:
            total += float(scores[0, label])
            scores, state = model.step(state, jnp.array([label]))
        whole = [space, *labels]
        places = [sum(whole[i : i + 1 + len(x)] == [space, *x] for i in range(len(whole))) for x in lists]
        expected = sum(n * earned(len(x), 2.0, 1.0) for n, x in zip(places, lists))
        np.testing.assert_allclose(total + float(model.final(state)[0]), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"Phrases: before must be a label in \[0, 4\), got 4\."):
        decode.Phrases(lists, classes=4, before=4)
