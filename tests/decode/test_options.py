"""Numeric options of all searches: valid ones at both ends of their range, others, static and traced, in one table."""

import functools
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import family
from decoding import EXACT, MOST, Model, assert_same
from jax_rnnt import DecodingRules, HATLoss, MonotonicRNNTLoss, RNNTLoss, TDTLoss, TransducerLoss, decode, lattices
from jax_rnnt.decode.search import _options

SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max  # floats, as the other values: one program takes all
NOT_FINITE = (math.nan, math.inf, -math.inf)


class Weighted(TransducerLoss):
    """RNN-T whose label arc has a weight."""

    weight: float | jax.Array = 0.0

    def compose(self):
        return RNNTLoss(self.blank).compose()

    def decoding(self):
        return DecodingRules(self.compose().emission, lattices.STANDARD, arc_weights=(0.0, self.weight))


class Number:
    """An option: the name in `RANGES`, that in errors, what is in the range and what is not."""

    def __init__(self, name, valid, wrong, shown=None):
        self.name, self.valid, self.wrong, self.shown = name, valid, wrong, shown or name

    def __repr__(self):
        return self.name


PENALTY = Number("blank_penalty", (-1e300, 0.0, 0.4, 1e300), NOT_FINITE)
TEMPERATURE = Number("temperature", (SMALLEST, 1.0, 1.7, LARGEST), (0.0, -1.0, SMALLEST / 4, *NOT_FINITE))
WEIGHT = Number("weight", (-1e300, 0.0, 0.3, 1e300), NOT_FINITE, "fusion[0] weight")
INTERNAL = Number("ilm_weight", (-1e300, 0.0, 0.3, 1e300), NOT_FINITE)
THRESHOLD = Number("threshold", (0.0, 3.0, math.inf), (-SMALLEST, -1.0, -math.inf, math.nan))
SURE = Number("blank_threshold", (1.0, 0.0, 0.9), (-0.1, 1.5, *NOT_FINITE))
TOP_P = Number("top_p", (1.0, SMALLEST, 0.7), (0.0, -0.5, 1.5, *NOT_FINITE))
NORM = Number("length_norm", (-1e300, 0.0, 0.7, 1e300), NOT_FINITE)
ARC = Number("arc_weights", (-math.inf, 0.0, 0.2, 1e300), (math.nan, math.inf), "Weighted.decoding() arc_weights[1]")
FUSED = (WEIGHT, INTERNAL)
NUMBERS = {
    "greedy": (PENALTY, TEMPERATURE, SURE, ARC, *FUSED),
    "beam": (PENALTY, TEMPERATURE, SURE, ARC, *FUSED, THRESHOLD, NORM),
    "sample": (TEMPERATURE, TOP_P, ARC),
    "parallel": (PENALTY, TEMPERATURE, SURE, ARC),
}
COUNTS = {
    "greedy": ("max_labels", "max_symbols", "window"),
    "beam": ("max_labels", "max_symbols", "width", "frames_at_once"),
    "sample": ("max_labels", "max_symbols", "window", "samples"),
    "parallel": ("max_labels", "rounds"),
}
SEARCHES = {
    "greedy": decode.greedy,
    "beam": functools.partial(decode.beam, width=4),
    "sample": functools.partial(decode.sample, key=jax.random.key(0), samples=3),
    "parallel": functools.partial(decode.parallel, rounds=1),
}
MODEL = Model(family.RNNT)


def search(name, numbers, **counts):
    """The result of a search of `MODEL` with these {option: value}."""
    networks, given = (MODEL.parameters.joint, MODEL.parameters.predictor), dict(numbers)
    loss = Weighted(weight=given.pop("arc_weights", 0.0))
    if "weight" in given:
        step = lambda state, labels: (
            jnp.cos(labels[:, None].astype(float) + jnp.arange(MODEL.tokens, dtype=float)[None]),
            state,
        )
        given["fusion"] = ((decode.Predictor(lambda batch: (), step), given.pop("weight")),)
    options = dict(max_labels=MOST) | given | counts
    return SEARCHES[name](loss, *networks, MODEL.encoder, MODEL.lengths, **options)._replace(state=None)


