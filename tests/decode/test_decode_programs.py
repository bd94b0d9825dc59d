"""Do decoders run in parts, on devices, with modules and losses of one's own, and do they tell bad input?"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_rnnt
import losses
import reference_numpy as truth
from decoding import (
    EXACT,
    LABELS,
    MOST,
    NAMED,
    ROOM,
    H,
    Model,
    T,
    assert_same,
    check_all,
    greedy_loop,
    stateless,
    trimmed,
)
from jax_rnnt import DecodingRules, LinearJoint, decode, lattices

# ------------------------------------------------------------------------------------------- streams and programs


STREAMED = [(decode.greedy, (40,)), (decode.beam, (40, 11))]  # 3 * 11 rows are packed
STREAMS = [
    pytest.param(losses.RNNT, *STREAMED[0], marks=pytest.mark.slow),
    (losses.TDT, *STREAMED[0]),
    (losses.TDT, *STREAMED[1]),
]


@pytest.mark.parametrize(("loss", "function", "sizes"), STREAMS, ids=["rnnt-greedy", "tdt-greedy", "tdt-beam"])
def test_streams(loss, function, sizes):
    """Parts of any lengths give bit for bit what the whole gives."""
    model = Model(loss, batch=3, frames=13)
    model.lengths = np.array([13, 11, 6], np.int32)
    whole = model.search(function, *sizes)
    assert whole.counts.max() > 4
    state, parts, start = None, [], 0
    for size in (4, 1, 0, 8):
        lengths = np.clip(model.lengths - start, 0, size).astype(np.int32)
        encoder = np.full_like(model.encoder, np.nan)
        encoder[:, :size] = model.encoder[:, start : start + size]
        parts.append(model.search(function, *sizes, encoder=encoder, lengths=lengths, state=state))
        state, start = parts[-1].state, start + size
    losses.assert_same_bits(parts[-1].scores, whole.scores)
    if function is decode.beam:
        assert_same(parts[-1][:6], whole[:6])
        return
    for b in range(3):
        joined = [[*itertools.chain(*rows)] for rows in zip(*(trimmed(part, b) for part in parts))]
        assert joined == trimmed(whole, b)


@pytest.mark.parametrize(("function", "sizes"), STREAMED, ids=["greedy", "beam"])
def test_padding_and_batch(function, sizes):
    """What stands outside the lengths, and other utterances, change no bit; an empty utterance is empty."""
    model = Model(losses.TDT, batch=3, frames=13)
    model.lengths = np.array([9, 5, 0], np.int32)
    whole = model.search(function, *sizes)
    encoder = model.encoder.copy()
    encoder[np.arange(13) >= model.lengths[:, None]] = np.nan
    assert_same(model.search(function, *sizes, encoder=encoder)[:6], whole[:6])
    others = model.search(function, *sizes, encoder=encoder[[2, 1, 1]], lengths=model.lengths[[2, 1, 2]])
    assert_same([x[1] for x in others[:6]], [x[1] for x in whole[:6]])
    empty = whole.scores[2].ravel()
    assert empty[0] == 0 and (empty[1:] == -np.inf).all() and (whole.counts[2] == 0).all()


def check_truth(model, found, function):
    """Greedy search is the plain loop, a wide beam the enumeration."""
    found = decode.Hypotheses(*map(np.asarray, found), None)
    if function is decode.beam:
        check_all(model, found, **SPLIT[function][1])
        return
    for b in range(len(found.scores)):
        *expected, score = greedy_loop(model, b, **SPLIT[function][1])
        assert trimmed(found, b) == expected
        np.testing.assert_allclose(found.scores[b], score, rtol=EXACT)


SPLIT = {
    decode.greedy: ((ROOM,), {"exact_end": True, "max_symbols": 3}),
    decode.beam: ((MOST, 64), {"exact_end": True, "max_symbols": MOST}),
}


def split_problem(devices, function):
    """(model, sharding, arrays that are split over devices, a search in them)."""
    model, (sizes, options) = Model(losses.TDT, batch=16), SPLIT[function]
    split = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    arrays = [jax.device_put(x, split) for x in (model.encoder, model.lengths)]
    networks = model.parameters.joint, model.parameters.predictor
    return model, split, arrays, lambda *x: function(model.loss.value(), *networks, *x, *sizes, **options)[:6]


@pytest.mark.parametrize("function", [decode.greedy, pytest.param(decode.beam, marks=pytest.mark.slow)])
def test_sharded_batch(devices, function):
    """Under jit the result stays sharded."""
    model, split, arrays, search = split_problem(devices, function)
    found = jax.jit(search, out_shardings=split)(*arrays)
    assert all(x.sharding.is_equivalent_to(split, x.ndim) for x in found)
    check_truth(model, found, function)


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="needs jax.shard_map")
@pytest.mark.parametrize("function", [decode.greedy, decode.beam])
def test_shard_map(devices, function):
    """Nothing is exchanged."""
    model, split, arrays, search = split_problem(devices, function)
    each = jax.jit(jax.shard_map(search, mesh=split.mesh, in_specs=split.spec, out_specs=split.spec))
    check_truth(model, each(*arrays), function)
    assert not losses.collectives(each.lower(*arrays).compile().as_text())


def test_bfloat16():
    """Scores are float32."""
    model, dtype = Model(losses.RNNT), jnp.bfloat16
    encoder, weight = jnp.asarray(model.encoder, dtype), jnp.asarray(model.parameters.weight, dtype)
    networks = LinearJoint(weight), stateless(model, dtype)
    found = jax.jit(lambda *x: decode.greedy(jax_rnnt.RNNTLoss(), *networks, *x, MOST))(encoder, model.lengths)
    assert found.scores.dtype == jnp.float32 and np.isfinite(found.scores).all()


def test_predict_makes_the_decoder_s_rows():
    model = Model(losses.RNNT)
    targets = np.array([[0, 1, 1], [1, 0, 0]], np.int32)
    rows = decode.predict(model.parameters.predictor, targets, start=model.tokens - 1)
    for b, u in np.ndindex(2, 4):
        np.testing.assert_allclose(rows[b, u], model.row(targets[b, :u]), rtol=EXACT)
    rows = decode.predict(stateless(model), targets, start=model.tokens - 1)
    np.testing.assert_allclose(rows[0, 2], model.parameters.embed[0] + model.parameters.embed[1], rtol=EXACT)


# ------------------------------------------------------------------------------------------------------- modules


def test_modules_of_flax():
    """Both kinds of modules decode as plain functions do; dropout is off."""
    nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
    model = Model(losses.RNNT)

    class Nnx(nnx.Module):
        def __init__(self):
            self.embed, self.mix = (
                nnx.Param(jnp.asarray(model.parameters.embed)),
                nnx.Param(jnp.asarray(model.parameters.mix)),
            )
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def initial(self, batch):
            return jnp.zeros((batch, H))

        def step(self, state, labels):
            state = jnp.tanh(state @ self.mix[...]) + self.embed[...][labels]
            return self.dropout(state), state

    class Linen(nn.Module):
        def initial(self, batch):
            return jnp.zeros((batch, H))

        @nn.compact
        def step(self, state, labels):
            embed, mix = (self.param(n, lambda key, x=x: jnp.asarray(x)) for n, x in zip("em", model.parameters))
            state = jnp.tanh(state @ mix) + embed[labels]
            return state, state

    expected = model.search(decode.greedy, MOST)
    variables = {"params": dict(zip("em", map(jnp.asarray, model.parameters)))}
    module = Nnx()
    for predictor in (decode.nnx_predictor(module), decode.linen_predictor(Linen(), variables)):
        call = lambda *x, predictor=predictor: decode.greedy(
            jax_rnnt.RNNTLoss(), model.parameters.joint, predictor, *x, MOST
        )
        assert_same(jax.jit(call)(model.encoder, model.lengths)[:6], expected[:6])
    assert not module.dropout.deterministic  # the module itself is as it was


# ------------------------------------------------------------------------------------------- losses of one's own


class TwoStepLoss(jax_rnnt.TransducerLoss):
    """One blank that reads a frame or two."""

    def compose(self):
        arcs = (*lattices.STANDARD, lattices.Arc("blank", 2, 0))
        return jax_rnnt.Composition(jax_rnnt.emissions.Softmax((self.blank,), self.fused_log_softmax), arcs)


class SteppedLoss(TwoStepLoss):
    price: float = 1.0

    def compose(self):
        return jax_rnnt.Composition(super().compose().emission, steps=(lambda planes, num_frames: planes,))


class KnownLoss(SteppedLoss):
    def decoding(self):
        return DecodingRules(self.compose().emission)


def run(loss, model=None, function=decode.greedy, sizes=(MOST,), joint=None, predictor=None, **options):
    model = model or Model(losses.RNNT)
    arrays = [options.pop(name, getattr(model, name)) for name in ("encoder", "lengths")]
    return function(
        loss, joint or model.parameters.joint, predictor or model.parameters.predictor, *arrays, *sizes, **options
    )


def test_a_loss_of_ones_own():
    """Its arcs are its moves; steps need rules."""
    model = Model(losses.RNNT)
    planes = (*truth.STANDARD, truth.Arc("blank", 2, 0))
    found = jax.jit(lambda: run(TwoStepLoss(), model, decode.beam, (MOST, 64), exact_end=True, max_symbols=MOST))()
    labels, *_ = trimmed(jax.tree.map(np.asarray, found), 0, 0)
    rows = np.array([[model.logits(0, t, labels[:u]) for u in range(len(labels) + 1)] for t in range(T)])
    arcs, _ = truth.softmax_emission(rows, np.append(labels, -1).astype(int), blank=LABELS)
    value = truth.log_likelihood(planes, arcs, T, len(labels))
    np.testing.assert_allclose(found.scores[0, 0], value, rtol=EXACT)
    assert KnownLoss().decoding() == jax_rnnt.RNNTLoss().decoding()
    with pytest.raises(TypeError, match=r"SteppedLoss lacks decoding\(\), which returns its DecodingRules"):
        run(SteppedLoss())


def test_options_of_training_do_not_matter():
    """Decoders know a loss by its rules alone."""
    for name, trained in (
        ("rnnt", {"fastemit_lambda": 0.1, "delay_penalty": 0.5, "clamp": 1.0}),
        ("tdt", {"sigma": 0.5, "omega": 0.1, "fastemit_lambda": 0.1}),
        ("multiblank", {"sigma": 0.5}),
    ):
        assert NAMED[name].value(**trained).decoding() == NAMED[name].value().decoding()
    loss = NAMED["tdt"].value(sigma=0.5, omega=0.1, fastemit_lambda=0.1)
    model = Model(losses.TDT)
    # The window changes nothing but the pace.
    for x, y in zip(jax.jit(lambda: run(loss, model, window=1)[:6])(), model.search(decode.greedy, MOST)):
        np.testing.assert_allclose(x, y, rtol=EXACT)
    hat = jax_rnnt.HATLoss(topology="constrained").decoding()
    assert hat.labels_per_frame == 1 and hat.emission.bernoulli


# ----------------------------------------------------------------------------------------------------- bad input


def predictor_with(**changes):
    """The predictor of a model, broken in one place."""
    good = Model(losses.RNNT).parameters.predictor

    def step(state, labels):
        row, state = good.step(state, labels)
        return changes.get("row", lambda x: x)(row), changes.get("state", lambda x: x)(state)

    return decode.Predictor(changes.get("initial", good.initial), step)


WIDE = decode.Predictor(lambda batch: (), lambda state, labels: (jnp.zeros((len(labels), 7)), state))
ERRORS = {
    "not a loss": (dict(loss=lambda: 0), TypeError, "loss must be a TransducerLoss, got .*, which lacks a method deco"),
    "lengths": (dict(lengths=[T + 1, 1]), ValueError, r"lengths must lie in \[0, 3\], as .* 3 frames, got"),
    "lengths' shape": (dict(lengths=[1]), ValueError, "lengths must have shape"),
    "no batch": (dict(encoder=np.zeros((T, H)), lengths=[]), ValueError, "encoder_out must have shape"),
    "no labels": (dict(sizes=(0,)), ValueError, "max_labels must be 1 or more, got 0"),
    "symbols": (dict(max_symbols=0), ValueError, "max_symbols must be 1 or more, got 0"),
    "window": (dict(window=0), ValueError, "window must be 1 or more, got 0"),
    "width": (dict(function=decode.beam, sizes=(MOST, 0)), ValueError, "width must be 1 or more, got 0"),
    "state's shape": (
        dict(predictor=predictor_with(state=lambda x: x[:, 1:])), ValueError, r"state is float64 \(2, 4\), got .*2, 3\)"
    ),
    "state's structure": (
        dict(predictor=predictor_with(state=lambda x: (x, x))), ValueError, "must keep the structure of its state"
    ),
    "state's batch": (
        dict(predictor=predictor_with(initial=lambda batch: jnp.zeros(3))), ValueError, r"arrays \[2, ...\], got \(3,\)"
    ),
    "rows": (dict(predictor=predictor_with(row=lambda x: x[0])), ValueError, r"must make rows \[B, P\]"),
    "no predictor": (dict(predictor=lambda: 0), TypeError, "predictor must have the functions initial and step"),
    "joint": (dict(joint=lambda e, p: e[0]), ValueError, r"joint must make logits \[N, V\]"),
    "stream": (dict(state=(1, 2)), ValueError, "state of greedy must keep the structure"),
    "vocabulary": (
        dict(function=decode.beam, sizes=(MOST, 2), lm=WIDE, lm_weight=1.0),
        ValueError, r"lm must make log_probs \[N, V\] with V = 3, .* got \(4, 7\)"
    ),
    "no lm": (dict(function=decode.beam, sizes=(MOST, 2), lm_weight=0.5), ValueError, "lm must be given with"),
    "threshold": (
        dict(function=decode.beam, sizes=(MOST, 2), threshold=-1.0), ValueError, "threshold must be 0 or more, got -1.0"
    ),
    "exact_end": (dict(exact_end=1), TypeError, "exact_end must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize(("function", "sizes"), STREAMED, ids=["greedy", "beam"])
def test_no_utterances(function, sizes):
    model = Model(losses.RNNT)
    networks = model.parameters.joint, model.parameters.predictor
    search = lambda *arrays: function(model.loss.value(), *networks, *arrays, *sizes)
    found = jax.eval_shape(search, model.encoder[:0], model.lengths[:0])
    assert found.labels.shape == (0, *sizes[:0:-1], 40) and found.scores.shape == found.counts.shape


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    options, error, message = ERRORS[case]
    options = {"loss": jax_rnnt.RNNTLoss()} | options
    with pytest.raises(error, match=message):
        run(**options)


class RulesOf(jax_rnnt.TransducerLoss):
    rules: object = jax_rnnt._pytree.static(None)

    def decoding(self):
        return self.rules


SOFTMAX = jax_rnnt.emissions.Softmax((0,))
RULES = {
    "must return DecodingRules, got None": None,
    "lacks an arc without a label": DecodingRules(SOFTMAX, lattices.STANDARD[1:]),
    "lacks an arc with a label": DecodingRules(SOFTMAX, lattices.STANDARD[:1]),
    "an arc must have the slot of a blank": DecodingRules(SOFTMAX, (*lattices.STANDARD, lattices.Arc("bypass", 0, 1))),
    "the slot of a duration": DecodingRules(SOFTMAX, (lattices.Arc("blank", 1, 0, other="duration+0"),)),
}


@pytest.mark.parametrize("message", RULES)
def test_rules_that_lack_something(message):
    with pytest.raises(TypeError, match=message):
        run(RulesOf(rules=RULES[message]))


def test_rules_are_checked():
    with pytest.raises(TypeError, match=r"DecodingRules: emission must be an emissions.Softmax"):
        DecodingRules(None)
    with pytest.raises(ValueError, match="labels_per_frame must be None or an integer >= 1, got 0"):
        DecodingRules(SOFTMAX, labels_per_frame=0)
    for topology in ((), {*lattices.STANDARD}, lattices.STANDARD[0]):
        with pytest.raises(TypeError, match="DecodingRules: topology must be a sequence of"):
            DecodingRules(SOFTMAX, topology)


@pytest.mark.parametrize(("function", "sizes"), STREAMED, ids=["greedy", "beam"])
def test_bad_data_spoils_itself_alone(function, sizes):
    """A traced length out of range, NaN or +inf: the score of that utterance is NaN."""
    model = Model(losses.TDT, batch=3, frames=13)
    whole = model.search(function, *sizes)
    encoder = model.encoder.copy()
    encoder[1, 0, 0] = np.nan
    for wrong in (14, -1):
        lengths = np.array([wrong, 13, model.lengths[2]], np.int32)
        found = model.search(function, *sizes, encoder=encoder, lengths=lengths)
        assert np.isnan(found.scores[:2]).all() and (found.counts[:2] == 0).all() and not found.full[:2].any()
        assert all((x[:2] == -1).all() for x in found[:3])
        assert_same([x[2] for x in found[:6]], [x[2] for x in whole[:6]])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("function", "sizes"), [(decode.greedy, (MOST,)), (decode.beam, (MOST, 3))])
def test_wrong_score_of_one_class(function, sizes, value):
    """No softmax mixes these scores: NaN or +inf of the blank or of a label alone."""
    predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 1)), 1, start=3)
    encoder = np.full((3, 2, 4), -np.log(4))
    encoder[0, 1, 3] = encoder[1, 1, 0] = value
    run = lambda x: function(jax_rnnt.RNNTLoss(fused_log_softmax=False), jnp.add, predictor, x, np.full(3, 2), *sizes)
    scores = np.asarray(jax.jit(run)(encoder).scores)
    assert np.isnan(scores[:2]).all() and np.isfinite(scores[2]).all()


def test_infinity_of_one_class():
    """It spoils its utterance, and no other one in the same packs."""
    predictor = decode.stateless_predictor(lambda labels: labels.astype(float), 2, start=3)
    encoder = np.random.default_rng(0).normal(0, 1, (3, 4, 4))
    wrong = encoder.copy()
    wrong[1, 2, 0] = np.inf
    joint = lambda encoder, rows: encoder + rows @ jnp.ones((2, 4)) / 9
    loss = jax_rnnt.RNNTLoss(fused_log_softmax=False)
    run = jax.jit(lambda x: decode.beam(loss, joint, predictor, x, np.full(3, 4), MOST, 20, max_symbols=2)[:6])
    found, expected = run(wrong), run(encoder)
    assert np.isnan(found[4][1]).all() and np.isfinite(expected[4][1, 0])
    assert_same([x[::2] for x in found], [x[::2] for x in expected])


@pytest.mark.parametrize(
    ("function", "sizes"), [(decode.greedy, (MOST,)), pytest.param(decode.beam, (MOST, 3), marks=pytest.mark.slow)]
)
def test_dead_ends(function, sizes):
    """No path of the lattice: the score is -inf, and the search ends."""
    model = Model(losses.tdt((2,)))
    model.lengths = np.array([3, 2], np.int32)
    found = model.search(function, *sizes, exact_end=True)
    scores = found.scores.reshape(2, -1)
    assert (scores[0] == -np.inf).all() and np.isfinite(scores[1, 0])
    assert function is decode.greedy or (found.counts[0] == 0).all()
