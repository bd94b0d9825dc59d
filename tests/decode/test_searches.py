"""Options of the searches, NeMo's rule for TDT, and samples: are they what plain loops and enumerations make?"""

import functools
import itertools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compare
import decoding
import family
import meshes
import reference_numpy as truth
from decoding import EXACT, MOST, NAMED, Model, allowed, assert_same, trimmed
from jax_rnnt import (
    Composition,
    MonotonicRNNTLoss,
    MultiblankRNNTLoss,
    RNNTLoss,
    TDTLoss,
    TransducerLoss,
    decode,
    emissions,
    lattices,
)
from jax_rnnt.decode import _given, _sample
from jax_rnnt.decode._moves import moves_of

# ------------------------------------------------------------------------------------- penalty and temperature


def test_options_that_are_off():
    """The program is the one without them."""
    model = Model(NAMED["tdt"])
    networks = model.loss.value(), model.parameters.joint, model.parameters.predictor
    search = lambda options: lambda *batch: decoding.greedy(*networks, *batch, MOST, **options)[:-1]
    text = lambda **options: addresses.sub("", str(jax.make_jaxpr(search(options))(model.encoder, model.lengths)))
    addresses = re.compile(" at 0x[0-9a-f]+")
    assert text(blank_penalty=0.0, temperature=1) == text(blank_penalty=0, temperature=1.0) == text()
    assert text(temperature=2.0) != text() != text(blank_penalty=0.5)


FIRST = dict(duration_choice="token_first")
ROWS = dict(temperature=2.0, loss=RNNTLoss(fused_log_softmax=False))
ERRORS = [
    (ROWS, ValueError, "temperature must be 1 with fused_log_softmax=False.* got 2.0"),
    (
        dict(duration_choice="token"),
        ValueError,
        "Search: duration_choice must be one of 'pair', 'token_first', got 'tok",
    ),
    (FIRST | dict(exact_end=True, loss=TDTLoss((1,))), ValueError, "exact_end must be False with duration_choice='tok"),
    (dict(key=None), TypeError, "sample: key must be a JAX random key, got None"),
    (dict(key=3), TypeError, "sample: key must be a JAX random key, got 3"),
    (dict(key=np.zeros((2, 2))), TypeError, "sample: key must be a JAX random key"),
    (dict(key=jax.random.split(jax.random.key(0), 3)), ValueError, r"one of each of 2 utterances, got \(3,\)"),
]


@pytest.mark.parametrize(("options", "error", "message"), ERRORS, ids=[x[2][:25] for x in ERRORS])
def test_errors(options, error, message):
    model = Model(NAMED["rnnt"])
    given = options.pop("loss", model.loss.value()), model.parameters.joint, model.parameters.predictor
    batch = model.encoder, model.lengths, MOST
    if {"key", "samples"} & {*options}:
        call = functools.partial(decoding.sample, **dict(key=jax.random.key(0), samples=2) | options)
    else:
        call = functools.partial(decoding.greedy, **options)
    with pytest.raises(error, match=message):
        call(*given, *batch)


# ------------------------------------------------------------------------------------------------------ moves

MOVES = [  # of a loss: classes of its logits, (class of a blank, frames, frames needed) of each arc, reach, symbols
    (RNNTLoss(blank=0), 3, [(0, 1, 1), (None, 0, 1)], 0, 3),
    (MonotonicRNNTLoss(blank=2), 3, [(2, 1, 1), (None, 1, 1)], 0, 2),
    (MonotonicRNNTLoss(blank=2, final_blank=True), 3, [(2, 1, 1), (None, 1, 2)], 1, 2),
    (MultiblankRNNTLoss((3,), blank=4), 5, [(4, 1, 1), (3, 3, 3), (None, 0, 1)], 2, 3),
    (TDTLoss((0, 2), blank=2), 5, [(2, 2, 2), (None, 0, 1), (None, 2, 3)], 2, 2),
]


@pytest.mark.parametrize(("loss", "classes", "arcs", "reach", "symbols"), MOVES)
def test_moves(loss, classes, arcs, reach, symbols):
    """By hand: what arcs read, and need where an arc of the lattice may not be the last one. No array is among them."""
    moves, weights = moves_of(loss, classes, 10, "pair")
    assert [(x.token, x.frames, x.needs) for x in moves.all] == arcs and {*weights.values()} == {0.0}
    assert (moves.reach, moves.symbols) == (reach, symbols)
    again, _ = moves_of(loss, classes, 10, "pair")
    assert hash(moves) == hash(again) and moves == again != moves_of(loss, classes, 9, "pair")[0]


