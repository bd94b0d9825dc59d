"""Do a decoder and the loss say the same of a label?"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import family
from decoding import EXACT, LABELS, NAMED, WAYS, lossless
from jax_rnnt import decode

FRAMES, MOST = 6, 2
AT = (1, 3)  # frames of the labels
PROBABILITIES = np.array([[0.3, 0.7], [0.6, 0.4]])  # of each label at its node
DURATIONS = [0.5, 0.2, 0.3]  # of a label; a blank reads one frame


def table(loss):
    """Logits [T, U + 1, V] with which all alignments of labels pass the same nodes, with the probability 1.

    After the last label of the constrained loss its blank is not certain, but the lattice asks for it.
    """
    tokens = LABELS + 1 + loss.first_blank
    rows = np.full((FRAMES, MOST + 1, tokens + loss.extra_classes), -np.inf)
    rows[..., tokens - 1] = 60.0 if loss.name == "hat" else 0.0
    if loss.extra_classes:
        rows[..., tokens + family.DURATIONS.index(1)] = 0.0
    for u, (frame, row) in enumerate(zip(AT, np.log(PROBABILITIES))):
        rows[frame, u, :LABELS], rows[frame, u, LABELS:tokens] = row, -np.inf
        if loss.extra_classes:
            rows[frame, u, tokens:] = np.log(DURATIONS)
        if loss.name == "constrained":
            rows[AT[-1], MOST, :LABELS], rows[AT[-1], MOST, -1] = np.log(0.05), np.log(0.9)
    return rows


@pytest.mark.parametrize("name", ["constrained", "tdt", "split"])
def test_one_alignment(name):
    """Both are the probability of the label at its node, also at a temperature.

    Other losses take no other path: enumerations prove the decoder (test_fusion) and the loss (test_label_log_probs).
    """
    loss, temperature = NAMED[name], 1.7
    rows, columns = table(loss), MOST + 1
    counter = lambda counts, labels: (counts[:, None].astype(float), counts + 1)  # the column of the lattice
    networks = family.lookup(columns), decode.Predictor(lambda batch: jnp.zeros(batch, jnp.int32), counter)
    encoder, value = rows.reshape(1, FRAMES, -1), loss.value(reduction="none")

    @jax.jit
    def run(temperature):
        options = dict(exact_end=True, temperature=temperature)
        found = decode.beam(value, *networks, temperature * encoder, [FRAMES], MOST, lossless(loss, MOST), **options)
        labels, n = found.labels[0], found.labels.shape[1]
        batch = jnp.maximum(labels, 0), jnp.full(n, FRAMES), found.counts[0]
        logits = jnp.broadcast_to(jnp.asarray(rows), (n, *rows.shape))
        return found, value.label_log_probs(logits, *batch), value(logits, *batch)

    found, of_loss, nll = jax.tree.map(np.asarray, run(temperature))
    alive = np.flatnonzero(found.scores[0] > -np.inf)
    assert {tuple(x) for x in found.labels[0, alive]} == {(a, b) for a in range(LABELS) for b in range(LABELS)}
    more = math.log(sum(WAYS.values())) if name == "split" else 0.0
    expected = np.log(PROBABILITIES)[[0, 1], found.labels[0, alive]] + more
    np.testing.assert_allclose(found.label_log_probs[0, alive], expected, rtol=EXACT)
    np.testing.assert_allclose(of_loss[alive], expected, rtol=EXACT)
    blanks = np.log(0.9) if name == "constrained" else 0.0
    np.testing.assert_allclose(found.scores[0, alive], expected.sum(1) + blanks, rtol=EXACT)
    np.testing.assert_allclose(-nll[alive], expected.sum(1) + blanks, rtol=EXACT)
