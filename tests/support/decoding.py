"""Networks, truths by plain loops over nodes, and a search in one program, for the tests of decoding."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import compare
import family
import reference_numpy as truth
from jax_rnnt import Composition, DecodingRules, LinearJoint, TransducerLoss, decode, emissions, lattices

T, H, LABELS = 3, 4, 2  # frames, units, labels that are no blank
MOST, ROOM = 3, 9  # labels of a hypothesis, in small and in larger problems
EXACT = 1e-11
assert_same = compare.assert_same_bits
WAYS = {0: 0.5, 1: 0.8}  # of a label of `SplitLoss` by the frames that it reads: not normalised


FIELDS = {f.name for f in dataclasses.fields(decode.Search)}


def found(verb, loss, joint, predictor, encoder_out, lengths, max_labels, *sizes, **options):
    """What a verb of a `Search` finds; `options` are those of both."""
    own = {name: options.pop(name) for name in FIELDS & {*options}}
    search = decode.Search(loss, joint, predictor, max_labels, **own)
    return getattr(search, verb)(encoder_out, lengths, *sizes, **options)


def greedy(*given, **options):
    return found("greedy", *given, **options)


def beam(*given, **options):
    return found("beam", *given, **options)


def sample(*given, **options):
    return found("sample", *given, **options)


class TwoStepLoss(TransducerLoss):
    """One blank that reads a frame or two."""

    def compose(self):
        arcs = (*lattices.STANDARD, lattices.Arc("blank", 2, 0))
        return Composition(emissions.Softmax((self.blank,), self.fused_log_softmax), arcs)


class SplitLoss(TransducerLoss):
    """A label stays on its frame or reads it; each way has a weight."""

    stays: float | jax.Array = math.log(WAYS[0])
    reads: float | jax.Array = math.log(WAYS[1])

    def compose(self):
        arcs = (*lattices.STANDARD, lattices.Arc("label that reads", 1, 1))
        return Composition(emissions.Softmax((self.blank,), self.fused_log_softmax), arcs, steps=(self.split,))

    def split(self, planes, *lengths):
        label = planes["label"]
        return planes | {"label": label + self.stays, "label that reads": label + self.reads}

    def decoding(self):
        arcs = (*lattices.STANDARD, lattices.Arc("label", 1, 1))
        return DecodingRules(self.compose().emission, arcs, arc_weights=(0.0, self.stays, self.reads))


NAMED = {loss.name: loss for loss in family.LOSSES if loss not in family.SKIPPING}
NAMED["split"] = family.Loss("split", SplitLoss)
LONGEST = {"multiblank": max(family.BIG), "tdt": max(family.DURATIONS)}  # frames that an arc reads; else 1


def lossless(loss):
    """The width of a beam that loses none of the label sequences, up to `MOST` labels."""
    return (1 + LONGEST.get(loss.name, 1)) * sum(LABELS**n for n in range(MOST + 1))


class Parameters(NamedTuple):
    """Of a joint network, and of a predictor with memory, in float64."""

    embed: np.ndarray
    mix: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    @property
    def predictor(self):
        def step(state, labels):
            state = jnp.tanh(state @ self.mix) + jnp.asarray(self.embed)[labels]
            return state, state

        return decode.Predictor(lambda batch: jnp.zeros((batch, H)), step)

    @property
    def joint(self):
        return LinearJoint(jnp.asarray(self.weight), jnp.asarray(self.bias))


class Model:
    """Both networks, here in NumPy, and a batch to decode."""

    temperature, penalty, threshold = 1.0, 0.0, 1.0  # of the truth; a search takes its own as options

    def __init__(self, loss, batch=2, frames=T, seed=0):
        rng = np.random.default_rng((seed, batch, frames))
        draw = lambda *shape: rng.normal(0, 1.5, shape)
        self.loss, self.tokens = loss, LABELS + 1 + loss.first_blank
        self.encoder = 2 * draw(batch, frames, H)
        self.bias = 0.5 * draw(self.tokens + loss.extra_classes)
        self.bias[LABELS : self.tokens] += 2.5 if self.tokens == LABELS + 1 else 1.5
        self.parameters = Parameters(draw(self.tokens, H), draw(H, H), draw(H, len(self.bias)), self.bias)
        self.lengths = np.maximum(frames - np.arange(batch) % 2, 0).astype(np.int32)

    @property
    def networks(self):
        """What a search takes first, with the loss."""
        return self.loss.value(), self.parameters.joint, self.parameters.predictor

    def row(self, prefix):
        state = np.zeros(H)
        for label in (self.tokens - 1, *prefix):
            state = np.tanh(state @ self.parameters.mix) + self.parameters.embed[label]
        return state

    def logits(self, b, t, prefix):
        logits = np.tanh(self.encoder[b, t] + self.row(prefix)) @ self.parameters.weight + self.bias
        return logits / self.temperature

    def search(self, function, *sizes, encoder=None, lengths=None, state=None, **options):
        """Its result as NumPy arrays. Calls that differ in arrays alone, options among them, share a program."""
        run, arguments = self.call(function, sizes, options, encoder, lengths)
        arguments[-1].update({} if state is None else {"state": state})
        return jax.tree.map(np.asarray, run(*arguments))

    def idle(self, function, *sizes, encoder=None, lengths=None, **options):
        """The state before the first part of a stream, of shapes alone: then all parts share a program."""
        run, arguments = self.call(function, sizes, options, encoder, lengths)
        return decode.reset_streams(jax.eval_shape(run, *arguments).state, np.ones(len(arguments[2]), bool))

    def call(self, function, sizes, options, encoder, lengths):
        encoder, lengths = self.encoder if encoder is None else encoder, self.lengths if lengths is None else lengths
        traced = {name: x for name, x in options.items() if isinstance(x, (np.ndarray, np.generic))}
        static = tuple((name, x) for name, x in options.items() if name not in traced)
        return program(self.loss, function, sizes, static), [self.parameters, encoder, lengths, traced]


@functools.cache
def program(loss, function, sizes, options):
    def run(parameters, encoder, lengths, traced):
        networks = parameters.joint, parameters.predictor
        return function(loss.value(), *networks, encoder, lengths, *sizes, **dict(options), **traced)

    return jax.jit(run)


select, concatenate = jax.jit(decode.select_streams), jax.jit(lambda *states: decode.concatenate_streams(states))


def common(sequences):
    """How many leading labels all sequences share."""
    return next((i for i, column in enumerate(zip(*sequences)) if len({*column}) > 1), min(map(len, sequences)))


def ends(batch):
    """Whether each utterance ends exactly: every other one. One program then has both rules."""
    return np.arange(batch) % 2 == 0


@functools.cache
def moves(model, *node):
    """{(label or None, frames): log-probability} at a node (utterance, frame, labels), less the penalty of a blank."""
    return {(label, d): x - model.penalty * (label is None) for (label, d), x in unpenalized(model, *node).items()}


def unpenalized(model, *node):
    """{(label or None, frames): log-probability} at a node, by hand."""
    row = model.logits(*node)
    name, blank = model.loss.name, model.tokens - 1
    if name == "hat":
        z = row[blank]
        moves = {(k, 0): x - np.logaddexp(0, z) for k, x in enumerate(truth.log_softmax(row[:blank]))}
        return moves | {(None, 1): -np.logaddexp(0, -z)}
    if name == "tdt":
        tokens, durations = truth.log_softmax(row[: blank + 1]), truth.log_softmax(row[blank + 1 :])
        pairs = itertools.product(range(blank + 1), zip(family.DURATIONS, durations))
        moves = {(k if k < blank else None, d): tokens[k] + q for k, (d, q) in pairs}
        return {move: x for move, x in moves.items() if move != (None, 0)}
    scores = truth.log_softmax(row)
    if name == "split":
        moves = {(k, d): scores[k] + math.log(way) for k in range(LABELS) for d, way in WAYS.items()}
        return moves | {(None, 1): scores[blank]}
    labels = {(k, int(name.startswith("monotonic"))): scores[k] for k in range(LABELS)}
    big = {(None, d): scores[blank - 1 - i] for i, d in enumerate(family.BIG)} if name == "multiblank" else {}
    return labels | {(None, 1): scores[blank]} | big


def allowed(model, b, t, prefix, may_write, *, exact_end, max_symbols):
    """The moves that may leave a node, and where they lead."""
    limit = 1 if model.loss.name == "constrained" else max_symbols
    sure = math.exp(blank_log_prob(model, b, t, prefix)) >= model.threshold < 1
    length = model.lengths[b]
    for (label, reads), score in moves(model, b, t, prefix).items():
        after = t + reads
        ends = label is None or model.loss.name not in ("tdt", "monotonic_final_blank")
        if exact_end and not (after < length or (after == length and ends)):
            continue
        if label is None or (may_write(limit) and not sure):
            yield label, reads, score


def blank_log_prob(model, b, t, prefix):
    """Log-probability of all blanks together, whatever frames they read, by hand."""
    row = model.logits(b, t, prefix)
    if model.loss.name == "hat":
        return -np.logaddexp(0, -row[model.tokens - 1])
    return np.logaddexp.reduce(truth.log_softmax(row[: model.tokens])[LABELS:])


def label_log_prob(model, b, t, prefix, label):
    """Log-probability of a label at a node, whatever frames it reads, by hand."""
    row, blank = model.logits(b, t, prefix), model.tokens - 1
    if model.loss.name == "hat":
        return truth.log_softmax(row[:blank])[label] - np.logaddexp(0, row[blank])
    more = math.log(sum(WAYS.values())) if model.loss.name == "split" else 0.0
    return truth.log_softmax(row[: blank + 1])[label] + more


def nothing(*labels):
    """What fusion adds where there is none."""
    return 0.0


def enumerate_all(model, b, *, exact_end=False, max_symbols=10, fuse=nothing, final=nothing):
    """{labels: (log of the summed weight of all alignments, (weight of the best, its frames, `label_log_prob`s))}.

    `fuse(prefix, label)` is added to a label, `final(labels)` to an utterance.
    """
    paths_of = {}

    def extend(t, prefix, frames, log_probs, written, score):
        if t >= model.lengths[b]:
            paths_of.setdefault(prefix, []).append((score + final(prefix), frames, log_probs))
            return
        options = dict(exact_end=exact_end, max_symbols=max_symbols)
        may_write = lambda limit: written < limit and len(prefix) < MOST
        for label, reads, gain in allowed(model, b, t, prefix, may_write, **options):
            if label is None:
                extend(t + reads, prefix, frames, log_probs, 0, score + gain)
            else:
                gain = gain + fuse(prefix, label)
                log_prob = label_log_prob(model, b, t, prefix, label)
                after = (*prefix, label), (*frames, t), (*log_probs, log_prob), 0 if reads else written + 1
                extend(t + reads, *after, score + gain)

    extend(0, (), (), (), 0, 0.0)
    return {
        prefix: (float(np.logaddexp.reduce([path[0] for path in paths])), max(paths, key=lambda path: path[0]))
        for prefix, paths in paths_of.items()
    }


def greedy_loop(model, b, *, exact_end=False, max_symbols=10, room=ROOM, fuse=nothing, final=nothing):
    """((labels, frames, durations), label_log_probs, score) by a loop over nodes."""
    t, written, score, labels, frames, durations, log_probs = 0, 0, 0.0, [], [], [], []
    while t < model.lengths[b]:
        options = dict(exact_end=exact_end, max_symbols=max_symbols)
        may_write = lambda limit: written < limit and len(labels) < room
        prefix = tuple(labels)
        choices = [
            (label, reads, gain if label is None else gain + fuse(prefix, label))
            for label, reads, gain in allowed(model, b, t, prefix, may_write, **options)
        ]
        if not choices:
            return [[], [], []], [], -math.inf
        label, reads, gain = max(choices, key=lambda choice: choice[2])
        score += gain
        if label is not None:
            log_probs.append(label_log_prob(model, b, t, prefix, label))
            labels, frames, durations = [*labels, label], [*frames, t], [*durations, reads]
        written = written + 1 if label is not None and not reads else 0
        t += reads
    return [labels, frames, durations], log_probs, score + final(tuple(labels))


def earned(n, weight, depth):
    """n labels of a match, as NeMo's context score has them with depth_scaling = 1 + depth."""
    each = [weight] + [weight * (1 + depth) + (math.log(k) if depth else 0) for k in range(2, n + 1)]
    return math.fsum(each)


