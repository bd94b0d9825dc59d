"""Does the softmax stage alone support every loss: several blanks, labels per frame, scale and clamp?"""

import functools

import jax
import numpy as np
import pytest

import batches
import compare
import door
import family
import platforms
import reference_numpy as truth
from jax_rnnt.emissions import _softmax as softmax
from jax_rnnt.emissions._emission import NO_LABEL, OUTSIDE

B, T, U1 = 3, 5, 4
FRAMES = np.array([5, 3, 0], np.int32)
DTYPES = "float32", "float64", "bfloat16", "float16"


def label_map(classes, by_frame, blanks):
    """Random labels, some of them blanks, some absent, and a column outside."""
    rng = np.random.default_rng(0)
    label = rng.integers(-1, classes, (B, T if by_frame else 1, U1)).astype(np.int32)
    label[0, 0, 0], label[1, :, -1] = blanks[0], OUTSIDE
    return label


def logits_of(classes, dtype, label):
    rng = np.random.default_rng(1)
    x = rng.normal(0, 2, (B, T, U1, classes))
    x[rng.random(x.shape) < 0.1] = -np.inf
    inside = (np.arange(T)[:, None] < FRAMES[:, None, None]) & (label != OUTSIDE)
    return np.where(inside[..., None], x, np.nan).astype(dtype), np.broadcast_to(inside, (B, T, U1))


def expected(x, label, inside, blanks, normalize, cotangents, scale, clamp, *, durations=0, bernoulli=False):
    """(a plane for each blank, the label and each duration, dx), frame by frame from the float64 emissions."""
    label = np.broadcast_to(np.where(label == OUTSIDE, NO_LABEL, label), inside.shape)
    outputs, dx = np.full((len(blanks) + 1 + durations, *inside.shape), -np.inf), np.zeros(x.shape)
    further = {f"blank+{i}": k for i, k in enumerate(blanks[1:])}
    softmax = functools.partial(truth.softmax_emission, fused=normalize, blanks=further)
    slots = ["blank", *further, "label"]
    for b, t in zip(*np.nonzero(inside.any(-1))):
        here = inside[b, t]
        rows, ct = x[b, t, here].astype(np.float64), cotangents[:, b, t, here]
        split = rows.shape[-1] - durations
        emission = family.HAT.truth["emission"] if bernoulli else softmax
        arcs, pullback = emission(rows[None, :, :split], label[b, t, here], blank=blanks[0])
        lengths = truth.log_softmax(rows[:, split:]) if normalize and durations else rows[:, split:]
        outputs[:, b, t, here] = np.concatenate([[arcs[slot][0] for slot in slots], lengths.T])
        of_lengths = ct[len(slots) :].T
        of_lengths = of_lengths - (np.exp(lengths) * of_lengths.sum(-1, keepdims=True) if normalize else 0)
        unit = np.concatenate([pullback(dict(zip(slots, ct[:, None])))[0], of_lengths], -1)
        dx[b, t, here] = scale[b] * (np.clip(unit, -clamp[b], clamp[b]) if clamp[b] > 0 else unit)
    return outputs, dx


@functools.cache
def stages(implementation, blanks, normalize, **head):
    """(forward, backward): of the kernels through the door, or of the reference in JAX."""
    options = dict(blanks=blanks, normalize=normalize, durations=0, bernoulli=False) | head
    call = dict(num_batch_dims=1, strict=True, **options)

    def forward(*arguments, target=None):
        with door.opened(), door.using(target):
            return [np.asarray(x) for x in softmax.forward_kernel(*arguments, **call)]

    def backward(*arguments, target=None, alias=True):
        with door.opened(), door.using(target):
            return np.asarray(softmax.backward_kernel(*arguments, alias=alias, **call)[0])

    if implementation == "kernel":
        return forward, backward
    forward = jax.jit(functools.partial(softmax.softmax_emission, **options))
    return forward, jax.jit(lambda *arguments: softmax.backward_reference(*arguments, **options)[0])


