"""Automata with backoff as arrays, for `NGram` and `Phrases`: scores of all next labels, and the state after one.

There are N rows, V labels, R roots, S states and A arcs. A label follows the state's arc for it, else that of the
state's suffix, and so on; the arcs of a root are dense rows. The last column V, no label, is the end of an utterance.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt.decode._gather import rows_at

CHUNK = 512  # arcs that are put at once into a few rows; into many rows, 8 times as many


class Arcs(typing.NamedTuple):
    """Arcs of an automaton. The S / R states of a root are consecutive, the root first. Suffixes lead to the root."""

    root_scores: jax.Array  # [R, V + 1]
    root_targets: jax.Array  # [R, V + 1]: target states
    first: jax.Array  # [S + 1]: the first arc of each state, which ends at that of the next one; roots have none
    labels: jax.Array  # [A]: ascending within a state; above V where there is no arc
    scores: jax.Array  # [A]
    targets: jax.Array  # [A]: target states
    backoffs: jax.Array  # [S]: what is added to the scores of the suffix; 0 for roots
    suffixes: jax.Array  # [S]: the suffix of each state; a root's is itself

    @property
    def states(self) -> int:
        """The number of states of one root."""
        return self.suffixes.shape[0] // self.root_scores.shape[0]


class Tour(typing.NamedTuple):
    """The arcs of a label and the states that they serve, numbered by a tour of the tree of suffixes, parents first.

    An arc serves its state and all states below it, whose numbers follow, except those below a longer context with such
    an arc. So the arcs of one label are a function of the state that changes at twice as many places as there are arcs.
    """

    first: jax.Array  # [R, V + 2]: the first of these places for each label, which ends at that of the next one
    states: jax.Array  # [2 A]: the state where each change takes place, ascending for each label
    arcs: jax.Array  # [2 A]: the arc from there on; -1 for that of the root
    paid: jax.Array  # [2 A]: `to_root` of the arc's state; 0 for the root
    to_root: jax.Array  # [S]: what backing off to the root adds


def one_root(scores, targets, arcs, backoffs, suffixes) -> Arcs:
    """Returns the states of one root, with its row of scores and targets [V + 1].

    `arcs` has (states, labels, scores, targets) [A], ascending by state and label.
    """
    one = [np.full(1, x) for x in (len(backoffs), len(scores) + 1, 0, 0)]  # so that there is an arc; no state has it
    state, *fields = (np.concatenate(x) for x in zip(arcs, one))
    first = np.searchsorted(state, np.arange(len(backoffs) + 1))
    types = np.float32, np.int32, np.int32, np.int32, np.float32, np.int32, np.float32, np.int32
    fields = [scores[None], targets[None], first, *fields, backoffs, suffixes]
    return Arcs(*(jnp.asarray(x.astype(dtype)) for x, dtype in zip(fields, types)))


class Trie:
    """Trees of sequences of symbols. Nodes are numbered by depth, roots first; edge i leads to node R + i."""

    def __init__(self, lengths, symbols, kinds: int, trees=0, roots: int = 1):
        """Takes the sequences one after another: `symbols` below `kinds`, and each one's tree, below `roots`."""
        offset = np.cumsum(lengths) - lengths
        node, self.count = np.zeros(len(lengths), np.int64) + trees, roots
        keys, self.depths, self.passed = [np.zeros(0, np.int64)], [slice(0, roots)], []
        for depth in range(int(lengths.max(initial=0))):
            longer = np.flatnonzero(lengths > depth)
            self.passed.append((longer, node[longer]))  # sequences that go on behind this depth, and their nodes
            key, place = np.unique(node[longer] * kinds + symbols[offset[longer] + depth], return_inverse=True)
            node[longer] = self.count + place.ravel()
            keys.append(key)
            self.depths.append(slice(self.count, self.count + len(key)))
            self.count += len(key)
        self.ends = node  # the last node of each sequence
        self.keys = np.concatenate(keys)  # ascending, as parents are
        self.parent, self.symbol = self.keys // kinds, self.keys % kinds


@dataclasses.dataclass(frozen=True, eq=False, init=False, repr=False)
class Automaton:
    """The common base of models of fusion that walk on arcs."""

    arcs: Arcs

    def __init__(self, *_, **__):
        kind = type(self).__name__
        raise TypeError(f"{kind}: a file makes one, not the class: {kind}.from_arpa(path, labels).")

    @property
    def start(self) -> int:
        """The label V, which begins an utterance."""
        return self.arcs.root_scores.shape[1] - 1

    @property
    def symbols(self) -> int:
        """V + 1, the number of labels that `step` takes."""
        return self.start + 1


