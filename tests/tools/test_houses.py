"""Who lives where: what library, speech, recipes and lab import, and what pages and scripts name."""

import ast
import re
import sys

import pytest

from project import ROOT

LIBRARY, SPEECH, RECIPES = "jax_rnnt", "speech/jax_rnnt_speech", "speech/recipes"
# What each may import of the others.
HOUSES = {
    LIBRARY: set(),
    SPEECH: {LIBRARY},
    RECIPES: {LIBRARY, SPEECH},
    "benchmarks": {LIBRARY},
    "tests": {LIBRARY, "benchmarks"},
    "lab": {LIBRARY, SPEECH, RECIPES, "benchmarks", "tests"},
}


def names(houses):
    """Those by which they are imported: of a package its own, else also those of the files."""
    folders = [ROOT / house for house in houses]
    files = {path.stem for x in folders if not (x / "__init__.py").exists() for path in x.rglob("*.py")}
    return files | {x.name for x in folders}


def imports(path):
    """The absolute imports of a file: (module, names)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module, [alias.name for alias in node.names]


@pytest.mark.parametrize("house", HOUSES)
def test_imports(house):
    """A house imports those that it may; speech and recipes have public names of the library alone."""
    if not (ROOT / house).exists():
        pytest.skip(f"no {house} beside the tests")
    known = HOUSES[house] | {house}
    strangers = names(HOUSES.keys() - known) - names(known) - sys.stdlib_module_names
    for path in sorted((ROOT / house).rglob("*.py")):
        for module, imported in imports(path):
            assert module.split(".")[0] not in strangers, f"{path.relative_to(ROOT)} imports {module}"
            if house in (SPEECH, RECIPES) and module.split(".")[0] == LIBRARY:
                private = [x for x in (*module.split("."), *imported) if x.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {private} of {module}"


# The rooms of a house: a module imports those of its own and of earlier ones. Files beside them are in no room.
ROOMS = {
    LIBRARY: ("_xla", "emissions", "lattices", "tiles", "layouts", "sharding", "losses", "timing", "decode", "flax"),
    SPEECH: (
        "system", "config", "data", "model", "recognition", "runs", "pretrained", "models", "export", "training",
        "serving", "cli",
    ),
}  # fmt: skip


@pytest.mark.parametrize("house", ROOMS)
def test_rooms(house):
    folder, rooms = ROOT / house, ROOMS[house]
    if not folder.exists():
        pytest.skip(f"no {house} beside the tests")
    found = set()
    for path in folder.rglob("*.py"):
        room = path.relative_to(folder).parts[0].removesuffix(".py")
        if room not in rooms:
            assert path.parent == folder, f"{path.relative_to(ROOT)} is in no room"
            continue
        found.add(room)
        for module, imported in imports(path):
            package, *inner = module.split(".")
            for other in (inner[:1] or imported) if package == folder.name else ():
                if other in rooms or house == SPEECH:
                    assert rooms.index(other) <= rooms.index(room), f"{path.relative_to(ROOT)} imports {module}"
    assert found == {*rooms}


# The layers of its data, likewise; none is imported within a function.
LAYERS = (
    "names", "utterances", "rows", "lists", "headers", "features", "audio", "spelling", "tokens", "texts",
    "workers", "cache", "archives", "index", "augmentation", "sources", "corpora", "buckets", "batches",
    "order", "loading", "memory", "source",
)  # fmt: skip


def test_layers_of_data():
    folder = ROOT / SPEECH / "data"
    if not folder.exists():
        pytest.skip("no speech beside the tests")
    for path in sorted(folder.rglob("*.py")):
        layer, tree = path.relative_to(folder).parts[0].removesuffix(".py"), ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("jax_rnnt_speech.data"):
                where = f"{path.relative_to(ROOT)} imports {node.module}"
                assert node in tree.body, f"{where} within a function"
                for other in node.module.split(".")[2:3] or [alias.name for alias in node.names]:
                    assert LAYERS.index(other) <= LAYERS.index(layer), where


NAMES = re.compile(
    r"(?<![\w/.])((?:benchmarks|lab|recipes|speech|tests|xla_kernels)/[\w./]*)(?:\{([\w,]+)\})?([\w./]*\.(?:cu|json|py|sh|txt))\b"
)


def test_commands_in_the_text():
    """Pages and scripts name files and targets of make that are there."""
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert len(targets) <= 12
    pages = "[!C]*.md CONTRIBUTING.md docs/*.md docs/[!_]*/*.md */README.md */recipes/*.md lab/**/[!D]*.md lab/**/*.sh"
    for page in (path for pattern in [*pages.split(), ".ci/run"] for path in ROOT.glob(pattern)):
        text = page.read_text()
        names = [f"{head}{x}{tail}" for head, group, tail in NAMES.findall(text) for x in group.split(",")]
        assert [name for name in names if not (ROOT / name).exists()] == [], page.name
        assert set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", text, re.M)) <= targets, page.name
