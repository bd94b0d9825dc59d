"""Does every public function put its name before what the checks inside refuse, once, and before nothing else?

A refusal (`_checks.bad_value`, `_checks.bad_type`, `Refusal`) has no name until a function decorated by `keywords` or
`in_name_of` adds its own. The source tells which functions a refusal can leave without one: none of them is public.
"""

import ast
import concurrent.futures
import copy
import dataclasses
import functools
import importlib
import inspect
import pathlib
import pickle
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import jax_rnnt
from jax_rnnt import JointLogits, RNNTLoss, decode, emissions, lattices, metrics, rnnt_loss, timing

pytestmark = pytest.mark.no_kernel
PACKAGE = pathlib.Path(jax_rnnt.__file__).parent
MAKES = {"bad_value", "bad_type", "Refusal"}
NAMES = {"keywords", "in_name_of", "in_class", "method"}
OPTIONAL = {"jax_rnnt.flax.nnx", "jax_rnnt.flax.linen", "jax_rnnt.plot", "jax_rnnt.metrics"}
# What a loss calls of its layout and its emission, and no user does.
INNER = {"checked", "sequences", "emission", "split_arrays", "specs", "resolved"}
OF_FILES = {"read"}  # methods of Python's own objects too


def last(node):
    """The last name of an expression: of `x.y(z)`, of `x.y` and of `y`."""
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", None))


def is_named(node):
    return any(last(x) in NAMES for x in node.decorator_list)


class Source:
    """A module: its functions by their qualified names, and what its imports mean."""

    def __init__(self, path):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.functions, self.imported, self.modules = {}, {}, {"self": None}
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for x in node.names:
                    self.imported[x.asname or x.name] = node.module, x.name
            elif isinstance(node, ast.Import):
                self.modules |= {x.asname or x.name.partition(".")[0]: x.name for x in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                constructors = "__init__", "__post_init__"
                methods = [x for x in node.body if isinstance(x, ast.FunctionDef)]
                methods = [x for x in methods if not (is_named(node) and x.name in constructors)]
                self.functions |= {f"{node.name}.{x.name}": x for x in methods}


SOURCES = {x.name: x for x in map(Source, sorted(PACKAGE.rglob("*.py"))) if x.name != "jax_rnnt._keywords"}
METHODS: dict[str, set] = {}
for _source in SOURCES.values():
    for _name in _source.functions:
        if "." in _name:
            METHODS.setdefault(_name.partition(".")[2], set()).add((_source.name, _name))
PUBLIC = "", *(f".{x}" for x in ("decode", "emissions", "lattices", "layouts", "losses", "sharding", "tiles", "timing"))


def used(node, called=False):
    """(name or attribute, whether it is called) in a function, but not in a `with in_name_of(...)`."""
    if isinstance(node, ast.With) and any(last(x.context_expr) in NAMES for x in node.items):
        return
    if isinstance(node, ast.Attribute | ast.Name):
        yield node, called
    for child in ast.iter_child_nodes(node):
        yield from used(child, isinstance(node, ast.Call) and child is node.func)


def meant(source, node, called):
    """Functions (module, qualified name) that a name or attribute may be; a method is any one of its name."""
    if isinstance(node, ast.Name):
        module, name = source.imported.get(node.id, (source.name, node.id))
    elif isinstance(node.value, ast.Name) and node.value.id in source.modules and node.value.id != "self":
        module, name = source.modules[node.value.id], node.attr
    elif isinstance(node.value, ast.Name) and ".".join(source.imported.get(node.value.id, ())) in SOURCES:
        module, name = ".".join(source.imported[node.value.id]), node.attr
    elif not called or node.attr in OF_FILES:
        return set()
    else:
        return METHODS.get(node.attr, set())
    while module in SOURCES and name in SOURCES[module].imported:
        module, name = SOURCES[module].imported[name]
    known = SOURCES[module].functions if module in SOURCES else {}
    return {(module, x) for x in (name, f"{name}.__init__", f"{name}.__post_init__") if x in known}


def refusing():
    """Functions that a refusal can leave without a name."""
    calls, found = {}, set()
    for source in SOURCES.values():
        for name, function in source.functions.items():
            if not is_named(function):
                nodes = [x for part in function.body for x in used(part)]
                calls[source.name, name] = set().union(*(meant(source, *x) for x in nodes))
                if MAKES & {last(x) for x, _ in nodes}:
                    found.add((source.name, name))
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return found


def public_functions():
    """(module, qualified name) of the functions, methods and properties that users call."""
    for name in (*(f"jax_rnnt{x}" for x in PUBLIC), *OPTIONAL):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            assert name in OPTIONAL
            continue
        names = getattr(module, "__all__", [x for x in vars(module) if not x.startswith("_")])
        for x in (y for y in (getattr(module, z) for z in names) if inspect.isclass(y) or inspect.isfunction(y)):
            for base in x.__mro__ if inspect.isclass(x) else [x]:
                of_class = SOURCES[base.__module__].functions if base.__module__ in SOURCES else {}
                for place in of_class:
                    owner, _, method = place.rpartition(".")
                    inner = method in INNER or (method[:1] == "_" and method[-2:] != "__")
                    if place == base.__qualname__ or (owner == base.__qualname__ and not inner):
                        yield base.__module__, place


def test_every_public_function_names_itself():
    public, found = set(public_functions()), refusing()
    assert len(public) > 100
    assert ("jax_rnnt._checks", "positive") in found and ("jax_rnnt.layouts._layout", "ArrayLogits.checked") in found
    assert public & found == set()


# ----------------------------------------------------------------------------------------------------- what users see
P = batches.problem(2, 3, 2, 5)
LENGTHS = P.logit_lengths, P.target_lengths
SAID = "targets must have an integer dtype, got float32."
OPTION = "blank must be an integer known at trace time, got 1.5."
ROWS = "encoder_out must have shape [B, T, E] (at least 3 dimensions), got shape (2, 5)."
PREDICTOR = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 5)), 1, start=0)
SEARCH = decode.Search(RNNTLoss(0), jnp.add, PREDICTOR, max_labels=2)