def worth(labels, phrases, weights, finished, depth=0):
    """The definition of `decode.Phrases`: every place of every phrase, and the longest end that begins a phrase."""
    best = {}
    for phrase, weight in zip(map(tuple, phrases), weights):
        best[phrase] = max(weight, best.get(phrase, -np.inf))
    total, labels = 0.0, tuple(labels)
    for phrase, weight in best.items():
        n = len(phrase)
        total += earned(n, weight, depth) * sum(labels[i : i + n] == phrase for i in range(len(labels) - n + 1))
    for n in range(len(labels), 0, -1):
        begun = [weight for phrase, weight in best.items() if len(phrase) > n and phrase[:n] == labels[-n:]]
        if begun:
            return total + (0 if finished else earned(n, max(begun), depth))
    return total


def stateless(model, dtype=np.float64):
    table = jnp.asarray(model.parameters.embed, dtype)
    return decode.stateless_predictor(lambda labels: jnp.sum(table[labels], 1), 2, start=model.tokens - 1)


def trimmed(hypotheses, *index):
    """(labels, frames, durations) of one hypothesis."""
    count = hypotheses.counts[index]
    rows = [x[index] for x in hypotheses[:3]]
    assert all((x[count:] == -1).all() for x in rows) and (hypotheses.label_log_probs[index][count:] == 0).all()
    return [x[:count].tolist() for x in rows]


