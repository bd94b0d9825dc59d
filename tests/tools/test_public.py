"""Are the public names the promised ones, documented, and shaped as users of other libraries expect?"""

import copy
import dataclasses
import doctest
import importlib
import inspect
import pathlib
import pickle
import re
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import family
import jax_rnnt
import project
from pages import defaults

PACKAGE = pathlib.Path(jax_rnnt.__file__).parent
OPTIONAL = ("flax", "matplotlib", "rapidfuzz")  # packages of extras


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
MODULES = {
    "decode", "emissions", "flax", "lattices", "layouts", "losses", "metrics", "plot", "sharding", "tiles", "timing",
}  # fmt: skip


def test_names():
    """Those of `__all__`, which are the pages of the reference: docs/_ext/public_names.py."""
    public = {name for name in vars(jax_rnnt) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(jax_rnnt, name))}
    assert public - modules == set(jax_rnnt.__all__) and modules <= MODULES
    files = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.parts[len(PACKAGE.parts)] != "_xla"}
    found = {path.parts[0].removesuffix(".py") for path in files if not path.parts[0].startswith("_")}
    assert found == MODULES  # a stranger tells public from private by the path
    inner = {path for path in files if len(path.parts) > 1 and not path.name.startswith("_")}
    assert inner == {pathlib.Path("flax/nnx.py"), pathlib.Path("flax/linen.py")}
    assert isinstance(jax_rnnt.__version__, str)


def test_names_that_stand_elsewhere():
    for module, name, place in (
        ("jax_rnnt", "Search", "jax_rnnt.decode.Search"),
        ("jax_rnnt", "rnnt_loss_pruned", r"RNNTLoss\(\)\(BandLogits"),
        ("jax_rnnt.flax", "Joint", r"jax_rnnt.flax.nnx.Joint or jax_rnnt.flax.linen.Joint"),
    ):
        with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}': use {place}"):
            exec(f"from {module} import {name}", {})
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        getattr(jax_rnnt, "noth" + "ing")
    assert jax_rnnt.timing is importlib.import_module("jax_rnnt.timing")


def undocumented(function):
    """What the docstring lacks of numpydoc sections with every parameter, and an example."""
    doc = inspect.getdoc(function)
    sections = [line for line, under in zip(doc.splitlines(), doc.splitlines()[1:]) if under and set(under) == {"-"}]
    parameters = set(inspect.signature(function).parameters)
    if parameters == {"args", "kwargs"}:  # an NNX module
        parameters = set(inspect.signature(function.__init__).parameters)
    parameters -= {"self", "parent", "name", "_", "__"}  # of every Linen module; of a class that a file makes
    if parameters and "Parameters" not in sections:
        yield "Parameters"
    elif parameters:
        block = doc.split("Parameters\n----------\n")[1]
        block = re.split(r"\n[\w ]+\n-+\n", block)[0]
        names = (line.split(" : ")[0] for line in block.splitlines() if line[:1].strip())  # at the margin
        names = {name.strip(" *") for line in names for name in line.split(",")}
        if "options" in names:  # "Those of `TransducerLoss`."
            others = {x for x in inspect.signature(jax_rnnt.TransducerLoss).parameters if x not in names}
            parameters = {"options"} | parameters - others
        yield from sorted(parameters ^ names)
    if not inspect.isclass(function) and not function.__name__.startswith("write_"):
        yield from {"Returns"} - set(sections)
    yield from {"Examples"} - set(sections)
    if not doc.splitlines()[0].endswith((".", ":")):
        yield "the end of the first sentence"


def test_docstrings():
    found = {name: list(undocumented(function)) for name, function in FUNCTIONS.items()}
    assert len(found) > 40 and {name: x for name, x in found.items() if x} == {}


EXAMPLES = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")) if "    >>> " in path.read_text()]
METHODS = {pathlib.Path(f"losses/{name}.py") for name in ("_methods", "_validation")}
EXAMPLES = [path for path in EXAMPLES if path not in METHODS]  # theirs run with the class in losses/_base.py


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_examples_in_docstrings(path, tmp_path, monkeypatch):
    """They run as written, in JAX's default configuration."""
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(".".join(["jax_rnnt", *path.with_suffix("").parts]))
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    with defaults():
        found = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted and not found.failed


