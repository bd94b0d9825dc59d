"""Compares every loss on random logits of any magnitude with exact sums: `python tools/fuzz/fuzz_magnitudes.py --help`.

Each call draws a loss, a dtype, a shape, options and a batch of problems: magnitudes from 1e-30 to 3e38 per element,
class or frame, masks of random constants on random subsets, -inf, offsets. The truth writes every number as integers
of 24 bits ("limbs"), whose sums along all paths are one exact matrix product. It shares no code with the library, and
each run first compares it with `reference_numpy.solve`.

A failure prints the command that repeats it. The exit status is 1 after a failure.
"""

import argparse
import dataclasses
import functools
import itertools
import os
import sys
import time

os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax.numpy as jnp
import losses
import numpy as np
import reference_numpy as truth

BATCH = 256
SHAPES = ((4, 2, 6), (5, 2, 33), (3, 3, 300))  # T, U, V; the reference runs on the first one alone
DTYPES = ("float32", "float32", "float32", "bfloat16", "float16", "float64")
SMALL_DTYPES = ("float32", "float32", "float64")  # for the reference, which takes long to compile
LARGEST = float(np.finfo(np.float32).max)
MASKS = (-1e4, -1e5, -3e6, -1e9, -1e10, -1e15, -1e30, -LARGEST, -np.inf)

# ------------------------------------------------------------------------------------------------------ exact numbers

BITS, LOWEST, COUNT = 24, -3, 9  # limb i weighs 2 ** (24 (i - 3)): from 2^-72 to beyond sums of 3e38


def limbs_of(x):
    """[COUNT, ...] integers whose weighted sum is x, up to 2^-72; infinities have none."""
    rest = np.where(np.isfinite(x), x, 0.0)
    out = np.zeros((COUNT, *rest.shape))
    for i in reversed(range(COUNT)):
        weight = 2.0 ** (BITS * (i + LOWEST))
        out[i] = np.trunc(rest / weight)
        rest = rest - out[i] * weight
    return out


def value_of(limbs):
    """About the nearest float64. Sums from the highest limb on, so that cancellation is exact."""
    total = np.zeros(limbs.shape[1:])
    for limb in reversed(limbs):
        total = total * 2.0**BITS + limb
    return total * 2.0 ** (BITS * LOWEST)


@dataclasses.dataclass
class Scores:
    """Arc scores [B, T, U1]: exact limbs, `dead` where -inf, and `size`, the magnitude that is rounded."""

    limbs: np.ndarray
    dead: np.ndarray

    @classmethod
    def of(cls, x):
        return cls(limbs_of(x), np.isneginf(x))

    def __add__(self, other):
        return Scores(self.limbs + other.limbs, self.dead | other.dead)

    def __neg__(self):
        return Scores(-self.limbs, self.dead)


# --------------------------------------------------------------------------------------------------------- emissions


class Head:
    """One softmax (or log-probabilities) over the last axis of x [B, T, U1, V], and its pullback to x."""

    def __init__(self, x, fused):
        self.x, self.fused = x, fused
        self.gradient = np.zeros(x.shape)
        if fused:
            top = x.max(-1, keepdims=True)
            self.alive = top > -np.inf
            self.top = np.where(self.alive, top, 0.0)
            self.exp = np.where(self.alive, np.exp(x - self.top), 0.0)
            self.total = np.where(self.alive, self.exp.sum(-1, keepdims=True), 1.0)
            norm = -Scores.of(self.top[..., 0]) + -Scores.of(np.log(self.total[..., 0]))
            self.norm = Scores(norm.limbs, ~self.alive[..., 0])

    def pick(self, classes):
        """Scores of classes [B, U1]; a negative class has none."""
        index = np.broadcast_to(np.maximum(classes, 0)[:, None, :, None], (*self.x.shape[:3], 1))
        picked = np.take_along_axis(self.x, index, -1)[..., 0]
        scores = Scores.of(np.where(classes[:, None, :] < 0, -np.inf, picked))
        return scores + self.norm if self.fused else scores

    def add(self, classes, arc_gradient):
        index = np.broadcast_to(np.maximum(classes, 0)[:, None, :, None], (*self.x.shape[:3], 1))
        old = np.take_along_axis(self.gradient, index, -1)
        new = old[..., 0] + np.where(classes[:, None, :] < 0, 0.0, arc_gradient)
        np.put_along_axis(self.gradient, index, new[..., None], -1)

    def pull(self):
        if not self.fused:
            return self.gradient
        return self.gradient - self.exp / self.total * self.gradient.sum(-1, keepdims=True)


