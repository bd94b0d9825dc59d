"""Do models of fusion add to both searches what they add in a plain loop, and are wrong ones found?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import compare
import decoding
import family
import meshes
import reference_numpy as truth
from decoding import (
    EXACT,
    LABELS,
    MOST,
    NAMED,
    ROOM,
    H,
    Model,
    assert_same,
    check_all,
    check_greedy,
    ends,
    greedy_loop,
    lossless,
    select,
    trimmed,
)
from jax_rnnt import decode
from jax_rnnt.decode import _packing

BEAM = functools.partial(decoding.beam, width=11)  # 3 * 11 rows are packed


class FourGrams:
    """Scores of all tokens by the last three labels, with integer states and a score of the end."""

    def __init__(self, table):
        self.table, self.symbols = table, len(table)

    def initial(self, batch):
        return jnp.zeros((batch, 3), jnp.int32)

    def step(self, state, labels):
        state = jnp.concatenate([state[:, 1:], labels[:, None]], 1)
        return jnp.asarray(self.table)[tuple(state.T)], state

    def final(self, state):
        return jnp.asarray(self.table)[tuple(state.T)][:, 0]

    def by_hand(self, prefix, label, start):
        return self.table[(0, 0, start, *prefix)[-3:]][0 if label is None else label]


class Memory:
    """Scores of the labels alone by all of them before, and a start label of its own."""

    start, symbols = 1, LABELS

    def __init__(self, embed, weight):
        self.embed, self.weight = embed, weight

    def initial(self, batch):
        return jnp.zeros((batch, H))

    def step(self, state, labels):
        state = jnp.tanh(0.5 * state + jnp.asarray(self.embed)[labels])
        return state @ self.weight, state

    def by_hand(self, prefix, label):
        state = np.zeros(H)
        for y in (self.start, *prefix):
            state = np.tanh(0.5 * state + self.embed[y])
        return (state @ self.weight)[label]


def models_of(model, forbidden=None, memory=-0.4):
    """(options of a search, {what they add to a label, to an end}): two models and the internal language model.

    `forbidden`: a 4-gram of which the score is -inf. `memory`: the weight of the second model.
    """
    rng = np.random.default_rng(5)
    table = truth.log_softmax(rng.normal(0, 2, (model.tokens,) * 4))
    table[..., LABELS:] = np.nan  # no scores of labels
    if forbidden:
        table[forbidden] = -np.inf
    grams, second = FourGrams(table), Memory(rng.normal(size=(LABELS, H)), rng.normal(size=(H, LABELS)))

    def fuse(prefix, label):
        internal = np.tanh(model.row(prefix)) @ model.parameters.weight + model.bias
        added = 0.7 * grams.by_hand(prefix, label, model.tokens - 1) + memory * second.by_hand(prefix, label)
        return added - 0.3 * truth.log_softmax(internal[:LABELS] / model.temperature)[label]

    final = lambda labels: 0.7 * grams.by_hand(labels, None, model.tokens - 1)
    return dict(fusion=((grams, 0.7), (second, memory)), ilm_weight=0.3), dict(fuse=fuse, final=final)


def adjust(model):
    """Options of a search, traced, that the truth now has too: they act before fusion."""
    model.temperature, model.penalty, model.threshold = np.float64(1.7), np.float64(0.8), np.float64(0.9)
    return dict(temperature=model.temperature, blank_penalty=model.penalty, blank_threshold=model.threshold)


# -------------------------------------------------------------------------------------- plain loops and enumeration


@pytest.mark.quick("tdt")
@pytest.mark.parametrize("loss", [family.HAT, family.TDT], ids=str)
def test_greedy_is_the_plain_loop(loss):
    """With a penalty and a temperature; also in exact ends, where a forbidden label may leave no path."""
    model, exact = Model(loss, batch=16, frames=7), ends(16)
    traced = adjust(model)
    options, added = models_of(model, forbidden=(..., 0, 1, 1))
    found = model.search(decoding.greedy, ROOM, frames_at_once=3, max_symbols=2, exact_end=exact, **traced, **options)
    expected = check_greedy(model, found, exact_end=exact, max_symbols=2, **added)
    plain = [greedy_loop(model, b, exact_end=exact[b], max_symbols=2)[0] for b in range(16)]
    assert sum(x != y for x, y in zip(expected, plain)) > 4


@pytest.mark.quick("tdt")
@pytest.mark.parametrize("name", ["tdt", "hat", *map(family.slow, ("multiblank", "split", "monotonic_final_blank"))])
def test_beam_is_the_enumeration(name):
    """With a penalty and a temperature, which the internal language model has too."""
    model = Model(NAMED[name], batch=2 if name == "tdt" else 1)
    traced = adjust(model)
    options, added = models_of(model)
    rules = dict(max_symbols=2, exact_end=name != "tdt")
    found = model.search(decoding.beam, MOST, lossless(model.loss), **traced, **options, **rules)
    check_all(model, found, **rules, **added)


@pytest.mark.slow
def test_shared_rows():
    """Hypotheses share rows of a predictor that sees one label; 4-grams tell them apart."""
    model = Model(family.HAT)
    parameters = model.parameters = model.parameters._replace(mix=np.zeros((H, H)))
    embed = jnp.asarray(parameters.embed)
    predictor = decode.stateless_predictor(lambda labels: embed[labels[:, 0]], 1, start=model.tokens - 1)
    options, added = models_of(model, memory=0)
    options |= dict(max_symbols=2)
    search = lambda x, n: decoding.beam(model.loss.value(), parameters.joint, predictor, x, n, MOST, 64, **options)
    found = jax.tree.map(np.asarray, jax.jit(search)(model.encoder, model.lengths))
    assert _packing.packs(2 * 64) and found.state.networks.key is not None
    check_all(model, found, max_symbols=2, **added)


# ------------------------------------------------------------------------------------------------------- streams


@pytest.mark.slow
def test_streams():
    """Each part ends as an utterance would end there; the last one as the whole does, bit for bit."""
    model = Model(family.TDT, batch=3, frames=13)
    model.lengths = np.array([13, 11, 6], np.int32)
    options, _ = models_of(model, forbidden=(..., 0, 1, 1))
    run = lambda *part, state=None: model.search(BEAM, 40, encoder=part[0], lengths=part[1], state=state, **options)
    idle = model.idle(BEAM, 40, **options)  # so that all parts run in one program
    whole, state, start, parts = run(model.encoder, model.lengths, state=idle), idle, 0, []
    for size in (5, 1, 0, 7):
        encoder = np.full_like(model.encoder, np.nan)
        encoder[:, :size] = model.encoder[:, start : start + size]
        parts.append(run(encoder, np.clip(model.lengths - start, 0, size).astype(np.int32), state=state))
        state, start = parts[-1].state, start + size
        until = run(model.encoder, np.minimum(model.lengths, start), state=idle)
        assert_same(parts[-1].scores, until.scores)
    assert_same(parts[-1][:-1], whole[:-1])


class Tables:
    """Scores of labels by the utterance: its number is the state, and is given anew where rows were selected."""

    def __init__(self, tables):
        self.tables, self.utterances = jnp.asarray(tables), len(tables)

    def initial(self, batch):
        return jnp.arange(batch, dtype=jnp.int32) // (batch // self.utterances)

    place = lambda self, state: self.initial(len(state))

    def step(self, state, labels):
        return self.tables[state], state


@pytest.mark.slow
def test_utterances_with_models_of_their_own():
    """They find what each finds alone, also in a stream of which some are left out."""
    model = Model(family.RNNT, batch=3, frames=8)
    later = np.pad(model.encoder[:, 4:], ((0, 0), (0, 4), (0, 0)))
    tables = np.random.default_rng(1).normal(0, 2, (3, model.tokens))
    cut = np.minimum(model.lengths, 4)
    options = dict(max_labels=40, max_symbols=2)

    @jax.jit
    def run(tables, encoder, lengths, state):
        models = ((Tables(tables), 1.0),)
        return BEAM(*model.networks, encoder, lengths, fusion=models, state=state, **options)

    def go_on(first, at, rows):
        """The second half of utterances `rows`, whose first halves are the rows `at`."""
        second = run(tables[rows], later[rows], (model.lengths - cut)[rows], select(first.state, at))
        for i, b in enumerate(rows):
            alone = run(tables[[b] * 3], model.encoder[[b] * 3], model.lengths[[b] * 3], idle)
            np.testing.assert_allclose(second.scores[i], alone.scores[0], rtol=EXACT)

    shapes = jax.eval_shape(run, tables, model.encoder, cut, None).state
    idle = decode.reset_streams(shapes, np.ones(3, bool))  # so that all parts run in one program
    first, rows = run(tables, model.encoder, cut, idle), np.array([2, 0])
    go_on(first, rows, rows)  # 33 rows of a beam are packed, 22 are not
    two = run(tables[rows], model.encoder[rows], cut[rows], select(idle, rows))
    go_on(two, np.array([1, 0, 1]), np.array([0, 2, 0]))
    others = run(tables[::-1], model.encoder, cut, idle)
    assert not np.allclose(others.scores[0], first.scores[0])


@meshes.SET_MESH
def test_split_batches(devices):
    """Models for all utterances are run by each device, with traced weights; those of single ones are refused."""
    model = Model(family.RNNT, batch=8)
    options, _ = models_of(model)
    expected = model.search(decoding.greedy, MOST, **options)
    with meshes.mesh_of(devices[:4], "explicit", (4,)) as mesh:
        split = NamedSharding(mesh, PartitionSpec("data"))
        given = *model.networks, *(jax.device_put(x, split) for x in (model.encoder, model.lengths)), MOST
        weigh = lambda weights: tuple((model, w) for (model, _), w in zip(options["fusion"], weights))
        search = lambda x, n, w: decoding.greedy(*given[:3], x, n, MOST, fusion=weigh(w), ilm_weight=0.3)
        found = jax.jit(search)(*given[3:5], (0.7, -0.4))
        with pytest.raises(ValueError, match=r"greedy: fusion\[0\].utterances must be None, got 8 where.*shard_map"):
            decoding.greedy(*given, fusion=((Tables(np.zeros((8, model.tokens))), 1.0),))
    compare.assert_close(found[:-1], expected[:-1], rtol=EXACT)


# ------------------------------------------------------------------------------------------------------- weights


@pytest.mark.slow
def test_weights():
    """Traced ones share a program: 0 adds nothing; NaN and +inf of a model spoil an utterance."""
    model = Model(family.RNNT)
    model.lengths = np.array([0, 3], np.int32)
    options, _ = models_of(model)
    (one, _), (two, _) = options["fusion"]

    class Ends(Tables):
        final = lambda self, state: self.tables[state, LABELS]

    nothing = np.zeros((2, model.tokens))

    @jax.jit
    def scores(a, b, internal, tables=nothing):
        models = (one, a), (two, b), (Ends(tables), 0.0 * a + 1)
        return BEAM(*model.networks, model.encoder, model.lengths, MOST, fusion=models, ilm_weight=internal).scores

    np.testing.assert_allclose(scores(0.0, 0.0, 0.0), model.search(BEAM, MOST).scores, rtol=EXACT)
    assert np.isfinite(scores(0.5, -0.5, 0.1).reshape(2, -1)[:, 0]).all()
    for column in (0, 1, LABELS):  # of two labels, and of the end
        for bad in (np.nan, np.inf):
            tables = np.zeros((2, model.tokens))
            tables[1, column] = bad
            spoilt = scores(0.0, 0.0, 0.0, tables)
            assert np.isnan(spoilt[1]).all()
            assert_same(spoilt[0], scores(0.0, 0.0, 0.0)[0])
    tables = np.full((2, model.tokens), -np.inf)  # forbids the labels, then the end
    assert (scores(0.0, 0.0, 0.0, tables) == -np.inf).all()


# --------------------------------------------------------------------------------------------------------- masks


@pytest.mark.slow
def test_masks():
    """Forbidden labels are missing, and no other score changes; traced masks share a program, and so do weights.

    In greedy search and beams; tests of samples and of the search without a predictor have masks of their own.
    """
    model, traces = Model(family.HAT), []
    options = dict(max_symbols=2)

    @jax.jit
    def run(mask, weight):
        traces.append(None)
        given = *model.networks, model.encoder, model.lengths, MOST
        masked = options | dict(fusion=((decode.Labels(mask), weight),))
        return decoding.greedy(*given, **masked), decoding.beam(*given, lossless(model.loss), **masked)

    everything = np.ones((2, model.tokens), bool)
    one, other = everything.copy(), everything.copy()
    one[:, LABELS:] = False  # a blank is always allowed
    one[0, 0] = one[1, 1] = False
    other[1, 0] = False
    for mask, weight in ((one, 1.0), (other, -0.3), (one, 0.0), (everything, 2.0)):
        best, lists = jax.tree.map(np.asarray, run(mask, weight))
        for b in range(2):
            fuse = lambda prefix, label, b=b: 0.0 if mask[b, label] or weight == 0 else -np.inf
            expected, log_probs, score = greedy_loop(model, b, room=MOST, fuse=fuse, **options)
            assert trimmed(best, b) == expected
            np.testing.assert_allclose(best.scores[b], score, rtol=EXACT)
            np.testing.assert_allclose(best.label_log_probs[b][: len(log_probs)], log_probs, rtol=EXACT)
            check_all(model, lists, utterances=[b], fuse=fuse, **options)
    assert len(traces) == 1


def test_masks_are_checked():
    model = Model(family.TDT)
    greedy = functools.partial(decoding.greedy, *model.networks, model.encoder, model.lengths, MOST)
    for allowed, error, message in (
        ([1, 0, 1], TypeError, "Labels: allowed must have the dtype bool, got int64"),
        (True, ValueError, r"Labels: allowed must have shape \[V\] or \[B, V\] with V > 0, got \(\)"),
        ([[]], TypeError, "Labels: allowed must have the dtype bool, got float64"),
        ("ab", TypeError, "Labels: allowed must have the dtype bool"),
        ([True] * 7, ValueError, r"greedy: fusion\[0\].step must make scores .* with V = 2 .* got \(2, 7\)"),
        ([[True] * 3] * 3, ValueError, r"greedy: fusion\[0\].utterances must be 2, those of encoder_out, .* got 3"),
    ):
        with pytest.raises(error, match=message):
            greedy(fusion=((decode.Labels(allowed), 1.0),))
    assert repr(decode.Labels([[True, False]])) == "Labels(1 masks of 2)"
    with pytest.raises(ValueError, match=r"Labels: allowed must be masks .* got 2 masks and N = 3"):
        decode.Labels([[True], [False]]).initial(3)


# ----------------------------------------------------------------------------------------- modules, and wrong models


@pytest.mark.slow
def test_modules():
    """Functions of an NNX module run in evaluation mode, that of the end too."""
    nnx = pytest.importorskip("flax.nnx")

    class Noisy(nnx.Module):
        def __init__(self):
            self.noise, self.start = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), 0

        def initial(self, batch):
            return jnp.zeros((batch, LABELS))

        def step(self, state, labels):
            state = 0.5 * state + jax.nn.one_hot(labels, LABELS, dtype=state.dtype)
            return self.noise(state), state

        def final(self, state):
            return jnp.sum(self.noise(state), 1)

    model, noisy, still = Model(family.RNNT), Noisy(), Noisy()
    still.eval()
    found, expected = (model.search(decoding.greedy, MOST, fusion=((x, 0.5),)) for x in (noisy, still))
    assert_same(found[:-1], expected[:-1])
    assert not noisy.noise.deterministic
    assert not np.allclose(found.scores, model.search(decoding.greedy, MOST).scores)


class Broken(Memory):
    """Good but for the functions that are given."""

    def __init__(self, **functions):
        super().__init__(np.zeros((LABELS, H)), np.zeros((H, LABELS)))
        vars(self).update(functions)


GOOD = Broken()
WRONG = [
    ((GOOD, 1.0), TypeError, r"fusion must be a sequence of pairs .model, weight., .* got fusion\[0\] = .*Broken"),
    (iter([(GOOD, 1.0)]), TypeError, r"fusion must be a sequence of pairs .* got <list_iterator"),
    (GOOD, TypeError, r"fusion must be a sequence of pairs .* got .*Broken"),
    ("ab", TypeError, r"fusion must be a sequence of pairs .* got 'ab'"),
    ([(GOOD, 1.0), (GOOD,)], TypeError, r"fusion must be a sequence of pairs .* got fusion\[1\] = \(.*Broken.*,\)"),
    ([(GOOD, "1")], TypeError, r"fusion\[0\] weight must be a real number, got '1'"),
    ([(GOOD, 1.0), (GOOD, np.nan)], ValueError, r"fusion\[1\] weight must be finite, got nan"),
    ([(lambda: 0, 1.0)], TypeError, r"fusion\[0\] must have the methods initial"),
    ([(Broken(step=None), 1.0)], TypeError, r"fusion\[0\] must have the methods initial"),
    ([(Broken(initial=lambda n: jnp.zeros(3)), 1.0)], ValueError, r"fusion\[0\].initial\(.*\[.*, ...\], got \(3,\)"),
    ([(Broken(step=lambda s, y: s), 1.0)], TypeError, r"fusion\[0\].step must return \(scores \[N, V\], state\)"),
    ([(Broken(step=lambda s, y: (s[0], s)), 1.0)], ValueError, r"fusion\[0\].step must make scores \[N, V\]"),
    ([(Broken(step=lambda s, y: (s, s)), 1.0)], ValueError, r"fusion\[0\].step must .* V = 2 .labels., 3 .with blanks"),
    ([(Broken(step=lambda s, y: (s, s[:, 1:])), 1.0)], ValueError, r"fusion\[0\] must keep its state's shapes"),
    ([(Broken(symbols=1, start=0), 1.0)], ValueError, r"fusion\[0\].symbols must be 2 or more, .* got 1"),
    ([(Broken(start=2), 1.0)], ValueError, r"fusion\[0\].start must lie in \[-2, 2\) .* got 2"),
    ([(Broken(final=3), 1.0)], TypeError, r"fusion\[0\].final must be a function or None, got 3"),
    ([(Broken(final=lambda s: s), 1.0)], ValueError, r"fusion\[0\].final must make scores \[N\] with N = "),
    ([(Broken(place=True), 1.0)], TypeError, r"fusion\[0\].place must be a function or None, got True"),
    ([(Broken(utterances=3), 1.0)], ValueError, r"fusion\[0\].utterances must be 2, those of encoder_out, .* got 3"),
]


MADE = 6  # of these are errors when a search is made


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_models(given, error, message):
    model = Model(family.RNNT)
    search, name = (BEAM, "beam") if len(message) % 2 else (decoding.greedy, "greedy")
    name = "Search" if message in [x for *_, x in WRONG[:MADE]] else name
    with pytest.raises(error, match=f"{name}: {message}"):
        search(*model.networks, model.encoder, model.lengths, MOST, fusion=given)


def test_wrong_parts():
    """Of streams: a model of another kind, a `place` that makes another state."""
    model = Model(family.RNNT)
    greedy = functools.partial(decoding.greedy, *model.networks, model.encoder, model.lengths, MOST)
    search = lambda **options: jax.eval_shape(functools.partial(greedy, fusion=options.pop("fusion", ())), **options)
    state = search(fusion=((GOOD, 1.0),)).state
    with pytest.raises(ValueError, match="greedy: state of greedy must keep the structure of its state"):
        search(state=state)
    with pytest.raises(ValueError, match=r"greedy: fusion\[0\].place must keep its state's shapes"):
        search(fusion=((Broken(place=lambda state: state[:1]), 1.0),), state=state)
