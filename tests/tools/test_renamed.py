"""Former public names, as the library lists them, work and warn, at the line that uses them."""

import contextlib
import importlib
import inspect
import re

import pytest

import jax_rnnt
import project
from jax_rnnt import _renamed, emissions, lattices

MODULES = "decode", "emissions", "lattices", "plot", "timing"
INSTANCES = jax_rnnt.RNNTLoss(), emissions.Softmax((0,), num_durations=2)


def closed_over(x):
    """Variables of a closure of `_renamed`, or nothing."""
    code = getattr(x, "__code__", None)
    return inspect.getclosurevars(x).nonlocals if code and code.co_filename == _renamed.__file__ else {}


def former():
    """(what has a former name, that name, the new one): modules, functions and classes, instances."""
    for module in (jax_rnnt, *(importlib.import_module(f"jax_rnnt.{name}") for name in MODULES)):
        for old, new in closed_over(vars(module).get("__getattr__")).get("renamed", {}).items():
            yield module, old, new
        for x in {x for name, x in vars(module).items() if callable(x) and name[0] != "_"}:
            names = closed_over(x.__init__ if inspect.isclass(x) else x)
            yield from ((x, old, new) for old, new in names.get("renamed", {}).items())
    for x in INSTANCES:
        for _, value in inspect.getmembers_static(type(x), lambda y: isinstance(y, property)):
            if names := closed_over(value.fget):
                yield x, names["old"], names["new"]


def use(x, old, new):
    """Of a callable, the argument; of others the attribute, which must be the same as the new one."""
    if not (inspect.isclass(x) or inspect.isfunction(x)):
        assert getattr(x, old) == getattr(x, new)
        return
    parameters = inspect.signature(x.__init__ if inspect.isclass(x) else x).parameters
    assert new in parameters and old not in parameters
    with contextlib.suppress(TypeError, ValueError):  # other arguments are missing
        x(**{old: None})


def test_every_former_name():
    """The former name warns, and the new one is that of the changelog, which lists no others. That arguments arrive is
    tested below."""
    pytest.importorskip("matplotlib")  # of jax_rnnt.plot
    text = (project.ROOT / "CHANGELOG.md").read_text()
    table = re.search(r"\| old \| new \|\n\|[-|]+\|\n((?:\|.*\n)+)", text)[1]
    unseen = rows = [line.split("|")[1:3] for line in table.splitlines()]
    for x, old, new in former():
        with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated, use .*{new}"):
            use(x, old, new)
        mapped = [row for row in rows if all(re.search(rf"\b{name}\b", row[i]) for i, name in enumerate((old, new)))]
        assert mapped, (x, old, new)
        unseen = [row for row in unseen if row not in mapped]
    assert unseen == []


@_renamed.argument(old="new")
def function(*, new):
    return new


def test_the_warning_is_of_the_callers_line():
    with pytest.warns(DeprecationWarning, match=r"function: the argument old is deprecated, use new") as caught:
        assert function(old=1) == 1
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"jax_rnnt\.lattices\.durations is deprecated, use .*") as caught:
        assert lattices.durations
    assert caught[0].filename == __file__


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _renamed.names("renamed_module", {"old": "new"})("other")
    with pytest.raises(TypeError, match="old is the former name of new"):
        function(old=1, new=2)
