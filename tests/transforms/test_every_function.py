"""Does every public function of arrays give under each transform of JAX what it gives without?

A public name is a case here, or stands in ELSEWHERE. Where a truth is cheap, the result without a transform is compared
with it; the values of losses, searches and layouts have tests of their own.
"""

import functools
import importlib
import pkgutil
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import PartitionSpec as P

import compare
import jax_rnnt
import reference_numpy as truth_of
from jax_rnnt import decode, lattices, metrics, plot
from meshes import at, mesh_of

B, T, U, V, E = 4, 5, 3, 6, 4
BLANK = V - 1
RNG = np.random.default_rng(0)
DIMENSIONS = {  # of the arrays of a batch; letters are symbols of an exported program
    "logits": ("b", "t", "u + 1", V),
    "frame_logits": ("b", "t", V),
    "targets": ("b", "u"),
    "frames": ("b",),
    "labels": ("b",),
    "encoder": ("b", "t", E),
    "rows": ("b", "u + 1", E),
    "errors": ("b", "u + 1"),
    "key": ("b", 2),
}
SIZES = {"b": B, "t": T, "u": U, "u + 1": U + 1}


def arrays(seed):
    """The arrays of a batch, by their names."""
    rng = np.random.default_rng(seed)
    shapes = {name: [SIZES.get(n, n) for n in sizes] for name, sizes in DIMENSIONS.items()}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    found["targets"] = rng.integers(0, 3, (B, U)).astype(np.int32)
    found["frames"], found["labels"] = np.int32([5, 4, 3, 5]), np.int32([3, 2, 0, 1])
    found["errors"] = rng.integers(0, 5, (B, U + 1)).astype(np.int32)
    found["key"] = rng.integers(0, 2**32, (B, 2), np.uint32)
    return found


