"""Does the search without a predictor find what plain loops find, and a round what each label says by itself?"""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest

import compare
import family
from decoding import (
    EXACT,
    LABELS,
    NAMED,
    ROOM,
    H,
    Model,
    assert_same,
    check_greedy,
    ends,
    greedy_loop,
    label_log_prob,
    trimmed,
)
from jax_rnnt import decode

ROW = np.linspace(-1, 1, H)  # in place of the predictor's


class Masked(Model):
    """A model whose predictor is masked at every node; blanks are rare enough for many labels."""

    def __init__(self, loss, **sizes):
        super().__init__(loss, batch=8, frames=9, **sizes)
        self.bias[LABELS : self.tokens] -= 2

    def row(self, prefix):
        return ROW

    @property
    def predictor(self):
        return self.parameters.predictor._replace(masked_row=jnp.asarray(ROW))

    def find(self, room=ROOM, function=decode.parallel, predictor=None, **options):
        """As `search`, with this predictor in place of its own."""
        search = masked(function) if predictor is None else through(function, predictor)
        return self.search(search, room, **options)._replace(state=None)


def through(function, predictor):
    """The search with another predictor than the given one."""
    return lambda loss, joint, _, *batch, **options: function(loss, joint, predictor, *batch, **options)


@functools.cache
def masked(function):
    """The search with `ROW` for the given predictor."""

    def search(loss, joint, predictor, *batch, **options):
        return function(loss, joint, predictor._replace(masked_row=jnp.asarray(ROW)), *batch, **options)

    return search


@pytest.mark.quick("rnnt")
@pytest.mark.parametrize("name", ["rnnt", "tdt", family.slow("split"), family.slow("constrained")])
def test_is_the_plain_loop(name):
    """With exact ends and open ones, a penalty and a temperature; also where room ends."""
    exact = ends(8)
    for seed, room in ((0, ROOM), (1, 3)):
        model = Masked(NAMED[name], seed=seed)
        model.temperature, model.penalty = 1.7, 0.4
        found = model.find(room, exact_end=exact, temperature=1.7, blank_penalty=0.4)
        assert found.counts.max() > 2 and (room > 3 or found.full.any())
        check_greedy(model, found, exact_end=exact, max_symbols=1, room=room)


@pytest.mark.slow
def test_token_first():
    """As greedy search of a predictor that makes this row alone."""
    model = Masked(family.tdt((2, 0, 1)))
    constant = lambda state, labels: (jnp.broadcast_to(jnp.asarray(ROW), (len(labels), H)), state)
    options, same = dict(duration_choice="token_first"), decode.Predictor(lambda batch: (), constant)
    found = model.find(**options)
    expected = model.find(function=decode.greedy, predictor=same, max_symbols=1, **options)
    assert (found.durations == 0).any() and (found.labels != model.find().labels).any()
    compare.assert_close(found[:-1], expected[:-1], rtol=EXACT)


def chosen_again(model, b, labels, frames, among=range(LABELS)):
    """(labels, log-probabilities): the best label at each frame, after those before it."""
    log_prob = lambda u, label: label_log_prob(model, b, frames[u], tuple(labels[:u]), label)
    after = [max(among, key=lambda label, u=u: log_prob(u, label)) for u in range(len(labels))]
    return after, [log_prob(u, label) for u, label in enumerate(after)]


def test_rounds():
    """Each label by a loop; all else stays as it is."""
    model, changes = Masked(family.RNNT, seed=2), [0, 0]
    whole, draft = Model(family.RNNT, batch=8, frames=9, seed=2), model.find()
    whole.bias[:] = model.bias
    for rounds in (1, 2):
        found = model.find(rounds=rounds)
        for x, y in zip(found[1:5], draft[1:5]):
            np.testing.assert_array_equal(x, y)
        for b in range(8):
            labels, frames, _ = trimmed(draft, b)
            for i in range(rounds):
                before, (labels, log_probs) = labels, chosen_again(whole, b, labels, frames)
                changes[i] += before != labels
            assert trimmed(found, b)[0] == labels
            np.testing.assert_allclose(found.label_log_probs[b, : len(labels)], log_probs, rtol=EXACT)
    assert min(changes) > 0, changes


def test_masks():
    """Each utterance has its own; the first moves are those of the plain loop, and a round chooses what is allowed."""
    model, masks = Masked(family.RNNT, seed=2), np.ones((8, LABELS), bool)
    masks[:4, 0], masks[4:6, 1] = False, False
    whole = Model(family.RNNT, batch=8, frames=9, seed=2)
    whole.bias[:] = model.bias
    run = lambda mask, rounds: model.find(fusion=((decode.Labels(mask), 0.7),), rounds=rounds)
    first, second = run(masks, 0), run(masks, 1)
    for b in range(8):
        among = np.flatnonzero(masks[b]).tolist()
        fuse = lambda prefix, label, among=among: 0.0 if label in among else -np.inf
        expected, log_probs, score = greedy_loop(model, b, max_symbols=1, fuse=fuse)
        assert trimmed(first, b) == expected
        np.testing.assert_allclose(first.scores[b], score, rtol=EXACT)
        np.testing.assert_allclose(first.label_log_probs[b][: len(log_probs)], log_probs, rtol=EXACT)
        labels, log_probs = chosen_again(whole, b, *expected[:2], among)
        assert trimmed(second, b)[0] == labels
        np.testing.assert_allclose(second.label_log_probs[b][: len(log_probs)], log_probs, rtol=EXACT)
    lm = decode.Predictor(lambda batch: (), lambda state, labels: (jnp.zeros((len(labels), LABELS)), state))
    with pytest.raises(ValueError, match=r"parallel: fusion\[0\] must be a decode.Labels, as this search knows no"):
        model.find(fusion=((lm, 0.5),))


def test_rounds_meet_nan():
    """In the predictor's rows after label 1: the score of the utterance is NaN for good, and of no other one."""
    model = Masked(family.RNNT, seed=2)
    after = lambda labels: jnp.where(labels == 1, jnp.nan, 1 - labels.astype(float))
    nan = decode.stateless_predictor(lambda labels: jnp.tile(after(labels), (1, H)), 1, start=2)
    nan = nan._replace(masked_row=jnp.asarray(ROW))
    draft = model.find(predictor=nan)
    met = (draft.labels[:, :-1] == 1) & (draft.labels[:, 1:] >= 0)
    assert np.isfinite(draft.scores).all() and set(met.any(1)) == {False, True}
    first, second = (np.isnan(model.find(predictor=nan, rounds=rounds).scores) for rounds in (1, 2))
    np.testing.assert_array_equal(first, met.any(1))
    assert (second >= first).all()


def test_without_its_own_row_it_is_zero():
    model = Masked(family.RNNT)
    zero, none = (model.parameters.predictor._replace(masked_row=x) for x in (jnp.zeros(H), None))
    assert_same(*(model.find(predictor=x)[:-1] for x in (zero, none)))
    assert (model.find(predictor=zero).labels != model.find().labels).any()


def test_wrong_masked_rows():
    model = Masked(family.RNNT)
    for row in (jnp.zeros(H + 1), True):
        message = rf"predictor.masked_row must be an array \[P\] = \(4,\), as a row .* got {re.escape(repr(row))}"
        with pytest.raises(ValueError, match=message):
            model.find(predictor=model.predictor._replace(masked_row=row))
