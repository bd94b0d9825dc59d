"""N-gram language models as automata, in which a state is the longest context that matters.

There are V labels and M n-grams of one order. Words have the numbers of their labels, </s> has V, and <s> has V + 1.
"""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt.decode.lm._arpa import Arpa, Grams, names_of
from jax_rnnt.decode.lm._automaton import Arcs, Automaton, follow, one_root, score_rows


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class NGram(Automaton):
    """A backoff n-gram language model for `greedy` and `beam`, of any order. `from_arpa` makes one.

    It is a pytree of arrays: give it to a jitted function as an argument, else its tables are constants of the program.
    They take 12 to 24 bytes for each n-gram, and one row of unigrams. A state is one integer, the longest context that
    has an influence on what follows: hypotheses with equal states share their rows.

    As a model of fusion it has `initial`, `step` and `final`. V, its `start`, is the label that begins a sentence.

    Attributes
    ----------
    vocabulary : int
        Number of words in the file. <s>, </s> and <unk> do not count.
    spelled : int
        How many of them are labels; the others are left out, with their n-grams.
    unspelled : tuple of str
        The first ten of the words that are left out.

    References
    ----------
    Katz, "Estimation of Probabilities from Sparse Data for the Language Model Component of a Speech Recognizer", 1987.
    Heafield, "KenLM: Faster and Smaller Language Model Queries", WMT 2011: contexts that matter.

    Examples
    --------
    >>> import jax.numpy as jnp, pathlib, tempfile
    >>> from jax_rnnt import decode
    >>> arpa = '''\\\\data\\\\
    ... ngram 1=4
    ... ngram 2=1
    ... \\\\1-grams:
    ... -99 <s> -0.1
    ... -0.5 </s>
    ... -0.4 a -0.2
    ... -0.6 b
    ... \\\\2-grams:
    ... -0.1 a b
    ... \\\\end\\\\
    ... '''
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "ab.arpa"
    >>> size = path.write_text(arpa)
    >>> model = decode.NGram.from_arpa(path, labels=[None, "a", "b"])  # class 0 is the blank
    >>> scores, state = model.step(model.initial(1), jnp.array([model.start]))
    >>> scores, state = model.step(state, jnp.array([1]))
    >>> [round(x, 2) for x in (scores / jnp.log(10))[0].tolist()]  # after a: a with backoff, b
    [-inf, -0.6, -0.1]
    >>> round(float(model.final(state)[0] / jnp.log(10)), 2)
    -0.7
    """

    columns: jax.Array | None  # [V]: the word of each label; None if each label is its own word
    depth: int = _pytree.static()  # number of words in the longest context
    begin: int = _pytree.static()  # the state after <s>
    end: int | None = _pytree.static()  # the word </s>
    vocabulary: int = _pytree.static()
    spelled: int = _pytree.static()
    unspelled: tuple[str, ...] = _pytree.static()

    @classmethod
    @keywords
    def from_arpa(cls, path: str | os.PathLike[str], labels: Sequence[str | None]) -> NGram:
        """Reads a model in ARPA format, as lmplz, SRILM and others write it.

        No search can meet n-grams with a token that is no label: they are left out, and a warning tells how many words
        those are. Labels that the file lacks are <unk>. Texts that are equal in Unicode's form NFC are one token, as
        composed and decomposed accents; <UNK>, <S> and </S> are <unk>, <s> and </s>. A file without <s> begins in the
        empty context; one without </s> has no score of the end.

        Parameters
        ----------
        path : str or PathLike
            The file, in UTF-8; compressed if its name ends in .gz. Text before \\data\\ is not read.
        labels : sequence of str or None
            The token of each class of the joint network, V in all. None for classes that are no labels, as the blank:
            their score is -inf.

        Returns
        -------
        NGram

        Raises
        ------
        ValueError
            With file and line: \\data\\, \\end\\ or a section is missing, other numbers of n-grams than \\data\\ says,
            wrong fields, a positive log-probability, a word that is no unigram or not in UTF-8, an n-gram that occurs
            twice or whose context is missing. With names: labels that the file lacks if it has no <unk>, that occur
            twice, or of which none is a word of the file.
        TypeError
            A label is neither str nor None.
        """
        vocabulary, file = Vocabulary(labels, path), Arpa(path)
        grams = file.read("NGram.from_arpa", vocabulary.number)
        size = len(vocabulary.columns)
        same = (vocabulary.columns == np.arange(size)).all()
        return ngram_of(cls, file, grams, size, None if same else jnp.asarray(vocabulary.columns), vocabulary)

    def __repr__(self) -> str:
        return f"NGram({self.start} labels, {self.spelled} of {self.vocabulary} words)"

    def initial(self, batch: int) -> jax.Array:
        """Returns int32 [batch]: the empty context."""
        return jnp.zeros((batch,), jnp.int32)

    def step(self, state: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (log-probabilities float32 [N, V] of labels after one more label [N], states)."""
        labels = jnp.asarray(labels, jnp.int32)
        word = jnp.clip(labels, 0, self.start - 1)
        if self.columns is not None:
            word = self.columns[word]
        _, after = follow(self.arcs, state, word, self.depth)
        state = jnp.where(labels == self.start, self.begin, after)
        scores = score_rows(self.arcs, state, self.depth)
        return scores if self.columns is None else scores[:, self.columns], state

    def final(self, state: jax.Array) -> jax.Array:
        """Returns the log-probability [N] of </s>."""
        if self.end is None:
            return jnp.zeros(state.shape, self.arcs.scores.dtype)
        return follow(self.arcs, state, jnp.full_like(state, self.end), self.depth)[0]


def ngram_of(cls: type[NGram], file: Arpa, grams: list[Grams], words: int, columns, numbers) -> NGram:
    """Makes a model of n-grams over `words` words; `numbers` has the numbers of the words `begin` and `end`."""
    arcs, begin = tables(grams, words, numbers.begin, file)
    fields = dict(arcs=arcs, columns=columns, depth=len(grams) - 1, begin=begin, end=numbers.end)
    fields |= {name: getattr(file, name) for name in ("vocabulary", "spelled", "unspelled")}
    return _pytree.make(cls, fields.keys(), fields.values())


class Vocabulary:
    """Numbers of words where each label is one word."""

    def __init__(self, labels, path):
        names, self.path = names_of(labels), path
        self.numbers = {name: i for i, name in enumerate(names) if name is not None}
        self.columns = np.arange(len(names), dtype=np.int32)  # the word of each label
        self.begin = self.end = None

    def number(self, words: list[str], marks) -> dict[str, int]:
        """Returns the numbers of the words and marks that a file has as unigrams."""
        unigrams, size = {*words, *marks}, len(self.columns)
        missing = {name: i for name, i in self.numbers.items() if name not in unigrams}
        numbers = {"</s>": size, "<s>": size + 1} | self.numbers
        if missing and "<unk>" not in unigrams:
            names = ", ".join(map(repr, [*missing][:5]))
            raise _checks.bad_value(
                f"labels must be tokens of {self.path}, as it has no <unk>, got {len(missing)} that are "
                f"none: {names}{', ...' if len(missing) > 5 else ''}; None is for classes that are no labels."
            )
        if missing:
            columns = [*missing.values()]
            self.columns[columns] = numbers.setdefault("<unk>", columns[0])
        self.begin, self.end = (numbers[x] if x in unigrams else None for x in ("<s>", "</s>"))
        return numbers


# -------------------------------------------------------------------------------------------------------- tables


class Level(typing.NamedTuple):
    """The n-grams of one order, sorted by context and word, so that those of a context are consecutive."""

    words: np.ndarray  # [M, order]
    log_probs: np.ndarray  # [M]
    backoffs: np.ndarray  # [M]
    context: np.ndarray  # [M]: index of the context among the n-grams of the order below
    keys: np.ndarray  # int64 [M]: context and word as one number, ascending
    states: np.ndarray  # [M]: the state of each n-gram as a context; -1 if it is none


class Contexts:
    """The n-grams of all orders, with the states that some of them are."""

    def __init__(self, grams: list[Grams], words: int, file: Arpa):
        self.words, self.levels = words, []
        for i, section in enumerate(grams):
            self.levels.append(self.sorted(section, file, i + 1))
        self.count = 1  # the empty context is state 0
        for level, above in zip(self.levels, self.levels[1:]):
            matters = level.backoffs != 0
            matters[above.context] = True
            level.states[matters] = self.count + np.arange(matters.sum())
            self.count += int(matters.sum())

    def sorted(self, grams: Grams, file: Arpa, order: int) -> Level:
        met = np.flatnonzero((grams.words >= 0).all(1))
        words, log_probs, backoffs = (x[met] for x in grams[:3])
        context = self.find(words[:, :-1])
        if (context < 0).any():
            line = grams.first_line + int(met[np.argmin(context)])
            file.fail(f"the context of each {order}-gram among the {order - 1}-grams", "one without", line)
        keys = context * self.words + words[:, -1]
        ranks = np.argsort(keys, kind="stable")
        keys = keys[ranks]
        if (same := keys[1:] == keys[:-1]).any():
            line = grams.first_line + int(met[ranks[1:][same].min()])
            file.fail(f"{order}-grams that occur once", "one that occurs twice", line)
        words, log_probs, backoffs, context = (x[ranks] for x in (words, log_probs, backoffs, context))
        return Level(words, log_probs, backoffs, context, keys, np.full(len(keys), -1, np.int32))

    def find(self, words):
        """Returns the places [M] of n-grams [M, order] in their level, -1 for those that are not in it."""
        index, there = np.zeros(len(words), np.int64), np.ones(len(words), bool)
        for level, word in zip(self.levels, words.T):
            if not len(level.keys):
                return np.full(len(words), -1)
            key = index * self.words + word
            index = np.minimum(np.searchsorted(level.keys, key), len(level.keys) - 1)
            there &= level.keys[index] == key
        return np.where(there, index, -1)

    def resolve(self, words):
        """Returns the state [M] after words [M, n]: that of the longest ending that has one."""
        state = np.zeros(len(words), np.int32)
        for i in range(words.shape[1]):
            todo = np.flatnonzero(state == 0)
            index = self.find(words[todo, i:])
            states = self.levels[words.shape[1] - i - 1].states
            state[todo] = np.where(index >= 0, np.maximum(states[index], 0), 0) if len(states) else 0
        return state


def tables(grams: list[Grams], labels: int, begin: int | None, file: Arpa) -> tuple[Arcs, int]:
    """Returns (the automaton, the state after the word `begin`)."""
    contexts = Contexts(grams, labels + 2, file)
    unigrams, *levels = contexts.levels
    scores = np.full(labels + 2, -np.inf, np.float32)
    targets = np.zeros(labels + 2, np.int32)
    word = unigrams.words[:, 0]
    scores[word], targets[word] = unigrams.log_probs, np.maximum(unigrams.states, 0)

    backoffs, suffixes, parts = [np.zeros(1)], [np.zeros(1)], []
    for below, level in zip(contexts.levels, levels):
        matters = below.states > 0
        backoffs.append(below.backoffs[matters])
        suffixes.append(contexts.resolve(below.words[matters, 1:]))
        ends = level.words[:, 1:] if level is levels[-1] else level.words  # the longest n-grams are no contexts
        parts.append((below.states[level.context], level.words[:, -1], level.log_probs, contexts.resolve(ends)))
    columns = [np.concatenate(x) for x in zip(*parts)] if parts else [np.zeros(0)] * 4
    root = scores[: labels + 1], targets[: labels + 1]
    arcs = one_root(*root, columns, np.concatenate(backoffs), np.concatenate(suffixes))
    return arcs, 0 if begin is None else int(targets[begin])
