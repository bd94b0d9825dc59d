"""What users and editors see of the methods of a loss, whose docstrings and arithmetic are in `losses/_methods.py`."""

import copy
import doctest
import functools
import inspect
import itertools
import pickle
import pydoc
import typing

import jax  # noqa: F401 (named in METHODS)
import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import Alignment, RNNTLoss, TransducerLoss  # noqa: F401
from jax_rnnt.layouts._layout import Layout

BATCH = "logits: 'Logits', targets: 'ArrayLike', logit_lengths: 'ArrayLike', target_lengths: 'ArrayLike'"
MORE = "*, label_windows: 'ArrayLike | None' = None, key: 'jax.Array | None' = None"
METHODS = {  # name: type of the result, first line of the docstring, its sections
    "__call__": ("jax.Array", "Computes the loss of a batch, which is differentiable.", "Parameters Returns Raises"),
    "posteriors": (
        "tuple[jax.Array, jax.Array]",
        "Posterior probability of every blank and every label, given the targets.",
        "Returns References Examples",
    ),
    "align": (
        "Alignment",
        "Forced alignment: the best path of the lattice, and the frame in which it emits each label.",
        "Returns Examples",
    ),
    "label_frames": (
        "jax.Array",
        "Expected frame of every label, over all alignments of the targets.",
        "Returns Examples",
    ),
    "latency": (
        "jax.Array",
        "Expected latency of the labels (Shinohara and Watanabe 2022), a regulariser to add to the loss.",
        "Returns References Examples",
    ),
    "label_log_probs": (
        "jax.Array",
        "Log-probability of every target, given the targets before it: log P(y_u | y_<u, x), over all alignments.",
        "Returns References Examples",
    ),
    "arc_log_probs": (
        "dict[str, jax.Array]",
        "Log-probabilities of the arcs, for a dynamic program of your own.",
        "Returns",
    ),
    "validate": (
        "None",
        "Checks the data of a batch: raises an error where lengths or labels would make the loss NaN or +inf.",
        "Parameters Raises Examples",
    ),
}
UNIFORM = jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1)  # the label is in each frame with 1/3


@pytest.mark.parametrize("name", METHODS)
def test_signature_and_help(name):
    """Those of a function in the class itself."""
    shown, first_line, sections = METHODS[name]
    function, method = getattr(TransducerLoss, name), getattr(RNNTLoss(), name)
    parameters = BATCH if name == "validate" else f"{BATCH}, {MORE}"
    assert inspect.isfunction(function) and vars(TransducerLoss)[name] is function
    assert str(inspect.signature(function)) == f"(self, {parameters}) -> {shown!r}"
    assert str(inspect.signature(method)) == f"({parameters}) -> {shown!r}"
    assert function.__qualname__ == f"TransducerLoss.{name}" and function.__name__ == name
    assert function.__module__ == TransducerLoss.__module__
    types = typing.get_type_hints(function)
    assert types["return"] == (eval(shown) or type(None)) and Layout in typing.get_args(types["logits"])
    assert set(typing.get_args(types["targets"])) == set(typing.get_args(types["logits"])) - {Layout}
    lines = inspect.getdoc(function).splitlines()
    assert lines[0] == first_line
    assert [line for line, under in itertools.pairwise(lines) if set(under) == {"-"}] == sections.split()
    assert function.__doc__ == method.__doc__
    text = pydoc.plain(pydoc.render_doc(RNNTLoss))
    assert f" |  {name}(self" in text.replace("(\n |      self", "(self") and f" |      {first_line}\n" in text


def test_examples_are_found():
    """`doctest` finds those of methods in the class, where `tests/tools/test_public.py` runs them."""
    found = doctest.DocTestFinder().find(inspect.getmodule(TransducerLoss))
    names = {x.name.rpartition(".")[2] for x in found if x.examples}
    assert names == {"TransducerLoss"} | {name for name, x in METHODS.items() if "Examples" in x[-1]}


def test_methods_are_values():
    """They can be pickled, copied and bound in part."""
    loss = RNNTLoss(blank=0)
    for name in METHODS:
        method, function = getattr(loss, name), getattr(RNNTLoss, name)
        for same in (pickle.loads(pickle.dumps(method)), copy.copy(method), copy.deepcopy(method)):
            assert same.__func__ is function and same.__self__ == loss
        assert pickle.loads(pickle.dumps(function)) is function
    windows = functools.partial(RNNTLoss.latency, label_windows=jnp.array([[2, 2]]))  # the third frame
    np.testing.assert_allclose(windows(loss, *UNIFORM), 3, rtol=1e-6)
    np.testing.assert_allclose(functools.partial(loss.label_frames, *UNIFORM[:3])(target_lengths=1), [1], rtol=1e-6)


class Late(RNNTLoss):
    """A user's class: latency counts from 0, and a call adds it."""

    def latency(self, *batch, **more):
        """Own."""
        return super().latency(*batch, **more) - 1

    def __call__(self, *batch, **more):
        return super().__call__(*batch, **more) + self.latency(*batch, **more)


def test_subclass_overrides():
    """`super` reaches the inherited method, and errors name the class of the object."""
    loss = Late(blank=0)
    np.testing.assert_allclose(loss.latency(*UNIFORM), 1, rtol=1e-6)
    nll = 4 * np.log(4) - np.log(3)  # three paths of four arcs, each of probability 1/4
    np.testing.assert_allclose(loss(*UNIFORM), nll + 1, rtol=1e-6)
    assert Late.latency.__doc__ == "Own." and Late.__call__.__doc__ is None
    assert Late.posteriors is TransducerLoss.posteriors
    for call, message in ((loss.posteriors, r"Late\.posteriors: targets must"), (loss, "Late: targets must")):
        with pytest.raises(TypeError, match=message):
            call(UNIFORM[0], jnp.array([1.0]), *UNIFORM[2:])


@pytest.mark.parametrize("name", [x for x in METHODS if x != "validate"])
def test_wrong_arguments(name):
    """Python's own errors name the method; test_errors.py has those of unknown keywords."""
    method = getattr(RNNTLoss(), name)
    for arguments, message in (
        (UNIFORM[:3], "missing 1 required positional argument: 'target_lengths'"),
        ((*UNIFORM, None), "takes 5 positional arguments but 6 were given"),
    ):
        with pytest.raises(TypeError, match=rf"^TransducerLoss\.{name}\(\) {message}"):
            method(*arguments)
