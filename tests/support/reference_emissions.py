"""Emissions of the truth, in float64 NumPy or Python fractions: logits -> arc scores, and gradients back.

Each takes one sequence, cut to its own lengths: see the head of `reference_numpy.py`.
"""

import fractions

import numpy as np

NEG = -np.inf


# An emission maps (logits [T, U1, V], labels [U1] with -1 for "no label", options) to arc scores by slot and a pullback
# from arc gradients to logit gradients.


def fractions_of(x):
    """Python fractions of the finite elements; infinities stay floats."""
    x = np.asarray(x, np.float64)
    exact = [fractions.Fraction(float(v)) if np.isfinite(v) else float(v) for v in x.ravel()]
    return np.array([*exact, None], object)[:-1].reshape(x.shape)  # None keeps an empty array of objects


def is_exact(x):
    return np.asarray(x).dtype == object


def _numbers(x):
    return x if is_exact(x) else np.asarray(x, np.float64)


def nearest(x):
    try:
        return float(x)
    except OverflowError:
        return np.inf if x > 0 else NEG


def as_float(x):
    """Floats or fractions as float64; values beyond float64 become infinite."""
    if not is_exact(x):
        return np.asarray(x, np.float64)
    return np.array([nearest(v) for v in np.ravel(x)], np.float64).reshape(np.shape(x))


def log_softmax(x):
    """log softmax over the last axis; a row of -inf stays -inf, NaN and +inf give NaN. Fractions stay fractions."""
    x = _numbers(x)
    top = x.max(-1, keepdims=True)
    dead = top == NEG
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.where(dead, NEG, x - np.where(dead, 0, top))
        log_total = np.where(dead, 0, np.log(np.exp(as_float(below)).sum(-1, keepdims=True)))
        return below - (fractions_of(log_total) if is_exact(x) else log_total)


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
    tail = np.log1p(np.exp(-np.abs(as_float(x))))
    return np.minimum(x, 0) - (fractions_of(tail) if is_exact(x) else tail)


def hat_emission(logits, labels, *, blank, fused=True):
    """A Bernoulli blank, and a softmax over the other classes. A label equal to the blank class is a blank."""
    if not fused:
        return softmax_emission(logits, labels, blank=blank, fused=False)
    bernoulli = _numbers(logits[..., blank])
    head = _Head(np.delete(logits, blank, -1), True)
    place = np.where(labels > blank, labels - 1, labels)  # class among the others
    place = np.where((labels == blank) | (labels < 0), -1, place)
    blanks = np.where(bernoulli == np.inf, np.nan, _log_sigmoid(bernoulli))
    blanks = np.where((head.log_probs != head.log_probs).any(-1), np.nan, blanks)  # NaN; fractions have no isnan
    arcs = {"blank": blanks, "label": np.where(labels == blank, blanks, head[place] + _log_sigmoid(-bernoulli))}

    def pullback(gradients):
        to_blank = gradients["blank"] + np.where(labels == blank, gradients["label"], 0.0)
        to_label = np.where(labels == blank, 0.0, gradients["label"])
        head.add(place, to_label)
        blank_probability = np.exp(_log_sigmoid(as_float(bernoulli)))
        to_bernoulli = to_blank * np.exp(_log_sigmoid(-as_float(bernoulli))) - to_label * blank_probability
        return np.insert(head.pull(), blank, to_bernoulli, -1)

    return arcs, pullback


def target_robust_emission(logits, labels, *, blank, fused=True, skip_frame=NEG, skip_label=NEG):
    """A blank also has the weight of a skipped frame, except in the last one; a label that of all other labels."""
    arcs, pullback = softmax_emission(logits, labels, blank=blank, fused=fused)
    p, q = as_float(arcs["blank"]), as_float(arcs["label"])
    with np.errstate(divide="ignore", invalid="ignore"):
        complement = lambda x: np.log(-np.expm1(np.minimum(x, 0)))
        frame = np.where((np.arange(len(p)) < len(p) - 1)[:, None], skip_frame, NEG)
        blanks, others = np.logaddexp(p, frame), np.maximum(complement(p), q)  # the label and all others
        parts = complement(skip_label) + np.where(others == NEG, 0, q - others), skip_label
        more = np.logaddexp(*parts)

    def pull(gradients):
        share = lambda x, y: np.where((x == NEG) | (y == NEG), 0, np.exp(np.minimum(x - y, 700)))
        with np.errstate(invalid="ignore"):
            kept, mixed = (share(part, more) * gradients["label"] for part in parts)
            larger = others > q
            to_blank = gradients["blank"] * share(p, blanks) - np.where(larger, mixed * share(p, others), 0)
        return pullback({"blank": to_blank, "label": kept + np.where(larger, 0, mixed)})

    exact = fractions_of if is_exact(logits) else np.asarray
    there = (p != NEG) | (q != NEG)
    label = np.where(others > q, exact(others), arcs["label"]) + exact(more)
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
    exact = fractions_of if is_exact(logits) else np.asarray
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
