"""Does a word n-gram model score labels as its definition scores the words that they spell?"""

import gzip
import itertools
import math
import unicodedata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import decode
from ngrams import NATS, arpa, last, log_prob, random_arpa, run, written

pytestmark = pytest.mark.filterwarnings("ignore:.*are left out, as no labels spell them:UserWarning")

WORDS = ["a", "ab", "abc", "abca", "aac", "ba", "cab", "a<unk>"]
CHARACTERS = [" ", "a", None, "b", "c", *[None] * 4]  # no "<" of "a<unk>"
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
    if "unknown" in options or not unk:
        grams.setdefault(("<unk>",), (0.0, 0.0))
        grams |= {x: (options.get("unknown", -math.inf) / NATS, grams[x][1]) for x in grams if x[-1] == "<unk>"}
    spelled = [x for x in words if x != ("a<unk>" if separator == " " else "aac")]
    return model, Spelled(grams, order, spelled, separator)


@pytest.mark.parametrize(
    ("labels", "order", "unk", "options"),
    [
        (CHARACTERS, 3, True, dict(unknown=-20.0)),
        (CHARACTERS, 1, False, dict(unknown=-7.5)),
        (PIECES, 3, True, {}),
        (PIECES, 2, True, dict(unknown=-math.inf)),
    ],
)
def test_words_are_the_definition(labels, order, unk, options, tmp_path):
    """All labels and ends after all sequences of four; what they spell decides, not how.

    Spellings of one text lead to equal states: hypotheses share their rows.
    """
    model, truth = word_model(tmp_path / "m.arpa", labels, order, unk, **options)
    real = [i for i, x in enumerate(labels) if x is not None]
    rows = [[*x] for x in itertools.product(real, repeat=5 if labels is CHARACTERS else 4)]
    scores, final, (context, node) = run(model, rows, 1024, 5)
    assert (scores < np.inf).all() and (final < np.inf).all()  # no NaN
    assert np.isneginf(scores[..., [i for i in range(9) if i not in real]]).all()
    length = len(rows[0]) + 1
    texts = [["".join(labels[x] for x in row[:i]) for i in range(length)] for row in rows]
    expected, states = {}, {}
    for n, i in np.ndindex(len(rows), length):
        text = texts[n][i]
        if text not in expected:
            ends = truth.added(text, "", end=True)
            expected[text] = [*(truth.added(text, labels[x]) for x in real), ends]
        *ended, last_word = text.split(truth.separator)
        states.setdefault((*filter(None, ended), last_word), set()).add((int(context[n, i]), int(node[n, i])))
    assert all(len(x) == 1 for x in states.values()) and len(states) < len(expected)
    forbidden = [text for text in expected if truth.score(text) == -math.inf]
    assert len(expected) - 50 > len(forbidden) > 0
    expected = np.array([[expected[text] for text in row] for row in texts])
    got = np.concatenate([scores[..., real], final[..., None]], -1)[:, :length]
    alive = ~np.isnan(expected)  # what follows on -inf is anything, but NaN or +inf
    np.testing.assert_allclose(got[alive], expected[alive], rtol=2e-6, atol=2e-5)