def test_ties():
    """Of equal moves blanks come first, then lower classes."""
    predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 3)), 1, start=0)
    frames = jnp.array([[[0.0, 0, 0], [-1, 0, 0], [0, -1, 0]]])
    found = decode.Search(RNNTLoss(0), jnp.add, predictor, 5, max_symbols=1).greedy(frames, jnp.array([3]))
    assert trimmed(jax.tree.map(np.asarray, found), 0) == [[1], [1], [0]]


# ------------------------------------------------------------------------------------ token first, then duration


def token_first_loop(model, b, durations, max_symbols, room):
    """(labels, frames, durations, score): the rule of NeMo's batched search, and of Hugging Face without its limit."""
    t, here, score, labels, frames, lasts = 0, 0, 0.0, [], [], []
    blank = model.tokens - 1
    while t < model.lengths[b]:
        row = model.logits(b, t, tuple(labels))
        tokens, lengths = truth.log_softmax(row[: blank + 1]), truth.log_softmax(row[blank + 1 :])
        tokens[blank] -= model.penalty
        token = blank if len(labels) == room else int(np.argmax(tokens))
        duration = durations[int(np.argmax(lengths))]
        score += tokens[token] + lengths.max()
        if token != blank:
            labels, frames, lasts = [*labels, token], [*frames, t], [*lasts, duration]
        here = here + 1 if token != blank and duration == 0 else 0
        if (token == blank and duration == 0) or here == max_symbols:
            t, here = t + 1, 0
        t += duration
    return labels, frames, lasts, score


@pytest.mark.slow
@pytest.mark.parametrize("durations", [(2, 0, 1), (3, 1)], ids=str)
def test_token_first(durations):
    """As the plain loop, in windows; without a duration 0 it is the rule of pairs."""
    loss, others, forced = family.tdt(durations), 0, 0
    settings = ((3, 40, 1, 0.0), (1, 40, 4, 0.4), (10, 4, 3, 0.0)) if durations[0] == 2 else ((3, 40, 4, 0.4),)
    for seed, options in itertools.product(range(5), settings):
        max_symbols, room, frames, penalty = options
        model = Model(loss, batch=12, frames=12, seed=seed)
        model.lengths = np.random.default_rng(seed).integers(0, 13, 12).astype(np.int32)
        model.bias[:2], model.bias[model.tokens :] = 2 * (seed % 2), 2.0 * (np.array(durations) == 0)
        model.penalty = penalty
        rules = dict(max_symbols=max_symbols, frames_at_once=frames, blank_penalty=np.float64(penalty))
        found = model.search(decoding.greedy, room, duration_choice="token_first", **rules)
        if max_symbols == 3:
            others += (found.labels != model.search(decoding.greedy, room, **rules).labels).any(-1).sum()
        for b in range(12):
            *expected, score = token_first_loop(model, b, durations, max_symbols, room)
            assert trimmed(found, b) == expected
            np.testing.assert_allclose(found.scores[b], score, rtol=EXACT)
            runs = Counter(t for t, d in zip(*expected[1:]) if d == 0)
            forced += any(n == max_symbols for n in runs.values())
    assert (others > 2 and forced > 5) if 0 in durations else others == 0, (others, forced)


def test_token_first_without_durations():
    """It changes no move."""
    for loss in (x for name, x in NAMED.items() if name != "tdt"):
        pairs, first = (moves_of(loss.value(), Model(loss).tokens, 3, x)[0] for x in ("pair", "token_first"))
        assert pairs == first


class LabelsStay(TransducerLoss):
    """Labels read no frame, blanks one or two: no arc for a blank of duration 0, nor for labels of others."""

    def compose(self):
        arcs = [lattices.Arc("label", 0, 1, other="duration+0")]
        arcs += [lattices.Arc("blank", i, 0, other=f"duration+{i}") for i in (1, 2)]
        return Composition(emissions.Softmax((self.blank,), num_durations=3), tuple(arcs))


def test_token_first_of_ones_own():
    """A label whose best duration has no arc leaves its place to the blank."""
    tokens, lengths = np.log([0.6, 0.3, 0.1]), np.log([0.2, 0.5, 0.3])
    predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 6)), 1, start=0)
    encoder = np.concatenate([tokens, lengths])[None, None].repeat(3, 1)
    search = functools.partial(decoding.greedy, duration_choice="token_first")
    found = jax.jit(lambda x: search(LabelsStay(blank=2), jnp.add, predictor, x, np.array([3]), 2))(encoder)
    np.testing.assert_allclose(found.scores[0], 3 * np.log(0.1 * 0.5), rtol=EXACT)


