"""N-gram language models over words, for labels that spell words.

There are V labels, W words and n nodes. The words make a tree of characters: a node is a beginning of words, and its
root is the empty one. The states of the spelling are 0, which is outside the tree, and after it the nodes. Words have
numbers; unknown ones have W.
"""

from __future__ import annotations

import dataclasses
import math
import os
import unicodedata
from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._gather import rows_at
from jax_rnnt.decode.lm._arpa import LARGEST, Arpa, Grams, names_of
from jax_rnnt.decode.lm._automaton import Automaton, Trie, follow, one_root, score_rows
from jax_rnnt.decode.lm._ngram import NGram, ngram_of

State: TypeAlias = tuple[jax.Array, jax.Array]
OUTSIDE, ROOT = 0, 1
DEPTH = 1  # OUTSIDE is the suffix of all states
CHARACTERS = 0x110000  # number of characters in Unicode


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class WordNGram(Automaton):
    """A backoff n-gram model over words, for `greedy` and `beam` with labels that spell them. `from_arpa` makes one.

    A label that begins with the separator, as "▁the" or the character " ", ends the word before it and begins the next
    one; the end of an utterance ends the last word. What labels spell decides, not how: "▁c", "at" and "▁ca", "t" are
    one word. A word that the model lacks is <unk>. Empty words cost nothing.

    As a model of fusion it gives a sequence of labels, in nats,

    * for every word that has ended, log p(word | words before it), exactly;
    * for the word in progress its look-ahead: the best unigram log-probability of all words that begin so, among them
      <unk>, as any beginning may become an unknown word. Where no word begins so, it is that of <unk>. The end of the
      word replaces it. Unigrams of -inf count as the lowest finite one here.

    So the score of a finished sequence is that of its words and of </s>. Where unknown words have -inf, labels that
    spell no beginning of a word are -inf at once.

    It is a pytree of arrays, as `NGram` is. Besides the n-grams, they take 20 bytes for each beginning of a word, and
    12 for each label that may follow it within a word. A state is two integers, the context of words and the node:
    hypotheses with equal states share their rows. V, its `start`, is the label that begins a sentence.

    References
    ----------
    Steinbiss, Tran and Ney, "Improvements in Beam Search", ICSLP 1994: look-ahead by the best unigram.
    Ortmanns and Ney, "Language-Model Look-Ahead for Large Vocabulary Speech Recognition", ICSLP 1996.

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
    ... -0.4 ab -0.2
    ... -0.6 b
    ... \\\\2-grams:
    ... -0.1 ab b
    ... \\\\end\\\\
    ... '''
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "words.arpa"
    >>> size = path.write_text(arpa)
    >>> model = decode.WordNGram.from_arpa(path, labels=[None, "▁a", "b", "▁"])  # class 0 is the blank
    >>> state, total = model.initial(1), 0.0
    >>> for label, after in ((model.start, 1), (1, 2), (2, 3), (3, 2)):  # ▁a b ▁ b
    ...     scores, state = model.step(state, jnp.array([label]))
    ...     total += float(scores[0, after])
    ...     print(after, round(total / jnp.log(10).item(), 2))
    1 -0.4
    2 -0.4
    3 -0.5
    2 -1.1
    >>> _, state = model.step(state, jnp.array([2]))
    >>> round((total + float(model.final(state)[0])) / jnp.log(10).item(), 2)  # ab after <s>, b after ab, </s>
    -1.1
    """

    ngram: NGram  # over words
    words: jax.Array  # [1 + n]: the word of each state; W for none
    ahead: jax.Array  # [1 + n]: the look-ahead of each state; 0 for the root
    begins: jax.Array  # [V]: the state after each label that begins a word, -1 for others

    @classmethod
    @keywords
    def from_arpa(
        cls,
        path: str | os.PathLike[str],
        labels: Sequence[str | None],
        *,
        separator: str = "▁",
        unknown: float | None = None,
    ) -> WordNGram:
        """Reads a model over words in ARPA format, as lmplz, SRILM and others write it.

        Words that the labels cannot spell are left out, with their n-grams; a warning tells how many those are. Texts
        that are equal in Unicode's form NFC are one, as composed and decomposed accents, also where an accent is a
        label of its own; <UNK>, <S> and </S> are <unk>, <s> and </s>. A file without <s> begins in the empty context;
        one without </s> has no score of the end.

        Parameters
        ----------
        path, labels
            As for `NGram.from_arpa`; labels are what words are spelled with. Bytes that are parts of characters are
            surrogate escapes, as in ``b"\\xc3".decode("utf-8", "surrogateescape")``.
        separator : str, default "▁"
            The beginning of labels that begin a word: U+2581 of SentencePiece, or the label between words.
        unknown : float, optional
            The log-probability of <unk>, in nats, in place of all those in the file; by default the file's, or -inf
            where it has none. Backoff weights of contexts are added, as to every unigram. Estimates of <unk> are often
            so high that a search prefers a wrong spelling to a known word; then -30 or so finds more words, and -inf
            only known ones.

        Returns
        -------
        WordNGram

        Raises
        ------
        ValueError
            What `NGram.from_arpa` raises for broken files. Labels that occur twice, that are empty, that have the
            separator behind their beginning, of which none begins with it, or that spell no word of the file. An empty
            separator. `unknown` above 0 or NaN.
        TypeError
            A label is neither str nor None; the separator is no str; `unknown` is no number.
        """
        spelling = Spelling(labels, separator)
        known = _checks.known(-math.inf if unknown is None else _checks.scalar("unknown", unknown))
        if known is None or not known <= 0:
            raise _checks.bad_value(f"unknown must be a known log-probability of 0 or less, got {unknown}.")
        file = Arpa(path, spelling.form)
        grams = file.read("WordNGram.from_arpa", spelling.number)
        if not spelling.unknown:
            words, log_probs, backoffs, line = grams[0]
            words, log_probs = np.append(words, [[spelling.count]], 0), np.append(log_probs, -math.inf)
            grams[0] = Grams(words, log_probs, np.append(backoffs, 0.0), line)
        if unknown is not None:
            value, spelling.unknown = -math.inf if known < -LARGEST else known, False
            of_words = [np.where(x.words[:, -1] == spelling.count, value, x.log_probs) for x in grams]
            grams = [x._replace(log_probs=log_probs) for x, log_probs in zip(grams, of_words)]
        ngram = ngram_of(NGram, file, grams, spelling.count + 1, None, spelling)
        names = "arcs", "words", "ahead", "begins", "ngram"
        return _pytree.make(cls, names, (*spelling.tables(grams[0]), ngram))

    def __repr__(self) -> str:
        return f"WordNGram({self.start} labels, {self.spelled} of {self.vocabulary} words)"

    @property
    def vocabulary(self) -> int:
        """Number of words in the file. <s>, </s> and <unk> do not count."""
        return self.ngram.vocabulary

    @property
    def spelled(self) -> int:
        """Number of words in the file that the labels can spell; the others are left out, with their n-grams."""
        return self.ngram.spelled

    @property
    def unspelled(self) -> tuple[str, ...]:
        """The first ten words of the file that the labels cannot spell."""
        return self.ngram.unspelled

    def initial(self, batch: int) -> tuple[jax.Array, jax.Array]:
        """Returns int32 [batch] twice: the empty context, and no word in progress."""
        return self.ngram.initial(batch), jnp.full((batch,), ROOT, jnp.int32)

    def step(self, state: State, labels: jax.Array) -> tuple[jax.Array, State]:
        """Returns (scores float32 [N, V] of labels after one more label [N], states)."""
        labels = jnp.asarray(labels, jnp.int32)
        label = jnp.clip(labels, 0, self.start - 1)
        context, node = state
        first_node = rows_at(self.begins, label)
        _, after = self.complete(state)
        context = jnp.where(first_node >= 0, after, context)
        node = jnp.where(first_node >= 0, first_node, follow(self.arcs, node, label, DEPTH)[1])
        starts = labels == self.start
        context, node = jnp.where(starts, self.ngram.begin, context), jnp.where(starts, ROOT, node)
        completion, _ = self.complete((context, node))
        begins = self.begins[None]
        next_word = completion[:, None] + rows_at(self.ahead, jnp.maximum(begins, 0))
        return jnp.where(begins >= 0, next_word, score_rows(self.arcs, node, DEPTH)), (context, node)

    def final(self, state: State) -> jax.Array:
        """Returns the score [N] of the end of the last word, plus the log-probability of </s> after it."""
        completion, context = self.complete(state)
        return completion + self.ngram.final(context)

    def complete(self, state: State) -> State:
        """Returns (what the end of the word in progress adds to its look-ahead, the context after) [N]; 0 if empty."""
        context, node = state
        log_prob, after = follow(self.ngram.arcs, context, rows_at(self.words, node), self.ngram.depth)
        score = jnp.where(jnp.isneginf(log_prob), log_prob, log_prob - rows_at(self.ahead, node))
        return jnp.where(node == ROOT, 0, score), jnp.where(node == ROOT, context, after)


