"""Who lives where: what library, speech, recipes and lab import, and the files and commands that pages name."""

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


def test_commands_in_the_text():
    """Pages and docstrings name programs and targets of make that are there."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert len(targets) <= 12
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("[!.]*/README.md"), ROOT / ".ci/run"]:
        text = page.read_text() if page.name != "CHANGELOG.md" else ""
        for name in re.findall(
            r"\b(?<!/)(?:benchmarks|lab|recipes|tests|speech)/[\w/]+\.(?:py|sh|cu|c|txt|json)\b", text
        ):
            assert (ROOT / name).exists(), f"{page.name}: {name}"
        for target in re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.M):
            assert target in targets, f"{page.name}: make {target}"
