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
from jax_rnnt.decode.search import _beam_kernel, _greedy

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


def check_step(name, plain, kind, *operands):
    expected = [np.asarray(x) for x in jax.jit(functools.partial(plain, **kind))(*operands)]
    results = [(x.shape, x.dtype) for x in expected]
    jax.tree.map(assert_near, list(door.call(f"jax_rnnt_search_{name}", operands, kind, results)), expected)


def test_the_best_duration_alone():
    """Of moves as no loss has them: a blank lacks some durations, and is out where one of these is the best."""
    rng, (batch, window) = np.random.default_rng(0), (50, 3)
    kind = dict(tokens=(0, 0, 1, -1, -1, -1), of_durations=(1, 2, 0, 0, 1, 2), frames=(1, 2, 1, 0, 1, 2))
    kind |= dict(may_end=(1, 1, 1, 0, 0, 0), blanks=(7, 2), durations=3, window=window)
    kind |= dict(labels_per_frame=2, max_labels=6, token_first=1)
    logits = np.float32(4 * rng.normal(size=(1, batch * window, 33)))
    check_step("moves", _greedy.moves, kind, logits, *(np.int32(rng.integers(0, n, batch)) for n in (9, 3, 8, 12, 2)))


def test_rows():
    """Of equal labels the first comes first, also of those that one thread reads; NaN and +inf are bad anywhere."""
    rng, durations = np.random.default_rng(0), 5
    logits = (2 * rng.normal(size=(1, 300, 600 + durations))).round().astype(np.float32)
    logits[0, 0], logits[0, 1, 3], logits[0, 2, -1], logits[0, 3, :-durations] = -np.inf, np.nan, np.inf, -np.inf
    check_step("rows", _beam_kernel.rows, dict(blanks=(7, 2), durations=durations, best=6), logits)