# -------------------------------------------------------------------------------------------------------- tables


class Spellings(Trie):
    """The tree of some texts, character by character."""

    def __init__(self, texts: list[str]):
        characters = np.array([*map(ord, "".join(texts))], np.int64)
        super().__init__(np.array([*map(len, texts)], np.int64), characters, CHARACTERS)

    def child(self, node, character):
        """Returns the children that nodes have by these characters, -1 for none."""
        key = node * CHARACTERS + character
        at = np.searchsorted(self.keys, key)
        return np.where(np.append(self.keys, -1)[at] == key, 1 + at, -1)

    def within(self, texts: list[str]):
        """Returns (node, which text, the node after it) for all places of different, nonempty texts in the tree."""
        backward = Spellings([text[::-1] for text in texts])
        which = np.full(backward.count, -1)
        which[backward.ends] = np.arange(len(texts))
        target = node = np.arange(1, self.count)
        at, places = np.zeros(len(node), np.int64), [np.zeros((3, 0), np.int64)]
        while len(target):
            at, node = backward.child(at, self.symbol[node - 1]), self.parent[node - 1]
            here = which[at[at >= 0]] >= 0
            places.append(np.stack([node, which[at], target])[:, at >= 0][:, here])
            more = (at >= 0) & (node > 0)
            at, node, target = at[more], node[more], target[more]
        return np.concatenate(places, 1)


