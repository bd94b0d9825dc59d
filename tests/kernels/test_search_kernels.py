"""Do the kernels of the searches do what the plain steps do, from equal scores, with many ties?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import door
import jax_rnnt
import platforms
from decoding import NAMED, Model
from jax_rnnt import decode
from jax_rnnt.decode.search import _beam_kernel, _greedy

pytestmark = pytest.mark.skipif(
    not (platforms.emulated() and door.native()), reason="the emulation runs them: lab/run.sh emulation"
)


RNNT = dict(frames=(1, 0), may_end=(1, 0), blanks=1)
TDT = dict(frames=(1, 2, 0, 1, 2), may_end=(1, 1, 0, 1, 1), blanks=2)
OPEN = dict(frames=(1, 3, 0), may_end=(0, 1, 0), blanks=2)


def integers(rng, *shape, low=0, high=5):
    return rng.integers(low, high, shape).astype(np.int32)


def scores(rng, *shape):
    """Few different numbers, so many are equal; some sums round."""
    return (rng.integers(-12, 1, shape) * rng.choice([0.25, 0.37])).astype(np.float32)


@pytest.mark.parametrize("rules", [(2, 0, 0), (1, 1, 1)], ids=str)
def test_walk(rules):
    """To the bit: of utterances at their beginning, at their end, and with full tables."""
    attributes = dict(zip(("labels_per_frame", "token_first", "reach"), rules))
    plain, rng, (batch, window, room) = (
        jax.jit(functools.partial(_greedy.walk, **attributes)),
        np.random.default_rng(0),
        (1500, 4, 9),
    )
    nodes, each, table = (batch, window), (batch,), (batch, room)
    label = np.maximum(integers(rng, *nodes, low=-3, high=4), -1)
    reads = np.where(label < 0, integers(rng, *nodes, low=1, high=3), integers(rng, *nodes, high=3))
    best = scores(rng, *nodes), reads, integers(rng, *nodes, low=1), label, scores(rng, *nodes)
    now = integers(rng, *each, high=12), integers(rng, *each), integers(rng, *each, high=room + 1), integers(rng, *each)
    tables = *(integers(rng, *table) for _ in range(3)), scores(rng, *table)
    operands = [*best, *now, scores(rng, *each), *tables, integers(rng, *each, high=14), integers(rng, *each)]
    expected = [np.asarray(x) for x in plain(*operands)]
    results = [(x.shape, x.dtype) for x in expected]
    for aliases in ({}, {5 + i: i for i in range(9)}):
        found = door.call("jax_rnnt_search_walk", operands, attributes, results, aliases=aliases)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x, y)


def beams(rng, batch, width, window, labels, room, kind):
    """Operands of a choice: beams as a search may have them, at random."""
    nodes, each, one = (batch, width * window), (batch, width), (batch, 1)
    lengths, first = integers(rng, batch, low=4, high=12), integers(rng, batch, high=7)
    frame, score = integers(rng, *each, low=2, high=6 + window), scores(rng, *each)
    path, dead = score - np.abs(scores(rng, *each)), rng.random(each) < 0.15
    score[dead] = path[dead] = -np.inf
    begin = np.where(dead, np.iinfo(np.int32).max, frame).min(1).astype(np.int64)
    end = begin + 1 if window == 1 else np.minimum(begin + window - (first + begin) % window, lengths)
    active = (frame < end[:, None]) & (begin < lengths)[:, None] & ~dead
    unread = np.where(rng.random(each) < 0.5, -1, integers(rng, *each, high=4))
    label = np.where(active, unread, -1)
    slots = rng.permuted(np.tile(np.arange(2 * width), (batch, 1)), axis=1)
    slot, free = slots[:, :width], np.sort(slots[:, width:])
    key = integers(rng, *each, high=2)
    columns = [frame, integers(rng, *each, high=6), integers(rng, *each, high=2), unread, slot, key, 5 * key + 1]
    columns += [
        np.zeros(each),
        active,
        label,
        np.where(label >= 0, free, 2 * width),
        integers(rng, *one, high=room - 1),
    ]
    columns += [integers(rng, *one, high=9), begin[:, None]]
    ints = np.stack([np.broadcast_to(x, each).astype(np.int32) for x in columns], 2)
    gains = scores(rng, *nodes, len(kind["frames"]) + 1)
    there = (frame[..., None] + np.arange(window) < end[:, None, None]) & active[..., None]
    gains[~there.reshape(nodes)] = -np.inf
    gains[rng.random(gains.shape) < 0.1] = -np.inf
    gains[..., -1] = rng.random(nodes) < 0.02  # bad rows
    best = -np.sort(-scores(rng, *nodes, labels), -1)
    best[rng.random(nodes) < 0.05, -1] = -np.inf
    places = rng.permuted(np.tile(np.arange(labels + 3, dtype=np.int32), (*nodes, 1)), axis=2)[..., :labels].copy()
    threshold = np.where(rng.random(batch) < 0.5, np.inf, 2).astype(np.float32)
    lists = best, places, scores(rng, *best.shape)
    written = integers(rng, *each, 4, room + 1)
    return [
        np.stack([score, path], 2),
        ints,
        written,
        gains,
        *lists,
        lengths,
        first,
        threshold,
    ]


@pytest.mark.parametrize(("name", "frames_at_once"), [("rnnt", 1), ("tdt", 3)])
def test_searches(name, frames_at_once, monkeypatch):
    """Whole searches of random models find what the plain steps find."""
    model = Model(NAMED[name], batch=5, frames=9)
    parameters = jax.tree.map(np.float32, model.parameters)

    def run(encoder, lengths):
        predictor = parameters.predictor._replace(initial=lambda n: jnp.zeros((n, len(parameters.mix)), jnp.float32))
        batch = model.loss.value(), parameters.joint, predictor, encoder, lengths, 12
        beam = decode.beam(*batch, 3, frames_at_once=frames_at_once, threshold=6.0)
        return decode.greedy(*batch)[:6], beam[:6]

    given = np.float32(model.encoder), model.lengths
    program = jax.jit(run).lower(*given)
    assert "jax_rnnt_search_choice" in program.as_text()
    found = program.compile()(*given)
    monkeypatch.setattr(jax_rnnt._xla, "where_steps", lambda with_kernels, plain, *arguments: plain(*arguments))
    expected = jax.jit(lambda *x: run(*x))(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), found, expected)


@pytest.mark.parametrize(("blanks", "durations", "classes"), [((0,), 0, 600), ((7, 2), 5, 40)], ids=str)
def test_rows(blanks, durations, classes):
    """Log-probabilities are within 2e-6 of those of float64; labels come in the order of the kernel's numbers."""
    rng, best = np.random.default_rng(classes), 6
    logits = (4 * rng.normal(size=(300, classes + durations))).round(1).astype(np.float32)
    logits[0], logits[1, 3], logits[2, -1], logits[3, :classes] = -np.inf, np.nan, np.inf, -np.inf
    attributes = dict(blanks=blanks, durations=durations, best=best)
    results = [((300, len(blanks) + durations), "float32"), ((300, best), "float32"), ((300, best), "int32")]
    heads, scores, places, bad = door.call("jax_rnnt_search_rows", [logits], attributes, [*results, ((300,), "bool")])
    np.testing.assert_array_equal(bad, np.isin(np.arange(300), (1, 2)))
    wide = logits[4:].astype(np.float64)
    tokens, others = (x - np.logaddexp.reduce(x, 1, keepdims=True) for x in np.split(wide, [classes], 1))
    np.testing.assert_allclose(heads[4:], np.concatenate([tokens[:, list(blanks)], others], 1), atol=2e-6, rtol=2e-7)
    plain = jax.jit(functools.partial(_beam_kernel.rows, **attributes))(logits.copy())
    logits[:, list(blanks)] = -np.inf
    tokens[:, list(blanks)] = -np.inf
    expected = np.argsort(-logits[4:, :classes], 1, kind="stable")[:, :best]
    np.testing.assert_array_equal(places[4:], expected)
    np.testing.assert_allclose(scores[4:], np.take_along_axis(tokens, expected, 1), atol=2e-6, rtol=2e-7)
    for x, y in zip((heads, scores, places, bad), plain, strict=True):
        np.testing.assert_allclose(x[4:], np.asarray(y)[4:], atol=2e-6, rtol=2e-7)
    assert np.isneginf(scores[[0, 1, 3]]).all() and np.isnan(heads[1, : len(blanks)]).all()


@pytest.mark.parametrize(
    ("width", "window", "merge", "kind"),
    [(6, 1, 1, RNNT), (4, 1, 0, TDT), (3, 3, 1, TDT), (2, 4, 1, OPEN)],
    ids=["beam", "apart", "durations in a window", "open ends in a window"],
)
def test_choice(width, window, merge, kind):
    """What is chosen, merged and gathered is the same to the bit; merged scores round by 3 units in the last place."""
    attributes = dict(kind, window=window, merge=merge)
    operands = beams(np.random.default_rng(width), 400, width, window, min(width, 5), 5, kind)
    expected = [np.asarray(x) for x in jax.jit(functools.partial(_beam_kernel.choose, **attributes))(*operands)]
    results = [(x.shape, x.dtype) for x in expected]
    found = door.call("jax_rnnt_search_choice", operands, attributes, results, aliases={i: i for i in range(3)})
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_array_equal(found[2], expected[2])
    np.testing.assert_allclose(found[0], expected[0], rtol=4e-7, atol=1e-6)
    assert (found[0] == expected[0]).mean() > 0.9
