"""Does every pair of loss and layout answer every question as the table of docs/losses.md says?

Answers are compared with those for an array, which other files compare with the truth.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, PackedLogits, lattices
from losses import lookup

B, T, U, V = 4, 7, 4, 9
EXACT = 1e-11
LOSSES = {
    "RNNTLoss": losses.RNNT,
    "MonotonicRNNTLoss": losses.MONOTONIC,
    "ConstrainedRNNTLoss": losses.CONSTRAINED,
    "MultiblankRNNTLoss": losses.multiblank(losses.BIG),
    "TDTLoss": losses.TDT,
    "HATLoss": losses.HAT,
}
LAYOUTS = ("array", "JointLogits", "PackedLogits", "BandLogits", "AdditiveLogits")
QUESTIONS = ("value", "posteriors", "align", "emission_frames", "latency", "arcs")
WIDTH = 4


def table():
    """{loss: {layout: cell}} of the page."""
    text = (losses.ROOT / "docs/losses.md").read_text()
    (head,) = re.findall(r"^\| loss \| array .*$", text, re.MULTILINE)
    names = [cell.strip(" `") for cell in head.strip("|").split("|")][1:]
    assert tuple(names) == LAYOUTS
    rows = [line.strip("|").split("|") for line in text.split(head)[1].splitlines()[2:8]]
    return {row[0].strip(" `"): dict(zip(names, (cell.strip() for cell in row[1:]), strict=True)) for row in rows}


def packed(p, x):
    """The rows of all sequences, one after the other."""
    node = [
        (b, t, u)
        for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths, strict=True))
        for t in range(n)
        for u in range(m + 1)
    ]
    return x[tuple(np.array(node).T)]


def first_columns(p):
    """A band that starts in column 0, ends in the last one, and leaves out nodes."""
    steps = np.arange(T)[None] - p.logit_lengths[:, None] + 1 + np.maximum(p.target_lengths[:, None] - WIDTH + 1, 0)
    return np.clip(steps, 0, np.maximum(p.target_lengths[:, None] - WIDTH + 1, 0)).astype(np.int32)


def problem(loss):
    """Arrays to differentiate, and the rest of a call."""
    p = losses.problem(B, T, U, V, loss=loss, scale=1.0)
    rng = np.random.default_rng(1)
    classes = V + loss.extra_classes
    return p, (rng.normal(size=(B, T, classes)), rng.normal(size=(B, U + 1, classes)))


def layout(name, p):
    """(layout of arrays, function of the arrays for the equivalent array)."""
    column = np.broadcast_to(np.arange(U + 1, dtype=np.float64)[:, None], (B, U + 1, 1))
    first = first_columns(p)
    place = np.arange(U + 1) - first[..., None]
    inside = (place >= 0) & (place < WIDTH)
    index = np.clip(first[..., None] + np.arange(WIDTH), 0, U)

    def banded(x):
        return jnp.take_along_axis(x, index[..., None], 2)

    return {
        "array": lambda x: x,
        "JointLogits": lambda x: JointLogits(lookup(U + 1), x.reshape(B, T, -1), column, chunk=64),
        "PackedLogits": lambda x: PackedLogits(packed(p, x), T),
        "BandLogits": lambda x: BandLogits(banded(x), first),
        "AdditiveLogits": lambda am, lm: AdditiveLogits(am, lm),
    }[name], {
        "BandLogits": lambda x: jnp.where(inside[..., None], x, -jnp.inf),
        "AdditiveLogits": lambda am, lm: am[:, :, None] + lm[:, None],
    }.get(name, lambda x: x)


def ask(loss, question, logits, p, **options):
    rest = p[1:]
    if question == "value":
        return loss(logits, *rest, **options)
    return getattr(loss, question)(logits, *rest, **options)


def weighted(found, seed):
    """A sum of all finite numbers of an answer, with weights that differ."""
    numbers = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)]
    weights = (np.cos(seed + np.arange(x.size)).reshape(x.shape) for x in numbers)
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) * w) for x, w in zip(numbers, weights))


def answers(loss, make, arrays, p):
    """{question: answer}, and the gradient of a weighted sum of all numbers in them: one program."""

    def total(*arrays):
        found = {question: ask(loss, question, make(*arrays), p) for question in QUESTIONS}
        return sum(weighted(x, seed) for seed, x in enumerate(found.values())), found

    return jax.jit(jax.grad(total, tuple(range(len(arrays))), has_aux=True))(*arrays)


OPTIONS = {"reduction": "none", "fastemit_lambda": 0.25, "delay_penalty": 0.125}


@functools.cache
def answers_of_array(kind, name):
    """The answers for the array that a layout stands for; most stand for all logits."""
    p, am_lm = problem(LOSSES[kind])
    arrays = am_lm if name == "AdditiveLogits" else (p.logits,)
    return answers(LOSSES[kind].value(**OPTIONS), layout(name, p)[1], arrays, p)


def pairs():
    """The RNN-T stands for the other losses; the rest of the table is slow."""
    for kind in LOSSES:
        for name in LAYOUTS[1:]:
            fast = kind == "RNNTLoss" or table()[kind][name] != "yes"
            yield pytest.param(kind, name, id=f"{kind}-{name}", marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("kind", "name"), list(pairs()))
def test_table(kind, name):
    """Every question has the value and gradient of the array, or raises a TypeError that names loss and layout."""
    variant, cell = LOSSES[kind], table()[kind][name]
    assert table()[kind]["array"] == "yes"
    p, am_lm = problem(variant)
    arrays = am_lm if name == "AdditiveLogits" else (p.logits,)
    loss, make = variant.value(**OPTIONS), layout(name, p)[0]
    if cell != "yes":
        error, reason = cell.split(": ")
        assert error == "TypeError"
        for question in QUESTIONS:
            with pytest.raises(TypeError, match=rf"{kind}.*{name}: {re.escape(reason)}"):
                ask(loss, question, make(*arrays), p)
        return
    got, found = answers(loss, make, arrays, p)
    expected, wanted = answers_of_array(kind, name if name in ("BandLogits", "AdditiveLogits") else "array")
    for question in QUESTIONS:
        for a, b in zip(*map(jax.tree.leaves, (found[question], wanted[question])), strict=True):
            np.testing.assert_allclose(a, b, atol=EXACT, err_msg=question)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=EXACT)
        assert np.abs(a).max() > 0.1


WINDOWS = np.array([[[0, 9], [1, 5], [2, 9], [0, 6]]] * B, np.int32)


@pytest.mark.parametrize("name", LAYOUTS[1:4])
def test_options(name):
    """All at once; clamp clips the gradient of a logit, which only a tile knows. Then log-probabilities."""
    p, _ = problem(losses.RNNT)
    make, dense = layout(name, p)

    def gradient(function, loss, windows):
        call = lambda x: loss(function(x), *p[1:], label_windows=windows)
        return jax.jit(jax.value_and_grad(call))(p.logits)

    options = {"blank": 3, "clamp": 0.05, "fastemit_lambda": 0.25, "delay_penalty": 0.01, "reduction": "mean_volume"}
    for given, windows in ((options, WINDOWS), ({"fused_log_softmax": False}, None)):
        loss = jax_rnnt.RNNTLoss(**given)
        got, expected = (gradient(function, loss, windows) for function in (make, dense))
        np.testing.assert_allclose(got[0], expected[0], rtol=EXACT)
        np.testing.assert_allclose(got[1], expected[1], atol=EXACT)


@pytest.mark.parametrize("name", LAYOUTS[1:4])
def test_what_is_never_read(name):
    """NaN outside the lengths; a bad length, a bad label, and NaN inside stay in their sequence."""
    p, _ = problem(losses.RNNT)
    make, _ = layout(name, p)
    loss = jax_rnnt.RNNTLoss(reduction="none")

    @jax.jit
    def run(x, targets, frames):
        values, pull = jax.vjp(lambda x: loss(make(x), targets, frames, p.target_lengths), x)
        return values, pull(jnp.ones(B))[0]

    clean = run(p.logits, *p[1:3])
    for a, b in zip(run(losses.poisoned(p).logits, *p[1:3]), clean, strict=True):
        losses.assert_same_bits(a, b)
    spoiled, targets, frames = p.logits.copy(), p.targets.copy(), p.logit_lengths.copy()
    spoiled[0, 0, 0, 0], targets[1, 0] = np.nan, V
    if name != "PackedLogits":  # whose sequences lie where the lengths say
        frames[2] = T + 1
    values, gradient = run(spoiled, targets, frames)
    bad = np.array([True, True, name != "PackedLogits", False])
    np.testing.assert_array_equal(np.isnan(values), bad)
    np.testing.assert_allclose(values[~bad], np.asarray(clean[0])[~bad], rtol=1e-12)
    np.testing.assert_allclose(gradient[~bad], np.asarray(clean[1])[~bad], atol=1e-12)
    assert np.isnan(gradient[0]).any() and not np.any(gradient[bad][1:])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in ("RNNTLoss", "TDTLoss") else [pytest.mark.slow]) for kind in LOSSES]
)
def test_leaves(kind, name):
    """In every layout a learned leaf has the array's gradient, which is its slope; settings have exactly 0."""
    variant = LOSSES[kind]
    if table()[kind][name] != "yes":
        pytest.skip("no such pair")
    p, am_lm = problem(variant)
    arrays = am_lm if name == "AdditiveLogits" else (p.logits,)
    make, _ = layout(name, p)
    learned = {"delay_penalty": 0.2} | ({"sigma": 0.1} if hasattr(variant.kind, "sigma") else {})
    settings = {"fastemit_lambda": 0.5} | ({"clamp": 0.3} if name != "AdditiveLogits" else {})
    loss = variant.value(reduction="sum", **learned, **settings)

    @jax.jit
    def run(loss):
        return ask(loss, "value", make(*arrays), p)

    # FastEmit scales gradients, also those of leaves, so slopes are compared without it.
    of = jax.grad(run)(loss)
    assert of.fastemit_lambda == 0 and of.clamp == 0
    assert type(of) is variant.kind and of.reduction == "sum"
    of = jax.grad(run)(variant.value(reduction="sum", **learned))
    for leaf, value in learned.items():
        up, down = (run(variant.value(reduction="sum", **learned | {leaf: value + h})) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(getattr(of, leaf), (up - down) / 2e-5, rtol=1e-7, err_msg=leaf)


@pytest.mark.parametrize("name", ["JointLogits", "AdditiveLogits"])
def test_shape_and_dtype(name):
    """A layout has the shape and dtype of the logits that it stands for."""
    p, (am, lm) = problem(losses.RNNT)
    made = layout(name, p)[0](*((am, lm) if name == "AdditiveLogits" else (p.logits,)))
    assert made.shape == (B, T, U + 1, V) and made.dtype == np.float64 and made.ndim == 4


@pytest.mark.parametrize("name", LAYOUTS[1:])
def test_are_pytrees(name):
    """An argument of jit, mapped leaf by leaf; a new value of the leaves compiles nothing."""
    p, am_lm = problem(losses.RNNT)
    made = layout(name, p)[0](*(am_lm if name == "AdditiveLogits" else (jnp.asarray(p.logits),)))
    expected = jax_rnnt.RNNTLoss()(made, *p[1:])
    run = jax.jit(lambda logits, loss: loss(logits, *p[1:]))
    np.testing.assert_allclose(run(made, jax_rnnt.RNNTLoss()), expected, rtol=1e-12)
    other = jax.tree.map(lambda x: x if jnp.issubdtype(jnp.result_type(x), jnp.integer) else x * 1.0, made)
    assert type(other) is type(made)
    run(other, jax_rnnt.RNNTLoss())
    assert run._cache_size() == 1


def test_hypotheses_of_each_utterance():
    """[B, 1, T, E] and [B, N, U + 1, P]: every question, by broadcasting."""
    rng, N = np.random.default_rng(2), 3
    encoder, predictor = rng.normal(size=(2, 1, T, V)), rng.normal(size=(2, N, U + 1, V))
    targets = rng.integers(0, V - 1, (2, N, U)).astype(np.int32)
    lengths = np.full((2, N), T, np.int32), rng.integers(0, U + 1, (2, N)).astype(np.int32)
    p = losses.Problem(JointLogits(lambda e, q: jnp.tanh(e + q), encoder, predictor), targets, *lengths)
    logits = np.tanh(encoder[..., :, None, :] + predictor[..., None, :, :])
    assert p.logits.shape == logits.shape
    loss = jax_rnnt.RNNTLoss(reduction="none")
    for question in QUESTIONS:
        got, expected = (jax.tree.leaves(ask(loss, question, x, p)) for x in (p.logits, logits))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=EXACT)


