"""Does every pair of loss and layout answer every question as the table of docs/losses.md says?

Answers are compared with those for an array, which other files compare with the truth.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import jax_rnnt
import layout_table
import project
from jax_rnnt import AdditiveLogits, BandLogits, JointLogits, PackedLogits, lattices
from pages import code

pytestmark = pytest.mark.no_kernel
EXACT = 1e-11
LOSSES = {loss.kind.__name__: loss for loss in family.LOSSES if loss.name != "monotonic_final_blank"}
QUESTIONS = ("value", "posteriors", "align", "label_frames", "latency", "label_log_probs", "arc_log_probs")
DIFFERENTIATED = ("value", "arc_log_probs", "latency")
OF_LAYOUTS = "value", "arc_log_probs"  # the others are functions of the same arcs: one layout stands for all
RNNT = jax_rnnt.RNNTLoss(reduction="none")


@functools.cache
def refused():
    """{(loss, layout): reason} of the page."""
    text = (project.ROOT / "docs/losses.md").read_text()
    return {(x, y): reason for x, y, reason in re.findall(r"^\| `(\w+)` on `(\w+)` \| (.*) \|$", text, re.MULTILINE)}


def ask(loss, question, logits, rest):
    return loss(logits, *rest) if question == "value" else getattr(loss, question)(logits, *rest)


def weighted(found, seed):
    """A sum of all finite numbers of an answer, with weights that differ."""
    numbers = [x for x in jax.tree.leaves(found) if jnp.issubdtype(x.dtype, jnp.floating)]
    weights = (np.cos(seed + np.arange(x.size)).reshape(x.shape) for x in numbers)
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0) * w) for x, w in zip(numbers, weights))


def answers(loss, make, questions=OF_LAYOUTS):
    """A program of arrays and the rest of a batch: the gradients of a weighted sum of all numbers in the answers, for
    the arrays and the delay penalty, and {question: answer}.
    """

    @jax.jit
    def run(arrays, *rest):
        def total(arrays, penalty):
            value = dataclasses.replace(loss, delay_penalty=penalty)
            found = {question: ask(value, question, make(*arrays), rest) for question in questions}
            return sum(weighted(found[x], i) for i, x in enumerate(DIFFERENTIATED) if x in found), found

        return jax.grad(total, (0, 1), has_aux=True)(arrays, loss.delay_penalty)

    return run


def assert_same_answers(got, expected):
    ((gradient, of_penalty), found), ((of_array, penalty), wanted) = got, expected
    for question in found:
        compare.assert_close(found[question], wanted[question], atol=EXACT, message=question)
    compare.assert_close(gradient, of_array, atol=EXACT)
    np.testing.assert_allclose(of_penalty, penalty, rtol=EXACT)
    assert all(np.abs(x).max() > 0.1 for x in gradient)


OPTIONS = {"reduction": "none", "fastemit_lambda": 0.25, "delay_penalty": 0.125}


@functools.cache
def of_array(kind, questions):
    return answers(LOSSES[kind].value(**OPTIONS), lambda x: x, questions)


def answers_of_array(kind, name, questions):
    """The answers for the array that a layout stands for, its gradient by hand."""
    p, arrays = layout_table.problem(LOSSES[kind], name)
    dense = np.asarray(layout_table.dense(p, name)(*arrays))
    ((gradient,), penalty), found = of_array(kind, questions)((dense,), *p[1:])
    gradient = np.asarray(gradient)
    by_array = {"AdditiveLogits": (gradient.sum(2), gradient.sum(1))}.get(name, (gradient,))
    return (by_array, penalty), found


# Every layout; a second head, and a step that reads the next column.
PAIRS = [("RNNTLoss", name) for name in layout_table.NAMES[1:]]
PAIRS += [("TDTLoss", "JointLogits"), ("ConstrainedRNNTLoss", "BandLogits")]


@pytest.mark.quick("RNNTLoss-JointLogits", "RNNTLoss-BandLogits", "ConstrainedRNNTLoss-BandLogits")
@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_answers(kind, name):
    """They have the values and gradients of the array."""
    p, arrays = layout_table.problem(LOSSES[kind], name)
    loss, make = LOSSES[kind].value(**OPTIONS), layout_table.layout(p, name)
    questions = QUESTIONS if name == "PackedLogits" and kind == "RNNTLoss" else OF_LAYOUTS
    got = answers(loss, make, questions)(arrays, *p[1:])
    assert_same_answers(got, answers_of_array(kind, name, questions))


@pytest.mark.parametrize(("kind", "name"), [*itertools.product(LOSSES, layout_table.NAMES)])
def test_table(kind, name):
    """Each pair has an answer, or raises a TypeError that names loss and layout."""
    variant, reason = LOSSES[kind], refused().get((kind, name))
    p, arrays = layout_table.problem(variant, name)
    loss, make = variant.value(**OPTIONS), layout_table.layout(p, name)
    if reason is None:
        assert jax.eval_shape(lambda *arrays: loss(make(*arrays), *p[1:]), *arrays).shape == (4,)
        return
    for question in (*QUESTIONS, "validate"):
        text = rf"{kind}.*{name}: {re.escape(reason)}"
        with pytest.raises(TypeError, match=text):
            ask(loss, question, make(*arrays), p[1:])


@pytest.mark.quick("BandLogits", "JointLogits")
@pytest.mark.parametrize("name", layout_table.OF_LOGITS)
def test_options(name):
    """All at once; clamp clips the gradient of a logit, which only a tile knows. Then log-probabilities."""
    p, _ = layout_table.problem()
    windows = np.array([[[0, 9], [1, 5], [2, 9], [0, 6]]] * 4, np.int32)
    loss = dataclasses.replace(family.RNNT, layout=layout_table.layout(p, name))
    q = p._replace(logits=np.asarray(layout_table.dense(p, name)(p.logits)))
    options = {"blank": 3, "clamp": 1 / 16, "fastemit_lambda": 0.25, "delay_penalty": 1 / 128, "label_windows": windows}
    for given in (options, {"fused_log_softmax": False}):
        got, expected = compare.evaluate(loss, p, None, **given), family.RNNT.expected(q, **given)
        np.testing.assert_allclose(got[0], expected[0], rtol=EXACT)
        np.testing.assert_allclose(got[1], expected[1], atol=EXACT)


def test_hypotheses_of_each_utterance():
    """Encoder rows [2, 1, 2, T, E] of N = 3 hypotheses: a batch dimension of 1."""
    own, rng, batch = (2, 1, 2), np.random.default_rng(2), (2, 3, 2)
    rows = rng.normal(size=(*own, 4, 6)), rng.normal(size=(*batch, 3, 6))
    lengths = np.full(batch, 4, np.int32), rng.integers(0, 3, batch).astype(np.int32)
    rest = rng.integers(0, 5, (*batch, 2)).astype(np.int32), *lengths
    in_tiles = lambda *rows: JointLogits(lambda e, q: jnp.tanh(e + q), *rows)
    whole = lambda e, q: jnp.tanh(e[..., :, None, :] + q[..., None, :, :])
    assert in_tiles(*rows).shape == whole(*rows).shape
    assert_same_answers(*(answers(RNNT, make, OF_LAYOUTS)(rows, *rest) for make in (in_tiles, whole)))


@pytest.mark.parametrize("kind", ["RNNTLoss", "TDTLoss"])
def test_a_loss_as_an_argument_of_jit(kind, kernel):
    """Numbers that are 0 are not known to be: the same values, never below 0, and the same lattice for the arcs."""
    variant = LOSSES[kind]
    own = {"durations": [2, 3]} if kind == "TDTLoss" else variant.options
    loss = variant.kind(**own, reduction="none", implementation=kernel)
    p, _ = layout_table.problem(variant)
    p = p._replace(logits=p.logits[..., : 9 + len(own.get("durations", ()))])
    np.testing.assert_allclose(jax.jit(lambda loss: loss(*p))(loss), loss(*p), rtol=1e-12)
    certain = np.zeros_like(p.logits)
    certain[..., 8] = certain[:, :, :-1, 0] = 80  # two classes of probability 1/2
    q = p._replace(logits=certain.astype(np.float32), targets=np.zeros_like(p.targets))
    assert (np.asarray(jax.jit(lambda loss: loss(*q))(loss)) >= 0).all()

    @jax.jit
    def by_arcs(loss):
        return lattices.log_likelihood(loss.topology, loss.arc_log_probs(*p), *p[2:])

    np.testing.assert_allclose(by_arcs(loss), -loss(*p), rtol=1e-12)


# -------------------------------------------------------------------------------------------------- scores am + lm
CLAMPS = {"NumPy": np.float32(0.01), "array of NumPy": np.array(0.01), "array": jnp.array(0.01)}


def test_no_known_clamp_where_there_are_no_logits():
    """Whatever type the number has; also as a leaf that no check has seen, and under jit."""
    p, scores = layout_table.problem(name="AdditiveLogits")
    for clamp in (0.5, *CLAMPS.values()):
        loss = jax_rnnt.RNNTLoss(clamp=clamp)
        leaf = jax.tree.map(lambda x, clamp=clamp, loss=loss: clamp if x is loss.clamp else x, loss)
        for each in (loss, leaf):
            for call in (each, jax.jit(each.__call__)):
                with pytest.raises(TypeError, match="clamp of RNNTLoss must be off"):
                    call(AdditiveLogits(*scores), *p[1:])
        off = jax_rnnt.RNNTLoss(clamp=clamp * -1)
        assert jax.eval_shape(lambda off=off: off(AdditiveLogits(*scores), *p[1:])).shape == ()


@pytest.mark.slow
def test_additive_logits_with_a_traced_clamp():
    """NaN if it is on. Where it is off, gradients of scores and scales stay."""
    p, scores = layout_table.problem(name="AdditiveLogits")

    def run(clamp, leaves):
        loss = jax_rnnt.RNNTLoss(clamp=clamp)
        return jax.value_and_grad(lambda leaves: loss(AdditiveLogits(*leaves), *p[1:]))(leaves)

    leaves, traced = (*scores, 0.25), jax.jit(run)
    expected = jax.jit(functools.partial(run, -1.0))(leaves)
    compare.assert_close(traced(-1.0, leaves), expected, rtol=1e-12)
    value, (of_am, of_lm, _) = traced(0.5, leaves)  # what sequences share gets nothing from those of NaN
    assert all(np.isnan(x).any() for x in (value, of_am, of_lm))


# ------------------------------------------------------------------------------------------------------ validation
@pytest.mark.parametrize("name", layout_table.NAMES)
def test_validation(name):
    p, arrays = layout_table.problem(name=name)
    made = layout_table.layout(p, name)(*arrays)
    jax_rnnt.RNNTLoss().validate(made, *p[1:])
    frames, targets = p.logit_lengths.copy(), np.where(p.targets == 7, 0, p.targets)
    frames[1], targets[1] = 8, 7
    with pytest.raises(ValueError, match=r"logit_lengths\[1\] must lie in \[0, 7\], got 8"):
        jax_rnnt.RNNTLoss().validate(made, p.targets, frames, p.target_lengths)
    with pytest.raises(ValueError, match=r"targets\[1, 0\] must not be a blank class \(7\), got 7"):
        jax_rnnt.RNNTLoss(blank=7).validate(made, targets, *p[2:])


def test_validation_of_rows_that_are_missing():
    """A band without the first node, or one that misses the end; rows for two of three packed sequences."""
    rest = np.ones((3, 1), int), np.array([2, 2, 2]), np.array([1, 1, 1])
    first = np.array([[0, 0], [1, 1], [0, 0]])
    rows = lambda n, frames=None: PackedLogits(np.zeros((n, 4)), frames)
    jax_rnnt.RNNTLoss().validate(rows(12), *rest)
    for made, message in (
        (BandLogits(np.zeros((3, 2, 2, 4)), first), r"target_lengths\[1\] must .* emit in 2 frames .*\+inf\), got 1"),
        (rows(11), r"logit_lengths\[2\] must leave a row of logits for every node, got 2"),
        (rows(12, 1), r"logit_lengths\[0\] must lie in \[0, 1\], got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            jax_rnnt.RNNTLoss().validate(made, *rest)


@pytest.mark.slow
def test_padding_of_nan_under_debug_nans(kernel):
    """jax_debug_nans looks at every operation outside of jit: the library runs none on padding.

    Arrays, and the reference: test_strict_settings.
    """
    p, (am, lm) = layout_table.problem(name="AdditiveLogits")
    used = batches.inside(p)
    am, lm = (jnp.asarray(np.where(kept[..., None], x, np.nan)) for kept, x in ((used[..., 0], am), (used[:, 0], lm)))
    p = batches.poisoned(p)
    logits, rows = jnp.asarray(p.logits), jnp.asarray(batches.packed(p, p.logits))
    linear = jax_rnnt.LinearJoint(jnp.ones((am.shape[-1],) * 2))
    value = jax_rnnt.RNNTLoss(reduction="sum", implementation=kernel)
    for arrays, make in (
        ((logits,), lambda x: BandLogits(x, jnp.zeros(x.shape[:2], jnp.int32))),
        ((rows,), lambda x: PackedLogits(x, 7)),
        ((am, lm), lambda *x: JointLogits(lambda a, b: jnp.tanh(a + b), *x)),
        ((am, lm), lambda *x: JointLogits(linear, *x)),
    ):
        with jax.debug_nans(True):
            found, gradients = jax.value_and_grad(lambda *x: value(make(*x), *p[1:]), range(len(arrays)))(*arrays)
        assert np.isfinite(found) and all(np.isfinite(g).all() for g in gradients)


def test_a_layout_is_one_placement(kernel):
    """A layout that the library lacks: that of lab/extending.md, whose rows are other sequences than the batch's."""
    if not (project.ROOT / "lab").exists():
        pytest.skip("no lab beside the tests")
    layout = code("lab/extending.md", "class FramesFirst")[0]["FramesFirstLogits"]
    loss = family.TDT
    p = batches.poisoned(batches.problem(loss=loss))
    value = loss.value(reduction="none", implementation=kernel, clamp=0.3)
    step = lambda x: jnp.sum(value(layout(x), *p[1:]))
    losses, gradient = jax.jit(lambda x: (value(layout(x), *p[1:]), jax.grad(step)(x)))(p.logits.swapaxes(0, 1))
    compare.assert_matches((losses, np.swapaxes(gradient, 0, 1)), loss.expected(p, clamp=0.3), np.float64, 11)
    with pytest.raises(TypeError, match="arrays or layouts of jax_rnnt, got FramesFirstLogits"):
        jax_rnnt.sum_over_nodes(jnp.sum, layout(p.logits), logit_lengths=p[2], target_lengths=p[3])
