"""The warning of a former name points to the line that uses it; losses/test_former_names.py has the names."""

import pytest

from jax_rnnt import _renamed, lattices


@_renamed.argument(old="new")
def function(*, new):
    return new


def test_the_warning_is_of_the_callers_line():
    with pytest.warns(DeprecationWarning, match=r"jax_rnnt\.lattices\.durations is deprecated, use .*") as caught:
        assert lattices.durations
    assert caught[0].filename == __file__


def test_other_names_are_errors():
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _renamed.names("renamed_module", {"old": "new"})("other")
    with pytest.raises(TypeError, match="old is the former name of new"):
        function(old=1, new=2)