class Case:
    """Inputs of both stages: a scale and a clamp for each sequence, and a row without cotangents."""

    def __init__(self, by_frame, dtype, classes, blanks, normalize, **head):
        more, dtype = head.get("durations", 0), np.dtype(dtype)
        wide = np.float64 if dtype == np.float64 else np.float32
        self.label = label_map(classes, by_frame, blanks)
        self.x, self.inside = logits_of(classes + more, dtype, self.label)
        # An arc that does not exist has no cotangent: the lattice gives it none.
        cotangents = np.random.default_rng(2).normal(size=(len(blanks) + 1 + more, B, T, U1)).astype(wide) * self.inside
        cotangents[len(blanks)] *= np.broadcast_to(self.label >= 0, self.inside.shape)
        cotangents[:, 0, 1, 1] = 0
        self.cotangents = cotangents
        self.scale, self.clamp = np.array([1, -2, 0.5], wide), np.array([0.25, -1, 0.5], wide)
        arguments = self.x, self.label, self.inside, blanks, normalize, cotangents, self.scale, self.clamp
        self.outputs, self.dx = expected(*arguments, **head)
        # Scores are below 8 in size and rounded a few times, as are sums over blanks; a 16-bit gradient once more.
        self.limit = (8 + len(blanks)) * compare.eps(wide)
        self.rounding, self.smallest = compare.rounding(dtype)

    def check_forward(self, planes):
        """The plane `norm`, last, is for the backward pass."""
        np.testing.assert_allclose(np.stack(planes[:-1]), self.outputs, rtol=self.limit, atol=self.limit)

    def check_backward(self, got):
        got = np.asarray(got)
        assert got.dtype == self.x.dtype and not got[~self.inside].any()
        limits = {"rtol": self.limit + self.rounding, "atol": self.limit + self.smallest}
        np.testing.assert_allclose(got.astype(np.float64), self.dx, **limits)


