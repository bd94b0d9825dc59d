"""Does an n-gram model score labels as a loop over its definition does, and as KenLM does?"""

import gzip
import io
import itertools
import math
import re
import unicodedata
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses
from decoding import LABELS, MOST, Model, enumerate_all, greedy_loop, trimmed
from jax_rnnt import _pytree, decode
from jax_rnnt.decode.lm import _arpa, _automaton

pytestmark = pytest.mark.filterwarnings("ignore:.*are left out, as no labels spell them:UserWarning")
NATS = math.log(10)
TOKENS = ["a", "b", "c", "d", "e"]
LABELS_OF_MODELS = ["rare", *TOKENS, None, "other"]
CASES = [(1, "closed"), (2, "closed"), (3, "pruned"), (4, "closed"), (5, "pruned")]
ROWS, LONGEST = 64, 8  # of a program


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
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
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


def padded(arcs, states=1024, number=1024):
    """These arcs and as many without a state as make the number, so that models share a program."""
    room = dict(labels=number, scores=number, targets=number, backoffs=states, suffixes=states, first=states + 1)
    fill = dict(labels=arcs.root_scores.shape[1] + 1, first=arcs.first[-1])
    fields = {
        x: np.pad(getattr(arcs, x), (0, n - len(getattr(arcs, x))), constant_values=fill.get(x, 0))
        for x, n in room.items()
    }
    return jax.tree.map(jnp.asarray, arcs._replace(**fields))


def shareable(model):
    """(the model with tables of a common size and without what is static, what is not there any more)"""
    nothing = dict(begin=0, end=0, vocabulary=0, spelled=0, unspelled=())
    ends = model.begin, -1 if model.end is None else model.end
    columns = jnp.arange(model.start, dtype=jnp.int32) if model.columns is None else model.columns
    return _pytree.replace(model, arcs=padded(model.arcs), columns=columns, **nothing), ends


def scan(model, ends, labels):
    """Score rows, final scores, states after each label."""
    ends = dict(zip(("begin", "end"), ends))
    words = isinstance(model, decode.WordNGram)
    model = _pytree.replace(model, **dict(ngram=_pytree.replace(model.ngram, **ends)) if words else ends)

    def step(state, labels):
        scores, state = model.step(state, labels)
        return state, (scores, model.final(state), state)

    return jax.lax.scan(step, model.initial(labels.shape[0]), labels.T)[1]


program = jax.jit(scan)


def run(model, rows, size=ROWS, longest=LONGEST, program=program):
    """(score rows [N, L + 1, V], final scores [N, L + 1], states [N, L + 1]) after each label of padded rows."""
    start, found = model.start, []
    if isinstance(model, decode.WordNGram):
        ngram, ends = shareable(model.ngram)
        tables = {x: np.pad(getattr(model, x), (0, 64 - len(getattr(model, x)))) for x in ("words", "ahead")}
        arcs = padded(model.arcs, 64, 64)
        model = _pytree.replace(model, ngram=_pytree.replace(ngram, columns=None), arcs=arcs, **tables)
    else:
        model, ends = shareable(model)
    for first in range(0, len(rows), size):
        labels = np.zeros((size, longest + 1), np.int32)
        labels[:, 0] = start
        for i, row in enumerate(rows[first : first + size]):
            labels[i, 1 : len(row) + 1] = row
        found.append(jax.tree.map(np.asarray, program(model, ends, labels)))
    return jax.tree.map(lambda *x: np.swapaxes(np.concatenate(x, 1), 0, 1)[: len(rows)], *found)


def token_of(grams, label):
    return label if (label,) in grams else "<unk>"


@pytest.mark.parametrize(("order", "kind"), CASES)
def test_scores_are_the_definition(order, kind, tmp_path):
    """All labels after all prefixes of random sentences; several classes are <unk>, one is no label."""
    grams = random_arpa(0, order, kind)
    labels = LABELS_OF_MODELS
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