@functools.cache
def traced(name):
    """One program for all values of all options."""
    return jax.jit(functools.partial(search, name))


def ordinary(name):
    """A value of each option with which a search finds labels."""
    usual = {"temperature": 1.7, "threshold": 9.0, "blank_threshold": 0.95}
    return {option.name: usual.get(option.name, 0.3) for option in NUMBERS[name]}


def test_the_table_is_complete():
    """Every option that has a range is tried in each search that takes it."""
    tried = {option.name for options in NUMBERS.values() for option in options} | {
        x for y in COUNTS.values() for x in y
    }
    assert tried | {"top_k"} == {*_options.RANGES}


def test_top_k():
    """The one number that is an integer and may be traced."""
    scores = jax.jit(lambda top_k: search("sample", {}, top_k=top_k).scores)
    for value in (1, MODEL.tokens, 2**31 - 1):
        assert not np.isnan(scores(value)).any(), value
    for value in (0, -3):
        assert np.isnan(scores(value)).all(), value
        with pytest.raises(ValueError, match=f"sample: top_k must be 1 or more, got {value}"):
            search("sample", {}, top_k=value)
    for value in (1.0, True, "1", jnp.float32(2)):
        with pytest.raises(TypeError, match="sample: top_k must be an integer, a scalar integer Array or None, got"):
            search("sample", {}, top_k=value)
    with pytest.raises(ValueError, match="sample: top_k must be a scalar, got shape"):
        search("sample", {}, top_k=np.array([1]))


PAIRS = [(name, option) for name, options in NUMBERS.items() for option in options]


@pytest.mark.quick("sample-temperature", "greedy-blank_penalty")
@pytest.mark.parametrize(("name", "option"), PAIRS, ids=str)
def test_traced(name, option):
    """In the range there is no NaN; beyond it each score is NaN, and there are no labels."""
    for value in (*option.valid, *option.wrong):
        found = traced(name)(ordinary(name) | {option.name: value})
        if value in option.valid:
            assert not np.isnan(found.scores).any(), value
        else:
            assert np.isnan(found.scores).all() and (np.asarray(found.counts) == 0).all(), value


@pytest.mark.parametrize(("name", "option"), PAIRS, ids=str)
def test_static_errors(name, option):
    """They name the search, the option, its range and the value."""
    expected = re.escape(f"{name}: {option.shown} must be {_options.RANGES[option.name].expected}")
    for value in (*option.wrong, jnp.asarray(option.wrong[-1])):
        with pytest.raises(ValueError, match=f"{expected}.*got {re.escape(repr(float(value)))}"):
            search(name, ordinary(name) | {option.name: value})
    for given, error in (("1", TypeError), (1j, TypeError), (True, TypeError), (np.ones(1), ValueError)):
        with pytest.raises(error, match=f"{option.name}.* must be a (real number|scalar), got"):
            search(name, ordinary(name) | {option.name: given})


@pytest.mark.quick("greedy")
@pytest.mark.parametrize("name", SEARCHES)
def test_static_is_traced(name):
    """The same labels and, up to rounding, the same scores, with all options at once."""
    numbers = {option.name: option.valid[min(2, len(option.valid) - 1)] for option in NUMBERS[name]}
    static = jax.jit(lambda: search(name, numbers))()
    found = traced(name)(numbers)
    assert_same(static.labels, found.labels)
    np.testing.assert_allclose(static.scores, found.scores, rtol=EXACT)
    assert np.asarray(found.counts).max() > 0


@pytest.mark.parametrize(("name", "option"), [(name, x) for name, counts in COUNTS.items() for x in counts])
def test_counts(name, option):
    """Integers that are known at trace time; sizes of arrays beyond int32 are refused before JAX meets them."""
    least = 0 if option == "rounds" else 1
    large = [] if option in _options.LIMITS else [(2**31, ValueError, f"must lie in .* got {2**31}")]
    for value, error, message in (
        *large,
        (least - 1, ValueError, f"must be {least} or more, got {least - 1}"),
        (-(2**70), ValueError, f"must be {least} or more, got -{2**70}"),
        (1.0, TypeError, "must be an integer known at trace time, got 1.0"),
        (True, TypeError, "must be an integer known at trace time, got True"),
        (math.nan, TypeError, "must be an integer known at trace time, got nan"),
    ):
        with pytest.raises(error, match=f"{name}: {option} {message}"):
            search(name, {}, **{option: value})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["greedy", "beam"])