def test_losses_are_pytrees():
    """Numbers are leaves, all other fields are structure. A new number compiles nothing, a new structure does."""
    p = batches.problem()
    loss = jax_rnnt.TDTLoss([2, 0, 1], sigma=0.5)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(loss)}
    assert paths == {".clamp", ".fastemit_lambda", ".delay_penalty", ".sigma", ".omega"}
    assert jax.tree.map(lambda x: x, loss) == loss and jax.tree.map(lambda x: None, loss).durations == (2, 0, 1)
    run = jax.jit(chex.assert_max_traces(lambda loss, p: loss(*p), n=1))
    expected = [family.RNNT.expected(p, delay_penalty=x)[0].mean() for x in (0.0, 0.5)]
    for penalty in (0.5, np.float32(0.5)):
        np.testing.assert_allclose(run(jax_rnnt.RNNTLoss(delay_penalty=penalty), p), expected[1], rtol=1e-12)
    run(jax_rnnt.RNNTLoss(delay_penalty=0.25), p)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        run(jax_rnnt.RNNTLoss(blank=0), p)
    stacked = jax.tree.map(lambda *x: np.stack(x), *(jax_rnnt.RNNTLoss(delay_penalty=x) for x in (0.0, 0.5)))
    np.testing.assert_allclose(jax.vmap(lambda loss: loss(*p))(stacked), expected, rtol=1e-12)


def test_a_loss_is_a_value():
    """Frozen, hashable, equal by value, picklable, and printed with the fields that differ from their default."""
    criterion = jax_rnnt.HATLoss(0, variant="monotonic")
    with pytest.raises(dataclasses.FrozenInstanceError):
        criterion.blank = 1
    assert repr(criterion) == "HATLoss(blank=0, variant='monotonic')" and repr(jax_rnnt.RNNTLoss()) == "RNNTLoss()"
    for twin in (eval(repr(criterion), vars(jax_rnnt)), pickle.loads(pickle.dumps(criterion)), copy.copy(criterion)):
        assert twin == criterion != jax_rnnt.HATLoss() and hash(twin) == hash(criterion)  # static arguments of jit
    assert dataclasses.replace(criterion, blank=2).blank == 2


def test_losses_with_arrays():
    """Arrays compare by content, without warning or error; a tracer equals only itself."""
    penalty = np.array(0.5)
    bound = jax_rnnt.RNNTLoss(delay_penalty=penalty)
    for other in (penalty.copy(), jnp.asarray(penalty)):
        assert bound == jax_rnnt.RNNTLoss(delay_penalty=other) != jax_rnnt.RNNTLoss(delay_penalty=other + 1)
    with pytest.raises(TypeError, match="unhashable"):
        hash(jax_rnnt.RNNTLoss(delay_penalty=jnp.asarray(penalty)))

    class Weighted(jax_rnnt.RNNTLoss):  # a field of a subclass may have any shape
        weights: jax.Array | np.ndarray | float

    one = Weighted(weights=np.array([1.0, 2.0]))
    assert one == Weighted(weights=jnp.array([1.0, 2.0]))
    for other in (np.array([1.0, 3.0]), np.array([1.0]), np.array([1.0, 2.0, 2.0]), 1.0):
        assert one != Weighted(weights=other) and Weighted(weights=other) != one

    @jax.jit
    def compare(x):
        mine = jax_rnnt.RNNTLoss(delay_penalty=x)
        assert mine == jax_rnnt.RNNTLoss(delay_penalty=x) and mine != bound
        return x

    compare(penalty)