def check_greedy(model, hypotheses, *place, exact_end=False, room=ROOM, **options):
    """Every utterance has, at this place of its list if there is one, what the plain loop finds, which is returned."""
    found = []
    for b, end in enumerate(np.broadcast_to(exact_end, len(hypotheses.counts))):
        expected, log_probs, score = greedy_loop(model, b, exact_end=end, room=room, **options)
        assert trimmed(hypotheses, b, *place) == expected
        np.testing.assert_allclose(hypotheses.label_log_probs[(b, *place)][: len(log_probs)], log_probs, rtol=EXACT)
        np.testing.assert_allclose(hypotheses.scores[(b, *place)], score, rtol=EXACT)
        assert hypotheses.full[(b, *place)] == (len(log_probs) == room)
        found.append(expected)
    return found


def check_all(model, hypotheses, rank=lambda scores, counts: scores, utterances=None, **options):
    """Every label sequence has the sum over its alignments, and frames and log-probabilities of the best one."""
    for b in range(len(hypotheses.scores)) if utterances is None else utterances:
        expected = {x: y for x, y in enumerate_all(model, b, **options).items() if y[0] > -math.inf}
        alive = np.flatnonzero(hypotheses.scores[b] > -np.inf)
        assert len(alive) == len(expected) > 2
        assert (np.diff(rank(hypotheses.scores[b], hypotheses.counts[b])[alive]) <= 0).all()
        for n in alive:
            labels, frames, _ = trimmed(hypotheses, b, n)
            total, (_, best_frames, log_probs) = expected.pop(tuple(labels))
            np.testing.assert_allclose(hypotheses.scores[b, n], total, rtol=EXACT)
            assert tuple(frames) == best_frames
            np.testing.assert_allclose(hypotheses.label_log_probs[b, n, : len(labels)], log_probs, rtol=EXACT)
        assert not expected
