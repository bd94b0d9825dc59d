"""Does an n-gram model score labels as a loop over its definition does, and as KenLM does?"""

import gzip
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from decoding import LABELS, MOST, Model, enumerate_all, greedy_loop, trimmed
from jax_rnnt import decode
from jax_rnnt.decode import _arcs, _arpa

NATS = math.log(10)
TOKENS = ["a", "b", "c", "d", "e"]
CASES = [(1, "closed"), losses.slow(2, "closed"), (3, "pruned"), losses.slow(4, "closed"), (5, "pruned")]


def random_arpa(seed, order, kind="closed", unk=True, sentences=40):
    """{n-gram: (log10 of its probability, of its backoff weight)}: all parts of random sentences, as lmplz makes.

    "pruned": some are gone that are no context, so suffixes of others are missing, as SRILM makes.
    """
    rng = np.random.default_rng((seed, order))
    words = [*TOKENS, *["<unk>"] * unk]
    found = {(w,) for w in [*words, "<s>", "</s>"]}
    for _ in range(sentences):
        sentence = ["<s>", *rng.choice(words, rng.integers(0, 8)), "</s>"]
        found |= {
            tuple(sentence[i:j]) for i, j in itertools.combinations(range(len(sentence) + 1), 2) if j - i <= order
        }
    if kind == "pruned":
        for gram in sorted(found, key=len, reverse=True):
            if len(gram) > 1 and rng.random() < 0.4 and not any(x[:-1] == gram for x in found):
                found.remove(gram)
    draw = lambda: round(float(rng.uniform(-3, 0)), 5)
    backoff = lambda gram: 0.0 if gram[-1] == "</s>" or rng.random() < 0.2 else round(float(rng.normal(-0.3, 0.3)), 5)
    return {x: (-99.0 if x == ("<s>",) else draw(), backoff(x) if len(x) < order else 0.0) for x in sorted(found)}


def arpa(grams):
    sections = [[x for x in grams if len(x) == n] for n in range(1, 1 + max(map(len, grams)))]
    lines = ["\\data\\", *(f"ngram {n}={len(x)}" for n, x in enumerate(sections, 1))]
    for n, section in enumerate(sections, 1):
        lines += ["", f"\\{n}-grams:"]
        for gram in section:
            p, backoff = grams[gram]
            lines.append("\t".join([str(p), " ".join(gram), *([str(backoff)] if backoff else [])]))
    return "\n".join([*lines, "", "\\end\\", ""])


def written(path, text):
    path.write_text(text)
    return path


def log_prob(grams, context, word):
    """In nats, by the definition of backoff."""
    if (*context, word) in grams:
        return NATS * grams[*context, word][0]
    return NATS * grams.get(context, (0, 0))[1] + log_prob(grams, context[1:], word)


def last(history, order):
    """The words that a model of this order sees."""
    return history[max(len(history) + 1 - order, 0) :]


def sentences(seed, number, labels):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, labels, rng.integers(0, 9)).tolist() for _ in range(number)]


def run(model, rows):
    """(score rows [N, L + 1, V], final scores [N, L + 1], states [N, L + 1]) after each label of padded rows."""
    labels = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        labels[i, : len(row)] = row
    labels = np.concatenate([np.full((len(rows), 1), model.start, np.int32), labels], 1)

    @jax.jit
    def scan(model, labels):
        def step(state, labels):
            scores, state = model.step(state, labels)
            return state, (scores, model.final(state), state)

        return jax.lax.scan(step, model.initial(labels.shape[0]), labels.T)[1]

    return [np.swapaxes(np.asarray(x), 0, 1) for x in scan(model, jnp.asarray(labels))]


def token_of(grams, label):
    return label if (label,) in grams else "<unk>"


@pytest.mark.parametrize(("order", "kind"), CASES)
def test_scores_are_the_definition(order, kind, tmp_path):
    """All labels after all prefixes of random sentences; several classes are <unk>, one is no label."""
    grams = random_arpa(0, order, kind)
    labels = ["rare", *TOKENS, None, "other"]
    model = decode.NGram.from_arpa(written(tmp_path / "m.arpa", arpa(grams)), labels)
    assert (model.start, model.symbols) == (8, 9)
    rows = [[x for x in row if x != 6] for row in sentences(1, 60, 8)]
    scores, final, states = run(model, rows)
    assert np.isneginf(scores[..., 6]).all()
    used = {}
    for n, row in enumerate(rows):
        history = ("<s>", *(token_of(grams, labels[x]) for x in row))
        for i in range(len(row) + 1):
            context = last(history[: i + 1], order)
            expected = [log_prob(grams, context, token_of(grams, x)) for x in labels if x is not None]
            np.testing.assert_allclose(np.delete(scores[n, i], 6), expected, rtol=2e-6, atol=1e-6)
            np.testing.assert_allclose(final[n, i], log_prob(grams, context, "</s>"), rtol=2e-6, atol=1e-6)
            # States are the contexts that matter: with a backoff weight, or before some word.
            while context and not (grams.get(context, (0, 0))[1] or any(x[:-1] == context for x in grams)):
                context = context[1:]
            used.setdefault(context, set()).add(int(states[n, i]))
    assert all(len(x) == 1 for x in used.values())
    assert len(set.union(*used.values())) == len(used) >= min(order, 2)