def joins(label) -> bool:
    """Returns True if a label begins with a mark or letter of Hangul that Unicode may join to a character before it."""
    begin = label[:1] if isinstance(label, str) else ""
    return any(unicodedata.category(x)[0] == "M" or "\u1160" <= x <= "\u11ff" for x in begin)


class Spelling:
    """The texts that labels spell, and the words of a file that they can spell."""

    def __init__(self, labels, separator):
        if not isinstance(separator, str):
            raise _checks.bad_type(f"separator must be a str, got {separator!r}.")
        if not separator:
            raise _checks.bad_value(f"separator must have a character or more, got {separator!r}.")
        labels = list(labels)
        # Texts are composed, unless labels begin with an accent of the character before.
        self.form: Literal["NFC", "NFD"] = "NFD" if any(map(joins, labels)) else "NFC"
        self.labels, separator = names_of(labels, self.form), unicodedata.normalize(self.form, separator)
        names = [label for label in self.labels if label is not None]
        self.texts = {label: label.removeprefix(separator) for label in names}
        wrong = [x for x, text in self.texts.items() if not x or separator in text]
        if wrong:
            expected = f"texts that are not empty, with {separator!r} at their beginning alone"
            raise _checks.bad_value(f"labels must be {expected}, got {wrong[:5]}.")
        self.bytes = any("\udc80" <= x <= "\udcff" for name in names for x in name)
        if all(label == text for label, text in self.texts.items()):
            expected = f"texts of which some begin with {separator!r}, the separator"
            raise _checks.bad_value(f"labels must be {expected}, got {names[:5]}.")

    def number(self, words: list[str], marks) -> dict[str, int]:
        """Returns the numbers of the words and marks that a file has as unigrams."""
        spelled = self.spell(words)
        self.names = [word for word, is_spelled in zip(words, spelled) if is_spelled]
        self.count = len(self.names)
        special = {"<unk>": self.count, "</s>": self.count + 1, "<s>": self.count + 2}
        numbers = {name: i for i, name in enumerate(self.names)} | {x: special[x] for x in marks}
        self.begin, self.end = numbers.get("<s>"), numbers.get("</s>")
        self.unknown = "<unk>" in numbers  # whether its estimates count
        return numbers

    def trie(self, names: list[str]) -> Spellings:
        return Spellings([*map(self.spelled, names)])

    def spelled(self, text: str) -> str:
        """Returns its characters, or a character for each of its bytes where labels are parts of characters."""
        return text.encode("utf-8", "surrogateescape").decode("latin-1") if self.bytes else text

    def places(self, trie: Spellings):
        """Returns (arcs (node, label, target) in words, ascending; {label that begins a word: node, -1 outside})."""
        texts = [*{text: None for text in self.texts.values() if text}]
        node, which, target = trie.within([*map(self.spelled, texts)])
        begin = {"": 0} | {texts[i]: int(x) for i, x in zip(which[node == 0], target[node == 0])}
        number = {label: i for i, label in enumerate(self.labels)}
        label = np.array([number.get(text, -1) for text in texts], np.int64)[which]  # -1: only with the separator
        arcs = np.stack([node, label, target])[:, label >= 0]
        begins = {number[x]: begin.get(text, -1) for x, text in self.texts.items() if x != text}
        return arcs[:, np.lexsort((arcs[1], arcs[0]))], begins

    def spell(self, names: list[str]):
        """Returns which words can be spelled by some sequence of labels."""
        trie = self.trie(names)
        (node, _, target), begins = self.places(trie)
        reached = np.zeros(trie.count, bool)
        reached[[0, *(x for x in begins.values() if x >= 0)]] = True
        while not reached[after := target[reached[node]]].all():
            reached[after] = True
        return reached[trie.ends]

    def tables(self, unigrams: Grams):
        """Returns (arcs of the spelling, and the fields `words`, `ahead`, `begins` of a model)."""
        word = unigrams.words[:, 0]
        log_probs = np.full(self.count + 1, -math.inf)
        known = (word >= 0) & (word <= self.count)
        log_probs[word[known]] = unigrams.log_probs[known]
        paid = np.where(np.isneginf(log_probs), np.min(log_probs, where=np.isfinite(log_probs), initial=0), log_probs)
        unknown = paid[-1] if self.unknown else log_probs[-1]

        trie = self.trie(self.names)
        states = 1 + trie.count
        ahead = np.full(states, unknown)
        np.maximum.at(ahead, 1 + trie.ends, paid[:-1])
        for node in range(states - 1, ROOT, -1):
            parent = 1 + trie.parent[node - 1 - ROOT]
            ahead[parent] = max(ahead[parent], ahead[node])
        ahead[ROOT] = 0
        words = np.full(states, self.count, np.int32)
        words[1 + trie.ends] = np.arange(self.count)

        (node, label, target), first_nodes = self.places(trie)
        begins = np.full(len(self.labels), -1, np.int32)
        begins[[*first_nodes]] = [1 + x for x in first_nodes.values()]
        arcs = 1 + node, label, ahead[1 + target] - ahead[1 + node], 1 + target
        stays = np.array([-math.inf if x is None else 0 for x in self.labels] + [0])
        backoffs = np.append(0, unknown - ahead[ROOT:])
        automaton = one_root(stays, np.full(len(stays), OUTSIDE), arcs, backoffs, np.full(states, OUTSIDE))
        return automaton, *map(jnp.asarray, (words, ahead.astype(np.float32), begins))
