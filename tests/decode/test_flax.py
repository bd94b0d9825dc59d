"""Are the Flax modules their formulas, the same in training and decoding, and do they initialise and learn in tiles?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import decoding
import family
import jax_rnnt

pytestmark = pytest.mark.usefixtures("flax_promotion")
nnx, nn = pytest.importorskip("flax.nnx"), pytest.importorskip("flax.linen")
MODULES = {flavour: pytest.importorskip(f"jax_rnnt.flax.{flavour}") for flavour in ("nnx", "linen")}

B, T, U, V, E, P, H = 4, 7, 4, 9, 5, 3, 6
EXACT = 1e-12
FLAVOURS = pytest.mark.parametrize("flavour", ["nnx", "linen"])
EXTRA = {"StatelessPredictor": {"history": 3}, "LSTMPredictor": {"layers": 2}}
SOME = pytest.mark.parametrize(("flavour", "name"), [("nnx", "LSTMPredictor"), ("linen", "StatelessPredictor")])


def make(flavour, name, *sizes, like=(), param_dtype=jnp.float64, **options):
    """The module with parameters, and these as a dictionary. Linen takes widths of inputs from `like`."""
    if flavour == "nnx":
        sizes = (*(x.shape[-1] for x in like), *sizes)
        options["rngs"] = nnx.Rngs(params=1, dropout=1)
        module = getattr(MODULES["nnx"], name)(*sizes, param_dtype=param_dtype, **options)
        return module, nnx.to_pure_dict(nnx.state(module, nnx.Param))
    module = getattr(MODULES["linen"], name)(*sizes, param_dtype=param_dtype, **options)
    arguments = like or (jnp.zeros((1, 2), int),)
    keywords = {"deterministic": True} if "dropout" in options else {}
    variables = module.init(jax.random.key(1), *arguments, **keywords)
    return module.bind(variables), variables["params"]


def joint_and_rows(flavour, **options):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(B, T, E)), rng.normal(size=(B, U + 1, P))
    like = tuple(x[:, :1] for x in rows)
    return *make(flavour, "Joint", H, V, like=like, **options), rows


def by_hand(parameters, rows, activation=np.tanh):
    encoder, predictor, output = (parameters[name] for name in ("encoder", "predictor", "output"))
    encoder = rows[0] @ encoder["kernel"] + encoder["bias"]
    hidden = activation(encoder[:, :, None] + (rows[1] @ predictor["kernel"])[:, None])
    return np.asarray(hidden @ output["kernel"] + output["bias"])


@pytest.mark.quick("linen")
@FLAVOURS
def test_joint(flavour):
    """All logits by one formula; the loss of the tiles is that of these logits, for N hypotheses too."""
    joint, parameters, rows = joint_and_rows(flavour, activation=jax.nn.relu)
    expected = by_hand(parameters, rows, lambda x: np.maximum(x, 0))
    np.testing.assert_allclose(joint(rows[0][:, :, None], rows[1][:, None]), expected, rtol=EXACT)
    p = batches.problem(B, T, U, V)._replace(logits=expected)
    tiles = jax_rnnt.RNNTLoss(reduction="none")(joint.logits(*rows), *p[1:])
    np.testing.assert_allclose(tiles, family.RNNT.expected(p)[0], rtol=EXACT)
    assert joint.logits(rows[0][:, None], jnp.stack([rows[1]] * 2, 1)).shape == (B, 2, T, U + 1, V)


@pytest.mark.quick("linen-StatelessPredictor")
@SOME
def test_steps_equal_the_whole(flavour, name):
    """Column u is what the steps give after the start label and u labels; padding of any value changes no other."""
    predictor, _ = make(flavour, name, V, P, **EXTRA[name])
    targets = np.random.default_rng(0).integers(0, V - 1, (B, U))
    state, rows = predictor.initial(B), []
    step, call = jax.jit(lambda *x: predictor.step(*x), donate_argnums=0), jax.jit(lambda x: predictor(x))
    whole = call(targets)
    for labels in (np.full(B, V - 1), *targets.T):
        row, state = step(state, jnp.asarray(labels))
        rows.append(row)
    np.testing.assert_allclose(whole, np.stack(rows, 1), rtol=EXACT)
    assert np.abs(whole[:, 1:] - whole[:, :1]).max() > 0.01
    np.testing.assert_allclose(call(targets.reshape(2, 2, U)).reshape(whole.shape), whole, rtol=EXACT)
    np.testing.assert_allclose(call(targets[:, :0]), whole[:, :1], rtol=EXACT)
    for shape in ((0, 2), (0, 0), (2, 0, 3)):
        assert jax.eval_shape(call, np.zeros(shape, int)).shape == (*shape[:-1], shape[-1] + 1, P)
    targets[:, -1] = -77
    padded = call(targets)
    np.testing.assert_array_equal(padded[:, :U], whole[:, :U])
    assert np.isfinite(padded).all()


@FLAVOURS
@pytest.mark.parametrize(("options", "start"), [({"start": 0}, 0), ({}, V - 1)], ids=["first", "default"])
def test_stateless_by_hand(flavour, options, start):
    predictor, parameters = make(flavour, "StatelessPredictor", V, P, history=2, **options)
    older, newest = np.split(np.asarray(parameters["embed"]["embedding"]), 2)
    expected = [older[start] + newest[start], older[start] + newest[3], older[3] + newest[8]]
    np.testing.assert_allclose(predictor(np.array([3, 8])), np.maximum(expected, 0), rtol=EXACT)


@FLAVOURS
def test_lstm_by_hand(flavour):
    predictor, parameters = make(flavour, "LSTMPredictor", V, P)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    if flavour == "nnx":
        cell = parameters["lstm0"]
        of_input, of_hidden, bias = cell["dense_i"]["kernel"], cell["dense_h"]["kernel"], cell["dense_h"]["bias"]
    else:
        cell = parameters["lstm_0"]
        join = lambda kind, what: np.concatenate([cell[kind + gate][what] for gate in "ifgo"], -1)
        of_input, of_hidden, bias = join("i", "kernel"), join("h", "kernel"), join("h", "bias")
    h, c = np.zeros(P), np.zeros(P)
    for row, label in zip(predictor(np.array([2, 7])), (V - 1, 2, 7), strict=True):
        x = np.asarray(parameters["embed"]["embedding"])[label]
        i, f, g, o = np.split(x @ of_input + h @ of_hidden + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        np.testing.assert_allclose(row, h, rtol=1e-9)


class Model(nn.Module):
    """A whole model of Linen, which makes its parameters in a call with tiles."""

    def setup(self):
        self.predictor = MODULES["linen"].StatelessPredictor(V, P, param_dtype=jnp.float64)
        self.joint = MODULES["linen"].Joint(H, V, param_dtype=jnp.float64)

    def __call__(self, features, targets, *lengths, tiles):
        rows = features, self.predictor(targets)
        logits = self.joint.logits(*rows) if tiles else self.joint(rows[0][:, :, None], rows[1][:, None])
        return jax_rnnt.RNNTLoss()(logits, targets, *lengths)


def test_training():
    """Under jit, a gradient for every parameter, the same in tiles, and finite whatever the padding holds."""
    p = batches.poisoned(batches.problem(B, T, U, V))
    batch = np.random.default_rng(0).normal(size=(B, T, E)), *p[1:]
    model = Model()
    init = lambda tiles: model.init(jax.random.key(0), *batch, tiles=tiles)
    parameters = jax.jit(lambda: init(True))()
    assert jax.tree.map(jnp.shape, parameters) == jax.tree.map(jnp.shape, jax.eval_shape(lambda: init(False)))
    run = jax.jit(jax.value_and_grad(lambda x, tiles: model.apply(x, *batch, tiles=tiles)), static_argnums=1)
    of_tiles, of_all = run(parameters, True), run(parameters, False)
    compare.assert_close(of_tiles, of_all, atol=EXACT)
    assert all(np.any(x) for x in jax.tree.leaves(of_tiles))


@pytest.mark.quick("nnx")
@FLAVOURS
def test_dropout(flavour):
    """Tiles and all logits drop the same; in evaluation nothing is random."""
    joint, parameters, rows = joint_and_rows(flavour, dropout=0.5)
    rest = batches.problem(B, T, U, V)[1:]
    loss = jax_rnnt.RNNTLoss(reduction="none")
    paired = rows[0][:, :, None], rows[1][:, None]
    if flavour == "nnx":

        def values(seed):
            found = []
            for call in (lambda: joint.logits(*rows), lambda: joint(*paired)):
                nnx.reseed(joint, dropout=seed) if seed else joint.eval()
                found.append(np.asarray(loss(call(), *rest)))
            return found
    else:
        module, variables = joint.unbind()

        def values(seed):
            options = {"deterministic": not seed, "rngs": {"dropout": jax.random.key(seed)}}
            tiles = module.apply(variables, *rows, method="logits", **options)
            return [np.asarray(loss(x, *rest)) for x in (tiles, module.apply(variables, *paired, **options))]

        with pytest.raises(ValueError, match="deterministic"):
            joint(*rows)
    dropped, other, still = values(3), values(4), values(0)
    np.testing.assert_allclose(*zip(dropped, other, still), rtol=EXACT)
    assert not np.allclose(dropped[0], other[0]) and not np.allclose(dropped[0], still[0])
    np.testing.assert_allclose(still[0], loss(by_hand(parameters, rows), *rest), rtol=EXACT)


def with_bias(joint, parameters):
    """The joint with another bias of its encoder's projection."""
    bias = jnp.linspace(-3, 3, H)
    if isinstance(joint, nnx.Module):
        joint.encoder.bias[...] = bias
        return joint
    module, variables = joint.unbind()
    return module.bind({"params": {**variables["params"], "encoder": {**parameters["encoder"], "bias": bias}}})


