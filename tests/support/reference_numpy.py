"""The truth that every test compares with, in float64 NumPy, written without the library.

It has three parts. `enumerate_paths` and `enumerate_prefixes` write out every path of a tiny lattice. `log_likelihood`,
`posteriors` and `label_log_probs` are a dynamic program over the same arcs, fast enough for T + U = 4000. The emissions
turn logits into arc scores, and arc gradients into logit gradients. Each part works on one sequence, cut to its own
lengths, so that padding cannot enter. `loss_and_gradient` loops over a batch and applies the rules for whole sequences.

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

NEG = -np.inf


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
                for rest in extend(to_t, to_u):
                    yield ((arc.slot, t, u), *rest)

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
                for rest in extend(to_t, to_u):
                    yield ((arc.slot, t, u), *rest)

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


# ---------------------------------------------------------------------------------------------------- emissions
# An emission maps (logits [T, U1, V], labels [U1] with -1 for "no label", options) to arc scores by slot and a pullback
# from arc gradients to logit gradients.


def fractions_of(x):
    """Python fractions of the finite elements; infinities stay floats."""
    x = np.asarray(x, np.float64)
    exact = [fractions.Fraction(float(v)) if np.isfinite(v) else float(v) for v in x.ravel()]
    return np.array([*exact, None], object)[:-1].reshape(x.shape)  # None keeps an empty array of objects


def _is_exact(x):
    return np.asarray(x).dtype == object


def _numbers(x):
    return x if _is_exact(x) else np.asarray(x, np.float64)


def _nearest(x):
    try:
        return float(x)
    except OverflowError:
        return np.inf if x > 0 else NEG


def as_float(x):
    """Floats or fractions as float64; values beyond float64 become infinite."""
    if not _is_exact(x):
        return np.asarray(x, np.float64)
    return np.array([_nearest(v) for v in np.ravel(x)], np.float64).reshape(np.shape(x))


def log_softmax(x):
    """log softmax over the last axis; a row of -inf stays -inf, NaN and +inf give NaN. Fractions stay fractions."""
    x = _numbers(x)
    top = x.max(-1, keepdims=True)
    dead = top == NEG
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.where(dead, NEG, x - np.where(dead, 0, top))
        log_total = np.where(dead, 0, np.log(np.exp(as_float(below)).sum(-1, keepdims=True)))
        return below - (fractions_of(log_total) if _is_exact(x) else log_total)


class _Head:
    """One softmax over a group of classes: log-probs of chosen classes, and the pullback to the logits."""

    def __init__(self, logits, fused):
        self.fused = fused
        self.log_probs = log_softmax(logits) if fused else _numbers(logits)
        self.gradient = np.zeros(self.log_probs.shape)

    def __getitem__(self, classes):
        """The score of class `classes[u]` at every node (t, u); -inf for a negative class."""
        classes = np.broadcast_to(classes, self.log_probs.shape[1:2])
        picked = self.log_probs[:, np.arange(len(classes)), np.maximum(classes, 0)]
        return np.where(classes < 0, NEG, picked)

    def add(self, classes, arc_gradient):
        classes = np.broadcast_to(classes, self.log_probs.shape[1:2])
        for u, k in enumerate(classes):
            if k >= 0:
                self.gradient[:, u, k] += arc_gradient[:, u]

    def pull(self):
        if not self.fused:
            return self.gradient
        return self.gradient - np.exp(as_float(self.log_probs)) * self.gradient.sum(-1, keepdims=True)


def softmax_emission(logits, labels, *, blank, fused=True, blanks=None):
    """One softmax; `blanks` maps further blank slots to classes (multi-blank)."""
    head = _Head(logits, fused)
    columns = {"blank": blank, "label": labels, **(blanks or {})}
    arcs = {slot: head[classes] for slot, classes in columns.items()}

    def pullback(gradients):
        for slot, classes in columns.items():
            head.add(classes, gradients[slot])
        return head.pull()

    return arcs, pullback


def constrained_emission(logits, labels, *, blank, fused=True):
    """k2's constrained RNN-T: a label arc also pays the blank of the node that it leads to, in the same frame.

    "label alone" does not.
    """
    head = _Head(logits, fused)
    blanks = head[blank]
    after = np.full_like(blanks, NEG)
    after[:, :-1] = blanks[:, 1:]

    def pullback(gradients):
        head.add(labels, gradients["label"])
        head.add(blank, gradients["blank"])
        moved = np.zeros(blanks.shape)
        moved[:, 1:] = gradients["label"][:, :-1]
        head.add(blank, moved)
        return head.pull()

    return {"blank": blanks, "label": head[labels] + after, "label alone": head[labels]}, pullback


def multi_blank_emission(logits, labels, *, blank, durations, fused=True, sigma=0):
    """Big blank i is class blank - 1 - i and reads durations[i] frames; every arc pays sigma."""
    big = {f"blank+{d}": blank - 1 - i for i, d in enumerate(durations)}
    arcs, pullback = softmax_emission(logits, labels, blank=blank, fused=fused, blanks=big)
    return {slot: arc - sigma for slot, arc in arcs.items()}, pullback


def duration_emission(logits, labels, *, blank, durations, fused=True, sigma=0):
    """Token and duration heads in one tensor, durations last (TDT)."""
    split = logits.shape[-1] - len(durations)
    tokens, lengths = _Head(logits[..., :split], fused), _Head(logits[..., split:], fused)
    arcs = {}
    for i, d in enumerate(durations):
        if d:
            arcs[f"blank+{d}"] = tokens[blank] - sigma + lengths[i]
        arcs[f"label+{d}"] = tokens[labels] - sigma + lengths[i]

    def pullback(gradients):
        for i, d in enumerate(durations):
            for name, classes in (("blank", blank), ("label", labels)):
                if f"{name}+{d}" in gradients:
                    tokens.add(classes, gradients[f"{name}+{d}"])
                    lengths.add(i, gradients[f"{name}+{d}"])
        return np.concatenate([tokens.pull(), lengths.pull()], -1)

    return arcs, pullback


def _log_sigmoid(x):
    rest = np.log1p(np.exp(-np.abs(as_float(x))))
    return np.minimum(x, 0) - (fractions_of(rest) if _is_exact(x) else rest)


def hat_emission(logits, labels, *, blank, fused=True):
    """A Bernoulli blank, and a softmax over the other classes. A label equal to the blank class is a blank."""
    if not fused:
        return softmax_emission(logits, labels, blank=blank, fused=False)
    bernoulli = _numbers(logits[..., blank])
    rest = _Head(np.delete(logits, blank, -1), True)
    place = np.where(labels > blank, labels - 1, labels)  # class among the others
    place = np.where((labels == blank) | (labels < 0), -1, place)
    blanks = np.where(bernoulli == np.inf, np.nan, _log_sigmoid(bernoulli))
    blanks = np.where((rest.log_probs != rest.log_probs).any(-1), np.nan, blanks)  # NaN; fractions have no isnan
    arcs = {"blank": blanks, "label": np.where(labels == blank, blanks, rest[place] + _log_sigmoid(-bernoulli))}

    def pullback(gradients):
        to_blank = gradients["blank"] + np.where(labels == blank, gradients["label"], 0.0)
        to_label = np.where(labels == blank, 0.0, gradients["label"])
        rest.add(place, to_label)
        blank_probability = np.exp(_log_sigmoid(as_float(bernoulli)))
        own = to_blank * np.exp(_log_sigmoid(-as_float(bernoulli))) - to_label * blank_probability
        return np.insert(rest.pull(), blank, own, -1)

    return arcs, pullback


def target_robust_emission(logits, labels, *, blank, fused=True, skip_frame=NEG, skip_label=NEG):
    """A blank also has the weight of a skipped frame, except in the last one; a label that of all other labels."""
    arcs, pullback = softmax_emission(logits, labels, blank=blank, fused=fused)
    p, q = as_float(arcs["blank"]), as_float(arcs["label"])
    with np.errstate(divide="ignore", invalid="ignore"):
        complement = lambda x: np.log(-np.expm1(np.minimum(x, 0)))
        frame = np.where((np.arange(len(p)) < len(p) - 1)[:, None], skip_frame, NEG)
        blanks, rest = np.logaddexp(p, frame), np.maximum(complement(p), q)  # the label and all others
        parts = complement(skip_label) + np.where(rest == NEG, 0, q - rest), skip_label
        more = np.logaddexp(*parts)

    def pull(gradients):
        share = lambda x, y: np.where((x == NEG) | (y == NEG), 0, np.exp(np.minimum(x - y, 700)))
        with np.errstate(invalid="ignore"):
            kept, mixed = (share(part, more) * gradients["label"] for part in parts)
            others = rest > q
            to_blank = gradients["blank"] * share(p, blanks) - np.where(others, mixed * share(p, rest), 0)
        return pullback({"blank": to_blank, "label": kept + np.where(others, 0, mixed)})

    exact = fractions_of if _is_exact(logits) else np.asarray
    there = (p != NEG) | (q != NEG)
    label = np.where(rest > q, exact(rest), arcs["label"]) + exact(more)
    return {"blank": np.where(there, exact(blanks), NEG), "label": np.where(there, label, NEG)}, pull


def _ways(blanks, skip):
    """(a(t + 1) / a(t) for blanks [T], where a(t + 1) = a(t) exp(blank) + exp(skip), a(0) = 1; pullback)."""
    reached, ratios = 0.0, np.zeros(len(blanks))
    shares = np.zeros((2, len(blanks)))  # of the blank and of the skip in each ratio
    for t, blank in enumerate(blanks):
        parts = np.array([blank, skip - reached if skip > NEG else NEG])
        with np.errstate(invalid="ignore"):  # NaN
            ratios[t] = np.logaddexp(*parts)
            shares[:, t] = np.exp(parts - ratios[t]) if ratios[t] > NEG else 0
        reached += ratios[t]

    def pullback(gradient):
        out, of_reached = np.zeros(len(blanks)), 0.0
        for t in reversed(range(len(blanks))):
            total = gradient[t] + of_reached
            out[t] = total * shares[0, t]
            of_reached -= total * shares[1, t]
        return out

    return ratios, pullback


def wildcard_emission(logits, labels, *, blank, fused=True, skip_start=NEG, skip_end=NEG):
    """Products of blanks are sums over all ways to pass frames: in the first column from the first frame on, in the
    last column back from the last one, which itself stays. test_wildcard.py enumerates the skips.
    """
    arcs, softmax_pullback = softmax_emission(logits, labels, blank=blank, fused=fused)
    blanks, pulls = arcs["blank"], []
    exact = fractions_of if _is_exact(logits) else np.asarray
    for places, skip in (((slice(-2, None, -1), -1), skip_end), ((slice(None, -1), 0), skip_start)):
        blanks = blanks.copy()
        ratios, pull = _ways(as_float(blanks[places]), skip)
        blanks[places] = exact(ratios)
        pulls.append((places, pull))

    def pullback(gradients):
        to_blank = gradients["blank"].copy()
        for places, pull in reversed(pulls):
            to_blank[places] = pull(to_blank[places])
        return softmax_pullback({**gradients, "blank": to_blank})

    return {**arcs, "blank": blanks}, pullback


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
        arcs[slot] = arcs[slot] + (fractions_of(bonus) if _is_exact(logits) else bonus)
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
        return _nearest(-self.value)


_cached_paths = functools.cache(lambda *lattice: tuple(enumerate_paths(*lattice)))


def solve(logits, labels, **options):
    """The `Solution` of logits [T, U1, V] and labels [U], without padding. `options` are of `lattice`."""
    if "sigma" in options:
        options["sigma"] = fractions.Fraction(float(options["sigma"]))
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


def every_length(max_frames, max_labels):
    """All (T, U) up to these sizes, zero included."""
    return list(itertools.product(range(max_frames + 1), range(max_labels + 1)))
