"""Are confidences of labels those of their rows, and free where they are off?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decoding
import family
import reference_numpy as truth
from decoding import EXACT, NAMED, Model, assert_same, select
from jax_rnnt import decode

KINDS = [
    decode.Entropy(kind, exponent, normalization)
    for kind in ("tsallis", "renyi", "gibbs")
    for exponent in (0.25, 1 / 3, 0.9999, 1.0, 1.00001, 2.0, 600.0)
    for normalization in ("exponential", "linear")
    if kind != "gibbs" or exponent <= 1
]


def by_definition(entropy, p):
    """The confidence of one row of probabilities, in float64 and with the plain formulas of the paper."""

    def of(p):
        a, p = entropy.exponent, p[p > 0]
        if a == 1 or entropy.kind == "gibbs":
            return -np.sum(p**a * a * np.log(p))
        if entropy.kind == "tsallis":
            return (np.sum(p**a) - 1) / (1 - a)
        return np.log(np.sum((p / p.max()) ** a)) / (1 - a) + np.log(p.max()) * a / (1 - a)

    entropy_of_row, most = of(p), of(np.full(len(p), 1 / len(p)))
    if entropy.normalization == "linear":
        return max(0.0, 1 - entropy_of_row / most)
    return max(0.0, (np.exp(-entropy_of_row) - np.exp(-most)) / (1 - np.exp(-most)))


ROWS = np.stack([*np.random.default_rng(0).dirichlet([0.3] * 7, 5), np.full(7, 1 / 7), np.eye(7)[2]])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_definition(dtype):
    """Improbable and impossible tokens; exponents near 1, where sums of powers are 1 but for their last digits."""
    rows = ROWS / ROWS.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        log_probs = jnp.asarray(np.log(rows), dtype)
    for entropy in KINDS:
        got = entropy.confidence(log_probs)
        expected = [by_definition(entropy, p) for p in rows]
        # The plain formula has the digits that 1 - a leaves it.
        exact = abs(entropy.exponent - 1) > 0.01 or entropy.exponent == 1
        limit = max(1e-12 if exact else 1e-9, 2e-5 if dtype == np.float32 else 0)
        np.testing.assert_allclose(got, expected, rtol=limit, atol=limit, err_msg=f"{entropy}")
        np.testing.assert_allclose(got[-2:], [0, 1], atol=1e-5 if dtype == np.float32 else 1e-9)
        assert got.dtype == dtype


def test_limits():
    """Renyi's entropy of a large exponent is that of the largest probability alone. NaN stays; one token is certain."""
    log_probs = jnp.log(jnp.array([[0.7, 0.2, 0.1]]))
    large = decode.Entropy("renyi", 1e5).confidence(log_probs)
    np.testing.assert_allclose(large, (0.7 * 3 - 1) / 2, rtol=1e-4)
    assert jnp.isnan(decode.Entropy().confidence(log_probs.at[0, 1].set(jnp.nan))).all()
    assert decode.Entropy().confidence(jnp.zeros((2, 1))).tolist() == [1, 1]


def expected_confidences(model, b, labels, frames, entropy):
    """Of the rows at the nodes where labels were written, by hand."""
    for i, t in enumerate(frames):
        row, blank = model.logits(b, t, tuple(labels[:i])), model.tokens - 1
        if model.loss.name == "hat":
            log_probs = np.append(
                truth.log_softmax(row[:blank]) - np.logaddexp(0, row[blank]), -np.logaddexp(0, -row[blank])
            )
        else:
            log_probs = truth.log_softmax(row[: blank + 1])
        yield by_definition(entropy, np.exp(log_probs))


PAIRS = [("rnnt", decoding.greedy), ("hat", decoding.greedy), family.slow("tdt", decoding.beam)]


