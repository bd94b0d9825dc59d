"""Has each loss of the family its own arguments and rules? test_values.py has what all of them share."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import door
import family
import jax_rnnt
import layout_table
from jax_rnnt import lattices

EXACT = 1e-12
BOTH = pytest.mark.parametrize("table", [family.multiblank, family.tdt], ids=["multiblank", "tdt"])


DURATIONS = (3, 1), (2, 3), (1,), (0, 4, 2, 1, 3), (5,), (0, 9)
ANY = [*map(family.tdt, DURATIONS), *map(family.multiblank, ((2, 3), (4, 2, 9), (2,), (11,)))]


def test_any_durations(kernel):
    """In any order, without 0, without 1, beyond T."""
    for loss in ANY:
        for dtype in (np.float32, np.float64):
            door.check(loss, batches.poisoned(batches.problem(loss=loss, dtype=dtype)), clamp=0.5)


@pytest.mark.quick("multiblank", "tdt")
@pytest.mark.parametrize(
    ("table", "implementation"),
    [(family.multiblank, "kernel"), (family.tdt, "kernel"), (family.tdt, "reference")],
    indirect=["implementation"],
    ids=["multiblank", "tdt", "reference"],
)
def test_durations_beyond_any_length(table, implementation):
    """With 7 frames such arcs are never taken, nor are the durations modulo 2^32. Some exceed int64."""
    make = lambda d: table((d,) if table is family.multiblank else (0, 1, d))
    p = batches.problem(loss=make(8))
    expected = make(8).expected(p)
    assert np.isfinite(expected[0]).all()
    if implementation == "kernel":
        for long in (8, 2**64, 2**32 + 1):
            for got in door.answers(make(long), p, implementation):
                compare.assert_matches(got, expected, np.float64, 11)
    compare.assert_matches(compare.evaluate(make(2**64), p, implementation), expected, np.float64, 11)


def test_sampled_tdt():
    """omega=1 is the RNN-T loss of the tokens, without sigma; omega=0 is TDT; between them, the key tosses a coin."""
    p = batches.problem(loss=family.TDT)
    tokens, keys = family.RNNT.expected(p._replace(logits=p.logits[..., :9])), [*map(jax.random.key, range(20))]
    tosses = [jax.random.uniform(key, dtype=np.float32) < 0.5 for key in keys]  # with types of 64 bits or without
    for durations in ((2, 0, 1), (4, 2, 3)):
        call = jax.jit(lambda x, w, k, d=durations: jax_rnnt.TDTLoss(d, sigma=0.2, omega=w)(x, *p[1:], key=k))
        plain = jax_rnnt.TDTLoss(durations, sigma=0.2)(*p)
        for omega, value in ((1.0, tokens[0].mean()), (0.0, plain)):
            np.testing.assert_allclose(call(p.logits, omega, jax.random.key(0)), value, rtol=EXACT)
        found = [call(p.logits, 0.5, key) for key in keys]
        np.testing.assert_allclose(found, np.where(tosses, tokens[0].mean(), plain), rtol=EXACT)
        for omega in (1.5, -0.5, np.nan):  # traced: no error, and no other loss in silence
            assert np.isnan(call(p.logits, omega, jax.random.key(0)))
        gradient = jax.grad(call)(p.logits, 1.0, jax.random.key(0))
        np.testing.assert_allclose(gradient[..., :9] * 4, tokens[1], atol=1e-13)
        assert not np.asarray(gradient[..., 9:]).any()
    for omega, number in itertools.product((1.5, -1), (lambda x: x, np.float32, np.array, jnp.array)):
        with pytest.raises(ValueError, match="TDTLoss: omega must be a probability"):
            jax_rnnt.TDTLoss((0, 1, 2), omega=number(omega))(*p, key=jax.random.key(0))


@pytest.mark.parametrize("omega", [0, np.float32(0), np.array(0), jnp.array(0.0)], ids=lambda x: type(x).__name__)
def test_lattice_and_arcs_agree(omega):
    """Both have the same slots, whatever type the 0 has, with a key and without."""
    p = batches.problem(loss=family.TDT)
    loss = jax_rnnt.TDTLoss((3, 1, 2), omega=omega, reduction="none")
    expected = -jax_rnnt.TDTLoss((3, 1, 2), reduction="none")(*p)
    leaf = jax.tree.map(lambda x: omega if x is loss.omega else x, loss)
    for each, key in itertools.product((loss, leaf), (None, jax.random.key(0))):
        found = lattices.log_likelihood(each.topology, each.arc_log_probs(*p, key=key), *p[2:])
        np.testing.assert_allclose(found, expected, rtol=EXACT)


def test_keys():
    """A loss that draws needs a key; one that never draws takes a key, and nothing else."""
    p = batches.problem()
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        assert jax_rnnt.RNNTLoss()(*p, key=key) == jax_rnnt.RNNTLoss()(*p)
    for key in (3, "key", jnp.float32(1), np.uint32(3), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match=r"RNNTLoss.posteriors: key must be .*JAX random key, got"):
            jax_rnnt.RNNTLoss().posteriors(*p, key=key)
    drawing = jax_rnnt.TDTLoss((0, 1, 2), omega=0.1)
    with pytest.raises(ValueError, match=r"TDTLoss: key .* got None"):
        drawing(*p)
    with pytest.raises(TypeError, match="TDTLoss: key must be a JAX random key, got 3"):
        drawing(*p, key=3)


@pytest.mark.parametrize("alone", [family.RNNT, family.MONOTONIC, family.CONSTRAINED], ids=str)
def test_topologies_of_hat(alone):
    """The blank amid the classes; also with the log-probabilities of HAT as they are, and in a band."""
    p, topology = batches.poisoned(batches.problem()), alone.name.replace("rnnt", "standard")
    loss = lambda **options: jax_rnnt.HATLoss(blank=3, reduction="none", variant=topology, **options)
    for name in ("array", "BandLogits"):
        logits = np.asarray(layout_table.dense(p, name)(p.logits))
        log_probs = np.zeros_like(logits)
        for b, (n, m) in enumerate(zip(p.logit_lengths, p.target_lengths)):
            x = logits[b, :n, : m + 1]
            arcs = [family.HAT.truth["emission"](x, np.full(m + 1, k), blank=3)[0]["label"] for k in range(9)]
            log_probs[b, :n, : m + 1] = np.stack(arcs, -1)
        expected, _ = alone.expected(p._replace(logits=log_probs), blank=3, fused_log_softmax=False)
        np.testing.assert_allclose(loss()(layout_table.layout(p, name)(p.logits), *p[1:]), expected, rtol=EXACT)
        plain = loss(fused_log_softmax=False, implementation="reference")
        np.testing.assert_allclose(plain(log_probs, *p[1:]), expected, rtol=EXACT)


@BOTH
def test_durations_are_checked(table):
    loss = table((1, 2))
    (argument,) = loss.options
    for value in ([], [2, 2], [-1, 2], 3, None, [1.5], ["2"], [True], {2, 3}, frozenset((2, 3)), {2: 0, 3: 1}):
        with pytest.raises((ValueError, TypeError), match=rf"{loss.kind.__name__}: {argument} "):
            loss.kind(value)


def test_own_arguments_are_checked():
    p = batches.problem(dtype=np.float32)
    any_classes = jax.ShapeDtypeStruct(jax.export.symbolic_shape("4, 7, 5, v"), np.float32)
    for make, message in (
        (lambda: jax.eval_shape(lambda x: jax_rnnt.RNNTLoss()(x, *p[1:]), any_classes), "blank must be 0 .* symbolic"),
        (lambda: jax_rnnt.MultiblankRNNTLoss([2, 3], blank=1)(*p), r"MultiblankRNNTLoss: blank .* got 1"),
        (lambda: jax_rnnt.MultiblankRNNTLoss([1]), "big_blank_durations"),
        (lambda: jax_rnnt.TDTLoss([0]), "TDTLoss: durations"),
        (lambda: jax_rnnt.HATLoss(variant="ctc"), "variant"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