def log_sigmoid(z):
    with np.errstate(over="ignore"):
        rest = -np.log1p(np.exp(-np.abs(z)))
    return Scores.of(np.minimum(z, 0.0)) + Scores.of(rest)


def sigmoid(z):
    with np.errstate(over="ignore"):
        return np.where(z < 0, np.exp(np.minimum(z, 0)), 1.0) / (1 + np.exp(-np.abs(z)))


def emission_of(loss, x, labels, blank, fused):
    """(slot -> Scores, pullback). `labels` [B, U1] are -1 for no label."""
    blanks = np.full(labels.shape, blank)
    name = loss.name
    if name == "tdt":
        durations = loss.options["durations"]
        tokens, lengths = Head(x[..., : -len(durations)], fused), Head(x[..., -len(durations) :], fused)
        kinds = {"blank": blanks, "label": labels}
        places = {
            f"{kind}+{d}": (classes, np.full(labels.shape, i))
            for i, d in enumerate(durations)
            for kind, classes in kinds.items()
            if (kind, d) != ("blank", 0)
        }

        def back(gradients):
            for slot, (classes, place) in places.items():
                tokens.add(classes, gradients[slot])
                lengths.add(place, gradients[slot])
            return np.concatenate([tokens.pull(), lengths.pull()], -1)

        return {slot: tokens.pick(classes) + lengths.pick(place) for slot, (classes, place) in places.items()}, back
    if name == "hat" and fused:
        rest, z = Head(np.delete(x, blank, -1), True), x[..., blank]
        place = np.where(labels > blank, labels - 1, labels)

        def back(gradients):
            rest.add(place, gradients["label"])
            own = gradients["blank"] * sigmoid(-z) - gradients["label"] * sigmoid(z)
            return np.insert(rest.pull(), blank, own, -1)

        # A row of labels without any is no label, and no more.
        return {"blank": log_sigmoid(z), "label": rest.pick(place) + log_sigmoid(-z)}, back
    head = Head(x, fused)
    slots = {"blank": blanks, "label": labels}
    if name == "multiblank":
        slots |= {f"blank+{d}": blanks - 1 - i for i, d in enumerate(loss.options["big_blank_durations"])}
    arcs = {slot: head.pick(classes) for slot, classes in slots.items()}
    if name == "constrained":
        after = Scores(np.roll(arcs["blank"].limbs, -1, -1), np.roll(arcs["blank"].dead, -1, -1))
        arcs["label"] = arcs["label"] + after  # the last column has no label

    def back(gradients):
        for slot, classes in slots.items():
            head.add(classes, gradients[slot])
        if name == "constrained":
            head.add(blanks, np.roll(gradients["label"], 1, -1) * (np.arange(labels.shape[1]) > 0))
        return head.pull()

    return arcs, back


# --------------------------------------------------------------------------------------------------------- the truth


@functools.cache
def path_matrix(topology, frames, labels):
    """(slots, [paths, slots * frames * (labels + 1)]): the arcs of each path."""
    slots = tuple(dict.fromkeys(arc.slot for arc in topology))
    paths = truth.enumerate_paths(topology, frames, labels)
    out = np.zeros((len(paths), len(slots), frames, labels + 1))
    for i, path in enumerate(paths):
        for slot, t, u in path:
            out[i, slots.index(slot), t, u] = 1
    return slots, out.reshape(len(paths), len(slots) * frames * (labels + 1))