@pytest.mark.parametrize("own", [(2, 1, 2), (1, 3, 2)], ids=str)
def test_encoders_that_broadcast(own):
    """Against batch dimensions of the predictor [2, 3, 2, U + 1, P], wherever they differ."""
    rng, batch = np.random.default_rng(3), (2, 3, 2)
    encoder, predictor = rng.normal(size=(*own, 3, 5)), rng.normal(size=(*batch, 3, 5))
    rest = rng.integers(0, 4, (*batch, 2)).astype(np.int32), np.full(batch, 3, np.int32), rng.integers(0, 3, batch)
    logits = np.tanh(encoder[..., :, None, :] + predictor[..., None, :, :])
    loss = jax_rnnt.RNNTLoss(reduction="none")
    got = loss(JointLogits(lambda e, q: jnp.tanh(e + q), encoder, predictor), *rest)
    np.testing.assert_allclose(got, loss(logits, *rest), rtol=EXACT)


@pytest.mark.rare(
    "reference-MultiblankRNNTLoss",
    "reference-RNNTLoss",
    "reference-MonotonicRNNTLoss",
    "reference-ConstrainedRNNTLoss",
    "reference-HATLoss",
)
@pytest.mark.parametrize("kind", LOSSES)
def test_arcs_lead_to_the_loss(kind, implementation):
    """With any dynamic program on the arcs. They are -inf outside the lengths, and NaN for data out of range."""
    variant = LOSSES[kind]
    p = losses.poisoned(losses.problem(5, T, U, V, loss=variant))
    p.logit_lengths[4] = T + 1
    loss = variant.value(reduction="none", implementation=implementation, delay_penalty=0.2)
    arcs = jax.jit(loss.arcs)(*p)
    assert set(arcs) == set(lattices.topology.slots(loss.lattice))
    values = lattices.log_likelihood(loss.lattice, arcs, *p[2:], implementation=implementation)
    np.testing.assert_allclose(values, -loss(*p), rtol=1e-12)
    for b, (n, m) in enumerate(zip(p.logit_lengths[:4], p.target_lengths[:4], strict=True)):
        for x in arcs.values():
            assert np.isneginf(x[b, n:]).all() and np.isneginf(x[b, :, m + 1 :]).all()
    assert all(np.isnan(x[4]).all() for x in arcs.values())


