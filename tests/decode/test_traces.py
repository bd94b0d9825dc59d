"""Is greedy search what the traces say, which other decoders may test against, too?"""

import itertools
import json
import math
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import project
from jax_rnnt import LinearJoint, MultiblankRNNTLoss, RNNTLoss, TDTLoss, decode

FOLDER = project.ROOT / "tests/golden"
TRACES = json.loads((FOLDER / "traces.json").read_text())


def test_the_file_is_what_its_program_writes():
    program = runpy.run_path(str(FOLDER / "write.py"))
    assert json.loads(program["lines"](program["document"]())) == TRACES
    steps = [step for case in TRACES.values() for step in case["steps"]]
    assert {step["duration"] for step in steps} == {0, 1, 2, 3, 4} and {step["label"] for step in steps} == {
        *range(-1, 4)
    }


def test_durations():
    """They are the frames between two moves, but for a label that the limit takes on, as the page says."""
    taken_on = 0
    for case in TRACES.values():
        here = 0
        for step, after in itertools.pairwise(case["steps"]):
            here = here + 1 if step["label"] >= 0 and step["duration"] == 0 else 0
            taken = case["token_first"] and here == case["max_symbols"]
            assert after["frame"] == step["frame"] + step["duration"] + taken
            taken_on, here = taken_on + taken, 0 if taken else here
    assert taken_on > 0


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
