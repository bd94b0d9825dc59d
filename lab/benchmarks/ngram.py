"""Times the models of fusion: an n-gram model of a million n-grams, and phrases.

    python lab/benchmarks/ngram.py                          # loading, and a step of 8, 128 and 1024 rows

The n-grams are those of a random text: half of its tokens follow from the last one, the others are drawn by Zipf's law.
Rows are in the states that they reach in another such text.
"""

import functools
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np

import measure
from jax_rnnt import decode

V, ORDER, TOKENS = 1024, 4, 840_000  # a million n-grams
PHRASES, LENGTH = 100, 5  # of each utterance
ROWS = 8, 128, 1024
MODELS = "n-gram", "phrases"


def text(rng, rows, length):
    """Tokens [rows, length] in [0, V)."""
    drawn = np.minimum(rng.zipf(1.2, (rows, length)) - 1, V - 1)
    follows, token = rng.random((rows, length)) < 0.5, drawn.copy()
    for i in range(1, length):
        token[:, i] = np.where(follows[:, i], (token[:, i - 1] * 31 + 7 * np.minimum(drawn[:, i], 20)) % V, drawn[:, i])
    return token


def write_arpa(path, rng, tokens):
    """All n-grams of a text of so many tokens, with random scores; returns their number."""
    lines = text(rng, tokens // 20, 20) + 2  # after <s> and </s>
    lines = np.pad(np.pad(lines, ((0, 0), (1, 0))), ((0, 0), (0, 1)), constant_values=1)
    sections = [np.arange(V + 2)[:, None]]
    for n in range(2, ORDER + 1):
        parts = np.lib.stride_tricks.sliding_window_view(lines, n, 1).reshape(-1, n).astype(np.int64)
        keys = np.unique(parts @ (1 << 11) ** np.arange(n)[::-1])
        sections.append((keys[:, None] >> 11 * np.arange(n)[::-1]) % (1 << 11))
    names = np.array(["<s>", "</s>", *(f"token{i}" for i in range(V))])
    with open(path, "w") as file:
        print("\\data\\", *(f"ngram {n}={len(x)}" for n, x in enumerate(sections, 1)), sep="\n", file=file)
        for n, grams in enumerate(sections, 1):
            print(f"\n\\{n}-grams:", file=file)
            scores = -3 * rng.random((len(grams), 2))
            for (p, backoff), words in zip(scores.tolist(), names[grams].tolist()):
                print(f"{p:.6f}", " ".join(words), *[f"{backoff / 3:.6f}"] * (n < ORDER), sep="\t", file=file)
        print("\n\\end\\", file=file)
    return sum(map(len, sections))


def steps(model, rng):
    """A step of so many rows, in the states that they have after a text."""
    made = []
    step = jax.jit(lambda model, state, labels: model.step(state, labels))
    for rows in ROWS:
        labels = jnp.asarray(text(rng, rows, 12), jnp.int32)
        _, state = step(model, model.initial(rows), jnp.full(rows, model.start))
        for i in range(11):
            _, state = step(model, state, labels[:, i])
        made.append(measure.calls(f"step, {rows} rows", step, model, state, labels[:, 11]))
    return made


def ngram(rng, tokens):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.arpa"
        count = write_arpa(path, rng, tokens)
        load = functools.partial(decode.NGram.from_arpa, path, [f"token{i}" for i in range(V)])
        loading = measure.calls("load", load)
        loading.seconds = [loading.run() for _ in range(3)]
        model = load()
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    print(f"{count} n-grams of {V} words up to order {ORDER}: {size / 1e6:.1f} MB, {size / count:.1f} bytes of each.\n")
    return loading, steps(model, rng)


def phrases(rng, _):
    """The lists of 8 utterances."""
    lists = [text(rng, PHRASES, LENGTH).tolist() for _ in range(8)]
    build = functools.partial(decode.Phrases, lists, classes=V)
    building = measure.calls("build", build)
    building.seconds = [building.run() for _ in range(5)]
    return building, steps(build(), rng)


def main(argv=None):
    parser = measure.options(__doc__, MODELS)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the text (%(default)s)")
    args = parser.parse_args(argv)
    budget = measure.settle(args)
    results = {}
    for name in args.only:
        once, made = {"n-gram": ngram, "phrases": phrases}[name](np.random.default_rng(args.seed), args.tokens)
        measure.take_turns(made, budget, args.repeat)
        results[name] = [once, *made]
        measure.report(name, results[name], [])
    measure.save(args, "-ngram", [], results)


if __name__ == "__main__":
    main()
