"""Do decoding and training agree: start labels, scores and losses, evaluation mode, meshes, streams, empty sizes?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_rnnt
import losses
import meshes
from decoding import EXACT, NAMED, Model, T, assert_same
from jax_rnnt import JointLogits, LinearJoint, decode

nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
from jax_rnnt.flax import linen as of_linen  # noqa: E402
from jax_rnnt.flax import nnx as of_nnx  # noqa: E402

V, E, P, H, MOST = 3, 5, 4, 6, 3


@pytest.fixture(autouse=True)
def flax_promotion():
    """Flax promotes implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


# ------------------------------------------------------------------------------------- the start label, and scores


class OwnNNX(nnx.Module):
    """A module of one's own with a start label."""

    def __init__(self, start, tokens):
        self.embed = nnx.Param(jnp.asarray(np.random.default_rng(4).normal(0, 2, (tokens, P))))
        self.start = start

    def initial(self, batch):
        return jnp.zeros((batch, P))

    def step(self, state, labels):
        state = jnp.tanh(state) + self.embed[...][labels]
        return state, state


class OwnLinen(nn.Module):
    tokens: int
    start: int

    def initial(self, batch):
        return jnp.zeros((batch, P))

    @nn.compact
    def step(self, state, labels):
        embed = self.param("embed", lambda key: jnp.asarray(np.random.default_rng(4).normal(0, 2, (self.tokens, P))))
        state = jnp.tanh(state) + embed[labels]
        return state, state


def linen_module(kind, tokens, start):
    module = getattr(of_linen, kind)(tokens, P, start=start, param_dtype=jnp.float64)
    variables = module.init(jax.random.key(0), jnp.zeros((1, 2), int))
    return decode.linen_predictor(module, variables), module.bind(variables)