@pytest.mark.parametrize(("order", "kind"), [losses.slow(*x) if x[0] in (2, 4) else x for x in CASES[1:]])
def test_scores_are_those_of_kenlm(order, kind, tmp_path):
    """Of 1,000 sentences, with words that the model lacks, and their ends."""
    kenlm = pytest.importorskip("kenlm")
    path = written(tmp_path / "m.arpa", arpa(random_arpa(2, order, kind)))
    labels = ["rare", *TOKENS, "another", "other"]
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
    model = decode.NGram.from_arpa(path, [*labels, None, None])
    rows = sentences(5, 40, len(labels))
    scores, final, _ = run(model, rows)
    for n, row in enumerate(rows):
        context = last(("<s>", *(labels[x] for x in row)), 3)
        expected = [log_prob(grams, context, x) for x in labels]
        np.testing.assert_allclose(scores[n, len(row), :6], expected, rtol=2e-6, atol=1e-6)
        np.testing.assert_allclose(final[n, len(row)], expected[3], rtol=2e-6, atol=1e-6)
    few = {x: y for x, y in grams.items() if not {"<s>", "</s>", "<unk>"} & {*x}}
    model = decode.NGram.from_arpa(written(tmp_path / "few.arpa", arpa(few)), [*TOKENS, None, None, None])
    scores, _, _ = run(model, [[]])
    np.testing.assert_allclose(scores[0, 0, :5], [NATS * few[x,][0] for x in TOKENS], rtol=1e-6)
    assert model.final(jnp.zeros(3, jnp.int32)).tolist() == [0, 0, 0]


def test_chunks(monkeypatch, tmp_path):
    """Rows of more arcs than are put there at once, and files of more lines than are read at once."""
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 4)))
    rows = sentences(6, 30, 5)
    model = lambda: decode.NGram.from_arpa(path, [*TOKENS, None, None, None])
    whole = run(model(), rows)
    monkeypatch.setattr(_automaton, "CHUNK", 7)
    monkeypatch.setattr(_arpa, "LINES", 5)
    in_parts = run(model(), rows, program=jax.jit(lambda *x: scan(*x)))
    for x, y in zip(whole, in_parts):
        np.testing.assert_array_equal(x, y)


def test_tables_are_arguments(tmp_path):
    """Of a program; they take 12 to 24 bytes of an n-gram, and a row."""
    grams = random_arpa(0, 4)
    labels = [*TOKENS, "<unk>", None, None]
    model = decode.NGram.from_arpa(written(tmp_path / "m.arpa", arpa(grams)), labels)
    doubled = jax.tree.map(lambda x: 2 * x if x.dtype == jnp.float32 else x, model)
    np.testing.assert_allclose(run(doubled, [[0, 1]])[0], 2 * run(model, [[0, 1]])[0], rtol=1e-6)
    assert jax.tree.structure(doubled) == jax.tree.structure(model)
    assert repr(model) == "NGram(8 labels, 5 of 5 words)"
    size = sum(x.nbytes for x in jax.tree.leaves(model))
    assert 12 * sum(len(x) > 1 for x in grams) < size < 24 * len(grams) + 8 * 9 + 40


