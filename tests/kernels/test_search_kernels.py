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
    assert all(f"jax_rnnt_search_{name}" in program.as_text() for name in ("moves", "walk", "rows", "choice"))
    found = program.compile()(*given)
    monkeypatch.setattr(jax_rnnt._xla, "where_steps", lambda with_kernels, plain, *arguments: plain(*arguments))
    expected = jax.jit(lambda *x: run(*x))(*given)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), found, expected)


def log_softmaxes(logits, classes):
    """In float64, of tokens and of durations."""
    parts = np.split(logits.astype(np.float64), [classes], 1)
    return [x - np.logaddexp.reduce(x, 1, keepdims=True) for x in parts]


@pytest.mark.parametrize(("token_first", "biased"), [(0, True), (1, False)], ids=str)
def test_moves(token_first, biased):
    """The best move of each row; where two are as good up to rounding, one of them with the score of the best."""
    rng, (batch, window, classes, durations) = np.random.default_rng(token_first), (300, 3, 300, 3)
    kind = dict(tokens=(0, 0, 1, -1, -1, -1), of_durations=(1, 2, 0, 0, 1, 2), frames=(1, 2, 1, 0, 1, 2))
    kind |= dict(may_end=(1, 1, 1, 0, 0, 0), blanks=(7, 2), durations=durations, window=window)
    kind |= dict(labels_per_frame=2, max_labels=6, token_first=token_first)
    logits = (4 * rng.normal(size=(batch * window, classes + durations))).round(1).astype(np.float32)
    logits[:, [7, 2]] += rng.integers(0, 20, (batch * window, 1)).astype(np.float32)
    logits[0, 5], logits[1, -1], logits[2, :classes] = np.nan, np.inf, -np.inf
    bias = [rng.integers(-2, 3, classes + durations).astype(np.float32)] if biased else []
    frame, count_here, counts = (integers(rng, batch, high=n) for n in (9, 3, 8))
    lengths, ends = integers(rng, batch, low=4, high=12), integers(rng, batch, high=2)
    parts = integers(rng, 2, *logits.shape).astype(np.float32) if biased else np.zeros((0, *logits.shape), np.float32)
    operands = [np.stack([logits, *parts]), frame, count_here, counts, lengths, ends, *bias]
    results = [((batch, window), dtype) for dtype in ("float32", "int32", "int32", "int32", "float32")]
    found = [x.reshape(-1) for x in door.call("jax_rnnt_search_moves", operands, kind, results)]
    expected = jax.jit(functools.partial(_greedy.moves, **kind))(*operands)
    np.testing.assert_allclose(found[0][:3], expected[0].reshape(-1)[:3], rtol=1e-6)
    assert np.isnan(found[0][:2]).all() and np.isneginf(found[0][2])
    score, reads, needs, label, log_prob = found
    logits[:3] = 0
    tokens, of_durations = log_softmaxes(sum((*parts, *(x[None] for x in bias)), logits), classes)
    of_labels = tokens.copy()
    of_labels[:, [7, 2]] = -np.inf
    unlike = 0
    for i in range(3, batch * window):
        b, k = divmod(i, window)
        best = int(of_labels[i].argmax())
        np.testing.assert_allclose(log_prob[i], tokens[i, best], atol=2e-6, rtol=2e-7)
        may_write = (count_here[b] if k == 0 else 0) < 2 and counts[b] < 6
        longest = of_durations[i].argmax()
        moves = {}
        for j, (token, d, reading, end) in enumerate(
            zip(*(kind[x] for x in ("tokens", "of_durations", "frames", "may_end")))
        ):
            after = frame[b] + k + reading
            if ends[b] and (after > lengths[b] or (after == lengths[b] and not end)):
                continue
            if (token >= 0 or may_write) and not (token_first and d != longest):
                moves[j] = of_durations[i, d] + tokens[i, kind["blanks"][token] if token >= 0 else best]
        if not moves:
            assert np.isneginf(score[i])
            continue
        top = max(moves.values())
        np.testing.assert_allclose(score[i], top, atol=4e-6, rtol=2e-7)
        good = [j for j, x in moves.items() if x > top - 1e-5]
        unlike += len(good) > 1
        assert (reads[i], needs[i], label[i]) in [
            (
                kind["frames"][j],
                max(kind["frames"][j] + 1 - kind["may_end"][j], 1),
                -1 if kind["tokens"][j] >= 0 else best,
            )
            for j in good
        ]
    assert unlike < batch / 10


@pytest.mark.parametrize(("blanks", "durations", "classes"), [((0,), 0, 600), ((7, 2), 5, 40)], ids=str)
def test_rows(blanks, durations, classes):
    """Log-probabilities are within 2e-6 of those of float64; labels come in the order of the kernel's numbers."""
    rng, best = np.random.default_rng(classes), 6
    logits = (4 * rng.normal(size=(300, classes + durations))).round(1).astype(np.float32)
    logits[0], logits[1, 3], logits[2, -1], logits[3, :classes] = -np.inf, np.nan, np.inf, -np.inf
    attributes = dict(blanks=blanks, durations=durations, best=best)
    results = [((300, len(blanks) + durations), "float32"), ((300, best), "float32"), ((300, best), "int32")]
    bias = rng.integers(-2, 3, classes + durations).astype(np.float32)
    operands, results = [(logits - bias[None])[None], bias], [*results, ((300,), "bool")]
    heads, scores, places, bad = door.call("jax_rnnt_search_rows", operands, attributes, results)
    logits = operands[0][0] + bias[None]
    np.testing.assert_array_equal(bad, np.isin(np.arange(300), (1, 2)))
    tokens, others = log_softmaxes(logits[4:], classes)
    np.testing.assert_allclose(heads[4:], np.concatenate([tokens[:, list(blanks)], others], 1), atol=2e-6, rtol=2e-7)
    plain = jax.jit(functools.partial(_beam_kernel.rows, **attributes))(*operands)
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
