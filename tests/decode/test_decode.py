"""Do the decoders find what a plain loop and an enumeration of all alignments find?"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compare
import decoding
import family
from decoding import (
    EXACT,
    MOST,
    NAMED,
    ROOM,
    Model,
    check_all,
    check_greedy,
    common,
    ends,
    greedy_loop,
    lossless,
    stateless,
    trimmed,
)
from jax_rnnt import decode
from jax_rnnt.decode import _beam_step, _hashing, _largest, _packing

# ------------------------------------------------------------------------------------------------ greedy search


@pytest.mark.quick("rnnt", "tdt", "hat")
@pytest.mark.parametrize("name", NAMED)
def test_greedy_is_the_plain_loop(name):
    """With exact ends and open ones, one frame at once and more, with room for some labels a frame."""
    frames, max_symbols = {"tdt": (9, 3), "multiblank": (1, 2), "rnnt": (4, 1)}.get(name, (4, 2))
    for seed in range(4):
        model, exact = Model(NAMED[name], batch=16, frames=7, seed=seed), ends(16)
        found = model.search(decoding.greedy, ROOM, frames_at_once=frames, max_symbols=max_symbols, exact_end=exact)
        check_greedy(model, found, exact_end=exact, max_symbols=max_symbols)


# -------------------------------------------------------------------------------------------------- beam search


@pytest.mark.quick("tdt-open")
@pytest.mark.parametrize(("name", "kind"), [("rnnt", "exact"), ("tdt", "open")])
def test_beam_is_the_enumeration(name, kind, monkeypatch):
    """Open ends are ranked by normalised scores, two frames at once. (test_fusion has the whole family.)"""
    monkeypatch.setattr(_beam_step, "STEPS", 2)  # fewer than labels, which lie one over the other after too many steps
    model, search, rank = Model(NAMED[name]), {}, lambda scores, counts: scores
    rules = dict(max_symbols=MOST, exact_end=True)
    if kind == "open":
        rules, search = dict(max_symbols=2), dict(length_norm=0.5, frames_at_once=2)
        rank = lambda scores, counts: scores / np.sqrt(counts + 1)
    width = lossless(model.loss) * (2 if kind == "open" else 1)  # in windows, hypotheses of several frames compete
    found = model.search(decoding.beam, MOST, width, **search, **rules)
    check_all(model, found, rank=rank, **rules)
    assert kind != "open" or (found.scores[:, 1:] > found.scores[:, :-1]).any()


@pytest.mark.parametrize("loss", [family.TDT, family.slow(family.MULTIBLANK)], ids=str)
def test_width_1(loss):
    """Without merging it is the plain loop of greedy search."""
    model, options = Model(loss, batch=8, frames=7), dict(exact_end=True, max_symbols=3)
    check_greedy(model, model.search(decoding.beam, ROOM, 1, merge=False, **options), 0, **options)


def test_no_labels_stand_twice():
    """In a beam that loses hypotheses; few are worse than greedy search, none is below a threshold.

    Labels are stable that all live hypotheses share; none without a hypothesis.
    """
    model = Model(family.TDT, batch=3, frames=13)
    search = lambda threshold: model.search(decoding.beam, 40, 4, threshold=np.float64(threshold))
    greedy, four = [greedy_loop(model, b, room=40)[-1] for b in range(3)], search(np.inf)
    assert (four.scores[:, 0] >= np.array(greedy) - 1e-9).mean() > 0.6
    alive = four.scores > -np.inf
    same = (four.labels[:, :, None] == four.labels[:, None]).all(-1) & alive[:, None] & alive[:, :, None]
    assert same.sum() == alive.sum() > 3
    near = search(2)
    kept = near.scores > -np.inf
    assert (near.scores >= near.scores[:, :1] - 2)[kept].all() and 3 <= kept.sum() < alive.sum()
    for found, b in itertools.product((four, near), range(3)):
        live = [trimmed(found, b, n)[0] for n in np.flatnonzero(found.scores[b] > -np.inf)]
        assert found.stable[b] == common(live)
    model.encoder[0, 0] = np.nan
    broken = search(np.inf)
    assert np.isnan(broken.scores[0]).all() and broken.stable[0] == 0 and broken.stable.dtype == np.int32


@pytest.mark.slow
def test_weights_of_zero():
    """A Python 0 runs no language model; a traced one adds nothing, whatever the model says."""
    model, calls = Model(NAMED["rnnt"]), []

    def step(state, labels):
        calls.append(len(labels))
        return jnp.broadcast_to(jnp.array([-jnp.inf, jnp.nan, -1.0]), (len(labels), model.tokens)), state

    def scores(step, weight, internal=0.0):
        models = ((decode.Predictor(lambda batch: (), step), weight),)
        options = dict(fusion=models, ilm_weight=internal, max_symbols=2)
        return decoding.beam(*model.networks, model.encoder, model.lengths, MOST, 4, **options).scores

    plain = jax.jit(lambda: scores(step, 0))()
    assert not calls
    np.testing.assert_allclose(jax.jit(lambda w: scores(step, w))(0.0), plain, rtol=EXACT)
    assert calls


# -------------------------------------------------------------------------------------------------- parts of a step


@pytest.mark.parametrize(("size", "k"), [(700, 3), (1000, 1), (20, 8)], ids=["blocks", "one", "one block"])
def test_largest_sums(size, k):
    """As a stable sort, with ties and rows that hold fewer finite numbers; no place twice; rows that are shared."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (9, size)).astype(np.float32)
    x[:2], x[1, 5], x[2], x[3, 1:] = -np.inf, 1, np.arange(size), -np.inf
    row, gain = rng.integers(0, 9, (6, 8)).astype(np.int32), rng.integers(0, 3, (6, 8)).astype(np.float32)
    row[0], row[1, :7] = 3, 0
    row[2], gain[3, 1:], gain[4] = 7, -np.inf, -np.inf
    x[8], row[5], gain[5, 1:] = 0, 8, -np.inf
    x[8, [3, -2, -1]] = 8, 9, 8  # a tie of the first block with that of the largest one
    found = jax.jit(lambda *arrays: _largest.largest_sums(*arrays, k))(x, row, gain)
    sums = (gain[..., None] + x[row]).reshape(6, -1)
    expected = np.argsort(-sums, -1, kind="stable")[:, :k]
    alive = np.take_along_axis(sums, expected, 1) > -np.inf
    assert alive.any() and (k == 1 or not alive.all())
    parent, place, value = (np.asarray(y) for y in found)
    np.testing.assert_array_equal((parent * size + place)[alive], expected[alive])
    np.testing.assert_array_equal(value[alive], np.take_along_axis(x[row].reshape(6, -1), expected, 1)[alive])
    dead = np.take_along_axis(gain, parent, 1) + value
    assert (dead[~alive] == -np.inf).all()


