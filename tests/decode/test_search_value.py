"""Is a search a value: a pytree whose programs are those of the functions?"""

import collections
import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import family
from compare import assert_close, assert_same_bits
from decoding import Model
from jax_rnnt import decode
from jax_rnnt.decode import _beam_step, _greedy

MODEL = Model(family.TDT)
ARRAYS = jnp.asarray(MODEL.encoder), jnp.asarray(MODEL.lengths)
CLASSES = jnp.arange(MODEL.tokens, dtype=float)[None]
LM = decode.Predictor(lambda batch: (), lambda state, labels: (jnp.sin(labels[:, None].astype(float) + CLASSES), state))
VERBS = {
    "greedy": lambda search, *arrays: search.greedy(*arrays),
    "beam": lambda search, *arrays: search.beam(*arrays, 3),
    "sample": lambda search, *arrays: search.sample(*arrays, jax.random.key(1), samples=2),
}


def search(**options):
    return decode.Search(*MODEL.networks, **{"max_labels": 4} | options)


def primitives(function, *arguments):
    """How many of each kind there are, but for those that mark what has no gradient and compute nothing."""
    found = collections.Counter(re.findall(r"= (\w+)[\[ ]", str(jax.make_jaxpr(function)(*arguments))))
    del found["stop_gradient"]
    return found


@pytest.mark.quick("greedy")
@pytest.mark.parametrize("verb", ["greedy", "beam"])
def test_an_argument_has_the_program_of_a_closure(verb):
    """Numbers that are off are no leaves: neither those of the loss, nor those of the search."""
    value = search()
    closed = primitives(lambda *arrays: VERBS[verb](value, *arrays), *ARRAYS)
    assert closed["dot_general"] > 0
    assert primitives(VERBS[verb], value, *ARRAYS) == closed
    if verb == "greedy":
        assert_same_bits(jax.jit(VERBS[verb])(value, *ARRAYS)[:7], VERBS[verb](value, *ARRAYS)[:7])


@pytest.mark.quick("greedy")
@pytest.mark.parametrize("verb", VERBS)
def test_a_step_is_a_function_of_arrays(verb, monkeypatch):
    """`jax.jit` takes what is static by its hash and the rest as a pytree, and each step by itself finds the same."""
    value, steps = search(temperature=1.5, fusion=((LM, 0.3),)), []
    plain = jax.jit(VERBS[verb])(value, *ARRAYS)
    for module in (_greedy, _beam_step):
        step = jax.jit(module.step, static_argnums=0)
        monkeypatch.setattr(module, "step", lambda *given, step=step: steps.append(hash(given[0])) or step(*given))
    found = jax.jit(lambda *arrays: VERBS[verb](*arrays))(value, *ARRAYS)
    assert len({*steps}) == 1
    assert_close(found[:7], plain[:7], rtol=1e-12)


def test_leaves():
    """Arrays, and numbers that are on; everything else is structure, and equal where it is the same."""
    phrases, objects = decode.Phrases([[1]], [2.0], classes=MODEL.tokens), {"a": []}
    value = search(temperature=1.5, fusion=[(phrases, 0.5), (objects.get, 0)])
    leaves, structure = jax.tree.flatten(value)
    assert [x for x in leaves if isinstance(x, float)] == [0.5, 1.5]
    assert any(x is value.joint.weight for x in leaves)
    # `jax.export` asks for the structure of shapes.
    assert jax.tree.structure(jax.eval_shape(lambda x: x, value)) == structure
    assert hash(structure) == hash(jax.tree.structure(dataclasses.replace(value, temperature=1.7)))
    assert structure == jax.tree.structure(dataclasses.replace(value, temperature=1.7))
    assert structure != jax.tree.structure(dataclasses.replace(value, temperature=1.0))
    assert structure != jax.tree.structure(dataclasses.replace(value, max_labels=5))
    again = jax.tree.map(lambda x: x, value)
    assert again.max_labels == 4 and again.temperature == 1.5 and again.joint.weight is value.joint.weight
    assert [weight for _, weight in again.fusion] == [0.5]
    declared = value.predictor._replace(start=0, symbols=MODEL.tokens)  # which a program must know
    counts = dataclasses.replace(value, predictor=declared, fusion=[(LM._replace(start=0), 1)], temperature=2)
    assert {1.0, 2.0} <= {x for x in jax.tree.leaves(counts) if isinstance(x, float)}
    assert jax.tree.map(jnp.asarray, counts).predictor[2:4] == (0, MODEL.tokens)
    assert jax.eval_shape(VERBS["greedy"], counts, *ARRAYS).counts.shape == MODEL.lengths.shape


def test_objects_without_a_hash_equal_themselves():
    value = search()

    class Unhashable:
        __hash__ = None
        initial, step = map(staticmethod, value.predictor[:2])

    other = Unhashable()
    structures = [jax.tree.structure(dataclasses.replace(value, predictor=x)) for x in (other, other, Unhashable())]
    assert structures[0] == structures[1] != structures[2]
    assert jax.tree.map(lambda x: x, dataclasses.replace(value, predictor=other)).predictor is other


def test_errors_come_when_a_search_is_made():
    for options, message in (
        ({"max_symbols": 0}, "Search: max_symbols must be 1 or more, got 0"),
        ({"temperature": math.nan, "max_labels": 0}, "Search: max_labels must be 1 or more, got 0"),
        ({"fusion": 3}, "Search: fusion must be a sequence of pairs"),
        ({"duration_choice": "both"}, "Search: duration_choice must be one of 'pair', 'token_first', got 'both'"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            search(**options)
    with pytest.raises(TypeError, match="Search: unknown argument beam_sizes; it takes loss, "):
        search(beam_sizes=3)
    assert repr(search(max_symbols=2)).endswith(", max_labels=4, max_symbols=2)")


@pytest.mark.slow
def test_a_module_of_nnx_is_its_parameters():
    """Those that it has when the search is made: later ones are another search, and no other program."""
    nnx = pytest.importorskip("flax.nnx")

    class Joint(nnx.Module):
        def __init__(self, weight):
            self.weight, self.drop = nnx.Param(jnp.asarray(weight)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, encoder, predictor):
            return self.drop(jnp.tanh(encoder + predictor)) @ self.weight[...]

        def rows(self, *rows):
            return self(*rows)

    traced, base = [], search()

    def run(search, *arrays):
        traced.append(None)
        return search.greedy(*arrays)

    jitted = jax.jit(run)
    for method in (False, True):
        module = Joint(MODEL.parameters.weight)
        joint = module.rows if method else module
        values = [dataclasses.replace(base, joint=joint)]
        module.weight[...] = -module.weight[...]
        values.append(dataclasses.replace(base, joint=module.rows if method else module))
        traced.clear()
        for value, sign in zip(values, (1, -1)):
            weight = jnp.asarray(sign * MODEL.parameters.weight)
            expected = dataclasses.replace(base, joint=lambda e, p, w=weight: jnp.tanh(e + p) @ w)
            assert_same_bits(np.asarray(jitted(value, *ARRAYS).labels), np.asarray(expected.greedy(*ARRAYS).labels))
        assert len(traced) == 1