# ----------------------------------------------------------------------------------------------------- blank first


def test_blank_first(monkeypatch):
    """Greedy search of a HAT needs no labels where the blank has 1/2; products for labels are counted."""
    products, product = [], _given.product

    def counted(*arguments):
        jax.debug.callback(lambda: products.append(None))
        return product(*arguments)

    model, number = Model(NAMED["hat"], batch=1, frames=40, seed=3), {}
    plain = model.search(decoding.greedy, 90, frames_at_once=2)
    monkeypatch.setattr(_given, "product", counted)
    for threshold in (0.999999999, 0.5):
        products.clear()
        found = model.search(decoding.greedy, 90, frames_at_once=2, blank_threshold=threshold)
        jax.effects_barrier()
        number[threshold] = len(products)
        assert_same(found[:3], plain[:3])
        np.testing.assert_allclose(found.scores, plain.scores, rtol=EXACT)
    assert plain.counts[0] > 20 and 20 < number[0.5] < number[0.999999999], number
    traced = [model.search(decoding.greedy, 90, frames_at_once=2, blank_threshold=np.float64(x)) for x in (1, 0)]
    assert_same(traced[0][:-1], plain[:-1])
    assert (traced[1].counts == 0).all()


# --------------------------------------------------------------------------------------------------- samples


def among(choices, mask, top_k, top_p, big):
    """The moves (label, frames, log-probability) that may be drawn, with a mask of labels.

    `big`: blanks that read other numbers of frames are other classes.
    """
    choices = [x for x in choices if x[0] is None or mask[x[0]]]
    class_of = lambda label, reads: label if label is not None else -reads if big else -1  # blanks are below labels
    classes = Counter()
    for label, reads, gain in choices:
        classes[class_of(label, reads)] += math.exp(gain)
    best = sorted(classes, key=lambda label: (-classes[label], label))[:top_k]
    total, reached, kept = sum(classes[label] for label in best), 0.0, set()
    for label in best:
        if top_p == 1 or reached < top_p * total:
            kept.add(label)
        reached += classes[label]
    return [x for x in choices if class_of(*x[:2]) in kept]


def draws(model, b, mask, top_k, top_p, **options):
    """[(labels, frames, durations, log-probability of the draw)] of all alignments; allowed moves share everything."""
    found = []

    def extend(t, labels, frames, lasts, written, score):
        if t >= model.lengths[b]:
            found.append((labels, frames, lasts, score))
            return
        may_write = lambda limit: written < limit and len(labels) < MOST
        big = model.loss.name == "multiblank"
        choices = among(allowed(model, b, t, labels, may_write, **options), mask, top_k, top_p, big)
        total = np.logaddexp.reduce([gain for *_, gain in choices])
        for label, reads, gain in choices:
            if label is None:
                extend(t + reads, labels, frames, lasts, 0, score + gain - total)
            else:
                more = (*labels, label), (*frames, t), (*lasts, reads)
                extend(t + reads, *more, 0 if reads else written + 1, score + gain - total)

    extend(0, (), (), (), 0, 0.0)
    assert math.isclose(math.fsum(math.exp(score) for *_, score in found), 1)
    return found


@pytest.mark.parametrize(
    "loss", [*(NAMED[name] for name in ("tdt", "multiblank", "hat")), family.slow(NAMED["split"])], ids=str
)
def test_samples(loss):
    """Alignments come as often as enumeration says, each with the log-probability of its draw.

    Of all classes, of the most probable ones, and with a mask of labels for each utterance.
    """
    model, count, exact = Model(loss, batch=4), 2500, np.array([True, True, False, False])
    model.temperature = 4.0  # many alignments are probable
    number = {}
    masks = np.array([[True, True, False], [True, False, True], [True, True, True], [False, True, False]])
    masks = np.pad(masks, ((0, 0), (0, model.tokens - 3)))  # blanks are not read
    options = dict(temperature=4.0, exact_end=exact, max_symbols=2, fusion=((decode.Labels(masks), 0.5),))
    for (top_k, top_p), b in itertools.product(((3, 1.0), (2, 0.8), (9, 0.7)), range(4)):
        if b == 0:
            few = dict(top_k=np.int32(top_k), top_p=np.float64(top_p))
            found = model.search(sampled, MOST, count, **few, **options)
        paths = draws(model, b, masks[b], top_k, top_p, exact_end=exact[b], max_symbols=2)
        # Blanks that read the same frames may differ: then the score tells alignments apart.
        name_of = lambda labels, frames, lasts, score: (labels, frames, lasts, round(float(score), 9))
        expected = Counter()
        for path in paths:
            expected[name_of(*path)] += count * math.exp(path[-1])
        seen = Counter(name_of(*map(tuple, trimmed(found, b, n)), found.scores[b, n]) for n in range(count))
        assert {*seen} <= {*expected}
        often = [path for path, times in expected.items() if times >= 5]
        pairs = [(seen[path], expected[path]) for path in often]
        pairs.append((count - sum(x for x, _ in pairs), count - sum(y for _, y in pairs)))
        chi = sum((x - y) ** 2 / y for x, y in pairs if y > 1)
        assert chi < len(often) + 5 * math.sqrt(2 * len(often))
        number[top_k, top_p] = number.get((top_k, top_p), 0) + len(often)
    assert 6 < number[2, 0.8] < number[3, 1.0] and 6 < number[9, 0.7] < number[3, 1.0], number