BAD = {
    "wrong rank": (lambda p: p.logits[0, 0], "logits must have shape"),
    "no array": (lambda p: None, "logits must be an array"),
    "rows of rank 3": (lambda p: PackedLogits(p.logits[0], 7), "logits must have shape [N, V]"),
    "frames below 0": (lambda p: PackedLogits(p.logits[0, 0], -1), "max_frames must be 0 or more"),
    "frames not static": (lambda p: PackedLogits(p.logits[0, 0], 2.0), "max_frames must be an integer"),
    "first of another shape": (lambda p: BandLogits(p.logits, np.zeros((B, 2), int)), "first must have shape"),
    "first of floats": (lambda p: BandLogits(p.logits, np.zeros((B, T))), "first must have an integer"),
    "widths": (lambda p: AdditiveLogits(p.logits[:, :, 0], p.logits[:, 0, :, 1:]), "lm must have shape"),
    "a prior of another size": (lambda p: AdditiveLogits(*am_lm(p), unigram=np.ones(3)), "unigram must have shape"),
    "no scale": (lambda p: AdditiveLogits(*am_lm(p), lm_only_scale="1"), "lm_only_scale must be a real number"),
    "no joint": (lambda p: JointLogits(None, *am_lm(p)), "joint must be callable"),
    "batches": (lambda p: JointLogits(lookup(U + 1), am_lm(p)[0][:3], am_lm(p)[1]), "predictor_out must have shape"),
    "another shape": (lambda p: JointLogits(lambda e, q: e[0], *am_lm(p)), "joint must make logits"),
    "layout in a layout": (
        lambda p: BandLogits(JointLogits(lookup(U + 1), *am_lm(p)), first_columns(p)),
        "logits must be an array",
    ),
}


