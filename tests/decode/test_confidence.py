"""Do a decoder and the loss say the same of a label?"""

import jax
import jax.numpy as jnp
import numpy as np

import family
from decoding import EXACT, LABELS, lossless
from jax_rnnt import decode

FRAMES, MOST = 6, 2
AT = (1, 3)  # frames of the labels
PROBABILITIES = np.array([[0.3, 0.7], [0.6, 0.4]])  # of each label at its node


def table():
    """Logits [T, U + 1, V] with which all alignments of labels pass the same nodes, with the probability 1.

    After the last label the blank is not certain, but the lattice of the constrained loss asks for it.
    """
    rows = np.full((FRAMES, MOST + 1, LABELS + 1), -np.inf)
    rows[..., -1] = 0.0
    for u, (frame, row) in enumerate(zip(AT, np.log(PROBABILITIES))):
        rows[frame, u] = *row, -np.inf
    rows[AT[-1], MOST] = np.log([0.05, 0.05, 0.9])
    return rows


def test_one_alignment():
    """Both are the probability of the label at its node, also at a temperature.

    Enumerations prove all other losses: of the decoder (test_fusion) and of the loss (test_label_log_probs).
    """
    loss, temperature = family.CONSTRAINED, 1.7
    rows, columns = table(), MOST + 1
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
    expected = np.log(PROBABILITIES)[[0, 1], found.labels[0, alive]]
    np.testing.assert_allclose(found.label_log_probs[0, alive], expected, rtol=EXACT)
    np.testing.assert_allclose(of_loss[alive], expected, rtol=EXACT)
    np.testing.assert_allclose(found.scores[0, alive], expected.sum(1) + np.log(0.9), rtol=EXACT)
    np.testing.assert_allclose(-nll[alive], expected.sum(1) + np.log(0.9), rtol=EXACT)
