"""Streams that come and go: rows of states, a server's loop, and labels that stay."""

import functools

import chex
import jax
import numpy as np
import pytest

import decoding
from decoding import LABELS, NAMED, Model, assert_same, common, concatenate, select
from jax_rnnt import decode

ROWS, PART, MOST = 3, 4, 30  # utterances in the server's batch, frames of a part, labels
BEAM = functools.partial(decoding.beam, width=3)
WIDE = functools.partial(decoding.beam, width=11)  # rows of the networks are packed
SEARCHES = {
    "greedy": decoding.greedy,
    "beam": functools.partial(BEAM, threshold=2.0),
    "wide": functools.partial(WIDE, threshold=2.0),
}
BOTH = pytest.mark.parametrize("function", [decoding.greedy, BEAM], ids=["greedy", "beam"])


class Server:
    """A search in one program, which serves parts of utterances [ROWS, PART] and a state."""

    def __init__(self, model, function, **options):
        self.model = model
        run = lambda x, n, state: function(*model.networks, x, n, MOST, state=state, **options)
        self.program = jax.jit(chex.assert_max_traces(run, n=2))  # without a state, for its shapes; and for all parts
        width = model.encoder.shape[2]
        self.shape = (ROWS, PART, width)
        shapes = jax.ShapeDtypeStruct(self.shape, np.float64), jax.ShapeDtypeStruct((ROWS,), np.int32)
        self.idle = jax.eval_shape(self.program, *shapes, None).state

    def serve(self, schedule):
        """{utterance: its parts as rows of `Hypotheses`}; `schedule` yields (row, utterance) that enter before a part.

        A row is free once its utterance has ended.
        """
        state, found, now, read = self.idle, {}, [None] * ROWS, np.zeros(ROWS, int)
        for entering in schedule:
            for row, b in entering:
                assert now[row] is None
                now[row], read[row], found[b] = b, 0, []
            state = decode.reset_streams(state, np.isin(np.arange(ROWS), [row for row, _ in entering]))
            encoder, lengths = np.full(self.shape, np.nan), np.zeros(ROWS, np.int32)
            for row, b in enumerate(now):
                if b is not None:
                    part = self.model.encoder[b, read[row] : self.model.lengths[b]][:PART]
                    encoder[row, : len(part)], lengths[row] = part, len(part)
            made = self.program(encoder, lengths, state)
            state, read = made.state, read + lengths
            for row, b in enumerate(now):
                if b is not None:
                    found[b].append(jax.tree.map(lambda x: np.asarray(x)[row], made._replace(state=None)))
                    now[row] = None if read[row] >= self.model.lengths[b] else b
        return found