def am_lm(p):
    return p.logits[:, :, 0], p.logits[:, 0]


@pytest.mark.parametrize("case", BAD)
def test_errors(case):
    """One clear error that names the function that was called."""
    p = losses.problem(B, T, U, V)
    make, message = BAD[case]
    with pytest.raises((TypeError, ValueError), match=re.escape(f"RNNTLoss: {message}")):
        jax_rnnt.RNNTLoss()(make(p), *p[1:])
    with pytest.raises((TypeError, ValueError), match=re.escape(f"RNNTLoss.align: {message}")):
        jax_rnnt.RNNTLoss().align(make(p), *p[1:])
    with pytest.raises((TypeError, ValueError), match=re.escape(f"rnnt_posteriors: {message}")):
        jax_rnnt.rnnt_posteriors(make(p), *p[1:])


def test_data_out_of_range():
    """More rows than there are, a band beyond the columns: NaN, or +inf, for its own sequence."""
    p = losses.problem(B, T, U, V)
    rows = packed(p, p.logits)
    loss = jax_rnnt.RNNTLoss(reduction="none")
    expected = loss(*p)
    got = loss(PackedLogits(rows[:-1], T), *p[1:])
    np.testing.assert_array_equal(np.isnan(got), [False, False, False, True])
    np.testing.assert_allclose(got[:3], expected[:3], rtol=1e-12)
    first = np.zeros((B, T), np.int32)
    first[2] = 99
    got = loss(BandLogits(p.logits, first), *p[1:])
    np.testing.assert_array_equal(np.isposinf(got), [False, False, True, False])
    np.testing.assert_allclose(np.asarray(got)[[0, 1, 3]], np.asarray(expected)[[0, 1, 3]], rtol=1e-12)