def follow(arcs: Arcs, state, label, depth: int | None = None, tour: Tour | None = None):
    """Returns (scores, states) [...] after one label [...] from each state [...]; label V is the end.

    `depth` is the largest number of suffixes from a state to its root, if that is known before the program runs. With
    it, or with a `tour`, a GPU runs no loops, whose host would have to check after each turn whether there is another
    one.
    """

    def at_once(arcs, state, label):
        suffixes = _suffixes(arcs, state, depth)
        states = jnp.stack(suffixes[:-1])
        has_arc, at = _find(arcs, states, jnp.broadcast_to(label[None], states.shape), _by_blocks)
        found = jnp.where(has_arc, at, -1)
        return _taken(arcs, suffixes[-1], label, *_longest(arcs, suffixes, found))

    def by_tour(arcs, state, label):
        return _taken(arcs, state, label, *_toured(arcs, tour, state, label))

    state, label, *_ = _xla.vary_together(state, label, *arcs)
    on_gpu = by_tour if tour is not None else _follow if depth is None else at_once
    return jax.lax.platform_dependent(arcs, state, label, cuda=on_gpu, rocm=on_gpu, default=_follow)


def score_rows(arcs: Arcs, state, depth: int | None = None, tour: Tour | None = None):
    """Returns the scores of all labels [N, V] after each state [N]; `depth` and `tour` as for `follow`."""
    columns = arcs.root_scores.shape[1]

    def at_once(arcs, state):
        suffixes = _suffixes(arcs, state, depth)
        states = jnp.stack(suffixes[:-1])
        shape = *states.shape, columns  # a state has at most one arc for each label
        level, row, place = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
        arc = rows_at(arcs.first, states)[..., None] + place
        inside = arc < rows_at(arcs.first, states + 1)[..., None]
        arc = jnp.minimum(arc, arcs.labels.shape[0] - 1)
        labels = jnp.where(inside, rows_at(arcs.labels, arc), columns + place)
        found = (-1 - 0 * arc).at[level, row, labels].set(arc, mode="drop", unique_indices=True)
        label = place[0]
        suffixes = [jnp.broadcast_to(x[:, None], label.shape) for x in suffixes]
        return _taken(arcs, suffixes[-1], label, *_longest(arcs, suffixes, found))[0][:, :-1]

    def by_tour(arcs, state):
        shape = state.shape[0], columns - 1
        state, label = jnp.broadcast_to(state[:, None], shape), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        return _taken(arcs, state, label, *_toured(arcs, tour, state, label))[0]

    state, *_ = _xla.vary_together(state, *arcs)
    on_gpu = by_tour if tour is not None else _filled_rows if depth is None else at_once
    return jax.lax.platform_dependent(arcs, state, cuda=on_gpu, rocm=on_gpu, default=_filled_rows)


def _find(arcs, state, label, search):
    """Returns (whether a state [...] has an arc with the label [...], that arc)."""
    first, end = rows_at(arcs.first, state), rows_at(arcs.first, state + 1)
    at = search(arcs, first, end, label)
    arc = jnp.minimum(at, arcs.labels.shape[0] - 1)
    return (at < end) & (rows_at(arcs.labels, arc) == label), arc


def _is_below(arcs, arc, end, label):
    """Returns True where an arc comes before `end`, and its label before `label`."""
    return (arc < end) & (rows_at(arcs.labels, jnp.minimum(arc, arcs.labels.shape[0] - 1)) < label)


def _by_halves(arcs, first, end, label):
    """Returns the first arc from `first` to `end` [...] whose label is not below this one [...]."""
    halvings = arcs.root_scores.shape[1].bit_length()  # a state has at most one arc for each label

    def halve(i, at):
        after = at + (1 << halvings - 1) // (1 << i)
        return jnp.where(_is_below(arcs, after - 1, end, label), after, at)

    return jax.lax.fori_loop(0, halvings, halve, first)


def _by_blocks(arcs, first, end, label):
    """Finds the same by two sums, over first arcs of blocks and over arcs of one, which are two kernels on a GPU."""
    size = math.isqrt(arcs.root_scores.shape[1]) + 1
    places = jax.lax.broadcasted_iota(jnp.int32, (*label.shape, size), label.ndim)

    def number(first, step):
        below = _is_below(arcs, first[..., None] + step * places, end[..., None], label[..., None])
        return jnp.sum(below, -1, dtype=jnp.int32)

    first = first + size * jnp.maximum(number(first, size) - 1, 0)
    return first + number(first, 1)


def _follow(arcs, state, label):
    """Implements `follow` by a loop that ends where no row looks for an arc any more."""

    def back_off(carry):
        looking, state, added, arc = carry
        has_arc, at = _find(arcs, state, label, _by_halves)
        arc = jnp.where(looking & has_arc, at, arc)
        looking &= ~has_arc
        added = jnp.where(looking, added + rows_at(arcs.backoffs, state), added)
        state = jnp.where(looking, rows_at(arcs.suffixes, state), state)
        return looking & (state % arcs.states != 0), state, added, arc

    start = state % arcs.states != 0, state, (0 * state).astype(arcs.scores.dtype), -1 - 0 * state
    _, state, added, arc = jax.lax.while_loop(lambda carry: jnp.any(carry[0]), back_off, start)
    return _taken(arcs, state, label, added, arc)


