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


def random_arpa(seed, order, kind="closed", unk=True, sentences=40, tokens=TOKENS):
    """{n-gram: (log10 of its probability, of its backoff weight)}: all parts of random sentences, as lmplz makes.

    "pruned": some are gone that are no context, so suffixes of others are missing, as SRILM makes.
    """
    rng = np.random.default_rng((seed, order))
    words = [*tokens, *["<unk>"] * unk]
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

    return jax.tree.map(lambda x: np.swapaxes(np.asarray(x), 0, 1), scan(model, jnp.asarray(labels)))


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


# --------------------------------------------------------------------------------------------------------- words

WORDS = ["a", "ab", "abc", "abca", "aac", "ba", "cab"]
CHARACTERS = [" ", "a", None, "b", "c"]
PIECES = ["b", "▁a", "▁", "bc", None, "a", "▁ab", "▁ca", "<unk>"]  # no "c" of "aac"


class Spelled:
    """The definition: scores of texts by the words in them. `words` are those that labels can spell."""

    def __init__(self, grams, order, words, separator):
        self.grams, self.order, self.words, self.separator = grams, order, words, separator
        finite = [
            p for (word, *more), (p, _) in grams.items() if not more and p > -math.inf and word in (*words, "<unk>")
        ]
        self.lowest = min(finite)

    def ahead(self, beginning):
        """The best unigram of all words that begin so; those of -inf count as the lowest one."""
        found = [x for x in self.words if x.startswith(beginning)]
        best = [max(self.grams[x,][0], self.lowest) for x in found]
        return NATS * max([*best, self.grams["<unk>",][0]])

    def score(self, text, end=False):
        *ended, last_word = text.split(self.separator)
        history, total = ("<s>",), 0.0
        for word in filter(None, [*ended, *[last_word] * end]):
            word = word if word in self.words else "<unk>"
            total += log_prob(self.grams, last(history, self.order), word)
            history += (word,)
        if end:
            return total + log_prob(self.grams, last(history, self.order), "</s>")
        return total + (self.ahead(last_word) if last_word else 0.0)

    def added(self, before, label, end=False):
        after = self.score(before + label, end)
        before = self.score(before)
        return after - before if max(before, after) > -math.inf else math.nan


def word_model(path, labels, order, unk, words=WORDS, **options):
    """(a model, its definition); `unk`: whether the file has <unk>."""
    grams = random_arpa(11, order, "pruned", unk=unk, tokens=[*words, "cc.", "é"])  # words that nothing spells
    grams["ab",], grams["aac",] = (-math.inf, grams["ab",][1]), (-0.01, grams["aac",][1])
    separator = " " if " " in labels else "▁"
    model = decode.WordNGram.from_arpa(written(path, arpa(grams)), labels, separator=separator, **options)
    grams.setdefault(("<unk>",), (options.get("unknown", -math.inf) / NATS, 0.0))
    spelled = [x for x in words if separator == " " or x != "aac"]
    return model, Spelled(grams, order, spelled, separator)


@pytest.mark.parametrize(
    ("labels", "order", "unk", "options"),
    [
        (CHARACTERS, 3, True, {}),
        (CHARACTERS, 2, False, {}),
        losses.slow(CHARACTERS, 1, False, dict(unknown=-7.5)),
        (PIECES, 3, True, {}),
        losses.slow(PIECES, 2, False, {}),
        (PIECES, 2, False, dict(unknown=-7.5)),
    ],
)
def test_words_are_the_definition(labels, order, unk, options, tmp_path):
    """All labels and ends after all sequences of four or five; what they spell decides, not how."""
    model, truth = word_model(tmp_path / "m.arpa", labels, order, unk, **options)
    real = [i for i, x in enumerate(labels) if x is not None]
    rows = [[*x] for x in itertools.product(real, repeat=5 if labels is CHARACTERS else 4)]
    scores, final, _ = run(model, rows)
    assert (scores < np.inf).all() and (final < np.inf).all()  # no NaN
    assert np.isneginf(scores[..., labels.index(None)]).all()
    expected = {}
    for row in rows:
        for i in range(len(row) + 1):
            text = "".join(labels[x] for x in row[:i])
            if text not in expected:
                ends = truth.added(text, "", end=True)
                expected[text] = [*(truth.added(text, labels[x]) for x in real), ends]
    forbidden = [text for text in expected if truth.score(text) == -math.inf]
    assert len(expected) - 50 > len(forbidden) > 0
    spelled = lambda row, i: expected["".join(labels[x] for x in row[:i])]
    expected = np.array([[spelled(row, i) for i in range(len(row) + 1)] for row in rows])
    got = np.concatenate([scores[..., real], final[..., None]], -1)
    alive = ~np.isnan(expected)  # what follows on -inf is anything, but NaN or +inf
    np.testing.assert_allclose(got[alive], expected[alive], rtol=2e-6, atol=2e-5)


