"""Is the site whole? Every page is reached, every public name is in the reference; `make docs` builds it."""

import importlib.util
import posixpath
import re

import pytest

import project

DOCS = project.ROOT / "docs"
PAGES = {
    path.relative_to(DOCS).as_posix().removesuffix(".md")
    for path in DOCS.rglob("*.md")
    if not {"_build", "api"} & set(path.relative_to(DOCS).parts)
}


def _trees(page):
    """The pages that the toctrees of a page name."""
    text = (DOCS / f"{page}.md").read_text()
    lines = [
        line for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, re.M | re.S) for line in block.split("\n")
    ]
    folder = posixpath.dirname(page)
    return [posixpath.normpath(posixpath.join(folder, line)) for line in lines if re.match(r"[\w/]", line)]


def test_every_page_is_in_one_toctree():
    named = [child for page in PAGES for child in _trees(page)]
    assert sorted([*named, "index"]) == sorted(PAGES)


def test_llms_txt_names_every_page():
    """Each with a line of its own, by its address, under the title that it has."""
    lines = re.findall(r"^- \[(.+)\]\((.+)\.html\): (.+)$", (DOCS / "llms.txt").read_text(), re.M)
    titles = {page: title for title, page, _ in lines}
    assert set(titles) == PAGES and len(titles) == len(lines)
    for page, title in titles.items():
        text = (DOCS / f"{page}.md").read_text()
        head = re.search(r"^# (.+)$", text, re.M)  # of an included file: none
        assert head is None or title == head[1], page


def _reference():
    """The names that the API page summarises or describes."""
    found = []
    for block in re.findall(r"^```\{eval-rst\}\n(.*?)^```$", (DOCS / "api.md").read_text(), re.M | re.S):
        module = re.search(r"^\.\. currentmodule:: (\S+)$", block, re.M)[1]
        found += [f"{module}.{name}" for name in re.findall(r"^(?:   |\.\. py:data:: )([A-Za-z][\w.]*)$", block, re.M)]
    return found


def test_every_public_name_is_in_the_reference():
    for package in ("flax", "matplotlib", "praatio", "rapidfuzz"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("public_names", DOCS / "_ext/public_names.py")
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    public = [f"{module}.{name}" for module in names.MODULES for name in names.public(module)]
    assert sorted(_reference()) == sorted(public)


def test_readme_links_lead_to_pages():
    """The README is read where relative links lead nowhere: all are addresses, of the site or the repository."""
    text = (project.ROOT / "README.md").read_text()
    assert {link[:8] for link in re.findall(r"\]\((.+?)\)", text)} == {"https://"}
    files = re.findall(r"jax-rnnt/jax_rnnt/(?:(?:blob|tree)/)?main/([\w./]+)", text)
    assert len(files) > 3 and [file for file in files if not (project.ROOT / file).exists()] == []
    pages = re.findall(r"\(https://jax-rnnt\.github\.io/jax_rnnt/dev/([\w/]*?)(?:\.html)?(?:#[\w-]+)?\)", text)
    assert len(pages) > 10 and {page or "index" for page in pages} <= PAGES


def test_links_into_the_repository_lead_to_files():
    """The build makes addresses of them, and does not look."""
    for page in PAGES:
        for link in re.findall(r"\]\((\.\./[^)#]*)", (DOCS / f"{page}.md").read_text()):
            assert (DOCS / f"{page}.md").parent.joinpath(link).exists(), (page, link)
