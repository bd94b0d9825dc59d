"""Lists of phrases that searches favour, as automata (Aho and Corasick 1975).

There are P phrases of all utterances, B utterances and V labels. The phrases of an utterance make a tree: a node is a
beginning of phrases, and its root is the empty one. Nodes are numbered by depth, roots first. Nodes that have children
become states: behind a phrase that begins no other one, only its longest ending that begins one can go on.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt.decode.lm._arpa import LARGEST
from jax_rnnt.decode.lm._automaton import Arcs, Automaton, Tour, Trie, follow, score_rows


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class Phrases(Automaton):
    """Phrases that `greedy` and `beam` should find more often: names, places, commands.

    As a model of fusion it gives a sequence of labels two sums, in nats:

    * for every place where a whole phrase occurs, weight times length of the phrase. Phrases may overlap and contain
      others. Equal ones of a list count once, with the largest of their weights.
    * for the match in progress, weight times length of what is matched: of the longest end of the sequence that begins
      a phrase and is shorter than it. Of several such phrases the largest weight counts. A match that breaks gives it
      back, and so does `final`; what a shorter match has earned it keeps.

    So the score of a finished sequence is the first sum. With `depth`, labels earn more the longer the match is. In
    both sums, n labels of a phrase of weight w then earn, in place of n w, ::

        w + sum over k = 2 ... n of (w (1 + depth) + ln k)

    so a long match is hard to leave, and a first label costs little where nothing follows it.

    A state is one integer, the match in progress: hypotheses with equal states share their rows. It is a pytree of
    arrays, whose shapes depend on `classes`, `size` and the number of utterances alone: as an argument of a jitted
    function, new lists compile nothing. A match in progress belongs to its list: give an utterance of a stream another
    list only where it begins.

    Parameters
    ----------
    phrases : sequence
        Phrases as sequences of labels, for all utterances; or one such list for each utterance of the batch. ``[]`` is
        a list without phrases.
    weights : float or sequence, default 1.0
        Nats for each label of a phrase: one number, or one for each phrase, in lists as `phrases`.
    classes : int
        V, the classes of the joint network without durations. V is also its `start`, the label that begins an
        utterance.
    size : int, optional
        Room for the phrases of an utterance, in labels; beginnings that phrases share count once. By default, what the
        largest list needs.
    depth : float, default 0.0
        How much more a label earns from the second one of a match on, 0 or more. NeMo's `depth_scaling` is 1 + depth.
    before : int, optional
        A label that comes before each phrase, such as the space between words, and earns nothing. So phrases begin only
        behind it, and at the start of an utterance. It takes room of `size`: one label for each list.

    Raises
    ------
    TypeError, ValueError
        A phrase without labels or with others than those of [0, V), weights beyond 1e30 or not one for each
        phrase, a `depth` below 0, a list beyond `size`. In a search: lists for another number of utterances than the
        batch has.

    References
    ----------
    Aho and Corasick, "Efficient String Matching: An Aid to Bibliographic Search", 1975.
    Andrusenko et al., "TurboBias: Universal ASR Context-Biasing Powered by GPU-Accelerated Phrase-Boosting Tree", 2025,
    arXiv:2508.07014: weights that grow with the depth.
    Zhao et al., "Shallow-Fusion End-to-End Contextual Biasing", Interspeech 2019: weights given back.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import decode
    >>> phrases = decode.Phrases([[1, 2], [1, 2, 3, 4]], weights=[1.0, 0.5], classes=5)
    >>> state, rows = phrases.initial(1), []
    >>> for label in (phrases.start, 1, 2, 3):
    ...     scores, state = phrases.step(state, jnp.array([label]))
    ...     rows.append(scores[0].tolist())
    >>> rows[0], rows[1]  # 1 begins both, with the larger weight; 12 is 2 for itself, and 1 on the way to 1234
    ([0.0, 1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 2.0, -1.0, -1.0])
    >>> rows[2], rows[3], phrases.final(state).tolist()
    ([-1.0, 0.0, -1.0, 0.5, -1.0], [-1.5, -0.5, -1.5, -1.5, 0.5], [-1.5])
    """

    tour: Tour
    most: jax.Array  # [lists]: the most that a phrase of each list earns, divided by its labels
    shared: bool = _pytree.static()
    before: int | None = _pytree.static()

    @keywords
    def __init__(
        self,
        phrases: Any,
        weights: Any = 1.0,
        *,
        classes: int,
        size: int | None = None,
        depth: float = 0.0,
        before: int | None = None,
    ):
        classes = _checks.positive("classes", classes)
        shared, lists = lists_of(phrases)
        flat = [phrase for phrases in lists for phrase in phrases]
        lengths = np.array([len(phrase) for phrase in flat], np.int64)
        if (lengths == 0).any():
            raise _checks.bad_value(f"phrases must have one label or more, got phrase {np.argmin(lengths)} without.")
        labels = _checks.integral("phrases", [*itertools.chain.from_iterable(flat)])
        if wrong := labels[(labels < 0) | (labels >= classes)][:5].tolist():
            raise _checks.bad_value(f"phrases must have labels in [0, {classes}), got {wrong}.")
        utterances = np.repeat(np.arange(len(lists)), [*map(len, lists)])
        weights = weights_of(weights, shared, lists)
        depth = depth_of(depth, weights)
        spelled: Any = labels
        if before is not None:
            before = _checks.integer("before", before)
            if not 0 <= before < classes:
                raise _checks.bad_value(f"before must be a label in [0, {classes}), got {before}.")
            spelled = np.insert(labels, np.cumsum(lengths) - lengths, before)
        tree = Tree(utterances, lengths, spelled, weights, len(lists), classes, depth, before is not None)
        size = None if size is None else _checks.positive("size", size)
        arcs, tour = tree.arcs(size)
        object.__setattr__(self, "arcs", arcs)
        object.__setattr__(self, "tour", tour)
        object.__setattr__(self, "most", jnp.asarray(most_of(lengths, weights, depth, utterances, len(lists))))
        object.__setattr__(self, "shared", shared)
        object.__setattr__(self, "before", before)

    def __repr__(self) -> str:
        lists = "one list" if self.shared else f"{self.utterances} lists"
        return f"Phrases({lists}, classes={self.start}, size={self.arcs.states})"

    @property
    def utterances(self) -> int | None:
        """The number of utterances B, where each one of the batch has its own list."""
        return None if self.shared else self.arcs.root_scores.shape[0]

    def initial(self, batch: int) -> jax.Array:
        """Returns int32 [batch]: no match. `batch` is a multiple of B, and rows of an utterance are consecutive."""
        return self.place(jnp.zeros((batch,), jnp.int32))

    def place(self, state: jax.Array) -> jax.Array:
        """Returns states [N] in the order of the batch, N a multiple of B, with the lists of the utterances there."""
        if self.shared:
            return state
        lists, size = self.arcs.root_scores.shape[0], self.arcs.states
        if state.shape[0] % lists:
            expected = "lists for the utterances of the batch, whose N rows are a multiple of theirs"
            raise ValueError(f"Phrases: phrases must be {expected}, got {lists} lists and N = {state.shape[0]}.")
        utterance = jnp.arange(state.shape[0], dtype=jnp.int32) // max(state.shape[0] // lists, 1)
        return state % size + utterance * size

    def step(self, state: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (scores float32 [N, V] of labels after one more label [N], states)."""
        labels = jnp.asarray(labels, jnp.int32)
        _, after = follow(self.arcs, state, jnp.clip(labels, 0, self.start - 1), tour=self.tour)
        after = jnp.where(labels == self.breaks, self.root(state), after)
        state = jnp.where(labels == self.start, self.begun(state), after)
        return score_rows(self.arcs, state, tour=self.tour), state

    breaks = -1  # the label with which `step` goes on with no phrase

    def most_a_label(self, state: jax.Array) -> jax.Array:
        """Returns the most [N] that a phrase of each state's list earns, divided by its labels."""
        return self.most[state // self.arcs.states]

    def root(self, state: jax.Array) -> jax.Array:
        """Returns states [N] with nothing matched."""
        return state - state % self.arcs.states

    def begun(self, state: jax.Array) -> jax.Array:
        """Returns states [N] at the start of an utterance: after the label `before`, if there is one."""
        root = self.root(state)
        return root if self.before is None else self.arcs.root_targets[root // self.arcs.states, self.before]

    def final(self, state: jax.Array) -> jax.Array:
        """Returns what an end adds [N]: it gives back what the match in progress has earned."""
        return follow(self.arcs, state, jnp.full_like(state, self.start), tour=self.tour)[0]


# ----------------------------------------------------------------------------------------------------- arguments


def is_list(x) -> bool:
    return isinstance(x, (list, tuple)) or (isinstance(x, np.ndarray) and x.ndim > 0)


def lists_of(phrases) -> tuple[bool, list]:
    """Returns (whether all utterances share one list, the lists)."""
    expected = "a list of phrases, which are lists of labels, or such a list for each utterance"
    wrong = [x for x in phrases if not is_list(x)] if is_list(phrases) else [phrases]
    if wrong:
        raise _checks.bad_type(f"phrases must be {expected}, got {wrong[0]!r}.")
    nested = [is_list(x) for item in phrases for x in item]
    if any(nested) and not all(nested):
        raise _checks.bad_type(f"phrases must be {expected}, got both.")
    # Nothing but empty lists are the lists of utterances, as phrases are not empty.
    shared = not all(nested) or len(phrases) == 0
    return shared, [phrases] if shared else [*phrases]


def weights_of(weights, shared: bool, lists) -> np.ndarray:
    """Returns the weights as float64 [P]."""
    count = sum(map(len, lists))
    if not is_list(weights):
        flat = [weights]
    else:
        nested = [weights] if shared else weights
        if not is_list(nested) or not all(map(is_list, nested)) or [*map(len, nested)] != [*map(len, lists)]:
            raise _checks.bad_value(f"weights must be a number, or one of each phrase as in phrases, got {weights!r}.")
        flat = [*itertools.chain.from_iterable(nested)]
    known = [_checks.known(_checks.scalar("weights", x)) for x in flat]
    if not all(x is not None and abs(x) <= LARGEST for x in known):
        raise _checks.bad_value(f"weights must be known, and at most {LARGEST:g} in size, got {weights!r}.")
    return np.array(known if is_list(weights) else known * count, np.float64)


def depth_of(depth, weights) -> float:
    known = _checks.known(_checks.scalar("depth", depth))
    if known is None or not 0 <= known <= LARGEST:
        raise _checks.bad_value(f"depth must be known, 0 or more, and at most {LARGEST:g}, got {depth!r}.")
    if (np.abs(weights) * (1 + known) > LARGEST).any():
        expected = f"so small that weights times 1 + depth are {LARGEST:g} at most"
        raise _checks.bad_value(f"depth must be {expected}, got {depth!r} beside {np.abs(weights).max():g}.")
    return float(known)


def earned(labels, weights, depth: float):
    """Returns float64 [n]: what `labels` [n] matched labels of phrases with these weights earn."""
    if depth == 0:
        return labels * weights
    logs = np.cumsum(np.log(np.arange(1, np.max(labels, initial=1) + 1)))  # logs of factorials
    later = np.maximum(labels - 1, 0)
    return labels * weights + later * depth * weights + logs[later]


def most_of(lengths, weights, depth: float, utterances, count: int):
    """Returns float32 [lists]: the most that a phrase of a list earns, divided by its labels; 0 where none earns."""
    most = np.zeros(count)
    np.maximum.at(most, utterances, earned(lengths, weights, depth) / lengths)
    return most.astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- trees


class Tree:
    """The trees of all utterances, built by `Trie`. Arrays are [nodes]."""

    def __init__(self, utterances, lengths, labels, weights, batch: int, classes: int, more: float, before: bool):
        """Takes the phrases one after another: `utterances`, `lengths`, `weights` [P], `labels` [sum of the lengths].

        `more` is `depth` of `Phrases`. With `before`, `lengths` leave out the first label of a phrase, which is free.
        """
        trie = Trie(lengths + before, labels, classes, utterances, batch)
        self.batch, self.classes, self.depths = batch, classes, trie.depths
        self.keys, self.parent, self.label = trie.keys, trie.parent, trie.symbol
        best, whole = np.full((2, trie.count), -math.inf)
        best[:batch] = 0
        for depth, (longer, nodes) in enumerate(trie.passed[1:], 1):  # what phrases that go on give here
            np.maximum.at(best, nodes, earned(depth - before, weights[longer], more))
        np.maximum.at(whole, trie.ends, earned(lengths, weights, more))
        self.link(np.where(np.isneginf(whole), 0, whole), best)

    def link(self, whole, best):
        """Finds suffixes by depth, and what nodes earn: `whole` as a phrase, `best` in progress."""
        count = len(whole)
        self.inner = np.arange(count) < self.batch
        self.inner[self.parent] = True
        self.progress = np.where(self.inner, best, 0)
        self.suffix = np.arange(count)
        self.earned = whole
        self.utterance = np.arange(count)
        for nodes in self.depths[1:]:
            parent, label = (x[nodes.start - self.batch : nodes.stop - self.batch] for x in (self.parent, self.label))
            self.utterance[nodes] = self.utterance[parent]
            self.suffix[nodes] = self.longest(parent, label)
            self.earned[nodes] += self.earned[self.suffix[nodes]]
        # Leaves have no children, so their suffix takes their place.
        self.state_of = np.arange(count)
        for nodes in self.depths[1:]:
            itself = np.arange(nodes.start, nodes.stop)
            self.state_of[nodes] = np.where(self.inner[nodes], itself, self.state_of[self.suffix[nodes]])

    def longest(self, parent, label):
        """Returns the suffixes of the children that these nodes have by a label."""
        suffix, at = parent.copy(), np.full(len(parent), -1)
        todo = np.flatnonzero(suffix >= self.batch)
        while len(todo):
            suffix[todo] = self.suffix[suffix[todo]]
            key = suffix[todo] * self.classes + label[todo]
            edge = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
            hit = self.keys[edge] == key
            at[todo[hit]] = self.batch + edge[hit]
            todo = todo[~hit & (suffix[todo] >= self.batch)]
        return np.where(at < 0, self.utterance[parent], at)

    def arcs(self, size: int | None) -> tuple[Arcs, Tour]:
        """Returns the automaton, with room for `size` nodes, roots apart, in each utterance, and its suffixes' tour."""
        batch, classes = self.batch, self.classes
        needed = np.bincount(self.utterance[batch:], minlength=batch)
        size = max(int(needed.max(initial=1)), 1) if size is None else size
        if (needed > size).any():
            many, place = needed.max(), f" of utterance {needed.argmax()}" if batch > 1 else ""
            raise _checks.bad_value(f"size must be {many} or more, as the phrases{place} need so much, got {size}.")
        up = self.state_of[self.suffix]
        state, below = self.tour_of_suffixes(up, size)
        state = state[self.state_of]

        child = np.arange(batch, len(state))
        score = self.earned[child] + self.progress[self.state_of[child]] - self.progress[self.parent]
        scores, targets = np.zeros((batch, classes + 1), np.float32), np.zeros((batch, classes + 1), np.int32)
        targets += size * np.arange(batch, dtype=np.int32)[:, None]
        top = self.parent < batch
        scores[self.parent[top], self.label[top]] = score[top]
        targets[self.parent[top], self.label[top]] = state[child[top]]

        deep = np.flatnonzero(~top)
        deep = deep[np.lexsort((self.label[deep], state[self.parent[deep]]))]
        slot = self.utterance[child[deep]] * size + ranks(self.utterance[child[deep]])
        columns = [np.full(batch * size, classes + 1, np.int32), np.zeros(batch * size, np.float32)]
        columns.append(np.zeros(batch * size, np.int32))
        for array, values in zip(columns, (self.label[deep], score[deep], state[child[deep]])):
            array[slot] = values
        number = np.bincount(state[self.parent[deep]], minlength=batch * size).reshape(batch, size)
        first = np.arange(batch)[:, None] * size + np.cumsum(number, 1) - number
        backoffs = np.zeros(batch * size, np.float32)
        suffixes = np.repeat(size * np.arange(batch, dtype=np.int32), size)  # to the root, even from what is no state
        inner = np.flatnonzero(self.inner)
        backoffs[state[inner]] = self.progress[up[inner]] - self.progress[inner]
        suffixes[state[inner]] = state[up[inner]]
        first = np.append(first.ravel(), batch * size).astype(np.int32)
        arcs = Arcs(*map(jnp.asarray, (scores, targets, first, *columns, backoffs, suffixes)))

        to_root = np.zeros(batch * size, np.float32)
        to_root[state[inner]] = -self.progress[inner]
        return arcs, self.tour(deep, slot, state, below, to_root)

    def tour_of_suffixes(self, up, size: int):
        """Returns (numbers of states, how many states each has below it, with itself) by node; `up` are suffixes."""
        below = self.inner.astype(np.int64)
        levels = [np.arange(x.start, x.stop)[self.inner[x]] for x in self.depths[1:]]
        for nodes in reversed(levels):
            np.add.at(below, up[nodes], below[nodes])
        nodes = np.concatenate([np.zeros(0, np.int64), *levels])
        nodes = nodes[np.argsort(up[nodes], kind="stable")]
        before = np.cumsum(below[nodes]) - below[nodes]
        state = np.zeros(len(up), np.int64)
        state[: self.batch] = size * np.arange(self.batch)
        # A state comes behind its suffix, and behind the states below those with this suffix that come before it.
        behind = np.zeros(len(up), np.int64)
        behind[nodes] = 1 + before - before[np.searchsorted(up[nodes], up[nodes])]
        for nodes in levels:
            state[nodes] = state[up[nodes]] + behind[nodes]
        return state, below

    def tour(self, deep, slot, state, below, to_root) -> Tour:
        """Returns the tour: where arcs of the edges `deep`, which have these slots, begin and cease to serve states."""
        columns, node, parent = self.classes + 2, self.batch + deep, self.parent[deep]
        slot_of = np.full(len(state), -1)
        slot_of[node] = slot
        # At its end, an arc leaves its states to the arc of the longest suffix that has one. Of several ends at one
        # place, the last is that of the shortest context; a beginning comes after them.
        begin, longer = state[parent], slot_of[self.suffix[node]]
        places = np.concatenate([begin + below[parent], begin])
        key = np.tile(self.utterance[node] * columns + self.label[deep], 2)
        order = np.lexsort((np.concatenate([-begin, 0 * begin + 1]), places, key))
        key, places, arcs = key[order], places[order], np.concatenate([longer, slot])[order]
        last = np.append((key[1:] != key[:-1]) | (places[1:] != places[:-1]), True)[: len(key)]
        key, places, arcs = key[last], places[last], arcs[last]
        source = np.zeros(len(to_root), np.int64)
        source[slot] = begin
        paid = np.where(arcs < 0, 0, to_root[source[arcs]])
        fields = [
            np.full(2 * len(to_root), x, kind) for x, kind in ((2**31 - 1, np.int32), (-1, np.int32), (0, np.float32))
        ]
        for field, values in zip(fields, (places, arcs, paid)):
            field[: len(key)] = values
        first = np.searchsorted(key, np.arange(self.batch * columns)).reshape(self.batch, columns).astype(np.int32)
        return Tour(*map(jnp.asarray, (first, *fields, to_root)))


def ranks(groups):
    """Returns the place of each entry in its group, for groups [n] in any order."""
    order = np.argsort(groups, kind="stable")
    starts = np.cumsum(np.bincount(groups)) - np.bincount(groups) if len(groups) else groups
    places = np.empty(len(groups), np.int64)
    places[order] = np.arange(len(groups)) - starts[groups[order]]
    return places