def test_durations_beyond_any_length(name):
    """They end the search of an utterance as a duration of 2^30 frames does; some exceed int64."""
    logits = 3 * np.random.default_rng(0).normal(size=(2, 7, 7))
    predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 7)), 1, start=0)
    call = functools.partial(SEARCHES[name], joint=jnp.add, predictor=predictor, max_labels=MOST)
    batch = {"encoder_out": logits, "lengths": np.array([7, 5])}
    results = [jax.jit(lambda n=n: call(TDTLoss((0, 1, n), blank=0), **batch)[:-1])() for n in (2**30, 2**64)]
    assert np.asarray(results[0][3]).max() > 0
    assert_same(*results)


def test_large_counts():
    """Limits may be as large as one likes; they are those of as many labels and frames as there are."""
    few = {"max_symbols": MOST, "window": MODEL.encoder.shape[1]}
    many, few = (jax.jit(lambda x=x: search("greedy", {}, **x))() for x in (dict.fromkeys(few, 2**70), few))
    assert_same(many, few)


def test_float32():
    """A number counts as it is in the dtype of scores."""
    predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2), jnp.float32), 1, start=0)
    arguments = RNNTLoss(0), jnp.add, predictor, jnp.zeros((1, 1, 2), jnp.float32), jnp.array([1]), 1
    run = jax.jit(lambda temperature: decode.greedy(*arguments, temperature=temperature).scores)
    for value in (1e-40, 1e39):
        message = f"greedy: temperature must be finite and above 0 in float32, the dtype of scores, got {value!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            decode.greedy(*arguments, temperature=value)
        assert np.isnan(run(value)).all()


# ------------------------------------------------------------------------------------- temperature, in closed form

FRAMES = np.array([[[0.5, 0.2, -0.3], [0.1, 0.7, 0.3], [0.6, 0.5, 0.9]]])  # the largest: blank, label 1, label 2
COLD = [("beam", "monotonic"), ("greedy", "tdt"), ("greedy", "hat")]


@pytest.mark.quick("greedy-tdt")
@pytest.mark.parametrize(("name", "kind"), COLD)
def test_cold(name, kind):
    """The most probable class of each frame has the probability 1, whatever the size of the logits: the score is 0.

    With static temperatures and traced ones, which agree in every bit; in one head, two, and with the blank apart.
    """
    loss = {"monotonic": MonotonicRNNTLoss(0), "tdt": TDTLoss((2, 1), 0), "hat": HATLoss(0, variant="monotonic")}[kind]
    rows = FRAMES.copy()
    if kind == "hat":
        rows[..., 0] = [0.5, -0.1, -0.6]
    elif kind == "tdt":  # the second duration, of one frame, is the more probable one
        rows = np.concatenate([rows, np.broadcast_to([0.1, 0.3], (1, 3, 2))], -1)
    rows = jnp.asarray(np.concatenate([rows, 1e4 * rows]), jnp.float32)
    zeros = lambda labels: jnp.zeros((len(labels), rows.shape[-1]), jnp.float32)
    predictor = decode.stateless_predictor(zeros, 1, start=0)
    arguments = loss, jnp.add, predictor, rows, jnp.array([3, 3]), 3
    run = lambda temperature: SEARCHES[name](*arguments, temperature=temperature)[:-1]
    traced = jax.jit(run)
    for temperature in (1e-10, float(np.finfo(np.float32).tiny)):
        found = traced(temperature)
        if temperature < 1e-10:
            assert_same(jax.jit(functools.partial(run, temperature))(), found)
        assert (np.asarray(found[4]).reshape(2, -1)[:, 0] == 0).all()
        assert np.asarray(found[0]).reshape(2, -1, 3)[:, 0].tolist() == [[1, 2, -1]] * 2
