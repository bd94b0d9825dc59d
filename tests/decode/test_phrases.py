"""Do phrases earn what their definition says, sequence by sequence?"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoding import worth
from jax_rnnt import decode
from jax_rnnt.decode.lm import _automaton

V = 4
SIZE = 64  # of lists, so that they share a program


def random_phrases(rng, number, longest=5, classes=V):
    phrases = [rng.integers(0, classes, rng.integers(1, longest + 1)).tolist() for _ in range(number)]
    return phrases, rng.choice([0.5, 1.0, 1.25, 2.0, -0.75], number).tolist()  # exact in float32


@functools.partial(jax.jit, static_argnames=("rows", "gpu"))
@chex.assert_max_traces(n=2)
def run(model, labels, rows, gpu):
    """(scores of the labels given [N, L], sums of the row [N, L], final scores [N, L]) before each label [N, L].

    `gpu`: as a program for a GPU does it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if gpu:
            patch.setattr(jax.lax, "platform_dependent", lambda *x, cuda, **_: cuda(*x))
        return rows_of(model, labels, rows)


def rows_of(model, labels, rows):
    start = jnp.full((rows, 1), model.start, jnp.int32)
    given = jnp.asarray(labels, jnp.int32)

    def step(state, pair):
        scores, state = model.step(state, pair[0])
        return state, (scores[jnp.arange(rows), pair[1]], scores, model.final(state))

    before = jnp.concatenate([start, given[:, :-1]], 1)
    found = jax.lax.scan(step, model.initial(rows), (before.T, given.T))[1]
    return [jnp.swapaxes(x, 0, 1) for x in found]