def test_spellings_share_a_state(tmp_path):
    """Pieces of one text, and labels to begin the same words, lead to equal states: hypotheses share their rows."""
    model, _ = word_model(tmp_path / "m.arpa", PIECES, 3, True)
    rows = [["▁a", "b", "▁", "b", "a"], ["▁ab", "▁", "▁", "b", "a"], ["▁", "a", "b", "▁", "b", "a"]]
    scores, final, (context, node) = run(model, [[PIECES.index(x) for x in row] for row in rows])
    ends = np.arange(3), [len(row) for row in rows]
    assert len({*zip(context[ends].tolist(), node[ends].tolist())}) == 1
    assert len({x.tobytes() for x in scores[ends]}) == len({*final[ends].tolist()}) == 1


def test_tables_of_words(tmp_path):
    """20 bytes of a beginning of a word that labels spell, 12 of each label that goes on within one."""
    model, truth = word_model(tmp_path / "m.arpa", PIECES, 3, True)
    nodes = {word[:i] for word in truth.words for i in range(len(word) + 1)}
    within = [x for x in PIECES if x and "▁" not in x]
    arcs = sum(node + x in nodes for node in nodes for x in within)
    size = lambda x: sum(y.nbytes for y in jax.tree.leaves(x))
    rows = 4 * len(PIECES) + 8 * (len(PIECES) + 1)
    assert size(model) - size(model.ngram) == 20 * (1 + len(nodes)) + 4 + 12 * (arcs + 1) + rows
    assert repr(model) == f"WordNGram(9 labels, {len(truth.words)} words)"


def test_words_under_vmap(tmp_path):
    """A batch of models of one row each."""
    model, _ = word_model(tmp_path / "m.arpa", CHARACTERS, 3, True)
    state = jnp.array([0, 1, 2, 0], jnp.int32), jnp.array([0, 1, 3, 5], jnp.int32)
    labels = jnp.array([1, 3, 0, model.start], jnp.int32)
    together = jax.jit(model.step)(state, labels)
    alone = jax.jit(jax.vmap(lambda *x: model.step(*jax.tree.map(lambda y: y[None], x))))(state, labels)
    jax.tree.map(np.testing.assert_array_equal, together, jax.tree.map(lambda x: x[:, 0], alone))


