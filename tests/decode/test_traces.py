"""Is greedy search what the traces say, which other decoders may test against, too?

A case of tests/golden/traces.json holds a whole model: rows of the encoder [T, H], rows of the predictor [V, H] by the
last label (`start`: before the first one), and `weight` [H, classes] and `bias` of the logits tanh(encoder + predictor)
weight + bias. Classes are the labels, `big_blanks` (the frames that they read) from the last to the first, `blank`, and
`durations`. `max_symbols` bounds the labels of a frame, and `token_first` is the rule of NeMo. Each of `steps` is a
move: the `frame` that it leaves, its `label` (-1 for a blank), its `duration`, the frames that it reads, and its
`score`, the log-probability of the choice. A label of duration 0 keeps it where `max_symbols` takes it one frame on.
The first step that reaches T is the last.
"""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import project
import reference_numpy as truth
from jax_rnnt import LinearJoint, MultiblankRNNTLoss, RNNTLoss, TDTLoss, decode

TRACES = json.loads((project.ROOT / "tests/golden/traces.json").read_text())


def moves(case, row):
    """[(log-probability, label or None, frames that it reads)] in the order in which ties are broken."""
    blank, durations = case["blank"], case["durations"]
    tokens, each = truth.log_softmax(row[: blank + 1]), truth.log_softmax(row[blank + 1 :]) if durations else ()
    if durations:
        found = [(tokens[blank] + q, None, d) for q, d in zip(each, durations) if d]
        return found + [(tokens[k] + q, k, d) for q, d in zip(each, durations) for k in range(blank)]
    big = [(tokens[blank - 1 - i], None, d) for i, d in enumerate(case["big_blanks"])]
    return [(tokens[blank], None, 1), *big, *((tokens[k], k, 0) for k in range(blank - len(big)))]


def first_token(case, row, full):
    """The most probable token, then the most probable duration by itself."""
    blank, durations = case["blank"], case["durations"]
    tokens, each = truth.log_softmax(row[: blank + 1]), truth.log_softmax(row[blank + 1 :])
    token, best = (blank if full else int(np.argmax(tokens))), int(np.argmax(each))
    reads = durations[best]
    return tokens[token] + each[best], None if token == blank else token, max(reads, 1) if token == blank else reads


def plain_loop(case):
    """(frame, label or -1, duration, score) of each move."""
    encoder, table, weight, bias = (np.array(case[x]) for x in ("encoder", "predictor", "weight", "bias"))
    frame, last, here, steps = 0, case["start"], 0, []
    while frame < len(encoder):
        row, full = np.tanh(encoder[frame] + table[last]) @ weight + bias, here == case["max_symbols"]
        if case["token_first"]:
            score, label, reads = first_token(case, row, full)
        else:
            score, label, reads = max((x for x in moves(case, row) if x[1] is None or not full), key=lambda x: x[0])
        steps.append((frame, -1 if label is None else label, reads, score))
        last, here = (last if label is None else label), (here + 1 if label is not None and not reads else 0)
        frame += reads
        if case["token_first"] and here == case["max_symbols"]:  # the last label of a frame leaves it
            frame, here = frame + 1, 0
    return steps


def test_the_file_has_the_moves_of_a_plain_loop():
    """In NumPy, float64, without the library."""
    for case in TRACES.values():
        written = [(x["frame"], x["label"], x["duration"], x["score"]) for x in case["steps"]]
        expected = plain_loop(case)
        assert [x[:3] for x in written] == [x[:3] for x in expected]
        np.testing.assert_allclose([x[3] for x in written], [x[3] for x in expected], rtol=0, atol=6e-11)
        # Durations are the frames between two moves, but for a label that the limit takes on, as the page says.
        taken_on = [a["frame"] + a["duration"] < b["frame"] for a, b in itertools.pairwise(case["steps"])]
        assert any(taken_on) == case["token_first"]
    steps = [step for case in TRACES.values() for step in case["steps"]]
    assert {step["duration"] for step in steps} == {0, 1, 2, 3, 4}
    assert {step["label"] for step in steps} == {*range(-1, 4)}


@pytest.mark.quick("rnnt", "tdt, pair")
@pytest.mark.parametrize("name", TRACES)
def test_greedy_search(name):
    case, blank = TRACES[name], TRACES[name]["blank"]
    loss = RNNTLoss(blank=blank)
    if case["durations"]:
        loss = TDTLoss(case["durations"], blank=blank)
    elif case["big_blanks"]:
        loss = MultiblankRNNTLoss(case["big_blanks"], blank=blank)
    encoder, table, weight, bias = (jnp.array(case[x]) for x in ("encoder", "predictor", "weight", "bias"))
    predictor = decode.stateless_predictor(lambda labels: table[labels[:, 0]], 1, start=case["start"])
    options = dict(duration_choice="token_first") if case["token_first"] else {}
    search = decode.Search(loss, LinearJoint(weight, bias), predictor, 40, max_symbols=case["max_symbols"], **options)
    found = jax.jit(search.greedy)(encoder[None], jnp.array([len(encoder)]))
    labels = [step for step in case["steps"] if step["label"] >= 0]
    for field, x in (("label", found.labels), ("frame", found.frames), ("duration", found.durations)):
        assert x[0, : len(labels)].tolist() == [step[field] for step in labels]
    assert found.counts.tolist() == [len(labels)]
    np.testing.assert_allclose(found.scores[0], math.fsum(step["score"] for step in case["steps"]), atol=1e-8)