def _suffixes(arcs, state, depth):
    """Returns the state [...] and its suffixes down to the root, at most `depth` of them; the root's is itself."""
    states = [state]
    for _ in range(max(depth, 1)):
        states.append(rows_at(arcs.suffixes, states[-1]))
    return states


def _longest(arcs, states, found):
    """Returns (what backing off adds, arc or -1) [...] for the longest context of the arcs `found` [depth, ...]."""
    added = [(0 * states[0]).astype(arcs.scores.dtype)]
    for state in states[:-1]:
        added.append(added[-1] + rows_at(arcs.backoffs, state))
    total, arc = added[-1], -1 - 0 * states[0]
    for i in reversed(range(len(states) - 1)):
        total, arc = jnp.where(found[i] >= 0, added[i], total), jnp.where(found[i] >= 0, found[i], arc)
    return total, arc


def _toured(arcs, tour, state, label):
    """Returns the same as `_longest` for a label [...] after each state [...], by the last place of the tour up to it.

    Two sums find it, as in `_by_blocks`; each halving would be a kernel of its own.
    """
    root, size = state // arcs.states, math.isqrt(2 * arcs.states) + 1  # an utterance has two places for each arc
    first, end = tour.first[root, label], tour.first[root, label + 1]
    places = jax.lax.broadcasted_iota(jnp.int32, (*label.shape, size), label.ndim)

    def number(first, step):
        at = first[..., None] + step * places
        begun = rows_at(tour.states, jnp.minimum(at, tour.states.shape[0] - 1)) <= state[..., None]
        return jnp.sum((at < end[..., None]) & begun, -1, dtype=jnp.int32)

    block = first + size * jnp.maximum(number(first, size) - 1, 0)
    at = block + number(block, 1)
    place, some = jnp.maximum(at - 1, 0), at > first
    paid = jnp.where(some, rows_at(tour.paid, place), 0)
    return rows_at(tour.to_root, state) - paid, jnp.where(some, rows_at(tour.arcs, place), -1)


def _taken(arcs, state, label, added, arc):
    """Returns (scores, states) after an arc, or where it is -1, after the arc of the state's root."""
    root, at = state // arcs.states, jnp.maximum(arc, 0)
    score = jnp.where(arc < 0, arcs.root_scores[root, label], rows_at(arcs.scores, at))
    return added + score, jnp.where(arc < 0, arcs.root_targets[root, label], rows_at(arcs.targets, at))


def _filled_rows(arcs: Arcs, state):
    """Computes `score_rows` in a time that grows with the number of the states' arcs.

    It goes from the longest context to the root: an arc fills its place unless a longer context has.
    """
    count, columns, dtype = state.shape[0], arcs.root_scores.shape[1], arcs.scores.dtype
    chunk = CHUNK if _checks.smaller(count, 32) else 8 * CHUNK
    beyond = count * columns

    def fill(carry):
        """Adds the arcs of these states, of all rows together, chunk by chunk."""
        scores, state, added = carry
        number = rows_at(arcs.first, state + 1) - rows_at(arcs.first, state)
        ends = jnp.cumsum(number, dtype=jnp.int32)
        to_arc = rows_at(arcs.first, state) - (ends - number)  # from a place among all these arcs to the arc

        def fill_chunk(carry):
            done, scores = carry
            # The row of an arc is the number of rows that end before it. A search takes twice as long as this sum.
            row_ends = jnp.zeros(chunk, jnp.int32).at[jnp.maximum(ends - done, 0)].add(1, mode="drop")
            row = jnp.cumsum(row_ends, dtype=jnp.int32)
            at = jnp.minimum(row, count - 1)
            arc = rows_at(to_arc, at) + done + jnp.arange(chunk, dtype=jnp.int32)
            arc = jnp.minimum(arc, arcs.labels.shape[0] - 1)
            label = rows_at(arcs.labels, arc)
            place = jnp.where((row < count) & (label < columns), row * columns + label, beyond)
            empty = scores.at[place].get(mode="fill", fill_value=0) == jnp.inf
            score = rows_at(added, at) + rows_at(arcs.scores, arc)
            return done + chunk, scores.at[jnp.where(empty, place, beyond)].set(score, mode="drop")

        total = jnp.sum(number, dtype=jnp.int32)
        _, scores = jax.lax.while_loop(lambda carry: carry[0] < total, fill_chunk, (0 * total, scores))
        return scores, rows_at(arcs.suffixes, state), added + rows_at(arcs.backoffs, state)

    zeros = (0 * state).astype(dtype)
    empty = jnp.broadcast_to(zeros[:, None] + jnp.inf, (count, columns)).astype(dtype)
    start = empty.reshape(beyond), state, zeros
    scores, state, added = jax.lax.while_loop(lambda carry: jnp.any(carry[1] % arcs.states != 0), fill, start)
    roots = rows_at(arcs.root_scores, state // arcs.states) + added[:, None]
    scores = scores.reshape(count, columns)
    return jnp.where(scores == jnp.inf, roots, scores)[:, :-1]
