"""Reads n-gram models in ARPA format: text becomes numbers line by line, the rest is done for whole arrays.

M n-grams of one order.
"""

from __future__ import annotations

import gzip
import itertools
import math
import os
import re
import typing
from collections.abc import Callable

import numpy as np

LINES = 1 << 16  # split at once: their tokens take 30 MB


class Grams(typing.NamedTuple):
    """All n-grams of one order."""

    words: np.ndarray  # int32 [M, order]: numbers of the tokens, -1 for those without
    log_probs: np.ndarray  # [M], in nats
    backoffs: np.ndarray  # [M], in nats, 0 where the file has none
    first_line: int


class Arpa:
    """A file that is read once. `function` is who reads it, in errors."""

    def __init__(self, function: str, path):
        self.function, self.path = function, os.fspath(path)
        self.number = 0  # of the last line that was read
        self.numbers: dict[bytes, int] = {}  # of tokens

    def fail(self, expected: str, got: bytes | str, line: int | None = None):
        got = got.decode(errors="replace") if isinstance(got, bytes) else got
        place = f"{self.path}, line {self.number if line is None else line}"
        raise ValueError(f"{self.function}: {place}: expected {expected}, got {got}.")

    def line(self) -> bytes:
        """The next one that is not blank, stripped."""
        for line in self.file:
            self.number += 1
            if line := line.strip():
                return line
        return b"the end of the file"

    def read(self, number: Callable[[list[bytes]], dict[bytes, int]]) -> list[Grams]:
        """The n-grams of each order; ``number(tokens of the unigrams)`` gives tokens their numbers."""
        found: list[Grams] = []
        with (gzip.open if str(self.path).endswith(".gz") else open)(self.path, "rb") as self.file:
            if (line := self.line()) != b"\\data\\":
                self.fail("\\data\\", line)
            counts: list[int] = []
            line = self.line()
            while match := re.fullmatch(rb"ngram\s+%d\s*=\s*(\d+)" % (len(counts) + 1), line):
                counts.append(int(match[1]))
                line = self.line()
            if not counts:
                self.fail("ngram 1=...", line)
            for order, count in enumerate(counts, 1):
                if line != b"\\%d-grams:" % order:
                    after = f" after {counts[order - 2]} {order - 1}-grams, as \\data\\ says" if order > 1 else ""
                    self.fail(f"\\{order}-grams:{after}", line)
                found.append(self.section(order, count, number))
                line = self.line()
            if line != b"\\end\\":
                self.fail(f"\\end\\ after {counts[-1]} {len(counts)}-grams, as \\data\\ says", line)
        return found

    def section(self, order: int, count: int, number) -> Grams:
        first, parts = self.number + 1, [self.numeric(order, [])]
        size = count if order == 1 else LINES  # all unigrams are known before tokens have numbers
        for done in range(0, count, max(size, 1)):
            rows = [line.split() for line in itertools.islice(self.file, min(size, count - done))]
            self.check_fields(rows, order, min(size, count - done), f"{count} {order}-grams, as \\data\\ says")
            if order == 1:
                self.numbers = number([row[1] for row in rows])
            parts.append(self.numeric(order, rows))
            self.number += len(rows)
        words, log_probs, backoffs = (np.concatenate(x) for x in zip(*parts))
        return Grams(words, log_probs, backoffs, first)

    def check_fields(self, rows, order: int, wanted: int, all_of_them: str):
        for i, row in enumerate(rows):
            if not row or row[0].startswith(b"\\"):
                self.fail(all_of_them, b" ".join(row) or "a blank line", self.number + 1 + i)
            if len(row) not in (order + 1, order + 2):
                fields = f"{order + 1} or {order + 2} fields of a {order}-gram"
                self.fail(fields, f"{len(row)}: {b' '.join(row).decode(errors='replace')}", self.number + 1 + i)
        if len(rows) < wanted:
            self.fail(all_of_them, "the end of the file", self.number + len(rows))

    def numeric(self, order: int, rows):
        """(words, log-probabilities, backoffs) of n-grams."""
        tokens = itertools.chain.from_iterable(row[1 : order + 1] for row in rows)
        words = np.fromiter(map(self.numbers.get, tokens, itertools.repeat(-1)), np.int32, order * len(rows))
        log_probs = self.numbers_of([row[0] for row in rows], "a log-probability of 0 or less", 0)
        backoffs = [row[order + 1] if len(row) > order + 1 else b"0" for row in rows]
        backoffs = self.numbers_of(backoffs, "a finite backoff or -inf", np.finfo(np.float64).max)
        return words.reshape(len(rows), order), log_probs, backoffs

    def numbers_of(self, fields: list[bytes], expected: str, most: float):
        """Fields in log10 as nats, of which none is above `most` or NaN."""

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
        return values * math.log(10)