@pytest.mark.parametrize(("order", "kind"), CASES[1:])
def test_scores_are_those_of_kenlm(order, kind, tmp_path):
    """Of 1,000 sentences, with words that the model lacks, and their ends."""
    kenlm = pytest.importorskip("kenlm")
    path = written(tmp_path / "m.arpa", arpa(random_arpa(2, order, kind)))
    labels = ["rare", *TOKENS, "other"]
    peer, model = kenlm.Model(str(path)), decode.NGram.from_arpa(path, labels)
    rows = sentences(3, 1000, len(labels))
    scores, final, _ = run(model, rows)
    for n, row in enumerate(rows):
        expected = [NATS * x for x, *_ in peer.full_scores(" ".join(labels[x] for x in row))]
        got = [*(scores[n, i, x] for i, x in enumerate(row)), final[n, len(row)]]
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_the_file(tmp_path):
    """Compressed, with labels for <s>, </s> and <unk> and without these, and with tokens that are no labels."""
    grams = random_arpa(4, 3)
    path = tmp_path / "m.arpa.gz"
    path.write_bytes(gzip.compress(arpa(grams).encode()))
    labels = ["<s>", "a", "b", "</s>", "<unk>", "c"]  # neither d nor e
    model = decode.NGram.from_arpa(path, labels)
    rows = sentences(5, 40, len(labels))
    scores, final, _ = run(model, rows)
    for n, row in enumerate(rows):
        context = last(("<s>", *(labels[x] for x in row)), 3)
        expected = [log_prob(grams, context, x) for x in labels]
        np.testing.assert_allclose(scores[n, len(row)], expected, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(final[n, len(row)], expected[3], rtol=2e-6, atol=1e-6)
    few = {x: y for x, y in grams.items() if not {"<s>", "</s>", "<unk>"} & {*x}}
    model = decode.NGram.from_arpa(written(tmp_path / "few.arpa", arpa(few)), TOKENS)
    scores, final, _ = run(model, [[]])
    np.testing.assert_allclose(scores[0, 0], [NATS * few[x,][0] for x in TOKENS], rtol=1e-6)
    assert final[0, 0] == 0


def test_chunks(monkeypatch, tmp_path):
    """Rows of more arcs than are put there at once, and files of more lines than are read at once."""
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 4)))
    rows = sentences(6, 30, 5)
    whole = run(decode.NGram.from_arpa(path, TOKENS), rows)
    monkeypatch.setattr(_arcs, "CHUNK", 7)
    monkeypatch.setattr(_arpa, "LINES", 5)
    for x, y in zip(whole, run(decode.NGram.from_arpa(path, TOKENS), rows)):
        np.testing.assert_array_equal(x, y)


def test_tables_are_arguments(tmp_path):
    """Of a program, which new ones do not compile again; they take 12 to 24 bytes of an n-gram, and a row."""
    grams = random_arpa(0, 4)
    model = decode.NGram.from_arpa(written(tmp_path / "m.arpa", arpa(grams)), [*TOKENS, "<unk>"])
    score = jax.jit(lambda model: model.step(model.initial(1), jnp.array([model.start]))[0])
    doubled = jax.tree.map(lambda x: 2 * x if x.dtype == jnp.float32 else x, model)
    np.testing.assert_allclose(score(doubled), 2 * score(model), rtol=1e-6)
    assert score._cache_size() == 1 and repr(model) == "NGram(6 labels)"
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    assert 12 * sum(len(x) > 1 for x in grams) < size < 24 * len(grams) + 8 * 7 + 40


def test_searches(tmp_path):
    """With a trigram and, taken out, a bigram: N-best lists are the enumeration, greedy search is the plain loop."""
    model = Model(losses.HAT)
    names = TOKENS[:LABELS] + [None] * (model.tokens - LABELS)
    grams = [(random_arpa(8, order), order, weight) for order, weight in ((3, 0.7), (2, -0.4))]
    made = [decode.NGram.from_arpa(written(tmp_path / f"{n}.arpa", arpa(x)), names) for x, n, _ in grams]

    def added(prefix, word):
        history = ("<s>", *(TOKENS[x] for x in prefix))
        return sum(weight * log_prob(x, last(history, order), word) for x, order, weight in grams)

    rules = dict(fuse=lambda prefix, label: added(prefix, TOKENS[label]), final=lambda prefix: added(prefix, "</s>"))
    options = dict(fusion=tuple((x, w) for x, (*_, w) in zip(made, grams)), max_symbols=2)
    best = model.search(decode.beam, MOST, 64, **options)
    greedy = model.search(decode.greedy, MOST, **options)
    for b in range(2):
        alive = np.flatnonzero(best.scores[b] > -np.inf)
        expected = {x: y for x, (y, _) in enumerate_all(model, b, max_symbols=2, **rules).items()}
        found = {tuple(trimmed(best, b, n)[0]): best.scores[b, n] for n in alive}
        assert found.keys() == expected.keys() and len(alive) == len(found) > 2
        np.testing.assert_allclose([found[x] for x in expected], [*expected.values()], rtol=1e-6)
        labels, _, score = greedy_loop(model, b, max_symbols=2, room=MOST, **rules)
        assert trimmed(greedy, b) == labels
        np.testing.assert_allclose(greedy.scores[b], score, rtol=1e-6)


