"""Reads n-gram models in ARPA format: text becomes numbers line by line; the rest works on whole arrays.

There are M n-grams of one order. Words that Unicode holds for equal are one word. So are <unk> and <UNK>, as in KenLM,
<s> and <S>, </s> and </S>: these three are marks, and no words.
"""

import codecs
import collections
import gzip
import itertools
import math
import os
import re
import typing
import unicodedata
import warnings
import zlib
from collections.abc import Callable, Collection

import numpy as np

from jax_rnnt import _checks

LINES = 1 << 16  # lines that are split at once; their tokens take 30 MB
MARKS = "<unk>", "<s>", "</s>"
UNSEEN = -2  # a token that no earlier line had
LARGEST = 1e30  # largest backoff weight; float32 holds sums of such weights
NAMED = 10  # how many of the words that are left out are named


def canonical(word: str, form: typing.Literal["NFC", "NFD"] = "NFC") -> str:
    """Returns the same text for all spellings of one word."""
    mark = word.lower()
    return mark if mark in MARKS and word in (mark, mark.upper()) else unicodedata.normalize(form, word)


def names_of(labels, form: typing.Literal["NFC", "NFD"] = "NFC") -> list[str | None]:
    """Returns the user's labels in canonical form, which must be different, and at least one."""
    labels = list(labels)
    for label in labels:
        if not isinstance(label, (str, type(None))):
            raise _checks.bad_type(f"labels must be str or None, got {label!r}.")
    names = [None if label is None else canonical(label, form) for label in labels]
    count = collections.Counter(name for name in names if name is not None)
    twice = [label for label, name in zip(labels, names) if name is not None and count[name] > 1]
    if twice or not count:
        got = f"{twice[:5]}, which are equal in Unicode's form NFC" if twice else f"{len(labels)} that are none"
        raise _checks.bad_value(f"labels must be different texts, at least one, got {got}.")
    return names


def shown(text: bytes | str) -> str:
    """Returns the beginning of a file's text for an error, with escapes for what is invisible or not UTF-8."""
    text = text.decode(errors="backslashreplace") if isinstance(text, bytes) else text
    text = text if len(text) <= 100 else text[:100] + "..."
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text)


class Grams(typing.NamedTuple):
    """The n-grams of one order."""

    words: np.ndarray  # int32 [M, order]: numbers of the tokens, -1 for those without one
    log_probs: np.ndarray  # [M], in nats
    backoffs: np.ndarray  # [M], in nats, 0 where the file has none
    first_line: int


