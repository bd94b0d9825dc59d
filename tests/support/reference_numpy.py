"""The truth that every test compares with, in float64 NumPy, written without the library.

It has three parts. `enumerate_paths` and `enumerate_prefixes` write out every path of a tiny lattice. `log_likelihood`,
`posteriors` and `label_log_probs` are a dynamic program over the same arcs, fast enough for T + U = 4000. The emissions
of `reference_emissions.py` turn logits into arc scores, and arc gradients into logit gradients. Each part works on one
sequence, cut to its own lengths, so that padding cannot enter. `loss_and_gradient` loops over a batch and applies the
rules for whole sequences.

In float64, sums with a mask of -1e30 lose small scores. So `solve` enumerates paths of a tiny lattice with Python
fractions: emissions accept `fractions_of(logits)`, and then no sum is rounded.

Legend: T frames, U labels, U1 = U + 1, V classes. Node (t, u): t frames read, u labels written. Every path runs from
(0, 0) to the terminal node (T, U); only that node has t = T.
"""

import dataclasses
import fractions
import functools
import itertools
import math

import numpy as np

from reference_emissions import NEG, fractions_of, is_exact, nearest, softmax_emission
from reference_emissions import as_float as as_float
from reference_emissions import log_softmax as log_softmax


@dataclasses.dataclass(frozen=True)
class Arc:
    """A step out of node (t, u) to (t + dt, u + du), scored by the arc array called `slot`."""

    slot: str
    dt: int
    du: int
    may_end: bool = True


STANDARD = (Arc("blank", 1, 0), Arc("label", 0, 1))
MONOTONIC = (Arc("blank", 1, 0), Arc("label", 1, 1))
MONOTONIC_FINAL_BLANK = (Arc("blank", 1, 0), Arc("label", 1, 1, may_end=False))


def multi_blank(durations):
    """Standard arcs and one blank arc that skips d frames for each big blank."""
    return STANDARD + tuple(Arc(f"blank+{d}", d, 0) for d in durations)


def token_durations(durations):
    """Token-and-duration (TDT) arcs: every token with every duration, the last one a blank."""
    blanks = tuple(Arc(f"blank+{d}", d, 0) for d in durations if d)
    return blanks + tuple(Arc(f"label+{d}", d, 1, may_end=False) for d in durations)


# ------------------------------------------------------------------------------------------------- enumeration
def enumerate_paths(topology, num_frames, num_labels):
    """Every path from (0, 0) to (T, U) as a tuple of (slot, t, u)."""

    def extend(t, u):
        if (t, u) == (num_frames, num_labels):
            yield ()
            return
        if t == num_frames:  # no frame left: nothing leaves from here
            return
        for arc in topology:
            to_t, to_u = t + arc.dt, u + arc.du
            ends = (to_t, to_u) == (num_frames, num_labels) and arc.may_end
            if ends or (to_t < num_frames and to_u <= num_labels):
                for further in extend(to_t, to_u):
                    yield ((arc.slot, t, u), *further)

    return list(extend(0, 0))


def enumerate_prefixes(topology, num_frames, num_labels, label):
    """Every path from (0, 0) to the arc that writes label 1 <= `label` <= U, as a tuple of (slot, t, u).

    This arc may lead to frame T if it may end a path.
    """

    def extend(t, u):
        for arc in topology:
            to_t, to_u = t + arc.dt, u + arc.du
            if to_u >= label:
                if to_u <= num_labels and (to_t < num_frames or (to_t == num_frames and arc.may_end)):
                    yield ((arc.slot, t, u),)
            elif to_t < num_frames:
                for further in extend(to_t, to_u):
                    yield ((arc.slot, t, u), *further)

    return list(extend(0, 0)) if num_frames else []


def alone(slot, arcs):
    """The slot of the same arc without what must follow its label, if there is one."""
    return f"{slot} alone" if f"{slot} alone" in arcs else slot


def sum_of_prefixes(topology, arcs, num_frames, num_labels, label):
    """The log of the summed weight of `enumerate_prefixes`."""
    paths = enumerate_prefixes(topology, num_frames, num_labels, label)
    return sum_of_paths([(*path[:-1], (alone(path[-1][0], arcs), *path[-1][1:])) for path in paths], arcs)[1]


def sum_of_paths(paths, arcs):
    """(scores of the paths, log of their summed weight, posterior of each arc); exact sums for Python fractions."""
    scores = [sum(arcs[slot][t, u] for slot, t, u in path) for path in paths]
    best = max(scores, default=NEG)
    posteriors = {slot: np.zeros(np.shape(score)) for slot, score in arcs.items()}
    if best == NEG:
        return scores, NEG, posteriors
    weights = [math.exp(max(score - best, -1000)) for score in scores]
    total = math.fsum(weights)
    for path, weight in zip(paths, weights, strict=True):
        for slot, t, u in path:
            posteriors[slot][t, u] += weight / total
    more = math.log(total)
    return scores, best + (fractions.Fraction(more) if isinstance(best, fractions.Fraction) else more), posteriors