def base_limit(wide):
    """Absolute error of losses and gradients of ordinary logits."""
    return 1e-10 if wide else 1e-5


@dataclasses.dataclass
class Answer:
    loss: np.ndarray  # [B]; inf without a path
    gradient: np.ndarray  # [B, T, U1, V]
    slack: np.ndarray  # [B]: how much rounded arcs may change a posterior
    size: np.ndarray  # [B]: sums of absolute scores, whose rounding is an error of the loss


def shares_of(sums, possible):
    """(best path's score [B], differences from it, shares, log of their sum) of path scores [COUNT, B, paths]."""
    floor = -np.inf
    scores = np.where(possible, value_of(sums), floor)
    best = scores.argmax(1)
    for _ in range(3):  # rounded scores may choose the second of two almost equal paths
        base = np.take_along_axis(sums, best[None, :, None], -1)
        below = np.where(possible, value_of(sums - base), floor)
        best = below.argmax(1)
    base = np.take_along_axis(sums, best[None, :, None], -1)
    below = np.where(possible, value_of(sums - base), floor)
    weights = np.exp(below)
    return value_of(base)[:, 0], below, weights


def answer(loss, p, eps, *, blank, fused, clamp, fastemit_lambda, delay_penalty, label_windows, ties):
    """The truth of problems that all have the lengths of the first one."""
    n, m = int(p.logit_lengths[0]), int(p.target_lengths[0])
    size = len(p.targets)
    out = Answer(np.full(size, np.inf), np.zeros(p.logits.shape), np.zeros(size), np.zeros(size))
    if n == 0:
        out.loss[:] = 0.0 if m == 0 else np.inf
        return out
    x = p.logits[:, :n, : m + 1].astype(np.float64)
    labels = np.concatenate([p.targets[:, :m], np.full((size, 1), -1)], 1)
    arcs, back = emission_of(loss, x, labels, blank, fused)
    for slot in filter(truth.is_label, arcs):
        penalty = float(np.float32(delay_penalty)) * ((n - 1) / 2 - np.arange(n))
        arcs[slot] = arcs[slot] + Scores.of(np.broadcast_to(penalty[:, None], x.shape[:3]))
        if label_windows is not None:
            t, first, last = np.arange(n)[:, None], *np.moveaxis(label_windows[:, None, :m], -1, 0)
            arcs[slot].dead[..., :m] |= (t < first) | (t > last)
    slots, takes = path_matrix(loss.truth.get("topology", truth.STANDARD), n, m)
    if not len(takes):
        return out
    flat = lambda x: np.stack(x, -3).reshape(*x[0].shape[:-2], -1)  # [..., slots * T * U1]
    dead = flat([arcs[slot].dead for slot in slots])
    limbs = np.where(dead, 0, flat([arcs[slot].limbs for slot in slots]))
    possible = dead @ takes.T == 0
    exists = possible.any(1)
    best, below, weights = shares_of(limbs @ takes.T, possible)
    weights = np.where(exists[:, None], weights, 0)
    total = np.where(exists, weights.sum(1), 1)
    out.loss = np.where(exists, -(best + np.log(total)), np.inf)
    shares = weights / total[:, None]

    scores = value_of(limbs)
    sizes = np.abs(scores) @ takes.T
    own = np.where(below == 0, sizes, 0).max(1)
    near = possible & (-below < 40 + 4 * eps * (sizes + own[:, None]))
    out.size = np.where(near, sizes, 0).max(1)
    out.slack = np.where(near.sum(1) <= 1, 0, 4 * eps * (out.size + own))
    # Equal arcs are also equal after rounding, so posteriors are exact, unless sums of two masks hide the smaller one.
    wide = eps < 1e-10
    with np.errstate(over="ignore"):
        rounded = scores if wide else scores.astype(np.float32).astype(np.float64)
    gone = dead | np.isinf(rounded)
    alive = gone @ takes.T == 0
    _, _, again = shares_of(limbs_of(np.where(gone, 0, rounded)) @ takes.T, alive)
    again = again / np.maximum(again.sum(1, keepdims=True), 1e-300)
    limit = base_limit(wide)
    same = (np.abs(again - shares).max(1) < limit / 100) & alive.any(1)
    sizes = np.where(dead, np.nan, np.abs(scores))
    most = np.fmax.reduce(sizes, 1, initial=0)
    least = np.fmin.reduce(np.where(sizes > 2**20, sizes, np.nan), 1, initial=np.inf)
    exact = (8 * losses.eps(np.float64) * most < limit) | (most <= least * (1 if wide else 1.001))
    sums = delay_penalty != 0 or loss.name in ("tdt", "constrained", "hat")  # of planes, which float32 rounds
    if not sums:
        out.slack = np.where(ties & same & exact, 0, out.slack)

    posteriors = (shares @ takes).reshape(size, len(slots), n, m + 1)
    gradients = {
        slot: -posteriors[:, i] * (1 + fastemit_lambda if truth.is_label(slot) else 1) for i, slot in enumerate(slots)
    }
    inside = back(gradients)
    inside = np.clip(inside, -clamp, clamp) if clamp > 0 else inside
    out.gradient[:, :n, : m + 1] = np.where(exists[:, None, None, None], inside, 0)
    return out