# Rows for every path of the kernels: less than a vector, a few of them, with and without a rest, and blocks.
SIZES = *range(1, 34), 37, 47, 63, 64, 65, 70, 127, 129, 255, 257, 301, 1023, 1025, 1200, 2049
DURATIONS = 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 20, 31
BLANKS = (0, 8), (8, 7, 6, 5), (2, 2), tuple(range(8, -1, -1)), tuple(range(20))
KINDS = {  # name: (blanks, options) of the i-th case, with rows of so many classes
    "softmax": lambda i, classes: ((0, classes // 2, classes - 1)[i % 3 : i % 3 + 1], {}),
    "durations": lambda i, classes: ((0, classes - 1)[i % 2 : i % 2 + 1], {"durations": DURATIONS[i % len(DURATIONS)]}),
    "bernoulli": lambda i, classes: ((0, classes // 2, classes - 1)[i % 3 : i % 3 + 1], {"bernoulli": True}),
    "blanks": lambda i, classes: (BLANKS[i % len(BLANKS)], {}),
}
MODES = [(kind, True) for kind in KINDS] + [(kind, False) for kind in KINDS if kind != "bernoulli"]  # as a softmax


@pytest.mark.parametrize(("kind", "normalize"), MODES)
@pytest.mark.parametrize("shift", range(4))
def test_kernels(kernel, kind, normalize, shift):
    """Forward and backward, in place and not, on every instruction set; each size in each dtype."""
    for i, classes in enumerate(SIZES, shift):
        dtype = batches.Problem(np.zeros(1), 0, 0, 0).astype(DTYPES[i % 4]).logits.dtype
        blanks, head = KINDS[kind](i, classes)
        if max(blanks) >= classes or (kind, classes) == ("bernoulli", 1):  # the truth needs a label's class
            continue
        case = Case(i % 2 == 1, dtype, classes, blanks, normalize, **head)
        forward, backward = stages(kernel, blanks, normalize, **head)
        for target in door.TARGETS:
            planes = forward(case.x, case.label, FRAMES, target=target)
            case.check_forward(planes)
            arguments = case.x, case.label, FRAMES, planes[-1], case.scale, case.clamp, *case.cotangents
            got = backward(*arguments, target=target)
            case.check_backward(got)
            compare.assert_same_bits(got, backward(*arguments, target=target, alias=False))


OF_REFERENCE = ((5,), True, {"durations": 4}), ((5,), False, {}), ((5,), True, {"bernoulli": True})
OF_REFERENCE += (tuple(range(8, -1, -1)), True, {}), ((2, 2), False, {})


@pytest.mark.slow
@pytest.mark.parametrize(("blanks", "normalize", "head"), OF_REFERENCE, ids=str)
def test_reference(blanks, normalize, head):
    """Labels of all frames alike, and labels by frame."""
    case = Case(not normalize, "float64" if normalize else "float32", 9, blanks, normalize, **head)
    forward, backward = stages("reference", blanks, normalize, **head)

    def both(x, label, frames, scale, clamp, *cotangents):
        planes = forward(x, label, frames)
        return planes, backward(x, label, frames, planes[-1], scale, clamp, *cotangents)

    planes, got = jax.jit(both)(case.x, case.label, FRAMES, case.scale, case.clamp, *case.cotangents)
    case.check_forward(planes)
    case.check_backward(got)


def test_heads(monkeypatch):
    """What searches read, on a GPU as elsewhere: rows of one class and of some, each with a row of -inf."""
    rows = [np.random.default_rng(0).normal(0, 3, (3, classes)).astype(np.float32) for classes in (1, 2, 5)]
    for x in rows:
        x[1] = -np.inf
    ways = [lambda *x, default, **_: default(*x), lambda *x, cuda, **_: cuda(*x)]

    def tokens(rows):
        for way in ways:
            monkeypatch.setattr(jax.lax, "platform_dependent", way)
            yield [softmax.Softmax((0,)).log_probabilities(x) for x in rows]

    for found in jax.jit(lambda rows: [*tokens(rows)])(rows):
        for x, log_probabilities in zip(rows, found, strict=True):
            np.testing.assert_allclose(log_probabilities, truth.log_softmax(x.astype(np.float64)), rtol=1e-6, atol=1e-6)


@family.reference_slow
def test_bernoulli_extremes(implementation):
    """log sigmoid to the last digits far from 0, and a blank that is certain or impossible."""
    z = np.array([-np.inf, -1e4, -100, -30, -1e-3, 0, 1e-3, 8, 20, 88, 1e4], np.float64)
    x = np.zeros((1, z.size, 1, 3))
    x[0, :, 0, 1] = z
    label = np.zeros((1, 1, 1), np.int32)
    for dtype in (np.float32, np.float64):
        forward, backward = stages(implementation, (1,), True, bernoulli=True)
        frames = np.array([z.size], np.int32)
        log_blank, log_label, norm = map(np.asarray, forward(x.astype(dtype), label, frames))
        with np.errstate(over="ignore"):
            rounded = z.astype(dtype).astype(np.float64)
            blank, other = -np.logaddexp(0, -rounded), -np.logaddexp(0, rounded)
        limit = 4 * compare.eps(dtype)
        # exp(-z) has the relative error of its argument's rounding.
        error = (4 + np.abs(rounded[1:])) * compare.eps(dtype) * -blank[1:] + 1e-38
        assert log_blank[0, 0, 0] == -np.inf and (np.abs(log_blank[0, 1:, 0] - blank[1:]) <= error).all()
        np.testing.assert_allclose(log_label[0, :, 0], other - np.log(2), rtol=limit, atol=limit)
        one, none = np.ones((1, z.size, 1), dtype), np.zeros((1, z.size, 1), dtype)
        scale, clamp = np.ones(1, dtype), -np.ones(1, dtype)
        dz = np.asarray(backward(x.astype(dtype), label, frames, norm, scale, clamp, one, none))[0, :, 0, 1]
        assert (np.abs(dz - np.exp(other)) <= (4 + np.abs(z[-2])) * compare.eps(dtype) * np.exp(other) + 1e-37).all()


# ------------------------------------------------------------------------------------ the normalizer between the stages
def exact_softmax(x):
    """In extended precision; 0 in a row of -inf."""
    x = x.astype(np.longdouble)
    weights = np.exp(x - np.maximum(x.max(-1, keepdims=True), np.finfo(x.dtype).min))
    return weights / np.maximum(weights.sum(-1, keepdims=True), np.finfo(x.dtype).tiny)


def assert_softmax(got, x, atol=0.0):
    """To a few ulp. The anchor is x[..., 0]; differences of logits are rounded at their own size.

    Of an anchor more than 45 below the largest logit, the log-sum-exp is kept instead, rounded at its own size.
    """
    eps, p = compare.eps(x.dtype), exact_softmax(x)
    x = x.astype(np.longdouble)
    peak, anchor = x.max(-1, keepdims=True), x[..., :1]
    with np.errstate(invalid="ignore"):
        near, far = np.abs(x - anchor) + np.abs(peak - anchor), np.abs(x - peak) + abs(peak)
        rounded = np.where(peak - anchor <= 45, near, far)
        limit = np.where(p > 0, np.minimum((16 + rounded) * eps * p, 1), 0)
    limit = limit + atol + 8 * np.finfo(got.dtype).tiny
    wrong = ~(np.abs(got - p) <= limit)
    assert not wrong.any(), f"{wrong.sum()} wrong, such as {got[wrong][0]} of {x[wrong.any(-1)][0]}"


def codec_rows(dtype):
    """Rows [N, 6], the anchor first, over the whole range of floats."""
    rng, top = np.random.default_rng(0), np.log2(np.finfo(dtype).max)
    sizes = lambda *shape: rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(-top, top - 1, shape)
    normal = rng.normal(0, 2, (4000, 6))
    wide, offset, below = sizes(4000, 6), normal + sizes(4000, 1), normal.copy()
    below[:, 0] -= rng.choice([30, 44, 46, 80, 1e4, 1e30, np.inf], 4000)
    masked = np.where(rng.random(normal.shape) < 0.5, rng.choice([-np.inf, -1e9, -1e30], normal.shape), below)
    # The largest logit 45 above the anchor, and beside it; a log-sum-exp near 0, where sums are told from it.
    steps = 45 + np.arange(-20, 21) * float(np.spacing(dtype(45)))
    reach = np.stack([0 * steps, steps, steps - 1, steps - 90, 0 * steps, steps], -1)
    near = np.outer([-1, 1], 2.0 ** np.arange(-250, -20)).ravel()
    zero = np.stack([np.full(near.size, -np.inf), near, *[near - 1000] * 4], -1)
    dead = np.full((1, 6), -np.inf)
    return np.concatenate([normal, wide, offset, below, masked, reach, zero, dead]).astype(dtype)


def softmax_by(reader, rows, norm):
    """(softmax of rows [1, N, 1, V] from its code, 1 for class 1): the gradient of label 1 is their difference."""
    n, dtype = rows.shape[1], rows.dtype
    one, none = np.ones((1, n, 1), dtype), np.zeros((1, n, 1), dtype)
    label, frames = np.ones((1, 1, 1), np.int32), np.array([n], np.int32)
    dx = stages(reader, (0,), True)[1](rows, label, frames, norm, one[0, :1, 0], -one[0, :1, 0], none, one)
    own = np.arange(rows.shape[-1]) == 1
    return own.astype(dtype) - np.asarray(dx), own


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("writer", ["kernel", "reference"])
@pytest.mark.parametrize("reader", ["kernel", "reference", "softmax"])
def test_norm_is_read_as_it_was_written(kernel, writer, reader, dtype):
    """The forward pass keeps one number a row, and the backward pass makes the softmax of it."""
    x = codec_rows(dtype)
    rows, label, frames = x[None, :, None], np.ones((1, 1, 1), np.int32), np.array([len(x)], np.int32)
    for target in door.TARGETS if kernel in (writer, reader) else [None]:
        with door.using(target):
            *_, norm = stages(writer, (0,), True)[0](rows, label, frames)
            if reader == "softmax":
                got, own = softmax.softmax_of_norm(rows, rows[..., 0], jax.numpy.asarray(norm)), 0
            else:
                got, own = softmax_by(reader, rows, norm)
        assert_softmax(np.asarray(got)[0, :, 0], x, 4 * compare.eps(dtype) * own)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_rows(kernel, dtype):
    """Around the blocks in which a long row is read, with its largest value at the end or in the middle."""
    label, frames = np.full((1, 1, 1), NO_LABEL, np.int32), np.array([6], np.int32)
    rng = np.random.default_rng(0)
    longest = (131072,) if dtype == "float32" else ()
    for classes in (1, 2, 1023, 1024, 1025, 1039, 1040, 1041, 2047, 2048, 2049, 3073, 4097, *longest):
        x = rng.normal(0, 1, (1, 6, 1, classes))
        x[0, 0, 0, -1] = x[0, 1, 0, classes // 2] = 60
        x[0, 3, 0, : classes // 2] = -np.inf
        x = batches.Problem(x, 0, 0, 0).astype(dtype).logits
        wide = x.astype(np.float64 if dtype == "float64" else np.float32)
        limit, exact = 4 * compare.eps(wide.dtype), truth.log_softmax(wide)[..., 0]
        for target in door.TARGETS[: 1 if classes in longest else None]:
            with door.using(target):
                log_blank, _, norm = stages(kernel, (0,), True)[0](x, label, frames)
                got, own = softmax_by(kernel, wide, norm)
            np.testing.assert_allclose(log_blank, exact, rtol=limit, atol=limit)
            assert_softmax(got, wide, limit * own)


@pytest.mark.parametrize("target", door.TARGETS)
def test_error_of_exp(native_kernel, target):
    """Of a softmax, but for its sum, which all classes share: exp within 2 ulp, and much less on average."""
    if platforms.cuda_kernels():
        pytest.skip("GPUs have an instruction for exp")
    x = np.random.default_rng(0).uniform(-8, 0, (1, 1, 1, 4000)).astype(np.float32)
    forward, backward = stages(native_kernel, (0,), True)
    label, frames, one = np.full((1, 1, 1), NO_LABEL, np.int32), np.array([1], np.int32), np.ones((1, 1, 1), np.float32)
    *_, norm = forward(x, label, frames, target=target)
    dx = backward(x, label, frames, norm, one[0, 0], -one[0, 0], one, 0 * one, target=target).astype(np.float64)
    ratio = dx[0, 0, 0, 1:] / np.exp(x[0, 0, 0, 1:].astype(np.float64))
    errors = np.abs(ratio / np.median(ratio) - 1) / compare.eps(np.float32)
    assert errors.max() < 3 and np.sqrt((errors**2).mean()) < 0.5