# ------------------------------------------------------------------------------------------ dynamic programming
def log_likelihood(topology, arcs, num_frames, num_labels):
    """The log of the sum of all path weights; -inf if there is no path."""
    return posteriors(topology, arcs, num_frames, num_labels)[0]


def _alpha_beta(topology, arcs, num_frames, num_labels):
    """(alpha, beta, scores of each arc, t, u), each [T + U1, U1], computed diagonal by diagonal.

    Row n and column u hold the node (t, u) with t + u = n, so an arc leads from (n, u) to (n + dt + du, u + du).
    """
    T, U1 = num_frames, num_labels + 1
    u = np.broadcast_to(np.arange(U1), (T + U1, U1))
    t = np.arange(T + U1)[:, None] - u
    scores = {}
    for arc in topology:
        to_t, to_u = t + arc.dt, u + arc.du
        ends = (to_t == T) & (to_u == num_labels) & arc.may_end
        allowed = (t >= 0) & (t < T) & ((to_t < T) | ends) & (to_u <= num_labels)
        scores[arc] = np.full(t.shape, NEG)
        scores[arc][allowed] = np.asarray(arcs[arc.slot], np.float64)[t[allowed], u[allowed]]
    alpha, beta = np.full(t.shape, NEG), np.full(t.shape, NEG)
    alpha[0, 0], beta[-1, -1] = 0.0, 0.0
    with np.errstate(invalid="ignore"):  # NumPy gives -inf for two -inf
        for n in range(T + U1):
            for arc, score in scores.items():
                if (m := n - arc.dt - arc.du) >= 0:
                    came = alpha[m, : U1 - arc.du] + score[m, : U1 - arc.du]
                    alpha[n, arc.du :] = np.logaddexp(alpha[n, arc.du :], came)
        for n in reversed(range(T + U1)):
            for arc, score in scores.items():
                if (m := n + arc.dt + arc.du) < T + U1:
                    goes = score[n, : U1 - arc.du] + beta[m, arc.du :]
                    beta[n, : U1 - arc.du] = np.logaddexp(beta[n, : U1 - arc.du], goes)
    return alpha, beta, scores, t, u


def posteriors(topology, arcs, num_frames, num_labels):
    """(log-likelihood, slot -> posterior [T, U1] of each arc); posteriors are 0 if no path exists."""
    out = {slot: np.zeros((num_frames, num_labels + 1)) for slot in arcs}
    if num_frames == 0:
        return (0.0 if num_labels == 0 else NEG), out
    alpha, beta, scores, t, u = _alpha_beta(topology, arcs, num_frames, num_labels)
    value, inside = alpha[-1, -1], (t >= 0) & (t < num_frames)
    if value == NEG or np.isnan(value):
        return value, out
    for arc, score in scores.items():
        step, after = arc.dt + arc.du, np.full(beta.shape, NEG)
        after[: max(len(beta) - step, 0), : num_labels + 1 - arc.du] = beta[step:, arc.du :]
        out[arc.slot][t[inside], u[inside]] = np.exp(alpha + score + after - value)[inside]
    return value, out


def label_log_probs(topology, arcs, num_frames, num_labels):
    """log P(label u | those before it), [U], on arcs that write one label at most; the last one is `alone`."""
    if num_frames == 0:
        return np.full(num_labels, NEG)
    alpha = _alpha_beta(topology, arcs, num_frames, num_labels)[0]
    t, prefixes = np.arange(num_frames), np.zeros(num_labels + 1)
    with np.errstate(invalid="ignore"):
        for u in range(num_labels):
            scores = [
                np.where(
                    t + arc.dt < num_frames + arc.may_end, alpha[t + u, u] + arcs[alone(arc.slot, arcs)][t, u], NEG
                )
                for arc in topology
                if arc.du
            ]
            prefixes[u + 1] = np.logaddexp.reduce(np.concatenate(scores))
        return np.where(prefixes[1:] == NEG, NEG, np.diff(prefixes))


def is_label(slot):
    """Whether FastEmit, windows and the delay penalty act on this arc."""
    return slot.startswith("label")


def by_kind(posteriors):
    """(of blanks, of labels): posteriors summed over durations."""
    zero = np.zeros(())
    return [sum((x for slot, x in posteriors.items() if is_label(slot) == kind), zero) for kind in (False, True)]


# -------------------------------------------------------------------------------------------------------- losses
def lattice(
    logits,
    labels,
    *,
    topology=STANDARD,
    emission=softmax_emission,
    extra_classes=0,
    blank=-1,
    fused_log_softmax=True,
    delay_penalty=0.0,
    windows=None,
    **emission_options,
):
    """(topology, arc scores by slot [T, U1], pullback) of one sequence: logits [T, U1, V], labels [U]."""
    frames, columns, classes = logits.shape
    blank, classes_of_nodes = blank % (classes - extra_classes), np.append(labels, -1).astype(int)
    arcs, pullback = emission(logits, classes_of_nodes, blank=blank, fused=fused_log_softmax, **emission_options)
    t = np.arange(frames)[:, None]
    bonus = delay_penalty * ((frames - 1) / 2 - t)
    for slot in filter(is_label, arcs):
        arcs[slot] = arcs[slot] + (fractions_of(bonus) if is_exact(logits) else bonus)
        if windows is not None:
            first, last = np.asarray(windows, int).reshape(columns - 1, 2).T
            arcs[slot][:, :-1] = np.where((t >= first) & (t <= last), arcs[slot][:, :-1], NEG)
    return topology, arcs, pullback