def rounded_normalizers(loss, p, blank, eps):
    """[B]: the error of rows whose anchor is nearly impossible, since they keep a rounded log-sum-exp."""
    x = p.logits.astype(np.float64)
    x = x[..., : -loss.extra_classes] if loss.extra_classes else x
    if loss.name == "hat":
        x, anchor = np.delete(x, blank, -1), 0
    else:
        anchor = blank
    top = x.max(-1)
    with np.errstate(invalid="ignore"):
        rounded = (top > -np.inf) & (top - x[..., anchor] > 45) & losses.inside(p)
    return np.minimum(np.where(rounded, eps * (1 + np.abs(top)), 0).max((1, 2)), 1)


# ---------------------------------------------------------------------------------------------------------- the feed


def random_size(rng, shape=()):
    """Log-uniform from 1e-30 to 3e38."""
    return np.minimum(10.0 ** rng.uniform(-30, 38.6, shape), LARGEST)


def random_subset(rng, shape, labels, blank):
    """bool [T, U1, V]: a class, some classes, a frame, a column, a block of nodes, arcs, or anything."""
    T, U1, V = shape
    out = np.zeros(shape, bool)
    frames = slice(*sorted(rng.integers(0, T + 1, 2))) if rng.random() < 0.5 else slice(None)
    columns = slice(*sorted(rng.integers(0, U1 + 1, 2))) if rng.random() < 0.5 else slice(None)
    kind = rng.integers(8)
    if kind == 0:
        classes = [rng.integers(V)]
    elif kind == 1:
        classes = rng.random(V) < rng.random()
    elif kind == 2:
        classes = [blank]
    elif kind == 3:
        classes = np.arange(V) != blank
    elif kind == 4:
        classes = np.unique(labels)
    elif kind == 5:
        classes = slice(None)
    elif kind == 6:
        out[frames, columns] = rng.random(out[frames, columns].shape) < rng.random()
        return out
    else:
        t, u = rng.integers(T), rng.integers(U1)
        out[t, u, rng.integers(V) if rng.random() < 0.5 else blank] = True
        return out
    block = out[frames, columns]
    block[..., classes] = True
    return out


