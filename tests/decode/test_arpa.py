"""Are ARPA files of any form read, and are broken ones refused by file and line?"""

import gzip
import unicodedata
import warnings

import jax
import numpy as np
import pytest

from jax_rnnt import decode
from ngrams import TOKENS, arpa, random_arpa, written

pytestmark = pytest.mark.filterwarnings("ignore:.*are left out, as no labels spell them:UserWarning")

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
            found = read(written(tmp_path / "other.arpa", text))  # of one structure, which has what is static
            jax.tree.map(np.testing.assert_array_equal, found, expected)


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


def test_broken_archives(tmp_path):
    whole = gzip.compress(GOOD.encode())
    for content in (whole[:99], b"x" + whole, whole[:50] + b"x" + whole[51:]):
        with pytest.raises(ValueError, match=r"m.arpa.gz, line \d+: expected a whole gzip file, got"):
            decode.NGram.from_arpa(written(tmp_path / "m.arpa.gz", content), TOKENS)