def loss_and_gradient(
    logits,
    targets,
    logit_lengths,
    target_lengths,
    *,
    extra_classes=0,
    clamp=-1.0,
    fastemit_lambda=0.0,
    label_windows=None,
    **options,
):
    """Loss `[B]` and the gradient of each loss with respect to its own logits `[B, T, U1, V]`, float64.

    The gradient is the per-sequence one with unit cotangent, FastEmit and clamp applied. `options` are of `lattice`.
    """
    logits, targets = np.asarray(logits), np.asarray(targets)
    B, T, U1, classes = logits.shape
    losses, gradient = np.zeros(B), np.zeros(logits.shape)
    for b in range(B):
        n, m = int(logit_lengths[b]), int(target_lengths[b])
        labels = targets[b, : max(m, 0)]
        bad = (labels < 0) | (labels >= classes - extra_classes)
        if not (0 <= n <= T and 0 <= m < U1) or bad.any():
            losses[b] = np.nan
            continue
        x = np.asarray(logits[b, :n, : m + 1], np.float64)
        windows = None if label_windows is None else label_windows[b, :m]
        topology, arcs, pullback = lattice(x, labels, extra_classes=extra_classes, windows=windows, **options)
        value, posterior = posteriors(topology, arcs, n, m)
        losses[b] = -value
        if np.isnan(value) or value == NEG:
            gradient[b, :n, : m + 1] = np.nan if np.isnan(value) else 0
            continue
        scale = {slot: 1 + fastemit_lambda if is_label(slot) else 1.0 for slot in posterior}
        inside = pullback({slot: -scale[slot] * p for slot, p in posterior.items()})
        gradient[b, :n, : m + 1] = np.clip(inside, -clamp, clamp) if clamp > 0 else inside
    return losses, gradient


@dataclasses.dataclass(frozen=True)
class Solution:
    """The answer for one sequence, path by path, without rounded sums."""

    paths: tuple  # of (slot, t, u)
    scores: list  # of the paths: fractions, or -inf
    arcs: dict  # slot -> scores [T, U1]
    value: object  # the log-likelihood: a fraction, or -inf
    posteriors: dict  # slot -> [T, U1]
    gradient: np.ndarray  # of the loss, [T, U1, V]

    @property
    def loss(self):
        return nearest(-self.value)


_cached_paths = functools.cache(lambda *lattice: tuple(enumerate_paths(*lattice)))


def solve(logits, labels, **options):
    """The `Solution` of logits [T, U1, V] and labels [U], without padding. `options` are of `lattice`."""
    topology, arcs, pullback = lattice(fractions_of(logits), labels, **options)
    frames, columns, _ = logits.shape
    paths = _cached_paths(topology, frames, columns - 1)
    scores, value, posteriors = sum_of_paths(paths, arcs)
    gradient = pullback({slot: -x for slot, x in posteriors.items()}) if value != NEG else np.zeros(logits.shape)
    return Solution(paths, scores, arcs, value, posteriors, gradient)


def reduce(losses, target_lengths, reduction):
    """(reduced value, weight of each loss in it)."""
    losses, lengths = np.asarray(losses), np.asarray(target_lengths)
    weights = {
        "none": np.ones(losses.shape),
        "sum": np.ones(losses.shape),
        "mean": np.full(losses.shape, 1 / max(losses.size, 1)),
        "mean_target": 1 / np.maximum(lengths, 1) / max(losses.size, 1),
        "mean_volume": np.full(losses.shape, 1 / max(lengths.sum(), 1)),
    }[reduction]
    return (losses if reduction == "none" else (losses * weights).sum()), weights


def uniform_loss(num_frames, num_labels, num_classes):
    """Closed form for equal logits: there are C(T - 1 + U, U) paths of weight V ** -(T + U)."""
    count = math.comb(num_frames - 1 + num_labels, num_labels)
    return (num_frames + num_labels) * math.log(num_classes) - math.log(count)


def edit_distance(a, b):
    """Of two sequences, by the recursion over their first labels."""
    if not a or not b:
        return len(a) + len(b)
    return min(edit_distance(a[1:], b) + 1, edit_distance(a, b[1:]) + 1, edit_distance(a[1:], b[1:]) + (a[0] != b[0]))


def every_length(max_frames, max_labels):
    """All (T, U) up to these sizes, zero included."""
    return list(itertools.product(range(max_frames + 1), range(max_labels + 1)))