class Arpa:
    """An ARPA file, which is read once."""

    vocabulary: int  # number of words in the file
    spelled: int  # how many of these have a number
    unspelled: tuple[str, ...]  # the first NAMED words without one

    def __init__(self, path, form: typing.Literal["NFC", "NFD"] = "NFC"):
        self.path, self.form = os.fspath(path), form
        self.number = 0  # number of the last line that was read
        self.names: dict[str, int] = {}  # numbers of the file's words and marks, -1 for those without one
        self.tokens: dict[bytes, int] = {}  # the same for tokens as they stand in lines

    def fail(self, expected: str, got: bytes | str, line: int | None = None) -> typing.NoReturn:
        place = f"{self.path}, line {self.number if line is None else line}"
        raise _checks.bad_value(f"{place}: expected {expected}, got {shown(got)}.") from None

    def line(self) -> bytes:
        """Returns the next line that is not blank, stripped; an empty one when the file has ended."""
        for line in self.file:
            self.number += 1
            if line := (line.removeprefix(codecs.BOM_UTF8) if self.number == 1 else line).strip():
                return line
        return b""

    def expect(self, expected: str, holds: bool, line: bytes):
        if not holds:
            self.fail(expected, line or "the end of the file")

    def read(self, function: str, number: Callable[[list[str], Collection[str]], dict[str, int]]) -> list[Grams]:
        """Returns the n-grams of each order; ``number(words, marks)`` returns the numbers of unigrams that have one.

        Words without a number are left out, and a warning in the name of the function counts them.
        """
        with (gzip.open if str(self.path).endswith(".gz") else open)(self.path, "rb") as self.file:
            try:
                orders = self.sections(number)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                self.fail("a whole gzip file", str(error))
        if left := self.vocabulary - self.spelled:
            names = ", ".join(map(repr, self.unspelled)) + ", ..." * (left > NAMED)
            message = f"{left} of {self.vocabulary} words of {self.path} are left out, as no labels spell them: {names}"
            warnings.warn(f"{function}: {message}.", stacklevel=4)
        return orders

    def sections(self, number) -> list[Grams]:
        orders: list[Grams] = []
        first = line = self.line()
        place = self.number
        while line != b"\\data\\":  # any text may come before this line
            if not line or re.match(rb"[iq]ARPA", line):  # formats of IRSTLM, which have other numbers
                self.fail("\\data\\", first or "the end of the file", place)
            line = self.line()
        counts: list[int] = []
        line = self.line()
        while match := re.fullmatch(rb"ngram\s+%d\s*=\s*(\d{1,18})" % (len(counts) + 1), line):
            counts.append(int(match[1]))
            line = self.line()
        self.expect("ngram 1=...", bool(counts), line)
        for order, count in enumerate(counts, 1):
            after = f" after {counts[order - 2]} {order - 1}-grams, as \\data\\ says" if order > 1 else ""
            self.expect(f"\\{order}-grams:{after}", line == b"\\%d-grams:" % order, line)
            orders.append(self.section(order, count, number))
            line = self.line()
        self.expect(f"\\end\\ after {counts[-1]} {len(counts)}-grams, as \\data\\ says", line == b"\\end\\", line)
        return orders

    def section(self, order: int, count: int, number) -> Grams:
        first, parts = self.number + 1, [self.numeric(order, [])]
        size = max(count, 1) if order == 1 else LINES  # all unigrams must be known before tokens have numbers
        for done in range(0, max(count, order == 1), size):
            rows = [line.split() for line in itertools.islice(self.file, min(size, count - done))]
            self.check_fields(rows, order, min(size, count - done), f"{count} {order}-grams, as \\data\\ says")
            if order == 1:
                self.number_words([row[1] for row in rows], number)
            parts.append(self.numeric(order, rows))
            self.number += len(rows)
        words, log_probs, backoffs = (np.concatenate(x) for x in zip(*parts))
        return Grams(words, log_probs, backoffs, first)

    def name(self, token: bytes, line: int) -> str:
        try:
            return canonical(token.decode(), self.form)
        except UnicodeDecodeError:
            self.fail("UTF-8", token, line)

    def number_words(self, tokens: list[bytes], number):
        names = [self.name(token, self.number + 1 + i) for i, token in enumerate(tokens)]
        words = [x for x in dict.fromkeys(names) if x not in MARKS]
        numbers = number(words, {*MARKS} & {*names})
        self.names = {name: numbers.get(name, -1) for name in names}
        self.tokens = {token: self.names[name] for token, name in zip(tokens, names)}
        without = [x for x in words if self.names[x] < 0]
        self.vocabulary, self.spelled = len(words), len(words) - len(without)
        self.unspelled = tuple(unicodedata.normalize("NFC", x) for x in without[:NAMED])
        if not self.spelled:
            got = f"none of {len(words)}: {list(self.unspelled[:5])}"
            raise _checks.bad_value(f"labels must spell words of {self.path}, got {got}.")

    def check_fields(self, rows, order: int, wanted: int, all_of_them: str):
        for i, row in enumerate(rows):
            if not row or row[0].startswith(b"\\"):
                self.fail(all_of_them, b" ".join(row) or "a blank line", self.number + 1 + i)
            if len(row) not in (order + 1, order + 2):
                fields = f"{order + 1} or {order + 2} fields of a {order}-gram"
                self.fail(fields, b"%d: %b" % (len(row), b" ".join(row)), self.number + 1 + i)
        if len(rows) < wanted:
            self.fail(all_of_them, "the end of the file", self.number + len(rows))

    def numeric(self, order: int, rows):
        """Returns (words, log-probabilities, backoffs) of n-grams."""
        tokens = [*itertools.chain.from_iterable(row[1 : order + 1] for row in rows)]
        words = np.fromiter(map(self.tokens.get, tokens, itertools.repeat(UNSEEN)), np.int32, len(tokens))
        for i in np.flatnonzero(words == UNSEEN).tolist():  # another form of a known word
            name = self.name(tokens[i], line := self.number + 1 + i // order)
            if name not in self.names:
                self.fail("words of the 1-grams", tokens[i], line)
            words[i] = self.tokens[tokens[i]] = self.names[name]
        log_probs = self.numbers_of([row[0] for row in rows], "a log-probability of 0 or less", 0)
        backoffs = [row[order + 1] if len(row) > order + 1 else b"0" for row in rows]
        backoffs = self.numbers_of(backoffs, f"a backoff of {LARGEST:g} or less", LARGEST)
        return words.reshape(len(rows), order), log_probs, backoffs

    def numbers_of(self, fields: list[bytes], expected: str, most: float):
        """Converts fields from log10 to nats; none may be above `most` or NaN."""

        def value(i):
            try:
                return float(fields[i])
            except ValueError:
                return math.nan

        try:
            values = np.fromiter(map(float, fields), np.float64, len(fields))
        except ValueError:
            values = np.array([value(i) for i in range(len(fields))])
        if not (values <= most).all():
            i = int(np.argmin(values <= most))
            self.fail(expected, fields[i], self.number + 1 + i)
        return np.where(values < -LARGEST, -math.inf, values) * math.log(10)
