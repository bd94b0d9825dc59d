"""Are the public names the promised ones, documented, and shaped as users of other libraries expect?"""

import copy
import dataclasses
import inspect
import pickle
import pydoc
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_rnnt
import losses

FUNCTIONS = [getattr(jax_rnnt, name) for name in jax_rnnt.__all__]
KEYWORDS = {
    "blank": -1,
    "clamp": -1.0,
    "reduction": "mean",
    "fused_log_softmax": True,
    "fastemit_lambda": 0.0,
    "delay_penalty": 0.0,
    "label_windows": None,
    "implementation": None,
    "inplace": True,
}


def test_names():
    promised = {"rnnt_loss", "RNNTLoss", "rnnt_posteriors", "validate_inputs", "selftest", "export_checks"}
    assert promised <= set(jax_rnnt.__all__)
    assert len(jax_rnnt.__all__) == len(set(jax_rnnt.__all__))
    public = {name for name in vars(jax_rnnt) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(jax_rnnt, name))}
    assert public - modules == set(jax_rnnt.__all__)
    assert isinstance(jax_rnnt.__version__, str)


@pytest.mark.parametrize("function", FUNCTIONS, ids=jax_rnnt.__all__)
def test_docstring(function):
    """numpydoc sections, every parameter in them, and an example."""
    doc = inspect.getdoc(function)
    sections = [line for line, under in zip(doc.splitlines(), doc.splitlines()[1:]) if under and set(under) == {"-"}]
    parameters = inspect.signature(function).parameters
    if parameters:
        assert "Parameters" in sections
        block = doc.split("Parameters\n----------\n")[1]
        block = re.split(r"\n[\w ]+\n-+\n", block)[0]
        names = (line.split(" : ")[0] for line in block.splitlines() if line[:1].strip())  # at the margin
        documented = {name.strip(" *") for line in names for name in line.split(",")}
        assert set(parameters) == documented
    if not inspect.isclass(function) and function.__name__ != "validate_inputs":
        assert "Returns" in sections
    assert "Examples" in sections
    assert doc.splitlines()[0].endswith((".", ":"))


def test_examples_in_docstrings():
    """They run as written, in JAX's default configuration."""
    program = """
import doctest, importlib, pkgutil, sys, jax_rnnt
names = [m.name for m in pkgutil.walk_packages(jax_rnnt.__path__, "jax_rnnt.")]
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
results = [doctest.testmod(importlib.import_module(name), optionflags=flags) for name in names]
sys.exit(any(r.failed for r in results) or sum(r.attempted for r in results) < 5)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=losses.HERE, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_signature_of_rnnt_loss():
    parameters = inspect.signature(jax_rnnt.rnnt_loss).parameters
    assert list(parameters)[:4] == list(losses.Problem._fields)
    assert {k: p.default for k, p in parameters.items() if k not in losses.Problem._fields} == KEYWORDS
    keyword_only = [k for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert set(keyword_only) == set(list(KEYWORDS)[4:])


def test_signature_of_the_object():
    parameters = inspect.signature(jax_rnnt.RNNTLoss).parameters
    assert {k: p.default for k, p in parameters.items()} == KEYWORDS
    assert list(parameters)[:4] == list(KEYWORDS)[:4]


def test_loss_object():
    """Frozen, hashable, equal by value, printable, picklable, and callable as torchaudio's."""
    criterion = jax_rnnt.RNNTLoss(blank=0, reduction="sum")
    assert dataclasses.is_dataclass(criterion)
    with pytest.raises(dataclasses.FrozenInstanceError):
        criterion.blank = 1
    assert criterion == jax_rnnt.RNNTLoss(blank=0, reduction="sum") != jax_rnnt.RNNTLoss()
    assert hash(criterion) == hash(jax_rnnt.RNNTLoss(blank=0, reduction="sum"))
    assert "blank=0" in repr(criterion) and "reduction='sum'" in repr(criterion)
    assert repr(criterion).startswith("RNNTLoss(")
    assert pickle.loads(pickle.dumps(criterion)) == criterion == copy.deepcopy(criterion)
    assert dataclasses.replace(criterion, blank=2).blank == 2
    p = losses.problem()
    np.testing.assert_allclose(criterion(*p), losses.RNNT.expected(p, blank=0)[0].sum(), rtol=1e-13)
    named = criterion(**p._asdict())
    np.testing.assert_array_equal(named, criterion(*p))


def test_equality_of_loss_objects_with_arrays():
    """By content, without a warning or an error; a tracer equals itself alone."""
    windows = np.array([[[0, 3], [1, 4]]])
    bound = jax_rnnt.RNNTLoss(label_windows=windows)
    for other in (windows.copy(), jax.numpy.asarray(windows)):
        assert bound == jax_rnnt.RNNTLoss(label_windows=other)
    for other in (windows + 1, windows[0], None):
        assert bound != jax_rnnt.RNNTLoss(label_windows=other)
    assert bound != jax_rnnt.RNNTLoss(label_windows=windows, blank=0) and bound != windows.tolist()
    assert pickle.loads(pickle.dumps(bound)) == bound == copy.deepcopy(bound)
    with pytest.raises(TypeError, match="unhashable"):
        hash(bound)
    assert len({jax_rnnt.RNNTLoss(), jax_rnnt.RNNTLoss(), jax_rnnt.RNNTLoss(clamp=1.0)}) == 2

    @jax.jit
    def compare(x):
        mine = jax_rnnt.RNNTLoss(label_windows=x)
        assert mine == jax_rnnt.RNNTLoss(label_windows=x) and mine != bound
        assert mine != jax_rnnt.RNNTLoss(label_windows=x + 1)
        return x

    compare(windows)


def test_linear_joint_is_a_value():
    """With its default activation: copied, pickled and printed."""
    joint = jax_rnnt.LinearJoint(jax.numpy.ones((3, 4)), jax.numpy.zeros(4))
    rows = np.linspace(-1, 1, 6).reshape(2, 3)
    for twin in (pickle.loads(pickle.dumps(joint)), copy.deepcopy(joint)):
        assert twin.activation == joint.activation and hash(twin.activation) == hash(joint.activation)
        assert jax.tree.structure(twin) == jax.tree.structure(joint)
        np.testing.assert_array_equal(twin(rows, rows), joint(rows, rows))
    np.testing.assert_allclose(joint(rows, rows), np.tanh(2 * rows) @ np.ones((3, 4)), rtol=1e-12)
    for text in (str(inspect.signature(jax_rnnt.LinearJoint)), pydoc.render_doc(jax_rnnt.LinearJoint), repr(joint)):
        assert "jnp.tanh" in text and " at 0x" not in text


def test_loss_object_through_a_transformation():
    """As an argument that jit does not trace, or in a closure."""
    p = losses.problem()
    criterion = jax_rnnt.RNNTLoss(clamp=0.25)
    gradient = jax.jit(jax.grad(lambda x: criterion(x, *p[1:])))(p.logits)
    np.testing.assert_allclose(gradient, losses.RNNT.expected(p, clamp=0.25)[1] / 4, atol=1e-13)


def test_import_is_light():
    """Nothing but JAX and NumPy comes in, and no warning goes out."""
    program = (
        "import sys, jax; before = set(sys.modules); "
        "import jax_rnnt; new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(m for m in new if m in ('torch', 'chex', 'flax', 'scipy', 'numba', 'pandas', 'tensorflow')))"
    )
    if losses.missing_kernel():
        pytest.skip("without kernels there is a warning")
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=losses.HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr
