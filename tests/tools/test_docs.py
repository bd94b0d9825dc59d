"""Does the code of the documentation run, and does it do what its text promises?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth
from jax_rnnt import lattices
from pages import code

pytestmark = pytest.mark.slow
ROOT = losses.ROOT
EXACT = 1e-12


PRICE = 0.7


def bypass_emission(logits, labels, *, blank, fused=True):
    arcs, pull = truth.softmax_emission(logits, labels, blank=blank, fused=fused)
    return {**arcs, "bypass": np.full_like(arcs["blank"], -PRICE)}, pull


def test_a_loss_with_one_more_arc(implementation):
    """With every option and rule, from fewer than 30 lines with public names."""
    names, block = code("docs/losses.md", "class BypassLoss")
    assert len(block.splitlines()) < 30 and "._" not in block and "import _" not in block
    arcs = (truth.Arc("blank", 1, 0), truth.Arc("label", 0, 1), truth.Arc("bypass", 0, 1))

    def function(*arrays, label_windows=None, **options):
        return names["BypassLoss"](**options)(*arrays, label_windows=label_windows)

    tables = {"topology": arcs, "emission": bypass_emission}
    loss = losses.Loss("bypass", names["BypassLoss"], function, tables, {"price": PRICE})
    p = losses.poisoned(losses.problem(loss=loss))
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    for options in ({}, {"fastemit_lambda": 0.5, "delay_penalty": 0.125, "blank": 0, "label_windows": windows}):
        got = losses.evaluate(loss, p, implementation, **options)
        np.testing.assert_allclose(got[0], loss.expected(p, **options)[0], rtol=EXACT)
        np.testing.assert_allclose(got[1], loss.expected(p, **options)[1], atol=EXACT)

    def value(price):
        return names["BypassLoss"](price=price, reduction="sum", implementation=implementation)(*p)

    # The gradient of the price is how often the arc is expected.
    planes = loss.value().arcs(*p)
    lattice = loss.value().lattice
    score = lambda bypass: lattices.log_likelihood(lattice, planes | {"bypass": bypass}, *p[2:]).sum()
    count = jax.grad(score)(planes["bypass"])
    np.testing.assert_allclose(jax.grad(value)(PRICE), count.sum(), rtol=1e-9)
    np.testing.assert_allclose(jax.grad(value)(PRICE), (value(PRICE + 1e-5) - value(PRICE - 1e-5)) / 2e-5, rtol=1e-7)


def test_a_loss_with_unnormalised_arcs(implementation):
    """A risk that grows with the frame equals the delay penalty."""
    names, _ = code("docs/losses.md", "class BypassLoss")
    names, block = code("docs/losses.md", "class RiskLoss", **names)
    assert len(block.splitlines()) < 30
    p = losses.poisoned(losses.problem())
    middle = (p.logit_lengths[:, None, None] - 1) / 2
    risk = 0.25 * (np.arange(7)[:, None] - middle) + np.zeros((4, 7, 5))
    loss = names["RiskLoss"](risk=risk, reduction="none", implementation=implementation)
    call = lambda x: loss(x, *p[1:])
    got = jax.jit(lambda x: (lambda v, pull: (v, pull(jnp.ones(4))[0]))(*jax.vjp(call, x)))(p.logits)
    losses.assert_matches(got, losses.RNNT.expected(p, delay_penalty=0.25), np.float64, 11)


def test_joint_in_tiles():
    p = losses.problem()
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape)
    given = dict(zip(("targets", "logit_lengths", "target_lengths"), p[1:], strict=True))
    given |= {"encoder_out": draw(4, 7, 6), "predictor_out": draw(4, 5, 6), "weight": draw(6, 12), "bias": draw(12)}
    names, _ = code("docs/losses.md", "joint_rnnt_loss(", **vars(jax_rnnt), **given)
    hidden = np.tanh(given["encoder_out"][:, :, None] + given["predictor_out"][:, None])
    logits = hidden @ given["weight"] + given["bias"]
    expected = jax_rnnt.rnnt_loss(logits, *p[1:], blank=0) + jax_rnnt.tdt_loss(logits, *p[1:], (0, 1, 2))
    np.testing.assert_allclose(names["loss"], expected, rtol=EXACT)


def test_questions_to_the_lattice():
    """For a loss of the library and one from outside: posteriors are a gradient."""
    p = losses.problem(loss=losses.TDT)
    names, _ = code("docs/losses.md", "loss.align(", **vars(jax_rnnt), **p._asdict())
    assert names["frames"].shape == (4, 4) and (names["score"] < -names["values"]).all()
    names, _ = code("docs/losses.md", "lattices.log_likelihood(", **names)
    np.testing.assert_allclose(names["score"], -names["loss"](*p), rtol=EXACT)
    own, _ = code("docs/losses.md", "class BypassLoss")
    p = losses.problem()._replace(targets=np.zeros((4, 4), np.int32))
    p = p._replace(logits=np.asarray(jax.nn.log_softmax(p.logits)))
    loss = own["BypassLoss"](price=1.0, fused_log_softmax=False, reduction="sum")
    call = lambda x: loss(x, *p[1:])
    gradient = np.asarray(jax.grad(call)(p.logits))
    posteriors = jax_rnnt.rnnt_posteriors(*p, loss=loss)
    for x, k in zip(posteriors, (8, 0), strict=True):
        np.testing.assert_allclose(x, -gradient[..., k], atol=EXACT)


def test_pruned_training():
    p = losses.problem()
    rng = np.random.default_rng(0)
    heads = {"am": rng.normal(size=(4, 7, 9)), "lm": rng.normal(size=(4, 5, 9))}
    outputs = {"encoder_out": rng.normal(size=(4, 7, 9)), "predictor_out": rng.normal(size=(4, 5, 9))}
    lengths = {"logit_lengths": p.logit_lengths, "target_lengths": p.target_lengths}
    given = vars(jax_rnnt) | heads | outputs | lengths | {"rest": p[1:], "joint": lambda a, b: a + b}
    names, _ = code("docs/losses.md", "prune_ranges(", **given)
    whole = outputs["encoder_out"][:, :, None] + outputs["predictor_out"][:, None]
    expected = losses.RNNT.expected(p._replace(logits=whole))[0].mean()  # five columns: nothing is pruned
    np.testing.assert_allclose(names["loss"], 0.5 * names["simple"] + expected, rtol=EXACT)


def test_example_of_the_readme():
    """It runs as it stands."""
    names, _ = code("README.md", "loss.align(")
    p = losses.Problem(*map(np.asarray, (names["logits"], *names["batch"])))
    expected, gradient = losses.RNNT.expected(p, blank=0)
    np.testing.assert_allclose(names["value"], expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(names["gradient"], gradient / 2, atol=1e-5)
    assert names["frames"].shape == (2, 10) and list(names["frames"][0]) == sorted(names["frames"][0])


def test_linen_module():
    """A joint that is a bound submodule: initialised, and with a gradient for each parameter."""
    nn = pytest.importorskip("flax.linen")
    names, _ = code(
        "docs/troubleshooting.md", "is_initializing", nn=nn, jnp=jnp, joint_rnnt_loss=jax_rnnt.joint_rnnt_loss
    )
    arrays = jnp.ones((2, 5, 8), jnp.float32), jnp.ones((2, 3), int), jnp.array([5, 4]), jnp.array([3, 2])
    model = names["Transducer"]()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        variables = model.init(jax.random.key(0), *arrays)
        gradient = jax.grad(lambda v: model.apply(v, *arrays))(variables)
    assert all(np.isfinite(g).all() and np.any(g) for g in jax.tree.leaves(gradient))
