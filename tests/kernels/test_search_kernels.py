"""Do whole searches by the kernels find what those by the plain steps find?

`lab/emulation/check_search.h` compares each kernel with plain loops and with double precision, with many ties.
"""

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
from jax_rnnt.decode.search import _greedy

pytestmark = pytest.mark.skipif(
    not (platforms.emulated() and door.native()), reason="the emulation runs them: lab/run.sh emulation"
)
assert_near = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)
# Of a loss, what greedy search has besides, and a beam.
CASES = [
    ("rnnt", {}, {}),
    ("rnnt", {"window": 1}, {"frames_at_once": 4, "exact_end": True}),
    ("tdt", {"exact_end": True}, {"frames_at_once": 3}),
    ("tdt", {"duration_choice": "token_first", "max_symbols": 2}, {"merge": False, "max_symbols": 2}),
    ("multiblank", {}, {"frames_at_once": 2}),
]


@pytest.mark.parametrize(("name", "greedy", "beam"), CASES, ids=str)
def test_searches(name, greedy, beam, monkeypatch):
    """Of random models, with labels, frames, durations and scores."""
    model = Model(NAMED[name], batch=5, frames=9)
    parameters = jax.tree.map(np.float32, model.parameters)

    def run(encoder, lengths):
        predictor = parameters.predictor._replace(initial=lambda n: jnp.zeros((n, len(parameters.mix)), jnp.float32))
        batch = model.loss.value(), parameters.joint, predictor, encoder, lengths, 12
        return decode.greedy(*batch, **greedy)[:6], decode.beam(*batch, 3, threshold=6.0, **beam)[:6]

    given = np.float32(model.encoder), model.lengths
    program = jax.jit(run).lower(*given)
    assert all(f"jax_rnnt_search_{name}" in program.as_text() for name in ("moves", "walk", "rows", "choice"))
    found = program.compile()(*given)
    monkeypatch.setattr(jax_rnnt._xla, "where_steps", lambda with_kernels, plain, *arguments: plain(*arguments))
    expected = jax.jit(lambda *x: run(*x))(*given)
    jax.tree.map(assert_near, found, expected)


def test_the_best_duration_alone():
    """Of moves as no loss has them: a blank lacks some durations, and is out where one of these is the best."""
    rng, (batch, window) = np.random.default_rng(0), (50, 3)
    kind = dict(tokens=(0, 0, 1, -1, -1, -1), of_durations=(1, 2, 0, 0, 1, 2), frames=(1, 2, 1, 0, 1, 2))
    kind |= dict(may_end=(1, 1, 1, 0, 0, 0), blanks=(7, 2), durations=3, window=window)
    kind |= dict(labels_per_frame=2, max_labels=6, token_first=1)
    operands = [np.float32(4 * rng.normal(size=(1, batch * window, 33)))]
    operands += [rng.integers(0, n, batch).astype(np.int32) for n in (9, 3, 8, 12, 2)]
    results = [((batch, window), dtype) for dtype in ("float32", "int32", "int32", "int32", "float32")]
    found = door.call("jax_rnnt_search_moves", operands, kind, results)
    jax.tree.map(assert_near, list(found), jax.jit(functools.partial(_greedy.moves, **kind))(*operands))
