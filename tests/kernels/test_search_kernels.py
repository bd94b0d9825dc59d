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

pytestmark = pytest.mark.skipif(
    not (platforms.emulated() and door.native()), reason="the emulation runs them: lab/run.sh emulation"
)
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
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), found, expected)