def sampled(*arguments, **options):
    *arguments, samples = arguments
    return decoding.sample(*arguments, jax.random.key(1), samples=samples, **options)


KEYS = jax.random.split(jax.random.key(5), 4)


def few(model, encoder, lengths, key=KEYS, **options):
    found = five(model.loss, tuple(options.items()))(model.parameters, encoder, lengths, key)
    return jax.tree.map(np.asarray, found)


@functools.cache
def five(loss, options):
    """One program for all keys of a kind; numbers of NumPy are traced."""
    traced = {name: x for name, x in options if isinstance(x, np.generic)}
    static = {name: x for name, x in options if name not in traced}

    def run(parameters, encoder, lengths, key, traced):
        given = loss.value(), parameters.joint, parameters.predictor, encoder, lengths, MOST, key
        return decoding.sample(*given, samples=5, **static, **traced)

    return lambda *arrays: jax.jit(run)(*arrays, traced)


@pytest.mark.slow
def test_samples_are_functions_of_their_keys():
    """Neither the frames at once, nor other utterances, nor the number of samples matters; keys of any kind do."""
    model = Model(NAMED["tdt"], batch=4, frames=9)
    whole = few(model, model.encoder, model.lengths)
    assert whole.labels.shape == (4, 5, MOST) and whole.state is None
    compare.assert_close(few(model, model.encoder, model.lengths, frames_at_once=1)[:-1], whole[:-1], rtol=EXACT)
    every = few(model, model.encoder, model.lengths, top_k=np.int32(model.tokens), top_p=np.float64(1))
    compare.assert_same_bits(every[:-1], whole[:-1])
    rows = np.array([2, 0, 2, 2])
    turned = few(model, model.encoder[rows], model.lengths[rows], KEYS[rows])
    compare.assert_close(turned[:-1], jax.tree.map(lambda x: x[rows], whole[:-1]), rtol=EXACT)
    others = few(model, model.encoder, model.lengths, jax.random.split(KEYS[0], 4))
    assert (others.labels != whole.labels).any()
    keys = KEYS, jax.random.key(5), jax.random.PRNGKey(6), jax.random.key(5, impl="rbg"), jax.random.split(KEYS[0], 4)
    seeds = [np.asarray(_sample.seeds_of(key, 4)) for key in keys]
    assert len({x.tobytes() for x in seeds}) == 5 and all(x.shape == (4, 2) for x in seeds)
    np.testing.assert_array_equal(_sample.seeds_of(jax.random.key_data(KEYS), 4), seeds[0])


@meshes.SET_MESH
def test_samples_on_meshes(devices):
    """A batch that is split has the draws of the whole."""
    model = Model(NAMED["rnnt"], batch=4, frames=5)
    whole = few(model, model.encoder, model.lengths, jax.random.key(3))
    with meshes.mesh_of(devices[:4], "explicit", (4,)) as mesh:
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        batch = (jax.device_put(x, split) for x in (model.encoder, model.lengths))
        found = few(model, *batch, jax.random.key(3))
    compare.assert_close(found[:-1], whole[:-1], rtol=EXACT)


def test_samples_at_dead_ends_and_bad_rows():
    """No path of the lattice: -inf. NaN: NaN. Neither has labels."""
    model = Model(family.tdt((2,)), batch=4)
    model.lengths = np.array([3, 2, 2, 9], np.int32)
    model.encoder[2, 1:] = np.nan
    model.encoder[1, 0] = np.nan
    found = few(model, model.encoder, model.lengths, exact_end=True)
    assert (np.asarray(found.scores[0]) == -np.inf).all() and np.isfinite(found.scores[2]).all()
    assert np.isnan(found.scores[1]).all() and np.isnan(found.scores[3]).all()
    assert (np.asarray(found.counts)[[0, 1, 3]] == 0).all()