def test_fingerprints():
    """Equal rows have equal ones, different rows of any dtype others."""
    rows = {"a": np.array([[1, 2], [1, 2], [2, 1], [1, 3]], np.int32), "b": np.array([0.5, 0.5, 0.5, 0.5])}
    for tree in (rows, {"x": rows["a"].astype(jnp.bfloat16)}, [rows["a"].astype(np.int8), rows["a"][:, :0]]):
        found = {tuple(x) for x in np.asarray(_hashing.fingerprints(jax.tree.map(jnp.asarray, tree))).tolist()}
        assert len(found) == 3


@pytest.mark.slow
def test_packs_are_of_the_platform():
    """For which a program is lowered, whatever this process runs on; others have no trace of the packs."""
    model, rows = Model(family.RNNT, batch=4), 4 * 11
    search = jax.jit(lambda *batch: decoding.beam(*model.networks, *batch, MOST, 11)[:-1])
    traced, packed = search.trace(model.encoder, model.lengths), {}
    for platform in ("cpu", "cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        sizes = [int(x) for x in re.findall(r"dot_general .*: \(tensor<(\d+)x", text)]
        assert len(sizes) == 3 and {*sizes} <= {rows, _packing.PACK}, sizes  # start, step and joint network
        packed[platform] = _packing.PACK in sizes
    assert packed == {"cpu": True, "cuda": False, "tpu": False}


@pytest.mark.slow
def test_utterances_in_one_program(monkeypatch):
    """A batch whose rows are packed, shared and wait for each other finds what each utterance finds alone."""
    monkeypatch.setattr(_beam_step, "WAITING", 1)  # wait as long as one goes on
    model = Model(family.TDT, batch=8, frames=7)
    predictor = stateless(model)

    def search(encoder, lengths):
        options = dict(max_labels=ROOM, width=6, max_symbols=3)
        return decoding.beam(model.loss.value(), model.parameters.joint, predictor, encoder, lengths, **options)[:-1]

    assert _packing.packs(8 * 6) and not _packing.packs(6)
    alone = jax.jit(search)
    found = jax.tree.map(np.asarray, jax.jit(search)(model.encoder, model.lengths))
    for b in range(8):
        one = alone(model.encoder[b : b + 1], model.lengths[b : b + 1])
        compare.assert_close(jax.tree.map(lambda x: x[b : b + 1], found), one, rtol=EXACT)