GOOD = arpa(random_arpa(0, 2))
LAST = GOOD.rstrip().splitlines()[-3]
HUGE = "9" * 19
BROKEN = [
    ("", r"line 0: expected \\data\\, got the end of the file"),
    ("\n\nngram 1=2\n", r"line 3: expected \\data\\, got ngram 1=2"),
    ("some text\n" + GOOD.replace("\\data\\", "data"), r"line 1: expected \\data\\, got some text"),
    ("iARPA\n" + GOOD, r"line 1: expected \\data\\, got iARPA"),
    ("\ufeff\ufeff" + GOOD[5:], r"line 1: expected \\data\\, got \\ufeff"),
    (GOOD.encode("utf-16"), r"line 1: expected \\data\\, got \\xff\\xfe\\\\x00d"),
    ("\\data\\\n\nngram 2=1", "line 3: expected ngram 1=..., got ngram 2=1"),
    (f"\\data\\\nngram 1={HUGE}", f"line 2: expected ngram 1=..., got ngram 1={HUGE}"),
    (f"\\data\\\nngram 1={HUGE[1:]}\n\\1-grams:\n-1 a\n", f"line 4: expected {HUGE[1:]} 1-grams, .* got the end"),
    (
        GOOD.replace("\\2-grams:", "\\3-grams:"),
        r"expected \\2-grams: after 8 1-grams, as \\data\\ says, got \\3-grams:",
    ),
    (GOOD.replace("ngram 1=8", "ngram 1=9"), r"line 14: expected 9 1-grams, as \\data\\ says, got a blank line"),
    (GOOD.replace("ngram 1=8", "ngram 1=7"), r"line 13: expected \\2-grams: after 7 1-grams.*, got -.*\\te\\t.*"),
    (GOOD.replace("\\end\\", ""), r"expected \\end\\ after \d+ 2-grams, as \\data\\ says, got the end of the file"),
    (GOOD[: GOOD.index(LAST)], r"expected \d+ 2-grams, as \\data\\ says, got the end of the file"),
    (GOOD.replace(LAST, "-1 a"), "expected 3 or 4 fields of a 2-gram, got 2: -1 a"),
    (GOOD.replace(LAST, "-1 a b -1 -1"), "expected 3 or 4 fields of a 2-gram, got 5: -1 a b -1 -1"),
    (GOOD.replace(LAST, "-x a b"), "expected a log-probability of 0 or less, got -x"),
    (GOOD.replace(LAST, "nan a b"), "expected a log-probability of 0 or less, got nan"),
    (GOOD.replace(LAST, "0.5 a b"), "expected a log-probability of 0 or less, got 0.5"),
    (GOOD.replace(LAST, "-1 a b inf"), r"expected a backoff of 1e\+30 or less, got inf"),
    (GOOD.replace(LAST, "-1 a b 1e300"), r"expected a backoff of 1e\+30 or less, got 1e300"),
    (GOOD.replace(LAST, "-1 a x\u200b"), r"expected words of the 1-grams, got x\\u200b"),
    (GOOD.replace("\te", "\tcafé").encode("latin-1"), r"line 13: expected UTF-8, got caf\\xe9"),
    (GOOD.encode().replace(LAST.encode(), b"-1 a caf\xe9"), r"expected UTF-8, got caf\\xe9"),
    (
        GOOD.replace(LAST, GOOD.splitlines()[20]),
        r"line \d+: expected 2-grams that occur once, got one that occurs twice",
    ),
    (
        GOOD.replace("ngram 1=8", "ngram 1=9").replace("\n\n\\2", "\n-1 </S>\n\n\\2"),
        r"line 14: expected 1-grams that occur once, got one that occurs twice",
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
    with pytest.raises(ValueError, match=r"WordNGram.from_arpa: .*broken.arpa, line \d+: expected"):
        decode.WordNGram.from_arpa(path, ["▁", *TOKENS])


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
        (
            ["a", "b", "a"],
            ValueError,
            r"labels must be different texts, at least one, got \['a', 'a'\], which are equal",
        ),
        (["e\u0301", "\u00e9"], ValueError, "labels must be different .* are equal in Unicode's form NFC"),
        ([None, None], ValueError, "labels must be different texts, at least one, got 2 that are none"),
        (["a", 3], TypeError, "labels must be str or None, got 3"),
    ],
)
def test_labels(labels, error, message, tmp_path):
    path = written(tmp_path / "m.arpa", arpa(random_arpa(0, 2, unk=False)))
    with pytest.raises(error, match=f"NGram.from_arpa: {message}"):
        decode.NGram.from_arpa(path, labels)


# --------------------------------------------------------------------------------------------------------- words

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
    grams.setdefault(("<unk>",), (options.get("unknown", -math.inf) / NATS, 0.0))
    spelled = [x for x in words if x != ("a<unk>" if separator == " " else "aac")]
    return model, Spelled(grams, order, spelled, separator)


