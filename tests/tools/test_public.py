"""Are the public names the promised ones, documented, and shaped as users of other libraries expect?"""

import ast
import copy
import dataclasses
import functools
import importlib
import inspect
import os
import pathlib
import pickle
import pydoc
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

OPTIONAL = ("flax", "matplotlib", "praatio", "rapidfuzz")  # packages of extras


def public(module):
    """What a module of an extra promises; nothing where its package is missing."""
    try:
        module = importlib.import_module(f"jax_rnnt.{module}")
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        return {}
    return {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}


FUNCTIONS = {name: getattr(jax_rnnt, name) for name in jax_rnnt.__all__}
FUNCTIONS |= {f"decode.{name}": getattr(jax_rnnt.decode, name) for name in jax_rnnt.decode.__all__}
for _module in ("flax.nnx", "flax.linen", "metrics", "plot", "timing"):
    FUNCTIONS |= public(_module)
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
    promised = {"rnnt_loss", "RNNTLoss", "rnnt_posteriors", "selftest", "export_checks"}
    assert promised <= set(jax_rnnt.__all__)
    assert len(jax_rnnt.__all__) == len(set(jax_rnnt.__all__))
    public = {name for name in vars(jax_rnnt) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(jax_rnnt, name))}
    assert public - modules == set(jax_rnnt.__all__)
    assert isinstance(jax_rnnt.__version__, str)


@pytest.mark.parametrize(
    ("module", "name", "place"),
    [
        ("jax_rnnt", "greedy", "jax_rnnt.decode.greedy"),
        ("jax_rnnt", "rnnt_loss_pruned", "jax_rnnt.pruned_rnnt_loss"),
        ("jax_rnnt.flax", "Joint", r"jax_rnnt.flax.nnx.Joint or jax_rnnt.flax.linen.Joint"),
    ],
)
def test_names_that_stand_elsewhere(module, name, place):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}': use {place}"):
        exec(f"from {module} import {name}", {})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(jax_rnnt, "noth" + "ing")
    assert jax_rnnt.timing is importlib.import_module("jax_rnnt.timing")


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_docstring(function):
    """It has numpydoc sections with every parameter, and an example."""
    doc = inspect.getdoc(function)
    sections = [line for line, under in zip(doc.splitlines(), doc.splitlines()[1:]) if under and set(under) == {"-"}]
    parameters = set(inspect.signature(function).parameters)
    if parameters == {"args", "kwargs"}:  # an NNX module
        parameters = set(inspect.signature(function.__init__).parameters)
    parameters -= {"self", "parent", "name"}  # the last two are those of every Linen module
    if parameters:
        assert "Parameters" in sections
        block = doc.split("Parameters\n----------\n")[1]
        block = re.split(r"\n[\w ]+\n-+\n", block)[0]
        names = (line.split(" : ")[0] for line in block.splitlines() if line[:1].strip())  # at the margin
        documented = {name.strip(" *") for line in names for name in line.split(",")}
        assert parameters == documented
    if not inspect.isclass(function) and function.__name__ not in ("write_ctm", "write_textgrid"):
        assert "Returns" in sections
    assert "Examples" in sections
    assert doc.splitlines()[0].endswith((".", ":"))


