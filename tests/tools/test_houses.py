"""Who lives where: what library, speech, recipes and lab import, and what pages and scripts name."""

import ast
import re
import sys

import pytest

from losses import ROOT

LIBRARY, SPEECH = "jax_rnnt", "jax_rnnt_speech"
# What each may import of the packages, beside itself.
HOUSES = {
    "jax_rnnt": set(),
    "speech/jax_rnnt_speech": {LIBRARY},
    "recipes": {LIBRARY, SPEECH},
    "benchmarks": {LIBRARY},
    "tests": {LIBRARY},
    "lab": {LIBRARY, SPEECH},
}


def modules(*houses):
    """The names by which programs import the files of these folders."""
    return {path.stem for house in houses for path in (ROOT / house).rglob("*.py")}


def imports(path):
    """The absolute imports of a file: (module, names)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module, [alias.name for alias in node.names]


@pytest.mark.parametrize("house", HOUSES)
def test_imports(house):
    """A house imports the packages that it may, and nothing of the lab; speech and recipes have public names alone."""
    if not (ROOT / house).exists():
        pytest.skip(f"no {house} beside the tests")
    strangers = {LIBRARY, SPEECH} - HOUSES[house] - {house.rpartition("/")[2]}
    if house != "lab":
        strangers |= {"lab"} | modules("lab") - modules(house, "benchmarks", "tests") - sys.stdlib_module_names
    for path in sorted((ROOT / house).rglob("*.py")):
        for module, names in imports(path):
            assert module.split(".")[0] not in strangers, f"{path.relative_to(ROOT)} imports {module}"
            if house in ("speech/jax_rnnt_speech", "recipes") and module.startswith(LIBRARY):
                private = [x for x in (*module.split("."), *names) if x.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {private} of {module}"


NAMES = re.compile(
    r"(?<![\w/.])((?:benchmarks|lab|recipes|speech|tests|xla_kernels)/[\w./]*)(?:\{([\w,]+)\})?([\w./]*\.(?:cu|json|py|sh|txt))\b"
)


def test_commands_in_the_text():
    """Pages and scripts name files and targets of make that are there."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert len(targets) <= 12
    pages = "[!C]*.md", "CONTRIBUTING.md", "docs/*.md", "docs/[!_]*/*.md", "*/README.md", "lab/**/*.sh", ".ci/run"
    for page in (path for pattern in pages for path in ROOT.glob(pattern)):
        text = page.read_text()
        names = [f"{head}{x}{tail}" for head, group, tail in NAMES.findall(text) for x in group.split(",")]
        assert [name for name in names if not (ROOT / name).exists()] == [], page.name
        assert set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.M)) <= targets, page.name
