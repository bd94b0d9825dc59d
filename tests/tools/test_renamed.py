"""Former public names work, and their warning names the new one."""

import sys
import types

import pytest

from jax_rnnt import _renamed


@_renamed.argument(old="new")
def function(x, *, new=0):
    return x + new


class Value:
    new = 5
    old = _renamed.attribute("old", "new")


def test_a_former_name_warns_and_works(monkeypatch):
    module = types.ModuleType("renamed_module")
    module.new = 3
    module.__getattr__ = _renamed.names("renamed_module", {"old": "new"})
    monkeypatch.setitem(sys.modules, "renamed_module", module)
    with pytest.warns(
        DeprecationWarning, match=r"renamed_module\.old is deprecated, use renamed_module\.new"
    ) as caught:
        assert module.old == 3
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="function: the argument old is deprecated, use new"):
        assert function(1, old=2) == 3
    with pytest.warns(DeprecationWarning, match=r"Value\.old is deprecated, use Value\.new"):
        assert Value().old == 5
    assert function(1, new=2) == 3  # without a warning, which would be an error here


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _renamed.names("renamed_module", {"old": "new"})("other")
    with pytest.raises(TypeError, match="old is the former name of new"):
        function(1, old=1, new=2)
