"""Packages that only a part of the library needs."""

import contextlib


@contextlib.contextmanager
def needed_by(module: str, extra: str):
    """Within, a failing import says which extra of jax_rnnt brings the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{module} needs {error.name}: pip install 'jax_rnnt[{extra}]'"
        raise ModuleNotFoundError(message, name=error.name) from None
