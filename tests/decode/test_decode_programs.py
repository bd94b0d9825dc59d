"""Do decoders run in parts and on devices, with losses of one's own, and do they tell bad input?"""

import functools
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import decoding
import family
import jax_rnnt
import reference_numpy as truth
from decoding import EXACT, LABELS, MOST, NAMED, H, Model, T, TwoStepLoss, assert_same, stateless, trimmed
from jax_rnnt import DecodingRules, LinearJoint, RNNTLoss, decode, lattices

SEARCHES = [(decoding.greedy, (40,)), (decoding.beam, (40, 11))]  # 3 * 11 rows are packed
BOTH = pytest.mark.parametrize(("function", "sizes"), SEARCHES, ids=["greedy", "beam"])


def run(function=decoding.greedy, sizes=(MOST,), model=None, **changes):
    """A search by the networks and arrays of a model, with some changed."""
    model = model or Model(family.RNNT)
    names = "loss", "joint", "predictor", "encoder_out", "lengths"
    first = zip(names, (*model.networks, model.encoder, model.lengths))
    return function(*(changes.pop(name, x) for name, x in first), *sizes, **changes)


# -------------------------------------------------------------------------------------------------------- streams


UNMERGED = functools.partial(decoding.beam, merge=False)
MORE = {"tdt124": family.tdt((1, 2, 4))}
ENDS = [
    ("tdt124", UNMERGED, (12, 4)),
    family.slow("monotonic_final_blank", decoding.beam, (12, 4)),
    family.slow("multiblank", decoding.greedy, (90,)),
]


@pytest.mark.parametrize(("late", "function", "sizes"), ENDS)
def test_exact_end_of_a_stream(late, function, sizes):
    """Bit for bit the whole utterance at once, or NaN where an earlier part has read beyond the end."""
    frames, batch, kept = 9, 12, 0
    model = Model((NAMED | MORE)[late], batch=batch, frames=frames)
    model.lengths = np.random.default_rng(1).integers(5, frames + 1, batch).astype(np.int32)
    part = lambda x, n, ends, state: run(function, sizes, model, encoder_out=x, lengths=n, exact_end=ends, state=state)
    # Without a state, for its shapes; and for all parts.
    compiled, everyone = jax.jit(chex.assert_max_traces(part, n=2)), np.ones(batch, bool)
    shapes = jax.eval_shape(compiled, model.encoder, model.lengths, everyone, None).state
    start = decode.reset_streams(shapes, everyone)  # so that all parts run in one program
    whole = compiled(model.encoder, model.lengths, everyone, start)
    for cut in (3, 4, 5):
        rest, ends = np.maximum(model.lengths - cut, 0), model.lengths <= cut
        later = np.zeros_like(model.encoder)
        later[:, : frames - cut] = model.encoder[:, cut:]
        one = compiled(model.encoder, np.minimum(model.lengths, cut), ends, start)
        two = compiled(later, rest, ~ends, one.state)
        good = ~np.isnan(np.asarray(two.scores).reshape(batch, -1)).any(-1)
        assert (good | (rest < 4)).all()  # no move reads further
        assert_same(np.asarray(two.scores)[good], np.asarray(whole.scores)[good])
        if function is not decoding.greedy:
            assert_same(*jax.tree.map(lambda x: np.asarray(x)[good], (two[:-1], whole[:-1])))
        if (late, function) == ("tdt124", UNMERGED) and not good.all() and cut == 5:
            with pytest.raises(ValueError, match="exact_end must be False, or True for utterances whose last part has"):
                part(later, rest, True, one.state)
        kept += good.sum()
    assert kept > batch


@pytest.mark.quick("greedy")
@BOTH
def test_padding_and_batch(function, sizes):
    """What stands outside the lengths, and other utterances, change no bit; an empty utterance is empty."""
    model = Model(family.TDT, batch=3, frames=13)
    model.lengths = np.array([9, 5, 0], np.int32)
    whole = model.search(function, *sizes)
    encoder = model.encoder.copy()
    encoder[np.arange(13) >= model.lengths[:, None]] = np.nan
    assert_same(model.search(function, *sizes, encoder=encoder)[:-1], whole[:-1])
    others = model.search(function, *sizes, encoder=encoder[[2, 1, 1]], lengths=model.lengths[[2, 1, 2]])
    of_one = jax.tree.map(lambda x: x[1], (others[:-1], whole[:-1]))
    assert_same(*of_one)
    empty = whole.scores[2].ravel()
    assert empty[0] == 0 and (empty[1:] == -np.inf).all() and (whole.counts[2] == 0).all()


@pytest.mark.quick("greedy-None-2-0", "greedy-None-0-3")
@pytest.mark.parametrize(("batch", "frames"), [(2, 0), (0, 3)])
@pytest.mark.parametrize(("function", "width"), [(decoding.greedy, None), (decoding.beam, 40)])
def test_nothing_to_decode(batch, frames, function, width):
    """No frames: one empty hypothesis of score 0. No utterances: empty arrays."""
    model = Model(family.TDT)
    encoder, lengths = model.encoder[:batch, :frames], np.minimum(model.lengths, frames)[:batch]
    found = model.search(function, MOST, *([width] if width else []), encoder=encoder, lengths=lengths)
    shape = (batch, width) if width else (batch,)
    assert found.labels.shape == (*shape, MOST) and (found.counts == 0).all()
    expected = np.where(np.arange(width or 1) == 0, 0, -np.inf)
    np.testing.assert_array_equal(found.scores, np.broadcast_to(expected, (batch, width or 1)).reshape(shape))