def test_no_clamp_where_there_are_no_logits():
    p, (am, lm) = problem(losses.RNNT)
    with pytest.raises(TypeError, match="clamp of RNNTLoss must be off"):
        jax_rnnt.RNNTLoss(clamp=0.5)(AdditiveLogits(am, lm), *p[1:])
    with pytest.raises(TypeError, match="fused_log_softmax"):
        jax_rnnt.RNNTLoss(fused_log_softmax=False)(AdditiveLogits(am, lm), *p[1:])


CLAMPS = {"NumPy": np.float32(0.01), "array of NumPy": np.array(0.01), "array": jnp.array(0.01), "NaN": np.nan}


@pytest.mark.parametrize("clamp", CLAMPS.values(), ids=CLAMPS)
def test_no_known_clamp_where_there_are_no_logits(clamp):
    """Whatever type the number has; also as a leaf that no check has seen, and under jit."""
    p, (am, lm) = problem(losses.RNNT)
    loss = jax_rnnt.RNNTLoss(clamp=clamp)
    leaf = jax.tree.map(lambda x: clamp if x is loss.clamp else x, loss)
    for each in (loss, leaf):
        for call in (each, jax.jit(each.__call__)):
            with pytest.raises(TypeError, match="clamp of RNNTLoss must be off"):
                call(AdditiveLogits(am, lm), *p[1:])
    off = jax_rnnt.RNNTLoss(clamp=-1 if clamp is np.nan else clamp * -1)
    expected = jax_rnnt.RNNTLoss()(AdditiveLogits(am, lm), *p[1:])
    np.testing.assert_allclose(off(AdditiveLogits(am, lm), *p[1:]), expected, rtol=EXACT)


def test_lengths_closed_over():
    """Lengths that a trace closes over are known: rows of sequences get planes of max(logit_lengths) frames."""
    p = losses.problem(B, T, U, V)
    rows, rest = packed(p, p.logits), tuple(map(jnp.asarray, p[1:]))
    loss = jax_rnnt.RNNTLoss(reduction="none")
    arcs = jax.jit(lambda rows: loss.arcs(PackedLogits(rows), *rest))(rows)
    assert {x.shape for x in arcs.values()} == {(B, p.logit_lengths.max(), U + 1)}
    value = jax.jit(lambda rows: loss(PackedLogits(rows), *rest))(rows)
    np.testing.assert_allclose(value, loss(*p), rtol=EXACT)


def test_questions_as_functions():
    """Each question also has a function."""
    p = losses.problem(B, T, U, V)
    loss = jax_rnnt.ConstrainedRNNTLoss(reduction="sum", delay_penalty=0.25)
    pairs = {
        "posteriors": functools.partial(jax_rnnt.rnnt_posteriors, loss=loss),
        "align": functools.partial(jax_rnnt.rnnt_align, loss=loss),
        "emission_frames": functools.partial(jax_rnnt.expected_emission_frames, loss=loss),
        "latency": functools.partial(jax_rnnt.minimum_latency, loss=loss),
        "value": functools.partial(jax_rnnt.constrained_rnnt_loss, reduction="sum", delay_penalty=0.25),
    }
    for question, function in pairs.items():
        for a, b in zip(*map(jax.tree.leaves, (ask(loss, question, p.logits, p), function(*p))), strict=True):
            losses.assert_same_bits(a, b)


