"""Held-out error rates of spoken digits in white noise: greedy and beam search, with a digit n-gram, with phrases.

    python examples/train.py --data FOLDER     # first
    python examples/noisy.py --data FOLDER

Numbers of six digits come from a source in which few digits may follow a digit. A trigram model is estimated on numbers
other than those spoken. Phrases are the numbers of 20 contacts, of which an utterance names one; or none. Recordings
are held out from training. Weights are tuned on other numbers and noise, over all noises together.
"""

import argparse
import collections
import functools
import itertools
import math
import tempfile
from pathlib import Path

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from data import DataError, SpokenDigits, collate
    from flax import nnx
    from mwer import restore
    from train import positive
except ModuleNotFoundError as error:
    raise SystemExit(f"examples/noisy.py needs {error.name}: run pip install '.[examples]' in the clone.") from None

from jax_rnnt import decode
from jax_rnnt.metrics import label_errors

DIGITS, TEXT, CONTACTS, ORDER = 6, 5000, 20, 3  # of a number; numbers of the n-gram; of an utterance
RATIOS = None, 10, 5, 0, -5  # dB, of mean powers of an utterance; None: as recorded
# Weights of the n-gram, the phrases, and minus the internal language model: else an n-gram deletes digits.
NGRAM = [(weight, 0.0, weight * share) for weight in (0.4, 0.8, 1.2, 1.6) for share in (0, 0.5, 1)]
PHRASES = [(0.0, weight, 0.0) for weight in (0.5, 1.0, 2.0, 3.0)]


def draw(rows, rng, count):
    """Numbers of the source; `rows` [11, 10] are probabilities after each digit, and of the first."""
    numbers = np.full((count, DIGITS + 1), 10)
    for i in range(DIGITS):
        numbers[:, i + 1] = (rng.random((count, 1)) > np.cumsum(rows[numbers[:, i]], 1)[:, :-1]).sum(1)
    return numbers[:, 1:].tolist()


def write_arpa(path, numbers):
    """An n-gram model in ARPA format, interpolated as Witten and Bell do."""
    counts = [collections.Counter() for _ in range(ORDER)]
    for number in numbers:
        words = "<s>", *map(str, number), "</s>"
        for n, count in enumerate(counts):
            count.update(words[end - n : end + 1] for end in range(max(n, 1), len(words)))
    totals, kinds = collections.Counter(), collections.Counter(words[:-1] for x in counts for words in x)
    for words, count in itertools.chain.from_iterable(x.items() for x in counts):
        totals[words[:-1]] += count

    def probability(words):
        before = words[:-1]
        shorter = probability(words[1:]) if before else 1 / 11
        count = counts[len(before)][words]
        return (count + kinds[before] * shorter) / (totals[before] + kinds[before])

    lines = ["\\data\\", *(f"ngram {n}={len(x) + (n == 1)}" for n, x in enumerate(counts, 1))]
    for n, grams in enumerate(counts, 1):
        lines.append(f"\\{n}-grams:")
        for words in [("<s>",)] * (n == 1) + list(grams):
            score = -99 if words == ("<s>",) else math.log10(probability(words))
            backoff = kinds[words] and math.log10(kinds[words] / (totals[words] + kinds[words]))
            lines.append(f"{score:.6f}\t{' '.join(words)}" + f"\t{backoff:.6f}" * (n < ORDER))
    path.write_text("\n".join([*lines, "\\end\\", ""]))


def speak(data, rng, number, ratio):
    """Features of a number, by one speaker of the held-out recordings."""
    speakers = list(data.splits["test"].values())
    recordings, pieces = speakers[rng.integers(len(speakers))], []
    for digit in number:
        chosen = [samples for label, samples in recordings if label == digit]
        pieces += [np.zeros(rng.integers(0.25 * data.rate)), chosen[rng.integers(len(chosen))]]
    audio = np.concatenate([*pieces, np.zeros(data.window)])
    power = 1e-6 if ratio is None else np.mean(audio**2) / 10 ** (ratio / 10)
    return data.log_mel(audio + rng.normal(0, power**0.5, audio.shape))


def counter(model, variant, ngram, width):
    """Function of (batch, phrases, weights, greedy): errors of a search."""
    graphdef, params = nnx.split(model)

    @functools.partial(jax.jit, static_argnums=4)
    def search(params, batch, phrases, weights, greedy):
        inputs = nnx.merge(graphdef, params).decoder_inputs(batch["features"], batch["feature_lengths"])
        fusion = (ngram, weights[0]), (phrases, weights[1])
        options = dict(max_labels=2 * DIGITS, max_symbols=3, fusion=fusion, ilm_weight=weights[2])
        if greedy:
            found = decode.greedy(variant.loss, *inputs, **options)
            return found.labels, found.counts
        found = decode.beam(variant.loss, *inputs, width=width, **options)
        return found.labels[:, 0], found.counts[:, 0]

    def errors(batch, phrases, weights, greedy=False):
        found = search(params, batch, phrases, jnp.array(weights, jnp.float32), greedy)
        return label_errors(*found, batch["targets"], batch["target_lengths"]).total.sum()

    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER", required=True, help="spoken digits")
    parser.add_argument("--workdir", type=Path, help="of train.py; default: runs/spoken-digits-rnnt")
    parser.add_argument("--utterances", type=positive, default=200, help="for each noise (%(default)s)")
    parser.add_argument("--width", type=positive, default=8, help="hypotheses (%(default)s)")
    args = parser.parse_args()
    try:
        data = SpokenDigits(args.data)
        model, variant = restore(data, args.workdir)
    except DataError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    rng = np.random.default_rng(0)
    numbers = functools.partial(draw, rng.dirichlet(np.full(10, 0.2), 11), rng)
    sets = numbers(args.utterances), numbers(args.utterances)  # for tuning, for the table
    with tempfile.TemporaryDirectory() as folder:
        write_arpa(Path(folder, "arpa"), [x for x in numbers(TEXT) if x not in sets[0] + sets[1]])
        ngram = decode.NGram.from_arpa(Path(folder, "arpa"), [*map(str, range(10)), None])
    errors = counter(model, variant, ngram, args.width)

    def contacts(spoken, right):
        lists = [[number] * right + numbers(CONTACTS - right) for number in spoken]
        return decode.Phrases(lists, classes=11, size=CONTACTS * DIGITS)

    def heard(spoken, ratio):
        features = [speak(data, rng, number, ratio) for number in spoken]
        return collate(features, spoken, max(map(len, features)), DIGITS)

    tuning, test = ([heard(spoken, ratio) for ratio in RATIOS] for spoken in sets)
    listed = contacts(sets[0], True)
    ngram, phrase = (min(x, key=lambda w: sum(errors(b, listed, w) for b in tuning)) for x in (NGRAM, PHRASES))
    listed, wrong, none = contacts(sets[1], True), contacts(sets[1], False), (0.0, 0.0, 0.0)
    rows = {
        "greedy": (listed, none, True),
        f"beam, {args.width} hypotheses": (listed, none),
        f"with the n-gram ({ngram[0]:g}, internal {ngram[2]:g})": (listed, ngram),
        f"with contacts ({phrase[1]:g})": (listed, phrase),
        "with contacts, all wrong": (wrong, phrase),
    }
    print("| errors, % |", *("clean |" if ratio is None else f"{ratio} dB |" for ratio in RATIOS))
    print("|---|" + "--:|" * len(RATIOS))
    for name, search in rows.items():
        print(f"| {name} |", *(f"{100 * errors(b, *search) / b['target_lengths'].sum():.1f} |" for b in test))


if __name__ == "__main__":
    main()
