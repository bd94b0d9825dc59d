"""Every public name must be in the API reference: one that is not fails the build (warnings are errors)."""

import importlib
import inspect

MODULES = (
    "jax_rnnt",
    "jax_rnnt.decode",
    "jax_rnnt.emissions",
    "jax_rnnt.flax.linen",
    "jax_rnnt.flax.nnx",
    "jax_rnnt.lattices",
    "jax_rnnt.metrics",
    "jax_rnnt.plot",
    "jax_rnnt.timing",
)


def public(module):
    """What `__all__` says, or every name without an underscore."""
    module = importlib.import_module(module)
    members = {name: x for name, x in vars(module).items() if not name.startswith("_") and not inspect.ismodule(x)}
    return sorted(getattr(module, "__all__", members))


def check(app, env):
    from sphinx.util import logging  # tests of the list do without

    documented = env.get_domain("py").objects
    for module in MODULES:
        for name in public(module):
            if f"{module}.{name}" not in documented:
                logging.getLogger(__name__).warning("%s.%s is public and not in docs/api.md", module, name)


def setup(app):
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
