"""Another domain by text alone: HAT (Variani et al. 2020) subtracts its internal language model, an n-gram replaces it.

    python speech/recipes/hat.py

The model is trained on random digits; those of the test follow each other as a source wants it. A bigram model is
estimated on texts of that source, and weights are chosen on lines other than those of the figures.
"""

import functools
import tempfile
from pathlib import Path

import jax
import numpy as np
from _shared import Digits, check, error_rate, fit, mean_loss, parse

from jax_rnnt import decode
from jax_rnnt_speech.cli import ngram

# Weights of the n-gram and of the internal model.
WEIGHTS = [(0.3, 0.0), (0.6, 0.0), (0.3, 0.3), (0.6, 0.3), (0.6, 0.6), (0.9, 0.6)]


def texts(rng, count):
    """Lines of the source: after a digit, only few follow."""
    following, lines = np.random.default_rng(7).dirichlet(np.full(10, 0.15), 10), []
    for _ in range(count):
        line = [rng.integers(10)]
        while len(line) < rng.integers(4, 8):
            line.append(rng.choice(10, p=following[line[-1]]))
        lines.append("".join(map(str, line)))
    return lines


def bigrams(lines, labels):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.arpa"
        ngram.write(path, *ngram.estimate([list(line) for line in lines], 2))
        return decode.NGram.from_arpa(path, labels)


def main():
    args = parse(__doc__, steps=450, lines=250)
    digits = Digits(steps=args.steps, seed=args.seed)
    model = digits.model(loss="hat")
    params = fit(model.params, mean_loss(model), digits)

    rng = np.random.default_rng(args.seed)
    tuning, test = (digits.with_texts(texts(rng, args.lines)) for _ in range(2))
    ngrams = bigrams(texts(rng, 5000), [*digits.tokens.labels, None])

    @functools.partial(jax.jit, static_argnums=3)
    def beam(params, batch, weights, width):
        network = model.network(params)
        rows, lengths = network.encode(model.inputs(batch), batch["lengths"])
        joint, predictor, rows = network.joint.decoder_inputs(network.predictor, rows)
        options = dict(max_symbols=3, fusion=[(ngrams, weights[0])], ilm_weight=weights[1])
        hypotheses = decode.Search(model.loss, joint, predictor, 20, **options).beam(rows, lengths, width)
        return hypotheses.labels[:, 0], hypotheses.counts[:, 0]

    def rate(lines, weights):
        return error_rate(lambda batch: beam(params, batch, np.float32(weights), 4), lines)

    plain = rate(test, (0, 0))
    shallow = min((x for x in WEIGHTS if not x[1]), key=lambda x: rate(tuning, x))
    internal = min((x for x in WEIGHTS if x[1]), key=lambda x: rate(tuning, x))
    print(f"beam search: CER {plain:.2f}")
    print(f"with the n-gram (weight {shallow[0]}): CER {rate(test, shallow):.2f}")
    best = rate(test, internal)
    print(f"with the n-gram ({internal[0]}), without {internal[1]} of the internal model: CER {best:.2f}")
    check("CER with both, of 100 with neither", 100 * best / plain, 85)


if __name__ == "__main__":
    main()