def parameters(seed):
    """What all sequences share."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(n, m)).astype(np.float32) for name, n, m in (("out", E, V), ("table", V, E))}


class Case(typing.NamedTuple):
    """A function of the shared parameters and of some arrays of the batch; its results are those of each sequence."""

    function: typing.Callable
    names: tuple[str, ...]
    truth: typing.Callable | None = None


CASES = {}


def case(*names, name=None, truth=None):
    def add(function):
        CASES[name or function.__name__] = Case(function, names, truth)
        return function

    return add


SEQUENCES = "targets", "frames", "labels"
OF_LOGITS, OF_ROWS, SEARCHED = ("logits", *SEQUENCES), ("encoder", "rows", *SEQUENCES), ("encoder", "frames")

# ------------------------------------------------------------------------------------------------- losses and layouts

LOSS = jax_rnnt.RNNTLoss(reduction="none")
LOSSES = {
    "RNNTLoss": LOSS,
    "ConstrainedRNNTLoss": jax_rnnt.ConstrainedRNNTLoss(reduction="none"),
    "HATLoss": jax_rnnt.HATLoss(reduction="none"),
    "MonotonicRNNTLoss": jax_rnnt.MonotonicRNNTLoss(reduction="none"),
    "MultiblankRNNTLoss": jax_rnnt.MultiblankRNNTLoss((2,), reduction="none"),
    "TDTLoss": jax_rnnt.TDTLoss((0, 2), reduction="none"),
    "TargetRobustRNNTLoss": jax_rnnt.TargetRobustRNNTLoss(reduction="none"),
    "WildcardRNNTLoss": jax_rnnt.WildcardRNNTLoss(reduction="none"),
}
METHODS = "align", "arc_log_probs", "label_frames", "label_log_probs", "latency", "posteriors"
CALLS = LOSSES | {f"RNNTLoss.{name}": getattr(LOSS, name) for name in METHODS}
CALLS["rnnt_loss"] = functools.partial(jax_rnnt.rnnt_loss, reduction="none")
CALLS["plot.arc_posteriors"] = functools.partial(plot.arc_posteriors, LOSS)
CASES |= {name: Case(lambda shared, *batch, call=call: call(*batch), OF_LOGITS) for name, call in CALLS.items()}
LAYOUTS = {
    "LinearJoint": lambda out, *rows: jax_rnnt.JointLogits(jax_rnnt.LinearJoint(out), *rows),
    "JointLogits": lambda out, *rows: jax_rnnt.JointLogits(lambda x, y: jnp.tanh(x * y) @ out, *rows),
    "AdditiveLogits": lambda out, x, y: jax_rnnt.AdditiveLogits(x @ out, y @ out, lm_only_scale=0.2),
}
for _name, _make in LAYOUTS.items():
    CASES[_name] = Case(lambda shared, x, y, *batch, make=_make: LOSS(make(shared["out"], x, y), *batch), OF_ROWS)


def packed_rows(logits, frames, labels):
    """Rows of sequences of full lengths, as those of shorter ones would not lie where the batch has them."""
    batch, most, columns, classes = logits.shape
    packed = jax_rnnt.PackedLogits(logits.reshape(batch * most * columns, classes), T)
    return packed, {"logit_lengths": 0 * frames + most, "target_lengths": 0 * labels + (columns - 1)}


@case(*OF_LOGITS)
def PackedLogits(shared, logits, targets, frames, labels):
    packed, full = packed_rows(logits, frames, labels)
    return LOSS(packed, targets, **full)


def band(logits, first, width):
    index = jnp.clip(first[..., None] + jnp.arange(width, dtype=first.dtype)[None, None], 0, logits.shape[-2] - 1)
    return jnp.take_along_axis(logits, index[..., None], -2)


@case(*OF_LOGITS)
def prune_ranges(shared, logits, targets, frames, labels):
    lengths = {"logit_lengths": frames, "target_lengths": labels}
    blank, label = LOSS.posteriors(logits, targets, **lengths)
    return jax_rnnt.prune_ranges(blank_posteriors=blank, label_posteriors=label, **lengths, width=2)


@case(*OF_LOGITS)
def BandLogits(shared, logits, targets, frames, labels):
    first = prune_ranges(shared, logits, targets, frames, labels)
    return LOSS(jax_rnnt.BandLogits(band(logits, first, 2), first), targets, frames, labels)


@case("encoder", "rows", "frames")
def prune_inputs(shared, encoder, rows, frames):
    first = jnp.zeros(encoder.shape[:-1], jnp.int32) + (frames % 2)[..., None]
    return jax_rnnt.prune_inputs(encoder, rows, first, 2)


def nodes_by_hand(shared, encoder, rows, targets, frames, labels):
    """In float64."""
    x = (np.tanh(encoder[:, :, None].astype(float) + rows[:, None]) @ shared["out"]) ** 2
    inside = (np.arange(T) < frames[:, None])[..., None] & (np.arange(U + 1) <= labels[:, None])[:, None]
    index = np.broadcast_to(np.pad(targets, ((0, 0), (0, 1)))[:, None, :, None], (B, T, U + 1, 1))
    here = np.take_along_axis(x, index, -1)[..., 0] * (np.arange(U + 1) < labels[:, None])[:, None]
    return (np.where(inside, x.sum(-1) + here, 0)).sum((1, 2))


@case(*OF_ROWS, truth=nodes_by_hand)
def sum_over_nodes(shared, encoder, rows, targets, frames, labels):
    def function(logits, labels):
        one = jax.nn.one_hot(labels, V, dtype=logits.dtype)
        return jnp.sum(logits**2 * (1 + one), -1)

    logits = jax_rnnt.JointLogits(jax_rnnt.LinearJoint(shared["out"]), encoder, rows)
    lengths = {"logit_lengths": frames, "target_lengths": labels}
    return jax_rnnt.sum_over_nodes(function, logits, **lengths, targets=targets)


@case("logits", "frames", "labels", name="sum_over_nodes of arrays")
def sum_of_arrays(shared, logits, frames, labels):
    weights = jnp.abs(logits[..., 0])
    scaled = lambda rows, others: jnp.sum(rows * others * shared["out"][:1], -1)
    lengths = {"logit_lengths": frames, "target_lengths": labels}
    return jax_rnnt.sum_over_nodes(scaled, logits, logits + 1, **lengths, weights=weights)


@case("logits", "frames", "labels", name="sum_over_nodes of rows")
def sum_of_rows(shared, logits, frames, labels):
    packed, full = packed_rows(logits, frames, labels)
    return jax_rnnt.sum_over_nodes(lambda rows: jnp.sum(rows @ shared["out"].T, -1), packed, **full)


@case("logits", "frames", "labels", name="sum_over_nodes of a band")
def sum_of_a_band(shared, logits, frames, labels):
    first = jnp.zeros(logits.shape[:-2], jnp.int32) + (frames % 2)[..., None]
    bands = jax_rnnt.BandLogits(band(logits, first, 2), first)
    return jax_rnnt.sum_over_nodes(lambda x: jnp.sum(x, -1), bands, logit_lengths=frames, target_lengths=labels)


def mwer_by_hand(shared, rows, errors):
    nll = rows[..., 0].astype(float)
    p = np.exp(-nll) / np.exp(-nll).sum(-1, keepdims=True)
    return (p * errors).sum(-1) - errors.mean(-1)


@case("rows", "errors", truth=mwer_by_hand)
def mwer_loss(shared, rows, errors):
    return jax_rnnt.mwer_loss(rows[..., 0], errors, "none")


@case("logits", "frames", "labels", name="lattices.log_likelihood")
def log_likelihood(shared, logits, *lengths):
    return lattices.log_likelihood(lattices.STANDARD, {"blank": logits[..., 0], "label": logits[..., 1]}, *lengths)


@case("frame_logits", "frames", truth=lambda shared, x, frames: frames)
def lengths_from_paddings(shared, frame_logits, frames):
    most = frame_logits.shape[-2]
    return jax_rnnt.lengths_from_paddings(jnp.arange(most, dtype=jnp.int32)[None] >= frames[..., None])


# ------------------------------------------------------------------------------------------------------------ decoding


def predictor(shared):
    """It looks its rows up in a table, which a search closes over."""
    return decode.stateless_predictor(lambda labels: shared["table"][labels[:, -1]], 1, BLANK)


def search(shared, joint="linear", loss=LOSS, **options):
    function = lambda encoder, rows: jnp.tanh(encoder + rows) @ shared["out"]
    joint = jax_rnnt.LinearJoint(shared["out"]) if joint == "linear" else function
    return decode.Search(loss, joint, predictor(shared), max_labels=4, max_symbols=2, **options)


CASES |= {
    "decode.Search.greedy": Case(lambda shared, *batch: search(shared).greedy(*batch), SEARCHED),
    "decode.Search.beam": Case(lambda shared, *batch: search(shared, "function").beam(*batch, width=2), SEARCHED),
}


@case(*SEARCHED, name="decode.Search.greedy of TDT")
def greedy_tdt(shared, *batch):
    return search(shared, "function", jax_rnnt.TDTLoss((0, 2)), confidence=decode.Entropy()).greedy(*batch)


@case(*SEARCHED, "key", name="decode.Search.sample")
def sample(shared, encoder, frames, key):
    return search(shared).sample(encoder, frames, jax.random.wrap_key_data(key), samples=2, top_p=0.9)


@case(*SEARCHED, name="decode.Search with fusion")
def fused(shared, encoder, frames):
    """A network in training, a list of phrases and a mask, with weights that are numbers of the program."""
    model = decode.stateless_predictor(lambda labels: shared["table"][labels[:, -1]] @ shared["out"], 1, BLANK)
    lists = decode.Phrases([[0, 1], [2]], 0.5, classes=V - 1)
    mask = decode.Labels(np.arange(V) != 3)
    fusion = (model, shared["out"][0, 0]), (lists, 0.7), (mask, 1.0)
    return search(shared, fusion=fusion, ilm_weight=shared["out"][0, 1] ** 2).beam(encoder, frames, 3)


@case(*SEARCHED, name="decode streams")
def streams(shared, encoder, frames):
    """Two parts of a stream; between them labels are committed, and a state is split and joined again."""
    of = search(shared)
    parts = encoder, jnp.minimum(frames, 2), encoder[:, ::-1], frames
    first = of.beam(*parts[:2], width=2)
    state = decode.commit_labels(first, first.stable)
    state = decode.reset_streams(state, frames == 3)
    order = jnp.arange(encoder.shape[0], dtype=jnp.int32)
    state = decode.select_streams(decode.concatenate_streams([state, state]), order)
    return of.beam(*parts[2:], width=2, state=state)._replace(state=None), first.stable


def rows_by_hand(shared, targets):
    return shared["table"][np.pad(targets, ((0, 0), (1, 0)), constant_values=BLANK)]


@case("targets", name="decode.predict", truth=rows_by_hand)
def predict(shared, targets):
    return decode.predict(predictor(shared), targets)


@case("frame_logits", "frames", name="decode.phrase_scores")
def phrase_scores(shared, *batch):
    return decode.phrase_scores(*batch, jnp.array([[0, 1], [2, 2]], jnp.int32), jnp.array([2, 1], jnp.int32))


def levenshtein(shared, labels, counts, targets, lengths):
    rows = zip(labels[..., 0].round().astype(int).tolist(), counts, targets.tolist(), lengths)
    return np.array([truth_of.edit_distance(a[:n], b[:m]) for a, n, b, m in rows])


@case("rows", "labels", "targets", "labels", name="metrics.edit_distance", truth=levenshtein)
def edit_distance(shared, rows, counts, targets, lengths):
    return metrics.edit_distance(jnp.round(rows[..., 0]).astype(jnp.int32), counts, targets, lengths)


# ------------------------------------------------------------------------------------------------------------ all names

HOST = {  # of NumPy arrays, texts and files, and of values that are known
    *("export_checks", "selftest", "decode.find_phrases", "decode.linen_predictor", "decode.nnx_predictor"),
    *(f"metrics.{x}" for x in ("LabelErrors", "label_errors", "word_confidence")),
    *("decode.NGram", "decode.WordNGram", "decode.FoundPhrase"),
    *(f"plot.{x}" for x in ("draw_emissions", "draw_lattice")),
    *(f"timing.{x}" for x in ("Interval", "frames_to_seconds", "intervals", "is_dense", "joins", "words")),
}
PARTS = {  # of the cases above, or of another case's result
    *("Alignment", "Composition", "DecodingRules", "TransducerLoss", "decode.Search", "decode.Hypotheses"),
    *(f"decode.{x}" for x in ("Entropy", "Guard", "Labels", "Phrases", "Predictor", "stateless_predictor")),
    *(f"decode.{x}" for x in ("commit_labels", "concatenate_streams", "reset_streams", "select_streams")),
    *(f"lattices.{x}" for x in ("Arc", "STANDARD", "MONOTONIC", "multi_blank", "products", "token_and_duration")),
}


def test_every_public_function_is_here():
    """Modules of Flax: decode/test_flax.py, test_axes.py."""
    found = {*jax_rnnt.__all__} | {f"RNNTLoss.{x}" for x in METHODS}
    # Of the other public folders, all that people need stands in jax_rnnt.
    modules = {x.name for x in pkgutil.iter_modules(jax_rnnt.__path__) if x.name[0] != "_"}
    for module in modules - {"emissions", "flax", "layouts", "losses", "sharding", "tiles"}:
        module = importlib.import_module(f"jax_rnnt.{module}")
        names = getattr(module, "__all__", None) or [x for x in vars(module) if not x.startswith("_")]
        found |= {f"{module.__name__.removeprefix('jax_rnnt.')}.{x}" for x in names}
    assert found - {*CASES} - HOST - PARTS == set()
    verbs = {x for x in vars(decode.Search) if not x.startswith("_") and callable(getattr(decode.Search, x))}
    assert verbs - {x.split(".")[-1] for x in CASES} == set()
    methods = {x for x in vars(jax_rnnt.TransducerLoss) if not x.startswith("_")}
    methods = {x for x in methods if callable(getattr(jax_rnnt.TransducerLoss, x))}
    assert methods - {*METHODS, "compose", "decoding", "validate"} == set()


# ----------------------------------------------------------------------------------------------------------- transforms


@functools.cache
def program(name):
    return jax.jit(CASES[name].function)


def inputs(name, seed=0):
    batch = arrays(seed)
    return parameters(seed + 10), *(batch[x] for x in CASES[name].names)


@functools.cache
def expected(name, seed=0):
    return jax.device_get(program(name)(*inputs(name, seed)))


def same(found, wanted):
    compare.assert_close(jax.device_get(found), wanted, rtol=1e-5, atol=1e-5)


def in_vmap(name):
    """All arrays are mapped, the shared ones alone, and the first of the batch alone."""
    function, one, other = CASES[name].function, inputs(name), inputs(name, 1)
    for mapped in ({*range(1, len(one))}, {0}, {1}):
        axes = [0 if i in mapped else None for i in range(len(one))]
        both = [
            jax.tree.map(lambda *x: np.stack(x), x, y) if i in mapped else x for i, (x, y) in enumerate(zip(one, other))
        ]
        found = jax.device_get(jax.jit(jax.vmap(function, axes))(*both))
        for i, x in enumerate((one, other)):
            wanted = program(name)(*(x[j] if j in mapped else one[j] for j in range(len(one))))
            same(jax.tree.map(lambda x, i=i: x[i], found), jax.device_get(wanted))


def split(x):
    return x.reshape(2, B // 2, *x.shape[1:])


def in_pmap(name):
    shared, *batch = inputs(name)
    axes = None, *[0] * len(batch)
    found = jax.pmap(CASES[name].function, in_axes=axes, devices=jax.devices("cpu")[:2])(shared, *map(split, batch))
    same(jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), jax.device_get(found)), expected(name))


def in_shard_map(name):
    values = inputs(name)
    with mesh_of(jax.devices("cpu")[:2], "auto", (2,)) as mesh:
        specs = P(), *[P("data")] * (len(values) - 1)
        mapped = jax.shard_map(CASES[name].function, mesh=mesh, in_specs=specs, out_specs=P("data"))
        same(jax.jit(mapped)(*values), expected(name))


ROWS = "PackedLogits", "sum_over_nodes of rows"  # which may be on no device of their sequence


def check_on_mesh(name, mesh, batch):
    """The value; or words about what to do, for rows that are split otherwise than sequences."""
    call = functools.partial(program(name), at(mesh, inputs(name)[0]), *batch)
    if name in ROWS and jax.typeof(batch[0]).sharding.spec[0]:
        with pytest.raises(ValueError, match="reshard"):
            call()
    else:
        same(call(), expected(name))


def on_explicit_axes(name):
    with mesh_of(jax.devices("cpu")[:2], "explicit", (2,)) as mesh:
        check_on_mesh(name, mesh, at(mesh, inputs(name)[1:], "data"))


def partly_on_explicit_axes(name):
    """One array of the batch is split, and the others are whole."""
    _, *batch = inputs(name)
    with mesh_of(jax.devices("cpu")[:2], "explicit", (2,)) as mesh:
        for i in range(len(batch)):
            check_on_mesh(name, mesh, [at(mesh, x, *["data"][: i == j]) for j, x in enumerate(batch)])


# These cases reshape or gather the logits themselves.
OWN = "PackedLogits", "sum_over_nodes of rows", "BandLogits", "sum_over_nodes of a band"


def split_within_sequences(name):
    """Each array is split over one dimension of its sequences: a result, or words about what to do."""
    shared, *batch = inputs(name)
    if name in OWN:
        return
    with mesh_of(jax.devices("cpu")[:1], "explicit", (1,)) as mesh:  # one device divides all sizes
        for i, x in enumerate(batch):
            for axes in ((*[None] * d, "data") for d in range(1, x.ndim)):
                given = [at(mesh, y, *(axes if i == j else ())) for j, y in enumerate(batch)]
                try:
                    jax.eval_shape(CASES[name].function, at(mesh, shared), *given)
                except ValueError as error:
                    if "reshard" not in str(error):
                        raise


def exported(name):
    """For batches of any size, after a round trip through bytes."""
    pytest.importorskip("flatbuffers")
    shared, *batch = inputs(name)
    symbols = dict(zip("btu", export.symbolic_shape("b, t, u")))
    symbols["u + 1"] = symbols["u"] + 1
    shapes = [[symbols.get(n, n) for n in DIMENSIONS[x]] for x in CASES[name].names]
    types = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, batch)]
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shared)
    made = export.export(program(name), disabled_checks=jax_rnnt.export_checks())(whole, *types)
    same(export.deserialize(made.serialize()).call(shared, *batch), expected(name))


def inside_a_gradient(name):
    """As a result beside the value: whatever it reads, it does not disturb the derivative of something else."""

    def value(trained, others):
        given = [others[i] if x is None else x for i, x in enumerate(trained)]
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(trained)), CASES[name].function(*given)

    values = [jax.tree.map(jnp.asarray, x) for x in inputs(name)]
    trained = [x if i == 0 or jnp.issubdtype(x.dtype, jnp.floating) else None for i, x in enumerate(values)]
    (_, found), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(trained, values)
    same(found, expected(name))
    same(gradient, jax.tree.map(lambda x: 2 * np.asarray(x), trained))


def truth(name):
    if CASES[name].truth is not None:
        wanted = CASES[name].truth(*inputs(name))
        compare.assert_close(expected(name), wanted, rtol=1e-5, atol=1e-5)


TRANSFORMS = [truth, in_vmap, in_pmap, in_shard_map, on_explicit_axes, partly_on_explicit_axes]
TRANSFORMS += [split_within_sequences]
TRANSFORMS += [exported, inside_a_gradient]
FEW = "metrics.edit_distance", "decode.predict", "sum_over_nodes", "RNNTLoss"
QUICK = [f"{name}-{transform.__name__}" for name in FEW for transform in TRANSFORMS]
QUICK += [f"{name}-truth" for name, x in CASES.items() if x.truth]
QUICK += [f"{name}-inside_a_gradient" for name in ("decode.Search.greedy", "decode.Search.beam")]
QUICK += ["decode.Search.greedy-in_shard_map", "TargetRobustRNNTLoss-on_explicit_axes"]
QUICK += [f"{name}-split_within_sequences" for name in ("prune_inputs", "decode.phrase_scores")]
QUICK += ["PackedLogits-partly_on_explicit_axes"]


@pytest.mark.quick(*dict.fromkeys(QUICK))
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda x: x.__name__)
@pytest.mark.parametrize("name", CASES)
def test_transform(name, transform, devices):
    if "explicit" in transform.__name__ and not hasattr(jax, "set_mesh"):
        pytest.skip("needs jax.set_mesh")
    transform(name)


def test_names_of_residuals_under_remat3():
    """JAX 0.10 cannot name what `vmap` maps under its flag `jax_remat3`."""
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("needs a JAX with jax_remat3")
    _, *batch = inputs("RNNTLoss")
    gradient = jax.vmap(jax.grad(lambda *x: LOSS(*x)))
    wanted = gradient(*batch)
    before = jax.config.jax_remat3
    try:
        jax.config.update("jax_remat3", True)
        same(gradient(*batch), jax.device_get(wanted))
    finally:
        jax.config.update("jax_remat3", before)