def check_decoder_inputs(joint, predictor, rows):
    """Step by step the logits of the joint, those of zeros without an encoder, results of a search."""
    linear, steps, projected = joint.decoder_inputs(predictor, rows[0])
    state, reference = steps.initial(B), predictor.initial(B)
    for labels in (jnp.full(B, V - 1), jnp.arange(B)):
        row, state = steps.step(state, labels)
        plain, reference = predictor.step(reference, labels)
        np.testing.assert_allclose(linear(projected[:, 0], row), joint(rows[0][:, 0], plain), rtol=1e-11)
        np.testing.assert_allclose(linear(jnp.zeros((B, H)), row), joint(np.zeros((B, E)), plain), rtol=1e-11)

    def search(*inputs):
        loss, lengths = jax_rnnt.RNNTLoss(), jnp.full(B, 2)
        return decoding.greedy(loss, *inputs, lengths, 5, max_symbols=2, ilm_weight=0.5)[:-1]

    found = jax.jit(lambda x: search(*joint.decoder_inputs(predictor, x)))(rows[0][:, :2])
    plain = jax.jit(lambda x: search(joint, predictor, x))(rows[0][:, :2])
    assert found[3].max() > 0
    compare.assert_close(found, plain, rtol=1e-9)


@pytest.mark.slow
def test_decoder_inputs():
    """Of Linen; adapters are of NNX."""
    predictor, _ = make("linen", "StatelessPredictor", V, P)
    joint, parameters, rows = joint_and_rows("linen")
    joint = with_bias(joint, parameters)
    check_decoder_inputs(joint, predictor, rows)
    # What the matrix gives, with no bit of the bias in it.
    expected = rows[0] @ jnp.asarray(parameters["encoder"]["kernel"])
    np.testing.assert_array_equal(joint.decoder_inputs(predictor, rows[0])[2], expected)


