"""Does the softmax stage alone support every loss: several blanks, labels per frame, scale and clamp?"""

import functools

import jax
import numpy as np
import pytest

import losses
import reference_numpy as truth
from jax_rnnt.emissions import _softmax as softmax

B, T, U1 = 3, 5, 4
FRAMES = np.array([5, 3, 0], np.int32)
BLANKS = {"one": (3,), "two": (0, 8), "four": (8, 7, 6, 5), "twice_the_same": (2, 2)}
NO_LABEL, OUTSIDE = softmax.NO_LABEL, softmax.OUTSIDE


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


def expected(x, label, inside, blanks, normalize, cotangents=None, scale=None, clamp=None):
    """log-probs of each blank and of the label, and dx, row by row."""
    label = np.broadcast_to(label, inside.shape)
    outputs, dx = np.full((len(blanks) + 1, *inside.shape), -np.inf), np.zeros(x.shape)
    for b, t, u in zip(*np.nonzero(inside)):
        row = x[b, t, u].astype(np.float64)
        log_probs = truth.log_softmax(row) if normalize else row
        for arc, k in enumerate((*blanks, label[b, t, u])):
            if k >= 0:
                outputs[arc, b, t, u] = log_probs[k]
                if cotangents is not None:
                    dx[b, t, u, k] += cotangents[arc][b, t, u]
        if cotangents is not None:
            if normalize:
                dx[b, t, u] -= np.exp(log_probs) * sum(c[b, t, u] for c in cotangents)
            dx[b, t, u] = np.clip(dx[b, t, u], -clamp[b], clamp[b]) if clamp[b] > 0 else dx[b, t, u]
            dx[b, t, u] *= scale[b]
    return outputs, dx


@functools.cache
def stages(implementation, blanks, normalize, **head):
    options = dict(blanks=blanks, normalize=normalize, **head)
    if implementation == "kernel":
        return (
            jax.jit(lambda *a: softmax.forward(*a, strict=True, **options)),
            jax.jit(lambda x, label, n, norm, scale, clamp, *c: softmax.backward(
                x, label, n, norm, c, scale, clamp, strict=True, alias=False, **options)),
        )  # fmt: skip
    return (
        jax.jit(lambda *a: softmax.softmax_emission(*a, **options)),
        jax.jit(lambda *a: softmax.backward_reference(*a, **options)[0]),
    )


@pytest.mark.rare("reference")
@pytest.mark.parametrize("blanks", BLANKS.values(), ids=BLANKS)
@pytest.mark.parametrize("normalize", [True, False], ids=["logits", "log_probs"])
def test_both_stages(implementation, blanks, normalize):
    """Forward, and backward with a scale and a clamp for each sequence."""
    for by_frame, dtype, classes in ((False, np.float64, 9), (True, np.float32, 37)):
        label = label_map(classes, by_frame, blanks)
        x, inside = logits_of(classes, dtype, label)
        rng = np.random.default_rng(2)
        # An arc that does not exist has no cotangent: the lattice gives it none.
        cotangents = rng.normal(size=(len(blanks) + 1, B, T, U1)).astype(dtype) * inside
        cotangents[-1] *= np.broadcast_to(label >= 0, inside.shape)
        scale, clamp = np.array([1, -2, 0.5], dtype), np.array([0.25, -1, 0.5], dtype)
        outputs, dx = expected(x, label, inside, blanks, normalize, cotangents, scale, clamp)
        forward, backward = stages(implementation, blanks, normalize)
        *got, norm = forward(x, label, FRAMES)
        limit = 8 * losses.eps(dtype)  # scores are below 8 in size and rounded a few times
        np.testing.assert_allclose(np.stack(got), outputs, rtol=limit, atol=limit)
        got = np.asarray(backward(x, label, FRAMES, norm, scale, clamp, *cotangents))
        np.testing.assert_allclose(got, dx, rtol=limit, atol=limit)
        assert not got[~inside].any()