def random_logits(rng, shape, labels, blank, fused):
    """([T, U1, V] in float64, whether its arcs may tie exactly)."""
    T, U1, V = shape
    kind = rng.integers(8)
    normal = rng.normal(size=shape)
    if kind <= 1:
        x = np.zeros(shape)
    elif kind == 2:
        x = normal * 2
    elif kind == 3:
        x = normal * random_size(rng)
    elif kind == 4:
        x = np.sign(normal) * random_size(rng, shape)
    elif kind == 5:
        x = normal * random_size(rng, (V,))
    elif kind == 6:
        x = normal * random_size(rng, (T, 1, 1))
    else:
        x = rng.choice(rng.choice([0, -1, 3, 30, -100, 1e4, -1e4, 1e6, -1e9, 1e20, -1e38], 3), shape)
    ties = kind <= 1 or kind == 7
    if not fused and rng.random() < 0.8:
        x = -np.abs(x)  # log-probabilities; else scores of either sign
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        mask = rng.choice(MASKS) if rng.random() < 0.6 else -random_size(rng)
        x[random_subset(rng, shape, labels, blank)] = mask * (1 if rng.random() < 0.95 or np.isinf(mask) else -1)
    if rng.random() < 0.3:
        rows = rng.choice([(1, 1, 1), (T, 1, 1), (T, U1, 1)])
        size = rng.choice([1e3, 1e4, 1e6]) if rng.random() < 0.5 else random_size(rng)
        x = x + size * rng.choice([-1, 1], tuple(rows))
        ties = ties and rows[0] == 1
    return x, ties


@dataclasses.dataclass
class Feed:
    """The arguments of a call of the library."""

    loss: losses.Loss
    dtype: str
    problem: losses.Problem
    ties: np.ndarray
    options: dict

    def __str__(self):
        options = self.options | {"label_windows": self.options["label_windows"] is not None}
        return f"{self.loss.name} {self.dtype} {self.problem.logits.shape[1:]} {options}"


def lengths_of(shape):
    """The lengths in a batch. They are few, since each has its own table of paths."""
    T, U, _ = shape
    return [(T, U), (T - 1, U - 1), (T, 1), (2, 0)]