@pytest.mark.quick("in place")
@pytest.mark.parametrize("kind", ["around", "in place"])
def test_adapters(kind):
    """In place of a projection they count, in evaluation mode; in place of the output they are an error."""

    def adapter(layer):
        """LoRA around the layer, with dropout, or in place of it with the same kernel and bias."""
        sizes, normal = (layer.in_features, layer.out_features), nnx.initializers.normal(1)
        options = dict(param_dtype=jnp.float64, b_initializer=normal, rngs=nnx.Rngs(2))
        if kind == "around":
            made = nnx.LoRA(sizes[0], 2, sizes[1], base_module=layer, **options)
            return nnx.Sequential(made, nnx.Dropout(0.5, rngs=nnx.Rngs(3)))
        options |= dict(use_bias=layer.use_bias, lora_rank=2, lora_param_dtype=jnp.float64)
        made = nnx.LoRALinear(*sizes, **options)
        made.kernel, made.bias = layer.kernel, layer.bias
        return made

    predictor, _ = make("nnx", "StatelessPredictor", V, P)
    joint, parameters, rows = joint_and_rows("nnx")
    joint = with_bias(joint, parameters)
    plain = joint(rows[0][:, 0], rows[1][:, 0])
    joint.encoder, joint.predictor = adapter(joint.encoder), adapter(joint.predictor)
    if kind == "around":  # its dropout is off in a decoder only
        noisy = nnx.clone(joint)
        joint.eval()
        np.testing.assert_array_equal(*(x.decoder_inputs(predictor, rows[0])[2] for x in (noisy, joint)))
    assert not np.allclose(joint(rows[0][:, 0], rows[1][:, 0]), plain)
    check_decoder_inputs(joint, predictor, rows)
    joint.output = nnx.LoRALinear(H, V, lora_rank=2, rngs=nnx.Rngs(2))
    for call in (lambda: joint(rows[0][:, 0], rows[1][:, 0]), lambda: joint.decoder_inputs(predictor, rows[0])):
        with pytest.raises(TypeError, match=r"Joint: output must be a flax.nnx.Linear, got LoRALinear"):
            call()