@pytest.mark.slow
def test_examples_in_docstrings():
    """The examples run as written, in JAX's default configuration."""
    program = """
import doctest, importlib, pkgutil, sys, jax_rnnt
flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
results = []
for module in pkgutil.walk_packages(jax_rnnt.__path__, "jax_rnnt."):
    try:
        results.append(doctest.testmod(importlib.import_module(module.name), optionflags=flags))
    except ModuleNotFoundError as error:
        if error.name not in sys.argv[1:]:
            raise
sys.exit(any(r.failed for r in results) or sum(r.attempted for r in results) < 5)
"""
    command = [sys.executable, "-c", program, *OPTIONAL]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # half of the time
    run = functools.partial(subprocess.run, cwd=losses.HERE, capture_output=True, text=True, timeout=300)
    done = run(command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_signature_of_rnnt_loss():
    parameters = inspect.signature(jax_rnnt.rnnt_loss).parameters
    assert list(parameters)[:4] == list(losses.Problem._fields)
    assert {k: p.default for k, p in parameters.items() if k not in losses.Problem._fields} == KEYWORDS
    keyword_only = [k for k, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    assert set(keyword_only) == set(list(KEYWORDS)[4:])


LOSS_KEYWORDS = {k: default for k, default in KEYWORDS.items() if k != "label_windows"}
OWN = {  # arguments of each loss before and beside the common ones
    "RNNTLoss": ((), {}),
    "MonotonicRNNTLoss": ((), {"final_blank": False}),
    "ConstrainedRNNTLoss": ((), {}),
    "HATLoss": ((), {"topology": "standard"}),
    "MultiblankRNNTLoss": (("big_blank_durations",), {"sigma": 0.0}),
    "TDTLoss": (("durations",), {"sigma": 0.0, "omega": 0.0}),
}


@pytest.mark.parametrize("name", OWN)
def test_signatures_of_the_losses(name):
    first, own = OWN[name]
    parameters = inspect.signature(getattr(jax_rnnt, name)).parameters
    assert tuple(parameters)[: len(first)] == first
    common = {k: p.default for k, p in parameters.items() if k not in first}
    assert common == LOSS_KEYWORDS | own
    positional = [k for k, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*first, *list(KEYWORDS)[:4]]


def test_losses_are_pytrees():
    """Numbers are leaves, all other fields are structure. A new number compiles nothing, a new structure does."""
    p = losses.problem()
    loss = jax_rnnt.TDTLoss([2, 0, 1], sigma=0.5)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(loss)}
    assert paths == {".clamp", ".fastemit_lambda", ".delay_penalty", ".sigma", ".omega"}
    assert jax.tree.map(lambda x: x, loss) == loss
    assert jax.tree.map(lambda x: 2 * x, loss).sigma == 1.0
    assert jax.tree.map(lambda x: None, loss).durations == (2, 0, 1)
    run = jax.jit(lambda loss, p: loss(*p))
    for penalty in (0.0, 0.5, np.float32(0.25)):
        expected = losses.RNNT.expected(p, delay_penalty=float(penalty))[0].mean()
        np.testing.assert_allclose(run(jax_rnnt.RNNTLoss(delay_penalty=float(penalty)), p), expected, rtol=1e-12)
    assert run._cache_size() == 1
    run(jax_rnnt.RNNTLoss(blank=0), p)
    assert run._cache_size() == 2
    stacked = jax.tree.map(lambda *x: np.stack(x), *(jax_rnnt.RNNTLoss(delay_penalty=x) for x in (0.0, 0.5)))
    values = jax.vmap(lambda loss: loss(*p))(stacked)
    wanted = [losses.RNNT.expected(p, delay_penalty=x)[0].mean() for x in (0.0, 0.5)]
    np.testing.assert_allclose(values, wanted, rtol=1e-12)


def test_repr_is_short():
    """It shows fields that differ from their default or have none."""
    assert repr(jax_rnnt.RNNTLoss()) == "RNNTLoss()"
    assert repr(jax_rnnt.RNNTLoss(-1, 0.5)) == "RNNTLoss(clamp=0.5)"
    assert repr(jax_rnnt.TDTLoss([1, 2], blank=0)) == "TDTLoss(durations=(1, 2), blank=0)"
    assert eval(repr(jax_rnnt.HATLoss(topology="monotonic")), vars(jax_rnnt)) == jax_rnnt.HATLoss(topology="monotonic")


def test_a_loss_in_a_module():
    """As an attribute of an nnx module, beside parameters."""
    nnx = pytest.importorskip("flax.nnx")
    p = losses.problem(dtype=np.float32)

    class Model(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(jnp.eye(9, dtype=jnp.float32))
            self.loss = jax_rnnt.RNNTLoss(blank=0)

    @nnx.jit
    def value(model):
        return model.loss(jnp.asarray(p.logits) @ model.weight[...], *p[1:])

    np.testing.assert_allclose(value(Model()), losses.RNNT.expected(p, blank=0)[0].mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blank": "x"}, "blank must be an integer"),
        ({"clamp": "x"}, "clamp must be a real number"),
        ({"reduction": "mean_batch"}, "reduction must be .*'mean'"),
        ({"implementation": "fast"}, "implementation must be"),
        ({"inplace": 1}, "inplace must be True or False"),
        ({"delay_penalty": np.zeros(3)}, "delay_penalty must be a scalar"),
    ],
)
def test_errors_of_fields(options, message):
    """Errors are raised when a loss is made, not when it is called."""
    with pytest.raises((TypeError, ValueError), match=f"RNNTLoss: {message}"):
        jax_rnnt.RNNTLoss(**options)
    with pytest.raises((TypeError, ValueError), match=f"RNNTLoss: {message}"):
        dataclasses.replace(jax_rnnt.RNNTLoss(), **options)


def test_errors_of_a_loss_of_ones_own():
    """A slot without a plane, a plane of another shape and a wrong result are named."""
    p = losses.problem()
    softmax = jax_rnnt.emissions.Softmax((0,))

    def error(composition):
        class Own(jax_rnnt.TransducerLoss):
            def compose(self):
                return composition

        with pytest.raises((TypeError, ValueError)) as caught:
            Own()(*p)
        return str(caught.value)

    arcs = (*jax_rnnt.lattices.STANDARD, jax_rnnt.lattices.Arc("lable", 0, 1))
    compose = jax_rnnt.Composition
    assert re.search(
        r"Own.compose\(\): .*\['blank', 'label', 'lable'\], got \['blank', 'label'\]", error(compose(softmax, arcs))
    )
    narrow = lambda planes, _: planes | {"label": planes["label"][..., :-1]}
    assert re.search(
        r"Own.*'label' must have shape .*\(4, 7, 5\).*got \(4, 7, 4\)", error(compose(softmax, steps=(narrow,)))
    )
    assert "Own.compose() must return a Composition, got 3" in error(3)
    assert "Own: blank must lie in" in error(compose(jax_rnnt.emissions.Softmax((9,))))

    for make, message in (
        (lambda: compose(None), "Composition: emission must be an emissions.Softmax"),
        (lambda: compose(softmax, ()), "Composition: topology must be .* at least one"),
        (lambda: compose(softmax, steps=(None,)), "Composition: steps must be"),
        (lambda: jax_rnnt.emissions.Softmax((0, 1)), "one slot for each blank"),
        (lambda: jax_rnnt.emissions.Softmax((0,), slots=("label",)), "or 'label'"),
        (lambda: jax_rnnt.emissions.Softmax((0, 1), slots=("blank", "more"), bernoulli=True), "one blank"),
        (lambda: jax_rnnt.emissions.Softmax((0,), durations=-1), "durations of 0 or more"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            make()

    class Unfinished(jax_rnnt.TransducerLoss):
        pass

    with pytest.raises(NotImplementedError, match=r"Unfinished must define compose\(\)"):
        Unfinished()(*p)

    class Failing(jax_rnnt.TransducerLoss):
        def compose(self):
            raise ValueError("Composition of nothing")

    with pytest.raises(ValueError, match=r"^Composition of nothing$"):
        Failing()(*p)


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
    """Arrays compare by content, without warning or error; a tracer equals only itself."""
    penalty = np.array(0.5)
    bound = jax_rnnt.RNNTLoss(delay_penalty=penalty)
    for other in (penalty.copy(), jnp.asarray(penalty)):
        assert bound == jax_rnnt.RNNTLoss(delay_penalty=other)
    for other in (penalty + 1, 0.0):
        assert bound != jax_rnnt.RNNTLoss(delay_penalty=other)
    assert bound != jax_rnnt.RNNTLoss(delay_penalty=penalty, blank=0) and bound != 0.5
    assert pickle.loads(pickle.dumps(bound)) == bound == copy.deepcopy(bound)
    with pytest.raises(TypeError, match="unhashable"):
        hash(jax_rnnt.RNNTLoss(delay_penalty=jnp.asarray(penalty)))
    assert len({jax_rnnt.RNNTLoss(), jax_rnnt.RNNTLoss(), jax_rnnt.RNNTLoss(clamp=1.0)}) == 2

    @jax.jit
    def compare(x):
        mine = jax_rnnt.RNNTLoss(delay_penalty=x)
        assert mine == jax_rnnt.RNNTLoss(delay_penalty=x) and mine != bound
        assert mine != jax_rnnt.RNNTLoss(delay_penalty=x + 1)
        return x

    compare(penalty)


def test_all_dataclasses_are_frozen():
    """Values of the package may be shared, be static arguments of jit and be keys."""
    modules = [vars(x) for name, x in sys.modules.items() if name.split(".")[0] == "jax_rnnt"]
    found = {x for names in modules for x in names.values() if isinstance(x, type) and dataclasses.is_dataclass(x)}
    classes = {x for x in found if re.match(r"jax_rnnt\b(?!\.flax)", x.__module__)}  # modules of Flax are not frozen
    assert {jax_rnnt.RNNTLoss, jax_rnnt.losses._adjustments.UnderNormalize} <= classes
    assert [x for x in classes if not x.__dataclass_params__.frozen] == []


def test_every_loss_checks_the_common_options():
    for name, (first, _) in OWN.items():
        with pytest.raises(ValueError, match=f"{name}: reduction must be"):
            getattr(jax_rnnt, name)(*([(1, 2)] * len(first)), reduction="median")
        for option in ("fused_log_softmax", "inplace"):
            with pytest.raises(TypeError, match=f"{name}: {option} must be True or False, got 1"):
                getattr(jax_rnnt, name)(*([(1, 2)] * len(first)), **{option: 1})


def test_equality_of_vectors():
    """A field of a subclass may be an array of any shape."""

    class Weighted(jax_rnnt.RNNTLoss):
        weights: jax.Array | np.ndarray | float

    one = Weighted(weights=np.array([1.0, 2.0]))
    assert one == Weighted(weights=jnp.array([1.0, 2.0]))
    for other in (np.array([1.0, 3.0]), np.array([1.0]), np.array([1.0, 2.0, 2.0]), 1.0):
        assert one != Weighted(weights=other) and Weighted(weights=other) != one


def test_linear_joint_is_a_value():
    """With its default activation it can be copied, pickled and printed."""
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
    """It may be a static argument of jit, or be closed over."""
    p = losses.problem()
    criterion = jax_rnnt.RNNTLoss(clamp=0.25)
    gradient = jax.jit(jax.grad(lambda x: criterion(x, *p[1:])))(p.logits)
    np.testing.assert_allclose(gradient, losses.RNNT.expected(p, clamp=0.25)[1] / 4, atol=1e-13)


def test_import_is_light():
    """The import loads nothing but JAX and NumPy, and does not warn."""
    program = (
        "import sys, jax; before = set(sys.modules); "
        "import jax_rnnt; new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "heavy = 'torch', 'chex', 'flax', 'matplotlib', 'scipy', 'numba', 'pandas', 'tensorflow', 'rapidfuzz'; "
        "print(sorted(new.intersection(heavy)))"
    )
    if losses.missing_kernel():
        pytest.skip("without kernels there is a warning")
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=losses.HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr


MACHINERY = ("jax._src", "jax.extend", "jax.ffi", "jax.interpreters")


def machinery_in(source):
    """Internals of JAX that a module imports or reaches through `jax`, and all names that contain "jaxpr"."""
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            used |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            used |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Attribute | ast.Name):
            used.add(ast.unparse(node))
    return {name for name in used if "jaxpr" in name or f"{name}.".startswith(tuple(f"{m}." for m in MACHINERY))}


def test_machinery_is_in_one_folder():
    package = pathlib.Path(jax_rnnt.__file__).parent
    folder = package / "_xla"
    found = {path: machinery_in(path.read_text()) for path in package.rglob("*.py")}
    assert any(found[path] for path in folder.glob("*.py"))
    assert not {path.name: names for path, names in found.items() if names and path.parent != folder}


@pytest.mark.parametrize(
    "line",
    [
        "import jax.extend",
        "from jax.interpreters import ad",
        "from jax import ffi",
        "jax.ffi.include_dir()",
        "jax.make_jaxpr(f)",
    ],
)
def test_machinery_is_found(line):
    assert machinery_in(f"import jax\n{line}")