def check(model, labels, lists, depth=0):
    """`lists`: (phrases, weights) of each row."""
    value = functools.partial(worth, depth=depth)
    taken, rows, final = map(np.asarray, run(model, labels, len(labels), gpu=False))
    on_gpu = run(model, labels, len(labels), gpu=True)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), on_gpu, [taken, rows, final])
    for n, (phrases, weights) in enumerate(lists):
        for i in range(len(labels[n])):
            now = value(labels[n][:i], phrases, weights, finished=False)
            np.testing.assert_allclose(taken[n, :i].sum(), now, atol=1e-5)
            np.testing.assert_allclose(now + final[n, i], value(labels[n][:i], phrases, weights, True), atol=1e-5)
            expected = [value([*labels[n][:i], x], phrases, weights, False) - now for x in range(model.start)]
            np.testing.assert_allclose(rows[n, i], expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_the_definition(seed):
    """One list for all rows: overlaps, phrases in phrases, equal ones, negative weights."""
    rng = np.random.default_rng(seed)
    phrases, weights = random_phrases(rng, 3 * seed + 2, classes=2 if seed % 2 else V)
    depth = (0, 0.5, 1, 3)[seed]
    model = decode.Phrases(phrases, weights, classes=V, size=SIZE, depth=depth)
    assert (model.start, model.symbols, model.utterances) == (V, V + 1, None)
    labels = rng.integers(0, 2 if seed % 2 else V, (20, 12))
    check(model, labels, [(phrases, weights)] * 20, depth)
    assert repr(model) == f"Phrases(one list, classes=4, size={SIZE})"


def test_lists_of_utterances():
    """Each row has that of its utterance; rows of an utterance stand together; no list, an empty and a large one.

    New lists compile nothing: other phrases, weights, lengths.
    """
    rng = np.random.default_rng(5)
    labels = rng.integers(0, V, (12, 10))
    for numbers in ((3, 0, 9, 1), (1, 4, 0, 2), (0, 0, 0, 0)):
        lists = [random_phrases(rng, n) for n in numbers]
        model = decode.Phrases([x for x, _ in lists], [x for _, x in lists], classes=V, size=SIZE)
        assert model.utterances == 4 and repr(model) == f"Phrases(4 lists, classes=4, size={SIZE})"
        check(model, labels, [x for x in lists for _ in range(3)])
        ones = decode.Phrases([x for x, _ in lists], 0.5, classes=V, size=SIZE)
        check(ones, labels, [(x, [0.5] * len(x)) for x, _ in lists for _ in range(3)])
    assert decode.Phrases([[], []], classes=V).utterances == 2
    assert decode.Phrases([], classes=V).utterances is None


@pytest.mark.slow
def test_long_phrases_and_many(monkeypatch):
    """More arcs than are put into rows at once; a phrase that is its own suffix again and again."""
    monkeypatch.setattr(_automaton, "CHUNK", 7)
    phrases = [*([0, x] for x in range(9)), [1] * 15, [1, 1, 0]]
    labels = np.random.default_rng(6).choice([0, 1, 1, 1, 1, 5], (5, 20))
    check(decode.Phrases(phrases, 0.5, classes=9), labels, [(phrases, [0.5] * len(phrases))] * 5)


@pytest.mark.slow
def test_a_list_without_room():
    """Of one phrase, whose states and arcs fill the arrays in different places."""
    labels, model = np.random.default_rng(8).integers(0, 3, (30, 5)), decode.Phrases([[0, 1, 2]], 1.0, classes=V)
    check(model, labels, [([[0, 1, 2]], [1.0])] * 30)
    assert repr(model) == "Phrases(one list, classes=4, size=3)"


def test_place():
    """Matches go on where their rows are now, with the lists of the utterances there."""
    lists = [[[0, 1, 2]], [[0, 1, 2], [3]]]
    model, step = decode.Phrases(lists, classes=V, size=5), jax.jit(lambda model, *x: model.step(*x))
    state = model.initial(4)
    for label in (V, 0, 1):
        _, state = step(model, state, jnp.full(4, label, jnp.int32))
    first, second = np.asarray(state).reshape(2, 2)
    assert first[0] == first[1] != second[0] == second[1]
    np.testing.assert_array_equal(model.place(state), state)
    np.testing.assert_array_equal(model.place(state[::-1]), state)
    np.testing.assert_array_equal(model.place(state[:2]), [first[0], second[0]])
    _, again = step(model, state, jnp.full(4, V, jnp.int32))
    np.testing.assert_array_equal(again, model.initial(4))
    shared = decode.Phrases(lists[0], classes=V)
    np.testing.assert_array_equal(shared.place(state), state)


def test_a_match_that_other_lists_do_not_know():
    """A stream goes on with other lists: the match ends, as if it had not begun."""
    step = jax.jit(lambda model, *x: model.step(*x))
    long, short = ([[[0, 1, 2, 0, 1]], [[3, 2, 1, 0, 3]]], [[[3]], [[3, 1]]])
    long, short = (decode.Phrases(x, classes=V, size=5) for x in (long, short))
    state = long.initial(4)
    for labels in ((V, V), (0, 3), (1, 2), (2, 1), (0, 0)):
        _, state = step(long, state, jnp.repeat(jnp.array(labels, jnp.int32), 2))
    after = jnp.full(4, 3, jnp.int32)
    jax.tree.map(np.testing.assert_array_equal, step(short, state, after), step(short, short.initial(4), after))


@pytest.mark.parametrize(
    ("phrases", "options", "error", "message"),
    [
        ([[0, 4]], {}, ValueError, r"phrases must have labels in \[0, 4\), got \[4\]"),
        ([[0, -1]], {}, ValueError, r"phrases must have labels in \[0, 4\), got \[-1\]"),
        ([[0], []], {}, ValueError, "phrases must have one label or more, got phrase 1 without"),
        ([[0.5]], {}, TypeError, "phrases must have an integer dtype, got float64"),
        ("ab", {}, TypeError, "phrases must be a list of phrases, which are lists .*, got 'ab'"),
        (["ab"], {}, TypeError, "phrases must be a list of phrases, .* got 'ab'"),
        ([[[0]], [1]], {}, TypeError, "phrases must be .* or such a list for each utterance, got both"),
        ([[0]], dict(weights=np.nan), ValueError, "weights must be known, and at most 1e.30 in size, got nan"),
        ([[0]], dict(weights=[1e39]), ValueError, r"weights must be .* in size, got \[1e\+39\]"),  # inf in float32
        ([[0]], dict(weights=10**400), ValueError, "weights must be a number that a float holds"),
        ([[0]], dict(weights=[True]), TypeError, "weights must be a real number, got True"),
        ([[0]], dict(weights=[1, 2]), ValueError, r"weights must be a number, or one of each phrase .*, got \[1, 2\]"),
        ([[[0]], []], dict(weights=[1]), ValueError, "weights must be a number, or one of each phrase"),
        ([[0, 1], [0, 2, 3]], dict(size=3), ValueError, "size must be 4 or more, as the phrases need so much, got 3"),
        (
            [[], [[1, 2]]],
            dict(size=1),
            ValueError,
            "size must be 2 or more, as the phrases of utterance 1 need so much",
        ),
        ([[0]], dict(size=0), ValueError, "size must be 1 or more, got 0"),
        ([[0]], dict(classes=0), ValueError, "classes must be 1 or more, got 0"),
        ([[0]], dict(depth=-0.1), ValueError, "depth must be known, 0 or more, and at most 1e.30, got -0.1"),
        ([[0]], dict(depth=np.nan), ValueError, "depth must be known, 0 or more, and at most 1e.30, got nan"),
        ([[0]], dict(depth="1"), TypeError, "depth must be a real number, got '1'"),
        ([[0]], dict(depth=1e20, weights=-1e20), ValueError, r"depth must be so small .*, got 1e\+20 beside 1e\+20"),
    ],
)
def test_errors(phrases, options, error, message):
    with pytest.raises(error, match=f"Phrases: {message}"):
        decode.Phrases(phrases, **dict(classes=V) | options)


def test_lists_of_another_number_of_utterances():
    model = decode.Phrases([[[0]], [[1]]], classes=V)
    with pytest.raises(ValueError, match=r"Phrases: phrases must be lists for the utterances .* got 2 lists and N = 3"):
        model.initial(3)