# ------------------------------------------------------------------------------------------- devices and dtypes


def test_bfloat16():
    """Scores are float32."""
    model, dtype = Model(family.RNNT), jnp.bfloat16
    joint = LinearJoint(jnp.asarray(model.parameters.weight, dtype))
    search = lambda x: run(joint=joint, predictor=stateless(model, dtype), encoder_out=x)
    found = jax.jit(search)(jnp.asarray(model.encoder, dtype))
    assert found.scores.dtype == jnp.float32 and np.isfinite(found.scores).all()


def test_known_lengths_under_jit():
    """Arrays of JAX that a program closes over are checked."""
    model = Model(family.RNNT)
    search = lambda n: jax.jit(lambda x: run(encoder_out=x, lengths=n)[:-1])(model.encoder)
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, 3\], .* got \[4, 0\]"):
        search(jnp.asarray([T + 1, 0]))


# ------------------------------------------------------------------------------------------- losses of one's own


class SteppedLoss(TwoStepLoss):
    def compose(self):
        return jax_rnnt.Composition(super().compose().emission, steps=(lambda planes, *lengths: planes,))


class KnownLoss(SteppedLoss):
    def decoding(self):
        return DecodingRules(self.compose().emission)


class Blankless(jax_rnnt.HATLoss):
    """Changes the arcs of a loss that says what its classes mean."""

    def compose(self):
        return jax_rnnt.Composition(super().compose().emission, steps=(lambda planes, *lengths: planes,))


@pytest.mark.slow
def test_a_loss_of_ones_own():
    """Its arcs are its moves; steps need rules, and those of another loss will not do."""
    model = Model(family.RNNT)
    options = dict(loss=TwoStepLoss(), exact_end=True, max_symbols=MOST)
    found = jax.tree.map(np.asarray, jax.jit(lambda: run(decoding.beam, (MOST, 64), model, **options))())
    labels, *_ = trimmed(found, 0, 0)
    rows = np.array([[model.logits(0, t, labels[:u]) for u in range(len(labels) + 1)] for t in range(T)])
    arcs, _ = truth.softmax_emission(rows, np.append(labels, -1).astype(int), blank=LABELS)
    value = truth.log_likelihood((*truth.STANDARD, truth.Arc("blank", 2, 0)), arcs, T, len(labels))
    np.testing.assert_allclose(found.scores[0, 0], value, rtol=EXACT)
    assert KnownLoss().decoding() == RNNTLoss().decoding()
    with pytest.raises(TypeError, match=r"SteppedLoss lacks decoding\(\), which returns its DecodingRules"):
        run(loss=SteppedLoss())
    with pytest.raises(TypeError, match=r"greedy: Blankless lacks decoding\(\), as its compose\(\) changes .* HATLoss"):
        run(loss=Blankless())


def test_one_door_to_the_library():
    """`decode._model` alone imports private modules of losses, layouts, emissions and lattices."""
    package = pathlib.Path(jax_rnnt.__file__).parent
    files = [path for folder in ("decode", "flax") for path in (package / folder).rglob("*.py")]
    private = re.compile(r"jax_rnnt\.(losses|layouts|emissions|lattices)(\._\w| import .*\b_\w)")
    assert [path.name for path in files if private.search(path.read_text())] == ["_model.py"]


# ----------------------------------------------------------------------------------------------------- bad input


def broken(initial=None, row=lambda x: x, state=lambda x: x):
    """The predictor of a model, broken in one place."""
    good = Model(family.RNNT).parameters.predictor

    def step(before, labels):
        rows, after = good.step(before, labels)
        return row(rows), state(after)

    return decode.Predictor(initial or good.initial, step)


ERRORS = [
    (dict(loss=lambda: 0), TypeError, "loss must be a TransducerLoss, got .*, which lacks a method deco"),
    (dict(lengths=[T + 1, 1]), ValueError, r"lengths must lie in \[0, 3\], as .* 3 frames, got"),
    (dict(lengths=[1]), ValueError, "lengths must have shape"),
    (dict(encoder_out=np.zeros((T, H)), lengths=[]), ValueError, "encoder_out must have shape"),
    (dict(predictor=broken(state=lambda x: x[:, 1:])), ValueError, r"state is float64 \(2, 4\), got .*2, 3\)"),
    (dict(predictor=broken(state=lambda x: (x, x))), ValueError, "must keep the structure of its state"),
    (dict(predictor=broken(lambda batch: jnp.zeros(3))), ValueError, r"arrays \[2, ...\], got \(3,\)"),
    (dict(predictor=broken(row=lambda x: x[0])), ValueError, r"must make rows \[B, P\]"),
    (
        dict(predictor=lambda: 0),
        TypeError,
        "predictor must have the methods initial.*no initial and no step",
    ),
    (dict(joint=lambda e, p: e[0]), ValueError, r"joint must make logits \[N, V\]"),
    (dict(state=(1, 2)), TypeError, r"state must be Hypotheses.state of .* by greedy, got \(1, 2\)"),
    (dict(exact_end=1), TypeError, "exact_end must be True or False"),
    (dict(exact_end=np.ones(3, bool)), TypeError, r"exact_end .* bool \[B\] with B = 2, got bool \(3,\)"),
]


