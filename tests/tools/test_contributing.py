"""Do the commands of CONTRIBUTING.md run what they say, on this checkout?"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

import jax_rnnt
from project import ROOT

COMMANDS = [
    line.split("#")[0].split() for line in re.findall(r"(?m)^    (\S.*)$", (ROOT / "CONTRIBUTING.md").read_text())
]


def test_bare_pytest_tests_the_checkout():
    """However pytest was called, and whatever is installed. JAX_RNNT_INSTALLED alone names another package."""
    assert pathlib.Path(jax_rnnt.__file__).parents[1] == pathlib.Path(os.environ.get("JAX_RNNT_INSTALLED") or ROOT)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_command(command):
    """Each target has a recipe; each selection of pytest selects tests; each script exists."""
    program, *arguments = command
    if program == "make":
        done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif program.endswith("pytest"):
        collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", *shlex.split(" ".join(arguments))]
        done = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "::" in done.stdout, done.stdout
    else:
        assert (ROOT / (arguments[0] if program == "python3" else program)).is_file()
