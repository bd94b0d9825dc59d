"""Options of the searches, in one table: which verbs take them, and numbers in and out of their ranges."""

import dataclasses
import functools
import math
import re
import sys
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decoding
import family
from decoding import EXACT, MOST, Model, assert_same
from jax_rnnt import DecodingRules, HATLoss, MonotonicRNNTLoss, RNNTLoss, TDTLoss, TransducerLoss, decode, lattices
from jax_rnnt.decode import _options

SMALLEST, LARGEST = sys.float_info.min, sys.float_info.max  # floats, as the other values: one program takes all
NOT_FINITE = (math.nan, math.inf, -math.inf)


class Weighted(TransducerLoss):
    """RNN-T whose label arc has a weight."""

    weight: float | jax.Array = 0.0

    def compose(self):
        return RNNTLoss(self.blank).compose()

    def decoding(self):
        return DecodingRules(self.compose().emission, lattices.STANDARD, arc_weights=(0.0, self.weight))


class Option(typing.NamedTuple):
    """An option or argument: verbs that take it, another value than the default, numbers in its range and beyond."""

    verbs: str
    other: typing.Any = None
    valid: tuple = ()
    wrong: tuple = ()


ALL, LARGE = "greedy beam sample", (-1e300, 0.0, 0.3, 1e300)
CLASSES = jnp.arange(Model(family.TDT).tokens, dtype=float)[None]
LM = decode.Predictor(lambda batch: (), lambda state, labels: (jnp.sin(labels[:, None].astype(float) + CLASSES), state))
OPTIONS = {  # fields of a `Search`, in their order
    "max_symbols": Option(ALL, 3),
    "fusion": Option(ALL, ((decode.Labels([True] * CLASSES.size), 0.5),)),
    "ilm_weight": Option("greedy beam", 0.1, LARGE, NOT_FINITE),
    "blank_penalty": Option("greedy beam", 0.1, LARGE, NOT_FINITE),
    "temperature": Option(ALL, 1.5, (SMALLEST, 1.0, 1.7, LARGEST), (0.0, -1.0, SMALLEST / 4, *NOT_FINITE)),
    "blank_threshold": Option("greedy beam", 0.9, (1.0, 0.0, 0.9), (-0.1, 1.5, *NOT_FINITE)),
    "duration_choice": Option("greedy", "token_first"),
    "guard": Option("greedy beam"),
    "confidence": Option("greedy beam", decode.Entropy()),
    "start": Option(ALL, 0),
}
ARGUMENTS = {  # of the verbs, of fusion and of losses
    "weight": Option("greedy beam", None, LARGE, NOT_FINITE),
    "threshold": Option("beam", None, (0.0, 3.0, math.inf), (-SMALLEST, -1.0, -math.inf, math.nan)),
    "length_norm": Option("beam", None, LARGE, NOT_FINITE),
    "top_p": Option("sample", None, (1.0, SMALLEST, 0.7), (0.0, -0.5, 1.5, *NOT_FINITE)),
    "arc_weights": Option(ALL, None, (-math.inf, 0.0, 0.2, 1e300), (math.nan, math.inf)),
    "max_labels": Option(ALL),
    "width": Option("beam"),
    "frames_at_once": Option(ALL, 2),
    "samples": Option("sample"),
}
SHOWN = {"weight": "fusion[0] weight", "arc_weights": "Weighted.decoding() arc_weights[1]"}  # in errors
TAKEN = [(verb, name) for name, x in (OPTIONS | ARGUMENTS).items() for verb in x.verbs.split()]
PAIRS = [(verb, name) for verb, name in TAKEN if (OPTIONS | ARGUMENTS)[name].valid]
SEARCHES = {
    "greedy": decoding.greedy,
    "beam": functools.partial(decoding.beam, width=4),
    "sample": functools.partial(decoding.sample, key=jax.random.key(0), samples=3),
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


def ordinary(verb):
    """A value of each number with which a search finds labels."""
    usual = {"temperature": 1.7, "threshold": 9.0, "blank_threshold": 0.95}
    return {name: usual.get(name, 0.3) for x, name in PAIRS if x == verb}


def test_the_table_is_complete():
    """A new option is an error where a verb does not take it, and each number with a range is tried."""
    assert [*OPTIONS] == [field.name for field in dataclasses.fields(decode.Search) if field.kw_only]
    of_guard = {x.name for x in dataclasses.fields(decode.Guard)}  # test_guard.py tries them
    assert {*OPTIONS, *ARGUMENTS, *of_guard, "top_k"} >= {*_options.RANGES}


# ------------------------------------------------------------------------------------------- what a verb takes


def of_verb(verb, options, *arrays):
    model = Model(family.TDT)
    networks = model.loss.value(), model.parameters.joint, model.parameters.predictor
    return SEARCHES[verb](*networks, *(arrays or (model.encoder, model.lengths)), max_labels=4, **options)


def program(verb, **options):
    model = Model(family.TDT)
    return str(jax.make_jaxpr(lambda *arrays: of_verb(verb, options, *arrays))(model.encoder, model.lengths))


@functools.cache
def usual(verb):
    return program(verb)


@pytest.mark.parametrize(("verb", "name"), [(v, x) for v in SEARCHES for x in OPTIONS if (v, x) not in TAKEN])
def test_no_option_is_ignored(verb, name):
    """One that a verb does not use is an error that names it, static or traced."""
    message = f"^{verb}: {name} must be left out, as it changes nothing here, got "
    with pytest.raises(ValueError, match=message):
        of_verb(verb, {name: OPTIONS[name].other})
    if isinstance(OPTIONS[name].other, float):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda x: of_verb(verb, {name: x}), jnp.float32(0))