class Own(RNNTLoss):
    """Without a constructor of its own."""


class Handed(RNNTLoss):
    def __init__(self, **options):
        super().__init__(**options)


class OwnSearch(decode.Search):
    pass


def wrong(logits=P.logits, loss=rnnt_loss):
    return loss(logits, np.zeros(P.targets.shape, np.float32), *LENGTHS)


@jax.custom_vjp
def wrong_backward(x):
    return x.sum()


wrong_backward.defvjp(lambda x: (x.sum(), x), lambda x, _: (x * wrong(x).sum(),))
JOINT = JointLogits(lambda encoder, predictor: wrong() * encoder, P.logits[:, :, 0], P.logits[:, 0])
SHARD = {"in_specs": jax.sharding.PartitionSpec("x"), "out_specs": jax.sharding.PartitionSpec("x")}

# The whole message of what refuses here, wherever it is called.
REFUSED = {
    f"rnnt_loss: {SAID}": {
        "itself": wrong,
        "jit": lambda: jax.jit(wrong)(P.logits),
        "grad": lambda: jax.grad(lambda x: wrong(x).sum())(P.logits),
        "scan": lambda: jax.lax.scan(lambda carry, x: (carry, wrong(x)), 0, P.logits[None]),
        "remat": lambda: jax.grad(jax.checkpoint(lambda x: wrong(x).sum()))(P.logits),
        "backward pass": lambda: jax.grad(wrong_backward)(P.logits),
        "shard_map": lambda: jax.shard_map(wrong, mesh=jax.sharding.Mesh(jax.devices()[:1], "x"), **SHARD)(P.logits),
        "thread": lambda: concurrent.futures.ThreadPoolExecutor(1).submit(wrong).result(),
        "joint of a loss": lambda: RNNTLoss().align(JOINT, P.targets, *LENGTHS),
        "joint by itself": lambda: JOINT.shape,
        "joint of a search": lambda: dataclasses.replace(SEARCH, joint=JOINT.joint).greedy(
            P.logits[:, :, 0], LENGTHS[0]
        ),
        "function of rows": lambda: jax_rnnt.sum_over_nodes(
            lambda rows: wrong(), P.logits, logit_lengths=LENGTHS[0], target_lengths=LENGTHS[1]
        ),
        "words": lambda: metrics.word_confidence([1], np.zeros(1), 1, lambda labels: wrong()),
    },
    f"RNNTLoss: {SAID}": {"call": lambda: wrong(loss=RNNTLoss())},
    f"RNNTLoss.align: {SAID}": {"method": lambda: wrong(loss=RNNTLoss().align)},
    f"Own: {SAID}": {"call": lambda: wrong(loss=Own())},
    f"Own.validate: {SAID}": {"of its class": lambda: wrong(loss=functools.partial(RNNTLoss.validate, Own()))},
    f"rnnt_loss: {OPTION}": {"option": lambda: rnnt_loss(*P, blank=1.5)},
    f"Own: {OPTION}": {"made": lambda: Own(blank=1.5), "replaced": lambda: dataclasses.replace(Own(), blank=1.5)},
    f"Handed: {OPTION}": {"made": lambda: Handed(blank=1.5)},
    f"greedy: {ROWS}": {
        "verb": lambda: SEARCH.greedy(P.logits[0, 0, :2], LENGTHS[0]),
        "of a subclass": lambda: OwnSearch(RNNTLoss(0), jnp.add, PREDICTOR, 2).greedy(P.logits[0, 0, :2], LENGTHS[0]),
    },
    "Search: max_labels must be 1 or more, got 0.": {"made": lambda: OwnSearch(RNNTLoss(0), jnp.add, PREDICTOR, 0)},
    "Arc: may_end must be True or False, got 1.": {"made": lambda: lattices.Arc("blank", 1, 0, 1)},
    "Softmax: normalize must be True or False, got 1.": {"made": lambda: emissions.Softmax((0,), 1)},
    "mwer_loss: nll must be an array, got None.": {"function": lambda: jax_rnnt.mwer_loss(None, None)},
    "intervals: hop must be a positive number of seconds, got 0.0.": {
        "function": lambda: timing.intervals([1], ["a"], hop=0)
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_named_once(message):
    for place, call in REFUSED[message].items():
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        error = caught.value
        assert str(error) == message, place
        assert type(error) in (TypeError, ValueError) and [type(x) for x in error.args] == [str]
        assert error.__cause__ is None or "JaxStackTrace" in type(error.__cause__).__name__, place
        for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert (type(other), other.args) == (type(error), error.args)


def test_errors_of_others_stay():
    """The same object, with its message and its notes, from any function that a user hands over."""
    error = ValueError("targets must be kinder")
    error.add_note("A note of its own.")

    def fails(*_):
        raise error

    class Fails(RNNTLoss):
        compose = fails

    predictor = decode.Predictor(lambda batch: (), fails, 0)
    frames = P.logits[:, :, 0]
    for call in (
        lambda: Fails()(*P),
        lambda: RNNTLoss()(JointLogits(fails, frames, P.logits[:, 0]), *P[1:]),
        lambda: dataclasses.replace(SEARCH, predictor=predictor).beam(frames, LENGTHS[0], 2),
        lambda: dataclasses.replace(SEARCH, fusion=((predictor, 1.0),)).greedy(frames, LENGTHS[0]),
        lambda: decode.predict(predictor, P.targets),
        lambda: metrics.word_confidence([1], np.zeros(1), 1, fails),
        lambda: timing.words([1], [1], fails, hop=1.0),
    ):
        with pytest.raises(ValueError, match=r"^targets must be kinder") as caught:
            call()
        assert caught.value is error and error.args == ("targets must be kinder",)
        assert error.__notes__[0] == "A note of its own."


class TraceContextError(Exception):
    """Has the name of that of Flax NNX."""


def test_causes_stay():
    def changes(*_):
        raise TraceContextError

    logits = JointLogits(changes, P.logits[:, :, 0], P.logits[:, 0])
    search = dataclasses.replace(SEARCH, joint=changes)
    calls = {"JointLogits": lambda: logits.shape, "greedy": lambda: search.greedy(logits.encoder_out, LENGTHS[0])}
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name}: joint must not change anything, got .*changes") as caught:
            call()
        assert isinstance(caught.value.__cause__, TraceContextError)
    with pytest.raises(ValueError, match=r"^rnnt_loss: clamp must be a number that a float holds") as caught:
        rnnt_loss(*P, clamp=10**400)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_traceback_ends_at_the_check():
    """Nothing is raised a second time: no other error stands before this one, and no frame twice."""
    with pytest.raises(TypeError) as caught:
        wrong()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert caught.value.__context__ is None and frames[-1].name == "integral"
    assert len({(frame.filename, frame.lineno) for frame in frames}) == len(frames)
