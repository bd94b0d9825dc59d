"""Programs in processes of their own, which import the same package and the tests' modules."""

import os
import pathlib
import subprocess
import sys

import project


def environment(**variables):
    """With buffers, so that lines of two processes stay whole."""
    path = os.pathsep.join([str(project.HERE), *filter(None, sys.path)])
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": path, "PYTHONUNBUFFERED": ""}
    return os.environ | settings | {"JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0"} | variables


def start(program, *arguments, **options):
    """A Python process of the program's text, its file, or the options of Python."""
    command = [str(program)] if isinstance(program, pathlib.Path) else ["-c", program]
    options = {"cwd": project.HERE, "env": environment(), "stdout": subprocess.PIPE, "text": True, **options}
    return subprocess.Popen([sys.executable, *command, *map(str, arguments)], stderr=subprocess.PIPE, **options)


def run(program, *arguments, timeout=300, **options):
    """Standard output of a program that must end well."""
    with start(program, *arguments, **options) as process:
        try:
            out, error = process.communicate(timeout=timeout)
        finally:
            process.kill()
    assert process.returncode == 0, f"exit {process.returncode}\n{out}{error}"
    return out
