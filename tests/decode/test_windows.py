"""Does a beam in windows of frames find what a plain loop finds that has the same windows, prunes and meets ties?

All numbers of the models are multiples of a quarter, so sums along a path are exact, and many are equal. Sums over
paths round: a problem in which such a sum is as large as another number, up to rounding, has no clear answer, and is
left out.
"""

import collections
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import MultiblankRNNTLoss, RNNTLoss, TDTLoss, decode

FRAMES, LABELS, STATES, ROOM, LIMIT = 10, 3, 7, 6, 2  # labels that are no blank; labels of a hypothesis, of a frame
# Of a loss: itself, frames of the moves of a blank and of a label as (class, class of the duration, frames).
BLANK = LABELS
LOSSES: dict[str, Any] = {
    "rnnt": (RNNTLoss(blank=BLANK, fused_log_softmax=False), [(BLANK, None, 1)], [(None, 0)]),
    "tdt": (
        TDTLoss((0, 1, 2), blank=BLANK, fused_log_softmax=False),
        [(BLANK, BLANK + 2, 1), (BLANK, BLANK + 3, 2)],
        [(BLANK + 1, 0), (BLANK + 2, 1), (BLANK + 3, 2)],
    ),
    "multiblank": (
        MultiblankRNNTLoss((3,), blank=BLANK + 1, fused_log_softmax=False),
        [(BLANK + 1, None, 1), (BLANK, None, 3)],
        [(None, 0)],
    ),
}
CLASSES = {"rnnt": LABELS + 1, "tdt": LABELS + 4, "multiblank": LABELS + 2}


class Hypothesis(NamedTuple):
    score: float = 0.0
    path: float = 0.0  # score of the best path
    frame: int = 0
    here: int = 0  # labels on that frame
    written: tuple = ()  # of (label, frame, duration, log-probability)
    exact: bool = True  # the score has not been rounded

    @property
    def labels(self):
        return tuple(x[0] for x in self.written)


class Unclear(Exception):
    pass


def total(terms):
    """(log of the summed probabilities, whether it is exact) of pairs like it."""
    alive = [x for x in terms if x[0] > -np.inf]
    if len(alive) < 2:
        return alive[0] if alive else (-np.inf, True)
    peak = max(score for score, _ in alive)
    return peak + math.log(sum(math.exp(score - peak) for score, _ in alive)), False


def merge(hypotheses, identity):
    """Of equal ones the one with the best path, the first of equal paths, has the sum; in the place that it has."""
    groups = collections.defaultdict(list)
    for i, x in enumerate(hypotheses):
        groups[identity(x)].append(i)
    found = []
    for group in groups.values():
        i = max(group, key=lambda i: (hypotheses[i].path, -i))
        score, exact = total([(hypotheses[j].score, hypotheses[j].exact) for j in group])
        found.append((i, hypotheses[i]._replace(score=score, exact=exact)))
    return [x for _, x in sorted(found, key=lambda pair: pair[0])]


def best(hypotheses, width, counts):
    """The `width` best ones in order, the first of equal ones first; `counts` cuts and ties."""
    order = sorted(hypotheses, key=lambda x: -x.score)
    for i, (x, y) in enumerate(itertools.pairwise(order[: width + 1])):
        if abs(x.score - y.score) < 1e-9 and not (x.exact and y.exact):
            raise Unclear
        counts["ties at a cut" if i == width - 1 else "ties"] += x.score == y.score
    counts["cuts"] += len(order) > width
    return order[:width]