@pytest.mark.rare("reference-TDTLoss", "reference-MultiblankRNNTLoss")
@pytest.mark.parametrize("kind", ["RNNTLoss", "MultiblankRNNTLoss", "TDTLoss"])
def test_a_loss_as_an_argument_of_jit(kind, implementation):
    """Numbers that are 0 are not known to be: the same values, never below 0, and the same lattice for the arcs."""
    variant = LOSSES[kind]
    own = {"durations": [2, 3]} if kind == "TDTLoss" else variant.options
    loss = variant.kind(**own, reduction="none", implementation=implementation)
    p, _ = problem(variant)
    p = p._replace(logits=p.logits[..., : V + len(own.get("durations", ()))])
    np.testing.assert_allclose(jax.jit(lambda loss: loss(*p))(loss), loss(*p), rtol=1e-12)
    certain = np.zeros_like(p.logits)
    certain[..., V - 1] = certain[:, :, :-1, 0] = 80  # two classes of probability 1/2
    q = p._replace(logits=certain.astype(np.float32), targets=np.zeros_like(p.targets))
    assert (np.asarray(jax.jit(lambda loss: loss(*q))(loss)) >= 0).all()

    @jax.jit
    def by_arcs(loss):
        return lattices.log_likelihood(loss.lattice, loss.arcs(*p), *p[2:])

    np.testing.assert_allclose(by_arcs(loss), -loss(*p), rtol=1e-12)


def test_additive_logits_with_a_traced_clamp(implementation):
    """There is nothing to clip: gradients of scores and scales stay."""
    p, (am, lm) = problem(losses.RNNT)
    implementation = None if implementation == "kernel" else implementation
    call = lambda loss, scale: loss(AdditiveLogits(am, lm, scale), *p[1:])
    loss = jax_rnnt.RNNTLoss(implementation=implementation)
    expected = jax.grad(call, 1)(loss, 0.25)
    np.testing.assert_allclose(jax.jit(jax.grad(call, 1))(loss, 0.25), expected, rtol=1e-12)
    clipped = jax_rnnt.RNNTLoss(clamp=0.5, implementation=implementation)
    scores = jax.jit(jax.value_and_grad(lambda am, lm, loss: loss(AdditiveLogits(am, lm), *p[1:]), (0, 1)))
    value, gradients = scores(am, lm, clipped)
    assert all(np.isnan(x).any() for x in (value, *gradients))


def test_validation_of_every_layout():
    for name in LAYOUTS:
        p, am_lm = problem(losses.RNNT)
        made = layout(name, p)[0](*(am_lm if name == "AdditiveLogits" else (p.logits,)))
        jax_rnnt.RNNTLoss().validate(made, *p[1:])
        bad = np.where(np.arange(B) == 1, 8, p.logit_lengths), np.where(np.arange(B) == 1, 7, p.targets.T).T
        with pytest.raises(ValueError, match=r"logit_lengths\[1\] must lie in \[0, 7\], got 8"):
            jax_rnnt.RNNTLoss().validate(made, p.targets, bad[0], p.target_lengths)
        with pytest.raises(ValueError, match=r"targets\[1, 0\] must not be a blank class \(7\), got 7"):
            jax_rnnt.RNNTLoss(blank=7).validate(made, np.where(p.targets == 7, 0, bad[1]), *p[2:])
    with pytest.raises(TypeError, match=r"logits of TDTLoss must be .* got AdditiveLogits"):
        jax_rnnt.TDTLoss((0, 1)).validate(AdditiveLogits(*am_lm), *p[1:])


