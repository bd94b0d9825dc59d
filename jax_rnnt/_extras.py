"""Optional dependencies, and hints for names that are in another module."""

import contextlib
import importlib


@contextlib.contextmanager
def needed_by(module: str, extra: str):
    """Makes an import that fails within it say which extra of jax_rnnt brings the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{module} needs {error.name}: pip install 'jax_rnnt[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from None


def lookup(module: str, submodules: tuple[str, ...], elsewhere: dict[str, str]):
    """Returns a module's `__getattr__`: imports submodules on demand, and says where a name is that users seek in it.

    That is an ImportError, since Python drops the text of an AttributeError in ``from module import name``.
    """

    def __getattr__(name):
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name in elsewhere:
            raise ImportError(f"cannot import name {name!r} from {module!r}: use {elsewhere[name]}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

    return __getattr__