@pytest.mark.parametrize(("given", "error", "message"), ERRORS, ids=[x[2].split(" ")[0] for x in ERRORS])
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        run(**given)


class RulesOf(jax_rnnt.TransducerLoss):
    rules: object = jax_rnnt._pytree.static(None)

    def decoding(self):
        return self.rules


SOFTMAX = jax_rnnt.emissions.Softmax((0,))
RULES = {
    "must return DecodingRules, got None": lambda: None,
    "lacks an arc without a label": lambda: DecodingRules(SOFTMAX, lattices.STANDARD[1:]),
    "lacks an arc with a label": lambda: DecodingRules(SOFTMAX, lattices.STANDARD[:1]),
    "must have the slot of a blank": lambda: DecodingRules(SOFTMAX, (*lattices.STANDARD, lattices.Arc("bypass", 0, 1))),
    "the slot of a duration": lambda: DecodingRules(SOFTMAX, (lattices.Arc("blank", 1, 0, other="duration+0"),)),
    "DecodingRules: emission must be an emissions.Softmax": lambda: DecodingRules(None),
    "labels_per_frame must be 1 or more, got 0": lambda: DecodingRules(SOFTMAX, labels_per_frame=0),
    "labels_per_frame must be an integer .*, got True": lambda: DecodingRules(SOFTMAX, labels_per_frame=True),
    "DecodingRules: topology must be a sequence of": lambda: DecodingRules(SOFTMAX, ()),
    "topology must be a sequence of": lambda: DecodingRules(SOFTMAX, {*lattices.STANDARD}),
    "arc_weights must hold one number for each of the 2 arcs": lambda: DecodingRules(SOFTMAX, arc_weights=[0.0]),
    "arc_weights must be a sequence of numbers, got 1.0": lambda: DecodingRules(SOFTMAX, arc_weights=1.0),
    r"arc_weights\[1\] must be a real number, got None": lambda: DecodingRules(SOFTMAX, arc_weights=(0, None)),
    "must be a sequence of": lambda: DecodingRules(SOFTMAX, lattices.STANDARD[0]),
}


@pytest.mark.parametrize("message", RULES)
def test_rules(message):
    with pytest.raises((TypeError, ValueError), match=message):
        run(loss=RulesOf(rules=RULES[message]()))


@pytest.mark.quick("beam", "greedy")
@BOTH
def test_bad_data_spoils_itself_alone(function, sizes):
    """A traced length out of range, NaN or +inf of the blank or of a label: the score of that utterance is NaN."""
    predictor = decode.stateless_predictor(lambda labels: labels.astype(float), 2, start=3)
    joint = lambda encoder, rows: encoder + rows @ jnp.ones((2, 4)) / 9
    loss = RNNTLoss(fused_log_softmax=False)  # no softmax mixes these scores
    search = jax.jit(lambda x, n: function(loss, joint, predictor, x, n, *sizes, max_symbols=2)[:-1])
    encoder, lengths = np.random.default_rng(0).normal(0, 1, (8, 4, 4)), np.array([4, 4, 4, 4, 4, 5, -1, 4])
    wrong = encoder.copy()
    wrong[[1, 2], 2, [3, 0]], wrong[[3, 4], 2, [3, 0]] = np.nan, np.inf
    expected, found, good = search(encoder, np.full(8, 4)), search(wrong, lengths), np.array([0, 7])
    assert_same(*jax.tree.map(lambda x: x[good], (found, expected)))
    assert np.isfinite(expected[4].reshape(8, -1)[:, 0]).all()
    *labels, counts, scores, log_probs, full, stable = (np.asarray(x[1:7]) for x in jax.tree.leaves(found))
    assert np.isnan(scores).all() and (counts == 0).all() and not full.any() and all((x == -1).all() for x in labels)
    assert (log_probs == 0).all() and (stable == 0).all()


@pytest.mark.quick("greedy")
@BOTH
def test_dead_ends(function, sizes):
    """No path of the lattice: the score is -inf, there are no labels, and the search ends."""
    model = Model(family.tdt((2,)), batch=40)
    model.lengths = np.array([3, 2] * 20, np.int32)
    found, open_end = (model.search(function, *sizes, exact_end=np.full(40, x)) for x in (True, False))
    odd = model.lengths == 3
    scores = found.scores.reshape(40, -1)
    assert (scores[odd] == -np.inf).all() and np.isfinite(scores[~odd, 0]).all()
    assert (found.counts[odd] == 0).all() and all((x[odd] == -1).all() for x in found[:3])
    assert open_end.counts[odd].max() > 0  # some have written a label before they meet it