def predictors(name, tokens, start):
    """(predictor of the decoder, function from targets [B, U] to training's rows [B, U + 1, P])"""
    options = dict(start=start, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
    kinds = {"stateless": "StatelessPredictor", "lstm": "LSTMPredictor"}
    flavour, _, kind = name.partition(" ")
    if flavour == "nnx" and kind in kinds:
        module = getattr(of_nnx, kinds[kind])(tokens, P, **options)
        return module, module
    if flavour == "linen" and kind in kinds:
        return linen_module(kinds[kind], tokens, start)
    table = jnp.asarray(np.random.default_rng(4).normal(0, 2, (tokens, P)))
    module = OwnLinen(tokens, start)
    variables = module.init(jax.random.key(0), jnp.zeros((1, P)), jnp.zeros(1, int), method="step")
    made = {
        "function": lambda: decode.stateless_predictor(lambda labels: table[labels].sum(1), 2, start),
        "own": lambda: decode.Predictor(lambda b: jnp.zeros((b, P)), lambda s, y: (jnp.tanh(s) + table[y],) * 2, start),
        "nnx own": lambda: OwnNNX(start, tokens),
        "nnx adapter": lambda: decode.nnx_predictor(OwnNNX(start, tokens)),
        "linen own": lambda: decode.linen_predictor(module, variables),
    }[name]()
    return made, functools.partial(decode.predict, made)


NAMES = (
    "nnx stateless", "nnx lstm", "linen stateless", "linen lstm",
    "function", "own", "nnx own", "nnx adapter", "linen own",
)  # fmt: skip
QUICK = {("nnx lstm", "rnnt")}
PAIRS = [
    pytest.param(name, loss, id=f"{name}-{loss}", marks=() if (name, loss) in QUICK else pytest.mark.slow)
    for name in NAMES
    for loss in NAMED
]


def problem(name, loss, blank):
    """(loss, joint, predictor, training's predictor, encoder_out, lengths): its start is never the blank."""
    entry = NAMED[loss]
    tokens = V + entry.first_blank
    start = 1 if blank != 1 else 0
    rng = np.random.default_rng(3)
    joint = LinearJoint(jnp.asarray(rng.normal(0, 1.5, (P, tokens + entry.extra_classes))))
    lengths = np.array([T, T - 1], np.int32)
    predictor, training = predictors(name, tokens, start)
    value = entry.value(blank=blank, reduction="none")
    return value, joint, predictor, training, rng.normal(0, 2, (2, T, P)), lengths


@pytest.mark.parametrize(("name", "loss"), PAIRS)
def test_scores_are_losses(name, loss):
    """Without a word about the start label: N-best scores are minus the losses of their labels, in the model's rows.

    So is the score of greedy search where one path alone has its labels: a label or a blank in every frame.
    """
    blank = NAMED[loss].first_blank
    value, joint, predictor, training, encoder, lengths = problem(name, loss, blank)
    options = dict(max_symbols=MOST, exact_end=True)
    search = lambda x, n: decode.beam(value, joint, predictor, x, n, MOST, 80, **options)
    found = jax.jit(search)(encoder, lengths)
    counts, targets = np.asarray(found.counts), np.maximum(found.labels, 0)
    rows = training(targets.reshape(-1, MOST)).reshape(*targets.shape[:2], MOST + 1, -1)
    np.testing.assert_allclose(training(targets[:, 0]), rows[:, 0], rtol=EXACT, atol=EXACT)
    frames = np.broadcast_to(lengths[:, None], counts.shape)
    nll = np.asarray(value(JointLogits(joint, encoder[:, None], rows), targets, frames, counts))
    alive = np.asarray(found.scores) > -np.inf
    assert alive.sum() > 8
    np.testing.assert_allclose(np.asarray(found.scores)[alive], -nll[alive], rtol=1e-9, atol=1e-9)
    # One frame: greedy's labels with the best alignment, which is the only one of at most one label.
    short = np.ones(2, np.int32)
    one = jax.jit(lambda x, n: decode.greedy(value, joint, predictor, x, n, 1, **options))(encoder, short)
    best = np.asarray(value(JointLogits(joint, encoder, training(np.maximum(one.labels, 0))), np.maximum(one.labels, 0),
                            short, one.counts))  # fmt: skip
    finite = np.isfinite(one.scores)
    many = {"multiblank", "tdt"}  # a pair of arcs may read the same frames
    if loss not in many:
        np.testing.assert_allclose(np.asarray(one.scores)[finite], -best[finite], rtol=1e-9, atol=1e-9)
    else:
        assert (np.asarray(one.scores)[finite] <= -best[finite] + 1e-9).all()


@pytest.mark.parametrize("function", [decode.greedy, functools.partial(decode.beam, width=2)], ids=["greedy", "beam"])
@pytest.mark.rare("beam")
def test_start_contradicts(function):
    """The error names both; the same number is no contradiction; without a start, the call's counts, then the blank."""
    value, joint, predictor, _, encoder, lengths = problem("function", "rnnt", 2)
    search = functools.partial(function, value, joint, max_labels=2)
    call = lambda predictor, **options: jax.jit(
        lambda x, n: search(predictor=predictor, encoder_out=x, lengths=n, **options)
    )(encoder, lengths)
    with pytest.raises(ValueError, match=r"start must be left out, or predictor.start = 1, .* got start=2"):
        call(predictor, start=2)
    own, _ = predictors("own", V, 1)
    for wrong in (0.5, True, np.zeros(P)):
        with pytest.raises(TypeError, match=r"predictor.start must be an integer or None, got"):
            call(own._replace(start=wrong))
    plain = own._replace(start=None)
    of_own, of_blank = call(own), call(plain)
    for options in ({"predictor": own, "start": 1}, {"predictor": plain, "start": 1}):
        assert_same(call(**options)[:6], of_own[:6])
    assert_same(call(plain, start=2)[:6], of_blank[:6])
    assert not np.array_equal(of_blank.scores, of_own.scores)


BY_NAME = {  # of labels [2, 2]
    "greedy": lambda p, s: decode.greedy(*problem("own", "rnnt", 2)[:2], p, np.ones((2, 2, P)), [2, 2], 2, start=s),
    "beam": lambda p, s: decode.beam(*problem("own", "rnnt", 2)[:2], p, np.ones((2, 2, P)), [2, 2], 2, 2, start=s),
    "predict": lambda p, s: decode.predict(p, np.ones((2, 2), int), s),
}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.rare("beam")
def test_range_of_the_start(name):
    """A negative start counts from the end of the predictor's symbols; nothing is clipped."""
    call = lambda p, s=None: jax.tree.leaves(BY_NAME[name](p, s))[:5]
    open_, own = (predictors("own", V + 1, start)[0] for start in (None, 0))
    assert_same(call(open_._replace(symbols=V + 1), -1), call(open_, V))
    assert_same(call(open_._replace(symbols=V + 1, start=-1)), call(open_, V))
    assert_same(call(open_._replace(symbols=V + 1, start=-1), V), call(open_, V))
    for start in (V + 1, -V - 2):
        for given in ((open_._replace(symbols=V + 1), start), (own._replace(symbols=V + 1, start=start), None)):
            with pytest.raises(ValueError, match=rf"{name}: .*start must lie in \[-4, 4\) .*, got {start}"):
                call(*given)
    for given in ((open_, -1), (own._replace(start=-1), None)):
        with pytest.raises(ValueError, match=rf"{name}: .*start must be 0 or more, .* got -1 without symbols"):
            call(*given)
    with pytest.raises(ValueError, match=r"stateless_predictor: start must be 0 or more, .* got -1"):
        decode.stateless_predictor(jnp.sin, 1, -1)


@pytest.mark.parametrize("name", ["nnx lstm", "linen stateless"])
def test_symbols_of_modules(name):
    """Modules and their adapters know them; a predictor or language model must have all labels of the joint network."""
    value, joint, _, _, encoder, lengths = problem("own", "rnnt", 2)
    search = lambda p, **options: decode.beam(value, joint, p, encoder, lengths, 2, 2, **options)
    made = {tokens: predictors(name, tokens, 0) for tokens in (1, V - 1)}
    for few, enough in zip(made[1], made[V - 1]):
        with pytest.raises(ValueError, match=r"predictor.symbols must be 2 or more, .* labels up to 1, got 1"):
            search(few)
        lm = decode.Predictor(few.initial, lambda s, y: (jnp.zeros((len(y), V)), s), 0, few.symbols)
        with pytest.raises(ValueError, match=r"lm.symbols must be 2 or more, .* got 1"):
            search(enough, lm=lm, lm_weight=0.5)
        jax.eval_shape(lambda p=enough: search(p))  # the last class is the blank, which it never gets
        with pytest.raises(ValueError, match=r"start, by default the blank, must lie in \[-2, 2\) .* got 2"):
            search(decode.Predictor(enough.initial, enough.step, None, V - 1))
        with pytest.raises(ValueError, match=r"start must lie in \[-2, 2\) .* got 2"):
            decode.predict(enough, np.zeros((1, 1), int), 2)


def test_start_of_training_and_language_models():
    own, _ = predictors("own", V, 1)
    targets = np.array([[0, 2]])
    with pytest.raises(ValueError, match=r"predict: start must be left out, or predictor.start = 1, .* got start=0"):
        decode.predict(own, targets, start=0)
    with pytest.raises(ValueError, match="predict: start must be given, as the predictor has no start"):
        decode.predict(own._replace(start=None), targets)
    np.testing.assert_array_equal(decode.predict(own, targets), decode.predict(own._replace(start=None), targets, 1))
    # A language model keeps its own start label; without one it gets the predictor's.
    value, joint, predictor, _, encoder, lengths = problem("own", "rnnt", 2)
    seen = []

    def step(state, labels):
        return jnp.where(state[:, None], jnp.zeros((len(labels), V)), -labels[:, None].astype(float)), state | True

    lm = decode.Predictor(lambda batch: jnp.zeros(batch, bool), step)
    for start in (None, 0):
        options = dict(lm=lm._replace(start=start), lm_weight=1.0, max_symbols=1)
        search = lambda x, n, o=options: decode.beam(value, joint, predictor, x, n, 1, 9, **o)
        found = jax.jit(search)(encoder, lengths)
        one = np.asarray(found.counts[0]) == 1
        seen.append(float(np.asarray(found.scores[0])[one].max()))
    np.testing.assert_allclose(np.subtract(seen, seen[1]), [-1, 0], rtol=1e-9)


# ------------------------------------------------------------------------------------------------- evaluation mode


class NoisyJoint(nnx.Module):
    def __init__(self, kind):
        self.project = nnx.Linear(P, V, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        norm = nnx.BatchNorm(V, rngs=nnx.Rngs(0))  # its statistics are float32
        self.noise = nnx.Dropout(0.5, rngs=nnx.Rngs(1)) if kind == "dropout" else norm

    def __call__(self, encoder, predictor):
        return self.noise(self.project(encoder + predictor).astype(jnp.float32))


@pytest.mark.parametrize("kind", ["dropout", "norm"])
@pytest.mark.parametrize(
    ("function", "sizes"), [(decode.greedy, (MOST,)), (decode.beam, (MOST, 3))], ids=["greedy", "beam"]
)
@pytest.mark.rare("norm", "beam")
def test_training_mode(kind, function, sizes):
    """Decoders see the evaluation mode and leave the module as it is; closures and tiles are told the way out."""
    joint, eval_joint = NoisyJoint(kind), NoisyJoint(kind)
    eval_joint.eval()
    value, _, predictor, training, encoder, lengths = problem("function", "rnnt", 2)
    run = lambda joint: jax.jit(lambda x, n: function(value, joint, predictor, x, n, *sizes)[:6])
    expected = run(eval_joint)(encoder, lengths)
    for given in (joint, joint.__call__):
        assert_same(run(given)(encoder, lengths), expected)
    with pytest.raises(TypeError, match=r"(greedy|beam): joint must not change anything.*training mode.*eval\(\)"):
        run(lambda *rows: joint(*rows))(encoder, lengths)
    assert not (joint.noise.deterministic if kind == "dropout" else joint.noise.use_running_average)
    targets = np.zeros((2, 2), int)
    problem_of = lambda joint: value(JointLogits(joint, encoder, training(targets)), targets, lengths, [2, 2])
    with pytest.raises(TypeError, match=r"JointLogits: joint must not change anything, got NoisyJoint.*eval\(\)"):
        problem_of(joint)
    assert np.isfinite(problem_of(eval_joint)).all()


def test_noisy_networks():
    """Keys that a network closes over would repeat their noise in every step."""
    value, joint, predictor, _, encoder, lengths = problem("function", "rnnt", 2)
    noise = lambda x: x + jax.random.normal(jax.random.key(0), x.shape)
    with pytest.raises(TypeError, match=r"greedy: joint must not draw random numbers.*eval\(\).*deterministic=True"):
        decode.greedy(value, lambda *rows: noise(joint(*rows)), predictor, encoder, lengths, MOST)
    noisy = decode.Predictor(predictor.initial, lambda s, y: (noise(predictor.step(s, y)[0]), s))
    with pytest.raises(TypeError, match=r"beam: predictor.step must not draw random numbers"):
        decode.beam(value, joint, noisy, encoder, lengths, MOST, 2)


# --------------------------------------------------------------------------------------- explicit and automatic axes


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("name", ["nnx lstm", "nnx stateless", "linen lstm", "linen stateless"])
@pytest.mark.rare("auto", "nnx stateless", "linen lstm", "linen stateless")
def test_modules_on_meshes(devices, name, kind):
    """Predictors, with gradients, joints in all logits and in tiles, and both searches, as on one device."""
    tokens, lengths = 5, np.array([4, 3, 0, 4, 2, 4, 1, 3], np.int32)
    rng = np.random.default_rng(0)
    encoder, targets = rng.normal(size=(8, 4, E)), rng.integers(0, tokens - 1, (8, 2)).astype(np.int32)
    decoder, training = predictors(name, tokens, 1)
    if name.startswith("nnx"):
        joint = of_nnx.Joint(E, P, H, tokens, param_dtype=jnp.float64, rngs=nnx.Rngs(1))
        parts = nnx.split(training, ...)
        rows_of = lambda values, y: nnx.merge(parts[0], values)(y)
        values = parts[1]
    else:
        module = of_linen.Joint(H, tokens, param_dtype=jnp.float64)
        joint = module.bind(module.init(jax.random.key(1), encoder[:1, :1], np.zeros((1, 1, P))))
        module, values = training.unbind()
        rows_of = lambda values, y: module.apply(values, y)
    loss = jax_rnnt.RNNTLoss(blank=4, reduction="none")

    def everything(x, y, n):
        counts = jnp.full_like(n, 2)
        rows, pull = jax.vjp(lambda values: rows_of(values, y), values)
        dense = joint(x[:, :, None], rows[:, None])
        tiles = loss(joint.logits(x, rows), y, n, counts)
        networks = joint.decoder_inputs(decoder, x)
        best = decode.greedy(loss, *networks, n, MOST, max_symbols=2)
        lists = decode.beam(loss, *networks, n, MOST, 6, max_symbols=2)  # 48 rows are packed, 12 of a device are not
        more = decode.greedy(loss, *networks, n, MOST, max_symbols=2, state=best.state)
        return rows, pull(jnp.cos(rows)), dense, tiles, best[:6], lists[:6], more[:6]

    expected = jax.jit(everything)(encoder, targets, lengths)
    with meshes.mesh_of(devices[:4], kind, (4,)) as mesh:
        split = NamedSharding(mesh, PartitionSpec("data"))
        arrays = [jax.device_put(x, split) for x in (encoder, targets, lengths)]
        found = jax.jit(everything)(*arrays)
        assert found[4][0].sharding.is_equivalent_to(split, 2) or kind == "auto"
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def test_eager_on_explicit_axes(devices):
    """With a mesh around the call and without; a part of the vocabulary is refused."""
    value, joint, predictor, _, encoder, lengths = problem("function", "tdt", 2)
    expected = decode.beam(value, joint, predictor, encoder, lengths, MOST, 2)
    with meshes.mesh_of(devices[:2], "explicit", (2,)) as mesh:
        split = NamedSharding(mesh, PartitionSpec("data"))
        found = decode.beam(value, joint, predictor, jax.device_put(encoder, split), lengths, MOST, 2)
        weight = np.zeros((P, 6))
        wide = LinearJoint(jax.device_put(weight, NamedSharding(mesh, PartitionSpec(None, "data"))))
        with pytest.raises(ValueError, match=r"greedy: logits of joint must not be split over V.*reshard"):
            decode.greedy(jax_rnnt.RNNTLoss(), wide, predictor, encoder, lengths, MOST)
    for x, y in zip(found[:6], expected[:6]):
        np.testing.assert_allclose(x, y, rtol=EXACT)
    alone = decode.beam(value, joint, predictor, jax.device_put(encoder, split), lengths, MOST, 2)
    np.testing.assert_allclose(alone.scores, expected.scores, rtol=EXACT)


# ------------------------------------------------------------------------------------------------- known lengths


@pytest.mark.parametrize("function", [decode.greedy, functools.partial(decode.beam, width=2)], ids=["greedy", "beam"])
def test_known_lengths_under_jit(function):
    """Arrays of JAX that a program closes over are checked, and used."""
    value, joint, predictor, _, encoder, lengths = problem("function", "rnnt", 2)
    call = lambda x, n: function(value, joint, predictor, x, n, max_labels=MOST)[:6]
    found = jax.jit(lambda x: call(x, jnp.asarray(lengths)))(encoder)
    constant = jnp.asarray(lengths)
    assert_same(jax.jit(lambda x: call(x, constant))(encoder), found)
    wrong = jnp.asarray([T + 1, 0])
    with pytest.raises(ValueError, match=r"lengths must lie in \[0, 3\], .* got \[4, 0\]"):
        jax.jit(lambda x: call(x, wrong))(encoder)


def test_known_lengths_of_packed_rows():
    p = losses.problem(1, 3, 2, V)
    rows, lengths = p.logits.reshape(-1, V), jnp.asarray(p.logit_lengths)
    call = lambda rows: jax_rnnt.RNNTLoss(reduction="none")(jax_rnnt.PackedLogits(rows), p.targets, lengths, [2])
    np.testing.assert_allclose(jax.jit(call)(rows), losses.RNNT.expected(p._replace(target_lengths=[2]))[0], rtol=EXACT)


# ------------------------------------------------------------------------------------------- exact ends of streams


LATE = losses.tdt((1, 2, 4)), NAMED["multiblank"], NAMED["monotonic_final_blank"], losses.TDT
IN_PARTS = [(decode.greedy, (90,)), (decode.beam, (12, 4)), (decode.beam, (12, 12))]


@pytest.mark.parametrize(("function", "sizes"), IN_PARTS, ids=["greedy", "narrow", "wide"])
@pytest.mark.parametrize("late", LATE, ids=["tdt124", "multiblank", "final_blank", "tdt"])
@pytest.mark.rare("multiblank", "tdt", "wide", "narrow", "final_blank")
def test_exact_end_of_a_stream(late, function, sizes):
    """Bit for bit the whole utterance at once, or NaN where an earlier part has read beyond the end."""
    frames, batch = 9, 12
    model = Model(late, batch=batch, frames=frames)
    rng = np.random.default_rng(1)
    model.lengths = rng.integers(5, frames + 1, batch).astype(np.int32)
    whole = model.search(function, *sizes, exact_end=True)
    parts = lambda x, n, ends, state: function(
        late.value(), model.parameters.joint, model.parameters.predictor, x, n, *sizes, exact_end=ends, state=state
    )
    run, kept = jax.jit(parts), 0
    for cut in (3, 4, 5):
        first = np.minimum(model.lengths, cut)
        ends = model.lengths <= cut
        later = np.zeros_like(model.encoder)
        later[:, : frames - cut] = model.encoder[:, cut:]
        one = run(model.encoder, first, ends, None)
        two = run(later, model.lengths - first, ~ends, one.state)
        good = ~np.isnan(np.asarray(two.scores).reshape(batch, -1)).any(-1)
        kept += good.sum()
        long = model.lengths - cut >= 4  # no move reads so far
        assert (good | ~long).all()
        for b in np.flatnonzero(good):
            losses.assert_same_bits(two.scores[b], whole.scores[b])
            if function is decode.beam:
                assert_same([x[b] for x in two[:6]], [x[b] for x in whole[:6]])
        if function is decode.beam and not good.all() and cut == 5:
            with pytest.raises(
                ValueError, match=r"exact_end must be False, or True for utterances whose last part has"
            ):
                parts(later, model.lengths - first, True, one.state)
    assert kept > batch


def test_exact_end_of_some():
    """Of each utterance by itself."""
    model = Model(losses.tdt((1, 2, 4)), batch=8, frames=5)
    search = lambda ends: decode.greedy(
        model.loss.value(), model.parameters.joint, model.parameters.predictor, model.encoder, model.lengths, 9,
        exact_end=ends,
    )[:6]  # fmt: skip
    ends = np.arange(8) % 3 == 0
    some, exact, open_end = (
        jax.jit(search)(x) if isinstance(x, np.ndarray) else search(x) for x in (ends, True, False)
    )
    for x, y, z in zip(some, exact, open_end):
        np.testing.assert_array_equal(np.asarray(x)[ends], np.asarray(y)[ends])
        np.testing.assert_array_equal(np.asarray(x)[~ends], np.asarray(z)[~ends])
    assert not np.array_equal(exact[4], open_end[4])
    with pytest.raises(TypeError, match=r"exact_end must be True or False, or bool \[B\] with B = 8, got bool \(3,\)"):
        search(ends[:3])


# ------------------------------------------------------------------------------------------------------- empty sizes


@pytest.mark.parametrize(("batch", "frames"), [(2, 0), (0, 3), pytest.param(0, 0, marks=pytest.mark.slow)])
def test_nothing_to_decode(batch, frames):
    """No frames: one empty hypothesis of score 0. No utterances: empty arrays."""
    value, joint, predictor, _, encoder, lengths = problem("own", "tdt", 2)
    arrays = encoder[:batch, :frames], np.minimum(lengths, frames)[:batch]
    best = jax.jit(lambda *x: decode.greedy(value, joint, predictor, *x, MOST))(*arrays)
    np.testing.assert_array_equal(best.scores, np.zeros(batch))
    assert best.labels.shape == (batch, MOST) and (np.asarray(best.counts) == 0).all()
    for width in (2, 40):
        lists = jax.jit(lambda *x, w=width: decode.beam(value, joint, predictor, *x, MOST, w))(*arrays)
        np.testing.assert_array_equal(lists.scores[:, 0], np.zeros(batch))
        assert (np.asarray(lists.scores[:, 1:]) == -np.inf).all() and lists.labels.shape == (batch, width, MOST)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 40])