def test_validation_of_rows_that_are_missing():
    """A band without the first node, or one that misses the end; rows for two of three packed sequences."""
    lengths = np.array([2, 2, 2]), np.array([1, 1, 1])
    targets, first = np.ones((3, 1), int), np.array([[0, 0], [1, 1], [0, 0]])
    with pytest.raises(ValueError, match=r"target_lengths\[1\] must .* can emit in 2 frames .*\+inf\), got 1"):
        jax_rnnt.RNNTLoss().validate(BandLogits(np.zeros((3, 2, 2, 4)), first), targets, *lengths)
    jax_rnnt.RNNTLoss().validate(PackedLogits(np.zeros((12, 4))), targets, *lengths)
    with pytest.raises(ValueError, match=r"logit_lengths\[2\] must leave a row of logits for every node, got 2"):
        jax_rnnt.RNNTLoss().validate(PackedLogits(np.zeros((11, 4))), targets, *lengths)
    with pytest.raises(ValueError, match=r"logit_lengths\[0\] must lie in \[0, 1\], got 2"):
        jax_rnnt.RNNTLoss().validate(PackedLogits(np.zeros((12, 4)), max_frames=1), targets, *lengths)


@pytest.mark.family("reference", "slow")
def test_padding_of_nan_under_debug_nans(loss, implementation):
    """jax_debug_nans looks at every operation outside of jit: the library runs none on padding."""
    p, (am, lm) = problem(loss)
    rows = (
        np.arange(T)[:, None] < p.logit_lengths[:, None, None],
        np.arange(U + 1)[:, None] <= p.target_lengths[:, None, None],
    )
    am, lm = (jnp.asarray(np.where(used, x, np.nan)) for used, x in zip(rows, (am, lm)))
    p = losses.poisoned(p)
    joint = lambda a, b: jnp.tanh(a + b)
    linear = jax_rnnt.LinearJoint(jnp.ones((am.shape[-1],) * 2))
    layouts = {
        "array": ((jnp.asarray(p.logits),), lambda x: x),
        "band": ((jnp.asarray(p.logits),), lambda x: BandLogits(x, jnp.zeros((B, T), jnp.int32))),
        "packed": (
            (jnp.asarray(np.concatenate([packed(p, p.logits), p.logits[2, :, 4]])),),
            lambda x: PackedLogits(x, T),
        ),
        "joint": ((am, lm), lambda *x: JointLogits(joint, *x)),
        "linear": ((am, lm), lambda *x: JointLogits(linear, *x)),
    }
    if loss.name not in ("tdt", "hat") and implementation == "reference":
        layouts["additive"] = (am, lm), AdditiveLogits
    value = loss.value(reduction="sum", implementation=implementation)
    for arrays, make in layouts.values():
        with jax.debug_nans(True):
            found, gradients = jax.value_and_grad(lambda *x: value(make(*x), *p[1:]), range(len(arrays)))(*arrays)
        assert np.isfinite(found) and all(np.isfinite(g).all() for g in gradients)


def test_networks_that_broadcast_by_accident():
    """NumPy's rule would give utterance n of the encoder to hypothesis n where B = N, or B = 1."""
    joint, loss = jax_rnnt.LinearJoint(np.ones((5, 6))), jax_rnnt.RNNTLoss()
    for batch in (3, 1):
        lengths = np.full((batch, 3), 4), np.full((batch, 3), 2)
        targets, predictor = np.zeros((batch, 3, 2), int), np.ones((batch, 3, 3, 5))
        with pytest.raises(ValueError, match=r"predictor_out must have as many batch dim.*encoder_out\[:, None\]"):
            loss(JointLogits(joint, np.ones((batch, 4, 5)), predictor), targets, *lengths)
        loss(JointLogits(joint, np.ones((4, 5)), predictor), targets, *lengths)


def test_networks_that_are_exchanged():
    """Told by their numbers of rows, frames and labels; k2's simple loss takes the predictor's scores first."""
    rest = np.zeros((3, 2), int), np.full(3, 4), np.full(3, 2)
    frames, columns = np.ones((3, 4, 5)), np.ones((3, 3, 5))
    for layout, names in (
        (AdditiveLogits, "exchange am and lm"),
        (functools.partial(JointLogits, lambda a, b: a + b), "exchange encoder_out and predictor_out"),
    ):
        jax_rnnt.RNNTLoss()(layout(frames, columns), *rest)
        with pytest.raises(ValueError, match=f"targets must have .* got .*{names}"):
            jax_rnnt.RNNTLoss()(layout(columns, frames), *rest)


def test_too_many_blanks():
    with pytest.raises(ValueError, match=r"multiblank_rnnt_loss: .*blanks must lie in \[-3, 3\) for 3 classes, got"):
        jax_rnnt.multiblank_rnnt_loss(np.zeros((2, 2, 3)), np.zeros(1, int), 2, 1, [2, 3, 4])