ERRORS = [
    (lambda: COMPOSITION(None), "Composition: emission must be an emissions.Softmax"),
    (lambda: COMPOSITION(SOFTMAX, ()), "Composition: topology must be .* at least one"),
    (lambda: COMPOSITION(SOFTMAX, steps=(None,)), "Composition: steps must be"),
    (lambda: jax_rnnt.emissions.Softmax((0, 1)), "one slot for each blank"),
    (lambda: jax_rnnt.emissions.Softmax((0,), slots=("label",)), "or 'label'"),
    (lambda: jax_rnnt.emissions.Softmax((0, 1), slots=("blank", "more"), bernoulli=True), "one blank"),
    (lambda: jax_rnnt.emissions.Softmax((0,), num_durations=-1), "durations of 0 or more"),
    (
        lambda: jax_rnnt.emissions.Softmax((0,), normalize=False, bernoulli=True),
        "normalize must be True with bernoulli",
    ),
    (lambda: own(COMPOSITION(SOFTMAX, MISSPELT)), r"Own.compose\(\): .*'label', 'lable'\], got \['blank', 'label'\]"),
    (lambda: own(COMPOSITION(SOFTMAX, steps=(cut,))), r"Own.*'label' must have shape .*\(4, 7, 5\).*got \(4, 7, 4\)"),
    (lambda: own(3), r"Own.compose\(\) must return a Composition, got 3"),
    (lambda: own(COMPOSITION(jax_rnnt.emissions.Softmax((9,)))), "Own: blank must lie in"),
    (lambda: jax_rnnt.TransducerLoss()(*batches.problem()), r"must define compose\(\)"),
]
SOFTMAX, COMPOSITION = jax_rnnt.emissions.Softmax((0,)), jax_rnnt.Composition
MISSPELT = (*jax_rnnt.lattices.STANDARD, jax_rnnt.lattices.Arc("lable", 0, 1))


def cut(planes, *_):
    return planes | {"label": planes["label"][..., :-1]}


def own(composition):
    """The value of a loss of one's own."""

    class Own(jax_rnnt.TransducerLoss):
        def compose(self):
            return composition

    return Own()(*batches.problem())


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:20] for _, message in ERRORS])
def test_errors_of_a_loss_of_ones_own(call, message):
    """A slot without a plane, a plane of another shape and a wrong result are named."""
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        call()


def test_machinery_is_in_one_folder():
    """Internals of JAX, and all that has "jaxpr" in its name."""
    machinery = r"jax\.(_src|extend|ffi|interpreters)|from jax import .*\b(extend|ffi|interpreters)|^[^#\"]*jaxpr"
    found = {path for path in PACKAGE.rglob("*.py") if re.search(machinery, path.read_text(), re.M)}
    assert {path.parent.name for path in found} == {"_xla"}


def test_all_dataclasses_are_frozen():
    """Values of the package may be shared, be static arguments of jit and be keys."""
    modules = [vars(x) for name, x in sys.modules.items() if name.split(".")[0] == "jax_rnnt"]
    found = {x for names in modules for x in names.values() if isinstance(x, type) and dataclasses.is_dataclass(x)}
    classes = {x for x in found if re.match(r"jax_rnnt\b(?!\.flax)", x.__module__)}  # modules of Flax are not frozen
    assert {jax_rnnt.RNNTLoss, jax_rnnt.losses._adjustments.UnderNormalize} <= classes
    assert [x for x in classes if not x.__dataclass_params__.frozen] == []


@pytest.mark.parametrize("page", ["README.md", "docs/losses.md", "docs/api.md"])
def test_pages_that_list_the_losses(page):
    path = project.ROOT / page
    if not path.exists():
        pytest.skip(f"no {page} beside the tests")
    losses = {name for name in jax_rnnt.__all__ if name.endswith("Loss")} - {"TransducerLoss"}
    assert losses - {*re.findall(r"\w+", path.read_text())} == set()


def test_versions_in_the_text():
    """Pages name the glibc, the JAX and the Python that the wheels and the package ask for."""
    root = project.ROOT
    if not (root / "lab/release/wheels.py").exists():
        pytest.skip("no lab beside the tests")
    wheels, pyproject = (root / "lab/release/wheels.py").read_text(), (root / "pyproject.toml").read_text()
    glibc = ".".join(re.search(r"^GLIBC = \((\d+), (\d+)\)", wheels, re.M).groups())
    python = re.search(r'requires-python = ">=([\d.]+)"', pyproject)[1]
    oldest = re.search(r'dependencies = \["jax>=([\d.]+)"', pyproject)[1]
    for page in [root / "README.md", *(root / "docs").glob("*.md"), *(root / "docs/speech").glob("*.md")]:
        text = " ".join(page.read_text().split())
        assert set(re.findall(r"manylinux_(\d+_\d+)", text)) <= {glibc.replace(".", "_")}, page.name
        assert set(re.findall(r"glibc (\d\.\d+) or later", text)) <= {glibc}, page.name
        assert set(re.findall(r"(?i:jax) (\d+\.\d+\.\d+) to the newest", text)) <= {oldest}, page.name
        assert set(re.findall(r"Python (\d\.\d+) and later", text)) <= {python}, page.name