@pytest.mark.parametrize(
    ("labels", "order", "unk", "options"),
    [
        (CHARACTERS, 3, True, {}),
        (CHARACTERS, 2, False, {}),
        (CHARACTERS, 1, False, dict(unknown=-7.5)),
        (PIECES, 3, True, {}),
        (PIECES, 2, False, {}),
        (PIECES, 2, False, dict(unknown=-7.5)),
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


def test_tables_of_words(tmp_path):
    """20 bytes of a beginning of a word that labels spell, 12 of each label that goes on within one."""
    model, truth = word_model(tmp_path / "m.arpa", PIECES, 3, True)
    nodes = {word[:i] for word in truth.words for i in range(len(word) + 1)}
    within = [x for x in PIECES if x and "▁" not in x]
    arcs = sum(node + x in nodes for node in nodes for x in within)
    size = lambda x: sum(y.nbytes for y in jax.tree.leaves(x))
    rows = 4 * len(PIECES) + 8 * (len(PIECES) + 1)
    assert size(model) - size(model.ngram) == 20 * (1 + len(nodes)) + 4 + 12 * (arcs + 1) + rows
    assert repr(model) == f"WordNGram(9 labels, {len(truth.words)} of 10 words)"


def test_words_under_vmap(tmp_path):
    """A batch of models of one row each."""
    model, _ = word_model(tmp_path / "m.arpa", CHARACTERS, 3, True)
    rows = [[1, 3, 0, 3, 1], [0, 1, 1, 3, 4]]
    scores, _, states = run(model, rows, 1024, 5)
    labels, before = jnp.array(rows, jnp.int32).ravel(), jax.tree.map(lambda x: jnp.asarray(x[:, :-1].ravel()), states)
    found = jax.jit(jax.vmap(lambda *x: model.step(*jax.tree.map(lambda y: y[None], x))))(before, labels)
    after = scores[:, 1:].reshape(10, 1, 9), jax.tree.map(lambda x: x[:, 1:].reshape(10, 1), states)
    jax.tree.map(np.testing.assert_array_equal, found, after)


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


def test_searches(tmp_path):
    """With a trigram of labels, and bigrams of the words that they spell in two ways, one of them taken out.

    N-best lists are the enumeration, greedy search is the plain loop; -inf leaves no hypothesis.
    """
    model = Model(losses.HAT)
    rest = [None] * (model.tokens - LABELS)
    grams = random_arpa(8, 3)
    made = [(decode.NGram.from_arpa(written(tmp_path / "m.arpa", arpa(grams)), TOKENS[:LABELS] + rest), 0.7)]
    spellings = []
    for names, spelled, weight in ((("▁a", "b"), ["a", "ab", "abb", "b"], 0.5), ((" ", "a"), ["a", "aa"], -0.4)):
        of_words = random_arpa(12, 2, unk=names[0] == " ", tokens=["a", "aa", "ab", "abb", "b"])
        path = written(tmp_path / "words.arpa", arpa(of_words))
        made.append((decode.WordNGram.from_arpa(path, [*names, *rest], separator=names[0][0]), weight))
        of_words.setdefault(("<unk>",), (-math.inf, 0.0))
        spellings.append((names, weight, Spelled(of_words, 2, spelled, names[0][0])))

    def added(prefix, label, end=False):
        history, word = ("<s>", *(TOKENS[x] for x in prefix)), "</s>" if end else TOKENS[label]
        total = 0.7 * log_prob(grams, last(history, 3), word)
        for names, weight, truth in spellings:
            of_text = truth.added("".join(names[x] for x in prefix), "" if end else names[label], end=end)
            total += -math.inf if math.isnan(of_text) else weight * of_text
        return total

    rules = dict(fuse=added, final=lambda prefix: added(prefix, None, end=True))
    options = dict(fusion=tuple(made), max_symbols=2)
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
        (["▁a", "b", "▁a"], {}, ValueError, r"labels must be different texts, .* got \['▁a', '▁a'\]"),
        (["▁e\u0301", "▁\u00e9"], {}, ValueError, "labels must be different texts, .* equal in Unicode's form NFC"),
        ([None], {}, ValueError, "labels must be different texts, at least one, got 1 that are none"),
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


# --------------------------------------------------------------------------------------------------- other files


def assert_same_model(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)  # of one structure, which has what is static


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_one_model_in_many_files(form, tmp_path):
    """Tables are those of the plain file: marks in capitals, a byte order mark, text before the data, other line ends,
    and accents composed or not, in the file, in a part of it, and in the labels."""
    tokens = ["a", "caf\u00e9", "\u1ecb", "\ud55c", "e"]
    plain = arpa(random_arpa(0, 3, tokens=tokens))
    other = unicodedata.normalize("NFD", plain)
    assert len(other) > len(plain)
    section = plain.index("\\2-grams:")
    files = [
        plain.replace("<unk>", "<UNK>").replace("<s>", "<S>").replace("</s>", "</S>"),
        plain.replace("<unk>", "<UNK>", 1),  # in the unigrams alone
        "\ufeff" + plain,
        "made by hand\n\n\tngram 7=1\n" + plain,
        "# as KenLM has it\n\n" + plain.replace("\n", "\r\n"),
        other,
        plain[:section] + other[other.index("\\2-grams:") :],
    ]
    form = lambda labels, form=form: [x and unicodedata.normalize(form, x) for x in labels]
    readers = [
        lambda path: decode.NGram.from_arpa(path, form([*tokens, None, "rare"])),
        lambda path: decode.WordNGram.from_arpa(path, form(["▁caf", "\u00e9", "▁a", "\ud55c", "▁", "e"])),
    ]
    for read in readers:
        expected = read(written(tmp_path / "plain.arpa", plain))
        assert (expected.vocabulary, expected.spelled) in ((5, 5), (5, 4))
        for text in files:
            assert_same_model(read(written(tmp_path / "other.arpa", text)), expected)


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


def test_words_that_are_left_out(tmp_path):
    """Models say how many and which, and warn."""
    tokens = ["a", "b", "ab", *(f"w{i:02}" for i in range(12)), "zwj\u200d"]
    path = written(tmp_path / "m.arpa", arpa({(x,): (-1.0, 0.0) for x in [*tokens, "<unk>", "<s>", "</s>"]}))
    labels, left = ["▁", "a", "b", None], tuple(tokens[3:13])
    with pytest.warns(
        UserWarning, match=r"WordNGram.from_arpa: 13 of 16 words of .*m.arpa are .*: 'w00',.*'w09', \.\.\."
    ) as found:
        words = decode.WordNGram.from_arpa(path, labels)
    assert found[0].filename == __file__
    assert repr(words) == "WordNGram(4 labels, 3 of 16 words)"
    assert (words.vocabulary, words.spelled, words.unspelled) == (16, 3, left)
    with pytest.warns(UserWarning, match=r"NGram.from_arpa: 1 of 16 words of .*m.arpa are .*: 'zwj\\u200d'\.$"):
        model = decode.NGram.from_arpa(path, tokens[:-1])
    assert (model.vocabulary, model.spelled, model.unspelled) == (16, 15, ("zwj\u200d",))
    with warnings.catch_warnings(action="error"):
        assert repr(decode.NGram.from_arpa(path, tokens)) == "NGram(16 labels, 16 of 16 words)"
    with pytest.raises(ValueError, match=r"NGram.from_arpa: labels must spell words of .*, got none of 16: \['a', "):
        decode.NGram.from_arpa(path, ["A", "B"])


NUMBERS = [
    b"nan",
    b"inf",
    b"-inf",
    b"1e400",
    b"-1e400",
    b"1e30",
    b"-1e38",
    b"9" * 25,
    b"-0",
    b"0x1",
    b"1_0",
    b"",
    b"\xff",
]


def mutated(rng, text):
    """A byte flipped, put in or taken out; an end cut; a line doubled, taken out or moved; another number."""
    for _ in range(rng.integers(1, 4)):
        at, way = int(rng.integers(len(text) + 1)), rng.integers(8)
        lines = text.split(b"\n")
        i, j = (int(x) for x in rng.integers(len(lines), size=2))
        if way == 0:
            text = text[:at] + bytes(rng.integers(256, size=1, dtype=np.uint8)) + text[at + 1 :]
        elif way == 1:
            text = text[:at] + bytes(rng.integers(256, size=rng.integers(4), dtype=np.uint8)) + text[at:]
        elif way == 2:
            text = text[:at] if rng.random() < 0.5 else text[at:]
        elif way == 3:
            text = b"\n".join([*lines[:i], lines[i], *lines[i:]])
        elif way == 4:
            text = b"\n".join([*lines[:i], *lines[i + 1 :]])
        elif way == 5:
            lines[i], lines[j] = lines[j], lines[i]
            text = b"\n".join(lines)
        else:
            found = [*re.finditer(rb"-?\d+(\.\d+)?", text)]
            if found:
                place = found[rng.integers(len(found))]
                text = text[: place.start()] + NUMBERS[rng.integers(len(NUMBERS))] + text[place.end() :]
    return text


def test_any_file_is_read_or_refused(monkeypatch):
    """Thousands of broken ones: a model without NaN, or a ValueError with the file, and the line if there is one."""
    rng, content = np.random.default_rng(0), b""
    monkeypatch.setattr(_arpa, "open", lambda path, mode: io.BytesIO(content), raising=False)  # disks are slow
    monkeypatch.setattr(gzip, "open", lambda path, mode: gzip.GzipFile(fileobj=io.BytesIO(content)))
    good = arpa(random_arpa(0, 2, sentences=3, tokens=["a", "b\u00e9"])).encode()
    readers = [
        lambda path: decode.NGram.from_arpa(path, ["a", "b\u00e9", None]),
        lambda path: decode.WordNGram.from_arpa(path, ["▁a", "▁b", "\u00e9", None]),
    ]
    loaded, with_line, number = 0, 0, 3000
    for n in range(number):
        path, content = "m.arpa", mutated(rng, good)
        if n % 10 == 0:
            path, content = "m.arpa.gz", mutated(rng, gzip.compress(good)) if n % 20 else gzip.compress(content)
        try:
            model = readers[n % 2](path)
        except ValueError as error:
            if not (
                type(error) is ValueError and re.search(rf"{path}(, line \d+: expected |, as |, got )", str(error))
            ):
                pytest.fail(f"{error!r} of {content!r}")
            with_line += ", line " in str(error)
        else:
            loaded += 1
            assert all((x < np.inf).all() for x in jax.tree.map(np.asarray, jax.tree.leaves(model))), content
    assert loaded > 200 and with_line > 0.9 * (number - loaded)
