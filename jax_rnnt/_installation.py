"""Explains why an extension module is missing, and names the command that brings it back."""

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import sys
import sysconfig
import types
import warnings

import jax

_PACKAGE = pathlib.Path(__file__).parent
_CURES = {  # by words in the reason that the build's note gives
    "C++ compiler": "install one (Debian, Ubuntu: apt install g++) and run",
    "wheel without kernels": "to build them, install a C++ compiler (Debian, Ubuntu: apt install g++) and run",
    "CUDA kernels": "put nvcc on the PATH and run",
}


def extension(module: str) -> types.ModuleType:
    """Imports an extension module. A clone that was never built takes the module of an installed copy."""
    name = f"{__package__}.{module}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        never_built = error.name == name not in sys.modules and not (_PACKAGE / "_build.py").exists()
        file = _installed_file(module) if never_built else None
        spec = file and importlib.util.spec_from_file_location(name, file)
        if not spec or not spec.loader:
            raise
        loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded


def explain(platform: str, module: str, error: ImportError) -> str:
    """Returns why `module` of this package, with the kernels of `platform`, could not be imported, and the remedy."""
    name = f"{__package__}.{module}"
    if not (isinstance(error, ModuleNotFoundError) and error.name == name):  # it exists but does not load
        return f"the extension module {name} cannot be imported ({error}); run `{reinstall(platform)}`"
    try:
        note = importlib.import_module(f"{__package__}._build")
    except ImportError:
        return f"the source folder {_PACKAGE.parent} was not built; run `pip install -e {_PACKAGE.parent}`"
    if reason := note.MISSING[platform].replace("{interpreter}", _interpreter()):
        cure = next((cure for words, cure in _CURES.items() if words in reason), "run")
        return f"{reason}: {cure} `{reinstall(platform)}`"
    return f"the extension module {name} was built and is gone ({error}); run `{reinstall(platform)}`"


def _interpreter() -> str:
    """Returns what a wheel depends on, such as "CPython 3.14t (linux-x86_64)"; the t means that there is no GIL."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return f"{platform.python_implementation()} {version} ({sysconfig.get_platform()})"


def _distribution() -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(__package__)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_file(module: str) -> pathlib.Path | None:
    """Returns the extension module of another copy of this package, for this interpreter."""
    distribution, names = _distribution(), [module + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    for file in (distribution and distribution.files) or ():
        path = pathlib.Path(str(file.locate()))
        here = path.parent.resolve() == _PACKAGE.resolve()
        if file.parent.name == __package__ and file.name in names and path.is_file() and not here:
            return path
    return None


def reinstall(platform: str = "cpu") -> str:
    """Returns the command that builds this copy again, from where it came; a wheel or the index: from source."""
    distribution = _distribution()
    origin = json.loads((distribution and distribution.read_text("direct_url.json")) or "{}")
    source = f"--no-binary {__package__} {__package__}"
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        source = editable + origin["url"].removeprefix("file://")
    elif "vcs_info" in origin:
        source = f"{origin['vcs_info']['vcs']}+{origin['url']}"
    option = "-Ccmake.define.JAX_RNNT_CUDA=on " if platform == "cuda" else ""
    return f"pip install --force-reinstall --no-deps --no-cache-dir {option}{source}"


def warn(message: str) -> None:
    """Warns at the user's line: the nearest frame outside this package, JAX and imports. It is a RuntimeWarning."""
    inner = ("<frozen importlib", *(f"{folder}{os.sep}" for folder in (_PACKAGE, *jax.__path__)))
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inner):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, RuntimeWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry)
