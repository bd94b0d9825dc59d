"""Do decoding and training agree: start labels, scores and losses, evaluation mode, meshes?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import compare
import decoding
import family
import jax_rnnt
import meshes
from decoding import T, assert_same, lossless
from jax_rnnt import JointLogits, LinearJoint, decode

pytestmark = pytest.mark.usefixtures("flax_promotion")
nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
from jax_rnnt.flax import linen as of_linen  # noqa: E402
from jax_rnnt.flax import nnx as of_nnx  # noqa: E402

V, E, P, H, MOST = 3, 5, 4, 6, 3
GREEDY, BEAM = decoding.greedy, functools.partial(decoding.beam, width=2)


# ------------------------------------------------------------------------------------- the start label, and scores


class OwnNNX(nnx.Module):
    """A module of one's own with a start label, and dropout."""

    def __init__(self, tokens, start):
        self.embed = nnx.Param(table(tokens))
        self.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.start = start

    def initial(self, batch):
        return jnp.zeros((batch, P))

    def step(self, state, labels):
        state = jnp.tanh(state) + self.embed[...][labels]
        return self.noise(state), state


def table(tokens):
    return jnp.asarray(np.random.default_rng(4).normal(0, 2, (tokens, P)))


def own(start, tokens=V):
    rows = table(tokens)
    return decode.Predictor(lambda b: jnp.zeros((b, P)), lambda s, y: (jnp.tanh(s) + rows[y],) * 2, start)


