"""Do the decoders find what a plain loop and an enumeration of all alignments find?"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import DecodingRules, LinearJoint, decode, lattices
from jax_rnnt.decode import _search

T, H, LABELS = 3, 4, 2  # frames, units, labels that are no blank
MOST, ROOM = 3, 9  # labels of a hypothesis, in small and in larger problems
EXACT = 1e-11
NAMED = {loss.name: loss for loss in losses.LOSSES}


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

    def __init__(self, loss, batch=2, frames=T, seed=0):
        rng = np.random.default_rng((seed, batch, frames))
        draw = lambda *shape: rng.normal(0, 1.5, shape)
        self.loss, self.tokens = loss, LABELS + 1 + loss.first_blank
        self.encoder = 2 * draw(batch, frames, H)
        self.bias = 0.5 * draw(self.tokens + loss.extra_classes)
        self.bias[LABELS : self.tokens] += 2.5 if self.tokens == LABELS + 1 else 1.5
        self.parameters = Parameters(draw(self.tokens, H), draw(H, H), draw(H, len(self.bias)), self.bias)
        self.lengths = np.maximum(frames - np.arange(batch) % 2, 0).astype(np.int32)

    def row(self, prefix):
        state = np.zeros(H)
        for label in (self.tokens - 1, *prefix):
            state = np.tanh(state @ self.parameters.mix) + self.parameters.embed[label]
        return state

    def logits(self, b, t, prefix):
        return np.tanh(self.encoder[b, t] + self.row(prefix)) @ self.parameters.weight + self.bias

    def search(self, function, *sizes, encoder=None, lengths=None, state=None, **options):
        """Its result as NumPy arrays. Calls that differ in arrays alone share a program."""
        encoder, lengths = self.encoder if encoder is None else encoder, self.lengths if lengths is None else lengths
        run = program(self.loss, function, sizes, tuple(options.items()))
        return jax.tree.map(np.asarray, run(self.parameters, encoder, lengths, state))


@functools.cache
def program(loss, function, sizes, options):
    def run(parameters, encoder, lengths, state):
        networks = parameters.joint, parameters.predictor
        return function(loss.value(), *networks, encoder, lengths, *sizes, state=state, **dict(options))

    return jax.jit(run)


@functools.cache
def moves(model, *node):
    """{(label or None, frames): log-probability} at a node (utterance, frame, labels), by hand."""
    row = model.logits(*node)
    name, blank = model.loss.name, model.tokens - 1
    if name == "hat":
        z = row[blank]
        found = {(k, 0): x - np.logaddexp(0, z) for k, x in enumerate(truth.log_softmax(row[:blank]))}
        return found | {(None, 1): -np.logaddexp(0, -z)}
    if name == "tdt":
        tokens, durations = truth.log_softmax(row[: blank + 1]), truth.log_softmax(row[blank + 1 :])
        pairs = itertools.product(range(blank + 1), zip(losses.DURATIONS, durations))
        found = {(k if k < blank else None, d): tokens[k] + q for k, (d, q) in pairs}
        return {move: x for move, x in found.items() if move != (None, 0)}
    scores = truth.log_softmax(row)
    labels = {(k, int(name.startswith("monotonic"))): scores[k] for k in range(LABELS)}
    big = {(None, d): scores[blank - 1 - i] for i, d in enumerate(losses.BIG)} if name == "multiblank" else {}
    return labels | {(None, 1): scores[blank]} | big


def allowed(model, b, t, prefix, may_write, *, exact_end, max_symbols):
    """The moves that may leave a node, and where they lead."""
    limit = 1 if model.loss.name == "constrained" else max_symbols
    length = model.lengths[b]
    for (label, reads), score in moves(model, b, t, prefix).items():
        after = t + reads
        ends = label is None or model.loss.name not in ("tdt", "monotonic_final_blank")
        if exact_end and not (after < length or (after == length and ends)):
            continue
        if label is None or may_write(limit):
            yield label, reads, score


def enumerate_all(model, b, *, exact_end=False, max_symbols=10, fuse=lambda prefix, label: 0.0):
    """{labels: (log of the summed weight of all alignments, weight of the best, its frames)} of one utterance."""
    found = {}

    def extend(t, prefix, frames, written, score):
        if t >= model.lengths[b]:
            found.setdefault(prefix, []).append((score, frames))
            return
        options = dict(exact_end=exact_end, max_symbols=max_symbols)
        may_write = lambda limit: written < limit and len(prefix) < MOST
        for label, reads, gain in allowed(model, b, t, prefix, may_write, **options):
            if label is None:
                extend(t + reads, prefix, frames, 0, score + gain)
            else:
                gain = gain + fuse(prefix, label)
                written_after = 0 if reads else written + 1
                extend(t + reads, (*prefix, label), (*frames, t), written_after, score + gain)

    extend(0, (), (), 0, 0.0)
    return {
        prefix: (float(np.logaddexp.reduce([s for s, _ in paths])), *max(paths, key=lambda path: path[0]))
        for prefix, paths in found.items()
    }


def greedy_loop(model, b, *, exact_end=False, max_symbols=10, room=ROOM):
    """(labels, frames, durations, score) by a loop over nodes."""
    t, written, score, labels, frames, durations = 0, 0, 0.0, [], [], []
    while t < model.lengths[b]:
        options = dict(exact_end=exact_end, max_symbols=max_symbols)
        may_write = lambda limit: written < limit and len(labels) < room
        choices = list(allowed(model, b, t, tuple(labels), may_write, **options))
        if not choices:
            return labels, frames, durations, -math.inf
        label, reads, gain = max(choices, key=lambda choice: choice[2])
        score += gain
        if label is not None:
            labels, frames, durations = [*labels, label], [*frames, t], [*durations, reads]
        written = written + 1 if label is not None and not reads else 0
        t += reads
    return labels, frames, durations, score


def trimmed(found, *index):
    """(labels, frames, durations) of one hypothesis."""
    count = found.counts[index]
    rows = [x[index] for x in found[:3]]
    assert all((x[count:] == -1).all() for x in rows)
    return [x[:count].tolist() for x in rows]


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        losses.assert_same_bits(x, y)


# ------------------------------------------------------------------------------------------------ greedy search


GREEDY = (dict(exact_end=False, max_symbols=1), 4), (dict(exact_end=True, max_symbols=3), 9)


OPEN, ENDED = ("rnnt", "monotonic", "hat", "tdt"), ("constrained", "tdt", "multiblank", "monotonic_final_blank")
CASES = [
    pytest.param(name, case, id=f"{name}-{end}", marks=() if name in often else pytest.mark.slow)
    for case, end, often in zip(GREEDY, ("open", "exact"), (OPEN, ENDED))
    for name in NAMED
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_greedy_is_the_plain_loop(name, case):
    options, window = case
    for seed in range(4):
        model = Model(NAMED[name], batch=8, frames=7, seed=seed)
        found = model.search(decode.greedy, ROOM, window=window, **options)
        for b in range(8):
            *expected, score = greedy_loop(model, b, **options)
            assert trimmed(found, b) == expected
            np.testing.assert_allclose(found.scores[b], score, rtol=EXACT)
            assert found.full[b] == (len(expected[0]) == ROOM)


def test_problems_of_greedy_search_are_hard():
    """Among the problems above, some fill their room, some are empty, and limits matter."""
    found = [
        [greedy_loop(Model(losses.RNNT, batch=8, frames=7, seed=seed), b, max_symbols=n)[0] for n in (1, 3)]
        for seed, b in np.ndindex(4, 8)
    ]
    assert {0, 1, 2, 3, 4} <= {len(x) for x, _ in found} and any(len(y) == ROOM for _, y in found)
    assert any(x != y for x, y in found)


# -------------------------------------------------------------------------------------------------- beam search


def check_all(model, found, rank=lambda scores, counts: scores, **options):
    """Every label sequence has the sum over its alignments, and the frames of the best one."""
    for b in range(len(found.scores)):
        expected = enumerate_all(model, b, **options)
        alive = np.flatnonzero(found.scores[b] > -np.inf)
        assert len(alive) == len(expected) > 2 and (np.diff(rank(found.scores[b], found.counts[b])[alive]) <= 0).all()
        for n in alive:
            labels, frames, _ = trimmed(found, b, n)
            total, _, best_frames = expected.pop(tuple(labels))
            np.testing.assert_allclose(found.scores[b, n], total, rtol=EXACT)
            assert tuple(frames) == best_frames
        assert not expected


def loss_of(model, b, labels):
    """The float64 truth of the loss of these labels, with rows made by hand."""
    length, count = int(model.lengths[b]), len(labels)
    rows = [[model.logits(b, t, labels[:u]) for u in range(count + 1)] for t in range(length)]
    targets = np.array([labels], np.int32).reshape(1, -1)
    return model.loss.expected(losses.Problem(np.array([rows]), targets, [length], [count]))[0][0]


# Greedy search runs on the whole family; beam search has the same moves.
MOST_OF_THE_FAMILY = [pytest.param(x, marks=() if x in ("rnnt", "tdt") else pytest.mark.slow) for x in NAMED]


@pytest.mark.parametrize("name", MOST_OF_THE_FAMILY)
def test_beam_is_the_enumeration(name):
    """With `exact_end` a score is minus the loss of the labels, too."""
    model, options = Model(NAMED[name]), dict(exact_end=True, max_symbols=MOST)
    found = model.search(decode.beam, MOST, 64, **options)
    check_all(model, found, **options)
    for b, n in zip(*np.nonzero(found.scores > -np.inf)):
        labels, *_ = trimmed(found, b, n)
        np.testing.assert_allclose(found.scores[b, n], -loss_of(model, b, labels), rtol=EXACT)


@pytest.mark.parametrize("name", ["tdt", pytest.param("multiblank", marks=pytest.mark.slow)])
def test_open_end(name):
    """Moves may read beyond the last frame; few symbols a frame; ranks by normalised scores."""
    model, options = Model(NAMED[name]), dict(max_symbols=2)
    found = model.search(decode.beam, MOST, 64, length_norm=0.5, **options)
    check_all(model, found, rank=lambda scores, counts: scores / np.sqrt(counts + 1), **options)
    assert (found.scores[:, 1:] > found.scores[:, :-1]).any()


@pytest.mark.parametrize("name", ["tdt", *(pytest.param(x, marks=pytest.mark.slow) for x in NAMED if x != "tdt")])
def test_width_1(name):
    """Without merging it is greedy search."""
    model, (options, window) = Model(NAMED[name], batch=8, frames=7), GREEDY[1]
    greedy = model.search(decode.greedy, ROOM, window=window, **options)
    one = model.search(decode.beam, ROOM, 1, merge=False, **options)
    for x, y in zip(one[:6], greedy[:6]):
        np.testing.assert_allclose(x[:, 0], y, rtol=EXACT)


@pytest.mark.parametrize("name", ["tdt", *(pytest.param(x, marks=pytest.mark.slow) for x in NAMED if x != "tdt")])
def test_no_labels_stand_twice(name):
    """In a beam that loses hypotheses, and few of them are worse than greedy search."""
    model = Model(NAMED[name], batch=3, frames=13)
    greedy, four = model.search(decode.greedy, 40), model.search(decode.beam, 40, 4)
    assert (four.scores[:, 0] >= greedy.scores - 1e-9).mean() > 0.6
    alive = four.scores > -np.inf
    same = (four.labels[:, :, None] == four.labels[:, None]).all(-1) & alive[:, None] & alive[:, :, None]
    assert same.sum() == alive.sum() > 3


@pytest.mark.slow
def test_without_merging():
    """Alignments stay apart, and have the score of one path."""
    model = Model(losses.MONOTONIC)
    found = model.search(decode.beam, MOST, 64, merge=False)
    expected = enumerate_all(model, 0)
    rows = [(found.scores[0, n], *trimmed(found, 0, n)[:2]) for n in np.flatnonzero(found.scores[0] > -np.inf)]
    assert len(rows) == sum(math.comb(T, len(labels)) for labels in expected)
    for labels, (total, best, frames) in expected.items():
        own = [(score, tuple(at)) for score, y, at in rows if tuple(y) == labels]
        assert max(own)[1] == frames
        np.testing.assert_allclose(max(own)[0], best, rtol=EXACT)
        np.testing.assert_allclose(np.logaddexp.reduce([score for score, _ in own]), total, rtol=EXACT)


def fusion(model):
    """A language model with memory, and its log-probabilities after a prefix."""
    rng = np.random.default_rng(5)
    table = truth.log_softmax(rng.normal(0, 2, (model.tokens, model.tokens, model.tokens)))

    def step(state, labels):
        return jnp.asarray(table)[state, labels], labels

    lm = decode.Predictor(lambda batch: jnp.zeros(batch, jnp.int32), step)

    def after(prefix):
        before = (0, model.tokens - 1, *prefix)
        return table[before[-2], before[-1]]

    return lm, after


@pytest.mark.parametrize("name", [pytest.param("tdt", marks=pytest.mark.slow), "hat"])
def test_fusion(name):
    """A language model is added, the internal one subtracted, both at labels alone."""
    model = Model(NAMED[name])
    lm, after = fusion(model)
    found = model.search(decode.beam, MOST, 64, lm=lm, lm_weight=0.7, ilm_weight=0.3, max_symbols=MOST)

    def fuse(prefix, label):
        row = np.tanh(model.row(prefix)) @ model.parameters.weight + model.bias
        internal = truth.log_softmax(row[:LABELS])
        return 0.7 * after(prefix)[label] - 0.3 * internal[label]

    check_all(model, found, max_symbols=MOST, fuse=fuse)


@pytest.mark.slow
def test_probabilities_sum_to_one():
    """Monotonic hypotheses, of which a frame has a bounded number."""
    model = Model(losses.MONOTONIC)
    found = model.search(decode.beam, MOST, 64)
    np.testing.assert_allclose(np.exp(found.scores).sum(-1), 1, rtol=EXACT)


# -------------------------------------------------------------------------------------------------- parts of a step


@pytest.mark.parametrize(("size", "k"), [(700, 3), (1000, 1), (20, 8)], ids=["blocks", "one", "passes"])
def test_largest(size, k):
    """As a stable sort, with ties and rows that hold fewer finite numbers; no place twice."""
    x = np.random.default_rng(0).integers(0, 9, (2, 5, size)).astype(np.float32)
    x[0, 0], x[0, 1], x[0, 1, 5] = 0, -np.inf, 1
    x[0, 2] = np.arange(size)
    values, places = jax.jit(lambda x: _search.largest(x, k))(x)
    expected = np.argsort(-x, -1, kind="stable")[..., :k]
    np.testing.assert_array_equal(places, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))


@pytest.mark.parametrize("share", [0, 0.1, 0.6, 1])
def test_rows_that_step(share):
    """Few or many of them, whatever their places; the other rows stay."""
    rng = np.random.default_rng(0)
    condition, rows, labels = rng.random(45) < share, rng.normal(size=(45, 3)), rng.integers(0, 9, 45)
    tree = {"rows": rows, "count": np.arange(45)}

    def step(tree, labels):
        return {"rows": tree["rows"] * 2 + labels[:, None].astype(float), "count": tree["count"] + 100}

    found = jax.jit(lambda *x: _search.step_rows(x[0], step, *x[1:]))(condition, tree, labels)
    np.testing.assert_allclose(found["rows"], np.where(condition[:, None], rows * 2 + labels[:, None], rows))
    np.testing.assert_array_equal(found["count"], np.arange(45) + 100 * condition)


# ------------------------------------------------------------------------------------------- streams and programs


STREAMED = [(decode.greedy, (40,)), (decode.beam, (40, 4))]
STREAMS = [
    pytest.param(losses.RNNT, *STREAMED[0], marks=pytest.mark.slow),
    (losses.TDT, *STREAMED[0]),
    (losses.TDT, *STREAMED[1]),
]


@pytest.mark.parametrize(("loss", "function", "sizes"), STREAMS, ids=["rnnt-greedy", "tdt-greedy", "tdt-beam"])
def test_streams(loss, function, sizes):
    """Parts of any lengths give bit for bit what the whole gives."""
    model = Model(loss, batch=3, frames=13)
    model.lengths = np.array([13, 11, 6], np.int32)
    whole = model.search(function, *sizes)
    assert whole.counts.max() > 4
    state, parts, start = None, [], 0
    for size in (4, 1, 0, 8):
        lengths = np.clip(model.lengths - start, 0, size).astype(np.int32)
        encoder = np.full_like(model.encoder, np.nan)
        encoder[:, :size] = model.encoder[:, start : start + size]
        parts.append(model.search(function, *sizes, encoder=encoder, lengths=lengths, state=state))
        state, start = parts[-1].state, start + size
    losses.assert_same_bits(parts[-1].scores, whole.scores)
    if function is decode.beam:
        assert_same(parts[-1][:6], whole[:6])
        return
    for b in range(3):
        joined = [[*itertools.chain(*rows)] for rows in zip(*(trimmed(part, b) for part in parts))]
        assert joined == trimmed(whole, b)


@pytest.mark.parametrize(("function", "sizes"), STREAMED, ids=["greedy", "beam"])
def test_padding_and_batch(function, sizes):
    """What stands outside the lengths, and other utterances, change no bit; an empty utterance is empty."""
    model = Model(losses.TDT, batch=3, frames=13)
    model.lengths = np.array([9, 5, 0], np.int32)
    whole = model.search(function, *sizes)
    encoder = model.encoder.copy()
    encoder[np.arange(13) >= model.lengths[:, None]] = np.nan
    assert_same(model.search(function, *sizes, encoder=encoder)[:6], whole[:6])
    others = model.search(function, *sizes, encoder=encoder[[2, 1, 1]], lengths=model.lengths[[2, 1, 2]])
    assert_same([x[1] for x in others[:6]], [x[1] for x in whole[:6]])
    empty = whole.scores[2].ravel()
    assert empty[0] == 0 and (empty[1:] == -np.inf).all() and (whole.counts[2] == 0).all()


def check_truth(model, found, function):
    """Greedy search is the plain loop, a wide beam the enumeration."""
    found = decode.Hypotheses(*map(np.asarray, found), None)
    if function is decode.beam:
        check_all(model, found, **SPLIT[function][1])
        return
    for b in range(len(found.scores)):
        *expected, score = greedy_loop(model, b, **SPLIT[function][1])
        assert trimmed(found, b) == expected
        np.testing.assert_allclose(found.scores[b], score, rtol=EXACT)


SPLIT = {
    decode.greedy: ((ROOM,), {"exact_end": True, "max_symbols": 3}),
    decode.beam: ((MOST, 64), {"exact_end": True, "max_symbols": MOST}),
}


def split_problem(devices, function):
    """(model, sharding, arrays that are split over devices, a search in them)."""
    model, (sizes, options) = Model(losses.TDT, batch=16), SPLIT[function]
    split = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    arrays = [jax.device_put(x, split) for x in (model.encoder, model.lengths)]
    networks = model.parameters.joint, model.parameters.predictor
    return model, split, arrays, lambda *x: function(model.loss.value(), *networks, *x, *sizes, **options)[:6]


@pytest.mark.parametrize("function", [decode.greedy, pytest.param(decode.beam, marks=pytest.mark.slow)])
def test_sharded_batch(devices, function):
    """Under jit the result stays sharded."""
    model, split, arrays, search = split_problem(devices, function)
    found = jax.jit(search, out_shardings=split)(*arrays)
    assert all(x.sharding.is_equivalent_to(split, x.ndim) for x in found)
    check_truth(model, found, function)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs jax.shard_map")
@pytest.mark.parametrize("function", [decode.greedy, decode.beam])
def test_shard_map(devices, function):
    """Nothing is exchanged."""
    model, split, arrays, search = split_problem(devices, function)
    each = jax.jit(jax.shard_map(search, mesh=split.mesh, in_specs=split.spec, out_specs=split.spec))
    check_truth(model, each(*arrays), function)
    assert not losses.collectives(each.lower(*arrays).compile().as_text())


def test_bfloat16():
    """Scores are float32."""
    model, dtype = Model(losses.RNNT), jnp.bfloat16
    encoder, weight = jnp.asarray(model.encoder, dtype), jnp.asarray(model.parameters.weight, dtype)
    networks = LinearJoint(weight), stateless(model, dtype)
    found = jax.jit(lambda *x: decode.greedy(jax_rnnt.RNNTLoss(), *networks, *x, MOST))(encoder, model.lengths)
    assert found.scores.dtype == jnp.float32 and np.isfinite(found.scores).all()


def stateless(model, dtype=np.float64):
    table = jnp.asarray(model.parameters.embed, dtype)
    return decode.stateless_predictor(lambda labels: jnp.sum(table[labels], 1), 2, start=model.tokens - 1)


def test_predict_makes_the_decoder_s_rows():
    model = Model(losses.RNNT)
    targets = np.array([[0, 1, 1], [1, 0, 0]], np.int32)
    rows = decode.predict(model.parameters.predictor, targets, start=model.tokens - 1)
    for b, u in np.ndindex(2, 4):
        np.testing.assert_allclose(rows[b, u], model.row(targets[b, :u]), rtol=EXACT)
    rows = decode.predict(stateless(model), targets, start=model.tokens - 1)
    np.testing.assert_allclose(rows[0, 2], model.parameters.embed[0] + model.parameters.embed[1], rtol=EXACT)


# ------------------------------------------------------------------------------------------------------- modules


def test_modules_of_flax():
    """Both kinds of modules decode as plain functions do; dropout is off."""
    nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    model = Model(losses.RNNT)

    class Nnx(nnx.Module):
        def __init__(self):
            self.embed, self.mix = (
                nnx.Param(jnp.asarray(model.parameters.embed)),
                nnx.Param(jnp.asarray(model.parameters.mix)),
            )
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def initial(self, batch):
            return jnp.zeros((batch, H))

        def step(self, state, labels):
            state = jnp.tanh(state @ self.mix[...]) + self.embed[...][labels]
            return self.dropout(state), state

    class Linen(nn.Module):
        def initial(self, batch):
            return jnp.zeros((batch, H))

        @nn.compact
        def step(self, state, labels):
            embed, mix = (self.param(n, lambda key, x=x: jnp.asarray(x)) for n, x in zip("em", model.parameters))
            state = jnp.tanh(state @ mix) + embed[labels]
            return state, state

    expected = model.search(decode.greedy, MOST)
    variables = {"params": dict(zip("em", map(jnp.asarray, model.parameters)))}
    module = Nnx()
    for predictor in (decode.nnx_predictor(module), decode.linen_predictor(Linen(), variables)):
        call = lambda *x, predictor=predictor: decode.greedy(
            jax_rnnt.RNNTLoss(), model.parameters.joint, predictor, *x, MOST
        )
        assert_same(jax.jit(call)(model.encoder, model.lengths)[:6], expected[:6])
    assert not module.dropout.deterministic  # the module itself is as it was


# ------------------------------------------------------------------------------------------- losses of one's own


class TwoStepLoss(jax_rnnt.TransducerLoss):
    """One blank that reads a frame or two."""

    def compose(self):
        arcs = (*lattices.STANDARD, lattices.Arc("blank", 2, 0))
        return jax_rnnt.Composition(jax_rnnt.emissions.Softmax((self.blank,), self.fused_log_softmax), arcs)


class SteppedLoss(TwoStepLoss):
    price: float = 1.0

    def compose(self):
        return jax_rnnt.Composition(super().compose().emission, steps=(lambda planes, num_frames: planes,))


class KnownLoss(SteppedLoss):
    def decoding(self):
        return DecodingRules(self.compose().emission)


def run(loss, model=None, function=decode.greedy, sizes=(MOST,), joint=None, predictor=None, **options):
    model = model or Model(losses.RNNT)
    arrays = [options.pop(name, getattr(model, name)) for name in ("encoder", "lengths")]
    return function(
        loss, joint or model.parameters.joint, predictor or model.parameters.predictor, *arrays, *sizes, **options
    )


def test_a_loss_of_ones_own():
    """Its arcs are its moves; steps need rules."""
    model = Model(losses.RNNT)
    planes = (*truth.STANDARD, truth.Arc("blank", 2, 0))
    found = jax.jit(lambda: run(TwoStepLoss(), model, decode.beam, (MOST, 64), exact_end=True, max_symbols=MOST))()
    labels, *_ = trimmed(jax.tree.map(np.asarray, found), 0, 0)
    rows = np.array([[model.logits(0, t, labels[:u]) for u in range(len(labels) + 1)] for t in range(T)])
    arcs, _ = truth.softmax_emission(rows, np.append(labels, -1).astype(int), blank=LABELS)
    value = truth.log_likelihood(planes, arcs, T, len(labels))
    np.testing.assert_allclose(found.scores[0, 0], value, rtol=EXACT)
    assert KnownLoss().decoding() == jax_rnnt.RNNTLoss().decoding()
    with pytest.raises(TypeError, match=r"SteppedLoss lacks decoding\(\), which returns its DecodingRules"):
        run(SteppedLoss())


def test_options_of_training_do_not_matter():
    """Decoders know a loss by its rules alone."""
    for name, trained in (
        ("rnnt", {"fastemit_lambda": 0.1, "delay_penalty": 0.5, "clamp": 1.0}),
        ("tdt", {"sigma": 0.5, "omega": 0.1, "fastemit_lambda": 0.1}),
        ("multiblank", {"sigma": 0.5}),
    ):
        assert NAMED[name].value(**trained).decoding() == NAMED[name].value().decoding()
    loss = NAMED["tdt"].value(sigma=0.5, omega=0.1, fastemit_lambda=0.1)
    model = Model(losses.TDT)
    # The window changes nothing but the pace.
    for x, y in zip(jax.jit(lambda: run(loss, model, window=1)[:6])(), model.search(decode.greedy, MOST)):
        np.testing.assert_allclose(x, y, rtol=EXACT)
    hat = jax_rnnt.HATLoss(topology="constrained").decoding()
    assert hat.labels_per_frame == 1 and hat.emission.bernoulli


# ----------------------------------------------------------------------------------------------------- bad input


def predictor_with(**changes):
    """The predictor of a model, broken in one place."""
    good = Model(losses.RNNT).parameters.predictor

    def step(state, labels):
        row, state = good.step(state, labels)
        return changes.get("row", lambda x: x)(row), changes.get("state", lambda x: x)(state)

    return decode.Predictor(changes.get("initial", good.initial), step)


WIDE = decode.Predictor(lambda batch: (), lambda state, labels: (jnp.zeros((len(labels), 7)), state))
ERRORS = {
    "not a loss": (dict(loss=lambda: 0), TypeError, "loss must be a TransducerLoss, got .*, which lacks a method deco"),
    "lengths": (dict(lengths=[T + 1, 1]), ValueError, r"lengths must lie in \[0, 3\], as .* 3 frames, got"),
    "lengths' shape": (dict(lengths=[1]), ValueError, "lengths must have shape"),
    "no batch": (dict(encoder=np.zeros((T, H)), lengths=[]), ValueError, "encoder_out must have shape"),
    "no labels": (dict(sizes=(0,)), ValueError, "max_labels must be 1 or more, got 0"),
    "symbols": (dict(max_symbols=0), ValueError, "max_symbols must be 1 or more, got 0"),
    "window": (dict(window=0), ValueError, "window must be 1 or more, got 0"),
    "width": (dict(function=decode.beam, sizes=(MOST, 0)), ValueError, "width must be 1 or more, got 0"),
    "state's shape": (
        dict(predictor=predictor_with(state=lambda x: x[:, 1:])), ValueError, r"state is float64 \(2, 4\), got .*2, 3\)"
    ),
    "state's structure": (
        dict(predictor=predictor_with(state=lambda x: (x, x))), ValueError, "must keep the structure of its state"
    ),
    "state's batch": (
        dict(predictor=predictor_with(initial=lambda batch: jnp.zeros(3))), ValueError, r"arrays \[2, ...\], got \(3,\)"
    ),
    "rows": (dict(predictor=predictor_with(row=lambda x: x[0])), ValueError, r"must make rows \[B, P\]"),
    "no predictor": (dict(predictor=lambda: 0), TypeError, "predictor must have the functions initial and step"),
    "joint": (dict(joint=lambda e, p: e[0]), ValueError, r"joint must make logits \[N, V\]"),
    "stream": (dict(state=(1, 2)), ValueError, "state of greedy must keep the structure"),
    "vocabulary": (
        dict(function=decode.beam, sizes=(MOST, 2), lm=WIDE, lm_weight=1.0),
        ValueError, r"lm must make log_probs \[N, V\] with V = 3, .* got \(4, 7\)"
    ),
    "no lm": (dict(function=decode.beam, sizes=(MOST, 2), lm_weight=0.5), ValueError, "lm must be given with"),
    "threshold": (
        dict(function=decode.beam, sizes=(MOST, 2), threshold=-1.0), ValueError, "threshold must be 0 or more, got -1.0"
    ),
    "exact_end": (dict(exact_end=1), TypeError, "exact_end must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "sizes"), STREAMED, ids=["greedy", "beam"])
def test_no_utterances(function, sizes):
    model = Model(losses.RNNT)
    networks = model.parameters.joint, model.parameters.predictor
    search = lambda *arrays: function(model.loss.value(), *networks, *arrays, *sizes)
    found = jax.eval_shape(search, model.encoder[:0], model.lengths[:0])
    assert found.labels.shape == (0, *sizes[:0:-1], 40) and found.scores.shape == found.counts.shape


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    options, error, message = ERRORS[case]
    options = {"loss": jax_rnnt.RNNTLoss()} | options
    with pytest.raises(error, match=message):
        run(**options)


class RulesOf(jax_rnnt.TransducerLoss):
    rules: object = jax_rnnt._pytree.static(None)

    def decoding(self):
        return self.rules


SOFTMAX = jax_rnnt.emissions.Softmax((0,))
RULES = {
    "must return DecodingRules, got None": None,
    "lacks an arc without a label": DecodingRules(SOFTMAX, lattices.STANDARD[1:]),
    "lacks an arc with a label": DecodingRules(SOFTMAX, lattices.STANDARD[:1]),
    "an arc must have the slot of a blank": DecodingRules(SOFTMAX, (*lattices.STANDARD, lattices.Arc("bypass", 0, 1))),
    "the slot of a duration": DecodingRules(SOFTMAX, (lattices.Arc("blank", 1, 0, other="duration+0"),)),
}


@pytest.mark.parametrize("message", RULES)
def test_rules_that_lack_something(message):
    with pytest.raises(TypeError, match=message):
        run(RulesOf(rules=RULES[message]))


def test_rules_are_checked():
    with pytest.raises(TypeError, match=r"DecodingRules: emission must be an emissions.Softmax"):
        DecodingRules(None)
    with pytest.raises(ValueError, match="labels_per_frame must be None or an integer >= 1, got 0"):
        DecodingRules(SOFTMAX, labels_per_frame=0)
    with pytest.raises(TypeError, match="DecodingRules: topology must be a sequence of"):
        DecodingRules(SOFTMAX, ())


@pytest.mark.parametrize(("function", "sizes"), STREAMED, ids=["greedy", "beam"])
def test_bad_data_spoils_itself_alone(function, sizes):
    """A traced length out of range, NaN or +inf: the score of that utterance is NaN."""
    model = Model(losses.TDT, batch=3, frames=13)
    whole = model.search(function, *sizes)
    encoder = model.encoder.copy()
    encoder[1, 0, 0] = np.nan
    for wrong in (14, -1):
        lengths = np.array([wrong, 13, model.lengths[2]], np.int32)
        found = model.search(function, *sizes, encoder=encoder, lengths=lengths)
        assert np.isnan(found.scores[:2]).all() and (found.counts[0] == 0).all()
        assert_same([x[2] for x in found[:6]], [x[2] for x in whole[:6]])


@pytest.mark.parametrize(
    ("function", "sizes"), [(decode.greedy, (MOST,)), pytest.param(decode.beam, (MOST, 3), marks=pytest.mark.slow)]
)
def test_dead_ends(function, sizes):
    """No path of the lattice: the score is -inf, and the search ends."""
    model = Model(losses.tdt((2,)))
    model.lengths = np.array([3, 2], np.int32)
    found = model.search(function, *sizes, exact_end=True)
    scores = found.scores.reshape(2, -1)
    assert (scores[0] == -np.inf).all() and np.isfinite(scores[1, 0])
    assert function is decode.greedy or (found.counts[0] == 0).all()