def random_schedule(model, seed):
    """Utterances enter free rows as they come, some rows stay idle for a while."""
    rng, waiting, busy = np.random.default_rng(seed), list(range(len(model.lengths))), np.zeros(ROWS, int)
    while waiting or busy.any():
        entering = []
        for row in np.flatnonzero(busy == 0):
            if waiting and rng.random() < 0.7:
                entering.append((row, waiting.pop(rng.integers(len(waiting)))))
                busy[row] = max(-(-model.lengths[entering[-1][1]] // PART), 1)
        yield entering
        busy = np.maximum(busy - 1, 0)


def alone(model, b):
    """One utterance, in a row of its own."""
    yield [(b % ROWS, b)]
    yield from [[]] * (max(-(-model.lengths[b] // PART), 1) - 1)


@pytest.mark.quick("tdt-beam")
@pytest.mark.parametrize(("name", "search"), [("multiblank", "greedy"), ("tdt", "beam"), ("hat", "wide")])
def test_a_server(name, search):
    """Every utterance has, bit for bit, what it has alone, in one program; captions that are stable never change."""
    model = Model(NAMED[name], batch=10, frames=17)
    model.lengths = np.array([17, 9, 1, 4, 12, 0, 8, 3, 16, 5], np.int32)
    model.parameters = model.parameters._replace(weight=4 * model.parameters.weight)  # it is sure of first labels
    server = Server(model, SEARCHES[search])
    found = server.serve(random_schedule(model, seed=1))
    assert sorted(found) == list(range(10))
    for b, parts in found.items():
        for x, y in zip(parts, server.serve(alone(model, b))[b], strict=True):
            assert_same(x, y)
        if search != "greedy":
            labels = [hypothesis_labels(part) for part in parts]
            for i, (part, live) in enumerate(zip(parts, labels)):
                assert part.stable == common(live)
                assert all(later[: part.stable] == live[0][: part.stable] for more in labels[i:] for later in more)
        else:
            assert all(part.stable == part.counts for part in parts)
    assert search == "greedy" or max(part.stable for parts in found.values() for part in parts) > 1


def hypothesis_labels(part):
    """Labels of the live hypotheses of one utterance."""
    alive = np.flatnonzero(part.scores > -np.inf)
    return [part.labels[n, : part.counts[n]].tolist() for n in alive]


def whole_and_half(function):
    """(a function from utterances, their first frame and a state to the result of six frames; the first half)"""
    model = Model(NAMED["tdt"], batch=4, frames=12)

    def part(rows, start, state):
        encoder = model.encoder[rows, start : start + 6]
        return model.search(function, MOST, encoder=encoder, lengths=np.full(len(rows), 6), state=state)

    idle = model.idle(function, MOST, encoder=model.encoder[:, :6], lengths=np.full(4, 6))
    return part, part([0, 1, 2, 3], 0, idle)


@pytest.mark.slow
def test_select_and_concatenate():
    """They are those of NumPy, array by array, and rows go on in another batch as in their own."""
    part, half = whole_and_half(decoding.greedy)
    expected = part([0, 1, 2, 3], 6, half.state)
    both, rows = concatenate(half.state, expected.state), np.array([3, 1, 1, 4])
    assert_same(both, jax.tree.map(lambda *x: np.concatenate(x), half.state, expected.state))
    some = select(both, rows)
    assert_same(some, jax.tree.map(lambda x: x[rows], both))
    found = part([3, 1, 1, 0], 6, some)
    assert_same([x[:3] for x in found[:4]], [x[[3, 1, 1]] for x in expected[:4]])
    np.testing.assert_allclose(found.scores[:3], expected.scores[[3, 1, 1]], rtol=1e-11)
    assert_same(select(half.state, np.zeros(0, int)), jax.tree.map(lambda x: x[:0], half.state))


@pytest.mark.quick("greedy")
@BOTH
def test_reset(function):
    """Marked rows start anew bit for bit, marked twice or moved; others go on."""
    part, half = whole_and_half(function)
    where, reset = np.array([True, False, False, True]), decode.reset_streams
    later = part([0, 1, 2, 3], 6, half.state)
    start = jax.tree.map(lambda x: x * 0 + 7 if x.dtype != bool else x, half.state)
    begun = part([0, 1, 2, 3], 6, reset(start, np.ones(4, bool)))
    found = part([0, 1, 2, 3], 6, reset(jax.jit(reset)(half.state, where), where & (np.arange(4) < 1)))
    for x, old, new in zip(jax.tree.leaves(found), jax.tree.leaves(later), jax.tree.leaves(begun)):
        assert_same(x, np.where(where.reshape(-1, *(1,) * (x.ndim - 1)), new, old))
    offline = part([0, 1, 2, 3], 6, None)
    assert_same(begun[:6], offline[:6])
    rows = [2, 3, 3, 0]
    moved = select(reset(half.state, where), np.array(rows))
    assert_same(part(rows, 6, moved).labels, found.labels[rows])


@pytest.mark.slow
def test_commit_labels():
    """Labels that are stable leave the beam, which goes on bit for bit, and in a room for the others alone.

    More than these decide: hypotheses without them are dropped. Scores far from 0 come near again.
    """
    model, part, room = Model(NAMED["rnnt"], batch=3, frames=40), 4, 9
    bias = model.parameters.bias + np.where(np.arange(len(model.parameters.bias)) < LABELS, -1, 0)
    model.parameters = model.parameters._replace(weight=3 * model.parameters.weight, bias=bias)
    search, commit = functools.partial(BEAM, length_norm=0.5, max_symbols=1), jax.jit(decode.commit_labels)
    lengths, rest = np.full(3, part), {}
    for rule, most in (("none", 3 * MOST), ("stable", 3 * MOST), ("stable", room), ("all", room)):
        state = model.idle(search, most, encoder=model.encoder[:, :part], lengths=lengths)
        gone = [[] for _ in range(3)]
        for start in range(0, 40, part):
            encoder = model.encoder[:, start : start + part]
            found = model.search(search, most, encoder=encoder, lengths=lengths, state=state)
            counts = {"none": 0 * found.stable, "stable": found.stable, "all": found.counts[:, 0]}[rule]
            state = found.state if rule == "none" else commit(found, counts)
            for b, n in enumerate(counts):
                gone[b] += found.labels[b, 0, :n].tolist()
                like = (found.labels[b, :, :n] == found.labels[b, :1, :n]).all(-1) & (found.scores[b] > -np.inf)
                assert like.sum() == np.isfinite(state.beam.score[b]).sum() or rule == "none"
        assert state.committed.tolist() == list(map(len, gone))
        parts = zip(gone, found.labels[:, 0], counts, found.counts[:, 0])
        rest[rule, most] = [labels + more[n:end].tolist() for labels, more, n, end in parts], found.scores
    expected, scores = rest["none", 3 * MOST]
    assert min(map(len, expected)) > room  # or the small room proves nothing
    for most in (3 * MOST, room):
        assert rest["stable", most][0] == expected
        np.testing.assert_array_equal(rest["stable", most][1], scores)
    beam = found.state.beam
    far = beam._replace(score=beam.score - 1e5, path_score=beam.path_score - 1e5)
    far = found._replace(state=found.state._replace(beam=far))
    for x, expected in ((found, found.scores), (far, found.scores - found.scores.max(1, keepdims=True))):
        after = commit(x, np.zeros(3, int)).beam
        np.testing.assert_allclose(np.sort(after.score), np.sort(expected), atol=1e-9)
        alive = np.isfinite(beam.score)
        shares = (np.asarray(y.path_score)[alive] - np.asarray(y.score)[alive] for y in (after, beam))
        np.testing.assert_allclose(*shares, atol=1e-9)


@BOTH
def test_rows_out_of_range(function):
    """Known ones are errors; traced ones and shapes that were not reset have NaN, until a reset."""
    part, half = whole_and_half(function)
    rows, wrong = [0, 1, 2, 3], np.array([False, True, True, True])
    found = part(rows, 6, select(half.state, np.array([0, 4, -1, 2**30])))
    assert np.isnan(found.scores[wrong]).all() and np.isfinite(found.scores[0]).any()
    assert (found.counts[wrong] == 0).all()
    assert np.isnan(part(rows, 6, found.state).scores[wrong]).all()
    again = part(rows, 6, decode.reset_streams(found.state, wrong))
    assert not np.isnan(again.scores).any()
    shapes = jax.eval_shape(lambda: half.state)
    found = part([0, 1, 2, 3], 6, decode.reset_streams(shapes, np.array([True, True, False, False])))
    assert np.isnan(found.scores[2:]).all() and not np.isnan(found.scores[:2]).any()


@pytest.mark.slow
def test_errors():
    model, lengths = Model(NAMED["rnnt"], batch=2), np.zeros(2, np.int32)
    greedy, beam = (model.idle(search, MOST, lengths=lengths) for search in (decoding.greedy, BEAM))
    others = model.idle(decoding.beam, MOST, 2), model.idle(BEAM, MOST + 1)
    select, concatenate, reset = decode.select_streams, decode.concatenate_streams, decode.reset_streams
    different = r"states\[2\] must be of the same"
    cases = [
        (select, (greedy, [0, 2]), ValueError, r"rows must lie in \[0, 2\), got \[0, 2\]"),
        (select, (greedy, [-1]), ValueError, r"rows must lie in \[0, 2\), got \[-1\]"),
        (select, (greedy, 1), ValueError, r"rows must have shape \[R\], got \(\)"),
        (select, (greedy, np.ones(2, bool)), TypeError, "rows must have an integer dtype"),
        (select, ((1, 2), [0]), TypeError, r"state must be Hypotheses.state of .*, got \(1, 2\)"),
        (select, (None, [0]), TypeError, "state must be"),
        (concatenate, ([],), TypeError, "states must be a sequence of states"),
        (concatenate, (greedy,), TypeError, "states must be a sequence of states"),
        (concatenate, ([greedy, None],), TypeError, r"states\[1\] must be Hypotheses.state"),
        *((concatenate, ([beam, beam, x],), ValueError, different) for x in (greedy, *others)),
        (reset, (greedy, [True]), ValueError, r"where must be bool \[B\] with B = 2, got bool \(1,"),
        (reset, (greedy, [0, 1]), ValueError, r"where must be bool \[B\] .*, got int64 \(2,\)"),
        (reset, (3, [True]), TypeError, "state must be Hypotheses.state of .*, got 3"),
        (decode.commit_labels, (model.search(decoding.greedy, MOST), lengths), TypeError, "hypotheses must be those"),
        (decode.commit_labels, (beam, lengths), TypeError, "hypotheses.state must be"),
        (decode.commit_labels, (model.search(BEAM, MOST), lengths[:1]), ValueError, r"counts must have shape \[B\]"),
    ]
    for function, arguments, error, message in cases:
        with pytest.raises(error, match=f"{function.__name__}: {message}"):
            function(*arguments)
    for state, got in ((greedy, "that of another search"), (3, "")):
        with pytest.raises(TypeError, match=f"state must be Hypotheses.state of an earlier part by beam, got {got}"):
            model.search(BEAM, MOST, state=state)