def test_words_without_ends(tmp_path):
    """Files without <s> and </s>, compressed; a unigram model's end completes a word and adds nothing."""
    grams = {("ab",): (-0.5, 0.0), ("b",): (-1.0, 0.0)}
    path = tmp_path / "m.arpa.gz"
    path.write_bytes(gzip.compress(arpa(grams).encode()))
    model = decode.WordNGram.from_arpa(path, ["-a", "b", "-"], separator="-")
    assert repr(model) == "WordNGram(3 labels, 2 words)" and (model.start, model.symbols) == (3, 4)
    scores, final, _ = run(model, [[0, 1, 2, 1]])
    inf = math.inf
    expected = [[-0.5, -1, 0], [-inf, 0, -inf], [-0.5, -inf, 0], [-0.5, -1, 0], [-0.5, -inf, 0]]
    np.testing.assert_allclose(scores[0], NATS * np.array(expected), atol=1e-6)
    np.testing.assert_allclose(final[0], [0, -inf, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("names", "unk"), [losses.slow((" ", "a"), True), (("▁a", "b"), True), losses.slow(("▁a", "b"), False)]
)
def test_words_in_searches(names, unk, tmp_path):
    """N-best lists are the enumeration, greedy search is the plain loop; -inf leaves no hypothesis."""
    model = Model(losses.HAT)
    words = ["a", "aa", "ab", "abb", "b"]
    grams = random_arpa(12, 2, unk=unk, tokens=words)
    labels = [*names, *[None] * (model.tokens - LABELS)]
    path = written(tmp_path / "m.arpa", arpa(grams))
    made = decode.WordNGram.from_arpa(path, labels, separator=names[0][0])
    grams.setdefault(("<unk>",), (-math.inf, 0.0))
    spelled = [x for x in words if "b" not in x] if " " in names else words[:1] + words[2:]
    truth = Spelled(grams, 2, spelled, names[0][0])
    text = lambda prefix: "".join(names[x] for x in prefix)
    added = lambda *x, **end: 0.7 * np.nan_to_num(truth.added(*x, **end), nan=-math.inf, neginf=-math.inf)
    rules = dict(fuse=lambda prefix, label: added(text(prefix), names[label]))
    rules |= dict(final=lambda prefix: added(text(prefix), "", end=True))
    options = dict(fusion=((made, 0.7),), max_symbols=2)
    best = model.search(decode.beam, MOST, 64, **options)
    greedy = model.search(decode.greedy, MOST, **options)
    for b in range(2):
        alive = np.flatnonzero(best.scores[b] > -np.inf)
        expected = {x: y for x, (y, _) in enumerate_all(model, b, max_symbols=2, **rules).items() if y > -np.inf}
        found = {tuple(trimmed(best, b, n)[0]): best.scores[b, n] for n in alive}
        assert found.keys() == expected.keys() and len(alive) == len(found) > 2
        np.testing.assert_allclose([found[x] for x in expected], [*expected.values()], rtol=1e-6)
        labels, _, score = greedy_loop(model, b, max_symbols=2, room=MOST, **rules)
        assert trimmed(greedy, b) == labels
        np.testing.assert_allclose(greedy.scores[b], score, rtol=1e-6)


@pytest.mark.parametrize(
    ("labels", "options", "error", "message"),
    [
        (["▁a", 3], {}, TypeError, "labels must be str or None, got 3"),
        (["▁a", "b", "▁a"], {}, ValueError, r"labels must be different texts, .* got \['▁a'\]"),
        (["▁a", "b▁a", ""], {}, ValueError, r"labels must be .* '▁' at their beginning alone, got \['b▁a', ''\]"),
        (["a", "b", None], {}, ValueError, r"labels must be texts of which some begin with '▁', .* got \['a', 'b'\]"),
        (["▁x", "y"], {}, ValueError, r"labels must spell words of .*m.arpa, got none of 5: \['a', 'b', .*\]"),
        (["▁a"], dict(separator=None), TypeError, "separator must be a str, got None"),
        (["▁a"], dict(separator=""), ValueError, "separator must have a character or more, got ''"),
        (["▁a"], dict(unknown="-1"), TypeError, "unknown must be a number or None, got '-1'"),
        (["▁a"], dict(unknown=0.5), ValueError, "unknown must be a log-probability of 0 or less, got 0.5"),
        (["▁a"], dict(unknown=math.nan), ValueError, "unknown must be a log-probability of 0 or less, got nan"),
        (["▁a"], dict(unknown=-3), ValueError, "unknown must be None, as .*m.arpa has <unk>, got -3"),
    ],
)
def test_errors_of_words(labels, options, error, message, tmp_path):
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 2)))
    with pytest.raises(error, match=f"WordNGram.from_arpa: {message}"):
        decode.WordNGram.from_arpa(path, labels, **options)


def test_a_broken_file_of_words(tmp_path):
    path = written(tmp_path / "broken.arpa", GOOD.replace("\\end\\", ""))
    with pytest.raises(ValueError, match=r"WordNGram.from_arpa: .*broken.arpa, line \d+: expected \\end\\"):
        decode.WordNGram.from_arpa(path, ["▁", *TOKENS])
