"""Configuration of Sphinx: `make docs`."""

import importlib
import inspect
import os
import pathlib
import re
import sys

from docutils.nodes import literal
from sphinx.domains.python import PythonDomain
from sphinx.errors import SphinxError
from sphinx.util.inspect import stringify_signature

import jax_rnnt

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "_ext")]
os.environ.setdefault("MPLBACKEND", "agg")
import pictures  # noqa: E402
import public_names  # noqa: E402

PUBLIC = [getattr(importlib.import_module(x), name) for x in public_names.MODULES for name in public_names.public(x)]

project = "jax_rnnt"
author = "The jax_rnnt developers"
project_copyright = author
release = jax_rnnt.__version__
version = ".".join(release.split(".")[:2])
SITE = "https://jax-rnnt.github.io/jax_rnnt"  # assumed: lab/release/README.md
REPOSITORY = "https://github.com/jax-rnnt/jax_rnnt"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "public_names", "mathml"]
exclude_patterns = ["_build", "_ext", "_templates", "jupyter_execute"]
templates_path = ["_templates"]
html_extra_path = ["llms.txt"]

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
html_math_renderer = "mathml"  # drawn by the browser itself: the pages need no network
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have shapes too
numpydoc_show_class_members = False
default_role = "name_or_code"

html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme = "sphinx_book_theme"
html_title = f"jax_rnnt {release}"
html_theme_options = {
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "path_to_docs": "docs",
    "use_source_button": True,
    "use_repository_button": True,
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "article_footer_items": [],
    "footer_content_items": ["copyright"],
    "navbar_persistent": [],  # the search is in the sidebar
}
html_context = {"default_mode": "auto"}
if "SITE_VERSION" in os.environ:  # among other versions (lab/release/site.py); a build by itself needs no network
    html_theme_options |= {
        "switcher": {"json_url": f"{SITE}/versions.json", "version_match": os.environ["SITE_VERSION"]},
        "check_switcher": False,
        "primary_sidebar_end": ["version-switcher"],
    }
linkcheck_anchors = False


def files_of_the_repository(app, docname, source):
    """Links that leave docs/ lead into the repository, as they do where the page is read there."""
    up = "../" * (docname.count("/") + 1)
    source[0] = source[0].replace(f"]({up}", f"]({REPOSITORY}/blob/main/")


def name_or_code(role, raw, text, *context, **options):
    """A docstring's `name` links to where it is documented; any other `code` is literal."""
    if re.fullmatch(r"[A-Za-z_][\w.]*", text):
        return PythonDomain.roles["obj"]("py:obj", raw, text, *context, **options)
    return [literal(raw, text)], []


def fields_of_tuples(app, what, name, member, skip, options):
    """The fields of a NamedTuple stand in the docstring of the class."""
    return (inspect.getdoc(member) or "").startswith("Alias for field number") or None


def is_private(base):
    """Is it a class of the library without a page here?"""
    return base.__module__.startswith("jax_rnnt") and base not in PUBLIC


def public_bases(app, name, obj, options, bases):
    bases[:] = [base for base in bases if not is_private(base) and base is not object] or [object]


def methods_of_others(app, what, name, member, skip, options):
    """Functions of other libraries in fields, and what a private base asks of its subclasses, which is as private."""
    module = getattr(member, "__module__", None) or "jax_rnnt"
    if name == "setup" or (callable(member) and not module.startswith("jax_rnnt")):
        return True
    place, _, method = getattr(member, "__qualname__", "").rpartition(".")
    owner = vars(sys.modules.get(module, jax_rnnt)).get(place)
    return (inspect.isclass(owner) and any(method in vars(x) for x in owner.__mro__ if is_private(x))) or None


def signature_of_modules(app, what, name, obj, options, signature, annotation):
    """The metaclass of NNX hides the arguments of its modules."""
    if what == "class" and signature == "(*args, **kwargs)":
        _, *parameters = inspect.signature(obj.__init__).parameters.values()
        return stringify_signature(inspect.Signature(parameters), show_annotation=False), annotation
    return None


def usable_offline(app, error):
    """Pages take no script, picture or style from another site."""
    if error is None and app.builder.name == "html" and "SITE_VERSION" not in os.environ:
        for page in pathlib.Path(app.outdir).rglob("*.html"):
            if found := re.search(r"<(script|img|link)\b[^>]*\b(src|href)=\"(https?:)?//[^>]*>", page.read_text()):
                raise SphinxError(f"{page.name} needs the network: {found[0]}")


def draw(app):
    pictures.draw(HERE / "pictures")


def setup(app):
    app.connect("builder-inited", draw)
    app.add_role("name_or_code", name_or_code)
    app.connect("source-read", files_of_the_repository)
    app.connect("build-finished", usable_offline)
    app.connect("autodoc-skip-member", fields_of_tuples)
    app.connect("autodoc-skip-member", methods_of_others)
    app.connect("autodoc-process-bases", public_bases)
    app.connect("autodoc-process-signature", signature_of_modules)