def feed(seed, call, small, largest=LARGEST):
    """A batch of problems with magnitudes up to `largest`."""
    rng = np.random.default_rng((seed, call))
    loss = losses.LOSSES[rng.integers(len(losses.LOSSES))]
    shape = SHAPES[0 if small else rng.integers(len(SHAPES))]
    dtype = rng.choice(SMALL_DTYPES if small else DTYPES).item()
    T, U, V = shape
    blank = -1 if small or rng.random() < 0.6 else loss.blank(0)
    fused = bool(rng.random() < 0.75)
    place = blank % V
    classes = [k for k in range(V) if k != place]
    targets = rng.choice(classes, (BATCH, U)).astype(np.int32)
    made = [random_logits(rng, (T, U + 1, V + loss.extra_classes), y, place, fused) for y in targets]
    with np.errstate(over="ignore"):
        low = min(largest, float(jnp.finfo(dtype).max))
        high = low if fused else min(low, 1e37)  # sums of two scores are planes, too, and must not be +inf
        logits = np.stack([x for x, _ in made])
        logits = np.where(np.isneginf(logits), logits, np.clip(logits, -low, high)).astype(jnp.dtype(dtype))
    every = np.array(lengths_of(shape), np.int32)[np.arange(BATCH) * 4 // BATCH]
    p = losses.poisoned(losses.Problem(logits, targets, every[:, 0], every[:, 1]))
    maybe = lambda probability, value: value if rng.random() < probability else None
    options = {
        "blank": blank,
        "fused": fused,
        "clamp": maybe(0.2, 0.125) or -1.0,
        "fastemit_lambda": maybe(0.2, 0.5) or 0.0,
        "delay_penalty": maybe(0.2, 0.0625) or 0.0,
        "label_windows": None,
    }
    if shape == SHAPES[0] and rng.random() < 0.15:
        first = rng.integers(-1, T, (BATCH, U))
        options["label_windows"] = np.stack([first, first + rng.integers(0, T, (BATCH, U))], -1).astype(np.int32)
    return Feed(loss, dtype, p, np.array([ties for _, ties in made]), options)


def answers(f, eps):
    """The truth of a batch, by lengths."""
    parts = []
    for rows in np.split(np.arange(BATCH), 4):
        options = dict(f.options)
        if options["label_windows"] is not None:
            options["label_windows"] = options["label_windows"][rows]
        options["blank"] %= f.problem.logits.shape[-1] - f.loss.extra_classes
        parts.append(answer(f.loss, f.problem.take(rows), eps, ties=f.ties[rows], **options))
    names = [field.name for field in dataclasses.fields(Answer)]
    return Answer(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


# ------------------------------------------------------------------------------------------------------------ checks


def evaluate(f, problem, implementation, rows=slice(None)):
    options = {k: x for k, x in f.options.items() if k != "fused"}
    if options["label_windows"] is not None:
        options["label_windows"] = options["label_windows"][rows]
    return losses.evaluate(f.loss, problem, implementation, fused_log_softmax=f.options["fused"], **options)


def failures(f, expected, values, gradient, strict=False):
    """(index, text) of each failure. If strict, errors of rounded normalizers are failures, too."""
    p, fused, lam = f.problem, f.options["fused"], 1 + f.options["fastemit_lambda"]
    wide = f.dtype == "float64"
    eps = losses.eps(np.float64 if wide else np.float32)
    values, gradient = np.asarray(values, np.float64), np.asarray(gradient, np.float64)
    blank = f.options["blank"] % (p.logits.shape[-1] - f.loss.extra_classes)
    raw = rounded_normalizers(f.loss, p, blank, eps) * (fused and not strict)
    base = base_limit(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        limit = (1e-12 if wide else 1e-5) * np.abs(expected.loss) + base + 4 * eps * expected.size
        largest = float(np.finfo(np.float64 if wide else np.float32).max)
        near = np.abs(np.abs(expected.loss) - largest) < 1e-5 * largest  # either answer is right
        beyond = expected.loss > largest
        below = expected.loss < -largest  # scores that are no probabilities: no promise
        close = np.abs(values - expected.loss) <= limit
        right = np.where(beyond & ~near, values == np.inf, close) | (near & (values == np.inf)) | below
    for b in np.flatnonzero(~right):
        yield b, f"loss {values[b]}, expected {expected.loss[b]}"
    finite = np.isfinite(gradient).all((1, 2, 3))
    for b in np.flatnonzero(~finite):
        yield b, "gradient is not finite"
    outside = np.where(losses.inside(p)[..., None], 0, gradient).any((1, 2, 3))
    for b in np.flatnonzero(outside & finite):
        yield b, "gradient outside the lengths"
    impossible = beyond & ~near
    for b in np.flatnonzero(impossible & finite & gradient.any((1, 2, 3))):
        yield b, "gradient without a path"
    usable = finite & ~impossible & ~below & ~near
    narrow = jnp.dtype(f.dtype).itemsize == 2
    rounding = losses.eps(f.dtype) / 2 if narrow else 0
    if fused and f.options["clamp"] <= 0:
        blank_last = np.concatenate([np.delete(gradient, blank, -1), gradient[..., [blank]]], -1)
        for head in losses.heads(f.loss, gradient if f.loss.name != "hat" else blank_last):
            sums = np.abs(head.sum(-1)).max((1, 2))
            most = 1e-4 * lam + 2 * lam * raw + 4 * rounding + 2.0**-24 * head.shape[-1] * narrow
            for b in np.flatnonzero(usable & (raw < 1e-2) & (sums > most)):
                yield b, f"gradients of a softmax add up to {sums[b]:.3g}"
    known = usable & (expected.slack < 1e-2) & (raw < 1e-2)
    most = base * lam + lam * (expected.slack + raw) + 2.0**-24 * narrow
    error = np.abs(gradient - expected.gradient)
    excess = (error - rounding * np.abs(expected.gradient) - most[:, None, None, None]).max((1, 2, 3))
    for b in np.flatnonzero(known & (excess > 0)):
        yield b, f"gradient off by {error[b].max():.3g}, allowed {most[b]:.3g}"


def show(f, b, expected, values, gradient):
    np.set_printoptions(linewidth=160, threshold=4000, precision=9)
    n, m = f.problem.logit_lengths[b], f.problem.target_lengths[b]
    print(f"  T={n} U={m} targets {f.problem.targets[b]} slack {expected.slack[b]:.3g} ties {f.ties[b]}")
    print(f"  logits\n{f.problem.logits[b, :n, : m + 1]}")
    print(f"  loss {values[b]}, expected {expected.loss[b]!r}")
    print(f"  gradient\n{gradient[b, :n, : m + 1]}\n  expected\n{expected.gradient[b, :n, : m + 1]}")


def check_truth():
    """Compares limbs with fractions, on a sample of everything."""
    for call in itertools.islice(itertools.count(), 2 * len(losses.LOSSES)):
        f = feed(987654321, call, True)
        f.options |= {"clamp": -1.0, "fastemit_lambda": 0.0, "label_windows": None}
        expected = answers(f, losses.eps(np.float32))
        for b in range(0, BATCH, 37):
            n, m = f.problem.logit_lengths[b], f.problem.target_lengths[b]
            solution = truth.solve(
                f.problem.logits[b, :n, : m + 1].astype(np.float64), f.problem.targets[b, :m], **f.loss.truth,
                blank=f.options["blank"], fused_log_softmax=f.options["fused"],
                delay_penalty=f.options["delay_penalty"],
            )  # fmt: skip
            np.testing.assert_allclose(expected.loss[b], solution.loss, rtol=1e-13, atol=1e-13, err_msg=f"{f}")
            np.testing.assert_allclose(expected.gradient[b, :n, : m + 1], solution.gradient, atol=1e-12, err_msg=f"{f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=["kernel", "reference", "both"], default="both")
    parser.add_argument("--call", help="repeat this call alone: its number, or number:problem to see that problem")
    parser.add_argument("--most", type=int, default=40, help="failures that are printed")
    parser.add_argument("--strict", action="store_true", help="also where the normalizer of a row is kept rounded")
    parser.add_argument("--largest", type=float, default=LARGEST, help="clips finite logits")
    options = parser.parse_args()
    check_truth()
    kinds = ["kernel", "reference"] if options.implementation == "both" else [options.implementation]
    calls, problem = itertools.count(), None
    if options.call:
        number, _, problem = options.call.partition(":")
        calls = [int(number)]
    end, tried, failed, compared = time.monotonic() + options.seconds, 0, 0, 0
    started = time.monotonic()
    for call in calls:
        small = "reference" in kinds and (len(kinds) == 1 or call % 2 == 1)
        f = feed(options.seed, call, small, options.largest)
        eps = losses.eps(np.float64 if f.dtype == "float64" else np.float32)
        expected = answers(f, eps)
        for implementation in kinds if small else kinds[:1]:
            values, gradient = evaluate(f, f.problem, implementation)
            tried += BATCH
            compared += int((expected.slack < 1e-2).sum())
            wrong = list(failures(f, expected, values, gradient, options.strict))
            if call % 16 == 0 and implementation == "kernel":
                order = np.arange(BATCH)[::-1]
                turned = evaluate(f, f.problem.take(order), implementation, order)
                same = (losses.bits(turned[0][order]) == losses.bits(values)).all()
                if not (same and (losses.bits(turned[1][order]) == losses.bits(gradient)).all()):
                    wrong.append((0, "other bits in another order of the batch"))
            for b, text in wrong:
                failed += 1
                if failed <= options.most:
                    again = f"--seed {options.seed} --implementation {options.implementation} --call {call}:{b}"
                    print(f"{implementation} {f}\n  {text}\n  python {sys.argv[0]} {again}", flush=True)
                if problem and int(problem) == b:
                    show(f, b, expected, values, gradient)
        if time.monotonic() > end:
            break
    rate = tried / (time.monotonic() - started)
    print(f"{tried} problems, {compared} gradients compared, {failed} failures, {rate:.0f} problems a second")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