# Of other options of greedy and beam search, their tests know what they change.
FEW = [("greedy", "frames_at_once"), *(x for x in TAKEN if x[0] == "sample" and x[1] in OPTIONS)]


@pytest.mark.parametrize(("verb", "name"), FEW)
def test_other_options_change_the_program(verb, name):
    assert program(verb, **{name: (OPTIONS | ARGUMENTS)[name].other}) != usual(verb)


# ------------------------------------------------------------------------------------------------------ numbers


def test_top_k():
    """The one number that is an integer and may be traced."""
    scores = jax.jit(lambda top_k: search("sample", {}, top_k=top_k).scores)
    for value in (1, MODEL.tokens, 2**31 - 1):
        assert not np.isnan(scores(value)).any(), value
    for value in (0, -3):
        assert np.isnan(scores(value)).all(), value
        with pytest.raises(ValueError, match=rf"sample: top_k must be 1 or more, got {value}\.$"):
            search("sample", {}, top_k=value)
    for value in (1.0, True, "1", jnp.float32(2)):
        with pytest.raises(TypeError, match="sample: top_k must be an integer, a scalar integer Array or None, got"):
            search("sample", {}, top_k=value)
    with pytest.raises(ValueError, match="sample: top_k must be a scalar, got shape"):
        search("sample", {}, top_k=np.array([1]))


@pytest.mark.quick("sample-temperature", "greedy-blank_penalty")
@pytest.mark.parametrize(("verb", "name"), PAIRS)
def test_traced(verb, name):
    """In the range there is no NaN; beyond it each score is NaN, and there are no labels."""
    option = (OPTIONS | ARGUMENTS)[name]
    for value in (*option.valid, *option.wrong):
        found = traced(verb)(ordinary(verb) | {name: value})
        if value in option.valid:
            assert not np.isnan(found.scores).any(), value
        else:
            assert np.isnan(found.scores).all() and (np.asarray(found.counts) == 0).all(), value


@pytest.mark.parametrize(("verb", "name"), PAIRS)
def test_static_errors(verb, name):
    """They name the search, the option, its range and the value."""
    wrong = (OPTIONS | ARGUMENTS)[name].wrong
    expected = re.escape(f"{verb}: {SHOWN.get(name, name)} must be {_options.RANGES[name].expected}")
    for value in (*wrong, jnp.asarray(wrong[-1])):
        with pytest.raises(ValueError, match=f"{expected}.*got {re.escape(repr(float(value)))}"):
            search(verb, ordinary(verb) | {name: value})
    for given, error in (("1", TypeError), (1j, TypeError), (True, TypeError), (np.ones(1), ValueError)):
        with pytest.raises(error, match=f"{name}.* must be a (real number|scalar), got"):
            search(verb, ordinary(verb) | {name: given})


@pytest.mark.quick("greedy")
@pytest.mark.parametrize("verb", SEARCHES)
def test_static_is_traced(verb):
    """The same labels and, up to rounding, the same scores, with all options at once."""
    numbers = {name: (OPTIONS | ARGUMENTS)[name].valid[2:3] or (0.7,) for x, name in PAIRS if x == verb}
    numbers = {name: x for name, (x,) in numbers.items()}
    static = jax.jit(lambda: search(verb, numbers))()
    found = traced(verb)(numbers)
    assert_same(static.labels, found.labels)
    np.testing.assert_allclose(static.scores, found.scores, rtol=EXACT)
    assert np.asarray(found.counts).max() > 0


COUNTS = "max_labels", "max_symbols", "width", "frames_at_once", "samples"


@pytest.mark.parametrize(("verb", "name"), [x for x in TAKEN if x[1] in COUNTS])
def test_counts(verb, name):
    """Integers that are known at trace time; sizes of arrays beyond int32 are refused before JAX meets them."""
    limits, function = ("max_symbols", "frames_at_once"), verb if name in COUNTS[2:] else "Search"
    large = [] if name in limits else [(2**31, ValueError, f"must lie in .* got {2**31}")]
    for value, error, message in (
        *large,
        (0, ValueError, "must be 1 or more, got 0"),
        (-(2**70), ValueError, f"must be 1 or more, got -{2**70}"),
        (1.0, TypeError, "must be an integer known at trace time, got 1.0"),
        (True, TypeError, "must be an integer known at trace time, got True"),
        (math.nan, TypeError, "must be an integer known at trace time, got nan"),
    ):
        with pytest.raises(error, match=f"{function}: {name} {message}"):
            search(verb, {}, **{name: value})


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
    few = {"max_symbols": MOST, "frames_at_once": MODEL.encoder.shape[1]}
    many, few = (jax.jit(lambda x=x: search("greedy", {}, **x))() for x in (dict.fromkeys(few, 2**70), few))
    assert_same(many, few)


def test_float32():
    """A number counts as it is in the dtype of scores."""
    predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2), jnp.float32), 1, start=0)
    arguments = RNNTLoss(0), jnp.add, predictor, jnp.zeros((1, 1, 2), jnp.float32), jnp.array([1]), 1
    run = jax.jit(lambda temperature: decoding.greedy(*arguments, temperature=temperature).scores)
    for value in (1e-40, 1e39):
        message = f"greedy: temperature must be finite and above 0 in float32, the dtype of scores, got {value!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            decoding.greedy(*arguments, temperature=value)
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