GOOD = arpa(random_arpa(0, 2))
LAST = GOOD.rstrip().splitlines()[-3]
BROKEN = [
    ("", r"line 0: expected \\data\\, got the end of the file"),
    ("ngram 1=2", r"line 1: expected \\data\\, got ngram 1=2"),
    ("\\data\\\n\nngram 2=1", "line 3: expected ngram 1=..., got ngram 2=1"),
    (
        GOOD.replace("\\2-grams:", "\\3-grams:"),
        r"expected \\2-grams: after 8 1-grams, as \\data\\ says, got \\3-grams:",
    ),
    (GOOD.replace("ngram 1=8", "ngram 1=9"), r"line 14: expected 9 1-grams, as \\data\\ says, got a blank line"),
    (GOOD.replace("ngram 1=8", "ngram 1=7"), r"line 13: expected \\2-grams: after 7 1-grams.*, got -.*\te\t.*"),
    (GOOD.replace("\\end\\", ""), r"expected \\end\\ after \d+ 2-grams, as \\data\\ says, got the end of the file"),
    (GOOD[: GOOD.index(LAST)], r"expected \d+ 2-grams, as \\data\\ says, got the end of the file"),
    (GOOD.replace(LAST, "-1 a"), "expected 3 or 4 fields of a 2-gram, got 2: -1 a"),
    (GOOD.replace(LAST, "-1 a b -1 -1"), "expected 3 or 4 fields of a 2-gram, got 5: -1 a b -1 -1"),
    (GOOD.replace(LAST, "-x a b"), "expected a log-probability of 0 or less, got -x"),
    (GOOD.replace(LAST, "nan a b"), "expected a log-probability of 0 or less, got nan"),
    (GOOD.replace(LAST, "0.5 a b"), "expected a log-probability of 0 or less, got 0.5"),
    (GOOD.replace(LAST, "-1 a b inf"), "expected a finite backoff or -inf, got inf"),
    (
        GOOD.replace(LAST, GOOD.splitlines()[20]),
        r"line \d+: expected 2-grams that stand once, got one that stands twice",
    ),
    (GOOD.replace("\\1-grams", "\\1-gram"), r"line 5: expected \\1-grams:, got \\1-gram:"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN, ids=[message[-30:] for _, message in BROKEN])
def test_broken_files(text, message, tmp_path):
    path = written(tmp_path / "broken.arpa", text)
    with pytest.raises(
        ValueError, match=rf"NGram.from_arpa: .*broken.arpa, line \d+: expected .*{message.split('expected ')[1]}"
    ):
        decode.NGram.from_arpa(path, TOKENS)
    with pytest.raises(ValueError, match=message):
        decode.NGram.from_arpa(str(path), TOKENS)


def test_a_context_that_is_missing(tmp_path):
    grams = random_arpa(0, 3)
    gone = next(x[:-1] for x in grams if len(x) == 3)
    path = written(tmp_path / "m.arpa", arpa({x: y for x, y in grams.items() if x != gone}))
    with pytest.raises(
        ValueError, match=r"line .*: expected the context of each 3-gram among the 2-grams, got one without"
    ):
        decode.NGram.from_arpa(path, [*TOKENS, "<unk>"])


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (
            ["a", "x", "y"],
            ValueError,
            "labels must be tokens of .*m.arpa, as it has no <unk>, got 2 .*: 'x', 'y'; None",
        ),
        (["a", *map(str, range(9))], ValueError, "labels .* got 9 that are none: '0', '1', '2', '3', '4', ...;"),
        (["a", "b", "a"], ValueError, r"labels must be different tokens, at least one, got \['a'\] twice"),
        ([None, None], ValueError, "labels must be different tokens, at least one, got 2 that are none"),
        (["a", 3], TypeError, "labels must be str or None, got 3"),
    ],
)
def test_labels(labels, error, message, tmp_path):
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 2, unk=False)))
    with pytest.raises(error, match=f"NGram.from_arpa: {message}"):
        decode.NGram.from_arpa(path, labels)