@pytest.mark.slow
def test_words_without_ends(tmp_path):
    """Files without <s> and </s>, compressed; a unigram model's end completes a word and adds nothing."""
    grams = {("ab",): (-0.5, 0.0), ("b",): (-1.0, 0.0)}
    path = tmp_path / "m.arpa.gz"
    path.write_bytes(gzip.compress(arpa(grams).encode()))
    model = decode.WordNGram.from_arpa(path, ["-a", "b", "-"], separator="-")
    assert repr(model) == "WordNGram(3 labels, 2 of 2 words)" and (model.start, model.symbols) == (3, 4)

    def step(state, label):
        scores, state = model.step(state, label[None])
        return state, (scores[0], model.final(state)[0])

    _, (scores, final) = jax.jit(lambda: jax.lax.scan(step, model.initial(1), jnp.array([3, 0, 1, 2, 1])))()
    inf = math.inf
    expected = [[-0.5, -1, 0], [-inf, 0, -inf], [-0.5, -inf, 0], [-0.5, -1, 0], [-0.5, -inf, 0]]
    np.testing.assert_allclose(scores, NATS * np.array(expected), atol=1e-6)
    np.testing.assert_allclose(final, [0, -inf, 0, 0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("labels", "options", "error", "message"),
    [
        (["▁a", 3], {}, TypeError, "labels must be str or None, got 3"),
        (["▁a", "b", "▁a"], {}, ValueError, r"labels must be different texts, .* got \['▁a', '▁a'\]"),
        (["▁e\u0301", "▁\u00e9"], {}, ValueError, "labels must be different texts, .* equal in Unicode's form NFC"),
        ([None], {}, ValueError, "labels must be different texts, at least one, got 1 that are none"),
        (["▁a", "b▁a", ""], {}, ValueError, r"labels must be .* '▁' at their beginning alone, got \['b▁a', ''\]"),
        (["a", "b", None], {}, ValueError, r"labels must be texts of which some begin with '▁', .* got \['a', 'b'\]"),
        (["▁x", "y"], {}, ValueError, r"labels must spell words of .*m.arpa, got none of 5: \['a', 'b', .*\]"),
        (["▁a"], dict(separator=None), TypeError, "separator must be a str, got None"),
        (["▁a"], dict(separator=""), ValueError, "separator must have a character or more, got ''"),
        (["▁a"], dict(unknown="-1"), TypeError, "unknown must be a real number, got '-1'"),
        (["▁a"], dict(unknown=-(10**400)), ValueError, "unknown must be a number that a float holds"),
        (["▁a"], dict(unknown=0.5), ValueError, "unknown must be a known log-probability of 0 or less, got 0.5"),
        (["▁a"], dict(unknown=math.nan), ValueError, "unknown must be a known log-probability of 0 or less, got nan"),
    ],
)
def test_errors_of_words(labels, options, error, message, tmp_path):
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 2)))
    with pytest.raises(error, match=f"WordNGram.from_arpa: {message}"):
        decode.WordNGram.from_arpa(path, labels, **options)


def test_accents_that_are_labels(tmp_path):
    """As if they were letters x, y and z: in a file of composed ones, and of others."""
    words = ["cafx", "cafy", "xz", "cf", "ca", "cax", "cz"]
    letters = {"x": "e", "y": "e\u0301", "z": "u\u0308\u0304"}
    labels = ["▁c", "a", "f", "e", "\u0301", "▁", "u", "\u0308", "\u0304"]
    for form in ("NFC", "NFD"):
        texts = [unicodedata.normalize(form, "".join(letters.get(x, x) for x in word)) for word in words]
        path = written(tmp_path / "m.arpa", arpa({(x,): (-1.0 - i, 0.0) for i, x in enumerate([*texts, "</s>"])}))
        model = decode.WordNGram.from_arpa(path, labels)
        assert (model.vocabulary, model.spelled) == (7, 7)
        rows = [0, 1, 2, 3, 4], [0, 1, 2, 3], [5, 3, 6, 7, 8]
        scores, final = (x / NATS for x in run(model, rows, 1024, 5)[:2])
        sums = np.cumsum([scores[0, i, x] for i, x in enumerate(rows[0])])
        np.testing.assert_allclose(sums, [-1, -1, -1, -1, -2], rtol=1e-6)  # the best word that begins so
        for n, (row, word) in enumerate(zip(rows, (-2, -1, -3))):
            total = sum(scores[n, i, x] for i, x in enumerate(row)) + final[n, len(row)]
            np.testing.assert_allclose(total, word - 8, rtol=1e-6)


@pytest.mark.slow
def test_bytes_that_are_labels(tmp_path):
    """Labels that are parts of characters score as the labels of whole characters that they spell."""
    halves = [x.decode("utf-8", "surrogateescape") for x in (b"\xc3", b"\xa9", b"\xa8", "\u2581\u00e9".encode()[:-1])]
    path = written(
        tmp_path / "m.arpa", arpa({(x,): (-1.0 - i, 0.0) for i, x in enumerate(["\u00e9a", "a\u00e8", "a", "</s>"])})
    )
    whole = decode.WordNGram.from_arpa(path, ["\u2581\u00e9", "\u00e9", "a", "\u00e8", "\u2581a"])
    parts = decode.WordNGram.from_arpa(path, [*halves, "a", "\u2581a", "\u2581"])
    assert whole.spelled == parts.spelled == 3

    def total(model, row):
        scores, final = (x / NATS for x in run(model, [row], 1024, 5)[:2])
        return sum(scores[0, i, x] for i, x in enumerate(row)) + final[0, len(row)]

    for row, same in (([0, 2], [3, 1, 4]), ([0, 2], [6, 0, 1, 4]), ([4, 3], [5, 0, 2])):
        np.testing.assert_allclose(total(parts, same), total(whole, row), rtol=1e-6)
    np.testing.assert_allclose([total(parts, [3, 1, 4]), total(parts, [5, 0, 2])], [-5, -6], rtol=1e-6)