def plain_beam(moves, log_probs, length, exact_end, width, window, threshold, counts):
    """The hypotheses, best first; ``log_probs(frame, labels)`` are those of all classes at a node."""
    blanks, arcs = moves
    beam = [Hypothesis()]
    while (first := min(x.frame for x in beam)) < length:
        end = min(first - first % window + window, length)
        kinds = collections.defaultdict(list)  # candidates, in the order of the numbers of their kinds
        for x in beam:
            if x.frame >= end:
                kinds[0].append(x)
                continue
            runs = collections.defaultdict(list)  # of each frame that runs of blanks reach: (score, path, exact)
            runs[x.frame].append((x.score, x.path, x.exact))
            for t in range(x.frame, end):
                row, here = log_probs(t, x.labels), x.here if t == x.frame else 0
                if not runs[t]:
                    continue
                score, exact = total([(score, exact) for score, _, exact in runs[t]])
                path = max(path for _, path, _ in runs[t])
                for i, (blank, duration, frames) in enumerate(blanks):
                    if exact_end and t + frames > length:
                        continue
                    gain = row[blank] + (0 if duration is None else row[duration])
                    if window == 1:  # a blank is a move by itself
                        after = x._replace(score=score + gain, path=path + gain, frame=t + frames, here=0)
                        kinds[1 + i].append(after)
                    else:
                        runs[t + frames].append((score + gain, path + gain, exact))
                if here >= LIMIT or len(x.written) >= ROOM:
                    continue
                for i, (duration, frames) in enumerate(arcs):
                    if exact_end and (t + frames >= length if duration is not None else t + frames > length):
                        continue  # a label with a duration may not end an utterance
                    more = 0 if duration is None else row[duration]
                    for label in range(LABELS):
                        gain = row[label] + more
                        written = *x.written, (label, t, frames, row[label])
                        after = Hypothesis(score + gain, path + gain, t + frames, here + 1, written, exact)
                        kinds[100 + i].append(after if frames == 0 else after._replace(here=0))
            for t in sorted(runs):
                if t >= end and runs[t]:
                    score, exact = total([(score, exact) for score, _, exact in runs[t]])
                    path = max(path for _, path, _ in runs[t])
                    kinds[1 + t - end].append(x._replace(score=score, path=path, frame=t, here=0, exact=exact))
        candidates = []
        for kind in sorted(kinds):  # of each arc with a label the best ones compete, before equal ones are merged
            candidates += best(kinds[kind], width, counts) if kind >= 100 else kinds[kind]
        beam = best(merge(candidates, lambda x: (x.frame, x.here, x.labels)), width, counts)
        beam = [x for x in beam if x.score >= beam[0].score - threshold]
        if not beam:
            return []
    return best(merge(beam, lambda x: x.labels), width, counts)


@functools.cache
def program(name, width, window):
    def run(table, encoder, lengths, exact_end, threshold):
        def step(state, labels):
            state = after(state, labels)
            return table[state], state

        predictor = decode.Predictor(lambda batch: jnp.zeros(batch, jnp.int32), step)
        search = decode.Search(LOSSES[name][0], jnp.add, predictor, ROOM, max_symbols=LIMIT)
        return search.beam(encoder, lengths, width, exact_end=exact_end, threshold=threshold, frames_at_once=window)

    return jax.jit(run)


def after(state, label):
    return (3 * state + label + 1) % STATES


@pytest.mark.quick("tdt-5-3")
@pytest.mark.parametrize(
    ("name", "width", "window"), [("rnnt", 4, 4), ("tdt", 5, 3), ("multiblank", 3, 2), ("tdt", 4, 1)]
)
def test_window_of_a_beam(name, width, window):
    """Labels, frames, durations and scores of all hypotheses of many problems, whose beams lose most sequences."""
    rng, batch = np.random.default_rng(width), 120
    loss, *moves = LOSSES[name]
    classes, threshold, counts = CLASSES[name], 3.0, collections.Counter()
    # Half of the problems have few ties, so that few sums over paths are equal.
    table, encoder = rng.integers(-12, 1, (STATES, classes)) / 4, rng.integers(-12, 1, (batch, FRAMES, classes)) / 4
    encoder[::2] -= rng.integers(0, 512, encoder[::2].shape) / 1024
    lengths, exact_end = rng.integers(0, FRAMES + 1, batch).astype(np.int32), rng.random(batch) < 0.5
    found = jax.tree.map(np.asarray, program(name, width, window)(table, encoder, lengths, exact_end, threshold))
    for b in range(batch):

        @functools.cache
        def log_probs(t, labels, b=b):
            return (encoder[b, t] + table[functools.reduce(after, labels, after(0, loss.blank))]).tolist()

        try:
            expected = plain_beam(moves, log_probs, lengths[b], exact_end[b], width, window, threshold, counts)
        except Unclear:
            counts["unclear"] += 1
            continue
        alive = found.scores[b] > -np.inf
        np.testing.assert_allclose(found.scores[b][alive], [x.score for x in expected], rtol=1e-12, atol=1e-12)
        columns = found.labels[b], found.frames[b], found.durations[b], found.label_log_probs[b]
        for row, n, x in zip(zip(*columns), found.counts[b], expected):
            assert [tuple(y) for y in zip(*(z[:n].tolist() for z in row))] == [*x.written]
    assert counts["unclear"] < batch / 2 and counts["ties at a cut"] > batch / 10 and counts["cuts"] > batch