def predictors(name, tokens, start):
    """(predictor of the decoder, function from targets [B, U] to training's rows [B, U + 1, P])"""
    if name == "nnx lstm":
        module = of_nnx.LSTMPredictor(tokens, P, start=start, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        return module, module
    if name == "linen":
        module = of_linen.LSTMPredictor(tokens, P, start=start, param_dtype=jnp.float64)
        variables = module.init(jax.random.key(0), jnp.zeros((1, 2), int))
        return decode.linen_predictor(module, variables), module.bind(variables)
    if name == "function":
        rows = table(tokens)
        made = decode.stateless_predictor(lambda labels: rows[labels].sum(1), 2, start, tokens)
    else:
        made = own(start, tokens) if name == "own" else OwnNNX(tokens, start)
    return made, functools.partial(decode.predict, decode.nnx_predictor(made) if name == "nnx own" else made)


def problem(name, blank=2):
    """(loss, joint, predictor, training's predictor, encoder_out, lengths): its start is never the blank."""
    rng = np.random.default_rng(3)
    joint = LinearJoint(jnp.asarray(rng.normal(0, 1.5, (P, V))))
    value, lengths = jax_rnnt.RNNTLoss(blank=blank, reduction="none"), np.array([T, T - 1], np.int32)
    return value, joint, *predictors(name, V, int(blank != 1)), rng.normal(0, 2, (2, T, P)), lengths


def test_scores_are_losses():
    """N-best scores are minus the losses of their labels, in the model's rows.

    Of one loss: each has its enumeration of paths, and the decoder one by the same arcs.
    """
    value, joint, predictor, training, encoder, lengths = problem("linen", 0)
    options = dict(max_symbols=MOST, exact_end=True)

    @jax.jit
    def everything(x, n):
        found = decoding.beam(value, joint, predictor, x, n, MOST, lossless(family.RNNT), **options)
        targets, frames = jnp.maximum(found.labels, 0), jnp.broadcast_to(n[:, None], found.counts.shape)
        rows = training(targets.reshape(-1, MOST)).reshape(*targets.shape[:2], MOST + 1, -1)
        nll = value(JointLogits(joint, x[:, None], rows), targets, frames, found.counts)
        return found.scores, nll

    scores, nll = map(np.asarray, everything(encoder, lengths))
    alive = scores > -np.inf
    assert alive.sum() > 8
    np.testing.assert_allclose(scores[alive], -nll[alive], rtol=1e-9, atol=1e-9)


def call(function, predictor, start=None, **options):
    """Scores or rows of a call with a start label."""
    if function == "predict":
        return decode.predict(predictor, np.ones((2, 2), int), start)
    value, joint, *_, encoder, lengths = problem("own")
    search = {"greedy": GREEDY, "beam": BEAM}[function]
    return jax.jit(lambda x, n: search(value, joint, predictor, x, n, 2, start=start, **options))(
        encoder, lengths
    ).scores


@pytest.mark.slow
@pytest.mark.parametrize("function", ["greedy", "predict"])
def test_start_of_the_call(function):
    """It counts for a predictor without a start; a negative one counts from the end of the symbols."""
    plain = own(None, V + 1)
    expected = call(function, plain, 1)
    known = plain._replace(symbols=V + 1)
    for predictor, start in (own(1, V + 1), 1), (known, -V):
        assert_same(call(function, predictor, start), expected)
    assert not np.array_equal(expected, call(function, plain, 0))
    if function != "predict":
        assert_same(call(function, plain), call(function, plain, 2))  # the blank


NO_SYMBOLS = r"start must be 0 or more, .* got -1"
KNOWN = own(None)._replace(symbols=4)
WRONG_STARTS = [
    ("greedy", own(1), 2, r"start must be left out, or predictor.start = 1, .* got start=2"),
    *(("beam", own(x), None, "predictor.start must be an integer or None") for x in (0.5, True, np.zeros(P))),
    *(("predict", KNOWN, x, rf"start must lie in \[-4, 4\) .*, got {x}") for x in (4, -5)),
    *(("greedy", KNOWN._replace(start=x), None, rf"start must lie in \[-4, 4\) .*, got {x}") for x in (4, -5)),
    ("beam", own(None), -1, NO_SYMBOLS),
    ("greedy", own(-1), None, NO_SYMBOLS),
    ("predict", own(None), None, "start must be given, as the predictor has no start"),
]


@pytest.mark.parametrize(("function", "predictor", "start", "message"), WRONG_STARTS)
def test_wrong_starts(function, predictor, start, message):
    with pytest.raises((TypeError, ValueError), match=f"{function}: .*{message}"):
        call(function, predictor, start)


def test_wrong_start_of_a_stateless_predictor():
    with pytest.raises(ValueError, match=f"stateless_predictor: {NO_SYMBOLS}"):
        decode.stateless_predictor(jnp.sin, 1, -1)
    assert decode.stateless_predictor(jnp.sin, 1, -1, 5)[2:4] == (4, 5)


@pytest.mark.parametrize("name", ["nnx lstm", "function"])
def test_symbols(name):
    """A predictor or language model must have all labels of the joint network, which never asks for the last blank."""
    few, enough = (predictors(name, tokens, 0)[0] for tokens in (1, V - 1))
    call("greedy", enough)
    with pytest.raises(ValueError, match=r"predictor.symbols must be 2 or more, .* labels up to 1, got 1"):
        call("beam", few)
    lm = decode.Predictor(few.initial, lambda s, y: (jnp.zeros((len(y), V)), s), 0, few.symbols)
    with pytest.raises(ValueError, match=r"fusion\[0\].symbols must be 2 or more, .* got 1"):
        call("beam", enough, fusion=((lm, 0.5),))
    with pytest.raises(ValueError, match=r"start, by default the blank, must lie in \[-2, 2\) .* got 2"):
        call("beam", decode.Predictor(enough.initial, enough.step, None, V - 1))


# ------------------------------------------------------------------------------------------------- evaluation mode


class NoisyJoint(nnx.Module):
    def __init__(self):
        self.project = nnx.Linear(P, V, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        self.norm, self.noise = nnx.BatchNorm(V, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))

    def __call__(self, encoder, predictor):
        return self.noise(self.norm(self.project(encoder + predictor).astype(jnp.float32)))  # its statistics' dtype


@pytest.mark.slow
def test_training_mode():
    """Decoders see the evaluation mode and leave the module as it is; closures and tiles are told the way out."""
    joint, eval_joint = NoisyJoint(), NoisyJoint()
    eval_joint.eval()
    value, _, predictor, training, encoder, lengths = problem("nnx own")
    run = lambda joint: jax.jit(lambda x, n: GREEDY(value, joint, predictor, x, n, MOST)[:-1])
    expected = run(eval_joint)(encoder, lengths)
    for given in (joint, joint.__call__):
        assert_same(run(given)(encoder, lengths), expected)
    assert not (predictor.noise.deterministic or joint.noise.deterministic or joint.norm.use_running_average)
    with pytest.raises(TypeError, match=r"greedy: joint must not change anything.*training mode.*eval\(\)"):
        run(lambda *rows: joint(*rows))(encoder, lengths)
    targets = np.zeros((2, 2), int)
    problem_of = lambda joint: value(JointLogits(joint, encoder, training(targets)), targets, lengths, [2, 2])
    with pytest.raises(TypeError, match=r"JointLogits: joint must not change anything, got NoisyJoint.*eval\(\)"):
        problem_of(joint)
    assert np.isfinite(problem_of(eval_joint)).all()
    # A key that a network closes over would repeat its noise in every step.
    noise = lambda *rows: eval_joint(*rows) + jax.random.normal(jax.random.key(0), (V,))
    with pytest.raises(TypeError, match=r"joint must not draw random numbers.*eval\(\).*deterministic=True"):
        run(noise)(encoder, lengths)


# ------------------------------------------------------------------------------------------------------------ meshes


@meshes.SET_MESH
def test_modules_on_meshes(devices):
    """Predictors, with gradients, joints in all logits and in tiles, and both searches, as on one device."""
    tokens, lengths = 5, np.array([4, 3, 0, 4, 2, 4, 1, 3], np.int32)
    rng = np.random.default_rng(0)
    encoder, targets = rng.normal(size=(8, 4, E)), rng.integers(0, tokens - 1, (8, 2)).astype(np.int32)
    decoder, training = predictors("nnx lstm", tokens, 1)
    joint = of_nnx.Joint(E, P, H, tokens, param_dtype=jnp.float64, rngs=nnx.Rngs(1))
    graph, values = nnx.split(training)
    rows_of = lambda values, y: nnx.merge(graph, values)(y)
    loss = jax_rnnt.RNNTLoss(blank=4, reduction="none")

    def everything(x, y, n):
        rows, pull = jax.vjp(lambda values: rows_of(values, y), values)
        dense = joint(x[:, :, None], rows[:, None])
        tiles = loss(joint.logits(x, rows), y, n, jnp.full_like(n, 2))
        networks = joint.decoder_inputs(decoder, x)
        best = decoding.greedy(loss, *networks, n, MOST, max_symbols=2)
        lists = decoding.beam(loss, *networks, n, MOST, 6, max_symbols=2)  # 48 rows are packed, 12 of a device are not
        return best[:-1], rows, pull(jnp.cos(rows)), dense, tiles, lists[:-1]

    expected = jax.jit(everything)(encoder, targets, lengths)
    with meshes.mesh_of(devices[:4], "explicit", (4,)) as mesh:
        wide = LinearJoint(jax.device_put(np.zeros((P, 4)), NamedSharding(mesh, PartitionSpec(None, "data"))))
        with pytest.raises(ValueError, match=r"greedy: logits of joint must not be split over V.*reshard"):
            decoding.greedy(loss, wide, decoder, encoder[..., :P], lengths, MOST)
        split = NamedSharding(mesh, PartitionSpec("data"))
        found = jax.jit(everything)(*(jax.device_put(x, split) for x in (encoder, targets, lengths)))
        assert found[0][0].sharding.is_equivalent_to(split, 2)
    compare.assert_close(found, expected, 1e-9)