HEADS = {"durations": dict(durations=4), "one_duration": dict(durations=1), "bernoulli": dict(bernoulli=True)}


def expected_heads(x, label, inside, blank, normalize, cotangents, scale, clamp, *, durations=0, bernoulli=False):
    """As `expected`, row by row from the float64 emissions of the family; every duration is also an arc."""
    label = np.broadcast_to(label, inside.shape)
    outputs, dx = np.full((2 + durations, *inside.shape), -np.inf), np.zeros(x.shape)
    for b, t, u in zip(*np.nonzero(inside)):
        row, k, ct = x[b, t, u].astype(np.float64), label[b, t, u, None], cotangents[:, b, t, u, None, None]
        split = row.size - durations
        emission = truth.hat_emission if bernoulli else functools.partial(truth.softmax_emission, fused=normalize)
        arcs, pullback = emission(row[None, None, :split], k, blank=blank)
        lengths = truth.log_softmax(row[split:]) if normalize and durations else row[split:]
        outputs[:, b, t, u] = arcs["blank"][0, 0], arcs["label"][0, 0], *lengths
        of_lengths = ct[2:, 0, 0] - (np.exp(lengths) * ct[2:].sum() if normalize else 0)
        unit = np.concatenate([pullback({"blank": ct[0], "label": ct[1]})[0, 0], of_lengths])
        dx[b, t, u] = np.clip(unit, -clamp[b], clamp[b]) if clamp[b] > 0 else unit
        dx[b, t, u] *= scale[b]
    return outputs, dx


@pytest.mark.rare("reference")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_heads(implementation, head):
    """A second softmax after the first, or a Bernoulli blank: rows for every path of the kernels, both input modes."""
    more = head.get("durations", 0)
    for by_frame, dtype, classes, blank in (
        (False, np.float64, 9, 0),
        (True, np.float32, 37, 5),
        (False, np.float32, 5, 4),
        (True, np.float32, 301, 300),
        (False, np.float64, 70, 33),
        (False, np.float32, 1200, 1100),
    ):
        for normalize in (True, False) if more else (True,):
            label = label_map(classes, by_frame, (blank,))
            x, inside = logits_of(classes + more, dtype, label)
            cotangents = np.random.default_rng(2).normal(size=(2 + more, B, T, U1)).astype(dtype) * inside
            cotangents[1] *= np.broadcast_to(label >= 0, inside.shape)
            cotangents[:, 0, 1, 1] = 0  # a row that is left out
            scale, clamp = np.array([1, -2, 0.5], dtype), np.array([0.25, -1, 0.5], dtype)
            outputs, dx = expected_heads(x, label, inside, blank, normalize, cotangents, scale, clamp, **head)
            forward, backward = stages(implementation, (blank,), normalize, **head)
            *got, norm = forward(x, label, FRAMES)
            limit = 8 * losses.eps(dtype)
            np.testing.assert_allclose(np.stack(got), outputs, rtol=limit, atol=limit)
            got = np.asarray(backward(x, label, FRAMES, norm, scale, clamp, *cotangents))
            np.testing.assert_allclose(got, dx, rtol=limit, atol=limit)
            assert not got[~inside].any()


@pytest.mark.rare("reference")
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_odd_rows(implementation, head):
    """NaN or +inf anywhere in a row gives NaN in all planes; the bits of other rows do not change."""
    more, classes, blank = head.get("durations", 0), 21, 20
    label = np.full((1, 1, 3), 2, np.int32)
    x = np.random.default_rng(0).normal(0, 2, (1, 4, 3, classes + more)).astype(np.float32)
    forward, _ = stages(implementation, (blank,), True, **head)
    clean = np.stack(forward(x, label, np.array([4], np.int32)))
    assert np.isfinite(clean).all()
    for place, value in ((blank, np.inf), (7, np.nan), (classes + more - 1, np.nan), (classes + more - 1, np.inf)):
        odd = x.copy()
        odd[0, 1, 2, place] = value
        got = np.stack(forward(odd, label, np.array([4], np.int32)))[:-1]
        assert np.isnan(got[:, 0, 1, 2]).all()
        got[:, 0, 1, 2] = clean[:-1, 0, 1, 2]
        losses.assert_same_bits(got, clean[:-1])