@pytest.mark.slow
@SOME
def test_bfloat16(flavour, name):
    """Products, rows, state and logits; parameters stay float32."""
    options = {"param_dtype": jnp.float32, "dtype": jnp.bfloat16}
    predictor, _ = make(flavour, name, V, P, **options)
    row, state = jax.eval_shape(lambda: predictor.step(predictor.initial(B), jnp.zeros(B, int)))
    same = jax.tree.map(lambda x, y: x.dtype == y.dtype, state, predictor.initial(B))
    assert row.dtype == jnp.bfloat16 and all(jax.tree.leaves(same))
    joint, parameters, rows = joint_and_rows(flavour, **options)
    assert joint.logits(*rows).dtype == jnp.bfloat16
    assert {str(x.dtype) for x in jax.tree.leaves(parameters)} == {"float32"}
    found = jax.jit(lambda *rows: joint(*rows))(rows[0][:, :, None], rows[1][:, None])
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), by_hand(parameters, rows), atol=0.05)


@FLAVOURS
@pytest.mark.parametrize(
    ("name", "sizes", "options", "message", "targets"),
    [
        ("StatelessPredictor", (V, P), {"history": 0}, "history must be 1 or more, got 0", None),
        ("StatelessPredictor", (V, P), {"start": V}, "start must lie in .* got 9", None),
        ("LSTMPredictor", (0, P), {}, "symbols must be 1 or more, got 0", None),
        ("LSTMPredictor", (V, P), {"layers": 1.5}, "layers must be an integer .* got 1.5", None),
        ("LSTMPredictor", (V, P), {}, "targets must have an integer dtype, got float64", np.ones((B, U))),
        ("StatelessPredictor", (V, P), {}, "targets must have shape", np.int32(3)),
    ],
)
def test_errors(flavour, name, sizes, options, message, targets):
    with pytest.raises((TypeError, ValueError), match=f"{name}: {message}"):
        make(flavour, name, *sizes, **options)[0](targets)