@pytest.mark.quick("rnnt-greedy")
@pytest.mark.parametrize(("name", "function"), PAIRS)
def test_searches(name, function):
    """Bit for bit the hypotheses without it; each label has the row of its node, at the temperature of the search, in
    one part and in two, of single utterances too.
    """
    model, entropy = Model(NAMED[name], batch=9, frames=8), decode.Entropy()
    model.temperature = 1.5
    sizes = (16,) if function is decoding.greedy else (16, 4)  # 36 rows are packed
    options = {"temperature": np.float64(1.5), "blank_penalty": 0.5, "max_symbols": 2}
    off = model.search(function, *sizes, state=model.idle(function, *sizes, **options), **options)
    options["confidence"] = entropy
    start = model.idle(function, *sizes, **options)
    whole = model.search(function, *sizes, state=start, **options)
    assert off.label_confidences is None
    assert_same(off._replace(label_confidences=whole.label_confidences)[:-1], whole[:-1])
    first = model.search(function, *sizes, lengths=np.minimum(model.lengths, 5), state=start, **options)
    later = np.concatenate([model.encoder[:, 5:], np.zeros_like(model.encoder[:, :5])], 1)
    second = model.search(function, *sizes, encoder=later, lengths=model.lengths - 5, state=first.state, **options)
    seen = 0
    for index in np.ndindex(whole.counts.shape):
        n = whole.counts[index]
        found = whole.label_confidences[index]
        labels, frames = whole.labels[index][:n].tolist(), whole.frames[index][:n].tolist()
        expected = [*expected_confidences(model, index[0], labels, frames, entropy)]
        np.testing.assert_allclose(found[:n], expected, rtol=1e-9, atol=EXACT)
        assert (found[n:] == 0).all()
        seen += n
        parts = (first, second) if function is decoding.greedy else (second,)
        assert_same(np.concatenate([x.label_confidences[index][: x.counts[index]] for x in parts]), found[:n])
    assert seen > 20
    one = select(first.state, np.array([4]))
    assert len(jax.tree.leaves(one)) == len(jax.tree.leaves(first.state))


@pytest.mark.slow
@pytest.mark.parametrize(("function", "sizes"), [(decoding.greedy, (16,)), (decoding.beam, (16, 4))])
def test_off_costs_nothing(function, sizes, monkeypatch):
    """Without it no entropy is computed, and the state of no search has a number more."""
    model = Model(family.TDT, batch=9)
    on = model.idle(function, *sizes, confidence=decode.Entropy())

    def never(*_):
        raise AssertionError("an entropy was computed")

    monkeypatch.setattr(decode.Entropy, "confidence", never)
    off = model.idle(function, *sizes, confidence=None)
    numbers = [sum(x.size for x in jax.tree.leaves(tree)) for tree in (on, off)]
    assert (numbers[0] > numbers[1]) if function is decoding.beam else (numbers[0] == numbers[1])
    with pytest.raises(AssertionError, match="was computed"):
        model.idle(function, *sizes, confidence=decode.Entropy("renyi"))


# ------------------------------------------------------------------------------------------------------- bad options


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decode.Entropy("shannon"), "Entropy: kind must be .*'tsallis', 'renyi', 'gibbs'.*got 'shannon'"),
        (lambda: decode.Entropy(exponent=0), "Entropy: exponent must be a known number, .* above 0, got 0"),
        (lambda: decode.Entropy(exponent=np.inf), "Entropy: exponent must be .* got inf"),
        (lambda: decode.Entropy(exponent="1"), "Entropy: exponent must be a"),
        (lambda: jax.jit(lambda x: decode.Entropy(exponent=x) and x)(1.0), "Entropy: exponent must be a known number"),
        (lambda: decode.Entropy("gibbs", 1.5), "Entropy: exponent must be 1 or less for Gibbs.*got 1.5"),
        (lambda: decode.Entropy(normalization="exp"), "Entropy: normalization must be .*got 'exp'"),
        (
            lambda: Model(family.RNNT).search(decoding.greedy, 4, confidence="entropy"),
            "Search: confidence must be an Entropy or None, got 'entropy'",
        ),
    ],
)
def test_bad_options(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