@pytest.mark.rare("reference")
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
        limit = 4 * losses.eps(dtype)
        # exp(-z) has the relative error of its argument's rounding.
        close = (
            np.abs(log_blank[0, 1:, 0] - blank[1:])
            <= (4 + np.abs(rounded[1:])) * losses.eps(dtype) * -blank[1:] + 1e-38
        )
        assert log_blank[0, 0, 0] == -np.inf and close.all()
        np.testing.assert_allclose(log_label[0, :, 0], other - np.log(2), rtol=limit, atol=limit)
        one, none = np.ones((1, z.size, 1), dtype), np.zeros((1, z.size, 1), dtype)
        scale, clamp = np.ones(1, dtype), -np.ones(1, dtype)
        dz = np.asarray(backward(x.astype(dtype), label, frames, norm, scale, clamp, one, none))[0, :, 0, 1]
        assert (np.abs(dz - np.exp(other)) <= (4 + np.abs(z[-2])) * losses.eps(dtype) * np.exp(other) + 1e-37).all()


@pytest.mark.parametrize("classes", [1, 2, 1023, 1024, 1025, 2047, 2048, 4097, 131072])
def test_long_rows(kernel, classes):
    """Around the blocks in which a long row is read, with its largest value at the end or in the middle."""
    label = np.full((1, 1, 3), NO_LABEL, np.int32)
    rng = np.random.default_rng(0)
    for dtype in ("bfloat16", "float32", "float64"):
        x = rng.normal(0, 1, (1, 2, 3, classes))
        x[0, 0, 0, -1] = x[0, 0, 1, classes // 2] = 60
        x[0, 1, 0, : classes // 2] = -np.inf
        x = losses.Problem(x, 0, 0, 0).astype(dtype).logits
        forward, _ = stages("kernel", (classes - 1,), True)
        log_blank, _, norm = forward(x, label, np.array([2], np.int32))
        wide = x.astype(np.float64)
        limit = 4 * losses.eps("float64" if dtype == "float64" else "float32")
        np.testing.assert_allclose(log_blank, truth.log_softmax(wide)[..., -1], rtol=limit, atol=limit)
        assert_norm(norm, wide, classes - 1, dtype)


def assert_norm(norm, x, anchor, dtype):
    """norm is the scaled sum relative to an anchor at most 45 below the largest logit, otherwise the log-sum-exp."""
    norm, peak = np.asarray(norm), x.max(-1)
    lse = peak - truth.log_softmax(x).max(-1)
    reach = peak - x[..., anchor]
    bits = 64 if dtype == "float64" else 32
    eps = losses.eps(f"float{bits}")
    scale, tiny = (2.0**-400, 2.0**-200) if bits == 64 else (2.0**-124, 2.0**-32)
    anchored = (norm > 0) & (norm < tiny)
    np.testing.assert_array_equal(anchored, reach <= 45)
    relative = (16 + np.maximum(reach, 0)) * eps  # exp of a rounded number, and the truth has its own
    assert (
        np.abs(np.log(norm[anchored].astype(np.float64) / scale) - (lse - x[..., anchor])[anchored])
        <= relative[anchored]
    ).all()
    np.testing.assert_allclose(norm[~anchored], lse[~anchored], rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norm_is_read_as_it_was_written(dtype):
    """Rows of any offset, with anchors from the largest logit down to -inf, dead rows, an lse near 0."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 2, (4000, 1, 1, 5))
    x[..., 0] -= rng.choice([0, 30, 44, 46, 80, 1e4, np.inf], x.shape[:-1])
    x += rng.choice([0, -1e4, -300, 300, 1e4], (*x.shape[:-1], 1))
    x[:10], x[10:20, ..., 1:] = -np.inf, -np.inf
    x[20:30] = [-np.inf, 1e-30, -80, -90, -100]
    x = x.astype(dtype)
    norm = softmax.encoded_norm(softmax.row_sum(x), x[..., 0])
    made = np.asarray(softmax.softmax_of_norm(x, x[..., 0], norm), np.float64)
    expected = np.exp(truth.log_softmax(x.astype(np.float64)))
    expected[:10] = 0
    near = x.max(-1) <= x[..., 0] + 45
    # Of an anchor that is too far, lse is rounded at its own size.
    size = np.where(near, 64, 16 + 2 * np.abs(np.nan_to_num(x.max(-1), neginf=0)))[..., None]
    assert (np.abs(made - expected) <= size * losses.eps(dtype)).all()


def test_error_of_exp(native_kernel):
    """Of a softmax, but for its sum, which all classes share: exp within 2 ulp, and much less on average."""
    if losses.cuda_kernels():
        pytest.skip("GPUs have an instruction for exp")
    x = np.random.default_rng(0).uniform(-8, 0, (1, 1, 1, 4000)).astype(np.float32)
    forward, backward = stages(native_kernel, (0,), True)
    label, frames, one = np.full((1, 1, 1), NO_LABEL, np.int32), np.array([1], np.int32), np.ones((1, 1, 1), np.float32)
    *_, norm = forward(x, label, frames)
    dx = np.asarray(backward(x, label, frames, norm, one[0, 0], -one[0, 0], one, 0 * one), np.float64)
    ratio = dx[0, 0, 0, 1:] / np.exp(x[0, 0, 0, 1:].astype(np.float64))
    errors = np.abs(ratio / np.median(ratio) - 1) / losses.eps(np.float32)
    assert errors.max() < 3 and np.sqrt((errors**2).mean()) < 0.5


def test_labels_of_no_class(native_kernel):
    """NaN, and nothing is read outside the row. The blank stays."""
    label = np.array([9, 10, 2**31 - 1, OUTSIDE - 1, 8], np.int32)
    forward, _ = stages(native_kernel, (3,), True)
    log_blank, log_label, _ = forward(np.zeros((1, 1, 5, 9), np.float32), label[None, None], np.array([1], np.int32))
    np.testing.assert_allclose(log_blank[0, 0], -np.log(9), rtol=1e-6)
    assert np.isnan(log_label[0, 0]).tolist() == [True] * 4 + [False]


def test_rows_far_from_their_anchor(implementation):
    """A masked blank: norm tells the backward pass which kind it is, and yields the softmax."""
    rng = np.random.default_rng(0)
    label = np.full((1, 1, 4), NO_LABEL, np.int32)
    for dtype in ("float32", "float64"):
        x = rng.normal(0, 1, (1, 2, 4, 37)).astype(dtype)
        x[0, 0, 0, 5], x[0, 0, 1, 5], x[0, 0, 2] = -1e9, -np.inf, x[0, 0, 2] - 1e4
        x[0, 0, 2, 5], x[0, 1, 0, 5], x[0, 1, 1, 5] = -1e6, -50, -70
        forward, backward = stages(implementation, (5,), True)
        frames = np.array([2], np.int32)
        *_, norm = forward(x, label, frames)
        wide = x.astype(np.float64)
        assert_norm(norm, wide, 5, dtype)
        one, scale, clamp = np.ones((1, 2, 4), dtype), np.ones(1, dtype), -np.ones(1, dtype)
        dx = np.asarray(backward(x, label, frames, norm, scale, clamp, one, 0 * one))
        expected = (np.arange(37) == 5) - np.exp(truth.log_softmax(wide))
        coded = implementation == "reference"  # the reference's backward pass takes lse = -1e4 as it is rounded
        limit = np.where(np.abs(wide[..., :1]) < 1e3, 64, 1e4 if coded else 64) * losses.eps(dtype)
        assert (np.abs(dx - expected) <= limit).all()