def test_a_state_without_entries(width):
    value, joint, predictor, _, encoder, lengths = problem("own", "rnnt", 2)

    def step(s, y):
        rows, state = predictor.step(s[0], y)
        return rows, (state, s[1])

    wider = decode.Predictor(lambda b: (predictor.initial(b), jnp.zeros((b, 0))), step, predictor.start)
    search = lambda p: decode.beam(value, joint, p, encoder, lengths, MOST, width)[:6]
    assert_same(search(wider), search(predictor))


@pytest.mark.parametrize("flavour", ["nnx", "linen"])
@pytest.mark.parametrize("kind", ["lstm", "stateless"])
def test_no_targets(flavour, kind):
    """One row, that of the start label."""
    _, training = predictors(f"{flavour} {kind}", V, 1)
    whole = training(np.zeros((2, 2), int))
    np.testing.assert_allclose(training(np.zeros((2, 0), int)), whole[:, :1], rtol=EXACT)
    assert training(np.zeros((0, 2), int)).shape == (0, 3, P) and training(np.zeros((0, 0), int)).shape == (0, 1, P)
    assert training(np.zeros((2, 0, 3), int)).shape == (2, 0, 4, P)


@pytest.mark.parametrize("way", [None, "reference"])
@pytest.mark.parametrize(("batch", "frames"), [(2, 0), (0, 3), (0, 0)])
@pytest.mark.parametrize("linear", [True, False], ids=["linear", "function"])
def test_no_logits_of_a_joint(way, batch, frames, linear):
    """As for an array: +inf without frames (but 0 without labels), and gradients of 0."""
    loss = jax_rnnt.RNNTLoss(reduction="none", implementation=way)
    weight, labels = np.ones((P, V)), np.array([1, 0], np.int32)[:batch]
    targets, lengths = np.zeros((batch, 1), np.int32), np.zeros(batch, np.int32)

    def run(weight, *rows):
        joint = LinearJoint(weight) if linear else lambda e, p: jnp.tanh(e + p) @ weight
        values = loss(JointLogits(joint, *rows), targets, lengths, labels)
        return jnp.sum(jnp.where(jnp.isfinite(values), values, 0)), values

    rows = np.ones((batch, frames, P)), np.ones((batch, 2, P))
    gradients, values = jax.grad(run, argnums=(0, 1, 2), has_aux=True)(weight, *rows)
    dense = loss(np.zeros((batch, frames, 2, V)), targets, lengths, labels)
    np.testing.assert_array_equal(values, dense)
    assert all((np.asarray(x) == 0).all() for x in gradients)
